//! PDUs of session management: login, text, NOP, logout, asynchronous messages, Reject (RFC 7143
//! §11.9 to §11.15, §11.17 to §11.19).

use super::pdus;
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, U16, U32};

pdus! {
    /// Login Request PDU (RFC 7143 §11.12); text follows.
    pub struct IscsiLoginRequest {
        /// [`FLAG_TRANSIT`], [`super::FLAG_CONTINUE`], CSG and NSG ([`Stage`]).
        pub flags: u8,
        /// Version-max: the highest version that the initiator supports.
        pub version_max: u8,
        /// Version-min: the lowest version that the initiator supports.
        pub version_min: u8,
        lengths,
        /// ISID: the initiator's part of the session ID.
        pub isid: [u8; 6],
        /// TSIH: the target's part of the session ID; 0 for a new session.
        pub tsih: U16<BE>,
        /// Initiator Task Tag, equal in all requests of a login.
        pub initiator_task_tag: U32<BE>,
        /// CID, chosen by the initiator for each connection.
        pub cid: U16<BE>,
        pub reserved: [u8; 2] = 0,
        request_numbers,
        pub reserved_end: [u8; 16] = 0,
    }

    /// Login Response PDU (RFC 7143 §11.13); text follows.
    pub struct IscsiLoginResponse {
        /// [`FLAG_TRANSIT`], [`super::FLAG_CONTINUE`], CSG and NSG ([`Stage`]).
        pub flags: u8,
        /// Version-max: the highest version that the target supports.
        pub version_max: u8,
        /// Version-active: the version in use.
        pub version_active: u8,
        lengths,
        /// ISID of the request.
        pub isid: [u8; 6],
        /// TSIH of the session, in the last response.
        pub tsih: U16<BE>,
        /// Initiator Task Tag of the request.
        pub initiator_task_tag: U32<BE>,
        pub reserved: [u8; 4] = 0,
        response_numbers,
        /// [`LoginStatus`]: class and detail.
        pub status: U16<BE>,
        pub reserved_end: [u8; 10] = 0,
    }

    /// Text Request PDU (RFC 7143 §11.10); text follows.
    pub struct TextRequest {
        /// F and [`super::FLAG_CONTINUE`].
        pub flags: u8,
        pub reserved: [u8; 2] = 0,
        lengths,
        /// LUN of the response with this target transfer tag.
        pub lun: [u8; 8],
        /// Initiator Task Tag, chosen by the initiator.
        pub initiator_task_tag: U32<BE>,
        /// Target Transfer Tag of the response, or [`super::RESERVED_TAG`] to start a negotiation.
        pub target_transfer_tag: U32<BE>,
        request_numbers,
        pub reserved_end: [u8; 16] = 0,
    }

    /// Text Response PDU (RFC 7143 §11.11); text follows.
    pub struct TextResponse {
        /// F and [`super::FLAG_CONTINUE`].
        pub flags: u8,
        pub reserved: [u8; 2] = 0,
        lengths,
        /// LUN that the initiator returns with the target transfer tag.
        pub lun: [u8; 8],
        /// Initiator Task Tag of the request.
        pub initiator_task_tag: U32<BE>,
        /// Target Transfer Tag for the next request; [`super::RESERVED_TAG`] at the end.
        pub target_transfer_tag: U32<BE>,
        response_numbers,
        pub reserved_end: [u8; 12] = 0,
    }

    /// NOP-Out PDU: a ping of the initiator, or a reply (RFC 7143 §11.18); ping data may follow.
    pub struct NopOut {
        /// F.
        pub flags: u8,
        pub reserved: [u8; 2] = 0,
        lengths,
        /// LUN of the ping.
        pub lun: [u8; 8],
        /// Initiator Task Tag of a ping; [`super::RESERVED_TAG`] if no reply is expected.
        pub initiator_task_tag: U32<BE>,
        /// Target Transfer Tag of the ping that this answers, or [`super::RESERVED_TAG`].
        pub target_transfer_tag: U32<BE>,
        request_numbers,
        pub reserved_end: [u8; 16] = 0,
    }

    /// NOP-In PDU: a ping of the target, or a reply (RFC 7143 §11.19); returned ping data may
    /// follow.
    pub struct NopIn {
        /// F.
        pub flags: u8,
        pub reserved: [u8; 2] = 0,
        lengths,
        /// LUN that the initiator returns with the target transfer tag.
        pub lun: [u8; 8],
        /// Initiator Task Tag of the request, or [`super::RESERVED_TAG`].
        pub initiator_task_tag: U32<BE>,
        /// Target Transfer Tag that the reply returns; [`super::RESERVED_TAG`] if no reply is
        /// expected.
        pub target_transfer_tag: U32<BE>,
        response_numbers,
        pub reserved_end: [u8; 12] = 0,
    }

    /// Logout Request PDU (RFC 7143 §11.14).
    pub struct LogoutRequest {
        /// F and [`LogoutReasonCode`].
        pub reason: u8,
        pub reserved: [u8; 2] = 0,
        lengths,
        pub reserved_lun: [u8; 8] = 0,
        /// Initiator Task Tag, chosen by the initiator.
        pub initiator_task_tag: U32<BE>,
        /// CID of the connection to close.
        pub cid: U16<BE>,
        pub reserved_cid: [u8; 2] = 0,
        request_numbers,
        pub reserved_end: [u8; 16] = 0,
    }

    /// Logout Response PDU (RFC 7143 §11.15).
    pub struct LogoutResponse {
        /// F.
        pub flags: u8,
        /// [`LogoutResult`].
        pub response: u8,
        pub reserved: u8 = 0,
        lengths,
        pub reserved_lun: [u8; 8] = 0,
        /// Initiator Task Tag of the request.
        pub initiator_task_tag: U32<BE>,
        pub reserved_tag: [u8; 4] = 0,
        response_numbers,
        pub reserved_middle: [u8; 4] = 0,
        /// Time2Wait: time before a connection may be reinstated, in seconds.
        pub time2wait: U16<BE>,
        /// Time2Retain: how long tasks are retained after that, in seconds.
        pub time2retain: U16<BE>,
        pub reserved_end: [u8; 4] = 0,
    }

    /// Asynchronous Message PDU (RFC 7143 §11.9); sense data may follow.
    pub struct AsyncMessage {
        /// F.
        pub flags: u8,
        pub reserved: [u8; 2] = 0,
        lengths,
        /// LUN of the affected logical unit.
        pub lun: [u8; 8],
        /// [`super::RESERVED_TAG`].
        pub initiator_task_tag: U32<BE>,
        pub reserved_tag: [u8; 4] = 0,
        response_numbers,
        /// [`AsyncEvent`].
        pub async_event: u8,
        /// AsyncVCode, for vendor-specific events.
        pub async_vcode: u8,
        /// Parameter1; its meaning depends on the event.
        pub parameter1: U16<BE>,
        /// Parameter2; its meaning depends on the event.
        pub parameter2: U16<BE>,
        /// Parameter3; its meaning depends on the event.
        pub parameter3: U16<BE>,
        pub reserved_end: [u8; 4] = 0,
    }

    /// Reject PDU (RFC 7143 §11.17); the rejected header follows.
    pub struct Reject {
        /// F.
        pub flags: u8,
        /// [`RejectReason`].
        pub reason: u8,
        pub reserved: u8 = 0,
        lengths,
        pub reserved_lun: [u8; 8] = 0,
        /// [`super::RESERVED_TAG`].
        pub initiator_task_tag: U32<BE>,
        pub reserved_tag: [u8; 4] = 0,
        response_numbers,
        /// DataSN or R2TSN, depending on the reason.
        pub data_sn: U32<BE>,
        pub reserved_end: [u8; 8] = 0,
    }
}

open_enum! {
    /// The stages of a login, CSG and NSG (RFC 7143 §11.12.3).
    pub enum Stage(u8) {
        /// Security negotiation: authentication.
        SECURITY_NEGOTIATION = 0,
        /// Operational negotiation: parameters.
        LOGIN_OPERATIONAL_NEGOTIATION = 1,
        /// Full feature phase, after the login.
        FULL_FEATURE_PHASE = 3,
    }

    /// Status class and detail of a login (RFC 7143 §11.13.5).
    pub enum LoginStatus(u16) {
        /// The login continues or has succeeded.
        SUCCESS = 0x0000,
        /// The target has moved temporarily.
        TARGET_MOVED_TEMPORARILY = 0x0101,
        /// The target has moved permanently.
        TARGET_MOVED_PERMANENTLY = 0x0102,
        /// Initiator error.
        INITIATOR_ERROR = 0x0200,
        /// Authentication failed or is missing.
        AUTHENTICATION_FAILURE = 0x0201,
        /// This initiator may not use this target.
        AUTHORIZATION_FAILURE = 0x0202,
        /// No such target.
        NOT_FOUND = 0x0203,
        /// The target was removed permanently.
        TARGET_REMOVED = 0x0204,
        /// No version in common.
        UNSUPPORTED_VERSION = 0x0205,
        /// Too many connections.
        TOO_MANY_CONNECTIONS = 0x0206,
        /// A required parameter is missing.
        MISSING_PARAMETER = 0x0207,
        /// The connection cannot be added to the session.
        CANNOT_INCLUDE_IN_SESSION = 0x0208,
        /// The session type is not supported.
        SESSION_TYPE_NOT_SUPPORTED = 0x0209,
        /// No such session.
        SESSION_DOES_NOT_EXIST = 0x020a,
        /// The request is invalid during login.
        INVALID_DURING_LOGIN = 0x020b,
        /// The target failed.
        TARGET_ERROR = 0x0300,
        /// The service is unavailable.
        SERVICE_UNAVAILABLE = 0x0301,
        /// The target is out of resources.
        OUT_OF_RESOURCES = 0x0302,
    }

    /// Reason code of a logout (RFC 7143 §11.14.1).
    pub enum LogoutReasonCode(u8) {
        /// Close all connections of the session.
        CLOSE_SESSION = 0,
        /// Close one connection.
        CLOSE_CONNECTION = 1,
        /// Remove one connection; its tasks will be reassigned.
        REMOVE_CONNECTION_FOR_RECOVERY = 2,
    }

    /// Response of a logout (RFC 7143 §11.15.1).
    pub enum LogoutResult(u8) {
        /// Closed.
        CLOSED_SUCCESSFULLY = 0,
        /// No connection with this CID.
        CID_NOT_FOUND = 1,
        /// Connection recovery is not supported.
        CONNECTION_RECOVERY_NOT_SUPPORTED = 2,
        /// The cleanup failed.
        CLEANUP_FAILED = 3,
    }

    /// Type of an asynchronous event (RFC 7143 §11.9.1).
    pub enum AsyncEvent(u8) {
        /// Sense data follows.
        SCSI_ASYNC_EVENT = 0,
        /// Log out within Parameter3 seconds.
        LOGOUT_REQUEST = 1,
        /// Connection Parameter1 will be dropped.
        CONNECTION_DROP = 2,
        /// All connections will be dropped.
        SESSION_DROP = 3,
        /// Negotiate again within Parameter3 seconds.
        NEGOTIATION_REQUEST = 4,
        /// Tasks were aborted by another initiator (RFC 7143 §11.9.1, FastAbort).
        TASK_TERMINATION = 5,
        /// Vendor-specific event.
        VENDOR_SPECIFIC = 255,
    }

    /// Why a PDU is rejected (RFC 7143 §11.17.1).
    pub enum RejectReason(u8) {
        /// The data digest is wrong.
        DATA_DIGEST_ERROR = 0x02,
        /// SNACK is not supported.
        SNACK_REJECT = 0x03,
        /// The PDU violates the protocol.
        PROTOCOL_ERROR = 0x04,
        /// The command is not supported.
        COMMAND_NOT_SUPPORTED = 0x05,
        /// Too many immediate commands.
        IMMEDIATE_COMMAND_REJECT = 0x06,
        /// The task is still in progress.
        TASK_IN_PROGRESS = 0x07,
        /// The data acknowledgement is invalid.
        INVALID_DATA_ACK = 0x08,
        /// A field is invalid.
        INVALID_PDU_FIELD = 0x09,
        /// Out of resources.
        LONG_OPERATION_REJECT = 0x0a,
        /// The initiator must log out first.
        WAITING_FOR_LOGOUT = 0x0c,
    }
}

/// T, in a login PDU: transit to the next stage.
pub const FLAG_TRANSIT: u8 = 0x80;
/// Mask of the reason code in a logout request.
pub const REASON_MASK: u8 = 0x7f;

/// The only defined version (RFC 7143 §11.12.4).
pub const VERSION: u8 = 0;

/// CSG of a login PDU's flags.
#[must_use]
pub const fn current_stage(flags: u8) -> Stage {
    Stage((flags >> 2) & 3)
}

/// NSG of a login PDU's flags.
#[must_use]
pub const fn next_stage(flags: u8) -> Stage {
    Stage(flags & 3)
}

/// Encodes CSG and NSG for a login PDU's flags.
#[must_use]
pub const fn stages(current: Stage, next: Stage) -> u8 {
    (current.0 & 3) << 2 | (next.0 & 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_two_bits_each() {
        let flags = FLAG_TRANSIT | stages(Stage::LOGIN_OPERATIONAL_NEGOTIATION, Stage::FULL_FEATURE_PHASE);
        assert_eq!(flags, 0x87);
        assert_eq!(current_stage(flags), Stage::LOGIN_OPERATIONAL_NEGOTIATION);
        assert_eq!(next_stage(flags), Stage::FULL_FEATURE_PHASE);
    }
}
