//! Whether answers or work of this side are sent next, if there are both.
//!
//! Answers have one length, and work often has another one. Only packets of one length leave the
//! system in one call, so a side goes on until it has no more, or has sent as many as one call
//! takes.

/// The side of a queue pair that sends next.
#[derive(Default)]
pub(super) struct SendTurn {
    pub(super) is_requesters: bool,
    /// Packets of this turn.
    sent: u32,
}

impl SendTurn {
    /// Counts a packet.
    #[inline]
    pub(super) fn count(&mut self) {
        self.sent = self.sent.saturating_add(1);
        if self.sent >= MOST {
            self.pass();
        }
    }

    /// It is the other side's turn.
    #[inline]
    pub(super) fn pass(&mut self) {
        (self.is_requesters, self.sent) = (!self.is_requesters, 0);
    }
}

/// Packets of one turn.
const MOST: u32 = 32;
