//! PDUs of the TCP transport (TCP Transport 1.0 §3.6).
//!
//! ```text
//!   common header │ PDU specific header │ header digest │ padding    │ data                │ data digest
//!   8 bytes       │ to HLEN             │ 0 or 4 bytes  │ up to PDO  │ to PLEN less digest │ 0 or 4 bytes
//! ```
//! HLEN counts no digest; PLEN counts all.

use crate::nvme::{Cqe, Sqe};
use crate::open_enum::open_enum;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, LittleEndian as LE, U16, U32, Unaligned};

/// What all PDUs begin with (TCP Transport 1.0 §3.6.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct CommonHeader {
    /// [`PduType`].
    pub pdu_type: u8,
    /// [`FLAG_HDGST`] and its neighbours.
    pub flags: u8,
    /// Of the whole header, in bytes, without digest.
    pub hlen: u8,
    /// Where data begins, in bytes from the PDU's begin; 0 without data.
    pub pdo: u8,
    /// Of the whole PDU, in bytes.
    pub plen: U32<LE>,
}
const _: () = assert!(size_of::<CommonHeader>() == COMMON_HEADER_LEN);

/// Initialize connection, from the host (TCP Transport 1.0 §3.6.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct IcReq {
    /// Without flags.
    pub common: CommonHeader,
    /// PDU format version: 0.
    pub pfv: U16<LE>,
    /// Alignment of data that the host gets: in units of 4 bytes, less one.
    pub hpda: u8,
    /// [`DGST_HEADER`], [`DGST_DATA`].
    pub dgst: u8,
    /// R2Ts of one command in flight, less one.
    pub maxr2t: U32<LE>,
    #[doc(hidden)]
    pub reserved: [u8; 112],
}
const _: () = assert!(size_of::<IcReq>() == IC_LEN);

/// Initialize connection, from the controller (TCP Transport 1.0 §3.6.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct IcResp {
    /// Without flags.
    pub common: CommonHeader,
    /// PDU format version: 0.
    pub pfv: U16<LE>,
    /// Alignment of data that the controller gets: in units of 4 bytes, less one.
    pub cpda: u8,
    /// [`DGST_HEADER`], [`DGST_DATA`]: what both use.
    pub dgst: u8,
    /// Data of one H2CData, in bytes: at least 4096, and whole double words.
    pub maxh2cdata: U32<LE>,
    #[doc(hidden)]
    pub reserved: [u8; 112],
}
const _: () = assert!(size_of::<IcResp>() == IC_LEN);

/// A command; data in its capsule follows (TCP Transport 1.0 §3.6.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct CapsuleCmd {
    /// Digest flags.
    pub common: CommonHeader,
    /// The command.
    pub sqe: Sqe,
}
const _: () = assert!(size_of::<CapsuleCmd>() == CAPSULE_CMD_LEN);

/// A completion (TCP Transport 1.0 §3.6.2.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct CapsuleResp {
    /// The header digest's flag.
    pub common: CommonHeader,
    /// The completion.
    pub cqe: Cqe,
}
const _: () = assert!(size_of::<CapsuleResp>() == CAPSULE_RESP_LEN);

/// Data from the host, or to it; it follows (TCP Transport 1.0 §3.6.2.8 and §3.6.2.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Data {
    /// Digest flags, [`FLAG_LAST`]; to the host [`FLAG_SUCCESS`].
    pub common: CommonHeader,
    /// CID of the command.
    pub cccid: U16<LE>,
    /// From the host: TTAG of the R2T. To the host reserved.
    pub ttag: U16<LE>,
    /// In bytes, from the begin of the command's data.
    pub datao: U32<LE>,
    /// In bytes.
    pub datal: U32<LE>,
    #[doc(hidden)]
    pub reserved: [u8; 4],
}
const _: () = assert!(size_of::<Data>() == DATA_LEN);

/// The controller is ready for data (TCP Transport 1.0 §3.6.2.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct NvmeTcpR2t {
    /// The header digest's flag.
    pub common: CommonHeader,
    /// CID of the command.
    pub cccid: U16<LE>,
    /// Chosen by the controller; comes back with the data.
    pub ttag: U16<LE>,
    /// In bytes, from the begin of the command's data.
    pub r2to: U32<LE>,
    /// In bytes.
    pub r2tl: U32<LE>,
    #[doc(hidden)]
    pub reserved: [u8; 4],
}
const _: () = assert!(size_of::<NvmeTcpR2t>() == DATA_LEN);

/// The connection ends; the begin of the PDU that was wrong follows (TCP Transport 1.0 §3.6.2.4 and
/// §3.6.2.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TermReq {
    /// Without flags.
    pub common: CommonHeader,
    /// Fatal error status: [`FatalError`].
    pub fes: U16<LE>,
    /// Fatal error information: the field's offset; of a wrong digest the digest that came.
    pub fei: U32<LE>,
    #[doc(hidden)]
    pub reserved: [u8; 10],
}
const _: () = assert!(size_of::<TermReq>() == DATA_LEN);

open_enum! {
    /// PDU types (TCP Transport 1.0 figure 13).
    pub enum PduType(u8) {
        /// [`IcReq`].
        IC_REQ = 0x00,
        /// [`IcResp`].
        IC_RESP = 0x01,
        /// [`TermReq`] from the host.
        H2C_TERM_REQ = 0x02,
        /// [`TermReq`] from the controller.
        C2H_TERM_REQ = 0x03,
        /// [`CapsuleCmd`].
        CAPSULE_CMD = 0x04,
        /// [`CapsuleResp`].
        CAPSULE_RESP = 0x05,
        /// [`Data`] from the host.
        H2C_DATA = 0x06,
        /// [`Data`] to the host.
        C2H_DATA = 0x07,
        /// [`NvmeTcpR2t`].
        R2T = 0x09,
    }
}

open_enum! {
    /// Fatal error status of a [`TermReq`] (TCP Transport 1.0 figures 19 and 21).
    pub enum FatalError(u16) {
        /// A field of a header; FEI is its offset.
        INVALID_PDU_HEADER_FIELD = 0x01,
        /// Not now, or not at all.
        PDU_SEQUENCE_ERROR = 0x02,
        /// The header digest is wrong; FEI is what came.
        HEADER_DIGEST_ERROR = 0x03,
        /// Data outside of the command's, or of the R2T's.
        DATA_TRANSFER_OUT_OF_RANGE = 0x04,
        /// More data than was agreed; from the host: more R2Ts than it takes.
        DATA_TRANSFER_LIMIT_EXCEEDED = 0x05,
        /// A value that the other side does not support; FEI is its offset.
        UNSUPPORTED_PARAMETER = 0x06,
    }
}

open_enum! {
    /// SECTYPE, the first byte of TSAS in a discovery log entry (TCP Transport 1.0 figure 4).
    pub enum SecurityType(u8) {
        /// None.
        NONE = 0,
        /// TLS 1.2.
        TLS_1_2 = 1,
        /// TLS 1.3.
        TLS_1_3 = 2,
    }
}

/// HDGSTF: a header digest follows the header.
pub const FLAG_HDGST: u8 = 1;
/// DDGSTF: a data digest follows the data.
pub const FLAG_DDGST: u8 = 1 << 1;
/// LAST_PDU: the last data of the command, or of the R2T.
pub const FLAG_LAST: u8 = 1 << 2;
/// SUCCESS: the command succeeded, and no capsule says so.
pub const FLAG_SUCCESS: u8 = 1 << 3;
/// HDGST_ENABLE of `dgst`.
pub const DGST_HEADER: u8 = 1;
/// DDGST_ENABLE of `dgst`.
pub const DGST_DATA: u8 = 1 << 1;
/// The greatest HPDA and CPDA: data aligned to 128 bytes.
pub const PDA_MAX: u8 = 31;
/// The least MAXH2CDATA.
pub const MAXH2CDATA_MIN: u32 = 4096;
/// Of the common header, in bytes.
pub const COMMON_HEADER_LEN: usize = 8;
/// Of ICReq and ICResp, in bytes.
pub const IC_LEN: usize = 128;
/// Of a command capsule's header, in bytes.
pub const CAPSULE_CMD_LEN: usize = 72;
/// Of a response capsule, in bytes.
pub const CAPSULE_RESP_LEN: usize = 24;
/// Of a header of data, of R2T and of a termination, in bytes.
pub const DATA_LEN: usize = 24;
/// The longest termination, in bytes.
pub const TERM_REQ_MAX: usize = 152;
/// Of a digest, in bytes: CRC-32C.
pub const DIGEST_LEN: usize = 4;
/// The port that IANA assigned to NVMe/TCP I/O.
pub const NVME_TCP_PORT: u16 = 4420;
/// The port that IANA assigned to NVMe discovery over TCP.
pub const NVME_DISCOVERY_PORT: u16 = 8009;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvme::status::NvmeStatus;

    /// As the Linux host and target 6.12 sent them.
    #[test]
    fn a_connection_begins_as_the_kernel_sent_it() {
        let mut bytes = [0; IC_LEN];
        bytes[..8].copy_from_slice(&[0x00, 0x00, 0x80, 0x00, 0x80, 0x00, 0x00, 0x00]);
        let request = IcReq::read_from_bytes(&bytes).unwrap();
        assert_eq!(PduType(request.common.pdu_type), PduType::IC_REQ);
        assert_eq!((usize::from(request.common.hlen), request.common.plen.get()), (IC_LEN, 128));
        assert_eq!((request.pfv.get(), request.hpda, request.dgst, request.maxr2t.get()), (0, 0, 0, 0));

        bytes[..16].copy_from_slice(&[1, 0, 0x80, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x40, 0]);
        let response = IcResp::read_from_bytes(&bytes).unwrap();
        assert_eq!(PduType(response.common.pdu_type), PduType::IC_RESP);
        assert_eq!((response.cpda, response.maxh2cdata.get()), (0, 4 << 20));
    }

    /// A read of 4 KiB: the head of its data and the capsule behind it, as the Linux target 6.12
    /// sent them.
    #[test]
    fn a_read_is_answered_as_the_kernel_did() {
        let head = [7, 4, 0x18, 0x18, 0x18, 0x10, 0, 0, 0x51, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0];
        let data = Data::read_from_bytes(&head).unwrap();
        assert_eq!(PduType(data.common.pdu_type), PduType::C2H_DATA);
        assert_eq!((data.common.flags, data.common.plen.get()), (FLAG_LAST, 24 + 4096));
        assert_eq!((data.cccid.get(), data.datao.get(), data.datal.get()), (0x51, 0, 4096));

        let capsule = [5, 0, 0x18, 0, 0x18, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1, 0, 0x51, 0, 0, 0];
        let response = CapsuleResp::read_from_bytes(&capsule).unwrap();
        assert_eq!(PduType(response.common.pdu_type), PduType::CAPSULE_RESP);
        assert_eq!((response.cqe.sqhd.get(), response.cqe.cid.get()), (2, 0x51));
        assert_eq!(response.cqe.status.status(), NvmeStatus::SUCCESSFUL_COMPLETION);
    }

    /// The middle of a write of 64 KiB: the target asks for its data, and the host sends it.
    #[test]
    fn data_is_asked_for_and_sent_as_the_kernel_did() {
        let bytes = [9, 0, 0x18, 0, 0x18, 0, 0, 0, 0x5b, 0, 0x0a, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0];
        let r2t = NvmeTcpR2t::read_from_bytes(&bytes).unwrap();
        assert_eq!(PduType(r2t.common.pdu_type), PduType::R2T);
        assert_eq!((r2t.cccid.get(), r2t.ttag.get(), r2t.r2to.get(), r2t.r2tl.get()), (0x5b, 0x0a, 0, 65536));

        let bytes = [6, 4, 0x18, 0x18, 0x18, 0, 1, 0, 0x5b, 0, 0x0a, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0];
        let data = Data::read_from_bytes(&bytes).unwrap();
        assert_eq!(PduType(data.common.pdu_type), PduType::H2C_DATA);
        assert_eq!((data.common.flags, data.common.pdo, data.common.plen.get()), (FLAG_LAST, 24, 65536 + 24));
        assert_eq!((data.cccid.get(), data.ttag.get(), data.datal.get()), (0x5b, 0x0a, 65536));
    }
}
