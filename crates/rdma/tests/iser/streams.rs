//! Both sessions over iWARP, and streams that deliver any number of bytes at a time and may be lost
//! after any byte.

use crate::bench::{Pumped, ServedTarget, TargetEnd, initiator, list, pattern};
use blockmux_proto::driver::session::{Demand, Initiator, StreamConnections, StreamSession};
use blockmux_proto::iscsi::client::{IscsiInitiatorSession, default_proposal};
use blockmux_proto::iscsi::login::operational::{OperationalKey, OperationalParameters};
use blockmux_proto::iscsi::node::offer;
use blockmux_proto::iscsi::server::IserTargetSession;
use blockmux_proto::rdma::{RdmaConnections, RdmaSession};
use blockmux_rdma::Driven;
use blockmux_rdma::iwarp::{Iwarp, IwarpConfig};
use blockmux_volume::{Chunk, Io, Op, Output, Pool, Tag};
use std::collections::BTreeMap;
use std::time::Instant;

impl Pumped for Driven<Iwarp, IserTargetSession> {
    fn pump(&mut self) -> bool {
        Driven::pump(self)
    }
}

/// Bytes that one side has received and not consumed.
#[derive(Default)]
struct Inbound {
    unread: Vec<u8>,
    /// Placed bytes of the current payload.
    placed: usize,
}

impl Inbound {
    /// Delivers received bytes.
    fn deliver(&mut self, to: &mut impl StreamSession, bytes: &[u8]) {
        self.unread.extend(bytes);
        loop {
            match to.demand() {
                Demand::Bytes(wanted) if wanted <= self.unread.len() => {
                    let taken = to.on_bytes(&Chunk::from_slice(&self.unread), Instant::now()).unwrap();
                    self.unread.drain(..taken);
                }
                Demand::Place(list) => {
                    let here = self.unread.len().min(list.len() - self.placed);
                    list.slice(self.placed, here).copy_from(&self.unread[..here]);
                    self.unread.drain(..here);
                    self.placed += here;
                    if self.placed < list.len() {
                        return;
                    }
                    self.placed = 0;
                    to.on_placed(Instant::now()).unwrap();
                }
                _ => return,
            }
        }
    }
}

struct Streams {
    client: Driven<Iwarp, IscsiInitiatorSession>,
    server: TargetEnd<Driven<Iwarp, IserTargetSession>>,
    inbound: [Inbound; 2],
    /// Most bytes delivered at a time.
    step: usize,
    /// Bytes until the connection is lost.
    left: usize,
}

impl Streams {
    fn new(
        served: &ServedTarget,
        proposal: OperationalParameters,
        config: &IwarpConfig,
        step: usize,
    ) -> Streams {
        let (now, pool) = (Instant::now(), || Pool::new(64 << 20));
        let (client, target) = (initiator(proposal), served.session());
        let active = Iwarp::active(&client.endpoint(), config.clone(), pool(), [1; 32], now);
        let passive = Iwarp::passive(&target.endpoint(), config.clone(), pool(), [2; 32], now);
        Streams {
            client: Driven::new(client, active, Instant::now()),
            server: TargetEnd::new(served, Driven::new(target, passive, Instant::now())),
            inbound: Default::default(),
            step,
            left: usize::MAX,
        }
    }

    /// Transports bytes in both directions until there is no progress, or the connection is lost;
    /// returns `false` then.
    fn run(&mut self) -> bool {
        loop {
            let asked = self.client.connection(0).outbox().take_bytes();
            for bytes in asked.chunks(self.step) {
                let bytes = &bytes[..bytes.len().min(self.left)];
                self.left -= bytes.len();
                self.inbound[1].deliver(&mut self.server.driven, bytes);
                self.server.run();
            }
            let answered = self.server.driven.outbox().take_bytes();
            for bytes in answered.chunks(self.step) {
                let bytes = &bytes[..bytes.len().min(self.left)];
                self.left -= bytes.len();
                self.inbound[0].deliver(&mut self.client.connection(0), bytes);
            }
            let has_moved = self.server.run();
            if self.left == 0 {
                return false;
            }
            if asked.is_empty() && answered.is_empty() && !has_moved {
                return true;
            }
        }
    }

    fn call(&mut self, op: Op, offset: u64, data: &[u8]) -> Output {
        let io = Io { tag: Tag(1), op, offset, len: data.len() as u64, data: Some(list(data)) };
        self.client.submit(io);
        assert!(self.run());
        self.client.poll_done().expect("it is done").result.unwrap()
    }

    /// Writes data with and without immediate data, and reads it again.
    fn converse(&mut self) {
        assert!(self.run());
        assert!(self.client.session().is_ready());
        for (offset, len) in [(0, 512), (4096, 8192), (1 << 20, 20_480)] {
            let data = pattern(len);
            self.call(Op::Write { fua: false }, offset, &data);
            let read = self.call(Op::Read, offset, &vec![0xee; len]).into_data().to_vec();
            assert!(read == data, "{len} bytes, {} at a time", self.step);
        }
    }
}

fn config(has_crc: bool, mss: usize) -> IwarpConfig {
    IwarpConfig { has_crc, mss, ..IwarpConfig::default() }
}

#[test]
fn sessions_work_byte_by_byte() {
    for has_crc in [false, true] {
        // The shortest FPDUs, and one for each message.
        for mss in [0, 65_483] {
            let (served, config) = (ServedTarget::new(offer(), None), config(has_crc, mss));
            Streams::new(&served, default_proposal(), &config, 1).converse();
        }
    }
}

#[test]
fn sessions_work_with_fpdus_of_every_length_and_any_split() {
    let steps = [2, 3, 7, 13, 61, 127, 508, 512, 1448, 4096, 20_000, usize::MAX];
    let mss = [0, 128, 131, 257, 536, 1448, 1460, 4096, 8948, 16_384, 40_000, 65_483, usize::MAX];
    for (nth, step) in steps.into_iter().enumerate() {
        for has_crc in [false, true] {
            for part in 0..3 {
                let mss = mss[(nth + 5 * part) % mss.len()];
                let (served, config) = (ServedTarget::new(offer(), None), config(has_crc, mss));
                Streams::new(&served, default_proposal(), &config, step).converse();
            }
        }
    }
}

#[test]
fn sessions_work_if_the_target_reads_all_write_data() {
    let proposal =
        default_proposal().with(OperationalKey::InitialR2T, 1).with(OperationalKey::ImmediateData, 0);
    for has_crc in [false, true] {
        for (mss, step) in [(0, 5), (1448, 1447), (65_483, 64)] {
            let (served, config) = (ServedTarget::new(offer(), None), config(has_crc, mss));
            Streams::new(&served, proposal, &config, step).converse();
        }
    }
}

/// Outstanding I/O is handed back and repeated on another connection: each request completes once
/// and correctly.
#[test]
fn a_connection_lost_at_any_byte_loses_no_request_and_completes_none_twice() {
    let io = |tag: u64, op, len: usize, fill: u8| Io {
        tag: Tag(tag),
        op,
        offset: tag << 16,
        len: len as u64,
        data: Some(list(&vec![fill; len])),
    };
    let (mut after, mut replayed) = (0, 0);
    loop {
        let served = ServedTarget::new(offer(), None);
        let config = config(after % 2 == 0, 1448);
        let mut undone: Vec<Io> = [(1, 512), (2, 4096), (3, 12_288)]
            .into_iter()
            .flat_map(|(tag, len)| {
                let write = io(tag, Op::Write { fua: false }, len, tag as u8);
                [write, io(tag + 10, Op::Read, len, 0xee)]
            })
            .collect();
        let mut done = BTreeMap::<u64, usize>::new();
        let mut is_lost = false;
        for left in [after, usize::MAX] {
            let mut streams = Streams::new(&served, default_proposal(), &config, 1500);
            streams.left = left;
            is_lost = !streams.run();
            if !is_lost {
                std::mem::take(&mut undone).into_iter().for_each(|io| streams.client.submit(io));
                is_lost = !streams.run();
            }
            while let Some(completion) = streams.client.poll_done() {
                assert!(completion.result.is_ok());
                *done.entry(completion.tag.0).or_default() += 1;
            }
            if !is_lost {
                break;
            }
            let _ = streams.client.connection(0).on_end(Instant::now());
            let _ = streams.server.driven.on_end(Instant::now());
            streams.server.run();
            let unfinished = streams.client.take_unfinished();
            replayed += unfinished.len();
            undone.extend(unfinished);
        }
        assert!(!is_lost, "the second connection lasts");
        assert_eq!(done, [1, 2, 3, 11, 12, 13].map(|tag| (tag, 1)).into(), "lost after {after} bytes");
        after += 61;
        if after > LONGER {
            break;
        }
    }
    assert!(replayed > 100, "{replayed} requests were replayed");
}

/// More bytes than such a connection transports.
const LONGER: usize = 45_000;
