//! LUN maps of single initiators, and write protection of their LUNs.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use super::*;
use crate::exports::VolumeId;
use std::collections::BTreeMap;

const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const REPORT_LUNS: [u8; 12] = [0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
const MODE_SENSE: [u8; 6] = [0x1a, 8, 0x3f, 0, 255, 0];
const WRITE_PROTECTED: (u8, u16) = (7, 0x2700);
const MODE_PARAMETERS_CHANGED: (u8, u16) = (6, 0x2a01);
const LUNS_CHANGED: (u8, u16) = (6, 0x3f0e);
const POWER_ON: (u8, u16) = (6, 0x2900);

fn unit(name: &str) -> Arc<LogicalUnit> {
    LogicalUnit::new(UnitIdentity::of(name), Arc::new(MemVolume::new(8 << 20)))
}

fn mapping(volume: u32, unit: &Arc<LogicalUnit>, is_read_only: bool) -> LunMapping {
    LunMapping { volume: VolumeId(volume), unit: unit.clone(), is_read_only }
}

/// A view of the target with its own LUNs.
fn view<const N: usize>(luns: [(u16, LunMapping); N]) -> Arc<ScsiTarget> {
    let view = ScsiTarget::new("iqn.2026-11.t:t", vec![port(1)]);
    view.set_luns(&ShownLuns::Own, &luns.into());
    Arc::new(view)
}

/// A session with a view, with its unit attentions pending.
fn login(bench: &DeviceBench, view: &Arc<ScsiTarget>, name: &str) -> TestNexus {
    let nexus = ItNexus::iscsi(&format!("iqn.2026-11.i:{name}"), [0, 0, 0, 0, 0, 1], port(1));
    TestNexus { server: DeviceServer::new(view.clone(), nexus), ..bench.fresh_client("unused") }
}

fn luns(client: &mut TestNexus) -> Vec<u8> {
    client.run(&REPORT_LUNS).good()[8..].chunks(8).map(|lun| lun[1]).collect()
}

/// Serial number of the unit at a LUN; `None` if there is none.
fn serial(client: &mut TestNexus, lun: u16) -> Option<Vec<u8>> {
    let answer = client.run_on(Lun::new(lun), &[0x12, 1, 0x80, 0, 255, 0], &[]);
    (answer.sense.is_none()).then(|| answer.good()[4..].to_vec())
}

#[test]
fn initiators_reach_volumes_through_their_own_luns_only() {
    let bench = DeviceBench::new();
    let (x, y) = (&bench.unit, unit("y"));
    let [of_a, of_b] =
        [view([(0, mapping(0, x, false)), (5, mapping(1, &y, false))]), view([(0, mapping(1, &y, false))])];
    let (mut a, mut b) = (login(&bench, &of_a, "a"), login(&bench, &of_b, "b"));
    assert_eq!((luns(&mut a), luns(&mut b)), (vec![0, 5], vec![0]));
    let own = |unit: &LogicalUnit| Some(unit.identity.serial.clone().into_bytes());
    assert_eq!([0, 5].map(|lun| serial(&mut a, lun)), [own(x), own(&y)]);
    assert_eq!([0, 5].map(|lun| serial(&mut b, lun)), [own(&y), None]);
    let tests = [a.run(&TUR), a.run_on(Lun::new(5), &TUR, &[]), b.run(&TUR)];
    assert_eq!(tests.map(TestResponse::check), [POWER_ON; 3]);
    assert_eq!(b.run_on(Lun::new(5), &TUR, &[]).check(), (5, 0x2500));
    let reset =
        |client: &mut TestNexus, lun| client.server.manage(TaskManagement::LogicalUnitReset, Lun::new(lun));
    assert_eq!(reset(&mut b, 5), ManagementResponse::IncorrectLogicalUnitNumber);
    assert_eq!(reset(&mut b, 0), ManagementResponse::FunctionComplete);
    a.run(&TUR).good();
    assert_eq!(a.run_on(Lun::new(5), &TUR, &[]).check(), (6, 0x2903));
    assert_eq!(b.run(&TUR).check(), (6, 0x2903));
    // There is one reservation for the volume, whatever its LUN.
    a.run_on(Lun::new(5), &[0x16, 0, 0, 0, 0, 0], &[]).good();
    assert_eq!(b.run(&READ).status, ScsiStatus::RESERVATION_CONFLICT);
}

/// Every command that changes the volume of the unit to which it is sent, with its data.
fn changes() -> Vec<(Vec<u8>, Vec<u8>)> {
    let block = vec![1; 512];
    let cdb = |opcode: u8, len: usize, blocks_at: usize| {
        let mut cdb = vec![0; len];
        (cdb[0], cdb[blocks_at]) = (opcode, 1);
        cdb
    };
    let with = |cdb: Vec<u8>, data: &[u8]| (cdb, data.to_vec());
    let mut all: Vec<_> = [(0x0a, 6, 4), (0x2a, 10, 8), (0xaa, 12, 9), (0x8a, 16, 13)]
        .into_iter()
        .chain([(0x2e, 10, 8), (0xae, 12, 9), (0x8e, 16, 13), (0x41, 10, 8), (0x93, 16, 13)])
        .chain([(0x8b, 16, 13), (0x9c, 16, 13)])
        .map(|(opcode, len, blocks_at)| with(cdb(opcode, len, blocks_at), &block))
        .collect();
    all.push(with(cdb(0x89, 16, 13), &[1; 1024]));
    let unmap = [&[0, 22, 0, 16, 0, 0, 0, 0][..], &[0; 8], &[0, 0, 0, 1, 0, 0, 0, 0]].concat();
    all.push(with(vec![0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &unmap));
    // WRITE USING TOKEN with the token of zeroes.
    let mut token = vec![0; 536];
    token[..2].copy_from_slice(&550_u16.to_be_bytes());
    token[16..24].copy_from_slice(&[0xff, 0xff, 0, 1, 0, 0, 1, 0xf8]);
    token[535] = 16;
    let range = [&[0; 8][..], &1_u32.to_be_bytes(), &[0; 4]].concat();
    token.extend(range);
    let mut using = vec![0x83, 0x11, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    using[10..14].copy_from_slice(&(token.len() as u32).to_be_bytes());
    all.push((using, token));
    all.push(with(vec![0x48, 1, 0, 0, 0, 0, 0, 0, 6, 0], &[1, 0, 0, 2, 1, 2]));
    all.push(with(vec![0x48, 2, 0, 0, 0, 0, 0, 0, 0, 0], &[]));
    all.push(with(vec![0x04, 0, 0, 0, 0, 0], &[]));
    all
}

#[test]
fn a_write_protected_lun_refuses_every_command_that_changes_the_volume() {
    let bench = DeviceBench::new();
    let protected = view([(3, mapping(0, &bench.unit, true))]);
    let (mut reader, mut writer) = (login(&bench, &protected, "a"), bench.client("b"));
    assert_eq!(reader.run_on(Lun::new(3), &TUR, &[]).check(), POWER_ON);
    for (cdb, data) in changes() {
        let name = format!("{cdb:x?}");
        assert_eq!(reader.run_on(Lun::new(3), &cdb, &data).check(), WRITE_PROTECTED, "{name}");
        let answer = writer.run_waiting(&cdb, &data);
        assert_eq!((answer.status, answer.sense), (ScsiStatus::GOOD, None), "{name}");
    }
    let exit = [0x48, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(reader.run_on(Lun::new(3), &exit, &[]).check(), WRITE_PROTECTED);
}

#[test]
fn a_write_protected_lun_can_be_read_and_reserved_and_reports_its_protection() {
    let bench = DeviceBench::new();
    let protected = view([(0, mapping(0, &bench.unit, true))]);
    let (mut reader, mut writer) = (login(&bench, &protected, "a"), bench.client("b"));
    assert_eq!(reader.run(&TUR).check(), POWER_ON);
    writer.run_with(&WRITE, &[7; 512]).good();
    assert_eq!(reader.run(&READ).good(), [7; 512]);
    let is_protected = |client: &mut TestNexus| {
        let ten = [0x5a, 8, 0x3f, 0, 0, 0, 0, 0, 255, 0];
        [client.run(&MODE_SENSE).good()[2], client.run(&ten).good()[3]].map(|flags| flags & 0x80 != 0)
    };
    assert_eq!((is_protected(&mut reader), is_protected(&mut writer)), ([true; 2], [false; 2]));
    // SYNCHRONIZE CACHE changes nothing.
    reader.run(&[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0]).good();
    let mut list = [0; 24];
    list[15] = 1;
    reader.run_with(&[0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list).good();
    (list[7], list[15]) = (1, 0);
    reader.run_with(&[0x5f, 1, 1, 0, 0, 0, 0, 0, 24, 0], &list).good();
    assert_eq!(writer.run_with(&WRITE, &[8; 512]).status, ScsiStatus::RESERVATION_CONFLICT);
    assert_eq!(reader.run_with(&WRITE, &[9; 512]).check(), WRITE_PROTECTED, "also for the holder");
}

/// EXTENDED COPY of a block between units with these names, by their NAA designators.
fn copy(from: &LogicalUnit, to: &LogicalUnit) -> (Vec<u8>, Vec<u8>) {
    let mut list = vec![1, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 0];
    for unit in [from, to] {
        let end = list.len() + 32;
        list.extend([0xe4, 0, 0, 0, 1, 3, 0, 8]);
        list.extend(unit.identity.designators[0].bytes());
        list.resize(end - 2, 0);
        list.extend([2, 0]);
    }
    list.extend([2, 0, 0, 0x18, 0, 0, 0, 1, 0, 0, 0, 1]);
    list.extend([0; 16]);
    let mut cdb = vec![0x83, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    cdb[13] = list.len() as u8;
    (cdb, list)
}

#[test]
fn a_copy_reads_a_write_protected_lun_and_does_not_write_it() {
    let bench = DeviceBench::new();
    let (x, y) = (&bench.unit, unit("y"));
    let luns = view([(0, mapping(0, x, false)), (1, mapping(1, &y, true))]);
    let mut client = login(&bench, &luns, "a");
    assert_eq!(client.run(&TUR).check(), POWER_ON);
    let (cdb, list) = copy(x, &y);
    assert_eq!(client.run_with(&cdb, &list).check(), WRITE_PROTECTED);
    let (cdb, list) = copy(&y, x);
    let (mut task, step) = client.server.begin(&command(Lun::new(0), &cdb, list.len()));
    let step = client.turn(&mut task, step, &list, &mut 0);
    assert!(matches!(step, TaskStep::Io { volume: VolumeId(1), .. }), "{step:?}");
}

#[test]
fn a_changed_protection_is_reported_once_and_applies_to_the_commands_that_follow() {
    let bench = DeviceBench::new();
    let y = unit("y");
    let map = |is_read_only| {
        BTreeMap::from([(0, mapping(0, &bench.unit, is_read_only)), (1, mapping(1, &y, false))])
    };
    let luns = view([]);
    assert_eq!(luns.set_luns(&ShownLuns::Own, &map(false)).len(), 2);
    let (mut client, mut other) = (login(&bench, &luns, "a"), bench.client("b"));
    assert_eq!(client.run(&TUR).check(), POWER_ON);
    let (mut begun, step) = client.server.begin(&command(Lun::new(0), &WRITE, 512));
    assert_eq!(luns.set_luns(&ShownLuns::Own, &map(true)).len(), 0);
    assert_eq!(client.run(&TUR).check(), MODE_PARAMETERS_CHANGED);
    assert_eq!(client.run_with(&WRITE, &[1; 512]).check(), WRITE_PROTECTED);
    let step = client.turn(&mut begun, step, &[7; 512], &mut 0);
    let step = client.turn(&mut begun, step, &[], &mut 0);
    let TaskStep::Done(response) = step else { panic!("it goes on: {step:?}") };
    assert_eq!(response.status, ScsiStatus::GOOD, "it began before");
    assert_eq!(client.run_on(Lun::new(1), &TUR, &[]).check(), POWER_ON);
    client.run_on(Lun::new(1), &TUR, &[]).good();
    luns.set_luns(&ShownLuns::Own, &map(false));
    assert_eq!(client.run_with(&WRITE, &[1; 512]).check(), MODE_PARAMETERS_CHANGED);
    client.run_with(&WRITE, &[1; 512]).good();
    other.run(&TUR).good();
}

#[test]
fn a_changed_map_is_reported_to_its_initiators_only() {
    let bench = DeviceBench::new();
    let y = unit("y");
    let [of_a, of_b] =
        [view([(0, mapping(0, &bench.unit, false))]), view([(0, mapping(0, &bench.unit, false))])];
    let (mut a, mut b) = (login(&bench, &of_a, "a"), login(&bench, &of_b, "b"));
    assert_eq!([&mut a, &mut b].map(|client| client.run(&TUR).check()), [POWER_ON; 2]);
    let moved = BTreeMap::from([(0, mapping(0, &bench.unit, false)), (7, mapping(1, &y, true))]);
    of_a.set_luns(&ShownLuns::Own, &moved);
    assert_eq!(a.run(&TUR).check(), LUNS_CHANGED);
    assert_eq!((luns(&mut a), luns(&mut b)), (vec![0, 7], vec![0]));
    b.run(&TUR).good();
    // The number gets another volume: a new nexus of another unit.
    of_a.set_luns(&ShownLuns::Own, &BTreeMap::from([(0, mapping(1, &y, false))]));
    assert_eq!(a.run(&TUR).check(), POWER_ON);
    assert_eq!(serial(&mut a, 0), Some(y.identity.serial.clone().into_bytes()));
    b.run(&TUR).good();
}

#[test]
fn a_target_shows_what_it_gets_later_to_those_without_their_own_map() {
    let x = unit("x");
    let map = BTreeMap::from([(0, mapping(0, &x, false)), (1, mapping(1, &unit("y"), true))]);
    let shown_luns = [ShownLuns::All, ShownLuns::Only([1, 2].into()), ShownLuns::Own];
    let views = shown_luns.map(|shown| {
        let view = ScsiTarget::new("t", vec![port(1)]);
        view.set_luns(&shown, &map);
        view
    });
    let numbers = |view: &ScsiTarget| view.units().map(|(number, ..)| number).collect::<Vec<_>>();
    assert_eq!(views.each_ref().map(numbers), [vec![0, 1], vec![1], vec![0, 1]]);
    let volumes = |view: &ScsiTarget| view.volumes().into_iter().map(|(id, writes)| (id.0, writes)).collect();
    let volumes: [Vec<_>; 3] = views.each_ref().map(volumes);
    assert_eq!(volumes, [vec![(0, true), (1, false)], vec![(1, false)], vec![(0, true), (1, false)]]);
    assert_eq!(views.each_ref().map(|view| view.add(2, VolumeId(2), unit("z"))), [true, true, false]);
    assert_eq!(views.each_ref().map(numbers), [vec![0, 1, 2], vec![1, 2], vec![0, 1]]);
}
