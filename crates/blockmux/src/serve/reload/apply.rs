//! Executes a plan: first the steps that can fail, which are undone after an error, then the steps
//! that cannot fail.

use super::model::Model;
use super::{Plan, ReloadState, Reloader, RunningListener, VolumeStep, live_of, other_size};
use crate::ctl::PlanReport;
use crate::data_layers;
use crate::failure::Failure;
use crate::open::Populate;
use crate::protocol::by_name;
use crate::protocol::policy::{ListenerAddress, Policy, PolicyListener};
use crate::serve::access::plain_warning;
use crate::serve::flush;
use crate::serve::identity::{served_data, warn_of_same_data};
use crate::serve::listen::{self, BoundListener};
use crate::serve::setup::Setup;
use blockmux_engine::sessions::{NOT_IN_CONFIG, SessionInfo};
use blockmux_proto::exports::{Export, Removed};
use blockmux_proto::volume_state::VolumeState;
use blockmux_volume::{Beyond, Resize, ResizeError, Volume, VolumeLimits};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// The result of the steps that can fail. Dropping it undoes them.
struct Prepared {
    /// Listeners in the order of the config.
    places: Vec<PreparedListener>,
    opened: BTreeMap<String, (Export, Arc<VolumeState>)>,
    policy: Policy,
}

enum PreparedListener {
    /// A listener that exists already, with its configured address and its new policy.
    Stays(ListenerAddress, PolicyListener),
    New(Box<BoundListener>),
}

/// A volume that was resized, and its previous size in bytes.
struct ResizedVolume {
    volume_state: Arc<VolumeState>,
    before: u64,
}

impl Reloader {
    /// Applies a setup. After an error nothing has changed.
    ///
    /// # Errors
    /// If the setup cannot be applied; the message says what to do.
    pub(super) fn apply(
        &self,
        state: &mut ReloadState,
        setup: Setup,
        desired: &Model,
    ) -> Result<PlanReport, String> {
        let plan = self.plan(state, &setup, desired);
        let prepared = self.prepare(state, &setup, desired, &plan);
        let prepared = prepared.map_err(|failure| setup.located(failure).to_string())?;
        let mut report = PlanReport { applied: true, ..self.commit(state, setup, desired, &plan, prepared) };
        report.changes = plan.report.changes;
        report.next_start = plan.report.next_start;
        Ok(report)
    }

    /// Executes the steps that can fail. After an error, those that were done are undone.
    fn prepare(
        &self,
        state: &ReloadState,
        setup: &Setup,
        desired: &Model,
        plan: &Plan,
    ) -> Result<Prepared, Failure> {
        let failure = |what: String| Failure::request(what);
        plan.steps.iter().try_for_each(|(name, step)| self.check_kept(name, *step)).map_err(failure)?;
        let mut places = Vec::new();
        for (asked, listener) in self.places(state, setup).map_err(failure)? {
            let is_there = state.listeners.iter().any(|own| {
                own.listener.protocol.name == listener.protocol.name && own.listener.place == listener.place
            });
            places.push(if is_there {
                PreparedListener::Stays(asked, listener)
            } else {
                PreparedListener::New(Box::new(self.bind(state, setup, listener)?))
            });
        }
        let listeners = places.iter().map(|place| match place {
            PreparedListener::Stays(_, listener) => listener.clone(),
            PreparedListener::New(bound) => bound.listener.clone(),
        });
        let policy = setup.policy.clone().at(listeners.collect(), setup.has_api()).map_err(failure)?;
        let opener = setup.opener();
        for (id, export) in self.exports.iter() {
            let stays = desired.volume(&export.name);
            let is_new = plan.steps.iter().any(|(name, step)| {
                *name == export.name && matches!(step, VolumeStep::Replace | VolumeStep::Remove)
            });
            if let Some(named) = stays.filter(|_| !is_new) {
                let info = self.exports.volume_state(id).map(|state| state.volume().info());
                info.map_or(Ok(()), |info| opener.check_blocks(named, &info))?;
            }
        }
        let mut opened = BTreeMap::new();
        for (name, step) in &plan.steps {
            let is_opened = matches!(step, VolumeStep::Add | VolumeStep::Replace);
            let Some(named) = desired.volume(name).filter(|_| is_opened) else { continue };
            let volume = opener.open(named, Populate::Behind).map_err(|error| {
                let advice = match step {
                    VolumeStep::Replace => {
                        "; to open the same data with other options, remove the volume, reload, and add it again"
                    }
                    _ => "",
                };
                failure(format!("volume `{name}`: spec: {error}{advice}"))
            })?;
            opened.insert(name.clone(), volume);
        }
        for named in &desired.volumes {
            policy.set_data(&named.name, data_layers::of_spec(&named.entry.spec));
        }
        for named in &desired.volumes {
            policy.check_same_data(&named.name, |_| false).map_err(failure)?;
        }
        self.resize(state, desired, plan).map_err(failure)?;
        Ok(Prepared { places, opened, policy })
    }

    /// Binds a listener at an address at which this daemon does not listen yet.
    fn bind(
        &self,
        state: &ReloadState,
        setup: &Setup,
        listener: PolicyListener,
    ) -> Result<BoundListener, Failure> {
        if matches!(listener.place, ListenerAddress::Interface(_)) {
            // Network interfaces take effect at the next start.
            return Ok(BoundListener { asked: listener.place.clone(), listener, socket: None });
        }
        let conflicts = |own: &&RunningListener| {
            let tcp = own.listener.place.tcp().zip(listener.place.tcp());
            tcp.is_some_and(|(own, new)| {
                own.port() == new.port() && (own.ip().is_unspecified() || new.ip().is_unspecified())
            })
        };
        let own = state.listeners.iter().find(conflicts).map(|own| own.listener.place.to_string());
        let place = listener.place.to_string();
        listen::bind(listener, setup.congestion.as_ref(), &mut self.inherited()).map_err(|error| match own {
            Some(own) => Failure::request(format!(
                "cannot listen on {place} while this daemon listens on {own}; remove that listener, reload, then add this one"
            )),
            None => error,
        })
    }

    /// Checks that a step loses no data that a user has not given up by a command of its own.
    fn check_kept(&self, name: &str, step: VolumeStep) -> Result<(), String> {
        if let VolumeStep::Shrink { now, size } = step {
            return Err(format!("volume `{name}`: {}", ResizeError::WouldLose { now, size }));
        }
        let served = self.exports.find(name).and_then(|(id, _)| self.exports.volume_state(id));
        match served.filter(|_| matches!(step, VolumeStep::Remove | VolumeStep::Replace)) {
            Some(served) => check_not_deleted(name, &**served.volume()),
            None => Ok(()),
        }
    }

    /// Resizes volumes. If one cannot be resized, the others get their previous size back. No data
    /// is lost by that: the files stay as long as they are.
    fn resize(&self, state: &ReloadState, desired: &Model, plan: &Plan) -> Result<(), String> {
        let mut resized: Vec<ResizedVolume> = Vec::new();
        for (name, _) in plan.steps.iter().filter(|(_, step)| *step == VolumeStep::Resize) {
            let specs = state.running.volume(name).zip(desired.volume(name));
            let size = specs.and_then(|(before, after)| other_size(&before.entry.spec, &after.entry.spec));
            let volume_state = self.exports.find(name).and_then(|(id, _)| self.exports.volume_state(id));
            let Some((size, volume_state)) = size.zip(volume_state) else { continue };
            let before = volume_state.volume().info().size;
            match volume_state.resize(Resize::grow(size)) {
                Ok(_) => resized.push(ResizedVolume { volume_state, before }),
                Err(error) => {
                    for ResizedVolume { volume_state, before } in resized {
                        // The volume had this size before.
                        let _ = volume_state.resize(Resize::Bytes { size: before, beyond: Beyond::Keep });
                    }
                    return Err(format!("volume `{name}`: {error}"));
                }
            }
        }
        Ok(())
    }

    /// Executes the steps that cannot fail. Failures that remain possible, such as that of a flush,
    /// become warnings of the report.
    #[expect(clippy::too_many_lines, reason = "the order of the steps is what matters")]
    fn commit(
        &self,
        state: &mut ReloadState,
        setup: Setup,
        desired: &Model,
        plan: &Plan,
        prepared: Prepared,
    ) -> PlanReport {
        let Prepared { places, mut opened, policy } = prepared;
        let mut warnings = Vec::new();
        let mut live_protocols = self.live_protocols();
        let before: Vec<_> = live_protocols.iter().map(|(protocol, _)| protocol.name).collect();
        self.policy.replace(&policy);
        self.frontends.set(setup.frontends.clone());
        self.opener.set(Arc::new(setup.opener()));
        if let Some((own, new)) = self.api_credentials.as_ref().zip(setup.api_credentials.as_ref()) {
            if own.borrow().tls.is_some() {
                warnings.extend(setup.api.as_ref().and_then(|listener| plain_warning(listener, new)));
            }
            // Connections of clients that were checked with other credentials end.
            own.send_if_modified(|own| {
                let is_renewed = *own != *new;
                own.clone_from(new);
                is_renewed
            });
        }
        // From here on, removed listeners and targets accept no connections.
        let stay: BTreeSet<_> = places
            .iter()
            .filter_map(|place| match place {
                PreparedListener::Stays(_, listener) => {
                    Some((listener.protocol.name, listener.place.to_string()))
                }
                PreparedListener::New(_) => None,
            })
            .collect();
        let is_kept = |own: &RunningListener| {
            stay.contains(&(own.listener.protocol.name, own.listener.place.to_string()))
        };
        let (kept, gone): (Vec<_>, Vec<_>) =
            std::mem::take(&mut state.listeners).into_iter().partition(is_kept);
        for own in &gone {
            own.end.end();
            self.connection_limits.remove_listener(own.listener.protocol, &own.listener.place.to_string());
        }
        let reconfigure = |live_protocols: &[(_, Box<dyn crate::protocol::frontend::LiveFrontend>)]| {
            for (protocol, frontend) in setup.frontends.iter() {
                let places = self.policy.places_of(protocol);
                if let Some(live) = live_of(live_protocols, protocol) {
                    live.reconfigure(frontend, &self.service(&places));
                }
            }
        };
        for place in &places {
            if let PreparedListener::Stays(_, listener) = place {
                self.connection_limits.set_networks(
                    listener.protocol,
                    &listener.place.to_string(),
                    &listener.networks,
                );
            }
        }
        reconfigure(&live_protocols);
        for (id, export) in self.exports.iter() {
            let limits = desired.volume(&export.name).map(|named| named.entry.volume_limits());
            let limiter = self.exports.volume_state(id).map(|own| own.limiter().clone());
            if let Some((limits, limiter)) = limits.zip(limiter) {
                limiter.set_limits(limits);
            }
        }
        // Dropping the removed listeners closes their sockets.
        let gone: BTreeSet<String> = gone.into_iter().map(|own| own.listener.place.to_string()).collect();
        let replaced: BTreeSet<&str> = plan
            .steps
            .iter()
            .filter(|(_, step)| matches!(step, VolumeStep::Replace | VolumeStep::Remove))
            .map(|(name, _)| name.as_str())
            .collect();
        let must_go = |session: &SessionInfo| {
            let live =
                by_name(session.login.protocol).and_then(|protocol| live_of(&live_protocols, protocol));
            gone.contains(&session.listener)
                || !self.policy.admits(&session.listener, session.peer_ip())
                || session.login.initiator.is_empty() && replaced.contains(session.login.target.as_str())
                || live.is_some_and(|live| !live.may_continue(session))
        };
        let draining = self.connection_limits.sessions().drain(NOT_IN_CONFIG, must_go);
        self.cores.wake_all();
        wait(DRAIN_TIMEOUT, || draining.left().is_empty());
        let late = draining.left();
        if !late.is_empty() {
            draining.close();
            self.cores.wake_all();
            warnings.extend(late.iter().map(|session| {
                let (peer, target) = (&session.peer, &session.login.target);
                format!(
                    "{peer} did not end its session with {target} within {} s and was disconnected",
                    DRAIN_TIMEOUT.as_secs()
                )
            }));
        }
        live_protocols.iter().for_each(|(_, live)| live.disconnect_remaining());
        // Removes volumes, then adds the new ones.
        let found = replaced.iter().filter_map(|name| Some((name, self.exports.find(name)?.0)));
        let leaving: Vec<_> = found.collect();
        let volume_states = leaving.iter().filter_map(|(_, id)| self.exports.volume_state(*id));
        self.lift_limits(&volume_states.collect::<Vec<_>>());
        let mut removed = Vec::new();
        for (name, id) in leaving {
            live_protocols.iter().for_each(|(_, live)| live.remove(id));
            removed.extend(self.exports.remove(name));
        }
        warnings.extend(finish_removal(&removed));
        for named in &desired.volumes {
            let Some((export, volume_state)) = opened.remove(&named.name) else { continue };
            if self.exports.add(export, volume_state).is_none() {
                warnings.push(format!("volume `{}`: too many volumes; restart the daemon", named.name));
            }
        }
        for (name, _) in plan.steps.iter().filter(|(_, step)| *step == VolumeStep::Describe) {
            let found = self.exports.find(name).zip(desired.volume(name));
            if let Some(((id, _), named)) = found {
                self.exports.describe(id, &named.entry.description);
            }
        }
        let all: Vec<_> = self.exports.iter().collect();
        warn_of_same_data(&served_data(&all, &self.exports, &self.policy), |_| true);
        if let Err(failure) = self.begin_protocols(&mut live_protocols) {
            warnings.push(failure.to_string());
        }
        reconfigure(&live_protocols);
        self.connection_limits.set_max(setup.max_connections);
        self.connection_limits.set_timeouts(setup.login_timeout, setup.idle_timeout);
        // New listeners come last, so that their clients find all volumes.
        let mut kept = kept.into_iter().map(|own| (own.listener.place.to_string(), own)).collect::<Vec<_>>();
        for place in places {
            match place {
                PreparedListener::Stays(asked, listener) => {
                    let text = listener.place.to_string();
                    let at = kept.iter().position(|(own, running)| {
                        *own == text && running.listener.protocol.name == listener.protocol.name
                    });
                    if let Some(at) = at {
                        let (_, own) = kept.swap_remove(at);
                        state.listeners.push(RunningListener { asked, listener, ..own });
                    }
                }
                PreparedListener::New(bound) => {
                    let BoundListener { asked, listener, socket } = *bound;
                    match self.accept(&live_protocols, asked, listener, socket) {
                        Ok(running) => state.listeners.push(running),
                        Err(failure) => warnings.push(failure.to_string()),
                    }
                }
            }
        }
        debug_assert!(before.iter().all(|name| live_protocols.iter().any(|(own, _)| own.name == *name)));
        state.running = desired.without_pending(&state.running, plan);
        PlanReport { warnings, ..PlanReport::default() }
    }

    /// Lifts the limits of volumes that are about to be removed, and waits until what they held
    /// back has started: it would be refused afterwards.
    pub(in crate::serve) fn lift_limits(&self, volumes: &[Arc<VolumeState>]) {
        let lift = |volume: &&Arc<VolumeState>| volume.limiter().set_limits(VolumeLimits::default());
        if volumes.iter().filter(lift).count() > 0 {
            self.cores.wake_all();
        }
        wait(LIFT_TIMEOUT, || volumes.iter().all(|volume| volume.traffic().held == 0));
    }
}

/// Checks that no file of a volume was deleted: the data of such a file is lost when the volume is
/// closed.
///
/// # Errors
/// Names the file and what to do.
pub(in crate::serve) fn check_not_deleted(name: &str, volume: &dyn Volume) -> Result<(), String> {
    match volume.deleted_file() {
        Some(path) => Err(format!(
            "volume `{name}`: {} was deleted while it is served, and its data is lost when the volume is closed; copy \
             the volume from this daemon with 'blockmux copy' if the data is needed, then stop the daemon",
            path.display()
        )),
        None => Ok(()),
    }
}

/// Waits for I/O in flight on removed volumes and flushes them; returns warnings.
fn finish_removal(removed: &[Removed]) -> Vec<String> {
    let settling: Vec<_> = removed.iter().map(|removed| removed.volume_state.settling()).collect();
    wait(DRAIN_TIMEOUT, || settling.iter().all(|settling| settling.is_over()));
    let late = removed.iter().zip(&settling).filter(|(_, settling)| !settling.is_over());
    let mut wrong: Vec<String> = late
        .map(|(removed, _)| {
            let (name, seconds) = (&removed.export.name, DRAIN_TIMEOUT.as_secs());
            format!("{name}: I/O that was in flight when it was removed has not ended after {seconds} s")
        })
        .collect();
    let exports: Vec<_> = removed.iter().map(|removed| removed.export.clone()).collect();
    wrong.extend(flush::each(&exports).err().map(|failure| failure.to_string()));
    wrong
}

/// Waits until `is_over` is true, at most for `timeout`.
fn wait(timeout: Duration, is_over: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_over() && begun.elapsed() < timeout {
        thread::park_timeout(Duration::from_millis(1));
    }
}

/// Time for requests to start that limits held back.
const LIFT_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for sessions that are no longer allowed, and for I/O on removed volumes.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
