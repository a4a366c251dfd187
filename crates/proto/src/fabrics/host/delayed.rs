//! Commands that failed for a reason that passes, and when each of them is sent again.
//!
//! A controller that knows how long the reason lasts says so with the status: CRD names one of the
//! Command Retry Delay Times of Identify Controller (Base 2.0 §3.3.3.2.1), which it may use once
//! the host has set ACRE. Without that, pauses grow with each try of a command.

use super::queue::NvmePiece;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Commands to send again.
#[derive(Default)]
pub(super) struct DelayedCommands {
    waiting: Vec<DelayedPiece>,
    /// When the first of them is sent.
    next: Option<Instant>,
}

struct DelayedPiece {
    piece: NvmePiece,
    at: Instant,
}

impl DelayedCommands {
    /// Sends a command that has failed `now` again: after as long as the controller says, if it
    /// does.
    pub(super) fn push(&mut self, piece: NvmePiece, told: Option<Duration>, now: Instant) {
        // It is the first time that it is sent again, or a later one.
        let times = 1_u32.checked_shl(piece.tries.saturating_sub(1)).unwrap_or(u32::MAX);
        let grown = FIRST_PAUSE.saturating_mul(times);
        let pause = told.map_or(grown.min(LONGEST_PAUSE), |told| told.min(LONGEST_TOLD));
        let at = now.checked_add(pause).unwrap_or(now);
        self.waiting.push(DelayedPiece { piece, at });
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

    /// Moves those whose time has come to `again`.
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

/// The first pause before a command is sent again.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// The longest that a controller is believed; one could say almost two hours.
const LONGEST_TOLD: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::super::plan::NvmeCommandKind;
    use super::*;

    fn piece(tries: u32) -> NvmePiece {
        NvmePiece { tries, ..NvmePiece::of_the_queue(NvmeCommandKind::Read) }
    }

    /// How long a command waits.
    fn pause(tries: u32, told: Option<Duration>) -> Duration {
        let (mut later, mut again, start) = (DelayedCommands::default(), VecDeque::new(), Instant::now());
        later.push(piece(tries), told, start);
        let at = later.poll_timeout().unwrap();
        later.on_timeout(at.checked_sub(Duration::from_nanos(1)).unwrap(), &mut again);
        assert!(again.is_empty());
        later.on_timeout(at, &mut again);
        assert_eq!((again.len(), later.poll_timeout()), (1, None));
        at.duration_since(start)
    }

    #[test]
    fn pauses_grow_unless_the_controller_says_how_long() {
        let pauses: Vec<u128> = [1, 2, 3, 9, 64].map(|tries| pause(tries, None).as_millis()).to_vec();
        assert_eq!(pauses, [2, 4, 8, 500, 500]);
        let told = Duration::from_millis(300);
        assert_eq!((pause(1, Some(told)), pause(9, Some(told))), (told, told));
        assert_eq!(pause(1, Some(Duration::from_secs(6553))), Duration::from_secs(60));
    }

    #[test]
    fn each_command_has_a_time_of_its_own() {
        let (mut later, mut again, start) = (DelayedCommands::default(), VecDeque::new(), Instant::now());
        let ms = |ms| start.checked_add(Duration::from_millis(ms)).unwrap();
        later.push(piece(5), Some(Duration::from_millis(900)), start);
        later.push(piece(1), None, ms(100));
        assert_eq!(later.poll_timeout(), Some(ms(102)));
        later.on_timeout(ms(102), &mut again);
        assert_eq!(again.pop_front().map(|piece| piece.tries), Some(1));
        assert_eq!((later.poll_timeout(), again.is_empty()), (Some(ms(900)), true));
        later.clear();
        assert_eq!(later.poll_timeout(), None);
    }
}
