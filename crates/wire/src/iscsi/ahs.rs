//! Additional Header Segments (RFC 7143 §11.2.2).

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, FromBytes, U16};

layout! {
    /// Header of a segment. `ahs_length` bytes follow the first three, then padding to four bytes.
    pub struct AhsHead(4) {
        /// AHSLength: bytes after the type, including the reserved byte, without padding.
        pub ahs_length: U16<BE>,
        /// [`AhsType`].
        pub ahs_type: u8,
        /// Reserved in both defined types.
        pub specific: u8,
    }
}

open_enum! {
    /// Type of a segment (RFC 7143 §11.2.2.1).
    pub enum AhsType(u8) {
        /// The part of a CDB beyond 16 bytes.
        EXTENDED_CDB = 1,
        /// Expected length of a bidirectional command's read data, in 32 bits.
        BIDIRECTIONAL_READ_DATA_LENGTH = 2,
    }
}

/// A segment of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahs<'a> {
    /// Type of the segment.
    pub ahs_type: AhsType,
    /// Content after the reserved byte, without padding.
    pub data: &'a [u8],
}

/// The segments of a header, in order.
#[derive(Clone, Debug)]
pub struct AhsIter<'a> {
    rest: &'a [u8],
}

/// A segment that is too short, or longer than the rest of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MalformedAhs;

impl<'a> AhsIter<'a> {
    /// Iterates over the bytes after the Basic Header Segment, without the digest.
    #[must_use]
    pub fn new(segments: &'a [u8]) -> AhsIter<'a> {
        AhsIter { rest: segments }
    }
}

impl<'a> Iterator for AhsIter<'a> {
    type Item = Result<Ahs<'a>, MalformedAhs>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let segment = split(self.rest);
        self.rest = segment.map_or(&[], |(_, rest)| rest);
        Some(segment.map(|(ahs, _)| ahs).ok_or(MalformedAhs))
    }
}

/// Splits the first segment from the bytes after its padding.
fn split(segments: &[u8]) -> Option<(Ahs<'_>, &[u8])> {
    let (head, rest) = AhsHead::read_from_prefix(segments).ok()?;
    let len = usize::from(head.ahs_length.get()).checked_sub(1)?;
    let data = rest.get(..len)?;
    let rest = rest.get(len.checked_add(super::padding(len))?..)?;
    Some((Ahs { ahs_type: AhsType(head.ahs_type), data }, rest))
}

#[cfg(test)]
mod tests {
    extern crate alloc;
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn segments_are_read_one_after_the_other() {
        let bytes = b"\x00\x05\x02\x00\x00\x00\x10\x00\x00\x04\x01\x00abc\0\x00\x01\x07\x00";
        let segments: Vec<_> = AhsIter::new(bytes).map(Result::unwrap).collect();
        let ahs = |ahs_type, data| Ahs { ahs_type, data };
        assert_eq!(
            segments,
            [
                ahs(AhsType::BIDIRECTIONAL_READ_DATA_LENGTH, &b"\0\0\x10\0"[..]),
                ahs(AhsType::EXTENDED_CDB, b"abc"),
                ahs(AhsType(7), b""),
            ]
        );
    }

    #[test]
    fn a_segment_of_a_wrong_length_ends_the_list() {
        for bytes in [&b"\0\0\x01\0"[..], b"\0\x06\x01\0abcd", b"\0\x03\x01\0ab", b"\0\x01\x01"] {
            let segments: Vec<_> = AhsIter::new(bytes).collect();
            assert_eq!(segments, [Err(MalformedAhs)], "{bytes:?}");
        }
    }
}
