//! Applies a config to a running daemon.
//!
//! The config is read and validated as at a start. Its difference from the running config is a plan
//! ([`plan`]). Steps that can fail come first: opening volumes, binding listeners, resizing
//! volumes. If one fails, the others are undone and nothing has changed. The remaining steps cannot
//! fail: each protocol applies its part of the config, sessions that are no longer allowed drain,
//! volumes are removed and added. See docs/decisions/0057-reload-applies-the-config-live.md.
//!
//! The steps that can fail may hang in a path, so they run without the lock of changes. Queries
//! read snapshots and take no lock of a change. See
//! docs/decisions/0067-queries-take-no-lock-that-a-change-holds.md.

mod apply;
pub(super) mod commands;
mod dry_run;
pub(super) mod edit;
mod edits;
pub(super) mod fragment;
#[cfg(test)]
mod generated;
mod group_closing;
pub(super) mod group_volumes;
mod json;
mod kept_work;
mod listener_conflicts;
mod model;
mod neighbours;
mod objects;
mod open_twice;
mod plan;
mod replacement;
mod resize;
mod save;
mod signal;
mod users;
mod uses;

use self::apply::check_paths;
pub(super) use self::apply::{DRAIN_TIMEOUT, wait};
use self::edits::{ChangeProgress, Edits};
use self::model::{Model, changed_disks, renamed, resize_between};
use self::plan::{
    ConfigChange, Schema, Served, VolumeStep, VolumeSteps, affected, diff, report, volume_steps,
    waits_for_start,
};
pub(super) use self::plan::{describe_session, named_sessions};
pub(super) use self::replacement::{complete_save, interrupted_save};
pub(super) use self::signal::ReloadRequests;
pub(super) use self::users::{FENCED, VolumeUsers};
use super::ServeArgs;
use super::access::{ACCESS_KEYS, RequiredCredentials};
use super::blocking_work::BlockingWork;
use super::check::{READ_TIMEOUT, look_at_volumes};
use super::config_audit::Caller;
use super::control::ConnectionLimits;
use super::disks::{DiskServer, Disks};
use super::group::GroupSlot;
use super::inherited::InheritedListeners;
use super::listen::{self, BoundListener};
use super::mdns::MdnsAnnouncer;
use super::named_lock::{LOCK_TIMEOUT, NamedGuard, NamedLock};
use super::offer::{DaemonOffer, ListenerOffer, VolumeOffer};
use super::opening::{NamedVolume, VolumeOpener};
use super::setup::{Setup, VOLUMES};
use crate::api::fragment::{ApplyOptions, Fragment, FragmentContent};
use crate::api::plan::{PlanReport, PlannedChange};
use crate::api::request::Request;
use crate::api::{ApiError, ErrorCode};
use crate::data::part::DataPart;
use crate::failure::Failure;
use crate::protocol::address::ListenerAddress;
use crate::protocol::fabric::{FabricPort, RdmaFabric};
use crate::protocol::frontend::{HandedSession, LiveFrontend, LiveProtocol, Service};
use crate::protocol::policy::{Policy, PolicyListener};
use crate::protocol::{Frontends, LogicalUnits, Protocol};
use blockmux_engine::core::cores::Cores;
use blockmux_engine::core::reactor::Inbox;
use blockmux_engine::net::host::NetworkStream;
use blockmux_engine::net::socket::{Listener, ListenerHandle};
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerEnd, ListenerTask};
use blockmux_engine::volume::rbd::MemberClient;
use blockmux_proto::exports::Exports;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tracing::warn;

/// A shared value that a reload replaces as a whole. Clones refer to the same value.
pub(super) struct Current<T>(Arc<RwLock<Arc<T>>>);

impl<T> Clone for Current<T> {
    fn clone(&self) -> Current<T> {
        Current(self.0.clone())
    }
}

impl<T> Current<T> {
    pub(super) fn new(value: Arc<T>) -> Current<T> {
        Current(Arc::new(RwLock::new(value)))
    }

    /// The current value.
    pub(super) fn get(&self) -> Arc<T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, value: Arc<T>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = value;
    }
}

/// The running state of the daemon, and the config that it was made from.
pub(super) struct Reloader {
    /// The command line.
    args: ServeArgs,
    /// Listeners that the service manager passed; every reload keeps them.
    inherited: Mutex<InheritedListeners>,
    pub(super) exports: Exports,
    pub(super) policy: Policy,
    pub(super) connection_limits: Arc<ConnectionLimits>,
    /// The protocols that are served.
    pub(super) live_protocols: Current<Vec<LiveProtocol>>,
    pub(super) frontends: Current<Frontends>,
    pub(super) opener: Current<VolumeOpener>,
    units: Arc<LogicalUnits>,
    cores: Arc<Cores>,
    /// The disks that are attached.
    pub(super) disks: Arc<Disks>,
    /// What is announced of the listeners.
    pub(super) mdns: MdnsAnnouncer,
    /// The daemon as a member of its group of gateways, while it serves.
    pub(super) group: GroupSlot,
    /// By whose client images of the group are opened.
    pub(super) member: Arc<MemberClient>,
    /// What clients of the API over TCP need; `None` if it is not served there.
    api_credentials: Option<watch::Sender<Arc<RequiredCredentials>>>,
    /// Number of the core that the next new listener or resumed session gets.
    next_core: AtomicUsize,
    /// The directory of the Unix sockets of `--run`.
    private: Option<TempDir>,
    /// Opens volumes, binds listeners and reads files for changes.
    pub(super) blocking: BlockingWork,
    /// The configs; replaced by changes only.
    config: Current<RunningConfig>,
    /// Locked by each change while it takes effect, and never while a path is opened.
    changes: Mutex<ChangeState>,
    /// Reloads run one after the other, also while they open paths.
    reloads: NamedLock,
    /// Short commands that another change has overtaken take turns.
    commands: NamedLock,
    /// Saves run one after the other.
    saves: NamedLock,
    /// Limits the queries that read the config file, which may hang.
    readings: Semaphore,
}

/// The running config and the config file, as of the last change.
#[derive(Clone)]
struct RunningConfig {
    /// The config that runs.
    running: Model,
    /// The running config with the changes that wait for the next start.
    desired: Arc<Model>,
    /// What waits for the next start, beside the changes of the config file.
    pending: Vec<PlannedChange>,
    /// The config file as it was last loaded or saved.
    loaded: Arc<Model>,
    /// `ctl` has changed the running config, and the config file does not have the changes.
    is_unsaved: bool,
    /// The listeners, each with its configured address.
    listeners: Vec<(ListenerAddress, PolicyListener)>,
    /// The places of those whose fabric has the TCP port, too.
    without_tcp: HashSet<ListenerAddress>,
}

impl RunningConfig {
    /// Whether the listener with this key and configured address listens at `place`. Without a
    /// port 0 the two are the same.
    fn is_listener(&self, key: &str, address: &str, place: &str) -> bool {
        let is_it = |(asked, own): &(ListenerAddress, PolicyListener)| {
            asked.tcp().is_some_and(|tcp| tcp.port() == 0)
                && own.protocol.key() == key
                && own.place.to_string() == place
                && asked.to_string() == address
        };
        address == place || self.listeners.iter().any(is_it)
    }
}

/// What tells listeners apart, whatever their parameters are.
fn key_of(listener: &PolicyListener) -> (&'static str, &ListenerAddress) {
    (listener.protocol.name, &listener.place)
}

/// The right to change the daemon; one change has it at a time.
pub(super) type Changing<'a> = MutexGuard<'a, ChangeState>;

/// What only changes use.
#[derive(Default)]
pub(super) struct ChangeState {
    listeners: Vec<RunningListener>,
}

/// Where a new config comes from.
#[derive(Clone)]
enum NewConfig {
    /// The config file.
    File,
    /// A fragment that is merged into the desired config.
    Fragment(Fragment, ApplyOptions),
    /// The desired config after edits.
    Edits(Edits),
    /// The desired config after a short command.
    Command(Request),
}

/// A listener that accepts connections, or a network interface that is served.
struct RunningListener {
    /// The configured address; its port may be 0.
    asked: ListenerAddress,
    listener: PolicyListener,
    end: ListenerEnd,
    /// The accepting socket; `None` for a network interface, and at a port whose fabric has the
    /// TCP port, too.
    accepting: Option<Accepting>,
    /// Ends the listener of a fabric, if there is one.
    rdma_end: Option<(&'static RdmaFabric, ListenerEnd)>,
}

/// The accepting socket of a listener.
struct Accepting {
    handle: Arc<ListenerHandle>,
    limit: ConnectionLimit,
}

impl RunningListener {
    /// Whether its fabric has the TCP port, too.
    fn is_without_tcp(&self) -> bool {
        self.accepting.is_none() && self.rdma_end.is_some()
    }

    /// Accepts no more connections over RDMA.
    fn end_rdma(&mut self) {
        self.rdma_end.take().into_iter().for_each(|(_, end)| end.end());
    }
}

impl Reloader {
    /// Starts to serve a setup on bound listeners.
    ///
    /// # Errors
    /// If a protocol cannot be served, or a core has ended.
    pub(super) fn start(
        (args, inherited): (ServeArgs, InheritedListeners),
        setup: &Setup,
        exports: &Exports,
        connection_limits: &Arc<ConnectionLimits>,
        (cores, disks): (Arc<Cores>, Arc<Disks>),
        (bound, private): (Vec<BoundListener>, Option<TempDir>),
        member: &Arc<MemberClient>,
    ) -> Result<Reloader, Failure> {
        let running = Model::of(setup);
        let loaded = Arc::new(running.clone());
        let config = RunningConfig {
            desired: loaded.clone(),
            pending: Vec::new(),
            loaded,
            running,
            is_unsaved: false,
            listeners: Vec::new(),
            without_tcp: HashSet::new(),
        };
        setup.sources.iter().for_each(replacement::remove_leftovers);
        let reloader = Reloader {
            args,
            inherited: Mutex::new(inherited),
            exports: exports.clone(),
            policy: setup.policy.clone(),
            connection_limits: connection_limits.clone(),
            live_protocols: Current::new(Arc::default()),
            frontends: Current::new(setup.frontends.clone()),
            opener: Current::new(Arc::new(setup.opener(member))),
            units: LogicalUnits::new(exports),
            cores,
            disks,
            mdns: MdnsAnnouncer::default(),
            group: GroupSlot::default(),
            member: member.clone(),
            api_credentials: None,
            next_core: AtomicUsize::new(0),
            private,
            blocking: BlockingWork::default(),
            config: Current::new(Arc::new(config.clone())),
            changes: Mutex::default(),
            reloads: NamedLock::default(),
            commands: NamedLock::default(),
            saves: NamedLock::default(),
            readings: Semaphore::new(MAX_READINGS),
        };
        reloader.begin_protocols()?;
        reloader.mdns.turn(setup.mdns);
        {
            let mut changing = reloader.begin_change();
            for BoundListener { asked, listener, socket, rdma } in bound {
                changing.listeners.push(reloader.accept(asked, listener, (socket, rdma))?);
            }
            reloader.publish(&changing, config);
        }
        Ok(reloader)
    }

    /// Sets the credentials of the API over TCP, which reloads replace.
    pub(super) fn with_api_credentials(
        self,
        api_credentials: Option<watch::Sender<Arc<RequiredCredentials>>>,
    ) -> Reloader {
        Reloader { api_credentials, ..self }
    }

    /// The cores that serve connections.
    pub(super) fn cores(&self) -> &Arc<Cores> {
        &self.cores
    }

    /// What serves disks.
    pub(super) fn disk_server(&self) -> DiskServer {
        DiskServer { cores: self.cores.clone(), exports: self.exports.clone() }
    }

    /// Waits for the right to change the daemon. While it is held, no path is opened; I/O in flight
    /// may be waited for.
    pub(super) fn begin_change(&self) -> Changing<'_> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a config the one that queries show and later changes start from.
    fn publish(&self, changing: &Changing<'_>, config: RunningConfig) {
        self.mdns.announce(changing.listeners.iter().map(|own| &own.listener));
        let listeners = changing.listeners.iter().map(|own| (own.asked.clone(), own.listener.clone()));
        let without_tcp = changing.listeners.iter().filter(|own| own.is_without_tcp());
        let without_tcp = without_tcp.map(|own| own.listener.place.clone()).collect();
        self.config.set(Arc::new(RunningConfig { listeners: listeners.collect(), without_tcp, ..config }));
        self.group.config_changed();
    }

    /// Starts each protocol that has listeners and is not served yet.
    fn begin_protocols(&self) -> Result<(), Failure> {
        for (protocol, frontend) in self.frontends.get().iter() {
            let (places, served) = (self.policy.places_of(protocol), self.live_protocols.get());
            if places.is_empty() || served.iter().any(|(own, _)| own.name == protocol.name) {
                continue;
            }
            if let Some(live) = frontend.serve(&self.service(&places))? {
                let with = served.iter().cloned().chain([(protocol, Arc::from(live))]);
                self.live_protocols.set(Arc::new(with.collect()));
            }
        }
        Ok(())
    }

    fn service<'a>(&'a self, places: &'a [ListenerAddress]) -> Service<'a> {
        Service {
            exports: &self.exports,
            units: &self.units,
            places,
            policy: &self.policy,
            cores: &self.cores,
            sessions: self.connection_limits.limit.sessions(),
        }
    }

    /// Starts to accept connections on a bound socket. Network interfaces are served by
    /// [`Reloader::begin_protocols`].
    fn accept(
        &self,
        asked: ListenerAddress,
        listener: PolicyListener,
        (socket, rdma): (Option<Listener>, Option<FabricPort>),
    ) -> Result<RunningListener, Failure> {
        let (end, served) = (ListenerEnd::default(), self.live_protocols.get());
        let Some((socket, live)) = socket.zip(live_of(&served, listener.protocol)) else {
            return Ok(RunningListener { asked, listener, end, accepting: None, rdma_end: None });
        };
        let limit = self.connection_limits.limit_of(listener.protocol, &listener.place.to_string());
        limit.listener().set_networks(listener.networks.clone());
        if rdma.as_ref().is_some_and(FabricPort::takes_tcp_port) {
            drop(socket);
            let rdma_end = rdma.and_then(|rdma| self.accept_rdma(&listener, rdma, &limit));
            return Ok(RunningListener { asked, listener, end, accepting: None, rdma_end });
        }
        let handle = socket.handle().map_err(|error| {
            Failure::run(format!("{}: {error}; raise the limit of open files", listener.place))
        })?;
        let rdma_end = rdma.and_then(|rdma| self.accept_rdma(&listener, rdma, &limit));
        let accepting = Some(Accepting { handle: Arc::new(handle), limit: limit.clone() });
        let (serve, inboxes, until) = (live.serve(&listener.place), self.cores.inboxes(), end.clone());
        // A core may hang in a system call, and the right to change the daemon is held, so nobody
        // waits.
        self.next_core().send(move |core| {
            ListenerTask::spawn_until(core, (socket, until), inboxes, serve, limit);
        });
        Ok(RunningListener { asked, listener, end, accepting, rdma_end })
    }

    /// Starts to accept connections over RDMA at a listener; returns what ends that.
    fn accept_rdma(
        &self,
        listener: &PolicyListener,
        port: FabricPort,
        limit: &ConnectionLimit,
    ) -> Option<(&'static RdmaFabric, ListenerEnd)> {
        let fabric = listener.fabric?;
        let ports = fabric.ports.as_ref()?;
        let served = self.live_protocols.get();
        let live = live_of(&served, listener.protocol)?;
        let (end, inboxes, limit) = (ListenerEnd::default(), self.cores.inboxes(), limit.over(fabric.name));
        let (until, place) = (end.clone(), listener.place.to_string());
        let accept = live.serve_rdma(&listener.place, port)?;
        self.next_core().send(move |core| {
            if let Err(error) = accept(core, until, inboxes, limit) {
                warn!("{place}: {}: {error}", ports.unserved);
            }
        });
        Some((fabric, end))
    }

    /// Starts or ends a running listener's connections over RDMA, as its new settings say; `rdma`
    /// is the port of its new fabric. One whose fabric has the TCP port keeps it, which a plan
    /// checks.
    fn settle_rdma(&self, own: &mut RunningListener, rdma: Option<FabricPort>) -> Result<(), Failure> {
        let is_served = own.rdma_end.as_ref().map(|(fabric, _)| *fabric) == own.listener.fabric;
        if is_served || own.accepting.is_none() {
            return Ok(());
        }
        own.end_rdma();
        // Without a prepared port the config has named the fabric before, but it is not served.
        let rdma = rdma.map_or_else(|| listen::bind_rdma(&own.listener), |port| Ok(Some(port)))?;
        if let (Some(rdma), Some(accepting)) = (rdma, &own.accepting) {
            own.rdma_end = self.accept_rdma(&own.listener, rdma, &accepting.limit);
        }
        Ok(())
    }

    /// The offer to a process that takes over.
    ///
    /// # Errors
    /// Says why nothing can be handed over, and what to do.
    pub(super) fn offer(&self) -> Result<DaemonOffer, String> {
        let config = self.config.get();
        let volumes = self.volume_offers(&config)?;
        let changing = self.begin_change();
        if !Arc::ptr_eq(&self.config.get(), &config) {
            return Err("the daemon's config has changed at the same time; try again".to_owned());
        }
        if config.is_unsaved {
            return Err(
                "the config file does not have the changes that 'ctl' has made; save them with 'ctl save', or drop \
                 them with 'ctl reload'"
                    .to_owned(),
            );
        }
        let over_rdma = config.listeners.iter().find_map(|(_, own)| Some((own, own.fabric?)));
        if let Some((listener, fabric)) = over_rdma {
            return Err(format!(
                "connections of {} cannot be handed over, and the listener {} accepts them; restart the daemon, or \
                 remove rdma={} before",
                fabric.title, listener.place, fabric.name
            ));
        }
        let in_ram = config.running.volumes().iter().find(|named| named.entry.spec.ram_bytes() > 0);
        if let Some(named) = in_ram {
            return Err(format!(
                "`{}` ({}) is in RAM and would lose its data; remove it from the config and reload, or restart the \
                 daemon",
                named.name, named.entry.spec
            ));
        }
        let inherited = self.inherited();
        let listeners = changing.listeners.iter().filter_map(|own| {
            let handle = own.accepting.as_ref()?.handle.clone();
            let address = own.listener.place.socket()?;
            let offer = ListenerOffer {
                kind: own.listener.protocol.name.to_owned(),
                asked: own.asked.to_string(),
                owns_file: handle.owns_file(),
                manager_name: inherited.name_of(address).map(str::to_owned),
            };
            Some((offer, handle))
        });
        let (listeners, text) = (listeners.collect(), config.running.text());
        Ok(DaemonOffer { listeners, volumes, attachments: self.disks.offer()?, text })
    }

    /// Checks that each path still leads to what is served, within the time limit of work that may
    /// hang.
    ///
    /// # Errors
    /// Names the first path and what to do.
    pub(super) fn check_paths(&self) -> Result<(), String> {
        let exports = self.exports.clone();
        self.blocking.run(PATHS, move || check_paths(&exports)).map_err(|failure| failure.to_string())?
    }

    /// The offers of all volumes, if each path still leads to what is served. Paths may hang, so no
    /// lock is held.
    fn volume_offers(&self, config: &Arc<RunningConfig>) -> Result<Vec<VolumeOffer>, String> {
        let (exports, config) = (self.exports.clone(), config.clone());
        let look = move || {
            check_paths(&exports)?;
            let offer = |named: &NamedVolume| {
                let served = exports.find(&named.name).and_then(|(id, _)| exports.volume_state(id));
                VolumeOffer {
                    name: named.name.clone(),
                    spec: named.entry.spec.to_string(),
                    data: DataPart::keys_of_spec(&named.entry.spec),
                    uuid: served.and_then(|served| served.uuid()).map(|uuid| uuid.to_string()),
                }
            };
            Ok(config.running.volumes().iter().map(offer).collect())
        };
        self.blocking.run(PATHS, look).map_err(|failure| failure.to_string())?
    }

    /// Continues a session that the daemon before this one has handed over.
    ///
    /// # Errors
    /// Says why the session cannot continue.
    pub(super) fn resume(&self, session: HandedSession) -> Result<(), String> {
        let changing = self.begin_change();
        let own = changing.listeners.iter().find(|RunningListener { listener: own, .. }| {
            own.protocol.name == session.protocol && own.place.to_string() == session.listener
        });
        let (own, accepting) = own
            .and_then(|own| Some((own, own.accepting.as_ref()?)))
            .ok_or_else(|| format!("this daemon has no listener at {}", session.listener))?;
        let served = self.live_protocols.get();
        let resume =
            live_of(&served, own.listener.protocol).and_then(|live| live.resume(&own.listener.place));
        let resume = resume.ok_or("its protocol cannot continue sessions")?;
        let stream = &session.stream;
        let hang_up = stream.hang_up();
        let permit = accepting.limit.admit(stream.peer_ip(), move || hang_up());
        let permit = permit.ok_or("too many connections; raise --max-connections")?;
        self.next_core().send(move |core| resume(core, session, permit));
        Ok(())
    }

    /// The inbox of the core that gets the next listener or session.
    fn next_core(&self) -> Inbox {
        let nth = self.next_core.fetch_add(1, Ordering::Relaxed) % self.cores.count();
        self.cores.inboxes().swap_remove(nth)
    }

    fn inherited(&self) -> MutexGuard<'_, InheritedListeners> {
        self.inherited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the daemon has a config file to reload.
    pub(super) fn has_file(&self) -> bool {
        self.args.config.is_some()
    }

    /// What still uses the volumes, because it is under way or hangs, for a message.
    pub(super) fn under_way(&self) -> Option<String> {
        let mut all = [&self.reloads, &self.commands, &self.saves].into_iter();
        all.find_map(NamedLock::current).or_else(|| match self.blocking.running() {
            // A call of the storage that was given up has its image open.
            0 => self.exports.iter().find_map(|(id, export)| {
                let is_moving = self.exports.volume_state(id).is_some_and(|own| own.is_in_transition());
                is_moving.then(|| format!("the cluster has not answered about `{}`", export.name))
            }),
            1 => Some("an operation waits for a file system or a server".to_owned()),
            count => Some(format!("{count} operations wait for file systems or servers")),
        })
    }

    /// Keeps reloads, applies and edits of objects from beginning; `what` names what keeps them.
    ///
    /// # Errors
    /// If one is under way that takes long.
    pub(super) fn lock_edits(&self, what: &str, caller: &Caller) -> Result<NamedGuard, ApiError> {
        self.reloads.lock(what, caller)
    }

    /// Waits for the lock of reloads, at most for `timeout`.
    fn lock_reloads(&self, caller: &Caller, timeout: Duration) -> Result<NamedGuard, ApiError> {
        let title = format!("a reload of {}", self.file_name());
        self.reloads.lock_within(&title, caller, timeout)
    }

    /// Loads the config file again and applies it. After an error nothing has changed.
    ///
    /// # Errors
    /// The message names the file, the line and what to do.
    pub(super) fn reload(
        self: &Arc<Reloader>,
        caller: &Caller,
        progress: &ChangeProgress<'_>,
    ) -> Result<PlanReport, ApiError> {
        let guard = self.lock_reloads(caller, LOCK_TIMEOUT)?;
        let step = guard.step.clone();
        self.apply(&NewConfig::File, (&step, Some(guard)), progress)?.finished()
    }

    /// The changes that [`Reloader::reload`] would make, and the sessions that they would affect.
    ///
    /// # Errors
    /// The errors of [`Reloader::reload`] that do not depend on opening or binding anything.
    pub(super) fn diff(self: &Arc<Reloader>) -> Result<PlanReport, ApiError> {
        let _reading = self.begin_reading()?;
        let reloader = self.clone();
        let read = move || {
            let setup = reloader.read_file()?;
            let unanswered = look_at_volumes(&setup, |_, _| None);
            Ok::<_, ApiError>((setup, unanswered))
        };
        let what = "the config file, or a file that it names";
        let (mut setup, unanswered) = self.blocking.within(READ_TIMEOUT).run(what, read)??;
        let config = self.config.get();
        self.settle_policy(&config, &mut setup).map_err(ApiError::invalid)?;
        let mut plan = self.plan(&config, &setup, &Model::of(&setup), None);
        plan.report.next_start.extend(self.waiting_volumes(&plan.steps, &setup.policy));
        plan.report.warnings.extend(unanswered.iter().map(ToString::to_string));
        let (disks, leaving) = (self.disks.clone(), plan.disks);
        let look = move || leaving.iter().filter_map(|volume| disks.check_unused(volume).err()).collect();
        let in_use: Vec<ApiError> = self.blocking.within(READ_TIMEOUT).run("the disks to detach", look)?;
        let refusals = in_use.iter().map(|error| format!("a reload is refused as long as {error}"));
        plan.report.warnings.extend(refusals);
        Ok(plan.report)
    }

    /// The desired config.
    pub(super) fn config_table(&self) -> toml::Table {
        self.config.get().desired.table.clone()
    }

    /// Begins a query that reads files: the rest of the API's threads is for others.
    ///
    /// # Errors
    /// If too many such queries are under way.
    fn begin_reading(&self) -> Result<SemaphorePermit<'_>, ApiError> {
        self.readings.try_acquire().map_err(|_| {
            let text = format!("{MAX_READINGS} requests read the config file already; try again later");
            ApiError::new(ErrorCode::Busy, text)
        })
    }

    /// The running config, as the text of a config file. During a reload it is the one before.
    pub(super) fn running_text(&self) -> String {
        self.config.get().running.text()
    }

    /// The desired config and its tag. During a reload it is the one before.
    pub(super) fn export(&self, as_json: bool) -> (FragmentContent, String) {
        let desired = self.config.get().desired.clone();
        let tag = desired.tag();
        let content = match as_json {
            true => FragmentContent::Json(desired.json()),
            false => FragmentContent::Toml(desired.text()),
        };
        (content, tag)
    }

    /// A note about the config file for the user, after changes that were applied.
    pub(super) fn note_of_applied(&self, report: &PlanReport) -> Option<String> {
        (self.has_file() && !report.is_empty()).then(|| NOT_IN_FILE.to_owned())
    }

    /// The name of the config file, for messages.
    fn file_name(&self) -> String {
        let path = self.args.config.as_ref();
        path.map_or_else(|| "the config file".to_owned(), |path| path.display().to_string())
    }

    /// Reads the config file as it is now.
    fn read_file(&self) -> Result<Setup, ApiError> {
        if !self.has_file() {
            let text = "the daemon has no config file; start it with --config, or use 'ctl apply'";
            return Err(ApiError::new(ErrorCode::Conflict, text));
        }
        // The lock is not held while files are read.
        let inherited = self.inherited().addresses();
        Setup::gather(self.args.duplicate(), &inherited).map_err(ApiError::invalid)
    }

    /// The listeners of a setup, each with its configured address. A listener that is bound already
    /// has its actual address. Network interfaces stay as they are until the next start.
    fn places(
        &self,
        config: &RunningConfig,
        setup: &Setup,
    ) -> Result<Vec<(ListenerAddress, PolicyListener)>, String> {
        let wanted = listen::places(setup, self.private.as_ref());
        let wanted = wanted.map_err(|failure| setup.located(failure).to_string())?;
        // With port 0 several listeners have the same configured address; the first one comes last.
        let mut known: HashMap<_, Vec<&PolicyListener>> = HashMap::new();
        for (asked, own) in config.listeners.iter().rev() {
            known.entry((own.protocol.name, asked.in_full())).or_default().push(own);
        }
        let place = |mut wanted: PolicyListener| {
            let asked = wanted.place.clone();
            let same = known.get_mut(&(wanted.protocol.name, asked.in_full())).and_then(Vec::pop);
            if let Some(own) = same {
                wanted.place = own.place.clone();
                wanted.keep_found(own);
            }
            (asked, wanted)
        };
        let is_socket = |place: &ListenerAddress| !matches!(place, ListenerAddress::Interface(_));
        let sockets = wanted.into_iter().filter(|wanted| is_socket(&wanted.place)).map(place);
        let interfaces = config.listeners.iter().filter(|(_, own)| !is_socket(&own.place)).cloned();
        Ok(sockets.chain(interfaces).collect())
    }

    /// Checks the access rule of a setup at the addresses of its listeners.
    fn settle_policy(&self, config: &RunningConfig, setup: &mut Setup) -> Result<(), String> {
        let places = self.places(config, setup)?.into_iter().map(|(_, listener)| listener).collect();
        setup.settle_policy(places).map_err(|failure| failure.to_string())
    }

    /// The schema for comparing the running config with a setup.
    fn schema(&self, setup: &Setup) -> Schema {
        let schema = Schema::new(&setup.frontends);
        // The address takes effect at the next start, and so do the credentials of a new one or of
        // one that is removed.
        match (&self.api_credentials, &setup.api) {
            (Some(_), Some(_)) => schema,
            _ => schema.with_fixed(&ACCESS_KEYS),
        }
    }

    /// Lists the credential files of the API that have a new content although the config says the
    /// same about them.
    fn renewed_credentials(&self, setup: &Setup, changes: &[ConfigChange]) -> Vec<PlannedChange> {
        let both = self.api_credentials.as_ref().zip(setup.api_credentials.as_ref());
        let Some((own, new)) = both else { return Vec::new() };
        if changes.iter().any(|change| ACCESS_KEYS.contains(&&*change.path[0])) {
            return Vec::new();
        }
        let line = |key: String| PlannedChange::new(&[&key], format!("~ {key}: new content"));
        new.renewed_files(&own.borrow()).into_iter().map(line).collect()
    }

    /// The difference between the running config and the one of a setup, to which `edits` may have
    /// led. The data of a volume that they remove or shorten may be lost.
    fn plan(&self, config: &RunningConfig, setup: &Setup, desired: &Model, edits: Option<&Edits>) -> Plan {
        let given_up = edits.and_then(Edits::removed_volume);
        let asked = edits.and_then(|edits| edits.resize.as_ref()).map(|asked| &*asked.volume);
        let schema = self.schema(setup);
        let changes = diff(&schema, &config.running.table, &desired.table);
        let is_resize = |name: &str| {
            let [before, after] = [&config.running, desired].map(|model| model.volume(name));
            before.zip(after).is_some_and(|(before, after)| {
                resize_between(&before.entry.spec, &after.entry.spec).is_some()
            })
        };
        let mut steps = volume_steps(&changes, is_resize);
        let by_config = |(name, step): &(&String, &mut VolumeStep)| {
            **step == VolumeStep::Resize && asked != Some(name.as_str())
        };
        for (name, step) in steps.iter_mut().filter(by_config) {
            let size = desired.volume(name).and_then(|after| after.entry.spec.size());
            let now = self.state_of(name).map(|own| own.volume().info().size);
            if let Some((now, size)) = now.zip(size).filter(|(now, size)| size < now) {
                *step = VolumeStep::Shrink { now, size };
            }
        }
        // The config need not say the size.
        if let Some(name) = asked.filter(|name| desired.volume(name).is_some()) {
            steps.entry(name.to_owned()).or_insert(VolumeStep::Resize);
        }
        // A changed password is not part of the tables.
        for after in desired.volumes() {
            let before = config.running.volume(&after.name);
            let is_hidden = before.is_some_and(|before| before.entry.spec != after.entry.spec)
                && !steps.contains_key(&after.name);
            if is_hidden {
                steps.insert(after.name.clone(), VolumeStep::Replace);
            }
        }
        let users = VolumeUsers::new(self);
        for (name, step) in steps.iter_mut().filter(|(name, _)| given_up != Some(name)) {
            if let Some(bytes) = self.needed_ram(config, name, &users).filter(|_| step.closes()) {
                *step = VolumeStep::Lose { bytes };
            }
        }
        let disks = changed_disks(&config.running, desired, &steps);
        let overlap = neighbours::mark(&mut steps, &config.running, desired);
        let open_twice = open_twice::mark(&mut steps, &config.running, desired);
        let conflicts = listener_conflicts::find(config, self.places(config, setup).unwrap_or_default());
        let served = Served {
            is_target_of: &|volume, target| users.names(volume, target),
            is_listener: &|key, address, place| config.is_listener(key, address, place),
            conflict: &|key, address| {
                let mut all = conflicts.iter();
                let own = all.find(|(new, _)| new.protocol.key() == key && new.place.to_string() == address);
                own.map(|(_, why)| why.clone())
            },
            withdraws: &|volume, listener| self.withdraws(setup, volume, listener),
        };
        let mut report = report(&schema, &changes, &steps, &users.sessions, &served);
        report.changes.extend(self.renewed_credentials(setup, &changes));
        report.next_start.extend(renamed(&config.running, desired, &steps));
        let lost = given_up.and_then(|name| Some((name, self.needed_ram(config, name, &users)?)));
        let line = |(name, bytes)| format!("volume {name}: its {bytes} bytes in RAM are lost");
        report.warnings.extend(lost.map(line));
        let hidden = users::with_hidden_losses(self, config, setup, desired);
        users::report_hidden_losses(self, &schema, &hidden, &mut report);
        let conflict = conflicts.into_iter().map(|(_, why)| why).next();
        let given_up = given_up.map(str::to_owned);
        Plan { schema, changes, steps, disks, given_up, overlap, open_twice, conflict, report }
    }

    /// Whether a setup no longer exports a volume by default at a listener that does now.
    fn withdraws(&self, setup: &Setup, volume: &str, listener: &str) -> bool {
        self.policy.serves_at(listener, volume) && !setup.policy.serves_at(listener, volume)
    }

    /// The sessions that a plan affects, as they are now.
    fn affected_by(&self, setup: &Setup, plan: &Plan) -> BTreeSet<String> {
        let (users, config) = (VolumeUsers::new(self), self.config.get());
        let served = Served {
            is_target_of: &|volume, target| users.names(volume, target),
            is_listener: &|key, address, place| config.is_listener(key, address, place),
            conflict: &|_, _| None,
            withdraws: &|volume, listener| self.withdraws(setup, volume, listener),
        };
        affected(&plan.schema, &plan.changes, &plan.steps, &users.sessions, &served)
    }

    /// Size in bytes of what a volume has in RAM, which is lost when it is closed; `None` if nobody
    /// needs it, because nobody has written to the volume or uses it.
    fn needed_ram(&self, config: &RunningConfig, name: &str, users: &VolumeUsers) -> Option<u64> {
        let bytes = config.running.volume(name)?.entry.spec.ram_bytes();
        let (id, _) = self.exports.find(name).filter(|_| bytes > 0)?;
        let is_written = self.exports.volume_state(id)?.traffic().writes > 0;
        (is_written || !users.of(name).is_empty()).then_some(bytes)
    }

    /// The sessions of the targets that are meant.
    pub(super) fn sessions_with(&self, is_meant: impl Fn(&str) -> bool) -> Vec<String> {
        let all = self.connection_limits.limit.sessions().list();
        all.iter().filter(|session| is_meant(&session.login.target)).map(describe_session).collect()
    }

    /// The new volumes that a protocol serves only after the next start.
    fn waiting_volumes(&self, steps: &VolumeSteps, policy: &Policy) -> Vec<PlannedChange> {
        let served = self.live_protocols.get();
        let opened = steps.iter().filter(|(_, step)| step.opens());
        let waits = |name: &str| {
            let waiting = served.iter().filter(|(_, live)| live.waits_for_start(policy, name));
            let line =
                |key: String| PlannedChange::new(&[VOLUMES.0, name, &key], format!("+ volume {name}: {key}"));
            waiting.map(|(protocol, _)| line(protocol.key())).collect::<Vec<_>>()
        };
        opened.flat_map(|(name, _)| waits(name)).collect()
    }
}

/// The difference between two configs, and the steps that apply it.
struct Plan {
    schema: Schema,
    changes: Vec<ConfigChange>,
    steps: VolumeSteps,
    /// The volumes whose disks, if they have any, are detached; a disk that changes is attached
    /// again.
    disks: Vec<String>,
    /// The volume whose data may be lost.
    given_up: Option<String>,
    /// Why a volume cannot grow, as far as the texts of the specs tell.
    overlap: Option<String>,
    /// Why a volume cannot be opened while another one is served.
    open_twice: Option<String>,
    /// Why a listener cannot be bound or changed while others run.
    conflict: Option<String>,
    report: PlanReport,
}

impl Plan {
    /// Whether a change takes effect only at the next start.
    fn waits(&self, change: &ConfigChange) -> bool {
        self.schema.is_fixed(change) || waits_for_start(change, &self.steps)
    }
}

/// The running frontend of a protocol.
fn live_of<'a>(live_protocols: &'a [LiveProtocol], protocol: &Protocol) -> Option<&'a dyn LiveFrontend> {
    live_protocols.iter().find(|(own, _)| own.name == protocol.served_as()).map(|(_, live)| &**live)
}

/// The note about a change that a save would write into the config file.
const NOT_IN_FILE: &str = "this change is not in the config file; 'ctl save' writes it there";
/// Names the check of paths in messages.
const PATHS: &str = "the paths of the volumes";
/// Maximum number of queries that read the config file at the same time. With the changes they take
/// fewer threads than the API has.
const MAX_READINGS: usize = 16;
