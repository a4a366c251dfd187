//! RDMAP: the messages (RFC 5040).
//!
//! RDMA Write and RDMA Read Response are tagged and have only DDP's header. The other messages are
//! untagged: Sends use queue 0, a [`ReadRequest`] queue 1, and a [`Terminate`] queue 2.

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, FromBytes, Immutable, IntoBytes, KnownLayout, U16, U32, U64, Unaligned};

layout! {
    /// An RDMA Read Request, after DDP's header (RFC 5040 §4.4).
    pub struct ReadRequest(READ_REQUEST_LEN) {
        /// Data sink: steering tag of the requester's memory.
        pub sink_stag: U32<BE>,
        /// Data sink: tagged offset.
        pub sink_to: U64<BE>,
        /// Length of the data, in bytes.
        pub rdma_rd_sz: U32<BE>,
        /// Data source: steering tag of the responder's memory.
        pub src_stag: U32<BE>,
        /// Data source: tagged offset.
        pub src_to: U64<BE>,
    }
}

/// The beginning of a Terminate message, after DDP's header (RFC 5040 §4.8).
///
/// The length of the offending DDP segment, its DDP header and its RDMAP header follow if the flags
/// say so.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Terminate {
    /// [`Layer`] in the high four bits, the error type in the low four.
    pub layer_etype: u8,
    /// Error code of that type.
    pub error_code: u8,
    /// `TERMINATE_*` flags.
    pub hdrct: u8,
    #[doc(hidden)]
    pub reserved: u8,
}
const _: () = assert!(size_of::<Terminate>() == TERMINATE_LEN);

impl Terminate {
    /// An error of a layer, with the flags for the fields that follow.
    #[inline]
    #[must_use]
    pub const fn new(layer: Layer, etype: u8, code: u8, hdrct: u8) -> Terminate {
        Terminate { layer_etype: layer.0 << 4 | (etype & 0x0f), error_code: code, hdrct, reserved: 0 }
    }

    /// The layer that detected the error.
    #[inline]
    #[must_use]
    pub const fn layer(&self) -> Layer {
        Layer(self.layer_etype >> 4)
    }

    /// The error type: [`RdmapErrorType`] or [`crate::iwarp::ddp::DdpErrorType`], depending on the
    /// layer; 0 for MPA.
    #[inline]
    #[must_use]
    pub const fn etype(&self) -> u8 {
        self.layer_etype & 0x0f
    }
}

impl core::fmt::Debug for Terminate {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "Terminate({} {:#x}/{:#04x}, {:#x})",
            self.layer(),
            self.etype(),
            self.error_code,
            self.hdrct
        )
    }
}

/// Length of the offending segment, in a Terminate message.
pub type SegmentLength = U16<BE>;

open_enum! {
    /// Operation codes (RFC 5040 §4.1).
    pub enum RdmapOpcode(u8) {
        /// RDMA Write, a tagged message.
        RDMA_WRITE = 0x0,
        /// [`ReadRequest`].
        RDMA_READ_REQUEST = 0x1,
        /// RDMA Read Response, a tagged message.
        RDMA_READ_RESPONSE = 0x2,
        /// Send.
        SEND = 0x3,
        /// Send with Invalidate: also invalidates a steering tag of the receiver.
        SEND_WITH_INVALIDATE = 0x4,
        /// Send with Solicited Event: also wakes the receiver.
        SEND_WITH_SE = 0x5,
        /// Send with Solicited Event and Invalidate.
        SEND_WITH_SE_AND_INVALIDATE = 0x6,
        /// [`Terminate`].
        TERMINATE = 0x7,
    }
}

impl RdmapOpcode {
    /// Whether this is a Send of any kind.
    #[inline]
    #[must_use]
    pub const fn is_send(self) -> bool {
        self.0 >= RdmapOpcode::SEND.0 && self.0 <= RdmapOpcode::SEND_WITH_SE_AND_INVALIDATE.0
    }

    /// Whether the message invalidates a steering tag of the receiver.
    #[inline]
    #[must_use]
    pub const fn invalidates(self) -> bool {
        matches!(self, RdmapOpcode::SEND_WITH_INVALIDATE | RdmapOpcode::SEND_WITH_SE_AND_INVALIDATE)
    }
}

open_enum! {
    /// The layer that detected an error (RFC 5040 §4.8).
    pub enum Layer(u8) {
        /// RDMAP; the error type is [`RdmapErrorType`].
        RDMAP = 0x0,
        /// DDP; the error type is [`crate::iwarp::ddp::DdpErrorType`].
        DDP = 0x1,
        /// MPA: [`crate::iwarp::mpa::MpaError`] is the code, the type is 0.
        LLP = 0x2,
    }

    /// Error types of RDMAP (RFC 5040 §4.8).
    pub enum RdmapErrorType(u8) {
        /// Local catastrophic error, on the side that sends the message.
        LOCAL_CATASTROPHIC = 0x0,
        /// Remote protection error: [`RdmapError::INVALID_STAG`] to [`RdmapError::TO_WRAP`], and
        /// [`RdmapError::CANNOT_INVALIDATE`].
        REMOTE_PROTECTION = 0x1,
        /// Remote operation error: the other codes.
        REMOTE_OPERATION = 0x2,
    }

    /// Error codes of RDMAP (RFC 5040 §4.8).
    pub enum RdmapError(u8) {
        /// Invalid STag.
        INVALID_STAG = 0x00,
        /// Base or bounds violation.
        BASE_OR_BOUNDS = 0x01,
        /// Access rights violation.
        ACCESS_RIGHTS = 0x02,
        /// The STag is not associated with this stream.
        STAG_NOT_ASSOCIATED = 0x03,
        /// Tagged offset wrap.
        TO_WRAP = 0x04,
        /// Unsupported RDMAP version.
        INVALID_VERSION = 0x05,
        /// Unexpected opcode.
        UNEXPECTED_OPCODE = 0x06,
        /// Catastrophic error, localized to the stream.
        CATASTROPHIC_STREAM = 0x07,
        /// Catastrophic error, global.
        CATASTROPHIC_GLOBAL = 0x08,
        /// The STag cannot be invalidated.
        CANNOT_INVALIDATE = 0x09,
        /// Unspecified error.
        UNSPECIFIED = 0xff,
    }
}

/// RDMAP version of RFC 5040.
pub const RDMAP_VERSION: u8 = 1;

/// M: the length of the segment follows and is valid.
pub const TERMINATE_LENGTH: u8 = 0x80;
/// D: the segment's DDP header follows.
pub const TERMINATE_DDP: u8 = 0x40;
/// R: the segment's RDMAP header follows.
pub const TERMINATE_RDMAP: u8 = 0x20;

/// Length of a Read Request, in bytes.
pub const READ_REQUEST_LEN: usize = 28;
/// Length of a Terminate message without the optional fields, in bytes.
pub const TERMINATE_LEN: usize = 4;
#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;

    /// A message that siw of Linux 6.12 sent for SRP.
    #[test]
    fn a_read_request_is_as_the_kernel_sent_it() {
        let bytes = [
            0xf7, 0x39, 0x0a, 0x01, 0xff, 0xff, 0x88, 0x80, 0x3f, 0x44, 0xc0, 0, 0, 0, 0xc0, 0, 0xda, 0x6f,
            0x6f, 0x18, 0xff, 0xff, 0x88, 0x80, 0x03, 0x30, 0x50, 0,
        ];
        let request = ReadRequest::ref_from_bytes(&bytes).unwrap();
        assert_eq!((request.sink_stag.get(), request.sink_to.get()), (0xf739_0a01, 0xffff_8880_3f44_c000));
        assert_eq!((request.rdma_rd_sz.get(), request.src_stag.get()), (48 << 10, 0xda6f_6f18));
        assert_eq!(request.src_to.get(), 0xffff_8880_0330_5000);
    }

    #[test]
    fn a_terminate_message_names_layer_type_and_code() {
        let terminate = Terminate::new(Layer::DDP, 2, 5, TERMINATE_LENGTH | TERMINATE_DDP);
        assert_eq!(terminate.as_bytes(), [0x12, 0x05, 0xc0, 0]);
        assert_eq!((terminate.layer(), terminate.etype()), (Layer::DDP, 2));
        assert_eq!(std::format!("{terminate:?}"), "Terminate(DDP 0x2/0x05, 0xc0)");
    }

    #[test]
    fn send_opcodes_are_recognized() {
        let sends: std::vec::Vec<u8> = (0..16).filter(|&code| RdmapOpcode(code).is_send()).collect();
        assert_eq!(sends, [3, 4, 5, 6]);
        let closing: std::vec::Vec<u8> = (0..16).filter(|&code| RdmapOpcode(code).invalidates()).collect();
        assert_eq!(closing, [4, 6]);
    }
}
