//! DDP, Direct Data Placement (RFC 5041).
//!
//! A segment is *tagged*, for memory that the receiver has registered under a steering tag, or
//! *untagged*, for the next buffer of one of the receiver's queues. A message consists of one or
//! several segments; the last one is flagged.

use crate::iwarp::rdmap::{RDMAP_VERSION, RdmapOpcode};
use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, U32, U64};

layout! {
    /// The first two bytes of every segment: the control fields of DDP and RDMAP (RFC 5041 §4.1,
    /// RFC 5040 §4.1).
    pub struct Control(CONTROL_LEN) {
        /// [`FLAG_TAGGED`], [`FLAG_LAST`], and DDP's version.
        pub ddp: u8,
        /// RDMAP's version and [`RdmapOpcode`].
        pub rdmap: u8,
    }

    /// The header of a tagged segment (RFC 5041 §4.2).
    pub struct Tagged(TAGGED_LEN) {
        /// Control fields, with [`FLAG_TAGGED`].
        pub control: Control,
        /// Steering tag of the receiver's memory.
        pub stag: U32<BE>,
        /// Tagged offset of the payload.
        pub to: U64<BE>,
    }

    /// The header of an untagged segment (RFC 5041 §4.3).
    pub struct Untagged(UNTAGGED_LEN) {
        /// Control fields, without [`FLAG_TAGGED`].
        pub control: Control,
        /// Steering tag to invalidate, for a Send with Invalidate; else reserved. A field of RDMAP.
        pub invalidate_stag: U32<BE>,
        /// Queue number: [`QUEUE_SEND`], [`QUEUE_READ`] or [`QUEUE_TERMINATE`].
        pub qn: U32<BE>,
        /// Message sequence number (MSN) in the queue, from 1.
        pub msn: U32<BE>,
        /// Message offset (MO) of the payload.
        pub mo: U32<BE>,
    }
}

impl Control {
    /// Control fields of the supported protocol versions.
    #[inline]
    #[must_use]
    pub const fn new(flags: u8, opcode: RdmapOpcode) -> Control {
        Control { ddp: flags | DDP_VERSION, rdmap: RDMAP_VERSION << RDMAP_VERSION_SHIFT | opcode.0 }
    }

    /// Whether the segment is tagged.
    #[inline]
    #[must_use]
    pub const fn is_tagged(self) -> bool {
        self.ddp & FLAG_TAGGED != 0
    }

    /// Whether the segment is the last of its message.
    #[inline]
    #[must_use]
    pub const fn is_last(self) -> bool {
        self.ddp & FLAG_LAST != 0
    }

    /// Version of DDP.
    #[inline]
    #[must_use]
    pub const fn ddp_version(self) -> u8 {
        self.ddp & DDP_VERSION_MASK
    }

    /// Version of RDMAP.
    #[inline]
    #[must_use]
    pub const fn rdmap_version(self) -> u8 {
        self.rdmap >> RDMAP_VERSION_SHIFT
    }

    /// Opcode of the message.
    #[inline]
    #[must_use]
    pub const fn opcode(self) -> RdmapOpcode {
        RdmapOpcode(self.rdmap & OPCODE_MASK)
    }
}

open_enum! {
    /// Error types of DDP in a Terminate message (RFC 5041 §7.2).
    pub enum DdpErrorType(u8) {
        /// Local catastrophic error, on the side that sends the message.
        LOCAL_CATASTROPHIC = 0x0,
        /// Tagged buffer error: [`TaggedError`].
        TAGGED_BUFFER = 0x1,
        /// Untagged buffer error: [`UntaggedError`].
        UNTAGGED_BUFFER = 0x2,
        /// Error of the lower layer protocol, MPA.
        LLP = 0x3,
    }

    /// Tagged buffer error codes (RFC 5041 §7.2).
    pub enum TaggedError(u8) {
        /// Invalid STag.
        INVALID_STAG = 0x00,
        /// Base or bounds violation.
        BASE_OR_BOUNDS = 0x01,
        /// The STag is not associated with this stream.
        STAG_NOT_ASSOCIATED = 0x02,
        /// Tagged offset wrap.
        TO_WRAP = 0x03,
        /// Unsupported DDP version.
        INVALID_VERSION = 0x04,
    }

    /// Untagged buffer error codes (RFC 5041 §7.2).
    pub enum UntaggedError(u8) {
        /// Invalid queue number.
        INVALID_QN = 0x01,
        /// Invalid MSN: no buffer available.
        NO_BUFFER = 0x02,
        /// Invalid MSN: out of range.
        MSN_RANGE = 0x03,
        /// Invalid message offset.
        INVALID_MO = 0x04,
        /// The message is too long for the buffer.
        TOO_LONG = 0x05,
        /// Unsupported DDP version.
        INVALID_VERSION = 0x06,
    }
}

/// T: the segment is tagged.
pub const FLAG_TAGGED: u8 = 0x80;
/// L: the segment is the last of its message.
pub const FLAG_LAST: u8 = 0x40;
/// DDP version of RFC 5041.
pub const DDP_VERSION: u8 = 1;
/// Mask of the version in the control field.
pub const DDP_VERSION_MASK: u8 = 0x03;

/// Queue of Sends of all kinds (RFC 5040).
pub const QUEUE_SEND: u32 = 0;
/// Queue of RDMA Read Requests.
pub const QUEUE_READ: u32 = 1;
/// Queue of Terminate messages.
pub const QUEUE_TERMINATE: u32 = 2;

/// Length of the control fields, in bytes.
pub const CONTROL_LEN: usize = 2;
/// Length of a tagged header, in bytes.
pub const TAGGED_LEN: usize = 14;
/// Length of an untagged header, in bytes.
pub const UNTAGGED_LEN: usize = 18;

const RDMAP_VERSION_SHIFT: u32 = 6;
const OPCODE_MASK: u8 = 0x0f;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    /// Headers that siw of Linux 6.12 sent for NVMe.
    #[test]
    fn headers_are_as_the_kernel_sent_them() {
        let control = Control::new(FLAG_LAST, RdmapOpcode::SEND);
        assert_eq!(control.as_bytes(), [0x41, 0x43]);
        assert!(control.is_last() && !control.is_tagged());
        assert_eq!((control.ddp_version(), control.rdmap_version()), (DDP_VERSION, RDMAP_VERSION));
        let control = Control::new(FLAG_TAGGED | FLAG_LAST, RdmapOpcode::RDMA_WRITE);
        assert_eq!(control.as_bytes(), [0xc1, 0x40]);
        assert!(control.is_tagged());
        let control = Control::new(FLAG_TAGGED, RdmapOpcode::RDMA_READ_RESPONSE);
        assert_eq!(control.as_bytes(), [0x81, 0x42]);
        assert!(!control.is_last());
    }

    #[test]
    fn an_unknown_version_and_opcode_are_read() {
        let control = Control { ddp: 0x3e, rdmap: 0xff };
        assert_eq!((control.ddp_version(), control.rdmap_version()), (2, 3));
        assert_eq!(control.opcode(), RdmapOpcode(15));
    }
}
