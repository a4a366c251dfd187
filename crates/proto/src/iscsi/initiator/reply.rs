//! What a target's PDUs mean, once they are here.

use super::full::FullFeature;
use super::immediate::{LOGOUT_TAG, PING_TAG};
use crate::outbox::Outbox;
use crate::scsi::Status;
use crate::scsi::initiator::{Outcome, Transfer};
use crate::session::ProtocolError;
use crate::slots::Key;
use blockmux_wire::iscsi::scsi::{
    DataIn, FLAG_OVERFLOW, FLAG_STATUS, FLAG_UNDERFLOW, R2t, Response, ScsiResponse,
};
use blockmux_wire::iscsi::session::{AsyncEvent, AsyncMessage, LogoutResponse, NopIn, Reject, RejectReason};
use blockmux_wire::iscsi::{Bhs, Opcode, RESERVED_TAG};
use zerocopy::transmute_ref;

impl FullFeature {
    /// A PDU other than Data-In, with all its data.
    #[inline]
    pub(super) fn on_pdu(
        &mut self,
        bhs: &Bhs,
        data: &[u8],
        outbox: &mut Outbox,
    ) -> Result<(), ProtocolError> {
        // These numbers lie at the same place in all PDUs of a target.
        let common: &NopIn = transmute_ref!(bhs);
        self.on_numbers(common.exp_cmd_sn.get(), common.max_cmd_sn.get());
        let stat_sn = common.stat_sn.get();
        match bhs.opcode() {
            Opcode::SCSI_RESPONSE => {
                self.acknowledge(stat_sn);
                self.on_response(transmute_ref!(bhs), data)
            }
            Opcode::R2T => self.on_r2t(transmute_ref!(bhs), outbox),
            Opcode::NOP_IN => self.on_nop(common, stat_sn, outbox),
            Opcode::ASYNC_MESSAGE => {
                self.acknowledge(stat_sn);
                self.on_event(transmute_ref!(bhs));
                Ok(())
            }
            Opcode::REJECT => {
                self.acknowledge(stat_sn);
                on_reject(transmute_ref!(bhs))
            }
            Opcode::LOGOUT_RESPONSE => {
                let response: &LogoutResponse = transmute_ref!(bhs);
                if response.initiator_task_tag.get() != LOGOUT_TAG {
                    return Err(error("answered a logout that was not asked for", "RFC 7143 §11.15"));
                }
                // Whether it could tidy up is its own affair: the connection ends.
                self.on_logged_out()
            }
            _ => Err(error("sent a PDU that does not belong into full feature phase", "RFC 7143 §11.2.1.2")),
        }
    }

    /// A Data-In that was checked, and whose data is where it belongs.
    #[inline]
    pub(super) fn on_data_in(&mut self, key: Key, data_in: &DataIn) -> Result<(), ProtocolError> {
        self.on_numbers(data_in.exp_cmd_sn.get(), data_in.max_cmd_sn.get());
        let Some((progress, _)) = self.queue.transport(key) else { return Ok(()) };
        progress.next = progress.next.saturating_add(data_in.data_segment_length.get());
        progress.data_sn = progress.data_sn.wrapping_add(1);
        let moved = progress.next;
        if data_in.flags & FLAG_STATUS == 0 {
            return Ok(());
        }
        self.acknowledge(data_in.stat_sn.get());
        // Status that needs sense data has a response of its own.
        self.finish(key, Outcome { status: Status(data_in.status), sense: &[], moved });
        Ok(())
    }

    fn on_response(&mut self, response: &ScsiResponse, data: &[u8]) -> Result<(), ProtocolError> {
        let Some(key) = self.queue.find(response.initiator_task_tag.get()) else {
            return Err(error("answered a task that is not there", "RFC 7143 §11.4"));
        };
        let Some((progress, transfer)) = self.queue.transport(key) else { return Ok(()) };
        let moved = match transfer {
            Transfer::Nothing => 0,
            Transfer::In(_) => progress.next,
            Transfer::Out(len) if response.flags & (FLAG_UNDERFLOW | FLAG_OVERFLOW) == 0 => len,
            Transfer::Out(len) => len.saturating_sub(response.residual_count.get()),
        };
        if Response(response.response) != Response::COMMAND_COMPLETED_AT_TARGET {
            // There is no status then, and nothing is known of the command.
            let status = Status::CHECK_CONDITION;
            self.finish(key, Outcome { status, sense: &[], moved });
            return Ok(());
        }
        let sense = match data.split_first_chunk() {
            Some((len, sense)) => sense.get(..u16::from_be_bytes(*len).into()).unwrap_or(sense),
            None => &[],
        };
        self.finish(key, Outcome { status: Status(response.status), sense, moved });
        Ok(())
    }

    #[inline]
    fn finish(&mut self, key: Key, outcome: Outcome<'_>) {
        if let Err(refused) = self.queue.finish(key, outcome) {
            self.refuse(refused);
        }
    }

    /// The target asks for data. All of it is sent at once, so that no R2T is ever outstanding here.
    fn on_r2t(&mut self, r2t: &R2t, outbox: &mut Outbox) -> Result<(), ProtocolError> {
        let fault = |what| Err(error(what, "RFC 7143 §11.8"));
        let Some(key) = self.queue.find(r2t.initiator_task_tag.get()) else {
            return fault("asked for data of a task that is not there");
        };
        let Some((progress, Transfer::Out(expected))) = self.queue.transport(key) else {
            return fault("asked for data of a command that writes none");
        };
        let (from, len) = (r2t.buffer_offset.get(), r2t.desired_data_transfer_length.get());
        if r2t.r2t_sn.get() != progress.r2t_sn || from != progress.next {
            return fault("asked for data out of order");
        }
        let Some(end) = from.checked_add(len).filter(|end| len > 0 && *end <= expected) else {
            return fault("asked for data that the command does not have");
        };
        if len > self.terms.max_burst || r2t.target_transfer_tag.get() == RESERVED_TAG {
            return fault("asked for more than MaxBurstLength, or without a tag");
        }
        (progress.next, progress.r2t_sn) = (end, progress.r2t_sn.wrapping_add(1));
        self.send_sequence(key, r2t.target_transfer_tag.get(), from, end, outbox);
        Ok(())
    }

    fn on_nop(&mut self, nop: &NopIn, stat_sn: u32, outbox: &mut Outbox) -> Result<(), ProtocolError> {
        match nop.initiator_task_tag.get() {
            RESERVED_TAG => {}
            PING_TAG => self.acknowledge(stat_sn),
            _ => return Err(error("answered a ping that was not sent", "RFC 7143 §11.19")),
        }
        if nop.target_transfer_tag.get() != RESERVED_TAG {
            self.send_pong(nop, outbox);
        }
        Ok(())
    }

    fn on_event(&mut self, message: &AsyncMessage) {
        match AsyncEvent(message.async_event) {
            // What is under way may still end in order, and a new session negotiates anew.
            AsyncEvent::LOGOUT_REQUEST
            | AsyncEvent::CONNECTION_DROP
            | AsyncEvent::SESSION_DROP
            | AsyncEvent::NEGOTIATION_REQUEST => self.leave(),
            _ => {}
        }
    }

    /// Notes that a status has come (RFC 7143 §4.2.2.2).
    #[inline]
    fn acknowledge(&mut self, stat_sn: u32) {
        self.exp_stat_sn = stat_sn.wrapping_add(1);
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
