//! What a target's PDUs mean, once they are here.

use super::full::{AnnouncedLoss, FullFeature};
use super::immediate::{LOGOUT_TAG, PING_TAG};
use super::lane::Lane;
use crate::scsi::Status;
use crate::scsi::initiator::{Outcome, SenseCode, Transfer};
use crate::session::ProtocolError;
use crate::slots::Key;
use blockmux_wire::iscsi::scsi::{
    DataIn, FLAG_ACKNOWLEDGE, FLAG_OVERFLOW, FLAG_STATUS, FLAG_UNDERFLOW, R2t, Response, ScsiResponse,
};
use blockmux_wire::iscsi::session::{AsyncEvent, AsyncMessage, LogoutResponse, NopIn, Reject, RejectReason};
use blockmux_wire::iscsi::{Bhs, Opcode, RESERVED_TAG};
use std::time::Duration;
use zerocopy::transmute_ref;

impl FullFeature {
    /// A PDU other than Data-In, with all its data.
    #[inline]
    pub(super) fn on_pdu(&mut self, lane: &mut Lane, bhs: &Bhs, data: &[u8]) -> Result<(), ProtocolError> {
        // These numbers lie at the same place in all PDUs of a target.
        let common: &NopIn = transmute_ref!(bhs);
        self.on_numbers(common.exp_cmd_sn.get(), common.max_cmd_sn.get());
        let stat_sn = common.stat_sn.get();
        match bhs.opcode() {
            Opcode::SCSI_RESPONSE => {
                if !self.on_status(lane, stat_sn)? {
                    return Ok(());
                }
                self.on_response(lane, transmute_ref!(bhs), data)
            }
            Opcode::R2T => self.on_r2t(lane, transmute_ref!(bhs)),
            Opcode::NOP_IN => self.on_nop(lane, common, stat_sn),
            Opcode::ASYNC_MESSAGE => {
                if self.on_status(lane, stat_sn)? {
                    self.on_event(lane, transmute_ref!(bhs), data);
                }
                Ok(())
            }
            Opcode::TEXT_RESPONSE => {
                if !self.on_status(lane, stat_sn)? {
                    return Ok(());
                }
                self.on_text(lane, transmute_ref!(bhs), data)
            }
            Opcode::REJECT => {
                if !self.on_status(lane, stat_sn)? {
                    return Ok(());
                }
                let reject: &Reject = transmute_ref!(bhs);
                if RejectReason(reject.reason) == RejectReason::DATA_DIGEST_ERROR {
                    self.on_rejected(lane, data);
                }
                on_reject(reject)
            }
            Opcode::TASK_MANAGEMENT_RESPONSE => {
                if !self.on_status(lane, stat_sn)? {
                    return Ok(());
                }
                if self.on_managed(lane, transmute_ref!(bhs)) {
                    return Ok(());
                }
                self.on_moved(lane, transmute_ref!(bhs))
            }
            Opcode::LOGOUT_RESPONSE => {
                let response: &LogoutResponse = transmute_ref!(bhs);
                if response.initiator_task_tag.get() != LOGOUT_TAG {
                    return Err(error("answered a logout that was not asked for", "RFC 7143 §11.15"));
                }
                self.on_logged_out(response)
            }
            _ => Err(error("sent a PDU that does not belong into full feature phase", "RFC 7143 §11.2.1.2")),
        }
    }

    /// A Data-In that was checked, and whose data is where it belongs.
    #[inline]
    pub(super) fn on_data_in(
        &mut self,
        lane: &mut Lane,
        key: Key,
        data_in: &DataIn,
    ) -> Result<(), ProtocolError> {
        self.on_numbers(data_in.exp_cmd_sn.get(), data_in.max_cmd_sn.get());
        let Some((progress, _)) = self.queue.transport(key) else { return Ok(()) };
        progress.next = progress.next.saturating_add(data_in.data_segment_length.get());
        progress.data_sn = progress.data_sn.wrapping_add(1);
        let (moved, next) = (progress.next, progress.data_sn);
        if self.terms.level > 0 {
            self.after_data(lane, key);
            if data_in.flags & FLAG_ACKNOWLEDGE != 0 {
                self.acknowledge_data(lane, data_in, next);
            }
        }
        if data_in.flags & FLAG_STATUS == 0 || !self.on_status(lane, data_in.stat_sn.get())? {
            return Ok(());
        }
        // Status that needs sense data has a response of its own.
        self.finish(lane, key, Outcome { status: Status(data_in.status), sense: &[], moved });
        Ok(())
    }

    pub(super) fn on_response(
        &mut self,
        lane: &mut Lane,
        response: &ScsiResponse,
        data: &[u8],
    ) -> Result<(), ProtocolError> {
        let Some(key) = self.find(lane, response.initiator_task_tag.get()) else {
            // An answer that was asked for again may come after its task was aborted.
            return match self.terms.level {
                0 => Err(error("answered a task that is not there", "RFC 7143 §11.4")),
                _ => Ok(()),
            };
        };
        if !self.has_all_data(lane, key, response.stat_sn.get(), response.exp_data_sn.get()) {
            return Ok(());
        }
        let Some((progress, transfer)) = self.queue.transport(key) else { return Ok(()) };
        let moved = match transfer {
            Transfer::Nothing => 0,
            Transfer::In(_) if lane.mover.is_none() => progress.next,
            Transfer::In(len) | Transfer::Out(len)
                if response.flags & (FLAG_UNDERFLOW | FLAG_OVERFLOW) == 0 =>
            {
                len
            }
            Transfer::In(len) | Transfer::Out(len) => len.saturating_sub(response.residual_count.get()),
        };
        if Response(response.response) != Response::COMMAND_COMPLETED_AT_TARGET {
            // There is no status then, and nothing is known of the command.
            let status = Status::CHECK_CONDITION;
            self.finish(lane, key, Outcome { status, sense: &[], moved });
            return Ok(());
        }
        let sense = sense_of(data);
        self.finish(lane, key, Outcome { status: Status(response.status), sense, moved });
        Ok(())
    }

    #[inline]
    fn finish(&mut self, lane: &mut Lane, key: Key, outcome: Outcome<'_>) {
        lane.in_flight = lane.in_flight.saturating_sub(1);
        lane.recovery.losses = 0;
        if let Err(refused) = self.queue.finish(key, outcome) {
            self.refuse(refused);
        }
    }

    /// The target asks for data. All of it is sent at once, so that no R2T is ever outstanding here. What it asks for
    /// again at error recovery level 1 it has not got, or got damaged.
    fn on_r2t(&mut self, lane: &mut Lane, r2t: &R2t) -> Result<(), ProtocolError> {
        let fault = |what| Err(error(what, "RFC 7143 §11.8"));
        let level = self.terms.level;
        let Some(key) = self.find(lane, r2t.initiator_task_tag.get()) else {
            return fault("asked for data of a task that is not there");
        };
        let Some((progress, Transfer::Out(expected))) = self.queue.transport(key) else {
            return fault("asked for data of a command that writes none");
        };
        let (from, len) = (r2t.buffer_offset.get(), r2t.desired_data_transfer_length.get());
        if std::mem::take(&mut progress.is_moved) {
            progress.r2t_sn = r2t.r2t_sn.get();
        }
        if r2t.r2t_sn.get() != progress.r2t_sn && level > 0 {
            self.ask_for_data(lane, key, r2t.r2t_sn.get(), false);
            return Ok(());
        }
        if r2t.r2t_sn.get() != progress.r2t_sn || from > progress.next || (from < progress.next && level == 0)
        {
            return fault("asked for data out of order");
        }
        let Some(end) = from.checked_add(len).filter(|end| len > 0 && *end <= expected) else {
            return fault("asked for data that the command does not have");
        };
        if len > self.terms.max_burst || r2t.target_transfer_tag.get() == RESERVED_TAG {
            return fault("asked for more than MaxBurstLength, or without a tag");
        }
        (progress.next, progress.r2t_sn) = (end.max(progress.next), progress.r2t_sn.wrapping_add(1));
        self.send_sequence(lane, key, r2t.target_transfer_tag.get(), from, end);
        Ok(())
    }

    fn on_nop(&mut self, lane: &mut Lane, nop: &NopIn, stat_sn: u32) -> Result<(), ProtocolError> {
        match nop.initiator_task_tag.get() {
            RESERVED_TAG => self.on_next_status(lane, stat_sn)?,
            PING_TAG => {
                self.on_status(lane, stat_sn)?;
            }
            _ => return Err(error("answered a ping that was not sent", "RFC 7143 §11.19")),
        }
        if nop.target_transfer_tag.get() != RESERVED_TAG {
            self.send_pong(lane, nop);
        }
        Ok(())
    }

    fn on_event(&mut self, lane: &mut Lane, message: &AsyncMessage, data: &[u8]) {
        let seconds = |parameter: u16| Duration::from_secs(parameter.into());
        match AsyncEvent(message.async_event) {
            // What a unit attention would say with the next command.
            AsyncEvent::SCSI_ASYNC_EVENT if message.lun == self.lun.0.to_be_bytes() => {
                if let Some(code) = SenseCode::parse(sense_of(data)) {
                    self.queue.on_sense(code);
                }
            }
            // One connection of several, whose end we see ourselves: all there is to learn is how much time there is.
            AsyncEvent::CONNECTION_DROP if self.recovers_connections() => {
                self.announced_loss = Some(AnnouncedLoss {
                    cid: message.parameter1.get(),
                    wait: seconds(message.parameter2.get()),
                    retain: seconds(message.parameter3.get()),
                });
            }
            // What is under way may still end in order, as far as there is time for it.
            AsyncEvent::LOGOUT_REQUEST => self.leave(Some(seconds(message.parameter3.get()))),
            AsyncEvent::CONNECTION_DROP | AsyncEvent::SESSION_DROP => {
                self.announced_wait = Some(seconds(message.parameter2.get()));
                self.leave(None);
            }
            AsyncEvent::NEGOTIATION_REQUEST => self.begin_talk(lane),
            _ => {}
        }
    }
}

/// Sense data in a data segment, behind its length (RFC 7143 §11.4.7).
fn sense_of(data: &[u8]) -> &[u8] {
    match data.split_first_chunk() {
        Some((len, sense)) => sense.get(..u16::from_be_bytes(*len).into()).unwrap_or(sense),
        None => &[],
    }
}

/// What a refused PDU means (RFC 7143 §11.17). A response with sense data follows data that came with a wrong digest,
/// and a ping may be refused; anything else leaves the session without a command that it counts on.
fn on_reject(reject: &Reject) -> Result<(), ProtocolError> {
    match RejectReason(reject.reason) {
        RejectReason::DATA_DIGEST_ERROR | RejectReason::IMMEDIATE_COMMAND_REJECT => Ok(()),
        RejectReason::PROTOCOL_ERROR => {
            Err(error("rejected a PDU as an error of protocol", "RFC 7143 §11.17"))
        }
        RejectReason::COMMAND_NOT_SUPPORTED => {
            Err(error("rejected a PDU that it does not know", "RFC 7143 §11.17"))
        }
        RejectReason::INVALID_PDU_FIELD => Err(error("rejected a field of a PDU", "RFC 7143 §11.17")),
        _ => Err(error("rejected a PDU", "RFC 7143 §11.17")),
    }
}

/// A breach of a section of RFC 7143.
pub(super) fn error(what: &'static str, section: &'static str) -> ProtocolError {
    ProtocolError { what, reference: section }
}
