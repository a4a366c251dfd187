//! Compare and Write, the only fused operation of the NVM Command Set.
//!
//! A Compare and a Write of the same blocks, consecutive in a queue, are executed atomically: the
//! range is locked as for SCSI's COMPARE AND WRITE, so that other commands to the volume, over any
//! protocol, come before or after both. Storage that can compares and writes in one step, so that
//! its other clients are excluded, too.

use super::NvmeOutcome;
use super::io::{IoRequest, IoStep, compare};
use super::status::of_io_error;
use super::subsystem::Namespace;
use crate::exports::VolumeId;
use crate::volume_state::AtomicRange;
use blockmux_volume::{IoError, Op, Output, SgList};
use blockmux_wire::nvme::status::NvmeStatus;

/// The state of both commands.
pub(super) struct CompareAndWrite {
    volume: VolumeId,
    range: AtomicRange,
    fua: bool,
    expected: SgList,
    data: SgList,
    /// The storage compares and writes.
    is_native: bool,
    is_writing: bool,
}

impl CompareAndWrite {
    pub(super) fn new(namespace: &Namespace, (offset, len): (u64, u64), fua: bool) -> CompareAndWrite {
        let info = namespace.volume_state.volume().info();
        CompareAndWrite {
            is_native: info.compares(offset, len),
            volume: namespace.volume,
            range: AtomicRange::new(&namespace.volume_state, offset, len),
            fua,
            expected: SgList::default(),
            data: SgList::default(),
            is_writing: false,
        }
    }

    /// Begins, once the data of both commands has arrived.
    pub(super) fn begin(&mut self, expected: SgList, data: SgList) -> IoStep {
        (self.expected, self.data) = (expected, data);
        if self.is_native {
            let mut both = self.expected.clone();
            self.data.segs().iter().for_each(|seg| both.push(seg.clone()));
            return self.io(Op::CompareAndWrite { fua: self.fua }, Some(both));
        }
        self.io(Op::Read, None)
    }

    pub(super) fn range(&mut self) -> &mut AtomicRange {
        &mut self.range
    }

    /// Handles the completion of an I/O.
    pub(super) fn on_io(&mut self, result: Result<Output, IoError>) -> IoStep {
        self.range.on_io();
        // An error of the only step counts as the write's.
        let is_last = self.is_writing || self.is_native;
        let op = if is_last { Op::Write { fua: self.fua } } else { Op::Read };
        let output = match result {
            Ok(Output::Differs(_)) => {
                return IoStep::Done(NvmeOutcome::failure(NvmeStatus::COMPARE_FAILURE));
            }
            Ok(Output::NotCompared) => {
                self.is_native = false;
                return self.io(Op::Read, None);
            }
            Ok(output) => output,
            Err(error) => {
                self.is_writing = is_last;
                return IoStep::Done(of_io_error(error, op));
            }
        };
        if is_last {
            self.is_writing = true;
            return IoStep::Done(NvmeOutcome::success(0));
        }
        let outcome = compare(&output.into_data(), &self.expected);
        if !outcome.status.is_success() {
            return IoStep::Done(outcome);
        }
        self.is_writing = true;
        self.io(Op::Write { fua: self.fua }, Some(self.data.clone()))
    }

    /// The outcomes of both commands if the operation ends with `outcome`.
    pub(super) fn outcomes(&self, outcome: &NvmeOutcome) -> (NvmeOutcome, NvmeOutcome) {
        let other = NvmeOutcome::failure(NvmeStatus::COMMAND_ABORTED_DUE_TO_FAILED_FUSED_COMMAND);
        match (outcome.status.is_success(), self.is_writing) {
            (true, _) => (NvmeOutcome::success(0), outcome.clone()),
            (false, true) => (other, outcome.clone()),
            (false, false) => (outcome.clone(), other),
        }
    }

    fn io(&self, op: Op, data: Option<SgList>) -> IoStep {
        let (offset, len) = (self.range.offset(), self.range.len());
        IoStep::Io(IoRequest { volume: self.volume, op, offset, len, data })
    }
}
