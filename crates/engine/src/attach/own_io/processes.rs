//! The processes for I/O on disks, and the one that starts them.
//!
//! A serving daemon may not start programs. So it starts one process before it denies itself that,
//! and that process starts the others. It has no disk open, so no volume can keep it. A request to
//! it is the length of a disk's path and the path; the socket of the new process comes with it. It
//! ends with its socket.

use crate::attach::wait::wait_for;
use crate::net::fd_socket::{MESSAGE_TIME, receive_exactly, send_with_fds, wait_for_message};
use std::ffi::OsString;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::debug;

/// A program that calls [`start_processes`] without further arguments, and
/// [`execute_requests`](super::execute_requests) with the path of a disk.
#[derive(Clone, Debug)]
pub struct IoProgram {
    /// The program.
    pub path: PathBuf,
    /// Its arguments before the path of the disk.
    pub arguments: Vec<String>,
}

/// Starts a process for the I/O on each disk. Clones belong together.
#[derive(Clone, Debug)]
pub struct IoProcesses(Arc<IoStarter>);

#[derive(Debug)]
struct IoStarter {
    program: IoProgram,
    running: Mutex<Option<RunningStarter>>,
}

impl IoProcesses {
    /// Processes of a program. None is started yet.
    #[must_use]
    pub fn of(program: IoProgram) -> IoProcesses {
        IoProcesses(Arc::new(IoStarter { program, running: Mutex::default() }))
    }

    /// Starts the process that starts the others. Without this call, the first disk starts it.
    ///
    /// # Errors
    /// If the program cannot be started.
    pub fn begin(&self) -> io::Result<()> {
        let mut running = self.0.running.lock().unwrap_or_else(PoisonError::into_inner);
        if running.is_none() {
            *running = Some(RunningStarter::start(&self.0.program)?);
        }
        Ok(())
    }

    /// Starts a process for a disk; returns its socket.
    pub(super) fn start(&self, disk: &Path) -> io::Result<UnixStream> {
        let (socket, its) = UnixStream::pair()?;
        let mut running = self.0.running.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = running.as_ref().is_some_and(|running| running.ask(disk, its.as_fd()).is_ok());
        if !asked {
            // It is not started, or somebody has killed it.
            *running = None;
            running.insert(RunningStarter::start(&self.0.program)?).ask(disk, its.as_fd())?;
        }
        Ok(socket)
    }
}

/// The process that starts the others.
#[derive(Debug)]
struct RunningStarter {
    /// `None` if a thread of a test does its work.
    process: Option<Child>,
    socket: UnixStream,
}

impl RunningStarter {
    fn start(program: &IoProgram) -> io::Result<RunningStarter> {
        let (socket, its) = UnixStream::pair()?;
        let mut command = Command::new(&program.path);
        command
            .args(&program.arguments)
            .stdin(OwnedFd::from(its))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // Signals of a terminal are for the process that serves the disks.
        let failed =
            |error| io::Error::other(format!("{} cannot be started: {error}", program.path.display()));
        let process = Some(command.process_group(0).spawn().map_err(failed)?);
        Ok(RunningStarter { process, socket })
    }

    fn ask(&self, disk: &Path, socket: BorrowedFd<'_>) -> io::Result<()> {
        let path = disk.as_os_str().as_bytes();
        let len = u16::try_from(path.len()).map_err(|_| io::ErrorKind::InvalidFilename)?;
        let message = [&len.to_ne_bytes(), path].concat();
        send_with_fds(&self.socket, &message, &[socket], Instant::now() + MESSAGE_TIME)
    }
}

impl Drop for RunningStarter {
    fn drop(&mut self) {
        // It fails if the process has ended.
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Some(process) = &mut self.process {
            wait_for(ENDS, || process.try_wait().transpose());
        }
    }
}

/// Starts processes of a program as the process at the other end of a socket asks for, until it
/// closes the socket.
///
/// # Errors
/// If a request cannot be received.
pub fn start_processes(program: &IoProgram, socket: &impl AsFd) -> io::Result<()> {
    let mut started = Vec::<Child>::new();
    loop {
        let (mut len, mut fds) = ([0; 2], Vec::new());
        wait_for_message(socket)?;
        let deadline = Instant::now() + MESSAGE_TIME;
        match receive_exactly(socket, &mut len, &mut fds, deadline) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => return Ok(()),
            received => received?,
        }
        let mut path = vec![0; u16::from_ne_bytes(len).into()];
        receive_exactly(socket, &mut path, &mut fds, deadline)?;
        let disk = PathBuf::from(OsString::from_vec(path));
        // Those that have ended are zombies until somebody asks for their status.
        started.retain_mut(|process| matches!(process.try_wait(), Ok(None)));
        let Some(its) = fds.pop().map(UnixStream::from) else { continue };
        match start_process(program, &disk, &its) {
            Ok(process) => started.push(process),
            Err(error) => {
                debug!("{}: {error}", program.path.display());
                // It is the answer to the first request.
                let _ = writeln!(&its, "{}", error.raw_os_error().unwrap_or(libc::EIO));
            }
        }
    }
}

fn start_process(program: &IoProgram, disk: &Path, socket: &UnixStream) -> io::Result<Child> {
    let mut command = Command::new(&program.path);
    command.args(&program.arguments).arg(disk).stderr(Stdio::null());
    command.stdin(OwnedFd::from(socket.try_clone()?)).stdout(OwnedFd::from(socket.try_clone()?));
    command.process_group(0).spawn()
}

/// The time in which a process ends that waits for nothing.
const ENDS: Duration = Duration::from_secs(1);

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::io::Read;
    use std::thread;

    /// Processes of a shell script, whose `$0` is the disk.
    pub(in crate::attach::own_io) fn of_script(script: &str) -> IoProcesses {
        of_program(IoProgram { path: "sh".into(), arguments: vec!["-c".to_owned(), script.to_owned()] })
    }

    /// Processes that a thread starts.
    fn of_program(program: IoProgram) -> IoProcesses {
        let processes = IoProcesses::of(program.clone());
        let (socket, its) = UnixStream::pair().unwrap();
        thread::spawn(move || start_processes(&program, &its));
        *processes.0.running.lock().unwrap() = Some(RunningStarter { process: None, socket });
        processes
    }

    fn said_by(socket: io::Result<UnixStream>) -> String {
        let mut said = String::new();
        socket.unwrap().read_to_string(&mut said).unwrap();
        said
    }

    #[test]
    fn each_disk_has_a_process_of_its_own() {
        let processes = of_script("echo \"$0\"");
        let both = ["/dev/a", "/dev/with space"].map(|disk| processes.start(Path::new(disk)));
        assert_eq!(both.map(said_by), ["/dev/a\n", "/dev/with space\n"]);
    }

    #[test]
    fn a_program_that_cannot_be_started_is_an_error_of_each_disk() {
        let program = IoProgram { path: "/no/such/program".into(), arguments: Vec::new() };
        assert_eq!(said_by(of_program(program.clone()).start(Path::new("disk"))), "2\n");
        let error = IoProcesses::of(program.clone()).begin().unwrap_err();
        assert!(error.to_string().starts_with("/no/such/program cannot be started: "), "{error}");
        assert!(IoProcesses::of(program).start(Path::new("disk")).is_err());
    }

    #[test]
    fn a_starter_that_was_killed_is_started_again() {
        let processes = IoProcesses::of(IoProgram { path: "cat".into(), arguments: Vec::new() });
        let (socket, its) = UnixStream::pair().unwrap();
        drop(its);
        *processes.0.running.lock().unwrap() = Some(RunningStarter { process: None, socket });
        processes.start(Path::new("disk")).unwrap();
        let running = processes.0.running.lock().unwrap();
        assert!(running.as_ref().unwrap().process.is_some());
    }
}
