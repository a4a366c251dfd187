//! What everybody who can connect may know: whether the daemon runs, whether it serves, and its
//! version. For probes of service managers, orchestrators and load balancers.

use super::ApiState;
use super::reply::json;
use crate::api::bodies::{DaemonHealth, DaemonStage, DaemonVersion};
use crate::api::{ApiError, ErrorBody, ErrorCode};
use axum::extract::{FromRef, State};
use axum::http::StatusCode;
use axum::response::Response;
use blockmux_engine::core::reactor::Inbox;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, oneshot, watch};
use tokio::time;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The health of the daemon. Clones share their checks.
#[derive(Clone)]
pub(super) struct Health {
    stage: watch::Receiver<DaemonStage>,
    cores: Vec<Inbox>,
    last_check: Arc<Mutex<Option<CoreCheck>>>,
}

/// The result of asking all cores.
#[derive(Clone, Copy)]
struct CoreCheck {
    at: Instant,
    all_answer: bool,
}

impl FromRef<ApiState> for Health {
    fn from_ref(shared: &ApiState) -> Health {
        shared.health.clone()
    }
}

impl Health {
    /// The health of a daemon with these cores; `stage` tells what it does as a whole.
    pub(super) fn new(stage: watch::Receiver<DaemonStage>, cores: Vec<Inbox>) -> Health {
        Health { stage, cores, last_check: Arc::default() }
    }

    /// The stage of the daemon, if all cores run tasks.
    async fn stage(&self) -> Result<DaemonStage, ApiError> {
        match self.cores_run().await {
            true => Ok(*self.stage.borrow()),
            false => Err(unavailable("a core of the daemon does not answer; see its log")),
        }
    }

    /// The stage of the daemon, if it serves.
    pub(super) async fn serving(&self) -> Result<DaemonStage, ApiError> {
        match self.stage().await? {
            DaemonStage::Starting => Err(unavailable("the daemon is starting; try again later")),
            DaemonStage::Stopping => Err(unavailable("the daemon is stopping; use another one")),
            stage @ DaemonStage::Serving => Ok(stage),
        }
    }

    /// Whether all cores run tasks. Clients without credentials may ask, so that requests within
    /// [`CHECK_INTERVAL`] share one check.
    async fn cores_run(&self) -> bool {
        let mut last_check = self.last_check.lock().await;
        if let Some(check) = last_check.filter(|check| check.at.elapsed() < CHECK_INTERVAL) {
            return check.all_answer;
        }
        let all_answer = all_answer(&self.cores, CORE_TIMEOUT).await;
        *last_check = Some(CoreCheck { at: Instant::now(), all_answer });
        all_answer
    }
}

/// Whether every core runs a message within `timeout`.
async fn all_answer(cores: &[Inbox], timeout: Duration) -> bool {
    let ask = |core: &Inbox| {
        let (sender, answer) = oneshot::channel();
        core.send(move |_| {
            // The receiver is gone after the timeout.
            let _ = sender.send(());
        });
        answer
    };
    let answers: Vec<_> = cores.iter().map(ask).collect();
    let all = async {
        for answer in answers {
            if answer.await.is_err() {
                return false;
            }
        }
        true
    };
    time::timeout(timeout, all).await.unwrap_or(false)
}

fn unavailable(text: &str) -> ApiError {
    ApiError::new(ErrorCode::Unavailable, text)
}

/// The paths of this module.
pub(super) fn routes<S: Clone + Send + Sync + 'static>() -> OpenApiRouter<S>
where
    Health: FromRef<S>,
{
    OpenApiRouter::default().routes(routes!(healthz)).routes(routes!(readyz)).routes(routes!(version))
}

/// Whether the daemon runs
///
/// The process answers, and all of its cores run. Requires no credentials.
#[utoipa::path(
    get,
    path = "/healthz",
    responses(
        (status = 200, body = DaemonHealth),
        (status = 503, body = ErrorBody, description = "A core does not answer")
    )
)]
async fn healthz(State(health): State<Health>) -> Result<Response, ApiError> {
    let state = health.stage().await?;
    Ok(json(StatusCode::OK, &DaemonHealth { state }))
}

/// Whether the daemon serves
///
/// All volumes are open, and all listeners accept connections. Requires no credentials.
#[utoipa::path(
    get,
    path = "/readyz",
    responses(
        (status = 200, body = DaemonHealth),
        (status = 503, body = ErrorBody, description = "The daemon starts or stops, or a core does not answer")
    )
)]
async fn readyz(State(health): State<Health>) -> Result<Response, ApiError> {
    let state = health.serving().await?;
    Ok(json(StatusCode::OK, &DaemonHealth { state }))
}

/// Name and version of the daemon
///
/// Requires no credentials.
#[utoipa::path(get, path = "/v1/version", responses((status = 200, body = DaemonVersion)))]
async fn version() -> Response {
    let (name, version) = (env!("CARGO_PKG_NAME").to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    json(StatusCode::OK, &DaemonVersion { name, version })
}

/// Time for all cores to answer. An idle core wakes up within a millisecond.
const CORE_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for which the result of asking the cores holds.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_engine::core::cores::{Cores, CoresConfig};
    use std::sync::mpsc;
    use tokio::runtime::Builder;

    #[test]
    fn a_core_that_is_stuck_in_a_task_is_detected_and_one_that_sleeps_is_not() {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let cores = Cores::start(&CoresConfig { count: 2, ..CoresConfig::default() }).unwrap();
        let answer = |seconds| {
            let (cores, timeout) = (cores.inboxes(), Duration::from_secs_f64(seconds));
            runtime.block_on(async { all_answer(&cores, timeout).await })
        };
        assert!(answer(60.0));
        let (release, held) = mpsc::channel::<()>();
        cores.inboxes()[1].send(move |_| {
            let _ = held.recv();
        });
        assert!(!answer(0.05));
        drop(release);
        assert!(answer(60.0));
        let left = cores.inboxes();
        assert!(cores.stop(Duration::from_secs(60)));
        assert!(!runtime.block_on(async { all_answer(&left, Duration::from_secs(60)).await }));
    }

    #[test]
    fn a_daemon_that_starts_or_stops_runs_and_does_not_serve() {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let (stage, of_daemon) = watch::channel(DaemonStage::Starting);
        let health = Health::new(of_daemon, Vec::new());
        for (now, said) in [
            (DaemonStage::Starting, Err("the daemon is starting")),
            (DaemonStage::Serving, Ok(DaemonStage::Serving)),
            (DaemonStage::Stopping, Err("the daemon is stopping")),
        ] {
            stage.send_replace(now);
            let (runs, serves) = runtime.block_on(async { (health.stage().await, health.serving().await) });
            assert_eq!(runs, Ok(now));
            assert_eq!(
                serves.map_err(|error| (error.code, error.message)),
                said.map_err(|text| (ErrorCode::Unavailable, text.to_owned()))
            );
        }
    }
}
