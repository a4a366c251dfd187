//! A session over frames driven from an ordinary thread: for questions, where nothing else runs.

use super::target::PortError;
use super::{Arrival, PacketPort, Side, kernel};
use blockmux_proto::frames::{Frame, Port, PortId, Station};
use blockmux_proto::session::FrameSession;
use blockmux_volume::{Chunk, Memory};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// An interface that was switched on just now takes a moment to have its link.
fn wait_up(port: &mut PacketPort) -> io::Result<Port> {
    let ends = Instant::now() + LINK_TIMEOUT;
    loop {
        let known = port.look()?;
        if known.is_up {
            return Ok(known);
        }
        if Instant::now() >= ends {
            return Err(io::Error::from_raw_os_error(libc::ENETDOWN));
        }
        // Nothing comes to a port that is down; this only waits.
        kernel::wait_readable(&[], LOOK_AGAIN)?;
    }
}

/// Runs `session` at these interfaces until `done` says so, or the time is over: `false` then.
///
/// # Errors
/// If an interface cannot be opened.
pub fn run_session<S: FrameSession>(
    interfaces: &[String],
    side: Side,
    session: &mut S,
    timeout: Duration,
    mut done: impl FnMut(&S) -> bool,
) -> Result<bool, PortError> {
    let mut ports = Vec::new();
    for (id, name) in (0..).map(PortId).zip(interfaces) {
        let wrong = |error| PortError { interface: name.clone(), error };
        let mut port = PacketPort::open(name, side).map_err(wrong)?;
        let known = wait_up(&mut port).map_err(wrong)?;
        session.on_port(id, known, Instant::now());
        ports.push((id, port));
    }
    let fds: Vec<RawFd> = ports.iter().map(|(_, port)| port.as_raw_fd()).collect();
    let ends = Instant::now() + timeout;
    let mut arrivals: Vec<Arrival> = Vec::new();
    loop {
        let now = Instant::now();
        if session.poll_timeout().is_some_and(|at| at <= now) {
            // Nothing that comes, or does not, breaks a session over frames.
            let _ = session.on_timeout(now);
        }
        while let Some(frame) = session.frames(now).front() {
            let id = frame.to.port;
            let outbox = session.frames(now);
            let sent = ports.get_mut(usize::from(id.0)).map(|(_, port)| port.send(id, outbox));
            if !matches!(sent, Some(Ok(_))) {
                // Lost, as frames are; it is sent again in its time.
                outbox.pop();
            }
        }
        if done(session) {
            return Ok(true);
        }
        if now >= ends {
            return Ok(false);
        }
        let next = session.poll_timeout().map_or(ends, |at| at.min(ends));
        let wrong = |error| PortError { interface: interfaces.join(","), error };
        kernel::wait_readable(&fds, next.saturating_duration_since(Instant::now())).map_err(wrong)?;
        for (id, port) in &mut ports {
            let mut chunk = Chunk::new(Memory::from_heap(kernel::BATCH * port.stride()));
            if port.receive(&mut chunk, &mut arrivals).is_err() {
                continue;
            }
            for arrival in arrivals.drain(..) {
                let from = Station { port: *id, mac: arrival.mac };
                session.on_frame(&Frame::new(from, &chunk, arrival.len), Instant::now());
                chunk.take(port.stride());
            }
        }
    }
}

const LINK_TIMEOUT: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
