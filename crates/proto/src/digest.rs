//! Digests of iSCSI and NVMe/TCP: CRC-32C, least significant byte first (RFC 7143 §13.1, with the
//! examples in RFC 3720 appendix B.4; TCP Transport 1.0 §3.3.1.1).
//!
//! # Passes over the payload
//! Not counting the kernel's copies into and out of the socket:
//!
//! | payload | without digests | with digests |
//! |---|---|---|
//! | target: read data in shared memory (a RAM volume) | none | copied into the pool's memory and summed there, block by block |
//! | target: read data in the pool's memory | none | summed |
//! | target: write data | copied into a RAM volume | summed in the receive buffer, then copied |
//! | initiator: read data | copied if other PDUs came with it | summed in the receive buffer, then as without digests |
//! | initiator: write data | none | summed; shared memory is copied first |
//!
//! Shared memory is copied because another request may change it after the digest is computed, and
//! the peer would close the connection for a wrong digest. Private memory does not change: nobody
//! else writes a write's data until it completes, or a borrowed buffer until it is dropped.

use crate::driver::outbox::Outbox;
use blockmux_volume::{Crc32c, Pool, SgList};

/// The digest of `bytes` in wire order.
#[inline]
pub(crate) fn of(bytes: &[u8]) -> [u8; DIGEST_LEN] {
    Crc32c::of(bytes).to_le_bytes()
}

/// Queues payload and returns its digest: private memory by reference, shared memory as a copy in
/// memory of the pool, or in the outbox if the pool is empty.
pub(crate) fn push(outbox: &mut Outbox, pool: &Pool, data: &SgList) -> Crc32c {
    let mut crc = Crc32c::default();
    for seg in data.segs() {
        if seg.is_private() {
            crc.add_seg(seg);
            outbox.push_seg(seg.clone());
        } else if let Some(memory) = pool.take_payload(seg.len()) {
            let copy = memory.seg(0, seg.len());
            crc.add_copying(seg, &copy);
            outbox.push_seg(copy);
        } else {
            crc.add(outbox.push_copy(seg));
        }
    }
    crc
}

/// Length of a digest, in bytes.
const DIGEST_LEN: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::outbox::OutboxPiece;
    use blockmux_volume::{Memory, Pages, Seg};

    #[test]
    fn the_examples_of_rfc_3720_come_out() {
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(of(&[0; 32]), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(of(&[0xff; 32]), [0x43, 0xab, 0xa8, 0x62]);
        assert_eq!(of(&ascending), [0x4e, 0x79, 0xdd, 0x46]);
    }

    #[test]
    fn with_digests_shared_data_is_copied_and_private_data_is_not() {
        let bytes: Vec<u8> = (0..9000_u32).map(|i| (i % 251) as u8).collect();
        let pages = Pages::from_heap(5000);
        let (shared, private) = (Memory::from_pages(&pages).seg(0, 5000), Seg::from_slice(&bytes[5000..]));
        // The second pool is empty.
        for limit in [1 << 20, 0] {
            shared.copy_from(&bytes[..5000]);
            let mut data = SgList::one(shared.clone());
            data.push(private.clone());
            let mut outbox = Outbox::default();
            let crc = push(&mut outbox, &Pool::new(limit), &data);
            shared.fill_zero();
            let is_private = |piece: OutboxPiece<'_>| matches!(piece, OutboxPiece::Payload(seg) if seg.as_ptr() == private.as_ptr());
            assert_eq!(outbox.pieces().map(is_private).filter(|is| *is).count(), 1);
            let sent = outbox.take_bytes();
            assert_eq!((crc.to_le_bytes(), &sent), (of(&sent), &bytes));
        }
    }
}
