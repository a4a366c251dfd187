//! One connection of a session: its queue pair, and how it goes with it.

use crate::queue_pair::Provider;
use blockmux_proto::rdma::{Event, RdmaSession};
use blockmux_proto::session::ProtocolError;

/// Our end of a connection.
pub(super) struct End<Q> {
    pub(super) queue_pair: Q,
    /// What the peer did wrong by the session's rules. It was disconnected for that.
    pub(super) broken: Option<ProtocolError>,
    /// `broken` has been told to the driver.
    is_told: bool,
    /// When nothing moved any more: the count of the session's changes, and how much there was to send.
    settled: Option<(u64, usize)>,
}

impl<Q: Provider> End<Q> {
    pub(super) fn new(queue_pair: Q) -> End<Q> {
        End { queue_pair, broken: None, is_told: false, settled: None }
    }

    /// Hands in events and lets the session work until nothing moves; whether anything did.
    #[inline]
    pub(super) fn pump(&mut self, session: &mut impl RdmaSession) -> bool {
        let mut has_moved = false;
        loop {
            let mut moves = false;
            while let Some(event) = self.queue_pair.poll() {
                moves = true;
                self.hand_in(session, event);
            }
            while self.broken.is_none() {
                if !session.work(&mut self.queue_pair) {
                    break;
                }
                moves = true;
            }
            if !moves {
                return has_moved;
            }
            has_moved = true;
        }
    }

    #[inline]
    fn hand_in(&mut self, session: &mut impl RdmaSession, event: Event) {
        // A peer that is being left is not listened to; what it holds comes back all the same.
        if self.broken.is_some() && matches!(event, Event::Received { .. }) {
            return;
        }
        if let Err(error) = session.on_event(event) {
            self.part(session, error);
        }
    }

    /// Has the session's last words sent, and leaves.
    #[cold]
    pub(super) fn part(&mut self, session: &mut impl RdmaSession, error: ProtocolError) {
        if self.broken.is_some() {
            return;
        }
        self.broken = Some(error);
        while session.work(&mut self.queue_pair) {}
        self.queue_pair.disconnect();
    }

    /// What the peer did wrong, once.
    #[inline]
    pub(super) fn tell_broken(&mut self) -> Option<ProtocolError> {
        let error = self.broken?;
        (!std::mem::replace(&mut self.is_told, true)).then_some(error)
    }

    /// Whether nothing can have moved since it was said to be settled: the session is as it was after so many changes, and
    /// nothing was sent of the `len` bytes.
    #[inline]
    pub(super) fn is_settled(&self, changes: u64, len: usize) -> bool {
        self.settled == Some((changes, len))
    }

    #[inline]
    pub(super) fn settle(&mut self, changes: u64, len: usize) {
        self.settled = Some((changes, len));
    }
}
