//! Volumes that become active and standby ([`crate::volume::turns`]), as a group needs them.
//!
//! ```text
//!   group's thread ──activate, deactivate──▶ one thread each ──▶ MemberVolume ──▶ storage
//!         │ end_io                               ▲ asks whether its turn is over
//!         └──────▶ Turn of the present client ───┘◀── a thread that looks for lost volumes
//! ```
//! One epoch of the group is one time for which a volume is active here. Its own epochs, by which
//! it fences sessions, begin and end with that.
//!
//! When the I/O of a client ends, its turn is over: the volumes become standby at once, and a call
//! that returns later makes nothing active ([`VolumeState::abandon`]). If nobody knows whether the
//! client still has a lock, its turn ends, too: the group fences it, which frees all of its locks.

use super::volumes::{Activation, GroupVolumes, VolumeReports};
use crate::volume::rbd::MemberClient;
use crate::volume::turns::{TurnChange, TurnError};
use blockmux_group::Epoch;
use blockmux_proto::volume_state::{ServingState, VolumeState};
use blockmux_rbd::cluster::{Cluster, OnBlocklisted};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;
use tracing::{info, warn};

/// A volume of this daemon that its group hands out. The calls are for a thread that may wait, for
/// minutes at most.
pub trait MemberVolume {
    /// What the volume is, in the words of the group's table.
    fn image(&self) -> &str;

    /// Its state.
    fn state(&self) -> &Arc<VolumeState>;

    /// Makes it active, as [`activate`](crate::volume::turns::activate) does, without taking it
    /// from anybody. `begin` is called before the storage is asked.
    ///
    /// # Errors
    /// If it does not become active.
    fn activate(&self, begin: &dyn Fn() -> Result<(), String>) -> Result<TurnChange, TurnError<String>>;

    /// Makes it standby, as [`deactivate`](crate::volume::turns::deactivate) does. `begin` is
    /// called before the volume refuses I/O.
    ///
    /// # Errors
    /// If it does not become standby.
    fn deactivate(&self, begin: &dyn Fn() -> Result<(), String>) -> Result<TurnChange, TurnError<String>>;

    /// Asks the sessions to end that the volume fences for good, and closes what is left of them
    /// after some seconds. Does not keep the volume meanwhile.
    fn end_fenced(self: Box<Self>);
}

/// Finds the volume of a name; `None` if the daemon has none. May wait.
pub type FindVolume = Arc<dyn Fn(&str) -> Option<Box<dyn MemberVolume>> + Send + Sync>;

/// The volumes of a group over those of a daemon.
pub struct TurnVolumes {
    find: FindVolume,
    /// By which the volumes' images are opened.
    client: Arc<MemberClient>,
    turn: Option<Arc<Turn>>,
    /// Threads that have not ended, of all turns.
    running: Arc<AtomicUsize>,
}

/// The time of one client.
struct Turn {
    is_over: AtomicBool,
    reports: VolumeReports,
    find: FindVolume,
    running: Arc<AtomicUsize>,
    /// Those that were ever to become active, by name.
    volumes: Mutex<BTreeMap<String, TurnVolume>>,
    /// Called when the cluster refuses the client.
    _on_blocklisted: Arc<OnBlocklisted>,
}

struct TurnVolume {
    /// That of the volume that was to become active: another one may have its name by now, with
    /// another config.
    state: Weak<VolumeState>,
    /// While it is active.
    active: Option<Epoch>,
}

impl TurnVolumes {
    /// Volumes that are found by name, and whose images are opened by the client of the group's
    /// member.
    #[must_use]
    pub fn new(find: FindVolume, client: Arc<MemberClient>) -> TurnVolumes {
        TurnVolumes { find, client, turn: None, running: Arc::default() }
    }
}

impl GroupVolumes for TurnVolumes {
    fn begin(&mut self, cluster: &Arc<Cluster>, reports: VolumeReports) {
        let fenced = reports.clone();
        let on_blocklisted: Arc<OnBlocklisted> = Arc::new(move || fenced.client_fenced());
        let turn = Arc::new(Turn {
            is_over: AtomicBool::new(false),
            reports,
            find: self.find.clone(),
            running: self.running.clone(),
            volumes: Mutex::default(),
            _on_blocklisted: on_blocklisted.clone(),
        });
        self.client.set(cluster.clone());
        self.turn = Some(turn.clone());
        cluster.on_blocklisted(&on_blocklisted);
        let watched = turn.clone();
        let watch = move || watched.watch();
        if let Err(error) = thread::Builder::new().name("group lost".to_owned()).spawn(watch) {
            turn.renounce(&format!("no thread: {error}"));
        }
    }

    fn activate(&mut self, activation: Activation) {
        let Some(turn) = &self.turn else { return };
        let Activation { volume, epoch, .. } = activation.clone();
        if let Err(why) = turn.spawn(move |turn| turn.activate(&activation)) {
            turn.reports.activation_failed(&volume, epoch, &why);
        }
    }

    fn deactivate(&mut self, volume: &str, epoch: Epoch) {
        let Some(turn) = &self.turn else { return };
        if let Some(own) = turn.volumes().get_mut(volume) {
            own.active = None;
        }
        let name = volume.to_owned();
        if let Err(why) = turn.spawn(move |turn| turn.deactivate(&name, epoch)) {
            turn.renounce(&format!("volume '{volume}' cannot become standby: {why}"));
        }
    }

    fn end_io(&mut self) {
        let Some(turn) = self.turn.take() else { return };
        turn.is_over.store(true, Ordering::SeqCst);
        let mut ended = Vec::new();
        for (name, volume) in turn.volumes().iter() {
            if volume.state.upgrade().is_some_and(|state| state.abandon()) {
                ended.push((name.clone(), volume.state.clone()));
            }
        }
        ended.into_iter().for_each(|(name, state)| turn.end_fenced(name, state));
        // Elsewhere, because its last user disconnects, which may block.
        let client = self.client.take();
        let _ = thread::Builder::new().name("group close".to_owned()).spawn(move || drop(client));
    }
}

impl Turn {
    fn volumes(&self) -> MutexGuard<'_, BTreeMap<String, TurnVolume>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something for a volume on a thread of its own.
    ///
    /// # Errors
    /// If there is no thread for it.
    fn spawn(self: &Arc<Turn>, run: impl FnOnce(&Arc<Turn>) + Send + 'static) -> Result<(), String> {
        let (turn, running) = (self.clone(), Running(self.running.clone()));
        if self.running.fetch_add(1, Ordering::SeqCst) >= MAX_THREADS {
            return Err(format!("{MAX_THREADS} earlier calls have not ended"));
        }
        let run = move || {
            run(&turn);
            drop(running);
        };
        let spawned = thread::Builder::new().name("group volume".to_owned()).spawn(run);
        spawned.map(drop).map_err(|error| format!("no thread: {error}"))
    }

    /// Has the sessions end whose epoch has ended with a volume's turn, so that their clients
    /// connect again, to another gateway or to this one.
    fn end_fenced(self: &Arc<Turn>, volume: String, state: Weak<VolumeState>) {
        let end = move |turn: &Arc<Turn>| {
            let found = (turn.find)(&volume);
            if let Some(found) = found.filter(|found| is_same(&state, found.state())) {
                found.end_fenced();
            }
        };
        // The next activation ends them otherwise.
        if let Err(why) = self.spawn(end) {
            warn!("group: sessions of a volume do not end: {why}");
        }
    }

    /// # Errors
    /// If it is over.
    fn check(&self) -> Result<(), String> {
        match self.is_over.load(Ordering::SeqCst) {
            true => Err("the group has ended the I/O of its client".to_owned()),
            false => Ok(()),
        }
    }

    /// Has the group fence the client, because nobody knows whether it has a lock.
    fn renounce(&self, why: &str) {
        if self.check().is_ok() {
            warn!("group: {why}; the group fences this client, and continues with another one");
            self.reports.client_fenced();
        }
    }

    fn activate(&self, Activation { volume, image, epoch }: &Activation) {
        let failed = |why: &str| self.reports.activation_failed(volume, *epoch, why);
        let Some(found) = (self.find)(volume) else {
            return failed("this gateway does not have it; add it to its config");
        };
        if found.image() != image {
            let own = found.image();
            return failed(&format!("this gateway has another image, {own}, and the group has {image}"));
        }
        if !self.begin(volume, found.state()) {
            return failed("what the config before had under this name is still in use");
        }
        // Who ends the turn ends what has begun: it begins only if the turn is not over.
        match found.activate(&|| self.check()) {
            // By whom its image was opened is unknown.
            Ok(TurnChange::Nothing) => match found.deactivate(&|| self.check()) {
                Ok(_) => failed("it was active without the group, and is standby now"),
                Err(error) => {
                    found.state().abandon();
                    self.renounce(&format!("volume '{volume}' was active without the group: {error}"));
                }
            },
            Ok(TurnChange::Done | TurnChange::EndsSessions) => {
                info!("`{volume}` is active");
                // Under the lock, so that it is not lost before.
                let mut volumes = self.volumes();
                if let Some(own) = volumes.get_mut(volume) {
                    own.active = Some(*epoch);
                }
                self.reports.activated(volume, *epoch);
            }
            Err(error) if error.may_own() => self.renounce(&format!("volume '{volume}': {error}")),
            Err(error) => failed(&error.to_string()),
        }
    }

    /// Notes which volume is to become active. Returns whether another one that had its name is
    /// closed: its lock is released with it, and what is in flight ends before.
    fn begin(&self, volume: &str, state: &Arc<VolumeState>) -> bool {
        let mut volumes = self.volumes();
        let before = volumes.get(volume).and_then(|own| own.state.upgrade());
        if let Some(before) = before.filter(|before| !Arc::ptr_eq(before, state)) {
            before.abandon();
            return false;
        }
        let state = Arc::downgrade(state);
        volumes.insert(volume.to_owned(), TurnVolume { state, active: None });
        true
    }

    fn deactivate(&self, volume: &str, epoch: Epoch) {
        let activated = self.volumes().get(volume).map(|own| own.state.clone());
        let mut said = String::new();
        while let Some(why) = self.step_down(volume, activated.as_ref()) {
            match why {
                NotStandby::Renounced => return,
                NotStandby::Yet(why) if said != why => {
                    warn!("group: volume '{volume}' does not become standby yet: {why}");
                    said = why;
                }
                NotStandby::Yet(_) => {}
            }
            if self.check().is_err() {
                return;
            }
            thread::park_timeout(RETRY);
        }
        info!("`{volume}` is standby");
        self.reports.deactivated(volume, epoch);
    }

    /// Makes the volume standby that was activated, of which others may have the name by now.
    /// Returns why it is not, if it is not.
    fn step_down(&self, volume: &str, activated: Option<&Weak<VolumeState>>) -> Option<NotStandby> {
        let found = (self.find)(volume);
        let Some(found) = found.filter(|found| activated.is_none_or(|own| is_same(own, found.state())))
        else {
            // One that was removed from the config is closed, which releases it.
            let state = activated.and_then(Weak::upgrade)?;
            state.abandon();
            return Some(NotStandby::Yet("it was removed from the config, and is still in use".to_owned()));
        };
        let error = found.deactivate(&|| self.check()).err()?;
        match found.state().serving() {
            ServingState::Standby if error.may_own() => {
                self.renounce(&format!("volume '{volume}': {error}"));
                Some(NotStandby::Renounced)
            }
            ServingState::Standby => None,
            ServingState::Active | ServingState::Transitioning => Some(NotStandby::Yet(error.to_string())),
        }
    }

    /// Looks for volumes that are active no longer without having been asked, until it is over.
    fn watch(self: &Arc<Turn>) {
        while self.check().is_ok() {
            let mut lost = Vec::new();
            for (name, volume) in self.volumes().iter_mut() {
                let is_active = |state: Arc<VolumeState>| state.serving() == ServingState::Active;
                if !volume.state.upgrade().is_some_and(is_active)
                    && let Some(epoch) = volume.active.take()
                {
                    let why = "another client has taken its image, or it was removed from the config";
                    self.reports.lost(name, epoch, why);
                    lost.push((name.clone(), volume.state.clone()));
                }
            }
            lost.into_iter().for_each(|(name, state)| self.end_fenced(name, state));
            thread::park_timeout(LOOK_EVERY);
        }
    }
}

/// Why a volume is not standby.
enum NotStandby {
    /// It is tried again.
    Yet(String),
    /// The group fences the client.
    Renounced,
}

fn is_same(own: &Weak<VolumeState>, found: &Arc<VolumeState>) -> bool {
    std::ptr::eq(own.as_ptr(), Arc::as_ptr(found))
}

/// Counts down when it is dropped.
struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Maximum number of threads for volumes: twice as many as a daemon should have of a group.
const MAX_THREADS: usize = 512;
/// Time after which a volume that stays active is asked again to become standby.
const RETRY: Duration = Duration::from_millis(500);
/// Time between two looks for volumes that were lost.
const LOOK_EVERY: Duration = Duration::from_millis(100);
