//! Limits of a queue: which commands are accepted, and which wait.

use super::*;
use crate::driver::session::Timed;
use crate::driver::target::TargetLifecycle;
use blockmux_wire::nvme::NSID_ALL;
use blockmux_wire::nvme::nvm::PRINFO_MASK;
use std::collections::VecDeque;

/// An I/O queue with `entries` entries, and its admin queue.
fn deep(node: &(Arc<NvmeNode>, Exports), pool: &Pool, entries: u32) -> (FabricsTestHost, FabricsTestHost) {
    let (admin, cntlid) = FabricsTestHost::admin(node);
    let mut io = FabricsTestHost::with_pool(node, pool.clone());
    let (mut command, data) = connect(NQN, 1, cntlid, 0);
    command.cdw11 = (entries - 1).into();
    assert!(io.run(command, data.as_bytes()).1.status.is_success());
    (io, admin)
}

/// Delivers all fetched data until nothing more is fetched; returns how many commands have
/// completed.
fn answer_all(io: &mut FabricsTestHost) -> usize {
    let mut ended = 0;
    loop {
        io.pump.turn();
        let all = io.received();
        if all.is_empty() {
            return ended;
        }
        for sent in all {
            match sent {
                TransportCall::Done { cqe, .. } => {
                    assert!(cqe.status.is_success());
                    ended += 1;
                }
                TransportCall::Fetch(fetch) => io.deliver(fetch, 0, &vec![7; fetch.len]),
            }
        }
    }
}

#[test]
fn an_invalid_command_has_its_status_and_no_effect() {
    let (mut io, _admin) = FabricsTestHost::io(&node());
    let end = SIZE / 512;
    let read = |slba, blocks| nvm(NvmOpcode::READ, 1, slba, blocks);
    let with = |sqe: Sqe, dptr| Sqe { dptr, ..sqe };
    let write = nvm(NvmOpcode::WRITE, 1, 0, 1);
    let field = NvmeStatus::INVALID_FIELD_IN_COMMAND;
    let cases = [
        (read(end, 1), NvmeStatus::LBA_OUT_OF_RANGE),
        (read(end - 1, 2), NvmeStatus::LBA_OUT_OF_RANGE),
        (read(u64::MAX, 1), NvmeStatus::LBA_OUT_OF_RANGE),
        (read(u64::MAX >> 9, 8), NvmeStatus::LBA_OUT_OF_RANGE),
        (read(0, 2049), field),
        (Sqe { nsid: 0.into(), ..read(0, 1) }, NvmeStatus::INVALID_NAMESPACE_OR_FORMAT),
        (Sqe { nsid: 3.into(), ..read(0, 1) }, NvmeStatus::INVALID_NAMESPACE_OR_FORMAT),
        (Sqe { nsid: NSID_ALL.into(), ..read(0, 1) }, NvmeStatus::INVALID_NAMESPACE_OR_FORMAT),
        (Sqe { opcode: 0x99, ..read(0, 1) }, NvmeStatus::INVALID_COMMAND_OPCODE),
        (nvm(NvmOpcode::WRITE_UNCORRECTABLE, 1, 0, 1), NvmeStatus::INVALID_COMMAND_OPCODE),
        (Sqe { flags: 0x41, ..read(0, 1) }, field),
        (Sqe { flags: 0, ..read(0, 1) }, field),
        (Sqe { cdw12: PRINFO_MASK.into(), ..read(0, 1) }, field),
        (with(read(0, 1), SglDescriptor::transport(511)), NvmeStatus::DATA_SGL_LENGTH_INVALID),
        (with(read(0, 1), SglDescriptor::transport(1024)), NvmeStatus::DATA_SGL_LENGTH_INVALID),
        (with(read(0, 1), SglDescriptor::in_capsule(0, 512)), NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID),
        (with(write, SglDescriptor::transport(513)), NvmeStatus::DATA_SGL_LENGTH_INVALID),
        (with(write, SglDescriptor::in_capsule(0, 512)), NvmeStatus::SGL_OFFSET_INVALID),
        (with(write, SglDescriptor::in_capsule(u64::MAX, 512)), NvmeStatus::SGL_OFFSET_INVALID),
        (
            with(write, SglDescriptor::new(SglType::KEYED_DATA_BLOCK, SglSubtype::ADDRESS, 0, 512)),
            NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID,
        ),
        (nvm(NvmOpcode::WRITE, 2, 0, 1), NvmeStatus::NAMESPACE_IS_WRITE_PROTECTED),
        (nvm(NvmOpcode::WRITE_ZEROES, 2, 0, 1), NvmeStatus::NAMESPACE_IS_WRITE_PROTECTED),
        (nvm(NvmOpcode::WRITE_ZEROES, 1, end, 1), NvmeStatus::LBA_OUT_OF_RANGE),
        (Sqe { cdw12: (1 << 8).into(), ..nvm(NvmOpcode::COPY, 1, 0, 1) }, field),
        (
            Sqe { cdw12: 0xff.into(), ..nvm(NvmOpcode::COPY, 1, 0, 1) },
            NvmeStatus::COMMAND_SIZE_LIMIT_EXCEEDED,
        ),
    ];
    for (sqe, status) in cases {
        assert_eq!(refusal(&io.run(sqe, &[]).1), status, "{sqe:?}");
    }
    // A source range that is too long.
    let mut range = [0; 32];
    range[16..18].copy_from_slice(&u16::MAX.to_le_bytes());
    let copy = Sqe { cdw12: 0.into(), ..nvm(NvmOpcode::COPY, 1, 0, 1) };
    assert_eq!(refusal(&io.run(copy, &range).1), NvmeStatus::COMMAND_SIZE_LIMIT_EXCEEDED);
    assert_eq!(io.run(read(0, 1), &[]).0, [0; 512]);
}

#[test]
fn no_volume_gets_io_beyond_its_end() {
    let (mut io, _admin) = FabricsTestHost::io(&node());
    io.pump.holds_io = true;
    let end = SIZE / 512;
    let copy = |to| Sqe { cdw12: 0.into(), ..nvm(NvmOpcode::COPY, 1, to, 1) };
    let source = |from: u64, blocks: u16| {
        let mut range = [0; 32];
        range[8..16].copy_from_slice(&from.to_le_bytes());
        range[16..18].copy_from_slice(&(blocks - 1).to_le_bytes());
        range.to_vec()
    };
    let mut unmapped = [0; 16];
    unmapped[4..8].copy_from_slice(&2_u32.to_le_bytes());
    unmapped[8..16].copy_from_slice(&(end - 1).to_le_bytes());
    let deallocate = Sqe { cdw10: 0.into(), cdw11: 4.into(), ..nvm(NvmOpcode::DATASET_MANAGEMENT, 1, 0, 1) };
    let cases = [
        (nvm(NvmOpcode::READ, 1, end - 1, 2), Vec::new()),
        (nvm(NvmOpcode::WRITE_ZEROES, 1, end - 1, 2), Vec::new()),
        (nvm(NvmOpcode::VERIFY, 1, end, 1), Vec::new()),
        (copy(0), source(end - 1, 2)),
        (copy(end - 1), source(0, 2)),
        (copy(end + 1), source(0, 1)),
        (deallocate, unmapped.to_vec()),
    ];
    for (sqe, data) in cases {
        assert_eq!(refusal(&io.run(sqe, &data).1), NvmeStatus::LBA_OUT_OF_RANGE, "{sqe:?}");
        assert!(io.pump.submitted.is_empty(), "{sqe:?}");
    }
}

#[test]
fn a_cid_that_is_in_use_is_a_conflict() {
    let (mut io, _admin) = FabricsTestHost::io(&node());
    io.pump.holds_io = true;
    let mut read = nvm(NvmOpcode::READ, 1, 0, 1);
    io.send(&mut read, &[]);
    io.deliver_command(&read, &[]).unwrap();
    assert_eq!(refusal(&io.received()[0].cqe()), NvmeStatus::COMMAND_ID_CONFLICT);
    io.pump.finish_one();
    assert!(io.end_of(read).1.status.is_success());
}

#[test]
fn more_commands_than_the_queue_has_entries_end_it() {
    let (mut io, _admin) = FabricsTestHost::io(&node());
    io.pump.holds_io = true;
    for _ in 0..32 {
        io.send(&mut nvm(NvmOpcode::READ, 1, 0, 1), &[]);
    }
    assert_eq!(io.pump.submitted.len(), 32);
    io.pump.finish_one();
    io.send(&mut nvm(NvmOpcode::READ, 1, 0, 1), &[]);
    let one_too_many = Sqe { cid: 99.into(), ..nvm(NvmOpcode::READ, 1, 0, 1) };
    let error = io.deliver_command(&one_too_many, &[]).unwrap_err();
    assert_eq!(error.what, "sent more commands than its queue has entries");
    assert!(io.is_closed());
}

#[test]
fn waiting_commands_do_not_block_the_data_of_others() {
    let (mut io, _admin) = deep(&node(), &Pool::new(usize::MAX), 128);
    for _ in 0..70 {
        io.send(&mut nvm(NvmOpcode::WRITE, 1, 0, 2048), &[]);
    }
    assert_eq!(answer_all(&mut io), 70);
}

#[test]
fn owed_reports_the_oldest_buffer_that_waits_for_data_of_the_host() {
    let (mut io, _admin) = deep(&node(), &Pool::new(usize::MAX), 128);
    assert_eq!(io.pump.session.owed(), None);
    for _ in 0..2 {
        io.send(&mut nvm(NvmOpcode::WRITE, 1, 0, 512), &[]);
    }
    let fetches: Vec<FetchCall> = io.received().iter().map(TransportCall::fetch).collect();
    let first = io.pump.session.owed();
    assert!(first.is_some());
    let mut answer = |fetch, from: usize, to| {
        io.deliver(fetch, from, &vec![7; to - from]);
        io.pump.session.owed()
    };
    assert_eq!(answer(fetches[0], 0, 100_000), first, "a part is not enough");
    let second = answer(fetches[0], 100_000, 256 << 10);
    assert!(second > first);
    assert_eq!(answer(fetches[1], 0, 256 << 10), None);
}

#[test]
fn the_data_fetched_at_a_time_is_bounded_and_reads_do_not_wait() {
    let (mut io, _admin) = deep(&node(), &Pool::new(usize::MAX), 128);
    io.pump.session.unstarted.max_fetching = 256 << 10;
    let mut reads = 0;
    // For short data the byte limit applies, for long data that of three commands.
    for (blocks, asked) in [(128, 4), (1024, 3)] {
        for _ in 0..10 {
            io.send(&mut nvm(NvmOpcode::WRITE, 1, 0, blocks), &[]);
        }
        let read = nvm(NvmOpcode::READ, 1, 0, 8);
        io.send(&mut read.clone(), &[]);
        let (fetches, done): (Vec<_>, Vec<_>) =
            io.received().into_iter().partition(|sent| matches!(sent, TransportCall::Fetch(_)));
        reads += done.len();
        assert_eq!(fetches.len(), asked);
        let mut fetches: VecDeque<FetchCall> = fetches.iter().map(TransportCall::fetch).collect();
        let mut ended = 0;
        while let Some(fetch) = fetches.pop_front() {
            io.deliver(fetch, 0, &vec![7; fetch.len]);
            let sent = io.received();
            ended += sent.iter().filter(|sent| matches!(sent, TransportCall::Done { .. })).count();
            fetches.extend(
                sent.iter().filter(|sent| matches!(sent, TransportCall::Fetch(_))).map(TransportCall::fetch),
            );
            assert!(fetches.len() <= asked);
        }
        assert_eq!(ended, 10);
    }
    assert_eq!(reads, 2, "reads do not wait for the data of writes");
}

#[test]
fn a_host_gets_only_its_share_of_the_pool() {
    let pool = Pool::new(32 << 20);
    let (mut io, _admin) = deep(&node(), &pool, 128);
    for _ in 0..30 {
        io.send(&mut nvm(NvmOpcode::WRITE, 1, 0, 2048), &[]);
    }
    assert!((1..=pool.peer_share()).contains(&pool.out_bytes()));
    assert_eq!(answer_all(&mut io), 30);
}

#[test]
fn data_is_not_fetched_before_there_is_memory() {
    let node = node();
    let (_admin, cntlid) = FabricsTestHost::admin(&node);
    let pool = Pool::new(4 << 20);
    let mut io = FabricsTestHost::with_pool(&node, pool.clone());
    assert!(io.connect(1, cntlid, 0).status.is_success());
    let taken: Vec<_> = std::iter::from_fn(|| pool.take_payload(1 << 20)).collect();
    assert!(!taken.is_empty());
    let mut write = nvm(NvmOpcode::WRITE, 1, 0, 2048);
    io.send(&mut write, &[]);
    assert!(io.received().is_empty());
    drop(taken);
    let now = io.pump.session.poll_timeout().unwrap();
    io.pump.session.on_timeout(now).unwrap();
    let fetch = io.fetch();
    io.deliver(fetch, 0, &pattern(1 << 20));
    assert!(io.end_of(write).1.status.is_success());
}

/// Linux's controller allocated such a list before it checked it (CVE-2026-80789).
#[test]
fn a_descriptor_of_4_gib_is_refused_before_memory_is_taken_for_it() {
    let pool = Pool::new(4 << 20);
    let (mut io, mut admin_queue) = deep(&node(), &pool, 128);
    let fabrics = |kind: FabricsType| Sqe {
        opcode: AdminOpcode::FABRICS.0,
        flags: 0x40,
        nsid: u32::from(kind.0).into(),
        ..Sqe::new_zeroed()
    };
    let commands = [
        nvm(NvmOpcode::READ, 1, 0, 1),
        nvm(NvmOpcode::WRITE, 1, 0, 1),
        nvm(NvmOpcode::COMPARE, 1, 0, 1),
        nvm(NvmOpcode::COPY, 1, 0, 1),
        nvm(NvmOpcode::DATASET_MANAGEMENT, 1, 0, 1),
        nvm(NvmOpcode::RESERVATION_REGISTER, 1, 0, 1),
        fabrics(FabricsType::CONNECT),
        fabrics(FabricsType::AUTHENTICATION_SEND),
    ];
    for sqe in commands {
        for len in [u32::MAX, !511, 1 << 31] {
            let sqe = Sqe { dptr: SglDescriptor::transport(len), ..sqe };
            for queue in [&mut io, &mut admin_queue] {
                // Whatever the reason, it ends at once.
                assert!(!queue.run(sqe, &[]).1.status.is_success(), "{sqe:?}");
            }
            assert_eq!(pool.out_bytes(), 0, "{sqe:?}");
        }
    }
    assert_eq!(io.run(nvm(NvmOpcode::READ, 1, 0, 1), &[]).0, [0; 512]);
}
