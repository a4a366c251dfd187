//! What a host's queue and the transport that carries it ask of each other.

use crate::coverage::Coverage;
use crate::io_queue::{self, DataTransfer};
use crate::slots::SlotKey;
use blockmux_volume::{Pool, Seg, SgList};
use blockmux_wire::nvme::{Cqe, Sqe};

/// A transport, as a queue of a host drives it. What comes from the controller it hands to the
/// queue's [`Commands`].
pub trait HostTransport {
    /// What to agree on for each connection.
    type Options: Copy;

    /// A queue that has no connection yet. `in_capsule` is how much data the controller takes along
    /// with a command of an I/O queue, in bytes; `None`: it is an admin queue.
    fn new(options: Self::Options, in_capsule: Option<u32>, pool: Pool) -> Self;

    /// There is a connection: begins it.
    fn begin(&mut self);

    /// Whether commands may be sent.
    fn is_open(&self) -> bool;

    /// Sends a command, with its data if that goes along with it.
    fn send(&mut self, request: &NvmeRequest, commands: &mut impl Commands);

    /// Whether the controller may end the connection here, as far as its messages are concerned.
    fn may_end(&self) -> bool;

    /// Forgets what was not sent yet.
    fn discard(&mut self);
}

/// One command for a transport to carry, which fills in CID and DPTR.
pub(crate) type NvmeRequest = io_queue::CommandRequest<Sqe>;

/// How far a command's data has moved.
#[derive(Default)]
pub struct TransferProgress {
    /// What has come to the host, or was asked for by the controller.
    pub(crate) moved: Coverage,
    /// Some of what came had a wrong digest.
    pub(crate) is_corrupt: bool,
}

impl TransferProgress {
    /// Whether all data moved that a successful command moves.
    #[inline]
    pub(super) fn is_whole(&self, transfer: DataTransfer) -> bool {
        match transfer {
            DataTransfer::Nothing | DataTransfer::In(0) | DataTransfer::Out(0) => true,
            DataTransfer::In(len) | DataTransfer::Out(len) => self.moved.is_whole(len.into()),
        }
    }
}

/// Commands under way, as a transport sees them.
pub trait Commands {
    /// The command with that CID.
    fn find(&self, cid: u16) -> Option<SlotKey>;

    /// How far a command's data has moved, and what is to move.
    fn transport(&mut self, key: SlotKey) -> Option<(&mut TransferProgress, DataTransfer)>;

    /// The data of a command that has some to send: a list, and where in it the command's data
    /// begins.
    fn data_out(&mut self, key: SlotKey) -> Option<(&SgList, usize)>;

    /// Where the data of a command goes that gets some: a list, and where in it the command's data
    /// begins.
    fn data_in(&mut self, key: SlotKey) -> Option<(&SgList, usize)>;

    /// Whether `len` bytes are all that was asked for and no memory was brought: then they may be
    /// lent.
    fn is_lendable(&mut self, key: SlotKey, len: usize) -> bool;

    /// The data of a read, where [`Commands::is_lendable`] says so.
    fn lend(&mut self, key: SlotKey, data: Seg);

    /// A command has ended.
    fn finish(&mut self, key: SlotKey, cqe: &Cqe);
}
