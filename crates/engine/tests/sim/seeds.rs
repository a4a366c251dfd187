//! Seeds of the simulator: every seed up to a number, or only the one that an environment variable
//! gives.

use std::fmt::Display;
use std::time::Duration;

/// Runs every seed, or only the one that the environment variable gives. Panics at the first
/// failure.
pub(crate) fn run_each<T, F: Display>(seeds: u64, run: impl Fn(u64) -> Result<T, F>) -> Vec<T> {
    let one =
        std::env::var(ONE).ok().map(|seed| seed.parse().unwrap_or_else(|_| panic!("{ONE} is a number")));
    let seeds = one.map_or(0..seeds, |seed| seed..seed + 1);
    seeds.map(|seed| run(seed).unwrap_or_else(|failure| panic!("{failure}"))).collect()
}

/// Whether the environment variable gives one seed, so that counts of faults over many seeds cannot
/// be checked.
pub(crate) fn is_one() -> bool {
    std::env::var_os(ONE).is_some()
}

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const ONE: &str = "BLOCKMUX_SIM_SEED";
