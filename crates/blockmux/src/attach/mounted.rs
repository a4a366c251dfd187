//! `attach --mount`: a disk with its file system mounted.

use crate::failure::Failure;
use blockmux_engine::attach::own_io::OwnIo;
use blockmux_engine::attach::{AttachedAs, AttachedDisk, DetachError, mount_points};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tracing::{info, warn};

/// A disk whose file system is mounted as long as the disk is attached.
pub(super) struct MountedDisk {
    disk: Arc<dyn AttachedDisk>,
    directory: PathBuf,
}

impl MountedDisk {
    /// Mounts the file system of `disk`, as mount(8) does. One that a process that has ended has
    /// left mounted there stays so. The disk is removed by force when `io` is aborted: mount(8)
    /// ends then, though its volume does not answer.
    ///
    /// # Errors
    /// If it cannot be mounted; the disk is detached then.
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
        let hanging = mounted.disk.clone();
        io.on_abort(Box::new(move || {
            hanging.detach_by_force().unwrap_or_else(|error| warn!("{}: {error}", hanging.path().display()));
        }));
        let mut mount = Command::new("mount");
        let mount = if read_only { mount.args(["-o", "ro"]) } else { &mut mount };
        match run(mount.arg(&node).arg(directory)) {
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

    fn unmount(&self, how: &[&str]) -> Result<(), String> {
        if self.is_mounted() { run(Command::new("umount").args(how).arg(&self.directory)) } else { Ok(()) }
    }
}

impl AttachedDisk for MountedDisk {
    fn path(&self) -> PathBuf {
        self.disk.path()
    }

    fn attached_as(&self) -> AttachedAs {
        self.disk.attached_as()
    }

    fn detach(&self) -> Result<(), DetachError> {
        if let Err(said) = self.unmount(&[]) {
            info!("umount: {said}");
            let places = vec![self.directory.display().to_string()];
            return Err(DetachError::InUse { node: self.path(), places });
        }
        self.disk.detach()
    }

    fn detach_by_force(&self) -> Result<(), DetachError> {
        self.disk.detach_by_force()?;
        self.unmount(&["-l"]).unwrap_or_else(|said| warn!("umount: {said}"));
        Ok(())
    }

    fn when_removed(&self, tell: Box<dyn FnOnce() + Send>) {
        self.disk.when_removed(tell);
    }
}

/// Runs a program; returns what it has said if it failed.
fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(said.trim().lines().last().unwrap_or("it failed").trim_start_matches("mount: ").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_says_is_reported() {
        assert_eq!(run(&mut Command::new("true")), Ok(()));
        let said = run(Command::new("sh").args(["-c", "echo mount: /x: bad superblock >&2; false"]));
        assert_eq!(said, Err("/x: bad superblock".to_owned()));
        assert!(run(&mut Command::new("/no/such/program")).is_err());
    }
}
