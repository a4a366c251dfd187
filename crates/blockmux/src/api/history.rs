//! I/O rates and latencies of the last hour, in the format of the API.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Rates of all volumes, now and over the last hour.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct History {
    /// Time of the answer in UTC, as RFC 3339.
    pub(crate) at: String,
    /// Interval of points, in seconds.
    pub(crate) interval_seconds: u32,
    /// All volumes together.
    pub(crate) total: Series,
    /// The first 64 volumes.
    pub(crate) volumes: Vec<Series>,
}

/// Rates of one volume, or of all.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct Series {
    /// Name of the volume; empty for all volumes.
    pub(crate) name: String,
    /// Rates of the last second.
    pub(crate) now: Rates,
    /// At most 360 points, oldest first; the last one ends at most one interval ago.
    pub(crate) points: Vec<Rates>,
}

/// I/O rates per second, and latencies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Rates {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    /// Flushes, discards, zeroing and all other requests.
    pub(crate) others: u64,
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
    /// Number of requests that failed in the interval.
    pub(crate) failed: u64,
    /// Requests that limits have throttled.
    #[serde(default)]
    pub(crate) throttled: u64,
    /// Median latency in microseconds; absent if nothing completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) p50_us: Option<f64>,
    /// 99th percentile of the latency in microseconds; absent if nothing completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) p99_us: Option<f64>,
}

impl Rates {
    /// Number of requests of all kinds.
    pub(crate) fn requests(&self) -> u64 {
        self.reads + self.writes + self.others
    }

    /// Percentage of the requests that limits have throttled; `None` if they have throttled none.
    pub(crate) fn throttled_percent(&self) -> Option<u64> {
        let percent = (100 * self.throttled).checked_div(self.requests()).unwrap_or(100);
        (self.throttled > 0).then_some(percent.clamp(1, 100))
    }
}
