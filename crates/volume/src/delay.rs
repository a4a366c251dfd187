//! A volume with added latency: a far network or a slow disk, for tests and experiments.

use crate::io::{Completion, Io, IoError, Op, Tag};
use crate::ready::Waker;
use crate::volume::{Channel, Core, Volume, VolumeInfo};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Latency that is added to each request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delays {
    /// Reads, prefetches and block status.
    pub read: Duration,
    /// Writes, zeroes and discards.
    pub write: Duration,
    /// Flushes.
    pub flush: Duration,
}

/// Adds latency to a volume.
pub struct DelayVolume {
    inner: Arc<dyn Volume>,
    delays: Delays,
}

impl DelayVolume {
    /// Delays every request to `inner`, regardless of other requests that wait.
    #[must_use]
    pub fn new(inner: Arc<dyn Volume>, delays: Delays) -> DelayVolume {
        DelayVolume { inner, delays }
    }
}

impl Volume for DelayVolume {
    fn info(&self) -> VolumeInfo {
        VolumeInfo { registered_alignment: None, ..self.inner.info() }
    }

    fn inner(&self) -> Option<&dyn Volume> {
        Some(&*self.inner)
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let inner = self.inner.open(core, depth, waker.clone())?;
        let depth = depth as usize;
        Ok(Box::new(DelayChannel {
            inner,
            delays: self.delays,
            core: core.clone(),
            waker,
            queues: std::array::from_fn(|_| VecDeque::with_capacity(depth)),
            armed: None,
            done: Vec::with_capacity(depth),
        }))
    }
}

impl Delays {
    /// The queue of a request, in which times never decrease, and the time to wait for; `None`: at
    /// once.
    fn due(&self, io: &Io, now: Instant) -> Option<(usize, Instant)> {
        let (queue, delay) = match io.op {
            Op::Flush => (2, self.flush),
            op if op.is_write() => (1, self.write),
            _ => (0, self.read),
        };
        Some((queue, now + delay.min(MAX_DELAY)))
    }
}

/// Limits delays to the range of the clock. No process waits for a century, so a longer delay is
/// endless either way.
const MAX_DELAY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
/// Passes requests on after their delay. Requests that wait can be cancelled and have changed
/// nothing.
struct DelayChannel {
    inner: Box<dyn Channel>,
    delays: Delays,
    core: Rc<dyn Core>,
    waker: Waker,
    queues: [VecDeque<(Instant, Io)>; QUEUES],
    /// The earliest pending wake-up requested from the core.
    armed: Option<Instant>,
    done: Vec<Completion>,
}

impl DelayChannel {
    fn next_due(&self) -> Option<Instant> {
        self.queues.iter().filter_map(|queue| queue.front()).map(|&(due, _)| due).min()
    }

    fn pop_due(&mut self, now: Instant) -> Option<Io> {
        let is_due = |queue: &&mut VecDeque<(Instant, Io)>| queue.front().is_some_and(|&(due, _)| due <= now);
        let (_, io) = self.queues.iter_mut().find(is_due)?.pop_front()?;
        Some(io)
    }

    /// Requests a wake-up for the next time, unless one is pending.
    fn arm(&mut self) {
        if let Some(due) = self.next_due()
            && self.armed.is_none_or(|armed| due < armed)
        {
            self.core.wake_at(due, &self.waker);
            self.armed = Some(due);
        }
    }

    fn submit_due(&mut self) {
        let now = self.core.now();
        if self.armed.is_some_and(|armed| armed <= now) {
            self.armed = None;
        }
        let mut passed = false;
        while let Some(io) = self.pop_due(now) {
            self.inner.submit(io);
            passed = true;
        }
        if passed {
            self.inner.kick();
        }
    }
}

impl Channel for DelayChannel {
    fn submit(&mut self, io: Io) {
        let now = self.core.now();
        match self.delays.due(&io, now) {
            Some((queue, due)) if due > now => self.queues[queue].push_back((due, io)),
            _ => self.inner.submit(io),
        }
    }

    fn kick(&mut self) {
        self.arm();
        self.inner.kick();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.done);
        if self.next_due().is_some() {
            self.submit_due();
            self.arm();
        }
        self.inner.poll(done);
    }

    fn cancel(&mut self, tag: Tag) {
        for queue in &mut self.queues {
            if let Some(at) = queue.iter().position(|(_, io)| io.tag == tag) {
                queue.remove(at);
                self.done.push(Completion { tag, result: Err(IoError::Aborted) });
                self.waker.wake();
                return;
            }
        }
        self.inner.cancel(tag);
    }
}

/// Queues of reads, of writes and of flushes.
const QUEUES: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemVolume;
    use crate::conformance::{self, Harness, TestCore};

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn delayed() -> Arc<dyn Volume> {
        let delays = Delays { read: ms(1), write: ms(5), flush: ms(2) };
        Arc::new(DelayVolume::new(Arc::new(MemVolume::new(40 << 20)), delays))
    }

    fn tags(done: &mut Vec<Completion>) -> Vec<u64> {
        done.drain(..).map(|done| done.tag.0).collect()
    }

    #[test]
    fn a_delayed_volume_conforms() {
        conformance::run(&mut Harness::on_test_core(delayed()));
    }

    #[test]
    fn each_request_completes_after_the_delay_of_its_kind() {
        let core = TestCore::new();
        let mut channel = delayed().open(&core.as_core(), 4, core.ready().waker(0)).unwrap();
        let zeroes = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };
        let mut done = Vec::new();
        channel.submit(Io::new(Tag(1), zeroes, 0, 4096));
        channel.submit(Io::new(Tag(2), Op::Read, 0, 4096));
        channel.submit(Io::new(Tag(3), Op::Flush, 0, 0));
        channel.submit(Io::new(Tag(4), Op::Read, 0, 512));
        channel.kick();
        for (at_ms, expected) in [(0, vec![]), (1, vec![2, 4]), (2, vec![3]), (5, vec![1])] {
            core.advance_to(core.started() + ms(at_ms));
            assert_eq!(core.ready().pop().is_some(), !expected.is_empty(), "woken at {at_ms} ms");
            channel.poll(&mut done);
            assert_eq!(tags(&mut done), expected, "at {at_ms} ms");
        }
        assert!(!core.jump(), "no timer is left");
    }

    #[test]
    fn a_delay_beyond_the_range_of_the_clock_never_ends() {
        let core = TestCore::new();
        let delays = Delays { read: Duration::MAX, ..Delays::default() };
        let volume = DelayVolume::new(Arc::new(MemVolume::new(1 << 20)), delays);
        let mut channel = volume.open(&core.as_core(), 1, core.ready().waker(0)).unwrap();
        channel.submit(Io::new(Tag(1), Op::Read, 0, 512));
        channel.kick();
        core.advance_to(core.started() + Duration::from_secs(10 * 365 * 24 * 60 * 60));
        let mut done = Vec::new();
        channel.poll(&mut done);
        assert_eq!(tags(&mut done), []);
        channel.cancel(Tag(1));
        channel.poll(&mut done);
        assert_eq!(tags(&mut done), [1]);
    }

    #[test]
    fn a_waiting_request_can_be_cancelled() {
        let core = TestCore::new();
        let mut channel = delayed().open(&core.as_core(), 4, core.ready().waker(0)).unwrap();
        let mut done = Vec::new();
        channel.submit(Io::new(Tag(1), Op::Read, 0, 512));
        channel.submit(Io::new(Tag(2), Op::Read, 0, 512));
        channel.kick();
        channel.cancel(Tag(1));
        assert_eq!(core.ready().pop(), Some(0));
        channel.poll(&mut done);
        assert_eq!((done.len(), done[0].tag), (1, Tag(1)));
        assert!(matches!(done.pop().unwrap().result, Err(IoError::Aborted)));
        assert!(core.jump());
        channel.poll(&mut done);
        assert_eq!(tags(&mut done), [2]);
    }
}
