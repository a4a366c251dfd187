//! Shared volume state: what all users of a volume share, over all protocols and targets.
//!
//! ```text
//!   iSCSI target ──▶ LogicalUnit ─┐                           ┌─ Reservations: who may read, write
//!   iSCSI target ──▶ LogicalUnit ─┼──▶ VolumeState ── Volume  ├─ InFlight: admission, I/O counts
//!   NBD export   ──▶ Admission ───┘         └─────────────────┴─ Watchers: notified of changes
//! ```
//! A volume has one [`VolumeState`] however many targets export it. So a reservation of one
//! initiator excludes the clients of every protocol, COMPARE AND WRITE is atomic for all of them,
//! and a new size reaches all.
//!
//! I/O takes no lock for this: each user has a copy of the state that concerns it, compares one
//! generation number to know whether the copy is current, and counts its I/O in memory that no
//! other core writes (`in_flight.rs`).

mod admission;
mod change;
mod epoch;
pub mod exports;
mod image;
mod in_flight;
mod latency;
mod orphans;
mod ownership;
mod ranges;
mod reservations;
mod serving;
mod shared_state;
mod size_watch;
mod traffic;
mod transition;

#[cfg(test)]
mod interleavings;
#[cfg(test)]
mod model;

/// The synchronization primitives of `in_flight`, which its model check replaces.
mod sync {
    pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
    pub(super) use std::sync::{Mutex, MutexGuard, PoisonError};
}

pub use epoch::{Epoch, Fence};
pub use image::ReservationImageError;
pub use in_flight::{NeededRange, NotAdmitted, WakeWaiting};
pub use latency::{LATENCY_BUCKETS, LATENCY_UNIT_NS, LatencyHistogram, RequestKind, VolumeLatency};
pub use orphans::{MAX_ORPHANS, OrphanedUser};
pub use ownership::{MAX_TRANSITION, NotAcquired, Ownership, OwnershipQuestion, ServingState};
pub use serving::{NotPromoted, NotStored, Promotion, StaysActive, StepDown, TransitionRefused};
pub use shared_state::{Commit, SharedState, StateGeneration, StoredState};
pub use size_watch::SizeWatch;
pub(crate) use traffic::UserMeter;
pub use traffic::{ERROR_KINDS, Meter, MeterReader, Origin, OriginTraffic, VolumeTraffic, error_kind};
pub use transition::Transition;

pub(crate) use admission::{Admission, Admissions, IoCounter, IoGuard, RequiredAccess};
pub(crate) use change::{NotChanged, ReservationChange};
pub(crate) use in_flight::Fenced;
#[cfg(test)]
pub(crate) use ranges::RangeGuard;
pub use ranges::RangeWait;
pub(crate) use ranges::{AtomicRange, Drain, Watch};
pub(crate) use reservations::{
    BlockAccess, MAX_REGISTRATIONS, Move, Notice, Notices, Preempt, Register, Registrant, ReservationRefused,
    Reservations,
};
pub(crate) use serving::SessionlessUser;
#[cfg(test)]
pub(crate) use serving::testing::Cluster as TestCluster;

#[cfg(test)]
pub(crate) use reservations::Registration;

use crate::names::unit_identity::GivenUnitIdentity;
use crate::names::volume_uuid::VolumeUuid;
use blockmux_volume::{Limiter, Resize, ResizeError, Volume, VolumeLimits};
use change::ProposedChange;
use image::{from_image, from_snapshot, to_image, to_snapshot};
use in_flight::InFlight;
use orphans::OrphanCount;
use std::any::Any;
use std::cell::OnceCell;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use traffic::{Meters, ThrottledUser};
use transition::CurrentTransition;

/// A volume, and the state that all of its users share.
pub struct VolumeState {
    volume: Arc<dyn Volume>,
    identity: Option<VolumeIdentity>,
    /// Incremented by each change of the table.
    generation: AtomicU64,
    table: Mutex<Table>,
    in_flight: InFlight,
    /// Stores the reservations that persist.
    shared_state: Option<Arc<dyn SharedState>>,
    ownership: Option<Arc<dyn Ownership>>,
    /// Copy of [`Table::serving`].
    serving: AtomicU8,
    serving_changes: AtomicU64,
    watchers: Mutex<Vec<Weak<dyn Watcher>>>,
    /// Locked during a change of the size.
    size: Mutex<NotifiedSize>,
    meters: Meters,
    limiter: Arc<Limiter>,
    orphans: OrphanCount,
}

/// What users were told about the size.
struct NotifiedSize {
    /// In bytes.
    bytes: u64,
    /// Number of resizes and of noticed changes.
    changes: u64,
}

/// A resize that has happened.
#[derive(Clone, Copy, Debug)]
pub struct Resized {
    /// The size in bytes since then.
    pub size: u64,
    /// Which change of the size it was.
    change: u64,
}

/// Identifiers of a volume.
pub struct VolumeIdentity {
    /// The UUID of its data.
    pub uuid: VolumeUuid,
    /// The configured identifiers of its logical unit.
    pub unit: GivenUnitIdentity,
    /// The name of the volume's default iSCSI target and NVM subsystem, without their prefixes.
    pub target_name: String,
    /// The number by which an attached disk finds the data again; `None` if the data is lost with
    /// the process.
    pub disk_number: Option<NonZeroU64>,
    /// Lock against export by another process; released when dropped.
    pub claim: Box<dyn Any + Send + Sync>,
}

/// Reservations of a volume, for people and monitoring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReservationSummary {
    /// Registrations of initiators and hosts.
    pub registrants: usize,
    /// Whether the volume is reserved.
    pub is_reserved: bool,
}

/// Reservations and state of the volume.
#[derive(Default)]
pub(crate) struct Table {
    pub(crate) reservations: Reservations,
    /// The holder of an SPC-2 RESERVE.
    pub(crate) reserved_by: Option<Holder>,
    /// Whether all access is refused because a SANITIZE is in progress.
    pub(crate) is_closed: bool,
    /// Whether the volume was removed.
    pub(crate) is_retired: bool,
    /// Whether this process serves the I/O.
    pub(crate) serving: ServingState,
    /// The time of the fence that [`Table::serving`] began with.
    fenced_at: u64,
    /// Sessions that have begun before this are fenced for good.
    has_ended_sessions: bool,
    /// The change of [`Table::serving`] that is under way.
    transition: Option<CurrentTransition>,
    /// Number of these changes.
    transitions: u64,
    /// Number of [`StaysActive`].
    stays_active: usize,
    /// Of each [`SessionlessUser`].
    sessionless_users: Vec<Epoch>,
    /// The generation of the stored reservations.
    stored: StateGeneration,
    /// The change that is being stored.
    proposed: Option<ProposedChange>,
}

/// Identifies a possible holder of an SPC-2 RESERVE: one nexus of a logical unit, while it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Holder {
    /// The I_T nexus, unique in the process.
    pub(crate) nexus: u64,
    /// The number of the unit.
    pub(crate) unit: u16,
}

impl Holder {
    /// This holder's nexus at another unit.
    pub(crate) fn of_unit(self, unit: u16) -> Holder {
        Holder { unit, ..self }
    }
}

/// Waits for the I/O that was in flight or throttled when it was created.
pub struct Settling {
    volume_state: Arc<VolumeState>,
    throttled: Vec<ThrottledUser>,
    /// Since the first call that found all of those released.
    drain: OnceCell<Drain>,
}

impl Settling {
    /// Whether that I/O is complete; call it until it returns true.
    #[must_use]
    pub fn is_over(&self) -> bool {
        if self.drain.get().is_none() && !self.throttled.iter().all(ThrottledUser::is_released) {
            return false;
        }
        self.drain.get_or_init(|| Drain::new(&self.volume_state)).is_over()
    }
}

/// Receives notifications of changes of a volume.
pub(crate) trait Watcher: Send + Sync {
    /// Notifies of a change. Called with the table locked, from any thread, so it must not read the
    /// table itself.
    fn on_change(&self, change: &Change<'_>);
}

/// A change of a volume.
pub(crate) enum Change<'a> {
    /// The reservations; `notices` lists the registrants to notify. With `aborts`, the tasks of
    /// preempted registrants are aborted.
    Reservations { notices: &'a Notices, aborts: bool },
    /// The size of the volume.
    Size,
    /// Whether this process serves the I/O.
    Serving(ServingState),
}

impl Table {
    fn of_stored(stored: &StoredState) -> Result<Table, ReservationImageError> {
        let reservations = from_image(&stored.image)?;
        Ok(Table { reservations, stored: stored.generation, ..Table::default() })
    }

    /// Whether `holder` may have an SPC-2 RESERVE.
    pub(crate) fn can_reserve(&self, holder: Holder) -> bool {
        // SPC-2, "Reservations", with CRH 0: RESERVE conflicts with existing registrations.
        self.reserved_by.is_none_or(|other| other == holder) && self.reservations.registrations.is_empty()
    }
}

impl VolumeState {
    /// State of a volume without reservations.
    #[must_use]
    pub fn new(volume: Arc<dyn Volume>) -> Arc<VolumeState> {
        VolumeState::build(volume, None, None, None, Table::default())
    }

    /// State of a volume with `identity`; `kept` is the store of its persistent reservations, and
    /// what is stored.
    ///
    /// # Errors
    /// If the image is damaged, or of a later version.
    pub fn identified(
        volume: Arc<dyn Volume>,
        identity: VolumeIdentity,
        kept: Option<(Arc<dyn SharedState>, &StoredState)>,
    ) -> Result<Arc<VolumeState>, ReservationImageError> {
        let (shared_state, table) = match kept {
            Some((shared_state, stored)) => (Some(shared_state), Table::of_stored(stored)?),
            None => (None, Table::default()),
        };
        Ok(VolumeState::build(volume, Some(identity), shared_state, None, table))
    }

    /// State of a volume that one process serves at a time, this one now with the reservations that
    /// are `stored`. With `None` it is standby.
    ///
    /// # Errors
    /// If the image is damaged, or of a later version.
    pub fn owned(
        volume: Arc<dyn Volume>,
        identity: VolumeIdentity,
        ownership: Arc<dyn Ownership>,
        shared_state: Arc<dyn SharedState>,
        stored: Option<&StoredState>,
    ) -> Result<Arc<VolumeState>, ReservationImageError> {
        let table = stored.map(Table::of_stored).transpose()?.unwrap_or_default();
        let kept = Some(shared_state);
        let volume_state = VolumeState::build(volume, Some(identity), kept, Some(ownership), table);
        if stored.is_none() {
            volume_state.begin_standby();
        }
        Ok(volume_state)
    }

    /// Checks that stored reservations can be loaded.
    ///
    /// # Errors
    /// If the image is damaged, or of a later version.
    pub fn check_stored(stored: &StoredState) -> Result<(), ReservationImageError> {
        Table::of_stored(stored).map(drop)
    }

    /// State of a volume with persistent reservations, of which `stored` is what is stored.
    ///
    /// # Errors
    /// If the image is damaged, or of a later version.
    pub fn with_shared_state(
        volume: Arc<dyn Volume>,
        shared_state: Arc<dyn SharedState>,
        stored: &StoredState,
    ) -> Result<Arc<VolumeState>, ReservationImageError> {
        let table = Table::of_stored(stored)?;
        Ok(VolumeState::build(volume, None, Some(shared_state), None, table))
    }

    fn build(
        volume: Arc<dyn Volume>,
        identity: Option<VolumeIdentity>,
        shared_state: Option<Arc<dyn SharedState>>,
        ownership: Option<Arc<dyn Ownership>>,
        table: Table,
    ) -> Arc<VolumeState> {
        let size = volume.info().size;
        let volume_state = Arc::new(VolumeState {
            volume,
            identity,
            generation: AtomicU64::new(0),
            table: Mutex::new(table),
            in_flight: InFlight::default(),
            shared_state,
            ownership,
            serving: AtomicU8::new(ServingState::Active as u8),
            serving_changes: AtomicU64::new(0),
            watchers: Mutex::default(),
            size: Mutex::new(NotifiedSize { bytes: size, changes: 0 }),
            meters: Meters::default(),
            limiter: Arc::default(),
            orphans: OrphanCount::default(),
        });
        let weak = Arc::downgrade(&volume_state);
        volume_state.volume.on_resize(Box::new(move || {
            if let Some(volume_state) = weak.upgrade() {
                volume_state.check_size();
            }
        }));
        volume_state
    }

    /// The volume.
    #[must_use]
    pub fn volume(&self) -> &Arc<dyn Volume> {
        &self.volume
    }

    /// The UUID of its data, if it has one.
    #[must_use]
    pub fn uuid(&self) -> Option<VolumeUuid> {
        self.identity.as_ref().map(|identity| identity.uuid)
    }

    /// The configured identifiers of its logical unit; `None` if the volume has no identity.
    #[must_use]
    pub fn unit_identity(&self) -> Option<&GivenUnitIdentity> {
        self.identity.as_ref().map(|identity| &identity.unit)
    }

    /// The number by which an attached disk finds its data again; `None` if the data is lost with
    /// the process.
    #[must_use]
    pub fn disk_number(&self) -> Option<NonZeroU64> {
        self.identity.as_ref()?.disk_number
    }

    /// The name of the volume's default iSCSI target and NVM subsystem, if it differs from the
    /// export's.
    #[must_use]
    pub fn target_name(&self) -> Option<&str> {
        self.identity.as_ref().map(|identity| identity.target_name.as_str())
    }

    /// Resizes the volume and notifies all users. It may block, so no core calls it.
    ///
    /// # Errors
    /// If the volume cannot have that size.
    pub fn resize(&self, to: Resize) -> Result<Resized, ResizeError> {
        let mut notified = self.size.lock().unwrap_or_else(PoisonError::into_inner);
        self.resize_locked(&mut notified, to)
    }

    /// Resizes the volume as [`VolumeState::resize`] does, unless its size has changed since
    /// `resized`. Returns whether it has resized it.
    ///
    /// # Errors
    /// If the volume cannot have that size.
    pub fn resize_again(&self, resized: Resized, to: Resize) -> Result<bool, ResizeError> {
        let mut notified = self.size.lock().unwrap_or_else(PoisonError::into_inner);
        if notified.changes != resized.change {
            return Ok(false);
        }
        self.resize_locked(&mut notified, to).map(|_| true)
    }

    /// Whether the size has not changed since.
    #[must_use]
    pub fn is_last_resize(&self, resized: Resized) -> bool {
        self.size.lock().unwrap_or_else(PoisonError::into_inner).changes == resized.change
    }

    fn resize_locked(&self, notified: &mut NotifiedSize, to: Resize) -> Result<Resized, ResizeError> {
        // A request of a standby volume would take the ownership.
        let stays_active = self.stay_active();
        if matches!(to, Resize::Bytes { .. }) && stays_active.is_none() {
            return Err(ResizeError::NotServed);
        }
        let size = self.volume.resize(to)?;
        if !self.notify_size(notified, size) {
            notified.changes = notified.changes.wrapping_add(1);
        }
        Ok(Resized { size, change: notified.changes })
    }

    /// Checks whether the size of the volume's file or device has changed, and notifies all users
    /// if it has. Returns whether it has. It may block, so a core calls it only when the volume has
    /// reported a change.
    pub fn check_size(&self) -> bool {
        let mut notified = self.size.lock().unwrap_or_else(PoisonError::into_inner);
        let size = self.volume.refresh_size();
        self.notify_size(&mut notified, size)
    }

    /// The I/O counters of the volume.
    #[must_use]
    pub fn traffic(&self) -> VolumeTraffic {
        self.meters.sum()
    }

    /// Whether the I/O of sessions that began in this epoch is refused for good.
    #[must_use]
    pub fn fences(&self, epoch: Epoch) -> bool {
        self.in_flight.has_ended(epoch.0)
    }

    /// The counters of the volume by listener.
    #[must_use]
    pub fn traffic_by_origin(&self) -> Vec<OriginTraffic> {
        self.meters.by_origin()
    }

    /// The limits of its I/O. Targets apply them to every request that they submit.
    #[must_use]
    pub fn limiter(&self) -> &Arc<Limiter> {
        &self.limiter
    }

    /// A summary of registrations and reservations.
    #[must_use]
    pub fn reservation(&self) -> ReservationSummary {
        let table = self.lock();
        ReservationSummary {
            registrants: table.reservations.registrations.len(),
            is_reserved: table.reserved_by.is_some() || table.reservations.reservation.is_some(),
        }
    }

    fn notify_size(&self, notified: &mut NotifiedSize, size: u64) -> bool {
        let is_changed = std::mem::replace(&mut notified.bytes, size) != size;
        if is_changed {
            notified.changes = notified.changes.wrapping_add(1);
            self.on_resize();
        }
        is_changed
    }

    /// Notifies all users of a new size, each as its protocol does.
    pub fn on_resize(&self) {
        let table = self.lock();
        self.notify(&table, &Change::Size);
    }

    /// Whether reservations can persist.
    pub(crate) fn has_shared_state(&self) -> bool {
        self.shared_state.is_some()
    }

    /// Notifies `watcher` of every further change, until it is dropped.
    pub(crate) fn watch(&self, watcher: Weak<dyn Watcher>) {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(watcher);
    }

    /// Whether a byte of the range is locked.
    #[cfg(test)]
    pub(crate) fn is_locked(&self, offset: u64, len: u64) -> bool {
        self.in_flight.is_locked((offset, len))
    }

    /// The generation of the table, in the order that `in_flight.rs` requires.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Reads the table.
    pub(crate) fn with_table<R>(&self, read: impl FnOnce(&Table) -> R) -> R {
        read(&self.lock())
    }

    /// All reservations, also those that would not persist through a power loss, for
    /// [`VolumeState::restore_reservations`] in the process that serves the volume next. A change
    /// that is being stored is included, because that process may load it.
    #[must_use]
    pub fn reservations_snapshot(&self) -> Vec<u8> {
        to_snapshot(self.lock().newest())
    }

    /// What is stored of the reservations of a snapshot.
    ///
    /// # Errors
    /// If the snapshot is damaged, or of a later version.
    pub fn stored_image(snapshot: &[u8]) -> Result<Vec<u8>, ReservationImageError> {
        from_snapshot(snapshot).map(|reservations| to_image(&reservations))
    }

    /// Continues with the reservations of the process that served the volume before. Called before
    /// the volume has users.
    ///
    /// # Errors
    /// If the snapshot is damaged, or of a later version.
    pub fn restore_reservations(&self, snapshot: &[u8]) -> Result<(), ReservationImageError> {
        let reservations = from_snapshot(snapshot)?;
        let mut table = self.lock();
        table.reservations = reservations;
        self.notify(&table, &Change::Reservations { notices: &Notices::new(), aborts: false });
        Ok(())
    }

    /// Makes `holder`, whose session began in `epoch`, the holder of an SPC-2 RESERVE; returns
    /// whether it is. `None` while a change is being stored on which that depends.
    ///
    /// # Errors
    /// If the session is fenced.
    pub(crate) fn reserve(&self, holder: Holder, epoch: Epoch) -> Result<Option<bool>, Fenced> {
        let mut table = self.lock();
        self.check_turn(&table, epoch)?;
        if table.proposed.is_some() {
            return Ok(None);
        }
        let is_free = table.can_reserve(holder);
        if is_free {
            table.reserved_by = Some(holder);
            self.notify(&table, &Change::Reservations { notices: &Notices::new(), aborts: false });
        }
        Ok(Some(is_free))
    }

    /// Releases an SPC-2 RESERVE of `holder`; with `None`, of any holder.
    pub(crate) fn release(&self, holder: Option<Holder>) {
        let mut table = self.lock();
        if table.reserved_by.is_some() && (holder.is_none() || table.reserved_by == holder) {
            table.reserved_by = None;
            self.notify(&table, &Change::Reservations { notices: &Notices::new(), aborts: false });
        }
    }

    /// Refuses all access, at the start of a SANITIZE by a session that began in `epoch`. Returns
    /// whether that is a change. I/O that was admitted before may still be in flight; see
    /// [`Drain`].
    ///
    /// # Errors
    /// If this process does not serve the volume, or is about to stop, or the session is fenced.
    pub(crate) fn close(&self, epoch: Epoch) -> Result<bool, Fenced> {
        let mut table = self.lock();
        self.check_turn(&table, epoch)?;
        Ok(self.set_closed(&mut table, true))
    }

    /// Allows access again after a SANITIZE.
    pub(crate) fn open(&self) {
        self.set_closed(&mut self.lock(), false);
    }

    /// Reservations have excluded a client. An owner that was shut out, and whose clients are all
    /// refused, would not notice it by their I/O.
    #[cold]
    pub(crate) fn note_conflict(&self) {
        self.ownership.iter().for_each(|ownership| ownership.recheck());
    }

    /// Checks that a session that began in `epoch` may change the volume's state.
    fn check_turn(&self, table: &Table, epoch: Epoch) -> Result<(), Fenced> {
        if table.serving == ServingState::Active && !self.fences(epoch) { Ok(()) } else { Err(Fenced) }
    }

    fn set_closed(&self, table: &mut Table, is_closed: bool) -> bool {
        let is_change = std::mem::replace(&mut table.is_closed, is_closed) != is_closed;
        if is_change {
            self.notify(table, &Change::Reservations { notices: &Notices::new(), aborts: false });
        }
        is_change
    }

    /// Refuses all further I/O, and what is throttled, because the volume was removed.
    /// [`VolumeState::settling`] waits for the I/O that was admitted before.
    pub fn retire(&self) {
        self.limiter.set_limits(VolumeLimits::default());
        let mut table = self.lock();
        table.is_retired = true;
        self.notify(&table, &Change::Reservations { notices: &Notices::new(), aborts: false });
    }

    /// Waits for all I/O that was admitted or throttled before this call.
    #[must_use]
    pub fn settling(self: &Arc<VolumeState>) -> Settling {
        Settling { volume_state: self.clone(), throttled: self.meters.throttled(), drain: OnceCell::new() }
    }

    /// Notifies all users. The lock is held, so a user that sees the new generation and then takes
    /// the lock sees the change.
    fn notify(&self, _locked: &Table, change: &Change<'_>) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        let watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        for watcher in watchers.iter().filter_map(Weak::upgrade) {
            watcher.on_change(change);
        }
    }

    /// Locks the table, with every committed change.
    fn lock(&self) -> MutexGuard<'_, Table> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        self.settle(&mut table);
        table
    }
}

impl fmt::Debug for VolumeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeState").field("info", &self.volume.info()).finish_non_exhaustive()
    }
}
