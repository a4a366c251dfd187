//! Rate limits of a volume, shared by all of its channels.
//!
//! Each limit is a token bucket stored as one number, the time at which the bucket will be full
//! again (the "virtual scheduling" form of the generic cell rate algorithm, ITU-T I.371). When a
//! bucket permits a request is known at once, and cores share a bucket through one atomic without a
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
    /// See [`Limiter::suspend`].
    is_suspended: bool,
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

    /// Limits nothing, or limits again as before. Channels notice as they notice changed limits.
    pub fn suspend(&self, is_suspended: bool) {
        let mut current = self.current();
        if std::mem::replace(&mut current.is_suspended, is_suspended) != is_suspended {
            self.generation.fetch_add(1, Ordering::Release);
        }
    }

    /// Whether the limits are suspended.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.current().is_suspended
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
        if current.is_suspended {
            return (self.generation(), RequestBuckets::default());
        }
        let own = client.and_then(|client| current.buckets_of_client(client));
        (self.generation(), RequestBuckets([own, current.volume.clone()]))
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

/// What limits charge for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    pub(crate) direction: Direction,
    bytes: u64,
}

impl Cost {
    /// The cost of a request; `None`: it is free.
    #[must_use]
    pub fn of(io: &Io) -> Option<Cost> {
        let bytes = if io.op.moves_data() { io.len } else { 0 };
        match io.op {
            Op::Read => Some(Cost::new(Direction::Read, bytes)),
            op => op.is_write().then(|| Cost::write(bytes)),
        }
    }

    /// The cost of a write of this many bytes.
    #[must_use]
    pub fn write(bytes: u64) -> Cost {
        Cost::new(Direction::Write, bytes)
    }

    fn new(direction: Direction, bytes: u64) -> Cost {
        // A request of invalid length fails at the volume and must not use up the rate of years.
        Cost { direction, bytes: bytes.min(MAX_TRANSFER.into()) }
    }
}

/// The buckets of a client and of the volume, in the order in which a request takes tokens.
#[derive(Default)]
pub(crate) struct RequestBuckets([Option<Arc<Buckets>>; 2]);

/// The tokens that a request has taken from [`RequestBuckets`] so far.
pub(crate) struct TakenTokens {
    cost: Cost,
    charges: [Charges; 2],
}

/// What a request has paid to each of [`Buckets::in_order`], if it has taken tokens there.
type Charges = [Option<[Charge; 2]>; 2];

/// What a request has paid to a bucket.
#[derive(Clone, Copy, Default)]
struct Charge {
    cost_ns: u64,
    /// When the tokens may be used, in the time of the bucket.
    due_ns: u64,
}

impl TakenTokens {
    /// None yet, for a request of this cost.
    pub(crate) fn none(cost: Cost) -> TakenTokens {
        TakenTokens { cost, charges: Default::default() }
    }
}

impl RequestBuckets {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// When the request may start, as far as is known now: later if another limit delays it
    /// further, earlier if others return tokens.
    ///
    /// This takes its tokens, from one limit after another: those of the next only when those of
    /// the ones before are due. So a request that is held by the limits of its client, or of
    /// writes, has no tokens that others need.
    pub(crate) fn due(&self, taken: &mut TakenTokens, now: Instant) -> Instant {
        let TakenTokens { cost, charges } = taken;
        let limits =
            self.0.iter().zip(charges).filter_map(|(buckets, charges)| Some((buckets.as_ref()?, charges)));
        let mut waits = limits.map(|(buckets, charges)| buckets.wait(*cost, charges, now));
        now + waits.find(|wait| !wait.is_zero()).unwrap_or_default()
    }

    /// Returns the tokens of a request that did not start.
    pub(crate) fn put_back(&self, taken: &TakenTokens) {
        for (buckets, charges) in self.0.iter().zip(&taken.charges) {
            if let Some(buckets) = buckets {
                buckets.put_back(charges, taken.cost.direction);
            }
        }
    }

    /// Returns the tokens of a request where the buckets differ from those of `new`.
    pub(crate) fn put_back_changed(&self, new: &RequestBuckets, taken: &mut TakenTokens) {
        for ((old, new), charges) in self.0.iter().zip(&new.0).zip(&mut taken.charges) {
            if old.as_ref().map(Arc::as_ptr) == new.as_ref().map(Arc::as_ptr) {
                continue;
            }
            if let Some(old) = old {
                old.put_back(charges, taken.cost.direction);
            }
            *charges = Charges::default();
        }
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
struct KindBuckets([Option<Bucket>; 2]);

impl KindBuckets {
    fn new(limit: Limit, burst_ns: u64) -> KindBuckets {
        let rates = [limit.iops, limit.bytes_per_s];
        KindBuckets(rates.map(|rate| rate.map(|rate| Bucket::new(rate, burst_ns))))
    }

    fn take(&self, cost: Cost, full_ns: u64) -> [Charge; 2] {
        let [requests, bytes] = &self.0;
        let take = |bucket: &Option<Bucket>, units| {
            bucket.as_ref().map(|bucket| bucket.take(units, full_ns)).unwrap_or_default()
        };
        [take(requests, 1), take(bytes, cost.bytes)]
    }

    /// Moves the charges forward as [`Bucket::advance`]; returns when both are due.
    fn advance(&self, charges: &mut [Charge; 2], full_ns: u64) -> u64 {
        for (bucket, charge) in self.0.iter().zip(&mut *charges) {
            if let Some(bucket) = bucket {
                bucket.advance(charge, full_ns);
            }
        }
        charges.iter().map(|charge| charge.due_ns).max().unwrap_or(0)
    }

    fn put_back(&self, charges: &[Charge; 2]) {
        for (bucket, charge) in self.0.iter().zip(charges) {
            if let Some(bucket) = bucket {
                bucket.put_back(charge);
            }
        }
    }
}

impl Buckets {
    /// Empty buckets; `None` if there is no limit.
    fn of(limits: &Limits) -> Option<Arc<Buckets>> {
        if limits.is_unlimited() {
            return None;
        }
        let burst_ns = limits.burst.as_nanos() as u64;
        Some(Arc::new(Buckets {
            origin: OnceLock::new(),
            burst_ns,
            total: KindBuckets::new(limits.total, burst_ns),
            read: KindBuckets::new(limits.read, burst_ns),
            write: KindBuckets::new(limits.write, burst_ns),
        }))
    }

    /// The buckets of requests of this direction, in the order in which a request takes tokens.
    fn in_order(&self, direction: Direction) -> [&KindBuckets; 2] {
        match direction {
            Direction::Read => [&self.read, &self.total],
            Direction::Write => [&self.write, &self.total],
        }
    }

    /// How long a request still waits for tokens, as far as is known now. It takes them, as
    /// [`RequestBuckets::due`] explains.
    fn wait(&self, cost: Cost, charges: &mut Charges, now: Instant) -> Duration {
        let full_ns = self.full_ns(now);
        for (kind, charges) in self.in_order(cost.direction).into_iter().zip(charges) {
            let charges = charges.get_or_insert_with(|| kind.take(cost, full_ns));
            let due_ns = kind.advance(charges, full_ns);
            let wait_ns = due_ns.saturating_sub(full_ns + self.burst_ns);
            if wait_ns > 0 {
                return Duration::from_nanos(wait_ns);
            }
        }
        Duration::ZERO
    }

    fn put_back(&self, charges: &Charges, direction: Direction) {
        for (kind, charges) in self.in_order(direction).into_iter().zip(charges) {
            if let Some(charges) = charges {
                kind.put_back(charges);
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

/// Above this many clients of a volume, those without connections are dropped.
const MAX_CLIENTS: usize = 1024;
const NS_PER_S: u128 = 1_000_000_000;
