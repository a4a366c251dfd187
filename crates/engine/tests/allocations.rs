//! Tests that an I/O allocates nothing in the whole process once a connection is warm. The process
//! has a core that serves a volume in memory over NBD, and a core that accesses it over sockets.
//!
//! Pools and queues grow to the size that the traffic needs. How far they grow depends on the
//! scheduling of the two threads, so the test waits for a round of thousands of I/Os without an
//! allocation: one allocation in a thousand I/Os would fail every round.

#[path = "../../volume/tests/counting/mod.rs"]
mod counting;
mod sides;

use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::{EngineCore, PollPolicy, Progress, Task};
use blockmux_engine::net::socket::{Address, Listener};
use blockmux_engine::protocol::nbd::target::serve;
use blockmux_engine::remote::RemoteVolume;
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerTask};
use blockmux_engine::sys::memory::map_pages;
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::nbd::client::NbdFeatures;
use blockmux_volume::{
    Channel, Completion, Core, Io, MemVolume, Memory, Op, Output, SgList, Tag, Volume, VolumeInfo,
};
use sides::nbd::NbdDialer;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

/// The I/Os of a round.
#[derive(Clone, Copy, Debug)]
struct Traffic {
    features: NbdFeatures,
    policy: PollPolicy,
    len: usize,
    depth: u32,
    ios_per_round: u64,
}

/// Keeps reads and writes in flight: writes, reads with borrowed data, and reads into its own
/// buffer alternate. Sends the number of allocations of each round, until a round has none.
struct Driver {
    traffic: Traffic,
    channel: Box<dyn Channel>,
    buffers: Vec<SgList>,
    done: Vec<Completion>,
    submitted: u64,
    in_flight: usize,
    /// Written only by the driver, with enough capacity that it never grows.
    rounds: Vec<u64>,
    before: u64,
    result: mpsc::Sender<Vec<u64>>,
}

impl Driver {
    fn spawn(core: &Rc<EngineCore>, volume: &impl Volume, traffic: Traffic, result: mpsc::Sender<Vec<u64>>) {
        let buffer = |_| SgList::one(Memory::from_heap(traffic.len).seg(0, traffic.len));
        core.spawn(|waker| {
            let shared: Rc<dyn Core> = core.clone();
            Driver {
                traffic,
                channel: volume.open(&shared, traffic.depth, waker.clone()).unwrap(),
                buffers: (0..traffic.depth).map(buffer).collect(),
                done: Vec::with_capacity(traffic.depth as usize),
                submitted: 0,
                in_flight: 0,
                rounds: Vec::with_capacity(MAX_ROUNDS),
                before: counting::of_all_threads(),
                result,
            }
        });
    }

    fn io(&self, tag: Tag) -> Io {
        let len = self.traffic.len as u64;
        let offset = self.submitted * 7 % (VOLUME_BYTES / len) * len;
        let (op, data) = match self.submitted % 3 {
            0 => (Op::Write { fua: false }, Some(self.buffers[tag.0 as usize].clone())),
            1 => (Op::Read, None),
            _ => (Op::Read, Some(self.buffers[tag.0 as usize].clone())),
        };
        Io { data, ..Io::new(tag, op, offset, len) }
    }

    fn submit(&mut self, tag: Tag) {
        let io = self.io(tag);
        self.channel.submit(io);
        self.submitted += 1;
        self.in_flight += 1;
    }

    /// Takes completions and submits as many requests; returns whether there were any.
    fn keep_going(&mut self) -> bool {
        let mut done = std::mem::take(&mut self.done);
        self.channel.poll(&mut done);
        let any = !done.is_empty();
        for Completion { tag, result } in done.drain(..) {
            match result.unwrap() {
                Output::Data(data) => assert_eq!(data.len(), self.traffic.len),
                Output::Nothing => {}
                output => panic!("{output:?}"),
            }
            self.in_flight -= 1;
            self.submit(tag);
        }
        self.done = done;
        any
    }

    /// Whether this was the last round.
    fn end_round(&mut self) -> bool {
        let now = counting::of_all_threads();
        self.rounds.push(now - self.before);
        self.before = now;
        self.rounds.last() == Some(&0) || self.rounds.len() == MAX_ROUNDS
    }
}

impl Task for Driver {
    fn run(&mut self) -> Progress {
        if self.submitted == 0 {
            (0..self.traffic.depth).for_each(|nth| self.submit(Tag(nth.into())));
        }
        let any = self.keep_going();
        self.channel.kick();
        let rounds = self.submitted / self.traffic.ios_per_round;
        if rounds > self.rounds.len() as u64 && self.end_round() {
            self.result.send(std::mem::take(&mut self.rounds)).unwrap();
            return Progress::Done;
        }
        if any { Progress::More } else { Progress::Idle }
    }
}

/// Serves a volume in memory on a free port of loopback.
fn serve_memory(cores: &Cores) -> Address {
    let anywhere = Address::Tcp("127.0.0.1:0".parse().unwrap());
    let listener = Listener::bind(&anywhere).unwrap();
    let address = listener.address().clone();
    let volume = Arc::new(MemVolume::from_pages(map_pages(VOLUME_BYTES as usize).unwrap()));
    let export = Export { name: "disk0".to_owned(), description: String::new(), read_only: false, volume };
    let (serve, inboxes) = (serve(Exports::new(vec![export]), None), cores.inboxes());
    cores
        .ask(0, move |core| ListenerTask::spawn(core, listener, inboxes, serve, ConnectionLimit::new(4)))
        .unwrap();
    address
}

/// The number of allocations of each round, in the whole process.
fn allocations(traffic: Traffic) -> Vec<u64> {
    let config = CoresConfig { policy: traffic.policy, ..CoresConfig::default() };
    let (target, initiator) = (Cores::start(&config).unwrap(), Cores::start(&config).unwrap());
    let dialer = NbdDialer::new(&serve_memory(&target), traffic.features, None);
    let info = VolumeInfo::new(VOLUME_BYTES);
    let volume: RemoteVolume<NbdDialer> = RemoteVolume::new(dialer, info, 1, Duration::from_secs(5));
    let (sender, result) = mpsc::channel();
    initiator.ask(0, move |core| Driver::spawn(core, &volume, traffic, sender)).unwrap();
    result.recv_timeout(TIMEOUT).unwrap()
}

const VOLUME_BYTES: u64 = 32 << 20;
const MAX_ROUNDS: usize = 30;
const TIMEOUT: Duration = Duration::from_secs(120);
const EXTENDED: NbdFeatures = NbdFeatures { extended_headers: true, structured_replies: true };
const STRUCTURED: NbdFeatures = NbdFeatures { extended_headers: false, structured_replies: true };
const SIMPLE: NbdFeatures = NbdFeatures { extended_headers: false, structured_replies: false };

/// Every form of messages, with I/O that is copied and I/O that is received in place.
const SIZES: [Traffic; 4] = [
    Traffic { len: 4 << 10, depth: 32, ios_per_round: 10_000, ..USUAL },
    Traffic { len: 4 << 10, depth: 1, ios_per_round: 2000, ..USUAL },
    Traffic { len: 64 << 10, depth: 32, ios_per_round: 2000, ..USUAL },
    Traffic { len: 1 << 20, depth: 4, ios_per_round: 200, ..USUAL },
];
const USUAL: Traffic = Traffic {
    features: EXTENDED,
    policy: PollPolicy::ADAPTIVE,
    len: 4 << 10,
    depth: 32,
    ios_per_round: 5000,
};

// There is one test, because the counter belongs to the process.
#[test]
fn thousands_of_ios_over_a_socket_allocate_nothing_in_the_whole_process() {
    let forms = [EXTENDED, STRUCTURED, SIMPLE];
    let forms = forms.into_iter().flat_map(|features| SIZES.map(|traffic| Traffic { features, ..traffic }));
    let policies = [PollPolicy::Always, PollPolicy::Never].map(|policy| Traffic { policy, ..USUAL });
    for traffic in forms.chain(policies) {
        let before = counting::of_all_threads();
        let rounds = allocations(traffic);
        assert_eq!(rounds.last(), Some(&0), "{traffic:?}: {rounds:?}");
        // The counter works: connecting allocates.
        assert_ne!(counting::of_all_threads(), before);
    }
}
