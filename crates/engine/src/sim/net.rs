//! A simulated network: listeners, and streams with delay, a window, odd cuts, stalls and sudden ends.

use super::core::SimCore;
use super::tls::{SimTls, SystemTls};
use super::weather::{LONGEST_STALL, Weather};
use crate::host::{ByteStream, Direction, Ended, Host};
use crate::reactor::{Progress, Task};
use crate::socket::Address;
use crate::timers::Timers;
use blockmux_proto::outbox::{Outbox, Piece};
use blockmux_tls::{APPLICATION_DATA, OVERHEAD, RecordKeys};
use blockmux_volume::random::SplitMix;
use blockmux_volume::{Chunk, Core, SgList, Waker};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

/// The network, its clock and its luck; a clone is the same one.
#[derive(Clone)]
pub struct SimNet(Rc<Shared>);

struct Shared {
    now: Cell<Instant>,
    timers: Timers,
    random: RefCell<SplitMix>,
    weather: Weather,
    system_tls: Cell<SystemTls>,
    tls_keys: Cell<u64>,
    listeners: RefCell<Vec<(Address, Weak<Backlog>)>>,
    connections: Cell<u64>,
    breaks: Cell<u64>,
}

/// Connections on their way to a listener, with the time of their arrival.
struct Backlog {
    waker: Waker,
    queue: RefCell<VecDeque<(Instant, SimStream)>>,
}

/// One end of a connection.
pub struct SimStream {
    net: SimNet,
    wire: Rc<Wire>,
    /// 0 dialled, 1 accepted; it sends into the pipe of that number.
    side: usize,
    peer: String,
    /// Shared by all owners; the last one closes it.
    owners: Rc<()>,
    /// It has been closed.
    is_closed: Rc<Cell<bool>>,
    /// What the system does of TLS here.
    tls: Rc<RefCell<Option<SimTls>>>,
}

/// Wakes the task of a stream.
pub struct SimWatch(pub(super) Waker);

impl SimWatch {
    pub(super) fn waker(&self) -> &Waker {
        &self.0
    }
}

struct Wire {
    pipes: [RefCell<Pipe>; 2],
    opens_at: Instant,
    /// Nobody listened there.
    is_refused: bool,
    is_broken: Cell<bool>,
    /// Bytes until it breaks.
    life: Cell<u64>,
}

/// One direction.
struct Pipe {
    segments: VecDeque<Segment>,
    /// Bytes in all segments.
    len: usize,
    /// Nothing sent later arrives earlier.
    last_arrival: Instant,
    /// When the end arrives, once the sender has closed.
    ends_at: Option<Instant>,
    is_reader_gone: bool,
    /// Parked tasks.
    reader: Option<Waker>,
    writer: Option<Waker>,
    /// Waits for the end alone.
    watcher: Option<Waker>,
}

struct Segment {
    arrives: Instant,
    bytes: VecDeque<u8>,
}

impl SimNet {
    /// A network in which everything follows from `seed`.
    #[must_use]
    pub fn new(seed: u64, weather: Weather) -> SimNet {
        SimNet(Rc::new(Shared {
            now: Cell::new(Instant::now()),
            timers: Timers::default(),
            random: RefCell::new(SplitMix::new(seed)),
            weather,
            system_tls: Cell::default(),
            tls_keys: Cell::new(0),
            listeners: RefCell::default(),
            connections: Cell::new(0),
            breaks: Cell::new(0),
        }))
    }

    /// What the systems at both ends of connections do of TLS.
    pub fn set_system_tls(&self, system: SystemTls) {
        self.0.system_tls.set(system);
    }

    /// Keys of TLS that the systems have taken so far.
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

    /// Connections that were opened so far, and how many of them broke by chance.
    #[must_use]
    pub fn connections(&self) -> (u64, u64) {
        (self.0.connections.get(), self.0.breaks.get())
    }

    /// Listens at `address` on `core` and calls `serve` with every connection, until the core stops or is killed.
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
        let weather = self.0.weather;
        let opens_at = self.now() + self.up_to(weather.delay);
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
        let wire = Rc::new(Wire {
            pipes: [pipe(), pipe()],
            opens_at,
            is_refused: backlog.is_none(),
            is_broken: Cell::new(false),
            life: Cell::new(weather.breaks_within.map_or(u64::MAX, |most| 1 + self.below(most.max(1)))),
        });
        let end = |side, peer: &str| SimStream {
            net: self.clone(),
            wire: wire.clone(),
            side,
            peer: peer.to_owned(),
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

    /// How many of `most` bytes a call moves.
    fn cut(&self, most: usize) -> usize {
        let limit = self.0.weather.most_per_call;
        if most == 0 || limit == usize::MAX { most } else { 1 + self.below(most.min(limit) as u64) as usize }
    }
}

/// Hands arrived connections to whoever serves.
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
            // Delays differ, so the first in the queue need not be the first to arrive.
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

    /// Takes up to `most` bytes that can be received and gives them to `put` in order; 0 at the end.
    fn take(&self, most: usize, put: impl FnMut(&[u8])) -> io::Result<usize> {
        let mut tls = self.tls.borrow_mut();
        match tls.as_mut().filter(|tls| tls.receives()) {
            None => self.take_arrived(most, put),
            Some(tls) => {
                let arrived = self.take_arrived(usize::MAX, |bytes| tls.take(bytes));
                match (tls.data(most, put)?, arrived) {
                    (Some(given), _) => Ok(given),
                    (None, Ok(1..)) => Err(io::ErrorKind::WouldBlock.into()),
                    (None, arrived) => arrived,
                }
            }
        }
    }

    /// The same as it has arrived.
    fn take_arrived(&self, most: usize, mut put: impl FnMut(&[u8])) -> io::Result<usize> {
        let now = self.net.now();
        let mut pipe = self.incoming().borrow_mut();
        let asked = self.net.cut(most.min(pipe.arrived(now)));
        if asked == 0 {
            return match pipe.ends_at {
                _ if self.wire.is_broken.get() => Err(io::ErrorKind::ConnectionReset.into()),
                Some(end) if end <= now && pipe.len == 0 => Ok(0),
                _ => Err(io::ErrorKind::WouldBlock.into()),
            };
        }
        let mut left = asked;
        while left > 0
            && let Some(segment) = pipe.segments.front_mut()
        {
            let here = left.min(segment.bytes.len());
            put(&segment.bytes.drain(..here).collect::<Vec<u8>>());
            left -= here;
            if segment.bytes.is_empty() {
                pipe.segments.pop_front();
            }
        }
        pipe.len -= asked;
        if let Some(writer) = pipe.writer.take() {
            // The sender learns of the new room a little later.
            let delay = self.net.up_to(self.net.0.weather.delay);
            self.net.wake_at(now + delay, &writer);
        }
        Ok(asked)
    }

    /// How much can be sent now.
    fn room(&self) -> io::Result<usize> {
        let pipe = self.outgoing().borrow();
        if self.wire.is_broken.get() || pipe.is_reader_gone {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(self.net.0.weather.window.saturating_sub(pipe.len))
    }

    /// Sends these bytes.
    fn carry(&self, bytes: VecDeque<u8>) {
        let (weather, now, fits) = (self.net.0.weather, self.net.now(), bytes.len());
        let mut pipe = self.outgoing().borrow_mut();
        let mut arrives = now + self.net.up_to(weather.delay);
        if self.net.below(1000) < weather.stalls_per_thousand.into() {
            arrives += self.net.up_to(LONGEST_STALL);
        }
        let wire_time = weather.bytes_per_s.map_or(0, |rate| fits as u64 * 1_000_000_000 / rate);
        arrives = arrives.max(pipe.last_arrival) + Duration::from_nanos(wire_time);
        pipe.last_arrival = arrives;
        pipe.len += fits;
        pipe.segments.push_back(Segment { arrives, bytes });
        if let Some(reader) = pipe.reader.take() {
            self.net.wake_at(arrives, &reader);
        }
        drop(pipe);
        let life = self.wire.life.get().saturating_sub(fits as u64);
        self.wire.life.set(life);
        if life == 0 {
            self.net.0.breaks.set(self.net.0.breaks.get() + 1);
            self.break_off();
        }
    }

    /// Cuts the connection: what is on its way is lost, and perhaps what has arrived.
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
        let here = self.segments.iter().take_while(|segment| segment.arrives <= now);
        here.map(|segment| segment.bytes.len()).sum()
    }

    /// When the next thing to be noticed arrives.
    fn next_arrival(&self) -> Option<Instant> {
        self.segments.front().map(|segment| segment.arrives).or(self.ends_at)
    }
}

impl ByteStream for SimStream {
    type Watch = SimWatch;

    fn share(&self) -> SimStream {
        SimStream {
            net: self.net.clone(),
            wire: self.wire.clone(),
            side: self.side,
            peer: self.peer.clone(),
            owners: self.owners.clone(),
            is_closed: self.is_closed.clone(),
            tls: self.tls.clone(),
        }
    }

    /// As TCP does it: an orderly end, or a reset if something was left unread.
    fn close(&self) {
        if self.is_closed.replace(true) {
            return;
        }
        let now = self.net.now();
        let left_unread = {
            let mut incoming = self.incoming().borrow_mut();
            incoming.is_reader_gone = true;
            for waker in [incoming.writer.take(), incoming.watcher.take()].into_iter().flatten() {
                waker.wake();
            }
            incoming.arrived(now) > 0
        };
        if left_unread {
            return self.break_off();
        }
        let mut outgoing = self.outgoing().borrow_mut();
        let ends_at = outgoing.last_arrival.max(now + self.net.up_to(self.net.0.weather.delay));
        outgoing.ends_at = Some(ends_at);
        for waker in [outgoing.reader.take(), outgoing.watcher.take()].into_iter().flatten() {
            self.net.wake_at(ends_at, &waker);
        }
    }

    fn peer(&self) -> &str {
        &self.peer
    }

    fn connect_result(&self) -> Option<io::Result<()>> {
        match self.net.now() < self.wire.opens_at {
            true => None,
            false if self.wire.is_refused => Some(Err(io::ErrorKind::ConnectionRefused.into())),
            false => Some(Ok(())),
        }
    }

    fn receive(&mut self, chunk: &mut Chunk, most: usize) -> io::Result<usize> {
        self.take(chunk.room().min(most), |bytes| chunk.extend(bytes))
    }

    fn waiting(&self) -> usize {
        self.incoming().borrow().arrived(self.net.now())
    }

    fn receive_placed(&mut self, list: &SgList, at: usize, chunk: &mut Chunk) -> io::Result<usize> {
        let mut filled = at;
        self.take(list.len() - at + chunk.room(), |bytes| {
            let (placed, rest) = bytes.split_at(bytes.len().min(list.len() - filled));
            list.slice(filled, placed.len()).copy_from(placed);
            filled += placed.len();
            chunk.extend(rest);
        })
    }

    fn send(&mut self, outbox: &mut Outbox) -> io::Result<usize> {
        let mut tls = self.tls.borrow_mut();
        let mut tls = tls.as_mut().filter(|tls| tls.sends());
        let room = self.room()?;
        let most = match &tls {
            None => outbox.len().min(room),
            Some(_) => SimTls::fits(outbox.len(), room),
        };
        let fits = self.net.cut(most);
        if fits == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let weather = self.net.0.weather;
        let mut bytes = VecDeque::with_capacity(fits);
        let mut may_damage =
            weather.damaged_per_thousand > 0 && self.net.below(1000) < weather.damaged_per_thousand.into();
        for piece in outbox.pieces() {
            let left = fits - bytes.len();
            match piece {
                Piece::Head(head) => bytes.extend(&head[..left.min(head.len())]),
                Piece::Payload(seg) => {
                    let mut payload = seg.slice(0, left.min(seg.len())).to_vec();
                    if let Some(first) = payload.first_mut().filter(|_| std::mem::take(&mut may_damage)) {
                        *first ^= 0x40;
                    }
                    bytes.extend(payload);
                }
            }
        }
        outbox.consume(fits);
        self.carry(match &mut tls {
            None => bytes,
            Some(tls) => tls.seal(APPLICATION_DATA, bytes.make_contiguous()),
        });
        Ok(fits)
    }

    fn attach_tls(&mut self) -> io::Result<()> {
        let attached = SimTls::attach(self.net.0.system_tls.get())?;
        *self.tls.borrow_mut() = Some(attached);
        Ok(())
    }

    fn set_tls_keys(&mut self, direction: Direction, keys: &RecordKeys) -> io::Result<()> {
        let mut tls = self.tls.borrow_mut();
        tls.as_mut().ok_or(io::ErrorKind::Unsupported)?.set_keys(direction, keys)?;
        self.net.0.tls_keys.set(self.net.tls_keys() + 1);
        Ok(())
    }

    fn forgo_tls(&self) {
        self.net.set_system_tls(SystemTls::None);
    }

    fn send_record(&mut self, content_type: u8, bytes: &[u8]) -> io::Result<()> {
        let mut tls = self.tls.borrow_mut();
        let tls = tls.as_mut().filter(|tls| tls.sends()).ok_or(io::ErrorKind::Unsupported)?;
        if self.room()? < bytes.len() + OVERHEAD {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.carry(tls.seal(content_type, bytes));
        Ok(())
    }

    fn receive_record(&mut self, bytes: &mut [u8]) -> io::Result<(u8, usize)> {
        let mut tls = self.tls.borrow_mut();
        let tls = tls.as_mut().filter(|tls| tls.receives()).ok_or(io::ErrorKind::Unsupported)?;
        tls.record(bytes)?.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    fn wake_when_readable(&self, watch: &SimWatch) {
        if self.tls.borrow().as_ref().is_some_and(SimTls::has_more) {
            return watch.0.wake();
        }
        let mut pipe = self.incoming().borrow_mut();
        match pipe.next_arrival() {
            _ if self.wire.is_broken.get() => watch.0.wake(),
            Some(when) => self.net.wake_at(when, &watch.0),
            None => pipe.reader = Some(watch.0.clone()),
        }
    }

    fn wake_when_writable(&self, watch: &SimWatch) {
        let mut pipe = self.outgoing().borrow_mut();
        // A short record has to have room.
        let least = if self.tls.borrow().as_ref().is_some_and(SimTls::sends) { OVERHEAD + 16 } else { 0 };
        let has_room = pipe.len + least < self.net.0.weather.window;
        if self.net.now() < self.wire.opens_at {
            self.net.wake_at(self.wire.opens_at, &watch.0);
        } else if has_room || self.wire.is_broken.get() || pipe.is_reader_gone {
            watch.0.wake();
        } else {
            pipe.writer = Some(watch.0.clone());
        }
    }

    fn ended(&self) -> Ended {
        let input_ends = self.incoming().borrow().ends_at;
        match input_ends {
            _ if self.wire.is_broken.get() || self.is_closed.get() => Ended::Both,
            Some(end) if end <= self.net.now() => Ended::Input,
            _ => Ended::Not,
        }
    }

    fn wake_when_ended(&self, so_far: Ended, watch: &SimWatch) {
        if self.ended() == Ended::Both {
            return watch.0.wake();
        }
        let mut pipe = self.incoming().borrow_mut();
        match pipe.ends_at.filter(|_| so_far == Ended::Not) {
            Some(end) => self.net.wake_at(end, &watch.0),
            None => pipe.watcher = Some(watch.0.clone()),
        }
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        if Rc::strong_count(&self.owners) == 1 {
            self.close();
        }
    }
}
