//! CRC-32C (Castagnoli): digests of iSCSI and NVMe/TCP, frames of iWARP, and blocks of the bench.
//!
//! The `crc-fast` crate detects and uses the CPU's instructions.
//!
//! Private memory is summed in place. Shared memory may be changed by another core at any time, so
//! it is copied first, block by block: each block is then in the L1 cache when it is summed.

use crate::buf::Seg;
use crate::sg_list::SgList;
use crc_fast::{CrcAlgorithm, Digest};

/// A checksum in progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crc32c(u32);

impl Crc32c {
    /// The checksum of these bytes.
    #[inline]
    #[must_use]
    pub fn of(bytes: &[u8]) -> Crc32c {
        Crc32c(crc_fast::crc32_iscsi(bytes))
    }

    /// Adds bytes.
    #[inline]
    pub fn add(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        // The crate's state is the complement of the checksum.
        let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!self.0));
        digest.update(bytes);
        // The upper 32 bits are 0.
        self.0 = digest.finalize() as u32;
    }

    /// Adds the bytes of a segment. If they change concurrently, the checksum covers a mix of old
    /// and new bytes.
    #[inline]
    pub fn add_seg(&mut self, seg: &Seg) {
        if seg.add_private(self) {
            return;
        }
        let mut block = [0; BLOCK];
        for (at, len) in blocks(seg.len()) {
            let bytes = &mut block[..len];
            seg.slice(at, len).copy_to(bytes);
            self.add(bytes);
        }
    }

    /// Adds the bytes of all segments.
    pub fn add_list(&mut self, data: &SgList) {
        data.segs().iter().for_each(|seg| self.add_seg(seg));
    }

    /// Copies a segment to the start of `to`, and adds what was copied.
    ///
    /// # Panics
    /// If `to` is shorter, or is borrowed from a [`Chunk`](crate::Chunk).
    pub fn add_copying(&mut self, from: &Seg, to: &Seg) {
        for (at, len) in blocks(from.len()) {
            let copy = to.slice(at, len);
            from.slice(at, len).copy_to_seg(&copy);
            self.add_seg(&copy);
        }
    }

    /// The checksum.
    #[inline]
    #[must_use]
    pub fn value(self) -> u32 {
        self.0
    }

    /// The checksum in wire order: least significant byte first.
    #[inline]
    #[must_use]
    pub fn to_le_bytes(self) -> [u8; 4] {
        self.0.to_le_bytes()
    }
}

/// Offset and length of each block.
fn blocks(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(BLOCK).map(move |at| (at, BLOCK.min(len - at)))
}

/// Length of a block in bytes; two of them fit in the L1 cache, and one on the stack.
const BLOCK: usize = 8192;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buf::{Memory, Pages};

    /// The definition: one bit at a time (RFC 3720 appendix B.4 has the polynomial and examples).
    fn bitwise(bytes: &[u8]) -> u32 {
        let step = |crc: u32, _| (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at * 7 + at / 251) as u8).collect()
    }

    #[test]
    fn checksums_of_every_length_match_the_definition() {
        let bytes = bytes(20_000);
        for len in (0..1100).chain([4095, 4096, 4097, 8192, 20_000]) {
            assert_eq!(Crc32c::of(&bytes[..len]).value(), bitwise(&bytes[..len]), "{len}");
        }
    }

    #[test]
    fn a_checksum_is_the_same_for_any_split() {
        let bytes = bytes(2000);
        let whole = Crc32c::of(&bytes);
        for cut in (0..300).chain([511, 512, 1024, 1999, 2000]) {
            let mut crc = Crc32c::of(&bytes[..cut]);
            crc.add(&bytes[cut..]);
            assert_eq!(crc, whole, "{cut}");
        }
        assert_eq!(whole.to_le_bytes(), bitwise(&bytes).to_le_bytes());
    }

    #[test]
    fn private_and_shared_memory_have_the_checksum_of_their_bytes() {
        let bytes = bytes(3 * BLOCK + 5);
        let pages = Pages::from_heap(bytes.len());
        let shared = Memory::from_pages(&pages).seg(0, bytes.len());
        shared.copy_from(&bytes);
        for seg in [shared, Seg::from_slice(&bytes)] {
            let mut crc = Crc32c::default();
            crc.add_list(&seg.slice(0, 100).into());
            crc.add_seg(&seg.slice(100, bytes.len() - 100));
            assert_eq!(crc, Crc32c::of(&bytes));
            let (copy, mut crc) = (Seg::from_slice(&vec![0; bytes.len()]), Crc32c::default());
            crc.add_copying(&seg, &copy);
            assert_eq!((crc, copy.to_vec()), (Crc32c::of(&bytes), bytes.clone()));
        }
    }
}
