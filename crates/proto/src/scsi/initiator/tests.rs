//! Tests of the queue without a transport.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use super::bring_up::UnitRefused;
use super::{DataTransfer, ScsiOutcome, ScsiQueue, ScsiRequest};
use crate::driver::session::RetryRules;
use crate::initiator::command_memory::CommandMemory;
use crate::scsi::{Lun, ScsiStatus, Sense};
use blockmux_volume::{Chunk, Io, IoError, Op, Output, Pool, Seg, SgList, Tag};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use proptest::prelude::*;
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

const BLOCKS: u64 = 1 << 20;

/// A queue with an identified unit: `BLOCKS` blocks of 512 bytes, all features, 64 blocks per
/// transfer.
fn ready(pool: Pool) -> ScsiQueue<()> {
    let mut queue = ScsiQueue::new(Lun::new(0), pool);
    while let Some(request) = queue.next() {
        finish(&mut queue, &request, answer(&request.command)).unwrap();
    }
    assert!(queue.unit().is_some() && queue.room() == crate::initiator::command_queue::DEPTH);
    queue
}

fn answer(cdb: &[u8; 16]) -> Vec<u8> {
    match (cdb[0], cdb[2]) {
        (0xa0, _) => vec![0; 8],
        (0x12, 0x00) if cdb[1] == 0 => [&[0, 0, 6, 2, 91][..], &[b'x'; 91]].concat(),
        (0x12, 0x00) => vec![0, 0, 0, 3, 0, 0xb0, 0xb2],
        (0x12, 0xb0) => {
            let mut page = vec![0; 64];
            page[..4].copy_from_slice(&[0, 0xb0, 0, 60]);
            page[11] = 64;
            page[20..28].copy_from_slice(&[0, 0, 1, 0, 0, 0, 0, 1]);
            page
        }
        (0x12, _) => vec![0, 0xb2, 0, 4, 0, 0xe4, 2, 0],
        (0x9e, _) => {
            let last = (BLOCKS - 1).to_be_bytes();
            [&last[..], &[0, 0, 2, 0, 0, 0, 0xc0, 0], &[0; 16]].concat()
        }
        (0x1a, _) => [&[23, 0, 0, 0, 8, 18, 4][..], &[0; 17]].concat(),
        _ => Vec::new(),
    }
}

/// Completes a command successfully with this data-in.
fn finish(queue: &mut ScsiQueue<()>, request: &ScsiRequest, data: Vec<u8>) -> Result<(), UnitRefused> {
    let moved = match request.transfer {
        DataTransfer::Nothing => 0,
        DataTransfer::Out(len) => len,
        DataTransfer::In(len) => {
            let (list, base) = queue.data_in(request.key).unwrap();
            let data = if data.is_empty() { vec![7; len as usize] } else { data };
            let here = data.len().min(len as usize);
            list.slice(base, here).copy_from(&data[..here]);
            here as u32
        }
    };
    queue.finish(request.key, ScsiOutcome { status: ScsiStatus::GOOD, sense: &[], moved })
}

fn fail(queue: &mut ScsiQueue<()>, request: &ScsiRequest, sense: Sense) {
    let sense = sense.to_bytes();
    queue
        .finish(request.key, ScsiOutcome { status: ScsiStatus::CHECK_CONDITION, sense: &sense, moved: 0 })
        .unwrap();
}

fn read(tag: u64, len: u64) -> Io {
    Io::new(Tag(tag), Op::Read, 0, len)
}

#[test]
fn long_reads_wait_for_memory_but_a_single_one_does_not() {
    let mut queue = ready(Pool::new(256 << 10));
    // Payload of this length gets no memory from a pool of 256 KiB.
    queue.submit(read(1, 512 << 10));
    let first: Vec<ScsiRequest> = std::iter::from_fn(|| queue.next()).collect();
    assert_eq!(first.len(), 4, "the pool was empty, so the heap was used");
    queue.submit(read(2, 512 << 10));
    assert!(queue.next().is_none(), "the second read waits for memory");
    let mut requests: VecDeque<ScsiRequest> = first.into();
    while let Some(request) = requests.pop_front() {
        finish(&mut queue, &request, Vec::new()).unwrap();
        requests.extend(std::iter::from_fn(|| queue.next()));
    }
    for tag in [1, 2] {
        let done = queue.poll_done().unwrap();
        assert_eq!((done.tag, done.result.unwrap().into_data().len()), (Tag(tag), 512 << 10));
    }
    assert!(queue.is_empty());
}

#[test]
fn a_read_next_to_a_query_does_not_wait_for_memory() {
    let mut queue = ready(Pool::new(256 << 10));
    queue.submit(read(1, 512));
    let first = queue.next().unwrap();
    fail(&mut queue, &first, Sense::new(SenseKey::UNIT_ATTENTION, Asc::CAPACITY_DATA_HAS_CHANGED));
    let query = queue.next().unwrap();
    let again = queue.next().unwrap();
    finish(&mut queue, &again, Vec::new()).unwrap();
    queue.submit(read(2, 512 << 10));
    assert!(queue.next().is_some(), "the response to a query returns no memory");
    finish(&mut queue, &query, answer(&query.command)).unwrap();
}

#[test]
fn a_command_that_stays_busy_fails_after_the_time_for_retries() {
    // A target with a full queue is given a second in any case.
    for (busy_timeout, delays) in [(0, 2), (1000, 2), (5000, 10), (60_000, 120)] {
        let mut queue = ready(Pool::new(1 << 20));
        let busy_timeout = Duration::from_millis(busy_timeout);
        queue.retries = RetryRules { busy_timeout, ..RetryRules::default() };
        queue.submit(read(1, 512));
        let mut waited = 0;
        let done = loop {
            let request = queue.next().unwrap();
            queue
                .finish(request.key, ScsiOutcome { status: ScsiStatus::BUSY, sense: &[], moved: 0 })
                .unwrap();
            if let Some(done) = queue.poll_done() {
                break done;
            }
            queue.resume(Duration::from_millis(500));
            waited += 1;
        };
        assert_eq!((done.result.unwrap_err(), waited), (IoError::NoMemory, delays), "{busy_timeout:?}");
        assert!(queue.is_empty() && !queue.has_delayed());
    }
}

#[test]
fn a_retried_read_is_not_written_into_borrowed_data() {
    let mut queue = ready(Pool::new(1 << 20));
    queue.submit(read(1, 512));
    let request = queue.next().unwrap();
    assert!(queue.can_borrow(request.key, 512));
    queue.attach_borrowed(request.key, Chunk::from_slice(&[1; 512]).slice(0, 512));
    queue.finish(request.key, ScsiOutcome { status: ScsiStatus::BUSY, sense: &[], moved: 512 }).unwrap();
    queue.resume(Duration::from_millis(500));
    let again = queue.next().unwrap();
    let (list, _) = queue.data_in(again.key).unwrap();
    assert!(list.is_writable());
    finish(&mut queue, &again, vec![2; 512]).unwrap();
    assert_eq!(queue.poll_done().unwrap().result.unwrap().into_data().to_vec(), [2; 512]);
}

#[test]
fn drained_io_can_be_taken_or_resumed() {
    let mut queue = ready(Pool::new(64 << 20));
    queue.submit(read(1, 512));
    queue.submit(read(2, 512));
    let first = queue.next().unwrap();
    queue.drain();
    assert!(queue.next().is_none() && queue.room() == 0 && !queue.is_idle());
    finish(&mut queue, &first, Vec::new()).unwrap();
    assert!(queue.is_idle() && !queue.is_empty());
    queue.undrain();
    let second = queue.next().unwrap();
    finish(&mut queue, &second, Vec::new()).unwrap();
    assert_eq!((queue.poll_done().unwrap().tag, queue.poll_done().unwrap().tag), (Tag(1), Tag(2)));
    queue.close();
    queue.submit(read(3, 512));
    assert_eq!(queue.poll_done().unwrap().result.err(), Some(IoError::ShuttingDown));
}

#[test]
fn a_unit_that_stays_busy_or_rejects_read_capacity_is_refused() {
    for (fails_at, asc) in [(0x00, Asc::BECOMING_READY), (0x12, Asc::INVALID_FIELD_IN_CDB)] {
        let key = if fails_at == 0 { SenseKey::NOT_READY } else { SenseKey::ILLEGAL_REQUEST };
        let mut queue: ScsiQueue<()> = ScsiQueue::new(Lun::new(3), Pool::new(1 << 20));
        let mut refused = None;
        for _ in 0..200 {
            queue.resume(Duration::from_millis(500));
            let Some(request) = queue.next() else { break };
            let sense = Sense::new(key, asc).to_bytes();
            let is_bad = request.command[0] == fails_at;
            let outcome = ScsiOutcome { status: ScsiStatus::CHECK_CONDITION, sense: &sense, moved: 0 };
            let ended = if is_bad {
                queue.finish(request.key, outcome)
            } else {
                finish(&mut queue, &request, answer(&request.command))
            };
            refused = refused.or(ended.err());
        }
        let said = refused.unwrap().to_string();
        let expected = match fails_at {
            0 => "logical unit 3 is not ready: NOT READY, BECOMING READY",
            _ => "logical unit 3 refused INQUIRY: ILLEGAL REQUEST, INVALID FIELD IN CDB",
        };
        assert_eq!(said, expected);
    }
}

/// Operations of any kind and length.
fn any_op() -> impl Strategy<Value = (Op, u64)> {
    let flags = any::<(bool, bool, bool)>();
    let op = (0..7, flags).prop_map(|(kind, (fua, may_unmap, only_fast))| match kind {
        0 | 1 => Op::Read,
        2 => Op::Write { fua },
        3 => Op::Flush,
        4 => Op::WriteZeroes { fua, may_unmap, only_fast },
        5 => Op::Discard { fua },
        _ => Op::BlockStatus,
    });
    (op, prop_oneof![4 => 1..8_u64, 1 => 1..600_u64])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_request_completes_once_whatever_becomes_of_its_commands(
        ops in prop::collection::vec(any_op(), 1..40),
        ends in prop::collection::vec((any::<u8>(), any::<u8>()), 1..200),
        pool_bytes in prop::sample::select(vec![64 << 10, 64 << 20]),
    ) {
        let pool = Pool::new(pool_bytes);
        let mut queue = ready(pool.clone());
        let mut waiting = BTreeSet::new();
        for (tag, (op, blocks)) in (0..).zip(ops) {
            let len = if op == Op::Flush { 0 } else { blocks * 512 };
            let data = matches!(op, Op::Write { .. }).then(|| SgList::one(Seg::from_slice(&vec![1; len as usize])));
            queue.submit(Io { tag: Tag(tag), op, offset: 0, len, data });
            waiting.insert(tag);
        }
        let mut requests: Vec<ScsiRequest> = Vec::new();
        let mut ends = ends.iter().cycle();
        for _ in 0..20_000 {
            requests.extend(std::iter::from_fn(|| queue.next()));
            while let Some(done) = queue.poll_done() {
                prop_assert!(waiting.remove(&done.tag.0), "twice");
                if let Ok(Output::Extents(extents)) = done.result {
                    prop_assert!(!extents.is_empty());
                }
            }
            if requests.is_empty() && !queue.has_delayed() {
                break;
            }
            queue.resume(Duration::from_secs(1));
            let Some(&(which, how)) = ends.next() else { break };
            if requests.is_empty() {
                continue;
            }
            let request = requests.swap_remove(usize::from(which) % requests.len());
            match how {
                0..=19 => fail(&mut queue, &request, Sense::new(SenseKey::UNIT_ATTENTION, Asc(0x2900))),
                20..=39 => fail(&mut queue, &request, Sense::new(SenseKey::NOT_READY, Asc::BECOMING_READY)),
                40..=59 => fail(&mut queue, &request, Sense::illegal(Asc::INVALID_COMMAND_OPERATION_CODE)),
                60..=69 => fail(&mut queue, &request, Sense::new(SenseKey::MEDIUM_ERROR, Asc(0))),
                _ => finish(&mut queue, &request, Vec::new()).unwrap(),
            }
        }
        prop_assert!(waiting.is_empty() && queue.is_empty(), "{waiting:?} never completed");
        drop(queue);
        prop_assert_eq!(pool.out_bytes(), 0);
    }
}
