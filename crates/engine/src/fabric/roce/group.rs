//! The sockets of one UDP port, and which of them a packet arrives at.
//!
//! Sockets that share a port (`SO_REUSEPORT`) form a group, of which a filter chooses one for each
//! packet. Ours computes the socket from the number of the destination's queue pair, or, for a
//! message of connection management, from the communication identifier of the receiver, which
//! requests do not have: those are for the acceptor. All sockets are opened at once and closed at
//! once, because the kernel renumbers a group when one of it is closed.
//!
//! A share of the port is one socket with its numbers. Each has one owner at a time: a core for all
//! its connections, or a thread for a login.

use super::path::RocePath;
use super::socket::RoceSocket;
use crate::sys;
use blockmux_rdma::roce::bytes::{BTH_LEN, QP_GSI, UDP_PORT};
use blockmux_rdma::roce::port::{NumberShare, RocePort, RocePortLimits};
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// All sockets of this process at the UDP port of one address.
pub(super) struct RoceGroup {
    /// The address that the sockets are bound to.
    pub(super) address: SocketAddr,
    sockets: Vec<RoceSocket>,
    /// Which of them have an owner.
    owned: Mutex<Vec<bool>>,
}

/// One socket of a group, and its part of the numbers.
pub(super) struct RoceShare {
    group: Arc<RoceGroup>,
    index: usize,
}

/// The groups of this process.
static GROUPS: Mutex<Vec<Weak<RoceGroup>>> = Mutex::new(Vec::new());

impl RoceGroup {
    /// The group at this IP address; the port is always that of RoCEv2.
    ///
    /// # Errors
    /// If another program uses the port, or the address is not local.
    pub(super) fn at(address: SocketAddr) -> io::Result<Arc<RoceGroup>> {
        let mut address = address;
        address.set_port(UDP_PORT);
        let mut groups = lock(&GROUPS);
        groups.retain(|group| group.strong_count() > 0);
        let open: Vec<Arc<RoceGroup>> = groups.iter().filter_map(Weak::upgrade).collect();
        // A group at all addresses receives what is for one of them.
        let serves = |group: &&Arc<RoceGroup>| {
            group.address == address
                || group.address.ip().is_unspecified() && group.address.is_ipv4() == address.is_ipv4()
        };
        if let Some(group) = open.iter().find(serves) {
            return Ok(group.clone());
        }
        let is_within = |group: &&Arc<RoceGroup>| group.address.is_ipv4() == address.is_ipv4();
        if address.ip().is_unspecified() && open.iter().any(|group| is_within(&group)) {
            let what = "this process has connections of RoCEv2 at one of its addresses already; listen on one address";
            return Err(io::Error::other(what));
        }
        check_unused(address)?;
        let count = std::thread::available_parallelism().map_or(1, usize::from) + EXTRA_SHARES;
        let sockets = (0..=count).map(|_| RoceSocket::open(address)).collect::<io::Result<Vec<_>>>()?;
        let owned = Mutex::new(vec![false; sockets.len()]);
        let group = Arc::new(RoceGroup { address, sockets, owned });
        group.steer()?;
        groups.push(Arc::downgrade(&group));
        Ok(group)
    }

    /// The group from which an initiator connects to `peer`, to which packets would leave from
    /// `local`.
    ///
    /// The target or another initiator on this machine may have the UDP port of that address.
    /// Packets that stay on this machine may come from any address of loopback, all of 127.0.0.0/8,
    /// so the initiator then takes one that is free.
    ///
    /// # Errors
    /// As for [`RoceGroup::at`].
    pub(super) fn of_initiator(local: SocketAddr, peer: SocketAddr) -> io::Result<Arc<RoceGroup>> {
        let in_use = match RoceGroup::at(local) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => error,
            other => return other,
        };
        if !local.is_ipv4() || !is_of_this_machine(peer) {
            return Err(in_use);
        }
        let is_spare = |group: &Arc<RoceGroup>| group.address.is_ipv4() && group.address.ip().is_loopback();
        let own = lock(&GROUPS).iter().filter_map(Weak::upgrade).find(is_spare);
        if let Some(own) = own {
            return Ok(own);
        }
        for _ in 0..LOOPBACK_ATTEMPTS {
            match RoceGroup::at((any_loopback()?, UDP_PORT).into()) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                other => return other,
            }
        }
        Err(in_use)
    }

    /// The socket at which requests arrive; `None` if it has an owner.
    pub(super) fn acceptor(self: &Arc<RoceGroup>) -> Option<RoceShare> {
        self.take(0..1)
    }

    /// A share for connections.
    ///
    /// # Errors
    /// If none is free.
    pub(super) fn share(self: &Arc<RoceGroup>) -> io::Result<RoceShare> {
        let none = || io::Error::other(format!("all {} sockets of RoCEv2 are in use", self.shares()));
        self.take(1..self.sockets.len()).ok_or_else(none)
    }

    fn take(self: &Arc<RoceGroup>, mut among: std::ops::Range<usize>) -> Option<RoceShare> {
        let mut owned = lock(&self.owned);
        let index = among.find(|index| !owned[*index])?;
        owned[index] = true;
        self.sockets[index].set_owned(true);
        Some(RoceShare { group: self.clone(), index })
    }

    /// Number of shares for connections.
    fn shares(&self) -> usize {
        self.sockets.len() - 1
    }

    /// Attaches the filter, which all sockets of the group have then.
    fn steer(&self) -> io::Result<()> {
        let shares = self.shares() as u32;
        let program = [
            (LOAD_WORD, 0, 0, QUEUE_PAIR_AT),
            (AND, 0, 0, 0x00ff_ffff),
            (JUMP_EQUAL, 0, 2, QP_GSI),
            (LOAD_WORD, 0, 0, COMM_ID_AT),
            (JUMP_EQUAL, 3, 0, 0),
            (MODULO, 0, 0, shares),
            (ADD, 0, 0, 1),
            (RETURN_A, 0, 0, 0),
            (RETURN, 0, 0, 0),
        ];
        sys::attach_filter(self.sockets[0].as_fd().as_raw_fd(), libc::SO_ATTACH_REUSEPORT_CBPF, &program)
    }
}

impl RoceShare {
    pub(super) fn socket(&self) -> &RoceSocket {
        &self.group.sockets[self.index]
    }

    /// Whether something listens at the UDP port.
    pub(super) fn is_listened_at(&self) -> bool {
        lock(&self.group.owned).first().copied().unwrap_or_default()
    }

    /// A port without connections, which draws the numbers of this share.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub(super) fn port(&self, limits: RocePortLimits) -> io::Result<RocePort> {
        let share = NumberShare {
            remainder: self.index.saturating_sub(1) as u32,
            modulus: self.group.shares() as u32,
        };
        Ok(RocePort::new(limits, sys::random_bytes()?).drawing(share))
    }

    /// Sends back a packet to where one came from.
    pub(super) fn answer(&self, to: IpAddr, from: SocketAddr, packet: &[u8]) {
        self.socket().send_packet(&RocePath::back(to, from), packet);
    }
}

impl Drop for RoceShare {
    fn drop(&mut self) {
        let mut owned = lock(&self.group.owned);
        self.socket().set_owned(false);
        owned[self.index] = false;
    }
}

/// Whether packets to this address stay on this machine.
pub(super) fn is_of_this_machine(address: SocketAddr) -> bool {
    let mut at_any_port = address;
    at_any_port.set_port(0);
    UdpSocket::bind(at_any_port).is_ok()
}

/// Who has the UDP port of RoCEv2 on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RocePortUse {
    /// Nobody.
    Free,
    /// A program has it at some addresses, and others are free.
    AtSomeAddresses,
    /// A program, or the kernel's software RoCEv2, has it at all addresses.
    AtAllAddresses,
}

impl RocePortUse {
    /// Finds out by binding for a moment.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn of_this_machine() -> io::Result<RocePortUse> {
        RocePortUse::of(UDP_PORT)
    }

    fn of(port: u16) -> io::Result<RocePortUse> {
        let is_in_use = |ip: IpAddr| {
            let bound = check_unused((ip, port).into());
            bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
        };
        if ![Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()].into_iter().any(is_in_use) {
            return Ok(RocePortUse::Free);
        }
        let is_everywhere = is_in_use(any_loopback()?.into());
        Ok(if is_everywhere { RocePortUse::AtAllAddresses } else { RocePortUse::AtSomeAddresses })
    }
}

/// An address of loopback that probably nobody uses.
fn any_loopback() -> io::Result<Ipv4Addr> {
    let [a, b, c] = sys::random_bytes()?;
    Ok(Ipv4Addr::new(127, a | 0x40, b, c))
}

/// Checks that no other program has the port. One of the same user could open sockets beside ours,
/// and the kernel would give packets to either.
fn check_unused(address: SocketAddr) -> io::Result<()> {
    let kind = Type::DGRAM.cloexec();
    let socket = Socket::new(Domain::for_address(address), kind, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shares beside one for each CPU: for logins, and for more cores than that.
const EXTRA_SHARES: usize = 14;
/// How many addresses of loopback are tried.
const LOOPBACK_ATTEMPTS: usize = 8;
/// Offset of the word with the destination's queue pair, whose first byte is something else.
const QUEUE_PAIR_AT: u32 = 4;
/// Offset of the receiver's communication identifier: behind the base and the datagram header, the
/// head of the message and the sender's identifier. It is reserved, 0, in a request.
const COMM_ID_AT: u32 = BTH_LEN as u32 + 8 + 24 + 4;
const LOAD_WORD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
const ADD: u16 = (libc::BPF_ALU | libc::BPF_ADD | libc::BPF_K) as u16;
const MODULO: u16 = (libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K) as u16;
const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
const RETURN_A: u16 = (libc::BPF_RET | libc::BPF_A) as u16;

#[cfg(test)]
mod tests {
    use super::super::socket::{MAX_DATAGRAM, ReceiveBuffers, state_of};
    use super::*;
    use blockmux_proto::driver::outbox::Outbox;
    use blockmux_rdma::roce::record::RecordHead;
    use quinn_udp::{EcnCodepoint, RecvMeta, Transmit, UdpSockRef};
    use socket2::SockRef;
    use std::io::IoSliceMut;

    /// An address of loopback that no other test, and no other program, uses.
    fn address(last: u8) -> SocketAddr {
        let [.., high, low] = std::process::id().to_be_bytes();
        (Ipv4Addr::new(127, 190 + last, high, low), UDP_PORT).into()
    }

    const LIMITS: RocePortLimits = RocePortLimits { connections: 8, ..RocePortLimits::NONE };

    /// Sets the byte of the IPv4 header that ends with the ECN bits, of what the socket sends.
    fn set_type_of_service(socket: &UdpSocket, value: u32) {
        SockRef::from(socket).set_tos_v4(value).unwrap();
    }

    /// The packets that a share has received, from their base transport headers on.
    fn received(share: &RoceShare) -> Vec<Vec<u8>> {
        let (mut buffers, mut packets) = (ReceiveBuffers::new(), Vec::new());
        while share.socket().receive(&mut buffers, |packet| packets.push(packet.datagram.to_vec())).is_ok() {}
        packets
    }

    fn packet_to(queue_pair: u32, comm_id: u32) -> Vec<u8> {
        let mut packet = vec![0; 280];
        packet[4..8].copy_from_slice(&queue_pair.to_be_bytes());
        packet[COMM_ID_AT as usize..][..4].copy_from_slice(&comm_id.to_be_bytes());
        packet
    }

    #[test]
    fn a_packet_arrives_at_the_socket_whose_share_has_its_number() {
        let group = RoceGroup::at(address(0)).unwrap();
        let (acceptor, sender) = (group.acceptor().unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        let shares: Vec<RoceShare> = (0..group.shares()).map(|_| group.share().unwrap()).collect();
        for share in &shares {
            let mut port = share.port(LIMITS).unwrap();
            for _ in 0..8 {
                let peer = Ipv4Addr::LOCALHOST.into();
                let numbers = port.connect(peer, std::time::Instant::now()).unwrap().numbers;
                let packets = [packet_to(numbers.queue_pair, 77), packet_to(QP_GSI, numbers.comm_id)];
                for packet in &packets {
                    sender.send_to(packet, group.address).unwrap();
                }
                assert_eq!(received(share), packets);
            }
        }
        let strange = [packet_to(QP_GSI, 0), vec![9; 3], Vec::new()];
        for packet in &strange {
            sender.send_to(packet, group.address).unwrap();
        }
        // An empty datagram has no packet.
        assert_eq!(received(&acceptor), strange[..2]);
        assert!(shares.iter().all(|share| received(share).is_empty()));
    }

    /// The network marks packets in the IP header, which UDP sockets show only on request.
    #[test]
    fn marks_of_congestion_are_seen_on_single_and_on_joined_packets() {
        let group = RoceGroup::at(address(6)).unwrap();
        let (share, sender) = (group.share().unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        let packet = packet_to(group.shares() as u32, 0);
        let (mut buffers, mut datagram) = (ReceiveBuffers::new(), vec![0; MAX_DATAGRAM]);
        // The bits are those of a transport that cannot be marked, ECT(1), ECT(0) and CE.
        for (codepoint, is_marked) in [(0, false), (1, false), (2, false), (3, true)] {
            // The bits before them are the DSCP, of any value.
            set_type_of_service(&sender, 0x68 | codepoint);
            let mut seen = Vec::new();
            sender.send_to(&packet, group.address).unwrap();
            share.socket().receive(&mut buffers, |packet| seen.push(packet.is_marked)).unwrap();
            sender.send_to(&packet, group.address).unwrap();
            let one = share.socket().receive_into(&mut datagram).unwrap().unwrap();
            seen.extend(one.packets().map(|packet| packet.is_marked));
            assert_eq!(seen, [is_marked; 2], "{codepoint}");
        }
        let sender = Socket::from(sender);
        let state = state_of(&sender).unwrap();
        for (ecn, is_marked) in [(EcnCodepoint::Ect0, false), (EcnCodepoint::Ce, true)] {
            let contents = packet.repeat(4);
            let (destination, segment_size) = (group.address, Some(packet.len()));
            let transmit =
                Transmit { destination, ecn: Some(ecn), contents: &contents, segment_size, src_ip: None };
            for _ in 0..2 {
                state.try_send(UdpSockRef::from(&sender), &transmit).unwrap();
            }
            let mut seen = Vec::new();
            let joined = share.socket().receive_into(&mut datagram).unwrap().unwrap();
            assert_eq!(joined.bytes.len(), contents.len(), "the packets of one call arrive by one");
            seen.extend(joined.packets().map(|packet| packet.is_marked));
            share.socket().receive(&mut buffers, |packet| seen.push(packet.is_marked)).unwrap();
            assert_eq!(seen, [is_marked; 8]);
        }
    }

    #[test]
    fn packets_are_sent_as_ones_that_may_be_marked() {
        let group = RoceGroup::at(address(7)).unwrap();
        let share = group.share().unwrap();
        // The port is not that of RoCEv2, which the group has.
        let receiver = Socket::from(UdpSocket::bind("127.0.0.1:0").unwrap());
        let state = state_of(&receiver).unwrap();
        let peer = receiver.local_addr().unwrap().as_socket().unwrap();
        let path = RocePath { local: group.address.ip(), peer };
        share.socket().send_packet(&path, &[0; 60]);
        let (mut outbox, head) =
            (Outbox::default(), RecordHead { len: 128, packet_len: 64, is_marked: false });
        outbox.push_head(&head.to_bytes());
        outbox.push_head(&[0; 128]);
        share.socket().send(&path, &mut outbox).unwrap();
        // Packets of one call may be received by one.
        let mut len = 0;
        while len < 3 * 64 {
            let (mut meta, mut buffer) = ([RecvMeta::default()], [0; 512]);
            let mut slices = [IoSliceMut::new(&mut buffer)];
            state.recv(UdpSockRef::from(&receiver), &mut slices, &mut meta).unwrap();
            assert_eq!(meta[0].ecn, Some(EcnCodepoint::Ect0));
            len += meta[0].len;
        }
        assert_eq!(len, 3 * 64);
    }

    #[test]
    fn a_share_has_one_owner_at_a_time() {
        let group = RoceGroup::at(address(1)).unwrap();
        let shares: Vec<RoceShare> = (0..group.shares()).map(|_| group.share().unwrap()).collect();
        let acceptor = group.acceptor().unwrap();
        assert!(group.share().is_err() && group.acceptor().is_none());
        drop((shares, acceptor));
        assert!(group.share().is_ok() && group.acceptor().is_some());
    }

    #[test]
    fn packets_that_nobody_receives_are_not_kept() {
        let group = RoceGroup::at(address(4)).unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        // The first share has the numbers without a remainder.
        let packet = packet_to(group.shares() as u32, 0);
        let flood = |count: usize| {
            for _ in 0..count {
                sender.send_to(&packet, group.address).unwrap();
            }
        };
        for _ in 0..2 {
            flood(1000);
            let share = group.share().unwrap();
            let kept = received(&share).len();
            assert!(kept < 10, "{kept} packets are kept without an owner");
            flood(100);
            assert_eq!(received(&share).len(), 100);
        }
    }

    #[test]
    fn a_port_that_another_program_has_is_not_shared() {
        let _other = UdpSocket::bind(address(2)).unwrap();
        let error = RoceGroup::at(address(2)).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        let own = RoceGroup::of_initiator(address(2), address(2)).unwrap();
        assert!(own.address.ip().is_loopback() && own.address != address(2));
    }

    #[test]
    fn who_has_the_port_shows_without_listening_there() {
        let all = UdpSocket::bind("0.0.0.0:0").unwrap();
        let port = all.local_addr().unwrap().port();
        assert_eq!(RocePortUse::of(port).unwrap(), RocePortUse::AtAllAddresses);
        drop(all);
        let _one = UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        assert_eq!(RocePortUse::of(port).unwrap(), RocePortUse::AtSomeAddresses);
        assert_eq!(RocePortUse::of(0).unwrap(), RocePortUse::Free);
        // A machine may have no IPv6.
        if let Ok(ipv6) = UdpSocket::bind("[::1]:0") {
            let port = ipv6.local_addr().unwrap().port();
            assert_eq!(RocePortUse::of(port).unwrap(), RocePortUse::AtSomeAddresses);
        }
        let _other = UdpSocket::bind(address(5)).unwrap();
        assert_ne!(RocePortUse::of_this_machine().unwrap(), RocePortUse::Free);
    }

    /// Packets of one length go out in one call, each with the identification that its place in the
    /// call gives it.
    #[test]
    fn joined_packets_arrive_one_by_one_and_intact() {
        let group = RoceGroup::at(address(3)).unwrap();
        let share = group.share().unwrap();
        let mut port = share.port(LIMITS).unwrap();
        let ip = group.address.ip();
        let numbers = port.connect(ip, std::time::Instant::now()).unwrap().numbers;
        let (mut outbox, mut sent) = (Outbox::default(), Vec::new());
        for lens in [&[1040, 1040, 1040, 200][..], &[1040], &[4112, 4112, 64], &[64; 3]] {
            let (len, packet_len) = (lens.iter().sum::<usize>() as u32, lens[0] as u16);
            outbox.push_head(&RecordHead { len, packet_len, is_marked: false }.to_bytes());
            for len in lens {
                let mut packet = vec![sent.len() as u8; *len];
                packet[4..8].copy_from_slice(&numbers.queue_pair.to_be_bytes());
                outbox.push_head(&packet);
                sent.push(packet);
            }
        }
        let path = RocePath::back(ip, group.address);
        share.socket().send(&path, &mut outbox).unwrap();
        assert!(outbox.is_empty());
        let flow = path.outgoing().unwrap();
        let packets = received(&share);
        for (packet, sent) in packets.iter().zip(&sent) {
            let (arrived, _) = packet.split_last_chunk::<4>().unwrap();
            assert_eq!(arrived, &sent[..sent.len() - 4]);
            assert!(flow.recover(packet).is_some_and(|found| found.dont_fragment));
        }
        assert_eq!(packets.len(), sent.len());
    }
}
