//! PDUs to the initiator, with StatSN, ExpCmdSN and MaxCmdSN.
//!
//! StatSN numbers the responses of a connection (RFC 7143 §4.2.2.2). From error recovery level 1
//! on, responses are retained until ExpStatSN acknowledges them: see `retained`.

use super::datamover::TargetDatamover;
use super::negotiation::TextReply;
use super::retained::{RetainedPdu, RetainedResponses, SentResponse};
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
    /// MaxRecvDataSegmentLength of the initiator, in bytes.
    pub(super) max_segment: usize,
    pub(super) pool: Pool,
    /// Bytes without payload that were queued since the sender was last empty; bounds the memory of
    /// an initiator that does not read.
    unsent: usize,
    /// Responses for retransmission; `None` at error recovery level 0.
    pub(super) retained: Option<RetainedResponses>,
    /// Over RDMA: transfers data instead of Data-In and R2T PDUs.
    pub(super) mover: Option<TargetDatamover>,
}

impl ResponseSender {
    /// Creates the sender of full feature phase. `sender` may still hold the last login response.
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

    /// Whether another request may be answered before the initiator reads.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        self.unsent < UNSENT || self.sender.is_empty()
    }

    /// Takes all unacknowledged responses to commands.
    pub(super) fn take_commands(&mut self) -> Vec<SentResponse> {
        self.retained.as_mut().map(RetainedResponses::take_commands).unwrap_or_default()
    }

    /// Sends the response of a reassigned command: its data from `exp_data_sn` on, in segments for
    /// this connection, then its status. An `exp_data_sn` of 0 or out of range stands for the first
    /// unacknowledged one (RFC 7143 §11.5.6).
    pub(super) fn reassigned(&mut self, window: CommandWindow, sent: SentResponse, exp_data_sn: u32) {
        let SentResponse { expected, response, layout } = sent;
        let is_right = exp_data_sn > 0 && (layout.acked_data_sn..=layout.end()).contains(&exp_data_sn);
        let first = if is_right { exp_data_sn } else { layout.acked_data_sn };
        let mut layout = layout.resegmented(first, self.max_segment, 0);
        layout.stat_sn = self.next_stat_sn();
        let end = self.data_in(window, expected, &response, layout, 0..u32::MAX);
        self.status(window, expected, &response, layout, end);
        if let Some(retained) = &mut self.retained {
            retained
                .retain(layout.stat_sn, RetainedPdu::Command(SentResponse { expected, response, layout }));
        }
    }

    /// Processes ExpStatSN.
    #[inline]
    pub(super) fn acknowledge(&mut self, exp_stat_sn: u32) {
        if let Some(retained) = &mut self.retained {
            retained.acknowledge(exp_stat_sn, self.stat_sn);
        }
    }

    /// Retransmits `count` responses from StatSN `first` on, or with 0 all (RFC 7143 §11.16, Status
    /// SNACK).
    ///
    /// # Errors
    /// If they were never sent, were acknowledged, or are no longer retained.
    pub(super) fn retransmit_status(
        &mut self,
        window: CommandWindow,
        first: u32,
        count: u32,
    ) -> Result<(), RejectReason> {
        let Some(retained) = self.retained.take() else { return Err(RejectReason::SNACK_REJECT) };
        let result = self.retransmit(window, &retained, first, count);
        self.retained = Some(retained);
        result
    }

    fn retransmit(
        &mut self,
        window: CommandWindow,
        retained: &RetainedResponses,
        first: u32,
        count: u32,
    ) -> Result<(), RejectReason> {
        let unacknowledged = self.stat_sn.wrapping_sub(retained.acknowledged);
        let left = unacknowledged.saturating_sub(first.wrapping_sub(retained.acknowledged));
        if left == 0 || count > left {
            return Err(RejectReason::PROTOCOL_ERROR);
        }
        let count = if count == 0 { left } else { count };
        let numbers = || (0..count).map(|nth| first.wrapping_add(nth));
        if numbers().any(|stat_sn| retained.find(stat_sn).is_none()) {
            return Err(RejectReason::SNACK_REJECT);
        }
        for what in numbers().filter_map(|stat_sn| retained.find(stat_sn)) {
            match what {
                RetainedPdu::Pdu { bhs, data } => {
                    let mut bhs = *bhs;
                    numbered(&mut bhs, window);
                    self.send(&bhs, data);
                }
                RetainedPdu::Command(SentResponse { expected, response, layout }) => {
                    let end = layout.end();
                    if layout.is_phase_collapsed {
                        let last = end.wrapping_sub(1)..end;
                        self.data_in(window, *expected, response, *layout, last);
                    } else {
                        self.status(window, *expected, response, *layout, end);
                    }
                }
            }
        }
        Ok(())
    }

    /// Retransmits `count` Data-In PDUs of a command from DataSN `first` on, or with 0 all (RFC
    /// 7143 §11.16, Data SNACK). `None` if the command has no retained response.
    pub(super) fn retransmit_data(
        &mut self,
        window: CommandWindow,
        itt: u32,
        (first, count): (u32, u32),
    ) -> Option<Result<(), RejectReason>> {
        let sent = self.retained.as_mut()?.command(|sent| sent.expected.itt == itt)?.clone();
        let layout = sent.layout;
        let left = layout.end().checked_sub(first).filter(|_| first >= layout.acked_data_sn).unwrap_or(0);
        if left == 0 || count > left {
            return Some(Err(RejectReason::PROTOCOL_ERROR));
        }
        if layout.max_segment > self.max_segment {
            // The initiator has reduced its MaxRecvDataSegmentLength and must send an R-Data SNACK.
            return Some(Err(RejectReason::SNACK_REJECT));
        }
        let data_sns = first..first.saturating_add(if count == 0 { left } else { count });
        self.data_in(window, sent.expected, &sent.response, layout, data_sns);
        Some(Ok(()))
    }

    /// Sends a command's data from DataSN `first` on in segments of the current length, and its
    /// status in a separate PDU with the SNACK's tag (RFC 7143 §11.16, R-Data SNACK).
    ///
    /// # Errors
    /// If that data was not sent, or was acknowledged.
    pub(super) fn resegment(
        &mut self,
        window: CommandWindow,
        itt: u32,
        first: u32,
        snack_tag: u32,
    ) -> Result<(), RejectReason> {
        let max_segment = self.max_segment;
        let sent =
            self.retained.as_mut().and_then(|retained| retained.command(|sent| sent.expected.itt == itt));
        let sent = sent.ok_or(RejectReason::PROTOCOL_ERROR)?;
        if first < sent.layout.acked_data_sn || first >= sent.layout.end() {
            return Err(RejectReason::PROTOCOL_ERROR);
        }
        sent.layout = sent.layout.resegmented(first, max_segment, snack_tag);
        let SentResponse { expected, response, layout } = sent.clone();
        let end = self.data_in(window, expected, &response, layout, 0..u32::MAX);
        self.status(window, expected, &response, layout, end);
        Ok(())
    }

    /// Processes a DataACK: the initiator has all Data-In PDUs before `first` that carried the tag
    /// `ttt`. Has no effect on a response that is acknowledged.
    ///
    /// # Errors
    /// If no Data-In PDU had that tag, or `first` was not sent.
    pub(super) fn acknowledge_data(&mut self, ttt: u32, first: u32) -> Result<(), RejectReason> {
        let Some(retained) = &mut self.retained else { return Err(RejectReason::INVALID_DATA_ACK) };
        let behind = retained.acknowledged.wrapping_sub(ttt);
        match retained.command(|sent| sent.layout.stat_sn == ttt) {
            Some(SentResponse { layout, .. }) if (layout.acked_data_sn..=layout.end()).contains(&first) => {
                layout.acked_data_sn = first;
                Ok(())
            }
            None if (1..1 << 31).contains(&behind) => Ok(()),
            _ => Err(RejectReason::INVALID_DATA_ACK),
        }
    }

    /// Sends an R2T.
    pub(super) fn r2t(
        &mut self,
        window: CommandWindow,
        (lun, itt): ([u8; 8], u32),
        ttt: u32,
        grant: super::transfer::R2tGrant,
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
        let pdu = TaskManagementFunctionResponse {
            opcode: IscsiOpcode::TASK_MANAGEMENT_RESPONSE.0,
            flags: FLAG_FINAL,
            response: response.0,
            initiator_task_tag: itt.into(),
            ..FromZeros::new_zeroed()
        };
        self.send_answer(window, transmute!(pdu), &[]);
    }

    /// Answers a ping of the initiator, with as much of its data as the initiator accepts.
    pub(super) fn nop_in_reply(&mut self, window: CommandWindow, itt: u32, lun: [u8; 8], data: &[u8]) {
        let data = data.get(..self.max_segment).unwrap_or(data);
        self.send_answer(window, nop_in(itt, RESERVED_TAG, lun), data);
    }

    /// Sends a ping. Its StatSN does not advance.
    pub(super) fn nop_in_ping(&mut self, window: CommandWindow, ttt: u32) {
        let mut bhs = nop_in(RESERVED_TAG, ttt, [0; 8]);
        numbered(&mut bhs, window).stat_sn = self.stat_sn.into();
        self.send(&bhs, &[]);
    }

    pub(super) fn text(&mut self, window: CommandWindow, itt: u32, answer: &TextReply) {
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
        session_times: (u16, u16),
    ) {
        let pdu = LogoutResponse {
            opcode: IscsiOpcode::LOGOUT_RESPONSE.0,
            flags: FLAG_FINAL,
            response: result.0,
            initiator_task_tag: itt.into(),
            time2wait: session_times.0.into(),
            time2retain: session_times.1.into(),
            ..FromZeros::new_zeroed()
        };
        self.send_answer(window, transmute!(pdu), &[]);
    }

    /// Sends an asynchronous message.
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

    /// Rejects a PDU; the Reject carries its header.
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

    /// Sends a PDU with the next StatSN and retains it until it is acknowledged.
    fn send_answer(&mut self, window: CommandWindow, mut bhs: Bhs, data: &[u8]) {
        let stat_sn = self.next_stat_sn();
        bhs.data_segment_length = U24::new(data.len() as u32);
        numbered(&mut bhs, window).stat_sn = stat_sn.into();
        self.send(&bhs, data);
        if let Some(retained) = &mut self.retained {
            retained.retain(stat_sn, RetainedPdu::Pdu { bhs, data: SmallVec::from_slice(data) });
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

/// Sets ExpCmdSN and MaxCmdSN. All PDUs of a target have them, and StatSN, at the same offsets.
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

/// Limit of unread PDU bytes, without payload. Above it, nothing is received until the initiator
/// has read everything.
const UNSENT: usize = 1 << 20;
