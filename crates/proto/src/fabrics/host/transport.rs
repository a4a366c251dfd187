//! The interface between a host's queue and its transport.

use crate::initiator::command_memory::CommandMemory;
use crate::initiator::command_queue::{self, DataTransfer};
use crate::initiator::coverage::Coverage;
use crate::slots::SlotKey;
use blockmux_volume::{Pool, SgList};
use blockmux_wire::nvme::{Cqe, Sqe};

/// The transport of a host's queue. It passes what it receives to the queue's [`Commands`].
pub trait HostTransport {
    /// Options to negotiate for each connection.
    type Options: Copy;

    /// Whether commands describe data in host memory by keyed SGLs and in-capsule data by an
    /// offset, which the controller has to support (SGLS).
    const USES_KEYED_SGLS: bool = false;

    /// The section of the standard that says when a connection may end.
    const ERROR_HANDLING: &'static str;

    /// Creates the transport of a queue without a connection. `in_capsule` is the longest
    /// in-capsule data on the controller's I/O queues, in bytes; `None` for an admin queue.
    fn new(options: Self::Options, in_capsule: Option<u32>, pool: Pool) -> Self;

    /// Begins the transport's set-up on a new connection.
    fn begin(&mut self);

    /// Whether commands may be sent.
    fn is_open(&self) -> bool;

    /// Sends a command, with its data if that goes into the capsule.
    fn send(&mut self, request: &NvmeRequest, commands: &mut impl Commands);

    /// Whether the controller may close the connection at this point of the transport's protocol.
    fn may_end(&self) -> bool;

    /// Drops everything that was not sent yet.
    fn discard(&mut self);
}

/// A command to send. The transport fills in CID and DPTR.
pub(crate) type NvmeRequest = command_queue::CommandRequest<Sqe>;

/// Progress of a command's data transfer.
#[derive(Default)]
pub struct TransferProgress {
    /// The ranges that the host has received, or that the controller has requested.
    pub(crate) moved: Coverage,
    /// Whether received data had a wrong digest.
    pub(crate) is_corrupt: bool,
}

impl TransferProgress {
    /// Whether all data of a successful command was transferred.
    #[inline]
    pub(super) fn is_whole(&self, transfer: DataTransfer) -> bool {
        match transfer {
            DataTransfer::Nothing | DataTransfer::In(0) | DataTransfer::Out(0) => true,
            DataTransfer::In(len) | DataTransfer::Out(len) => self.moved.is_whole(len.into()),
        }
    }

    /// The data of a successful command other than I/O, received into zeroed memory; `None` if it
    /// was damaged. A controller may return less than was asked: SPDK sends a message of
    /// authentication without padding. The rest reads as zero.
    pub(super) fn data(&self, transfer: DataTransfer, payload: &SgList) -> Option<Vec<u8>> {
        match transfer {
            _ if self.is_corrupt => None,
            DataTransfer::In(_) => Some(payload.to_vec()),
            _ => self.is_whole(transfer).then(Vec::new),
        }
    }
}

/// The outstanding commands, as a transport accesses them.
pub trait Commands: CommandMemory {
    /// The command with this CID.
    fn find(&self, cid: u16) -> Option<SlotKey>;

    /// Progress and extent of a command's data transfer.
    fn transport(&mut self, key: SlotKey) -> Option<(&mut TransferProgress, DataTransfer)>;

    /// Completes a command.
    fn finish(&mut self, key: SlotKey, cqe: &Cqe);
}
