//! Checks the common header of a host's PDUs before their content is used (TCP Transport 1.0
//! §3.6.2.1).

use crate::digest;
use crate::driver::session::ProtocolError;
use blockmux_wire::nvmeof::tcp::*;
use std::mem::offset_of;
use zerocopy::FromBytes;

/// The negotiated digests of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct NvmeTcpDigests {
    pub(super) header: bool,
    pub(super) data: bool,
}

/// A protocol violation by a host, with the fields of the C2HTermReq that reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostViolation {
    pub(super) status: FatalError,
    pub(super) information: u32,
    pub(super) error: ProtocolError,
}

/// A PDU with a valid common header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PduFrame {
    pub(super) kind: PduType,
    /// Beginning and end of the data, as offsets in the PDU in bytes.
    pub(super) data: (usize, usize),
    /// Length of the whole PDU, in bytes.
    pub(super) len: usize,
}

impl NvmeTcpDigests {
    pub(super) fn header_len(self) -> usize {
        if self.header { DIGEST_LEN } else { 0 }
    }

    pub(super) fn data_len(self) -> usize {
        if self.data { DIGEST_LEN } else { 0 }
    }
}

impl HostViolation {
    /// A violation by the header field at this offset.
    pub(super) fn field(offset: usize, what: &'static str) -> HostViolation {
        HostViolation::new(FatalError::INVALID_PDU_HEADER_FIELD, offset as u32, what)
    }

    pub(super) fn new(status: FatalError, information: u32, what: &'static str) -> HostViolation {
        HostViolation {
            status,
            information,
            error: ProtocolError { what, reference: "TCP Transport 1.0 §3.5, §3.6" },
        }
    }
}

/// Checks the common header of a PDU, after the connection was initialized. `in_capsule` is the
/// longest in-capsule data in bytes.
pub(super) fn check(
    common: &CommonHeader,
    digests: NvmeTcpDigests,
    in_capsule: usize,
) -> Result<PduFrame, HostViolation> {
    let kind = PduType(common.pdu_type);
    let hlen = match kind {
        PduType::CAPSULE_CMD => CAPSULE_CMD_LEN,
        PduType::H2C_DATA | PduType::H2C_TERM_REQ => DATA_LEN,
        PduType::IC_REQ => {
            let what = "sent ICReq twice";
            return Err(HostViolation::new(FatalError::PDU_SEQUENCE_ERROR, 0, what));
        }
        _ => return Err(HostViolation::field(0, "sent a PDU of a type that a host does not send")),
    };
    if usize::from(common.hlen) != hlen {
        return Err(HostViolation::field(offset_of!(CommonHeader, hlen), "sent a header of a wrong length"));
    }
    let (len, pdo) = (common.plen.get() as usize, usize::from(common.pdo));
    let wrong_len = HostViolation::field(offset_of!(CommonHeader, plen), "sent a PDU of a wrong length");
    if kind == PduType::H2C_TERM_REQ {
        let fits = (DATA_LEN..=TERM_REQ_MAX).contains(&len);
        return if fits { Ok(PduFrame { kind, data: (len, len), len }) } else { Err(wrong_len) };
    }
    let head = hlen.saturating_add(digests.header_len());
    let has_data = len > head;
    let flags = |digests: NvmeTcpDigests| {
        let header = if digests.header { FLAG_HDGST } else { 0 };
        header | if digests.data && has_data { FLAG_DDGST } else { 0 }
    };
    if common.flags & (FLAG_HDGST | FLAG_DDGST) != flags(digests) {
        let what = "sent digests that were not negotiated";
        return Err(HostViolation::field(offset_of!(CommonHeader, flags), what));
    }
    if !has_data {
        let is_whole = len == head && kind == PduType::CAPSULE_CMD;
        return if is_whole { Ok(PduFrame { kind, data: (len, len), len }) } else { Err(wrong_len) };
    }
    if pdo < head || pdo % 4 != 0 || pdo > MAX_PDO {
        return Err(HostViolation::field(offset_of!(CommonHeader, pdo), "sent data at a wrong offset"));
    }
    let longest = match kind {
        PduType::CAPSULE_CMD => in_capsule,
        _ => MAXH2CDATA as usize,
    };
    let data_len = len.checked_sub(pdo.saturating_add(digests.data_len()));
    match data_len {
        Some(1..) if data_len <= Some(longest) => {
            Ok(PduFrame { kind, data: (pdo, len.saturating_sub(digests.data_len())), len })
        }
        Some(1..) if kind == PduType::H2C_DATA => {
            let what = "sent more data in a PDU than MAXH2CDATA";
            Err(HostViolation::new(FatalError::DATA_TRANSFER_LIMIT_EXCEEDED, 0, what))
        }
        _ => Err(wrong_len),
    }
}

/// Checks the digest that follows a header of `hlen` bytes; `bytes` has both.
pub(super) fn check_header_digest(bytes: &[u8], hlen: usize) -> Result<(), HostViolation> {
    let (header, rest) = bytes.split_at(hlen.min(bytes.len()));
    let sent = u32::read_from_prefix(rest).map_or(0, |(sent, _)| sent);
    if digest::of(header) == sent.to_ne_bytes() {
        return Ok(());
    }
    let what = "sent a header whose digest is wrong";
    Err(HostViolation::new(FatalError::HEADER_DIGEST_ERROR, u32::from_le(sent), what))
}

/// MAXH2CDATA in bytes: as long as the longest data of a command.
pub(super) const MAXH2CDATA: u32 = crate::nvme::MAX_DATA as u32;
/// Largest PDO: the header with its digest and the largest padding that CPDA could require.
const MAX_PDO: usize = 128;
