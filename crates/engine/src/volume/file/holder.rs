//! The process that has locked a file, as proc(5) shows it.

use crate::sys::safe_path;
use blockmux_volume::text::printable;
use std::fmt;
use std::fs::{self, DirEntry};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process;

/// A process that has a file locked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockHolder {
    /// Its process number.
    pub process: u32,
    /// The name of its program, as the process says.
    pub command: String,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.process == process::id() {
            true => write!(f, "this process already; give it once"),
            false => write!(f, "process {} ({}); stop that program", self.process, printable(&self.command)),
        }
    }
}

/// A process whose lock on a file excludes others; `None` if this user may not see it.
#[must_use]
pub fn lock_holder(path: &Path) -> Option<LockHolder> {
    let stat = safe_path::stat(path).ok()?;
    let file = (stat.st_dev, stat.st_ino);
    let of_descriptors = || numbers("/proc").find(|process| holds_lock(*process, file));
    // Of another user's processes, only a lock of the whole file is shown.
    let of_list = || {
        let locks = fs::read_to_string("/proc/locks").ok()?;
        let own = locks.lines().filter_map(FileLock::parse).filter(|lock| lock.is_of_device(file));
        own.filter(FileLock::excludes_others).find_map(|lock| lock.process)
    };
    let process = of_descriptors().or_else(of_list)?;
    let command = fs::read_to_string(format!("/proc/{process}/comm")).ok()?;
    Some(LockHolder { process, command: command.trim_end().to_owned() })
}

/// Whether a process has an open file with a lock on `file`, its device and inode.
fn holds_lock(process: u32, file: (u64, u64)) -> bool {
    numbers(format!("/proc/{process}/fdinfo")).any(|fd| {
        // Not every open file may be asked for its device: its server may not answer.
        let info = fs::read_to_string(format!("/proc/{process}/fdinfo/{fd}")).unwrap_or_default();
        let locks = info.lines().filter_map(|line| FileLock::parse(line.strip_prefix("lock:")?));
        let is_locked = locks.filter(|lock| lock.inode == file.1).any(|lock| lock.excludes_others());
        let is_it = || fs::metadata(format!("/proc/{process}/fd/{fd}"));
        is_locked && is_it().is_ok_and(|found| (found.dev(), found.ino()) == file)
    })
}

/// The entries of a directory that are numbers.
fn numbers(directory: impl AsRef<Path>) -> impl Iterator<Item = u32> {
    let number = |entry: DirEntry| entry.file_name().to_str()?.parse().ok();
    fs::read_dir(directory).into_iter().flatten().flatten().filter_map(number)
}

/// A line of `/proc/locks`.
#[derive(Debug, PartialEq, Eq)]
struct FileLock {
    is_of_whole_file: bool,
    /// `None` for a lock that belongs to no process, but to an open file.
    process: Option<u32>,
    /// Major and minor number of the file's device.
    device: (u32, u32),
    inode: u64,
    /// The last byte; `None` up to the end of the file.
    end: Option<u64>,
}

impl FileLock {
    fn parse(line: &str) -> Option<FileLock> {
        let words: Vec<&str> = line.split_whitespace().collect();
        // A lock that is waited for has `->` behind its number.
        let [_, kind, _, _, process, place, _, end] = words[..] else { return None };
        let mut numbers = place.split(':');
        let mut number = || u32::from_str_radix(numbers.next()?, 16).ok();
        let device = (number()?, number()?);
        let inode = numbers.next()?.parse().ok()?;
        // A process in another namespace has no number here.
        let process = process.parse().ok().filter(|process| *process > 0);
        Some(FileLock { is_of_whole_file: kind == "FLOCK", process, device, inode, end: end.parse().ok() })
    }

    /// Not so the one byte that a reader locks which shares everything (`qemu_locks`).
    fn excludes_others(&self) -> bool {
        self.is_of_whole_file || self.end.is_none_or(|end| end > SHARED_BY_READERS)
    }

    fn is_of_device(&self, (device, inode): (u64, u64)) -> bool {
        self.device == (rustix::fs::major(device), rustix::fs::minor(device)) && self.inode == inode
    }
}

/// The byte that everybody locks who reads.
const SHARED_BY_READERS: u64 = 100;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::file::kernel::{lock_byte, lock_exclusive};
    use std::fs::File;

    #[test]
    fn locks_of_files_and_of_bytes_are_read() {
        let whole = FileLock::parse("1: FLOCK  ADVISORY  WRITE 812 fd:1f:131 0 EOF").unwrap();
        let expected = FileLock {
            is_of_whole_file: true,
            process: Some(812),
            device: (0xfd, 0x1f),
            inode: 131,
            end: None,
        };
        assert_eq!(whole, expected);
        let bytes = FileLock::parse("2: OFDLCK ADVISORY  READ -1 00:2a:7 100 101").unwrap();
        assert_eq!((bytes.process, bytes.end), (None, Some(101)));
        assert_eq!(FileLock::parse("3: -> FLOCK  ADVISORY  WRITE 9 00:2a:7 0 EOF"), None);
    }

    #[test]
    fn the_holder_of_a_lock_is_found_and_a_reader_that_shares_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let file = File::create_new(&path).unwrap();
        lock_byte(&file, 100).unwrap();
        assert_eq!(lock_holder(&path), None);
        lock_byte(&file, 201).unwrap();
        let holder = lock_holder(&path).unwrap();
        assert_eq!(holder.process, process::id());
        assert_eq!(holder.to_string(), "this process already; give it once");
        drop(file);
        assert_eq!(lock_holder(&path), None);
        let file = File::open(&path).unwrap();
        lock_exclusive(&file).unwrap();
        assert_eq!(lock_holder(&path), Some(holder));
    }

    #[test]
    fn the_name_of_a_program_cannot_control_a_terminal() {
        let holder = LockHolder { process: 0, command: "qemu\u{1b}[2J".to_owned() };
        assert_eq!(holder.to_string(), "process 0 (qemu\\u{1b}[2J); stop that program");
    }
}
