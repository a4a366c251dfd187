//! One socket of a UDP port: batches of datagrams in both directions.
//!
//! Sent packets are joined into one call where they have one length (`UDP_SEGMENT`), and received
//! ones come joined (`UDP_GRO`). Over IPv4, a packet is sent with DF, so its identification is 0,
//! or its number in the call: the ICRC covers both (decision 101).

use super::path::{self, RocePath};
use crate::sys;
use blockmux_proto::driver::outbox::{Outbox, OutboxPiece};
use blockmux_rdma::roce::bytes::{Fragmentation, ICRC_LEN, RoceFlow};
use blockmux_rdma::roce::records::HEAD_LEN;
use quinn_udp::{EcnCodepoint, RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use socket2::{Domain, Protocol, Socket, Type};
use std::array;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

/// A UDP socket that is bound to the port of RoCEv2.
pub(crate) struct RoceSocket {
    socket: Socket,
    state: UdpSocketState,
}

/// A datagram that has arrived: a packet from its base transport header to its ICRC.
pub(crate) struct ArrivedPacket<'a> {
    pub(crate) datagram: &'a [u8],
    /// Address and UDP port of the sender.
    pub(crate) from: SocketAddr,
    /// The address of this machine that it was sent to.
    pub(crate) to: IpAddr,
    /// Whether the network has marked it as one that met congestion.
    pub(crate) is_marked: bool,
}

impl ArrivedPacket<'_> {
    /// The packets of its sender to this side; `None` if the addresses are of two families.
    pub(crate) fn flow(&self) -> Option<RoceFlow> {
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
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
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
    pub(crate) fn receive(
        &self,
        buffers: &mut ReceiveBuffers,
        mut each: impl FnMut(ArrivedPacket<'_>),
    ) -> io::Result<bool> {
        let mut slices = buffers.0.chunks_exact_mut(BUFFER_LEN);
        let mut slices: [_; BATCH] = array::from_fn(|_| IoSliceMut::new(slices.next().unwrap_or_default()));
        let mut metas = [RecvMeta::default(); BATCH];
        let count = self.state.recv(UdpSockRef::from(&self.socket), &mut slices, &mut metas)?;
        for (slice, meta) in slices.iter().zip(&metas).take(count) {
            let Some(to) = meta.dst_ip else { continue };
            let bytes = slice.get(..meta.len).unwrap_or_default();
            // The kernel joins only datagrams with the same codepoint.
            let is_marked = meta.ecn == Some(EcnCodepoint::Ce);
            for datagram in bytes.chunks(meta.stride.max(1)) {
                each(ArrivedPacket { datagram, from: meta.addr, to, is_marked });
            }
        }
        Ok(count == BATCH)
    }

    /// Sends one packet, without waiting. It may be lost, as any.
    pub(crate) fn send_packet(&self, path: &RocePath, packet: &[u8]) {
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

impl AsRawFd for RoceSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl AsFd for RoceSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Buffers of one receive call. Only those that are used take memory.
pub(crate) struct ReceiveBuffers(Vec<u8>);

impl ReceiveBuffers {
    pub(crate) fn new() -> ReceiveBuffers {
        ReceiveBuffers(vec![0; BATCH * BUFFER_LEN])
    }
}

/// Sends records of outboxes through a socket.
#[derive(Default)]
pub(super) struct RecordSender {
    /// The records of an outbox that is not contiguous.
    records: Vec<u8>,
    /// The datagrams of one call.
    datagrams: Vec<u8>,
}

impl RecordSender {
    /// Sends the packets of the records in `outbox`, and removes them. A packet that the system
    /// refuses is lost, as on the way: the queue pair sends it again, or gives up.
    ///
    /// # Errors
    /// `WouldBlock` if the socket takes none now.
    pub(super) fn send(
        &mut self,
        socket: &RoceSocket,
        path: &RocePath,
        outbox: &mut Outbox,
    ) -> io::Result<usize> {
        let RecordSender { records, datagrams } = self;
        let mut sent = 0;
        if let Some(flow) = path.outgoing() {
            let bytes = contiguous(outbox, records);
            loop {
                let (taken, segment_len) =
                    join(&flow, &bytes[sent..], socket.state.max_gso_segments(), datagrams);
                if taken == 0 {
                    break;
                }
                match socket.transmit(path, datagrams, Some(segment_len)) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Ok(()) | Err(_) => sent += taken,
                }
            }
        } else {
            sent = outbox.len();
        }
        outbox.consume(sent);
        if sent == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(sent) }
    }
}

/// The bytes of an outbox in one piece.
fn contiguous<'a>(outbox: &'a Outbox, copy: &'a mut Vec<u8>) -> &'a [u8] {
    let mut pieces = outbox.pieces();
    match (pieces.next(), pieces.next()) {
        (Some(OutboxPiece::Head(only)), None) => only,
        _ => {
            copy.clear();
            for piece in outbox.pieces() {
                match piece {
                    OutboxPiece::Head(head) => copy.extend_from_slice(head),
                    OutboxPiece::Payload(seg) => copy.extend(seg.to_vec()),
                }
            }
            copy
        }
    }
}

/// Joins the first records to datagrams of one length, with their ICRCs; only the last may be
/// shorter. Returns the number of bytes that the records have, and the length of a datagram.
fn join(flow: &RoceFlow, records: &[u8], most: usize, datagrams: &mut Vec<u8>) -> (usize, usize) {
    datagrams.clear();
    let (mut taken, mut segment_len) = (0, 0);
    for number in 0..most.clamp(1, MAX_SEGMENTS) {
        let Some(record) = first_record(&records[taken..]) else { break };
        let is_first = number == 0;
        if !is_first && (record.len() > segment_len || datagrams.len() + record.len() > MAX_JOINED) {
            break;
        }
        let is_last = !is_first && record.len() < segment_len;
        segment_len = segment_len.max(record.len());
        let (packet, _) = record.split_at(record.len() - ICRC_LEN);
        let fragmentation = Fragmentation { identification: number as u16, ..SOLITARY };
        datagrams.extend_from_slice(packet);
        datagrams.extend_from_slice(&flow.icrc(fragmentation, packet));
        taken += HEAD_LEN + record.len();
        if is_last {
            break;
        }
    }
    (taken, segment_len)
}

/// The packet of the first record, with its place for the ICRC.
fn first_record(records: &[u8]) -> Option<&[u8]> {
    let (head, rest) = records.split_first_chunk::<HEAD_LEN>()?;
    rest.get(..u16::from_be_bytes(*head).into()).filter(|record| record.len() >= ICRC_LEN)
}

/// The header of a packet that is sent alone.
const SOLITARY: Fragmentation = Fragmentation { identification: 0, dont_fragment: true };
/// Messages of one receive call.
const BATCH: usize = 16;
/// Length of a message's buffer: the longest that the kernel joins.
const BUFFER_LEN: usize = 1 << 16;
/// Buffers of the kernel, in bytes.
const BUFFER: usize = 8 << 20;
/// Most packets of one call (`UDP_MAX_SEGMENTS` of older kernels).
const MAX_SEGMENTS: usize = 64;
/// Most bytes of one call: the longest IPv4 packet, without its headers.
const MAX_JOINED: usize = 65_507;
