//! NVMe/TCP, as the commands know it.
//!
//! Unless the config file has subsystems, each volume is a subsystem of its own, named `nqn.2026-11.blockmux:NAME`, and
//! in it the only namespace, number 1.

mod config;
mod hosts;
mod live;
mod namespaces;
mod referrals;
mod remote;

pub(crate) use config::{ConfiguredSubsystem, DiscoveryEntry, State, SubsystemEntry, Treq, check_listeners};
pub(crate) use hosts::HostEntry;

use super::policy::{Place, Policy};
use super::{Protocol, Service, Settings, Started, Way};
use crate::machine::machine_id;
use crate::output::shell_word;
use blockmux_engine::nvme_tcp;
use blockmux_engine::socket::Address;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::discovery_nqn;
use blockmux_proto::nvmeof::keyring::Keyring;
use blockmux_proto::nvmeof::node::{Node, Port};
use blockmux_wire::nvmeof::fabrics::DISCOVERY_NQN;
use hosts::LiveHosts;
use live::{LiveSubsystems, Volumes};
use std::sync::Arc;
use std::time::Instant;

/// NVMe/TCP's entry in the table.
pub(crate) const NVME_TCP: Protocol = Protocol {
    name: "nvme-tcp",
    title: "NVMe/TCP",
    port: 4420,
    schemes: &[("nvme+tcp", Transport::Tcp)],
    unspoken_schemes: &[],
    url_forms: &["nvme+tcp://host/subsystem-nqn/nsid"],
    // There is no place for one.
    max_description: usize::MAX,
    max_logical_block: 64 << 10,
    // A command capsule; the head of data and a response capsule; a command capsule; a response capsule.
    shape: MessageShape { read_request: 72, read_reply_head: 48, write_request_head: 72, write_reply: 24 },
    check: config::check,
    is_open: |settings| {
        let subsystems = &settings.nvme;
        subsystems.is_empty() || subsystems.iter().any(|subsystem| subsystem.is_open)
    },
    targets: config::targets,
    serve,
    ways,
    connect: Some(remote::connect),
    remote: remote::of_url,
    served_with: None,
};

/// Serves to accepted connections.
fn serve(service: &Service<'_>) -> Started {
    let Service { exports, addresses, settings } = service;
    let tcp = addresses.iter().enumerate().filter_map(|(at, address)| match address {
        Address::Tcp(tcp) => Some(Port { id: port_id(at), address: *tcp }),
        Address::Unix(_) => None,
    });
    let ports: Vec<Port> = tcp.collect();
    let names: Vec<String> = exports.iter().map(|(_, export)| export.name.clone()).collect();
    let subsystems = if settings.nvme.is_empty() {
        names.iter().filter_map(|name| of_volume(&settings.policy, &ports, name)).collect()
    } else {
        settings.nvme.clone()
    };
    let configured = settings.nvme.iter().flat_map(|subsystem| {
        let namespaces = subsystem.namespaces.iter();
        namespaces.map(|(nsid, namespace)| ((subsystem.nqn.clone(), *nsid), namespace.clone()))
    });
    let configured = configured.collect();
    let volumes = Volumes { exports: (*exports).clone(), machine: machine_id(), configured };
    let keyring = keyring(&subsystems, &volumes.machine);
    // A host that proves who it is may have a key made.
    let has_keys = !keyring.is_empty() || subsystems.iter().any(|subsystem| !subsystem.secrets.is_empty());
    let secure_channel = settings.nvme_tcp_treq.secure_channel(has_keys);
    let hosts = LiveHosts::new(settings.nvme_tcp_treq, &volumes.machine);
    for subsystem in &subsystems {
        for entry in &subsystem.entries {
            let tls_key = Nqn::new(&entry.hostnqn).and_then(|host| subsystem.tls_keys.get(&host).cloned());
            hosts.insert(&subsystem.nqn, entry.clone(), tls_key);
        }
    }
    let subsystems = subsystems.into_iter().map(|subsystem| volumes.subsystem(subsystem, &ports)).collect();
    let node = Node::new(subsystems, ports.clone(), &volumes.machine);
    let node = node.with_referrals(settings.nvme_referrals.clone());
    let node = node.with_tls(Arc::new(keyring), secure_channel);
    let node = Arc::new(match settings.nvme_in_capsule {
        Some(bytes) => node.with_in_capsule(bytes),
        None => node,
    });
    let ktls = settings.nvme_tcp_ktls.unwrap_or(true);
    let serve = (0..addresses.len()).map(|at| nvme_tcp::serve(&node, port_id(at), exports, ktls));
    let serve = serve.collect();
    let (are_own, policy) = (settings.nvme.is_empty(), settings.policy.clone());
    Started { serve, live: Some(Box::new(LiveSubsystems { node, volumes, ports, are_own, hosts, policy })) }
}

/// The keys of all hosts, for the subsystems that they have them for and for discovery by either of its names: hosts ask
/// by the one that is well known, and stay connected by the other.
fn keyring(subsystems: &[ConfiguredSubsystem], machine: &str) -> Keyring {
    let (keyring, now) = (Keyring::default(), Instant::now());
    let discovery = discovery_names(machine);
    for subsystem in subsystems {
        for (host, key) in &subsystem.tls_keys {
            let retained = key.retained(host);
            keyring.insert(&retained, host, &subsystem.nqn, now);
            discovery.iter().for_each(|name| keyring.insert(&retained, host, name, now));
        }
    }
    keyring
}

/// The names of discovery: the one that is well known, and this machine's own.
fn discovery_names(machine: &str) -> [Nqn; 2] {
    let well_known = Nqn::new(DISCOVERY_NQN).expect("the specification's own name is one");
    [well_known, discovery_nqn(machine)]
}

/// The identifier of the port that a listener is, by its place among them.
fn port_id(at: usize) -> u16 {
    u16::try_from(at + 1).unwrap_or(u16::MAX)
}

/// The subsystem that a volume is by itself; `None` if no port may lead to it.
fn of_volume(policy: &Policy, ports: &[Port], volume: &str) -> Option<ConfiguredSubsystem> {
    let leads = |port: &&Port| policy.serves(&NVME_TCP, &Place::Socket(Address::Tcp(port.address)), volume);
    let own: Vec<_> = ports.iter().filter(leads).map(|port| port.address).collect();
    (!own.is_empty()).then(|| ConfiguredSubsystem::of_volume(volume).at(own))
}

/// The subsystems that are configured, or one for each volume.
fn subsystems<'a>(settings: &Settings, volumes: impl Iterator<Item = &'a str>) -> Vec<ConfiguredSubsystem> {
    if !settings.nvme.is_empty() {
        return settings.nvme.clone();
    }
    volumes.map(ConfiguredSubsystem::of_volume).collect()
}

/// How hosts reach each namespace that the volume is.
fn ways(settings: &Settings, address: &Address, volume: &str) -> Vec<Way> {
    let Address::Tcp(tcp) = address else { return Vec::new() };
    let port = if tcp.port() == NVME_TCP.port { String::new() } else { format!(":{}", tcp.port()) };
    let host = if tcp.is_ipv6() { format!("[{}]", tcp.ip()) } else { tcp.ip().to_string() };
    let way = |nqn: &Nqn, nsid: u32| {
        let url = format!("nvme+tcp://{host}{port}/{nqn}/{nsid}");
        let nqn = shell_word(nqn.as_str());
        let connect = format!("nvme connect -t tcp -a {} -s {} -n {nqn}", tcp.ip(), tcp.port());
        Way { url, commands: vec![connect], variables: Vec::new() }
    };
    let subsystems = subsystems(settings, [volume].into_iter());
    let here = subsystems.iter().filter(|subsystem| subsystem.is_at(tcp));
    let namespaces = here.flat_map(|subsystem| {
        let of_volume = subsystem.namespaces.iter().filter(|(_, namespace)| namespace.volume == volume);
        of_volume.map(|(nsid, _)| (&subsystem.nqn, *nsid))
    });
    namespaces.map(|(nqn, nsid)| way(nqn, nsid)).collect()
}

/// The name of the subsystem that a volume is.
fn default_nqn(volume: &str) -> String {
    format!("nqn.2026-11.blockmux:{volume}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_s_key_of_tls_is_for_its_subsystem_and_for_discovery_by_both_names() {
        use blockmux_proto::nvmeof::psk::ConfiguredPsk;
        const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
        let host = Nqn::new("nqn.h").unwrap();
        let mut subsystem = ConfiguredSubsystem::of_volume("disk0");
        subsystem.tls_keys.insert(host.clone(), ConfiguredPsk::parse(KEY).unwrap());
        let other = ConfiguredSubsystem::of_volume("disk1");
        let keyring = keyring(&[subsystem.clone(), other.clone()], "machine");
        let is_there = |nqn: &Nqn| keyring.has_retained(&host, nqn);
        assert!(is_there(&subsystem.nqn) && !is_there(&other.nqn));
        assert!(is_there(&Nqn::new(DISCOVERY_NQN).unwrap()) && is_there(&discovery_nqn("machine")));
    }

    #[test]
    fn a_volume_is_namespace_1_of_a_subsystem_of_its_name() {
        let ways = |address: &str| {
            let address = Address::Tcp(address.parse().unwrap());
            let mut ways = ways(&Settings::default(), &address, "disk0");
            let way = ways.pop().unwrap();
            assert!(ways.is_empty());
            (way.url, way.commands.join("\n"))
        };
        assert_eq!(
            ways("127.0.0.1:4420"),
            (
                "nvme+tcp://127.0.0.1/nqn.2026-11.blockmux:disk0/1".to_owned(),
                "nvme connect -t tcp -a 127.0.0.1 -s 4420 -n nqn.2026-11.blockmux:disk0".to_owned()
            )
        );
        assert_eq!(ways("[::1]:7").0, "nvme+tcp://[::1]:7/nqn.2026-11.blockmux:disk0/1");
    }
}
