//! What the simulator is run with: every seed up to a number, or the one that the environment
//! names.

use std::fmt::Display;
use std::time::Duration;

/// Runs every seed, or the one that the environment names. The failure of one is the end.
pub(crate) fn run_each<T, F: Display>(seeds: u64, run: impl Fn(u64) -> Result<T, F>) -> Vec<T> {
    let one =
        std::env::var(ONE).ok().map(|seed| seed.parse().unwrap_or_else(|_| panic!("{ONE} is a number")));
    let seeds = one.map_or(0..seeds, |seed| seed..seed + 1);
    seeds.map(|seed| run(seed).unwrap_or_else(|failure| panic!("{failure}"))).collect()
}

/// Whether the environment names one: then nothing can be said of how many had trouble.
pub(crate) fn is_one() -> bool {
    std::env::var_os(ONE).is_some()
}

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const ONE: &str = "BLOCKMUX_SIM_SEED";
