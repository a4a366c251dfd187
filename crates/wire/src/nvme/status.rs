//! Status: type, code and the bits around them (Base 2.0 §3.3.3.2.1).

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
    /// A status that may be tried again.
    #[inline]
    #[must_use]
    pub const fn new(status: NvmeStatus) -> StatusField {
        StatusField(U16::new(status.0 << 1))
    }

    /// A status with DNR: trying again will not help.
    #[inline]
    #[must_use]
    pub const fn final_one(status: NvmeStatus) -> StatusField {
        StatusField(U16::new(status.0 << 1 | DNR))
    }

    /// Type and code.
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

    /// Whether DNR says that the same command fails again.
    #[inline]
    #[must_use]
    pub const fn do_not_retry(self) -> bool {
        self.0.get() & DNR != 0
    }

    /// With M: the error log has more.
    #[inline]
    #[must_use]
    pub const fn with_more(self) -> StatusField {
        StatusField(U16::new(self.0.get() | MORE))
    }

    /// Whether M says that the error log has more.
    #[inline]
    #[must_use]
    pub const fn more(self) -> bool {
        self.0.get() & MORE != 0
    }

    /// With CRD, 0 to 3: which of the controller's command retry delay times to wait.
    #[inline]
    #[must_use]
    pub const fn with_retry_delay(self, crd: u8) -> StatusField {
        StatusField(U16::new(self.0.get() & !(3 << 12) | ((crd & 3) as u16) << 12))
    }

    /// Which of the controller's command retry delay times to wait, or 0.
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
        /// Done.
        SUCCESSFUL_COMPLETION = 0x000,
        /// Opcode.
        INVALID_COMMAND_OPCODE = 0x001,
        /// A field that is reserved or has no such value.
        INVALID_FIELD_IN_COMMAND = 0x002,
        /// CID is in use.
        COMMAND_ID_CONFLICT = 0x003,
        /// Moving data or metadata failed.
        DATA_TRANSFER_ERROR = 0x004,
        /// Power is going.
        COMMANDS_ABORTED_DUE_TO_POWER_LOSS = 0x005,
        /// The controller failed.
        INTERNAL_ERROR = 0x006,
        /// By Abort.
        COMMAND_ABORT_REQUESTED = 0x007,
        /// Its queue was deleted.
        COMMAND_ABORTED_DUE_TO_SQ_DELETION = 0x008,
        /// The other half of a fused operation failed.
        COMMAND_ABORTED_DUE_TO_FAILED_FUSED_COMMAND = 0x009,
        /// The other half of a fused operation is missing.
        COMMAND_ABORTED_DUE_TO_MISSING_FUSED_COMMAND = 0x00a,
        /// No such namespace, or its format.
        INVALID_NAMESPACE_OR_FORMAT = 0x00b,
        /// Not in this order.
        COMMAND_SEQUENCE_ERROR = 0x00c,
        /// Descriptors make no sense.
        INVALID_SGL_SEGMENT_DESCRIPTOR = 0x00d,
        /// Too many or too few descriptors.
        INVALID_NUMBER_OF_SGL_DESCRIPTORS = 0x00e,
        /// The length does not fit the command.
        DATA_SGL_LENGTH_INVALID = 0x00f,
        /// The metadata's length does not fit the command.
        METADATA_SGL_LENGTH_INVALID = 0x010,
        /// No such type.
        SGL_DESCRIPTOR_TYPE_INVALID = 0x011,
        /// The controller memory buffer is used wrongly.
        INVALID_USE_OF_CONTROLLER_MEMORY_BUFFER = 0x012,
        /// A PRP's offset.
        PRP_OFFSET_INVALID = 0x013,
        /// Longer than what is written atomically.
        ATOMIC_WRITE_UNIT_EXCEEDED = 0x014,
        /// Access to the namespace or range is denied.
        OPERATION_DENIED = 0x015,
        /// An SGL's offset.
        SGL_OFFSET_INVALID = 0x016,
        /// The host's identifiers contradict each other.
        HOST_IDENTIFIER_INCONSISTENT_FORMAT = 0x018,
        /// Keep Alive came too late.
        KEEP_ALIVE_TIMER_EXPIRED = 0x019,
        /// Less than the controller takes.
        KEEP_ALIVE_TIMEOUT_INVALID = 0x01a,
        /// By a reservation's preempt and abort.
        COMMAND_ABORTED_DUE_TO_PREEMPT_AND_ABORT = 0x01b,
        /// A sanitize operation failed.
        SANITIZE_FAILED = 0x01c,
        /// A sanitize operation is under way.
        SANITIZE_IN_PROGRESS = 0x01d,
        /// A data block's size or alignment.
        SGL_DATA_BLOCK_GRANULARITY_INVALID = 0x01e,
        /// Not for a command of this queue.
        COMMAND_NOT_SUPPORTED_FOR_QUEUE_IN_CMB = 0x01f,
        /// The namespace is write protected.
        NAMESPACE_IS_WRITE_PROTECTED = 0x020,
        /// Try again.
        COMMAND_INTERRUPTED = 0x021,
        /// Try again.
        TRANSIENT_TRANSPORT_ERROR = 0x022,
        /// Lockdown forbids it.
        COMMAND_PROHIBITED_BY_COMMAND_AND_FEATURE_LOCKDOWN = 0x023,
        /// The media is not ready for this command.
        ADMIN_COMMAND_MEDIA_NOT_READY = 0x024,
        /// Beyond the namespace's end.
        LBA_OUT_OF_RANGE = 0x080,
        /// The namespace has no room.
        CAPACITY_EXCEEDED = 0x081,
        /// Not now.
        NAMESPACE_NOT_READY = 0x082,
        /// Another host has reserved the namespace.
        RESERVATION_CONFLICT = 0x083,
        /// A format is under way.
        FORMAT_IN_PROGRESS = 0x084,
        /// Not a value, or no such one here.
        INVALID_VALUE_SIZE = 0x085,
        /// Not a key of this store.
        INVALID_KEY_SIZE = 0x086,

        /// No such completion queue.
        COMPLETION_QUEUE_INVALID = 0x100,
        /// No such queue, or there is one.
        INVALID_QUEUE_IDENTIFIER = 0x101,
        /// 0, or more than the controller takes.
        INVALID_QUEUE_SIZE = 0x102,
        /// More commands to abort at a time than the controller takes.
        ABORT_COMMAND_LIMIT_EXCEEDED = 0x103,
        /// More Async Event Requests than the controller takes.
        ASYNCHRONOUS_EVENT_REQUEST_LIMIT_EXCEEDED = 0x105,
        /// No such slot.
        INVALID_FIRMWARE_SLOT = 0x106,
        /// No such log page.
        INVALID_LOG_PAGE = 0x109,
        /// No such format.
        INVALID_FORMAT = 0x10a,
        /// The feature cannot be saved.
        FEATURE_IDENTIFIER_NOT_SAVEABLE = 0x10d,
        /// The feature cannot be set.
        FEATURE_NOT_CHANGEABLE = 0x10e,
        /// The feature is not one namespace's.
        FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10f,
        /// No such identifier is free.
        NAMESPACE_IDENTIFIER_UNAVAILABLE = 0x116,
        /// It is attached.
        NAMESPACE_ALREADY_ATTACHED = 0x118,
        /// It is attached, and to one only.
        NAMESPACE_IS_PRIVATE = 0x119,
        /// It is not attached.
        NAMESPACE_NOT_ATTACHED = 0x11a,
        /// The list of controllers makes no sense.
        CONTROLLER_LIST_INVALID = 0x11c,
        /// No such controller.
        INVALID_CONTROLLER_IDENTIFIER = 0x11f,
        /// No such ANA group.
        ANA_GROUP_IDENTIFIER_INVALID = 0x124,
        /// Not this command set.
        IO_COMMAND_SET_NOT_SUPPORTED = 0x129,
        /// Not enabled by the controller's CC.CSS.
        IO_COMMAND_SET_NOT_ENABLED = 0x12a,
        /// No such combination of command sets.
        IO_COMMAND_SET_COMBINATION_REJECTED = 0x12b,
        /// Attributes that exclude each other.
        CONFLICTING_ATTRIBUTES = 0x180,
        /// Protection information.
        INVALID_PROTECTION_INFORMATION = 0x181,
        /// The range cannot be written.
        ATTEMPTED_WRITE_TO_READ_ONLY_RANGE = 0x182,
        /// More than the command takes.
        COMMAND_SIZE_LIMIT_EXCEEDED = 0x183,

        /// Disconnect: of an admin queue.
        DISCONNECT_INVALID_QUEUE_TYPE = 0x185,
        /// The discovery log changed: read it again.
        DISCOVER_RESTART = 0x190,
        /// Authenticate first.
        AUTHENTICATION_REQUIRED = 0x191,

        /// The media lost a write.
        WRITE_FAULT = 0x280,
        /// The media cannot be read.
        UNRECOVERED_READ_ERROR = 0x281,
        /// The guard does not fit the data.
        END_TO_END_GUARD_CHECK_ERROR = 0x282,
        /// The application tag does not fit.
        END_TO_END_APPLICATION_TAG_CHECK_ERROR = 0x283,
        /// The reference tag does not fit.
        END_TO_END_REFERENCE_TAG_CHECK_ERROR = 0x284,
        /// Compare found a difference.
        COMPARE_FAILURE = 0x285,
        /// Access is denied.
        ACCESS_DENIED = 0x286,
        /// Never written, or deallocated.
        DEALLOCATED_OR_UNWRITTEN_LOGICAL_BLOCK = 0x287,

        /// The path failed.
        INTERNAL_PATH_ERROR = 0x300,
        /// The namespace is lost through this controller, for good.
        ASYMMETRIC_ACCESS_PERSISTENT_LOSS = 0x301,
        /// The namespace is out of reach through this controller.
        ASYMMETRIC_ACCESS_INACCESSIBLE = 0x302,
        /// Access through this controller is changing.
        ASYMMETRIC_ACCESS_TRANSITION = 0x303,
        /// The controller found the path broken.
        CONTROLLER_PATHING_ERROR = 0x360,
        /// The host found the path broken.
        HOST_PATHING_ERROR = 0x370,
        /// The host gave the command up.
        COMMAND_ABORTED_BY_HOST = 0x371,
    }
}

open_enum! {
    /// What Connect is refused with, as a [`NvmeStatus`]: the codes overlap those of I/O commands
    /// (Base 2.0 figure 96).
    pub enum ConnectStatus(u16) {
        /// RECFMT.
        CONNECT_INCOMPATIBLE_FORMAT = 0x180,
        /// The controller has a host already.
        CONNECT_CONTROLLER_BUSY = 0x181,
        /// A parameter; the result says where: [`CONNECT_INVALID_DATA`] and the offset.
        CONNECT_INVALID_PARAMETERS = 0x182,
        /// Ask discovery again.
        CONNECT_RESTART_DISCOVERY = 0x183,
        /// This host may not use this subsystem.
        CONNECT_INVALID_HOST = 0x184,
    }
}

impl From<ConnectStatus> for NvmeStatus {
    fn from(status: ConnectStatus) -> NvmeStatus {
        NvmeStatus(status.0)
    }
}

impl NvmeStatus {
    /// Whether it is of status code type 3h, Path Related Status: not of the command, but of the
    /// way that it went.
    #[must_use]
    pub const fn is_path_related(self) -> bool {
        self.0 >> 8 == 3
    }
}

/// In the result of Connect with invalid parameters: the offset in the low 16 bits is one into the
/// data, not the command (Base 2.0 figure 380, IATTR).
pub const CONNECT_INVALID_DATA: u32 = 1 << 16;

/// DNR.
const DNR: u16 = 1 << 15;
/// M.
const MORE: u16 = 1 << 14;
/// SCT and SC.
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
