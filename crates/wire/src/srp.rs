//! The SCSI RDMA Protocol (T10 SRP): what goes in the private data of connections.

use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, FromBytes, Immutable, IntoBytes, KnownLayout, U16, U32, U64, Unaligned};

/// SRP_LOGIN_REQ as Linux sends it over RDMA/CM, which carries 56 bytes: the standard's fields
/// without its reserved bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct LoginRequestRdma {
    /// Comes back in the answer.
    pub tag: U64<BE>,
    /// Required buffer formats: [`BUFFER_FORMAT_DIRECT`] and [`BUFFER_FORMAT_INDIRECT`].
    pub req_buf_fmt: U16<BE>,
    /// What the initiator does with its other channels, and whether it sends immediate data.
    pub req_flags: u8,
    /// [`SrpOpcode::LOGIN_REQUEST`].
    pub opcode: u8,
    /// The longest information unit of the initiator, in bytes.
    pub req_it_iu_len: U32<BE>,
    /// The initiator port's identifier.
    pub initiator_port_id: [u8; 16],
    /// The target port's identifier.
    pub target_port_id: [u8; 16],
    /// Where immediate data begins, in bytes (SRP2).
    pub imm_data_offset: U16<BE>,
    #[doc(hidden)]
    pub reserved: [u8; 6],
}
const _: () = assert!(size_of::<LoginRequestRdma>() == 56);

/// SRP_LOGIN_REJ.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct LoginReject {
    /// [`SrpOpcode::LOGIN_REJECT`].
    pub opcode: u8,
    #[doc(hidden)]
    pub reserved1: [u8; 3],
    /// A [`LoginRejectReason`].
    pub reason: U32<BE>,
    /// That of the request.
    pub tag: U64<BE>,
    #[doc(hidden)]
    pub reserved2: [u8; 8],
    /// Supported buffer formats.
    pub buf_fmt: U16<BE>,
    #[doc(hidden)]
    pub reserved3: [u8; 6],
}
const _: () = assert!(size_of::<LoginReject>() == 32);

open_enum! {
    /// The first byte of every information unit.
    pub enum SrpOpcode(u8) {
        /// SRP_LOGIN_REQ.
        LOGIN_REQUEST = 0x00,
        /// SRP_LOGIN_REJ.
        LOGIN_REJECT = 0xc2,
    }
}

open_enum! {
    /// Why a login is rejected.
    pub enum LoginRejectReason(u32) {
        /// Unable to establish an RDMA channel, no reason specified.
        UNABLE_TO_ESTABLISH_CHANNEL = 0x0001_0000,
    }
}

/// Commands may name one range of memory.
pub const BUFFER_FORMAT_DIRECT: u16 = 1 << 1;
/// Commands may name a table of ranges.
pub const BUFFER_FORMAT_INDIRECT: u16 = 1 << 2;
