//! A target that says no, properly, or that we do not want: not a breach of the protocol, and one
//! line for the user.

use crate::scsi::initiator::UnitRefused;
use blockmux_wire::iscsi::session::LoginStatus;

/// Why a session ended without what was asked for, although nobody broke the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IscsiRefused {
    /// The target ended the login.
    #[error("target refused the login: {}", said(*.0))]
    Login(LoginStatus),
    /// The target is elsewhere.
    #[error("target has moved to {address}{}", if *permanent { " for good" } else { "" })]
    Moved {
        /// As `TargetAddress` has it: `HOST:PORT`, maybe with a portal group.
        address: String,
        /// For good.
        permanent: bool,
    },
    /// The target is elsewhere, but that cannot be where it is.
    #[error("target at {from} says that it has moved to {to}, {problem}")]
    Lost {
        /// Where that was said.
        from: String,
        /// As `TargetAddress` has it.
        to: String,
        /// Why nobody goes there, as half a sentence.
        problem: &'static str,
    },
    /// Of several paths to one unit, this one leads to another.
    #[error("leads to {unit}, not to {first} as {at} does")]
    AnotherUnit {
        /// What it leads to.
        unit: String,
        /// What the first path leads to.
        first: String,
        /// Where that is.
        at: String,
    },
    /// There is no way to authenticate that both sides take.
    #[error("target takes none of the ways to authenticate that were offered")]
    NoMethod,
    /// The target did not prove that it is the right one.
    #[error("target did not prove that it knows its own secret")]
    NotProved,
    /// The logical unit is none for us.
    #[error(transparent)]
    Unit(#[from] UnitRefused),
}

impl IscsiRefused {
    /// Whether a target that took us before may well do so a little later: it is in trouble, or was
    /// just started, and many listen before they have been told what they serve and to whom.
    #[must_use]
    pub fn may_pass(&self) -> bool {
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
            IscsiRefused::Unit(refused) => refused.may_pass(),
            IscsiRefused::Moved { .. }
            | IscsiRefused::Lost { .. }
            | IscsiRefused::AnotherUnit { .. }
            | IscsiRefused::NoMethod
            | IscsiRefused::NotProved => false,
        }
    }
}

fn said(status: LoginStatus) -> String {
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
        assert_eq!(moved.to_string(), "target has moved to 192.0.2.1:3260 for good");
    }

    #[test]
    fn a_target_in_trouble_or_just_started_may_take_us_later() {
        assert!(IscsiRefused::Login(LoginStatus::SERVICE_UNAVAILABLE).may_pass());
        assert!(IscsiRefused::Login(LoginStatus::NOT_FOUND).may_pass());
        assert!(IscsiRefused::Unit(UnitRefused::NoSuchUnit(crate::scsi::Lun::new(1))).may_pass());
        assert!(!IscsiRefused::Login(LoginStatus::TARGET_REMOVED).may_pass());
        assert!(!IscsiRefused::Login(LoginStatus::AUTHENTICATION_FAILURE).may_pass());
        assert!(!IscsiRefused::NotProved.may_pass());
    }
}
