//! Opens regular files that the user has named.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a regular file; a pipe or terminal would block, and a device may have no end.
///
/// # Errors
/// If it cannot be opened, or is not a regular file.
pub(crate) fn open(path: impl AsRef<Path>) -> io::Result<File> {
    open_as(path.as_ref(), File::options().read(true))
}

/// Opens a regular file to append to it, and creates it if it does not exist.
///
/// # Errors
/// If it cannot be opened, or is not a regular file.
pub(crate) fn append(path: impl AsRef<Path>) -> io::Result<File> {
    open_as(path.as_ref(), File::options().create(true).append(true))
}

fn open_as(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let not_regular = || io::Error::other("is not a regular file; give a regular file");
    // Opening a device may have effects, so it is not even opened.
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        return Err(not_regular());
    }
    let without_waiting = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = options.custom_flags(without_waiting).open(path)?;
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
