//! The suite that every volume must pass, on a real core.

use blockmux_engine::reactor::{PollPolicy, Reactor};
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::conformance::{self, Harness};
use blockmux_volume::{Core, Volume, Waker};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// The volume as a target serves it to the suite: `disk`, and once more as `frozen`, where writes
/// are refused.
#[allow(dead_code, reason = "volumes of this machine need no target")]
pub(crate) fn disk_and_frozen(volume: &Arc<dyn Volume>) -> Exports {
    let exports = [("disk", false), ("frozen", true)].map(|(name, read_only)| Export {
        name: name.to_owned(),
        description: String::new(),
        read_only,
        volume: volume.clone(),
    });
    Exports::new(exports.into())
}

/// With the same storage where writes are refused, if a volume of that kind can tell that it is
/// such.
pub(crate) fn conforms(volume: Arc<dyn Volume>, read_only: Option<Arc<dyn Volume>>) {
    let (mut reactor, _inbox) = Reactor::new(PollPolicy::Never, 512 << 20).unwrap();
    let core: Rc<dyn Core> = reactor.core().clone();
    let clock = core.clone();
    let turn = move || {
        // A deadline is always ahead, so that a turn with nothing in flight ends too.
        clock.wake_at(clock.now() + Duration::from_millis(5), &Waker::idle());
        let mut turns = 0..1;
        reactor.run_until(|| turns.next().is_none()).is_ok()
    };
    let mut harness = Harness::new(core, volume, turn);
    harness.read_only = read_only;
    conformance::run(&mut harness);
}
