//! An open file or device: its size, and what happens to it while it is served.

use super::open;
use super::probe::{DirectAlignment, Zeroing};
use blockmux_volume::{Beyond, Io, Op, OpKind, Pages, ResizeError, Seg, SgList, VolumeInfo};
use std::fmt::Display;
use std::fs::{File, Metadata};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// An open file or device with its probed properties.
pub(super) struct Disk {
    pub(super) path: PathBuf,
    /// Holds the lock.
    pub(super) file: Arc<File>,
    /// Properties at opening; `extent` has the current size.
    pub(super) info: VolumeInfo,
    pub(super) extent: FileExtent,
    pub(super) is_device: bool,
    /// Alignment of direct I/O; `None`: buffered.
    pub(super) direct: Option<DirectAlignment>,
    pub(super) zeroing: Zeroing,
    pub(super) zeroes: Arc<Pages>,
    pub(super) lost_writes: AtomicBool,
    /// The path no longer leads to the file, and that was logged.
    pub(super) has_lost_path: AtomicBool,
}

/// The volume's current size: set by the control plane, read by channels with each request.
pub(super) struct FileExtent {
    size: AtomicU64,
    end: AtomicU64,
    /// Length to which another program has truncated the file while it was served, or
    /// [`NOT_TRUNCATED`].
    truncated_len: AtomicU64,
    /// Number of resizes by the operator.
    changes: AtomicU64,
    /// A write had data beyond `end`, in the partial last block, so that the file became longer.
    has_grown: AtomicBool,
}

/// Where the path of an open file or device leads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PathState {
    /// To what is open.
    Leads,
    LeadsElsewhere,
    LeadsNowhere,
}

impl Disk {
    /// Opens the file once more for one channel. Falls back to the same open file where that is
    /// impossible, such as without `/proc` or after the process has dropped its privileges.
    pub(super) fn reopen(&self) -> Arc<File> {
        let again = Path::new("/proc/self/fd").join(self.file.as_raw_fd().to_string());
        let opened = open::open_plain(&again, self.info.read_only).and_then(|file| {
            if self.direct.is_some() {
                super::kernel::set_direct(&file)?;
            }
            Ok(file)
        });
        opened.map_or_else(|_| self.file.clone(), Arc::new)
    }

    /// Length of the file or device, in bytes.
    pub(super) fn own_len(&self) -> io::Result<u64> {
        // The metadata of a device report length 0.
        (&*self.file).seek(SeekFrom::End(0))
    }

    /// Serves the whole file at its current length.
    pub(super) fn take_own_size(&self) -> Result<u64, ResizeError> {
        let len = self.own_len().map_err(failed("measure"))?;
        let block = self.info.logical_block;
        let size = len.next_multiple_of(block.into());
        if size == 0 {
            return Err(ResizeError::BadSize { size, block });
        }
        self.extent.set(size, len);
        Ok(size)
    }

    /// Truncates or extends the file. If only its beginning is served, the rest of the file is
    /// kept.
    pub(super) fn resize(&self, size: u64, beyond: Beyond) -> Result<u64, ResizeError> {
        let block = self.info.logical_block;
        if self.info.read_only {
            return Err(ResizeError::ReadOnly);
        }
        if size == 0 || !size.is_multiple_of(block.into()) {
            return Err(ResizeError::BadSize { size, block });
        }
        let (was, len) = (self.extent.size(), self.own_len().map_err(failed("measure"))?);
        beyond.check(was, size)?;
        let is_truncated = beyond == Beyond::Discard && size < was && len <= was;
        if is_truncated {
            // Requests that start from now on must not go beyond the new end.
            self.extent.set(size, size);
        }
        if size > len || is_truncated {
            let changed = self.file.set_len(size).and_then(|()| self.file.sync_all());
            if let Err(error) = changed {
                match self.own_len() {
                    // Also a file that has become longer is served as before.
                    Ok(now) if now >= len => self.extent.set(was, was.min(now)),
                    _ => drop(self.take_own_size()),
                }
                return Err(failed("resize")(error));
            }
        }
        self.extent.set(size, size);
        Ok(size)
    }

    /// Checks whether another program has truncated the file. Writes check first: a write beyond
    /// the new end would extend the file by a hole, and reads would return its zeroes as data.
    pub(super) fn check_for_truncation(&self, file: &File) {
        if self.is_device {
            return;
        }
        // A resize may run concurrently; the file is never shorter than both recorded ends.
        let (changes, before) = (self.extent.changes(), self.extent.end());
        let Some(len) = super::kernel::cached_len(file) else { return };
        if len < before.min(self.extent.end()) && self.extent.mark_truncated(len, changes) {
            tracing::error!(
                "{}: another program has truncated it to {len} bytes while it is served: I/O beyond that fails; accept the new size \
                 with 'blockmux ctl resize NAME', or restore the old one with 'blockmux ctl resize NAME SIZE'; without a control \
                 socket, detach or stop, and start again",
                self.path.display()
            );
        }
    }

    /// Where the path leads now; `None` if this process lacks permission to find out.
    pub(super) fn path_state(&self) -> Option<PathState> {
        let own = self.file.metadata().ok()?;
        let is_same = |found: &Metadata| match self.is_device {
            true => found.file_type().is_block_device() && found.rdev() == own.rdev(),
            false => (found.dev(), found.ino()) == (own.dev(), own.ino()),
        };
        match std::fs::metadata(&self.path) {
            Ok(found) if is_same(&found) => Some(PathState::Leads),
            Ok(_) => Some(PathState::LeadsElsewhere),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Some(PathState::LeadsNowhere),
            Err(_) => None,
        }
    }

    /// Warns once if the path no longer names the open file, so that clients' writes would be lost.
    pub(super) fn check_path(&self) {
        let what = match self.path_state() {
            Some(PathState::LeadsElsewhere) => "names another file now",
            Some(PathState::LeadsNowhere) => "was deleted or renamed",
            Some(PathState::Leads) | None => return,
        };
        if self.has_lost_path.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::warn!(
            "{}: {what}: clients still read and write the file that was opened; copy it from the daemon with 'blockmux copy' \
             if it is needed, then restart the daemon or remove and add the volume",
            self.path.display()
        );
    }

    /// How many bytes of a write or of zeroes go to the file: zeroes beyond the end of a partial
    /// last block do not, because it reads as zeroes there, so that the file keeps its length.
    #[inline]
    pub(super) fn len_to_write(&self, io: &Io) -> u64 {
        if io.offset + io.len <= self.extent.end() { io.len } else { self.len_in_last_block(io) }
    }

    #[cold]
    pub(super) fn len_in_last_block(&self, io: &Io) -> u64 {
        let end = self.extent.end();
        let (len, beyond) = (end.saturating_sub(io.offset), (io.offset + io.len).saturating_sub(end));
        // Direct I/O is in whole blocks. A resize may run concurrently.
        let is_partial = len > 0 && beyond < self.info.logical_block.into() && self.direct.is_none();
        if !is_partial || self.extent.has_grown.load(Ordering::Acquire) {
            return io.len;
        }
        match (io.op, &io.data) {
            (Op::WriteZeroes { .. }, _) => len,
            (Op::Write { .. }, Some(data)) if is_zero(&data.slice(len as usize, beyond as usize)) => len,
            (Op::Write { .. }, _) => {
                self.extent.has_grown.store(true, Ordering::Release);
                io.len
            }
            _ => io.len,
        }
    }

    /// Whether the kernel alone can move the request's data to or from a registered buffer: the
    /// bytes of a bounce buffer and of a partial last block are this process's work.
    #[inline]
    pub(super) fn can_use_registered(&self, io: &Io) -> bool {
        let is_aligned = match (&self.direct, &io.data) {
            (Some(direct), Some(data)) => direct.can_use(data),
            _ => true,
        };
        is_aligned && io.offset + io.len <= self.extent.end()
    }

    /// Whether completed writes are known to be lost.
    pub(super) fn has_lost_writes(&self) -> bool {
        self.lost_writes.load(Ordering::Acquire)
    }

    /// Logs that the device failed a request of `length` bytes, so that the operator notices, not
    /// only the client.
    #[cold]
    pub(super) fn note_failure(&self, op: Op, offset: u64, length: u64, why: &dyn Display) {
        let (path, what) = (self.path.display(), OpKind::of(op).name());
        // The log's rate limit compares lines up to the first of these numbers.
        tracing::warn!(offset, length, "{path}: {what} failed: {why}");
    }

    /// Logs and records that the system failed to write back completed writes.
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

impl FileExtent {
    pub(super) fn new(size: u64, end: u64) -> FileExtent {
        FileExtent {
            size: AtomicU64::new(size),
            end: AtomicU64::new(end),
            truncated_len: AtomicU64::new(NOT_TRUNCATED),
            changes: AtomicU64::new(0),
            has_grown: AtomicBool::new(false),
        }
    }

    /// Size in bytes, a whole number of blocks.
    #[inline]
    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// End of the file in bytes when it was last checked, within the last block if that is partial.
    #[inline]
    pub(super) fn end(&self) -> u64 {
        self.end.load(Ordering::Acquire)
    }

    /// Sets size and end. A request that was checked against the old size may meet the end of the
    /// file.
    pub(super) fn set(&self, size: u64, end: u64) {
        self.has_grown.store(false, Ordering::Release);
        self.end.store(end, Ordering::Release);
        self.size.store(size, Ordering::Release);
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.truncated_len.store(NOT_TRUNCATED, Ordering::Release);
    }

    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Marks the file as truncated; returns whether that is new. `changes` is the number of resizes
    /// at the check: if the operator has resized since, the result is outdated and ignored.
    pub(super) fn mark_truncated(&self, len: u64, changes: u64) -> bool {
        let was = self.truncated_len.fetch_min(len, Ordering::AcqRel);
        if self.changes() != changes {
            self.truncated_len.store(NOT_TRUNCATED, Ordering::Release);
            return false;
        }
        was == NOT_TRUNCATED
    }

    /// Whether bytes before `end` were truncated, which are lost until the volume is resized.
    #[inline]
    pub(super) fn is_truncated_before(&self, end: u64) -> bool {
        end > self.truncated_len.load(Ordering::Acquire)
    }
}

/// Greater than any file's length.
const NOT_TRUNCATED: u64 = u64::MAX;

/// Whether all bytes are zeroes; those of a registered buffer are not known to be.
fn is_zero(data: &SgList) -> bool {
    !data.segs().iter().any(Seg::is_registered) && data.to_vec().iter().all(|byte| *byte == 0)
}

fn failed(action: &'static str) -> impl Fn(io::Error) -> ResizeError {
    move |source| ResizeError::System { action, source }
}
