//! PDUs that open, keep and end a session: login, text, NOP, logout, asynchronous messages, Reject
//! (RFC 7143 §11.9 to §11.15, §11.17 to §11.19).

use super::{BHS_LEN, U24};
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, FromBytes, Immutable, IntoBytes, KnownLayout, U16, U32, Unaligned};

/// A login request (RFC 7143 §11.12); text follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct LoginRequest {
    /// [`super::IscsiOpcode::LOGIN_REQUEST`] and the I bit.
    pub opcode: u8,
    /// [`FLAG_TRANSIT`], [`super::FLAG_CONTINUE`], CSG and NSG ([`Stage`]).
    pub flags: u8,
    /// The highest version that the initiator speaks.
    pub version_max: u8,
    /// The lowest.
    pub version_min: u8,
    /// None.
    pub total_ahs_length: u8,
    /// In bytes.
    pub data_segment_length: U24,
    /// The initiator's part of the session's id.
    pub isid: [u8; 6],
    /// The target's part; 0 for a new session.
    pub tsih: U16<BE>,
    /// Equal in all requests of a login.
    pub initiator_task_tag: U32<BE>,
    /// Chosen by the initiator for each connection.
    pub cid: U16<BE>,
    #[doc(hidden)]
    pub reserved: [u8; 2],
    /// The number that commands begin with.
    pub cmd_sn: U32<BE>,
    /// Acknowledges status.
    pub exp_stat_sn: U32<BE>,
    #[doc(hidden)]
    pub reserved_end: [u8; 16],
}
const _: () = assert!(size_of::<LoginRequest>() == BHS_LEN);

/// A login response (RFC 7143 §11.13); text follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct LoginResponse {
    /// [`super::IscsiOpcode::LOGIN_RESPONSE`].
    pub opcode: u8,
    /// As in the request.
    pub flags: u8,
    /// The highest version that the target speaks.
    pub version_max: u8,
    /// The version that is spoken.
    pub version_active: u8,
    /// None.
    pub total_ahs_length: u8,
    /// In bytes.
    pub data_segment_length: U24,
    /// The request's.
    pub isid: [u8; 6],
    /// The session's, in the last response.
    pub tsih: U16<BE>,
    /// The request's.
    pub initiator_task_tag: U32<BE>,
    #[doc(hidden)]
    pub reserved: [u8; 4],
    /// This status' number.
    pub stat_sn: U32<BE>,
    /// The next command that is expected.
    pub exp_cmd_sn: U32<BE>,
    /// The last command that is allowed.
    pub max_cmd_sn: U32<BE>,
    /// [`LoginStatus`]: class and detail.
    pub status: U16<BE>,
    #[doc(hidden)]
    pub reserved_end: [u8; 10],
}
const _: () = assert!(size_of::<LoginResponse>() == BHS_LEN);

/// A text request (RFC 7143 §11.10); text follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TextRequest {
    /// [`super::IscsiOpcode::TEXT_REQUEST`] and the I bit.
    pub opcode: u8,
    /// F and [`super::FLAG_CONTINUE`].
    pub flags: u8,
    #[doc(hidden)]
    pub reserved: [u8; 2],
    /// None.
    pub total_ahs_length: u8,
    /// In bytes.
    pub data_segment_length: U24,
    /// The response's with that target transfer tag.
    pub lun: [u8; 8],
    /// Chosen by the initiator.
    pub initiator_task_tag: U32<BE>,
    /// The response's, or [`super::RESERVED_TAG`] to begin anew.
    pub target_transfer_tag: U32<BE>,
    /// Orders commands over a session.
    pub cmd_sn: U32<BE>,
    /// Acknowledges status.
    pub exp_stat_sn: U32<BE>,
    #[doc(hidden)]
    pub reserved_end: [u8; 16],
}
const _: () = assert!(size_of::<TextRequest>() == BHS_LEN);

/// A text response (RFC 7143 §11.11); text follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TextResponse {
    /// [`super::IscsiOpcode::TEXT_RESPONSE`].
    pub opcode: u8,
    /// F and [`super::FLAG_CONTINUE`].
    pub flags: u8,
    #[doc(hidden)]
    pub reserved: [u8; 2],
    /// None.
    pub total_ahs_length: u8,
    /// In bytes.
    pub data_segment_length: U24,
    /// Comes back with the target transfer tag.
    pub lun: [u8; 8],
    /// The request's.
    pub initiator_task_tag: U32<BE>,
    /// Comes back in the next request; [`super::RESERVED_TAG`] if there is none to come.
    pub target_transfer_tag: U32<BE>,
    /// This status' number.
    pub stat_sn: U32<BE>,
    /// The next command that is expected.
    pub exp_cmd_sn: U32<BE>,
    /// The last command that is allowed.
    pub max_cmd_sn: U32<BE>,
    #[doc(hidden)]
    pub reserved_end: [u8; 12],
}
const _: () = assert!(size_of::<TextResponse>() == BHS_LEN);

/// A ping, or its answer, from the initiator (RFC 7143 §11.18); ping data may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct NopOut {
    /// [`super::IscsiOpcode::NOP_OUT`] and the I bit.
    pub opcode: u8,
    /// F.
    pub flags: u8,
    #[doc(hidden)]
    pub reserved: [u8; 2],
    /// None.
    pub total_ahs_length: u8,
    /// In bytes.
    pub data_segment_length: U24,
    /// The ping's.
    pub lun: [u8; 8],
    /// Of a ping; [`super::RESERVED_TAG`] if no answer is wanted.
    pub initiator_task_tag: U32<BE>,
    /// Of the ping that this answers, or [`super::RESERVED_TAG`].
    pub target_transfer_tag: U32<BE>,
    /// Orders commands over a session.
    pub cmd_sn: U32<BE>,
    /// Acknowledges status.
    pub exp_stat_sn: U32<BE>,
    #[doc(hidden)]
    pub reserved_end: [u8; 16],
}
const _: () = assert!(size_of::<NopOut>() == BHS_LEN);

/// A ping, or its answer, from the target (RFC 7143 §11.19); returned ping data may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct NopIn {
    /// [`super::IscsiOpcode::NOP_IN`].
    pub opcode: u8,
    /// F.
    pub flags: u8,
    #[doc(hidden)]
    pub reserved: [u8; 2],
    /// None.
    pub total_ahs_length: u8,
    /// In bytes.
    pub data_segment_length: U24,
    /// Comes back with the target transfer tag.
    pub lun: [u8; 8],
    /// The request's, or [`super::RESERVED_TAG`].
    pub initiator_task_tag: U32<BE>,
    /// Comes back in the answer; [`super::RESERVED_TAG`] if none is wanted.
    pub target_transfer_tag: U32<BE>,
    /// This status' number; with a reserved task tag the next one's.
    pub stat_sn: U32<BE>,
    /// The next command that is expected.
    pub exp_cmd_sn: U32<BE>,
    /// The last command that is allowed.
    pub max_cmd_sn: U32<BE>,
    #[doc(hidden)]
    pub reserved_end: [u8; 12],
}
const _: () = assert!(size_of::<NopIn>() == BHS_LEN);

/// A logout request (RFC 7143 §11.14).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct LogoutRequest {
    /// [`super::IscsiOpcode::LOGOUT_REQUEST`] and the I bit.
    pub opcode: u8,
    /// F and [`LogoutReason`].
    pub reason: u8,
    #[doc(hidden)]
    pub reserved: [u8; 2],
    /// None.
    pub total_ahs_length: u8,
    /// None.
    pub data_segment_length: U24,
    #[doc(hidden)]
    pub reserved_lun: [u8; 8],
    /// Chosen by the initiator.
    pub initiator_task_tag: U32<BE>,
    /// The connection to close.
    pub cid: U16<BE>,
    #[doc(hidden)]
    pub reserved_cid: [u8; 2],
    /// Orders commands over a session.
    pub cmd_sn: U32<BE>,
    /// Acknowledges status.
    pub exp_stat_sn: U32<BE>,
    #[doc(hidden)]
    pub reserved_end: [u8; 16],
}
const _: () = assert!(size_of::<LogoutRequest>() == BHS_LEN);

/// A logout response (RFC 7143 §11.15).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct LogoutResponse {
    /// [`super::IscsiOpcode::LOGOUT_RESPONSE`].
    pub opcode: u8,
    /// F.
    pub flags: u8,
    /// [`LogoutResult`].
    pub response: u8,
    #[doc(hidden)]
    pub reserved: u8,
    /// None.
    pub total_ahs_length: u8,
    /// None.
    pub data_segment_length: U24,
    #[doc(hidden)]
    pub reserved_lun: [u8; 8],
    /// The request's.
    pub initiator_task_tag: U32<BE>,
    #[doc(hidden)]
    pub reserved_tag: [u8; 4],
    /// This status' number.
    pub stat_sn: U32<BE>,
    /// The next command that is expected.
    pub exp_cmd_sn: U32<BE>,
    /// The last command that is allowed.
    pub max_cmd_sn: U32<BE>,
    #[doc(hidden)]
    pub reserved_middle: [u8; 4],
    /// How soon a connection may be reinstated, in seconds.
    pub time2wait: U16<BE>,
    /// How long tasks are kept after that, in seconds.
    pub time2retain: U16<BE>,
    #[doc(hidden)]
    pub reserved_end: [u8; 4],
}
const _: () = assert!(size_of::<LogoutResponse>() == BHS_LEN);

/// An asynchronous message (RFC 7143 §11.9); sense data may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct AsyncMessage {
    /// [`super::IscsiOpcode::ASYNC_MESSAGE`].
    pub opcode: u8,
    /// F.
    pub flags: u8,
    #[doc(hidden)]
    pub reserved: [u8; 2],
    /// None.
    pub total_ahs_length: u8,
    /// In bytes.
    pub data_segment_length: U24,
    /// The logical unit that it is about.
    pub lun: [u8; 8],
    /// [`super::RESERVED_TAG`].
    pub initiator_task_tag: U32<BE>,
    #[doc(hidden)]
    pub reserved_tag: [u8; 4],
    /// This status' number.
    pub stat_sn: U32<BE>,
    /// The next command that is expected.
    pub exp_cmd_sn: U32<BE>,
    /// The last command that is allowed.
    pub max_cmd_sn: U32<BE>,
    /// [`AsyncEvent`].
    pub async_event: u8,
    /// For events that vendors define.
    pub async_vcode: u8,
    /// What the event says.
    pub parameter1: U16<BE>,
    /// What the event says.
    pub parameter2: U16<BE>,
    /// What the event says.
    pub parameter3: U16<BE>,
    #[doc(hidden)]
    pub reserved_end: [u8; 4],
}
const _: () = assert!(size_of::<AsyncMessage>() == BHS_LEN);

/// A refusal of a PDU (RFC 7143 §11.17); the refused header follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Reject {
    /// [`super::IscsiOpcode::REJECT`].
    pub opcode: u8,
    /// F.
    pub flags: u8,
    /// [`RejectReason`].
    pub reason: u8,
    #[doc(hidden)]
    pub reserved: u8,
    /// None.
    pub total_ahs_length: u8,
    /// In bytes.
    pub data_segment_length: U24,
    #[doc(hidden)]
    pub reserved_lun: [u8; 8],
    /// [`super::RESERVED_TAG`].
    pub initiator_task_tag: U32<BE>,
    #[doc(hidden)]
    pub reserved_tag: [u8; 4],
    /// This status' number.
    pub stat_sn: U32<BE>,
    /// The next command that is expected.
    pub exp_cmd_sn: U32<BE>,
    /// The last command that is allowed.
    pub max_cmd_sn: U32<BE>,
    /// What the reason says.
    pub data_sn: U32<BE>,
    #[doc(hidden)]
    pub reserved_end: [u8; 8],
}
const _: () = assert!(size_of::<Reject>() == BHS_LEN);

open_enum! {
    /// The stages of a login, CSG and NSG (RFC 7143 §11.12.3).
    pub enum Stage(u8) {
        /// Who are you?
        SECURITY_NEGOTIATION = 0,
        /// How shall we talk?
        LOGIN_OPERATIONAL_NEGOTIATION = 1,
        /// The login is over.
        FULL_FEATURE_PHASE = 3,
    }
}

open_enum! {
    /// How a login goes: class and detail (RFC 7143 §11.13.5).
    pub enum LoginStatus(u16) {
        /// Goes on, or done.
        SUCCESS = 0x0000,
        /// The target is elsewhere for now.
        TARGET_MOVED_TEMPORARILY = 0x0101,
        /// The target is elsewhere for good.
        TARGET_MOVED_PERMANENTLY = 0x0102,
        /// The initiator did something wrong.
        INITIATOR_ERROR = 0x0200,
        /// Wrong or missing authentication.
        AUTHENTICATION_FAILURE = 0x0201,
        /// This initiator may not use this target.
        AUTHORIZATION_FAILURE = 0x0202,
        /// No such target.
        NOT_FOUND = 0x0203,
        /// The target is gone for good.
        TARGET_REMOVED = 0x0204,
        /// No version in common.
        UNSUPPORTED_VERSION = 0x0205,
        /// Too many connections.
        TOO_MANY_CONNECTIONS = 0x0206,
        /// A key that is needed is not there.
        MISSING_PARAMETER = 0x0207,
        /// The session does not take this connection.
        CANNOT_INCLUDE_IN_SESSION = 0x0208,
        /// No such type of session.
        SESSION_TYPE_NOT_SUPPORTED = 0x0209,
        /// No such session.
        SESSION_DOES_NOT_EXIST = 0x020a,
        /// This request does not fit here.
        INVALID_DURING_LOGIN = 0x020b,
        /// The target failed.
        TARGET_ERROR = 0x0300,
        /// Not now.
        SERVICE_UNAVAILABLE = 0x0301,
        /// No room for another session.
        OUT_OF_RESOURCES = 0x0302,
    }
}

open_enum! {
    /// What to log out (RFC 7143 §11.14.1).
    pub enum LogoutReason(u8) {
        /// All connections.
        CLOSE_SESSION = 0,
        /// One connection.
        CLOSE_CONNECTION = 1,
        /// One connection, whose tasks go on elsewhere.
        REMOVE_CONNECTION_FOR_RECOVERY = 2,
    }
}

open_enum! {
    /// How a logout ended (RFC 7143 §11.15.1).
    pub enum LogoutResult(u8) {
        /// Closed.
        CLOSED_SUCCESSFULLY = 0,
        /// No connection with this CID.
        CID_NOT_FOUND = 1,
        /// Connections cannot be recovered.
        CONNECTION_RECOVERY_NOT_SUPPORTED = 2,
        /// Something failed.
        CLEANUP_FAILED = 3,
    }
}

open_enum! {
    /// What happened (RFC 7143 §11.9.1).
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
        /// What a vendor defines.
        VENDOR_SPECIFIC = 255,
    }
}

open_enum! {
    /// Why a PDU is refused (RFC 7143 §11.17.1).
    pub enum RejectReason(u8) {
        /// Its data digest is wrong.
        DATA_DIGEST_ERROR = 0x02,
        /// SNACK is not supported.
        SNACK_REJECT = 0x03,
        /// It does not belong here.
        PROTOCOL_ERROR = 0x04,
        /// Not a command of this target.
        COMMAND_NOT_SUPPORTED = 0x05,
        /// Too many immediate commands.
        IMMEDIATE_COMMAND_REJECT = 0x06,
        /// The task is still at work.
        TASK_IN_PROGRESS = 0x07,
        /// Nothing to acknowledge.
        INVALID_DATA_ACK = 0x08,
        /// A field makes no sense.
        INVALID_PDU_FIELD = 0x09,
        /// Out of resources.
        LONG_OPERATION_REJECT = 0x0a,
        /// Log out first.
        WAITING_FOR_LOGOUT = 0x0c,
    }
}

/// T, in a login PDU: goes on to the next stage.
pub const FLAG_TRANSIT: u8 = 0x80;
/// The reason of a logout request, without F.
pub const REASON_MASK: u8 = 0x7f;

/// The only version there is (RFC 7143 §11.12.4).
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

/// CSG and NSG as a login PDU's flags have them.
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
