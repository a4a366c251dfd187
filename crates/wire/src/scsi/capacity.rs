//! READ CAPACITY parameter data (SBC-4) and GET LBA STATUS (SBC-4).

use crate::layout::layout;
use zerocopy::{BigEndian as BE, U16, U32, U64};

layout! {
    /// READ CAPACITY (10) parameter data.
    pub struct ReadCapacity10(8) {
        /// The last LBA, or FFFFFFFFh if it does not fit.
        pub returned_logical_block_address: U32<BE>,
        /// LOGICAL BLOCK LENGTH IN BYTES.
        pub logical_block_length: U32<BE>,
    }

    /// READ CAPACITY (16) parameter data.
    pub struct ReadCapacity16(32) {
        /// The last LBA.
        pub returned_logical_block_address: U64<BE>,
        /// LOGICAL BLOCK LENGTH IN BYTES.
        pub logical_block_length: U32<BE>,
        /// RC BASIS, P_TYPE and PROT_EN.
        pub protection: u8,
        /// P_I_EXPONENT and LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT.
        pub logical_blocks_per_physical_block_exponent: u8,
        /// [`LBPME`], [`LBPRZ`] and LOWEST ALIGNED LOGICAL BLOCK ADDRESS.
        pub provisioning_and_lowest_aligned_lba: U16<BE>,
        pub reserved: [u8; 16] = 0,
    }
}

/// Logical block provisioning management is enabled: blocks can be unmapped.
pub const LBPME: u16 = 1 << 15;
/// Unmapped blocks read as zeroes.
pub const LBPRZ: u16 = 1 << 14;
