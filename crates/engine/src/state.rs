//! What a daemon remembers over a restart: the reservations of a volume that are to outlive it, and
//! what initiators have set on a disk of AoE. One file for each.
//!
//! ```text
//! DIRECTORY/volume-UUID.reservations    length u16 | identity | image, as `Served` makes it
//! DIRECTORY/volume-UUID.lock            locked by the process that has the volume's reservations
//! DIRECTORY/e7.3.aoe, e7.3.lock         the same of a disk, as `Kept` makes it
//! ```
//! Nothing is created until somebody wants something to be kept. From then on a thread writes each
//! image to a new file, flushes it, gives it the name of the old one, and flushes the directory.
//! Only the last image counts, so that of several that wait for the disk only that is written.

use crate::file::lock_exclusive;
use blockmux_proto::volume_state::{ReservationStore, SaveTicket};
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use tracing::warn;

/// Keeps the image of one volume's reservations, or of one disk's settings, in a file.
pub struct StateFile {
    shared: Arc<Shared>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// Why what was kept cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The system says no.
    #[error("{}: {error}; check its owner and permissions", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// Somebody else could say who is kept out.
    #[error("{}: others may write it; run chmod go-w on it, or name another directory", path.display())]
    Exposed {
        /// The file or directory.
        path: PathBuf,
    },
    /// Whoever it belongs to could say who is kept out.
    #[error("{}: is somebody else's; make it your own, with chown, or name another directory", path.display())]
    NotOurs {
        /// The file or directory.
        path: PathBuf,
    },
    /// Another process has it.
    #[error("{}: another blockmux keeps this; stop it, or give one of them another directory", path.display())]
    Locked {
        /// The lock.
        path: PathBuf,
    },
    /// It is no file of ours, or not one of this volume.
    #[error("{}: is not what was kept of this volume; move it away to serve the volume without", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
    },
}

impl StateFile {
    /// The reservations of the volume with that UUID, and what was kept of them: empty if nothing
    /// was.
    ///
    /// # Errors
    /// If something was kept that cannot be used.
    pub fn open(directory: &Path, uuid: &str) -> Result<(Arc<StateFile>, Vec<u8>), StateError> {
        StateFile::open_named(directory, &format!("volume-{uuid}"), "reservations", uuid)
    }

    /// What is kept under a name and an extension, and what was kept there before: empty if nothing
    /// was.
    ///
    /// # Errors
    /// As for [`StateFile::open`].
    pub fn open_named(
        directory: &Path,
        name: &str,
        extension: &str,
        identity: &str,
    ) -> Result<(Arc<StateFile>, Vec<u8>), StateError> {
        let place = Place::new(directory, name, extension, identity);
        let (lock, image) = match place.read()? {
            Some((lock, image)) => (Some(lock), image),
            None => (None, Vec::new()),
        };
        let shared = Shared { place, state: Mutex::default(), changed: Condvar::new() };
        shared.state().lock = lock;
        let file = StateFile { shared: Arc::new(shared), writer: Mutex::default() };
        Ok((Arc::new(file), image))
    }

    /// Where it is kept.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.shared.place.file
    }
}

/// Whether reservations can be kept in this directory, which need not exist yet: nothing is made
/// before it is needed.
///
/// # Errors
/// If it is something else, cannot be made, or others may write it.
pub fn check_directory(directory: &Path) -> Result<(), StateError> {
    let absolute = std::path::absolute(directory).map_err(at(directory))?;
    for place in absolute.ancestors() {
        match fs::metadata(place) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(at(place)(error)),
            Ok(metadata) if !metadata.is_dir() => return Err(at(place)(ErrorKind::NotADirectory.into())),
            Ok(metadata) if place == absolute => return check_private(place, &metadata),
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
                    warn!("{}: cannot be kept: {error}", self.path().display());
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
            // It only ends; what it had to say it has said.
            let _ = writer.join();
        }
    }
}

/// What the writer and those who want something kept share.
struct Shared {
    place: Place,
    state: Mutex<WriterState>,
    changed: Condvar,
}

#[derive(Default)]
struct WriterState {
    last: u64,
    pending: Option<(u64, Vec<u8>)>,
    /// Everything up to this ticket is kept, or was replaced by something later that is.
    saved: u64,
    failed: u64,
    is_over: bool,
    /// Held for as long as the process has the volume's reservations.
    lock: Option<File>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, WriterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The writer's life.
    fn write_all(&self) {
        let mut state = self.state();
        loop {
            if let Some((ticket, image)) = state.pending.take() {
                let lock = state.lock.take();
                drop(state);
                let (lock, written) = match lock.map_or_else(|| self.place.take_lock(), Ok) {
                    Ok(lock) => (Some(lock), self.place.write(&image)),
                    Err(error) => (None, Err(error)),
                };
                state = self.state();
                state.lock = lock;
                match written {
                    Ok(()) => state.saved = ticket,
                    Err(error) => {
                        warn!("not kept: {error}");
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

/// Where one volume's reservations are.
struct Place {
    directory: PathBuf,
    file: PathBuf,
    new_file: PathBuf,
    lock: PathBuf,
    identity: String,
}

impl Place {
    fn new(directory: &Path, name: &str, extension: &str, identity: &str) -> Place {
        let file = |extension: &str| directory.join(format!("{name}.{extension}"));
        Place {
            directory: directory.to_owned(),
            file: file(extension),
            new_file: file("new"),
            lock: file("lock"),
            identity: identity.to_owned(),
        }
    }

    /// What is kept, with the lock; `None` if nothing is.
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

    /// Replaces what is kept; an empty image keeps nothing.
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

    /// Makes the directory if there is none, and sees to it that no other process has the
    /// reservations.
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

/// Makes a directory for nobody else, and those above it that are missing, and keeps their names on
/// the disk.
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

/// Opens nothing that somebody else has put there in place of a file, and makes files for nobody
/// else.
fn options(writes: bool) -> fs::OpenOptions {
    let mut options = File::options();
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    options.read(true).write(writes).create(writes).mode(0o600).custom_flags(flags);
    options
}

fn check_private(path: &Path, metadata: &fs::Metadata) -> Result<(), StateError> {
    let own = fs::metadata("/proc/self").map_err(at(path))?.uid();
    if metadata.uid() != own && metadata.uid() != ROOT {
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

/// Group and others.
const OTHERS_WRITE: u32 = 0o022;
const ROOT: u32 = 0;
/// More than the longest file, in bytes: 1,024 registrations with names of 600 bytes.
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
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("a/state");
        let (file, image) = open(&directory).unwrap();
        assert!(image.is_empty() && !directory.exists(), "nothing is made before it is needed");
        assert!(save(&file, b"first") && save(&file, b"second"));
        let path = file.path().to_owned();
        (place, path)
    }

    #[test]
    fn the_last_image_comes_back_and_an_empty_one_leaves_nothing() {
        let (_place, path) = kept();
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
    fn where_nothing_can_be_kept_is_known_before_anything_is_to_be() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("file");
        fs::write(&file, b"").unwrap();
        let error = |path: &Path| check_directory(path).unwrap_err().to_string();
        for path in [file.clone(), file.join("state")] {
            assert!(error(&path).starts_with(&format!("{}", file.display())), "{}", error(&path));
        }
        assert!(check_directory(&place.path().join("a/b")).is_ok() && !place.path().join("a").exists());
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(error(place.path()).contains("others may write it"));
    }

    #[test]
    fn two_processes_do_not_have_one_volume_s_reservations() {
        let (_place, path) = kept();
        let directory = path.parent().unwrap();
        let (first, _) = open(directory).unwrap();
        let error = open(directory).map(|_| ()).unwrap_err();
        assert!(error.contains("another blockmux keeps this"), "{error}");
        assert!(save(&first, b""));
        // Without anything kept it is only found out when something is to be.
        let (second, image) = open(directory).unwrap();
        assert!(image.is_empty() && !save(&second, b"third"));
        drop(first);
        assert!(save(&second, b"fourth"));
    }

    #[test]
    fn what_others_may_write_or_is_of_another_volume_is_refused() {
        let (_place, path) = kept();
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
            assert!(refused().contains("is not what was kept of this volume"));
        }
        let elsewhere = directory.join("elsewhere");
        fs::write(&elsewhere, content).unwrap();
        fs::remove_file(&path).unwrap();
        symlink(&elsewhere, &path).unwrap();
        assert!(refused().contains("volume-"), "{}", refused());
    }

    #[test]
    fn what_belongs_to_another_user_is_refused() {
        let (_place, path) = kept();
        let directory = path.parent().unwrap();
        let give = |path: &Path, owner: u32| chown(path, Some(owner), None);
        for place in [path.as_path(), directory] {
            if give(place, NOBODY).is_err() {
                // Only root can give something away.
                return;
            }
            let error = open(directory).map(|_| ()).unwrap_err();
            assert!(error.starts_with(&format!("{}: is somebody else's", place.display())), "{error}");
            give(place, ROOT).unwrap();
        }
        assert!(open(directory).is_ok());
        give(directory, NOBODY).unwrap();
        assert!(matches!(check_directory(directory), Err(StateError::NotOurs { .. })));
    }

    const NOBODY: u32 = 65534;

    #[test]
    fn what_cannot_be_kept_is_said() {
        let place = tempfile::tempdir().unwrap();
        let in_the_way = place.path().join("file");
        fs::write(&in_the_way, "").unwrap();
        let (file, _) = open(&in_the_way.join("state")).unwrap();
        assert!(!save(&file, b"image"));
    }
}
