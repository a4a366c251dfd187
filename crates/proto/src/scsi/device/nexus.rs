//! I_T nexuses: an initiator port and a target port (SAM-5 §4.3).

use crate::scsi::iscsi_name::Name;
use crate::volume_state::Registrant;
use data_encoding::HEXLOWER;
use std::sync::Arc;

/// An I_T nexus: an initiator port and a target port. Each session has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ItNexus {
    /// The initiator port's complete TransportID (SPC-5): protocol identifier, name, padding.
    pub initiator: Arc<[u8]>,
    /// The target port of the login.
    pub target_port: TargetPort,
}

/// A target port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetPort {
    /// RELATIVE TARGET PORT IDENTIFIER, at least 1 and unique among the ports of a unit.
    pub relative_id: u16,
    /// The target port group of the port.
    pub group: u16,
    /// The port's SCSI name string; for iSCSI, `iqn...,t,0x0001`. Stable across restarts.
    pub name: Arc<str>,
}

impl ItNexus {
    /// PROTOCOL IDENTIFIER (SPC-5).
    pub(super) fn protocol(&self) -> u8 {
        self.initiator.first().map_or(0, |first| first & 0x0f)
    }

    /// Identity of the nexus in reservations.
    pub(super) fn registrant(&self) -> Registrant {
        Registrant { initiator: self.initiator.clone(), port: self.target_port.name.clone() }
    }

    /// The nexus of an iSCSI session (SPC-5): the TransportID is `NAME,i,0xISID`, with the name in
    /// its prepared form.
    #[must_use]
    pub fn iscsi(initiator_name: &str, isid: [u8; 6], target_port: TargetPort) -> ItNexus {
        let isid = HEXLOWER.encode(&isid);
        ItNexus { initiator: iscsi_transport_id(&format!("{initiator_name},i,0x{isid}")), target_port }
    }

    /// The nexus of an SRP session (SPC-5): the last 16 bytes of the TransportID are the initiator
    /// port identifier.
    #[must_use]
    pub fn srp(initiator_port: &[u8; 16], target_port: TargetPort) -> ItNexus {
        let mut id = vec![PROTOCOL_SRP, 0, 0, 0, 0, 0, 0, 0];
        id.extend(initiator_port);
        ItNexus { initiator: id.into(), target_port }
    }
}

/// The initiator port or node that a TransportID identifies.
pub(super) enum TransportId {
    /// An initiator port, encoded like [`ItNexus::initiator`].
    Port(Arc<[u8]>),
    /// An iSCSI node with all its ports.
    Node(Name),
}

impl TransportId {
    /// Parses and normalizes a TransportID; `None` if it is malformed or has another protocol than
    /// `protocol`.
    pub(super) fn read(id: &[u8], protocol: u8) -> Option<TransportId> {
        let [first, _, _, _, rest @ ..] = id else { return None };
        let format = first >> 6;
        if first & 0x0f != protocol {
            return None;
        }
        if protocol != PROTOCOL_ISCSI {
            return (format == 0).then(|| TransportId::Port(id.into()));
        }
        let (text, padding) = rest.split_at_checked(rest.iter().position(|byte| *byte == 0)?)?;
        if rest.len() < 20 || !rest.len().is_multiple_of(4) || padding.iter().any(|byte| *byte != 0) {
            return None;
        }
        let text = std::str::from_utf8(text).ok()?;
        match format {
            // A port's name in the format for nodes is an error.
            0b00 if port_name(text).is_none() => Some(TransportId::Node(Name::new(text).ok()?)),
            0b01 => {
                let (name, isid) = port_name(text)?;
                Some(TransportId::Port(iscsi_transport_id(&format!("{},i,0x{isid}", name.prepared()))))
            }
            _ => None,
        }
    }
}

/// Parses the name of an iSCSI initiator port: the node's name, and the digits of the ISID.
fn port_name(text: &str) -> Option<(Name, String)> {
    let (name, isid) = text.rsplit_once(",i,")?;
    let isid = isid.strip_prefix("0x").or_else(|| isid.strip_prefix("0X"))?.to_lowercase();
    let is_isid = isid.len() == ISID_DIGITS && isid.bytes().all(|byte| byte.is_ascii_hexdigit());
    Some((Name::new(name).ok().filter(|_| is_isid)?, isid))
}

/// Whether an iSCSI TransportID is that of a port of this node.
pub(super) fn is_port_of(initiator: &[u8], node: &Name) -> bool {
    let name = initiator.get(4..).unwrap_or_default();
    let port = name.strip_prefix(node.prepared().as_bytes()).and_then(|rest| rest.strip_prefix(b",i,0x"));
    // A name may contain ",i,0x" itself.
    port.and_then(|port| port.get(ISID_DIGITS..)).is_some_and(|rest| rest.iter().all(|byte| *byte == 0))
}

/// The TransportID of an iSCSI initiator port, TPID FORMAT 01b: name, NUL, padding to 4 bytes.
fn iscsi_transport_id(name: &str) -> Arc<[u8]> {
    let len = name.len().saturating_add(1).next_multiple_of(4).max(20);
    let mut id = vec![0x45, 0];
    id.extend(u16::try_from(len).unwrap_or(u16::MAX).to_be_bytes());
    id.extend(name.as_bytes());
    id.resize(len.saturating_add(4), 0);
    id.into()
}

/// Number of hexadecimal digits of an ISID.
const ISID_DIGITS: usize = 12;
/// PROTOCOL IDENTIFIER of SRP.
const PROTOCOL_SRP: u8 = 4;
/// PROTOCOL IDENTIFIER of iSCSI.
const PROTOCOL_ISCSI: u8 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    fn read(first: u8, text: &str) -> Option<TransportId> {
        let mut id = vec![first, 0, 0, 0];
        id.extend(text.as_bytes());
        id.push(0);
        while id.len() < 24 || !id.len().is_multiple_of(4) {
            id.push(0);
        }
        TransportId::read(&id, 5)
    }

    #[test]
    fn transport_ids_are_normalized() {
        let port = TargetPort { relative_id: 1, group: 1, name: "t".into() };
        let own = ItNexus::iscsi("iqn.2026-11.i:a", [0xab, 1, 2, 3, 4, 0xff], port).initiator;
        for text in ["iqn.2026-11.i:a,i,0xab01020304ff", "IQN.2026-11.i:A,i,0XAB01020304FF"] {
            assert!(matches!(read(0x45, text), Some(TransportId::Port(id)) if id == own), "{text}");
        }
        let mut padded = own.to_vec();
        padded.extend([0; 8]);
        assert!(matches!(TransportId::read(&padded, 5), Some(TransportId::Port(id)) if id == own));
        let Some(TransportId::Node(node)) = read(5, "iqn.2026-11.i:a") else { panic!("it names a node") };
        assert!(is_port_of(&own, &node) && !is_port_of(&own, &Name::new("iqn.2026-11.i:").unwrap()));
    }

    #[test]
    fn a_node_may_have_any_name() {
        let port = TargetPort { relative_id: 1, group: 1, name: "t".into() };
        let text = "My disk,i,0x000000000001";
        let name = Name::new(text).unwrap();
        let own = ItNexus::iscsi(name.prepared(), [0, 0, 0, 0, 0, 2], port).initiator;
        assert!(
            matches!(read(0x45, &format!("{text},i,0x000000000002")), Some(TransportId::Port(id)) if id == own)
        );
        assert!(is_port_of(&own, &name) && !is_port_of(&own, &Name::new("my disk").unwrap()));
    }

    #[test]
    fn malformed_or_foreign_transport_ids_are_rejected() {
        let name = "iqn.2026-11.i:a,i,0x000000000001";
        for (first, text) in [
            (0x46, name),
            (0x85, name),
            (0xc5, name),
            (0x05, name),
            (0x45, "iqn.2026-11.i:a"),
            (0x45, "iqn.2026-11.i:a,i,0x00000000001"),
            (0x45, "iqn.2026-11.i:a,i,0x00000000000g"),
            (0x45, ",i,0x000000000001"),
            (0x45, ""),
        ] {
            assert!(read(first, text).is_none(), "{first:x} {text}");
        }
        let unpadded = [&[0x45, 0, 0, 32][..], name.as_bytes()].concat();
        assert!(TransportId::read(&unpadded, 5).is_none(), "a name without its terminator");
    }

    #[test]
    fn an_iscsi_port_is_named_by_its_node_and_isid() {
        let port = TargetPort { relative_id: 1, group: 1, name: "iqn.2026-11.t:t,t,0x0001".into() };
        let nexus = ItNexus::iscsi("iqn.2026-11.i:a", [0x80, 1, 2, 3, 4, 0xff], port);
        assert_eq!(nexus.initiator[..4], [0x45, 0, 0, 36]);
        assert_eq!(&nexus.initiator[4..], b"iqn.2026-11.i:a,i,0x8001020304ff\0\0\0\0");
        assert_eq!(nexus.initiator.len() % 4, 0);
    }
}
