//! Signals that end the program: the first gracefully, the second at once.

use crate::process::privileges;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use signal_hook::low_level::raise;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fs, io, thread};

/// Converts SIGTERM, SIGINT and SIGHUP to events. A second one ends the process at once with status
/// 1 and removes the directories of [`remove_at_exit`]. Signals of `repeatable` are events each
/// time and do not end the process.
///
/// A SIGHUP that is ignored at the start, as under nohup, stays ignored.
///
/// # Errors
/// If the signal handlers cannot be installed.
pub(crate) fn watch<E: Send + 'static>(
    events: &Sender<E>,
    repeatable: &'static [i32],
    event: fn(i32) -> E,
) -> io::Result<()> {
    let was_asked = Arc::new(AtomicBool::new(false));
    let watched = if is_ignored(SIGHUP) { &[SIGTERM, SIGINT][..] } else { &[SIGTERM, SIGINT, SIGHUP] };
    for &signal in watched.iter().filter(|signal| !repeatable.contains(signal)) {
        // A third signal ends the process even if the removal hangs.
        flag::register_conditional_shutdown(signal, 1, was_asked.clone())?;
    }
    let mut signals = Signals::new(watched)?;
    let events = events.clone();
    thread::spawn(move || {
        privileges::drop_all_capabilities();
        let mut signals = signals.forever();
        let mut is_asked = false;
        for signal in &mut signals {
            let ends = !repeatable.contains(&signal);
            if ends && std::mem::replace(&mut is_asked, true) {
                was_asked.store(true, Ordering::Release);
                temporary_directories().drain(..).for_each(|directory| drop(fs::remove_dir_all(directory)));
                // The next signal of this kind ends the process at once.
                let _ = raise(signal);
                return;
            }
            // The receiver may have ended for another reason.
            let _ = events.send(event(signal));
        }
    });
    Ok(())
}

/// Lets SIGTERM, SIGINT and SIGHUP do nothing, in a process that ends with another one.
///
/// # Errors
/// If the signal handlers cannot be installed.
pub(crate) fn ignore_stops() -> io::Result<()> {
    [SIGTERM, SIGINT, SIGHUP]
        .into_iter()
        .try_for_each(|signal| flag::register(signal, Arc::default()).map(drop))
}

/// Registers a temporary directory of this process, which is removed if a second signal ends it.
pub(crate) fn remove_at_exit(directory: &Path) {
    temporary_directories().push(directory.to_owned());
}

fn temporary_directories() -> MutexGuard<'static, Vec<PathBuf>> {
    TEMPORARY_DIRECTORIES.lock().unwrap_or_else(PoisonError::into_inner)
}

static TEMPORARY_DIRECTORIES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Whether the process ignores a signal; false if that cannot be determined.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    // The lowest bit is signal 1.
    mask >> (signal - 1) & 1 == 1
}

/// Ignores SIGXFSZ, so that a write beyond the file size limit fails instead of ending the process.
pub(crate) fn outlive_file_limit() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(|_| ())
}
