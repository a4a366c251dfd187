//! ATA commands that AoE carries (ATA8-ACS): register values and the data of IDENTIFY DEVICE. Words
//! are little-endian; in text fields the two bytes of each word are exchanged.

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, LittleEndian as LE, U16, U64, Unaligned};

open_enum! {
    /// The command register.
    pub enum AtaCommand(u8) {
        /// DATA SET MANAGEMENT: trim.
        DATA_SET_MANAGEMENT = 0x06,
        /// READ SECTORS, 28 bits.
        READ_SECTORS = 0x20,
        /// READ SECTORS EXT, 48 bits.
        READ_SECTORS_EXT = 0x24,
        /// WRITE SECTORS, 28 bits.
        WRITE_SECTORS = 0x30,
        /// WRITE SECTORS EXT, 48 bits.
        WRITE_SECTORS_EXT = 0x34,
        /// READ VERIFY SECTORS, 28 bits.
        READ_VERIFY_SECTORS = 0x40,
        /// READ VERIFY SECTORS EXT, 48 bits.
        READ_VERIFY_SECTORS_EXT = 0x42,
        /// SMART.
        SMART = 0xb0,
        /// CHECK POWER MODE.
        CHECK_POWER_MODE = 0xe5,
        /// FLUSH CACHE.
        FLUSH_CACHE = 0xe7,
        /// FLUSH CACHE EXT.
        FLUSH_CACHE_EXT = 0xea,
        /// IDENTIFY DEVICE.
        IDENTIFY_DEVICE = 0xec,
        /// SET FEATURES.
        SET_FEATURES = 0xef,
    }
}

/// Status register: error; the error register has the cause.
pub const ATA_STATUS_ERR: u8 = 1 << 0;
/// Status register: the device failed.
pub const ATA_STATUS_DF: u8 = 1 << 5;
/// Status register: the device is ready.
pub const ATA_STATUS_DRDY: u8 = 1 << 6;
/// Error register: the command was refused.
pub const ATA_ERROR_ABRT: u8 = 1 << 2;
/// Error register: the address does not exist.
pub const ATA_ERROR_IDNF: u8 = 1 << 4;
/// Error register: uncorrectable data; for a write, the medium is protected.
pub const ATA_ERROR_UNC: u8 = 1 << 6;

/// Size of an addressed sector, in bytes.
pub const ATA_SECTOR: usize = 512;
/// Feature register of DATA SET MANAGEMENT: trim.
pub const DSM_TRIM: u8 = 1 << 0;
/// Result of CHECK POWER MODE in the sector count register: active or idle.
pub const POWER_ACTIVE: u8 = 0xff;

/// One range of a trim: the first block in the low 48 bits, the number of blocks in the high 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TrimRange(pub U64<LE>);
const _: () = assert!(size_of::<TrimRange>() == 8);

impl TrimRange {
    /// A range of `count` sectors (16 bits) from `block` on (48 bits).
    #[must_use]
    pub const fn new(block: u64, count: u16) -> TrimRange {
        TrimRange(U64::new((count as u64) << 48 | block & LBA48_MASK))
    }

    /// The first block.
    #[must_use]
    pub const fn block(self) -> u64 {
        self.0.get() & LBA48_MASK
    }

    /// Number of blocks; 0 for an unused range.
    #[must_use]
    pub const fn count(self) -> u64 {
        self.0.get() >> 48
    }
}

layout! {
    /// The data of IDENTIFY DEVICE: 256 words.
    pub struct Identify(ATA_SECTOR) {
        /// Word 0; bit 6 was "fixed".
        pub general: U16<LE>,
        /// Word 1: cylinders.
        pub cylinders: U16<LE>,
        /// Word 2.
        pub specific: U16<LE>,
        /// Word 3: heads.
        pub heads: U16<LE>,
        /// Words 4 and 5.
        pub retired_4: [U16<LE>; 2],
        /// Word 6: sectors of a track.
        pub sectors_per_track: U16<LE>,
        /// Words 7 to 9.
        pub retired_7: [U16<LE>; 3],
        /// Words 10 to 19, a text.
        pub serial: [u8; 20],
        /// Words 20 to 22.
        pub retired_20: [U16<LE>; 3],
        /// Words 23 to 26, a text.
        pub firmware: [u8; 8],
        /// Words 27 to 46, a text.
        pub model: [u8; 40],
        /// Word 47.
        pub multiple: U16<LE>,
        /// Word 48.
        pub trusted: U16<LE>,
        /// Words 49 and 50: [`IDENTIFY_CAN_LBA`] in the first.
        pub capabilities: [U16<LE>; 2],
        /// Words 51 and 52.
        pub retired_51: [U16<LE>; 2],
        /// Word 53: which of the following words are valid.
        pub valid: U16<LE>,
        /// Words 54 to 56: current cylinders, heads and sectors of a track.
        pub current_geometry: [U16<LE>; 3],
        /// Words 57 and 58: sectors in the current geometry, low word first.
        pub current_sectors: [U16<LE>; 2],
        /// Word 59.
        pub multiple_now: U16<LE>,
        /// Words 60 and 61: sectors that 28 bits can address, low word first.
        pub sectors_28: [U16<LE>; 2],
        /// Words 62 to 79.
        pub modes: [U16<LE>; 18],
        /// Word 80: a bit for each major version of the standard.
        pub major_version: U16<LE>,
        /// Word 81.
        pub minor_version: U16<LE>,
        /// Words 82 to 84: supported features, `IDENTIFY_*`.
        pub supported: [U16<LE>; 3],
        /// Words 85 to 87: enabled features, the same bits.
        pub enabled: [U16<LE>; 3],
        /// Words 88 to 99.
        pub reserved_88: [U16<LE>; 12],
        /// Words 100 to 103: number of sectors.
        pub sectors_48: U64<LE>,
        /// Word 104.
        pub stream: U16<LE>,
        /// Word 105: the most sectors of trim ranges in one command.
        pub trim_sectors: U16<LE>,
        /// Word 106: [`IDENTIFY_SECTOR_SIZE_VALID`], and in the low four bits log2 of the logical
        /// sectors in a physical sector.
        pub sector_size: U16<LE>,
        /// Words 107 to 168.
        pub reserved_107: [U16<LE>; 62],
        /// Word 169: bit 0 is set if trim is supported.
        pub trim: U16<LE>,
        /// Words 170 to 216.
        pub reserved_170: [U16<LE>; 47],
        /// Word 217: rotation rate in revolutions per minute; 1 for non-rotating media.
        pub rotation: U16<LE>,
        /// Words 218 to 254.
        pub reserved_218: [U16<LE>; 37],
        /// Word 255: [`IDENTIFY_SIGNATURE`] in the low byte, and in the high byte a checksum that
        /// makes the sum of all bytes 0.
        pub integrity: U16<LE>,
    }
}

impl Identify {
    /// The integrity word for which all bytes sum to 0.
    #[must_use]
    pub fn integrity_word(&self) -> u16 {
        let bytes = self.as_bytes();
        let rest = bytes.get(..ATA_SECTOR - 2).unwrap_or_default();
        let sum = rest.iter().fold(IDENTIFY_SIGNATURE, |sum, &byte| sum.wrapping_add(byte));
        u16::from_le_bytes([IDENTIFY_SIGNATURE, sum.wrapping_neg()])
    }
}

/// Encodes a text field: pads it with spaces and exchanges the bytes of each word.
#[must_use]
pub fn identify_text<const N: usize>(text: &str) -> [u8; N] {
    let mut words = [b' '; N];
    for (at, byte) in text.bytes().take(N).enumerate() {
        if let Some(place) = words.get_mut(at ^ 1) {
            *place = if byte.is_ascii_graphic() || byte == b' ' { byte } else { b'?' };
        }
    }
    words
}

/// Word 49: LBA is supported.
pub const IDENTIFY_CAN_LBA: u16 = 1 << 9;
/// Words 82 and 85: write cache.
pub const IDENTIFY_WRITE_CACHE: u16 = 1 << 5;
/// Words 83 and 86: 48 bit addresses.
pub const IDENTIFY_LBA48: u16 = 1 << 10;
/// Words 83 and 86: FLUSH CACHE.
pub const IDENTIFY_FLUSH_CACHE: u16 = 1 << 12;
/// Words 83 and 86: FLUSH CACHE EXT.
pub const IDENTIFY_FLUSH_CACHE_EXT: u16 = 1 << 13;
/// Words 83, 84 and 87: the word is valid.
pub const IDENTIFY_WORD_VALID: u16 = 1 << 14;
/// Word 106: the word is valid.
pub const IDENTIFY_SECTOR_SIZE_VALID: u16 = 1 << 14;
/// Word 106: a physical sector has several logical sectors.
pub const IDENTIFY_SEVERAL_PER_PHYSICAL: u16 = 1 << 13;
/// Word 255: signature in the low byte.
pub const IDENTIFY_SIGNATURE: u8 = 0xa5;

const LBA48_MASK: u64 = (1 << 48) - 1;

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    #[test]
    fn the_fields_of_identify_are_at_their_words() {
        assert_eq!(offset_of!(Identify, serial), 2 * 10);
        assert_eq!(offset_of!(Identify, model), 2 * 27);
        assert_eq!(offset_of!(Identify, capabilities), 2 * 49);
        assert_eq!(offset_of!(Identify, current_geometry), 2 * 54);
        assert_eq!(offset_of!(Identify, sectors_28), 2 * 60);
        assert_eq!(offset_of!(Identify, supported), 2 * 82);
        assert_eq!(offset_of!(Identify, sectors_48), 2 * 100);
        assert_eq!(offset_of!(Identify, sector_size), 2 * 106);
        assert_eq!(offset_of!(Identify, trim), 2 * 169);
        assert_eq!(offset_of!(Identify, rotation), 2 * 217);
    }

    #[test]
    fn a_text_has_the_bytes_of_each_word_exchanged() {
        assert_eq!(&identify_text::<8>("Linux"), b"iLun x  ");
        assert_eq!(&identify_text::<2>("\u{e9}"), b"??");
    }

    #[test]
    fn the_bytes_of_identify_sum_to_zero() {
        let mut identify = Identify::read_from_bytes(&[0; ATA_SECTOR]).unwrap();
        identify.model = identify_text("something");
        identify.integrity = identify.integrity_word().into();
        assert_eq!(identify.as_bytes().iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte)), 0);
        assert_eq!(identify.integrity.get() as u8, IDENTIFY_SIGNATURE);
    }

    #[test]
    fn a_trim_range_is_a_block_and_a_count() {
        let range = TrimRange::new(0x1234_5678_9abc, 0xfedc);
        assert_eq!(range.as_bytes(), [0xbc, 0x9a, 0x78, 0x56, 0x34, 0x12, 0xdc, 0xfe]);
        assert_eq!((range.block(), range.count()), (0x1234_5678_9abc, 0xfedc));
    }
}
