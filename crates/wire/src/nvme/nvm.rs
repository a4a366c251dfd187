//! Fields and data structures of the NVM Command Set's commands (NVM Command Set 1.0 §3.2).

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{LittleEndian as LE, U16, U32, U64};

layout! {
    /// One range of Dataset Management (NVM Command Set 1.0 figure 37).
    pub struct DsmRange(16) {
        /// Context attributes, hints.
        pub cattr: U32<LE>,
        /// Number of logical blocks, not 0's based.
        pub nlb: U32<LE>,
        /// The first logical block.
        pub slba: U64<LE>,
    }

    /// One source range of Copy in descriptor format 0h (NVM Command Set 1.0 figure 32).
    pub struct CopySource(32) {
        pub reserved: [u8; 8] = 0,
        /// The first logical block.
        pub slba: U64<LE>,
        /// Number of logical blocks, less one.
        pub nlb: U16<LE>,
        pub reserved_middle: [u8; 6] = 0,
        /// Expected initial logical block reference tag.
        pub eilbrt: U32<LE>,
        /// Expected logical block application tag.
        pub elbat: U16<LE>,
        /// Expected logical block application tag mask.
        pub elbatm: U16<LE>,
    }
}

open_enum! {
    /// Source range descriptor formats of Copy.
    pub enum CopyFormat(u8) {
        /// [`CopySource`]: 16-bit guards, within the namespace.
        FORMAT_0 = 0,
        /// Extended protection information, within the namespace.
        FORMAT_1 = 1,
        /// 16-bit guards, from any namespace.
        FORMAT_2 = 2,
        /// Extended protection information, from any namespace.
        FORMAT_3 = 3,
    }
}

/// NLB in CDW12 of Read, Write, Compare, Verify and Write Zeroes: logical blocks, less one.
pub const NLB_MASK: u32 = 0xffff;
/// DEAC in CDW12 of Write Zeroes: deallocate if the blocks then read as zeroes.
pub const DEAC: u32 = 1 << 25;
/// PRINFO in CDW12: protection information action and checks.
pub const PRINFO_MASK: u32 = 0xf << 26;
/// FUA in CDW12.
pub const FUA: u32 = 1 << 30;
/// LR in CDW12: limited retry.
pub const LR: u32 = 1 << 31;
/// NR in CDW10 of Dataset Management and CDW12 of Copy: number of ranges, less one.
pub const NR_MASK: u32 = 0xff;
/// AD in CDW11 of Dataset Management: deallocate the ranges.
pub const DSM_DEALLOCATE: u32 = 1 << 2;
/// Most ranges of one Dataset Management.
pub const DSM_MAX_RANGES: usize = 256;

/// DESFMT in CDW12 of Copy.
#[inline]
#[must_use]
pub const fn copy_format(cdw12: u32) -> CopyFormat {
    // Four bits.
    CopyFormat((cdw12 >> 8 & 0xf) as u8)
}
