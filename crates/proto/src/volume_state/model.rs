//! Model check of `in_flight`: this module compiles that file again, over the atomics and locks of
//! `interleavings`, and runs every interleaving. Each test describes what would be lost without a
//! step of the order.
//!
//! A throttled write that begins, a drain, a preempt and a fence run together, and so do a write,
//! the lock of its range, and each of a preempt and a fence. All five threads at once are not run:
//! whatever excludes a write, it has to see each of the others alone, and these meet only in the
//! mutex and in the counts, which three drains at once already share.

mod sync {
    pub(super) use super::super::interleavings::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
    pub(super) use super::super::interleavings::{Mutex, MutexGuard};
    pub(super) use std::sync::PoisonError;
    pub(super) use std::sync::atomic::Ordering;

    /// No-op: the model runs one thread at a time, so all accesses are in one order.
    pub(super) fn fence(_order: Ordering) {}
}

#[path = "in_flight.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    clippy::duplicate_mod,
    reason = "the product has it over other atomics; unit tests use the rest"
)]
mod in_flight;

use super::interleavings::{call, in_every_interleaving, pause};
use in_flight::{AdmissionRequest, Counter, Fenced, InFlight, NeededRange, NotAdmitted};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// State that the writer and the other threads share. The atomics of `std` are not of the model:
/// what they contain follows from what the threads have done.
struct Shared {
    in_flight: InFlight,
    /// Counts of the I/O of the writer and of the thread that locks, in epoch 0.
    counters: [Arc<Counter>; 2],
    /// The reservation table's generation: a different one excludes the writer.
    generation: sync::AtomicU32,
    /// Number of requests that are throttled.
    throttled: sync::AtomicU32,
    /// Whether the writer's request is throttled.
    is_throttled: AtomicBool,
    /// Number of writes in progress.
    writing: AtomicU32,
    /// Whether an epoch has begun that fences the writer.
    is_next_epoch: AtomicBool,
}

/// Why an I/O has not begun.
#[derive(Debug, PartialEq, Eq, Hash)]
enum NotBegun {
    Locked,
    Denied,
}

/// The writer is excluded by a reservation or fenced.
struct Excluded;

impl From<Fenced> for Excluded {
    fn from(_: Fenced) -> Excluded {
        Excluded
    }
}

const RANGE: (u64, u64) = (0, 512);

impl Shared {
    fn new() -> Shared {
        let in_flight = InFlight::default();
        Shared {
            counters: [0, 0].map(|epoch| in_flight.add_counter(epoch)),
            in_flight,
            generation: sync::AtomicU32::new(0),
            throttled: sync::AtomicU32::new(1),
            is_throttled: AtomicBool::new(true),
            writing: AtomicU32::new(0),
            is_next_epoch: AtomicBool::new(false),
        }
    }

    /// A throttled write begins. It does so at any time, and until then it is not counted as in
    /// flight. If its range is locked, it is tried once more.
    fn write(&self) {
        let mut begun = self.begin(&self.counters[0], false);
        self.is_throttled.store(false, Ordering::Relaxed);
        // After it was counted as in flight, as `Channels` does: one who waits for both misses
        // nothing.
        self.throttled.store(0, Ordering::Relaxed);
        if begun == Err(NotBegun::Locked) {
            begun = self.begin(&self.counters[0], false);
        }
        if let Ok(place) = begun {
            pause();
            self.end(&self.counters[0], place);
        }
    }

    fn begin(&self, counter: &Counter, owns_lock: bool) -> Result<usize, NotBegun> {
        let wanted = AdmissionRequest { range: RANGE, changes: true, owns_lock };
        let check = || match self.generation.load(Ordering::SeqCst) {
            0 => Ok(()),
            _ => Err(Excluded),
        };
        let admitted = call(|| {
            self.in_flight.admit(counter, wanted, check).map_err(|why| match why {
                NotAdmitted::Locked(_) | NotAdmitted::Draining => NotBegun::Locked,
                NotAdmitted::Denied(Excluded) => NotBegun::Denied,
            })
        });
        if admitted.is_ok() {
            assert_eq!(self.writing.fetch_add(1, Ordering::Relaxed), 0, "the range is locked");
            assert!(!self.is_next_epoch.load(Ordering::Relaxed), "it is fenced");
        }
        admitted
    }

    fn end(&self, counter: &Counter, place: usize) {
        self.writing.fetch_sub(1, Ordering::Relaxed);
        counter.end(place);
    }

    /// Locks the range of a write, and writes if it need not wait.
    fn lock_and_write(&self) {
        let Some(since) = call(|| self.in_flight.lock(RANGE)) else { return };
        if call(|| self.in_flight.is_over_since(since)) {
            assert!(!self.is_writing(), "the range is locked");
            if let Ok(place) = self.begin(&self.counters[1], true) {
                pause();
                self.end(&self.counters[1], place);
            }
        }
        call(|| self.in_flight.unlock(RANGE));
    }

    /// Fences the writer, and begins the next epoch if the writer's I/O is complete.
    fn fence(&self) {
        let fenced_at = call(|| self.in_flight.fence());
        if call(|| self.in_flight.begin_epoch(fenced_at, || 1)) {
            self.is_next_epoch.store(true, Ordering::Relaxed);
            assert!(!self.is_writing(), "the next epoch has begun");
        }
    }

    /// Fences the writer for a while, and continues its epoch if its I/O is complete.
    fn pause_epoch(&self) {
        let paused_at = call(|| self.in_flight.pause_epoch());
        if call(|| self.in_flight.is_over_since(paused_at)) {
            assert!(!self.is_writing(), "its I/O is complete");
            assert!(call(|| self.in_flight.begin_epoch(paused_at, || 1)));
        }
    }

    fn preempt(&self) {
        self.generation.store(1, Ordering::SeqCst);
        let since = call(|| self.in_flight.now());
        assert!(!call(|| self.in_flight.is_over_since(since)) || !self.is_writing());
    }

    /// Waits for all I/O that was throttled or in flight, as `Settling` does.
    fn settle(&self) {
        if self.throttled.load(Ordering::Relaxed) == 0 {
            let since = call(|| self.in_flight.now());
            if call(|| self.in_flight.is_over_since(since)) {
                assert!(!self.is_throttled.load(Ordering::Relaxed) && !self.is_writing());
            }
        }
    }

    fn is_writing(&self) -> bool {
        self.writing.load(Ordering::Relaxed) != 0
    }
}

/// Runs a write and `other` in every interleaving. `other` checks once whether all I/O is complete;
/// further checks would add no other outcome.
fn beside_a_write(other: fn(&Shared)) {
    in_every_interleaving(Shared::new, [Shared::write, other], |_| ());
}

#[test]
fn a_write_sees_the_lock_or_is_waited_for() {
    beside_a_write(Shared::lock_and_write);
}

#[test]
fn a_write_sees_the_reservation_or_is_waited_for() {
    beside_a_write(Shared::preempt);
}

#[test]
fn a_write_is_fenced_or_complete_when_the_next_epoch_begins() {
    beside_a_write(Shared::fence);
}

#[test]
fn a_write_is_fenced_or_complete_while_its_epoch_is_paused() {
    in_every_interleaving(Shared::new, [Shared::write, Shared::pause_epoch], |shared| {
        // Its user is admitted again once the epoch continues, which a test of the end shows.
        let paused_at = shared.in_flight.pause_epoch();
        assert!(shared.in_flight.begin_epoch(paused_at, || 1), "the write is complete");
        assert!(shared.begin(&shared.counters[0], false).is_ok());
    });
}

#[test]
fn a_write_is_throttled_or_in_flight_until_it_is_complete() {
    beside_a_write(Shared::settle);
}

#[test]
fn a_write_notifies_the_watch_or_is_waited_for() {
    beside_a_write(|shared| {
        let (watched, since) = shared.in_flight.watch([RANGE].into());
        if shared.in_flight.is_over_since(since) {
            assert!(!shared.is_writing() || watched.has_changed(), "the watch has missed a write");
        }
    });
}

#[test]
fn a_write_sees_the_lock_and_the_reservation_or_is_waited_for() {
    in_every_interleaving(Shared::new, [Shared::write, Shared::lock_and_write, Shared::preempt], |_| ());
}

#[test]
fn a_write_sees_the_lock_and_is_fenced_or_is_waited_for() {
    in_every_interleaving(Shared::new, [Shared::write, Shared::lock_and_write, Shared::fence], |_| ());
}

#[test]
fn a_write_is_throttled_begins_is_drained_preempted_and_fenced_in_any_order() {
    let threads = [Shared::write, Shared::settle, Shared::preempt, Shared::fence];
    in_every_interleaving(Shared::new, threads, |shared| {
        // A new session is admitted as soon as an epoch has begun.
        let new = shared.in_flight.add_counter(1);
        let wanted = AdmissionRequest { range: RANGE, changes: true, owns_lock: false };
        let admitted = shared.in_flight.admit::<Excluded>(&new, wanted, || Ok(()));
        assert_eq!(admitted.is_ok(), shared.is_next_epoch.load(Ordering::Relaxed));
    });
}

/// One that waits for a range that is locked.
struct Waiter {
    in_flight: InFlight,
    ticket: AtomicU64,
    was_next: AtomicBool,
    was_woken: Arc<AtomicBool>,
}

impl Waiter {
    fn new() -> Waiter {
        let in_flight = InFlight::default();
        in_flight.lock(RANGE).unwrap();
        let (ticket, was_next, was_woken) = Default::default();
        Waiter { in_flight, ticket, was_next, was_woken }
    }

    fn wait(&self) {
        let woken = self.was_woken.clone();
        let wake = Arc::new(move || woken.store(true, Ordering::Relaxed));
        let ticket = self.in_flight.wait(NeededRange::to_lock((256, 512)), wake).unwrap();
        self.ticket.store(ticket, Ordering::Relaxed);
        self.was_next.store(self.in_flight.is_next(ticket), Ordering::Relaxed);
    }
}

#[test]
fn a_command_gets_its_range_or_is_woken_when_it_may() {
    in_every_interleaving(Waiter::new, [Waiter::wait, |waiter| waiter.in_flight.unlock(RANGE)], |waiter| {
        let [was_next, was_woken] =
            [&waiter.was_next, &waiter.was_woken].map(|was| was.load(Ordering::Relaxed));
        assert!(was_next || was_woken, "nobody wakes the one that waits");
        let ticket = waiter.ticket.load(Ordering::Relaxed);
        assert!(waiter.in_flight.is_next(ticket) && waiter.in_flight.lock((256, 512)).is_some());
    });
}
