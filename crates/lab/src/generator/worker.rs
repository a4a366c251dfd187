//! One worker: keeps a queue full.
//!
//! Its phases are ramp, measuring and stopping. When stopping, it submits no more I/O of the job,
//! reads back the blocks that it has written if the job verifies, and passes its results to the
//! caller.

use super::{Assignment, Control, Phase, WorkerResult};
use crate::content::Verify;
use crate::content::{self, Expect, Stamp};
use crate::job::{Job, Range};
use crate::pattern::{Action, Pattern};
use blockmux_engine::core::reactor::{EngineCore, Progress, Task};
use blockmux_volume::{Channel, Completion, Core, Io, IoError, Memory, Op, Output, SgList, Tag, Volume};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Instant, SystemTime};
use tracing::warn;

pub(super) struct Worker {
    job: Job,
    range: Range,
    pattern: Pattern,
    channel: Box<dyn Channel>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    done: Vec<Completion>,
    own_buffers: bool,
    /// Number of passes after which it stops by itself.
    passes: Option<u64>,
    control: Arc<Control>,
    /// A request has completed.
    has_begun: bool,
    phase: Phase,
    measured_from: Instant,
    results: WorkerResult,
    /// Distinguishes this run's blocks from those of earlier runs, which a lost write would leave
    /// in place.
    run_seed: u64,
    /// If verifying: the generation of each block, 0 if not written. Otherwise empty.
    generations: Vec<u32>,
    /// The current pass, and the step that waits for the previous pass to complete.
    pass: u64,
    held: Option<crate::pattern::PatternIo>,
    /// The next block to read back.
    read_back: Option<u64>,
    since_flush: u32,
    scratch: Vec<u8>,
    result: mpsc::Sender<Result<WorkerResult, IoError>>,
}

/// One slot of the queue.
struct Slot {
    buffer: SgList,
    started: Instant,
    work: Work,
    offset: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    Io(Action),
    Flush,
    ReadBack,
}

impl Worker {
    /// Starts a worker if its channel opens.
    pub(super) fn spawn(
        core: &Rc<EngineCore>,
        volume: &Arc<dyn Volume>,
        assignment: Assignment,
    ) -> Result<(), IoError> {
        core.try_spawn(|waker| {
            let shared: Rc<dyn Core> = core.clone();
            let channel = volume.open(&shared, assignment.job.iodepth, waker.clone())?;
            Ok(Worker::new(channel, assignment))
        })
    }

    fn new(channel: Box<dyn Channel>, assignment: Assignment) -> Worker {
        let Assignment { job, nth, range, passes, own_buffers, control, result } = assignment;
        let verifies_writes = job.verify.is_some() && job.rw.changes_content();
        Worker {
            pattern: Pattern::new(&job, range, nth),
            range,
            channel,
            slots: (0..job.iodepth).map(|slot| Slot::new(&job, nth, slot)).collect(),
            free: (0..job.iodepth).rev().collect(),
            done: Vec::with_capacity(job.iodepth as usize),
            own_buffers,
            passes,
            control,
            has_begun: false,
            phase: Phase::Ramp,
            measured_from: Instant::now(),
            results: WorkerResult::default(),
            run_seed: run_seed(&job),
            generations: if verifies_writes { vec![0; range.blocks as usize] } else { Vec::new() },
            pass: 0,
            held: None,
            read_back: None,
            since_flush: 0,
            scratch: vec![0; if job.verify.is_some() { job.bs as usize } else { 0 }],
            result,
            job,
        }
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Processes completions; returns their number.
    #[inline]
    fn collect(&mut self) -> usize {
        self.channel.poll(&mut self.done);
        if self.done.is_empty() {
            return 0;
        }
        if !self.has_begun {
            self.has_begun = true;
            self.control.waiting.fetch_sub(1, Ordering::Release);
        }
        let (now, mut done) = (Instant::now(), std::mem::take(&mut self.done));
        let count = done.len();
        for completion in done.drain(..) {
            let nth = completion.tag.0 as u32;
            self.finish(nth, now, completion.result);
            self.free.push(nth);
        }
        self.done = done;
        count
    }

    #[inline]
    fn finish(&mut self, nth: u32, now: Instant, result: Result<Output, IoError>) {
        let slot = &self.slots[nth as usize];
        match (&result, slot.work) {
            (Ok(_), Work::Io(action)) => {
                if self.phase == Phase::Measure {
                    let counter = match action {
                        Action::Read => &mut self.results.read,
                        Action::Write => &mut self.results.write,
                        Action::Trim => &mut self.results.trim,
                    };
                    counter.bytes += u64::from(self.job.bs);
                    counter.latency.record(now.duration_since(slot.started).as_nanos() as u64);
                }
            }
            (Ok(_), Work::Flush | Work::ReadBack) => {}
            (Err(error), _) => {
                if self.results.errors == 0 {
                    warn!(job = self.job.name, offset = slot.offset, "I/O failed: {error}");
                }
                self.results.errors += 1;
                if self.phase == Phase::Stop && slot.work == Work::ReadBack && *error == IoError::PathLost {
                    self.read_back = Some(self.range.blocks);
                }
            }
        }
        if let (Some(verify), Ok(Output::Data(data))) = (self.job.verify, result) {
            self.check(verify, nth, &data);
        }
    }

    fn check(&mut self, verify: Verify, nth: u32, data: &SgList) {
        let slot = &self.slots[nth as usize];
        let expect = match slot.work {
            Work::ReadBack => Expect::Stamp(self.stamp(slot.offset)),
            _ => Expect::Offset(slot.offset),
        };
        data.copy_to(&mut self.scratch);
        if let Err(mismatch) = content::check(&self.scratch, expect, verify) {
            if self.results.verify_errors == 0 {
                warn!(job = self.job.name, "verify: {mismatch}");
            }
            self.results.verify_errors += 1;
        }
    }

    /// Identity of a block's last write.
    fn stamp(&self, offset: u64) -> Stamp {
        let block = (offset - self.range.offset) / u64::from(self.job.bs);
        Stamp { offset, generation: self.generations[block as usize].into(), seed: self.run_seed }
    }

    /// Keeps the queue full; returns whether it submitted anything.
    #[inline]
    fn refill(&mut self) -> bool {
        if self.free.is_empty() {
            return false;
        }
        let now = Instant::now();
        let mut any = false;
        while let Some(&nth) = self.free.last() {
            let Some(io) = self.next_io(nth, now) else { break };
            self.free.pop();
            self.channel.submit(io);
            any = true;
        }
        if any {
            self.channel.kick();
        }
        any
    }

    #[inline]
    fn next_io(&mut self, nth: u32, now: Instant) -> Option<Io> {
        let tag = Tag(nth.into());
        if self.phase == Phase::Stop {
            return self.next_read_back(nth, tag, now);
        }
        if self.job.fsync_every > 0 && self.since_flush >= self.job.fsync_every {
            self.since_flush = 0;
            self.take_slot(nth, Work::Flush, 0, now);
            return Some(Io::new(tag, Op::Flush, 0, 0));
        }
        let step = self.held.take().unwrap_or_else(|| self.pattern.next_step());
        if self.passes.is_some_and(|passes| step.pass >= passes) {
            self.enter(Phase::Stop);
            return None;
        }
        if !self.generations.is_empty() && step.pass != self.pass {
            // If two writes of one block were in flight, either could be the last one, so passes do
            // not overlap.
            if self.in_flight() > 0 {
                self.held = Some(step);
                return None;
            }
            self.pass = step.pass;
        }
        self.take_slot(nth, Work::Io(step.action), step.offset, now);
        let (op, data) = match step.action {
            Action::Read => (Op::Read, self.own_buffers.then(|| self.slots[nth as usize].buffer.clone())),
            Action::Write => (self.write_op(), Some(self.write_data(nth, step.offset))),
            Action::Trim => (Op::Discard { fua: false }, None),
        };
        Some(Io { tag, op, offset: step.offset, len: self.job.bs.into(), data })
    }

    /// After the run: reads back each written block once.
    fn next_read_back(&mut self, nth: u32, tag: Tag, now: Instant) -> Option<Io> {
        let written = |block: &u64| self.generations[*block as usize] > 0;
        let block = (self.read_back?..self.range.blocks).find(written);
        self.read_back = Some(block.map_or(self.range.blocks, |block| block + 1));
        let offset = self.range.offset + block? * u64::from(self.job.bs);
        self.take_slot(nth, Work::ReadBack, offset, now);
        let data = self.own_buffers.then(|| self.slots[nth as usize].buffer.clone());
        Some(Io { tag, op: Op::Read, offset, len: self.job.bs.into(), data })
    }

    #[inline]
    fn take_slot(&mut self, nth: u32, work: Work, offset: u64, now: Instant) {
        let slot = &mut self.slots[nth as usize];
        (slot.work, slot.offset, slot.started) = (work, offset, now);
    }

    #[inline]
    fn write_op(&mut self) -> Op {
        self.since_flush += 1;
        let fua = self.job.fua_every > 0 && self.since_flush.is_multiple_of(self.job.fua_every);
        Op::Write { fua }
    }

    #[inline]
    fn write_data(&mut self, nth: u32, offset: u64) -> SgList {
        if let Some(verify) = self.job.verify {
            let block = (offset - self.range.offset) / u64::from(self.job.bs);
            self.generations[block as usize] += 1;
            let stamp = self.stamp(offset);
            content::fill(&mut self.scratch, stamp, verify);
            self.slots[nth as usize].buffer.copy_from(&self.scratch);
        }
        self.slots[nth as usize].buffer.clone()
    }

    /// Follows the caller's phase.
    #[inline]
    fn follow(&mut self) {
        let phase = self.control.phase();
        if phase > self.phase {
            self.enter(phase);
        }
    }

    fn enter(&mut self, phase: Phase) {
        let now = Instant::now();
        if phase == Phase::Measure {
            self.measured_from = now;
        } else if self.phase == Phase::Measure {
            self.results.measured = now.duration_since(self.measured_from);
        }
        if phase == Phase::Stop {
            self.read_back = (!self.generations.is_empty()).then_some(0);
            self.held = None;
        }
        self.phase = phase;
    }

    fn is_finished(&self) -> bool {
        self.phase == Phase::Stop
            && self.in_flight() == 0
            && self.read_back.is_none_or(|block| block >= self.range.blocks)
    }
}

impl Task for Worker {
    #[inline]
    fn run(&mut self) -> Progress {
        let completed = self.collect();
        self.follow();
        // Reading back must not overtake writes still in flight.
        let waits = self.phase == Phase::Stop && self.in_flight_from_run();
        let submitted = !waits && self.refill();
        if self.is_finished() {
            // The caller may have given up.
            let _ = self.result.send(Ok(std::mem::take(&mut self.results)));
            return Progress::Done;
        }
        if self.phase == Phase::Stop && completed == 0 && !submitted {
            return Progress::Idle;
        }
        if completed > 0 || submitted { Progress::More } else { Progress::Idle }
    }
}

impl Worker {
    fn in_flight_from_run(&self) -> bool {
        self.in_flight() > 0 && self.read_back == Some(0)
    }
}

impl Slot {
    /// A buffer of incompressible bytes, different in each slot.
    fn new(job: &Job, worker: u32, nth: u32) -> Slot {
        let memory = Memory::from_heap(job.bs as usize);
        let buffer = SgList::one(memory.seg(0, job.bs as usize));
        let seed = job.randseed ^ content::mix(u64::from(worker) << 32 | u64::from(nth));
        let bytes: Vec<u8> = (0..u64::from(job.bs).div_ceil(8))
            .flat_map(|word| content::mix(seed ^ word).to_le_bytes())
            .collect();
        buffer.copy_from(&bytes[..job.bs as usize]);
        Slot { buffer, started: Instant::now(), work: Work::Io(Action::Read), offset: 0 }
    }
}

fn run_seed(job: &Job) -> u64 {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    content::mix(job.randseed ^ since_epoch.as_nanos() as u64)
}
