//! Dropping privileges once everything is open: capabilities, and new ones through execve.
//!
//! Capabilities belong to a thread, and a new thread inherits those of its parent. So a thread
//! drops them before it starts others; the threads that exist by then, for logs, signals and
//! populating memory, have dropped theirs when they started.

use crate::failure::Failure;
use rustix::io;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};
use std::sync::OnceLock;
use tracing::debug;

/// Drops all capabilities of this thread but `needed`. Without CAP_DAC_OVERRIDE root can open only
/// files that their permissions allow, which concerns volumes that are added later.
pub(crate) fn give_up(needed: CapabilitySet) -> Result<(), Failure> {
    let given_up = keep(needed).map_err(|error| {
        Failure::run(format!("cannot give up capabilities: {error}; start it with --keep-privileges"))
    })?;
    GIVEN_UP.get_or_init(|| given_up);
    Ok(())
}

/// Whether this process has dropped a capability, which it can regain only by a restart.
pub(crate) fn has_given_up(capability: CapabilitySet) -> bool {
    GIVEN_UP.get().is_some_and(|given_up| given_up.contains(capability))
}

/// Drops all capabilities of a thread that needs none; a failure is ignored.
pub(crate) fn give_up_all() {
    if let Err(error) = keep(CapabilitySet::empty()) {
        debug!("a thread keeps its capabilities: {error}");
    }
}

/// Drops all of this thread's capabilities but `kept`; returns the dropped ones.
fn keep(kept: CapabilitySet) -> io::Result<CapabilitySet> {
    set_no_new_privs(true)?;
    let CapabilitySets { permitted, .. } = capabilities(None)?;
    let left = permitted & kept;
    let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets)?;
    Ok(permitted - left)
}

/// Protects secrets in memory: forbids tracing by other processes of the user, and core dumps.
pub(crate) fn hide_memory() {
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        debug!("the process stays dumpable: {error}");
    }
}

/// The dropped capabilities of the serving threads.
static GIVEN_UP: OnceLock<CapabilitySet> = OnceLock::new();

/// The advice for errors that a dropped capability causes.
pub(crate) const START_WITH_PRIVILEGES: &str = "this daemon gave up the capability for that when it started; start it with --keep-privileges, or with this volume";
