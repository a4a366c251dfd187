//! A record: packets of one length behind a head.
//!
//! ```text
//!   │ length of all packets: 4 │ of one packet: 2 │ flags: 2 │ packet │ packet │ a shorter one, or none │
//! ```
//! Numbers are in big endian. A packet is from its base transport header to its ICRC.

use blockmux_wire::roce::icrc::ICRC_LEN;

/// The head of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordHead {
    /// Length of all packets, in bytes.
    pub len: u32,
    /// Length of each packet but the last, which may be shorter.
    pub packet_len: u16,
    /// Whether the network has marked the packets as ones that met congestion.
    pub is_marked: bool,
}

impl RecordHead {
    /// The head of one packet.
    #[must_use]
    pub fn of_packet(len: u16, is_marked: bool) -> RecordHead {
        RecordHead { len: len.into(), packet_len: len, is_marked }
    }

    /// Reads the head at the front of `bytes`; `None` if it is not there whole.
    #[inline]
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<RecordHead> {
        let (len, rest) = bytes.split_first_chunk()?;
        let (packet_len, rest) = rest.split_first_chunk()?;
        let (flags, _) = rest.split_first_chunk()?;
        Some(RecordHead {
            len: u32::from_be_bytes(*len),
            packet_len: u16::from_be_bytes(*packet_len),
            is_marked: u16::from_be_bytes(*flags) & MARKED != 0,
        })
    }

    /// The bytes of the head.
    #[inline]
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEAD_LEN] {
        let flags = if self.is_marked { MARKED } else { 0 };
        let [a, b, c, d] = self.len.to_be_bytes();
        let ([e, f], [g, h]) = (self.packet_len.to_be_bytes(), flags.to_be_bytes());
        [a, b, c, d, e, f, g, h]
    }

    /// Length of the first packet; 0 if there is none.
    #[inline]
    #[must_use]
    pub fn first_len(self) -> usize {
        self.len.min(self.packet_len.into()) as usize
    }

    /// Removes the first packet.
    #[inline]
    #[must_use]
    pub(super) fn without_first(self) -> RecordHead {
        let len = if self.packet_len == 0 { 0 } else { self.len.saturating_sub(self.packet_len.into()) };
        RecordHead { len, ..self }
    }
}

/// Joins packets to records as they are written.
pub(super) struct RecordWriter<'a> {
    bytes: &'a mut Vec<u8>,
    /// The record that the next packet may join.
    open: Option<OpenRecord>,
}

#[derive(Clone, Copy)]
struct OpenRecord {
    head_at: usize,
    packet_len: usize,
    packets: usize,
}

impl<'a> RecordWriter<'a> {
    /// Appends to `bytes`.
    pub(super) fn new(bytes: &'a mut Vec<u8>) -> RecordWriter<'a> {
        RecordWriter { bytes, open: None }
    }

    /// Number of bytes in the buffer.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Appends the packet that `build` appends, and room for its ICRC; nothing if it returns
    /// `false`.
    #[inline]
    pub(super) fn put(&mut self, build: impl FnOnce(&mut Vec<u8>) -> bool) -> bool {
        let begin = self.bytes.len();
        if self.open.is_none() {
            self.bytes.extend_from_slice(&[0; HEAD_LEN]);
        }
        let at = self.bytes.len();
        if !build(self.bytes) {
            self.bytes.truncate(begin);
            return false;
        }
        self.bytes.extend_from_slice(&[0; ICRC_LEN]);
        let len = self.bytes.len().saturating_sub(at);
        let fresh = |head_at| OpenRecord { head_at, packet_len: len, packets: 0 };
        let mut record = self.open.unwrap_or_else(|| fresh(begin));
        if len > record.packet_len {
            // It begins the next record.
            self.bytes.extend_from_slice(&[0; HEAD_LEN]);
            self.bytes.copy_within(at..at.saturating_add(len), at.saturating_add(HEAD_LEN));
            record = fresh(at);
        }
        record.packets = record.packets.saturating_add(1);
        let joined = self.bytes.len().saturating_sub(record.head_at).saturating_sub(HEAD_LEN);
        let rest = self.bytes.get_mut(record.head_at..).unwrap_or_default();
        if let Some((head, _)) = rest.split_first_chunk_mut() {
            // At most 4 KiB of payload and its headers, and at most `MAX_JOINED`.
            let (len, packet_len) = (joined as u32, record.packet_len as u16);
            *head = RecordHead { len, packet_len, is_marked: false }.to_bytes();
        }
        let is_full = len < record.packet_len
            || record.packets >= MAX_PACKETS
            || joined.saturating_add(record.packet_len) > MAX_JOINED;
        self.open = (!is_full).then_some(record);
        true
    }
}

/// Length of a head, in bytes.
pub const HEAD_LEN: usize = 8;
/// A flag: the network has marked the packets.
const MARKED: u16 = 1;
/// Most packets of a record (`UDP_MAX_SEGMENTS` of older kernels).
const MAX_PACKETS: usize = 64;
/// Most bytes of joined packets: the longest IPv4 packet, without its headers.
pub const MAX_JOINED: usize = 65_507;

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;

    /// The lengths of the packets of each record, without their ICRCs.
    fn joined(lens: &[usize]) -> Vec<Vec<usize>> {
        let mut bytes = vec![7; 3];
        let mut writer = RecordWriter::new(&mut bytes);
        for (number, &len) in lens.iter().enumerate() {
            assert!(writer.put(|bytes| {
                bytes.resize(bytes.len() + len, number as u8);
                true
            }));
        }
        assert!(!writer.put(|_| false));
        let (mut rest, mut records, mut number) = (&bytes[3..], Vec::new(), 0);
        while let Some(mut head) = RecordHead::parse(rest) {
            assert!(head.len as usize <= MAX_JOINED && !head.is_marked);
            let mut packets = Vec::new();
            rest = &rest[HEAD_LEN..];
            while head.len > 0 {
                let (packet, behind) = rest.split_at(head.first_len());
                let (contents, icrc) = packet.split_at(packet.len() - ICRC_LEN);
                assert!(contents.iter().all(|byte| *byte == number) && icrc == [0; ICRC_LEN]);
                packets.push(contents.len());
                (head, rest, number) = (head.without_first(), behind, number + 1);
            }
            records.push(packets);
        }
        assert!(rest.is_empty());
        records
    }

    #[test]
    fn packets_of_one_length_are_joined_and_a_shorter_one_is_the_last() {
        assert_eq!(joined(&[]), Vec::<Vec<usize>>::new());
        assert_eq!(joined(&[20]), [[20]]);
        assert_eq!(joined(&[20, 20, 12, 20]), [vec![20, 20, 12], vec![20]]);
        assert_eq!(joined(&[12, 12, 20, 20, 24]), [vec![12, 12], vec![20, 20], vec![24]]);
        assert_eq!(joined(&[12; 65]), [vec![12; 64], vec![12]]);
        assert_eq!(joined(&[4124; 16]), [vec![4124; 15], vec![4124]]);
    }

    #[test]
    fn a_head_is_read_as_it_was_written() {
        for head in [
            RecordHead { len: 65_000, packet_len: 4132, is_marked: true },
            RecordHead::of_packet(17, false),
            RecordHead::default(),
        ] {
            assert_eq!(RecordHead::parse(&head.to_bytes()), Some(head));
        }
        assert_eq!(RecordHead::parse(&[0; HEAD_LEN - 1]), None);
        // A head from elsewhere that makes no sense ends.
        let endless = RecordHead { len: 5, packet_len: 0, is_marked: false };
        assert_eq!((endless.first_len(), endless.without_first().len), (0, 0));
    }
}
