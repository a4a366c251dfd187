//! A controller that says no, properly, or that we do not want: not a breach of the protocol, and
//! one line for the user.

use crate::nvme::auth::AuthFailure;
use blockmux_wire::nvme::status::{ConnectStatus, NvmeStatus, StatusField};

/// Why a session ended without what was asked for, although nobody broke the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvmeRefused {
    /// It takes no such queue, or not from us.
    #[error("controller refused to connect: {}", said_of_connect(*.0))]
    Connect(StatusField),
    /// It wants us to authenticate, and we have no secret.
    #[error("controller wants DH-HMAC-CHAP, and there is no secret for it")]
    Authentication,
    /// It did not believe us, or we did not believe it.
    #[error("{0}")]
    AuthFailed(AuthFailure),
    /// A command that is needed to begin failed.
    #[error("controller failed {what}: {}", said(*.status))]
    Command {
        /// Which: "Identify Controller".
        what: &'static str,
        /// How.
        status: StatusField,
    },
    /// CSTS.CFS.
    #[error("controller says that it has failed")]
    Fatal,
    /// CSTS.RDY did not come within CAP.TO.
    #[error("controller did not become ready within {0} s")]
    NotReady(u64),
    /// There is no such namespace, or the controller does not show it to us.
    #[error("there is no namespace {0}")]
    NoNamespace(u32),
    /// The namespace of that number is another one than before, or has other blocks.
    #[error("namespace {0} is not what it was")]
    Replaced(u32),
    /// Blocks that we do not do.
    #[error(
        "namespace {nsid} has blocks of 2^{lbads} bytes with {metadata} bytes of metadata, which are not done"
    )]
    Format {
        /// Which.
        nsid: u32,
        /// log2 of a block's size.
        lbads: u8,
        /// Of each block, in bytes.
        metadata: u16,
    },
    /// One of several paths leads to another namespace than the others.
    #[error("leads to {namespace}, not to {first} as {at} does")]
    AnotherNamespace {
        /// What it leads to.
        namespace: String,
        /// What the others lead to.
        first: String,
        /// One of those.
        at: String,
    },
    /// Its discovery log was another each time that it was read.
    #[error("controller's discovery log changes all the time; try again later")]
    UnstableDiscoveryLog,
    /// It has no I/O queues.
    #[error("controller gives out no I/O queue")]
    NoQueues,
}

impl NvmeRefused {
    /// Whether a controller that took us before may well do so a little later: it is in trouble, or
    /// was just started.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            NvmeRefused::Connect(status) => !matches!(
                ConnectStatus(status.status().0),
                ConnectStatus::CONNECT_INCOMPATIBLE_FORMAT | ConnectStatus::CONNECT_INVALID_HOST
            ),
            NvmeRefused::Command { status, .. } => !status.do_not_retry(),
            NvmeRefused::Fatal
            | NvmeRefused::NotReady(_)
            | NvmeRefused::NoNamespace(_)
            // Who comes again looks closer.
            | NvmeRefused::Replaced(_)
            | NvmeRefused::NoQueues
            | NvmeRefused::UnstableDiscoveryLog => true,
            NvmeRefused::Authentication
            | NvmeRefused::AuthFailed(_)
            | NvmeRefused::Format { .. }
            | NvmeRefused::AnotherNamespace { .. } => false,
        }
    }
}

fn said(field: StatusField) -> String {
    words(field.status().name(), field)
}

fn said_of_connect(field: StatusField) -> String {
    let status = field.status();
    // Some codes of other commands are the same numbers.
    words(ConnectStatus(status.0).name().or(status.name()), field)
}

fn words(name: Option<&str>, field: StatusField) -> String {
    let NvmeStatus(number) = field.status();
    name.map_or_else(|| format!("status {number:#05x}"), |name| name.to_lowercase().replace('_', " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_one_line() {
        let refused =
            NvmeRefused::Connect(StatusField::final_one(ConnectStatus::CONNECT_INVALID_HOST.into()));
        assert_eq!(refused.to_string(), "controller refused to connect: connect invalid host");
        assert!(!refused.may_pass());
        let status = StatusField::new(NvmeStatus(0x7ff));
        let refused = NvmeRefused::Command { what: "Identify Controller", status };
        assert_eq!(refused.to_string(), "controller failed Identify Controller: status 0x7ff");
        assert!(refused.may_pass());
    }

    #[test]
    fn a_controller_that_was_just_started_may_take_us_later() {
        let not_there = ConnectStatus::CONNECT_INVALID_PARAMETERS.into();
        assert!(NvmeRefused::Connect(StatusField::final_one(not_there)).may_pass());
        assert!(NvmeRefused::NoNamespace(1).may_pass() && NvmeRefused::UnstableDiscoveryLog.may_pass());
        assert!(!NvmeRefused::Authentication.may_pass());
        assert!(!NvmeRefused::AuthFailed(AuthFailure::WrongControllerResponse).may_pass());
    }
}
