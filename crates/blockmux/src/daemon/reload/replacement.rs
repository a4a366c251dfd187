//! Replaces files: all of them or none, also if the process is killed at any moment.
//!
//! One file is replaced by a rename. For several files, a list of them decides: once it stands
//! beside the config file, the new texts beside the files replace them, if not now then at the next
//! start. See docs/decisions/0094-the-control-plane-is-tested-with-generated-configs.md.

use crate::daemon::sources::Sources;
use crate::failure::Failure;
use blockmux_engine::sys::safe_path::{self, SafePath};
use rustix::fs::{AtFlags, CWD, FlockOperation, OFlags, flock, linkat};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use tracing::{info, warn};

/// Replaces files of a config, given their paths, present texts and new texts, if `begin` allows
/// that when all are prepared. After an error none has changed, unless the message names it. `main`
/// is the main file of the config.
pub(super) fn replace_all<'a>(
    main: &Path,
    files: impl Iterator<Item = (&'a Path, &'a str, String)>,
    begin: impl FnOnce() -> Result<(), String>,
) -> Result<(), String> {
    let cannot = |path: &Path, error: &io::Error| format!("{}: cannot be written: {error}", path.display());
    let prepare = |(path, before, after): (&'a Path, &'a str, String)| {
        let prepared = Replacement::prepare(path, &after).map_err(|error| cannot(path, &error))?;
        Ok((path, before, prepared))
    };
    // Most of what can fail, such as a full disk, fails before any file is replaced.
    let mut prepared = files.map(prepare).collect::<Result<Vec<_>, String>>()?;
    begin()?;
    let list = match prepared.len() {
        0 | 1 => None,
        _ => Some(CommitList::write(main, &mut prepared).map_err(|error| cannot(main, &error))?),
    };
    let mut replaced = Vec::new();
    for (path, before, mut replacement) in prepared {
        let committed = replacement.commit();
        let is_replaced = committed.is_ok();
        let synced = committed.and_then(|()| replacement.sync_directory());
        if is_replaced {
            replaced.push((path, before, replacement.text));
        }
        if let Err(error) = synced {
            let left = put_back(main, list, &replaced);
            let cannot = cannot(path, &error);
            return Err(match left.is_empty() {
                true => cannot,
                false => format!("{cannot}; these files have the changes already: {}", left.join(", ")),
            });
        }
    }
    list.iter().for_each(CommitList::remove);
    Ok(())
}

/// Gives files their old texts back, given their paths, old texts and new texts; returns those for
/// which that fails. If the process is killed meanwhile, the next start goes on with that: a list
/// of these files takes the place of the one that would have replaced the others, too.
fn put_back(main: &Path, list: Option<CommitList>, replaced: &[(&Path, &str, String)]) -> Vec<String> {
    let (mut left, mut old_texts) = (Vec::new(), Vec::new());
    for (path, before, after) in replaced {
        match Replacement::prepare(path, before) {
            Ok(old_text) => old_texts.push((*path, after.as_str(), old_text)),
            Err(_) => left.push(path.display().to_string()),
        }
    }
    let list = list.map(|list| match CommitList::write(main, &mut old_texts) {
        Ok(list) => list,
        Err(_) => {
            // Otherwise the next start would replace the files after all.
            list.remove();
            list
        }
    });
    for (path, _, mut old_text) in old_texts {
        match old_text.commit() {
            Ok(()) => drop(old_text.sync_directory()),
            Err(_) => left.push(path.display().to_string()),
        }
    }
    list.iter().for_each(CommitList::remove);
    left
}

/// Completes a save of a config file that was killed between the first and the last file.
///
/// # Errors
/// If that is not possible; the message says what to do.
pub(in crate::daemon) fn complete_save(main: &Path) -> Result<(), Failure> {
    // A file that cannot be found is reported when it is read.
    let Ok(resolved) = safe_path::resolve(main) else { return Ok(()) };
    let list = CommitList { main: resolved, _lock: None };
    let cannot = |error: &dyn std::fmt::Display| {
        let (main, list) = (main.display(), list.path());
        Failure::request(format!(
            "{main}: a save was interrupted and cannot be completed: {error}; mend that, or remove {} to keep the \
             files as they are",
            list.display()
        ))
    };
    let listed = list.read().map_err(|error| match is_under_way(&error) {
        true => Failure::request(format!("{}: another process saves it now; try again", main.display())),
        false => cannot(&error),
    })?;
    if let Some((owner, files)) = listed {
        for file in files {
            file.complete(owner).map_err(|error| cannot(&format!("{}: {error}", file.path.display())))?;
        }
        info!("{}: a save that was interrupted is complete now", main.display());
        list.remove();
    }
    Ok(())
}

/// What a start does about a save of a config file that was interrupted, for people; `None` if none
/// was, or another process saves the file now.
pub(in crate::daemon) fn interrupted_save(main: &Path) -> Option<String> {
    let list = CommitList { main: safe_path::resolve(main).ok()?, _lock: None };
    let (main, path) = (main.display(), list.path());
    let path = path.display();
    match list.read() {
        Ok(None) => None,
        Err(error) if is_under_way(&error) => None,
        Ok(Some((_, files))) => {
            let names: Vec<_> = files.iter().map(|file| file.path.display().to_string()).collect();
            Some(format!(
                "{main}: a save was interrupted; a start first completes it, with new texts of {} that were not checked; \
                 start the daemon, or remove {path} to keep the files as they are",
                names.join(", ")
            ))
        }
        Err(error) => Some(format!(
            "{main}: a save was interrupted, and a start fails because it cannot complete it: {error}; mend that, or \
             remove {path} to keep the files as they are"
        )),
    }
}

/// Removes the new texts that saves of these files have left behind, which were killed before they
/// replaced a file.
pub(super) fn remove_leftovers(sources: &Sources) {
    if let Ok(main) = safe_path::resolve(sources.path()) {
        let list = CommitList { main, _lock: None };
        if list.read().is_err_and(|error| is_under_way(&error)) {
            return;
        }
        list.remove();
    }
    for (path, _) in sources.files() {
        // The next save reports a file that cannot be removed.
        let _ = safe_path::resolve(path).and_then(|path| remove_if_there(&new_path(&path)));
    }
}

/// The list of the files that a save replaces, on stable storage beside the main file.
struct CommitList {
    main: SafePath,
    /// Locked by the process that replaces the files.
    _lock: Option<File>,
}

/// A file that is to be replaced by the new text beside it.
#[derive(Serialize, Deserialize)]
struct ListedFile {
    path: PathBuf,
    /// Digest of its present text.
    before: String,
}

impl CommitList {
    /// Gives the new texts their names and lists them.
    fn write(main: &Path, files: &mut [(&Path, &str, Replacement)]) -> io::Result<CommitList> {
        let mut all = Vec::new();
        for (path, before, replacement) in files {
            replacement.new.link()?;
            replacement.sync_directory()?;
            all.push(ListedFile { path: std::path::absolute(path)?, before: digest(before.as_bytes()) });
        }
        let list = CommitList { main: safe_path::resolve(main)?, _lock: None };
        let text = serde_json::to_string(&all)?;
        let lock = list.put(&text).inspect_err(|_| list.remove())?;
        Ok(CommitList { _lock: Some(lock), ..list })
    }

    /// Writes the list; returns its file, which is locked as long as this process lives and it is
    /// open.
    fn put(&self, text: &str) -> io::Result<File> {
        let (directory, path) = (directory_of(&self.main), self.path());
        let mut new = NewFile::create(directory, self.new_path())?;
        new.file.write_all(text.as_bytes())?;
        new.file.sync_all()?;
        let lock = new.file.try_clone()?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        new.replace(&path)?;
        File::open(directory)?.sync_all()?;
        Ok(lock)
    }

    fn path(&self) -> PathBuf {
        let name = self.main.as_path().file_name().unwrap_or_default().to_string_lossy();
        directory_of(&self.main).join(format!(".{name}.commit"))
    }

    /// Its path as long as it is not complete.
    fn new_path(&self) -> PathBuf {
        self.path().with_extension("commit.new")
    }

    /// Removes it. One that stays is removed by the next save or start: no new text is beside its
    /// files then.
    fn remove(&self) {
        let _ = remove_if_there(&self.path()).and_then(|()| remove_if_there(&self.new_path()));
    }

    /// The owner and the files of the list; `None` if there is no list. A daemon that changes its
    /// user writes it as that user, who owns the directory, and starts as root.
    fn read(&self) -> io::Result<Option<(u32, Vec<ListedFile>)>> {
        let mut options = File::options();
        options.read(true).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32);
        let file = match options.open(self.path()) {
            // A name that is too long for the list has none.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidFilename) =>
            {
                return Ok(None);
            }
            file => file?,
        };
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let found = file.metadata()?;
        let owners = [geteuid().as_raw(), fs::metadata(directory_of(&self.main))?.uid()];
        if !found.is_file() || !owners.contains(&found.uid()) {
            return Err(io::Error::other("the list of its files belongs to another user"));
        }
        let mut text = Vec::new();
        file.take(MAX_LIST).read_to_end(&mut text)?;
        Ok(Some((found.uid(), serde_json::from_slice(&text)?)))
    }
}

impl ListedFile {
    /// Replaces the file, unless that is done or somebody has edited or removed the file since.
    /// `owner` wrote the list, and may replace only what is in directories of its own.
    fn complete(&self, owner: u32) -> io::Result<()> {
        let is_absent = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        let skip = || {
            let path = self.path.display();
            warn!("{path}: lacks the changes of a save that was interrupted, because it was edited since");
            Ok(())
        };
        let path = match safe_path::resolve(&self.path) {
            Err(error) if is_absent(&error) => return skip(),
            path => path?,
        };
        let new = new_path(&path);
        if let Err(error) = fs::symlink_metadata(&new) {
            return if is_absent(&error) { Ok(()) } else { Err(error) };
        }
        if owner != geteuid().as_raw() && fs::metadata(directory_of(&path))?.uid() != owner {
            return Err(io::Error::other("it is in a directory of another user"));
        }
        match fs::read(path.as_path()) {
            Ok(text) if digest(&text) == self.before => {}
            Err(error) if !is_absent(&error) => return Err(error),
            _ => return skip(),
        }
        fs::rename(&new, path.as_path())?;
        File::open(directory_of(&path))?.sync_all()
    }
}

/// Whether a list cannot be read because the process that wrote it replaces the files now.
fn is_under_way(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

fn digest(text: &[u8]) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A new file on its way to its name, which it has not until it is complete, if the file system can
/// do that.
struct NewFile {
    file: File,
    /// Its name before it replaces another file.
    new_path: PathBuf,
    has_name: bool,
}

impl NewFile {
    fn create(directory: &Path, new_path: PathBuf) -> io::Result<NewFile> {
        remove_if_there(&new_path)?;
        let mut options = File::options();
        options.write(true).mode(0o600);
        let (file, has_name) =
            match options.clone().custom_flags(OFlags::TMPFILE.bits() as i32).open(directory) {
                Ok(file) => (file, false),
                // The file system has no files without a name.
                Err(_) => (options.create_new(true).open(&new_path)?, true),
            };
        Ok(NewFile { file, new_path, has_name })
    }

    /// Gives the file its first name. If the process is killed after that, the name stays: see
    /// [`remove_leftovers`].
    fn link(&mut self) -> io::Result<()> {
        if !self.has_name {
            let unnamed = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            linkat(CWD, unnamed, CWD, &self.new_path, AtFlags::SYMLINK_FOLLOW)?;
            self.has_name = true;
        }
        Ok(())
    }

    /// Replaces another file.
    fn replace(&mut self, path: &Path) -> io::Result<()> {
        self.link()?;
        fs::rename(&self.new_path, path)?;
        self.has_name = false;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if self.has_name {
            // A file that stays is removed by the next save or start.
            let _ = fs::remove_file(&self.new_path);
        }
    }
}

/// The new text of a file, on stable storage beside it. [`Replacement::commit`] replaces the file
/// atomically and keeps its permissions and, if this process may, its owner. A crash leaves the old
/// file or the new one.
struct Replacement {
    path: SafePath,
    new: NewFile,
    text: String,
}

impl Replacement {
    fn prepare(path: &Path, text: &str) -> io::Result<Replacement> {
        // Replaces the file that a symbolic link refers to, not the link.
        let path = safe_path::resolve(path)?;
        let found = fs::symlink_metadata(path.as_path())?;
        let mut new = NewFile::create(directory_of(&path), new_path(&path))?;
        new.file.write_all(text.as_bytes())?;
        // Only with CAP_CHOWN; otherwise the file becomes this user's.
        let _ = fchown(&new.file, Some(found.uid()), Some(found.gid()));
        new.file.set_permissions(found.permissions())?;
        new.file.sync_all()?;
        Ok(Replacement { path, new, text: text.to_owned() })
    }

    /// Replaces the file. [`Replacement::sync_directory`] brings that to stable storage.
    fn commit(&mut self) -> io::Result<()> {
        self.new.replace(self.path.as_path())
    }

    fn sync_directory(&self) -> io::Result<()> {
        File::open(directory_of(&self.path))?.sync_all()
    }
}

/// The name of a file's new text in the same directory. Includes read *.toml only.
fn new_path(path: &SafePath) -> PathBuf {
    let name = path.as_path().file_name().unwrap_or_default().to_string_lossy();
    directory_of(path).join(format!(".{name}.new"))
}

/// The directory of a file, whose path stays valid while `path` lives.
fn directory_of(path: &SafePath) -> &Path {
    path.as_path().parent().unwrap_or(Path::new("/"))
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Maximum length of a list in bytes: that of a config.
const MAX_LIST: u64 = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown};

    #[test]
    fn an_interrupted_save_of_several_files_is_completed_and_edits_since_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let names = ["main.toml", "done.toml", "left.toml", "edited.toml"];
        let all = names.map(path);
        all.iter().for_each(|path| fs::write(path, "before").unwrap());
        let mut prepared: Vec<_> = all[1..]
            .iter()
            .map(|path| (path.as_path(), "before", Replacement::prepare(path, "after").unwrap()))
            .collect();
        CommitList::write(&all[0], &mut prepared).unwrap();
        prepared[0].2.commit().unwrap();
        // The process is killed, and somebody edits a file.
        std::mem::forget(prepared);
        fs::write(&all[3], "edited").unwrap();
        let said = interrupted_save(&all[0]).unwrap();
        assert!(
            said.contains("a start first completes it, with new texts of ") && said.contains("left.toml")
        );
        complete_save(&all[0]).unwrap();
        assert_eq!(interrupted_save(&all[0]), None);
        let texts: Vec<_> = all.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
        assert_eq!(texts, ["before", "after", "after", "edited"]);
        assert!(!path(".main.toml.commit").exists());
        complete_save(&all[0]).unwrap();
        fs::write(path(".main.toml.commit"), "nonsense").unwrap();
        let said = complete_save(&all[0]).unwrap_err().to_string();
        assert!(said.contains("main.toml: a save was interrupted and cannot be completed: "), "{said}");
        let said = interrupted_save(&all[0]).unwrap();
        assert!(said.contains("a start fails because it cannot complete it: "), "{said}");
        assert!(path(".main.toml.commit").exists(), "nothing is given up");
    }

    #[test]
    fn if_a_file_cannot_be_replaced_none_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let (first, second, third) = (path("1.toml"), path("2.toml"), path("3.toml"));
        let write = || [&first, &third].iter().for_each(|path| fs::write(path, "before").unwrap());
        let texts = || [&first, &third].map(|path| fs::read_to_string(path).unwrap());
        let replace = |all: &[&PathBuf]| {
            replace_all(&first, all.iter().map(|path| (path.as_path(), "before", "after".to_owned())), || {
                Ok(())
            })
        };
        write();
        let said = replace(&[&first, &second, &third]).unwrap_err();
        assert!(said.contains("2.toml: cannot be written: "), "{said}");
        assert_eq!(texts(), ["before", "before"]);
        // A directory takes a temporary file beside it, but no file replaces it.
        fs::create_dir(&second).unwrap();
        let said = replace(&[&first, &second, &third]).unwrap_err();
        assert!(said.contains("2.toml: cannot be written: "), "{said}");
        assert_eq!(texts(), ["before", "before"]);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 3, "no temporary file is left");
        replace(&[&first, &third]).unwrap();
        assert_eq!(texts(), ["after", "after"]);
    }

    #[test]
    fn a_new_text_has_no_name_before_it_replaces_the_file_and_a_stale_one_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let (path, stale) = (directory.path().join("b.toml"), directory.path().join(".b.toml.new"));
        let names = || fs::read_dir(directory.path()).unwrap().count();
        for is_stale in [false, true] {
            fs::write(&path, "before").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
            // Only root may give files away.
            let is_given = chown(&path, Some(NOBODY), Some(NOBODY)).is_ok();
            if is_stale {
                fs::write(&stale, "of a save that was killed").unwrap();
            }
            let mut replacement = Replacement::prepare(&path, "after").unwrap();
            assert_eq!(names(), 1, "a crash now would leave no file");
            replacement.commit().unwrap();
            assert_eq!((names(), fs::read_to_string(&path).unwrap()), (1, "after".to_owned()));
            let found = fs::metadata(&path).unwrap();
            assert_eq!(found.permissions().mode() & 0o7777, 0o640);
            assert_eq!([found.uid(), found.gid()] == [NOBODY; 2], is_given);
        }
    }

    const NOBODY: u32 = 65534;
}
