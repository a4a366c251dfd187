//! Admission of a client's I/O to a volume: counts it, and checks locked ranges and reservations.
//!
//! [`IoCounter`] counts the I/O of one user of a volume; an admitted I/O has an [`IoGuard`] until
//! it is complete. A SCSI nexus has a counter for each logical unit, because SCSI checks
//! reservations for each command. [`Admission`] adds the reservations of a client with one identity
//! (an NVMe host) or none (an NBD connection, an AoE target's initiators). [`Admissions`] are one
//! client's to several volumes.

use super::exports::VolumeId;
use super::in_flight::{AdmissionRequest, ByteRange, Counter, Fenced, NotAdmitted};
use super::{AtomicRange, BlockAccess, Epoch, Registrant, VolumeState};
use blockmux_volume::{IoError, Op};
use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::sync::Arc;

/// Counts the I/O of one user on one volume, on one core.
pub(crate) struct IoCounter {
    volume_state: Arc<VolumeState>,
    counter: Arc<Counter>,
}

/// Counts one I/O as in flight until it is dropped.
pub(crate) struct IoGuard {
    counter: Rc<IoCounter>,
    /// Index of the count that includes the I/O, below 2. Short, because every request in flight
    /// has a guard.
    place: u8,
}

impl IoCounter {
    /// A counter for a user of the volume that began in `epoch`.
    pub(crate) fn new(volume_state: &Arc<VolumeState>, epoch: Epoch) -> Rc<IoCounter> {
        Rc::new(IoCounter {
            volume_state: volume_state.clone(),
            counter: volume_state.in_flight.add_counter(epoch.0),
        })
    }

    /// Admits a read or write of a range in bytes, unless its user is fenced, a byte of the range
    /// is locked, or `check` fails. `check` runs after the I/O is counted, so a later change of its
    /// result waits for the I/O.
    ///
    /// # Errors
    /// If the I/O is not admitted.
    #[inline]
    pub(crate) fn admit<E: From<Fenced>>(
        self: Rc<IoCounter>,
        is_write: bool,
        range: ByteRange,
        owns_lock: bool,
        check: impl FnOnce() -> Result<(), E>,
    ) -> Result<IoGuard, NotAdmitted<E>> {
        let wanted = AdmissionRequest { range, changes: is_write, owns_lock };
        let place = self.volume_state.in_flight.admit(&self.counter, wanted, check)? as u8;
        Ok(IoGuard { counter: self, place })
    }
}

impl Drop for IoCounter {
    #[cold]
    fn drop(&mut self) {
        self.volume_state.in_flight.remove_counter(&self.counter);
    }
}

impl Drop for IoGuard {
    #[inline]
    fn drop(&mut self) {
        self.counter.counter.end(self.place.into());
    }
}

impl std::fmt::Debug for IoGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IoGuard")
    }
}

/// A client's access to one volume.
pub(crate) struct Admission {
    volume_state: Arc<VolumeState>,
    /// The epoch in which the client's session began.
    epoch: Epoch,
    /// Made for the first I/O, because many clients idle.
    counter: OnceCell<Rc<IoCounter>>,
    /// The client's identity for reservations, if it has one.
    who: Option<Box<Registrant>>,
    reservations: Cell<SeenReservations>,
    /// The generation of the last logged refusal, and whether the client was fenced.
    complained_of: Option<Box<(u64, bool)>>,
}

/// A copy of the reservations, as far as they concern the client.
#[derive(Clone, Copy)]
struct SeenReservations {
    /// The generation of the table that the rest was copied from.
    generation: u64,
    access: BlockAccess,
    is_retired: bool,
}

/// The access that an I/O needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequiredAccess {
    /// That of every client while the volume is served: a flush concerns completed writes only.
    Nothing,
    Reading,
    Writing,
}

impl RequiredAccess {
    /// The access that `op` needs with most protocols.
    #[inline]
    pub(crate) fn of(op: Op) -> RequiredAccess {
        match op {
            Op::Flush => RequiredAccess::Nothing,
            op if op.is_write() => RequiredAccess::Writing,
            _ => RequiredAccess::Reading,
        }
    }
}

impl Admission {
    /// Access of `who`, whose session began in `epoch`; `None` is a client without an identity,
    /// which every reservation excludes.
    pub(crate) fn new(volume_state: &Arc<VolumeState>, who: Option<Registrant>, epoch: Epoch) -> Admission {
        let seen = SeenReservations { generation: 0, access: BlockAccess::ALL, is_retired: false };
        let reservations = Cell::new(seen);
        who.iter().for_each(|who| volume_state.adopt_record(who));
        let who = who.map(Box::new);
        let (volume_state, counter) = (volume_state.clone(), OnceCell::new());
        let admission = Admission { volume_state, epoch, counter, who, reservations, complained_of: None };
        admission.refresh();
        admission
    }

    /// Admits an I/O on a range in bytes. Only reads and writes are counted; for others the guard
    /// is `None`. `atomic` is the range that its command reads and writes atomically, which is
    /// locked first; such a command needs write access.
    ///
    /// # Errors
    /// If a byte of the range is locked by others; [`IoError::Fenced`] if the volume was fenced
    /// since the session began, [`IoError::Reserved`] if reservations do not allow `needs`, and
    /// [`IoError::ShuttingDown`] if the volume was removed.
    #[inline]
    pub(crate) fn admit(
        &self,
        op: Op,
        range: ByteRange,
        needs: RequiredAccess,
        atomic: Option<&mut AtomicRange>,
    ) -> Result<Option<IoGuard>, NotAdmitted<IoError>> {
        let owns_lock = atomic.is_some();
        let needs = if owns_lock { RequiredAccess::Writing } else { needs };
        if let Some(atomic) = atomic {
            self.lock(atomic)?;
        }
        let check = || self.check(needs);
        let is_write = op.is_write();
        if is_write || matches!(op, Op::Read) {
            let counter = self.counter.get_or_init(|| IoCounter::new(&self.volume_state, self.epoch));
            counter.clone().admit(is_write, range, owns_lock, check).map(Some)
        } else {
            check().map_err(NotAdmitted::Denied)?;
            Ok(None)
        }
    }

    /// Locks the range of a command. Access is checked first: who has none must not hold up others.
    #[cold]
    fn lock(&self, atomic: &mut AtomicRange) -> Result<(), NotAdmitted<IoError>> {
        if self.volume_state.in_flight.is_fenced(self.epoch.0) {
            return Err(NotAdmitted::Denied(IoError::Fenced));
        }
        self.check(RequiredAccess::Writing).map_err(NotAdmitted::Denied)?;
        atomic.lock()
    }

    /// A range of the volume that the client will read and write atomically, in bytes.
    pub(crate) fn atomic_range(&self, offset: u64, len: u64) -> AtomicRange {
        AtomicRange::new(&self.volume_state, offset, len)
    }

    /// Checks whether reservations allow `needs` now.
    ///
    /// # Errors
    /// [`IoError::Reserved`] if they do not, and [`IoError::ShuttingDown`] if the volume was
    /// removed.
    #[inline]
    pub(crate) fn check(&self, needs: RequiredAccess) -> Result<(), IoError> {
        if self.volume_state.generation() != self.reservations.get().generation {
            self.refresh();
        }
        let SeenReservations { access, is_retired, .. } = self.reservations.get();
        let is_allowed = match needs {
            RequiredAccess::Nothing => !is_retired,
            RequiredAccess::Reading => access.reads,
            RequiredAccess::Writing => access.writes,
        };
        match is_allowed {
            true => Ok(()),
            false if is_retired => Err(IoError::ShuttingDown),
            false => {
                self.volume_state.note_conflict();
                Err(IoError::Reserved)
            }
        }
    }

    /// Whether the volume refuses the client's I/O for good, because it was fenced since.
    pub(crate) fn is_fenced(&self) -> bool {
        self.volume_state.fences(self.epoch)
    }

    /// The reason for which the client is excluded, for the log; returned once for each change of
    /// the reservations.
    #[cold]
    pub(crate) fn complaint(&mut self) -> Option<&'static str> {
        let is_fenced = self.volume_state.in_flight.is_fenced(self.epoch.0);
        let seen = (self.reservations.get().generation, is_fenced);
        if self.complained_of.as_deref() == Some(&seen) {
            return None;
        }
        self.complained_of = Some(Box::new(seen));
        if is_fenced {
            return Some("the volume was fenced; the client must connect again");
        }
        Some(self.volume_state.with_table(|table| {
            if table.is_retired {
                "the volume is no longer served"
            } else if table.is_closed {
                "a SANITIZE operation is in progress"
            } else {
                "an initiator has reserved the volume"
            }
        }))
    }

    #[cold]
    fn refresh(&self) {
        let volume_state = &self.volume_state;
        // Read first, so that a change in between is seen by the next call.
        let generation = volume_state.generation();
        let (access, is_retired) = volume_state.with_table(|table| {
            let access = match table.reserved_by {
                Some(_) => BlockAccess::NONE,
                None if table.is_closed || table.is_retired => BlockAccess::NONE,
                None => table.reservations.access(self.who.as_deref()),
            };
            (access, table.is_retired)
        });
        self.reservations.set(SeenReservations { generation, access, is_retired });
    }
}

/// A client's access to several volumes, sorted by their ids: of one NVMe queue, or of all
/// initiators of an AoE target.
pub(crate) struct Admissions {
    list: Vec<(VolumeId, Admission)>,
    /// The epoch in which the client's session began.
    epoch: Epoch,
}

impl Admissions {
    /// Access of `who`, whose session begins now, to `volumes`; `None` is a client without an
    /// identity.
    pub(crate) fn new<'a>(
        volumes: impl Iterator<Item = (VolumeId, &'a Arc<VolumeState>)>,
        who: Option<&Registrant>,
    ) -> Admissions {
        let mut admissions = Admissions { list: Vec::new(), epoch: Epoch::current() };
        volumes.for_each(|(volume, volume_state)| admissions.add(volume, volume_state, who));
        admissions
    }

    /// Lets the access to further volumes be that of a session that begins now, for a protocol
    /// without sessions: what was sent for a volume before it was added was refused. Returns the
    /// epoch.
    pub(crate) fn begin_again(&mut self) -> Epoch {
        self.epoch = Epoch::current();
        self.epoch
    }

    /// Adds the access to a volume, unless there is one.
    pub(crate) fn add(
        &mut self,
        volume: VolumeId,
        volume_state: &Arc<VolumeState>,
        who: Option<&Registrant>,
    ) {
        if let Err(place) = self.list.binary_search_by_key(&volume, |(id, _)| *id) {
            self.list.insert(place, (volume, Admission::new(volume_state, who.cloned(), self.epoch)));
        }
    }

    /// Ends the access to the volumes for which `stays` returns `false`.
    pub(crate) fn retain(&mut self, stays: impl Fn(VolumeId) -> bool) {
        self.list.retain(|(volume, _)| stays(*volume));
    }

    /// Whether the volume is in the set.
    pub(crate) fn has(&self, volume: VolumeId) -> bool {
        self.find(volume).is_some()
    }

    #[inline]
    fn find(&self, volume: VolumeId) -> Option<&Admission> {
        let place = self.list.binary_search_by_key(&volume, |(id, _)| *id).ok()?;
        self.list.get(place).map(|(_, admission)| admission)
    }

    /// Admits an I/O on one of the volumes, as [`Admission::admit`]. Any other volume counts as
    /// removed.
    #[inline]
    pub(crate) fn admit(
        &self,
        volume: VolumeId,
        op: Op,
        range: ByteRange,
        needs: RequiredAccess,
        atomic: Option<&mut AtomicRange>,
    ) -> Result<Option<IoGuard>, NotAdmitted<IoError>> {
        self.find(volume).ok_or(NotAdmitted::Denied(IoError::ShuttingDown))?.admit(op, range, needs, atomic)
    }
}
