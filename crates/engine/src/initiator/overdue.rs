//! Requests that get no answer.
//!
//! A target has a bounded time for whatever request has waited the longest, from when it became
//! that one: a slow line with a long queue is slow for all of it, and no request is blamed for
//! those before it. Bytes that come for a request prove nothing; its answer does. A target that
//! owes one for too long is asked to give the request up, where the protocol has that, and with it
//! all others that it has had as long; then they are sent again. If it does not do that until the
//! next look, and where there are other paths, it loses the connection, and its requests are sent
//! again over another. What gets no answer for the volume's patience fails.
//!
//! Nothing is noted for each request. The session is asked four times in the span which request is
//! the oldest ([`Initiator::look`](blockmux_proto::session::Overdue::look)); the same one five
//! times in a row is overdue, by at most a quarter of the span. A core that did not run for a while
//! has looked once, however long that was.

use blockmux_volume::{Completion, Tag};
use std::time::{Duration, Instant};

/// When a link looks for answers.
pub(super) struct Overdue {
    /// How long an answer may take; `None`: as long as it likes.
    span: Option<Duration>,
    next: Option<Instant>,
    /// Looks in a row that found requests and a target that takes none.
    shut: u32,
}

impl Overdue {
    pub(super) fn new(span: Option<Duration>) -> Overdue {
        Overdue { span, next: None, shut: 0 }
    }

    /// An answer is owed: when to look, if that is not known already.
    #[inline]
    pub(super) fn watch(&mut self, now: impl FnOnce() -> Instant) -> Option<Instant> {
        let span = self.span?;
        if self.next.is_some() {
            return None;
        }
        self.next = now().checked_add(span / LOOKS);
        self.next
    }

    /// Whether it is time to look.
    #[inline]
    pub(super) fn is_due(&mut self, now: impl FnOnce() -> Instant) -> bool {
        let is_due = self.next.is_some_and(|next| now() >= next);
        if is_due {
            self.next = None;
        }
        is_due
    }

    /// What a look has found: how often the session has seen its oldest request, and whether it
    /// takes none although some wait. Answers the time that was too long.
    pub(super) fn on_look(&mut self, seen: u32, is_shut: bool) -> Option<Duration> {
        self.shut = if is_shut { self.shut + 1 } else { 0 };
        self.span.filter(|_| seen.max(self.shut.saturating_sub(1)) >= LOOKS)
    }

    /// The connection is gone.
    pub(super) fn on_loss(&mut self) {
        (self.next, self.shut) = (None, 0);
    }
}

/// Requests of a channel that are sent again because there was no answer, or none that was of the
/// volume, and since when.
#[derive(Default)]
pub(super) struct Late(Vec<(Tag, Instant)>);

impl Late {
    /// This request got nowhere, perhaps not for the first time: since when that has been so.
    pub(super) fn add(&mut self, tag: Tag, now: Instant) -> Instant {
        match self.0.iter().find(|(late, _)| *late == tag) {
            Some((_, since)) => *since,
            None => {
                self.0.push((tag, now));
                now
            }
        }
    }

    /// Adds a request, and answers whether it has been overdue for all `patience`.
    pub(super) fn is_hopeless(&mut self, tag: Tag, now: Instant, patience: Duration) -> bool {
        now.duration_since(self.add(tag, now)) >= patience
    }

    /// These have completed.
    #[inline]
    pub(super) fn on_done(&mut self, done: &[Completion]) {
        if !self.0.is_empty() {
            self.0.retain(|(tag, _)| done.iter().all(|completion| completion.tag != *tag));
        }
    }
}

/// A time as people write it.
pub(super) fn written(time: Duration) -> String {
    if time.subsec_nanos() == 0 {
        format!("{} s", time.as_secs())
    } else {
        format!("{} ms", time.as_millis())
    }
}

/// In one span.
pub(super) const LOOKS: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const SPAN: Duration = Duration::from_secs(30);

    #[test]
    fn looks_are_a_quarter_of_the_span_apart_and_only_while_answers_are_owed() {
        let start = Instant::now();
        let mut overdue = Overdue::new(Some(SPAN));
        assert!(!overdue.is_due(|| start + SPAN * 9));
        assert_eq!(overdue.watch(|| start), Some(start + SPAN / 4));
        assert_eq!(overdue.watch(|| start), None);
        assert!(!overdue.is_due(|| start + SPAN / 5));
        assert!(overdue.is_due(|| start + SPAN / 4));
        assert!(!overdue.is_due(|| start + SPAN * 9));
        assert_eq!(Overdue::new(None).watch(|| start), None);
    }

    #[test]
    fn a_request_seen_again_four_times_is_late_and_so_is_one_that_is_not_taken() {
        let mut overdue = Overdue::new(Some(SPAN));
        assert_eq!((overdue.on_look(3, false), overdue.on_look(4, false)), (None, Some(SPAN)));
        let shut: Vec<_> = (0..5).map(|_| overdue.on_look(0, true)).collect();
        assert_eq!(shut, [None, None, None, None, Some(SPAN)]);
        assert_eq!(overdue.on_look(0, false), None);
        assert_eq!(overdue.on_look(0, true), None);
    }

    #[test]
    fn a_late_request_is_late_since_the_first_time_until_it_completes() {
        let (start, mut late) = (Instant::now(), Late::default());
        assert_eq!(late.add(Tag(1), start), start);
        assert_eq!((late.add(Tag(2), start + SPAN), late.add(Tag(1), start + SPAN)), (start + SPAN, start));
        late.on_done(&[Completion { tag: Tag(1), result: Ok(blockmux_volume::Output::Nothing) }]);
        assert_eq!((late.add(Tag(1), start + SPAN * 2), late.0.len()), (start + SPAN * 2, 2));
    }

    #[test]
    fn times_are_written_in_seconds_if_they_are_whole() {
        assert_eq!((written(SPAN), written(SPAN / 1000)), ("30 s".to_owned(), "30 ms".to_owned()));
    }
}
