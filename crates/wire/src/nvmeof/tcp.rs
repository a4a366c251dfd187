//! PDUs of the TCP transport (TCP Transport 1.0 §3.6).
//!
//! ```text
//!   common header │ PDU specific header │ header digest │ padding    │ data                │ data digest
//!   8 bytes       │ to HLEN             │ 0 or 4 bytes  │ up to PDO  │ to PLEN less digest │ 0 or 4 bytes
//! ```
//! HLEN excludes the header digest; PLEN is the length of the whole PDU, digests included.

use crate::layout::layout;
use crate::nvme::{Cqe, Sqe};
use crate::open_enum::open_enum;
use zerocopy::{LittleEndian as LE, U16, U32};

layout! {
    /// The common header of all PDUs (TCP Transport 1.0 §3.6.2.1).
    pub struct CommonHeader(COMMON_HEADER_LEN) {
        /// [`PduType`].
        pub pdu_type: u8,
        /// Flags: [`FLAG_HDGST`], [`FLAG_DDGST`], [`FLAG_LAST`], [`FLAG_SUCCESS`].
        pub flags: u8,
        /// Length of the whole header in bytes, without its digest.
        pub hlen: u8,
        /// PDU data offset: bytes from the start of the PDU to its data; 0 without data.
        pub pdo: u8,
        /// Length of the whole PDU in bytes.
        pub plen: U32<LE>,
    }

    /// Initialize connection, from the host (TCP Transport 1.0 §3.6.2.2).
    pub struct IcReq(IC_LEN) {
        /// Common header; all flags are 0.
        pub common: CommonHeader,
        /// PDU format version: 0.
        pub pfv: U16<LE>,
        /// Host PDU data alignment: the alignment of data sent to the host, in dwords less one.
        pub hpda: u8,
        /// Digests that the host requests: [`DGST_HEADER`], [`DGST_DATA`].
        pub dgst: u8,
        /// Maximum number of outstanding R2Ts of one command, less one.
        pub maxr2t: U32<LE>,
        pub reserved: [u8; 112] = 0,
    }

    /// Initialize connection, from the controller (TCP Transport 1.0 §3.6.2.3).
    pub struct IcResp(IC_LEN) {
        /// Common header; all flags are 0.
        pub common: CommonHeader,
        /// PDU format version: 0.
        pub pfv: U16<LE>,
        /// Controller PDU data alignment: the alignment of data sent to the controller, in dwords
        /// less one.
        pub cpda: u8,
        /// Digests that the connection uses: [`DGST_HEADER`], [`DGST_DATA`].
        pub dgst: u8,
        /// Maximum data of one H2CData in bytes: at least 4096, and a multiple of 4.
        pub maxh2cdata: U32<LE>,
        pub reserved: [u8; 112] = 0,
    }

    /// A command capsule; in-capsule data follows it (TCP Transport 1.0 §3.6.2.6).
    pub struct CapsuleCmd(CAPSULE_CMD_LEN) {
        /// Common header, with the digest flags.
        pub common: CommonHeader,
        /// The command.
        pub sqe: Sqe,
    }

    /// A response capsule (TCP Transport 1.0 §3.6.2.7).
    pub struct CapsuleResp(CAPSULE_RESP_LEN) {
        /// Common header, with [`FLAG_HDGST`].
        pub common: CommonHeader,
        /// The completion.
        pub cqe: Cqe,
    }

    /// The header of H2CData and C2HData; the data follows it (TCP Transport 1.0 §3.6.2.8 and
    /// §3.6.2.9).
    pub struct Data(DATA_LEN) {
        /// Common header, with the digest flags and [`FLAG_LAST`]; C2HData also has
        /// [`FLAG_SUCCESS`].
        pub common: CommonHeader,
        /// CID of the command.
        pub cccid: U16<LE>,
        /// H2CData: TTAG of the R2T. C2HData: reserved.
        pub ttag: U16<LE>,
        /// Offset into the command's data, in bytes.
        pub datao: U32<LE>,
        /// Length of the data in bytes.
        pub datal: U32<LE>,
        pub reserved: [u8; 4] = 0,
    }

    /// Ready to Transfer: the controller requests data (TCP Transport 1.0 §3.6.2.10).
    pub struct NvmeTcpR2t(DATA_LEN) {
        /// Common header, with [`FLAG_HDGST`].
        pub common: CommonHeader,
        /// CID of the command.
        pub cccid: U16<LE>,
        /// Transfer tag chosen by the controller; the host returns it with the data.
        pub ttag: U16<LE>,
        /// Offset into the command's data, in bytes.
        pub r2to: U32<LE>,
        /// Length of the data in bytes.
        pub r2tl: U32<LE>,
        pub reserved: [u8; 4] = 0,
    }

    /// H2CTermReq and C2HTermReq: the sender ends the connection. The header of the PDU in error
    /// follows (TCP Transport 1.0 §3.6.2.4 and §3.6.2.5).
    pub struct TermReq(DATA_LEN) {
        /// Common header; all flags are 0.
        pub common: CommonHeader,
        /// Fatal error status: [`FatalError`].
        pub fes: U16<LE>,
        /// Fatal error information: the offset of the field in error, or the header digest as
        /// received.
        pub fei: U32<LE>,
        pub reserved: [u8; 10] = 0,
    }
}

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

    /// Fatal error status of a [`TermReq`] (TCP Transport 1.0 figures 19 and 21).
    pub enum FatalError(u16) {
        /// A header field is invalid; FEI is its offset.
        INVALID_PDU_HEADER_FIELD = 0x01,
        /// The PDU is unexpected in this state, or of an unknown type.
        PDU_SEQUENCE_ERROR = 0x02,
        /// The header digest is wrong; FEI is the digest as received.
        HEADER_DIGEST_ERROR = 0x03,
        /// The data lies outside of the command's data, or of the R2T's.
        DATA_TRANSFER_OUT_OF_RANGE = 0x04,
        /// The PDU has more data than was negotiated; in H2CTermReq also: the controller exceeded
        /// MAXR2T.
        DATA_TRANSFER_LIMIT_EXCEEDED = 0x05,
        /// A parameter's value is not supported; FEI is its offset.
        UNSUPPORTED_PARAMETER = 0x06,
    }

    /// SECTYPE, the first byte of TSAS in a discovery log entry (TCP Transport 1.0 figure 4).
    pub enum SecurityType(u8) {
        /// No transport security.
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
/// LAST_PDU: the PDU carries the last data of the command, or of the R2T.
pub const FLAG_LAST: u8 = 1 << 2;
/// SUCCESS: the command succeeded, and no response capsule follows.
pub const FLAG_SUCCESS: u8 = 1 << 3;
/// HDGST_ENABLE in `dgst`.
pub const DGST_HEADER: u8 = 1;
/// DDGST_ENABLE in `dgst`.
pub const DGST_DATA: u8 = 1 << 1;
/// The largest HPDA and CPDA: data aligned to 128 bytes.
pub const PDA_MAX: u8 = 31;
/// The smallest MAXH2CDATA, in bytes.
pub const MAXH2CDATA_MIN: u32 = 4096;
/// Length of the common header in bytes.
pub const COMMON_HEADER_LEN: usize = 8;
/// Length of ICReq and ICResp in bytes.
pub const IC_LEN: usize = 128;
/// Length of a command capsule's header in bytes.
pub const CAPSULE_CMD_LEN: usize = 72;
/// Length of a response capsule in bytes.
pub const CAPSULE_RESP_LEN: usize = 24;
/// Length in bytes of the headers of H2CData, C2HData and the termination requests, and of R2T.
pub const DATA_LEN: usize = 24;
/// Length of the longest termination request in bytes.
pub const TERM_REQ_MAX: usize = 152;
/// Length of a digest (CRC-32C) in bytes.
pub const DIGEST_LEN: usize = 4;
/// The port that IANA assigned to NVMe/TCP I/O.
pub const NVME_TCP_PORT: u16 = 4420;
/// The port that IANA assigned to NVMe discovery over TCP.
pub const NVME_DISCOVERY_PORT: u16 = 8009;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvme::status::NvmeStatus;
    use zerocopy::FromBytes;

    /// The PDUs are those of the Linux host and target 6.12.
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

    /// A read of 4 KiB: the C2HData header and the response capsule that the Linux target 6.12
    /// sent.
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

    /// A write of 64 KiB: the target's R2T and the host's H2CData.
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
