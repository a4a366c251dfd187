//! Commands that failed for a transient reason, and the time when each is sent again.
//!
//! A controller that knows how long the reason lasts says so in the status: CRD selects one of the
//! Command Retry Delay Times of Identify Controller (Base 2.0 §3.3.3.2.1), which it may use once
//! the host has set ACRE. Without CRD, the delay grows with each retry of a command.

use super::namespace_queue::NvmePiece;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Commands to retry.
#[derive(Default)]
pub(super) struct DelayedCommands {
    waiting: Vec<DelayedPiece>,
    /// Time of the earliest retry.
    next: Option<Instant>,
}

struct DelayedPiece {
    piece: NvmePiece,
    at: Instant,
}

impl DelayedCommands {
    /// Adds a command that has failed, to be retried after `delay` if the controller gave a delay,
    /// at the latest at the end of the time for which it is retried.
    pub(super) fn push(
        &mut self,
        piece: NvmePiece,
        delay: Option<Duration>,
        (now, timeout): (Instant, Duration),
    ) {
        // `tries` counts the attempts so far.
        let times = 1_u32.checked_shl(piece.tries.saturating_sub(1)).unwrap_or(u32::MAX);
        let grown = FIRST_PAUSE.saturating_mul(times);
        let pause = delay.map_or(grown.min(MAX_PAUSE), |delay| delay.min(MAX_CONTROLLER_DELAY));
        let pause = pause.min(timeout.saturating_sub(piece.waited).max(FIRST_PAUSE));
        let at = now.checked_add(pause).unwrap_or(now);
        self.waiting.push(DelayedPiece { piece: piece.after(pause), at });
        self.next = Some(self.next.map_or(at, |next| next.min(at)));
    }

    pub(super) fn clear(&mut self) {
        *self = DelayedCommands::default();
    }

    /// When to call [`DelayedCommands::on_timeout`].
    #[inline]
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.next
    }

    /// Moves the commands that are due to `again`.
    pub(super) fn on_timeout(&mut self, now: Instant, again: &mut VecDeque<NvmePiece>) {
        self.waiting.retain_mut(|waiting| {
            let waits = waiting.at > now;
            if !waits {
                again.push_back(waiting.piece);
            }
            waits
        });
        self.next = self.waiting.iter().map(|waiting| waiting.at).min();
    }
}

/// Delay of the first retry.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const MAX_PAUSE: Duration = Duration::from_millis(500);
/// Longest delay accepted from a controller; CRD could encode almost two hours.
const MAX_CONTROLLER_DELAY: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::super::plan::NvmeCommandKind;
    use super::*;

    fn piece(tries: u32) -> NvmePiece {
        NvmePiece { tries, ..NvmePiece::of_the_queue(NvmeCommandKind::Read) }
    }

    /// The delay of a command.
    fn pause(tries: u32, delay: Option<Duration>) -> Duration {
        let (mut later, mut again, start) = (DelayedCommands::default(), VecDeque::new(), Instant::now());
        later.push(piece(tries), delay, (start, Duration::MAX));
        let at = later.poll_timeout().unwrap();
        later.on_timeout(at.checked_sub(Duration::from_nanos(1)).unwrap(), &mut again);
        assert!(again.is_empty());
        later.on_timeout(at, &mut again);
        assert_eq!((again.len(), later.poll_timeout()), (1, None));
        at.duration_since(start)
    }

    #[test]
    fn delays_grow_unless_the_controller_gives_one() {
        let pauses: Vec<u128> = [1, 2, 3, 9, 64].map(|tries| pause(tries, None).as_millis()).to_vec();
        assert_eq!(pauses, [2, 4, 8, 500, 500]);
        let delay = Duration::from_millis(300);
        assert_eq!((pause(1, Some(delay)), pause(9, Some(delay))), (delay, delay));
        assert_eq!(pause(1, Some(Duration::from_secs(6553))), Duration::from_secs(60));
    }

    #[test]
    fn the_last_retry_is_at_the_end_of_the_time_for_retries() {
        let (mut later, mut again, start) = (DelayedCommands::default(), VecDeque::new(), Instant::now());
        let (timeout, told) = (Duration::from_secs(5), Some(Duration::from_secs(2)));
        let (mut now, mut last) = (start, piece(1));
        while last.waited < timeout {
            later.push(last, told, (now, timeout));
            now = later.poll_timeout().unwrap();
            later.on_timeout(now, &mut again);
            last = again.pop_front().unwrap();
        }
        assert_eq!((last.waited, now.duration_since(start)), (timeout, timeout));
    }

    #[test]
    fn each_command_is_retried_at_its_own_time() {
        let (mut later, mut again, start) = (DelayedCommands::default(), VecDeque::new(), Instant::now());
        let ms = |ms| start.checked_add(Duration::from_millis(ms)).unwrap();
        later.push(piece(5), Some(Duration::from_millis(900)), (start, Duration::MAX));
        later.push(piece(1), None, (ms(100), Duration::MAX));
        assert_eq!(later.poll_timeout(), Some(ms(102)));
        later.on_timeout(ms(102), &mut again);
        assert_eq!(again.pop_front().map(|piece| piece.tries), Some(1));
        assert_eq!((later.poll_timeout(), again.is_empty()), (Some(ms(900)), true));
        later.clear();
        assert_eq!(later.poll_timeout(), None);
    }
}
