//! Fused Compare and Write.

use super::*;
use crate::driver::session::Timed;
use crate::scsi::testing::{DeviceBench, TestNexus};
use crate::scsi::{LogicalUnit, UnitIdentity};
use crate::testing::ComparingVolume;
use std::time::Instant;

const FIRST: u8 = 0x41;
const SECOND: u8 = 0x42;
const MISSING: NvmeStatus = NvmeStatus::COMMAND_ABORTED_DUE_TO_MISSING_FUSED_COMMAND;
const FAILED: NvmeStatus = NvmeStatus::COMMAND_ABORTED_DUE_TO_FAILED_FUSED_COMMAND;

/// Fused Compare and Write of `blocks` blocks from `slba` on.
fn pair(slba: u64, blocks: u32) -> [Sqe; 2] {
    let half = |opcode, flags| Sqe { flags, ..nvm(opcode, 1, slba, blocks) };
    [half(NvmOpcode::COMPARE, FIRST), half(NvmOpcode::WRITE, SECOND)]
}

/// Sends both halves with in-capsule data; returns both statuses.
fn compare_and_write(io: &mut FabricsTestHost, slba: u64, expected: &[u8], data: &[u8]) -> [NvmeStatus; 2] {
    let mut halves = pair(slba, expected.len() as u32 / 512);
    for (half, bytes) in halves.iter_mut().zip([expected, data]) {
        half.dptr = SglDescriptor::in_capsule(0, bytes.len() as u32);
        io.send(half, bytes);
    }
    ends(io, &halves)
}

/// Statuses of both halves, which complete in order.
fn ends(io: &mut FabricsTestHost, halves: &[Sqe; 2]) -> [NvmeStatus; 2] {
    let all = io.received();
    assert_eq!(all.len(), 2, "{all:?}");
    [0, 1].map(|nth| {
        let cqe = all[nth].cqe();
        assert_eq!(cqe.cid, halves[nth].cid);
        cqe.status.status()
    })
}

fn block(io: &mut FabricsTestHost, slba: u64) -> Vec<u8> {
    io.run(nvm(NvmOpcode::READ, 1, slba, 1), &[]).0
}

#[test]
fn a_fused_pair_writes_if_the_compare_succeeds() {
    let (mut io, _admin) = FabricsTestHost::io(&node());
    assert_eq!(compare_and_write(&mut io, 3, &[0; 1024], &[1; 1024]), [NvmeStatus::SUCCESSFUL_COMPLETION; 2]);
    assert_eq!(block(&mut io, 4), [1; 512]);
    assert_eq!(compare_and_write(&mut io, 3, &[0; 512], &[2; 512]), [NvmeStatus::COMPARE_FAILURE, FAILED]);
    assert_eq!(block(&mut io, 3), [1; 512]);
    assert_eq!(compare_and_write(&mut io, 3, &[1; 512], &[2; 512]), [NvmeStatus::SUCCESSFUL_COMPLETION; 2]);
    assert_eq!((block(&mut io, 3), block(&mut io, 4)), (vec![2; 512], vec![1; 512]));
}

#[test]
fn storage_that_compares_by_itself_does_so_where_it_can() {
    for (is_able, slba, expected) in [(true, 0, [2, 1]), (false, 0, [2, 0]), (true, 7, [0, 0])] {
        let volume = Arc::new(ComparingVolume::new(4096, is_able));
        let (mut io, _admin) = FabricsTestHost::io(&node_of(volume.clone()));
        let both = [NvmeStatus::SUCCESSFUL_COMPLETION; 2];
        assert_eq!(compare_and_write(&mut io, slba, &[0; 1024], &[1; 1024]), both);
        assert_eq!((block(&mut io, slba), block(&mut io, slba + 1)), (vec![1; 512], vec![1; 512]));
        let differs = [NvmeStatus::COMPARE_FAILURE, FAILED];
        assert_eq!(compare_and_write(&mut io, slba, &[0; 1024], &[2; 1024]), differs);
        assert_eq!(block(&mut io, slba), [1; 512]);
        assert_eq!(volume.counts(), expected, "asked, written");
    }
}

#[test]
fn limits_throttle_a_pair_before_its_lock_and_charge_it_as_one_write() {
    use crate::driver::target::IoSource;
    use crate::volume_state::NotAdmitted;
    use blockmux_volume::Cost;
    let node = node();
    let ((mut io, _admin), (mut other, _)) = (FabricsTestHost::io(&node), FabricsTestHost::io_of(&node, 2));
    io.pump.throttles = true;
    let mut halves = pair(3, 1);
    for (half, bytes) in halves.iter_mut().zip([&[5; 512], &[7; 512]]) {
        half.dptr = SglDescriptor::in_capsule(0, 512);
        io.send(half, bytes);
    }
    let read = io.pump.waiting.front().unwrap().1.clone();
    assert_eq!(io.pump.session.charge(&read).cost, Some(Cost::write(512)));
    let write = Sqe { dptr: SglDescriptor::in_capsule(0, 512), ..nvm(NvmOpcode::WRITE, 1, 3, 1) };
    assert!(other.run(write, &[5; 512]).1.status.is_success());
    // Another write is in flight.
    other.pump.holds_io = true;
    other.send(&mut { write }, &[5; 512]);
    assert_eq!(io.pump.session.begin(VolumeId(0), &read, true), Err(NotAdmitted::Draining));
    other.pump.finish_one();
    (io.pump.throttles, io.pump.holds_io) = (false, true);
    io.pump.turn();
    io.pump.finish_one();
    io.pump.turn();
    let (_, then) = io.pump.submitted.front().unwrap();
    let then = then.clone();
    assert_eq!((then.op.is_write(), io.pump.session.charge(&then).cost), (true, None));
    io.pump.finish_one();
    assert_eq!(ends(&mut io, &halves), [NvmeStatus::SUCCESSFUL_COMPLETION; 2]);
}

#[test]
fn the_data_of_either_half_may_come_first() {
    let (mut io, _admin) = FabricsTestHost::io(&node());
    let data = pattern(16384);
    for order in [[0, 1], [1, 0]] {
        let mut halves = pair(0, 32);
        assert!(io.run(nvm(NvmOpcode::WRITE_ZEROES, 1, 0, 32), &[]).1.status.is_success());
        halves.iter_mut().for_each(|half| io.send(half, &[]));
        let fetches: Vec<FetchCall> = io.received().iter().map(TransportCall::fetch).collect();
        for nth in order {
            assert!(io.received().is_empty());
            let bytes = if nth == 0 { &[0; 16384][..] } else { &data };
            io.deliver(fetches[nth], 0, bytes);
        }
        assert_eq!(ends(&mut io, &halves), [NvmeStatus::SUCCESSFUL_COMPLETION; 2]);
        assert!(io.run(nvm(NvmOpcode::READ, 1, 0, 32), &[]).0 == data);
    }
}

#[test]
fn separated_halves_end_without_effect() {
    let (mut io, _admin) = FabricsTestHost::io(&node());
    let in_capsule = |sqe: Sqe| Sqe { dptr: SglDescriptor::in_capsule(0, 512), ..sqe };
    let [first, second] = pair(0, 1).map(in_capsule);
    // A second half without a first.
    assert_eq!(refusal(&io.run(second, &[7; 512]).1), MISSING);
    // A first half followed by another command, and then the second half.
    let (mut lonely, mut between) = (first, nvm(NvmOpcode::FLUSH, 1, 0, 1));
    io.send(&mut lonely, &[0; 512]);
    assert!(io.received().is_empty());
    io.send(&mut between, &[]);
    assert_eq!(ends(&mut io, &[lonely, between]), [MISSING, NvmeStatus::SUCCESSFUL_COMPLETION]);
    assert_eq!(refusal(&io.run(second, &[7; 512]).1), MISSING);
    // Two first halves, then a second half, which belongs to the latter.
    let (mut one, mut two) = (first, first);
    io.send(&mut one, &[0; 512]);
    io.send(&mut two, &[0; 512]);
    let all = io.received();
    assert_eq!((all.len(), all[0].cqe().cid, refusal(&all[0].cqe())), (1, one.cid, MISSING));
    let mut other = second;
    io.send(&mut other, &[8; 512]);
    assert_eq!(ends(&mut io, &[two, other]), [NvmeStatus::SUCCESSFUL_COMPLETION; 2]);
    assert_eq!(block(&mut io, 0), [8; 512]);
    // A first half whose data is being fetched ends when the data has arrived.
    let [mut waits, _] = pair(0, 1);
    io.send(&mut waits, &[]);
    let fetch = io.fetch();
    assert!(io.run(nvm(NvmOpcode::FLUSH, 1, 0, 1), &[]).1.status.is_success());
    io.deliver(fetch, 0, &[0; 512]);
    assert_eq!(refusal(&io.end_of(waits).1), MISSING);
}

#[test]
fn an_invalid_pair_is_refused_as_a_whole() {
    let (mut io, _admin) = FabricsTestHost::io(&node());
    let in_capsule = |sqe: Sqe| Sqe { dptr: SglDescriptor::in_capsule(0, 512), ..sqe };
    let [first, second] = pair(0, 1).map(in_capsule);
    let wrong_seconds = [
        (Sqe { cdw10: 1.into(), ..second }, NvmeStatus::INVALID_FIELD_IN_COMMAND),
        (Sqe { opcode: NvmOpcode::COMPARE.0, ..second }, NvmeStatus::INVALID_FIELD_IN_COMMAND),
        (Sqe { nsid: 9.into(), ..second }, NvmeStatus::INVALID_NAMESPACE_OR_FORMAT),
        (Sqe { nsid: 2.into(), ..second }, NvmeStatus::NAMESPACE_IS_WRITE_PROTECTED),
    ];
    for (wrong, status) in wrong_seconds {
        let (mut first, mut wrong) = (first, wrong);
        io.send(&mut first, &[0; 512]);
        io.send(&mut wrong, &[7; 512]);
        assert_eq!(ends(&mut io, &[wrong, first]), [status, FAILED]);
    }
    let wrong_firsts = [
        Sqe { opcode: NvmOpcode::WRITE.0, ..first },
        Sqe { flags: 0x43, ..first },
        Sqe { cdw12: (0xf << 26).into(), ..first },
    ];
    for wrong in wrong_firsts {
        assert_eq!(refusal(&io.run(wrong, &[0; 512]).1), NvmeStatus::INVALID_FIELD_IN_COMMAND);
        let expected = if wrong.flags == FIRST { FAILED } else { MISSING };
        assert_eq!(refusal(&io.run(second, &[7; 512]).1), expected);
    }
    let (mut queue, _) = FabricsTestHost::admin(&node());
    let fused = Sqe { flags: FIRST, ..admin(AdminOpcode::KEEP_ALIVE, 0, 0, 0, 0) };
    assert_eq!(refusal(&queue.run(fused, &[]).1), NvmeStatus::INVALID_FIELD_IN_COMMAND);
    assert_eq!(block(&mut io, 0), [0; 512]);
}

#[test]
fn a_queue_that_ends_does_not_wait_for_a_second_half() {
    let (mut io, _admin) = FabricsTestHost::io(&node());
    let [mut first, _] = pair(0, 1);
    first.dptr = SglDescriptor::in_capsule(0, 512);
    io.send(&mut first, &[0; 512]);
    crate::driver::target::TargetLifecycle::on_stop(&mut io.pump.session, Instant::now());
    assert_eq!(refusal(&io.end_of(first).1), MISSING);
    assert!(io.is_closed());
}

#[test]
fn other_commands_to_the_blocks_wait_for_the_pair() {
    let node = node();
    let (mut io, _admin) = FabricsTestHost::io(&node);
    let (mut other, _other_admin) = FabricsTestHost::io_of(&node, 2);
    io.pump.holds_io = true;
    let mut halves = pair(0, 1);
    for (half, byte) in halves.iter_mut().zip([0, 1]) {
        half.dptr = SglDescriptor::in_capsule(0, 512);
        io.send(half, &[byte; 512]);
    }
    let mut write = Sqe { dptr: SglDescriptor::in_capsule(0, 512), ..nvm(NvmOpcode::WRITE, 1, 0, 1) };
    other.send(&mut write, &[2; 512]);
    assert!(other.received().is_empty());
    io.pump.finish_one();
    io.pump.turn();
    io.pump.finish_one();
    assert_eq!(ends(&mut io, &halves), [NvmeStatus::SUCCESSFUL_COMPLETION; 2]);
    other.pump.turn();
    assert!(other.end_of(write).1.status.is_success());
    assert_eq!(block(&mut other, 0), [2; 512]);
}

/// A client that increments the number in block 0 by compare and write, until it has succeeded
/// `left` times.
struct BlockCounter {
    seen: u64,
    left: u32,
}

impl BlockCounter {
    fn images(&self) -> [[u8; 512]; 2] {
        [self.seen, self.seen + 1].map(|number| {
            let mut block = [0; 512];
            block[..8].copy_from_slice(&number.to_le_bytes());
            block
        })
    }
}

/// A turn of a host: sends a fused pair, or advances one by at most one I/O.
fn host_turn(host: &mut FabricsTestHost, counter: &mut BlockCounter, halves: &mut Option<[Sqe; 2]>) {
    match halves {
        None => {
            host.pump.holds_io = true;
            let mut sent = pair(0, 1);
            for (half, image) in sent.iter_mut().zip(counter.images()) {
                half.dptr = SglDescriptor::in_capsule(0, 512);
                host.send(half, &image);
            }
            *halves = Some(sent);
        }
        Some(sent) => {
            let now = host.now;
            host.pump.session.on_timeout(now).unwrap();
            host.pump.turn();
            if !host.pump.submitted.is_empty() {
                host.pump.finish_one();
                host.pump.turn();
            }
            let all = host.received();
            if all.is_empty() {
                return;
            }
            assert_eq!((all.len(), all[0].cqe().cid), (2, sent[0].cid));
            *halves = None;
            if all[1].cqe().status.is_success() {
                counter.left -= 1;
            } else {
                assert_eq!(all[0].cqe().status.status(), NvmeStatus::COMPARE_FAILURE);
            }
        }
    }
}

/// A turn of a SCSI initiator: increments the counter by COMPARE AND WRITE.
fn scsi_turn(client: &mut TestNexus, counter: &mut BlockCounter) {
    use crate::scsi::testing::command;
    use crate::scsi::{Lun, TaskStep};
    const CAW: [u8; 16] = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];
    let data = counter.images().concat();
    let (mut task, step) = client.server.begin(&command(Lun::new(0), &CAW, 1024));
    let mut step = client.turn(&mut task, step, &data, &mut 0);
    loop {
        step = match step {
            // A host has locked the block; retried later.
            TaskStep::Io { .. } if client.admit(&mut task, &step).is_err() => return,
            TaskStep::Done(response) => {
                counter.left -= u32::from(response.status == crate::scsi::ScsiStatus::GOOD);
                return;
            }
            step => client.turn(&mut task, step, &[], &mut 0),
        };
    }
}

#[test]
fn many_writers_over_nvme_and_scsi_never_lose_a_count() {
    let node = node();
    let volume_state = node.1.volume_state(VolumeId(0)).unwrap();
    let unit = LogicalUnit::over(UnitIdentity::of("a"), &volume_state);
    let bench = DeviceBench::around(unit, volume_state.volume().clone());
    let mut hosts: Vec<_> = (1..=4).map(|id| FabricsTestHost::io_of(&node, id)).collect();
    let mut initiators: Vec<_> = ["x", "y", "z"].map(|name| bench.client(name)).into();
    let counter = || BlockCounter { seen: 0, left: 25 };
    let mut counters: Vec<BlockCounter> = (0..hosts.len() + initiators.len()).map(|_| counter()).collect();
    let mut halves = vec![None; hosts.len()];
    let mut random = 1_u64;
    let mut turns = 0;
    while counters.iter().any(|counter| counter.left > 0) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let who = (random >> 33) as usize % counters.len();
        let total: u32 = counters.iter().map(|counter| 25 - counter.left).sum();
        let is_new = halves.get(who).is_none_or(|halves| halves.is_none());
        if is_new && counters[who].left == 0 {
            continue;
        }
        if is_new {
            // The current value of the counter.
            counters[who].seen = total.into();
        }
        match who.checked_sub(hosts.len()) {
            None => host_turn(&mut hosts[who].0, &mut counters[who], &mut halves[who]),
            Some(nth) => scsi_turn(&mut initiators[nth], &mut counters[who]),
        }
        turns += 1;
        assert!(turns < 1_000_000, "no progress");
    }
    let (mut io, _admin) = FabricsTestHost::io_of(&node, 9);
    assert_eq!(block(&mut io, 0)[..8], (25 * counters.len() as u64).to_le_bytes());
}
