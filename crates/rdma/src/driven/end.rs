//! One connection of a session: its queue pair, and the loop between them.

use crate::queue_pair::Provider;
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::{ProtocolError, StreamSession};
use blockmux_proto::rdma::{Event, RdmaSession};
use std::time::Instant;

/// Record of the driver's calls, shared by the ends of a session.
pub(super) struct DriverCalls {
    /// Number of times that the session took or returned something.
    pub(super) changes: u64,
    /// Time of the latest call.
    pub(super) now: Instant,
}

/// This side's end of a connection.
pub(super) struct DrivenEnd<Q> {
    pub(super) queue_pair: Q,
    /// The peer's violation of the session's protocol, for which the connection was ended.
    pub(super) broken: Option<ProtocolError>,
    /// Whether `broken` was reported to the driver.
    is_reported: bool,
    /// State after the last pump: the count of the session's changes, and the length of the outbox
    /// in bytes.
    settled: Option<(u64, usize)>,
}

impl<Q: Provider> DrivenEnd<Q> {
    pub(super) fn new(queue_pair: Q) -> DrivenEnd<Q> {
        DrivenEnd { queue_pair, broken: None, is_reported: false, settled: None }
    }

    /// Passes events to the session and posts its work until nothing is left to do; returns whether
    /// there was anything. That counts as a change of the session, because a request from one
    /// connection may be answered on another.
    ///
    /// The loop terminates: it receives nothing new from the peer, and the endpoint's limits bound
    /// the work that other work causes.
    #[inline]
    pub(super) fn pump(&mut self, session: &mut impl RdmaSession, calls: &mut DriverCalls) -> bool {
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

    /// Pumps after the queue pair consumed something, and reports a violation by the peer once.
    #[inline]
    pub(super) fn settle<T>(
        &mut self,
        session: &mut impl RdmaSession,
        calls: &mut DriverCalls,
        taken: Result<T, ProtocolError>,
    ) -> Result<T, ProtocolError> {
        calls.changes = calls.changes.wrapping_add(1);
        let was_broken = self.broken.is_some();
        self.pump(session, calls);
        let is_new = self.broken.is_some() && !std::mem::replace(&mut self.is_reported, true);
        match self.broken {
            // An error of the queue pair is the cause of what the session says of its end.
            Some(error) if is_new && (was_broken || taken.is_ok()) => Err(error),
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
        calls: &mut DriverCalls,
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
            self.disconnect(session, error);
        }
        self.settle(session, calls, result)
    }

    #[inline]
    fn hand_in(&mut self, session: &mut impl RdmaSession, event: Event, now: Instant) {
        // Messages of a peer after its violation are ignored; completions are still passed on.
        if self.broken.is_some() && matches!(event, Event::Received { .. }) {
            return;
        }
        if let Err(error) = session.on_event(event, now) {
            self.disconnect(session, error);
        }
    }

    /// Posts the session's last work, and disconnects because of `error`.
    #[cold]
    fn disconnect(&mut self, session: &mut impl RdmaSession, error: ProtocolError) {
        if self.broken.is_some() {
            return;
        }
        self.broken = Some(error);
        while session.work(&mut self.queue_pair) {}
        self.queue_pair.disconnect();
    }
}

impl<Q: Provider + StreamSession> DrivenEnd<Q> {
    /// The outbox. The end is pumped first if the session has changed, or if bytes were sent, which
    /// makes room.
    #[inline]
    pub(super) fn outbox(&mut self, session: &mut impl RdmaSession, calls: &mut DriverCalls) -> &mut Outbox {
        if self.settled != Some((calls.changes, self.queue_pair.outbox().len())) {
            self.pump(session, calls);
            self.settled = Some((calls.changes, self.queue_pair.outbox().len()));
        }
        self.queue_pair.outbox()
    }
}
