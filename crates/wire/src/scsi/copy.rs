//! Third-party copies: parameter lists of EXTENDED COPY (LID1), data of RECEIVE COPY RESULTS (SPC-5 §6.4, §6.20 to
//! 6.24).

use zerocopy::{BigEndian as BE, FromBytes, Immutable, IntoBytes, KnownLayout, U16, U32, U64, Unaligned};

/// The head of an EXTENDED COPY (LID1) parameter list; CSCD descriptors follow, then segment descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExtendedCopyHeader {
    /// LIST IDENTIFIER.
    pub list_identifier: u8,
    /// STR, LIST ID USAGE, PRIORITY.
    pub flags: u8,
    /// CSCD DESCRIPTOR LIST LENGTH, in bytes.
    pub cscd_descriptor_list_length: U16<BE>,
    /// Reserved.
    pub reserved: [u8; 4],
    /// SEGMENT DESCRIPTOR LIST LENGTH, in bytes.
    pub segment_descriptor_list_length: U32<BE>,
    /// INLINE DATA LENGTH, in bytes.
    pub inline_data_length: U32<BE>,
}
const _: () = assert!(size_of::<ExtendedCopyHeader>() == 16);

/// The identification descriptor CSCD descriptor: who takes part (SPC-5 §6.4.5.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct IdentificationCscd {
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
    /// Reserved.
    pub reserved: u8,
    /// DESIGNATOR LENGTH.
    pub designator_length: u8,
    /// DESIGNATOR.
    pub designator: [u8; 20],
    /// Of a block device: a reserved byte and DISK BLOCK LENGTH.
    pub disk_block_length: U32<BE>,
}
const _: () = assert!(size_of::<IdentificationCscd>() == 32);

/// Block device to block device (SPC-5 §6.4.6.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct BlockSegment {
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
    /// Reserved.
    pub reserved: [u8; 2],
    /// BLOCK DEVICE NUMBER OF BLOCKS.
    pub number_of_blocks: U16<BE>,
    /// SOURCE BLOCK DEVICE LOGICAL BLOCK ADDRESS.
    pub source_lba: U64<BE>,
    /// DESTINATION BLOCK DEVICE LOGICAL BLOCK ADDRESS.
    pub destination_lba: U64<BE>,
}
const _: () = assert!(size_of::<BlockSegment>() == 28);

/// Block device with offset to block device with offset (SPC-5 §6.4.6.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct OffsetSegment {
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
const _: () = assert!(size_of::<OffsetSegment>() == 32);

/// RECEIVE COPY OPERATING PARAMETERS; the type codes follow (SPC-5 §6.23).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct OperatingParameters {
    /// AVAILABLE DATA: bytes that follow this field.
    pub available_data: U32<BE>,
    /// SNLID and what is reserved.
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
    /// Reserved.
    pub reserved: [u8; 2],
    /// TOTAL CONCURRENT COPIES.
    pub total_concurrent_copies: U16<BE>,
    /// MAXIMUM CONCURRENT COPIES.
    pub maximum_concurrent_copies: u8,
    /// DATA SEGMENT GRANULARITY, INLINE DATA GRANULARITY, HELD DATA GRANULARITY: powers of two.
    pub granularities: [u8; 3],
    /// Reserved.
    pub reserved_too: [u8; 3],
    /// IMPLEMENTED DESCRIPTOR LIST LENGTH.
    pub implemented_list_length: u8,
}
const _: () = assert!(size_of::<OperatingParameters>() == 44);

/// RECEIVE COPY STATUS (LID1) (SPC-5 §6.24).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct CopyStatus {
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
const _: () = assert!(size_of::<CopyStatus>() == 12);

/// DESCRIPTOR TYPE CODE: identification descriptor CSCD descriptor.
pub const CSCD_IDENTIFICATION: u8 = 0xe4;
/// DESCRIPTOR TYPE CODE: block device to block device.
pub const SEGMENT_BLOCK_TO_BLOCK: u8 = 0x02;
/// DESCRIPTOR TYPE CODE: block device with offset to block device with offset.
pub const SEGMENT_OFFSET_TO_OFFSET: u8 = 0x0a;
/// The number of blocks is in blocks of the destination.
pub const DC: u8 = 1 << 1;
/// COPY OPERATION STATUS: completed without errors.
pub const COPY_COMPLETED: u8 = 1;
/// COPY OPERATION STATUS: completed with errors.
pub const COPY_FAILED: u8 = 2;
