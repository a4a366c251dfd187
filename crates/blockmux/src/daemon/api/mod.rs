//! The HTTP API of a daemon: on a Unix socket for its owner and root (`--control`), and over TCP
//! for clients with a token or a certificate (`--api`).
//!
//! One thread serves the API with an asynchronous runtime that nothing else in the process uses, so
//! that API clients never block a core. Each client has [`REQUEST_TIMEOUT`] for the head of a
//! request, for its body, and for receiving a part of the response. The number of clients is
//! limited, see [`places`]. Requests that may wait for a disk or a lock run on other threads,
//! see [`actions`].

mod actions;
mod cluster;
mod config;
mod document;
mod endable;
mod endpoint;
mod guard;
mod health;
mod history;
mod metrics;
mod objects;
mod page;
mod permission;
mod places;
mod probes;
mod process;
mod reply;
mod requests;
mod routes;
mod snapshots;
mod takeover;
mod tls;

pub(super) use endpoint::{bind_control, bind_tcp};
pub(super) use probes::Probes;

use super::control::ControlServer;
use super::takeover::TakeoverServer;
use crate::api::bodies::DaemonStage;
use crate::failure::Failure;
use actions::Actions;
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderValue, header};
use blockmux_engine::core::helpers;
use endable::{EndableStream, Ending};
use endpoint::{AcceptedStream, AnyListener, Endpoint, Guard};
use health::Health;
use history::{Samples, TICK};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use places::{Place, Places};
use std::future::pending;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time;
use tokio_io_timeout::TimeoutStream;
use tower::Service;
use tracing::{debug, warn};

/// The running API. Dropping it stops the API and removes the file of its Unix socket.
pub(super) struct Api {
    /// Dropped to stop.
    stop: Option<watch::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The state that all requests share.
#[derive(Clone)]
struct ApiState {
    control: Arc<ControlServer>,
    successors: Arc<TakeoverServer>,
    actions: Actions,
    samples: Arc<Mutex<Samples>>,
    health: Health,
}

impl Api {
    /// Serves the API at these endpoints. `stage` tells what the daemon does as a whole.
    ///
    /// # Errors
    /// If its thread cannot be started.
    pub(super) fn start(
        endpoints: Vec<Arc<Endpoint>>,
        control: ControlServer,
        successors: TakeoverServer,
        stage: watch::Receiver<DaemonStage>,
    ) -> Result<Api, Failure> {
        helpers::prepare();
        let start = || {
            let runtime = Builder::new_current_thread()
                .enable_all()
                .max_blocking_threads(MAX_THREADS)
                .thread_name("command")
                .build()?;
            let (stop, stopped) = watch::channel(());
            let health = Health::new(stage, control.reloader.cores().inboxes());
            let shared = ApiState {
                control: Arc::new(control),
                successors: Arc::new(successors),
                actions: Actions::default(),
                samples: Arc::default(),
                health,
            };
            let run = move || {
                run(&runtime, endpoints, shared, &stopped);
                // A command that hangs must not keep the daemon from stopping.
                runtime.shutdown_timeout(LAST_COMMANDS_TIMEOUT);
            };
            let thread = thread::Builder::new().name("control".to_owned()).spawn(run)?;
            Ok(Api { stop: Some(stop), thread: Some(thread) })
        };
        start().map_err(|error: io::Error| Failure::run(format!("cannot start the API's thread: {error}")))
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the API's thread has panicked");
        }
    }
}

fn run(runtime: &Runtime, endpoints: Vec<Arc<Endpoint>>, shared: ApiState, stopped: &watch::Receiver<()>) {
    let router = routes::router(shared.clone());
    runtime.block_on(async {
        let sampling = tokio::spawn(sample(shared));
        serve_all(endpoints, router, stopped, GRACE).await;
        sampling.abort();
    });
}

/// Serves the clients of all endpoints until the daemon stops; accepted requests then have so much
/// time.
async fn serve_all(
    endpoints: Vec<Arc<Endpoint>>,
    router: Router,
    stopped: &watch::Receiver<()>,
    grace: Duration,
) {
    let mut accepting = JoinSet::new();
    for endpoint in endpoints {
        // Clients of one endpoint cannot keep those of another out, such as the daemon's owner.
        accepting.spawn(accept_all(endpoint, router.clone(), stopped.clone(), grace));
    }
    while accepting.join_next().await.is_some() {}
}

/// Samples all counters in each [`TICK`]; never returns.
async fn sample(shared: ApiState) {
    let mut ticks = time::interval(TICK);
    ticks.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let ApiState { control, samples, .. } = shared.clone();
        // Reading the counters may wait for a lock.
        let taken = tokio::task::spawn_blocking(move || {
            let snapshot = control.snapshot();
            samples.lock().unwrap_or_else(PoisonError::into_inner).add(&snapshot, Instant::now());
        });
        if let Err(error) = taken.await {
            warn!("cannot sample the I/O counters: {error}");
        }
    }
}

/// Accepts clients at one endpoint until the daemon stops, then waits for pending responses.
async fn accept_all(
    endpoint: Arc<Endpoint>,
    router: Router,
    mut stopped: watch::Receiver<()>,
    grace: Duration,
) {
    let (guard, places) = (endpoint.guard.clone(), Places::default());
    let mut open = JoinSet::new();
    let address = endpoint.listener.address().to_string();
    let accepting = match AnyListener::of(&endpoint.listener) {
        Ok(accepting) => accepting,
        Err(error) => {
            warn!("{address}: the API is not served: {error}; start the daemon again");
            return;
        }
    };
    loop {
        let accepted = async {
            places.available().await;
            accepting.accept().await
        };
        let accepted = tokio::select! {
            accepted = accepted => accepted,
            Some(_) = open.join_next(), if !open.is_empty() => continue,
            _ = stopped.changed() => break,
        };
        match accepted {
            Ok(stream) => {
                let place = Arc::new(places.enter(stream.peer_ip()));
                let (guard, router, stopped) = (guard.clone(), router.clone(), stopped.clone());
                open.spawn(async move {
                    tokio::select! {
                        served = serve(stream, place.clone(), guard, router, stopped) => {
                            if let Err(error) = served {
                                debug!("connection of an API client failed: {error}");
                            }
                        }
                        () = place.replaced() => {
                            debug!("an API client without credentials is disconnected for a new one");
                        }
                    }
                });
            }
            // For example too many open files; the accept is retried.
            Err(error) => {
                debug!("cannot accept an API client: {error}");
                time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop((accepting, endpoint));
    let all = async { while open.join_next().await.is_some() {} };
    if time::timeout(grace, all).await.is_err() {
        warn!("{address}: API requests have not ended after {} s", grace.as_secs());
    }
}

/// Serves one client until it disconnects, the daemon stops, or other credentials replace those
/// that the client was checked with. Then a request whose head has arrived still gets its response.
async fn serve(
    stream: AcceptedStream,
    place: Arc<Place>,
    guard: Arc<Guard>,
    router: Router,
    mut stopped: watch::Receiver<()>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let admitted = tokio::select! {
        admitted = guard.admit(stream) => admitted,
        _ = stopped.changed() => return Ok(()),
    };
    let (stream, peer, mut credentials) = admitted?;
    if matches!(*guard, Guard::Owner) {
        place.prove();
    }
    let (peer, ending) = (Arc::new(peer), Ending::default());
    let mut stream = TimeoutStream::new(EndableStream::new(stream, ending.clone()));
    stream.set_write_timeout(Some(REQUEST_TIMEOUT));
    let of_connection = ending.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let (guard, peer, mut router) = (guard.clone(), peer.clone(), router.clone());
        let place = place.clone();
        let under_way = of_connection.request();
        async move {
            let mut request = request.map(Body::new);
            if matches!(*guard, Guard::Owner) {
                request.extensions_mut().insert(takeover::ByOwner);
            }
            let is_public = permission::is_public(request.method(), request.uri().path());
            let response = match guard::admit(&peer, request).await {
                Ok(request) => {
                    if !is_public {
                        place.prove();
                    }
                    router.call(request).await
                }
                Err(mut refused) => {
                    // A client without credentials must not keep its place.
                    refused.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                    Ok(refused)
                }
            };
            drop(under_way);
            response
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .half_close(true)
        .header_read_timeout(REQUEST_TIMEOUT)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(Box::pin(stream)), service)
        .with_upgrades();
    let replaced = async {
        match &mut credentials {
            Some(credentials) => {
                if credentials.changed().await.is_err() {
                    // Nobody replaces them: the daemon stops.
                    pending().await
                }
            }
            None => pending().await,
        }
    };
    tokio::pin!(connection);
    tokio::select! {
        // In this order, a request that arrives after the replacement is not served.
        biased;
        _ = stopped.changed() => {}
        () = replaced => {}
        served = connection.as_mut() => return Ok(served?),
    }
    ending.begin();
    connection.as_mut().graceful_shutdown();
    Ok(connection.await?)
}

/// The stream of an API client, with a timeout for each write.
type Io = TokioIo<Pin<Box<TimeoutStream<EndableStream>>>>;

/// Timeout of the head of a request, of its body, and of each write of the response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a request's head, in bytes.
const MAX_HEAD: usize = 32 << 10;
/// Maximum number of threads for requests that may wait for a disk or a lock.
const MAX_THREADS: usize = 64;
/// Time for accepted requests when the daemon stops.
const GRACE: Duration = Duration::from_secs(15);
/// Time for threads of commands to end after [`GRACE`].
const LAST_COMMANDS_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
