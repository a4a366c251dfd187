//! Commands to the kernel's NBD driver by generic netlink.

use blockmux_proto::nbd::netlink::{
    AttributeHeader, CTRL_ATTR_FAMILY_ID, CTRL_ATTR_FAMILY_NAME, CTRL_CMD_GETFAMILY, CommandHeader,
    ErrorMessage, GENL_ID_CTRL, NBD_GENL_FAMILY_NAME, NBD_GENL_VERSION, NBD_SOCK_FD, NBD_SOCK_ITEM,
    NLA_F_NESTED, NLA_TYPE_MASK, NLM_F_ACK, NLM_F_REQUEST, NLMSG_ERROR, NbdAttribute, NbdCommand,
    NetlinkHeader,
};
use rustix::net::netlink::{GENERIC, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use zerocopy::{FromBytes, IntoBytes};

/// Why a command to the NBD driver failed.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The driver is not there.
    #[error("the kernel has no NBD driver; load it with `modprobe nbd` (CONFIG_BLK_DEV_NBD)")]
    NoDriver,
    /// Netlink cannot be used.
    #[error("cannot use generic netlink: {0}")]
    Unusable(io::Error),
    /// The driver refused the command.
    #[error("the kernel refuses {command}: {error}{}", hint(error))]
    Refused {
        /// The command.
        command: NbdCommand,
        /// The error of the driver.
        error: io::Error,
    },
}

fn hint(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::PermissionDenied { "; run as root" } else { "" }
}

/// Whether this machine has the driver.
///
/// # Errors
/// If not; the error says why.
pub fn probe() -> Result<(), NetlinkError> {
    NbdNetlink::open().map(drop)
}

/// Sends commands to the driver, each over a socket of its own: one that blocks, as a disconnect
/// does, delays no other, and none gets another one's reply.
pub(super) struct NbdNetlink {
    family: u16,
}

/// The attributes of a command.
#[derive(Default)]
pub(super) struct NbdAttributes(Vec<u8>);

impl NbdAttributes {
    pub(super) fn number(mut self, kind: NbdAttribute, value: u64) -> NbdAttributes {
        push_attribute(&mut self.0, kind.0, value.as_bytes());
        self
    }

    pub(super) fn index(mut self, index: u32) -> NbdAttributes {
        push_attribute(&mut self.0, NbdAttribute::NBD_ATTR_INDEX.0, index.as_bytes());
        self
    }

    /// The text by which the disk is found again.
    pub(super) fn identifier(mut self, identifier: &str) -> NbdAttributes {
        let bytes = [identifier.as_bytes(), &[0]].concat();
        push_attribute(&mut self.0, NbdAttribute::NBD_ATTR_BACKEND_IDENTIFIER.0, &bytes);
        self
    }

    /// The driver takes another reference of each socket.
    pub(super) fn sockets<'a>(mut self, sockets: impl Iterator<Item = BorrowedFd<'a>>) -> NbdAttributes {
        let mut items = Vec::new();
        for socket in sockets {
            let mut item = Vec::new();
            push_attribute(&mut item, NBD_SOCK_FD, socket.as_raw_fd().as_bytes());
            push_attribute(&mut items, NBD_SOCK_ITEM | NLA_F_NESTED, &item);
        }
        push_attribute(&mut self.0, NbdAttribute::NBD_ATTR_SOCKETS.0 | NLA_F_NESTED, &items);
        self
    }
}

impl NbdNetlink {
    /// Finds the driver.
    ///
    /// # Errors
    /// If there is no driver.
    pub(super) fn open() -> Result<NbdNetlink, NetlinkError> {
        let unusable = |error: io::Error| NetlinkError::Unusable(error);
        let mut name = Vec::new();
        push_attribute(&mut name, CTRL_ATTR_FAMILY_NAME, &[NBD_GENL_FAMILY_NAME.as_bytes(), &[0]].concat());
        let found = ask(GENL_ID_CTRL, CTRL_CMD_GETFAMILY, &name);
        let found = found.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => NetlinkError::NoDriver,
            _ => unusable(error),
        })?;
        let family = attribute(&found, CTRL_ATTR_FAMILY_ID).and_then(|id| u16::read_from_bytes(id).ok());
        Ok(NbdNetlink { family: family.ok_or(NetlinkError::NoDriver)? })
    }

    /// Makes a disk; returns its number.
    pub(super) fn connect(&self, attributes: NbdAttributes) -> Result<u32, NetlinkError> {
        let command = NbdCommand::NBD_CMD_CONNECT;
        let reply = self.execute(command, attributes)?;
        let index = attribute(&reply, NbdAttribute::NBD_ATTR_INDEX.0);
        let index = index.and_then(|index| u32::read_from_bytes(index).ok());
        index.ok_or_else(|| NetlinkError::Refused { command, error: io::ErrorKind::InvalidData.into() })
    }

    /// Executes a command; returns the attributes of its reply.
    pub(super) fn execute(
        &self,
        command: NbdCommand,
        attributes: NbdAttributes,
    ) -> Result<Vec<u8>, NetlinkError> {
        ask(self.family, command.0, &attributes.0).map_err(|error| NetlinkError::Refused { command, error })
    }
}

/// Sends a command and waits for its end; returns the attributes of its reply.
fn ask(family: u16, command: u8, attributes: &[u8]) -> io::Result<Vec<u8>> {
    let (domain, kind, flags) = (AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC);
    let socket = socket_with(domain, kind, flags, Some(GENERIC))?;
    let len = size_of::<NetlinkHeader>() + size_of::<CommandHeader>() + attributes.len();
    let header = NetlinkHeader {
        len: len as u32,
        kind: family,
        flags: NLM_F_REQUEST | NLM_F_ACK,
        ..NetlinkHeader::default()
    };
    let command = CommandHeader { command, version: NBD_GENL_VERSION, reserved: 0 };
    let request = [header.as_bytes(), command.as_bytes(), attributes].concat();
    sendto(&socket, &request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut reply = Vec::new();
    loop {
        let mut buffer = vec![0; MAX_REPLY];
        let (len, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        let mut rest = &buffer[..len];
        while let Ok((header, _)) = NetlinkHeader::read_from_prefix(rest) {
            let end = (header.len as usize).clamp(size_of::<NetlinkHeader>(), rest.len());
            let (message, after) = rest.split_at(end);
            let body = &message[size_of::<NetlinkHeader>()..];
            if header.kind == NLMSG_ERROR {
                let (ended, _) =
                    ErrorMessage::read_from_prefix(body).map_err(|_| io::ErrorKind::InvalidData)?;
                return match ended.error {
                    0 => Ok(reply),
                    error => Err(io::Error::from_raw_os_error(-error)),
                };
            }
            reply = body.get(size_of::<CommandHeader>()..).unwrap_or_default().to_vec();
            // Messages begin at multiples of 4 bytes.
            rest = after.get(end.next_multiple_of(4) - end..).unwrap_or_default();
        }
    }
}

fn push_attribute(bytes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let header = AttributeHeader { len: (size_of::<AttributeHeader>() + value.len()) as u16, kind };
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

/// The value of the first attribute of this kind.
fn attribute(mut bytes: &[u8], kind: u16) -> Option<&[u8]> {
    loop {
        let (header, _) = AttributeHeader::read_from_prefix(bytes).ok()?;
        let len = usize::from(header.len);
        let value = bytes.get(size_of::<AttributeHeader>()..len)?;
        if header.kind & NLA_TYPE_MASK == kind {
            return Some(value);
        }
        bytes = bytes.get(len.next_multiple_of(4)..)?;
    }
}

/// Length of the longest reply in bytes.
const MAX_REPLY: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn attributes_have_the_layout_of_the_kernel() {
        let descriptor = std::fs::File::open("/dev/null").unwrap();
        let number = descriptor.as_raw_fd() as u8;
        let attributes = NbdAttributes::default()
            .index(3)
            .number(NbdAttribute::NBD_ATTR_TIMEOUT, 30)
            .identifier("abc")
            .sockets([descriptor.as_fd()].into_iter());
        let expected = [
            &[8, 0, 1, 0, 3, 0, 0, 0][..],
            &[12, 0, 4, 0, 30, 0, 0, 0, 0, 0, 0, 0],
            &[8, 0, 10, 0, b'a', b'b', b'c', 0],
            &[16, 0, 7, 0x80, 12, 0, 1, 0x80, 8, 0, 1, 0, number, 0, 0, 0],
        ];
        assert_eq!(attributes.0, expected.concat());
        assert_eq!(attribute(&attributes.0, 4), Some(&[30, 0, 0, 0, 0, 0, 0, 0][..]));
        assert_eq!(attribute(&attributes.0, 10), Some(&b"abc\0"[..]));
        assert_eq!(attribute(&attributes.0, 9), None);
        for end in 0..attributes.0.len() {
            let _ = attribute(&attributes.0[..end], 9);
        }
    }

    #[test]
    fn the_kernel_names_its_families() {
        let ask_for = |name: &[u8]| {
            let mut attributes = Vec::new();
            push_attribute(&mut attributes, CTRL_ATTR_FAMILY_NAME, name);
            ask(GENL_ID_CTRL, CTRL_CMD_GETFAMILY, &attributes)
        };
        let found = ask_for(b"nlctrl\0").unwrap();
        assert_eq!(attribute(&found, CTRL_ATTR_FAMILY_ID), Some(&GENL_ID_CTRL.to_ne_bytes()[..]));
        assert_eq!(ask_for(b"no-such-name\0").unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
