//! MPA: frames on a byte stream (RFC 5044), and how connections begin (RFC 6581).
//!
//! A connection begins with a request and a reply, both a [`ReqRepFrame`] with private data behind
//! it. From then on each direction is a row of FPDUs: a length, that many bytes, padding to four, a
//! CRC. Where a receiver wants markers, one of four bytes lies at every 512th byte of the row, the
//! first of all before the first FPDU.

use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, FromBytes, Immutable, IntoBytes, KnownLayout, U16, Unaligned};

/// A request or a reply (RFC 5044 §7.1.1); private data follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ReqRepFrame {
    /// [`KEY_REQUEST`] or [`KEY_REPLY`].
    pub key: [u8; 16],
    /// [`FLAG_MARKERS`] and its neighbours.
    pub flags: u8,
    /// [`REVISION_1`] or [`REVISION_2`].
    pub rev: u8,
    /// Private data in bytes, at most [`MAX_PRIVATE_DATA`]; that of [`Enhanced`] counts.
    pub pd_length: U16<BE>,
}
const _: () = assert!(size_of::<ReqRepFrame>() == REQ_REP_LEN);

/// What private data begins with where [`FLAG_ENHANCED`] says so (RFC 6581 §9).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Enhanced {
    /// [`IRD_PEER_TO_PEER`], [`IRD_RTR_SEND`], and RDMA Reads that its sender answers at a time.
    pub ird: U16<BE>,
    /// [`ORD_RTR_WRITE`], [`ORD_RTR_READ`], and RDMA Reads that its sender would have on their way.
    pub ord: U16<BE>,
}
const _: () = assert!(size_of::<Enhanced>() == ENHANCED_LEN);

/// A marker (RFC 5044 §4.2).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Marker {
    #[doc(hidden)]
    pub reserved: [u8; 2],
    /// How many bytes before the marker its FPDU began; 0 if it begins behind it.
    pub fpdu_ptr: U16<BE>,
}
const _: () = assert!(size_of::<Marker>() == MARKER_LEN);

impl Enhanced {
    /// Whether it says how many reads there may be, rather than leave that to others.
    #[must_use]
    pub const fn says_reads(&self) -> bool {
        self.ird() != READS_UNSAID && self.ord() != READS_UNSAID
    }

    /// RDMA Reads that its sender answers at a time.
    #[inline]
    #[must_use]
    pub const fn ird(&self) -> u16 {
        self.ird.get() & READS_MASK
    }

    /// RDMA Reads that its sender would have on their way.
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
        /// The CRC of an FPDU is not that of its bytes.
        CRC_MISMATCH = 0x02,
        /// A marker, or a length, does not lead to an FPDU.
        MARKER_MISMATCH = 0x03,
        /// A request or reply was none.
        INVALID_REQ_REP = 0x04,
        /// Something failed on the side that says so.
        LOCAL_CATASTROPHIC = 0x05,
        /// The peer would have more RDMA Reads on their way than are answered.
        INSUFFICIENT_IRD = 0x06,
        /// Of the offered RTR messages the peer took none.
        NO_MATCHING_RTR = 0x07,
    }
}

/// Padding behind a ULPDU of `len` bytes, with the length before it (RFC 5044 §4.1).
#[inline]
#[must_use]
pub const fn padding(len: u16) -> usize {
    (len as usize).wrapping_add(LENGTH_LEN).wrapping_neg() % 4
}

/// The bytes of a whole FPDU, without markers, whose ULPDU has `len`.
#[inline]
#[must_use]
pub const fn fpdu_len(len: u16) -> usize {
    // At most 65544.
    LENGTH_LEN + len as usize + padding(len) + CRC_LEN
}

/// Of a request, in `key`.
pub const KEY_REQUEST: [u8; 16] = *b"MPA ID Req Frame";
/// Of a reply, in `key`.
pub const KEY_REPLY: [u8; 16] = *b"MPA ID Rep Frame";

/// M: its sender wants markers in what it receives.
pub const FLAG_MARKERS: u8 = 0x80;
/// C: its sender wants CRCs, in both directions.
pub const FLAG_CRC: u8 = 0x40;
/// R, of a reply: the connection is refused.
pub const FLAG_REJECT: u8 = 0x20;
/// S (RFC 6581 §6): private data begins with [`Enhanced`].
pub const FLAG_ENHANCED: u8 = 0x10;

/// RFC 5044.
pub const REVISION_1: u8 = 1;
/// RFC 6581.
pub const REVISION_2: u8 = 2;

/// A, in `ird`: either side may send first, and so the one that connects sends an RTR message
/// before all else.
pub const IRD_PEER_TO_PEER: u16 = 0x8000;
/// B, in `ird`: the RTR message may be an FPDU of zero length, as people write it, which is a Send
/// without payload: Linux's siw takes none because it would take a receive buffer of the ULP's, and
/// its irdma and nes set the bit in each frame, beside C and D.
pub const IRD_RTR_SEND: u16 = 0x4000;
/// C, in `ord`: the RTR message may be an RDMA Write without payload.
pub const ORD_RTR_WRITE: u16 = 0x8000;
/// D, in `ord`: the RTR message may be an RDMA Read of nothing.
pub const ORD_RTR_READ: u16 = 0x4000;
/// What is left for a number of reads.
pub const READS_MASK: u16 = 0x3fff;
/// As a number of reads: whoever is above MPA agrees on that, if anybody does.
pub const READS_UNSAID: u16 = 0x3fff;

/// Of a request or reply without private data, in bytes.
pub const REQ_REP_LEN: usize = 20;
/// Of [`Enhanced`], in bytes.
pub const ENHANCED_LEN: usize = 4;
/// The most private data of a frame, in bytes.
pub const MAX_PRIVATE_DATA: usize = 512;
/// Of ULPDU_Length, in bytes.
pub const LENGTH_LEN: usize = 2;
/// Of the CRC, in bytes: CRC-32C, its least byte first; 0 where none is used.
pub const CRC_LEN: usize = 4;
/// Of a marker, in bytes.
pub const MARKER_LEN: usize = 4;
/// From one marker to the next, in bytes of the stream.
pub const MARKER_INTERVAL: usize = 512;
/// The least that a ULPDU may be limited to, in bytes (RFC 5044 §4.5).
pub const MULPDU_MIN: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    /// As siw of Linux 6.12 sent them for iSER.
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
