//! An initiator's I/O where it becomes commands: cut into pieces of what one command covers, some
//! of them under way at a time, and a flush behind them if they are to be stable and the commands
//! do not say so.

use crate::slots::SlotKey;
use blockmux_volume::{Extent, Io, IoError, Memory, Pool, SgList};

/// What a command does, in a protocol's own words.
pub(crate) trait CommandKind: Copy + PartialEq {
    /// Has what was written before made stable; it has no range.
    const FLUSH: Self;
    const READ: Self;

    /// Whether a command may take its time: it moves no data.
    fn is_long(self) -> bool;
}

/// How an I/O's range is cut into commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommandPieces<K> {
    pub(crate) kind: K,
    /// The most one command covers, in bytes.
    pub(crate) max: u64,
    /// A flush has to follow before the I/O is complete.
    pub(crate) then_flush: bool,
}

/// One I/O from submission to completion.
pub(crate) struct IoJob<K> {
    pub(crate) io: Io,
    /// Smaller is older.
    pub(crate) age: u64,
    pub(crate) pieces: CommandPieces<K>,
    /// Bytes of the range that commands were made for.
    pub(crate) issued: u64,
    /// Commands under way, or to be sent again.
    pub(crate) in_flight: u32,
    pub(crate) is_ready: bool,
    /// Another path may be able to do it, or the target was made to give up a command of it: if
    /// that is why it has failed, it is to be done again.
    pub(crate) is_returned: bool,
    /// The first error of any of its commands.
    pub(crate) error: Option<IoError>,
    /// Where read data is, when the I/O brought no memory.
    pub(crate) buffer: Option<SgList>,
    /// What is known so far, where that was asked for.
    pub(crate) extents: Vec<Extent>,
}

/// A part of an I/O as a command.
#[derive(Clone, Copy)]
pub(crate) struct CommandPiece<K> {
    /// `None`: of the queue itself.
    pub(crate) job: Option<SlotKey>,
    pub(crate) kind: K,
    /// In bytes.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// How often it was sent again.
    pub(crate) tries: u32,
}

/// What a queue does with a job of which a command is over.
pub(crate) enum JobNext {
    /// Sends more of it: the job has just become ready.
    Send,
    Complete,
    /// Nothing, until another command of it is over.
    Wait,
}

impl<K: CommandKind> CommandPieces<K> {
    /// A flush alone.
    pub(crate) const FLUSH: CommandPieces<K> = CommandPieces { kind: K::FLUSH, max: 0, then_flush: true };
}

impl<K: CommandKind> CommandPiece<K> {
    /// A command of the queue itself, without a range.
    pub(crate) fn of_the_queue(kind: K) -> CommandPiece<K> {
        CommandPiece { job: None, kind, offset: 0, len: 0, tries: 0 }
    }

    /// The piece for another try: with one more in `tries`.
    pub(crate) fn again(self) -> CommandPiece<K> {
        CommandPiece { tries: self.tries.saturating_add(1), ..self }
    }
}

impl<K: CommandKind> IoJob<K> {
    /// Nothing of it is sent yet; `is_ready` if it has all the memory that it needs.
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

    /// The next piece of this job, if one may be sent now. It stays ready if another one may be,
    /// too.
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
        Some(CommandPiece { job, kind: self.pieces.kind, offset, len, tries: 0 })
    }

    /// Whether there is a piece to send, as soon as others have ended.
    #[inline]
    pub(crate) fn has_more(&self) -> bool {
        self.issued < self.io.len || (self.in_flight == 0 && self.pieces.then_flush)
    }

    /// One of its commands is over: what its queue is to do with it now.
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

    /// Gives a read the memory that it waits for; whether there was some. Where its queue has
    /// nothing else `is_alone`, and waiting for the pool might be for ever.
    #[inline]
    pub(crate) fn give_memory(&mut self, pool: &Pool, is_alone: bool) -> bool {
        let len = self.io.len as usize; // checked: at most MAX_TRANSFER
        let memory = pool.take_payload(len).or_else(|| is_alone.then(|| Memory::from_heap(len)));
        let Some(memory) = memory else { return false };
        self.buffer = Some(SgList::one(memory.seg(0, len)));
        self.is_ready = true;
        true
    }

    /// Forgets memory that was lent, which nothing is written to when a piece is sent again.
    pub(crate) fn forget_borrowed(&mut self) {
        let is_lent = |list: &mut SgList| list.segs().iter().any(|seg| !seg.is_writable());
        self.buffer.take_if(is_lent);
    }

    pub(crate) fn fail(&mut self, error: IoError) {
        self.error.get_or_insert(error);
    }

    /// Does again, in another way, what lies from `offset` on. What was done already is done twice
    /// then, which changes nothing.
    pub(crate) fn go_back(&mut self, offset: u64, pieces: CommandPieces<K>) {
        self.pieces = pieces;
        self.issued = self.issued.min(offset.saturating_sub(self.io.offset));
    }
}

/// The most commands that one I/O has under way.
const WINDOW: u32 = 4;
