//! How I/O becomes commands of this unit.

use super::command::{self, Blocks};
use super::news::Question;
use super::unit::UnitInfo;
use crate::io_queue::{self, Transfer, ZEROES};
use crate::job;
use blockmux_volume::{IoError, Op};

/// What the unit can do, as far as commands depend on it. What it turns out not to know is taken back.
pub(super) struct Terms {
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

pub(super) type Plan = io_queue::Plan<Kind>;
pub(super) type Pieces = job::Pieces<Kind>;

/// What one command does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
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
    News(Question),
}

impl job::Kind for Kind {
    const FLUSH: Kind = Kind::Flush;
    const READ: Kind = Kind::Read;

    fn is_long(self) -> bool {
        !matches!(self, Kind::Read | Kind::Write { .. } | Kind::Zeroes)
    }
}

impl Terms {
    pub(super) fn new(unit: &UnitInfo) -> Terms {
        let bytes = |blocks: u64| blocks.saturating_mul(unit.block_len.into());
        let write_same = match unit.max_write_same {
            0 => MAX_WRITE_SAME_BLOCKS,
            told => told.min(MAX_WRITE_SAME_BLOCKS),
        };
        Terms {
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
    pub(super) fn plan(&self, op: Op) -> Plan {
        let pieces = |kind, max| Pieces { kind, max, then_flush: false };
        let fua = |fua: bool| fua || (self.promised_stable && self.write_cache);
        let stable = |asked: bool| fua(asked) && self.write_cache;
        match op {
            Op::Read => Plan::Send(pieces(Kind::Read, self.max_transfer)),
            Op::Write { fua: asked } => Plan::Send(Pieces {
                then_flush: stable(asked) && !self.fua,
                ..pieces(Kind::Write { fua: fua(asked) && self.fua }, self.max_transfer)
            }),
            Op::Flush => Plan::Send(Pieces::FLUSH),
            Op::Discard { fua: asked } => match self.unmap {
                Some(max) => Plan::Send(Pieces { then_flush: stable(asked), ..pieces(Kind::Unmap, max) }),
                None => Plan::Done,
            },
            Op::Prefetch => Plan::Done,
            Op::BlockStatus if self.lba_status => Plan::Send(pieces(Kind::Status, MAX_STATUS)),
            Op::BlockStatus => Plan::AllData,
            Op::WriteZeroes { fua: asked, may_unmap, only_fast } => {
                let is_fast = may_unmap && self.zeroes_fast && self.write_same.is_some();
                if only_fast && !is_fast {
                    return Plan::Fails(IoError::Unsupported);
                }
                match self.write_same {
                    Some(max) => Plan::Send(Pieces {
                        then_flush: stable(asked),
                        ..pieces(Kind::WriteSame { may_unmap: is_fast }, max)
                    }),
                    None => Plan::Send(self.written_zeroes(asked)),
                }
            }
        }
    }

    /// The unit's cache is another now. A write that nobody flushes, as there was no cache to flush, is made stable.
    pub(super) fn set_caching(&mut self, unit: &UnitInfo) {
        (self.fua, self.write_cache) = (unit.fua, unit.write_cache);
    }

    /// Zeroes that are written out.
    pub(super) fn written_zeroes(&self, fua: bool) -> Pieces {
        let then_flush = (fua || self.promised_stable) && self.write_cache;
        Pieces { kind: Kind::Zeroes, max: self.max_transfer.min(ZEROES as u64), then_flush }
    }

    /// The command for `len` bytes at `offset`.
    #[inline]
    pub(super) fn cdb(&self, kind: Kind, offset: u64, len: u64) -> ([u8; 16], Transfer) {
        let blocks = self.blocks(offset, len);
        let long = self.long_commands;
        match kind {
            Kind::Read => (command::read(long, blocks), Transfer::In(len as u32)),
            Kind::Write { fua } => (command::write(long, blocks, fua), Transfer::Out(len as u32)),
            Kind::Zeroes => (command::write(long, blocks, false), Transfer::Out(len as u32)),
            Kind::WriteSame { may_unmap } => {
                (command::write_same(blocks, may_unmap), Transfer::Out(self.block_len))
            }
            Kind::Unmap => (command::unmap(UNMAP_LEN), Transfer::Out(UNMAP_LEN)),
            Kind::Status => {
                (command::get_lba_status(blocks.lba, STATUS_LEN as u32), Transfer::In(STATUS_LEN as u32))
            }
            Kind::News(question) => question.command(self.long_commands),
            Kind::Flush | Kind::Question => (command::synchronize_cache(self.long_flush), Transfer::Nothing),
        }
    }

    /// A range in blocks; it is whole blocks, and a piece has at most 32 bits of them.
    #[inline]
    pub(super) fn blocks(&self, offset: u64, len: u64) -> Blocks {
        let shift = self.block_len.trailing_zeros();
        Blocks { lba: offset.wrapping_shr(shift), count: len.wrapping_shr(shift) as u32 }
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
