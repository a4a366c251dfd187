//! Location of a PDU's parts in received bytes.

use super::digests::IscsiDigests;
use crate::digest;
use crate::driver::session::ProtocolError;
use blockmux_wire::iscsi::{BHS_LEN, Bhs};
use zerocopy::FromBytes;

/// A complete header with a correct digest, if digests are in use.
#[derive(Clone, Copy, Debug)]
pub(super) struct IscsiHeader {
    pub(super) bhs: Bhs,
    /// Length of the header with AHS and digest, in bytes.
    pub(super) len: usize,
    /// Length of the data segment that follows, in bytes, without padding.
    pub(super) data_len: usize,
}

impl IscsiHeader {
    /// Returns the data segment and the length of the whole PDU. `bytes` begin with this header.
    ///
    /// # Errors
    /// The length of the whole PDU, if it is incomplete.
    #[inline]
    pub(super) fn segment<'a>(
        &self,
        bytes: &'a [u8],
        digests: IscsiDigests,
    ) -> Result<(&'a [u8], usize), usize> {
        let end = self.len.saturating_add(self.data_len);
        let whole = end.saturating_add(digests.tail_len(self.data_len));
        match bytes.get(self.len..end) {
            Some(data) if bytes.len() >= whole => Ok((data, whole)),
            _ => Err(whole),
        }
    }
}

/// The result of parsing the first bytes of a PDU.
pub(super) enum ParsedIscsiPdu {
    Head(IscsiHeader),
    /// More bytes are needed, this many in all.
    Incomplete(usize),
}

/// Parses a header at the start of `bytes`.
///
/// # Errors
/// If the header digest is wrong. The length of the PDU is then unknown (RFC 7143 §7.8).
#[inline]
pub(super) fn parse(bytes: &[u8], digests: IscsiDigests) -> Result<ParsedIscsiPdu, ProtocolError> {
    let Ok((bhs, _)) = Bhs::read_from_prefix(bytes) else {
        return Ok(ParsedIscsiPdu::Incomplete(BHS_LEN));
    };
    let covered = BHS_LEN.saturating_add(bhs.ahs_len());
    let len = covered.saturating_add(digests.header_len());
    let Some(whole) = bytes.get(..len) else { return Ok(ParsedIscsiPdu::Incomplete(len)) };
    if digests.header {
        let (header, sent) = whole.split_at(covered);
        if digest::of(header) != sent {
            return Err(ProtocolError {
                what: "sent a header with a wrong digest",
                reference: "RFC 7143 §7.8, Digest Errors",
            });
        }
    }
    Ok(ParsedIscsiPdu::Head(IscsiHeader { bhs, len, data_len: bhs.data_segment_length.get() as usize }))
}
