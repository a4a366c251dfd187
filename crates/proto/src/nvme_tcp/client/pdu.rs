//! Headers of PDUs as a controller sends them, checked before anything is believed (TCP Transport
//! 1.0 §3.6).

use super::Digests;
use crate::digest;
use crate::session::ProtocolError;
use blockmux_wire::nvmeof::tcp::{
    CapsuleResp, CommonHeader, DATA_LEN, DIGEST_LEN, Data, FLAG_DDGST, FLAG_HDGST, FatalError, NvmeTcpR2t,
    PduType, TermReq,
};
use zerocopy::{FromBytes, transmute_ref};

/// The bytes of a header: all that a controller sends behind ICResp have the same length.
pub(super) type PduHeader = [u8; DATA_LEN];

/// A PDU's header that has come, with a right digest if there is one.
#[derive(Clone, Copy, Debug)]
pub(super) struct NvmeTcpHeader {
    pub(super) header: PduHeader,
    pub(super) kind: PduType,
    /// Where its data begins.
    pub(super) data_at: usize,
    /// In bytes.
    pub(super) data_len: usize,
}

/// What the first bytes of a PDU are.
pub(super) enum ParsedNvmePdu {
    Head(NvmeTcpHeader),
    /// So many bytes are needed.
    Needs(usize),
}

/// What a controller did wrong, and what it is told about that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ControllerViolation {
    pub(super) what: &'static str,
    pub(super) reference: &'static str,
    /// `None`: nothing, as it has ended the connection itself.
    pub(super) fes: Option<FatalError>,
    /// The offset of the field, or the digest that came.
    pub(super) fei: u32,
}

impl ControllerViolation {
    /// A header's field at that offset is wrong.
    pub(super) fn field(what: &'static str, offset: u32, reference: &'static str) -> ControllerViolation {
        ControllerViolation { what, reference, fes: Some(FatalError::INVALID_PDU_HEADER_FIELD), fei: offset }
    }

    /// Another fatal error.
    pub(super) fn new(what: &'static str, fes: FatalError, reference: &'static str) -> ControllerViolation {
        ControllerViolation { what, reference, fes: Some(fes), fei: 0 }
    }

    pub(super) fn error(self) -> ProtocolError {
        ProtocolError { what: self.what, reference: self.reference }
    }
}

/// Reads a header from the front of `bytes`, as they come behind ICResp.
#[inline]
pub(super) fn parse(bytes: &[u8], digests: Digests) -> Result<ParsedNvmePdu, ControllerViolation> {
    let Some(header) = bytes.first_chunk::<DATA_LEN>() else { return Ok(ParsedNvmePdu::Needs(DATA_LEN)) };
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
            "sent a PDU with or without a header digest, against what was agreed on",
            1,
            COMMON,
        ));
    }
    let head_len = if digests.header { DATA_LEN.saturating_add(DIGEST_LEN) } else { DATA_LEN };
    let Some(whole) = bytes.get(..head_len) else { return Ok(ParsedNvmePdu::Needs(head_len)) };
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
                "sent data with or without a digest, against what was agreed on",
                1,
                COMMON,
            ));
        }
        head.data_at = common.pdo.into();
        head.data_len = data.datal.get() as usize;
        // We ask for no alignment beyond double words.
        if head.data_at < head_len || head.data_at & 3 != 0 {
            return Err(ControllerViolation::field("sent data at a wrong place in its PDU", 3, COMMON));
        }
        if head.data_len == 0 {
            return Err(ControllerViolation::field("sent data of no length", 16, "TCP Transport §3.6.2.9"));
        }
    }
    if plen != head.data_end(digests) {
        return Err(ControllerViolation::field(
            "sent a PDU whose length is not that of its parts",
            4,
            COMMON,
        ));
    }
    Ok(ParsedNvmePdu::Head(head))
}

impl NvmeTcpHeader {
    /// How long the whole PDU is, in bytes.
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

/// What the controller says of us as it ends the connection.
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
    what: "sent a PDU that does not belong here",
    reference: "TCP Transport §3.6.2",
    fes: Some(FatalError::INVALID_PDU_HEADER_FIELD),
    fei: 0,
};
