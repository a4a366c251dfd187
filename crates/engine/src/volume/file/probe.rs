//! Probes the features of a file or device when it is opened.

use super::kernel;
use blockmux_volume::SgList;
use std::fs::{File, FileTimes};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// Alignment of direct I/O, in bytes; powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DirectAlignment {
    /// Alignment of memory addresses.
    memory: u32,
    /// Alignment of file offsets and of the length of each segment.
    pub(super) offset: u32,
}

impl DirectAlignment {
    /// The alignment according to the kernel, or else to the device below; `None`: no direct I/O,
    /// or an alignment that the pool's buffers do not have.
    pub(super) fn of(file: &File, queue: &QueueLimits) -> Option<DirectAlignment> {
        let direct = match kernel::direct_alignment(file) {
            Some((memory, offset)) => DirectAlignment { memory, offset },
            None => {
                let block = queue.number("logical_block_size").map_or(POOL_ALIGNMENT, |block| block as u32);
                DirectAlignment { memory: block, offset: block }
            }
        };
        let is_usable = direct.offset.is_power_of_two()
            && direct.offset <= MAX_BLOCK
            && direct.memory.is_power_of_two()
            && direct.memory <= POOL_ALIGNMENT;
        is_usable.then_some(direct)
    }

    /// Alignment of memory addresses, in bytes.
    pub(super) fn memory(self) -> u32 {
        self.memory
    }

    /// Whether direct I/O can transfer to or from this memory without a bounce buffer.
    #[inline]
    pub(super) fn can_use(&self, memory: &SgList) -> bool {
        let (address_mask, len_mask) = (self.memory as usize - 1, self.offset as usize - 1);
        memory.segs().iter().all(|seg| seg.as_ptr() as usize & address_mask == 0 && seg.len() & len_mask == 0)
    }
}

/// Methods to zero a range without transferring zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Zeroing {
    /// `FALLOC_FL_PUNCH_HOLE` works; it deallocates.
    pub(super) punch: bool,
    /// `FALLOC_FL_ZERO_RANGE`, which keeps the allocation, is faster than writing zeroes where it
    /// works.
    pub(super) zero_range_is_fast: bool,
}

impl Zeroing {
    /// Probes hole punching beyond the end of the file, which changes nothing. `ZERO_RANGE` there
    /// would allocate space, so it is tried when it is first needed.
    pub(super) fn of_file(file: &File) -> io::Result<Zeroing> {
        let metadata = file.metadata()?;
        let beyond = metadata.len().next_multiple_of(1 << 20);
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let punch = kernel::fallocate_now(file, mode, beyond, 4096).is_ok();
        // Punching updates mtime, which would mislead backups. Only the owner may restore it.
        let _ = metadata.modified().and_then(|time| file.set_times(FileTimes::new().set_modified(time)));
        Ok(Zeroing { punch, zero_range_is_fast: true })
    }

    /// Methods of a device: its own command, if it has one.
    pub(super) fn of_device(queue: &QueueLimits) -> Zeroing {
        let has_command = queue.number("write_zeroes_max_bytes").is_some_and(|most| most > 0);
        Zeroing { punch: has_command, zero_range_is_fast: has_command }
    }

    /// Whether to try zeroing a range without writing it.
    pub(super) fn is_fast(&self, may_unmap: bool) -> bool {
        may_unmap && self.punch || self.zero_range_is_fast
    }
}

/// Queue limits in `/sys` of the block device below a file, or of a device node.
pub(super) struct QueueLimits(Option<PathBuf>);

impl QueueLimits {
    /// The queue of the device numbered `device`, or of the disk that it is a partition of. Empty
    /// for a file system that is not on one device.
    pub(super) fn of(device: u64) -> QueueLimits {
        let device_dir = format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device));
        let queue_dirs = [format!("{device_dir}/queue"), format!("{device_dir}/../queue")];
        QueueLimits(queue_dirs.into_iter().map(PathBuf::from).find(|dir| dir.is_dir()))
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }

    /// Completed writes are on stable storage without a flush (write-through cache).
    pub(super) fn writes_through(&self) -> bool {
        self.text("write_cache").is_some_and(|mode| mode == "write through")
    }

    pub(super) fn is_rotational(&self) -> bool {
        self.number("rotational") == Some(1)
    }

    fn text(&self, name: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.0.as_ref()?.join(name)).ok()?;
        Some(text.trim().to_owned())
    }
}

/// Allocation unit of the file system, in bytes.
pub(super) fn file_block(file: &File) -> io::Result<u32> {
    let reported = file.metadata()?.blksize();
    let is_plausible = reported.is_power_of_two() && reported <= MAX_BLOCK.into();
    Ok(if is_plausible { reported as u32 } else { POOL_ALIGNMENT })
}

/// Alignment of the pool's buffers, in bytes, and so of bounced transfers.
const POOL_ALIGNMENT: u32 = 4096;
/// Largest block size that is accepted, in bytes.
const MAX_BLOCK: u32 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::Memory;
    use std::time::{Duration, SystemTime};

    #[test]
    fn direct_io_needs_aligned_addresses_and_whole_blocks() {
        let direct = DirectAlignment { memory: 512, offset: 512 };
        let memory = Memory::from_heap(8192);
        assert!(direct.can_use(&SgList::one(memory.seg(512, 1024))));
        assert!(!direct.can_use(&SgList::one(memory.seg(28, 1024))));
        let mut uneven = SgList::one(memory.seg(0, 500));
        uneven.push(memory.seg(512, 524));
        assert!(!direct.can_use(&uneven));
    }

    #[test]
    fn probing_does_not_change_a_file() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(5000).unwrap();
        let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        file.set_times(FileTimes::new().set_modified(long_ago)).unwrap();
        let before = file.metadata().unwrap();
        Zeroing::of_file(&file).unwrap();
        let after = file.metadata().unwrap();
        assert_eq!((after.len(), after.blocks()), (before.len(), before.blocks()));
        assert_eq!(after.modified().unwrap(), long_ago);
    }
}
