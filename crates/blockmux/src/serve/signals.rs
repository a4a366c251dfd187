//! Signals that stop the daemon: the first gracefully, the second at once.

use crate::failure::Failure;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Sender;
use std::{io, thread};

/// What ends the daemon.
pub(super) enum Event {
    /// A signal asks for it.
    Signal,
    /// The command of `--run` has ended.
    CommandEnded(io::Result<ExitStatus>),
}

/// Turns the first signal into an event; one more ends the process at once, with status 1.
pub(super) fn watch(events: &Sender<Event>) -> Result<(), Failure> {
    let start = || -> io::Result<Signals> {
        let was_asked = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGINT] {
            // In this order: the first signal finds the flag unset, and sets it.
            flag::register_conditional_shutdown(signal, 1, was_asked.clone())?;
            flag::register(signal, was_asked.clone())?;
        }
        Signals::new([SIGTERM, SIGINT])
    };
    let mut signals = start().map_err(|error| Failure::run(format!("cannot watch for signals: {error}")))?;
    let events = events.clone();
    thread::spawn(move || {
        for _ in signals.forever() {
            if events.send(Event::Signal).is_err() {
                return;
            }
        }
    });
    Ok(())
}
