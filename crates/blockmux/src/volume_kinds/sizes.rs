//! Detects size changes of volumes that are made outside of Blockmux: of files, block devices and
//! remote volumes. Files that were deleted or replaced are detected by the same check.

use crate::failure::Failure;
use blockmux_proto::exports::Exports;
use blockmux_proto::volume_state::VolumeState;
use blockmux_volume::Spec;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;
use tracing::info;

/// The running checks; dropping it ends the thread.
pub(crate) struct SizeChecks {
    _end: Sender<()>,
}

/// Starts a thread that checks the size of all volumes in each [`PERIOD`], including those that are
/// added later, and notifies clients of a change. A path that hangs delays no other check.
///
/// # Errors
/// If the thread cannot be started.
pub(crate) fn check(exports: &Exports) -> Result<SizeChecks, Failure> {
    let checks = Arc::new(Checks { exports: exports.clone(), checking: Mutex::default() });
    let (sender, end) = mpsc::channel::<()>();
    let check = move || {
        while end.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
            // Each thread that hangs in a path has one reference.
            if Arc::strong_count(&checks) > MAX_THREADS {
                continue;
            }
            let checks = checks.clone();
            // If no thread can be started now, the next check may find one.
            let _ = thread::Builder::new().name("sizes".to_owned()).spawn(move || checks.run());
        }
    };
    let started = thread::Builder::new().name("sizes".to_owned()).spawn(check);
    started.map_err(|error| Failure::run(format!("cannot start a thread: {error}")))?;
    Ok(SizeChecks { _end: sender })
}

/// The checks of all volumes, each of which may hang in a path.
struct Checks {
    exports: Exports,
    /// The volumes that a thread is checking.
    checking: Mutex<Vec<Arc<VolumeState>>>,
}

impl Checks {
    /// Checks the volumes that no other thread is checking.
    fn run(&self) {
        // Looks volumes up anew each time, so that a removed one is not kept open.
        let names: Vec<_> = self.exports.iter().map(|(id, export)| (id, export.name.clone())).collect();
        for (id, name) in names {
            let Some(volume_state) = self.exports.volume_state(id) else { continue };
            let is_it = |own: &Arc<VolumeState>| Arc::ptr_eq(own, &volume_state);
            {
                let mut checking = self.checking();
                if checking.iter().any(is_it) {
                    continue;
                }
                checking.push(volume_state.clone());
            }
            if volume_state.check_size() {
                info!("{name} has {} bytes now", volume_state.volume().info().size);
            }
            self.checking().retain(|own| !is_it(own));
        }
    }

    fn checking(&self) -> MutexGuard<'_, Vec<Arc<VolumeState>>> {
        self.checking.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the size of a volume may change without a command of Blockmux.
pub(crate) fn can_change_externally(spec: &Spec) -> bool {
    match spec {
        Spec::File(_) | Spec::Block(_) | Spec::VhostUser(_) | Spec::Rbd(_) | Spec::Url(_) => true,
        Spec::Slice(_, inner) | Spec::Decorated(_, inner) => can_change_externally(inner),
        // The size of a stripe is computed when it is opened.
        Spec::Mem(_) | Spec::Null(_) | Spec::Stripe { .. } => false,
    }
}

/// Interval of the checks.
const PERIOD: Duration = Duration::from_secs(1);
/// Maximum number of threads that check at the same time, because paths hang.
const MAX_THREADS: usize = 64;
