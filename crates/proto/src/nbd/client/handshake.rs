//! The handshake phase as the client sees it (proto.md, "Newstyle negotiation", "Fixed newstyle
//! negotiation").
//!
//! One option at a time, down a ladder whose rungs a server may refuse:
//! ```text
//!   EXTENDED_HEADERS ─no─▶ STRUCTURED_REPLY ─▶ SET_META_CONTEXT ─▶ GO ─unknown option─▶ EXPORT_NAME
//!                └──yes, skips ──┘      (only with one of the two)
//! ```
//! Where TLS is required, `STARTTLS` comes before all of them, and nothing is asked without it.
//!
//! A server without fixed newstyle knows `EXPORT_NAME` only. What a server refuses properly is a
//! [`Refused`]; only what breaks the protocol is a [`ProtocolError`].

use super::export::{BlockSize, ExportInfo, Headers, ListedExport};
use super::option::{self, InfoReply};
use super::refused::NbdRefused;
use super::{Config, Mode};
use crate::outbox::Outbox;
use crate::session::{BYTES_BEFORE_TLS, ProtocolError};
use blockmux_wire::nbd::handshake::{
    ClientFlags, ExportNameReply, Greeting, NBD_CLISERV_MAGIC, NBD_EXPORT_NAME_ZEROES,
    NBD_FLAG_C_FIXED_NEWSTYLE, NBD_FLAG_C_NO_ZEROES, NBD_FLAG_FIXED_NEWSTYLE, NBD_FLAG_NO_ZEROES, NBD_MAGIC,
    NBD_OPTS_MAGIC, NBD_REP_MAGIC, Opt, OptionReplyHead, Rep, TransmissionFlags,
};
use zerocopy::{FromBytes, IntoBytes};

/// The state of a handshake.
pub(super) struct ClientHandshake {
    config: Config,
    step: HandshakeReply,
    /// The server speaks fixed newstyle: it answers options, instead of hanging up on those it does
    /// not know.
    is_fixed: bool,
    /// 124 zeroes follow the reply to `NBD_OPT_EXPORT_NAME`.
    sends_zeroes: bool,
    /// Nothing may be asked without TLS.
    requires_tls: bool,
    /// Abort instead of sending the next option.
    is_stopping: bool,
    headers: Headers,
    /// The number of `base:allocation`, once selected.
    allocation: Option<u32>,
    /// Size and flags, once told.
    told: Option<(u64, u16)>,
    block_size: Option<BlockSize>,
    name: Option<String>,
    description: String,
    contexts: Vec<String>,
    list: ExportList,
}

/// What a server listed, up to a limit.
#[derive(Default)]
pub(super) struct ExportList {
    pub(super) exports: Vec<ListedExport>,
    /// How many more there were.
    pub(super) left_out: u64,
    bytes: usize,
}

/// What the handshake waits for.
#[derive(Clone, Copy)]
enum HandshakeReply {
    Greeting,
    /// The reply to this option.
    Reply(Opt),
    /// The reply to `NBD_OPT_EXPORT_NAME`, which has a form of its own.
    ExportName,
    /// The TLS handshake, which the driver makes.
    Tls,
}

/// What came of some bytes.
pub(super) enum HandshakeProgress {
    /// So many were taken, and the handshake goes on.
    Took(usize),
    /// So many have to be there before anything can be done.
    Needs(usize),
    /// So many were taken, and the handshake is over.
    Over(usize, HandshakeEnd),
}

/// How a handshake ends without a breach of the protocol.
pub(super) enum HandshakeEnd {
    /// Transmission has begun; with the number of `base:allocation`.
    Transmission(ExportInfo, Option<u32>),
    /// The server told all about an export, and is not needed any more.
    Described(ExportInfo),
    Listed(ExportList),
    Refused(NbdRefused),
    /// It was to stop.
    Stopped,
}

impl ClientHandshake {
    pub(super) fn new(config: Config) -> ClientHandshake {
        ClientHandshake {
            config,
            step: HandshakeReply::Greeting,
            is_fixed: false,
            sends_zeroes: true,
            requires_tls: false,
            is_stopping: false,
            headers: Headers::Simple,
            allocation: None,
            told: None,
            block_size: None,
            name: None,
            description: String::new(),
            contexts: Vec::new(),
            list: ExportList::default(),
        }
    }

    /// How many bytes the next step needs at least.
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

    /// Asks for nothing without TLS.
    pub(super) fn require_tls(&mut self) {
        self.requires_tls = true;
    }

    /// Whether the driver has to make a TLS handshake now.
    pub(super) fn awaits_tls(&self) -> bool {
        matches!(self.step, HandshakeReply::Tls)
    }

    /// TLS is established.
    pub(super) fn on_secured(&mut self, outbox: &mut Outbox) -> Option<HandshakeEnd> {
        self.send_next(Some(Opt::NBD_OPT_STARTTLS), outbox)
    }

    /// Ends the handshake before the next option.
    pub(super) fn stop(&mut self) {
        self.is_stopping = true;
    }

    /// Takes one message from the server.
    pub(super) fn on_bytes(
        &mut self,
        bytes: &[u8],
        outbox: &mut Outbox,
    ) -> Result<HandshakeProgress, ProtocolError> {
        let need = self.need();
        if bytes.len() < need || self.awaits_tls() && bytes.is_empty() {
            return Ok(HandshakeProgress::Needs(need));
        }
        let (took, end) = match self.step {
            HandshakeReply::Greeting => (need, self.on_greeting(bytes, outbox)?),
            HandshakeReply::ExportName => (need, Some(self.on_export_name(bytes, outbox)?)),
            // Whoever sent them wants them to be taken for a part of what comes by TLS.
            HandshakeReply::Tls => return Err(BYTES_BEFORE_TLS),
            HandshakeReply::Reply(option) => {
                let (head, rest) = OptionReplyHead::read_from_prefix(bytes).map_err(|_| SHORT)?;
                let len = check_reply_head(&head, option)?;
                let Some(data) = rest.get(..len) else {
                    return Ok(HandshakeProgress::Needs(need.saturating_add(len)));
                };
                (need.saturating_add(len), self.on_reply(option, Rep(head.reply_type.get()), data, outbox)?)
            }
        };
        Ok(end.map_or(HandshakeProgress::Took(took), |end| HandshakeProgress::Over(took, end)))
    }

    /// The server hung up.
    pub(super) fn on_end(&mut self) -> Result<HandshakeEnd, ProtocolError> {
        match self.step {
            HandshakeReply::ExportName => {
                Ok(HandshakeEnd::Refused(NbdRefused::Closed { export: self.config.export.clone() }))
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
            NBD_CLISERV_MAGIC => return Ok(Some(HandshakeEnd::Refused(NbdRefused::Oldstyle))),
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
            return Ok(Some(HandshakeEnd::Refused(NbdRefused::NoTls { message: String::new() })));
        }
        if !self.is_fixed && self.config.mode == Mode::List {
            return Ok(Some(HandshakeEnd::Refused(NbdRefused::CannotList)));
        }
        Ok(self.send_next(None, outbox))
    }

    /// The rungs of the ladder in order.
    fn ladder(&self) -> &'static [Opt] {
        match self.config.mode {
            _ if !self.is_fixed => &[Opt::NBD_OPT_EXPORT_NAME],
            Mode::List => &[Opt::NBD_OPT_STARTTLS, Opt::NBD_OPT_LIST],
            Mode::Go => &[
                Opt::NBD_OPT_STARTTLS,
                Opt::NBD_OPT_EXTENDED_HEADERS,
                Opt::NBD_OPT_STRUCTURED_REPLY,
                Opt::NBD_OPT_SET_META_CONTEXT,
                Opt::NBD_OPT_GO,
                Opt::NBD_OPT_EXPORT_NAME,
            ],
            Mode::Info => &[
                Opt::NBD_OPT_STARTTLS,
                Opt::NBD_OPT_EXTENDED_HEADERS,
                Opt::NBD_OPT_STRUCTURED_REPLY,
                Opt::NBD_OPT_LIST_META_CONTEXT,
                Opt::NBD_OPT_INFO,
                Opt::NBD_OPT_EXPORT_NAME,
            ],
        }
    }

    /// Whether there is a point in this option now.
    fn is_wanted(&self, option: Opt) -> bool {
        match option {
            Opt::NBD_OPT_STARTTLS => self.requires_tls,
            Opt::NBD_OPT_EXTENDED_HEADERS => self.config.features.extended_headers,
            Opt::NBD_OPT_STRUCTURED_REPLY => {
                self.config.features.structured_replies && self.headers == Headers::Simple
            }
            Opt::NBD_OPT_SET_META_CONTEXT | Opt::NBD_OPT_LIST_META_CONTEXT => self.headers != Headers::Simple,
            _ => true,
        }
    }

    /// Sends the next option on the ladder after `last`.
    fn send_next(&mut self, last: Option<Opt>, outbox: &mut Outbox) -> Option<HandshakeEnd> {
        if self.is_stopping {
            self.abort(outbox);
            return Some(HandshakeEnd::Stopped);
        }
        let after_last = self.ladder().iter().skip_while(|opt| last.is_some_and(|last| **opt != last));
        let next = after_last.copied().find(|&opt| Some(opt) != last && self.is_wanted(opt))?;
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

    /// Says good-bye; the server may answer, but nobody waits for that.
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
            (Opt::NBD_OPT_EXTENDED_HEADERS, Rep::NBD_REP_ACK) => self.headers = Headers::Extended,
            (Opt::NBD_OPT_STRUCTURED_REPLY, Rep::NBD_REP_ACK) => self.headers = Headers::Structured,
            (Opt::NBD_OPT_SET_META_CONTEXT | Opt::NBD_OPT_LIST_META_CONTEXT, Rep::NBD_REP_ACK) => {}
            (Opt::NBD_OPT_SET_META_CONTEXT | Opt::NBD_OPT_LIST_META_CONTEXT, Rep::NBD_REP_META_CONTEXT) => {
                self.on_context(option, data)?;
                return Ok(None);
            }
            (Opt::NBD_OPT_GO | Opt::NBD_OPT_INFO, Rep::NBD_REP_INFO) => {
                self.on_info(data)?;
                return Ok(None);
            }
            (Opt::NBD_OPT_GO, Rep::NBD_REP_ACK) if self.config.mode == Mode::Info => {
                let export = self.take_export()?;
                super::request::push_disconnect(outbox, export.headers);
                return Ok(Some(HandshakeEnd::Described(export)));
            }
            (Opt::NBD_OPT_GO, Rep::NBD_REP_ACK) => {
                let allocation = self.allocation;
                return Ok(Some(HandshakeEnd::Transmission(self.take_export()?, allocation)));
            }
            (Opt::NBD_OPT_INFO, Rep::NBD_REP_ACK)
                if self.told.is_some_and(|(size, _)| size == 0) && !self.is_stopping =>
            {
                // nbd-server 3.24 learns the size only when the export is opened: ask as if to use
                // it.
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
                // Whatever was listed before the error does not count.
                self.allocation = None;
                self.contexts.clear();
                !is_final
            }
            Opt::NBD_OPT_GO if self.config.mode == Mode::Info => {
                // It was only asked once more; what is known is all there is.
                self.abort(outbox);
                return Ok(Some(HandshakeEnd::Described(self.take_export()?)));
            }
            Opt::NBD_OPT_GO | Opt::NBD_OPT_INFO if reply == Rep::NBD_REP_ERR_UNSUP => {
                if self.headers == Headers::Extended {
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
        Ok(Some(HandshakeEnd::Refused(NbdRefused::from_reply(&self.config.export, option, reply, data))))
    }

    fn on_info(&mut self, data: &[u8]) -> Result<(), ProtocolError> {
        match option::read_info(data)? {
            InfoReply::Export { size, flags } => self.told = Some((size, flags)),
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
                    what: "selected a metadata context that was not asked for, or one twice",
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
        self.told = Some((reply.size.get(), reply.transmission_flags.get()));
        let allocation = self.allocation;
        let export = self.take_export()?;
        if self.config.mode == Mode::Info {
            // There was no way to ask without entering transmission.
            super::request::push_disconnect(outbox, export.headers);
            return Ok(HandshakeEnd::Described(export));
        }
        Ok(HandshakeEnd::Transmission(export, allocation))
    }

    fn take_export(&mut self) -> Result<ExportInfo, ProtocolError> {
        let (size, flags) = self.told.ok_or(ProtocolError {
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

/// The most data in one option reply; the protocol's strings end at 4 KiB.
pub(super) const MAX_OPTION_REPLY: usize = 64 << 10;
/// The most exports that are listed.
pub(super) const MAX_EXPORTS: usize = 10_000;
/// The most bytes of names and descriptions that are listed.
pub(super) const MAX_LIST_BYTES: usize = 8 << 20;
/// The most metadata contexts that are remembered of a list.
const MAX_CONTEXTS: usize = 64;
/// The one metadata context that the protocol itself defines.
const BASE_ALLOCATION: &str = "base:allocation";
const EXPORT_NAME_REPLY: usize = size_of::<ExportNameReply>();
const UNEXPECTED: ProtocolError = ProtocolError {
    what: "answered an option with a reply that does not belong to it",
    reference: "proto.md, \"Option types\"",
};
/// Cannot happen behind a check of the length.
const SHORT: ProtocolError =
    ProtocolError { what: "sent a truncated message", reference: "proto.md, \"Handshake\"" };
