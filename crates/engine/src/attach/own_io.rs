//! I/O of a process on a disk that it serves itself: a read before it tells that the disk is there,
//! and a flush before it removes the disk.
//!
//! A thread that waits for such I/O cannot be killed while the volume does not answer, and until
//! the thread ends, the kernel keeps the files of its process open. So the disk of a killed process
//! would keep its server, and no other process could go on with it or remove it. Therefore a
//! program of its own, which has only the disk open, does the I/O. The program executes requests,
//! which are lines on its standard input, and answers each with a line: an error number, or 0. It
//! ends with its input.
//!
//! | request | meaning |
//! |---|---|
//! | `read N` | read the first N bytes, of a block device not from the page cache |
//! | `hold` | open the disk, a block device exclusively, until the end |
//! | `flush` | flush the disk that is held |

use super::notice::Notice;
use super::wait::wait_for;
use rustix::fs::OFlags;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use tracing::{debug, warn};

/// What does a process's I/O on its own disk, and how that ends early. Clones belong together.
#[derive(Clone, Default)]
pub struct OwnIo {
    program: Option<Arc<IoProgram>>,
    abort: Arc<Notice>,
}

/// A program that calls [`execute_requests`].
#[derive(Clone, Debug)]
pub struct IoProgram {
    /// The program.
    pub path: PathBuf,
    /// Its arguments before the path of the disk.
    pub arguments: Vec<String>,
}

impl OwnIo {
    /// I/O by a program. The default is I/O by the calling thread, for a process that may start no
    /// programs.
    #[must_use]
    pub fn by(program: IoProgram) -> OwnIo {
        OwnIo { program: Some(Arc::new(program)), ..OwnIo::default() }
    }

    /// Gives up attaching the disk: what waits for its first read fails. I/O by the calling thread
    /// goes on.
    pub fn abort(&self) {
        self.abort.give();
    }

    /// Calls `act` when attaching is given up, instead of what was to be called before.
    pub fn on_abort(&self, act: Box<dyn FnOnce() + Send>) {
        self.abort.on_given(act);
    }

    /// Reads the first block of a disk or file.
    pub(super) fn read(&self, disk: &Path, block: usize) -> io::Result<()> {
        let Some(mut process) = self.start(disk) else {
            return OwnDisk::new(disk).execute(IoRequest::Read(block));
        };
        let socket = process.socket.get_ref().try_clone()?;
        // The process ends once the kernel lets it.
        self.on_abort(Box::new(move || socket.shutdown(Shutdown::Both).unwrap_or_default()));
        process.execute(IoRequest::Read(block))
    }

    /// Opens a disk or file, a block device exclusively. `ResourceBusy` if somebody uses that.
    pub(super) fn hold(&self, disk: &Path) -> io::Result<HeldDisk> {
        let mut executor: Box<dyn Executor> = match self.start(disk) {
            Some(process) => Box::new(process),
            None => Box::new(OwnDisk::new(disk)),
        };
        let hold = || match executor.execute(IoRequest::Hold) {
            // A program such as mkfs may be about to close it.
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => None,
            done => Some(done),
        };
        let held = wait_for(CLOSES, hold).unwrap_or_else(|| Err(io::ErrorKind::ResourceBusy.into()));
        held.map(|()| HeldDisk(executor))
    }

    /// Starts the program for a disk; `None` if there is none, or it cannot be started.
    fn start(&self, disk: &Path) -> Option<IoProcess> {
        let program = self.program.as_ref()?;
        let started = IoProcess::start(program, disk);
        let failed = |error: &io::Error| {
            warn!("{}: {error}; a thread reads and flushes {}", program.path.display(), disk.display());
        };
        started.inspect_err(failed).ok()
    }
}

impl fmt::Debug for OwnIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnIo").field("program", &self.program).finish_non_exhaustive()
    }
}

/// A disk or file that is open until this is dropped. A block device cannot be mounted meanwhile.
pub(super) struct HeldDisk(Box<dyn Executor>);

impl HeldDisk {
    /// Waits until everything that was written is on the volume.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.0.execute(IoRequest::Flush)
    }
}

/// Executes the requests of a process on its disk, as the program of [`OwnIo::by`].
///
/// # Errors
/// If a request cannot be read or answered, because the process has ended.
pub fn execute_requests(disk: &Path, requests: impl BufRead, mut answers: impl Write) -> io::Result<()> {
    let mut disk = OwnDisk::new(disk);
    for line in requests.lines() {
        let done = line?.parse().and_then(|request| disk.execute(request));
        let number = done.err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
        writeln!(answers, "{number}")?;
        answers.flush()?;
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum IoRequest {
    Read(usize),
    Hold,
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

/// Executes requests on a disk.
trait Executor: Send {
    fn execute(&mut self, request: IoRequest) -> io::Result<()>;
}

/// A disk that the calling thread reads and flushes.
struct OwnDisk {
    path: PathBuf,
    held: Option<File>,
}

impl OwnDisk {
    fn new(path: &Path) -> OwnDisk {
        OwnDisk { path: path.to_owned(), held: None }
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

impl Executor for OwnDisk {
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
}

/// A process that reads and flushes a disk.
struct IoProcess {
    child: Child,
    socket: BufReader<UnixStream>,
}

impl IoProcess {
    fn start(program: &IoProgram, disk: &Path) -> io::Result<IoProcess> {
        let (socket, its) = UnixStream::pair()?;
        let mut command = Command::new(&program.path);
        command.args(&program.arguments).arg(disk).stderr(Stdio::null());
        command.stdin(OwnedFd::from(its.try_clone()?)).stdout(OwnedFd::from(its));
        // Signals of a terminal are for the process that serves the disk.
        let child = command.process_group(0).spawn()?;
        Ok(IoProcess { child, socket: BufReader::new(socket) })
    }
}

impl Executor for IoProcess {
    fn execute(&mut self, request: IoRequest) -> io::Result<()> {
        let ended = |_| io::Error::other("the process that reads and flushes the disk has ended");
        writeln!(self.socket.get_mut(), "{request}").map_err(ended)?;
        let mut answer = String::new();
        self.socket.read_line(&mut answer).map_err(ended)?;
        match answer.trim_end().parse() {
            Ok(0) => Ok(()),
            Ok(number) => Err(io::Error::from_raw_os_error(number)),
            Err(_) => Err(ended(io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

impl Drop for IoProcess {
    fn drop(&mut self) {
        // It fails if the process has just ended.
        let _ = self.child.kill();
        // The disk is removed next, and has to be closed. A process whose I/O hangs ends later.
        if wait_for(ENDS, || self.child.try_wait().transpose()).is_none() {
            debug!("process {} waits for its disk", self.child.id());
        }
    }
}

/// The time in which a program closes a disk that it uses briefly.
const CLOSES: Duration = Duration::from_secs(1);
/// The time in which a process ends whose I/O does not hang.
const ENDS: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    fn shell(script: &str) -> OwnIo {
        OwnIo::by(IoProgram { path: "sh".into(), arguments: vec!["-c".to_owned(), script.to_owned()] })
    }

    #[test]
    fn requests_are_executed_and_answered_with_error_numbers() {
        let place = tempfile::NamedTempFile::new().unwrap();
        place.as_file().set_len(4096).unwrap();
        let answers = |disk: &Path, requests: &str| {
            let mut answers = Vec::new();
            execute_requests(disk, requests.as_bytes(), &mut answers).unwrap();
            String::from_utf8(answers).unwrap()
        };
        assert_eq!(answers(place.path(), "read 512\nhold\nflush\n"), "0\n0\n0\n");
        assert_eq!(answers(place.path(), "flush\nread 8192\nwrite 1\n"), "9\n5\n22\n");
        assert_eq!(answers(Path::new("/no/such/disk"), "hold\nread 1\n"), "2\n2\n");
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
    fn a_read_that_hangs_is_given_up() {
        let io = shell("read -r request; echo started >\"$0\"; exec sleep 600");
        let place = tempfile::tempdir().unwrap();
        let fifo = place.path().join("started");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let (sender, done) = mpsc::channel();
        let (reading, disk) = (io.clone(), fifo.clone());
        thread::spawn(move || sender.send(reading.read(&disk, 512)));
        assert_eq!(fs::read_to_string(&fifo).unwrap(), "started\n");
        io.abort();
        assert!(done.recv().unwrap().is_err());
        assert!(io.read(&fifo, 512).is_err(), "and so is every later one");
    }

    #[test]
    fn a_program_that_cannot_be_started_leaves_the_io_to_the_thread() {
        let place = tempfile::NamedTempFile::new().unwrap();
        place.as_file().set_len(512).unwrap();
        let io = OwnIo::by(IoProgram { path: "/no/such/program".into(), arguments: Vec::new() });
        io.read(place.path(), 512).unwrap();
        io.hold(place.path()).unwrap().flush().unwrap();
    }
}
