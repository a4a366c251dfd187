//! Signals that end the program: the first gracefully, the second at once.

use crate::privileges;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use signal_hook::low_level::raise;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fs, io, thread};

/// Turns SIGTERM, SIGINT and SIGHUP into events; one more of them ends the process at once, with
/// status 1, and removes what [`leaves`] has named. Signals of `again` are events whenever they
/// come, and end nothing.
///
/// A SIGHUP that whoever started the process has it ignore, as nohup does, stays ignored.
///
/// # Errors
/// If the system refuses to tell of them.
pub(crate) fn watch<E: Send + 'static>(
    events: &Sender<E>,
    again: &'static [i32],
    event: fn(i32) -> E,
) -> io::Result<()> {
    let was_asked = Arc::new(AtomicBool::new(false));
    let watched = if is_ignored(SIGHUP) { &[SIGTERM, SIGINT][..] } else { &[SIGTERM, SIGINT, SIGHUP] };
    for &signal in watched.iter().filter(|signal| !again.contains(signal)) {
        // A third one ends it even if what the second one removes does not go away.
        flag::register_conditional_shutdown(signal, 1, was_asked.clone())?;
    }
    let mut signals = Signals::new(watched)?;
    let events = events.clone();
    thread::spawn(move || {
        privileges::give_up_all();
        let mut signals = signals.forever();
        let mut is_asked = false;
        for signal in &mut signals {
            let ends = !again.contains(&signal);
            if ends && std::mem::replace(&mut is_asked, true) {
                was_asked.store(true, Ordering::Release);
                left().drain(..).for_each(|directory| drop(fs::remove_dir_all(directory)));
                // The next one of the kind ends the process where it arrives.
                let _ = raise(signal);
                return;
            }
            // Whoever hears of it may have ended for another reason.
            let _ = events.send(event(signal));
        }
    });
    Ok(())
}

/// A directory of this process alone, which is removed if it has to end at once.
pub(crate) fn leaves(directory: &Path) {
    left().push(directory.to_owned());
}

fn left() -> MutexGuard<'static, Vec<PathBuf>> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

static LEFT: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Whether the process ignores a signal; not, if the system does not say.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    // The lowest bit is signal 1.
    mask >> (signal - 1) & 1 == 1
}

/// A write beyond the limit of a file's size fails like any other that finds no room; it does not
/// end the process.
pub(crate) fn outlive_file_limit() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(|_| ())
}
