//! Encodes FPDUs: length, segment, padding and CRC, and markers if the peer wants them (RFC 5044
//! §4).
//!
//! Payload is sent by reference. With CRCs, shared memory is copied, because it may change before
//! it is sent and the CRC would no longer match: short pieces go into the outbox, long ones into
//! memory of the pool, which nobody else writes. Private memory is summed in place. With markers,
//! at most 508 bytes lie between two of them, so all payload is copied into the outbox.

use blockmux_proto::driver::outbox::Outbox;
use blockmux_volume::{Crc32c, Pool, Seg, SgList};
use blockmux_wire::iwarp::mpa::{
    CRC_LEN, LENGTH_LEN, MARKER_INTERVAL, MARKER_LEN, MULPDU_MIN, Marker, padding,
};
use zerocopy::{IntoBytes, U16};

/// Encoder of one direction: its negotiated options and its position in the stream.
pub(super) struct Framer {
    pub(super) has_crc: bool,
    pub(super) has_markers: bool,
    /// Maximum ULPDU size (MULPDU), in bytes.
    mulpdu: usize,
    /// Bytes of FPDUs since the last marker position.
    position: usize,
    /// CRC of the FPDU that is being written, so far.
    crc: Crc32c,
    /// Bytes of the current FPDU so far, from its length field on, markers included.
    written: usize,
    pool: Pool,
}

impl Framer {
    pub(super) fn new(has_crc: bool, has_markers: bool, mss: usize, pool: Pool) -> Framer {
        let mulpdu = mulpdu(mss, has_markers);
        Framer { has_crc, has_markers, mulpdu, position: 0, crc: Crc32c::default(), written: 0, pool }
    }

    /// Sets TCP's maximum segment size in bytes.
    #[cfg(test)]
    pub(super) fn set_mss(&mut self, mss: usize) {
        self.mulpdu = mulpdu(mss, self.has_markers);
    }

    /// Bytes of a message that fit behind a header of `header_len` bytes: whole words, so that only
    /// the last FPDU is padded.
    #[inline]
    pub(super) fn room(&self, header_len: usize) -> usize {
        let room = self.mulpdu.saturating_sub(header_len);
        room.saturating_sub(room % 4)
    }

    /// Whether encoding has to read the payload, for a CRC or for markers.
    #[inline]
    pub(super) fn reads_payload(&self) -> bool {
        self.has_crc || self.has_markers
    }

    /// Whether this piece of payload must be copied.
    #[inline]
    fn copies(&self, seg: &Seg) -> bool {
        self.has_markers || (self.has_crc && !seg.is_private())
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
        if payload.is_empty() && !self.reads_payload() {
            // The whole FPDU is one run of bytes.
            let zeroes = [0; TAIL];
            let tail = zeroes.get(..padding(len as u16).saturating_add(CRC_LEN)).unwrap_or_default();
            outbox.push_heads([&length, header, head, tail]);
            return;
        }
        if self.has_markers {
            self.begin(outbox, len, header);
            self.put(outbox, head);
        } else {
            let front = outbox.push_heads([&length, header, head]);
            if self.has_crc {
                self.crc = Crc32c::of(front);
            }
        }
        payload.segs().iter().for_each(|seg| self.put_seg(outbox, seg));
        self.finish(outbox, len);
    }

    /// Begins an FPDU for a ULPDU of `len` bytes, and writes its short header.
    #[inline]
    pub(super) fn begin(&mut self, outbox: &mut Outbox, len: usize, header: &[u8]) {
        // At most the MULPDU.
        let length = (len as u16).to_be_bytes();
        if self.reads_payload() {
            (self.crc, self.written) = (Crc32c::default(), 0);
            self.put(outbox, &length);
            self.put(outbox, header);
        } else {
            outbox.push_heads([&length, header]);
        }
    }

    /// Appends payload to the current FPDU.
    #[inline]
    pub(super) fn put(&mut self, outbox: &mut Outbox, mut bytes: &[u8]) {
        if !self.has_markers {
            if self.has_crc {
                self.crc.add(bytes);
            }
            return outbox.push_head(bytes);
        }
        while !bytes.is_empty() {
            self.mark(outbox);
            let here = MARKER_INTERVAL.saturating_sub(self.position).min(bytes.len());
            let (now, later) = bytes.split_at(here);
            self.write(outbox, now);
            bytes = later;
        }
    }

    /// Appends payload to the current FPDU, by reference if possible.
    #[inline]
    pub(super) fn put_seg(&mut self, outbox: &mut Outbox, seg: &Seg) {
        if !self.copies(seg) {
            if self.has_crc {
                self.crc.add_seg(seg);
            }
            return outbox.push_seg(seg.clone());
        }
        if !self.has_markers
            && seg.len() > BLOCK
            && let Some(memory) = self.pool.take_payload(seg.len())
        {
            let copy = memory.seg(0, seg.len());
            self.crc.add_copying(seg, &copy);
            return outbox.push_seg(copy);
        }
        // A block is still in the L1 cache when its CRC is computed after the copy.
        let mut at: usize = 0;
        while at < seg.len() {
            let block = seg.slice(at, seg.len().saturating_sub(at).min(BLOCK));
            if self.has_markers {
                let mut bytes = [0; BLOCK];
                if let Some(bytes) = bytes.get_mut(..block.len()) {
                    block.copy_to(bytes);
                    self.put(outbox, bytes);
                }
            } else {
                self.crc.add(outbox.push_copy(&block));
            }
            at = at.saturating_add(block.len());
        }
    }

    /// Ends the FPDU of a ULPDU of `len` bytes.
    #[inline]
    pub(super) fn finish(&mut self, outbox: &mut Outbox, len: usize) {
        let zeroes = [0; CRC_LEN + 4];
        let padding = padding(len as u16);
        if !self.reads_payload() {
            let tail = zeroes.get(..padding.saturating_add(CRC_LEN)).unwrap_or_default();
            return outbox.push_head(tail);
        }
        self.put(outbox, zeroes.get(..padding).unwrap_or_default());
        if self.has_markers {
            self.mark(outbox);
        }
        let crc = if self.has_crc { self.crc } else { Crc32c::default() };
        outbox.push_head(&crc.to_le_bytes());
        self.position = self.position.saturating_add(CRC_LEN);
    }

    /// Writes a marker if one is due. It belongs to the FPDU in progress, or to the one that begins
    /// right after it.
    fn mark(&mut self, outbox: &mut Outbox) {
        if self.position.is_multiple_of(MARKER_INTERVAL) {
            self.position = 0;
            // A multiple of 4, because FPDUs are, and no more than the length of an FPDU.
            let marker = Marker { reserved: [0; 2], fpdu_ptr: U16::new(self.written as u16) };
            let begins_behind = self.written == 0;
            self.write(outbox, marker.as_bytes());
            if begins_behind {
                self.written = 0;
            }
        }
    }

    fn write(&mut self, outbox: &mut Outbox, bytes: &[u8]) {
        if self.has_crc {
            self.crc.add(bytes);
        }
        outbox.push_head(bytes);
        self.position = self.position.saturating_add(bytes.len());
        self.written = self.written.saturating_add(bytes.len());
    }
}

/// The longest ULPDU whose FPDU fits one TCP segment (RFC 5044 §4.5).
fn mulpdu(mss: usize, has_markers: bool) -> usize {
    let markers = if has_markers { mss.div_ceil(MARKER_INTERVAL).saturating_mul(MARKER_LEN) } else { 0 };
    let framing = markers.saturating_add(LENGTH_LEN).saturating_add(CRC_LEN).saturating_add(mss % 4);
    mss.saturating_sub(framing).clamp(MULPDU_MIN, MULPDU_MAX)
}

/// Longest ULPDU that this side sends, in bytes: its FPDU ends on a multiple of four bytes, and
/// every marker in it can encode its distance to the beginning of the FPDU.
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
        assert_eq!(mulpdu(1460, false), 1454);
        assert_eq!(mulpdu(1460, true), 1442);
        assert_eq!(mulpdu(1463, false), 1454);
        assert_eq!((mulpdu(0, true), mulpdu(usize::MAX, false)), (MULPDU_MIN, MULPDU_MAX));
        assert_eq!((MULPDU_MAX + LENGTH_LEN) % 4, 0);
    }

    #[test]
    fn a_marker_holds_the_distance_to_the_beginning_of_its_fpdu() {
        let mut framer = Framer::new(false, true, 65536, pool());
        let mut outbox = Outbox::default();
        // 4 for a marker, then 2 + 502 + 4: the next FPDU begins at the second marker, and ends
        // before the third.
        for len in [502, 502, 1022] {
            framer.begin(&mut outbox, len, &[1; 14]);
            framer.put(&mut outbox, &vec![2; len - 14]);
            framer.finish(&mut outbox, len);
        }
        let bytes = outbox.take_bytes();
        assert_eq!(bytes.len(), 512 + 512 + 4 + 1028 + 8);
        assert_eq!(bytes[..6], [0, 0, 0, 0, 1, 246]);
        assert_eq!(bytes[512..518], [0, 0, 0, 0, 1, 246]);
        assert_eq!(bytes[1024..1030], [0, 0, 0, 0, 3, 254]);
        assert_eq!(bytes[1536..1540], [0, 0, 1, 252]);
        assert_eq!(bytes[2048..2052], [0, 0, 3, 252]);
    }

    #[test]
    fn the_crc_covers_all_bytes_before_it() {
        for has_markers in [false, true] {
            let mut framer = Framer::new(true, has_markers, 65536, pool());
            let mut outbox = Outbox::default();
            let payload: Vec<u8> = (0..9001).map(|at| at as u8).collect();
            let len = 14 + payload.len();
            framer.begin(&mut outbox, len, &[1; 14]);
            framer.put_seg(&mut outbox, &Seg::from_slice(&payload));
            framer.finish(&mut outbox, len);
            let bytes = outbox.take_bytes();
            let (covered, crc) = bytes.split_at(bytes.len() - 4);
            assert_eq!(Crc32c::of(covered).to_le_bytes(), crc);
            assert_eq!(bytes.len() % 4, 0);
        }
    }

    #[test]
    fn with_crcs_shared_memory_is_copied_and_private_memory_is_sent_by_reference() {
        let cases =
            [(false, false, [true, true]), (true, false, [false, true]), (true, true, [false, false])];
        // Short pieces, and long ones with and without memory of the pool.
        for ((has_crc, has_markers, refers), (len, limit)) in cases
            .into_iter()
            .flat_map(|case| [(900, 1 << 20), (9000, 1 << 20), (9000, 0)].map(|of| (case, of)))
        {
            let bytes = vec![3; len];
            let shared = Memory::from_pages(&Pages::from_heap(len)).seg(0, len);
            let private = Seg::from_slice(&bytes);
            for (seg, refers) in [&shared, &private].into_iter().zip(refers) {
                shared.copy_from(&bytes);
                let mut framer = Framer::new(has_crc, has_markers, 65536, Pool::new(limit));
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
