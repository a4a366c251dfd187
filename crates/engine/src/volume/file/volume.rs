//! The file volume: what all cores share of an open file.

use super::bounce::zero_pages;
use super::channel::FileChannel;
use super::disk::{Disk, FileExtent, PathState};
use super::open::{self, BlockOptions, FileOptions, OpenError};
use super::probe::DirectAlignment;
use crate::core::reactor::EngineCore;
use blockmux_volume::{
    Channel, Core, IoError, MemoryAlignment, Resize, ResizeError, Volume, VolumeInfo, Waker,
};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A volume over a file or a block device; usable only on cores of the engine.
pub struct FileVolume {
    disk: Arc<Disk>,
    is_new: bool,
}

impl FileVolume {
    /// Opens or creates a file.
    ///
    /// # Errors
    /// A message that says what is wrong with the path or the options, and what to do.
    pub fn open(path: impl AsRef<Path>, options: FileOptions) -> Result<FileVolume, OpenError> {
        open::when_free(|| open::open_file(path.as_ref(), options)).map(FileVolume::new)
    }

    /// Opens a block device. A device that is mounted or exclusively used by another program is
    /// refused unless it is opened read-only.
    ///
    /// # Errors
    /// A message that says what is wrong with the path or the options, and what to do.
    pub fn open_block(path: impl AsRef<Path>, options: BlockOptions) -> Result<FileVolume, OpenError> {
        open::when_free(|| open::open_block(path.as_ref(), options)).map(FileVolume::new)
    }

    /// Whether transfers bypass the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.disk.direct.is_some()
    }

    /// Whether opening created the file, so that it reads as zeroes.
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    fn new(opened: open::Opened) -> FileVolume {
        let open::Opened { path, file, info, end, is_device, is_new, direct, zeroing } = opened;
        let registered_alignment = Some(MemoryAlignment::of(direct.map_or(1, DirectAlignment::memory)));
        let info = VolumeInfo { registered_alignment, ..info };
        let (zeroes, lost_writes) = (zero_pages(), AtomicBool::new(false));
        let (file, extent) = (Arc::new(file), FileExtent::new(info.size, end));
        FileVolume {
            disk: Arc::new(Disk {
                path,
                file,
                info,
                extent,
                is_device,
                direct,
                zeroing,
                zeroes,
                lost_writes,
                has_lost_path: AtomicBool::new(false),
            }),
            is_new,
        }
    }
}

impl Volume for FileVolume {
    fn info(&self) -> VolumeInfo {
        VolumeInfo { size: self.disk.extent.size(), ..self.disk.info.clone() }
    }

    /// Takes over the current size of a device. The size of a file is only taken on request: a file
    /// that is truncated while it is served has lost data, and its clients get errors.
    fn refresh_size(&self) -> u64 {
        if self.disk.is_device {
            let blocks = self.disk.own_len().ok().map(|len| whole_blocks(len, &self.disk.info));
            // Requests to a device that was removed fail by themselves.
            blocks.filter(|&size| size > 0).inspect(|&size| self.disk.extent.set(size, size));
        } else {
            self.disk.check_path();
        }
        self.disk.extent.size()
    }

    fn resize(&self, to: Resize) -> Result<u64, ResizeError> {
        match to {
            Resize::Own if self.disk.is_device => Ok(self.refresh_size()),
            Resize::Own => self.disk.take_own_size(),
            Resize::Bytes { .. } if self.disk.is_device => Err(ResizeError::Fixed),
            Resize::Bytes { size, beyond } => self.disk.resize(size, beyond),
        }
    }

    fn deleted_file(&self) -> Option<PathBuf> {
        let links = self.disk.file.metadata().map(|own| own.nlink());
        (!self.disk.is_device && links.is_ok_and(|links| links == 0)).then(|| self.disk.path.clone())
    }

    fn lost_path(&self) -> Option<PathBuf> {
        self.disk.path_state().filter(|state| *state != PathState::Leads).map(|_| self.disk.path.clone())
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let engine = EngineCore::from_core(core).ok_or(IoError::Unsupported)?;
        let file = self.disk.reopen();
        Ok(Box::new(FileChannel::new(&self.disk, file, &engine, core, depth, waker)))
    }
}

fn whole_blocks(len: u64, info: &VolumeInfo) -> u64 {
    let block = u64::from(info.logical_block);
    len / block * block
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::Beyond;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_truncation_check_during_a_resize_does_not_mark_the_file_as_truncated() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let volume = FileVolume::open(file.path(), FileOptions::default()).unwrap();
        let (disk, checks, is_over) = (&volume.disk, AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    disk.check_for_truncation(&disk.file);
                    checks.fetch_add(1, Ordering::Release);
                }
            });
            for _ in 0..500 {
                file.as_file().set_len(4096).unwrap();
                disk.resize(1 << 20, Beyond::Refuse).unwrap();
                // A check that may have begun before the resize has ended, and another one after
                // it.
                let started = checks.load(Ordering::Acquire);
                while checks.load(Ordering::Acquire) < started + 2 {
                    std::thread::yield_now();
                }
                let is_truncated = disk.extent.is_truncated_before(1 << 20);
                is_over.store(is_truncated, Ordering::Relaxed);
                assert!(!is_truncated);
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }
}
