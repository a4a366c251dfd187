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
}

/// Finds the volume of a name; `None` if the daemon has none. May wait.
pub type FindVolume = Arc<dyn Fn(&str) -> Option<Box<dyn MemberVolume>> + Send + Sync>;

/// The volumes of a group over those of a daemon.
pub struct TurnVolumes {
    find: FindVolume,
    /// By which the volumes' images are opened.
    client: Arc<MemberClient>,
    turn: Option<Arc<Turn>>,
    /// Threads that have not ended.
    running: Arc<AtomicUsize>,
}

/// The time of one client.
struct Turn {
    is_over: AtomicBool,
    reports: VolumeReports,
    /// Those that were ever to become active, by name.
    volumes: Mutex<BTreeMap<String, TurnVolume>>,
    /// Called when the cluster refuses the client.
    _on_blocklisted: Arc<OnBlocklisted>,
}

struct TurnVolume {
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

    /// Does something for a volume on a thread of its own.
    ///
    /// # Errors
    /// If there is no thread for it.
    fn spawn(&self, run: impl FnOnce(&Turn) + Send + 'static) -> Result<(), String> {
        let Some(turn) = self.turn.clone() else { return Ok(()) };
        let running = Running(self.running.clone());
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
}

impl GroupVolumes for TurnVolumes {
    fn begin(&mut self, cluster: &Arc<Cluster>, reports: VolumeReports) {
        let fenced = reports.clone();
        let on_blocklisted: Arc<OnBlocklisted> = Arc::new(move || fenced.client_fenced());
        let turn = Arc::new(Turn {
            is_over: AtomicBool::new(false),
            reports,
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
        let Activation { volume, epoch, .. } = activation.clone();
        let find = self.find.clone();
        if let Err(why) = self.spawn(move |turn| turn.activate(&find, &activation))
            && let Some(turn) = &self.turn
        {
            turn.reports.activation_failed(&volume, epoch, &why);
        }
    }

    fn deactivate(&mut self, volume: &str, epoch: Epoch) {
        let (find, name) = (self.find.clone(), volume.to_owned());
        if let Some(turn) = &self.turn
            && let Some(own) = turn.volumes().get_mut(volume)
        {
            own.active = None;
        }
        if let Err(why) = self.spawn(move |turn| turn.deactivate(&find, &name, epoch))
            && let Some(turn) = &self.turn
        {
            turn.renounce(&format!("volume '{volume}' cannot become standby: {why}"));
        }
    }

    fn end_io(&mut self) {
        let Some(turn) = self.turn.take() else { return };
        turn.is_over.store(true, Ordering::SeqCst);
        for volume in turn.volumes().values() {
            if let Some(state) = volume.state.upgrade() {
                state.abandon();
            }
        }
        // Elsewhere, because its last user disconnects, which may block.
        let client = self.client.take();
        let _ = thread::Builder::new().name("group close".to_owned()).spawn(move || drop(client));
    }
}

impl Turn {
    fn volumes(&self) -> MutexGuard<'_, BTreeMap<String, TurnVolume>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
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

    fn activate(&self, find: &FindVolume, Activation { volume, image, epoch }: &Activation) {
        let failed = |why: &str| self.reports.activation_failed(volume, *epoch, why);
        let Some(found) = find(volume) else {
            return failed("this gateway does not have it; add it to its config");
        };
        if found.image() != image {
            let own = found.image();
            return failed(&format!("this gateway has another image, {own}, and the group has {image}"));
        }
        let state = Arc::downgrade(found.state());
        self.volumes().insert(volume.clone(), TurnVolume { state, active: None });
        // Who ends the turn ends what has begun: it begins only if the turn is not over.
        match found.activate(&|| self.check()) {
            Ok(TurnChange::Nothing) => {
                // By whom its image was opened is unknown.
                found.state().abandon();
                failed("it was active without the group");
            }
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

    fn deactivate(&self, find: &FindVolume, volume: &str, epoch: Epoch) {
        // One that was removed from the config is closed, which releases it.
        while let Some(found) = find(volume) {
            let Err(error) = found.deactivate(&|| self.check()) else { break };
            match found.state().serving() {
                ServingState::Standby if error.may_own() => {
                    return self.renounce(&format!("volume '{volume}': {error}"));
                }
                ServingState::Standby => break,
                ServingState::Active | ServingState::Transitioning => {}
            }
            if self.check().is_err() {
                return;
            }
            warn!("group: volume '{volume}' does not become standby yet: {error}");
            thread::park_timeout(RETRY);
        }
        info!("`{volume}` is standby");
        self.reports.deactivated(volume, epoch);
    }

    /// Looks for volumes that are active no longer without having been asked, until it is over.
    fn watch(&self) {
        while self.check().is_ok() {
            let mut volumes = self.volumes();
            for (name, volume) in volumes.iter_mut() {
                let is_active = |state: Arc<VolumeState>| state.serving() == ServingState::Active;
                if !volume.state.upgrade().is_some_and(is_active)
                    && let Some(epoch) = volume.active.take()
                {
                    let why = "another client has taken its image, or it was removed from the config";
                    self.reports.lost(name, epoch, why);
                }
            }
            drop(volumes);
            thread::park_timeout(LOOK_EVERY);
        }
    }
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
