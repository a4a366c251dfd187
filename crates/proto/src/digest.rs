//! Digests of iSCSI and NVMe/TCP: CRC-32C, sent with its least byte first (RFC 7143 §13.1, and the examples of its
//! predecessor's appendix B.4; TCP Transport 1.0 §3.5).

use blockmux_volume::{Seg, SgList};

/// A digest in the making.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Crc(u32);

impl Crc {
    /// Adds bytes.
    #[inline]
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0 = crc32c::crc32c_append(self.0, bytes);
    }

    /// Adds memory that nobody writes any more. It goes by way of a small copy, as such memory must.
    pub(crate) fn add_list(&mut self, data: &SgList) {
        let mut block = [0; BLOCK];
        for seg in data.segs() {
            each_block(seg, &mut block, |bytes, _| self.add(bytes));
        }
    }

    /// Copies memory that may change meanwhile, and adds what was copied.
    pub(crate) fn add_copying(&mut self, from: &SgList, to: &Seg) {
        let mut block = [0; BLOCK];
        let mut done: usize = 0;
        for seg in from.segs() {
            each_block(seg, &mut block, |bytes, at| {
                self.add(bytes);
                to.slice(done.saturating_add(at), bytes.len()).copy_from(bytes);
            });
            done = done.saturating_add(seg.len());
        }
    }

    /// As it goes on the wire.
    #[inline]
    pub(crate) fn bytes(self) -> [u8; DIGEST_LEN] {
        self.0.to_le_bytes()
    }
}

/// The digest of these bytes, as it goes on the wire.
#[inline]
pub(crate) fn of(bytes: &[u8]) -> [u8; DIGEST_LEN] {
    crc32c::crc32c(bytes).to_le_bytes()
}

/// Copies a piece block by block.
fn each_block(seg: &Seg, block: &mut [u8; BLOCK], mut take: impl FnMut(&[u8], usize)) {
    let mut at: usize = 0;
    while at < seg.len() {
        let len = seg.len().saturating_sub(at).min(BLOCK);
        if let Some(bytes) = block.get_mut(..len) {
            seg.slice(at, len).copy_to(bytes);
            take(bytes, at);
        }
        at = at.saturating_add(len);
    }
}

/// Of a digest, in bytes.
const DIGEST_LEN: usize = 4;

/// Small enough for the stack and the nearest cache, in bytes.
const BLOCK: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_of_rfc_3720_come_out() {
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(of(&[0; 32]), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(of(&[0xff; 32]), [0x43, 0xab, 0xa8, 0x62]);
        assert_eq!(of(&ascending), [0x4e, 0x79, 0xdd, 0x46]);
    }

    #[test]
    fn memory_has_the_digest_of_its_bytes() {
        let bytes: Vec<u8> = (0..9000_u32).map(|i| (i % 251) as u8).collect();
        let mut list = SgList::one(Seg::from_slice(&bytes[..5000]));
        list.push(Seg::from_slice(&bytes[5000..]));
        let mut crc = Crc::default();
        crc.add_list(&list);
        assert_eq!(crc.bytes(), of(&bytes));
        let copy = Seg::from_slice(&[0; 9000]);
        let mut crc = Crc::default();
        crc.add_copying(&list, &copy);
        assert_eq!((crc.bytes(), copy.to_vec()), (of(&bytes), bytes));
    }
}
