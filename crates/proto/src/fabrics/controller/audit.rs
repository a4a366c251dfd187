//! Audit events of a queue. The admin queue represents the host's association: Linux closes the
//! sockets of I/O queues before it shuts the controller down, so their ends alone say nothing.

use super::ControllerQueue;
use super::connect::ConnectedQueue;
use super::transport::FabricsTransport;
use crate::driver::audit_event::{AuditEvent, Login, bounded};
use crate::nvme::NvmeOutcome;
use blockmux_volume::SgList;
use blockmux_wire::nvme::opcode::NvmOpcode;
use blockmux_wire::nvme::status::{ConnectStatus, NvmeStatus};
use blockmux_wire::nvmeof::fabrics::{CONNECT_DATA_LEN, ConnectData, PropertyCommand};
use zerocopy::{FromZeros, IntoBytes};

impl<T: FabricsTransport> ControllerQueue<T> {
    /// Records that a host has connected a queue and may use it.
    #[cold]
    pub(super) fn audit_login(&mut self) {
        let Some(login) = self.claimed_login() else { return };
        self.audit.push(match &self.queue {
            Some(ConnectedQueue::Io(_)) => AuditEvent::Joined(login),
            _ => AuditEvent::Login(login),
        });
    }

    /// The host and subsystem of Connect, whether the host is authenticated or not.
    fn claimed_login(&self) -> Option<Login> {
        let queue = self.queue.as_ref()?;
        let login = login::<T>(queue.host().as_str(), queue.subsystem().nqn.as_str());
        Some(Login { is_authenticated: self.has_proof(), ..login })
    }

    /// Records that an authenticated host gets no queue: it has too many controllers, or its
    /// controller has ended or has the queue already.
    #[cold]
    pub(super) fn audit_not_entered(&mut self) {
        let Some(login) = self.claimed_login() else { return };
        let reason = match &self.queue {
            Some(ConnectedQueue::Admin(_)) => "the host or the subsystem has too many controllers",
            _ => "its controller ended during the authentication, or got the queue on another connection",
        };
        self.audit.push(AuditEvent::Refused { login, reason: reason.into() });
    }

    /// Records that Connect was refused.
    #[cold]
    pub(super) fn audit_refusal(&mut self, data: &SgList, outcome: &NvmeOutcome) {
        let mut connect_data = ConnectData::new_zeroed();
        if data.len() == CONNECT_DATA_LEN {
            data.copy_to(connect_data.as_mut_bytes());
        }
        let login = login::<T>(&text(&connect_data.hostnqn), &text(&connect_data.subnqn));
        let is = |status: ConnectStatus| outcome.status.status() == NvmeStatus::from(status);
        let reason = match outcome.status {
            _ if is(ConnectStatus::CONNECT_INVALID_HOST) => {
                "the subsystem refuses this host: its name or its address is not in an allow-list, or it connected without the required TLS"
            }
            _ if is(ConnectStatus::CONNECT_INVALID_PARAMETERS) => {
                "Connect names no subsystem of this port, or another field is invalid"
            }
            _ => "Connect failed",
        };
        self.audit.push(AuditEvent::Refused { login, reason: reason.into() });
    }

    /// Records that a host failed to authenticate.
    #[cold]
    pub(super) fn audit_failed_authentication(&mut self) {
        let Some(login) = self.claimed_login() else { return };
        let failure = self.authenticator.as_ref().map_or_else(String::new, |own| own.why_failed());
        self.audit
            .push(AuditEvent::Refused { login, reason: format!("DH-HMAC-CHAP failed: {failure}").into() });
    }

    /// Records a shutdown that the host requested by Property Set.
    pub(super) fn audit_property(&mut self, set: &PropertyCommand) {
        if set.ofst.get() == CC && set.value.get() & CC_SHN != 0 {
            self.audit.push(AuditEvent::Logout { reason: "the host shut its controller down" });
        }
    }

    /// Records the end of a command that may have changed reservations.
    #[cold]
    pub(super) fn audit_reservation(&mut self, (opcode, nsid): (NvmOpcode, u32), is_done: bool) {
        let change = match opcode {
            NvmOpcode::RESERVATION_REGISTER => "Reservation Register",
            NvmOpcode::RESERVATION_ACQUIRE => "Reservation Acquire",
            NvmOpcode::RESERVATION_RELEASE => "Reservation Release",
            _ => return,
        };
        let unit = format!("namespace {nsid}");
        self.audit.push(AuditEvent::Reservation { unit, change, is_done });
    }
}

fn login<T: FabricsTransport>(host: &str, subsystem: &str) -> Login {
    let (initiator, target) = (host.to_owned(), subsystem.to_owned());
    Login { protocol: T::NAME, initiator, target, is_authenticated: false }
}

/// A name from a NUL-terminated field, bounded in length.
fn text(field: &[u8]) -> String {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    bounded(&String::from_utf8_lossy(field.get(..end).unwrap_or_default()))
}

/// Offset of Controller Configuration (CC) and its Shutdown Notification field (Base 2.0 §3.1.3.5).
const CC: u32 = 0x14;
const CC_SHN: u64 = 0b11 << 14;
