//! Signals that end the program: the first gracefully, the second at once.

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Sender;
use std::{io, thread};

/// Turns SIGTERM and SIGINT into events; one more of them ends the process at once, with status 1.
///
/// # Errors
/// If the system refuses to tell of them.
pub(crate) fn watch<E: Send + 'static>(events: &Sender<E>, event: fn(i32) -> E) -> io::Result<()> {
    let was_asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // In this order: the first signal finds the flag unset, and sets it.
        flag::register_conditional_shutdown(signal, 1, was_asked.clone())?;
        flag::register(signal, was_asked.clone())?;
    }
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let events = events.clone();
    thread::spawn(move || {
        for signal in signals.forever() {
            if events.send(event(signal)).is_err() {
                return;
            }
        }
    });
    Ok(())
}

/// A write beyond the limit of a file's size fails like any other that finds no room; it does not end the process.
pub(crate) fn outlive_file_limit() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(|_| ())
}
