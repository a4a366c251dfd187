//! Responses that are retained until the initiator acknowledges them, for retransmission (RFC 7143
//! §7.2.2, §11.16).
//!
//! Responses are retained from error recovery level 1 on. Every PDU with its own StatSN is
//! retained, with the data-in of its command, until ExpStatSN has passed it. Data-in is retained by
//! reference. If it is in the volume's own memory (zero-copy), a retransmission may carry newer
//! data. That is permitted: the read has not ended, so the write is concurrent with it. The data
//! digest is computed again.
//!
//! *Limits.* An initiator that does not acknowledge loses the oldest responses, and its SNACK for
//! them is rejected. While the core is short of memory, data is not retained.

use super::answer::{DataInLayout, ExpectedTransfer};
use crate::scsi::Response;
use blockmux_wire::iscsi::Bhs;
use smallvec::SmallVec;
use std::collections::VecDeque;

/// The unacknowledged responses of a connection.
pub(super) struct RetainedResponses {
    /// Ordered by StatSN, oldest first.
    responses: VecDeque<RetainedResponse>,
    /// The latest ExpStatSN from the initiator.
    pub(super) acknowledged: u32,
    /// Size of the retained data, in bytes.
    len: usize,
}

/// One retained response.
struct RetainedResponse {
    stat_sn: u32,
    /// Size of its retained data, in bytes.
    len: usize,
    what: RetainedPdu,
}

/// The content of a retained response.
pub(super) enum RetainedPdu {
    /// A PDU, retransmitted unchanged except for its command numbers.
    Pdu { bhs: Bhs, data: SmallVec<[u8; 32]> },
    /// The response to a command; its PDUs are generated again.
    Command(SentResponse),
}

/// A command's response and how it was sent.
#[derive(Clone, Debug)]
pub(super) struct SentResponse {
    pub(super) expected: ExpectedTransfer,
    pub(super) response: Response,
    pub(super) layout: DataInLayout,
}

impl RetainedResponses {
    /// An empty list; `stat_sn` is the next StatSN.
    pub(super) fn new(stat_sn: u32) -> RetainedResponses {
        RetainedResponses { responses: VecDeque::new(), acknowledged: stat_sn, len: 0 }
    }

    /// Retains a response; drops the oldest ones above the limits.
    pub(super) fn retain(&mut self, stat_sn: u32, what: RetainedPdu) {
        let len = match &what {
            RetainedPdu::Pdu { data, .. } => data.len(),
            RetainedPdu::Command(sent) => sent.response.data_in.len(),
        };
        self.responses.push_back(RetainedResponse { stat_sn, len, what });
        self.len = self.len.saturating_add(len);
        while self.responses.len() > MAX_RETAINED
            || (self.len > MAX_RETAINED_BYTES && self.responses.len() > 1)
        {
            self.drop_oldest();
        }
    }

    /// Processes ExpStatSN from the initiator. `next` is the first StatSN that was not sent yet;
    /// values outside the unacknowledged range are ignored.
    pub(super) fn acknowledge(&mut self, exp_stat_sn: u32, next: u32) {
        let new = exp_stat_sn.wrapping_sub(self.acknowledged);
        if new > next.wrapping_sub(self.acknowledged) {
            // Never sent, or acknowledged before.
            return;
        }
        while self
            .responses
            .front()
            .is_some_and(|answer| answer.stat_sn.wrapping_sub(self.acknowledged) < new)
        {
            self.drop_oldest();
        }
        self.acknowledged = exp_stat_sn;
    }

    /// The response with this StatSN.
    pub(super) fn find(&self, stat_sn: u32) -> Option<&RetainedPdu> {
        self.responses.iter().find(|answer| answer.stat_sn == stat_sn).map(|answer| &answer.what)
    }

    /// The latest response to a command that satisfies `predicate`.
    pub(super) fn command(&mut self, predicate: impl Fn(&SentResponse) -> bool) -> Option<&mut SentResponse> {
        self.responses.iter_mut().rev().find_map(|answer| match &mut answer.what {
            RetainedPdu::Command(sent) if predicate(sent) => Some(sent),
            _ => None,
        })
    }

    /// Takes all responses to commands, oldest first.
    pub(super) fn take_commands(&mut self) -> Vec<SentResponse> {
        self.len = 0;
        let commands = self.responses.drain(..).filter_map(|answer| match answer.what {
            RetainedPdu::Command(sent) => Some(sent),
            RetainedPdu::Pdu { .. } => None,
        });
        commands.collect()
    }

    fn drop_oldest(&mut self) {
        if let Some(answer) = self.responses.pop_front() {
            self.len = self.len.saturating_sub(answer.len);
        }
    }
}

/// Maximum number of retained responses: twice the window and the immediate commands.
const MAX_RETAINED: usize = 544;

/// Maximum size of retained data, in bytes. One command's data is retained whatever its length.
const MAX_RETAINED_BYTES: usize = 32 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    fn pdu(len: usize) -> RetainedPdu {
        RetainedPdu::Pdu { bhs: Bhs::new_zeroed(), data: SmallVec::from_elem(7, len) }
    }

    #[test]
    fn acknowledged_responses_are_dropped() {
        let mut retained = RetainedResponses::new(u32::MAX);
        for stat_sn in [u32::MAX, 0, 1] {
            retained.retain(stat_sn, pdu(4));
        }
        retained.acknowledge(1, 2);
        assert!(
            retained.find(u32::MAX).is_none() && retained.find(0).is_none() && retained.find(1).is_some()
        );
        for wrong in [3, 0, u32::MAX, 0x8000_0000] {
            retained.acknowledge(wrong, 2);
            assert_eq!((retained.acknowledged, retained.len), (1, 4), "{wrong}");
        }
        retained.acknowledge(2, 2);
        assert_eq!((retained.responses.len(), retained.len), (0, 0));
    }

    #[test]
    fn without_acknowledgements_the_oldest_responses_are_dropped() {
        let mut retained = RetainedResponses::new(0);
        for stat_sn in 0..2000 {
            retained.retain(stat_sn, pdu(10));
        }
        assert_eq!(
            (retained.responses.len(), retained.find(2000 - 544 - 1).is_some()),
            (MAX_RETAINED, false)
        );
        assert!(retained.find(2000 - 544).is_some());
        retained.retain(2000, pdu(MAX_RETAINED_BYTES + 1));
        assert_eq!((retained.responses.len(), retained.find(2000).is_some()), (1, true));
    }
}
