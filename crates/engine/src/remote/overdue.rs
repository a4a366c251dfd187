//! Requests that get no reply in time.
//!
//! The timeout applies to the request that has waited the longest, counted from when it became the
//! oldest: a slow link with a long queue delays all of its requests, and a request is not charged
//! for those before it. Bytes received for a request do not count, only its reply does. An overdue
//! request is aborted, if the protocol can, and sent again. If the abort has not completed by the
//! next tick, or if there are other paths, the connection is closed and its requests are sent again
//! over another one. A request without a reply for the volume's reconnect timeout fails.
//!
//! No time is stored per request. Four times in the timeout, a tick asks the session for the age of
//! its oldest request ([`tick`](blockmux_proto::driver::session::Overdue::tick)); a request that is
//! the oldest in five ticks in a row is overdue, by at most a quarter of the timeout. A core that
//! did not run for a while counts one tick, however long that was.

use blockmux_volume::{Completion, Tag};
use std::time::{Duration, Instant};

/// Timer of the ticks of a link, or of another queue.
pub(crate) struct OverdueTimer {
    /// How long a reply may take; `None`: for ever.
    span: Option<Duration>,
    next: Option<Instant>,
    /// Consecutive ticks with waiting requests and a target that accepts none.
    blocked_ticks: u32,
}

impl OverdueTimer {
    pub(crate) fn new(span: Option<Duration>) -> OverdueTimer {
        OverdueTimer { span, next: None, blocked_ticks: 0 }
    }

    /// Arms the next tick, because a reply is pending; returns its time, unless it is armed
    /// already.
    #[inline]
    pub(crate) fn watch(&mut self, now: impl FnOnce() -> Instant) -> Option<Instant> {
        let span = self.span?;
        if self.next.is_some() {
            return None;
        }
        self.next = now().checked_add(span / TICKS);
        self.next
    }

    /// Whether a tick is due.
    #[inline]
    pub(crate) fn is_due(&mut self, now: impl FnOnce() -> Instant) -> bool {
        let is_due = self.next.is_some_and(|next| now() >= next);
        if is_due {
            self.next = None;
        }
        is_due
    }

    /// Processes a tick. `seen`: for how many ticks the oldest request has been pending; `is_shut`:
    /// whether the session takes no requests although some wait. Returns the timeout that was
    /// exceeded.
    pub(crate) fn on_tick(&mut self, seen: u32, is_shut: bool) -> Option<Duration> {
        self.blocked_ticks = if is_shut { self.blocked_ticks + 1 } else { 0 };
        self.span.filter(|_| seen.max(self.blocked_ticks.saturating_sub(1)) >= TICKS)
    }

    /// Stops the ticks, because the connection was lost.
    pub(crate) fn on_loss(&mut self) {
        (self.next, self.blocked_ticks) = (None, 0);
    }
}

/// Requests of a channel that are retried because they got no reply, or failed on their path, with
/// the time of the first failure.
#[derive(Default)]
pub(super) struct FailingRequests(Vec<(Tag, Instant)>);

impl FailingRequests {
    /// Records that a request failed, perhaps again; returns since when it has been failing.
    pub(super) fn add(&mut self, tag: Tag, now: Instant) -> Instant {
        match self.0.iter().find(|(late, _)| *late == tag) {
            Some((_, since)) => *since,
            None => {
                self.0.push((tag, now));
                now
            }
        }
    }

    /// Records a request; returns whether it has been failing for longer than `timeout`.
    pub(super) fn has_timed_out(&mut self, tag: Tag, now: Instant, timeout: Duration) -> bool {
        now.duration_since(self.add(tag, now)) >= timeout
    }

    /// Removes requests that have completed.
    #[inline]
    pub(super) fn on_done(&mut self, done: &[Completion]) {
        if !self.0.is_empty() {
            self.0.retain(|(tag, _)| done.iter().all(|completion| completion.tag != *tag));
        }
    }
}

/// Formats a duration for messages.
pub(crate) fn format_duration(time: Duration) -> String {
    if time.subsec_nanos() == 0 {
        format!("{} s", time.as_secs())
    } else {
        format!("{} ms", time.as_millis())
    }
}

/// Ticks in one span.
pub(super) const TICKS: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const SPAN: Duration = Duration::from_secs(30);

    #[test]
    fn ticks_are_a_quarter_of_the_timeout_apart_and_only_while_requests_are_pending() {
        let start = Instant::now();
        let mut overdue = OverdueTimer::new(Some(SPAN));
        assert!(!overdue.is_due(|| start + SPAN * 9));
        assert_eq!(overdue.watch(|| start), Some(start + SPAN / 4));
        assert_eq!(overdue.watch(|| start), None);
        assert!(!overdue.is_due(|| start + SPAN / 5));
        assert!(overdue.is_due(|| start + SPAN / 4));
        assert!(!overdue.is_due(|| start + SPAN * 9));
        assert_eq!(OverdueTimer::new(None).watch(|| start), None);
    }

    #[test]
    fn a_request_pending_for_four_ticks_is_overdue_and_so_is_one_that_is_not_accepted() {
        let mut overdue = OverdueTimer::new(Some(SPAN));
        assert_eq!((overdue.on_tick(3, false), overdue.on_tick(4, false)), (None, Some(SPAN)));
        let blocked_ticks: Vec<_> = (0..5).map(|_| overdue.on_tick(0, true)).collect();
        assert_eq!(blocked_ticks, [None, None, None, None, Some(SPAN)]);
        assert_eq!(overdue.on_tick(0, false), None);
        assert_eq!(overdue.on_tick(0, true), None);
    }

    #[test]
    fn a_failing_request_is_timed_from_its_first_failure_until_it_completes() {
        let (start, mut late) = (Instant::now(), FailingRequests::default());
        assert_eq!(late.add(Tag(1), start), start);
        assert_eq!((late.add(Tag(2), start + SPAN), late.add(Tag(1), start + SPAN)), (start + SPAN, start));
        late.on_done(&[Completion { tag: Tag(1), result: Ok(blockmux_volume::Output::Nothing) }]);
        assert_eq!((late.add(Tag(1), start + SPAN * 2), late.0.len()), (start + SPAN * 2, 2));
    }

    #[test]
    fn whole_seconds_are_formatted_as_seconds() {
        assert_eq!(
            (format_duration(SPAN), format_duration(SPAN / 1000)),
            ("30 s".to_owned(), "30 ms".to_owned())
        );
    }
}
