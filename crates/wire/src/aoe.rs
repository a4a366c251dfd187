//! ATA over Ethernet (specification AoEr11): the payload of Ethernet frames of type 0x88A2.
//!
//! Every message is a [`Header`] and the message of its command; requests and responses have the
//! same layout. Numbers are big-endian, except the block address of the ATA registers
//! ([`AtaMessage::lba`]). No structure here has padding.

use crate::ethernet::Mac;
use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, U16, U32};

layout! {
    /// The header of every message (section 2).
    pub struct Header(10) {
        /// The version in the upper four bits, flags in the lower: [`AOE_FLAG_RESPONSE`],
        /// [`AOE_FLAG_ERROR`].
        pub version_and_flags: u8,
        /// The [`ErrorCode`] of a response with [`AOE_FLAG_ERROR`].
        pub error: u8,
        /// Shelf address; [`ANY_SHELF`] in a request addresses every shelf.
        pub major: U16<BE>,
        /// Slot address; [`ANY_SLOT`] in a request addresses every slot.
        pub minor: u8,
        /// An [`AoeCommand`].
        pub command: u8,
        /// Tag of the request; the response returns it.
        pub tag: U32<BE>,
    }
}

impl Header {
    /// Protocol version.
    #[must_use]
    pub const fn version(&self) -> u8 {
        self.version_and_flags >> 4
    }

    /// Whether the message is a response.
    #[must_use]
    pub const fn is_response(&self) -> bool {
        self.version_and_flags & AOE_FLAG_RESPONSE != 0
    }

    /// Whether the message is a response with an error.
    #[must_use]
    pub const fn is_error(&self) -> bool {
        self.version_and_flags & AOE_FLAG_ERROR != 0
    }
}

layout! {
    /// The message of command 0, Issue ATA Command (section 3.1): the ATA registers. The data of a
    /// write follows in the request, the data of a read in the response.
    pub struct AtaMessage(12) {
        /// Flags `AOE_AFLAG_*`.
        pub aflags: u8,
        /// Feature register of a request, error register of a response.
        pub error_or_feature: u8,
        /// Sector count register.
        pub sector_count: u8,
        /// Command register of a request, status register of a response.
        pub command_or_status: u8,
        /// Block address, lowest byte first. Without [`AOE_AFLAG_EXTENDED`] it has 28 bits, of
        /// which the upper four are in the lower half of byte 3.
        pub lba: [u8; 6],
        pub reserved: [u8; 2] = 0,
    }
}

impl AtaMessage {
    /// The block that the registers address.
    #[must_use]
    pub const fn block(&self) -> u64 {
        let [a, b, c, d, e, f] = self.lba;
        if self.aflags & AOE_AFLAG_EXTENDED != 0 {
            u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
        } else {
            u64::from_le_bytes([a, b, c, d & 0x0f, 0, 0, 0, 0])
        }
    }

    /// Encodes a block address in 48 bits; higher bits are dropped.
    #[must_use]
    pub const fn lba48(block: u64) -> [u8; 6] {
        let [a, b, c, d, e, f, _, _] = block.to_le_bytes();
        [a, b, c, d, e, f]
    }

    /// Encodes a block address in 28 bits, with the LBA bit and the two obsolete 1 bits of the
    /// device register; higher bits are dropped.
    #[must_use]
    pub const fn lba28(block: u64) -> [u8; 6] {
        let [a, b, c, d, ..] = block.to_le_bytes();
        [a, b, c, d & 0x0f | 0xe0, 0, 0]
    }
}

layout! {
    /// The message of command 1, Query Config Information (section 3.2); `string_length` bytes of
    /// the config string follow.
    pub struct ConfigMessage(8) {
        /// In a response: the number of commands that the target can queue before it drops frames.
        pub buffer_count: U16<BE>,
        /// In a response: firmware version of the target.
        pub firmware_version: U16<BE>,
        /// Most sectors of one command; 0 means 2 to old initiators.
        pub sector_count: u8,
        /// The version in the upper four bits, [`ConfigCommand`] in the lower.
        pub version_and_command: u8,
        /// Length of the config string in bytes, at most [`AOE_MAX_CONFIG`].
        pub string_length: U16<BE>,
    }
}

impl ConfigMessage {
    /// The action on the config string.
    #[must_use]
    pub const fn command(&self) -> ConfigCommand {
        ConfigCommand(self.version_and_command & 0x0f)
    }
}

layout! {
    /// The message of command 2, MAC Mask List (section 3.3); `count` [`MacDirective`]s follow.
    pub struct MacMaskMessage(4) {
        pub reserved: u8 = 0,
        /// A [`MacMaskCommand`].
        pub command: u8,
        /// In a response: a [`MacMaskError`].
        pub error: u8,
        /// Number of directives that follow.
        pub count: u8,
    }

    /// One entry of a MAC mask list, or one change to it.
    pub struct MacDirective(8) {
        pub reserved: u8 = 0,
        /// A [`DirectiveCommand`].
        pub command: u8,
        /// MAC address of an initiator.
        pub mac: Mac,
    }

    /// The message of command 3, Reserve/Release (section 3.4); `count` MAC addresses follow.
    pub struct ReserveMessage(2) {
        /// A [`ReserveCommand`].
        pub command: u8,
        /// Number of MAC addresses that follow.
        pub count: u8,
    }
}

open_enum! {
    /// Command of a message.
    pub enum AoeCommand(u8) {
        /// Issue ATA Command.
        ISSUE_ATA_COMMAND = 0,
        /// Query Config Information.
        QUERY_CONFIG_INFORMATION = 1,
        /// MAC Mask List.
        MAC_MASK_LIST = 2,
        /// Reserve/Release.
        RESERVE_RELEASE = 3,
    }

    /// Error codes of responses.
    pub enum ErrorCode(u8) {
        /// The server does not know the command.
        UNRECOGNIZED_COMMAND_CODE = 1,
        /// A value in the arguments is not valid.
        BAD_ARGUMENT_PARAMETER = 2,
        /// The server can no longer access the device.
        DEVICE_UNAVAILABLE = 3,
        /// The config string is already set.
        CONFIG_STRING_PRESENT = 4,
        /// The server does not support this protocol version.
        UNSUPPORTED_VERSION = 5,
        /// Another initiator has reserved the target.
        TARGET_IS_RESERVED = 6,
    }

    /// Actions on a config string.
    pub enum ConfigCommand(u8) {
        /// Return the config string.
        READ = 0,
        /// Respond only if the config string equals the one in the request.
        TEST = 1,
        /// Respond only if the config string begins with the one in the request.
        TEST_PREFIX = 2,
        /// Set the config string if it is empty.
        SET = 3,
        /// Set the config string.
        FORCE_SET = 4,
    }

    /// Actions on a MAC mask list.
    pub enum MacMaskCommand(u8) {
        /// Return the list.
        READ = 0,
        /// Change the list by the directives.
        EDIT = 1,
    }

    /// Changes of a MAC mask list.
    pub enum DirectiveCommand(u8) {
        /// No change.
        NONE = 0,
        /// Add the address.
        ADD = 1,
        /// Remove the address.
        DELETE = 2,
    }

    /// Results of a request to change a MAC mask list.
    pub enum MacMaskError(u8) {
    /// The list was changed.
    NONE = 0,
    /// The list was not changed, for a reason that has no code.
        UNSPECIFIED = 1,
        /// A directive's command is unknown.
        BAD_DIRECTIVE = 2,
        /// The list is full.
        LIST_FULL = 3,
    }

    /// Actions on the reserve list: the initiators for which a target is reserved.
    pub enum ReserveCommand(u8) {
    /// Return the list.
    READ = 0,
    /// Replace the list, if it is empty or contains the sender.
    SET = 1,
    /// Replace the list unconditionally.
        FORCE_SET = 2,
    }
}

/// The version of these messages.
pub const AOE_VERSION: u8 = 1;
/// The message is a response.
pub const AOE_FLAG_RESPONSE: u8 = 1 << 3;
/// The request failed; set together with [`AOE_FLAG_RESPONSE`].
pub const AOE_FLAG_ERROR: u8 = 1 << 2;

/// ATA flag: the address has 48 bits.
pub const AOE_AFLAG_EXTENDED: u8 = 1 << 6;
/// ATA flag: the DEV bit of the device register.
pub const AOE_AFLAG_DEVICE: u8 = 1 << 4;
/// ATA flag: a write may be answered before it has completed.
pub const AOE_AFLAG_ASYNCHRONOUS: u8 = 1 << 1;
/// ATA flag: the request carries data for the device.
pub const AOE_AFLAG_WRITE: u8 = 1 << 0;

/// Shelf address of a request to every shelf.
pub const ANY_SHELF: u16 = 0xffff;
/// Slot address of a request to every slot.
pub const ANY_SLOT: u8 = 0xff;
/// The longest config string, in bytes.
pub const AOE_MAX_CONFIG: usize = 1024;
/// Length of the headers before the data of an ATA command, without the Ethernet header, in bytes.
pub const AOE_ATA_HEAD: usize = size_of::<Header>() + size_of::<AtaMessage>();

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::{FromBytes, Unaligned};

    /// Parses the AoE header and the message after it, of a frame with an Ethernet header.
    fn parse<T: FromBytes + Unaligned>(bytes: &[u8]) -> (Header, T) {
        let (header, rest) = Header::read_from_prefix(bytes).unwrap();
        (header, T::read_from_prefix(rest).unwrap().0)
    }

    #[test]
    fn a_query_and_its_answer_read_as_the_kernel_and_vblade_sent_them() {
        let query = [0x10, 0, 0xff, 0xff, 0xff, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let (header, config) = parse::<ConfigMessage>(&query);
        assert_eq!((header.version(), header.is_response(), header.is_error()), (AOE_VERSION, false, false));
        assert_eq!((header.major.get(), header.minor), (ANY_SHELF, ANY_SLOT));
        assert_eq!(AoeCommand(header.command), AoeCommand::QUERY_CONFIG_INFORMATION);
        assert_eq!((config.command(), config.string_length.get()), (ConfigCommand::READ, 0));

        let answer = [0x18, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0x80, 0x40, 0x19, 0x11, 0x10, 0, 0];
        let (header, config) = parse::<ConfigMessage>(&answer);
        assert_eq!((header.is_response(), header.major.get(), header.minor), (true, 1, 1));
        assert_eq!((config.buffer_count.get(), config.sector_count), (128, 17));
        assert_eq!(config.version_and_command >> 4, AOE_VERSION);
    }

    #[test]
    fn ata_commands_read_as_the_kernel_sent_them() {
        let read = [0x10, 0, 0, 1, 1, 0, 0, 2, 0xdf, 0xa7, 0x40, 0, 8, 0x24, 0, 0, 0, 0, 0, 0, 0, 0];
        let (header, ata) = parse::<AtaMessage>(&read);
        assert_eq!((header.tag.get(), AoeCommand(header.command)), (0x2_dfa7, AoeCommand::ISSUE_ATA_COMMAND));
        assert_eq!((ata.aflags, ata.sector_count), (AOE_AFLAG_EXTENDED, 8));
        assert_eq!(crate::ata::AtaCommand(ata.command_or_status), crate::ata::AtaCommand::READ_SECTORS_EXT);
        let write = [0x10, 0, 0, 1, 1, 0, 0, 8, 0xdf, 0xc4, 0x41, 0, 8, 0x34, 0, 0, 0, 0, 0, 0, 0, 0];
        let (_, ata) = parse::<AtaMessage>(&write);
        assert_eq!(ata.aflags, AOE_AFLAG_EXTENDED | AOE_AFLAG_WRITE);
        // Linux sends IDENTIFY DEVICE without the E bit and with the bits of the device register.
        let identify = [0x10, 0, 0, 1, 1, 0, 0, 1, 0xdf, 0x9c, 0, 0, 1, 0xec, 0, 0, 0, 0xa0, 0, 0, 0, 0];
        assert_eq!(parse::<AtaMessage>(&identify).1.block(), 0);
    }

    #[test]
    fn block_addresses_have_48_or_28_bits() {
        let message = |aflags, lba| AtaMessage {
            aflags,
            error_or_feature: 0,
            sector_count: 1,
            command_or_status: 0,
            lba,
            reserved: [0; 2],
        };
        let block = 0x1234_5678_9abc;
        assert_eq!(message(AOE_AFLAG_EXTENDED, AtaMessage::lba48(block)).block(), block);
        assert_eq!(AtaMessage::lba48(block)[0], 0xbc);
        assert_eq!(message(0, AtaMessage::lba28(0xfed_cba9)).block(), 0xfed_cba9);
        assert_eq!(AtaMessage::lba28(0)[3], 0xe0);
    }
}
