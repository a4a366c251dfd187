//! Receives untagged messages: Sends, Read Requests and Terminate. Each has its own queue.
//!
//! The session borrows a message of one FPDU from the receive buffer. A message of several FPDUs is
//! reassembled in a buffer. One such buffer is enough, because messages arrive in order.

use super::Iwarp;
use super::setup::Rtr;
use super::terminate::{self, TerminateReason};
use super::transmit::PeerReadRequest;
use blockmux_proto::driver::session::ProtocolError;
use blockmux_proto::rdma::{Event, RemoteRights, Stag};
use blockmux_volume::{MAX_TRANSFER, Memory, Seg};
use blockmux_wire::iwarp::ddp::{
    DDP_VERSION, QUEUE_READ, QUEUE_SEND, QUEUE_TERMINATE, UNTAGGED_LEN, Untagged,
};
use blockmux_wire::iwarp::rdmap::{RDMAP_VERSION, RdmapOpcode, ReadRequest};
use zerocopy::FromBytes;

/// State of the peer's untagged queues.
pub(super) struct UntaggedQueues {
    /// Number of posted receive buffers.
    receives: u32,
    /// Messages received so far.
    sends: u32,
    /// Read Requests received so far.
    reads: u32,
    /// A message of several FPDUs that has not arrived whole.
    reassembly: Option<MessageReassembly>,
}

struct MessageReassembly {
    buffer: Seg,
    filled: usize,
    opcode: RdmapOpcode,
}

impl UntaggedQueues {
    pub(super) fn new(receives: u32) -> UntaggedQueues {
        UntaggedQueues { receives, sends: 0, reads: 0, reassembly: None }
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

    /// Whether a message has arrived in part.
    pub(super) fn is_within(&self) -> bool {
        self.reassembly.is_some()
    }

    /// Drops a partial message at the end of the connection.
    pub(super) fn stop(&mut self) {
        self.reassembly = None;
    }
}

impl Iwarp {
    /// Handles an untagged segment. The outer error is that of a Terminate message, which ends the
    /// connection; the inner one is a violation that this side has to report.
    #[inline]
    pub(super) fn on_untagged(
        &mut self,
        header: &Untagged,
        body: &[u8],
        ulpdu: &[u8],
        borrow: impl FnOnce(usize, usize) -> Seg,
    ) -> Result<Result<(), TerminateReason>, ProtocolError> {
        let (control, queue) = (header.control, header.qn.get());
        if control.ddp_version() != DDP_VERSION {
            return Ok(Err(terminate::UNTAGGED_VERSION));
        }
        if queue > QUEUE_TERMINATE {
            return Ok(Err(terminate::BAD_QUEUE));
        }
        if control.rdmap_version() != RDMAP_VERSION {
            return Ok(Err(terminate::RDMAP_VERSION));
        }
        match (queue, control.opcode()) {
            (QUEUE_SEND, opcode) if opcode.is_send() => Ok(self.on_send(header, body, borrow)),
            (QUEUE_READ, RdmapOpcode::RDMA_READ_REQUEST) => Ok(self.on_read(header, body, ulpdu)),
            (QUEUE_TERMINATE, RdmapOpcode::TERMINATE) => Err(self.on_terminate(body)),
            _ => Ok(Err(terminate::BAD_OPCODE)),
        }
    }

    /// Handles a segment of a Send message.
    #[inline]
    fn on_send(
        &mut self,
        header: &Untagged,
        body: &[u8],
        borrow: impl FnOnce(usize, usize) -> Seg,
    ) -> Result<(), TerminateReason> {
        let queues = &mut self.receive_side.untagged;
        if header.msn.get() != queues.sends.wrapping_add(1) {
            return Err(terminate::BAD_MSN);
        }
        let is_last = header.control.is_last();
        let filled = queues.reassembly.as_ref().map_or(0, |reassembly| reassembly.filled);
        if header.mo.get() as usize != filled {
            return Err(terminate::BAD_OFFSET);
        }
        let is_rtr =
            self.negotiated.rtr == Some(Rtr::Send) && queues.sends == 0 && body.is_empty() && is_last;
        if is_rtr && filled == 0 {
            queues.sends = 1;
            return Ok(());
        }
        if queues.receives == 0 {
            return Err(terminate::NO_RECEIVE);
        }
        if filled.saturating_add(body.len()) > self.endpoint.receive_len as usize {
            return Err(terminate::TOO_LONG);
        }
        let message = if is_last && queues.reassembly.is_none() {
            borrow(UNTAGGED_LEN, body.len())
        } else {
            match self.gather(header, body)? {
                Some(message) => message,
                None => return Ok(()),
            }
        };
        let stag = Stag(header.invalidate_stag.get());
        let invalidated = header.control.opcode().invalidates().then_some(stag);
        if let Some(stag) = invalidated {
            self.regions.invalidate(stag).map_err(|_| terminate::CANNOT_INVALIDATE)?;
        }
        let queues = &mut self.receive_side.untagged;
        queues.receives = queues.receives.saturating_sub(1);
        queues.sends = queues.sends.wrapping_add(1);
        self.events.push_back(Event::Received { message, invalidated });
        Ok(())
    }

    /// Appends a segment to the message in reassembly; returns the message when it is complete.
    fn gather(&mut self, header: &Untagged, body: &[u8]) -> Result<Option<Seg>, TerminateReason> {
        let opcode = header.control.opcode();
        if self.receive_side.untagged.reassembly.is_none() {
            let len = self.endpoint.receive_len as usize;
            let memory = if len <= MAX_TRANSFER as usize { self.pool.take(len) } else { None };
            // Without the buffer neither this message nor any later one could be received.
            let memory = memory.unwrap_or_else(|| Memory::from_heap(len));
            self.receive_side.untagged.reassembly =
                Some(MessageReassembly { buffer: memory.seg(0, len), filled: 0, opcode });
        }
        let Some(reassembly) = &mut self.receive_side.untagged.reassembly else { return Ok(None) };
        if reassembly.opcode != opcode {
            return Err(terminate::BAD_OPCODE);
        }
        // The caller has checked that it fits.
        reassembly.buffer.slice(reassembly.filled, body.len()).copy_from(body);
        reassembly.filled = reassembly.filled.saturating_add(body.len());
        if !header.control.is_last() {
            return Ok(None);
        }
        Ok(self.receive_side.untagged.reassembly.take().map(|whole| whole.buffer.slice(0, whole.filled)))
    }

    /// Handles a Read Request: checks it and queues its response.
    #[inline]
    fn on_read(&mut self, header: &Untagged, body: &[u8], ulpdu: &[u8]) -> Result<(), TerminateReason> {
        if header.msn.get() != self.receive_side.untagged.reads.wrapping_add(1) {
            return Err(terminate::BAD_MSN);
        }
        if header.mo.get() != 0 {
            return Err(terminate::BAD_OFFSET);
        }
        if body.len() > size_of::<ReadRequest>() {
            return Err(terminate::TOO_LONG);
        }
        let (Ok(request), true) = (ReadRequest::read_from_bytes(body), header.control.is_last()) else {
            return Err(terminate::SHORT_READ);
        };
        if self.transmitter.unanswered_reads() >= self.negotiated.ird as usize {
            return Err(terminate::TOO_MANY_READS);
        }
        let len = request.rdma_rd_sz.get();
        if len > 0 {
            let stag = Stag(request.src_stag.get());
            self.regions
                .check_grant(stag, request.src_to.get(), len, RemoteRights::RemoteRead)
                .map_err(TerminateReason::read)?;
        }
        let asked: PeerReadRequest = ulpdu.try_into().map_err(|_| terminate::SHORT_READ)?;
        self.receive_side.untagged.reads = self.receive_side.untagged.reads.wrapping_add(1);
        self.transmitter.push_peer_read(asked);
        Ok(())
    }
}
