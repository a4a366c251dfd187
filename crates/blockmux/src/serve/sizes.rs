//! What becomes of volumes outside of Blockmux: block devices and what other servers export get
//! another size, files are deleted or replaced.

use super::setup::Setup;
use crate::failure::Failure;
use blockmux_proto::exports::Exports;
use blockmux_volume::Spec;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;
use tracing::info;

/// Looks again until it is dropped.
pub(super) struct Looking {
    _end: Sender<()>,
}

/// Looks from time to time at all volumes, those that were added later, too, and has everybody told
/// of another size; `None` if nothing becomes of any of them, and none can be added.
pub(super) fn watch(setup: &Setup, exports: &Exports) -> Result<Option<Looking>, Failure> {
    if !setup.may_change() && !setup.specs().any(changes_by_itself) {
        return Ok(None);
    }
    let exports = exports.clone();
    let (sender, end) = mpsc::channel::<()>();
    let look = move || {
        while end.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
            // A volume that was removed is not kept open from here.
            for (id, export) in exports.iter() {
                let Some(served) = exports.served(id) else { continue };
                if served.look_at_size() {
                    info!("{} has {} bytes now", export.name, served.volume().info().size);
                }
            }
        }
    };
    let started = thread::Builder::new().name("sizes".to_owned()).spawn(look);
    started.map_err(|error| Failure::run(format!("cannot start a thread: {error}")))?;
    Ok(Some(Looking { _end: sender }))
}

fn changes_by_itself(spec: &Spec) -> bool {
    match spec {
        Spec::File(_) | Spec::Block(_) | Spec::Url(_) => true,
        Spec::Slice(_, inner)
        | Spec::Delay(_, inner)
        | Spec::Fault(_, inner)
        | Spec::Rate(_, inner)
        | Spec::Log(_, inner) => changes_by_itself(inner),
        // The size of a stripe was reckoned when it was made.
        Spec::Mem(_) | Spec::Null(_) | Spec::Stripe { .. } => false,
    }
}

const PERIOD: Duration = Duration::from_secs(1);
