//! Cases for RDMA Reads and Writes, and for registrations.

use super::pair::{BLANK, ConformancePair, Observed, ample, blank, memory, part, pattern};
use super::{CaseResult, Connect, Side, fail};
use crate::queue_pair::Violation;
use crate::regions::Refusal;
use blockmux_proto::rdma::{Endpoint, RemoteRights, WorkError, WorkRequest};
use blockmux_volume::{Chunk, SgList};

/// Writes of various lengths and offsets. When the message after a write arrives, the written data
/// is in the memory.
pub(super) fn writes_come_before_messages(connect: &mut Connect) -> CaseResult {
    for side in Side::BOTH {
        let mut pair = ConformancePair::connected(connect, &Endpoint { receives: 200, ..ample() })?;
        let target = blank(200_000, 3);
        let remote = pair.register(side.other(), &target, RemoteRights::RemoteWrite)?;
        let mut expected = vec![BLANK; 200_000];
        for (at, len, pieces) in [
            (0, 1, 1),
            (1, 0, 1),
            (66_660, 20, 1),
            (5, 100, 2),
            (200, 1460, 1),
            (3000, 8192, 3),
            (1, 65_536, 1),
            (60_000, 100_001, 7),
            (0, 200_000, 2),
        ] {
            let data = pattern(len as u64, len);
            let write = pair.write(side, &memory(&data, pieces), part(remote, at as u64, len));
            let send = pair.send(side, b"written", SgList::default(), None);
            expected[at..at + len].copy_from_slice(&data);
            pair.settle_with(|_, observed| {
                if matches!(observed, Observed::Received(..)) && target.to_vec() != expected {
                    return fail!("a message arrived before the write of {len} bytes at {at}");
                }
                Ok(())
            })?;
            pair.expect(side, &[Observed::Done(write, Ok(())), Observed::Done(send, Ok(()))])?;
            pair.expect(side.other(), &[Observed::Received(b"written".to_vec(), None)])?;
        }
        // A write that is shorter than its remote range.
        pair.write(side, &memory(b"short", 1), remote);
        pair.settle()?;
        expected[..5].copy_from_slice(b"short");
        if target.to_vec() != expected {
            return fail!("a short write to long memory went wrong");
        }
    }
    Ok(())
}

pub(super) fn reads_fetch_every_byte(connect: &mut Connect) -> CaseResult {
    for side in Side::BOTH {
        let mut pair = ConformancePair::connected(connect, &ample())?;
        let source = pattern(5, 300_000);
        let remote = pair.register(side.other(), &memory(&source, 4), RemoteRights::RemoteRead)?;
        for (at, len, pieces) in [
            (0, 1, 1),
            (299_999, 1, 1),
            (77, 0, 1),
            (74_999, 2, 1),
            (3, 1448, 2),
            (100, 16_384, 4),
            (0, 65_537, 3),
            (0, 300_000, 9),
        ] {
            let local = blank(len, pieces);
            let id = pair.read(side, &local, part(remote, at as u64, len));
            pair.settle_with(|_, observed| {
                let is_done = *observed == Observed::Done(id, Ok(()));
                if is_done && local.to_vec() != source[at..at + len] {
                    return fail!("a read of {len} bytes at {at} completed without its data");
                }
                Ok(())
            })?;
            pair.expect(side, &[Observed::Done(id, Ok(()))])?;
            pair.expect(side.other(), &[])?;
        }
    }
    Ok(())
}

/// The smaller limit of both ends applies.
pub(super) fn reads_beyond_the_limit_wait(connect: &mut Connect) -> CaseResult {
    for (ours, theirs) in [(1, 1), (2, 7), (7, 2), (40, 1), (1, 40)] {
        let active = Endpoint { reads: ours, ..ample() };
        let passive = Endpoint { reads: theirs, ..ample() };
        let mut pair = ConformancePair::begin(connect, &active, &passive);
        pair.accept(&[])?;
        for side in Side::BOTH {
            let source = pattern(6, 64_000);
            let remote = pair.register(side.other(), &memory(&source, 1), RemoteRights::RemoteRead)?;
            let locals: Vec<_> = (0..64).map(|_| blank(1000, 1)).collect();
            let ids: Vec<u64> = locals
                .iter()
                .zip((0..).step_by(1000))
                .map(|(local, at)| pair.read(side, local, part(remote, at, 1000)))
                .collect();
            pair.settle()?;
            let done: Vec<_> = ids.into_iter().map(|id| Observed::Done(id, Ok(()))).collect();
            pair.expect(side, &done)?;
            let fetched: Vec<u8> = locals.iter().flat_map(SgList::to_vec).collect();
            if fetched != source {
                return fail!("64 reads with limits {ours} and {theirs} returned wrong data");
            }
            if pair.wire.end(side).fault().is_some() {
                return fail!("the reads ended the connection: {:?}", pair.wire.end(side).fault());
            }
        }
    }
    Ok(())
}

/// Sends and writes that are posted after a read are executed, even if the read has to wait.
pub(super) fn work_behind_a_read_is_done(connect: &mut Connect) -> CaseResult {
    let mut pair = ConformancePair::connected(connect, &Endpoint { reads: 1, ..ample() })?;
    let source = pattern(8, 50_000);
    let target = blank(30_000, 1);
    let from = pair.register(Side::Passive, &memory(&source, 2), RemoteRights::RemoteRead)?;
    let to = pair.register(Side::Passive, &target, RemoteRights::RemoteWrite)?;
    let locals = [blank(50_000, 1), blank(50_000, 3), blank(50_000, 1)];
    let mut done = Vec::new();
    for (local, number) in locals.iter().zip(0..) {
        done.push(pair.read(Side::Active, local, from));
        let data = memory(&pattern(number, 10_000), 2);
        done.push(pair.write(Side::Active, &data, part(to, number * 10_000, 10_000)));
        done.push(pair.send(Side::Active, &[number as u8], SgList::default(), None));
    }
    pair.settle_with(|_, observed| match observed {
        Observed::Received(message, _)
            if target.slice(usize::from(message[0]) * 10_000, 10_000).to_vec()
                != pattern(message[0].into(), 10_000) =>
        {
            fail!("message {message:?} arrived before the data of the write before it")
        }
        _ => Ok(()),
    })?;
    pair.expect(Side::Passive, &[0, 1, 2].map(|number| Observed::Received(vec![number], None)))?;
    let mut observed = pair.observed(Side::Active);
    observed.sort_by_key(|observed| if let Observed::Done(id, _) = observed { *id } else { 0 });
    if observed != done.into_iter().map(|id| Observed::Done(id, Ok(()))).collect::<Vec<_>>() {
        return fail!("not all work succeeded: {observed:?}");
    }
    if locals.iter().any(|local| local.to_vec() != source) {
        return fail!("a read returned wrong data");
    }
    Ok(())
}

pub(super) fn both_sides_read_at_once(connect: &mut Connect) -> CaseResult {
    let mut pair = ConformancePair::connected(connect, &Endpoint { reads: 2, ..ample() })?;
    let mut locals = Vec::new();
    for side in Side::BOTH {
        let source = pattern(side as u64, 150_000);
        let remote = pair.register(side.other(), &memory(&source, 2), RemoteRights::RemoteRead)?;
        for _ in 0..5 {
            let local = blank(150_000, 2);
            pair.read(side, &local, remote);
            pair.send(side, b"beside", SgList::default(), None);
            locals.push((local, source.clone()));
        }
    }
    pair.settle()?;
    for (local, source) in locals {
        if local.to_vec() != source {
            return fail!("a read returned wrong data while the peer also read");
        }
    }
    for side in Side::BOTH {
        let observed = pair.observed(side);
        let good = observed.iter().filter(|observed| matches!(observed, Observed::Done(_, Ok(())))).count();
        if (observed.len(), good) != (15, 10) {
            return fail!("{side:?} observed {observed:?}");
        }
    }
    Ok(())
}

pub(super) fn registrations_before_the_connection(connect: &mut Connect) -> CaseResult {
    let mut pair = ConformancePair::begin(connect, &ample(), &ample());
    let target = blank(10, 1);
    let remote = pair.register(Side::Active, &target, RemoteRights::RemoteWrite)?;
    pair.accept(&[])?;
    pair.send(Side::Active, b"first", SgList::default(), None);
    pair.settle()?;
    pair.write(Side::Passive, &memory(b"0123456789", 1), remote);
    pair.settle()?;
    if target.to_vec() == b"0123456789" { Ok(()) } else { fail!("the write has not arrived") }
}

/// Send with Invalidate: the tag is invalidated together with the message, and not before.
pub(super) fn a_message_invalidates_memory(connect: &mut Connect) -> CaseResult {
    for side in Side::BOTH {
        let mut pair = ConformancePair::connected(connect, &Endpoint { regions: 2, ..ample() })?;
        if !pair.wire.end(side).caps().invalidates {
            continue;
        }
        let mut last = None;
        for round in 0..20 {
            let target = blank(3000, 1);
            let other = blank(10, 1);
            let remote = pair.register(side.other(), &target, RemoteRights::RemoteWrite)?;
            let second = pair.register(side.other(), &other, RemoteRights::RemoteRead)?;
            pair.write(side, &memory(&pattern(round, 3000), 1), remote);
            pair.send(side, b"closed", SgList::default(), Some(remote.stag));
            pair.read(side, &blank(10, 1), second);
            pair.settle()?;
            pair.expect(side.other(), &[Observed::Received(b"closed".to_vec(), Some(remote.stag))])?;
            if target.to_vec() != pattern(round, 3000) {
                return fail!("data written before the invalidation is missing");
            }
            pair.post(side.other(), WorkRequest::Invalidate { stag: second.stag });
            // Invalidating an invalid tag is not an error.
            pair.post(side.other(), WorkRequest::Invalidate { stag: remote.stag });
            if pair.observed(side).iter().any(|observed| !matches!(observed, Observed::Done(_, Ok(())))) {
                return fail!("not all work succeeded");
            }
            last = Some((remote, target));
        }
        let Some((remote, target)) = last else { continue };
        pair.write(side, &blank(1, 1), remote);
        pair.settle()?;
        pair.expect_refusal(side, Violation::Refused(Refusal::InvalidStag))?;
        if target.to_vec() != pattern(19, 3000) {
            return fail!("memory was written after a message invalidated it");
        }
    }
    Ok(())
}

/// Registers as many regions as the endpoint allows, repeatedly; one more fails. Invalidated memory
/// is released.
pub(super) fn registrations_are_bounded(connect: &mut Connect) -> CaseResult {
    let mut pair = ConformancePair::connected(connect, &Endpoint { regions: 3, ..ample() })?;
    let mut chunk = Chunk::from_slice(b"lent");
    let borrowed = SgList::one(chunk.slice(0, 4));
    chunk.take(4);
    let mut names = Vec::new();
    for _ in 0..50 {
        let remotes = [&borrowed, &borrowed, &borrowed].map(|borrowed| {
            pair.register(Side::Active, borrowed, RemoteRights::RemoteRead).map(|remote| remote.stag)
        });
        for stag in remotes {
            let stag = stag?;
            pair.post(Side::Active, WorkRequest::Invalidate { stag });
            names.push(stag.0);
        }
    }
    drop(borrowed);
    if !chunk.is_idle() {
        return fail!("invalidated memory is still held");
    }
    names.sort_unstable();
    names.dedup();
    if names.len() < 149 {
        return fail!("of 150 tags {} were reused immediately", 150 - names.len());
    }
    for _ in 0..3 {
        pair.register(Side::Active, &blank(8, 1), RemoteRights::RemoteRead)?;
    }
    let id = pair.ask_to_register(Side::Active, &blank(8, 1), RemoteRights::RemoteRead);
    pair.settle()?;
    pair.expect(Side::Active, &[Observed::Done(id, Err(WorkError::Local)), Observed::Disconnected])
}
