//! Allocation status of a file, by `SEEK_DATA` and `SEEK_HOLE`.
//!
//! io_uring has no such operation, so the seeks run on the core's thread. Each takes about a
//! microsecond once the file system has the extents in memory, and a reply has at most
//! [`MAX_EXTENTS`]; the client asks for the rest. The first query of a large fragmented file can
//! block for metadata, as `open` can; clients query block status before a copy, not with each read.
//!
//! A hole reads as zeroes. The file system may still have reserved space for it (`ZERO_RANGE`
//! leaves such ranges).

use super::kernel;
use blockmux_volume::Extent;
use std::fs::File;
use std::io;

/// The extents of a non-empty range of whole blocks, from its start. They may cover less than the
/// range, never more.
pub(super) fn extents(file: &File, offset: u64, len: u64, block: u64) -> io::Result<Vec<Extent>> {
    let (mut at, end, mut extents) = (offset, offset + len, Vec::new());
    // Each round adds at most a hole and the data after it. A round that adds nothing has raced
    // with a discard; the bound also ends that.
    for _ in 0..MAX_EXTENTS / 2 {
        let found = kernel::seek_data(file, at)?.map_or(end, |data| data.min(end));
        let data = found / block * block;
        if data > at {
            extents.push(Extent { len: data - at, hole: true, zero: true });
        }
        if data == end {
            break;
        }
        let hole = kernel::seek_hole(file, found)?.map_or(end, |hole| hole.next_multiple_of(block).min(end));
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

/// Extents in one reply: about 0.1 ms of seeking.
const MAX_EXTENTS: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn the_holes_of_a_sparse_file_are_reported_in_a_bounded_reply() {
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
