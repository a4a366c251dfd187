//! Requests that the volume cannot carry out as one I/O: of any alignment, or longer than
//! [`MAX_TRANSFER`](blockmux_volume::MAX_TRANSFER). NBD clients that did not request the block
//! sizes may send them, and users of files do.
//!
//! ```text
//!   read           Read (the enclosing blocks), of a long request once for each piece
//!   write          Read (first block), Read (last block), Write (the enclosing blocks)
//!   write zeroes   the steps of a write of the first part of a block; WriteZeroes (whole blocks);
//!                  the steps of a write of the last part of a block
//!   block status   BlockStatus (the enclosing blocks)
//! ```
//! The blocks that a write reads in part are locked from before the first read until the write is
//! complete, as those of a COMPARE AND WRITE. A failed step fails the request; the steps after it
//! are not taken.

use crate::volume_state::{Admission, AtomicRange};
use blockmux_volume::{Extent, Io, IoError, Op, Output, Seg, SgList, Tag};

/// What a request does with a range of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByteRequest {
    pub(crate) op: Op,
    /// In bytes.
    pub(crate) offset: u64,
    /// In bytes.
    pub(crate) length: u64,
}

impl ByteRequest {
    /// The offset after its range, in bytes.
    #[inline]
    pub(crate) fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }
}

/// A request in progress. It has at most one I/O in flight.
pub(crate) struct MultiStepRequest {
    steps: RequestSteps,
    /// The volume's block, in bytes.
    block: u64,
    /// It is a piece of a longer request, which has the reply.
    pub(crate) is_piece: bool,
}

enum RequestSteps {
    /// The data before byte `at` of the volume has been sent.
    Read {
        at: u64,
    },
    BlockStatus,
    Write(BlockWrite),
    /// The bytes before byte `at` of the volume are zeroed. `part` is a part of a block.
    WriteZeroes {
        at: u64,
        part: Option<BlockWrite>,
    },
}

/// What to do after the completion of an I/O.
pub(crate) enum RequestStep {
    /// Submit the next I/O.
    Next,
    /// Send a part of the data, which begins at this offset, then submit the next I/O.
    SendPart(u64, SgList),
    /// Send the last part of the data, which begins at this offset.
    SendLast(u64, SgList),
    /// Reply.
    Done(Result<Output, IoError>),
}

impl MultiStepRequest {
    /// A read, a write, a write of zeroes or a block status; `data` is that of a write.
    pub(crate) fn new(
        request: &ByteRequest,
        data: Option<SgList>,
        block: u64,
        admission: &Admission,
    ) -> MultiStepRequest {
        let steps = match request.op {
            Op::Write { fua } => {
                let data = data.unwrap_or_default();
                RequestSteps::Write(BlockWrite::new(request.offset, data, fua, block, admission))
            }
            Op::WriteZeroes { .. } => RequestSteps::WriteZeroes { at: request.offset, part: None },
            Op::BlockStatus => RequestSteps::BlockStatus,
            _ => RequestSteps::Read { at: request.offset },
        };
        MultiStepRequest { steps, block, is_piece: false }
    }

    /// Whether it is a read in several pieces.
    pub(crate) fn is_long_read(&self, request: &ByteRequest) -> bool {
        let is_read = matches!(self.steps, RequestSteps::Read { .. });
        is_read && is_long(request.offset, request.end(), self.block)
    }

    /// The maximum memory of blocks that it needs in part, in bytes.
    pub(crate) fn extra_payload(&self) -> usize {
        self.block.saturating_mul(2) as usize
    }

    /// The blocks that are locked while the request's I/O is in flight.
    pub(crate) fn locked_range(&mut self) -> Option<&mut AtomicRange> {
        match &mut self.steps {
            RequestSteps::Write(write) | RequestSteps::WriteZeroes { part: Some(write), .. } => {
                write.range.as_mut()
            }
            _ => None,
        }
    }

    /// Whether a part of the data was sent, so that a simple reply cannot report an error.
    pub(crate) fn has_sent(&self, request: &ByteRequest) -> bool {
        matches!(self.steps, RequestSteps::Read { at } if at > request.offset)
    }

    /// The next I/O; its tag is not set.
    pub(crate) fn next(&mut self, request: &ByteRequest, admission: &Admission) -> Io {
        let (block, end) = (self.block, request.end());
        match &mut self.steps {
            RequestSteps::Read { at } => {
                let (start, len) = enclosing_blocks(*at, piece_end(*at, request, block), block);
                Io::new(NO_TAG, Op::Read, start, len)
            }
            RequestSteps::BlockStatus => {
                let (start, len) = enclosing_blocks(request.offset, end, block);
                Io::new(NO_TAG, Op::BlockStatus, start, len)
            }
            RequestSteps::Write(write) => write.next(),
            RequestSteps::WriteZeroes { at, part } => {
                let whole = end & !block.wrapping_sub(1);
                if *at & block.wrapping_sub(1) == 0 && *at < whole {
                    *part = None;
                    return Io::new(NO_TAG, request.op, *at, whole.saturating_sub(*at));
                }
                let write = part.get_or_insert_with(|| {
                    let fua = matches!(request.op, Op::WriteZeroes { fua: true, .. });
                    let len = end.min(block_end(*at, block)).saturating_sub(*at);
                    let zeroes = Seg::from_slice(&vec![0; len as usize]);
                    BlockWrite::new(*at, zeroes.into(), fua, block, admission)
                });
                write.next()
            }
        }
    }

    /// Handles the completion of an I/O.
    pub(crate) fn on_io(&mut self, request: &ByteRequest, result: Result<Output, IoError>) -> RequestStep {
        let output = match result {
            Ok(output) => output,
            Err(error) => return RequestStep::Done(Err(error)),
        };
        let (block, end) = (self.block, request.end());
        match &mut self.steps {
            RequestSteps::Read { at } => {
                let (begin, stop) = (*at, piece_end(*at, request, block));
                let (start, len) = enclosing_blocks(begin, stop, block);
                let Some(part) =
                    part_of(&output, len, begin.saturating_sub(start), stop.saturating_sub(begin))
                else {
                    return RequestStep::Done(Err(IoError::Medium));
                };
                *at = stop;
                match stop < end {
                    true => RequestStep::SendPart(begin, part),
                    false => RequestStep::SendLast(begin, part),
                }
            }
            RequestSteps::BlockStatus => {
                let (start, _) = enclosing_blocks(request.offset, end, block);
                RequestStep::Done(Ok(without_start(output, request.offset.saturating_sub(start))))
            }
            RequestSteps::Write(write) => match write.on_io(&output) {
                Ok(false) => RequestStep::Next,
                result => RequestStep::Done(result.map(|_| Output::Nothing)),
            },
            RequestSteps::WriteZeroes { at, part } => {
                match part.as_mut().map(|write| write.on_io(&output)) {
                    Some(Err(error)) => return RequestStep::Done(Err(error)),
                    Some(Ok(false)) => return RequestStep::Next,
                    Some(Ok(true)) => *at = end.min(block_end(*at, block)),
                    None => *at = end & !block.wrapping_sub(1),
                }
                *part = None;
                if *at < end { RequestStep::Next } else { RequestStep::Done(Ok(Output::Nothing)) }
            }
        }
    }
}

/// A write of bytes of any alignment, at most [`MAX_TRANSFER`](blockmux_volume::MAX_TRANSFER) with
/// the rest of their blocks.
struct BlockWrite {
    data: SgList,
    fua: bool,
    /// The enclosing blocks: their offset and length, in bytes.
    start: u64,
    len: u64,
    /// The volume's block, in bytes.
    block: u64,
    /// Lengths of the parts of the first and of the last block that are kept, in bytes.
    kept: (u64, u64),
    /// The contents of these parts, copied because the volume may have lent the blocks.
    head: SgList,
    tail: SgList,
    /// `None` if no part of a block is kept.
    range: Option<AtomicRange>,
    step: WriteStep,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum WriteStep {
    ReadFirst,
    ReadLast,
    Write,
}

impl BlockWrite {
    fn new(offset: u64, data: SgList, fua: bool, block: u64, admission: &Admission) -> BlockWrite {
        let end = offset.saturating_add(data.len() as u64);
        let (start, len) = enclosing_blocks(offset, end, block);
        let kept = (offset.saturating_sub(start), start.saturating_add(len).saturating_sub(end));
        let step = match kept {
            (0, 0) => WriteStep::Write,
            (0, _) => WriteStep::ReadLast,
            _ => WriteStep::ReadFirst,
        };
        let range = (kept != (0, 0)).then(|| admission.atomic_range(start, len));
        let (head, tail) = (SgList::default(), SgList::default());
        BlockWrite { data, fua, start, len, block, kept, head, tail, range, step }
    }

    fn last_block(&self) -> u64 {
        self.start.saturating_add(self.len).saturating_sub(self.block)
    }

    fn next(&mut self) -> Io {
        match self.step {
            WriteStep::ReadFirst => Io::new(NO_TAG, Op::Read, self.start, self.block),
            WriteStep::ReadLast => Io::new(NO_TAG, Op::Read, self.last_block(), self.block),
            WriteStep::Write => {
                let mut data = std::mem::take(&mut self.head);
                let rest = [std::mem::take(&mut self.data), std::mem::take(&mut self.tail)];
                rest.iter().flat_map(SgList::segs).for_each(|seg| data.push(seg.clone()));
                let op = Op::Write { fua: self.fua };
                Io { data: Some(data), ..Io::new(NO_TAG, op, self.start, self.len) }
            }
        }
    }

    /// Handles the completion of an I/O; returns whether it was the write.
    fn on_io(&mut self, output: &Output) -> Result<bool, IoError> {
        self.range.iter_mut().for_each(AtomicRange::on_io);
        let (head_len, tail_len) = self.kept;
        let is_last = self.step == WriteStep::ReadLast || self.len == self.block;
        let copy = |at, len| {
            let part = part_of(output, self.block, at, len).ok_or(IoError::Medium);
            part.map(|part| if len == 0 { SgList::default() } else { Seg::from_slice(&part.to_vec()).into() })
        };
        match self.step {
            WriteStep::Write => return Ok(true),
            WriteStep::ReadFirst => self.head = copy(0, head_len)?,
            WriteStep::ReadLast => {}
        }
        if is_last {
            self.tail = copy(self.block.saturating_sub(tail_len), tail_len)?;
        }
        self.step = if is_last || tail_len == 0 { WriteStep::Write } else { WriteStep::ReadLast };
        Ok(false)
    }
}

/// Offset and length of the blocks that contain the bytes from `offset` to `end`.
#[inline]
pub(crate) fn enclosing_blocks(offset: u64, end: u64, block: u64) -> (u64, u64) {
    let start = offset & !block.wrapping_sub(1);
    (start, end.checked_next_multiple_of(block).unwrap_or(u64::MAX).saturating_sub(start))
}

/// Offset and length of the whole blocks between `offset` and `end`.
pub(crate) fn whole_blocks_within(offset: u64, end: u64, block: u64) -> (u64, u64) {
    let start = offset.checked_next_multiple_of(block).unwrap_or(u64::MAX);
    (start, (end & !block.wrapping_sub(1)).saturating_sub(start))
}

/// Whether a request with these enclosing blocks is carried out in pieces.
#[inline]
pub(crate) fn is_long(offset: u64, end: u64, block: u64) -> bool {
    enclosing_blocks(offset, end, block).1 > blockmux_volume::MAX_TRANSFER.into()
}

/// The end of the piece that begins at byte `at` of the volume; the whole request is a piece unless
/// it is long.
pub(crate) fn piece_end(at: u64, request: &ByteRequest, block: u64) -> u64 {
    match is_long(request.offset, request.end(), block) {
        true => block_end(at, PIECE).min(request.end()),
        false => request.end(),
    }
}

/// The end of the block with byte `at`.
fn block_end(at: u64, block: u64) -> u64 {
    (at | block.wrapping_sub(1)).saturating_add(1)
}

/// A part of the data of a read of `len` bytes; `None` if the volume has returned anything else.
fn part_of(output: &Output, len: u64, at: u64, part_len: u64) -> Option<SgList> {
    match output {
        Output::Data(data) if data.len() as u64 == len => Some(data.slice(at as usize, part_len as usize)),
        _ => None,
    }
}

/// The extents without the first `skip` bytes, which are less than a block.
fn without_start(mut output: Output, skip: u64) -> Output {
    if let Output::Extents(extents) = &mut output {
        let mut left = skip;
        extents.retain_mut(|Extent { len, .. }| {
            let skipped = left.min(*len);
            (left, *len) = (left.saturating_sub(skipped), len.saturating_sub(skipped));
            *len > 0
        });
    }
    output
}

const NO_TAG: Tag = Tag(0);

/// Length of the pieces of a long request, in bytes: a power of two, and a multiple of every block.
/// Shorter ones are slower, and longer ones wait longer for memory.
pub(crate) const PIECE: u64 = 4 << 20;
