//! PDUs as bytes of a stream that has come: where the parts of one lie.

use super::digests::IscsiDigests;
use crate::digest;
use crate::session::ProtocolError;
use blockmux_wire::iscsi::{BHS_LEN, Bhs};
use zerocopy::FromBytes;

/// A whole header that has come, with a right digest if there is one.
#[derive(Clone, Copy, Debug)]
pub(super) struct IscsiHeader {
    pub(super) bhs: Bhs,
    /// Of the header with its additional segments and its digest, in bytes.
    pub(super) len: usize,
    /// Of the data segment that follows, in bytes, without padding.
    pub(super) data_len: usize,
}

impl IscsiHeader {
    /// The data segment in `bytes`, which begin with this header, and how long the whole PDU is.
    ///
    /// # Errors
    /// How long it is, if it has not come whole.
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

/// What the first bytes of a PDU are.
pub(super) enum ParsedIscsiPdu {
    Head(IscsiHeader),
    /// So many bytes are needed.
    Needs(usize),
}

/// Reads a header from the front of `bytes`.
///
/// # Errors
/// If its digest is wrong. Then not even the length of the PDU can be believed (RFC 7143 §7.8).
#[inline]
pub(super) fn parse(bytes: &[u8], digests: IscsiDigests) -> Result<ParsedIscsiPdu, ProtocolError> {
    let Ok((bhs, _)) = Bhs::read_from_prefix(bytes) else { return Ok(ParsedIscsiPdu::Needs(BHS_LEN)) };
    let covered = BHS_LEN.saturating_add(bhs.ahs_len());
    let len = covered.saturating_add(digests.header_len());
    let Some(whole) = bytes.get(..len) else { return Ok(ParsedIscsiPdu::Needs(len)) };
    if digests.header {
        let (header, sent) = whole.split_at(covered);
        if digest::of(header) != sent {
            return Err(ProtocolError {
                what: "sent a header whose digest is wrong",
                reference: "RFC 7143 §7.8, Digest Errors",
            });
        }
    }
    Ok(ParsedIscsiPdu::Head(IscsiHeader { bhs, len, data_len: bhs.data_segment_length.get() as usize }))
}
