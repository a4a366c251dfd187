//! Parsing replies (proto.md, "Simple reply message", "Structured reply chunk
//! message", "Extended reply chunk message", "Structured reply types").
//!
//! Short payloads are parsed once they are complete. Read data is borrowed from the receive buffer,
//! copied out of it, or received directly into its destination; block status is parsed descriptor
//! by descriptor. Every length is first checked against the request.

use super::head::{self, ReplyHead, ReplyKind, shortest};
use super::transmission::ClientTransmission;
use crate::driver::outbox::Outbox;
use crate::driver::session::ProtocolError;
use crate::initiator::command_queue::MAX_BORROWED;
use crate::initiator::coverage::RangeError;
use crate::nbd::HeaderFormat;
use crate::slots::SlotKey;
use blockmux_volume::{Chunk, Extent, SgList};
use blockmux_wire::nbd::NBD_MAX_STRING;
use blockmux_wire::nbd::transmission::{
    BlockDescriptor, BlockStatusExt, Cmd, CmdFlags, ErrorChunk, ExtendedBlockDescriptor, NBD_STATE_HOLE,
    NBD_STATE_ZERO, OffsetHole, ReplyType,
};
use zerocopy::FromBytes;

/// The current position in the server's stream.
pub(super) enum ReplyState {
    /// At the head of a message.
    Head,
    /// In read data: the rest is copied or received into `target`.
    Data { request: SlotKey, target: SgList, last: bool },
    /// In block status, before `left` bytes of descriptors.
    Status { request: SlotKey, left: u64, last: bool },
}

/// Result of one step over the input.
enum ReplyProgress {
    /// This many bytes were consumed.
    Took(usize),
    /// This many contiguous bytes are needed.
    Incomplete(usize),
}

type ReplyStep = Result<ReplyProgress, ProtocolError>;

impl ReplyState {
    /// The minimum number of bytes for the next step.
    pub(super) fn least(&self, headers: HeaderFormat) -> usize {
        match self {
            ReplyState::Head => shortest(headers),
            ReplyState::Data { target, .. } => target.len(),
            ReplyState::Status { .. } if headers == HeaderFormat::Extended => {
                size_of::<ExtendedBlockDescriptor>()
            }
            ReplyState::Status { .. } => size_of::<BlockDescriptor>(),
        }
    }

    /// The memory for the next bytes, if they are to be received directly into it.
    pub(super) fn place(&self) -> Option<&SgList> {
        match self {
            ReplyState::Data { target, .. } if target.len() > PLACE_MORE_THAN => Some(target),
            _ => None,
        }
    }
}

impl ClientTransmission {
    /// Consumes `input` from `start` on as far as possible; returns the end of the consumed bytes.
    #[inline]
    pub(super) fn on_bytes(
        &mut self,
        input: &Chunk,
        start: usize,
        outbox: &mut Outbox,
    ) -> Result<usize, ProtocolError> {
        let bytes = input.unread();
        let mut at = start;
        loop {
            let rest = bytes.get(at..).unwrap_or_default();
            let step = match &self.reading {
                ReplyState::Head => self.on_head(input, at, rest, outbox)?,
                ReplyState::Data { .. } => self.on_data(rest, outbox)?,
                ReplyState::Status { .. } => self.on_status(rest, outbox)?,
            };
            match step {
                ReplyProgress::Took(len) => at = at.saturating_add(len),
                ReplyProgress::Incomplete(len) => {
                    self.need = len;
                    return Ok(at);
                }
            }
        }
    }

    /// The memory of [`ReplyState::place`] is full.
    pub(super) fn on_placed(&mut self, outbox: &mut Outbox) -> Result<(), ProtocolError> {
        if let ReplyState::Data { request, last, .. } = self.reading {
            self.end_chunk(request, last, outbox)?;
            self.need = self.reading.least(self.params.headers);
        }
        Ok(())
    }

    #[inline]
    fn on_head(&mut self, input: &Chunk, at: usize, rest: &[u8], outbox: &mut Outbox) -> ReplyStep {
        let head = match head::read(rest, self.params.headers)? {
            Ok(head) => head,
            Err(need) => return Ok(ReplyProgress::Incomplete(need)),
        };
        let Some(request) = self.requests.get_mut(head.cookie) else {
            return fault("answered a cookie that no request in flight has", TRANSMISSION);
        };
        if head.offset.is_some_and(|offset| offset != request.offset) {
            return fault("repeated another offset than the request's", EXTENDED);
        }
        let (cmd, offset, len) = (request.cmd, request.offset, request.len);
        match head.kind {
            ReplyKind::Simple { error: 0 }
                if cmd == Cmd::NBD_CMD_READ && self.params.headers == HeaderFormat::Simple =>
            {
                self.on_content(input, at, rest, &head, offset, len, outbox)
            }
            ReplyKind::Simple { error } => {
                let needs_chunks = cmd == Cmd::NBD_CMD_BLOCK_STATUS && error == 0
                    || cmd == Cmd::NBD_CMD_READ && self.params.headers != HeaderFormat::Simple;
                if needs_chunks {
                    return fault("sent a simple reply where a structured one is due", SIMPLE);
                }
                if error != 0 {
                    self.fail_with_errno(head.cookie, error);
                }
                self.finish_request(head.cookie, outbox);
                Ok(ReplyProgress::Took(head.size))
            }
            ReplyKind::Chunk { reply_type, last } => match reply_type {
                ReplyType::NBD_REPLY_TYPE_OFFSET_DATA => self.on_offset_data(input, at, rest, &head, outbox),
                ReplyType::NBD_REPLY_TYPE_OFFSET_HOLE => self.on_offset_hole(rest, &head, last, outbox),
                ReplyType::NBD_REPLY_TYPE_NONE => {
                    if head.length != 0 || !last {
                        return fault("sent an NBD_REPLY_TYPE_NONE with payload or without DONE", TYPES);
                    }
                    self.end_chunk(head.cookie, true, outbox)?;
                    Ok(ReplyProgress::Took(head.size))
                }
                ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS | ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS_EXT => {
                    self.on_status_head(rest, &head, reply_type, last)
                }
                _ if reply_type.is_error() => self.on_error_chunk(rest, &head, reply_type, last, outbox),
                _ => fault("sent a reply chunk of unknown type", TYPES),
            },
        }
    }

    fn on_offset_data(
        &mut self,
        input: &Chunk,
        at: usize,
        rest: &[u8],
        head: &ReplyHead,
        outbox: &mut Outbox,
    ) -> ReplyStep {
        let Some(len) = head.length.checked_sub(OFFSET_SIZE as u64).filter(|&len| len > 0) else {
            return fault("sent an NBD_REPLY_TYPE_OFFSET_DATA without data", TYPES);
        };
        let size = head.size.saturating_add(OFFSET_SIZE);
        let Some((_, offset)) = rest.get(..size).and_then(|fixed| fixed.split_last_chunk()) else {
            return Ok(ReplyProgress::Incomplete(size));
        };
        let head = ReplyHead { size, ..*head };
        self.on_content(input, at, rest, &head, u64::from_be_bytes(*offset), len, outbox)
    }

    fn on_offset_hole(
        &mut self,
        rest: &[u8],
        head: &ReplyHead,
        last: bool,
        outbox: &mut Outbox,
    ) -> ReplyStep {
        if head.length != size_of::<OffsetHole>() as u64 {
            return fault("sent an NBD_REPLY_TYPE_OFFSET_HOLE that is not 12 bytes long", TYPES);
        }
        let size = head.size.saturating_add(size_of::<OffsetHole>());
        let Some(Ok(hole)) = rest.get(head.size..size).map(OffsetHole::read_from_bytes) else {
            return Ok(ReplyProgress::Incomplete(size));
        };
        let (job, from) = self.cover(head.cookie, hole.offset.get(), hole.length.get().into())?;
        let list = self.destination(job).ok_or(NO_READ)?;
        list.slice(from, hole.length.get() as usize).fill_zero();
        self.end_chunk(head.cookie, last, outbox)?;
        Ok(ReplyProgress::Took(size))
    }

    /// Handles `len` bytes of read data after a head of `head.size` bytes.
    #[inline]
    #[expect(clippy::too_many_arguments, reason = "the hot path passes what it has in registers")]
    fn on_content(
        &mut self,
        input: &Chunk,
        at: usize,
        rest: &[u8],
        head: &ReplyHead,
        offset: u64,
        len: u64,
        outbox: &mut Outbox,
    ) -> ReplyStep {
        let key = head.cookie;
        let last = !matches!(head.kind, ReplyKind::Chunk { last: false, .. });
        let can_borrow = self.can_borrow(key, len);
        let here = rest.get(head.size..).unwrap_or_default();
        let has_all = here.len() as u64 >= len;
        // The state is unchanged so far, so the head can be parsed again with more bytes.
        if can_borrow && !has_all && len <= MAX_BORROWED {
            return Ok(ReplyProgress::Incomplete(head.size.saturating_add(len as usize)));
        }
        let (job_key, from) = self.cover(key, offset, len)?;
        let len = len as usize; // at most the request's, which is below 4 GiB
        if can_borrow && has_all {
            if let Some(job) = self.jobs.get_mut(job_key) {
                job.buffer = Some(SgList::one(input.slice(at.saturating_add(head.size), len)));
            }
            self.end_chunk(key, last, outbox)?;
            return Ok(ReplyProgress::Took(head.size.saturating_add(len)));
        }
        let list = self.destination(job_key).ok_or(NO_READ)?;
        if has_all {
            let data = here.get(..len).unwrap_or_default();
            if list.len() == len {
                list.copy_from(data);
            } else {
                list.slice(from, len).copy_from(data);
            }
            self.end_chunk(key, last, outbox)?;
            return Ok(ReplyProgress::Took(head.size.saturating_add(len)));
        }
        let target = list.slice(from, len);
        target.copy_from(here);
        let left = len.saturating_sub(here.len());
        let target = target.slice(here.len(), left);
        self.reading = ReplyState::Data { request: key, target, last };
        Ok(ReplyProgress::Took(rest.len()))
    }

    /// Whether a chunk of `len` bytes is the complete data of an I/O that brought no memory.
    #[inline]
    fn can_borrow(&mut self, key: SlotKey, len: u64) -> bool {
        let job = self.requests.get_mut(key).map(|request| request.job);
        let job = job.and_then(|job| self.jobs.get_mut(job));
        job.is_some_and(|job| job.io.data.is_none() && job.io.len == len && job.buffer.is_none())
    }

    /// Handles more data of a chunk that `on_content` began, unless it is received directly into
    /// its destination ([`ReplyState::place`]).
    fn on_data(&mut self, rest: &[u8], outbox: &mut Outbox) -> ReplyStep {
        let ReplyState::Data { request, target, last } = &mut self.reading else {
            return Ok(ReplyProgress::Took(0));
        };
        let here = rest.get(..target.len()).unwrap_or(rest);
        target.copy_from(here);
        if here.len() < target.len() {
            let left = target.len().saturating_sub(here.len());
            *target = target.slice(here.len(), left);
            return Ok(if here.is_empty() {
                ReplyProgress::Incomplete(left)
            } else {
                ReplyProgress::Took(here.len())
            });
        }
        let (request, last) = (*request, *last);
        self.end_chunk(request, last, outbox)?;
        Ok(ReplyProgress::Took(here.len()))
    }

    /// Records the arrival of bytes of a read, each of which may arrive once; returns the job and
    /// the position of the bytes in the job's data.
    #[inline]
    fn cover(&mut self, key: SlotKey, offset: u64, len: u64) -> Result<(SlotKey, usize), ProtocolError> {
        let request = self.requests.get_mut(key).filter(|request| request.cmd == Cmd::NBD_CMD_READ);
        let request = request.ok_or(NO_READ)?;
        if request.flags.contains(CmdFlags::DF) && !request.coverage.is_empty() {
            return fault("fragmented a read that forbade it", "proto.md, \"Command flags\"");
        }
        let start = offset.checked_sub(request.offset);
        let Some((start, end)) = start
            .and_then(|start| Some((start, start.checked_add(len)?)))
            .filter(|&(start, end)| start < end && end <= request.len)
        else {
            return fault("sent read data outside the request", READ);
        };
        // A read is at most MAX_TRANSFER long, so this fits.
        request.coverage.add(start as u32, end as u32).map_err(|misfit| match misfit {
            RangeError::Overlap => error("sent the same bytes of a read twice", READ),
            RangeError::TooScattered => error("scattered a read over thousands of places", READ),
        })?;
        let (job, offset) = (request.job, request.offset);
        let from = self.jobs.get_mut(job).map_or(0, |job| offset.saturating_sub(job.io.offset));
        Ok((job, from.saturating_add(start) as usize))
    }

    fn on_error_chunk(
        &mut self,
        rest: &[u8],
        head: &ReplyHead,
        reply_type: ReplyType,
        last: bool,
        outbox: &mut Outbox,
    ) -> ReplyStep {
        if head.length > MAX_ERROR_CHUNK {
            return fault("sent an error chunk of more than 64 KiB", TYPES);
        }
        let size = head.size.saturating_add(head.length as usize);
        let Some(payload) = rest.get(head.size..size) else { return Ok(ReplyProgress::Incomplete(size)) };
        let Ok((fixed, tail)) = ErrorChunk::read_from_prefix(payload) else {
            return fault("sent an error chunk shorter than its fixed part", TYPES);
        };
        let message_len = usize::from(fixed.message_length.get());
        let Some(tail) = tail.get(message_len..).filter(|_| message_len <= NBD_MAX_STRING) else {
            return fault("sent an error message longer than its chunk or than 4096 bytes", TYPES);
        };
        if fixed.error.get() == 0 {
            return fault("sent an error chunk with error 0", TYPES);
        }
        if reply_type == ReplyType::NBD_REPLY_TYPE_ERROR_OFFSET {
            let Some((offset, _)) = tail.split_first_chunk() else {
                return fault("sent an NBD_REPLY_TYPE_ERROR_OFFSET without its offset", TYPES);
            };
            let at = u64::from_be_bytes(*offset);
            let within = self
                .requests
                .get_mut(head.cookie)
                .is_some_and(|request| at.checked_sub(request.offset).is_some_and(|at| at < request.len));
            if !within {
                return fault("reported an error at an offset outside the request", TYPES);
            }
        }
        if let Some(request) = self.requests.get_mut(head.cookie) {
            request.error_chunks = request.error_chunks.saturating_add(1);
            if request.error_chunks > MAX_ERROR_CHUNKS {
                return fault("reported tens of thousands of errors of one request", TYPES);
            }
        }
        self.fail_with_errno(head.cookie, fixed.error.get());
        self.end_chunk(head.cookie, last, outbox)?;
        Ok(ReplyProgress::Took(size))
    }

    fn on_status_head(
        &mut self,
        rest: &[u8],
        head: &ReplyHead,
        reply_type: ReplyType,
        last: bool,
    ) -> ReplyStep {
        let is_extended = reply_type == ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS_EXT;
        if is_extended != (self.params.headers == HeaderFormat::Extended) {
            return fault("sent block status in the form that was not agreed", TYPES);
        }
        let (fixed, each) = if is_extended {
            (size_of::<BlockStatusExt>(), size_of::<ExtendedBlockDescriptor>())
        } else {
            (CONTEXT_SIZE, size_of::<BlockDescriptor>())
        };
        let left = head.length.saturating_sub(fixed as u64);
        if left == 0 || left.checked_rem(each as u64) != Some(0) {
            return fault("sent block status without whole descriptors", TYPES);
        }
        let count = left.checked_div(each as u64).unwrap_or(0);
        if count > MAX_DESCRIPTORS {
            return fault("sent more than 2^20 block status descriptors in a chunk", TYPES);
        }
        let size = head.size.saturating_add(fixed);
        let Some((context, more)) = rest.get(head.size..size).and_then(|fixed| fixed.split_first_chunk())
        else {
            return Ok(ReplyProgress::Incomplete(size));
        };
        if is_extended && more != (count as u32).to_be_bytes() {
            return fault("counted its block status descriptors wrongly", TYPES);
        }
        if Some(u32::from_be_bytes(*context)) != self.params.allocation {
            return fault("sent the status of a metadata context that was not selected", TYPES);
        }
        let extents = self.requests.get_mut(head.cookie).map(|request| (request.cmd, request.job));
        let extents = match extents {
            Some((Cmd::NBD_CMD_BLOCK_STATUS, job)) => {
                self.jobs.get_mut(job).and_then(|job| job.extents.as_ref())
            }
            _ => None,
        };
        match extents {
            None => return fault("sent block status for a request of another kind", TYPES),
            Some(extents) if !extents.is_empty() => {
                return fault("sent the status of one metadata context twice", TYPES);
            }
            Some(_) => {}
        }
        self.reading = ReplyState::Status { request: head.cookie, left, last };
        Ok(ReplyProgress::Took(size))
    }

    /// Handles the complete descriptors in `rest`.
    fn on_status(&mut self, rest: &[u8], outbox: &mut Outbox) -> ReplyStep {
        let ReplyState::Status { request, left, last } = self.reading else {
            return Ok(ReplyProgress::Took(0));
        };
        let job = self.requests.get_mut(request).map(|request| request.job);
        let Some(extents) = job.and_then(|job| self.jobs.get_mut(job)?.extents.as_mut()) else {
            return fault("sent block status for a request of another kind", TYPES);
        };
        let is_extended = self.params.headers == HeaderFormat::Extended;
        let (mut rest, mut took) = (rest, 0_usize);
        while (took as u64) < left {
            let next = if is_extended {
                ExtendedBlockDescriptor::read_from_prefix(rest)
                    .map(|(d, tail)| (d.length.get(), d.status.get(), tail))
                    .ok()
            } else {
                BlockDescriptor::read_from_prefix(rest)
                    .map(|(d, tail)| (d.length.get().into(), d.status.get().into(), tail))
                    .ok()
            };
            let Some((len, status, tail)) = next else { break };
            if len == 0 || status > u64::from(u32::MAX) {
                return fault("described an extent of no length, or with a status beyond 32 bits", TYPES);
            }
            if extents.is_whole() {
                return fault("described extents beyond the end of the requested range", TYPES);
            }
            let has = |bit: u32| status & u64::from(bit) != 0;
            extents.push(Extent { len, hole: has(NBD_STATE_HOLE), zero: has(NBD_STATE_ZERO) });
            took = took.saturating_add(rest.len().saturating_sub(tail.len()));
            rest = tail;
        }
        let left = left.saturating_sub(took as u64);
        if left == 0 {
            self.end_chunk(request, last, outbox)?;
        } else if took == 0 {
            return Ok(ReplyProgress::Incomplete(self.reading.least(self.params.headers)));
        } else {
            self.reading = ReplyState::Status { request, left, last };
        }
        Ok(ReplyProgress::Took(took))
    }

    /// Handles the end of a chunk; with the last chunk, the reply is complete.
    #[inline]
    fn end_chunk(&mut self, key: SlotKey, last: bool, outbox: &mut Outbox) -> Result<(), ProtocolError> {
        self.reading = ReplyState::Head;
        if !last {
            return Ok(());
        }
        let Some(request) = self.requests.get_mut(key) else { return Ok(()) };
        if request.error.is_none() {
            let (cmd, job) = (request.cmd, request.job);
            if cmd == Cmd::NBD_CMD_READ && !request.coverage.is_whole(request.len) {
                return Err(error("ended a read before all of its bytes were sent", READ));
            }
            if cmd == Cmd::NBD_CMD_BLOCK_STATUS
                && self.jobs.get_mut(job).and_then(|job| job.extents.as_ref()).is_none_or(|e| e.is_empty())
            {
                return Err(error("ended block status without describing an extent", TYPES));
            }
        }
        self.finish_request(key, outbox);
        Ok(())
    }
}

pub(super) const fn error(what: &'static str, reference: &'static str) -> ProtocolError {
    ProtocolError { what, reference }
}

fn fault<T>(what: &'static str, reference: &'static str) -> Result<T, ProtocolError> {
    Err(error(what, reference))
}

/// If more than this many bytes of read data are missing, they are received directly into their
/// destination; otherwise they are copied from the receive buffer.
pub(super) const PLACE_MORE_THAN: usize = 64 << 10;
const OFFSET_SIZE: usize = size_of::<u64>();
const CONTEXT_SIZE: usize = size_of::<u32>();
/// The maximum length of an error chunk, in bytes; far more than the longest message.
const MAX_ERROR_CHUNK: u64 = 64 << 10;
/// The maximum number of error chunks of one reply: one for each 512 bytes of the largest request.
/// Without a limit a reply might never end.
const MAX_ERROR_CHUNKS: u32 = 1 << 16;
const MAX_DESCRIPTORS: u64 = 1 << 20;

pub(super) const TRANSMISSION: &str = "proto.md, \"Transmission\"";
const SIMPLE: &str = "proto.md, \"Simple reply message\"";
const EXTENDED: &str = "proto.md, \"Extended reply chunk message\"";
const TYPES: &str = "proto.md, \"Structured reply types\"";
const NO_READ: ProtocolError = error("sent read data for a request that is not a read", TYPES);
const READ: &str = "proto.md, \"Request types\", NBD_CMD_READ";
