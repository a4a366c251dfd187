//! One connection of a session: its queue pair, and how it goes with it.

use crate::queue_pair::Provider;
use blockmux_proto::outbox::Outbox;
use blockmux_proto::rdma::{Event, RdmaSession};
use blockmux_proto::session::{ProtocolError, StreamSession};
use std::time::Instant;

/// What the driver's calls have come to.
pub(super) struct Calls {
    /// How often the session was given something, or gave something away.
    pub(super) changes: u64,
    /// When the latest call came.
    pub(super) now: Instant,
}

/// Our end of a connection.
pub(super) struct End<Q> {
    pub(super) queue_pair: Q,
    /// What the peer did wrong by the session's rules. It was disconnected for that.
    pub(super) broken: Option<ProtocolError>,
    /// `broken` has been told to the driver.
    is_told: bool,
    /// When nothing moved any more: the count of the session's changes, and how much there was to
    /// send.
    settled: Option<(u64, usize)>,
}

impl<Q: Provider> End<Q> {
    pub(super) fn new(queue_pair: Q) -> End<Q> {
        End { queue_pair, broken: None, is_told: false, settled: None }
    }

    /// Hands in events and lets the session work until nothing moves; whether anything did. That
    /// counts as a change of the session: what came by one connection may be answered by another.
    ///
    /// It ends: what comes from the peer has come before, and what work leads to by itself is
    /// bounded by the endpoint.
    #[inline]
    pub(super) fn pump(&mut self, session: &mut impl RdmaSession, calls: &mut Calls) -> bool {
        let mut has_moved = false;
        loop {
            let mut moves = false;
            while let Some(event) = self.queue_pair.poll() {
                moves = true;
                self.hand_in(session, event, calls.now);
            }
            while self.broken.is_none() {
                if !session.work(&mut self.queue_pair) {
                    break;
                }
                moves = true;
            }
            if !moves {
                calls.changes = calls.changes.wrapping_add(has_moved.into());
                return has_moved;
            }
            has_moved = true;
        }
    }

    /// Pumps after the queue pair took something, and says once what the peer did wrong.
    #[inline]
    pub(super) fn settle<T>(
        &mut self,
        session: &mut impl RdmaSession,
        calls: &mut Calls,
        taken: Result<T, ProtocolError>,
    ) -> Result<T, ProtocolError> {
        calls.changes = calls.changes.wrapping_add(1);
        self.pump(session, calls);
        match self.broken {
            Some(error) if !std::mem::replace(&mut self.is_told, true) => Err(error),
            _ => taken,
        }
    }

    #[inline]
    pub(super) fn poll_timeout(&self, session: &impl RdmaSession) -> Option<Instant> {
        [self.queue_pair.poll_timeout(), session.poll_timeout()].into_iter().flatten().min()
    }

    pub(super) fn on_timeout(
        &mut self,
        session: &mut impl RdmaSession,
        calls: &mut Calls,
        now: Instant,
    ) -> Result<(), ProtocolError> {
        calls.now = now;
        let is_due = |when: Option<Instant>| when.is_some_and(|when| when <= now);
        let mut result = Ok(());
        if is_due(self.queue_pair.poll_timeout()) {
            result = self.queue_pair.on_timeout(now);
        }
        if is_due(session.poll_timeout())
            && let Err(error) = session.on_timeout(now)
        {
            self.part(session, error);
        }
        self.settle(session, calls, result)
    }

    #[inline]
    fn hand_in(&mut self, session: &mut impl RdmaSession, event: Event, now: Instant) {
        // A peer that is being left is not listened to; what it holds comes back all the same.
        if self.broken.is_some() && matches!(event, Event::Received { .. }) {
            return;
        }
        if let Err(error) = session.on_event(event, now) {
            self.part(session, error);
        }
    }

    /// Has the session's last words sent, and leaves.
    #[cold]
    fn part(&mut self, session: &mut impl RdmaSession, error: ProtocolError) {
        if self.broken.is_some() {
            return;
        }
        self.broken = Some(error);
        while session.work(&mut self.queue_pair) {}
        self.queue_pair.disconnect();
    }
}

impl<Q: Provider + StreamSession> End<Q> {
    /// What waits to be sent, after pumping if the session has changed or something was sent, which
    /// has made room.
    #[inline]
    pub(super) fn outbox(&mut self, session: &mut impl RdmaSession, calls: &mut Calls) -> &mut Outbox {
        if self.settled != Some((calls.changes, self.queue_pair.outbox().len())) {
            self.pump(session, calls);
            self.settled = Some((calls.changes, self.queue_pair.outbox().len()));
        }
        self.queue_pair.outbox()
    }
}
