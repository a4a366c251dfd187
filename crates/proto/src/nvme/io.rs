//! Commands of I/O queues (NVM Command Set 1.0 §3.2).
//!
//! A command is parsed before any of its data is waited for, and then goes on step by step: one I/O of the volume at a
//! time, until it is done. Before each I/O the queue's [`Gate`] asks whether reservations allow it and whether somebody
//! has its range for itself.

use super::status::of_io_error;
use super::subsystem::{Namespace, Subsystem};
use super::{MAX_DATA, Outcome};
use crate::exports::VolumeId;
use crate::scsi::bytes::first_difference;
use crate::served::{Fence, Passage};
use blockmux_volume::{IoError, Op, Output, SgList};
use blockmux_wire::nvme::nvm::{
    CopyFormat, CopySource, DEAC, DSM_DEALLOCATE, DSM_MAX_RANGES, DsmRange, FUA, NLB_MASK, NR_MASK,
    PRINFO_MASK, copy_format,
};
use blockmux_wire::nvme::opcode::NvmOpcode;
use blockmux_wire::nvme::status::Status;
use blockmux_wire::nvme::{NSID_ALL, Sqe};
use std::collections::VecDeque;
use zerocopy::{FromBytes, IntoBytes};

/// One command under way.
pub(crate) struct IoCommand {
    volume: VolumeId,
    /// In bytes.
    offset: u64,
    len: u64,
    kind: Kind,
    /// The I/O in flight, or that waits.
    now: Op,
}

enum Kind {
    Read {
        /// Flush before: what is read has to be on stable storage.
        flush: bool,
    },
    /// Zeroes, or a flush: one I/O without data.
    Plain(Op),
    Write {
        fua: bool,
    },
    /// Of all namespaces, which are taken from the end.
    FlushAll(Vec<VolumeId>),
    Compare(SgList),
    Verify,
    Deallocate(Box<Ranges>),
    Copy(Box<Copying>),
}

/// What Dataset Management is to deallocate: offsets and lengths in bytes.
struct Ranges {
    left: VecDeque<(u64, u64)>,
    count: usize,
    op: Op,
    shift: u32,
}

/// What Copy has still to read: offsets and lengths in bytes; the command's own offset is where it writes next.
struct Copying {
    left: VecDeque<(u64, u64)>,
    count: usize,
    fua: bool,
    shift: u32,
}

/// What a command does next.
pub(crate) enum Step {
    /// This I/O, then `on_io`.
    Io(Wanted),
    /// It is over.
    Done(Outcome),
}

/// An I/O that a command wants.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) volume: VolumeId,
    pub(crate) op: Op,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) data: Option<SgList>,
}

/// A queue's way to the volumes of its subsystem.
pub(crate) struct Gate {
    fences: Vec<(VolumeId, Fence)>,
}

impl Gate {
    pub(crate) fn new(subsystem: &Subsystem) -> Gate {
        let fence = |namespace: &Namespace| (namespace.volume, Fence::new(&namespace.served));
        Gate { fences: subsystem.namespaces.iter().map(fence).collect() }
    }

    /// Whether reservations let the host do this. A flush is for what was written before, and does nobody harm.
    #[inline]
    pub(crate) fn admits(&mut self, volume: VolumeId, op: Op) -> bool {
        let Some(fence) = self.fence(volume) else { return false };
        let access = fence.access();
        op == Op::Flush || if op.is_write() { access.writes } else { access.reads }
    }

    /// Lets an I/O begin, unless a byte of its range is locked.
    #[inline]
    pub(crate) fn pass(&mut self, volume: VolumeId, op: Op, offset: u64, len: u64) -> Option<Passage> {
        self.fence(volume)?.pass(offset, len, op.is_write())
    }

    #[inline]
    fn fence(&mut self, volume: VolumeId) -> Option<&mut Fence> {
        self.fences.iter_mut().find(|(id, _)| *id == volume).map(|(_, fence)| fence)
    }
}

impl IoCommand {
    /// Checks a command, as far as that is possible before its data is here.
    #[inline]
    pub(crate) fn parse(subsystem: &Subsystem, sqe: &Sqe) -> Result<IoCommand, Status> {
        let opcode = NvmOpcode(sqe.opcode);
        if opcode == NvmOpcode::FLUSH && sqe.nsid.get() == NSID_ALL {
            let volumes = subsystem.namespaces.iter().map(|namespace| namespace.volume).collect();
            return Ok(IoCommand::new(VolumeId(0), (0, 0), Kind::FlushAll(volumes)));
        }
        let namespace = subsystem.namespace(sqe.nsid.get()).ok_or(Status::INVALID_NAMESPACE_OR_FORMAT)?;
        let (volume, flags) = (namespace.volume, sqe.cdw12.get());
        let fua = flags & FUA != 0;
        let kind = match opcode {
            NvmOpcode::READ => Kind::Read { flush: fua && namespace.has_cache },
            NvmOpcode::WRITE => Kind::Write { fua },
            NvmOpcode::FLUSH => return Ok(IoCommand::new(volume, (0, 0), Kind::Plain(Op::Flush))),
            NvmOpcode::COMPARE => Kind::Compare(SgList::default()),
            NvmOpcode::VERIFY => Kind::Verify,
            NvmOpcode::WRITE_ZEROES => {
                let may_unmap = flags & DEAC != 0 && namespace.zeroes_deallocated;
                Kind::Plain(Op::WriteZeroes { fua, may_unmap, only_fast: false })
            }
            NvmOpcode::DATASET_MANAGEMENT => return Ok(IoCommand::deallocation(namespace, sqe)),
            NvmOpcode::COPY => return IoCommand::copying(namespace, sqe),
            _ => return Err(Status::INVALID_COMMAND_OPCODE),
        };
        if flags & PRINFO_MASK != 0 {
            // No namespace has protection information.
            return Err(Status::INVALID_FIELD_IN_COMMAND);
        }
        let range = bytes(sqe.slba(), u64::from(flags & NLB_MASK).saturating_add(1), namespace.block_shift)?;
        let command = IoCommand::new(volume, range, kind);
        let is_too_long = range.1 > MAX_DATA as u64 && !matches!(command.kind, Kind::Plain(_));
        if is_too_long {
            return Err(Status::INVALID_FIELD_IN_COMMAND);
        }
        if namespace.read_only && matches!(command.kind, Kind::Write { .. } | Kind::Plain(_)) {
            return Err(Status::NAMESPACE_IS_WRITE_PROTECTED);
        }
        Ok(command)
    }

    fn new(volume: VolumeId, (offset, len): (u64, u64), kind: Kind) -> IoCommand {
        IoCommand { volume, offset, len, kind, now: Op::Flush }
    }

    fn deallocation(namespace: &Namespace, sqe: &Sqe) -> IoCommand {
        let op = if namespace.zeroes_deallocated {
            Op::WriteZeroes { fua: false, may_unmap: true, only_fast: true }
        } else {
            Op::Discard { fua: false }
        };
        // The other attributes are hints, which need nothing done.
        let asks = sqe.cdw11.get() & DSM_DEALLOCATE != 0 && !namespace.read_only;
        let count = (sqe.cdw10.get() & NR_MASK) as usize;
        let ranges = Ranges {
            left: VecDeque::new(),
            count: count.saturating_add(1),
            op: if asks { op } else { Op::Prefetch },
            shift: namespace.block_shift,
        };
        IoCommand::new(namespace.volume, (0, 0), Kind::Deallocate(Box::new(ranges)))
    }

    fn copying(namespace: &Namespace, sqe: &Sqe) -> Result<IoCommand, Status> {
        let flags = sqe.cdw12.get();
        let count = ((flags & NR_MASK) as usize).saturating_add(1);
        if copy_format(flags) != CopyFormat::FORMAT_0 {
            return Err(Status::INVALID_FIELD_IN_COMMAND);
        }
        if namespace.read_only {
            return Err(Status::NAMESPACE_IS_WRITE_PROTECTED);
        }
        if count > COPY_MAX_RANGES {
            return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED);
        }
        let shift = namespace.block_shift;
        let (offset, _) = bytes(sqe.slba(), 0, shift)?;
        let copying = Copying { left: VecDeque::new(), count, fua: flags & FUA != 0, shift };
        Ok(IoCommand::new(namespace.volume, (offset, 0), Kind::Copy(Box::new(copying))))
    }

    /// The data that the host sends, in bytes, if `told` is what it says. A list of ranges may be in a larger buffer:
    /// Linux always sends a whole page.
    #[inline]
    pub(crate) fn data_out(&self, told: usize) -> usize {
        let list = |len: usize| told.min(LONGEST_LIST).max(len);
        match &self.kind {
            // At most MAX_DATA, as was checked.
            Kind::Write { .. } | Kind::Compare(_) => self.len as usize,
            Kind::Deallocate(ranges) => list(ranges.count.saturating_mul(size_of::<DsmRange>())),
            Kind::Copy(copying) => list(copying.count.saturating_mul(size_of::<CopySource>())),
            _ => 0,
        }
    }

    /// The data that the host gets, in bytes.
    #[inline]
    pub(crate) fn data_in(&self) -> usize {
        if let Kind::Read { .. } = self.kind { self.len as usize } else { 0 }
    }

    /// Its data is here: the first step.
    #[inline]
    pub(crate) fn begin(&mut self, data: SgList) -> Step {
        match &mut self.kind {
            Kind::Read { flush: false } => self.io(Op::Read, None),
            Kind::Read { flush: true } => self.io(Op::Flush, None),
            Kind::Write { fua } => {
                let fua = *fua;
                self.io(Op::Write { fua }, Some(data))
            }
            Kind::Plain(op) => {
                let op = *op;
                self.io(op, None)
            }
            Kind::FlushAll(_) => self.flush_next(),
            Kind::Compare(expected) => {
                *expected = data;
                self.io(Op::Read, None)
            }
            Kind::Verify => self.io(Op::Read, None),
            Kind::Deallocate(ranges) => match ranges.read(&data) {
                Ok(()) => self.deallocate_next(),
                Err(status) => Step::Done(Outcome::failure(status)),
            },
            Kind::Copy(copying) => match copying.read(&data) {
                Ok(()) => self.copy_next(),
                Err(status) => Step::Done(Outcome::failure(status)),
            },
        }
    }

    /// Its I/O is over: the next step.
    #[inline]
    pub(crate) fn on_io(&mut self, result: Result<Output, IoError>) -> Step {
        let output = match result {
            Ok(output) => output,
            // What cannot be deallocated stays: it is a hint.
            Err(IoError::Unsupported) if matches!(self.kind, Kind::Deallocate(_)) => Output::Nothing,
            Err(error) => return Step::Done(of_io_error(error, self.now)),
        };
        match &mut self.kind {
            Kind::Read { .. } if self.now == Op::Flush => self.io(Op::Read, None),
            Kind::Read { .. } => self.read_is_here(output.into_data()),
            Kind::Write { .. } | Kind::Plain(_) | Kind::Verify => Step::Done(Outcome::success(0)),
            Kind::FlushAll(_) => self.flush_next(),
            Kind::Compare(expected) => Step::Done(compare(&output.into_data(), expected)),
            Kind::Deallocate(_) => self.deallocate_next(),
            Kind::Copy(copying) if self.now == Op::Read => {
                let fua = copying.fua;
                let data = output.into_data();
                self.len = data.len() as u64;
                self.io(Op::Write { fua }, Some(data))
            }
            Kind::Copy(_) => {
                self.offset = self.offset.saturating_add(self.len);
                self.copy_next()
            }
        }
    }

    #[inline]
    fn read_is_here(&self, data: SgList) -> Step {
        if data.len() as u64 != self.len {
            // A volume that answers with another length must not put the host out of step.
            return Step::Done(Outcome::failure(Status::INTERNAL_ERROR));
        }
        Step::Done(Outcome::data(data, 0))
    }

    #[inline]
    fn io(&mut self, op: Op, data: Option<SgList>) -> Step {
        self.now = op;
        let (offset, len) = if op == Op::Flush { (0, 0) } else { (self.offset, self.len) };
        Step::Io(Wanted { volume: self.volume, op, offset, len, data })
    }

    fn flush_next(&mut self) -> Step {
        let Kind::FlushAll(volumes) = &mut self.kind else { return Step::Done(Outcome::success(0)) };
        match volumes.pop() {
            Some(volume) => {
                self.volume = volume;
                self.io(Op::Flush, None)
            }
            None => Step::Done(Outcome::success(0)),
        }
    }

    fn deallocate_next(&mut self) -> Step {
        let Kind::Deallocate(ranges) = &mut self.kind else { return Step::Done(Outcome::success(0)) };
        match (ranges.left.pop_front(), ranges.op) {
            (None, _) | (_, Op::Prefetch) => Step::Done(Outcome::success(0)),
            (Some((offset, len)), op) => {
                (self.offset, self.len) = (offset, len);
                self.io(op, None)
            }
        }
    }

    fn copy_next(&mut self) -> Step {
        let Kind::Copy(copying) = &mut self.kind else { return Step::Done(Outcome::success(0)) };
        let Some((offset, len)) = copying.left.pop_front() else { return Step::Done(Outcome::success(0)) };
        self.now = Op::Read;
        Step::Io(Wanted { volume: self.volume, op: Op::Read, offset, len, data: None })
    }
}

impl Ranges {
    fn read(&mut self, data: &SgList) -> Result<(), Status> {
        for index in 0..self.count.min(DSM_MAX_RANGES) {
            let range: DsmRange = element(data, index)?;
            let (offset, len) = bytes(range.slba.get(), range.nlb.get().into(), self.shift)?;
            if len > 0 {
                self.left.push_back((offset, len));
            }
        }
        Ok(())
    }
}

impl Copying {
    fn read(&mut self, data: &SgList) -> Result<(), Status> {
        for index in 0..self.count {
            let source: CopySource = element(data, index)?;
            let blocks = u64::from(source.nlb.get()).saturating_add(1);
            let range = bytes(source.slba.get(), blocks, self.shift)?;
            if range.1 > MAX_DATA as u64 {
                return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED);
            }
            self.left.push_back(range);
        }
        Ok(())
    }
}

/// The structure at that place of a list in the host's data.
fn element<T: FromBytes + IntoBytes>(data: &SgList, index: usize) -> Result<T, Status> {
    let (len, mut element) = (size_of::<T>(), T::new_zeroed());
    let at = index.saturating_mul(len);
    if at.saturating_add(len) > data.len() {
        return Err(Status::DATA_SGL_LENGTH_INVALID);
    }
    data.slice(at, len).copy_to(element.as_mut_bytes());
    Ok(element)
}

/// Blocks as offset and length in bytes.
#[inline]
fn bytes(slba: u64, blocks: u64, shift: u32) -> Result<(u64, u64), Status> {
    let end = slba.checked_add(blocks).filter(|&end| end <= u64::MAX.wrapping_shr(shift));
    end.ok_or(Status::LBA_OUT_OF_RANGE)?;
    Ok((slba.wrapping_shl(shift), blocks.wrapping_shl(shift)))
}

fn compare(read: &SgList, expected: &SgList) -> Outcome {
    if read.len() != expected.len() {
        return Outcome::failure(Status::INTERNAL_ERROR);
    }
    match first_difference(read, expected) {
        Some(_) => Outcome::failure(Status::COMPARE_FAILURE),
        None => Outcome::success(0),
    }
}

/// Of a buffer with a list of ranges, in bytes.
const LONGEST_LIST: usize = 4096;
/// Source ranges of one Copy: a page of them.
pub(super) const COPY_MAX_RANGES: usize = 128;
