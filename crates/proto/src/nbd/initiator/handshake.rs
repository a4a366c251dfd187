//! The handshake phase as the client sees it (proto.md, "Newstyle negotiation", "Fixed newstyle negotiation").
//!
//! One option at a time, down a ladder whose rungs a server may refuse:
//! ```text
//!   EXTENDED_HEADERS ─no─▶ STRUCTURED_REPLY ─▶ SET_META_CONTEXT ─▶ GO ─unknown option─▶ EXPORT_NAME
//!                └──yes, skips ──┘      (only with one of the two)
//! ```
//! A server without fixed newstyle knows `EXPORT_NAME` only. What a server refuses properly is a [`Refused`]; only
//! what breaks the protocol is a [`ProtocolError`].

use super::export::{BlockSize, ExportInfo, Headers, ListedExport, TransmissionFlags};
use super::option::{self, InfoReply};
use super::refused::Refused;
use super::{Config, Mode};
use crate::outbox::Outbox;
use crate::session::ProtocolError;
use blockmux_wire::nbd::handshake::{
    ClientFlags, ExportNameReply, Greeting, NBD_CLISERV_MAGIC, NBD_EXPORT_NAME_ZEROES,
    NBD_FLAG_C_FIXED_NEWSTYLE, NBD_FLAG_C_NO_ZEROES, NBD_FLAG_FIXED_NEWSTYLE, NBD_FLAG_NO_ZEROES, NBD_MAGIC,
    NBD_OPTS_MAGIC, NBD_REP_MAGIC, Opt, OptionReplyHead, Rep,
};
use zerocopy::{FromBytes, IntoBytes};

/// The state of a handshake.
pub(super) struct Handshake {
    config: Config,
    step: Step,
    /// The server speaks fixed newstyle: it answers options, instead of hanging up on those it does not know.
    is_fixed: bool,
    /// 124 zeroes follow the reply to `NBD_OPT_EXPORT_NAME`.
    sends_zeroes: bool,
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
    list: List,
}

/// What a server listed, up to a limit.
#[derive(Default)]
pub(super) struct List {
    pub(super) exports: Vec<ListedExport>,
    /// How many more there were.
    pub(super) left_out: u64,
    bytes: usize,
}

/// What the handshake waits for.
#[derive(Clone, Copy)]
enum Step {
    Greeting,
    /// The reply to this option.
    Reply(Opt),
    /// The reply to `NBD_OPT_EXPORT_NAME`, which has a form of its own.
    ExportName,
}

/// What came of some bytes.
pub(super) enum Progress {
    /// So many were taken, and the handshake goes on.
    Took(usize),
    /// So many have to be there before anything can be done.
    Needs(usize),
    /// So many were taken, and the handshake is over.
    Over(usize, End),
}

/// How a handshake ends without a breach of the protocol.
pub(super) enum End {
    /// Transmission has begun; with the number of `base:allocation`.
    Transmission(ExportInfo, Option<u32>),
    /// The server told all about an export, and is not needed any more.
    Described(ExportInfo),
    Listed(List),
    Refused(Refused),
    /// It was to stop.
    Stopped,
}

impl Handshake {
    pub(super) fn new(config: Config) -> Handshake {
        Handshake {
            config,
            step: Step::Greeting,
            is_fixed: false,
            sends_zeroes: true,
            is_stopping: false,
            headers: Headers::Simple,
            allocation: None,
            told: None,
            block_size: None,
            name: None,
            description: String::new(),
            contexts: Vec::new(),
            list: List::default(),
        }
    }

    /// How many bytes the next step needs at least.
    pub(super) fn need(&self) -> usize {
        match self.step {
            Step::Greeting => size_of::<Greeting>(),
            Step::Reply(_) => size_of::<OptionReplyHead>(),
            Step::ExportName if self.sends_zeroes => EXPORT_NAME_REPLY.saturating_add(NBD_EXPORT_NAME_ZEROES),
            Step::ExportName => EXPORT_NAME_REPLY,
        }
    }

    /// Ends the handshake before the next option.
    pub(super) fn stop(&mut self) {
        self.is_stopping = true;
    }

    /// Takes one message from the server.
    pub(super) fn on_bytes(&mut self, bytes: &[u8], outbox: &mut Outbox) -> Result<Progress, ProtocolError> {
        let need = self.need();
        if bytes.len() < need {
            return Ok(Progress::Needs(need));
        }
        let (took, end) = match self.step {
            Step::Greeting => (need, self.on_greeting(bytes, outbox)?),
            Step::ExportName => (need, Some(self.on_export_name(bytes, outbox)?)),
            Step::Reply(option) => {
                let (head, rest) = OptionReplyHead::read_from_prefix(bytes).map_err(|_| SHORT)?;
                let len = check_reply_head(&head, option)?;
                let Some(data) = rest.get(..len) else {
                    return Ok(Progress::Needs(need.saturating_add(len)));
                };
                (need.saturating_add(len), self.on_reply(option, Rep(head.reply_type.get()), data, outbox)?)
            }
        };
        Ok(end.map_or(Progress::Took(took), |end| Progress::Over(took, end)))
    }

    /// The server hung up.
    pub(super) fn on_end(&mut self) -> Result<End, ProtocolError> {
        match self.step {
            Step::ExportName => Ok(End::Refused(Refused::Closed { export: self.config.export.clone() })),
            Step::Greeting => Err(ProtocolError {
                what: "closed the connection without a greeting",
                reference: "proto.md, \"Newstyle negotiation\"",
            }),
            Step::Reply(_) => Err(ProtocolError {
                what: "closed the connection instead of answering an option",
                reference: "proto.md, \"Termination of the session during option haggling\"",
            }),
        }
    }

    fn on_greeting(&mut self, bytes: &[u8], outbox: &mut Outbox) -> Result<Option<End>, ProtocolError> {
        let (greeting, _) = Greeting::read_from_prefix(bytes).map_err(|_| SHORT)?;
        let reference = "proto.md, \"Newstyle negotiation\"";
        if greeting.magic.get() != NBD_MAGIC {
            let what = "is no NBD server: its first bytes are not NBDMAGIC";
            return Err(ProtocolError { what, reference });
        }
        match greeting.opts_magic.get() {
            NBD_OPTS_MAGIC => {}
            NBD_CLISERV_MAGIC => return Ok(Some(End::Refused(Refused::Oldstyle))),
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
        if !self.is_fixed && self.config.mode == Mode::List {
            return Ok(Some(End::Refused(Refused::CannotList)));
        }
        Ok(self.send_next(None, outbox))
    }

    /// The rungs of the ladder in order.
    fn ladder(&self) -> &'static [Opt] {
        match self.config.mode {
            _ if !self.is_fixed => &[Opt::NBD_OPT_EXPORT_NAME],
            Mode::List => &[Opt::NBD_OPT_LIST],
            Mode::Go => &[
                Opt::NBD_OPT_EXTENDED_HEADERS,
                Opt::NBD_OPT_STRUCTURED_REPLY,
                Opt::NBD_OPT_SET_META_CONTEXT,
                Opt::NBD_OPT_GO,
                Opt::NBD_OPT_EXPORT_NAME,
            ],
            Mode::Info => &[
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
            Opt::NBD_OPT_EXTENDED_HEADERS => self.config.features.extended_headers,
            Opt::NBD_OPT_STRUCTURED_REPLY => {
                self.config.features.structured_replies && self.headers == Headers::Simple
            }
            Opt::NBD_OPT_SET_META_CONTEXT | Opt::NBD_OPT_LIST_META_CONTEXT => self.headers != Headers::Simple,
            _ => true,
        }
    }

    /// Sends the next option on the ladder after `last`.
    fn send_next(&mut self, last: Option<Opt>, outbox: &mut Outbox) -> Option<End> {
        if self.is_stopping {
            self.abort(outbox);
            return Some(End::Stopped);
        }
        let after_last = self.ladder().iter().skip_while(|opt| last.is_some_and(|last| **opt != last));
        let next = after_last.copied().find(|&opt| Some(opt) != last && self.is_wanted(opt))?;
        let export = &self.config.export;
        self.step = Step::Reply(next);
        match next {
            Opt::NBD_OPT_EXPORT_NAME => {
                self.step = Step::ExportName;
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
    ) -> Result<Option<End>, ProtocolError> {
        if reply.is_error() {
            return self.on_error(option, reply, data, outbox);
        }
        match (option, reply) {
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
                return Ok(Some(End::Described(export)));
            }
            (Opt::NBD_OPT_GO, Rep::NBD_REP_ACK) => {
                let allocation = self.allocation;
                return Ok(Some(End::Transmission(self.take_export()?, allocation)));
            }
            (Opt::NBD_OPT_INFO, Rep::NBD_REP_ACK)
                if self.told.is_some_and(|(size, _)| size == 0) && !self.is_stopping =>
            {
                // nbd-server 3.24 learns the size only when the export is opened: ask as if to use it.
                self.step = Step::Reply(Opt::NBD_OPT_GO);
                option::send_go(outbox, Opt::NBD_OPT_GO, &self.config.export);
                return Ok(None);
            }
            (Opt::NBD_OPT_INFO, Rep::NBD_REP_ACK) => {
                self.abort(outbox);
                return Ok(Some(End::Described(self.take_export()?)));
            }
            (Opt::NBD_OPT_LIST, Rep::NBD_REP_SERVER) => {
                self.list.add(option::read_server(data)?);
                return Ok(None);
            }
            (Opt::NBD_OPT_LIST, Rep::NBD_REP_ACK) => {
                self.abort(outbox);
                return Ok(Some(End::Listed(std::mem::take(&mut self.list))));
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
    ) -> Result<Option<End>, ProtocolError> {
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
                return Ok(Some(End::Described(self.take_export()?)));
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
        Ok(Some(End::Refused(Refused::from_reply(&self.config.export, option, reply, data))))
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

    fn on_export_name(&mut self, bytes: &[u8], outbox: &mut Outbox) -> Result<End, ProtocolError> {
        let (reply, _) = ExportNameReply::read_from_prefix(bytes).map_err(|_| SHORT)?;
        self.told = Some((reply.size.get(), reply.transmission_flags.get()));
        let allocation = self.allocation;
        let export = self.take_export()?;
        if self.config.mode == Mode::Info {
            // There was no way to ask without entering transmission.
            super::request::push_disconnect(outbox, export.headers);
            return Ok(End::Described(export));
        }
        Ok(End::Transmission(export, allocation))
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
            flags: TransmissionFlags(flags),
            block_size: self.block_size,
            contexts: std::mem::take(&mut self.contexts),
            headers: self.headers,
        })
    }
}

impl List {
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
const MAX_OPTION_REPLY: usize = 64 << 10;
/// The most exports that are listed.
pub(super) const MAX_EXPORTS: usize = 10_000;
/// The most bytes of names and descriptions that are listed.
const MAX_LIST_BYTES: usize = 8 << 20;
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

#[cfg(test)]
mod tests {
    use super::super::script::*;
    use super::super::{Features, InitiatorSession};
    use super::*;
    use crate::session::{Demand, Initiator, StreamSession, Timed};
    use blockmux_volume::{Chunk, Pool};
    use std::time::{Duration, Instant};

    const ALL: Features = Features { extended_headers: true, structured_replies: true };
    const NONE: Features = Features { extended_headers: false, structured_replies: false };

    fn go_data() -> Vec<u8> {
        b"\0\0\0\x01x\0\x03\0\x01\0\x02\0\x03".to_vec()
    }

    fn meta_data(queries: u32) -> Vec<u8> {
        let query: &[u8] = if queries > 0 { b"\0\0\0\x0fbase:allocation" } else { b"" };
        [b"\0\0\0\x01x", &queries.to_be_bytes()[..], query].concat()
    }

    /// Answers an option and checks what is sent next.
    fn step(client: &mut Client, answer: &[u8], next: &[u8]) {
        client.feed(answer).unwrap();
        assert_eq!(client.sent(), next);
    }

    #[test]
    fn a_modern_server_grants_everything() {
        at_every_split(|split| {
            let mut client = Client::new(Mode::Go, ALL, split);
            let opt = Opt::NBD_OPT_EXTENDED_HEADERS;
            step(&mut client, &greeting(3), &[&[0, 0, 0, 3][..], &option(opt, b"")].concat());
            let set = Opt::NBD_OPT_SET_META_CONTEXT;
            step(&mut client, &reply(opt, Rep::NBD_REP_ACK, b""), &option(set, &meta_data(1)));
            step(&mut client, &reply(set, Rep::NBD_REP_META_CONTEXT, b"\0\0\0\x05base:allocation"), b"");
            let go = Opt::NBD_OPT_GO;
            step(&mut client, &reply(set, Rep::NBD_REP_ACK, b""), &option(go, &go_data()));
            for info in [
                info_block_size(4096, 8192, 1 << 20),
                b"\0\x01canonical".to_vec(),
                b"\0\x02a disk".to_vec(),
                b"\x12\x34ignored".to_vec(),
                info_export(1 << 30, 0x07),
            ] {
                step(&mut client, &reply(go, Rep::NBD_REP_INFO, &info), b"");
            }
            assert!(!client.session.is_ready() && client.session.export().is_none());
            step(&mut client, &reply(go, Rep::NBD_REP_ACK, b""), b"");
            assert!(client.session.is_ready());
            let expected = ExportInfo {
                name: "canonical".into(),
                description: "a disk".into(),
                size: 1 << 30,
                flags: TransmissionFlags(7),
                block_size: Some(BlockSize { minimum: 4096, preferred: 8192, maximum_payload: 1 << 20 }),
                contexts: vec!["base:allocation".into()],
                headers: Headers::Extended,
            };
            assert_eq!(client.session.export(), Some(&expected));
            assert_eq!(client.session.volume_info(), Some(expected.volume_info()));
            assert_eq!(client.session.poll_timeout(), None);
        });
    }

    #[test]
    fn a_server_that_knows_no_option_is_asked_for_the_export_by_name() {
        at_every_split(|split| {
            let mut client = Client::new(Mode::Go, ALL, split);
            client.feed(&greeting(1)).unwrap();
            let no = |opt| reply(opt, Rep::NBD_REP_ERR_UNSUP, b"what?");
            assert_eq!(client.sent()[..4], [0, 0, 0, 1]);
            let (structured, go) = (Opt::NBD_OPT_STRUCTURED_REPLY, Opt::NBD_OPT_GO);
            step(&mut client, &no(Opt::NBD_OPT_EXTENDED_HEADERS), &option(structured, b""));
            step(&mut client, &no(structured), &option(go, &go_data()));
            step(&mut client, &no(go), &option(Opt::NBD_OPT_EXPORT_NAME, b"x"));
            let answer = [&info_export(512, 3)[2..], &[0; 124]].concat();
            client.feed(&answer[..133]).unwrap();
            assert!(!client.session.is_ready());
            client.feed(&answer[133..]).unwrap();
            let export = client.session.export().unwrap();
            assert_eq!((export.size, export.flags.0, export.headers), (512, 3, Headers::Simple));
            assert!(client.session.is_ready());
        });
    }

    #[test]
    fn structured_replies_are_the_second_choice_and_contexts_optional() {
        let mut client = Client::new(Mode::Go, ALL, 1);
        client.feed(&greeting(3)).unwrap();
        client.feed(&reply(Opt::NBD_OPT_EXTENDED_HEADERS, Rep::NBD_REP_ERR_POLICY, b"")).unwrap();
        client.sent();
        let set = Opt::NBD_OPT_SET_META_CONTEXT;
        let ack = reply(Opt::NBD_OPT_STRUCTURED_REPLY, Rep::NBD_REP_ACK, b"");
        step(&mut client, &ack, &option(set, &meta_data(1)));
        client.feed(&reply(set, Rep::NBD_REP_META_CONTEXT, b"\0\0\0\x05base:allocation")).unwrap();
        let error = reply(set, Rep::NBD_REP_ERR_UNKNOWN, b"");
        step(&mut client, &error, &option(Opt::NBD_OPT_GO, &go_data()));
        client.feed(&reply(Opt::NBD_OPT_GO, Rep::NBD_REP_INFO, &info_export(512, 1))).unwrap();
        client.feed(&reply(Opt::NBD_OPT_GO, Rep::NBD_REP_ACK, b"")).unwrap();
        let export = client.session.export().unwrap();
        assert_eq!((export.headers, export.contexts.len()), (Headers::Structured, 0));
    }

    #[test]
    fn the_handshake_that_a_kernel_client_recorded_with_nbdkit_is_followed() {
        // Server's bytes of a capture: greeting, NBD_INFO_EXPORT, acknowledgement.
        let mut client = Client::new(Mode::Go, NONE, 5);
        let greeting = b"\x4e\x42\x44\x4d\x41\x47\x49\x43\x49\x48\x41\x56\x45\x4f\x50\x54\x00\x03";
        let expected = [&[0, 0, 0, 3][..], &option(Opt::NBD_OPT_GO, &go_data())].concat();
        step(&mut client, greeting, &expected);
        client
            .feed(
                b"\x00\x03\xe8\x89\x04\x55\x65\xa9\x00\x00\x00\x07\x00\x00\x00\x03\x00\x00\x00\x0c\
                  \x00\x00\x00\x00\x00\x00\x20\x00\x00\x00\x05\x6d\
                  \x00\x03\xe8\x89\x04\x55\x65\xa9\x00\x00\x00\x07\x00\x00\x00\x01\x00\x00\x00\x00",
            )
            .unwrap();
        let export = client.session.export().unwrap();
        assert_eq!(export.size, 512 << 20);
        let names: Vec<_> = export.flags.names().collect();
        assert_eq!(
            names.join(" "),
            "HAS_FLAGS SEND_FLUSH SEND_FUA SEND_TRIM SEND_WRITE_ZEROES CAN_MULTI_CONN SEND_CACHE"
        );
    }

    #[test]
    fn a_server_without_fixed_newstyle_gets_one_option() {
        at_every_split(|split| {
            let mut client = Client::new(Mode::Go, ALL, split);
            let name = [&[0; 4][..], &option(Opt::NBD_OPT_EXPORT_NAME, b"x")].concat();
            step(&mut client, &greeting(0), &name);
            client.feed(&[&info_export(1024, 1)[2..], &[0; 124]].concat()).unwrap();
            assert!(client.session.is_ready());
        });
        let mut client = Client::new(Mode::Go, ALL, usize::MAX);
        client.feed(&greeting(2)).unwrap();
        assert_eq!(client.sent()[..4], [0, 0, 0, 2]);
        client.feed(&info_export(1024, 1)[2..]).unwrap();
        assert!(client.session.is_ready(), "without the zeroes, as agreed");
    }

    #[test]
    fn info_tells_everything_and_leaves() {
        at_every_split(|split| {
            let mut client = Client::new(Mode::Info, ALL, split);
            client.feed(&greeting(3)).unwrap();
            client.sent();
            let list = Opt::NBD_OPT_LIST_META_CONTEXT;
            let ack = reply(Opt::NBD_OPT_EXTENDED_HEADERS, Rep::NBD_REP_ACK, b"");
            step(&mut client, &ack, &option(list, &meta_data(0)));
            for context in [b"\0\0\0\0base:allocation".as_slice(), b"\0\0\0\0qemu:dirty"] {
                step(&mut client, &reply(list, Rep::NBD_REP_META_CONTEXT, context), b"");
            }
            let info = Opt::NBD_OPT_INFO;
            step(&mut client, &reply(list, Rep::NBD_REP_ACK, b""), &option(info, &go_data()));
            client.feed(&reply(info, Rep::NBD_REP_INFO, &info_export(512, 1))).unwrap();
            step(&mut client, &reply(info, Rep::NBD_REP_ACK, b""), &option(Opt::NBD_OPT_ABORT, b""));
            let export = client.session.export().unwrap();
            assert_eq!(export.contexts, ["base:allocation", "qemu:dirty"]);
            assert!(client.is_closing() && client.session.is_over() && !client.session.is_ready());
            assert_eq!(client.session.on_end(), Ok(()));
        });
    }

    #[test]
    fn a_server_that_tells_size_0_is_asked_again_as_if_to_go() {
        let (info, go) = (Opt::NBD_OPT_INFO, Opt::NBD_OPT_GO);
        for goes in [true, false] {
            let mut client = Client::new(Mode::Info, NONE, 1);
            client.feed(&greeting(3)).unwrap();
            client.feed(&reply(info, Rep::NBD_REP_INFO, &info_export(0, 1))).unwrap();
            client.sent();
            step(&mut client, &reply(info, Rep::NBD_REP_ACK, b""), &option(go, &go_data()));
            if goes {
                client.feed(&reply(go, Rep::NBD_REP_INFO, &info_export(1024, 1))).unwrap();
                client.feed(&reply(go, Rep::NBD_REP_ACK, b"")).unwrap();
                assert_eq!(requests(&client.sent())[0].0.cmd, 2);
            } else {
                let no = reply(go, Rep::NBD_REP_ERR_UNSUP, b"");
                step(&mut client, &no, &option(Opt::NBD_OPT_ABORT, b""));
            }
            assert_eq!(client.session.export().unwrap().size, if goes { 1024 } else { 0 });
            assert!(client.is_closing() && !client.session.is_ready());
        }
    }

    #[test]
    fn info_of_an_old_server_enters_transmission_and_disconnects_at_once() {
        let mut client = Client::new(Mode::Info, ALL, 1);
        client.feed(&greeting(0)).unwrap();
        client.sent();
        client.feed(&[&info_export(1024, 1)[2..], &[0; 124]].concat()).unwrap();
        let sent = requests(&client.sent());
        assert_eq!((sent.len(), sent[0].0.cmd), (1, 2));
        assert_eq!(client.session.export().unwrap().size, 1024);
        assert!(client.is_closing());
    }

    #[test]
    fn list_names_all_exports_with_their_descriptions() {
        at_every_split(|split| {
            let mut client = Client::new(Mode::List, ALL, split);
            let list = Opt::NBD_OPT_LIST;
            step(&mut client, &greeting(3), &[&[0, 0, 0, 3][..], &option(list, b"")].concat());
            for entry in [b"\0\0\0\x02d0".as_slice(), b"\0\0\0\x01xspare disk"] {
                client.feed(&reply(list, Rep::NBD_REP_SERVER, entry)).unwrap();
            }
            step(&mut client, &reply(list, Rep::NBD_REP_ACK, b""), &option(Opt::NBD_OPT_ABORT, b""));
            let listed =
                |name: &str, text: &str| ListedExport { name: name.into(), description: text.into() };
            assert_eq!(client.session.exports(), [listed("d0", ""), listed("x", "spare disk")]);
            assert!(client.is_closing() && client.session.refused().is_none());
        });
    }

    #[test]
    fn a_list_without_end_is_cut_off() {
        let list = Opt::NBD_OPT_LIST;
        for (name_len, kept) in [(1_usize, MAX_EXPORTS), (4000, MAX_LIST_BYTES / 4000)] {
            let mut client = Client::new(Mode::List, ALL, usize::MAX);
            client.feed(&greeting(3)).unwrap();
            let entry = [&(name_len as u32).to_be_bytes()[..], &vec![b'n'; name_len]].concat();
            let entry = reply(list, Rep::NBD_REP_SERVER, &entry);
            for _ in 0..kept + 5 {
                client.feed(&entry).unwrap();
            }
            client.feed(&reply(list, Rep::NBD_REP_ACK, b"")).unwrap();
            assert_eq!((client.session.exports().len(), client.session.exports_left_out()), (kept, 5));
        }
    }

    #[test]
    fn a_refusal_is_told_apart_from_a_broken_protocol() {
        let go = Opt::NBD_OPT_GO;
        for (rep, line) in [
            (Rep::NBD_REP_ERR_UNKNOWN, "server has no export \"x\": sorry"),
            (
                Rep::NBD_REP_ERR_TLS_REQD,
                "server requires TLS for export \"x\", and TLS is not supported yet: sorry",
            ),
            (Rep::NBD_REP_ERR_POLICY, "server refused NBD_OPT_GO with NBD_REP_ERR_POLICY: sorry"),
            (Rep(0x8000_1234), "server refused NBD_OPT_GO with Rep(0x80001234): sorry"),
        ] {
            let mut client = Client::new(Mode::Go, NONE, 3);
            client.feed(&greeting(3)).unwrap();
            client.sent();
            step(&mut client, &reply(go, rep, b"sorry"), &option(Opt::NBD_OPT_ABORT, b""));
            let refused = client.session.refused().unwrap();
            assert_eq!((refused.to_string().as_str(), refused.reply()), (line, Some(rep)));
            assert!(client.is_closing() && !client.session.is_ready());
        }
    }

    #[test]
    fn a_server_that_forces_tls_says_so_at_the_first_option() {
        for mode in [Mode::Go, Mode::Info, Mode::List] {
            let mut client = Client::new(mode, ALL, 1);
            client.feed(&greeting(3)).unwrap();
            let first = if mode == Mode::List { Opt::NBD_OPT_LIST } else { Opt::NBD_OPT_EXTENDED_HEADERS };
            client.feed(&reply(first, Rep::NBD_REP_ERR_TLS_REQD, b"")).unwrap();
            assert_eq!(client.session.refused().unwrap().reply(), Some(Rep::NBD_REP_ERR_TLS_REQD));
        }
    }

    #[test]
    fn what_old_servers_cannot_do_is_said_in_one_line() {
        let mut oldstyle = Client::new(Mode::Go, ALL, 1);
        oldstyle.feed(b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53\0\0").unwrap();
        assert_eq!(oldstyle.session.refused(), Some(&Refused::Oldstyle));
        assert!(oldstyle.is_closing() && oldstyle.sent().is_empty());

        let mut unlisted = Client::new(Mode::List, ALL, 1);
        unlisted.feed(&greeting(0)).unwrap();
        assert_eq!(unlisted.session.refused(), Some(&Refused::CannotList));

        let mut closed = Client::new(Mode::Go, ALL, 1);
        closed.feed(&greeting(0)).unwrap();
        assert_eq!(closed.session.on_end(), Ok(()));
        assert_eq!(closed.session.refused(), Some(&Refused::Closed { export: "x".into() }));
    }

    #[test]
    fn a_server_that_breaks_the_handshake_is_told_what_it_did() {
        let go = Opt::NBD_OPT_GO;
        let info = |data: &[u8]| reply(go, Rep::NBD_REP_INFO, data);
        let mut wrong_magic = reply(go, Rep::NBD_REP_ACK, b"");
        wrong_magic[7] ^= 1;
        let mut oversize = reply(go, Rep::NBD_REP_INFO, b"");
        oversize[16..20].copy_from_slice(&(MAX_OPTION_REPLY as u32 + 1).to_be_bytes());
        let long = [&[0, 1][..], &[b'a'; 4097]].concat();
        for (bytes, what) in [
            (wrong_magic, "sent an option reply with a wrong magic number"),
            (oversize, "sent an option reply of more than 64 KiB"),
            (reply(Opt::NBD_OPT_LIST, Rep::NBD_REP_ACK, b""), "answered an option that was not the last"),
            (reply(go, Rep::NBD_REP_SERVER, b""), "answered an option with a reply that does not belong"),
            (reply(go, Rep(77), b""), "answered an option with a reply that does not belong"),
            (reply(go, Rep::NBD_REP_ACK, b""), "described an export without its size"),
            (info(b"\0"), "sent an information reply shorter than its type"),
            (info(&info_export(1, 1)[..11]), "sent an NBD_INFO_EXPORT that is not 12 bytes long"),
            (info(&[&info_export(1, 1)[..], &[0]].concat()), "sent an NBD_INFO_EXPORT that is not 12"),
            (info(&info_block_size(1, 512, 4096)[..13]), "sent an NBD_INFO_BLOCK_SIZE that is not 14"),
            (info(&info_block_size(0, 512, 4096)), "advertised a minimum block size"),
            (info(b"\0\x01\xff"), "sent a string that is not UTF-8"),
            (info(&long), "sent a string of more than 4096 bytes"),
        ] {
            for split in [1, usize::MAX] {
                let mut client = Client::new(Mode::Go, NONE, split);
                client.feed(&greeting(3)).unwrap();
                let error = client.feed(&bytes).unwrap_err();
                assert!(error.what.starts_with(what), "{error}");
                assert!(error.reference.starts_with("proto.md"));
            }
        }
    }

    #[test]
    fn broken_lists_contexts_and_greetings_are_refused() {
        let error = |mode, trace: &[Vec<u8>]| {
            let mut client = Client::new(mode, ALL, usize::MAX);
            trace.iter().find_map(|bytes| client.feed(bytes).err()).expect("an error").what
        };
        let server = |data: &[u8]| reply(Opt::NBD_OPT_LIST, Rep::NBD_REP_SERVER, data);
        let longer = "listed an export whose name is longer than the reply";
        assert_eq!(error(Mode::List, &[greeting(3), server(b"\0\0\0\x02x")]), longer);
        assert_eq!(error(Mode::List, &[greeting(3), server(b"\0\0")]), longer);
        assert_eq!(error(Mode::List, &[greeting(3), server(b"\xff\xff\xff\xffx")]), longer);

        let agreed = [greeting(3), reply(Opt::NBD_OPT_EXTENDED_HEADERS, Rep::NBD_REP_ACK, b"")];
        let context = |data: &[u8]| reply(Opt::NBD_OPT_SET_META_CONTEXT, Rep::NBD_REP_META_CONTEXT, data);
        let unasked = [&agreed[..], &[context(b"\0\0\0\x01qemu:x")]].concat();
        assert!(error(Mode::Go, &unasked).starts_with("selected a metadata context that was not asked"));
        let twice = vec![context(b"\0\0\0\x01base:allocation"); 2];
        assert!(error(Mode::Go, &[&agreed[..], &twice].concat()).ends_with("or one twice"));
        let short = [&agreed[..], &[context(b"\0\0\0")]].concat();
        assert_eq!(error(Mode::Go, &short), "sent a metadata context shorter than its number");
        let done = reply(Opt::NBD_OPT_SET_META_CONTEXT, Rep::NBD_REP_ACK, b"");
        let unsup = reply(Opt::NBD_OPT_GO, Rep::NBD_REP_ERR_UNSUP, b"");
        assert_eq!(
            error(Mode::Go, &[&agreed[..], &[done, unsup]].concat()),
            "agreed to extended headers but does not know NBD_OPT_GO"
        );

        let ssh = b"SSH-2.0-OpenSSH_9.2p1 Debian".to_vec();
        assert_eq!(error(Mode::Go, &[ssh]), "is no NBD server: its first bytes are not NBDMAGIC");
        let neither = b"NBDMAGICIHAVENOT\0\x03".to_vec();
        assert_eq!(error(Mode::Go, &[neither]), "sent neither IHAVEOPT nor the oldstyle magic");
    }

    #[test]
    fn a_server_that_leaves_or_stays_silent_is_an_error() {
        let mut client = Client::new(Mode::Go, ALL, 1);
        assert_eq!(client.session.on_end().unwrap_err().what, "closed the connection without a greeting");
        client.feed(&greeting(3)).unwrap();
        assert_eq!(
            client.session.on_end().unwrap_err().what,
            "closed the connection instead of answering an option"
        );

        let config = Config { export: String::new(), mode: Mode::Go, features: ALL };
        let now = Instant::now();
        let mut session = InitiatorSession::new(config, Pool::new(0), now);
        let deadline = session.poll_timeout().unwrap();
        assert_eq!(deadline - now, Duration::from_secs(30));
        assert_eq!(session.on_timeout(deadline - Duration::from_millis(1)), Ok(()));
        assert!(session.on_timeout(deadline).is_err());
    }

    #[test]
    fn stopping_in_the_handshake_aborts_before_the_next_option() {
        let mut client = Client::new(Mode::Go, ALL, 1);
        client.feed(&greeting(3)).unwrap();
        client.sent();
        client.session.on_stop();
        let answer = reply(Opt::NBD_OPT_EXTENDED_HEADERS, Rep::NBD_REP_ACK, b"");
        step(&mut client, &answer, &option(Opt::NBD_OPT_ABORT, b""));
        assert!(client.is_closing() && client.session.is_over());

        let mut late = Client::new(Mode::Go, NONE, 1);
        late.feed(&greeting(3)).unwrap();
        late.sent();
        late.session.on_stop();
        late.feed(&reply(Opt::NBD_OPT_GO, Rep::NBD_REP_INFO, &info_export(512, 1))).unwrap();
        late.feed(&reply(Opt::NBD_OPT_GO, Rep::NBD_REP_ACK, b"")).unwrap();
        assert_eq!(requests(&late.sent())[0].0.cmd, 2, "in transmission the word is NBD_CMD_DISC");
        assert!(late.is_closing() && late.session.room() == 0);
    }

    #[test]
    fn a_demand_names_what_the_next_message_needs() {
        let config = Config { export: "x".into(), mode: Mode::Go, features: NONE };
        let mut session = InitiatorSession::new(config, Pool::new(0), Instant::now());
        let demands = |session: &InitiatorSession| match session.demand() {
            Demand::Bytes(least) => least,
            other => panic!("{other:?}"),
        };
        assert_eq!(demands(&session), 18);
        assert_eq!(session.on_bytes(&Chunk::from_slice(&greeting(3))), Ok(18));
        assert_eq!(demands(&session), 20);
        let info = reply(Opt::NBD_OPT_GO, Rep::NBD_REP_INFO, &info_export(512, 1));
        assert_eq!(session.on_bytes(&Chunk::from_slice(&info[..20])), Ok(0));
        assert_eq!(demands(&session), 32);
    }
}
