//! State that survives a restart, one file for each: persistent reservations of a volume (APTPL),
//! and settings of an AoE disk.
//!
//! ```text
//!   DIRECTORY/volume-UUID.reservations    length u16 | identity | 0 u8 | generation u64 | image of
//!                                         the reservations
//!   DIRECTORY/volume-UUID.lock            locked by the process that has the volume's reservations
//!   DIRECTORY/volume-UUID.raw             empty: the volume was served without an image format
//!   DIRECTORY/e7.3.aoe, e7.3.lock         AoE disk e7.3: image of the disk's settings, and lock
//! ```
//!
//! The length is that of identity, 0 and generation. Files of earlier versions have no generation;
//! theirs is 0.
//!
//! Nothing is created before the first proposal. A thread commits each in turn: if the file still
//! has the expected generation, it writes the image to a new file, flushes it, renames it over the
//! old one, and flushes the directory. A crash at any step leaves the old image or the new one.

use crate::sys::safe_path::{self, entry_stat};
use crate::volume::file::lock_exclusive;
use crate::volume::state_writer::{Proposal, StateStore, StateWriter};
use blockmux_proto::volume_state::{Commit, StateGeneration, StoredState};
use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, Stat, Uid, chownat, fchown, fstat, mkdirat, openat, renameat,
    stat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// Saves the image of one volume's reservations, or of one disk's settings, to a file.
pub type StateFile = StateWriter<StatePaths>;

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
    /// The directory to give away has a file that is no saved state.
    #[error("{}: is not the saved state of a volume or disk, and would belong to the user; name another directory with --state", path.display())]
    NotState {
        /// The file.
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
    /// Opens the state of the volume with that UUID; returns it with what is stored.
    ///
    /// # Errors
    /// If there is an image that cannot be used.
    pub fn open(directory: &Path, uuid: &str) -> Result<(Arc<StateFile>, StoredState), StateError> {
        StateFile::open_named(directory, &format!("volume-{uuid}"), "reservations", uuid)
    }

    /// Opens the state with that name and extension; returns it with what is stored.
    ///
    /// # Errors
    /// As for [`StateFile::open`].
    pub fn open_named(
        directory: &Path,
        name: &str,
        extension: &str,
        identity: &str,
    ) -> Result<(Arc<StateFile>, StoredState), StateError> {
        let paths = StatePaths::new(directory, name, extension, identity);
        let mut file = OwnedFile::default();
        let stored = paths.load(&mut file)?.unwrap_or_default();
        let current = file.current;
        Ok((Arc::new(StateWriter::new(paths, file, current)), stored))
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
        match safe_path::stat(ancestor) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(at(ancestor)(error)),
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::Directory => {
                return Err(at(ancestor)(ErrorKind::NotADirectory.into()));
            }
            Ok(stat) if ancestor == absolute => return check_private(ancestor, &stat),
            Ok(_) => break,
        }
    }
    Ok(())
}

/// Creates an empty file with this name in a state directory, and the directory if necessary.
///
/// # Errors
/// If others may write the directory, or the file cannot be created.
pub fn note(directory: &Path, name: &str) -> Result<(), StateError> {
    OpenDirectory::make(directory)?.checked()?.create(&directory.join(name), OFlags::empty()).map(drop)
}

/// Whether a state directory that no other user may write has a file with this name.
#[must_use]
pub fn has_note(directory: &Path, name: &str) -> bool {
    let found = OpenDirectory::open(directory).and_then(OpenDirectory::checked);
    let entry = found.ok().and_then(|found| entry_stat(&found.fd, OsStr::new(name)).ok());
    entry.is_some_and(|entry| is_file(&entry))
}

/// Makes a user the owner of a state directory of root's and its state files. It may also have the
/// files `served`, whose owner stays. A directory that does not exist, or is the user's already,
/// stays as it is.
///
/// # Errors
/// If the directory belongs to somebody else, others may write it or it has other files, or the
/// system does not permit it.
pub fn give_directory(directory: &Path, user: u32, group: u32, served: &[PathBuf]) -> Result<(), StateError> {
    let open = match OpenDirectory::open(directory).and_then(OpenDirectory::checked) {
        Err(StateError::Io { error, .. }) if error.kind() == ErrorKind::NotFound => return Ok(()),
        open => open?,
    };
    if open.stat.st_uid == user {
        return Ok(());
    }
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    let entries = Dir::read_from(&open.fd).map_err(|error| at(directory)(error.into()))?;
    let names = entries.flatten().map(|entry| OsStr::from_bytes(entry.file_name().to_bytes()).to_owned());
    let names: Vec<_> = names.filter(|name| name != "." && name != "..").collect();
    let served: Vec<_> = served.iter().filter_map(|path| stat(path).ok()).map(inode).collect();
    let is_served = |name: &OsStr| entry_stat(&open.fd, name).is_ok_and(|file| served.contains(&inode(file)));
    if let Some(other) = names.iter().find(|name| !is_name_of_state(name) && !is_served(name)) {
        return Err(StateError::NotState { path: directory.join(other) });
    }
    for name in names.iter().filter(|name| is_name_of_state(name)) {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(file) = openat(&open.fd, name, flags, Mode::empty()) else { continue };
        // Another name of the file may be in another directory.
        if fstat(&file).is_ok_and(|stat| is_file(&stat) && stat.st_nlink == 1) {
            let given = chownat(&file, "", Some(user), Some(group), AtFlags::EMPTY_PATH);
            given.map_err(|error| at(&directory.join(name))(error.into()))?;
        }
    }
    fchown(&open.fd, Some(user), Some(group)).map_err(|error| at(directory)(error.into()))
}

/// What the writer knows of the file.
#[derive(Default)]
pub struct OwnedFile {
    /// Held as long as the process owns the state.
    lock: Option<File>,
    /// The generation that a proposal must expect.
    current: StateGeneration,
    /// The generation in the file: another one than `current` if a commit has failed at its end.
    written: Option<StateGeneration>,
}

/// Paths of one state file.
pub struct StatePaths {
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

    /// What is stored; takes the lock if there is anything.
    fn load(&self, owned: &mut OwnedFile) -> Result<Option<StoredState>, StateError> {
        let directory = match OpenDirectory::open(&self.directory) {
            Err(StateError::Io { error, .. })
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                return Ok(None);
            }
            directory => directory?,
        };
        if !directory.has(&self.file)? {
            return Ok(None);
        }
        let directory = directory.checked()?;
        owned.lock = Some(self.take_lock(&directory)?);
        let stored = self.read(&directory)?;
        owned.found(stored.as_ref());
        Ok(stored)
    }

    /// The content of the file; `None` if there is none.
    fn read(&self, directory: &OpenDirectory) -> Result<Option<StoredState>, StateError> {
        if !directory.has(&self.file)? {
            return Ok(None);
        }
        let file = directory.open_file(&self.file, OFlags::RDONLY)?;
        let stat = fstat(&file).map_err(|error| at(&self.file)(error.into()))?;
        check_private(&self.file, &stat)?;
        let mut bytes = Vec::new();
        file.take(MAX_FILE).read_to_end(&mut bytes).map_err(at(&self.file))?;
        let is_whole = is_file(&stat) && u64::try_from(stat.st_size).is_ok_and(|len| len < MAX_FILE);
        let stored = self.parse(&bytes).filter(|_| is_whole);
        stored.map(Some).ok_or_else(|| StateError::Foreign { path: self.file.clone() })
    }

    fn parse(&self, bytes: &[u8]) -> Option<StoredState> {
        let (len, rest) = bytes.split_first_chunk()?;
        let (head, image) = rest.split_at_checked(u16::from_be_bytes(*len).into())?;
        let generation = match head.strip_prefix(self.identity.as_bytes())? {
            // Of an earlier version.
            [] => 0,
            [0, generation @ ..] => {
                let generation = u64::from_be_bytes(generation.try_into().ok()?);
                // Others can follow it.
                i64::try_from(generation).is_ok().then_some(generation)?
            }
            _ => return None,
        };
        // An empty image is never written: the file was truncated.
        (!image.is_empty())
            .then(|| StoredState { generation: StateGeneration(generation), image: image.to_vec() })
    }

    /// Writes the image of a proposal; an empty one deletes the file.
    fn write(
        &self,
        directory: &OpenDirectory,
        owned: &mut OwnedFile,
        proposal: &Proposal,
    ) -> Result<(), StateError> {
        if proposal.image.is_empty() {
            return if directory.remove(&self.file)? { directory.flush() } else { Ok(()) };
        }
        // What a crash has left, or somebody has put there, is not written to.
        directory.remove(&self.new_file)?;
        let mut file = directory.create(&self.new_file, OFlags::EXCL)?;
        let header = self.header(proposal.generation);
        let written = file.write_all(&header).and_then(|()| file.write_all(&proposal.image));
        written.map_err(at(&self.new_file))?;
        step(CommitStep::FlushFile)?;
        file.sync_all().map_err(at(&self.new_file))?;
        directory.rename(&self.new_file, &self.file)?;
        owned.written = Some(proposal.generation);
        directory.flush()
    }

    fn header(&self, generation: StateGeneration) -> Vec<u8> {
        let head = [self.identity.as_bytes(), &[0], &generation.0.to_be_bytes()].concat();
        // Identities are UUIDs and addresses.
        let len = u16::try_from(head.len()).unwrap_or(u16::MAX);
        [&len.to_be_bytes()[..], &head].concat()
    }

    /// Locks the state against other processes.
    fn take_lock(&self, directory: &OpenDirectory) -> Result<File, StateError> {
        let lock = directory.create(&self.lock, OFlags::empty())?;
        let end = Instant::now() + LAST_COMMIT;
        loop {
            match lock_exclusive(&lock) {
                Ok(()) => return Ok(lock),
                Err(error) if error.kind() != ErrorKind::WouldBlock => {
                    return Err(StateError::Io { path: self.lock.clone(), error });
                }
                Err(_) if Instant::now() >= end => {
                    return Err(StateError::Locked { path: self.lock.clone() });
                }
                Err(_) => thread::park_timeout(Duration::from_millis(10)),
            }
        }
    }
}

impl StateStore for StatePaths {
    type Held = OwnedFile;
    type Error = StateError;

    /// Takes the lock first unless it is held, and creates the directory if necessary.
    fn commit(&self, owned: &mut OwnedFile, proposal: &Proposal) -> Result<Commit, StateError> {
        let directory = OpenDirectory::make(&self.directory)?.checked()?;
        if owned.lock.is_none() {
            owned.lock = Some(self.take_lock(&directory)?);
        }
        let stored = self.read(&directory)?;
        // Nobody else has removed the file on behalf of initiators: removing it needs the lock.
        let is_changed = stored.as_ref().is_some_and(|stored| owned.written != Some(stored.generation));
        if is_changed || proposal.expected != owned.current {
            owned.found(stored.as_ref());
            return Ok(Commit::Stale(stored.unwrap_or_default()));
        }
        self.write(&directory, owned, proposal)?;
        owned.current = proposal.generation;
        Ok(Commit::Committed)
    }

    fn name(&self) -> String {
        self.file.display().to_string()
    }
}

impl OwnedFile {
    /// The file has this content now.
    fn found(&mut self, stored: Option<&StoredState>) {
        self.written = stored.map(|stored| stored.generation);
        self.current = self.written.unwrap_or_default();
    }
}

/// A directory of state files. Its files are reached by its descriptor and never through links, so
/// that nobody can replace the directory between two steps.
struct OpenDirectory {
    path: PathBuf,
    fd: File,
    stat: Stat,
}

impl OpenDirectory {
    fn open(path: &Path) -> Result<OpenDirectory, StateError> {
        let opened = safe_path::open(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty());
        OpenDirectory::of(path, opened.map_err(at(path))?)
    }

    fn of(path: &Path, fd: File) -> Result<OpenDirectory, StateError> {
        let stat = fstat(&fd).map_err(|error| at(path)(error.into()))?;
        Ok(OpenDirectory { path: path.to_owned(), fd, stat })
    }

    /// Opens a directory; creates it, private, and its missing parents, and flushes each parent.
    fn make(path: &Path) -> Result<OpenDirectory, StateError> {
        match OpenDirectory::open(path) {
            Err(StateError::Io { error, .. }) if error.kind() == ErrorKind::NotFound => {}
            opened => return opened,
        }
        let absolute = std::path::absolute(path).map_err(at(path))?;
        let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
            return Err(at(path)(ErrorKind::NotFound.into()));
        };
        let above = OpenDirectory::make(parent)?;
        match mkdirat(&above.fd, name, Mode::RWXU) {
            // A link that leads nowhere is refused below.
            Ok(()) | Err(Errno::EXIST) => above.flush()?,
            Err(error) => return Err(at(path)(error.into())),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = openat(&above.fd, name, flags, Mode::empty());
        OpenDirectory::of(path, made.map_err(|error| at(path)(error.into()))?.into())
    }

    /// The directory, if no other user may write it.
    fn checked(self) -> Result<OpenDirectory, StateError> {
        check_private(&self.path, &self.stat)?;
        Ok(self)
    }

    /// Whether the directory has this entry, of any type.
    fn has(&self, path: &Path) -> Result<bool, StateError> {
        match entry_stat(&self.fd, name_of(path)) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(at(path)(error)),
        }
    }

    /// Opens a file of the directory; blocks on no FIFO.
    fn open_file(&self, path: &Path, flags: OFlags) -> Result<File, StateError> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = openat(&self.fd, name_of(path), flags, Mode::RUSR | Mode::WUSR);
        opened.map(File::from).map_err(|error| at(path)(error.into()))
    }

    /// Opens a file of the directory for writing; creates it, private, for the directory's owner.
    fn create(&self, path: &Path, flags: OFlags) -> Result<File, StateError> {
        step(CommitStep::Create)?;
        let flags = flags | OFlags::RDWR;
        // Only what was created here gets the owner: a name may have become a link meanwhile.
        let file = match self.open_file(path, flags | OFlags::CREATE | OFlags::EXCL) {
            Err(StateError::Io { error, .. })
                if error.kind() == ErrorKind::AlreadyExists && !flags.contains(OFlags::EXCL) =>
            {
                return self.open_file(path, flags);
            }
            created => created?,
        };
        if self.stat.st_uid != geteuid().as_raw() {
            let owner = (Uid::from_raw(self.stat.st_uid), Gid::from_raw(self.stat.st_gid));
            fchown(&file, Some(owner.0), Some(owner.1)).map_err(|error| at(path)(error.into()))?;
        }
        Ok(file)
    }

    /// Removes a file; returns whether there was one.
    fn remove(&self, path: &Path) -> Result<bool, StateError> {
        step(CommitStep::Remove)?;
        match unlinkat(&self.fd, name_of(path), AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(false),
            removed => removed.map(|()| true).map_err(|error| at(path)(error.into())),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), StateError> {
        step(CommitStep::Rename)?;
        let renamed = renameat(&self.fd, name_of(from), &self.fd, name_of(to));
        renamed.map_err(|error| at(to)(error.into()))
    }

    fn flush(&self) -> Result<(), StateError> {
        step(CommitStep::FlushDirectory)?;
        self.fd.sync_all().map_err(at(&self.path))
    }
}

/// A step of a commit, before which tests simulate a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommitStep {
    Remove,
    Create,
    FlushFile,
    Rename,
    FlushDirectory,
}

#[cfg(not(test))]
fn step(_next: CommitStep) -> Result<(), StateError> {
    Ok(())
}

#[cfg(test)]
use tests::step;

/// What identifies a file.
fn inode(stat: Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

/// Whether a state directory has files with such a name.
fn is_name_of_state(name: &OsStr) -> bool {
    let Some((stem, extension)) = name.to_str().and_then(|name| name.rsplit_once('.')) else { return false };
    let is_disk = || {
        let address = stem.strip_prefix('e').and_then(|address| address.split_once('.'));
        address.is_some_and(|(shelf, slot)| shelf.parse::<u16>().is_ok() && slot.parse::<u8>().is_ok())
    };
    match extension {
        "reservations" | "raw" => stem.starts_with("volume-"),
        "aoe" => is_disk(),
        "lock" | "new" => stem.starts_with("volume-") || is_disk(),
        _ => false,
    }
}

/// The last component of the path of a state file.
fn name_of(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

fn is_file(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

/// Sets the user that this process will switch to after opening everything. Files of this user
/// count as the process's own.
pub fn set_service_user(user: u32) {
    SERVICE_USER.get_or_init(|| user);
}

static SERVICE_USER: OnceLock<u32> = OnceLock::new();

fn check_private(path: &Path, stat: &Stat) -> Result<(), StateError> {
    let own = geteuid().as_raw();
    let is_ours = |owner| owner == own || owner == ROOT || SERVICE_USER.get() == Some(&owner);
    if !is_ours(stat.st_uid) {
        return Err(StateError::NotOurs { path: path.to_owned() });
    }
    if stat.st_mode & OTHERS_WRITE != 0 {
        return Err(StateError::Exposed { path: path.to_owned() });
    }
    Ok(())
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> StateError {
    |error| StateError::Io { path: path.to_owned(), error }
}

/// Write permission of group and others.
const OTHERS_WRITE: u32 = 0o022;
const ROOT: u32 = 0;
/// How long the lock is waited for: its last owner may have been dropped during a commit.
const LAST_COMMIT: Duration = Duration::from_millis(if cfg!(test) { 60_000 } else { 500 });
/// Maximum length of a file, in bytes; 1,024 registrations with names of 600 bytes need less.
const MAX_FILE: u64 = 2 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::volume_state::SharedState;
    use std::cell::RefCell;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use tempfile::TempDir;

    fn open(directory: &Path) -> Result<(Arc<StateFile>, Vec<u8>), String> {
        let opened = StateFile::open(directory, "uuid").map_err(|error| error.to_string());
        opened.map(|(file, stored)| (file, stored.image))
    }

    fn outcome(file: &StateFile, proposal: StateGeneration) -> Commit {
        std::iter::repeat_with(|| {
            thread::yield_now();
            file.outcome(proposal)
        })
        .flatten()
        .next()
        .unwrap()
    }

    fn save(file: &StateFile, image: &[u8]) -> bool {
        let expected = file.shared.state().held.current;
        outcome(file, file.propose(expected, image)) == Commit::Committed
    }

    fn kept() -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("a/state");
        let (file, image) = open(&directory).unwrap();
        assert!(image.is_empty() && !directory.exists(), "nothing is created before the first save");
        assert!(save(&file, b"first") && save(&file, b"second"));
        let path = PathBuf::from(file.name());
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
        assert!(StateFile::open(directory, "other").unwrap().1.image.is_empty());
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
        for wrong in [&b""[..], &content[1..], b"\0\x04uuiD", b"\0\x04uuid"] {
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
    fn a_proposal_from_a_state_that_another_process_has_replaced_is_stale() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, theirs) = (open(dir.path()).unwrap().0, open(dir.path()).unwrap().0);
        let first = theirs.propose(StateGeneration(0), b"2");
        assert_eq!(outcome(&theirs, first), Commit::Committed);
        drop(theirs);
        let stored = StoredState { generation: first, image: b"2".to_vec() };
        let stale = ours.propose(StateGeneration(0), b"3");
        assert_eq!(outcome(&ours, stale), Commit::Stale(stored.clone()));
        let on_stale = ours.propose(stale, b"4");
        assert_eq!(outcome(&ours, on_stale), Commit::Stale(stored.clone()), "both were their first");
        let next = ours.propose(stored.generation, b"3");
        assert_eq!((outcome(&ours, next), outcome(&ours, stale)), (Commit::Committed, Commit::Stale(stored)));
        assert!(next > first);
        drop(ours);
        let (_, stored) = StateFile::open(dir.path(), "uuid").unwrap();
        assert_eq!((stored.generation, stored.image), (next, b"3".to_vec()));
    }

    #[test]
    fn proposals_build_on_each_other_and_are_lost_with_the_one_below() {
        let dir = tempfile::tempdir().unwrap();
        let (file, _) = open(dir.path()).unwrap();
        let first = file.propose(StateGeneration(0), b"1");
        let second = file.propose(first, b"2");
        assert_eq!([first, second].map(|one| outcome(&file, one)), [Commit::Committed, Commit::Committed]);
        let beside = file.propose(first, b"x");
        let above = file.propose(beside, b"y");
        let stored = StoredState { generation: second, image: b"2".to_vec() };
        assert_eq!(outcome(&file, beside), Commit::Stale(stored.clone()));
        assert_eq!(outcome(&file, above), Commit::Stale(stored));
        drop(file);
        assert_eq!(open(dir.path()).unwrap().1, b"2");
    }

    #[test]
    fn a_file_of_an_earlier_version_has_generation_0() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("volume-uuid.reservations"), b"\0\x04uuidimage").unwrap();
        let (file, stored) = StateFile::open(dir.path(), "uuid").unwrap();
        assert_eq!((stored.generation, &stored.image[..]), (StateGeneration(0), &b"image"[..]));
        let next = file.propose(stored.generation, b"next");
        assert!(outcome(&file, next) == Commit::Committed && next > stored.generation);
    }

    thread_local! {
        /// The steps of this thread's commit so far, and before how many of them it crashes.
        static STEPS: RefCell<(Vec<CommitStep>, usize)> = const { RefCell::new((Vec::new(), usize::MAX)) };
    }

    pub(super) fn step(next: CommitStep) -> Result<(), StateError> {
        STEPS.with_borrow_mut(|(steps, most)| {
            if steps.len() >= *most {
                return Err(StateError::Io { path: PathBuf::new(), error: ErrorKind::Interrupted.into() });
            }
            steps.push(next);
            Ok(())
        })
    }

    /// The files of a directory, and their content.
    type Content = Option<Vec<(PathBuf, Vec<u8>)>>;

    fn content(directory: &Path) -> Content {
        let entries = fs::read_dir(directory).ok()?;
        let files = entries.map(|entry| entry.unwrap().path());
        Some(files.map(|path| (path.clone(), fs::read(&path).unwrap())).collect())
    }

    fn restore(directory: &Path, content: &Content) {
        let _ = fs::remove_dir_all(directory);
        for (path, bytes) in content.iter().flatten() {
            fs::create_dir_all(directory).unwrap();
            fs::write(path, bytes).unwrap();
            for path in [directory, path] {
                fs::set_permissions(path, fs::Permissions::from_mode(0o700)).unwrap();
            }
        }
    }

    /// What a power cut may leave: the directory as it is, as it was before, or with a part of what
    /// was not flushed.
    fn power_cuts(before: &Content, after: &Content) -> Vec<Content> {
        let is_flushed = STEPS.with_borrow(|(steps, _)| steps.contains(&CommitStep::FlushFile));
        let mut cuts = vec![before.clone(), after.clone()];
        for (at, (path, bytes)) in after.iter().flatten().enumerate() {
            let is_new = !before.iter().flatten().any(|old| old == &(path.clone(), bytes.clone()));
            for len in (0..bytes.len()).filter(|_| is_new && !is_flushed) {
                let mut cut = after.clone();
                cut.iter_mut().flatten().skip(at).take(1).for_each(|(_, bytes)| bytes.truncate(len));
                cuts.push(cut);
            }
        }
        cuts
    }

    #[test]
    fn a_crash_at_any_step_of_a_commit_leaves_the_old_image_or_the_new_one() {
        for (old, new) in [(&b""[..], &b"new"[..]), (b"old", b"new"), (b"old", b"")] {
            for most in 0.. {
                let dir = tempfile::tempdir().unwrap();
                let directory = dir.path().join("state");
                if !old.is_empty() {
                    assert!(save(&open(&directory).unwrap().0, old));
                }
                let before = content(&directory);
                let paths = StatePaths::new(&directory, "volume-uuid", "reservations", "uuid");
                let mut owned = OwnedFile::default();
                paths.load(&mut owned).unwrap();
                let expected = owned.current;
                let generation = StateGeneration(expected.0 + 1);
                STEPS.set((Vec::new(), most));
                let outcome =
                    paths.commit(&mut owned, &Proposal { expected, generation, image: new.to_vec() });
                drop(owned);
                let after = content(&directory);
                let is_committed = matches!(outcome, Ok(Commit::Committed));
                let cuts = if is_committed { vec![after] } else { power_cuts(&before, &after) };
                STEPS.set((Vec::new(), usize::MAX));
                for cut in cuts {
                    restore(&directory, &cut);
                    let (file, image) = open(&directory).unwrap();
                    assert!(image == new || image == old && !is_committed, "{most} steps, {cut:?}");
                    assert!(save(&file, b"next"));
                    drop(file);
                    assert_eq!(open(&directory).unwrap().1, b"next");
                }
                if is_committed {
                    assert!(most >= 2, "it has steps");
                    break;
                }
            }
        }
    }

    #[test]
    fn a_dropped_file_is_not_waited_for_while_it_commits() {
        let (_dir, path) = kept();
        let directory = path.parent().unwrap();
        let (ours, _) = open(directory).unwrap();
        let file = std::mem::take(&mut ours.shared.state().held);
        ours.propose(StateGeneration(0), b"late");
        while !ours.shared.state().queue.is_empty() {
            thread::yield_now();
        }
        let writer = Arc::downgrade(&ours.shared);
        drop(ours);
        assert_eq!(writer.strong_count(), 1, "it still waits for the lock");
        drop(file);
        assert_eq!(open(directory).unwrap().1, b"second");
    }

    #[test]
    fn a_failed_save_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let in_the_way = dir.path().join("file");
        fs::write(&in_the_way, "").unwrap();
        let (file, _) = open(&in_the_way.join("state")).unwrap();
        assert!(!save(&file, b"image"));
    }
}
