//! A target session whose allocations are counted, driven by hand. Its volume does all at once.

use crate::counting;
use blockmux_proto::session::{StreamSession, Target};
use blockmux_volume::{Chunk, Completion, Memory, Op, Output, Tag};
use std::time::Instant;

/// The session, and what lies around it.
pub(crate) struct CountedTarget<S> {
    session: S,
    /// What the session receives.
    chunk: Chunk,
    /// What its reads are lent.
    lent: Memory,
    /// I/O that it has submitted; empty between calls.
    ios: Vec<(Tag, Op)>,
    /// What the session has allocated since the first turns.
    allocations: u64,
}

impl<S: StreamSession + Target> CountedTarget<S> {
    pub(crate) fn new(session: S) -> CountedTarget<S> {
        CountedTarget {
            session,
            chunk: Chunk::new(Memory::from_heap(1 << 20)),
            lent: Memory::from_heap(4096),
            ios: Vec::with_capacity(64),
            allocations: 0,
        }
    }

    /// What the session allocates in turns of batches, after some to get used to them. `fill`
    /// writes a batch, which causes so many I/Os.
    pub(crate) fn run_batches(&mut self, ios: usize, mut fill: impl FnMut(&mut Vec<u8>)) -> u64 {
        let mut batch = Vec::with_capacity(1 << 20);
        for turn in 0..200 {
            self.warm_up(turn);
            batch.clear();
            fill(&mut batch);
            self.receive(&batch);
            self.complete(ios);
        }
        self.allocations
    }

    /// What the session allocates in turns of a write each, after some to get used to them.
    /// `command` writes the command, and `data` what the target then asks for.
    pub(crate) fn run_asked_for(
        &mut self,
        mut command: impl FnMut(&mut Vec<u8>),
        mut data: impl FnMut(&[u8], &mut Vec<u8>),
    ) -> u64 {
        let mut bytes = Vec::with_capacity(8192);
        for turn in 0..199 {
            self.warm_up(turn);
            bytes.clear();
            command(&mut bytes);
            self.receive(&bytes);
            let asked = self.session.outbox().take_bytes();
            bytes.clear();
            data(&asked, &mut bytes);
            self.receive(&bytes);
            self.complete(1);
        }
        self.allocations
    }

    /// What the first turns have allocated does not count.
    fn warm_up(&mut self, turn: usize) {
        if turn == 10 {
            self.allocations = 0;
        }
    }

    fn receive(&mut self, bytes: &[u8]) {
        self.chunk.recycle();
        self.chunk.extend(bytes);
        let before = counting::of_this_thread();
        assert_eq!(self.session.on_bytes(&self.chunk, Instant::now()), Ok(bytes.len()));
        self.chunk.take(bytes.len());
        self.allocations += counting::of_this_thread() - before;
    }

    /// Does the I/Os, which are so many, and sends the answers.
    fn complete(&mut self, count: usize) {
        let before = counting::of_this_thread();
        while let Some((_, io)) = self.session.poll_io() {
            self.ios.push((io.tag, io.op));
        }
        assert_eq!(self.ios.len(), count);
        for (tag, op) in self.ios.drain(..) {
            let read = op == Op::Read;
            let output = if read { Output::Data(self.lent.seg(0, 4096).into()) } else { Output::Nothing };
            self.session.on_io(Completion { tag, result: Ok(output) }, Instant::now());
        }
        let sent = self.session.outbox().len();
        self.session.outbox().consume(sent);
        self.allocations += counting::of_this_thread() - before;
    }
}
