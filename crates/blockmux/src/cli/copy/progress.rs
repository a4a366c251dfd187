//! Progress of a copy.

use blockmux_volume::units::human_size;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvError, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Counters that the copying core updates and the main thread shows.
pub(super) struct CopyProgress {
    /// Size of the source in bytes.
    total: u64,
    /// Number of bytes copied as data.
    data: AtomicU64,
    /// Number of bytes of zeroes.
    zeroes: AtomicU64,
    /// Number of bytes compared.
    verified: AtomicU64,
    is_verifying: AtomicBool,
}

impl CopyProgress {
    pub(super) fn new(total: u64) -> CopyProgress {
        CopyProgress {
            total,
            data: AtomicU64::new(0),
            zeroes: AtomicU64::new(0),
            verified: AtomicU64::new(0),
            is_verifying: AtomicBool::new(false),
        }
    }

    /// Records copied bytes.
    pub(super) fn on_copied(&self, len: u64, is_zero: bool) {
        let counter = if is_zero { &self.zeroes } else { &self.data };
        counter.fetch_add(len, Ordering::Relaxed);
    }

    /// Records the start of the comparison.
    pub(super) fn on_verify(&self) {
        self.is_verifying.store(true, Ordering::Relaxed);
    }

    /// Whether the comparison has started.
    pub(super) fn is_verifying(&self) -> bool {
        self.is_verifying.load(Ordering::Relaxed)
    }

    /// Records compared bytes.
    pub(super) fn on_verified(&self, len: u64) {
        self.verified.fetch_add(len, Ordering::Relaxed);
    }

    /// Waits for `result`, and shows a progress bar on a terminal after a delay.
    pub(super) fn show_until<T>(&self, result: &Receiver<T>) -> Result<T, RecvError> {
        let (shown_from, bar) = (Instant::now() + SHOW_AFTER, new_bar(self.total));
        let outcome = loop {
            match result.recv_timeout(SHOW_EVERY) {
                Ok(result) => break Ok(result),
                Err(RecvTimeoutError::Disconnected) => break Err(RecvError),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if bar.is_hidden() && Instant::now() >= shown_from {
                // Without a terminal the bar stays hidden.
                bar.set_draw_target(ProgressDrawTarget::stderr());
            }
            self.update(&bar);
        };
        bar.finish_and_clear();
        outcome
    }

    /// The summary as one line of JSON, in bytes and seconds.
    pub(super) fn json(&self, elapsed: Duration, verified: bool) -> String {
        let (data, zeroes) = (self.data.load(Ordering::Relaxed), self.zeroes.load(Ordering::Relaxed));
        json!({
            "size": self.total,
            "data": data,
            "zeroes": zeroes,
            "seconds": elapsed.as_secs_f64(),
            "verified": verified,
        })
        .to_string()
    }

    /// The summary as one line for people.
    pub(super) fn summary(&self, elapsed: Duration, verified: bool) -> String {
        let (data, zeroes) = (self.data.load(Ordering::Relaxed), self.zeroes.load(Ordering::Relaxed));
        let seconds = elapsed.as_secs_f64();
        let rate = human_size((self.total as f64 / seconds.max(1e-9)) as u64);
        let (data, zeroes) = (human_size(data), human_size(zeroes));
        let action = if verified { "copied and verified" } else { "copied" };
        let total = human_size(self.total);
        format!("{action} {total} ({data} data, {zeroes} zeroes) in {seconds:.2} s, {rate}/s")
    }

    fn update(&self, bar: &ProgressBar) {
        if !self.is_verifying() {
            bar.set_position(self.data.load(Ordering::Relaxed) + self.zeroes.load(Ordering::Relaxed));
            return;
        }
        if bar.message() != VERIFYING {
            bar.reset();
            bar.set_message(VERIFYING);
        }
        bar.set_position(self.verified.load(Ordering::Relaxed));
    }
}

/// A hidden progress bar, which already measures the rate.
fn new_bar(total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
    bar.with_style(style).with_message("copying")
}

const VERIFYING: &str = "verifying";
const TEMPLATE: &str = "{msg} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} ETA {eta}";
const SHOW_AFTER: Duration = Duration::from_secs(2);
const SHOW_EVERY: Duration = Duration::from_millis(100);
