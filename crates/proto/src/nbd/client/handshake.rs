//! The client's side of the handshake (proto.md, "Newstyle negotiation", "Fixed newstyle
//! negotiation").
//!
//! The client sends one option at a time, and continues if the server refuses an optional one:
//! ```text
//!   EXTENDED_HEADERS ─no─▶ STRUCTURED_REPLY ─▶ SET_META_CONTEXT ─▶ GO ─unknown option─▶ EXPORT_NAME
//!                └──yes, skips ──┘      (only with one of the two)
//! ```
//! If the client requires TLS, it sends `STARTTLS` first, and nothing else without TLS.
//!
//! A server without fixed newstyle negotiation supports only `EXPORT_NAME`. A valid error reply
//! results in [`NbdHandshakeRefusal`]; a violation of the protocol in [`ProtocolError`].

use super::export::{BlockSize, ExportInfo, ListedExport};
use super::option::{self, InfoReply};
use super::refusal::NbdHandshakeRefusal;
use super::{NbdInitiatorConfig, NbdSessionMode};
use crate::driver::outbox::Outbox;
use crate::driver::session::{BYTES_BEFORE_TLS, ProtocolError};
use crate::nbd::HeaderFormat;
use blockmux_wire::nbd::handshake::{
    ClientFlags, ExportNameReply, Greeting, NBD_CLISERV_MAGIC, NBD_EXPORT_NAME_ZEROES,
    NBD_FLAG_C_FIXED_NEWSTYLE, NBD_FLAG_C_NO_ZEROES, NBD_FLAG_FIXED_NEWSTYLE, NBD_FLAG_NO_ZEROES, NBD_MAGIC,
    NBD_OPTS_MAGIC, NBD_REP_MAGIC, Opt, OptionReplyHead, Rep, TransmissionFlags,
};
use zerocopy::{FromBytes, IntoBytes};

/// State of the handshake with one server.
pub(super) struct ClientHandshake {
    config: NbdInitiatorConfig,
    step: HandshakeReply,
    /// Whether the server supports fixed newstyle, in which it replies to unknown options instead
    /// of closing the connection.
    is_fixed: bool,
    /// Whether 124 zeroes follow the reply to `NBD_OPT_EXPORT_NAME`.
    sends_zeroes: bool,
    /// Whether the client requires TLS.
    requires_tls: bool,
    /// Whether to send `NBD_OPT_ABORT` instead of the next option.
    is_stopping: bool,
    headers: HeaderFormat,
    /// The id of `base:allocation`, if it is selected.
    allocation: Option<u32>,
    /// Size and transmission flags, once the server has sent them.
    size_and_flags: Option<(u64, u16)>,
    block_size: Option<BlockSize>,
    name: Option<String>,
    description: String,
    contexts: Vec<String>,
    list: ExportList,
}

/// The exports that a server listed, up to a limit.
#[derive(Default)]
pub(super) struct ExportList {
    pub(super) exports: Vec<ListedExport>,
    /// Number of exports beyond the limit.
    pub(super) left_out: u64,
    bytes: usize,
}

/// The next message that the handshake expects.
#[derive(Clone, Copy)]
enum HandshakeReply {
    Greeting,
    /// The reply to this option.
    Reply(Opt),
    /// The reply to `NBD_OPT_EXPORT_NAME`, which has no reply head.
    ExportName,
    /// The TLS handshake, which the driver performs.
    Tls,
}

/// Result of one step over the input.
pub(super) enum HandshakeProgress {
    /// This many bytes were consumed; the handshake continues.
    Took(usize),
    /// The next message needs this many bytes.
    Incomplete(usize),
    /// This many bytes were consumed; the handshake is over.
    Over(usize, HandshakeEnd),
}

/// How a handshake ends without a protocol violation.
pub(super) enum HandshakeEnd {
    /// The transmission phase has begun; with the id of `base:allocation`, if it was selected.
    Transmission(ExportInfo, Option<u32>),
    /// The server described the export ([`NbdSessionMode::Info`]).
    Described(ExportInfo),
    /// The server listed its exports ([`NbdSessionMode::List`]).
    Listed(ExportList),
    /// The server refused a required option.
    Refused(NbdHandshakeRefusal),
    /// [`ClientHandshake::stop`] was called.
    Stopped,
}

impl ClientHandshake {
    pub(super) fn new(config: NbdInitiatorConfig) -> ClientHandshake {
        ClientHandshake {
            config,
            step: HandshakeReply::Greeting,
            is_fixed: false,
            sends_zeroes: true,
            requires_tls: false,
            is_stopping: false,
            headers: HeaderFormat::Simple,
            allocation: None,
            size_and_flags: None,
            block_size: None,
            name: None,
            description: String::new(),
            contexts: Vec::new(),
            list: ExportList::default(),
        }
    }

    /// The minimum number of bytes of the next message.
    pub(super) fn need(&self) -> usize {
        match self.step {
            HandshakeReply::Greeting => size_of::<Greeting>(),
            HandshakeReply::Reply(_) => size_of::<OptionReplyHead>(),
            HandshakeReply::ExportName if self.sends_zeroes => {
                EXPORT_NAME_REPLY.saturating_add(NBD_EXPORT_NAME_ZEROES)
            }
            HandshakeReply::ExportName => EXPORT_NAME_REPLY,
            HandshakeReply::Tls => 0,
        }
    }

    /// Requires TLS.
    pub(super) fn require_tls(&mut self) {
        self.requires_tls = true;
    }

    /// Whether the driver must perform the TLS handshake now.
    pub(super) fn awaits_tls(&self) -> bool {
        matches!(self.step, HandshakeReply::Tls)
    }

    /// TLS is established.
    pub(super) fn on_secured(&mut self, outbox: &mut Outbox) -> Option<HandshakeEnd> {
        self.send_next(Some(Opt::NBD_OPT_STARTTLS), outbox)
    }

    /// Aborts the handshake instead of sending the next option.
    pub(super) fn stop(&mut self) {
        self.is_stopping = true;
    }

    /// Handles one message of the server.
    pub(super) fn on_bytes(
        &mut self,
        bytes: &[u8],
        outbox: &mut Outbox,
    ) -> Result<HandshakeProgress, ProtocolError> {
        let need = self.need();
        if bytes.len() < need || self.awaits_tls() && bytes.is_empty() {
            return Ok(HandshakeProgress::Incomplete(need));
        }
        let (took, end) = match self.step {
            HandshakeReply::Greeting => (need, self.on_greeting(bytes, outbox)?),
            HandshakeReply::ExportName => (need, Some(self.on_export_name(bytes, outbox)?)),
            // Injected by an attacker, to be taken for a part of the encrypted stream.
            HandshakeReply::Tls => return Err(BYTES_BEFORE_TLS),
            HandshakeReply::Reply(option) => {
                let (head, rest) = OptionReplyHead::read_from_prefix(bytes).map_err(|_| SHORT)?;
                let len = check_reply_head(&head, option)?;
                let Some(data) = rest.get(..len) else {
                    return Ok(HandshakeProgress::Incomplete(need.saturating_add(len)));
                };
                (need.saturating_add(len), self.on_reply(option, Rep(head.reply_type.get()), data, outbox)?)
            }
        };
        Ok(end.map_or(HandshakeProgress::Took(took), |end| HandshakeProgress::Over(took, end)))
    }

    /// The server closed the connection.
    pub(super) fn on_end(&mut self) -> Result<HandshakeEnd, ProtocolError> {
        match self.step {
            HandshakeReply::ExportName => {
                Ok(HandshakeEnd::Refused(NbdHandshakeRefusal::Closed { export: self.config.export.clone() }))
            }
            HandshakeReply::Greeting => Err(ProtocolError {
                what: "closed the connection without a greeting",
                reference: "proto.md, \"Newstyle negotiation\"",
            }),
            HandshakeReply::Reply(_) | HandshakeReply::Tls => Err(ProtocolError {
                what: "closed the connection instead of answering an option",
                reference: "proto.md, \"Termination of the session during option haggling\"",
            }),
        }
    }

    fn on_greeting(
        &mut self,
        bytes: &[u8],
        outbox: &mut Outbox,
    ) -> Result<Option<HandshakeEnd>, ProtocolError> {
        let (greeting, _) = Greeting::read_from_prefix(bytes).map_err(|_| SHORT)?;
        let reference = "proto.md, \"Newstyle negotiation\"";
        if greeting.magic.get() != NBD_MAGIC {
            let what = "is no NBD server: its first bytes are not NBDMAGIC";
            return Err(ProtocolError { what, reference });
        }
        match greeting.opts_magic.get() {
            NBD_OPTS_MAGIC => {}
            NBD_CLISERV_MAGIC => return Ok(Some(HandshakeEnd::Refused(NbdHandshakeRefusal::Oldstyle))),
            _ => {
                return Err(ProtocolError {
                    what: "sent neither IHAVEOPT nor the oldstyle magic",
                    reference,
                });
            }
        }
        let server = greeting.handshake_flags.get();
        self.is_fixed = server & NBD_FLAG_FIXED_NEWSTYLE != 0;
        self.sends_zeroes = server & NBD_FLAG_NO_ZEROES == 0;
        let mut flags = 0;
        if self.is_fixed {
            flags |= NBD_FLAG_C_FIXED_NEWSTYLE;
        }
        if !self.sends_zeroes {
            flags |= NBD_FLAG_C_NO_ZEROES;
        }
        outbox.push_head(ClientFlags { flags: flags.into() }.as_bytes());
        if !self.is_fixed && self.requires_tls {
            return Ok(Some(HandshakeEnd::Refused(NbdHandshakeRefusal::NoTls { message: String::new() })));
        }
        if !self.is_fixed && self.config.mode == NbdSessionMode::List {
            return Ok(Some(HandshakeEnd::Refused(NbdHandshakeRefusal::CannotList)));
        }
        Ok(self.send_next(None, outbox))
    }

    /// The options to send, in order.
    fn options(&self) -> &'static [Opt] {
        match self.config.mode {
            _ if !self.is_fixed => &[Opt::NBD_OPT_EXPORT_NAME],
            NbdSessionMode::List => &[Opt::NBD_OPT_STARTTLS, Opt::NBD_OPT_LIST],
            NbdSessionMode::Go => &[
                Opt::NBD_OPT_STARTTLS,
                Opt::NBD_OPT_EXTENDED_HEADERS,
                Opt::NBD_OPT_STRUCTURED_REPLY,
                Opt::NBD_OPT_SET_META_CONTEXT,
                Opt::NBD_OPT_GO,
                Opt::NBD_OPT_EXPORT_NAME,
            ],
            NbdSessionMode::Info => &[
                Opt::NBD_OPT_STARTTLS,
                Opt::NBD_OPT_EXTENDED_HEADERS,
                Opt::NBD_OPT_STRUCTURED_REPLY,
                Opt::NBD_OPT_LIST_META_CONTEXT,
                Opt::NBD_OPT_INFO,
                Opt::NBD_OPT_EXPORT_NAME,
            ],
        }
    }

    /// Whether to send `option` in the current state.
    fn is_applicable(&self, option: Opt) -> bool {
        match option {
            Opt::NBD_OPT_STARTTLS => self.requires_tls,
            Opt::NBD_OPT_EXTENDED_HEADERS => self.config.features.extended_headers,
            Opt::NBD_OPT_STRUCTURED_REPLY => {
                self.config.features.structured_replies && self.headers == HeaderFormat::Simple
            }
            Opt::NBD_OPT_SET_META_CONTEXT | Opt::NBD_OPT_LIST_META_CONTEXT => {
                self.headers != HeaderFormat::Simple
            }
            _ => true,
        }
    }

    /// Sends the option after `last`.
    fn send_next(&mut self, last: Option<Opt>, outbox: &mut Outbox) -> Option<HandshakeEnd> {
        if self.is_stopping {
            self.abort(outbox);
            return Some(HandshakeEnd::Stopped);
        }
        let after_last = self.options().iter().skip_while(|opt| last.is_some_and(|last| **opt != last));
        let next = after_last.copied().find(|&opt| Some(opt) != last && self.is_applicable(opt))?;
        let export = &self.config.export;
        self.step = HandshakeReply::Reply(next);
        match next {
            Opt::NBD_OPT_EXPORT_NAME => {
                self.step = HandshakeReply::ExportName;
                option::send_export_name(outbox, export);
            }
            Opt::NBD_OPT_GO | Opt::NBD_OPT_INFO => option::send_go(outbox, next, export),
            Opt::NBD_OPT_SET_META_CONTEXT => {
                option::send_meta_context(outbox, next, export, &[BASE_ALLOCATION]);
            }
            Opt::NBD_OPT_LIST_META_CONTEXT => option::send_meta_context(outbox, next, export, &[]),
            _ => option::send_plain(outbox, next),
        }
        None
    }

    /// Sends `NBD_OPT_ABORT`, without waiting for the reply.
    fn abort(&self, outbox: &mut Outbox) {
        if self.is_fixed {
            option::send_plain(outbox, Opt::NBD_OPT_ABORT);
        }
    }

    fn on_reply(
        &mut self,
        option: Opt,
        reply: Rep,
        data: &[u8],
        outbox: &mut Outbox,
    ) -> Result<Option<HandshakeEnd>, ProtocolError> {
        if reply.is_error() {
            return self.on_error(option, reply, data, outbox);
        }
        match (option, reply) {
            (Opt::NBD_OPT_STARTTLS, Rep::NBD_REP_ACK) => {
                self.step = HandshakeReply::Tls;
                return Ok(None);
            }
            (Opt::NBD_OPT_EXTENDED_HEADERS, Rep::NBD_REP_ACK) => self.headers = HeaderFormat::Extended,
            (Opt::NBD_OPT_STRUCTURED_REPLY, Rep::NBD_REP_ACK) => self.headers = HeaderFormat::Structured,
            (Opt::NBD_OPT_SET_META_CONTEXT | Opt::NBD_OPT_LIST_META_CONTEXT, Rep::NBD_REP_ACK) => {}
            (Opt::NBD_OPT_SET_META_CONTEXT | Opt::NBD_OPT_LIST_META_CONTEXT, Rep::NBD_REP_META_CONTEXT) => {
                self.on_context(option, data)?;
                return Ok(None);
            }
            (Opt::NBD_OPT_GO | Opt::NBD_OPT_INFO, Rep::NBD_REP_INFO) => {
                self.on_info(data)?;
                return Ok(None);
            }
            (Opt::NBD_OPT_GO, Rep::NBD_REP_ACK) if self.config.mode == NbdSessionMode::Info => {
                let export = self.take_export()?;
                super::request::push_disconnect(outbox, export.headers);
                return Ok(Some(HandshakeEnd::Described(export)));
            }
            (Opt::NBD_OPT_GO, Rep::NBD_REP_ACK) => {
                let allocation = self.allocation;
                return Ok(Some(HandshakeEnd::Transmission(self.take_export()?, allocation)));
            }
            (Opt::NBD_OPT_INFO, Rep::NBD_REP_ACK)
                if self.size_and_flags.is_some_and(|(size, _)| size == 0) && !self.is_stopping =>
            {
                // nbd-server 3.24 knows the size only once it has opened the export, which
                // NBD_OPT_GO does.
                self.step = HandshakeReply::Reply(Opt::NBD_OPT_GO);
                option::send_go(outbox, Opt::NBD_OPT_GO, &self.config.export);
                return Ok(None);
            }
            (Opt::NBD_OPT_INFO, Rep::NBD_REP_ACK) => {
                self.abort(outbox);
                return Ok(Some(HandshakeEnd::Described(self.take_export()?)));
            }
            (Opt::NBD_OPT_LIST, Rep::NBD_REP_SERVER) => {
                self.list.add(option::read_server(data)?);
                return Ok(None);
            }
            (Opt::NBD_OPT_LIST, Rep::NBD_REP_ACK) => {
                self.abort(outbox);
                return Ok(Some(HandshakeEnd::Listed(std::mem::take(&mut self.list))));
            }
            _ => return Err(UNEXPECTED),
        }
        Ok(self.send_next(Some(option), outbox))
    }

    fn on_error(
        &mut self,
        option: Opt,
        reply: Rep,
        data: &[u8],
        outbox: &mut Outbox,
    ) -> Result<Option<HandshakeEnd>, ProtocolError> {
        let is_final = matches!(reply, Rep::NBD_REP_ERR_TLS_REQD | Rep::NBD_REP_ERR_SHUTDOWN);
        let can_go_on = match option {
            Opt::NBD_OPT_EXTENDED_HEADERS | Opt::NBD_OPT_STRUCTURED_REPLY => !is_final,
            Opt::NBD_OPT_SET_META_CONTEXT | Opt::NBD_OPT_LIST_META_CONTEXT => {
                // The contexts that were listed before the error are invalid.
                self.allocation = None;
                self.contexts.clear();
                !is_final
            }
            Opt::NBD_OPT_GO if self.config.mode == NbdSessionMode::Info => {
                // NBD_OPT_INFO has succeeded before; NBD_OPT_GO was only for the size.
                self.abort(outbox);
                return Ok(Some(HandshakeEnd::Described(self.take_export()?)));
            }
            Opt::NBD_OPT_GO | Opt::NBD_OPT_INFO if reply == Rep::NBD_REP_ERR_UNSUP => {
                if self.headers == HeaderFormat::Extended {
                    return Err(ProtocolError {
                        what: "agreed to extended headers but does not know NBD_OPT_GO",
                        reference: "proto.md, \"Option types\", NBD_OPT_EXTENDED_HEADERS",
                    });
                }
                self.block_size = None;
                true
            }
            _ => false,
        };
        if can_go_on {
            return Ok(self.send_next(Some(option), outbox));
        }
        self.abort(outbox);
        Ok(Some(HandshakeEnd::Refused(NbdHandshakeRefusal::from_reply(
            &self.config.export,
            option,
            reply,
            data,
        ))))
    }

    fn on_info(&mut self, data: &[u8]) -> Result<(), ProtocolError> {
        match option::read_info(data)? {
            InfoReply::Export { size, flags } => self.size_and_flags = Some((size, flags)),
            InfoReply::Name(name) => self.name = Some(name),
            InfoReply::Description(text) => self.description = text,
            InfoReply::BlockSize(sizes) => self.block_size = Some(sizes),
            InfoReply::Unknown => {}
        }
        Ok(())
    }

    fn on_context(&mut self, option: Opt, data: &[u8]) -> Result<(), ProtocolError> {
        let (id, name) = option::read_meta_context(data)?;
        if option == Opt::NBD_OPT_SET_META_CONTEXT {
            if name != BASE_ALLOCATION || self.allocation.is_some() {
                return Err(ProtocolError {
                    what: "selected a metadata context that was not requested, or selected one twice",
                    reference: "proto.md, \"Option types\", NBD_OPT_SET_META_CONTEXT",
                });
            }
            self.allocation = Some(id);
        }
        if self.contexts.len() < MAX_CONTEXTS {
            self.contexts.push(name);
        }
        Ok(())
    }

    fn on_export_name(&mut self, bytes: &[u8], outbox: &mut Outbox) -> Result<HandshakeEnd, ProtocolError> {
        let (reply, _) = ExportNameReply::read_from_prefix(bytes).map_err(|_| SHORT)?;
        self.size_and_flags = Some((reply.size.get(), reply.transmission_flags.get()));
        let allocation = self.allocation;
        let export = self.take_export()?;
        if self.config.mode == NbdSessionMode::Info {
            // NBD_OPT_EXPORT_NAME has entered the transmission phase.
            super::request::push_disconnect(outbox, export.headers);
            return Ok(HandshakeEnd::Described(export));
        }
        Ok(HandshakeEnd::Transmission(export, allocation))
    }

    fn take_export(&mut self) -> Result<ExportInfo, ProtocolError> {
        let (size, flags) = self.size_and_flags.ok_or(ProtocolError {
            what: "described an export without its size",
            reference: "proto.md, \"Option reply types\", NBD_REP_INFO",
        })?;
        Ok(ExportInfo {
            name: self.name.take().unwrap_or_else(|| self.config.export.clone()),
            description: std::mem::take(&mut self.description),
            size,
            flags: TransmissionFlags::from_bits_retain(flags),
            block_size: self.block_size,
            contexts: std::mem::take(&mut self.contexts),
            headers: self.headers,
        })
    }
}

impl ExportList {
    fn add(&mut self, export: ListedExport) {
        let bytes = self.bytes.saturating_add(export.name.len()).saturating_add(export.description.len());
        if self.exports.len() >= MAX_EXPORTS || bytes > MAX_LIST_BYTES {
            self.left_out = self.left_out.saturating_add(1);
            return;
        }
        self.bytes = bytes;
        self.exports.push(export);
    }
}

/// Checks the head of the reply to `option`; returns the length of its data.
fn check_reply_head(head: &OptionReplyHead, option: Opt) -> Result<usize, ProtocolError> {
    let reference = "proto.md, \"Fixed newstyle negotiation\"";
    if head.magic.get() != NBD_REP_MAGIC {
        return Err(ProtocolError { what: "sent an option reply with a wrong magic number", reference });
    }
    if head.option.get() != option.0 {
        return Err(ProtocolError { what: "answered an option that was not the last one sent", reference });
    }
    let len = head.length.get() as usize;
    if len > MAX_OPTION_REPLY {
        return Err(ProtocolError { what: "sent an option reply of more than 64 KiB", reference });
    }
    Ok(len)
}

/// The maximum data of one option reply, in bytes; the protocol's strings have at most 4 KiB.
pub(super) const MAX_OPTION_REPLY: usize = 64 << 10;
/// The maximum number of exports in a list.
pub(super) const MAX_EXPORTS: usize = 10_000;
/// The maximum length of all names and descriptions in a list, in bytes.
pub(super) const MAX_LIST_BYTES: usize = 8 << 20;
/// The maximum number of metadata contexts in a list.
const MAX_CONTEXTS: usize = 64;
/// The only metadata context that the protocol itself defines.
const BASE_ALLOCATION: &str = "base:allocation";
const EXPORT_NAME_REPLY: usize = size_of::<ExportNameReply>();
const UNEXPECTED: ProtocolError = ProtocolError {
    what: "answered an option with a reply that does not belong to it",
    reference: "proto.md, \"Option types\"",
};
/// Unreachable after the check of the length.
const SHORT: ProtocolError =
    ProtocolError { what: "sent a truncated message", reference: "proto.md, \"Handshake\"" };
