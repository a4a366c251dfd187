//! The discovery log page: the subsystems that a host may connect to, and their addresses (Base 2.0
//! §5.16.1.23).

use super::node::{NvmeNode, Referral, SecureChannel};
use crate::names::portal::told_to_peer;
use crate::nvme::MQES;
use crate::nvme::nqn::Nqn;
use crate::nvme::subsystem::Subsystem;
use blockmux_wire::nvmeof::fabrics::{
    AddressFamily, CNTLID_DYNAMIC, DiscoveryEntry, DiscoveryHeader, EFLAGS_DUPRETINFO, EFLAGS_EPCSD,
    SubsystemType, TREQ_DISABLE_SQ_FLOW_CONTROL, TREQ_NOT_REQUIRED, TREQ_REQUIRED, TransportType,
};
use blockmux_wire::nvmeof::rdma::{ConnectionService, ProviderType, QpType};
use blockmux_wire::nvmeof::tcp::SecurityType;
use core::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use zerocopy::{FromZeros, IntoBytes};

/// The whole page for a host that connected from address `peer` to address `local` over this
/// transport. It lists entries of that transport only, as Linux's target does: few hosts support
/// another.
pub(crate) fn page(
    node: &NvmeNode,
    host: &Nqn,
    (local, peer): (Option<SocketAddr>, Option<IpAddr>),
    transport: TransportType,
) -> Vec<u8> {
    // Read before the list: a host that reads the page in parts detects by the header that it has
    // changed.
    let genctr = node.generation();
    let all = node.subsystems();
    let ports = node.ports();
    let discovery = ports.iter().map(|port| (*port, &node.discovery, SubsystemType::CURRENT_DISCOVERY));
    let is_admitted = |subsystem: &&Arc<Subsystem>| subsystem.admits(host) && subsystem.admits_address(peer);
    let admitted = all.iter().filter(is_admitted);
    let subsystems = admitted.flat_map(|subsystem| {
        node.ports_of(subsystem).into_iter().map(move |port| (port, subsystem, SubsystemType::NVM))
    });
    let secure_channel = node.secure_channel();
    let own = discovery.chain(subsystems).filter_map(|(port, subsystem, subtype)| {
        let address = told_to_peer(port.advertised, local)?;
        Some(entry(port.id, address, secure_channel, &subsystem.nqn, subtype))
    });
    let referrals = node.referrals();
    let referrals = referrals.iter().filter_map(|Referral { address, nqn }| {
        Some(at(told_to_peer(*address, local)?, nqn, SubsystemType::REFERRAL))
    });
    let mut entries: Vec<DiscoveryEntry> = own.chain(referrals).collect();
    if transport == TransportType::RDMA {
        entries.iter_mut().for_each(make_rdma);
    }
    let header = DiscoveryHeader {
        genctr: genctr.into(),
        numrec: (entries.len() as u64).into(),
        ..DiscoveryHeader::new_zeroed()
    };
    let mut page = header.as_bytes().to_vec();
    entries.iter().for_each(|entry| page.extend(entry.as_bytes()));
    page
}

fn entry(
    port: u16,
    address: SocketAddr,
    secure_channel: SecureChannel,
    nqn: &Nqn,
    subtype: SubsystemType,
) -> DiscoveryEntry {
    let (treq, sectype) = match secure_channel {
        SecureChannel::None => (0, SecurityType::NONE),
        SecureChannel::NotRequired => (TREQ_NOT_REQUIRED, SecurityType::TLS_1_3),
        SecureChannel::Required => (TREQ_REQUIRED, SecurityType::TLS_1_3),
    };
    let mut tsas = [0; 256];
    tsas[0] = sectype.0;
    let eflags = match subtype {
        // EPCSD: hosts keep a discovery connection only to a port whose entry has this flag. They
        // are then notified of changes.
        SubsystemType::CURRENT_DISCOVERY => EFLAGS_DUPRETINFO | EFLAGS_EPCSD,
        _ => 0,
    };
    DiscoveryEntry {
        treq: TREQ_DISABLE_SQ_FLOW_CONTROL | treq,
        portid: port.into(),
        tsas,
        eflags: eflags.into(),
        ..at(address, nqn, subtype)
    }
}

/// Converts an entry to RDMA, which has no secure channel. The provider is not specified: hosts
/// find a route to the address by themselves.
fn make_rdma(entry: &mut DiscoveryEntry) {
    entry.trtype = TransportType::RDMA.0;
    entry.treq = TREQ_DISABLE_SQ_FLOW_CONTROL;
    entry.tsas = [0; 256];
    let of_rdma = [QpType::RELIABLE_CONNECTED.0, ProviderType::NOT_SPECIFIED.0, ConnectionService::RDMA_CM.0];
    entry.tsas.iter_mut().zip(of_rdma).for_each(|(to, from)| *to = from);
}

fn at(address: SocketAddr, nqn: &Nqn, subtype: SubsystemType) -> DiscoveryEntry {
    let ip = address.ip();
    let family = if ip.is_ipv6() { AddressFamily::IPV6 } else { AddressFamily::IPV4 };
    DiscoveryEntry {
        trtype: TransportType::TCP.0,
        adrfam: family.0,
        subtype: subtype.0,
        treq: TREQ_DISABLE_SQ_FLOW_CONTROL,
        cntlid: CNTLID_DYNAMIC.into(),
        asqsz: MQES.saturating_add(1).into(),
        trsvcid: text(&address.port().to_string()),
        subnqn: nqn.to_field(),
        traddr: text(&ip.to_string()),
        ..DiscoveryEntry::new_zeroed()
    }
}

/// An ASCII field, padded with spaces.
fn text<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [b' '; N];
    field.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
    field
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabrics::controller::node::FabricsPort;
    use zerocopy::FromBytes;

    #[test]
    fn addresses_on_other_links_are_left_out() {
        let port = |id, address: &str| FabricsPort::new(id, address.parse().unwrap());
        let ports = vec![port(1, "192.0.2.1:4420"), port(2, "[fe80::1%7]:4420"), port(3, "[fe80::1%8]:4420")];
        let address = "[fe80::3]:8009".parse().unwrap();
        let referral = Referral { address, nqn: Nqn::new("nqn.2026-11.test:other").unwrap() };
        let node = NvmeNode::new(Vec::new(), ports, "machine").with_referrals(vec![referral]);
        let host = Nqn::new("nqn.2026-11.test:host").unwrap();
        let told = |local: &str| -> Vec<String> {
            let page = page(&node, &host, (local.parse().ok(), None), TransportType::TCP);
            let entries =
                page.chunks(1024).skip(1).map(|entry| DiscoveryEntry::read_from_bytes(entry).unwrap());
            entries.map(|entry| String::from_utf8_lossy(&entry.traddr).trim_end().to_owned()).collect()
        };
        assert_eq!(told("[fe80::2%7]:8009"), ["192.0.2.1", "fe80::1", "fe80::3"]);
        assert_eq!(told("192.0.2.1:8009"), ["192.0.2.1"]);
    }

    #[test]
    fn a_port_is_listed_at_the_address_that_it_advertises() {
        let own: SocketAddr = "10.0.0.1:4420".parse().unwrap();
        let port =
            FabricsPort { advertised: "203.0.113.7:14420".parse().unwrap(), ..FabricsPort::new(1, own) };
        let node = NvmeNode::new(Vec::new(), vec![port], "machine");
        let host = Nqn::new("nqn.2026-11.test:host").unwrap();
        let page = page(&node, &host, (Some(own), None), TransportType::TCP);
        let entry = DiscoveryEntry::read_from_bytes(&page[1024..]).unwrap();
        assert!(entry.traddr.starts_with(b"203.0.113.7 ") && entry.trsvcid.starts_with(b"14420 "));
    }

    #[test]
    fn an_entry_for_rdma_has_the_queue_pair_parameters() {
        let port = FabricsPort::new(1, "192.0.2.1:4420".parse().unwrap());
        let node = NvmeNode::new(Vec::new(), vec![port], "machine");
        let host = Nqn::new("nqn.2026-11.test:host").unwrap();
        let entry = |transport| {
            let page = page(&node, &host, (None, None), transport);
            DiscoveryEntry::read_from_bytes(&page[1024..]).unwrap()
        };
        let (tcp, rdma) = (entry(TransportType::TCP), entry(TransportType::RDMA));
        assert_eq!((tcp.trtype, &tcp.tsas[..4]), (3, &[0; 4][..]));
        // RDMA_QPTYPE: reliable connected. RDMA_PRTYPE: not specified. RDMA_CMS: RDMA_IP_CM.
        assert_eq!((rdma.trtype, &rdma.tsas[..4]), (1, &[1, 1, 1, 0][..]));
        assert_eq!((rdma.traddr, rdma.trsvcid, rdma.adrfam), (tcp.traddr, tcp.trsvcid, 1));
    }
}
