//! I/O of a process on a disk that it serves itself: a read before it tells that the disk is there,
//! and a flush before it removes the disk.
//!
//! A thread that waits for such I/O cannot be killed while the volume does not answer, and until
//! the thread ends, the kernel keeps the files of its process open. So the disk of a process that
//! ends would keep its server, and no other process could go on with it or remove it. Therefore a
//! process of its own, which has only the disk open, does the I/O. It executes requests, which are
//! lines on its standard input, and answers each with a line: an error number, or 0. It ends with
//! its input.
//!
//! | request | meaning |
//! |---|---|
//! | `read N` | read the first N bytes, of a block device not from the page cache |
//! | `hold` | open the disk, a block device exclusively, until the end |
//! | `flush` | flush the disk that is held |

mod processes;
mod requests;

pub use self::processes::{IoProcesses, IoProgram, start_processes};
pub use self::requests::execute_requests;

use self::requests::IoRequest;
use super::notice::Notice;
use super::wait::wait_for;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tracing::debug;

/// What does a process's I/O on its own disk, and how that ends early. Clones belong together.
#[derive(Clone, Default)]
pub struct OwnIo {
    /// `None` for a disk that this process never reads or flushes, as one of a virtual machine.
    processes: Option<IoProcesses>,
    /// Attaching is given up.
    abort: Arc<Notice>,
    /// The disk is left to the next process.
    leave: Arc<Notice>,
}

impl OwnIo {
    /// I/O on a disk by a process of its own.
    #[must_use]
    pub fn by(processes: &IoProcesses) -> OwnIo {
        OwnIo { processes: Some(processes.clone()), ..OwnIo::default() }
    }

    /// Gives up attaching the disk: what waits for its first read fails.
    pub fn abort(&self) {
        self.abort.give();
    }

    /// Calls `act` when attaching is given up, instead of what was to be called before.
    pub fn on_abort(&self, act: Box<dyn FnOnce() + Send>) {
        self.abort.on_given(act);
    }

    /// Gives up detaching the disk: what waits for its flush fails.
    pub(super) fn leave(&self) {
        self.leave.give();
    }

    /// Reads the first block of a disk or file, as soon as its permissions allow that.
    pub(super) fn read(&self, disk: &Path, block: usize) -> io::Result<()> {
        let mut process = self.start(disk)?;
        self.on_abort(process.end()?);
        let read = || match process.execute(IoRequest::Read(block)) {
            // udev may be about to give the disk to the user.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => None,
            done => Some(done),
        };
        wait_for(PERMITTED, read).unwrap_or_else(|| Err(io::ErrorKind::PermissionDenied.into()))
    }

    /// Opens a disk or file, a block device exclusively. `ResourceBusy` if somebody uses that.
    pub(super) fn hold(&self, disk: &Path) -> io::Result<HeldDisk> {
        let mut process = self.start(disk)?;
        self.leave.on_given(process.end()?);
        let hold = || match process.execute(IoRequest::Hold) {
            // A program such as mkfs may be about to close it.
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => None,
            done => Some(done),
        };
        let held = wait_for(CLOSES, hold).unwrap_or_else(|| Err(io::ErrorKind::ResourceBusy.into()));
        held.map(|()| HeldDisk(process))
    }

    fn start(&self, disk: &Path) -> io::Result<IoProcess> {
        let processes = self.processes.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        processes.start(disk).map(|socket| IoProcess(BufReader::new(socket)))
    }
}

impl fmt::Debug for OwnIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnIo").field("processes", &self.processes).finish_non_exhaustive()
    }
}

/// A disk or file that is open until this is dropped. A block device cannot be mounted meanwhile.
pub(super) struct HeldDisk(IoProcess);

impl HeldDisk {
    /// Waits until everything that was written is on the volume.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.0.execute(IoRequest::Flush)
    }
}

/// The socket of a process that reads and flushes a disk.
struct IoProcess(BufReader<UnixStream>);

impl IoProcess {
    /// Lets the process end, once the kernel does, and what waits for it fail.
    fn end(&self) -> io::Result<Box<dyn FnOnce() + Send>> {
        let socket = self.0.get_ref().try_clone()?;
        Ok(Box::new(move || socket.shutdown(Shutdown::Both).unwrap_or_default()))
    }

    fn execute(&mut self, request: IoRequest) -> io::Result<()> {
        let ended = |_| io::Error::other("the process that reads and flushes the disk has ended");
        writeln!(self.0.get_mut(), "{request}").map_err(ended)?;
        let mut answer = String::new();
        self.0.read_line(&mut answer).map_err(ended)?;
        match answer.trim_end().parse() {
            Ok(0) => Ok(()),
            Ok(number) => Err(io::Error::from_raw_os_error(number)),
            Err(_) => Err(ended(io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

impl Drop for IoProcess {
    /// Waits until the process has closed the disk, which may be removed next. One whose I/O hangs
    /// ends later.
    fn drop(&mut self) {
        let socket = self.0.get_ref();
        let ending = socket.shutdown(Shutdown::Write).and_then(|()| socket.set_read_timeout(Some(ENDS)));
        if let Err(error) = ending.and_then(|()| self.0.read_to_end(&mut Vec::new())) {
            debug!("a process that reads and flushes a disk does not end: {error}");
        }
    }
}

/// The time in which the user may read a disk that is the user's.
const PERMITTED: Duration = Duration::from_secs(10);
/// The time in which a program closes a disk that it uses briefly.
const CLOSES: Duration = Duration::from_secs(1);
/// The time in which a process ends whose I/O does not hang.
const ENDS: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::processes::tests::of_script;
    use super::*;
    use rustix::fs::{CWD, FileType, mknodat};
    use std::fs;
    use std::path::PathBuf;
    use std::sync::mpsc;
    use std::thread;

    fn shell(script: &str) -> OwnIo {
        OwnIo::by(&of_script(script))
    }

    /// A disk at whose path a script tells that it waits.
    fn fifo() -> (tempfile::TempDir, PathBuf) {
        let place = tempfile::tempdir().unwrap();
        let fifo = place.path().join("started");
        mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).unwrap();
        (place, fifo)
    }

    #[test]
    fn errors_of_the_process_are_those_of_the_disk() {
        let busy = shell("while read -r request; do [ \"$request\" = hold ] && echo 16; done")
            .hold(Path::new("disk"));
        assert_eq!(busy.err().unwrap().kind(), io::ErrorKind::ResourceBusy);
        let mut held =
            shell("read -r hold && echo 0 && read -r flush && echo 5").hold(Path::new("disk")).unwrap();
        assert_eq!(held.flush().unwrap_err().raw_os_error(), Some(libc::EIO));
        assert!(held.flush().unwrap_err().to_string().contains("has ended"), "the process has ended");
        shell("read -r request && [ \"$request\" = 'read 512' ] && echo 0")
            .read(Path::new("disk"), 512)
            .unwrap();
    }

    #[test]
    fn a_read_waits_until_the_disk_is_the_users() {
        shell("read -r request; echo 13; read -r request; echo 1; read -r request; echo 0")
            .read(Path::new("disk"), 512)
            .unwrap();
    }

    #[test]
    fn a_read_that_hangs_is_given_up() {
        let io = shell("read -r request; echo started >\"$0\"; read -r end");
        let (_place, fifo) = fifo();
        let (sender, done) = mpsc::channel();
        let (reading, disk) = (io.clone(), fifo.clone());
        thread::spawn(move || sender.send(reading.read(&disk, 512)));
        assert_eq!(fs::read_to_string(&fifo).unwrap(), "started\n");
        io.abort();
        assert!(done.recv().unwrap().is_err());
        assert!(io.read(&fifo, 512).is_err(), "and so is every later one");
    }

    #[test]
    fn a_flush_that_hangs_is_given_up_when_the_disk_is_left_and_not_by_an_abort() {
        let io = shell("read -r hold; echo 0; read -r flush; echo started >\"$0\"; read -r end");
        let (_place, fifo) = fifo();
        io.abort();
        let mut held = io.hold(&fifo).unwrap();
        let (sender, done) = mpsc::channel();
        thread::spawn(move || sender.send(held.flush()));
        assert_eq!(fs::read_to_string(&fifo).unwrap(), "started\n");
        io.leave();
        assert!(done.recv().unwrap().is_err());
    }
}
