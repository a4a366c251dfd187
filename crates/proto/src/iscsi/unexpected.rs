//! Flow control of unexpected PDUs over RDMA (RFC 7145 §8.1, key `MaxOutstandingUnexpectedPDUs`):
//! PDUs for which the peer must have a receive buffer although it did not request them.
//!
//! Unexpected PDUs of a target are asynchronous messages and Rejects, acknowledged by ExpStatSN,
//! and pings, acknowledged by replies. Those of an initiator are immediate requests with a
//! response: pings, task management, text and logout. All other PDUs are responses or count in the
//! command window. The limit 0, Linux's value, means no limit. A PDU above the limit waits with all
//! later ones, because PDUs are numbered.

use blockmux_wire::iscsi::session::{NopIn, NopOut};
use blockmux_wire::iscsi::{Bhs, IscsiOpcode, RESERVED_TAG};
use std::collections::VecDeque;
use zerocopy::transmute_ref;

/// Unacknowledged unexpected PDUs of a target.
#[derive(Debug, Default)]
pub(super) struct TargetUnexpectedPdus {
    /// StatSN of each unacknowledged message; maintained only with a limit, which bounds it.
    messages: VecDeque<u32>,
    /// Number of unanswered pings.
    pings: u32,
}

impl TargetUnexpectedPdus {
    /// Whether a PDU may be sent now; if so, it is counted.
    #[inline]
    pub(super) fn admits(&mut self, bhs: &Bhs, limit: u32) -> bool {
        if limit == 0 {
            return true;
        }
        let nop: &NopIn = transmute_ref!(bhs);
        let is_ping = bhs.opcode() == IscsiOpcode::NOP_IN && nop.initiator_task_tag.get() == RESERVED_TAG;
        if !is_ping && !matches!(bhs.opcode(), IscsiOpcode::ASYNC_MESSAGE | IscsiOpcode::REJECT) {
            return true;
        }
        if self.messages.len().saturating_add(self.pings as usize) >= limit as usize {
            return false;
        }
        if is_ping {
            self.pings = self.pings.saturating_add(1);
        } else {
            self.messages.push_back(nop.stat_sn.get());
        }
        true
    }

    /// Processes a received PDU of the initiator.
    #[inline]
    pub(super) fn on_pdu(&mut self, bhs: &Bhs) {
        let nop: &NopOut = transmute_ref!(bhs);
        if self.pings > 0
            && bhs.opcode() == IscsiOpcode::NOP_OUT
            && nop.target_transfer_tag.get() != RESERVED_TAG
        {
            self.pings = self.pings.saturating_sub(1);
        }
        // All requests have ExpStatSN at the same offset.
        let expected = nop.exp_stat_sn.get();
        let is_acknowledged = |stat_sn: u32| expected.wrapping_sub(stat_sn).wrapping_sub(1) < SERIAL_HALF;
        while self.messages.front().is_some_and(|stat_sn| is_acknowledged(*stat_sn)) {
            self.messages.pop_front();
        }
    }
}

/// Unanswered unexpected PDUs of an initiator.
#[derive(Debug, Default)]
pub(super) struct InitiatorUnexpectedPdus {
    unanswered: u32,
}

impl InitiatorUnexpectedPdus {
    /// Whether a PDU may be sent now; if so, it is counted. See [`TargetUnexpectedPdus::admits`].
    #[inline]
    pub(super) fn admits(&mut self, bhs: &Bhs, limit: u32) -> bool {
        let opcode = bhs.opcode();
        let is_unexpected = bhs.is_immediate()
            && bhs.initiator_task_tag.get() != RESERVED_TAG
            && opcode != IscsiOpcode::LOGIN_REQUEST
            && opcode != IscsiOpcode::SCSI_COMMAND;
        if !is_unexpected || limit == 0 {
            return true;
        }
        let is_admitted = self.unanswered < limit;
        self.unanswered = self.unanswered.saturating_add(is_admitted.into());
        is_admitted
    }

    /// Processes a received PDU of the target.
    #[inline]
    pub(super) fn on_pdu(&mut self, bhs: &Bhs) {
        let is_response = match bhs.opcode() {
            IscsiOpcode::NOP_IN => bhs.initiator_task_tag.get() != RESERVED_TAG,
            IscsiOpcode::TASK_MANAGEMENT_RESPONSE
            | IscsiOpcode::TEXT_RESPONSE
            | IscsiOpcode::LOGOUT_RESPONSE
            | IscsiOpcode::REJECT => true,
            _ => false,
        };
        self.unanswered = self.unanswered.saturating_sub(is_response.into());
    }
}

const SERIAL_HALF: u32 = 1 << 31;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_wire::iscsi::FLAG_IMMEDIATE;
    use zerocopy::{FromBytes, FromZeros, IntoBytes};

    fn of_target(opcode: IscsiOpcode, tag: u32, stat_sn: u32) -> Bhs {
        let nop = NopIn {
            opcode: opcode.0,
            initiator_task_tag: tag.into(),
            stat_sn: stat_sn.into(),
            ..NopIn::new_zeroed()
        };
        Bhs::read_from_bytes(nop.as_bytes()).unwrap()
    }

    fn of_initiator(opcode: IscsiOpcode, tag: u32, transfer_tag: u32, exp_stat_sn: u32) -> Bhs {
        let nop = NopOut {
            opcode: opcode.0 | FLAG_IMMEDIATE,
            initiator_task_tag: tag.into(),
            target_transfer_tag: transfer_tag.into(),
            exp_stat_sn: exp_stat_sn.into(),
            ..NopOut::new_zeroed()
        };
        Bhs::read_from_bytes(nop.as_bytes()).unwrap()
    }

    #[test]
    fn unexpected_pdus_of_a_target_wait_for_acknowledgements_and_replies() {
        let mut sent = TargetUnexpectedPdus::default();
        let ping = of_target(IscsiOpcode::NOP_IN, RESERVED_TAG, 8);
        let event = |stat_sn| of_target(IscsiOpcode::ASYNC_MESSAGE, RESERVED_TAG, stat_sn);
        assert!((0..99).all(|stat_sn| sent.admits(&event(stat_sn), 0)), "no limit");
        assert!(sent.admits(&event(7), 2) && sent.admits(&ping, 2));
        for held in [event(8), ping, of_target(IscsiOpcode::REJECT, RESERVED_TAG, 8)] {
            assert!(!sent.admits(&held, 2));
        }
        for asked in [IscsiOpcode::SCSI_RESPONSE, IscsiOpcode::NOP_IN, IscsiOpcode::TEXT_RESPONSE] {
            assert!(sent.admits(&of_target(asked, 5, 8), 2));
        }
        // A command that acknowledges no further response, and a reply to the ping.
        sent.on_pdu(&of_initiator(IscsiOpcode::SCSI_COMMAND, 5, 0, 7));
        assert!(!sent.admits(&ping, 2));
        sent.on_pdu(&of_initiator(IscsiOpcode::NOP_OUT, RESERVED_TAG, 3, 7));
        assert!(sent.admits(&event(8), 2) && !sent.admits(&event(9), 2));
        sent.on_pdu(&of_initiator(IscsiOpcode::SCSI_COMMAND, 5, 0, 9));
        assert!(sent.admits(&event(u32::MAX), 2) && sent.admits(&event(0), 2) && !sent.admits(&event(1), 2));
        sent.on_pdu(&of_initiator(IscsiOpcode::NOP_OUT, 6, RESERVED_TAG, 1));
        assert!(sent.admits(&event(1), 2));
    }

    #[test]
    fn unexpected_pdus_of_an_initiator_wait_for_responses() {
        let mut sent = InitiatorUnexpectedPdus::default();
        let task = of_initiator(IscsiOpcode::TASK_MANAGEMENT_REQUEST, 7, 0, 1);
        let ping = of_initiator(IscsiOpcode::NOP_OUT, 8, RESERVED_TAG, 1);
        assert!((0..99).all(|_| sent.admits(&ping, 0)), "no limit");
        assert!(sent.admits(&task, 2) && sent.admits(&ping, 2));
        assert!(
            !sent.admits(&task, 2) && !sent.admits(&of_initiator(IscsiOpcode::LOGOUT_REQUEST, 9, 0, 1), 2)
        );
        assert!(
            sent.admits(&of_initiator(IscsiOpcode::NOP_OUT, RESERVED_TAG, 3, 1), 2),
            "it is an answer itself"
        );
        sent.on_pdu(&of_target(IscsiOpcode::SCSI_RESPONSE, 5, 1));
        sent.on_pdu(&of_target(IscsiOpcode::NOP_IN, RESERVED_TAG, 1));
        assert!(!sent.admits(&ping, 2));
        sent.on_pdu(&of_target(IscsiOpcode::NOP_IN, 8, 1));
        assert!(sent.admits(&ping, 2) && !sent.admits(&task, 2));
        sent.on_pdu(&of_target(IscsiOpcode::TASK_MANAGEMENT_RESPONSE, 7, 1));
        assert!(sent.admits(&task, 2));
    }
}
