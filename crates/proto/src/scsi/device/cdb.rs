//! Command descriptor blocks, and the fields that block commands share.

use blockmux_wire::scsi::cdb::{Cdb6, Cdb10, Cdb12, Cdb16, MAX_CDB_LEN};
use blockmux_wire::scsi::opcode::ScsiOpcode;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// A command descriptor block of up to 32 bytes, stored inline. Bytes beyond its length read as 0.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Cdb {
    bytes: [u8; MAX_CDB_LEN],
    len: u8,
}

impl Cdb {
    /// Copies a CDB; `None` if it is empty or longer than 32 bytes. A transport with a CDB field of
    /// fixed length passes the whole field.
    #[inline]
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Cdb> {
        let mut cdb = Cdb { bytes: [0; MAX_CDB_LEN], len: u8::try_from(bytes.len()).ok()? };
        cdb.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        (!bytes.is_empty()).then_some(cdb)
    }

    /// OPERATION CODE.
    #[inline]
    #[must_use]
    pub fn opcode(&self) -> ScsiOpcode {
        ScsiOpcode(self.byte(0))
    }

    /// Length of the CDB as sent, in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len.into()
    }

    /// The byte at `index`; 0 beyond the length.
    #[inline]
    pub(super) fn byte(&self, index: usize) -> u8 {
        self.bytes.get(index).copied().unwrap_or(0)
    }

    /// The big-endian number at `index`.
    pub(super) fn u16(&self, index: usize) -> u16 {
        u16::from_be_bytes([self.byte(index), self.byte(index.saturating_add(1))])
    }

    /// The big-endian number at `index`.
    pub(super) fn u32(&self, index: usize) -> u32 {
        (u32::from(self.u16(index)) << 16) | u32::from(self.u16(index.saturating_add(2)))
    }

    /// The big-endian number at `index`.
    pub(super) fn u64(&self, index: usize) -> u64 {
        (u64::from(self.u32(index)) << 32) | u64::from(self.u32(index.saturating_add(4)))
    }

    /// The CDB as a wire structure.
    #[inline]
    pub(super) fn read<T: FromBytes + KnownLayout + Immutable + Unaligned>(&self) -> Option<&T> {
        T::ref_from_prefix(&self.bytes).ok().map(|(cdb, _)| cdb)
    }

    /// The block range of a READ, WRITE or similar CDB; the group code determines its layout.
    #[inline]
    pub(super) fn range(&self) -> Option<CdbRange> {
        Some(match self.byte(0) >> 5 {
            0 => {
                let cdb: &Cdb6 = self.read()?;
                let [high, middle, low] = cdb.logical_block_address;
                CdbRange {
                    lba: u32::from_be_bytes([0, high & 0x1f, middle, low]).into(),
                    // SBC-4, the READ (6) command: 0 means 256, only in 6-byte CDBs.
                    blocks: if cdb.transfer_length == 0 { 256 } else { cdb.transfer_length.into() },
                }
            }
            1 | 2 => {
                let cdb: &Cdb10 = self.read()?;
                CdbRange {
                    lba: cdb.logical_block_address.get().into(),
                    blocks: cdb.transfer_length.get().into(),
                }
            }
            5 => {
                let cdb: &Cdb12 = self.read()?;
                CdbRange { lba: cdb.logical_block_address.get().into(), blocks: cdb.transfer_length.get() }
            }
            4 => {
                let cdb: &Cdb16 = self.read()?;
                CdbRange { lba: cdb.logical_block_address.get(), blocks: cdb.transfer_length.get() }
            }
            _ => return None,
        })
    }
}

impl std::fmt::Debug for Cdb {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.opcode())?;
        f.debug_list().entries(self.bytes.get(..self.len()).unwrap_or_default()).finish()
    }
}

/// The block range of a CDB, not yet checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CdbRange {
    pub(super) lba: u64,
    pub(super) blocks: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_read_from_each_shape() {
        let range = |bytes: &[u8]| Cdb::new(bytes).unwrap().range().unwrap();
        assert_eq!(range(&[0x08, 0xff, 2, 3, 0, 0]), CdbRange { lba: 0x1f_0203, blocks: 256 });
        assert_eq!(range(&[0x28, 8, 1, 2, 3, 4, 0, 5, 6, 0]), CdbRange { lba: 0x0102_0304, blocks: 0x0506 });
        assert_eq!(
            range(&[0xa8, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0]),
            CdbRange { lba: 0x0102_0304, blocks: 0x0506_0708 }
        );
        assert_eq!(
            range(&[0x88, 0x10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0]),
            CdbRange { lba: 0x0102_0304_0506_0708, blocks: 0x090a_0b0c }
        );
    }

    #[test]
    fn a_cdb_of_no_bytes_or_too_many_is_none() {
        assert!(Cdb::new(&[]).is_none());
        assert!(Cdb::new(&[0; 33]).is_none());
        assert!(Cdb::new(&[0; 260]).is_none());
        assert_eq!(Cdb::new(&[0x12]).unwrap().u32(0), 0x1200_0000);
    }
}
