//! Full feature phase over RDMA: how a command's memory is opened, and what a response means that comes as a message.

use super::datamover::{AfterClose, Data, Exposure};
use super::full::FullFeature;
use super::lane::Lane;
use super::reply::error;
use crate::iscsi::iser::Message;
use crate::rdma::{Access, Remote, Stag, WorkId};
use crate::scsi::initiator::{Request, Transfer};
use crate::session::ProtocolError;
use crate::slots::Key;
use blockmux_volume::SgList;
use blockmux_wire::iscsi::Opcode;
use blockmux_wire::iscsi::scsi::{ScsiCommand, ScsiResponse};
use blockmux_wire::iscsi::session::NopIn;
use zerocopy::transmute_ref;

impl FullFeature {
    /// Queues a command; its data goes with it if it is `immediate`, else the target fetches or brings it.
    #[inline]
    pub(super) fn send_over_rdma(
        &mut self,
        lane: &mut Lane,
        request: &Request,
        command: ScsiCommand,
        immediate: u32,
    ) {
        let (mut payload, mut memory) = (SgList::default(), None);
        match request.transfer {
            Transfer::In(len) if len > 0 => {
                let place = self.queue.data_in(request.key).map(|(list, base)| part(list, base, len));
                memory = place.map(|place| (place, Access::RemoteWrite));
            }
            Transfer::Out(len) if len > 0 => {
                let data = self.queue.data_out(request.key).map(|(list, base)| part(list, base, len));
                match immediate {
                    0 => memory = data.map(|data| (data, Access::RemoteRead)),
                    _ => payload = data.unwrap_or_default(),
                }
            }
            Transfer::Nothing | Transfer::In(_) | Transfer::Out(_) => {}
        }
        if let Some(mover) = &mut lane.mover {
            mover.push(request.key, command, payload, memory);
        }
    }

    /// A command's memory is open.
    #[inline]
    pub(super) fn on_registered(&mut self, lane: &mut Lane, id: WorkId, remote: Remote) {
        let key = lane.mover.as_mut().and_then(|mover| mover.on_registered(id, remote));
        if let Some(key) = key {
            self.on_opened(key, remote.stag);
        }
    }

    /// A command's memory is open under this name.
    #[inline]
    pub(super) fn on_opened(&mut self, key: Key, stag: Stag) {
        if let Some((progress, _)) = self.queue.transport(key) {
            progress.exposure = Exposure::Open(stag);
        }
    }

    /// A message from the target.
    pub(super) fn on_message(
        &mut self,
        lane: &mut Lane,
        message: &Message,
        invalidated: Option<Stag>,
    ) -> Result<(), ProtocolError> {
        lane.ticks.heard = true;
        if lane.sender.is_empty() {
            lane.pongs = 0;
        }
        let bhs = &message.bhs;
        if message.data_len() > lane.terms.max_receive_segment {
            return Err(error("sent a data segment above InitiatorRecvDataSegmentLength", "RFC 7145 §6.5"));
        }
        match bhs.opcode() {
            Opcode::SCSI_RESPONSE => self.on_answer(lane, message, invalidated),
            _ if invalidated.is_some() => {
                Err(error("closed memory by a message that is no response to its command", "RFC 7145 §7.3.2"))
            }
            Opcode::DATA_IN | Opcode::R2T => {
                Err(error("sent a PDU over RDMA that RDMA Write and Read stand for", "RFC 7145 §7.1"))
            }
            _ => self.on_pdu(lane, bhs, &bytes(message)),
        }
    }

    /// A response. Its command ends when the target cannot reach its memory any more.
    #[inline]
    fn on_answer(
        &mut self,
        lane: &mut Lane,
        message: &Message,
        invalidated: Option<Stag>,
    ) -> Result<(), ProtocolError> {
        let bhs = &message.bhs;
        let common: &NopIn = transmute_ref!(bhs);
        self.on_numbers(common.exp_cmd_sn.get(), common.max_cmd_sn.get());
        self.on_status(lane, common.stat_sn.get())?;
        let key = self.find(lane, bhs.initiator_task_tag.get());
        let progress = key.and_then(|key| self.queue.transport(key)).map(|(progress, _)| progress);
        let open = match progress.as_ref().map(|progress| progress.exposure) {
            Some(Exposure::Open(stag)) => Some(stag),
            Some(Exposure::Closing) => {
                return Err(error("answered a command that has ended", "RFC 7143 §11.4"));
            }
            Some(Exposure::None) | None => None,
        };
        if invalidated.is_some() && invalidated != open {
            return Err(error("closed memory that is not the command's that it answered", "RFC 7145 §7.3.2"));
        }
        match (open, progress, &mut lane.mover) {
            (Some(stag), Some(progress), Some(mover)) if invalidated.is_none() => {
                progress.exposure = Exposure::Closing;
                mover.close(stag, AfterClose::Respond { bhs: *bhs, data: bytes(message) });
                Ok(())
            }
            // As most responses.
            _ if message.data.is_none() => self.on_response(lane, transmute_ref!(bhs), &[]),
            _ => self.on_response(lane, transmute_ref!(bhs), &bytes(message)),
        }
    }

    /// The target has given up a command: its I/O is handed back, over RDMA once the target cannot reach its memory any more.
    pub(super) fn end_aborted(&mut self, lane: &mut Lane, key: Key) {
        let Some((progress, _)) = self.queue.transport(key) else { return };
        match (progress.exposure, &mut lane.mover) {
            // Its response has come, and ends it.
            (Exposure::Closing, _) => {}
            // The target says so of a command that it was not sent, which goes its way.
            (_, Some(mover)) if mover.is_unsent(key) => {}
            (Exposure::Open(stag), Some(mover)) => {
                progress.exposure = Exposure::Closing;
                mover.close(stag, AfterClose::Abort(key));
            }
            _ => {
                lane.in_flight = lane.in_flight.saturating_sub(1);
                self.queue.abort(key);
            }
        }
    }

    /// Ends commands whose memory has been closed since.
    #[inline]
    pub(super) fn end_closed(&mut self, lane: &mut Lane) -> Result<bool, ProtocolError> {
        let mut has_any = false;
        while let Some(then) = lane.mover.as_mut().and_then(|mover| mover.next_closed()) {
            has_any = true;
            match then {
                AfterClose::Respond { bhs, data } => {
                    let response: &ScsiResponse = transmute_ref!(&bhs);
                    self.on_response(lane, response, &data)?;
                }
                AfterClose::Abort(key) => {
                    if let Some((progress, _)) = self.queue.transport(key) {
                        progress.exposure = Exposure::None;
                        self.end_aborted(lane, key);
                    }
                }
            }
        }
        Ok(has_any)
    }
}

/// `len` bytes at `base` of a list.
fn part(list: &SgList, base: usize, len: u32) -> SgList {
    let len = len as usize;
    if base == 0 && list.len() == len { list.clone() } else { list.slice(base, len) }
}

/// A copy of a message's data, whose receive buffer is for what comes next.
#[inline]
fn bytes(message: &Message) -> Data {
    let mut bytes = Data::new();
    if let Some(data) = &message.data {
        bytes.resize(data.len(), 0);
        data.copy_to(&mut bytes);
    }
    bytes
}
