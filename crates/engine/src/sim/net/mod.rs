//! A simulated network: listeners, and streams with delay, a window, short transfers, stalls and
//! breaks.

mod stream;

use super::conditions::NetworkConditions;
use super::core::SimCore;
use super::tls::{SimTls, SystemTls};
use crate::core::reactor::{Progress, Task};
use crate::core::timers::Timers;
use crate::net::host::{ByteStream, Host};
use crate::net::socket::Address;
use blockmux_volume::random::SplitMix;
use blockmux_volume::{Core, Waker};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The network with its clock and random numbers; a clone is another handle to it.
#[derive(Clone)]
pub struct SimNet(Rc<NetState>);

struct NetState {
    now: Cell<Instant>,
    timers: Timers,
    random: RefCell<SplitMix>,
    conditions: NetworkConditions,
    system_tls: Cell<SystemTls>,
    tls_keys: Cell<u64>,
    listeners: RefCell<Vec<(Address, Weak<Backlog>)>>,
    connections: Cell<u64>,
    breaks: Cell<u64>,
}

/// Connections on their way to a listener, with their time of arrival.
struct Backlog {
    waker: Waker,
    queue: RefCell<VecDeque<(Instant, SimStream)>>,
}

/// One end of a connection.
pub struct SimStream {
    net: SimNet,
    wire: Rc<SimLink>,
    /// 0: connected, 1: accepted; it sends into the pipe of that index.
    side: usize,
    peer: Arc<str>,
    /// Shared by all owners; the last one closes the stream.
    owners: Rc<()>,
    /// The stream has been closed.
    is_closed: Rc<Cell<bool>>,
    /// State of the simulated kernel's TLS.
    tls: Rc<RefCell<Option<SimTls>>>,
}

/// Wakes the task of a stream.
pub struct SimWatch(pub(super) Waker);

impl SimWatch {
    pub(super) fn waker(&self) -> &Waker {
        &self.0
    }
}

struct SimLink {
    pipes: [RefCell<Pipe>; 2],
    opens_at: Instant,
    /// No listener was at the address.
    is_refused: bool,
    is_broken: Cell<bool>,
    /// Bytes until the connection breaks.
    life: Cell<u64>,
}

/// One direction.
struct Pipe {
    segments: VecDeque<StreamSegment>,
    /// Bytes in all segments.
    len: usize,
    /// Arrival of the last segment; later segments never arrive earlier.
    last_arrival: Instant,
    /// When the end of the stream arrives, after the sender has closed.
    ends_at: Option<Instant>,
    is_reader_gone: bool,
    /// Waker of the parked reader.
    reader: Option<Waker>,
    /// Waker of the parked writer.
    writer: Option<Waker>,
    /// Waker of a task that waits only for the end of the stream.
    watcher: Option<Waker>,
}

struct StreamSegment {
    arrives: Instant,
    bytes: VecDeque<u8>,
}

impl SimNet {
    /// A network in which everything follows from `seed`.
    #[must_use]
    pub fn new(seed: u64, conditions: NetworkConditions) -> SimNet {
        SimNet(Rc::new(NetState {
            now: Cell::new(Instant::now()),
            timers: Timers::default(),
            random: RefCell::new(SplitMix::new(seed)),
            conditions,
            system_tls: Cell::default(),
            tls_keys: Cell::new(0),
            listeners: RefCell::default(),
            connections: Cell::new(0),
            breaks: Cell::new(0),
        }))
    }

    /// Sets the TLS support of the simulated kernels at both ends.
    pub fn set_system_tls(&self, system: SystemTls) {
        self.0.system_tls.set(system);
    }

    /// Number of TLS keys that the simulated kernels have accepted so far.
    #[must_use]
    pub fn tls_keys(&self) -> u64 {
        self.0.tls_keys.get()
    }

    /// The virtual time.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.0.now.get()
    }

    /// A random number below `bound`, which is not 0.
    #[must_use]
    pub fn below(&self, bound: u64) -> u64 {
        self.0.random.borrow_mut().below(bound)
    }

    /// A random time up to `most`.
    #[must_use]
    pub fn up_to(&self, most: Duration) -> Duration {
        Duration::from_nanos(self.below(most.as_nanos() as u64 + 1))
    }

    /// Connections opened so far, and how many of them broke at random.
    #[must_use]
    pub fn connections(&self) -> (u64, u64) {
        (self.0.connections.get(), self.0.breaks.get())
    }

    /// Listens at `address` on `core` and calls `serve` with every connection, until the core stops
    /// or is killed.
    pub fn listen(
        &self,
        core: &Rc<SimCore>,
        address: &Address,
        serve: impl Fn(&Rc<SimCore>, SimStream) + 'static,
    ) {
        core.spawn(|waker| {
            let backlog = Rc::new(Backlog { waker: waker.clone(), queue: RefCell::default() });
            let mut listeners = self.0.listeners.borrow_mut();
            listeners.retain(|(_, backlog)| backlog.strong_count() > 0);
            listeners.push((address.clone(), Rc::downgrade(&backlog)));
            ListenTask { core: Rc::downgrade(core), backlog, serve }
        });
    }

    pub(super) fn wake_at(&self, when: Instant, waker: &Waker) {
        self.0.timers.add(when, waker);
    }

    pub(super) fn next_time(&self) -> Option<Instant> {
        self.0.timers.next()
    }

    pub(super) fn advance_to(&self, when: Instant) {
        self.0.now.set(self.now().max(when));
        self.0.timers.fire(self.now());
    }

    pub(super) fn connect(&self, address: &Address) -> io::Result<SimStream> {
        let conditions = self.0.conditions;
        let opens_at = self.now() + self.up_to(conditions.delay);
        let backlog = self.0.listeners.borrow().iter().find_map(|(at, backlog)| {
            let backlog = backlog.upgrade()?;
            (at == address).then_some(backlog)
        });
        let pipe = || {
            RefCell::new(Pipe {
                segments: VecDeque::new(),
                len: 0,
                last_arrival: opens_at,
                ends_at: None,
                is_reader_gone: false,
                reader: None,
                writer: None,
                watcher: None,
            })
        };
        let wire = Rc::new(SimLink {
            pipes: [pipe(), pipe()],
            opens_at,
            is_refused: backlog.is_none(),
            is_broken: Cell::new(false),
            life: Cell::new(conditions.breaks_within.map_or(u64::MAX, |most| 1 + self.below(most.max(1)))),
        });
        let end = |side, peer: &str| SimStream {
            net: self.clone(),
            wire: wire.clone(),
            side,
            peer: peer.into(),
            owners: Rc::default(),
            is_closed: Rc::default(),
            tls: Rc::default(),
        };
        if let Some(backlog) = backlog {
            self.0.connections.set(self.0.connections.get() + 1);
            backlog.queue.borrow_mut().push_back((opens_at, end(1, "simulated initiator")));
            self.wake_at(opens_at, &backlog.waker);
        }
        Ok(end(0, "simulated target"))
    }

    /// How many of `most` bytes a call transfers.
    fn transfer_len(&self, most: usize) -> usize {
        let limit = self.0.conditions.max_per_call;
        if most == 0 || limit == usize::MAX { most } else { 1 + self.below(most.min(limit) as u64) as usize }
    }
}

/// Passes arrived connections to the server.
struct ListenTask<F> {
    core: Weak<SimCore>,
    backlog: Rc<Backlog>,
    serve: F,
}

impl<F: Fn(&Rc<SimCore>, SimStream)> Task for ListenTask<F> {
    fn run(&mut self) -> Progress {
        let Some(core) = self.core.upgrade().filter(|core| !core.is_stopping()) else {
            return Progress::Done;
        };
        loop {
            let mut queue = self.backlog.queue.borrow_mut();
            // Delays differ, so the first in the queue need not arrive first.
            let arrived = queue.iter().position(|(arrives, _)| *arrives <= core.now());
            let Some((_, stream)) = arrived.and_then(|at| queue.remove(at)) else { return Progress::Idle };
            drop(queue);
            (self.serve)(&core, stream);
        }
    }
}

impl SimStream {
    fn incoming(&self) -> &RefCell<Pipe> {
        &self.wire.pipes[1 - self.side]
    }

    fn outgoing(&self) -> &RefCell<Pipe> {
        &self.wire.pipes[self.side]
    }

    /// Breaks the connection: bytes in flight are lost, and perhaps those that have arrived.
    fn break_off(&self) {
        self.wire.is_broken.set(true);
        let now = self.net.now();
        for pipe in &self.wire.pipes {
            let mut pipe = pipe.borrow_mut();
            let loses_arrived = self.net.below(2) == 0;
            pipe.segments.retain(|segment| segment.arrives <= now && !loses_arrived);
            pipe.len = pipe.segments.iter().map(|segment| segment.bytes.len()).sum();
            let wakers = [pipe.reader.take(), pipe.writer.take(), pipe.watcher.take()];
            for waker in wakers.into_iter().flatten() {
                waker.wake();
            }
        }
    }
}

impl Pipe {
    fn arrived(&self, now: Instant) -> usize {
        let arrived = self.segments.iter().take_while(|segment| segment.arrives <= now);
        arrived.map(|segment| segment.bytes.len()).sum()
    }

    /// When the next segment or the end of the stream arrives.
    fn next_arrival(&self) -> Option<Instant> {
        self.segments.front().map(|segment| segment.arrives).or(self.ends_at)
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        if Rc::strong_count(&self.owners) == 1 {
            self.close();
        }
    }
}
