//! Rounds of equal work between two ends of a connection, to count what they allocate.

use crate::counting;
use blockmux_proto::rdma::{
    Endpoint, Event, MessageHead, QueuePair, Remote, RemoteRights, WorkId, WorkRequest,
};
use blockmux_rdma::Provider;
use blockmux_volume::{Memory, Pages, SgList};

/// Both ends of an established connection in one thread, with a network between them that allocates
/// nothing.
pub(crate) trait ConnectedPair {
    /// A queue pair.
    type End: Provider;

    /// The end that posts work.
    fn active(&mut self) -> &mut Self::End;

    /// The end that grants memory.
    fn passive(&mut self) -> &mut Self::End;

    /// Delivers what both ends have to send; returns whether there was anything.
    fn carry(&mut self) -> bool;
}

/// Amount of work in a round, twice that where messages follow writes.
pub(crate) const DEPTH: u64 = 16;

/// The work of one round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoundKind {
    /// Messages.
    Sends,
    /// RDMA Writes.
    Writes,
    /// RDMA Reads.
    Reads,
    /// A write and a message that invalidates its memory, which is registered again afterwards.
    WritesAndClosings,
    /// Writes and invalidations by the methods that may execute them immediately.
    Immediate,
}

/// Every kind of work, at several lengths in bytes.
pub(crate) fn rounds_of_every_kind() -> impl Iterator<Item = (RoundKind, usize)> {
    let kinds = [
        RoundKind::Sends,
        RoundKind::Writes,
        RoundKind::Reads,
        RoundKind::WritesAndClosings,
        RoundKind::Immediate,
    ];
    kinds.into_iter().flat_map(|kind| [512, 4096, 60_000].map(|len| (kind, len)))
}

/// An endpoint with enough for a round.
pub(crate) fn endpoint() -> Endpoint {
    Endpoint {
        receives: 64,
        receive_len: 64 << 10,
        sends: 64,
        reads: 16,
        regions: 64,
        private_data: Vec::new(),
        without_invalidation: None,
    }
}

/// A connection that repeats its work in rounds.
pub(crate) struct Round<P> {
    pipe: P,
    ours: Memory,
    theirs: Memory,
    len: usize,
    granted: Vec<Remote>,
    /// Amount of work that was executed immediately.
    pub(crate) immediate: u64,
}

impl<P: ConnectedPair> Round<P> {
    /// The passive side grants memory of `len` bytes, and the active side has as much, from shared
    /// pages if `is_shared`.
    pub(crate) fn new(pipe: P, len: usize, kind: RoundKind, is_shared: bool) -> Round<P> {
        let ours =
            if is_shared { Memory::from_pages(&Pages::from_heap(len)) } else { Memory::from_heap(len) };
        let theirs = Memory::from_heap(len);
        let mut round = Round { pipe, ours, theirs, len, granted: Vec::with_capacity(32), immediate: 0 };
        let access = if matches!(kind, RoundKind::Reads) {
            RemoteRights::RemoteRead
        } else {
            RemoteRights::RemoteWrite
        };
        (0..DEPTH).for_each(|_| round.grant(access));
        round
    }

    fn grant_at_once(&mut self) {
        let mut local = self.theirs.seg(0, self.len).into();
        let remote = self.pipe.passive().register(WorkId(0), &mut local, RemoteRights::RemoteWrite);
        self.granted.push(remote.expect("there is room for it"));
    }

    fn grant(&mut self, access: RemoteRights) {
        let local = self.theirs.seg(0, self.len).into();
        self.pipe.passive().post(WorkRequest::Register { id: WorkId(0), local, access });
        match self.pipe.passive().poll() {
            Some(Event::Registered { remote, .. }) => self.granted.push(remote),
            other => panic!("{other:?}"),
        }
    }

    fn post(&mut self, kind: RoundKind) -> u64 {
        let Round { pipe, ours, len, granted, .. } = self;
        let local = || SgList::one(ours.seg(0, *len));
        let active = pipe.active();
        let mut posted = 0;
        for id in 0..DEPTH {
            let (id, remote) = (WorkId(id), granted[id as usize]);
            posted += 1;
            let send = |payload, invalidate| {
                let head = MessageHead::from_slice(&[7; 76]);
                WorkRequest::Send { id, head, payload, invalidate, is_solicited: false }
            };
            match kind {
                RoundKind::Sends => active.post(send(local(), None)),
                RoundKind::Writes => active.post(WorkRequest::Write { id, local: local(), remote }),
                RoundKind::Reads => active.post(WorkRequest::Read { id, local: local(), remote }),
                RoundKind::WritesAndClosings => {
                    active.post(WorkRequest::Write { id, local: local(), remote });
                    active.post(send(SgList::default(), Some(remote.stag)));
                    posted += 1;
                }
                RoundKind::Immediate => {
                    let room = active.room();
                    if !active.write(id, local(), remote) {
                        (self.immediate, posted) = (self.immediate + 1, posted - 1);
                    }
                    let waiting = active.room();
                    active.send(&[7; 76], &SgList::default(), Some(remote.stag));
                    match active.room() == waiting {
                        true => self.immediate += 1,
                        false => posted += 1,
                    }
                    assert!(room - active.room() <= 2);
                }
            }
        }
        posted
    }

    /// Runs this number of rounds; returns the number of allocations after the first 20, in which
    /// queues grow to their usual depth.
    pub(crate) fn allocations(&mut self, kind: RoundKind, rounds: usize) -> u64 {
        (0..20).for_each(|_| self.run(kind));
        let before = counting::of_this_thread();
        (20..rounds).for_each(|_| self.run(kind));
        counting::of_this_thread() - before
    }

    /// Runs until all posted work has completed and all messages were handled.
    fn run(&mut self, kind: RoundKind) {
        let mut left = self.post(kind);
        let mut closed = 0;
        while self.pipe.carry() || left > 0 {
            while let Some(event) = self.pipe.active().poll() {
                assert!(matches!(event, Event::Done { result: Ok(()), .. }), "{event:?}");
                left -= 1;
            }
            while let Some(event) = self.pipe.passive().poll() {
                let Event::Received { invalidated, .. } = event else { panic!("{event:?}") };
                closed += u64::from(invalidated.is_some());
                match kind {
                    RoundKind::Immediate => self.pipe.passive().receive(1),
                    _ => self.pipe.passive().post(WorkRequest::Receive),
                }
            }
        }
        if closed > 0 {
            self.granted.clear();
            (0..closed).for_each(|_| match kind {
                RoundKind::Immediate => self.grant_at_once(),
                _ => self.grant(RemoteRights::RemoteWrite),
            });
        }
    }
}
