//! Third-party copies: parameter lists of EXTENDED COPY (LID1), data of RECEIVE COPY RESULTS
//! (SPC-5).

use crate::layout::layout;
use zerocopy::{BigEndian as BE, U16, U32, U64};

layout! {
    /// Header of an EXTENDED COPY (LID1) parameter list; CSCD descriptors follow, then segment
    /// descriptors.
    pub struct ExtendedCopyHeader(16) {
        /// LIST IDENTIFIER.
        pub list_identifier: u8,
        /// STR, LIST ID USAGE, PRIORITY.
        pub flags: u8,
        /// CSCD DESCRIPTOR LIST LENGTH, in bytes.
        pub cscd_descriptor_list_length: U16<BE>,
        pub reserved: [u8; 4] = 0,
        /// SEGMENT DESCRIPTOR LIST LENGTH, in bytes.
        pub segment_descriptor_list_length: U32<BE>,
        /// INLINE DATA LENGTH, in bytes.
        pub inline_data_length: U32<BE>,
    }

    /// Identification descriptor CSCD descriptor: a copy source or destination (SPC-5).
    pub struct IdentificationCscd(32) {
        /// [`CSCD_IDENTIFICATION`].
        pub descriptor_type: u8,
        /// LU ID TYPE and PERIPHERAL DEVICE TYPE.
        pub device_type: u8,
        /// RELATIVE INITIATOR PORT IDENTIFIER.
        pub relative_initiator_port: U16<BE>,
        /// CODE SET.
        pub code_set: u8,
        /// ASSOCIATION and DESIGNATOR TYPE.
        pub association_and_type: u8,
        pub reserved: u8 = 0,
        /// DESIGNATOR LENGTH.
        pub designator_length: u8,
        /// DESIGNATOR.
        pub designator: [u8; 20],
        /// For block devices: a reserved byte and DISK BLOCK LENGTH.
        pub disk_block_length: U32<BE>,
    }

    /// Block device to block device segment descriptor (SPC-5).
    pub struct BlockSegment(28) {
        /// [`SEGMENT_BLOCK_TO_BLOCK`].
        pub descriptor_type: u8,
        /// [`DC`] and CAT.
        pub flags: u8,
        /// DESCRIPTOR LENGTH: bytes that follow.
        pub descriptor_length: U16<BE>,
        /// SOURCE CSCD DESCRIPTOR ID.
        pub source: U16<BE>,
        /// DESTINATION CSCD DESCRIPTOR ID.
        pub destination: U16<BE>,
        pub reserved: [u8; 2] = 0,
        /// BLOCK DEVICE NUMBER OF BLOCKS.
        pub number_of_blocks: U16<BE>,
        /// SOURCE BLOCK DEVICE LOGICAL BLOCK ADDRESS.
        pub source_lba: U64<BE>,
        /// DESTINATION BLOCK DEVICE LOGICAL BLOCK ADDRESS.
        pub destination_lba: U64<BE>,
    }

    /// Block device with offset to block device with offset segment descriptor (SPC-5).
    pub struct OffsetSegment(32) {
        /// [`SEGMENT_OFFSET_TO_OFFSET`].
        pub descriptor_type: u8,
        /// CAT.
        pub flags: u8,
        /// DESCRIPTOR LENGTH: bytes that follow.
        pub descriptor_length: U16<BE>,
        /// SOURCE CSCD DESCRIPTOR ID.
        pub source: U16<BE>,
        /// DESTINATION CSCD DESCRIPTOR ID.
        pub destination: U16<BE>,
        /// NUMBER OF BYTES.
        pub number_of_bytes: U32<BE>,
        /// SOURCE BLOCK DEVICE LOGICAL BLOCK ADDRESS.
        pub source_lba: U64<BE>,
        /// DESTINATION BLOCK DEVICE LOGICAL BLOCK ADDRESS.
        pub destination_lba: U64<BE>,
        /// SOURCE BLOCK DEVICE BYTE OFFSET.
        pub source_offset: U16<BE>,
        /// DESTINATION BLOCK DEVICE BYTE OFFSET.
        pub destination_offset: U16<BE>,
    }

    /// RECEIVE COPY OPERATING PARAMETERS data; the descriptor type codes follow (SPC-5).
    pub struct OperatingParameters(44) {
        /// AVAILABLE DATA: bytes that follow this field.
        pub available_data: U32<BE>,
        /// SNLID and reserved bits.
        pub flags: [u8; 4],
        /// MAXIMUM CSCD DESCRIPTOR COUNT.
        pub maximum_cscd_count: U16<BE>,
        /// MAXIMUM SEGMENT DESCRIPTOR COUNT.
        pub maximum_segment_count: U16<BE>,
        /// MAXIMUM DESCRIPTOR LIST LENGTH.
        pub maximum_list_length: U32<BE>,
        /// MAXIMUM SEGMENT LENGTH.
        pub maximum_segment_length: U32<BE>,
        /// MAXIMUM INLINE DATA LENGTH, HELD DATA LIMIT, MAXIMUM STREAM DEVICE TRANSFER SIZE.
        pub unused: [U32<BE>; 3],
        pub reserved: [u8; 2] = 0,
        /// TOTAL CONCURRENT COPIES.
        pub total_concurrent_copies: U16<BE>,
        /// MAXIMUM CONCURRENT COPIES.
        pub maximum_concurrent_copies: u8,
        /// DATA SEGMENT GRANULARITY, INLINE DATA GRANULARITY, HELD DATA GRANULARITY: powers of two.
        pub granularities: [u8; 3],
        pub reserved_too: [u8; 3] = 0,
        /// IMPLEMENTED DESCRIPTOR LIST LENGTH.
        pub implemented_list_length: u8,
    }

    /// RECEIVE COPY STATUS (LID1) data (SPC-5).
    pub struct CopyStatus(12) {
        /// AVAILABLE DATA: 8.
        pub available_data: U32<BE>,
        /// HDD and COPY OPERATION STATUS.
        pub status: u8,
        /// SEGMENTS PROCESSED.
        pub segments_processed: U16<BE>,
        /// TRANSFER COUNT UNITS: 0 for bytes, 1 for kibibytes.
        pub transfer_count_units: u8,
        /// TRANSFER COUNT.
        pub transfer_count: U32<BE>,
    }
}

/// DESCRIPTOR TYPE CODE: identification descriptor CSCD descriptor.
pub const CSCD_IDENTIFICATION: u8 = 0xe4;
/// DESCRIPTOR TYPE CODE: block device to block device.
pub const SEGMENT_BLOCK_TO_BLOCK: u8 = 0x02;
/// DESCRIPTOR TYPE CODE: block device with offset to block device with offset.
pub const SEGMENT_OFFSET_TO_OFFSET: u8 = 0x0a;
/// DC: the number of blocks counts blocks of the destination.
pub const DC: u8 = 1 << 1;
/// COPY OPERATION STATUS: completed without errors.
pub const COPY_COMPLETED: u8 = 1;
/// COPY OPERATION STATUS: completed with errors.
pub const COPY_FAILED: u8 = 2;

layout! {
    /// Header of a POPULATE TOKEN parameter list; [`RangeDescriptor`]s follow (SBC-4).
    pub struct PopulateToken(16) {
        /// POPULATE TOKEN DATA LENGTH: bytes that follow this field.
        pub data_length: U16<BE>,
        /// [`RTV`] and [`IMMED`].
        pub flags: u8,
        pub reserved: u8 = 0,
        /// INACTIVITY TIMEOUT, in seconds; 0 for the default.
        pub inactivity_timeout: U32<BE>,
        /// ROD TYPE, if [`RTV`] is set.
        pub rod_type: U32<BE>,
        pub reserved_too: [u8; 2] = 0,
        /// BLOCK DEVICE RANGE DESCRIPTOR LENGTH, in bytes.
        pub descriptors_length: U16<BE>,
    }

    /// Header of a WRITE USING TOKEN parameter list; [`RangeDescriptor`]s follow (SBC-4).
    pub struct WriteUsingToken(536) {
        /// WRITE USING TOKEN DATA LENGTH: bytes that follow this field.
        pub data_length: U16<BE>,
        /// [`DEL_TKN`] and [`IMMED`].
        pub flags: u8,
        pub reserved: [u8; 5] = 0,
        /// OFFSET INTO ROD, in blocks of the destination unit.
        pub offset_into_rod: U64<BE>,
        /// ROD TOKEN.
        pub rod_token: [u8; ROD_TOKEN_LEN],
        pub reserved_too: [u8; 6] = 0,
        /// BLOCK DEVICE RANGE DESCRIPTOR LENGTH, in bytes.
        pub descriptors_length: U16<BE>,
    }

    /// A block device range descriptor (SBC-4).
    pub struct RangeDescriptor(16) {
        /// LOGICAL BLOCK ADDRESS.
        pub logical_block_address: U64<BE>,
        /// NUMBER OF LOGICAL BLOCKS.
        pub number_of_logical_blocks: U32<BE>,
        pub reserved: [u8; 4] = 0,
    }

    /// The part of a ROD token that is not private to its creator (SPC-5).
    pub struct RodTokenHead(128) {
        /// ROD TYPE.
        pub rod_type: U32<BE>,
        pub reserved: [u8; 2] = 0,
        /// ROD TOKEN LENGTH: bytes that follow this field.
        pub length: U16<BE>,
        /// COPY MANAGER ROD TOKEN IDENTIFIER.
        pub identifier: U64<BE>,
        /// CREATOR LOGICAL UNIT DESCRIPTOR.
        pub creator: IdentificationCscd,
        /// NUMBER OF BYTES REPRESENTED: the upper 8 bytes, then the lower.
        pub bytes_represented: [U64<BE>; 2],
        pub reserved_too: [u8; 32] = 0,
        /// Device type specific data: LOGICAL BLOCK LENGTH IN BYTES, then the other fields of the
        /// READ CAPACITY (16) data.
        pub logical_block_length: U32<BE>,
        /// The rest of the device type specific data.
        pub rest: [u8; 28],
    }

    /// RECEIVE ROD TOKEN INFORMATION data up to the sense data (SPC-5).
    pub struct RodTokenInformation(32) {
        /// AVAILABLE DATA: bytes that follow this field.
        pub available_data: U32<BE>,
        /// RESPONSE TO SERVICE ACTION.
        pub service_action: u8,
        /// COPY OPERATION STATUS.
        pub status: u8,
        /// OPERATION COUNTER.
        pub operation_counter: U16<BE>,
        /// ESTIMATED STATUS UPDATE DELAY, in milliseconds.
        pub update_delay: U32<BE>,
        /// EXTENDED COPY COMPLETION STATUS.
        pub completion_status: u8,
        /// LENGTH OF THE SENSE DATA FIELD.
        pub sense_field_length: u8,
        /// SENSE DATA LENGTH.
        pub sense_length: u8,
        /// TRANSFER COUNT UNITS.
        pub transfer_count_units: u8,
        /// TRANSFER COUNT.
        pub transfer_count: U64<BE>,
        /// SEGMENTS PROCESSED.
        pub segments_processed: U16<BE>,
        pub reserved: [u8; 6] = 0,
    }

    /// The Block Device ROD Token Limits descriptor of VPD page 8Fh, without its type and length
    /// (SBC-4).
    pub struct RodTokenLimits(32) {
        /// Vendor specific.
        pub vendor_specific: [u8; 6],
        /// MAXIMUM RANGE DESCRIPTORS.
        pub maximum_range_descriptors: U16<BE>,
        /// MAXIMUM INACTIVITY TIMEOUT, in seconds.
        pub maximum_inactivity_timeout: U32<BE>,
        /// DEFAULT INACTIVITY TIMEOUT, in seconds.
        pub default_inactivity_timeout: U32<BE>,
        /// MAXIMUM TOKEN TRANSFER SIZE, in blocks.
        pub maximum_token_transfer_size: U64<BE>,
        /// OPTIMAL TRANSFER COUNT, in blocks.
        pub optimal_transfer_count: U64<BE>,
    }

    /// The ROD Token Features descriptor of VPD page 8Fh for block devices, without its type and
    /// length (SPC-5).
    pub struct RodTokenFeatures(92) {
        /// REMOTE TOKENS: 0, only tokens of this copy manager.
        pub remote_tokens: u8,
        pub reserved: [u8; 11] = 0,
        /// MINIMUM TOKEN LIFETIME, in seconds.
        pub minimum_token_lifetime: U32<BE>,
        /// MAXIMUM TOKEN LIFETIME, in seconds.
        pub maximum_token_lifetime: U32<BE>,
        /// MAXIMUM TOKEN INACTIVITY TIMEOUT, in seconds.
        pub maximum_token_inactivity_timeout: U32<BE>,
        pub reserved_too: [u8; 18] = 0,
        /// ROD DEVICE TYPE SPECIFIC FEATURES DESCRIPTORS LENGTH: 48.
        pub descriptors_length: U16<BE>,
        /// DESCRIPTOR FORMAT and PERIPHERAL DEVICE TYPE: 0, a block device.
        pub device_type: u8,
        pub reserved_again: u8 = 0,
        /// DESCRIPTOR LENGTH: 44.
        pub descriptor_length: U16<BE>,
        pub reserved_still: [u8; 2] = 0,
        /// OPTIMAL BLOCK ROD LENGTH GRANULARITY, in blocks.
        pub optimal_granularity: U16<BE>,
        /// MAXIMUM BYTES IN BLOCK ROD.
        pub maximum_bytes: U64<BE>,
        /// OPTIMAL BYTES IN BLOCK ROD TRANSFER.
        pub optimal_bytes: U64<BE>,
        /// OPTIMAL BYTES TO TOKEN PER SEGMENT.
        pub optimal_bytes_to_token: U64<BE>,
        /// OPTIMAL BYTES FROM TOKEN PER SEGMENT.
        pub optimal_bytes_from_token: U64<BE>,
        pub reserved_last: [u8; 8] = 0,
    }

    /// A ROD type descriptor of VPD page 8Fh (SPC-5).
    pub struct RodTypeDescriptor(64) {
        /// ROD TYPE.
        pub rod_type: U32<BE>,
        /// ECPY_INT, [`TOKEN_IN`], [`TOKEN_OUT`].
        pub flags: u8,
        pub reserved: u8 = 0,
        /// PREFERENCE INDICATOR.
        pub preference: U16<BE>,
        pub reserved_too: [u8; 56] = 0,
    }
}

/// Length of a ROD token, in bytes.
pub const ROD_TOKEN_LEN: usize = 512;
/// ROD TOKEN LENGTH of these tokens.
pub const ROD_TOKEN_LENGTH_FIELD: u16 = 0x01f8;
/// ROD TYPE: point in time copy, default.
pub const ROD_POINT_IN_TIME: u32 = 0x0080_0000;
/// ROD TYPE: point in time copy, change vulnerable.
pub const ROD_CHANGE_VULNERABLE: u32 = 0x0080_0001;
/// ROD TYPE: block device zero.
pub const ROD_ZERO: u32 = 0xffff_0001;
/// RTV: the parameter list contains a ROD TYPE.
pub const RTV: u8 = 1 << 1;
/// DEL_TKN: the token is deleted after the command.
pub const DEL_TKN: u8 = 1 << 1;
/// IMMED: the status is returned before the operation ends.
pub const IMMED: u8 = 1 << 0;
/// TOKEN_IN: tokens of this type are accepted.
pub const TOKEN_IN: u8 = 1 << 1;
/// TOKEN_OUT: tokens of this type are created.
pub const TOKEN_OUT: u8 = 1 << 0;
/// COPY OPERATION STATUS: completed without errors, but less than requested.
pub const COPY_PARTIAL: u8 = 0x03;
/// COPY OPERATION STATUS: in progress in the foreground.
pub const COPY_IN_FOREGROUND: u8 = 0x11;
/// COPY OPERATION STATUS: terminated.
pub const COPY_TERMINATED: u8 = 0x60;
/// TRANSFER COUNT UNITS: blocks of the copy destination.
pub const UNITS_BLOCKS: u8 = 0xf1;
/// ESTIMATED STATUS UPDATE DELAY of a finished operation.
pub const UPDATE_DELAY_OVER: u32 = 0xffff_fffe;
