//! The parts of a queue: an I/O, a piece of it, and the command that does that piece.

use super::plan::Kind;
use super::transport::{DataTransfer, TransferProgress};
use crate::job;
use blockmux_volume::SgList;

pub(super) type Job = job::Job<Kind>;
pub(super) type Piece = job::Piece<Kind>;

/// A command under way.
pub(super) struct Command {
    pub(super) piece: Piece,
    pub(super) transfer: DataTransfer,
    /// Data that is not the I/O's own.
    pub(super) payload: Option<SgList>,
    pub(super) progress: TransferProgress,
}
