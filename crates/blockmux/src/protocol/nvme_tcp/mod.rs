//! NVMe/TCP, as the commands know it.
//!
//! Unless the config file has subsystems, each volume is a subsystem of its own, named
//! `nqn.2026-11.blockmux:NAME`, and in it the only namespace, number 1. A part of its UUID follows
//! the name of a volume to which nobody gave one.

mod config;
mod hosts;
mod live;
mod namespaces;
mod referrals;
mod remote;

pub(crate) use config::{ConfiguredSubsystem, DiscoveryEntry, State, SubsystemEntry, Treq, check_listeners};
pub(crate) use hosts::HostEntry;

use super::policy::{Place, Policy};
use super::{Named, Portal, Protocol, Service, Settings, Started, Way};
use crate::machine::machine_id;
use crate::output::shell_word;
use blockmux_engine::nvme_tcp;
use blockmux_engine::socket::Address;
use blockmux_engine::sys::random_bytes;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::fabrics::controller::node::{Node, Port};
use blockmux_proto::fabrics::keyring::Keyring;
use blockmux_proto::fabrics::url::Url;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::{unique_discovery_nqn, well_known_discovery_nqn};
use blockmux_proto::volume_uuid::VolumeUuid;
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
    let subsystems = if settings.nvme.is_empty() {
        let all = Named::all(exports);
        all.iter().filter_map(|named| of_volume(&settings.policy, &ports, named)).collect()
    } else {
        settings.nvme.clone()
    };
    let configured = settings.nvme.iter().flat_map(|subsystem| {
        let namespaces = subsystem.namespaces.iter();
        namespaces.map(|(nsid, namespace)| ((subsystem.nqn.clone(), *nsid), namespace.clone()))
    });
    let configured = configured.collect();
    let volumes = Volumes {
        exports: (*exports).clone(),
        node: node_id(&ports),
        has_own: settings.nvme.is_empty(),
        configured,
    };
    let keyring = keyring(&subsystems, &volumes.node);
    // A host that proves who it is may have a key made.
    let has_keys = !keyring.is_empty() || subsystems.iter().any(|subsystem| !subsystem.secrets.is_empty());
    let secure_channel = settings.nvme_tcp_treq.secure_channel(has_keys);
    let hosts = LiveHosts::new(settings.nvme_tcp_treq, &volumes.node);
    for subsystem in &subsystems {
        for entry in &subsystem.entries {
            let tls_key = Nqn::new(&entry.hostnqn).and_then(|host| subsystem.tls_keys.get(&host).cloned());
            hosts.insert(&subsystem.nqn, entry.clone(), tls_key);
        }
    }
    let subsystems = subsystems.into_iter().map(|subsystem| volumes.subsystem(subsystem, &ports)).collect();
    let node = Node::new(subsystems, ports.clone(), &volumes.node);
    let node = node.with_referrals(settings.nvme_referrals.clone());
    let node = match settings.nvme_discovery_is_unique {
        true => node.with_unique_discovery_nqn(&volumes.node),
        false => node,
    };
    let node = node.with_tls(Arc::new(keyring), secure_channel);
    let node = Arc::new(match settings.nvme_in_capsule {
        Some(bytes) => node.with_in_capsule(bytes),
        None => node,
    });
    let ktls = settings.nvme_tcp_ktls.unwrap_or(true);
    let serve = (0..addresses.len()).map(|at| nvme_tcp::serve(&node, port_id(at), exports, ktls));
    let serve = serve.collect();
    let policy = settings.policy.clone();
    Started { serve, live: Some(Box::new(LiveSubsystems { node, volumes, ports, hosts, policy })) }
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

/// The names of discovery: the one that is well known, and this daemon's own.
fn discovery_names(machine: &str) -> [Nqn; 2] {
    [well_known_discovery_nqn(), unique_discovery_nqn(machine)]
}

/// What tells this daemon from all others: no two of one machine listen at the same addresses.
/// Hosts come back to the discovery subsystem by a name that follows from it, so it is the same
/// after a restart, but on a machine without an id.
fn node_id(ports: &[Port]) -> String {
    let machine = machine_id();
    if machine.is_empty()
        && let Ok(random) = random_bytes()
    {
        return VolumeUuid::random(random).to_string();
    }
    let addresses: Vec<String> = ports.iter().map(|port| port.address.to_string()).collect();
    format!("{machine} {}", addresses.join(" "))
}

/// The identifier of the port that a listener is, by its place among them.
fn port_id(at: usize) -> u16 {
    u16::try_from(at + 1).unwrap_or(u16::MAX)
}

/// The subsystem that a volume is by itself; `None` if no port may lead to it.
fn of_volume(policy: &Policy, ports: &[Port], named: &Named) -> Option<ConfiguredSubsystem> {
    let leads =
        |port: &&Port| policy.serves(&NVME_TCP, &Place::Socket(Address::Tcp(port.address)), &named.export);
    let own: Vec<_> = ports.iter().filter(leads).map(|port| port.address).collect();
    (!own.is_empty()).then(|| ConfiguredSubsystem::of_volume(named).at(own))
}

/// The subsystems that are configured, or one for each volume.
fn subsystems(settings: &Settings, volumes: &[Named]) -> Vec<ConfiguredSubsystem> {
    if !settings.nvme.is_empty() {
        return settings.nvme.clone();
    }
    volumes.iter().map(ConfiguredSubsystem::of_volume).collect()
}

/// How hosts reach each namespace that the volume is.
fn ways(settings: &Settings, portal: &Portal, named: &Named) -> Vec<Way> {
    let Some((listener, tcp)) = portal.tcp() else { return Vec::new() };
    let port = if tcp.port() == NVME_TCP.port { String::new() } else { format!(":{}", tcp.port()) };
    let host = if tcp.is_ipv6() { format!("[{}]", tcp.ip()) } else { tcp.ip().to_string() };
    let way = |subsystem: &ConfiguredSubsystem, nsid: u32| {
        let nqn = &subsystem.nqn;
        let plain = format!("nvme+tcp://{host}{port}/{nqn}/{nsid}");
        let word = shell_word(nqn.as_str());
        let connect = format!("nvme connect -t tcp -a {} -s {} -n {word}", tcp.ip(), tcp.port());
        let (url, command) = match (subsystem.visitor(nsid), plain.parse::<Url>()) {
            (Some(host), Ok(mut url)) => {
                host.add_to(&mut url);
                (url.to_string(), host.command(nqn, &connect))
            }
            _ => (plain, connect),
        };
        Way { url, commands: vec![command], variables: Vec::new() }
    };
    let subsystems = subsystems(settings, std::slice::from_ref(named));
    let here = subsystems.iter().filter(|subsystem| subsystem.is_at(&listener));
    let namespaces = here.flat_map(|subsystem| {
        let of_volume = subsystem.namespaces.iter().filter(|(_, namespace)| namespace.volume == named.export);
        of_volume.map(move |(nsid, _)| (subsystem, *nsid))
    });
    namespaces.map(|(subsystem, nsid)| way(subsystem, nsid)).collect()
}

/// The name of the subsystem that a volume is, whose own part is `name`.
fn default_nqn(name: &str) -> String {
    format!("nqn.2026-11.blockmux:{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_s_key_of_tls_is_for_its_subsystem_and_for_discovery_by_both_names() {
        use blockmux_proto::nvme::auth::psk::ConfiguredPsk;
        const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
        let host = Nqn::new("nqn.h").unwrap();
        let mut subsystem = ConfiguredSubsystem::of_volume(&Named::plainly("disk0"));
        subsystem.tls_keys.insert(host.clone(), ConfiguredPsk::parse(KEY).unwrap());
        let other = ConfiguredSubsystem::of_volume(&Named::plainly("disk1"));
        let keyring = keyring(&[subsystem.clone(), other.clone()], "machine");
        let is_there = |nqn: &Nqn| keyring.has_retained(&host, nqn);
        assert!(is_there(&subsystem.nqn) && !is_there(&other.nqn));
        assert!(is_there(&well_known_discovery_nqn()) && is_there(&unique_discovery_nqn("machine")));
    }

    #[test]
    fn what_a_subsystem_asks_of_its_hosts_is_in_the_url_and_the_command() {
        const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d";
        let mut subsystem = ConfiguredSubsystem::of_volume(&Named::plainly("a"));
        let way = |subsystem: &ConfiguredSubsystem| {
            let settings = Settings { nvme: vec![subsystem.clone()], ..Settings::default() };
            let address = Portal::at("127.0.0.1:4420");
            let Way { url, commands, .. } = ways(&settings, &address, &Named::plainly("a")).remove(0);
            (url, commands[0].clone())
        };
        let (open, connect) = way(&subsystem);
        subsystem.is_open = false;
        subsystem.hosts.push(Nqn::new("nqn.h").unwrap());
        let (url, command) = way(&subsystem);
        assert_eq!((url, command), (format!("{open}?hostnqn=nqn.h"), format!("{connect} --hostnqn=nqn.h")));
        let entry = format!(
            "hostnqn = '{HOST}'\ndhchap_secret_file = '/x/own key'\ndhchap_ctrl_secret_file = '/x/ours'\n\
             tls_key_file = '/x/tls'\nnamespaces = [1]"
        );
        subsystem.entries.push(toml::from_str(&entry).unwrap());
        let (url, command) = way(&subsystem);
        let query = url.strip_prefix(&open).unwrap();
        for part in [
            "hostnqn=nqn.2014-08",
            "dhchap_secret_file=/x/own%20key",
            "_ctrl_secret_file=/x/ours",
            "tls_key_file=/x/tls",
        ] {
            assert!(query.contains(part), "{query}");
        }
        assert_eq!(
            command,
            format!(
                "nvme check-tls-key --insert --identity=1 --hostnqn={HOST} --subsysnqn=nqn.2026-11.blockmux:a \
                 --keydata=\"$(cat /x/tls)\" && {connect} --hostnqn={HOST} \
                 --hostid=6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d --dhchap-secret=\"$(cat '/x/own key')\" \
                 --dhchap-ctrl-secret=\"$(cat /x/ours)\" --tls"
            )
        );
    }

    #[test]
    fn daemons_at_other_addresses_have_another_discovery_subsystem() {
        let id = |address: &str| node_id(&[Port { id: 1, address: address.parse().unwrap() }]);
        let names = ["127.0.0.1:4420", "127.0.0.1:4421"].map(|address| unique_discovery_nqn(&id(address)));
        assert_ne!(names[0], names[1]);
    }

    #[test]
    fn a_volume_is_namespace_1_of_a_subsystem_of_its_name() {
        let ways = |address: &str| {
            let mut ways = ways(&Settings::default(), &Portal::at(address), &Named::plainly("disk0"));
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
