//! The invariant CRC of a packet (annex A17, §A17.3.3), and the part of the IP header that a UDP
//! socket does not show.
//!
//! The ICRC is CRC-32 over eight bytes of ones, the IP header, the UDP header and the packet.
//! Fields that change on the way count as ones: class, time to live, checksums, and the congestion
//! byte of the base transport header.
//!
//! It covers the identification of IPv4, which a UDP socket does not show. CRC-32 is affine: the
//! received ICRC, xor the one that is computed with 0 for the 32 bits of identification and flags,
//! is what these bits contribute, multiplied by a power of x for the bytes behind them. Divided by
//! that power it *is* these bits ([`RoceFlow::recover`]). A whole packet has no other flag than
//! "don't fragment", and no fragment offset, which checks 15 of the 32 bits; the receiver checks
//! the others by what it expects of the identification.

use core::net::{Ipv4Addr, Ipv6Addr};
use crc_fast::{CrcAlgorithm, Digest};

use crate::roce::UDP_PORT;
use crate::roce::bth::BTH_LEN;

/// The addresses of packets in one direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RoceFlow {
    /// The IP addresses.
    pub addresses: RoceAddresses,
    /// UDP port of the sender. The port of the receiver is [`UDP_PORT`].
    pub source_port: u16,
}

/// Source and destination of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoceAddresses {
    /// IPv4, without options.
    V4 {
        /// Source.
        source: Ipv4Addr,
        /// Destination.
        destination: Ipv4Addr,
    },
    /// IPv6, without extension headers.
    V6 {
        /// Source.
        source: Ipv6Addr,
        /// Destination.
        destination: Ipv6Addr,
    },
}

/// Identification and flags of an IPv4 header: bytes 4 to 7.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fragmentation {
    /// Identification.
    pub identification: u16,
    /// DF: routers may not fragment the packet.
    pub dont_fragment: bool,
}

impl Fragmentation {
    fn word(self) -> u32 {
        u32::from(self.identification) << 16 | if self.dont_fragment { DONT_FRAGMENT } else { 0 }
    }

    /// Reads the word of a packet that is no fragment.
    fn from_word(word: u32) -> Option<Fragmentation> {
        let identification = (word >> 16) as u16;
        match word & 0xffff {
            DONT_FRAGMENT => Some(Fragmentation { identification, dont_fragment: true }),
            0 => Some(Fragmentation { identification, dont_fragment: false }),
            _ => None,
        }
    }
}

impl RoceFlow {
    /// The ICRC, in wire order, of a packet from its base transport header to its pad. IPv6 has no
    /// [`Fragmentation`], and ignores it.
    #[inline]
    #[must_use]
    pub fn icrc(&self, fragmentation: Fragmentation, packet: &[u8]) -> [u8; ICRC_LEN] {
        self.crc(fragmentation.word(), packet).to_le_bytes()
    }

    /// Checks a packet that was received over IPv6, from its base transport header to its ICRC.
    #[inline]
    #[must_use]
    pub fn is_intact(&self, fragmentation: Fragmentation, datagram: &[u8]) -> bool {
        datagram
            .split_last_chunk::<ICRC_LEN>()
            .is_some_and(|(packet, icrc)| self.icrc(fragmentation, packet) == *icrc)
    }

    /// The identification and flags with which the ICRC of a packet is right; `None` if there are
    /// none, which means that the packet is damaged. Of damaged packets, one in 32,768 passes.
    ///
    /// `datagram` is the packet from its base transport header to its ICRC. Over IPv6, nothing is
    /// unknown, and the result is the default.
    #[inline]
    #[must_use]
    pub fn recover(&self, datagram: &[u8]) -> Option<Fragmentation> {
        let (packet, icrc) = datagram.split_last_chunk::<ICRC_LEN>()?;
        let difference = u32::from_le_bytes(*icrc) ^ self.crc(0, packet);
        match self.addresses {
            RoceAddresses::V6 { .. } => (difference == 0).then(Fragmentation::default),
            RoceAddresses::V4 { .. } => {
                // Behind the word: 12 bytes of the IP header, the UDP header, and the packet.
                let behind = packet.len().checked_add(IPV4_LEN - WORD_END + UDP_LEN)?;
                // The word itself is four more bytes.
                let word = multiply(difference, inverse_power(behind.checked_add(4)?)?);
                Fragmentation::from_word(u32::from_be_bytes(word.to_le_bytes()))
            }
        }
    }

    fn crc(&self, word: u32, packet: &[u8]) -> u32 {
        let mut headers = [0xff; PREFIX_MAX];
        let (bth, rest) = packet.split_at(packet.len().min(BTH_LEN));
        let udp_len = UDP_LEN.saturating_add(packet.len()).saturating_add(ICRC_LEN);
        let mut put = Writer { bytes: &mut headers, at: LRH_LEN };
        match self.addresses {
            RoceAddresses::V4 { source, destination } => {
                put.bytes(&[0x45]).skip(1).number(IPV4_LEN.saturating_add(udp_len));
                put.bytes(&word.to_be_bytes()).skip(1).bytes(&[UDP_PROTOCOL]).skip(2);
                put.bytes(&source.octets()).bytes(&destination.octets());
            }
            RoceAddresses::V6 { source, destination } => {
                // The version, then ones for class and flow label.
                put.bytes(&[0x6f]).skip(3).number(udp_len).bytes(&[UDP_PROTOCOL]).skip(1);
                put.bytes(&source.octets()).bytes(&destination.octets());
            }
        }
        put.bytes(&self.source_port.to_be_bytes()).bytes(&UDP_PORT.to_be_bytes()).number(udp_len).skip(2);
        let bth_at = put.at;
        put.bytes(bth);
        let len = put.at;
        if let Some(congestion) = headers.get_mut(bth_at.saturating_add(CONGESTION_AT)) {
            *congestion = 0xff;
        }
        let mut digest = Digest::new(CrcAlgorithm::Crc32IsoHdlc);
        digest.update(headers.get(..len).unwrap_or_default());
        digest.update(rest);
        // The upper 32 bits are 0.
        digest.finalize() as u32
    }
}

/// Writes consecutive fields.
struct Writer<'a> {
    bytes: &'a mut [u8; PREFIX_MAX],
    at: usize,
}

impl Writer<'_> {
    #[inline]
    fn bytes(&mut self, field: &[u8]) -> &mut Self {
        let end = self.at.saturating_add(field.len());
        if let Some(place) = self.bytes.get_mut(self.at..end) {
            place.copy_from_slice(field);
        }
        self.skip(field.len())
    }

    /// A length of 16 bits; longer packets do not exist.
    #[inline]
    fn number(&mut self, value: usize) -> &mut Self {
        self.bytes(&(value as u16).to_be_bytes())
    }

    /// Leaves ones.
    #[inline]
    fn skip(&mut self, len: usize) -> &mut Self {
        self.at = self.at.saturating_add(len);
        self
    }
}

/// Multiplies two polynomials modulo that of CRC-32; the most significant bit is x^0.
const fn multiply(mut a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    while a != 0 {
        if a & 1 << 31 != 0 {
            product ^= b;
        }
        a <<= 1;
        b = (b >> 1) ^ if b & 1 != 0 { POLYNOMIAL } else { 0 };
    }
    product
}

/// Divides by x modulo the polynomial.
const fn divide_by_x(value: u32) -> u32 {
    if value & 1 << 31 != 0 { (value ^ POLYNOMIAL) << 1 | 1 } else { value << 1 }
}

/// 1 / x^(8 * `bytes`), if a packet can have so many bytes.
#[inline]
fn inverse_power(bytes: usize) -> Option<u32> {
    let low = INVERSES.get(bytes % STEP)?;
    let high = INVERSES_OF_STEPS.get(bytes / STEP)?;
    Some(multiply(*low, *high))
}

/// The first `N` powers of 1 / x^(8 * `bytes`).
const fn inverses<const N: usize>(bytes: usize) -> [u32; N] {
    let mut base = 1 << 31;
    let mut bit = 0;
    while bit < 8 * bytes {
        base = divide_by_x(base);
        bit += 1;
    }
    let mut powers = [1 << 31; N];
    let mut at = 1;
    while at < N {
        powers[at] = multiply(powers[at - 1], base);
        at += 1;
    }
    powers
}

/// For each number of bytes below [`STEP`].
static INVERSES: [u32; STEP] = inverses(1);
/// For each multiple of [`STEP`] bytes, beyond the longest packet with 8 KiB of payload.
static INVERSES_OF_STEPS: [u32; 136] = inverses(STEP);
const STEP: usize = 64;

/// The polynomial of CRC-32 without x^32, reflected.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// Length of the ICRC, in bytes.
pub const ICRC_LEN: usize = 4;
/// Length of an IPv4 header without options, in bytes.
pub const IPV4_LEN: usize = 20;
/// Length of an IPv6 header without extension headers, in bytes.
pub const IPV6_LEN: usize = 40;
/// Length of a UDP header, in bytes.
pub const UDP_LEN: usize = 8;

/// Length of the ones that stand for a local route header.
const LRH_LEN: usize = 8;
const PREFIX_MAX: usize = LRH_LEN + IPV6_LEN + UDP_LEN + BTH_LEN;
/// Offset of [`crate::roce::bth::Bth::congestion`].
const CONGESTION_AT: usize = 4;
/// End of identification and flags in an IPv4 header.
const WORD_END: usize = 8;
const DONT_FRAGMENT: u32 = 0x4000;
const UDP_PROTOCOL: u8 = 17;

#[cfg(test)]
mod tests {
    use super::*;

    const FLOW: RoceFlow = RoceFlow {
        addresses: RoceAddresses::V4 {
            source: Ipv4Addr::new(10, 77, 0, 11),
            destination: Ipv4Addr::new(10, 77, 0, 12),
        },
        source_port: 57171,
    };
    const FLOW_6: RoceFlow = RoceFlow {
        addresses: RoceAddresses::V6 {
            source: Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1),
            destination: Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2),
        },
        source_port: 49152,
    };

    /// A packet of `len` bytes with its ICRC.
    fn sealed(flow: RoceFlow, fragmentation: Fragmentation, len: usize) -> ([u8; 4200], usize) {
        let mut bytes = [0; 4200];
        bytes.iter_mut().zip(0_u32..).for_each(|(byte, at)| *byte = (at * 7 + at / 251) as u8);
        let icrc = flow.icrc(fragmentation, &bytes[..len]);
        bytes[len..len + 4].copy_from_slice(&icrc);
        (bytes, len + 4)
    }

    #[test]
    fn the_identification_is_recovered_for_every_length_of_a_packet() {
        for (identification, dont_fragment) in
            [(0, true), (0, false), (1, true), (0xffff, true), (0x8001, false)]
        {
            let fragmentation = Fragmentation { identification, dont_fragment };
            for len in (12..200).chain([1024, 1036, 4108, 4124, 4190]) {
                let (bytes, len) = sealed(FLOW, fragmentation, len);
                assert_eq!(FLOW.recover(&bytes[..len]), Some(fragmentation), "{len}");
                assert!(FLOW.is_intact(fragmentation, &bytes[..len]));
            }
        }
    }

    #[test]
    fn nearly_all_damaged_packets_have_no_identification() {
        let (bytes, len) = sealed(FLOW, Fragmentation::default(), 200);
        let mut passed = 0;
        let mut random = 1_u64;
        for _ in 0..50_000 {
            let mut damaged = bytes;
            for byte in &mut damaged[len - 64..len - 32] {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *byte ^= (random >> 56) as u8;
            }
            passed += u32::from(FLOW.recover(&damaged[..len]).is_some());
        }
        // One of 32,768 is expected to pass.
        assert!(passed < 8, "{passed}");
    }

    /// CRC-32 detects these, and the recovered word hides only what looks like another word: of all
    /// damages of one byte, 16 in a packet of 200 bytes.
    #[test]
    fn nearly_all_damaged_bytes_are_detected() {
        let (bytes, len) = sealed(FLOW, Fragmentation::default(), 200);
        let (mut damages, mut passed) = (0, 0);
        for at in (0..len).filter(|at| *at != CONGESTION_AT) {
            for change in 1..=255 {
                let mut damaged = bytes;
                damaged[at] ^= change;
                assert!(!FLOW.is_intact(Fragmentation::default(), &damaged[..len]));
                damages += 1;
                passed += u32::from(FLOW.recover(&damaged[..len]).is_some());
            }
        }
        assert_eq!((damages, passed), (51_765, 16));
    }

    #[test]
    fn over_ipv6_the_whole_icrc_is_checked() {
        let (mut bytes, len) = sealed(FLOW_6, Fragmentation::default(), 1036);
        assert_eq!(FLOW_6.recover(&bytes[..len]), Some(Fragmentation::default()));
        bytes[4] ^= 0xc0;
        assert!(FLOW_6.recover(&bytes[..len]).is_some(), "congestion is marked on the way");
        bytes[900] ^= 1;
        assert_eq!(FLOW_6.recover(&bytes[..len]), None);
        assert!(!FLOW_6.is_intact(Fragmentation::default(), &bytes[..len]));
    }

    #[test]
    fn what_is_no_packet_is_damaged() {
        for len in 0..16 {
            assert_eq!(FLOW.recover(&[0; 16][..len]), None, "{len}");
            assert_eq!(FLOW_6.recover(&[0; 16][..len]), None, "{len}");
        }
        assert_eq!(FLOW.recover(&[0xff; 9000]), None, "longer than any packet");
    }

    #[test]
    fn a_packet_of_another_flow_is_damaged() {
        let (bytes, len) = sealed(FLOW, Fragmentation::default(), 300);
        assert_eq!(RoceFlow { source_port: 57172, ..FLOW }.recover(&bytes[..len]), None);
    }

    #[test]
    fn division_undoes_multiplication() {
        let x = 1 << 30;
        for value in [1, 1 << 31, 0x1234_5678, u32::MAX, POLYNOMIAL] {
            assert_eq!(divide_by_x(multiply(value, x)), value);
        }
        let eight = (0..8 * 700).fold(1 << 31, |power, _| multiply(power, x));
        assert_eq!(inverse_power(700).map(|inverse| multiply(inverse, eight)), Some(1 << 31));
    }
}
