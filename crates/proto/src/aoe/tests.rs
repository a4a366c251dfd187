//! Initiator and target over a network that loses, duplicates and delays frames, in virtual time.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use super::client::{AoeInitiatorConfig, AoeInitiatorSession};
use super::disks::AoeDisks;
use super::server::AoeTargetSession;
use super::*;
use crate::driver::frames::{Frame, FramePortInfo, OutFrame, PortId, Station};
use crate::driver::session::{FrameSession, Timed};
use crate::driver::target::IoSource;
use blockmux_volume::conformance::TestCore;
use blockmux_volume::random::SplitMix;
use blockmux_volume::{Channel, Chunk, Io, Op, Pool, Seg, SgList, Tag, Waker};
use blockmux_wire::ethernet::Mac;
use std::collections::HashMap;
use std::time::{Duration, Instant};

struct Net {
    target: AoeTargetSession,
    initiator: AoeInitiatorSession,
    channels: Vec<Box<dyn Channel>>,
    random: SplitMix,
    now: Instant,
    loss_per_thousand: u64,
    /// Frames in transit: time of arrival, whether the target is the receiver, and the frame.
    on_the_way: Vec<(Instant, bool, Vec<u8>)>,
    sent: u64,
}

const OURS: Mac = Mac([2, 0, 0, 0, 0, 1]);
const PORT: FramePortInfo = FramePortInfo { mac: OURS, mtu: 9000, buffers: 64, is_up: true };

impl Net {
    fn new(seed: u64, loss_per_thousand: u64) -> Net {
        let (exports, units) = super::server::tests::units();
        let core = TestCore::new().as_core();
        let open = |export: &crate::exports::Export| export.volume.open(&core, 1024, Waker::idle()).unwrap();
        let channels = exports.iter().map(|(_, export)| open(&export)).collect();
        let now = Instant::now();
        let mut target = AoeTargetSession::new(exports, AoeDisks::everywhere(units));
        let initiator = Net::queue(7, 0, now);
        target.on_port(PortId(0), super::server::tests::PORT, now);
        let (random, on_the_way) = (SplitMix::new(seed), Vec::new());
        Net { target, initiator, channels, random, now, loss_per_thousand, on_the_way, sent: 0 }
    }

    /// A queue to e1.0 whose tags begin with `id` and count from `first` on.
    fn queue(id: u8, first: u32, now: Instant) -> AoeInitiatorSession {
        let address = AoeAddress { shelf: 1, slot: 0 };
        let config = AoeInitiatorConfig { address, timeout: Duration::from_secs(60), id, first };
        let mut initiator = AoeInitiatorSession::new(config, Pool::new(1 << 30), now);
        initiator.on_port(PortId(0), PORT, now);
        initiator
    }

    /// Runs one I/O after the bring-up and the probing.
    fn does(&mut self, op: Op, byte: u8) -> Vec<u8> {
        while self.initiator.disk().is_none() || self.initiator.is_probing() {
            self.step();
        }
        let mut io = Io::new(Tag(0), op, 0, 512);
        io.data = (op != Op::Read).then(|| SgList::one(Seg::from_slice(&[byte; 512])));
        self.initiator.submit(io);
        loop {
            self.step();
            if let Some(done) = self.initiator.poll_done() {
                return done.result.unwrap().into_data().to_vec();
            }
        }
    }

    fn send(&mut self, frame: &OutFrame, to_target: bool) {
        self.sent += 1;
        if self.random.below(1000) < self.loss_per_thousand {
            return;
        }
        for _ in 0..1 + u32::from(self.random.below(1000) < self.loss_per_thousand) {
            let mut delay = Duration::from_micros(10 + self.random.below(100));
            if self.random.below(1000) < self.loss_per_thousand {
                delay += Duration::from_millis(self.random.below(100));
            }
            self.on_the_way.push((self.now + delay, to_target, frame.to_vec()));
        }
    }

    /// Advances to the next event.
    fn step(&mut self) {
        while let Some(frame) = self.initiator.frames(self.now).pop_front() {
            self.send(&frame, true);
        }
        while let Some(frame) = self.target.frames(self.now).pop_front() {
            self.send(&frame, false);
        }
        let arrival = self.on_the_way.iter().map(|(at, ..)| *at).min();
        let next = [arrival, self.initiator.poll_timeout()].into_iter().flatten().min();
        self.now = self.now.max(next.expect("an event is due"));
        if self.initiator.poll_timeout().is_some_and(|at| at <= self.now) {
            self.initiator.on_timeout(self.now).unwrap();
        }
        let arrived: Vec<_> = self.on_the_way.extract_if(.., |(at, ..)| *at <= self.now).collect();
        for (_, to_target, bytes) in arrived {
            let chunk = Chunk::from_slice(&bytes);
            let mac = if to_target { OURS } else { super::server::tests::PORT.mac };
            let frame = Frame::new(Station { port: PortId(0), mac }, &chunk, bytes.len());
            if to_target {
                self.target.on_frame(&frame, self.now);
            } else {
                self.initiator.on_frame(&frame, self.now);
            }
        }
        while let Some((volume, io)) = self.target.poll_io() {
            let mut done = Vec::new();
            self.target.begin(volume, &io, false).expect("nothing excludes it");
            let channel = &mut self.channels[volume.0 as usize];
            channel.submit(io);
            channel.poll(&mut done);
            done.into_iter().for_each(|done| self.target.on_io(done, Instant::now()));
        }
    }
}

/// Runs random reads and writes of 1 MiB and checks all data that is read. Returns the number of
/// frames and the virtual time.
fn storm(seed: u64, loss_per_thousand: u64) -> (u64, Duration) {
    let mut net = Net::new(seed, loss_per_thousand);
    while net.initiator.disk().is_none() {
        net.step();
    }
    let begin = net.now;
    let mut random = SplitMix::new(!seed);
    let mut model = vec![0u8; 1 << 20];
    let mut busy: HashMap<u64, (u64, u64, Option<u8>)> = HashMap::new();
    let (mut submitted, mut completed) = (0u64, 0);
    while completed < 600 {
        while submitted < 600 && busy.len() < 24 {
            let sectors = 1 + random.below(40);
            let (offset, len) = (random.below(2048 - sectors) * 512, sectors * 512);
            if busy.values().any(|(at, n, _)| offset < at + n && *at < offset + len) {
                break;
            }
            let byte = (random.below(2) == 0).then(|| random.below(256) as u8);
            let mut io = Io::new(Tag(submitted), Op::Read, offset, len);
            if let Some(byte) = byte {
                io.op = Op::Write { fua: false };
                io.data = Some(SgList::one(Seg::from_slice(&vec![byte; len as usize])));
            }
            net.initiator.submit(io);
            busy.insert(submitted, (offset, len, byte));
            submitted += 1;
        }
        net.step();
        while let Some(done) = net.initiator.poll_done() {
            let (offset, len, byte) = busy.remove(&done.tag.0).expect("each I/O completes once");
            let output = done.result.expect("no I/O fails");
            let place = &mut model[offset as usize..][..len as usize];
            match byte {
                Some(byte) => place.fill(byte),
                None => assert!(output.into_data().to_vec() == *place, "seed {seed}: wrong data at {offset}"),
            }
            completed += 1;
        }
    }
    (net.sent, net.now - begin)
}

#[test]
fn nothing_is_lost_or_undone_whatever_the_network_does() {
    for loss_per_thousand in [0, 10, 50, 200] {
        for seed in 0..4 {
            storm(seed, loss_per_thousand);
        }
    }
}

#[test]
fn without_loss_nothing_is_sent_twice() {
    let mut net = Net::new(1, 0);
    while net.initiator.disk().is_none() || net.initiator.is_probing() {
        net.step();
    }
    assert_eq!(net.initiator.stations().next().unwrap().1, 17);
    let before = net.sent;
    net.initiator.submit(Io::new(Tag(0), Op::Read, 0, 170 * 512));
    while net.initiator.poll_done().is_none() {
        net.step();
    }
    assert_eq!(net.sent - before, 20, "ten commands of 17 sectors and their answers");
}

/// Like a program that copies one image to a disk, then another, then the first again. Each copy
/// has a new queue; the tags of the third have the same upper byte as those of the first.
#[test]
fn writes_of_a_new_queue_are_not_mistaken_for_retransmits_of_an_earlier_one() {
    let mut net = Net::new(1, 0);
    for (id, first, byte) in [(7, 1 << 9, 1), (8, 1 << 12, 2), (7, 1 << 15, 1)] {
        net.initiator = Net::queue(id, first, net.now);
        net.does(Op::Write { fua: false }, byte);
        assert_eq!(net.does(Op::Read, 0), [byte; 512]);
    }
}
