//! Owning an image: one client has its exclusive lock, and all others are refused. A daemon may get
//! and give up the ownership while it exports the image.

use super::limit::{HeldByCall, LIMIT, within};
use super::rados_state::RadosState;
use super::volume::{RbdVolume, note_blocklisted};
use blockmux_proto::volume_state::{NotAcquired, Ownership, OwnershipQuestion, StoredState, Transition};
use blockmux_rbd::cluster::OnBlocklisted;
use blockmux_rbd::error::RbdError;
use blockmux_rbd::image::Image;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;

impl RbdVolume {
    /// Owns the image until it is closed. With `take`, the client that owns it is blocklisted
    /// first; otherwise one that does not answer is waited for, until the cluster has lost it.
    /// `on_start` is called by the thread that asks for the lock.
    ///
    /// # Errors
    /// If another client owns the image, or the image has no lock.
    pub fn own(&self, take: bool, on_start: fn()) -> Result<(), RbdError> {
        self.own_during(self.image(), take, on_start, ())
    }

    /// Gives the image up again.
    ///
    /// # Errors
    /// If the cluster refuses it. Whether this client still owns the image is unknown then.
    pub fn disown(&self) -> Result<(), RbdError> {
        self.release_image(self.image(), ())
    }

    /// Gives the image up. `held` is dropped when the cluster has answered.
    fn release_image(&self, image: Arc<Image>, held: impl HeldByCall) -> Result<(), RbdError> {
        let asked = image.clone();
        let released = within(LIMIT, move || asked.release_lock(), drop, held);
        released.inspect_err(|error| note_blocklisted(image.cluster(), error))
    }

    /// Owns an image of the volume as [`RbdVolume::own`] does. If that succeeds too late, the image
    /// is released again. `held` is dropped when the cluster has answered.
    fn own_during(
        &self,
        image: Arc<Image>,
        take: bool,
        on_start: fn(),
        held: impl HeldByCall,
    ) -> Result<(), RbdError> {
        let waits = Arc::new(());
        let caller = Arc::downgrade(&waits);
        let (asked, late) = (image.clone(), image.clone());
        let call = move || {
            on_start();
            acquire(&asked, take, || caller.strong_count() > 0)
        };
        let undo = move |()| {
            warn!("an image was acquired too late, and is released again");
            if let Err(error) = late.release_lock() {
                warn!("the image is not released: {error}");
            }
        };
        within(LIMIT, call, undo, held).inspect_err(|error| note_blocklisted(image.cluster(), error))
    }
}

/// The ownership of an image, and of the reservations beside it.
pub struct RbdOwnership {
    volume: Arc<RbdVolume>,
    state: Arc<RadosState>,
    on_start: fn(),
    on_lost: OnceLock<Arc<dyn Fn() + Send + Sync>>,
    /// The image whose client is watched for being blocklisted, and what is called then.
    watched: Mutex<Option<(Arc<Image>, Arc<OnBlocklisted>)>>,
    /// One clone for each question that the cluster has not answered.
    questions: Arc<()>,
    /// When [`Ownership::recheck`] asked last.
    rechecked: Mutex<Option<Instant>>,
}

impl RbdOwnership {
    /// The ownership of an image, which this process may have. `on_start` is called by threads
    /// that call the libraries.
    #[must_use]
    pub fn new(volume: Arc<RbdVolume>, state: Arc<RadosState>, on_start: fn()) -> Arc<RbdOwnership> {
        let (on_lost, watched, questions, rechecked) = Default::default();
        Arc::new(RbdOwnership { volume, state, on_start, on_lost, watched, questions, rechecked })
    }

    /// Has `call` called, on any thread, when the cluster is found to have blocklisted the client
    /// of the image, because another one has taken it. It must not block. Only the first call
    /// counts.
    pub fn on_lost(&self, call: impl Fn() + Send + Sync + 'static) {
        // The first one stays.
        let _ = self.on_lost.set(Arc::new(call));
        self.watch();
    }

    /// Has `call` called, on a thread of its own, when the image refuses a request because this
    /// client does not have its lock. It may block; one runs at a time. Only the first call counts.
    pub fn on_refused(&self, call: impl Fn() + Send + Sync + 'static) {
        let (call, is_running, on_start) = (Arc::new(call), Arc::new(AtomicBool::new(false)), self.on_start);
        self.volume.current.shared_info().on_refused(move || {
            if is_running.swap(true, Ordering::SeqCst) {
                return;
            }
            let (call, running) = (call.clone(), is_running.clone());
            let run = move || {
                on_start();
                call();
                running.store(false, Ordering::SeqCst);
            };
            if thread::Builder::new().name("rbd owner".to_owned()).spawn(run).is_err() {
                // The next refused request tries again.
                is_running.store(false, Ordering::SeqCst);
            }
        });
    }

    /// Watches the client of the present image.
    fn watch(&self) {
        let image = self.volume.image();
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let is_watched = watched.as_ref().is_some_and(|(watched, _)| Arc::ptr_eq(watched, &image));
        let Some(call) = self.on_lost.get().filter(|_| !is_watched) else { return };
        let (volume, call) = (Arc::downgrade(&self.volume), call.clone());
        let call: Arc<OnBlocklisted> = Arc::new(move || {
            // A volume that has an image of another client by now has lost nothing.
            if volume.upgrade().is_some_and(|volume| volume.image().cluster().is_blocklisted()) {
                call();
            }
        });
        let before = watched.replace((image.clone(), call.clone()));
        drop(watched);
        image.cluster().on_blocklisted(&call);
        // Without the lock, because the last user closes the image.
        drop(before);
    }

    fn try_acquire(&self, take: bool, transition: &Transition) -> Result<StoredState, NotAcquired> {
        let own = || -> Result<Arc<Image>, RbdError> {
            let image = self.volume.open_again(transition)?;
            self.watch();
            self.volume.own_during(image.clone(), take, self.on_start, transition.clone())?;
            Ok(image)
        };
        let owned = match own() {
            // Nobody has noticed it before.
            Err(error) if error.is_blocklisted() => own(),
            owned => owned,
        };
        let image = owned.map_err(not_acquired)?;
        if !transition.is_current() {
            return Err(not_acquired(RbdError::GivenUp));
        }
        self.load(image, transition).map_err(|error| match self.release(transition) {
            Ok(()) => NotAcquired { error, may_own: false },
            Err(why) => {
                NotAcquired { error: format!("{error}; and the image is not released: {why}"), may_own: true }
            }
        })
    }

    /// What another client has changed: the size, and the reservations.
    /// A call that does not return has the transition until it does.
    fn load(&self, image: Arc<Image>, transition: &Transition) -> Result<StoredState, String> {
        self.volume.note_change();
        let present = self.volume.current.get();
        let refreshed = within(LIMIT, move || Ok(present.refresh()), drop, transition.clone());
        refreshed.map_err(|error| error.to_string())?;
        self.state.open_again(image, transition).map_err(|error| error.to_string())
    }
}

impl Ownership for RbdOwnership {
    fn acquire(&self, take: bool, transition: &Transition) -> Result<StoredState, NotAcquired> {
        self.try_acquire(take, transition)
    }

    fn question(&self) -> OwnershipQuestion {
        let (image, pending) = (self.volume.image(), self.questions.clone());
        Box::new(move || is_held(&image, pending))
    }

    fn recheck(&self) {
        // The calls of a cluster that does not answer do not add up.
        let is_asked = Arc::strong_count(&self.questions) > 1;
        let mut last = self.rechecked.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_asked && is_due(*last, Instant::now()) {
            *last = Some(Instant::now());
            drop(last);
            self.volume.current.shared_info().note_refused();
        }
    }

    fn release(&self, transition: &Transition) -> Result<(), String> {
        let image = self.volume.image();
        // Otherwise it may be the image of the next owner in this process.
        if !transition.is_current() {
            return Err(RbdError::GivenUp.to_string());
        }
        self.volume.release_image(image, transition.clone()).map_err(|error| error.to_string())
    }
}

/// Whether it is time for another question, after the last one.
fn is_due(last: Option<Instant>, now: Instant) -> bool {
    last.is_none_or(|last| now.saturating_duration_since(last) >= RECHECK_PERIOD)
}

/// Whether the client of an image has its lock. `pending` is dropped when the cluster has answered.
fn is_held(image: &Arc<Image>, pending: Arc<()>) -> Result<bool, String> {
    let asked = image.clone();
    let owner = within(LIMIT, move || asked.lock_owner(), drop, pending);
    match owner.inspect_err(|error| note_blocklisted(image.cluster(), error)) {
        Ok(owner) => Ok(owner.is_some_and(|owner| image.cluster().is_owner(&owner))),
        Err(error) if error.is_blocklisted() => Ok(false),
        Err(error) => Err(error.to_string()),
    }
}

/// What was not answered may still succeed, and is undone then.
fn not_acquired(error: RbdError) -> NotAcquired {
    let may_own = matches!(error, RbdError::NoAnswer(_) | RbdError::NotReleased { .. } | RbdError::GivenUp);
    NotAcquired { error: error.to_string(), may_own }
}

/// `is_awaited`: whether the caller still waits. A call that hung may go on when another host owns
/// the image, which must not be shut out then.
fn acquire(image: &Image, take: bool, is_awaited: impl Fn() -> bool) -> Result<(), RbdError> {
    let check = || if is_awaited() { Ok(()) } else { Err(RbdError::NoAnswer(LIMIT)) };
    let owner = if take { image.lock_owner()? } else { None };
    check()?;
    // Another image of this connection may still be closing: blocklisting that would end all.
    if let Some(owner) = owner.filter(|owner| !image.cluster().is_owner(owner)) {
        warn!("the image's lock is taken from {owner}: the cluster refuses all of its requests");
        image.break_lock(&owner)?;
    }
    check()?;
    image.acquire_lock()
}

/// Time between two questions because of refused clients.
const RECHECK_PERIOD: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_clients_have_the_cluster_asked_once_in_a_period() {
        let now = Instant::now();
        let later = now + RECHECK_PERIOD;
        assert!(is_due(None, now) && is_due(Some(now), later));
        assert!(!is_due(Some(now), now) && !is_due(Some(later), now));
    }
}
