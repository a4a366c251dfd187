//! iSCSI, as RFC 7143 and its extension RFC 7144 have it.
//!
//! ```text
//!   Basic Header Segment │ Additional Header Segments │ Header-Digest │ Data Segment, padded  │ Data-Digest
//!   48 bytes             │ TotalAHSLength × 4 bytes   │ 0 or 4 bytes  │ to a multiple of 4    │ 0 or 4 bytes
//! ```
//! [`Bhs`] has the fields that all headers share (RFC 7143 §11.2.1). The structures of [`scsi`] are
//! PDUs for commands and data, those of [`session`] are PDUs for login, text, NOP, logout and
//! events. Each is 48 bytes long, without padding, big-endian. Field names are those of the RFC in
//! snake case.

pub mod ahs;
pub mod scsi;
pub mod session;

use crate::layout::layout;
use crate::open_enum::open_enum;
pub use crate::u24::U24;
use zerocopy::{BigEndian as BE, U32};

layout! {
    /// The fields of the Basic Header Segment that all PDUs share (RFC 7143 §11.2.1).
    pub struct Bhs(BHS_LEN) {
        /// The I bit and [`IscsiOpcode`].
        pub opcode: u8,
        /// The F bit in most PDUs, and opcode-specific flags.
        pub flags: u8,
        /// Opcode-specific.
        pub specific: [u8; 2],
        /// TotalAHSLength, in units of four bytes.
        pub total_ahs_length: u8,
        /// DataSegmentLength, in bytes, without padding.
        pub data_segment_length: U24,
        /// LUN, or opcode-specific.
        pub lun: [u8; 8],
        /// Initiator Task Tag, chosen by the initiator for each task.
        pub initiator_task_tag: U32<BE>,
        /// Opcode-specific.
        pub specific_end: [u8; 28],
    }
}

/// Declares PDUs as [`layout!`] does, with the fields that have the same meaning in all: the
/// opcode; both lengths at `lengths`; the numbers of commands and responses at `request_numbers` in
/// PDUs of initiators, and at `response_numbers` in those of targets.
macro_rules! pdus {
    ($($(#[$meta:meta])* pub struct $name:ident {
        $($(#[$doc:meta])* pub $field:ident: $type:ty $(= $zero:literal)?,)*
        lengths,
        $($(#[$doc2:meta])* pub $field2:ident: $type2:ty $(= $zero2:literal)?,)*
        $(request_numbers, $($(#[$doc3:meta])* pub $field3:ident: $type3:ty $(= $zero3:literal)?,)*)?
        $(response_numbers, $($(#[$doc4:meta])* pub $field4:ident: $type4:ty $(= $zero4:literal)?,)*)?
    })*) => { $crate::layout::layout! {$(
        $(#[$meta])*
        pub struct $name($crate::iscsi::BHS_LEN) {
            /// [`crate::iscsi::IscsiOpcode`], and the I bit in requests.
            pub opcode: u8,
            $($(#[$doc])* pub $field: $type $(= $zero)?,)*
            /// TotalAHSLength, in units of four bytes; 0 except in a SCSI command.
            pub total_ahs_length: u8,
            /// DataSegmentLength, in bytes, without padding; 0 if no data follows.
            pub data_segment_length: $crate::iscsi::U24,
            $($(#[$doc2])* pub $field2: $type2 $(= $zero2)?,)*
            $(
                /// CmdSN: orders the commands of a session.
                pub cmd_sn: zerocopy::U32<zerocopy::BigEndian>,
                /// ExpStatSN: acknowledges responses.
                pub exp_stat_sn: zerocopy::U32<zerocopy::BigEndian>,
                $($(#[$doc3])* pub $field3: $type3 $(= $zero3)?,)*
            )?
            $(
                /// StatSN of this response; a ping and an R2T have the next one, and Data-In has
                /// one only with S.
                pub stat_sn: zerocopy::U32<zerocopy::BigEndian>,
                /// ExpCmdSN: the next CmdSN that the target expects.
                pub exp_cmd_sn: zerocopy::U32<zerocopy::BigEndian>,
                /// MaxCmdSN: the last CmdSN that the target accepts.
                pub max_cmd_sn: zerocopy::U32<zerocopy::BigEndian>,
                $($(#[$doc4])* pub $field4: $type4 $(= $zero4)?,)*
            )?
        }
    )*} };
}
pub(crate) use pdus;

impl Bhs {
    /// The opcode without the I bit.
    #[inline]
    #[must_use]
    pub const fn opcode(&self) -> IscsiOpcode {
        IscsiOpcode(self.opcode & OPCODE_MASK)
    }

    /// Whether the I bit requests immediate delivery (RFC 7143 §11.2.1.1).
    #[inline]
    #[must_use]
    pub const fn is_immediate(&self) -> bool {
        self.opcode & FLAG_IMMEDIATE != 0
    }

    /// Length of the Additional Header Segments that follow, in bytes.
    #[inline]
    #[must_use]
    pub const fn ahs_len(&self) -> usize {
        // At most 1020.
        self.total_ahs_length as usize * 4
    }
}

open_enum! {
    /// Operation codes (RFC 7143 §11.2.1.2); those of targets have bit 5 set.
    pub enum IscsiOpcode(u8) {
        /// [`session::NopOut`].
        NOP_OUT = 0x00,
        /// [`scsi::ScsiCommand`].
        SCSI_COMMAND = 0x01,
        /// [`scsi::TaskManagementFunctionRequest`].
        TASK_MANAGEMENT_REQUEST = 0x02,
        /// [`session::IscsiLoginRequest`].
        LOGIN_REQUEST = 0x03,
        /// [`session::TextRequest`].
        TEXT_REQUEST = 0x04,
        /// [`scsi::DataOut`].
        DATA_OUT = 0x05,
        /// [`session::LogoutRequest`].
        LOGOUT_REQUEST = 0x06,
        /// [`scsi::SnackRequest`].
        SNACK_REQUEST = 0x10,
        /// [`session::NopIn`].
        NOP_IN = 0x20,
        /// [`scsi::ScsiResponse`].
        SCSI_RESPONSE = 0x21,
        /// [`scsi::TaskManagementFunctionResponse`].
        TASK_MANAGEMENT_RESPONSE = 0x22,
        /// [`session::IscsiLoginResponse`].
        LOGIN_RESPONSE = 0x23,
        /// [`session::TextResponse`].
        TEXT_RESPONSE = 0x24,
        /// [`scsi::DataIn`].
        DATA_IN = 0x25,
        /// [`session::LogoutResponse`].
        LOGOUT_RESPONSE = 0x26,
        /// [`scsi::IscsiR2t`].
        R2T = 0x31,
        /// [`session::AsyncMessage`].
        ASYNC_MESSAGE = 0x32,
        /// [`session::Reject`].
        REJECT = 0x3f,
    }
}

/// Number of padding bytes after `len` bytes (RFC 7143 §11.1).
#[inline]
#[must_use]
pub const fn padding(len: usize) -> usize {
    len.wrapping_neg() % 4
}

/// Length of the Basic Header Segment, in bytes.
pub const BHS_LEN: usize = 48;

/// Length of a header or data digest, in bytes.
pub const DIGEST_LEN: usize = 4;

/// The port that IANA assigned to iSCSI (RFC 7143 §13.8).
pub const ISCSI_DEFAULT_PORT: u16 = 3260;

/// The reserved task tag (RFC 7143 §11.2.1.8).
pub const RESERVED_TAG: u32 = 0xffff_ffff;

/// The longest iSCSI name, in bytes (RFC 7143 §4.2.7.1).
pub const ISCSI_MAX_NAME: usize = 223;

/// I, in the opcode byte: immediate delivery, outside the order of CmdSN.
pub const FLAG_IMMEDIATE: u8 = 0x40;
/// The opcode in the opcode byte.
pub const OPCODE_MASK: u8 = 0x3f;

/// F, in the flags: the last PDU of a sequence.
pub const FLAG_FINAL: u8 = 0x80;
/// C, in a login or text PDU: the text continues in the next PDU.
pub const FLAG_CONTINUE: u8 = 0x40;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    #[test]
    fn padding_fills_to_four_bytes() {
        assert_eq!([0, 1, 2, 3, 4, 5].map(padding), [0, 3, 2, 1, 0, 3]);
    }

    #[test]
    fn an_opcode_is_read_without_the_i_bit() {
        let mut bhs = Bhs::read_from_bytes(&[0; BHS_LEN]).unwrap();
        bhs.opcode = 0x43;
        bhs.total_ahs_length = 255;
        assert_eq!(
            (bhs.opcode(), bhs.is_immediate(), bhs.ahs_len()),
            (IscsiOpcode::LOGIN_REQUEST, true, 1020)
        );
    }
}
