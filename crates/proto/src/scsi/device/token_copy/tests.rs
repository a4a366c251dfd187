//! Token-based copies from an initiator's point of view.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use crate::exports::VolumeId;
use crate::scsi::device::testing::{TestResponse, answer, begin_io, command, port, shaped};
use crate::scsi::{
    BackgroundWork, DeviceServer, ItNexus, LogicalUnit, Lun, ScsiStatus, ScsiTarget, Task, TaskManagement,
    TaskStep, UnitIdentity,
};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Channel, Completion, IoError, MemVolume, Op, Seg, Tag, Volume, VolumeInfo, Waker};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A session with two units whose volumes have different content.
struct CopyClient {
    server: DeviceServer,
    channels: Vec<Box<dyn Channel>>,
}

struct CopyPair {
    target: Arc<ScsiTarget>,
    volumes: Vec<Arc<dyn Volume>>,
}

impl CopyPair {
    fn new() -> CopyPair {
        CopyPair::of((0..2).map(|_| Arc::new(MemVolume::new(8 << 20)) as Arc<dyn Volume>).collect())
    }

    fn of(volumes: Vec<Arc<dyn Volume>>) -> CopyPair {
        let target = ScsiTarget::new("iqn.2026-11.t:t", vec![port(1)]);
        let target = volumes.iter().zip(0..).fold(target, |target, (volume, number)| {
            let unit = LogicalUnit::new(UnitIdentity::of(&number.to_string()), volume.clone());
            target.with_unit(number, VolumeId(number.into()), unit)
        });
        CopyPair { target: Arc::new(target), volumes }
    }

    fn client(&self, name: &str) -> CopyClient {
        let nexus = ItNexus::iscsi(&format!("iqn.2026-11.i:{name}"), [0; 6], port(1));
        let core = TestCore::new().as_core();
        let open = |volume: &Arc<dyn Volume>| volume.open(&core, 64, Waker::idle()).unwrap();
        let channels = self.volumes.iter().map(open).collect();
        let server = DeviceServer::new(self.target.clone(), nexus);
        let mut client = CopyClient { server, channels };
        (0..2).for_each(|lun| assert_eq!(client.run(lun, &[0; 6], &[]).check(), (6, 0x2900)));
        client
    }
}

impl CopyClient {
    fn run(&mut self, lun: u16, cdb: &[u8], data_out: &[u8]) -> TestResponse {
        let (mut task, step) = self.server.begin(&command(Lun::new(lun), cdb, data_out.len()));
        self.finish(&mut task, step, data_out)
    }

    fn finish(&mut self, task: &mut Task, mut step: TaskStep, data_out: &[u8]) -> TestResponse {
        loop {
            step = match step {
                TaskStep::Done(response) => return answer(response),
                next => self.turn(task, next, data_out),
            }
        }
    }

    fn turn(&mut self, task: &mut Task, step: TaskStep, data_out: &[u8]) -> TaskStep {
        match step {
            TaskStep::DataOut { len } => {
                self.server.on_data_out(task, Seg::from_slice(&data_out[..len]).into())
            }
            TaskStep::Io { volume, ref io }
                if task.guard.is_none() && self.server.admit(task, volume, io, false).is_err() =>
            {
                begin_io(&mut self.server, task, step)
            }
            TaskStep::Io { volume, io } => {
                let mut done = Vec::new();
                let channel = &mut self.channels[volume.0 as usize];
                channel.submit(io);
                channel.kick();
                channel.poll(&mut done);
                self.server.on_io(task, done.pop().unwrap())
            }
            TaskStep::Wait | TaskStep::Pause(_) => self.server.resume(task),
            TaskStep::Done(_) => unreachable!(),
        }
    }

    fn write(&mut self, lun: u16, lba: u8, data: &[u8]) {
        let blocks = (data.len() / 512) as u16;
        let [high, low] = blocks.to_be_bytes();
        self.run(lun, &[0x2a, 0, 0, 0, 0, lba, 0, high, low, 0], data).good();
    }

    fn read(&mut self, lun: u16, lba: u16, blocks: u8) -> Vec<u8> {
        let [high, low] = lba.to_be_bytes();
        self.run(lun, &[0x28, 0, 0, 0, high, low, 0, 0, blocks, 0], &[]).good()
    }

    fn populate(&mut self, lun: u16, id: u32, ranges: &[(u64, u32)]) -> TestResponse {
        let list = populate_list(0, ranges);
        self.run(lun, &cdb(0x10, id, list.len()), &list)
    }

    /// A token for the first `blocks` blocks of the first unit.
    fn token(&mut self, blocks: u32) -> Vec<u8> {
        self.populate(0, 7, &[(0, blocks)]).good();
        self.information(0, 7).good()[38..].to_vec()
    }

    fn information(&mut self, lun: u16, id: u32) -> TestResponse {
        let mut cdb = [0x84, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0];
        cdb[2..6].copy_from_slice(&id.to_be_bytes());
        self.run(lun, &cdb, &[])
    }

    fn write_using(
        &mut self,
        lun: u16,
        flags: u8,
        offset: u64,
        token: &[u8],
        ranges: &[(u64, u32)],
    ) -> TestResponse {
        let list = write_list(flags, offset, token, ranges);
        self.run(lun, &cdb(0x11, 9, list.len()), &list)
    }

    /// Status and number of blocks.
    fn outcome(&mut self, lun: u16) -> (u8, u8) {
        let reported = self.information(lun, 9).good();
        assert_eq!((reported[4], reported[15]), (0x11, 0xf1));
        (reported[5], reported[23])
    }
}

fn cdb(action: u8, id: u32, len: usize) -> [u8; 16] {
    let mut cdb = [0x83, action, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    cdb[6..10].copy_from_slice(&id.to_be_bytes());
    cdb[10..14].copy_from_slice(&(len as u32).to_be_bytes());
    cdb
}

fn descriptors(ranges: &[(u64, u32)]) -> Vec<u8> {
    let each = ranges
        .iter()
        .flat_map(|(lba, blocks)| [&lba.to_be_bytes()[..], &blocks.to_be_bytes(), &[0; 4]].concat());
    let each: Vec<u8> = each.collect();
    [&(each.len() as u16).to_be_bytes()[..], &each].concat()
}

fn populate_list(timeout: u32, ranges: &[(u64, u32)]) -> Vec<u8> {
    let rest = [&[0, 0][..], &timeout.to_be_bytes(), &[0; 6], &descriptors(ranges)].concat();
    [&(rest.len() as u16).to_be_bytes()[..], &rest].concat()
}

fn write_list(flags: u8, offset: u64, token: &[u8], ranges: &[(u64, u32)]) -> Vec<u8> {
    let head = [&[flags, 0, 0, 0, 0, 0][..], &offset.to_be_bytes(), token, &[0; 6]].concat();
    let rest = [head, descriptors(ranges)].concat();
    [&(rest.len() as u16).to_be_bytes()[..], &rest].concat()
}

fn zero_token() -> Vec<u8> {
    let mut token = vec![0xff, 0xff, 0, 1, 0, 0, 1, 0xf8];
    token.resize(512, 0);
    token
}

/// Blocks with distinct content.
fn blocks(count: usize) -> Vec<u8> {
    (0..count * 512).map(|at| (at / 512 + 1) as u8).collect()
}

#[test]
fn the_data_of_a_token_is_written_to_other_ranges_of_another_unit() {
    let mut client = CopyPair::new().client("a");
    client.write(0, 0, &blocks(16));
    // Blocks 8 to 11, then 2 and 3.
    client.populate(0, 7, &[(8, 4), (2, 2)]).good();
    let reported = client.information(0, 7).good();
    assert_eq!(reported.len(), 36 + 2 + 512);
    assert_eq!((reported[3], reported[2], reported[4], reported[5], reported[12]), (34, 2, 0x10, 1, 0));
    assert_eq!((reported[15], reported[23], &reported[32..36]), (0xf1, 6, &[0, 0, 2, 2][..]));
    let token = &reported[38..];
    assert_eq!((&token[..8], token[16]), (&[0, 0x80, 0, 1, 0, 0, 1, 0xf8][..], 0xe4));
    assert_eq!((token[62], token[63]), (12, 0), "3,072 bytes");
    assert_eq!(client.information(0, 7).check(), (5, 0x2400), "the result is reported once");
    client.write_using(1, 0, 0, token, &[(100, 1), (50, 3), (70, 2)]).good();
    assert_eq!(client.outcome(1), (1, 6));
    let first = |data: Vec<u8>| data.chunks(512).map(|block| block[511]).collect::<Vec<_>>();
    assert_eq!(first(client.read(1, 100, 1)), [9]);
    assert_eq!(first(client.read(1, 50, 3)), [10, 11, 12]);
    assert_eq!(first(client.read(1, 70, 2)), [3, 4]);
    // From the middle on, more than there is: the existing part is written.
    client.write_using(1, 0, 4, token, &[(0, 9)]).good();
    assert_eq!(client.outcome(1), (3, 2));
    assert_eq!(first(client.read(1, 0, 3)), [3, 4, 0]);
    assert_eq!(client.write_using(1, 0, 6, token, &[(0, 1)]).check(), (5, 0x2600));
}

#[test]
fn a_change_of_represented_blocks_cancels_the_token_and_others_do_not() {
    let pair = CopyPair::new();
    let (mut client, mut other) = (pair.client("a"), pair.client("b"));
    client.write(0, 0, &blocks(4));
    let token = client.token(4);
    other.write(0, 4, &blocks(1));
    assert_eq!(other.read(0, 0, 4), blocks(4));
    client.write_using(1, 0, 0, &token, &[(0, 4)]).good();
    let compare = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0];
    other.run(0, &compare, &[[4; 512], [5; 512]].concat()).good();
    assert_eq!(client.write_using(1, 0, 0, &token, &[(0, 4)]).check(), (5, 0x2308));
    assert_eq!(client.read(1, 0, 4), blocks(4));
}

#[test]
fn a_token_outlives_reservations_but_a_copy_ends_when_its_nexus_is_preempted() {
    let pair = CopyPair::new();
    let (mut client, mut other) = (pair.client("a"), pair.client("b"));
    client.write(0, 0, &blocks(4));
    let token = client.token(4);
    let reserve = |other: &mut CopyClient, lun, action, kind, keys: [u64; 2]| {
        let list = [keys[0].to_be_bytes(), keys[1].to_be_bytes(), [0; 8]].concat();
        other.run(lun, &[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list).good();
    };
    reserve(&mut other, 0, 6, 0, [0, 1]);
    reserve(&mut other, 0, 1, 3, [1, 0]);
    client.write_using(1, 0, 0, &token, &[(0, 4)]).good();
    assert_eq!(client.read(1, 0, 4), blocks(4));
    // The registration that permits access to the destination is removed during a copy.
    reserve(&mut client, 1, 6, 0, [0, 1]);
    reserve(&mut other, 1, 6, 0, [0, 2]);
    reserve(&mut other, 1, 1, 5, [2, 0]);
    let (mut task, step) = client.begin_copy(&token, &[(8, 4)]);
    reserve(&mut other, 1, 5, 5, [2, 1]);
    assert_eq!(client.finish(&mut task, step, &[]).status, ScsiStatus::TASK_ABORTED);
    assert_eq!(other.read(1, 8, 1), [0; 512]);
}

#[test]
fn a_change_during_a_token_copy_ends_the_copy_and_discards_its_piece() {
    let pair = CopyPair::new();
    let (mut client, mut other) = (pair.client("a"), pair.client("b"));
    let token = client.token(4096);
    let list = write_list(0, 0, &token, &[(0, 4096)]);
    let (mut task, step) = client.server.begin(&command(Lun::new(1), &cdb(0x11, 9, list.len()), list.len()));
    let step = client.turn(&mut task, step, &list);
    let step = client.turn(&mut task, step, &[]);
    let step = client.turn(&mut task, step, &[]);
    let step = begin_io(&mut client.server, &mut task, step);
    assert!(
        matches!(&step, TaskStep::Io { volume: VolumeId(0), io } if io.op == Op::Read),
        "the second piece"
    );
    assert_eq!(client.outcome(1), (0x11, 0), "the low 8 bits of 2,048 blocks are 0");
    other.write(0, 255, &[1; 512]);
    assert_eq!(client.finish(&mut task, step, &[]).check(), (0xa, 0x2308));
    let reported = client.information(1, 9).good();
    assert_eq!((reported[5], reported[12], reported[22], reported[23]), (2, 2, 8, 0));
    assert_eq!((reported[13], reported[14], reported[32 + 2], reported[32 + 12]), (20, 18, 0xa, 0x23));
}

#[test]
fn a_token_waits_for_writes_that_began_before_it() {
    let pair = CopyPair::new();
    let (mut client, mut other) = (pair.client("a"), pair.client("b"));
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let (mut task, step) = other.server.begin(&command(Lun::new(0), &write, 512));
    let in_flight = other.turn(&mut task, step, &[7; 512]);
    let in_flight = begin_io(&mut other.server, &mut task, in_flight);
    let list = populate_list(0, &[(0, 1)]);
    let (mut populate, step) =
        client.server.begin(&command(Lun::new(0), &cdb(0x10, 7, list.len()), list.len()));
    assert!(matches!(client.turn(&mut populate, step, &list), TaskStep::Wait));
    other.finish(&mut task, in_flight, &[]).good();
    client.finish(&mut populate, TaskStep::Wait, &[]).good();
    let token = client.information(0, 7).good()[38..].to_vec();
    client.write_using(1, 0, 0, &token, &[(0, 1)]).good();
    assert_eq!(client.read(1, 0, 1), [7; 512]);
}

#[test]
fn an_immediate_copy_is_over_before_its_status() {
    let pair = CopyPair::new();
    let mut client = pair.client("a");
    client.write(0, 0, &blocks(16));
    let token = client.token(16);
    client.write_using(1, 1 | 2, 0, &token, &[(0, 16)]).good();
    assert_eq!(client.outcome(1), (1, 16));
    assert_eq!(client.read(1, 0, 16), blocks(16));
    assert_eq!(
        client.write_using(1, 0, 0, &token, &[(0, 1)]).check(),
        (5, 0x2309),
        "the token was deleted after its use"
    );
}

impl CopyClient {
    /// Starts a copy to the second unit with list identifier 9, up to its first I/O.
    fn begin_copy(&mut self, token: &[u8], ranges: &[(u64, u32)]) -> (Task, TaskStep) {
        let list = write_list(0, 0, token, ranges);
        let (mut task, step) =
            self.server.begin(&command(Lun::new(1), &cdb(0x11, 9, list.len()), list.len()));
        let step = self.turn(&mut task, step, &list);
        assert!(matches!(step, TaskStep::Io { .. }));
        (task, step)
    }
}

#[test]
fn a_copy_keeps_its_identifier_until_it_ends_or_is_aborted() {
    let pair = CopyPair::new();
    let (mut client, mut other) = (pair.client("a"), pair.client("b"));
    let (task, _) = client.begin_copy(&zero_token(), &[(0, 16)]);
    assert_eq!(client.outcome(1), (0x11, 0));
    let again = client.write_using(1, 0, 0, &zero_token(), &[(0, 1)]);
    assert_eq!(again.check(), (5, 0x0016), "the list identifier is in use");
    assert_eq!(other.information(1, 9).check(), (5, 0x2400), "a list identifier of another nexus");
    let abort = [0x83, 0x1c, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(client.run(1, &abort, &[]).check(), (5, 0x2400), "there is no COPY OPERATION ABORT");
    drop(task);
    assert_eq!(client.outcome(1), (0x60, 0));
    client.write_using(1, 0, 0, &zero_token(), &[(0, 1)]).good();
    assert_eq!(client.outcome(1), (1, 1));
    let (mut task, step) = client.begin_copy(&zero_token(), &[(0, 16)]);
    other.server.manage(TaskManagement::LogicalUnitReset, Lun::new(1));
    assert_eq!(client.finish(&mut task, step, &[]).status, ScsiStatus::TASK_ABORTED);
    assert_eq!(client.run(1, &[0; 6], &[]).check(), (6, 0x2903));
    assert_eq!(client.information(1, 9).check(), (5, 0x2400));
}

#[test]
fn the_zero_token_is_accepted_without_populate_token() {
    let mut client = CopyPair::new().client("a");
    client.write(1, 0, &blocks(8));
    client.write_using(1, 0, 1 << 40, &zero_token(), &[(2, 4)]).good();
    assert_eq!(client.outcome(1), (1, 4));
    let data = client.read(1, 0, 8);
    assert_eq!((&data[..1024], &data[1024..3072], data[3072]), (&blocks(2)[..], &[0; 2048][..], 7));
}

#[test]
fn blocks_of_another_length_are_filled_from_several_places_and_the_last_one_with_zeroes() {
    let info = VolumeInfo { logical_block: 4096, ..VolumeInfo::new(8 << 20) };
    let pair = CopyPair::of(vec![Arc::new(MemVolume::new(8 << 20)), shaped(info)]);
    let mut client = pair.client("a");
    client.write(0, 0, &blocks(16));
    client.populate(0, 7, &[(8, 3), (0, 6)]).good();
    let token = client.information(0, 7).good()[38..].to_vec();
    client.write_using(1, 0, 0, &token, &[(3, 1), (1, 1)]).good();
    assert_eq!(client.outcome(1), (1, 2));
    let source = [&blocks(16)[8 * 512..11 * 512], &blocks(6)].concat();
    assert_eq!(client.read(1, 3, 1), source[..4096]);
    let rest = client.read(1, 1, 1);
    assert_eq!((&rest[..512], &rest[512..]), (&source[4096..], &[0; 3584][..]));
}

#[test]
fn an_unused_token_expires() {
    let pair = CopyPair::new();
    let now = Instant::now();
    let (mut client, mut clock) = (pair.client("a"), BackgroundWork::new(pair.target.clone(), now));
    let list = populate_list(3, &[(0, 1)]);
    client.run(0, &cdb(0x10, 7, list.len()), &list).good();
    let token = client.information(0, 7).good()[38..].to_vec();
    let second = |n: u32| now + Duration::from_secs(n.into());
    assert!(clock.on_turn(now) && clock.poll_timeout() == Some(second(1)));
    assert!(!BackgroundWork::new(pair.target.clone(), now).on_turn(now), "one background task per target");
    for n in 1..=2 {
        assert!(clock.on_turn(second(n)));
    }
    client.write_using(1, 0, 0, &token, &[(0, 1)]).good();
    for n in 3..=4 {
        assert!(clock.on_turn(second(n)));
    }
    assert!(!clock.on_turn(second(5)), "no token is valid");
    assert_eq!(client.write_using(1, 0, 0, &token, &[(0, 1)]).check(), (5, 0x2307));
    client.token(1);
    assert!(clock.on_turn(second(5)), "a token is valid again");
}

#[test]
fn tokens_cannot_be_guessed_and_are_bounded() {
    let mut client = CopyPair::new().client("a");
    let (one, other) = (client.token(1), client.token(1));
    assert_ne!((&one[8..16], &one[256..288]), (&other[8..16], &other[256..288]));
    for at in [9, 60, 100, 256, 287, 511] {
        let mut wrong = one.clone();
        wrong[at] ^= 1;
        assert_eq!(client.write_using(1, 0, 0, &wrong, &[(0, 1)]).check(), (5, 0x2304), "byte {at}");
    }
    let mut short = one.clone();
    short[7] = 0xf7;
    assert_eq!(client.write_using(1, 0, 0, &short, &[(0, 1)]).check(), (5, 0x230a));
    let mut foreign = one.clone();
    foreign[..4].copy_from_slice(&[0, 1, 0, 0]);
    assert_eq!(client.write_using(1, 0, 0, &foreign, &[(0, 1)]).check(), (5, 0x2301));
    for _ in 2..super::super::tokens::MAX_TOKENS {
        client.token(1);
    }
    assert_eq!(client.populate(0, 7, &[(0, 1)]).check(), (0xa, 0x550d));
    client.write(0, 0, &[1; 512]);
    client.populate(0, 7, &[(0, 1)]).good();
}

#[test]
fn invalid_parameter_lists_are_rejected() {
    let mut client = CopyPair::new().client("a");
    client.run(0, &cdb(0x10, 7, 0), &[]).good();
    let good = populate_list(0, &[(0, 1)]);
    assert_eq!(client.run(0, &cdb(0x10, 7, 15), &good[..15]).check(), (5, 0x1a00));
    let mut edited = |at: usize, byte: u8| {
        let mut list = good.clone();
        list[at] = byte;
        client.run(0, &cdb(0x10, 7, list.len()), &list).check()
    };
    assert_eq!(edited(1, 29), (5, 0x2600));
    assert_eq!(edited(2, 2), (5, 0x2600), "an unknown ROD type");
    assert_eq!(edited(4, 1), (5, 0x2600), "a long timeout");
    assert_eq!(edited(15, 15), (5, 0x2600));
    assert_eq!(edited(16, 1), (5, 0x2100));
    assert_eq!(client.populate(0, 7, &[(0, 2), (1, 1)]).check(), (5, 0x2600), "overlapping ranges");
    assert_eq!(client.populate(0, 7, &vec![(0, 0); 257]).check(), (5, 0x2608));
    client.populate(0, 7, &[(5, 0), (1, 1)]).good();
    let token = client.information(0, 7).good()[38..].to_vec();
    let list = write_list(0, 0, &token, &[(0, 1)]);
    for (at, byte, expected) in
        [(1, 0, 0x2600), (8, 0xff, 0x2600), (535, 15, 0x2600), (536, 1, 0x2100), (1, 0x28, 0x2600)]
    {
        let mut list = list.clone();
        list[at] = byte;
        assert_eq!(client.run(1, &cdb(0x11, 9, list.len()), &list).check(), (5, expected), "byte {at}");
    }
    assert_eq!(client.run(1, &cdb(0x11, 9, 535), &list[..535]).check(), (5, 0x1a00));
}

#[test]
fn a_copy_with_failed_io_reports_the_failure() {
    let mut client = CopyPair::new().client("a");
    let token = client.token(1);
    let list = write_list(0, 0, &token, &[(0, 1)]);
    let (mut task, step) = client.server.begin(&command(Lun::new(1), &cdb(0x11, 9, list.len()), list.len()));
    client.turn(&mut task, step, &list);
    let failed = Completion { tag: Tag(0), result: Err(IoError::Medium) };
    let TaskStep::Done(response) = client.server.on_io(&mut task, failed) else { panic!("it has failed") };
    assert_eq!(answer(response).check(), (3, 0x1100));
    assert_eq!(client.outcome(1), (2, 0));
}
