//! The volume itself: what all cores share of an open file.

use super::bounce::zero_pages;
use super::channel::FileChannel;
use super::open::{self, BlockOptions, FileOptions, OpenError};
use super::probe::{Direct, Zeroing};
use crate::reactor::EngineCore;
use blockmux_volume::{Channel, Core, IoError, Pages, Volume, VolumeInfo, Waker};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A volume over a file or a block device; it runs on cores of the engine alone.
pub struct FileVolume {
    disk: Arc<Disk>,
    is_new: bool,
}

/// An open file or device and what was found out about it.
pub(super) struct Disk {
    pub(super) path: PathBuf,
    /// Holds the lock.
    pub(super) file: Arc<File>,
    pub(super) info: VolumeInfo,
    /// Where the file ended when it was opened, in bytes: within the last block if that was not whole.
    pub(super) end: u64,
    pub(super) is_device: bool,
    /// What direct I/O demands; `None`: buffered.
    pub(super) direct: Option<Direct>,
    pub(super) zeroing: Zeroing,
    pub(super) zeroes: Arc<Pages>,
    pub(super) lost_writes: AtomicBool,
}

impl FileVolume {
    /// Opens or creates a file.
    ///
    /// # Errors
    /// What is wrong with the path or the options, and what to do about it.
    pub fn open(path: impl AsRef<Path>, options: FileOptions) -> Result<FileVolume, OpenError> {
        open::open_file(path.as_ref(), options).map(FileVolume::new)
    }

    /// Opens a block device. One that is mounted, or in use by another program that says so, is refused unless it is
    /// opened read-only.
    ///
    /// # Errors
    /// What is wrong with the path or the options, and what to do about it.
    pub fn open_block(path: impl AsRef<Path>, options: BlockOptions) -> Result<FileVolume, OpenError> {
        open::open_block(path.as_ref(), options).map(FileVolume::new)
    }

    /// Whether transfers bypass the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.disk.direct.is_some()
    }

    /// Whether the file was created when it was opened: then it reads as zeroes everywhere.
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    fn new(opened: open::Opened) -> FileVolume {
        let open::Opened { path, file, info, end, is_device, is_new, direct, zeroing } = opened;
        let (zeroes, lost_writes) = (zero_pages(), AtomicBool::new(false));
        let file = Arc::new(file);
        FileVolume {
            disk: Arc::new(Disk { path, file, info, end, is_device, direct, zeroing, zeroes, lost_writes }),
            is_new,
        }
    }
}

impl Volume for FileVolume {
    fn info(&self) -> VolumeInfo {
        self.disk.info.clone()
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let engine = EngineCore::from_core(core).ok_or(IoError::Unsupported)?;
        let file = self.disk.reopen();
        Ok(Box::new(FileChannel::new(&self.disk, file, &engine, core, depth, waker)))
    }
}

impl Disk {
    /// The file opened once more, for one channel; the very same where that is impossible, as without `/proc` or
    /// after the process has given up its rights.
    fn reopen(&self) -> Arc<File> {
        let again = Path::new("/proc/self/fd").join(self.file.as_raw_fd().to_string());
        let opened = open::open_plain(&again, self.info.read_only).and_then(|file| {
            if self.direct.is_some() {
                super::kernel::set_direct(&file)?;
            }
            Ok(file)
        });
        opened.map_or_else(|_| self.file.clone(), Arc::new)
    }

    /// Whether writes that completed are known to be lost.
    pub(super) fn has_lost_writes(&self) -> bool {
        self.lost_writes.load(Ordering::Acquire)
    }

    /// The system could not make completed writes stable.
    pub(super) fn note_lost_writes(&self, errno: i32) {
        if !self.lost_writes.swap(true, Ordering::AcqRel) {
            let error = std::io::Error::from_raw_os_error(errno);
            tracing::error!(
                "{}: completed writes may be lost: {error}; flushes fail until it is opened again",
                self.path.display()
            );
        }
    }
}
