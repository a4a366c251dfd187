//! What a daemon gives up once all that it serves is open: capabilities, and new ones by programs
//! that it could start.
//!
//! Capabilities belong to a thread, and a new thread has those of the one that starts it. So
//! whoever starts threads gives them up before; threads that are there by then, for logs, for
//! signals and for first touches of memory, have given up theirs at their own begin.

use crate::failure::Failure;
use rustix::io;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};
use std::sync::OnceLock;
use tracing::debug;

/// Gives up all capabilities of this thread but `needed`. Without CAP_DAC_OVERRIDE root opens only
/// what its own user may, which concerns volumes that are added later.
pub(crate) fn give_up(needed: CapabilitySet) -> Result<(), Failure> {
    let given_up = keep(needed).map_err(|error| {
        Failure::run(format!("cannot give up capabilities: {error}; start it with --keep-privileges"))
    })?;
    GIVEN_UP.get_or_init(|| given_up);
    Ok(())
}

/// Whether this process had a capability and has given it up: then it can get it only by another
/// start.
pub(crate) fn has_given_up(capability: CapabilitySet) -> bool {
    GIVEN_UP.get().is_some_and(|given_up| given_up.contains(capability))
}

/// Gives up all capabilities of a thread that needs none, and goes on if the system does not let
/// it.
pub(crate) fn give_up_all() {
    if let Err(error) = keep(CapabilitySet::empty()) {
        debug!("a thread keeps its capabilities: {error}");
    }
}

/// Keeps these of this thread's capabilities; answers those that are gone.
fn keep(kept: CapabilitySet) -> io::Result<CapabilitySet> {
    set_no_new_privs(true)?;
    let CapabilitySets { permitted, .. } = capabilities(None)?;
    let left = permitted & kept;
    let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets)?;
    Ok(permitted - left)
}

/// There are secrets in memory from now on: no other process of the user traces this one, and no
/// core dump has them.
pub(crate) fn hide_memory() {
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        debug!("the process stays dumpable: {error}");
    }
}

/// What the threads that serve had and have no more.
static GIVEN_UP: OnceLock<CapabilitySet> = OnceLock::new();

/// What to do where `has_given_up` is why something failed.
pub(crate) const START_WITH_PRIVILEGES: &str = "this daemon gave up the capability for that when it started; start it with --keep-privileges, or with this volume";
