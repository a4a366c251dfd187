//! The header of Ethernet II frames (IEEE 802.3, clause 3). Short frames are padded after their
//! payload, which is not part of the structure.

use crate::layout::layout;
use crate::open_enum::open_enum;
use core::fmt;
use zerocopy::{BigEndian as BE, FromBytes, Immutable, IntoBytes, KnownLayout, U16, Unaligned};

layout! {
    /// The header of a frame.
    pub struct EthernetHeader(ETHERNET_HEADER_LEN) {
        /// Destination address.
        pub destination: Mac,
        /// Source address.
        pub source: Mac,
        /// [`EtherType`].
        pub ether_type: U16<BE>,
    }
}

/// Length of the header, in bytes.
pub const ETHERNET_HEADER_LEN: usize = 14;
/// The shortest frame without its checksum, in bytes; shorter ones are padded on the wire.
pub const ETHERNET_MIN_FRAME: usize = 60;

/// A MAC address.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Default,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(C)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// The broadcast address.
    pub const BROADCAST: Mac = Mac([0xff; 6]);

    /// Whether this is a group address (multicast or broadcast).
    #[must_use]
    pub const fn is_group(self) -> bool {
        self.0[0] & 1 != 0
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

open_enum! {
    /// Protocol of a frame's payload.
    pub enum EtherType(u16) {
        /// ATA over Ethernet.
        ETH_P_AOE = 0x88a2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_reads_as_a_kernel_sent_it() {
        let bytes = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x52, 0x54, 0, 0x77, 0, 1, 0x88, 0xa2];
        let header = EthernetHeader::read_from_bytes(&bytes).unwrap();
        assert_eq!((header.destination, header.source.is_group()), (Mac::BROADCAST, false));
        assert_eq!(EtherType(header.ether_type.get()), EtherType::ETH_P_AOE);
        extern crate alloc;
        assert_eq!(alloc::format!("{}", header.source), "52:54:00:77:00:01");
    }
}
