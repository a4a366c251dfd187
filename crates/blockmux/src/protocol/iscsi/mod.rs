//! iSCSI, as the commands know it.
//!
//! Unless the config file has targets, each volume is a target of its own, named `iqn.2026-11.blockmux:NAME`, and in it
//! the only logical unit, LUN 0.

mod config;
mod node;
mod remote;
mod secret;

pub(crate) use config::{ConfiguredTarget, DiscoveryEntry, TargetEntry};

use super::{Protocol, Settings, Way};
use crate::output::shell_word;
use blockmux_engine::socket::Address;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::iscsi::name::Name;

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
};

/// How clients reach each logical unit that the volume is.
fn ways(settings: &Settings, address: &Address, volume: &str) -> Vec<Way> {
    let Address::Tcp(tcp) = address else { return Vec::new() };
    let port = if tcp.port() == ISCSI.port { String::new() } else { format!(":{}", tcp.port()) };
    let host = if tcp.is_ipv6() { format!("[{}]", tcp.ip()) } else { tcp.ip().to_string() };
    let portal = format!("{host}:{}", tcp.port());
    let way = |target: &str, lun: u16| {
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
    if settings.iscsi.is_empty() {
        return vec![way(&default_target(volume), 0)];
    }
    let targets = settings.iscsi.iter().filter(|target| target.is_at(tcp));
    let mapped = targets.flat_map(|target| {
        let luns = target.luns.iter().filter(|(_, mapped)| *mapped == volume);
        luns.map(|(lun, _)| way(target.name.as_str(), *lun))
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
    }
}
