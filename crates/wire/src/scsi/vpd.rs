//! Vital product data (SPC-5, SBC-4).

use crate::layout::layout;
use zerocopy::{BigEndian as BE, U16, U32, U64};

layout! {
    /// Header of a VPD page.
    pub struct VpdHeader(4) {
        /// PERIPHERAL QUALIFIER and PERIPHERAL DEVICE TYPE.
        pub peripheral: u8,
        /// PAGE CODE, `PAGE_*`.
        pub page_code: u8,
        /// PAGE LENGTH: bytes that follow.
        pub page_length: U16<BE>,
    }

    /// Header of a designation descriptor (SPC-5).
    pub struct DesignatorHeader(4) {
        /// PROTOCOL IDENTIFIER and CODE SET.
        pub protocol_and_code_set: u8,
        /// [`PIV`], ASSOCIATION and DESIGNATOR TYPE.
        pub association_and_type: u8,
        pub reserved: u8 = 0,
        /// DESIGNATOR LENGTH: bytes that follow.
        pub designator_length: u8,
    }

    /// Extended INQUIRY Data page (SPC-5), without its header.
    pub struct ExtendedInquiry(60) {
        /// ACTIVATE MICROCODE, SPT, GRD_CHK, APP_CHK, REF_CHK.
        pub protection: u8,
        /// UASK_SUP, GROUP_SUP, PRIOR_SUP, HEADSUP, ORDSUP and [`SIMPSUP`].
        pub task_attributes: u8,
        /// WU_SUP, CRD_SUP, NV_SUP and [`V_SUP`].
        pub caches: u8,
        /// NO_PI_CHK, P_I_I_SUP and [`LUICLR`].
        pub flags_7: u8,
        /// The remaining fields.
        pub rest: [u8; 56],
    }

    /// Block Limits page (SBC-4), without its header.
    pub struct BlockLimits(60) {
        /// WSNZ: WRITE SAME with a length of 0 is rejected.
        pub flags: u8,
        /// MAXIMUM COMPARE AND WRITE LENGTH.
        pub maximum_compare_and_write_length: u8,
        /// OPTIMAL TRANSFER LENGTH GRANULARITY.
        pub optimal_transfer_length_granularity: U16<BE>,
        /// MAXIMUM TRANSFER LENGTH.
        pub maximum_transfer_length: U32<BE>,
        /// OPTIMAL TRANSFER LENGTH.
        pub optimal_transfer_length: U32<BE>,
        /// MAXIMUM PREFETCH LENGTH.
        pub maximum_prefetch_length: U32<BE>,
        /// MAXIMUM UNMAP LBA COUNT; FFFFFFFFh for no limit.
        pub maximum_unmap_lba_count: U32<BE>,
        /// MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT.
        pub maximum_unmap_block_descriptor_count: U32<BE>,
        /// OPTIMAL UNMAP GRANULARITY.
        pub optimal_unmap_granularity: U32<BE>,
        /// UGAVALID and UNMAP GRANULARITY ALIGNMENT.
        pub unmap_granularity_alignment: U32<BE>,
        /// MAXIMUM WRITE SAME LENGTH; 0 for no limit.
        pub maximum_write_same_length: U64<BE>,
        /// MAXIMUM ATOMIC TRANSFER LENGTH.
        pub maximum_atomic_transfer_length: U32<BE>,
        /// ATOMIC ALIGNMENT.
        pub atomic_alignment: U32<BE>,
        /// ATOMIC TRANSFER LENGTH GRANULARITY.
        pub atomic_transfer_length_granularity: U32<BE>,
        /// MAXIMUM ATOMIC TRANSFER LENGTH WITH ATOMIC BOUNDARY.
        pub maximum_atomic_transfer_length_with_boundary: U32<BE>,
        /// MAXIMUM ATOMIC BOUNDARY SIZE.
        pub maximum_atomic_boundary_size: U32<BE>,
    }

    /// Block Device Characteristics page (SBC-4), without its header.
    pub struct BlockDeviceCharacteristics(60) {
        /// MEDIUM ROTATION RATE: [`ROTATION_NOT_REPORTED`], [`ROTATION_NONE`] or a rate per minute.
        pub medium_rotation_rate: U16<BE>,
        /// PRODUCT TYPE.
        pub product_type: u8,
        /// WABEREQ, WACEREQ (results of reads after SANITIZE) and NOMINAL FORM FACTOR.
        pub reads_after_erase: u8,
        /// FUAB, VBULS and reserved bits.
        pub rest: [u8; 56],
    }

    /// Logical Block Provisioning page (SBC-4), without its header.
    pub struct LogicalBlockProvisioning(4) {
        /// THRESHOLD EXPONENT.
        pub threshold_exponent: u8,
        /// [`LBPU`], [`LBPWS`], [`LBPWS10`], [`LBPRZ_ZEROES`], [`ANC_SUP`], DP.
        pub flags: u8,
        /// [`PROVISIONING_FULL`] or [`PROVISIONING_THIN`].
        pub provisioning_type: u8,
        /// THRESHOLD PERCENTAGE.
        pub threshold_percentage: u8,
    }
}

/// Supported VPD Pages.
pub const PAGE_SUPPORTED: u8 = 0x00;
/// Unit Serial Number.
pub const PAGE_SERIAL: u8 = 0x80;
/// Device Identification.
pub const PAGE_IDENTIFICATION: u8 = 0x83;
/// Extended INQUIRY Data.
pub const PAGE_EXTENDED_INQUIRY: u8 = 0x86;
/// Third-party Copy.
pub const PAGE_THIRD_PARTY_COPY: u8 = 0x8f;
/// Block Limits.
pub const PAGE_BLOCK_LIMITS: u8 = 0xb0;
/// Block Device Characteristics.
pub const PAGE_CHARACTERISTICS: u8 = 0xb1;
/// Logical Block Provisioning.
pub const PAGE_PROVISIONING: u8 = 0xb2;

/// Third-party copy descriptor: Block Device ROD Token Limits.
pub const BLOCK_ROD_TOKEN_LIMITS: u16 = 0x0000;
/// Third-party copy descriptor: ROD Token Features.
pub const ROD_TOKEN_FEATURES: u16 = 0x0106;
/// Third-party copy descriptor: Supported ROD Types.
pub const SUPPORTED_ROD_TYPES: u16 = 0x0108;
/// General Copy Operations third-party copy descriptor.
pub const GENERAL_COPY_OPERATIONS: u16 = 0x8001;
/// Third-party copy descriptor: Supported Commands.
pub const SUPPORTED_COMMANDS: u16 = 0x0001;
/// Third-party copy descriptor: Parameter Data.
pub const PARAMETER_DATA: u16 = 0x0004;
/// Third-party copy descriptor: Supported Descriptors.
pub const SUPPORTED_DESCRIPTORS: u16 = 0x0008;

/// Extended INQUIRY: the SIMPLE task attribute is supported.
pub const SIMPSUP: u8 = 1 << 0;
/// Extended INQUIRY: there is a volatile cache.
pub const V_SUP: u8 = 1 << 0;
/// Extended INQUIRY, LUICLR: a unit attention of a lost nexus is for that nexus only.
pub const LUICLR: u8 = 1 << 0;

/// WSNZ: WRITE SAME with a length of 0 is rejected.
pub const WSNZ: u8 = 1 << 0;
/// UGAVALID: UNMAP GRANULARITY ALIGNMENT is valid.
pub const UGAVALID: u32 = 1 << 31;
/// MEDIUM ROTATION RATE is not reported.
pub const ROTATION_NOT_REPORTED: u16 = 0;
/// The medium does not rotate.
pub const ROTATION_NONE: u16 = 1;

/// WABEREQ 01b: after a block erase, reads succeed.
pub const WABEREQ_READS: u8 = 0b01 << 6;

/// UNMAP is supported.
pub const LBPU: u8 = 1 << 7;
/// WRITE SAME (16) with UNMAP is supported.
pub const LBPWS: u8 = 1 << 6;
/// WRITE SAME (10) with UNMAP is supported.
pub const LBPWS10: u8 = 1 << 5;
/// LBPRZ 001b: unmapped blocks read as zeroes.
pub const LBPRZ_ZEROES: u8 = 1 << 2;
/// Blocks can be anchored.
pub const ANC_SUP: u8 = 1 << 1;
/// PROVISIONING TYPE: fully provisioned or unknown.
pub const PROVISIONING_FULL: u8 = 0;
/// PROVISIONING TYPE: thin.
pub const PROVISIONING_THIN: u8 = 2;

/// Designator: PROTOCOL IDENTIFIER is valid.
pub const PIV: u8 = 1 << 7;
/// PROTOCOL IDENTIFIER of iSCSI.
pub const PROTOCOL_ISCSI: u8 = 0x5;
/// CODE SET: binary.
pub const CODE_SET_BINARY: u8 = 1;
/// CODE SET: ASCII.
pub const CODE_SET_ASCII: u8 = 2;
/// CODE SET: UTF-8.
pub const CODE_SET_UTF8: u8 = 3;
/// ASSOCIATION: the logical unit.
pub const ASSOCIATION_UNIT: u8 = 0 << 4;
/// ASSOCIATION: the target port.
pub const ASSOCIATION_PORT: u8 = 1 << 4;
/// ASSOCIATION: the target device.
pub const ASSOCIATION_DEVICE: u8 = 2 << 4;
/// DESIGNATOR TYPE: T10 vendor ID based.
pub const DESIGNATOR_T10_VENDOR: u8 = 1;
/// DESIGNATOR TYPE: EUI-64 based.
pub const DESIGNATOR_EUI64: u8 = 2;
/// DESIGNATOR TYPE: NAA.
pub const DESIGNATOR_NAA: u8 = 3;
/// DESIGNATOR TYPE: relative target port identifier.
pub const DESIGNATOR_RELATIVE_PORT: u8 = 4;
/// DESIGNATOR TYPE: target port group.
pub const DESIGNATOR_PORT_GROUP: u8 = 5;
/// DESIGNATOR TYPE: SCSI name string.
pub const DESIGNATOR_NAME: u8 = 8;
