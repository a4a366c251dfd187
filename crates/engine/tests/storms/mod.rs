//! Troubles that every protocol over streams has to live with.

use crate::seeds::{self, ms};
use blockmux_engine::sim::{NetworkConditions, Outcome, Scenario, Trouble};

/// Messages come in pieces.
pub(crate) const FRAGMENTING: NetworkConditions =
    NetworkConditions { most_per_call: 300, ..NetworkConditions::FAIR };

/// Slow, in pieces, with stalls, until the connection breaks.
pub(crate) const STORM: NetworkConditions = NetworkConditions {
    delay: ms(3),
    bytes_per_s: Some(50_000_000),
    window: 30_000,
    most_per_call: 2000,
    breaks_within: Some(300_000),
    stalls_per_thousand: 5,
    ..NetworkConditions::FAIR
};

/// Nothing goes wrong on one connection or a few.
pub(crate) fn fair_day(seed: u64) -> Scenario {
    Scenario { connections: 1 + seed as u32 % 4, ..Scenario::new(seed) }
}

/// A slow volume on a slow network.
pub(crate) fn slow_day(seed: u64) -> Scenario {
    let slow = NetworkConditions {
        delay: ms(5),
        bytes_per_s: Some(10_000_000),
        window: 16 << 10,
        stalls_per_thousand: 10,
        ..NetworkConditions::FAIR
    };
    Scenario {
        conditions: slow,
        volume_delay: ms(20),
        connections: 1 + seed as u32 % 2,
        ..Scenario::new(seed)
    }
}

/// A network that cuts every message, some byte by byte.
pub(crate) fn cut_everywhere(seed: u64) -> Scenario {
    Scenario {
        conditions: NetworkConditions {
            most_per_call: 1 + (seed as usize % 7) * 100,
            ..NetworkConditions::FAIR
        },
        requests: 60,
        most_blocks: 4,
        ..Scenario::new(seed)
    }
}

/// Requests far longer than what is on its way at a time.
pub(crate) fn long_requests(seed: u64) -> Scenario {
    Scenario {
        conditions: NetworkConditions { window: 20 << 10, most_per_call: 30_000, ..NetworkConditions::FAIR },
        blocks: 1024,
        most_blocks: 512,
        requests: 40,
        depth: 4,
        ..Scenario::new(seed)
    }
}

/// Connections that break again and again.
pub(crate) fn breaks(seed: u64) -> Scenario {
    Scenario {
        conditions: NetworkConditions { breaks_within: Some(60_000), ..FRAGMENTING },
        connections: 1 + seed as u32 % 3,
        requests: 150,
        most_blocks: 3,
        ..Scenario::new(seed)
    }
}

/// A target that stops again and again, or loses its power.
pub(crate) fn stops(seed: u64, is_crash: bool) -> Scenario {
    Scenario {
        trouble: Some(Trouble { every: ms(20), lasts: ms(100), is_crash }),
        volume_delay: ms(2),
        connections: 1 + seed as u32 % 3,
        ..Scenario::new(seed)
    }
}

/// A target that is away for longer than requests wait for it.
pub(crate) fn long_absences(seed: u64) -> Scenario {
    Scenario {
        trouble: Some(Trouble { every: ms(50), lasts: ms(400), is_crash: true }),
        reconnect_timeout: ms(100),
        volume_delay: ms(2),
        // What fails may have been done, and may still be.
        allows_stale_writes: true,
        ..Scenario::new(seed)
    }
}

/// One request in twenty meets an error of the medium.
pub(crate) fn medium_errors(seed: u64) -> Scenario {
    Scenario { medium_errors_per_million: 50_000, ..Scenario::new(seed) }
}

/// Short, with a few connections that break.
fn short(seed: u64) -> Scenario {
    Scenario {
        conditions: NetworkConditions { breaks_within: Some(40_000), ..FRAGMENTING },
        volume_delay: ms(1),
        requests: 80,
        ..Scenario::new(seed)
    }
}

/// That what is `run` with a scenario comes out the same again, and otherwise with another seed.
pub(crate) fn the_same_again(run: impl Fn(fn(u64) -> Scenario) -> Vec<Outcome>) {
    let (first, again) = (run(short), run(short));
    assert_eq!(first, again);
    assert!(seeds::is_one() || first.windows(2).any(|pair| pair[0].took != pair[1].took));
}

/// That more connections than that broke in all.
pub(crate) fn more_broke_than(least: u64, outcomes: &[Outcome]) {
    let breaks: u64 = outcomes.iter().map(|outcome| outcome.breaks).sum();
    assert!(seeds::is_one() || breaks > least, "only {breaks} connections broke");
}

/// That the target met trouble more often than that in all.
pub(crate) fn more_troubles_than(least: u32, outcomes: &[Outcome]) {
    let troubles: u32 = outcomes.iter().map(|outcome| outcome.troubles).sum();
    assert!(seeds::is_one() || troubles > least, "only {troubles} stops and crashes");
}

/// All of it, errors of the medium and a lack of memory.
pub(crate) fn everything_at_once(seed: u64) -> Scenario {
    Scenario {
        conditions: STORM,
        volume_delay: ms(5),
        medium_errors_per_million: 10_000,
        connections: 1 + seed as u32 % 4,
        trouble: Some(Trouble { every: ms(500), lasts: ms(300), is_crash: !seed.is_multiple_of(3) }),
        pool_bytes: 4 << 20,
        ..Scenario::new(seed)
    }
}
