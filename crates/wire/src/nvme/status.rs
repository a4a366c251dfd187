//! The status field: status code type, status code and flags (Base 2.0 §3.3.3.2.1).

use crate::open_enum::open_enum;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, LittleEndian as LE, U16, Unaligned};

/// The status word of a completion: phase tag in bit 0, SC in bits 8 to 1, SCT in 11 to 9, CRD in
/// 13 and 12, M in 14 and DNR in 15.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(transparent)]
pub struct StatusField(pub U16<LE>);

impl StatusField {
    /// A status without DNR: the command may be retried.
    #[inline]
    #[must_use]
    pub const fn new(status: NvmeStatus) -> StatusField {
        StatusField(U16::new(status.0 << 1))
    }

    /// A status with DNR: a retry would fail again.
    #[inline]
    #[must_use]
    pub const fn final_one(status: NvmeStatus) -> StatusField {
        StatusField(U16::new(status.0 << 1 | DNR))
    }

    /// Status code type and status code.
    #[inline]
    #[must_use]
    pub const fn status(self) -> NvmeStatus {
        NvmeStatus(self.0.get() >> 1 & STATUS_MASK)
    }

    /// Whether the command succeeded.
    #[inline]
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.status().0 == 0
    }

    /// Whether DNR is set: a retry would fail again.
    #[inline]
    #[must_use]
    pub const fn do_not_retry(self) -> bool {
        self.0.get() & DNR != 0
    }

    /// Sets M: the error log has more information.
    #[inline]
    #[must_use]
    pub const fn with_more(self) -> StatusField {
        StatusField(U16::new(self.0.get() | MORE))
    }

    /// Whether M is set: the error log has more information.
    #[inline]
    #[must_use]
    pub const fn more(self) -> bool {
        self.0.get() & MORE != 0
    }

    /// Sets CRD, 0 to 3: the Command Retry Delay Time to wait.
    #[inline]
    #[must_use]
    pub const fn with_retry_delay(self, crd: u8) -> StatusField {
        StatusField(U16::new(self.0.get() & !(3 << 12) | ((crd & 3) as u16) << 12))
    }

    /// CRD: the Command Retry Delay Time to wait, or 0.
    #[inline]
    #[must_use]
    pub const fn retry_delay(self) -> u8 {
        // Two bits.
        (self.0.get() >> 12 & 3) as u8
    }
}

open_enum! {
    /// Status code type in the high byte (three bits), status code in the low (Base 2.0 figures 93
    /// to 99; NVM Command Set 1.0 figure 14 and 15).
    pub enum NvmeStatus(u16) {
        /// Success.
        SUCCESSFUL_COMPLETION = 0x000,
        /// The opcode is not supported.
        INVALID_COMMAND_OPCODE = 0x001,
        /// A field is reserved or has an unsupported value.
        INVALID_FIELD_IN_COMMAND = 0x002,
        /// The CID is in use.
        COMMAND_ID_CONFLICT = 0x003,
        /// The transfer of data or metadata failed.
        DATA_TRANSFER_ERROR = 0x004,
        /// Power loss is imminent.
        COMMANDS_ABORTED_DUE_TO_POWER_LOSS = 0x005,
        /// The controller failed.
        INTERNAL_ERROR = 0x006,
        /// Aborted by an Abort command.
        COMMAND_ABORT_REQUESTED = 0x007,
        /// Its queue was deleted.
        COMMAND_ABORTED_DUE_TO_SQ_DELETION = 0x008,
        /// The other half of a fused operation failed.
        COMMAND_ABORTED_DUE_TO_FAILED_FUSED_COMMAND = 0x009,
        /// The other half of a fused operation is missing.
        COMMAND_ABORTED_DUE_TO_MISSING_FUSED_COMMAND = 0x00a,
        /// The namespace does not exist, or its format is not supported.
        INVALID_NAMESPACE_OR_FORMAT = 0x00b,
        /// The command is not allowed in this sequence.
        COMMAND_SEQUENCE_ERROR = 0x00c,
        /// An SGL segment descriptor is invalid.
        INVALID_SGL_SEGMENT_DESCRIPTOR = 0x00d,
        /// The number of SGL descriptors is invalid.
        INVALID_NUMBER_OF_SGL_DESCRIPTORS = 0x00e,
        /// The data length of the SGL does not match the command.
        DATA_SGL_LENGTH_INVALID = 0x00f,
        /// The metadata length of the SGL does not match the command.
        METADATA_SGL_LENGTH_INVALID = 0x010,
        /// The SGL descriptor type is not supported.
        SGL_DESCRIPTOR_TYPE_INVALID = 0x011,
        /// Invalid use of the controller memory buffer.
        INVALID_USE_OF_CONTROLLER_MEMORY_BUFFER = 0x012,
        /// The offset of a PRP is invalid.
        PRP_OFFSET_INVALID = 0x013,
        /// The length exceeds the atomic write unit.
        ATOMIC_WRITE_UNIT_EXCEEDED = 0x014,
        /// Access to the namespace or range is denied.
        OPERATION_DENIED = 0x015,
        /// The offset of an SGL is invalid.
        SGL_OFFSET_INVALID = 0x016,
        /// The formats of host identifiers are inconsistent.
        HOST_IDENTIFIER_INCONSISTENT_FORMAT = 0x018,
        /// The Keep Alive Timer has expired.
        KEEP_ALIVE_TIMER_EXPIRED = 0x019,
        /// The Keep Alive Timeout is invalid.
        KEEP_ALIVE_TIMEOUT_INVALID = 0x01a,
        /// Aborted by Preempt and Abort of a reservation.
        COMMAND_ABORTED_DUE_TO_PREEMPT_AND_ABORT = 0x01b,
        /// A sanitize operation failed.
        SANITIZE_FAILED = 0x01c,
        /// A sanitize operation is in progress.
        SANITIZE_IN_PROGRESS = 0x01d,
        /// The size or alignment of an SGL data block is invalid.
        SGL_DATA_BLOCK_GRANULARITY_INVALID = 0x01e,
        /// The command is not supported for a queue in the controller memory buffer.
        COMMAND_NOT_SUPPORTED_FOR_QUEUE_IN_CMB = 0x01f,
        /// The namespace is write protected.
        NAMESPACE_IS_WRITE_PROTECTED = 0x020,
        /// The command was interrupted; retry.
        COMMAND_INTERRUPTED = 0x021,
        /// A transient transport error; retry.
        TRANSIENT_TRANSPORT_ERROR = 0x022,
        /// Prohibited by command and feature lockdown.
        COMMAND_PROHIBITED_BY_COMMAND_AND_FEATURE_LOCKDOWN = 0x023,
        /// The media is not ready for this command.
        ADMIN_COMMAND_MEDIA_NOT_READY = 0x024,
        /// The range exceeds the namespace.
        LBA_OUT_OF_RANGE = 0x080,
        /// The capacity of the namespace is exceeded.
        CAPACITY_EXCEEDED = 0x081,
        /// The namespace is not ready.
        NAMESPACE_NOT_READY = 0x082,
        /// Another host has reserved the namespace.
        RESERVATION_CONFLICT = 0x083,
        /// A format operation is in progress.
        FORMAT_IN_PROGRESS = 0x084,
        /// The value size is invalid (Key Value Command Set).
        INVALID_VALUE_SIZE = 0x085,
        /// The key size is invalid (Key Value Command Set).
        INVALID_KEY_SIZE = 0x086,

        /// The completion queue is invalid.
        COMPLETION_QUEUE_INVALID = 0x100,
        /// The queue identifier is invalid or in use.
        INVALID_QUEUE_IDENTIFIER = 0x101,
        /// The queue size is invalid.
        INVALID_QUEUE_SIZE = 0x102,
        /// The limit of concurrent Abort commands is exceeded.
        ABORT_COMMAND_LIMIT_EXCEEDED = 0x103,
        /// The limit of Asynchronous Event Requests is exceeded.
        ASYNCHRONOUS_EVENT_REQUEST_LIMIT_EXCEEDED = 0x105,
        /// The firmware slot is invalid.
        INVALID_FIRMWARE_SLOT = 0x106,
        /// The log page is not supported.
        INVALID_LOG_PAGE = 0x109,
        /// The format is not supported.
        INVALID_FORMAT = 0x10a,
        /// The feature cannot be saved.
        FEATURE_IDENTIFIER_NOT_SAVEABLE = 0x10d,
        /// The feature cannot be set.
        FEATURE_NOT_CHANGEABLE = 0x10e,
        /// The feature is not namespace specific.
        FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10f,
        /// No namespace identifier is available.
        NAMESPACE_IDENTIFIER_UNAVAILABLE = 0x116,
        /// The namespace is attached already.
        NAMESPACE_ALREADY_ATTACHED = 0x118,
        /// The namespace is private and attached to another controller.
        NAMESPACE_IS_PRIVATE = 0x119,
        /// The namespace is not attached.
        NAMESPACE_NOT_ATTACHED = 0x11a,
        /// The controller list is invalid.
        CONTROLLER_LIST_INVALID = 0x11c,
        /// The controller identifier is invalid.
        INVALID_CONTROLLER_IDENTIFIER = 0x11f,
        /// The ANA group does not exist.
        ANA_GROUP_IDENTIFIER_INVALID = 0x124,
        /// The I/O command set is not supported.
        IO_COMMAND_SET_NOT_SUPPORTED = 0x129,
        /// The I/O command set is not enabled by CC.CSS.
        IO_COMMAND_SET_NOT_ENABLED = 0x12a,
        /// The combination of I/O command sets is not supported.
        IO_COMMAND_SET_COMBINATION_REJECTED = 0x12b,
        /// The attributes exclude each other.
        CONFLICTING_ATTRIBUTES = 0x180,
        /// The protection information is invalid.
        INVALID_PROTECTION_INFORMATION = 0x181,
        /// The range cannot be written.
        ATTEMPTED_WRITE_TO_READ_ONLY_RANGE = 0x182,
        /// A size limit of the command is exceeded.
        COMMAND_SIZE_LIMIT_EXCEEDED = 0x183,

        /// Disconnect was sent on an admin queue.
        DISCONNECT_INVALID_QUEUE_TYPE = 0x185,
        /// The discovery log has changed; read it again.
        DISCOVER_RESTART = 0x190,
        /// The host has to authenticate first.
        AUTHENTICATION_REQUIRED = 0x191,

        /// A write to the media failed.
        WRITE_FAULT = 0x280,
        /// The media cannot be read.
        UNRECOVERED_READ_ERROR = 0x281,
        /// The guard check failed.
        END_TO_END_GUARD_CHECK_ERROR = 0x282,
        /// The application tag check failed.
        END_TO_END_APPLICATION_TAG_CHECK_ERROR = 0x283,
        /// The reference tag check failed.
        END_TO_END_REFERENCE_TAG_CHECK_ERROR = 0x284,
        /// Compare found a difference.
        COMPARE_FAILURE = 0x285,
        /// Access is denied.
        ACCESS_DENIED = 0x286,
        /// The block is deallocated or was never written.
        DEALLOCATED_OR_UNWRITTEN_LOGICAL_BLOCK = 0x287,

        /// The path failed.
        INTERNAL_PATH_ERROR = 0x300,
        /// The namespace is permanently inaccessible through this controller.
        ASYMMETRIC_ACCESS_PERSISTENT_LOSS = 0x301,
        /// The namespace is inaccessible through this controller.
        ASYMMETRIC_ACCESS_INACCESSIBLE = 0x302,
        /// The ANA state is changing.
        ASYMMETRIC_ACCESS_TRANSITION = 0x303,
        /// The controller detected a path error.
        CONTROLLER_PATHING_ERROR = 0x360,
        /// The host detected a path error.
        HOST_PATHING_ERROR = 0x370,
        /// The host aborted the command.
        COMMAND_ABORTED_BY_HOST = 0x371,
    }

    /// Status codes of Connect, as a [`NvmeStatus`]: they overlap those of I/O commands (Base 2.0
    /// figure 96).
    pub enum ConnectStatus(u16) {
        /// RECFMT is not supported.
        CONNECT_INCOMPATIBLE_FORMAT = 0x180,
        /// The controller is in use or no controller is available.
        CONNECT_CONTROLLER_BUSY = 0x181,
        /// A parameter is invalid; the result has its offset and [`CONNECT_INVALID_DATA`].
        CONNECT_INVALID_PARAMETERS = 0x182,
        /// The host has to restart discovery.
        CONNECT_RESTART_DISCOVERY = 0x183,
        /// The host may not connect to the subsystem.
        CONNECT_INVALID_HOST = 0x184,
    }
}

impl From<ConnectStatus> for NvmeStatus {
    fn from(status: ConnectStatus) -> NvmeStatus {
        NvmeStatus(status.0)
    }
}

impl NvmeStatus {
    /// Whether the status code type is 3h, Path Related Status.
    #[must_use]
    pub const fn is_path_related(self) -> bool {
        self.0 >> 8 == 3
    }
}

/// IATTR in the result of Connect with invalid parameters: the offset in the low 16 bits is within
/// the data, not the command (Base 2.0 figure 380).
pub const CONNECT_INVALID_DATA: u32 = 1 << 16;

/// Do Not Retry.
const DNR: u16 = 1 << 15;
/// More.
const MORE: u16 = 1 << 14;
/// Mask of SCT and SC.
const STATUS_MASK: u16 = 0x7ff;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_found_between_its_bits() {
        let field = StatusField::final_one(NvmeStatus::COMPARE_FAILURE);
        assert_eq!(field.0.get(), 0x850a);
        assert_eq!(field.status(), NvmeStatus::COMPARE_FAILURE);
        assert!(field.do_not_retry() && !field.more() && !field.is_success());
        assert_eq!(field.retry_delay(), 0);
        // The phase tag is no part of it.
        assert!(StatusField(U16::new(1)).is_success());
        assert_eq!(StatusField(U16::new(0x2000)).retry_delay(), 2);
    }
}
