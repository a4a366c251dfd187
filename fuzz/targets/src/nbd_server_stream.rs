//! An independent parser of an NBD target's stream: every option and every request must be answered
//! once, in the negotiated format and with the requested data.
//!
//! It parses both directions, because replies do not always contain their length. A client that
//! uses one cookie for several requests at a time makes simple replies ambiguous; then parsing
//! ends.

use crate::target_side::Sent;
use blockmux_wire::nbd::handshake::*;
use blockmux_wire::nbd::transmission::*;
use std::collections::VecDeque;

/// Both directions of one connection.
#[derive(Default)]
pub(crate) struct ServerStream {
    /// Bytes of the server that have not been parsed yet.
    sent: Vec<u8>,
    /// Number of parsed bytes of the client's stream.
    read: usize,
    phase: ServerPhase,
    client_flags: u32,
    /// Options that the server has consumed and not answered.
    options: VecDeque<Opt>,
    requests: Vec<Request>,
    form: Form,
    export: Export,
    /// The identifier of the metadata context of the last selection.
    context: Option<u32>,
    /// The identifier in the reply to the selection in progress.
    selecting: Option<u32>,
    is_ambiguous: bool,
    /// Whether the client violated the protocol.
    is_broken: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ServerPhase {
    #[default]
    Greeting,
    Flags,
    Options,
    /// An option that may end the handshake; bytes after it cannot be parsed before its answer.
    LastOption,
    Requests,
    Over,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Form {
    #[default]
    Simple,
    Structured,
    Extended,
}

/// The export as the server has described it.
#[derive(Default)]
struct Export {
    size: Option<u64>,
    flags: u16,
    min_block: Option<u64>,
}

#[derive(Debug)]
struct Request {
    cookie: u64,
    command: Cmd,
    flags: u16,
    offset: u64,
    /// Length of the affected range.
    len: u64,
    /// Received ranges of content, in order.
    content: Vec<(u64, u64)>,
    statuses: usize,
    has_failed: bool,
}

impl ServerStream {
    /// Handles bytes that the server has sent, and the bytes that it had consumed.
    pub(crate) fn follow(&mut self, sent: &Sent<'_>) {
        self.sent.extend(sent.bytes);
        self.is_broken = sent.is_broken;
        while !self.is_ambiguous {
            while self.read_client(sent.taken) {}
            if !self.read_server() {
                break;
            }
        }
    }

    /// Checks the end state, with nothing in flight.
    pub(crate) fn check_end(&self) {
        // A simple reply to a read in several pieces breaks off if a later one fails.
        let is_long = |request: &Request| request.command == Cmd::NBD_CMD_READ && request.len > NEARLY_LONG;
        let may_break_off = self.form == Form::Simple && self.requests.iter().any(is_long);
        if self.is_ambiguous || may_break_off {
            return;
        }
        assert!(
            self.sent.is_empty(),
            "{:?}: {} bytes are not a complete message",
            self.phase,
            self.sent.len()
        );
        if !self.is_broken {
            assert!(self.options.is_empty(), "not answered: {:?}", self.options);
            assert!(self.requests.is_empty(), "not answered: {:?}", self.requests);
        }
    }

    /// Parses one message of the client; returns whether there was one.
    fn read_client(&mut self, taken: &[u8]) -> bool {
        let mut rest = Fields(&taken[self.read..]);
        let message = match self.phase {
            ServerPhase::Flags => rest.u32().map(|flags| {
                self.client_flags = flags;
                self.phase = ServerPhase::Options;
            }),
            ServerPhase::Options => self.read_option(&mut rest),
            ServerPhase::Requests => self.read_request(&mut rest),
            ServerPhase::Over => {
                assert!(
                    rest.0.is_empty() || self.is_broken,
                    "bytes were consumed after the end of the session"
                );
                None
            }
            ServerPhase::Greeting | ServerPhase::LastOption => None,
        };
        if message.is_some() {
            self.read = taken.len() - rest.0.len();
        }
        message.is_some()
    }

    fn read_option(&mut self, rest: &mut Fields<'_>) -> Option<()> {
        let (_magic, option) = (rest.u64()?, Opt(rest.u32()?));
        let len = rest.u32()?;
        rest.bytes(len.into())?;
        self.options.push_back(option);
        if matches!(option, Opt::NBD_OPT_EXPORT_NAME | Opt::NBD_OPT_GO | Opt::NBD_OPT_ABORT) {
            self.phase = ServerPhase::LastOption;
        }
        Some(())
    }

    fn read_request(&mut self, rest: &mut Fields<'_>) -> Option<()> {
        let is_extended = self.form == Form::Extended;
        let expected = if is_extended { NBD_EXTENDED_REQUEST_MAGIC } else { NBD_REQUEST_MAGIC };
        let magic = rest.u32()?;
        if magic != expected {
            assert!(self.is_broken, "accepted a request with a wrong magic number");
            return None;
        }
        let (flags, command) = (rest.u16()?, Cmd(rest.u16()?));
        let (cookie, offset) = (rest.u64()?, rest.u64()?);
        let mut len = if is_extended { rest.u64()? } else { rest.u32()?.into() };
        if command == Cmd::NBD_CMD_DISC {
            self.phase = ServerPhase::Over;
            return Some(());
        }
        let has_payload = if is_extended {
            flags & CmdFlags::PAYLOAD_LEN.bits() != 0
        } else {
            command == Cmd::NBD_CMD_WRITE
        };
        if has_payload {
            let payload = rest.bytes(len)?;
            if command == Cmd::NBD_CMD_BLOCK_STATUS {
                len = Fields(payload).u64().unwrap_or(0);
            }
        }
        self.requests.push(Request {
            cookie,
            command,
            flags,
            offset,
            len,
            content: Vec::new(),
            statuses: 0,
            has_failed: false,
        });
        Some(())
    }

    /// Parses one message of the server; returns whether there was one.
    fn read_server(&mut self) -> bool {
        let sent = std::mem::take(&mut self.sent);
        let mut rest = Fields(&sent);
        let message = match self.phase {
            ServerPhase::Greeting => self.read_greeting(&mut rest),
            ServerPhase::Options | ServerPhase::LastOption => self.read_option_reply(&mut rest),
            ServerPhase::Requests | ServerPhase::Over => self.read_reply(&mut rest),
            ServerPhase::Flags => None,
        };
        let left = if message.is_some() { rest.0.len() } else { sent.len() };
        self.sent = sent[sent.len() - left..].to_vec();
        message.is_some()
    }

    fn read_greeting(&mut self, rest: &mut Fields<'_>) -> Option<()> {
        assert_eq!(rest.bytes(18)?, b"NBDMAGICIHAVEOPT\0\x03");
        self.phase = ServerPhase::Flags;
        Some(())
    }

    fn read_option_reply(&mut self, rest: &mut Fields<'_>) -> Option<()> {
        let Some(&option) = self.options.front() else {
            assert!(rest.0.is_empty(), "answered an option that was not sent");
            return None;
        };
        if option == Opt::NBD_OPT_EXPORT_NAME {
            return self.read_export_name(rest);
        }
        let magic = rest.u64()?;
        assert_eq!((magic, Opt(rest.u32()?)), (NBD_REP_MAGIC, option));
        let reply = Rep(rest.u32()?);
        let len = rest.u32()?;
        let mut data = Fields(rest.bytes(len.into())?);
        match reply {
            Rep::NBD_REP_ACK => {
                assert!(data.0.is_empty());
                self.on_acknowledged(option);
            }
            _ if reply.is_error() => {
                assert!(option != Opt::NBD_OPT_ABORT && std::str::from_utf8(data.0).is_ok());
                if self.phase == ServerPhase::LastOption && self.options.len() == 1 {
                    self.phase = ServerPhase::Options;
                }
                if option == Opt::NBD_OPT_SET_META_CONTEXT {
                    (self.context, self.selecting) = (None, None);
                }
            }
            _ => {
                self.on_information(option, reply, &mut data);
                return Some(());
            }
        }
        self.options.pop_front();
        Some(())
    }

    fn read_export_name(&mut self, rest: &mut Fields<'_>) -> Option<()> {
        self.export.size = Some(rest.u64()?);
        self.export.flags = rest.u16()?;
        // A client that chooses an export in this way need not respect block sizes.
        self.export.min_block = None;
        if self.client_flags & NBD_FLAG_C_NO_ZEROES == 0 {
            assert_eq!(rest.bytes(124)?, [0; 124]);
        }
        assert_ne!(self.form, Form::Extended);
        self.options.pop_front();
        self.phase = ServerPhase::Requests;
        Some(())
    }

    fn on_acknowledged(&mut self, option: Opt) {
        match option {
            Opt::NBD_OPT_ABORT => self.phase = ServerPhase::Over,
            Opt::NBD_OPT_STRUCTURED_REPLY => {
                assert_ne!(self.form, Form::Extended);
                self.form = Form::Structured;
            }
            Opt::NBD_OPT_EXTENDED_HEADERS => self.form = Form::Extended,
            // Negotiation starts again after TLS.
            Opt::NBD_OPT_STARTTLS => (self.form, self.context) = (Form::Simple, None),
            Opt::NBD_OPT_GO => {
                assert!(
                    self.export.size.is_some()
                        && self.export.flags & TransmissionFlags::HAS_FLAGS.bits() != 0
                );
                self.phase = ServerPhase::Requests;
            }
            Opt::NBD_OPT_INFO | Opt::NBD_OPT_LIST | Opt::NBD_OPT_LIST_META_CONTEXT => {}
            Opt::NBD_OPT_SET_META_CONTEXT => self.context = self.selecting.take(),
            _ => panic!("acknowledged {option}"),
        }
    }

    fn on_information(&mut self, option: Opt, reply: Rep, data: &mut Fields<'_>) {
        match (option, reply) {
            (Opt::NBD_OPT_LIST, Rep::NBD_REP_SERVER) => {
                let len = data.u32().expect("the reply is complete");
                assert!(!data.bytes(len.into()).expect("the reply is complete").is_empty());
            }
            (Opt::NBD_OPT_INFO | Opt::NBD_OPT_GO, Rep::NBD_REP_INFO) => {
                match Info(data.u16().expect("the reply is complete")) {
                    Info::NBD_INFO_EXPORT => {
                        self.export.size = data.u64();
                        self.export.flags = data.u16().expect("the reply is complete");
                        assert!(data.0.is_empty());
                    }
                    Info::NBD_INFO_BLOCK_SIZE => {
                        let least = data.u32().expect("the reply is complete");
                        let (preferred, most) = (
                            data.u32().expect("the reply is complete"),
                            data.u32().expect("the reply is complete"),
                        );
                        assert!(least.is_power_of_two() && preferred.is_power_of_two() && preferred >= 512);
                        assert!(data.0.is_empty() && most >= 1 << 20);
                        self.export.min_block = Some(least.into());
                    }
                    Info::NBD_INFO_NAME | Info::NBD_INFO_DESCRIPTION => {
                        assert!(std::str::from_utf8(data.0).is_ok());
                    }
                    info => panic!("told {info}"),
                }
            }
            (Opt::NBD_OPT_LIST_META_CONTEXT | Opt::NBD_OPT_SET_META_CONTEXT, Rep::NBD_REP_META_CONTEXT) => {
                let id = data.u32().expect("the reply is complete");
                assert_eq!(data.0, b"base:allocation");
                assert_ne!(self.form, Form::Simple);
                if option == Opt::NBD_OPT_SET_META_CONTEXT {
                    assert!(self.selecting.replace(id).is_none(), "selected twice");
                }
            }
            _ => panic!("answered {option} with {reply}"),
        }
    }

    fn read_reply(&mut self, rest: &mut Fields<'_>) -> Option<()> {
        match (rest.u32()?, self.form) {
            (NBD_SIMPLE_REPLY_MAGIC, Form::Simple | Form::Structured) => self.read_simple(rest),
            (NBD_STRUCTURED_REPLY_MAGIC, Form::Structured) | (NBD_EXTENDED_REPLY_MAGIC, Form::Extended) => {
                self.read_chunk(rest)
            }
            (magic, form) => panic!("sent {magic:#x} in {form:?}"),
        }
    }

    fn read_simple(&mut self, rest: &mut Fields<'_>) -> Option<()> {
        let (error, cookie) = (rest.u32()?, rest.u64()?);
        let form = self.form;
        let fits = |request: &Request| {
            request.content.is_empty()
                && (form == Form::Simple
                    || !matches!(request.command, Cmd::NBD_CMD_READ | Cmd::NBD_CMD_BLOCK_STATUS))
        };
        let at = self.find(cookie, fits)?;
        if error == 0 && self.requests[at].command == Cmd::NBD_CMD_READ {
            rest.bytes(self.requests[at].len)?;
        }
        let request = self.requests.remove(at);
        if error == 0 {
            assert_ne!(request.command, Cmd::NBD_CMD_BLOCK_STATUS, "succeeded without status");
            self.check_success(&request);
        } else {
            check_errno(error, self.form);
        }
        Some(())
    }

    fn read_chunk(&mut self, rest: &mut Fields<'_>) -> Option<()> {
        let (flags, reply_type, cookie) = (rest.u16()?, ReplyType(rest.u16()?), rest.u64()?);
        let offset = if self.form == Form::Extended { Some(rest.u64()?) } else { None };
        let len = if self.form == Form::Extended { rest.u64()? } else { rest.u32()?.into() };
        let mut data = Fields(rest.bytes(len)?);
        assert_eq!(flags & !NBD_REPLY_FLAG_DONE, 0);
        let at = self.find(cookie, |request| {
            offset.is_none_or(|offset| offset == request.offset)
                && match reply_type {
                    ReplyType::NBD_REPLY_TYPE_OFFSET_DATA => {
                        request.command == Cmd::NBD_CMD_READ && request.len + 8 >= len
                    }
                    ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS | ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS_EXT => {
                        request.command == Cmd::NBD_CMD_BLOCK_STATUS && request.len > 0
                    }
                    _ => true,
                }
        })?;
        let request = &mut self.requests[at];
        match reply_type {
            ReplyType::NBD_REPLY_TYPE_NONE => assert!(data.0.is_empty() && flags == NBD_REPLY_FLAG_DONE),
            ReplyType::NBD_REPLY_TYPE_OFFSET_DATA => {
                let from = data.u64().expect("the reply is complete");
                assert!(!data.0.is_empty());
                request.content.push((from, from + data.0.len() as u64));
            }
            ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS if self.form == Form::Structured => {
                assert_eq!(data.u32(), self.context);
                let extents: Vec<u64> = (0..data.0.len() / 8).filter_map(|_| data.extent()).collect();
                request.check_extents(&extents);
            }
            ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS_EXT if self.form == Form::Extended => {
                assert_eq!(data.u32(), self.context);
                let count = data.u32().expect("the reply is complete");
                let extents: Vec<u64> = (0..count).filter_map(|_| data.wide_extent()).collect();
                assert_eq!(extents.len(), count as usize);
                request.check_extents(&extents);
            }
            ReplyType::NBD_REPLY_TYPE_ERROR => {
                check_errno(data.u32().expect("the reply is complete"), self.form);
                let len = data.u16().expect("the reply is complete");
                assert!(std::str::from_utf8(data.bytes(len.into()).expect("the reply is complete")).is_ok());
                request.has_failed = true;
            }
            _ => panic!("sent {reply_type} in {:?}", self.form),
        }
        if reply_type != ReplyType::NBD_REPLY_TYPE_OFFSET_DATA {
            assert!(data.0.is_empty());
        }
        if flags & NBD_REPLY_FLAG_DONE != 0 {
            let request = self.requests.remove(at);
            if !request.has_failed {
                self.check_success(&request);
                request.check_content();
            }
        }
        Some(())
    }

    /// The request with that cookie, which the reply must fit; `None` if several requests have it.
    fn find(&mut self, cookie: u64, fits: impl Fn(&Request) -> bool) -> Option<usize> {
        let mut of_cookie = (0..).zip(&self.requests).filter(|(_, request)| request.cookie == cookie);
        let (at, request) = of_cookie.next().unwrap_or_else(|| panic!("answered {cookie:#x}"));
        if of_cookie.any(|(_, other)| !other.is_like(request)) {
            self.is_ambiguous = true;
            return None;
        }
        assert!(fits(request), "the reply does not fit {request:?}");
        Some(at)
    }

    /// Checks that a successful request was valid.
    fn check_success(&self, request: &Request) {
        let Request { command, offset, len, .. } = *request;
        let size = self.export.size.expect("the size is known after the handshake");
        let known = CmdFlags::FUA.bits()
            | CmdFlags::NO_HOLE.bits()
            | CmdFlags::DF.bits()
            | CmdFlags::REQ_ONE.bits()
            | CmdFlags::FAST_ZERO.bits()
            | CmdFlags::PAYLOAD_LEN.bits();
        assert!(request.flags & !known == 0, "succeeded with unknown flags: {request:?}");
        assert!(command.0 <= Cmd::NBD_CMD_BLOCK_STATUS.0, "succeeded: {request:?}");
        assert!(offset.checked_add(len).is_some_and(|end| end <= size), "succeeded outside: {request:?}");
        if let Some(block) = self.export.min_block {
            assert!((offset | len) % block == 0, "succeeded misaligned: {request:?}");
        }
        let changes = matches!(command, Cmd::NBD_CMD_WRITE | Cmd::NBD_CMD_TRIM | Cmd::NBD_CMD_WRITE_ZEROES);
        let is_read_only = self.export.flags & TransmissionFlags::READ_ONLY.bits() != 0;
        assert!(!(changes && is_read_only), "changed a read-only export: {request:?}");
        if command == Cmd::NBD_CMD_BLOCK_STATUS && self.form == Form::Structured {
            assert!(self.context.is_some() && request.statuses == 1);
        }
    }
}

impl Request {
    /// Whether replies to both look the same.
    fn is_like(&self, other: &Request) -> bool {
        let of = |request: &Request| (request.command, request.flags, request.offset, request.len);
        of(self) == of(other) && self.content.is_empty() && other.content.is_empty()
    }

    /// Checks that the content covers every byte of a read once.
    fn check_content(&self) {
        let mut at = self.offset;
        let mut content = self.content.clone();
        content.sort_unstable();
        for (start, end) in content {
            assert_eq!(start, at);
            at = end;
        }
        if self.command == Cmd::NBD_CMD_READ {
            assert_eq!(at, self.offset + self.len, "part of a read is missing");
        }
        if self.flags & CmdFlags::DF.bits() != 0 {
            assert!(self.content.len() <= 1, "fragmented");
        }
    }

    fn check_extents(&mut self, extents: &[u64]) {
        assert!(!extents.is_empty() && !extents.contains(&0));
        assert!(extents.iter().sum::<u64>() <= self.len, "block status beyond the requested range");
        assert!(self.flags & CmdFlags::REQ_ONE.bits() == 0 || extents.len() == 1);
        self.statuses += 1;
    }
}

fn check_errno(errno: u32, form: Form) {
    let is_known = [1, 5, 12, 22, 28, 75, 95, 108].contains(&errno);
    assert!(is_known && (errno != 75 || form != Form::Simple), "failed with {errno}");
}

/// Bytes that are parsed field by field.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, len: u64) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(usize::try_from(len).ok()?)?;
        self.0 = rest;
        Some(bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N as u64)?.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// The length of a compact block status descriptor.
    fn extent(&mut self) -> Option<u64> {
        let (len, state) = (self.u32()?, self.u32()?);
        assert!(state <= 3);
        Some(len.into())
    }

    /// The length of an extended block status descriptor.
    fn wide_extent(&mut self) -> Option<u64> {
        let (len, state) = (self.u64()?, self.u64()?);
        assert!(state <= 3);
        Some(len)
    }
}

/// The longest read that is certainly one piece, in bytes: 32 MiB less the parts of two blocks.
const NEARLY_LONG: u64 = (32 << 20) - 2 * (64 << 10);
