//! Answers that are kept until the initiator has acknowledged them, to be sent again (RFC 7143
//! §7.2.2, §11.16).
//!
//! Only from error recovery level 1 on. Every PDU that has a StatSN of its own is kept, a command's
//! data-in with it, until ExpStatSN is beyond it. Of the data-in, what is kept are references to
//! the memory that it was sent from. A volume that lends its own memory may change it meanwhile,
//! and then another content is sent again than the first time. That is right: the initiator has not
//! seen the end of its read, so that whatever wrote to these blocks ran at the same time as the
//! read, whose outcome may be that of before or of after. The data digest is made anew.
//!
//! What bounds this: an initiator that does not acknowledge loses the oldest answers, and its SNACK
//! for them is rejected. When the core is short of memory, data is not kept at all.

use super::answer::{Cut, ExpectedTransfer};
use crate::scsi::Response;
use blockmux_wire::iscsi::Bhs;
use smallvec::SmallVec;
use std::collections::VecDeque;

/// The answers of a connection that are not acknowledged.
pub(super) struct RetainedResponses {
    /// Oldest first.
    answers: VecDeque<RetainedResponse>,
    /// ExpStatSN as the initiator said it last.
    acknowledged: u32,
    /// Data that is kept, in bytes.
    len: usize,
}

/// One of them.
struct RetainedResponse {
    stat_sn: u32,
    /// How much data it keeps, in bytes.
    len: usize,
    what: RetainedPdu,
}

/// What is sent again.
pub(super) enum RetainedPdu {
    /// A PDU as it was.
    Pdu { bhs: Bhs, data: SmallVec<[u8; 32]> },
    /// The answer to a command, made anew.
    Command(SentStatus),
}

/// How a command ended, and how that was said.
#[derive(Clone, Debug)]
pub(super) struct SentStatus {
    pub(super) expected: ExpectedTransfer,
    pub(super) response: Response,
    pub(super) cut: Cut,
}

impl RetainedResponses {
    /// Nothing is kept, and `stat_sn` is the next.
    pub(super) fn new(stat_sn: u32) -> RetainedResponses {
        RetainedResponses { answers: VecDeque::new(), acknowledged: stat_sn, len: 0 }
    }

    /// Keeps an answer, and no more than there is room for.
    pub(super) fn keep(&mut self, stat_sn: u32, what: RetainedPdu) {
        let len = match &what {
            RetainedPdu::Pdu { data, .. } => data.len(),
            RetainedPdu::Command(outcome) => outcome.response.data_in.len(),
        };
        self.answers.push_back(RetainedResponse { stat_sn, len, what });
        self.len = self.len.saturating_add(len);
        while self.answers.len() > MAX_RETAINED || (self.len > MAX_RETAINED_BYTES && self.answers.len() > 1) {
            self.drop_oldest();
        }
    }

    /// The initiator has everything before `exp_stat_sn`; `next` is the number that no answer has
    /// yet.
    pub(super) fn acknowledge(&mut self, exp_stat_sn: u32, next: u32) {
        let new = exp_stat_sn.wrapping_sub(self.acknowledged);
        if new > next.wrapping_sub(self.acknowledged) {
            // It was never sent, or was acknowledged before.
            return;
        }
        while self.answers.front().is_some_and(|answer| answer.stat_sn.wrapping_sub(self.acknowledged) < new)
        {
            self.drop_oldest();
        }
        self.acknowledged = exp_stat_sn;
    }

    /// The first number that is not acknowledged.
    pub(super) fn acknowledged(&self) -> u32 {
        self.acknowledged
    }

    /// The answer with that number.
    pub(super) fn find(&self, stat_sn: u32) -> Option<&RetainedPdu> {
        self.answers.iter().find(|answer| answer.stat_sn == stat_sn).map(|answer| &answer.what)
    }

    /// The latest answer to a command that is so.
    pub(super) fn command(&mut self, is_so: impl Fn(&SentStatus) -> bool) -> Option<&mut SentStatus> {
        self.answers.iter_mut().rev().find_map(|answer| match &mut answer.what {
            RetainedPdu::Command(outcome) if is_so(outcome) => Some(outcome),
            _ => None,
        })
    }

    /// Takes all answers to commands, oldest first.
    pub(super) fn take_commands(&mut self) -> Vec<SentStatus> {
        self.len = 0;
        let commands = self.answers.drain(..).filter_map(|answer| match answer.what {
            RetainedPdu::Command(outcome) => Some(outcome),
            RetainedPdu::Pdu { .. } => None,
        });
        commands.collect()
    }

    fn drop_oldest(&mut self) {
        if let Some(answer) = self.answers.pop_front() {
            self.len = self.len.saturating_sub(answer.len);
        }
    }
}

/// Answers that are kept: twice what the window and immediate commands make.
const MAX_RETAINED: usize = 544;

/// Data in them, in bytes; one command's is kept whatever its length.
const MAX_RETAINED_BYTES: usize = 32 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    fn pdu(len: usize) -> RetainedPdu {
        RetainedPdu::Pdu { bhs: Bhs::new_zeroed(), data: SmallVec::from_elem(7, len) }
    }

    #[test]
    fn what_is_acknowledged_is_kept_no_longer() {
        let mut kept = RetainedResponses::new(u32::MAX);
        for stat_sn in [u32::MAX, 0, 1] {
            kept.keep(stat_sn, pdu(4));
        }
        kept.acknowledge(1, 2);
        assert!(kept.find(u32::MAX).is_none() && kept.find(0).is_none() && kept.find(1).is_some());
        for wrong in [3, 0, u32::MAX, 0x8000_0000] {
            kept.acknowledge(wrong, 2);
            assert_eq!((kept.acknowledged(), kept.len), (1, 4), "{wrong}");
        }
        kept.acknowledge(2, 2);
        assert_eq!((kept.answers.len(), kept.len), (0, 0));
    }

    #[test]
    fn who_acknowledges_nothing_loses_the_oldest() {
        let mut kept = RetainedResponses::new(0);
        for stat_sn in 0..2000 {
            kept.keep(stat_sn, pdu(10));
        }
        assert_eq!((kept.answers.len(), kept.find(2000 - 544 - 1).is_some()), (MAX_RETAINED, false));
        assert!(kept.find(2000 - 544).is_some());
        kept.keep(2000, pdu(MAX_RETAINED_BYTES + 1));
        assert_eq!((kept.answers.len(), kept.find(2000).is_some()), (1, true));
    }
}
