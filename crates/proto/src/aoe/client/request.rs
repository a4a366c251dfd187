//! Requests to the disk, and how they are split into commands.

use crate::aoe::SECTOR;
use crate::aoe::identify::AtaDisk;
use blockmux_volume::{Extent, Io, IoError, Memory, Op, Output, Pool, Seg, SgList};
use blockmux_wire::ata::{ATA_SECTOR, TrimRange};
use zerocopy::IntoBytes;

/// A request from submission to completion.
pub(super) struct AoeRequest {
    pub(super) io: Io,
    pub(super) phase: RequestPhase,
    /// Destination of a read whose data arrives in several frames.
    pub(super) buffer: Option<SgList>,
    pool: Pool,
    /// Number of bytes from the start for which commands were sent.
    issued: u64,
    /// Pieces to send again in smaller commands: offset and length in bytes.
    retries: Vec<(u64, u64)>,
    /// Number of outstanding commands.
    pub(super) outstanding: u32,
    pub(super) error: Option<IoError>,
    /// Whether a flush follows.
    flushes: bool,
}

/// Current phase of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestPhase {
    Read,
    Write,
    WriteZeroes,
    Trim,
    Flush,
}

/// The range of the next command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AoePiece {
    /// Offset in the request, in bytes.
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl AoeRequest {
    /// Starts a request, or returns its result if it needs no command.
    pub(super) fn new(
        io: Io,
        disk: &AtaDisk,
        pool: &Pool,
    ) -> Result<AoeRequest, (Io, Result<Output, IoError>)> {
        let (phase, flushes) = match io.op {
            Op::Read => (RequestPhase::Read, false),
            Op::Write { fua } => (RequestPhase::Write, fua && disk.write_cache),
            Op::WriteZeroes { only_fast: true, .. } | Op::CompareAndWrite { .. } => {
                return Err((io, Err(IoError::Unsupported)));
            }
            Op::WriteZeroes { fua, .. } => (RequestPhase::WriteZeroes, fua && disk.write_cache),
            Op::Flush => (RequestPhase::Flush, false),
            Op::Discard { fua } if disk.trim_sectors > 0 => (RequestPhase::Trim, fua && disk.write_cache),
            Op::Discard { .. } | Op::Prefetch => return Err((io, Ok(Output::Nothing))),
            Op::BlockStatus if io.len > 0 => {
                let all = Output::Extents(vec![Extent::data(io.len)]);
                return Err((io, Ok(all)));
            }
            Op::BlockStatus => return Err((io, Ok(Output::Extents(Vec::new())))),
        };
        if io.len == 0 && phase != RequestPhase::Flush {
            let output = io.clone().into_empty_output();
            return Err((io, Ok(output)));
        }
        let buffer = io.data.clone().filter(|_| phase == RequestPhase::Read);
        Ok(AoeRequest {
            pool: pool.clone(),
            io,
            phase,
            buffer,
            issued: 0,
            retries: Vec::new(),
            outstanding: 0,
            error: None,
            flushes,
        })
    }

    /// Whether the current phase needs no further commands.
    pub(super) fn is_issued(&self) -> bool {
        let end = if self.phase == RequestPhase::Flush { 1 } else { self.io.len };
        self.error.is_some() || (self.issued >= end && self.retries.is_empty())
    }

    /// The next piece, of at most `sectors`.
    pub(super) fn next_piece(&mut self, sectors: u8) -> Option<AoePiece> {
        let max_window = match self.phase {
            RequestPhase::Flush => {
                let is_new = self.issued == 0;
                self.issued = 1;
                return is_new.then_some(AoePiece { offset: 0, len: 0 });
            }
            RequestPhase::Trim => MAX_TRIM,
            _ => u64::from(sectors).saturating_mul(SECTOR),
        };
        if let Some((offset, len)) = self.retries.pop() {
            let here = len.min(max_window);
            if len > here {
                self.retries.push((offset.saturating_add(here), len.saturating_sub(here)));
            }
            return Some(AoePiece { offset, len: here });
        }
        let (offset, here) = (self.issued, self.io.len.saturating_sub(self.issued).min(max_window));
        self.issued = offset.saturating_add(here);
        (here > 0).then_some(AoePiece { offset, len: here })
    }

    /// Schedules a piece to be sent again in smaller commands.
    pub(super) fn reissue(&mut self, offset: u64, len: u64) {
        self.retries.push((offset, len));
    }

    /// The data to send for a piece.
    pub(super) fn data_of(&self, piece: AoePiece, zeroes: &Seg) -> SgList {
        let len = usize::try_from(piece.len).unwrap_or(0);
        match (self.phase, &self.io.data) {
            (RequestPhase::Write, Some(data)) => data.slice(usize::try_from(piece.offset).unwrap_or(0), len),
            (RequestPhase::WriteZeroes, _) => SgList::one(zeroes.slice(0, len)),
            (RequestPhase::Trim, _) => {
                SgList::one(ranges(self.io.offset.saturating_add(piece.offset), piece.len))
            }
            _ => SgList::default(),
        }
    }

    /// The destination of a read's pieces: the request's own memory, or memory of the core's pool,
    /// or of the heap if the pool is empty.
    pub(super) fn buffer_for_pieces(&mut self) -> &SgList {
        let (len, pool) = (usize::try_from(self.io.len).unwrap_or(0), &self.pool);
        self.buffer.get_or_insert_with(|| {
            let memory = pool.take_payload(len).unwrap_or_else(|| Memory::from_heap(len));
            SgList::one(memory.seg(0, len))
        })
    }

    /// Enters the next phase after all commands have succeeded; `false` if there is none.
    pub(super) fn next_phase(&mut self) -> bool {
        if !self.flushes || self.error.is_some() {
            return false;
        }
        (self.flushes, self.phase, self.issued) = (false, RequestPhase::Flush, 0);
        true
    }

    /// The result of the request.
    pub(super) fn into_result(self) -> Result<Output, IoError> {
        match (self.error, self.io.op) {
            (Some(error), _) => Err(error),
            (None, Op::Read) => Ok(Output::Data(self.buffer.unwrap_or_default())),
            _ => Ok(Output::Nothing),
        }
    }
}

/// The data of a trim: one sector of ranges.
fn ranges(offset: u64, len: u64) -> Seg {
    let mut sector = [0; ATA_SECTOR];
    let (mut block, mut left) = (offset / SECTOR, len / SECTOR);
    for buffer in sector.as_chunks_mut::<8>().0 {
        let count = left.min(MAX_RANGE);
        if count == 0 {
            break;
        }
        buffer.copy_from_slice(TrimRange::new(block, count as u16).as_bytes());
        (block, left) = (block.saturating_add(count), left.saturating_sub(count));
    }
    Seg::from_slice(&sector)
}

/// The maximum data of a frame, in bytes.
pub(super) const MAX_FRAME_DATA: u64 = 255 * SECTOR;
/// The maximum number of blocks of a trim range.
const MAX_RANGE: u64 = 0xffff;
/// The maximum length of a trim command, in bytes: one sector of ranges.
const MAX_TRIM: u64 = 64 * MAX_RANGE * SECTOR;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::Tag;

    fn disk() -> AtaDisk {
        AtaDisk {
            sectors: 1 << 40,
            lba48: true,
            write_cache: true,
            flush_ext: true,
            trim_sectors: 8,
            physical_block: 512,
            rotational: false,
            model: String::new(),
            serial: String::new(),
        }
    }

    fn request(op: Op, len: u64) -> AoeRequest {
        let io = Io::new(Tag(1), op, 4096, len);
        AoeRequest::new(io, &disk(), &Pool::new(1 << 30)).unwrap_or_else(|_| panic!("it begins"))
    }

    #[test]
    fn a_request_is_cut_into_commands_and_again_into_smaller_ones() {
        let mut read = request(Op::Read, 20 * 512);
        let pieces: Vec<_> = std::iter::from_fn(|| read.next_piece(8)).collect();
        assert_eq!(pieces.iter().map(|piece| piece.len / 512).collect::<Vec<_>>(), [8, 8, 4]);
        assert!(read.is_issued());
        read.reissue(pieces[1].offset, pieces[1].len);
        let retries: Vec<_> = std::iter::from_fn(|| read.next_piece(3)).collect();
        let expected = [(8, 3), (11, 3), (14, 2)].map(|(at, n)| AoePiece { offset: at * 512, len: n * 512 });
        assert_eq!((retries, read.is_issued()), (expected.to_vec(), true));
    }

    #[test]
    fn a_write_that_has_to_be_stable_is_followed_by_a_flush() {
        let mut write = request(Op::WriteZeroes { fua: true, may_unmap: false, only_fast: false }, 512);
        assert!(write.next_piece(2).is_some() && write.is_issued() && write.next_phase());
        assert_eq!((write.phase, write.is_issued()), (RequestPhase::Flush, false));
        assert_eq!((write.next_piece(2), write.next_piece(2)), (Some(AoePiece { offset: 0, len: 0 }), None));
        assert!(!write.next_phase());
    }

    #[test]
    fn a_trim_lists_its_ranges() {
        let trim = request(Op::Discard { fua: false }, 0x10001 * 512);
        let piece = AoePiece { offset: 512, len: 0x10000 * 512 };
        let bytes = trim.data_of(piece, &Seg::from_slice(&[0; 512])).to_vec();
        assert_eq!(&bytes[..8], [9, 0, 0, 0, 0, 0, 0xff, 0xff]);
        assert_eq!(&bytes[8..16], [8, 0, 1, 0, 0, 0, 1, 0]);
        assert!(bytes[16..].iter().all(|byte| *byte == 0));
        assert_eq!(request(Op::Discard { fua: false }, 1 << 40).next_piece(2).unwrap().len, MAX_TRIM);
    }
}
