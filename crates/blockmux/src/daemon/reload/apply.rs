//! Executes a plan: first the steps that can fail, which are undone after an error, then the steps
//! that cannot fail.

use super::commands::edits_of;
use super::edit::edited;
use super::edits::{ChangeProgress, Edits};
use super::fragment;
use super::group_closing::keep_closed_standby;
use super::kept_work::{KeptWork, OpenedVolume};
use super::model::Model;
use super::open_twice::other_writer;
use super::plan::{named_sessions, would_lose_ram};
use super::uses::detached_volumes;
use super::{
    Changing, NewConfig, Plan, Reloader, RunningConfig, RunningListener, VolumeStep, VolumeUsers, key_of,
    live_of, users,
};
use crate::api::bodies::Attachment;
use crate::api::plan::PlanReport;
use crate::api::request::Answer;
use crate::api::{ApiError, ErrorCode};
use crate::daemon::access::plain_warning;
use crate::daemon::blocking_work::Awaited;
use crate::daemon::disks::{DetachedDisks, NewDisk, or_by_force};
use crate::daemon::identity::{served_data, warn_of_same_data};
use crate::daemon::listen::{self, BoundListener};
use crate::daemon::named_lock::{NamedGuard, WorkStep};
use crate::daemon::opening::{NamedVolume, VolumeOpener};
use crate::daemon::setup::Setup;
use crate::data::layers;
use crate::data::part::DataPart;
use crate::failure::Failure;
use crate::protocol::address::ListenerAddress;
use crate::protocol::by_name;
use crate::protocol::fabric::FabricPort;
use crate::protocol::frontend::LiveProtocol;
use crate::protocol::policy::{Policy, PolicyListener};
use crate::volume_kinds::flush;
use crate::volume_kinds::open::Populate;
use blockmux_engine::serve::sessions::{NOT_IN_CONFIG, SessionInfo};
use blockmux_proto::exports::{Export, Exports, Removed, VolumeId};
use blockmux_proto::volume_state::{Promotion, Settling, VolumeState};
use blockmux_volume::{ResizeError, Volume, VolumeLimits};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// The result of the steps that can fail. Dropping it undoes them.
struct Prepared {
    /// The edits that led to the new config, if there are any, and the answer about them.
    edits: Option<Edits>,
    answer: Answer,
    setup: Setup,
    desired: Model,
    /// Whether the config file lacks changes of it.
    is_unsaved: bool,
    plan: Plan,
    /// Listeners in the order of the config.
    places: Vec<PreparedListener>,
    kept: KeptWork,
    policy: Policy,
    detached: DetachedDisks,
}

/// What a new config has changed.
pub(super) struct Applied {
    pub(super) report: PlanReport,
    /// The answer of a short command.
    pub(super) answer: Answer,
    /// The volumes that were resized, in the words of a plan.
    pub(super) resized: Vec<String>,
    /// Whether all of its steps have succeeded: the volumes that it has removed were flushed, and
    /// those that it names are attached.
    pub(super) steps: Result<(), Failure>,
}

impl Applied {
    /// The changes, if all steps have succeeded.
    ///
    /// # Errors
    /// If a removed volume was not flushed, or a new attachment failed.
    pub(super) fn finished(self) -> Result<PlanReport, ApiError> {
        match self.steps {
            Ok(()) => Ok(self.report),
            Err(failure) => Err(ApiError::failed(format!("the change is made, but {failure}"))),
        }
    }
}

enum PreparedListener {
    /// A listener that exists already, with its configured address, its new policy, and the port of
    /// a fabric that it gets.
    Stays(ListenerAddress, PolicyListener, Option<Box<FabricPort>>),
    New(Box<BoundListener>),
}

impl Reloader {
    /// Applies a new config, under the lock that its kind of change has. After an error nothing has
    /// changed.
    ///
    /// # Errors
    /// If it cannot be applied; the message says what to do.
    pub(super) fn apply(
        self: &Arc<Reloader>,
        new: &NewConfig,
        (step, held): (&WorkStep, Option<NamedGuard>),
        progress: &ChangeProgress<'_>,
    ) -> Result<Applied, ApiError> {
        let is_command = matches!(new, NewConfig::Command(_));
        let mut kept = KeptWork::default();
        for attempt in 0..if is_command { MAX_COMMAND_ATTEMPTS } else { MAX_ATTEMPTS } {
            if is_command && attempt > 0 {
                kept.turn = self.commands.turn(step);
            }
            let (config, reloader, new) = (self.config.get(), self.clone(), new.clone());
            let (before, its_step) = (config.clone(), step.clone());
            let prepare = move |awaited: &Awaited| {
                reloader.prepare(&before, &new, kept, (awaited, &its_step)).map(|prepared| (prepared, new))
            };
            let (mut prepared, new) = self.blocking.run_change(step, prepare, drop)??;
            step.begin("waiting for other changes and for sessions to end");
            let mut changing = self.begin_change();
            // Another change may have come in between, which the plan does not know.
            if Arc::ptr_eq(&self.config.get(), &config) {
                let standby = match self.check_again(&config, &prepared) {
                    Ok(standby) => standby,
                    Err(refused) => {
                        drop(changing);
                        self.undo(prepared, step)?;
                        return Err(refused);
                    }
                };
                let detached = self.detached(&prepared.plan, prepared.edits.as_ref());
                let (answer, turn) = (prepared.answer.clone(), prepared.kept.turn.take());
                let (disks, resized) = (prepared.plan.disks.clone(), prepared.kept.resized.lines());
                let (mut report, removed) = self.commit(&mut changing, &config, prepared, &new);
                // Other commands need not wait for the I/O and the flush of removed volumes.
                drop((changing, turn, standby));
                let (late, attached) = self.attach_missing(&config.running, &disks, step);
                report.warnings.extend(late);
                drop(held);
                report.warnings.extend(wait_for_io(&detached, "detached", progress));
                let (late, flushed) = finish_removal(&removed, progress);
                report.warnings.extend(late);
                return Ok(Applied { report, answer, resized, steps: both(attached, flushed) });
            }
            drop(changing);
            kept = std::mem::take(&mut prepared.kept);
            kept.release_turn();
            self.undo(prepared, step)?;
        }
        step.begin("undoing what it has done");
        self.blocking.run(step, move || drop(kept))?;
        let text = "other commands change the daemon at the same time; try again when they are done";
        Err(ApiError::new(ErrorCode::Conflict, text))
    }

    /// Checks what clients may have changed since the preparation, which takes long if a path
    /// hangs: whether data in RAM is lost, and sessions lose what they use. Also whether the group
    /// serves a volume here that is closed; the result keeps it from doing so.
    fn check_again(&self, config: &RunningConfig, prepared: &Prepared) -> Result<Vec<Promotion>, ApiError> {
        let Prepared { setup, desired, plan, edits, .. } = prepared;
        let kept =
            self.check_memory_kept(config, plan).and_then(|()| keep_closed_standby(self, config, plan));
        let kept = kept.map_err(|what| ApiError::invalid(setup.located(Failure::request(what))))?;
        self.check_consent(config, edits.as_ref(), (setup, desired, plan))?;
        Ok(kept)
    }

    /// Checks that edits take away nothing that sessions use now, unless they may.
    fn check_consent(
        &self,
        config: &RunningConfig,
        edits: Option<&Edits>,
        (setup, desired, plan): (&Setup, &Model, &Plan),
    ) -> Result<(), ApiError> {
        let affected = || {
            let mut affected = self.affected_by(setup, plan);
            let targets = users::with_hidden_losses(self, config, setup, desired);
            affected.extend(self.sessions_with(|target| targets.contains(target)));
            affected
        };
        edits.map_or(Ok(()), |edits| edits.check_consent(affected))
    }

    /// The volumes of which a plan takes units away from targets. A discard of the old initiator
    /// must not meet the data of the next one.
    fn detached(&self, plan: &Plan, edits: Option<&Edits>) -> Vec<NamedVolumeState> {
        let mut names = detached_volumes(&plan.schema, &plan.changes);
        names.extend(edits.into_iter().flat_map(|edits| edits.detached.clone()));
        let found = names.into_iter().filter_map(|name| {
            let (id, _) = self.exports.find(&name)?;
            Some((name, self.exports.volume_state(id)?))
        });
        found.collect()
    }

    /// Undoes what was prepared: closes volumes and resizes others, which may hang.
    fn undo(&self, mut prepared: Prepared, step: &WorkStep) -> Result<(), Failure> {
        prepared.kept.release_turn();
        step.begin("closing what it has opened");
        self.blocking.run(step, move || drop(prepared))
    }

    /// Executes the steps that can fail, while they are `awaited`. After an error, those that were
    /// done are undone. They may hang in a path, so no lock is held.
    fn prepare(
        &self,
        config: &RunningConfig,
        new: &NewConfig,
        mut kept: KeptWork,
        (awaited, step): (&Awaited, &WorkStep),
    ) -> Result<Prepared, ApiError> {
        step.begin("reading the config and its files");
        let (edits, answer) = match new {
            NewConfig::Command(request) => {
                let request = self.with_own_size(request, &mut kept, step)?;
                let (edits, answer) = edits_of(self, config, &request)?;
                (Some(edits), answer)
            }
            NewConfig::Edits(edits) => (Some(edits.clone()), Answer::Done),
            NewConfig::File | NewConfig::Fragment(..) => (None, Answer::Done),
        };
        let mut setup = match (new, &edits) {
            (_, Some(edits)) => edited(self, config, edits)?,
            (NewConfig::Fragment(fragment, options), _) => fragment::merged(self, config, fragment, options)?,
            _ => self.read_file()?,
        };
        let is_file = matches!(new, NewConfig::File);
        let force = edits.as_ref().map(|edits| edits.force);
        let is_forced = force == Some(true);
        self.settle_policy(config, &mut setup).map_err(ApiError::invalid)?;
        let desired = Model::of(&setup);
        let mut plan = self.plan(config, &setup, &desired, edits.as_ref());
        let failed = |failure| ApiError::invalid(setup.located(failure));
        let refused =
            |error: ApiError| ApiError::new(error.code, setup.located(Failure::request(error.to_string())));
        step.begin("looking at the volumes that it would close");
        self.check_kept(config, &plan, &mut kept, is_forced).map_err(refused)?;
        step.begin("looking at the disks that it would detach or attach");
        if !plan.disks.is_empty() {
            kept.release_turn();
        }
        self.check_disks(config, &desired, &plan, force).map_err(refused)?;
        self.check_consent(config, edits.as_ref(), (&setup, &desired, &plan))?;
        awaited.check()?;
        let (places, policy) = self.prepare_listeners(config, &setup, is_file).map_err(failed)?;
        plan.report.next_start.extend(self.waiting_volumes(&plan.steps, &policy));
        self.open_new(config, (&setup, &desired, &plan), &mut kept, (awaited, step)).map_err(failed)?;
        self.set_data(&policy, &desired, &plan, &mut kept, step);
        policy.check_same_data().map_err(|what| failed(Failure::request(what)))?;
        let asked = edits.as_ref().and_then(|edits| edits.resize.as_ref());
        self.resize((config, &desired, &policy), (&plan, asked), &mut kept, (awaited, step))
            .map_err(refused)?;
        awaited.check()?;
        step.begin("detaching disks");
        let detached = self.disks.detach_all(&self.disk_server(), &plan.disks, is_forced);
        let detached = detached.map_err(refused)?;
        self.attach_new(config, (&desired, &plan, edits.as_ref()), &mut kept, (awaited, step))
            .map_err(refused)?;
        let is_unsaved = !is_file && !desired.is_same(&config.loaded, &plan.schema);
        Ok(Prepared { edits, answer, setup, desired, is_unsaved, plan, places, kept, policy, detached })
    }

    /// Sets what the volumes of a new config consist of.
    fn set_data(&self, policy: &Policy, desired: &Model, plan: &Plan, kept: &mut KeptWork, step: &WorkStep) {
        for named in desired.volumes() {
            // The path of a volume that stays as it is may hang.
            let stays = self.exports.find(&named.name).is_some() && !plan.steps.contains_key(&named.name);
            let parts = match kept.opened.get(&named.name) {
                Some(opened) => opened.parts.clone(),
                None if stays => self.policy.data_of(&named.name),
                None => {
                    kept.release_turn();
                    parts_of(named, step)
                }
            };
            policy.set_data(&named.name, parts);
        }
    }

    /// Checks that no disk is in use that would be detached, unless that is forced, and that this
    /// machine has the ways of new ones. `force` is absent if nobody can force it.
    fn check_disks(
        &self,
        config: &RunningConfig,
        desired: &Model,
        plan: &Plan,
        force: Option<bool>,
    ) -> Result<(), ApiError> {
        let refused = |error: ApiError| if force.is_some() { or_by_force(error) } else { error };
        let mut leaving = plan.disks.iter().filter(|_| force != Some(true));
        leaving.try_for_each(|volume| self.disks.check_unused(volume)).map_err(refused)?;
        let before = config.running.attachments();
        let new = desired.attachments().into_iter().filter(|asked| !before.contains(asked));
        new.into_iter().try_for_each(|asked| self.disks.probe(&asked)).map_err(ApiError::from)
    }

    /// Attaches the new disks of volumes that stay open. Others come last, because a disk needs its
    /// volume.
    fn attach_new(
        &self,
        config: &RunningConfig,
        (desired, plan, edits): (&Model, &Plan, Option<&Edits>),
        kept: &mut KeptWork,
        (awaited, step): (&Awaited, &WorkStep),
    ) -> Result<(), ApiError> {
        let before = config.running.attachments();
        let is_new = |asked: &Attachment| {
            let is_named =
                !before.contains(asked) || edits.is_some_and(|edits| edits.attaches(&asked.volume));
            is_named && !plan.disks.contains(&asked.volume) && self.exports.find(&asked.volume).is_some()
        };
        let new: Vec<_> = desired.attachments().into_iter().filter(is_new).collect();
        let stays = |own: &NewDisk| new.contains(&own.asked) && own.is_there();
        if !kept.attached.iter().all(stays) {
            kept.release_turn();
            kept.attached.retain(stays);
        }
        for asked in new {
            if kept.attached.iter().any(|own| own.asked == asked) {
                continue;
            }
            awaited.check()?;
            kept.release_turn();
            step.begin("attaching disks");
            kept.attached.push(self.disks.attach_new(&self.disk_server(), asked)?);
        }
        Ok(())
    }

    /// Attaches the disks of the running config that are not; returns warnings about those that
    /// were missing before, and whether those are attached that are new, or that a plan has
    /// detached. A disk needs its volume, so these come last.
    fn attach_missing(
        &self,
        before: &Model,
        detached: &[String],
        step: &WorkStep,
    ) -> (Vec<String>, Result<(), Failure>) {
        let (all, before) = (self.config.get().running.attachments(), before.attachments());
        if all.is_empty() {
            return (Vec::new(), Ok(()));
        }
        step.begin("attaching disks");
        let (disks, server) = (self.disks.clone(), self.disk_server());
        let is_missing = |asked: &Attachment| before.contains(asked) && !detached.contains(&asked.volume);
        let (missing, named): (Vec<_>, Vec<_>) = all.into_iter().partition(is_missing);
        let is_named = !named.is_empty();
        let attach = move || [missing, named].map(|all| disks.attach_missing(&server, &all));
        match self.blocking.run(step, attach) {
            Err(failure) if is_named => (Vec::new(), Err(failure)),
            Err(failure) => (vec![failure.to_string()], Ok(())),
            Ok([late, failed]) if failed.is_empty() => (late, Ok(())),
            Ok([late, failed]) => (late, Err(Failure::run(failed.join("; ")))),
        }
    }

    /// Binds new listeners; returns all, and the policy of the new config at them. Names that
    /// others advertise are looked up again if the config is that of the file.
    fn prepare_listeners(
        &self,
        config: &RunningConfig,
        setup: &Setup,
        is_file: bool,
    ) -> Result<(Vec<PreparedListener>, Policy), Failure> {
        let mut places = Vec::new();
        let known: HashMap<_, _> =
            config.listeners.iter().map(|(_, own)| (key_of(own), own.fabric)).collect();
        for (asked, mut listener) in self.places(config, setup).map_err(Failure::request)? {
            places.push(if let Some(fabric) = known.get(&key_of(&listener)).copied() {
                if is_file || !listener.is_looked_up() {
                    listener.look_up()?;
                }
                // A port that cannot be opened fails the change while the listener has its old one.
                let rdma = match fabric == listener.fabric {
                    true => None,
                    false => listen::bind_rdma(&listener)?.map(Box::new),
                };
                PreparedListener::Stays(asked, listener, rdma)
            } else {
                let inherited = self.inherited().take_for(&listener);
                let bound = listen::bind(listener, setup.congestion.as_ref(), inherited)?;
                PreparedListener::New(Box::new(bound))
            });
        }
        let listeners = places.iter().map(|place| match place {
            PreparedListener::Stays(_, listener, _) => listener.clone(),
            PreparedListener::New(bound) => bound.listener.clone(),
        });
        let policy = setup.policy.clone().at(listeners.collect(), setup.has_api());
        Ok((places, policy.map_err(Failure::request)?))
    }

    /// Opens new and replaced volumes that are not kept, and checks that every protocol supports
    /// the blocks of all.
    fn open_new(
        &self,
        config: &RunningConfig,
        (setup, desired, plan): (&Setup, &Model, &Plan),
        kept: &mut KeptWork,
        (awaited, step_now): (&Awaited, &WorkStep),
    ) -> Result<(), Failure> {
        let opener = setup.opener(&self.member);
        for (id, export) in self.exports.iter() {
            let stays = desired.volume(&export.name);
            let step = plan.steps.get(&export.name);
            let is_new = matches!(step, Some(VolumeStep::Replace | VolumeStep::Remove));
            if let Some(named) = stays.filter(|_| !is_new) {
                opener.check_sessions(named)?;
                let info = self.exports.volume_state(id).map(|state| state.volume().info());
                info.map_or(Ok(()), |info| opener.check_blocks(named, &info))?;
            }
        }
        let opens = |own: &OpenedVolume| {
            let is_opened = plan.steps.get(&own.named.name).is_some_and(|step| step.opens());
            is_opened && desired.volume(&own.named.name) == Some(&own.named)
        };
        if !kept.opened.values().all(opens) {
            // Closing may hang, too.
            kept.release_turn();
            kept.opened.retain(|_, own| opens(own));
        }
        for (name, step) in &plan.steps {
            let Some(named) = desired.volume(name).filter(|_| step.opens()) else { continue };
            if let Some(opened) = kept.opened.get(name) {
                opener.check_blocks(named, &opened.volume_state.volume().info())?;
                continue;
            }
            awaited.check()?;
            kept.release_turn();
            step_now.begin(format!("opening {} (volume `{name}`)", named.entry.spec));
            let (export, volume_state) = opener.open(named, Populate::Behind).map_err(|error| {
                step_now.begin("looking whether another volume has its file");
                if let Some(why) = other_writer(named, (&config.running, desired), &plan.steps) {
                    return Failure::request(why);
                }
                let advice = match step {
                    VolumeStep::Replace => {
                        "; to open the same data with other options, remove the volume, reload, and add it again"
                    }
                    _ => "",
                };
                Failure::request(format!("volume `{name}`: spec: {error}{advice}"))
            })?;
            let parts = parts_of(named, step_now);
            kept.opened
                .insert(name.clone(), OpenedVolume { named: named.clone(), export, volume_state, parts });
        }
        Ok(())
    }

    /// Checks that a plan opens and binds nothing twice, lets no volume grow over another one, and
    /// loses no data that a user has not given up by a command of its own.
    fn check_kept(
        &self,
        config: &RunningConfig,
        plan: &Plan,
        kept: &mut KeptWork,
        is_forced: bool,
    ) -> Result<(), ApiError> {
        self.check_memory_kept(config, plan).map_err(ApiError::invalid)?;
        drop(keep_closed_standby(self, config, plan).map_err(ApiError::invalid)?);
        let is_lost = |name: &String| is_forced && plan.given_up.as_ref() == Some(name);
        for (name, _) in plan.steps.iter().filter(|(name, step)| step.closes() && !is_lost(name)) {
            let Some((id, _)) = self.exports.find(name).filter(|(id, _)| !kept.looked_at.contains(id)) else {
                continue;
            };
            kept.release_turn();
            let served = self.exports.volume_state(id);
            served
                .map_or(Ok(()), |served| check_not_deleted(name, &**served.volume()))
                .map_err(ApiError::invalid)?;
            kept.looked_at.insert(id);
        }
        plan.conflict.as_ref().map_or(Ok(()), |why| Err(ApiError::invalid(why)))?;
        // Before anything is opened or bound. What the volumes consist of is compared when they
        // are open.
        plan.overlap.clone().map_or(Ok(()), |why| Err(ApiError::from(why)))?;
        // Comes last, because its advice is to remove the volume.
        plan.open_twice.as_ref().map_or(Ok(()), |why| Err(ApiError::invalid(why)))
    }

    /// The part of [`Reloader::check_kept`] that calls no file system.
    fn check_memory_kept(&self, config: &RunningConfig, plan: &Plan) -> Result<(), String> {
        let users = VolumeUsers::new(self);
        for (name, step) in &plan.steps {
            if plan.given_up.as_ref() == Some(name) {
                continue;
            }
            let in_ram = match *step {
                VolumeStep::Shrink { now, size } => {
                    return Err(format!("volume `{name}`: {}", ResizeError::WouldLose { now, size }));
                }
                VolumeStep::Lose { bytes } => Some(bytes),
                _ => self.needed_ram(config, name, &users).filter(|_| step.closes()),
            };
            if let Some(bytes) = in_ram {
                let users = users.of(name);
                let used_by = match users.is_empty() {
                    true => String::new(),
                    false => format!("; it is in use by {}", named_sessions(&users)),
                };
                return Err(format!("volume `{name}`: {}{used_by}", would_lose_ram(name, bytes)));
            }
        }
        Ok(())
    }

    /// Executes the steps that cannot fail. Failures that remain possible become warnings of the
    /// report. Returns the volumes that were removed, which are not flushed yet.
    #[expect(clippy::too_many_lines, reason = "the order of the steps is what matters")]
    fn commit(
        &self,
        changing: &mut Changing<'_>,
        config: &RunningConfig,
        prepared: Prepared,
        new: &NewConfig,
    ) -> (PlanReport, Vec<Removed>) {
        let Prepared {
            edits,
            setup,
            desired,
            is_unsaved,
            plan,
            places,
            kept: KeptWork { mut opened, resized, attached, .. },
            policy,
            detached,
            ..
        } = prepared;
        resized.keep();
        detached.keep();
        attached.into_iter().for_each(NewDisk::keep);
        let mut warnings = plan.report.warnings.clone();
        let live_protocols = self.live_protocols.get();
        self.policy.replace(&policy);
        self.frontends.set(setup.frontends.clone());
        // The opener asks the policy that volumes are added to.
        self.opener.set(Arc::new(VolumeOpener { policy: self.policy.clone(), ..setup.opener(&self.member) }));
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
        let stay: HashSet<_> = places
            .iter()
            .filter_map(|place| match place {
                PreparedListener::Stays(_, listener, _) => Some(key_of(listener)),
                PreparedListener::New(_) => None,
            })
            .collect();
        let is_kept = |own: &RunningListener| stay.contains(&key_of(&own.listener));
        let (mut kept, mut gone): (Vec<_>, Vec<_>) =
            std::mem::take(&mut changing.listeners).into_iter().partition(is_kept);
        let fabrics = fabrics_of(&places);
        for own in kept.iter_mut().filter(|own| own.accepting.is_some()) {
            let fabric = fabrics.get(&own.listener.place.to_string()).copied().flatten();
            if own.rdma_end.as_ref().is_some_and(|(before, _)| Some(before.name) != fabric) {
                own.end_rdma();
            }
        }
        for own in &mut gone {
            own.end.end();
            own.end_rdma();
            self.connection_limits.remove_listener(own.listener.protocol, &own.listener.place.to_string());
        }
        let reconfigure = |live_protocols: &[LiveProtocol]| {
            for (protocol, frontend) in setup.frontends.iter() {
                let places = self.policy.places_of(protocol);
                if let Some(live) = live_of(live_protocols, protocol) {
                    live.reconfigure(frontend, &self.service(&places));
                }
            }
        };
        for place in &places {
            if let PreparedListener::Stays(_, listener, _) = place {
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
                || session.fabric.is_some() && fabrics.get(&session.listener) != Some(&session.fabric)
                || !self.policy.admits(&session.listener, session.peer_ip())
                || session.login.initiator.is_empty() && replaced.contains(session.login.target.as_str())
                || live.is_some_and(|live| !live.may_continue(session))
        };
        let draining = self.connection_limits.limit.sessions().drain(NOT_IN_CONFIG, must_go);
        self.cores.wake_all();
        let is_forced = edits.is_some_and(|edits| edits.force);
        let timeout = if is_forced { FORCED_TIMEOUT } else { DRAIN_TIMEOUT };
        wait(timeout, || draining.left().is_empty());
        let late = draining.left();
        if !late.is_empty() {
            draining.close();
            self.cores.wake_all();
            warnings.extend(late.iter().map(|session| {
                let (peer, target) = (&session.peer, &session.login.target);
                format!(
                    "{peer} did not end its session with {target} within {} s and was disconnected",
                    timeout.as_secs()
                )
            }));
        }
        live_protocols.iter().for_each(|(_, live)| live.disconnect_remaining());
        // Removes volumes, then adds the new ones.
        let found = replaced.iter().filter_map(|name| Some((name, self.exports.find(name)?.0)));
        let leaving: Vec<_> = found.collect();
        let volume_states = leaving.iter().filter_map(|(_, id)| self.exports.volume_state(*id));
        self.lift_limits(&volume_states.collect::<Vec<_>>());
        let ids: BTreeSet<VolumeId> = leaving.iter().map(|(_, id)| *id).collect();
        live_protocols.iter().for_each(|(_, live)| live.remove(&ids));
        let mut removed = Vec::new();
        leaving.iter().for_each(|(name, _)| removed.extend(self.exports.remove(name)));
        self.cores.wake_all();
        if !opened.is_empty() {
            // Late I/O must not meet that of new volumes with the same data.
            settle(&removed.iter().map(|removed| removed.volume_state.clone()).collect::<Vec<_>>());
        }
        for named in desired.volumes() {
            let Some(OpenedVolume { export, volume_state, .. }) = opened.remove(&named.name) else {
                continue;
            };
            if self.exports.add(export, volume_state).is_none() {
                warnings.push(format!("volume `{}`: too many volumes; restart the daemon", named.name));
            }
        }
        // Also of volumes that are resized.
        for (id, export) in self.exports.iter() {
            let named = desired.volume(&export.name);
            if let Some(named) = named.filter(|named| named.entry.description != export.description) {
                self.exports.describe(id, &named.entry.description);
            }
        }
        let all: Vec<_> = self.exports.iter().collect();
        warn_of_same_data(&served_data(&all, &self.exports, &self.policy), |_| true);
        if let Err(failure) = self.begin_protocols() {
            warnings.push(failure.to_string());
        }
        reconfigure(&self.live_protocols.get());
        users::end_fenced_sessions(self);
        self.connection_limits.set_max(setup.max_connections);
        self.connection_limits.set_timeouts(setup.login_timeout, setup.idle_timeout);
        self.mdns.turn(setup.mdns);
        // New listeners come last, so that their clients find all volumes.
        let kept = kept.into_iter().map(|own| {
            let (protocol, place) = key_of(&own.listener);
            ((protocol, place.clone()), own)
        });
        let mut kept: HashMap<_, _> = kept.collect();
        for place in places {
            match place {
                PreparedListener::Stays(asked, listener, rdma) => {
                    let key = (listener.protocol.name, listener.place.clone());
                    if let Some(own) = kept.remove(&key) {
                        let mut own = RunningListener { asked, listener, ..own };
                        if let Err(failure) = self.settle_rdma(&mut own, rdma.map(|port| *port)) {
                            warnings.push(failure.to_string());
                        }
                        changing.listeners.push(own);
                    }
                }
                PreparedListener::New(bound) => {
                    let BoundListener { asked, listener, socket, rdma } = *bound;
                    match self.accept(asked, listener, (socket, rdma)) {
                        Ok(running) => changing.listeners.push(running),
                        Err(failure) => warnings.push(failure.to_string()),
                    }
                }
            }
        }
        let running = desired.without_pending(&config.running, &plan);
        let desired = Arc::new(desired);
        let loaded = match new {
            NewConfig::File => desired.clone(),
            NewConfig::Fragment(..) | NewConfig::Edits(_) | NewConfig::Command(_) => config.loaded.clone(),
        };
        let mut report = PlanReport { applied: true, warnings, ..plan.report };
        let pending = report.next_start.clone();
        if !matches!(new, NewConfig::File) {
            report.next_start.retain(|later| !config.pending.contains(later));
        }
        let now = RunningConfig {
            running,
            desired,
            pending,
            loaded,
            is_unsaved,
            listeners: Vec::new(),
            without_tcp: HashSet::new(),
        };
        self.publish(changing, now);
        (report, removed)
    }

    /// Lifts the limits of volumes that are about to be removed, and waits until what they held
    /// back has started: it would be refused afterwards.
    pub(in crate::daemon) fn lift_limits(&self, volumes: &[Arc<VolumeState>]) {
        let lift = |volume: &&Arc<VolumeState>| volume.limiter().set_limits(VolumeLimits::default());
        if volumes.iter().filter(lift).count() > 0 {
            self.cores.wake_all();
        }
        wait(LIFT_TIMEOUT, || volumes.iter().all(|volume| volume.traffic().throttled_now == 0));
    }
}

/// The fabrics of the listeners that stay, by their addresses.
fn fabrics_of(places: &[PreparedListener]) -> HashMap<String, Option<&'static str>> {
    let stays = places.iter().filter_map(|place| match place {
        PreparedListener::Stays(_, listener, _) => {
            Some((listener.place.to_string(), listener.fabric.map(|fabric| fabric.name)))
        }
        PreparedListener::New(_) => None,
    });
    stays.collect()
}

/// The parts of files and devices that a volume consists of; to look at their paths may hang.
fn parts_of(named: &NamedVolume, step: &WorkStep) -> Vec<DataPart> {
    step.begin(format!("looking at {} (volume `{}`)", named.entry.spec, named.name));
    layers::of_spec(&named.entry.spec)
}

/// Checks that no file of a volume was deleted: the data of such a file is lost when the volume is
/// closed.
///
/// # Errors
/// Names the file and what to do.
fn check_not_deleted(name: &str, volume: &dyn Volume) -> Result<(), String> {
    match volume.deleted_file() {
        Some(path) => Err(format!(
            "volume `{name}`: {} was deleted while it is served, and its data is lost when the volume is closed; copy \
             the volume from this daemon with 'blockmux copy' if the data is needed, then stop the daemon",
            path.display()
        )),
        None => Ok(()),
    }
}

/// Checks that each path still leads to what is served. A process that takes over opens the paths
/// anew, and would continue sessions with other data.
///
/// # Errors
/// Names the first path and what to do.
pub(super) fn check_paths(exports: &Exports) -> Result<(), String> {
    for (_, export) in exports.iter() {
        let Export { name, volume, .. } = &*export;
        check_not_deleted(name, &**volume)?;
        if let Some(path) = volume.lost_path() {
            return Err(format!(
                "volume `{name}`: {} no longer leads to what is served, and the new process would serve other data; \
                 restore the path, or restart the daemon",
                path.display()
            ));
        }
    }
    Ok(())
}

/// Waits for I/O in flight on volumes that were removed or detached; returns a warning for each
/// whose I/O has not ended in time.
fn wait_for_io(volumes: &[NamedVolumeState], what: &str, progress: &ChangeProgress<'_>) -> Vec<String> {
    let states: Vec<_> = volumes.iter().map(|(_, state)| state.clone()).collect();
    if !states.iter().all(|state| state.settling().is_over()) {
        progress("waiting for I/O in flight".to_owned());
    }
    let late = volumes.iter().zip(settle(&states)).filter(|(_, settling)| !settling.is_over());
    let warning = |((name, _), _): (&NamedVolumeState, Settling)| {
        let seconds = DRAIN_TIMEOUT.as_secs();
        format!("{name}: I/O that was in flight when it was {what} has not ended after {seconds} s")
    };
    late.map(warning).collect()
}

/// Waits for I/O in flight on volumes.
fn settle(volumes: &[Arc<VolumeState>]) -> Vec<Settling> {
    let settling: Vec<_> = volumes.iter().map(VolumeState::settling).collect();
    wait(DRAIN_TIMEOUT, || settling.iter().all(Settling::is_over));
    settling
}

/// Waits for I/O in flight on removed volumes and flushes them; returns warnings, and whether all
/// were flushed.
fn finish_removal(removed: &[Removed], progress: &ChangeProgress<'_>) -> (Vec<String>, Result<(), Failure>) {
    let states = removed.iter().map(|own| (own.export.name.clone(), own.volume_state.clone()));
    let late = wait_for_io(&states.collect::<Vec<_>>(), "removed", progress);
    let exports: Vec<_> = removed.iter().map(|removed| removed.export.clone()).collect();
    if !exports.is_empty() {
        progress("flushing".to_owned());
    }
    (late, flush::each(&exports))
}

/// The result of two steps that do not depend on each other.
fn both(one: Result<(), Failure>, other: Result<(), Failure>) -> Result<(), Failure> {
    match (one, other) {
        (Err(one), Err(other)) => Err(Failure::run(format!("{one}; {other}"))),
        (one, other) => one.and(other),
    }
}

/// A volume with its name.
type NamedVolumeState = (String, Arc<VolumeState>);

/// Waits until `is_over` is true, at most for `timeout`.
pub(in crate::daemon) fn wait(timeout: Duration, is_over: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_over() && begun.elapsed() < timeout {
        thread::park_timeout(Duration::from_millis(1));
    }
}

/// Attempts to apply a config while other changes come in between.
const MAX_ATTEMPTS: usize = 3;
/// Attempts of a short command. From the second one on, those that were overtaken take turns.
const MAX_COMMAND_ATTEMPTS: usize = 16;
/// Time for requests to start that limits held back.
const LIFT_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for sessions to end that are no longer allowed, if that is forced.
const FORCED_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for sessions that are no longer allowed, and for I/O on removed volumes.
pub(in crate::daemon) const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
