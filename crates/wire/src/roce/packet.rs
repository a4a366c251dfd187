//! Splits a datagram into its headers, payload and ICRC.

use crate::roce::bth::{BTH_LEN, Bth};
use crate::roce::eth::{Aeth, Deth, Reth};
use crate::roce::icrc::ICRC_LEN;
use crate::roce::opcode::ExtendedHeaders;
use zerocopy::{BigEndian as BE, FromBytes, Immutable, KnownLayout, U32, Unaligned};

/// A packet: everything in the UDP datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RocePacket<'a> {
    /// Base transport header.
    pub bth: &'a Bth,
    /// Header of a datagram.
    pub deth: Option<&'a Deth>,
    /// Header of RDMA Writes and RDMA Read requests.
    pub reth: Option<&'a Reth>,
    /// Header of acknowledgements and RDMA Read responses.
    pub aeth: Option<&'a Aeth>,
    /// Immediate data.
    pub immediate: Option<U32<BE>>,
    /// R_Key of memory to invalidate.
    pub invalidate: Option<U32<BE>>,
    /// Offset of the payload in the datagram, in bytes.
    pub payload_at: usize,
    /// Payload, without the pad.
    pub payload: &'a [u8],
    /// The pad, whose bytes have no meaning.
    pub pad: &'a [u8],
    /// The ICRC as received, in wire order; see [`crate::roce::icrc`].
    pub icrc: [u8; ICRC_LEN],
}

/// Why a datagram is no packet. It is dropped, since nothing in it can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketError {
    /// It ends within the headers, the pad or the ICRC.
    Truncated,
    /// The version of the base transport header is not 0.
    Version,
    /// The opcode is unknown, and so is where the payload begins.
    Opcode,
}

impl<'a> RocePacket<'a> {
    /// Splits a datagram. The ICRC is not checked: the packet alone does not suffice for that.
    ///
    /// # Errors
    /// If it is no packet.
    #[inline]
    pub fn parse(datagram: &'a [u8]) -> Result<RocePacket<'a>, PacketError> {
        let (covered, icrc) = datagram.split_last_chunk::<ICRC_LEN>().ok_or(PacketError::Truncated)?;
        let (bth, mut rest) = take::<Bth>(covered)?;
        if bth.version() != 0 {
            return Err(PacketError::Version);
        }
        let headers = bth.opcode().headers().ok_or(PacketError::Opcode)?;
        let rest = &mut rest;
        let deth = take_if(headers, ExtendedHeaders::DETH, rest)?;
        let reth = take_if(headers, ExtendedHeaders::RETH, rest)?;
        let aeth = take_if(headers, ExtendedHeaders::AETH, rest)?;
        let immediate = take_if(headers, ExtendedHeaders::IMMEDIATE, rest)?.copied();
        let invalidate = take_if(headers, ExtendedHeaders::IETH, rest)?.copied();
        // A pad that is longer than what is left would make the length of the payload negative.
        let payload_len = rest.len().checked_sub(bth.pad_len()).ok_or(PacketError::Truncated)?;
        let payload_at = covered.len().saturating_sub(rest.len());
        let (payload, pad) = rest.split_at(payload_len);
        Ok(RocePacket { bth, deth, reth, aeth, immediate, invalidate, payload_at, payload, pad, icrc: *icrc })
    }
}

fn take<T: FromBytes + Immutable + KnownLayout + Unaligned>(
    bytes: &[u8],
) -> Result<(&T, &[u8]), PacketError> {
    T::ref_from_prefix(bytes).map_err(|_| PacketError::Truncated)
}

fn take_if<'a, T: FromBytes + Immutable + KnownLayout + Unaligned>(
    headers: ExtendedHeaders,
    header: ExtendedHeaders,
    rest: &mut &'a [u8],
) -> Result<Option<&'a T>, PacketError> {
    if !headers.contains(header) {
        return Ok(None);
    }
    let (value, behind) = take::<T>(rest)?;
    *rest = behind;
    Ok(Some(value))
}

/// Length of the shortest packet, in bytes.
pub const MIN_PACKET_LEN: usize = BTH_LEN + ICRC_LEN;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roce::opcode::RoceOpcode;

    /// An acknowledgement of rxe.
    const ACK: [u8; 20] =
        [0x11, 0, 0xff, 0xff, 0, 0, 0, 0x11, 0, 0xbe, 0x50, 0x74, 0x1f, 0, 0, 1, 0x8d, 0xa1, 0xbc, 0xce];

    #[test]
    fn a_packet_is_split_into_its_parts() {
        let packet = RocePacket::parse(&ACK).unwrap();
        assert_eq!(packet.bth.opcode(), RoceOpcode::RC_ACKNOWLEDGE);
        assert_eq!(packet.aeth.map(|aeth| (aeth.syndrome, aeth.msn.get())), Some((0x1f, 1)));
        assert_eq!((packet.payload, packet.payload_at), (&[][..], 16));
        assert_eq!(packet.icrc, [0x8d, 0xa1, 0xbc, 0xce]);
    }

    #[test]
    fn what_is_too_short_is_no_packet() {
        for len in 0..ACK.len() {
            assert_eq!(RocePacket::parse(&ACK[..len]), Err(PacketError::Truncated), "{len}");
        }
    }

    /// rxe computed a negative length of the payload from such a packet (CVE-2026-46043).
    #[test]
    fn a_pad_and_an_icrc_that_the_packet_has_no_room_for_are_truncation() {
        let opcodes = [
            (RoceOpcode::RC_SEND_ONLY, 0),
            (RoceOpcode::RC_WRITE_ONLY, 16),
            (RoceOpcode::RC_ACKNOWLEDGE, 4),
            (RoceOpcode::RC_SEND_ONLY_INVALIDATE, 4),
            (RoceOpcode::UD_SEND_ONLY, 8),
        ];
        for (opcode, headers_len) in opcodes {
            for pad_len in 0..4_usize {
                for behind in 0..8 + ICRC_LEN {
                    let mut bytes = [0; 64];
                    let packet = &mut bytes[..BTH_LEN + headers_len + behind];
                    packet[..2].copy_from_slice(&[opcode.0, (pad_len as u8) << 4]);
                    let payload_len = behind.checked_sub(ICRC_LEN + pad_len);
                    let parsed = RocePacket::parse(packet).map(|packet| packet.payload.len());
                    assert_eq!(parsed, payload_len.ok_or(PacketError::Truncated), "{opcode} {pad_len}");
                }
            }
        }
    }

    #[test]
    fn other_versions_and_opcodes_are_no_packets() {
        let mut packet = ACK;
        packet[1] = 1;
        assert_eq!(RocePacket::parse(&packet), Err(PacketError::Version));
        packet[..2].copy_from_slice(&[0x13, 0]);
        assert_eq!(RocePacket::parse(&packet), Err(PacketError::Opcode));
    }
}
