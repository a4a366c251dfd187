//! iSER for both sides (RFC 7145, RFC 5047).
//!
//! An iSER message is a PDU with an iSER header: [`IserMessage`] is a received one, and `sender`
//! sends them. The sessions' datamovers transfer the data of commands.
//! `docs/decisions/0017-iser-is-iscsi-with-another-datamover.md` explains the structure.

use crate::driver::session::ProtocolError;
use blockmux_volume::Seg;
use blockmux_wire::iscsi::{BHS_LEN, Bhs, padding};
use blockmux_wire::iser::{ControlHeader, HEADER_LEN, IserOpcode};
use smallvec::SmallVec;
use zerocopy::FromBytes;

/// A PDU received as an iSER message.
#[derive(Debug)]
pub(super) struct IserMessage {
    pub(super) header: ControlHeader,
    pub(super) bhs: Bhs,
    /// Additional header segments.
    pub(super) ahs: SmallVec<[u8; 16]>,
    /// The data segment in the receive buffer, without padding; `None` if empty.
    pub(super) data: Option<Seg>,
}

impl IserMessage {
    /// Parses a message.
    ///
    /// # Errors
    /// If it is not one iSCSI PDU with an iSER control header.
    #[inline]
    pub(super) fn parse(message: &Seg) -> Result<IserMessage, ProtocolError> {
        let mut heads = [0; HEADERS_LEN];
        let len = message.len();
        if len < HEADERS_LEN {
            return Err(error("sent a message without the headers of iSER and iSCSI"));
        }
        message.copy_to(&mut heads);
        let Ok((header, rest)) = ControlHeader::read_from_prefix(&heads) else { return Err(NO_PDU) };
        let Ok(bhs) = Bhs::read_from_bytes(rest) else { return Err(NO_PDU) };
        if header.opcode() != IserOpcode::CONTROL {
            // Hello messages (RFC 7145 §9.3) are not supported; see decision 39.
            return Err(NO_PDU);
        }
        let (ahs_len, data_len) = (bhs.ahs_len(), bhs.data_segment_length.get() as usize);
        let data_at = HEADERS_LEN.saturating_add(ahs_len);
        let end = data_at.saturating_add(data_len);
        if !(end..=end.saturating_add(padding(data_len))).contains(&len) {
            return Err(error("sent a message whose length does not match its PDU"));
        }
        let mut ahs = SmallVec::new();
        if ahs_len > 0 {
            ahs.resize(ahs_len, 0);
            message.slice(HEADERS_LEN, ahs_len).copy_to(&mut ahs);
        }
        // Most messages have none, and a slice costs a reference count.
        let data = (data_len > 0).then(|| message.slice(data_at, data_len));
        Ok(IserMessage { header, bhs, ahs, data })
    }

    /// Length of the data segment, in bytes.
    #[inline]
    pub(super) fn data_len(&self) -> usize {
        self.data.as_ref().map_or(0, Seg::len)
    }
}

fn error(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "RFC 7145 §9.2" }
}

const NO_PDU: ProtocolError =
    ProtocolError { what: "sent a message without an iSER control header", reference: "RFC 7145 §9.2" };

/// Length of the iSER header and the BHS, in bytes.
pub(super) const HEADERS_LEN: usize = HEADER_LEN + BHS_LEN;

/// Maximum length of the additional header segments of a PDU, in bytes.
pub(super) const MAX_AHS: usize = 255 * 4;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_wire::iscsi::U24;
    use zerocopy::{FromZeros, IntoBytes};

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
    fn a_message_is_parsed_with_or_without_padding() {
        for rest in 9..=12 {
            let parsed = IserMessage::parse(&message(0x10, &bhs(5, 1), rest)).unwrap();
            assert_eq!(
                (parsed.ahs.as_slice(), parsed.data.map(|data| data.to_vec())),
                (&[0, 1, 2, 3][..], Some(vec![4, 5, 6, 7, 8]))
            );
        }
    }

    #[test]
    fn a_message_that_is_not_a_pdu_is_refused() {
        for rest in [0, 8, 13, 100] {
            assert!(IserMessage::parse(&message(0x10, &bhs(5, 1), rest)).is_err(), "{rest} bytes");
        }
        for flags in [0, 0x20, 0x30, 0xf0] {
            assert_eq!(IserMessage::parse(&message(flags, &bhs(0, 0), 0)).unwrap_err(), NO_PDU);
        }
        for len in 0..HEADERS_LEN {
            assert!(IserMessage::parse(&Seg::from_slice(&vec![0x10; len])).is_err(), "{len} bytes");
        }
    }
}
