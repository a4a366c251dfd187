//! Cases for messages and the send queue.

use super::pair::{ConformancePair, Observed, ample, memory, pattern};
use super::{CaseResult, Connect, Side, fail};
use blockmux_proto::rdma::{Endpoint, WorkRequest};
use blockmux_volume::{Chunk, SgList};

/// Messages of every length arrive, one by one and many together, in both directions at once.
pub(super) fn every_length_arrives(connect: &mut Connect) -> CaseResult {
    for at_a_time in [1, 7, 32] {
        let endpoint = Endpoint { receives: at_a_time, receive_len: 300, sends: at_a_time, ..ample() };
        let mut pair = ConformancePair::connected(connect, &endpoint)?;
        for lens in (0..=300).collect::<Vec<usize>>().chunks(at_a_time as usize) {
            let mut expected = Side::BOTH.map(|_| Vec::new());
            for (side, expected) in Side::BOTH.into_iter().zip(&mut expected) {
                for len in lens {
                    let message = pattern(*len as u64 + side as u64, *len);
                    pair.send(side, &message, SgList::default(), None);
                    expected.push(Observed::Received(message, None));
                }
            }
            pair.settle()?;
            for (side, expected) in Side::BOTH.into_iter().rev().zip(expected) {
                let mut observed = pair.observed(side);
                observed.retain(|observed| !matches!(observed, Observed::Done(_, Ok(()))));
                if observed != expected {
                    return fail!("for messages of {lens:?} bytes, {side:?} observed {observed:?}");
                }
                lens.iter().for_each(|_| pair.post(side, WorkRequest::Receive));
            }
        }
    }
    Ok(())
}

pub(super) fn pieces_arrive_in_one(connect: &mut Connect) -> CaseResult {
    let mut pair = ConformancePair::connected(connect, &Endpoint { receive_len: 100_000, ..ample() })?;
    for (head, payload, pieces) in
        [(0, 5, 1), (5, 5, 1), (28, 0, 3), (128, 1000, 2), (200, 1, 1), (1, 70_000, 5), (76, 99_000, 40)]
    {
        let message = pattern(head as u64 ^ payload as u64, head + payload);
        let (head, rest) = message.split_at(head);
        let id = pair.send(Side::Active, head, memory(rest, pieces), None);
        pair.settle()?;
        pair.expect(Side::Active, &[Observed::Done(id, Ok(()))])?;
        pair.expect(Side::Passive, &[Observed::Received(message, None)])?;
    }
    Ok(())
}

/// An endpoint takes as many sends as its depth, and each completion makes room for one more.
pub(super) fn a_queue_is_as_deep_as_it_says(connect: &mut Connect) -> CaseResult {
    for sends in [1, 2, 33] {
        let mut pair = ConformancePair::connected(connect, &Endpoint { sends, receives: 40, ..ample() })?;
        for side in Side::BOTH {
            if pair.wire.end(side).room() != sends as usize {
                return fail!("room for {} and not for {sends}", pair.wire.end(side).room());
            }
            let mut ids = Vec::new();
            while pair.wire.end(side).room() > 0 && ids.len() < 1000 {
                ids.push(pair.send(side, b"message", SgList::default(), None));
            }
            if ids.len() != sends as usize {
                return fail!("{} sends were taken and not {sends}", ids.len());
            }
            pair.settle()?;
            let done: Vec<_> = ids.into_iter().map(|id| Observed::Done(id, Ok(()))).collect();
            pair.expect(side, &done)?;
            pair.observed(side.other());
            if pair.wire.end(side).room() != sends as usize {
                return fail!("room for {} after all of {sends} came back", pair.wire.end(side).room());
            }
        }
    }
    Ok(())
}

pub(super) fn completed_work_releases_its_memory(connect: &mut Connect) -> CaseResult {
    let mut pair = ConformancePair::connected(connect, &ample())?;
    for len in [1, 100, 4000] {
        let mut chunk = Chunk::from_slice(&pattern(1, len));
        let borrowed = SgList::one(chunk.slice(0, len));
        chunk.take(len);
        let id = pair.send(Side::Active, b"", borrowed, None);
        pair.settle()?;
        pair.expect(Side::Active, &[Observed::Done(id, Ok(()))])?;
        pair.observed(Side::Passive);
        if !chunk.is_idle() {
            return fail!("{len} bytes that were sent are still held");
        }
    }
    Ok(())
}
