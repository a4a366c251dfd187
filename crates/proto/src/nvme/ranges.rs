//! Range lists in a command's data: of Dataset Management and Copy.

use super::io::{bytes, max_blocks};
use blockmux_volume::{Op, SgList};
use blockmux_wire::nvme::nvm::{CopySource, DSM_MAX_RANGES, DsmRange};
use blockmux_wire::nvme::status::NvmeStatus;
use std::collections::VecDeque;
use zerocopy::{FromBytes, IntoBytes};

/// The remaining ranges of Dataset Management: offsets and lengths in bytes.
pub(super) struct DeallocateRanges {
    pub(super) left: VecDeque<(u64, u64)>,
    pub(super) count: usize,
    pub(super) op: Op,
    pub(super) shift: u32,
    /// Size of the namespace, in bytes.
    pub(super) size: u64,
}

/// The remaining source ranges of Copy: offsets and lengths in bytes. The command's own offset is
/// the next destination.
pub(super) struct CopyRanges {
    pub(super) left: VecDeque<(u64, u64)>,
    pub(super) count: usize,
    /// Number of ranges that were copied.
    pub(super) copied: u64,
    pub(super) fua: bool,
    pub(super) shift: u32,
    /// Size of the namespace, in bytes.
    pub(super) size: u64,
    /// Bytes from the next destination to the end of the namespace.
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

/// The structure at this index of a list in the host's data.
fn element<T: FromBytes + IntoBytes>(data: &SgList, index: usize) -> Result<T, NvmeStatus> {
    let (len, mut element) = (size_of::<T>(), T::new_zeroed());
    let at = index.saturating_mul(len);
    if at.saturating_add(len) > data.len() {
        return Err(NvmeStatus::DATA_SGL_LENGTH_INVALID);
    }
    data.slice(at, len).copy_to(element.as_mut_bytes());
    Ok(element)
}

/// Most source ranges of one Copy: one page.
pub(super) const COPY_MAX_RANGES: usize = 128;
