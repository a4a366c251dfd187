//! Locked ranges of a volume, for commands that read and write atomically (COMPARE AND WRITE,
//! ORWRITE, WRITE ATOMIC), and waiting for I/O in flight. [`super::in_flight`] explains the memory
//! ordering.

use super::VolumeState;
use super::in_flight::{ByteRange, Watched};
use blockmux_volume::Cost;
use std::sync::Arc;

/// Locks a range until it is dropped. Commands that lock a range wait for each other, and all other
/// I/O in the range waits for them.
pub(crate) struct RangeGuard {
    volume_state: Arc<VolumeState>,
    range: ByteRange,
    since: u64,
}

/// The range of a command that reads and writes it atomically. It is locked while the command has
/// I/O in flight.
pub(crate) struct AtomicRange {
    volume_state: Arc<VolumeState>,
    /// Offset in bytes.
    offset: u64,
    /// Length in bytes.
    len: u64,
    guard: Option<RangeGuard>,
    /// Whether the first I/O is complete.
    has_begun: bool,
}

/// Waits for all I/O that was in flight at its creation. I/O that was admitted before a reservation
/// or an abort may still reach the volume until then.
pub(crate) struct Drain {
    volume_state: Arc<VolumeState>,
    since: u64,
}

/// Detects whether a byte of its ranges may have changed since its creation.
pub(crate) struct Watch {
    volume_state: Arc<VolumeState>,
    watched: Arc<Watched>,
    since: u64,
}

impl RangeGuard {
    /// Locks the range; `None` if a byte of it is locked. The holder's I/O may start once
    /// [`RangeGuard::is_alone`] returns true.
    pub(crate) fn lock(volume_state: &Arc<VolumeState>, offset: u64, len: u64) -> Option<RangeGuard> {
        let since = volume_state.in_flight.lock((offset, len))?;
        Some(RangeGuard { volume_state: volume_state.clone(), range: (offset, len), since })
    }

    /// Whether all I/O that was admitted without seeing the lock is complete; call it until it
    /// returns true.
    pub(crate) fn is_alone(&self) -> bool {
        self.volume_state.in_flight.is_over_since(self.since)
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        self.volume_state.in_flight.unlock(self.range);
    }
}

impl AtomicRange {
    /// A range that is not locked yet; `offset` and `len` are in bytes.
    pub(crate) fn new(volume_state: &Arc<VolumeState>, offset: u64, len: u64) -> AtomicRange {
        AtomicRange { volume_state: volume_state.clone(), offset, len, guard: None, has_begun: false }
    }

    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Locks the range unless the command has locked it already; returns whether the command's I/O
    /// may start. Call it until it returns true.
    pub(crate) fn lock(&mut self) -> bool {
        if self.guard.is_none() {
            self.guard = RangeGuard::lock(&self.volume_state, self.offset, self.len);
        }
        self.guard.as_ref().is_some_and(RangeGuard::is_alone)
    }

    /// What limits charge for the next I/O: the first one pays for the command as for one write, so
    /// that limits never hold the others, for which others wait.
    pub(crate) fn cost(&self) -> Option<Cost> {
        (!self.has_begun).then(|| Cost::write(self.len))
    }

    /// Limits hold the first I/O: others may lock the range meanwhile.
    pub(crate) fn unlock(&mut self) {
        self.guard = None;
    }

    /// Handles the completion of an I/O.
    pub(crate) fn on_io(&mut self) {
        self.has_begun = true;
    }
}

impl Drain {
    /// Starts to wait; call it after the change that excludes further I/O.
    pub(crate) fn new(volume_state: &Arc<VolumeState>) -> Drain {
        Drain { volume_state: volume_state.clone(), since: volume_state.in_flight.now() }
    }

    /// Whether that I/O is complete, of all users; call it until it returns true.
    pub(crate) fn is_over(&self) -> bool {
        self.volume_state.in_flight.is_over_since(self.since)
    }
}

impl Watch {
    /// Watches `ranges`, each an offset and a length in bytes.
    pub(crate) fn new(volume_state: &Arc<VolumeState>, ranges: Arc<[ByteRange]>) -> Watch {
        let (watched, since) = volume_state.in_flight.watch(ranges);
        Watch { volume_state: volume_state.clone(), watched, since }
    }

    /// Whether all I/O that was admitted without seeing the watch is complete; call it until it
    /// returns true.
    pub(crate) fn has_begun(&self) -> bool {
        self.volume_state.in_flight.is_over_since(self.since)
    }

    /// Whether an I/O that changes a byte of the ranges has been admitted since.
    pub(crate) fn has_changed(&self) -> bool {
        self.watched.has_changed()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.volume_state.in_flight.unwatch(&self.watched);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume_state::{IoCounter, IoGuard, NotAdmitted};
    use blockmux_volume::{MemVolume, Op};
    use std::rc::Rc;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn volume_state() -> Arc<VolumeState> {
        VolumeState::new(Arc::new(MemVolume::new(1 << 20)))
    }

    fn admit(counter: &Rc<IoCounter>, range: ByteRange, changes: bool, owns_lock: bool) -> Option<IoGuard> {
        let op = if changes { Op::Write { fua: false } } else { Op::Read };
        let admitted: Result<_, NotAdmitted<()>> = counter.clone().admit(op, range, owns_lock, || Ok(()));
        admitted.ok()
    }

    fn pass(counter: &Rc<IoCounter>, offset: u64, len: u64, changes: bool) -> Option<IoGuard> {
        admit(counter, (offset, len), changes, false)
    }

    fn pass_locked(counter: &Rc<IoCounter>, offset: u64, len: u64) -> IoGuard {
        admit(counter, (offset, len), true, true).unwrap()
    }

    #[test]
    fn a_locked_range_excludes_others_until_it_is_dropped() {
        let volume_state = volume_state();
        let counter = IoCounter::new(&volume_state);
        let first = RangeGuard::lock(&volume_state, 512, 512).unwrap();
        assert!(first.is_alone());
        assert!(RangeGuard::lock(&volume_state, 0, 513).is_none());
        let second = RangeGuard::lock(&volume_state, 1024, 512).unwrap();
        assert!(pass(&counter, 1023, 1, false).is_none() && pass(&counter, 1535, 1, false).is_none());
        assert!(pass(&counter, 0, 512, false).is_some() && pass(&counter, 1536, 4096, false).is_some());
        drop(first);
        assert!(pass(&counter, 512, 512, false).is_some() && pass(&counter, 512, 513, false).is_none());
        drop(second);
        assert!(pass(&counter, 0, 1 << 20, false).is_some());
    }

    #[test]
    fn a_lock_waits_only_for_io_that_began_before() {
        let volume_state = volume_state();
        let (one, other) = (IoCounter::new(&volume_state), IoCounter::new(&volume_state));
        let before = pass(&one, 0, 512, false).unwrap();
        let guard = RangeGuard::lock(&volume_state, 0, 512).unwrap();
        assert!(!guard.is_alone());
        // Other I/O outside the range continues without a gap.
        let mut beside = pass(&other, 4096, 512, false).unwrap();
        for _ in 0..10 {
            beside = pass(&other, 4096, 512, false).unwrap();
            assert!(!guard.is_alone());
        }
        drop(before);
        for _ in 0..3 {
            guard.is_alone();
            beside = pass(&other, 4096, 512, false).unwrap();
        }
        assert!(guard.is_alone());
        drop(beside);
    }

    #[test]
    fn watchers_are_notified_only_of_changes() {
        let volume_state = volume_state();
        let counter = IoCounter::new(&volume_state);
        let before = pass(&counter, 0, 512, true).unwrap();
        let watch = Watch::new(&volume_state, [(512, 512), (4096, 512)].into());
        assert!(!watch.has_begun());
        drop(before);
        assert!(watch.has_begun());
        for (offset, changes) in [(512, false), (0, true), (1024, true)] {
            pass(&counter, offset, 512, changes).unwrap();
            assert!(!watch.has_changed(), "{offset}");
        }
        pass(&counter, 4607, 1, true).unwrap();
        assert!(watch.has_changed());
        let other = Watch::new(&volume_state, [(4096, 512)].into());
        let guard = RangeGuard::lock(&volume_state, 4096, 512).unwrap();
        assert!(pass(&counter, 4096, 1, true).is_none() && !other.has_changed(), "it has not begun");
        drop((guard, watch, other));
        assert_eq!(volume_state.in_flight.watches(), 0);
    }

    #[test]
    fn a_drain_waits_for_what_was_in_flight_and_for_nothing_that_began_after_it() {
        let volume_state = volume_state();
        let (one, other) = (IoCounter::new(&volume_state), IoCounter::new(&volume_state));
        assert!(Drain::new(&volume_state).is_over());
        let before = [pass(&one, 0, 512, false).unwrap(), pass_locked(&other, 512, 512)];
        let drain = Drain::new(&volume_state);
        let mut after = pass(&one, 4096, 512, true).unwrap();
        for guard in before {
            assert!(!drain.is_over());
            drop(guard);
        }
        // I/O without a gap does not delay the lock.
        for _ in 0..3 {
            drain.is_over();
            after = pass(&one, 4096, 512, true).unwrap();
        }
        assert!(drain.is_over());
        drop(after);
    }

    #[test]
    fn nobody_waits_for_a_paused_io_and_it_sees_all_changes_when_it_is_admitted_again() {
        let volume_state = volume_state();
        let counter = IoCounter::new(&volume_state);
        let mut paused = pass(&counter, 0, 512, true).unwrap();
        let mut readmit = |range, check: Result<(), ()>| {
            paused.pause();
            paused.readmit(Op::Write { fua: false }, range, || check)
        };
        assert_eq!(readmit((0, 512), Ok(())), Ok(()));
        assert!(!Drain::new(&volume_state).is_over(), "it is counted again");
        let guard = RangeGuard::lock(&volume_state, 0, 512).unwrap();
        assert_eq!(readmit((0, 512), Ok(())), Err(NotAdmitted::Locked));
        assert!(guard.is_alone() && Drain::new(&volume_state).is_over());
        drop(guard);
        let watch = Watch::new(&volume_state, [(0, 512)].into());
        assert!(watch.has_begun());
        assert_eq!(readmit((0, 512), Err(())), Err(NotAdmitted::Denied(())));
        assert!(!watch.has_changed() && Drain::new(&volume_state).is_over());
        assert_eq!(readmit((0, 512), Ok(())), Ok(()));
        assert!(watch.has_changed() && !Drain::new(&volume_state).is_over());
        drop(paused);
        assert!(Drain::new(&volume_state).is_over());
    }

    #[test]
    fn an_atomic_range_is_free_for_others_while_limits_hold_its_first_io() {
        let volume_state = volume_state();
        let counter = IoCounter::new(&volume_state);
        let (mut range, mut other) =
            (AtomicRange::new(&volume_state, 0, 1024), AtomicRange::new(&volume_state, 512, 512));
        assert!(range.lock() && !other.lock());
        let mut first = pass_locked(&counter, 0, 1024);
        first.pause();
        range.unlock();
        assert!(other.lock() && !range.lock(), "the other command comes first");
        drop(other);
        assert!(range.lock() && pass(&counter, 0, 512, true).is_none());
        assert_eq!(first.readmit(Op::Read, (0, 1024), || Ok::<_, ()>(())), Ok(()));
        // The first one has paid for all of its I/O.
        assert_eq!(range.cost(), Some(Cost::write(1024)));
        range.on_io();
        assert_eq!(range.cost(), None);
    }

    #[test]
    fn a_dropped_counter_blocks_nobody() {
        let volume_state = volume_state();
        let counter = IoCounter::new(&volume_state);
        let io = pass(&counter, 0, 1, false).unwrap();
        drop(counter);
        let guard = RangeGuard::lock(&volume_state, 0, 1).unwrap();
        assert!(!guard.is_alone(), "its I/O is still in flight");
        drop(io);
        assert!(guard.is_alone());
        assert!(volume_state.in_flight.has_no_counters());
    }

    #[test]
    fn increments_under_locks_and_plain_ones_on_other_threads_are_never_lost() {
        // The cell is read and written in two steps, like a disk. Only one thread at a time may be
        // between them.
        let (volume_state, cell) = (volume_state(), AtomicU64::new(0));
        let rounds = 2000;
        std::thread::scope(|scope| {
            for nth in 0..3 {
                let (volume_state, cell) = (&volume_state, &cell);
                scope.spawn(move || {
                    let counter = IoCounter::new(volume_state);
                    for _ in 0..rounds {
                        loop {
                            let Some(guard) = RangeGuard::lock(volume_state, 0, 512) else {
                                std::thread::yield_now();
                                continue;
                            };
                            while !guard.is_alone() {
                                std::thread::yield_now();
                            }
                            let seen = cell.load(Ordering::Relaxed);
                            if nth == 0 {
                                std::thread::yield_now();
                            }
                            cell.store(seen + 1, Ordering::Relaxed);
                            break;
                        }
                        // Taking the lock is one indivisible step.
                        let guard = loop {
                            match pass(&counter, 0, 512, false) {
                                Some(guard) => break guard,
                                None => std::thread::yield_now(),
                            }
                        };
                        cell.fetch_add(1, Ordering::Relaxed);
                        drop(guard);
                    }
                });
            }
        });
        assert_eq!(cell.into_inner(), 3 * 2 * rounds);
    }
}
