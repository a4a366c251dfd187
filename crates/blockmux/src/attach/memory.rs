//! Memory of a process that serves a disk of its own machine.
//!
//! If memory is short, the kernel writes dirty pages back to disks, one of which may be ours. A
//! server that then waits for memory, or for its own pages from swap, waits for itself; without a
//! server, all memory behind the disk stays dirty. iSCSI's and NBD's daemons lock their
//! memory, too.

use super::way::Way;
use crate::process::privileges::has_capability;
use blockmux_engine::sys::{become_io_flusher, end_io_flushing};
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;
use std::fs;
use std::io;
use tracing::{debug, warn};

/// Keeps the memory of this process from waiting for the disk. Threads that this one starts are I/O
/// flushers as it is. Call it before a volume is opened or a core started.
pub(super) fn keep(way: Way) {
    if way == Way::VhostUser {
        // The disk is a virtual machine's, whose memory would be locked, too.
        return;
    }
    let flushes = become_io_flusher();
    let kept = flushes.and_then(|()| lock());
    if let Err(error) = kept {
        // Nothing of a file is cached, so nothing is written back to it.
        match way {
            Way::Fuse => debug!("memory of this process may be swapped: {error}"),
            _ => warn!(
                "memory of this process may wait for its own disk: {error}; start it with CAP_SYS_RESOURCE and \
                 CAP_IPC_LOCK"
            ),
        }
    }
}

/// Locks all pages in memory, each once it is used.
fn lock() -> io::Result<()> {
    // Under a limit, memory that is mapped later would be refused.
    if !has_capability(CapabilitySet::IPC_LOCK) && getrlimit(Resource::Memlock).current.is_some() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)?)
}

/// Makes this thread, which serves nothing, a usual one again: a program that it starts inherits
/// what it is.
pub(super) fn release_thread() {
    if let Err(error) = end_io_flushing() {
        debug!("the command is an I/O flusher: {error}");
    }
}

/// Keeps the kernel from killing this process when memory is short. Programs inherit that, so call
/// it once the command of `--run` is started.
pub(super) fn outlive_others() {
    if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ_MIN) {
        debug!("the kernel may kill this process when memory is short: {error}");
    }
}

/// The process is never killed (`linux/oom.h`).
const OOM_SCORE_ADJ_MIN: &str = "-1000";
