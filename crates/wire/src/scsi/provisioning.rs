//! UNMAP parameter lists, LBA status descriptors, bits of WRITE SAME (SBC-4).

use crate::layout::layout;
use zerocopy::{BigEndian as BE, U16, U32, U64};

layout! {
    /// Header of an UNMAP parameter list.
    pub struct UnmapHeader(8) {
        /// UNMAP DATA LENGTH: bytes that follow this field.
        pub unmap_data_length: U16<BE>,
        /// UNMAP BLOCK DESCRIPTOR DATA LENGTH: bytes of [`UnmapDescriptor`]s.
        pub unmap_block_descriptor_data_length: U16<BE>,
        pub reserved: [u8; 4] = 0,
    }

    /// UNMAP block descriptor.
    pub struct UnmapDescriptor(16) {
        /// UNMAP LOGICAL BLOCK ADDRESS.
        pub logical_block_address: U64<BE>,
        /// NUMBER OF LOGICAL BLOCKS.
        pub number_of_logical_blocks: U32<BE>,
        pub reserved: [u8; 4] = 0,
    }

    /// LBA status descriptor.
    pub struct LbaStatusDescriptor(16) {
        /// LBA STATUS LOGICAL BLOCK ADDRESS.
        pub lba_status_logical_block_address: U64<BE>,
        /// LBA STATUS NUMBER OF LOGICAL BLOCKS.
        pub lba_status_number_of_logical_blocks: U32<BE>,
        /// PROVISIONING STATUS: [`MAPPED`], [`DEALLOCATED`], [`ANCHORED`] or another.
        pub provisioning_status: u8,
        pub reserved: [u8; 3] = 0,
    }
}

/// PROVISIONING STATUS: mapped or unknown.
pub const MAPPED: u8 = 0;
/// PROVISIONING STATUS: deallocated.
pub const DEALLOCATED: u8 = 1;
/// PROVISIONING STATUS: anchored.
pub const ANCHORED: u8 = 2;

/// UNMAP: anchor the blocks instead of deallocating them.
pub const UNMAP_ANCHOR: u8 = 1 << 0;
/// WRITE SAME: anchor the blocks instead of deallocating them.
pub const WRITE_SAME_ANCHOR: u8 = 1 << 4;
/// WRITE SAME: the blocks may be unmapped.
pub const WRITE_SAME_UNMAP: u8 = 1 << 3;
/// WRITE SAME (16): no data-out buffer; the block is all zeroes.
pub const WRITE_SAME_NDOB: u8 = 1 << 0;
