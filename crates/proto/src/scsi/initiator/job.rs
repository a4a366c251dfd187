//! The parts of a queue: an I/O, a piece of it, and the command that does that piece.

use super::command::Transfer;
use super::plan::Kind;
use crate::job;
use blockmux_volume::SgList;

pub(super) type Job = job::Job<Kind>;
pub(super) type Piece = job::Piece<Kind>;

/// A command under way.
pub(super) struct Command<T> {
    pub(super) piece: Piece,
    /// As it was sent.
    pub(super) cdb: [u8; 16],
    pub(super) transfer: Transfer,
    /// Data that is not the I/O's own.
    pub(super) payload: Option<SgList>,
    pub(super) transport: T,
}

impl<T> Command<T> {
    /// Whether all the data moved that a successful command moves.
    #[inline]
    pub(super) fn is_whole(&self, moved: u32) -> bool {
        match self.transfer {
            Transfer::Nothing => true,
            Transfer::In(len) => moved == len || self.piece.kind == Kind::Status,
            Transfer::Out(len) => moved == len,
        }
    }

    /// The data-in that came, of a command with a payload of its own.
    pub(super) fn received(&self, moved: u32) -> Vec<u8> {
        let Some(payload) = &self.payload else { return Vec::new() };
        payload.slice(0, payload.len().min(moved as usize)).to_vec()
    }
}
