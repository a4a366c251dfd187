//! NVMe subsystems and discovery in the config file: their namespaces, hosts and ANA groups.

use super::super::frontend::VolumeNames;
use super::super::policy::{ListenerTable, Policy, PublicAccess, TargetAccess};
use super::hosts::{HostEntry, HostKeys, NO_TLS_IDENTITY};
use super::namespaces::{self, ConfiguredNamespace, MODEL_LEN, NamespaceEntry, SERIAL_LEN, ascii};
use super::{NVME_TCP, NvmeTcp, default_nqn};
use crate::access::networks;
use crate::failure::Failure;
use crate::protocol::address::{matches_listener, tcp_address};
use crate::protocol::configured::HasVolumes;
use blockmux_proto::fabrics::controller::node::{FabricsPort, MAX_IN_CAPSULE, Referral, SecureChannel};
use blockmux_proto::names::networks::AllowedNetworks;
use blockmux_proto::nvme::ana::{AnaGroup, MAX_ANA_GROUPS};
use blockmux_proto::nvme::auth::HostSecrets;
use blockmux_proto::nvme::auth::psk::ConfiguredPsk;
use blockmux_proto::nvme::hosts::HostAccess;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::is_discovery_nqn;
use blockmux_wire::nvme::log::AnaState;
use blockmux_wire::nvmeof::fabrics::DISCOVERY_NQN;
use blockmux_wire::nvmeof::tcp::NVME_DISCOVERY_PORT;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

impl NvmeTcp {
    /// Validates the entries and reads the files that they name; relative paths are below
    /// `directory`.
    ///
    /// # Errors
    /// If a value or a file is invalid.
    pub(super) fn prepare(&mut self, directory: &Path) -> Result<(), Failure> {
        let max = MAX_IN_CAPSULE;
        if let Some(bytes) = self.nvme_in_capsule_data_size.filter(|bytes| *bytes > max || bytes % 16 != 0) {
            return Err(Failure::request(format!(
                "nvme_in_capsule_data_size {bytes}: set a multiple of 16 up to {max}"
            )));
        }
        for mut entry in self.nvme_subsystem.drain(..) {
            entry.host.iter_mut().for_each(|host| host.anchor(directory));
            self.subsystems.push(ConfiguredSubsystem::prepare(entry)?);
        }
        self.referrals = self.nvme_discovery.prepare()?;
        Ok(())
    }
}

/// One `[[nvme_subsystem]]` of the config file.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SubsystemEntry {
    nqn: String,
    /// Serial number; by default derived from the subsystem's name and its namespaces' UUIDs.
    serial_number: Option<String>,
    /// Model number; by default `Blockmux`.
    model_number: Option<String>,
    /// Volumes by NSID; keys of TOML tables are strings.
    #[serde(default)]
    namespaces: BTreeMap<String, String>,
    /// The listeners through which the subsystem is reached; empty for all.
    #[serde(default)]
    listeners: Vec<String>,
    /// Further namespaces, with identifiers.
    #[serde(default)]
    namespace: Vec<NamespaceEntry>,
    /// Hosts that may connect. Without `hosts` and `host`, every host may connect.
    hosts: Option<Vec<String>>,
    /// Further hosts that may connect, with keys and namespaces.
    #[serde(default)]
    host: Vec<HostEntry>,
    /// Groups of namespaces with ANA states.
    #[serde(default)]
    ana_group: Vec<AnaGroupEntry>,
    /// Networks from which hosts may connect.
    #[serde(default, rename = "allow", deserialize_with = "networks::read")]
    networks: AllowedNetworks,
}

/// `[nvme_discovery]`: settings of the discovery subsystem.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NvmeDiscoveryEntry {
    /// The discovery subsystem has a unique name in addition to the well-known one.
    #[serde(default)]
    pub(crate) unique_subnqn: bool,
    /// Other discovery subsystems, reported to hosts.
    #[serde(default)]
    referral: Vec<ReferralEntry>,
}

/// One `[[nvme_discovery.referral]]`: another discovery subsystem.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReferralEntry {
    traddr: IpAddr,
    #[serde(default = "discovery_port")]
    trsvcid: u16,
    /// NQN of the subsystem; by default the well-known one.
    subnqn: Option<String>,
}

/// One `[[nvme_subsystem.ana_group]]`.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct AnaGroupEntry {
    #[serde(rename = "ANAGRPID")]
    id: u32,
    namespaces: Vec<u32>,
    /// ANA states by address of the listener; other listeners are optimized.
    states: BTreeMap<String, AnaStateName>,
}

/// TREQ of discovery log entries: whether hosts must use TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) enum Treq {
    /// Hosts with a key must use TLS; other hosts cannot use TLS.
    #[default]
    #[serde(rename = "not required")]
    NotRequired,
    /// All hosts must use TLS.
    #[serde(rename = "required")]
    Required,
}

impl Treq {
    /// The value in discovery log entries, given whether any host has a key.
    pub(super) fn secure_channel(self, has_keys: bool) -> SecureChannel {
        match self {
            Treq::Required => SecureChannel::Required,
            Treq::NotRequired if has_keys => SecureChannel::NotRequired,
            Treq::NotRequired => SecureChannel::None,
        }
    }
}

/// Name of an ANA state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AnaStateName {
    /// The preferred path.
    Optimized,
    /// A slower path.
    NonOptimized,
    /// A path that cannot be used now.
    Inaccessible,
}

/// A validated ANA group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConfiguredGroup {
    id: u32,
    namespaces: Vec<u32>,
    states: Vec<(SocketAddr, AnaState)>,
}

/// A validated subsystem, with the keys of its hosts.
#[derive(Clone, Debug)]
pub(crate) struct ConfiguredSubsystem {
    pub(super) nqn: Nqn,
    pub(super) serial_number: Option<String>,
    pub(super) model_number: Option<String>,
    /// The listeners through which the subsystem is reached; empty for all.
    listeners: Vec<SocketAddr>,
    /// Namespaces by NSID.
    pub(super) namespaces: BTreeMap<u32, ConfiguredNamespace>,
    /// Every host may connect.
    pub(super) is_open: bool,
    pub(super) hosts: Vec<Nqn>,
    /// Visible namespaces of hosts that do not see all.
    pub(super) masks: BTreeMap<Nqn, BTreeSet<u32>>,
    /// The `[[nvme_subsystem.host]]` entries.
    pub(super) entries: Vec<HostEntry>,
    pub(super) ana_groups: Vec<ConfiguredGroup>,
    /// Networks from which hosts may connect.
    pub(super) networks: AllowedNetworks,
    pub(super) secrets: BTreeMap<Nqn, Arc<HostSecrets>>,
    /// TLS keys of hosts.
    pub(super) tls_keys: BTreeMap<Nqn, ConfiguredPsk>,
}

impl ConfiguredSubsystem {
    /// Validates an entry and reads the files that it names.
    ///
    /// # Errors
    /// If a value or a file is invalid; the message names the subsystem.
    pub(crate) fn prepare(entry: SubsystemEntry) -> Result<ConfiguredSubsystem, Failure> {
        let wrong = |what: String| Failure::request(format!("nvme_subsystem `{}`: {what}", entry.nqn));
        let name = |text: &str| {
            let name = read_name(text).map_err(wrong)?;
            if let Some(violation) = name.violation() {
                tracing::warn!("nvme_subsystem `{}`: `{text}`: {violation}; some hosts refuse it", entry.nqn);
            }
            Ok::<Nqn, Failure>(name)
        };
        let nqn = name(&entry.nqn)?;
        if is_discovery_nqn(nqn.as_str()) {
            return Err(wrong("the name is that of discovery subsystems; give it another `nqn`".to_owned()));
        }
        let is_open = entry.hosts.is_none() && entry.host.is_empty();
        let listed = entry.hosts.iter().flatten();
        let mut hosts: Vec<Nqn> = listed.map(|host| name(host)).collect::<Result<_, _>>()?;
        let (mut secrets, mut masks, mut tls_keys) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let own = nqn.clone();
        for host in &entry.host {
            let nqn = name(&host.hostnqn)?;
            if hosts.contains(&nqn) {
                return Err(wrong(format!("host `{}` is listed twice; remove one", host.hostnqn)));
            }
            hosts.push(nqn.clone());
            let HostKeys { access, tls_key } = host.read()?;
            if tls_key.is_some() && !(own.fits_tls_identity() && nqn.fits_tls_identity()) {
                return Err(wrong(format!("host `{nqn}`: {NO_TLS_IDENTITY}")));
            }
            tls_keys.extend(tls_key.map(|key| (nqn.clone(), key)));
            masks.extend(access.namespaces.map(|mask| (nqn.clone(), mask)));
            secrets.extend(access.secrets.map(|own| (nqn, own)));
        }
        let namespaces = namespaces::prepare(&entry.namespaces, &entry.namespace).map_err(wrong)?;
        let ana_groups = groups(&entry.ana_group, &namespaces).map_err(wrong)?;
        let text = |key, text: &Option<String>, max| {
            text.as_deref().map(|text| ascii(key, text, max).map_err(wrong)).transpose()
        };
        let listeners = entry.listeners.iter().map(|address| tcp_address(address, NVME_TCP.port));
        let listeners =
            listeners.collect::<Result<_, _>>().map_err(|what| wrong(format!("listeners: {what}")))?;
        let serial_number = text("serial_number", &entry.serial_number, SERIAL_LEN)?;
        let model_number = text("model_number", &entry.model_number, MODEL_LEN)?;
        Ok(ConfiguredSubsystem {
            nqn,
            serial_number,
            model_number,
            listeners,
            namespaces,
            is_open,
            hosts,
            masks,
            entries: entry.host,
            ana_groups,
            networks: entry.networks,
            secrets,
            tls_keys,
        })
    }

    /// A volume's own subsystem, if no subsystems are configured.
    pub(super) fn of_volume(named: &VolumeNames) -> ConfiguredSubsystem {
        ConfiguredSubsystem {
            nqn: Nqn::new(&default_nqn(&named.target)).expect("volume names are valid in every protocol"),
            serial_number: None,
            model_number: None,
            listeners: Vec::new(),
            namespaces: BTreeMap::from([(1, ConfiguredNamespace::of_volume(&named.export))]),
            is_open: true,
            hosts: Vec::new(),
            masks: BTreeMap::new(),
            entries: Vec::new(),
            ana_groups: Vec::new(),
            networks: AllowedNetworks::default(),
            secrets: BTreeMap::new(),
            tls_keys: BTreeMap::new(),
        }
    }
}

impl ConfiguredSubsystem {
    /// A host that sees the namespace, for announced commands; preferably one with its own entry.
    /// `None` if every host sees it or none.
    pub(super) fn example_host(&self, nsid: u32) -> Option<HostEntry> {
        let named = self.entries.iter().find(|entry| entry.sees(nsid)).cloned();
        let is_plain = |host: &&Nqn| self.entries.iter().all(|entry| entry.hostnqn != host.as_str());
        named.or_else(|| self.hosts.iter().find(is_plain).map(HostEntry::plain))
    }

    /// The subsystem's access control, for the policy.
    pub(super) fn access(&self) -> TargetAccess {
        let is_open = self.is_open && self.networks.is_everyone();
        let volumes = self.namespaces.values().map(|one| (one.volume.clone(), PublicAccess::all_if(is_open)));
        TargetAccess {
            kind: "nvme_subsystem",
            name: self.nqn.as_str().to_owned(),
            listeners: ("listeners", self.listeners.clone()),
            volumes: volumes.collect(),
            is_restricted: !is_open,
            authenticates_all: !self.is_open,
            tables: self.ana_groups.iter().map(ConfiguredGroup::listeners).collect(),
            moved_to: None,
        }
    }

    /// Limits the subsystem to networks that the policy allows for each of its volumes.
    pub(super) fn allowed_by(self, policy: &Policy) -> ConfiguredSubsystem {
        let volumes = self.namespaces.values().map(|one| policy.networks_of(&one.volume));
        let networks = volumes.fold(self.networks.clone(), |networks, own| networks.and(&own));
        ConfiguredSubsystem { networks, ..self }
    }

    /// Makes the subsystem reachable through these listeners only.
    pub(super) fn at(self, listeners: Vec<SocketAddr>) -> ConfiguredSubsystem {
        ConfiguredSubsystem { listeners, ..self }
    }

    /// Whether the subsystem is reached through the listener.
    pub(super) fn is_at(&self, listener: &SocketAddr) -> bool {
        self.listeners.is_empty() || self.listeners.iter().any(|named| matches_listener(named, listener))
    }

    /// Whether two configs of a subsystem agree in the values that its controllers report to hosts
    /// and that cannot change while a host is connected.
    pub(super) fn has_same_identity(&self, other: &ConfiguredSubsystem) -> bool {
        let groups =
            |own: &ConfiguredSubsystem| own.ana_groups.iter().map(|group| group.id).collect::<Vec<_>>();
        let numbers = |own: &ConfiguredSubsystem| (own.serial_number.clone(), own.model_number.clone());
        let mut both = self.namespaces.keys().filter(|nsid| other.namespaces.contains_key(nsid));
        numbers(self) == numbers(other)
            && groups(self) == groups(other)
            && both.all(|nsid| self.ana_group_of(*nsid) == other.ana_group_of(*nsid))
    }

    /// The configured ANA group of a namespace; `None` for the default group.
    pub(super) fn ana_group_of(&self, nsid: u32) -> Option<u32> {
        self.ana_groups.iter().find(|group| group.namespaces.contains(&nsid)).map(|group| group.id)
    }

    /// The keys and visible namespaces of a listed host.
    pub(super) fn host_keys(&self, host: &Nqn) -> HostKeys {
        let (namespaces, secrets) = (self.masks.get(host).cloned(), self.secrets.get(host).cloned());
        let access = HostAccess { namespaces, secrets };
        HostKeys { access, tls_key: self.tls_keys.get(host).cloned() }
    }

    /// The ports through which the subsystem is reached; `None` for all.
    pub(super) fn ports(&self, ports: &[FabricsPort]) -> Option<BTreeSet<u16>> {
        let own = ports.iter().filter(|port| self.is_at(&port.address)).map(|port| port.id);
        (!self.listeners.is_empty()).then(|| own.collect())
    }
}

impl HasVolumes for ConfiguredSubsystem {
    /// The names of the volumes of its namespaces.
    fn volumes(&self) -> impl Iterator<Item = &str> {
        self.namespaces.values().map(|namespace| namespace.volume.as_str())
    }
}

impl NvmeDiscoveryEntry {
    /// Validates the referrals.
    ///
    /// # Errors
    /// If a name is invalid.
    pub(crate) fn prepare(&self) -> Result<Vec<Referral>, Failure> {
        let referral = |entry: &ReferralEntry| {
            let name = entry.subnqn.as_deref().unwrap_or(DISCOVERY_NQN);
            let nqn = read_name(name)
                .map_err(|what| Failure::request(format!("nvme_discovery: referral: {what}")))?;
            Ok(Referral { address: SocketAddr::new(entry.traddr, entry.trsvcid), nqn })
        };
        self.referral.iter().map(referral).collect()
    }
}

/// Takes an NQN as it is.
///
/// # Errors
/// If it cannot be sent.
pub(super) fn read_name(name: &str) -> Result<Nqn, String> {
    Nqn::new(name).ok_or_else(|| {
        format!("`{name}` is not an NVMe qualified name, which has 1 to 223 bytes; write it as nqn.2026-11.com.example:a")
    })
}

fn discovery_port() -> u16 {
    NVME_DISCOVERY_PORT
}

impl ConfiguredGroup {
    /// The listeners with a configured state.
    fn listeners(&self) -> ListenerTable {
        let listeners = self.states.iter().map(|(address, _)| *address).collect();
        ListenerTable { key: format!("ana_group {}", self.id), listeners, is_complete: false }
    }

    /// The group with identifiers of ports instead of the addresses of listeners.
    pub(super) fn at(&self, ports: &[FabricsPort]) -> AnaGroup {
        let of_port = |port: &FabricsPort| {
            let (_, state) =
                self.states.iter().find(|(address, _)| matches_listener(address, &port.address))?;
            Some((port.id, *state))
        };
        let states = ports.iter().filter_map(of_port).collect();
        AnaGroup { id: self.id, namespaces: self.namespaces.clone(), states }
    }
}

fn groups(
    entries: &[AnaGroupEntry],
    namespaces: &BTreeMap<u32, ConfiguredNamespace>,
) -> Result<Vec<ConfiguredGroup>, String> {
    if entries.len() > MAX_ANA_GROUPS {
        return Err(format!("there are more than {MAX_ANA_GROUPS} ana_groups; remove some"));
    }
    let (mut ids, mut members) = (HashSet::new(), HashSet::new());
    let group = |entry: &AnaGroupEntry| {
        let id = entry.id;
        if id == 0 || !ids.insert(id) {
            return Err(format!("ANAGRPID {id}: give each ana_group its own number, from 1"));
        }
        if let Some(nsid) = entry.namespaces.iter().find(|nsid| !namespaces.contains_key(nsid)) {
            return Err(format!("ana_group {id}: no namespace has NSID {nsid}; correct `namespaces`"));
        }
        if let Some(nsid) = entry.namespaces.iter().find(|nsid| !members.insert(**nsid)) {
            return Err(format!("ana_group {id}: namespace {nsid} is in two groups; remove it from one"));
        }
        let states = entry.states.iter().map(|(address, state)| {
            let address =
                tcp_address(address, NVME_TCP.port).map_err(|what| format!("ana_group {id}: {what}"))?;
            Ok((address, state.ana_state()))
        });
        let states = states.collect::<Result<_, String>>()?;
        Ok(ConfiguredGroup { id, namespaces: entry.namespaces.clone(), states })
    };
    entries.iter().map(group).collect()
}

impl AnaStateName {
    /// The state's value on the wire.
    pub(crate) fn ana_state(self) -> AnaState {
        match self {
            AnaStateName::Optimized => AnaState::OPTIMIZED,
            AnaStateName::NonOptimized => AnaState::NON_OPTIMIZED,
            AnaStateName::Inaccessible => AnaState::INACCESSIBLE,
        }
    }
}

/// Checks the settings against the names of all volumes.
///
/// # Errors
/// If names are not unique, a volume is missing, or required keys are missing.
pub(super) fn check(own: &NvmeTcp, volumes: &[&str]) -> Result<(), String> {
    let has_keys = own.subsystems.iter().any(|subsystem| !subsystem.tls_keys.is_empty());
    if own.nvme_tcp_treq == Treq::Required && !has_keys {
        return Err(
            "nvme_tcp_treq is `required`, but no host has a key; add a tls_key_file to a host".to_owned()
        );
    }
    let (mut names, mut serials) = (HashSet::new(), HashSet::new());
    let known: HashSet<&str> = volumes.iter().copied().collect();
    for subsystem in own.subsystems.iter() {
        let nqn = &subsystem.nqn;
        if !names.insert(nqn) {
            return Err(format!("two nvme_subsystems have the NQN `{nqn}`; rename one"));
        }
        if let Some(twice) = subsystem.serial_number.as_ref().filter(|serial| !serials.insert(*serial)) {
            return Err(format!("two nvme_subsystems have the serial_number `{twice}`; change one"));
        }
        if let Some(missing) = subsystem.volumes().find(|name| !known.contains(name)) {
            return Err(format!(
                "nvme_subsystem `{nqn}`: no volume has the name `{missing}`; add a [[volume]]"
            ));
        }
    }
    namespaces::refuse_duplicates(own.subsystems.iter().flat_map(|subsystem| subsystem.namespaces.values()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::nvme::auth::{DhGroup, Hash};

    fn prepare(text: &str) -> Result<ConfiguredSubsystem, String> {
        let entry: SubsystemEntry = toml::from_str(text).map_err(|error| error.message().to_owned())?;
        ConfiguredSubsystem::prepare(entry).map_err(|failure| failure.to_string())
    }

    #[test]
    fn a_subsystem_has_the_values_of_its_table() {
        let subsystem =
            prepare("nqn = 'nqn.a'\nnamespaces = { 1 = 'x', 256 = 'y' }\nhosts = ['nqn.h']").unwrap();
        assert_eq!(subsystem.nqn.as_str(), "nqn.a");
        assert_eq!(subsystem.namespaces.get(&256), Some(&ConfiguredNamespace::of_volume("y")));
        assert_eq!((subsystem.is_open, &subsystem.hosts), (false, &vec![Nqn::new("nqn.h").unwrap()]));
        let is_open = |text: &str| prepare(text).unwrap().is_open;
        assert!(is_open("nqn = 'nqn.a'") && !is_open("nqn = 'nqn.a'\nhosts = []"));
        assert!(subsystem.ana_groups.is_empty());
        let settings =
            NvmeTcp { subsystems: [subsystem.clone()].into_iter().collect(), ..NvmeTcp::default() };
        assert_eq!(check(&settings, &["x", "y"]), Ok(()));
        assert!(check(&settings, &["x"]).unwrap_err().contains("no volume has the name `y`"));
        let twice = [subsystem.clone(), subsystem].into_iter().collect();
        let settings = NvmeTcp { subsystems: twice, ..NvmeTcp::default() };
        assert!(check(&settings, &["x", "y"]).unwrap_err().starts_with("two nvme_subsystems have the NQN"));
    }

    #[test]
    fn invalid_names_and_numbers_are_reported() {
        for (text, said) in [
            ("nqn = ''\nnamespaces = {}", "`` is not an NVMe qualified name"),
            ("nqn = 'nqn.2014-08.org.nvmexpress.discovery'", "the name is that of discovery subsystems"),
            ("nqn = 'nqn.2026-11.blockmux:discovery.a'", "the name is that of discovery subsystems"),
            ("nqn = 'nqn.a'\nnamespaces = { 0 = 'x' }", "namespace 0: use an NSID from 1"),
            ("nqn = 'nqn.a'\nnamespaces = { x = 'x' }", "namespace x: use an NSID from 1"),
            ("nqn = 'nqn.a'\nserial_number = '012345678901234567890'", "serial_number `0123"),
            ("nqn = 'nqn.a'\nmodel_number = ''", "model_number `` is invalid; write 1 to 40"),
            ("nqn = 'nqn.a'\nnamespaces = {}\nhosts = ['']", "`` is not an NVMe qualified name"),
            ("nqn = 'nqn.a'\nnamespaces = {}\nhostname = []", "unknown field"),
            (&ana("0", "[1]", "{}"), "ANAGRPID 0: give each"),
            (&format!("{}\n{}", ana("2", "[]", "{}"), ANOTHER), "ANAGRPID 2: give each"),
            (&ana("2", "[7]", "{}"), "no namespace has NSID 7"),
            (&ana("2", "[1, 1]", "{}"), "namespace 1 is in two"),
            (
                &ana("2", "[1]", "{ 'unix:here' = 'optimized' }"),
                "`unix:here` is a Unix socket; write host:port",
            ),
            (&ana("2", "[1]", "{ '[::1]:1' = 'best' }"), "unknown variant"),
        ] {
            let failure = prepare(text).unwrap_err();
            assert!(failure.contains(said), "{failure}");
        }
    }

    /// A subsystem with namespace 1 and an ANA group.
    fn ana(id: &str, namespaces: &str, states: &str) -> String {
        format!(
            "nqn = 'nqn.a'\nnamespaces = {{ 1 = 'x' }}\n[[ana_group]]\nANAGRPID = {id}\n\
             namespaces = {namespaces}\nstates = {states}"
        )
    }

    const ANOTHER: &str = "[[ana_group]]\nANAGRPID = 2\nnamespaces = []\nstates = {}";

    #[test]
    fn a_host_without_a_secret_may_see_a_part_of_the_namespaces() {
        let with = |more: &str| {
            prepare(&format!(
                "nqn = 'nqn.a'\nnamespaces = {{ 1 = 'x', 2 = 'y' }}\n[[host]]\nhostnqn = 'nqn.h'\n{more}"
            ))
        };
        let host = Nqn::new("nqn.h").unwrap();
        let subsystem = with("namespaces = [2]").unwrap();
        assert_eq!(subsystem.masks, BTreeMap::from([(host.clone(), BTreeSet::from([2]))]));
        assert!(subsystem.secrets.is_empty() && subsystem.hosts == [host]);
        assert!(with("").unwrap().masks.is_empty());
        let lonely = with("dhchap_hash = 'hmac(sha256)'").unwrap_err();
        assert!(lonely.contains("DH-HMAC-CHAP needs a dhchap_secret_file"), "{lonely}");
        let twice = with("[[host]]\nhostnqn = 'nqn.h'").unwrap_err();
        assert!(twice.contains("host `nqn.h` is listed twice"), "{twice}");
    }

    #[test]
    fn referrals_have_an_address_and_default_port_and_name() {
        let prepare = |text: &str| {
            let entry: NvmeDiscoveryEntry =
                toml::from_str(text).map_err(|error| error.message().to_owned())?;
            entry.prepare().map_err(|failure| failure.to_string())
        };
        assert_eq!(prepare(""), Ok(Vec::new()));
        let found = prepare("[[referral]]\ntraddr = '2001:db8::1'").unwrap().remove(0);
        assert_eq!(
            (found.address.to_string().as_str(), found.nqn.as_str()),
            ("[2001:db8::1]:8009", DISCOVERY_NQN)
        );
        let wrong = prepare("[[referral]]\ntraddr = '::1'\nsubnqn = ''").unwrap_err();
        assert!(wrong.contains("referral: `` is not an NVMe qualified name"), "{wrong}");
        assert!(prepare("[[referral]]\ntraddr = 'host'").is_err());
    }

    #[test]
    fn the_unique_discovery_name_is_off_by_default() {
        let is_unique = |text: &str| toml::from_str::<NvmeDiscoveryEntry>(text).unwrap().unique_subnqn;
        assert!(!is_unique("") && is_unique("unique_subnqn = true"));
    }

    /// A subsystem with a host whose key `key` names a file with this content and mode; `more` is
    /// appended.
    fn with_file(key: &str, (content, mode): (&str, u32), more: &str) -> Result<ConfiguredSubsystem, String> {
        use std::os::unix::fs::PermissionsExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        let path = file.path().display();
        let host = format!("[[host]]\nhostnqn = 'nqn.h'\n{key} = '{path}'");
        prepare(&format!("nqn = 'nqn.a'\nnamespaces = {{}}\n{host}\n{more}"))
    }

    #[test]
    fn a_hosts_secrets_are_read_from_private_files() {
        const SECRET: &str = "DHHC-1:00:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:\n";
        let with = |content: &str, mode, more: &str| with_file("dhchap_secret_file", (content, mode), more);
        let subsystem = with(SECRET, 0o600, "dhchap_hash = 'hmac(sha384)'\ndhchap_dhgroup = 'null'").unwrap();
        let host = Nqn::new("nqn.h").unwrap();
        assert_eq!((subsystem.hosts.as_slice(), subsystem.secrets.len()), (&[host.clone()][..], 1));
        let secrets = &subsystem.secrets[&host];
        assert_eq!((secrets.hash, secrets.group), (Some(Hash::Sha384), Some(DhGroup::Null)));
        assert!(secrets.controller.is_none());
        for (content, mode, more, said) in [
            (SECRET, 0o644, "", "others can read or write it"),
            ("a secret of one's own", 0o600, "", "is not DHHC-1"),
            (SECRET, 0o600, "dhchap_hash = 'md5'", "dhchap_hash `md5`: write"),
            (SECRET, 0o600, "dhchap_dhgroup = 'modp1024'", "dhchap_dhgroup `modp1024`: write"),
        ] {
            let failure = with(content, mode, more).unwrap_err();
            assert!(failure.contains(said), "{failure}");
            assert!(!failure.contains("AQID"), "{failure}");
        }
    }

    #[test]
    fn tls_is_required_only_if_a_host_has_a_key() {
        let settings = NvmeTcp { nvme_tcp_treq: Treq::Required, ..NvmeTcp::default() };
        assert!(check(&settings, &[]).unwrap_err().contains("tls_key_file"));
    }

    #[test]
    fn a_hosts_tls_key_is_read_from_a_private_file() {
        const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
        let with = |content: &str, mode, more: &str| with_file("tls_key_file", (content, mode), more);
        let subsystem = with(KEY, 0o600, "").unwrap();
        assert_eq!(subsystem.tls_keys[&Nqn::new("nqn.h").unwrap()], ConfiguredPsk::parse(KEY).unwrap());
        assert!(subsystem.secrets.is_empty());
        for (content, mode, more, said) in [
            (KEY, 0o640, "", "others can read or write it"),
            ("a key of one's own", 0o600, "", "is not NVMeTLSkey-1"),
            (&KEY.replace("VRLb", "VRLc"), 0o600, "", "has a wrong CRC"),
            (KEY, 0o600, "dhchap_hash = 'hmac(sha256)'", "DH-HMAC-CHAP needs a dhchap_secret_file"),
            (KEY, 0o600, "[[host]]\nhostnqn = 'nqn.h'", "`nqn.h` is listed twice"),
        ] {
            let failure = with(content, mode, more).unwrap_err();
            assert!(failure.contains(said), "{failure}");
            assert!(!failure.contains("nN9AQb2"), "{failure}");
        }
    }

    #[test]
    fn a_subsystem_is_reached_through_the_listeners_that_it_names() {
        let with = |listeners: &str| prepare(&format!("nqn = 'nqn.a'\nlisteners = {listeners}"));
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let all = ["127.0.0.1:4420", "[::1]:4420", "127.0.0.1:8009"].map(address);
        let ports: Vec<FabricsPort> =
            (1..).zip(all).map(|(id, address)| FabricsPort::new(id, address)).collect();
        assert_eq!(with("[]").unwrap().ports(&ports), None);
        assert!(with("[]").unwrap().is_at(&all[2]));
        let one = with("['[::1]:4420']").unwrap();
        assert_eq!((one.ports(&ports), one.is_at(&all[0])), (Some(BTreeSet::from([2])), false));
        assert_eq!(with("['0.0.0.0:4420']").unwrap().ports(&ports), Some(BTreeSet::from([1, 2])));
        assert_eq!(with("['[::1]']").unwrap().ports(&ports), one.ports(&ports));
        let failure = with("['unix:eth0']").unwrap_err();
        assert!(failure.contains("listeners: `unix:eth0` is a Unix socket"), "{failure}");
    }

    #[test]
    fn an_ana_group_has_a_state_at_each_named_listener() {
        let text = ana("3", "[1]", "{ '[::1]:1' = 'non-optimized', '192.0.2.1:2' = 'inaccessible' }");
        let subsystem = prepare(&text).unwrap();
        let port = |id, address: &str| FabricsPort::new(id, address.parse().unwrap());
        let group = subsystem.ana_groups[0].at(&[port(7, "[::1]:1"), port(8, "127.0.0.1:4420")]);
        assert_eq!((group.id, group.namespaces.as_slice()), (3, &[1][..]));
        assert_eq!(group.states, BTreeMap::from([(7, AnaState::NON_OPTIMIZED)]));
    }
}
