//! Checks the headers of a controller's PDUs before their content is used (TCP Transport 1.0 §3.6).

use super::Digests;
use crate::digest;
use crate::driver::session::ProtocolError;
use blockmux_wire::nvmeof::tcp::{
    CapsuleResp, CommonHeader, DATA_LEN, DIGEST_LEN, Data, FLAG_DDGST, FLAG_HDGST, FatalError, NvmeTcpR2t,
    PduType, TermReq,
};
use zerocopy::{FromBytes, transmute_ref};

/// The bytes of a header: all PDUs of a controller after ICResp have headers of this length.
pub(super) type PduHeader = [u8; DATA_LEN];

/// A received PDU header, whose digest was correct if there is one.
#[derive(Clone, Copy, Debug)]
pub(super) struct NvmeTcpHeader {
    pub(super) header: PduHeader,
    pub(super) kind: PduType,
    /// Offset of the data in the PDU.
    pub(super) data_at: usize,
    /// Length of the data, in bytes.
    pub(super) data_len: usize,
}

/// Result of [`parse`].
pub(super) enum ParsedNvmePdu {
    Head(NvmeTcpHeader),
    /// This many bytes are needed.
    Incomplete(usize),
}

/// A protocol violation by a controller, and the fields of the H2CTermReq that reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ControllerViolation {
    pub(super) what: &'static str,
    pub(super) reference: &'static str,
    /// Fatal Error Status; `None` if the controller ended the connection itself.
    pub(super) fes: Option<FatalError>,
    /// Fatal Error Information: the offset of the field, or the received digest.
    pub(super) fei: u32,
}

impl ControllerViolation {
    /// A violation by the header field at this offset.
    pub(super) fn field(what: &'static str, offset: u32, reference: &'static str) -> ControllerViolation {
        ControllerViolation { what, reference, fes: Some(FatalError::INVALID_PDU_HEADER_FIELD), fei: offset }
    }

    /// A violation with another fatal error status.
    pub(super) fn new(what: &'static str, fes: FatalError, reference: &'static str) -> ControllerViolation {
        ControllerViolation { what, reference, fes: Some(fes), fei: 0 }
    }

    pub(super) fn error(self) -> ProtocolError {
        ProtocolError { what: self.what, reference: self.reference }
    }
}

/// Reads the header at the beginning of `bytes`, after ICResp.
#[inline]
pub(super) fn parse(bytes: &[u8], digests: Digests) -> Result<ParsedNvmePdu, ControllerViolation> {
    let Some(header) = bytes.first_chunk::<DATA_LEN>() else {
        return Ok(ParsedNvmePdu::Incomplete(DATA_LEN));
    };
    let (common, _) = CommonHeader::ref_from_prefix(header).map_err(|_| UNKNOWN)?;
    let kind = PduType(common.pdu_type);
    if !matches!(kind, PduType::CAPSULE_RESP | PduType::C2H_DATA | PduType::R2T | PduType::C2H_TERM_REQ) {
        return Err(UNKNOWN);
    }
    if usize::from(common.hlen) != DATA_LEN {
        return Err(ControllerViolation::field("sent a header of a wrong length", 2, COMMON));
    }
    if kind == PduType::C2H_TERM_REQ {
        return Err(ended(transmute_ref!(header)));
    }
    if (common.flags & FLAG_HDGST != 0) != digests.header {
        return Err(ControllerViolation::field(
            "sent a PDU whose header digest flag is not as negotiated",
            1,
            COMMON,
        ));
    }
    let head_len = if digests.header { DATA_LEN.saturating_add(DIGEST_LEN) } else { DATA_LEN };
    let Some(whole) = bytes.get(..head_len) else { return Ok(ParsedNvmePdu::Incomplete(head_len)) };
    if let Some(sent) = whole.get(DATA_LEN..).and_then(|sent| sent.first_chunk())
        && digest::of(header) != *sent
    {
        let fei = u32::from_le_bytes(*sent);
        let fes = Some(FatalError::HEADER_DIGEST_ERROR);
        return Err(ControllerViolation {
            what: "sent a header whose digest is wrong",
            reference: "TCP Transport §3.5.2",
            fes,
            fei,
        });
    }
    let mut head = NvmeTcpHeader { header: *header, kind, data_at: head_len, data_len: 0 };
    let plen = common.plen.get() as usize;
    if kind == PduType::C2H_DATA {
        let data: &Data = transmute_ref!(header);
        if (common.flags & FLAG_DDGST != 0) != digests.data {
            return Err(ControllerViolation::field(
                "sent data whose digest flag is not as negotiated",
                1,
                COMMON,
            ));
        }
        head.data_at = common.pdo.into();
        head.data_len = data.datal.get() as usize;
        // ICReq requests no alignment beyond dwords.
        if head.data_at < head_len || head.data_at & 3 != 0 {
            return Err(ControllerViolation::field("sent data at a wrong offset in its PDU", 3, COMMON));
        }
        if head.data_len == 0 {
            return Err(ControllerViolation::field("sent data of length 0", 16, "TCP Transport §3.6.2.9"));
        }
    }
    if plen != head.data_end(digests) {
        return Err(ControllerViolation::field("sent a PDU whose PLEN does not match its parts", 4, COMMON));
    }
    Ok(ParsedNvmePdu::Head(head))
}

impl NvmeTcpHeader {
    /// Length of the whole PDU, in bytes.
    #[inline]
    pub(super) fn data_end(&self, digests: Digests) -> usize {
        let tail = if digests.data && self.data_len > 0 { DIGEST_LEN } else { 0 };
        self.data_at.saturating_add(self.data_len).saturating_add(tail)
    }

    #[inline]
    pub(super) fn as_data(&self) -> &Data {
        transmute_ref!(&self.header)
    }

    #[inline]
    pub(super) fn as_response(&self) -> &CapsuleResp {
        transmute_ref!(&self.header)
    }

    #[inline]
    pub(super) fn as_r2t(&self) -> &NvmeTcpR2t {
        transmute_ref!(&self.header)
    }
}

/// The error for a C2HTermReq.
#[cold]
pub(super) fn ended(request: &TermReq) -> ControllerViolation {
    let what = match FatalError(request.fes.get()) {
        FatalError::INVALID_PDU_HEADER_FIELD => "ended the connection: a field of a header is invalid",
        FatalError::PDU_SEQUENCE_ERROR => "ended the connection: a PDU out of sequence",
        FatalError::HEADER_DIGEST_ERROR => "ended the connection: a wrong header digest",
        FatalError::DATA_TRANSFER_OUT_OF_RANGE => "ended the connection: data out of range",
        FatalError::DATA_TRANSFER_LIMIT_EXCEEDED => "ended the connection: more data than its limit",
        FatalError::UNSUPPORTED_PARAMETER => "ended the connection: a parameter that it does not support",
        _ => "ended the connection with a fatal error",
    };
    ControllerViolation { what, reference: "TCP Transport §3.6.2.5, C2HTermReq", fes: None, fei: 0 }
}

const COMMON: &str = "TCP Transport §3.6.2.1";
const UNKNOWN: ControllerViolation = ControllerViolation {
    what: "sent a PDU of an unexpected type",
    reference: "TCP Transport §3.6.2",
    fes: Some(FatalError::INVALID_PDU_HEADER_FIELD),
    fei: 0,
};
