//! The task that carries a copy on.

use super::{Plan, Record, Source};
use crate::scsi::Status;
use crate::scsi::device::task::{Action, Context, Failure, Outcome, PIECE, Work};
use crate::scsi::device::unit::{LogicalUnit, NexusKey};
use crate::scsi::device::units::Attached;
use crate::scsi::sense::Sense;
use blockmux_volume::{Memory, Op, Output, SgList};
use blockmux_wire::scsi::copy::*;
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::sync::Arc;

/// Makes the task that of a copy which waits for one.
pub(in crate::scsi) fn carry_on(cx: &mut Context<'_>, is_it: impl Fn(&Record) -> bool) -> Outcome {
    let claimed = cx.unit.unit.change(|state| {
        let record = state.copies.iter_mut().find(|record| record.is_abandoned() && is_it(record))?;
        let job = record.job.as_mut()?;
        job.is_driven = true;
        Some((record.nexus, record.list_identifier, job.plan.clone()))
    });
    let Some((nexus, list_identifier, plan)) = claimed else { return Ok(Action::good()) };
    let unit = cx.unit.unit.clone();
    let mut driver = Driver { unit, nexus, list_identifier, plan, gathered: SgList::default(), piece: 0 };
    let first = driver.next();
    if matches!(first, Ok(Action::Io(..) | Action::IoOn(..))) {
        cx.work(driver);
    }
    first
}

/// The task that carries a copy on: reads a piece, from several places if need be, and writes it.
struct Driver {
    unit: Arc<LogicalUnit>,
    nexus: NexusKey,
    list_identifier: u32,
    plan: Arc<Plan>,
    /// What was read of the piece.
    gathered: SgList,
    /// Bytes that are being read and written.
    piece: u64,
}

impl Driver {
    /// Changes the record, as long as there is one that is not over.
    fn record<R>(&self, change: impl FnOnce(&mut Record) -> R) -> Option<R> {
        self.unit.change(|state| {
            let mut records = state.copies.iter_mut();
            records.find(|record| self.is_own(record)).map(change)
        })
    }

    /// Another copy may have been begun by that identifier when this one was aborted.
    fn is_own(&self, record: &Record) -> bool {
        record.names(self.nexus, self.list_identifier)
            && record.job.as_ref().is_some_and(|job| Arc::ptr_eq(&job.plan, &self.plan))
    }

    fn next(&mut self) -> Outcome {
        let Some(done) = self.record(|record| record.done) else {
            return Err(Failure::status(Status::TASK_ABORTED));
        };
        let plan = &self.plan;
        let Some((to, left)) = place(&plan.ranges, done) else { return self.finish() };
        let Source::Token { volume, ranges, .. } = &plan.source else {
            self.piece = left.min(ZERO_PIECE);
            let op = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };
            return Ok(Action::Io(op, to, self.piece, None));
        };
        self.piece = left.min(PIECE);
        let here = self.gathered.len() as u64;
        let wanted = self.piece.saturating_sub(here);
        if wanted == 0 {
            let data = std::mem::take(&mut self.gathered);
            return Ok(Action::Io(Op::Write { fua: false }, to, self.piece, Some(data)));
        }
        let at = done.saturating_add(here);
        let available = plan.available.saturating_sub(at);
        let from = place(ranges, plan.offset.saturating_add(at)).filter(|_| available > 0);
        let Some((from, left)) = from else {
            let zeroes = Memory::from_heap(wanted as usize).seg(0, wanted as usize);
            zeroes.fill_zero();
            self.gathered.push(zeroes);
            return self.next();
        };
        Ok(Action::IoOn(*volume, Op::Read, from, wanted.min(left).min(available), None))
    }

    fn finish(&mut self) -> Outcome {
        let plan = &self.plan;
        let status = if plan.is_partial { COPY_PARTIAL } else { COPY_COMPLETED };
        self.record(|record| record.end(status, None));
        if let (true, Source::Token { unit, bytes, .. }) = (plan.deletes, &plan.source) {
            unit.tokens.delete(bytes);
        }
        Ok(Action::good())
    }

    /// Whether what was written is what the token stands for: it was when it is still good.
    fn check_token(&self) -> Result<(), Sense> {
        let Source::Token { unit, bytes, .. } = &self.plan.source else { return Ok(()) };
        match unit.tokens.find(bytes) {
            Some(Ok(_)) => Ok(()),
            Some(Err(why)) => Err(Sense::new(SenseKey::COPY_ABORTED, why)),
            None => Err(Sense::new(SenseKey::COPY_ABORTED, Asc::TOKEN_UNKNOWN)),
        }
    }
}

impl Work for Driver {
    /// It is aborted with its record, which is not always that of who carries it on. The source has to be ready; but
    /// whoever has a token may have what it stands for, whatever was reserved since: that was asked when it was made.
    fn check(&self, end: &Attached, op: Op) -> Result<(), Failure> {
        if !self.unit.look(|state| state.copies.iter().any(|record| self.is_own(record))) {
            return Err(Failure::status(Status::TASK_ABORTED));
        }
        end.view.check_sanitize()?;
        end.view.not_ready.filter(|_| op == Op::Read).map_or(Ok(()), |sense| Err(sense.into()))
    }

    fn on_io(&mut self, _cx: &mut Context<'_>, output: Output) -> Outcome {
        if let Output::Data(data) = output {
            data.segs().iter().for_each(|seg| self.gathered.push(seg.clone()));
            return self.next();
        }
        if let Err(sense) = self.check_token() {
            self.record(|record| record.end(COPY_FAILED, Some(sense)));
            return Err(sense.into());
        }
        let piece = self.piece;
        self.record(|record| record.done = record.done.saturating_add(piece));
        self.next()
    }

    fn on_error(&mut self, _cx: &mut Context<'_>) {
        let sense = Sense::new(SenseKey::COPY_ABORTED, Asc::NO_ADDITIONAL_SENSE_INFORMATION);
        self.record(|record| record.end(COPY_FAILED, Some(sense)));
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let in_background = self.plan.in_background;
        let is_abandoned = self.record(|record| {
            if !in_background {
                // With its command.
                record.end(COPY_TERMINATED, None);
            } else if let Some(job) = &mut record.job {
                job.is_driven = false;
            }
            in_background
        });
        if is_abandoned == Some(true) {
            self.unit.call_background();
        }
    }
}

/// Where the byte `at` of all ranges together is, and how much follows it there.
fn place(ranges: &[(u64, u64)], mut at: u64) -> Option<(u64, u64)> {
    for (offset, len) in ranges {
        match len.checked_sub(at) {
            Some(left) if left > 0 => return Some((offset.saturating_add(at), left)),
            _ => at = at.saturating_sub(*len),
        }
    }
    None
}

/// Bytes that are zeroed at a time.
const ZERO_PIECE: u64 = 64 << 20;
