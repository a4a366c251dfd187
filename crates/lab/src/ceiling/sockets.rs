//! Connected pairs of non-blocking sockets, and pinning of threads.

use super::{CeilingError, CeilingJob, Transport, system};
use blockmux_engine::net::socket::PACED_BUFFER;
use blockmux_engine::sys::congestion::Congestion;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// The server's and the client's ends.
pub(super) fn connect(job: &CeilingJob) -> Result<(Vec<OwnedFd>, Vec<OwnedFd>), CeilingError> {
    let pairs = match job.transport {
        Transport::Tcp => tcp_pairs(job.connections, job.congestion.as_ref()),
        Transport::Unix => (0..job.connections).map(|_| unix_pair()).collect(),
    };
    let pairs: Vec<(OwnedFd, OwnedFd)> = pairs.map_err(|source| system("connect", source))?;
    Ok(pairs.into_iter().unzip())
}

/// Pins the calling thread to a CPU.
pub(super) fn pin(cpu: Option<usize>) -> Result<(), CeilingError> {
    let Some(cpu) = cpu else { return Ok(()) };
    if cpu >= CpuSet::MAX_CPU {
        return Err(CeilingError::Pin { cpu, source: io::ErrorKind::InvalidInput.into() });
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|error| CeilingError::Pin { cpu, source: error.into() })
}

fn tcp_pairs(count: u32, congestion: Option<&Congestion>) -> io::Result<Vec<(OwnedFd, OwnedFd)>> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    congestion.map_or(Ok(()), |congestion| congestion.set_for(&listener))?;
    let address = listener.local_addr()?;
    (0..count)
        .map(|_| {
            let client = tcp_client(address, congestion)?;
            let (server, peer) = listener.accept()?;
            if peer != client.local_addr()? {
                // Another program has connected to the port.
                return Err(io::ErrorKind::AddrInUse.into());
            }
            for stream in [&server, &client] {
                stream.set_nodelay(true)?;
                stream.set_nonblocking(true)?;
                if Congestion::of(stream).is_some_and(|congestion| congestion.paces()) {
                    // As in the engine. The kernel doubles the value.
                    sockopt::set_socket_send_buffer_size(stream, PACED_BUFFER / 2)?;
                }
            }
            Ok((server.into(), client.into()))
        })
        .collect()
}

fn tcp_client(address: SocketAddr, congestion: Option<&Congestion>) -> io::Result<TcpStream> {
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    congestion.map_or(Ok(()), |congestion| congestion.set_for(&socket))?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket.into())
}

fn unix_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (server, client) = UnixStream::pair()?;
    for stream in [&server, &client] {
        stream.set_nonblocking(true)?;
        sockopt::set_socket_send_buffer_size(stream, UNIX_BUFFER)?;
    }
    Ok((server.into(), client.into()))
}

/// Unix socket buffers have a fixed size, by default enough for 30 replies of 4 KiB.
const UNIX_BUFFER: usize = 1 << 20;
