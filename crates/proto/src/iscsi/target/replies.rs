//! PDUs to the initiator, with StatSN, ExpCmdSN and MaxCmdSN filled in.
//!
//! StatSN counts what a connection has answered (RFC 7143 §4.2.2.2). Recovery within a connection would keep what is
//! sent here until ExpStatSN acknowledges it.

use super::sequence::CommandWindow;
use crate::iscsi::digest::Digests;
use crate::iscsi::login::operational::{Key, Parameters};
use crate::iscsi::pdu;
use crate::outbox::Outbox;
use crate::scsi::{Response, Status};
use blockmux_volume::{Pool, SgList};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{BHS_LEN, Bhs, FLAG_FINAL, Opcode, RESERVED_TAG, U24};
use smallvec::SmallVec;
use zerocopy::IntoBytes;

/// Writes PDUs into an outbox.
pub(super) struct Replies {
    digests: Digests,
    stat_sn: u32,
    max_burst: usize,
    /// The longest data segment that the initiator takes, in bytes.
    max_segment: usize,
    pool: Pool,
    /// Bytes pushed without payload since the outbox was last seen empty: what an initiator that does not read
    /// makes us keep.
    unsent: usize,
}

/// What a command's end is measured by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    pub(super) itt: u32,
    /// How much data-in the initiator has room for, in bytes; `None`: it reads nothing.
    pub(super) data_in: Option<u32>,
    /// How much data-out it has, in bytes; `None`: it writes nothing.
    pub(super) data_out: Option<u32>,
    /// R2Ts sent.
    pub(super) r2ts: u32,
}

impl Replies {
    pub(super) fn new(parameters: &Parameters, stat_sn: u32, pool: Pool) -> Replies {
        Replies {
            digests: Digests {
                header: parameters.is_on(Key::HeaderDigest),
                data: parameters.is_on(Key::DataDigest),
            },
            stat_sn,
            max_burst: parameters.get(Key::MaxBurstLength) as usize,
            max_segment: parameters.max_send_data_segment_length(),
            pool,
            unsent: 0,
        }
    }

    pub(super) fn digests(&self) -> Digests {
        self.digests
    }

    pub(super) fn max_segment(&self) -> usize {
        self.max_segment
    }

    pub(super) fn set_max_segment(&mut self, len: usize) {
        self.max_segment = len;
    }

    /// Whether another request may be answered before the initiator reads something.
    #[inline]
    pub(super) fn has_room(&self, outbox: &Outbox) -> bool {
        self.unsent < UNSENT || outbox.is_empty()
    }

    /// Ends a command: data with the status in its last PDU if that can be, else a response.
    #[inline]
    pub(super) fn command(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        expected: Expected,
        response: &Response,
    ) {
        let room = expected.data_in.unwrap_or(0) as usize;
        let len = response.data_in.len().min(room);
        let collapses = len > 0 && response.status == Status::GOOD && expected.data_out.is_none();
        let data_sns = self.data_in(outbox, window, expected, response, len, collapses);
        if collapses {
            return;
        }
        let residual = Residual::of(expected, response);
        let mut data = SmallVec::<[u8; 64]>::new();
        if let Some(sense) = &response.sense {
            let sense = sense.to_bytes();
            data.extend_from_slice(&(sense.len() as u16).to_be_bytes());
            data.extend_from_slice(&sense);
        }
        let pdu = ScsiResponse {
            opcode: Opcode::SCSI_RESPONSE.0,
            flags: FLAG_FINAL | residual.flags | residual.bidirectional_flags,
            response: blockmux_wire::iscsi::scsi::Response::COMMAND_COMPLETED_AT_TARGET.0,
            status: response.status.0,
            total_ahs_length: 0,
            data_segment_length: U24::new(data.len() as u32),
            status_qualifier: 0.into(),
            reserved: [0; 6],
            initiator_task_tag: expected.itt.into(),
            snack_tag: 0.into(),
            stat_sn: self.next_stat_sn().into(),
            exp_cmd_sn: window.exp_cmd_sn().into(),
            max_cmd_sn: window.max_cmd_sn().into(),
            exp_data_sn: data_sns.wrapping_add(expected.r2ts).into(),
            bidirectional_read_residual_count: residual.bidirectional_count.into(),
            residual_count: residual.count.into(),
        };
        self.send(outbox, pdu.as_bytes(), &data);
    }

    /// Sends `len` bytes of data in segments that the initiator takes, each burst ended; returns how many PDUs.
    #[inline]
    fn data_in(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        expected: Expected,
        response: &Response,
        len: usize,
        collapses: bool,
    ) -> u32 {
        let (mut offset, mut burst, mut data_sn): (usize, usize, u32) = (0, 0, 0);
        while offset < len {
            let left_in_burst = self.max_burst.saturating_sub(burst);
            let here = len.saturating_sub(offset).min(self.max_segment).min(left_in_burst).max(1);
            let is_last = offset.saturating_add(here) == len;
            burst = burst.saturating_add(here);
            let ends_burst = is_last || burst >= self.max_burst;
            let mut pdu = DataIn {
                opcode: Opcode::DATA_IN.0,
                flags: if ends_burst { FLAG_FINAL } else { 0 },
                reserved: 0,
                status: 0,
                total_ahs_length: 0,
                data_segment_length: U24::new(here as u32),
                lun: [0; 8],
                initiator_task_tag: expected.itt.into(),
                target_transfer_tag: RESERVED_TAG.into(),
                stat_sn: 0.into(),
                exp_cmd_sn: window.exp_cmd_sn().into(),
                max_cmd_sn: window.max_cmd_sn().into(),
                data_sn: data_sn.into(),
                buffer_offset: (offset as u32).into(),
                residual_count: 0.into(),
            };
            if is_last && collapses {
                let residual = Residual::of(expected, response);
                pdu.flags |= FLAG_STATUS | residual.flags;
                pdu.status = response.status.0;
                pdu.stat_sn = self.next_stat_sn().into();
                pdu.residual_count = residual.count.into();
            }
            self.send_lent(outbox, pdu.as_bytes(), &response.data_in, (offset, here));
            if ends_burst {
                burst = 0;
            }
            offset = offset.saturating_add(here);
            data_sn = data_sn.wrapping_add(1);
        }
        data_sn
    }

    /// Asks for data.
    pub(super) fn r2t(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        (lun, itt): ([u8; 8], u32),
        ttt: u32,
        grant: super::transfer::Grant,
    ) {
        let pdu = R2t {
            opcode: Opcode::R2T.0,
            flags: FLAG_FINAL,
            reserved: [0; 2],
            total_ahs_length: 0,
            data_segment_length: U24::default(),
            lun,
            initiator_task_tag: itt.into(),
            target_transfer_tag: ttt.into(),
            stat_sn: self.stat_sn.into(),
            exp_cmd_sn: window.exp_cmd_sn().into(),
            max_cmd_sn: window.max_cmd_sn().into(),
            r2t_sn: grant.r2t_sn.into(),
            buffer_offset: grant.offset.into(),
            desired_data_transfer_length: grant.len.into(),
        };
        self.send(outbox, pdu.as_bytes(), &[]);
    }

    pub(super) fn management(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        itt: u32,
        response: FunctionResponse,
    ) {
        let pdu = TaskManagementResponse {
            opcode: Opcode::TASK_MANAGEMENT_RESPONSE.0,
            flags: FLAG_FINAL,
            response: response.0,
            reserved: 0,
            total_ahs_length: 0,
            data_segment_length: U24::default(),
            additional_response_information: 0.into(),
            reserved_middle: [0; 4],
            initiator_task_tag: itt.into(),
            reserved_tag: [0; 4],
            stat_sn: self.next_stat_sn().into(),
            exp_cmd_sn: window.exp_cmd_sn().into(),
            max_cmd_sn: window.max_cmd_sn().into(),
            reserved_end: [0; 12],
        };
        self.send(outbox, pdu.as_bytes(), &[]);
    }

    /// Answers a ping of the initiator's with as much of its data as it takes back.
    pub(super) fn pong(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        itt: u32,
        lun: [u8; 8],
        data: &[u8],
    ) {
        let data = data.get(..self.max_segment).unwrap_or(data);
        let stat_sn = self.next_stat_sn();
        self.nop_in(outbox, window, (itt, RESERVED_TAG), lun, stat_sn, data);
    }

    /// A ping of the target's own; it has no status.
    pub(super) fn ping(&mut self, outbox: &mut Outbox, window: CommandWindow, ttt: u32) {
        self.nop_in(outbox, window, (RESERVED_TAG, ttt), [0; 8], self.stat_sn, &[]);
    }

    fn nop_in(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        (itt, ttt): (u32, u32),
        lun: [u8; 8],
        stat_sn: u32,
        data: &[u8],
    ) {
        let pdu = NopIn {
            opcode: Opcode::NOP_IN.0,
            flags: FLAG_FINAL,
            reserved: [0; 2],
            total_ahs_length: 0,
            data_segment_length: U24::new(data.len() as u32),
            lun,
            initiator_task_tag: itt.into(),
            target_transfer_tag: ttt.into(),
            stat_sn: stat_sn.into(),
            exp_cmd_sn: window.exp_cmd_sn().into(),
            max_cmd_sn: window.max_cmd_sn().into(),
            reserved_end: [0; 12],
        };
        self.send(outbox, pdu.as_bytes(), data);
    }

    /// A text response, with F or C as `flags`; `ttt` is reserved in the last one.
    pub(super) fn text(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        (itt, ttt): (u32, u32),
        flags: u8,
        text: &[u8],
    ) {
        let pdu = TextResponse {
            opcode: Opcode::TEXT_RESPONSE.0,
            flags,
            reserved: [0; 2],
            total_ahs_length: 0,
            data_segment_length: U24::new(text.len() as u32),
            lun: [0; 8],
            initiator_task_tag: itt.into(),
            target_transfer_tag: ttt.into(),
            stat_sn: self.next_stat_sn().into(),
            exp_cmd_sn: window.exp_cmd_sn().into(),
            max_cmd_sn: window.max_cmd_sn().into(),
            reserved_end: [0; 12],
        };
        self.send(outbox, pdu.as_bytes(), text);
    }

    pub(super) fn logout(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        itt: u32,
        result: LogoutResult,
        times: (u16, u16),
    ) {
        let pdu = LogoutResponse {
            opcode: Opcode::LOGOUT_RESPONSE.0,
            flags: FLAG_FINAL,
            response: result.0,
            reserved: 0,
            total_ahs_length: 0,
            data_segment_length: U24::default(),
            reserved_lun: [0; 8],
            initiator_task_tag: itt.into(),
            reserved_tag: [0; 4],
            stat_sn: self.next_stat_sn().into(),
            exp_cmd_sn: window.exp_cmd_sn().into(),
            max_cmd_sn: window.max_cmd_sn().into(),
            reserved_middle: [0; 4],
            time2wait: times.0.into(),
            time2retain: times.1.into(),
            reserved_end: [0; 4],
        };
        self.send(outbox, pdu.as_bytes(), &[]);
    }

    /// Tells of an event that no request asked for.
    pub(super) fn event(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        event: AsyncEvent,
        parameters: [u16; 3],
    ) {
        let [parameter1, parameter2, parameter3] = parameters;
        let pdu = AsyncMessage {
            opcode: Opcode::ASYNC_MESSAGE.0,
            flags: FLAG_FINAL,
            reserved: [0; 2],
            total_ahs_length: 0,
            data_segment_length: U24::default(),
            lun: [0; 8],
            initiator_task_tag: RESERVED_TAG.into(),
            reserved_tag: [0; 4],
            stat_sn: self.next_stat_sn().into(),
            exp_cmd_sn: window.exp_cmd_sn().into(),
            max_cmd_sn: window.max_cmd_sn().into(),
            async_event: event.0,
            async_vcode: 0,
            parameter1: parameter1.into(),
            parameter2: parameter2.into(),
            parameter3: parameter3.into(),
            reserved_end: [0; 4],
        };
        self.send(outbox, pdu.as_bytes(), &[]);
    }

    /// Refuses a PDU, whose header goes back.
    #[cold]
    pub(super) fn reject(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        reason: RejectReason,
        of: &Bhs,
    ) {
        let pdu = Reject {
            opcode: Opcode::REJECT.0,
            flags: FLAG_FINAL,
            reason: reason.0,
            reserved: 0,
            total_ahs_length: 0,
            data_segment_length: U24::new(BHS_LEN as u32),
            reserved_lun: [0; 8],
            initiator_task_tag: RESERVED_TAG.into(),
            reserved_tag: [0; 4],
            stat_sn: self.next_stat_sn().into(),
            exp_cmd_sn: window.exp_cmd_sn().into(),
            max_cmd_sn: window.max_cmd_sn().into(),
            data_sn: 0.into(),
            reserved_end: [0; 8],
        };
        self.send(outbox, pdu.as_bytes(), of.as_bytes());
    }

    fn next_stat_sn(&mut self) -> u32 {
        let stat_sn = self.stat_sn;
        self.stat_sn = stat_sn.wrapping_add(1);
        stat_sn
    }

    #[inline]
    fn send(&mut self, outbox: &mut Outbox, header: &[u8], data: &[u8]) {
        self.count(outbox, header.len().saturating_add(data.len()));
        pdu::push(outbox, self.digests, header, data);
    }

    #[inline]
    fn send_lent(&mut self, outbox: &mut Outbox, header: &[u8], data: &SgList, part: (usize, usize)) {
        self.count(outbox, header.len());
        pdu::push_lent(outbox, self.digests, &self.pool, header, data, part);
    }

    #[inline]
    fn count(&mut self, outbox: &Outbox, len: usize) {
        if outbox.is_empty() {
            self.unsent = 0;
        }
        self.unsent = self.unsent.saturating_add(len);
    }
}

/// What a command moved less or more than expected (RFC 7143 §11.4.5).
struct Residual {
    flags: u8,
    count: u32,
    bidirectional_flags: u8,
    bidirectional_count: u32,
}

impl Residual {
    fn of(expected: Expected, response: &Response) -> Residual {
        // Of a bidirectional command, the count is of its data-out.
        let main = expected.data_out.or(expected.data_in).unwrap_or(0);
        let (flags, count) = match (expected.data_out, expected.data_in) {
            // No command of the device server moves both ways: only one of them is its transfer.
            (Some(_), Some(_)) if !response.data_in.is_empty() => difference(0, main),
            _ => difference(response.transfer_len, main),
        };
        let (mut bidirectional_flags, mut bidirectional_count) = (0, 0);
        if let (Some(_), Some(data_in)) = (expected.data_out, expected.data_in) {
            let (flags, count) = difference(response.data_in.len() as u64, data_in);
            // The o and u bits lie two places above O and U.
            (bidirectional_flags, bidirectional_count) = (flags << 2, count);
        }
        Residual { flags, count, bidirectional_flags, bidirectional_count }
    }
}

/// O or U, and by how much.
fn difference(moved: u64, expected: u32) -> (u8, u32) {
    let expected = u64::from(expected);
    let count = u32::try_from(moved.abs_diff(expected)).unwrap_or(u32::MAX);
    match moved.cmp(&expected) {
        std::cmp::Ordering::Less => (FLAG_UNDERFLOW, count),
        std::cmp::Ordering::Equal => (0, 0),
        std::cmp::Ordering::Greater => (FLAG_OVERFLOW, count),
    }
}

/// An initiator that leaves this many bytes of PDUs unread, payload not counted, is not listened to until it has read
/// everything.
const UNSENT: usize = 1 << 20;
