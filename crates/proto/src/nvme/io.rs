//! Commands of I/O queues (NVM Command Set 1.0 §3.2).
//!
//! A command is parsed before its data has arrived. A command for blocks that do not exist fails at
//! once, as with other protocols, unless its ranges are in the data. Otherwise the command
//! continues step by step, one I/O of the volume at a time. Before each I/O, the queue's
//! [`Admissions`] check whether reservations allow it and whether its range is locked.
//!
//! [`Admissions`]: crate::volume_state::Admissions

use super::fused::CompareAndWrite;
use super::ranges::{COPY_MAX_RANGES, CopyRanges, DeallocateRanges};
use super::reservation::ReservationCommand;
use super::status::of_io_error;
use super::subsystem::{Namespace, NamespaceView, Subsystem};
use super::traffic::QueueCounts;
use super::{MAX_DATA, NvmeOutcome};
use crate::exports::VolumeId;
use crate::scsi::bytes::first_difference;
use crate::volume_state::{AtomicRange, Epoch, Registrant};
use blockmux_volume::{IoError, Op, Output, SgList};
use blockmux_wire::nvme::log::AnaState;
use blockmux_wire::nvme::nvm::{
    CopyFormat, CopySource, DEAC, DSM_DEALLOCATE, DsmRange, FUA, NLB_MASK, NR_MASK, PRINFO_MASK, copy_format,
};
use blockmux_wire::nvme::opcode::NvmOpcode;
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvme::{NSID_ALL, Sqe};
use std::collections::VecDeque;

/// An outstanding command.
pub(crate) struct IoCommand {
    volume: VolumeId,
    /// Offset in bytes.
    offset: u64,
    /// Length in bytes.
    len: u64,
    kind: IoCommandKind,
    /// The operation in flight or waiting.
    now: Op,
}

enum IoCommandKind {
    Read {
        /// Whether to flush first, because FUA requires that the data read is durable.
        flush: bool,
    },
    /// Write Zeroes or Flush: one I/O without data.
    Plain(Op),
    Write {
        fua: bool,
    },
    /// Flush of all namespaces, with the volumes that remain.
    FlushAll(Vec<VolumeId>),
    Compare(SgList),
    Verify,
    Deallocate(Box<DeallocateRanges>),
    Copy(Box<CopyRanges>),
    Reserve(Box<ReservationCommand>),
    /// A Write fused with the preceding Compare.
    FusedWrite(Box<CompareAndWrite>),
}

/// The host that owns a queue, and the port it connected through.
pub(crate) struct QueueOrigin {
    /// The host as a registrant of reservations.
    pub(crate) who: Registrant,
    /// Port identifier.
    pub(crate) port: u16,
    /// The epoch in which the queue was connected.
    pub(crate) epoch: Epoch,
}

/// The next step of a command.
pub(crate) enum IoStep {
    /// Submit this I/O, then call `on_io`.
    Io(IoRequest),
    /// Wait for something else, then call `resume`.
    Wait,
    /// The command is complete.
    Done(NvmeOutcome),
}

/// An I/O for the volume.
#[derive(Debug)]
pub(crate) struct IoRequest {
    pub(crate) volume: VolumeId,
    pub(crate) op: Op,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) data: Option<SgList>,
}

impl IoCommand {
    /// Checks a command, as far as possible before its data has arrived.
    #[inline]
    pub(crate) fn parse(
        subsystem: &Subsystem,
        view: &NamespaceView,
        origin: &QueueOrigin,
        sqe: &Sqe,
    ) -> Result<IoCommand, NvmeStatus> {
        let opcode = NvmOpcode(sqe.opcode);
        if opcode == NvmOpcode::FLUSH && sqe.nsid.get() == NSID_ALL {
            let volumes = view.iter().map(|namespace| namespace.volume).collect();
            return Ok(IoCommand::new(VolumeId(0), (0, 0), IoCommandKind::FlushAll(volumes)));
        }
        let namespace = view.namespace(sqe.nsid.get()).ok_or(NvmeStatus::INVALID_NAMESPACE_OR_FORMAT)?;
        reach(subsystem, namespace, origin.port)?;
        let (volume, flags) = (namespace.volume, sqe.cdw12.get());
        let fua = flags & FUA != 0;
        let kind = match opcode {
            NvmOpcode::READ => IoCommandKind::Read { flush: fua && namespace.has_cache },
            NvmOpcode::WRITE => IoCommandKind::Write { fua },
            NvmOpcode::FLUSH => return Ok(IoCommand::new(volume, (0, 0), IoCommandKind::Plain(Op::Flush))),
            NvmOpcode::COMPARE => IoCommandKind::Compare(SgList::default()),
            NvmOpcode::VERIFY => IoCommandKind::Verify,
            NvmOpcode::WRITE_ZEROES => {
                let may_unmap = flags & DEAC != 0 && namespace.zeroes_deallocated;
                IoCommandKind::Plain(Op::WriteZeroes { fua, may_unmap, only_fast: false })
            }
            NvmOpcode::DATASET_MANAGEMENT => return Ok(IoCommand::deallocation(namespace, sqe)),
            NvmOpcode::COPY => return IoCommand::copying(namespace, sqe),
            NvmOpcode::RESERVATION_REGISTER
            | NvmOpcode::RESERVATION_ACQUIRE
            | NvmOpcode::RESERVATION_RELEASE
            | NvmOpcode::RESERVATION_REPORT => {
                let reserving = Box::new(ReservationCommand::parse(namespace, origin, sqe)?);
                return Ok(IoCommand::new(volume, (0, 0), IoCommandKind::Reserve(reserving)));
            }
            _ => return Err(NvmeStatus::INVALID_COMMAND_OPCODE),
        };
        if flags & PRINFO_MASK != 0 {
            // Protection information is not supported.
            return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND);
        }
        let blocks = u64::from(flags & NLB_MASK).saturating_add(1);
        let moves_data = !matches!(kind, IoCommandKind::Plain(_));
        if moves_data && blocks > max_blocks(namespace.block_shift) {
            return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND);
        }
        let range = bytes(sqe.slba(), blocks, namespace.block_shift, namespace.info().size)?;
        let command = IoCommand::new(volume, range, kind);
        if namespace.read_only
            && matches!(command.kind, IoCommandKind::Write { .. } | IoCommandKind::Plain(_))
        {
            return Err(NvmeStatus::NAMESPACE_IS_WRITE_PROTECTED);
        }
        Ok(command)
    }

    /// Fuses a Write with the preceding Compare `first`, which must have the same blocks.
    pub(crate) fn fuse(
        &mut self,
        view: &NamespaceView,
        sqe: &Sqe,
        first: &IoCommand,
    ) -> Result<(), NvmeStatus> {
        let namespace = view.namespace(sqe.nsid.get()).ok_or(NvmeStatus::INVALID_NAMESPACE_OR_FORMAT)?;
        let range = (self.offset, self.len);
        let is_same = self.volume == first.volume && range == (first.offset, first.len);
        match self.kind {
            IoCommandKind::Write { fua } if is_same => {
                self.kind = IoCommandKind::FusedWrite(Box::new(CompareAndWrite::new(namespace, range, fua)));
                Ok(())
            }
            _ => Err(NvmeStatus::INVALID_FIELD_IN_COMMAND),
        }
    }

    /// Whether the command can be the first of a fused operation.
    pub(crate) fn is_compare(&self) -> bool {
        matches!(self.kind, IoCommandKind::Compare(_))
    }

    /// The volume of its I/O.
    pub(crate) fn volume(&self) -> VolumeId {
        self.volume
    }

    /// The range that a fused command reads and writes atomically.
    pub(crate) fn atomic_range(&mut self) -> Option<&mut AtomicRange> {
        match &mut self.kind {
            IoCommandKind::FusedWrite(both) => Some(both.range()),
            _ => None,
        }
    }

    pub(crate) fn is_reservation(&self) -> bool {
        matches!(self.kind, IoCommandKind::Reserve(_))
    }

    /// Whether the command accesses this volume.
    pub(crate) fn is_for(&self, volume: VolumeId) -> bool {
        self.volume == volume
    }

    fn new(volume: VolumeId, (offset, len): (u64, u64), kind: IoCommandKind) -> IoCommand {
        IoCommand { volume, offset, len, kind, now: Op::Flush }
    }

    fn deallocation(namespace: &Namespace, sqe: &Sqe) -> IoCommand {
        let op = if namespace.zeroes_deallocated {
            Op::WriteZeroes { fua: false, may_unmap: true, only_fast: true }
        } else {
            Op::Discard { fua: false }
        };
        // The other attributes are hints and need no action.
        let asks = sqe.cdw11.get() & DSM_DEALLOCATE != 0 && !namespace.read_only;
        let count = (sqe.cdw10.get() & NR_MASK) as usize;
        let ranges = DeallocateRanges {
            left: VecDeque::new(),
            count: count.saturating_add(1),
            op: if asks { op } else { Op::Prefetch },
            shift: namespace.block_shift,
            size: namespace.info().size,
        };
        IoCommand::new(namespace.volume, (0, 0), IoCommandKind::Deallocate(Box::new(ranges)))
    }

    fn copying(namespace: &Namespace, sqe: &Sqe) -> Result<IoCommand, NvmeStatus> {
        let flags = sqe.cdw12.get();
        let count = ((flags & NR_MASK) as usize).saturating_add(1);
        if copy_format(flags) != CopyFormat::FORMAT_0 {
            return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND);
        }
        if namespace.read_only {
            return Err(NvmeStatus::NAMESPACE_IS_WRITE_PROTECTED);
        }
        if count > COPY_MAX_RANGES {
            return Err(NvmeStatus::COMMAND_SIZE_LIMIT_EXCEEDED);
        }
        let (shift, size) = (namespace.block_shift, namespace.info().size);
        let (offset, _) = bytes(sqe.slba(), 0, shift, size)?;
        let room = size.saturating_sub(offset);
        let fua = flags & FUA != 0;
        let copying = CopyRanges { left: VecDeque::new(), count, copied: 0, fua, shift, size, room };
        Ok(IoCommand::new(namespace.volume, (offset, 0), IoCommandKind::Copy(Box::new(copying))))
    }

    /// Length of the host's data in bytes; `descriptor_len` is the length in the data pointer. The
    /// buffer of a list may be longer than the list: Linux always sends a whole page of ranges, and
    /// two keys for Release, which has one.
    #[inline]
    pub(crate) fn data_out(&self, descriptor_len: usize) -> usize {
        let list = |len: usize| if len > 0 { descriptor_len.min(MAX_LIST).max(len) } else { 0 };
        match &self.kind {
            // At most `MAX_DATA`, as was checked.
            IoCommandKind::Write { .. } | IoCommandKind::Compare(_) | IoCommandKind::FusedWrite(_) => {
                self.len as usize
            }
            IoCommandKind::Deallocate(ranges) => list(ranges.count.saturating_mul(size_of::<DsmRange>())),
            IoCommandKind::Copy(copying) => list(copying.count.saturating_mul(size_of::<CopySource>())),
            IoCommandKind::Reserve(reserving) => list(reserving.data_out()),
            _ => 0,
        }
    }

    /// Length of the data for the host, in bytes.
    #[inline]
    pub(crate) fn data_in(&self) -> usize {
        match &self.kind {
            IoCommandKind::Read { .. } => self.len as usize,
            IoCommandKind::Reserve(reserving) => reserving.data_in(),
            _ => 0,
        }
    }

    /// Begins the command, whose data has arrived; returns the first step.
    #[inline]
    pub(crate) fn begin(&mut self, data: SgList) -> IoStep {
        match &mut self.kind {
            IoCommandKind::Read { flush: false } => self.io(Op::Read, None),
            IoCommandKind::Read { flush: true } => self.io(Op::Flush, None),
            IoCommandKind::Write { fua } => {
                let fua = *fua;
                self.io(Op::Write { fua }, Some(data))
            }
            IoCommandKind::Plain(op) => {
                let op = *op;
                self.io(op, None)
            }
            IoCommandKind::FlushAll(_) => self.flush_next(),
            IoCommandKind::Compare(expected) => {
                *expected = data;
                self.io(Op::Read, None)
            }
            IoCommandKind::Verify => self.io(Op::Read, None),
            IoCommandKind::Deallocate(ranges) => match ranges.read(&data) {
                Ok(()) => self.deallocate_next(),
                Err(status) => IoStep::Done(NvmeOutcome::failure(status)),
            },
            IoCommandKind::Copy(copying) => match copying.read(&data) {
                Ok(()) => self.copy_next(),
                Err(status) => IoStep::Done(NvmeOutcome::failure(status)),
            },
            IoCommandKind::Reserve(reserving) => reserving.begin(&data),
            // Begun by `begin_fused` only.
            IoCommandKind::FusedWrite(_) => IoStep::Done(NvmeOutcome::failure(NvmeStatus::INTERNAL_ERROR)),
        }
    }

    /// Begins a fused operation, whose data has arrived; returns the first step.
    pub(crate) fn begin_fused(&mut self, expected: SgList, data: SgList) -> IoStep {
        match &mut self.kind {
            IoCommandKind::FusedWrite(both) => both.begin(expected, data),
            _ => IoStep::Done(NvmeOutcome::failure(NvmeStatus::INTERNAL_ERROR)),
        }
    }

    /// The outcomes of both halves if a fused operation ends with `outcome`.
    pub(crate) fn fused_outcomes(&self, outcome: &NvmeOutcome) -> (NvmeOutcome, NvmeOutcome) {
        match &self.kind {
            IoCommandKind::FusedWrite(both) => both.outcomes(outcome),
            _ => (NvmeOutcome::failure(NvmeStatus::INTERNAL_ERROR), outcome.clone()),
        }
    }

    /// Continues after [`IoStep::Wait`].
    pub(crate) fn resume(&mut self) -> IoStep {
        match &mut self.kind {
            IoCommandKind::Reserve(reserving) => reserving.resume(),
            _ => IoStep::Wait,
        }
    }

    /// The outcome of a command that ends with `outcome` before it is finished: Copy reports the
    /// first source range that was not copied (NVM Command Set 1.0 §3.2.2).
    pub(crate) fn unfinished(&self, outcome: NvmeOutcome) -> NvmeOutcome {
        match &self.kind {
            IoCommandKind::Copy(copying) => NvmeOutcome { result: copying.copied, ..outcome },
            _ => outcome,
        }
    }

    /// Adds the command to the queue's counters.
    #[inline]
    pub(crate) fn count(&self, outcome: &NvmeOutcome, counts: &QueueCounts) {
        if !outcome.status.is_success() {
            if matches!(outcome.status.status(), NvmeStatus::WRITE_FAULT | NvmeStatus::UNRECOVERED_READ_ERROR)
            {
                counts.failed();
            }
            return;
        }
        match self.kind {
            IoCommandKind::Read { .. } | IoCommandKind::Compare(_) => counts.read(self.len),
            IoCommandKind::Write { .. } | IoCommandKind::FusedWrite(_) => counts.wrote(self.len),
            _ => {}
        }
    }

    /// Handles the completion of its I/O; returns the next step.
    #[inline]
    pub(crate) fn on_io(&mut self, result: Result<Output, IoError>) -> IoStep {
        if let IoCommandKind::FusedWrite(both) = &mut self.kind {
            return both.on_io(result);
        }
        let output = match result {
            Ok(output) => output,
            // Deallocation is a hint, so an unsupported one succeeds.
            Err(IoError::Unsupported) if matches!(self.kind, IoCommandKind::Deallocate(_)) => Output::Nothing,
            Err(error) => return IoStep::Done(self.unfinished(of_io_error(error, self.now))),
        };
        match &mut self.kind {
            IoCommandKind::Read { .. } if self.now == Op::Flush => self.io(Op::Read, None),
            IoCommandKind::Read { .. } => self.read_is_here(output.into_data()),
            IoCommandKind::Write { .. }
            | IoCommandKind::Plain(_)
            | IoCommandKind::Verify
            | IoCommandKind::Reserve(_)
            | IoCommandKind::FusedWrite(_) => IoStep::Done(NvmeOutcome::success(0)),
            IoCommandKind::FlushAll(_) => self.flush_next(),
            IoCommandKind::Compare(expected) => IoStep::Done(compare(&output.into_data(), expected)),
            IoCommandKind::Deallocate(_) => self.deallocate_next(),
            IoCommandKind::Copy(copying) if self.now == Op::Read => {
                let fua = copying.fua;
                let data = output.into_data();
                self.len = data.len() as u64;
                self.io(Op::Write { fua }, Some(data))
            }
            IoCommandKind::Copy(copying) => {
                copying.copied = copying.copied.saturating_add(1);
                self.offset = self.offset.saturating_add(self.len);
                self.copy_next()
            }
        }
    }

    #[inline]
    fn read_is_here(&self, data: SgList) -> IoStep {
        if data.len() as u64 != self.len {
            // A wrong length would put the host out of sync.
            return IoStep::Done(NvmeOutcome::failure(NvmeStatus::INTERNAL_ERROR));
        }
        IoStep::Done(NvmeOutcome::data(data, 0))
    }

    #[inline]
    fn io(&mut self, op: Op, data: Option<SgList>) -> IoStep {
        self.now = op;
        let (offset, len) = if op == Op::Flush { (0, 0) } else { (self.offset, self.len) };
        IoStep::Io(IoRequest { volume: self.volume, op, offset, len, data })
    }

    fn flush_next(&mut self) -> IoStep {
        let IoCommandKind::FlushAll(volumes) = &mut self.kind else {
            return IoStep::Done(NvmeOutcome::success(0));
        };
        match volumes.pop() {
            Some(volume) => {
                self.volume = volume;
                self.io(Op::Flush, None)
            }
            None => IoStep::Done(NvmeOutcome::success(0)),
        }
    }

    fn deallocate_next(&mut self) -> IoStep {
        let IoCommandKind::Deallocate(ranges) = &mut self.kind else {
            return IoStep::Done(NvmeOutcome::success(0));
        };
        match (ranges.left.pop_front(), ranges.op) {
            (None, _) | (_, Op::Prefetch) => IoStep::Done(NvmeOutcome::success(0)),
            (Some((offset, len)), op) => {
                (self.offset, self.len) = (offset, len);
                self.io(op, None)
            }
        }
    }

    fn copy_next(&mut self) -> IoStep {
        let IoCommandKind::Copy(copying) = &mut self.kind else {
            return IoStep::Done(NvmeOutcome::success(0));
        };
        let Some((offset, len)) = copying.left.pop_front() else {
            return IoStep::Done(NvmeOutcome::success(0));
        };
        self.now = Op::Read;
        let (volume, op) = (self.volume, Op::Read);
        IoStep::Io(IoRequest { volume, op, offset, len, data: None })
    }
}

/// Most blocks of one command that transfers data.
#[inline]
pub(super) fn max_blocks(shift: u32) -> u64 {
    (MAX_DATA as u64).wrapping_shr(shift)
}

/// Offset and length in bytes of a range of blocks, if it lies within a namespace of `size` bytes.
#[inline]
pub(super) fn bytes(slba: u64, blocks: u64, shift: u32, size: u64) -> Result<(u64, u64), NvmeStatus> {
    let end = slba.checked_add(blocks).filter(|&end| end <= size.wrapping_shr(shift));
    end.ok_or(NvmeStatus::LBA_OUT_OF_RANGE)?;
    Ok((slba.wrapping_shl(shift), blocks.wrapping_shl(shift)))
}

/// Checks the ANA state of the namespace at a port.
#[inline]
pub(crate) fn reach(subsystem: &Subsystem, namespace: &Namespace, port: u16) -> Result<(), NvmeStatus> {
    // Whether the subsystem reports ANA or not, another path is what the host needs.
    if !namespace.is_served() {
        return Err(NvmeStatus::ASYMMETRIC_ACCESS_INACCESSIBLE);
    }
    if namespace.ana_group == 0 {
        return Ok(());
    }
    match subsystem.ana.state(namespace.ana_group, port) {
        AnaState::OPTIMIZED | AnaState::NON_OPTIMIZED => Ok(()),
        AnaState::CHANGE => Err(NvmeStatus::ASYMMETRIC_ACCESS_TRANSITION),
        AnaState::PERSISTENT_LOSS => Err(NvmeStatus::ASYMMETRIC_ACCESS_PERSISTENT_LOSS),
        _ => Err(NvmeStatus::ASYMMETRIC_ACCESS_INACCESSIBLE),
    }
}

/// The outcome of Compare.
pub(super) fn compare(read: &SgList, expected: &SgList) -> NvmeOutcome {
    if read.len() != expected.len() {
        return NvmeOutcome::failure(NvmeStatus::INTERNAL_ERROR);
    }
    match first_difference(read, expected) {
        Some(_) => NvmeOutcome::failure(NvmeStatus::COMPARE_FAILURE),
        None => NvmeOutcome::success(0),
    }
}

/// Longest buffer with a list of ranges or keys, in bytes.
const MAX_LIST: usize = 4096;
