//! PERSISTENT RESERVE IN and OUT with several initiators on one unit.

use super::report::full_status;
use crate::scsi::device::testing::{DeviceBench, TestNexus, answer, command};
use crate::scsi::{LogicalUnit, Lun, ScsiStatus, TaskStep, UnitIdentity};
use crate::volume_state::{
    Commit, Registrant, Registration, Reservations, SharedState, StateGeneration, StoredState, TestCluster,
    VolumeState,
};
use blockmux_volume::MemVolume;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

fn list(key: u64, other_key: u64, flags: u8) -> Vec<u8> {
    let mut list = [key.to_be_bytes(), other_key.to_be_bytes()].concat();
    list.extend([0, 0, 0, 0, flags, 0, 0, 0]);
    list
}

fn out(client: &mut TestNexus, action: u8, kind: u8, list: &[u8]) -> ScsiStatus {
    let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, list.len() as u8, 0];
    client.run_with(&cdb, list).status
}

fn register(client: &mut TestNexus, key: u64) {
    assert_eq!(out(client, 6, 0, &list(0, key, 0)), ScsiStatus::GOOD);
}

fn keys(client: &mut TestNexus) -> Vec<u8> {
    client.run(&[0x5e, 0, 0, 0, 0, 0, 0, 1, 0, 0]).good()
}

const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];

#[test]
fn keys_are_read_with_their_generation() {
    let bench = DeviceBench::new();
    let (mut a, mut b) = (bench.client("a"), bench.client("b"));
    assert_eq!(keys(&mut a), [0; 8]);
    register(&mut a, 1);
    register(&mut b, 2);
    assert_eq!(keys(&mut a), [0, 0, 0, 2, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2]);
    assert_eq!(a.run(&[0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0]).good(), [0, 0, 0, 2, 0, 0, 0, 16]);
    assert_eq!(out(&mut a, 0, 0, &list(0, 9, 0)), ScsiStatus::RESERVATION_CONFLICT);
    assert_eq!(out(&mut a, 0, 0, &list(1, 0, 0)), ScsiStatus::GOOD);
    assert_eq!(keys(&mut a)[..8], [0, 0, 0, 3, 0, 0, 0, 8]);
    for action in 4..32 {
        assert_eq!(a.run(&[0x5e, action, 0, 0, 0, 0, 0, 1, 0, 0]).check(), (5, 0x2400));
    }
}

#[test]
fn a_reservation_excludes_others_according_to_its_type() {
    let table =
        [(1, [true, false], [true, false]), (3, [false; 2], [false; 2]), (5, [true; 2], [true, false])];
    let table = table.into_iter().chain([
        (6, [true; 2], [false; 2]),
        (7, [true; 2], [true, false]),
        (8, [true; 2], [false; 2]),
    ]);
    for (kind, registered, stranger) in table {
        let bench = DeviceBench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        register(&mut a, 1);
        register(&mut b, 2);
        assert_eq!(out(&mut a, 1, kind, &list(1, 0, 0)), ScsiStatus::GOOD);
        let access = |client: &mut TestNexus| {
            let read = client.run(&READ).status == ScsiStatus::GOOD;
            [read, client.run_with(&WRITE, &[0; 512]).status == ScsiStatus::GOOD]
        };
        assert_eq!(access(&mut a), [true; 2], "type {kind}");
        assert_eq!(access(&mut b), registered, "type {kind}");
        assert_eq!(out(&mut b, 0, 0, &list(2, 0, 0)), ScsiStatus::GOOD);
        assert_eq!(access(&mut b), stranger, "type {kind}");
        b.run(&[0; 6]).good();
        let held = a.run(&[0x5e, 1, 0, 0, 0, 0, 0, 1, 0, 0]).good();
        assert_eq!((held[15], held[21]), (if kind >= 7 { 0 } else { 1 }, kind));
        assert_eq!(out(&mut a, 2, kind, &list(1, 0, 0)), ScsiStatus::GOOD);
        assert_eq!(access(&mut b), [true; 2]);
    }
}

/// Otherwise an initiator with read access would assume that the disk has no write cache.
#[test]
fn read_access_suffices_for_mode_sense_but_not_mode_select() {
    let bench = DeviceBench::new();
    let (mut a, mut b) = (bench.client("a"), bench.client("b"));
    register(&mut a, 1);
    assert_eq!(out(&mut a, 1, 1, &list(1, 0, 0)), ScsiStatus::GOOD);
    b.run(&[0x1a, 0, 0x3f, 0, 255, 0]).good();
    b.run(&[0x5a, 0, 0x3f, 0, 0, 0, 0, 0, 255, 0]).good();
    assert_eq!(b.run_with(&[0x15, 0x10, 0, 0, 4, 0], &[0; 4]).status, ScsiStatus::RESERVATION_CONFLICT);
}

#[test]
fn every_command_conflicts_with_exclusive_access_as_the_standard_specifies() {
    let bench = DeviceBench::new();
    let (mut a, mut b) = (bench.client("a"), bench.client("b"));
    register(&mut a, 1);
    assert_eq!(out(&mut a, 1, 3, &list(1, 0, 0)), ScsiStatus::GOOD);
    let allowed: [&[u8]; 9] = [
        &[0; 6],
        &[0x12, 0, 0, 0, 36, 0],
        &[0x03, 0, 0, 0, 18, 0],
        &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0],
        &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0],
        &[0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0],
        &[0x1b, 0, 0, 0, 1, 0],
        &[0x1e, 0, 0, 0, 0, 0],
    ];
    for cdb in allowed {
        b.run(cdb).good();
    }
    let refused: [&[u8]; 12] = [
        &READ,
        &WRITE,
        &[0x1a, 0, 0x3f, 0, 255, 0],
        &[0x15, 0x10, 0, 0, 4, 0],
        &[0x1b, 0, 0, 0, 0, 0],
        &[0x1e, 0, 0, 0, 1, 0],
        &[0x2f, 0, 0, 0, 0, 0, 0, 0, 1, 0],
        &[0x34, 0, 0, 0, 0, 0, 0, 0, 1, 0],
        &[0x35, 0, 0, 0, 0, 0, 0, 0, 1, 0],
        &[0x42, 0, 0, 0, 0, 0, 0, 0, 8, 0],
        &[0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0],
        &[0x16, 0, 0, 0, 0, 0],
    ];
    for cdb in refused {
        assert_eq!(b.run(cdb).status, ScsiStatus::RESERVATION_CONFLICT, "{cdb:x?}");
    }
}

#[test]
fn preempt_notifies_the_victim_and_preempt_and_abort_ends_its_tasks() {
    let bench = DeviceBench::new();
    let (mut a, mut b) = (bench.client("a"), bench.client("b"));
    register(&mut a, 1);
    register(&mut b, 2);
    assert_eq!(out(&mut a, 1, 3, &list(1, 0, 0)), ScsiStatus::GOOD);
    let (mut task, step) = a.server.begin(&command(Lun::new(0), &WRITE, 512));
    assert!(matches!(step, TaskStep::DataOut { len: 512 }));
    assert_eq!(out(&mut b, 5, 3, &list(2, 1, 0)), ScsiStatus::GOOD);
    let TaskStep::Done(response) = a.turn(&mut task, step, &[0; 512], &mut 0) else {
        panic!("it is aborted")
    };
    assert_eq!(answer(response).status, ScsiStatus::TASK_ABORTED);
    assert_eq!(a.run(&[0; 6]).check(), (6, 0x2a05));
    assert_eq!(a.run(&READ).status, ScsiStatus::RESERVATION_CONFLICT);
    b.run(&READ).good();
}

#[test]
fn full_status_names_every_registrant_and_the_holder() {
    let bench = DeviceBench::new();
    let (mut a, mut b) = (bench.client("a"), bench.client("b"));
    register(&mut a, 1);
    register(&mut b, 2);
    assert_eq!(out(&mut b, 1, 5, &list(2, 0, 0)), ScsiStatus::GOOD);
    let status = a.run(&[0x5e, 3, 0, 0, 0, 0, 0, 4, 0, 0]).good();
    let id = a.server.nexus().initiator.clone();
    let len = 24 + id.len();
    assert_eq!(status.len(), 8 + 2 * len);
    assert_eq!((status[15], &status[20..22], &status[26..28]), (1, &[0, 0][..], &[0, 1][..]));
    assert_eq!(status[32..8 + len], *id);
    assert_eq!(status[8 + len + 12..8 + len + 14], [1, 5]);
}

#[test]
fn removed_ports_have_unique_identifiers() {
    let ports: BTreeMap<Arc<str>, u16> = [("here".into(), 1), ("far".into(), u16::MAX)].into();
    let registered = |port: &str| Registration {
        who: Registrant { initiator: vec![0; 24].into(), port: port.into() },
        key: 1,
    };
    let registrations = ["here", "gone", "lost", "gone", "far"].map(registered).into();
    let status = full_status(&Reservations { registrations, ..Reservations::default() }, &ports);
    let ids = status.chunks(48).map(|descriptor| u16::from_be_bytes([descriptor[18], descriptor[19]]));
    assert_eq!(ids.collect::<Vec<_>>(), [1, 0xfffe, 0xfffd, 0xfffe, 0xffff]);
}

#[test]
fn register_and_move_hands_the_reservation_over() {
    let bench = DeviceBench::new();
    let (mut a, mut b) = (bench.client("a"), bench.client("b"));
    register(&mut a, 1);
    assert_eq!(out(&mut a, 1, 3, &list(1, 0, 0)), ScsiStatus::GOOD);
    let id = b.server.nexus().initiator.clone();
    let mut to = [1_u64.to_be_bytes(), 7_u64.to_be_bytes()].concat();
    to.extend([0, 2, 0, 1]);
    to.extend((id.len() as u32).to_be_bytes());
    to.extend(&*id);
    assert_eq!(out(&mut a, 7, 0, &to), ScsiStatus::GOOD);
    b.run(&READ).good();
    assert_eq!(a.run(&READ).status, ScsiStatus::RESERVATION_CONFLICT);
    to[19] = 9;
    assert_eq!(out(&mut b, 7, 0, &to), ScsiStatus::CHECK_CONDITION);
    // Nor can it be moved to its own initiator port, through either target port.
    for port in [1, 2] {
        (to[7], to[19]) = (7, port);
        let cdb = [0x5f, 7, 0, 0, 0, 0, 0, 0, to.len() as u8, 0];
        assert_eq!(b.run_with(&cdb, &to).check(), (5, 0x2600), "port {port}");
    }
    to[24] = 0x46;
    assert_eq!(out(&mut b, 7, 0, &to), ScsiStatus::CHECK_CONDITION, "another protocol");
}

#[test]
fn a_listed_node_stands_for_its_logged_in_ports() {
    let bench = DeviceBench::new();
    let (mut a, mut b) = (bench.client("a"), bench.client("b"));
    let mut register = list(0, 5, 8);
    let node = b"iqn.2026-11.i:b\0\0\0\0\0";
    register.extend([0, 0, 0, 24, 5, 0, 0, 20]);
    register.extend(node);
    assert_eq!(out(&mut a, 0, 0, &register), ScsiStatus::GOOD);
    assert_eq!(out(&mut a, 1, 5, &list(5, 0, 0)), ScsiStatus::GOOD);
    b.run_with(&WRITE, &[0; 512]).good();
    assert_eq!(out(&mut a, 6, 0, &list(0, 0, 0)), ScsiStatus::GOOD);
    register[32 + 14] = b'c';
    assert_eq!(out(&mut a, 0, 0, &register), ScsiStatus::CHECK_CONDITION, "no known port of i:c");
}

#[test]
fn read_access_suffices_for_information_commands() {
    let bench = DeviceBench::new();
    let (mut a, mut b) = (bench.client("a"), bench.client("b"));
    register(&mut a, 1);
    assert_eq!(out(&mut a, 1, 1, &list(1, 0, 0)), ScsiStatus::GOOD);
    b.run(&[0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]).good();
    b.run(&[0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0]).good();
}

#[test]
fn scope_and_type_of_a_preemption_apply_if_it_takes_the_reservation_over() {
    let bench = DeviceBench::new();
    let (mut a, mut b) = (bench.client("a"), bench.client("b"));
    register(&mut a, 1);
    register(&mut b, 2);
    assert_eq!(out(&mut a, 1, 3, &list(1, 0, 0)), ScsiStatus::GOOD);
    let preempt = |kind| [0x5f, 4, kind, 0, 0, 0, 0, 0, 24, 0];
    for kind in [0, 2, 0x13] {
        assert_eq!(b.run_with(&preempt(kind), &list(2, 1, 0)).check(), (5, 0x2400), "{kind}");
        assert_eq!(b.run_with(&preempt(kind), &list(9, 1, 0)).status, ScsiStatus::RESERVATION_CONFLICT);
    }
    assert_eq!(out(&mut a, 4, 0x10, &list(1, 2, 0)), ScsiStatus::GOOD);
    assert_eq!(keys(&mut a).len(), 8 + 8);
}

#[test]
fn others_are_registered_by_spec_i_pt_and_all_target_ports() {
    let bench = DeviceBench::new();
    let (mut a, b) = (bench.client("a"), bench.client("b"));
    let id = b.server.nexus().initiator.clone();
    let mut both = list(0, 5, 8 | 4);
    both.extend((id.len() as u32).to_be_bytes());
    both.extend(&*id);
    assert_eq!(out(&mut a, 0, 0, &both), ScsiStatus::GOOD);
    assert_eq!(keys(&mut a).len(), 8 + 4 * 8);
    assert_eq!(out(&mut a, 6, 0, &list(0, 5, 8)), ScsiStatus::CHECK_CONDITION);
    let mut long = list(5, 5, 8);
    long.extend([0, 0, 1, 4, 0x45, 0, 1, 0]);
    long.resize(24 + 4 + 0x104, b'x');
    let cdb = [0x5f, 0, 0, 0, 0, 0, 0, 1, 0x20, 0];
    assert_eq!(a.run_with(&cdb, &long).check(), (5, 0x2600), "longer than any TransportID");
}

#[test]
fn iscsi_and_srp_initiators_share_one_table_of_reservations() {
    let bench = DeviceBench::new();
    let (mut iscsi, mut srp) = (bench.client("a"), bench.srp_client([7; 16]));
    register(&mut srp, 1);
    assert_eq!(out(&mut srp, 1, 3, &list(1, 0, 0)), ScsiStatus::GOOD);
    assert_eq!(iscsi.run(&READ).status, ScsiStatus::RESERVATION_CONFLICT);
    srp.run(&READ).good();
    register(&mut iscsi, 2);
    let status = iscsi.run(&[0x5e, 3, 0, 0, 0, 0, 0, 4, 0, 0]).good();
    let id = [&[4, 0, 0, 0, 0, 0, 0, 0][..], &[7; 16]].concat();
    assert_eq!((&status[20..22], &status[32..56]), (&[1, 3][..], &id[..]), "the SRP port holds it");
    assert_eq!(status[56 + 24] & 0x0f, 5, "iSCSI");
    assert_eq!(out(&mut iscsi, 4, 3, &list(2, 1, 0)), ScsiStatus::GOOD);
    assert_eq!(srp.run(&[0; 6]).check(), (6, 0x2a05));
    assert_eq!(srp.run(&READ).status, ScsiStatus::RESERVATION_CONFLICT);
    iscsi.run(&READ).good();
}

#[test]
fn parameter_lists_name_srp_ports() {
    let bench = DeviceBench::new();
    let (mut a, mut b) = (bench.srp_client([7; 16]), bench.srp_client([8; 16]));
    let id = [&[4, 0, 0, 0, 0, 0, 0, 0][..], &[8; 16]].concat();
    let with = |list: Vec<u8>, id: &[u8]| [&list, &(id.len() as u32).to_be_bytes()[..], id].concat();
    let other_protocol = [&[0x45, 0, 0, 20][..], &[b'x'; 20]].concat();
    for wrong in [&id[..23], &other_protocol] {
        assert_eq!(out(&mut a, 0, 0, &with(list(0, 5, 8), wrong)), ScsiStatus::CHECK_CONDITION);
    }
    assert_eq!(out(&mut a, 0, 0, &with(list(0, 5, 8), &id)), ScsiStatus::GOOD);
    assert_eq!(keys(&mut a).len(), 8 + 2 * 8);
    assert_eq!(out(&mut b, 1, 3, &list(5, 0, 0)), ScsiStatus::GOOD, "SPEC_I_PT has registered it");
    assert_eq!(out(&mut b, 2, 3, &list(5, 0, 0)), ScsiStatus::GOOD);
    assert_eq!(out(&mut b, 0, 0, &list(5, 0, 0)), ScsiStatus::GOOD);
    assert_eq!(out(&mut a, 1, 3, &list(5, 0, 0)), ScsiStatus::GOOD);
    // REGISTER AND MOVE with UNREG, by relative target port 1.
    let mut to = [5_u64.to_be_bytes(), 7_u64.to_be_bytes()].concat();
    to.extend([0, 2, 0, 1]);
    assert_eq!(out(&mut a, 7, 0, &with(to, &id)), ScsiStatus::GOOD);
    b.run(&READ).good();
    assert_eq!(a.run(&READ).status, ScsiStatus::RESERVATION_CONFLICT);
}

#[test]
fn invalid_persistent_reserve_parameters_are_rejected() {
    let mut a = DeviceBench::new().client("a");
    register(&mut a, 1);
    for (action, kind) in [(1, 2), (1, 0), (1, 0x13), (8, 0), (9, 0)] {
        assert_eq!(out(&mut a, action, kind, &list(1, 0, 0)), ScsiStatus::CHECK_CONDITION, "{action} {kind}");
    }
    assert_eq!(a.run_with(&[0x5f, 0, 0, 0, 0, 0, 0, 0, 23, 0], &[0; 24]).check(), (5, 0x1a00));
    assert_eq!(a.run_with(&[0x5f, 1, 1, 0, 0, 0, 0, 0, 25, 0], &[0; 25]).check(), (5, 0x1a00));
    assert_eq!(a.run_with(&[0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0], &list(0, 1, 1)).check(), (5, 0x2600));
    assert_eq!(a.run(&[0x5e, 2, 0, 0, 0, 0, 0, 0, 8, 0]).good(), [0, 8, 0x0c, 0x80, 0xea, 1, 0, 0]);
}

#[derive(Default)]
struct Shelf {
    images: Mutex<Vec<Vec<u8>>>,
    is_slow: Mutex<bool>,
    is_full: Mutex<bool>,
}

impl SharedState for Shelf {
    fn propose(&self, _expected: StateGeneration, image: &[u8]) -> StateGeneration {
        let mut images = self.images.lock().unwrap();
        images.push(image.to_vec());
        StateGeneration(images.len() as u64)
    }

    fn outcome(&self, _proposal: StateGeneration) -> Option<Commit> {
        let outcome = if *self.is_full.lock().unwrap() { Commit::Failed } else { Commit::Committed };
        (!*self.is_slow.lock().unwrap()).then_some(outcome)
    }
}

#[test]
fn a_registration_that_cannot_be_saved_is_undone() {
    let (shelf, volume) = (Arc::new(Shelf::default()), Arc::new(MemVolume::new(1 << 20)));
    let volume_state =
        VolumeState::with_shared_state(volume.clone(), shelf.clone(), &StoredState::default()).unwrap();
    let bench = DeviceBench::around(LogicalUnit::over(UnitIdentity::of("a"), &volume_state), volume);
    let (mut a, mut b) = (bench.client("a"), bench.client("b"));
    assert_eq!(out(&mut a, 6, 0, &list(0, 1, 1)), ScsiStatus::GOOD);
    *shelf.is_full.lock().unwrap() = true;
    let reserve = a.run_with(&[0x5f, 1, 3, 0, 0, 0, 0, 0, 24, 0], &list(1, 0, 0));
    assert_eq!(reserve.check(), (4, 0x0c00));
    assert_eq!(b.run(&[0x5e, 1, 0, 0, 0, 0, 0, 0, 8, 0]).good(), [0, 0, 0, 1, 0, 0, 0, 0]);
    b.run_with(&WRITE, &[0; 512]).good();
    *shelf.is_full.lock().unwrap() = false;
    assert_eq!(out(&mut a, 1, 3, &list(1, 0, 0)), ScsiStatus::GOOD);
    assert_eq!(b.run(&READ).status, ScsiStatus::RESERVATION_CONFLICT);
}

#[test]
fn an_owner_that_is_shut_out_reports_no_keys_of_before() {
    let cluster = TestCluster::default();
    let process = cluster.process();
    let unit = LogicalUnit::over(UnitIdentity::of("a"), &process);
    let bench = DeviceBench::around(unit, process.volume().clone());
    cluster.promote(&process);
    let mut a = bench.client("a");
    register(&mut a, 1);
    assert_eq!(keys(&mut a)[8..], 1u64.to_be_bytes());
    // Whether another process has the volume is not known.
    cluster.fail(true);
    let read = [0x5e, 0, 0, 0, 0, 0, 0, 1, 0, 0];
    assert_eq!(a.run(&read).check(), (4, 0x0c00));
    cluster.fail(false);
    cluster.hang(true);
    let (mut task, step) = a.server.begin(&command(Lun::new(0), &read, 0));
    assert!(matches!(step, TaskStep::Wait) && matches!(a.server.resume(&mut task), TaskStep::Wait));
    assert!(process.lose());
    let TaskStep::Done(end) = a.server.resume(&mut task) else { panic!("it goes on") };
    assert_eq!(answer(end).check(), (2, 0x040b), "another path has them");
}

#[test]
fn persistent_registrations_are_saved_before_the_response_and_restored() {
    let shelf = Arc::new(Shelf::default());
    let volume = Arc::new(MemVolume::new(1 << 20));
    let bench = |image: &[u8]| {
        let stored = StoredState { image: image.to_vec(), ..StoredState::default() };
        let volume_state = VolumeState::with_shared_state(volume.clone(), shelf.clone(), &stored).unwrap();
        DeviceBench::around(LogicalUnit::over(UnitIdentity::of("a"), &volume_state), volume.clone())
    };
    let first = bench(&[]);
    let mut a = first.client("a");
    assert_eq!(out(&mut a, 6, 0, &list(0, 1, 1)), ScsiStatus::GOOD);
    *shelf.is_slow.lock().unwrap() = true;
    let cdb = [0x5f, 1, 3, 0, 0, 0, 0, 0, 24, 0];
    let (mut task, step) = a.server.begin(&command(Lun::new(0), &cdb, 24));
    assert!(matches!(a.turn(&mut task, step, &list(1, 0, 0), &mut 0), TaskStep::Wait));
    assert!(matches!(a.server.resume(&mut task), TaskStep::Wait));
    *shelf.is_slow.lock().unwrap() = false;
    assert!(
        matches!(a.server.resume(&mut task), TaskStep::Done(response) if response.status == ScsiStatus::GOOD)
    );
    let image = shelf.images.lock().unwrap().last().cloned().unwrap();
    let second = bench(&image);
    assert_eq!(second.client("b").run(&READ).status, ScsiStatus::RESERVATION_CONFLICT);
    let mut a = second.client("a");
    a.run(&READ).good();
    assert_eq!(a.run(&[0x5e, 2, 0, 0, 0, 0, 0, 0, 8, 0]).good()[2..4], [0x0d, 0x81]);
    assert_eq!(out(&mut a, 6, 0, &list(0, 1, 0)), ScsiStatus::GOOD);
    assert_eq!(shelf.images.lock().unwrap().last().unwrap(), &[]);
}

/// LIO read beyond a name without NUL (CVE-2026-72084, CVE-2026-72083), and had a wrong error path
/// for SPEC_I_PT (CVE-2025-38399).
#[test]
fn a_transport_id_that_does_not_end_within_its_list_registers_nobody() {
    let bench = DeviceBench::new();
    let (mut a, b) = (bench.client("a"), bench.client("b"));
    let id = b.server.nexus().initiator.clone();
    let with = |declared: usize, id: &[u8]| {
        [list(0, 5, 8), (declared as u32).to_be_bytes().to_vec(), id.to_vec()].concat()
    };
    let mut cases = vec![with(u32::MAX as usize, &id)];
    for len in 1..id.len() {
        cases.extend([with(len, &id[..len]), with(id.len(), &id[..len]), with(len, &id)]);
    }
    let mut unended = id.to_vec();
    unended[4..].iter_mut().filter(|byte| **byte == 0).for_each(|byte| *byte = b'x');
    let mut longer = id.to_vec();
    longer[2..4].copy_from_slice(&u16::MAX.to_be_bytes());
    cases.extend([with(id.len(), &longer), with(2 * id.len(), &[&id[..], &longer].concat())]);
    cases.push(with(id.len(), &unended));
    for case in cases {
        assert_eq!(out(&mut a, 0, 0, &case), ScsiStatus::CHECK_CONDITION, "{case:x?}");
        assert_eq!(keys(&mut a).len(), 8, "{case:x?}");
    }
    assert_eq!(out(&mut a, 0, 0, &with(id.len(), &id)), ScsiStatus::GOOD);
}
