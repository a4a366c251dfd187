//! What a daemon gives up once all that it serves is open: capabilities, and new ones by programs that it could start.
//!
//! Capabilities belong to a thread, and a new thread has those of the one that starts it. So whoever starts threads gives
//! them up before; threads that are there by then, for the log and for signals, have given up theirs at their own begin.

use crate::failure::Failure;
use blockmux_volume::Spec;
use rustix::io;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};
use tracing::debug;

/// What a daemon has to open again later: whoever serves a remote volume connects again when a connection is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reopened {
    /// Packet sockets of ATA over Ethernet, when an interface comes back.
    pub(crate) interfaces: bool,
    /// Unix sockets, which may belong to another user.
    pub(crate) unix_sockets: bool,
}

impl Reopened {
    /// What these volumes need.
    pub(crate) fn by<'a>(specs: impl Iterator<Item = &'a Spec>) -> Reopened {
        let mut reopened = Reopened::default();
        for url in specs.flat_map(Spec::urls) {
            let scheme = url.scheme();
            reopened.interfaces |= scheme.eq_ignore_ascii_case("aoe");
            reopened.unix_sockets |= scheme.eq_ignore_ascii_case("nbd+unix");
        }
        reopened
    }

    fn capabilities(self) -> CapabilitySet {
        let kept = |is_kept, capability| if is_kept { capability } else { CapabilitySet::empty() };
        kept(self.interfaces, CapabilitySet::NET_RAW) | kept(self.unix_sockets, CapabilitySet::DAC_OVERRIDE)
    }
}

/// Gives up all capabilities of this thread but those that take what is `reopened`. Without CAP_DAC_OVERRIDE root opens only
/// what its own user may, which concerns volumes that are added later.
pub(crate) fn give_up(reopened: Reopened) -> Result<(), Failure> {
    keep(reopened.capabilities()).map_err(|error| {
        Failure::run(format!("cannot give up capabilities: {error}; start it with --keep-privileges"))
    })
}

/// Gives up all capabilities of a thread that needs none and goes on if the system does not let it.
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
