//! Planning and writing requests (proto.md, "Request message").

use super::transmission::SentRequest as InFlight;
use crate::driver::outbox::Outbox;
use crate::nbd::HeaderFormat;
use crate::slots::SlotKey;
use blockmux_volume::{IoError, Op};
use blockmux_wire::nbd::handshake::TransmissionFlags;
use blockmux_wire::nbd::transmission::{
    Cmd, CmdFlags, ExtendedRequest, NBD_EXTENDED_REQUEST_MAGIC, NBD_REQUEST_MAGIC, Request,
};
use zerocopy::IntoBytes;

/// Result of the handshake, as far as requests and replies depend on it.
pub(super) struct ClientParams {
    pub(super) headers: HeaderFormat,
    pub(super) flags: TransmissionFlags,
    /// The id of the metadata context `base:allocation`, if it was selected.
    pub(super) allocation: Option<u32>,
    /// The maximum payload of one message, in bytes; a multiple of the logical block.
    pub(super) max_payload: u32,
}

/// How an I/O is carried out.
pub(super) enum NbdPlan {
    /// It is complete without a request: a hint or flush that the server does not offer.
    Done,
    /// It fails, because the server does not support it.
    Fails(IoError),
    /// Its result is one extent of data, because the server offers no block status.
    AllData,
    /// One flush request.
    Flush,
    /// Requests for the pieces of its range.
    Send(NbdPieces),
}

/// How the range of an I/O is split into requests.
#[derive(Clone, Copy)]
pub(super) struct NbdPieces {
    pub(super) cmd: Cmd,
    pub(super) flags: CmdFlags,
    /// The maximum length of one request, in bytes.
    pub(super) max: u64,
    /// Whether a flush must follow before the I/O is complete.
    pub(super) then_flush: bool,
    /// Whether the requests write a payload of zeroes, because the server has no write-zeroes
    /// command.
    pub(super) zeroes: bool,
}

impl ClientParams {
    /// Plans `op` over `len` bytes with this server.
    #[inline]
    pub(super) fn plan(&self, op: Op, len: u64, wants_one_chunk: bool) -> NbdPlan {
        let can = |flag| self.flags.contains(flag);
        let mut pieces = NbdPieces {
            cmd: Cmd::NBD_CMD_READ,
            flags: CmdFlags::empty(),
            max: u64::from(self.max_payload),
            then_flush: false,
            zeroes: false,
        };
        let fua = match op {
            Op::Read => {
                if wants_one_chunk && len <= DF_MAX && can(TransmissionFlags::SEND_DF) {
                    pieces.flags = CmdFlags::DF;
                }
                false
            }
            Op::Write { fua } => {
                pieces.cmd = Cmd::NBD_CMD_WRITE;
                fua
            }
            Op::Flush if can(TransmissionFlags::SEND_FLUSH) => return NbdPlan::Flush,
            Op::Flush => return NbdPlan::Done,
            Op::Discard { fua } if can(TransmissionFlags::SEND_TRIM) => {
                pieces.cmd = Cmd::NBD_CMD_TRIM;
                pieces.max = self.max_effect();
                fua
            }
            Op::Prefetch if can(TransmissionFlags::SEND_CACHE) => {
                pieces.cmd = Cmd::NBD_CMD_CACHE;
                pieces.max = self.max_effect();
                false
            }
            Op::Discard { .. } | Op::Prefetch => return NbdPlan::Done,
            Op::BlockStatus if self.allocation.is_some() => {
                pieces.cmd = Cmd::NBD_CMD_BLOCK_STATUS;
                pieces.max = self.max_effect();
                false
            }
            Op::BlockStatus => return NbdPlan::AllData,
            Op::CompareAndWrite { .. } => return NbdPlan::Fails(IoError::Unsupported),
            Op::WriteZeroes { fua, may_unmap, only_fast } => {
                match self.plan_zeroes(&mut pieces, len, may_unmap, only_fast) {
                    Ok(()) => fua,
                    Err(error) => return NbdPlan::Fails(error),
                }
            }
        };
        if fua && can(TransmissionFlags::SEND_FUA) {
            pieces.flags |= CmdFlags::FUA;
        } else {
            pieces.then_flush = fua && can(TransmissionFlags::SEND_FLUSH);
        }
        NbdPlan::Send(pieces)
    }

    fn plan_zeroes(
        &self,
        pieces: &mut NbdPieces,
        len: u64,
        may_unmap: bool,
        only_fast: bool,
    ) -> Result<(), IoError> {
        if !self.flags.contains(TransmissionFlags::SEND_WRITE_ZEROES) {
            if only_fast {
                return Err(IoError::Unsupported);
            }
            pieces.cmd = Cmd::NBD_CMD_WRITE;
            pieces.max = u64::from(self.max_payload.min(ZEROES));
            pieces.zeroes = true;
            return Ok(());
        }
        pieces.cmd = Cmd::NBD_CMD_WRITE_ZEROES;
        pieces.max = self.max_effect();
        if !may_unmap {
            pieces.flags |= CmdFlags::NO_HOLE;
        }
        if only_fast {
            // If it were split, the first request could succeed before the second is refused as
            // slow.
            if !self.flags.contains(TransmissionFlags::SEND_FAST_ZERO) || len > pieces.max {
                return Err(IoError::Unsupported);
            }
            pieces.flags |= CmdFlags::FAST_ZERO;
        }
        Ok(())
    }

    /// Whether the server may have refused the request because its length exceeds the maximum
    /// payload, which a server may apply to requests without payload ("Size constraints"). Not for
    /// a fast zero, which must not be split.
    pub(super) fn may_be_too_long(&self, request: &InFlight, error: IoError) -> bool {
        let has_payload = matches!(request.cmd, Cmd::NBD_CMD_READ | Cmd::NBD_CMD_WRITE);
        let is_fast = request.flags.contains(CmdFlags::FAST_ZERO);
        matches!(error, IoError::BadLength | IoError::Unsupported)
            && !(has_payload || is_fast)
            && request.len > self.max_payload.into()
    }

    /// The maximum length of a request without payload, in bytes.
    fn max_effect(&self) -> u64 {
        if self.headers == HeaderFormat::Extended { u64::MAX } else { MAX_COMPACT_EFFECT }
    }

    /// Queues the head of a request.
    #[inline]
    pub(super) fn push(
        &self,
        outbox: &mut Outbox,
        cmd: Cmd,
        flags: CmdFlags,
        cookie: SlotKey,
        offset: u64,
        len: u64,
    ) {
        push(outbox, self.headers, cmd, flags, cookie, offset, len);
    }
}

/// Queues `NBD_CMD_DISC`; nothing may follow it.
pub(super) fn push_disconnect(outbox: &mut Outbox, headers: HeaderFormat) {
    push(outbox, headers, Cmd::NBD_CMD_DISC, CmdFlags::empty(), SlotKey(0), 0, 0);
}

#[inline]
fn push(
    outbox: &mut Outbox,
    headers: HeaderFormat,
    cmd: Cmd,
    flags: CmdFlags,
    cookie: SlotKey,
    offset: u64,
    len: u64,
) {
    if headers == HeaderFormat::Extended {
        let flags = if cmd == Cmd::NBD_CMD_WRITE { flags | CmdFlags::PAYLOAD_LEN } else { flags };
        let request = ExtendedRequest {
            magic: NBD_EXTENDED_REQUEST_MAGIC.into(),
            flags: flags.bits().into(),
            command: cmd.0.into(),
            cookie: cookie.0.into(),
            offset: offset.into(),
            length: len.into(),
        };
        outbox.push_head(request.as_bytes());
    } else {
        let request = Request {
            magic: NBD_REQUEST_MAGIC.into(),
            flags: flags.bits().into(),
            command: cmd.0.into(),
            cookie: cookie.0.into(),
            offset: offset.into(),
            length: (len as u32).into(),
        };
        outbox.push_head(request.as_bytes());
    }
}

/// The maximum length of a compact request without payload, in bytes: a multiple of any minimum
/// block. The field has 32 bits, but some servers treat it as signed, such as qemu-nbd before 5.1.
pub(super) const MAX_COMPACT_EFFECT: u64 = 0x7fff_0000;
/// The maximum length of a write of zeroes to a server without write-zeroes command, in bytes.
pub(super) const ZEROES: u32 = 256 << 10;
/// The length up to which every server must support unfragmented reads, in bytes ("Request types",
/// `NBD_CMD_READ`).
const DF_MAX: u64 = 65_536;
