//! PDUs as bytes: where the parts of one lie in the stream, and how one is sent.

use super::digests::Digests;
use crate::digest;
use crate::outbox::Outbox;
use crate::session::ProtocolError;
use blockmux_volume::{Crc32c, Pool, SgList};
use blockmux_wire::iscsi::{BHS_LEN, Bhs, padding};
use zerocopy::FromBytes;

/// A whole header that has come, with a right digest if there is one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) bhs: Bhs,
    /// Of the header with its additional segments and its digest, in bytes.
    pub(super) len: usize,
    /// Of the data segment that follows, in bytes, without padding.
    pub(super) data_len: usize,
}

impl Head {
    /// The data segment in `bytes`, which begin with this header, and how long the whole PDU is.
    ///
    /// # Errors
    /// How long it is, if it has not come whole.
    #[inline]
    pub(super) fn segment<'a>(&self, bytes: &'a [u8], digests: Digests) -> Result<(&'a [u8], usize), usize> {
        let end = self.len.saturating_add(self.data_len);
        let whole = end.saturating_add(digests.tail_len(self.data_len));
        match bytes.get(self.len..end) {
            Some(data) if bytes.len() >= whole => Ok((data, whole)),
            _ => Err(whole),
        }
    }
}

/// What the first bytes of a PDU are.
pub(super) enum Parsed {
    Head(Head),
    /// So many bytes are needed.
    Needs(usize),
}

/// Reads a header from the front of `bytes`.
///
/// # Errors
/// If its digest is wrong. Then not even the length of the PDU can be believed (RFC 7143 §7.8).
#[inline]
pub(super) fn parse(bytes: &[u8], digests: Digests) -> Result<Parsed, ProtocolError> {
    let Ok((bhs, _)) = Bhs::read_from_prefix(bytes) else { return Ok(Parsed::Needs(BHS_LEN)) };
    let covered = BHS_LEN.saturating_add(bhs.ahs_len());
    let len = covered.saturating_add(digests.header_len());
    let Some(whole) = bytes.get(..len) else { return Ok(Parsed::Needs(len)) };
    if digests.header {
        let (header, sent) = whole.split_at(covered);
        if digest::of(header) != sent {
            return Err(ProtocolError {
                what: "sent a header whose digest is wrong",
                reference: "RFC 7143 §7.8, Digest Errors",
            });
        }
    }
    Ok(Parsed::Head(Head { bhs, len, data_len: bhs.data_segment_length.get() as usize }))
}

/// Sends a header with data that is copied: short, or not from a volume.
pub(super) fn push(outbox: &mut Outbox, digests: Digests, header: &[u8], data: &[u8]) {
    push_header(outbox, digests, header);
    if data.is_empty() {
        return;
    }
    outbox.push_head(data);
    let mut crc = Crc32c::default();
    if digests.data {
        crc.add(data);
    }
    push_tail(outbox, digests, data.len(), crc);
}

/// Sends a header with `len` bytes at `offset` of `data`, by reference as far as a data digest lets us.
#[inline]
pub(super) fn push_lent(
    outbox: &mut Outbox,
    digests: Digests,
    pool: &Pool,
    header: &[u8],
    data: &SgList,
    (offset, len): (usize, usize),
) {
    push_header(outbox, digests, header);
    let mut crc = Crc32c::default();
    if digests.data {
        crc = digest::push(outbox, pool, &data.slice(offset, len));
    } else {
        outbox.push_part(data, offset, len);
    }
    push_tail(outbox, digests, len, crc);
}

#[inline]
fn push_header(outbox: &mut Outbox, digests: Digests, header: &[u8]) {
    outbox.push_head(header);
    if digests.header {
        outbox.push_head(&digest::of(header));
    }
}

/// Padding and digest behind `len` bytes of data.
#[inline]
fn push_tail(outbox: &mut Outbox, digests: Digests, len: usize, mut crc: Crc32c) {
    let zeroes = [0; 3];
    let padding = zeroes.get(..padding(len)).unwrap_or_default();
    if !padding.is_empty() {
        outbox.push_head(padding);
    }
    if digests.data {
        crc.add(padding);
        outbox.push_head(&crc.to_le_bytes());
    }
}
