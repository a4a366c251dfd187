//! Cases for violations by a peer, and for work that is not possible.

use super::pair::{BLANK, ConformancePair, Observed, ample, blank, memory, part};
use super::{CaseResult, Connect, Side, fail};
use crate::queue_pair::Violation;
use crate::regions::Refusal;
use blockmux_proto::rdma::{Endpoint, Remote, RemoteRights, Stag, WorkError, WorkRequest};
use blockmux_volume::{Chunk, SgList};

/// Every invalid tag, range and access, by reads and by writes, from both sides: each is refused
/// for its own reason, and no memory is touched.
pub(super) fn ungranted_memory_is_refused(connect: &mut Connect) -> CaseResult {
    type ChangeRemote = fn(Remote) -> Remote;
    let cases: [(ChangeRemote, Refusal); 9] = [
        (|remote| Remote { stag: Stag(remote.stag.0 ^ 1), ..remote }, Refusal::InvalidStag),
        (|remote| Remote { stag: Stag(remote.stag.0 ^ 1 << 31), ..remote }, Refusal::InvalidStag),
        (|remote| Remote { stag: Stag(0), ..remote }, Refusal::InvalidStag),
        (|remote| part(remote, 1, 64), Refusal::Bounds),
        (|remote| part(remote, 0, 65), Refusal::Bounds),
        (|remote| part(remote, 64, 1), Refusal::Bounds),
        (|remote| Remote { address: remote.address.wrapping_sub(1), len: 1, ..remote }, Refusal::Bounds),
        (|remote| Remote { address: u64::MAX, len: 2, ..remote }, Refusal::Wrap),
        (|remote| Remote { address: u64::MAX - 63, len: 65, ..remote }, Refusal::Wrap),
    ];
    for side in Side::BOTH {
        for access in [RemoteRights::RemoteRead, RemoteRights::RemoteWrite] {
            for (wrong, refusal) in cases {
                refuse(connect, side, access, access, wrong, refusal)?;
            }
        }
        let [read, write] = [RemoteRights::RemoteRead, RemoteRights::RemoteWrite];
        refuse(connect, side, read, write, |remote| remote, Refusal::Access)?;
        refuse(connect, side, write, read, |remote| remote, Refusal::Access)?;
    }
    Ok(())
}

/// Registers memory for one kind of access and uses it for another, at a changed address, with more
/// work behind.
fn refuse(
    connect: &mut Connect,
    side: Side,
    granted: RemoteRights,
    used: RemoteRights,
    wrong: fn(Remote) -> Remote,
    refusal: Refusal,
) -> CaseResult {
    let mut pair = ConformancePair::connected(connect, &ample())?;
    let target = blank(64, 2);
    let neighbours = [blank(64, 1), blank(64, 1)];
    pair.register(side.other(), &neighbours[0], granted)?;
    let remote = pair.register(side.other(), &target, granted)?;
    pair.register(side.other(), &neighbours[1], granted)?;
    let asked = wrong(remote);
    let what = format!("{used:?} of {asked:?} where {granted:?} of {remote:?} was granted");
    let local = memory(&vec![1; asked.len as usize], 1);
    let wrong = match used {
        RemoteRights::RemoteRead => pair.read(side, &local, asked),
        RemoteRights::RemoteWrite => pair.write(side, &local, asked),
    };
    let behind = pair.send(side, b"behind", SgList::default(), None);
    pair.settle()?;
    let observed = pair.observed(side);
    let results: Vec<_> = observed
        .iter()
        .filter_map(
            |observed| if let Observed::Done(id, result) = observed { Some((*id, *result)) } else { None },
        )
        .collect();
    let may_be_over = [Ok(()), Err(WorkError::Flushed)];
    let is_right = results.contains(&(wrong, Err(WorkError::RemoteAccess)))
        || (used == RemoteRights::RemoteWrite
            && may_be_over.iter().any(|result| results.contains(&(wrong, *result))));
    let is_behind_back = may_be_over.iter().any(|result| results.contains(&(behind, *result)));
    if results.len() != 2 || !is_right || !is_behind_back || observed.last() != Some(&Observed::Disconnected)
    {
        return fail!("{what} came back as {observed:?}");
    }
    pair.expect(side.other(), &[Observed::Disconnected]).map_err(|error| format!("{what}: {error}"))?;
    let is_untouched = |list: &SgList, byte| list.to_vec().iter().all(|found| *found == byte);
    if !neighbours.iter().chain([&target]).all(|list| is_untouched(list, BLANK)) {
        return fail!("{what} has changed memory");
    }
    if !is_untouched(&local, 1) {
        return fail!("{what} has brought something");
    }
    // The events were checked above.
    let faults = [side, side.other()].map(|side| pair.wire.end(side).fault());
    let violation = Violation::Refused(refusal);
    let expected = pair.faults_of(violation);
    if faults != expected.map(Some) {
        return fail!("{what}: the faults are {faults:?} and not {expected:?}");
    }
    Ok(())
}

pub(super) fn invalidated_memory_is_refused(connect: &mut Connect) -> CaseResult {
    for side in Side::BOTH {
        for access in [RemoteRights::RemoteRead, RemoteRights::RemoteWrite] {
            let mut pair = ConformancePair::connected(connect, &ample())?;
            let target = blank(64, 1);
            let remote = pair.register(side.other(), &target, access)?;
            pair.post(side.other(), WorkRequest::Invalidate { stag: remote.stag });
            let local = memory(&[1; 64], 1);
            match access {
                RemoteRights::RemoteRead => pair.read(side, &local, remote),
                RemoteRights::RemoteWrite => pair.write(side, &local, remote),
            };
            pair.settle()?;
            pair.expect_refusal(side, Violation::Refused(Refusal::InvalidStag))?;
            if target.to_vec() != [BLANK; 64] || local.to_vec() != [1; 64] {
                return fail!("{access:?} of invalidated memory has transferred data");
            }
        }
    }
    Ok(())
}

/// Each connection is its own protection domain.
pub(super) fn foreign_tags_are_refused(connect: &mut Connect) -> CaseResult {
    for access in [RemoteRights::RemoteRead, RemoteRights::RemoteWrite] {
        let mut first = ConformancePair::connected(connect, &ample())?;
        let mut second = ConformancePair::connected(connect, &ample())?;
        let [own, foreign] = [blank(64, 1), blank(64, 1)];
        second.register(Side::Passive, &own, access)?;
        let remote = first.register(Side::Passive, &foreign, access)?;
        let local = memory(&[1; 64], 1);
        match access {
            RemoteRights::RemoteRead => second.read(Side::Active, &local, remote),
            RemoteRights::RemoteWrite => second.write(Side::Active, &local, remote),
        };
        second.settle()?;
        first.settle()?;
        second.expect_refusal(Side::Active, Violation::Refused(Refusal::InvalidStag))?;
        if [own, foreign].iter().any(|list| list.to_vec() != [BLANK; 64]) || local.to_vec() != [1; 64] {
            return fail!("{access:?} with another connection's tag has transferred data");
        }
        first.expect(Side::Active, &[])?;
        first.expect(Side::Passive, &[])?;
    }
    Ok(())
}

pub(super) fn invalidating_an_invalid_tag(connect: &mut Connect) -> CaseResult {
    for side in Side::BOTH {
        for is_stale in [false, true] {
            let mut pair = ConformancePair::connected(connect, &ample())?;
            if !pair.wire.end(side).caps().invalidates {
                continue;
            }
            let remote = pair.register(side.other(), &blank(8, 1), RemoteRights::RemoteRead)?;
            let stag = if is_stale { remote.stag } else { Stag(!remote.stag.0) };
            pair.post(side.other(), WorkRequest::Invalidate { stag: remote.stag });
            pair.send(side, b"closes", SgList::default(), Some(stag));
            pair.settle()?;
            let observed = pair.observed(side.other());
            if observed != [Observed::Disconnected] {
                return fail!("a message that invalidates an invalid tag was reported as {observed:?}");
            }
            let violation = Violation::Refused(Refusal::CannotInvalidate);
            let faults = [side, side.other()].map(|side| pair.wire.end(side).fault());
            if faults != pair.faults_of(violation).map(Some) {
                return fail!("the faults are {faults:?}");
            }
        }
    }
    Ok(())
}

pub(super) fn no_receive_buffer(connect: &mut Connect) -> CaseResult {
    for side in Side::BOTH {
        let mut pair = ConformancePair::connected(connect, &Endpoint { receives: 2, ..ample() })?;
        pair.post(side.other(), WorkRequest::Receive);
        for _ in 0..3 {
            pair.send(side, b"fits", SgList::default(), None);
        }
        pair.settle()?;
        pair.expect(side.other(), &vec![Observed::Received(b"fits".to_vec(), None); 3])?;
        pair.send(side, b"does not", SgList::default(), None);
        pair.settle()?;
        pair.expect_refusal(side, Violation::NoReceive)?;
    }
    Ok(())
}

pub(super) fn a_message_too_long(connect: &mut Connect) -> CaseResult {
    for side in Side::BOTH {
        for too_long in [101, 5000, 200_000] {
            let mut pair = ConformancePair::connected(connect, &Endpoint { receive_len: 100, ..ample() })?;
            pair.send(side, &[7; 60], blank(40, 1), None);
            pair.settle()?;
            let arrived = pair.observed(side.other());
            if !matches!(&arrived[..], [Observed::Received(message, None)] if message.len() == 100) {
                return fail!("a message that just fits was reported as {arrived:?}");
            }
            pair.send(side, b"", blank(too_long, 1), None);
            pair.settle()?;
            pair.expect_refusal(side, Violation::TooLong)?;
        }
    }
    Ok(())
}

/// Each kind of impossible work fails and ends its connection.
pub(super) fn impossible_work_fails(connect: &mut Connect) -> CaseResult {
    type ImpossibleWork = fn(&mut ConformancePair, Remote) -> u64;
    let tries: [(&str, ImpossibleWork); 4] = [
        ("a read of another length", |pair, remote| pair.read(Side::Active, &blank(9, 1), remote)),
        ("a write of more than there is room for", |pair, remote| {
            pair.write(Side::Active, &blank(11, 1), remote)
        }),
        ("a read into what may not be written", |pair, remote| {
            pair.read(Side::Active, &SgList::one(Chunk::from_slice(&[0; 10]).slice(0, 10)), remote)
        }),
        ("a grant to write what may not be written", |pair, _| {
            let borrowed = SgList::one(Chunk::from_slice(&[0; 10]).slice(0, 10));
            pair.ask_to_register(Side::Active, &borrowed, RemoteRights::RemoteWrite)
        }),
    ];
    for (what, attempt) in tries {
        let mut pair = ConformancePair::connected(connect, &ample())?;
        let remote = pair.register(Side::Passive, &blank(10, 1), RemoteRights::RemoteRead)?;
        let id = attempt(&mut pair, remote);
        pair.settle()?;
        pair.expect(Side::Active, &[Observed::Done(id, Err(WorkError::Local)), Observed::Disconnected])
            .map_err(|error| format!("{what}: {error}"))?;
        pair.expect(Side::Passive, &[Observed::Disconnected])?;
    }
    let mut pair = ConformancePair::connected(connect, &Endpoint { reads: 0, ..ample() })?;
    let remote = pair.register(Side::Passive, &blank(10, 1), RemoteRights::RemoteRead)?;
    let id = pair.read(Side::Active, &blank(10, 1), remote);
    pair.settle()?;
    pair.expect(Side::Active, &[Observed::Done(id, Err(WorkError::Local)), Observed::Disconnected])
}
