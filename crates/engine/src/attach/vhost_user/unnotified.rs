//! When to look at a queue again whose guest does not notify.

use crate::core::reactor::PollPolicy;
use std::time::{Duration, Instant};

/// The pauses between looks at an idle queue. Each is twice as long as the one before: a request
/// waits about as long as the queue was idle, and one that stays idle costs little CPU time.
pub(super) struct UnnotifiedPoll {
    pause: Duration,
    longest: Duration,
    /// When the task is woken.
    next: Option<Instant>,
}

impl UnnotifiedPoll {
    /// Pauses for a core with `policy`. One that always polls saves nothing by long ones.
    pub(super) fn new(policy: PollPolicy) -> UnnotifiedPoll {
        let longest = if policy == PollPolicy::Always { SHORTEST_PAUSE } else { LONGEST_PAUSE };
        UnnotifiedPoll { pause: SHORTEST_PAUSE, longest, next: None }
    }

    /// The queue is in use.
    #[inline]
    pub(super) fn on_progress(&mut self) {
        self.pause = SHORTEST_PAUSE;
    }

    /// The task is parked; returns when it is to be woken, unless it will be by then.
    pub(super) fn park(&mut self, now: Instant) -> Option<Instant> {
        let due = now + self.pause;
        // The front end, too, wakes the task: a further timer for each time would never end.
        if self.next.is_some_and(|next| next > now && next <= due) {
            return None;
        }
        self.pause = (self.pause * 2).min(self.longest);
        self.next = Some(due);
        Some(due)
    }
}

/// The first pause.
const SHORTEST_PAUSE: Duration = Duration::from_micros(100);
/// The longest time that a request waits. Each look costs an adaptive core its shortest spin, which
/// is 0.5 % of this.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    /// The time until the next look of a task that is parked whenever it has looked.
    fn pauses(poll: &mut UnnotifiedPoll, now: &mut Instant, count: usize) -> Vec<Duration> {
        let mut pause = || {
            let next = poll.park(*now).unwrap();
            next - std::mem::replace(now, next)
        };
        (0..count).map(|_| pause()).collect()
    }

    #[test]
    fn pauses_become_longer_while_the_queue_is_idle() {
        let (mut poll, mut now) = (UnnotifiedPoll::new(PollPolicy::ADAPTIVE), Instant::now());
        let first = pauses(&mut poll, &mut now, 7);
        assert_eq!(first, (0..7).map(|nth| SHORTEST_PAUSE * (1 << nth)).collect::<Vec<_>>());
        assert_eq!(pauses(&mut poll, &mut now, 3), [LONGEST_PAUSE; 3]);
        poll.on_progress();
        assert_eq!(pauses(&mut poll, &mut now, 2), [SHORTEST_PAUSE, SHORTEST_PAUSE * 2]);
    }

    #[test]
    fn pauses_stay_short_on_a_core_that_always_polls() {
        let (mut poll, mut now) = (UnnotifiedPoll::new(PollPolicy::Always), Instant::now());
        assert_eq!(pauses(&mut poll, &mut now, 3), [SHORTEST_PAUSE; 3]);
    }

    #[test]
    fn a_task_that_is_woken_early_has_one_timer() {
        let (mut poll, now) = (UnnotifiedPoll::new(PollPolicy::ADAPTIVE), Instant::now());
        let first = poll.park(now).unwrap();
        for early in [now, now + SHORTEST_PAUSE / 2] {
            assert_eq!(poll.park(early), None);
        }
        let mut now = first;
        pauses(&mut poll, &mut now, 8);
        let later = poll.park(now).unwrap();
        poll.on_progress();
        let sooner = poll.park(now).unwrap();
        assert_eq!(sooner, now + SHORTEST_PAUSE, "the queue is in use again");
        assert!(sooner < later);
    }
}
