//! A target session whose allocations are counted, driven manually. Its volume completes all I/O at
//! once.

use crate::counting;
use blockmux_proto::driver::session::StreamSession;
use blockmux_proto::driver::target::IoSource;
use blockmux_volume::{Chunk, Completion, Memory, Op, Output, Tag};
use std::time::Instant;

/// The session with its volume.
pub(crate) struct CountedTarget<S> {
    session: S,
    /// The session's receive buffer.
    chunk: Chunk,
    /// The memory that reads borrow.
    lent: Memory,
    /// Submitted I/O; empty between calls.
    ios: Vec<(Tag, Op)>,
    /// Number of allocations since the warm-up.
    allocations: u64,
}

impl<S: StreamSession + IoSource> CountedTarget<S> {
    pub(crate) fn new(session: S) -> CountedTarget<S> {
        CountedTarget {
            session,
            chunk: Chunk::new(Memory::from_heap(1 << 20)),
            lent: Memory::from_heap(4096),
            ios: Vec::with_capacity(64),
            allocations: 0,
        }
    }

    /// Number of allocations in turns of batches after a warm-up. `fill` writes a batch, which
    /// causes `ios` I/O.
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

    /// Number of allocations in turns of one solicited write each, after a warm-up. `command`
    /// writes the command, and `data` the data that the target then requests.
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

    /// Resets the count after the warm-up turns.
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

    /// Executes `count` I/O and sends the replies.
    fn complete(&mut self, count: usize) {
        let before = counting::of_this_thread();
        while let Some((volume, io)) = self.session.poll_io() {
            self.session.begin(volume, &io, false).expect("nothing excludes it");
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
