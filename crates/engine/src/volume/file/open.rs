//! Opens a path as a volume: locks, sizes and probes the file, or returns an error that says what
//! to do.

use super::kernel;
use super::probe::{DirectAlignment, QueueLimits, Zeroing, file_block};
use super::qemu_locks;
use crate::sys::safe_path;
use blockmux_volume::{BlockSizes, SmallBlock, VolumeInfo};
use rustix::fs::{FileType, Mode, OFlags};
use std::fs::{File, Permissions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Options for opening a file as a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileOptions {
    /// Size in bytes. A shorter file is extended by a hole; of a longer one only the beginning is
    /// served. `None`: the file's own size, rounded up to a whole block; the missing bytes of the
    /// last block read as zeroes, and a write of anything else there extends the file.
    pub size: Option<u64>,
    /// Permissions of a file that is created; `None`: only for its owner.
    pub mode: Option<u32>,
    /// Direct I/O; `None`: where the file system supports it in units of at most the logical block,
    /// and the file is whole blocks.
    pub direct: Option<bool>,
    /// Block sizes to present.
    pub blocks: BlockSizes,
    /// Read-only; other programs may write meanwhile.
    pub read_only: bool,
    /// Creates a file that does not exist, if `size` is given.
    pub create: bool,
}

/// Options for opening a block device as a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockOptions {
    /// Direct I/O; `None`: yes.
    pub direct: Option<bool>,
    /// Block sizes to present.
    pub blocks: BlockSizes,
    /// Read-only; other programs may use the device meanwhile.
    pub read_only: bool,
}

/// Why a file or device cannot be a volume, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file does not exist.
    #[error("file:{0}: does not exist; check its path, or create it as 'file:{0}?size=10g'")]
    Missing(PathBuf),
    /// The file and its directory do not exist.
    #[error("file:{0}: its directory does not exist; create that first, or name another path")]
    NoDirectory(PathBuf),
    /// The device does not exist.
    #[error("block:{0}: does not exist; lsblk lists the block devices")]
    MissingDevice(PathBuf),
    /// The path is a directory.
    #[error("file:{0}: is a directory; name a file in it")]
    Directory(PathBuf),
    /// The path given as a file is a block device.
    #[error("file:{0}: is a block device; use block:{0}")]
    IsDevice(PathBuf),
    /// The path given as a block device is a file.
    #[error("block:{0}: is not a block device; use file:{0}")]
    NotDevice(PathBuf),
    /// The path given as a block device is a pipe, a socket, a directory or a character device.
    #[error("block:{0}: is neither a block device nor a file; lsblk lists the block devices")]
    Neither(PathBuf),
    /// The path given as a file is a pipe, a socket or a character device.
    #[error("file:{0}: is not a regular file; name one, or use block: for a block device")]
    NotFile(PathBuf),
    /// The process lacks permission.
    #[error(
        "{0}: permission denied; run as a user who may read and write it, or give ?readonly=on if it may be read"
    )]
    Permission(PathBuf),
    /// The kernel refuses to open the device, although the file's permissions may allow it.
    #[error(
        "{0}: the kernel denies this process the device; allow it in the device list of the container or service, as by `docker run --device` or `DeviceAllow=`"
    )]
    DeviceDenied(PathBuf),
    /// The file system is mounted read-only, or the device is write-protected.
    #[error("{0}: is on a read-only file system or device; give ?readonly=on")]
    ReadOnly(PathBuf),
    /// Another process has locked the file.
    #[error(
        "{0}: is locked by another program, such as QEMU, qemu-nbd or another blockmux, or given twice; stop that program, or give ?readonly=on"
    )]
    Locked(PathBuf),
    /// The device is mounted or part of another device.
    #[error("block:{0}: is mounted or in use; unmount it, or give ?readonly=on")]
    InUse(PathBuf),
    /// The file or device has no bytes.
    #[error("{0}: is empty; give ?size=10g to extend a file")]
    Empty(PathBuf),
    /// The requested size is no multiple of the block size.
    #[error("file:{path}: size {size} is not a whole number of {block}-byte blocks; round it")]
    BadSize {
        /// The file.
        path: PathBuf,
        /// Requested size in bytes.
        size: u64,
        /// Block size in bytes.
        block: u32,
    },
    /// A file opened read-only is shorter than the requested size.
    #[error(
        "file:{path}: has {len} bytes and cannot be extended to {size} read-only; leave out the size or ?readonly=on"
    )]
    TooShort {
        /// The file.
        path: PathBuf,
        /// The file's length in bytes.
        len: u64,
        /// Requested size in bytes.
        size: u64,
    },
    /// A requested block size is too small.
    #[error("{path}: {reason}")]
    SmallBlock {
        /// The file or device.
        path: PathBuf,
        /// Which block size is too small, and what to write.
        reason: SmallBlock,
    },
    /// Direct I/O was requested and is not supported.
    #[error("{0}: its file system has no direct I/O that can be used; leave out ?direct=on")]
    NoDirect(PathBuf),
    /// A system call failed.
    #[error("{path}: cannot {action} it: {source}")]
    System {
        /// The file or device.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// An opened file or device with its probed properties.
pub(super) struct Opened {
    pub(super) path: PathBuf,
    pub(super) file: File,
    pub(super) info: VolumeInfo,
    /// End of the file in bytes, within the last block if that is partial.
    pub(super) end: u64,
    pub(super) is_device: bool,
    /// The file was created by this call.
    pub(super) is_new: bool,
    pub(super) direct: Option<DirectAlignment>,
    pub(super) zeroing: Zeroing,
}

/// Opens a file or device, and tries again for a moment if it is in use. Between `fork` and
/// `exec` a process that this one starts has all of its files, also one that is closed meanwhile.
pub(super) fn when_free(open: impl Fn() -> Result<Opened, OpenError>) -> Result<Opened, OpenError> {
    let deadline = Instant::now() + LONGEST_EXEC;
    loop {
        match open() {
            Err(OpenError::InUse(_) | OpenError::Locked(_)) if Instant::now() < deadline => {
                thread::park_timeout(EXEC_PAUSE);
            }
            opened => return opened,
        }
    }
}

/// No process needs longer for its `exec`, even if the machine has more to do than it can.
const LONGEST_EXEC: Duration = Duration::from_millis(300);
const EXEC_PAUSE: Duration = Duration::from_millis(10);

pub(super) fn open_file(path: &Path, options: FileOptions) -> Result<Opened, OpenError> {
    let failed = |action| move |source| system_error(path, action, source);
    let creates = match type_of(path) {
        Ok(FileType::Directory) => return Err(OpenError::Directory(path.into())),
        Ok(FileType::BlockDevice) => return Err(OpenError::IsDevice(path.into())),
        Ok(FileType::RegularFile) => false,
        Ok(_) => return Err(OpenError::NotFile(path.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        Err(error) => return Err(failed("examine")(error)),
    };
    if !creates {
        let file = open_plain(path, options.read_only).map_err(failed("open"))?;
        return prepare_file(path, file, options);
    }
    if !options.create || options.read_only || options.size.is_none() {
        return Err(OpenError::Missing(path.into()));
    }
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    let mode = Mode::from_raw_mode(options.mode.unwrap_or(PRIVATE));
    let file = safe_path::open(path, flags, mode).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => OpenError::NoDirectory(path.into()),
        _ => system_error(path, "create", error),
    })?;
    let created = file.metadata().map_err(failed("examine"))?;
    // A mode is meant as it is written, whatever the umask.
    let set = options.mode.map_or(Ok(()), |mode| file.set_permissions(Permissions::from_mode(mode)));
    let opened = set.map_err(failed("set the mode of")).and_then(|()| prepare_file(path, file, options));
    let opened = opened.and_then(|opened| {
        // The directory entry must be on stable storage, too.
        let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
        let folder = safe_path::open(folder, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty());
        folder.and_then(|folder| folder.sync_all()).map_err(failed("make stable"))?;
        Ok(Opened { is_new: true, ..opened })
    });
    // A process that has locked the file in the meantime uses it already.
    if opened.as_ref().is_err_and(|error| !matches!(error, OpenError::Locked(_))) {
        // Removes only the file that was just created; leaving it behind would be harmless.
        let _ =
            safe_path::remove(path, |found| found.st_dev == created.dev() && found.st_ino == created.ino());
    }
    opened
}

/// Locks, sizes and probes an open file.
fn prepare_file(path: &Path, file: File, options: FileOptions) -> Result<Opened, OpenError> {
    let failed = |action| move |source| system_error(path, action, source);
    lock(path, &file, options.read_only)?;
    let metadata = file.metadata().map_err(failed("examine"))?;
    let queue = QueueLimits::of(metadata.dev());
    let wanted = options.blocks.logical.unwrap_or(SMALL_BLOCK);
    // Direct I/O would make any other file longer with the first write to its last block.
    let is_whole = options.size.is_some() || metadata.len().is_multiple_of(wanted.into());
    let suits_all = |direct: &DirectAlignment| is_whole && direct.offset <= wanted;
    let direct = set_direct(path, &file, options.direct, DirectAlignment::of(&file, &queue), suits_all)?;
    let own = direct.map_or(SMALL_BLOCK, |direct| direct.offset.max(SMALL_BLOCK));
    options.blocks.check(own).map_err(|reason| OpenError::SmallBlock { path: path.into(), reason })?;
    let block = own.max(wanted);
    let size = match options.size {
        Some(size) if !size.is_multiple_of(block.into()) => {
            return Err(OpenError::BadSize { path: path.into(), size, block });
        }
        Some(size) => size,
        None => metadata.len().next_multiple_of(block.into()),
    };
    if size == 0 {
        return Err(OpenError::Empty(path.into()));
    }
    let extends = options.size.is_some() && size > metadata.len();
    if extends {
        if options.read_only {
            return Err(OpenError::TooShort { path: path.into(), len: metadata.len(), size });
        }
        file.set_len(size).and_then(|()| file.sync_all()).map_err(failed("extend"))?;
    }
    let zeroing = match options.read_only {
        true => Zeroing::default(),
        false => Zeroing::of_file(&file).map_err(failed("probe"))?,
    };
    let unit = file_block(&file).map_err(failed("examine"))?;
    let info = options.blocks.shape(VolumeInfo {
        logical_block: block,
        physical_block: unit.max(block),
        preferred_block: unit.max(block),
        read_only: options.read_only,
        write_cache: true,
        discard_granularity: if zeroing.punch { unit.max(block) } else { 0 },
        fast_zeroes: zeroing.punch,
        rotational: queue.is_rotational(),
        ..VolumeInfo::new(size)
    });
    let end = if extends { size } else { size.min(metadata.len()) };
    Ok(Opened { path: path.into(), file, info, end, is_device: false, is_new: false, direct, zeroing })
}

pub(super) fn open_block(path: &Path, options: BlockOptions) -> Result<Opened, OpenError> {
    let failed = |action| move |source| system_error(path, action, source);
    match type_of(path) {
        Ok(FileType::BlockDevice) => {}
        Ok(FileType::RegularFile) => return Err(OpenError::NotDevice(path.into())),
        Ok(_) => return Err(OpenError::Neither(path.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(OpenError::MissingDevice(path.into()));
        }
        Err(error) => return Err(failed("examine")(error)),
    }
    let mut file = match options.read_only {
        true => open_plain(path, true),
        // With `O_EXCL` the kernel refuses a device that is mounted or part of another one.
        false => safe_path::open(path, OFlags::RDWR | OFlags::EXCL, Mode::empty()),
    }
    .map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => OpenError::InUse(path.into()),
        _ => system_error(path, "open", error),
    })?;
    lock(path, &file, options.read_only)?;
    let queue = QueueLimits::of(file.metadata().map_err(failed("examine"))?.rdev());
    let (logical, physical) = kernel::block_sizes(&file).map_err(failed("query the block size of"))?;
    options.blocks.check(logical).map_err(|reason| OpenError::SmallBlock { path: path.into(), reason })?;
    let usable = DirectAlignment::of(&file, &queue).filter(|direct| direct.offset <= logical);
    let direct = set_direct(path, &file, options.direct, usable, |_| true)?;
    let len = file.seek(SeekFrom::End(0)).map_err(failed("measure"))?;
    let zeroing = if options.read_only { Zeroing::default() } else { Zeroing::of_device(&queue) };
    let granularity = queue.number("discard_granularity").map_or(0, |bytes| bytes as u32);
    let info = options.blocks.shape(VolumeInfo {
        logical_block: logical,
        physical_block: physical.max(logical),
        preferred_block: physical.max(logical),
        read_only: options.read_only,
        write_cache: direct.is_none() || !queue.writes_through(),
        discard_granularity: if zeroing.punch { granularity.max(logical) } else { 0 },
        fast_zeroes: zeroing.punch,
        rotational: queue.is_rotational(),
        ..VolumeInfo::new(len)
    });
    // The device may end within a block of the volume.
    let end = info.size;
    if end == 0 {
        return Err(OpenError::Empty(path.into()));
    }
    if end < len {
        let block = info.logical_block;
        tracing::warn!(
            "block:{}: its {len} bytes are not whole blocks of {block} bytes: only the first {end} are served",
            path.display()
        );
    }
    Ok(Opened { path: path.into(), file, info, end, is_device: true, is_new: false, direct, zeroing })
}

/// Opens an existing file or device without locking it.
pub(super) fn open_plain(path: &Path, read_only: bool) -> io::Result<File> {
    let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
    safe_path::open(path, access, Mode::empty())
}

fn type_of(path: &Path) -> io::Result<FileType> {
    Ok(FileType::from_raw_mode(safe_path::stat(path)?.st_mode))
}

/// Locks the file, since two processes that write the same blocks would corrupt each other's data.
fn lock(path: &Path, file: &File, read_only: bool) -> Result<(), OpenError> {
    if !read_only {
        kernel::lock_exclusive(file).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => OpenError::Locked(path.into()),
            _ => system_error(path, "lock", error),
        })?;
    }
    match qemu_locks::take(file, read_only) {
        Ok(true) => Ok(()),
        Ok(false) => Err(OpenError::Locked(path.into())),
        // A file system that does not support `flock` does not support QEMU's locks either.
        Err(error) => {
            tracing::debug!("{}: cannot take the locks that QEMU sees: {error}", path.display());
            Ok(())
        }
    }
}

/// Enables direct I/O if it was requested, or if nothing was requested and it `suits`.
fn set_direct(
    path: &Path,
    file: &File,
    asked: Option<bool>,
    possible: Option<DirectAlignment>,
    suits: impl Fn(&DirectAlignment) -> bool,
) -> Result<Option<DirectAlignment>, OpenError> {
    let chosen = match asked {
        Some(false) => None,
        Some(true) => possible,
        None => possible.filter(suits),
    };
    let set = chosen.filter(|_| kernel::set_direct(file).is_ok());
    if asked == Some(true) && set.is_none() {
        return Err(OpenError::NoDirect(path.into()));
    }
    Ok(set)
}

fn system_error(path: &Path, action: &'static str, source: io::Error) -> OpenError {
    match source.raw_os_error() {
        // Missing permissions are EACCES. A control group has a list of devices, for root, too.
        Some(libc::EPERM) if type_of(path).is_ok_and(|kind| kind == FileType::BlockDevice) => {
            OpenError::DeviceDenied(path.into())
        }
        Some(libc::EACCES | libc::EPERM) => OpenError::Permission(path.into()),
        Some(libc::EROFS) => OpenError::ReadOnly(path.into()),
        _ => OpenError::System { path: path.into(), action, source },
    }
}

/// Permissions of a created file: only for its owner.
const PRIVATE: u32 = 0o600;
/// Block size that every client supports, in bytes.
const SMALL_BLOCK: u32 = 512;

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: FileOptions = FileOptions {
        size: Some(1 << 20),
        mode: None,
        direct: None,
        blocks: OWN,
        read_only: false,
        create: true,
    };
    const OWN: BlockSizes = BlockSizes { logical: None, physical: None };

    fn refusal(path: &Path, options: FileOptions) -> String {
        open_file(path, options).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn an_error_names_the_path_and_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("x");
        assert!(
            refusal(&missing, FileOptions::default())
                .contains("/x: does not exist; check its path, or create it as ")
        );
        assert!(refusal(&folder.path().join("a/b"), NEW).contains("/a/b: its directory does not exist"));
        assert!(refusal(folder.path(), NEW).contains("is a directory"));
        assert!(refusal(Path::new("/dev/null"), NEW).contains("is not a regular file"));
        std::fs::write(&missing, b"").unwrap();
        assert!(refusal(&missing, FileOptions::default()).contains("is empty"));
        let odd = FileOptions { size: Some(1000), ..NEW };
        assert!(refusal(&missing, odd).contains("size 1000 is not a whole number of 512-byte blocks"));
        let frozen = FileOptions { read_only: true, ..NEW };
        assert!(refusal(&missing, frozen).contains("cannot be extended"));
        let not_device = open_block(&missing, BlockOptions::default()).map(|_| ()).unwrap_err();
        assert!(not_device.to_string().contains("use file:"));
        // An error that suggests `file:` would send the user back here.
        let neither = open_block(Path::new("/dev/null"), BlockOptions::default()).map(|_| ()).unwrap_err();
        assert!(!neither.to_string().contains("use file:"), "{neither}");
    }

    #[test]
    fn a_refused_size_leaves_no_file_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        refusal(&path, FileOptions { size: Some(1000), ..NEW });
        assert!(!path.exists());
    }

    #[test]
    fn a_created_file_is_private_unless_a_mode_is_given() {
        let folder = tempfile::tempdir().unwrap();
        for (name, mode, expected) in
            [("a", None, 0o600), ("b", Some(0o664), 0o664), ("c", Some(0o400), 0o400)]
        {
            let path = folder.path().join(name);
            open_file(&path, FileOptions { mode, ..NEW }).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, expected);
        }
        // An existing file keeps its mode.
        open_file(&folder.path().join("a"), FileOptions { mode: Some(0o666), ..NEW }).unwrap();
        assert_eq!(std::fs::metadata(folder.path().join("a")).unwrap().mode() & 0o7777, 0o600);
    }

    #[test]
    fn a_file_is_new_only_for_the_open_that_created_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        assert!(open_file(&path, NEW).unwrap().is_new);
        assert!(!open_file(&path, NEW).unwrap().is_new);
    }

    #[test]
    fn a_file_keeps_its_size_unless_a_larger_one_is_given() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let sizes = [(Some(1 << 20), 1 << 20), (None, 1 << 20), (Some(4096), 4096), (Some(2 << 20), 2 << 20)];
        for (size, served) in sizes {
            let opened = open_file(&path, FileOptions { size, ..NEW }).unwrap();
            assert_eq!(opened.info.size, served);
        }
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 << 20);
        std::fs::write(&path, [1; 1500]).unwrap();
        let opened = open_file(&path, FileOptions { direct: Some(false), ..FileOptions::default() }).unwrap();
        assert_eq!((opened.info.size, opened.end), (1536, 1500));
    }

    #[test]
    fn a_file_has_one_writer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let writer = open_file(&path, NEW).unwrap();
        assert!(refusal(&path, NEW).contains("is locked by another program"));
        open_file(&path, FileOptions { read_only: true, ..FileOptions::default() }).unwrap();
        drop(writer);
        open_file(&path, NEW).unwrap();
    }
}
