//! One connection on an ordinary thread, for a login.

use super::group::RoceShare;
use super::path::RocePath;
use super::socket::ReceiveBuffers;
use crate::fabric::byte_queue::ByteQueue;
use crate::net::login_stream::LoginStream;
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::transport::{FlowInfo, TransportInfo};
use blockmux_rdma::roce::port::{RocePort, RocePortLimits, Routed};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// A connection that has a share of its UDP port to itself.
pub(super) struct LoginFlow {
    share: RoceShare,
    port: RocePort,
    path: RocePath,
    info: FlowInfo,
    buffers: ReceiveBuffers,
    arrived: ByteQueue,
    timeout: Cell<Duration>,
}

impl LoginFlow {
    pub(super) fn open(share: RoceShare, path: RocePath, service: SocketAddr) -> io::Result<LoginFlow> {
        let mut port = share.port(ONE)?;
        let opened = port.connect(path.peer.ip(), Instant::now());
        let opened = opened.ok_or_else(|| io::Error::other("the UDP port has no room for a connection"))?;
        Ok(LoginFlow {
            info: path.describe(&opened, service.port()),
            share,
            port,
            path,
            buffers: ReceiveBuffers::new(),
            arrived: ByteQueue::default(),
            timeout: Cell::new(Duration::ZERO),
        })
    }

    fn receive(&mut self) -> io::Result<()> {
        let LoginFlow { share, port, buffers, arrived, .. } = self;
        let now = Instant::now();
        let received = share.socket().receive(buffers, |packet| {
            let Some(flow) = packet.flow() else { return };
            match port.route(&flow, packet.datagram, now) {
                Routed::Connection(_) => arrived.push_packet(packet.datagram, packet.is_marked),
                Routed::Answer(answer) => share.answer(packet.to, packet.from, &answer),
                Routed::Request(_) | Routed::Dropped(_) => {}
            }
        });
        received.map(drop)
    }
}

impl io::Read for LoginFlow {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let until = Instant::now() + self.timeout.get();
        while self.arrived.len() == 0 {
            match self.receive() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                received => received?,
            }
            let left = until.saturating_duration_since(Instant::now());
            if self.arrived.len() > 0 {
                break;
            }
            if left.is_zero() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            poll(&mut [PollFd::new(self.share.socket(), PollFlags::IN)], Some(&left))?;
        }
        Ok(self.arrived.take(bytes.len(), |from| bytes[..from.len()].copy_from_slice(from)))
    }
}

impl io::Write for LoginFlow {
    /// Takes whole records.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut outbox = Outbox::default();
        outbox.push_head(bytes);
        match self.share.socket().send(&self.path, &mut outbox) {
            // The packets are lost, and sent again.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(bytes.len()),
            sent => sent,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl LoginStream for LoginFlow {
    fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.timeout.set(timeout);
        Ok(())
    }

    fn tells_end(&self) -> bool {
        false
    }

    fn silence(&self) -> (&'static str, &'static str) {
        ("does not answer", "it may not listen for RoCEv2, or a firewall may block UDP port 4791")
    }

    fn transport(&self) -> TransportInfo {
        TransportInfo { segment_len: None, flow: Some(self.info) }
    }
}

const ONE: RocePortLimits = RocePortLimits { connections: 1, ..RocePortLimits::NONE };
