//! How I/O becomes commands of this unit.

use super::changes::UnitQuery;
use super::command::{self, UnitBlocks};
use super::unit::UnitInfo;
use crate::io_queue::{self, DataTransfer, ZEROES};
use crate::job;
use blockmux_volume::{IoError, Op};

/// What the unit can do, as far as commands depend on it. What it turns out not to know is taken
/// back.
pub(super) struct UnitCapabilities {
    /// Of a block, in bytes.
    pub(super) block_len: u32,
    pub(super) long_commands: bool,
    pub(super) long_flush: bool,
    max_transfer: u64,
    fua: bool,
    pub(super) write_cache: bool,
    /// There was no cache when the unit was first seen, and whoever writes was told so.
    promised_stable: bool,
    /// The most that one UNMAP discards, in bytes.
    pub(super) unmap: Option<u64>,
    /// The most that one WRITE SAME covers, in bytes.
    pub(super) write_same: Option<u64>,
    zeroes_fast: bool,
    pub(super) lba_status: bool,
    pub(super) unmapped_is_zero: bool,
}

pub(super) type ScsiPlan = io_queue::IoPlan<ScsiCommandKind>;
pub(super) type ScsiPieces = job::CommandPieces<ScsiCommandKind>;

/// What one command does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScsiCommandKind {
    Read,
    Write {
        fua: bool,
    },
    /// Zeroes, written out.
    Zeroes,
    WriteSame {
        may_unmap: bool,
    },
    Unmap,
    Status,
    Flush,
    /// Of the bring-up.
    Question,
    /// What has changed.
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
            told => told.min(MAX_WRITE_SAME_BLOCKS),
        };
        UnitCapabilities {
            block_len: unit.block_len,
            long_commands: unit.long_commands,
            long_flush: unit.long_commands,
            max_transfer: unit.max_transfer_bytes(),
            fua: unit.fua,
            write_cache: unit.write_cache,
            promised_stable: !unit.write_cache,
            unmap: unit.unmap.map(|limits| bytes(limits.max_blocks.into())),
            write_same: unit.long_commands.then(|| bytes(write_same)),
            zeroes_fast: unit.zeroes_fast(),
            lba_status: unit.thin && unit.long_commands,
            unmapped_is_zero: unit.unmapped_is_zero,
        }
    }

    /// How to do `op` with this unit.
    #[inline]
    pub(super) fn plan(&self, op: Op) -> ScsiPlan {
        let pieces = |kind, max| ScsiPieces { kind, max, then_flush: false };
        let fua = |fua: bool| fua || (self.promised_stable && self.write_cache);
        let stable = |asked: bool| fua(asked) && self.write_cache;
        match op {
            Op::Read => ScsiPlan::Send(pieces(ScsiCommandKind::Read, self.max_transfer)),
            Op::Write { fua: asked } => ScsiPlan::Send(ScsiPieces {
                then_flush: stable(asked) && !self.fua,
                ..pieces(ScsiCommandKind::Write { fua: fua(asked) && self.fua }, self.max_transfer)
            }),
            Op::Flush => ScsiPlan::Send(ScsiPieces::FLUSH),
            Op::Discard { fua: asked } => match self.unmap {
                Some(max) => ScsiPlan::Send(ScsiPieces {
                    then_flush: stable(asked),
                    ..pieces(ScsiCommandKind::Unmap, max)
                }),
                None => ScsiPlan::Done,
            },
            Op::Prefetch => ScsiPlan::Done,
            Op::BlockStatus if self.lba_status => ScsiPlan::Send(pieces(ScsiCommandKind::Status, MAX_STATUS)),
            Op::BlockStatus => ScsiPlan::AllData,
            Op::WriteZeroes { fua: asked, may_unmap, only_fast } => {
                let is_fast = may_unmap && self.zeroes_fast && self.write_same.is_some();
                if only_fast && !is_fast {
                    return ScsiPlan::Fails(IoError::Unsupported);
                }
                match self.write_same {
                    Some(max) => ScsiPlan::Send(ScsiPieces {
                        then_flush: stable(asked),
                        ..pieces(ScsiCommandKind::WriteSame { may_unmap: is_fast }, max)
                    }),
                    None => ScsiPlan::Send(self.written_zeroes(asked)),
                }
            }
        }
    }

    /// The unit's cache is another now. A write that nobody flushes, as there was no cache to
    /// flush, is made stable.
    pub(super) fn set_caching(&mut self, unit: &UnitInfo) {
        (self.fua, self.write_cache) = (unit.fua, unit.write_cache);
    }

    /// Zeroes that are written out.
    pub(super) fn written_zeroes(&self, fua: bool) -> ScsiPieces {
        let then_flush = (fua || self.promised_stable) && self.write_cache;
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
            ScsiCommandKind::Changes(question) => question.command(self.long_commands),
            ScsiCommandKind::Flush | ScsiCommandKind::Question => {
                (command::synchronize_cache(self.long_flush), DataTransfer::Nothing)
            }
        }
    }

    /// A range in blocks; it is whole blocks, and a piece has at most 32 bits of them.
    #[inline]
    pub(super) fn blocks(&self, offset: u64, len: u64) -> UnitBlocks {
        let shift = self.block_len.trailing_zeros();
        UnitBlocks { lba: offset.wrapping_shr(shift), count: len.wrapping_shr(shift) as u32 }
    }
}

/// An UNMAP parameter list with one descriptor, in bytes.
pub(super) const UNMAP_LEN: u32 = 24;
/// Room for GET LBA STATUS parameter data, in bytes: 255 descriptors.
pub(super) const STATUS_LEN: usize = 4088;
/// More than that would keep some targets busy for longer than anybody waits.
const MAX_WRITE_SAME_BLOCKS: u64 = 0xffff;
/// What one question about block status is about, in bytes. The answer need not cover it.
const MAX_STATUS: u64 = u64::MAX;
