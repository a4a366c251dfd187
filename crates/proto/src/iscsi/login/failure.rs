//! Login failures and their status codes (RFC 7143 §11.13.5).

use super::operational::NegotiationError;
use blockmux_wire::iscsi::session::LoginStatus;

/// A login failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::iscsi) struct LoginFailure {
    pub(in crate::iscsi) status: LoginStatus,
    /// The initiator's error, as a predicate for messages ("sent an unknown key").
    pub(in crate::iscsi) what: &'static str,
    /// The target's new address, if it has moved.
    pub(super) address: Option<String>,
}

impl From<&NegotiationError> for LoginFailure {
    fn from(error: &NegotiationError) -> LoginFailure {
        initiator_error(match error {
            NegotiationError::Repeated => "negotiated a key twice",
            NegotiationError::ImpossibleAnswer => "gave an answer that the proposed value does not allow",
            NegotiationError::NotNow => "negotiated a key outside a login",
            NegotiationError::BadDeclaration => "declared a MaxRecvDataSegmentLength out of bounds",
            NegotiationError::Required => "did not agree to a digest that this target requires",
            NegotiationError::FirstBurstAboveMaxBurst => "proposed FirstBurstLength above MaxBurstLength",
            NegotiationError::NotIser => "did not negotiate iSER over RDMA",
        })
    }
}

impl LoginFailure {
    /// A failure that the initiator did not cause.
    pub(in crate::iscsi) fn of(status: LoginStatus) -> LoginFailure {
        failure(status, "logged in while the target is stopping")
    }
}

/// There is no session with this TSIH, or it belongs to another initiator.
pub(in crate::iscsi) fn no_such_session() -> LoginFailure {
    failure(LoginStatus::SESSION_DOES_NOT_EXIST, "named an unknown session")
}

/// The session already has MaxConnections connections.
pub(in crate::iscsi) fn too_many_connections() -> LoginFailure {
    failure(LoginStatus::TOO_MANY_CONNECTIONS, "made more connections than MaxConnections")
}

pub(super) fn failure(status: LoginStatus, what: &'static str) -> LoginFailure {
    LoginFailure { status, what, address: None }
}

pub(super) fn initiator_error(what: &'static str) -> LoginFailure {
    failure(LoginStatus::INITIATOR_ERROR, what)
}

pub(super) fn authentication_failure(what: &'static str) -> LoginFailure {
    failure(LoginStatus::AUTHENTICATION_FAILURE, what)
}
