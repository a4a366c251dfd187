//! A volume as everybody serves it: what its users share, whatever protocol and target they came in
//! by.
//!
//! ```text
//!   iSCSI target ──▶ LogicalUnit ─┐                       ┌─ Reservations: who may read and write
//!   iSCSI target ──▶ LogicalUnit ─┼──▶ Served ── Volume   ├─ InFlight: whose I/O may begin, and is over
//!   NBD export   ──▶ Admission ───┘       └───────────────┴─ Watchers: who is told of changes
//! ```
//! A volume is served once however many ways lead to it, so that a reservation that one initiator
//! takes keeps the clients of every other protocol out, COMPARE AND WRITE is one action to all of
//! them, and a new size reaches all.
//!
//! I/O takes no lock for that: each user has a copy of what concerns it and compares one number to
//! know whether the copy is still good, and counts its I/O in memory that no other core writes
//! (`in_flight.rs`).

mod admission;
pub mod exports;
mod image;
mod in_flight;
mod latency;
mod orphans;
mod ranges;
mod reservations;
mod traffic;

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

/// What `in_flight` is made of; its model check has its own.
mod sync {
    pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence};
    pub(super) use std::sync::{Mutex, MutexGuard, PoisonError};
}

pub use image::{ReservationImageError, ReservationStore, SaveTicket};
pub use latency::{LATENCY_BUCKETS, LATENCY_UNIT_NS, LatencyHistogram, RequestKind, VolumeLatency};
pub use orphans::{MAX_ORPHANS, OrphanedUser};
pub(crate) use traffic::UserMeter;
pub use traffic::{ERROR_KINDS, Meter, MeterReader, Origin, OriginTraffic, VolumeTraffic, error_kind};

pub(crate) use admission::{Admission, Admissions, IoCounter, IoGuard, Needs, Reserved};
pub(crate) use image::to_image;
pub(crate) use in_flight::NotAdmitted;
pub(crate) use ranges::{Drain, RangeGuard, Watch};
pub(crate) use reservations::{
    BlockAccess, Move, Notice, Notices, Preempt, Register, Registrant, ReservationRefused, Reservations,
};

#[cfg(test)]
pub(crate) use reservations::Registration;

use crate::volume_uuid::VolumeUuid;
use blockmux_volume::{Resize, ResizeError, Volume};
use image::from_image;
use in_flight::InFlight;
use orphans::OrphanCount;
use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use traffic::Meters;

/// A volume, and what all who use it share about it.
pub struct VolumeState {
    volume: Arc<dyn Volume>,
    identity: Option<VolumeIdentity>,
    /// Grows with each change of the table.
    generation: AtomicU64,
    table: Mutex<Table>,
    in_flight: InFlight,
    store: Option<Arc<dyn ReservationStore>>,
    watchers: Mutex<Vec<Weak<dyn Watcher>>>,
    /// In bytes, as everybody has been told; locked while it changes.
    size: Mutex<u64>,
    meters: Meters,
    left: OrphanCount,
}

/// What a volume is known by.
pub struct VolumeIdentity {
    /// The UUID of its data.
    pub uuid: VolumeUuid,
    /// The name of the iSCSI target and of the NVM subsystem that the volume is where none are
    /// configured, without their prefixes.
    pub target_name: String,
    /// Keeps other processes from serving the volume; dropped with it.
    pub claim: Box<dyn Any + Send + Sync>,
}

/// Reservations of a volume, for people and monitoring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReservationSummary {
    /// Registrations of initiators and hosts.
    pub registrants: usize,
    /// Somebody holds a reservation.
    pub is_reserved: bool,
}

/// Who may do what.
#[derive(Default)]
pub(crate) struct Table {
    pub(crate) reservations: Reservations,
    /// Who holds the whole volume by a RESERVE of SPC-2.
    pub(crate) reserved_by: Option<Holder>,
    /// Nobody may use the volume: all that is on it is being destroyed.
    pub(crate) is_closed: bool,
    /// The volume is not served any more.
    pub(crate) is_retired: bool,
    last_holder: u64,
    /// What was there before the last change, as long as nobody knows whether that is kept.
    before: Option<(SaveTicket, Reservations)>,
}

/// Somebody who can hold a RESERVE of SPC-2: one nexus of a logical unit, as long as its session
/// lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder(u64);

/// The end of what was in flight when it was made.
pub struct Settling(Drain);

impl Settling {
    /// Whether it is there; ask again until it is.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.is_over()
    }
}

/// Hears of changes that others have made.
pub(crate) trait Watcher: Send + Sync {
    /// Something has changed. Called with the table locked, from any thread: look at it later.
    fn on_change(&self, change: &Change<'_>);
}

/// What has changed.
pub(crate) enum Change<'a> {
    /// Reservations, and those who are to be told why; with `aborts`, tasks of registrants that
    /// were preempted end.
    Reservations { notices: &'a Notices, aborts: bool },
    /// The size of the volume.
    Size,
}

impl VolumeState {
    /// A volume that nobody has reserved.
    #[must_use]
    pub fn new(volume: Arc<dyn Volume>) -> Arc<VolumeState> {
        VolumeState::build(volume, None, None, Table::default())
    }

    /// A volume that is known by `identity`; with `kept`, what keeps its reservations over a
    /// restart and the image that was kept.
    ///
    /// # Errors
    /// If the image is damaged, or of a later version.
    pub fn identified(
        volume: Arc<dyn Volume>,
        identity: VolumeIdentity,
        kept: Option<(Arc<dyn ReservationStore>, &[u8])>,
    ) -> Result<Arc<VolumeState>, ReservationImageError> {
        let (store, reservations) = match kept {
            Some((store, image)) => (Some(store), from_image(image)?),
            None => (None, Reservations::default()),
        };
        let table = Table { reservations, ..Table::default() };
        Ok(VolumeState::build(volume, Some(identity), store, table))
    }

    /// A volume whose reservations can survive a restart; `image` is what `store` has kept.
    ///
    /// # Errors
    /// If the image is damaged, or of a later version.
    pub fn with_store(
        volume: Arc<dyn Volume>,
        store: Arc<dyn ReservationStore>,
        image: &[u8],
    ) -> Result<Arc<VolumeState>, ReservationImageError> {
        let table = Table { reservations: from_image(image)?, ..Table::default() };
        Ok(VolumeState::build(volume, None, Some(store), table))
    }

    fn build(
        volume: Arc<dyn Volume>,
        identity: Option<VolumeIdentity>,
        store: Option<Arc<dyn ReservationStore>>,
        table: Table,
    ) -> Arc<VolumeState> {
        let size = volume.info().size;
        let served = Arc::new(VolumeState {
            volume,
            identity,
            generation: AtomicU64::new(0),
            table: Mutex::new(table),
            in_flight: InFlight::default(),
            store,
            watchers: Mutex::default(),
            size: Mutex::new(size),
            meters: Meters::default(),
            left: OrphanCount::default(),
        });
        let weak = Arc::downgrade(&served);
        served.volume.on_resize(Box::new(move || {
            if let Some(served) = weak.upgrade() {
                served.look_at_size();
            }
        }));
        served
    }

    /// The volume itself.
    #[must_use]
    pub fn volume(&self) -> &Arc<dyn Volume> {
        &self.volume
    }

    /// The UUID of its data, if it has one.
    #[must_use]
    pub fn uuid(&self) -> Option<VolumeUuid> {
        self.identity.as_ref().map(|identity| identity.uuid)
    }

    /// The name of the iSCSI target and of the NVM subsystem that the volume is, if it has another
    /// one than its export.
    #[must_use]
    pub fn target_name(&self) -> Option<&str> {
        self.identity.as_ref().map(|identity| identity.target_name.as_str())
    }

    /// Gives the volume another size, and tells everybody, each by the means of its protocol.
    /// Answers the size in bytes. May wait for the system, so no core calls this.
    ///
    /// # Errors
    /// If the volume cannot have that size.
    pub fn resize(&self, to: Resize) -> Result<u64, ResizeError> {
        let mut told = self.size.lock().unwrap_or_else(PoisonError::into_inner);
        let size = self.volume.resize(to)?;
        self.tell_size(&mut told, size);
        Ok(size)
    }

    /// Looks whether the volume has another size by itself, and tells everybody if it has; answers
    /// whether. May wait for the system, so no core calls this, unless the volume has just said
    /// that it has changed.
    pub fn look_at_size(&self) -> bool {
        let mut told = self.size.lock().unwrap_or_else(PoisonError::into_inner);
        let size = self.volume.refresh_size();
        self.tell_size(&mut told, size)
    }

    /// What has been done on the volume.
    #[must_use]
    pub fn traffic(&self) -> VolumeTraffic {
        self.meters.sum()
    }

    /// What has been done on the volume, by where its users came from.
    #[must_use]
    pub fn traffic_by_origin(&self) -> Vec<OriginTraffic> {
        self.meters.by_origin()
    }

    /// Who is registered for reservations, and what is reserved.
    #[must_use]
    pub fn reservation(&self) -> ReservationSummary {
        let table = self.lock();
        ReservationSummary {
            registrants: table.reservations.registrations.len(),
            is_reserved: table.reserved_by.is_some() || table.reservations.reservation.is_some(),
        }
    }

    fn tell_size(&self, told: &mut u64, size: u64) -> bool {
        let is_news = std::mem::replace(told, size) != size;
        if is_news {
            self.on_resize();
        }
        is_news
    }

    /// The volume has another size: everybody is told, each by the means of its protocol.
    pub fn on_resize(&self) {
        let table = self.lock();
        self.tell(&table, &Change::Size);
    }

    /// What keeps reservations over a restart, if something does.
    pub(crate) fn store(&self) -> Option<&Arc<dyn ReservationStore>> {
        self.store.as_ref()
    }

    /// Tells `watcher` of every change from now on, as long as it lives.
    pub(crate) fn watch(&self, watcher: Weak<dyn Watcher>) {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(watcher);
    }

    /// Somebody new who can hold a RESERVE of SPC-2.
    pub(crate) fn new_holder(&self) -> Holder {
        let mut table = self.lock();
        table.last_holder = table.last_holder.saturating_add(1);
        Holder(table.last_holder)
    }

    /// Whether a byte of the range is locked.
    #[cfg(test)]
    pub(crate) fn is_locked(&self, offset: u64, len: u64) -> bool {
        self.in_flight.is_locked((offset, len))
    }

    /// In the one order that all threads agree on: see [`Drain`].
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Looks at the table.
    pub(crate) fn look<R>(&self, look: impl FnOnce(&Table) -> R) -> R {
        look(&self.lock())
    }

    /// Changes the table, tells whom it concerns, and begins to save what has to survive a restart.
    /// With `aborts`, tasks of registrants that are preempted end.
    ///
    /// # Errors
    /// If `change` fails; then it has changed nothing.
    pub(crate) fn change<E>(
        &self,
        aborts: bool,
        change: impl FnOnce(&mut Table) -> Result<Notices, E>,
    ) -> Result<Option<SaveTicket>, E> {
        let mut table = self.lock();
        let before = table.reservations.clone();
        let notices = change(&mut table)?;
        self.tell(&table, &Change::Reservations { notices: &notices, aborts });
        let must_save = before.persists || table.reservations.persists;
        // Within the lock, so that images are saved in the order of the changes.
        let store = self.store.as_ref().filter(|_| must_save);
        let ticket = store.map(|store| store.save(&to_image(&table.reservations)));
        table.before = ticket.map(|ticket| (ticket, before));
        Ok(ticket)
    }

    /// The change with that ticket is not kept: takes it back, unless others have built on it.
    pub(crate) fn take_back(&self, ticket: SaveTicket) {
        let mut table = self.lock();
        if let Some((_, before)) = table.before.take_if(|(last, _)| *last == ticket) {
            // PRGENERATION never goes back: who has read the change asks again.
            let generation = table.reservations.generation;
            table.reservations = Reservations { generation, ..before };
            self.tell(&table, &Change::Reservations { notices: &Notices::new(), aborts: false });
        }
    }

    /// Ends a RESERVE of SPC-2 that `holder` has; `None`: whoever has it.
    pub(crate) fn release(&self, holder: Option<Holder>) {
        let mut table = self.lock();
        if table.reserved_by.is_some() && (holder.is_none() || table.reserved_by == holder) {
            table.reserved_by = None;
            self.tell(&table, &Change::Reservations { notices: &Notices::new(), aborts: false });
        }
    }

    /// Keeps everybody out who asks the table, or lets them in again: a SANITIZE has begun or is
    /// over. Answers whether that is a change. What was let in before may still be in flight: see
    /// [`Drain`].
    pub(crate) fn close(&self, is_closed: bool) -> bool {
        let mut table = self.lock();
        let is_change = std::mem::replace(&mut table.is_closed, is_closed) != is_closed;
        if is_change {
            self.tell(&table, &Change::Reservations { notices: &Notices::new(), aborts: false });
        }
        is_change
    }

    /// The volume is not served any more: nobody new is let in, for ever. What was let in before is
    /// over when [`VolumeState::settling`] says so.
    pub fn retire(&self) {
        let mut table = self.lock();
        table.is_retired = true;
        self.tell(&table, &Change::Reservations { notices: &Notices::new(), aborts: false });
    }

    /// Whether it is not served any more.
    #[must_use]
    pub fn is_retired(&self) -> bool {
        self.lock().is_retired
    }

    /// Tells when nothing is in flight any more that was let in before now.
    #[must_use]
    pub fn settling(self: &Arc<VolumeState>) -> Settling {
        Settling(Drain::new(self))
    }

    /// Has everybody look again; the lock is held, so that who sees the new generation and then
    /// locks sees the change.
    fn tell(&self, _locked: &Table, change: &Change<'_>) {
        self.generation.fetch_add(1, Ordering::Release);
        let watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        for watcher in watchers.iter().filter_map(Weak::upgrade) {
            watcher.on_change(change);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for VolumeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Served").field("info", &self.volume.info()).finish_non_exhaustive()
    }
}
