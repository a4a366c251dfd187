//! What was done in the last hour, as the API tells it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Rates of all volumes, now and over the last hour.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct History {
    /// Time of the answer, as RFC 3339 has it, in UTC.
    pub(crate) at: String,
    /// Distance of two points.
    pub(crate) interval_seconds: u32,
    /// All volumes together.
    pub(crate) total: Series,
    /// Each of the first 64.
    pub(crate) volumes: Vec<Series>,
}

/// Rates of one volume, or of all.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct Series {
    /// Name of the volume; empty for all.
    pub(crate) name: String,
    /// In the last second.
    pub(crate) now: Rates,
    /// The oldest first, at most 360; the last one ends at most one interval ago.
    pub(crate) points: Vec<Rates>,
}

/// What was done per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Rates {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    /// Flushes, discards, zeroing and all else.
    pub(crate) others: u64,
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
    /// Requests that failed in the whole interval.
    pub(crate) failed: u64,
    /// Median latency in microseconds; left out where nothing completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) p50_us: Option<f64>,
    /// 99th percentile in microseconds; left out where nothing completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) p99_us: Option<f64>,
}
