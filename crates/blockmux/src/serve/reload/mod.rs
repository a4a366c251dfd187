//! One declarative config, applied to a daemon that runs.
//!
//! The config is read and checked as at a start. Its difference from what runs is a plan
//! ([`plan`]). Everything that can fail comes first: volumes are opened, listeners bound, volumes
//! resized. If one of these fails, the others are undone and nothing has changed. What follows
//! cannot fail: each protocol follows its part of the config, sessions that may not go on drain,
//! volumes go and come. See docs/decisions/0057-one-config-applied-live.md.

mod apply;
mod fragment;
mod model;
mod plan;
mod record;
mod save;

use self::model::Model;
use self::plan::{Change, Schema, VolumeStep, diff, report, volume_steps, waits_for_start};
use super::ServeArgs;
use super::control::Parts;
use super::inherited::InheritedListeners;
use super::listen::{self, BoundPlace};
use super::opening::Opening;
use super::setup::Setup;
use crate::ctl::PlanReport;
use crate::failure::Failure;
use crate::protocol::frontend::{Live, LiveProtocol, Service};
use crate::protocol::policy::{ListenerAddress, Policy, PolicyListener};
use crate::protocol::{Frontends, Protocol, Units};
use blockmux_engine::cores::Cores;
use blockmux_engine::listener::{ListenerEnd, ListenerTask};
use blockmux_engine::socket::Listener;
use blockmux_proto::exports::Exports;
use blockmux_volume::Spec;
use blockmux_volume::spec::{FileSpec, MemSpec};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use tempfile::TempDir;
use tracing::{info, warn};

/// A value that is replaced as a whole; a clone is another handle to it.
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

    /// The value as it is now.
    pub(super) fn get(&self) -> Arc<T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, value: Arc<T>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = value;
    }
}

/// What runs, and the config that it follows.
pub(super) struct Reloader {
    /// The command line.
    args: ServeArgs,
    /// Listeners of the service manager, which are served after each reload as at the start.
    inherited: Mutex<InheritedListeners>,
    pub(super) exports: Exports,
    pub(super) policy: Policy,
    pub(super) parts: Arc<Parts>,
    pub(super) lives: Arc<Mutex<Vec<LiveProtocol>>>,
    pub(super) frontends: Current<Frontends>,
    pub(super) opening: Current<Opening>,
    units: Arc<Units>,
    cores: Arc<Cores>,
    /// The core of the next listener.
    next_core: AtomicUsize,
    /// Where sockets are that nobody asked for.
    private: Option<TempDir>,
    state: Mutex<State>,
}

/// What is compared with the next config.
struct State {
    running: Model,
    /// The config file as it was last loaded.
    loaded: Model,
    listeners: Vec<RunningListener>,
}

/// A listener that accepts, or an interface that is served.
struct RunningListener {
    /// The place as it was asked for: its port may be 0.
    asked: ListenerAddress,
    listener: PolicyListener,
    end: ListenerEnd,
}

impl Reloader {
    /// Begins to serve what a setup says at places that are bound.
    pub(super) fn start(
        (args, inherited): (ServeArgs, InheritedListeners),
        setup: &Setup,
        exports: &Exports,
        parts: &Arc<Parts>,
        cores: Cores,
        (bound, private): (Vec<BoundPlace>, Option<TempDir>),
    ) -> Result<Reloader, Failure> {
        let running = Model::of(setup);
        let state = State { loaded: running.clone(), running, listeners: Vec::new() };
        let reloader = Reloader {
            args,
            inherited: Mutex::new(inherited),
            exports: exports.clone(),
            policy: setup.policy.clone(),
            parts: parts.clone(),
            lives: Arc::default(),
            frontends: Current::new(setup.frontends.clone()),
            opening: Current::new(Arc::new(setup.opening())),
            units: Units::new(exports),
            cores: Arc::new(cores),
            next_core: AtomicUsize::new(0),
            private,
            state: Mutex::new(state),
        };
        {
            let mut lives = reloader.lives();
            reloader.begin_protocols(&mut lives)?;
            let mut state = reloader.state();
            for BoundPlace { asked, listener, socket } in bound {
                let end = reloader.accept(&lives, &listener, socket)?;
                state.listeners.push(RunningListener { asked, listener, end });
            }
        }
        Ok(reloader)
    }

    /// The cores, once nothing else uses them.
    pub(super) fn into_cores(self) -> Option<Cores> {
        Arc::into_inner(self.cores)
    }

    /// The cores that serve.
    pub(super) fn cores(&self) -> &Cores {
        &self.cores
    }

    /// Begins to serve each protocol that has places and was not served before.
    fn begin_protocols(&self, lives: &mut Vec<LiveProtocol>) -> Result<(), Failure> {
        for (protocol, frontend) in self.frontends.get().iter() {
            let places = self.policy.places_of(protocol);
            if places.is_empty() || lives.iter().any(|(own, _)| own.name == protocol.name) {
                continue;
            }
            let live = frontend.serve(&self.service(&places))?;
            lives.extend(live.map(|live| (protocol, live)));
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
            sessions: self.parts.sessions(),
        }
    }

    /// Accepts connections at a place that is bound; an interface is served already.
    fn accept(
        &self,
        lives: &[LiveProtocol],
        listener: &PolicyListener,
        socket: Option<Listener>,
    ) -> Result<ListenerEnd, Failure> {
        let end = ListenerEnd::default();
        let Some((socket, live)) = socket.zip(live_of(lives, listener.protocol)) else { return Ok(end) };
        let limit = self.parts.limit_of(listener.protocol, &listener.place.to_string());
        limit.listener().set_networks(listener.networks.clone());
        let (serve, inboxes, asked) = (live.serve(&listener.place), self.cores.inboxes(), end.clone());
        let nth = self.next_core.fetch_add(1, Ordering::Relaxed) % self.cores.count();
        let begin = move |core: &std::rc::Rc<_>| {
            ListenerTask::spawn_until(core, (socket, asked), inboxes, serve, limit);
        };
        self.cores.ask(nth, begin).ok_or_else(|| Failure::run("a core has ended; start again with -v"))?;
        Ok(end)
    }

    fn lives(&self) -> MutexGuard<'_, Vec<LiveProtocol>> {
        self.lives.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inherited(&self) -> MutexGuard<'_, InheritedListeners> {
        self.inherited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is a config file that can be loaded again.
    pub(super) fn has_file(&self) -> bool {
        self.args.config.is_some()
    }

    /// Loads the config file again and applies it. If anything is wrong, nothing has changed.
    ///
    /// # Errors
    /// What is wrong, where, and what to do.
    pub(super) fn reload(&self) -> Result<PlanReport, String> {
        let setup = self.read_file()?;
        let mut state = self.state();
        let loaded = Model::of(&setup);
        let report = self.apply(&mut state, setup, &loaded)?;
        state.loaded = loaded;
        Ok(report)
    }

    /// What [`Reloader::reload`] would do, and the sessions that it would affect.
    ///
    /// # Errors
    /// As for [`Reloader::reload`], as far as that is known without opening anything.
    pub(super) fn diff(&self) -> Result<PlanReport, String> {
        let mut setup = self.read_file()?;
        let state = self.state();
        let places = self.places(&state, &setup)?;
        let places = places.into_iter().map(|(_, listener)| listener).collect();
        setup.settle_policy(places).map_err(|failure| failure.to_string())?;
        let plan = self.plan(&state, &setup, &Model::of(&setup));
        Ok(plan.report)
    }

    /// What runs, as a config file.
    pub(super) fn export(&self) -> String {
        self.state().running.text()
    }

    /// What the config file says now.
    fn read_file(&self) -> Result<Setup, String> {
        if !self.has_file() {
            return Err(
                "the daemon has no config file; start it with --config, or use 'ctl apply'".to_owned()
            );
        }
        Setup::gather(self.args.again(), &self.inherited()).map_err(|failure| failure.to_string())
    }

    /// Where a setup listens: as it asks for it, and as it is where that is known.
    fn places(&self, state: &State, setup: &Setup) -> Result<Vec<(ListenerAddress, PolicyListener)>, String> {
        let wanted = listen::places(setup, self.private.as_ref());
        let wanted = wanted.map_err(|failure| setup.located(failure).to_string())?;
        let mut taken = Vec::new();
        let place = |wanted: PolicyListener| {
            let same = state.listeners.iter().enumerate().find(|(at, own)| {
                let (protocol, asked) = (own.listener.protocol.name, &own.asked);
                protocol == wanted.protocol.name && *asked == wanted.place && !taken.contains(at)
            });
            let asked = wanted.place.clone();
            match same {
                Some((at, own)) => {
                    taken.push(at);
                    (asked, PolicyListener { place: own.listener.place.clone(), ..wanted })
                }
                None => (asked, wanted),
            }
        };
        Ok(wanted.into_iter().map(place).collect())
    }

    fn plan(&self, state: &State, setup: &Setup, desired: &Model) -> Plan {
        let schema = Schema::new(&setup.frontends);
        let changes = diff(&schema, &state.running.table, &desired.table);
        let is_resize = |name: &str| {
            let [before, after] = [&state.running, desired].map(|model| model.volume(name));
            before
                .zip(after)
                .is_some_and(|(before, after)| other_size(&before.entry.spec, &after.entry.spec).is_some())
        };
        let mut steps = volume_steps(&changes, is_resize);
        // A password does not show.
        for after in &desired.volumes {
            let before = state.running.volume(&after.name);
            let is_hidden = before.is_some_and(|before| before.entry.spec != after.entry.spec)
                && !steps.iter().any(|(name, _)| *name == after.name);
            if is_hidden {
                steps.push((after.name.clone(), VolumeStep::Replace));
            }
        }
        let lives = self.lives();
        let targets_of = |volume: &str| {
            let id = self.exports.find(volume).map(|(id, _)| id);
            let all =
                id.into_iter().flat_map(|id| lives.iter().flat_map(move |(_, live)| live.targets_of(id)));
            all.map(|access| access.target).collect()
        };
        let sessions = self.parts.sessions().list();
        let report = report(&schema, &changes, &steps, &sessions, targets_of);
        Plan { schema, changes, steps, report }
    }
}

/// A difference, and what follows from it.
struct Plan {
    schema: Schema,
    changes: Vec<Change>,
    steps: Vec<(String, VolumeStep)>,
    report: PlanReport,
}

impl Plan {
    /// Whether a change waits for the next start.
    fn waits(&self, change: &Change) -> bool {
        self.schema.is_fixed(change) || waits_for_start(change, &self.steps)
    }
}

/// What serves a protocol.
fn live_of<'a>(lives: &'a [LiveProtocol], protocol: &Protocol) -> Option<&'a dyn Live> {
    lives.iter().find(|(own, _)| own.name == protocol.served_as()).map(|(_, live)| &**live)
}

/// The size that a volume is to have, if its spec says another one and nothing else.
fn other_size(before: &Spec, after: &Spec) -> Option<u64> {
    match (before, after) {
        (Spec::Mem(before), Spec::Mem(after)) => {
            let same = MemSpec { size: after.size, ..*before } == *after;
            (same && before.size != after.size).then_some(after.size)
        }
        (Spec::File(before), Spec::File(after)) => {
            let same = FileSpec { size: after.size, ..before.clone() } == *after;
            after.size.filter(|_| same && before.size != after.size)
        }
        _ => None,
    }
}

/// Says in the log what a reload at a signal has done.
pub(super) fn log(outcome: &Result<PlanReport, String>) {
    match outcome {
        Err(reason) => warn!("the config was not reloaded, nothing has changed: {reason}"),
        Ok(report) if report.is_empty() => info!("the config was reloaded; nothing is different"),
        Ok(report) => {
            for change in &report.changes {
                info!("reloaded: {}", change.change);
                change.affected.iter().for_each(|who| warn!("reloaded: {}: affected {who}", change.change));
            }
            report.next_start.iter().for_each(|line| warn!("takes effect at the next start: {line}"));
            report.warnings.iter().for_each(|line| warn!("{line}"));
        }
    }
}
