//! Messages as they come: Sends, Read Requests, and Terminate, each in a queue of its own.
//!
//! A message that is one FPDU is lent from where it lies; one of several is gathered in a receive
//! buffer, of which there is one at a time, since messages come in order.

use super::Iwarp;
use super::setup::Rtr;
use super::transmit::Asked;
use super::wrong::{self, Wrong};
use blockmux_proto::rdma::{Event, RemoteRights, Stag};
use blockmux_proto::session::ProtocolError;
use blockmux_volume::{MAX_TRANSFER, Memory, Seg};
use blockmux_wire::iwarp::ddp::{
    DDP_VERSION, QUEUE_READ, QUEUE_SEND, QUEUE_TERMINATE, UNTAGGED_LEN, Untagged,
};
use blockmux_wire::iwarp::rdmap::{RDMAP_VERSION, RdmapOpcode, ReadRequest};
use zerocopy::FromBytes;

/// How far the peer's queues have come.
pub(super) struct Queues {
    /// Receive buffers that are posted.
    receives: u32,
    /// Messages and Read Requests so far.
    sends: u32,
    reads: u32,
    /// A message of several FPDUs.
    gathering: Option<Gathering>,
}

struct Gathering {
    buffer: Seg,
    filled: usize,
    opcode: RdmapOpcode,
}

impl Queues {
    pub(super) fn new(receives: u32) -> Queues {
        Queues { receives, sends: 0, reads: 0, gathering: None }
    }

    #[inline]
    pub(super) fn post_receives(&mut self, count: u32) {
        self.receives = self.receives.saturating_add(count);
    }

    /// Whether no receive buffer is left.
    #[inline]
    pub(super) fn is_exhausted(&self) -> bool {
        self.receives == 0
    }

    /// Whether a message has come in part.
    pub(super) fn is_within(&self) -> bool {
        self.gathering.is_some()
    }

    /// The connection is over.
    pub(super) fn stop(&mut self) {
        self.gathering = None;
    }
}

impl Iwarp {
    /// An untagged segment. The outer error is that of a connection that is over by it.
    #[inline]
    pub(super) fn on_untagged(
        &mut self,
        header: &Untagged,
        body: &[u8],
        ulpdu: &[u8],
        lend: impl FnOnce(usize, usize) -> Seg,
    ) -> Result<Result<(), Wrong>, ProtocolError> {
        let (control, queue) = (header.control, header.qn.get());
        if control.ddp_version() != DDP_VERSION {
            return Ok(Err(wrong::UNTAGGED_VERSION));
        }
        if queue > QUEUE_TERMINATE {
            return Ok(Err(wrong::BAD_QUEUE));
        }
        if control.rdmap_version() != RDMAP_VERSION {
            return Ok(Err(wrong::RDMAP_VERSION));
        }
        match (queue, control.opcode()) {
            (QUEUE_SEND, opcode) if opcode.is_send() => Ok(self.on_send(header, body, lend)),
            (QUEUE_READ, RdmapOpcode::RDMA_READ_REQUEST) => Ok(self.on_read(header, body, ulpdu)),
            (QUEUE_TERMINATE, RdmapOpcode::TERMINATE) => Err(self.on_terminate(body)),
            _ => Ok(Err(wrong::BAD_OPCODE)),
        }
    }

    /// A message, or a part of one.
    #[inline]
    fn on_send(
        &mut self,
        header: &Untagged,
        body: &[u8],
        lend: impl FnOnce(usize, usize) -> Seg,
    ) -> Result<(), Wrong> {
        let queues = &mut self.arrival.untagged;
        if header.msn.get() != queues.sends.wrapping_add(1) {
            return Err(wrong::BAD_MSN);
        }
        let is_last = header.control.is_last();
        let filled = queues.gathering.as_ref().map_or(0, |gathering| gathering.filled);
        if header.mo.get() as usize != filled {
            return Err(wrong::BAD_OFFSET);
        }
        let is_rtr = self.agreement.rtr == Some(Rtr::Send) && queues.sends == 0 && body.is_empty() && is_last;
        if is_rtr && filled == 0 {
            queues.sends = 1;
            return Ok(());
        }
        if queues.receives == 0 {
            return Err(wrong::NO_RECEIVE);
        }
        if filled.saturating_add(body.len()) > self.endpoint.receive_len as usize {
            return Err(wrong::TOO_LONG);
        }
        let message = if is_last && queues.gathering.is_none() {
            lend(UNTAGGED_LEN, body.len())
        } else {
            match self.gather(header, body)? {
                Some(message) => message,
                None => return Ok(()),
            }
        };
        let stag = Stag(header.invalidate_stag.get());
        let invalidated = header.control.opcode().invalidates().then_some(stag);
        if let Some(stag) = invalidated {
            self.regions.invalidate(stag).map_err(|_| wrong::CANNOT_INVALIDATE)?;
        }
        let queues = &mut self.arrival.untagged;
        queues.receives = queues.receives.saturating_sub(1);
        queues.sends = queues.sends.wrapping_add(1);
        self.events.push_back(Event::Received { message, invalidated });
        Ok(())
    }

    /// Adds to a message of several FPDUs; returns it when it is whole.
    fn gather(&mut self, header: &Untagged, body: &[u8]) -> Result<Option<Seg>, Wrong> {
        let opcode = header.control.opcode();
        if self.arrival.untagged.gathering.is_none() {
            let len = self.endpoint.receive_len as usize;
            let memory = if len <= MAX_TRANSFER as usize { self.pool.take(len) } else { None };
            // Without it neither this message nor any other could come.
            let memory = memory.unwrap_or_else(|| Memory::from_heap(len));
            self.arrival.untagged.gathering =
                Some(Gathering { buffer: memory.seg(0, len), filled: 0, opcode });
        }
        let Some(gathering) = &mut self.arrival.untagged.gathering else { return Ok(None) };
        if gathering.opcode != opcode {
            return Err(wrong::BAD_OPCODE);
        }
        // It fits, which was checked.
        gathering.buffer.slice(gathering.filled, body.len()).copy_from(body);
        gathering.filled = gathering.filled.saturating_add(body.len());
        if !header.control.is_last() {
            return Ok(None);
        }
        Ok(self.arrival.untagged.gathering.take().map(|whole| whole.buffer.slice(0, whole.filled)))
    }

    /// A Read Request: it is answered in its turn.
    #[inline]
    fn on_read(&mut self, header: &Untagged, body: &[u8], ulpdu: &[u8]) -> Result<(), Wrong> {
        if header.msn.get() != self.arrival.untagged.reads.wrapping_add(1) {
            return Err(wrong::BAD_MSN);
        }
        if header.mo.get() != 0 {
            return Err(wrong::BAD_OFFSET);
        }
        if body.len() > size_of::<ReadRequest>() {
            return Err(wrong::TOO_LONG);
        }
        let (Ok(request), true) = (ReadRequest::read_from_bytes(body), header.control.is_last()) else {
            return Err(wrong::SHORT_READ);
        };
        if self.transmitter.asked() >= self.agreement.ird as usize {
            return Err(wrong::TOO_MANY_READS);
        }
        let len = request.rdma_rd_sz.get();
        if len > 0 {
            let stag = Stag(request.src_stag.get());
            self.regions
                .check_grant(stag, request.src_to.get(), len, RemoteRights::RemoteRead)
                .map_err(Wrong::read)?;
        }
        let asked: Asked = ulpdu.try_into().map_err(|_| wrong::SHORT_READ)?;
        self.arrival.untagged.reads = self.arrival.untagged.reads.wrapping_add(1);
        self.transmitter.ask(asked);
        Ok(())
    }
}
