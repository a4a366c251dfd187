//! The RDMA transport of NVMe over Fabrics (RDMA Transport 1.0 §3.2): what goes in the private data
//! of connections.

use crate::open_enum::open_enum;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, LittleEndian as LE, U16, Unaligned};

/// RDMA_CM_REQUEST: what a host says when it connects a queue.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct CmRequest {
    /// Record Format: [`RECFMT`].
    pub recfmt: U16<LE>,
    /// Queue ID; 0 is the admin queue.
    pub qid: U16<LE>,
    /// RDMA QP Host Receive Queue Size, in entries.
    pub hrqsize: U16<LE>,
    /// RDMA QP Host Send Queue Size, in entries, counted from 0.
    pub hsqsize: U16<LE>,
    /// Controller ID of an I/O queue, by newer hosts.
    pub cntlid: U16<LE>,
    #[doc(hidden)]
    pub reserved: [u8; 22],
}
const _: () = assert!(size_of::<CmRequest>() == 32);

/// RDMA_CM_REJECT: why a queue is not connected.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct CmReject {
    /// Record Format: [`RECFMT`].
    pub recfmt: U16<LE>,
    /// A [`CmStatus`].
    pub sts: U16<LE>,
}
const _: () = assert!(size_of::<CmReject>() == 4);

open_enum! {
    /// STS of [`CmReject`].
    pub enum CmStatus(u16) {
        /// The private data has the wrong length.
        INVALID_LENGTH = 0x01,
        /// Unknown record format.
        INVALID_RECFMT = 0x02,
        /// There is no such queue.
        INVALID_QID = 0x03,
        /// The host's send queue has an impossible size.
        INVALID_HSQSIZE = 0x04,
        /// The host's receive queue has an impossible size.
        INVALID_HRQSIZE = 0x05,
        /// No resources; Linux prints `resource not found`.
        NO_RESOURCES = 0x06,
        /// Too many RDMA Reads to answer.
        INVALID_IRD = 0x07,
        /// Too many RDMA Reads to have in flight.
        INVALID_ORD = 0x08,
    }
}

/// The only record format.
pub const RECFMT: u16 = 0;
