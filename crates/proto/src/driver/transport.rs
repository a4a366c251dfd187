//! What a driver knows of a connection, and its session or queue pair needs.

use core::net::IpAddr;

/// Properties of a connection, as its driver knows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportInfo {
    /// Maximum segment size in bytes, if the transport has segments and it is known.
    pub segment_len: Option<usize>,
    /// The place of the connection among others at a UDP port, if it is one of RoCEv2.
    pub flow: Option<FlowInfo>,
}

/// A connection at a UDP port that many connections share. The numbers are unpredictable, and
/// unique at the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowInfo {
    /// Address of this side.
    pub local: IpAddr,
    /// Address of the peer.
    pub peer: IpAddr,
    /// Initiator: the port to connect to, a TCP port by the name that connection management uses.
    pub service: u16,
    /// The port that this side calls its own.
    pub source_port: u16,
    /// Most payload of a packet on this path, in bytes.
    pub mtu: u16,
    /// Number of the queue pair.
    pub queue_pair: u32,
    /// The first packet sequence number that the peer has to use.
    pub first_psn: u32,
    /// Communication identifier.
    pub comm_id: u32,
    /// Identifies the process to its peers.
    pub guid: u64,
}
