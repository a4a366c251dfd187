//! Model check of `in_flight`: this module compiles that file again, with atomics and locks that
//! yield to another thread at each access, and runs every interleaving. Each test describes what
//! would be lost without a step of the order.

mod sync {
    pub(super) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
    pub(super) use shuttle::sync::{Mutex, MutexGuard};
    pub(super) use std::sync::PoisonError;

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

use in_flight::{AdmissionRequest, Counter, Fenced, InFlight, NeededRange, NotAdmitted};
use shuttle::scheduler::RandomScheduler;
use shuttle::sync::atomic::{AtomicU32, Ordering};
use shuttle::{Runner, thread};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// State that the writer and the other threads share.
struct Shared {
    in_flight: InFlight,
    /// Counts of the two writers' I/O, in epoch 0.
    counters: [Arc<Counter>; 2],
    /// The reservation table's generation: a different one excludes the writer.
    generation: AtomicU32,
    /// Number of writes in progress.
    writing: AtomicU32,
    /// Whether an epoch has begun that fences the writer. Not of the model: reading it adds no
    /// interleaving.
    is_next_epoch: AtomicBool,
}

/// Why the writer's I/O is denied.
#[derive(Debug)]
enum Denial {
    Reserved,
    Fenced,
}

impl From<Fenced> for Denial {
    fn from(_: Fenced) -> Denial {
        Denial::Fenced
    }
}

impl Shared {
    fn new() -> Arc<Shared> {
        let in_flight = InFlight::default();
        let counters = [0, 0].map(|epoch| in_flight.add_counter(epoch));
        let (generation, writing) = (AtomicU32::new(0), AtomicU32::new(0));
        Arc::new(Shared { in_flight, counters, generation, writing, is_next_epoch: AtomicBool::new(false) })
    }

    /// Writes once, if admitted. A throttled write does the same later: until it begins, it is not
    /// counted, and nobody waits for it.
    fn write(&self) -> Result<(), NotAdmitted<Denial>> {
        self.write_as(&self.counters[0], false)
    }

    fn write_as(&self, counter: &Counter, owns_lock: bool) -> Result<(), NotAdmitted<Denial>> {
        let wanted = AdmissionRequest { range: (0, 512), changes: true, owns_lock };
        let check = || match self.generation.load(Ordering::SeqCst) {
            0 => Ok(()),
            _ => Err(Denial::Reserved),
        };
        let place = self.in_flight.admit(counter, wanted, check)?;
        self.writing.fetch_add(1, Ordering::SeqCst);
        assert!(!self.is_next_epoch.load(Ordering::SeqCst), "it is fenced");
        self.writing.fetch_sub(1, Ordering::SeqCst);
        counter.end(place);
        Ok(())
    }

    /// Locks the range of a write, and writes if it need not wait.
    fn lock_and_write(&self) {
        if let Some(since) = self.in_flight.lock((0, 512)) {
            if self.in_flight.is_over_since(since) {
                assert!(!self.is_writing(), "the range is locked");
                _ = self.write_as(&self.counters[1], true);
            }
            self.in_flight.unlock((0, 512));
        }
    }

    /// Fences the writer, and begins the next epoch if the writer's I/O is complete.
    fn fence(&self) {
        let fenced_at = self.in_flight.fence();
        if self.in_flight.begin_epoch(fenced_at, || 1) {
            self.is_next_epoch.store(true, Ordering::SeqCst);
            assert!(!self.is_writing(), "the next epoch has begun");
        }
    }

    fn preempt(&self) {
        self.generation.store(1, Ordering::SeqCst);
        let since = self.in_flight.now();
        assert!(!self.in_flight.is_over_since(since) || !self.is_writing());
    }

    fn is_writing(&self) -> bool {
        self.writing.load(Ordering::SeqCst) != 0
    }
}

/// Runs a write and `other` in every interleaving. `other` checks once whether all I/O is complete;
/// further checks would add no other outcome.
fn beside_a_write(other: fn(&Shared)) {
    in_every_order(|_| (), |shared| _ = shared.write(), other);
}

/// Runs `one` and `other` in every interleaving, after `first`. They do as little as possible: a
/// few steps more make it too much.
fn in_every_order(first: fn(&Shared), one: fn(&Shared), other: fn(&Shared)) {
    shuttle::check_dfs(
        move || {
            let shared = Shared::new();
            first(&shared);
            let beside = shared.clone();
            let thread = thread::spawn(move || one(&beside));
            other(&shared);
            thread.join().unwrap();
        },
        None,
    );
}

#[test]
fn a_command_gets_its_range_or_is_woken_when_it_may() {
    shuttle::check_dfs(
        || {
            let in_flight = Arc::new(InFlight::default());
            in_flight.lock((0, 512)).unwrap();
            let beside = in_flight.clone();
            let other = thread::spawn(move || {
                let woken = Arc::new(std::sync::atomic::AtomicBool::new(false));
                let wake = woken.clone();
                let ticket = beside
                    .wait(
                        NeededRange::to_lock((256, 512)),
                        Arc::new(move || wake.store(true, Ordering::SeqCst)),
                    )
                    .unwrap();
                (ticket, beside.is_next(ticket), woken)
            });
            in_flight.unlock((0, 512));
            let (ticket, was_next, woken) = other.join().unwrap();
            assert!(was_next || woken.load(Ordering::SeqCst), "nobody wakes the one that waits");
            assert!(in_flight.is_next(ticket) && in_flight.lock((256, 512)).is_some());
        },
        None,
    );
}

#[test]
fn a_write_sees_the_lock_or_is_waited_for() {
    beside_a_write(|shared| {
        let since = shared.in_flight.lock((0, 512)).unwrap();
        assert!(!shared.in_flight.is_over_since(since) || !shared.is_writing());
    });
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
fn a_command_that_has_locked_its_range_is_fenced_or_complete_when_the_next_epoch_begins() {
    let lock = |shared: &Shared| _ = shared.in_flight.lock((0, 512)).unwrap();
    in_every_order(lock, |shared| _ = shared.write_as(&shared.counters[0], true), Shared::fence);
}

/// Every interleaving of four threads is too much, so a part of them, the same in each run.
#[test]
fn a_write_sees_whatever_excludes_it_or_is_waited_for_if_all_happens_at_once() {
    let beside = [Shared::preempt, Shared::fence, Shared::lock_and_write];
    Runner::new(RandomScheduler::new_from_seed(1, 20_000), shuttle::Config::new()).run(move || {
        let shared = Shared::new();
        let others = beside.map(|other| {
            let shared = shared.clone();
            thread::spawn(move || other(&shared))
        });
        // Throttled once, or locked out.
        if shared.write().is_err() {
            thread::yield_now();
            _ = shared.write();
        }
        others.into_iter().for_each(|other| other.join().unwrap());
        // A new session is admitted as soon as an epoch has begun.
        let new = shared.in_flight.add_counter(1);
        let wanted = AdmissionRequest { range: (0, 512), changes: true, owns_lock: false };
        let admitted = shared.in_flight.admit::<Denial>(&new, wanted, || Ok(()));
        assert_eq!(admitted.is_ok(), shared.is_next_epoch.load(Ordering::SeqCst));
    });
}

#[test]
fn a_write_notifies_the_watch_or_is_waited_for() {
    beside_a_write(|shared| {
        let (watched, since) = shared.in_flight.watch([(0, 512)].into());
        if shared.in_flight.is_over_since(since) {
            assert!(!shared.is_writing() || watched.has_changed(), "the watch has missed a write");
        }
    });
}
