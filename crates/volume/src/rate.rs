//! A volume with rate limits.
//!
//! Each limit is a token bucket stored as one number, the time at which the bucket will be full
//! again (the "virtual scheduling" form of the generic cell rate algorithm, ITU-T I.371). A
//! request's start time is known at once, and cores share a bucket through one atomic without a
//! lock.

use crate::decorator::Decorator;
use crate::io::{Io, IoError, Op};
use crate::pace::{Pace, PacedChannel};
use crate::ready::Waker;
use crate::volume::{Channel, Core, MAX_TRANSFER, Volume};
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Limits of one kind of request; `None`: unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    /// Requests per second.
    pub iops: Option<NonZeroU64>,
    /// Bytes of data per second; zeroing and discarding transfer none.
    pub bytes_per_s: Option<NonZeroU64>,
}

/// The limits of a volume: each request is subject to those of its kind and the total. Flushes,
/// prefetches and block status are free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Reads and writes together.
    pub total: Limit,
    /// Reads.
    pub read: Limit,
    /// Writes, zeroes and discards.
    pub write: Limit,
}

/// Limits the rate of a volume, over all of its channels.
pub struct RateVolume {
    inner: Arc<dyn Volume>,
    buckets: Arc<Buckets>,
}

impl RateVolume {
    /// Limits `inner`. After an idle period, the requests that the rate permits in [`RATE_BURST`]
    /// start at once.
    #[must_use]
    pub fn new(inner: Arc<dyn Volume>, limits: Limits) -> RateVolume {
        let pair = |limit: Limit| [limit.iops, limit.bytes_per_s].map(|rate| rate.map(Bucket::new));
        let buckets = Buckets {
            origin: OnceLock::new(),
            total: pair(limits.total),
            read: pair(limits.read),
            write: pair(limits.write),
        };
        RateVolume { inner, buckets: Arc::new(buckets) }
    }
}

impl Decorator for RateVolume {
    fn inner(&self) -> &dyn Volume {
        &*self.inner
    }

    fn open_over(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let inner = self.inner.open(core, depth, waker.clone())?;
        let origin = *self.buckets.origin.get_or_init(|| core.now());
        let pace = RatePace { origin, buckets: self.buckets.clone() };
        Ok(Box::new(PacedChannel::new(inner, pace, core, depth, waker)))
    }
}

/// Size of a burst after an idle period: the requests that the rate permits in this time. It covers
/// timer latency, so that queue depth 1 reaches the limit.
pub const RATE_BURST: Duration = Duration::from_millis(10);

struct Buckets {
    /// Origin of the buckets' times.
    origin: OnceLock<Instant>,
    /// Buckets for the number of requests and for the bytes of data.
    total: [Option<Bucket>; 2],
    read: [Option<Bucket>; 2],
    write: [Option<Bucket>; 2],
}

struct Bucket {
    per_second: NonZeroU64,
    /// When the bucket will be full again, in nanoseconds since [`RATE_BURST`] before the origin.
    paid_ns: AtomicU64,
}

impl Bucket {
    fn new(per_second: NonZeroU64) -> Bucket {
        Bucket { per_second, paid_ns: AtomicU64::new(0) }
    }

    /// Takes `units` and returns when they may be used. A request may take more than the bucket
    /// holds; later ones then wait longer.
    fn take(&self, units: u64, now_ns: u64) -> u64 {
        let cost = (u128::from(units) * NS_PER_S).div_ceil(self.per_second.get().into());
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        let full = now_ns - RATE_BURST.as_nanos() as u64;
        let pay = |paid: u64| Some(paid.max(full).saturating_add(cost));
        let before = self.paid_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay);
        before.unwrap_or_else(|unchanged| unchanged).max(full)
    }
}

struct RatePace {
    origin: Instant,
    buckets: Arc<Buckets>,
}

impl Pace for RatePace {
    fn due(&mut self, io: &Io, now: Instant) -> Option<(usize, Instant)> {
        let (queue, kind) = match io.op {
            Op::Read => (0, &self.buckets.read),
            op if op.is_write() => (1, &self.buckets.write),
            _ => return None,
        };
        // A request of invalid length fails in `inner`, and must not use up the tokens of years.
        let bytes = if io.op.moves_data() { io.len.min(MAX_TRANSFER.into()) } else { 0 };
        let now_ns = (now.saturating_duration_since(self.origin) + RATE_BURST).as_nanos() as u64;
        let mut due_ns = now_ns;
        for [requests, data] in [&self.buckets.total, kind] {
            for (bucket, units) in [(requests, 1), (data, bytes)] {
                if let Some(bucket) = bucket {
                    due_ns = due_ns.max(bucket.take(units, now_ns));
                }
            }
        }
        Some((queue, now + Duration::from_nanos(due_ns - now_ns)))
    }
}

const NS_PER_S: u128 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{self, Harness, TestCore};
    use crate::{MemVolume, NullVolume, Seg, SgList, Tag};

    fn limit(iops: u64, bytes_per_s: u64) -> Limit {
        Limit { iops: NonZeroU64::new(iops), bytes_per_s: NonZeroU64::new(bytes_per_s) }
    }

    /// Keeps four requests in flight on each of two channels for ten seconds of virtual time;
    /// returns how many completed.
    fn completed_in_10_s(limits: Limits, make: impl Fn(u64) -> Io) -> u64 {
        let core = TestCore::new();
        let volume = RateVolume::new(Arc::new(NullVolume::new(1 << 30)), limits);
        let mut channels: Vec<_> =
            (0..2).map(|id| volume.open(&core.as_core(), 4, core.ready().waker(id)).unwrap()).collect();
        for channel in &mut channels {
            (0..4).for_each(|tag| channel.submit(make(tag)));
            channel.kick();
        }
        let end = core.started() + Duration::from_secs(10);
        let (mut done, mut count) = (Vec::new(), 0);
        while core.now() < end {
            while let Some(id) = core.ready().pop() {
                let channel = &mut channels[id as usize];
                channel.poll(&mut done);
                count += done.len() as u64;
                for done in done.drain(..) {
                    assert!(done.result.is_ok());
                    channel.submit(make(done.tag.0));
                }
                channel.kick();
            }
            // Completions within `submit` cause no wake-up.
            for channel in &mut channels {
                channel.poll(&mut done);
                count += done.len() as u64;
                done.drain(..).for_each(|done| channel.submit(make(done.tag.0)));
                channel.kick();
            }
            core.jump();
        }
        count
    }

    fn read(tag: u64) -> Io {
        Io::new(Tag(tag), Op::Read, tag * 8192, 8192)
    }

    fn write(tag: u64) -> Io {
        let data = Some(SgList::one(Seg::from_slice(&[1; 4096])));
        Io { tag: Tag(tag), op: Op::Write { fua: false }, offset: 0, len: 4096, data }
    }

    #[test]
    fn a_rate_limited_volume_conforms() {
        let limits = Limits { total: limit(0, 100 << 20), read: limit(5000, 0), write: limit(2000, 0) };
        let volume = Arc::new(RateVolume::new(Arc::new(MemVolume::new(40 << 20)), limits));
        conformance::run(&mut Harness::on_test_core(volume));
    }

    #[test]
    fn channels_share_the_iops_limit() {
        let count = completed_in_10_s(Limits { total: limit(1000, 0), ..Limits::default() }, read);
        assert!((10_000..=10_010 + 8).contains(&count), "{count} in 10 s at 1000 a second");
    }

    #[test]
    fn bandwidth_is_limited_too() {
        let count = completed_in_10_s(Limits { write: limit(0, 4096 * 50), ..Limits::default() }, write);
        assert!((500..=501 + 8).contains(&count), "{count} in 10 s at 50 a second");
    }

    #[test]
    fn the_tightest_limit_wins() {
        let limits = Limits { total: limit(300, 8192 * 200), read: limit(100, 0), ..Limits::default() };
        let count = completed_in_10_s(limits, read);
        assert!((1000..=1001 + 8).contains(&count), "{count} in 10 s at 100 a second");
    }

    #[test]
    fn a_limit_on_reads_does_not_limit_writes() {
        let core = TestCore::new();
        let limits = Limits { read: limit(1, 0), ..Limits::default() };
        let volume = RateVolume::new(Arc::new(NullVolume::new(1 << 20)), limits);
        let mut channel = volume.open(&core.as_core(), 8, core.ready().waker(0)).unwrap();
        (0..2).for_each(|tag| channel.submit(read(tag)));
        (2..8).for_each(|tag| channel.submit(write(tag)));
        channel.kick();
        let mut done = Vec::new();
        channel.poll(&mut done);
        assert_eq!(done.len(), 7, "the first read and all writes");
        assert!(core.jump());
        channel.poll(&mut done);
        assert_eq!(done.len(), 8);
        assert!(core.now() >= core.started() + Duration::from_millis(990));
    }

    #[test]
    fn a_request_of_invalid_length_does_not_delay_later_ones() {
        let core = TestCore::new();
        let limits = Limits { total: limit(0, 1 << 20), ..Limits::default() };
        let volume = RateVolume::new(Arc::new(NullVolume::new(1 << 20)), limits);
        let mut channel = volume.open(&core.as_core(), 8, core.ready().waker(0)).unwrap();
        channel.submit(Io::new(Tag(1), Op::Read, 0, 1 << 60));
        channel.submit(read(2));
        channel.kick();
        while core.jump() {}
        let mut done = Vec::new();
        channel.poll(&mut done);
        assert_eq!(done.len(), 2);
        assert!(core.now() < core.started() + Duration::from_secs(60));
    }
}
