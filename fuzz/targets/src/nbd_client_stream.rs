//! An independent parser of an NBD initiator's stream: options in order, then requests within the
//! export and its constraints.

use blockmux_wire::nbd::handshake::*;
use blockmux_wire::nbd::transmission::*;

/// The client's direction of one connection.
#[derive(Default)]
pub(crate) struct ClientStream {
    /// Sent bytes that have not been parsed yet.
    sent: Vec<u8>,
    phase: ClientPhase,
    /// Cookies of all requests, in order.
    cookies: Vec<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ClientPhase {
    #[default]
    Flags,
    Options,
    Requests,
    Over,
}

/// The server's limits.
pub(crate) struct Limits {
    pub(crate) size: u64,
    pub(crate) block: u64,
    pub(crate) max_payload: u64,
    pub(crate) is_extended: bool,
    pub(crate) flags: u16,
}

impl ClientStream {
    /// Checks bytes that the client has sent; `limits` are given once it knows the export.
    pub(crate) fn on_sent(&mut self, bytes: &[u8], limits: Option<&Limits>) {
        self.sent.extend(bytes);
        while let Some(len) = self.read(limits) {
            self.sent.drain(..len);
        }
    }

    /// Checks the end of the stream: no partial message remains.
    pub(crate) fn on_quiet(&self) {
        assert!(self.sent.is_empty(), "{:?}: {:?} is not a complete message", self.phase, self.sent);
    }

    /// Parses one message; returns its length.
    fn read(&mut self, limits: Option<&Limits>) -> Option<usize> {
        let sent = &self.sent;
        match self.phase {
            ClientPhase::Flags => {
                let flags = number(sent.get(..4)?);
                assert!(flags <= 3);
                self.phase = ClientPhase::Options;
                Some(4)
            }
            ClientPhase::Options if sent.first() == Some(&b'I') => {
                let head = sent.get(..16)?;
                assert_eq!(number(&head[..8]), NBD_OPTS_MAGIC);
                let len = 16 + number(&head[12..]) as usize;
                sent.get(..len)?;
                if number(&head[8..12]) == u64::from(Opt::NBD_OPT_ABORT.0) {
                    self.phase = ClientPhase::Over;
                }
                Some(len)
            }
            ClientPhase::Options | ClientPhase::Requests if !sent.is_empty() => {
                self.phase = ClientPhase::Requests;
                self.read_request(limits.expect("a request comes after the handshake"))
            }
            ClientPhase::Over => {
                assert!(sent.is_empty(), "sent something after the end");
                None
            }
            ClientPhase::Options | ClientPhase::Requests => None,
        }
    }

    fn read_request(&mut self, limits: &Limits) -> Option<usize> {
        let size = if limits.is_extended { 32 } else { 28 };
        let head = self.sent.get(..size)?;
        let magic = if limits.is_extended { NBD_EXTENDED_REQUEST_MAGIC } else { NBD_REQUEST_MAGIC };
        assert_eq!(number(&head[..4]), u64::from(magic));
        let (flags, command) = (number(&head[4..6]) as u16, Cmd(number(&head[6..8]) as u16));
        let (cookie, offset) = (number(&head[8..16]), number(&head[16..24]));
        let len = number(&head[24..]);
        let payload = if command == Cmd::NBD_CMD_WRITE { len } else { 0 };
        let whole = size + payload as usize;
        self.sent.get(..whole)?;
        if command == Cmd::NBD_CMD_DISC {
            self.phase = ClientPhase::Over;
            return Some(whole);
        }
        assert!(!self.cookies.contains(&cookie), "used cookie {cookie:#x} twice");
        if self.cookies.len() < MAX_COOKIES {
            self.cookies.push(cookie);
        }
        let is_wide = flags & CmdFlags::PAYLOAD_LEN.bits() != 0;
        assert_eq!(is_wide, limits.is_extended && command == Cmd::NBD_CMD_WRITE);
        let needs = match command {
            Cmd::NBD_CMD_READ | Cmd::NBD_CMD_WRITE => 0,
            Cmd::NBD_CMD_FLUSH => TransmissionFlags::SEND_FLUSH.bits(),
            Cmd::NBD_CMD_TRIM => TransmissionFlags::SEND_TRIM.bits(),
            Cmd::NBD_CMD_CACHE => TransmissionFlags::SEND_CACHE.bits(),
            Cmd::NBD_CMD_WRITE_ZEROES => TransmissionFlags::SEND_WRITE_ZEROES.bits(),
            Cmd::NBD_CMD_BLOCK_STATUS => 0,
            _ => panic!("sent {command}"),
        };
        assert_eq!(limits.flags & needs, needs, "sent {command}, which was not offered");
        if flags & CmdFlags::FUA.bits() != 0 {
            assert!(limits.flags & TransmissionFlags::SEND_FUA.bits() != 0);
        }
        if command == Cmd::NBD_CMD_FLUSH {
            assert_eq!((offset, len), (0, 0));
            return Some(whole);
        }
        assert!(len > 0 && offset.checked_add(len).is_some_and(|end| end <= limits.size));
        assert_eq!((offset | len) % limits.block, 0);
        if matches!(command, Cmd::NBD_CMD_READ | Cmd::NBD_CMD_WRITE) {
            assert!(len <= limits.max_payload);
        }
        Some(whole)
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// The maximum number of cookies that are compared.
const MAX_COOKIES: usize = 512;
