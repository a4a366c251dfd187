//! Executes the commands that the control API accepts: status, volumes, targets, logging, config.
//!
//! Commands run on threads of the API and not on cores. Commands that change something take effect
//! one at a time ([`Reloader::begin_change`]); work that may hang in a path comes before. Queries
//! read snapshots and wait for no change. See
//! docs/decisions/0067-queries-take-no-lock-that-a-change-holds.md.

use super::announce::{Announcer, ClientLocation};
use super::config_audit::{self, Caller};
use super::disks::DiskInfo;
use super::exported::ExportedBy;
use super::group::GroupMember;
use super::opening::VolumeOpener;
use super::reload::commands::{self, Executed};
use super::reload::group_volumes::{image_of_volume, owned_volume};
use super::reload::{Current, Reloader, edit, fragment};
use super::secrets::Secrets;
use super::serving_commands::OwnedVolume;
use super::snapshot_commands::SnapshottedVolume;
use crate::api::bodies::{Added, Attached, AttachedDevice};
use crate::api::cluster::ClusterStatus;
use crate::api::plan::PlanReport;
use crate::api::request::{Answer, Request};
use crate::api::status::{
    PopulatedStatus, ProtocolStatus, ReservationStatus, SessionStatus, Status, ThrottleStatus, VolumeStatus,
};
use crate::api::{ApiError, ErrorCode};
use crate::process::log::levels::{self, Levels};
use crate::protocol::frontend::{Change, LiveProtocol};
use crate::protocol::policy::Policy;
use crate::protocol::{Frontends, Protocol, by_name};
use blockmux_engine::core::reactor::CoreStats;
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerState};
use blockmux_engine::serve::sessions::SessionInfo;
use blockmux_proto::exports::Exports;
use blockmux_proto::names::networks::AllowedNetworks;
use blockmux_proto::volume_state::{
    ERROR_KINDS, OriginTraffic, ReservationSummary, ServingState, VolumeLatency, VolumeState, VolumeTraffic,
};
use blockmux_volume::{Limits, VolumeLimits};
use std::collections::BTreeMap;
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
    /// By protocol and address.
    listeners: Mutex<BTreeMap<(&'static str, String), Arc<ListenerState>>>,
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
        self.listeners().insert((protocol.name, address.to_owned()), limit.listener().clone());
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
        let own = self.listeners().get(&(protocol.name, address.to_owned())).cloned();
        own.into_iter().for_each(|own| own.set_networks(networks.clone()));
    }

    /// Removes the counters of a listener that is closed.
    pub(super) fn remove_listener(&self, protocol: &Protocol, address: &str) {
        self.listeners().remove(&(protocol.name, address.to_owned()));
    }

    /// The counters of all listeners, each with its protocol.
    fn listed(&self) -> Vec<(&'static str, Arc<ListenerState>)> {
        self.listeners().iter().map(|((protocol, _), own)| (*protocol, own.clone())).collect()
    }

    fn protocols(&self) -> MutexGuard<'_, Vec<(&'static str, ConnectionLimit)>> {
        self.protocols.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listeners(&self) -> MutexGuard<'_, BTreeMap<(&'static str, String), Arc<ListenerState>>> {
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
    /// The group of gateways that the daemon belongs to.
    pub(super) group: Option<ClusterStatus>,
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
    /// Whether this daemon serves a volume that several daemons serve in turns.
    pub(super) is_active: Option<bool>,
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
            Request::Diff => self.reloader.diff().map_or_else(Answer::Failed, Answer::Plan),
            Request::Export { as_json } => {
                let (content, tag) = self.reloader.export(*as_json);
                Answer::Config { content, tag }
            }
            Request::Cluster => {
                self.gateway().map_or_else(Answer::Failed, |own| Answer::Cluster(own.cluster_status()))
            }
            Request::Snapshots { volume } => {
                let listed = self.snapshotted(volume).and_then(|volume| volume.list());
                listed.map_or_else(Answer::Failed, Answer::Snapshots)
            }
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
        if request.is_dry_run() {
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
            Request::Reload => self.reloader.reload(caller, progress).map(planned),
            Request::Apply { fragment, options } if options.dry_run => {
                fragment::plan(&self.reloader, fragment, options).map(planned)
            }
            Request::Apply { fragment, options } => {
                fragment::apply(&self.reloader, fragment, options, caller, progress).map(noted)
            }
            Request::Edit(edit) if edit.options.dry_run => {
                edit::make(&self.reloader, edit, caller, progress).map(planned)
            }
            Request::Edit(edit) => edit::make(&self.reloader, edit, caller, progress).map(noted),
            Request::Save => self.reloader.save(caller).map(said),
            Request::Log { levels } => {
                let before = log_levels(None)?.json();
                let answer = log_levels(levels.as_deref())?;
                Ok(Changed { effects: vec![format!("~ log: {before} -> {}", answer.json())], answer })
            }
            Request::Add(_)
            | Request::Remove { .. }
            | Request::Limit { .. }
            | Request::Resize { .. }
            | Request::Attach { .. }
            | Request::Detach { .. }
            | Request::AttachDisk(_)
            | Request::DetachDisk { .. }
            | Request::Change(_) => self.execute(request, caller, progress),
            Request::CreateSnapshot { volume, name } => {
                let (created, effect) = self.snapshotted(volume)?.create(name, caller)?;
                Ok(Changed { answer: Answer::Snapshot(created), effects: vec![effect] })
            }
            Request::DeleteSnapshot { volume, name } => {
                let effect = self.snapshotted(volume)?.delete(name, caller)?;
                Ok(Changed { answer: Answer::Done, effects: vec![effect] })
            }
            Request::ProtectSnapshot { volume, name, protected } => {
                let effect = self.snapshotted(volume)?.protect(name, *protected, caller)?;
                Ok(Changed { answer: Answer::Done, effects: vec![effect] })
            }
            Request::Activate { volume, take } => {
                let blocking = &self.reloader.blocking;
                let (text, effects) = self.owned(volume)?.activate(*take, blocking, caller)?;
                Ok(Changed { answer: Answer::Message(text), effects })
            }
            Request::Deactivate { volume } => {
                let (text, effects) = self.owned(volume)?.deactivate(&self.reloader.blocking, caller)?;
                Ok(Changed { answer: Answer::Message(text), effects })
            }
            Request::ClusterChange(change) => self.gateway()?.change(change).map(said),
            Request::Disconnect { session } => self.disconnect(session),
            Request::WriteSecret { name, value } => self.write_secret(name, value, caller),
            Request::RemoveSecret { name, force } => self.remove_secret(name, *force, caller),
            Request::Status
            | Request::Sessions
            | Request::Diff
            | Request::Export { .. }
            | Request::Cluster
            | Request::Snapshots { .. }
            | Request::Secrets
            | Request::List { .. }
            | Request::Show { .. } => Ok(Changed { answer: self.answer(request), effects: Vec::new() }),
        }
    }

    /// Executes a short command, which is one or more edits of the config.
    fn execute(
        &self,
        request: &Request,
        caller: &Caller,
        progress: &dyn Fn(String),
    ) -> Result<Changed, ApiError> {
        let Executed { report, answer, resized } =
            commands::execute(&self.reloader, request, caller, progress)?;
        let mut effects = report.lines();
        match (request, &answer) {
            // The config may say it already, or the command has written default targets into it.
            (Request::Attach { target, unit }, Answer::Attached(Attached { number })) => {
                effects.push(format!("+ {target} {number}: {}", unit.volume));
            }
            // The size says it whether the config has it or not.
            (Request::Resize { .. }, _) => effects = resized,
            (Request::Detach { target, number, .. }, _) => effects.push(format!("- {target} {number}")),
            (Request::Change(change), _) => effects.push(format!("~ {}: {}", change.target, change.what)),
            _ => {}
        }
        let answer = match (answer, request) {
            (Answer::Added(Added { name, .. }), Request::Add(asked)) => {
                Answer::Added(self.added(name, asked.protocols.as_deref()))
            }
            (Answer::DiskAttached(_), Request::AttachDisk(asked)) => {
                let device = self.reloader.disks.device_of(&asked.volume)?.display().to_string();
                Answer::DiskAttached(AttachedDevice { device })
            }
            (answer, _) => answer,
        };
        report.warnings.iter().for_each(|what| warn!("{what}"));
        let notes = report.warnings.iter().cloned().chain(self.reloader.note_of_applied(&report));
        let notes: Vec<String> = notes.collect();
        Ok(Changed { answer: answer.noted((!notes.is_empty()).then(|| notes.join("; "))), effects })
    }

    /// The answer about a new volume.
    fn added(&self, name: String, protocols: Option<&[String]>) -> Added {
        let found = self.exports.find(&name).map(|(id, _)| id);
        let frontends = self.frontends.get();
        let announcer = Announcer::new(&frontends, &self.policy, ClientLocation::Anywhere);
        let urls = found.map(|id| announcer.urls_of(&self.exports, id)).unwrap_or_default();
        let opener = self.opener.get();
        let without_listener = protocols.into_iter().flatten().map(|word| word.replace('_', "-"));
        let without_listener = without_listener.filter(|word| {
            by_name(word).is_some() && opener.protocols.iter().all(|protocol| protocol.name != word)
        });
        let protocols_without_listener = without_listener.collect();
        self.policy.not_served(&name).iter().for_each(|why| info!("{name} is not exported by {why}"));
        Added { urls, name, protocols_without_listener }
    }

    /// A volume, for the commands that make it active or standby.
    fn owned(&self, name: &str) -> Result<OwnedVolume, ApiError> {
        let state = self.state_of(name)?;
        if image_of_volume(&self.reloader, name).is_some() {
            let text = format!(
                "{name}: the group of gateways decides which one serves it; use 'blockmux ctl cluster move {name} MEMBER'"
            );
            return Err(ApiError::new(ErrorCode::Conflict, text));
        }
        Ok(owned_volume(&self.reloader, name, state))
    }

    /// The daemon as a member of its group.
    fn gateway(&self) -> Result<Arc<GroupMember>, ApiError> {
        let text = "this daemon belongs to no group of gateways; a config with the table [group] takes effect at the \
                    next start";
        self.reloader.group.get().ok_or_else(|| ApiError::new(ErrorCode::Conflict, text))
    }

    /// The state of a volume that exists.
    fn state_of(&self, name: &str) -> Result<Arc<VolumeState>, ApiError> {
        self.reloader.state_of(name).ok_or_else(|| {
            let names: Vec<_> = self.exports.iter().map(|(_, export)| export.name.clone()).collect();
            commands::no_volume(name, names.iter().map(String::as_str))
        })
    }

    /// A volume, for commands about its snapshots.
    fn snapshotted<'a>(&'a self, name: &'a str) -> Result<SnapshottedVolume<'a>, ApiError> {
        let state = self.state_of(name)?;
        let (exports, blocking) = (&self.exports, &self.reloader.blocking);
        Ok(SnapshottedVolume { name, state, exports, blocking })
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
                is_active: volume_state.ownership().map(|_| volume_state.serving() == ServingState::Active),
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
            listeners: self.connection_limits.listed(),
            volumes: volumes.collect(),
            sessions: self.connection_limits.limit.sessions().list(),
            disks: self.reloader.disks.list(),
            cores: self.cores.clone(),
            group: self.reloader.group.get().map(|own| own.cluster_status()),
        }
    }

    fn status(&self) -> Status {
        let exported = ExportedBy::new(&self.policy, &self.frontends.get(), &self.live_protocols.get());
        let volumes = self.exports.iter().filter_map(|(id, export)| {
            let state = self.exports.volume_state(id)?;
            let (info, traffic, orphaned) = (state.volume().info(), state.traffic(), state.orphans());
            let VolumeLimits { volume: limits, client: client_limits } = state.limiter().limits();
            let some = |limits: Limits| (!limits.is_unlimited()).then(|| limits.into());
            let (protocols, targets) = exported.of(id, &export.name);
            Some(VolumeStatus {
                name: export.name.clone(),
                size: info.size,
                read_only: export.read_only || info.read_only,
                protocols,
                targets,
                allow: self.policy.networks_of(&export.name).networks().map(|own| own.to_string()).collect(),
                users: traffic.users.saturating_sub(orphaned as u64),
                orphaned_connections: orphaned,
                traffic: traffic.into(),
                limits: some(limits),
                client_limits: some(client_limits),
                throttled: (traffic.throttled > 0).then(|| ThrottleStatus {
                    pending: traffic.throttled_now,
                    requests: traffic.throttled,
                    seconds: Duration::from_nanos(traffic.throttled_ns).as_secs_f64(),
                }),
                reservation: Some(state.reservation())
                    .filter(|now| now.registrants > 0 || now.is_reserved)
                    .map(|now| ReservationStatus { registrants: now.registrants, reserved: now.is_reserved }),
                serving: state.ownership().map(|_| state.serving().name().to_owned()),
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

/// The answer to a change, and its effects in the words of a plan, for the audit log.
pub(super) struct Changed {
    pub(super) answer: Answer,
    pub(super) effects: Vec<String>,
}
