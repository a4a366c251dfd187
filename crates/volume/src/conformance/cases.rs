//! Cases about data, errors and the queue.

use super::client::data_of;
use super::{CaseResult, Client, DEPTH, Harness, fail, pattern};
use crate::buf::{Chunk, Memory, Seg};
use crate::io::{Io, IoError, Op, Output, Tag};
use crate::random::{SplitMix, mix};
use crate::sg_list::SgList;
use crate::volume::{MAX_TRANSFER, VolumeInfo};
use std::collections::HashMap;

const WRITE: Op = Op::Write { fua: false };
const ZEROES: Op = Op::WriteZeroes { fua: false, may_unmap: false, only_fast: false };
const DISCARD: Op = Op::Discard { fua: false };

pub(super) fn written_data_reads_back(harness: &mut Harness) -> CaseResult {
    let mut client = harness.client(1)?;
    let info = harness.info();
    let (block, physical) = (u64::from(info.logical_block), u64::from(info.physical_block));
    let most = u64::from(MAX_TRANSFER).min(info.size);
    let mut salt = harness.seed;
    for len in [block, 3 * block, physical, physical + block, 64 << 10, (64 << 10) + block, 1 << 20, most] {
        for offset in [0, block, physical - block, physical, (1 << 20) + 5 * block, info.size - len] {
            let one_of_many = len == most && offset != 0 && offset + len != info.size;
            if offset + len > info.size || one_of_many {
                continue;
            }
            salt += 1;
            let data = pattern(offset, len, salt);
            client.write(offset, &data)?;
            harness.expect_content(&mut client, offset, &data)?;
            let own = SgList::one(Memory::from_heap(len as usize).seg(0, len as usize));
            let output = client.done(Op::Read, offset, len, Some(own.clone()))?;
            harness.compare(offset, &data_of(output, len)?, &data)?;
            harness.compare(offset, &own.to_vec(), &data)?;
        }
    }
    Ok(())
}

pub(super) fn scattered_lists_move_every_byte(harness: &mut Harness) -> CaseResult {
    let mut client = harness.client(1)?;
    let info = harness.info();
    let block = u64::from(info.logical_block);
    let mut random = harness.random();
    // 2000 segments are more than one system call takes (IOV_MAX is 1024).
    for (round, pieces) in [(0, 2), (1, 7), (2, 40), (3, 2000)] {
        let len = if pieces < 100 { 64 << 10 } else { 1 << 20 } + block;
        let offset = (1 << 20) - block;
        let data = pattern(offset, len, harness.seed + 100 + round);
        let from = scattered(&mut random, len as usize, pieces);
        from.copy_from(&data);
        client.done(WRITE, offset, len, Some(from))?;
        harness.expect_content(&mut client, offset, &data)?;
        let to = scattered(&mut random, len as usize, pieces);
        let output = client.done(Op::Read, offset, len, Some(to.clone()))?;
        harness.compare(offset, &data_of(output, len)?, &data)?;
        harness.compare(offset, &to.to_vec(), &data)?;
    }
    Ok(())
}

/// A list of `len` bytes in this many segments of random lengths, each in memory of its own at an
/// odd address.
pub(super) fn scattered(random: &mut SplitMix, len: usize, pieces: usize) -> SgList {
    let mut cuts: Vec<_> = (1..pieces).map(|_| random.below(len as u64) as usize).collect();
    cuts.extend([0, len]);
    cuts.sort_unstable();
    let mut list = SgList::default();
    for cut in cuts.windows(2) {
        let piece = cut[1] - cut[0];
        list.push(Memory::from_heap(piece + 1).seg(1, piece));
    }
    list
}

pub(super) fn received_memory_can_be_written(harness: &mut Harness) -> CaseResult {
    let mut client = harness.client(1)?;
    let len = 8 * u64::from(harness.info().physical_block);
    let data = pattern(len, len, harness.seed + 200);
    let mut received = Chunk::from_slice(&[&[0xee; 28], data.as_slice()].concat());
    received.take(28);
    let half = data.len() / 2 + 1;
    let mut list = SgList::one(received.slice(0, half));
    list.push(received.slice(half, data.len() - half));
    client.done(WRITE, len, len, Some(list))?;
    harness.compare(0, received.unread(), &data)?;
    harness.expect_content(&mut client, len, &data)
}

pub(super) fn borrowed_memory_outlives_its_channel(harness: &mut Harness) -> CaseResult {
    let mut client = harness.client(2)?;
    let data = pattern(0, 128 << 10, harness.seed + 300);
    client.write(0, &data)?;
    let whole = client.done(Op::Read, 0, data.len() as u64, None)?;
    drop(client);
    harness.compare(0, &data_of(whole, data.len() as u64)?, &data)
}

pub(super) fn a_full_queue_completes_every_tag_once(harness: &mut Harness) -> CaseResult {
    let mut client = harness.client(DEPTH)?;
    let area = harness.info().size / u64::from(DEPTH) / 65536 * 65536;
    let len = area.min(128 << 10);
    for round in 0..6 {
        let salt = harness.seed + 400 + round;
        let tag_of = |slot: u64| Tag(mix(slot + harness.seed));
        let slots: HashMap<Tag, u64> = (0..DEPTH.into()).map(|slot| (tag_of(slot), slot)).collect();
        for slot in 0..u64::from(DEPTH) {
            let (tag, offset) = (tag_of(slot), slot * area);
            let data = || Some(SgList::one(Seg::from_slice(&pattern(offset, len, salt))));
            client.submit(match (slot + round) % 8 {
                _ if round == 0 => Io { tag, op: WRITE, offset, len, data: data() },
                0 => Io { tag, op: Op::Write { fua: true }, offset, len, data: data() },
                1 => Io::new(tag, ZEROES, offset, len),
                2 => Io::new(tag, Op::Flush, 0, 0),
                3 => Io::new(tag, Op::BlockStatus, offset, len),
                4 => Io::new(tag, Op::Prefetch, offset, len),
                5 => Io::new(tag, Op::Read, offset, len),
                6 => Io::new(tag, Op::Read, harness.info().size, len),
                _ => Io { tag, op: WRITE, offset, len, data: data() },
            });
        }
        for done in client.wait_all()? {
            let misfit = round != 0 && (slots[&done.tag] + round) % 8 == 6;
            if done.result.is_err() != misfit {
                return fail!("request {} of round {round}: {:?}", slots[&done.tag], done.result);
            }
        }
        client.expect_no_completion()?;
        for slot in 0..u64::from(DEPTH) {
            match (slot + round) % 8 {
                1 if round != 0 => {
                    harness.expect_content(&mut client, slot * area, &vec![0; len as usize])?
                }
                0 | 7 => {
                    harness.expect_content(&mut client, slot * area, &pattern(slot * area, len, salt))?;
                }
                _ => {}
            }
        }
    }
    Ok(())
}

pub(super) fn invalid_requests_are_refused(harness: &mut Harness) -> CaseResult {
    let mut client = harness.client(1)?;
    let info = harness.info();
    let edge = 64 << 10;
    let (first, last) =
        (pattern(0, edge, harness.seed + 500), pattern(info.size - edge, edge, harness.seed + 501));
    client.write(0, &first)?;
    client.write(info.size - edge, &last)?;
    for (op, offset, len, data_len, expected) in invalid_requests(&info) {
        let data = data_len.map(|len: u64| SgList::one(Memory::from_heap(len as usize).seg(0, len as usize)));
        let result = client.call(Io { tag: Tag(u64::MAX), op, offset, len, data })?;
        if result.as_ref().err() != Some(&expected) {
            return fail!(
                "{op:?} of {len} bytes at {offset}, {data_len:?} in its list: {result:?}, not {expected:?}"
            );
        }
    }
    harness.expect_content(&mut client, 0, &first)?;
    harness.expect_content(&mut client, info.size - edge, &last)
}

/// Operation, offset, length, bytes in the list, expected error.
type InvalidRequest = (Op, u64, u64, Option<u64>, IoError);

fn invalid_requests(info: &VolumeInfo) -> Vec<InvalidRequest> {
    let (size, block) = (info.size, u64::from(info.logical_block));
    let mut invalid_requests: Vec<InvalidRequest> = Vec::new();
    for op in [Op::Read, WRITE, ZEROES, DISCARD, Op::Prefetch, Op::BlockStatus] {
        let list = |len| (op == WRITE).then_some(len);
        let last_block = u64::MAX - (block - 1);
        for (offset, len) in
            [(size, block), (size - block, 2 * block), (last_block, block), (last_block, 4 * block)]
        {
            invalid_requests.push((op, offset, len, list(len), IoError::OutOfRange));
        }
        invalid_requests.push((op, 0, size + block, list(block), IoError::OutOfRange));
        if block > 1 {
            invalid_requests.push((op, 1, block, list(block), IoError::Misaligned));
            invalid_requests.push((op, 0, block + block / 2, list(block + block / 2), IoError::Misaligned));
            invalid_requests.push((op, block - 1, 1, list(1), IoError::Misaligned));
        }
    }
    invalid_requests.push((WRITE, 0, block, None, IoError::BadLength));
    for op in [Op::Read, WRITE] {
        invalid_requests.push((op, 0, 2 * block, Some(block), IoError::BadLength));
        invalid_requests.push((op, 0, block, Some(2 * block), IoError::BadLength));
        invalid_requests.push((op, 0, block, Some(0), IoError::BadLength));
        let too_much = u64::from(MAX_TRANSFER) + block;
        if too_much <= size {
            invalid_requests.push((op, 0, too_much, Some(too_much), IoError::BadLength));
        }
    }
    if u64::from(MAX_TRANSFER) + block <= size {
        invalid_requests.push((Op::Read, 0, u64::from(MAX_TRANSFER) + block, None, IoError::BadLength));
    }
    invalid_requests
}

pub(super) fn a_read_only_volume_refuses_writes(harness: &mut Harness) -> CaseResult {
    let len = 64 << 10;
    let data = pattern(0, len, harness.seed + 600);
    harness.client(1)?.write(0, &data)?;
    let Some(mut client) = harness.read_only_client()? else { return Ok(()) };
    for op in [WRITE, Op::Write { fua: true }, ZEROES, DISCARD] {
        let list = op.moves_data().then(|| SgList::one(Memory::from_heap(512).seg(0, 512)));
        let result = client.call(Io { tag: Tag(0), op, offset: 0, len: 512, data: list })?;
        if result.as_ref().err() != Some(&IoError::ReadOnly) {
            return fail!("{op:?} of a read-only volume: {result:?}");
        }
    }
    client.done(Op::Flush, 0, 0, None)?;
    harness.expect_content(&mut client, 0, &data)
}

pub(super) fn stable_writes_and_flushes_complete(harness: &mut Harness) -> CaseResult {
    let mut client = harness.client(4)?;
    let block = u64::from(harness.info().logical_block);
    client.done(Op::Flush, 0, 0, None)?;
    for (round, len) in [(0, block), (1, 64 << 10), (2, (1 << 20) + block)] {
        let data = pattern(block, len, harness.seed + 700 + round);
        let list = Some(SgList::one(Seg::from_slice(&data)));
        client.done(Op::Write { fua: true }, block, len, list)?;
        let output = client.done(Op::Flush, 0, 0, None)?;
        if !matches!(output, Output::Nothing) {
            return fail!("a flush returned {output:?}");
        }
        harness.expect_content(&mut client, block, &data)?;
    }
    Ok(())
}

pub(super) fn channels_see_each_others_writes(harness: &mut Harness) -> CaseResult {
    let (mut first, mut second) = (harness.client(2)?, harness.client(2)?);
    for round in 0..4 {
        let data = pattern(0, 256 << 10, harness.seed + 800 + round);
        first.write(0, &data)?;
        harness.expect_content(&mut second, 0, &data)?;
        second.done(ZEROES, 4096 * 4, 64 << 10, None)?;
        harness.expect_content(&mut first, 4096 * 4, &vec![0; 64 << 10])?;
        std::mem::swap(&mut first, &mut second);
    }
    Ok(())
}

pub(super) fn a_cancelled_request_completes_once(harness: &mut Harness) -> CaseResult {
    let mut client = harness.client(DEPTH)?;
    client.cancel(Tag(3));
    let len = 64 << 10;
    for slot in 0..u64::from(DEPTH) {
        client.submit(Io::new(Tag(slot << 32), Op::Read, slot % 16 * len, len));
    }
    for slot in 0..u64::from(DEPTH) {
        client.cancel(Tag(slot << 32));
        client.cancel(Tag(slot << 32));
    }
    for done in client.wait_all()? {
        match done.result {
            Ok(output) => drop(data_of(output, len)?),
            Err(IoError::Aborted) => {}
            Err(error) => return fail!("a cancelled read failed with another error: {error}"),
        }
    }
    client.expect_no_completion()?;
    client.read(0, len).map(drop)
}

pub(super) fn a_dropped_channel_does_no_harm(harness: &mut Harness) -> CaseResult {
    let len = 128 << 10;
    let data = pattern(0, len, harness.seed + 900);
    harness.client(1)?.write(0, &data)?;
    for _ in 0..3 {
        let mut client: Client = harness.client(DEPTH)?;
        for slot in 0..u64::from(DEPTH) {
            let list =
                (slot % 2 == 0).then(|| SgList::one(Memory::from_heap(len as usize).seg(0, len as usize)));
            client.submit(Io { data: list, ..Io::new(Tag(slot), Op::Read, 0, len) });
        }
        client.start();
    }
    let mut client = harness.client(1)?;
    client.turn();
    harness.expect_content(&mut client, 0, &data)
}
