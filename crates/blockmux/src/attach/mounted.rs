//! `attach --mount`: a disk with its file system mounted.

use crate::failure::Failure;
use blockmux_engine::attach::own_io::OwnIo;
use blockmux_engine::attach::program::{self, ProgramError, RunningProgram};
use blockmux_engine::attach::{AttachedDisk, DetachError, mount_points};
use blockmux_proto::volume_state::Origin;
use rustix::process::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use tracing::{info, warn};

/// A disk whose file system is mounted as long as the disk is attached.
pub(super) struct MountedDisk {
    disk: Arc<dyn AttachedDisk>,
    directory: PathBuf,
}

impl MountedDisk {
    /// Mounts the file system of `disk`, as mount(8) does. One that a process that has ended has
    /// left mounted there stays so. If `io` is aborted, mount(8) is killed, and the disk returned,
    /// mounted or not: the caller gives it up.
    ///
    /// # Errors
    /// If it cannot be mounted; the disk is detached then, unless it is in use.
    pub(super) fn mount(
        disk: Arc<dyn AttachedDisk>,
        directory: &Path,
        read_only: bool,
        io: &OwnIo,
    ) -> Result<MountedDisk, Failure> {
        let node = disk.path();
        let mounted = MountedDisk { disk, directory: directory.to_owned() };
        if mounted.is_mounted() {
            return Ok(mounted);
        }
        let mut mount = Command::new("mount");
        let mount = if read_only { mount.args(["-o", "ro"]) } else { &mut mount };
        match run_unless_aborted(mount.arg(&node).arg(directory), io) {
            Ok(()) => Ok(mounted),
            Err(said) => {
                mounted.disk.detach().unwrap_or_else(|error| warn!("{}: {error}", node.display()));
                Err(Failure::request(format!("{} cannot be mounted: {said}", node.display())))
            }
        }
    }

    fn is_mounted(&self) -> bool {
        let node = self.disk.path();
        let directory = fs::canonicalize(&self.directory).unwrap_or_else(|_| self.directory.clone());
        mount_points(&node).iter().any(|place| Path::new(place) == directory)
    }

    fn unmount(&self, how: &[&str]) -> Result<(), ProgramError> {
        if !self.is_mounted() {
            return Ok(());
        }
        program::run(Command::new("umount").args(how).arg(&self.directory)).map(drop)
    }
}

impl AttachedDisk for MountedDisk {
    /// If the disk stays, the file system stays mounted, too.
    fn inner(&self) -> Option<&dyn AttachedDisk> {
        Some(&*self.disk)
    }

    fn path(&self) -> PathBuf {
        self.disk.path()
    }

    fn origin(&self) -> Origin {
        self.disk.origin()
    }

    fn check_unused(&self) -> Result<(), DetachError> {
        self.disk.check_unused()
    }

    fn detach(&self) -> Result<(), DetachError> {
        if let Err(said) = self.unmount(&[]) {
            info!("{said}");
            let places = vec![self.directory.display().to_string()];
            return Err(DetachError::InUse { node: self.path(), places });
        }
        self.disk.detach()
    }

    fn detach_by_force(&self) -> Result<(), DetachError> {
        self.disk.detach_by_force()?;
        self.unmount(&["-l"]).unwrap_or_else(|said| warn!("{said}"));
        Ok(())
    }
}

/// Runs a program, which is killed when `io` is aborted. Then it is not waited for: while a volume
/// does not answer, the kernel does not let mount(8) end.
fn run_unless_aborted(command: &mut Command, io: &OwnIo) -> Result<(), String> {
    let program = RunningProgram::start(command).map_err(in_words)?;
    let (group, (sender, ended)) = (program.group(), mpsc::channel());
    let aborted = sender.clone();
    let wait = move || drop(sender.send(Some(program.wait(|_| ()))));
    thread::Builder::new().name("mount".to_owned()).spawn(wait).map_err(in_words)?;
    io.on_abort(Box::new(move || {
        group.signal(Signal::KILL);
        let _ = aborted.send(None);
    }));
    match ended.recv() {
        Ok(Some(ended)) => ended.map(drop).map_err(in_words),
        // It may succeed at the same time, which its mount shows.
        _ => {
            let _ = ended.recv_timeout(KILLED);
            Ok(())
        }
    }
}

fn in_words(error: impl ToString) -> String {
    error.to_string()
}

/// The time in which a process ends that is killed, unless it waits for the volume.
const KILLED: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, mknodat};
    use std::io::{BufRead, BufReader};

    #[test]
    fn an_abort_kills_a_program_that_hangs_and_one_that_is_done_is_not_killed() {
        let place = tempfile::tempdir().unwrap();
        let fifo = place.path().join("started");
        mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).unwrap();
        let io = OwnIo::default();
        let (own, path) = (io.clone(), fifo.clone());
        let hanging = thread::spawn(move || {
            let script = "exec 3>\"$0\"; echo started >&3; exec sleep 600";
            run_unless_aborted(Command::new("sh").args(["-c", script]).arg(path), &own)
        });
        let mut started = BufReader::new(fs::File::open(&fifo).unwrap());
        started.read_line(&mut String::new()).unwrap();
        io.abort();
        assert_eq!(hanging.join().unwrap(), Ok(()));
        assert_eq!(started.read_line(&mut String::new()).unwrap(), 0, "the end of the program closes it");
        let failed =
            run_unless_aborted(Command::new("sh").args(["-c", "echo no >&2; false"]), &OwnIo::default());
        assert_eq!(failed, Err("sh: no".to_owned()));
    }
}
