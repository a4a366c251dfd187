//! Gateways, a cluster and initiators, from seeds: what breaks, and what must hold all the same.
//!
//! ```text
//!   initiators ──▶ gateways (a Member each) ──▶ cluster: storage daemons, images, the table
//!       numbers, each block              cut, late, lost, doubled; stopped, crashed; clocks of
//!       written by one                   other speeds; maps that arrive one after another
//! ```
//! A failure prints its seed and what happened in it. `BLOCKMUX_GROUP_SEEDS=17..18 cargo test -p
//! blockmux-group --test sim` runs that seed alone, `0..10000` a night of them. To read a trace,
//! begin at its end: the last write of the block, then the lines `locks`, `fences` and `table`
//! about its volume before it, then the fault that stands before them.
//!
//! Checked in every run:
//! - no value of a block is overwritten by an older one, what was acknowledged is stored, and reads
//!   return it;
//! - no storage daemon executes I/O of an owner after I/O of a later one;
//! - the epochs of a volume's owners, and of those who lock its image, grow; generations grow by
//!   one;
//! - volumes leave members that are up only as the table has said before, and one at a time, unless
//!   the member drains or leaves;
//! - reservations are stored by the owner alone, and by no earlier one;
//! - within a time after everything is repaired, all volumes are served and evenly spread; then
//!   nothing moves, nobody is fenced, and every initiator goes on.

mod cluster;
mod gateway;
mod initiator;
mod net;
mod world;

use std::ops::Range;
use world::{Counts, run};

/// How the simulated gateways or the cluster differ from what the members ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variant {
    Right,
    /// Locks are broken, but nobody is fenced.
    NoFence,
    /// An owner begins without the map of the cluster in which the one before it is fenced.
    NoMap,
    /// The lock is released before the I/O is complete.
    NoDrain,
    /// A proposal replaces whatever table there is.
    Blind,
    /// Sessions of an earlier epoch are served.
    OldSessions,
    /// A lock that comes after its activation was given up is kept.
    LateLock,
}

#[test]
fn one_owner_writes_and_everything_is_served_again() {
    let seeds = seeds(0..300);
    let is_many = seeds.end - seeds.start >= 100;
    let mut total = Counts::default();
    for seed in seeds {
        let counts = run(seed, Variant::Right).unwrap_or_else(|failure| panic!("{failure}"));
        total.acknowledged += counts.acknowledged;
        total.moves += counts.moves;
        total.fences += counts.fences;
        total.served_after = total.served_after.max(counts.served_after);
        total.even_after = total.even_after.max(counts.even_after);
    }
    eprintln!("{total:?}");
    assert!(!is_many || (total.fences > 100 && total.moves > 1000), "too little has happened: {total:?}");
}

/// What is said of requests that an owner has executed too late.
const LATE_IO: [&str; 3] = ["overwrites", "after I/O in", "another owner than"];

/// Runs a wrong variant until it is noticed as one of these sentences says.
fn noticed(variant: Variant, sentences: &[&str]) {
    let failure = (1..2000).find_map(|seed| run(seed, variant).err());
    let failure = failure.unwrap_or_else(|| panic!("{variant:?} is not noticed"));
    assert!(sentences.iter().any(|sentence| failure.what.contains(sentence)), "{failure}");
    assert!(!failure.trace.is_empty());
}

#[test]
fn a_lock_that_is_broken_without_a_fence_is_noticed() {
    noticed(Variant::NoFence, &LATE_IO);
}

#[test]
fn an_owner_that_does_not_wait_for_the_map_is_noticed() {
    noticed(Variant::NoMap, &LATE_IO);
}

#[test]
fn a_lock_that_is_released_before_the_io_is_complete_is_noticed() {
    noticed(Variant::NoDrain, &LATE_IO);
}

#[test]
fn a_table_that_is_replaced_without_a_look_is_noticed() {
    noticed(Variant::Blind, &["follows"]);
}

#[test]
fn a_session_that_outlives_its_epoch_is_noticed() {
    noticed(Variant::OldSessions, &["overwrites"]);
}

#[test]
fn a_late_lock_that_is_kept_is_noticed() {
    noticed(Variant::LateLock, &["not settled", "does not go on"]);
}

/// The seeds to run: these, or those of the environment.
fn seeds(usual: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var(SEEDS) else { return usual };
    let (from, to) = text.split_once("..").expect("FROM..TO");
    from.parse().unwrap()..to.parse().unwrap()
}

pub(crate) const SEEDS: &str = "BLOCKMUX_GROUP_SEEDS";
