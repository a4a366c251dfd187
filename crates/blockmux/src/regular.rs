//! Opens regular files that the user has named.

use blockmux_engine::safe_path;
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io;
use std::path::Path;

/// Opens a regular file; a pipe or terminal would block, and a device may have no end.
///
/// # Errors
/// If it cannot be opened, or is not a regular file.
pub(crate) fn open(path: impl AsRef<Path>) -> io::Result<File> {
    let file = safe_path::open(path.as_ref(), OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty())?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("is not a regular file; give a regular file"));
    }
    Ok(file)
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
        assert!(open(directory.path().join("nothing")).is_err());
    }
}
