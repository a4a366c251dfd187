//! Detects size changes of volumes that are made outside of Blockmux: of files, block devices and
//! remote volumes. Files that were deleted or replaced are detected by the same check.

use super::setup::Setup;
use crate::failure::Failure;
use blockmux_proto::exports::Exports;
use blockmux_volume::Spec;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;
use tracing::info;

/// The running check; dropping it ends the thread.
pub(super) struct SizeWatch {
    _end: Sender<()>,
}

/// Starts a thread that checks the size of all volumes in each [`PERIOD`], including those that are
/// added later, and notifies clients of a change. `None` if no volume can change its size outside
/// of Blockmux and none can be added.
///
/// # Errors
/// If the thread cannot be started.
pub(super) fn watch(setup: &Setup, exports: &Exports) -> Result<Option<SizeWatch>, Failure> {
    if !setup.may_change() && !setup.specs().any(can_change_externally) {
        return Ok(None);
    }
    let exports = exports.clone();
    let (sender, end) = mpsc::channel::<()>();
    let check = move || {
        while end.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
            // Looks volumes up anew each time, so that a removed one is not kept open.
            for (id, export) in exports.iter() {
                let Some(volume_state) = exports.volume_state(id) else { continue };
                if volume_state.check_size() {
                    info!("{} has {} bytes now", export.name, volume_state.volume().info().size);
                }
            }
        }
    };
    let started = thread::Builder::new().name("sizes".to_owned()).spawn(check);
    started.map_err(|error| Failure::run(format!("cannot start a thread: {error}")))?;
    Ok(Some(SizeWatch { _end: sender }))
}

fn can_change_externally(spec: &Spec) -> bool {
    match spec {
        Spec::File(_) | Spec::Block(_) | Spec::Url(_) => true,
        Spec::Slice(_, inner) | Spec::Decorated(_, inner) => can_change_externally(inner),
        // The size of a stripe is computed when it is opened.
        Spec::Mem(_) | Spec::Null(_) | Spec::Stripe { .. } => false,
    }
}

/// Interval of the checks.
const PERIOD: Duration = Duration::from_secs(1);
