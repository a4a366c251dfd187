//! Connection management: datagrams between the queue pairs 1 of both sides (volume 1, §12), and
//! the private data by which `rdma_cm` connects to an IP address and port (annex A11).
//!
//! ```text
//!   DETH │ MadHeader │ body, by the attribute: CmReq, CmRep, ... │
//!   8    │ 24 bytes  │ 232 bytes, of which the last are private data
//! ```
//! Private data has a fixed length: what a side does not use is zero.

use crate::layout::layout;
use crate::open_enum::open_enum;
use crate::roce::bth::U24;
use core::net::IpAddr;
use zerocopy::{BigEndian as BE, FromBytes, IntoBytes, U16, U32, U64};

layout! {
    /// Header of a management datagram (volume 1, §13.4.3).
    pub struct MadHeader(MAD_HEADER_LEN) {
        /// [`MAD_VERSION`].
        pub base_version: u8,
        /// [`MAD_CLASS_CM`].
        pub mgmt_class: u8,
        /// [`MAD_CM_VERSION`].
        pub class_version: u8,
        /// [`MAD_METHOD_SEND`].
        pub method: u8,
        /// Status; unused.
        pub status: U16<BE>,
        /// Unused.
        pub class_specific: U16<BE>,
        /// Chosen by the side that begins an exchange; an answer returns it.
        pub transaction_id: U64<BE>,
        /// [`CmAttribute`].
        pub attribute_id: U16<BE>,
        pub reserved: U16<BE> = 0,
        /// Unused.
        pub attribute_modifier: U32<BE>,
    }
}

impl MadHeader {
    /// The header of a message of connection management.
    #[must_use]
    pub const fn new(attribute: CmAttribute, transaction_id: u64) -> MadHeader {
        MadHeader {
            base_version: MAD_VERSION,
            mgmt_class: MAD_CLASS_CM,
            class_version: MAD_CM_VERSION,
            method: MAD_METHOD_SEND,
            status: U16::ZERO,
            class_specific: U16::ZERO,
            transaction_id: U64::new(transaction_id),
            attribute_id: U16::new(attribute.0),
            reserved: U16::ZERO,
            attribute_modifier: U32::ZERO,
        }
    }

    /// Whether this is a message of connection management.
    #[must_use]
    pub const fn is_cm(&self) -> bool {
        self.base_version == MAD_VERSION
            && self.mgmt_class == MAD_CLASS_CM
            && self.class_version == MAD_CM_VERSION
            && self.method == MAD_METHOD_SEND
    }
}

open_enum! {
    /// Messages of connection management.
    pub enum CmAttribute(u16) {
        /// [`CmReq`]: asks for a connection.
        REQ = 0x0010,
        /// [`CmMra`]: the answer takes longer.
        MRA = 0x0011,
        /// [`CmRej`]: refuses a connection.
        REJ = 0x0012,
        /// [`CmRep`]: accepts a connection.
        REP = 0x0013,
        /// [`CmRtu`]: the connection is established.
        RTU = 0x0014,
        /// [`CmDreq`]: ends a connection.
        DREQ = 0x0015,
        /// [`CmDrep`]: the connection has ended.
        DREP = 0x0016,
    }
}

/// A message of connection management.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each variant is the structure that it has")]
pub enum CmMessage<'a> {
    Req(&'a CmReq),
    Mra(&'a CmMra),
    Rej(&'a CmRej),
    Rep(&'a CmRep),
    Rtu(&'a CmRtu),
    Dreq(&'a CmDreq),
    Drep(&'a CmDrep),
}

impl CmMessage<'_> {
    /// Reads a datagram's payload; `None` if it is no message of connection management, or one that
    /// connections do without.
    #[must_use]
    pub fn parse(mad: &[u8]) -> Option<(&MadHeader, CmMessage<'_>)> {
        let mad: &[u8; MAD_LEN] = mad.try_into().ok()?;
        let (header, body) = MadHeader::ref_from_prefix(mad).ok()?;
        if !header.is_cm() {
            return None;
        }
        let message = match CmAttribute(header.attribute_id.get()) {
            CmAttribute::REQ => CmMessage::Req(CmReq::ref_from_bytes(body).ok()?),
            CmAttribute::MRA => CmMessage::Mra(CmMra::ref_from_bytes(body).ok()?),
            CmAttribute::REJ => CmMessage::Rej(CmRej::ref_from_bytes(body).ok()?),
            CmAttribute::REP => CmMessage::Rep(CmRep::ref_from_bytes(body).ok()?),
            CmAttribute::RTU => CmMessage::Rtu(CmRtu::ref_from_bytes(body).ok()?),
            CmAttribute::DREQ => CmMessage::Dreq(CmDreq::ref_from_bytes(body).ok()?),
            CmAttribute::DREP => CmMessage::Drep(CmDrep::ref_from_bytes(body).ok()?),
            _ => return None,
        };
        Some((header, message))
    }

    /// The attribute that names the message, and the body.
    #[must_use]
    pub fn parts(&self) -> (CmAttribute, &[u8]) {
        match self {
            CmMessage::Req(body) => (CmAttribute::REQ, body.as_bytes()),
            CmMessage::Mra(body) => (CmAttribute::MRA, body.as_bytes()),
            CmMessage::Rej(body) => (CmAttribute::REJ, body.as_bytes()),
            CmMessage::Rep(body) => (CmAttribute::REP, body.as_bytes()),
            CmMessage::Rtu(body) => (CmAttribute::RTU, body.as_bytes()),
            CmMessage::Dreq(body) => (CmAttribute::DREQ, body.as_bytes()),
            CmMessage::Drep(body) => (CmAttribute::DREP, body.as_bytes()),
        }
    }

    /// The communication identifier that the receiver has given to the connection, if the message
    /// has it.
    #[must_use]
    pub fn remote_comm_id(&self) -> Option<u32> {
        (!matches!(self, CmMessage::Req(_))).then(|| self.comm_ids()[1])
    }

    /// The communication identifier that the sender has given to the connection.
    #[must_use]
    pub fn local_comm_id(&self) -> u32 {
        self.comm_ids()[0]
    }

    /// The identifiers of the sender and the receiver, with which all bodies begin; in a REQ the
    /// second one is reserved.
    fn comm_ids(&self) -> [u32; 2] {
        let ids = <[U32<BE>; 2]>::read_from_prefix(self.parts().1);
        ids.map_or([0; 2], |(ids, _)| ids.map(U32::get))
    }
}

layout! {
    /// Request for communication (volume 1, §12.6.5).
    pub struct CmReq(CM_BODY_LEN) {
        /// The sender's number of the connection.
        pub local_comm_id: U32<BE>,
        pub reserved1: U32<BE> = 0,
        /// What the sender wants to connect to; see [`service_id`].
        pub service_id: U64<BE>,
        /// Identifies the sender's adapter.
        pub local_ca_guid: U64<BE>,
        pub reserved2: U32<BE> = 0,
        /// Of datagrams only.
        pub local_q_key: U32<BE>,
        /// The sender's queue pair.
        pub local_qpn: U24,
        /// RDMA Reads of the receiver that the sender answers at a time.
        pub responder_resources: u8,
        /// Of reliable datagrams only.
        pub local_eecn: U24,
        /// RDMA Reads that the sender wants to have in flight.
        pub initiator_depth: u8,
        /// Of reliable datagrams only.
        pub remote_eecn: U24,
        /// Five bits: the code of the time within which the receiver has to answer; two: the
        /// transport service type, 0 for reliable connections; one: end-to-end flow control.
        pub remote_response: u8,
        /// The first packet sequence number that the receiver of this message uses, and its sender
        /// expects.
        pub starting_psn: U24,
        /// Five bits: the code of the time within which the sender answers; three: how often the
        /// receiver repeats packets that are not acknowledged.
        pub local_response: u8,
        /// Partition key.
        pub p_key: U16<BE>,
        /// Four bits: the code of the path MTU; one: reliable datagrams; three: how often the
        /// receiver sends again when the sender was not ready, 7 for any number.
        pub path_mtu: u8,
        /// Four bits: how often messages of connection management are repeated; one: the sender has
        /// a shared receive queue; three: the extended transport type, 0 here.
        pub max_cm_retries: u8,
        /// Not used over IP.
        pub local_lid: U16<BE>,
        /// Not used over IP.
        pub remote_lid: U16<BE>,
        /// The sender's address; IPv4 addresses are mapped into IPv6.
        pub local_gid: [u8; 16],
        /// The receiver's address.
        pub remote_gid: [u8; 16],
        /// Flow label in 20 bits, six reserved ones, packet rate in six.
        pub flow_label: U32<BE>,
        /// Traffic class.
        pub traffic_class: u8,
        /// Hop limit.
        pub hop_limit: u8,
        /// Service level in four bits; 8: both sides are in one subnet.
        pub service_level: u8,
        /// Code, in five bits, of the receiver's timeout for acknowledgements.
        pub ack_timeout: u8,
        /// A second path, which is not used here.
        pub alternate_path: [u8; 44],
        /// Private data; of `rdma_cm`, an [`IpCmHeader`] and what follows it.
        pub private_data: [u8; REQ_PRIVATE_DATA],
    }
}

impl CmReq {
    /// Transport service type; 0 for a reliable connection.
    #[must_use]
    pub const fn service_type(&self) -> u8 {
        self.remote_response >> 1 & 3
    }

    /// How often the receiver repeats packets that are not acknowledged.
    #[must_use]
    pub const fn retry_count(&self) -> u8 {
        self.local_response & 7
    }

    /// Code of the path MTU; see [`mtu_of_code`].
    #[must_use]
    pub const fn mtu_code(&self) -> u8 {
        self.path_mtu >> 4
    }

    /// How often the receiver sends again when the sender was not ready.
    #[must_use]
    pub const fn rnr_retry_count(&self) -> u8 {
        self.path_mtu & 7
    }
}

layout! {
    /// Message receipt acknowledgement (§12.6.6): the answer to a REQ, a REP or a LAP takes longer.
    pub struct CmMra(CM_BODY_LEN) {
        /// The sender's number of the connection.
        pub local_comm_id: U32<BE>,
        /// The receiver's number of the connection.
        pub remote_comm_id: U32<BE>,
        /// The message, in two bits: [`ANSWERS_REQ`] or [`ANSWERS_REP`].
        pub message: u8,
        /// Code, in five bits, of the additional time.
        pub service_timeout: u8,
        /// Private data.
        pub private_data: [u8; 222],
    }
}

impl CmMra {
    /// The message that takes longer to answer: [`ANSWERS_REQ`] or [`ANSWERS_REP`]. The bits behind
    /// it are reserved.
    #[must_use]
    pub const fn answers(&self) -> u8 {
        self.message & 0xc0
    }
}

layout! {
    /// Reject (§12.6.7).
    pub struct CmRej(CM_BODY_LEN) {
        /// The sender's number of the connection, or 0 if it has none.
        pub local_comm_id: U32<BE>,
        /// The receiver's number of the connection.
        pub remote_comm_id: U32<BE>,
        /// The message that is refused, in two bits: [`ANSWERS_REQ`], [`ANSWERS_REP`] or
        /// [`ANSWERS_NONE`].
        pub message: u8,
        /// Length, in seven bits, of what is used of [`CmRej::ari`].
        pub info_len: u8,
        /// [`RejectReason`].
        pub reason: U16<BE>,
        /// Additional information, by the reason.
        pub ari: [u8; 72],
        /// Private data.
        pub private_data: [u8; REJ_PRIVATE_DATA],
    }
}

open_enum! {
    /// Reasons of a reject (§12.6.7.2), those that connections here give or meet.
    pub enum RejectReason(u16) {
        /// No queue pair is left.
        NO_QP = 1,
        /// Other resources are missing.
        NO_RESOURCES = 3,
        /// The peer did not answer in time.
        TIMEOUT = 4,
        /// The request asks for what is not supported.
        UNSUPPORTED_REQUEST = 5,
        /// The communication identifiers are not known.
        INVALID_COMM_ID = 6,
        /// Nobody listens for that service ID.
        INVALID_SERVICE_ID = 8,
        /// The transport service type is not supported.
        INVALID_SERVICE_TYPE = 9,
        /// The connection is that of an earlier process.
        STALE_CONNECTION = 10,
        /// The path MTU is not supported.
        INVALID_MTU = 26,
        /// The application refuses; private data may say why.
        CONSUMER = 28,
    }
}

layout! {
    /// Reply to a request (§12.6.8).
    pub struct CmRep(CM_BODY_LEN) {
        /// The sender's number of the connection.
        pub local_comm_id: U32<BE>,
        /// The receiver's number of the connection.
        pub remote_comm_id: U32<BE>,
        /// Of datagrams only.
        pub local_q_key: U32<BE>,
        /// The sender's queue pair.
        pub local_qpn: U24,
        pub reserved1: u8 = 0,
        /// Of reliable datagrams only.
        pub local_eecn: U24,
        pub reserved2: u8 = 0,
        /// The first packet sequence number that the receiver of this message uses, and its sender
        /// expects.
        pub starting_psn: U24,
        pub reserved3: u8 = 0,
        /// RDMA Reads of the receiver that the sender answers at a time.
        pub responder_resources: u8,
        /// RDMA Reads that the sender may have in flight.
        pub initiator_depth: u8,
        /// Five bits: the code of the sender's delay of acknowledgements; two: failover; one:
        /// end-to-end flow control.
        pub ack_delay: u8,
        /// Three bits: how often the receiver sends again when the sender was not ready; one: the
        /// sender has a shared receive queue.
        pub rnr_retry: u8,
        /// Identifies the sender's adapter.
        pub local_ca_guid: U64<BE>,
        /// Private data.
        pub private_data: [u8; REP_PRIVATE_DATA],
    }
}

impl CmRep {
    /// How often the receiver sends again when the sender was not ready.
    #[must_use]
    pub const fn rnr_retry_count(&self) -> u8 {
        self.rnr_retry >> 5
    }
}

layout! {
    /// Ready to use (§12.6.9).
    pub struct CmRtu(CM_BODY_LEN) {
        /// The sender's number of the connection.
        pub local_comm_id: U32<BE>,
        /// The receiver's number of the connection.
        pub remote_comm_id: U32<BE>,
        /// Private data.
        pub private_data: [u8; 224],
    }

    /// Request for communication release (§12.6.10).
    pub struct CmDreq(CM_BODY_LEN) {
        /// The sender's number of the connection.
        pub local_comm_id: U32<BE>,
        /// The receiver's number of the connection.
        pub remote_comm_id: U32<BE>,
        /// The receiver's queue pair.
        pub remote_qpn: U24,
        pub reserved: u8 = 0,
        /// Private data.
        pub private_data: [u8; 220],
    }

    /// Reply to a request for communication release (§12.6.11).
    pub struct CmDrep(CM_BODY_LEN) {
        /// The sender's number of the connection.
        pub local_comm_id: U32<BE>,
        /// The receiver's number of the connection.
        pub remote_comm_id: U32<BE>,
        /// Private data.
        pub private_data: [u8; 224],
    }

    /// What the private data of a request over `rdma_cm` begins with (annex A11).
    pub struct IpCmHeader(IP_CM_LEN) {
        /// Version of this header, in two halves: 0.
        pub version: u8,
        /// IP version in the high four bits.
        pub ip_version: u8,
        /// The sender's port.
        pub source_port: U16<BE>,
        /// The sender's address; IPv4 is in the last four bytes.
        pub source: [u8; 16],
        /// The address that the sender connects to.
        pub destination: [u8; 16],
    }
}

impl IpCmHeader {
    /// The header of a request from an address and port to an address of the same IP version.
    #[must_use]
    pub fn new(source: IpAddr, source_port: u16, destination: IpAddr) -> IpCmHeader {
        let ip_version = if source.is_ipv4() { 4 } else { 6 } << 4;
        let [source, destination] = [source, destination].map(|address| match address {
            IpAddr::V4(address) => u128::from(u32::from(address)).to_be_bytes(),
            IpAddr::V6(address) => address.octets(),
        });
        IpCmHeader { version: 0, ip_version, source_port: U16::new(source_port), source, destination }
    }
}

/// The address of a GID, and of an IPv6 address that maps one of IPv4.
#[must_use]
pub fn gid(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// The service ID of a TCP port in `rdma_cm` (annex A11).
#[must_use]
pub const fn service_id(port: u16) -> u64 {
    SERVICE_ID_TCP | port as u64
}

/// The TCP port of a service ID, if it has one.
#[must_use]
pub const fn port_of_service_id(service_id: u64) -> Option<u16> {
    match service_id & !0xffff {
        SERVICE_ID_TCP => Some(service_id as u16),
        _ => None,
    }
}

/// The payload of the longest packet on a path, in bytes, by its code.
#[must_use]
pub const fn mtu_of_code(code: u8) -> Option<u16> {
    match code {
        1..=5 => Some(128 << code),
        _ => None,
    }
}

/// The code of a path MTU in bytes, rounded down to one of the five that exist; `None` below 256.
#[must_use]
pub const fn code_of_mtu(mtu: u16) -> Option<u8> {
    match mtu {
        0..256 => None,
        256..512 => Some(1),
        512..1024 => Some(2),
        1024..2048 => Some(3),
        2048..4096 => Some(4),
        4096.. => Some(5),
    }
}

/// Bit of [`CmReq::service_level`]: both sides are in one subnet.
pub const SUBNET_LOCAL: u8 = 8;

/// A REQ is answered, in the high two bits of [`CmMra::message`] and [`CmRej::message`].
pub const ANSWERS_REQ: u8 = 0;
/// A REP is answered.
pub const ANSWERS_REP: u8 = 1 << 6;
/// Another message is answered, or none.
pub const ANSWERS_NONE: u8 = 2 << 6;

/// Base version of management datagrams.
pub const MAD_VERSION: u8 = 1;
/// Management class of connection management.
pub const MAD_CLASS_CM: u8 = 7;
/// Version of that class.
pub const MAD_CM_VERSION: u8 = 2;
/// The method of all its messages.
pub const MAD_METHOD_SEND: u8 = 3;

/// Length of a management datagram, in bytes.
pub const MAD_LEN: usize = 256;
/// Length of its header, in bytes.
pub const MAD_HEADER_LEN: usize = 24;
/// Length of the body of a message, in bytes.
pub const CM_BODY_LEN: usize = MAD_LEN - MAD_HEADER_LEN;
/// Length of the private data of a REQ, in bytes.
pub const REQ_PRIVATE_DATA: usize = 92;
/// Length of the private data of a REP, in bytes.
pub const REP_PRIVATE_DATA: usize = 196;
/// Length of the private data of a REJ, in bytes.
pub const REJ_PRIVATE_DATA: usize = 148;
/// Length of an [`IpCmHeader`], in bytes.
pub const IP_CM_LEN: usize = 36;

/// Service IDs of the IP service, with protocol number 6.
const SERVICE_ID_TCP: u64 = 0x0106_0000;

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::{Ipv4Addr, Ipv6Addr};

    #[test]
    fn a_port_has_a_service_id() {
        assert_eq!(service_id(3260), 0x0000_0000_0106_0cbc, "as the kernel sent it for iSER");
        assert_eq!(port_of_service_id(0x0106_0cbc), Some(3260));
        assert_eq!(port_of_service_id(0x0111_0cbc), None, "UDP");
        assert_eq!(port_of_service_id(0x1000_0000_0106_0cbc), None);
    }

    #[test]
    fn a_path_mtu_has_a_code() {
        assert_eq!([1, 2, 3, 4, 5].map(mtu_of_code), [256, 512, 1024, 2048, 4096].map(Some));
        assert_eq!([0, 6, 15].map(mtu_of_code), [None; 3]);
        for code in 1..=5 {
            let mtu = mtu_of_code(code).unwrap();
            assert_eq!(code_of_mtu(mtu), Some(code));
            assert_eq!(code_of_mtu(mtu - 1), code_of_mtu(mtu >> 1));
        }
        assert_eq!((code_of_mtu(255), code_of_mtu(u16::MAX)), (None, Some(5)));
    }

    #[test]
    fn addresses_are_gids() {
        let four = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 11));
        assert_eq!(gid(four), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 11]);
        let six = IpAddr::V6(Ipv6Addr::LOCALHOST);
        assert_eq!(gid(six), Ipv6Addr::LOCALHOST.octets());
        let header = IpCmHeader::new(four, 40_000, four);
        assert_eq!(header.as_bytes()[..4], [0, 0x40, 0x9c, 0x40]);
        assert_eq!(header.source, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 77, 0, 11]);
        assert_eq!(IpCmHeader::new(six, 1, six).as_bytes()[..4], [0, 0x60, 0, 1]);
    }

    #[test]
    fn only_messages_of_connection_management_are_read() {
        let mut mad = [0; MAD_LEN];
        mad[..MAD_HEADER_LEN].copy_from_slice(MadHeader::new(CmAttribute::DREQ, 7).as_bytes());
        mad[24..36].copy_from_slice(&[0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0x11, 0]);
        let (header, message) = CmMessage::parse(&mad).unwrap();
        assert_eq!((header.transaction_id.get(), message.parts().0), (7, CmAttribute::DREQ));
        assert_eq!((message.local_comm_id(), message.remote_comm_id()), (1, Some(2)));
        assert!(matches!(message, CmMessage::Dreq(dreq) if dreq.remote_qpn.get() == 0x11));
        assert_eq!(CmMessage::parse(&mad[..255]), None);
        for (at, value) in [(0, 2), (1, 3), (2, 1), (3, 0x81), (17, 0x19)] {
            let mut other = mad;
            other[at] = value;
            assert_eq!(CmMessage::parse(&other), None, "byte {at}");
        }
    }
}
