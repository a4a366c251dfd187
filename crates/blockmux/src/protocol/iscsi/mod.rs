//! iSCSI, as the commands know it, over TCP and over RDMA (iSER).
//!
//! Unless the config file has targets, each volume is a target of its own, named `iqn.2026-11.blockmux:NAME`, and in it
//! the only logical unit, LUN 0.

mod config;
mod live;
mod node;
mod remote;
pub(super) mod secret;

pub(crate) use config::{ConfiguredTarget, DiscoveryEntry, TargetEntry};

use super::{Protocol, Settings, Way};
use crate::output::shell_word;
use blockmux_engine::socket::Address;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::iscsi::name::Name;
use std::net::SocketAddr;

/// iSCSI's entry in the table.
pub(crate) const ISCSI: Protocol = Protocol {
    name: "iscsi",
    title: "iSCSI",
    port: 3260,
    schemes: &[("iscsi", Transport::Tcp)],
    unspoken_schemes: &[],
    url_forms: &["iscsi://host/target-name/lun"],
    max_description: MAX_ALIAS,
    max_logical_block: 64 << 10,
    // A header each: SCSI Command; Data-In with the status; SCSI Command; SCSI Response.
    shape: MessageShape { read_request: 48, read_reply_head: 48, write_request_head: 48, write_reply: 48 },
    check: config::check,
    is_open: config::is_open,
    serve: node::serve,
    ways,
    connect: Some(remote::connect),
    remote: remote::of_url,
    served_with: None,
};

/// iSER's entry in the table: iSCSI over RDMA, which today is iWARP. Every listener of either serves both.
pub(crate) const ISER: Protocol = Protocol {
    name: "iser",
    title: "iSER",
    schemes: &[("iser", Transport::Tcp)],
    url_forms: &["iser://host/target-name/lun"],
    // Each is a frame with iSER's header and the same header of iSCSI; an RDMA Write brings data, an RDMA Read asks for
    // it and another frame brings that.
    shape: MessageShape { read_request: 96, read_reply_head: 112, write_request_head: 112, write_reply: 144 },
    ways: ways_of_iser,
    connect: Some(remote::connect_over_rdma),
    served_with: Some(ISCSI.name),
    ..ISCSI
};

/// How clients reach each logical unit that the volume is.
fn ways(settings: &Settings, address: &Address, volume: &str) -> Vec<Way> {
    let Address::Tcp(tcp) = address else { return Vec::new() };
    let Place { host, port, portal } = Place::of(tcp);
    let way = |(target, lun): (String, u16)| {
        let url = format!("iscsi://{host}{port}/{target}/{lun}");
        let commands = vec![
            format!("iscsi-inq {}", shell_word(&url)),
            format!("qemu-img info {}", shell_word(&url)),
            format!(
                "iscsiadm -m discovery -t st -p {portal} && iscsiadm -m node -T {target} -p {portal} --login"
            ),
        ];
        Way { url, commands, variables: Vec::new() }
    };
    units(settings, tcp, volume).into_iter().map(way).collect()
}

/// The same over RDMA: clients have an RDMA device over the network card that leads there.
fn ways_of_iser(settings: &Settings, address: &Address, volume: &str) -> Vec<Way> {
    let Address::Tcp(tcp) = address else { return Vec::new() };
    let Place { host, port, portal } = Place::of(tcp);
    let way = |(target, lun): (String, u16)| {
        let url = format!("iser://{host}{port}/{target}/{lun}?rdma=iwarp");
        let commands = vec![format!(
            "iscsiadm -m discovery -t st -p {portal} -I iser && \
             iscsiadm -m node -T {target} -p {portal} -I iser --login"
        )];
        Way { url, commands, variables: Vec::new() }
    };
    units(settings, tcp, volume).into_iter().map(way).collect()
}

/// A listener, as it is written.
struct Place {
    host: String,
    /// With a colon; empty for the usual one.
    port: String,
    /// Both.
    portal: String,
}

impl Place {
    fn of(tcp: &SocketAddr) -> Place {
        let port = if tcp.port() == ISCSI.port { String::new() } else { format!(":{}", tcp.port()) };
        let host = if tcp.is_ipv6() { format!("[{}]", tcp.ip()) } else { tcp.ip().to_string() };
        let portal = format!("{host}:{}", tcp.port());
        Place { host, port, portal }
    }
}

/// The logical units that a volume is by a listener: targets and numbers.
fn units(settings: &Settings, listener: &SocketAddr, volume: &str) -> Vec<(String, u16)> {
    if settings.iscsi.is_empty() {
        return vec![(default_target(volume), 0)];
    }
    let targets = settings.iscsi.iter().filter(|target| target.is_at(listener));
    let mapped = targets.flat_map(|target| {
        let luns = target.luns.iter().filter(|(_, mapped)| *mapped == volume);
        luns.map(|(lun, _)| (target.name.as_str().to_owned(), *lun))
    });
    mapped.collect()
}

/// The name of the target that a volume is.
fn default_target(volume: &str) -> String {
    format!("{PREFIX}{}", volume.to_lowercase())
}

/// What the names of our own targets begin with.
const PREFIX: &str = "iqn.2026-11.blockmux:";
/// The longest TargetAlias, in bytes (RFC 7143 §13.6).
const MAX_ALIAS: usize = 255;

/// Names of targets as they were checked before.
fn name(text: &str) -> Name {
    Name::new(text).expect("checked before anything was opened")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urls(address: &str, volume: &str) -> Vec<String> {
        let address = Address::Tcp(address.parse().unwrap());
        ways(&Settings::default(), &address, volume).into_iter().map(|way| way.url).collect()
    }

    #[test]
    fn a_volume_is_lun_0_of_a_target_of_its_name() {
        assert_eq!(urls("127.0.0.1:3260", "Disk0"), ["iscsi://127.0.0.1/iqn.2026-11.blockmux:disk0/0"]);
        assert_eq!(urls("[::1]:7", "a"), ["iscsi://[::1]:7/iqn.2026-11.blockmux:a/0"]);
        let address = Address::Tcp("[::1]:7".parse().unwrap());
        let over_rdma = &ways_of_iser(&Settings::default(), &address, "a")[0];
        assert_eq!(over_rdma.url, "iser://[::1]:7/iqn.2026-11.blockmux:a/0?rdma=iwarp");
    }
}
