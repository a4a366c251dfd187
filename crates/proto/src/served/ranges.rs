//! Ranges of a volume that one command has for itself: COMPARE AND WRITE, ORWRITE and WRITE ATOMIC read and write as
//! one, whoever else uses the volume.
//!
//! Commands that lock a range wait for each other. All other I/O passes through a [`Lane`]: it is counted while it is
//! in flight and looks whether ranges are locked, in that order. Who locks first says so and then looks at the counts,
//! and begins when all I/O that may not have seen the lock is over. So one side always sees the other; without the
//! count, a write that began just before the lock could land between the comparison and the write, and be lost.
//!
//! The same counts tell when all is over that was in flight at a point in time ([`Drain`]). Who keeps others out changes
//! the table and then begins a drain; who is let in is counted and then looks whether the table is still what it was let
//! in by. So here, too, one side always sees the other, and what a drain does not wait for never begins.
//!
//! And they tell whether blocks have changed since a point in time ([`Watch`]): what changes them says so before it
//! begins, if anybody watches, and who begins to watch waits for the I/O that may not have known.
//!
//! A lane has two counts. New I/O is counted in the current one, so that the other runs empty however busy the lane is;
//! then they change places, and who locks has seen both of them empty. It costs I/O one atomic operation on memory that
//! no other core touches, and a load of what hardly ever changes.

use super::Served;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The locked ranges of a volume, and all lanes to it.
#[derive(Default)]
pub(super) struct Ranges {
    /// How many are locked.
    count: AtomicUsize,
    /// How many watches there are.
    watches: AtomicUsize,
    /// The place of the count that new I/O is counted in.
    current: AtomicUsize,
    held: Mutex<Held>,
    lanes: Mutex<Vec<Arc<Counts>>>,
}

#[derive(Default)]
struct Held {
    /// Offset and length in bytes.
    ranges: Vec<(u64, u64)>,
    watched: Vec<Arc<Watched>>,
    /// Counts locks and watches.
    clock: u64,
    /// The clock when each count was last seen empty in every lane.
    emptied: [u64; 2],
}

/// I/O in flight of one lane. Nobody else's is in the same line of a processor's cache.
#[derive(Default)]
#[repr(align(128))]
struct Counts([AtomicU32; 2]);

/// One session's I/O on one volume, on one core.
pub(crate) struct Lane {
    served: Arc<Served>,
    counts: Arc<Counts>,
}

/// Counts one I/O as in flight until it is dropped.
pub(crate) struct Passage {
    lane: Rc<Lane>,
    place: usize,
}

/// Keeps a range locked until it is dropped.
pub(crate) struct RangeGuard {
    served: Arc<Served>,
    range: (u64, u64),
    /// The clock when it was locked.
    since: u64,
}

/// Tells when all I/O is over that was in flight when it began: what was admitted before a reservation kept it out, or
/// before it was aborted, still reaches the volume until then.
pub(crate) struct Drain {
    served: Arc<Served>,
    /// The clock when it began.
    since: u64,
}

/// Ranges that somebody watches.
struct Watched {
    ranges: Arc<[(u64, u64)]>,
    has_changed: AtomicBool,
}

/// Tells whether a byte of its ranges may have changed since it began.
pub(crate) struct Watch {
    served: Arc<Served>,
    watched: Arc<Watched>,
    /// The clock when it began.
    since: u64,
}

impl Lane {
    /// A new lane to the volume.
    pub(crate) fn new(served: &Arc<Served>) -> Rc<Lane> {
        let counts = Arc::new(Counts::default());
        served.ranges.lanes().push(counts.clone());
        Rc::new(Lane { served: served.clone(), counts })
    }

    /// Lets an I/O on the range begin that changes it or does not, unless a byte of it is locked.
    #[inline]
    pub(crate) fn pass(self: &Rc<Lane>, offset: u64, len: u64, changes: bool) -> Option<Passage> {
        let ranges = &self.served.ranges;
        let passage = self.count();
        if ranges.count.load(Ordering::SeqCst) != 0 && ranges.overlaps(offset, len) {
            return None;
        }
        if changes {
            ranges.on_change(offset, len);
        }
        Some(passage)
    }

    /// Lets an I/O begin within a range that is locked by who wants it.
    pub(crate) fn pass_locked(self: &Rc<Lane>, offset: u64, len: u64, changes: bool) -> Passage {
        let passage = self.count();
        if changes {
            self.served.ranges.on_change(offset, len);
        }
        passage
    }

    #[inline]
    fn count(self: &Rc<Lane>) -> Passage {
        let place = self.served.ranges.current.load(Ordering::Relaxed);
        if let Some(count) = self.counts.0.get(place) {
            // Before whatever is looked at next, in the one order that all threads agree on.
            count.fetch_add(1, Ordering::SeqCst);
        }
        Passage { lane: self.clone(), place }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.served.ranges.lanes().retain(|counts| !Arc::ptr_eq(counts, &self.counts));
    }
}

impl Drop for Passage {
    #[inline]
    fn drop(&mut self) {
        if let Some(count) = self.lane.counts.0.get(self.place) {
            // Nobody but this core writes it, so that it need not be one operation.
            count.store(count.load(Ordering::Relaxed).wrapping_sub(1), Ordering::Release);
        }
    }
}

impl RangeGuard {
    /// Locks the range, if no byte of it is locked. I/O may begin when [`RangeGuard::is_alone`].
    pub(crate) fn lock(served: &Arc<Served>, offset: u64, len: u64) -> Option<RangeGuard> {
        let mut held = served.ranges.held();
        let range = (offset, len);
        if held.ranges.iter().any(|&other| is_overlap(other, range)) {
            return None;
        }
        held.ranges.push(range);
        served.ranges.count.store(held.ranges.len(), Ordering::SeqCst);
        Some(RangeGuard { served: served.clone(), range, since: held.tick() })
    }

    /// Locks the range if that was not done yet; answers whether its I/O may begin. Ask again until it does.
    pub(crate) fn take(guard: &mut Option<RangeGuard>, served: &Arc<Served>, offset: u64, len: u64) -> bool {
        if guard.is_none() {
            *guard = RangeGuard::lock(served, offset, len);
        }
        guard.as_ref().is_some_and(RangeGuard::is_alone)
    }

    /// Whether all I/O that began without seeing the lock is over; ask again until it is.
    pub(crate) fn is_alone(&self) -> bool {
        self.served.ranges.is_over_since(self.since)
    }
}

impl Drain {
    /// Begins now: after the change that keeps more I/O out.
    pub(crate) fn new(served: &Arc<Served>) -> Drain {
        let since = served.ranges.held().tick();
        Drain { served: served.clone(), since }
    }

    /// Whether what was in flight is over, whoever's it was; ask again until it is.
    pub(crate) fn is_over(&self) -> bool {
        self.served.ranges.is_over_since(self.since)
    }
}

impl Watch {
    /// Watches ranges of offset and length in bytes.
    pub(crate) fn new(served: &Arc<Served>, ranges: Arc<[(u64, u64)]>) -> Watch {
        let watched = Arc::new(Watched { ranges, has_changed: AtomicBool::new(false) });
        let mut held = served.ranges.held();
        held.watched.push(watched.clone());
        served.ranges.watches.store(held.watched.len(), Ordering::SeqCst);
        Watch { served: served.clone(), watched, since: held.tick() }
    }

    /// Whether it has begun: all I/O is over that may not have known of it. Ask again until it has.
    pub(crate) fn has_begun(&self) -> bool {
        self.served.ranges.is_over_since(self.since)
    }

    /// Whether something that changes a byte has begun since.
    pub(crate) fn has_changed(&self) -> bool {
        self.watched.has_changed.load(Ordering::SeqCst)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut held = self.served.ranges.held();
        held.watched.retain(|watched| !Arc::ptr_eq(watched, &self.watched));
        self.served.ranges.watches.store(held.watched.len(), Ordering::SeqCst);
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        let mut held = self.served.ranges.held();
        // Held ranges do not overlap, so equal ones are the same.
        if let Some(place) = held.ranges.iter().position(|&range| range == self.range) {
            held.ranges.swap_remove(place);
        }
        self.served.ranges.count.store(held.ranges.len(), Ordering::SeqCst);
    }
}

impl Ranges {
    /// Whether a byte of the range is locked.
    #[cfg(test)]
    pub(super) fn is_locked(&self, offset: u64, len: u64) -> bool {
        self.count.load(Ordering::SeqCst) != 0 && self.overlaps(offset, len)
    }

    /// A range changes: whoever watches it is told.
    #[inline]
    pub(super) fn on_change(&self, offset: u64, len: u64) {
        if self.watches.load(Ordering::SeqCst) != 0 {
            self.tell_watchers((offset, len));
        }
    }

    #[cold]
    fn tell_watchers(&self, range: (u64, u64)) {
        for watched in &self.held().watched {
            if watched.ranges.iter().any(|&other| is_overlap(other, range)) {
                watched.has_changed.store(true, Ordering::SeqCst);
            }
        }
    }

    /// Whether all I/O is over that began before that time.
    fn is_over_since(&self, since: u64) -> bool {
        let mut held = self.held();
        if held.emptied.iter().any(|&at| at < since) {
            self.settle(&mut held);
        }
        held.emptied.iter().all(|&at| at >= since)
    }

    /// Sees which counts are empty. When the one that rests is, it takes the place of the other, if somebody still waits
    /// for that one.
    fn settle(&self, held: &mut Held) {
        for _ in 0..2 {
            let current = self.current.load(Ordering::Relaxed);
            let resting = current ^ 1;
            if self.is_empty(current) {
                held.see_empty(current);
            }
            if !self.is_empty(resting) {
                return;
            }
            held.see_empty(resting);
            if held.emptied.get(current) == Some(&held.clock) {
                return;
            }
            self.current.store(resting, Ordering::SeqCst);
        }
    }

    fn is_empty(&self, place: usize) -> bool {
        let is_zero =
            |counts: &Arc<Counts>| counts.0.get(place).is_none_or(|count| count.load(Ordering::SeqCst) == 0);
        self.lanes().iter().all(is_zero)
    }

    #[cold]
    fn overlaps(&self, offset: u64, len: u64) -> bool {
        self.held().ranges.iter().any(|&range| is_overlap(range, (offset, len)))
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lanes(&self) -> MutexGuard<'_, Vec<Arc<Counts>>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    /// The time of a lock, watch or drain that was told to all just now.
    fn tick(&mut self) -> u64 {
        self.clock = self.clock.saturating_add(1);
        // Counts are looked at after this, by whoever looks.
        fence(Ordering::SeqCst);
        self.clock
    }

    fn see_empty(&mut self, place: usize) {
        if let Some(emptied) = self.emptied.get_mut(place) {
            *emptied = self.clock;
        }
    }
}

impl std::fmt::Debug for Passage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Passage")
    }
}

fn is_overlap(a: (u64, u64), b: (u64, u64)) -> bool {
    a.0 < b.0.saturating_add(b.1) && b.0 < a.0.saturating_add(a.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::MemVolume;
    use std::sync::atomic::AtomicU64;

    fn served() -> Arc<Served> {
        Served::new(Arc::new(MemVolume::new(1 << 20)))
    }

    #[test]
    fn a_locked_range_keeps_others_out_until_it_is_dropped() {
        let served = served();
        let lane = Lane::new(&served);
        let first = RangeGuard::lock(&served, 512, 512).unwrap();
        assert!(first.is_alone());
        assert!(RangeGuard::lock(&served, 0, 513).is_none());
        let second = RangeGuard::lock(&served, 1024, 512).unwrap();
        assert!(lane.pass(1023, 1, false).is_none() && lane.pass(1535, 1, false).is_none());
        assert!(lane.pass(0, 512, false).is_some() && lane.pass(1536, 4096, false).is_some());
        drop(first);
        assert!(lane.pass(512, 512, false).is_some() && lane.pass(512, 513, false).is_none());
        drop(second);
        assert!(lane.pass(0, 1 << 20, false).is_some());
    }

    #[test]
    fn who_locks_waits_for_io_that_began_before_and_for_no_other() {
        let served = served();
        let (one, other) = (Lane::new(&served), Lane::new(&served));
        let before = one.pass(0, 512, false).unwrap();
        let guard = RangeGuard::lock(&served, 0, 512).unwrap();
        assert!(!guard.is_alone());
        // Beside the range I/O goes on and on without a gap.
        let mut beside = other.pass(4096, 512, false).unwrap();
        for _ in 0..10 {
            beside = other.pass(4096, 512, false).unwrap();
            assert!(!guard.is_alone());
        }
        drop(before);
        for _ in 0..3 {
            guard.is_alone();
            beside = other.pass(4096, 512, false).unwrap();
        }
        assert!(guard.is_alone());
        drop(beside);
    }

    #[test]
    fn who_watches_is_told_of_what_changes_and_of_nothing_else() {
        let served = served();
        let lane = Lane::new(&served);
        let before = lane.pass(0, 512, true).unwrap();
        let watch = Watch::new(&served, [(512, 512), (4096, 512)].into());
        assert!(!watch.has_begun());
        drop(before);
        assert!(watch.has_begun());
        for (offset, changes) in [(512, false), (0, true), (1024, true)] {
            lane.pass(offset, 512, changes).unwrap();
            assert!(!watch.has_changed(), "{offset}");
        }
        lane.pass(4607, 1, true).unwrap();
        assert!(watch.has_changed());
        let other = Watch::new(&served, [(4096, 512)].into());
        let guard = RangeGuard::lock(&served, 4096, 512).unwrap();
        assert!(lane.pass(4096, 1, true).is_none() && !other.has_changed(), "it has not begun");
        drop((guard, watch, other));
        assert_eq!(served.ranges.watches.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_drain_waits_for_what_was_in_flight_and_for_nothing_that_began_after_it() {
        let served = served();
        let (one, other) = (Lane::new(&served), Lane::new(&served));
        assert!(Drain::new(&served).is_over());
        let before = [one.pass(0, 512, false).unwrap(), other.pass_locked(512, 512, true)];
        let drain = Drain::new(&served);
        let mut after = one.pass(4096, 512, true).unwrap();
        for passage in before {
            assert!(!drain.is_over());
            drop(passage);
        }
        // I/O that goes on without a gap holds nobody up.
        for _ in 0..3 {
            drain.is_over();
            after = one.pass(4096, 512, true).unwrap();
        }
        assert!(drain.is_over());
        drop(after);
    }

    #[test]
    fn a_lane_that_is_gone_holds_nobody_up() {
        let served = served();
        let lane = Lane::new(&served);
        let passage = lane.pass(0, 1, false).unwrap();
        drop(lane);
        let guard = RangeGuard::lock(&served, 0, 1).unwrap();
        assert!(!guard.is_alone(), "its I/O is still in flight");
        drop(passage);
        assert!(guard.is_alone());
        assert!(served.ranges.lanes().is_empty());
    }

    #[test]
    fn increments_under_locks_and_plain_ones_on_other_threads_are_never_lost() {
        // A cell that is read and written in two steps, as a disk is; whoever passes or locks has it for itself.
        let (served, cell) = (served(), AtomicU64::new(0));
        let rounds = 2000;
        std::thread::scope(|scope| {
            for nth in 0..3 {
                let (served, cell) = (&served, &cell);
                scope.spawn(move || {
                    let lane = Lane::new(served);
                    for _ in 0..rounds {
                        loop {
                            let Some(guard) = RangeGuard::lock(served, 0, 512) else {
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
                        // One indivisible step, as far as who locks is concerned.
                        let passage = loop {
                            match lane.pass(0, 512, false) {
                                Some(passage) => break passage,
                                None => std::thread::yield_now(),
                            }
                        };
                        cell.fetch_add(1, Ordering::Relaxed);
                        drop(passage);
                    }
                });
            }
        });
        assert_eq!(cell.into_inner(), 3 * 2 * rounds);
    }
}
