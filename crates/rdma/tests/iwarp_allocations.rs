//! Software iWARP allocates nothing for a message, write or read once it has reached its usual
//! depth.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

#[path = "../../volume/tests/counting/mod.rs"]
mod counting;
mod iwarp_pipe;

use blockmux_proto::rdma::{Event, MessageHead, QueuePair, Remote, RemoteRights, WorkId, WorkRequest};
use blockmux_rdma::Provider;
use blockmux_rdma::iwarp::IwarpConfig;
use blockmux_volume::{Memory, Pages, SgList};
use iwarp_pipe::Pipe;

const DEPTH: u64 = 16;

/// The work of one round.
#[derive(Clone, Copy, Debug)]
enum RoundKind {
    Sends,
    Writes,
    Reads,
    /// A write and a message that invalidates its memory, which is registered again afterwards.
    WritesAndClosings,
    /// Writes and invalidations by the methods that may execute them immediately.
    Immediate,
}

struct Round {
    pipe: Pipe,
    ours: Memory,
    theirs: Memory,
    len: usize,
    granted: Vec<Remote>,
    /// Amount of work that was executed immediately.
    immediate: u64,
}

impl Round {
    fn new(config: &IwarpConfig, len: usize, kind: RoundKind, is_shared: bool) -> Round {
        let ours =
            if is_shared { Memory::from_pages(&Pages::from_heap(len)) } else { Memory::from_heap(len) };
        let (pipe, theirs) = (Pipe::new(config), Memory::from_heap(len));
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
        let remote = self.pipe.passive.register(WorkId(0), &mut local, RemoteRights::RemoteWrite);
        self.granted.push(remote.expect("there is room for it"));
    }

    fn grant(&mut self, access: RemoteRights) {
        let local = self.theirs.seg(0, self.len).into();
        self.pipe.passive.post(WorkRequest::Register { id: WorkId(0), local, access });
        match self.pipe.passive.poll() {
            Some(Event::Registered { remote, .. }) => self.granted.push(remote),
            other => panic!("{other:?}"),
        }
    }

    fn post(&mut self, kind: RoundKind) -> u64 {
        let local = || SgList::one(self.ours.seg(0, self.len));
        let active = &mut self.pipe.active;
        let mut posted = 0;
        for id in 0..DEPTH {
            let (id, remote) = (WorkId(id), self.granted[id as usize]);
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
                    if !active.write(id, &local(), remote) {
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

    /// Runs until all posted work has completed and all messages were handled.
    fn run(&mut self, kind: RoundKind) {
        let mut left = self.post(kind);
        let mut closed = 0;
        while left > 0 || self.pipe.moves() {
            self.pipe.carry();
            while let Some(event) = self.pipe.active.poll() {
                assert!(matches!(event, Event::Done { result: Ok(()), .. }), "{event:?}");
                left -= 1;
            }
            while let Some(event) = self.pipe.passive.poll() {
                let Event::Received { invalidated, .. } = event else { panic!("{event:?}") };
                closed += u64::from(invalidated.is_some());
                match kind {
                    RoundKind::Immediate => self.pipe.passive.receive(1),
                    _ => self.pipe.passive.post(WorkRequest::Receive),
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

#[test]
fn messages_writes_and_reads_allocate_nothing() {
    let kinds = [
        RoundKind::Sends,
        RoundKind::Writes,
        RoundKind::Reads,
        RoundKind::WritesAndClosings,
        RoundKind::Immediate,
    ];
    for (has_crc, mss, is_shared) in
        [(false, 65_483, true), (false, 1448, false), (true, 8948, false), (true, 8948, true)]
    {
        let config = IwarpConfig { has_crc, mss, ..IwarpConfig::default() };
        for kind in kinds {
            for len in [512, 4096, 60_000] {
                let mut round = Round::new(&config, len, kind, is_shared);
                let mut allocations = 0;
                for turn in 0..60 {
                    let before = counting::of_this_thread();
                    round.run(kind);
                    if turn >= 20 {
                        allocations += counting::of_this_thread() - before;
                    }
                }
                let case =
                    format!("{kind:?} of {len} bytes, CRC {has_crc}, shared {is_shared}, segments of {mss}");
                assert_eq!(allocations, 0, "{case}");
                // Work of several FPDUs is queued, and so is later work until it is sent.
                let fits = matches!(kind, RoundKind::Immediate) && len < mss.min(10_000);
                assert!(!fits || round.immediate == 60 * 2 * DEPTH, "{case}: {} at once", round.immediate);
            }
        }
    }
}
