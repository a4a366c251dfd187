//! Commands to a running daemon, which its API takes.
//!
//! No core runs them. What they change goes through [`blockmux_proto::volume_state`], as whatever
//! else is shared about a volume, and what protocols have is changed by one at a time.

use super::announce::{Announcement, Asker};
use super::config::VolumeEntry;
use super::flush;
use super::identity::warn_of_twins;
use super::opening::{NamedVolume, Opening};
use super::reload::{Current, Reloader};
use super::setup::LARGEST;
use crate::api::{ApiError, ErrorCode};
use crate::ctl::{
    Answer, PopulatedStatus, ProtocolStatus, Request, ReservationStatus, SessionStatus, Status, VolumeStatus,
};
use crate::data_key::DataKey;
use crate::log::levels::{self, Levels};
use crate::networks;
use crate::open::Populate;
use crate::protocol::frontend::{Change, Live, LiveProtocol, TargetPlace};
use crate::protocol::policy::Policy;
use crate::protocol::{Frontends, Protocol, by_name};
use blockmux_engine::listener::{ConnectionLimit, ListenerState};
use blockmux_engine::reactor::CoreStats;
use blockmux_engine::sessions::{SessionInfo, Sessions};
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::networks::AllowedNetworks;
use blockmux_proto::volume_state::{
    ERROR_KINDS, OriginTraffic, ReservationSummary, VolumeLatency, VolumeState,
};
use blockmux_volume::{Resize, ResizeError};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Changes the log's levels if some are given; answers those of all areas.
fn log_levels(changed: Option<&str>) -> Result<Answer, ApiError> {
    let changed = changed.map_or(Ok(Levels::default()), str::parse).map_err(ApiError::invalid)?;
    let levels = levels::change(changed).map_err(ApiError::failed)?;
    Ok(Answer::Levels(levels.into_iter().map(|(area, level)| (area.to_owned(), level)).collect()))
}

/// The connections of each protocol, and the bound on all of them.
pub(super) struct Parts {
    limit: ConnectionLimit,
    parts: Mutex<Vec<(&'static str, ConnectionLimit)>>,
    listeners: Mutex<Vec<(&'static str, Arc<ListenerState>)>>,
    /// Seconds after which a client without requests is disconnected; 0: never.
    idle_timeout_s: AtomicU64,
}

impl Parts {
    /// No protocol yet.
    pub(super) fn new(limit: ConnectionLimit) -> Parts {
        Parts {
            limit,
            parts: Mutex::default(),
            listeners: Mutex::default(),
            idle_timeout_s: AtomicU64::new(0),
        }
    }

    /// Who is logged in, whatever the protocol.
    pub(super) fn sessions(&self) -> &Sessions {
        self.limit.sessions()
    }

    /// Changes the bound.
    pub(super) fn set_most(&self, most: usize) {
        self.limit.set_most(most);
    }

    /// Changes the time in which connections must log in, and that after which clients without
    /// requests are disconnected.
    pub(super) fn set_timeouts(&self, login: Option<Duration>, idle: Option<Duration>) {
        self.limit.set_login_timeout(login);
        self.idle_timeout_s.store(idle.map_or(0, |idle| idle.as_secs()), Ordering::Relaxed);
    }

    /// How long a client may send no request, if that is limited.
    pub(super) fn idle_timeout(&self) -> Option<Duration> {
        let seconds = self.idle_timeout_s.load(Ordering::Relaxed);
        (seconds > 0).then(|| Duration::from_secs(seconds))
    }

    /// What a new listener of a protocol asks for a share of each connection. Its counters are
    /// among those of monitoring until [`Parts::forget`].
    pub(super) fn limit_of(&self, protocol: &Protocol, address: &str) -> ConnectionLimit {
        let limit = self.limit_of_protocol(protocol).for_listener(address);
        self.listeners().push((protocol.name, limit.listener().clone()));
        limit
    }

    fn limit_of_protocol(&self, protocol: &Protocol) -> ConnectionLimit {
        let mut parts = self.all();
        if let Some((_, part)) = parts.iter().find(|(name, _)| *name == protocol.name) {
            return part.clone();
        }
        let part = self.limit.for_part(protocol.name);
        parts.push((protocol.name, part.clone()));
        part
    }

    /// Changes the networks from which a listener accepts connections.
    pub(super) fn set_networks(&self, protocol: &Protocol, address: &str, networks: &AllowedNetworks) {
        let listeners = self.listeners();
        let own = listeners.iter().filter(|(name, own)| *name == protocol.name && own.address() == address);
        own.for_each(|(_, own)| own.set_networks(networks.clone()));
    }

    /// Removes the counters of a listener that is closed.
    pub(super) fn forget(&self, protocol: &Protocol, address: &str) {
        self.listeners().retain(|(name, own)| *name != protocol.name || own.address() != address);
    }

    fn all(&self) -> MutexGuard<'_, Vec<(&'static str, ConnectionLimit)>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listeners(&self) -> MutexGuard<'_, Vec<(&'static str, Arc<ListenerState>)>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What monitoring asks for.
#[derive(Default)]
pub(super) struct Figures {
    pub(super) status: ConnectionFigures,
    pub(super) listeners: Vec<(&'static str, Arc<ListenerState>)>,
    pub(super) volumes: Vec<VolumeFigures>,
    pub(super) sessions: Vec<SessionInfo>,
    pub(super) cores: Vec<Arc<CoreStats>>,
}

/// Connections of all protocols.
#[derive(Default)]
pub(super) struct ConnectionFigures {
    pub(super) connections: usize,
    pub(super) max_connections: usize,
    pub(super) gone: usize,
}

/// A volume.
#[derive(Default)]
pub(super) struct VolumeFigures {
    pub(super) name: String,
    /// In bytes.
    pub(super) size: u64,
    pub(super) gone: usize,
    pub(super) origins: Vec<OriginTraffic>,
    pub(super) reservation: ReservationSummary,
    /// Of a RAM volume, in bytes.
    pub(super) populated: Option<u64>,
    /// Of a remote volume.
    pub(super) reconnects: Option<u64>,
}

impl VolumeFigures {
    /// Connections that use it.
    pub(super) fn users(&self) -> u64 {
        let users: u64 = self.origins.iter().map(|one| one.traffic.users).sum();
        users.saturating_sub(self.gone as u64)
    }

    /// Latencies of all users.
    pub(super) fn latency(&self) -> VolumeLatency {
        self.origins.iter().fold(VolumeLatency::default(), |sum, one| sum.plus(&one.latency))
    }

    /// Requests that were submitted and have not completed.
    pub(super) fn queue_depth(&self) -> u64 {
        self.origins.iter().map(OriginTraffic::in_flight).sum()
    }

    /// Requests that failed, in the order of `ERROR_KINDS`.
    pub(super) fn failures(&self) -> [u64; ERROR_KINDS.len()] {
        let mut sum = [0; ERROR_KINDS.len()];
        for one in &self.origins {
            sum.iter_mut().zip(one.failures).for_each(|(sum, count)| *sum += count);
        }
        sum
    }
}

/// Where commands come to.
pub(super) struct ControlServer {
    pub(super) exports: Exports,
    pub(super) parts: Arc<Parts>,
    /// What can be changed of each protocol, and of what there is.
    pub(super) lives: Arc<Mutex<Vec<LiveProtocol>>>,
    pub(super) cores: Vec<Arc<CoreStats>>,
    pub(super) opening: Current<Opening>,
    pub(super) frontends: Current<Frontends>,
    pub(super) policy: Policy,
    pub(super) reloader: Arc<Reloader>,
}

impl ControlServer {
    /// Does what is asked, and tells `progress` how far it is if it takes long.
    pub(super) fn answer(&self, request: &Request, progress: &dyn Fn(String)) -> Answer {
        let mut added = None;
        let done = match request {
            Request::Status => Ok(Answer::Status(self.status())),
            Request::Sessions => {
                let sessions = self.parts.sessions().list();
                Ok(Answer::Sessions(sessions.into_iter().map(SessionStatus::from).collect()))
            }
            Request::Resize { name, size } => self.resize(name, *size).map(|size| Answer::Resized { size }),
            Request::Add { volume, read_only, description, protocols, allow } => {
                let networks = networks::parse(allow.as_deref()).map_err(ApiError::invalid);
                networks.and_then(|networks| {
                    let entry: VolumeEntry = volume.parse().map_err(ApiError::invalid)?;
                    let read_only = *read_only || self.opening.get().read_only;
                    let (description, protocols) = (description.clone(), protocols.clone());
                    self.add(VolumeEntry { read_only, description, protocols, networks, ..entry }, &mut added)
                })
            }
            Request::Remove { name } => self.remove(name, progress).map(|()| Answer::Done),
            Request::Attach { name, target, number, ana_group } => {
                let place = TargetPlace { number: *number, ana_group: *ana_group };
                self.attach(name, target, &place).map(|number| Answer::Attached { number })
            }
            Request::Detach { target, number } => self
                .with_target(&self.lives(), target)
                .and_then(|(_, live)| live.detach(target, *number).map_err(ApiError::not_found))
                .map(|()| Answer::Done),
            Request::Log { levels } => log_levels(levels.as_deref()),
            Request::Change(change) => {
                self.change(change).map(|said| said.map_or(Answer::Done, Answer::Said))
            }
            Request::Reload => self.reloader.reload().map(Answer::Plan).map_err(ApiError::invalid),
            Request::Diff => self.reloader.diff().map(Answer::Plan).map_err(ApiError::invalid),
            Request::Export => Ok(Answer::Text(self.reloader.export())),
            Request::Apply { fragment } => {
                self.reloader.apply_fragment(fragment).map(Answer::Plan).map_err(ApiError::invalid)
            }
            Request::Save => self.reloader.save().map(Answer::Said).map_err(ApiError::from),
        };
        let answer = done.unwrap_or_else(Answer::Failed);
        match self.reloader.record(request, &answer, added) {
            Some(note) => Answer::Noted { answer: Box::new(answer), note },
            None => answer,
        }
    }

    /// Serves one more volume, which is left in `added`.
    fn add(&self, entry: VolumeEntry, added: &mut Option<NamedVolume>) -> Result<Answer, ApiError> {
        let lives = self.lives();
        let opening = self.opening.get();
        let name = entry.name.clone().unwrap_or_else(|| self.free_name());
        if self.exports.find(&name).is_some() {
            return Err(format!("a volume is called `{name}` already; take another name").into());
        }
        let named = NamedVolume { name: name.clone(), entry };
        let unheard = named.entry.protocols.iter().flatten().map(|word| word.replace('_', "-"));
        let unheard = unheard.filter(|word| {
            by_name(word).is_some() && opening.protocols.iter().all(|protocol| protocol.name != word)
        });
        let unheard = unheard.collect();
        opening.protocols.iter().try_for_each(|one| named.check_description(one))?;
        // Before anything is opened, which may make a file, and before anybody finds it.
        self.policy.add(&name, named.entry.protocols.clone())?;
        self.policy.set_networks(&name, named.entry.networks.clone());
        let opened = opening.open(&named, Populate::Behind);
        let (export, served) = opened.inspect_err(|_| self.policy.remove(&name))?;
        self.policy.set_data(&name, DataKey::local_texts(&named.entry.spec));
        let is_restricted = |name: &str| self.is_restricted(name, &lives);
        self.policy.check_twins(&name, is_restricted).inspect_err(|_| self.policy.remove(&name))?;
        let of_data = |id| self.exports.served(id)?.uuid().filter(|uuid| Some(*uuid) == served.uuid());
        if let Some((_, twin)) = self.exports.iter().find(|(id, _)| of_data(*id).is_some()) {
            warn_of_twins([&twin.name, &name].map(|name| (&**name, served.uuid())).into_iter());
        }
        let Some(id) = self.exports.add(export, served) else {
            self.policy.remove(&name);
            return Err("there are too many volumes; remove one".to_owned().into());
        };
        lives.iter().for_each(|(_, live)| live.add(id));
        info!("{name} is served");
        let urls = Announcement::new(&self.exports, &self.frontends.get(), &self.policy, Asker::Anywhere);
        let urls = urls.urls_of(&name);
        *added = Some(named);
        Ok(Answer::Added { name, urls, unheard })
    }

    /// The first name of those without one that is free.
    fn free_name(&self) -> String {
        let names = (0_u64..).map(|number| format!("disk{number}"));
        names.into_iter().find(|name| self.exports.find(name).is_none()).unwrap_or_default()
    }

    /// Serves a volume no more. What is in flight ends, and what was written is flushed.
    fn remove(&self, name: &str, progress: &dyn Fn(String)) -> Result<(), ApiError> {
        let lives = self.lives();
        let (volume, _) = self.find(name)?;
        lives.iter().for_each(|(_, live)| live.remove(volume));
        let removed = self.exports.remove(name).ok_or_else(|| ApiError::not_found("it is gone already"))?;
        self.policy.remove(name);
        // Whoever changes something else need not wait for what is in flight here.
        drop(lives);
        let (settling, begun) = (removed.served.settling(), Instant::now());
        if !settling.is_over() {
            progress("waits for I/O in flight".to_owned());
        }
        while !settling.is_over() && begun.elapsed() < SETTLE {
            thread::park_timeout(Duration::from_millis(1));
        }
        if !settling.is_over() {
            let timeout = SETTLE.as_secs();
            warn!("{name}: what was in flight when it was removed is not over after {timeout} s");
        }
        info!("{name} is not served any more");
        progress("flushes what was written".to_owned());
        flush::each(&[removed.export])
            .map_err(|failure| ApiError::failed(format!("{name} is removed, but {failure}")))
    }

    fn attach(&self, name: &str, target: &str, place: &TargetPlace) -> Result<u32, ApiError> {
        let (volume, _) = self.find(name)?;
        let lives = self.lives();
        let (protocol, live) = self.with_target(&lives, target)?;
        let others: Vec<_> = lives
            .iter()
            .flat_map(|(own, live)| live.targets_of(volume).into_iter().map(|access| (own.name, access)))
            .collect();
        if let Some(new) = live.access_of(target) {
            self.policy.check_attach(name, (protocol.name, &new), &others)?;
            let is_restricted = |own: &str| own == name && !new.is_open || self.is_restricted(own, &lives);
            self.policy.check_twins(name, is_restricted)?;
        }
        Ok(live.attach(target, volume, place)?)
    }

    /// The protocol that has a target of that name.
    fn with_target<'a>(
        &self,
        lives: &'a [LiveProtocol],
        target: &str,
    ) -> Result<(&'static Protocol, &'a dyn Live), ApiError> {
        let found = lives.iter().find(|(_, live)| live.access_of(target).is_some());
        found.map(|(protocol, live)| (*protocol, &**live)).ok_or_else(|| {
            let of_volumes = self
                .exports
                .iter()
                .flat_map(|(volume, _)| lives.iter().flat_map(move |(_, live)| live.targets_of(volume)));
            let known: BTreeSet<_> = of_volumes.map(|access| access.target).collect();
            let shown: Vec<_> = known.iter().take(SHOWN_TARGETS).map(String::as_str).collect();
            let more = if known.len() > shown.len() { ", ..." } else { "" };
            ApiError::not_found(match shown.join(", ") {
                none if none.is_empty() => format!("no target or subsystem `{target}`; there is none"),
                shown => format!("no target or subsystem `{target}`; there are {shown}{more}"),
            })
        })
    }

    /// Whether a target that has the volume now does not let everybody use it.
    fn is_restricted(&self, name: &str, lives: &[LiveProtocol]) -> bool {
        let Some((volume, _)) = self.exports.find(name) else { return false };
        lives.iter().any(|(_, live)| live.targets_of(volume).iter().any(|access| !access.is_open))
    }

    /// Does what only the protocol of a target knows.
    fn change(&self, Change { protocol, target, what }: &Change) -> Result<Option<String>, ApiError> {
        let lives = self.lives();
        let (own, live) = self.with_target(&lives, target)?;
        if own.name != protocol {
            let text = format!("{target}: is served by {}, which has no such command", own.title);
            return Err(ApiError::invalid(text));
        }
        Ok(live.change(target, what)?)
    }

    fn lives(&self) -> MutexGuard<'_, Vec<LiveProtocol>> {
        self.lives.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, name: &str) -> Result<(VolumeId, Arc<VolumeState>), ApiError> {
        let found = self.exports.find(name).and_then(|(id, _)| Some((id, self.exports.served(id)?)));
        found.ok_or_else(|| {
            let names: Vec<_> = self.exports.iter().map(|(_, export)| export.name.clone()).collect();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            ApiError::not_found(format!("no volume is called `{name}`; there is {names}"))
        })
    }

    fn resize(&self, name: &str, size: Option<u64>) -> Result<u64, ApiError> {
        let (_, served) = self.find(name)?;
        if size.is_some_and(|size| size > LARGEST) {
            let text = format!("{name}: clients count to 2^63 - 1 bytes; take a smaller size");
            return Err(ApiError::invalid(text));
        }
        let size = served.resize(size.map_or(Resize::Own, Resize::Bytes)).map_err(|error| {
            let code = match error {
                ResizeError::Fixed | ResizeError::ReadOnly => ErrorCode::Conflict,
                ResizeError::BadSize { .. } | ResizeError::TooLarge { .. } => ErrorCode::Invalid,
                ResizeError::System { .. } => ErrorCode::Failed,
            };
            ApiError::new(code, format!("{name}: {error}"))
        })?;
        info!("{name} has {size} bytes now");
        Ok(size)
    }

    /// Everything that is counted.
    pub(super) fn figures(&self) -> Figures {
        let volumes = self.exports.iter().filter_map(|(id, export)| {
            let served = self.exports.served(id)?;
            let volume = served.volume();
            Some(VolumeFigures {
                name: export.name.clone(),
                size: volume.info().size,
                gone: served.orphans(),
                origins: served.traffic_by_origin(),
                reservation: served.reservation(),
                populated: volume.populated().map(|now| now.bytes),
                reconnects: volume.links().map(|links| links.reconnects),
            })
        });
        let limit = &self.parts.limit;
        Figures {
            status: ConnectionFigures {
                connections: limit.open(),
                max_connections: limit.most(),
                gone: limit.orphaned(),
            },
            listeners: self.parts.listeners().clone(),
            volumes: volumes.collect(),
            sessions: self.parts.sessions().list(),
            cores: self.cores.clone(),
        }
    }

    fn status(&self) -> Status {
        let volumes = self.exports.iter().filter_map(|(id, export)| {
            let served = self.exports.served(id)?;
            let (info, traffic, gone) = (served.volume().info(), served.traffic(), served.orphans());
            Some(VolumeStatus {
                name: export.name.clone(),
                size: info.size,
                read_only: export.read_only || info.read_only,
                allow: self.policy.networks_of(&export.name).networks().map(|own| own.to_string()).collect(),
                users: traffic.users.saturating_sub(gone as u64),
                gone,
                traffic: traffic.into(),
                reservation: Some(served.reservation())
                    .filter(|now| now.registrants > 0 || now.is_reserved)
                    .map(|now| ReservationStatus { registrants: now.registrants, reserved: now.is_reserved }),
                reconnects: served.volume().links().map(|links| links.reconnects),
                populated: served
                    .volume()
                    .populated()
                    .map(|now| PopulatedStatus { bytes: now.bytes, of: now.of }),
            })
        });
        let parts = self.parts.all();
        let protocols = parts.iter().map(|(name, part)| ProtocolStatus {
            name: (*name).to_owned(),
            connections: part.open_of_part(),
        });
        Status {
            connections: self.parts.limit.open(),
            max_connections: self.parts.limit.most(),
            gone: self.parts.limit.orphaned(),
            protocols: protocols.collect(),
            volumes: volumes.collect(),
        }
    }
}

/// Names of targets in a message.
const SHOWN_TARGETS: usize = 8;
/// How long what is in flight on a volume may take to end when it is removed.
const SETTLE: Duration = Duration::from_secs(10);
