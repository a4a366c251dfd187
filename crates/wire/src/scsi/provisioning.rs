//! UNMAP parameter lists, LBA status descriptors, bits of WRITE SAME (SBC-4).

use zerocopy::{BigEndian as BE, FromBytes, Immutable, IntoBytes, KnownLayout, U16, U32, U64, Unaligned};

/// Header of an UNMAP parameter list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct UnmapHeader {
    /// UNMAP DATA LENGTH: bytes that follow this field.
    pub unmap_data_length: U16<BE>,
    /// UNMAP BLOCK DESCRIPTOR DATA LENGTH: bytes of [`UnmapDescriptor`]s.
    pub unmap_block_descriptor_data_length: U16<BE>,
    /// Reserved.
    pub reserved: [u8; 4],
}
const _: () = assert!(size_of::<UnmapHeader>() == 8);

/// UNMAP block descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct UnmapDescriptor {
    /// UNMAP LOGICAL BLOCK ADDRESS.
    pub logical_block_address: U64<BE>,
    /// NUMBER OF LOGICAL BLOCKS.
    pub number_of_logical_blocks: U32<BE>,
    /// Reserved.
    pub reserved: [u8; 4],
}
const _: () = assert!(size_of::<UnmapDescriptor>() == 16);

/// LBA status descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct LbaStatusDescriptor {
    /// LBA STATUS LOGICAL BLOCK ADDRESS.
    pub lba_status_logical_block_address: U64<BE>,
    /// LBA STATUS NUMBER OF LOGICAL BLOCKS.
    pub lba_status_number_of_logical_blocks: U32<BE>,
    /// PROVISIONING STATUS: [`MAPPED`], [`DEALLOCATED`], [`ANCHORED`] or another.
    pub provisioning_status: u8,
    /// Reserved.
    pub reserved: [u8; 3],
}
const _: () = assert!(size_of::<LbaStatusDescriptor>() == 16);

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
