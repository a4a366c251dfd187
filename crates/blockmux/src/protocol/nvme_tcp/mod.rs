//! NVMe/TCP and NVMe/RDMA: their properties, their frontend for `serve`, and their URLs.
//!
//! Without subsystems in the config file, each volume has its own subsystem with the name
//! `nqn.2026-11.blockmux:NAME`, in which it is namespace 1. If the volume's name is generated, a
//! part of its UUID is appended.

mod config;
mod hosts;
mod live;
mod namespaces;
mod referrals;
mod remote;

use super::address::ListenerAddress;
use super::configured::ConfiguredTargets;
use super::frontend::{
    ConnectInfo, Frontend, LiveFrontend, NamedListener, Portal, Service, TargetTables, VolumeNames,
};
use super::policy::{Policy, TargetAccess};
use super::{Carrier, KeyError, Protocol, ServiceType};
use crate::failure::Failure;
use crate::output::shell_word;
use crate::process::machine::machine_id;
use crate::protocol::address::tcp_address;
use blockmux_engine::net::socket::Address;
use blockmux_engine::net::zone;
use blockmux_engine::sys::random_bytes;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::fabrics::controller::node::{FabricsPort, NvmeNode, Referral};
use blockmux_proto::fabrics::url::NvmeUrl;
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::nvme::hosts::OpenToAll;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::{unique_discovery_nqn, well_known_discovery_nqn};
use blockmux_wire::nvmeof::fabrics::DISCOVERY_NQN;
use clap::{ArgMatches, Command, FromArgMatches, Subcommand};
use config::{ConfiguredSubsystem, NvmeDiscoveryEntry, SubsystemEntry, Treq};
use hosts::{HostEntry, LiveHosts};
use live::{ConfiguredIdentities, LiveSubsystems, NamespaceFactory};
use namespaces::ConfiguredNamespace;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use toml::de::Deserializer;

/// NVMe over Fabrics over TCP.
pub(crate) const NVME_TCP: Protocol = Protocol {
    name: "nvme-tcp",
    title: "NVMe/TCP",
    carrier: Carrier::Stream,
    is_default: true,
    has_rdma: true,
    is_over_rdma: false,
    listener_help: ["ADDR", "Serve NVMe/TCP and NVMe/RDMA at ADDR; repeatable [default: 127.0.0.1:4420]"],
    port: 4420,
    schemes: &[("nvme+tcp", Transport::Tcp)],
    unsupported_schemes: &[],
    url_forms: &["nvme+tcp://host/subsystem-nqn/nsid"],
    // The protocol has no descriptions.
    max_description: usize::MAX,
    max_logical_block: 64 << 10,
    // A command capsule; the head of data and a response capsule; a command capsule; a response
    // capsule.
    shape: MessageShape { read_request: 72, read_reply_head: 48, write_request_head: 72, write_reply: 24 },
    frontend: || Box::<NvmeTcp>::default(),
    remote: remote::of_url,
    served_with: None,
    service_type: Some(ServiceType {
        // Of the discovery service (TP 8009).
        name: "_nvme-disc._tcp",
        properties: &[("p", "tcp"), ("nqn", DISCOVERY_NQN)],
    }),
};

/// NVMe over Fabrics over RDMA, on the listeners of NVMe/TCP.
pub(crate) const NVME_RDMA: Protocol = Protocol {
    name: "nvme-rdma",
    title: "NVMe/RDMA",
    has_rdma: true,
    is_over_rdma: true,
    listener_help: [
        "ADDR",
        "Like --nvme-tcp, but print NVMe/RDMA URLs only; repeatable [default: every NVMe/TCP port]",
    ],
    schemes: &[("nvme+rdma", Transport::Tcp)],
    url_forms: &["nvme+rdma://host/subsystem-nqn/nsid"],
    // A frame with a command; the head of an RDMA Write and a frame with a completion; a frame with
    // a command and the RDMA Read Request for its data; the response's head and a completion.
    shape: MessageShape { read_request: 88, read_reply_head: 60, write_request_head: 88, write_reply: 92 },
    served_with: Some(NVME_TCP.name),
    ..NVME_TCP
};

/// The `ctl` commands of NVMe.
#[derive(clap::Subcommand, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum NvmeCtlCommand {
    /// Allow a host to use an NVMe subsystem, or change its keys
    AddHost {
        /// Subsystem NQN
        target: String,
        #[command(flatten)]
        host: HostEntry,
    },
    /// Remove a host from an NVMe subsystem and disconnect it
    RemoveHost {
        /// Subsystem NQN
        target: String,
        /// NQN of the host
        hostnqn: String,
    },
    /// Reload the secret and key files of a subsystem's hosts
    ReadKeys {
        /// Subsystem NQN
        target: String,
        /// One host [default: all]
        hostnqn: Option<String>,
    },
    /// Set the ANA state of a group of namespaces; notify hosts
    Ana {
        /// Subsystem NQN
        target: String,
        /// ANAGRPID
        group: u32,
        state: config::AnaStateName,
        /// One listener [default: all]
        #[arg(long, value_name = "ADDR", value_parser = |text: &str| tcp_address(text, NVME_TCP.port))]
        at: Option<SocketAddr>,
    },
}

/// The frontend of NVMe: the keys of the config file, and the validated settings.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct NvmeTcp {
    /// Whether hosts must use TLS.
    nvme_tcp_treq: Treq,
    /// Whether to use kernel TLS where possible; on by default.
    nvme_tcp_ktls: Option<bool>,
    nvme_subsystem: Vec<SubsystemEntry>,
    nvme_discovery: NvmeDiscoveryEntry,
    /// Maximum in-capsule data size, in bytes.
    nvme_in_capsule_data_size: Option<usize>,
    /// The configured subsystems; if it is empty, each volume has its own subsystem.
    #[serde(skip)]
    subsystems: ConfiguredTargets<ConfiguredSubsystem>,
    /// Referrals to other discovery subsystems.
    #[serde(skip)]
    referrals: Vec<Referral>,
}

impl Frontend for NvmeTcp {
    fn keys(&self) -> &'static [&'static str] {
        &["nvme_tcp_treq", "nvme_tcp_ktls", "nvme_subsystem", "nvme_discovery", "nvme_in_capsule_data_size"]
    }

    fn take_keys(&mut self, written: Deserializer<'_>, directory: &Path) -> Result<(), KeyError> {
        *self = NvmeTcp::deserialize(written)?;
        Ok(self.prepare(directory)?)
    }

    fn commands(&self, command: Command) -> Command {
        NvmeCtlCommand::augment_subcommands(command)
    }

    fn read_command(&self, matches: &ArgMatches) -> Result<(String, Value), clap::Error> {
        let mut own = NvmeCtlCommand::from_arg_matches(matches)?;
        if let NvmeCtlCommand::AddHost { host, .. } = &mut own {
            host.make_absolute();
        }
        let (NvmeCtlCommand::AddHost { target, .. }
        | NvmeCtlCommand::RemoveHost { target, .. }
        | NvmeCtlCommand::ReadKeys { target, .. }
        | NvmeCtlCommand::Ana { target, .. }) = &own;
        Ok((target.clone(), json!(own)))
    }

    fn is_configured(&self) -> bool {
        !self.subsystems.is_empty() || self.nvme_tcp_treq != Treq::default()
    }

    fn check(&mut self, volumes: &[&str]) -> Result<(), String> {
        config::check(self, volumes)
    }

    fn targets(&self) -> Vec<TargetAccess> {
        self.subsystems.iter().map(ConfiguredSubsystem::access).collect()
    }

    fn target_tables(&self) -> &'static [TargetTables] {
        &[TargetTables {
            key: "nvme_subsystem",
            name: "nqn",
            units: &["namespaces", "namespace"],
            first_unit: 1,
            peers: &[("hosts", ""), ("host", "hostnqn")],
            parts: &[("namespace", "nsid"), ("ana_group", "ANAGRPID")],
            port_name: None,
        }]
    }

    fn fixed_keys(&self) -> &'static [&'static str] {
        &["nvme_tcp_ktls", "nvme_in_capsule_data_size", "nvme_discovery.unique_subnqn"]
    }

    fn own_entry(&self, named: &VolumeNames, _description: &str) -> Option<toml::Table> {
        let namespaces = toml::Table::from_iter([("1".to_owned(), named.export.as_str().into())]);
        let nqn = default_nqn(&named.target).into();
        Some(toml::Table::from_iter([("nqn".to_owned(), nqn), ("namespaces".to_owned(), namespaces.into())]))
    }

    fn write_command(
        &self,
        what: &Value,
        target: &mut toml::Table,
        listeners: &[NamedListener],
    ) -> Result<Option<String>, String> {
        NvmeCtlCommand::deserialize(what).map_err(|error| error.to_string())?.write(target, listeners)
    }

    fn serve(&self, service: &Service<'_>) -> Result<Option<Box<dyn LiveFrontend>>, Failure> {
        let Service { exports, places, policy, .. } = *service;
        let machine = node_id(places);
        let factory = NamespaceFactory {
            exports: exports.clone(),
            node: machine.clone(),
            identities: self.identities(),
        };
        let node = NvmeNode::new(Vec::new(), Vec::new(), &machine);
        let node = match self.nvme_discovery.unique_subnqn {
            true => node.with_unique_discovery_nqn(&machine),
            false => node,
        };
        let node = match self.nvme_in_capsule_data_size {
            Some(bytes) => node.with_in_capsule(bytes),
            None => node,
        };
        let hosts = LiveHosts::new(self.nvme_tcp_treq, &machine);
        let ktls = self.nvme_tcp_ktls.unwrap_or(true);
        let live = LiveSubsystems::new(node, hosts, factory, policy.clone(), ktls);
        live.reconfigure(self, service);
        Ok(Some(Box::new(live)))
    }

    fn connect_info(&self, protocol: &Protocol, portal: &Portal, named: &VolumeNames) -> Vec<ConnectInfo> {
        let Some((listener, tcp)) = portal.tcp() else { return Vec::new() };
        if protocol.name == NVME_RDMA.name && self.nvme_tcp_treq == Treq::Required {
            return Vec::new();
        }
        let port = if tcp.port() == NVME_TCP.port { String::new() } else { format!(":{}", tcp.port()) };
        let (address, host) = (zone::host_text(&tcp), zone::url_host(&tcp));
        let info = |subsystem: &ConfiguredSubsystem, nsid: u32| {
            let nqn = &subsystem.nqn;
            let is_rdma = protocol.name == NVME_RDMA.name;
            let (transport, query) = if is_rdma { ("rdma", portal.rdma_query) } else { ("tcp", "") };
            let plain = format!("nvme+{transport}://{host}{port}{query}").parse::<NvmeUrl>();
            let plain = plain.map(|url| NvmeUrl { subsystem: Some(nqn.clone()), nsid, ..url });
            let word = shell_word(nqn.as_str());
            let connect = format!("nvme connect -t {transport} -a {address} -s {} -n {word}", tcp.port());
            let mut url = plain.ok()?;
            let command = match subsystem.example_host(nsid) {
                // TLS is not supported over RDMA.
                Some(host) if is_rdma && host.tls_key_file.is_some() => return None,
                Some(host) => {
                    host.add_to(&mut url);
                    host.command(nqn, &connect)
                }
                None => connect,
            };
            Some(ConnectInfo { url: url.to_string(), commands: vec![command], ..ConnectInfo::default() })
        };
        let own = self.subsystems.is_empty().then(|| ConfiguredSubsystem::of_volume(named));
        let subsystems = self.subsystems.having(&named.export).chain(&own);
        let here = subsystems.filter(|subsystem| subsystem.is_at(&listener));
        let namespaces = here.flat_map(|subsystem| {
            let of_volume =
                subsystem.namespaces.iter().filter(|(_, namespace)| namespace.volume == named.export);
            of_volume.map(move |(nsid, _)| (subsystem, *nsid))
        });
        namespaces.filter_map(|(subsystem, nsid)| info(subsystem, nsid)).collect()
    }
}

impl NvmeTcp {
    /// What the identifiers of namespaces depend on.
    fn identities(&self) -> ConfiguredIdentities {
        ConfiguredIdentities {
            has_default_targets: self.subsystems.is_empty(),
            namespaces: self.namespaces(),
            first_of: self.first_subsystems(),
        }
    }

    /// The namespaces of all subsystems, by NQN and NSID.
    fn namespaces(&self) -> BTreeMap<(Nqn, u32), ConfiguredNamespace> {
        let of_each = self.subsystems.iter().flat_map(|subsystem| {
            let namespaces = subsystem.namespaces.iter();
            namespaces.map(|(nsid, namespace)| ((subsystem.nqn.clone(), *nsid), namespace.clone()))
        });
        of_each.collect()
    }

    /// The first subsystem of each volume.
    fn first_subsystems(&self) -> BTreeMap<String, Nqn> {
        let of_each = self.subsystems.iter().rev().flat_map(|subsystem| {
            subsystem.namespaces.values().map(|namespace| (namespace.volume.clone(), subsystem.nqn.clone()))
        });
        of_each.collect()
    }
}

impl NvmeCtlCommand {
    /// Writes the command into the subsystem's entry; returns a message for the user, if any.
    fn write(&self, target: &mut toml::Table, listeners: &[NamedListener]) -> Result<Option<String>, String> {
        match self {
            NvmeCtlCommand::AddHost { host, .. } => {
                if !["hosts", "host"].iter().any(|key| target.contains_key(*key)) {
                    return Err(OpenToAll.to_string());
                }
                remove_host(target, &host.hostnqn);
                let entry = toml::Value::try_from(host).map_err(|error| error.to_string())?;
                let list = target.entry("host").or_insert_with(|| toml::Value::Array(Vec::new()));
                list.as_array_mut().into_iter().for_each(|list| list.push(entry.clone()));
            }
            NvmeCtlCommand::RemoveHost { hostnqn, .. } => {
                if !remove_host(target, hostnqn) {
                    return Err(format!("no host has the name `{hostnqn}`; 'ctl export' lists the hosts"));
                }
                // Without `hosts` and `host` the subsystem would be open to all hosts.
                target.entry("hosts").or_insert_with(|| toml::Value::Array(Vec::new()));
            }
            // All files are read with each change.
            NvmeCtlCommand::ReadKeys { hostnqn, .. } => return hosts_with_files(target, hostnqn.as_deref()),
            NvmeCtlCommand::Ana { group, state, at, .. } => {
                let of_one = at.map(|at| NamedListener::find(listeners, at).map(|own| vec![own]));
                let chosen = of_one.unwrap_or_else(|| Ok(listeners.to_vec()));
                let states = states_of_group(target, *group)?;
                let word = toml::Value::try_from(*state).map_err(|error| error.to_string())?;
                for listener in chosen? {
                    let is_its =
                        |key: &str| tcp_address(key, NVME_TCP.port).is_ok_and(|own| listener.is_at(&own));
                    let known = states.keys().find(|key| is_its(key)).cloned();
                    states
                        .insert(known.unwrap_or_else(|| zone::address_text(&listener.written)), word.clone());
                }
            }
        }
        Ok(None)
    }
}

/// Removes a host from a subsystem's entry; returns whether it was there.
fn remove_host(target: &mut toml::Table, name: &str) -> bool {
    let is_it = |entry: &toml::Value| {
        entry.as_str().or_else(|| entry.get("hostnqn").and_then(toml::Value::as_str)) == Some(name)
    };
    let mut count = 0;
    for key in ["hosts", "host"] {
        let Some(list) = target.get_mut(key).and_then(toml::Value::as_array_mut) else { continue };
        count += list.len();
        list.retain(|entry| !is_it(entry));
        count -= list.len();
    }
    count > 0
}

/// Says of how many hosts files are read, of all or of `only` one.
fn hosts_with_files(target: &toml::Table, only: Option<&str>) -> Result<Option<String>, String> {
    let hosts = target.get("host").and_then(toml::Value::as_array).into_iter().flatten();
    let hosts = hosts.filter_map(|host| HostEntry::deserialize(host.clone()).ok());
    let count = hosts.filter(|host| only.is_none_or(|only| host.hostnqn == only) && host.has_files()).count();
    match (count, only) {
        (0, Some(host)) => {
            Err(format!("no host with key files has the name `{host}`; 'ctl export' lists the hosts"))
        }
        (1, _) => Ok(Some("reloaded the key files of 1 host".to_owned())),
        (count, _) => Ok(Some(format!("reloaded the key files of {count} hosts"))),
    }
}

/// The states of an ANA group in a subsystem's entry.
fn states_of_group(target: &mut toml::Table, group: u32) -> Result<&mut toml::Table, String> {
    let is_it = |entry: &&mut toml::Value| {
        entry.get("ANAGRPID").and_then(toml::Value::as_integer) == Some(i64::from(group))
    };
    let groups = target.get_mut("ana_group").and_then(toml::Value::as_array_mut);
    let entry = groups.into_iter().flatten().find(is_it).and_then(|entry| entry.get_mut("states"));
    // The config has no key for the group of the namespaces that are in none.
    let missing = || format!("has no ana_group {group}; add it in the config file");
    entry.and_then(toml::Value::as_table_mut).ok_or_else(missing)
}

/// The well-known and this daemon's unique NQN of the discovery subsystem.
fn discovery_names(machine: &str) -> [Nqn; 2] {
    [well_known_discovery_nqn(), unique_discovery_nqn(machine)]
}

/// An identifier of this daemon, from the machine ID and the addresses of its listeners, which no
/// other daemon of the machine has. The unique NQN of discovery is derived from it, so it is the
/// same after a restart, except on a machine without an ID.
fn node_id(places: &[ListenerAddress]) -> String {
    let machine = machine_id();
    if machine.is_empty()
        && let Ok(random) = random_bytes()
    {
        return VolumeUuid::random(random).to_string();
    }
    let tcp = places.iter().filter_map(ListenerAddress::tcp);
    let addresses: Vec<String> = tcp.map(|address| address.to_string()).collect();
    format!("{machine} {}", addresses.join(" "))
}

/// A volume's own subsystem; `None` if no listener exports the volume.
fn of_volume(policy: &Policy, ports: &[FabricsPort], named: &VolumeNames) -> Option<ConfiguredSubsystem> {
    let leads = |port: &&FabricsPort| {
        policy.serves(&NVME_TCP, &ListenerAddress::Socket(Address::Tcp(port.address)), &named.export)
    };
    let own: Vec<_> = ports.iter().filter(leads).map(|port| port.address).collect();
    (!own.is_empty()).then(|| ConfiguredSubsystem::of_volume(named).at(own).allowed_by(policy))
}

/// The NQN of a volume's own subsystem; `name` is the part after the prefix.
fn default_nqn(name: &str) -> String {
    format!("nqn.2026-11.blockmux:{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hosts_tls_key_is_for_its_subsystem_and_for_both_names_of_discovery() {
        use blockmux_proto::nvme::auth::psk::ConfiguredPsk;
        use blockmux_proto::nvme::subsystem::Subsystem;
        const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
        let host = Nqn::new("nqn.h").unwrap();
        let mut subsystem = ConfiguredSubsystem::of_volume(&VolumeNames::plainly("disk0"));
        subsystem.tls_keys.insert(host.clone(), ConfiguredPsk::parse(KEY).unwrap());
        subsystem.entries.push(HostEntry::plain(&host));
        let other = ConfiguredSubsystem::of_volume(&VolumeNames::plainly("disk1"));
        let node = NvmeNode::new(Vec::new(), Vec::new(), "machine");
        let hosts = LiveHosts::new(Treq::default(), "machine");
        for one in [&subsystem, &other] {
            let served = Subsystem::new(one.nqn.clone(), "machine", Vec::new(), one.hosts.clone());
            hosts.insert_all(&node, &served, one);
        }
        let is_there = |nqn: &Nqn| node.keyring().has_retained(&host, nqn);
        assert!(is_there(&subsystem.nqn) && !is_there(&other.nqn));
        assert!(is_there(&well_known_discovery_nqn()) && is_there(&unique_discovery_nqn("machine")));
        let served = Subsystem::new(subsystem.nqn.clone(), "machine", Vec::new(), Vec::new());
        hosts.remove_all(&node, &served);
        assert!(node.keyring().is_empty());
    }

    #[test]
    fn the_authentication_of_hosts_is_in_the_url_and_the_command() {
        const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d";
        let mut subsystem = ConfiguredSubsystem::of_volume(&VolumeNames::plainly("a"));
        let way = |subsystem: &ConfiguredSubsystem| {
            let settings =
                NvmeTcp { subsystems: [subsystem.clone()].into_iter().collect(), ..NvmeTcp::default() };
            let address = Portal::at("127.0.0.1:4420");
            let ConnectInfo { url, commands, .. } =
                settings.connect_info(&NVME_TCP, &address, &VolumeNames::plainly("a")).remove(0);
            (url, commands[0].clone())
        };
        let (open, connect) = way(&subsystem);
        subsystem.is_open = false;
        subsystem.hosts.push(Nqn::new("nqn.h").unwrap());
        let (url, command) = way(&subsystem);
        let by_name = format!("{connect} --hostnqn=nqn.h --hostid=\"$(uuidgen)\"");
        assert_eq!((url, command), (format!("{open}?hostnqn=nqn.h"), by_name));
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
    fn daemons_with_other_listeners_have_another_discovery_subsystem() {
        let id = |address: &str| node_id(&[ListenerAddress::of_tcp(address.parse().unwrap())]);
        let names = ["127.0.0.1:4420", "127.0.0.1:4421"].map(|address| unique_discovery_nqn(&id(address)));
        assert_ne!(names[0], names[1]);
    }

    #[test]
    fn a_volume_is_namespace_1_of_a_subsystem_with_its_name() {
        let ways = |address: &str| {
            let mut ways = NvmeTcp::default().connect_info(
                &NVME_TCP,
                &Portal::at(address),
                &VolumeNames::plainly("disk0"),
            );
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
