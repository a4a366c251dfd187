//! How I/O of a client comes to a volume: counted, past locked ranges, and as far as reservations
//! let it.
//!
//! [`IoCounter`] is one user's counter of a volume; what it admits is an [`IoGuard`] until the I/O
//! is over. A SCSI nexus has one for each logical unit, because its reservations are checked by
//! command. [`Admission`] adds the reservations of a client that has one name for all that it does,
//! an NVMe host, or none: an NBD connection, or whoever uses an AoE target. [`Admissions`] are
//! those of one client to several volumes.

use super::exports::VolumeId;
use super::in_flight::{AdmissionRequest, ByteRange, Counter, NotAdmitted};
use super::{BlockAccess, Registrant, VolumeState};
use blockmux_volume::Op;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// Counts the I/O of one user on one volume, on one core.
pub(crate) struct IoCounter {
    served: Arc<VolumeState>,
    counter: Arc<Counter>,
}

/// Counts one I/O as in flight until it is dropped.
pub(crate) struct IoGuard {
    counter: Rc<IoCounter>,
    place: usize,
}

impl IoCounter {
    /// A counter for one more user.
    pub(crate) fn new(served: &Arc<VolumeState>) -> Rc<IoCounter> {
        Rc::new(IoCounter { served: served.clone(), counter: served.in_flight.add_counter() })
    }

    /// Lets an I/O of that operation on a range in bytes begin, unless a byte of it is locked or
    /// `check` fails, which is called once the I/O is counted: what then changes the answer also
    /// waits for the I/O.
    ///
    /// # Errors
    /// If it may not begin.
    #[inline]
    pub(crate) fn admit<E>(
        self: Rc<IoCounter>,
        op: Op,
        range: ByteRange,
        owns_lock: bool,
        check: impl FnOnce() -> Result<(), E>,
    ) -> Result<IoGuard, NotAdmitted<E>> {
        let wanted = AdmissionRequest { range, changes: op.is_write(), owns_lock };
        let place = self.served.in_flight.admit(&self.counter, wanted, check)?;
        Ok(IoGuard { counter: self, place })
    }
}

impl Drop for IoCounter {
    #[cold]
    fn drop(&mut self) {
        self.served.in_flight.remove_counter(&self.counter);
    }
}

impl Drop for IoGuard {
    #[inline]
    fn drop(&mut self) {
        self.counter.counter.end(self.place);
    }
}

impl std::fmt::Debug for IoGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IoGuard")
    }
}

/// A client's access to one volume.
pub(crate) struct Admission {
    counter: Rc<IoCounter>,
    /// The client's name, if it has one.
    who: Option<Registrant>,
    reservations: Cell<SeenReservations>,
    /// The generation of the last complaint.
    complained_of: Option<u64>,
}

/// A copy of what concerns the client.
#[derive(Clone, Copy)]
struct SeenReservations {
    /// The generation that `access` was made of.
    generation: u64,
    access: BlockAccess,
}

/// What reservations keep a client from, or a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reserved;

/// What an I/O needs to be allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    /// A flush is for what was written before, and does nobody harm.
    Nothing,
    Reading,
    Writing,
}

impl Needs {
    /// What most protocols ask for.
    #[inline]
    pub(crate) fn of(op: Op) -> Needs {
        match op {
            Op::Flush => Needs::Nothing,
            op if op.is_write() => Needs::Writing,
            _ => Needs::Reading,
        }
    }
}

impl Admission {
    /// That of `who`, or of somebody without a name, whom every reservation keeps out.
    pub(crate) fn new(served: &Arc<VolumeState>, who: Option<Registrant>) -> Admission {
        let seen = SeenReservations { generation: 0, access: BlockAccess::ALL };
        let reservations = Cell::new(seen);
        let admission = Admission { counter: IoCounter::new(served), who, reservations, complained_of: None };
        admission.refresh();
        admission
    }

    /// Lets an I/O on a range in bytes begin. Only reads and writes are counted; for others there
    /// is no guard.
    ///
    /// # Errors
    /// If a byte of the range is locked, unless the client `owns_lock`, or reservations do not
    /// allow what it needs.
    #[inline]
    pub(crate) fn admit(
        &self,
        op: Op,
        range: ByteRange,
        needs: Needs,
        owns_lock: bool,
    ) -> Result<Option<IoGuard>, NotAdmitted<Reserved>> {
        let check = || if self.allows(needs) { Ok(()) } else { Err(Reserved) };
        if op == Op::Read || op.is_write() {
            self.counter.clone().admit(op, range, owns_lock, check).map(Some)
        } else {
            check().map_err(NotAdmitted::Denied)?;
            Ok(None)
        }
    }

    #[inline]
    fn allows(&self, needs: Needs) -> bool {
        if self.counter.served.generation() != self.reservations.get().generation {
            self.refresh();
        }
        let access = self.reservations.get().access;
        match needs {
            Needs::Nothing => true,
            Needs::Reading => access.reads,
            Needs::Writing => access.writes,
        }
    }

    /// Why the client is kept out, for the log of who serves the volume; once for each change of
    /// what keeps it out.
    #[cold]
    pub(crate) fn complaint(&mut self) -> Option<&'static str> {
        let seen = self.reservations.get().generation;
        if self.complained_of.replace(seen) == Some(seen) {
            return None;
        }
        Some(self.counter.served.look(|table| {
            if table.is_retired {
                "the volume is not served any more"
            } else if table.is_closed {
                "all that is on the volume is being destroyed"
            } else {
                "an initiator has reserved the volume"
            }
        }))
    }

    #[cold]
    fn refresh(&self) {
        let served = &self.counter.served;
        // Before the look: a change in between is looked at once more.
        let generation = served.generation();
        let access = served.look(|table| match table.reserved_by {
            Some(_) => BlockAccess::NONE,
            None if table.is_closed || table.is_retired => BlockAccess::NONE,
            None => table.reservations.access(self.who.as_ref()),
        });
        self.reservations.set(SeenReservations { generation, access });
    }
}

/// A client's access to several volumes: one NVMe queue's, or that of all who use an AoE target.
pub(crate) struct Admissions(Vec<(VolumeId, Admission)>);

impl Admissions {
    /// Those of `who`, or of somebody without a name.
    pub(crate) fn new<'a>(
        volumes: impl Iterator<Item = (VolumeId, &'a Arc<VolumeState>)>,
        who: Option<&Registrant>,
    ) -> Admissions {
        Admissions(volumes.map(|(volume, served)| (volume, Admission::new(served, who.cloned()))).collect())
    }

    /// From now on those to these volumes alone: the others end, and new ones begin.
    pub(crate) fn set_volumes<'a>(
        &mut self,
        volumes: impl Iterator<Item = (VolumeId, &'a Arc<VolumeState>)>,
        who: Option<&Registrant>,
    ) {
        let mut before = std::mem::take(&mut self.0);
        self.0.extend(volumes.map(|(volume, served)| {
            let known = before.iter().position(|(id, _)| *id == volume);
            known.map_or_else(
                || (volume, Admission::new(served, who.cloned())),
                |known| before.swap_remove(known),
            )
        }));
    }

    /// Whether that volume is among them.
    pub(crate) fn has(&self, volume: VolumeId) -> bool {
        self.0.iter().any(|(id, _)| *id == volume)
    }

    /// As [`Admission::admit`], on one of the volumes; what is none of them counts as reserved.
    #[inline]
    pub(crate) fn admit(
        &self,
        volume: VolumeId,
        op: Op,
        range: ByteRange,
        needs: Needs,
        owns_lock: bool,
    ) -> Result<Option<IoGuard>, NotAdmitted<Reserved>> {
        let found = self.0.iter().find(|(id, _)| *id == volume);
        let (_, admission) = found.ok_or(NotAdmitted::Denied(Reserved))?;
        admission.admit(op, range, needs, owns_lock)
    }
}
