//! The copy itself, as a task on one core.
//!
//! ```text
//!   Look    ask the destination's block status ──▶ read its data, or both ends of it: all zeroes
//!   Copy    read source ──▶ write destination     zeroes: write zeroes, or nothing if the destination is new
//!   Flush   one flush of the destination
//!   Verify  read source ──▶ read destination ──▶ compare     zeroes: ask block status, else read and compare
//! ```
//! A slot processes one segment at a time; the number of slots is the I/O depth.

use super::map::{Map, Segment};
use super::progress::CopyProgress;
use blockmux_engine::core::reactor::{EngineCore, Progress, Task};
use blockmux_volume::{Channel, Completion, Core, Io, IoError, Memory, Op, Output, SgList, Tag, Volume};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

/// Parameters of a copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyPlan {
    /// The source's size in bytes.
    pub(super) len: u64,
    /// Block size of both sides, in bytes; a power of two.
    pub(super) block: u64,
    /// The maximum data of one I/O, in bytes.
    pub(super) piece: u64,
    /// Number of segments in progress.
    pub(super) depth: u32,
    /// Whether the destination reads as zeroes.
    pub(super) is_fresh: bool,
    /// Whether to look first if the destination has data, which the copy would overwrite.
    pub(super) looks: bool,
    /// Whether to compare both sides after the copy.
    pub(super) verify: bool,
}

/// Source or destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Source,
    Destination,
}

/// Reason for the failure of a copy.
#[derive(Debug)]
pub(super) enum CopyError {
    /// A channel cannot be opened.
    Open { side: Side, error: IoError },
    /// An I/O failed; offset and length in bytes.
    Io { side: Side, action: &'static str, offset: u64, len: u64, error: IoError },
    /// The final flush failed.
    Flush(IoError),
    /// The comparison found a difference at this offset.
    Differs { offset: u64 },
    /// The destination has data at this offset.
    NotEmpty { offset: u64 },
    /// This signal ended the copy.
    Interrupted(i32),
}

/// Copies, flushes, and optionally compares.
pub(super) struct CopyTask {
    source: Box<dyn Channel>,
    destination: Box<dyn Channel>,
    plan: CopyPlan,
    stage: CopyStage,
    map: Map,
    /// The range of the map's block status request.
    queried: (u64, u64),
    /// Zeroes of the source that the destination does not report as zeroes, and ranges of the
    /// destination that must be zeroes before it is overwritten; they must be read there.
    unconfirmed_zeroes: VecDeque<Segment>,
    /// Parts of the destination that the look has left out, because its block status has not told
    /// a hole from data yet.
    left_out: Vec<Segment>,
    /// Whether the destination's block status tells holes from data.
    tells_holes: bool,
    slots: Vec<Slot>,
    free: Vec<u32>,
    done: Vec<Completion>,
    /// Buffers for comparing, of `piece` bytes each.
    scratch: [Vec<u8>; 2],
    progress: Arc<CopyProgress>,
    result: mpsc::Sender<Result<(), CopyError>>,
}

/// Stages of a copy, in order.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CopyStage {
    Look,
    Copy,
    Flush,
    Verify,
}

/// A segment in progress.
struct Slot {
    segment: Segment,
    step: SlotStep,
    /// Data of the source, until it is compared.
    data: SgList,
}

/// The I/O in flight of a slot.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SlotStep {
    ReadSource,
    Write,
    WriteZeroes,
    ReadBack,
    QueryZeroes,
    ReadZeroes,
    Flush,
}

impl SlotStep {
    fn action(self) -> &'static str {
        match self {
            SlotStep::ReadSource | SlotStep::ReadBack | SlotStep::ReadZeroes => "read",
            SlotStep::Write => "write",
            SlotStep::WriteZeroes => "zero",
            SlotStep::QueryZeroes => "query the block status of",
            SlotStep::Flush => "flush",
        }
    }
}

impl CopyTask {
    /// Starts the task on `core`; it sends its result to `result`.
    ///
    /// # Errors
    /// If a channel cannot be opened.
    pub(super) fn spawn(
        core: &Rc<EngineCore>,
        source: &Arc<dyn Volume>,
        destination: &Arc<dyn Volume>,
        plan: CopyPlan,
        progress: Arc<CopyProgress>,
        result: mpsc::Sender<Result<(), CopyError>>,
    ) -> Result<(), CopyError> {
        core.try_spawn(|waker| {
            let shared: Rc<dyn Core> = core.clone();
            let open = |volume: &Arc<dyn Volume>, side| {
                // One more than slots, for the block status request of the map.
                volume
                    .open(&shared, plan.depth + 1, waker.clone())
                    .map_err(|error| CopyError::Open { side, error })
            };
            let nothing = Segment { offset: 0, len: 0, is_zero: true };
            let slot = || Slot { segment: nothing, step: SlotStep::Flush, data: SgList::default() };
            let scratch_len = if plan.verify || plan.looks { plan.piece as usize } else { 0 };
            Ok(CopyTask {
                source: open(source, Side::Source)?,
                destination: open(destination, Side::Destination)?,
                stage: if plan.looks && !plan.is_fresh { CopyStage::Look } else { CopyStage::Copy },
                map: Map::new(plan.len, plan.block),
                queried: (0, 0),
                unconfirmed_zeroes: VecDeque::new(),
                left_out: Vec::new(),
                tells_holes: false,
                slots: (0..plan.depth).map(|_| slot()).collect(),
                free: (0..plan.depth).rev().collect(),
                done: Vec::with_capacity(plan.depth as usize + 1),
                scratch: [vec![0; scratch_len], vec![0; scratch_len]],
                plan,
                progress,
                result,
            })
        })
    }

    /// Handles completions; returns whether there was any.
    fn collect(&mut self) -> Result<bool, CopyError> {
        let mut done = std::mem::take(&mut self.done);
        self.source.poll(&mut done);
        let of_source = done.len();
        self.destination.poll(&mut done);
        let any = !done.is_empty();
        for (nth, completion) in done.drain(..).enumerate() {
            let side = if nth < of_source { Side::Source } else { Side::Destination };
            self.finish(side, completion)?;
        }
        self.done = done;
        Ok(any)
    }

    fn finish(&mut self, side: Side, completion: Completion) -> Result<(), CopyError> {
        let nth = completion.tag.0 as u32;
        if nth == self.plan.depth {
            match completion.result {
                Ok(Output::Extents(extents)) => self.map.on_extents(&extents),
                Err(error) if is_unreachable(error) => {
                    let ((offset, len), action) = (self.queried, SlotStep::QueryZeroes.action());
                    return Err(CopyError::Io { side, action, offset, len, error });
                }
                // Old servers have no block status; on a broken one, reading will fail as well.
                _ => self.map.on_unknown(),
            }
            return Ok(());
        }
        let (step, segment) = (self.slots[nth as usize].step, self.slots[nth as usize].segment);
        let output = match completion.result {
            Ok(output) => output,
            Err(IoError::Unsupported) if step == SlotStep::WriteZeroes => {
                self.write_zeroes_as_data(nth);
                return Ok(());
            }
            // Without block status the range must be read.
            Err(error) if step == SlotStep::QueryZeroes && !is_unreachable(error) => Output::Nothing,
            Err(error) if step == SlotStep::Flush => return Err(CopyError::Flush(error)),
            Err(error) => {
                let Segment { offset, len, .. } = segment;
                return Err(CopyError::Io { side, action: step.action(), offset, len, error });
            }
        };
        match step {
            SlotStep::ReadSource if self.stage == CopyStage::Copy => {
                self.write(nth, output.into_data());
                return Ok(());
            }
            SlotStep::ReadSource => {
                self.slots[nth as usize].data = output.into_data();
                self.submit(nth, Side::Destination, SlotStep::ReadBack, Op::Read, None);
                return Ok(());
            }
            SlotStep::ReadBack => {
                let expected = std::mem::take(&mut self.slots[nth as usize].data);
                self.compare(segment, Some(&expected), &output.into_data())?;
            }
            SlotStep::ReadZeroes => match self.compare(segment, None, &output.into_data()) {
                Err(CopyError::Differs { offset }) if self.stage == CopyStage::Look => {
                    return Err(CopyError::NotEmpty { offset });
                }
                compared => compared?,
            },
            SlotStep::QueryZeroes => self.on_destination_extents(segment, &output),
            SlotStep::Write | SlotStep::WriteZeroes => self.on_copied(segment),
            SlotStep::Flush if self.plan.verify => self.start_verifying(),
            SlotStep::Flush => {}
        }
        self.free.push(nth);
        Ok(())
    }

    /// Writes the data that was read from the source.
    fn write(&mut self, nth: u32, mut data: SgList) {
        // A source may end within the last block of a new file.
        let padding = data.len().next_multiple_of(self.plan.block as usize) - data.len();
        if padding > 0 && self.plan.is_fresh {
            data.push(Memory::from_heap(padding).seg(0, padding));
        }
        self.submit(nth, Side::Destination, SlotStep::Write, Op::Write { fua: false }, Some(data));
    }

    /// Writes zeroes as data, because the destination has no write-zeroes.
    fn write_zeroes_as_data(&mut self, nth: u32) {
        let slot = &mut self.slots[nth as usize];
        let here = slot.segment.len.min(self.plan.piece);
        let rest =
            Segment { offset: slot.segment.offset + here, len: slot.segment.len - here, is_zero: true };
        slot.segment.len = here;
        if rest.len > 0 {
            self.unconfirmed_zeroes.push_back(rest);
        }
        self.write(nth, SgList::one(Memory::from_heap(here as usize).seg(0, here as usize)));
    }

    fn on_copied(&mut self, segment: Segment) {
        self.progress.on_copied(segment.len, segment.is_zero);
    }

    fn start_verifying(&mut self) {
        self.stage = CopyStage::Verify;
        self.map = Map::new(self.plan.len, self.plan.block);
        self.progress.on_verify();
    }

    /// Handles the destination's block status: ranges of zeroes need not be read.
    fn on_destination_extents(&mut self, segment: Segment, output: &Output) {
        let (mut at, end) = (segment.offset, segment.offset + segment.len);
        if let Output::Extents(extents) = output {
            let zeroes = extents.iter().take_while(|extent| extent.zero).map(|extent| extent.len);
            at = at.saturating_add(zeroes.fold(0, u64::saturating_add)).min(end);
        }
        self.progress.on_verified(at - segment.offset);
        if at < end {
            self.unconfirmed_zeroes.push_back(Segment { offset: at, len: end - at, is_zero: true });
        }
    }

    /// Compares `found` with `expected`, or with zeroes if `expected` is `None`.
    fn compare(
        &mut self,
        segment: Segment,
        expected: Option<&SgList>,
        found: &SgList,
    ) -> Result<(), CopyError> {
        let len = segment.len as usize;
        let [left, right] = &mut self.scratch;
        let (left, right) = (&mut left[..len], &mut right[..len]);
        match expected {
            Some(expected) => expected.slice(0, len).copy_to(left),
            None => left.fill(0),
        }
        found.slice(0, len).copy_to(right);
        if let Some(at) = left.iter().zip(right.iter()).position(|(left, right)| left != right) {
            return Err(CopyError::Differs { offset: segment.offset + at as u64 });
        }
        if self.stage == CopyStage::Verify {
            self.progress.on_verified(segment.len);
        }
        Ok(())
    }

    /// Starts segments in free slots; returns whether any was started.
    fn refill(&mut self) -> bool {
        let mut any = false;
        if self.stage != CopyStage::Flush
            && let Some((offset, len)) = self.map.next_query()
        {
            self.queried = (offset, len);
            let query = Io::new(Tag(self.plan.depth.into()), Op::BlockStatus, offset, len);
            match self.stage {
                CopyStage::Look => self.destination.submit(query),
                _ => self.source.submit(query),
            }
            any = true;
        }
        while let Some(&nth) = self.free.last() {
            let Some(segment) = self.next_segment() else { break };
            any = true;
            if self.stage == CopyStage::Copy && segment.is_zero && self.plan.is_fresh {
                self.on_copied(segment);
                continue;
            }
            self.free.pop();
            self.begin(nth, segment);
        }
        // Zeroes need no look, so the stage may end without any I/O.
        any || self.stage == CopyStage::Look && self.is_idle()
    }

    fn next_segment(&mut self) -> Option<Segment> {
        if self.stage == CopyStage::Flush {
            return None;
        }
        let Some(unconfirmed_zeroes) = self.unconfirmed_zeroes.front_mut() else {
            return match self.stage {
                CopyStage::Look => self.next_look(),
                _ => self.map.take(self.plan.piece),
            };
        };
        let here = unconfirmed_zeroes.len.min(self.plan.piece);
        let segment = Segment { len: here, ..*unconfirmed_zeroes };
        (unconfirmed_zeroes.offset, unconfirmed_zeroes.len) =
            (unconfirmed_zeroes.offset + here, unconfirmed_zeroes.len - here);
        if unconfirmed_zeroes.len == 0 {
            self.unconfirmed_zeroes.pop_front();
        }
        Some(segment)
    }

    /// The beginning of the next range of the destination that may have data. Its end is looked at
    /// afterwards: partition tables and file systems are in one of the two. What is between them is
    /// read only if the destination tells holes from data: otherwise all of it may be unused.
    fn next_look(&mut self) -> Option<Segment> {
        let range = loop {
            match self.map.take(LOOK_SPAN)? {
                range if !range.is_zero => break range,
                _ if self.tells_holes => {}
                _ => {
                    self.tells_holes = true;
                    self.unconfirmed_zeroes.extend(self.left_out.drain(..));
                }
            }
        };
        let here = range.len.min(self.plan.piece);
        let (between, last) = (range.offset + here, range.offset + range.len - here);
        if range.len > here {
            self.unconfirmed_zeroes.push_back(Segment { offset: last, len: here, is_zero: true });
        }
        if between < last {
            let between = Segment { offset: between, len: last - between, is_zero: true };
            match self.tells_holes {
                true => self.unconfirmed_zeroes.push_back(between),
                false => self.left_out.push(between),
            }
        }
        Some(Segment { len: here, is_zero: true, ..range })
    }

    fn begin(&mut self, nth: u32, segment: Segment) {
        self.slots[nth as usize].segment = segment;
        let zero = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };
        match (self.stage, segment.is_zero) {
            (CopyStage::Copy, true) => self.submit(nth, Side::Destination, SlotStep::WriteZeroes, zero, None),
            (CopyStage::Verify, true) if segment.len > self.plan.piece => {
                self.submit(nth, Side::Destination, SlotStep::QueryZeroes, Op::BlockStatus, None);
            }
            (CopyStage::Verify | CopyStage::Look, true) => {
                self.submit(nth, Side::Destination, SlotStep::ReadZeroes, Op::Read, None)
            }
            _ => self.submit(nth, Side::Source, SlotStep::ReadSource, Op::Read, None),
        }
    }

    fn submit(&mut self, nth: u32, side: Side, step: SlotStep, op: Op, data: Option<SgList>) {
        let slot = &mut self.slots[nth as usize];
        slot.step = step;
        let Segment { offset, mut len, .. } = slot.segment;
        if side == Side::Destination && step != SlotStep::Flush && self.plan.is_fresh {
            // The source may end within a block.
            len = len.next_multiple_of(self.plan.block);
        }
        let io = Io { tag: Tag(nth.into()), op, offset, len, data };
        match side {
            Side::Source => self.source.submit(io),
            Side::Destination => self.destination.submit(io),
        }
    }

    /// Whether the current stage is complete.
    fn is_idle(&self) -> bool {
        self.free.len() == self.slots.len() && self.unconfirmed_zeroes.is_empty() && self.map.is_empty()
    }

    fn advance(&mut self) -> Result<Progress, CopyError> {
        for _ in 0..ROUNDS_PER_TURN {
            let mut any = self.collect()?;
            if self.is_idle() {
                match self.stage {
                    CopyStage::Look => {
                        self.stage = CopyStage::Copy;
                        self.map = Map::new(self.plan.len, self.plan.block);
                    }
                    CopyStage::Copy => {
                        self.stage = CopyStage::Flush;
                        let Some(nth) = self.free.pop() else { return Ok(Progress::Idle) };
                        self.slots[nth as usize].segment = Segment { offset: 0, len: 0, is_zero: false };
                        self.submit(nth, Side::Destination, SlotStep::Flush, Op::Flush, None);
                        any = true;
                    }
                    CopyStage::Flush | CopyStage::Verify => return Ok(Progress::Done),
                }
            }
            any |= self.refill();
            self.source.kick();
            self.destination.kick();
            if !any {
                return Ok(Progress::Drained);
            }
        }
        Ok(Progress::More)
    }
}

/// Whether an error says nothing about block status, but that the volume cannot be used now. It has
/// been retried for as long as the user wants.
fn is_unreachable(error: IoError) -> bool {
    matches!(
        error,
        IoError::PathLost
            | IoError::NoMemory
            | IoError::Aborted
            | IoError::ShuttingDown
            | IoError::Reserved
            | IoError::Fenced
    )
}

impl Task for CopyTask {
    fn run(&mut self) -> Progress {
        let outcome = match self.advance() {
            Ok(Progress::Done) => Ok(()),
            Ok(progress) => return progress,
            Err(error) => Err(error),
        };
        // The main thread waits only for this result.
        let _ = self.result.send(outcome);
        Progress::Done
    }
}

/// Maximum length of a range of which the look reads only both ends, in bytes.
const LOOK_SPAN: u64 = 1 << 30;
/// The number of rounds after which other tasks of the core run.
const ROUNDS_PER_TURN: usize = 16;
