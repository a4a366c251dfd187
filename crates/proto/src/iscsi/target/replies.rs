//! PDUs to the initiator, with StatSN, ExpCmdSN and MaxCmdSN filled in.
//!
//! StatSN counts what a connection has answered (RFC 7143 §4.2.2.2). From error recovery level 1 on, what is answered is
//! kept until ExpStatSN acknowledges it: see `kept`.

use super::kept::{Kept, Outcome, What};
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
use std::ops::Range;
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
    /// What may have to be sent again; `None` at error recovery level 0.
    kept: Option<Kept>,
}

/// What a command's end is measured by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    pub(super) itt: u32,
    pub(super) lun: [u8; 8],
    /// How much data-in the initiator has room for, in bytes; `None`: it reads nothing.
    pub(super) data_in: Option<u32>,
    /// How much data-out it has, in bytes; `None`: it writes nothing.
    pub(super) data_out: Option<u32>,
    /// R2Ts sent.
    pub(super) r2ts: u32,
}

/// How an answer's data-in is cut into PDUs, and what number its status has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// DataSN and offset of the first PDU; what is before them was cut otherwise, and has come.
    first: (u32, usize),
    /// Of all data, in bytes.
    len: usize,
    max_burst: usize,
    max_segment: usize,
    /// The status is in the last of them.
    collapses: bool,
    stat_sn: u32,
    /// Of the R-Data SNACK that was obeyed last, or 0.
    snack_tag: u32,
    /// The end of each burst asks for an acknowledgement.
    asks: bool,
    /// Data-In PDUs before this one were acknowledged.
    confirmed: u32,
}

/// One Data-In PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    data_sn: u32,
    offset: usize,
    len: usize,
    ends_burst: bool,
    is_last: bool,
}

impl Cut {
    #[inline]
    fn parts(self) -> impl Iterator<Item = Part> {
        let (mut data_sn, mut offset) = self.first;
        let mut burst: usize = 0;
        std::iter::from_fn(move || {
            if offset >= self.len {
                return None;
            }
            let left_in_burst = self.max_burst.saturating_sub(burst);
            let len = self.len.saturating_sub(offset).min(self.max_segment).min(left_in_burst).max(1);
            let is_last = offset.saturating_add(len) == self.len;
            burst = burst.saturating_add(len);
            let ends_burst = is_last || burst >= self.max_burst;
            let part = Part { data_sn, offset, len, ends_burst, is_last };
            if ends_burst {
                burst = 0;
            }
            offset = offset.saturating_add(len);
            data_sn = data_sn.wrapping_add(1);
            Some(part)
        })
    }

    /// The DataSN behind the last.
    fn end(self) -> u32 {
        self.parts().last().map_or(self.first.0, |part| part.data_sn.wrapping_add(1))
    }

    /// The same from `data_sn` on in segments of another length, with its status apart.
    fn again(self, data_sn: u32, max_segment: usize, snack_tag: u32) -> Cut {
        let offset = self.parts().find(|part| part.data_sn == data_sn).map_or(self.len, |part| part.offset);
        let first = (data_sn, offset);
        Cut { first, max_segment, collapses: false, snack_tag, confirmed: data_sn, ..self }
    }
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
            kept: (parameters.get(Key::ErrorRecoveryLevel) > 0).then(|| Kept::new(stat_sn)),
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
        let cut = Cut {
            first: (0, 0),
            len,
            max_burst: self.max_burst,
            max_segment: self.max_segment,
            collapses: len > 0 && response.status == Status::GOOD && expected.data_out.is_none(),
            stat_sn: self.next_stat_sn(),
            snack_tag: 0,
            asks: self.kept.is_some(),
            confirmed: 0,
        };
        let data_sns = self.data_in(outbox, window, expected, response, cut, 0..u32::MAX);
        if !cut.collapses {
            self.status(outbox, window, expected, response, cut, data_sns);
        }
        if let Some(kept) = &mut self.kept
            && (len == 0 || !self.pool.is_short())
        {
            let outcome = Outcome { expected, response: response.clone(), cut };
            kept.keep(cut.stat_sn, What::Command(outcome));
        }
    }

    /// The response that ends a command, apart from its data.
    fn status(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        expected: Expected,
        response: &Response,
        cut: Cut,
        data_sns: u32,
    ) {
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
            snack_tag: cut.snack_tag.into(),
            stat_sn: cut.stat_sn.into(),
            exp_cmd_sn: window.exp_cmd_sn().into(),
            max_cmd_sn: window.max_cmd_sn().into(),
            exp_data_sn: data_sns.wrapping_add(expected.r2ts).into(),
            bidirectional_read_residual_count: residual.bidirectional_count.into(),
            residual_count: residual.count.into(),
        };
        self.send(outbox, pdu.as_bytes(), &data);
    }

    /// Sends data in the PDUs of `cut` whose DataSN is `wanted`; returns the DataSN behind the last of all.
    #[inline]
    fn data_in(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        expected: Expected,
        response: &Response,
        cut: Cut,
        wanted: Range<u32>,
    ) -> u32 {
        let mut end = cut.first.0;
        for part in cut.parts() {
            end = part.data_sn.wrapping_add(1);
            if !wanted.contains(&part.data_sn) {
                continue;
            }
            let mut pdu = DataIn {
                opcode: Opcode::DATA_IN.0,
                flags: if part.ends_burst { FLAG_FINAL } else { 0 },
                reserved: 0,
                status: 0,
                total_ahs_length: 0,
                data_segment_length: U24::new(part.len as u32),
                lun: [0; 8],
                initiator_task_tag: expected.itt.into(),
                target_transfer_tag: RESERVED_TAG.into(),
                stat_sn: 0.into(),
                exp_cmd_sn: window.exp_cmd_sn().into(),
                max_cmd_sn: window.max_cmd_sn().into(),
                data_sn: part.data_sn.into(),
                buffer_offset: (part.offset as u32).into(),
                residual_count: 0.into(),
            };
            if part.is_last && cut.collapses {
                let residual = Residual::of(expected, response);
                pdu.flags |= FLAG_STATUS | residual.flags;
                pdu.status = response.status.0;
                pdu.stat_sn = cut.stat_sn.into();
                pdu.residual_count = residual.count.into();
            } else if part.ends_burst && !part.is_last && cut.asks && cut.stat_sn != RESERVED_TAG {
                // Its answer will say the number of the status that is to come.
                pdu.flags |= FLAG_ACKNOWLEDGE;
                (pdu.target_transfer_tag, pdu.lun) = (cut.stat_sn.into(), expected.lun);
            }
            self.send_lent(outbox, pdu.as_bytes(), &response.data_in, (part.offset, part.len));
        }
        end
    }

    /// The initiator has every answer before this number.
    #[inline]
    pub(super) fn acknowledge(&mut self, exp_stat_sn: u32) {
        if let Some(kept) = &mut self.kept {
            kept.acknowledge(exp_stat_sn, self.stat_sn);
        }
    }

    /// Sends answers again as they were: `count` from `first` on, or with 0 all there are (RFC 7143 §11.16, Status
    /// SNACK).
    ///
    /// # Errors
    /// If they were never sent or have been acknowledged; if they are not kept any more.
    pub(super) fn answers_again(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        first: u32,
        count: u32,
    ) -> Result<(), RejectReason> {
        let Some(kept) = self.kept.take() else { return Err(RejectReason::SNACK_REJECT) };
        let result = self.send_again(outbox, window, &kept, first, count);
        self.kept = Some(kept);
        result
    }

    fn send_again(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        kept: &Kept,
        first: u32,
        count: u32,
    ) -> Result<(), RejectReason> {
        let unacknowledged = self.stat_sn.wrapping_sub(kept.acknowledged());
        let left = unacknowledged.saturating_sub(first.wrapping_sub(kept.acknowledged()));
        if left == 0 || count > left {
            return Err(RejectReason::PROTOCOL_ERROR);
        }
        let count = if count == 0 { left } else { count };
        let numbers = || (0..count).map(|nth| first.wrapping_add(nth));
        if numbers().any(|stat_sn| kept.find(stat_sn).is_none()) {
            return Err(RejectReason::SNACK_REJECT);
        }
        for what in numbers().filter_map(|stat_sn| kept.find(stat_sn)) {
            match what {
                What::Pdu { header, data } => {
                    let mut header = *header;
                    for (place, value) in [(28, window.exp_cmd_sn()), (32, window.max_cmd_sn())] {
                        if let Some(field) = header.get_mut(place..).and_then(<[u8]>::first_chunk_mut) {
                            *field = value.to_be_bytes();
                        }
                    }
                    self.send(outbox, &header, data);
                }
                What::Command(Outcome { expected, response, cut }) => {
                    let end = cut.end();
                    if cut.collapses {
                        let last = end.wrapping_sub(1)..end;
                        self.data_in(outbox, window, *expected, response, *cut, last);
                    } else {
                        self.status(outbox, window, *expected, response, *cut, end);
                    }
                }
            }
        }
        Ok(())
    }

    /// Sends Data-In PDUs of a command again: `count` from `first` on, or with 0 all there are (RFC 7143 §11.16, Data
    /// SNACK). `None` if the command has no answer here.
    pub(super) fn data_again(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        itt: u32,
        (first, count): (u32, u32),
    ) -> Option<Result<(), RejectReason>> {
        let outcome = self.kept.as_mut()?.command(|outcome| outcome.expected.itt == itt)?.clone();
        let cut = outcome.cut;
        let left = cut.end().checked_sub(first).filter(|_| first >= cut.confirmed).unwrap_or(0);
        if left == 0 || count > left {
            return Some(Err(RejectReason::PROTOCOL_ERROR));
        }
        if cut.max_segment > self.max_segment {
            // The initiator takes shorter segments now, and has to say how it wants them by R-Data.
            return Some(Err(RejectReason::SNACK_REJECT));
        }
        let wanted = first..first.saturating_add(if count == 0 { left } else { count });
        self.data_in(outbox, window, outcome.expected, &outcome.response, cut, wanted);
        Some(Ok(()))
    }

    /// Sends all data of a command from the PDU `first` on, in segments as long as they may be now, and its status apart
    /// with the SNACK's tag (RFC 7143 §11.16, R-Data SNACK).
    ///
    /// # Errors
    /// If that data was not sent, or has been acknowledged.
    pub(super) fn resegment(
        &mut self,
        outbox: &mut Outbox,
        window: CommandWindow,
        itt: u32,
        first: u32,
        snack_tag: u32,
    ) -> Result<(), RejectReason> {
        let max_segment = self.max_segment;
        let outcome = self.kept.as_mut().and_then(|kept| kept.command(|outcome| outcome.expected.itt == itt));
        let outcome = outcome.ok_or(RejectReason::PROTOCOL_ERROR)?;
        if first < outcome.cut.confirmed || first >= outcome.cut.end() {
            return Err(RejectReason::PROTOCOL_ERROR);
        }
        outcome.cut = outcome.cut.again(first, max_segment, snack_tag);
        let Outcome { expected, response, cut } = outcome.clone();
        let end = self.data_in(outbox, window, expected, &response, cut, 0..u32::MAX);
        self.status(outbox, window, expected, &response, cut, end);
        Ok(())
    }

    /// The initiator has all Data-In PDUs before `first` of the command whose PDUs had the tag `ttt`; an answer that is
    /// acknowledged as a whole needs that no more.
    ///
    /// # Errors
    /// If no Data-In had that tag, or not as many were sent.
    pub(super) fn confirm_data(&mut self, ttt: u32, first: u32) -> Result<(), RejectReason> {
        let Some(kept) = &mut self.kept else { return Err(RejectReason::INVALID_DATA_ACK) };
        let behind = kept.acknowledged().wrapping_sub(ttt);
        match kept.command(|outcome| outcome.cut.stat_sn == ttt) {
            Some(Outcome { cut, .. }) if (cut.confirmed..=cut.end()).contains(&first) => {
                cut.confirmed = first;
                Ok(())
            }
            None if (1..1 << 31).contains(&behind) => Ok(()),
            _ => Err(RejectReason::INVALID_DATA_ACK),
        }
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
        self.send_answer(outbox, pdu.as_bytes(), &[]);
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
        if itt == RESERVED_TAG {
            self.send(outbox, pdu.as_bytes(), data);
        } else {
            self.send_answer(outbox, pdu.as_bytes(), data);
        }
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
        self.send_answer(outbox, pdu.as_bytes(), text);
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
        self.send_answer(outbox, pdu.as_bytes(), &[]);
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
        self.send_answer(outbox, pdu.as_bytes(), &[]);
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
        self.send_answer(outbox, pdu.as_bytes(), of.as_bytes());
    }

    fn next_stat_sn(&mut self) -> u32 {
        let stat_sn = self.stat_sn;
        self.stat_sn = stat_sn.wrapping_add(1);
        stat_sn
    }

    /// Sends a PDU that has a StatSN of its own.
    fn send_answer(&mut self, outbox: &mut Outbox, header: &[u8], data: &[u8]) {
        self.send(outbox, header, data);
        if let Some(kept) = &mut self.kept
            && let Some(header) = header.first_chunk()
        {
            let what = What::Pdu { header: *header, data: SmallVec::from_slice(data) };
            kept.keep(self.stat_sn.wrapping_sub(1), what);
        }
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
