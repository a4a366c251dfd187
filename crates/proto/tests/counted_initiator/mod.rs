//! An initiator session whose allocations are counted, driven manually. Those of its peer are not
//! counted.

use crate::counting;
use blockmux_proto::driver::session::{Demand, Initiator, StreamConnections, StreamSession};
use blockmux_volume::{Chunk, Io, Memory, Op, Output, SgList, Tag};
use std::time::Instant;

/// The session and its peer, which is a function from the bytes that the session sends to those
/// that it receives.
pub(crate) struct CountedInitiator<S, P> {
    session: S,
    peer: P,
    /// The session's receive buffer.
    chunk: Chunk,
    /// Number of allocations since the end of the last run's warm-up, or since the start.
    pub(crate) allocations: u64,
}

impl<S: StreamConnections + Initiator, P: FnMut(&[u8]) -> Vec<u8>> CountedInitiator<S, P> {
    /// Logs in.
    pub(crate) fn new(session: S, peer: P) -> CountedInitiator<S, P> {
        let chunk = Chunk::new(Memory::from_heap(1 << 20));
        let mut initiator = CountedInitiator { session, peer, chunk, allocations: 0 };
        while !initiator.session.is_ready() {
            initiator.exchange();
        }
        initiator
    }

    /// Executes reads, reads in place, writes, flushes and discards, none of which may allocate.
    pub(crate) fn assert_io_allocates_nothing(&mut self, name: &str) {
        let memory = SgList::one(Memory::from_heap(4096).seg(0, 4096));
        let lent = |tag| Io::new(Tag(tag), Op::Read, tag * 4096, 4096);
        assert_eq!(self.run(lent), 0, "{name}, reads");
        assert_eq!(self.run(|tag| Io { data: Some(memory.clone()), ..lent(tag) }), 0, "{name}, placed reads");
        let write = |tag| Io { op: Op::Write { fua: true }, data: Some(memory.clone()), ..lent(tag) };
        assert_eq!(self.run(write), 0, "{name}, writes");
        assert_eq!(self.run(|tag| Io::new(Tag(tag), Op::Flush, 0, 0)), 0, "{name}, flushes");
        let discard = |tag| Io { op: Op::Discard { fua: false }, ..lent(tag) };
        assert_eq!(self.run(discard), 0, "{name}, discards");
    }

    /// Calls `f` on the session and counts its allocations.
    fn counted<R>(&mut self, f: impl FnOnce(&mut S, &Chunk) -> R) -> R {
        let before = counting::of_this_thread();
        let result = f(&mut self.session, &self.chunk);
        self.allocations += counting::of_this_thread() - before;
        result
    }

    /// Passes the session's bytes to the peer, and the replies back.
    fn exchange(&mut self) {
        let back = (self.peer)(&self.session.connection(0).outbox().take_bytes());
        self.chunk.recycle();
        self.chunk.extend(&back);
        loop {
            let Demand::Bytes(need) = self.session.connection(0).demand() else { break };
            if self.chunk.unread().len() < need {
                break;
            }
            let taken =
                self.counted(|session, chunk| session.connection(0).on_bytes(chunk, Instant::now()).unwrap());
            self.chunk.take(taken);
        }
    }

    /// Executes turns of I/O at depth 16 after a warm-up.
    fn run(&mut self, io: impl Fn(u64) -> Io) -> u64 {
        for turn in 0..60 {
            if turn == 10 {
                self.allocations = 0;
            }
            for tag in 0..16 {
                let io = io(tag);
                self.counted(|session, _| session.submit(io));
            }
            let mut left = 16;
            while left > 0 {
                self.exchange();
                while let Some(done) = self.counted(|session, _| session.poll_done()) {
                    assert!(matches!(done.result, Ok(Output::Data(_) | Output::Nothing)));
                    left -= 1;
                }
            }
        }
        self.allocations
    }
}
