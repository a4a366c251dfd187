//! Software RoCEv2 allocates nothing for a message, write or read once it has reached its usual
//! depth: neither without congestion, nor with a rate limit and a keep-alive.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

#[path = "../../volume/tests/counting/mod.rs"]
mod counting;
mod rounds;

use blockmux_proto::driver::session::Timed;
use blockmux_proto::rdma::{Event, QueuePair};
use blockmux_rdma::Provider;
use blockmux_rdma::roce::{Roce, RoceConfig, RoceNumbers};
use blockmux_volume::{Chunk, Memory, Pool};
use rounds::{ConnectedPair, Round, endpoint, rounds_of_every_kind};
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

/// A connection whose network delivers each packet at once, and marks all of them if `marks`.
struct Pair {
    ends: [Roce; 2],
    packet: Vec<u8>,
    chunk: Chunk,
    marks: bool,
    now: Instant,
}

impl Pair {
    fn new(mtu: u16, marks: bool) -> Pair {
        let addresses = [1, 2].map(|host| IpAddr::V4(Ipv4Addr::new(192, 0, 2, host)));
        let (pool, now) = (Pool::new(64 << 20), Instant::now());
        let ends = [0, 1].map(|side: usize| {
            let config = RoceConfig {
                local: addresses[side],
                peer: addresses[1 - side],
                service: 4420,
                source_port: 40_000,
                mtu,
                window: 64,
                // Longer than some turns, so that an idle connection comes to rest.
                keep_alive: Some(Duration::from_millis(10)),
            };
            let numbers = RoceNumbers {
                queue_pair: 17 + side as u32,
                first_psn: 0xff_fff0,
                comm_id: 5,
                // One of this implementation, which is notified.
                guid: 0x42_4d58 << 40,
            };
            let create = [Roce::active, Roce::passive][side];
            create(&endpoint(), config, numbers, pool.clone(), [side as u8; 32], now)
        });
        let chunk = Chunk::new(Memory::from_heap(BUFFER));
        let mut pair = Pair { ends, packet: Vec::with_capacity(8192), chunk, marks, now };
        pair.carry();
        assert!(matches!(pair.passive().poll(), Some(Event::Requested { .. })));
        pair.passive().accept(Vec::new());
        // The reply, and its answer.
        for _ in 0..2 {
            pair.carry();
        }
        for end in &mut pair.ends {
            assert!(matches!(end.poll(), Some(Event::Connected { .. })));
        }
        pair
    }

    fn send(&mut self, from: usize) -> bool {
        let mut moved = false;
        while self.ends[from].poll_transmit(self.now, &mut self.packet) {
            moved = true;
            self.packet.extend([0; 4]);
            self.chunk.recycle();
            if self.chunk.room() < BUFFER / 2 {
                assert!(self.chunk.compact(), "the buffer is still borrowed");
            }
            let len = self.packet.len();
            self.chunk.spare()[..len].copy_from_slice(&self.packet);
            self.chunk.fill(len);
            self.ends[1 - from].on_packet(&self.chunk, self.marks, self.now).expect("a good peer");
            self.chunk.take(len);
            self.packet.clear();
        }
        moved
    }
}

impl ConnectedPair for Pair {
    type End = Roce;

    fn active(&mut self) -> &mut Roce {
        &mut self.ends[0]
    }

    fn passive(&mut self) -> &mut Roce {
        &mut self.ends[1]
    }

    fn carry(&mut self) -> bool {
        // Each call is later, so that pauses of the rate limit end.
        self.now += Duration::from_millis(2);
        let moved = [0, 1].map(|side| {
            self.ends[side].on_timeout(self.now).expect("nothing is lost");
            self.send(side)
        });
        moved != [false; 2]
    }
}

#[test]
fn messages_writes_and_reads_allocate_nothing() {
    for (mtu, marks) in [(1024, false), (4096, false), (1024, true)] {
        for (kind, len) in rounds_of_every_kind() {
            let mut round = Round::new(Pair::new(mtu, marks), len, kind, len == 4096);
            let allocations = round.allocations(kind, 40);
            assert_eq!(allocations, 0, "{kind:?} of {len} bytes, MTU {mtu}, marks: {marks}");
        }
    }
}

const BUFFER: usize = 1 << 20;
