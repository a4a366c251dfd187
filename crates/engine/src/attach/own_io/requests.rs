//! The requests that a process for I/O on one disk executes.

use rustix::fs::OFlags;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Executes requests, which are lines, on a disk, as the program of
/// [`IoProcesses`](super::IoProcesses) with the disk's path. When they end, the disk is closed.
///
/// # Errors
/// If a request cannot be read or answered, because the process that makes them has ended.
pub fn execute_requests(
    disk: &Path,
    requests: impl Iterator<Item = io::Result<String>>,
    mut answers: impl Write,
) -> io::Result<()> {
    let mut disk = OwnDisk { path: disk.to_owned(), held: None };
    for line in requests {
        let done = line?.parse().and_then(|request| disk.execute(request));
        let number = done.err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
        writeln!(answers, "{number}")?;
        answers.flush()?;
    }
    Ok(())
}

/// A request.
#[derive(Clone, Copy)]
pub(super) enum IoRequest {
    /// Read the first bytes, so many, of a block device not from the page cache.
    Read(usize),
    /// Open the disk, a block device exclusively, until the end.
    Hold,
    /// Flush the disk that is held.
    Flush,
}

impl fmt::Display for IoRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IoRequest::Read(bytes) => write!(f, "read {bytes}"),
            IoRequest::Hold => write!(f, "hold"),
            IoRequest::Flush => write!(f, "flush"),
        }
    }
}

impl FromStr for IoRequest {
    type Err = io::Error;

    fn from_str(line: &str) -> io::Result<IoRequest> {
        let bytes = line.strip_prefix("read ").and_then(|bytes| bytes.parse().ok());
        match (line, bytes) {
            (_, Some(bytes)) => Ok(IoRequest::Read(bytes)),
            ("hold", _) => Ok(IoRequest::Hold),
            ("flush", _) => Ok(IoRequest::Flush),
            _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }
}

/// A disk that the calling thread reads and flushes.
struct OwnDisk {
    path: PathBuf,
    held: Option<File>,
}

impl OwnDisk {
    fn execute(&mut self, request: IoRequest) -> io::Result<()> {
        match request {
            IoRequest::Read(bytes) => self.read(bytes),
            IoRequest::Hold => self.open(OFlags::EXCL).map(|disk| self.held = Some(disk)),
            IoRequest::Flush => {
                let not_held = || io::Error::from_raw_os_error(libc::EBADF);
                self.held.as_ref().ok_or_else(not_held)?.sync_all()
            }
        }
    }

    fn open(&self, of_block_device: OFlags) -> io::Result<File> {
        let is_block_device = fs::metadata(&self.path)?.file_type().is_block_device();
        let flags = if is_block_device { of_block_device } else { OFlags::empty() };
        OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(&self.path)
    }

    fn read(&self, bytes: usize) -> io::Result<()> {
        let disk = self.open(OFlags::DIRECT)?;
        // Direct I/O takes memory that is aligned to a block.
        let mut memory = vec![0; 2 * bytes];
        let start = memory.as_ptr().align_offset(bytes.next_power_of_two()).min(bytes);
        let data = memory.get_mut(start..start + bytes).ok_or(io::ErrorKind::InvalidInput)?;
        disk.read_exact_at(data, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufRead;

    #[test]
    fn requests_are_executed_and_answered_with_error_numbers() {
        let place = tempfile::NamedTempFile::new().unwrap();
        place.as_file().set_len(4096).unwrap();
        let answers = |disk: &Path, requests: &str| {
            let mut answers = Vec::new();
            execute_requests(disk, requests.as_bytes().lines(), &mut answers).unwrap();
            String::from_utf8(answers).unwrap()
        };
        assert_eq!(answers(place.path(), "read 512\nhold\nflush\n"), "0\n0\n0\n");
        assert_eq!(answers(place.path(), "flush\nread 8192\nwrite 1\n"), "9\n5\n22\n");
        assert_eq!(answers(Path::new("/no/such/disk"), "hold\nread 1\n"), "2\n2\n");
    }
}
