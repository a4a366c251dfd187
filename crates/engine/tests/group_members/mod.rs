//! What tests of a group's members share.

use blockmux_group::Settings;
use std::time::{Duration, Instant};

/// Members are suspected after a second, which also a busy machine does not make them miss.
pub(crate) fn settings() -> Settings {
    Settings {
        beat_every: Duration::from_millis(50),
        read_every: Duration::from_millis(500),
        suspect_after: 20,
        isolated_after: Duration::from_secs(4),
        stable_after: 5,
        forgive_after: 1000,
        move_every: Duration::from_millis(50),
        retry_every: Duration::from_millis(50),
    }
}

/// Asks until it is so; fails after a minute.
pub(crate) fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: it does not happen");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}
