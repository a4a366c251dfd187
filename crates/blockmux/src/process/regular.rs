//! Opens regular files that the user has named.

use blockmux_engine::sys::safe_path;
use rustix::fs::{FileType, Mode, OFlags};
use std::fs::File;
use std::io;
use std::path::Path;

/// Opens a regular file; a pipe or terminal would block, and a device may have no end.
///
/// # Errors
/// If it cannot be opened, or is not a regular file.
pub(crate) fn open(path: impl AsRef<Path>) -> io::Result<File> {
    open_as(path.as_ref(), OFlags::RDONLY, Mode::empty())
}

/// Opens a regular file to append to it, and creates it, for its owner only, if it does not exist.
///
/// # Errors
/// If it cannot be opened, or is not a regular file.
pub(crate) fn append(path: impl AsRef<Path>) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE;
    open_as(path.as_ref(), flags, Mode::from_raw_mode(0o600))
}

fn open_as(path: &Path, flags: OFlags, mode: Mode) -> io::Result<File> {
    let not_regular = || io::Error::other("is not a regular file; give a regular file");
    // Opening a device may have effects, so it is not even opened.
    let found = safe_path::stat(path).map(|found| FileType::from_raw_mode(found.st_mode));
    if found.is_ok_and(|found| found != FileType::RegularFile) {
        return Err(not_regular());
    }
    let file = safe_path::open(path, flags | OFlags::NONBLOCK, mode)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(not_regular()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_pipe_is_refused_without_waiting() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert_eq!(open(&path).unwrap_err().to_string(), "is not a regular file; give a regular file");
        assert_eq!(append(&path).unwrap_err().to_string(), "is not a regular file; give a regular file");
        assert!(open(directory.path().join("nothing")).is_err());
        assert!(append(directory.path().join("new")).is_ok() && open(directory.path().join("new")).is_ok());
    }
}
