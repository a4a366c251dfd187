//! What a login agrees on over RDMA (RFC 7145 §6).

use super::operational::{DEFAULT_DATA_SEGMENT_LENGTH, Key, NegotiationError, Operational, bit};
use blockmux_wire::iscsi::U24;

/// Who negotiates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Who connects.
    Initiator,
    /// Who is connected to.
    Target,
}

impl Operational {
    /// The same over RDMA (RFC 7145 §6). There are no digests, for what is below has its own; what a side takes in one
    /// message is a number that both agree on, and unasked-for data is no more than one such message. No error is
    /// recovered from below the session.
    #[must_use]
    pub fn over_rdma(mut self, side: Side) -> Operational {
        let own = &mut self.own;
        own.required = 0;
        for key in [Key::HeaderDigest, Key::DataDigest, Key::ErrorRecoveryLevel] {
            own.set(key, 0);
        }
        own.set(Key::RDMAExtensions, 1);
        own.set(Key::TargetRecvDataSegmentLength, DEFAULT_DATA_SEGMENT_LENGTH);
        let taken = match side {
            Side::Initiator => DEFAULT_DATA_SEGMENT_LENGTH,
            // Whatever the initiator takes.
            Side::Target => U24::MAX,
        };
        own.set(Key::InitiatorRecvDataSegmentLength, taken);
        own.set(Key::FirstBurstLength, own.get(Key::FirstBurstLength).min(DEFAULT_DATA_SEGMENT_LENGTH));
        self.iser = Some(side);
        self
    }

    /// What a side takes is no declaration of its own over RDMA. A target does not insist on the word for what both sides
    /// do already; an initiator has said it, and has to hear it.
    pub(super) fn finish_rdma(&mut self, side: Side) -> Result<(), NegotiationError> {
        let is_answered = side == Side::Initiator || self.settled & bit(Key::RDMAExtensions) != 0;
        if is_answered && !self.agreed.is_on(Key::RDMAExtensions) && !self.joins {
            return Err(NegotiationError::NotIser);
        }
        self.agreed.set(Key::RDMAExtensions, 1);
        let (initiators, targets) = (Key::InitiatorRecvDataSegmentLength, Key::TargetRecvDataSegmentLength);
        let (own, peers) = match side {
            Side::Initiator => (initiators, targets),
            Side::Target => (targets, initiators),
        };
        self.agreed.set(Key::MaxRecvDataSegmentLength, self.agreed.get(own));
        self.agreed.max_send_data_segment_length = self.agreed.get(peers);
        Ok(())
    }
}
