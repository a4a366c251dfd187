//! The ports of one session, and frame transfer between them.

use super::{FrameHost, FramePort, ReceivedFrame, Side};
use crate::core::reactor::{EngineCore, Progress};
use blockmux_proto::driver::frames::{Frame, FramePortInfo, PortId, Station};
use blockmux_proto::driver::session::FrameSession;
use blockmux_volume::{Chunk, Waker};
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Ports and their state; the owner holds the session.
pub(crate) struct FramePorts<H: FrameHost = EngineCore> {
    ports: Vec<OpenPort<H>>,
    core: Rc<H>,
    waker: Waker,
    chunk: Option<Chunk>,
    arrivals: Vec<ReceivedFrame>,
    /// The deadline that is armed with the core.
    deadline: Option<Instant>,
    /// When the interfaces are queried next.
    check_ports_at: Option<Instant>,
    /// Consecutive polls that may have left frames in the ports.
    behind: u32,
}

struct OpenPort<H: FrameHost> {
    // Declared first, so that it is dropped before the port is closed.
    watch: H::Watch,
    port: H::Port,
    name: String,
    /// The state of the port that the session was last notified of.
    known: Option<FramePortInfo>,
    wants_output: bool,
}

impl<H: FrameHost> FramePorts<H> {
    /// Opens the interfaces of these names, in the order of their ids.
    ///
    /// # Errors
    /// If one cannot be opened: its name, and why.
    pub(crate) fn open(
        core: &Rc<H>,
        waker: &Waker,
        interfaces: &[String],
        side: Side,
    ) -> Result<FramePorts<H>, (String, io::Error)> {
        let mut ports = Vec::with_capacity(interfaces.len());
        for name in interfaces {
            let port = core.open_port(name, side).map_err(|error| (name.clone(), error))?;
            let watch = core.watch(waker);
            ports.push(OpenPort { watch, port, name: name.clone(), known: None, wants_output: false });
        }
        Ok(FramePorts {
            ports,
            core: core.clone(),
            waker: waker.clone(),
            chunk: None,
            arrivals: Vec::new(),
            deadline: None,
            check_ports_at: None,
            behind: 0,
        })
    }

    /// One poll: passes received frames to the session, and only then runs its deadlines. A process
    /// that had to wait for a CPU finds its deadlines passed and, with them, the replies that
    /// arrived meanwhile. Ports that never become empty delay deadlines for at most
    /// [`TURNS_BEHIND`] polls.
    #[inline]
    pub(crate) fn take_in<S: FrameSession>(&mut self, session: &mut S, now: Instant) -> Progress {
        if self.check_ports_at.is_none_or(|at| at <= now) {
            self.check_ports(session, now);
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
            // Neither input nor a timeout ends a session over frames.
            let _ = session.on_timeout(now);
        }
    }

    /// Arms the wake-up for the next deadline.
    #[inline]
    pub(crate) fn arm<S: FrameSession>(&mut self, session: &S, now: Instant) {
        let Some(when) = [session.poll_timeout(), self.check_ports_at].into_iter().flatten().min() else {
            return;
        };
        if self.deadline.is_none_or(|armed| when < armed || armed <= now) {
            self.deadline = Some(when);
            self.core.wake_at(when, &self.waker);
        }
    }

    /// Passes received frames to the session, at most one batch of each port.
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
            // Out of buffers: frames are dropped as on a congested link, and retransmitted.
            return Progress::Idle;
        }
        let Some(chunk) = &mut self.chunk else { return Progress::Idle };
        let asked = chunk.room() / stride;
        match self.ports[at].port.receive(chunk, &mut self.arrivals) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Progress::Idle,
            Err(_) => {
                // The port went down, which is reported once.
                self.check_ports_at = Some(now);
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

    /// Sends the session's frames; returns whether any were sent.
    #[inline]
    pub(crate) fn send<S: FrameSession>(&mut self, session: &mut S, now: Instant) -> bool {
        let outbox = session.frames(now);
        let mut any = false;
        for _ in 0..SENDS_PER_TURN {
            let Some(frame) = outbox.front() else { break };
            let id = frame.to.port;
            let Some(open) = self.ports.get_mut(usize::from(id.0)) else {
                outbox.pop_front();
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
                    // Port down, or a frame that the interface rejects: the frame is lost.
                    outbox.pop_front();
                    if error.raw_os_error() != Some(libc::ENOBUFS) {
                        self.check_ports_at = Some(now);
                    }
                }
            }
        }
        any
    }

    /// Whether a port has no room for frames to be sent.
    pub(crate) fn is_stuck(&self) -> bool {
        self.ports.iter().any(|open| open.wants_output)
    }

    /// Arms the wake-ups that the ports need, and frees the buffer.
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

    /// Notifies the session of interfaces whose state has changed.
    fn check_ports<S: FrameSession>(&mut self, session: &mut S, now: Instant) {
        self.check_ports_at = now.checked_add(PORT_CHECK_INTERVAL);
        for (at, open) in self.ports.iter_mut().enumerate() {
            let port = match (open.port.query_info(), open.known) {
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

    /// Makes room in the chunk for part of a batch; returns whether at least one frame fits.
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

/// Size of the receive buffer, in bytes. Batches are appended while parts of it are borrowed.
const CHUNK: usize = 256 << 10;
/// Minimum room, in frames: receiving fewer per call costs more than allocating another buffer.
const MIN_FRAMES: usize = 8;
/// Send calls of one poll.
const SENDS_PER_TURN: usize = 16;
/// Number of polls that receive all frames that were in a port's ring at the deadline.
const TURNS_BEHIND: u32 = 4;
/// Interval at which interfaces are queried, since changes are not notified.
const PORT_CHECK_INTERVAL: Duration = Duration::from_secs(1);
