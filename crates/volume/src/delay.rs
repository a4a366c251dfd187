//! A volume with added latency: a far network or a slow disk, for tests and experiments.

use crate::decorator::Decorator;
use crate::io::{Io, IoError, Op};
use crate::pace::{Pace, PacedChannel};
use crate::ready::Waker;
use crate::volume::{Channel, Core, Volume};
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

impl Decorator for DelayVolume {
    fn inner(&self) -> &dyn Volume {
        &*self.inner
    }

    fn open_over(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let inner = self.inner.open(core, depth, waker.clone())?;
        Ok(Box::new(PacedChannel::new(inner, self.delays, core, depth, waker)))
    }
}

impl Pace for Delays {
    fn due(&mut self, io: &Io, now: Instant) -> Option<(usize, Instant)> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{self, Harness, TestCore};
    use crate::{Completion, MemVolume, Tag};

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
