//! Reservations among hosts, and between hosts and SCSI initiators of the same volume.

use super::*;
use crate::driver::session::Timed;
use crate::exports::Export;
use crate::scsi::testing::{DeviceBench, TestNexus};
use crate::scsi::{LogicalUnit, ScsiStatus, UnitIdentity};
use crate::volume_state::{Commit, RangeGuard, SharedState, StateGeneration, StoredState, VolumeState};
use blockmux_volume::MemVolume;
use blockmux_volume::Volume;
use blockmux_wire::nvme::feature::FeatureId;
use blockmux_wire::nvme::identify::{IdentifyNamespace, RESCAP_PTPL};
use blockmux_wire::nvme::reservation::{EDS, IEKEY};
use std::sync::Mutex;
use std::time::Instant;

const REGISTER: u32 = 0;
const UNREGISTER: u32 = 1;
const REPLACE: u32 = 2;
const PREEMPT: u32 = 1;
const PREEMPT_AND_ABORT: u32 = 2;
const CLEAR: u32 = 1;

fn command(opcode: NvmOpcode, cdw10: u32) -> Sqe {
    Sqe { opcode: opcode.0, flags: 0x40, nsid: 1.into(), cdw10: cdw10.into(), ..Sqe::new_zeroed() }
}

/// The status without DNR and More.
fn status(host: &mut FabricsTestHost, sqe: Sqe, keys: [u64; 2], len: usize) -> NvmeStatus {
    let data = [keys[0].to_le_bytes(), keys[1].to_le_bytes()].concat();
    host.run(sqe, &data[..len]).1.status.status()
}

fn register(host: &mut FabricsTestHost, cdw10: u32, keys: [u64; 2]) -> NvmeStatus {
    status(host, command(NvmOpcode::RESERVATION_REGISTER, cdw10), keys, 16)
}

fn acquire(host: &mut FabricsTestHost, action: u32, kind: u32, keys: [u64; 2]) -> NvmeStatus {
    status(host, command(NvmOpcode::RESERVATION_ACQUIRE, kind << 8 | action), keys, 16)
}

fn release(host: &mut FabricsTestHost, action: u32, kind: u32, key: u64) -> NvmeStatus {
    status(host, command(NvmOpcode::RESERVATION_RELEASE, kind << 8 | action), [key, 0], 8)
}

fn report(host: &mut FabricsTestHost) -> Vec<u8> {
    let sqe = Sqe { cdw11: EDS.into(), ..command(NvmOpcode::RESERVATION_REPORT, 1023) };
    let sqe = Sqe { dptr: SglDescriptor::transport(4096), ..sqe };
    let (page, cqe) = host.run(sqe, &[]);
    assert!(cqe.status.is_success());
    page
}

/// Whether reads and writes are allowed.
fn access(host: &mut FabricsTestHost) -> [bool; 2] {
    let read = host.run(nvm(NvmOpcode::READ, 1, 0, 1), &[]).1.status.status();
    let write = host.run(nvm(NvmOpcode::WRITE, 1, 0, 1), &[7; 512]).1.status.status();
    [read, write].map(|status| {
        assert!(
            matches!(status, NvmeStatus::SUCCESSFUL_COMPLETION | NvmeStatus::RESERVATION_CONFLICT),
            "{status:?}"
        );
        status == NvmeStatus::SUCCESSFUL_COMPLETION
    })
}

const OK: NvmeStatus = NvmeStatus::SUCCESSFUL_COMPLETION;
const CONFLICT: NvmeStatus = NvmeStatus::RESERVATION_CONFLICT;
const INVALID: NvmeStatus = NvmeStatus::INVALID_FIELD_IN_COMMAND;

/// A shared state in memory.
#[derive(Default)]
struct MemoryStore(Mutex<StoredImage>);

#[derive(Default)]
struct StoredImage {
    image: Vec<u8>,
    proposals: u64,
    answer: Option<bool>,
}

impl SharedState for MemoryStore {
    fn propose(&self, _expected: StateGeneration, image: &[u8]) -> StateGeneration {
        let mut store = self.0.lock().unwrap();
        store.image = image.to_vec();
        store.proposals += 1;
        StateGeneration(store.proposals)
    }

    fn outcome(&self, _proposal: StateGeneration) -> Option<Commit> {
        let is_stored = self.0.lock().unwrap().answer?;
        Some(if is_stored { Commit::Committed } else { Commit::Failed })
    }
}

#[test]
fn each_reservation_type_allows_the_specified_access() {
    let table = [
        (1, [true, false], [true, false]),
        (2, [false; 2], [false; 2]),
        (3, [true; 2], [true, false]),
        (4, [true; 2], [false; 2]),
        (5, [true; 2], [true, false]),
        (6, [true; 2], [false; 2]),
    ];
    for (kind, registered, stranger) in table {
        let node = node();
        let (mut a, _admin_a) = FabricsTestHost::io_of(&node, 1);
        let (mut b, _admin_b) = FabricsTestHost::io_of(&node, 2);
        assert_eq!(register(&mut a, REGISTER, [0, 1]), OK);
        assert_eq!(register(&mut b, REGISTER, [0, 2]), OK);
        assert_eq!(acquire(&mut a, 0, kind, [1, 0]), OK);
        assert_eq!(acquire(&mut a, 0, kind, [1, 0]), OK, "repeating it has no effect");
        assert_eq!(access(&mut a), [true; 2], "type {kind}");
        assert_eq!(access(&mut b), registered, "type {kind}");
        assert_eq!(register(&mut b, UNREGISTER, [2, 0]), OK);
        assert_eq!(access(&mut b), stranger, "type {kind}");
        let flush = b.run(nvm(NvmOpcode::FLUSH, 1, 0, 1), &[]).1.status.status();
        assert_eq!(flush, CONFLICT, "a flush is one of the commands that write");
        // Another queue of the same host is the same registrant; the other namespace has no
        // reservation.
        let (mut other, _other_admin) = FabricsTestHost::io_of(&node, 1);
        assert_eq!(access(&mut other), [true; 2]);
        assert!(b.run(nvm(NvmOpcode::READ, 2, 0, 1), &[]).1.status.is_success());
        assert_eq!(report(&mut b)[4], kind as u8);
        assert_eq!(release(&mut a, 0, kind, 1), OK);
        assert_eq!(access(&mut b), [true; 2]);
    }
}

#[test]
fn registering_checks_the_key_unless_iekey_is_set() {
    let node = node();
    let (mut a, _admin) = FabricsTestHost::io(&node);
    assert_eq!(register(&mut a, UNREGISTER, [0, 0]), CONFLICT, "nothing is registered");
    assert_eq!(register(&mut a, UNREGISTER | IEKEY, [0, 0]), CONFLICT);
    assert_eq!(register(&mut a, REPLACE, [0, 5]), CONFLICT);
    assert_eq!(register(&mut a, REGISTER, [9, 0]), INVALID, "0 is not a valid key");
    assert_eq!(register(&mut a, REGISTER, [9, 1]), OK, "the current key is not checked");
    assert_eq!(register(&mut a, REGISTER, [0, 1]), OK, "the same again");
    assert_eq!(register(&mut a, REGISTER, [0, 2]), CONFLICT);
    assert_eq!(register(&mut a, REPLACE, [2, 3]), CONFLICT);
    assert_eq!(register(&mut a, REPLACE, [1, 3]), OK);
    assert_eq!(register(&mut a, REPLACE | IEKEY, [1, 4]), OK);
    assert_eq!(register(&mut a, UNREGISTER, [3, 0]), CONFLICT);
    assert_eq!(register(&mut a, UNREGISTER | IEKEY, [3, 0]), OK);
    assert_eq!(register(&mut a, REPLACE | IEKEY, [0, 6]), OK, "whether or not it was registered");
    assert_eq!(register(&mut a, 3, [6, 7]), INVALID);
    assert_eq!(register(&mut a, REGISTER | 1 << 30, [0, 6]), INVALID);
    assert_eq!(register(&mut a, REGISTER | 3 << 30, [0, 6]), INVALID, "there is no persistent storage");
    assert_eq!(acquire(&mut a, 0, 1, [5, 0]), CONFLICT);
    assert_eq!(acquire(&mut a, IEKEY, 1, [6, 0]), INVALID);
    for kind in [0, 7] {
        assert_eq!(acquire(&mut a, 0, kind, [6, 0]), INVALID);
    }
    assert_eq!(acquire(&mut a, 3, 1, [6, 0]), INVALID);
    assert_eq!(acquire(&mut a, 0, 1, [6, 0]), OK);
    assert_eq!(acquire(&mut a, 0, 2, [6, 0]), CONFLICT, "it has another type");
    assert_eq!(release(&mut a, 0, 2, 6), INVALID);
    assert_eq!(release(&mut a, 2, 1, 6), INVALID);
    assert_eq!(release(&mut a, 0, 1, 5), CONFLICT);
    assert_eq!(release(&mut a, CLEAR, 0, 6), OK);
    assert_eq!(report(&mut a)[5], 0);
}

/// Linux's block layer sends two keys with every reservation command, including Release.
#[test]
fn keys_may_be_in_a_buffer_that_is_longer_than_they_are() {
    let node = node();
    let (mut a, _admin) = FabricsTestHost::io(&node);
    let mut run = |opcode, cdw10, keys: [u64; 2], len: usize| {
        let mut data = [keys[0].to_le_bytes(), keys[1].to_le_bytes()].concat();
        data.resize(len, 0xee);
        a.run(command(opcode, cdw10), &data).1.status.status()
    };
    let (release, write_exclusive) = (NvmOpcode::RESERVATION_RELEASE, 1 << 8);
    assert_eq!(run(NvmOpcode::RESERVATION_REGISTER, REGISTER, [0, 7], 4096), OK);
    assert_eq!(run(NvmOpcode::RESERVATION_ACQUIRE, write_exclusive, [7, 0], 32), OK);
    assert_eq!(run(release, write_exclusive, [8, 7], 16), CONFLICT, "the first key counts");
    assert_eq!(run(release, write_exclusive, [7, 0], 16), OK);
    assert_eq!(run(release, CLEAR, [7, 0], 16), OK);
    assert_eq!(run(release, CLEAR, [7, 0], 4), NvmeStatus::DATA_SGL_LENGTH_INVALID);
    assert_eq!(report(&mut a)[5], 0);
}

#[test]
fn a_report_lists_the_registrants_and_the_holder() {
    let node = node();
    let (mut a, _admin_a) = FabricsTestHost::io_of(&node, 1);
    let (mut b, _admin_b) = FabricsTestHost::io_of(&node, 2);
    assert_eq!(register(&mut a, REGISTER, [0, 0x11]), OK);
    assert_eq!(register(&mut b, REGISTER, [0, 0x22]), OK);
    assert_eq!(acquire(&mut b, 0, 4, [0x22, 0]), OK);
    let page = report(&mut a);
    assert_eq!((&page[..4], page[4], page[5], page[9]), (&[2, 0, 0, 0][..], 4, 2, 0));
    let registrant = |nth: usize| &page[64 + nth * 64..][..64];
    for (nth, holds, key, id) in [(0, 0, 0x11, 1), (1, 1, 0x22, 2)] {
        let registrant = registrant(nth);
        assert_eq!((&registrant[..2], registrant[2], registrant[8]), (&[0xff; 2][..], holds, key));
        assert_eq!(registrant[16..32], [id; 16]);
    }
    let short = Sqe { dptr: SglDescriptor::transport(8), ..command(NvmOpcode::RESERVATION_REPORT, 1) };
    assert_eq!(refusal(&a.run(short, &[]).1), NvmeStatus::HOST_IDENTIFIER_INCONSISTENT_FORMAT);
    let short = Sqe { cdw11: EDS.into(), ..short };
    assert_eq!(a.run(short, &[]).0, page[..8]);
    let long = Sqe { cdw10: u32::MAX.into(), ..short };
    assert_eq!(refusal(&a.run(long, &[]).1), INVALID);
}

#[test]
fn a_preempted_host_is_notified_and_may_not_write() {
    let node = node();
    let (mut a, mut admin_a) = FabricsTestHost::io_of(&node, 1);
    let (mut b, mut admin_b) = FabricsTestHost::io_of(&node, 2);
    let event = admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0);
    let mut requests = [event; 2];
    admin_a.send(&mut requests[0], &[]);
    admin_b.send(&mut requests[1], &[]);
    assert_eq!(register(&mut a, REGISTER, [0, 1]), OK);
    assert_eq!(register(&mut b, REGISTER, [0, 2]), OK);
    assert_eq!(acquire(&mut a, 0, 1, [1, 0]), OK);
    assert_eq!(acquire(&mut b, PREEMPT, 1, [2, 0]), INVALID);
    assert_eq!(acquire(&mut b, PREEMPT, 1, [2, 9]), CONFLICT);
    assert_eq!(acquire(&mut b, PREEMPT, 1, [2, 1]), OK);
    assert_eq!((access(&mut a), access(&mut b)), ([true, false], [true; 2]));
    admin_a.pump.turn();
    admin_b.pump.turn();
    let completion = admin_a.end_of(requests[0]).1;
    assert_eq!(completion.result.get(), 0x80_0006);
    assert!(admin_b.received().is_empty());
    let log = admin(AdminOpcode::GET_LOG_PAGE, 0, 15 << 16 | 0x80, 0, 64);
    let page = admin_a.run(log, &[]).0;
    assert_eq!((page[0], page[8], page[9], page[12]), (1, 1, 0, 1));
    // A masked notification is not reported.
    let mask =
        admin(AdminOpcode::SET_FEATURES, 1, FeatureId::RESERVATION_NOTIFICATION_MASK.0.into(), 0b1110, 0);
    assert!(admin_a.run(mask, &[]).1.status.is_success());
    let get = admin(AdminOpcode::GET_FEATURES, 1, FeatureId::RESERVATION_NOTIFICATION_MASK.0.into(), 0, 0);
    assert_eq!(admin_a.run(get, &[]).1.result.get(), 0b1110);
    let wrong = admin(AdminOpcode::SET_FEATURES, 1, FeatureId::RESERVATION_NOTIFICATION_MASK.0.into(), 1, 0);
    assert_eq!(refusal(&admin_a.run(wrong, &[]).1), INVALID);
    admin_a.send(&mut requests[0], &[]);
    assert_eq!(register(&mut a, REGISTER, [0, 1]), OK);
    assert_eq!(release(&mut b, CLEAR, 0, 2), OK);
    admin_a.pump.turn();
    assert!(admin_a.received().is_empty());
}

/// As in blktests nvme/054. Until 2025 it preempted with PRKEY 0, which only Linux's target accepts
/// as the holder's key.
#[test]
fn a_holder_changes_the_type_of_its_reservation_by_preempting_its_own_key() {
    let (mut host, _admin) = FabricsTestHost::io(&node());
    assert_eq!(register(&mut host, REGISTER, [0, 4]), OK);
    assert_eq!(acquire(&mut host, 0, 1, [4, 0]), OK);
    assert_eq!(acquire(&mut host, PREEMPT, 2, [4, 0]), INVALID);
    assert_eq!(release(&mut host, 0, 2, 4), INVALID, "the type is still 1");
    assert_eq!(acquire(&mut host, PREEMPT, 2, [4, 4]), OK);
    assert_eq!(release(&mut host, 0, 2, 4), OK);
}

#[test]
fn preempt_and_abort_aborts_a_fused_operation_that_is_throttled_or_waits_for_its_range() {
    for is_throttled in [true, false] {
        let node = node();
        let (mut a, _admin_a) = FabricsTestHost::io_of(&node, 1);
        let (mut b, _admin_b) = FabricsTestHost::io_of(&node, 2);
        assert_eq!(register(&mut a, REGISTER, [0, 1]), OK);
        assert_eq!(register(&mut b, REGISTER, [0, 2]), OK);
        a.pump.throttles = is_throttled;
        let volume_state = node.1.volume_state(VolumeId(0)).unwrap();
        let guard = (!is_throttled).then(|| RangeGuard::lock(&volume_state, 0, 512).unwrap());
        for (opcode, flags) in [(NvmOpcode::COMPARE, 0x41), (NvmOpcode::WRITE, 0x42)] {
            let dptr = SglDescriptor::in_capsule(0, 512);
            a.send(&mut Sqe { flags, dptr, ..nvm(opcode, 1, 0, 1) }, &[0; 512]);
        }
        assert_eq!((a.pump.waiting.len(), a.pump.submitted.len()), (1, 0));
        assert_eq!(acquire(&mut b, PREEMPT_AND_ABORT, 1, [2, 1]), OK);
        a.pump.turn();
        assert!(a.pump.waiting.is_empty());
        let ends: Vec<_> = a.received().iter().map(|sent| refusal(&sent.cqe())).collect();
        assert_eq!(
            ends,
            [
                NvmeStatus::COMMAND_ABORTED_DUE_TO_PREEMPT_AND_ABORT,
                NvmeStatus::COMMAND_ABORTED_DUE_TO_FAILED_FUSED_COMMAND
            ]
        );
        drop(guard);
    }
}

#[test]
fn preempt_and_abort_aborts_outstanding_io_and_waits_for_it() {
    let node = node();
    let (mut a, _admin_a) = FabricsTestHost::io_of(&node, 1);
    let (mut b, _admin_b) = FabricsTestHost::io_of(&node, 2);
    assert_eq!(register(&mut a, REGISTER, [0, 1]), OK);
    assert_eq!(register(&mut b, REGISTER, [0, 2]), OK);
    a.pump.holds_io = true;
    let mut write = nvm(NvmOpcode::WRITE, 1, 0, 1);
    write.dptr = SglDescriptor::in_capsule(0, 512);
    a.send(&mut write, &[9; 512]);
    let mut acquire = command(NvmOpcode::RESERVATION_ACQUIRE, 1 << 8 | PREEMPT_AND_ABORT);
    acquire.dptr = SglDescriptor::in_capsule(0, 16);
    b.send(&mut acquire, &[2_u64.to_le_bytes(), 1_u64.to_le_bytes()].concat());
    b.pump.session.on_timeout(b.now).unwrap();
    assert!(b.received().is_empty(), "a write of the other is under way");
    a.pump.turn();
    let (volume, tag) = (VolumeId(0), a.pump.submitted[0].1.tag);
    assert_eq!(a.pump.cancelled, [(volume, tag)]);
    // The volume could cancel it.
    let (_, io) = a.pump.submitted.pop_front().unwrap();
    let result = Err(blockmux_volume::IoError::Aborted);
    crate::driver::target::IoSource::on_io(
        &mut a.pump.session,
        blockmux_volume::Completion { tag: io.tag, result },
        Instant::now(),
    );
    drop(io);
    assert_eq!(refusal(&a.end_of(write).1), NvmeStatus::COMMAND_ABORTED_DUE_TO_PREEMPT_AND_ABORT);
    b.pump.session.on_timeout(b.now).unwrap();
    b.pump.turn();
    assert!(b.end_of(acquire).1.status.is_success());
}

#[test]
fn a_persistent_change_completes_once_it_is_saved_and_is_restored() {
    let store = Arc::new(MemoryStore::default());
    let serve_image = |image: &[u8]| {
        let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(SIZE));
        let stored = StoredState { image: image.to_vec(), ..StoredState::default() };
        let volume_state = VolumeState::with_shared_state(volume.clone(), store.clone(), &stored).unwrap();
        let export = Export { name: "a".into(), description: String::new(), read_only: false, volume };
        let other = super::export("b");
        let other_state = VolumeState::new(other.volume.clone());
        serve(Exports::with_states(vec![(export, volume_state), (other, other_state)]))
    };
    let node = serve_image(&[]);
    let (mut io, mut admin_queue) = FabricsTestHost::io(&node);
    let page = admin_queue.run(admin(AdminOpcode::IDENTIFY, 1, 0, 0, 4096), &[]).0;
    assert!(IdentifyNamespace::read_from_bytes(&page).unwrap().rescap & RESCAP_PTPL != 0);
    let mut sqe = command(NvmOpcode::RESERVATION_REGISTER, REGISTER | 3 << 30);
    sqe.dptr = SglDescriptor::in_capsule(0, 16);
    io.send(&mut sqe, &[0_u64.to_le_bytes(), 7_u64.to_le_bytes()].concat());
    assert!(io.received().is_empty(), "it is not on stable storage");
    store.0.lock().unwrap().answer = Some(true);
    let now = io.pump.session.poll_timeout().unwrap();
    io.pump.session.on_timeout(now).unwrap();
    assert!(io.end_of(sqe).1.status.is_success());
    assert_eq!(acquire(&mut io, 0, 2, [7, 0]), OK);
    assert_eq!(report(&mut io)[9], 1);
    let get = admin(AdminOpcode::GET_FEATURES, 1, FeatureId::RESERVATION_PERSISTENCE.0.into(), 0, 0);
    assert_eq!(admin_queue.run(get, &[]).1.result.get(), 1);

    let image = store.0.lock().unwrap().image.clone();
    let node = serve_image(&image);
    let (mut stranger, _stranger_admin) = FabricsTestHost::io_of(&node, 2);
    let (mut io, mut admin_queue) = FabricsTestHost::io(&node);
    assert_eq!((access(&mut stranger), access(&mut io)), ([false; 2], [true; 2]));
    // The feature clears persistence without a registration; a failed save is rolled back.
    let set =
        |value| admin(AdminOpcode::SET_FEATURES, 1, FeatureId::RESERVATION_PERSISTENCE.0.into(), value, 0);
    store.0.lock().unwrap().answer = Some(false);
    assert_eq!(refusal(&admin_queue.run(set(0), &[]).1), NvmeStatus::INTERNAL_ERROR);
    assert_eq!(admin_queue.run(get, &[]).1.result.get(), 1);
    store.0.lock().unwrap().answer = None;
    let mut waits = set(0);
    admin_queue.send(&mut waits, &[]);
    assert!(admin_queue.received().is_empty());
    store.0.lock().unwrap().answer = Some(true);
    let now = admin_queue.pump.session.poll_timeout().unwrap();
    admin_queue.pump.session.on_timeout(now).unwrap();
    assert!(admin_queue.end_of(waits).1.status.is_success());
    assert_eq!(store.0.lock().unwrap().image, []);
    assert_eq!(report(&mut io)[9], 0);
}

const THIEF: &str = "nqn.2026-11.com.example:thief";

/// The host identifiers of a report.
fn identifiers(host: &mut FabricsTestHost) -> Vec<[u8; 16]> {
    let page = report(host);
    page[64..].chunks(64).take(page[5].into()).map(|entry| entry[16..32].try_into().unwrap()).collect()
}

#[test]
fn another_host_with_the_identifier_of_the_holder_is_another_registrant() {
    let node = node();
    let (mut holder, mut holder_admin) = FabricsTestHost::io_of(&node, 1);
    let (mut thief, _thief_admin) = FabricsTestHost::io_named(&node, THIEF, 1);
    assert_eq!(register(&mut holder, REGISTER, [0, 7]), OK);
    assert_eq!(acquire(&mut holder, 0, 1, [7, 0]), OK);
    assert_eq!(access(&mut thief), [true, false]);
    assert_eq!(release(&mut thief, 0, 1, 7), CONFLICT);
    assert_eq!(release(&mut thief, CLEAR, 0, 7), CONFLICT);
    assert_eq!(register(&mut thief, UNREGISTER | IEKEY, [7, 0]), CONFLICT);
    assert_eq!(access(&mut holder), [true; 2]);
    // As a registrant of its own it may preempt the holder, who learns of it.
    let mut event = admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0);
    holder_admin.send(&mut event, &[]);
    assert_eq!(register(&mut thief, REGISTER, [0, 8]), OK);
    assert_eq!(acquire(&mut thief, PREEMPT, 1, [8, 7]), OK);
    assert_eq!((access(&mut holder), access(&mut thief)), ([true, false], [true; 2]));
    holder_admin.pump.turn();
    assert_eq!(holder_admin.end_of(event).1.result.get(), 0x80_0006);
}

#[test]
fn a_host_that_registers_the_identifier_of_another_first_does_not_keep_it_out() {
    let node = node();
    let (mut thief, _thief_admin) = FabricsTestHost::io_named(&node, THIEF, 1);
    assert_eq!(register(&mut thief, REGISTER, [0, 8]), OK);
    let (mut owner, _owner_admin) = FabricsTestHost::io_of(&node, 1);
    assert_eq!(register(&mut owner, REGISTER, [0, 7]), OK);
    assert_eq!(acquire(&mut owner, 0, 2, [7, 0]), OK);
    assert_eq!((access(&mut owner), access(&mut thief)), ([true; 2], [false; 2]));
    // Each reads its identifier for its own registration only.
    let (of_owner, of_thief) = (identifiers(&mut owner), identifiers(&mut thief));
    assert_eq!((of_owner[1], of_thief[0]), ([1; 16], [1; 16]));
    assert!(of_owner[0] != [1; 16] && of_thief[1] != [1; 16]);
    // Nobody else can confuse them.
    let (mut other, _other_admin) = FabricsTestHost::io_of(&node, 2);
    assert_eq!(identifiers(&mut other), [[1; 16]; 2]);
}

/// Earlier versions stored only the host identifier.
#[test]
fn a_record_without_an_nqn_goes_to_the_first_host_with_its_identifier() {
    let store = Arc::new(MemoryStore::default());
    let serve_image = |image: &[u8]| {
        let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(SIZE));
        let stored = StoredState { image: image.to_vec(), ..StoredState::default() };
        let volume_state = VolumeState::with_shared_state(volume.clone(), store.clone(), &stored).unwrap();
        let export = Export { name: "a".into(), description: String::new(), read_only: false, volume };
        let other = super::export("b");
        let other_state = VolumeState::new(other.volume.clone());
        serve(Exports::with_states(vec![(export, volume_state), (other, other_state)]))
    };
    // Exclusive Access, held by the host with the key 7.
    let mut body = [0, 0, 0, 1, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 16].to_vec();
    body.extend([1; 16]);
    let sum = blockmux_volume::Crc32c::of(&body).value().to_be_bytes();
    let old = [&b"bmux-pr\x01"[..], &sum, &body].concat();
    for image in [old, Vec::new()] {
        // The second time, the image that the first run has stored.
        let is_old = !image.is_empty();
        let image = if is_old { image } else { store.0.lock().unwrap().image.clone() };
        let node = serve_image(&image);
        let thief = (!is_old).then(|| FabricsTestHost::io_named(&node, THIEF, 1));
        let (mut owner, _owner_admin) = FabricsTestHost::io_of(&node, 1);
        assert_eq!(access(&mut owner), [true; 2]);
        assert_eq!(identifiers(&mut owner), [[1; 16]]);
        let (mut thief, _thief_admin) = thief.unwrap_or_else(|| FabricsTestHost::io_named(&node, THIEF, 1));
        assert_eq!(access(&mut thief), [false; 2], "old: {is_old}");
        assert_eq!(access(&mut owner), [true; 2]);
    }
}

/// A SCSI initiator of the volume of namespace 1.
fn scsi(node: &(Arc<NvmeNode>, Exports)) -> TestNexus {
    let volume_state = node.1.volume_state(VolumeId(0)).unwrap();
    let unit = LogicalUnit::over(UnitIdentity::of("a"), &volume_state);
    DeviceBench::around(unit, volume_state.volume().clone()).client("s")
}

fn reserve_out(client: &mut TestNexus, action: u8, kind: u8, key: u64, other_key: u64) -> ScsiStatus {
    let mut list = [key.to_be_bytes(), other_key.to_be_bytes()].concat();
    list.extend([0; 8]);
    client.run_with(&[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list).status
}

const SCSI_READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const SCSI_WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];

#[test]
fn scsi_and_nvme_reservations_exclude_each_other() {
    for (own, scsi_kind, reads) in
        [(1, 1, true), (2, 3, false), (3, 5, true), (4, 6, false), (5, 7, true), (6, 8, false)]
    {
        let node = node();
        let mut scsi = scsi(&node);
        let (mut host, mut admin_queue) = FabricsTestHost::io(&node);
        assert_eq!(reserve_out(&mut scsi, 0, 0, 0, 1), ScsiStatus::GOOD);
        assert_eq!(reserve_out(&mut scsi, 1, scsi_kind, 1, 0), ScsiStatus::GOOD);
        assert_eq!(access(&mut host), [reads, false], "type {own}");
        let page = report(&mut host);
        assert_eq!((page[4], page[5], page[64 + 2], page[64 + 8]), (own, 1, 1, 1));
        // The host preempts it, and the initiator gets a unit attention.
        assert_eq!(register(&mut host, REGISTER, [0, 2]), OK);
        let victim = if own >= 5 { 0 } else { 1 };
        assert_eq!(acquire(&mut host, PREEMPT, own.into(), [2, victim]), OK);
        assert_eq!(scsi.run(&[0; 6]).check(), (6, 0x2a05));
        let read = scsi.run(&SCSI_READ).status;
        assert_eq!(read, if reads { ScsiStatus::GOOD } else { ScsiStatus::RESERVATION_CONFLICT });
        assert_eq!(scsi.run_with(&SCSI_WRITE, &[1; 512]).status, ScsiStatus::RESERVATION_CONFLICT);
        assert_eq!(access(&mut host), [true; 2]);
        let keys = scsi.run(&[0x5e, 1, 0, 0, 0, 0, 0, 1, 0, 0]).good();
        assert_eq!(keys[21], scsi_kind);
        let full = scsi.run(&[0x5e, 3, 0, 0, 0, 0, 0, 4, 0, 0]).good();
        assert_eq!((full[7], full[15], full[8 + 24], &full[8 + 32..]), (48, 2, 0x0f, &[1; 16][..]));
        // The initiator preempts it in turn.
        let mut event = admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0);
        admin_queue.send(&mut event, &[]);
        assert_eq!(reserve_out(&mut scsi, 0, 0, 0, 3), ScsiStatus::GOOD);
        let victim = if own >= 5 { 0 } else { 2 };
        assert_eq!(reserve_out(&mut scsi, 4, scsi_kind, 3, victim), ScsiStatus::GOOD);
        admin_queue.pump.turn();
        assert_eq!(admin_queue.end_of(event).1.result.get(), 0x80_0006);
        assert_eq!(access(&mut host), [reads, false], "type {own}");
    }
}
