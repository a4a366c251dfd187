//! Waiting for what a killed program holds a little longer.
//!
//! A process that is killed with an io_uring gives its sockets and locks back only when the kernel
//! has taken the ring apart, some time after the process itself is gone. Whoever starts a daemon
//! again at once is not turned away for that.

use std::thread;
use std::time::{Duration, Instant};

/// Tries until it works, fails otherwise than by `is_held`, or [`PATIENCE`] is over.
pub(crate) fn retry_while_held<T, E>(
    mut attempt: impl FnMut() -> Result<T, E>,
    is_held: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let end = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            Err(error) if is_held(&error) && Instant::now() < end => thread::park_timeout(PAUSE),
            other => return other,
        }
    }
}

/// The kernel needs some tens of milliseconds, more when it is busy.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_held_is_tried_again() {
        let mut answers = [Err("held"), Err("held"), Ok(5), Err("late")].into_iter();
        let attempt = || answers.next().unwrap();
        assert_eq!(retry_while_held(attempt, |error| *error == "held"), Ok(5));
        let mut answers = [Err("broken"), Ok(5)].into_iter();
        assert_eq!(retry_while_held(|| answers.next().unwrap(), |error| *error == "held"), Err("broken"));
    }
}
