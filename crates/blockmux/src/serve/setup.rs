//! What to serve: the command line and the config file, put together.
//!
//! Volumes and listeners of both are served, the file's first; of a single value the command line's counts.

use super::Args;
use super::config::{Config, VolumeEntry};
use super::opening::{NamedVolume, Opening};
use super::state;
use crate::address::{ListenAddress, ListenerEntry, split_volumes};
use crate::ctl::ControlPath;
use crate::failure::Failure;
use crate::open::Populate;
use crate::poll::Poll;
use crate::protocol::aoe::Serving;
use crate::protocol::iscsi::{ConfiguredTarget, DiscoveryEntry};
use crate::protocol::nvme_tcp::{ConfiguredSubsystem, Treq};
use crate::protocol::policy::{Place, Policy, PolicyListener};
use crate::protocol::{AOE, ISCSI, ISER, NBD, NVME_TCP, PROTOCOLS, Protocol, Settings, of_url};
use blockmux_engine::congestion::Congestion;
use blockmux_engine::socket::Address;
use blockmux_engine::state::check_directory;
use blockmux_lab::ceiling::Transport;
use blockmux_proto::exports::Exports;
use blockmux_proto::fabrics::controller::node::MAX_IN_CAPSULE;
use blockmux_volume::Spec;
use rustix::thread::CapabilitySet;
use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

/// `[NAME=]VOLUME` of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamedSpec {
    pub(super) name: Option<String>,
    pub(super) spec: Spec,
}

/// A protocol, and where to listen for it.
type Listening = (&'static Protocol, ListenerEntry);

/// Everything that a daemon does.
pub(super) struct Setup {
    volumes: Vec<NamedVolume>,
    /// Refuse writes to all of them.
    read_only: bool,
    /// Where to listen, as somebody said; if nobody did, it is for the caller to choose, and for every protocol.
    pub(super) listeners: Vec<Listening>,
    /// Protocols that nobody listens for because the command line names listeners of others.
    not_served: Vec<&'static Protocol>,
    pub(super) aoe: Serving,
    pub(super) settings: Settings,
    pub(super) cores: usize,
    pub(super) poll: Poll,
    pub(super) max_connections: usize,
    /// Of every TCP connection; `None`: the system's.
    pub(super) congestion: Option<Congestion>,
    /// Where reservations are kept; `None` if there is no such place.
    state: Option<PathBuf>,
    /// Where commands are taken while it runs.
    pub(super) control: Option<ControlPath>,
}

impl FromStr for NamedSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<NamedSpec, String> {
        // What a spec begins with is never a name: its kind ends in a colon.
        let named = text.split_once('=').filter(|(name, _)| !name.contains([':', '/', '?', '[']));
        let (name, spec) = named.map_or((None, text), |(name, spec)| (Some(name), spec));
        if let Some(name) = name {
            check_name(name)?;
        }
        let spec = spec.parse().map_err(|error: blockmux_volume::SpecError| error.to_string())?;
        Ok(NamedSpec { name: name.map(str::to_owned), spec })
    }
}

impl Setup {
    /// Reads the config file, if there is one, and adds the command line.
    pub(super) fn gather(mut args: Args) -> Result<Setup, Failure> {
        let mut config = args.config.as_deref().map(Config::read).transpose()?.unwrap_or_default();
        let read_only = args.read_only || config.read_only;
        let from_args = args.volumes.drain(..).map(|NamedSpec { name, spec }| VolumeEntry {
            name,
            spec,
            uuid: None,
            shared: false,
            read_only: false,
            description: String::new(),
            protocols: None,
        });
        let volumes = name_all(config.volume.drain(..).chain(from_args).collect(), read_only)?;
        let is_by_config = !config.aoe.is_empty()
            || [&config.nbd, &config.iscsi, &config.iser, &config.nvme_tcp].iter().any(|own| !own.is_empty());
        let listeners = listeners(&mut config, &mut args)?;
        let aoe = Serving {
            interfaces: config.aoe.iter().chain(&args.aoe).map(|text| interface(text)).collect(),
            shelf: args.aoe_shelf.or(config.aoe_shelf).unwrap_or(0),
            state: args.aoe_state.or(config.aoe_state.take()),
        };
        aoe.check(volumes.iter().map(|volume| volume.name.as_str()))?;
        let mut settings = settings(&mut config)?;
        let words = volumes.iter().map(|volume| (volume.name.clone(), volume.protocols.clone()));
        settings.policy = Policy::new(&settings, words).map_err(Failure::request)?;
        let not_served = PROTOCOLS.iter().copied().filter(|protocol| {
            let is_served = protocols(&listeners, &aoe).any(|own| own.served_as() == protocol.name);
            protocol.served_with.is_none() && !is_served && settings.policy.has_use_for(protocol)
        });
        let not_served = not_served.filter(|_| !is_by_config).collect();
        check_protocols(&listeners, &aoe, &settings, &volumes)?;
        let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(MAX_CORES);
        let cores = at_most(MAX_CORES, "cores", args.cores.or(config.cores), processors)?;
        let max_connections = args.max_connections.or(config.max_connections);
        let max_connections = at_most(MAX_CONNECTIONS, "connections", max_connections, DEFAULT_CONNECTIONS)?;
        let state = args.state.or(config.state);
        if let Some(directory) = &state {
            // Who relies on it should not learn of it from the first initiator that does.
            check_directory(directory).map_err(|error| Failure::request(format!("--state: {error}")))?;
        }
        let congestion = args.congestion.or(config.congestion.take());
        if let Some(congestion) = &congestion {
            let wrong = |why| Failure::request(format!("--congestion {congestion}: {why}"));
            congestion.check().map_err(wrong)?;
        }
        Ok(Setup {
            volumes,
            read_only,
            listeners,
            not_served,
            aoe,
            settings,
            cores,
            poll: args.poll.or(config.poll).unwrap_or(Poll::Adaptive),
            max_connections,
            congestion,
            control: args.control.or(config.control),
            state: state.or_else(state::default_directory),
        })
    }

    /// Applies the rule of `protocol/policy.rs` to where it listens, and to the volumes that each
    /// listener names.
    pub(super) fn settle_policy(
        &mut self,
        addresses: &[(&'static Protocol, Address)],
        volumes: Vec<Option<Vec<String>>>,
    ) -> Result<(), Failure> {
        let is_asked = !self.listeners.is_empty();
        let sockets = addresses.iter().zip(volumes).map(|((protocol, address), volumes)| PolicyListener {
            protocol,
            place: Place::Socket(address.clone()),
            volumes,
            is_asked,
        });
        let listeners = sockets.chain(self.aoe.listeners()).collect();
        let policy = std::mem::take(&mut self.settings.policy);
        self.settings.policy = policy.at(listeners, self.control.is_some()).map_err(Failure::request)?;
        Ok(())
    }

    /// What the volumes are made of, in order.
    pub(super) fn specs(&self) -> impl Iterator<Item = &Spec> {
        self.volumes.iter().map(|volume| &volume.spec)
    }

    /// The capabilities that it needs while it serves: to open interfaces that come back, and to connect again to Unix
    /// sockets of other users.
    pub(super) fn capabilities(&self) -> CapabilitySet {
        let mut needed = CapabilitySet::empty();
        needed.set(CapabilitySet::NET_RAW, self.aoe.is_wanted());
        for url in self.specs().flat_map(Spec::urls) {
            match of_url(url.as_written()) {
                Some((protocol, _)) if protocol.name == AOE.name => needed |= CapabilitySet::NET_RAW,
                Some((_, Transport::Unix)) => needed |= CapabilitySet::DAC_OVERRIDE,
                _ => {}
            }
        }
        needed
    }

    /// What is not served because somebody has said where to listen for something else, in a line;
    /// `None` if all is.
    pub(super) fn not_served(&self) -> Option<String> {
        if self.not_served.is_empty() {
            return None;
        }
        let titles: Vec<_> = self.not_served.iter().map(|protocol| protocol.title).collect();
        let options: Vec<_> = self.not_served.iter().map(|protocol| format!("--{}", protocol.name)).collect();
        Some(format!(
            "not served: {}, as the command line names other listeners; add {}",
            titles.join(", "),
            options.join(" or ")
        ))
    }

    /// What it takes to open volumes.
    pub(super) fn opening(&self) -> Opening {
        Opening {
            protocols: protocols(&self.listeners, &self.aoe).collect(),
            read_only: self.read_only,
            may_grow: self.control.is_some(),
            state: self.state.clone(),
        }
    }

    /// Opens all volumes.
    pub(super) fn open(&self) -> Result<Exports, Failure> {
        let opening = self.opening();
        let populate = Populate::Until(Instant::now() + POPULATING);
        let exports = self.volumes.iter().map(|named| opening.open(named, populate));
        exports.collect::<Result<Vec<_>, _>>().map(Exports::of_served)
    }
}

/// Where both say to listen, by protocol.
fn listeners(config: &mut Config, args: &mut Args) -> Result<Vec<Listening>, Failure> {
    let said = [
        (&NBD, &mut config.nbd, &mut args.nbd),
        (&ISCSI, &mut config.iscsi, &mut args.iscsi),
        (&ISER, &mut config.iser, &mut args.iser),
        (&NVME_TCP, &mut config.nvme_tcp, &mut args.nvme_tcp),
    ];
    let mut listeners: Vec<Listening> = Vec::new();
    for (protocol, file, line) in said {
        listeners.extend(file.drain(..).chain(line.drain(..)).map(|entry| (protocol, entry)));
    }
    listeners.iter().try_for_each(|(protocol, entry)| check_sockets(protocol, &entry.address))?;
    Ok(listeners)
}

/// What the file says of protocols beyond their listeners, and the files that it names.
fn settings(config: &mut Config) -> Result<Settings, Failure> {
    let iscsi = config.iscsi_target.drain(..).map(ConfiguredTarget::prepare);
    let nvme = config.nvme_subsystem.drain(..).map(ConfiguredSubsystem::prepare);
    Ok(Settings {
        policy: Policy::default(),
        iscsi: iscsi.collect::<Result<_, _>>()?,
        iscsi_discovery: config.iscsi_discovery.as_ref().map(DiscoveryEntry::prepare).transpose()?,
        nvme: nvme.collect::<Result<_, _>>()?,
        nvme_in_capsule: in_capsule(config.nvme_in_capsule_data_size)?,
        nvme_referrals: config.nvme_discovery.prepare()?,
        nvme_discovery_is_unique: config.nvme_discovery.unique_subnqn,
        nvme_tcp_treq: config.nvme_tcp_treq,
        nvme_tcp_ktls: config.nvme_tcp_ktls,
    })
}

/// Whether the volumes can be served over these protocols, as the settings say.
fn check_protocols(
    listeners: &[Listening],
    aoe: &Serving,
    settings: &Settings,
    volumes: &[NamedVolume],
) -> Result<(), Failure> {
    for volume in volumes {
        protocols(listeners, aoe).try_for_each(|protocol| volume.check_description(protocol))?;
    }
    let names: Vec<&str> = volumes.iter().map(|volume| volume.name.as_str()).collect();
    // What is said of a protocol has to be right although nobody listens for it yet.
    let told = [
        (&ISCSI, !settings.iscsi.is_empty()),
        (&NVME_TCP, !settings.nvme.is_empty() || settings.nvme_tcp_treq != Treq::default()),
    ];
    protocols(listeners, aoe)
        .chain(told.into_iter().filter_map(|(protocol, is_told)| is_told.then_some(protocol)))
        .try_for_each(|protocol| (protocol.check)(settings, &names).map_err(Failure::request))
}

/// An interface of AoE, and the volumes that are named for it.
fn interface(text: &str) -> (String, Option<Vec<String>>) {
    let (interface, volumes) = split_volumes(text);
    (interface.to_owned(), volumes)
}

/// So many as are asked for, if they are not too many.
fn at_most(most: usize, what: &str, asked: Option<NonZeroUsize>, otherwise: usize) -> Result<usize, Failure> {
    match asked.map_or(otherwise, NonZeroUsize::get) {
        number if number > most => {
            Err(Failure::request(format!("{number} {what} are too many; take at most {most}")))
        }
        number => Ok(number),
    }
}

/// Data in capsules of NVMe/TCP, as the configuration says it.
fn in_capsule(bytes: Option<usize>) -> Result<Option<usize>, Failure> {
    match bytes {
        Some(bytes) if bytes > MAX_IN_CAPSULE || bytes % 16 != 0 => Err(Failure::request(format!(
            "nvme_in_capsule_data_size {bytes}: take a multiple of 16 up to {MAX_IN_CAPSULE}"
        ))),
        bytes => Ok(bytes),
    }
}

/// Gives names to those without and sees to it that none comes twice.
fn name_all(entries: Vec<VolumeEntry>, read_only: bool) -> Result<Vec<NamedVolume>, Failure> {
    if entries.is_empty() {
        return Err(Failure::request("no volume to serve; name one, such as mem:1g or file:disk.img"));
    }
    let (mut taken, mut uuids, mut unnamed, mut named) = (HashSet::new(), HashSet::new(), 0, Vec::new());
    for entry in entries {
        let is_named = entry.name.is_some();
        let name = entry.name.unwrap_or_else(|| {
            unnamed += 1;
            format!("disk{}", unnamed - 1)
        });
        check_name(&name).map_err(Failure::request)?;
        if !taken.insert(name.clone()) {
            return Err(Failure::request(format!(
                "two volumes are called `{name}`; rename one, as in NAME=mem:1g"
            )));
        }
        if let Some(twice) = entry.uuid.filter(|uuid| !uuids.insert(*uuid)) {
            return Err(Failure::request(format!(
                "`{name}` has the uuid {twice} of another volume; hosts would take both for one disk: change one"
            )));
        }
        named.push(NamedVolume {
            name,
            is_named,
            spec: entry.spec,
            uuid: entry.uuid,
            is_shared: entry.shared,
            read_only: entry.read_only || read_only,
            description: entry.description,
            protocols: entry.protocols,
        });
    }
    Ok(named)
}

/// A name has to fit the names of every protocol.
fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(is_plain) {
        return Err(format!("`{name}` is no name; use 1 to {MAX_NAME} letters, digits, `-`, `_` and `.`"));
    }
    Ok(())
}

/// Those that volumes are served over; one that has several listeners comes several times.
fn protocols(listeners: &[Listening], aoe: &Serving) -> impl Iterator<Item = &'static Protocol> {
    let all = if listeners.is_empty() && !aoe.is_wanted() { PROTOCOLS } else { &[] };
    let aoe = aoe.is_wanted().then_some(&AOE);
    all.iter().copied().chain(listeners.iter().map(|(protocol, _)| *protocol)).chain(aoe)
}

fn check_sockets(protocol: &Protocol, address: &ListenAddress) -> Result<(), Failure> {
    if matches!(address, ListenAddress::Unix(_)) && !protocol.has_unix_sockets() {
        let Protocol { title, name, .. } = protocol;
        return Err(Failure::request(format!(
            "{title} has no Unix sockets; give it host:port, as in --{name} 127.0.0.1:0"
        )));
    }
    Ok(())
}

/// With its prefix it is an iSCSI name, which has at most 223 bytes (RFC 7143, section 4.2.7.2).
const MAX_NAME: usize = 200;
/// Offsets are signed where clients come from: they take a larger volume for an empty one.
pub(super) const LARGEST: u64 = i64::MAX as u64;
/// How long the daemon populates RAM volumes before it is ready; it goes on in the background.
const POPULATING: Duration = Duration::from_secs(1);
const MAX_CORES: usize = 256;
const DEFAULT_CONNECTIONS: usize = 4096;
/// As many descriptors as the system gives a process unless it was told otherwise.
const MAX_CONNECTIONS: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::spec::MemSpec;

    fn names(volumes: &[&str]) -> Result<Vec<String>, String> {
        let entries = volumes.iter().map(|text| {
            let NamedSpec { name, spec } = text.parse()?;
            Ok(VolumeEntry {
                name,
                spec,
                uuid: None,
                shared: false,
                read_only: false,
                description: String::new(),
                protocols: None,
            })
        });
        let named = name_all(entries.collect::<Result<_, String>>()?, false)
            .map_err(|failure| failure.to_string())?;
        Ok(named.into_iter().map(|volume| volume.name).collect())
    }

    #[test]
    fn a_name_stands_before_an_equals_sign() {
        let read = |text: &str| text.parse::<NamedSpec>().unwrap();
        assert_eq!(
            read("a=mem:1g"),
            NamedSpec { name: Some("a".into()), spec: Spec::Mem(MemSpec::new(1 << 30)) }
        );
        assert_eq!(read("mem:1g").name, None);
        assert_eq!(read("file:x?size=1g").name, None);
        assert_eq!(read("a=file:x?size=1g").name, Some("a".into()));
        assert_eq!(read("fault:op=read:mem:1g").name, None);
        assert_eq!(read("nbd+unix:///x?socket=/s").name, None);
    }

    #[test]
    fn volumes_without_a_name_are_numbered() {
        assert_eq!(names(&["mem:1m", "a=mem:1m", "mem:1m"]).unwrap(), ["disk0", "a", "disk1"]);
    }

    #[test]
    fn names_are_unique_and_plain() {
        assert!(names(&["a=mem:1m", "a=mem:2m"]).unwrap_err().starts_with("two volumes are called `a`"));
        assert!(
            names(&["disk0=mem:1m", "mem:2m"]).unwrap_err().starts_with("two volumes are called `disk0`")
        );
        assert!(names(&["a b=mem:1m"]).unwrap_err().starts_with("`a b` is no name"));
        assert!(names(&["=mem:1m"]).unwrap_err().starts_with("`` is no name"));
        assert!(names(&[]).unwrap_err().starts_with("no volume to serve"));
    }
}
