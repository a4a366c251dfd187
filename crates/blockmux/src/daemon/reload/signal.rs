//! Reloads that a signal requests. They have a thread of their own, because a reload may hang in a
//! path and the main thread must not.

use super::apply::Applied;
use super::{NewConfig, Reloader};
use crate::api::ApiError;
use crate::api::plan::PlanReport;
use crate::daemon::config_audit::{self, Caller};
use crate::failure::Failure;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;
use tracing::{info, warn};

/// Requests reloads; dropping it ends their thread.
pub(in crate::daemon) struct ReloadRequests {
    sender: Sender<()>,
    /// A reload is requested and has not begun; it stands for all that are requested until then.
    is_pending: Arc<AtomicBool>,
}

impl ReloadRequests {
    /// Starts the thread that reloads the config for each request.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(in crate::daemon) fn start(reloader: &Arc<Reloader>) -> Result<ReloadRequests, Failure> {
        let (sender, requests) = mpsc::channel::<()>();
        let is_pending = Arc::<AtomicBool>::default();
        let (reloader, pending) = (Arc::downgrade(reloader), is_pending.clone());
        let run = move || {
            while requests.recv().is_ok() {
                let Some(reloader) = reloader.upgrade() else { return };
                let caller = Caller::Signal(SIGNAL);
                let guard = reloader.lock_reloads(&caller, Duration::MAX);
                pending.store(false, Ordering::Release);
                let outcome = guard.and_then(|guard| {
                    let step = guard.step.clone();
                    reloader.apply(&NewConfig::File, (&step, Some(guard)), &|_| {})
                });
                let outcome = outcome.map_err(|error| ApiError {
                    message: format!(
                        "the config was not reloaded and nothing has changed: {}",
                        error.message
                    ),
                    ..error
                });
                let outcome = outcome.map(|Applied { mut report, steps, .. }| {
                    report.warnings.extend(steps.err().map(|failure| failure.to_string()));
                    report
                });
                let lines = outcome.as_ref().map(PlanReport::lines);
                config_audit::log(&caller, "reload", lines.as_deref().map_err(|error| *error));
                outcome.iter().for_each(log);
            }
        };
        let started = thread::Builder::new().name("reload".to_owned()).spawn(run);
        started.map_err(|error| Failure::run(format!("cannot start a thread: {error}")))?;
        Ok(ReloadRequests { sender, is_pending })
    }

    /// Requests a reload, which waits for the one that is under way.
    pub(in crate::daemon) fn request(&self, reloader: &Reloader) {
        let under_way = reloader.reloads.current();
        if self.is_pending.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(under_way) = under_way {
            warn!("{SIGNAL}: the config will be reloaded later, because {under_way}");
        }
        // The thread ends with the daemon.
        let _ = self.sender.send(());
    }
}

const SIGNAL: &str = "SIGHUP";

/// Logs what a reload that a signal requested has changed.
fn log(report: &PlanReport) {
    if report.is_empty() {
        info!("reloaded: no changes; secrets and certificates were read again");
    }
    for change in &report.changes {
        info!("reloaded: {}", change.change);
        change.affected.iter().for_each(|who| warn!("reloaded: {}: affected {who}", change.change));
    }
    report.next_start.iter().for_each(|later| warn!("takes effect at the next start: {}", later.change));
    report.warnings.iter().for_each(|line| warn!("{line}"));
}
