//! Troubles that every protocol over streams has to live with.

use crate::seeds::ms;
use blockmux_engine::sim::{Scenario, Trouble, Weather};

/// Messages come in pieces.
pub(crate) const FRAGMENTING: Weather = Weather { most_per_call: 300, ..Weather::FAIR };

/// Slow, in pieces, with stalls, until the connection breaks.
pub(crate) const STORM: Weather = Weather {
    delay: ms(3),
    bytes_per_s: Some(50_000_000),
    window: 30_000,
    most_per_call: 2000,
    breaks_within: Some(300_000),
    stalls_per_thousand: 5,
    ..Weather::FAIR
};

/// A network that cuts every message, some byte by byte.
pub(crate) fn cut_everywhere(seed: u64) -> Scenario {
    Scenario {
        weather: Weather { most_per_call: 1 + (seed as usize % 7) * 100, ..Weather::FAIR },
        requests: 60,
        most_blocks: 4,
        ..Scenario::new(seed)
    }
}

/// Requests far longer than what is on its way at a time.
pub(crate) fn long_requests(seed: u64) -> Scenario {
    Scenario {
        weather: Weather { window: 20 << 10, most_per_call: 30_000, ..Weather::FAIR },
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
        weather: Weather { breaks_within: Some(60_000), ..FRAGMENTING },
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

/// All of it, errors of the medium and a lack of memory.
pub(crate) fn everything_at_once(seed: u64) -> Scenario {
    Scenario {
        weather: STORM,
        volume_delay: ms(5),
        medium_errors_per_million: 10_000,
        connections: 1 + seed as u32 % 4,
        trouble: Some(Trouble { every: ms(500), lasts: ms(300), is_crash: !seed.is_multiple_of(3) }),
        pool_bytes: 4 << 20,
        ..Scenario::new(seed)
    }
}
