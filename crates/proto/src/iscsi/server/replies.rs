//! PDUs to the initiator, with StatSN, ExpCmdSN and MaxCmdSN filled in.
//!
//! StatSN counts what a connection has answered (RFC 7143 §4.2.2.2). From error recovery level 1
//! on, what is answered is kept until ExpStatSN acknowledges it: see `kept`.

use super::datamover::TargetDatamover;
use super::negotiation::TextAnswer;
use super::retained::{RetainedPdu, RetainedResponses, SentStatus};
use super::sequence::CommandWindow;
use crate::iscsi::digests::IscsiDigests;
use crate::iscsi::login::operational::{OperationalKey, OperationalParameters};
use crate::iscsi::sender::Sender;
use blockmux_volume::{Pool, SgList};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{BHS_LEN, Bhs, FLAG_FINAL, IscsiOpcode, RESERVED_TAG, U24};
use smallvec::SmallVec;
use zerocopy::{FromZeros, IntoBytes, transmute, transmute_mut, transmute_ref};

/// Sends PDUs to the initiator.
pub(super) struct ResponseSender {
    pub(super) sender: Sender,
    stat_sn: u32,
    pub(super) max_burst: usize,
    /// The longest data segment that the initiator takes, in bytes.
    pub(super) max_segment: usize,
    pub(super) pool: Pool,
    /// Bytes pushed without payload since everything was last seen sent: what an initiator that
    /// does not read makes us keep.
    unsent: usize,
    /// What may have to be sent again; `None` at error recovery level 0.
    pub(super) retained: Option<RetainedResponses>,
    /// Over RDMA: what moves data in the place of Data-In and R2T.
    pub(super) mover: Option<TargetDatamover>,
}

impl ResponseSender {
    /// `sender` may still have the last response of the login.
    pub(super) fn new(
        parameters: &OperationalParameters,
        stat_sn: u32,
        pool: Pool,
        mut sender: Sender,
    ) -> ResponseSender {
        sender.set_digests(IscsiDigests::of(parameters));
        ResponseSender {
            sender,
            stat_sn,
            max_burst: parameters.get(OperationalKey::MaxBurstLength) as usize,
            max_segment: parameters.max_send_data_segment_length(),
            pool,
            unsent: 0,
            retained: (parameters.get(OperationalKey::ErrorRecoveryLevel) > 0)
                .then(|| RetainedResponses::new(stat_sn)),
            mover: None,
        }
    }

    pub(super) fn digests(&self) -> IscsiDigests {
        self.sender.digests()
    }

    pub(super) fn set_max_segment(&mut self, len: usize) {
        self.max_segment = len;
    }

    /// Whether another request may be answered before the initiator reads something.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        self.unsent < UNSENT || self.sender.is_empty()
    }

    /// All answers to commands that are not acknowledged.
    pub(super) fn take_commands(&mut self) -> Vec<SentStatus> {
        self.retained.as_mut().map(RetainedResponses::take_commands).unwrap_or_default()
    }

    /// Sends the answer to a command that has come on another connection: its data from
    /// `exp_data_sn` on, in segments as long as they may be here, and then its status. 0, and what
    /// cannot be right, stands for what was acknowledged last (RFC 7143 §11.5.6).
    pub(super) fn reassigned(&mut self, window: CommandWindow, outcome: SentStatus, exp_data_sn: u32) {
        let SentStatus { expected, response, cut } = outcome;
        let is_right = exp_data_sn > 0 && (cut.confirmed..=cut.end()).contains(&exp_data_sn);
        let first = if is_right { exp_data_sn } else { cut.confirmed };
        let mut cut = cut.again(first, self.max_segment, 0);
        cut.stat_sn = self.next_stat_sn();
        let end = self.data_in(window, expected, &response, cut, 0..u32::MAX);
        self.status(window, expected, &response, cut, end);
        if let Some(kept) = &mut self.retained {
            kept.keep(cut.stat_sn, RetainedPdu::Command(SentStatus { expected, response, cut }));
        }
    }

    /// The initiator has every answer before this number.
    #[inline]
    pub(super) fn acknowledge(&mut self, exp_stat_sn: u32) {
        if let Some(kept) = &mut self.retained {
            kept.acknowledge(exp_stat_sn, self.stat_sn);
        }
    }

    /// Sends answers again as they were: `count` from `first` on, or with 0 all there are (RFC 7143
    /// §11.16, Status SNACK).
    ///
    /// # Errors
    /// If they were never sent or have been acknowledged; if they are not kept any more.
    pub(super) fn answers_again(
        &mut self,
        window: CommandWindow,
        first: u32,
        count: u32,
    ) -> Result<(), RejectReason> {
        let Some(kept) = self.retained.take() else { return Err(RejectReason::SNACK_REJECT) };
        let result = self.send_again(window, &kept, first, count);
        self.retained = Some(kept);
        result
    }

    fn send_again(
        &mut self,
        window: CommandWindow,
        kept: &RetainedResponses,
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
                RetainedPdu::Pdu { bhs, data } => {
                    let mut bhs = *bhs;
                    numbered(&mut bhs, window);
                    self.send(&bhs, data);
                }
                RetainedPdu::Command(SentStatus { expected, response, cut }) => {
                    let end = cut.end();
                    if cut.collapses {
                        let last = end.wrapping_sub(1)..end;
                        self.data_in(window, *expected, response, *cut, last);
                    } else {
                        self.status(window, *expected, response, *cut, end);
                    }
                }
            }
        }
        Ok(())
    }

    /// Sends Data-In PDUs of a command again: `count` from `first` on, or with 0 all there are (RFC
    /// 7143 §11.16, Data SNACK). `None` if the command has no answer here.
    pub(super) fn data_again(
        &mut self,
        window: CommandWindow,
        itt: u32,
        (first, count): (u32, u32),
    ) -> Option<Result<(), RejectReason>> {
        let outcome = self.retained.as_mut()?.command(|outcome| outcome.expected.itt == itt)?.clone();
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
        self.data_in(window, outcome.expected, &outcome.response, cut, wanted);
        Some(Ok(()))
    }

    /// Sends all data of a command from the PDU `first` on, in segments as long as they may be now,
    /// and its status apart with the SNACK's tag (RFC 7143 §11.16, R-Data SNACK).
    ///
    /// # Errors
    /// If that data was not sent, or has been acknowledged.
    pub(super) fn resegment(
        &mut self,
        window: CommandWindow,
        itt: u32,
        first: u32,
        snack_tag: u32,
    ) -> Result<(), RejectReason> {
        let max_segment = self.max_segment;
        let outcome =
            self.retained.as_mut().and_then(|kept| kept.command(|outcome| outcome.expected.itt == itt));
        let outcome = outcome.ok_or(RejectReason::PROTOCOL_ERROR)?;
        if first < outcome.cut.confirmed || first >= outcome.cut.end() {
            return Err(RejectReason::PROTOCOL_ERROR);
        }
        outcome.cut = outcome.cut.again(first, max_segment, snack_tag);
        let SentStatus { expected, response, cut } = outcome.clone();
        let end = self.data_in(window, expected, &response, cut, 0..u32::MAX);
        self.status(window, expected, &response, cut, end);
        Ok(())
    }

    /// The initiator has all Data-In PDUs before `first` of the command whose PDUs had the tag
    /// `ttt`; an answer that is acknowledged as a whole needs that no more.
    ///
    /// # Errors
    /// If no Data-In had that tag, or not as many were sent.
    pub(super) fn confirm_data(&mut self, ttt: u32, first: u32) -> Result<(), RejectReason> {
        let Some(kept) = &mut self.retained else { return Err(RejectReason::INVALID_DATA_ACK) };
        let behind = kept.acknowledged().wrapping_sub(ttt);
        match kept.command(|outcome| outcome.cut.stat_sn == ttt) {
            Some(SentStatus { cut, .. }) if (cut.confirmed..=cut.end()).contains(&first) => {
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
        window: CommandWindow,
        (lun, itt): ([u8; 8], u32),
        ttt: u32,
        grant: super::transfer::Grant,
    ) {
        let pdu = IscsiR2t {
            opcode: IscsiOpcode::R2T.0,
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
        self.send(transmute_ref!(&pdu), &[]);
    }

    pub(super) fn management(&mut self, window: CommandWindow, itt: u32, response: FunctionResponse) {
        let pdu = TaskManagementResponse {
            opcode: IscsiOpcode::TASK_MANAGEMENT_RESPONSE.0,
            flags: FLAG_FINAL,
            response: response.0,
            initiator_task_tag: itt.into(),
            ..FromZeros::new_zeroed()
        };
        self.send_answer(window, transmute!(pdu), &[]);
    }

    /// Answers a ping of the initiator's with as much of its data as it takes back.
    pub(super) fn pong(&mut self, window: CommandWindow, itt: u32, lun: [u8; 8], data: &[u8]) {
        let data = data.get(..self.max_segment).unwrap_or(data);
        self.send_answer(window, nop_in(itt, RESERVED_TAG, lun), data);
    }

    /// A ping of the target's own; it has no status.
    pub(super) fn ping(&mut self, window: CommandWindow, ttt: u32) {
        let mut bhs = nop_in(RESERVED_TAG, ttt, [0; 8]);
        numbered(&mut bhs, window).stat_sn = self.stat_sn.into();
        self.send(&bhs, &[]);
    }

    pub(super) fn text(&mut self, window: CommandWindow, itt: u32, answer: &TextAnswer) {
        let pdu = TextResponse {
            opcode: IscsiOpcode::TEXT_RESPONSE.0,
            flags: answer.flags,
            initiator_task_tag: itt.into(),
            target_transfer_tag: answer.ttt.into(),
            ..FromZeros::new_zeroed()
        };
        self.send_answer(window, transmute!(pdu), &answer.text);
    }

    pub(super) fn logout(
        &mut self,
        window: CommandWindow,
        itt: u32,
        result: LogoutResult,
        times: (u16, u16),
    ) {
        let pdu = LogoutResponse {
            opcode: IscsiOpcode::LOGOUT_RESPONSE.0,
            flags: FLAG_FINAL,
            response: result.0,
            initiator_task_tag: itt.into(),
            time2wait: times.0.into(),
            time2retain: times.1.into(),
            ..FromZeros::new_zeroed()
        };
        self.send_answer(window, transmute!(pdu), &[]);
    }

    /// Tells of an event that no request asked for.
    pub(super) fn event(&mut self, window: CommandWindow, event: AsyncEvent, parameters: [u16; 3]) {
        let [parameter1, parameter2, parameter3] = parameters;
        let pdu = AsyncMessage {
            opcode: IscsiOpcode::ASYNC_MESSAGE.0,
            flags: FLAG_FINAL,
            initiator_task_tag: RESERVED_TAG.into(),
            async_event: event.0,
            parameter1: parameter1.into(),
            parameter2: parameter2.into(),
            parameter3: parameter3.into(),
            ..FromZeros::new_zeroed()
        };
        self.send_answer(window, transmute!(pdu), &[]);
    }

    /// Refuses a PDU, whose header goes back.
    #[cold]
    pub(super) fn reject(&mut self, window: CommandWindow, reason: RejectReason, of: &Bhs) {
        let pdu = Reject {
            opcode: IscsiOpcode::REJECT.0,
            flags: FLAG_FINAL,
            reason: reason.0,
            initiator_task_tag: RESERVED_TAG.into(),
            ..FromZeros::new_zeroed()
        };
        self.send_answer(window, transmute!(pdu), of.as_bytes());
    }

    pub(super) fn next_stat_sn(&mut self) -> u32 {
        let stat_sn = self.stat_sn;
        self.stat_sn = stat_sn.wrapping_add(1);
        stat_sn
    }

    /// Sends a PDU with the next StatSN, and keeps it until it is acknowledged.
    fn send_answer(&mut self, window: CommandWindow, mut bhs: Bhs, data: &[u8]) {
        let stat_sn = self.next_stat_sn();
        bhs.data_segment_length = U24::new(data.len() as u32);
        numbered(&mut bhs, window).stat_sn = stat_sn.into();
        self.send(&bhs, data);
        if let Some(kept) = &mut self.retained {
            kept.keep(stat_sn, RetainedPdu::Pdu { bhs, data: SmallVec::from_slice(data) });
        }
    }

    #[inline]
    pub(super) fn send(&mut self, bhs: &Bhs, data: &[u8]) {
        self.count(BHS_LEN.saturating_add(data.len()));
        self.sender.push(bhs, data);
    }

    #[inline]
    pub(super) fn send_borrowed(&mut self, bhs: &Bhs, data: &SgList, part: (usize, usize)) {
        self.count(BHS_LEN);
        self.sender.push_borrowed(&self.pool, bhs, data, part);
    }

    #[inline]
    fn count(&mut self, len: usize) {
        if self.sender.is_empty() {
            self.unsent = 0;
        }
        self.unsent = self.unsent.saturating_add(len);
    }
}

/// Sets ExpCmdSN and MaxCmdSN, which every PDU of a target has in the same places, as StatSN.
fn numbered(bhs: &mut Bhs, window: CommandWindow) -> &mut NopIn {
    let pdu: &mut NopIn = transmute_mut!(bhs);
    pdu.exp_cmd_sn = window.exp_cmd_sn().into();
    pdu.max_cmd_sn = window.max_cmd_sn().into();
    pdu
}

fn nop_in(itt: u32, ttt: u32, lun: [u8; 8]) -> Bhs {
    transmute!(NopIn {
        opcode: IscsiOpcode::NOP_IN.0,
        flags: FLAG_FINAL,
        lun,
        initiator_task_tag: itt.into(),
        target_transfer_tag: ttt.into(),
        ..FromZeros::new_zeroed()
    })
}

/// An initiator that leaves this many bytes of PDUs unread, payload not counted, is not listened to
/// until it has read everything.
const UNSENT: usize = 1 << 20;
