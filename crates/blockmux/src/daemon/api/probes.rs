//! What a daemon that starts or stops answers at its API: the probes. Everything else is refused
//! with the reason.
//!
//! It runs until the API can be served, and again from the end of the API to the end of the
//! process. Its thread has no capabilities except those for a change of the user that is to come:
//! while volumes are opened with root's, nothing that reads from the network has them. See
//! docs/decisions/0112-probes-are-answered-while-a-daemon-starts-and-stops.md.

use super::endpoint::Endpoint;
use super::health::{self, Health};
use super::serve_all;
use crate::api::ApiError;
use crate::api::bodies::DaemonStage;
use crate::failure::Failure;
use crate::process::privileges;
use axum::Router;
use blockmux_engine::core::helpers;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tokio::runtime::Builder;
use tokio::sync::watch;

/// Answers probes until it is dropped.
pub(in crate::daemon) struct Probes {
    /// Dropped to stop.
    stop: Option<watch::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Probes {
    /// Answers at these endpoints, which stay open when it ends.
    ///
    /// # Errors
    /// If its thread cannot be started.
    pub(in crate::daemon) fn start(
        endpoints: &[Arc<Endpoint>],
        stage: watch::Receiver<DaemonStage>,
    ) -> Result<Probes, Failure> {
        if endpoints.is_empty() {
            return Ok(Probes { stop: None, thread: None });
        }
        helpers::prepare();
        let start = || {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            let (stop, stopped) = watch::channel(());
            let (endpoints, router) = (endpoints.to_vec(), router(stage));
            let run = move || {
                privileges::drop_all_capabilities();
                runtime.block_on(serve_all(endpoints, router, &stopped, GRACE));
            };
            let thread = thread::Builder::new().name("probes".to_owned()).spawn(run)?;
            Ok(Probes { stop: Some(stop), thread: Some(thread) })
        };
        start().map_err(|error: io::Error| Failure::run(format!("cannot start a thread: {error}")))
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the thread of probes has panicked");
        }
    }
}

fn router(stage: watch::Receiver<DaemonStage>) -> Router {
    let health = Health::new(stage, Vec::new());
    let (routes, _) = health::routes::<Health>().split_for_parts();
    let refusing = health.clone();
    let refuse = move || async move {
        match refusing.serving().await {
            Err(error) => error,
            Ok(_) => ApiError::failed("internal error: a daemon that serves refuses requests"),
        }
    };
    routes.fallback(refuse.clone()).method_not_allowed_fallback(refuse).with_state(health)
}

/// Time for accepted requests when it ends. All are answered at once.
const GRACE: Duration = Duration::from_secs(1);
