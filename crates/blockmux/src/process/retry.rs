//! Retries operations while a killed process still holds sockets or locks.
//!
//! The kernel releases the sockets and locks of a killed process with an io_uring only after it has
//! dismantled the ring, some time after the end of the process. A daemon that is restarted at once
//! must not fail for that.

use std::thread;
use std::time::{Duration, Instant};

/// Retries until success, an error that is not `is_held`, or [`TIMEOUT`].
pub(crate) fn retry_while_held<T, E>(
    mut attempt: impl FnMut() -> Result<T, E>,
    is_held: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let end = Instant::now() + TIMEOUT;
    loop {
        match attempt() {
            Err(error) if is_held(&error) && Instant::now() < end => thread::park_timeout(PAUSE),
            other => return other,
        }
    }
}

/// Timeout of the retries; the kernel needs some tens of milliseconds, more when it is busy.
const TIMEOUT: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_of_held_resources_are_retried() {
        let mut answers = [Err("held"), Err("held"), Ok(5), Err("late")].into_iter();
        let attempt = || answers.next().unwrap();
        assert_eq!(retry_while_held(attempt, |error| *error == "held"), Ok(5));
        let mut answers = [Err("broken"), Ok(5)].into_iter();
        assert_eq!(retry_while_held(|| answers.next().unwrap(), |error| *error == "held"), Err("broken"));
    }
}
