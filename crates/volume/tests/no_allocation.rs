//! Tests that a request allocates nothing once a channel is warm.

mod counting;

use blockmux_volume::*;
use std::any::Any;
use std::cell::Cell;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A core whose clock advances a little with each query.
struct BusyCore {
    now: Cell<Instant>,
    pool: Pool,
}

impl Core for BusyCore {
    fn now(&self) -> Instant {
        self.now.set(self.now.get() + Duration::from_micros(10));
        self.now.get()
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn wake_at(&self, _when: Instant, waker: &Waker) {
        waker.wake();
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Executes `count` requests at full depth: reads, writes and flushes, each within one chunk.
fn run(channel: &mut dyn Channel, memory: &Memory, done: &mut Vec<Completion>, count: u64) {
    let submit = |channel: &mut dyn Channel, nth: u64| {
        let (tag, offset) = (Tag(nth % u64::from(DEPTH)), nth % 512 * 4096);
        channel.submit(match nth % 4 {
            0 => Io::new(tag, Op::Read, offset, 4096),
            1 => Io { data: Some(memory.seg(0, 4096).into()), ..Io::new(tag, Op::Read, offset, 4096) },
            2 => Io::new(tag, Op::Flush, 0, 0),
            _ => Io {
                data: Some(memory.seg(4096, 4096).into()),
                ..Io::new(tag, Op::Write { fua: false }, offset, 4096)
            },
        });
    };
    for batch in 0..count / u64::from(DEPTH) {
        (0..u64::from(DEPTH)).for_each(|nth| submit(channel, batch * u64::from(DEPTH) + nth));
        let mut left = DEPTH as usize;
        while left > 0 {
            channel.kick();
            channel.poll(done);
            left -= done.len();
            done.clear();
        }
    }
}

const DEPTH: u32 = 32;

#[test]
fn a_request_within_one_chunk_allocates_nothing() {
    let mem = || Arc::new(MemVolume::new(4 << 20)) as Arc<dyn Volume>;
    let delay = Duration::from_millis(1);
    let limit = Limit { iops: NonZeroU64::new(50_000), bytes_per_s: NonZeroU64::new(1 << 30) };
    let limits = Limits { total: limit, ..Limits::default() };
    let fault = Fault { when: FaultWhen::Every(7), ..Fault::default() };
    let delays = Delays { read: delay, write: delay, flush: delay };
    let sink = |record: &LogRecord| assert!(record.len <= 4096);
    let volumes: [(&str, Arc<dyn Volume>); 8] = [
        ("mem", mem()),
        ("null", Arc::new(NullVolume::new(4 << 20))),
        ("slice", Arc::new(SliceVolume::new(mem(), 4096, None).unwrap())),
        ("stripe", Arc::new(StripeVolume::new(64 << 10, vec![mem(), mem(), mem()]).unwrap())),
        ("delay", Arc::new(DelayVolume::new(mem(), delays))),
        ("fault", Arc::new(FaultVolume::new(mem(), fault))),
        ("rate", Arc::new(RateVolume::new(mem(), limits))),
        ("log", Arc::new(LogVolume::new(mem(), Arc::new(sink)))),
    ];
    for (name, volume) in volumes {
        let core: Rc<dyn Core> =
            Rc::new(BusyCore { now: Cell::new(Instant::now()), pool: Pool::new(1 << 20) });
        let ready = ReadyList::new();
        let mut channel = volume.open(&core, DEPTH, ready.waker(0)).unwrap();
        let (memory, mut done) = (Memory::from_heap(8192), Vec::new());
        run(&mut *channel, &memory, &mut done, 2048);
        let before = counting::of_this_thread();
        run(&mut *channel, &memory, &mut done, 2048);
        assert_eq!(counting::of_this_thread() - before, 0, "{name}");
        // The counter works: a list of two segments needs an allocation.
        let mut list = SgList::one(memory.seg(0, 512));
        list.push(memory.seg(512, 512));
        assert_ne!(counting::of_this_thread() - before, 0);
    }
}
