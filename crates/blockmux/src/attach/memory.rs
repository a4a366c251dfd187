//! Memory of a process that serves a disk of its own machine.
//!
//! If memory is short, the kernel writes dirty pages back to disks, one of which may be ours. A
//! server that then waits for memory, or for its own pages from swap, waits for itself; without a
//! server, all memory behind the disk stays dirty. iSCSI's and NBD's daemons lock their
//! memory, too.

use super::way::Way;
use crate::process::privileges::has_capability;
use blockmux_engine::core::cores::Cores;
use blockmux_engine::sys::{become_io_flusher, end_io_flushing};
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;
use std::fs;
use std::io;
use tracing::{debug, warn};

/// Keeps the memory of this process from waiting for the disk. Threads that this one starts are I/O
/// flushers as it is. Call it before a volume is opened or a core started.
pub(super) fn keep(way: Way) {
    match way {
        // The disk is a virtual machine's, whose memory would be locked, too.
        Way::VhostUser => {}
        // Nothing of a file is cached, so nothing is written back to it.
        Way::Fuse => {
            try_to_keep(true).unwrap_or_else(|error| debug!("memory of this process may be swapped: {error}"))
        }
        _ => keep_for_disks(true),
    }
}

/// Keeps the memory of this process from waiting for its disks, also once it has dropped its
/// capabilities, unless it `keeps_capabilities`. Call it before a volume is opened or a core
/// started.
pub(crate) fn keep_for_disks(keeps_capabilities: bool) {
    warn_unless_kept(try_to_keep(keeps_capabilities));
}

/// Keeps the memory of a process that has its capabilities, and already serves on `cores`, from
/// waiting for the disk that is its first.
pub(crate) fn keep_for_first_disk(cores: &Cores) {
    let mut of_cores = (0..cores.count()).filter_map(|core| cores.ask(core, |_| become_io_flusher()));
    warn_unless_kept(of_cores.try_for_each(|kept| kept).and_then(|()| lock_memory(true)));
    outlive_others();
}

fn warn_unless_kept(kept: io::Result<()>) {
    if let Err(error) = kept {
        warn!(
            "memory of this process may wait for its own disk: {error}; start it with CAP_SYS_RESOURCE and \
             CAP_IPC_LOCK"
        );
    }
}

fn try_to_keep(keeps_capabilities: bool) -> io::Result<()> {
    become_io_flusher()?;
    lock_memory(keeps_capabilities)
}

fn lock_memory(keeps_capabilities: bool) -> io::Result<()> {
    // With a limit, later mappings fail in a process without the capability.
    let is_exempt = keeps_capabilities && has_capability(CapabilitySet::IPC_LOCK);
    if !is_exempt && getrlimit(Resource::Memlock).current.is_some() {
        setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None })?;
    }
    // All pages, each once it is used.
    Ok(mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)?)
}

/// Makes this thread, which serves nothing, a usual one again: a program that it starts inherits
/// what it is.
pub(crate) fn release_thread() {
    if let Err(error) = end_io_flushing() {
        debug!("the command is an I/O flusher: {error}");
    }
}

/// Keeps the kernel from killing this process when memory is short. Programs inherit that, so call
/// it once the command of `--run` is started.
pub(crate) fn outlive_others() {
    if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ_MIN) {
        debug!("the kernel may kill this process when memory is short: {error}");
    }
}

/// The process is never killed (`linux/oom.h`).
const OOM_SCORE_ADJ_MIN: &str = "-1000";
