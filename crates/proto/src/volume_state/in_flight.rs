//! The I/O in flight on a volume: every user counts its own, and others can wait for all of it.
//!
//! # Order of admission
//! [`InFlight::admit`] admits the I/O of every protocol:
//!
//! 1. it **counts** the I/O as in flight,
//! 2. then it checks the **epoch** and **locked ranges**,
//! 3. then the caller checks **reservations** and aborts,
//! 4. then it marks the **watches** of the range as changed.
//!
//! A thread that excludes I/O does the opposite: it first publishes the fence, the lock, the
//! changed reservation or the watch, and then reads the counts. All of these accesses are
//! sequentially consistent. So for every I/O and every such change, either the I/O sees the change
//! and does not start, or its count is seen and waited for. If the I/O were counted after a check,
//! a write that was checked just before a lock could land between the comparison and the write of a
//! COMPARE AND WRITE, and a write that was admitted just before a PREEMPT could reach the volume
//! after the PREEMPT was answered. `model.rs` runs this code through every interleaving of up to
//! four threads.
//!
//! # Epochs
//! A user belongs to the epoch in which it began, and a fence ends the epochs of all users. The
//! next epoch begins when the I/O of the earlier ones is complete (`epoch.rs`). A pause fences all
//! users, too, and the epoch continues afterwards, or ends. The epoch shares a
//! word with the number of locks: without locks, an I/O of the current epoch passes both by one
//! comparison.
//!
//! # Order of those that wait for a range
//! [`InFlight::wait`] appends to a queue. When a lock ends, the first of those that wait to lock a
//! byte of its range is woken. Until it comes, others may lock the range, but only
//! [`MAX_OVERTAKEN`] times: if all had to wait behind it, each lock would cost a wake-up of another
//! core. Other I/O does not wait behind the queue: it is woken as soon as no byte of its range is
//! locked, because a lock waits only for I/O that began before it.
//!
//! # Two counts
//! A counter has two counts. New I/O is counted in the current one, so the other reaches zero
//! however busy the volume is; then they are swapped. A waiter is done when both have been zero
//! (the readers' side of sleepable RCU). An I/O costs one atomic operation on memory that no other
//! core writes, and two loads of memory that rarely changes.

use super::sync::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError, fence,
};
#[cfg(test)]
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// The I/O in flight on one volume, and the locks and watches of its ranges.
#[derive(Default)]
pub(super) struct InFlight {
    /// What excludes I/O. Upper half: number of locked ranges. Lower half: the epoch; users of
    /// earlier ones are fenced.
    excluding: AtomicU64,
    /// Number of watches.
    watches: AtomicUsize,
    /// Index of the count for new I/O.
    current: AtomicUsize,
    exclusion: Mutex<Exclusion>,
    counters: Mutex<Vec<Arc<Counter>>>,
}

#[derive(Default)]
struct Exclusion {
    /// The epoch, or [`NO_EPOCH`] from a fence until the next one begins.
    epoch: u32,
    /// The number of the next epoch; `None` if it is found when that begins.
    next_epoch: Option<u32>,
    /// The time of the last fence.
    fenced_at: u64,
    locked: Vec<ByteRange>,
    /// I/O that waits for locked ranges, the oldest first.
    waiting: Vec<Waiting>,
    last_ticket: u64,
    watched: Vec<Arc<Watched>>,
    /// Logical time: number of fences, locks, watches and drains so far.
    clock: u64,
    /// For each count, the clock when it was last zero in every counter.
    emptied: [u64; 2],
}

/// An I/O that waits for a range.
struct Waiting {
    ticket: u64,
    needed: NeededRange,
    wake: WakeWaiting,
    /// It is being tried, so it does not wait for itself.
    is_tried: bool,
    /// How often others have locked a part of its range while it was the first to wait for it.
    overtaken: u32,
}

/// Wakes who waits for a range, from any thread.
pub type WakeWaiting = Arc<dyn Fn() + Send + Sync>;

/// Offset and length in bytes.
pub(super) type ByteRange = (u64, u64);

/// The I/O in flight of one user on one core, in a cache line of its own.
#[repr(align(128))]
pub(super) struct Counter {
    counts: [AtomicU32; 2],
    /// The epoch in which the user began.
    epoch: u32,
}

/// The I/O was fenced: its user began in an earlier epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fenced;

/// An I/O that requests admission.
#[derive(Clone, Copy)]
pub(super) struct AdmissionRequest {
    pub(super) range: ByteRange,
    /// Whether it changes the data.
    pub(super) changes: bool,
    /// Whether the requester holds the lock of its range.
    pub(super) owns_lock: bool,
}

/// The range that must not be locked for an I/O to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeededRange {
    range: ByteRange,
    /// Whether the command will lock the range.
    locks: bool,
}

impl NeededRange {
    /// The range of an I/O: offset and length in bytes.
    #[must_use]
    pub const fn of_io(range: (u64, u64)) -> NeededRange {
        NeededRange { range, locks: false }
    }

    /// The range that a command will lock, offset and length in bytes; that of its I/O may be
    /// shorter.
    #[must_use]
    pub const fn to_lock(range: (u64, u64)) -> NeededRange {
        NeededRange { range, locks: true }
    }
}

/// Reason for which an I/O was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotAdmitted<E> {
    /// A byte of this range is locked.
    Locked(NeededRange),
    /// It has locked its range, but I/O that began before is in flight.
    Draining,
    /// The caller's check failed, or the I/O was fenced.
    Denied(E),
}

impl<E> NotAdmitted<E> {
    /// Converts the error of a failed check.
    pub(crate) fn map<F>(self, convert: impl FnOnce(E) -> F) -> NotAdmitted<F> {
        match self {
            NotAdmitted::Locked(needed) => NotAdmitted::Locked(needed),
            NotAdmitted::Draining => NotAdmitted::Draining,
            NotAdmitted::Denied(error) => NotAdmitted::Denied(convert(error)),
        }
    }
}

/// Ranges that are watched for changes.
pub(super) struct Watched {
    ranges: Arc<[ByteRange]>,
    has_changed: AtomicBool,
}

impl Watched {
    /// Whether an I/O that changes one of the ranges has been admitted.
    pub(super) fn has_changed(&self) -> bool {
        self.has_changed.load(Ordering::SeqCst)
    }
}

impl InFlight {
    /// A counter for a user that began in this epoch.
    pub(super) fn add_counter(&self, epoch: u32) -> Arc<Counter> {
        let counter = Arc::new(Counter { counts: Default::default(), epoch });
        self.counters().push(counter.clone());
        counter
    }

    /// Removes a counter whose user has ended.
    pub(super) fn remove_counter(&self, counter: &Arc<Counter>) {
        self.counters().retain(|other| !Arc::ptr_eq(other, counter));
    }

    /// Admits an I/O in the order that the module documentation describes. Returns the index of the
    /// count that includes it, for [`Counter::end`]. `check` runs after the I/O was counted.
    ///
    /// # Errors
    /// If the I/O is not admitted; it is not counted then.
    #[inline]
    pub(super) fn admit<E: From<Fenced>>(
        &self,
        counter: &Counter,
        wanted: AdmissionRequest,
        check: impl FnOnce() -> Result<(), E>,
    ) -> Result<usize, NotAdmitted<E>> {
        let place = self.current.load(Ordering::Relaxed);
        counter.begin(place);
        let excluding = self.excluding.load(Ordering::SeqCst);
        if excluding > counter.epoch.into()
            && let Err(excluded) = self.check_excluding(excluding, counter.epoch, wanted)
        {
            counter.end(place);
            return Err(excluded);
        }
        if let Err(error) = check() {
            counter.end(place);
            return Err(NotAdmitted::Denied(error));
        }
        if wanted.changes && self.watches.load(Ordering::SeqCst) != 0 {
            self.notify_watchers(wanted.range);
        }
        Ok(place)
    }

    /// Checks what excludes an I/O, unless it is only the current epoch.
    #[cold]
    fn check_excluding<E: From<Fenced>>(
        &self,
        excluding: u64,
        epoch: u32,
        wanted: AdmissionRequest,
    ) -> Result<(), NotAdmitted<E>> {
        if is_fenced(excluding, epoch) {
            return Err(NotAdmitted::Denied(Fenced.into()));
        }
        if !wanted.owns_lock && self.is_locked(wanted.range) {
            return Err(NotAdmitted::Locked(NeededRange::of_io(wanted.range)));
        }
        Ok(())
    }

    /// Ends the epochs of all users. Returns the time of the fence, for [`InFlight::begin_epoch`].
    pub(super) fn fence(&self) -> u64 {
        self.fence_until(|_| None)
    }

    /// Fences all users until [`InFlight::begin_epoch`], which continues the present epoch: users
    /// of it are admitted again.
    pub(super) fn pause_epoch(&self) -> u64 {
        self.fence_until(|exclusion| match exclusion.epoch {
            NO_EPOCH => exclusion.next_epoch,
            present => Some(present),
        })
    }

    /// Fences all users until the epoch with this number begins, to which those belong that begin
    /// from now on.
    pub(super) fn fence_until_epoch(&self, next: u32) -> u64 {
        self.fence_until(|_| Some(next))
    }

    fn fence_until(&self, next: impl FnOnce(&Exclusion) -> Option<u32>) -> u64 {
        let mut exclusion = self.exclusion();
        exclusion.next_epoch = next(&exclusion);
        exclusion.epoch = NO_EPOCH;
        self.publish(&exclusion);
        exclusion.fenced_at = exclusion.tick();
        exclusion.fenced_at
    }

    /// Begins an epoch after a fence, with the number that the fence has chosen or the next one,
    /// once all I/O that was admitted before it is complete; call it until it returns true. A later
    /// fence begins the epoch instead.
    pub(super) fn begin_epoch(&self, fenced_at: u64, next: impl FnOnce() -> u32) -> bool {
        let mut exclusion = self.exclusion();
        if exclusion.epoch != NO_EPOCH || exclusion.fenced_at != fenced_at {
            return true;
        }
        let is_drained = self.has_emptied(&mut exclusion, fenced_at);
        if is_drained {
            exclusion.epoch = exclusion.next_epoch.take().unwrap_or_else(next);
            self.publish(&exclusion);
        }
        is_drained
    }

    /// Continues the epoch that was paused then, although I/O may be in flight: nothing has changed
    /// meanwhile. A later fence stays.
    pub(super) fn continue_epoch(&self, paused_at: u64) {
        let mut exclusion = self.exclusion();
        if exclusion.epoch == NO_EPOCH
            && exclusion.fenced_at == paused_at
            && let Some(paused) = exclusion.next_epoch.take()
        {
            exclusion.epoch = paused;
            self.publish(&exclusion);
        }
    }

    /// Ends the epoch that was paused then: its users stay fenced when the epoch with this number
    /// begins. A later fence stays.
    pub(super) fn end_paused_epoch(&self, paused_at: u64, next: u32) {
        let mut exclusion = self.exclusion();
        if exclusion.epoch == NO_EPOCH && exclusion.fenced_at == paused_at {
            exclusion.next_epoch = Some(next);
        }
    }

    /// Whether users of this epoch are fenced for good.
    pub(super) fn has_ended(&self, epoch: u32) -> bool {
        let exclusion = self.exclusion();
        let present = if exclusion.epoch == NO_EPOCH { exclusion.next_epoch } else { Some(exclusion.epoch) };
        present.is_none_or(|present| epoch < present)
    }

    /// Whether users of this epoch are fenced.
    pub(super) fn is_fenced(&self, epoch: u32) -> bool {
        is_fenced(self.excluding.load(Ordering::SeqCst), epoch)
    }

    /// Locks a range if no byte of it is locked and nobody who waits for it was overtaken too
    /// often. Returns the time of the lock: [`InFlight::is_over_since`] returns whether all I/O
    /// that did not see the lock has completed.
    pub(super) fn lock(&self, range: ByteRange) -> Option<u64> {
        let mut exclusion = self.exclusion();
        if exclusion.has_locked(range) || !exclusion.overtake(range) {
            return None;
        }
        exclusion.locked.push(range);
        self.publish(&exclusion);
        Some(exclusion.tick())
    }

    /// Unlocks a range, and wakes those whose turn it is.
    pub(super) fn unlock(&self, range: ByteRange) {
        let mut exclusion = self.exclusion();
        // Locked ranges do not overlap, so equal ones are the same.
        if let Some(place) = exclusion.locked.iter().position(|&other| other == range) {
            exclusion.locked.swap_remove(place);
        }
        self.publish(&exclusion);
        let next = exclusion.next_in(range, |_, _| true);
        drop(exclusion);
        next.iter().for_each(|wake| wake());
    }

    /// Whether a byte of the range is locked.
    #[cold]
    pub(super) fn is_locked(&self, range: ByteRange) -> bool {
        self.exclusion().has_locked(range)
    }

    /// Waits for a range; returns the ticket. `wake` is called when it may be the ticket's turn.
    /// `None` if [`MAX_WAITING`] wait already.
    pub(super) fn wait(&self, needed: NeededRange, wake: WakeWaiting) -> Option<u64> {
        let mut exclusion = self.exclusion();
        if exclusion.waiting.len() >= MAX_WAITING {
            return None;
        }
        exclusion.last_ticket = exclusion.last_ticket.saturating_add(1);
        let ticket = exclusion.last_ticket;
        exclusion.waiting.push(Waiting { ticket, needed, wake, is_tried: false, overtaken: 0 });
        Some(ticket)
    }

    /// Whether it is the ticket's turn: nobody else has locked a byte of its range or, if it will
    /// lock the range, waits longer for a byte of it. If so, its I/O may be tried until
    /// [`InFlight::wait_on`].
    pub(super) fn is_next(&self, ticket: u64) -> bool {
        let mut exclusion = self.exclusion();
        let Some(at) = exclusion.waiting.iter().position(|waiting| waiting.ticket == ticket) else {
            return false;
        };
        let is_next = exclusion.is_next(at);
        if let Some(waiting) = exclusion.waiting.get_mut(at) {
            waiting.is_tried = is_next;
        }
        is_next
    }

    /// Ends the try of a ticket.
    pub(super) fn wait_on(&self, ticket: u64) {
        let mut exclusion = self.exclusion();
        exclusion.waiting.iter_mut().filter(|waiting| waiting.ticket == ticket).for_each(|waiting| {
            waiting.is_tried = false;
        });
    }

    /// Ends the wait of a ticket, and wakes those whose turn it is.
    pub(super) fn end_wait(&self, ticket: u64) {
        let mut exclusion = self.exclusion();
        let Some(at) = exclusion.waiting.iter().position(|waiting| waiting.ticket == ticket) else { return };
        let range = exclusion.waiting.remove(at).needed.range;
        // A lock waits for older waiters, and other waiters wait for none. To wake them as well is
        // quadratic in the number of readers that wait for one lock.
        let next = exclusion.next_in(range, |place, needed| place >= at && needed.locks);
        drop(exclusion);
        next.iter().for_each(|wake| wake());
    }

    /// Watches ranges; returns the watch and its time.
    pub(super) fn watch(&self, ranges: Arc<[ByteRange]>) -> (Arc<Watched>, u64) {
        let watched = Arc::new(Watched { ranges, has_changed: AtomicBool::new(false) });
        let mut exclusion = self.exclusion();
        exclusion.watched.push(watched.clone());
        self.watches.store(exclusion.watched.len(), Ordering::SeqCst);
        (watched, exclusion.tick())
    }

    /// Ends a watch.
    pub(super) fn unwatch(&self, watched: &Arc<Watched>) {
        let mut exclusion = self.exclusion();
        exclusion.watched.retain(|other| !Arc::ptr_eq(other, watched));
        self.watches.store(exclusion.watched.len(), Ordering::SeqCst);
    }

    /// The current time, which is later than that of every change published before.
    pub(super) fn now(&self) -> u64 {
        self.exclusion().tick()
    }

    /// Number of watches.
    #[cfg(test)]
    pub(super) fn watches(&self) -> usize {
        self.watches.load(Ordering::SeqCst)
    }

    /// Whether there are no counters.
    #[cfg(test)]
    pub(super) fn has_no_counters(&self) -> bool {
        self.counters().is_empty()
    }

    /// Whether all I/O that was counted before `since` has completed; call it until it returns
    /// true.
    pub(super) fn is_over_since(&self, since: u64) -> bool {
        self.has_emptied(&mut self.exclusion(), since)
    }

    fn has_emptied(&self, exclusion: &mut Exclusion, since: u64) -> bool {
        if exclusion.emptied.iter().any(|&at| at < since) {
            self.settle(exclusion);
        }
        exclusion.emptied.iter().all(|&at| at >= since)
    }

    /// Publishes a changed epoch or number of locks.
    fn publish(&self, exclusion: &Exclusion) {
        let locks = (exclusion.locked.len() as u64).wrapping_shl(u32::BITS);
        self.excluding.store(locks | u64::from(exclusion.epoch), Ordering::SeqCst);
    }

    /// Records which counts are zero. If the count that is not current is zero and the current one
    /// is not, the two are swapped, so that the current one can reach zero.
    fn settle(&self, exclusion: &mut Exclusion) {
        let counters = self.counters();
        let is_empty = |place| counters.iter().all(|counter| counter.is_empty(place));
        for _ in 0..2 {
            let current = self.current.load(Ordering::Relaxed);
            let resting = current ^ 1;
            if is_empty(current) {
                exclusion.see_empty(current);
            }
            if !is_empty(resting) {
                return;
            }
            exclusion.see_empty(resting);
            if exclusion.emptied.get(current) == Some(&exclusion.clock) {
                return;
            }
            self.current.store(resting, Ordering::SeqCst);
        }
    }

    #[cold]
    fn notify_watchers(&self, range: ByteRange) {
        for watched in &self.exclusion().watched {
            if watched.ranges.iter().any(|&other| is_overlap(other, range)) {
                watched.has_changed.store(true, Ordering::SeqCst);
            }
        }
    }

    fn exclusion(&self) -> MutexGuard<'_, Exclusion> {
        self.exclusion.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counters(&self) -> MutexGuard<'_, Vec<Arc<Counter>>> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counter {
    #[inline]
    fn begin(&self, place: usize) {
        if let Some(count) = self.counts.get(place) {
            // Sequentially consistent, so that later reads of locks and reservations stay after it.
            count.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Counts the end of an I/O that `place` includes.
    #[inline]
    pub(super) fn end(&self, place: usize) {
        if let Some(count) = self.counts.get(place) {
            // Only this core writes the count, so a load and a store suffice.
            count.store(count.load(Ordering::Relaxed).wrapping_sub(1), Ordering::Release);
        }
    }

    fn is_empty(&self, place: usize) -> bool {
        self.counts.get(place).is_none_or(|count| count.load(Ordering::SeqCst) == 0)
    }
}

impl Exclusion {
    fn has_locked(&self, range: ByteRange) -> bool {
        self.locked.iter().any(|&other| is_overlap(other, range))
    }

    /// Lets a lock overtake the first that waits for its range, or be that one; returns false if it
    /// may not.
    fn overtake(&mut self, range: ByteRange) -> bool {
        let Some(first) = self.waiting.iter_mut().find(|waiting| is_overlap(waiting.needed.range, range))
        else {
            return true;
        };
        let may_lock = first.is_tried || first.overtaken < MAX_OVERTAKEN;
        first.overtaken = first.overtaken.saturating_add(u32::from(!first.is_tried));
        may_lock
    }

    /// Whether it is the turn of the waiting I/O at this place.
    fn is_next(&self, at: usize) -> bool {
        let Some((waiting, older)) = self.waiting.get(..=at).and_then(|all| all.split_last()) else {
            return false;
        };
        let NeededRange { range, locks } = waiting.needed;
        let is_behind = || older.iter().any(|other| is_overlap(other.needed.range, range));
        !self.has_locked(range) && (!locks || !is_behind())
    }

    /// Those whose turn it is after a change in `range`, of those that it `concerns` by place and
    /// need.
    fn next_in(&self, range: ByteRange, concerns: impl Fn(usize, NeededRange) -> bool) -> Vec<WakeWaiting> {
        let all = self.waiting.iter().enumerate().filter(|(at, waiting)| concerns(*at, waiting.needed));
        let in_range = all.filter(|(_, waiting)| is_overlap(waiting.needed.range, range));
        let next = in_range.filter(|(at, _)| self.is_next(*at));
        next.map(|(_, waiting)| waiting.wake.clone()).collect()
    }

    /// The time of a fence, lock, watch or drain that was just published.
    fn tick(&mut self) -> u64 {
        self.clock = self.clock.saturating_add(1);
        // Every later read of a count stays after this.
        fence(Ordering::SeqCst);
        self.clock
    }

    fn see_empty(&mut self, place: usize) {
        if let Some(emptied) = self.emptied.get_mut(place) {
            *emptied = self.clock;
        }
    }
}

/// For `model.rs`, which has to know whether two states are the same.
#[cfg(test)]
impl Hash for Exclusion {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Exclusion { epoch, next_epoch, fenced_at, locked, waiting, last_ticket, watched, clock, emptied } =
            self;
        (epoch, next_epoch, fenced_at, locked, last_ticket, watched.len(), clock, emptied).hash(state);
        for Waiting { ticket, needed, wake: _, is_tried, overtaken } in waiting {
            (ticket, needed.range, needed.locks, is_tried, overtaken).hash(state);
        }
    }
}

/// The model knows the counts themselves.
#[cfg(test)]
impl Hash for Counter {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.epoch.hash(state);
    }
}

/// The maximum number of requests that wait in order for ranges of one volume: each end of a lock
/// looks through them.
pub(super) const MAX_WAITING: usize = 1024;

/// How often the first that waits for a range is overtaken.
pub(super) const MAX_OVERTAKEN: u32 = 64;

/// Stands for the epoch while none is current: every user is fenced.
const NO_EPOCH: u32 = u32::MAX;

/// Whether this value of [`InFlight::excluding`] fences users of an epoch.
fn is_fenced(excluding: u64, epoch: u32) -> bool {
    // The lower half.
    excluding as u32 > epoch
}

fn is_overlap(a: ByteRange, b: ByteRange) -> bool {
    a.0 < b.0.saturating_add(b.1) && b.0 < a.0.saturating_add(a.1)
}
