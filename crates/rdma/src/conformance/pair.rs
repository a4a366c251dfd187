//! A connection under test: posts work, and records the events of each end.

use super::{CaseResult, Connect, Side, Wire, fail};
use crate::queue_pair::{Fault, Violation};
use blockmux_proto::rdma::{
    Endpoint, Event, MessageHead, Remote, RemoteRights, Stag, WorkError, WorkId, WorkRequest,
};
use blockmux_volume::random::mix;
use blockmux_volume::{Memory, Seg, SgList};

/// An event of an end, in comparable form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Observed {
    Requested(Vec<u8>),
    Connected(Vec<u8>),
    Refused(Vec<u8>),
    Received(Vec<u8>, Option<Stag>),
    Done(u64, Result<(), WorkError>),
    Registered(u64, Remote),
    Disconnected,
}

impl Observed {
    /// Appends zeroes to private data, up to the length of `found`.
    fn pad_like(&mut self, found: &Observed) {
        if let (
            Observed::Requested(data) | Observed::Connected(data) | Observed::Refused(data),
            Observed::Requested(found) | Observed::Connected(found) | Observed::Refused(found),
        ) = (self, found)
            && data.len() < found.len()
        {
            data.resize(found.len(), 0);
        }
    }
}

pub(super) struct ConformancePair {
    pub(super) wire: Box<dyn Wire>,
    observed: [Vec<Observed>; 2],
    next_id: u64,
}

impl ConformancePair {
    /// Creates both ends, which have not exchanged anything yet.
    pub(super) fn begin(connect: &mut Connect, active: &Endpoint, passive: &Endpoint) -> ConformancePair {
        ConformancePair { wire: connect(active, passive), observed: [Vec::new(), Vec::new()], next_id: 0 }
    }

    /// Creates a connection between two such ends.
    pub(super) fn connected(connect: &mut Connect, endpoint: &Endpoint) -> CaseResult<ConformancePair> {
        let mut pair = ConformancePair::begin(connect, endpoint, endpoint);
        pair.accept(&[])?;
        Ok(pair)
    }

    /// Establishes the connection; both ends report nothing else.
    pub(super) fn accept(&mut self, private_data: &[u8]) -> CaseResult {
        self.settle()?;
        let requested = self.observed(Side::Passive);
        let [Observed::Requested(_)] = &requested[..] else {
            return fail!("the passive side observed {requested:?} of a connection");
        };
        self.post(Side::Passive, WorkRequest::Accept { private_data: private_data.to_vec() });
        self.settle()?;
        self.expect(Side::Passive, &[Observed::Connected(Vec::new())])?;
        self.expect(Side::Active, &[Observed::Connected(private_data.to_vec())])
    }

    pub(super) fn post(&mut self, side: Side, work: WorkRequest) {
        self.wire.end(side).post(work);
    }

    fn id(&mut self) -> WorkId {
        self.next_id += 1;
        WorkId(self.next_id)
    }

    /// Sends a message with this head and payload; returns the number of the work.
    pub(super) fn send(&mut self, side: Side, head: &[u8], payload: SgList, closes: Option<Stag>) -> u64 {
        let (id, head) = (self.id(), MessageHead::from_slice(head));
        self.post(
            side,
            WorkRequest::Send { id, head, payload, invalidate: closes, is_solicited: id.0 % 2 == 0 },
        );
        id.0
    }

    pub(super) fn read(&mut self, side: Side, local: &SgList, remote: Remote) -> u64 {
        let id = self.id();
        self.post(side, WorkRequest::Read { id, local: local.clone(), remote });
        id.0
    }

    pub(super) fn write(&mut self, side: Side, local: &SgList, remote: Remote) -> u64 {
        let id = self.id();
        self.post(side, WorkRequest::Write { id, local: local.clone(), remote });
        id.0
    }

    /// Registers memory, which must succeed; all other events stay recorded.
    pub(super) fn register(
        &mut self,
        side: Side,
        local: &SgList,
        access: RemoteRights,
    ) -> CaseResult<Remote> {
        let id = self.ask_to_register(side, local, access);
        self.poll_events(side);
        let observed = self.log(side);
        let at =
            observed.iter().position(|observed| matches!(observed, Observed::Registered(of, _) if *of == id));
        let Some(Observed::Registered(_, remote)) = at.map(|at| observed.remove(at)) else {
            return fail!("no memory was registered, but {observed:?} observed");
        };
        if remote.len as usize != local.len() {
            return fail!("{} bytes were registered as {remote:?}", local.len());
        }
        Ok(remote)
    }

    pub(super) fn ask_to_register(&mut self, side: Side, local: &SgList, access: RemoteRights) -> u64 {
        let id = self.id();
        self.post(side, WorkRequest::Register { id, local: local.clone(), access });
        id.0
    }

    /// Runs both sides until nothing is left to do.
    pub(super) fn settle(&mut self) -> CaseResult {
        self.settle_with(|_, _| Ok(()))
    }

    /// Runs both sides until nothing is left to do; `look` gets each event when it is reported.
    pub(super) fn settle_with(&mut self, mut look: impl FnMut(Side, &Observed) -> CaseResult) -> CaseResult {
        for _ in 0..MAX_TURNS {
            let mut has_moved = self.wire.turn();
            for side in Side::BOTH {
                while let Some(event) = self.wire.end(side).poll() {
                    has_moved = true;
                    let observed = observed(event);
                    look(side, &observed)?;
                    self.log(side).push(observed);
                }
            }
            if !has_moved {
                return Ok(());
            }
        }
        fail!("it has not ended after {MAX_TURNS} turns")
    }

    /// Runs a number of turns.
    pub(super) fn turn(&mut self, turns: u64) {
        for _ in 0..turns {
            self.wire.turn();
            Side::BOTH.into_iter().for_each(|side| self.poll_events(side));
        }
    }

    /// Records one event of one end, if there is one; returns whether there was.
    pub(super) fn poll_once(&mut self, side: Side) -> bool {
        let event = self.wire.end(side).poll();
        let is_some = event.is_some();
        self.log(side).extend(event.map(observed));
        is_some
    }

    fn poll_events(&mut self, side: Side) {
        while self.poll_once(side) {}
    }

    fn log(&mut self, side: Side) -> &mut Vec<Observed> {
        let [active, passive] = &mut self.observed;
        if side == Side::Active { active } else { passive }
    }

    /// Takes the events recorded since the last call.
    pub(super) fn observed(&mut self, side: Side) -> Vec<Observed> {
        std::mem::take(self.log(side))
    }

    /// Fails unless exactly these events were recorded.
    pub(super) fn expect(&mut self, side: Side, expected: &[Observed]) -> CaseResult {
        let observed = self.observed(side);
        let mut expected = expected.to_vec();
        if self.wire.pads_private_data() {
            expected.iter_mut().zip(&observed).for_each(|(expected, observed)| expected.pad_like(observed));
        }
        if observed == expected {
            Ok(())
        } else {
            fail!("{side:?} observed {observed:?} and not {expected:?}")
        }
    }

    /// The faults that the side which violates the protocol and its peer report.
    pub(super) fn faults_of(&self, violation: Violation) -> [Fault; 2] {
        [Fault::Ours(self.wire.reported(violation)), Fault::Peer(violation)]
    }

    /// Fails unless the peer of `side` has refused its work: both report the fault, and both have
    /// ended.
    pub(super) fn expect_refusal(&mut self, side: Side, violation: Violation) -> CaseResult {
        let expected = self.faults_of(violation).map(Some);
        let found = [side, side.other()].map(|side| self.wire.end(side).fault());
        if found != expected {
            return fail!("the faults are {found:?} and not {expected:?}");
        }
        for side in Side::BOTH {
            let observed = self.observed(side);
            if observed.iter().filter(|observed| **observed == Observed::Disconnected).count() != 1
                || observed.last() != Some(&Observed::Disconnected)
            {
                return fail!("{side:?} observed {observed:?} of the end");
            }
        }
        Ok(())
    }
}

fn observed(event: Event) -> Observed {
    match event {
        Event::Requested { private_data, .. } => Observed::Requested(private_data),
        Event::Connected { private_data } => Observed::Connected(private_data),
        Event::Refused { private_data } => Observed::Refused(private_data),
        Event::Received { message, invalidated, .. } => Observed::Received(message.to_vec(), invalidated),
        Event::Done { id, result } => Observed::Done(id.0, result),
        Event::Registered { id, remote } => Observed::Registered(id.0, remote),
        Event::Disconnected => Observed::Disconnected,
    }
}

/// An endpoint with enough of everything.
pub(super) fn ample() -> Endpoint {
    Endpoint {
        receives: 64,
        receive_len: 4096,
        sends: 64,
        reads: 8,
        regions: 16,
        private_data: Vec::new(),
        without_invalidation: None,
    }
}

/// Part of registered memory.
pub(super) fn part(remote: Remote, at: u64, len: usize) -> Remote {
    Remote { address: remote.address + at, len: len as u32, ..remote }
}

/// Bytes that depend on the offset and on `salt`.
pub(super) fn pattern(salt: u64, len: usize) -> Vec<u8> {
    let words = (0..).flat_map(|word| mix(mix(salt) ^ word).to_le_bytes());
    words.take(len).collect()
}

/// Memory with a copy of `bytes` in `pieces` segments, of which one may be empty.
pub(super) fn memory(bytes: &[u8], pieces: usize) -> SgList {
    // There is an unregistered byte between the segments.
    let whole = Memory::from_heap(bytes.len() + pieces + 1);
    let mut list = SgList::default();
    let (mut at, mut rest) = (1, bytes);
    for left in (1..=pieces).rev() {
        let len = if left == 1 { rest.len() } else { rest.len() / left };
        let (here, behind) = rest.split_at(len);
        let seg: Seg = whole.seg(at, len);
        seg.copy_from(here);
        list.push(seg);
        (at, rest) = (at + len + 1, behind);
    }
    list
}

/// Memory filled with [`BLANK`].
pub(super) fn blank(len: usize, pieces: usize) -> SgList {
    memory(&vec![BLANK; len], pieces)
}

/// Content of memory that was not written.
pub(super) const BLANK: u8 = 0xee;
/// More turns than any case needs, one byte at a time.
const MAX_TURNS: u32 = 10_000_000;
