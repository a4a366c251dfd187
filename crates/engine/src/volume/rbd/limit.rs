//! Calls of the libraries that may block for ever.

use blockmux_rbd::error::RbdError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

/// Makes a call that may block for ever on a thread. After the limit nobody receives what it
/// returns, which is dropped then.
pub(super) fn within_limit<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, RbdError> + Send + 'static,
) -> Result<T, RbdError> {
    within(LIMIT, call, drop, ())
}

/// Makes a call as [`within_limit`] does. What succeeds after `limit` is undone by `undo`. `held`
/// is dropped when both have returned.
pub(super) fn within<T: Send + 'static>(
    limit: Duration,
    call: impl FnOnce() -> Result<T, RbdError> + Send + 'static,
    undo: impl FnOnce(T) + Send + 'static,
    held: impl Send + 'static,
) -> Result<T, RbdError> {
    let (sender, result) = mpsc::channel();
    // The first of the two to clear it decides whether the result is received.
    let is_open = Arc::new(AtomicBool::new(true));
    let is_awaited = is_open.clone();
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
    thread::Builder::new().name("rbd call".to_owned()).spawn(run).map_err(|_| no_answer())?;
    match result.recv_timeout(limit) {
        Ok(made) => made,
        Err(_) if is_open.swap(false, Ordering::SeqCst) => Err(no_answer()),
        Err(_) => result.recv().unwrap_or_else(|_| Err(no_answer())),
    }
}

/// The cluster loses a killed client, which may have the lock, after half a minute.
pub(super) const LIMIT: Duration = Duration::from_secs(90);

#[cfg(test)]
mod tests {
    use super::*;

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
