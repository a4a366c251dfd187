//! Mode parameters: headers, the block descriptors and pages of block devices (SPC-5, SBC-4).

use crate::layout::layout;
use zerocopy::{BigEndian as BE, U16, U32, U64};

layout! {
    /// The mode parameter header of MODE SENSE (6) and MODE SELECT (6).
    pub struct ModeHeader6(4) {
        /// MODE DATA LENGTH: bytes that follow this field; reserved in MODE SELECT.
        pub mode_data_length: u8,
        /// MEDIUM TYPE.
        pub medium_type: u8,
        /// DEVICE-SPECIFIC PARAMETER: [`WP`] and [`DPOFUA`].
        pub device_specific_parameter: u8,
        /// BLOCK DESCRIPTOR LENGTH, in bytes.
        pub block_descriptor_length: u8,
    }

    /// The mode parameter header of MODE SENSE (10) and MODE SELECT (10).
    pub struct ModeHeader10(8) {
        /// MODE DATA LENGTH: bytes that follow this field; reserved in MODE SELECT.
        pub mode_data_length: U16<BE>,
        /// MEDIUM TYPE.
        pub medium_type: u8,
        /// DEVICE-SPECIFIC PARAMETER: [`WP`] and [`DPOFUA`].
        pub device_specific_parameter: u8,
        /// [`LONGLBA`].
        pub long_lba: u8,
        pub reserved: u8 = 0,
        /// BLOCK DESCRIPTOR LENGTH, in bytes.
        pub block_descriptor_length: U16<BE>,
    }

    /// The short LBA mode parameter block descriptor (SBC-4).
    pub struct ShortBlockDescriptor(8) {
        /// NUMBER OF LOGICAL BLOCKS, or FFFFFFFFh if it does not fit.
        pub number_of_logical_blocks: U32<BE>,
        /// A reserved byte, and LOGICAL BLOCK LENGTH in the lower 24 bits.
        pub logical_block_length: U32<BE>,
    }

    /// The long LBA mode parameter block descriptor (SBC-4).
    pub struct LongBlockDescriptor(16) {
        /// NUMBER OF LOGICAL BLOCKS.
        pub number_of_logical_blocks: U64<BE>,
        pub reserved: [u8; 4] = 0,
        /// LOGICAL BLOCK LENGTH.
        pub logical_block_length: U32<BE>,
    }

    /// The Caching mode page (SBC-4).
    pub struct CachingPage(20) {
        /// [`PAGE_CACHING`].
        pub page_code: u8,
        /// PAGE LENGTH: 18.
        pub page_length: u8,
        /// [`WCE`] and others.
        pub flags: u8,
        /// Retention priorities, prefetch limits, cache segments.
        pub rest: [u8; 17],
    }

    /// The Control mode page (SPC-5).
    pub struct ControlPage(12) {
        /// [`PAGE_CONTROL`].
        pub page_code: u8,
        /// PAGE LENGTH: 10.
        pub page_length: u8,
        /// TST, TMF_ONLY, DPICZ, [`D_SENSE`], GLTSD, RLEC.
        pub flags_2: u8,
        /// QUEUE ALGORITHM MODIFIER, NUAR, QERR.
        pub flags_3: u8,
        /// RAC, UA_INTLCK_CTRL, [`SWP`].
        pub flags_4: u8,
        /// ATO, [`TAS`], ATMPE, RWWP, AUTOLOAD MODE.
        pub flags_5: u8,
        /// Obsolete.
        pub obsolete: U16<BE>,
        /// BUSY TIMEOUT PERIOD, in units of 100 ms; FFFFh for no limit.
        pub busy_timeout_period: U16<BE>,
        /// EXTENDED SELF-TEST COMPLETION TIME, in seconds.
        pub extended_self_test_completion_time: U16<BE>,
    }

    /// The Informational Exceptions Control mode page (SPC-5).
    pub struct InformationalExceptionsPage(12) {
        /// [`PAGE_INFORMATIONAL_EXCEPTIONS`].
        pub page_code: u8,
        /// PAGE LENGTH: 10.
        pub page_length: u8,
        /// PERF, EBF, EWASC, [`DEXCPT`], TEST, EBACKERR, LOGERR.
        pub flags: u8,
        /// MRIE.
        pub method_of_reporting: u8,
        /// INTERVAL TIMER.
        pub interval_timer: U32<BE>,
        /// REPORT COUNT.
        pub report_count: U32<BE>,
    }
}

/// Header: write protected.
pub const WP: u8 = 1 << 7;
/// Header: DPO and FUA are supported.
pub const DPOFUA: u8 = 1 << 4;
/// Header of 10 bytes: the block descriptor is a long one.
pub const LONGLBA: u8 = 1 << 0;
/// Caching: the write cache is enabled.
pub const WCE: u8 = 1 << 2;
/// Control: sense data in descriptor format.
pub const D_SENSE: u8 = 1 << 2;
/// Control, QUEUE ALGORITHM MODIFIER 1h: unrestricted reordering.
pub const UNRESTRICTED_REORDERING: u8 = 1 << 4;
/// Control: software write protect.
pub const SWP: u8 = 1 << 3;
/// Control: tasks aborted by another nexus end with TASK ABORTED.
pub const TAS: u8 = 1 << 6;
/// Informational exceptions: reporting is disabled.
pub const DEXCPT: u8 = 1 << 3;

/// PAGE CODE: Caching.
pub const PAGE_CACHING: u8 = 0x08;
/// PAGE CODE: Control.
pub const PAGE_CONTROL: u8 = 0x0a;
/// PAGE CODE: Informational Exceptions Control.
pub const PAGE_INFORMATIONAL_EXCEPTIONS: u8 = 0x1c;
/// PAGE CODE: all pages.
pub const PAGE_ALL: u8 = 0x3f;
/// SUBPAGE CODE: all subpages.
pub const SUBPAGE_ALL: u8 = 0xff;
