//! Which parts of a file are holes, by `SEEK_DATA` and `SEEK_HOLE`.
//!
//! The ring has no such operation, so the seeks run on the core's own thread. Each takes about a
//! microsecond as long as the file system has the file's extents in memory, and an answer is cut
//! after [`MAX_EXTENTS`]; a client asks for the rest. A first look at a large fragmented file can
//! wait for the file system's metadata, as `open` can: block status is what a client asks before it
//! copies a volume, not once for each of its reads.
//!
//! What a file system reports as a hole reads as zeroes. It may have space set aside for it
//! (`ZERO_RANGE` leaves such ranges); a write there is then safer than the answer says.

use super::kernel;
use blockmux_volume::Extent;
use std::fs::File;
use std::io;

/// The extents of a non-empty range of whole blocks, from its begin on; together at most the range.
pub(super) fn extents(file: &File, offset: u64, len: u64, block: u64) -> io::Result<Vec<Extent>> {
    let (mut at, end, mut extents) = (offset, offset + len, Vec::new());
    // Each round adds at most a hole and the data behind it. A round that adds nothing has met with
    // a concurrent discard, and the number of rounds is bounded too.
    for _ in 0..MAX_EXTENTS / 2 {
        let data = kernel::seek_data(file, at)?.map_or(end, |data| (data / block * block).min(end));
        if data > at {
            extents.push(Extent { len: data - at, hole: true, zero: true });
        }
        if data == end {
            break;
        }
        let hole = kernel::seek_hole(file, data)?.map_or(end, |hole| hole.next_multiple_of(block).min(end));
        if hole > data {
            extents.push(Extent::data(hole - data));
        }
        at = hole.max(data);
        if at == end {
            break;
        }
    }
    if extents.is_empty() {
        extents.push(Extent::data(len));
    }
    Ok(extents)
}

/// In one answer: about a tenth of a millisecond of seeking.
const MAX_EXTENTS: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_sparse_files_holes_are_seen_and_the_answer_is_bounded() {
        let file = tempfile::tempfile().unwrap();
        let (unit, units) = (64 << 10, 400);
        file.set_len(unit * units).unwrap();
        for odd in (1..units).step_by(2) {
            file.write_all_at(&[1; 4096], odd * unit).unwrap();
        }
        let found = extents(&file, 0, unit * units, 512).unwrap();
        assert_eq!(found.len(), MAX_EXTENTS);
        assert_eq!(found[0], Extent { len: unit, hole: true, zero: true });
        assert_eq!(found[1], Extent { len: 4096, hole: false, zero: false });
        let inside = extents(&file, unit + 512, 1024, 512).unwrap();
        assert_eq!(inside, [Extent { len: 1024, hole: false, zero: false }]);
    }
}
