//! Block devices (section 5.2).
//!
//! A request is a chain of buffers: [`RequestHeader`] and the data of a write, which the device
//! reads; the data of a read and one byte of [`Status`], which the device writes.

use crate::layout::native_layout;
use crate::open_enum::open_enum;
use zerocopy::little_endian::{U16, U32, U64};

native_layout! {
    /// The configuration space (`struct virtio_blk_config`), up to the limits of write zeroes.
    pub struct Config(60) {
        /// Size in sectors of 512 bytes.
        pub capacity: U64,
        /// Length of the longest buffer in bytes; not offered here.
        pub size_max: U32,
        /// Largest number of data buffers of a request.
        pub seg_max: U32,
        /// Cylinders, heads and sectors; not offered here.
        pub geometry: U32,
        /// Logical block in bytes.
        pub blk_size: U32,
        /// Physical block in logical blocks, as a power of two.
        pub physical_block_exp: u8,
        /// Offset of the first aligned logical block.
        pub alignment_offset: u8,
        /// Suggested minimum length in logical blocks.
        pub min_io_size: U16,
        /// Optimal length in logical blocks.
        pub opt_io_size: U32,
        /// Whether the cache is write-back, if the driver may choose; not offered here.
        pub writeback: u8,
        pub unused0: u8 = 0,
        /// Number of queues.
        pub num_queues: U16,
        /// Longest discard in sectors of 512 bytes.
        pub max_discard_sectors: U32,
        /// Largest number of ranges of a discard.
        pub max_discard_seg: U32,
        /// Alignment of discards in sectors of 512 bytes.
        pub discard_sector_alignment: U32,
        /// Longest range of zeroes in sectors of 512 bytes.
        pub max_write_zeroes_sectors: U32,
        /// Largest number of ranges of zeroes.
        pub max_write_zeroes_seg: U32,
        /// Whether zeroes may deallocate.
        pub write_zeroes_may_unmap: u8,
        pub unused1: [u8; 3] = 0,
    }

    /// The first 16 bytes of a request (`struct virtio_blk_req`).
    pub struct RequestHeader(16) {
        /// A [`RequestType`].
        pub kind: U32,
        pub reserved: U32 = 0,
        /// First sector of 512 bytes of a read or a write.
        pub sector: U64,
    }
}

open_enum! {
    /// What a request asks for (`VIRTIO_BLK_T_*`).
    pub enum RequestType(u32) {
        /// Read.
        IN = 0,
        /// Write.
        OUT = 1,
        /// Flush.
        FLUSH = 4,
        /// The device's serial number.
        GET_ID = 8,
        /// Discard.
        DISCARD = 11,
        /// Write zeroes.
        WRITE_ZEROES = 13,
    }

    /// The result of a request (`VIRTIO_BLK_S_*`).
    pub enum Status(u8) {
        /// It has succeeded.
        OK = 0,
        /// It has failed.
        IOERR = 1,
        /// The device does not support it.
        UNSUPP = 2,
    }
}

native_layout! {
    /// A range of a discard or of zeroes (`struct virtio_blk_discard_write_zeroes`).
    pub struct SectorRange(16) {
        /// First sector of 512 bytes.
        pub sector: U64,
        /// Number of sectors.
        pub num_sectors: U32,
        /// [`RANGE_F_UNMAP`].
        pub flags: U32,
    }
}

/// Zeroes may deallocate the range.
pub const RANGE_F_UNMAP: u32 = 1;
/// Length of the serial number, which shorter ones end with a NUL.
pub const ID_LEN: usize = 20;
/// Bytes in a sector of the standard, whatever the block size.
pub const SECTOR: u64 = 512;

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    #[test]
    fn the_configuration_has_the_offsets_of_the_standard() {
        // As `struct virtio_blk_config` of Linux.
        assert_eq!(offset_of!(Config, seg_max), 12);
        assert_eq!(offset_of!(Config, blk_size), 20);
        assert_eq!(offset_of!(Config, physical_block_exp), 24);
        assert_eq!(offset_of!(Config, opt_io_size), 28);
        assert_eq!(offset_of!(Config, num_queues), 34);
        assert_eq!(offset_of!(Config, max_discard_sectors), 36);
        assert_eq!(offset_of!(Config, max_write_zeroes_sectors), 48);
        assert_eq!(offset_of!(Config, write_zeroes_may_unmap), 56);
    }
}
