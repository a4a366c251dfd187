//! iSER: what both sides have of it (RFC 7145, RFC 5047).
//!
//! A message is a PDU behind an iSER header. What a session sends by way of its outbox is cut into messages here: every PDU
//! says in its header how long it is. The data of commands goes other ways, which the sessions' datamovers know.
//! `docs/decisions/0017-iser-within-iscsi.md` says why the seam is where it is.

use crate::outbox::{Outbox, Piece};
use crate::rdma::Head;
use crate::session::ProtocolError;
use blockmux_volume::Seg;
use blockmux_wire::iscsi::{BHS_LEN, Bhs, padding};
use blockmux_wire::iser::{ControlHeader, HEADER_LEN, IserOpcode};
use smallvec::SmallVec;
use zerocopy::{FromBytes, IntoBytes};

/// A PDU that has come as a message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) header: ControlHeader,
    pub(super) bhs: Bhs,
    /// Additional header segments.
    pub(super) ahs: SmallVec<[u8; 16]>,
    /// The data segment, without padding, in the receive buffer; `None` if there is none.
    pub(super) data: Option<Seg>,
}

impl Message {
    /// Takes a message apart.
    ///
    /// # Errors
    /// If it is not one iSCSI PDU behind a header for that.
    #[inline]
    pub(super) fn parse(message: &Seg) -> Result<Message, ProtocolError> {
        let mut heads = [0; HEADERS_LEN];
        let len = message.len();
        if len < HEADERS_LEN {
            return Err(error("sent a message without the headers of iSER and iSCSI"));
        }
        message.copy_to(&mut heads);
        let Ok((header, rest)) = ControlHeader::read_from_prefix(&heads) else { return Err(NO_PDU) };
        let Ok(bhs) = Bhs::read_from_bytes(rest) else { return Err(NO_PDU) };
        if header.opcode() != IserOpcode::CONTROL {
            // Hello (RFC 7145 §9.3) is not supported; see decision 39.
            return Err(NO_PDU);
        }
        let (ahs_len, data_len) = (bhs.ahs_len(), bhs.data_segment_length.get() as usize);
        let data_at = HEADERS_LEN.saturating_add(ahs_len);
        let end = data_at.saturating_add(data_len);
        if !(end..=end.saturating_add(padding(data_len))).contains(&len) {
            return Err(error("sent a message of another length than its PDU has"));
        }
        let mut ahs = SmallVec::new();
        if ahs_len > 0 {
            ahs.resize(ahs_len, 0);
            message.slice(HEADERS_LEN, ahs_len).copy_to(&mut ahs);
        }
        // Most messages have none, and a piece of memory is counted.
        let data = (data_len > 0).then(|| message.slice(data_at, data_len));
        Ok(Message { header, bhs, ahs, data })
    }

    /// How long the data segment is, in bytes.
    #[inline]
    pub(super) fn data_len(&self) -> usize {
        self.data.as_ref().map_or(0, Seg::len)
    }
}

/// The opcode of the next PDU in an outbox, and how long that PDU is with its padding, in bytes.
#[inline]
pub(super) fn next_pdu(outbox: &Outbox) -> Option<(Bhs, usize)> {
    let Some(Piece::Head(bytes)) = outbox.pieces().next() else { return None };
    let (bhs, _) = Bhs::read_from_prefix(bytes).ok()?;
    let data_len = bhs.data_segment_length.get() as usize;
    let len =
        BHS_LEN.saturating_add(bhs.ahs_len()).saturating_add(data_len).saturating_add(padding(data_len));
    Some((bhs, len))
}

/// Takes the next PDU, of `len` bytes, from an outbox, and has `send` see it as a message.
#[inline]
pub(super) fn send_pdu(outbox: &mut Outbox, len: usize, send: impl FnOnce(&[u8])) {
    let Some(Piece::Head(bytes)) = outbox.pieces().next() else { return };
    let pdu = bytes.get(..len).unwrap_or(bytes);
    let taken = pdu.len();
    let mut message = [0; HEADERS_LEN];
    let (header, place) = message.split_at_mut(HEADER_LEN);
    header.copy_from_slice(ControlHeader::new().as_bytes());
    // As most: a header and no data.
    if taken == place.len() {
        place.copy_from_slice(pdu);
        send(&message);
    } else {
        let mut message = Head::from_slice(header);
        message.extend_from_slice(pdu);
        send(&message);
    }
    outbox.consume(taken);
}

fn error(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "RFC 7145 §9.2" }
}

const NO_PDU: ProtocolError = ProtocolError {
    what: "sent a message whose iSER header is none of an iSCSI PDU",
    reference: "RFC 7145 §9.2",
};

/// Of both headers, in bytes.
pub(super) const HEADERS_LEN: usize = HEADER_LEN + BHS_LEN;

/// The most additional header segments of a PDU, in bytes.
pub(super) const MAX_AHS: usize = 255 * 4;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iscsi::digests::Digests;
    use crate::iscsi::pdu;
    use blockmux_wire::iscsi::U24;
    use zerocopy::FromZeros;

    fn bhs(data_len: u32, ahs: u8) -> Bhs {
        let mut bhs = Bhs::new_zeroed();
        (bhs.opcode, bhs.total_ahs_length) = (0x21, ahs);
        bhs.data_segment_length = U24::new(data_len);
        bhs
    }

    fn message(flags: u8, bhs: &Bhs, rest: usize) -> Seg {
        let mut bytes = vec![flags];
        bytes.resize(HEADER_LEN, 0);
        bytes.extend(bhs.as_bytes());
        bytes.extend((0..rest).map(|n| n as u8));
        Seg::from_slice(&bytes)
    }

    #[test]
    fn a_message_is_taken_apart_with_or_without_padding() {
        for rest in 9..=12 {
            let parsed = Message::parse(&message(0x10, &bhs(5, 1), rest)).unwrap();
            assert_eq!(
                (parsed.ahs.as_slice(), parsed.data.map(|data| data.to_vec())),
                (&[0, 1, 2, 3][..], Some(vec![4, 5, 6, 7, 8]))
            );
        }
    }

    #[test]
    fn a_message_that_is_no_pdu_is_refused() {
        for rest in [0, 8, 13, 100] {
            assert!(Message::parse(&message(0x10, &bhs(5, 1), rest)).is_err(), "{rest} bytes");
        }
        for flags in [0, 0x20, 0x30, 0xf0] {
            assert_eq!(Message::parse(&message(flags, &bhs(0, 0), 0)).unwrap_err(), NO_PDU);
        }
        for len in 0..HEADERS_LEN {
            assert!(Message::parse(&Seg::from_slice(&vec![0x10; len])).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn an_outbox_is_cut_where_pdus_end() {
        let mut outbox = Outbox::default();
        for len in [0, 3, 8] {
            pdu::push(&mut outbox, Digests::default(), bhs(len, 0).as_bytes(), &vec![7; len as usize]);
        }
        let mut lens = Vec::new();
        while let Some((bhs, len)) = next_pdu(&outbox) {
            send_pdu(&mut outbox, len, |message| {
                assert_eq!(message[0], 0x10);
                assert_eq!(message[HEADER_LEN..][..BHS_LEN], *bhs.as_bytes());
                lens.push(message.len());
            });
        }
        assert_eq!(lens, [76, 80, 84]);
        assert!(outbox.is_empty());
    }
}
