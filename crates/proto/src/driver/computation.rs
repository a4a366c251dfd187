//! Computations that take milliseconds, such as those of public-key cryptography, and that peers
//! cause before they are authenticated. A session starts one and polls its result; a driver that
//! has [`Helpers`] runs it on another thread, so that it delays nobody's I/O.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Where the computations of one session run. Without helpers they run at once.
#[derive(Clone)]
pub struct Helpers {
    /// Runs a job on another thread, or drops it. At most one job of a session is outstanding.
    pub run: RunJob,
    /// Wakes the session, from any thread.
    pub notify: Arc<dyn Fn() + Send + Sync>,
}

/// Runs a job on another thread.
pub type RunJob = Arc<dyn Fn(Job) + Send + Sync>;

/// A computation that has not run yet.
pub struct Job {
    /// Alive as long as the session waits for the result.
    result: Weak<dyn Any + Send + Sync>,
    compute: Box<dyn FnOnce() + Send>,
}

impl Job {
    /// Whether its session still waits for the result.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.result.strong_count() > 0
    }

    /// Computes the result and wakes the session, if it still waits.
    pub fn run(self) {
        if self.is_wanted() {
            (self.compute)();
        }
    }
}

/// A computation of a session. Dropping it abandons the job.
#[derive(Debug)]
pub struct Computation<T>(Arc<Mutex<Option<T>>>);

impl<T> Default for Computation<T> {
    /// A computation that never has a result.
    fn default() -> Computation<T> {
        Computation(Arc::default())
    }
}

impl<T: Send + 'static> Computation<T> {
    /// Starts a computation; without helpers, it is done when this returns.
    pub fn start(helpers: Option<&Helpers>, compute: impl FnOnce() -> T + Send + 'static) -> Computation<T> {
        let Some(Helpers { run, notify }) = helpers else {
            return Computation(Arc::new(Mutex::new(Some(compute()))));
        };
        let slot = Arc::new(Mutex::new(None));
        let (result, notify) = (Arc::downgrade(&slot), notify.clone());
        let any: Arc<dyn Any + Send + Sync> = slot.clone();
        let compute = move || {
            let computed = compute();
            if let Some(slot) = result.upgrade() {
                *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(computed);
                notify();
            }
        };
        run(Job { result: Arc::downgrade(&any), compute: Box::new(compute) });
        Computation(slot)
    }

    /// Takes the result, if it is there.
    pub fn take(&mut self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    type Jobs = Arc<Mutex<Vec<Job>>>;

    fn helpers() -> (Helpers, Jobs, Arc<AtomicU32>) {
        let (jobs, notified) = (Jobs::default(), Arc::new(AtomicU32::new(0)));
        let (queue, count) = (jobs.clone(), notified.clone());
        let run = Arc::new(move |job| queue.lock().unwrap().push(job));
        let notify = Arc::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        (Helpers { run, notify }, jobs, notified)
    }

    #[test]
    fn a_result_arrives_with_a_notification() {
        let (helpers, jobs, notified) = helpers();
        let mut computation = Computation::start(Some(&helpers), || 6 * 7);
        assert_eq!((computation.take(), notified.load(Ordering::Relaxed)), (None, 0));
        jobs.lock().unwrap().pop().unwrap().run();
        assert_eq!((computation.take(), notified.load(Ordering::Relaxed)), (Some(42), 1));
    }

    #[test]
    fn an_abandoned_computation_does_not_run() {
        let (helpers, jobs, notified) = helpers();
        drop(Computation::start(Some(&helpers), || panic!("nobody waits for it")));
        let job = jobs.lock().unwrap().pop().unwrap();
        assert!(!job.is_wanted());
        job.run();
        assert_eq!(notified.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn without_helpers_a_session_computes_at_once() {
        assert_eq!(Computation::start(None, || 42).take(), Some(42));
    }
}
