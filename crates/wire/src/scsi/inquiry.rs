//! INQUIRY data (SPC-5).

use crate::layout::layout;
use zerocopy::{BigEndian as BE, U16};

layout! {
    /// Standard INQUIRY data (SPC-5).
    pub struct StandardInquiry(96) {
        /// PERIPHERAL QUALIFIER and PERIPHERAL DEVICE TYPE.
        pub peripheral: u8,
        /// RMB.
        pub removable: u8,
        /// VERSION.
        pub version: u8,
        /// NORMACA, [`HISUP`] and [`RESPONSE_DATA_FORMAT`].
        pub response_data_format: u8,
        /// ADDITIONAL LENGTH: bytes that follow this one.
        pub additional_length: u8,
        /// SCCS, TPGS, 3PC and PROTECT.
        pub flags_5: u8,
        /// ENCSERV and MULTIP.
        pub flags_6: u8,
        /// CMDQUE.
        pub flags_7: u8,
        /// T10 VENDOR IDENTIFICATION.
        pub t10_vendor_identification: [u8; 8],
        /// PRODUCT IDENTIFICATION.
        pub product_identification: [u8; 16],
        /// PRODUCT REVISION LEVEL.
        pub product_revision_level: [u8; 4],
        /// Vendor specific.
        pub vendor_specific: [u8; 20],
        /// Obsolete.
        pub obsolete: u8,
        pub reserved: u8 = 0,
        /// VERSION DESCRIPTORs, `VERSION_DESCRIPTOR_*`.
        pub version_descriptors: [U16<BE>; 8],
        pub reserved_too: [u8; 22] = 0,
    }
}

/// PERIPHERAL DEVICE TYPE of a direct access block device.
pub const DEVICE_TYPE_BLOCK: u8 = 0x00;
/// PERIPHERAL DEVICE TYPE of a well-known logical unit.
pub const DEVICE_TYPE_WELL_KNOWN: u8 = 0x1e;
/// PERIPHERAL QUALIFIER 011b with the unknown device type: no logical unit.
pub const DEVICE_TYPE_NONE: u8 = 0x7f;
/// RMB: the medium is removable.
pub const RMB: u8 = 1 << 7;
/// VERSION of SPC-4.
pub const VERSION_SPC_4: u8 = 0x06;
/// LUNs have a hierarchy (SAM-5 §4.7).
pub const HISUP: u8 = 1 << 4;
/// The only defined RESPONSE DATA FORMAT.
pub const RESPONSE_DATA_FORMAT: u8 = 2;
/// TPGS 01b: implicit asymmetric access.
pub const TPGS_IMPLICIT: u8 = 0b01 << 4;
/// TPGS 11b: implicit and explicit asymmetric access.
pub const TPGS_IMPLICIT_AND_EXPLICIT: u8 = 0b11 << 4;
/// 3PC: third-party copies.
pub const THREE_PC: u8 = 1 << 3;
/// MULTIP: several ports.
pub const MULTIP: u8 = 1 << 4;
/// CMDQUE: full task management.
pub const CMDQUE: u8 = 1 << 1;

/// SAM-5, no version claimed.
pub const VERSION_DESCRIPTOR_SAM_5: u16 = 0x00a0;
/// iSCSI, no version claimed.
pub const VERSION_DESCRIPTOR_ISCSI: u16 = 0x0960;
/// SPC-4, no version claimed.
pub const VERSION_DESCRIPTOR_SPC_4: u16 = 0x0460;
/// SBC-3, no version claimed.
pub const VERSION_DESCRIPTOR_SBC_3: u16 = 0x04c0;
