//! The HTTP API of a daemon: on a Unix socket for its owner and root (`--control`), and over TCP
//! for clients with a token (`--api`).
//!
//! One thread has all of it, with an asynchronous runtime that nothing else of the process uses: no
//! core waits for what a client waits for. Each client has [`REQUEST_TIME`] for the head of a
//! request, as much for its body, and as much to take a part of the answer; [`MOST_CLIENTS`] are
//! served at a time, others wait. Requests that may wait for a disk or a lock run on threads beside
//! it, see [`actions`].

mod actions;
mod endpoint;
mod guard;
mod history;
mod metrics;
mod page;
mod process;
mod reply;
mod routes;
mod takeover;

pub(super) use endpoint::{Endpoint, bind_control, bind_tcp};

use super::control::ControlServer;
use super::takeover::Successors;
use crate::failure::Failure;
use actions::Actions;
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use endpoint::{AnyListener, AnyStream, Guard};
use history::{Samples, TICK};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time;
use tokio_io_timeout::TimeoutStream;
use tower::Service;
use tracing::{debug, warn};

/// Serves the API until it is dropped; then the socket's file is gone.
pub(super) struct Api {
    /// Dropped to stop.
    stop: Option<watch::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What all requests use.
#[derive(Clone)]
struct Shared {
    control: Arc<ControlServer>,
    successors: Arc<Successors>,
    actions: Actions,
    samples: Arc<Mutex<Samples>>,
}

impl Api {
    /// Serves the API at these endpoints.
    ///
    /// # Errors
    /// If the system has no thread for it.
    pub(super) fn start(
        endpoints: Vec<Endpoint>,
        control: ControlServer,
        successors: Successors,
    ) -> Result<Api, Failure> {
        let start = || {
            let runtime = Builder::new_current_thread()
                .enable_all()
                .max_blocking_threads(MOST_THREADS)
                .thread_name("command")
                .build()?;
            let (stop, stopped) = watch::channel(());
            let shared = Shared {
                control: Arc::new(control),
                successors: Arc::new(successors),
                actions: Actions::default(),
                samples: Arc::default(),
            };
            let run = move || run(&runtime, endpoints, shared, &stopped);
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

fn run(runtime: &Runtime, endpoints: Vec<Endpoint>, shared: Shared, stopped: &watch::Receiver<()>) {
    let router = routes::router(shared.clone());
    let clients = Arc::new(Semaphore::new(MOST_CLIENTS));
    runtime.block_on(async {
        let sampling = tokio::spawn(sample(shared));
        let mut accepting = JoinSet::new();
        for endpoint in endpoints {
            accepting.spawn(accept_all(endpoint, router.clone(), clients.clone(), stopped.clone()));
        }
        while accepting.join_next().await.is_some() {}
        sampling.abort();
    });
}

/// Takes a sample of what is done in each tick, for ever.
async fn sample(shared: Shared) {
    let mut ticks = time::interval(TICK);
    ticks.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Shared { control, samples, .. } = shared.clone();
        // Volumes are asked, which may wait for a lock.
        let taken = tokio::task::spawn_blocking(move || {
            let figures = control.figures();
            samples.lock().unwrap_or_else(PoisonError::into_inner).take(&figures, Instant::now());
        });
        if let Err(error) = taken.await {
            warn!("a sample for the page is missing: {error}");
        }
    }
}

/// Serves clients of one endpoint until the daemon stops; then those that have a request are
/// answered.
async fn accept_all(
    Endpoint { listener, guard, .. }: Endpoint,
    router: Router,
    clients: Arc<Semaphore>,
    mut stopped: watch::Receiver<()>,
) {
    let guard = Arc::new(guard);
    let mut open = JoinSet::new();
    let address = listener.address().to_string();
    let accepting = match AnyListener::of(&listener) {
        Ok(accepting) => accepting,
        Err(error) => {
            warn!("{address}: the API is not served: {error}; start the daemon again");
            return;
        }
    };
    loop {
        let accepted = async {
            let place = clients.clone().acquire_owned().await.map_err(io::Error::other)?;
            io::Result::Ok((accepting.accept().await?, place))
        };
        let accepted = tokio::select! {
            accepted = accepted => accepted,
            Some(_) = open.join_next(), if !open.is_empty() => continue,
            _ = stopped.changed() => break,
        };
        match accepted {
            Ok((stream, place)) => {
                let (guard, router, stopped) = (guard.clone(), router.clone(), stopped.clone());
                open.spawn(async move {
                    if let Err(error) = serve(stream, guard, router, stopped).await {
                        debug!("a client of the API is gone: {error}");
                    }
                    drop(place);
                });
            }
            // Out of files, as it may be: those that are open will be closed.
            Err(error) => {
                debug!("cannot take a client of the API for now: {error}");
                time::sleep(PAUSE).await;
            }
        }
    }
    drop((accepting, listener));
    let all = async { while open.join_next().await.is_some() {} };
    if time::timeout(GRACE, all).await.is_err() {
        warn!("{address}: requests are not over after {} s", GRACE.as_secs());
    }
}

/// Serves one client.
async fn serve(
    stream: AnyStream,
    guard: Arc<Guard>,
    router: Router,
    mut stopped: watch::Receiver<()>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let peer: Arc<str> = guard.check(&stream)?.into();
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(REQUEST_TIME));
    let answer = service_fn(move |request: Request<Incoming>| {
        let (guard, peer, mut router) = (guard.clone(), peer.clone(), router.clone());
        async move {
            let mut request = request.map(Body::new);
            if matches!(*guard, Guard::Owner) {
                request.extensions_mut().insert(takeover::ByOwner);
            }
            match guard::admit(&guard, &peer, request).await {
                Ok(request) => router.call(request).await,
                Err(refused) => Ok(refused),
            }
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIME)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(Box::pin(stream)), answer)
        .with_upgrades();
    tokio::pin!(connection);
    tokio::select! {
        served = connection.as_mut() => return Ok(served?),
        _ = stopped.changed() => {}
    }
    connection.as_mut().graceful_shutdown();
    Ok(connection.await?)
}

/// A connection, as it is served.
type Io = TokioIo<Pin<Box<TimeoutStream<AnyStream>>>>;

/// Clients at a time; others wait.
const MOST_CLIENTS: usize = 256;
/// Time for the head of a request, for its body, and for the client to take a part of the answer.
const REQUEST_TIME: Duration = Duration::from_secs(5);
/// The longest head of a request, in bytes.
const MAX_HEAD: usize = 32 << 10;
/// Requests at a time that may wait for a disk or a lock.
const MOST_THREADS: usize = 64;
/// How long requests that were taken may go on when the daemon stops.
const GRACE: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_millis(100);
