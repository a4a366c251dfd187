//! Memory between the file and a request's data, where the file cannot use that.

use blockmux_volume::{Pages, Seg, SgList};
use std::sync::Arc;

/// Pairs the pieces of `data`, from byte `skip` on, with the parts of `piece` that belong to them.
pub(super) fn for_each_piece(data: &SgList, mut skip: usize, piece: &Seg, mut pair: impl FnMut(&Seg, &Seg)) {
    let mut at = 0;
    for seg in data.segs() {
        let here = seg.len().saturating_sub(skip).min(piece.len() - at);
        if here > 0 {
            pair(&seg.slice(skip, here), &piece.slice(at, here));
            at += here;
        }
        skip = skip.saturating_sub(seg.len());
    }
}

/// A piece of zeroes for file systems that have no faster way; all channels of a volume share it.
pub(super) fn zero_pages() -> Arc<Pages> {
    Pages::from_heap(MAX_BOUNCE)
}

/// A larger request bounces piece by piece, so that it cannot want more than the pool has.
pub(super) const MAX_BOUNCE: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bounce_meets_the_pieces_that_belong_to_it() {
        let mut data = SgList::one(Seg::from_slice(b"abc"));
        data.push(Seg::from_slice(b"defg"));
        let piece = Seg::from_slice(&[0; 4]);
        for_each_piece(&data, 2, &piece, |data, bounce| data.copy_to_seg(bounce));
        assert_eq!(piece.to_vec(), b"cdef");
    }
}
