//! The ports of one session, and the frames between them.

use super::{FrameHost, FramePort, ReceivedFrame, Side};
use crate::reactor::{EngineCore, Progress};
use blockmux_proto::frames::{Frame, FramePortInfo, PortId, Station};
use blockmux_proto::session::FrameSession;
use blockmux_volume::{Chunk, Waker};
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Interfaces and their frames; the session is the owner's.
pub(crate) struct Wire<H: FrameHost = EngineCore> {
    ports: Vec<OpenPort<H>>,
    core: Rc<H>,
    waker: Waker,
    chunk: Option<Chunk>,
    arrivals: Vec<ReceivedFrame>,
    /// What the core has been asked to wake the task for.
    deadline: Option<Instant>,
    /// When the interfaces are looked at again.
    look_at: Option<Instant>,
    /// Turns in a row that left something in the ports, perhaps.
    behind: u32,
}

struct OpenPort<H: FrameHost> {
    // Withdrawn before the port is closed.
    watch: H::Watch,
    port: H::Port,
    name: String,
    /// As the session knows it.
    known: Option<FramePortInfo>,
    wants_output: bool,
}

impl<H: FrameHost> Wire<H> {
    /// Opens the interfaces of these names, in the order of their ids.
    ///
    /// # Errors
    /// If one cannot be opened: its name, and why.
    pub(crate) fn open(
        core: &Rc<H>,
        waker: &Waker,
        interfaces: &[String],
        side: Side,
    ) -> Result<Wire<H>, (String, io::Error)> {
        let mut ports = Vec::with_capacity(interfaces.len());
        for name in interfaces {
            let port = core.open_port(name, side).map_err(|error| (name.clone(), error))?;
            let watch = core.watch(waker);
            ports.push(OpenPort { watch, port, name: name.clone(), known: None, wants_output: false });
        }
        Ok(Wire {
            ports,
            core: core.clone(),
            waker: waker.clone(),
            chunk: None,
            arrivals: Vec::new(),
            deadline: None,
            look_at: None,
            behind: 0,
        })
    }

    /// One turn: shows the session what has come to the ports, and only then lets it see what time
    /// it is. A process that had to wait for a processor finds its deadlines passed and, with them,
    /// the answers that came meanwhile. Ports that never become empty keep no deadline from being
    /// seen.
    #[inline]
    pub(crate) fn take_in<S: FrameSession>(&mut self, session: &mut S, now: Instant) -> Progress {
        if self.look_at.is_none_or(|at| at <= now) {
            self.look(session, now);
        }
        let received = self.receive(session, now);
        self.behind = if received == Progress::More { self.behind.saturating_add(1) } else { 0 };
        if self.behind.is_multiple_of(TURNS_BEHIND) {
            Self::check_time(session, now);
        }
        received
    }

    fn check_time<S: FrameSession>(session: &mut S, now: Instant) {
        if session.poll_timeout().is_some_and(|when| when <= now) {
            // Nothing that comes, or does not, breaks a session over frames.
            let _ = session.on_timeout(now);
        }
    }

    /// Has the task woken for whatever is due next.
    #[inline]
    pub(crate) fn arm<S: FrameSession>(&mut self, session: &S, now: Instant) {
        let Some(when) = [session.poll_timeout(), self.look_at].into_iter().flatten().min() else { return };
        if self.deadline.is_none_or(|armed| when < armed || armed <= now) {
            self.deadline = Some(when);
            self.core.wake_at(when, &self.waker);
        }
    }

    /// Shows the session what has come to each port, a batch at most.
    #[inline]
    fn receive<S: FrameSession>(&mut self, session: &mut S, now: Instant) -> Progress {
        let mut progress = Progress::Idle;
        for at in 0..self.ports.len() {
            match self.receive_at(at, session, now) {
                Progress::More => progress = Progress::More,
                Progress::Drained if progress == Progress::Idle => progress = Progress::Drained,
                _ => {}
            }
        }
        progress
    }

    #[inline]
    fn receive_at<S: FrameSession>(&mut self, at: usize, session: &mut S, now: Instant) -> Progress {
        let stride = self.ports[at].port.stride();
        if !self.make_room(stride) {
            // Buffers are short. What comes meanwhile is lost, as on a busy link, and comes again.
            return Progress::Idle;
        }
        let Some(chunk) = &mut self.chunk else { return Progress::Idle };
        let asked = chunk.room() / stride;
        match self.ports[at].port.receive(chunk, &mut self.arrivals) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Progress::Idle,
            Err(_) => {
                // It went down; that is told once.
                self.look_at = Some(now);
                return Progress::Idle;
            }
        }
        let (count, port) = (self.arrivals.len(), PortId(at as u16));
        for arrival in self.arrivals.drain(..) {
            let from = Station { port, mac: arrival.mac };
            session.on_frame(&Frame::new(from, chunk, arrival.len), now);
            chunk.take(stride);
        }
        if count == asked.min(super::kernel::BATCH) { Progress::More } else { Progress::Drained }
    }

    /// Sends what the session has to send now; answers whether anything went.
    #[inline]
    pub(crate) fn send<S: FrameSession>(&mut self, session: &mut S, now: Instant) -> bool {
        let outbox = session.frames(now);
        let mut any = false;
        for _ in 0..SENDS_PER_TURN {
            let Some(frame) = outbox.front() else { break };
            let id = frame.to.port;
            let Some(open) = self.ports.get_mut(usize::from(id.0)) else {
                outbox.pop();
                continue;
            };
            match open.port.send(id, outbox) {
                Ok(_) => any = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    open.wants_output = true;
                    return any;
                }
                Err(error) => {
                    // Down, or a frame that the interface does not take: that one is lost.
                    outbox.pop();
                    if error.raw_os_error() != Some(libc::ENOBUFS) {
                        self.look_at = Some(now);
                    }
                }
            }
        }
        any
    }

    /// Whether a port has no room for what is to be sent.
    pub(crate) fn is_stuck(&self) -> bool {
        self.ports.iter().any(|open| open.wants_output)
    }

    /// Asks the ring for whatever the ports are waiting for, and gives the buffer back.
    pub(crate) fn park(&mut self) {
        for open in &mut self.ports {
            open.port.wake_when_readable(&open.watch);
            if std::mem::take(&mut open.wants_output) {
                open.port.wake_when_writable(&open.watch);
            }
        }
        if self.chunk.as_ref().is_some_and(Chunk::is_idle) {
            self.chunk = None;
        }
    }

    /// Tells the session of interfaces that have changed.
    fn look<S: FrameSession>(&mut self, session: &mut S, now: Instant) {
        self.look_at = now.checked_add(LOOK_AGAIN);
        for (at, open) in self.ports.iter_mut().enumerate() {
            let port = match (open.port.look(), open.known) {
                (Ok(port), _) => port,
                (Err(_), Some(known)) => FramePortInfo { is_up: false, ..known },
                (Err(_), None) => continue,
            };
            if open.known == Some(port) {
                continue;
            }
            match (open.known.is_some_and(|known| known.is_up), port.is_up) {
                (true, false) => warn!(interface = open.name, "interface is down"),
                (false, true) if open.known.is_some() => info!(interface = open.name, "interface is up"),
                _ => {}
            }
            open.known = Some(port);
            session.on_port(PortId(at as u16), port, now);
        }
    }

    /// Sees to a chunk with room for a good part of a batch.
    #[inline]
    fn make_room(&mut self, stride: usize) -> bool {
        if let Some(chunk) = &mut self.chunk {
            chunk.recycle();
            if chunk.room() >= MIN_FRAMES * stride {
                return true;
            }
        }
        match self.core.pool().take(CHUNK.max(MIN_FRAMES * stride)) {
            Some(memory) => self.chunk = Some(Chunk::new(memory)),
            None => return self.chunk.as_ref().is_some_and(|chunk| chunk.room() >= stride),
        }
        true
    }
}

/// Memory that batches are received into, one after the other as long as pieces of it are lent.
const CHUNK: usize = 256 << 10;
/// Receiving fewer costs more calls than taking other memory costs.
const MIN_FRAMES: usize = 8;
/// Others get their turn after so many calls.
const SENDS_PER_TURN: usize = 16;
/// What had come before a deadline is taken in by then: a port's ring is as many batches.
const TURNS_BEHIND: u32 = 4;
/// Interfaces change rarely, and say so only to who asks.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
