//! A lock of long work, such as a reload, which one command does at a time. A path may hang
//! meanwhile, so others wait briefly and are then told who does what, and for how long.

use super::config_audit::Caller;
use crate::api::{ApiError, ErrorCode};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The lock of one kind of work; clones share it.
#[derive(Clone, Default)]
pub(super) struct NamedLock(Arc<Holder>);

#[derive(Default)]
struct Holder {
    /// The work under way.
    current: Mutex<Option<WorkStep>>,
    ended: Condvar,
}

/// Holds a lock until it is dropped.
pub(super) struct NamedGuard {
    lock: NamedLock,
    pub(super) step: WorkStep,
}

/// What the holder of a lock is doing, for messages. Clones share it.
#[derive(Clone)]
pub(super) struct WorkStep(Arc<Work>);

struct Work {
    /// The work and its caller.
    title: String,
    now: Mutex<(String, Instant)>,
}

impl NamedLock {
    /// Takes the lock for a command, which waits briefly. `title` names its work in messages.
    ///
    /// # Errors
    /// The errors of [`NamedLock::lock_within`].
    pub(super) fn lock(&self, title: &str, caller: &Caller) -> Result<NamedGuard, ApiError> {
        self.lock_within(title, caller, LOCK_TIMEOUT)
    }

    /// Takes the lock for a command that waits for `timeout`.
    ///
    /// # Errors
    /// If other work is under way for longer; the message says whose, and what it is doing.
    pub(super) fn lock_within(
        &self,
        title: &str,
        caller: &Caller,
        timeout: Duration,
    ) -> Result<NamedGuard, ApiError> {
        self.take(title, caller, timeout).map_err(busy)
    }

    /// Takes the lock for work that has begun already; `None` if others take too long.
    pub(super) fn turn(&self, step: &WorkStep) -> Option<NamedGuard> {
        step.begin("waiting for its turn");
        self.take_for(step.clone(), TURN_TIMEOUT).ok()
    }

    /// Waits until no other work is under way, at most for `timeout`. `title` names this work in
    /// messages.
    ///
    /// # Errors
    /// What is under way, for a message.
    pub(super) fn take(&self, title: &str, caller: &Caller, timeout: Duration) -> Result<NamedGuard, String> {
        self.take_for(WorkStep::new(title, caller), timeout)
    }

    fn take_for(&self, step: WorkStep, timeout: Duration) -> Result<NamedGuard, String> {
        let current = self.current_work();
        let waited = self.0.ended.wait_timeout_while(current, timeout, |current| current.is_some());
        let (mut current, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if let Some(step) = &*current {
            return Err(step.describe());
        }
        *current = Some(step.clone());
        step.begin("beginning");
        Ok(NamedGuard { lock: self.clone(), step })
    }

    /// What is under way, for a message; `None` if nothing is.
    pub(super) fn current(&self) -> Option<String> {
        self.current_work().as_ref().map(WorkStep::describe)
    }

    fn current_work(&self) -> MutexGuard<'_, Option<WorkStep>> {
        self.0.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The refusal of work while other work is under way.
fn busy(under_way: String) -> ApiError {
    ApiError::new(ErrorCode::Busy, format!("{under_way}; try again when it is done"))
}

/// Time for which a command that was overtaken waits for its turn.
const TURN_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for which a command waits for the work before it, which may hang in a path.
pub(super) const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

impl Drop for NamedGuard {
    fn drop(&mut self) {
        *self.lock.current_work() = None;
        self.lock.0.ended.notify_one();
    }
}

impl WorkStep {
    /// The first step of work, which `title` names in messages.
    pub(super) fn new(title: &str, caller: &Caller) -> WorkStep {
        let (title, now) = (format!("{title} from {caller}"), ("beginning".to_owned(), Instant::now()));
        WorkStep(Arc::new(Work { title, now: Mutex::new(now) }))
    }

    /// Begins the next step, such as `opening file:a.img`.
    pub(super) fn begin(&self, what: impl Into<String>) {
        *self.lock() = (what.into(), Instant::now());
    }

    /// The work, its caller, its step, and for how long that has lasted.
    fn describe(&self) -> String {
        let (what, begun) = &*self.lock();
        format!("{} has been {what} for {} s", self.0.title, begun.elapsed().as_secs())
    }

    fn lock(&self) -> MutexGuard<'_, (String, Instant)> {
        self.0.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The present step alone, to name work that hangs.
impl fmt::Display for WorkStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lock().0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_too_long_is_told_what_is_under_way_and_the_next_one_gets_the_lock() {
        let (lock, caller) = (NamedLock::default(), Caller::Signal("SIGHUP"));
        let guard = lock.take("a reload", &caller, Duration::ZERO).unwrap();
        guard.step.begin("opening file:a.img");
        let refused = lock.take("a save", &caller, Duration::ZERO).err().unwrap();
        assert_eq!(refused, "a reload from SIGHUP has been opening file:a.img for 0 s");
        assert_eq!(
            (lock.current(), guard.step.to_string()),
            (Some(refused), "opening file:a.img".to_owned())
        );
        std::thread::scope(|scope| {
            let next = scope.spawn(|| lock.take("a save", &caller, Duration::MAX).map(drop));
            drop(guard);
            assert_eq!(next.join().unwrap(), Ok(()));
        });
        assert_eq!(lock.current(), None);
    }
}
