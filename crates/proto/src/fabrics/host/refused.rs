//! Failures of a session without a protocol violation: the controller refuses the host, or the host
//! cannot use the controller. Each is one line for the user.

use crate::nvme::auth::{AuthAlgorithms, AuthFailure};
use blockmux_wire::nvme::status::{ConnectStatus, NvmeStatus, StatusField};

/// Reason for which a session failed without a protocol violation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvmeRefused {
    /// The controller refused Connect.
    #[error("controller refused to connect: {}", connect_status_text(*.0))]
    Connect(StatusField),
    /// The controller requires authentication, and the host has no secret.
    #[error("controller requires DH-HMAC-CHAP, and there is no secret")]
    Authentication,
    /// Authentication failed on one of the sides.
    #[error("{failure}{}", in_brackets(*.algorithms))]
    AuthFailed {
        /// The reason.
        failure: AuthFailure,
        /// What the controller had chosen; `None` before its challenge.
        algorithms: Option<AuthAlgorithms>,
    },
    /// A command of the initialization failed.
    #[error("controller failed {what}: {}", status_text(*.status))]
    Command {
        /// The command, for example "Identify Controller".
        what: &'static str,
        /// Its status.
        status: StatusField,
    },
    /// CSTS.CFS is set.
    #[error("controller reports a fatal status")]
    Fatal,
    /// CSTS.RDY was not set within CAP.TO.
    #[error("controller did not become ready within {0} s")]
    NotReady(u64),
    /// The namespace does not exist or is not visible to this host.
    #[error("there is no namespace {0}")]
    NoNamespace(u32),
    /// The namespace was replaced by another one, or its block size has changed.
    #[error("namespace {0} was replaced")]
    Replaced(u32),
    /// The block format is not supported.
    #[error(
        "namespace {nsid} has blocks of 2^{lbads} bytes with {metadata} bytes of metadata, which is not supported"
    )]
    Format {
        /// Namespace identifier.
        nsid: u32,
        /// log2 of the block size in bytes.
        lbads: u8,
        /// Metadata of each block, in bytes.
        metadata: u16,
    },
    /// A path leads to another namespace than the others.
    #[error("leads to {namespace}, not to {first} as {at} does")]
    AnotherNamespace {
        /// Identity of the namespace on this path.
        namespace: String,
        /// Identity of the namespace on the other paths.
        first: String,
        /// Address of one of the other paths.
        at: String,
    },
    /// The discovery log page changed during each read.
    #[error("controller's discovery log kept changing; try again later")]
    UnstableDiscoveryLog,
    /// The controller allocates no I/O queues.
    #[error("controller allocates no I/O queue")]
    NoQueues,
    /// The controller does not support keyed SGLs, which NVMe/RDMA needs; its SGLS.
    #[error("controller supports no keyed SGLs (SGLS is {0:#x}), which NVMe/RDMA requires")]
    NoKeyedSgls(u32),
}

impl NvmeRefused {
    /// The failure of an authentication before a challenge.
    pub(crate) fn unchallenged(failure: AuthFailure) -> NvmeRefused {
        NvmeRefused::AuthFailed { failure, algorithms: None }
    }

    /// Why the authentication failed, if it did.
    #[must_use]
    pub fn auth_failure(&self) -> Option<AuthFailure> {
        let NvmeRefused::AuthFailed { failure, .. } = self else { return None };
        Some(*failure)
    }

    /// Whether a new connection may succeed: the refusal can be temporary, for example while a
    /// controller restarts.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            NvmeRefused::Connect(status) => !matches!(
                ConnectStatus(status.status().0),
                ConnectStatus::CONNECT_INCOMPATIBLE_FORMAT | ConnectStatus::CONNECT_INVALID_HOST
            ),
            NvmeRefused::Command { status, .. } => !status.do_not_retry(),
            NvmeRefused::Fatal
            | NvmeRefused::NotReady(_)
            | NvmeRefused::NoNamespace(_)
            // A new connection identifies the namespace again.
            | NvmeRefused::Replaced(_)
            | NvmeRefused::NoQueues
            | NvmeRefused::UnstableDiscoveryLog
            | NvmeRefused::AuthFailed { failure: AuthFailure::Closed, .. } => true,
            NvmeRefused::Authentication
            | NvmeRefused::AuthFailed { .. }
            | NvmeRefused::Format { .. }
            | NvmeRefused::NoKeyedSgls(_)
            | NvmeRefused::AnotherNamespace { .. } => false,
        }
    }
}

fn in_brackets(algorithms: Option<AuthAlgorithms>) -> String {
    algorithms.map_or_else(String::new, |algorithms| format!(" ({algorithms})"))
}

fn status_text(field: StatusField) -> String {
    named_status(field.status().name(), field)
}

fn connect_status_text(field: StatusField) -> String {
    let status = field.status();
    // The meaning of command-specific codes depends on the command.
    named_status(ConnectStatus(status.0).name().or(status.name()), field)
}

fn named_status(name: Option<&str>, field: StatusField) -> String {
    let NvmeStatus(number) = field.status();
    name.map_or_else(|| format!("status {number:#05x}"), |name| name.to_lowercase().replace('_', " "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvme::auth::{DhGroup, Hash};

    #[test]
    fn a_refusal_is_one_line() {
        let refused =
            NvmeRefused::Connect(StatusField::final_one(ConnectStatus::CONNECT_INVALID_HOST.into()));
        assert_eq!(refused.to_string(), "controller refused to connect: connect invalid host");
        assert!(!refused.is_retryable());
        let status = StatusField::new(NvmeStatus(0x7ff));
        let refused = NvmeRefused::Command { what: "Identify Controller", status };
        assert_eq!(refused.to_string(), "controller failed Identify Controller: status 0x7ff");
        assert!(refused.is_retryable());
    }

    #[test]
    fn a_restarted_controller_may_accept_the_host_later() {
        let not_there = ConnectStatus::CONNECT_INVALID_PARAMETERS.into();
        assert!(NvmeRefused::Connect(StatusField::final_one(not_there)).is_retryable());
        assert!(
            NvmeRefused::NoNamespace(1).is_retryable() && NvmeRefused::UnstableDiscoveryLog.is_retryable()
        );
        assert!(!NvmeRefused::Authentication.is_retryable());
        let algorithms = Some(AuthAlgorithms { hash: Hash::Sha384, group: DhGroup::Ffdhe3072 });
        let refused = NvmeRefused::AuthFailed { failure: AuthFailure::WrongControllerResponse, algorithms };
        assert!(!refused.is_retryable());
        let expected = "controller failed to authenticate: wrong response (hmac(sha384), group ffdhe3072)";
        assert_eq!(refused.to_string(), expected);
    }
}
