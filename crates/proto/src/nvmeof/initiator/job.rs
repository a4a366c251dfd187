//! The parts of a queue: an I/O, a piece of it, and the command that does that.

use super::command::{Progress, Transfer};
use super::plan::{Kind, Pieces};
use crate::slots::Key;
use blockmux_volume::{Io, IoError, SgList};

/// One I/O from submission to completion.
pub(super) struct Job {
    pub(super) io: Io,
    /// Smaller is older.
    pub(super) age: u64,
    pub(super) pieces: Pieces,
    /// Bytes of the range that commands were made for.
    pub(super) issued: u64,
    /// Commands under way, or to be sent again.
    pub(super) in_flight: u32,
    pub(super) is_ready: bool,
    /// Another path may be able to do it.
    pub(super) is_misplaced: bool,
    /// The first error of any of its commands.
    pub(super) error: Option<IoError>,
    /// Where read data is, when the I/O brought no memory.
    pub(super) buffer: Option<SgList>,
}

/// A part of an I/O as a command.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    /// `None`: Connect.
    pub(super) job: Option<Key>,
    pub(super) kind: Kind,
    /// In bytes.
    pub(super) offset: u64,
    pub(super) len: u64,
    /// How often it was sent again.
    pub(super) tries: u32,
}

/// A command under way.
pub(super) struct Command {
    pub(super) piece: Piece,
    pub(super) transfer: Transfer,
    /// Data that is not the I/O's own.
    pub(super) payload: Option<SgList>,
    pub(super) progress: Progress,
}

impl Job {
    /// The next piece of this job, if one may be sent now.
    #[inline]
    pub(super) fn carve(&mut self, key: Key) -> Option<Piece> {
        if self.in_flight >= WINDOW || self.error.is_some() {
            return None;
        }
        let job = Some(key);
        if self.pieces.kind == Kind::Flush || self.issued >= self.io.len {
            if self.in_flight > 0 || !std::mem::take(&mut self.pieces.then_flush) {
                return None;
            }
            self.in_flight = 1;
            return Some(Piece { job, kind: Kind::Flush, offset: 0, len: 0, tries: 0 });
        }
        let len = self.io.len.saturating_sub(self.issued).min(self.pieces.max);
        let offset = self.io.offset.saturating_add(self.issued);
        self.issued = self.issued.saturating_add(len);
        self.in_flight = self.in_flight.saturating_add(1);
        Some(Piece { job, kind: self.pieces.kind, offset, len, tries: 0 })
    }

    /// Whether there is a piece to send, as soon as others have ended.
    #[inline]
    pub(super) fn has_more(&self) -> bool {
        self.issued < self.io.len || (self.in_flight == 0 && self.pieces.then_flush)
    }

    pub(super) fn fail(&mut self, error: IoError) {
        self.error.get_or_insert(error);
    }

    /// Does again, in another way, what lies from `offset` on. What was done already is done twice then, which changes
    /// nothing.
    pub(super) fn go_back(&mut self, offset: u64, pieces: Pieces) {
        self.pieces = pieces;
        self.issued = self.issued.min(offset.saturating_sub(self.io.offset));
    }
}

/// The most commands that one I/O has under way.
const WINDOW: u32 = 4;
