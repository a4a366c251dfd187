//! Parsing requests, compact or extended, into operations of a volume (proto.md, "Request message",
//! "Request types"; extension-ext-header, "Extended request").

use super::params::ServerParams;
use super::pending::PendingRequest;
use super::reply::MAX_STATUS_LEN;
use super::transmission::ALL_ROOM;
use crate::driver::session::ProtocolError;
use crate::multi_step::is_long;
use crate::nbd::HeaderFormat;
use crate::nbd::errno;
use blockmux_volume::{IoError, MAX_TRANSFER, Op};
use blockmux_wire::nbd::handshake::TransmissionFlags;
use blockmux_wire::nbd::transmission::{self as wire, *};
use std::borrow::Cow;
use zerocopy::FromBytes;

/// A request, compact or extended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NbdRequest {
    pub(super) flags: CmdFlags,
    pub(super) command: Cmd,
    pub(super) cookie: u64,
    /// In bytes.
    pub(super) offset: u64,
    /// Length of the affected range, in bytes; with `NBD_CMD_FLAG_PAYLOAD_LEN`, length of the
    /// payload.
    pub(super) length: u64,
}

/// The error reply to a request that is not carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NbdRequestRefusal {
    pub(super) errno: Errno,
    /// The reason, for people; less than 4,096 bytes.
    pub(super) text: Cow<'static, str>,
}

impl HeaderFormat {
    /// Length of a request without its payload, in bytes.
    #[inline]
    pub(super) fn request_len(self) -> usize {
        if self == HeaderFormat::Extended { size_of::<ExtendedRequest>() } else { size_of::<wire::Request>() }
    }
}

impl NbdRequest {
    /// Parses the request at the beginning of `bytes`; `None` if it is incomplete.
    #[inline]
    pub(super) fn parse(headers: HeaderFormat, bytes: &[u8]) -> Result<Option<NbdRequest>, ProtocolError> {
        if headers == HeaderFormat::Extended {
            let Ok((request, _)) = ExtendedRequest::ref_from_prefix(bytes) else { return Ok(None) };
            check_magic(request.magic.get(), NBD_EXTENDED_REQUEST_MAGIC)?;
            return Ok(Some(NbdRequest {
                flags: CmdFlags::from_bits_retain(request.flags.get()),
                command: Cmd(request.command.get()),
                cookie: request.cookie.get(),
                offset: request.offset.get(),
                length: request.length.get(),
            }));
        }
        let Ok((request, _)) = wire::Request::ref_from_prefix(bytes) else { return Ok(None) };
        check_magic(request.magic.get(), NBD_REQUEST_MAGIC)?;
        Ok(Some(NbdRequest {
            flags: CmdFlags::from_bits_retain(request.flags.get()),
            command: Cmd(request.command.get()),
            cookie: request.cookie.get(),
            offset: request.offset.get(),
            length: request.length.get().into(),
        }))
    }

    /// Length of the payload that follows the request, in bytes.
    ///
    /// A payload above the advertised maximum ends the session: the document requires that for
    /// extended requests and allows it for compact ones. The maximum is the 2^25 bytes below which
    /// a server must not treat a request as an attack, and twice that for clients that did not
    /// request it.
    #[inline]
    pub(super) fn payload_len(&self, params: &ServerParams) -> Result<usize, ProtocolError> {
        let has_payload = match params.headers {
            HeaderFormat::Simple | HeaderFormat::Structured => self.command == Cmd::NBD_CMD_WRITE,
            HeaderFormat::Extended => self.flags.contains(CmdFlags::PAYLOAD_LEN),
        };
        match has_payload {
            false => Ok(0),
            true if self.length > params.max_request() => Err(ProtocolError {
                what: "sent a request with more payload than the advertised maximum",
                reference: "proto.md, \"Size constraints\"",
            }),
            true => Ok(self.length as usize),
        }
    }

    /// The maximum memory that the request's data or its reply may hold, in bytes. A long read gets
    /// [`ALL_ROOM`].
    #[inline]
    pub(super) fn data_len(&self, params: &ServerParams) -> usize {
        match self.command {
            Cmd::NBD_CMD_READ if self.is_long(params) => ALL_ROOM,
            Cmd::NBD_CMD_READ | Cmd::NBD_CMD_WRITE => self.length.min(MAX_TRANSFER.into()) as usize,
            Cmd::NBD_CMD_BLOCK_STATUS if !self.flags.contains(CmdFlags::REQ_ONE) => MAX_STATUS_LEN,
            _ => 0,
        }
    }

    /// Whether the request's data is transferred in pieces, because one transfer of whole blocks
    /// would exceed the volumes' maximum.
    #[inline]
    pub(super) fn is_long(&self, params: &ServerParams) -> bool {
        // Most requests are shorter by far.
        self.length > NEARLY_LONG
            && !params.respects_sizes
            && is_long(self.offset, self.offset.saturating_add(self.length), params.block())
    }

    /// Whether the payload contains the length, as in a block status with payload, so that the
    /// range cannot be checked yet.
    pub(super) fn has_payload_form(&self, params: &ServerParams) -> bool {
        self.command == Cmd::NBD_CMD_BLOCK_STATUS
            && self.flags.contains(CmdFlags::PAYLOAD_LEN)
            && params.transmission_flags().contains(TransmissionFlags::BLOCK_STATUS_PAYLOAD)
    }

    /// Checks the request; returns its entry for the table of requests in flight.
    #[inline]
    pub(super) fn accept(&self, params: &ServerParams) -> Result<PendingRequest, NbdRequestRefusal> {
        let op = self.op(params)?;
        Ok(PendingRequest {
            cookie: self.cookie,
            offset: self.offset,
            length: self.length,
            op,
            one_extent: self.flags.contains(CmdFlags::REQ_ONE),
            is_one_io: self.is_aligned(params) && !(op.moves_data() && self.length > MAX_TRANSFER.into()),
        })
    }

    #[inline]
    fn is_aligned(&self, params: &ServerParams) -> bool {
        (self.offset | self.length) & params.block().saturating_sub(1) == 0
    }

    /// The operation of the volume for this request. `NBD_CMD_DISC` has none.
    #[inline]
    fn op(&self, params: &ServerParams) -> Result<Op, NbdRequestRefusal> {
        self.check_flags(params)?;
        let fua = self.flags.contains(CmdFlags::FUA);
        let op = match self.command {
            Cmd::NBD_CMD_READ => Op::Read,
            Cmd::NBD_CMD_WRITE => Op::Write { fua },
            Cmd::NBD_CMD_FLUSH if self.offset | self.length != 0 => {
                return Err(NbdRequestRefusal::invalid("a flush has neither offset nor length"));
            }
            Cmd::NBD_CMD_FLUSH => return Ok(Op::Flush),
            Cmd::NBD_CMD_TRIM if params.info.discard_granularity == 0 && !params.info.read_only => {
                return Err(NbdRequestRefusal::invalid("trim was not offered"));
            }
            Cmd::NBD_CMD_TRIM => Op::Discard { fua },
            Cmd::NBD_CMD_CACHE => Op::Prefetch,
            Cmd::NBD_CMD_WRITE_ZEROES => Op::WriteZeroes {
                fua,
                may_unmap: !self.flags.contains(CmdFlags::NO_HOLE),
                only_fast: self.flags.contains(CmdFlags::FAST_ZERO),
            },
            Cmd::NBD_CMD_BLOCK_STATUS if !params.base_allocation => {
                return Err(NbdRequestRefusal::invalid("no metadata context was selected"));
            }
            Cmd::NBD_CMD_BLOCK_STATUS if self.length == 0 => {
                return Err(NbdRequestRefusal::invalid("a block status of no bytes"));
            }
            Cmd::NBD_CMD_BLOCK_STATUS => Op::BlockStatus,
            _ => return Err(NbdRequestRefusal::invalid("unknown command")),
        };
        self.check_range(op, params)?;
        Ok(op)
    }

    /// Checks the flags: FUA is valid with every command, any other flag only with its own.
    #[inline]
    fn check_flags(&self, params: &ServerParams) -> Result<(), NbdRequestRefusal> {
        if self.flags.is_empty() && params.headers != HeaderFormat::Extended {
            return Ok(());
        }
        let mut known = CmdFlags::FUA;
        match self.command {
            Cmd::NBD_CMD_READ if params.headers != HeaderFormat::Simple => known |= CmdFlags::DF,
            Cmd::NBD_CMD_WRITE if params.headers == HeaderFormat::Extended => {
                known |= CmdFlags::PAYLOAD_LEN;
                if !self.flags.contains(CmdFlags::PAYLOAD_LEN) {
                    return Err(NbdRequestRefusal::invalid("a write without payload"));
                }
            }
            Cmd::NBD_CMD_WRITE_ZEROES => {
                known |= CmdFlags::NO_HOLE;
                // On a read-only export the request fails with NBD_EPERM, not for its flag.
                if params.info.fast_zeroes || params.info.read_only {
                    known |= CmdFlags::FAST_ZERO;
                }
            }
            Cmd::NBD_CMD_BLOCK_STATUS => known |= CmdFlags::REQ_ONE,
            _ => {}
        }
        match known.contains(self.flags) {
            true => Ok(()),
            false => Err(NbdRequestRefusal::invalid("a flag that the command does not have")),
        }
    }

    /// Checks the range as every volume does, but against the properties advertised to this client:
    /// the size at the handshake, and whether the export is read-only.
    #[inline]
    fn check_range(&self, op: Op, params: &ServerParams) -> Result<(), NbdRequestRefusal> {
        let info = &params.info;
        let refuse = |error| Err(NbdRequestRefusal::of_io_error(error, op));
        if op.is_write() && info.read_only {
            return refuse(IoError::ReadOnly);
        }
        if self.offset.checked_add(self.length).is_none_or(|end| end > info.size) {
            return refuse(IoError::OutOfRange);
        }
        if !self.is_aligned(params) {
            if params.respects_sizes {
                return refuse(IoError::Misaligned);
            }
            // A block that is zeroed in part is read and written.
            if matches!(op, Op::WriteZeroes { only_fast: true, .. }) {
                return refuse(IoError::Unsupported);
            }
        }
        let is_one_chunk = self.flags.contains(CmdFlags::DF);
        if matches!(op, Op::Read)
            && (self.length > params.max_request() || is_one_chunk && self.is_long(params))
        {
            // EOVERFLOW is not for reads with simple replies ("Error values").
            let errno =
                if params.headers == HeaderFormat::Simple { Errno::NBD_EINVAL } else { Errno::NBD_EOVERFLOW };
            return Err(NbdRequestRefusal {
                errno,
                text: Cow::Borrowed("longer than the advertised maximum"),
            });
        }
        Ok(())
    }
}

impl NbdRequestRefusal {
    #[cold]
    pub(super) fn invalid(text: &'static str) -> NbdRequestRefusal {
        NbdRequestRefusal { errno: Errno::NBD_EINVAL, text: Cow::Borrowed(text) }
    }

    #[cold]
    pub(super) fn of_io_error(error: IoError, op: Op) -> NbdRequestRefusal {
        NbdRequestRefusal { errno: errno::from_io_error(error, op), text: Cow::Owned(error.to_string()) }
    }
}

/// No request of at most this many bytes is long: blocks have at most 64 KiB.
const NEARLY_LONG: u64 = MAX_TRANSFER as u64 - 2 * (64 << 10);

#[inline]
fn check_magic(magic: u32, expected: u32) -> Result<(), ProtocolError> {
    if magic == expected {
        return Ok(());
    }
    let extended = expected == NBD_EXTENDED_REQUEST_MAGIC;
    Err(ProtocolError {
        what: "sent a request with a wrong magic number",
        reference: if extended {
            "extension-ext-header, \"Request message\""
        } else {
            "proto.md, \"Request message\""
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: CmdFlags = CmdFlags::empty();
    use crate::exports::VolumeId;
    use blockmux_volume::VolumeInfo;

    const SIZE: u64 = 1 << 30;

    fn params(headers: HeaderFormat) -> ServerParams {
        let info = VolumeInfo { discard_granularity: 512, fast_zeroes: true, ..VolumeInfo::new(SIZE) };
        ServerParams { volume: VolumeId(0), info, headers, base_allocation: true, respects_sizes: true }
    }

    fn request(command: Cmd, flags: CmdFlags, offset: u64, length: u64) -> NbdRequest {
        NbdRequest { flags, command, cookie: 1, offset, length }
    }

    #[test]
    fn each_command_becomes_its_operation() {
        let zeroes = |fua, may_unmap, only_fast| Op::WriteZeroes { fua, may_unmap, only_fast };
        let table = [
            (Cmd::NBD_CMD_READ, NONE, Op::Read),
            (Cmd::NBD_CMD_READ, CmdFlags::DF | CmdFlags::FUA, Op::Read),
            (Cmd::NBD_CMD_WRITE, NONE, Op::Write { fua: false }),
            (Cmd::NBD_CMD_WRITE, CmdFlags::FUA, Op::Write { fua: true }),
            (Cmd::NBD_CMD_TRIM, CmdFlags::FUA, Op::Discard { fua: true }),
            (Cmd::NBD_CMD_CACHE, NONE, Op::Prefetch),
            (Cmd::NBD_CMD_WRITE_ZEROES, NONE, zeroes(false, true, false)),
            (Cmd::NBD_CMD_WRITE_ZEROES, CmdFlags::NO_HOLE | CmdFlags::FUA, zeroes(true, false, false)),
            (Cmd::NBD_CMD_WRITE_ZEROES, CmdFlags::FAST_ZERO, zeroes(false, true, true)),
            (Cmd::NBD_CMD_BLOCK_STATUS, CmdFlags::REQ_ONE, Op::BlockStatus),
        ];
        for (command, flags, op) in table {
            assert_eq!(
                request(command, flags, 512, 1024).op(&params(HeaderFormat::Structured)),
                Ok(op),
                "{command}"
            );
        }
        assert_eq!(request(Cmd::NBD_CMD_FLUSH, NONE, 0, 0).op(&params(HeaderFormat::Simple)), Ok(Op::Flush));
    }

    #[test]
    fn a_flag_that_its_command_does_not_have_is_refused() {
        let commands = [
            (Cmd::NBD_CMD_READ, CmdFlags::FUA | CmdFlags::DF),
            (Cmd::NBD_CMD_WRITE, CmdFlags::FUA),
            (Cmd::NBD_CMD_TRIM, CmdFlags::FUA),
            (Cmd::NBD_CMD_CACHE, CmdFlags::FUA),
            (Cmd::NBD_CMD_WRITE_ZEROES, CmdFlags::FUA | CmdFlags::NO_HOLE | CmdFlags::FAST_ZERO),
            (Cmd::NBD_CMD_BLOCK_STATUS, CmdFlags::FUA | CmdFlags::REQ_ONE),
        ];
        for (command, known) in commands {
            for bit in 0..16 {
                let flag = CmdFlags::from_bits_retain(1 << bit);
                let result = request(command, flag, 0, 512).op(&params(HeaderFormat::Structured));
                assert_eq!(result.is_ok(), known.contains(flag), "{command} with {flag:?}");
            }
        }
        assert!(request(Cmd::NBD_CMD_READ, CmdFlags::DF, 0, 512).op(&params(HeaderFormat::Simple)).is_err());
    }

    #[test]
    fn a_range_beyond_the_end_has_the_errno_of_its_command() {
        for (offset, length) in
            [(SIZE, 512), (SIZE - 512, 1024), (u64::MAX - 511, 512), (u64::MAX - 511, 1024)]
        {
            for (command, errno) in [
                (Cmd::NBD_CMD_READ, Errno::NBD_EINVAL),
                (Cmd::NBD_CMD_WRITE, Errno::NBD_ENOSPC),
                (Cmd::NBD_CMD_TRIM, Errno::NBD_EINVAL),
                (Cmd::NBD_CMD_CACHE, Errno::NBD_EINVAL),
                (Cmd::NBD_CMD_WRITE_ZEROES, Errno::NBD_ENOSPC),
                (Cmd::NBD_CMD_BLOCK_STATUS, Errno::NBD_EINVAL),
            ] {
                let refusal =
                    request(command, NONE, offset, length).op(&params(HeaderFormat::Structured)).unwrap_err();
                assert_eq!(refusal.errno, errno, "{command} at {offset:#x}");
            }
        }
    }

    #[test]
    fn a_read_only_export_refuses_what_changes_it_and_nothing_else() {
        let mut params = params(HeaderFormat::Simple);
        params.info.read_only = true;
        params.info.discard_granularity = 0;
        for command in [Cmd::NBD_CMD_WRITE, Cmd::NBD_CMD_TRIM, Cmd::NBD_CMD_WRITE_ZEROES] {
            assert_eq!(
                request(command, NONE, 0, 512).op(&params).unwrap_err().errno,
                Errno::NBD_EPERM,
                "{command}"
            );
        }
        for fast_zeroes in [false, true] {
            params.info.fast_zeroes = fast_zeroes;
            let fast = request(Cmd::NBD_CMD_WRITE_ZEROES, CmdFlags::FAST_ZERO, 0, 512);
            assert_eq!(fast.op(&params).unwrap_err().errno, Errno::NBD_EPERM);
        }
        for command in [Cmd::NBD_CMD_READ, Cmd::NBD_CMD_CACHE, Cmd::NBD_CMD_BLOCK_STATUS] {
            assert!(request(command, NONE, 0, 512).op(&params).is_ok(), "{command}");
        }
        assert_eq!(request(Cmd::NBD_CMD_FLUSH, NONE, 0, 0).op(&params), Ok(Op::Flush));
    }

    #[test]
    fn requests_that_are_malformed_or_were_not_offered_are_invalid() {
        let mut plain = params(HeaderFormat::Simple);
        plain.info.discard_granularity = 0;
        plain.info.fast_zeroes = false;
        plain.base_allocation = false;
        let table = [
            request(Cmd::NBD_CMD_READ, NONE, 1, 512),
            request(Cmd::NBD_CMD_WRITE, NONE, 512, 100),
            request(Cmd::NBD_CMD_FLUSH, NONE, 512, 0),
            request(Cmd::NBD_CMD_FLUSH, NONE, 0, 512),
            request(Cmd::NBD_CMD_TRIM, NONE, 0, 512),
            request(Cmd::NBD_CMD_WRITE_ZEROES, CmdFlags::FAST_ZERO, 0, 512),
            request(Cmd::NBD_CMD_BLOCK_STATUS, NONE, 0, 512),
            request(Cmd::NBD_CMD_RESIZE, NONE, 0, 512),
            request(Cmd(0x7777), NONE, 0, 0),
            request(Cmd::NBD_CMD_READ, NONE, 0, u64::from(MAX_TRANSFER) + 512),
        ];
        for request in table {
            assert_eq!(request.op(&plain).unwrap_err().errno, Errno::NBD_EINVAL, "{request:?}");
        }
        let none = request(Cmd::NBD_CMD_BLOCK_STATUS, NONE, 0, 0);
        assert_eq!(none.op(&params(HeaderFormat::Structured)).unwrap_err().errno, Errno::NBD_EINVAL);
    }

    #[test]
    fn a_read_above_the_maximum_is_eoverflow_unless_replies_are_simple() {
        let long = request(Cmd::NBD_CMD_READ, NONE, 0, u64::from(MAX_TRANSFER) + 512);
        for headers in [HeaderFormat::Structured, HeaderFormat::Extended] {
            assert_eq!(long.op(&params(headers)).unwrap_err().errno, Errno::NBD_EOVERFLOW);
        }
    }

    #[test]
    fn payload_length_follows_from_the_header_format_and_its_flag() {
        let write = request(Cmd::NBD_CMD_WRITE, NONE, 0, 512);
        let flagged = request(Cmd::NBD_CMD_TRIM, CmdFlags::PAYLOAD_LEN, 0, 512);
        assert_eq!(
            (
                write.payload_len(&params(HeaderFormat::Simple)),
                write.payload_len(&params(HeaderFormat::Extended))
            ),
            (Ok(512), Ok(0))
        );
        assert_eq!(
            (
                flagged.payload_len(&params(HeaderFormat::Simple)),
                flagged.payload_len(&params(HeaderFormat::Extended))
            ),
            (Ok(0), Ok(512))
        );
        assert_eq!(write.op(&params(HeaderFormat::Extended)).unwrap_err().errno, Errno::NBD_EINVAL);
        let long = request(Cmd::NBD_CMD_WRITE, CmdFlags::PAYLOAD_LEN, 0, u64::from(MAX_TRANSFER) + 1);
        assert!(
            long.payload_len(&params(HeaderFormat::Structured)).is_err()
                && long.payload_len(&params(HeaderFormat::Extended)).is_err()
        );
    }
}
