//! Sense data (SPC-5).

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, U16, U32, U64};

layout! {
    /// Fixed format sense data (SPC-5).
    pub struct FixedSense(18) {
        /// [`VALID`] and [`FIXED_CURRENT`] or [`FIXED_DEFERRED`].
        pub response_code: u8,
        /// Obsolete.
        pub obsolete: u8,
        /// FILEMARK, EOM, ILI, SDAT_OVFL and the sense key.
        pub flags_and_key: u8,
        /// INFORMATION.
        pub information: U32<BE>,
        /// ADDITIONAL SENSE LENGTH: bytes that follow this one.
        pub additional_sense_length: u8,
        /// COMMAND-SPECIFIC INFORMATION.
        pub command_specific_information: U32<BE>,
        /// ADDITIONAL SENSE CODE and its qualifier.
        pub additional_sense_code: U16<BE>,
        /// FIELD REPLACEABLE UNIT CODE.
        pub field_replaceable_unit_code: u8,
        /// SENSE KEY SPECIFIC with [`SKSV`].
        pub sense_key_specific: [u8; 3],
    }

    /// Header of descriptor format sense data (SPC-5).
    pub struct DescriptorSense(8) {
        /// [`DESCRIPTOR_CURRENT`] or [`DESCRIPTOR_DEFERRED`].
        pub response_code: u8,
        /// The sense key.
        pub sense_key: u8,
        /// ADDITIONAL SENSE CODE and its qualifier.
        pub additional_sense_code: U16<BE>,
        /// SDAT_OVFL.
        pub flags: u8,
        pub reserved: [u8; 2] = 0,
        /// ADDITIONAL SENSE LENGTH: bytes of descriptors that follow.
        pub additional_sense_length: u8,
    }

    /// The information descriptor (SPC-5).
    pub struct InformationDescriptor(12) {
        /// DESCRIPTOR TYPE: 0.
        pub descriptor_type: u8,
        /// ADDITIONAL LENGTH: 10.
        pub additional_length: u8,
        /// [`VALID`].
        pub valid: u8,
        pub reserved: u8 = 0,
        /// INFORMATION.
        pub information: U64<BE>,
    }

    /// The sense key specific descriptor (SPC-5).
    pub struct SenseKeySpecificDescriptor(8) {
        /// DESCRIPTOR TYPE: 2.
        pub descriptor_type: u8,
        /// ADDITIONAL LENGTH: 6.
        pub additional_length: u8,
        pub reserved: [u8; 2] = 0,
        /// SENSE KEY SPECIFIC with [`SKSV`].
        pub sense_key_specific: [u8; 3],
        pub reserved_too: u8 = 0,
    }
}

open_enum! {
    /// SENSE KEY (SPC-5).
    pub enum SenseKey(u8) {
        /// No specific sense key.
        NO_SENSE = 0x0,
        /// The command succeeded after the device recovered from an error.
        RECOVERED_ERROR = 0x1,
        /// The logical unit cannot be accessed now.
        NOT_READY = 0x2,
        /// Medium error.
        MEDIUM_ERROR = 0x3,
        /// Hardware error.
        HARDWARE_ERROR = 0x4,
        /// The command or its parameters are invalid.
        ILLEGAL_REQUEST = 0x5,
        /// A unit attention condition was established.
        UNIT_ATTENTION = 0x6,
        /// The medium is protected.
        DATA_PROTECT = 0x7,
        /// A third-party copy failed.
        COPY_ABORTED = 0xa,
        /// The device aborted the command.
        ABORTED_COMMAND = 0xb,
        /// Source data does not match the medium.
        MISCOMPARE = 0xe,
        /// The command completed; sense data has additional information.
        COMPLETED = 0xf,
    }

    /// ADDITIONAL SENSE CODE in the upper byte, its qualifier in the lower (SPC-5 annex F.1).
    pub enum Asc(u16) {
        /// NO ADDITIONAL SENSE INFORMATION.
        NO_ADDITIONAL_SENSE_INFORMATION = 0x0000,
        /// OPERATION IN PROGRESS.
        OPERATION_IN_PROGRESS = 0x0016,
        /// LOGICAL UNIT IS IN PROCESS OF BECOMING READY.
        BECOMING_READY = 0x0401,
        /// LOGICAL UNIT NOT READY, INITIALIZING COMMAND REQUIRED.
        INITIALIZING_COMMAND_REQUIRED = 0x0402,
        /// LOGICAL UNIT NOT ACCESSIBLE, ASYMMETRIC ACCESS STATE TRANSITION.
        ASYMMETRIC_ACCESS_STATE_TRANSITION = 0x040a,
        /// LOGICAL UNIT NOT ACCESSIBLE, TARGET PORT IN STANDBY STATE.
        TARGET_PORT_IN_STANDBY_STATE = 0x040b,
        /// LOGICAL UNIT NOT ACCESSIBLE, TARGET PORT IN UNAVAILABLE STATE.
        TARGET_PORT_IN_UNAVAILABLE_STATE = 0x040c,
        /// LOGICAL UNIT NOT READY, FORMAT IN PROGRESS.
        FORMAT_IN_PROGRESS = 0x0404,
        /// LOGICAL UNIT NOT READY, SANITIZE IN PROGRESS.
        SANITIZE_IN_PROGRESS = 0x041b,
        /// LOGICAL UNIT COMMUNICATION FAILURE.
        LOGICAL_UNIT_COMMUNICATION_FAILURE = 0x0800,
        /// WRITE ERROR.
        WRITE_ERROR = 0x0c00,
        /// INVALID FIELD IN COMMAND INFORMATION UNIT.
        INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT = 0x0e03,
        /// COPY TARGET DEVICE NOT REACHABLE.
        COPY_TARGET_DEVICE_NOT_REACHABLE = 0x0d02,
        /// INCORRECT COPY TARGET DEVICE TYPE.
        INCORRECT_COPY_TARGET_DEVICE_TYPE = 0x0d03,
        /// UNRECOVERED READ ERROR.
        UNRECOVERED_READ_ERROR = 0x1100,
        /// PARAMETER LIST LENGTH ERROR.
        PARAMETER_LIST_LENGTH_ERROR = 0x1a00,
        /// MISCOMPARE DURING VERIFY OPERATION.
        MISCOMPARE_DURING_VERIFY_OPERATION = 0x1d00,
        /// INVALID COMMAND OPERATION CODE.
        INVALID_COMMAND_OPERATION_CODE = 0x2000,
        /// ACCESS DENIED - NO ACCESS RIGHTS.
        ACCESS_DENIED_NO_ACCESS_RIGHTS = 0x2002,
        /// LOGICAL BLOCK ADDRESS OUT OF RANGE.
        LOGICAL_BLOCK_ADDRESS_OUT_OF_RANGE = 0x2100,
        /// INVALID TOKEN OPERATION, UNSUPPORTED TOKEN TYPE.
        UNSUPPORTED_TOKEN_TYPE = 0x2301,
        /// INVALID TOKEN OPERATION, TOKEN UNKNOWN.
        TOKEN_UNKNOWN = 0x2304,
        /// INVALID TOKEN OPERATION, TOKEN EXPIRED.
        TOKEN_EXPIRED = 0x2307,
        /// INVALID TOKEN OPERATION, TOKEN CANCELLED.
        TOKEN_CANCELLED = 0x2308,
        /// INVALID TOKEN OPERATION, TOKEN DELETED.
        TOKEN_DELETED = 0x2309,
        /// INVALID TOKEN OPERATION, INVALID TOKEN LENGTH.
        INVALID_TOKEN_LENGTH = 0x230a,
        /// INVALID FIELD IN CDB.
        INVALID_FIELD_IN_CDB = 0x2400,
        /// LOGICAL UNIT NOT SUPPORTED.
        LOGICAL_UNIT_NOT_SUPPORTED = 0x2500,
        /// INVALID FIELD IN PARAMETER LIST.
        INVALID_FIELD_IN_PARAMETER_LIST = 0x2600,
        /// INVALID RELEASE OF PERSISTENT RESERVATION.
        INVALID_RELEASE_OF_PERSISTENT_RESERVATION = 0x2604,
        /// TOO MANY TARGET DESCRIPTORS.
        TOO_MANY_TARGET_DESCRIPTORS = 0x2606,
        /// UNSUPPORTED TARGET DESCRIPTOR TYPE CODE.
        UNSUPPORTED_TARGET_DESCRIPTOR_TYPE_CODE = 0x2607,
        /// TOO MANY SEGMENT DESCRIPTORS.
        TOO_MANY_SEGMENT_DESCRIPTORS = 0x2608,
        /// UNSUPPORTED SEGMENT DESCRIPTOR TYPE CODE.
        UNSUPPORTED_SEGMENT_DESCRIPTOR_TYPE_CODE = 0x2609,
        /// WRITE PROTECTED.
        WRITE_PROTECTED = 0x2700,
        /// SOFTWARE WRITE PROTECTED: SWP of the Control mode page.
        SOFTWARE_WRITE_PROTECTED = 0x2702,
        /// SPACE ALLOCATION FAILED WRITE PROTECT.
        SPACE_ALLOCATION_FAILED_WRITE_PROTECT = 0x2707,
        /// NOT READY TO READY CHANGE, MEDIUM MAY HAVE CHANGED.
        NOT_READY_TO_READY_CHANGE = 0x2800,
        /// POWER ON, RESET, OR BUS DEVICE RESET OCCURRED.
        POWER_ON_RESET_OR_BUS_DEVICE_RESET_OCCURRED = 0x2900,
        /// BUS DEVICE RESET FUNCTION OCCURRED.
        BUS_DEVICE_RESET_FUNCTION_OCCURRED = 0x2903,
        /// I_T NEXUS LOSS OCCURRED.
        I_T_NEXUS_LOSS_OCCURRED = 0x2907,
        /// PARAMETERS CHANGED.
        PARAMETERS_CHANGED = 0x2a00,
        /// MODE PARAMETERS CHANGED.
        MODE_PARAMETERS_CHANGED = 0x2a01,
        /// RESERVATIONS PREEMPTED.
        RESERVATIONS_PREEMPTED = 0x2a03,
        /// RESERVATIONS RELEASED.
        RESERVATIONS_RELEASED = 0x2a04,
        /// REGISTRATIONS PREEMPTED.
        REGISTRATIONS_PREEMPTED = 0x2a05,
        /// ASYMMETRIC ACCESS STATE CHANGED.
        ASYMMETRIC_ACCESS_STATE_CHANGED = 0x2a06,
        /// CAPACITY DATA HAS CHANGED.
        CAPACITY_DATA_HAS_CHANGED = 0x2a09,
        /// COMMAND SEQUENCE ERROR.
        COMMAND_SEQUENCE_ERROR = 0x2c00,
        /// COMMANDS CLEARED BY ANOTHER INITIATOR.
        COMMANDS_CLEARED_BY_ANOTHER_INITIATOR = 0x2f00,
        /// MEDIUM FORMAT CORRUPTED.
        MEDIUM_FORMAT_CORRUPTED = 0x3100,
        /// SANITIZE COMMAND FAILED.
        SANITIZE_COMMAND_FAILED = 0x3103,
        /// SAVING PARAMETERS NOT SUPPORTED.
        SAVING_PARAMETERS_NOT_SUPPORTED = 0x3900,
        /// MEDIUM NOT PRESENT.
        MEDIUM_NOT_PRESENT = 0x3a00,
        /// INQUIRY DATA HAS CHANGED.
        INQUIRY_DATA_HAS_CHANGED = 0x3f03,
        /// REPORTED LUNS DATA HAS CHANGED.
        REPORTED_LUNS_DATA_HAS_CHANGED = 0x3f0e,
        /// INTERNAL TARGET FAILURE.
        INTERNAL_TARGET_FAILURE = 0x4400,
        /// MEDIUM REMOVAL PREVENTED.
        MEDIUM_REMOVAL_PREVENTED = 0x5302,
        /// INSUFFICIENT RESOURCES.
        INSUFFICIENT_RESOURCES = 0x5503,
        /// INSUFFICIENT REGISTRATION RESOURCES.
        INSUFFICIENT_REGISTRATION_RESOURCES = 0x5504,
        /// INSUFFICIENT RESOURCES TO CREATE ROD TOKEN.
        INSUFFICIENT_RESOURCES_TO_CREATE_ROD_TOKEN = 0x550d,
        /// SYSTEM RESOURCE FAILURE.
        SYSTEM_RESOURCE_FAILURE = 0x5500,
    }
}

/// INFORMATION is valid.
pub const VALID: u8 = 1 << 7;
/// Current error, fixed format.
pub const FIXED_CURRENT: u8 = 0x70;
/// Deferred error, fixed format.
pub const FIXED_DEFERRED: u8 = 0x71;
/// Current error, descriptor format.
pub const DESCRIPTOR_CURRENT: u8 = 0x72;
/// Deferred error, descriptor format.
pub const DESCRIPTOR_DEFERRED: u8 = 0x73;
/// SENSE KEY SPECIFIC is valid.
pub const SKSV: u8 = 1 << 7;
/// Field pointer: the field is in the CDB, not in the parameter list.
pub const COMMAND_DATA: u8 = 1 << 6;
/// Field pointer: the bit pointer is valid.
pub const BPV: u8 = 1 << 3;
