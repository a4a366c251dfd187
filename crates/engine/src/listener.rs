//! Accepts connections and spreads them over the cores.

use crate::reactor::{EngineCore, Inbox, Progress, Task, WakeOnEvent};
use crate::ring::Registration;
use crate::socket::{Listener, Stream};
use blockmux_volume::{Core, Waker};
use std::io;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tracing::warn;

/// Starts serving a connection on the core that it is called on. The permit is held as long as the connection lives.
pub type Serve = Arc<dyn Fn(&Rc<EngineCore>, Stream, Permit) + Send + Sync>;

/// A bound on the connections of a process; a clone is another handle to it.
#[derive(Clone)]
pub struct ConnectionLimit {
    open: Arc<AtomicUsize>,
    most: usize,
    /// Of what has this handle and its clones.
    part: Arc<AtomicUsize>,
}

/// One connection's share of the limit.
pub struct Permit {
    open: Arc<AtomicUsize>,
    part: Arc<AtomicUsize>,
}

impl ConnectionLimit {
    /// At most this many at a time.
    #[must_use]
    pub fn new(most: usize) -> ConnectionLimit {
        ConnectionLimit { open: Arc::default(), most, part: Arc::default() }
    }

    /// The same bound, for a part whose connections are counted by themselves, too.
    #[must_use]
    pub fn for_part(&self) -> ConnectionLimit {
        ConnectionLimit { part: Arc::default(), ..self.clone() }
    }

    /// How many of this part are open.
    #[must_use]
    pub fn open_of_part(&self) -> usize {
        self.part.load(Ordering::Relaxed)
    }

    /// How many may be open.
    #[must_use]
    pub fn most(&self) -> usize {
        self.most
    }

    /// How many are open.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// A place for one more connection, until it is dropped; `None` if as many are open as may be.
    #[must_use]
    pub fn permit(&self) -> Option<Permit> {
        if self.open.fetch_add(1, Ordering::Relaxed) >= self.most {
            self.open.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        self.part.fetch_add(1, Ordering::Relaxed);
        Some(Permit { open: self.open.clone(), part: self.part.clone() })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.part.fetch_sub(1, Ordering::Relaxed);
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Accepts on one core and hands each connection to the next core in turn.
pub struct ListenerTask {
    listener: Listener,
    cores: Vec<Inbox>,
    next_core: usize,
    serve: Serve,
    limit: ConnectionLimit,
    core: Rc<EngineCore>,
    waker: Waker,
    registration: Registration,
    readiness: Rc<WakeOnEvent>,
    /// Nothing could be accepted the last time, and that has been said.
    is_short: bool,
}

impl ListenerTask {
    /// Accepts on `core`.
    pub fn spawn(
        core: &Rc<EngineCore>,
        listener: Listener,
        cores: Vec<Inbox>,
        serve: Serve,
        limit: ConnectionLimit,
    ) {
        core.spawn(|waker| {
            let readiness = WakeOnEvent::new(waker);
            ListenerTask {
                listener,
                cores,
                next_core: 0,
                serve,
                limit,
                core: core.clone(),
                waker: waker.clone(),
                registration: core.register(readiness.clone()),
                readiness,
                is_short: false,
            }
        });
    }

    fn hand_over(&mut self, stream: Stream) {
        let Some(permit) = self.limit.permit() else {
            warn!(peer = stream.peer(), "refused: {} connections are open already", self.limit.most);
            return;
        };
        let serve = self.serve.clone();
        self.cores[self.next_core].send(move |core| serve(core, stream, permit));
        self.next_core = (self.next_core + 1) % self.cores.len();
    }
}

impl Task for ListenerTask {
    fn run(&mut self) -> Progress {
        if self.core.is_stopping() {
            return Progress::Done;
        }
        for _ in 0..ACCEPTS_PER_TURN {
            match self.listener.accept() {
                Ok(stream) => {
                    self.is_short = false;
                    self.hand_over(stream);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.readiness.arm(&self.registration, self.listener.as_raw_fd(), libc::POLLIN, 0);
                    return Progress::Drained;
                }
                Err(error) if is_lack_of_resources(&error) => {
                    if !std::mem::replace(&mut self.is_short, true) {
                        warn!(listener = %self.listener.address(), "cannot accept for now: {error}");
                    }
                    self.core.wake_at(self.core.now() + RETRY, &self.waker);
                    return Progress::Idle;
                }
                // The peer was gone before it was accepted.
                Err(_) => {}
            }
        }
        Progress::More
    }
}

impl Drop for ListenerTask {
    fn drop(&mut self) {
        self.readiness.disarm(&self.registration);
    }
}

fn is_lack_of_resources(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

const ACCEPTS_PER_TURN: usize = 64;
const RETRY: Duration = Duration::from_millis(100);
