//! The settings of a daemon, from the command line, the config file and inherited sockets.
//!
//! Volumes and listeners of the command line are added to those of the config file. Other values of
//! the command line override those of the file.

use super::ServeArgs;
use super::access::{ApiAccess, RequiredCredentials, tcp_address};
use super::attachment::{self, ATTACHMENTS};
use super::config::{Config, VolumeEntry, current_directory};
use super::group::{self, GroupConfig, GroupVolumeConfig};
use super::identity::{served_data, warn_of_same_data};
use super::inherited::InheritedListeners;
use super::opening::{KnownVolumes, NamedVolume, VolumeOpener, is_in_turns};
use super::role::{API_CERTIFICATES, API_TOKENS};
use super::sources::{NamedList, Sources};
use super::state;
use crate::access::secret::directory_below;
use crate::api::ControlPath;
use crate::api::bodies::Attachment;
use crate::data::{layers, unit_identity};
use crate::failure::Failure;
use crate::process::poll::Poll;
use crate::protocol::address::{ApiListener, ListenAddress};
use crate::protocol::policy::{Policy, PolicyListener, TargetAccess};
use crate::protocol::{self, Carrier, ConfiguredListener, Frontends, PROTOCOLS, Protocol};
use crate::volume_kinds::open::Populate;
use crate::volume_kinds::opened_twice::{self, WrittenFile};
use crate::volume_kinds::shared_files;
use blockmux_engine::sys::congestion::Congestion;
use blockmux_engine::volume::rbd::MemberClient;
use blockmux_engine::volume::state::check_directory;
use blockmux_lab::ceiling::Transport;
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::volume_state::VolumeState;
use blockmux_volume::Spec;
use rustix::thread::CapabilitySet;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Volumes that are open, by name.
pub(super) type OpenedVolumes = BTreeMap<String, (Export, Arc<VolumeState>)>;

/// The settings of a daemon.
pub(super) struct Setup {
    pub(super) volumes: Vec<NamedVolume>,
    /// The volumes to attach as disks of this machine.
    pub(super) attachments: Vec<Attachment>,
    /// The configured listeners. If it is empty, every protocol listens at its default address.
    pub(super) listeners: Vec<ConfiguredListener>,
    /// Protocols without a listener because the command line names listeners of others.
    not_served: Vec<&'static Protocol>,
    /// The frontends of all protocols.
    pub(super) frontends: Arc<Frontends>,
    /// Which volumes are exported at which listeners.
    pub(super) policy: Policy,
    pub(super) cores: usize,
    /// The configured state directory.
    pub(super) asked_state: Option<PathBuf>,
    /// The configured number of cores.
    pub(super) asked_cores: Option<usize>,
    pub(super) poll: Poll,
    pub(super) max_connections: usize,
    /// Time in which a connection must log in; `None` for the default of its protocol.
    pub(super) login_timeout: Option<Duration>,
    /// Time after which a client without requests is disconnected; `None` for never.
    pub(super) idle_timeout: Option<Duration>,
    /// Congestion control of TCP connections; `None` for the system's default.
    pub(super) congestion: Option<Congestion>,
    /// State directory, configured or the default; `None` if there is no default.
    pub(super) state: Option<PathBuf>,
    /// Unix socket of the control API.
    pub(super) control: Option<ControlPath>,
    /// Whether listeners are announced by multicast DNS.
    pub(super) mdns: bool,
    /// TCP address of the control API with its networks, and what its clients need.
    pub(super) api: Option<ApiListener>,
    pub(super) api_access: ApiAccess,
    /// What [`Setup::api_access`] has loaded; `None` without [`Setup::api`].
    pub(super) api_credentials: Option<Arc<RequiredCredentials>>,
    /// The group of gateways that the daemon belongs to.
    pub(super) group: Option<GroupConfig>,
    /// The config file and those that it includes.
    pub(super) sources: Option<Sources>,
}

impl Setup {
    /// Reads the config file, if one is given, and adds the command line and inherited listeners.
    ///
    /// # Errors
    /// If an argument or the file is invalid; the message names file and line where it can.
    pub(super) fn gather(args: ServeArgs, inherited: &InheritedListeners) -> Result<Setup, Failure> {
        let sources = args.config.as_deref().map(|path| Setup::read(path, &args.frontends));
        let sources = sources.transpose()?;
        Setup::of(args, sources, inherited)
    }

    /// Reads a config file and the files that it includes.
    pub(super) fn read(path: &Path, frontends: &Frontends) -> Result<Sources, Failure> {
        Sources::read(path, Setup::named_lists(frontends))
    }

    /// Lists of a config file whose entries have names.
    pub(super) fn named_lists(frontends: &Frontends) -> Vec<NamedList> {
        let targets = frontends.target_tables().map(|(_, tables)| {
            let parts = tables.peers.iter().chain(tables.parts).filter(|(_, name)| !name.is_empty());
            NamedList { key: tables.key, name: tables.name, parts: parts.copied().collect() }
        });
        let own = [VOLUMES, ATTACHMENTS, API_TOKENS, API_CERTIFICATES];
        let own = own.map(|(key, name)| NamedList { key, name, parts: Vec::new() });
        own.into_iter().chain(targets).collect()
    }

    /// Combines config files that were read with the command line and inherited listeners.
    ///
    /// # Errors
    /// If an argument or a file is invalid.
    pub(super) fn of(
        mut args: ServeArgs,
        sources: Option<Sources>,
        inherited: &InheritedListeners,
    ) -> Result<Setup, Failure> {
        let (frontends, state) = (&mut args.frontends, args.state.as_deref());
        let config = sources.as_ref().map(|sources| Config::read(sources, frontends, state));
        let config = config.transpose()?.unwrap_or_default();
        let setup = Setup::combine(args, config, inherited);
        let located = |failure| match &sources {
            Some(sources) => sources.located(failure),
            None => failure,
        };
        let setup = setup.map_err(located)?;
        Ok(Setup { sources, ..setup })
    }

    fn combine(
        mut args: ServeArgs,
        mut config: Config,
        inherited: &InheritedListeners,
    ) -> Result<Setup, Failure> {
        let mut frontends = args.frontends;
        let read_only = args.read_only || config.read_only;
        config.volume.append(&mut args.volumes);
        let api_access = args.api_access.or(config.api_access());
        let volumes = name_all(std::mem::take(&mut config.volume), read_only)?;
        let control = args.control.or(config.control);
        let api_listener = args.api.or(config.api);
        check_any(&volumes, control.is_some() || api_listener.is_some())?;
        let mut listeners = frontends.listeners();
        listeners.extend(inherited.further(&listeners)?);
        listeners.iter().try_for_each(|(protocol, entry)| check_sockets(protocol, &entry.address))?;
        let policy = policy_of(&frontends, &volumes)?;
        let is_served =
            |protocol: &Protocol| protocols(&listeners).any(|own| own.served_as() == protocol.served_as());
        let is_left_out = |protocol: &&Protocol| {
            protocol.is_served_by_default() && !is_served(protocol) && policy.has_use_for(protocol)
        };
        let not_served = PROTOCOLS.iter().copied().filter(is_left_out);
        let not_served = not_served.filter(|_| !frontends.has_keys_of_listeners()).collect();
        let exporting: Vec<_> = protocols(&listeners).collect();
        for volume in &volumes {
            exporting.iter().try_for_each(|protocol| volume.check_description(protocol))?;
        }
        let names: Vec<&str> = volumes.iter().map(|volume| volume.name.as_str()).collect();
        frontends.check(is_served, &names).map_err(Failure::request)?;
        let attachments = std::mem::take(&mut config.attachment);
        attachment::check_all(&attachments, &names).map_err(Failure::request)?;
        check_group(config.group.as_ref(), &volumes, &attachments)?;
        let cpus = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(MAX_CORES);
        let asked_cores = args.cores.or(config.cores);
        let cores = at_most(MAX_CORES, "cores", asked_cores, cpus)?;
        let max_connections = args.max_connections.or(config.max_connections);
        let max_connections = at_most(MAX_CONNECTIONS, "connections", max_connections, DEFAULT_CONNECTIONS)?;
        let login_timeout = seconds("login_timeout", config.login_timeout, LOGIN_TIMEOUTS)?;
        let idle_timeout = seconds("idle_timeout", config.idle_timeout, IDLE_TIMEOUTS)?;
        let state = args.state.or(config.state);
        if let Some(directory) = &state {
            // An unusable directory is an error now, not at the first reservation.
            check_directory(directory).map_err(|error| Failure::request(format!("--state: {error}")))?;
        }
        let congestion = args.congestion.or(config.congestion.take());
        congestion.as_ref().map_or(Ok(()), check_congestion)?;
        let api_credentials = match &api_listener {
            Some(listener) => {
                tcp_address(listener)?;
                let secrets = state.as_deref().map(|own| directory_below(&current_directory().join(own)));
                Some(Arc::new(api_access.load(secrets.as_deref())?))
            }
            None => {
                api_access.check_unused()?;
                None
            }
        };
        Ok(Setup {
            volumes,
            attachments,
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
            control,
            mdns: args.mdns || config.mdns,
            group: config.group,
            api: api_listener,
            api_access,
            api_credentials,
            asked_state: state.clone(),
            state: state.or_else(state::default_directory),
            sources: None,
        })
    }

    /// Whether the control API is served.
    pub(super) fn has_api(&self) -> bool {
        self.control.is_some() || self.api.is_some()
    }

    /// Applies the access rule of `protocol/policy.rs` to the listeners and their volumes.
    ///
    /// # Errors
    /// If a volume would be exported without the protection that it has elsewhere.
    pub(super) fn settle_policy(&mut self, listeners: Vec<PolicyListener>) -> Result<(), Failure> {
        let policy = std::mem::take(&mut self.policy);
        let policy = policy.at(listeners, self.has_api()).map_err(Failure::request);
        self.policy = policy.map_err(|failure| self.located(failure))?;
        Ok(())
    }

    /// Prefixes the failure with the config file and line that it is about.
    pub(super) fn located(&self, failure: Failure) -> Failure {
        match &self.sources {
            Some(sources) => sources.located(failure),
            None => failure,
        }
    }

    /// Whether volumes can be added, removed and changed while the daemon runs.
    pub(super) fn may_change(&self) -> bool {
        self.has_api() || self.sources.is_some()
    }

    /// The specs of the volumes, in order.
    pub(super) fn specs(&self) -> impl Iterator<Item = &Spec> {
        self.volumes.iter().map(|volume| &volume.entry.spec)
    }

    /// The capabilities that the daemon needs while it serves: to reopen network interfaces, and to
    /// reconnect to Unix sockets of other users.
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

    /// Whether the daemon serves disks of its machine that need privileges.
    pub(super) fn serves_disks(&self) -> bool {
        self.attachments.iter().any(Attachment::needs_privileges)
    }

    /// The capabilities that attaching disks needs, and removing them: control commands of ublk,
    /// and the nodes of its devices, which belong to root.
    pub(super) fn disk_capabilities() -> CapabilitySet {
        CapabilitySet::SYS_ADMIN | CapabilitySet::DAC_OVERRIDE | CapabilitySet::SYS_RESOURCE
    }

    /// A message about protocols without a listener because the command line names listeners of
    /// others; `None` if there are none.
    pub(super) fn not_served(&self) -> Option<String> {
        if self.not_served.is_empty() {
            return None;
        }
        let titles: Vec<_> = self.not_served.iter().map(|protocol| protocol.title).collect();
        let options: Vec<_> = self.not_served.iter().map(|protocol| format!("--{}", protocol.name)).collect();
        Some(format!(
            "not served: {}, because the command line names other listeners; add {}",
            titles.join(", "),
            options.join(" or ")
        ))
    }

    /// The opener of volumes with these settings; images of a group are opened by the client of
    /// `member`.
    pub(super) fn opener(&self, member: &Arc<MemberClient>) -> VolumeOpener {
        VolumeOpener {
            protocols: protocols(&self.listeners).collect(),
            may_grow: self.may_change(),
            policy: self.policy.clone(),
            state: self.state.clone(),
            known: KnownVolumes::default(),
            member: member.clone(),
        }
    }

    /// The files and devices that volumes open for themselves.
    pub(super) fn written_files(&self) -> Vec<WrittenFile> {
        let files = |NamedVolume { name, entry }: &NamedVolume| {
            WrittenFile::of_volume(name, &entry.spec, entry.read_only)
        };
        self.volumes.iter().flat_map(files).collect()
    }

    /// Checks that no file or device would be opened twice. To look at their paths may hang.
    ///
    /// # Errors
    /// Names both volumes and says what to do.
    pub(super) fn check_files(&self) -> Result<(), Failure> {
        let files = self.written_files();
        let found = files.iter().map(WrittenFile::look_up).collect();
        opened_twice::check(&files, found).map_err(|what| self.located(Failure::request(what)))
    }

    /// Opens the volumes for whose names `is_meant` returns true.
    pub(super) fn open_some(
        &self,
        member: &Arc<MemberClient>,
        is_meant: impl Fn(&str) -> bool,
    ) -> Result<OpenedVolumes, Failure> {
        let opener = self.opener(member);
        let meant = self.volumes.iter().filter(|named| is_meant(&named.name));
        let open = |named: &NamedVolume| {
            let opened = opener.open(named, Populate::Behind).map_err(|failure| self.located(failure))?;
            Ok((named.name.clone(), opened))
        };
        meant.map(open).collect()
    }

    /// Opens all volumes that are not in `opened`. `known` are those of the daemon from which this
    /// process takes over.
    ///
    /// # Errors
    /// If one cannot be opened or exported.
    pub(super) fn open(
        &self,
        member: &Arc<MemberClient>,
        mut opened: OpenedVolumes,
        known: KnownVolumes,
    ) -> Result<Exports, Failure> {
        let opener = VolumeOpener { known, ..self.opener(member) };
        let populate = Populate::Until(Instant::now() + POPULATING);
        let open = |named: &NamedVolume| match opened.remove(&named.name) {
            Some(opened) => Ok(opened),
            None => opener.open(named, populate).map_err(|failure| self.located(failure)),
        };
        let exports = self.volumes.iter().map(open);
        let exports = exports.collect::<Result<Vec<_>, _>>().map(Exports::with_states)?;
        for named in &self.volumes {
            self.policy.set_data(&named.name, layers::of_spec(&named.entry.spec));
        }
        let checked = self.policy.check_same_data().map_err(Failure::request);
        checked.map_err(|failure| self.located(failure))?;
        let all: Vec<_> = exports.iter().collect();
        warn_of_same_data(&served_data(&all, &exports, &self.policy), |_| true);
        Ok(exports)
    }
}

/// The configured number or else `default`, checked against a maximum.
fn at_most(max: usize, what: &str, asked: Option<NonZeroUsize>, default: usize) -> Result<usize, Failure> {
    match asked.map_or(default, NonZeroUsize::get) {
        number if number > max => {
            Err(Failure::request(format!("{number} {what} are too many; set at most {max}")))
        }
        number => Ok(number),
    }
}

/// Parses a timeout in seconds, which must be within `bounds`.
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

/// Checks that there is a volume. Through the API a daemon gets its volumes later.
fn check_any(volumes: &[NamedVolume], has_api: bool) -> Result<(), Failure> {
    match volumes.is_empty() && !has_api {
        true => Err(Failure::request("no volume to serve; give one, such as mem:1g or file:disk.img")),
        false => Ok(()),
    }
}

/// The name of a volume without one: the first has number 0.
pub(super) fn generated_name(number: u64) -> String {
    format!("disk{number}")
}

/// Names the unnamed volumes, and checks that names, UUIDs and SCSI identifiers are unique, and
/// that slices of one file have it with the same options.
fn name_all(entries: Vec<VolumeEntry>, read_only: bool) -> Result<Vec<NamedVolume>, Failure> {
    let (mut names, mut uuids, mut unnamed, mut named) = (HashSet::new(), HashSet::new(), 0, Vec::new());
    let mut units = HashMap::new();
    for mut entry in entries {
        let name = entry.name.clone().unwrap_or_else(|| {
            unnamed += 1;
            generated_name(unnamed - 1)
        });
        check_name(&name).map_err(Failure::request)?;
        if !names.insert(name.clone()) {
            return Err(Failure::request(format!(
                "two volumes are named `{name}`; rename one, as in NAME=mem:1g"
            )));
        }
        if let Some(twice) = entry.uuid.filter(|uuid| !uuids.insert(*uuid)) {
            return Err(Failure::request(format!(
                "`{name}` has the UUID {twice} of another volume; hosts would treat both as one disk; change one UUID"
            )));
        }
        for (_, identifier) in unit_identity::unique(&entry.scsi) {
            if let Some(other) = units.insert(identifier.clone(), name.clone()) {
                return Err(Failure::request(format!(
                    "volumes `{other}` and `{name}` have the SCSI {identifier}; initiators would treat both as one \
                     disk; change it in one [volume.scsi]"
                )));
            }
        }
        entry.read_only |= read_only;
        named.push(NamedVolume { name, entry });
    }
    let writable = named.iter().filter(|own| !own.entry.read_only);
    shared_files::check_options(writable.map(|own| (own.name.as_str(), &own.entry.spec)))
        .map_err(Failure::request)?;
    Ok(named)
}

/// Checks a volume's name: it becomes part of names of every protocol.
///
/// # Errors
/// If its characters or its length are not allowed.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(is_plain) {
        return Err(format!(
            "`{name}` is not a valid name; use 1 to {MAX_NAME} letters, digits, `-`, `_` and `.`"
        ));
    }
    Ok(())
}

/// The protocols that export the volumes.
fn protocols(listeners: &[ConfiguredListener]) -> impl Iterator<Item = &'static Protocol> {
    let all = protocol::stream_protocols().filter(|protocol| protocol.is_default && listeners.is_empty());
    let mut seen = HashSet::new();
    all.chain(listeners.iter().map(|(protocol, _)| *protocol)).filter(move |own| seen.insert(own.name))
}

fn check_sockets(protocol: &Protocol, address: &ListenAddress) -> Result<(), Failure> {
    if matches!(address, ListenAddress::Unix(_)) && !protocol.has_unix_sockets() {
        let Protocol { title, name, .. } = protocol;
        return Err(Failure::request(format!(
            "{title} does not support Unix sockets; use host:port, as in --{name} 127.0.0.1:0"
        )));
    }
    Ok(())
}

/// Key of the list of volumes in a config file, and key of a volume's name.
pub(super) const VOLUMES: (&str, &str) = ("volume", "name");
/// Maximum length of a volume's name. With a prefix it is an iSCSI name, which has at most 223
/// bytes (RFC 7143 §4.2.7.2).
const MAX_NAME: usize = 200;
/// Maximum size of a volume, in bytes. Offsets of clients are signed 64-bit numbers; they would see
/// a larger volume as empty.
pub(super) const LARGEST: u64 = i64::MAX as u64;
/// Time for populating RAM volumes before the daemon is ready; the rest is populated in the
/// background.
const POPULATING: Duration = Duration::from_secs(1);
const MAX_CORES: usize = 256;
/// Allowed values of `login_timeout`, in seconds. No protocol's default is longer than 30 s.
const LOGIN_TIMEOUTS: RangeInclusive<u64> = 1..=30;
/// Allowed values of `idle_timeout`, in seconds, up to a year. A shorter timeout would disconnect
/// clients between two requests.
const IDLE_TIMEOUTS: RangeInclusive<u64> = 5..=31_536_000;
const DEFAULT_CONNECTIONS: usize = 4096;
/// The kernel's default maximum of file descriptors of a process (`fs.nr_open`).
const MAX_CONNECTIONS: usize = 1 << 20;

fn check_congestion(congestion: &Congestion) -> Result<(), Failure> {
    let wrong = |why| Failure::request(format!("--congestion {congestion}: {why}"));
    congestion.check().map_err(wrong)
}

/// Checks the group of gateways, and the volumes that it hands out.
fn check_group(
    group: Option<&GroupConfig>,
    volumes: &[NamedVolume],
    attachments: &[Attachment],
) -> Result<(), Failure> {
    let volumes = volumes.iter().map(|NamedVolume { name, entry }| GroupVolumeConfig {
        name,
        spec: &entry.spec,
        read_only: entry.read_only,
    });
    group::check(group, volumes, attachments).map_err(Failure::request)
}

/// The access rule of the configured targets and volumes.
fn policy_of(frontends: &Frontends, volumes: &[NamedVolume]) -> Result<Policy, Failure> {
    let targets = frontends.targets();
    check_turns(&targets, volumes)?;
    let words = volumes.iter().map(|volume| (volume.name.clone(), volume.entry.protocols.clone()));
    let policy = Policy::new(targets, words).map_err(Failure::request)?;
    let networks = volumes.iter().map(|volume| (volume.name.clone(), volume.entry.networks.clone()));
    Ok(policy.with_access(networks, frontends.restricting_exports()))
}

/// Refuses configured targets of protocols without sessions for images that daemons serve in turns:
/// what was sent before another daemon served the image could not be told from what is sent
/// afterwards.
fn check_turns(targets: &[(&'static str, TargetAccess)], volumes: &[NamedVolume]) -> Result<(), Failure> {
    let without_sessions = targets.iter().filter(|(protocol, _)| {
        protocol::by_name(protocol).is_some_and(|protocol| protocol.carrier == Carrier::Frames)
    });
    for (_, target) in without_sessions {
        let mut own =
            volumes.iter().filter(|volume| target.volumes.iter().any(|(name, _)| *name == volume.name));
        if let Some(volume) = own.find(|volume| is_in_turns(&volume.entry.spec)) {
            return Err(Failure::request(format!(
                "{}: `{}` has no sessions that could end when another daemon serves the image; remove the target, or \
                 serve the image with exclusive=on",
                target.title(),
                volume.name
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::policy::PublicAccess;

    fn names(volumes: &[&str]) -> Result<Vec<String>, String> {
        let entries = volumes.iter().map(|text| text.parse()).collect::<Result<_, String>>()?;
        let named = name_all(entries, false).map_err(|failure| failure.to_string())?;
        Ok(named.into_iter().map(|volume| volume.name).collect())
    }

    #[test]
    fn an_image_that_daemons_serve_in_turns_has_no_target_without_sessions() {
        let target = |kind, volume: &str| TargetAccess {
            kind,
            name: "1.0".to_owned(),
            listeners: ("listeners", Vec::new()),
            volumes: vec![(volume.to_owned(), PublicAccess::Write)],
            is_restricted: false,
            authenticates_all: false,
            tables: Vec::new(),
            moved_to: None,
        };
        let texts = ["turns=rbd:p/i?exclusive=standby", "owned=rbd:p/j?exclusive=on"];
        let entries = texts.map(|text| text.parse::<VolumeEntry>().unwrap());
        let volumes = name_all(entries.into(), false).map_err(|failure| failure.to_string()).unwrap();
        let check = |protocol, kind, volume| {
            check_turns(&[(protocol, target(kind, volume))], &volumes).map_err(|failure| failure.to_string())
        };
        assert_eq!(check("aoe", "aoe_target", "owned"), Ok(()));
        assert_eq!(check("iscsi", "iscsi_target", "turns"), Ok(()));
        let said = check("aoe", "aoe_target", "turns").unwrap_err();
        assert!(said.starts_with("aoe_target `1.0`: `turns` has no sessions that could end"), "{said}");
    }

    #[test]
    fn unnamed_volumes_are_numbered() {
        assert_eq!(names(&["mem:1m", "a=mem:1m", "mem:1m"]).unwrap(), ["disk0", "a", "disk1"]);
    }

    #[test]
    fn scsi_identifiers_are_unique() {
        let said = |one: &str, other: &str| {
            let entry = |(name, lines): (&str, &str)| {
                toml::from_str::<VolumeEntry>(&format!("name = '{name}'\nspec = 'mem:1m'\n[scsi]\n{lines}"))
                    .unwrap()
            };
            let entries = [("a", one), ("b", other)].map(entry).into();
            name_all(entries, false).map(|_| ()).map_err(|failure| failure.to_string())
        };
        let [one, other] = ["naa = '500140550f7a9c1e'", "naa = '500140550f7a9c1f'"];
        assert_eq!(said(one, other), Ok(()));
        assert_eq!(said("vendor = 'x'\nproduct = 'y'", "vendor = 'x'\nproduct = 'y'"), Ok(()));
        assert_eq!(
            said(one, one).unwrap_err(),
            "volumes `a` and `b` have the SCSI naa `500140550f7a9c1e`; initiators would treat both as one disk; \
             change it in one [volume.scsi]"
        );
        let both = said("serial = '1'", "serial = '1'").unwrap_err();
        assert!(both.contains("the SCSI serial `1` of vendor `BLOCKMUX` and product `VOLUME`;"), "{both}");
    }

    #[test]
    fn names_are_unique_and_have_allowed_characters() {
        assert!(names(&["a=mem:1m", "a=mem:2m"]).unwrap_err().starts_with("two volumes are named `a`"));
        assert!(names(&["disk0=mem:1m", "mem:2m"]).unwrap_err().starts_with("two volumes are named `disk0`"));
        assert!(names(&["a b=mem:1m"]).unwrap_err().starts_with("`a b` is not a valid name"));
        assert!(names(&["=mem:1m"]).unwrap_err().starts_with("`` is not a valid name"));
    }
}
