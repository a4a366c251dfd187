//! Congestion control: the network marks packets, the receiver notifies their sender, and the
//! sender limits its rate.
//!
//! ```text
//!   marked packet ──▶ notification (CNP) to its sender, at most one in 50 µs
//!   notification  ──▶ rate: halved at first, reduced by less if notifications are rare
//!                     └─▶ every 300 µs without one: half way back, five times; then beyond,
//!                         by equal steps, then by growing ones
//! ```
//! Annex A17 (§A17.9) defines the notification and leaves the rate to the sender. It is that of
//! DCQCN ("Congestion Control for Large-Scale RDMA Deployments", 2015), as in adapters, with two
//! differences: time alone raises it and not the number of bytes, and reductions are as far apart
//! as [`FEEDBACK_LEN`] bytes, because a queue is as long on a slow link and takes longer to empty.
//!
//! # Without congestion
//! There is no limit before the first notification, and again once the limit has held nothing back
//! for [`RELEASE_TIME`]; a packet then costs an addition to the [`SendMeter`], from which the first
//! limit is taken.
//!
//! # Pacing without a timer for each packet
//! Packets may leave in a burst of [`BURST_TIME`] at the current rate, and then have to wait until
//! the rate has caught up. Rates change when packets are sent, by as many steps as are due. So
//! there is one timer at most, which ends the wait.
//!
//! # A flood of forged notifications
//! A notification has no sequence number, so it is easier to forge than other packets. The rate
//! does not fall below [`MIN_RATE`].
//!
//! # Who is notified
//! Linux' rxe does not know the opcode of notifications, and before its fix of 2026 ("Reject
//! unknown opcodes before ICRC processing") such a packet could panic the kernel. So only peers are
//! notified that have sent a notification themselves, or whose GUID is one of this implementation.

use super::cm::RoceTerms;
use super::guid::is_guid;
use blockmux_wire::roce::bth::{Bth, NOTIFICATION_RESERVED_LEN};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Congestion control of one connection, in both directions.
pub(super) struct CongestionControl {
    peer_qp: u32,
    /// Whether the peer knows notifications.
    notifies: bool,
    is_notification_due: bool,
    /// When the peer was last notified.
    notified_at: Option<Instant>,
    meter: SendMeter,
    limit: Option<RateLimit>,
}

impl CongestionControl {
    pub(super) fn new(now: Instant) -> CongestionControl {
        CongestionControl {
            peer_qp: 0,
            notifies: false,
            is_notification_due: false,
            notified_at: None,
            meter: SendMeter::new(now),
            limit: None,
        }
    }

    /// Sets what both sides have agreed on.
    pub(super) fn connect(&mut self, terms: &RoceTerms) {
        (self.peer_qp, self.notifies) = (terms.peer_qp, is_guid(terms.peer_guid));
    }

    /// Handles a packet of the peer that the network has marked.
    #[cold]
    pub(super) fn on_mark(&mut self, now: Instant) {
        let is_early = self.notified_at.is_some_and(|at| passed(at, now) < NOTIFICATION_INTERVAL);
        if self.notifies && !is_early {
            (self.is_notification_due, self.notified_at) = (true, Some(now));
        }
    }

    /// Handles a notification of the peer: packets of this side met congestion.
    #[cold]
    pub(super) fn on_notification(&mut self, now: Instant) {
        self.notifies = true;
        self.release(now);
        match &mut self.limit {
            Some(limit) => limit.on_notification(now),
            None => self.limit = Some(RateLimit::new(self.meter.rate(now), now)),
        }
    }

    /// Appends the notification to send, if there is one, to `packet`; returns whether there is.
    #[inline]
    pub(super) fn transmit(&mut self, packet: &mut Vec<u8>) -> bool {
        if !std::mem::take(&mut self.is_notification_due) {
            return false;
        }
        packet.extend_from_slice(Bth::notification(self.peer_qp).as_bytes());
        packet.extend_from_slice(&[0; NOTIFICATION_RESERVED_LEN]);
        true
    }

    /// Whether a packet with data may be sent now.
    #[inline]
    pub(super) fn may_send(&mut self, now: Instant) -> bool {
        self.release(now);
        self.limit.as_mut().is_none_or(|limit| limit.may_send(now))
    }

    /// Removes a limit that has held nothing back for a while.
    #[inline]
    fn release(&mut self, now: Instant) {
        self.limit.take_if(|limit| passed(limit.paused_at, now) >= RELEASE_TIME);
    }

    /// Whether packets with data have to wait after the next one, of `len` bytes.
    #[inline]
    pub(super) fn pauses_after(&self, len: usize, now: Instant) -> bool {
        self.limit.as_ref().is_some_and(|limit| limit.is_beyond_burst(limit.after(len, now), now))
    }

    /// Records that a packet of `len` bytes was sent.
    #[inline]
    pub(super) fn on_sent(&mut self, len: usize, now: Instant) {
        self.meter.add(len, now);
        if let Some(limit) = &mut self.limit {
            limit.on_sent(len, now);
        }
    }

    /// When packets with data may be sent again, if they have to wait.
    #[inline]
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.limit.as_ref().filter(|limit| limit.is_paused).map(|limit| limit.next_at)
    }

    /// Notifies nobody and limits nothing more.
    pub(super) fn stop(&mut self) {
        (self.is_notification_due, self.limit) = (false, None);
    }
}

/// Measures the rate at which a side sends.
struct SendMeter {
    /// The current interval: since when, and how many bytes.
    since: Instant,
    bytes: u64,
    /// The rate of the interval before, in bytes per second.
    before: f64,
}

impl SendMeter {
    fn new(now: Instant) -> SendMeter {
        SendMeter { since: now, bytes: 0, before: 0.0 }
    }

    #[inline]
    fn add(&mut self, len: usize, now: Instant) {
        let time = passed(self.since, now);
        if time >= METER_INTERVAL {
            self.before = self.bytes as f64 / time.as_secs_f64();
            (self.since, self.bytes) = (now, 0);
        }
        self.bytes = self.bytes.saturating_add(len as u64);
    }

    /// The rate of late, in bytes per second. Of a burst after a pause, it is that of the burst.
    fn rate(&self, now: Instant) -> f64 {
        let time = passed(self.since, now).max(NOTIFICATION_INTERVAL);
        let current = self.bytes as f64 / time.as_secs_f64();
        if time < METER_INTERVAL { current.max(self.before) } else { current }
    }
}

/// The rate at which a side may send.
struct RateLimit {
    /// The current rate, in bytes per second.
    rate: f64,
    /// The rate to which it returns.
    target: f64,
    /// How much of the time was congested, from 0 to 1.
    alpha: f64,
    /// Number of steps by which the rate was raised since it was reduced.
    steps: u32,
    /// When the last notification that counted arrived, and when the rate was last reduced.
    notified_at: Instant,
    reduced_at: Instant,
    /// Until when steps of the rate and of `alpha` were made.
    raised_at: Instant,
    decayed_at: Instant,
    /// When the next packet may leave at the current rate. It may leave earlier within a burst.
    next_at: Instant,
    /// Whether the burst has ended, so that packets wait for `next_at`.
    is_paused: bool,
    /// When a burst last ended.
    paused_at: Instant,
}

impl RateLimit {
    /// The limit after the first notification, of a side that has sent at this rate.
    fn new(rate: f64, now: Instant) -> RateLimit {
        let rate = rate.max(MIN_RATE);
        let mut limit = RateLimit {
            rate,
            target: rate,
            alpha: 1.0,
            steps: 0,
            notified_at: now,
            reduced_at: now,
            raised_at: now,
            decayed_at: now,
            next_at: now,
            is_paused: false,
            paused_at: now,
        };
        limit.reduce(now);
        limit
    }

    fn on_notification(&mut self, now: Instant) {
        if passed(self.notified_at, now) < NOTIFICATION_INTERVAL {
            return;
        }
        self.step(now);
        self.alpha += (1.0 - self.alpha) * GAIN;
        // While notifications arrive, the rate is not raised.
        (self.notified_at, self.raised_at, self.decayed_at) = (now, now, now);
        let time_ns = FEEDBACK_LEN / self.rate * 1e9;
        if passed(self.reduced_at, now) >= Duration::from_nanos(time_ns as u64) {
            self.reduce(now);
        }
    }

    fn reduce(&mut self, now: Instant) {
        self.target = self.rate;
        self.rate = (self.rate * (1.0 - self.alpha / 2.0)).max(MIN_RATE);
        (self.steps, self.reduced_at) = (0, now);
    }

    /// Makes the steps that are due.
    #[inline]
    fn step(&mut self, now: Instant) {
        while passed(self.decayed_at, now) >= DECAY_INTERVAL {
            self.alpha *= 1.0 - GAIN;
            self.decayed_at = after(self.decayed_at, DECAY_INTERVAL);
        }
        while passed(self.raised_at, now) >= RAISE_INTERVAL {
            self.steps = self.steps.saturating_add(1);
            if self.steps > FAST_STEPS {
                let hyper_steps = self.steps.saturating_sub(2 * FAST_STEPS);
                let hyper_step = ADDITIVE_STEP * f64::from(hyper_steps);
                self.target += hyper_step.min(self.target * MAX_RAISE).max(ADDITIVE_STEP);
            }
            self.rate = f64::midpoint(self.rate, self.target);
            self.raised_at = after(self.raised_at, RAISE_INTERVAL);
        }
    }

    #[inline]
    fn may_send(&mut self, now: Instant) -> bool {
        self.step(now);
        self.is_paused &= now < self.next_at;
        !self.is_paused
    }

    /// When the next packet may leave after one of `len` bytes. Time that was not used is made up
    /// for up to [`CATCH_UP_TIME`], since timers may be late.
    #[inline]
    fn after(&self, len: usize, now: Instant) -> Instant {
        let earliest = now.checked_sub(CATCH_UP_TIME).unwrap_or(now);
        let time_ns = len as f64 * 1e9 / self.rate;
        // With the lowest rate, even the longest packet takes less than 10 ms.
        after(self.next_at.max(earliest), Duration::from_nanos(time_ns as u64))
    }

    #[inline]
    fn is_beyond_burst(&self, next_at: Instant, now: Instant) -> bool {
        next_at > after(now, BURST_TIME)
    }

    #[inline]
    fn on_sent(&mut self, len: usize, now: Instant) {
        self.next_at = self.after(len, now);
        if self.is_beyond_burst(self.next_at, now) {
            (self.is_paused, self.paused_at) = (true, now);
        }
    }
}

#[inline]
fn passed(from: Instant, now: Instant) -> Duration {
    now.saturating_duration_since(from)
}

#[inline]
fn after(at: Instant, time: Duration) -> Instant {
    at.checked_add(time).unwrap_or(at)
}

/// Least time between two notifications. Earlier ones of the peer do not count (N of DCQCN).
const NOTIFICATION_INTERVAL: Duration = Duration::from_micros(50);
/// Bytes that are sent between two reductions, until the effect of the first one can be seen: about
/// the length of a queue from which switches mark packets.
const FEEDBACK_LEN: f64 = 64e3;
/// Time after which `alpha` falls by [`GAIN`] (K of DCQCN).
const DECAY_INTERVAL: Duration = Duration::from_micros(55);
/// Weight of the latest interval in `alpha` (g of DCQCN).
const GAIN: f64 = 1.0 / 256.0;
/// Time after which the rate is raised; 300 µs in ConnectX adapters.
const RAISE_INTERVAL: Duration = Duration::from_micros(300);
/// Number of steps back to the rate before the reduction (F of DCQCN).
const FAST_STEPS: u32 = 5;
/// By how much later steps raise the target, in bytes per second: 5 Mbit/s, as in ConnectX
/// adapters.
const ADDITIVE_STEP: f64 = 0.625e6;
/// After [`FAST_STEPS`] of these, steps grow by as much each time (hyper increase), up to this part
/// of the target.
const MAX_RAISE: f64 = 1.0 / 64.0;
/// The lowest rate, in bytes per second: 10 Mbit/s.
const MIN_RATE: f64 = 1.25e6;
/// A limit that has held nothing back for so long is removed.
const RELEASE_TIME: Duration = Duration::from_millis(100);
/// Length of a burst.
const BURST_TIME: Duration = Duration::from_micros(100);
const CATCH_UP_TIME: Duration = Duration::from_micros(500);
const METER_INTERVAL: Duration = Duration::from_millis(1);
