//! What the daemon does for disks of its machine before it serves and drops its privileges.

use super::disks::{self, Disks};
use super::setup::Setup;
use crate::attach::memory;
use crate::attach::own_io::by_this_program;
use crate::failure::Failure;
use crate::process::privileges::PrivilegedThread;
use blockmux_engine::attach::own_io::IoProcesses;
use blockmux_engine::core::cores::Cores;

/// The preparations for attaching the disks of a config.
pub(super) struct DiskSetup {
    io: IoProcesses,
    has_disks: bool,
    drops_privileges: bool,
}

impl DiskSetup {
    /// Prepares the memory of the process, and the processes that read and flush disks. Threads and
    /// programs inherit what this one is, so call it before others are started, before the user is
    /// changed, and before programs may no longer be started.
    ///
    /// # Errors
    /// If a way of attaching is not possible, or the processes cannot be started.
    pub(super) fn begin(
        setup: &Setup,
        drops_privileges: bool,
        runs_command: bool,
    ) -> Result<DiskSetup, Failure> {
        let allowed =
            setup.attachments.iter().try_for_each(|asked| disks::check_mounts(asked, !drops_privileges));
        allowed.map_err(|failure| setup.located(failure))?;
        let (io, has_disks) = (by_this_program(), setup.serves_disks());
        if has_disks {
            memory::keep_for_disks(!drops_privileges);
            io.begin().map_err(|error| Failure::run(format!("disks cannot be read and flushed: {error}")))?;
            if !runs_command {
                memory::outlive_others();
            }
        }
        Ok(DiskSetup { io, has_disks, drops_privileges })
    }

    /// Lets a thread keep the capabilities for attaching and detaching, if the others are about to
    /// drop theirs.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(super) fn finish(&self) -> Result<Disks, Failure> {
        let keeps = self.has_disks && self.drops_privileges;
        let privileged = keeps.then(|| PrivilegedThread::with(Setup::disk_capabilities()));
        // One that drops its privileges attaches no disk then.
        let on_first: Option<fn(&Cores)> =
            (!self.has_disks && !self.drops_privileges).then_some(memory::keep_for_first_disk);
        Ok(Disks::new(privileged.transpose()?, self.io.clone(), !self.drops_privileges, on_first))
    }

    /// Starts the command of `--run` by `start`: it inherits nothing of what keeps the memory of
    /// this process.
    ///
    /// # Errors
    /// Those of `start`.
    pub(super) fn start_command<T>(&self, start: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        if !self.has_disks {
            return start();
        }
        memory::release_thread();
        let running = start()?;
        memory::outlive_others();
        Ok(running)
    }
}
