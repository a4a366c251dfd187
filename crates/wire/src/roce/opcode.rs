//! Operation codes of the transports that RoCEv2 uses here: reliable connections, and the
//! unreliable datagrams of connection management (volume 1, table 38).

use crate::open_enum::open_enum;
use bitflags::bitflags;

open_enum! {
    /// Operation codes: the high three bits are the transport.
    pub enum RoceOpcode(u8) {
        /// First packet of a Send.
        RC_SEND_FIRST = 0x00,
        /// A packet in the middle of a Send.
        RC_SEND_MIDDLE = 0x01,
        /// Last packet of a Send.
        RC_SEND_LAST = 0x02,
        /// Last packet of a Send with immediate data.
        RC_SEND_LAST_IMMEDIATE = 0x03,
        /// A Send of one packet.
        RC_SEND_ONLY = 0x04,
        /// A Send of one packet with immediate data.
        RC_SEND_ONLY_IMMEDIATE = 0x05,
        /// First packet of an RDMA Write.
        RC_WRITE_FIRST = 0x06,
        /// A packet in the middle of an RDMA Write.
        RC_WRITE_MIDDLE = 0x07,
        /// Last packet of an RDMA Write.
        RC_WRITE_LAST = 0x08,
        /// Last packet of an RDMA Write with immediate data.
        RC_WRITE_LAST_IMMEDIATE = 0x09,
        /// An RDMA Write of one packet.
        RC_WRITE_ONLY = 0x0a,
        /// An RDMA Write of one packet with immediate data.
        RC_WRITE_ONLY_IMMEDIATE = 0x0b,
        /// RDMA Read request.
        RC_READ_REQUEST = 0x0c,
        /// First packet of an RDMA Read response.
        RC_READ_RESPONSE_FIRST = 0x0d,
        /// A packet in the middle of an RDMA Read response.
        RC_READ_RESPONSE_MIDDLE = 0x0e,
        /// Last packet of an RDMA Read response.
        RC_READ_RESPONSE_LAST = 0x0f,
        /// An RDMA Read response of one packet.
        RC_READ_RESPONSE_ONLY = 0x10,
        /// Acknowledgement, positive or negative.
        RC_ACKNOWLEDGE = 0x11,
        /// Last packet of a Send that invalidates memory of the receiver.
        RC_SEND_LAST_INVALIDATE = 0x16,
        /// A Send of one packet that invalidates memory of the receiver.
        RC_SEND_ONLY_INVALIDATE = 0x17,
        /// A datagram.
        UD_SEND_ONLY = 0x64,
        /// Congestion notification (annex A17): 16 reserved bytes follow.
        CONGESTION_NOTIFICATION = 0x81,
    }
}

bitflags! {
    /// The extended headers of a packet, in their order on the wire.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ExtendedHeaders: u8 {
        /// [`Deth`](crate::roce::eth::Deth).
        const DETH = 1;
        /// [`Reth`](crate::roce::eth::Reth).
        const RETH = 1 << 1;
        /// [`Aeth`](crate::roce::eth::Aeth).
        const AETH = 1 << 2;
        /// Immediate data: four bytes.
        const IMMEDIATE = 1 << 3;
        /// Invalidate: the steering tag (R_Key) of the receiver's memory, four bytes.
        const IETH = 1 << 4;
    }
}

/// Place of a packet in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketPlace {
    /// First of several.
    First,
    /// Neither first nor last.
    Middle,
    /// Last of several.
    Last,
    /// The only one.
    Only,
}

impl PacketPlace {
    /// The place of a packet, from what it begins and ends.
    #[inline]
    #[must_use]
    pub const fn of(is_first: bool, is_last: bool) -> PacketPlace {
        match (is_first, is_last) {
            (true, true) => PacketPlace::Only,
            (true, false) => PacketPlace::First,
            (false, true) => PacketPlace::Last,
            (false, false) => PacketPlace::Middle,
        }
    }

    /// Whether the message begins with this packet.
    #[inline]
    #[must_use]
    pub const fn is_first(self) -> bool {
        matches!(self, PacketPlace::First | PacketPlace::Only)
    }

    /// Whether the message ends with this packet.
    #[inline]
    #[must_use]
    pub const fn is_last(self) -> bool {
        matches!(self, PacketPlace::Last | PacketPlace::Only)
    }
}

impl RoceOpcode {
    /// The extended headers that follow the base transport header; `None` if the opcode is unknown,
    /// and so is where the payload begins.
    #[inline]
    #[must_use]
    pub const fn headers(self) -> Option<ExtendedHeaders> {
        type Headers = ExtendedHeaders;
        Some(match self {
            Self::RC_SEND_FIRST | Self::RC_SEND_MIDDLE | Self::RC_SEND_LAST | Self::RC_SEND_ONLY => {
                Headers::empty()
            }
            Self::RC_SEND_LAST_IMMEDIATE | Self::RC_SEND_ONLY_IMMEDIATE => Headers::IMMEDIATE,
            Self::RC_SEND_LAST_INVALIDATE | Self::RC_SEND_ONLY_INVALIDATE => Headers::IETH,
            Self::RC_WRITE_FIRST | Self::RC_WRITE_ONLY | Self::RC_READ_REQUEST => Headers::RETH,
            Self::RC_WRITE_MIDDLE | Self::RC_WRITE_LAST => Headers::empty(),
            Self::RC_WRITE_LAST_IMMEDIATE => Headers::IMMEDIATE,
            Self::RC_WRITE_ONLY_IMMEDIATE => Headers::RETH.union(Headers::IMMEDIATE),
            Self::RC_READ_RESPONSE_FIRST
            | Self::RC_READ_RESPONSE_LAST
            | Self::RC_READ_RESPONSE_ONLY
            | Self::RC_ACKNOWLEDGE => Headers::AETH,
            Self::RC_READ_RESPONSE_MIDDLE => Headers::empty(),
            Self::UD_SEND_ONLY => Headers::DETH,
            Self::CONGESTION_NOTIFICATION => Headers::empty(),
            _ => return None,
        })
    }

    /// The opcode of a packet of a Send.
    #[inline]
    #[must_use]
    pub const fn send(place: PacketPlace, invalidates: bool) -> RoceOpcode {
        match (place, invalidates) {
            (PacketPlace::First, _) => Self::RC_SEND_FIRST,
            (PacketPlace::Middle, _) => Self::RC_SEND_MIDDLE,
            (PacketPlace::Last, false) => Self::RC_SEND_LAST,
            (PacketPlace::Last, true) => Self::RC_SEND_LAST_INVALIDATE,
            (PacketPlace::Only, false) => Self::RC_SEND_ONLY,
            (PacketPlace::Only, true) => Self::RC_SEND_ONLY_INVALIDATE,
        }
    }

    /// The opcode of a packet of an RDMA Write.
    #[inline]
    #[must_use]
    pub const fn write(place: PacketPlace) -> RoceOpcode {
        match place {
            PacketPlace::First => Self::RC_WRITE_FIRST,
            PacketPlace::Middle => Self::RC_WRITE_MIDDLE,
            PacketPlace::Last => Self::RC_WRITE_LAST,
            PacketPlace::Only => Self::RC_WRITE_ONLY,
        }
    }

    /// The opcode of a packet of an RDMA Read response.
    #[inline]
    #[must_use]
    pub const fn read_response(place: PacketPlace) -> RoceOpcode {
        match place {
            PacketPlace::First => Self::RC_READ_RESPONSE_FIRST,
            PacketPlace::Middle => Self::RC_READ_RESPONSE_MIDDLE,
            PacketPlace::Last => Self::RC_READ_RESPONSE_LAST,
            PacketPlace::Only => Self::RC_READ_RESPONSE_ONLY,
        }
    }

    /// The place in its message, of a packet of a Send.
    #[inline]
    #[must_use]
    pub const fn send_place(self) -> Option<PacketPlace> {
        Some(match self {
            Self::RC_SEND_FIRST => PacketPlace::First,
            Self::RC_SEND_MIDDLE => PacketPlace::Middle,
            Self::RC_SEND_LAST | Self::RC_SEND_LAST_IMMEDIATE | Self::RC_SEND_LAST_INVALIDATE => {
                PacketPlace::Last
            }
            Self::RC_SEND_ONLY | Self::RC_SEND_ONLY_IMMEDIATE | Self::RC_SEND_ONLY_INVALIDATE => {
                PacketPlace::Only
            }
            _ => return None,
        })
    }

    /// The place in its message, of a packet of an RDMA Write without immediate data.
    #[inline]
    #[must_use]
    pub const fn write_place(self) -> Option<PacketPlace> {
        Some(match self {
            Self::RC_WRITE_FIRST => PacketPlace::First,
            Self::RC_WRITE_MIDDLE => PacketPlace::Middle,
            Self::RC_WRITE_LAST => PacketPlace::Last,
            Self::RC_WRITE_ONLY => PacketPlace::Only,
            _ => return None,
        })
    }

    /// The place in its message, of a packet of an RDMA Read response.
    #[inline]
    #[must_use]
    pub const fn read_response_place(self) -> Option<PacketPlace> {
        Some(match self {
            Self::RC_READ_RESPONSE_FIRST => PacketPlace::First,
            Self::RC_READ_RESPONSE_MIDDLE => PacketPlace::Middle,
            Self::RC_READ_RESPONSE_LAST => PacketPlace::Last,
            Self::RC_READ_RESPONSE_ONLY => PacketPlace::Only,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_opcode_and_its_place_belong_together() {
        for (is_first, is_last) in [(true, true), (true, false), (false, true), (false, false)] {
            let place = PacketPlace::of(is_first, is_last);
            assert_eq!((place.is_first(), place.is_last()), (is_first, is_last));
            for invalidates in [false, true] {
                let send = RoceOpcode::send(place, invalidates);
                assert_eq!((send.send_place(), send.write_place()), (Some(place), None));
                let has_ieth = send.headers().is_some_and(|headers| headers.contains(ExtendedHeaders::IETH));
                assert_eq!(has_ieth, invalidates && is_last, "{send}");
            }
            let write = RoceOpcode::write(place);
            assert_eq!((write.write_place(), write.send_place()), (Some(place), None));
            let has_reth = write.headers().is_some_and(|headers| headers.contains(ExtendedHeaders::RETH));
            assert_eq!(has_reth, is_first, "{write}");
            let response = RoceOpcode::read_response(place);
            assert_eq!(response.read_response_place(), Some(place));
            let has_aeth = response.headers().is_some_and(|headers| headers.contains(ExtendedHeaders::AETH));
            assert_eq!(has_aeth, is_first || is_last, "{response}");
        }
    }

    #[test]
    fn every_named_opcode_has_headers_and_no_other_has() {
        for code in 0..=u8::MAX {
            let opcode = RoceOpcode(code);
            assert_eq!(opcode.headers().is_some(), opcode.name().is_some(), "{opcode}");
        }
    }
}
