//! Generic netlink, and the commands of Linux's NBD driver: `linux/netlink.h`,
//! `linux/genetlink.h`, `linux/nbd-netlink.h`.
//!
//! A message is a [`NetlinkHeader`], a [`CommandHeader`] and attributes. An attribute is an
//! [`AttributeHeader`] and its value, and zeroes up to a multiple of 4 bytes. Numbers have the
//! machine's own byte order. No structure here has padding.

use crate::layout::native_layout;
use crate::open_enum::open_enum;

native_layout! {
    /// The start of a message (`struct nlmsghdr`).
    pub struct NetlinkHeader(16) {
        /// Length of the message in bytes.
        pub len: u32,
        /// A family, or [`NLMSG_ERROR`].
        pub kind: u16,
        /// Flags `NLM_F_*`.
        pub flags: u16,
        /// Identifies the request; its replies repeat it.
        pub seq: u32,
        /// Port of the sender; 0: the kernel chooses it.
        pub pid: u32,
    }

    /// The start of a generic message (`struct genlmsghdr`).
    pub struct CommandHeader(4) {
        /// A command of the family.
        pub command: u8,
        /// Version of the family.
        pub version: u8,
        pub reserved: u16 = 0,
    }

    /// The start of an attribute (`struct nlattr`).
    pub struct AttributeHeader(4) {
        /// Length of this header and the value in bytes.
        pub len: u16,
        /// An attribute of the family; with [`NLA_F_NESTED`] its value is a list of attributes.
        pub kind: u16,
    }

    /// The end of a request (`struct nlmsgerr`).
    pub struct ErrorMessage(4) {
        /// 0, or an error number, negative.
        pub error: i32,
    }
}

open_enum! {
    /// A command of the NBD driver (`NBD_CMD_*`).
    pub enum NbdCommand(u8) {
        /// Make a disk of sockets.
        NBD_CMD_CONNECT = 1,
        /// Remove a disk.
        NBD_CMD_DISCONNECT = 2,
        /// Replace sockets whose peer has closed them.
        NBD_CMD_RECONFIGURE = 3,
    }

    /// An attribute of a command of the NBD driver (`NBD_ATTR_*`).
    pub enum NbdAttribute(u16) {
        /// Number of the disk, 32 bits; without it the driver chooses one.
        NBD_ATTR_INDEX = 1,
        /// Size in bytes, 64 bits.
        NBD_ATTR_SIZE_BYTES = 2,
        /// Logical block in bytes, 64 bits.
        NBD_ATTR_BLOCK_SIZE_BYTES = 3,
        /// Timeout of requests in seconds, 64 bits.
        NBD_ATTR_TIMEOUT = 4,
        /// Transmission flags, 64 bits.
        NBD_ATTR_SERVER_FLAGS = 5,
        /// A list of [`NBD_SOCK_ITEM`].
        NBD_ATTR_SOCKETS = 7,
        /// How long requests wait for a socket, in seconds, 64 bits.
        NBD_ATTR_DEAD_CONN_TIMEOUT = 8,
        /// A text of the server's choice, which later commands must repeat.
        NBD_ATTR_BACKEND_IDENTIFIER = 10,
    }
}

/// The driver's family.
pub const NBD_GENL_FAMILY_NAME: &str = "nbd";
/// The version of the driver's family.
pub const NBD_GENL_VERSION: u8 = 1;
/// An element of [`NbdAttribute::NBD_ATTR_SOCKETS`]: a list with one [`NBD_SOCK_FD`].
pub const NBD_SOCK_ITEM: u16 = 1;
/// A descriptor of the calling process, 32 bits.
pub const NBD_SOCK_FD: u16 = 1;

/// The family that names the others.
pub const GENL_ID_CTRL: u16 = 0x10;
/// Asks that family for another one.
pub const CTRL_CMD_GETFAMILY: u8 = 3;
/// The number of a family, 16 bits.
pub const CTRL_ATTR_FAMILY_ID: u16 = 1;
/// The name of a family, with a zero byte at the end.
pub const CTRL_ATTR_FAMILY_NAME: u16 = 2;

/// The message is a request.
pub const NLM_F_REQUEST: u16 = 1;
/// The request is to be ended by an [`ErrorMessage`].
pub const NLM_F_ACK: u16 = 4;
/// The kind of a message with an [`ErrorMessage`].
pub const NLMSG_ERROR: u16 = 2;
/// The value of an attribute is a list of attributes.
pub const NLA_F_NESTED: u16 = 1 << 15;
/// The bits of an attribute's kind that are no flags.
pub const NLA_TYPE_MASK: u16 = 0x3fff;
