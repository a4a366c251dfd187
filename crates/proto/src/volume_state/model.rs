//! Model check of `in_flight`: this module compiles that file again, with atomics and locks that
//! yield to another thread at each access, and runs every interleaving. Each test describes what
//! would be lost without a step of the order.

mod sync {
    pub(super) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
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

use in_flight::{AdmissionRequest, Counter, InFlight, NeededRange, NotAdmitted};
use shuttle::sync::atomic::{AtomicU32, Ordering};
use shuttle::thread;
use std::sync::Arc;

/// State that the writer and the other thread share.
struct Shared {
    in_flight: InFlight,
    counter: Arc<Counter>,
    /// The reservation table's generation: a different one excludes the writer.
    generation: AtomicU32,
    /// Number of writes in progress.
    writing: AtomicU32,
}

impl Shared {
    /// Writes once, if admitted. A throttled write does the same later: until it begins, it is not
    /// counted, and nobody waits for it.
    fn write(&self) -> Result<(), NotAdmitted<()>> {
        let wanted = AdmissionRequest { range: (0, 512), changes: true, owns_lock: false };
        let check = || if self.generation.load(Ordering::SeqCst) == 0 { Ok(()) } else { Err(()) };
        let place = self.in_flight.admit(&self.counter, wanted, check)?;
        self.writing.store(1, Ordering::SeqCst);
        self.writing.store(0, Ordering::SeqCst);
        self.counter.end(place);
        Ok(())
    }

    fn is_writing(&self) -> bool {
        self.writing.load(Ordering::SeqCst) != 0
    }
}

/// Runs a write and `other` in every interleaving. `other` checks once whether all I/O is complete;
/// further checks would add no other outcome.
fn beside_a_write(other: fn(&Shared)) {
    shuttle::check_dfs(
        move || {
            let in_flight = InFlight::default();
            let counter = in_flight.add_counter();
            let (generation, writing) = (AtomicU32::new(0), AtomicU32::new(0));
            let shared = Arc::new(Shared { in_flight, counter, generation, writing });
            let beside = shared.clone();
            let writer = thread::spawn(move || _ = beside.write());
            other(&shared);
            writer.join().unwrap();
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
    beside_a_write(|shared| {
        shared.generation.store(1, Ordering::SeqCst);
        let since = shared.in_flight.now();
        assert!(!shared.in_flight.is_over_since(since) || !shared.is_writing());
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
