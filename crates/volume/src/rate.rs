//! A volume with rate limits.

use crate::io::{Completion, Io, IoError, Tag};
use crate::limiter::{Limiter, Limits, VolumeLimits};
use crate::ready::Waker;
use crate::throttle::Throttle;
use crate::volume::{Channel, Core, Volume, VolumeInfo};
use std::rc::Rc;
use std::sync::Arc;

/// Limits the rate of a volume, over all of its channels.
pub struct RateVolume {
    inner: Arc<dyn Volume>,
    limiter: Arc<Limiter>,
}

impl RateVolume {
    /// Limits `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Volume>, limits: Limits) -> RateVolume {
        let limits = VolumeLimits { volume: limits, client: Limits::default() };
        RateVolume { inner, limiter: Arc::new(Limiter::new(limits)) }
    }

    /// The limits, which may be changed.
    #[must_use]
    pub fn limiter(&self) -> &Arc<Limiter> {
        &self.limiter
    }
}

impl Volume for RateVolume {
    fn info(&self) -> VolumeInfo {
        VolumeInfo { registered_alignment: None, ..self.inner.info() }
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.inner)
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        Ok(Box::new(RateChannel {
            inner: self.inner.open(core, depth, waker.clone())?,
            throttle: Throttle::new(self.limiter.clone(), None).with_capacity(depth),
            core: core.clone(),
            waker,
            done: Vec::with_capacity(depth as usize),
        }))
    }
}

struct RateChannel {
    inner: Box<dyn Channel>,
    throttle: Throttle,
    core: Rc<dyn Core>,
    waker: Waker,
    /// Completions of cancelled requests.
    done: Vec<Completion>,
}

impl Channel for RateChannel {
    fn submit(&mut self, io: Io) {
        if let Some(io) = self.throttle.admit(io, self.core.now()) {
            self.inner.submit(io);
        }
    }

    fn kick(&mut self) {
        self.throttle.arm(&*self.core, &self.waker);
        self.inner.kick();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.done);
        if !self.throttle.is_empty() {
            let now = self.core.now();
            while let Some((io, _)) = self.throttle.pop_due(now) {
                self.inner.submit(io);
            }
            self.kick();
        }
        self.inner.poll(done);
    }

    fn cancel(&mut self, tag: Tag) {
        if self.throttle.cancel(tag, self.core.now()).is_none() {
            return self.inner.cancel(tag);
        }
        self.throttle.arm(&*self.core, &self.waker);
        self.done.push(Completion { tag, result: Err(IoError::Aborted) });
        self.waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{self, Harness, TestCore};
    use crate::limiter::Limit;
    use crate::{MemVolume, NullVolume, Op, Seg, SgList};
    use std::num::NonZeroU64;
    use std::time::Duration;

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
        let limits = Limits {
            total: limit(0, 100 << 20),
            read: limit(5000, 0),
            write: limit(2000, 0),
            ..Limits::default()
        };
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
        let mut done = Vec::new();
        while core.jump() {
            channel.poll(&mut done);
        }
        assert_eq!(done.len(), 2);
        assert!(core.now() < core.started() + Duration::from_secs(60));
    }
}
