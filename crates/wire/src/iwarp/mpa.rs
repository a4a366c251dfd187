//! MPA: framing on a byte stream (RFC 5044), and connection set-up (RFC 6581).
//!
//! A connection begins with a request and a reply, each a [`ReqRepFrame`] followed by private data.
//! After that each direction is a sequence of FPDUs: a length, that many bytes, padding to a
//! multiple of four, a CRC.

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, U16};

layout! {
    /// A request or a reply (RFC 5044 §7.1.1); private data follows.
    pub struct ReqRepFrame(REQ_REP_LEN) {
        /// [`KEY_REQUEST`] or [`KEY_REPLY`].
        pub key: [u8; 16],
        /// `FLAG_*`.
        pub flags: u8,
        /// [`REVISION_1`] or [`REVISION_2`].
        pub rev: u8,
        /// Length of private data in bytes, including [`Enhanced`]; at most [`MAX_PRIVATE_DATA`].
        pub pd_length: U16<BE>,
    }
}

layout! {
    /// Enhanced set-up data, which private data begins with if [`FLAG_ENHANCED`] is set (RFC 6581
    /// §9).
    #[derive(Default)]
    pub struct Enhanced(ENHANCED_LEN) {
        /// [`IRD_PEER_TO_PEER`], [`IRD_RTR_SEND`], and the sender's IRD: the RDMA Reads that it can
        /// answer at a time.
        pub ird: U16<BE>,
        /// [`ORD_RTR_WRITE`], [`ORD_RTR_READ`], and the sender's ORD: the RDMA Reads that it may
        /// have in flight.
        pub ord: U16<BE>,
    }
}

impl Enhanced {
    /// Whether ORD and IRD are negotiated here.
    #[must_use]
    pub const fn says_reads(&self) -> bool {
        self.ird() != READS_UNSAID && self.ord() != READS_UNSAID
    }

    /// IRD of the sender.
    #[inline]
    #[must_use]
    pub const fn ird(&self) -> u16 {
        self.ird.get() & READS_MASK
    }

    /// ORD of the sender.
    #[inline]
    #[must_use]
    pub const fn ord(&self) -> u16 {
        self.ord.get() & READS_MASK
    }
}

open_enum! {
    /// Error codes of MPA in a Terminate message, of type 0 (RFC 5044 §8, RFC 6581 §8).
    pub enum MpaError(u8) {
        /// The stream was closed or lost.
        CONNECTION_LOST = 0x01,
        /// The CRC of an FPDU is wrong.
        CRC_MISMATCH = 0x02,
        /// A marker and the length of an FPDU do not match.
        MARKER_MISMATCH = 0x03,
        /// An invalid request or reply.
        INVALID_REQ_REP = 0x04,
        /// Local catastrophic error, on the side that sends the message.
        LOCAL_CATASTROPHIC = 0x05,
        /// The peer's ORD exceeds the IRD.
        INSUFFICIENT_IRD = 0x06,
        /// The peer chose none of the offered RTR messages.
        NO_MATCHING_RTR = 0x07,
    }
}

/// Length of the padding after a ULPDU of `len` bytes, in bytes (RFC 5044 §4.1).
#[inline]
#[must_use]
pub const fn padding(len: u16) -> usize {
    (len as usize).wrapping_add(LENGTH_LEN).wrapping_neg() % 4
}

/// Length in bytes of the FPDU of a ULPDU of `len` bytes.
#[inline]
#[must_use]
pub const fn fpdu_len(len: u16) -> usize {
    // At most 65544.
    LENGTH_LEN + len as usize + padding(len) + CRC_LEN
}

/// Value of `key` in a request.
pub const KEY_REQUEST: [u8; 16] = *b"MPA ID Req Frame";
/// Value of `key` in a reply.
pub const KEY_REPLY: [u8; 16] = *b"MPA ID Rep Frame";

/// M: the sender wants to receive a marker at every 512th byte of the stream of FPDUs.
pub const FLAG_MARKERS: u8 = 0x80;
/// C: the sender wants CRCs, in both directions.
pub const FLAG_CRC: u8 = 0x40;
/// R, in a reply: the connection is rejected.
pub const FLAG_REJECT: u8 = 0x20;
/// S (RFC 6581 §6): private data begins with [`Enhanced`].
pub const FLAG_ENHANCED: u8 = 0x10;

/// Revision of RFC 5044.
pub const REVISION_1: u8 = 1;
/// Revision of RFC 6581.
pub const REVISION_2: u8 = 2;

/// A, in `ird`: peer-to-peer mode, in which the active side sends an RTR message first.
pub const IRD_PEER_TO_PEER: u16 = 0x8000;
/// B, in `ird`: the RTR message may be a zero-length FPDU, in practice a Send without payload.
/// Linux's siw does not accept it because it would consume a receive buffer of the ULP; irdma and
/// nes set the bit in each frame, together with C and D.
pub const IRD_RTR_SEND: u16 = 0x4000;
/// C, in `ord`: the RTR message may be an RDMA Write without payload.
pub const ORD_RTR_WRITE: u16 = 0x8000;
/// D, in `ord`: the RTR message may be a zero-length RDMA Read.
pub const ORD_RTR_READ: u16 = 0x4000;
/// Mask of the number of reads.
pub const READS_MASK: u16 = 0x3fff;
/// Number of reads that means "not negotiated": left to the ULP.
pub const READS_UNSAID: u16 = 0x3fff;

/// Length of a request or reply without private data, in bytes.
pub const REQ_REP_LEN: usize = 20;
/// Length of [`Enhanced`], in bytes.
pub const ENHANCED_LEN: usize = 4;
/// Longest private data of a frame, in bytes.
pub const MAX_PRIVATE_DATA: usize = 512;
/// Length of ULPDU_Length, in bytes.
pub const LENGTH_LEN: usize = 2;
/// Length of the CRC in bytes: CRC-32C, least significant byte first; zeroes if CRCs are not used.
pub const CRC_LEN: usize = 4;
/// Smallest maximum ULPDU size (MULPDU), in bytes (RFC 5044 §4.5).
pub const MULPDU_MIN: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    /// Frames that siw of Linux 6.12 sent for iSER.
    #[test]
    fn a_connection_begins_as_the_kernel_sent_it() {
        let bytes = b"MPA ID Req Frame\x10\x02\x00\x08\x00\x80\x00\x01\x80\x00\x00\x00";
        let (request, data) = ReqRepFrame::ref_from_prefix(bytes).unwrap();
        assert_eq!(request.key, KEY_REQUEST);
        assert_eq!((request.flags, request.rev), (FLAG_ENHANCED, REVISION_2));
        assert_eq!(usize::from(request.pd_length.get()), data.len());
        let (enhanced, data) = Enhanced::ref_from_prefix(data).unwrap();
        assert_eq!((enhanced.ird(), enhanced.ord()), (128, 1));
        assert_eq!((enhanced.ird.get() & IRD_PEER_TO_PEER, data), (0, &[0x80, 0, 0, 0][..]));

        let bytes = b"MPA ID Rep Frame\x50\x02\x00\x08\x00\x01\x00\x80\x80\x00\x00\x00";
        let (reply, _) = ReqRepFrame::ref_from_prefix(bytes).unwrap();
        assert_eq!(reply.key, KEY_REPLY);
        assert_eq!(reply.flags, FLAG_ENHANCED | FLAG_CRC);
    }

    #[test]
    fn an_fpdu_ends_on_four_bytes() {
        assert_eq!([14, 15, 16, 17, 18].map(padding), [0, 3, 2, 1, 0]);
        assert_eq!((fpdu_len(14), fpdu_len(15), fpdu_len(u16::MAX)), (20, 24, 65544));
    }
}
