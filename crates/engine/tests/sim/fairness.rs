//! A client that requests data and does not read it must not starve others. The tests use whole
//! connections on a virtual clock: over NBD with a hand-written client, and over every stream
//! protocol with its own initiator. AoE is not tested, because its replies are sent at once and
//! hold no buffers.

use crate::sides::iscsi::{self, IscsiDialer};
use crate::sides::iser::{self, IserDialer};
use crate::sides::nbd::{self, NbdDialer};
use crate::sides::{address, export, listen, nvme};
use blockmux_engine::net::host::{ByteStream, Host};
use blockmux_engine::remote::{Dialer, RemoteVolume};
use blockmux_engine::serve::listener::ConnectionLimit;
use blockmux_engine::serve::peer_buffers::HELD_BUFFERS_TIMEOUT;
use blockmux_engine::sim::{NetworkConditions, SimCore, SimNet, SimStream, World};
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::StreamSession;
use blockmux_proto::driver::target::TargetLifecycle;
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::client::default_proposal;
use blockmux_proto::nbd::client::NbdFeatures;
use blockmux_rdma::iwarp::IwarpConfig;
use blockmux_volume::{
    Channel, Chunk, Completion, Core, Io, IoError, Memory, Op, Output, PeerAccount, Pool, ReadyList, SgList,
    Tag, Volume, VolumeInfo, Waker,
};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A volume whose reads take memory from the pool, as those of a file do.
struct PoolVolume;

struct PoolChannel {
    core: Rc<dyn Core>,
    waiting: VecDeque<Io>,
    waker: Waker,
}

impl Volume for PoolVolume {
    fn info(&self) -> VolumeInfo {
        VolumeInfo::new(VOLUME)
    }

    fn open(&self, core: &Rc<dyn Core>, _depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        Ok(Box::new(PoolChannel { core: core.clone(), waiting: VecDeque::new(), waker }))
    }
}

impl Channel for PoolChannel {
    fn submit(&mut self, io: Io) {
        self.waiting.push_back(io);
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        let pool = self.core.pool();
        while let Some(io) = self.waiting.front() {
            let result = match pool.take_payload_or_wait(io.len as usize) {
                Some(memory) => Ok(Output::Data(SgList::one(memory.seg(0, io.len as usize)))),
                None if pool.account().is_some_and(PeerAccount::is_closed) => Err(IoError::Aborted),
                None => return self.core.wake_at(self.core.now() + Duration::from_millis(100), &self.waker),
            };
            let tag = io.tag;
            self.waiting.pop_front();
            done.push(Completion { tag, result });
        }
    }
}

/// A target with 64 MiB of buffers, and clients with a connection each.
struct Setting {
    world: World,
    clients: Rc<SimCore>,
    target: Rc<SimCore>,
    limit: ConnectionLimit,
}

/// A client that reads only when the test does.
struct Client {
    stream: SimStream,
    received: usize,
    chunk: Chunk,
}

impl Setting {
    fn new() -> Setting {
        let mut world =
            World::new(SimNet::new(1, NetworkConditions { window: 256 << 10, ..NetworkConditions::FAIR }));
        let (clients, target) = (world.add_core(0), world.add_core(64 << 20));
        let exports = exports();
        let limit = listen(&world, &target, &address(), &exports, nbd::sessions(&exports));
        Setting { world, clients, target, limit }
    }

    fn client(&self) -> Client {
        let stream = self.clients.connect(&address()).unwrap();
        let mut client = Client { stream, received: 0, chunk: Chunk::new(Memory::from_heap(1 << 20)) };
        client.send(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0");
        self.pass(Duration::from_millis(10));
        // The greeting, and the description of the export.
        assert_eq!(client.take(), 28);
        client
    }

    /// This many clients that read nothing after requesting 64 MiB in reads of `len` bytes, or less
    /// if that needs more than 1024 requests.
    fn stalled(&self, count: usize, len: u32) -> Vec<Client> {
        let client = |_| {
            let mut client = self.client();
            (0..((64 << 20) / len).min(1024)).for_each(|_| client.ask(len));
            client
        };
        let stalled = (0..count).map(client).collect();
        self.pass(Duration::from_millis(10));
        stalled
    }

    /// Reads this many bytes; returns how long that takes.
    fn read(&self, client: &mut Client, len: u32) -> Duration {
        let (from, begin) = (client.received, self.target.now());
        client.ask(len);
        while client.received < from + 16 + len as usize {
            self.pass(Duration::from_micros(100));
            client.take();
            assert!(self.target.now() - begin < HELD_BUFFERS_TIMEOUT, "a read of {len} bytes waits for ever");
        }
        self.target.now() - begin
    }

    fn pass(&self, time: Duration) {
        self.world.run_for(time).unwrap();
    }
}

impl Client {
    fn send(&mut self, bytes: &[u8]) {
        let mut outbox = Outbox::default();
        outbox.push_head(bytes);
        while !outbox.is_empty() {
            self.stream.send(&mut outbox).expect("it fits the window");
        }
    }

    fn ask(&mut self, len: u32) {
        let mut request = [0; 28];
        request[..4].copy_from_slice(b"\x25\x60\x95\x13");
        request[24..].copy_from_slice(&len.to_be_bytes());
        self.send(&request);
    }

    /// Receives what has arrived; returns its length.
    fn take(&mut self) -> usize {
        let before = self.received;
        while let Ok(len @ 1..) = self.stream.receive(&mut self.chunk, usize::MAX) {
            self.received += len;
            self.chunk.take(len);
        }
        self.received - before
    }

    fn is_closed(&mut self) -> bool {
        loop {
            match self.stream.receive(&mut self.chunk, usize::MAX) {
                Ok(0) => break true,
                Ok(len) => self.chunk.take(len),
                Err(error) => break error.kind() != io::ErrorKind::WouldBlock,
            }
        }
    }
}

#[test]
fn a_client_that_reads_does_not_wait_for_clients_that_do_not() {
    for len in [32 << 20, 1 << 20, 256 << 10, 64 << 10, 4 << 10] {
        let setting = Setting::new();
        let mut reader = setting.client();
        let alone = [1 << 20, 64 << 10].map(|len| setting.read(&mut reader, len));
        let mut stalled = setting.stalled(200, len);
        for round in 0..40 {
            for (len_of_reader, alone) in [1 << 20, 64 << 10].into_iter().zip(alone) {
                let took = setting.read(&mut reader, len_of_reader);
                assert!(took <= 2 * alone, "{took:?} beside reads of {len}, round {round}");
            }
        }
        assert!(!reader.is_closed());
        drop(stalled.drain(..).map(|client| client.stream.close()).collect::<Vec<_>>());
    }
}

#[test]
fn a_new_client_is_served_because_clients_that_hold_buffers_are_closed() {
    for len in [32 << 20, 1 << 20, 256 << 10, 64 << 10] {
        let setting = Setting::new();
        let mut stalled = setting.stalled(500, len);
        // Clients that connected earlier and transfer nothing delay it only until some of them are
        // found to be stalled.
        for _ in 0..20 {
            let took = setting.read(&mut setting.client(), 1 << 20);
            assert!(took <= Duration::from_millis(600), "{took:?} beside reads of {len}");
        }
        let left = stalled.iter_mut().filter_map(|client| (!client.is_closed()).then_some(())).count();
        assert!(left > 0, "only clients whose buffers are needed are closed");
    }
}

#[test]
fn a_client_that_holds_buffers_is_not_closed_while_nobody_needs_them() {
    let setting = Setting::new();
    let mut slow = setting.client();
    slow.ask(1 << 20);
    setting.pass(HELD_BUFFERS_TIMEOUT * 2);
    let mut reader = setting.client();
    for _ in 0..10 {
        setting.read(&mut reader, 1 << 20);
    }
    assert_eq!(setting.limit.open(), 2);
    let mut left = (1 << 20) + 16;
    while left > 0 {
        left -= slow.take();
        setting.pass(Duration::from_millis(1));
    }
    assert_eq!(setting.target.pool().out_bytes(), 0);
}

#[test]
fn a_slow_reader_is_not_closed_for_waiting_clients() {
    let setting = Setting::new();
    let mut slow = setting.client();
    slow.ask(16 << 20);
    let mut stalled = setting.stalled(20, 1 << 20);
    // 1 MB/s, for 16 seconds.
    let mut left: usize = (16 << 20) + 16;
    while left > 0 {
        left -= slow.take();
        setting.pass(Duration::from_millis(250));
    }
    assert!(!slow.is_closed());
    assert!(stalled.iter_mut().any(Client::is_closed));
}

/// Runs a reader beside hosts that have each requested 64 MiB and then stopped.
fn is_fair<D: Dialer, S: StreamSession + TargetLifecycle + 'static>(
    name: &str,
    dial: impl Fn(&'static str) -> D,
    exports: &Exports,
    session: impl Fn(Pool, Instant) -> S + 'static,
) {
    let mut world =
        World::new(SimNet::new(1, NetworkConditions { window: 256 << 10, ..NetworkConditions::FAIR }));
    let (reader, stalled, target) =
        (world.add_core(1 << 30), world.add_core(1 << 40), world.add_core(64 << 20));
    listen(&world, &target, &address(), exports, session);
    let open = |core: &Rc<SimCore>, export| {
        let info = VolumeInfo::new(VOLUME);
        let volume = RemoteVolume::<_, SimCore>::new(dial(export), info, 1, Duration::from_secs(5));
        let core: Rc<dyn Core> = core.clone();
        volume.open(&core, 64, ReadyList::new().waker(0)).unwrap()
    };
    let mut channel = open(&reader, EXPORTS[0]);
    let mut read = |len: u64| {
        let begin = world.net().now();
        channel.submit(Io::new(Tag(1), Op::Read, 0, len));
        channel.kick();
        let mut done = Vec::new();
        while done.is_empty() {
            world.run_for(Duration::from_micros(100)).unwrap();
            channel.poll(&mut done);
            assert!(
                world.net().now() - begin < HELD_BUFFERS_TIMEOUT,
                "{name}: a read of {len} bytes waits for ever"
            );
        }
        assert!(done[0].result.is_ok(), "{name}: {:?}", done[0].result);
        world.net().now() - begin
    };
    read(4096);
    let alone = [1 << 20, 64 << 10].map(&mut read);
    let asked: Vec<_> = EXPORTS[1..]
        .iter()
        .map(|&export| {
            let mut channel = open(&stalled, export);
            for tag in 0..64 {
                channel.submit(Io::new(Tag(tag), Op::Read, 0, 1 << 20));
            }
            channel.kick();
            channel
        })
        .collect();
    world.run_for(Duration::from_millis(3)).unwrap();
    stalled.set_waiting(true);
    for round in 0..40 {
        for (len, alone) in [1 << 20, 64 << 10].into_iter().zip(alone) {
            let took = read(len);
            assert!(took <= 2 * alone, "{name}: {took:?} rather than {alone:?} in round {round}");
        }
    }
    let held = target.pool().out_bytes();
    assert!(held > 16 << 20, "{name}: the hosts hold {held} bytes");
    drop(asked);
}

#[test]
fn over_every_protocol_a_reader_does_not_wait_for_stopped_hosts() {
    let exports = exports();
    let dial = |_| NbdDialer::new(&address(), NbdFeatures::default(), None);
    is_fair("NBD", dial, &exports, nbd::sessions(&exports));
    let dial = |export| IscsiDialer::new(&address(), export, default_proposal());
    is_fair("iSCSI", dial, &exports, iscsi::sessions(&exports));
    let dial = |export| IserDialer::new(&address(), export, default_proposal(), IwarpConfig::default());
    is_fair("iSER", dial, &exports, iser::sessions(&exports));
    let dial = |_| nvme::dialer(nvme::endpoint(&[address()]));
    is_fair("NVMe/TCP", dial, &exports, nvme::sessions(&exports));
}

/// One volume under many names, because a host logs in to each name only once.
fn exports() -> Exports {
    let volume: Arc<dyn Volume> = Arc::new(PoolVolume);
    Exports::new(EXPORTS.iter().map(|name| export(name, volume.clone())).collect())
}

const VOLUME: u64 = 64 << 20;
const EXPORTS: [&str; 33] = [
    "disk0", "disk1", "disk2", "disk3", "disk4", "disk5", "disk6", "disk7", "disk8", "disk9", "disk10",
    "disk11", "disk12", "disk13", "disk14", "disk15", "disk16", "disk17", "disk18", "disk19", "disk20",
    "disk21", "disk22", "disk23", "disk24", "disk25", "disk26", "disk27", "disk28", "disk29", "disk30",
    "disk31", "disk32",
];
