//! Runs a session over raw frames on an ordinary thread, for discovery.

use super::{FramePort, PacketPort, PortError, ReceivedFrame, Side, kernel};
use blockmux_proto::driver::frames::{Frame, FramePortInfo, PortId, Station};
use blockmux_proto::driver::session::FrameSession;
use blockmux_volume::{Chunk, Memory};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// Waits until one of the ports is up and returns the state of all: the link of an interface that
/// was just enabled takes a moment.
fn wait_up(ports: &mut [(PortId, PacketPort)]) -> Result<Vec<FramePortInfo>, PortError> {
    let ends = Instant::now() + LINK_TIMEOUT;
    loop {
        let known = ports
            .iter_mut()
            .map(|(_, port)| port.query_info().map_err(|error| port_error(port.name(), error)));
        let known: Vec<FramePortInfo> = known.collect::<Result<_, _>>()?;
        if known.iter().any(|port| port.is_up) {
            return Ok(known);
        }
        let name = ports.first().map_or("", |(_, port)| port.name());
        if Instant::now() >= ends {
            return Err(port_error(name, io::Error::from_raw_os_error(libc::ENETDOWN)));
        }
        // Nothing arrives at a port that is down; this only waits.
        kernel::wait_readable(&[], POLL_INTERVAL).map_err(|error| port_error(name, error))?;
    }
}

fn port_error(interface: &str, error: io::Error) -> PortError {
    PortError { interface: interface.to_owned(), error }
}

/// Runs `session` at these interfaces until `done`, which is polled, returns true. Returns `false`
/// if the time ran out.
///
/// # Errors
/// If an interface cannot be opened, or none is up.
pub fn run_session<S: FrameSession>(
    interfaces: &[String],
    side: Side,
    session: &mut S,
    timeout: Duration,
    mut done: impl FnMut(&S) -> bool,
) -> Result<bool, PortError> {
    let mut ports = Vec::new();
    for (id, name) in (0..).map(PortId).zip(interfaces) {
        ports.push((id, PacketPort::open(name, side).map_err(|error| port_error(name, error))?));
    }
    for (id, known) in (0..).map(PortId).zip(wait_up(&mut ports)?) {
        session.on_port(id, known, Instant::now());
    }
    let fds: Vec<RawFd> = ports.iter().map(|(_, port)| port.as_fd().as_raw_fd()).collect();
    let ends = Instant::now() + timeout;
    let mut arrivals: Vec<ReceivedFrame> = Vec::new();
    loop {
        let now = Instant::now();
        if session.poll_timeout().is_some_and(|at| at <= now) {
            // Neither input nor a timeout ends a session over frames.
            let _ = session.on_timeout(now);
        }
        while let Some(frame) = session.frames(now).front() {
            let id = frame.to.port;
            let outbox = session.frames(now);
            let sent = ports.get_mut(usize::from(id.0)).map(|(_, port)| port.send(id, outbox));
            if !matches!(sent, Some(Ok(_))) {
                // The frame is lost; the session retransmits it.
                outbox.pop_front();
            }
        }
        if done(session) {
            return Ok(true);
        }
        if now >= ends {
            return Ok(false);
        }
        let next = session.poll_timeout().map_or(ends, |at| at.min(ends)).min(now + POLL_INTERVAL);
        let waited = kernel::wait_readable(&fds, next.saturating_duration_since(Instant::now()));
        waited.map_err(|error| port_error(&interfaces.join(","), error))?;
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
const POLL_INTERVAL: Duration = Duration::from_millis(20);
