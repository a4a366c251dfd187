//! DDP: where payload belongs (RFC 5041).
//!
//! A segment is *tagged*, for memory that the receiver has opened under a name, or *untagged*, for
//! the next buffer of one of the receiver's queues. A message is one segment or several; the last
//! of them says so.

use crate::iwarp::rdmap::{RDMAP_VERSION, RdmapOpcode};
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, FromBytes, Immutable, IntoBytes, KnownLayout, U32, U64, Unaligned};

/// What all segments begin with: DDP's control field and RDMAP's (RFC 5041 §4.1, RFC 5040 §4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Control {
    /// [`FLAG_TAGGED`], [`FLAG_LAST`], and DDP's version.
    pub ddp: u8,
    /// RDMAP's version and [`RdmapOpcode`].
    pub rdmap: u8,
}
const _: () = assert!(size_of::<Control>() == CONTROL_LEN);

/// The header of a tagged segment (RFC 5041 §4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Tagged {
    /// With [`FLAG_TAGGED`].
    pub control: Control,
    /// The name of the receiver's memory.
    pub stag: U32<BE>,
    /// Tagged offset: where in it the payload begins.
    pub to: U64<BE>,
}
const _: () = assert!(size_of::<Tagged>() == TAGGED_LEN);

/// The header of an untagged segment (RFC 5041 §4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Untagged {
    /// Without [`FLAG_TAGGED`].
    pub control: Control,
    /// RDMAP's: memory that a Send with Invalidate closes; else reserved.
    pub invalidate_stag: U32<BE>,
    /// Queue number: [`QUEUE_SEND`] or one of its neighbours.
    pub qn: U32<BE>,
    /// Message sequence number, in its queue, from 1.
    pub msn: U32<BE>,
    /// Message offset: where in the message the payload begins.
    pub mo: U32<BE>,
}
const _: () = assert!(size_of::<Untagged>() == UNTAGGED_LEN);

impl Control {
    /// Of our versions of both protocols.
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

    /// Whether it is the last of its message.
    #[inline]
    #[must_use]
    pub const fn is_last(self) -> bool {
        self.ddp & FLAG_LAST != 0
    }

    /// Of DDP.
    #[inline]
    #[must_use]
    pub const fn ddp_version(self) -> u8 {
        self.ddp & DDP_VERSION_MASK
    }

    /// Of RDMAP.
    #[inline]
    #[must_use]
    pub const fn rdmap_version(self) -> u8 {
        self.rdmap >> RDMAP_VERSION_SHIFT
    }

    /// What the message is.
    #[inline]
    #[must_use]
    pub const fn opcode(self) -> RdmapOpcode {
        RdmapOpcode(self.rdmap & OPCODE_MASK)
    }
}

open_enum! {
    /// Error types of DDP in a Terminate message (RFC 5041 §7.2).
    pub enum DdpErrorType(u8) {
        /// On the side that says so.
        LOCAL_CATASTROPHIC = 0x0,
        /// In a tagged segment: [`TaggedError`].
        TAGGED_BUFFER = 0x1,
        /// In an untagged segment: [`UntaggedError`].
        UNTAGGED_BUFFER = 0x2,
        /// Of MPA.
        LLP = 0x3,
    }
}

open_enum! {
    /// What was wrong with a tagged segment (RFC 5041 §7.2).
    pub enum TaggedError(u8) {
        /// No memory has that name.
        INVALID_STAG = 0x00,
        /// Not all of it lies in the memory.
        BASE_OR_BOUNDS = 0x01,
        /// The memory is another stream's.
        STAG_NOT_ASSOCIATED = 0x02,
        /// It goes beyond the largest offset.
        TO_WRAP = 0x03,
        /// The version of DDP is not ours.
        INVALID_VERSION = 0x04,
    }
}

open_enum! {
    /// What was wrong with an untagged segment (RFC 5041 §7.2).
    pub enum UntaggedError(u8) {
        /// There is no such queue.
        INVALID_QN = 0x01,
        /// The queue has no buffer for it.
        NO_BUFFER = 0x02,
        /// The message is not the next one of its queue.
        MSN_RANGE = 0x03,
        /// It is not the next segment of its message.
        INVALID_MO = 0x04,
        /// The buffer is too short.
        TOO_LONG = 0x05,
        /// The version of DDP is not ours.
        INVALID_VERSION = 0x06,
    }
}

/// T: the segment is tagged.
pub const FLAG_TAGGED: u8 = 0x80;
/// L: it is the last of its message.
pub const FLAG_LAST: u8 = 0x40;
/// The version of RFC 5041.
pub const DDP_VERSION: u8 = 1;
/// What is left of the control field for the version.
pub const DDP_VERSION_MASK: u8 = 0x03;

/// Sends of all kinds (RFC 5040).
pub const QUEUE_SEND: u32 = 0;
/// RDMA Read Requests.
pub const QUEUE_READ: u32 = 1;
/// Terminate.
pub const QUEUE_TERMINATE: u32 = 2;

/// Of the control fields, in bytes.
pub const CONTROL_LEN: usize = 2;
/// Of a tagged header, in bytes.
pub const TAGGED_LEN: usize = 14;
/// Of an untagged header, in bytes.
pub const UNTAGGED_LEN: usize = 18;

const RDMAP_VERSION_SHIFT: u32 = 6;
const OPCODE_MASK: u8 = 0x0f;

#[cfg(test)]
mod tests {
    use super::*;

    /// As siw of Linux 6.12 sent them for NVMe.
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
