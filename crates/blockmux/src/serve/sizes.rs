//! Volumes that change their size by themselves: block devices and what other servers export.

use super::setup::Setup;
use crate::failure::Failure;
use blockmux_proto::exports::Exports;
use blockmux_proto::served::Served;
use blockmux_volume::Spec;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;
use tracing::info;

/// Looks again until it is dropped.
pub(super) struct Looking {
    _end: Sender<()>,
}

/// Looks from time to time whether a volume has another size, and has everybody told; `None` if none of them ever has.
pub(super) fn watch(setup: &Setup, exports: &Exports) -> Result<Option<Looking>, Failure> {
    let served =
        exports.iter().filter_map(|(id, export)| Some((export.name.clone(), exports.served(id)?.clone())));
    let watched: Vec<(String, Arc<Served>)> = served
        .zip(setup.specs())
        .filter(|(_, spec)| changes_by_itself(spec))
        .map(|(served, _)| served)
        .collect();
    if watched.is_empty() {
        return Ok(None);
    }
    let (sender, end) = mpsc::channel::<()>();
    let look = move || {
        while end.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
            for (name, served) in &watched {
                if served.look_at_size() {
                    info!("{name} has {} bytes now", served.volume().info().size);
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
        Spec::Block(_) | Spec::Url(_) => true,
        Spec::Delay(_, inner) | Spec::Fault(_, inner) | Spec::Rate(_, inner) | Spec::Log(_, inner) => {
            changes_by_itself(inner)
        }
        // The size of a stripe was reckoned when it was made.
        Spec::Mem(_) | Spec::Null(_) | Spec::File(_) | Spec::Stripe { .. } => false,
    }
}

const PERIOD: Duration = Duration::from_secs(1);
