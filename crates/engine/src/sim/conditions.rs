//! Faults of the simulated network.

use std::time::Duration;

/// Properties of a network. Every connection draws its own faults from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkConditions {
    /// Longest one-way delay; each send draws its own.
    pub delay: Duration,
    /// Bandwidth of each direction of a connection; `None`: unlimited.
    pub bytes_per_s: Option<u64>,
    /// Bytes in flight in each direction (window): a sender beyond it waits.
    pub window: usize,
    /// One call transfers 1 to this many bytes at random.
    pub max_per_call: usize,
    /// Maximum number of bytes that a connection carries until it breaks; `None`: it never breaks.
    pub breaks_within: Option<u64>,
    /// How many of a thousand sends are delayed by up to [`MAX_STALL`].
    pub stalls_per_thousand: u32,
    /// How many of a thousand sends have a bit of their payload flipped, for protocols that detect
    /// it. Headers are never damaged, so replies without payload are not damaged either.
    pub damaged_per_thousand: u32,
}

impl NetworkConditions {
    /// A short link without faults.
    pub const FAIR: NetworkConditions = NetworkConditions {
        delay: Duration::from_micros(50),
        bytes_per_s: None,
        window: 4 << 20,
        max_per_call: usize::MAX,
        breaks_within: None,
        stalls_per_thousand: 0,
        damaged_per_thousand: 0,
    };
}

/// Longest stall of a send.
pub const MAX_STALL: Duration = Duration::from_millis(200);
