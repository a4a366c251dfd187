//! Translates I/O to commands of a namespace.

use super::command::{self, NamespaceBlocks};
use super::info::NamespaceInfo;
use crate::initiator::command_queue::{self, DataTransfer, ZEROES};
use crate::initiator::job;
use blockmux_volume::{IoError, Op};
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::nvm::{DEAC, DsmRange, FUA};
use blockmux_wire::nvme::opcode::NvmOpcode;

/// The capabilities of the namespace on which commands depend. A command that turns out not to be
/// supported is removed.
pub(super) struct NamespaceCapabilities {
    nsid: u32,
    /// Size of a logical block, in bytes.
    block_len: u32,
    max_transfer: u64,
    write_cache: bool,
    /// Most bytes that one Dataset Management deallocates.
    pub(super) deallocate: Option<u64>,
    /// Most bytes of one Write Zeroes.
    pub(super) write_zeroes: Option<u64>,
    zeroes_fast: bool,
}

pub(super) type NvmePlan = command_queue::IoPlan<NvmeCommandKind>;
pub(super) type NvmePieces = job::CommandPieces<NvmeCommandKind>;

/// The kinds of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NvmeCommandKind {
    Read,
    Write {
        fua: bool,
    },
    /// A Write of zeroes.
    Zeroes {
        fua: bool,
    },
    WriteZeroes {
        fua: bool,
        may_deallocate: bool,
    },
    Deallocate,
    Flush,
    /// Connect of the queue itself, or its authentication.
    Connect,
}

impl job::CommandKind for NvmeCommandKind {
    const FLUSH: NvmeCommandKind = NvmeCommandKind::Flush;
    const READ: NvmeCommandKind = NvmeCommandKind::Read;

    fn is_long(self) -> bool {
        !matches!(
            self,
            NvmeCommandKind::Read | NvmeCommandKind::Write { .. } | NvmeCommandKind::Zeroes { .. }
        )
    }
}

impl NamespaceCapabilities {
    pub(super) fn new(namespace: &NamespaceInfo) -> NamespaceCapabilities {
        let bytes = |blocks: u64| blocks.saturating_mul(namespace.block_len.into());
        NamespaceCapabilities {
            nsid: namespace.nsid,
            block_len: namespace.block_len,
            max_transfer: namespace.max_transfer,
            write_cache: namespace.write_cache,
            deallocate: namespace.max_deallocate_blocks.map(bytes),
            write_zeroes: namespace.max_zeroes_blocks.map(bytes),
            zeroes_fast: namespace.zeroes_deallocate,
        }
    }

    /// How to execute `op` on this namespace.
    #[inline]
    pub(super) fn plan(&self, op: Op) -> NvmePlan {
        let pieces = |kind, max| NvmePlan::Send(NvmePieces { kind, max, then_flush: false });
        let stable = |fua: bool| fua && self.write_cache;
        match op {
            Op::Read => pieces(NvmeCommandKind::Read, self.max_transfer),
            Op::Write { fua } => pieces(NvmeCommandKind::Write { fua: stable(fua) }, self.max_transfer),
            Op::Flush if self.write_cache => NvmePlan::Send(NvmePieces::FLUSH),
            Op::Flush | Op::Prefetch => NvmePlan::Done,
            Op::BlockStatus => NvmePlan::AllData,
            Op::CompareAndWrite { .. } => NvmePlan::Fails(IoError::Unsupported),
            Op::Discard { fua } => match self.deallocate {
                Some(max) => NvmePlan::Send(NvmePieces {
                    kind: NvmeCommandKind::Deallocate,
                    max,
                    then_flush: stable(fua),
                }),
                None => NvmePlan::Done,
            },
            Op::WriteZeroes { fua, may_unmap, only_fast } => {
                let may_deallocate = may_unmap && self.zeroes_fast;
                match self.write_zeroes {
                    None if only_fast => NvmePlan::Fails(IoError::Unsupported),
                    Some(_) if only_fast && !may_deallocate => NvmePlan::Fails(IoError::Unsupported),
                    Some(max) => {
                        pieces(NvmeCommandKind::WriteZeroes { fua: stable(fua), may_deallocate }, max)
                    }
                    None => NvmePlan::Send(self.written_zeroes(fua)),
                }
            }
        }
    }

    /// Pieces of Write commands with zeroes.
    pub(super) fn written_zeroes(&self, fua: bool) -> NvmePieces {
        let (fua, max) = (fua && self.write_cache, self.max_transfer.min(ZEROES as u64));
        NvmePieces { kind: NvmeCommandKind::Zeroes { fua }, max, then_flush: false }
    }

    /// The command for `len` bytes at `offset`.
    #[inline]
    pub(super) fn sqe(&self, kind: NvmeCommandKind, offset: u64, len: u64) -> (Sqe, DataTransfer) {
        let blocks = self.blocks(offset, len);
        let of_blocks = |opcode, flags| command::of_blocks(opcode, self.nsid, blocks, flags);
        let force = |fua: bool| if fua { FUA } else { 0 };
        match kind {
            NvmeCommandKind::Read => (of_blocks(NvmOpcode::READ, 0), DataTransfer::In(len as u32)),
            NvmeCommandKind::Write { fua } | NvmeCommandKind::Zeroes { fua } => {
                (of_blocks(NvmOpcode::WRITE, force(fua)), DataTransfer::Out(len as u32))
            }
            NvmeCommandKind::WriteZeroes { fua, may_deallocate } => {
                let deallocate = if may_deallocate { DEAC } else { 0 };
                (of_blocks(NvmOpcode::WRITE_ZEROES, force(fua) | deallocate), DataTransfer::Nothing)
            }
            NvmeCommandKind::Deallocate => {
                (command::deallocate(self.nsid), DataTransfer::Out(RANGE_LEN as u32))
            }
            NvmeCommandKind::Flush | NvmeCommandKind::Connect => {
                (command::of_namespace(NvmOpcode::FLUSH, self.nsid), DataTransfer::Nothing)
            }
        }
    }

    /// A range in logical blocks. It is a multiple of the block size and has fewer than 2^32
    /// blocks.
    #[inline]
    pub(super) fn blocks(&self, offset: u64, len: u64) -> NamespaceBlocks {
        let shift = self.block_len.trailing_zeros();
        NamespaceBlocks { slba: offset.wrapping_shr(shift), count: len.wrapping_shr(shift) as u32 }
    }
}

/// Length of the data of Dataset Management with one range, in bytes.
pub(super) const RANGE_LEN: usize = size_of::<DsmRange>();
