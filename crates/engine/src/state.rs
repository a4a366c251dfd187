//! State that survives a restart, one file for each: persistent reservations of a volume (APTPL),
//! and settings of an AoE disk.
//!
//! ```text
//!   DIRECTORY/volume-UUID.reservations    length u16 | identity | image of the reservations
//!   DIRECTORY/volume-UUID.lock            locked by the process that has the volume's reservations
//!   DIRECTORY/e7.3.aoe, e7.3.lock         AoE disk e7.3: image of the disk's settings, and lock
//! ```
//!
//! Nothing is created before the first save. A thread then writes each image to a new file, flushes
//! it, renames it over the old one, and flushes the directory. If several images wait to be
//! written, only the last one is.

use crate::file::lock_exclusive;
use blockmux_proto::volume_state::{ReservationStore, SaveTicket};
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use tracing::warn;

/// Saves the image of one volume's reservations, or of one disk's settings, to a file.
pub struct StateFile {
    shared: Arc<FileState>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// Why saved state cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A system call failed.
    #[error("{}: {error}; check its owner and permissions", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// Other users may write the file or directory, and so could change reservations.
    #[error("{}: others may write it; run chmod go-w on it, or name another directory", path.display())]
    Exposed {
        /// The file or directory.
        path: PathBuf,
    },
    /// Another user owns the file or directory, and so could change reservations.
    #[error("{}: belongs to another user; run as that user, change its owner with chown, or name another directory", path.display())]
    NotOurs {
        /// The file or directory.
        path: PathBuf,
    },
    /// Another process holds the lock.
    #[error("{}: is locked by another blockmux; stop it, or give one of them another directory", path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
    },
    /// The file has another format or belongs to another volume.
    #[error("{}: is not the saved state of this volume; move it away to serve the volume without saved reservations", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
    },
}

impl StateFile {
    /// Opens the state of the volume with that UUID; returns it with the saved image, empty if
    /// there is none.
    ///
    /// # Errors
    /// If there is an image that cannot be used.
    pub fn open(directory: &Path, uuid: &str) -> Result<(Arc<StateFile>, Vec<u8>), StateError> {
        StateFile::open_named(directory, &format!("volume-{uuid}"), "reservations", uuid)
    }

    /// Opens the state with that name and extension; returns it with the saved image, empty if
    /// there is none.
    ///
    /// # Errors
    /// As for [`StateFile::open`].
    pub fn open_named(
        directory: &Path,
        name: &str,
        extension: &str,
        identity: &str,
    ) -> Result<(Arc<StateFile>, Vec<u8>), StateError> {
        let paths = StatePaths::new(directory, name, extension, identity);
        let (lock, image) = match paths.read()? {
            Some((lock, image)) => (Some(lock), image),
            None => (None, Vec::new()),
        };
        let shared = FileState { paths, state: Mutex::default(), changed: Condvar::new() };
        shared.state().lock = lock;
        let file = StateFile { shared: Arc::new(shared), writer: Mutex::default() };
        Ok((Arc::new(file), image))
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.shared.paths.file
    }
}

/// Checks that state can be saved in this directory, which need not exist: it is created at the
/// first save.
///
/// # Errors
/// If the path is no directory, cannot be created, or may be written by other users.
pub fn check_directory(directory: &Path) -> Result<(), StateError> {
    let absolute = std::path::absolute(directory).map_err(at(directory))?;
    for ancestor in absolute.ancestors() {
        match fs::metadata(ancestor) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(at(ancestor)(error)),
            Ok(metadata) if !metadata.is_dir() => return Err(at(ancestor)(ErrorKind::NotADirectory.into())),
            Ok(metadata) if ancestor == absolute => return check_private(ancestor, &metadata),
            Ok(_) => break,
        }
    }
    Ok(())
}

impl ReservationStore for StateFile {
    fn save(&self, image: &[u8]) -> SaveTicket {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.shared.state();
        state.last += 1;
        let ticket = state.last;
        state.pending = Some((ticket, image.to_vec()));
        if writer.is_none() {
            let shared = self.shared.clone();
            match thread::Builder::new().name("state".to_owned()).spawn(move || shared.write_all()) {
                Ok(handle) => *writer = Some(handle),
                Err(error) => {
                    warn!("{}: cannot be saved: {error}", self.path().display());
                    (state.pending, state.failed) = (None, ticket);
                }
            }
        }
        self.shared.changed.notify_one();
        SaveTicket(ticket)
    }

    fn is_saved(&self, ticket: SaveTicket) -> Option<bool> {
        let state = self.shared.state();
        match ticket.0 {
            ticket if ticket <= state.saved => Some(true),
            ticket if ticket <= state.failed => Some(false),
            _ => None,
        }
    }
}

impl Drop for StateFile {
    fn drop(&mut self) {
        self.shared.state().is_over = true;
        self.shared.changed.notify_one();
        let writer = self.writer.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(writer) = writer.take() {
            // The thread only exits; it has logged its errors.
            let _ = writer.join();
        }
    }
}

/// State shared with the writer thread.
struct FileState {
    paths: StatePaths,
    state: Mutex<WriterState>,
    changed: Condvar,
}

#[derive(Default)]
struct WriterState {
    last: u64,
    pending: Option<(u64, Vec<u8>)>,
    /// Last ticket whose image, or a later one, is on disk.
    saved: u64,
    failed: u64,
    is_over: bool,
    /// Held as long as the process owns the volume's reservations.
    lock: Option<File>,
}

impl FileState {
    fn state(&self) -> MutexGuard<'_, WriterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Body of the writer thread.
    fn write_all(&self) {
        let mut state = self.state();
        loop {
            if let Some((ticket, image)) = state.pending.take() {
                let lock = state.lock.take();
                drop(state);
                let (lock, written) = match lock.map_or_else(|| self.paths.take_lock(), Ok) {
                    Ok(lock) => (Some(lock), self.paths.write(&image)),
                    Err(error) => (None, Err(error)),
                };
                state = self.state();
                state.lock = lock;
                match written {
                    Ok(()) => state.saved = ticket,
                    Err(error) => {
                        warn!("not saved: {error}");
                        state.failed = ticket;
                    }
                }
            } else if state.is_over {
                return;
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// Paths of one state file.
struct StatePaths {
    directory: PathBuf,
    file: PathBuf,
    new_file: PathBuf,
    lock: PathBuf,
    identity: String,
}

impl StatePaths {
    fn new(directory: &Path, name: &str, extension: &str, identity: &str) -> StatePaths {
        let file = |extension: &str| directory.join(format!("{name}.{extension}"));
        StatePaths {
            directory: directory.to_owned(),
            file: file(extension),
            new_file: file("new"),
            lock: file("lock"),
            identity: identity.to_owned(),
        }
    }

    /// The saved image with the lock; `None` if there is no image.
    fn read(&self) -> Result<Option<(File, Vec<u8>)>, StateError> {
        if !exists(&self.file)? {
            return Ok(None);
        }
        check_private(&self.directory, &fs::metadata(&self.directory).map_err(at(&self.directory))?)?;
        let lock = self.take_lock()?;
        let file = options(false).open(&self.file).map_err(at(&self.file))?;
        let metadata = file.metadata().map_err(at(&self.file))?;
        check_private(&self.file, &metadata)?;
        let mut bytes = Vec::new();
        file.take(MAX_FILE).read_to_end(&mut bytes).map_err(at(&self.file))?;
        let header = self.header();
        match bytes.strip_prefix(&header[..]) {
            Some(image) if metadata.is_file() && metadata.len() < MAX_FILE => {
                Ok(Some((lock, image.to_vec())))
            }
            _ => Err(StateError::Foreign { path: self.file.clone() }),
        }
    }

    /// Replaces the saved image; an empty image deletes the file.
    fn write(&self, image: &[u8]) -> Result<(), StateError> {
        if image.is_empty() {
            match fs::remove_file(&self.file) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                removed => removed.map_err(at(&self.file))?,
            }
            return flush(&self.directory);
        }
        let mut file = options(true).truncate(true).open(&self.new_file).map_err(at(&self.new_file))?;
        let written = file.write_all(&self.header()).and_then(|()| file.write_all(image));
        written.and_then(|()| file.sync_all()).map_err(at(&self.new_file))?;
        fs::rename(&self.new_file, &self.file).map_err(at(&self.file))?;
        flush(&self.directory)
    }

    fn header(&self) -> Vec<u8> {
        let identity = self.identity.as_bytes();
        let len = u16::try_from(identity.len()).unwrap_or(u16::MAX);
        [&len.to_be_bytes(), &identity[..len.into()]].concat()
    }

    /// Creates the directory if necessary and locks the state against other processes.
    fn take_lock(&self) -> Result<File, StateError> {
        make_directory(&self.directory)?;
        check_private(&self.directory, &fs::metadata(&self.directory).map_err(at(&self.directory))?)?;
        let lock = options(true).open(&self.lock).map_err(at(&self.lock))?;
        lock_exclusive(&lock).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => StateError::Locked { path: self.lock.clone() },
            _ => StateError::Io { path: self.lock.clone(), error },
        })?;
        Ok(lock)
    }
}

/// Creates a private directory and its missing parents, and flushes each parent.
fn make_directory(path: &Path) -> Result<(), StateError> {
    let missing: Vec<&Path> = path.ancestors().take_while(|ancestor| !ancestor.exists()).collect();
    for directory in missing.into_iter().rev().filter(|directory| !directory.as_os_str().is_empty()) {
        match DirBuilder::new().mode(0o700).create(directory) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(at(directory)(error)),
            _ => {}
        }
        let above = directory.parent().filter(|above| !above.as_os_str().is_empty());
        flush(above.unwrap_or(Path::new(".")))?;
    }
    Ok(())
}

/// Open options that follow no symbolic link and block on no FIFO; new files are private.
fn options(writes: bool) -> fs::OpenOptions {
    let mut options = File::options();
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    options.read(true).write(writes).create(writes).mode(0o600).custom_flags(flags);
    options
}

/// Sets the user that this process will switch to after opening everything. Files of this user
/// count as the process's own.
pub fn set_service_user(user: u32) {
    SERVICE_USER.get_or_init(|| user);
}

static SERVICE_USER: OnceLock<u32> = OnceLock::new();

fn check_private(path: &Path, metadata: &fs::Metadata) -> Result<(), StateError> {
    let own = fs::metadata("/proc/self").map_err(at(path))?.uid();
    let is_ours = |owner| owner == own || owner == ROOT || SERVICE_USER.get() == Some(&owner);
    if !is_ours(metadata.uid()) {
        return Err(StateError::NotOurs { path: path.to_owned() });
    }
    if metadata.mode() & OTHERS_WRITE != 0 {
        return Err(StateError::Exposed { path: path.to_owned() });
    }
    Ok(())
}

fn exists(path: &Path) -> Result<bool, StateError> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(at(path)(error)),
    }
}

fn flush(directory: &Path) -> Result<(), StateError> {
    File::open(directory).and_then(|opened| opened.sync_all()).map_err(at(directory))
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> StateError {
    |error| StateError::Io { path: path.to_owned(), error }
}

/// Write permission of group and others.
const OTHERS_WRITE: u32 = 0o022;
const ROOT: u32 = 0;
/// Maximum length of a file, in bytes; 1,024 registrations with names of 600 bytes need less.
const MAX_FILE: u64 = 2 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use tempfile::TempDir;

    fn open(directory: &Path) -> Result<(Arc<StateFile>, Vec<u8>), String> {
        StateFile::open(directory, "uuid").map_err(|error| error.to_string())
    }

    fn save(file: &StateFile, image: &[u8]) -> bool {
        let ticket = file.save(image);
        loop {
            match file.is_saved(ticket) {
                Some(saved) => return saved,
                None => thread::yield_now(),
            }
        }
    }

    fn kept() -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("a/state");
        let (file, image) = open(&directory).unwrap();
        assert!(image.is_empty() && !directory.exists(), "nothing is created before the first save");
        assert!(save(&file, b"first") && save(&file, b"second"));
        let path = file.path().to_owned();
        (dir, path)
    }

    #[test]
    fn the_last_image_is_restored_and_an_empty_one_deletes_the_file() {
        let (_dir, path) = kept();
        let directory = path.parent().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(directory), mode(&path)), (0o700, 0o600));
        let (file, image) = open(directory).unwrap();
        assert_eq!(image, b"second");
        assert!(StateFile::open(directory, "other").unwrap().1.is_empty());
        assert!(save(&file, b""));
        assert!(!path.exists());
        drop(file);
        assert!(open(directory).unwrap().1.is_empty());
    }

    #[test]
    fn an_unusable_directory_is_found_before_anything_is_saved() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"").unwrap();
        let error = |path: &Path| check_directory(path).unwrap_err().to_string();
        for path in [file.clone(), file.join("state")] {
            assert!(error(&path).starts_with(&format!("{}", file.display())), "{}", error(&path));
        }
        assert!(check_directory(&dir.path().join("a/b")).is_ok() && !dir.path().join("a").exists());
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(error(dir.path()).contains("others may write it"));
    }

    #[test]
    fn two_processes_cannot_both_have_the_reservations_of_one_volume() {
        let (_dir, path) = kept();
        let directory = path.parent().unwrap();
        let (first, _) = open(directory).unwrap();
        let error = open(directory).map(|_| ()).unwrap_err();
        assert!(error.contains("is locked by another blockmux"), "{error}");
        assert!(save(&first, b""));
        // Without a saved image the conflict is only found at the first save.
        let (second, image) = open(directory).unwrap();
        assert!(image.is_empty() && !save(&second, b"third"));
        drop(first);
        assert!(save(&second, b"fourth"));
    }

    #[test]
    fn state_that_others_may_write_and_state_of_another_volume_are_refused() {
        let (_dir, path) = kept();
        let directory = path.parent().unwrap();
        let refused = || open(directory).map(|_| ()).unwrap_err();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o620)).unwrap();
        assert!(refused().contains("others may write it"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::set_permissions(directory, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(refused().contains("others may write it"));
        fs::set_permissions(directory, fs::Permissions::from_mode(0o700)).unwrap();
        let content = fs::read(&path).unwrap();
        for wrong in [&b""[..], &content[1..], b"\0\x04uuiD"] {
            fs::write(&path, wrong).unwrap();
            assert!(refused().contains("is not the saved state of this volume"));
        }
        let elsewhere = directory.join("elsewhere");
        fs::write(&elsewhere, content).unwrap();
        fs::remove_file(&path).unwrap();
        symlink(&elsewhere, &path).unwrap();
        assert!(refused().contains("volume-"), "{}", refused());
    }

    #[test]
    fn state_of_another_user_is_refused() {
        let (_dir, path) = kept();
        let directory = path.parent().unwrap();
        let give = |path: &Path, owner: u32| chown(path, Some(owner), None);
        for entry in [path.as_path(), directory] {
            if give(entry, NOBODY).is_err() {
                // Only root can change a file's owner.
                return;
            }
            let error = open(directory).map(|_| ()).unwrap_err();
            assert!(error.starts_with(&format!("{}: belongs to another user", entry.display())), "{error}");
            give(entry, ROOT).unwrap();
        }
        assert!(open(directory).is_ok());
        give(directory, NOBODY).unwrap();
        assert!(matches!(check_directory(directory), Err(StateError::NotOurs { .. })));
    }

    const NOBODY: u32 = 65534;

    #[test]
    fn a_failed_save_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let in_the_way = dir.path().join("file");
        fs::write(&in_the_way, "").unwrap();
        let (file, _) = open(&in_the_way.join("state")).unwrap();
        assert!(!save(&file, b"image"));
    }
}
