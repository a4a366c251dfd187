//! Waiting for the kernel or a program that tells nobody when it is done.

use std::thread;
use std::time::{Duration, Instant};

/// Asks until there is an answer; `None` if there is none within `time`.
pub fn wait_for<T>(time: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + time;
    loop {
        if let Some(answer) = ask() {
            return Some(answer);
        }
        if Instant::now() >= deadline {
            return None;
        }
        thread::park_timeout(POLL);
    }
}

const POLL: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_come_in_time_is_missing() {
        assert_eq!(wait_for(Duration::ZERO, || None::<()>), None);
        let mut asked = 0;
        let answer = wait_for(Duration::from_secs(60), || {
            asked += 1;
            (asked == 3).then_some(asked)
        });
        assert_eq!(answer, Some(3));
    }
}
