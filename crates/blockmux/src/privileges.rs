//! What a daemon gives up once all that it serves is open: capabilities, and new ones by programs that it could start.
//!
//! Capabilities belong to a thread, and a new thread has those of the one that starts it. So whoever starts threads gives
//! them up before; threads that are there by then, for the log and for signals, have given up theirs at their own begin.

use crate::failure::Failure;
use rustix::io;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};
use tracing::debug;

/// Gives up all capabilities of this thread but CAP_NET_RAW if it `opens_interfaces`: ATA over Ethernet opens packet sockets
/// when interfaces come back. Without CAP_DAC_OVERRIDE root opens only what its own user may, which concerns volumes that
/// are added later.
pub(crate) fn give_up(opens_interfaces: bool) -> Result<(), Failure> {
    let kept = if opens_interfaces { CapabilitySet::NET_RAW } else { CapabilitySet::empty() };
    keep(kept).map_err(|error| {
        Failure::run(format!("cannot give up capabilities: {error}; start it with --keep-privileges"))
    })
}

/// The same for a thread that needs none and goes on if the system does not let it.
pub(crate) fn give_up_all() {
    if let Err(error) = keep(CapabilitySet::empty()) {
        debug!("a thread keeps its capabilities: {error}");
    }
}

fn keep(kept: CapabilitySet) -> io::Result<()> {
    set_no_new_privs(true)?;
    let CapabilitySets { permitted, .. } = capabilities(None)?;
    let left = permitted & kept;
    let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets)
}

/// There are secrets in memory from now on: no other process of the user traces this one, and no core dump has them.
pub(crate) fn hide_memory() {
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        debug!("the process stays dumpable: {error}");
    }
}
