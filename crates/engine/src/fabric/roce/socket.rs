//! One socket of a UDP port: batches of datagrams in both directions.
//!
//! Sent packets are joined into one call where they have one length (`UDP_SEGMENT`), and received
//! ones come joined (`UDP_GRO`). Over IPv4, a packet is sent with DF, so its identification is 0,
//! or its number in the call: the ICRC covers both (decision 101).

use super::path::{self, RocePath};
use crate::sys;
use blockmux_proto::driver::outbox::Outbox;
use blockmux_rdma::roce::bytes::{Fragmentation, ICRC_LEN, RoceFlow};
use blockmux_rdma::roce::record::{HEAD_LEN, RecordHead};
use quinn_udp::{EcnCodepoint, RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use socket2::{Domain, Protocol, Socket, Type};
use std::array;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// A UDP socket that is bound to the port of RoCEv2.
pub(super) struct RoceSocket {
    socket: Socket,
    state: UdpSocketState,
}

/// A datagram that has arrived: a packet from its base transport header to its ICRC.
pub(super) struct ArrivedPacket<'a> {
    pub(super) datagram: &'a [u8],
    /// Address and UDP port of the sender.
    pub(super) from: SocketAddr,
    /// The address of this machine that it was sent to.
    pub(super) to: IpAddr,
    /// Whether the network has marked it as one that met congestion.
    pub(super) is_marked: bool,
}

/// Datagrams of one length that have arrived joined; the last may be shorter.
pub(super) struct ArrivedDatagrams<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) packet_len: usize,
    from: SocketAddr,
    to: IpAddr,
    /// The kernel joins only datagrams with the same codepoint.
    pub(super) is_marked: bool,
}

impl<'a> ArrivedDatagrams<'a> {
    /// Those of a receive call; `None` if the kernel does not tell where they were sent to.
    fn new(buffer: &'a [u8], meta: &RecvMeta) -> Option<ArrivedDatagrams<'a>> {
        Some(ArrivedDatagrams {
            bytes: buffer.get(..meta.len)?,
            packet_len: meta.stride.max(1),
            from: meta.addr,
            to: meta.dst_ip?,
            is_marked: meta.ecn == Some(EcnCodepoint::Ce),
        })
    }

    pub(super) fn packets(&self) -> impl Iterator<Item = ArrivedPacket<'a>> + use<'a> {
        let (from, to, is_marked) = (self.from, self.to, self.is_marked);
        let packets = self.bytes.chunks(self.packet_len);
        packets.map(move |datagram| ArrivedPacket { datagram, from, to, is_marked })
    }
}

impl ArrivedPacket<'_> {
    /// The packets of its sender to this side; `None` if the addresses are of two families.
    pub(super) fn flow(&self) -> Option<RoceFlow> {
        path::flow(self.from.ip(), self.to, self.from.port())
    }
}

impl RoceSocket {
    /// Opens a socket at `address`, beside others of the same port.
    ///
    /// # Errors
    /// If the port is in use by others, or the address is not local.
    pub(super) fn open(address: SocketAddr) -> io::Result<RoceSocket> {
        let kind = Type::DGRAM.nonblocking().cloexec();
        let socket = Socket::new(Domain::for_address(address), kind, Some(Protocol::UDP))?;
        if address.is_ipv6() {
            socket.set_only_v6(true)?;
            // Peers send no UDP checksum: the ICRC is one. A receiver of IPv6 has to allow that.
            let on = 1_i32.to_ne_bytes();
            sys::set_option(socket.as_raw_fd(), libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, &on)?;
        }
        socket.set_reuse_port(true)?;
        // Until it has an owner; and as much as the system allows.
        let _ = socket.set_recv_buffer_size(0);
        let _ = socket.set_send_buffer_size(BUFFER);
        socket.bind(&address.into())?;
        let state = state_of(&socket)?;
        Ok(RoceSocket { socket, state })
    }

    /// Sets whether somebody receives. Nobody drains the buffer of a socket without an owner, so it
    /// is as small as the system allows: a stranger would fill it, and it counts against all UDP
    /// sockets of the machine. Else it is as large; a burst beyond it is lost, and sent again.
    pub(super) fn set_owned(&self, is_owned: bool) {
        let _ = self.socket.set_recv_buffer_size(if is_owned { BUFFER } else { 0 });
    }

    /// Passes the datagrams of one call to `each`. Returns whether there may be more.
    ///
    /// # Errors
    /// `WouldBlock` if there are none.
    pub(super) fn receive(
        &self,
        buffers: &mut ReceiveBuffers,
        mut each: impl FnMut(ArrivedPacket<'_>),
    ) -> io::Result<bool> {
        let mut slices = buffers.0.chunks_exact_mut(BUFFER_LEN);
        let mut slices: [_; BATCH] = array::from_fn(|_| IoSliceMut::new(slices.next().unwrap_or_default()));
        let mut metas = [RecvMeta::default(); BATCH];
        let count = self.state.recv(UdpSockRef::from(&self.socket), &mut slices, &mut metas)?;
        for (slice, meta) in slices.iter().zip(&metas).take(count) {
            if let Some(datagrams) = ArrivedDatagrams::new(slice, meta) {
                datagrams.packets().for_each(&mut each);
            }
        }
        Ok(count == BATCH)
    }

    /// Receives once into `buffer`, which has [`MAX_DATAGRAM`] bytes or more. `None` if there are
    /// no datagrams that could be told apart.
    ///
    /// # Errors
    /// `WouldBlock` if there are none.
    pub(super) fn receive_into<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Option<ArrivedDatagrams<'a>>> {
        let mut meta = [RecvMeta::default()];
        self.state.recv(UdpSockRef::from(&self.socket), &mut [IoSliceMut::new(buffer)], &mut meta)?;
        Ok(ArrivedDatagrams::new(buffer, &meta[0]))
    }

    /// Sends the packets of the records in `outbox`, and removes them. A packet that the system
    /// refuses is lost, as on the way: the queue pair sends it again, or gives up.
    ///
    /// # Errors
    /// `WouldBlock` if the socket takes none now.
    pub(super) fn send(&self, path: &RocePath, outbox: &mut Outbox) -> io::Result<usize> {
        let len = outbox.len();
        let sent = match (path.outgoing(), outbox.head_mut()) {
            (Some(flow), Some(records)) => self.send_records(path, &flow, records),
            _ => len,
        };
        outbox.consume(sent);
        if sent == 0 && len > 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(sent) }
    }

    /// Sends as many of the records as the socket takes; returns their length. If it has taken a
    /// part of one, what is left has a head again.
    fn send_records(&self, path: &RocePath, flow: &RoceFlow, records: &mut [u8]) -> usize {
        let at_once = self.state.max_gso_segments().max(1);
        let mut sent = 0;
        while let Some(mut head) = RecordHead::parse(&records[sent..]) {
            let begin = sent + HEAD_LEN;
            let end = begin + head.len as usize;
            let packet_len = usize::from(head.packet_len).max(1);
            let Some(packets) = records.get_mut(begin..end) else { return records.len() };
            let mut done = 0;
            for batch in packets.chunks_mut(at_once * packet_len) {
                put_icrcs(flow, batch, packet_len);
                if !self.takes(path, batch, packet_len) {
                    break;
                }
                done += batch.len();
            }
            if begin + done < end {
                if done > 0 {
                    sent += done;
                    head.len -= done as u32;
                    records[sent..sent + HEAD_LEN].copy_from_slice(&head.to_bytes());
                }
                return sent;
            }
            sent = end;
        }
        sent
    }

    /// Sends packets of one length; returns whether the socket had room for them.
    fn takes(&self, path: &RocePath, packets: &[u8], packet_len: usize) -> bool {
        loop {
            match self.transmit(path, packets, Some(packet_len)) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Ok(()) | Err(_) => return true,
            }
        }
    }

    /// Sends one packet, without waiting. It may be lost, as any.
    pub(super) fn send_packet(&self, path: &RocePath, packet: &[u8]) {
        let Some(flow) = path.outgoing() else { return };
        let mut datagram = packet.to_vec();
        datagram.extend_from_slice(&flow.icrc(SOLITARY, packet));
        let _ = self.transmit(path, &datagram, None);
    }

    fn transmit(&self, path: &RocePath, contents: &[u8], segment_size: Option<usize>) -> io::Result<()> {
        let (destination, src_ip) = (path.peer, Some(path.local));
        let ecn = Some(EcnCodepoint::Ect0);
        let transmit = Transmit { destination, ecn, contents, segment_size, src_ip };
        self.state.try_send(UdpSockRef::from(&self.socket), &transmit)
    }
}

impl AsFd for RoceSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Prepares a socket for batches, with ECN codepoints and addresses of this side.
pub(super) fn state_of(socket: &Socket) -> io::Result<UdpSocketState> {
    let state = UdpSocketState::new(UdpSockRef::from(socket))?;
    // `quinn-udp` 0.6 asks for times of arrival, and its buffer of 88 bytes has no room for them
    // beside the length of joined packets and the address: the codepoint would be cut off.
    let off = 0_i32.to_ne_bytes();
    sys::set_option(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, &off)?;
    Ok(state)
}

/// Buffers of one receive call. Only those that are used take memory.
pub(super) struct ReceiveBuffers(Vec<u8>);

impl ReceiveBuffers {
    pub(super) fn new() -> ReceiveBuffers {
        ReceiveBuffers(vec![0; BATCH * BUFFER_LEN])
    }
}

/// Completes packets that are sent in one call.
fn put_icrcs(flow: &RoceFlow, packets: &mut [u8], packet_len: usize) {
    for (number, packet) in packets.chunks_mut(packet_len).enumerate() {
        if let Some((packet, icrc)) = packet.split_last_chunk_mut::<ICRC_LEN>() {
            // At most as many as the kernel joins.
            *icrc = flow.icrc(Fragmentation { identification: number as u16, ..SOLITARY }, packet);
        }
    }
}

/// The header of a packet that is sent alone.
const SOLITARY: Fragmentation = Fragmentation { identification: 0, dont_fragment: true };
/// Messages of one receive call.
const BATCH: usize = 16;
/// Length of a message's buffer: the longest that the kernel joins.
const BUFFER_LEN: usize = 1 << 16;
/// Buffers of the kernel, in bytes.
const BUFFER: usize = 8 << 20;
/// Most bytes of joined datagrams: the longest payload of IPv6.
pub(super) const MAX_DATAGRAM: usize = 65_527;
