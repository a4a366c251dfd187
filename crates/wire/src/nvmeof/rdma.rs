//! The RDMA transport of NVMe over Fabrics (RDMA Transport 1.0 §3.2): the private data of
//! connections.

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{LittleEndian as LE, U16};

layout! {
    /// RDMA_CM_REQUEST: a host's private data when it connects a queue.
    #[derive(Default)]
    pub struct CmRequest(32) {
        /// Record Format: [`RECFMT`].
        pub recfmt: U16<LE>,
        /// Queue ID; 0 is the admin queue.
        pub qid: U16<LE>,
        /// RDMA QP Host Receive Queue Size, in entries.
        pub hrqsize: U16<LE>,
        /// RDMA QP Host Send Queue Size, in entries less one.
        pub hsqsize: U16<LE>,
        /// Controller ID of an I/O queue; older hosts leave it 0.
        pub cntlid: U16<LE>,
        pub reserved: [u8; 22] = 0,
    }

    /// RDMA_CM_ACCEPT: a controller's private data when it accepts a queue's connection.
    #[derive(Default)]
    pub struct CmAccept(32) {
        /// Record Format: [`RECFMT`].
        pub recfmt: U16<LE>,
        /// RDMA QP Controller Receive Queue Size, in entries.
        pub crqsize: U16<LE>,
        pub reserved: [u8; 28] = 0,
    }

    /// RDMA_CM_REJECT: a controller's private data when it rejects a queue's connection.
    #[derive(Default)]
    pub struct CmReject(4) {
        /// Record Format: [`RECFMT`].
        pub recfmt: U16<LE>,
        /// Status: a [`CmStatus`].
        pub sts: U16<LE>,
    }
}

open_enum! {
    /// STS of [`CmReject`].
    pub enum CmStatus(u16) {
        /// The private data has the wrong length.
        INVALID_LENGTH = 0x01,
        /// Unknown record format.
        INVALID_RECFMT = 0x02,
        /// There is no such queue.
        INVALID_QID = 0x03,
        /// HSQSIZE is invalid.
        INVALID_HSQSIZE = 0x04,
        /// HRQSIZE is invalid.
        INVALID_HRQSIZE = 0x05,
        /// No resources; Linux prints `resource not found`.
        NO_RESOURCES = 0x06,
        /// The inbound RDMA Read depth (IRD) is invalid.
        INVALID_IRD = 0x07,
        /// The outbound RDMA Read depth (ORD) is invalid.
        INVALID_ORD = 0x08,
    }

    /// RDMA_QPTYPE, the first byte of TSAS in a discovery log entry (RDMA Transport 1.0 §3.4).
    pub enum QpType(u8) {
        /// Reliable Connected.
        RELIABLE_CONNECTED = 1,
        /// Reliable Datagram.
        RELIABLE_DATAGRAM = 2,
    }

    /// RDMA_PRTYPE, the second byte of TSAS.
    pub enum ProviderType(u8) {
        /// No provider specified.
        NOT_SPECIFIED = 1,
        /// InfiniBand.
        INFINIBAND = 2,
        /// RoCE.
        ROCE = 3,
        /// RoCEv2.
        ROCE_V2 = 4,
        /// iWARP.
        IWARP = 5,
    }

    /// RDMA_CMS, the third byte of TSAS.
    pub enum ConnectionService(u8) {
        /// RDMA_IP_CM.
        RDMA_CM = 1,
    }
}

/// The only record format.
pub const RECFMT: u16 = 0;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::{FromBytes, IntoBytes};

    /// The request is the one that the Linux host 6.12 sent over siw for its admin queue.
    #[test]
    fn a_request_reads_as_the_kernel_sent_it() {
        let mut bytes = [0; 32];
        bytes[4..8].copy_from_slice(&[0x20, 0, 0x1f, 0]);
        let request = CmRequest::read_from_bytes(&bytes).unwrap();
        assert_eq!((request.recfmt.get(), request.qid.get(), request.cntlid.get()), (RECFMT, 0, 0));
        assert_eq!((request.hrqsize.get(), request.hsqsize.get()), (32, 31));
    }

    #[test]
    fn answers_have_their_fields_where_the_specification_has_them() {
        let accept = CmAccept { crqsize: 0x0102.into(), ..CmAccept::default() };
        assert_eq!(accept.as_bytes()[..4], [0, 0, 2, 1]);
        let reject = CmReject { recfmt: RECFMT.into(), sts: CmStatus::INVALID_HRQSIZE.0.into() };
        assert_eq!(reject.as_bytes(), [0, 0, 5, 0]);
    }
}
