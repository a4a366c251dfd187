//! Queue pairs over streams of records, which are cut anywhere, and peers that are gone.

use super::super::records::RoceRecords;
use super::reported;
use crate::conformance::{self, Side, Wire};
use crate::queue_pair::{Provider, Violation};
use blockmux_proto::driver::session::{Demand, StreamSession, Timed};
use blockmux_proto::rdma::{Endpoint, Event, QueuePair, WorkRequest};
use blockmux_volume::{Chunk, Memory, Pool};
use std::time::{Duration, Instant};

/// Both ends, and the streams between them.
struct RecordPair {
    ends: [RoceRecords; 2],
    /// Bytes that each end has not taken.
    arrived: [Chunk; 2],
    /// Most bytes that are moved at once.
    step: usize,
    now: Instant,
    /// Time of the last transfer.
    moved_at: Instant,
    is_broken: bool,
}

impl RecordPair {
    /// Connections with different seeds have different tags of memory.
    fn new([active, passive]: [&Endpoint; 2], step: usize, seed: u8) -> RecordPair {
        let (pool, now) = (Pool::new(1 << 20), Instant::now());
        let ends = [
            RoceRecords::active(active, None, pool.clone(), [seed; 32], now),
            RoceRecords::passive(passive, None, pool, [!seed; 32], now),
        ];
        let arrived = [(); 2].map(|()| Chunk::new(Memory::from_heap(CHUNK)));
        RecordPair { ends, arrived, step, now, moved_at: now, is_broken: false }
    }

    /// Moves what one end has to send, at most a step; returns whether there was anything.
    fn transfer(&mut self, from: usize) -> bool {
        let to = 1 - from;
        self.ends[from].on_send(|| self.now);
        let output = self.ends[from].outbox();
        let mut bytes = output.take_bytes();
        let had_any = !bytes.is_empty();
        while !bytes.is_empty() {
            let rest = bytes.split_off(self.step.min(bytes.len()));
            if !self.is_broken {
                self.arrive(to, &bytes);
            }
            bytes = rest;
        }
        had_any
    }

    fn arrive(&mut self, to: usize, bytes: &[u8]) {
        let chunk = &mut self.arrived[to];
        chunk.recycle();
        if chunk.room() < bytes.len() {
            let mut fresh = Chunk::new(Memory::from_heap(CHUNK));
            fresh.extend(chunk.unread());
            *chunk = fresh;
        }
        chunk.extend(bytes);
        while let Demand::Bytes(wanted) = self.ends[to].demand() {
            if self.arrived[to].unread().len() < wanted {
                break;
            }
            // The end of the connection is an event, too.
            let taken = self.ends[to].on_bytes(&self.arrived[to], self.now);
            let skipped = self.arrived[to].unread().len();
            self.arrived[to].take(taken.unwrap_or(skipped));
        }
    }

    /// Moves what both ends have to send; returns whether there was anything.
    fn exchange(&mut self) -> bool {
        let moved = [0, 1].map(|from| self.transfer(from)) != [false; 2];
        if moved {
            self.moved_at = self.now;
        }
        moved
    }

    /// Lets time pass until the next deadline.
    fn wait(&mut self) {
        let next = self.ends.iter().filter_map(Timed::poll_timeout).min().unwrap();
        self.now = self.now.max(next);
        for end in &mut self.ends {
            if end.poll_timeout().is_some_and(|at| at <= self.now) {
                end.on_timeout(self.now).ok();
            }
        }
    }
}

impl Wire for RecordPair {
    fn end(&mut self, side: Side) -> &mut dyn Provider {
        &mut self.ends[usize::from(side == Side::Passive)]
    }

    fn turn(&mut self) -> bool {
        if self.exchange() {
            return true;
        }
        let next = self.ends.iter().filter_map(Timed::poll_timeout).min();
        let is_due = next.is_some_and(|next| next <= self.moved_at + QUIET);
        if is_due {
            self.wait();
        }
        is_due
    }

    fn break_connection(&mut self) {
        self.is_broken = true;
        for end in &mut self.ends {
            end.on_end(self.now).unwrap();
        }
    }

    fn pads_private_data(&self) -> bool {
        true
    }

    fn reported(&self, violation: Violation) -> Violation {
        reported(violation)
    }
}

fn endpoint() -> Endpoint {
    Endpoint {
        receives: 4,
        receive_len: 64,
        sends: 4,
        reads: 1,
        regions: 1,
        private_data: Vec::new(),
        without_invalidation: None,
    }
}

/// Both ends of an established connection.
fn connected() -> RecordPair {
    let mut pair = RecordPair::new([&endpoint(), &endpoint()], usize::MAX, 0);
    pair.exchange();
    assert!(matches!(pair.ends[1].poll(), Some(Event::Requested { .. })));
    pair.ends[1].post(WorkRequest::Accept { private_data: Vec::new() });
    while pair.exchange() {}
    for end in &mut pair.ends {
        assert!(matches!(end.poll(), Some(Event::Connected { .. })));
        assert!(end.poll().is_none());
    }
    pair
}

#[test]
fn an_idle_connection_stays_open_while_both_sides_answer() {
    let mut pair = connected();
    let end = pair.now + Duration::from_secs(60);
    while pair.now < end {
        pair.wait();
        while pair.exchange() {}
    }
    for end in &mut pair.ends {
        assert!(end.poll().is_none());
        assert!(matches!(end.demand(), Demand::Bytes(_)));
    }
}

#[test]
fn a_side_that_waits_for_nothing_notices_that_its_peer_is_gone() {
    for gone in [0, 1] {
        let mut pair = connected();
        let begin = pair.now;
        pair.is_broken = true;
        let left = 1 - gone;
        while !matches!(pair.ends[left].poll(), Some(Event::Disconnected)) {
            pair.wait();
            pair.exchange();
        }
        assert!(pair.now - begin < Duration::from_secs(10), "{:?}", pair.now - begin);
    }
}

#[test]
fn a_side_that_closes_tells_its_peer_at_once() {
    for closing in [0, 1] {
        let mut pair = connected();
        pair.ends[closing].on_end(pair.now).unwrap();
        pair.transfer(closing);
        assert!(matches!(pair.ends[1 - closing].poll(), Some(Event::Disconnected)));
    }
}

/// A deadline wakes its driver, because no further packet arrives.
#[test]
fn a_connection_that_has_ended_demands_to_be_closed() {
    let mut pair = connected();
    pair.ends[0].post(WorkRequest::Disconnect);
    while pair.exchange() {}
    for end in &mut pair.ends {
        assert!(matches!(end.poll(), Some(Event::Disconnected)));
        end.outbox();
        assert!(matches!(end.demand(), Demand::Close));
        assert!(end.poll_timeout().is_some());
    }
    pair.wait();
    assert!(pair.ends.iter().all(|end| end.poll_timeout().is_none()));
}

#[test]
fn it_conforms_however_the_stream_of_records_is_cut() {
    for step in [usize::MAX, 4099, 61] {
        let mut seed = 0;
        conformance::run(&mut |active, passive| {
            // At most a few connections exist at once.
            seed = (seed + 1) % 100;
            Box::new(RecordPair::new([active, passive], step, seed))
        });
    }
}

const CHUNK: usize = 256 << 10;
/// Ends that have moved nothing for so long have nothing to repeat, and none asks for a sign of
/// life yet.
const QUIET: Duration = Duration::from_secs(3);
