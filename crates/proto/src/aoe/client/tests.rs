//! Tests of the initiator, frame by frame.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use super::*;
use crate::driver::frames::Station;
use blockmux_volume::{Chunk, Op, Tag};
use blockmux_wire::aoe::{AOE_ATA_HEAD, AtaMessage, ConfigMessage, Header};
use blockmux_wire::ata;
use blockmux_wire::ethernet::Mac;
use zerocopy::{FromBytes, IntoBytes};

const TARGET: Mac = Mac([2, 0x77, 0, 0, 0, 1]);
const PORT: FramePortInfo = FramePortInfo { mac: Mac([2; 6]), mtu: 1500, buffers: 64, is_up: true };
const ADDRESS: AoeAddress = AoeAddress { shelf: 1, slot: 1 };
const TIMEOUT: Duration = Duration::from_secs(5);

struct AoeInitiatorBench {
    session: AoeInitiatorSession,
    now: Instant,
}

/// A frame of the initiator.
#[derive(Debug)]
struct SentFrame {
    to: Station,
    header: Header,
    bytes: Vec<u8>,
}

impl SentFrame {
    fn registers(&self) -> AtaMessage {
        AtaMessage::read_from_prefix(&self.bytes[10..]).unwrap().0
    }
}

impl AoeInitiatorBench {
    fn new() -> AoeInitiatorBench {
        let now = Instant::now();
        let config = AoeInitiatorConfig { address: ADDRESS, timeout: TIMEOUT, id: 0xab, first: 0 };
        let mut session = AoeInitiatorSession::new(config, Pool::new(64 << 20), now);
        session.on_port(PortId(0), PORT, now);
        AoeInitiatorBench { session, now }
    }

    /// A session that is ready; its disk of 1 GiB has `buffers` buffers and takes `sectors` sectors
    /// in a frame.
    fn ready(buffers: u16, sectors: u8) -> AoeInitiatorBench {
        let mut bench = AoeInitiatorBench::new();
        bench.sent();
        bench.receive(0, TARGET, &config(buffers, sectors));
        let identify = bench.sent().pop().unwrap();
        assert_eq!(identify.registers().command_or_status, ata::AtaCommand::IDENTIFY_DEVICE.0);
        let disk = crate::aoe::identify::describe(ADDRESS, None, &VolumeInfo::new(1 << 30));
        bench.answer(&identify, 0x40, 0, disk.as_bytes());
        assert!(bench.session.disk().is_some());
        bench
    }

    fn sent(&mut self) -> Vec<SentFrame> {
        let outbox = self.session.frames(self.now);
        let frames = std::iter::from_fn(|| outbox.pop_front());
        frames
            .map(|frame| {
                let bytes = frame.to_vec();
                SentFrame { to: frame.to, header: Header::read_from_prefix(&bytes).unwrap().0, bytes }
            })
            .collect()
    }

    fn receive(&mut self, port: u16, from: Mac, bytes: &[u8]) {
        let chunk = Chunk::from_slice(bytes);
        let from = Station { port: PortId(port), mac: from };
        self.session.on_frame(&Frame::new(from, &chunk, bytes.len()), self.now);
    }

    fn answer(&mut self, sent: &SentFrame, status: u8, error: u8, data: &[u8]) {
        let bytes = answer(sent, status, error, data);
        self.receive(sent.to.port.0, sent.to.mac, &bytes);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.session.on_timeout(self.now).unwrap();
    }

    fn read(&mut self, tag: u64, len: u64) {
        self.session.submit(Io::new(Tag(tag), Op::Read, 0, len));
    }

    fn done(&mut self) -> Vec<(u64, Result<usize, IoError>)> {
        let done = std::iter::from_fn(|| self.session.poll_done());
        done.map(|done| (done.tag.0, done.result.map(|output| output.into_data().len()))).collect()
    }
}

fn config(buffers: u16, sectors: u8) -> Vec<u8> {
    let header =
        Header { version_and_flags: 0x18, error: 0, major: 1.into(), minor: 1, command: 1, tag: 0.into() };
    let config = ConfigMessage {
        buffer_count: buffers.into(),
        firmware_version: 0.into(),
        sector_count: sectors,
        version_and_command: 0x10,
        string_length: 0.into(),
    };
    [header.as_bytes(), config.as_bytes()].concat()
}

fn answer(sent: &SentFrame, status: u8, error: u8, data: &[u8]) -> Vec<u8> {
    let mut head = sent.bytes[..AOE_ATA_HEAD].to_vec();
    (head[0], head[13], head[11]) = (0x18, status, error);
    head.extend(data);
    head
}

#[test]
fn the_session_queries_all_targets_then_the_disk_and_is_ready() {
    let mut bench = AoeInitiatorBench::new();
    let asked = bench.sent();
    assert_eq!((asked.len(), asked[0].to.mac, asked[0].header.command), (1, Mac::BROADCAST, 1));
    assert_eq!((asked[0].header.major.get(), asked[0].header.minor), (1, 1));
    bench.pass(Duration::from_millis(250));
    assert_eq!(bench.sent().len(), 1, "the query is repeated without an answer");
    assert_eq!((bench.session.disk().is_some(), bench.session.room()), (false, 0));
    let bench = AoeInitiatorBench::ready(16, 2);
    assert_eq!((bench.session.volume_info().unwrap().size, bench.session.room()), (1 << 30, MAX_REQUESTS));
}

#[test]
fn a_request_is_split_into_as_many_commands_as_its_frames_need() {
    let mut bench = AoeInitiatorBench::ready(16, 2);
    bench.read(7, 4096);
    let sent = bench.sent();
    let cut: Vec<_> =
        sent.iter().map(|sent| (sent.registers().block(), sent.registers().sector_count)).collect();
    assert_eq!(cut, [(0, 2), (2, 2), (4, 2), (6, 2)]);
    for sent in sent.iter().rev() {
        assert!(bench.done().is_empty());
        bench.answer(sent, 0x40, 0, &[sent.registers().lba[0]; 1024]);
    }
    let done = bench.session.poll_done().unwrap().result.unwrap().into_data().to_vec();
    assert_eq!([done[0], done[1024], done[2048], done[4095]], [0, 2, 4, 6]);
}

#[test]
fn no_more_is_in_flight_than_the_target_has_buffers() {
    let mut bench = AoeInitiatorBench::ready(3, 2);
    (0..10).for_each(|tag| bench.read(tag, 512));
    assert_eq!(bench.sent().len(), 3);
    let mut bench = AoeInitiatorBench::ready(200, 2);
    (0..100).for_each(|tag| bench.read(tag, 512));
    let first = bench.sent();
    assert_eq!(first.len(), 4, "the first window is small");
    first.iter().for_each(|sent| bench.answer(sent, 0x40, 0, &[0; 512]));
    assert!(bench.sent().len() > 4, "answers widen the window");
}

#[test]
fn an_unanswered_command_is_retransmitted_under_the_same_tag() {
    let mut bench = AoeInitiatorBench::ready(16, 2);
    bench.session.submit(Io {
        data: Some(blockmux_volume::SgList::one(Seg::from_slice(&[5; 512]))),
        ..Io::new(Tag(1), Op::Write { fua: false }, 512, 512)
    });
    let first = bench.sent().pop().unwrap();
    bench.pass(Duration::from_secs(1));
    let second = bench.sent().pop().unwrap();
    assert_eq!(first.bytes, second.bytes);
    bench.pass(Duration::from_secs(1));
    bench.answer(&first, 0x40, 0, &[]);
    assert_eq!(bench.done(), [(1, Ok(0))]);
    assert!(bench.sent().is_empty(), "a completed request is not sent again: its memory has another owner");
    bench.answer(&second, 0x40, 0, &[]);
    assert!(bench.done().is_empty(), "once");
}

impl AoeInitiatorBench {
    /// Establishes a round-trip time of 100 microseconds and the largest window.
    fn with_round_trip(mut self) -> AoeInitiatorBench {
        for _ in 0..20 {
            (0..16).for_each(|tag| self.read(tag, 512));
            while let sent = self.sent()
                && !sent.is_empty()
            {
                self.now += Duration::from_micros(100);
                sent.iter().for_each(|sent| self.answer(sent, 0x40, 0, &[0; 512]));
            }
        }
        self.done();
        self
    }
}

#[test]
fn an_overtaken_frame_is_sent_again_after_about_a_round_trip() {
    let mut bench = AoeInitiatorBench::ready(16, 2).with_round_trip();
    bench.read(1, 512);
    let first = bench.sent().pop().unwrap();
    bench.now += Duration::from_micros(10);
    bench.read(2, 512);
    let second = bench.sent().pop().unwrap();
    let window = bench.session.congestion.window();
    bench.now += Duration::from_micros(90);
    bench.answer(&second, 0x40, 0, &[0; 512]);
    assert!(bench.sent().is_empty(), "the answer may be late");
    bench.pass(Duration::from_millis(1));
    assert_eq!(bench.sent().pop().unwrap().bytes, first.bytes);
    assert!(bench.session.congestion.window() < window, "a loss narrows the window");
    bench.answer(&first, 0x40, 0, &[0; 512]);
    assert_eq!(bench.session.congestion.window(), window, "a late answer restores the window");
    bench.done();
    bench.read(3, 512);
    let third = bench.sent().pop().unwrap();
    bench.now += Duration::from_micros(10);
    bench.read(4, 512);
    let fourth = bench.sent().pop().unwrap();
    bench.answer(&fourth, 0x40, 0, &[0; 512]);
    bench.pass(Duration::from_micros(1100));
    assert!(bench.sent().is_empty(), "the wait is longer once answers came out of order");
    bench.pass(Duration::from_millis(1));
    assert_eq!(bench.sent().pop().unwrap().bytes, third.bytes);
}

#[test]
fn while_nothing_is_answered_only_one_frame_probes() {
    let mut bench = AoeInitiatorBench::ready(16, 2).with_round_trip();
    (0..4).for_each(|tag| bench.read(tag, 512));
    let (sent, window) = (bench.sent(), bench.session.congestion.window());
    assert_eq!(sent.len(), 4);
    let mut again = Vec::new();
    for _ in 0..29 {
        bench.pass(Duration::from_millis(1));
        again.extend(bench.sent());
    }
    assert!((3..6).contains(&again.len()), "{} frames in 29 ms, at growing intervals", again.len());
    assert_eq!(bench.session.congestion.window(), window, "silence alone does not narrow the window");
    let last = again.pop().unwrap();
    bench.now += Duration::from_micros(100);
    bench.answer(&last, 0x40, 0, &[0; 512]);
    assert_eq!(bench.done().len(), 1);
    bench.pass(Duration::from_millis(1));
    let rest: Vec<u32> = bench.sent().iter().map(|sent| sent.header.tag.get()).collect();
    assert_eq!(rest.len(), 3, "the other frames count as lost now: {rest:x?}");
}

#[test]
fn all_unanswered_commands_are_retransmitted_later() {
    let mut bench = AoeInitiatorBench::ready(16, 2).with_round_trip();
    (0..4).for_each(|tag| bench.read(tag, 512));
    let (first, window) = (bench.sent(), bench.session.congestion.window());
    let mut again = Vec::new();
    for _ in 0..60 {
        bench.pass(Duration::from_millis(1));
        again.extend(bench.sent().into_iter().map(|sent| sent.bytes));
    }
    assert!(first.iter().all(|sent| again.contains(&sent.bytes)), "every frame is sent again");
    assert!(bench.session.congestion.window() < window);
}

#[test]
fn a_flush_may_take_longer_than_later_requests() {
    let mut bench = AoeInitiatorBench::ready(16, 2).with_round_trip();
    bench.session.submit(Io::new(Tag(1), Op::Flush, 0, 0));
    let flush = bench.sent().pop().unwrap();
    let mut again = 0;
    for tag in 2..40 {
        bench.read(tag, 512);
        bench.now += Duration::from_micros(100);
        let sent = bench.sent().pop().unwrap();
        bench.answer(&sent, 0x40, 0, &[0; 512]);
        bench.pass(Duration::from_millis(2));
        again += usize::from(bench.sent().iter().any(|sent| sent.bytes == flush.bytes));
    }
    assert_eq!(again, 1, "in 80 ms");
    bench.answer(&flush, 0x40, 0, &[]);
    assert!(bench.done().contains(&(1, Ok(0))));
}

#[test]
fn requests_fail_once_after_the_timeout() {
    let mut bench = AoeInitiatorBench::ready(4, 2);
    (0..10).for_each(|tag| bench.read(tag, 512));
    let mut sent = bench.sent();
    for _ in 0..49 {
        bench.pass(TIMEOUT / 50);
        sent.extend(bench.sent());
    }
    assert_eq!(bench.done(), []);
    bench.pass(TIMEOUT / 50);
    let mut done = bench.done();
    done.sort_unstable_by_key(|done| done.0);
    assert_eq!(done, (0..10).map(|tag| (tag, Err(IoError::PathLost))).collect::<Vec<_>>());
    sent.retain(|sent| sent.header.command == 0);
    sent.iter().for_each(|sent| bench.answer(sent, 0x40, 0, &[0; 512]));
    assert_eq!((bench.done(), bench.session.held()), (vec![], 0));
    bench.read(11, 512);
    let again = bench.sent().into_iter().find(|sent| sent.header.command == 0).unwrap();
    bench.answer(&again, 0x40, 0, &[0; 512]);
    assert_eq!(bench.done(), [(11, Ok(512))], "the session works again");
}

#[test]
fn refused_requests_fail_with_the_targets_reason() {
    let all = [(0x41, 0x10, IoError::OutOfRange), (0x41, 0x40, IoError::Medium), (0x60, 0, IoError::Medium)];
    for (status, error, expected) in all {
        let mut bench = AoeInitiatorBench::ready(16, 2);
        bench.read(1, 512);
        let sent = bench.sent().pop().unwrap();
        bench.answer(&sent, status, error, &[]);
        assert_eq!(bench.done(), [(1, Err(expected))]);
    }
    let mut bench = AoeInitiatorBench::ready(16, 2);
    bench.read(1, 512);
    let sent = bench.sent().pop().unwrap();
    let mut refusal = answer(&sent, 0, 0, &[]);
    (refusal[0], refusal[1]) = (0x1c, 6);
    bench.receive(0, TARGET, &refusal);
    assert_eq!(bench.done(), [(1, Err(IoError::Reserved))]);
}

#[test]
fn unsolicited_responses_are_dropped() {
    let mut bench = AoeInitiatorBench::ready(16, 2);
    bench.read(1, 512);
    let sent = bench.sent().pop().unwrap();
    let good = answer(&sent, 0x40, 0, &[1; 512]);
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    let wrong = [
        ("no response", with(0, 0x10)),
        ("another version", with(0, 0x28)),
        ("another shelf", with(3, 2)),
        ("another slot", with(4, 2)),
        ("another command", with(5, 2)),
        ("another queue's tag", with(6, 0xac)),
        ("an unused tag", with(8, 0xff)),
        ("too short", good[..AOE_ATA_HEAD + 511].to_vec()),
        ("no registers", good[..12].to_vec()),
    ];
    for (what, bytes) in &wrong {
        bench.receive(0, TARGET, bytes);
        assert!(bench.done().is_empty(), "{what}");
    }
    bench.receive(0, Mac([6; 6]), &good);
    assert!(bench.done().is_empty(), "the sender does not have the disk");
    bench.receive(0, TARGET, &good);
    assert_eq!(bench.done(), [(1, Ok(512))]);
}

#[test]
fn large_frames_are_used_once_a_probe_was_answered() {
    let mut bench = AoeInitiatorBench::ready(16, 2);
    bench.session.on_port(PortId(0), FramePortInfo { mtu: 9000, ..PORT }, bench.now);
    bench.receive(0, TARGET, &config(16, 16));
    let probe = bench.sent().pop().unwrap();
    assert_eq!(
        (probe.registers().sector_count, probe.bytes.len()),
        (16, AOE_ATA_HEAD + 16 * 512),
        "both ways"
    );
    bench.read(1, 2048);
    let small = bench.sent();
    assert_eq!(small.len(), 2, "frames stay small during the probe");
    small.iter().for_each(|sent| bench.answer(sent, 0x40, 0, &[0; 1024]));
    for _ in 0..5 {
        bench.pass(Duration::from_secs(1));
    }
    let probes: Vec<_> = bench
        .sent()
        .into_iter()
        .filter(|sent| sent.header.command == 0 && sent.registers().sector_count > 2)
        .collect();
    let half = probes.last().unwrap();
    assert_eq!(half.registers().sector_count, 8, "a switch on the way takes no jumbo frames");
    bench.answer(half, 0x40, 0, &[0; 8 * 512]);
    assert_eq!(bench.session.stations().next().unwrap().1, 8);
    bench.read(2, 4096);
    assert_eq!(bench.sent().pop().unwrap().registers().sector_count, 8);
}

#[test]
fn frames_become_smaller_when_large_ones_no_longer_pass() {
    let mut bench = AoeInitiatorBench::ready(16, 2);
    bench.session.on_port(PortId(0), FramePortInfo { mtu: 9000, ..PORT }, bench.now);
    bench.receive(0, TARGET, &config(16, 16));
    let probe = bench.sent().pop().unwrap();
    bench.answer(&probe, 0x40, 0, &[0; 16 * 512]);
    bench.read(1, 8192);
    assert_eq!(bench.sent().pop().unwrap().registers().sector_count, 16);
    let mut read = 0;
    for _ in 0..40 {
        bench.pass(Duration::from_millis(100));
        for sent in bench.sent() {
            if sent.header.command == 0
                && sent.bytes.len() == AOE_ATA_HEAD
                && sent.registers().sector_count <= 2
            {
                read += u32::from(sent.registers().sector_count);
                bench.answer(&sent, 0x40, 0, &[0; 1024]);
            }
        }
    }
    assert_eq!((bench.done(), read), (vec![(1, Ok(8192))], 16));
}

#[test]
fn io_continues_at_once_on_an_interface_that_comes_up() {
    let mut bench = AoeInitiatorBench::ready(16, 2);
    bench.read(1, 512);
    bench.sent();
    bench.session.on_port(PortId(0), FramePortInfo { is_up: false, ..PORT }, bench.now);
    bench.pass(TIMEOUT / 2);
    bench.sent();
    bench.session.on_port(PortId(0), PORT, bench.now);
    bench.pass(Duration::ZERO);
    let sent = bench.sent();
    let read = sent.iter().find(|sent| sent.header.command == 0).unwrap();
    bench.answer(read, 0x40, 0, &[0; 512]);
    assert_eq!(bench.done(), [(1, Ok(512))]);
}

#[test]
fn a_second_station_gets_its_share_and_then_all_commands() {
    let mut bench = AoeInitiatorBench::ready(16, 2);
    let other = Mac([2, 0x77, 0, 0, 0, 2]);
    bench.receive(0, other, &config(16, 2));
    (0..4).for_each(|tag| bench.read(tag, 512));
    let sent = bench.sent();
    assert_eq!(sent.iter().filter(|sent| sent.to.mac == other).count(), 2);
    let mut answered = 0;
    for _ in 0..40 {
        bench.pass(Duration::from_millis(100));
        for sent in bench.sent() {
            if sent.to.mac == TARGET && sent.header.command == 0 {
                bench.answer(&sent, 0x40, 0, &[0; 512]);
                answered += 1;
            }
        }
    }
    assert_eq!(bench.done().len(), 4, "after {answered} answers of the one that is left");
}
