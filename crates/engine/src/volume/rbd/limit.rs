//! Calls of the libraries that may block for ever.

use blockmux_proto::volume_state::Transition;
use blockmux_rbd::error::{Errno, RbdError};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// What a call has until it has returned, also if its caller does not wait any longer.
pub(super) trait HeldByCall: Clone + Send + 'static {
    /// Whether the caller is to wait.
    fn is_wanted(&self) -> bool;
}

impl HeldByCall for () {
    fn is_wanted(&self) -> bool {
        true
    }
}

/// Counts the calls that have not returned.
impl HeldByCall for Arc<()> {
    fn is_wanted(&self) -> bool {
        true
    }
}

impl HeldByCall for Transition {
    fn is_wanted(&self) -> bool {
        self.is_current()
    }
}

/// Makes a call that may block for ever on a thread. The caller gives it up after `limit`, or when
/// it is not wanted any longer, and does not keep what it uses then. What succeeds after that is
/// undone by `undo`. `held` is dropped when both have returned.
pub(super) fn within<T: Send + 'static>(
    limit: Duration,
    call: impl FnOnce() -> Result<T, RbdError> + Send + 'static,
    undo: impl FnOnce(T) + Send + 'static,
    held: impl HeldByCall,
) -> Result<T, RbdError> {
    let (sender, result) = mpsc::channel();
    // The first of the two to clear it decides whether the result is received.
    let is_open = Arc::new(AtomicBool::new(true));
    let (is_awaited, wanted) = (is_open.clone(), held.clone());
    let no_answer = || RbdError::NoAnswer(limit);
    let run = move || {
        let made = call();
        if is_awaited.swap(false, Ordering::SeqCst) {
            drop(held);
            // The caller waits for it.
            let _ = sender.send(made);
        } else {
            if let Ok(made) = made {
                undo(made);
            }
            drop(held);
        }
    };
    // Nothing was asked.
    let no_thread = |_| RbdError::Call { call: "a new thread", error: Errno(libc::EAGAIN) };
    thread::Builder::new().name("rbd call".to_owned()).spawn(run).map_err(no_thread)?;
    let end = Instant::now() + limit;
    let given_up = || match wanted.is_wanted() {
        _ if Instant::now() >= end => Some(no_answer()),
        true => None,
        false => Some(RbdError::GivenUp),
    };
    loop {
        let left = end.saturating_duration_since(Instant::now());
        match (result.recv_timeout(left.min(LOOK_EVERY)), given_up()) {
            (Ok(made), _) => return made,
            (Err(RecvTimeoutError::Timeout), None) => {}
            (Err(_), why) if is_open.swap(false, Ordering::SeqCst) => {
                return Err(why.unwrap_or_else(no_answer));
            }
            (Err(_), _) => return result.recv().unwrap_or_else(|_| Err(no_answer())),
        }
    }
}

/// The cluster loses a killed client, which may have the lock, after half a minute.
pub(super) const LIMIT: Duration = Duration::from_secs(90);
/// Time between two looks whether a call is still wanted.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    impl HeldByCall for mpsc::Sender<()> {
        fn is_wanted(&self) -> bool {
            true
        }
    }

    impl HeldByCall for Arc<AtomicBool> {
        fn is_wanted(&self) -> bool {
            self.load(Ordering::SeqCst)
        }
    }

    #[test]
    fn a_call_that_hangs_is_given_up_when_it_is_not_wanted_any_longer() {
        let (answer, answered) = mpsc::channel::<()>();
        let (undone, is_undone) = mpsc::channel();
        let is_wanted = Arc::new(AtomicBool::new(true));
        let given_up = is_wanted.clone();
        let call = move || {
            given_up.store(false, Ordering::SeqCst);
            answered.recv().unwrap();
            Ok(())
        };
        let made = within(LIMIT, call, move |()| undone.send(()).unwrap(), is_wanted);
        assert!(matches!(made, Err(RbdError::GivenUp)));
        answer.send(()).unwrap();
        is_undone.recv().unwrap();
    }

    #[test]
    fn what_succeeds_after_the_limit_is_undone_before_what_is_held_ends() {
        let (answer, answered) = mpsc::channel::<u32>();
        let (undone, is_undone) = mpsc::channel();
        let (held, has_ended) = mpsc::channel::<()>();
        let call = move || Ok(answered.recv().unwrap_or_default());
        let undo = move |made| undone.send(made).unwrap();
        let given_up = within(Duration::ZERO, call, undo, held);
        assert!(matches!(given_up, Err(RbdError::NoAnswer(Duration::ZERO))));
        assert_eq!(has_ended.try_recv(), Err(mpsc::TryRecvError::Empty));
        answer.send(7).unwrap();
        assert!(has_ended.recv().is_err());
        assert_eq!(is_undone.try_recv(), Ok(7));
        let in_time = within(LIMIT, || Ok(8), |_| panic!("it is awaited"), ());
        assert_eq!(in_time.ok(), Some(8));
    }
}
