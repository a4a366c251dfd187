//! Initiator and target back to back over a RAM volume, against a model of its content: requests in
//! any order, bytes cut anywhere, devices that fail, and connections that break and are replayed.

use crate::choices::Choices;
use crate::wire::Wire;
use arbitrary::{Arbitrary, Unstructured};
use blockmux_proto::driver::session::{Demand, Initiator, StreamSession, Timed};
use blockmux_proto::driver::target::IoSource;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::nbd::client::{NbdFeatures, NbdInitiatorConfig, NbdInitiatorSession, NbdSessionMode};
use blockmux_proto::nbd::server::NbdTargetSession;
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{
    Channel, Completion, Io, IoError, MemVolume, Op, Output, Pool, Seg, SgList, Tag, Volume, Waker,
};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

/// Reads `data` as choices and a list of operations.
pub(crate) fn nbd_pair(data: &[u8]) {
    let (mut choices, operations) = Choices::split(data);
    let features = NbdFeatures {
        extended_headers: choices.byte() & 1 == 0,
        structured_replies: choices.byte() & 1 == 0,
    };
    let mut pair = Pair::new(choices, features);
    let mut input = Unstructured::new(&operations);
    for _ in 0..MAX_OPERATIONS {
        if input.is_empty() {
            break;
        }
        // The end of the bytes ends the list, and is no error.
        let Ok(operation) = PairOperation::arbitrary(&mut input) else { break };
        pair.perform(operation);
    }
    pair.settle();
    pair.check_content();
    pair.leave();
}

#[derive(Debug, Arbitrary)]
enum PairOperation {
    Submit {
        kind: Kind,
        first: u16,
        count: u16,
        fill: u8,
        option: u8,
    },
    /// One receive on each side.
    Move,
    /// The target's volume completes an I/O, or fails it.
    Complete {
        at: u8,
        fault: u8,
    },
    Settle,
    /// The connection breaks.
    Break,
    /// The initiator disconnects in order and reconnects.
    Leave,
}

#[derive(Debug, Arbitrary)]
enum Kind {
    Read,
    Write,
    Zero,
    Discard,
    Flush,
    Prefetch,
    Status,
}

struct Pair<'a> {
    choices: Choices<'a>,
    features: NbdFeatures,
    exports: Exports,
    channel: Box<dyn Channel>,
    pool: Pool,
    link: Link,
    model: Vec<u8>,
    /// Submitted to the initiator and not completed.
    in_flight: HashMap<Tag, Io>,
    /// Requests that were replayed after a disconnect; the first transmission may have been
    /// executed.
    replayed: HashSet<Tag>,
    /// Failures that the volume reported and the initiator has not.
    faults: Vec<(Op, u64, u64, IoError)>,
    next_tag: u64,
}

/// One connection.
struct Link {
    initiator: NbdInitiatorSession,
    target: NbdTargetSession,
    to_target: Wire,
    to_initiator: Wire,
    /// I/O in flight at the volume.
    at_volume: Vec<(VolumeId, Io)>,
}

impl Link {
    fn new(exports: &Exports, pool: &Pool, features: NbdFeatures) -> Link {
        let config = NbdInitiatorConfig { export: String::new(), mode: NbdSessionMode::Go, features };
        let now = Instant::now();
        Link {
            initiator: NbdInitiatorSession::new(config, pool.clone(), now),
            target: NbdTargetSession::new(exports.clone(), pool.clone(), now),
            to_target: Wire::new(Vec::new()),
            to_initiator: Wire::new(Vec::new()),
            at_volume: Vec::new(),
        }
    }

    /// Runs one receive on each side and its consequences; returns whether there was progress.
    fn turn(&mut self, choices: &mut Choices<'_>) -> bool {
        let mut moved = false;
        for (wire, bytes) in [
            (&mut self.to_target, self.initiator.outbox().take_bytes()),
            (&mut self.to_initiator, self.target.outbox().take_bytes()),
        ] {
            moved |= !bytes.is_empty();
            wire.push(&bytes);
        }
        moved |= self.to_target.turn(&mut self.target, choices).expect("the initiator obeys the protocol");
        moved |= self.to_initiator.turn(&mut self.initiator, choices).expect("the target obeys the protocol");
        while let Some((volume, io)) = self.target.poll_io() {
            self.target.begin(volume, &io, false).expect("the initiator asks for whole blocks");
            self.at_volume.push((volume, io));
            moved = true;
        }
        if let (Demand::Nothing, Some(when)) = (self.target.demand(), self.target.poll_timeout()) {
            self.target.on_timeout(when).expect("the handshake is not late");
        }
        moved
    }
}

impl Pair<'_> {
    fn new(choices: Choices<'_>, features: NbdFeatures) -> Pair<'_> {
        let volume = Arc::new(MemVolume::new(SIZE));
        let pool = Pool::new(POOL);
        let channel =
            volume.open(&TestCore::with_pool(&pool).as_core(), 1, Waker::idle()).expect("RAM opens");
        let exports = Exports::new(vec![Export {
            name: "disk0".into(),
            description: String::new(),
            read_only: false,
            volume,
        }]);
        let link = Link::new(&exports, &pool, features);
        let mut pair = Pair {
            choices,
            features,
            exports,
            channel,
            pool,
            link,
            model: vec![0; SIZE as usize],
            in_flight: HashMap::new(),
            replayed: HashSet::new(),
            faults: Vec::new(),
            next_tag: 0,
        };
        pair.settle();
        pair
    }

    fn perform(&mut self, operation: PairOperation) {
        match operation {
            PairOperation::Submit { kind, first, count, fill, option } => {
                let io = self.request(&kind, first, count, fill, option);
                self.submit(io);
            }
            PairOperation::Move => {
                self.link.turn(&mut self.choices);
            }
            PairOperation::Complete { at, fault } if !self.link.at_volume.is_empty() => {
                let at = usize::from(at) % self.link.at_volume.len();
                self.complete(at, FAULTS.get(usize::from(fault)).copied());
            }
            PairOperation::Complete { .. } => {}
            PairOperation::Settle => self.settle(),
            PairOperation::Break => self.reconnect(),
            PairOperation::Leave => {
                self.settle();
                self.leave();
            }
        }
        self.poll_done();
    }

    fn request(&mut self, kind: &Kind, first: u16, count: u16, fill: u8, option: u8) -> Io {
        let (fua, may_unmap, only_fast) = (option & 1 != 0, option & 2 != 0, option & 4 != 0);
        let op = match kind {
            Kind::Read => Op::Read,
            Kind::Write => Op::Write { fua },
            Kind::Zero => Op::WriteZeroes { fua, may_unmap, only_fast },
            Kind::Discard => Op::Discard { fua },
            Kind::Flush => Op::Flush,
            Kind::Prefetch => Op::Prefetch,
            Kind::Status => Op::BlockStatus,
        };
        let offset = u64::from(first) % (SIZE / BLOCK) * BLOCK;
        // Mostly short.
        let most = if option & 0x80 == 0 { 16 } else { SIZE / BLOCK };
        let len = (u64::from(count) % most + 1) * BLOCK;
        let len = len.min(SIZE - offset);
        let tag = Tag(self.next_tag);
        self.next_tag += 1;
        if op == Op::Flush {
            return Io::new(tag, op, 0, 0);
        }
        let mut io = Io::new(tag, op, offset, len);
        if matches!(op, Op::Write { .. }) || op == Op::Read && option & 8 != 0 {
            let bytes: Vec<u8> = (0..len).map(|at| fill.wrapping_add((at / 7) as u8)).collect();
            let (front, back) = bytes.split_at(usize::from(option & 0x70) * 16 % bytes.len());
            let mut data = SgList::default();
            for part in [front, back] {
                if !part.is_empty() {
                    data.push(Seg::from_slice(part));
                }
            }
            io.data = Some(data);
        }
        io
    }

    /// Submits a request, once no request is in flight that would make its result ambiguous.
    fn submit(&mut self, io: Io) {
        let conflicts = |other: &Io| {
            (io.op.is_write() || other.op.is_write())
                && io.offset < other.offset + other.len
                && other.offset < io.offset + io.len
        };
        if self.in_flight.values().any(conflicts) || self.link.initiator.room() == 0 {
            self.settle();
        }
        self.in_flight.insert(io.tag, io.clone());
        self.link.initiator.submit(io);
    }

    /// Completes an I/O at the volume, or fails it with `fault` and without effect.
    fn complete(&mut self, at: usize, fault: Option<IoError>) {
        let (_, io) = self.link.at_volume.swap_remove(at);
        let done = match fault {
            Some(error) => {
                self.faults.push((io.op, io.offset, io.len, error));
                Completion { tag: io.tag, result: Err(error) }
            }
            None => self.execute(io),
        };
        self.link.target.on_io(done, Instant::now());
    }

    fn execute(&mut self, io: Io) -> Completion {
        let mut done = Vec::new();
        self.channel.submit(io);
        self.channel.poll(&mut done);
        done.pop().expect("RAM completes at once")
    }

    fn poll_done(&mut self) {
        while let Some(done) = self.link.initiator.poll_done() {
            let io = self.in_flight.remove(&done.tag).expect("what completes is in flight");
            let was_replayed = self.replayed.remove(&done.tag);
            match done.result {
                Ok(output) => self.on_success(&io, output),
                Err(error) => {
                    if was_replayed && io.op.is_write() {
                        self.on_failed_replay(&io);
                    }
                    let fault = (io.op, io.offset, io.len, error);
                    let at = self.faults.iter().position(|other| *other == fault);
                    self.faults.remove(at.unwrap_or_else(|| panic!("{fault:?} was never injected")));
                }
            }
        }
    }

    fn on_success(&mut self, io: &Io, output: Output) {
        let (start, end) = (io.offset as usize, (io.offset + io.len) as usize);
        let model = &mut self.model[start..end];
        match (io.op, output) {
            (Op::Read, Output::Data(data)) => {
                assert!(data.to_vec() == *model, "{io:?} read other content than the model has")
            }
            (Op::Write { .. }, Output::Nothing) => {
                io.data.as_ref().expect("a write has data").copy_to(model);
            }
            (Op::WriteZeroes { .. } | Op::Discard { .. }, Output::Nothing) => model.fill(0),
            (Op::BlockStatus, Output::Extents(extents)) => {
                let mut left = &*model;
                assert!(!extents.is_empty());
                for extent in extents {
                    let here;
                    (here, left) = left.split_at(extent.len as usize);
                    assert!(!here.is_empty() && (!extent.zero || here.iter().all(|byte| *byte == 0)));
                }
            }
            (Op::Flush | Op::Prefetch, Output::Nothing) => {}
            (op, output) => panic!("{op:?} returned {output:?}"),
        }
    }

    /// Handles a replayed write that failed: its first transmission may have been executed.
    fn on_failed_replay(&mut self, io: &Io) {
        let read = self.execute(Io::new(Tag(0), Op::Read, io.offset, io.len));
        let found = read.result.expect("RAM does not fail").into_data().to_vec();
        if found != self.model[io.offset as usize..(io.offset + io.len) as usize] {
            self.on_success(io, Output::Nothing);
        }
    }

    /// Completes everything in flight.
    fn settle(&mut self) {
        loop {
            let moved = self.link.turn(&mut self.choices);
            if !moved && self.link.at_volume.is_empty() {
                break;
            }
            while !self.link.at_volume.is_empty() {
                self.complete(0, None);
            }
            self.poll_done();
        }
        self.poll_done();
        assert!(self.in_flight.is_empty(), "stuck: {:?}", self.in_flight);
        assert!(self.link.initiator.is_ready() && self.link.initiator.room() > 0);
        // A failed prefetch is no error.
        self.faults.retain(|(op, ..)| *op != Op::Prefetch);
        assert!(self.faults.is_empty(), "never reported: {:?}", self.faults);
    }

    /// Breaks the connection: I/O at the volume completes, and the rest is replayed on a new one.
    fn reconnect(&mut self) {
        self.poll_done();
        for (_, io) in std::mem::take(&mut self.link.at_volume) {
            self.execute(io);
        }
        let unfinished = self.link.initiator.take_unfinished();
        assert_eq!(unfinished.len(), self.in_flight.len());
        self.faults.clear();
        self.link = Link::new(&self.exports, &self.pool, self.features);
        while !self.link.initiator.is_ready() {
            assert!(self.link.turn(&mut self.choices), "the handshake is stuck");
        }
        for io in unfinished {
            self.replayed.insert(io.tag);
            self.link.initiator.submit(io);
        }
    }

    /// Closes the connection in order, and opens a new one.
    fn leave(&mut self) {
        self.link.initiator.on_stop();
        while self.link.turn(&mut self.choices) {}
        assert!(matches!(self.link.initiator.demand(), Demand::Close));
        assert!(matches!(self.link.target.demand(), Demand::Close));
        assert!(self.link.to_target.is_drained() && self.link.to_initiator.is_drained());
        assert_eq!(
            (self.link.target.on_end(Instant::now()), self.link.initiator.on_end(Instant::now())),
            (Ok(()), Ok(()))
        );
        self.link = Link::new(&self.exports, &self.pool, self.features);
        assert_eq!(self.pool.out_bytes(), 0, "the pool has lost memory");
        self.settle();
    }

    fn check_content(&mut self) {
        let read = self.execute(Io::new(Tag(0), Op::Read, 0, SIZE));
        let content = read.result.expect("RAM does not fail").into_data();
        assert!(content.to_vec() == self.model, "the volume has other content than the model");
    }
}

/// Errors to inject, which both sides map to the same error.
const FAULTS: [IoError; 3] = [IoError::Medium, IoError::NoSpace, IoError::NoMemory];

/// Size of the volume in bytes: several allocation units, the last one incomplete.
const SIZE: u64 = (320 << 10) + 512;
const BLOCK: u64 = 512;
/// Maximum number of operations. Each may be a whole handshake; more operations find no more bugs.
const MAX_OPERATIONS: usize = 200;
/// Size of the pool in bytes: enough for each request, but not for all at once.
const POOL: usize = 2 << 20;
