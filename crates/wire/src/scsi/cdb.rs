//! Command descriptor blocks: layouts that several commands share, and layouts of single commands.

use crate::layout::layout;
use zerocopy::{BigEndian as BE, U16, U32, U64};

/// Maximum length of a supported CDB, in bytes.
pub const MAX_CDB_LEN: usize = 32;

layout! {
    /// The typical 6-byte CDB with a logical block address (SPC-5).
    pub struct Cdb6(6) {
        /// OPERATION CODE.
        pub opcode: u8,
        /// LOGICAL BLOCK ADDRESS: 21 bits of these three bytes.
        pub logical_block_address: [u8; 3],
        /// TRANSFER LENGTH in blocks; 0 means 256.
        pub transfer_length: u8,
        /// CONTROL.
        pub control: u8,
    }

    /// The typical 10-byte CDB with a logical block address (SPC-5).
    pub struct Cdb10(10) {
        /// OPERATION CODE.
        pub opcode: u8,
        /// Command-specific bits.
        pub flags: u8,
        /// LOGICAL BLOCK ADDRESS.
        pub logical_block_address: U32<BE>,
        /// GROUP NUMBER.
        pub group_number: u8,
        /// TRANSFER LENGTH, ALLOCATION LENGTH or similar.
        pub transfer_length: U16<BE>,
        /// CONTROL.
        pub control: u8,
    }

    /// The typical 12-byte CDB with a logical block address (SPC-5).
    pub struct Cdb12(12) {
        /// OPERATION CODE.
        pub opcode: u8,
        /// Command-specific bits.
        pub flags: u8,
        /// LOGICAL BLOCK ADDRESS.
        pub logical_block_address: U32<BE>,
        /// TRANSFER LENGTH, ALLOCATION LENGTH or similar.
        pub transfer_length: U32<BE>,
        /// GROUP NUMBER.
        pub group_number: u8,
        /// CONTROL.
        pub control: u8,
    }

    /// The typical 16-byte CDB with a long logical block address (SPC-5).
    pub struct Cdb16(16) {
        /// OPERATION CODE.
        pub opcode: u8,
        /// Command-specific bits.
        pub flags: u8,
        /// LOGICAL BLOCK ADDRESS.
        pub logical_block_address: U64<BE>,
        /// TRANSFER LENGTH, ALLOCATION LENGTH or similar.
        pub transfer_length: U32<BE>,
        /// GROUP NUMBER.
        pub group_number: u8,
        /// CONTROL.
        pub control: u8,
    }

    /// INQUIRY (SPC-5).
    pub struct Inquiry(6) {
        /// OPERATION CODE.
        pub opcode: u8,
        /// [`EVPD`].
        pub flags: u8,
        /// PAGE CODE.
        pub page_code: u8,
        /// ALLOCATION LENGTH, in bytes.
        pub allocation_length: U16<BE>,
        /// CONTROL.
        pub control: u8,
    }
}

/// INQUIRY: a vital product data page is requested.
pub const EVPD: u8 = 1 << 0;

/// READ, WRITE and similar: disable page out, do not retain in the cache.
pub const DPO: u8 = 1 << 4;
/// READ, WRITE and similar: force unit access.
pub const FUA: u8 = 1 << 3;
/// RDPROTECT, WRPROTECT, VRPROTECT, ORPROTECT: handling of protection information.
pub const PROTECT_MASK: u8 = 0b111 << 5;

/// CONTROL: normal auto contingent allegiance (SAM-5 §5.2).
pub const NACA: u8 = 1 << 2;

/// Service action in the second byte of a CDB.
pub const SERVICE_ACTION_MASK: u8 = 0x1f;
