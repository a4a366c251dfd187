//! What to serve: the command line and the config file, put together.
//!
//! Volumes and listeners of both are served, the file's first; of a single value the command line's
//! counts.

use super::ServeArgs;
use super::config::{Config, VolumeEntry};
use super::identity::warn_of_twins;
use super::inherited::InheritedListeners;
use super::opening::{NamedVolume, Opening};
use super::sources::Sources;
use super::state;
use crate::address::{ApiListener, ListenAddress};
use crate::api::ControlPath;
use crate::data_key::DataKey;
use crate::failure::Failure;
use crate::open::Populate;
use crate::poll::Poll;
use crate::protocol::policy::{Policy, PolicyListener};
use crate::protocol::{self, Carrier, Frontends, Listening, PROTOCOLS, Protocol};
use blockmux_engine::congestion::Congestion;
use blockmux_engine::state::check_directory;
use blockmux_lab::ceiling::Transport;
use blockmux_proto::exports::Exports;
use blockmux_volume::Spec;
use rustix::thread::CapabilitySet;
use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Everything that a daemon does.
pub(super) struct Setup {
    pub(super) volumes: Vec<NamedVolume>,
    /// Refuse writes to all of them.
    read_only: bool,
    /// Where to listen, as somebody said; if nobody did, it is for the caller to choose, and for
    /// every protocol.
    pub(super) listeners: Vec<Listening>,
    /// Protocols that nobody listens for because the command line names listeners of others.
    not_served: Vec<&'static Protocol>,
    /// What serves each protocol.
    pub(super) frontends: Arc<Frontends>,
    /// Which volumes are served where.
    pub(super) policy: Policy,
    pub(super) cores: usize,
    /// Where somebody has asked for reservations to be kept.
    pub(super) asked_state: Option<PathBuf>,
    /// How many somebody has asked for.
    pub(super) asked_cores: Option<usize>,
    pub(super) poll: Poll,
    pub(super) max_connections: usize,
    /// Time in which a connection must log in; `None`: that of its protocol.
    pub(super) login_timeout: Option<Duration>,
    /// Time after which a client without requests is disconnected.
    pub(super) idle_timeout: Option<Duration>,
    /// Of every TCP connection; `None`: the system's.
    pub(super) congestion: Option<Congestion>,
    /// Where reservations are kept; `None` if there is no such place.
    pub(super) state: Option<PathBuf>,
    /// Where commands are taken while it runs.
    pub(super) control: Option<ControlPath>,
    /// Where they are taken over TCP, and the file of the token that this takes.
    pub(super) api: Option<ApiListener>,
    pub(super) api_token_file: Option<PathBuf>,
    /// The config file and those that it includes.
    pub(super) sources: Option<Sources>,
}

impl Setup {
    /// Reads the config file, if there is one, and adds the command line and inherited listeners.
    pub(super) fn gather(args: ServeArgs, inherited: &InheritedListeners) -> Result<Setup, Failure> {
        let sources = args.config.as_deref().map(|path| Setup::read(path, &args.frontends));
        let sources = sources.transpose()?;
        Setup::of(args, sources, inherited)
    }

    /// The texts of a config file and of those that it includes.
    pub(super) fn read(path: &Path, frontends: &Frontends) -> Result<Sources, Failure> {
        Sources::read(path, Setup::named_lists(frontends))
    }

    /// Lists of a config file whose entries have names, and the keys of the names.
    pub(super) fn named_lists(frontends: &Frontends) -> Vec<(&'static str, &'static str)> {
        let targets = frontends.target_tables().map(|(_, tables)| (tables.key, tables.name));
        [VOLUMES].into_iter().chain(targets).collect()
    }

    /// What these files say, the command line, and inherited listeners.
    pub(super) fn of(
        mut args: ServeArgs,
        sources: Option<Sources>,
        inherited: &InheritedListeners,
    ) -> Result<Setup, Failure> {
        let config = sources.as_ref().map(|sources| Config::read(sources, &mut args.frontends));
        let config = config.transpose()?.unwrap_or_default();
        let setup = Setup::put_together(args, config, inherited);
        let located = |failure| match &sources {
            Some(sources) => sources.located(failure),
            None => failure,
        };
        let setup = setup.map_err(located)?;
        Ok(Setup { sources, ..setup })
    }

    fn put_together(
        mut args: ServeArgs,
        mut config: Config,
        inherited: &InheritedListeners,
    ) -> Result<Setup, Failure> {
        let mut frontends = args.frontends;
        let read_only = args.read_only || config.read_only;
        config.volume.append(&mut args.volumes);
        let volumes = name_all(std::mem::take(&mut config.volume), read_only)?;
        let mut listeners = frontends.listeners();
        listeners.extend(inherited.further(&listeners)?);
        listeners.iter().try_for_each(|(protocol, entry)| check_sockets(protocol, &entry.address))?;
        let words = volumes.iter().map(|volume| (volume.name.clone(), volume.entry.protocols.clone()));
        let policy = Policy::new(frontends.targets(), words).map_err(Failure::request)?;
        let policy = policy.restricting_exports(frontends.restricting_exports());
        let networks = volumes.iter().map(|volume| (volume.name.clone(), volume.entry.networks.clone()));
        let policy = policy.allowing(networks);
        let is_served =
            |protocol: &Protocol| protocols(&listeners).any(|own| own.served_as() == protocol.served_as());
        let is_left_out = |protocol: &&Protocol| {
            protocol.is_served_unasked() && !is_served(protocol) && policy.has_use_for(protocol)
        };
        let not_served = PROTOCOLS.iter().copied().filter(is_left_out);
        let not_served = not_served.filter(|_| !frontends.has_keys_of_listeners()).collect();
        for volume in &volumes {
            protocols(&listeners).try_for_each(|protocol| volume.check_description(protocol))?;
        }
        let names: Vec<&str> = volumes.iter().map(|volume| volume.name.as_str()).collect();
        frontends.check(is_served, &names).map_err(Failure::request)?;
        let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(MAX_CORES);
        let asked_cores = args.cores.or(config.cores);
        let cores = at_most(MAX_CORES, "cores", asked_cores, processors)?;
        let max_connections = args.max_connections.or(config.max_connections);
        let max_connections = at_most(MAX_CONNECTIONS, "connections", max_connections, DEFAULT_CONNECTIONS)?;
        let login_timeout = seconds("login_timeout", config.login_timeout, LOGIN_TIMEOUTS)?;
        let idle_timeout = seconds("idle_timeout", config.idle_timeout, IDLE_TIMEOUTS)?;
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
            frontends: Arc::new(frontends),
            policy,
            cores,
            asked_cores: asked_cores.map(NonZeroUsize::get),
            poll: args.poll.or(config.poll).unwrap_or(Poll::Adaptive),
            max_connections,
            login_timeout,
            idle_timeout,
            congestion,
            control: args.control.or(config.control),
            api: args.api.or(config.api),
            api_token_file: args.api_token_file.or(config.api_token_file),
            asked_state: state.clone(),
            state: state.or_else(state::default_directory),
            sources: None,
        })
    }

    /// Whether commands are taken while it runs.
    pub(super) fn has_api(&self) -> bool {
        self.control.is_some() || self.api.is_some()
    }

    /// Applies the rule of `protocol/policy.rs` to where it listens, and to the volumes that each
    /// listener names.
    pub(super) fn settle_policy(&mut self, listeners: Vec<PolicyListener>) -> Result<(), Failure> {
        let policy = std::mem::take(&mut self.policy);
        let policy = policy.at(listeners, self.has_api()).map_err(Failure::request);
        self.policy = policy.map_err(|failure| self.located(failure))?;
        Ok(())
    }

    /// A failure with the place in the config file that it is about.
    pub(super) fn located(&self, failure: Failure) -> Failure {
        match &self.sources {
            Some(sources) => sources.located(failure),
            None => failure,
        }
    }

    /// Whether volumes may come, go and change while it runs.
    pub(super) fn may_change(&self) -> bool {
        self.has_api() || self.sources.is_some()
    }

    /// What the volumes are made of, in order.
    pub(super) fn specs(&self) -> impl Iterator<Item = &Spec> {
        self.volumes.iter().map(|volume| &volume.entry.spec)
    }

    /// The capabilities that it needs while it serves: to open interfaces that come back, and to
    /// connect again to Unix sockets of other users.
    pub(super) fn capabilities(&self) -> CapabilitySet {
        let mut needed = CapabilitySet::empty();
        let served = self.policy.listeners();
        let has_frames = served.iter().any(|listener| listener.protocol.carrier == Carrier::Frames);
        needed.set(CapabilitySet::NET_RAW, has_frames);
        for url in self.specs().flat_map(Spec::urls) {
            match protocol::of_url(url.as_written()) {
                Some((protocol, _)) if protocol.carrier == Carrier::Frames => {
                    needed |= CapabilitySet::NET_RAW
                }
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
            protocols: protocols(&self.listeners).collect(),
            read_only: self.read_only,
            may_grow: self.may_change(),
            state: self.state.clone(),
        }
    }

    /// Opens all volumes.
    pub(super) fn open(&self) -> Result<Exports, Failure> {
        let opening = self.opening();
        let populate = Populate::Until(Instant::now() + POPULATING);
        let open = |named| opening.open(named, populate).map_err(|failure| self.located(failure));
        let exports = self.volumes.iter().map(open);
        let exports = exports.collect::<Result<Vec<_>, _>>().map(Exports::of_served)?;
        for named in &self.volumes {
            self.policy.set_data(&named.name, DataKey::local_texts(&named.entry.spec));
        }
        for named in &self.volumes {
            let checked = self.policy.check_twins(&named.name, |_| false).map_err(Failure::request);
            checked.map_err(|failure| self.located(failure))?;
        }
        let all: Vec<_> = exports.iter().collect();
        let uuid = |id| exports.served(id).and_then(|served| served.uuid());
        warn_of_twins(all.iter().map(|(id, export)| (&*export.name, uuid(*id))));
        Ok(exports)
    }
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

/// A timeout within these bounds.
fn seconds(
    key: &str,
    written: Option<u64>,
    bounds: RangeInclusive<u64>,
) -> Result<Option<Duration>, Failure> {
    match written {
        Some(seconds) if !bounds.contains(&seconds) => {
            let (least, most) = bounds.into_inner();
            Err(Failure::request(format!(
                "{key} = {seconds}: write {least} to {most} seconds, or leave it out"
            )))
        }
        seconds => Ok(seconds.map(Duration::from_secs)),
    }
}

/// Gives names to those without and sees to it that none comes twice.
fn name_all(entries: Vec<VolumeEntry>, read_only: bool) -> Result<Vec<NamedVolume>, Failure> {
    if entries.is_empty() {
        return Err(Failure::request("no volume to serve; name one, such as mem:1g or file:disk.img"));
    }
    let (mut taken, mut uuids, mut unnamed, mut named) = (HashSet::new(), HashSet::new(), 0, Vec::new());
    for mut entry in entries {
        let name = entry.name.clone().unwrap_or_else(|| {
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
        entry.read_only |= read_only;
        named.push(NamedVolume { name, entry });
    }
    Ok(named)
}

/// A name has to fit the names of every protocol.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(is_plain) {
        return Err(format!("`{name}` is no name; use 1 to {MAX_NAME} letters, digits, `-`, `_` and `.`"));
    }
    Ok(())
}

/// Those that volumes are served over; one that has several listeners comes several times.
fn protocols(listeners: &[Listening]) -> impl Iterator<Item = &'static Protocol> {
    let all = protocol::over_sockets().filter(|protocol| protocol.is_unasked && listeners.is_empty());
    all.chain(listeners.iter().map(|(protocol, _)| *protocol))
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

/// The list of volumes in a config file, and the key of their names.
pub(super) const VOLUMES: (&str, &str) = ("volume", "name");
/// With its prefix it is an iSCSI name, which has at most 223 bytes (RFC 7143, section 4.2.7.2).
const MAX_NAME: usize = 200;
/// Offsets are signed where clients come from: they take a larger volume for an empty one.
pub(super) const LARGEST: u64 = i64::MAX as u64;
/// How long the daemon populates RAM volumes before it is ready; it goes on in the background.
const POPULATING: Duration = Duration::from_secs(1);
const MAX_CORES: usize = 256;
/// In seconds. Every protocol's own limit is at most 30 s.
const LOGIN_TIMEOUTS: RangeInclusive<u64> = 1..=30;
/// In seconds, up to a year. What is shorter would disconnect clients between two requests.
const IDLE_TIMEOUTS: RangeInclusive<u64> = 5..=31_536_000;
const DEFAULT_CONNECTIONS: usize = 4096;
/// As many descriptors as the system gives a process unless it was told otherwise.
const MAX_CONNECTIONS: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn names(volumes: &[&str]) -> Result<Vec<String>, String> {
        let entries = volumes.iter().map(|text| text.parse()).collect::<Result<_, String>>()?;
        let named = name_all(entries, false).map_err(|failure| failure.to_string())?;
        Ok(named.into_iter().map(|volume| volume.name).collect())
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
