//! Rate limits of a volume, shared by all of its channels.
//!
//! Each limit is a token bucket stored as one number, the time at which the bucket will be full
//! again (the "virtual scheduling" form of the generic cell rate algorithm, ITU-T I.371). A
//! request's start time is known at once, and cores share a bucket through one atomic without a
//! lock.

use crate::io::{Io, Op};
use crate::volume::MAX_TRANSFER;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Limits of one kind of request; `None`: unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    /// Requests per second.
    pub iops: Option<NonZeroU64>,
    /// Bytes of data per second; zeroing and discarding transfer none.
    pub bytes_per_s: Option<NonZeroU64>,
}

/// Limits of requests: each request is subject to those of its kind and the total. Flushes,
/// prefetches and block status are free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Reads and writes together.
    pub total: Limit,
    /// Reads.
    pub read: Limit,
    /// Writes, zeroes and discards.
    pub write: Limit,
    /// How much of each limit may be saved up while less is used; in [`BURSTS`].
    pub burst: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        let none = Limit::default();
        Limits { total: none, read: none, write: none, burst: DEFAULT_BURST }
    }
}

impl Limits {
    /// Whether they limit nothing.
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        [self.total, self.read, self.write].iter().all(|limit| *limit == Limit::default())
    }
}

/// The default of [`Limits::burst`]. It covers timer latency, so that queue depth 1 reaches the
/// limit.
pub const DEFAULT_BURST: Duration = Duration::from_millis(10);

/// The values of [`Limits::burst`].
pub const BURSTS: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(3600);

/// The limits of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeLimits {
    /// Limits of all clients together.
    pub volume: Limits,
    /// Limits of each client.
    pub client: Limits,
}

/// The current limits of a volume and their token buckets.
#[derive(Default)]
pub struct Limiter {
    /// Number of changes of the limits.
    generation: AtomicU64,
    current: Mutex<CurrentLimits>,
}

#[derive(Default)]
struct CurrentLimits {
    limits: VolumeLimits,
    volume: Option<Arc<Buckets>>,
    /// Buckets of clients. They outlive the clients' connections, so that a new connection does not
    /// cancel a debt.
    clients: BTreeMap<Arc<str>, Arc<Buckets>>,
}

impl Limiter {
    /// A limiter with these limits.
    #[must_use]
    pub fn new(limits: VolumeLimits) -> Limiter {
        let limiter = Limiter::default();
        limiter.set_limits(limits);
        limiter
    }

    /// The current limits.
    #[must_use]
    pub fn limits(&self) -> VolumeLimits {
        self.current().limits
    }

    /// Changes the limits; returns whether that is a change. New buckets are empty. Channels notice
    /// at their next request; those that hold requests must be polled.
    pub fn set_limits(&self, limits: VolumeLimits) -> bool {
        let mut current = self.current();
        if current.limits == limits {
            return false;
        }
        if current.limits.volume != limits.volume {
            current.volume = Buckets::of(&limits.volume);
        }
        if current.limits.client != limits.client {
            current.clients.clear();
        }
        current.limits = limits;
        self.generation.fetch_add(1, Ordering::Release);
        true
    }

    /// Changes with the limits.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// The buckets that requests of a client are subject to, and the generation of the limits.
    pub(crate) fn buckets_of(&self, client: Option<&Arc<str>>) -> (u64, RequestBuckets) {
        let mut current = self.current();
        let own = client.and_then(|client| current.buckets_of_client(client));
        (self.generation(), RequestBuckets([current.volume.clone(), own]))
    }

    fn current(&self) -> MutexGuard<'_, CurrentLimits> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CurrentLimits {
    fn buckets_of_client(&mut self, client: &Arc<str>) -> Option<Arc<Buckets>> {
        if let Some(known) = self.clients.get(client) {
            return Some(known.clone());
        }
        let new = Buckets::of(&self.limits.client)?;
        if self.clients.len() >= MAX_CLIENTS {
            self.clients.retain(|_, buckets| Arc::strong_count(buckets) > 1);
        }
        self.clients.insert(client.clone(), new.clone());
        Some(new)
    }
}

/// Whether a request reads or writes. Only such requests are limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

impl Direction {
    pub(crate) fn of(op: Op) -> Option<Direction> {
        match op {
            Op::Read => Some(Direction::Read),
            op => op.is_write().then_some(Direction::Write),
        }
    }
}

/// The buckets of a volume and of a client.
#[derive(Default)]
pub(crate) struct RequestBuckets([Option<Arc<Buckets>>; 2]);

/// The tokens that a request has taken from [`RequestBuckets`].
pub(crate) struct TakenTokens {
    direction: Direction,
    charges: [Charges; 2],
}

/// The cost of a request for each bucket of [`Buckets::of_direction`].
type Charges = [Charge; 4];

/// What a request has paid to a bucket.
#[derive(Clone, Copy, Default)]
struct Charge {
    cost_ns: u64,
    /// When the tokens may be used, in the time of the bucket.
    due_ns: u64,
}

impl RequestBuckets {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// Takes tokens for a request.
    pub(crate) fn take(&self, io: &Io, direction: Direction, now: Instant) -> TakenTokens {
        let take = |buckets: &Option<Arc<Buckets>>| {
            buckets.as_ref().map(|buckets| buckets.take(io, direction, now)).unwrap_or_default()
        };
        TakenTokens { direction, charges: self.0.each_ref().map(take) }
    }

    /// When the request that has these tokens may start.
    pub(crate) fn due(&self, taken: &TakenTokens, now: Instant) -> Instant {
        let waits = self.pairs(taken).map(|(buckets, charges)| buckets.wait(charges, now));
        now + waits.max().unwrap_or_default()
    }

    /// Moves the request forward if others have returned tokens since it took its own.
    pub(crate) fn advance(&self, taken: &mut TakenTokens, now: Instant) {
        let direction = taken.direction;
        for (buckets, charges) in self.0.iter().zip(&mut taken.charges) {
            if let Some(buckets) = buckets {
                buckets.advance(charges, direction, now);
            }
        }
    }

    /// Returns the tokens of a request that did not start.
    pub(crate) fn put_back(&self, taken: &TakenTokens) {
        for (buckets, charges) in self.pairs(taken) {
            buckets.put_back(charges, taken.direction);
        }
    }

    /// Exchanges the tokens of a request for those of `new` where the buckets differ.
    pub(crate) fn exchange(&self, new: &RequestBuckets, taken: &mut TakenTokens, io: &Io, now: Instant) {
        let direction = taken.direction;
        for ((old, new), charges) in self.0.iter().zip(&new.0).zip(&mut taken.charges) {
            if old.as_ref().map(Arc::as_ptr) == new.as_ref().map(Arc::as_ptr) {
                continue;
            }
            if let Some(old) = old {
                old.put_back(charges, direction);
            }
            *charges = new.as_ref().map(|new| new.take(io, direction, now)).unwrap_or_default();
        }
    }

    fn pairs<'a>(&'a self, taken: &'a TakenTokens) -> impl Iterator<Item = (&'a Buckets, &'a Charges)> {
        let pairs = self.0.iter().zip(&taken.charges);
        pairs.filter_map(|(buckets, charges)| Some((&**buckets.as_ref()?, charges)))
    }
}

/// The token buckets of one set of limits.
struct Buckets {
    /// Zero of the buckets' times.
    origin: OnceLock<Instant>,
    burst_ns: u64,
    total: KindBuckets,
    read: KindBuckets,
    write: KindBuckets,
}

/// Buckets of requests and of bytes.
type KindBuckets = [Option<Bucket>; 2];

impl Buckets {
    /// Empty buckets; `None` if there is no limit.
    fn of(limits: &Limits) -> Option<Arc<Buckets>> {
        if limits.is_unlimited() {
            return None;
        }
        let burst_ns = limits.burst.as_nanos() as u64;
        let pair = |limit: Limit| {
            [limit.iops, limit.bytes_per_s].map(|rate| rate.map(|rate| Bucket::new(rate, burst_ns)))
        };
        Some(Arc::new(Buckets {
            origin: OnceLock::new(),
            burst_ns,
            total: pair(limits.total),
            read: pair(limits.read),
            write: pair(limits.write),
        }))
    }

    /// The buckets that a request of this direction is charged to: of requests and of bytes, in
    /// all and of its direction.
    fn of_direction(&self, direction: Direction) -> [Option<&Bucket>; 4] {
        let [requests, bytes] = &self.total;
        let [own_requests, own_bytes] = match direction {
            Direction::Read => &self.read,
            Direction::Write => &self.write,
        };
        [requests, bytes, own_requests, own_bytes].map(Option::as_ref)
    }

    fn take(&self, io: &Io, direction: Direction, now: Instant) -> Charges {
        let full_ns = self.full_ns(now);
        // A request of invalid length fails at the volume and must not use up the rate of years.
        let bytes = if io.op.moves_data() { io.len.min(MAX_TRANSFER.into()) } else { 0 };
        let mut charges = Charges::default();
        let units = [1, bytes, 1, bytes];
        for ((charge, bucket), units) in charges.iter_mut().zip(self.of_direction(direction)).zip(units) {
            if let Some(bucket) = bucket {
                *charge = bucket.take(units, full_ns);
            }
        }
        charges
    }

    fn wait(&self, charges: &Charges, now: Instant) -> Duration {
        let due_ns = charges.iter().map(|charge| charge.due_ns).max().unwrap_or(0);
        Duration::from_nanos(due_ns.saturating_sub(self.full_ns(now) + self.burst_ns))
    }

    fn advance(&self, charges: &mut Charges, direction: Direction, now: Instant) {
        let full_ns = self.full_ns(now);
        for (charge, bucket) in charges.iter_mut().zip(self.of_direction(direction)) {
            if let Some(bucket) = bucket {
                bucket.advance(charge, full_ns);
            }
        }
    }

    fn put_back(&self, charges: &Charges, direction: Direction) {
        for (charge, bucket) in charges.iter().zip(self.of_direction(direction)) {
            if let Some(bucket) = bucket {
                bucket.put_back(charge);
            }
        }
    }

    /// The time of a bucket that is full now.
    fn full_ns(&self, now: Instant) -> u64 {
        now.saturating_duration_since(*self.origin.get_or_init(|| now)).as_nanos() as u64
    }
}

struct Bucket {
    per_second: NonZeroU64,
    /// When the bucket will be full again, in nanoseconds since one burst before the origin.
    paid_ns: AtomicU64,
}

impl Bucket {
    /// An empty bucket.
    fn new(per_second: NonZeroU64, burst_ns: u64) -> Bucket {
        Bucket { per_second, paid_ns: AtomicU64::new(burst_ns) }
    }

    /// Takes tokens; a bucket whose time is `full_ns` is full. A request may take more than the
    /// bucket holds; later ones then wait longer.
    fn take(&self, units: u64, full_ns: u64) -> Charge {
        let cost_ns = self.cost_ns(units);
        let pay = |paid: u64| Some(paid.max(full_ns).saturating_add(cost_ns));
        let before = self.paid_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay);
        Charge { cost_ns, due_ns: before.unwrap_or_else(|unchanged| unchanged).max(full_ns) }
    }

    /// Moves a charge to the time that it would have if it had been taken last, if that is
    /// earlier: then others have returned tokens since.
    fn advance(&self, charge: &mut Charge, full_ns: u64) {
        let last_ns = self.paid_ns.load(Ordering::Relaxed).saturating_sub(charge.cost_ns).max(full_ns);
        if last_ns < charge.due_ns {
            charge.due_ns = last_ns;
            self.paid_ns.fetch_max(last_ns.saturating_add(charge.cost_ns), Ordering::Relaxed);
        }
    }

    fn put_back(&self, charge: &Charge) {
        let give = |paid: u64| Some(paid.saturating_sub(charge.cost_ns));
        let _ = self.paid_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, give);
    }

    fn cost_ns(&self, units: u64) -> u64 {
        let cost = (u128::from(units) * NS_PER_S).div_ceil(self.per_second.get().into());
        u64::try_from(cost).unwrap_or(u64::MAX)
    }
}

/// Number of clients of a volume from which on those without connections are forgotten.
const MAX_CLIENTS: usize = 1024;
const NS_PER_S: u128 = 1_000_000_000;
