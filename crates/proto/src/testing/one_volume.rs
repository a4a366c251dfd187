//! Tests of one volume behind an NBD session and SCSI sessions, which affect each other.

use crate::driver::audit_event::AuditEvent;
use crate::driver::session::{Demand, StreamSession};
use crate::driver::target::TargetLifecycle as _;
use crate::exports::{Export, Exports, VolumeId};
use crate::nbd::server::NbdTargetSession;
use crate::scsi::testing::{DeviceBench, TestNexus, answer, command, port};
use crate::scsi::{
    DeviceServer, ItNexus, LogicalUnit, Lun, ScsiStatus, ScsiTarget, TaskManagement, TaskStep, UnitIdentity,
};
use crate::testing::Pump;
use crate::volume_state::{Admission, Epoch, Fence, NotAdmitted, RequiredAccess, VolumeState};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{IoError, MemVolume, Op, Pool, Resize, Volume, Waker};
use std::sync::Arc;
use std::time::Instant;

struct Both {
    exports: Exports,
    bench: DeviceBench,
}

impl Both {
    fn new() -> Both {
        let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(8 << 20));
        let name = "a".to_owned();
        let export = Export { name, description: String::new(), read_only: false, volume: volume.clone() };
        let exports = Exports::new(vec![export]);
        let unit = LogicalUnit::over(UnitIdentity::of("a"), &exports.volume_state(VolumeId(0)).unwrap());
        Both { exports, bench: DeviceBench::around(unit, volume) }
    }

    /// An NBD session in transmission, with simple replies.
    fn nbd(&self) -> Pump<NbdTargetSession> {
        let session = NbdTargetSession::new(self.exports.clone(), Pool::new(usize::MAX), Instant::now());
        let mut pump = Pump::new(session, &self.exports);
        pump.exchange(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0");
        pump
    }
}

/// Sends one request and returns the error of its reply.
fn ask(nbd: &mut Pump<NbdTargetSession>, command: u8, data: &[u8]) -> u32 {
    let reply = nbd.exchange(&request(command, data));
    u32::from_be_bytes(reply[4..8].try_into().unwrap())
}

/// A request for the first block.
fn request(command: u8, data: &[u8]) -> Vec<u8> {
    let (offset, length) = if command == FLUSH { (0, 0) } else { (0, 512_u32) };
    let head = [&b"\x25\x60\x95\x13\0\0\0"[..], &[command], &[0; 8], &[offset; 8], &length.to_be_bytes()];
    [&head.concat()[..], data].concat()
}

fn reserve_out(client: &mut TestNexus, action: u8, kind: u8, key: u64, other_key: u64) -> ScsiStatus {
    let mut list = [key.to_be_bytes(), other_key.to_be_bytes()].concat();
    list.extend([0; 8]);
    client.run_with(&[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list).status
}

/// Begins a COMPARE AND WRITE; returns whether its first I/O is admitted.
fn begin_compare(client: &mut TestNexus) -> (crate::scsi::Task, TaskStep, bool) {
    let (mut task, step) = client.server.begin(&command(Lun::new(0), &COMPARE, 1024));
    let step = client.turn(&mut task, step, &[0; 1024], &mut 0);
    let is_admitted = client.admit(&mut task, &step).is_ok();
    (task, step, is_admitted)
}

const READ: u8 = 0;
const WRITE: u8 = 1;
const FLUSH: u8 = 3;
const TRIM: u8 = 4;
const CACHE: u8 = 5;
const ZEROES: u8 = 6;
const EPERM: u32 = 1;
const ESHUTDOWN: u32 = 108;
const WRITE_10: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const COMPARE: [u8; 16] = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];

#[test]
fn a_reservation_excludes_nbd_according_to_its_type() {
    for (kind, reads) in [(1, true), (3, false), (5, true), (6, false), (7, true), (8, false)] {
        let both = Both::new();
        let (mut scsi, mut nbd) = (both.bench.client("a"), both.nbd());
        assert_eq!(ask(&mut nbd, WRITE, &[1; 512]), 0);
        assert_eq!(reserve_out(&mut scsi, 0, 0, 0, 1), ScsiStatus::GOOD);
        assert_eq!(ask(&mut nbd, WRITE, &[2; 512]), 0, "a registration alone excludes no client");
        assert_eq!(reserve_out(&mut scsi, 1, kind, 1, 0), ScsiStatus::GOOD);
        for (command, data) in [(WRITE, &[3; 512][..]), (TRIM, &[]), (ZEROES, &[])] {
            assert_eq!(ask(&mut nbd, command, data), EPERM, "type {kind}, command {command}");
        }
        for command in [READ, CACHE] {
            assert_eq!(ask(&mut nbd, command, &[]), if reads { 0 } else { EPERM }, "type {kind}");
        }
        assert_eq!(ask(&mut nbd, FLUSH, &[]), 0);
        assert_eq!(ask(&mut both.nbd(), WRITE, &[3; 512]), EPERM, "a new connection is excluded too");
        assert_eq!(scsi.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good(), [2; 512]);
        assert_eq!(reserve_out(&mut scsi, 2, kind, 1, 0), ScsiStatus::GOOD);
        assert_eq!(ask(&mut nbd, WRITE, &[4; 512]), 0);
    }
}

#[test]
fn a_reserve_of_spc_2_excludes_nbd_until_it_ends() {
    let both = Both::new();
    let (mut scsi, mut nbd) = (both.bench.client("a"), both.nbd());
    scsi.run(&[0x16, 0, 0, 0, 0, 0]).good();
    assert_eq!((ask(&mut nbd, READ, &[]), ask(&mut nbd, WRITE, &[1; 512])), (EPERM, EPERM));
    scsi.server.manage(TaskManagement::LogicalUnitReset, Lun::new(0));
    assert_eq!(ask(&mut nbd, WRITE, &[1; 512]), 0);
    assert_eq!(scsi.run(&[0; 6]).check(), (6, 0x2903));
    scsi.run(&[0x16, 0, 0, 0, 0, 0]).good();
    assert_eq!(ask(&mut nbd, READ, &[]), EPERM);
    drop(scsi);
    assert_eq!(ask(&mut nbd, READ, &[]), 0);
}

#[test]
fn a_removed_volume_answers_nbd_that_it_shuts_down_whatever_excluded_the_client_before() {
    for is_reserved in [false, true] {
        let both = Both::new();
        let (mut scsi, mut nbd) = (both.bench.client("a"), both.nbd());
        assert_eq!(ask(&mut nbd, WRITE, &[1; 512]), 0);
        if is_reserved {
            scsi.run(&[0x16, 0, 0, 0, 0, 0]).good();
            assert_eq!(ask(&mut nbd, WRITE, &[1; 512]), EPERM);
        }
        assert!(both.exports.remove("a").is_some());
        for (kind, data) in
            [(WRITE, &[1; 512][..]), (READ, &[]), (ZEROES, &[]), (TRIM, &[]), (CACHE, &[]), (FLUSH, &[])]
        {
            assert_eq!(ask(&mut nbd, kind, data), ESHUTDOWN, "{kind}");
        }
        assert_eq!(scsi.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).check(), (5, 0x2500));
    }
}

#[test]
fn a_fenced_volume_refuses_sessions_until_they_connect_again() {
    const READ_10: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let both = Both::new();
    let volume_state = both.exports.volume_state(VolumeId(0)).unwrap();
    let (mut used, mut idle) = ((both.bench.client("a"), both.nbd()), (both.bench.client("b"), both.nbd()));
    used.0.run(&READ_10).good();
    used.1.holds_io = true;
    used.1.client_sends(&request(WRITE, &[7; 512])).unwrap();
    let fence = Fence::begin(&volume_state);
    let refused = |(scsi, nbd): &mut (TestNexus, Pump<NbdTargetSession>)| {
        assert_eq!(scsi.run_with(&WRITE_10, &[8; 512]).check(), (2, 0x040c));
        assert_eq!((ask(nbd, WRITE, &[8; 512]), ask(nbd, READ, &[])), (ESHUTDOWN, ESHUTDOWN));
    };
    refused(&mut idle);
    assert!(!fence.begin_epoch(), "a write is in flight");
    used.1.finish_one();
    used.1.holds_io = false;
    assert_eq!(used.1.sent()[4..8], [0; 4], "what was admitted before is answered");
    assert!(fence.begin_epoch());
    refused(&mut used);
    refused(&mut idle);
    assert_eq!(idle.0.run_with(&COMPARE, &[8; 1024]).check(), (2, 0x040c));
    let (mut scsi, mut nbd) = (both.bench.client("c"), both.nbd());
    assert_eq!(scsi.run(&READ_10).good(), [7; 512]);
    assert_eq!(ask(&mut nbd, WRITE, &[9; 512]), 0);
}

#[test]
fn the_reason_that_a_reservation_excludes_nbd_is_logged_once() {
    let both = Both::new();
    let (mut scsi, mut nbd) = (both.bench.client("a"), both.nbd());
    assert!(matches!(nbd.session.poll_event(), Some(AuditEvent::Login(_))));
    assert_eq!((ask(&mut nbd, READ, &[]), nbd.session.poll_event()), (0, None));
    for _ in 0..2 {
        scsi.run(&[0x16, 0, 0, 0, 0, 0]).good();
        assert_eq!((ask(&mut nbd, READ, &[]), ask(&mut nbd, WRITE, &[1; 512])), (EPERM, EPERM));
        let reason = "an initiator has reserved the volume";
        let refused = AuditEvent::RequestsRefused { volume: VolumeId(0), reason };
        assert_eq!(nbd.session.poll_event(), Some(refused));
        assert_eq!((ask(&mut nbd, WRITE, &[1; 512]), nbd.session.poll_event()), (EPERM, None));
        scsi.run(&[0x17, 0, 0, 0, 0, 0]).good();
        assert_eq!((ask(&mut nbd, WRITE, &[1; 512]), nbd.session.poll_event()), (0, None));
    }
}

#[test]
fn nbd_waits_for_a_compare_and_write_of_its_block_and_for_no_other() {
    let both = Both::new();
    let (mut scsi, mut nbd) = (both.bench.client("a"), both.nbd());
    let (mut task, mut step, is_admitted) = begin_compare(&mut scsi);
    assert!(is_admitted);
    for (command, data) in [(WRITE, &[7; 512][..]), (TRIM, &[]), (READ, &[])] {
        assert_eq!(nbd.exchange(&request(command, data)), b"");
    }
    // A request for another block does not wait. The waiting requests are still carried out after
    // the client has sent a disconnect request.
    let mut beside = request(READ, &[]);
    beside[22] = 2;
    assert_eq!(nbd.exchange(&beside).len(), 16 + 512);
    nbd.client_sends(&request(2, &[])).unwrap();
    assert!(matches!(nbd.session.demand(), Demand::Close));
    while !matches!(step, TaskStep::Done(_)) {
        step = scsi.turn(&mut task, step, &[], &mut 0);
    }
    drop(task);
    nbd.run().unwrap();
    assert_eq!(nbd.sent().len(), 16 + 16 + 16 + 512);
}

#[test]
fn io_waiting_for_a_range_is_refused_if_the_volume_was_reserved_meanwhile() {
    let both = Both::new();
    let (mut scsi, mut nbd) = (both.bench.client("a"), both.nbd());
    let (task, _step, _) = begin_compare(&mut scsi);
    assert_eq!(nbd.exchange(&request(WRITE, &[7; 512])), b"");
    assert_eq!(reserve_out(&mut scsi, 0, 0, 0, 1), ScsiStatus::GOOD);
    let reserve = [0x5f, 1, 1, 0, 0, 0, 0, 0, 24, 0];
    assert_eq!(answer_after(&mut scsi, &reserve, &keys(1, 0), || drop(task)), ScsiStatus::GOOD);
    nbd.run().unwrap();
    assert_eq!(nbd.sent()[4..8], EPERM.to_be_bytes());
}

#[test]
fn a_compare_and_write_waits_for_nbd_s_writes_that_began_before() {
    let both = Both::new();
    let (mut scsi, mut nbd) = (both.bench.client("a"), both.nbd());
    nbd.holds_io = true;
    nbd.client_sends(&request(WRITE, &[7; 512])).unwrap();
    let (mut task, step, is_admitted) = begin_compare(&mut scsi);
    assert!(!is_admitted && scsi.admit(&mut task, &step).is_err());
    nbd.finish_one();
    let TaskStep::Done(response) = scsi.turn(&mut task, step, &[], &mut 0) else {
        panic!("the command ended before its write")
    };
    assert_eq!(answer(response).check(), (0xe, 0x1d00), "the comparison sees the earlier write");
}

/// The answer to a command that waits for other I/O; `end` completes that I/O.
fn answer_after(client: &mut TestNexus, cdb: &[u8], data_out: &[u8], end: impl FnOnce()) -> ScsiStatus {
    let (mut task, mut step) = client.server.begin(&command(Lun::new(0), cdb, data_out.len()));
    if matches!(step, TaskStep::DataOut { .. }) {
        step = client.turn(&mut task, step, data_out, &mut 0);
    }
    for _ in 0..3 {
        assert!(matches!(step, TaskStep::Wait), "{step:?}");
        step = client.server.resume(&mut task);
    }
    end();
    let TaskStep::Done(response) = client.server.resume(&mut task) else {
        panic!("nothing else is in flight")
    };
    response.status
}

fn keys(key: u64, other_key: u64) -> Vec<u8> {
    [key.to_be_bytes(), other_key.to_be_bytes(), [0; 8]].concat()
}

#[test]
fn an_excluding_command_completes_when_the_excluded_writes_have_left_the_volume() {
    let preempt = [0x5f, 4, 5, 0, 0, 0, 0, 0, 24, 0];
    let preempt_and_abort = [0x5f, 5, 5, 0, 0, 0, 0, 0, 24, 0];
    for cdb in [preempt, preempt_and_abort] {
        let both = Both::new();
        let (mut a, mut b) = (both.bench.client("a"), both.bench.client("b"));
        assert_eq!(reserve_out(&mut a, 0, 0, 0, 1), ScsiStatus::GOOD);
        assert_eq!(reserve_out(&mut b, 0, 0, 0, 2), ScsiStatus::GOOD);
        assert_eq!(reserve_out(&mut a, 1, 5, 1, 0), ScsiStatus::GOOD);
        let (mut task, step) = a.server.begin(&command(Lun::new(0), &WRITE_10, 512));
        let step = a.turn(&mut task, step, &[7; 512], &mut 0);
        assert_eq!(a.admit(&mut task, &step), Ok(()));
        let status = answer_after(&mut b, &cdb, &keys(2, 1), || {
            a.turn(&mut task, step, &[], &mut 0);
        });
        assert_eq!(status, ScsiStatus::GOOD);
    }
    for cdb in [&[0x5f, 1, 1, 0, 0, 0, 0, 0, 24, 0][..], &[0x16, 0, 0, 0, 0, 0]] {
        let both = Both::new();
        let (mut scsi, mut nbd) = (both.bench.client("a"), both.nbd());
        let mut list = Vec::new();
        if cdb[0] == 0x5f {
            assert_eq!(reserve_out(&mut scsi, 0, 0, 0, 1), ScsiStatus::GOOD);
            list = keys(1, 0);
        }
        nbd.holds_io = true;
        nbd.client_sends(&request(WRITE, &[7; 512])).unwrap();
        assert_eq!(answer_after(&mut scsi, cdb, &list, || nbd.finish_one()), ScsiStatus::GOOD);
    }
}

#[test]
fn an_admitted_write_that_is_excluded_before_it_begins_never_begins() {
    let both = Both::new();
    let mut scsi = both.bench.client("a");
    let volume_state = both.exports.volume_state(VolumeId(0)).unwrap();
    let nameless = Admission::new(&volume_state, None, Epoch::current());
    assert_eq!(reserve_out(&mut scsi, 0, 0, 0, 1), ScsiStatus::GOOD);
    let write = || nameless.admit(Op::Write { fua: false }, (0, 512), RequiredAccess::Writing, None);
    drop(write().unwrap());
    assert_eq!(reserve_out(&mut scsi, 1, 1, 1, 0), ScsiStatus::GOOD);
    assert!(matches!(write(), Err(NotAdmitted::Denied(IoError::Reserved))));
}

#[test]
fn nbd_io_ends_before_a_sanitize_and_is_refused_during_it() {
    const ERASE: [u8; 10] = [0x48, 2, 0, 0, 0, 0, 0, 0, 0, 0];
    let both = Both::new();
    let (mut scsi, mut nbd) = (both.bench.client("a"), both.nbd());
    nbd.holds_io = true;
    nbd.client_sends(&request(WRITE, &[7; 512])).unwrap();
    let (mut task, step) = scsi.server.begin(&command(Lun::new(0), &ERASE, 0));
    assert!(matches!(step, TaskStep::Wait));
    nbd.finish_one();
    nbd.sent();
    nbd.holds_io = false;
    let mut step = scsi.server.resume(&mut task);
    assert!(matches!(step, TaskStep::Io { .. }));
    assert_eq!((ask(&mut nbd, READ, &[]), ask(&mut nbd, WRITE, &[7; 512])), (EPERM, EPERM));
    // Another unit over the volume is excluded too.
    let other = LogicalUnit::over(UnitIdentity::of("b"), &both.exports.volume_state(VolumeId(0)).unwrap());
    let mut other = DeviceBench::around(other, both.bench.volume.clone()).client("b");
    for cdb in [&[0; 6][..], &WRITE_10, &ERASE] {
        let data_out = if cdb[0] == 0x2a { &[7; 512][..] } else { &[] };
        assert_eq!(other.run_with(cdb, data_out).check(), (2, 0x041b), "{cdb:x?}");
    }
    while !matches!(step, TaskStep::Done(_)) {
        step = scsi.turn(&mut task, step, &[], &mut 0);
    }
    assert_eq!(nbd.exchange(&request(READ, &[]))[16..], [0; 512]);
    other.run(&[0; 6]).good();
}

/// A client of a further target with the same unit.
fn client_of(unit: &Arc<LogicalUnit>, target: u16, volume: &Arc<dyn Volume>) -> TestNexus {
    let mut port = port(target);
    port.name = format!("iqn.2026-11.t:{target},t,0x0001").into();
    let nexus = ItNexus::iscsi("iqn.2026-11.i:a", [0, 0, 0, 0, 0, 1], port.clone());
    let target = ScsiTarget::new("iqn.2026-11.t:t", vec![port]).with_unit(0, VolumeId(0), unit.clone());
    let channel = volume.open(&TestCore::new().as_core(), 64, Waker::idle()).unwrap();
    let mut client = TestNexus { server: DeviceServer::new(Arc::new(target), nexus), channel };
    assert_eq!(client.run(&[0; 6]).check(), (6, 0x2900));
    client
}

#[test]
fn one_initiator_is_another_registrant_on_another_target_of_one_volume() {
    let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(8 << 20));
    let volume_state = VolumeState::new(volume.clone());
    // One unit on two targets, and a unit of another name over the same volume.
    let units = [
        LogicalUnit::over(UnitIdentity::of("a"), &volume_state),
        LogicalUnit::over(UnitIdentity::of("b"), &volume_state),
    ];
    let mut first = client_of(&units[0], 1, &volume);
    let mut second = client_of(&units[0], 2, &volume);
    let mut third = client_of(&units[1], 3, &volume);
    assert_eq!(reserve_out(&mut first, 0, 0, 0, 1), ScsiStatus::GOOD);
    assert_eq!(reserve_out(&mut first, 1, 3, 1, 0), ScsiStatus::GOOD);
    for other in [&mut second, &mut third] {
        assert_eq!(other.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).status, ScsiStatus::RESERVATION_CONFLICT);
    }
    assert_eq!(reserve_out(&mut second, 0, 0, 0, 2), ScsiStatus::GOOD);
    assert_eq!(reserve_out(&mut third, 0, 0, 0, 3), ScsiStatus::GOOD);
    let keys = third.run(&[0x5e, 0, 0, 0, 0, 0, 0, 1, 0, 0]).good();
    assert_eq!((keys[7], keys[15], keys[23], keys[31]), (24, 1, 2, 3));
    let status = second.run(&[0x5e, 3, 0, 0, 0, 0, 0, 4, 0, 0]).good();
    let each = (status.len() - 8) / 3;
    assert_eq!([0, 1].map(|nth| status[8 + nth * each + 19]), [1, 2], "the ports have different identifiers");
    assert_eq!(reserve_out(&mut third, 5, 3, 3, 1), ScsiStatus::GOOD);
    assert_eq!(first.run(&[0; 6]).check(), (6, 0x2a05), "the change through another unit is reported");
    assert_eq!(first.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).status, ScsiStatus::RESERVATION_CONFLICT);
    third.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good();
}

#[test]
fn a_resize_is_reported_once_and_nbd_is_limited_to_the_smaller_size() {
    let both = Both::new();
    let volume_state = both.exports.volume_state(VolumeId(0)).unwrap().clone();
    let (mut scsi, mut nbd) = (both.bench.client("a"), both.nbd());
    assert_eq!(volume_state.resize(Resize::discard_beyond(4 << 20)).unwrap().size, 4 << 20);
    assert_eq!(scsi.run(&[0; 6]).check(), (6, 0x2a09));
    scsi.run(&[0; 6]).good();
    // An unchanged size is not reported.
    volume_state.resize(Resize::discard_beyond(4 << 20)).unwrap();
    assert!(!volume_state.check_size());
    scsi.run(&[0; 6]).good();
    // A failed resize is not reported.
    assert!(volume_state.resize(Resize::grow(1 << 40)).is_err());
    scsi.run(&[0; 6]).good();
    let mut beyond = request(WRITE, &[1; 512]);
    beyond[16..24].copy_from_slice(&(6_u64 << 20).to_be_bytes());
    assert_ne!(nbd.exchange(&beyond)[4..8], [0; 4]);
    assert_eq!(ask(&mut nbd, WRITE, &[1; 512]), 0);
}

#[test]
fn a_sanitize_waits_for_earlier_nbd_writes_and_excludes_nbd_until_it_ends() {
    let both = Both::new();
    let (mut scsi, mut nbd) = (both.bench.client("a"), both.nbd());
    assert_eq!(ask(&mut nbd, WRITE, &[1; 512]), 0);
    // A write is in flight: the erase does not begin.
    nbd.holds_io = true;
    nbd.client_sends(&request(WRITE, &[2; 512])).unwrap();
    let (mut task, step) = scsi.server.begin(&command(Lun::new(0), &[0x48, 2, 0, 0, 0, 0, 0, 0, 0, 0], 0));
    assert!(matches!(step, TaskStep::Wait), "{step:?}");
    nbd.finish_one();
    nbd.holds_io = false;
    assert_eq!(nbd.sent()[4..8], [0; 4]);
    let (mut sent, mut step) = (0, scsi.server.resume(&mut task));
    assert!(matches!(step, TaskStep::Io { .. }), "{step:?}");
    for (kind, data) in [(WRITE, &[3; 512][..]), (READ, &[]), (ZEROES, &[]), (TRIM, &[])] {
        assert_eq!(ask(&mut nbd, kind, data), EPERM, "{kind}");
    }
    assert_eq!(ask(&mut nbd, FLUSH, &[]), 0);
    while !matches!(step, TaskStep::Done(_)) {
        step = scsi.turn(&mut task, step, &[], &mut sent);
    }
    assert_eq!(nbd.exchange(&request(READ, &[]))[16..], [0; 512]);
}
