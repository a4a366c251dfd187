//! A request for a connection on its way from the acceptor to the core that gets it.

use super::core_port::CorePort;
use super::path::RocePath;
use super::socket::ArrivedPacket;
use super::stream::RoceStream;
use blockmux_rdma::roce::port::{RoceRequest, Routed};
use std::cell::RefCell;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Instant;

/// A packet that requests a connection.
pub(super) struct ArrivedRequest {
    packet: Vec<u8>,
    from: SocketAddr,
    to: IpAddr,
}

impl ArrivedRequest {
    pub(super) fn new(packet: &ArrivedPacket<'_>) -> ArrivedRequest {
        ArrivedRequest { packet: packet.datagram.to_vec(), from: packet.from, to: packet.to }
    }

    /// The core of `count` that a request is for. A repeated request is for the same one, and so is
    /// another of the same queue pair: the port there knows the connection.
    pub(super) fn core_of(request: &RoceRequest, count: usize) -> usize {
        let mut hasher = DefaultHasher::new();
        (request.peer, request.queue_pair).hash(&mut hasher);
        usize::try_from(hasher.finish() % count.max(1) as u64).unwrap_or_default()
    }

    /// Opens its connection, with the request as its first packet. `None` if that exists already,
    /// which gets the request again, or there may be no other.
    pub(super) fn open_at(&self, port: &Rc<RefCell<CorePort>>, now: Instant) -> Option<RoceStream> {
        let packet = ArrivedPacket { datagram: &self.packet, from: self.from, to: self.to, is_marked: false };
        let routed = port.borrow_mut().route(&packet, now)?;
        match routed {
            Routed::Request(request) => {
                let path = RocePath::back(self.to, self.from);
                let opened = port.borrow_mut().admit(path, &request, self.from, now)?;
                let flow = RoceStream::new(port, opened);
                flow.deliver(&self.packet);
                Some(flow)
            }
            Routed::Connection(queue_pair) => {
                port.borrow_mut().deliver(queue_pair, &self.packet, false);
                None
            }
            Routed::Answer(_) | Routed::Dropped(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::net::Ipv4Addr;

    #[test]
    fn requests_of_one_queue_pair_are_for_one_core_and_those_of_many_for_all() {
        let core_of = |comm_id, queue_pair| {
            let peer = Ipv4Addr::new(192, 0, 2, 1).into();
            ArrivedRequest::core_of(&RoceRequest { peer, service: None, comm_id, queue_pair }, 8)
        };
        let of_one: HashSet<usize> = (0..100).map(|comm_id| core_of(comm_id, 17)).collect();
        assert_eq!(of_one.len(), 1);
        let of_many: HashSet<usize> = (0..100).map(|queue_pair| core_of(1, queue_pair)).collect();
        assert_eq!(of_many.len(), 8);
    }
}
