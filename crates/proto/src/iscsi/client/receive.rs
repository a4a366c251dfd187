//! Processing of received PDUs and iSER messages, and placement of read data.
//!
//! ```text
//!   Head ──short segment, complete─────────▶ on_pdu, on_data_in
//!    │ └─ long Data-In ──▶ Placing, straight into the I/O's memory ──▶ Tail: padding, digest ──▶ on_data_in
//! ```
//! If a command's whole data is in the receive buffer, the user borrows it from there. Otherwise it
//! is copied, or received directly into the I/O's memory.
//!
//! A target may request a negotiation (RFC 7143 §11.9 to §11.11). The initiator has nothing to
//! change, so its text request is empty. Only MaxRecvDataSegmentLength may be declared again.
use super::connection::InitiatorConnection;
use super::datamover::{DelayedResponse, ResponseData};
use super::full::{AnnouncedLoss, FullFeatureSession};
use super::immediate::{LOGOUT_TAG, PING_TAG, TEXT_TAG};
use crate::driver::session::{Demand, ProtocolError};
use crate::initiator::command_memory::CommandMemory;
use crate::iscsi::digests::IscsiDigests;
use crate::iscsi::iser::IserMessage;
use crate::iscsi::pdu::{self, IscsiHeader, ParsedIscsiPdu};
use crate::iscsi::text::{self, MAX_TEXT};
use crate::rdma::Stag;
use crate::rdma::exposure::WrongResponse;
use crate::scsi::ScsiStatus;
use crate::scsi::initiator::{DataTransfer, ScsiOutcome, SenseCode};
use crate::slots::SlotKey;
use blockmux_volume::{Chunk, Crc32c, Seg, SgList};
use blockmux_wire::iscsi::scsi::{
    DataIn, FLAG_ACKNOWLEDGE, FLAG_OVERFLOW, FLAG_STATUS, FLAG_UNDERFLOW, IscsiR2t, ScsiResponse,
    ServiceResponse,
};
use blockmux_wire::iscsi::session::{
    AsyncEvent, AsyncMessage, LogoutResponse, NopIn, Reject, RejectReason, TextResponse,
};
use blockmux_wire::iscsi::{
    BHS_LEN, Bhs, DIGEST_LEN, FLAG_CONTINUE, FLAG_FINAL, IscsiOpcode, RESERVED_TAG, U24, padding,
};
use std::time::Duration;
use zerocopy::transmute_ref;

/// Position in the target's byte stream.
pub(super) enum IscsiStreamState {
    /// At the start of a PDU; this many contiguous bytes are needed.
    Head(usize),
    /// In the data segment of a long Data-In, received into `place`.
    Placing { bhs: Bhs, key: SlotKey, place: SgList },
    /// After that data segment: padding and digest.
    Tail { bhs: Bhs, key: SlotKey, crc: Crc32c },
    /// In a data segment that is dropped, with this many bytes left.
    Skipping(usize),
}

/// The result of a parsing step.
enum IscsiReceiveStep {
    Consumed(usize),
    NeedsMore,
}

/// The target's response to a text request, as far as received.
#[derive(Default)]
pub(super) struct TextExchange {
    text: Vec<u8>,
    rounds: u32,
}

impl IscsiStreamState {
    /// At the start of a PDU.
    pub(super) const HEAD: IscsiStreamState = IscsiStreamState::Head(BHS_LEN);

    #[inline]
    pub(super) fn demand(&self, digests: IscsiDigests) -> Demand {
        match self {
            IscsiStreamState::Head(need) => Demand::Bytes(*need),
            IscsiStreamState::Placing { place, .. } => Demand::Place(place.clone()),
            IscsiStreamState::Tail { bhs, .. } => Demand::Bytes(digests.tail_len(data_len(bhs))),
            IscsiStreamState::Skipping(_) => Demand::Bytes(1),
        }
    }

    pub(super) fn is_between_pdus(&self) -> bool {
        matches!(self, IscsiStreamState::Head(_))
    }
}

impl FullFeatureSession {
    /// Consumes complete PDUs of `input` from `at` on; returns the offset of the first unread byte.
    #[inline]
    pub(super) fn on_bytes(
        &mut self,
        connection: &mut InitiatorConnection,
        input: &Chunk,
        mut at: usize,
    ) -> Result<usize, ProtocolError> {
        connection.keep_alive.has_received = true;
        if connection.sender.is_empty() {
            connection.unsent_replies = 0;
        }
        let bytes = input.unread();
        while !self.is_over() {
            let rest = bytes.get(at..).unwrap_or_default();
            let step = match &mut connection.stream_state {
                IscsiStreamState::Head(_) => self.on_head(connection, input, at, rest)?,
                IscsiStreamState::Placing { .. } => IscsiReceiveStep::NeedsMore,
                IscsiStreamState::Tail { .. } => self.on_tail(connection, rest)?,
                IscsiStreamState::Skipping(left) => {
                    let here = rest.len().min(*left);
                    *left = left.saturating_sub(here);
                    if *left == 0 {
                        connection.stream_state = IscsiStreamState::HEAD;
                    } else if here == 0 {
                        return Ok(at);
                    }
                    IscsiReceiveStep::Consumed(here)
                }
            };
            match step {
                IscsiReceiveStep::Consumed(len) => at = at.saturating_add(len),
                IscsiReceiveStep::NeedsMore => return Ok(at),
            }
        }
        Ok(bytes.len())
    }

    /// Called when the memory of [`IscsiStreamState::Placing`] is full.
    #[inline]
    pub(super) fn on_placed(&mut self, connection: &mut InitiatorConnection) -> Result<(), ProtocolError> {
        connection.keep_alive.has_received = true;
        let digests = connection.negotiated.digests;
        match std::mem::replace(&mut connection.stream_state, IscsiStreamState::HEAD) {
            IscsiStreamState::Placing { bhs, key, place } => {
                let mut crc = Crc32c::default();
                if digests.data {
                    crc.add_list(&place);
                }
                if digests.tail_len(data_len(&bhs)) == 0 {
                    return self.on_data_in(connection, key, transmute_ref!(&bhs));
                }
                connection.stream_state = IscsiStreamState::Tail { bhs, key, crc };
            }
            other => connection.stream_state = other,
        }
        Ok(())
    }

    #[inline]
    fn on_head(
        &mut self,
        connection: &mut InitiatorConnection,
        input: &Chunk,
        at: usize,
        rest: &[u8],
    ) -> Result<IscsiReceiveStep, ProtocolError> {
        let digests = connection.negotiated.digests;
        let head = match pdu::parse(rest, digests)? {
            ParsedIscsiPdu::Incomplete(len) => {
                connection.stream_state = IscsiStreamState::Head(len);
                return Ok(IscsiReceiveStep::NeedsMore);
            }
            ParsedIscsiPdu::Head(head) => head,
        };
        if head.data_len > connection.negotiated.max_receive_segment {
            return Err(error("sent a data segment above MaxRecvDataSegmentLength", "RFC 7143 §13.12"));
        }
        let is_data = head.bhs.opcode() == IscsiOpcode::DATA_IN;
        let (data, whole) = match head.segment(rest, digests) {
            Ok(found) => found,
            Err(whole) if head.data_len <= MAX_BUFFERED_SEGMENT => {
                connection.stream_state = IscsiStreamState::Head(whole);
                return Ok(IscsiReceiveStep::NeedsMore);
            }
            Err(whole) if is_data => return self.begin_placing(connection, &head, whole),
            Err(_) => {
                return Err(error(
                    "sent more than 64 KiB with a PDU that carries no data of blocks",
                    "RFC 7143 §11",
                ));
            }
        };
        connection.stream_state = IscsiStreamState::HEAD;
        if digests.data && !data.is_empty() {
            let covered = rest.get(head.len..whole.saturating_sub(DIGEST_LEN)).unwrap_or_default();
            let mut crc = Crc32c::default();
            crc.add(covered);
            if !rest.get(..whole).unwrap_or_default().ends_with(&crc.to_le_bytes()) {
                self.on_damaged(connection, &head.bhs)?;
                return Ok(IscsiReceiveStep::Consumed(whole));
            }
        }
        if is_data {
            let data_in: &DataIn = transmute_ref!(&head.bhs);
            if let Some(key) = self.check_data_in(connection, data_in)? {
                if self.queue.can_borrow(key, data.len()) {
                    self.queue.attach_borrowed(key, input.slice(at.saturating_add(head.len), data.len()));
                } else if !data.is_empty() {
                    let place = self.place(key, data_in)?;
                    place.copy_from(data);
                }
                self.on_data_in(connection, key, data_in)?;
            }
        } else {
            self.on_pdu(connection, &head.bhs, data)?;
        }
        Ok(IscsiReceiveStep::Consumed(whole))
    }

    /// Starts a long Data-In that is received into its place.
    fn begin_placing(
        &mut self,
        connection: &mut InitiatorConnection,
        head: &IscsiHeader,
        whole: usize,
    ) -> Result<IscsiReceiveStep, ProtocolError> {
        let data_in: &DataIn = transmute_ref!(&head.bhs);
        match self.check_data_in(connection, data_in)? {
            Some(key) => {
                let place = self.place(key, data_in)?;
                connection.stream_state = IscsiStreamState::Placing { bhs: head.bhs, key, place };
            }
            None => connection.stream_state = IscsiStreamState::Skipping(whole.saturating_sub(head.len)),
        }
        Ok(IscsiReceiveStep::Consumed(head.len))
    }

    fn on_tail(
        &mut self,
        connection: &mut InitiatorConnection,
        rest: &[u8],
    ) -> Result<IscsiReceiveStep, ProtocolError> {
        let IscsiStreamState::Tail { bhs, key, crc } = &connection.stream_state else {
            return Ok(IscsiReceiveStep::NeedsMore);
        };
        let (bhs, key, mut crc) = (*bhs, *key, *crc);
        let digests = connection.negotiated.digests;
        let len = digests.tail_len(data_len(&bhs));
        let Some(tail) = rest.get(..len) else { return Ok(IscsiReceiveStep::NeedsMore) };
        connection.stream_state = IscsiStreamState::HEAD;
        if digests.data {
            crc.add(tail.get(..padding(data_len(&bhs))).unwrap_or_default());
            if !tail.ends_with(&crc.to_le_bytes()) {
                self.on_damaged(connection, &bhs)?;
                return Ok(IscsiReceiveStep::Consumed(len));
            }
        }
        self.on_data_in(connection, key, transmute_ref!(&bhs))?;
        Ok(IscsiReceiveStep::Consumed(len))
    }

    /// Checks the header of a Data-In (RFC 7143 §11.7). Data must be in order, as DataPDUInOrder
    /// and DataSequenceInOrder require. `None` at error recovery level 1 and above if the PDU is to
    /// be dropped.
    #[inline]
    fn check_data_in(
        &mut self,
        connection: &mut InitiatorConnection,
        data_in: &DataIn,
    ) -> Result<Option<SlotKey>, ProtocolError> {
        let fault = |what| Err(error(what, "RFC 7143 §11.7"));
        let Some(key) = self.find(connection, data_in.initiator_task_tag.get()) else {
            // Data that was requested twice may arrive after its task has ended.
            return if self.negotiated.level > 0 { Ok(None) } else { fault("sent data for an unknown task") };
        };
        let Some((progress, DataTransfer::In(expected))) = self.queue.transport(key) else {
            return fault("sent data for a command that does not read");
        };
        let len = data_in.data_segment_length.get();
        if data_in.data_sn.get() != progress.data_sn && self.negotiated.level > 0 {
            return self.on_unexpected_data(connection, key, data_in);
        }
        if data_in.buffer_offset.get() != progress.next || data_in.data_sn.get() != progress.data_sn {
            return fault("sent data out of order");
        }
        if progress.next.checked_add(len).is_none_or(|end| end > expected) {
            return fault("sent more data than requested");
        }
        Ok(Some(key))
    }

    /// The memory for a checked Data-In.
    #[inline]
    fn place(&mut self, key: SlotKey, data_in: &DataIn) -> Result<SgList, ProtocolError> {
        let from = data_in.buffer_offset.get() as usize;
        let len = data_in.data_segment_length.get() as usize;
        let Some((list, base)) = self.queue.data_in(key) else {
            return Err(error("sent data for a command that does not read", "RFC 7143 §11.7"));
        };
        if base == 0 && from == 0 && list.len() == len {
            return Ok(list.clone());
        }
        Ok(list.slice(base.saturating_add(from), len))
    }

    /// Processes an iSER message.
    pub(super) fn on_message(
        &mut self,
        connection: &mut InitiatorConnection,
        message: &IserMessage,
        invalidated: Option<Stag>,
        written: Option<Seg>,
    ) -> Result<(), ProtocolError> {
        connection.keep_alive.has_received = true;
        if connection.sender.is_empty() {
            connection.unsent_replies = 0;
        }
        let bhs = &message.bhs;
        if message.data_len() > connection.negotiated.max_receive_segment {
            return Err(error("sent a data segment above InitiatorRecvDataSegmentLength", "RFC 7145 §6.5"));
        }
        match bhs.opcode() {
            IscsiOpcode::SCSI_RESPONSE => self.on_response_message(connection, message, invalidated, written),
            _ if invalidated.is_some() => Err(error(
                "invalidated memory with a message that is not the command's response",
                "RFC 7145 §7.3.2",
            )),
            IscsiOpcode::DATA_IN | IscsiOpcode::R2T => {
                Err(error("sent a Data-In or R2T PDU over RDMA", "RFC 7145 §7.1"))
            }
            _ => self.on_pdu(connection, bhs, &bytes(message)),
        }
    }

    /// Processes a SCSI Response over RDMA. Its command ends when the target can no longer access
    /// its memory.
    #[inline]
    fn on_response_message(
        &mut self,
        connection: &mut InitiatorConnection,
        message: &IserMessage,
        invalidated: Option<Stag>,
        written: Option<Seg>,
    ) -> Result<(), ProtocolError> {
        let bhs = &message.bhs;
        let common: &NopIn = transmute_ref!(bhs);
        self.on_numbers(common.exp_cmd_sn.get(), common.max_cmd_sn.get());
        self.on_status(connection, common.stat_sn.get())?;
        if let Some(key) = self.find(connection, bhs.initiator_task_tag.get())
            && let Some(mover) = &mut connection.mover
        {
            match mover.commands.on_response(key, invalidated) {
                Ok(None) => {}
                Ok(Some(stag)) => {
                    let response = DelayedResponse { bhs: *bhs, data: bytes(message) };
                    mover.commands.close(key, stag, Some(response));
                    return Ok(());
                }
                Err(wrong) => return Err(wrong_response(wrong)),
            }
            if let Some(data) = written {
                self.queue.attach_borrowed(key, data);
            }
        }
        // The common case.
        if message.data.is_none() {
            return self.on_response(connection, transmute_ref!(bhs), &[]);
        }
        self.on_response(connection, transmute_ref!(bhs), &bytes(message))
    }

    /// Processes a PDU other than Data-In, with all its data.
    #[inline]
    pub(super) fn on_pdu(
        &mut self,
        connection: &mut InitiatorConnection,
        bhs: &Bhs,
        data: &[u8],
    ) -> Result<(), ProtocolError> {
        // All PDUs of a target have these numbers at the same offsets.
        let common: &NopIn = transmute_ref!(bhs);
        self.on_numbers(common.exp_cmd_sn.get(), common.max_cmd_sn.get());
        let stat_sn = common.stat_sn.get();
        match bhs.opcode() {
            IscsiOpcode::SCSI_RESPONSE => {
                if !self.on_status(connection, stat_sn)? {
                    return Ok(());
                }
                self.on_response(connection, transmute_ref!(bhs), data)
            }
            IscsiOpcode::R2T => self.on_r2t(connection, transmute_ref!(bhs)),
            IscsiOpcode::NOP_IN => self.on_nop(connection, common, stat_sn),
            IscsiOpcode::LOGOUT_RESPONSE => {
                let response: &LogoutResponse = transmute_ref!(bhs);
                if response.initiator_task_tag.get() != LOGOUT_TAG {
                    return Err(error("answered a logout that was not requested", "RFC 7143 §11.15"));
                }
                self.on_logged_out(response)
            }
            opcode @ (IscsiOpcode::ASYNC_MESSAGE
            | IscsiOpcode::TEXT_RESPONSE
            | IscsiOpcode::REJECT
            | IscsiOpcode::TASK_MANAGEMENT_RESPONSE) => {
                if !self.on_status(connection, stat_sn)? {
                    return Ok(());
                }
                match opcode {
                    IscsiOpcode::ASYNC_MESSAGE => self.on_event(connection, transmute_ref!(bhs), data),
                    IscsiOpcode::TEXT_RESPONSE => self.on_text(connection, transmute_ref!(bhs), data)?,
                    IscsiOpcode::REJECT => {
                        let reject: &Reject = transmute_ref!(bhs);
                        if RejectReason(reject.reason) == RejectReason::DATA_DIGEST_ERROR {
                            self.on_rejected(connection, data)?;
                        }
                        on_reject(reject)?;
                    }
                    _ if self.on_function_response(connection, transmute_ref!(bhs)) => {}
                    _ => self.on_reassigned(connection, transmute_ref!(bhs))?,
                }
                Ok(())
            }
            _ => Err(error("sent a PDU that is invalid in full feature phase", "RFC 7143 §11.2.1.2")),
        }
    }

    /// Completes a checked Data-In whose data is in place.
    #[inline]
    fn on_data_in(
        &mut self,
        connection: &mut InitiatorConnection,
        key: SlotKey,
        data_in: &DataIn,
    ) -> Result<(), ProtocolError> {
        self.on_numbers(data_in.exp_cmd_sn.get(), data_in.max_cmd_sn.get());
        let Some((progress, _)) = self.queue.transport(key) else { return Ok(()) };
        progress.next = progress.next.saturating_add(data_in.data_segment_length.get());
        progress.data_sn = progress.data_sn.wrapping_add(1);
        let (moved, next) = (progress.next, progress.data_sn);
        if self.negotiated.level > 0 {
            self.after_data(connection, key);
            if data_in.flags & FLAG_ACKNOWLEDGE != 0 {
                self.acknowledge_data(connection, data_in, next);
            }
        }
        if data_in.flags & FLAG_STATUS == 0 || !self.on_status(connection, data_in.stat_sn.get())? {
            return Ok(());
        }
        // A status with sense data has a SCSI Response of its own.
        self.finish(connection, key, ScsiOutcome { status: ScsiStatus(data_in.status), sense: &[], moved });
        Ok(())
    }

    pub(super) fn on_response(
        &mut self,
        connection: &mut InitiatorConnection,
        response: &ScsiResponse,
        data: &[u8],
    ) -> Result<(), ProtocolError> {
        let Some(key) = self.find(connection, response.initiator_task_tag.get()) else {
            // A retransmitted response may arrive after its task was aborted.
            return match self.negotiated.level {
                0 => Err(error("answered an unknown task", "RFC 7143 §11.4")),
                _ => Ok(()),
            };
        };
        if !self.has_all_data(connection, key, response.stat_sn.get(), response.exp_data_sn.get()) {
            return Ok(());
        }
        let Some((progress, transfer)) = self.queue.transport(key) else { return Ok(()) };
        let moved = match transfer {
            DataTransfer::Nothing => 0,
            DataTransfer::In(_) if connection.mover.is_none() => progress.next,
            DataTransfer::In(len) | DataTransfer::Out(len)
                if response.flags & (FLAG_UNDERFLOW | FLAG_OVERFLOW) == 0 =>
            {
                len
            }
            DataTransfer::In(len) | DataTransfer::Out(len) => {
                len.saturating_sub(response.residual_count.get())
            }
        };
        if ServiceResponse(response.response) != ServiceResponse::COMMAND_COMPLETED_AT_TARGET {
            // Without a status, the outcome of the command is unknown.
            let status = ScsiStatus::CHECK_CONDITION;
            self.finish(connection, key, ScsiOutcome { status, sense: &[], moved });
            return Ok(());
        }
        let sense = sense_of(data);
        self.finish(connection, key, ScsiOutcome { status: ScsiStatus(response.status), sense, moved });
        Ok(())
    }

    #[inline]
    fn finish(&mut self, connection: &mut InitiatorConnection, key: SlotKey, outcome: ScsiOutcome<'_>) {
        connection.in_flight = connection.in_flight.saturating_sub(1);
        connection.recovery.losses = 0;
        if let Err(refused) = self.queue.finish(key, outcome) {
            self.refuse(refused);
        }
    }

    /// Processes an R2T. All requested data is sent at once, so no R2T stays outstanding. Repeated
    /// requests at error recovery level 1 are for lost or damaged data.
    fn on_r2t(&mut self, connection: &mut InitiatorConnection, r2t: &IscsiR2t) -> Result<(), ProtocolError> {
        let fault = |what| Err(error(what, "RFC 7143 §11.8"));
        let level = self.negotiated.level;
        let Some(key) = self.find(connection, r2t.initiator_task_tag.get()) else {
            return fault("requested data of an unknown task");
        };
        let Some((progress, DataTransfer::Out(expected))) = self.queue.transport(key) else {
            return fault("requested data of a command that does not write");
        };
        let (from, len) = (r2t.buffer_offset.get(), r2t.desired_data_transfer_length.get());
        if std::mem::take(&mut progress.is_reassigned) {
            progress.r2t_sn = r2t.r2t_sn.get();
        }
        if r2t.r2t_sn.get() != progress.r2t_sn && level > 0 {
            self.request_data(connection, key, r2t.r2t_sn.get(), false);
            return Ok(());
        }
        if r2t.r2t_sn.get() != progress.r2t_sn || from > progress.next || (from < progress.next && level == 0)
        {
            return fault("requested data out of order");
        }
        let Some(end) = from.checked_add(len).filter(|end| len > 0 && *end <= expected) else {
            return fault("requested data beyond the end of the command's data");
        };
        if len > self.negotiated.max_burst || r2t.target_transfer_tag.get() == RESERVED_TAG {
            return fault("requested more than MaxBurstLength, or without a target transfer tag");
        }
        let is_again = from < progress.next;
        (progress.next, progress.r2t_sn) = (end.max(progress.next), progress.r2t_sn.wrapping_add(1));
        if is_again {
            self.count_resend(key)?;
        }
        self.send_sequence(connection, key, r2t.target_transfer_tag.get(), from, end);
        Ok(())
    }

    fn on_nop(
        &mut self,
        connection: &mut InitiatorConnection,
        nop: &NopIn,
        stat_sn: u32,
    ) -> Result<(), ProtocolError> {
        match nop.initiator_task_tag.get() {
            RESERVED_TAG => self.on_next_status(connection, stat_sn)?,
            PING_TAG => {
                self.on_status(connection, stat_sn)?;
            }
            _ => return Err(error("answered a ping that was not sent", "RFC 7143 §11.19")),
        }
        if nop.target_transfer_tag.get() != RESERVED_TAG {
            self.send_ping_reply(connection, nop);
        }
        Ok(())
    }

    fn on_event(&mut self, connection: &mut InitiatorConnection, message: &AsyncMessage, data: &[u8]) {
        let seconds = |parameter: u16| Duration::from_secs(parameter.into());
        match AsyncEvent(message.async_event) {
            // The sense data of a unit attention, before the next command would report it.
            AsyncEvent::SCSI_ASYNC_EVENT if message.lun == self.lun.0.to_be_bytes() => {
                if let Some(code) = SenseCode::parse(sense_of(data)) {
                    self.queue.on_sense(code);
                }
            }
            // One of several connections was lost. The connection's end is noticed separately; the
            // message adds the time limits.
            AsyncEvent::CONNECTION_DROP if self.recovers_connections() => {
                self.announced_loss = Some(AnnouncedLoss {
                    cid: message.parameter1.get(),
                    wait: seconds(message.parameter2.get()),
                    retain: seconds(message.parameter3.get()),
                });
            }
            // Commands in flight may complete within the target's time limit.
            AsyncEvent::LOGOUT_REQUEST => self.on_end_requested(Some(seconds(message.parameter3.get()))),
            AsyncEvent::CONNECTION_DROP | AsyncEvent::SESSION_DROP => {
                self.announced_wait = Some(seconds(message.parameter2.get()));
                self.on_end_requested(None);
            }
            AsyncEvent::NEGOTIATION_REQUEST => self.begin_text(connection),
            _ => {}
        }
    }

    /// Starts a text negotiation that the target requested, unless one is in progress.
    fn begin_text(&mut self, connection: &mut InitiatorConnection) {
        if self.may_send() && connection.text_exchange.is_none() {
            connection.text_exchange = Some(Box::default());
            self.send_text(connection, RESERVED_TAG, [0; 8]);
        }
    }

    /// Processes a Text Response.
    pub(super) fn on_text(
        &mut self,
        connection: &mut InitiatorConnection,
        response: &TextResponse,
        data: &[u8],
    ) -> Result<(), ProtocolError> {
        let fault = |what| Err(error(what, "RFC 7143 §11.11"));
        if response.initiator_task_tag.get() != TEXT_TAG {
            return fault("answered a text request that was not sent");
        }
        let Some(mut exchange) = connection.text_exchange.take() else {
            return fault("answered a text request that was not sent");
        };
        exchange.rounds = exchange.rounds.saturating_add(1);
        if exchange.rounds > MAX_ROUNDS || exchange.text.len().saturating_add(data.len()) > MAX_TEXT {
            return fault("did not end its text");
        }
        exchange.text.extend_from_slice(data);
        let tag = response.target_transfer_tag.get();
        if response.flags & FLAG_CONTINUE != 0 || response.flags & FLAG_FINAL == 0 {
            if tag == RESERVED_TAG {
                return fault("ended its text prematurely");
            }
            connection.text_exchange = Some(exchange);
            if self.may_send() {
                self.send_text(connection, tag, response.lun);
            }
            return Ok(());
        }
        take(connection, &exchange.text)
    }

    fn send_text(&self, connection: &mut InitiatorConnection, target_transfer_tag: u32, lun: [u8; 8]) {
        connection.count_reply();
        let request = self.numbers(connection).text(target_transfer_tag, lun, 0);
        connection.sender.push(transmute_ref!(&request), &[]);
    }
}

fn data_len(bhs: &Bhs) -> usize {
    bhs.data_segment_length.get() as usize
}

/// Copies a message's data, because the receive buffer is reused.
#[inline]
fn bytes(message: &IserMessage) -> ResponseData {
    let mut bytes = ResponseData::new();
    if let Some(data) = &message.data {
        bytes.resize(data.len(), 0);
        data.copy_to(&mut bytes);
    }
    bytes
}

/// Sense data of a data segment, which follows its length (RFC 7143 §11.4.7).
fn sense_of(data: &[u8]) -> &[u8] {
    match data.split_first_chunk() {
        Some((len, sense)) => sense.get(..u16::from_be_bytes(*len).into()).unwrap_or(sense),
        None => &[],
    }
}

/// Processes a Reject (RFC 7143 §11.17). After a data digest error a response with sense data
/// follows, and a ping may be rejected. Any other reject ends the session, because a command would
/// never be answered.
fn on_reject(reject: &Reject) -> Result<(), ProtocolError> {
    match RejectReason(reject.reason) {
        RejectReason::DATA_DIGEST_ERROR | RejectReason::IMMEDIATE_COMMAND_REJECT => Ok(()),
        RejectReason::PROTOCOL_ERROR => Err(error("rejected a PDU as a protocol error", "RFC 7143 §11.17")),
        RejectReason::COMMAND_NOT_SUPPORTED => Err(error("rejected a PDU as unsupported", "RFC 7143 §11.17")),
        RejectReason::INVALID_PDU_FIELD => Err(error("rejected a field of a PDU", "RFC 7143 §11.17")),
        _ => Err(error("rejected a PDU", "RFC 7143 §11.17")),
    }
}

/// A violation of a section of RFC 7143.
pub(super) fn error(what: &'static str, section: &'static str) -> ProtocolError {
    ProtocolError { what, reference: section }
}

/// The violation of a response over RDMA that does not fit its command.
fn wrong_response(wrong: WrongResponse) -> ProtocolError {
    match wrong {
        WrongResponse::OtherMemory => {
            error("invalidated memory of another command than it answered", "RFC 7145 §7.3.2")
        }
        WrongResponse::Unsent => error("answered a command that was not sent", "RFC 7143 §11.4"),
        WrongResponse::Repeated => error("answered a command that has ended", "RFC 7143 §11.4"),
    }
}

/// Processes the target's text. Unknown keys are ignored: the target may not ask questions now.
fn take(connection: &mut InitiatorConnection, whole: &[u8]) -> Result<(), ProtocolError> {
    for pair in text::pairs(whole) {
        let pair = pair.map_err(|_| error("sent a malformed text", "RFC 7143 §6.1"))?;
        // Over RDMA this key does not limit messages.
        if pair.key != "MaxRecvDataSegmentLength" || connection.mover.is_some() {
            continue;
        }
        let length = text::parse_number(pair.value).filter(|length| (512..=U24::MAX).contains(length));
        connection.negotiated.max_send_segment =
            length.ok_or_else(|| error("declared an invalid MaxRecvDataSegmentLength", "RFC 7143 §13.12"))?;
    }
    Ok(())
}

/// Segments up to this many bytes are received contiguously in the receive buffer: one large
/// receive for many PDUs costs less than one for each. With header and digests at most
/// `MAX_DEMAND`.
const MAX_BUFFERED_SEGMENT: usize = 64 << 10;

/// Maximum number of text requests in one negotiation.
const MAX_ROUNDS: u32 = 64;
