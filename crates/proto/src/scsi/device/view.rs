//! A nexus's cached view of a logical unit, and the checks based on it.

use super::task::TaskFailure;
use super::{AccessState, ScsiStatus};
use crate::scsi::sense::Sense;
use crate::volume_state::BlockAccess;
use blockmux_volume::{MAX_TRANSFER, VolumeInfo};
use blockmux_wire::scsi::sense::{Asc, SenseKey};

/// State that every command needs; valid while the generation is unchanged.
#[derive(Clone, Debug)]
pub(super) struct NexusView {
    pub(super) info: VolumeInfo,
    /// LOGICAL BLOCK LENGTH IN BYTES.
    pub(super) block_len: u32,
    /// Number of blocks.
    pub(super) blocks: u64,
    /// A reservation restricts this nexus; the next two fields apply.
    pub(super) is_reserved: bool,
    /// Access that persistent reservations permit.
    pub(super) access: BlockAccess,
    /// Another nexus holds an SPC-2 reservation.
    pub(super) is_reserved_by_other: bool,
    /// Tasks that started with another value are aborted.
    pub(super) abort_epoch: u32,
    /// A unit attention is pending.
    pub(super) has_attention: bool,
    /// D_SENSE of the Control mode page.
    pub(super) descriptor_sense: bool,
    /// SWP of the Control mode page.
    pub(super) write_protected: bool,
    /// Sense data of nearly all commands: a sanitize operation, or the volume is no longer served.
    pub(super) sanitizing: Option<Sense>,
    /// Sense data of commands that access the medium: ALUA state, or no medium.
    pub(super) not_ready: Option<Sense>,
    /// This process serves the volume.
    pub(super) is_served: bool,
    /// ALUA state of the nexus's target port group.
    pub(super) port: AccessState,
}

impl NexusView {
    /// Whether blocks can be unmapped.
    pub(super) fn is_thin(&self) -> bool {
        self.info.discard_granularity > 0
    }

    /// Whether unmapped blocks read as zeroes. If zeroing is slow, UNMAP discards, and the content
    /// is then undefined.
    pub(super) fn unmaps_to_zeroes(&self) -> bool {
        self.is_thin() && self.info.fast_zeroes
    }

    /// MAXIMUM TRANSFER LENGTH, in blocks.
    pub(super) fn max_transfer_blocks(&self) -> u32 {
        MAX_TRANSFER.checked_div(self.block_len).unwrap_or(0)
    }

    /// MAXIMUM ATOMIC TRANSFER LENGTH, in blocks; 0 without WRITE ATOMIC. A volatile volume loses
    /// all data on power failure, so none of its writes is torn; other volumes give no such
    /// guarantee.
    pub(super) fn max_atomic_blocks(&self) -> u32 {
        if self.info.volatile { MAX_ATOMIC.checked_div(self.block_len).unwrap_or(0) } else { 0 }
    }
}

/// Checks for operations on blocks of another unit, or after the start of the command.
impl NexusView {
    /// Checks whether the nexus may read or, with `changes`, write blocks of this unit.
    pub(super) fn check_blocks(&self, changes: bool) -> Result<(), TaskFailure> {
        let is_allowed = if changes { self.access.writes } else { self.access.reads };
        if self.is_reserved_by_other || !is_allowed {
            return Err(TaskFailure::status(ScsiStatus::RESERVATION_CONFLICT));
        }
        self.check_sanitize()?;
        if let Some(sense) = self.not_ready {
            return Err(sense.into());
        }
        if changes { self.check_writable() } else { Ok(()) }
    }

    /// Rejects all I/O except that of the sanitize operation.
    #[inline]
    pub(super) fn check_sanitize(&self) -> Result<(), TaskFailure> {
        self.sanitizing.map_or(Ok(()), |sense| Err(sense.into()))
    }

    /// Rejects changes of a write-protected unit.
    #[inline]
    pub(super) fn check_writable(&self) -> Result<(), TaskFailure> {
        if self.info.read_only {
            return Err(Sense::new(SenseKey::DATA_PROTECT, Asc::WRITE_PROTECTED).into());
        }
        if self.write_protected {
            return Err(Sense::new(SenseKey::DATA_PROTECT, Asc::SOFTWARE_WRITE_PROTECTED).into());
        }
        Ok(())
    }
}

/// Maximum length of a WRITE ATOMIC, in bytes.
const MAX_ATOMIC: u32 = 1 << 20;
