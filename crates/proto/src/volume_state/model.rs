//! Every interleaving of the code of `in_flight`: that file is compiled once more, over atomics and
//! locks that hand control to another thread at each access. Each test says what would be lost if a
//! step of the order were left out.

mod sync {
    pub(super) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
    pub(super) use shuttle::sync::{Mutex, MutexGuard};
    pub(super) use std::sync::PoisonError;

    /// Threads take turns here: all accesses are in one order.
    pub(super) fn fence(_order: Ordering) {}
}

#[path = "in_flight.rs"]
#[allow(
    dead_code,
    clippy::duplicate_mod,
    reason = "the product has it over other atomics; unit tests use the rest"
)]
mod in_flight;

use in_flight::{AdmissionRequest, Counter, InFlight, NotAdmitted};
use shuttle::sync::atomic::{AtomicU32, Ordering};
use shuttle::thread;
use std::sync::Arc;

/// What one thread does to the volume and the other waits for.
struct Shared {
    in_flight: InFlight,
    counter: Arc<Counter>,
    /// The reservation table's generation: another one keeps the writer out.
    generation: AtomicU32,
    /// Writes under way.
    writing: AtomicU32,
}

impl Shared {
    /// Writes once, if that is let through.
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

/// Runs a write and `other` in every interleaving. `other` asks once whether all I/O is over: to
/// ask again only adds interleavings in which nothing is claimed in between.
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
fn a_write_tells_the_watch_or_is_waited_for() {
    beside_a_write(|shared| {
        let (watched, since) = shared.in_flight.watch([(0, 512)].into());
        if shared.in_flight.is_over_since(since) {
            assert!(!shared.is_writing() || watched.has_changed(), "a write that nobody was told of");
        }
    });
}
