//! Executes WRITE USING TOKEN: reads each piece, possibly from several ranges, and writes it.

use super::{TokenCopyPlan, TokenCopyRecord, TokenSource};
use crate::scsi::device::task::{
    CommandContext, HandlerAction, MultiStepCommand, PIECE, TaskFailure, TaskOutcome,
};
use crate::scsi::device::units::AttachedUnit;
use crate::scsi::sense::Sense;
use blockmux_volume::{Memory, Op, Output, SgList};
use blockmux_wire::scsi::copy::*;
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::cell::RefCell;
use std::rc::Rc;

pub(super) struct TokenCopyDriver {
    plan: TokenCopyPlan,
    record: Rc<RefCell<TokenCopyRecord>>,
    /// Data read for the current piece.
    gathered: SgList,
    /// Length of the current piece, in bytes.
    piece: u64,
}

impl TokenCopyDriver {
    pub(super) fn new(plan: TokenCopyPlan, record: Rc<RefCell<TokenCopyRecord>>) -> TokenCopyDriver {
        TokenCopyDriver { plan, record, gathered: SgList::default(), piece: 0 }
    }

    fn end(&self, status: u8, sense: Option<Sense>) {
        let mut record = self.record.borrow_mut();
        (record.status, record.sense) = (status, sense);
    }

    pub(super) fn next(&mut self) -> TaskOutcome {
        let done = self.record.borrow().done;
        let plan = &self.plan;
        let Some((to, left)) = place(&plan.ranges, done) else { return self.finish() };
        let TokenSource::Token { volume, ranges, .. } = &plan.source else {
            self.piece = left.min(ZERO_PIECE);
            let op = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };
            return Ok(HandlerAction::Io(op, to, self.piece, None));
        };
        self.piece = left.min(PIECE);
        let here = self.gathered.len() as u64;
        let requested = self.piece.saturating_sub(here);
        if requested == 0 {
            let data = std::mem::take(&mut self.gathered);
            return Ok(HandlerAction::Io(Op::Write { fua: false }, to, self.piece, Some(data)));
        }
        let at = done.saturating_add(here);
        let available = plan.available.saturating_sub(at);
        let from = place(ranges, plan.offset.saturating_add(at)).filter(|_| available > 0);
        let Some((from, left)) = from else {
            let zeroes = Memory::from_heap(requested as usize).seg(0, requested as usize);
            zeroes.fill_zero();
            self.gathered.push(zeroes);
            return self.next();
        };
        Ok(HandlerAction::IoOnVolume(*volume, Op::Read, from, requested.min(left).min(available), None))
    }

    fn finish(&mut self) -> TaskOutcome {
        let plan = &self.plan;
        let status = if plan.is_partial { COPY_PARTIAL } else { COPY_COMPLETED };
        self.end(status, None);
        if let (true, TokenSource::Token { unit, bytes, .. }) = (plan.deletes, &plan.source) {
            unit.tokens.delete(bytes);
        }
        Ok(HandlerAction::good())
    }

    /// Checks that the token is still valid, so the written data is what it represents.
    fn check_token(&self) -> Result<(), Sense> {
        let TokenSource::Token { unit, bytes, .. } = &self.plan.source else { return Ok(()) };
        match unit.tokens.find(bytes) {
            Some(Ok(_)) => Ok(()),
            Some(Err(why)) => Err(Sense::new(SenseKey::COPY_ABORTED, why)),
            None => Err(Sense::new(SenseKey::COPY_ABORTED, Asc::TOKEN_UNKNOWN)),
        }
    }
}

impl MultiStepCommand for TokenCopyDriver {
    /// The source must be ready. Reservations made after the token do not apply: access was checked
    /// when the token was created.
    fn check(&self, unit: &AttachedUnit, op: Op) -> Result<(), TaskFailure> {
        unit.view.check_sanitize()?;
        unit.view.not_ready.filter(|_| op == Op::Read).map_or(Ok(()), |sense| Err(sense.into()))
    }

    fn on_io(&mut self, _cx: &mut CommandContext<'_>, output: Output) -> TaskOutcome {
        if let Output::Data(data) = output {
            data.segs().iter().for_each(|seg| self.gathered.push(seg.clone()));
            return self.next();
        }
        if let Err(sense) = self.check_token() {
            self.end(COPY_FAILED, Some(sense));
            return Err(sense.into());
        }
        let done = self.record.borrow().done.saturating_add(self.piece);
        self.record.borrow_mut().done = done;
        self.next()
    }

    fn on_error(&mut self, _cx: &mut CommandContext<'_>) {
        let sense = Sense::new(SenseKey::COPY_ABORTED, Asc::NO_ADDITIONAL_SENSE_INFORMATION);
        self.end(COPY_FAILED, Some(sense));
    }
}

/// Position of byte `at` of the concatenated ranges, and the number of bytes that follow in its
/// range.
fn place(ranges: &[(u64, u64)], mut at: u64) -> Option<(u64, u64)> {
    for (offset, len) in ranges {
        match len.checked_sub(at) {
            Some(left) if left > 0 => return Some((offset.saturating_add(at), left)),
            _ => at = at.saturating_sub(*len),
        }
    }
    None
}

/// Number of bytes zeroed per step.
const ZERO_PIECE: u64 = 64 << 20;
