//! What goes wrong on the simulated network.

use std::time::Duration;

/// What a network is like. Every connection draws its own fate from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkConditions {
    /// One way, at most; each send draws its own.
    pub delay: Duration,
    /// Of each direction of a connection; `None` is without limit.
    pub bytes_per_s: Option<u64>,
    /// Bytes sent and not yet received, in each direction: a sender waits beyond.
    pub window: usize,
    /// One call moves 1 to so many bytes, as chance has it.
    pub most_per_call: usize,
    /// A connection breaks once it has carried so many bytes at most; `None` is never.
    pub breaks_within: Option<u64>,
    /// So many of a thousand sends are held up by up to [`LONGEST_STALL`].
    pub stalls_per_thousand: u32,
    /// So many of a thousand sends have a bit of their payload turned around: for protocols that
    /// notice. What is sent as a header, and with it short answers, stays as it is.
    pub damaged_per_thousand: u32,
}

impl NetworkConditions {
    /// A short wire on which nothing goes wrong.
    pub const FAIR: NetworkConditions = NetworkConditions {
        delay: Duration::from_micros(50),
        bytes_per_s: None,
        window: 4 << 20,
        most_per_call: usize::MAX,
        breaks_within: None,
        stalls_per_thousand: 0,
        damaged_per_thousand: 0,
    };
}

/// The longest that a send is held up.
pub const LONGEST_STALL: Duration = Duration::from_millis(200);
