//! Translation of I/O to commands of the unit.

use super::changes::UnitQuery;
use super::command::{self, UnitBlocks};
use super::unit::UnitInfo;
use crate::initiator::command_queue::{self, DataTransfer, ZEROES};
use crate::initiator::job;
use blockmux_volume::{IoError, Op};

/// Capabilities of the unit that determine its commands. Unsupported ones are cleared when the unit
/// rejects a command.
pub(super) struct UnitCapabilities {
    /// Length of a block, in bytes.
    pub(super) block_len: u32,
    pub(super) long_commands: bool,
    pub(super) long_flush: bool,
    max_transfer: u64,
    fua: bool,
    pub(super) write_cache: bool,
    /// The unit had no write cache when it was identified. The user saw that and sends no flushes.
    assumed_stable: bool,
    /// Maximum length of one UNMAP, in bytes.
    pub(super) unmap: Option<u64>,
    /// Maximum length of one WRITE SAME, in bytes.
    pub(super) write_same: Option<u64>,
    zeroes_fast: bool,
    pub(super) lba_status: bool,
    pub(super) unmapped_is_zero: bool,
}

pub(super) type ScsiPlan = command_queue::IoPlan<ScsiCommandKind>;
pub(super) type ScsiPieces = job::CommandPieces<ScsiCommandKind>;

/// The purpose of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScsiCommandKind {
    Read,
    Write {
        fua: bool,
    },
    /// Writes zeroes as data.
    Zeroes,
    WriteSame {
        may_unmap: bool,
    },
    Unmap,
    Status,
    Flush,
    /// A command of the bring-up.
    Probe,
    /// A query of a changed property.
    Changes(UnitQuery),
}

impl job::CommandKind for ScsiCommandKind {
    const FLUSH: ScsiCommandKind = ScsiCommandKind::Flush;
    const READ: ScsiCommandKind = ScsiCommandKind::Read;

    fn is_long(self) -> bool {
        !matches!(self, ScsiCommandKind::Read | ScsiCommandKind::Write { .. } | ScsiCommandKind::Zeroes)
    }
}

impl UnitCapabilities {
    pub(super) fn new(unit: &UnitInfo) -> UnitCapabilities {
        let bytes = |blocks: u64| blocks.saturating_mul(unit.block_len.into());
        let write_same = match unit.max_write_same {
            0 => MAX_WRITE_SAME_BLOCKS,
            reported => reported.min(MAX_WRITE_SAME_BLOCKS),
        };
        UnitCapabilities {
            block_len: unit.block_len,
            long_commands: unit.long_commands,
            long_flush: unit.long_commands,
            max_transfer: unit.max_transfer_bytes(),
            fua: unit.fua,
            write_cache: unit.write_cache,
            assumed_stable: !unit.write_cache,
            unmap: unit.unmap.map(|limits| bytes(limits.max_blocks.into())),
            write_same: unit.long_commands.then(|| bytes(write_same)),
            zeroes_fast: unit.zeroes_fast(),
            lba_status: unit.thin && unit.long_commands,
            unmapped_is_zero: unit.unmapped_is_zero,
        }
    }

    /// Returns the commands that execute `op` on this unit.
    #[inline]
    pub(super) fn plan(&self, op: Op) -> ScsiPlan {
        let pieces = |kind, max| ScsiPieces { kind, max, then_flush: false };
        let fua = |fua: bool| fua || (self.assumed_stable && self.write_cache);
        let stable = |requested: bool| fua(requested) && self.write_cache;
        match op {
            Op::Read => ScsiPlan::Send(pieces(ScsiCommandKind::Read, self.max_transfer)),
            Op::Write { fua: requested } => ScsiPlan::Send(ScsiPieces {
                then_flush: stable(requested) && !self.fua,
                ..pieces(ScsiCommandKind::Write { fua: fua(requested) && self.fua }, self.max_transfer)
            }),
            Op::Flush => ScsiPlan::Send(ScsiPieces::FLUSH),
            Op::Discard { fua: requested } => match self.unmap {
                Some(max) => ScsiPlan::Send(ScsiPieces {
                    then_flush: stable(requested),
                    ..pieces(ScsiCommandKind::Unmap, max)
                }),
                None => ScsiPlan::Done,
            },
            Op::Prefetch => ScsiPlan::Done,
            Op::CompareAndWrite { .. } => ScsiPlan::Fails(IoError::Unsupported),
            Op::BlockStatus if self.lba_status => ScsiPlan::Send(pieces(ScsiCommandKind::Status, MAX_STATUS)),
            Op::BlockStatus => ScsiPlan::AllData,
            Op::WriteZeroes { fua: requested, may_unmap, only_fast } => {
                let is_fast = may_unmap && self.zeroes_fast && self.write_same.is_some();
                if only_fast && !is_fast {
                    return ScsiPlan::Fails(IoError::Unsupported);
                }
                match self.write_same {
                    Some(max) => ScsiPlan::Send(ScsiPieces {
                        then_flush: stable(requested),
                        ..pieces(ScsiCommandKind::WriteSame { may_unmap: is_fast }, max)
                    }),
                    None => ScsiPlan::Send(self.written_zeroes(requested)),
                }
            }
        }
    }

    /// Updates the cache properties. If the unit had no cache when it was identified, the user
    /// sends no flushes, so each write is made stable by itself.
    pub(super) fn set_caching(&mut self, unit: &UnitInfo) {
        (self.fua, self.write_cache) = (unit.fua, unit.write_cache);
    }

    /// Zeroes written as data.
    pub(super) fn written_zeroes(&self, fua: bool) -> ScsiPieces {
        let then_flush = (fua || self.assumed_stable) && self.write_cache;
        ScsiPieces { kind: ScsiCommandKind::Zeroes, max: self.max_transfer.min(ZEROES as u64), then_flush }
    }

    /// The command for `len` bytes at `offset`.
    #[inline]
    pub(super) fn cdb(&self, kind: ScsiCommandKind, offset: u64, len: u64) -> ([u8; 16], DataTransfer) {
        let blocks = self.blocks(offset, len);
        let long = self.long_commands;
        match kind {
            ScsiCommandKind::Read => (command::read(long, blocks), DataTransfer::In(len as u32)),
            ScsiCommandKind::Write { fua } => {
                (command::write(long, blocks, fua), DataTransfer::Out(len as u32))
            }
            ScsiCommandKind::Zeroes => (command::write(long, blocks, false), DataTransfer::Out(len as u32)),
            ScsiCommandKind::WriteSame { may_unmap } => {
                (command::write_same(blocks, may_unmap), DataTransfer::Out(self.block_len))
            }
            ScsiCommandKind::Unmap => (command::unmap(UNMAP_LEN), DataTransfer::Out(UNMAP_LEN)),
            ScsiCommandKind::Status => {
                (command::get_lba_status(blocks.lba, STATUS_LEN as u32), DataTransfer::In(STATUS_LEN as u32))
            }
            ScsiCommandKind::Changes(query) => query.command(self.long_commands),
            ScsiCommandKind::Flush | ScsiCommandKind::Probe => {
                (command::synchronize_cache(self.long_flush), DataTransfer::Nothing)
            }
        }
    }

    /// A range in blocks. It consists of whole blocks, at most 2^32 of them.
    #[inline]
    pub(super) fn blocks(&self, offset: u64, len: u64) -> UnitBlocks {
        let shift = self.block_len.trailing_zeros();
        UnitBlocks { lba: offset.wrapping_shr(shift), count: len.wrapping_shr(shift) as u32 }
    }
}

/// Length of an UNMAP parameter list with one descriptor, in bytes.
pub(super) const UNMAP_LEN: u32 = 24;
/// Allocation length of GET LBA STATUS, in bytes: 255 descriptors.
pub(super) const STATUS_LEN: usize = 4088;
/// A longer WRITE SAME keeps some targets busy beyond usual timeouts.
const MAX_WRITE_SAME_BLOCKS: u64 = 0xffff;
/// Maximum length of one block status query, in bytes. The response need not cover it.
const MAX_STATUS: u64 = u64::MAX;
