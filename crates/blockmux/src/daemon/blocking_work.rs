//! Work that may hang in a system call: opening a path on a network file system without its server,
//! or connecting to a server that does not answer.
//!
//! It runs on a thread of its own, without a lock, and its caller waits with a deadline. See
//! docs/decisions/0067-queries-take-no-lock-that-a-change-holds.md.

use crate::failure::Failure;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Starts blocking work and waits for it. Clones share the limit and the stop.
#[derive(Clone, Default)]
pub(super) struct BlockingWork {
    /// Number of threads whose work has not ended.
    running: Arc<AtomicUsize>,
    is_stopping: Arc<AtomicBool>,
}

impl BlockingWork {
    /// Runs `work`, which `what` names in messages, and waits for its result. After an error the
    /// work may still be running; then its result is dropped when it ends.
    ///
    /// # Errors
    /// If it does not end within [`TIMEOUT`], the daemon stops, or [`MAX_RUNNING`] others run.
    pub(super) fn run<T: Send + 'static>(
        &self,
        what: impl Display,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        if self.running.fetch_add(1, Ordering::AcqRel) >= MAX_RUNNING {
            self.running.fetch_sub(1, Ordering::AcqRel);
            return Err(Failure::run(format!(
                "{what}: {MAX_RUNNING} earlier operations hang in file systems or servers; repair those first"
            )));
        }
        let (sender, result) = mpsc::channel();
        let running = RunningWork(self.running.clone());
        let run = move || {
            let done = work();
            drop(running);
            // The receiver is gone after the timeout.
            let _ = sender.send(done);
        };
        let started = thread::Builder::new().name("blocking".to_owned()).spawn(run);
        started.map_err(|error| Failure::run(format!("{what}: cannot start a thread: {error}")))?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match result.recv_timeout(POLL) {
                Ok(done) => return Ok(done),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::run(format!("{what}: failed; the daemon's log has the reason")));
                }
                Err(RecvTimeoutError::Timeout) if self.is_stopping.load(Ordering::Acquire) => {
                    return Err(Failure::run(format!("{what}: the daemon stops before it is done")));
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() >= deadline => {
                    let seconds = TIMEOUT.as_secs();
                    return Err(Failure::run(format!(
                        "{what}: hangs for {seconds} s; find out why its file system or server does not answer, then \
                         try again"
                    )));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Ends all waits, because the daemon stops.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
    }
}

/// Counts work until it ends, also by a panic.
struct RunningWork(Arc<AtomicUsize>);

impl Drop for RunningWork {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Time for work. A remote volume with several portals may take more than a minute.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum number of threads whose work has not ended.
const MAX_RUNNING: usize = 64;
/// Interval of checks whether the daemon stops.
const POLL: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_hangs_is_left_behind_when_the_daemon_stops_and_is_limited_in_number() {
        let blocking = BlockingWork::default();
        assert_eq!(blocking.run("a", || 5).unwrap(), 5);
        let panicked: Result<(), Failure> = blocking.run("b", || panic!("injected by a test"));
        assert_eq!(panicked.unwrap_err().to_string(), "b: failed; the daemon's log has the reason");
        blocking.stop();
        let mut gates = Vec::new();
        for _ in 0..MAX_RUNNING {
            let (gate, closed) = mpsc::channel::<()>();
            let hanging = blocking.run("c", move || closed.recv().is_ok());
            assert_eq!(hanging.unwrap_err().to_string(), "c: the daemon stops before it is done");
            gates.push(gate);
        }
        let refused = blocking.run("d", || ()).unwrap_err().to_string();
        assert!(refused.starts_with("d: 64 earlier operations hang"), "{refused}");
        drop(gates);
    }
}
