//! The user of the volume: random requests, each checked when it completes, and a final read of
//! every block.

use super::core::SimCore;
use super::ledger::{BLOCK, Covered, Ledger, Started, WriteResult, content};
use crate::core::reactor::{Progress, Task};
use blockmux_volume::random::SplitMix;
use blockmux_volume::{Channel, Completion, Core, Io, IoError, Op, Output, Seg, SgList, Tag};
use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Parameters of a client.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    pub(super) requests: u32,
    pub(super) depth: u32,
    /// Longest request, in blocks.
    pub(super) max_blocks: u64,
    /// Whether the scenario injects medium errors.
    pub(super) allows_medium_errors: bool,
    pub(super) allows_path_lost: bool,
}

/// A task that uses a channel.
pub(super) struct Client {
    core: Rc<SimCore>,
    channel: Box<dyn Channel>,
    ledger: Arc<Mutex<Ledger>>,
    random: SplitMix,
    plan: Plan,
    /// Requests in flight, indexed by tag.
    in_flight: Vec<Option<Request>>,
    /// For each block: -1 while a write is in flight, else the number of reads.
    users: Vec<i32>,
    submitted: u32,
    /// The next block of the final verification.
    next_verified: u64,
    next_value: u64,
    done: Vec<Completion>,
    /// Set when everything has completed.
    finished: Rc<Cell<bool>>,
}

struct Request {
    op: Op,
    blocks: Range<u64>,
    started: Started,
    covered: Option<Covered>,
    /// The request is part of the final verification.
    is_verification: bool,
}

impl Client {
    pub(super) fn new(
        core: &Rc<SimCore>,
        channel: Box<dyn Channel>,
        ledger: Arc<Mutex<Ledger>>,
        plan: Plan,
        seed: u64,
        finished: Rc<Cell<bool>>,
    ) -> Client {
        let blocks = lock(&ledger).len() as usize;
        Client {
            core: core.clone(),
            channel,
            ledger,
            random: SplitMix::new(seed),
            plan,
            in_flight: (0..plan.depth).map(|_| None).collect(),
            users: vec![0; blocks],
            submitted: 0,
            next_verified: 0,
            next_value: 0,
            done: Vec::new(),
            finished,
        }
    }

    /// Starts a random request, unless its blocks are in use.
    fn start_one(&mut self, tag: usize) {
        let op = self.pick_op();
        let count = 1 + self.random.below(self.plan.max_blocks);
        let first = self.random.below(self.users.len() as u64 - count + 1);
        let blocks = if op == Op::Flush { 0..0 } else { first..first + count };
        let uses = blocks.start as usize..blocks.end as usize;
        let is_free = |users: i32| if op.is_write() { users == 0 } else { users >= 0 };
        if !self.users[uses.clone()].iter().all(|&users| is_free(users)) {
            return;
        }
        self.users[uses].iter_mut().for_each(|users| *users = if op.is_write() { -1 } else { *users + 1 });
        self.submitted += 1;
        let data = self.data_for(op, &blocks);
        self.submit(tag, op, blocks, data, false);
    }

    fn pick_op(&mut self) -> Op {
        let fua = self.random.below(4) == 0;
        match self.random.below(100) {
            0..35 => Op::Read,
            35..70 => Op::Write { fua },
            70..78 => Op::Flush,
            78..86 => Op::WriteZeroes { fua, may_unmap: self.random.below(2) == 0, only_fast: false },
            86..90 => Op::Discard { fua },
            90..93 => Op::Prefetch,
            _ => Op::BlockStatus,
        }
    }

    /// The data of a write, or the buffer of a read. Half of the reads have one.
    fn data_for(&mut self, op: Op, blocks: &Range<u64>) -> Option<SgList> {
        let len = (blocks.end - blocks.start) as usize * BLOCK;
        match op {
            Op::Write { .. } => {
                let mut data = SgList::default();
                for block in blocks.clone() {
                    data.push(Seg::from_slice(&content(block, self.next_value + 1 + block - blocks.start)));
                }
                Some(data)
            }
            Op::Read if self.random.below(2) == 0 => {
                self.core.pool().take(len).map(|memory| memory.seg(0, len).into())
            }
            _ => None,
        }
    }

    fn submit(
        &mut self,
        tag: usize,
        op: Op,
        blocks: Range<u64>,
        data: Option<SgList>,
        is_verification: bool,
    ) {
        let mut ledger = lock(&self.ledger);
        if op.is_write() {
            for block in blocks.clone() {
                let is_data = matches!(op, Op::Write { .. });
                self.next_value += u64::from(is_data);
                ledger.on_write(block, if is_data { self.next_value } else { 0 });
            }
        }
        let covered = (op == Op::Flush).then(|| ledger.on_flush());
        let started = ledger.start();
        drop(ledger);
        let (offset, len) = (blocks.start * BLOCK as u64, (blocks.end - blocks.start) * BLOCK as u64);
        self.in_flight[tag] = Some(Request { op, blocks, started, covered, is_verification });
        self.channel.submit(Io { tag: Tag(tag as u64), op, offset, len, data });
    }

    fn complete(&mut self, done: Completion) {
        let request = self.in_flight.get_mut(done.tag.0 as usize).and_then(Option::take);
        let mut ledger = lock(&self.ledger);
        let Some(request) = request else {
            return ledger.fault(format!("{:?} completed, but was not in flight", done.tag));
        };
        for users in &mut self.users[request.blocks.start as usize..request.blocks.end as usize] {
            *users = if request.op.is_write() { 0 } else { *users - 1 };
        }
        let is_allowed = match done.result {
            Err(IoError::Medium) => self.plan.allows_medium_errors,
            Err(IoError::PathLost) => self.plan.allows_path_lost,
            Err(_) => false,
            Ok(_) => true,
        };
        if !is_allowed {
            let Request { op, blocks, .. } = &request;
            ledger.fault(format!("{op:?} of blocks {blocks:?} failed: {:?}", done.result));
        }
        if request.is_verification && done.result.is_err() {
            // The volume will come back; verify the block again.
            self.next_verified = self.next_verified.min(request.blocks.start);
        }
        request.check(&mut ledger, done.result);
    }

    /// Starts further requests; returns whether any is in flight.
    fn go_on(&mut self) -> bool {
        for tag in 0..self.in_flight.len() {
            if self.in_flight[tag].is_some() {
                continue;
            }
            if self.submitted < self.plan.requests {
                self.start_one(tag);
            }
        }
        let mut is_busy = self.in_flight.iter().any(Option::is_some);
        if self.submitted < self.plan.requests {
            return is_busy;
        }
        // Verification starts when no write is in flight.
        let only_verifies = self.in_flight.iter().flatten().all(|request| request.is_verification);
        for tag in (0..self.in_flight.len()).filter(|_| only_verifies) {
            let block = self.next_verified;
            if self.in_flight[tag].is_none() && block < self.users.len() as u64 {
                self.next_verified += 1;
                self.users[block as usize] += 1;
                self.submit(tag, Op::Read, block..block + 1, None, true);
                is_busy = true;
            }
        }
        is_busy
    }
}

impl Task for Client {
    fn run(&mut self) -> Progress {
        let mut done = std::mem::take(&mut self.done);
        self.channel.poll(&mut done);
        done.drain(..).for_each(|done| self.complete(done));
        self.done = done;
        if !self.go_on() {
            self.finished.set(true);
            return Progress::Done;
        }
        self.channel.kick();
        // Completions within `submit` cause no wake-up.
        self.channel.poll(&mut self.done);
        if self.done.is_empty() { Progress::Idle } else { Progress::More }
    }
}

impl Request {
    /// Records the request's result in the ledger.
    fn check(self, ledger: &mut Ledger, result: Result<Output, IoError>) {
        let ended = match self.op {
            // The content of discarded blocks is undefined; our volumes keep or clear them.
            Op::Discard { .. } => WriteResult::DoneOrNot,
            Op::Write { fua } | Op::WriteZeroes { fua, .. } if result.is_ok() => WriteResult::Done { fua },
            _ => WriteResult::DoneOrNot,
        };
        if self.op.is_write() {
            return self.blocks.for_each(|block| ledger.on_written(block, &self.started, ended));
        }
        match (self.op, result) {
            (Op::Flush, Ok(_)) => self.covered.into_iter().for_each(|covered| ledger.on_flushed(covered)),
            (Op::Read, Ok(Output::Data(data))) => {
                let bytes = data.to_vec();
                if bytes.len() != (self.blocks.end - self.blocks.start) as usize * BLOCK {
                    return ledger.fault(format!("a read returned {} bytes", bytes.len()));
                }
                for (block, bytes) in self.blocks.zip(bytes.chunks(BLOCK)) {
                    ledger.check("read", block, bytes);
                }
            }
            (Op::BlockStatus, Ok(Output::Extents(extents))) => {
                let mut at = self.blocks.start;
                for extent in extents {
                    let blocks = at..at + extent.len / BLOCK as u64;
                    at = blocks.end;
                    if blocks.is_empty() || blocks.end > self.blocks.end {
                        return ledger.fault(format!("block status returned blocks {blocks:?}"));
                    }
                    if extent.zero && !blocks.clone().all(|block| ledger.may_be_zero(block)) {
                        ledger.fault(format!("block status reports blocks {blocks:?} as zeroes"));
                    }
                }
            }
            (Op::Read | Op::BlockStatus, Ok(output)) => {
                ledger.fault(format!("{:?} returned {output:?}", self.op));
            }
            _ => {}
        }
    }
}

fn lock(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}
