//! Cases for requests with a range and without data.

use super::{CaseResult, Client, Failure, Harness, fail, pattern};
use crate::io::{Extent, Io, IoError, Op, Output, Tag};
use crate::sg_list::SgList;
use crate::volume::MAX_TRANSFER;

/// Write-zeroes operations with every combination of flags.
pub(super) fn all_zeroes() -> impl Iterator<Item = Op> {
    (0..8).map(|bits| Op::WriteZeroes {
        fua: bits & 1 != 0,
        may_unmap: bits & 2 != 0,
        only_fast: bits & 4 != 0,
    })
}

/// Offsets and lengths of ranges in the first 3 MiB, aligned and unaligned to the units that
/// volumes use.
fn ranges(block: u64) -> [(u64, u64); 6] {
    [
        (MARGIN, block),
        (MARGIN, 64 << 10),
        (MARGIN - block, 2 * block),
        (MARGIN + block, (192 << 10) - block),
        (MARGIN + 7 * block, (1 << 20) + 3 * block),
        (1 << 20, 1 << 20),
    ]
}

/// Bytes compared on each side of a range.
const MARGIN: u64 = 128 << 10;

/// Writes a range and the bytes around it, applies `op` to the range, and compares the bytes around
/// it. Returns whether the volume supports `op`, and the range's content before and after.
fn around(
    harness: &mut Harness,
    client: &mut Client,
    op: Op,
    (offset, len): (u64, u64),
) -> CaseResult<(bool, Vec<u8>, Vec<u8>)> {
    let (first, last) = (offset - offset.min(MARGIN), offset + len + MARGIN);
    let before = pattern(first, last - first, harness.seed + offset + len);
    client.write(first, &before)?;
    let did = match client.call(Io::new(Tag(1), op, offset, len))? {
        Ok(Output::Nothing) => true,
        Err(IoError::Unsupported) if matches!(op, Op::WriteZeroes { only_fast: true, .. }) => false,
        result => return fail!("{op:?} of {len} bytes at {offset}: {result:?}"),
    };
    let after = client.read(first, last - first)?;
    let (head, tail) = ((offset - first) as usize, (offset + len - first) as usize);
    harness.compare(first, &after[..head], &before[..head])?;
    harness.compare(offset + len, &after[tail..], &before[tail..])?;
    Ok((did, before[head..tail].to_vec(), after[head..tail].to_vec()))
}

pub(super) fn zeroes_leave_neighbours_alone(harness: &mut Harness) -> CaseResult {
    let mut client = harness.client(1)?;
    let block = u64::from(harness.info().logical_block);
    for range in ranges(block) {
        for op in all_zeroes() {
            let (did, before, after) = around(harness, &mut client, op, range)?;
            let expected = if did { vec![0; after.len()] } else { before };
            let compared = harness.compare(range.0, &after, &expected);
            compared.map_err(|Failure(what)| Failure(format!("after {op:?} of {range:?}: {what}")))?;
        }
    }
    Ok(())
}

pub(super) fn discards_leave_neighbours_alone(harness: &mut Harness) -> CaseResult {
    let mut client = harness.client(1)?;
    for range in ranges(harness.info().logical_block.into()) {
        for fua in [false, true] {
            around(harness, &mut client, Op::Discard { fua }, range)?;
        }
        // A discarded range can be written again.
        let data = pattern(range.0, range.1, harness.seed + 1);
        client.write(range.0, &data)?;
        harness.expect_content(&mut client, range.0, &data)?;
    }
    Ok(())
}

pub(super) fn large_ranges_can_be_zeroed(harness: &mut Harness) -> CaseResult {
    let mut client = harness.client(1)?;
    let info = harness.info();
    let len = (u64::from(MAX_TRANSFER) + u64::from(info.logical_block)).min(info.size);
    let offsets = [0, len / 2 / 65536 * 65536, len - 65536];
    for op in [Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false }, Op::Discard { fua: false }]
    {
        for offset in offsets {
            client.write(offset, &pattern(offset, 65536, harness.seed + 2))?;
        }
        client.done(op, 0, len, None)?;
    }
    client.done(Op::WriteZeroes { fua: false, may_unmap: false, only_fast: false }, 0, len, None)?;
    for offset in offsets {
        harness.expect_content(&mut client, offset, &[0; 65536])?;
    }
    Ok(())
}

/// The extents in a reply, checked against the rules.
pub(super) fn check_extents(output: Output, offset: u64, len: u64, block: u64) -> CaseResult<Vec<Extent>> {
    let Output::Extents(extents) = output else { return fail!("block status returned {output:?}") };
    if extents.is_empty() {
        return fail!("no extent at {offset}");
    }
    if let Some(extent) = extents.iter().find(|extent| extent.len == 0 || extent.len % block != 0) {
        return fail!("{extent:?} among those from {offset} on");
    }
    let sum = extents.iter().try_fold(0u64, |sum, extent| sum.checked_add(extent.len));
    if sum.is_none_or(|sum| sum > len) {
        return fail!("extents of {len} bytes at {offset} cover {sum:?}");
    }
    Ok(extents)
}

pub(super) fn block_status_is_correct(harness: &mut Harness) -> CaseResult {
    let mut client = harness.client(1)?;
    let (block, size) = (u64::from(harness.info().logical_block), harness.info().size);
    let unmap = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };
    client.done(unmap, 0, 4 << 20, None)?;
    client.write(MARGIN, &pattern(MARGIN, 4 * block, harness.seed))?;
    client.write(1 << 20, &pattern(1 << 20, 1 << 20, harness.seed))?;
    client.done(unmap, (1 << 20) + (256 << 10), 256 << 10, None)?;
    client.done(
        Op::WriteZeroes { fua: false, may_unmap: false, only_fast: false },
        3 << 20,
        128 << 10,
        None,
    )?;
    client.done(Op::Discard { fua: false }, (3 << 20) + (512 << 10), 128 << 10, None)?;
    let asked =
        [(0, 4 << 20), (block, (4 << 20) - block), (MARGIN + 2 * block, 3 * block), (0, block), (0, size)];
    for (offset, len) in asked {
        let end = (offset + len).min(4 << 20);
        let mut at = offset;
        while at < end {
            let output = client.done(Op::BlockStatus, at, offset + len - at, None)?;
            for extent in check_extents(output, at, offset + len - at, block)? {
                let looked_at = extent.len.min(4 << 20);
                if extent.zero && client.read(at, looked_at.min(size - at))?.iter().any(|&byte| byte != 0) {
                    return fail!("{extent:?} at {at} does not read as zeroes");
                }
                at += extent.len;
            }
        }
    }
    Ok(())
}

pub(super) fn a_prefetch_changes_nothing(harness: &mut Harness) -> CaseResult {
    let mut client = harness.client(1)?;
    let data = pattern(0, 1 << 20, harness.seed + 3);
    client.write(0, &data)?;
    for (offset, len) in [(0, 1 << 20), (512 << 10, 4096), (0, harness.info().size)] {
        let output = client.done(Op::Prefetch, offset, len, None)?;
        if !matches!(output, Output::Nothing) {
            return fail!("a prefetch returned {output:?}");
        }
    }
    harness.expect_content(&mut client, 0, &data)
}

/// A request of length 0 may have any result, but must complete and change no data.
pub(super) fn requests_of_no_length_complete(harness: &mut Harness) -> CaseResult {
    let mut client = harness.client(1)?;
    let size = harness.info().size;
    let data = pattern(0, MARGIN, harness.seed + 4);
    client.write(0, &data)?;
    let others =
        [Op::Read, Op::Write { fua: false }, Op::Discard { fua: true }, Op::Prefetch, Op::BlockStatus];
    for op in others.into_iter().chain(all_zeroes()) {
        for offset in [0, MARGIN / 2, size] {
            let lists = [None, Some(SgList::default())];
            for list in lists.into_iter().take(if op == Op::Read { 2 } else { 1 }) {
                let list = if matches!(op, Op::Write { .. }) { Some(SgList::default()) } else { list };
                match client.call(Io { tag: Tag(0), op, offset, len: 0, data: list })? {
                    Ok(Output::Data(list)) if !list.is_empty() => {
                        return fail!("{op:?} of nothing: {list:?}");
                    }
                    Ok(Output::Extents(extents)) if !extents.is_empty() => {
                        return fail!("{op:?} of nothing: {extents:?}");
                    }
                    _ => {}
                }
            }
        }
    }
    client.expect_no_completion()?;
    harness.expect_content(&mut client, 0, &data)
}
