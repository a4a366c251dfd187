//! What one nexus has to know of a logical unit for each command, and what that lets it do.

use super::task::TaskFailure;
use super::{AccessState, ScsiStatus};
use crate::scsi::sense::Sense;
use crate::volume_state::BlockAccess;
use blockmux_volume::{MAX_TRANSFER, VolumeInfo};
use blockmux_wire::scsi::sense::{Asc, SenseKey};

/// What a nexus has to know for each command, good as long as the generation stays.
#[derive(Clone, Debug)]
pub(super) struct NexusView {
    pub(super) info: VolumeInfo,
    /// LOGICAL BLOCK LENGTH IN BYTES.
    pub(super) block_len: u32,
    /// How many blocks there are.
    pub(super) blocks: u64,
    /// A reservation of some kind is in force, so that the next two count.
    pub(super) is_reserved: bool,
    /// What a persistent reservation allows this nexus.
    pub(super) access: BlockAccess,
    /// Another nexus holds a RESERVE of SPC-2.
    pub(super) is_reserved_by_other: bool,
    /// Tasks that began under another are aborted.
    pub(super) abort_epoch: u32,
    /// A unit attention waits.
    pub(super) has_attention: bool,
    /// D_SENSE of the Control mode page.
    pub(super) descriptor_sense: bool,
    /// SWP of the Control mode page.
    pub(super) write_protected: bool,
    /// Why nearly every command fails: a sanitize operation, or the volume is not served any more.
    pub(super) sanitizing: Option<Sense>,
    /// A sanitize operation, a copy or the clock of tokens waits for someone to carry it on.
    pub(super) has_background: bool,
    /// Why commands that need the medium cannot have it: the port's state, or there is no medium.
    pub(super) not_ready: Option<Sense>,
    /// The state of the port's group.
    pub(super) port: AccessState,
}

impl NexusView {
    /// Blocks can be unmapped.
    pub(super) fn is_thin(&self) -> bool {
        self.info.discard_granularity > 0
    }

    /// Unmapped blocks read as zeroes. Where zeroing is slow, a discard is the better way to unmap,
    /// and what reads as what after that is open.
    pub(super) fn unmaps_to_zeroes(&self) -> bool {
        self.is_thin() && self.info.fast_zeroes
    }

    /// MAXIMUM TRANSFER LENGTH, in blocks.
    pub(super) fn max_transfer_blocks(&self) -> u32 {
        MAX_TRANSFER.checked_div(self.block_len).unwrap_or(0)
    }

    /// MAXIMUM ATOMIC TRANSFER LENGTH, in blocks; 0 without WRITE ATOMIC. Nothing of a volatile
    /// volume outlives the power, so that no write of it is ever left half done; of other volumes
    /// nobody knows.
    pub(super) fn max_atomic_blocks(&self) -> u32 {
        if self.info.volatile { MAX_ATOMIC.checked_div(self.block_len).unwrap_or(0) } else { 0 }
    }
}

/// What a command is checked for, for what touches blocks of another unit or long after its command
/// was.
impl NexusView {
    /// Refuses what the nexus could not read or change by commands sent to this unit.
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

    /// Refuses whatever is not the sanitize operation.
    #[inline]
    pub(super) fn check_sanitize(&self) -> Result<(), TaskFailure> {
        self.sanitizing.map_or(Ok(()), |sense| Err(sense.into()))
    }

    /// Refuses to change blocks of a write-protected unit.
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

/// The most bytes of one WRITE ATOMIC.
const MAX_ATOMIC: u32 = 1 << 20;
