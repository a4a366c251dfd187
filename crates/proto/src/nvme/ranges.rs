//! Ranges of blocks that come as a command's data: what Dataset Management deallocates, and what
//! Copy reads.

use super::io::{bytes, max_blocks};
use blockmux_volume::{Op, SgList};
use blockmux_wire::nvme::nvm::{CopySource, DSM_MAX_RANGES, DsmRange};
use blockmux_wire::nvme::status::NvmeStatus;
use std::collections::VecDeque;
use zerocopy::{FromBytes, IntoBytes};

/// What Dataset Management is to deallocate: offsets and lengths in bytes.
pub(super) struct DeallocateRanges {
    pub(super) left: VecDeque<(u64, u64)>,
    pub(super) count: usize,
    pub(super) op: Op,
    pub(super) shift: u32,
    /// Of the namespace, in bytes.
    pub(super) size: u64,
}

/// What Copy has still to read: offsets and lengths in bytes; the command's own offset is where it
/// writes next.
pub(super) struct CopyRanges {
    pub(super) left: VecDeque<(u64, u64)>,
    pub(super) count: usize,
    /// How many of them have been copied.
    pub(super) copied: u64,
    pub(super) fua: bool,
    pub(super) shift: u32,
    /// Of the namespace, in bytes.
    pub(super) size: u64,
    /// From where it writes to the namespace's end, in bytes.
    pub(super) room: u64,
}

impl DeallocateRanges {
    pub(super) fn read(&mut self, data: &SgList) -> Result<(), NvmeStatus> {
        for index in 0..self.count.min(DSM_MAX_RANGES) {
            let range: DsmRange = element(data, index)?;
            let (offset, len) = bytes(range.slba.get(), range.nlb.get().into(), self.shift, self.size)?;
            if len > 0 {
                self.left.push_back((offset, len));
            }
        }
        Ok(())
    }
}

impl CopyRanges {
    pub(super) fn read(&mut self, data: &SgList) -> Result<(), NvmeStatus> {
        for index in 0..self.count {
            let source: CopySource = element(data, index)?;
            let blocks = u64::from(source.nlb.get()).saturating_add(1);
            if blocks > max_blocks(self.shift) {
                return Err(NvmeStatus::COMMAND_SIZE_LIMIT_EXCEEDED);
            }
            let range = bytes(source.slba.get(), blocks, self.shift, self.size)?;
            self.room = self.room.checked_sub(range.1).ok_or(NvmeStatus::LBA_OUT_OF_RANGE)?;
            self.left.push_back(range);
        }
        Ok(())
    }
}

/// The structure at that place of a list in the host's data.
fn element<T: FromBytes + IntoBytes>(data: &SgList, index: usize) -> Result<T, NvmeStatus> {
    let (len, mut element) = (size_of::<T>(), T::new_zeroed());
    let at = index.saturating_mul(len);
    if at.saturating_add(len) > data.len() {
        return Err(NvmeStatus::DATA_SGL_LENGTH_INVALID);
    }
    data.slice(at, len).copy_to(element.as_mut_bytes());
    Ok(element)
}

/// Source ranges of one Copy: a page of them.
pub(super) const COPY_MAX_RANGES: usize = 128;
