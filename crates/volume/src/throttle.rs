//! Holds requests until the limits of their volume permit them.

use crate::io::{Io, Tag};
use crate::limiter::{Cost, Direction, Limiter, RequestBuckets, TakenTokens};
use crate::ready::Waker;
use crate::volume::Core;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Holds the requests of one client to one channel until the volume's limits permit them.
///
/// Reads and writes are throttled apart, each in order. Only the first request of each has tokens,
/// so channels share a limit evenly, however many requests each has, and cancelled requests cost
/// nothing. All other operations pass: a flush covers completed writes only, and a throttled write
/// is not complete.
pub struct Throttle {
    limiter: Arc<Limiter>,
    client: Option<Arc<str>>,
    /// The generation of the limits that `buckets` belong to; `None` before the first request.
    generation: Option<u64>,
    buckets: RequestBuckets,
    /// By [`Direction`].
    queues: [ThrottledRequests; 2],
    /// The earliest pending wake-up requested from the core.
    armed: Option<Instant>,
}

/// Requests of one direction, the oldest first.
#[derive(Default)]
struct ThrottledRequests {
    requests: VecDeque<ThrottledIo>,
    /// What the first request has taken.
    taken: Option<TakenTokens>,
}

struct ThrottledIo {
    io: Io,
    cost: Cost,
    since: Instant,
}

const DIRECTIONS: [Direction; 2] = [Direction::Read, Direction::Write];

impl Throttle {
    /// Holds requests of `client`, if it is known, which is subject to the limits of each client.
    #[must_use]
    pub fn new(limiter: Arc<Limiter>, client: Option<Arc<str>>) -> Throttle {
        Throttle {
            limiter,
            client,
            generation: None,
            buckets: RequestBuckets::default(),
            queues: Default::default(),
            armed: None,
        }
    }

    /// Reserves memory for holding `depth` requests.
    #[must_use]
    pub fn with_capacity(mut self, depth: u32) -> Throttle {
        self.queues.iter_mut().for_each(|throttled| throttled.requests.reserve(depth as usize));
        self
    }

    /// Follows another limiter.
    pub fn set_limiter(&mut self, limiter: Arc<Limiter>) {
        (self.limiter, self.generation) = (limiter, None);
    }

    /// Returns the request if it may start now, or throttles it.
    #[must_use]
    pub fn admit(&mut self, io: Io, now: Instant) -> Option<Io> {
        let cost = Cost::of(&io);
        self.admit_at_cost(io, cost, now)
    }

    /// As [`Throttle::admit`], for a request whose cost is another one; `None`: it is free.
    #[must_use]
    pub fn admit_at_cost(&mut self, io: Io, cost: Option<Cost>, now: Instant) -> Option<Io> {
        self.follow_limits();
        let Some(cost) = cost else { return Some(io) };
        let throttled = &mut self.queues[cost.direction as usize];
        if throttled.requests.is_empty() {
            let mut taken = TakenTokens::none(cost);
            if self.buckets.due(&mut taken, now) <= now {
                return Some(io);
            }
            throttled.taken = Some(taken);
        }
        throttled.requests.push_back(ThrottledIo { io, cost, since: now });
        None
    }

    /// The next throttled request that may start now. It stays throttled.
    #[must_use]
    pub fn peek_due(&mut self, now: Instant) -> Option<&Io> {
        let direction = self.due_direction(now)?;
        self.queues[direction as usize].requests.front().map(|throttled| &throttled.io)
    }

    /// Removes the next throttled request that may start now; returns it, and how long it was
    /// throttled.
    pub fn pop_due(&mut self, now: Instant) -> Option<(Io, Duration)> {
        let direction = self.due_direction(now)?;
        self.remove(direction, 0, now)
    }

    /// Removes the request with this tag, which [`Throttle::peek_due`] has returned; returns it,
    /// and how long it was throttled.
    pub fn start(&mut self, tag: Tag, now: Instant) -> Option<(Io, Duration)> {
        self.remove(self.direction_of_first(tag)?, 0, now)
    }

    /// Cancels the next throttled request; returns it, and how long it was throttled.
    pub fn cancel_first(&mut self, now: Instant) -> Option<(Io, Duration)> {
        DIRECTIONS.into_iter().find_map(|direction| self.cancel_at(direction, 0, now))
    }

    /// Removes the throttled request with this tag; returns it, and how long it was throttled.
    pub fn cancel(&mut self, tag: Tag, now: Instant) -> Option<(Io, Duration)> {
        let (direction, at) = DIRECTIONS.into_iter().find_map(|direction| {
            let requests = &self.queues[direction as usize].requests;
            Some((direction, requests.iter().position(|throttled| throttled.io.tag == tag)?))
        })?;
        self.cancel_at(direction, at, now)
    }

    /// The generation of the limits that the next request is checked against, unless they change.
    #[must_use]
    pub fn generation(&self) -> Option<u64> {
        self.generation
    }

    /// Whether requests pass without a check until the limits change: there are none, and no
    /// request is throttled. If so, the generation of the limits.
    #[must_use]
    pub fn free_at(&self) -> Option<u64> {
        self.generation.filter(|_| self.buckets.is_empty() && self.is_empty())
    }

    /// Whether no request is throttled.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queues.iter().all(|throttled| throttled.requests.is_empty())
    }

    /// When the next throttled request may start, as far as is known now: earlier if others return
    /// tokens.
    #[must_use]
    pub fn next_due(&mut self, now: Instant) -> Option<Instant> {
        self.follow_limits();
        DIRECTIONS.into_iter().filter_map(|direction| self.due(direction, now)).min()
    }

    /// Requests a wake-up for the next throttled request, unless one is pending.
    pub fn arm(&mut self, core: &dyn Core, waker: &Waker) {
        let now = core.now();
        let Some(due) = self.next_due(now) else { return };
        let wake_at = due.min(now + MAX_SLEEP);
        if self.armed.is_some_and(|armed| armed <= now) {
            self.armed = None;
        }
        if self.armed.is_none_or(|armed| wake_at < armed) {
            core.wake_at(wake_at, waker);
            self.armed = Some(wake_at);
        }
    }

    /// Exchanges the buckets if the limits have changed; throttled requests return their tokens.
    fn follow_limits(&mut self) {
        if self.generation == Some(self.limiter.generation()) {
            return;
        }
        let (generation, buckets) = self.limiter.buckets_of(self.client.as_ref());
        let old = std::mem::replace(&mut self.buckets, buckets);
        self.generation = Some(generation);
        for throttled in &mut self.queues {
            if let Some(taken) = &mut throttled.taken {
                old.put_back_changed(&self.buckets, taken);
            }
        }
    }

    /// The direction whose first throttled request has this tag.
    fn direction_of_first(&self, tag: Tag) -> Option<Direction> {
        let is_first = |throttled: &ThrottledRequests| {
            throttled.requests.front().is_some_and(|first| first.io.tag == tag)
        };
        DIRECTIONS.into_iter().find(|direction| is_first(&self.queues[*direction as usize]))
    }

    /// The direction of the next throttled request that may start now.
    fn due_direction(&mut self, now: Instant) -> Option<Direction> {
        self.follow_limits();
        DIRECTIONS.into_iter().find(|direction| self.due(*direction, now).is_some_and(|due| due <= now))
    }

    /// When the first throttled request of a direction may start.
    fn due(&mut self, direction: Direction, now: Instant) -> Option<Instant> {
        let throttled = &mut self.queues[direction as usize];
        let taken = throttled.taken.as_mut()?;
        Some(self.buckets.due(taken, now))
    }

    /// Removes a request that will not start by the limits.
    fn cancel_at(&mut self, direction: Direction, at: usize, now: Instant) -> Option<(Io, Duration)> {
        if at == 0
            && let Some(taken) = &self.queues[direction as usize].taken
        {
            self.buckets.put_back(taken);
        }
        self.remove(direction, at, now)
    }

    /// Removes a request; if it was the first one, the next one may take tokens.
    fn remove(&mut self, direction: Direction, at: usize, now: Instant) -> Option<(Io, Duration)> {
        let throttled = &mut self.queues[direction as usize];
        let ThrottledIo { io, since, .. } = throttled.requests.remove(at)?;
        if at == 0 {
            throttled.taken = throttled.requests.front().map(|next| TakenTokens::none(next.cost));
        }
        Some((io, now.saturating_duration_since(since)))
    }
}

/// The longest time without a check whether others have returned tokens, which wakes nobody.
const MAX_SLEEP: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::TestCore;
    use crate::io::Op;
    use crate::limiter::{Limit, Limits, VolumeLimits};
    use crate::{Seg, SgList};
    use std::num::NonZeroU64;

    fn iops(iops: u64) -> Limits {
        Limits { total: Limit { iops: NonZeroU64::new(iops), bytes_per_s: None }, ..Limits::default() }
    }

    fn bandwidth(bytes_per_s: u64) -> Limits {
        Limits { total: Limit { iops: None, bytes_per_s: NonZeroU64::new(bytes_per_s) }, ..Limits::default() }
    }

    fn limiter(volume: Limits, client: Limits) -> Arc<Limiter> {
        Arc::new(Limiter::new(VolumeLimits { volume, client }))
    }

    fn unnamed(limits: Limits) -> Throttle {
        Throttle::new(limiter(limits, Limits::default()), None)
    }

    fn read(tag: u64, len: u64) -> Io {
        Io::new(Tag(tag), Op::Read, 0, len)
    }

    fn write(tag: u64, len: usize) -> Io {
        let data = Some(SgList::one(Seg::from_slice(&vec![1; len])));
        Io { tag: Tag(tag), op: Op::Write { fua: false }, offset: 0, len: len as u64, data }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Submits `ios` at `now` and returns when each one starts, in milliseconds after that.
    fn starts_ms(throttle: &mut Throttle, ios: impl IntoIterator<Item = Io>, now: Instant) -> Vec<u64> {
        let mut starts: Vec<_> =
            ios.into_iter().filter_map(|io| throttle.admit(io, now)).map(|_| 0).collect();
        while let Some(due) = throttle.next_due(now) {
            assert!(throttle.pop_due(due - ms(1)).is_none(), "none starts early");
            throttle.pop_due(due).unwrap();
            starts.push((due - now).as_millis() as u64);
        }
        starts
    }

    #[test]
    fn requests_start_at_the_rate_of_the_limit() {
        let now = Instant::now();
        let reads = |len| (0..4).map(move |tag| read(tag, len));
        assert_eq!(starts_ms(&mut unnamed(iops(100)), reads(512), now), [0, 10, 20, 30]);
        assert_eq!(starts_ms(&mut unnamed(bandwidth(10 << 10)), reads(1024), now), [0, 100, 200, 300]);
        assert_eq!(starts_ms(&mut unnamed(Limits::default()), reads(512), now), [0; 4]);
    }

    #[test]
    fn a_request_larger_than_the_burst_starts_and_later_ones_pay_for_it() {
        let mut throttle = unnamed(bandwidth(1 << 20));
        let ios = [read(0, 4 << 20), read(1, 512), read(2, 512)];
        assert_eq!(starts_ms(&mut throttle, ios, Instant::now()), [0, 4000, 4000]);
    }

    #[test]
    fn an_unused_limit_is_saved_up_to_the_burst() {
        let mut throttle = unnamed(Limits { burst: ms(50), ..iops(100) });
        let now = Instant::now();
        assert_eq!(starts_ms(&mut throttle, (0..2).map(|tag| read(tag, 512)), now), [0, 10]);
        let later = now + Duration::from_secs(100);
        let starts = starts_ms(&mut throttle, (0..8).map(|tag| read(tag, 512)), later);
        assert_eq!(starts, [0, 0, 0, 0, 0, 0, 10, 20], "five saved up, and one on credit");
    }

    #[test]
    fn channels_share_a_limit_evenly_however_deep_their_queues_are() {
        let (limiter, now) = (limiter(iops(100), Limits::default()), Instant::now());
        let mut all = [64, 1].map(|depth| (Throttle::new(limiter.clone(), None), depth, 0));
        for (throttle, depth, started) in &mut all {
            *started += (0..*depth).filter_map(|tag| throttle.admit(read(tag, 512), now)).count();
        }
        for passed in 0..1000 {
            for (throttle, _, started) in &mut all {
                while throttle.pop_due(now + ms(passed)).is_some() {
                    *started += 1;
                    // Each completion is followed by another request.
                    assert!(throttle.admit(read(99, 512), now + ms(passed)).is_none());
                }
                if throttle.is_empty() {
                    *started += usize::from(throttle.admit(read(99, 512), now + ms(passed)).is_some());
                }
            }
        }
        let started = all.map(|(_, _, started)| started);
        assert_eq!(started.iter().sum::<usize>(), 100);
        assert!(started.iter().all(|started| (49..=51).contains(started)), "{started:?}");
    }

    #[test]
    fn each_client_has_the_limits_of_a_client_and_all_share_those_of_the_volume() {
        let (limiter, now) = (limiter(iops(100), iops(10)), Instant::now());
        let of = |client: &str| Throttle::new(limiter.clone(), Some(client.into()));
        let reads = || (0..3).map(|tag| read(tag, 512));
        assert_eq!(starts_ms(&mut of("a"), reads(), now), [0, 100, 200]);
        // The same client over another connection, and another client.
        assert_eq!(starts_ms(&mut of("a"), reads(), now), [300, 400, 500]);
        assert_eq!(starts_ms(&mut of("b"), reads(), now + ms(1000)), [0, 100, 200]);
        // Without a name, only the volume's limits apply.
        let mut unnamed = Throttle::new(limiter.clone(), None);
        assert_eq!(starts_ms(&mut unnamed, reads(), now + ms(2000)), [0, 0, 10]);
    }

    #[test]
    fn a_request_held_by_one_limit_takes_nothing_from_those_that_others_need() {
        let now = Instant::now();
        let writes = Limits { write: bandwidth(1 << 20).total, ..bandwidth(100 << 20) };
        // Each limits the crowd to 1 MiB/s, and the other one to 100 MiB/s.
        for limiter in [limiter(bandwidth(100 << 20), bandwidth(1 << 20)), limiter(writes, Limits::default())]
        {
            let of = |client: &str| Throttle::new(limiter.clone(), Some(client.into()));
            let mut crowd: Vec<_> = (0..30).map(|_| of("many")).collect();
            let started: Vec<_> =
                crowd.iter_mut().filter_map(|one| one.admit(write(0, 1 << 20), now)).collect();
            assert_eq!(started.len(), 1);
            assert_eq!(starts_ms(&mut of("other"), [read(0, 4096)], now), [10], "after the one that started");
            // Those that are throttled start at their own rate.
            let starts = crowd.iter_mut().skip(1).map(|one| (one.next_due(now).unwrap() - now).as_secs());
            assert!(starts.eq(1..30));
            for (nth, one) in crowd.iter_mut().enumerate().skip(1) {
                assert!(one.pop_due(now + ms(1000 * nth as u64)).is_some());
            }
        }
    }

    #[test]
    fn a_request_may_cost_what_another_does() {
        let limit = Limit { iops: None, bytes_per_s: NonZeroU64::new(1 << 20) };
        let mut throttle = unnamed(Limits { write: limit, ..Limits::default() });
        let now = Instant::now();
        let mut admit = |tag, cost| throttle.admit_at_cost(read(tag, 512), cost, now).is_some();
        assert!(admit(0, Some(Cost::write(1 << 20))) && !admit(1, Some(Cost::write(512))) && admit(2, None));
        assert_eq!(throttle.next_due(now), Some(now + ms(1000)));
    }

    #[test]
    fn a_changed_limit_holds_for_held_requests() {
        let (limiter, now) = (limiter(iops(1), Limits::default()), Instant::now());
        let mut throttle = Throttle::new(limiter.clone(), None);
        let passed = (0..5).filter_map(|tag| throttle.admit(read(tag, 512), now)).count();
        assert_eq!((passed, throttle.next_due(now)), (1, Some(now + ms(1000))));
        let set = |volume| limiter.set_limits(VolumeLimits { volume, client: Limits::default() });
        assert!(set(iops(100)) && !set(iops(100)));
        assert!(throttle.pop_due(now).is_some(), "the debt of the old limit is gone");
        assert_eq!(throttle.next_due(now), Some(now + ms(10)));
        assert!(set(Limits::default()));
        assert_eq!(std::iter::from_fn(|| throttle.pop_due(now)).count(), 3);
        assert_eq!((throttle.free_at(), throttle.next_due(now)), (Some(limiter.generation()), None));
        assert!(set(iops(1)) && throttle.free_at() != Some(limiter.generation()));
    }

    #[test]
    fn a_changed_limit_of_clients_moves_nobody_at_the_volume_s() {
        let (limiter, now) = (limiter(iops(10), Limits::default()), Instant::now());
        let mut all: Vec<_> =
            (0..100).map(|nth| Throttle::new(limiter.clone(), Some(nth.to_string().into()))).collect();
        assert!(all[0].admit(read(0, 512), now).is_some());
        assert!(all.iter_mut().all(|throttle| throttle.admit(read(1, 512), now).is_none()));
        limiter.set_limits(VolumeLimits { volume: iops(10), client: iops(1000) });
        // In any order, and late.
        for (nth, throttle) in all.iter_mut().enumerate().rev() {
            assert_eq!(throttle.next_due(now + ms(50)), Some(now + ms(100 + 100 * nth as u64)));
        }
        assert!(all[0].pop_due(now + ms(99)).is_none() && all[0].pop_due(now + ms(100)).is_some());
    }

    #[test]
    fn tokens_that_others_return_move_a_held_request_forward() {
        let (limiter, now) = (limiter(bandwidth(1 << 20), Limits::default()), Instant::now());
        let mut others: Vec<_> = (0..8).map(|_| Throttle::new(limiter.clone(), None)).collect();
        let mut throttle = Throttle::new(limiter, None);
        let passed: Vec<_> =
            others.iter_mut().filter_map(|other| other.admit(write(0, 1 << 20), now)).collect();
        assert!(passed.len() == 1 && throttle.admit(read(0, 4096), now).is_none());
        assert_eq!(throttle.next_due(now), Some(now + ms(8000)));
        let aborted = others.iter_mut().filter_map(|other| other.cancel(Tag(0), now)).count();
        assert_eq!((aborted, throttle.next_due(now)), (7, Some(now + ms(1000))), "after what has passed");
        assert!(throttle.pop_due(now + ms(999)).is_none() && throttle.pop_due(now + ms(1000)).is_some());
        // The total stays what the limit permits: 4 KiB more take 4 ms more.
        let starts = starts_ms(&mut throttle, [read(1, 4096)], now);
        assert_eq!(starts, [1003]);
    }

    #[test]
    fn a_held_request_sleeps_a_second_at_most() {
        let (core, mut throttle) = (TestCore::new(), unnamed(bandwidth(1 << 20)));
        let (now, waker) = (core.now(), core.ready().waker(1));
        assert!(
            throttle.admit(write(0, 8 << 20), now).is_some() && throttle.admit(read(1, 512), now).is_none()
        );
        for second in 1..=8 {
            throttle.arm(&*core, &waker);
            assert!(throttle.peek_due(core.now()).is_none() && core.jump());
            assert_eq!(core.now(), now + ms(1000 * second));
        }
        assert_eq!(throttle.peek_due(core.now()).map(|io| io.tag), Some(Tag(1)));
        assert!(throttle.start(Tag(1), core.now()).is_some());
    }

    #[test]
    fn a_cancelled_request_costs_nothing() {
        let mut throttle = unnamed(bandwidth(1 << 20));
        let now = Instant::now();
        assert!(throttle.admit(write(0, 1 << 20), now).is_some());
        for tag in 1..100 {
            assert!(throttle.admit(write(tag, 1 << 20), now).is_none());
        }
        for tag in 1..99 {
            let (io, delay) = throttle.cancel(Tag(tag), now + ms(7)).unwrap();
            assert_eq!((io.tag, delay), (Tag(tag), ms(7)));
        }
        assert!(throttle.cancel(Tag(1), now).is_none());
        let (io, delay) = throttle.pop_due(now + ms(1000)).unwrap();
        assert_eq!((io.tag, delay), (Tag(99), ms(1000)));
    }

    #[test]
    fn reads_pass_held_writes_and_flushes_pass_all() {
        let limit = Limit { iops: NonZeroU64::new(1), bytes_per_s: None };
        let mut throttle = unnamed(Limits { write: limit, ..Limits::default() });
        let now = Instant::now();
        assert!(throttle.admit(write(0, 512), now).is_some() && throttle.admit(write(1, 512), now).is_none());
        assert!(throttle.admit(read(2, 512), now).is_some());
        assert!(throttle.admit(Io::new(Tag(3), Op::Flush, 0, 0), now).is_some());
        let (io, _) = throttle.cancel_first(now).unwrap();
        assert_eq!(io.tag, Tag(1));
        assert!(throttle.is_empty());
    }

    #[test]
    fn a_new_connection_does_not_cancel_a_client_s_debt() {
        let (limiter, now) = (limiter(Limits::default(), bandwidth(1 << 20)), Instant::now());
        let connect = || Throttle::new(limiter.clone(), Some("a".into()));
        assert!(connect().admit(read(0, 8 << 20), now).is_some());
        assert_eq!(starts_ms(&mut connect(), [read(1, 512)], now), [8000]);
    }
}
