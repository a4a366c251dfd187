//! One core's queue to a file. Each request occupies a slot and goes through one or more entries of
//! the ring.
//!
//! ```text
//!   read, write    Move, repeated after a short transfer; or Bounce, piece by piece,
//!                  if direct I/O cannot use the memory
//!   write zeroes   Punch, else ZeroRange, else WriteZeroes, piece by piece; with FUA then Sync
//!   discard        Punch; with FUA then Sync
//!   flush          Sync
//!   prefetch       WillNeed
//! ```
//! The ring owns a request's memory while it has an entry in flight (see [`super::kernel`]);
//! otherwise the slot owns it. A request for which the pool has no memory waits in its slot, so the
//! channel's depth also limits the waiting requests. It is retried at each poll of the channel and
//! by a timer.

use super::bounce::{MAX_BOUNCE, for_each_piece};
use super::disk::Disk;
use super::errno::io_error;
use super::extents::extents;
use super::kernel::{EntryOptions, EntryOwner, FileRing, TransferDirection};
use crate::core::reactor::EngineCore;
use crate::core::ring::Registration;
use crate::volume::memory_retry::MemoryRetry;
use blockmux_volume::{
    Channel, Completion, Core, Extent, Io, IoError, Memory, Op, Output, PeerAccount, Pool, Seg, SgList, Slab,
    Tag, Waker,
};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;

pub(super) struct FileChannel {
    ring: Rc<FileRing<RequestTable>>,
    /// Dropping it abandons what is in flight.
    _registration: Rc<Registration>,
    core: Rc<dyn Core>,
    retry: MemoryRetry,
}

impl FileChannel {
    pub(super) fn new(
        disk: &Arc<Disk>,
        own_file: Arc<File>,
        engine: &EngineCore,
        core: &Rc<dyn Core>,
        depth: u32,
        waker: Waker,
    ) -> FileChannel {
        let table = RequestTable {
            disk: disk.clone(),
            zeroes: Memory::from_pages(&disk.zeroes),
            depth,
            slots: RefCell::new(Slab::with_capacity(depth)),
            waiting: RefCell::new(VecDeque::with_capacity(depth as usize)),
            done: RefCell::new(Vec::with_capacity(depth as usize)),
            waker,
            has_checked_size: Cell::new(false),
        };
        let (ring, registration) = FileRing::launch(engine, own_file, disk.file.clone(), depth, table);
        FileChannel { ring, _registration: registration, core: core.clone(), retry: MemoryRetry::new(core) }
    }
}

impl Channel for FileChannel {
    fn submit(&mut self, io: Io) {
        let table = &self.ring.owner;
        match table.at_once(&self.ring.file, &io) {
            Some(result) => table.done.borrow_mut().push(Completion { tag: io.tag, result }),
            None => table.submit(&self.ring, self.core.pool(), io),
        }
        self.arm_retry();
    }

    fn kick(&mut self) {
        self.ring.owner.has_checked_size.set(false);
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        let table = &self.ring.owner;
        table.has_checked_size.set(false);
        table.retry_waiting(&self.ring, self.core.pool());
        self.arm_retry();
        done.append(&mut table.done.borrow_mut());
    }

    fn cancel(&mut self, tag: Tag) {
        self.ring.owner.cancel(&self.ring, tag);
    }
}

impl FileChannel {
    fn arm_retry(&self) {
        let table = &self.ring.owner;
        self.retry.arm(!table.waiting.borrow().is_empty(), &table.waker);
    }
}

/// The channel's requests.
struct RequestTable {
    disk: Arc<Disk>,
    /// This core's handle of a buffer of zeroes.
    zeroes: Memory,
    depth: u32,
    slots: RefCell<Slab<PendingRequest>>,
    /// Slots that wait for memory of the pool, first in, first out.
    waiting: RefCell<VecDeque<u32>>,
    done: RefCell<Vec<Completion>>,
    waker: Waker,
    /// The file's size was checked for a write of this batch.
    has_checked_size: Cell<bool>,
}

/// A request in flight.
struct PendingRequest {
    tag: Tag,
    op: Op,
    offset: u64,
    len: u64,
    /// The data while no ring entry owns it; empty for a read that takes memory from the pool.
    data: SgList,
    /// Aligned memory for direct I/O, copied to or from `data`.
    bounce: Option<Seg>,
    step: RequestStep,
    /// Bytes that the current step has transferred.
    moved: u64,
    retries: u32,
    is_cancelled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestStep {
    Move,
    Bounce,
    Punch,
    ZeroRange,
    WriteZeroes,
    Sync,
    WillNeed,
}

/// Result of an attempt to start a request.
enum StartOutcome {
    Started,
    /// The pool is out of memory.
    Waits,
}

/// What to do after a ring entry has completed.
enum AfterEntry {
    Again,
    Done(Result<Output, IoError>),
}

impl RequestTable {
    /// The result of a request that needs no ring entry.
    fn at_once(&self, file: &File, io: &Io) -> Option<Result<Output, IoError>> {
        let disk = &self.disk;
        if let Err(error) = disk.info.check_within(io, disk.extent.size()) {
            return Some(Err(error));
        }
        if io.op.is_write() && !self.has_checked_size.replace(true) {
            disk.check_for_truncation(file);
        }
        if io.op != Op::Flush && disk.extent.is_truncated_before(io.offset + io.len) {
            disk.note_failure(io.op, io.offset, io.len, &"another program has truncated the file");
            return Some(Err(IoError::Medium));
        }
        if needs_sync(io.op) && disk.has_lost_writes() {
            return Some(Err(IoError::Medium));
        }
        if io.is_in_registered_buffer() && !disk.can_use_registered(io) {
            return Some(Err(IoError::Unsupported));
        }
        match io.op {
            Op::Flush if disk.info.read_only => Some(Ok(Output::Nothing)),
            Op::Flush => None,
            Op::BlockStatus if io.len == 0 => Some(Ok(Output::Extents(Vec::new()))),
            Op::BlockStatus if disk.is_device => Some(Ok(Output::Extents(vec![Extent::data(io.len)]))),
            Op::BlockStatus => {
                // A file system without `SEEK_HOLE` reports everything as data.
                let found = extents(file, io.offset, io.len, disk.info.logical_block.into());
                Some(Ok(Output::Extents(found.unwrap_or_else(|_| vec![Extent::data(io.len)]))))
            }
            Op::Read if io.len == 0 => Some(Ok(Output::Data(io.data.clone().unwrap_or_default()))),
            _ if io.len == 0 => Some(Ok(Output::Nothing)),
            Op::Prefetch if disk.direct.is_some() => Some(Ok(Output::Nothing)),
            Op::Discard { .. } if !disk.zeroing.punch => Some(Ok(Output::Nothing)),
            Op::WriteZeroes { may_unmap, only_fast: true, .. } if !disk.zeroing.is_fast(may_unmap) => {
                Some(Err(IoError::Unsupported))
            }
            _ => None,
        }
    }

    /// Takes a request that needs the ring.
    fn submit(&self, ring: &FileRing<RequestTable>, pool: &Pool, io: Io) {
        if self.slots.borrow().len() >= self.depth as usize {
            // The caller exceeded the queue depth that it asked for.
            let result = Err(IoError::NoMemory);
            return self.done.borrow_mut().push(Completion { tag: io.tag, result });
        }
        let (tag, op) = (io.tag, io.op);
        let step = self.first_step(&io);
        let (offset, len) = (io.offset, self.disk.len_to_write(&io));
        let mut data = io.data.unwrap_or_default();
        if len < io.len && !data.segs().is_empty() {
            data = data.slice(0, len as usize);
        }
        let pending = PendingRequest {
            tag,
            op,
            offset,
            len,
            data,
            bounce: None,
            step,
            moved: 0,
            retries: 0,
            is_cancelled: false,
        };
        let may_start = self.waiting.borrow().is_empty() || pending.needed_memory().is_none();
        let token = self.slots.borrow_mut().insert(pending) as u32;
        if may_start && matches!(self.start(ring, pool, token), StartOutcome::Started) {
            return;
        }
        self.waiting.borrow_mut().push_back(token);
    }

    fn first_step(&self, io: &Io) -> RequestStep {
        match io.op {
            Op::Read | Op::Write { .. } => match (&self.disk.direct, &io.data) {
                (Some(direct), Some(data)) if !direct.can_use(data) => RequestStep::Bounce,
                _ => RequestStep::Move,
            },
            Op::WriteZeroes { may_unmap: true, .. } if self.disk.zeroing.punch => RequestStep::Punch,
            Op::WriteZeroes { .. } => RequestStep::ZeroRange,
            Op::Discard { .. } => RequestStep::Punch,
            // The check refuses to compare.
            Op::Flush | Op::BlockStatus | Op::CompareAndWrite { .. } => RequestStep::Sync,
            Op::Prefetch => RequestStep::WillNeed,
        }
    }

    /// Allocates the memory that the request needs and pushes its first entry.
    fn start(&self, ring: &FileRing<RequestTable>, pool: &Pool, token: u32) -> StartOutcome {
        let mut slots = self.slots.borrow_mut();
        let Some(pending) = slots.get_mut(token as usize) else { return StartOutcome::Started };
        if let Some(wanted) = pending.needed_memory() {
            let Some(memory) = pool.take_payload_or_wait(wanted) else {
                let is_closed = pool.account().is_some_and(PeerAccount::is_closed);
                if pool.could_hold(wanted) && !is_closed {
                    return StartOutcome::Waits;
                }
                drop(slots);
                self.finish(token, Err(if is_closed { IoError::Aborted } else { IoError::NoMemory }));
                return StartOutcome::Started;
            };
            let seg = memory.seg(0, wanted);
            match pending.step {
                RequestStep::Bounce => pending.bounce = Some(seg),
                _ => pending.data = SgList::one(seg),
            }
        }
        self.push(ring, token, pending);
        StartOutcome::Started
    }

    fn retry_waiting(&self, ring: &FileRing<RequestTable>, pool: &Pool) {
        loop {
            let Some(token) = self.waiting.borrow().front().copied() else { return };
            if matches!(self.start(ring, pool, token), StartOutcome::Waits) {
                return;
            }
            self.waiting.borrow_mut().pop_front();
        }
    }

    /// Pushes the ring entry of the request's current step.
    fn push(&self, ring: &FileRing<RequestTable>, token: u32, pending: &mut PendingRequest) {
        let (at, left) = (pending.offset + pending.moved, pending.len - pending.moved);
        let durable = matches!(pending.op, Op::Write { fua: true });
        let is_long_copy = pending.op == Op::Read && pending.len > LONG_COPY && self.disk.direct.is_none();
        let options = EntryOptions {
            durable,
            // A durable write through the page cache waits for the device, which must not block
            // this thread.
            in_background: pending.retries > 0 || durable && self.disk.direct.is_none(),
            // The kernel copies from the page cache on this thread; shorter pieces let other tasks
            // run in between.
            max_bytes: if is_long_copy { LONG_COPY_PIECE } else { 0 },
        };
        let direction =
            if pending.op == Op::Read { TransferDirection::Read } else { TransferDirection::Write };
        match pending.step {
            RequestStep::Move => {
                let data = std::mem::take(&mut pending.data);
                ring.transfer(token, direction, data, pending.moved as usize, at, options);
            }
            RequestStep::Bounce => {
                let Some(bounce) = &pending.bounce else { return };
                let piece = bounce.slice(0, bounce.len().min(left as usize));
                if direction == TransferDirection::Write {
                    for_each_piece(&pending.data, pending.moved as usize, &piece, |data, bounce| {
                        data.copy_to_seg(bounce);
                    });
                }
                ring.transfer(token, direction, SgList::one(piece), 0, at, options);
            }
            RequestStep::WriteZeroes => {
                let piece = self.zeroes.seg(0, left.min(self.zeroes.len() as u64) as usize);
                ring.transfer(token, TransferDirection::Write, SgList::one(piece), 0, at, options);
            }
            RequestStep::Punch => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                ring.fallocate(token, mode, pending.offset, pending.len);
            }
            RequestStep::ZeroRange => {
                let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                ring.fallocate(token, mode, pending.offset, pending.len);
            }
            RequestStep::Sync => ring.sync(token),
            RequestStep::WillNeed => {
                let len = pending.len.min(MAX_PREFETCH) as u32;
                ring.will_need(token, pending.offset, len);
            }
        }
    }

    /// What to do after an entry succeeded.
    fn after_success(&self, pending: &mut PendingRequest, memory: SgList, result: u64) -> AfterEntry {
        let is_transfer =
            matches!(pending.step, RequestStep::Move | RequestStep::Bounce | RequestStep::WriteZeroes);
        if is_transfer {
            let step = pending.step;
            // Direct I/O can only continue at a block boundary.
            let block = if self.disk.direct.is_some() { u64::from(self.disk.info.logical_block) } else { 1 };
            let moved = match pending.op {
                Op::Read
                    if pending.offset + pending.moved + result == self.disk.extent.end()
                        && !memory.segs().iter().any(Seg::is_registered) =>
                {
                    let start = if step == RequestStep::Move { pending.moved } else { 0 };
                    self.fill_last_block(&memory, start + result);
                    result.next_multiple_of(self.disk.info.logical_block.into())
                }
                _ => result / block * block,
            };
            if let (RequestStep::Bounce, Op::Read, Some(piece)) = (step, pending.op, memory.segs().first()) {
                let piece = piece.slice(0, moved as usize);
                for_each_piece(&pending.data, pending.moved as usize, &piece, |data, bounce| {
                    bounce.copy_to_seg(data);
                });
            }
            if step == RequestStep::Move {
                pending.data = memory;
            }
            if moved == 0 {
                // End of file: the file was truncated while it was served. Returning zeroes would
                // hide the loss.
                self.disk.note_failure(
                    pending.op,
                    pending.offset,
                    pending.len,
                    &"another program has truncated the file",
                );
                self.disk.check_for_truncation(&self.disk.file);
                return AfterEntry::Done(Err(IoError::Medium));
            }
            pending.moved += moved;
            if pending.moved < pending.len {
                pending.retries = 0;
                return if pending.is_cancelled {
                    AfterEntry::Done(Err(IoError::Aborted))
                } else {
                    AfterEntry::Again
                };
            }
        }
        let syncs = matches!(pending.op, Op::WriteZeroes { fua: true, .. } | Op::Discard { fua: true });
        if syncs && pending.step != RequestStep::Sync {
            pending.step = RequestStep::Sync;
            return AfterEntry::Again;
        }
        AfterEntry::Done(Ok(match pending.op {
            Op::Read => Output::Data(std::mem::take(&mut pending.data)),
            _ => Output::Nothing,
        }))
    }

    /// Reads the missing part of the file's last block as zeroes; it begins in `memory` at byte
    /// `at`.
    fn fill_last_block(&self, memory: &SgList, at: u64) {
        let end = self.disk.extent.end();
        let missing = end.next_multiple_of(self.disk.info.logical_block.into()) - end;
        // The volume may be resized concurrently.
        if missing > 0 && at + missing <= memory.len() as u64 {
            memory.slice(at as usize, missing as usize).fill_zero();
        }
    }

    /// What to do after an entry failed.
    fn after_error(&self, pending: &mut PendingRequest, memory: SgList, errno: i32) -> AfterEntry {
        if pending.step == RequestStep::Move {
            pending.data = memory;
        }
        if matches!(errno, libc::EINTR | libc::EAGAIN)
            && !pending.is_cancelled
            && pending.retries < MAX_RETRIES
        {
            pending.retries += 1;
            return AfterEntry::Again;
        }
        let is_missing = matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS);
        match (pending.step, pending.op) {
            // Prefetch is a hint and never fails.
            (RequestStep::WillNeed, _) => return AfterEntry::Done(Ok(Output::Nothing)),
            (RequestStep::Punch, Op::Discard { .. }) if is_missing => {
                return AfterEntry::Done(Ok(Output::Nothing));
            }
            (RequestStep::Punch, Op::WriteZeroes { only_fast, .. })
                if is_missing && (!only_fast || self.disk.zeroing.zero_range_is_fast) =>
            {
                pending.step = RequestStep::ZeroRange;
                return AfterEntry::Again;
            }
            (RequestStep::ZeroRange, Op::WriteZeroes { only_fast: false, .. }) if is_missing => {
                pending.step = RequestStep::WriteZeroes;
                return AfterEntry::Again;
            }
            _ => {}
        }
        let error =
            if pending.is_cancelled && errno == libc::EINTR { IoError::Aborted } else { io_error(errno) };
        let lost = match pending.step {
            RequestStep::Sync => error != IoError::Aborted,
            _ => needs_sync(pending.op) && errno == libc::EIO,
        };
        if lost {
            self.disk.note_lost_writes(errno);
        }
        if !matches!(error, IoError::Aborted | IoError::Unsupported) {
            let error_text = std::io::Error::from_raw_os_error(errno);
            self.disk.note_failure(pending.op, pending.offset, pending.len, &error_text);
        }
        AfterEntry::Done(Err(error))
    }

    fn finish(&self, token: u32, result: Result<Output, IoError>) {
        if let Some(pending) = self.slots.borrow_mut().remove(token as usize) {
            self.done.borrow_mut().push(Completion { tag: pending.tag, result });
            self.waker.wake();
        }
    }

    fn cancel(&self, ring: &FileRing<RequestTable>, tag: Tag) {
        let found = {
            let mut slots = self.slots.borrow_mut();
            let token = slots.iter().find(|(_, pending)| pending.tag == tag).map(|(token, _)| token);
            if let Some(pending) = token.and_then(|token| slots.get_mut(token)) {
                pending.is_cancelled = true;
            }
            token.map(|token| token as u32)
        };
        let Some(token) = found else { return };
        let position = self.waiting.borrow().iter().position(|&waiting| waiting == token);
        match position {
            Some(position) => {
                self.waiting.borrow_mut().remove(position);
                self.finish(token, Err(IoError::Aborted));
            }
            None => ring.cancel(token),
        }
    }
}

impl EntryOwner for RequestTable {
    fn on_entry_done(&self, ring: &FileRing<RequestTable>, token: u32, memory: SgList, result: i32) {
        let result = {
            let mut slots = self.slots.borrow_mut();
            let Some(pending) = slots.get_mut(token as usize) else { return };
            let next = match u64::try_from(result) {
                Ok(result) => self.after_success(pending, memory, result),
                Err(_) => self.after_error(pending, memory, result.wrapping_neg()),
            };
            match next {
                AfterEntry::Again => return self.push(ring, token, pending),
                AfterEntry::Done(result) => result,
            }
        };
        self.finish(token, result);
    }
}

impl PendingRequest {
    /// Bytes that must be allocated from the pool before the request can start.
    fn needed_memory(&self) -> Option<usize> {
        match self.step {
            RequestStep::Move if self.data.segs().is_empty() => Some(self.len as usize),
            RequestStep::Bounce if self.bounce.is_none() => Some((self.len as usize).min(MAX_BOUNCE)),
            _ => None,
        }
    }
}

/// Whether the operation's success means that data is on stable storage, so that an earlier
/// write-back failure must fail it.
fn needs_sync(op: Op) -> bool {
    match op {
        Op::Flush => true,
        Op::Write { fua }
        | Op::WriteZeroes { fua, .. }
        | Op::Discard { fua }
        | Op::CompareAndWrite { fua } => fua,
        Op::Read | Op::Prefetch | Op::BlockStatus => false,
    }
}

/// Reads from the page cache that are longer than this, in bytes, are split into pieces.
const LONG_COPY: u64 = 1 << 20;
/// Length of such a piece, in bytes: the kernel copies it in about 0.1 ms.
const LONG_COPY_PIECE: usize = 256 << 10;
/// Longest read-ahead of one hint, in bytes.
const MAX_PREFETCH: u64 = 32 << 20;
/// Retries after EINTR or EAGAIN, which run on the kernel's worker threads.
const MAX_RETRIES: u32 = 100;
