//! A volume behind two portals of a target, and a client that uses both.

use crate::sides::disk0;
use blockmux_engine::net::socket::Address;
use blockmux_engine::sim::World;
use blockmux_proto::exports::Exports;
use blockmux_volume::{
    Channel, Completion, Core, DelayVolume, Delays, Io, IoError, MemVolume, Op, Seg, SgList, Tag, Volume,
    VolumeInfo, Waker,
};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Size of the volume, in bytes.
pub(crate) const SIZE: u64 = 1 << 20;
/// Reconnect timeout of the client.
pub(crate) const RECONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The address of a portal.
pub(crate) fn address(path: usize) -> Address {
    Address::Unix(format!("/path{path}").into())
}

/// One slow volume, as each portal exports it under the name `disk0`.
pub(crate) struct Slow {
    pub(crate) volume: Arc<dyn Volume>,
    pub(crate) exports: [Exports; 2],
    pub(crate) counts: [Arc<AtomicUsize>; 2],
    /// Whether requests over each portal fail with a lost path behind the target.
    pub(crate) loses: [Arc<AtomicBool>; 2],
}

impl Slow {
    /// Requests take 2 ms, and `longer` more over the second portal.
    pub(crate) fn new(longer: Duration) -> Slow {
        let slowed = |volume, read| -> Arc<dyn Volume> {
            Arc::new(DelayVolume::new(volume, Delays { read, write: read, ..Delays::default() }))
        };
        let volume = slowed(Arc::new(MemVolume::new(SIZE)), Duration::from_millis(2));
        let mut ways = [volume.clone(), slowed(volume.clone(), longer)].into_iter();
        let counts = [Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0))];
        let loses = [Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false))];
        let mut all_loses = loses.iter().cloned();
        let exports = counts.each_ref().map(|count| {
            let below = ways.next().expect("there are two");
            let loses = all_loses.next().expect("there are two");
            disk0(Arc::new(Counted { below, count: count.clone(), loses }))
        });
        Slow { volume, exports, counts, loses }
    }
}

/// The volume of one portal, which counts reads and writes.
struct Counted {
    below: Arc<dyn Volume>,
    count: Arc<AtomicUsize>,
    loses: Arc<AtomicBool>,
}

struct CountedChannel {
    below: Box<dyn Channel>,
    count: Arc<AtomicUsize>,
    loses: Arc<AtomicBool>,
    lost: Vec<Completion>,
    waker: Waker,
}

impl Volume for Counted {
    fn info(&self) -> VolumeInfo {
        self.below.info()
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let below = self.below.open(core, depth, waker.clone())?;
        let (count, loses) = (self.count.clone(), self.loses.clone());
        Ok(Box::new(CountedChannel { below, count, loses, lost: Vec::new(), waker }))
    }
}

impl Channel for CountedChannel {
    fn submit(&mut self, io: Io) {
        self.count.fetch_add(1, Ordering::Relaxed);
        if self.loses.load(Ordering::Relaxed) {
            self.lost.push(Completion { tag: io.tag, result: Err(IoError::PathLost) });
            return self.waker.wake();
        }
        self.below.submit(io);
    }

    fn kick(&mut self) {
        self.below.kick();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.lost);
        self.below.poll(done);
    }
}

/// The volume behind two portals, each on a core of its own that can be killed and restarted, and
/// its client.
pub(crate) trait Paths {
    fn client(&mut self) -> &mut Client;
    fn start(&mut self, path: usize);
    fn kill(&mut self, path: usize);
}

/// Requests of a lost path continue on the other path, and the lost one is used again when it is
/// restored.
pub(crate) fn check_loss_of_one_path<P: Paths>(new: impl Fn(u64) -> P) {
    for seed in 0..20 {
        let mut paths = new(seed);
        paths.client().write(1);
        paths.client().expect_success();
        assert_eq!(paths.client().counts(), [16, 16], "round-robin");
        paths.client().write(2);
        paths.client().run(seed % 3);
        paths.kill(0);
        paths.client().expect_success();
        paths.client().holds(2);
        paths.client().counts();
        paths.client().write(3);
        paths.client().expect_success();
        assert_eq!(paths.client().counts(), [0, 32]);
        paths.start(0);
        paths.client().run(10_000);
        paths.client().write(4);
        paths.client().run(1);
        paths.kill(1);
        paths.client().expect_success();
        paths.client().holds(4);
        assert!(paths.client().counts()[0] > 0);
    }
}

/// Without a path requests fail after the timeout; later ones use the first path that is restored.
pub(crate) fn check_loss_of_both_paths(mut paths: impl Paths) {
    paths.kill(0);
    paths.kill(1);
    paths.client().write(1);
    assert_eq!(paths.client().ended(), []);
    paths.client().run(12_000);
    assert_eq!(paths.client().ended(), vec![Err(IoError::PathLost); 32]);
    paths.start(1);
    paths.client().write(2);
    paths.client().run(5000);
    paths.client().expect_success();
    paths.client().holds(2);
}

/// A user of the volume.
pub(crate) struct Client {
    pub(crate) world: World,
    pub(crate) channel: Box<dyn Channel>,
    pub(crate) counts: [Arc<AtomicUsize>; 2],
}

impl Client {
    pub(crate) fn run(&mut self, ms: u64) {
        self.world.run_for(Duration::from_millis(ms)).unwrap();
    }

    /// Submits a write of `value` to each of 32 blocks.
    pub(crate) fn write(&mut self, value: u8) {
        for block in 0..32_u64 {
            let data = Some(SgList::one(Seg::from_slice(&[value; 4096])));
            let op = Op::Write { fua: false };
            self.channel.submit(Io { tag: Tag(block), op, offset: block * 4096, len: 4096, data });
        }
        self.channel.kick();
    }

    /// Polls the channel; returns how many requests have completed.
    pub(crate) fn polled(&mut self) -> usize {
        let mut done = Vec::new();
        self.channel.poll(&mut done);
        done.len()
    }

    /// Results of requests that have completed since the last call; each tag at most once.
    pub(crate) fn ended(&mut self) -> Vec<Result<(), IoError>> {
        let mut done = Vec::new();
        // A poll moves requests to another path.
        for _ in 0..20 {
            self.channel.poll(&mut done);
            self.channel.kick();
            self.run(50);
        }
        let mut tags: Vec<_> = done.iter().map(|done| done.tag.0).collect();
        tags.sort_unstable();
        assert!(tags.windows(2).all(|pair| pair[0] < pair[1]), "a request completes once");
        done.into_iter().map(|done| done.result.map(|_| ())).collect()
    }

    pub(crate) fn expect_success(&mut self) {
        assert_eq!(self.ended(), vec![Ok(()); 32]);
    }

    /// Checks that every block holds the write of `value`.
    pub(crate) fn holds(&mut self, value: u8) {
        for block in 0..32 {
            self.channel.submit(Io::new(Tag(block), Op::Read, block * 4096, 4096));
        }
        self.channel.kick();
        let mut done = Vec::new();
        for _ in 0..20 {
            self.run(50);
            self.channel.poll(&mut done);
            self.channel.kick();
        }
        assert_eq!(done.len(), 32);
        for done in done {
            assert!(done.result.unwrap().into_data().to_vec() == [value; 4096]);
        }
    }

    /// Number of reads and writes over each portal since the last call.
    pub(crate) fn counts(&self) -> [usize; 2] {
        self.counts.each_ref().map(|count| count.swap(0, Ordering::Relaxed))
    }
}
