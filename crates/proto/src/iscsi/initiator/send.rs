//! What a session sends: commands and their data, pings and answers to pings, the logout.

use super::full::FullFeature;
use super::immediate::{Numbers, PING_TAG};
use crate::iscsi::pdu;
use crate::outbox::Outbox;
use crate::scsi::initiator::{Request, Transfer};
use crate::slots::Key;
use blockmux_volume::SgList;
use blockmux_wire::iscsi::scsi::{ATTR_SIMPLE, DataOut, FLAG_READ, FLAG_WRITE, ScsiCommand};
use blockmux_wire::iscsi::session::NopIn;
use blockmux_wire::iscsi::{FLAG_FINAL, Opcode, RESERVED_TAG, U24};
use zerocopy::IntoBytes;

impl FullFeature {
    /// Sends commands as long as there are some and the window is open.
    #[inline]
    pub(super) fn send_commands(&mut self, outbox: &mut Outbox) {
        while self.may_send()
            && self.window() > 0
            && let Some(request) = self.queue.next()
        {
            self.send_command(&request, outbox);
        }
    }

    /// Sends a command with the data that may go with it unasked (RFC 7143 §4.2.4.2).
    #[inline]
    fn send_command(&mut self, request: &Request, outbox: &mut Outbox) {
        let (mut flags, mut expected, mut immediate, mut unsolicited) = (FLAG_FINAL | ATTR_SIMPLE, 0, 0, 0);
        match request.transfer {
            Transfer::Nothing => {}
            Transfer::In(len) => {
                flags |= FLAG_READ;
                expected = len;
            }
            Transfer::Out(len) => {
                flags |= FLAG_WRITE;
                expected = len;
                let first = len.min(self.terms.first_burst);
                if self.terms.immediate_data {
                    immediate = first.min(self.terms.max_send_segment);
                }
                unsolicited = if self.terms.initial_r2t { immediate } else { first };
                if unsolicited > immediate {
                    flags &= !FLAG_FINAL;
                }
            }
        }
        let tag = request.key.short();
        let command = ScsiCommand {
            opcode: Opcode::SCSI_COMMAND.0,
            flags,
            reserved: 0,
            priority: 0,
            total_ahs_length: 0,
            data_segment_length: U24::new(immediate),
            lun: self.lun.0.to_be_bytes(),
            initiator_task_tag: tag.into(),
            expected_data_transfer_length: expected.into(),
            cmd_sn: self.cmd_sn.into(),
            exp_stat_sn: self.exp_stat_sn.into(),
            cdb: request.cdb,
        };
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        if immediate > 0 {
            self.send_data(request.key, command.as_bytes(), 0, immediate, outbox);
        } else {
            pdu::push(outbox, self.terms.digests, command.as_bytes(), &[]);
        }
        if unsolicited > 0 {
            self.send_sequence(request.key, RESERVED_TAG, immediate, unsolicited, outbox);
            if let Some((progress, _)) = self.queue.transport(request.key) {
                progress.next = unsolicited;
            }
        }
    }

    /// Sends the data-out from `from` up to `end` as one sequence of Data-Out PDUs.
    #[inline]
    pub(super) fn send_sequence(
        &mut self,
        key: Key,
        target_transfer_tag: u32,
        from: u32,
        end: u32,
        outbox: &mut Outbox,
    ) {
        let (mut at, mut data_sn) = (from, 0_u32);
        while at < end {
            let len = end.saturating_sub(at).min(self.terms.max_send_segment);
            let next = at.saturating_add(len);
            let data_out = DataOut {
                opcode: Opcode::DATA_OUT.0,
                flags: if next == end { FLAG_FINAL } else { 0 },
                reserved: [0; 2],
                total_ahs_length: 0,
                data_segment_length: U24::new(len),
                lun: self.lun.0.to_be_bytes(),
                initiator_task_tag: key.short().into(),
                target_transfer_tag: target_transfer_tag.into(),
                reserved_cmd_sn: [0; 4],
                exp_stat_sn: self.exp_stat_sn.into(),
                reserved_end: [0; 4],
                data_sn: data_sn.into(),
                buffer_offset: at.into(),
                reserved_last: [0; 4],
            };
            self.send_data(key, data_out.as_bytes(), at, len, outbox);
            (at, data_sn) = (next, data_sn.wrapping_add(1));
        }
    }

    /// A header with a part of a command's data-out, by reference.
    #[inline]
    fn send_data(&mut self, key: Key, header: &[u8], from: u32, len: u32, outbox: &mut Outbox) {
        let (digests, nothing) = (self.terms.digests, SgList::default());
        let (data, base) = self.queue.data_out(key).unwrap_or((&nothing, 0));
        let range = (base.saturating_add(from as usize), len as usize);
        pdu::push_lent(outbox, digests, &self.pool, header, data, range);
    }

    /// Asks a silent target whether it is there.
    pub(super) fn send_ping(&self, outbox: &mut Outbox) {
        let nop = self.numbers().nop_out(PING_TAG, RESERVED_TAG, self.lun.0.to_be_bytes());
        pdu::push(outbox, self.terms.digests, nop.as_bytes(), &[]);
    }

    /// Answers the target's ping; what data it has need not come back.
    pub(super) fn send_pong(&mut self, ping: &NopIn, outbox: &mut Outbox) {
        if self.may_send() {
            self.pongs = self.pongs.saturating_add(1);
            let nop = self.numbers().nop_out(RESERVED_TAG, ping.target_transfer_tag.get(), ping.lun);
            pdu::push(outbox, self.terms.digests, nop.as_bytes(), &[]);
        }
    }

    /// Ends the session in order.
    pub(super) fn send_logout(&self, outbox: &mut Outbox) {
        let logout = self.numbers().logout();
        pdu::push(outbox, self.terms.digests, logout.as_bytes(), &[]);
    }

    fn numbers(&self) -> Numbers {
        Numbers { cmd_sn: self.cmd_sn, exp_stat_sn: self.exp_stat_sn }
    }
}
