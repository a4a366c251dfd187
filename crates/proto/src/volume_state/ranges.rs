//! Locked ranges of a volume, for commands that read and write atomically (COMPARE AND WRITE,
//! ORWRITE, WRITE ATOMIC), and waiting for I/O in flight. [`super::in_flight`] explains the memory
//! ordering.

use super::VolumeState;
use super::in_flight::{ByteRange, NeededRange, NotAdmitted, WakeWaiting, Watched};
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

/// Waits for a range that others have locked, behind those that wait longer.
pub struct RangeWait {
    volume_state: Arc<VolumeState>,
    ticket: u64,
    needed: NeededRange,
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

    /// Locks the range unless the command has locked it already. Call it until it succeeds; then
    /// the command's I/O may begin.
    ///
    /// # Errors
    /// If others have locked a byte of the range, or I/O in it that began before is in flight.
    pub(crate) fn lock<E>(&mut self) -> Result<(), NotAdmitted<E>> {
        if self.guard.is_none() {
            self.guard = RangeGuard::lock(&self.volume_state, self.offset, self.len);
        }
        match &self.guard {
            None => Err(NotAdmitted::Locked(NeededRange::to_lock((self.offset, self.len)))),
            Some(guard) if !guard.is_alone() => Err(NotAdmitted::Draining),
            Some(_) => Ok(()),
        }
    }

    /// What limits charge for the next I/O: the first one pays for the command as for one write, so
    /// that limits never hold the others, for which others wait.
    pub(crate) fn cost(&self) -> Option<Cost> {
        (!self.has_begun).then(|| Cost::write(self.len))
    }

    /// Handles the completion of an I/O.
    pub(crate) fn on_io(&mut self) {
        self.has_begun = true;
    }
}

impl RangeWait {
    /// Waits for a range; `wake` is called when it may be this one's turn. `None` if too many wait
    /// already.
    #[must_use]
    pub fn new(volume_state: &Arc<VolumeState>, needed: NeededRange, wake: WakeWaiting) -> Option<RangeWait> {
        let ticket = volume_state.in_flight.wait(needed, wake)?;
        Some(RangeWait { volume_state: volume_state.clone(), ticket, needed })
    }

    /// The range that it waits for.
    #[must_use]
    pub fn needed(&self) -> NeededRange {
        self.needed
    }

    /// Tries to begin the I/O if it is its turn. It waits until this is dropped.
    pub fn try_begin<R>(&self, begin: impl FnOnce() -> R) -> Option<R> {
        let in_flight = &self.volume_state.in_flight;
        if !in_flight.is_next(self.ticket) {
            return None;
        }
        let result = begin();
        in_flight.wait_on(self.ticket);
        Some(result)
    }
}

impl Drop for RangeWait {
    fn drop(&mut self) {
        self.volume_state.in_flight.end_wait(self.ticket);
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
    use crate::volume_state::in_flight::{MAX_OVERTAKEN, MAX_WAITING};
    use crate::volume_state::{Epoch, IoCounter, IoGuard, NotAdmitted};
    use blockmux_volume::{IoError, MemVolume};
    use std::rc::Rc;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn volume_state() -> Arc<VolumeState> {
        VolumeState::new(Arc::new(MemVolume::new(1 << 20)))
    }

    fn admit(counter: &Rc<IoCounter>, range: ByteRange, is_write: bool, owns_lock: bool) -> Option<IoGuard> {
        let admitted: Result<_, NotAdmitted<IoError>> =
            counter.clone().admit(is_write, range, owns_lock, || Ok(()));
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
        let counter = IoCounter::new(&volume_state, Epoch::current());
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
        let (one, other) = (
            IoCounter::new(&volume_state, Epoch::current()),
            IoCounter::new(&volume_state, Epoch::current()),
        );
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
        let counter = IoCounter::new(&volume_state, Epoch::current());
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
        let (one, other) = (
            IoCounter::new(&volume_state, Epoch::current()),
            IoCounter::new(&volume_state, Epoch::current()),
        );
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
    fn an_atomic_range_waits_for_others_and_pays_once() {
        let volume_state = volume_state();
        let counter = IoCounter::new(&volume_state, Epoch::current());
        let (mut range, mut other) =
            (AtomicRange::new(&volume_state, 0, 1024), AtomicRange::new(&volume_state, 512, 512));
        let before = pass(&counter, 0, 512, true).unwrap();
        assert_eq!(range.lock::<()>(), Err(NotAdmitted::Draining));
        let needed = NeededRange::to_lock((512, 512));
        assert_eq!(other.lock::<()>(), Err(NotAdmitted::Locked(needed)));
        drop(before);
        assert_eq!(range.lock::<()>(), Ok(()));
        assert!(pass(&counter, 0, 512, true).is_none());
        // The first I/O pays for all of them.
        assert_eq!(range.cost(), Some(Cost::write(1024)));
        range.on_io();
        assert_eq!(range.cost(), None);
        drop(range);
        assert_eq!(other.lock::<()>(), Ok(()));
    }

    #[test]
    fn who_waits_for_a_range_is_overtaken_a_limited_number_of_times() {
        let volume_state = volume_state();
        let woken: Arc<Mutex<Vec<u32>>> = Arc::default();
        let wait = |id: u32, range: ByteRange| {
            let woken = woken.clone();
            let range = NeededRange::to_lock(range);
            RangeWait::new(&volume_state, range, Arc::new(move || woken.lock().unwrap().push(id))).unwrap()
        };
        let lock = |range: ByteRange| RangeGuard::lock(&volume_state, range.0, range.1);
        let guard = lock((0, 1024)).unwrap();
        let (first, second, beside) = (wait(1, (0, 512)), wait(2, (0, 1024)), wait(3, (512, 512)));
        assert!(first.try_begin(|| ()).is_none());
        drop(guard);
        assert_eq!(*woken.lock().unwrap(), [1], "the others wait behind it");
        for _ in 0..MAX_OVERTAKEN {
            drop(lock((0, 512)).expect("it may be overtaken"));
        }
        assert!(lock((0, 512)).is_none(), "one that comes now is the last");
        woken.lock().unwrap().truncate(1);
        assert!(lock((4096, 512)).is_some());
        assert!(second.try_begin(|| ()).is_none());
        let guard = first.try_begin(|| lock((0, 512))).flatten().expect("it is its turn");
        drop(first);
        assert_eq!(*woken.lock().unwrap(), [1]);
        drop(guard);
        assert_eq!(*woken.lock().unwrap(), [1, 2]);
        assert!(beside.try_begin(|| ()).is_none());
        drop(second);
        assert_eq!(*woken.lock().unwrap(), [1, 2, 3], "the next one follows one that gives up");
        assert!(beside.try_begin(|| lock((512, 512)).is_some()).unwrap());
        drop(beside);
        assert!(lock((0, 1024)).is_some());
    }

    #[test]
    fn the_number_of_those_that_wait_in_order_is_bounded() {
        let volume_state = volume_state();
        let wait = || RangeWait::new(&volume_state, NeededRange::to_lock((0, 512)), Arc::new(|| ()));
        let mut all: Vec<_> = (0..MAX_WAITING).map(|_| wait().unwrap()).collect();
        assert!(wait().is_none());
        all.pop();
        assert!(wait().is_some());
    }

    #[test]
    fn io_waits_behind_nobody_who_waits() {
        let volume_state = volume_state();
        let counter = IoCounter::new(&volume_state, Epoch::current());
        let guard = RangeGuard::lock(&volume_state, 0, 512).unwrap();
        let _wait = RangeWait::new(&volume_state, NeededRange::to_lock((0, 1024)), Arc::new(|| ())).unwrap();
        assert!(pass(&counter, 0, 512, false).is_none() && pass(&counter, 512, 512, true).is_some());
        drop(guard);
        assert!(pass(&counter, 0, 512, false).is_some());
    }

    #[test]
    fn io_that_locks_nothing_is_woken_as_soon_as_its_range_is_unlocked() {
        let volume_state = volume_state();
        let woken: Arc<Mutex<Vec<u32>>> = Arc::default();
        let wait = |id: u32, needed: NeededRange| {
            let woken = woken.clone();
            RangeWait::new(&volume_state, needed, Arc::new(move || woken.lock().unwrap().push(id))).unwrap()
        };
        let guard = RangeGuard::lock(&volume_state, 0, 1024).unwrap();
        let lock = [wait(1, NeededRange::to_lock((0, 512))), wait(2, NeededRange::to_lock((0, 512)))];
        let io = [wait(3, NeededRange::of_io((0, 512))), wait(4, NeededRange::of_io((512, 512)))];
        assert!(io[0].try_begin(|| ()).is_none());
        drop(guard);
        assert_eq!(*woken.lock().unwrap(), [1, 3, 4]);
        let counter = IoCounter::new(&volume_state, Epoch::current());
        assert!(io[0].try_begin(|| pass(&counter, 0, 512, false)).flatten().is_some());
        // The end of a wait wakes no older waiter, and no waiter that is not a lock.
        let (_beside, _behind) =
            (wait(5, NeededRange::of_io((0, 512))), wait(6, NeededRange::to_lock((256, 512))));
        drop(io);
        assert_eq!(*woken.lock().unwrap(), [1, 3, 4]);
        drop(lock);
        assert_eq!(*woken.lock().unwrap(), [1, 3, 4, 2]);
    }

    #[test]
    fn a_dropped_counter_blocks_nobody() {
        let volume_state = volume_state();
        let counter = IoCounter::new(&volume_state, Epoch::current());
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
                    let counter = IoCounter::new(volume_state, Epoch::current());
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
