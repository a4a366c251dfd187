//! Refusals: the target or this side declined without a protocol violation, reported in one line to
//! the user.

use crate::scsi::initiator::UnitRefused;
use blockmux_wire::iscsi::session::LoginStatus;

/// Why a session did not fulfill its purpose although the protocol was respected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IscsiRefused {
    /// The target refused the login.
    #[error("target refused the login: {}", status_text(*.0))]
    Login(LoginStatus),
    /// The target has moved.
    #[error("target redirects to {address}{}", if *permanent { " permanently" } else { "" })]
    Moved {
        /// `TargetAddress` value: `HOST:PORT`, optionally with a portal group tag.
        address: String,
        /// The target has moved permanently.
        permanent: bool,
    },
    /// The target has moved, but the new address cannot be used.
    #[error("target at {from} redirects to {to}, {problem}")]
    BadRedirect {
        /// Address of the redirecting target.
        from: String,
        /// `TargetAddress` value of the redirection.
        to: String,
        /// Why the address is not used, as a clause.
        problem: &'static str,
    },
    /// Both sides have no authentication method in common.
    #[error("target accepts none of the offered authentication methods")]
    NoCommonAuthMethod,
    /// The target refused the answer to its CHAP challenge, so another algorithm does not help.
    #[error("target refused the login: authentication failure")]
    ChapResponse,
    /// The target failed mutual authentication.
    #[error("target failed mutual authentication: its CHAP response is wrong or missing")]
    MutualAuthFailed,
    /// The logical unit cannot be used.
    #[error(transparent)]
    Unit(#[from] UnitRefused),
}

impl IscsiRefused {
    /// Whether other CHAP credentials or algorithms may help.
    #[must_use]
    pub fn is_about_chap(&self) -> bool {
        let statuses = [LoginStatus::INITIATOR_ERROR, LoginStatus::AUTHENTICATION_FAILURE];
        match self {
            IscsiRefused::Login(status) => statuses.contains(status),
            IscsiRefused::ChapResponse => true,
            _ => false,
        }
    }

    /// Whether a later attempt may succeed with a target that accepted logins before: it has a
    /// temporary problem or was just started. Many targets listen before they are configured.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            IscsiRefused::Login(status) => matches!(
                *status,
                LoginStatus::NOT_FOUND
                    | LoginStatus::AUTHORIZATION_FAILURE
                    | LoginStatus::TARGET_ERROR
                    | LoginStatus::SERVICE_UNAVAILABLE
                    | LoginStatus::OUT_OF_RESOURCES
                    | LoginStatus::TOO_MANY_CONNECTIONS
            ),
            IscsiRefused::Unit(refused) => refused.is_retryable(),
            IscsiRefused::Moved { .. }
            | IscsiRefused::BadRedirect { .. }
            | IscsiRefused::NoCommonAuthMethod
            | IscsiRefused::ChapResponse
            | IscsiRefused::MutualAuthFailed => false,
        }
    }
}

fn status_text(status: LoginStatus) -> String {
    match status.name() {
        Some(name) => name.to_lowercase().replace('_', " "),
        None => format!("login status {:#06x}", status.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_one_line() {
        assert_eq!(
            IscsiRefused::Login(LoginStatus::NOT_FOUND).to_string(),
            "target refused the login: not found"
        );
        let unknown = IscsiRefused::Login(LoginStatus(0x02ff)).to_string();
        assert_eq!(unknown, "target refused the login: login status 0x02ff");
        let moved = IscsiRefused::Moved { address: "192.0.2.1:3260".into(), permanent: true };
        assert_eq!(moved.to_string(), "target redirects to 192.0.2.1:3260 permanently");
    }

    #[test]
    fn a_login_is_retried_only_after_a_temporary_refusal() {
        assert!(IscsiRefused::Login(LoginStatus::SERVICE_UNAVAILABLE).is_retryable());
        assert!(IscsiRefused::Login(LoginStatus::NOT_FOUND).is_retryable());
        assert!(IscsiRefused::Unit(UnitRefused::NoSuchUnit(crate::scsi::Lun::new(1))).is_retryable());
        assert!(!IscsiRefused::Login(LoginStatus::TARGET_REMOVED).is_retryable());
        assert!(!IscsiRefused::Login(LoginStatus::AUTHENTICATION_FAILURE).is_retryable());
        assert!(!IscsiRefused::MutualAuthFailed.is_retryable());
    }
}
