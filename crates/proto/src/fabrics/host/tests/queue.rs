//! I/O of a queue: how each ends, and what a controller may do.

use super::*;
use crate::driver::session::{Initiator, RetryRules, Timed};
use blockmux_volume::{Extent, IoError, Op, Output};
use blockmux_wire::nvme::NSID_ALL;
use blockmux_wire::nvme::nvm::{DEAC, FUA};
use blockmux_wire::nvme::status::NvmeStatus;
use std::time::Duration;

#[test]
fn success_without_its_data_is_a_failure() {
    let mut client = TestQueues::ready();
    client.driver.read(1, 0, 4096);
    let cid = client.command().cid();
    client.good(cid);
    assert_eq!(client.driver.done_error(), IoError::Medium);
    client.write(2, 0, &pattern(16384));
    let cid = client.command().cid();
    client.good(cid);
    assert_eq!(client.driver.done_error(), IoError::Medium);
}

#[test]
fn io_beyond_mdts_is_split() {
    let mut client = TestQueues::ready();
    let len = 600 << 10;
    client.driver.read(1, 0, len as u64);
    let (mut next, data) = (client.sent(), pattern(len));
    let mut count = 0;
    while !next.is_empty() {
        assert!(next.len() <= 4);
        for command in std::mem::take(&mut next) {
            let (slba, blocks, _) = command.range();
            let part = &data[slba as usize * 512..][..blocks as usize * 512];
            assert!(part.len() <= 128 << 10);
            client.data(command.cid(), part);
            client.good(command.cid());
            count += 1;
            next.extend(client.sent());
        }
    }
    assert_eq!(count, 5);
    assert!(client.driver.done_data() == data);
}

#[test]
fn every_operation_has_its_command() {
    let mut client = TestQueues::ready();
    let mut one = |op, offset, len, data: Option<&[u8]>| {
        let data = data.map(|data| SgList::one(Seg::from_slice(data)));
        client.driver.submit(1, op, offset, len, data);
        let command = client.command();
        client.good(command.cid());
        assert!(matches!(client.driver.done(), (1, Ok(Output::Nothing))), "{op:?}");
        command
    };
    let write = one(Op::Write { fua: true }, 0, 512, Some(&[1; 512]));
    assert_eq!((write.opcode(), write.range()), (NvmOpcode::WRITE, (0, 1, FUA)));
    let flush = one(Op::Flush, 0, 0, None);
    assert_eq!((flush.opcode(), flush.sqe.nsid.get()), (NvmOpcode::FLUSH, 1));
    assert_ne!(flush.sqe.nsid.get(), NSID_ALL);
    let zeroes = Op::WriteZeroes { fua: true, may_unmap: true, only_fast: true };
    let zeroes = one(zeroes, 1024, 4096, None);
    assert_eq!((zeroes.opcode(), zeroes.range()), (NvmOpcode::WRITE_ZEROES, (2, 8, FUA | DEAC)));
    let kept = one(Op::WriteZeroes { fua: false, may_unmap: false, only_fast: false }, 0, 512, None);
    assert_eq!(kept.range(), (0, 1, 0));
    let discard = one(Op::Discard { fua: false }, 4096, 8192, None);
    assert_eq!(discard.opcode(), NvmOpcode::DATASET_MANAGEMENT);
    assert_eq!((discard.sqe.cdw10.get(), discard.sqe.cdw11.get()), (0, 4));
    assert_eq!(discard.data, [0, 0, 0, 0, 16, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn io_that_needs_no_command_completes_immediately() {
    let plain = NamespaceInfo {
        write_cache: false,
        max_deallocate_blocks: None,
        max_zeroes_blocks: None,
        ..namespace()
    };
    let mut client = TestQueues::with(plain, 128);
    for op in [Op::Flush, Op::Discard { fua: true }, Op::Prefetch] {
        client.driver.submit(1, op, 0, 512, None);
        assert!(matches!(client.driver.done(), (1, Ok(Output::Nothing))), "{op:?}");
    }
    client.driver.submit(2, Op::BlockStatus, 0, 4096, None);
    let (_, Ok(Output::Extents(extents))) = client.driver.done() else { panic!() };
    assert_eq!(extents, [Extent::data(4096)]);
    client.driver.submit(3, Op::WriteZeroes { fua: false, may_unmap: true, only_fast: true }, 0, 512, None);
    assert_eq!(client.driver.done_error(), IoError::Unsupported);
    client.driver.submit(4, Op::WriteZeroes { fua: true, may_unmap: true, only_fast: false }, 0, 512, None);
    let written = client.command();
    // Without a cache every write is durable.
    assert_eq!((written.opcode(), written.range()), (NvmOpcode::WRITE, (0, 1, 0)));
    assert_eq!(written.data, [0; 512]);
}

#[test]
fn an_unsupported_command_is_replaced() {
    let unknown = StatusField::final_one(NvmeStatus::INVALID_COMMAND_OPCODE);
    let mut client = TestQueues::ready();
    client.driver.submit(1, Op::WriteZeroes { fua: true, may_unmap: true, only_fast: false }, 0, 512, None);
    let cid = client.command().cid();
    client.complete(cid, unknown, 0);
    let written = client.command();
    assert_eq!((written.opcode(), written.range(), written.data.len()), (NvmOpcode::WRITE, (0, 1, FUA), 512));
    client.good(written.cid());
    assert!(client.driver.done().1.is_ok());
    client.driver.submit(2, Op::Discard { fua: false }, 0, 512, None);
    let cid = client.command().cid();
    client.complete(cid, unknown, 0);
    assert!(client.driver.done().1.is_ok());
    client.driver.read(3, 0, 512);
    let cid = client.command().cid();
    client.complete(cid, unknown, 0);
    assert_eq!(client.driver.done_error(), IoError::Unsupported);
}

#[test]
fn transient_failures_are_retried_for_a_limited_time() {
    let busy = StatusField::new(NvmeStatus::NAMESPACE_NOT_READY);
    let mut client = TestQueues::ready();
    let retries = RetryRules { busy_timeout: Duration::from_secs(5), ..RetryRules::default() };
    client.driver.session = client.driver.session.with_retries(retries);
    client.driver.read(1, 0, 512);
    let mut cid = client.command().cid();
    let mut now = std::time::Instant::now();
    let mut tries = 0;
    loop {
        client.complete(cid, busy, 0);
        let Some(first) = client.driver.stream().poll_timeout() else { break };
        now = now.max(first);
        while client.driver.session.queue(0).transport.sent.is_empty() {
            client.driver.stream().on_timeout(now).unwrap();
            now = now.max(client.driver.stream().poll_timeout().unwrap_or(now));
        }
        cid = client.command().cid();
        tries += 1;
    }
    assert_eq!((tries, client.driver.done_error()), (17, IoError::Medium));
    client.driver.read(2, 0, 512);
    let cid = client.command().cid();
    let last = StatusField::final_one(NvmeStatus::NAMESPACE_NOT_READY);
    client.complete(cid, last, 0);
    assert_eq!(client.driver.done_error(), IoError::Medium);
}

#[test]
fn a_command_is_retried_after_the_controllers_delay() {
    let delays = [300, 0, 2000].map(Duration::from_millis);
    let controller = ControllerInfo { retry_delays: delays, ..controller() };
    for (crd, at_least, status) in [
        (1, 300, NvmeStatus::NAMESPACE_NOT_READY),
        (2, 2, NvmeStatus::NAMESPACE_NOT_READY),
        (3, 2000, NvmeStatus::INTERNAL_ERROR),
    ] {
        let mut client = TestQueues::of(controller.clone(), namespace(), 128);
        client.driver.read(1, 0, 512);
        let cid = client.command().cid();
        let status = StatusField::new(status).with_retry_delay(crd);
        client.complete(cid, status, 0);
        let start = client.driver.session.queue(0).queue.now();
        let at = client.driver.stream().poll_timeout().unwrap();
        assert_eq!((at - start).as_millis(), at_least, "CRD {crd}");
        client.driver.stream().on_timeout(at - Duration::from_millis(1)).unwrap();
        assert!(client.sent().is_empty());
        client.driver.stream().on_timeout(at).unwrap();
        assert_eq!(client.command().range(), (0, 1, 0));
    }
}

#[test]
fn outstanding_commands_are_bounded_by_the_queues_entries() {
    let mut client = TestQueues::with(namespace(), 4);
    for tag in 0..10 {
        client.driver.read(tag, 0, 512);
    }
    let mut commands = client.sent();
    assert_eq!(commands.len(), 3);
    let mut done = 0;
    while let Some(command) = commands.pop() {
        client.data(command.cid(), &[3; 512]);
        client.good(command.cid());
        client.driver.done_data();
        commands.extend(client.sent());
        assert!(commands.len() <= 3);
        done += 1;
    }
    assert_eq!(done, 10);
}

#[test]
fn a_thousand_requests_are_outstanding_at_a_time() {
    let mut client = TestQueues::with(namespace(), 1024);
    let room = client.driver.session.room();
    assert_eq!(room, 1024);
    for tag in 0..room as u64 {
        client.driver.read(tag, 512 * tag, 512);
    }
    assert_eq!(client.driver.session.room(), 0);
    let commands = client.sent();
    assert_eq!(commands.len(), 1023);
    let mut cids: Vec<u16> = commands.iter().map(|command| command.cid()).collect();
    cids.sort_unstable();
    cids.dedup();
    assert_eq!(cids.len(), 1023);
}

#[test]
fn unfinished_requests_are_returned_complete_and_oldest_first() {
    let mut client = TestQueues::with(namespace(), 4);
    for tag in 0..6 {
        client.driver.read(tag, 512 * tag, 512);
    }
    let first = client.command_of_three();
    client.data(first, &[0; 512]);
    client.good(first);
    assert_eq!(client.driver.done().0, 0);
    let left = client.driver.session.take_unfinished();
    let left: Vec<(u64, u64)> = left.iter().map(|io| (io.tag.0, io.offset)).collect();
    assert_eq!(left, [(1, 512), (2, 1024), (3, 1536), (4, 2048), (5, 2560)]);
    assert!(client.sent().is_empty() && client.driver.is_closing());
}

impl TestQueues {
    fn command_of_three(&mut self) -> u16 {
        let [first, _, _] = self.sent().try_into().unwrap();
        first.cid()
    }
}

#[test]
fn a_stop_finishes_outstanding_commands() {
    let mut client = TestQueues::ready();
    client.driver.read(1, 0, 512);
    let cid = client.command().cid();
    client.driver.session.on_stop();
    assert!(client.driver.session.room() == 0 && !client.driver.is_closing());
    client.data(cid, &[9; 512]);
    client.good(cid);
    assert_eq!(client.driver.done_data(), [9; 512]);
    assert!(client.driver.is_closing());
}
