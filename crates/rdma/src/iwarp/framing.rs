//! Encodes FPDUs: length, segment, padding and CRC (RFC 5044 §4).
//!
//! Payload is sent by reference. With CRCs, shared memory is copied, because it may change before
//! it is sent and the CRC would no longer match: short pieces go into the outbox, long ones into
//! memory of the pool, which nobody else writes. Private memory is summed in place.

use blockmux_proto::driver::outbox::Outbox;
use blockmux_volume::{Crc32c, Pool, Seg, SgList};
use blockmux_wire::iwarp::mpa::{CRC_LEN, LENGTH_LEN, MULPDU_MIN, padding};

/// Encoder of one direction, with its negotiated options.
pub(super) struct Framer {
    /// Whether encoding has to read the payload, for a CRC.
    pub(super) has_crc: bool,
    /// Maximum ULPDU size (MULPDU), in bytes.
    mulpdu: usize,
    /// CRC of the FPDU that is being written, so far.
    crc: Crc32c,
    pool: Pool,
}

impl Framer {
    pub(super) fn new(has_crc: bool, mss: usize, pool: Pool) -> Framer {
        Framer { has_crc, mulpdu: mulpdu(mss), crc: Crc32c::default(), pool }
    }

    /// Sets TCP's maximum segment size in bytes.
    #[cfg(test)]
    pub(super) fn set_mss(&mut self, mss: usize) {
        self.mulpdu = mulpdu(mss);
    }

    /// Bytes of a message that fit behind a header of `header_len` bytes: whole words, so that only
    /// the last FPDU is padded.
    #[inline]
    pub(super) fn room(&self, header_len: usize) -> usize {
        let room = self.mulpdu.saturating_sub(header_len);
        room.saturating_sub(room % 4)
    }

    /// Whether this piece of payload must be copied.
    #[inline]
    fn copies(&self, seg: &Seg) -> bool {
        self.has_crc && !seg.is_private()
    }

    /// Whether some of this payload is sent by reference.
    #[inline]
    pub(super) fn refers_to(&self, payload: &SgList) -> bool {
        payload.segs().iter().any(|seg| !seg.is_empty() && !self.copies(seg))
    }

    /// Encodes a whole FPDU: a header, a short head and payload.
    #[inline]
    pub(super) fn put_whole<const N: usize>(
        &mut self,
        outbox: &mut Outbox,
        header: &[u8; N],
        head: &[u8],
        payload: &SgList,
    ) {
        let len = N.saturating_add(head.len()).saturating_add(payload.len());
        // At most the MULPDU.
        let length = (len as u16).to_be_bytes();
        if payload.is_empty() && !self.has_crc {
            // The whole FPDU is one run of bytes.
            let zeroes = [0; TAIL];
            let tail = zeroes.get(..padding(len as u16).saturating_add(CRC_LEN)).unwrap_or_default();
            outbox.push_heads([&length, header, head, tail]);
            return;
        }
        let front = outbox.push_heads([&length, header, head]);
        if self.has_crc {
            self.crc = Crc32c::of(front);
        }
        payload.segs().iter().for_each(|seg| self.put_seg(outbox, seg.clone()));
        self.finish(outbox, len);
    }

    /// Encodes a whole FPDU: a header and `len` bytes of payload that nobody else needs.
    #[inline]
    pub(super) fn put_payload(&mut self, outbox: &mut Outbox, header: &[u8], payload: SgList, len: usize) {
        let len = header.len().saturating_add(len);
        self.begin(outbox, len, header);
        match payload.into_one() {
            Ok(seg) => self.put_seg(outbox, seg),
            Err(payload) => payload.segs().iter().for_each(|seg| self.put_seg(outbox, seg.clone())),
        }
        self.finish(outbox, len);
    }

    /// Begins an FPDU for a ULPDU of `len` bytes, and writes its short header.
    #[inline]
    pub(super) fn begin(&mut self, outbox: &mut Outbox, len: usize, header: &[u8]) {
        // At most the MULPDU.
        let length = (len as u16).to_be_bytes();
        let front = outbox.push_heads([&length, header]);
        if self.has_crc {
            self.crc = Crc32c::of(front);
        }
    }

    /// Appends payload to the current FPDU.
    #[inline]
    pub(super) fn put(&mut self, outbox: &mut Outbox, bytes: &[u8]) {
        if self.has_crc {
            self.crc.add(bytes);
        }
        outbox.push_head(bytes);
    }

    /// Appends payload to the current FPDU, by reference if possible.
    #[inline]
    pub(super) fn put_seg(&mut self, outbox: &mut Outbox, seg: Seg) {
        if !self.copies(&seg) {
            if self.has_crc {
                self.crc.add_seg(&seg);
            }
            return outbox.push_seg(seg);
        }
        if seg.len() > BLOCK
            && let Some(memory) = self.pool.take_payload(seg.len())
        {
            let copy = memory.seg(0, seg.len());
            self.crc.add_copying(&seg, &copy);
            return outbox.push_seg(copy);
        }
        // A block is still in the L1 cache when its CRC is computed after the copy.
        let mut at: usize = 0;
        while at < seg.len() {
            let block = seg.slice(at, seg.len().saturating_sub(at).min(BLOCK));
            self.crc.add(outbox.push_copy(&block));
            at = at.saturating_add(block.len());
        }
    }

    /// Ends the FPDU of a ULPDU of `len` bytes.
    #[inline]
    pub(super) fn finish(&mut self, outbox: &mut Outbox, len: usize) {
        let zeroes = [0; TAIL];
        let padding = padding(len as u16);
        if !self.has_crc {
            let tail = zeroes.get(..padding.saturating_add(CRC_LEN)).unwrap_or_default();
            return outbox.push_head(tail);
        }
        self.put(outbox, zeroes.get(..padding).unwrap_or_default());
        outbox.push_head(&self.crc.to_le_bytes());
    }
}

/// The longest ULPDU whose FPDU fits one TCP segment (RFC 5044 §4.5).
fn mulpdu(mss: usize) -> usize {
    let framing = LENGTH_LEN.saturating_add(CRC_LEN).saturating_add(mss % 4);
    mss.saturating_sub(framing).clamp(MULPDU_MIN, MULPDU_MAX)
}

/// Longest ULPDU that this side sends, in bytes: its FPDU ends on a multiple of four bytes.
const MULPDU_MAX: usize = 64902;

/// Size of a copied block, in bytes: small enough for the stack and the L1 cache.
const BLOCK: usize = 8192;

/// Longest padding and CRC, in bytes.
const TAIL: usize = 3 + CRC_LEN;

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;
    use blockmux_proto::driver::outbox::OutboxPiece;
    use blockmux_volume::{Memory, Pages};

    fn pool() -> Pool {
        Pool::new(1 << 20)
    }

    #[test]
    fn an_fpdu_is_no_longer_than_a_segment() {
        assert_eq!((mulpdu(1460), mulpdu(1463)), (1454, 1454));
        assert_eq!((mulpdu(0), mulpdu(usize::MAX)), (MULPDU_MIN, MULPDU_MAX));
        assert_eq!((MULPDU_MAX + LENGTH_LEN) % 4, 0);
    }

    #[test]
    fn the_crc_covers_all_bytes_before_it() {
        let mut framer = Framer::new(true, 65536, pool());
        let mut outbox = Outbox::default();
        let payload: Vec<u8> = (0..9001).map(|at| at as u8).collect();
        let len = 14 + payload.len();
        framer.begin(&mut outbox, len, &[1; 14]);
        framer.put_seg(&mut outbox, Seg::from_slice(&payload));
        framer.finish(&mut outbox, len);
        let bytes = outbox.take_bytes();
        let (covered, crc) = bytes.split_at(bytes.len() - 4);
        assert_eq!(Crc32c::of(covered).to_le_bytes(), crc);
        assert_eq!(bytes.len() % 4, 0);
    }

    #[test]
    fn with_crcs_shared_memory_is_copied_and_private_memory_is_sent_by_reference() {
        let cases = [(false, [true, true]), (true, [false, true])];
        // Short pieces, and long ones with and without memory of the pool.
        for ((has_crc, refers), (len, limit)) in cases
            .into_iter()
            .flat_map(|case| [(900, 1 << 20), (9000, 1 << 20), (9000, 0)].map(|of| (case, of)))
        {
            let bytes = vec![3; len];
            let shared = Memory::from_pages(&Pages::from_heap(len)).seg(0, len);
            let private = Seg::from_slice(&bytes);
            for (seg, refers) in [&shared, &private].into_iter().zip(refers) {
                shared.copy_from(&bytes);
                let mut framer = Framer::new(has_crc, 65536, Pool::new(limit));
                let (mut outbox, payload) = (Outbox::default(), SgList::one(seg.clone()));
                framer.put_whole(&mut outbox, &[1; 14], &[2; 6], &payload);
                assert_eq!(framer.refers_to(&payload), refers);
                let is_it = |piece: OutboxPiece<'_>| matches!(piece, OutboxPiece::Payload(sent) if sent.as_ptr() == seg.as_ptr());
                assert_eq!(outbox.pieces().any(is_it), refers);
                if has_crc {
                    shared.fill_zero();
                    let bytes = outbox.take_bytes();
                    let (covered, crc) = bytes.split_at(bytes.len() - 4);
                    assert_eq!(Crc32c::of(covered).to_le_bytes(), crc);
                }
            }
        }
    }
}
