//! Cases for connection set-up, disconnect and loss.

use super::pair::{ConformancePair, Observed, ample, blank, memory, pattern};
use super::{CaseResult, Connect, Side, fail};
use blockmux_proto::rdma::{Endpoint, MAX_PRIVATE_DATA, RemoteRights, WorkError, WorkRequest};
use blockmux_volume::SgList;

pub(super) fn private_data_arrives(connect: &mut Connect) -> CaseResult {
    let longest = connect(&ample(), &ample()).end(Side::Active).caps().private_data;
    if longest < MAX_PRIVATE_DATA {
        return fail!("no more than {longest} bytes of private data");
    }
    for len in (0..=MAX_PRIVATE_DATA).chain([longest]) {
        let [question, answer] = [1, 2].map(|salt| pattern(salt, len));
        let active = Endpoint { private_data: question.clone(), ..ample() };
        let mut pair = ConformancePair::begin(connect, &active, &ample());
        if Side::BOTH.map(|side| pair.wire.end(side).room()) != [0, 0] {
            return fail!("there is room for work without a connection");
        }
        pair.settle()?;
        pair.expect(Side::Passive, &[Observed::Requested(question)])?;
        pair.expect(Side::Active, &[])?;
        pair.post(Side::Passive, WorkRequest::Accept { private_data: answer.clone() });
        pair.settle()?;
        pair.expect(Side::Passive, &[Observed::Connected(Vec::new())])?;
        pair.expect(Side::Active, &[Observed::Connected(answer)])?;
        pair.send(Side::Active, b"hello", SgList::default(), None);
        pair.settle()?;
        pair.expect(Side::Passive, &[Observed::Received(b"hello".to_vec(), None)])?;
    }
    Ok(())
}

pub(super) fn a_rejected_peer_gets_the_reason(connect: &mut Connect) -> CaseResult {
    for len in [0, 1, MAX_PRIVATE_DATA] {
        let mut pair = ConformancePair::begin(connect, &ample(), &ample());
        pair.settle()?;
        pair.observed(Side::Passive);
        pair.post(Side::Passive, WorkRequest::Reject { private_data: pattern(3, len) });
        pair.settle()?;
        pair.expect(Side::Active, &[Observed::Refused(pattern(3, len))])?;
        pair.expect(Side::Passive, &[Observed::Disconnected])?;
        for side in Side::BOTH {
            let id = pair.send(side, b"too late", SgList::default(), None);
            pair.settle()?;
            pair.expect(side, &[Observed::Done(id, Err(WorkError::Flushed))])?;
        }
    }
    Ok(())
}

/// The negotiated number of reads exceeds neither side's limit, and is at least one if both sides
/// allow reads.
pub(super) fn endpoints_get_what_they_ask_for(connect: &mut Connect) -> CaseResult {
    for (ours, theirs) in [(0, 0), (1, 1), (1, 8), (8, 1), (5, 5), (64, 64)] {
        let active = Endpoint { reads: ours, ..ample() };
        let passive = Endpoint { reads: theirs, ..ample() };
        let mut pair = ConformancePair::begin(connect, &active, &passive);
        pair.accept(&[])?;
        for side in Side::BOTH {
            let caps = pair.wire.end(side).caps();
            let most = ours.min(theirs);
            if caps.reads > most || caps.peer_reads > ours.max(theirs) || (caps.reads == 0 && most > 0) {
                return fail!("with limits of {ours} and {theirs} reads the result is {caps:?}");
            }
            if caps.max_transfer < 1 << 20 {
                return fail!("no transfers of 1 MiB: {caps:?}");
            }
        }
    }
    Ok(())
}

pub(super) fn disconnect_finishes_posted_work(connect: &mut Connect) -> CaseResult {
    for side in Side::BOTH {
        let mut pair = ConformancePair::connected(connect, &ample())?;
        let source = pattern(4, 70_000);
        let target = blank(70_000, 1);
        let from = pair.register(side.other(), &memory(&source, 1), RemoteRights::RemoteRead)?;
        let to = pair.register(side.other(), &target, RemoteRights::RemoteWrite)?;
        let local = blank(70_000, 1);
        let mut done = vec![pair.read(side, &local, from)];
        done.push(pair.write(side, &memory(&source, 2), to));
        done.push(pair.send(side, b"bye", SgList::default(), None));
        pair.post(side, WorkRequest::Disconnect);
        let late = pair.send(side, b"late", SgList::default(), None);
        pair.settle()?;
        let mut observed = pair.observed(side);
        if observed.pop() != Some(Observed::Disconnected) {
            return fail!("the side that disconnects does not get Disconnected at the end");
        }
        let is_late = |observed: &Observed| *observed == Observed::Done(late, Err(WorkError::Flushed));
        if observed.iter().filter(|observed| is_late(observed)).count() != 1 {
            return fail!("work posted after the disconnect was not flushed: {observed:?}");
        }
        observed.retain(|observed| !is_late(observed));
        observed.sort_by_key(|observed| if let Observed::Done(id, _) = observed { *id } else { 0 });
        if observed != done.into_iter().map(|id| Observed::Done(id, Ok(()))).collect::<Vec<_>>() {
            return fail!("not all work posted before the disconnect succeeded: {observed:?}");
        }
        pair.expect(side.other(), &[Observed::Received(b"bye".to_vec(), None), Observed::Disconnected])?;
        if local.to_vec() != source || target.to_vec() != source {
            return fail!("work posted before the disconnect was not carried out");
        }
        if pair.wire.end(side).fault().or(pair.wire.end(side.other()).fault()).is_some() {
            return fail!("a disconnect is reported as a fault");
        }
    }
    Ok(())
}

/// This includes disconnects by both sides, and two by one side.
pub(super) fn disconnect_is_reported_once(connect: &mut Connect) -> CaseResult {
    for leaves in [&[Side::Active][..], &[Side::Passive], &Side::BOTH, &[Side::Active, Side::Active]] {
        let mut pair = ConformancePair::connected(connect, &ample())?;
        leaves.iter().for_each(|side| pair.post(*side, WorkRequest::Disconnect));
        pair.settle()?;
        pair.wire.break_connection();
        pair.settle()?;
        for side in Side::BOTH {
            pair.expect(side, &[Observed::Disconnected])?;
            pair.post(side, WorkRequest::Receive);
            pair.post(side, WorkRequest::Disconnect);
            let id = pair.ask_to_register(side, &blank(1, 1), RemoteRights::RemoteRead);
            pair.settle()?;
            pair.expect(side, &[Observed::Done(id, Err(WorkError::Flushed))])?;
            if pair.wire.end(side).room() > 0 {
                return fail!("there is room for work after the connection ended");
            }
        }
    }
    Ok(())
}

/// The connection is lost after each number of turns: all work completes once, flushed work in
/// order, and then the end is reported.
pub(super) fn a_loss_completes_all_work(connect: &mut Connect) -> CaseResult {
    for turns in 0..30 {
        let mut pair = ConformancePair::connected(connect, &Endpoint { reads: 2, ..ample() })?;
        let remote =
            |pair: &mut ConformancePair, side, access| pair.register(side, &blank(20_000, 1), access);
        let mut posted = [Vec::new(), Vec::new()];
        for (side, posted) in Side::BOTH.into_iter().zip(&mut posted) {
            let from = remote(&mut pair, side.other(), RemoteRights::RemoteRead)?;
            let to = remote(&mut pair, side.other(), RemoteRights::RemoteWrite)?;
            for _ in 0..5 {
                posted.push(pair.read(side, &blank(20_000, 1), from));
                posted.push(pair.send(side, b"message", blank(100, 1), None));
                posted.push(pair.write(side, &blank(20_000, 1), to));
            }
        }
        pair.turn(turns);
        for side in Side::BOTH {
            (0..turns % 3).for_each(|_| {
                pair.poll_once(side);
            });
        }
        pair.wire.break_connection();
        pair.settle()?;
        for (side, posted) in Side::BOTH.into_iter().zip(posted) {
            let mut observed = pair.observed(side);
            if observed.pop() != Some(Observed::Disconnected) || observed.contains(&Observed::Disconnected) {
                return fail!(
                    "broken after {turns} turns, {side:?} did not get Disconnected once, at the end"
                );
            }
            let back =
                |observed: &Observed| if let Observed::Done(id, _) = observed { Some(*id) } else { None };
            let flushed: Vec<_> = observed
                .iter()
                .filter(|observed| matches!(observed, Observed::Done(_, Err(WorkError::Flushed))))
                .filter_map(back)
                .collect();
            let mut all: Vec<_> = observed.iter().filter_map(back).collect();
            all.sort_unstable();
            if all != posted || !flushed.is_sorted() {
                return fail!("broken after {turns} turns, {posted:?} completed as {observed:?}");
            }
        }
    }
    Ok(())
}
