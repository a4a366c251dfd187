//! Work that may hang in a system call: opening a path on a network file system without its server,
//! or connecting to a server that does not answer.
//!
//! It runs on a thread of its own, without a lock, and its caller waits with a deadline. See
//! docs/decisions/0067-queries-take-no-lock-that-a-change-holds.md.

use crate::failure::Failure;
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Starts blocking work and waits for it. Clones share the limit and the stop.
#[derive(Clone)]
pub(super) struct BlockingWork {
    /// Number of threads whose work has not ended.
    running: Arc<AtomicUsize>,
    is_stopping: Arc<AtomicBool>,
    is_closed: Arc<AtomicBool>,
    timeout: Duration,
}

impl Default for BlockingWork {
    fn default() -> BlockingWork {
        let (running, is_stopping, is_closed) = Default::default();
        BlockingWork { running, is_stopping, is_closed, timeout: TIMEOUT }
    }
}

/// Whether somebody waits for blocking work. Work that changes something asks before it does.
#[derive(Clone, Default)]
pub(super) struct Awaited(Arc<Mutex<Progress>>);

#[derive(Default)]
struct Progress {
    is_given_up: bool,
    has_begun: bool,
}

impl Awaited {
    /// Checks that the caller still waits, before a step that is undone if the work is given up.
    ///
    /// # Errors
    /// If the caller has given up; nobody reads the message.
    pub(super) fn check(&self) -> Result<(), Failure> {
        match self.lock().is_given_up {
            true => Err(Failure::run("given up before it began")),
            false => Ok(()),
        }
    }

    /// Checks that the caller still waits, before the effect of the work, which cannot be undone.
    /// From here on the caller reports that it may still happen.
    ///
    /// # Errors
    /// If the caller has given up and has reported that nothing happens.
    pub(super) fn begin(&self) -> Result<(), Failure> {
        let mut progress = self.lock();
        if progress.is_given_up {
            return Err(Failure::run("given up before it began"));
        }
        progress.has_begun = true;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockingWork {
    /// Starts work that has this time instead of [`TIMEOUT`], and shares the limit and the stop.
    pub(super) fn within(&self, timeout: Duration) -> BlockingWork {
        BlockingWork { timeout, ..self.clone() }
    }

    /// Runs `work`, which `what` names in messages and which changes nothing, and waits for its
    /// result. After an error the work may still be running; then its result is dropped when it
    /// ends.
    ///
    /// # Errors
    /// The errors of [`BlockingWork::run_change`].
    pub(super) fn run<T: Send + 'static>(
        &self,
        what: impl Display,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        self.run_change(what, |_| work(), drop)
    }

    /// Runs `work`, which `what` names in messages, and waits for its result. If its caller gives
    /// up after [`Awaited::begin`], `late` gets the result when the work ends.
    ///
    /// # Errors
    /// If it does not end within [`TIMEOUT`], or within [`STOP_TIMEOUT`] while the daemon stops, or
    /// if [`MAX_RUNNING`] others run or [`BlockingWork::close`] was called.
    pub(super) fn run_change<T: Send + 'static>(
        &self,
        what: impl Display,
        work: impl FnOnce(&Awaited) -> T + Send + 'static,
        late: impl FnOnce(T) + Send + 'static,
    ) -> Result<T, Failure> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(Failure::run(format!("{what}: another process takes over; try again")));
        }
        if self.running.fetch_add(1, Ordering::AcqRel) >= MAX_RUNNING {
            self.running.fetch_sub(1, Ordering::AcqRel);
            return Err(Failure::run(format!(
                "{what}: {MAX_RUNNING} earlier operations hang in file systems or servers; repair those first"
            )));
        }
        let (sender, result) = mpsc::channel();
        let (running, awaited) = (RunningWork(self.running.clone()), Awaited::default());
        let its_own = awaited.clone();
        let run = move || {
            let done = work(&its_own);
            drop(running);
            let progress = its_own.lock();
            match *progress {
                Progress { is_given_up: true, has_begun } => {
                    drop(progress);
                    if has_begun {
                        late(done);
                    }
                }
                // The receiver is there until it has given up.
                Progress { is_given_up: false, .. } => drop(sender.send(done)),
            }
        };
        let started = thread::Builder::new().name("blocking".to_owned()).spawn(run);
        started.map_err(|error| Failure::run(format!("{what}: cannot start a thread: {error}")))?;
        let mut deadline = Instant::now() + self.timeout;
        let mut is_stopping = false;
        let reason = loop {
            match result.recv_timeout(POLL) {
                Ok(done) => return Ok(done),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::run(format!("{what}: failed; the daemon's log has the reason")));
                }
                Err(RecvTimeoutError::Timeout)
                    if !is_stopping && self.is_stopping.load(Ordering::Acquire) =>
                {
                    is_stopping = true;
                    deadline = deadline.min(Instant::now() + STOP_TIMEOUT);
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(RecvTimeoutError::Timeout) if is_stopping => {
                    break ("the daemon stops before it is done".to_owned(), "");
                }
                Err(RecvTimeoutError::Timeout) => {
                    let advice = "; find out why its file system or server does not answer, then try again";
                    break (format!("hangs for {} s", self.timeout.as_secs()), advice);
                }
            }
        };
        let mut progress = awaited.lock();
        // It may have ended since.
        if let Ok(done) = result.try_recv() {
            return Ok(done);
        }
        progress.is_given_up = true;
        let (reason, advice) = reason;
        let still = if progress.has_begun { ", and the change may still happen" } else { "" };
        Err(Failure::run(format!("{what}: {reason}{still}{advice}")))
    }

    /// Number of operations that have not ended, of which some may have been given up.
    pub(super) fn running(&self) -> usize {
        self.running.load(Ordering::Acquire)
    }

    /// Shortens all waits to [`STOP_TIMEOUT`], because the daemon stops. A request that has arrived
    /// before is still served, unless its work hangs.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
    }

    /// Begins no further work, because another process takes the volumes over.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
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
/// Time for work while the daemon stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
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
        let mut gates = Vec::new();
        for _ in 0..MAX_RUNNING {
            let (gate, closed) = mpsc::channel::<()>();
            let hanging = blocking.within(Duration::ZERO).run("c", move || closed.recv().is_ok());
            assert!(hanging.unwrap_err().to_string().starts_with("c: hangs for 0 s"));
            gates.push(gate);
        }
        assert_eq!(blocking.running(), MAX_RUNNING);
        let refused = blocking.run("d", || ()).unwrap_err().to_string();
        assert!(refused.starts_with("d: 64 earlier operations hang"), "{refused}");
        drop(gates.pop());
        while blocking.running() == MAX_RUNNING {
            thread::yield_now();
        }
        let (gate, closed) = mpsc::channel::<()>();
        let stopping = blocking.clone();
        let hanging = blocking.run("e", move || {
            stopping.stop();
            closed.recv().is_ok()
        });
        assert_eq!(hanging.unwrap_err().to_string(), "e: the daemon stops before it is done");
        drop((gate, gates));
        while blocking.running() > 0 {
            thread::yield_now();
        }
        assert_eq!(blocking.run("f", || 6).unwrap(), 6);
        blocking.close();
        assert!(
            blocking.run("g", || ()).unwrap_err().to_string().starts_with("g: another process takes over")
        );
    }

    #[test]
    fn work_that_is_given_up_begins_no_effect_and_reports_one_that_it_has_begun() {
        let blocking = BlockingWork { timeout: Duration::from_millis(100), ..BlockingWork::default() };
        for begins_first in [true, false] {
            let (gate, closed) = mpsc::channel::<()>();
            let (sender, late) = mpsc::channel();
            let (ended, has_ended) = mpsc::channel::<()>();
            let work = move |awaited: &Awaited| {
                let _ended = ended;
                let before = begins_first.then(|| awaited.begin());
                let _ = closed.recv();
                before.unwrap_or_else(|| awaited.begin()).is_ok()
            };
            let refused = blocking.run_change("a", work, move |is_done| sender.send(is_done).unwrap());
            let refused = refused.unwrap_err().to_string();
            assert_eq!(refused.contains("and the change may still happen"), begins_first, "{refused}");
            drop(gate);
            assert!(has_ended.recv().is_err());
            assert_eq!(late.recv().ok(), begins_first.then_some(true), "the effect was reported");
        }
    }
}
