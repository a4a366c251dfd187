//! Who talks to whom: an I_T nexus is an initiator port and a target port (SAM-5 §4.3).

use crate::served::Registrant;
use std::sync::Arc;

/// An initiator port and a target port; one session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nexus {
    /// The initiator port as a TransportID (SPC-5 §7.6.4), whole: protocol identifier, name, padding.
    pub initiator: Arc<[u8]>,
    /// The target port that it logged in to.
    pub target_port: TargetPort,
}

/// A target port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetPort {
    /// RELATIVE TARGET PORT IDENTIFIER, from 1; another one for each port that leads to the same unit.
    pub relative_id: u16,
    /// The target port group that it belongs to.
    pub group: u16,
    /// Its name as a SCSI name string: with iSCSI, `iqn...,t,0x0001`. The same after each restart.
    pub name: Arc<str>,
}

impl Nexus {
    /// PROTOCOL IDENTIFIER (SPC-5 §7.6.1).
    pub(super) fn protocol(&self) -> u8 {
        self.initiator.first().map_or(0, |first| first & 0x0f)
    }

    /// Its name where reservations are kept.
    pub(super) fn registrant(&self) -> Registrant {
        Registrant { initiator: self.initiator.clone(), port: self.target_port.name.clone() }
    }

    /// A nexus of an iSCSI session (SPC-5 §7.6.4.6): the TransportID is `NAME,i,0xISID`.
    #[must_use]
    pub fn iscsi(initiator_name: &str, isid: [u8; 6], target_port: TargetPort) -> Nexus {
        let isid: String = isid.iter().map(|byte| format!("{byte:02x}")).collect();
        Nexus { initiator: iscsi_transport_id(&format!("{initiator_name},i,0x{isid}")), target_port }
    }
}

/// The TransportID of an iSCSI initiator port, TPID FORMAT 01b: a name, NUL, and padding to 4 bytes.
fn iscsi_transport_id(name: &str) -> Arc<[u8]> {
    let len = name.len().saturating_add(1).next_multiple_of(4).max(20);
    let mut id = vec![0x45, 0];
    id.extend(u16::try_from(len).unwrap_or(u16::MAX).to_be_bytes());
    id.extend(name.as_bytes());
    id.resize(len.saturating_add(4), 0);
    id.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_iscsi_port_is_named_by_its_node_and_isid() {
        let port = TargetPort { relative_id: 1, group: 1, name: "iqn.2026-11.t:t,t,0x0001".into() };
        let nexus = Nexus::iscsi("iqn.2026-11.i:a", [0x80, 1, 2, 3, 4, 0xff], port);
        assert_eq!(nexus.initiator[..4], [0x45, 0, 0, 36]);
        assert_eq!(&nexus.initiator[4..], b"iqn.2026-11.i:a,i,0x8001020304ff\0\0\0\0");
        assert_eq!(nexus.initiator.len() % 4, 0);
    }
}
