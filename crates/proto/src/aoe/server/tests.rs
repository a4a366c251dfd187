//! Tests that hand frames to a target with RAM volumes.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use super::*;
use crate::aoe::AoeAddress;
use crate::aoe::identify::AtaDisk as Identified;
use crate::exports::Export;
use crate::volume_state::{Commit, SharedState, StateGeneration};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Channel, Chunk, MemVolume, Waker};
use blockmux_wire::aoe::{AtaMessage, ConfigCommand, ConfigMessage, MacDirective, ReserveCommand};
use blockmux_wire::ata;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// A target with disks e1.0, e1.1 (read-only) and e2.0 of 1 MiB, and its volumes.
pub(in crate::aoe) struct AoeTargetBench {
    pub(in crate::aoe) target: AoeTargetSession,
    channels: Vec<Box<dyn Channel>>,
    holds_io: bool,
    held: VecDeque<(VolumeId, Io)>,
    /// Whether I/O does not begin, and that I/O.
    throttles: bool,
    throttled: VecDeque<(VolumeId, Io)>,
    now: Instant,
    tag: u32,
}

const STATION: Mac = Mac([0x52, 0x54, 0, 0x77, 0, 1]);
const OTHER: Mac = Mac([0x52, 0x54, 0, 0x77, 0, 2]);
pub(in crate::aoe) const PORT: FramePortInfo =
    FramePortInfo { mac: Mac([2, 0x77, 0, 0, 0, 1]), mtu: 9000, buffers: 64, is_up: true };
const E1_0: AoeAddress = AoeAddress { shelf: 1, slot: 0 };
const E1_1: AoeAddress = AoeAddress { shelf: 1, slot: 1 };
const E2_0: AoeAddress = AoeAddress { shelf: 2, slot: 0 };
const SIZE: u64 = 1 << 20;

pub(in crate::aoe) fn units() -> (Exports, Vec<AoeUnit>) {
    let export = |name: &str, read_only| Export {
        name: name.to_owned(),
        description: String::new(),
        read_only,
        volume: Arc::new(MemVolume::new(SIZE)),
    };
    let exports = Exports::new(vec![export("a", false), export("b", true), export("c", false)]);
    let unit = |address, id| AoeUnit::new(address, VolumeId(id), DiskSettings::default(), None);
    (exports, vec![unit(E2_0, 2), unit(E1_0, 0), unit(E1_1, 1)])
}

impl AoeTargetBench {
    pub(in crate::aoe) fn new() -> AoeTargetBench {
        let (exports, units) = units();
        AoeTargetBench::with(&exports, units)
    }

    fn with(exports: &Exports, units: Vec<AoeUnit>) -> AoeTargetBench {
        AoeTargetBench::of(exports, AoeDisks::everywhere(units))
    }

    fn of(exports: &Exports, disks: AoeDisks) -> AoeTargetBench {
        let core = TestCore::new().as_core();
        let open = |export: &Export| export.volume.open(&core, DEPTH, Waker::idle()).unwrap();
        let channels = exports.iter().map(|(_, export)| open(&export)).collect();
        let mut target = AoeTargetSession::new(exports.clone(), disks);
        let now = Instant::now();
        (0..2).for_each(|id| target.on_port(PortId(id), PORT, now));
        target.outbox.clear();
        AoeTargetBench {
            target,
            channels,
            holds_io: false,
            held: VecDeque::new(),
            throttles: false,
            throttled: VecDeque::new(),
            now,
            tag: 0,
        }
    }

    pub(in crate::aoe) fn frame(&mut self, from: Mac, bytes: &[u8], now: Instant) -> Vec<(Station, Vec<u8>)> {
        self.frame_from(Station { port: PortId(0), mac: from }, bytes, now)
    }

    fn frame_from(&mut self, from: Station, bytes: &[u8], now: Instant) -> Vec<(Station, Vec<u8>)> {
        let chunk = Chunk::from_slice(bytes);
        self.target.on_frame(&Frame::new(from, &chunk, bytes.len()), now);
        self.run();
        self.replies(now)
    }

    fn replies(&mut self, now: Instant) -> Vec<(Station, Vec<u8>)> {
        let outbox = self.target.frames(now);
        std::iter::from_fn(|| outbox.pop_front()).map(|frame| (frame.to, frame.to_vec())).collect()
    }

    fn run(&mut self) {
        while let Some((volume, io)) = self.target.poll_io() {
            if self.throttles {
                self.throttled.push_back((volume, io));
                continue;
            }
            self.begin(volume, io);
        }
    }

    fn begin(&mut self, volume: VolumeId, io: Io) {
        match self.target.begin(volume, &io, false) {
            Ok(()) if self.holds_io => self.held.push_back((volume, io)),
            Ok(()) => self.submit(volume, io),
            Err(NotAdmitted::Denied(_)) => {}
            Err(_) => self.throttled.push_back((volume, io)),
        }
    }

    fn submit(&mut self, volume: VolumeId, io: Io) {
        let channel = &mut self.channels[volume.0 as usize];
        let mut done = Vec::new();
        channel.submit(io);
        channel.kick();
        channel.poll(&mut done);
        done.into_iter().for_each(|done| self.target.on_io(done, Instant::now()));
    }

    fn release_held(&mut self) -> usize {
        let held: Vec<_> = self.held.drain(..).collect();
        let count = held.len();
        held.into_iter().for_each(|(volume, io)| self.submit(volume, io));
        count
    }

    /// Sends a command with a new tag. Returns the header and the payload of the answer, of which
    /// there is at most one.
    fn ask(
        &mut self,
        from: Mac,
        to: (u16, u8),
        command: AoeCommand,
        message: &[u8],
    ) -> Option<(Header, Vec<u8>)> {
        self.tag += 1;
        let bytes = request(to, command, self.tag, message);
        let mut replies = self.frame(from, &bytes, self.now);
        assert!(replies.len() <= 1);
        let (station, reply) = replies.pop()?;
        assert_eq!(station.mac, from);
        let (header, rest) = Header::read_from_prefix(&reply).unwrap();
        assert_eq!((header.tag.get(), header.is_response(), header.version()), (self.tag, true, AOE_VERSION));
        Some((header, rest.to_vec()))
    }

    /// Status and error register, and the data.
    fn ata(&mut self, command: ata::AtaCommand, block: u64, sectors: u8, data: &[u8]) -> (u8, u8, Vec<u8>) {
        let message = registers(command, block, sectors, data);
        let (header, rest) = self.ask(STATION, (1, 0), AoeCommand::ISSUE_ATA_COMMAND, &message).unwrap();
        assert!(!header.is_error(), "{:?}", ErrorCode(header.error));
        let (registers, data) = AtaMessage::read_from_prefix(&rest).unwrap();
        (registers.command_or_status, registers.error_or_feature, data.to_vec())
    }

    fn config(&mut self, from: Mac, command: ConfigCommand, string: &[u8]) -> Option<(u8, Vec<u8>)> {
        let message = config(command, string);
        let (header, rest) = self.ask(from, (1, 0), AoeCommand::QUERY_CONFIG_INFORMATION, &message)?;
        let (answer, string) = ConfigMessage::read_from_prefix(&rest).unwrap();
        assert_eq!(string.len(), usize::from(answer.string_length.get()));
        Some((header.error, string.to_vec()))
    }
}

fn request(to: (u16, u8), command: AoeCommand, tag: u32, message: &[u8]) -> Vec<u8> {
    let header = Header {
        version_and_flags: AOE_VERSION << 4,
        error: 0,
        major: to.0.into(),
        minor: to.1,
        command: command.0,
        tag: tag.into(),
    };
    [header.as_bytes(), message].concat()
}

fn registers(command: ata::AtaCommand, block: u64, sectors: u8, data: &[u8]) -> Vec<u8> {
    let is_ext = matches!(command, ata::AtaCommand::READ_SECTORS_EXT | ata::AtaCommand::WRITE_SECTORS_EXT);
    let message = AtaMessage {
        aflags: if is_ext { 0x40 } else { 0 },
        error_or_feature: u8::from(command == ata::AtaCommand::DATA_SET_MANAGEMENT),
        sector_count: sectors,
        command_or_status: command.0,
        lba: if is_ext { AtaMessage::lba48(block) } else { AtaMessage::lba28(block) },
        reserved: [0; 2],
    };
    [message.as_bytes(), data].concat()
}

fn config(command: ConfigCommand, string: &[u8]) -> Vec<u8> {
    let message = ConfigMessage {
        buffer_count: 0.into(),
        firmware_version: 0.into(),
        sector_count: 0,
        version_and_command: AOE_VERSION << 4 | command.0,
        string_length: (string.len() as u16).into(),
    };
    [message.as_bytes(), string].concat()
}

const OK: u8 = 0x40;
const ERR: u8 = 0x41;

#[test]
fn the_kernels_query_and_identify_are_answered() {
    let mut bench = AoeTargetBench::new();
    let query = [0x10, 0, 0xff, 0xff, 0xff, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let answers = bench.frame(STATION, &query, bench.now);
    let expected = |shelf, slot| [0x18, 0, 0, shelf, slot, 1, 0, 0, 0, 0, 0, 64, 0, 1, 17, 0x10, 0, 0];
    let bytes: Vec<_> = answers.iter().map(|(_, bytes)| bytes.as_slice()).collect();
    assert_eq!(bytes, [expected(1, 0), expected(1, 1), expected(2, 0)]);
    let identify = [0x10, 0, 0, 1, 0, 0, 0, 1, 0xdf, 0x9c, 0, 0, 1, 0xec, 0, 0, 0, 0xa0, 0, 0, 0, 0];
    let answers = bench.frame(STATION, &identify, bench.now);
    let (head, data) = answers[0].1.split_at(22);
    assert_eq!(head, [0x18, 0, 0, 1, 0, 0, 0, 1, 0xdf, 0x9c, 0, 0, 0, 0x40, 0, 0, 0, 0xa0, 0, 0, 0, 0]);
    assert_eq!(Identified::from_bytes(data).unwrap().sectors, SIZE / 512);
}

#[test]
fn queries_reach_the_disks_that_they_name() {
    let mut bench = AoeTargetBench::new();
    let mut count = |shelf, slot| {
        let query = request(
            (shelf, slot),
            AoeCommand::QUERY_CONFIG_INFORMATION,
            1,
            &config(ConfigCommand::READ, b""),
        );
        bench.frame(STATION, &query, bench.now).len()
    };
    assert_eq!([count(0xffff, 0xff), count(1, 0xff), count(2, 0xff), count(3, 0xff)], [3, 2, 1, 0]);
    assert_eq!([count(0xffff, 0), count(0xffff, 1), count(0xffff, 2)], [2, 1, 0], "the slot of any shelf");
    assert_eq!([count(1, 1), count(1, 2)], [1, 0]);
}

#[test]
fn a_config_string_is_set_on_the_disks_that_are_named_and_on_no_others() {
    let mut bench = AoeTargetBench::new();
    let set = config(ConfigCommand::FORCE_SET, b"mine");
    let all = request((0xffff, 1), AoeCommand::QUERY_CONFIG_INFORMATION, 1, &set);
    assert_eq!(bench.frame(STATION, &all, bench.now).len(), 1);
    let strings: Vec<_> = bench.target.disks.iter().map(|disk| disk.settings.config.as_slice()).collect();
    assert_eq!(strings, [&b""[..], b"mine", b""], "of e1.0, e1.1 and e2.0");
}

#[test]
fn written_data_is_read_in_both_formats() {
    let mut bench = AoeTargetBench::new();
    let data: Vec<u8> = (0..1024u32).map(|n| n as u8 ^ 0x5a).collect();
    assert_eq!(bench.ata(ata::AtaCommand::WRITE_SECTORS_EXT, 7, 2, &data), (OK, 0, vec![]));
    assert_eq!(bench.ata(ata::AtaCommand::READ_SECTORS, 7, 2, &[]), (OK, 0, data.clone()));
    assert_eq!(bench.ata(ata::AtaCommand::WRITE_SECTORS, 9, 2, &data), (OK, 0, vec![]));
    assert_eq!(
        bench.ata(ata::AtaCommand::READ_SECTORS_EXT, 8, 2, &[]).2,
        [&data[512..], &data[..512]].concat()
    );
    assert_eq!(bench.ata(ata::AtaCommand::READ_VERIFY_SECTORS, 8, 2, &[]), (OK, 0, vec![]));
    assert_eq!(bench.ata(ata::AtaCommand::FLUSH_CACHE, 0, 0, &[]), (OK, 0, vec![]));
    assert_eq!(bench.ata(ata::AtaCommand::FLUSH_CACHE_EXT, 0, 0, &[]), (OK, 0, vec![]));
    assert_eq!(bench.ata(ata::AtaCommand::CHECK_POWER_MODE, 0, 0, &[]), (OK, 0, vec![]));
}

#[test]
fn io_in_flight_belongs_to_the_station_that_requested_it() {
    let mut bench = AoeTargetBench { holds_io: true, ..AoeTargetBench::new() };
    let read = registers(ata::AtaCommand::READ_SECTORS, 0, 1, &[]);
    for from in [STATION, OTHER] {
        assert!(bench.ask(from, (1, 0), AoeCommand::ISSUE_ATA_COMMAND, &read).is_none());
    }
    let ios: Vec<_> = bench.held.iter().map(|(_, io)| io.clone()).collect();
    assert_eq!(
        ios.iter().map(|io| bench.target.charge(io).station).collect::<Vec<_>>(),
        [Some(STATION), Some(OTHER)]
    );
    assert_eq!(bench.release_held(), 2);
    assert_eq!(bench.target.charge(&ios[0]).station, None);
}

#[test]
fn a_trim_discards_its_ranges_and_nothing_else() {
    let mut bench = AoeTargetBench::new();
    assert_eq!(bench.ata(ata::AtaCommand::WRITE_SECTORS, 0, 16, &[7; 16 * 512]).0, OK);
    let mut ranges = [0; 512];
    ranges[..8].copy_from_slice(ata::TrimRange::new(2, 3).as_bytes());
    ranges[16..24].copy_from_slice(ata::TrimRange::new(8, 1).as_bytes());
    assert_eq!(bench.ata(ata::AtaCommand::DATA_SET_MANAGEMENT, 0, 1, &ranges), (OK, 0, vec![]));
    let data = bench.ata(ata::AtaCommand::READ_SECTORS, 0, 16, &[]).2;
    let written: Vec<usize> = (0..16).filter(|at| data[at * 512..][..512] == [7; 512]).collect();
    assert_eq!(written, [0, 1, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15]);
    ranges[..8].copy_from_slice(ata::TrimRange::new(1 << 40, 1).as_bytes());
    assert_eq!(bench.ata(ata::AtaCommand::DATA_SET_MANAGEMENT, 0, 1, &ranges), (ERR, 0x10, vec![]));
}

#[test]
fn impossible_commands_are_refused_with_the_right_bits() {
    let mut bench = AoeTargetBench::new();
    let last = SIZE / 512 - 1;
    assert_eq!(bench.ata(ata::AtaCommand::READ_SECTORS_EXT, last, 1, &[]).0, OK);
    assert_eq!(bench.ata(ata::AtaCommand::READ_SECTORS_EXT, last, 2, &[]), (ERR, 0x10, vec![]));
    assert_eq!(bench.ata(ata::AtaCommand::READ_SECTORS_EXT, (1 << 48) - 1, 1, &[]), (ERR, 0x10, vec![]));
    assert_eq!(bench.ata(ata::AtaCommand::WRITE_SECTORS_EXT, last + 1, 1, &[1; 512]), (ERR, 0x10, vec![]));
    for unknown in [ata::AtaCommand::SMART, ata::AtaCommand::SET_FEATURES, ata::AtaCommand(0)] {
        assert_eq!(bench.ata(unknown, 0, 1, &[]), (ERR, 0x04, vec![]), "{unknown}");
    }
    let write = registers(ata::AtaCommand::WRITE_SECTORS, 0, 1, &[1; 512]);
    let (_, rest) = bench.ask(STATION, (1, 1), AoeCommand::ISSUE_ATA_COMMAND, &write).unwrap();
    assert_eq!((rest[3], rest[1]), (ERR, 0x44), "it is read-only");
}

#[test]
fn invalid_messages_are_refused_or_dropped_without_effect() {
    let mut bench = AoeTargetBench::new();
    assert_eq!(bench.ata(ata::AtaCommand::WRITE_SECTORS, 0, 1, &[9; 512]).0, OK);
    let ata = AoeCommand::ISSUE_ATA_COMMAND;
    let mut code =
        |to, command, message: &[u8]| bench.ask(STATION, to, command, message).map(|(head, _)| head.error);
    let bad = Some(ErrorCode::BAD_ARGUMENT_PARAMETER.0);
    assert_eq!(
        code((1, 0), ata, &registers(ata::AtaCommand::WRITE_SECTORS, 0, 1, &[1; 511])),
        bad,
        "too short"
    );
    assert_eq!(
        code((1, 0), ata, &registers(ata::AtaCommand::WRITE_SECTORS, 0, 0, &[1; 512])),
        bad,
        "no sectors"
    );
    assert_eq!(
        code((1, 0), ata, &registers(ata::AtaCommand::READ_SECTORS, 0, 18, &[])),
        bad,
        "no such frame"
    );
    assert_eq!(code((1, 0), ata, &registers(ata::AtaCommand::IDENTIFY_DEVICE, 0, 2, &[])), bad);
    assert_eq!(code((1, 0), AoeCommand(9), &[]), Some(ErrorCode::UNRECOGNIZED_COMMAND_CODE.0));
    assert_eq!(code((1, 9), ata, &registers(ata::AtaCommand::READ_SECTORS, 0, 1, &[])), None, "no such disk");
    for all in [(0xffff, 0xff), (1, 0xff), (0xffff, 0)] {
        let write = registers(ata::AtaCommand::WRITE_SECTORS, 0, 1, &[1; 512]);
        assert_eq!(code(all, ata, &write), None, "a broadcast write gets no answer");
    }
    let write = request((1, 0), ata, 77, &registers(ata::AtaCommand::WRITE_SECTORS, 0, 1, &[1; 512]));
    for len in 0..22 {
        assert!(bench.frame(STATION, &write[..len], bench.now).is_empty(), "{len} bytes");
    }
    let version_2 = [&[0x20], &write[1..]].concat();
    let answer = &bench.frame(STATION, &version_2, bench.now)[0].1;
    assert_eq!(answer[..2], [0x1c, ErrorCode::UNSUPPORTED_VERSION.0]);
    let response = [&[0x18], &write[1..]].concat();
    assert!(bench.frame(STATION, &response, bench.now).is_empty());
    for group in [Mac::BROADCAST, Mac([1, 0, 0x5e, 0, 0, 1])] {
        assert!(bench.frame(group, &write, bench.now).is_empty(), "a group address is no sender");
    }
    assert_eq!(bench.ata(ata::AtaCommand::READ_SECTORS, 0, 1, &[]).2, [9; 512]);
}

#[test]
fn a_late_write_that_linux_has_retransmitted_under_a_new_tag_does_not_undo_a_newer_one() {
    let mut bench = AoeTargetBench::new();
    let mut send = |count: u32, command, data: &[u8]| {
        let message = registers(command, 0, 1, data);
        let (now, clock) = (bench.now, (count * 3) & 0xffff);
        let bytes = request((1, 0), AoeCommand::ISSUE_ATA_COMMAND, count << 16 | clock, &message);
        bench.frame(STATION, &bytes, now).pop().unwrap().1[size_of::<Header>() + size_of::<AtaMessage>()..]
            .to_vec()
    };
    for count in 1..=40 {
        send(2 * count, ata::AtaCommand::WRITE_SECTORS, &[9; 512]);
        send(2 * count + 1, ata::AtaCommand::READ_SECTORS, &[]);
    }
    // The answer to the first copy, which has tag 100, has been sent.
    send(101, ata::AtaCommand::WRITE_SECTORS, &[1; 512]);
    send(102, ata::AtaCommand::WRITE_SECTORS, &[2; 512]);
    send(100, ata::AtaCommand::WRITE_SECTORS, &[1; 512]);
    assert_eq!(send(103, ata::AtaCommand::READ_SECTORS, &[]), [2; 512]);
    send(104, ata::AtaCommand::WRITE_SECTORS, &[1; 512]);
    assert_eq!(send(105, ata::AtaCommand::READ_SECTORS, &[]), [1; 512], "the same data once more");
}

#[test]
fn a_late_duplicate_does_not_undo_a_newer_write() {
    let mut bench = AoeTargetBench::new();
    let write = |tag, byte| {
        let message = registers(ata::AtaCommand::WRITE_SECTORS, 0, 1, &[byte; 512]);
        request((1, 0), AoeCommand::ISSUE_ATA_COMMAND, tag, &message)
    };
    let first = bench.frame(STATION, &write(0x1001, 1), bench.now);
    bench.frame(STATION, &write(0x1002, 2), bench.now);
    assert_eq!(bench.frame(STATION, &write(0x1001, 1), bench.now), first, "answered as before");
    assert_eq!(bench.ata(ata::AtaCommand::READ_SECTORS, 0, 1, &[]).2, [2; 512]);
    bench.frame(OTHER, &write(0x1001, 1), bench.now);
    assert_eq!(bench.ata(ata::AtaCommand::READ_SECTORS, 0, 1, &[]).2, [1; 512], "another initiator's");

    bench.holds_io = true;
    assert!(bench.frame(STATION, &write(0x1003, 5), bench.now).is_empty());
    assert!(bench.frame(STATION, &write(0x1003, 5), bench.now).is_empty());
    assert_eq!(bench.release_held(), 1, "the copy is not executed");
    assert_eq!(bench.replies(bench.now).len(), 1);
}

#[test]
fn throttled_commands_leave_room_for_others() {
    let mut bench = AoeTargetBench::new();
    bench.holds_io = true;
    let message = registers(ata::AtaCommand::READ_SECTORS, 0, 1, &[]);
    let send = |bench: &mut AoeTargetBench, who: u32, throttles: bool| {
        let before = bench.throttled.len() + bench.held.len();
        let [.., a, b] = who.to_be_bytes();
        bench.throttles = throttles;
        for tag in 0..DEPTH {
            let read = request((1, 0), AoeCommand::ISSUE_ATA_COMMAND, tag, &message);
            bench.frame(Mac([2, 0, 0, 0, a, b]), &read, bench.now);
        }
        bench.throttled.len() + bench.held.len() - before
    };
    let most = (MAX_WAITING / MAX_WAITING_PER_INITIATOR) as u32;
    for who in 0..most {
        assert_eq!(send(&mut bench, who, true), MAX_WAITING_PER_INITIATOR);
    }
    assert_eq!(send(&mut bench, most, true), 1, "half of the room is taken");
    assert_eq!(send(&mut bench, most + 1, false), DEPTH_PER_INITIATOR as usize);
    let flush = registers(ata::AtaCommand::FLUSH_CACHE, 0, 0, &[]);
    let before = bench.held.len();
    bench.frame(
        Mac([2, 0, 0, 0, 0, 0]),
        &request((1, 0), AoeCommand::ISSUE_ATA_COMMAND, DEPTH, &flush),
        bench.now,
    );
    assert_eq!(bench.held.len(), before + 1, "a flush is not throttled");
    assert_eq!(bench.target.waiting(), MAX_WAITING + 1);
    while let Some((volume, io)) = bench.throttled.pop_front() {
        bench.begin(volume, io);
    }
    assert_eq!(bench.target.waiting(), 0);
    assert_eq!(bench.release_held(), bench.replies(bench.now).len());
    assert!(bench.target.is_idle() && bench.target.in_flight.is_empty() && bench.target.begun == 0);
}

#[test]
fn no_more_commands_than_the_limits_are_in_flight() {
    let mut bench = AoeTargetBench::new();
    bench.holds_io = true;
    let read = |tag| {
        let message = registers(ata::AtaCommand::READ_SECTORS, 0, 1, &[]);
        request((1, 0), AoeCommand::ISSUE_ATA_COMMAND, tag, &message)
    };
    for who in 0..8 {
        (0..DEPTH).for_each(|tag| {
            bench.frame(Mac([2, 0, 0, 0, 0, who]), &read(tag), bench.now);
        });
        assert_eq!(bench.held.len(), (DEPTH_PER_INITIATOR * (u32::from(who) + 1)).min(DEPTH) as usize);
    }
    assert_eq!(bench.release_held(), DEPTH as usize);
    assert_eq!(bench.replies(bench.now).len(), DEPTH as usize);
    assert!(bench.target.is_idle() && bench.target.in_flight.is_empty());
    bench.frame(STATION, &read(0), bench.now);
    assert_eq!(bench.release_held(), 1);
}

#[test]
fn config_strings_are_read_tested_and_set() {
    use ConfigCommand as C;
    /// A command with its string, and the expected answer: error code and string.
    type Case = (C, &'static [u8], Option<(u8, &'static [u8])>);
    let mut bench = AoeTargetBench::new();
    let present = ErrorCode::CONFIG_STRING_PRESENT.0;
    let all: [Case; 13] = [
        (C::READ, b"", Some((0, b""))),
        (C::TEST, b"", Some((0, b""))),
        (C::TEST, b"host", None),
        (C::SET, b"host:a", Some((0, b"host:a"))),
        (C::SET, b"host:a", Some((0, b"host:a"))),
        (C::SET, b"host:b", Some((present, b"host:a"))),
        (C::TEST, b"host:a", Some((0, b"host:a"))),
        (C::TEST, b"host", None),
        (C::TEST_PREFIX, b"host", Some((0, b"host:a"))),
        (C::TEST_PREFIX, b"guest", None),
        (C::TEST_PREFIX, b"host:ab", None),
        (C::FORCE_SET, b"x", Some((0, b"x"))),
        (C(9), b"", Some((ErrorCode::BAD_ARGUMENT_PARAMETER.0, b"x"))),
    ];
    for (command, string, expected) in all {
        let expected = expected.map(|(code, string)| (code, string.to_vec()));
        assert_eq!(bench.config(STATION, command, string), expected, "{command} {string:?}");
    }
    let changes = std::iter::from_fn(|| bench.target.poll_event()).filter_map(|event| match event {
        AuditEvent::ByStation { event, .. } => match *event {
            AuditEvent::Reservation { change, is_done, .. } => Some((change, is_done)),
            _ => None,
        },
        _ => None,
    });
    let set = "config string set";
    let expected = [(set, true), (set, true), (set, false), ("config string force set", true)];
    assert_eq!(changes.collect::<Vec<_>>(), expected);
    let long = bench.config(STATION, C::FORCE_SET, &[b'x'; 1025]).unwrap();
    assert_eq!(long.0, ErrorCode::BAD_ARGUMENT_PARAMETER.0);
    assert_eq!(bench.config(STATION, C::FORCE_SET, &[b'y'; 1024]), Some((0, vec![b'y'; 1024])));
}

#[test]
fn only_stations_of_the_mask_list_are_served() {
    let mut bench = AoeTargetBench::new();
    let edit = |directives: &[(u8, Mac)]| {
        let mut message = vec![0, 1, 0, directives.len() as u8];
        for (command, mac) in directives {
            message.extend(MacDirective { reserved: 0, command: *command, mac: *mac }.as_bytes());
        }
        message
    };
    let mut mask = |from, message: &[u8]| {
        let answer = bench.ask(from, (1, 0), AoeCommand::MAC_MASK_LIST, message);
        answer.map(|(head, rest)| (head.error, rest[2], rest[3], rest[4..].to_vec()))
    };
    let list = |macs: &[Mac]| macs.iter().flat_map(|mac| [&[0, 0], &mac.0[..]].concat()).collect::<Vec<u8>>();
    assert_eq!(mask(STATION, &[0, 0, 0, 0]), Some((0, 0, 0, vec![])));
    assert_eq!(mask(STATION, &edit(&[(1, STATION), (7, OTHER)])), Some((0, 2, 1, vec![])), "all or none");
    let both = edit(&[(1, STATION), (1, OTHER), (1, STATION), (0, OTHER)]);
    assert_eq!(mask(STATION, &both), Some((0, 0, 2, list(&[STATION, OTHER]))));
    assert_eq!(mask(STATION, &edit(&[(2, OTHER)])), Some((0, 0, 1, list(&[STATION]))));
    assert_eq!(mask(OTHER, &[0, 0, 0, 0]), None, "a station that the mask leaves out gets no answer");
    let cut = &edit(&[(1, STATION), (1, OTHER)])[..12];
    assert_eq!(mask(STATION, cut).map(|answer| answer.0), Some(ErrorCode::BAD_ARGUMENT_PARAMETER.0));
    let many: Vec<_> = (0..MAX_MASKS_AND_ONE).map(|n| (1, Mac([4, 0, 0, 0, 0, n]))).collect();
    assert_eq!(mask(STATION, &edit(&many)), Some((0, 3, MAX_MASKS_AND_ONE - 2, vec![])), "the list is full");
    let read = registers(ata::AtaCommand::READ_SECTORS, 0, 1, &[]);
    assert!(bench.ask(OTHER, (1, 0), AoeCommand::ISSUE_ATA_COMMAND, &read).is_none());
    assert!(bench.ask(OTHER, (2, 0), AoeCommand::ISSUE_ATA_COMMAND, &read).is_some(), "another disk");
    assert!(bench.ask(STATION, (1, 0), AoeCommand::ISSUE_ATA_COMMAND, &read).is_some());
}

const MAX_MASKS_AND_ONE: u8 = crate::aoe::unit::MAX_MASKS as u8 + 1;

#[test]
fn reservations_and_locks_of_other_protocols_are_respected() {
    use crate::volume_state::{Epoch, RangeGuard};
    let (exports, units) = units();
    let mut bench = AoeTargetBench::with(&exports, units);
    let volume_state = exports.volume_state(VolumeId(0)).unwrap();
    let write = registers(ata::AtaCommand::WRITE_SECTORS, 0, 1, &[1; 512]);
    let mut ask =
        || bench.ask(STATION, (1, 0), AoeCommand::ISSUE_ATA_COMMAND, &write).map(|(head, _)| head.error);
    let holder = crate::volume_state::Holder { nexus: 1, unit: 0 };
    assert_eq!(volume_state.reserve(holder, Epoch::current()).ok(), Some(Some(true)));
    assert_eq!(ask(), Some(ErrorCode::TARGET_IS_RESERVED.0));
    volume_state.release(Some(holder));
    assert_eq!(ask(), Some(0));
    let guard = RangeGuard::lock(&volume_state, 0, 512).unwrap();
    assert!(guard.is_alone(), "nothing is in flight");
    assert_eq!(ask(), None);
    drop(guard);
    assert_eq!(ask(), Some(0));
}

#[test]
fn a_reserved_disk_refuses_others() {
    let mut bench = AoeTargetBench::new();
    let message = |command: ReserveCommand, macs: &[Mac]| {
        let mut bytes = vec![command.0, macs.len() as u8];
        bytes.extend(macs.iter().flat_map(|mac| mac.0));
        bytes
    };
    let mut reserve = |from, command, macs: &[Mac]| {
        let answer = bench.ask(from, (1, 0), AoeCommand::RESERVE_RELEASE, &message(command, macs));
        answer.map(|(head, rest)| (head.error, rest[2..].to_vec())).unwrap()
    };
    let reserved = ErrorCode::TARGET_IS_RESERVED.0;
    assert_eq!(reserve(STATION, ReserveCommand::SET, &[STATION]), (0, STATION.0.to_vec()));
    assert_eq!(reserve(OTHER, ReserveCommand::READ, &[]), (0, STATION.0.to_vec()));
    assert_eq!(reserve(OTHER, ReserveCommand::SET, &[OTHER]).0, reserved);
    assert_eq!(reserve(OTHER, ReserveCommand(3), &[]).0, ErrorCode::BAD_ARGUMENT_PARAMETER.0);
    let write = registers(ata::AtaCommand::WRITE_SECTORS, 0, 1, &[1; 512]);
    let mut code = |from, command, message: &[u8]| bench.ask(from, (1, 0), command, message).unwrap().0.error;
    assert_eq!(code(OTHER, AoeCommand::ISSUE_ATA_COMMAND, &write), reserved);
    assert_eq!(
        code(OTHER, AoeCommand::ISSUE_ATA_COMMAND, &registers(ata::AtaCommand::IDENTIFY_DEVICE, 0, 1, &[])),
        0
    );
    assert_eq!(
        code(OTHER, AoeCommand::QUERY_CONFIG_INFORMATION, &config(ConfigCommand::SET, b"mine")),
        reserved
    );
    assert_eq!(code(OTHER, AoeCommand::QUERY_CONFIG_INFORMATION, &config(ConfigCommand::READ, b"")), 0);
    assert_eq!(code(OTHER, AoeCommand::MAC_MASK_LIST, &[0, 1, 0, 0]), reserved);
    assert_eq!(code(STATION, AoeCommand::ISSUE_ATA_COMMAND, &write), 0);
    let forced = message(ReserveCommand::FORCE_SET, &[OTHER]);
    assert_eq!(code(OTHER, AoeCommand::RESERVE_RELEASE, &forced), 0);
    assert_eq!(code(STATION, AoeCommand::ISSUE_ATA_COMMAND, &write), reserved);
    assert_eq!(code(OTHER, AoeCommand::RESERVE_RELEASE, &message(ReserveCommand::SET, &[])), 0, "released");
    assert_eq!(code(STATION, AoeCommand::ISSUE_ATA_COMMAND, &write), 0);
}

/// Keeps an image, and reports it as saved when a test says so.
#[derive(Default)]
struct Store(Mutex<(Vec<u8>, Option<bool>)>);

impl SharedState for Store {
    fn propose(&self, _expected: StateGeneration, image: &[u8]) -> StateGeneration {
        self.0.lock().unwrap().0 = image.to_vec();
        StateGeneration(1)
    }

    fn outcome(&self, _proposal: StateGeneration) -> Option<Commit> {
        let is_stored = self.0.lock().unwrap().1?;
        Some(if is_stored { Commit::Committed } else { Commit::Failed })
    }
}

fn stored(says: Option<bool>) -> (Arc<Store>, AoeTargetBench) {
    let store = Arc::new(Store(Mutex::new((Vec::new(), says))));
    let (exports, _) = units();
    let shared: (Arc<dyn SharedState>, _) = (store.clone(), StateGeneration::default());
    let unit = AoeUnit::new(E1_0, VolumeId(0), DiskSettings::default(), Some(shared));
    (store, AoeTargetBench::with(&exports, vec![unit]))
}

#[test]
fn settings_are_stored_and_restored_by_the_next_target() {
    let (store, mut bench) = stored(Some(true));
    assert_eq!(bench.config(STATION, ConfigCommand::SET, b"mine").unwrap().0, 0);
    let kept = DiskSettings::from_image(&store.0.lock().unwrap().0).unwrap();
    let (exports, _) = units();
    let mut next = AoeTargetBench::with(&exports, vec![AoeUnit::new(E1_0, VolumeId(0), kept, None)]);
    assert_eq!(next.config(STATION, ConfigCommand::READ, b""), Some((0, b"mine".to_vec())));
}

#[test]
fn a_setting_is_answered_and_takes_effect_once_it_is_stored() {
    for (is_kept, code, config) in
        [(true, 0, &b"mine"[..]), (false, ErrorCode::DEVICE_UNAVAILABLE.0, &b""[..])]
    {
        let (store, mut bench) = stored(None);
        assert_eq!(bench.target.poll_timeout(), None);
        assert_eq!(bench.config(STATION, ConfigCommand::SET, b"mine"), None);
        assert_eq!(bench.config(OTHER, ConfigCommand::READ, b""), Some((0, vec![])), "it does not count yet");
        let due = bench.target.poll_timeout().unwrap();
        bench.target.on_timeout(due).unwrap();
        assert!(bench.replies(due).is_empty());
        store.0.lock().unwrap().1 = Some(is_kept);
        let due = bench.target.poll_timeout().unwrap();
        bench.target.on_timeout(due).unwrap();
        let replies = bench.replies(due);
        let [(to, frame)] = replies.as_slice() else { panic!("one answer: {replies:?}") };
        assert_eq!((to.mac, Header::read_from_prefix(frame).unwrap().0.error), (STATION, code));
        assert_eq!(bench.target.poll_timeout(), None, "no station waits for an image");
        assert_eq!(bench.config(OTHER, ConfigCommand::READ, b"").unwrap().1, config);
    }
}

#[test]
fn all_disks_are_announced_at_a_port_that_comes_up() {
    let (exports, units) = units();
    let mut target = AoeTargetSession::new(exports, AoeDisks::everywhere(units));
    let now = Instant::now();
    let mut count = |port| {
        target.on_port(PortId(1), port, now);
        let outbox = target.frames(now);
        let all: Vec<_> = std::iter::from_fn(|| outbox.pop_front()).collect();
        assert!(all.iter().all(|frame| frame.to == Station { port: PortId(1), mac: Mac::BROADCAST }));
        all.len()
    };
    assert_eq!(count(FramePortInfo { is_up: false, ..PORT }), 0);
    assert_eq!([count(PORT), count(PORT)], [3, 0]);
    assert_eq!(count(FramePortInfo { mtu: 1500, ..PORT }), 3, "frames have another size now");
}

#[test]
fn a_disk_is_added_moved_and_withdrawn_while_the_target_runs() {
    let (exports, units) = units();
    let [last, first, second] = <[AoeUnit; 3]>::try_from(units).ok().unwrap();
    let list = AoeDisks::everywhere(vec![second, last.clone()]);
    let mut bench = AoeTargetBench::of(&exports, list.clone());
    let write = registers(ata::AtaCommand::WRITE_SECTORS_EXT, 7, 1, &[7; 512]);
    let answers = |bench: &mut AoeTargetBench, port: u16, tag: u32, disk: (u16, u8)| {
        let (frame, from) = (request(disk, AoeCommand::ISSUE_ATA_COMMAND, tag, &write), PortId(port));
        bench.frame_from(Station { port: from, mac: STATION }, &frame, bench.now).len()
    };
    let change = |bench: &mut AoeTargetBench, disks: Vec<AoeDisk>| {
        list.replace(disks);
        bench.target.on_turn(bench.now);
        bench.replies(bench.now).len()
    };
    assert_eq!([answers(&mut bench, 0, 1, (2, 0)), answers(&mut bench, 0, 2, (1, 0))], [1, 0]);
    // A disk before the others, which all ports are told.
    let at = |unit: &AoeUnit, ports: Option<Vec<PortId>>| AoeDisk { unit: unit.clone(), ports };
    assert_eq!(change(&mut bench, vec![at(&last, None), at(&first, None)]), 4);
    assert_eq!(answers(&mut bench, 0, 3, (1, 0)), 1);
    // A write that was carried out before is known: no I/O is needed.
    bench.throttles = true;
    assert_eq!(answers(&mut bench, 0, 1, (2, 0)), 1);
    bench.throttles = false;
    // At another port only, then nowhere.
    assert_eq!(change(&mut bench, vec![at(&last, Some(vec![PortId(1)])), at(&first, None)]), 0);
    assert_eq!([0, 1].map(|port| answers(&mut bench, port, 4, (2, 0))), [0, 1]);
    while bench.target.poll_event().is_some() {}
    list.remove(last.volume);
    bench.target.on_turn(bench.now);
    let event = bench.target.poll_event();
    let Some(AuditEvent::ByStation { login, event }) = event else { panic!("{event:?}") };
    assert!(login.target == "e2.0" && matches!(*event, AuditEvent::Logout { .. }), "{event:?}");
    assert_eq!(answers(&mut bench, 1, 5, (2, 0)), 0);
    assert_eq!((list.has(E1_0), list.has(E2_0), list.of_volume(VolumeId(0))), (true, false, Some(E1_0)));
}

#[test]
fn an_exported_disk_keeps_its_volume_here_and_a_later_one_belongs_to_the_epoch_of_then() {
    use crate::volume_state::{TestCluster, TransitionRefused};
    let cluster = TestCluster::default();
    let process = cluster.process();
    let (name, volume) = ("a".to_owned(), process.volume().clone());
    let export = Export { name, description: String::new(), read_only: false, volume };
    let exports = Exports::with_states(vec![(export, process.clone())]);
    let disk = AoeUnit::new(E1_0, VolumeId(0), DiskSettings::default(), None);
    let list = AoeDisks::everywhere(vec![disk.clone()]);
    let mut bench = AoeTargetBench::of(&exports, list.clone());
    let write = registers(ata::AtaCommand::WRITE_SECTORS, 0, 1, &[1; 512]);
    let ask = |bench: &mut AoeTargetBench| {
        bench.ask(STATION, (1, 0), AoeCommand::ISSUE_ATA_COMMAND, &write).map(|(head, _)| head.error)
    };
    cluster.promote(&process);
    assert_eq!(ask(&mut bench), Some(0));
    assert_eq!(process.step_down().err(), Some(TransitionRefused::NoSessions));
    assert!(process.lose());
    assert_eq!(process.promote().err(), Some(TransitionRefused::NoSessions));
    assert_eq!(ask(&mut bench), Some(ErrorCode::DEVICE_UNAVAILABLE.0));
    list.replace(Vec::new());
    bench.target.on_turn(bench.now);
    cluster.promote(&process);
    list.replace(vec![AoeDisk { unit: disk, ports: None }]);
    bench.target.on_turn(bench.now);
    assert_eq!(bench.replies(bench.now).len(), 2, "it is announced at both ports");
    assert_eq!(ask(&mut bench), Some(0));
}

#[test]
fn frames_with_errors_never_panic() {
    let mut bench = AoeTargetBench::new();
    let messages = [
        (AoeCommand::ISSUE_ATA_COMMAND, registers(ata::AtaCommand::WRITE_SECTORS_EXT, 0, 2, &[1; 1024])),
        (AoeCommand::ISSUE_ATA_COMMAND, registers(ata::AtaCommand::DATA_SET_MANAGEMENT, 0, 1, &[1; 512])),
        (AoeCommand::QUERY_CONFIG_INFORMATION, config(ConfigCommand::SET, b"mine")),
        (AoeCommand::MAC_MASK_LIST, vec![0, 1, 0, 1, 0, 1, 2, 3, 4, 5, 6, 7]),
        (AoeCommand::RESERVE_RELEASE, vec![1, 1, 2, 3, 4, 5, 6, 7]),
    ];
    for (command, message) in messages {
        let good = request((1, 0), command, 1, &message);
        for at in 0..good.len().min(64) {
            for bit in 0..8 {
                let mut bytes = good.clone();
                bytes[at] ^= 1 << bit;
                for (_, reply) in bench.frame(OTHER, &bytes, bench.now) {
                    assert!(reply.len() <= 9000);
                }
            }
        }
    }
}
