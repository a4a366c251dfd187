//! From a plan to what runs: first all that can fail and be undone, then all that cannot fail.

use super::model::Model;
use super::{Plan, Reloader, RunningListener, State, VolumeStep, live_of, other_size};
use crate::ctl::PlanReport;
use crate::data_key::DataKey;
use crate::failure::Failure;
use crate::open::Populate;
use crate::protocol::by_name;
use crate::protocol::policy::{ListenerAddress, Policy, PolicyListener};
use crate::serve::flush;
use crate::serve::identity::warn_of_twins;
use crate::serve::listen::{self, BoundPlace};
use crate::serve::setup::Setup;
use blockmux_engine::sessions::{SessionInfo, WITHDRAWN};
use blockmux_proto::exports::{Export, Removed};
use blockmux_proto::volume_state::VolumeState;
use blockmux_volume::Resize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// What is ready to be served.
struct Prepared {
    /// Places in the order of the config: those that stay, and those that are new.
    places: Vec<Place>,
    opened: BTreeMap<String, (Export, Arc<VolumeState>)>,
    policy: Policy,
}

enum Place {
    /// As it is, with what it may serve now.
    Stays(ListenerAddress, PolicyListener),
    New(Box<BoundPlace>),
}

/// A volume that has another size, and the one that it had.
struct Resized {
    served: Arc<VolumeState>,
    before: u64,
}

impl Reloader {
    /// Applies a setup. If anything is wrong, nothing has changed.
    ///
    /// # Errors
    /// What is wrong, and what to do.
    pub(super) fn apply(
        &self,
        state: &mut State,
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

    /// Does everything that can fail. What was done is undone by dropping it if something fails.
    fn prepare(
        &self,
        state: &State,
        setup: &Setup,
        desired: &Model,
        plan: &Plan,
    ) -> Result<Prepared, Failure> {
        let failure = |what: String| Failure::request(what);
        let mut places = Vec::new();
        for (asked, listener) in self.places(state, setup).map_err(failure)? {
            let is_there = state.listeners.iter().any(|own| {
                own.listener.protocol.name == listener.protocol.name && own.listener.place == listener.place
            });
            places.push(if is_there {
                Place::Stays(asked, listener)
            } else {
                Place::New(Box::new(self.bind(state, setup, listener)?))
            });
        }
        let listeners = places.iter().map(|place| match place {
            Place::Stays(_, listener) => listener.clone(),
            Place::New(bound) => bound.listener.clone(),
        });
        let policy = setup.policy.clone().at(listeners.collect(), setup.has_api()).map_err(failure)?;
        let opening = setup.opening();
        for (id, export) in self.exports.iter() {
            let stays = desired.volume(&export.name);
            let is_new = plan.steps.iter().any(|(name, step)| {
                *name == export.name && matches!(step, VolumeStep::Replace | VolumeStep::Remove)
            });
            if let Some(named) = stays.filter(|_| !is_new) {
                let info = self.exports.served(id).map(|served| served.volume().info());
                info.map_or(Ok(()), |info| opening.check_blocks(&named.entry.spec, &info))?;
            }
        }
        let mut opened = BTreeMap::new();
        for (name, step) in &plan.steps {
            let is_opened = matches!(step, VolumeStep::Add | VolumeStep::Replace);
            let Some(named) = desired.volume(name).filter(|_| is_opened) else { continue };
            let volume = opening.open(named, Populate::Behind).map_err(|error| {
                let advice = match step {
                    VolumeStep::Replace => {
                        "; to open the same data in another way, remove the volume, reload, and add it again"
                    }
                    _ => "",
                };
                failure(format!("volume `{name}`: spec: {error}{advice}"))
            })?;
            opened.insert(name.clone(), volume);
        }
        for named in &desired.volumes {
            policy.set_data(&named.name, DataKey::local_texts(&named.entry.spec));
        }
        for named in &desired.volumes {
            policy.check_twins(&named.name, |_| false).map_err(failure)?;
        }
        self.resize(state, desired, plan).map_err(failure)?;
        Ok(Prepared { places, opened, policy })
    }

    /// Listens at a place where nobody of this daemon does.
    fn bind(&self, state: &State, setup: &Setup, listener: PolicyListener) -> Result<BoundPlace, Failure> {
        if matches!(listener.place, ListenerAddress::Interface(_)) {
            // It is served from the next start on.
            return Ok(BoundPlace { asked: listener.place.clone(), listener, socket: None });
        }
        let is_in_the_way = |own: &&RunningListener| {
            let tcp = own.listener.place.tcp().zip(listener.place.tcp());
            tcp.is_some_and(|(own, new)| {
                own.port() == new.port() && (own.ip().is_unspecified() || new.ip().is_unspecified())
            })
        };
        let own = state.listeners.iter().find(is_in_the_way).map(|own| own.listener.place.to_string());
        let place = listener.place.to_string();
        listen::bind(listener, setup.congestion.as_ref(), &mut self.inherited()).map_err(|error| match own {
            Some(own) => Failure::request(format!(
                "cannot listen on {place} while this daemon listens on {own}; take that one away, reload, then add this"
            )),
            None => error,
        })
    }

    /// Resizes volumes; if one cannot be resized, those before it have their size again.
    fn resize(&self, state: &State, desired: &Model, plan: &Plan) -> Result<(), String> {
        let mut resized: Vec<Resized> = Vec::new();
        for (name, _) in plan.steps.iter().filter(|(_, step)| *step == VolumeStep::Resize) {
            let specs = state.running.volume(name).zip(desired.volume(name));
            let size = specs.and_then(|(before, after)| other_size(&before.entry.spec, &after.entry.spec));
            let served = self.exports.find(name).and_then(|(id, _)| self.exports.served(id));
            let Some((size, served)) = size.zip(served) else { continue };
            let before = served.volume().info().size;
            match served.resize(Resize::Bytes(size)) {
                Ok(_) => resized.push(Resized { served, before }),
                Err(error) => {
                    for Resized { served, before } in resized {
                        // It had that size a moment ago.
                        let _ = served.resize(Resize::Bytes(before));
                    }
                    return Err(format!("volume `{name}`: {error}"));
                }
            }
        }
        Ok(())
    }

    /// Does what cannot fail; answers with what went wrong nevertheless, such as a flush.
    #[expect(clippy::too_many_lines, reason = "the order of the steps is what matters")]
    fn commit(
        &self,
        state: &mut State,
        setup: Setup,
        desired: &Model,
        plan: &Plan,
        prepared: Prepared,
    ) -> PlanReport {
        let Prepared { places, mut opened, policy } = prepared;
        let mut warnings = Vec::new();
        let mut lives = self.lives();
        let before: Vec<_> = lives.iter().map(|(protocol, _)| protocol.name).collect();
        self.policy.replace(&policy);
        self.frontends.set(setup.frontends.clone());
        self.opening.set(Arc::new(setup.opening()));
        // Nobody new comes by a listener that goes, or to a target that goes.
        let stay: BTreeSet<_> = places
            .iter()
            .filter_map(|place| match place {
                Place::Stays(_, listener) => Some((listener.protocol.name, listener.place.to_string())),
                Place::New(_) => None,
            })
            .collect();
        let is_kept = |own: &RunningListener| {
            stay.contains(&(own.listener.protocol.name, own.listener.place.to_string()))
        };
        let (kept, gone): (Vec<_>, Vec<_>) =
            std::mem::take(&mut state.listeners).into_iter().partition(is_kept);
        for own in &gone {
            own.end.end();
            self.parts.forget(own.listener.protocol, &own.listener.place.to_string());
        }
        let follow = |lives: &[(_, Box<dyn crate::protocol::frontend::Live>)]| {
            for (protocol, frontend) in setup.frontends.iter() {
                let places = self.policy.places_of(protocol);
                if let Some(live) = live_of(lives, protocol) {
                    live.follow(frontend, &self.service(&places));
                }
            }
        };
        for place in &places {
            if let Place::Stays(_, listener) = place {
                self.parts.set_networks(listener.protocol, &listener.place.to_string(), &listener.networks);
            }
        }
        follow(&lives);
        // Sessions that may not go on have time to end.
        let gone: BTreeSet<String> = gone.iter().map(|own| own.listener.place.to_string()).collect();
        let replaced: BTreeSet<&str> = plan
            .steps
            .iter()
            .filter(|(_, step)| matches!(step, VolumeStep::Replace | VolumeStep::Remove))
            .map(|(name, _)| name.as_str())
            .collect();
        let must_go = |session: &SessionInfo| {
            let live = by_name(session.login.protocol).and_then(|protocol| live_of(&lives, protocol));
            gone.contains(&session.listener)
                || !self.policy.admits(&session.listener, session.peer_ip())
                || session.login.initiator.is_empty() && replaced.contains(session.login.target.as_str())
                || live.is_some_and(|live| !live.keeps(session))
        };
        let draining = self.parts.sessions().drain(WITHDRAWN, must_go);
        self.cores.wake_all();
        wait(DRAIN, || draining.left().is_empty());
        let late = draining.left();
        if !late.is_empty() {
            draining.cut();
            self.cores.wake_all();
            warnings.extend(late.iter().map(|session| {
                let (peer, target) = (&session.peer, &session.login.target);
                format!(
                    "{peer} did not end its session with {target} within {} s and was cut off",
                    DRAIN.as_secs()
                )
            }));
        }
        lives.iter().for_each(|(_, live)| live.settle());
        // Volumes go, then others come.
        let mut removed = Vec::new();
        for name in &replaced {
            let Some((id, _)) = self.exports.find(name) else { continue };
            lives.iter().for_each(|(_, live)| live.remove(id));
            removed.extend(self.exports.remove(name));
        }
        warnings.extend(end_of(&removed));
        for named in &desired.volumes {
            let Some((export, served)) = opened.remove(&named.name) else { continue };
            if self.exports.add(export, served).is_none() {
                warnings
                    .push(format!("volume `{}`: there are too many volumes; restart the daemon", named.name));
            }
        }
        for (name, _) in plan.steps.iter().filter(|(_, step)| *step == VolumeStep::Describe) {
            let found = self.exports.find(name).zip(desired.volume(name));
            if let Some(((id, _), named)) = found {
                self.exports.describe(id, &named.entry.description);
            }
        }
        let uuids: Vec<_> = self
            .exports
            .iter()
            .map(|(id, export)| (export, self.exports.served(id).and_then(|served| served.uuid())))
            .collect();
        warn_of_twins(uuids.iter().map(|(export, uuid)| (&*export.name, *uuid)));
        if let Err(failure) = self.begin_protocols(&mut lives) {
            warnings.push(failure.to_string());
        }
        follow(&lives);
        self.parts.set_most(setup.max_connections);
        self.parts.set_timeouts(setup.login_timeout, setup.idle_timeout);
        // Last, so that who connects finds everything.
        let mut kept = kept.into_iter().map(|own| (own.listener.place.to_string(), own)).collect::<Vec<_>>();
        for place in places {
            match place {
                Place::Stays(asked, listener) => {
                    let text = listener.place.to_string();
                    let at = kept.iter().position(|(own, running)| {
                        *own == text && running.listener.protocol.name == listener.protocol.name
                    });
                    if let Some(at) = at {
                        let (_, own) = kept.swap_remove(at);
                        state.listeners.push(RunningListener { asked, listener, end: own.end });
                    }
                }
                Place::New(bound) => {
                    let BoundPlace { asked, listener, socket } = *bound;
                    match self.accept(&lives, &listener, socket) {
                        Ok(end) => state.listeners.push(RunningListener { asked, listener, end }),
                        Err(failure) => warnings.push(failure.to_string()),
                    }
                }
            }
        }
        debug_assert!(before.iter().all(|name| lives.iter().any(|(own, _)| own.name == *name)));
        state.running = desired.kept_back(&state.running, plan);
        PlanReport { warnings, ..PlanReport::default() }
    }
}

/// Waits until what was in flight on removed volumes is over, and flushes them; answers what went
/// wrong.
fn end_of(removed: &[Removed]) -> Vec<String> {
    let settling: Vec<_> = removed.iter().map(|removed| removed.served.settling()).collect();
    wait(DRAIN, || settling.iter().all(|settling| settling.is_over()));
    let late = removed.iter().zip(&settling).filter(|(_, settling)| !settling.is_over());
    let mut wrong: Vec<String> = late
        .map(|(removed, _)| {
            let (name, seconds) = (&removed.export.name, DRAIN.as_secs());
            format!("{name}: what was in flight when it was removed is not over after {seconds} s")
        })
        .collect();
    let exports: Vec<_> = removed.iter().map(|removed| removed.export.clone()).collect();
    wrong.extend(flush::each(&exports).err().map(|failure| failure.to_string()));
    wrong
}

fn wait(most: Duration, is_over: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_over() && begun.elapsed() < most {
        thread::park_timeout(Duration::from_millis(1));
    }
}

/// How long sessions that may not go on, and I/O on volumes that go, have to end.
const DRAIN: Duration = Duration::from_secs(10);
