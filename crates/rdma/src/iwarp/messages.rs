//! The untagged queues of the peer: Sends and Read Requests.
//!
//! The session borrows a message of one FPDU from the receive buffer. A message of several FPDUs is
//! reassembled in a buffer. One such buffer is enough, because messages arrive in order.

use super::terminate::{self, TerminateReason};
use blockmux_volume::{MAX_TRANSFER, Memory, Pool, Seg};
use blockmux_wire::iwarp::ddp::{UNTAGGED_LEN, Untagged};
use blockmux_wire::iwarp::rdmap::{RdmapOpcode, ReadRequest};
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
    pub(super) reassembly: Option<MessageReassembly>,
}

pub(super) struct MessageReassembly {
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

    /// Drops a partial message at the end of the connection.
    pub(super) fn stop(&mut self) {
        self.reassembly = None;
    }

    /// Takes a segment of a Send message; returns the message when it is complete. A first, empty
    /// message is none if the setup of the connection ends with it.
    #[inline]
    pub(super) fn on_send(
        &mut self,
        (header, body): (&Untagged, &[u8]),
        ends_setup: bool,
        receive_len: usize,
        pool: &Pool,
        borrow: impl FnOnce(usize, usize) -> Seg,
    ) -> Result<Option<Seg>, TerminateReason> {
        if header.msn.get() != self.sends.wrapping_add(1) {
            return Err(terminate::BAD_MSN);
        }
        let is_last = header.control.is_last();
        let filled = self.reassembly.as_ref().map_or(0, |reassembly| reassembly.filled);
        if header.mo.get() as usize != filled {
            return Err(terminate::BAD_OFFSET);
        }
        if ends_setup && self.sends == 0 && body.is_empty() && is_last && filled == 0 {
            self.sends = 1;
            return Ok(None);
        }
        if self.receives == 0 {
            return Err(terminate::NO_RECEIVE);
        }
        if filled.saturating_add(body.len()) > receive_len {
            return Err(terminate::TOO_LONG);
        }
        let message = if is_last && self.reassembly.is_none() {
            borrow(UNTAGGED_LEN, body.len())
        } else {
            let Some(message) = self.gather(header, body, receive_len, pool)? else { return Ok(None) };
            message
        };
        self.receives = self.receives.saturating_sub(1);
        self.sends = self.sends.wrapping_add(1);
        Ok(Some(message))
    }

    /// Appends a segment to the message in reassembly; returns the message when it is complete.
    fn gather(
        &mut self,
        header: &Untagged,
        body: &[u8],
        len: usize,
        pool: &Pool,
    ) -> Result<Option<Seg>, TerminateReason> {
        let opcode = header.control.opcode();
        let reassembly = self.reassembly.get_or_insert_with(|| {
            let memory = if len <= MAX_TRANSFER as usize { pool.take(len) } else { None };
            // Without the buffer neither this message nor any later one could be received.
            let memory = memory.unwrap_or_else(|| Memory::from_heap(len));
            MessageReassembly { buffer: memory.seg(0, len), filled: 0, opcode }
        });
        if reassembly.opcode != opcode {
            return Err(terminate::BAD_OPCODE);
        }
        // The caller has checked that it fits.
        reassembly.buffer.slice(reassembly.filled, body.len()).copy_from(body);
        reassembly.filled = reassembly.filled.saturating_add(body.len());
        if !header.control.is_last() {
            return Ok(None);
        }
        Ok(self.reassembly.take().map(|whole| whole.buffer.slice(0, whole.filled)))
    }

    /// Takes a Read Request.
    #[inline]
    pub(super) fn on_read(&mut self, header: &Untagged, body: &[u8]) -> Result<ReadRequest, TerminateReason> {
        if header.msn.get() != self.reads.wrapping_add(1) {
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
        self.reads = self.reads.wrapping_add(1);
        Ok(request)
    }
}
