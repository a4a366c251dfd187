//! An initiator's I/O as a job: split into pieces of at most one command each, some of them in
//! flight at a time, with a flush after them if the commands have no FUA.

use crate::slots::SlotKey;
use blockmux_volume::{Extent, Io, IoError, Memory, Pool, SgList};
use std::time::Duration;

/// Kind of a command, defined by each protocol.
pub(crate) trait CommandKind: Copy + PartialEq {
    /// Flush, which has no range.
    const FLUSH: Self;
    const READ: Self;

    /// Whether the command transfers no data, so that it may take longer.
    fn is_long(self) -> bool;
}

/// How the range of an I/O is split into commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommandPieces<K> {
    pub(crate) kind: K,
    /// The maximum length of one command, in bytes.
    pub(crate) max: u64,
    /// Whether a flush must follow before the I/O is complete.
    pub(crate) then_flush: bool,
}

/// One I/O from submission to completion.
pub(crate) struct IoJob<K> {
    pub(crate) io: Io,
    /// Sequence number; a smaller one is older.
    pub(crate) age: u64,
    pub(crate) pieces: CommandPieces<K>,
    /// Number of bytes of the range for which commands were created.
    pub(crate) issued: u64,
    /// Number of commands in flight or to retry.
    pub(crate) in_flight: u32,
    pub(crate) is_ready: bool,
    /// Whether to repeat the I/O instead of failing it: another path may succeed, or the target has
    /// aborted a command on request.
    pub(crate) is_returned: bool,
    /// The first error of any of its commands.
    pub(crate) error: Option<IoError>,
    /// The read data of an I/O that brought no memory.
    pub(crate) buffer: Option<SgList>,
    /// The result of a block status so far.
    pub(crate) extents: Vec<Extent>,
}

/// A piece of an I/O, carried out by one command.
#[derive(Clone, Copy)]
pub(crate) struct CommandPiece<K> {
    /// The job; `None` for a command of the queue itself.
    pub(crate) job: Option<SlotKey>,
    pub(crate) kind: K,
    /// Offset in the volume, in bytes.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Number of retries.
    pub(crate) tries: u32,
    /// Time that it has waited between retries.
    pub(crate) waited: Duration,
}

/// What to do with a job after the end of one of its commands.
pub(crate) enum JobNext {
    /// Send more commands: the job has become ready.
    Send,
    Complete,
    /// Wait for the end of another command.
    Wait,
}

impl<K: CommandKind> CommandPieces<K> {
    /// A single flush.
    pub(crate) const FLUSH: CommandPieces<K> = CommandPieces { kind: K::FLUSH, max: 0, then_flush: true };
}

impl<K: CommandKind> CommandPiece<K> {
    /// A command of the queue itself, which has no range.
    pub(crate) fn of_the_queue(kind: K) -> CommandPiece<K> {
        CommandPiece { job: None, kind, offset: 0, len: 0, tries: 0, waited: Duration::ZERO }
    }

    /// The piece for a retry, with `tries` incremented.
    pub(crate) fn again(self) -> CommandPiece<K> {
        CommandPiece { tries: self.tries.saturating_add(1), ..self }
    }

    /// The piece after it has waited once more for a retry.
    pub(crate) fn after(self, delay: Duration) -> CommandPiece<K> {
        CommandPiece { waited: self.waited.saturating_add(delay), ..self }
    }
}

impl<K: CommandKind> IoJob<K> {
    /// A new job; `is_ready` if it has all the memory that it needs.
    #[inline]
    pub(crate) fn new(io: Io, age: u64, pieces: CommandPieces<K>, is_ready: bool) -> IoJob<K> {
        IoJob {
            io,
            age,
            pieces,
            issued: 0,
            in_flight: 0,
            is_ready,
            is_returned: false,
            error: None,
            buffer: None,
            extents: Vec::new(),
        }
    }

    /// The next piece of the job, if one may be sent now. The job stays ready if another one may be
    /// sent as well.
    #[inline]
    pub(crate) fn carve(&mut self, key: SlotKey) -> Option<CommandPiece<K>> {
        self.is_ready = false;
        if self.in_flight >= WINDOW || self.error.is_some() {
            return None;
        }
        let job = Some(key);
        if self.pieces.kind == K::FLUSH || self.issued >= self.io.len {
            if self.in_flight > 0 || !std::mem::take(&mut self.pieces.then_flush) {
                return None;
            }
            self.in_flight = 1;
            return Some(CommandPiece { job, ..CommandPiece::of_the_queue(K::FLUSH) });
        }
        let len = self.io.len.saturating_sub(self.issued).min(self.pieces.max);
        let offset = self.io.offset.saturating_add(self.issued);
        self.issued = self.issued.saturating_add(len);
        self.in_flight = self.in_flight.saturating_add(1);
        self.is_ready = self.in_flight < WINDOW && self.issued < self.io.len;
        Some(CommandPiece { job, kind: self.pieces.kind, offset, len, tries: 0, waited: Duration::ZERO })
    }

    /// Whether further pieces remain after those in flight.
    #[inline]
    pub(crate) fn has_more(&self) -> bool {
        self.issued < self.io.len || (self.in_flight == 0 && self.pieces.then_flush)
    }

    /// Records the end of a command; returns what to do next.
    #[inline]
    pub(crate) fn end_piece(&mut self) -> JobNext {
        self.in_flight = self.in_flight.saturating_sub(1);
        if self.error.is_none() && self.has_more() {
            if std::mem::replace(&mut self.is_ready, true) { JobNext::Wait } else { JobNext::Send }
        } else if self.in_flight == 0 {
            JobNext::Complete
        } else {
            JobNext::Wait
        }
    }

    /// Takes memory for a read that waits for it; returns whether there was any. With `is_alone`,
    /// no other command is in flight, and memory comes from the heap if the pool is empty.
    #[inline]
    pub(crate) fn give_memory(&mut self, pool: &Pool, is_alone: bool) -> bool {
        let len = self.io.len as usize; // checked: at most MAX_TRANSFER
        let memory = pool.take_payload(len).or_else(|| is_alone.then(|| Memory::from_heap(len)));
        let Some(memory) = memory else { return false };
        self.buffer = Some(SgList::one(memory.seg(0, len)));
        self.is_ready = true;
        true
    }

    /// Drops borrowed memory before a retry, because received data cannot be written to it.
    pub(crate) fn forget_borrowed(&mut self) {
        let is_lent = |list: &mut SgList| !list.is_writable();
        self.buffer.take_if(is_lent);
    }

    pub(crate) fn fail(&mut self, error: IoError) {
        self.error.get_or_insert(error);
    }

    /// Repeats the range from `offset` on with other commands. Pieces that have already succeeded
    /// are carried out twice, which is harmless: they are idempotent.
    pub(crate) fn go_back(&mut self, offset: u64, pieces: CommandPieces<K>) {
        self.pieces = pieces;
        self.issued = self.issued.min(offset.saturating_sub(self.io.offset));
    }
}

/// The maximum number of commands in flight for one I/O.
const WINDOW: u32 = 4;
