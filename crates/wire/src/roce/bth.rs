//! The base transport header, which every packet begins with (volume 1, §9.2).

use crate::layout::layout;
use crate::roce::opcode::RoceOpcode;
pub use crate::u24::U24;
use zerocopy::{BigEndian as BE, U16};

layout! {
    /// Base transport header.
    pub struct Bth(BTH_LEN) {
        /// [`RoceOpcode`].
        pub opcode: u8,
        /// [`FLAG_SOLICITED`], [`FLAG_MIGRATED`], the length of the pad in two bits, and the
        /// version of the header, which is 0.
        pub flags: u8,
        /// Partition key.
        pub p_key: U16<BE>,
        /// [`CONGESTION_FECN`] and [`CONGESTION_BECN`]. The ICRC does not cover this byte.
        pub congestion: u8,
        /// Number of the receiver's queue pair.
        pub dest_qp: U24,
        /// [`FLAG_ACK_REQUEST`].
        pub ack_request: u8,
        /// Packet sequence number.
        pub psn: U24,
    }
}

impl Bth {
    /// The operation code.
    #[inline]
    #[must_use]
    pub const fn opcode(&self) -> RoceOpcode {
        RoceOpcode(self.opcode)
    }

    /// Number of pad bytes behind the payload, 0 to 3.
    #[inline]
    #[must_use]
    pub const fn pad_len(&self) -> usize {
        (self.flags >> PAD_SHIFT & 3) as usize
    }

    /// Version of the header; packets of another version than 0 are dropped.
    #[inline]
    #[must_use]
    pub const fn version(&self) -> u8 {
        self.flags & 0x0f
    }

    /// Whether the sender asks for an acknowledgement.
    #[inline]
    #[must_use]
    pub const fn requests_ack(&self) -> bool {
        self.ack_request & FLAG_ACK_REQUEST != 0
    }

    /// The header of a congestion notification (CNP) for that queue pair, whose packets were marked
    /// (annex A17, §A17.9.3). [`NOTIFICATION_RESERVED_LEN`] zeroes follow it.
    #[must_use]
    pub const fn notification(dest_qp: u32) -> Bth {
        Bth {
            opcode: RoceOpcode::CONGESTION_NOTIFICATION.0,
            flags: 0,
            p_key: U16::new(P_KEY_DEFAULT),
            congestion: CONGESTION_BECN,
            dest_qp: U24::new(dest_qp),
            ack_request: 0,
            psn: U24::new(0),
        }
    }

    /// Whether the message is a solicited event.
    #[inline]
    #[must_use]
    pub const fn is_solicited(&self) -> bool {
        self.flags & FLAG_SOLICITED != 0
    }
}

/// [`Bth::flags`] for a payload of `len` bytes, which are padded to a multiple of four.
#[inline]
#[must_use]
pub const fn pad_flags(len: usize) -> u8 {
    (pad_len(len) as u8) << PAD_SHIFT
}

/// Number of pad bytes behind a payload of `len` bytes.
#[inline]
#[must_use]
pub const fn pad_len(len: usize) -> usize {
    len.wrapping_neg() & 3
}

/// SE: a solicited event, which wakes a receiver that waits for those only.
pub const FLAG_SOLICITED: u8 = 0x80;
/// M: the migration state of the path, which is "migrated" where no path migrates.
pub const FLAG_MIGRATED: u8 = 0x40;
/// A: the sender asks for an acknowledgement.
pub const FLAG_ACK_REQUEST: u8 = 0x80;
/// FECN: the packet met congestion.
pub const CONGESTION_FECN: u8 = 0x80;
/// BECN: the receiver's own packets met congestion; a congestion notification has it.
pub const CONGESTION_BECN: u8 = 0x40;
/// The default partition key, with full membership.
pub const P_KEY_DEFAULT: u16 = 0xffff;
/// The queue pair of connection management (the general services interface).
pub const QP_GSI: u32 = 1;

/// Length of a base transport header, in bytes.
pub const BTH_LEN: usize = 12;

/// Length of the reserved bytes of a congestion notification, behind its header.
pub const NOTIFICATION_RESERVED_LEN: usize = 16;

const PAD_SHIFT: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    /// A header that rxe of Linux 6.12 sent for SRP.
    #[test]
    fn a_header_is_as_the_kernel_sent_it() {
        let bytes = [0x04, 0x00, 0xff, 0xff, 0, 0, 0, 0x11, 0x80, 0xd0, 0x33, 0x8c];
        let bth = Bth::ref_from_bytes(&bytes).unwrap();
        assert_eq!((bth.opcode(), bth.p_key.get()), (RoceOpcode::RC_SEND_ONLY, P_KEY_DEFAULT));
        assert_eq!((bth.dest_qp.get(), bth.psn.get()), (0x11, 0xd0_338c));
        assert!(bth.requests_ack() && !bth.is_solicited());
        assert_eq!((bth.pad_len(), bth.version()), (0, 0));
    }

    /// The header of a notification that a ConnectX adapter sent.
    #[test]
    fn a_notification_is_as_an_adapter_sends_it() {
        let sent = [0x81, 0x00, 0xff, 0xff, 0x40, 0, 0, 0xd2, 0, 0, 0, 0];
        assert_eq!(Bth::notification(0xd2).as_bytes(), sent);
    }

    #[test]
    fn numbers_have_24_bits() {
        assert_eq!(U24::new(0xff12_3456).get(), 0x12_3456);
        assert_eq!(U24::new(1).as_bytes(), [0, 0, 1]);
    }

    #[test]
    fn a_pad_completes_four_bytes() {
        assert_eq!([0, 1, 2, 3, 4, 1023].map(pad_len), [0, 3, 2, 1, 0, 1]);
        let bth = Bth { flags: FLAG_SOLICITED | pad_flags(5), ..Bth::new_zeroed() };
        assert!(bth.is_solicited() && bth.pad_len() == 3 && bth.version() == 0);
    }

    use zerocopy::{FromBytes, FromZeros, IntoBytes};
}
