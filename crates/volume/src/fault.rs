//! A volume that injects errors, the same ones for the same seed.

use crate::io::{Completion, Io, IoError, Op, Tag};
use crate::kind::{OpKind, OpSet};
use crate::random::{SplitMix, mix};
use crate::ready::Waker;
use crate::volume::{Channel, Core, Volume, VolumeInfo};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Which requests fail, and how. For several faults, nest one [`FaultVolume`] in another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Operations that may fail.
    pub ops: OpSet,
    /// First byte of the bad range; a flush, which has no range, always counts as within.
    pub offset: u64,
    /// Length of the bad range in bytes; `None`: to the end of the volume.
    pub size: Option<u64>,
    /// Which of the requests to the range fail.
    pub when: FaultWhen,
    /// How they fail.
    pub effect: FaultEffect,
    /// Seed of [`FaultWhen::PerMillion`].
    pub seed: u64,
}

/// Which of the candidate requests fail; counted for each channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultWhen {
    /// Every nth request, beginning with the nth; 1: all, 0: none.
    Every(u64),
    /// This many of a million, at random.
    PerMillion(u32),
}

/// How a request fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultEffect {
    /// Completes with this error, having changed nothing.
    Fail(IoError),
    /// Does not complete until it is cancelled.
    Stuck,
}

impl Default for Fault {
    /// Every request fails with a medium error.
    fn default() -> Fault {
        Fault {
            ops: OpSet::ALL,
            offset: 0,
            size: None,
            when: FaultWhen::Every(1),
            effect: FaultEffect::Fail(IoError::Medium),
            seed: 0,
        }
    }
}

/// Adds a fault to a volume.
pub struct FaultVolume {
    inner: Arc<dyn Volume>,
    fault: Fault,
    /// Number of channels opened, which gives each its own random sequence.
    opened: AtomicU64,
}

impl FaultVolume {
    /// Adds the fault to `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Volume>, fault: Fault) -> FaultVolume {
        FaultVolume { inner, fault, opened: AtomicU64::new(0) }
    }
}

impl Volume for FaultVolume {
    fn info(&self) -> VolumeInfo {
        VolumeInfo { registered_alignment: None, ..self.inner.info() }
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.inner)
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let nth = self.opened.fetch_add(1, Ordering::Relaxed);
        let info = self.inner.info();
        Ok(Box::new(FaultChannel {
            inner: self.inner.open(core, depth, waker.clone())?,
            info,
            fault: self.fault,
            random: SplitMix::new(mix(self.fault.seed).wrapping_add(nth)),
            seen: 0,
            stuck: Vec::with_capacity(depth as usize),
            done: Vec::with_capacity(depth as usize),
            waker,
        }))
    }
}

struct FaultChannel {
    inner: Box<dyn Channel>,
    info: VolumeInfo,
    fault: Fault,
    random: SplitMix,
    /// Candidate requests so far.
    seen: u64,
    /// Stuck requests keep their memory, as in a device that hangs.
    stuck: Vec<Io>,
    done: Vec<Completion>,
    waker: Waker,
}

impl FaultChannel {
    fn fails(&mut self, io: &Io) -> bool {
        // An invalid request fails in `inner` and is not a candidate.
        if !self.fault.touches(io) || self.info.check(io).is_err() {
            return false;
        }
        self.seen += 1;
        match self.fault.when {
            FaultWhen::Every(nth) => nth != 0 && self.seen.is_multiple_of(nth),
            FaultWhen::PerMillion(share) => self.random.below(1_000_000) < share.into(),
        }
    }
}

impl Fault {
    fn touches(&self, io: &Io) -> bool {
        let end = self.size.map_or(u64::MAX, |size| self.offset.saturating_add(size));
        let in_range = io.offset < end && io.offset.saturating_add(io.len) > self.offset;
        self.ops.has(OpKind::of(io.op)) && (in_range || io.op == Op::Flush)
    }
}

impl Channel for FaultChannel {
    fn submit(&mut self, io: Io) {
        if !self.fails(&io) {
            return self.inner.submit(io);
        }
        match self.fault.effect {
            FaultEffect::Fail(error) => self.done.push(Completion { tag: io.tag, result: Err(error) }),
            FaultEffect::Stuck => self.stuck.push(io),
        }
    }

    fn kick(&mut self) {
        self.inner.kick();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.done);
        self.inner.poll(done);
    }

    fn cancel(&mut self, tag: Tag) {
        let Some(at) = self.stuck.iter().position(|io| io.tag == tag) else {
            return self.inner.cancel(tag);
        };
        self.stuck.swap_remove(at);
        self.done.push(Completion { tag, result: Err(IoError::Aborted) });
        self.waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemVolume;
    use crate::conformance::{self, Harness, TestCore};

    /// Which of `count` single-block requests fail.
    fn failing(volume: &FaultVolume, op: Op, count: u64) -> Vec<u64> {
        let core = TestCore::new();
        let mut channel = volume.open(&core.as_core(), 64, core.ready().waker(0)).unwrap();
        let mut done = Vec::new();
        for block in 0..count {
            channel.submit(Io::new(Tag(block), op, block * 512, if op == Op::Flush { 0 } else { 512 }));
            channel.kick();
        }
        channel.poll(&mut done);
        assert_eq!(done.len() as u64, count);
        let failed = done.into_iter().filter(|done| matches!(done.result, Err(IoError::Medium)));
        let mut blocks: Vec<_> = failed.map(|done| done.tag.0).collect();
        blocks.sort_unstable();
        blocks
    }

    fn faulty(fault: Fault) -> FaultVolume {
        FaultVolume::new(Arc::new(MemVolume::new(40 << 20)), fault)
    }

    #[test]
    fn a_volume_without_matching_requests_conforms() {
        let volume =
            faulty(Fault { offset: 40 << 20, ops: OpSet::NONE.with(OpKind::Read), ..Fault::default() });
        conformance::run(&mut Harness::on_test_core(Arc::new(volume)));
    }

    #[test]
    fn every_third_read_fails() {
        let volume = faulty(Fault { when: FaultWhen::Every(3), ..Fault::default() });
        assert_eq!(failing(&volume, Op::Read, 10), [2, 5, 8]);
    }

    #[test]
    fn only_the_named_operations_fail() {
        let volume = faulty(Fault { ops: OpSet::NONE.with(OpKind::Flush), ..Fault::default() });
        assert_eq!(failing(&volume, Op::Read, 4), [0; 0]);
        assert_eq!(failing(&volume, Op::Flush, 2), [0, 1]);
    }

    #[test]
    fn only_requests_that_touch_the_range_fail() {
        let volume = faulty(Fault { offset: 1000, size: Some(600), ..Fault::default() });
        assert_eq!(failing(&volume, Op::Read, 10), [1, 2, 3]);
    }

    #[test]
    fn an_invalid_request_fails_with_its_own_error() {
        let mut harness = Harness::on_test_core(Arc::new(faulty(Fault::default())));
        let mut client = harness.client(1).unwrap();
        let error = client.call(Io::new(Tag(1), Op::Read, 40 << 20, 512)).unwrap().unwrap_err();
        assert_eq!(error, IoError::OutOfRange);
    }

    #[test]
    fn random_faults_repeat_with_the_seed_and_differ_between_channels() {
        let fault = Fault { when: FaultWhen::PerMillion(300_000), seed: 9, ..Fault::default() };
        let (first, second) = (faulty(fault), faulty(fault));
        let failed = failing(&first, Op::Read, 1000);
        assert_eq!(failed, failing(&second, Op::Read, 1000));
        assert_ne!(failed, failing(&first, Op::Read, 1000));
        assert!((250..350).contains(&failed.len()), "{} of 1000 at 30%", failed.len());
    }

    #[test]
    fn a_failed_write_changes_nothing() {
        let fault = Fault { ops: OpSet::NONE.with(OpKind::WriteZeroes), ..Fault::default() };
        let below: Arc<dyn Volume> = Arc::new(MemVolume::new(4 << 20));
        let volume = Arc::new(FaultVolume::new(below.clone(), fault));
        let mut harness = Harness::on_test_core(volume);
        let mut client = harness.client(1).unwrap();
        client.write(0, &[7; 512]).unwrap();
        let zeroes = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };
        assert_eq!(client.call(Io::new(Tag(1), zeroes, 0, 512)).unwrap().unwrap_err(), IoError::Medium);
        assert_eq!(client.read(0, 512).unwrap(), [7; 512]);
    }

    #[test]
    fn a_stuck_request_completes_when_cancelled() {
        let core = TestCore::new();
        let volume = faulty(Fault { effect: FaultEffect::Stuck, ..Fault::default() });
        let mut channel = volume.open(&core.as_core(), 2, core.ready().waker(0)).unwrap();
        let mut done = Vec::new();
        channel.submit(Io::new(Tag(5), Op::Read, 0, 512));
        channel.kick();
        channel.poll(&mut done);
        assert!(done.is_empty() && core.ready().is_empty());
        channel.cancel(Tag(6));
        channel.poll(&mut done);
        assert!(done.is_empty() && core.ready().is_empty());
        channel.cancel(Tag(5));
        assert_eq!(core.ready().pop(), Some(0));
        channel.poll(&mut done);
        assert_eq!((done.len(), done[0].tag), (1, Tag(5)));
        assert!(matches!(done[0].result, Err(IoError::Aborted)));
    }
}
