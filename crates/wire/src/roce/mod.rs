//! RoCEv2: the transport of InfiniBand in UDP datagrams (InfiniBand Architecture volume 1, annex
//! A17).
//!
//! ```text
//!   IP │ UDP to port 4791 │ BTH      │ extended headers │ payload │ pad  │ ICRC
//!                         │ 12 bytes │ by the opcode    │         │ to 4 │ 4 bytes
//! ```
//! [`bth`] is the base transport header, and [`opcode`] says which extended headers ([`eth`])
//! follow it. [`packet`] splits a datagram into them, and [`icrc`] is the checksum over all of it
//! and over the headers below. [`cm`] has the datagrams that set connections up. All numbers are
//! big-endian, except the ICRC.

pub mod bth;
pub mod cm;
pub mod eth;
pub mod icrc;
pub mod opcode;
pub mod packet;

/// The UDP port of RoCEv2.
pub const UDP_PORT: u16 = 4791;
/// The ECN codepoint of all packets that a port sends: ECT(0), the low two bits of the traffic
/// class (RFC 3168). A congested switch marks such packets, and drops others.
pub const ECN_CAPABLE: u8 = 0b10;
/// The ECN codepoint of a marked packet: congestion experienced.
pub const ECN_MARKED: u8 = 0b11;
