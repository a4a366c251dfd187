//! Tests of the whole device server: unit attentions, errors, many units, random CDBs.

mod lun_maps;
mod plain;

use super::testing::{DeviceBench, TestNexus, TestResponse, answer, command, port, resizable};
use super::*;
use blockmux_volume::{Completion, IoError, MemVolume, Tag};
use proptest::prelude::*;
use std::sync::Arc;

const TUR: [u8; 6] = [0; 6];

#[test]
fn a_new_nexus_gets_one_power_on_unit_attention() {
    let bench = DeviceBench::new();
    let mut client = bench.fresh_client("a");
    client.run(&[0x12, 0, 0, 0, 36, 0]).good();
    client.run(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0]).good();
    assert_eq!(client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).check(), (6, 0x2900));
    client.run(&TUR).good();
    let mut other = bench.fresh_client("b");
    let sense = other.run(&[3, 0, 0, 0, 18, 0]).good();
    assert_eq!((sense[2], &sense[12..14]), (6, &[0x29, 0][..]));
    other.run(&TUR).good();
    assert_eq!(other.run(&[3, 1, 0, 0, 18, 0]).good(), [0x72, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_resize_is_reported_to_all_nexuses_but_the_one_that_noticed_it() {
    let (volume, set_size) = resizable(1 << 20);
    let bench = DeviceBench::over(volume);
    let (mut a, mut b) = (bench.client("a"), bench.client("b"));
    set_size(4 << 20);
    let capacity = a.run(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0]).good();
    assert_eq!(capacity, [0, 0, 0x1f, 0xff, 0, 0, 2, 0]);
    assert_eq!(b.run(&TUR).check(), (6, 0x2a09));
    set_size(2 << 20);
    bench.unit.volume_state.on_resize();
    assert_eq!(a.run(&TUR).check(), (6, 0x2a09));
    assert_eq!(b.run(&TUR).check(), (6, 0x2a09));
    assert_eq!(a.run(&[0x28, 0, 0, 0, 0x10, 0, 0, 0, 1, 0]).check(), (5, 0x2100));
}

#[test]
fn an_error_of_the_volume_ends_the_command_with_its_sense() {
    let mut client = DeviceBench::new().client("a");
    let (mut task, step) = client.server.begin(&command(Lun::new(0), &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], 0));
    assert!(matches!(step, TaskStep::Io { .. }));
    let step = client.server.on_io(&mut task, Completion { tag: Tag(0), result: Err(IoError::Medium) });
    let TaskStep::Done(response) = step else { panic!("{step:?}") };
    assert_eq!(answer(response).check(), (3, 0x1100));
}

#[test]
fn no_step_of_a_long_command_moves_much_at_once() {
    let mut client = DeviceBench::new().client("a");
    let (block, blocks) = ([5; 512], vec![5; 4 << 20]);
    // 4 MiB each, except for commands that take all data at once.
    let long: [(&[u8], &[u8]); 6] = [
        (&[0x41, 0, 0, 0, 0, 0, 0, 0x20, 0, 0], &block),
        (&[0x2f, 0, 0, 0, 0, 0, 0, 0x20, 0, 0], &[]),
        (&[0x2f, 2, 0, 0, 0, 0, 0, 0x20, 0, 0], &blocks),
        (&[0x2f, 6, 0, 0, 0, 0, 0, 0x20, 0, 0], &block),
        (&[0x8b, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0], &blocks),
        (&[0x2e, 2, 0, 0, 0, 0, 0, 0x20, 0, 0], &blocks),
    ];
    for (cdb, data) in long {
        let (mut task, mut step) = client.server.begin(&command(Lun::new(0), cdb, data.len()));
        let (mut sent, mut steps) = (0, 0);
        let response = loop {
            match step {
                TaskStep::Done(response) => break response,
                TaskStep::Io { ref io, .. } => {
                    let is_sent_whole = cdb[0] == 0x2e && io.op.is_write();
                    assert!(io.len <= 1 << 20 || is_sent_whole, "{cdb:x?}: {io:?}");
                    steps += 1;
                }
                _ => {}
            }
            step = client.turn(&mut task, step, data, &mut sent);
        };
        answer(response).good();
        assert!(steps >= 4, "{cdb:x?}");
    }
    assert_eq!(client.run(&[0x28, 0, 0, 0, 0x1f, 0xff, 0, 0, 2, 0]).good(), [[5; 512], [0; 512]].concat());
}

#[test]
fn every_piece_of_a_long_comparison_is_compared() {
    let mut client = DeviceBench::new().client("a");
    let mut blocks: Vec<u8> = (0..3 << 20).map(|at| (at / 511) as u8).collect();
    for cdb in [0x2e, 0x2f] {
        client.run_with(&[cdb, 2, 0, 0, 0, 7, 0, 0x18, 0, 0], &blocks).good();
    }
    for at in [0, (1 << 20) - 1, 1 << 20, (3 << 20) - 1] {
        blocks[at] ^= 1;
        let verify = [0x2f, 2, 0, 0, 0, 7, 0, 0x18, 0, 0];
        assert_eq!(client.run_with(&verify, &blocks).check(), (0xe, 0x1d00), "{at}");
        blocks[at] ^= 1;
    }
    // ORing the same data changes nothing.
    client.run_with(&[0x8b, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0x18, 0, 0, 0], &blocks).good();
    client.run_with(&[0x2f, 2, 0, 0, 0, 7, 0, 0x18, 0, 0], &blocks).good();
}

#[test]
fn a_read_only_unit_refuses_whatever_would_change_it() {
    let volume = Arc::new(MemVolume::new(1 << 20));
    let identity = UnitIdentity { read_only: true, ..UnitIdentity::of("a") };
    let bench = DeviceBench::around(LogicalUnit::new(identity, volume.clone()), volume);
    let mut client = bench.client("a");
    assert_eq!(client.run(&[0x1a, 8, 0x3f, 0, 4, 0]).good()[2], 0x90);
    let changes: [(&[u8], usize); 9] = [
        (&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], 512),
        (&[0x2e, 2, 0, 0, 0, 0, 0, 0, 1, 0], 512),
        (&[0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0], 512),
        (&[0x41, 8, 0, 0, 0, 0, 0, 0, 1, 0], 0),
        (&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], 24),
        (&[0x48, 2, 0, 0, 0, 0, 0, 0, 0, 0], 0),
        (&[0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0], 1024),
        (&[0x8b, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0], 512),
        (&[0x9c, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0], 512),
    ];
    for (cdb, len) in changes {
        assert_eq!(client.run_with(cdb, &vec![0; len]).check(), (7, 0x2700), "{cdb:x?}");
    }
    client.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).good();
}

#[test]
fn clear_task_set_ends_the_tasks_of_every_nexus() {
    let bench = DeviceBench::new();
    let (mut a, mut b) = (bench.client("a"), bench.client("b"));
    let (mut task, step) = a.server.begin(&command(Lun::new(0), &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], 512));
    let done = b.server.manage(TaskManagement::ClearTaskSet, Lun::new(0));
    assert_eq!(done, ManagementResponse::FunctionComplete);
    let TaskStep::Done(response) = a.turn(&mut task, step, &[0; 512], &mut 0) else {
        panic!("it is aborted")
    };
    assert_eq!(answer(response).status, ScsiStatus::TASK_ABORTED);
    a.run(&TUR).good();
    let missing = b.server.manage(TaskManagement::LogicalUnitReset, Lun::new(1));
    assert_eq!(missing, ManagementResponse::IncorrectLogicalUnitNumber);
}

#[test]
fn a_target_may_have_a_unit_at_every_lun() {
    let mut target = ScsiTarget::new("iqn.2026-11.t:t", vec![port(1)]);
    let numbers: Vec<u16> = (0..256).chain([300, 0x3fff]).collect();
    for &number in &numbers {
        let unit = LogicalUnit::new(UnitIdentity::of(&number.to_string()), Arc::new(MemVolume::new(1 << 16)));
        target = target.with_unit(number, VolumeId(number.into()), unit);
    }
    let nexus = ItNexus::iscsi("iqn.2026-11.i:a", [0; 6], port(1));
    let mut server = DeviceServer::new(Arc::new(target), nexus);
    for &number in &numbers {
        let read = command(Lun::new(number), &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], 0);
        let (_, step) = server.begin(&read);
        assert!(
            matches!(step, TaskStep::Done(response) if response.sense.is_some()),
            "the power on unit attention"
        );
        let (_, step) = server.begin(&read);
        assert!(matches!(step, TaskStep::Io { volume: VolumeId(id), .. } if id == u32::from(number)));
    }
    let list = [0xa0, 0, 2, 0, 0, 0, 0, 0, 0x10, 0, 0, 0];
    let (_, step) = server.begin(&command(Lun::new(0), &list, 0));
    let TaskStep::Done(response) = step else { panic!("{step:?}") };
    let luns = response.data_in.to_vec();
    assert_eq!(luns.len(), (numbers.len() + 2) * 8);
    assert_eq!(
        luns[257 * 8..],
        [[0x41, 0x2c], [0x7f, 0xff], [0xc1, 1]].map(|[a, b]| [a, b, 0, 0, 0, 0, 0, 0]).concat()
    );
}

/// Executes a command to its end, which must come.
fn drive(client: &mut TestNexus, cdb: &[u8], data_out: &[u8]) -> TestResponse {
    let (mut task, mut step) = client.server.begin(&command(Lun::new(0), cdb, data_out.len()));
    let mut sent = 0;
    for _ in 0..10_000 {
        match step {
            TaskStep::Done(response) => return answer(response),
            next => step = client.turn(&mut task, next, data_out, &mut sent),
        }
    }
    panic!("{cdb:x?} does not end");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_cdb_ends_with_a_response(
        opcode in prop::sample::select(table::TABLE.iter().map(|entry| entry.opcode.0).chain([0x99, 0xff]).collect::<Vec<u8>>()),
        low in prop::bool::weighted(0.7),
        rest in prop::collection::vec(prop_oneof![Just(0), 0..16_u8, any::<u8>()], 0..32),
        data_out in prop::collection::vec(prop_oneof![3 => Just(0), 1 => any::<u8>()], 0..2048),
    ) {
        let bench = DeviceBench::over(Arc::new(MemVolume::new(256 << 10)));
        let mut client = bench.client("a");
        let mut cdb = vec![opcode];
        cdb.extend(rest.iter().take(31).map(|byte| if low { byte & 0x1f } else { *byte }));
        let answer = drive(&mut client, &cdb, &data_out);
        prop_assert_eq!(answer.status == ScsiStatus::CHECK_CONDITION, answer.sense.is_some());
        prop_assert!(!bench.unit.volume_state.is_locked(0, u64::MAX));
    }
}
