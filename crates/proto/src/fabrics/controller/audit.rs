//! What a queue tells whoever audits. The admin queue stands for the host's association: Linux
//! closes the sockets of I/O queues without a word before it shuts the controller down, so that
//! their ends alone say nothing.

use super::ControllerQueue;
use super::connect::ConnectedQueue;
use super::transport::FabricsTransport;
use crate::event::{AuditEvent, Login, bounded};
use crate::nvme::NvmeOutcome;
use blockmux_volume::SgList;
use blockmux_wire::nvme::opcode::NvmOpcode;
use blockmux_wire::nvme::status::{ConnectStatus, NvmeStatus};
use blockmux_wire::nvmeof::fabrics::{CONNECT_DATA_LEN, ConnectData, PropertySet};
use zerocopy::{FromZeros, IntoBytes};

impl<T: FabricsTransport> ControllerQueue<T> {
    /// The host has a queue and may use it.
    #[cold]
    pub(super) fn audit_login(&mut self) {
        let event = match &self.queue {
            Some(ConnectedQueue::Admin(admin)) => {
                AuditEvent::Login(login::<T>(admin.host.nqn.as_str(), admin.subsystem.nqn.as_str()))
            }
            Some(ConnectedQueue::Io(queue)) => {
                AuditEvent::Joined(login::<T>(queue.host().as_str(), queue.subsystem.nqn.as_str()))
            }
            None => return,
        };
        self.audit.push(event);
    }

    /// Connect was refused.
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
                "the subsystem refuses this host: it is not in its list of hosts, or came without the TLS that it needs"
            }
            _ if is(ConnectStatus::CONNECT_INVALID_PARAMETERS) => {
                "Connect names no subsystem of this port, or has another wrong field"
            }
            _ => "Connect failed",
        };
        self.audit.push(AuditEvent::Refused { login, reason: reason.into() });
    }

    /// The host has failed to prove who it is.
    #[cold]
    pub(super) fn audit_failed_authentication(&mut self) {
        let login = match &self.queue {
            Some(ConnectedQueue::Admin(admin)) => {
                login::<T>(admin.host.nqn.as_str(), admin.subsystem.nqn.as_str())
            }
            Some(ConnectedQueue::Io(queue)) => {
                login::<T>(queue.host().as_str(), queue.subsystem.nqn.as_str())
            }
            None => return,
        };
        self.audit.push(AuditEvent::Refused { login, reason: "DH-HMAC-CHAP failed: another secret".into() });
    }

    /// The host has set a property of its controller.
    pub(super) fn audit_property(&mut self, set: &PropertySet) {
        if set.ofst.get() == CC && set.value.get() & CC_SHN != 0 {
            self.audit.push(AuditEvent::Logout { reason: "the host shut its controller down" });
        }
    }

    /// A command ends that may have changed reservations.
    #[inline]
    pub(super) fn audit_command(&mut self, opcode: NvmOpcode, nsid: u32, is_done: bool) {
        let change = match opcode {
            NvmOpcode::RESERVATION_REGISTER => "Reservation Register",
            NvmOpcode::RESERVATION_ACQUIRE => "Reservation Acquire",
            NvmOpcode::RESERVATION_RELEASE => "Reservation Release",
            _ => return,
        };
        if matches!(self.queue, Some(ConnectedQueue::Io(_))) {
            let unit = format!("namespace {nsid}");
            self.audit.push(AuditEvent::Reservation { unit, change, is_done });
        }
    }
}

fn login<T: FabricsTransport>(host: &str, subsystem: &str) -> Login {
    Login { protocol: T::NAME, initiator: host.to_owned(), target: subsystem.to_owned() }
}

/// A name as it was sent.
fn text(field: &[u8]) -> String {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    bounded(&String::from_utf8_lossy(field.get(..end).unwrap_or_default()))
}

/// The offset of Controller Configuration, and its Shutdown Notification (Base 2.0 §3.1.3.5).
const CC: u32 = 0x14;
const CC_SHN: u64 = 0b11 << 14;
