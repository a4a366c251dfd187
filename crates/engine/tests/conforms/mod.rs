//! Runs the volume conformance suite on a real core.

use blockmux_engine::core::reactor::{PollPolicy, Reactor};
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::conformance::{self, Harness};
use blockmux_volume::{Core, Volume, Waker};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// The exports of a target for the suite: the volume as `disk`, and read-only as `frozen`.
#[allow(dead_code, reason = "local volumes need no target")]
pub(crate) fn disk_and_frozen(volume: &Arc<dyn Volume>) -> Exports {
    let exports = [("disk", false), ("frozen", true)].map(|(name, read_only)| Export {
        name: name.to_owned(),
        description: String::new(),
        read_only,
        volume: volume.clone(),
    });
    Exports::new(exports.into())
}

/// A volume on a real core.
pub(crate) fn harness(volume: Arc<dyn Volume>) -> Harness<'static> {
    let (mut reactor, _inbox) = Reactor::new(PollPolicy::Never, 512 << 20).unwrap();
    let core: Rc<dyn Core> = reactor.core().clone();
    let clock = core.clone();
    let turn = move || {
        // A deadline is always armed, so that a turn without I/O in flight ends, too.
        clock.wake_at(clock.now() + Duration::from_millis(5), &Waker::idle());
        let mut turns = 0..1;
        reactor.run_until(|| turns.next().is_none()).is_ok()
    };
    Harness::new(core, volume, turn)
}

/// Runs the suite. `read_only` has the same storage and refuses writes; `None` if this kind of
/// volume cannot report that it is read-only.
pub(crate) fn conforms(volume: Arc<dyn Volume>, read_only: Option<Arc<dyn Volume>>) {
    let mut harness = harness(volume);
    harness.read_only = read_only;
    conformance::run(&mut harness);
}
