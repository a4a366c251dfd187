//! Executes the commands that the control API accepts: status, volumes, targets, logging, config.
//!
//! Commands run on threads of the API and not on cores. Commands that change something take effect
//! one at a time ([`Reloader::begin_change`]); work that may hang in a path comes before. Queries
//! read snapshots and wait for no change. See
//! docs/decisions/0067-queries-take-no-lock-that-a-change-holds.md.

use super::announce::{Announcement, ClientLocation};
use super::attachment::Attachment;
use super::config::{VolumeEntry, current_directory};
use super::config_audit::{self, Caller};
use super::disks::DiskInfo;
use super::identity::{ServedData, served_data, warn_of_same_data};
use super::opening::{NamedVolume, VolumeOpener};
use super::reload::edit;
use super::reload::{Changing, Current, Recorded, Reloader, check_not_deleted, check_not_used, wait};
use super::secrets::Secrets;
use crate::access::networks;
use crate::api::ApiError;
use crate::cli::ctl::{
    Answer, PlanReport, PopulatedStatus, ProtocolStatus, Request, ReservationStatus, SessionStatus, Status,
    ThrottleStatus, VolumeStatus,
};
use crate::data::layers;
use crate::data::part::DataPart;
use crate::process::log::levels::{self, Levels};
use crate::protocol::frontend::{Change, FilesRead, LiveFrontend, LiveProtocol, TargetPlace};
use crate::protocol::policy::Policy;
use crate::protocol::{Frontends, Protocol, by_name};
use crate::volume_kinds::flush;
use crate::volume_kinds::open::Populate;
use blockmux_engine::core::reactor::CoreStats;
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerState};
use blockmux_engine::serve::sessions::SessionInfo;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::names::networks::AllowedNetworks;
use blockmux_proto::volume_state::{
    ERROR_KINDS, OriginTraffic, ReservationSummary, VolumeLatency, VolumeState, VolumeTraffic,
};
use blockmux_volume::{Beyond, Limits, VolumeLimits};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tracing::{info, warn};

/// Changes log levels if some are given, and returns the levels of all areas.
fn log_levels(changed: Option<&str>) -> Result<Answer, ApiError> {
    let changed = changed.map_or(Ok(Levels::default()), str::parse).map_err(ApiError::invalid)?;
    let levels = levels::change(changed).map_err(ApiError::failed)?;
    Ok(Answer::Levels(levels.into_iter().map(|(area, level)| (area.to_owned(), level)).collect()))
}

/// The limit of all connections, and the connection counters of each protocol and listener.
pub(super) struct ConnectionLimits {
    pub(super) limit: ConnectionLimit,
    protocols: Mutex<Vec<(&'static str, ConnectionLimit)>>,
    listeners: Mutex<Vec<(&'static str, Arc<ListenerState>)>>,
    /// Seconds after which a client without requests is disconnected; 0: never.
    idle_timeout_s: AtomicU64,
}

impl ConnectionLimits {
    /// Creates the counters; protocols are added with their listeners.
    pub(super) fn new(limit: ConnectionLimit) -> ConnectionLimits {
        ConnectionLimits {
            limit,
            protocols: Mutex::default(),
            listeners: Mutex::default(),
            idle_timeout_s: AtomicU64::new(0),
        }
    }

    /// Changes the maximum number of connections.
    pub(super) fn set_max(&self, max: usize) {
        self.limit.set_most(max);
    }

    /// Changes the login timeout (`None`: the default of each protocol) and the idle timeout
    /// (`None`: no limit).
    pub(super) fn set_timeouts(&self, login: Option<Duration>, idle: Option<Duration>) {
        self.limit.set_login_timeout(login);
        self.idle_timeout_s.store(idle.map_or(0, |idle| idle.as_secs()), Ordering::Relaxed);
    }

    /// Time after which a client without requests is disconnected; `None` for never.
    pub(super) fn idle_timeout(&self) -> Option<Duration> {
        let seconds = self.idle_timeout_s.load(Ordering::Relaxed);
        (seconds > 0).then(|| Duration::from_secs(seconds))
    }

    /// Creates the limit that a new listener of a protocol acquires its permits from. Metrics
    /// include its counters until [`ConnectionLimits::remove_listener`].
    pub(super) fn limit_of(&self, protocol: &Protocol, address: &str) -> ConnectionLimit {
        let limit = self.limit_of_protocol(protocol).for_listener(address);
        self.listeners().push((protocol.name, limit.listener().clone()));
        limit
    }

    fn limit_of_protocol(&self, protocol: &Protocol) -> ConnectionLimit {
        let mut protocols = self.protocols();
        if let Some((_, limit)) = protocols.iter().find(|(name, _)| *name == protocol.name) {
            return limit.clone();
        }
        let limit = self.limit.for_protocol(protocol.name);
        protocols.push((protocol.name, limit.clone()));
        limit
    }

    /// Changes the networks from which a listener accepts connections.
    pub(super) fn set_networks(&self, protocol: &Protocol, address: &str, networks: &AllowedNetworks) {
        let listeners = self.listeners();
        let own = listeners.iter().filter(|(name, own)| *name == protocol.name && own.address() == address);
        own.for_each(|(_, own)| own.set_networks(networks.clone()));
    }

    /// Removes the counters of a listener that is closed.
    pub(super) fn remove_listener(&self, protocol: &Protocol, address: &str) {
        self.listeners().retain(|(name, own)| *name != protocol.name || own.address() != address);
    }

    fn protocols(&self) -> MutexGuard<'_, Vec<(&'static str, ConnectionLimit)>> {
        self.protocols.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listeners(&self) -> MutexGuard<'_, Vec<(&'static str, Arc<ListenerState>)>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A snapshot of all counters, for metrics and the live page.
#[derive(Default)]
pub(super) struct Snapshot {
    pub(super) status: ConnectionCounts,
    pub(super) listeners: Vec<(&'static str, Arc<ListenerState>)>,
    pub(super) volumes: Vec<VolumeCounters>,
    pub(super) sessions: Vec<SessionInfo>,
    pub(super) disks: Vec<DiskInfo>,
    pub(super) cores: Vec<Arc<CoreStats>>,
}

/// Connection counts of all protocols.
#[derive(Default)]
pub(super) struct ConnectionCounts {
    pub(super) connections: usize,
    pub(super) max_connections: usize,
    /// Lost connections whose I/O has not ended.
    pub(super) orphaned: usize,
}

/// The counters of a volume.
#[derive(Default)]
pub(super) struct VolumeCounters {
    pub(super) name: String,
    /// In bytes.
    pub(super) size: u64,
    /// Lost connections whose I/O has not ended.
    pub(super) orphaned: usize,
    pub(super) origins: Vec<OriginTraffic>,
    pub(super) reservation: ReservationSummary,
    /// Populated memory of a RAM volume, in bytes.
    pub(super) populated: Option<u64>,
    /// Reconnects of a remote volume.
    pub(super) reconnects: Option<u64>,
}

impl VolumeCounters {
    /// Number of connections that use the volume.
    pub(super) fn users(&self) -> u64 {
        let users: u64 = self.origins.iter().map(|one| one.traffic.users).sum();
        users.saturating_sub(self.orphaned as u64)
    }

    /// Latencies of all users.
    pub(super) fn latency(&self) -> VolumeLatency {
        self.origins.iter().fold(VolumeLatency::default(), |sum, one| sum.plus(&one.latency))
    }

    /// A sum over all users of a counter of limits.
    pub(super) fn throttled(&self, count: fn(&VolumeTraffic) -> u64) -> u64 {
        self.origins.iter().map(|one| count(&one.traffic)).sum()
    }

    /// Number of requests in flight.
    pub(super) fn queue_depth(&self) -> u64 {
        self.origins.iter().map(OriginTraffic::in_flight).sum()
    }

    /// Numbers of failed requests, in the order of `ERROR_KINDS`.
    pub(super) fn failures(&self) -> [u64; ERROR_KINDS.len()] {
        let mut sum = [0; ERROR_KINDS.len()];
        for one in &self.origins {
            sum.iter_mut().zip(one.failures).for_each(|(sum, count)| *sum += count);
        }
        sum
    }
}

/// Executes the commands of the control API.
pub(super) struct ControlServer {
    pub(super) exports: Exports,
    pub(super) connection_limits: Arc<ConnectionLimits>,
    /// The protocols that are served.
    pub(super) live_protocols: Current<Vec<LiveProtocol>>,
    pub(super) cores: Vec<Arc<CoreStats>>,
    pub(super) opener: Current<VolumeOpener>,
    pub(super) frontends: Current<Frontends>,
    pub(super) policy: Policy,
    pub(super) secrets: Secrets,
    pub(super) reloader: Arc<Reloader>,
}

impl ControlServer {
    /// Executes a request that changes nothing. It waits for no change.
    pub(super) fn answer(&self, request: &Request) -> Answer {
        match request {
            Request::Status => Answer::Status(self.status()),
            Request::Sessions => {
                let sessions = self.connection_limits.limit.sessions().list();
                Answer::Sessions(sessions.into_iter().map(SessionStatus::from).collect())
            }
            Request::Diff { .. } => self.reloader.diff().map_or_else(Answer::Failed, Answer::Plan),
            Request::Export => Answer::Text(self.reloader.export()),
            Request::Secrets => self.secrets().map_or_else(Answer::Failed, Answer::Secrets),
            Request::List { path, query } => {
                edit::list(&self.reloader, path, query).map_or_else(Answer::Failed, Answer::Objects)
            }
            Request::Show { path } => match edit::show(&self.reloader, path) {
                Ok((object, tag)) => Answer::Object { object, tag },
                Err(error) => Answer::Failed(error),
            },
            Request::Log { levels: None } => log_levels(None).unwrap_or_else(Answer::Failed),
            _ => Answer::Failed(ApiError::failed("internal error: a change was sent as a query")),
        }
    }

    /// Executes a request that changes something, and logs it with its caller. If it takes long, it
    /// reports its progress to `progress`.
    pub(super) fn change(&self, request: &Request, caller: &Caller, progress: &dyn Fn(String)) -> Answer {
        let request = &self.with_exact_target(request);
        let changed = self.make_change(request, caller, progress);
        if matches!(request, Request::Edit(edit) if edit.options.dry_run) {
            return changed.map_or_else(Answer::Failed, |changed| changed.answer);
        }
        let effects = changed.as_ref().map(|changed| &*changed.effects);
        config_audit::log(caller, &request.to_string(), effects);
        changed.map_or_else(Answer::Failed, |changed| changed.answer)
    }

    /// A request that names its target as the daemon does: iSCSI names have no case.
    fn with_exact_target(&self, request: &Request) -> Request {
        let mut request = request.clone();
        if let Request::Attach { target, .. }
        | Request::Detach { target, .. }
        | Request::Change(Change { target, .. }) = &mut request
        {
            let served = self.live_protocols.get();
            let exact = served.iter().find_map(|(_, live)| live.access_of(target));
            exact.into_iter().for_each(|exact| *target = exact.target);
        }
        request
    }

    fn make_change(
        &self,
        request: &Request,
        caller: &Caller,
        progress: &dyn Fn(String),
    ) -> Result<Changed, ApiError> {
        let planned = |report: PlanReport| Changed { effects: report.lines(), answer: Answer::Plan(report) };
        let noted = |report: PlanReport| {
            let note = self.reloader.note_of_applied(&report);
            let Changed { answer, effects } = planned(report);
            Changed { answer: answer.noted(note), effects }
        };
        let said = |text: String| Changed { effects: vec![text.clone()], answer: Answer::Message(text) };
        match request {
            Request::Reload => self.reloader.reload(caller).map(planned),
            Request::Apply { fragment, prune } => {
                self.reloader.apply_fragment(fragment, *prune, caller).map(noted)
            }
            Request::Edit(edit) if edit.options.dry_run => {
                let report = edit::make(&self.reloader, edit, caller)?;
                Ok(Changed { answer: Answer::Plan(report), effects: Vec::new() })
            }
            Request::Edit(edit) => edit::make(&self.reloader, edit, caller).map(noted),
            Request::Save => self.reloader.save(caller).map(said),
            Request::Log { levels } => {
                let before = log_levels(None)?.json();
                let answer = log_levels(levels.as_deref())?;
                Ok(Changed { effects: vec![format!("~ log: {before} -> {}", answer.json())], answer })
            }
            Request::Resize { name, size, shrink } => {
                let beyond = if *shrink { Beyond::Discard } else { Beyond::Refuse };
                self.resize(request, caller, name, *size, beyond)
            }
            Request::Add { volume, read_only, description, protocols, allow, limits, client_limits } => {
                let networks = networks::parse(allow.as_deref()).map_err(ApiError::invalid)?;
                let entry: VolumeEntry = volume.as_written().parse().map_err(ApiError::invalid)?;
                let read_only = *read_only || self.opener.get().read_only;
                let entry = VolumeEntry {
                    spec: entry.spec.below(&current_directory()),
                    read_only,
                    description: description.clone(),
                    protocols: protocols.clone(),
                    networks,
                    limits: limits.unwrap_or_default(),
                    client_limits: client_limits.unwrap_or_default(),
                    ..entry
                };
                self.add(request, entry)
            }
            Request::Remove { name, force } => self.remove(request, name, *force, progress),
            Request::Limit { name, limits, client_limits } => {
                self.at_once(request, |_| self.limit(name, *limits, *client_limits))
            }
            Request::Attach { name, target, number, ana_group } => {
                let place = TargetPlace { number: *number, ana_group: *ana_group };
                self.at_once(request, |_| {
                    self.attach(name, target, &place).map(|number| Answer::Attached { number })
                })
            }
            Request::Detach { target, number, force } => {
                self.detach(request, target, *number, *force, progress)
            }
            Request::AttachDisk { volume, via, socket, name, read_only } => {
                let (volume, socket, name) = (volume.clone(), socket.clone(), name.clone());
                let asked = Attachment { volume, via: *via, socket, name, read_only: *read_only };
                self.attach_disk(request, asked)
            }
            Request::DetachDisk { volume, force } => self.detach_disk(request, volume, *force),
            Request::Disconnect { session } => self.disconnect(session),
            Request::WriteSecret { name, value } => self.write_secret(name, value, caller),
            Request::RemoveSecret { name } => self.remove_secret(name, caller),
            Request::Change(change) => {
                let files = self.read_files(change)?;
                self.at_once(request, |served| self.change_target(served, change, files))
            }
            Request::Status
            | Request::Sessions
            | Request::Diff { .. }
            | Request::Export
            | Request::Secrets
            | Request::List { .. }
            | Request::Show { .. } => Ok(Changed { answer: self.answer(request), effects: Vec::new() }),
        }
    }

    /// Makes and records a change that opens no path and waits for no I/O.
    fn at_once(
        &self,
        request: &Request,
        change: impl FnOnce(&[LiveProtocol]) -> Result<Answer, ApiError>,
    ) -> Result<Changed, ApiError> {
        let changing = self.reloader.begin_change();
        let answer = change(&self.live_protocols.get())?;
        Ok(self.recorded(&changing, request, answer, None))
    }

    /// Records a change in the running config; adds a note about the config file to its answer.
    /// `opened` is the volume that it has added.
    pub(super) fn recorded(
        &self,
        changing: &Changing<'_>,
        request: &Request,
        answer: Answer,
        opened: Option<NamedVolume>,
    ) -> Changed {
        let Recorded { note, mut effects } = self.reloader.record(changing, request, &answer, opened);
        if effects.is_empty() {
            // The config has no key for it.
            effects.extend(match (request, &answer) {
                (Request::Attach { name, target, .. }, Answer::Attached { number }) => {
                    Some(format!("+ {target} {number}: {name}"))
                }
                (Request::Detach { target, number, .. }, _) => Some(format!("- {target} {number}")),
                (Request::Change(change), _) => Some(format!("~ {}: {}", change.target, change.what)),
                _ => None,
            });
        }
        Changed { answer: answer.noted(note), effects }
    }

    /// Exports a new volume. It is opened without the right to change the daemon, because its path
    /// or its server may hang.
    fn add(&self, request: &Request, entry: VolumeEntry) -> Result<Changed, ApiError> {
        let opener = self.opener.get();
        let named = {
            let mut changing = self.reloader.begin_change();
            let name = entry.name.clone().unwrap_or_else(|| self.free_name(&changing));
            self.check_is_free(&name, &changing)?;
            let named = NamedVolume { name, entry };
            opener.protocols.iter().try_for_each(|one| named.check_description(one))?;
            // Checked before the volume is opened, which may create a file.
            self.policy.add(&named.name, named.entry.protocols.clone())?;
            changing.opening.insert(named.name.clone());
            named
        };
        let opened = {
            let (opener, named) = (opener.clone(), named.clone());
            let what = format!("{}: {}", named.name, named.entry.spec);
            let open = move || {
                let (export, volume_state) = opener.open(&named, Populate::Behind)?;
                Ok((export, volume_state, layers::of_spec(&named.entry.spec)))
            };
            self.reloader.blocking.run(what, open)
        };
        // A volume that is refused is closed, which may hang, after the right to change is given
        // back.
        let _closed_last = opened.iter().flatten().next().map(|(export, ..)| export.volume.clone());
        let changing = {
            let mut changing = self.reloader.begin_change();
            changing.opening.remove(&named.name);
            changing
        };
        let added = match opened {
            Ok(Ok(opened)) => self.export_new(&named, opened, &changing),
            Ok(Err(failure)) | Err(failure) => Err(failure.into()),
        };
        // A reload may have exported a volume with this name meanwhile.
        if added.is_err() && self.exports.find(&named.name).is_none() {
            self.policy.remove(&named.name);
        }
        Ok(self.recorded(&changing, request, added?, Some(named)))
    }

    /// Checks that no volume has this name.
    fn check_is_free(&self, name: &str, changing: &Changing<'_>) -> Result<(), ApiError> {
        if self.exports.find(name).is_some() {
            return Err(format!("a volume with the name `{name}` exists already; choose another name").into());
        }
        if changing.opening.contains(name) {
            let text = format!("a volume with the name `{name}` is being opened; choose another name");
            return Err(text.into());
        }
        Ok(())
    }

    /// Exports a volume that was opened.
    fn export_new(
        &self,
        named: &NamedVolume,
        (export, volume_state, parts): (Export, Arc<VolumeState>, Vec<DataPart>),
        changing: &Changing<'_>,
    ) -> Result<Answer, ApiError> {
        let (name, entry) = (&named.name, &named.entry);
        self.check_is_free(name, changing)?;
        // The config may have changed while the volume was opened.
        let (opener, served) = (self.opener.get(), self.live_protocols.get());
        self.policy.add(name, entry.protocols.clone())?;
        self.policy.set_networks(name, entry.networks.clone());
        opener.check_blocks(named, &volume_state.volume().info())?;
        self.policy.set_data(name, parts);
        self.policy.check_same_data(name, |name| self.is_restricted(name, &served))?;
        let all: Vec<_> = self.exports.iter().collect();
        let mut all = served_data(&all, &self.exports, &self.policy);
        all.push(ServedData { name, uuid: volume_state.uuid(), parts: self.policy.data_of(name) });
        warn_of_same_data(&all, |pair| pair.contains(&name.as_str()));
        let id = self.exports.add(export, volume_state);
        let id = id.ok_or_else(|| "too many volumes; remove one".to_owned())?;
        served.iter().for_each(|(_, live)| live.add(id));
        let urls =
            Announcement::new(&self.exports, &self.frontends.get(), &self.policy, ClientLocation::Anywhere);
        let without_listener = entry.protocols.iter().flatten().map(|word| word.replace('_', "-"));
        let without_listener = without_listener.filter(|word| {
            by_name(word).is_some() && opener.protocols.iter().all(|protocol| protocol.name != word)
        });
        let (name, without_listener) = (name.clone(), without_listener.collect());
        self.policy.not_served(&name).iter().for_each(|why| info!("{name} is not exported by {why}"));
        Ok(Answer::Added { urls: urls.urls_of(&name), name, without_listener })
    }

    /// The first unused name of the form `diskN`.
    fn free_name(&self, changing: &Changing<'_>) -> String {
        let mut names = (0_u64..).map(|number| format!("disk{number}"));
        names.find(|name| self.check_is_free(name, changing).is_ok()).unwrap_or_default()
    }

    /// Stops exporting a volume: waits for I/O in flight and flushes the volume. A volume that is
    /// in use is removed only by `force`.
    fn remove(
        &self,
        request: &Request,
        name: &str,
        force: bool,
        progress: &dyn Fn(String),
    ) -> Result<Changed, ApiError> {
        let (_, checked) = self.find(name)?;
        if !force {
            let (named, checked) = (name.to_owned(), checked.clone());
            let check = move || check_not_deleted(&named, &**checked.volume());
            self.reloader.blocking.run(name, check)??;
            check_not_used(name, "remove", &self.reloader.users_of(name))?;
        }
        // Dropped after the right to change, because that may attach the disk again.
        let detached = self.detach_disks(name, force)?;
        let changing = self.reloader.begin_change();
        let (volume, volume_state) = self.find(name)?;
        if !force {
            if !Arc::ptr_eq(&checked, &volume_state) {
                return Err(format!("{name}: was replaced at the same time; try again").into());
            }
            check_not_used(name, "remove", &self.reloader.users_of(name))?;
        }
        self.reloader.lift_limits(&[volume_state]);
        self.live_protocols.get().iter().for_each(|(_, live)| live.remove(volume));
        let removed = self
            .exports
            .remove(name)
            .ok_or_else(|| ApiError::not_found(format!("`{name}` is already removed")))?;
        self.policy.remove(name);
        detached.keep();
        self.reloader.cores().wake_all();
        let changed = self.recorded(&changing, request, Answer::Done, None);
        // Other commands need not wait for this volume's I/O.
        drop(changing);
        wait_for_io(name, "removed", std::slice::from_ref(&removed.volume_state), progress);
        progress("flushing".to_owned());
        let flushed = flush::each(&[removed.export]);
        flushed.map_err(|failure| ApiError::failed(format!("{name} is removed, but {failure}")))?;
        Ok(changed)
    }

    fn attach(&self, name: &str, target: &str, place: &TargetPlace) -> Result<u32, ApiError> {
        let (volume, _) = self.find(name)?;
        let served = self.live_protocols.get();
        let (protocol, live) = self.with_target(&served, target)?;
        let others: Vec<_> = served
            .iter()
            .flat_map(|(own, live)| live.targets_of(volume).into_iter().map(|access| (own.name, access)))
            .collect();
        if let Some(new) = live.access_of(target) {
            self.policy.check_attach(name, (protocol.name, &new), &others)?;
            let is_restricted =
                |own: &str| own == name && new.public.is_restricted() || self.is_restricted(own, &served);
            self.policy.check_same_data(name, is_restricted)?;
        }
        Ok(live.attach(target, volume, place)?)
    }

    /// Removes a unit from a target: waits for I/O in flight on its volume, so that a discard of
    /// the old initiator does not meet the data of the next one. A unit of a target with sessions
    /// is removed only by `force`.
    fn detach(
        &self,
        request: &Request,
        target: &str,
        number: u32,
        force: bool,
        progress: &dyn Fn(String),
    ) -> Result<Changed, ApiError> {
        let mut volumes = Vec::new();
        let changed = self.at_once(request, |served| {
            let (_, live) = self.with_target(served, target)?;
            if !force {
                let unit = format!("{target} {number}");
                check_not_used(&unit, "detach", &self.reloader.sessions_with(|own| own == target))?;
            }
            let has = |id: VolumeId| live.targets_of(id).iter().any(|access| access.target == target);
            let of_target = self.exports.iter().filter(|(id, _)| has(*id));
            volumes = of_target.filter_map(|(id, _)| self.exports.volume_state(id)).collect();
            live.detach(target, number).map(|()| Answer::Done).map_err(ApiError::not_found)
        })?;
        wait_for_io(target, "detached", &volumes, progress);
        Ok(changed)
    }

    /// The protocol that has a target with this name.
    fn with_target<'a>(
        &self,
        live_protocols: &'a [LiveProtocol],
        target: &str,
    ) -> Result<(&'static Protocol, &'a dyn LiveFrontend), ApiError> {
        let found = live_protocols.iter().find(|(_, live)| live.access_of(target).is_some());
        found.map(|(protocol, live)| (*protocol, &**live)).ok_or_else(|| {
            let of_volumes = self.exports.iter().flat_map(|(volume, _)| {
                live_protocols.iter().flat_map(move |(_, live)| live.targets_of(volume))
            });
            let known: BTreeSet<_> = of_volumes.map(|access| access.target).collect();
            let shown: Vec<_> = known.iter().take(SHOWN_TARGETS).map(String::as_str).collect();
            let more = if known.len() > shown.len() { ", ..." } else { "" };
            ApiError::not_found(match shown.join(", ") {
                none if none.is_empty() => {
                    format!("no target or subsystem `{target}`; no volume has one")
                }
                shown => format!("no target or subsystem `{target}`; choose one of {shown}{more}"),
            })
        })
    }

    /// Whether a target that has the volume now restricts access to it.
    pub(super) fn is_restricted(&self, name: &str, live_protocols: &[LiveProtocol]) -> bool {
        let Some((volume, _)) = self.exports.find(name) else { return false };
        live_protocols
            .iter()
            .any(|(_, live)| live.targets_of(volume).iter().any(|access| access.public.is_restricted()))
    }

    /// Reads the files that a command needs which is specific to the protocol of a target.
    fn read_files(&self, change: &Change) -> Result<FilesRead, ApiError> {
        let (served, change) = (self.live_protocols.get(), change.clone());
        let read = move || {
            let live = served.iter().find(|(_, live)| live.access_of(&change.target).is_some());
            live.map_or_else(
                || Ok(Box::new(()) as FilesRead),
                |(_, live)| live.read_files(&change.target, &change.what),
            )
        };
        Ok(self.reloader.blocking.run("the files of the command", read)??)
    }

    /// Executes a command that is specific to the protocol of a target.
    fn change_target(
        &self,
        served: &[LiveProtocol],
        Change { protocol, target, what }: &Change,
        files: FilesRead,
    ) -> Result<Answer, ApiError> {
        let (own, live) = self.with_target(served, target)?;
        if own.name != protocol {
            let text = format!("{target}: belongs to {}, which does not support this command", own.title);
            return Err(ApiError::invalid(text));
        }
        Ok(live.change(target, what, files)?.map_or(Answer::Done, Answer::Message))
    }

    pub(super) fn find(&self, name: &str) -> Result<(VolumeId, Arc<VolumeState>), ApiError> {
        let found = self.exports.find(name).and_then(|(id, _)| Some((id, self.exports.volume_state(id)?)));
        found.ok_or_else(|| {
            let names: Vec<_> = self.exports.iter().map(|(_, export)| export.name.clone()).collect();
            ApiError::not_found(match names.is_empty() {
                true => format!("no volume has the name `{name}`; no volume is exported"),
                false => format!("no volume has the name `{name}`; choose one of {}", names.join(", ")),
            })
        })
    }

    /// Changes the limits that are given.
    fn limit(&self, name: &str, volume: Option<Limits>, client: Option<Limits>) -> Result<Answer, ApiError> {
        let (_, volume_state) = self.find(name)?;
        let now = volume_state.limiter().limits();
        let (volume, client) = (volume.unwrap_or(now.volume), client.unwrap_or(now.client));
        if volume_state.limiter().set_limits(VolumeLimits { volume, client }) {
            // Requests that the old limits throttle may start.
            self.reloader.cores().wake_all();
        }
        Ok(Answer::Done)
    }

    /// A snapshot of all counters.
    pub(super) fn snapshot(&self) -> Snapshot {
        let volumes = self.exports.iter().filter_map(|(id, export)| {
            let volume_state = self.exports.volume_state(id)?;
            let volume = volume_state.volume();
            Some(VolumeCounters {
                name: export.name.clone(),
                size: volume.info().size,
                orphaned: volume_state.orphans(),
                origins: volume_state.traffic_by_origin(),
                reservation: volume_state.reservation(),
                populated: volume.populated().map(|now| now.bytes),
                reconnects: volume.links().map(|links| links.reconnects),
            })
        });
        let limit = &self.connection_limits.limit;
        Snapshot {
            status: ConnectionCounts {
                connections: limit.open(),
                max_connections: limit.most(),
                orphaned: limit.orphaned(),
            },
            listeners: self.connection_limits.listeners().clone(),
            volumes: volumes.collect(),
            sessions: self.connection_limits.limit.sessions().list(),
            disks: self.reloader.disks.list(),
            cores: self.cores.clone(),
        }
    }

    fn status(&self) -> Status {
        let volumes = self.exports.iter().filter_map(|(id, export)| {
            let state = self.exports.volume_state(id)?;
            let (info, traffic, orphaned) = (state.volume().info(), state.traffic(), state.orphans());
            let VolumeLimits { volume: limits, client: client_limits } = state.limiter().limits();
            let some = |limits: Limits| (!limits.is_unlimited()).then(|| limits.into());
            Some(VolumeStatus {
                name: export.name.clone(),
                size: info.size,
                read_only: export.read_only || info.read_only,
                allow: self.policy.networks_of(&export.name).networks().map(|own| own.to_string()).collect(),
                users: traffic.users.saturating_sub(orphaned as u64),
                orphaned_connections: orphaned,
                traffic: traffic.into(),
                limits: some(limits),
                client_limits: some(client_limits),
                throttled: (traffic.throttled > 0).then(|| ThrottleStatus {
                    held: traffic.throttled_now,
                    requests: traffic.throttled,
                    seconds: Duration::from_nanos(traffic.throttled_ns).as_secs_f64(),
                }),
                reservation: Some(state.reservation())
                    .filter(|now| now.registrants > 0 || now.is_reserved)
                    .map(|now| ReservationStatus { registrants: now.registrants, reserved: now.is_reserved }),
                reconnects: state.volume().links().map(|links| links.reconnects),
                populated: state
                    .volume()
                    .populated()
                    .map(|now| PopulatedStatus { bytes: now.bytes, of: now.of }),
            })
        });
        let limits = self.connection_limits.protocols();
        let protocols = limits.iter().map(|(name, limit)| ProtocolStatus {
            name: (*name).to_owned(),
            connections: limit.open_of_protocol(),
        });
        let limit = &self.connection_limits.limit;
        Status {
            connections: limit.open(),
            max_connections: limit.most(),
            orphaned_connections: limit.orphaned(),
            protocols: protocols.collect(),
            volumes: volumes.collect(),
            attachments: self.reloader.disks.list().into_iter().map(DiskInfo::into_status).collect(),
        }
    }
}

/// Waits for the I/O in flight on volumes.
fn wait_for_io(name: &str, done: &str, volumes: &[Arc<VolumeState>], progress: &dyn Fn(String)) {
    let settling: Vec<_> = volumes.iter().map(VolumeState::settling).collect();
    let is_over = || settling.iter().all(|settling| settling.is_over());
    if !is_over() {
        progress("waiting for I/O in flight".to_owned());
    }
    wait(REMOVE_TIMEOUT, is_over);
    if !is_over() {
        let timeout = REMOVE_TIMEOUT.as_secs();
        warn!("{name}: I/O that was in flight when it was {done} has not ended after {timeout} s");
    }
}

/// The answer to a change, and its effects in the words of a plan, for the audit log.
pub(super) struct Changed {
    pub(super) answer: Answer,
    pub(super) effects: Vec<String>,
}

/// Maximum number of target names in a message.
const SHOWN_TARGETS: usize = 8;
/// Time for I/O in flight on a volume that is removed or detached.
pub(super) const REMOVE_TIMEOUT: Duration = Duration::from_secs(10);
