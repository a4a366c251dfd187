//! Paths of root's that pass through directories of other users.
//!
//! The owner of a directory can replace an entry by a link to a file that only root can write.
//! So for root each component of a path is opened by itself, without following links, and links are
//! followed here: a symbolic link, or a further name of a file (hard link), that another user may
//! have made leads only to what that user owns (`docs/decisions`, number 79). What the kernel
//! checks when it follows a path for a user without root's rights is enough for everybody else.

use super::acl::{self, AclSubject};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, PROC_SUPER_MAGIC, Stat, fstat, fstatfs, open as open_at_cwd,
    openat, readlinkat, statat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf, absolute};

/// Opens a file or directory; a new file gets this mode.
///
/// # Errors
/// The errors of open(2), or if another user leads root to what is not that user's.
pub fn open(path: &Path, flags: OFlags, mode: Mode) -> io::Result<File> {
    let flags = flags | OFlags::CLOEXEC;
    if !is_root() {
        return Ok(open_at_cwd(path, flags, mode)?.into());
    }
    let place = Walk::along(path)?;
    if !place.is_foreign && !place.directory.others_write() {
        return Ok(open_at_cwd(path, flags, mode)?.into());
    }
    let Some(entry) = &place.entry else {
        let created = openat(&place.directory.fd, &place.name, flags | OFlags::NOFOLLOW, mode)?;
        return Ok(created.into());
    };
    if flags.contains(OFlags::CREATE | OFlags::EXCL) {
        return Err(Errno::EXIST.into());
    }
    // The kernel follows this link to the file that was examined, whatever has its name by now.
    let examined = format!("/proc/self/fd/{}", entry.fd.as_raw_fd());
    Ok(open_at_cwd(examined, flags.difference(OFlags::CREATE), mode)?.into())
}

/// The owner, type and size of what has this path, without opening it.
///
/// # Errors
/// The errors of stat(2), or if another user leads root to what is not that user's.
pub fn stat(path: &Path) -> io::Result<Stat> {
    Ok(fstat(open(path, OFlags::PATH, Mode::empty())?)?)
}

/// Removes the file that this path leads to, if it is the expected one.
///
/// # Errors
/// The errors of unlink(2), or if another user leads root to what is not that user's.
pub fn remove(path: &Path, is_expected: impl FnOnce(&Stat) -> bool) -> io::Result<()> {
    let place = anchor(path)?;
    let found = statat(CWD, place.as_path(), AtFlags::SYMLINK_NOFOLLOW)?;
    if is_expected(&found) { std::fs::remove_file(place.as_path()) } else { Ok(()) }
}

/// The owner, type and size of a directory's entry; of a link itself if it is one.
///
/// # Errors
/// The errors of fstatat(2).
pub(crate) fn entry_stat(directory: impl AsFd, name: &OsStr) -> io::Result<Stat> {
    Ok(statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// A path that no other user can lead astray as long as its last component is not followed: for
/// bind(2), rename(2), unlink(2) and lstat(2).
pub struct SafePath {
    path: PathBuf,
    /// Whether another user owns a directory or link on the way.
    is_foreign: bool,
    /// The directory by whose descriptor `path` begins, if it does.
    _directory: Option<OwnedFd>,
}

impl SafePath {
    /// The path, which may lead through a descriptor of this process.
    #[must_use]
    pub fn as_path(&self) -> &Path {
        &self.path
    }

    /// Whether another user can change where the original path leads.
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        self.is_foreign
    }
}

/// The path itself, unless another user can change where its directory is: then that directory as
/// it is now.
///
/// # Errors
/// As for [`resolve`].
pub fn anchor(path: &Path) -> io::Result<SafePath> {
    let own = || SafePath { path: path.to_owned(), is_foreign: false, _directory: None };
    if !is_root() {
        return Ok(own());
    }
    Ok(Some(resolve(path)?).filter(SafePath::is_foreign).unwrap_or_else(own))
}

/// Follows all links of a path, whose last component need not exist.
///
/// # Errors
/// If its directory does not exist, or another user leads root to what is not that user's.
pub fn resolve(path: &Path) -> io::Result<SafePath> {
    if !is_root() {
        let path = std::fs::canonicalize(path).or_else(|_| absolute(path))?;
        return Ok(SafePath { path, is_foreign: false, _directory: None });
    }
    let Place { directory, name, is_foreign, .. } = Walk::along(path)?;
    let at = format!("/proc/self/fd/{}", directory.fd.as_raw_fd());
    let path = match is_foreign {
        true => Path::new(&at).join(&name),
        // Nobody else can change where these directories are.
        false => std::fs::read_link(at)?.join(&name),
    };
    Ok(SafePath { path, is_foreign, _directory: Some(directory.fd) })
}

/// A file or directory that is open with `O_PATH`.
struct Entry {
    fd: OwnedFd,
    stat: Stat,
}

impl Entry {
    /// Whether users other than root and its owner may make entries in a directory.
    fn others_write(&self) -> bool {
        let Stat { st_mode, st_gid, .. } = self.stat;
        if st_mode & OTHERS_WRITE != 0 || st_mode & GROUP_WRITE == 0 {
            return st_mode & OTHERS_WRITE != 0;
        }
        // With an ACL, these bits of the mode are its mask.
        let Ok(acl) = acl::of(&self.fd) else { return true };
        acl.map_or(st_gid != ROOT, |acl| {
            acl.iter().filter(|entry| entry.permissions & OTHERS_WRITE != 0).any(|entry| {
                match entry.subject {
                    AclSubject::User(id) | AclSubject::Group(id) => id != ROOT,
                    AclSubject::OwningGroup => st_gid != ROOT,
                    AclSubject::Owner | AclSubject::Mask | AclSubject::Others => false,
                }
            })
        })
    }
}

/// Where a path leads.
struct Place {
    directory: Entry,
    name: OsString,
    /// `None` if the directory has no such entry.
    entry: Option<Entry>,
    /// Whether another user can change which directory this is.
    is_foreign: bool,
}

/// Follows a path.
struct Walk {
    directory: Entry,
    /// Components to follow, in reverse order.
    ahead: Vec<OsString>,
    /// The user whose link was followed.
    leader: Option<u32>,
    is_foreign: bool,
    links: usize,
    /// The owner of the root directory, who is root except in some containers.
    top: u32,
}

impl Walk {
    fn along(path: &Path) -> io::Result<Place> {
        let directory = enter(CWD, OsStr::new("/"))?;
        let top = directory.stat.st_uid;
        let mut walk = Walk { directory, ahead: Vec::new(), leader: None, is_foreign: false, links: 0, top };
        walk.push(&absolute(path)?);
        walk.go()
    }

    fn push(&mut self, path: &Path) {
        let names = path.components().rev().filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some(OsString::from("..")),
            _ => None,
        });
        self.ahead.extend(names);
    }

    fn go(mut self) -> io::Result<Place> {
        while let Some(name) = self.ahead.pop() {
            self.pass_directory();
            let entry = match enter(&self.directory.fd, &name) {
                Err(Errno::NOENT) if self.ahead.is_empty() => return self.end(name, None),
                entry => entry?,
            };
            if name == ".." {
                // The owner of a directory may have moved it.
                self.follow(self.directory.stat.st_uid)?;
            }
            let entry = match FileType::from_raw_mode(entry.stat.st_mode) {
                FileType::Symlink => self.follow_link(entry, &name)?,
                _ => Some(entry),
            };
            match entry {
                Some(entry) if self.ahead.is_empty() => return self.end(name, Some(entry)),
                Some(entry) => self.directory = entry,
                None => {}
            }
        }
        let entry = enter(&self.directory.fd, OsStr::new("."))?;
        self.end(OsString::from("."), Some(entry))
    }

    /// Puts the target of a link ahead, or returns what it leads to if only the kernel can tell.
    fn follow_link(&mut self, link: Entry, name: &OsStr) -> io::Result<Option<Entry>> {
        self.links += 1;
        if self.links > MAX_LINKS {
            return Err(Errno::LOOP.into());
        }
        self.check_names(&link)?;
        self.follow(link.stat.st_uid)?;
        if fstatfs(&link.fd)?.f_type == PROC_SUPER_MAGIC {
            // The text of such a link need not be a path: /dev/stdin leads to one.
            let fd = openat(&self.directory.fd, name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
            return Ok(Some(Entry { stat: fstat(&fd)?, fd }));
        }
        let target = readlinkat(&link.fd, "", Vec::new())?;
        let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
        if target.is_absolute() {
            self.directory = enter(CWD, OsStr::new("/"))?;
        }
        self.push(&target);
        Ok(None)
    }

    /// Ends at the entry `name` of the directory.
    fn end(self, name: OsString, entry: Option<Entry>) -> io::Result<Place> {
        if let Some(entry) = &entry {
            self.check_names(entry)?;
        }
        if let Some(leader) = self.leader {
            let own = [Some(&self.directory), entry.as_ref()];
            if !own.into_iter().flatten().any(|own| own.stat.st_uid == leader) {
                return Err(led());
            }
        }
        Ok(Place { directory: self.directory, name, entry, is_foreign: self.is_foreign })
    }

    fn is_another(&self, user: u32) -> bool {
        user != ROOT && user != self.top
    }

    /// Notes whether another user can replace entries of the present directory.
    fn pass_directory(&mut self) {
        let Stat { st_uid, st_mode, .. } = self.directory.stat;
        self.is_foreign |= self.is_another(st_uid) || st_mode & STICKY == 0 && self.directory.others_write();
    }

    /// Notes that this user decides where the path leads.
    fn follow(&mut self, user: u32) -> io::Result<()> {
        if self.is_another(user) {
            self.is_foreign = true;
            if *self.leader.get_or_insert(user) != user {
                return Err(led());
            }
        }
        Ok(())
    }

    /// Refuses a further name (hard link) of a file of somebody else, in a directory where others
    /// can make one.
    fn check_names(&self, entry: &Entry) -> io::Result<()> {
        let (directory, owner) = (&self.directory, entry.stat.st_uid);
        let is_alone =
            FileType::from_raw_mode(entry.stat.st_mode) == FileType::Directory || entry.stat.st_nlink < 2;
        let is_owners = match self.is_another(directory.stat.st_uid) {
            true => owner == directory.stat.st_uid,
            false => self.is_another(owner) || !directory.others_write(),
        };
        if is_alone || is_owners { Ok(()) } else { Err(led()) }
    }
}

/// Opens an entry of a directory with `O_PATH`; a link itself if it is one.
fn enter(directory: impl AsFd, name: &OsStr) -> rustix::io::Result<Entry> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // Only as a directory is an automatic mount point mounted.
    let fd = match openat(&directory, name, flags | OFlags::DIRECTORY, Mode::empty()) {
        Err(Errno::NOTDIR) => openat(&directory, name, flags, Mode::empty())?,
        opened => opened?,
    };
    Ok(Entry { stat: fstat(&fd)?, fd })
}

fn led() -> io::Error {
    io::Error::new(
        io::ErrorKind::PermissionDenied,
        "root does not follow a link of another user to what is not that user's; name the file itself",
    )
}

fn is_root() -> bool {
    geteuid().is_root()
}

const ROOT: u32 = 0;
/// Write permission of everybody.
const OTHERS_WRITE: u32 = 0o002;
/// Write permission of the group.
const GROUP_WRITE: u32 = 0o020;
/// In such a directory users can replace only their own entries.
const STICKY: u32 = 0o1000;
/// Maximum number of symbolic links in a path, as in Linux.
const MAX_LINKS: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{XattrFlags, setxattr};
    use std::fs;
    use std::os::unix::fs::{MetadataExt, chown, lchown, symlink};
    use tempfile::TempDir;

    const ALICE: u32 = 4_000_001;
    const BOB: u32 = 4_000_002;

    /// A directory of root's with the file `own`, and in it the directories of two users with the
    /// file `theirs`; `None` without root.
    fn home() -> Option<TempDir> {
        if !is_root() {
            println!("skipped: needs root");
            return None;
        }
        let home = tempfile::tempdir().unwrap();
        let at = |name: &str| home.path().join(name);
        fs::write(at("own"), "root").unwrap();
        for (name, user) in [("alice", ALICE), ("bob", BOB)] {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join("theirs"), name).unwrap();
            give(&at(name).join("theirs"), user);
            give(&at(name), user);
        }
        Some(home)
    }

    fn give(path: &Path, user: u32) {
        lchown(path, Some(user), Some(user)).unwrap();
    }

    /// Makes a link of that user.
    fn link(user: u32, target: &Path, at: &Path) {
        symlink(target, at).unwrap();
        give(at, user);
    }

    fn read(path: &Path) -> Result<String, io::ErrorKind> {
        open(path, OFlags::RDONLY, Mode::empty()).and_then(io::read_to_string).map_err(|error| error.kind())
    }

    fn create(path: &Path) -> io::Result<File> {
        open(path, OFlags::WRONLY | OFlags::CREATE, Mode::RUSR)
    }

    const REFUSED: Result<String, io::ErrorKind> = Err(io::ErrorKind::PermissionDenied);

    #[test]
    fn a_link_of_another_user_leads_to_what_that_user_owns_and_nowhere_else() {
        let Some(home) = home() else { return };
        let at = |name: &str| home.path().join(name);
        for (name, target, found) in [
            ("to_root", at("own"), REFUSED),
            ("to_root_by_steps", "../own".into(), REFUSED),
            ("to_own", at("alice/theirs"), Ok("alice".to_owned())),
            ("to_own_by_name", "theirs".into(), Ok("alice".to_owned())),
            ("to_bob", at("bob/theirs"), REFUSED),
            ("to_nothing", at("alice/nothing"), Err(io::ErrorKind::NotFound)),
        ] {
            link(ALICE, &target, &at("alice").join(name));
            assert_eq!(read(&at("alice").join(name)), found, "{name}");
        }
        link(ALICE, Path::new("to_itself"), &at("alice/to_itself"));
        let error = open(&at("alice/to_itself"), OFlags::RDONLY, Mode::empty()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::LOOP.raw_os_error()));
        assert_eq!(stat(&at("alice/to_root")).map_err(|error| error.kind()).err(), REFUSED.err());
        link(ALICE, home.path(), &at("alice/to_directory"));
        assert_eq!(read(&at("alice/to_directory/own")), REFUSED);
        assert_eq!(read(&at("alice/to_directory/alice/theirs")).as_deref(), Ok("alice"));
        link(ALICE, &at("bob/theirs"), &at("alice/through_bob"));
        link(BOB, &at("alice/theirs"), &at("bob/back"));
        link(ALICE, &at("bob/back"), &at("alice/through_bob_and_back"));
        assert_eq!(read(&at("alice/through_bob")), REFUSED);
        assert_eq!(read(&at("alice/through_bob_and_back")), REFUSED);
    }

    #[test]
    fn what_root_has_linked_or_put_there_is_found() {
        let Some(home) = home() else { return };
        let at = |name: &str| home.path().join(name);
        symlink(at("alice"), at("link")).unwrap();
        symlink(at("own"), at("alice/of_root")).unwrap();
        assert_eq!(read(&at("link/theirs")).as_deref(), Ok("alice"));
        assert_eq!(read(&at("link/of_root")).as_deref(), Ok("root"), "only root can have made it");
        fs::write(at("alice/put"), "root").unwrap();
        assert_eq!(read(&at("alice/put")).as_deref(), Ok("root"));
        let given = File::open(at("own")).unwrap();
        assert_eq!(read(Path::new(&format!("/dev/fd/{}", given.as_raw_fd()))).as_deref(), Ok("root"));
        assert!(read(Path::new("/proc/self/comm")).is_ok());
    }

    #[test]
    fn only_the_expected_file_is_removed_and_not_through_a_link_of_another_user() {
        let Some(home) = home() else { return };
        let at = |name: &str| home.path().join(name);
        let expected = stat(&at("own")).unwrap();
        let is_expected = |found: &Stat| found.st_ino == expected.st_ino;
        // A user who replaces a directory does not choose what root removes.
        link(ALICE, home.path(), &at("alice/directory"));
        assert!(remove(&at("alice/directory/own"), is_expected).is_err() && at("own").exists());
        link(ALICE, &at("own"), &at("alice/link"));
        assert!(remove(&at("alice/link"), is_expected).is_err());
        remove(&at("alice/theirs"), is_expected).unwrap();
        assert!(at("own").exists() && at("alice/link").is_symlink() && at("alice/theirs").exists());
        remove(&at("own"), is_expected).unwrap();
        assert!(!at("own").exists());
    }

    #[test]
    fn a_further_name_of_a_file_is_that_of_its_owner() {
        let Some(home) = home() else { return };
        let at = |name: &str| home.path().join(name);
        fs::hard_link(at("own"), at("alice/second")).unwrap();
        fs::hard_link(at("alice/theirs"), at("alice/also_theirs")).unwrap();
        fs::hard_link(at("own"), at("third")).unwrap();
        assert_eq!(read(&at("alice/second")), REFUSED);
        assert_eq!(read(&at("alice/also_theirs")).as_deref(), Ok("alice"));
        assert_eq!(read(&at("third")).as_deref(), Ok("root"), "only root can have made it");
        for (name, mode, group) in [("public", 0o1777, ROOT), ("of_group", 0o770, ALICE)] {
            let shared = at(name);
            fs::create_dir(&shared).unwrap();
            chown(&shared, None, Some(group)).unwrap();
            fs::set_permissions(&shared, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
            fs::hard_link(at("own"), shared.join("fourth")).unwrap();
            assert_eq!(read(&shared.join("fourth")), REFUSED, "{name}");
        }
    }

    /// Makes a directory of root's with this ACL: tag, permissions, ID.
    fn with_acl(path: &Path, group: u32, named: &[(u8, u8, u32)]) -> rustix::io::Result<()> {
        fs::create_dir(path).unwrap();
        chown(path, None, Some(group)).unwrap();
        let (own, others) = ([(1, 7, !0)], [(16, 7, !0), (32, 5, !0)]);
        let entries = own.iter().chain(named).chain(&others);
        let bytes = entries.flat_map(|&(tag, permissions, id): &(u8, u8, u32)| {
            [[tag, 0, permissions, 0], id.to_le_bytes()].concat()
        });
        let acl: Vec<u8> = 2_u32.to_le_bytes().into_iter().chain(bytes).collect();
        setxattr(path, "system.posix_acl_access", &acl, XattrFlags::empty())
    }

    #[test]
    fn an_acl_says_who_may_write_and_not_the_group_bits_of_the_mode() {
        let Some(home) = home() else { return };
        let (users, no_group, group) = (|id| (2, 7, id), (4, 5, !0), (4, 7, !0));
        for (nth, (gid, named, is_shared)) in [
            (ROOT, &[users(ALICE), no_group][..], true),
            (ROOT, &[users(ROOT), group], false),
            (ALICE, &[users(ROOT), no_group], false),
            (ALICE, &[users(ROOT), group], true),
            (ROOT, &[no_group, (8, 7, ALICE)], true),
            (ROOT, &[(2, 5, ALICE), no_group, (8, 7, ROOT)], false),
        ]
        .into_iter()
        .enumerate()
        {
            let directory = home.path().join(nth.to_string());
            let made = with_acl(&directory, gid, named);
            if made == Err(Errno::OPNOTSUPP) {
                println!("skipped: {} is on a file system without ACLs", directory.display());
                return;
            }
            made.unwrap();
            assert_eq!(fs::metadata(&directory).unwrap().mode() & GROUP_WRITE, GROUP_WRITE);
            fs::hard_link(home.path().join("own"), directory.join("second")).unwrap();
            assert_eq!(read(&directory.join("second")).is_err(), is_shared, "{named:?}");
            assert_eq!(resolve(&directory.join("new")).unwrap().is_foreign(), is_shared, "{named:?}");
        }
    }

    #[test]
    fn nothing_is_created_where_another_users_link_leads() {
        let Some(home) = home() else { return };
        let at = |name: &str| home.path().join(name);
        link(ALICE, &at("made"), &at("alice/dangling"));
        assert!(create(&at("alice/dangling")).is_err());
        link(ALICE, home.path(), &at("alice/out"));
        assert!(create(&at("alice/out/made")).is_err());
        assert!(resolve(&at("alice/out/made")).is_err());
        assert!(!at("made").exists());
        link(ALICE, &at("alice/made"), &at("alice/dangling_within"));
        create(&at("alice/dangling_within")).unwrap();
        assert_eq!(fs::metadata(at("alice/made")).unwrap().uid(), ROOT);
        assert_eq!(read(&at("alice/dangling_within")).as_deref(), Ok(""), "also when it is there");
        create(&at("mine")).unwrap();
        assert!(at("mine").exists());
    }

    #[test]
    fn a_resolved_path_stays_in_the_directory_that_was_found() {
        let Some(home) = home() else { return };
        let at = |name: &str| home.path().join(name);
        fs::create_dir(at("alice/inner")).unwrap();
        chown(at("alice/inner"), Some(ALICE), None).unwrap();
        let resolved = resolve(&at("alice/inner/new")).unwrap();
        assert!(resolved.is_foreign());
        fs::rename(at("alice/inner"), at("alice/moved")).unwrap();
        link(ALICE, home.path(), &at("alice/inner"));
        fs::write(resolved.as_path(), "").unwrap();
        assert!(at("alice/moved/new").exists() && !at("new").exists());
        let own = resolve(&at("own")).unwrap();
        assert_eq!((own.as_path(), own.is_foreign()), (&*at("own").canonicalize().unwrap(), false));
    }
}
