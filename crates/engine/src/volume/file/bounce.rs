//! Bounce buffers for data that direct I/O cannot transfer.

use blockmux_volume::{Pages, Seg, SgList};
use std::sync::Arc;

/// Pairs the segments of `data` from byte `skip` on with the matching parts of `piece`.
pub(super) fn for_each_piece(data: &SgList, mut skip: usize, piece: &Seg, mut pair: impl FnMut(&Seg, &Seg)) {
    let mut at = 0;
    for seg in data.segs() {
        let part_len = seg.len().saturating_sub(skip).min(piece.len() - at);
        if part_len > 0 {
            pair(&seg.slice(skip, part_len), &piece.slice(at, part_len));
            at += part_len;
        }
        skip = skip.saturating_sub(seg.len());
    }
}

/// Zeroes to write on file systems without a faster method; all channels of a volume share them.
pub(super) fn zero_pages() -> Arc<Pages> {
    Pages::from_heap(MAX_BOUNCE)
}

/// A larger request is bounced in pieces of this many bytes, so that it cannot exhaust the pool.
pub(super) const MAX_BOUNCE: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bounce_buffer_is_paired_with_the_segments_that_it_covers() {
        let mut data = SgList::one(Seg::from_slice(b"abc"));
        data.push(Seg::from_slice(b"defg"));
        let piece = Seg::from_slice(&[0; 4]);
        for_each_piece(&data, 2, &piece, |data, bounce| data.copy_to_seg(bounce));
        assert_eq!(piece.to_vec(), b"cdef");
    }
}
