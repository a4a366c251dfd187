//! Requests of whoever uses the disk, and how they are cut into commands.

use crate::aoe::SECTOR;
use crate::aoe::identify::AtaDisk;
use blockmux_volume::{Extent, Io, IoError, Memory, Op, Output, Pool, Seg, SgList};
use blockmux_wire::ata::{ATA_SECTOR, TrimRange};
use std::time::Instant;
use zerocopy::IntoBytes;

/// A request until it completes.
pub(super) struct AoeRequest {
    pub(super) io: Io,
    pub(super) work: RequestPhase,
    /// Where the data of a read goes, once it is known to come in several frames.
    pub(super) place: Option<SgList>,
    pool: Pool,
    /// Bytes from the request's begin on that commands were made for.
    cut: u64,
    /// Pieces to be made into commands once more: offset and length in bytes.
    again: Vec<(u64, u64)>,
    /// Commands in flight.
    pub(super) outstanding: u32,
    pub(super) error: Option<IoError>,
    /// A flush follows.
    flushes: bool,
    /// When it came.
    pub(super) since: Instant,
}

/// What its commands do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestPhase {
    Read,
    Write,
    WriteZeroes,
    Trim,
    Flush,
}

/// One command to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AoePiece {
    /// In the request, in bytes.
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl AoeRequest {
    /// Begins a request, or completes it at once.
    pub(super) fn new(
        io: Io,
        disk: &AtaDisk,
        pool: &Pool,
        now: Instant,
    ) -> Result<AoeRequest, (Io, Result<Output, IoError>)> {
        let (work, flushes) = match io.op {
            Op::Read => (RequestPhase::Read, false),
            Op::Write { fua } => (RequestPhase::Write, fua && disk.write_cache),
            Op::WriteZeroes { only_fast: true, .. } => return Err((io, Err(IoError::Unsupported))),
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
        if io.len == 0 && work != RequestPhase::Flush {
            let output = io.clone().into_empty_output();
            return Err((io, Ok(output)));
        }
        let place = io.data.clone().filter(|_| work == RequestPhase::Read);
        Ok(AoeRequest {
            pool: pool.clone(),
            io,
            work,
            place,
            cut: 0,
            again: Vec::new(),
            outstanding: 0,
            error: None,
            flushes,
            since: now,
        })
    }

    /// Whether all commands are made that there are to make.
    pub(super) fn is_cut(&self) -> bool {
        let end = if self.work == RequestPhase::Flush { 1 } else { self.io.len };
        self.error.is_some() || (self.cut >= end && self.again.is_empty())
    }

    /// The next command, of so many sectors at most.
    pub(super) fn next_piece(&mut self, sectors: u8) -> Option<AoePiece> {
        let most = match self.work {
            RequestPhase::Flush => {
                let is_new = self.cut == 0;
                self.cut = 1;
                return is_new.then_some(AoePiece { offset: 0, len: 0 });
            }
            RequestPhase::Trim => MAX_TRIM,
            _ => u64::from(sectors).saturating_mul(SECTOR),
        };
        if let Some((offset, len)) = self.again.pop() {
            let here = len.min(most);
            if len > here {
                self.again.push((offset.saturating_add(here), len.saturating_sub(here)));
            }
            return Some(AoePiece { offset, len: here });
        }
        let (offset, here) = (self.cut, self.io.len.saturating_sub(self.cut).min(most));
        self.cut = offset.saturating_add(here);
        (here > 0).then_some(AoePiece { offset, len: here })
    }

    /// Has a piece made into commands once more, smaller ones this time.
    pub(super) fn cut_again(&mut self, offset: u64, len: u64) {
        self.again.push((offset, len));
    }

    /// What a command for that piece sends.
    pub(super) fn data_of(&self, piece: AoePiece, zeroes: &Seg) -> SgList {
        let len = usize::try_from(piece.len).unwrap_or(0);
        match (self.work, &self.io.data) {
            (RequestPhase::Write, Some(data)) => data.slice(usize::try_from(piece.offset).unwrap_or(0), len),
            (RequestPhase::WriteZeroes, _) => SgList::one(zeroes.slice(0, len)),
            (RequestPhase::Trim, _) => {
                SgList::one(ranges(self.io.offset.saturating_add(piece.offset), piece.len))
            }
            _ => SgList::default(),
        }
    }

    /// Where the pieces of a read go: memory of the core's pool, or of the heap when that has none,
    /// unless the request brought its own.
    pub(super) fn place_for_pieces(&mut self) -> &SgList {
        let (len, pool) = (usize::try_from(self.io.len).unwrap_or(0), &self.pool);
        self.place.get_or_insert_with(|| {
            let memory = pool.take_payload(len).unwrap_or_else(|| Memory::from_heap(len));
            SgList::one(memory.seg(0, len))
        })
    }

    /// What follows when every command has succeeded; `true` if there is something.
    pub(super) fn goes_on(&mut self) -> bool {
        if !self.flushes || self.error.is_some() {
            return false;
        }
        (self.flushes, self.work, self.cut) = (false, RequestPhase::Flush, 0);
        true
    }

    /// What it completes with.
    pub(super) fn into_result(self) -> Result<Output, IoError> {
        match (self.error, self.io.op) {
            (Some(error), _) => Err(error),
            (None, Op::Read) => Ok(Output::Data(self.place.unwrap_or_default())),
            _ => Ok(Output::Nothing),
        }
    }
}

/// One sector of ranges for a trim.
fn ranges(offset: u64, len: u64) -> Seg {
    let mut sector = [0; ATA_SECTOR];
    let (mut block, mut left) = (offset / SECTOR, len / SECTOR);
    for place in sector.as_chunks_mut::<8>().0 {
        let count = left.min(MAX_RANGE);
        if count == 0 {
            break;
        }
        place.copy_from_slice(TrimRange::new(block, count as u16).as_bytes());
        (block, left) = (block.saturating_add(count), left.saturating_sub(count));
    }
    Seg::from_slice(&sector)
}

/// The data of any frame is shorter.
pub(super) const LARGEST_FRAME: u64 = 255 * SECTOR;
/// Blocks of one range.
const MAX_RANGE: u64 = 0xffff;
/// What one sector of ranges can tell of, in bytes.
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
        AoeRequest::new(io, &disk(), &Pool::new(1 << 30), Instant::now())
            .unwrap_or_else(|_| panic!("it begins"))
    }

    #[test]
    fn a_request_is_cut_into_commands_and_again_into_smaller_ones() {
        let mut read = request(Op::Read, 20 * 512);
        let pieces: Vec<_> = std::iter::from_fn(|| read.next_piece(8)).collect();
        assert_eq!(pieces.iter().map(|piece| piece.len / 512).collect::<Vec<_>>(), [8, 8, 4]);
        assert!(read.is_cut());
        read.cut_again(pieces[1].offset, pieces[1].len);
        let again: Vec<_> = std::iter::from_fn(|| read.next_piece(3)).collect();
        let expected = [(8, 3), (11, 3), (14, 2)].map(|(at, n)| AoePiece { offset: at * 512, len: n * 512 });
        assert_eq!((again, read.is_cut()), (expected.to_vec(), true));
    }

    #[test]
    fn a_write_that_has_to_be_stable_is_followed_by_a_flush() {
        let mut write = request(Op::WriteZeroes { fua: true, may_unmap: false, only_fast: false }, 512);
        assert!(write.next_piece(2).is_some() && write.is_cut() && write.goes_on());
        assert_eq!((write.work, write.is_cut()), (RequestPhase::Flush, false));
        assert_eq!((write.next_piece(2), write.next_piece(2)), (Some(AoePiece { offset: 0, len: 0 }), None));
        assert!(!write.goes_on());
    }

    #[test]
    fn a_trim_tells_its_ranges() {
        let trim = request(Op::Discard { fua: false }, 0x10001 * 512);
        let piece = AoePiece { offset: 512, len: 0x10000 * 512 };
        let bytes = trim.data_of(piece, &Seg::from_slice(&[0; 512])).to_vec();
        assert_eq!(&bytes[..8], [9, 0, 0, 0, 0, 0, 0xff, 0xff]);
        assert_eq!(&bytes[8..16], [8, 0, 1, 0, 0, 0, 1, 0]);
        assert!(bytes[16..].iter().all(|byte| *byte == 0));
        assert_eq!(request(Op::Discard { fua: false }, 1 << 40).next_piece(2).unwrap().len, MAX_TRIM);
    }
}
