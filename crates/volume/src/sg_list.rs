//! Scatter-gather lists of I/O memory.

use crate::buf::Seg;
use smallvec::SmallVec;

/// A scatter-gather list: what an iovec, an SGE list or an NVMe SGL is made from.
#[derive(Clone, Debug, Default)]
pub struct SgList(SmallVec<[Seg; 1]>);

impl SgList {
    /// A list of one segment.
    #[inline]
    #[must_use]
    pub fn one(seg: Seg) -> SgList {
        SgList(SmallVec::from_buf([seg]))
    }

    /// Appends a segment.
    pub fn push(&mut self, seg: Seg) {
        self.0.push(seg);
    }

    /// The only segment, or the list if it has several or none.
    ///
    /// # Errors
    /// The list, unless it has one segment.
    #[inline]
    pub fn into_one(self) -> Result<Seg, SgList> {
        self.0.into_inner().map(|[seg]| seg).map_err(SgList)
    }

    /// The segments in order.
    #[inline]
    #[must_use]
    pub fn segs(&self) -> &[Seg] {
        &self.0
    }

    /// Total length in bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        // The common case.
        if let [seg] = self.segs() { seg.len() } else { self.0.iter().map(Seg::len).sum() }
    }

    /// Whether the length is 0.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether this process may change all bytes ([`Seg::is_writable`]).
    #[inline]
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.segs().iter().all(Seg::is_writable)
    }

    /// The part of `len` bytes at `offset`.
    ///
    /// # Panics
    /// If it is out of bounds.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> SgList {
        let (mut skip, mut left, mut part) = (offset, len, SgList::default());
        for seg in &self.0 {
            let part_len = seg.len().saturating_sub(skip).min(left);
            if part_len > 0 {
                part.push(seg.slice(skip, part_len));
            }
            skip = skip.saturating_sub(seg.len());
            left -= part_len;
        }
        assert!(left == 0, "slice of {len} bytes at {offset} from {} bytes", self.len());
        part
    }

    /// Copies `source` to the start of the list.
    ///
    /// # Panics
    /// If `source` is longer.
    pub fn copy_from(&self, mut source: &[u8]) {
        for seg in &self.0 {
            let part;
            (part, source) = source.split_at(seg.len().min(source.len()));
            seg.copy_from(part);
        }
        assert!(source.is_empty());
    }

    /// Fills `target` from the start of the list.
    ///
    /// # Panics
    /// If `target` is longer.
    pub fn copy_to(&self, mut target: &mut [u8]) {
        for seg in &self.0 {
            let part;
            (part, target) = target.split_at_mut(seg.len().min(target.len()));
            seg.copy_to(part);
        }
        assert!(target.is_empty());
    }

    /// Copies all bytes to the start of `target`.
    ///
    /// # Panics
    /// If `target` is shorter.
    #[inline]
    pub fn copy_to_list(&self, target: &SgList) {
        self.each_to(target, Seg::copy_to_seg);
    }

    /// Copies to `target` with streaming stores, as [`Seg::stream_to_seg`].
    ///
    /// # Panics
    /// If `target` is shorter.
    #[inline]
    pub(crate) fn stream_to_list(&self, target: &SgList) {
        self.each_to(target, Seg::stream_to_seg);
    }

    /// Calls `copy` for each pair of segments of both lists, split at the boundaries of either.
    #[inline]
    fn each_to(&self, target: &SgList, copy: impl Fn(&Seg, &Seg)) {
        if let ([from], [to]) = (self.segs(), target.segs()) {
            return copy(from, to);
        }
        let mut at = 0;
        for from in &self.0 {
            let mut done = 0;
            for to in target.slice(at, from.len()).segs() {
                copy(&from.slice(done, to.len()), to);
                done += to.len();
            }
            at += from.len();
        }
    }

    /// Fills all segments with zeroes.
    pub fn fill_zero(&self) {
        self.0.iter().for_each(Seg::fill_zero);
    }

    /// A copy of the bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(&mut bytes);
        bytes
    }
}

impl From<Seg> for SgList {
    fn from(seg: Seg) -> SgList {
        SgList::one(seg)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buf::Memory;

    #[test]
    fn a_slice_of_a_list_may_span_segments() {
        let mut list = SgList::one(Seg::from_slice(b"abc"));
        list.push(Seg::from_slice(b"defg"));
        assert_eq!(list.slice(1, 4).to_vec(), b"bcde");
        assert_eq!(list.slice(3, 4).to_vec(), b"defg");
        assert_eq!(list.slice(7, 0).len(), 0);
    }

    #[test]
    fn lists_with_different_segments_copy_to_each_other() {
        let mut from = SgList::one(Seg::from_slice(b"abc"));
        from.push(Seg::from_slice(b"defg"));
        let memory = Memory::from_heap(7);
        let mut to = SgList::one(memory.seg(0, 5));
        to.push(memory.seg(5, 2));
        from.copy_to_list(&to);
        assert_eq!(to.to_vec(), b"abcdefg");
    }
}
