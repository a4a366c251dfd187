//! The handshake, "fixed newstyle" (proto.md, "Newstyle negotiation" and "Fixed newstyle
//! negotiation").
//!
//! ```text
//!   greeting sent ─▶ Flags ─▶ Head ◀──────────────┐
//!                             │ │                 │ answered
//!         known, short enough │ │ anything else   │
//!                             ▼ ▼                 │
//!                          Data Skip ─────────────┘
//!                             │ │
//!     NBD_OPT_EXPORT_NAME, GO ▼ ▼ NBD_OPT_ABORT
//!                 Next::Transmit Next::Close
//! ```
//! After an acknowledged `NBD_OPT_STARTTLS` the driver performs the TLS handshake (`StartTls`), and
//! negotiation starts again.
//!
//! The data of an option is never copied: up to 64 KiB are parsed in the receive buffer once they
//! are complete; longer data is discarded as it arrives.

use super::option::{BASE_ALLOCATION, InfoRequest, MalformedOption, MetaContextRequest, string};
use super::params::ServerParams;
use super::reply::BASE_ALLOCATION_ID;
use super::tls::{NbdTls, TlsMode};
use crate::driver::audit_event::bounded;
use crate::driver::outbox::Outbox;
use crate::driver::session::{BYTES_BEFORE_TLS, Demand, ProtocolError, SecuredBy};
use crate::exports::{Export, Exports, VolumeId};
use crate::nbd::HeaderFormat;
use crate::volume_state::{ServingState, VolumeState};
use blockmux_wire::nbd::NBD_MAX_STRING;
use blockmux_wire::nbd::handshake::*;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// State of the handshake with one client.
pub(super) struct ServerHandshake {
    exports: Exports,
    awaiting: AwaitedOption,
    /// `NBD_FLAG_C_*` of the client; 0 before it has sent them.
    client_flags: u32,
    headers: HeaderFormat,
    /// The export for which the client last selected `base:allocation`.
    base_allocation: Option<VolumeId>,
    options_left: u32,
    stopping: bool,
    /// Deadline of the handshake.
    pub(super) deadline: Instant,
    tls: NbdTls,
    /// The peer of an established TLS connection; `None` before.
    peer: Option<TlsClient>,
    /// Name of the export that was refused last, and the reason.
    pub(super) refusal: Option<(String, Cow<'static, str>)>,
}

/// The client of a TLS connection.
struct TlsClient {
    /// Its identity, for logs: a PSK identity or a certificate's subject; may be empty.
    name: String,
    /// Whether it may use exports.
    is_allowed: bool,
}

/// How a handshake ends.
pub(super) enum AfterHandshake {
    /// The transmission phase begins.
    Transmit(ServerParams),
    /// The client sent `NBD_OPT_ABORT`.
    Close,
}

/// What the next bytes of the client are.
enum AwaitedOption {
    Flags,
    Head,
    /// The data of an option, which is parsed once it is complete.
    Data {
        option: Opt,
        length: usize,
    },
    /// Data that is discarded; `answer` is sent after it.
    Skip {
        option: Opt,
        left: usize,
        answer: OptionResult,
    },
    /// The TLS handshake, once the reply to `NBD_OPT_STARTTLS` is sent.
    StartTls,
}

/// The last reply to an option: `NBD_REP_ACK`, or an error.
type OptionResult = Result<(), OptionError>;

/// An error reply to an option: `NBD_REP_ERR_*`, and the reason as text for people.
#[derive(Clone, Copy, Debug)]
struct OptionError(Rep, &'static str);

/// Result of one step over the input: the bytes consumed, and how the handshake ended, if it did.
struct HandshakeStep {
    taken: usize,
    next: Option<AfterHandshake>,
}

impl ServerHandshake {
    /// Queues the greeting. The client must finish within [`HANDSHAKE_TIME`] from `now`.
    pub(super) fn new(exports: Exports, now: Instant, outbox: &mut Outbox) -> ServerHandshake {
        let greeting = Greeting {
            magic: NBD_MAGIC.into(),
            opts_magic: NBD_OPTS_MAGIC.into(),
            handshake_flags: (NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES).into(),
        };
        outbox.push_head(greeting.as_bytes());
        ServerHandshake {
            awaiting: AwaitedOption::Flags,
            client_flags: 0,
            headers: HeaderFormat::Simple,
            base_allocation: None,
            options_left: options_for(&exports),
            exports,
            stopping: false,
            tls: NbdTls::default(),
            peer: None,
            refusal: None,
            deadline: now.checked_add(HANDSHAKE_TIME).unwrap_or(now),
        }
    }

    /// Offers TLS, or requires it.
    pub(super) fn set_tls(&mut self, tls: NbdTls) {
        self.tls = tls;
    }

    pub(super) fn demand(&self, outbox: &Outbox) -> Demand {
        match self.awaiting {
            AwaitedOption::Flags | AwaitedOption::Head | AwaitedOption::StartTls if self.stopping => {
                Demand::Close
            }
            AwaitedOption::StartTls if outbox.is_empty() => Demand::StartTls,
            AwaitedOption::StartTls => Demand::Nothing,
            AwaitedOption::Flags => Demand::Bytes(size_of::<ClientFlags>()),
            AwaitedOption::Head if outbox.len() > UNSENT_REPLIES => Demand::Nothing,
            AwaitedOption::Head => Demand::Bytes(size_of::<OptionHead>()),
            AwaitedOption::Data { length, .. } => Demand::Bytes(length),
            AwaitedOption::Skip { .. } => Demand::Bytes(1),
        }
    }

    /// Consumes complete messages; returns the number of bytes and how the handshake ended, if it
    /// did.
    pub(super) fn on_bytes(
        &mut self,
        input: &[u8],
        outbox: &mut Outbox,
    ) -> Result<(usize, Option<AfterHandshake>), ProtocolError> {
        let mut taken: usize = 0;
        loop {
            let rest = input.get(taken..).unwrap_or_default();
            let Some(step) = self.step(rest, outbox)? else { return Ok((taken, None)) };
            taken = taken.saturating_add(step.taken);
            if step.next.is_some() {
                return Ok((taken, step.next));
            }
        }
    }

    /// Name of the export that the client chose.
    pub(super) fn name_of(&self, params: &ServerParams) -> String {
        self.exports.get(params.volume).map(|export| export.name.clone()).unwrap_or_default()
    }

    /// Whether the client may close the connection now. The document asks for `NBD_OPT_ABORT`
    /// first, but many clients and all port scanners close without it, and nothing is lost.
    pub(super) fn is_between_messages(&self) -> bool {
        matches!(self.awaiting, AwaitedOption::Flags | AwaitedOption::Head)
    }

    /// Refuses further options. An option whose data is being received is still answered.
    pub(super) fn on_stop(&mut self) {
        self.stopping = true;
    }

    /// Consumes one message, or a part of discarded data. `None`: it needs more bytes, or room in
    /// the outbox.
    fn step(&mut self, input: &[u8], outbox: &mut Outbox) -> Result<Option<HandshakeStep>, ProtocolError> {
        match self.awaiting {
            AwaitedOption::Flags => {
                let Ok((flags, _)) = ClientFlags::ref_from_prefix(input) else { return Ok(None) };
                self.on_flags(flags.flags.get())?;
                Ok(Some(HandshakeStep { taken: size_of::<ClientFlags>(), next: None }))
            }
            // Checked at an option's head only: an option that has begun is always answered.
            AwaitedOption::Head if outbox.len() > UNSENT_REPLIES => Ok(None),
            AwaitedOption::Head => {
                let Ok((head, _)) = OptionHead::ref_from_prefix(input) else { return Ok(None) };
                self.awaiting = self.on_head(head)?;
                Ok(Some(HandshakeStep { taken: size_of::<OptionHead>(), next: None }))
            }
            AwaitedOption::Data { option, length } => {
                let Some(data) = input.get(..length) else { return Ok(None) };
                self.awaiting = AwaitedOption::Head;
                Ok(Some(HandshakeStep { taken: length, next: self.on_option(option, data, outbox)? }))
            }
            AwaitedOption::Skip { option, ref mut left, answer } => {
                let taken = input.len().min(*left);
                *left = left.saturating_sub(taken);
                if *left > 0 {
                    return Ok((taken > 0).then_some(HandshakeStep { taken, next: None }));
                }
                self.awaiting = AwaitedOption::Head;
                conclude(outbox, option, answer);
                if option == Opt::NBD_OPT_STARTTLS && answer.is_ok() {
                    self.start_tls();
                }
                let next = (option == Opt::NBD_OPT_ABORT).then_some(AfterHandshake::Close);
                Ok(Some(HandshakeStep { taken, next }))
            }
            AwaitedOption::StartTls if input.is_empty() => Ok(None),
            AwaitedOption::StartTls => Err(BYTES_BEFORE_TLS),
        }
    }

    /// Resets the options that were negotiated without TLS, because an attacker may have sent them.
    fn start_tls(&mut self) {
        self.awaiting = AwaitedOption::StartTls;
        (self.headers, self.base_allocation) = (HeaderFormat::Simple, None);
    }

    /// TLS is established. Returns the reason if the client is refused.
    pub(super) fn on_secured(&mut self, by: SecuredBy<'_>) -> Option<&'static str> {
        let name = match by {
            SecuredBy::Psk(identity) => bounded(&String::from_utf8_lossy(identity)),
            SecuredBy::Certificate(subject) => bounded(subject),
            SecuredBy::Nothing => String::new(),
        };
        let is_allowed = self.tls.allows(by);
        self.awaiting = AwaitedOption::Head;
        self.peer = Some(TlsClient { name, is_allowed });
        (!is_allowed).then_some(NOT_ALLOWED)
    }

    /// The client's identity, if TLS has authenticated it.
    pub(super) fn client(&self) -> &str {
        self.peer.as_ref().map_or("", |peer| &peer.name)
    }

    /// The error for all options but `NBD_OPT_STARTTLS` and `NBD_OPT_ABORT`, if the client may use
    /// no others.
    fn barred(&self) -> Option<OptionError> {
        match &self.peer {
            None if self.tls.mode == TlsMode::Required => Some(TLS_REQUIRED),
            Some(TlsClient { is_allowed: false, .. }) => {
                Some(OptionError(Rep::NBD_REP_ERR_POLICY, NOT_ALLOWED))
            }
            _ => None,
        }
    }

    /// Whether the connection may be upgraded to TLS.
    fn on_start_tls(&self) -> OptionResult {
        match self.tls.mode {
            _ if self.peer.is_some() => {
                Err(OptionError(Rep::NBD_REP_ERR_INVALID, "this connection has TLS already"))
            }
            TlsMode::Off => Err(OptionError(Rep::NBD_REP_ERR_UNSUP, "this server has no TLS")),
            TlsMode::Optional | TlsMode::Required => Ok(()),
        }
    }

    fn on_flags(&mut self, flags: u32) -> Result<(), ProtocolError> {
        if flags & !(NBD_FLAG_C_FIXED_NEWSTYLE | NBD_FLAG_C_NO_ZEROES) != 0 {
            return Err(ProtocolError {
                what: "set a client flag that was not offered",
                reference: "proto.md, \"Client flags\"",
            });
        }
        self.client_flags = flags;
        self.awaiting = AwaitedOption::Head;
        Ok(())
    }

    /// Decides from an option's head whether its data is parsed or discarded.
    fn on_head(&mut self, head: &OptionHead) -> Result<AwaitedOption, ProtocolError> {
        let (option, length) = (Opt(head.option.get()), head.length.get() as usize);
        if head.magic.get() != NBD_OPTS_MAGIC {
            return newstyle_error("sent an option with a wrong magic number");
        }
        self.options_left = match self.options_left.checked_sub(1) {
            Some(left) => left,
            None => return newstyle_error("sent more than 1,000 options plus 4 for each export"),
        };
        // NBD_FLAG_C_FIXED_NEWSTYLE is not required ("Client flags" leaves that to the server):
        // some clients set no flag and send NBD_OPT_GO, and a client without options sends none.
        if option == Opt::NBD_OPT_SET_META_CONTEXT {
            // A new selection replaces the previous one even if it fails.
            self.base_allocation = None;
        }
        let skip = |answer| Ok(AwaitedOption::Skip { option, left: length, answer });
        let fail = |rep, why| skip(Err(OptionError(rep, why)));
        match option {
            Opt::NBD_OPT_ABORT => return skip(Ok(())),
            Opt::NBD_OPT_STARTTLS if length == 0 && !self.stopping => return skip(self.on_start_tls()),
            _ => {}
        }
        if let Some(OptionError(rep, why)) = self.barred() {
            return match option {
                Opt::NBD_OPT_EXPORT_NAME => newstyle_error(match rep {
                    Rep::NBD_REP_ERR_TLS_REQD => "asked for an export without TLS, which is required here",
                    _ => "asked for an export that its certificate does not allow",
                }),
                _ => fail(rep, why),
            };
        }
        match option {
            Opt::NBD_OPT_EXPORT_NAME if length > NBD_MAX_STRING => {
                newstyle_error("asked for an export with a name longer than 4096 bytes")
            }
            Opt::NBD_OPT_EXPORT_NAME => Ok(AwaitedOption::Data { option, length }),
            _ if self.stopping => skip(STOPPING),
            Opt::NBD_OPT_LIST
            | Opt::NBD_OPT_STARTTLS
            | Opt::NBD_OPT_STRUCTURED_REPLY
            | Opt::NBD_OPT_EXTENDED_HEADERS
                if length > 0 =>
            {
                fail(Rep::NBD_REP_ERR_INVALID, "this option has no data")
            }
            Opt::NBD_OPT_LIST
            | Opt::NBD_OPT_INFO
            | Opt::NBD_OPT_GO
            | Opt::NBD_OPT_STRUCTURED_REPLY
            | Opt::NBD_OPT_EXTENDED_HEADERS
            | Opt::NBD_OPT_LIST_META_CONTEXT
            | Opt::NBD_OPT_SET_META_CONTEXT => match length {
                0..=MAX_OPTION_DATA => Ok(AwaitedOption::Data { option, length }),
                _ => fail(Rep::NBD_REP_ERR_TOO_BIG, "more than 64 KiB of option data"),
            },
            _ => fail(Rep::NBD_REP_ERR_UNSUP, "unknown option"),
        }
    }

    /// Handles an option whose data is complete.
    fn on_option(
        &mut self,
        option: Opt,
        data: &[u8],
        outbox: &mut Outbox,
    ) -> Result<Option<AfterHandshake>, ProtocolError> {
        if option == Opt::NBD_OPT_EXPORT_NAME {
            let chosen = self.on_export_name(data, outbox);
            if let Err(error) = &chosen {
                let name = bounded(&String::from_utf8_lossy(data));
                let reason = self.reason(&name, format!("peer {}", error.what).into());
                self.refusal = Some((name, reason));
            }
            return chosen.map(Some);
        }
        if self.stopping {
            conclude(outbox, option, STOPPING);
            return Ok(None);
        }
        let mut next = None;
        let answer = match option {
            Opt::NBD_OPT_LIST => self.on_list(outbox),
            Opt::NBD_OPT_INFO => self.on_info(option, data, outbox).map(drop),
            Opt::NBD_OPT_GO => {
                self.on_info(option, data, outbox).map(|params| next = Some(AfterHandshake::Transmit(params)))
            }
            Opt::NBD_OPT_STRUCTURED_REPLY => self.on_structured_reply(),
            Opt::NBD_OPT_EXTENDED_HEADERS => {
                self.headers = HeaderFormat::Extended;
                Ok(())
            }
            _ => self.on_meta_context(option, data, outbox),
        };
        if let (Opt::NBD_OPT_INFO | Opt::NBD_OPT_GO, Err(OptionError(_, why))) = (option, answer) {
            let name = InfoRequest::parse(data).map_or("", |request| request.name);
            self.refusal = Some((bounded(name), self.reason(name, why.into())));
        }
        conclude(outbox, option, answer);
        Ok(next)
    }

    /// The reason of a refusal for the log, which also says why an export is hidden.
    fn reason(&self, name: &str, why: Cow<'static, str>) -> Cow<'static, str> {
        match self.exports.why_hidden(name) {
            Some(hidden) => format!("{why} here: {hidden}").into(),
            None => why,
        }
    }

    /// Handles `NBD_OPT_EXPORT_NAME`. It has no error reply: every failure ends the session.
    fn on_export_name(&self, name: &[u8], outbox: &mut Outbox) -> Result<AfterHandshake, ProtocolError> {
        let refuse = |what| Err(ProtocolError { what, reference: "proto.md, NBD_OPT_EXPORT_NAME" });
        if self.headers == HeaderFormat::Extended {
            return refuse("used NBD_OPT_EXPORT_NAME after it had agreed on extended headers");
        }
        if self.stopping {
            return refuse("chose an export while the server is stopping");
        }
        let Ok(name) = string(name) else { return refuse("chose an export by a malformed name") };
        let (id, export) = match self.find(name) {
            Ok(found) => found,
            Err(OptionError(Rep::NBD_REP_ERR_POLICY, _)) => {
                return refuse("chose an export whose `allow` list does not have its address");
            }
            Err(OptionError(Rep::NBD_REP_ERR_SHUTDOWN, _)) => {
                return refuse("chose an export that another server serves now");
            }
            Err(_) => return refuse("chose an export that does not exist"),
        };
        let params = self.params(id, &export, false);
        let reply = ExportNameReply {
            size: params.info.size.into(),
            transmission_flags: params.transmission_flags().bits().into(),
        };
        outbox.push_head(reply.as_bytes());
        if self.client_flags & NBD_FLAG_C_NO_ZEROES == 0 {
            outbox.push_head(&[0; NBD_EXPORT_NAME_ZEROES]);
        }
        Ok(AfterHandshake::Transmit(params))
    }

    fn on_list(&self, outbox: &mut Outbox) -> OptionResult {
        for (_, export) in self.exports.iter() {
            let (name, description) = (export.name.as_bytes(), export.description.as_bytes());
            let name_len = (name.len() as u32).to_be_bytes();
            reply(outbox, Opt::NBD_OPT_LIST, Rep::NBD_REP_SERVER, &[&name_len, name, description]);
        }
        Ok(())
    }

    /// Handles `NBD_OPT_INFO` and `NBD_OPT_GO`. Block sizes are always sent, because a client that
    /// did not request them may still prefer whole blocks.
    fn on_info(&self, option: Opt, data: &[u8], outbox: &mut Outbox) -> Result<ServerParams, OptionError> {
        let request = InfoRequest::parse(data)?;
        let (id, export) = self.find(request.name)?;
        let params = self.params(id, &export, request.asks_for(Info::NBD_INFO_BLOCK_SIZE));
        let mut info = |parts: &[&[u8]]| reply(outbox, option, Rep::NBD_REP_INFO, parts);
        info(&[params.info_export().as_bytes()]);
        if request.asks_for(Info::NBD_INFO_NAME) {
            info(&[&Info::NBD_INFO_NAME.0.to_be_bytes(), export.name.as_bytes()]);
        }
        if request.asks_for(Info::NBD_INFO_DESCRIPTION) && !export.description.is_empty() {
            info(&[&Info::NBD_INFO_DESCRIPTION.0.to_be_bytes(), export.description.as_bytes()]);
        }
        info(&[params.info_block_size().as_bytes()]);
        Ok(params)
    }

    fn on_structured_reply(&mut self) -> OptionResult {
        if self.headers == HeaderFormat::Extended {
            return Err(OptionError(Rep::NBD_REP_ERR_EXT_HEADER_REQD, "extended headers are agreed already"));
        }
        self.headers = HeaderFormat::Structured;
        Ok(())
    }

    /// Handles `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
    fn on_meta_context(&mut self, option: Opt, data: &[u8], outbox: &mut Outbox) -> OptionResult {
        if self.headers == HeaderFormat::Simple {
            return Err(OptionError(Rep::NBD_REP_ERR_INVALID, "structured replies must be agreed on first"));
        }
        let request = MetaContextRequest::parse(data)?;
        let (export, _) = self.find(request.name)?;
        let (matches, id) = if option == Opt::NBD_OPT_SET_META_CONTEXT {
            (request.names_base_allocation, BASE_ALLOCATION_ID)
        } else {
            // The ids of a list are reserved: 0.
            (request.is_open || request.names_base || request.names_base_allocation, 0)
        };
        if matches {
            let parts = [&id.to_be_bytes(), BASE_ALLOCATION.as_bytes()];
            reply(outbox, option, Rep::NBD_REP_META_CONTEXT, &parts);
            if option == Opt::NBD_OPT_SET_META_CONTEXT {
                self.base_allocation = Some(export);
            }
        }
        Ok(())
    }

    /// Finds an export by name; the empty name means the default export.
    fn find(&self, name: &str) -> Result<(VolumeId, Arc<Export>), OptionError> {
        let found = if name.is_empty() { self.exports.default_export() } else { self.exports.find(name) };
        let state = found.as_ref().and_then(|(id, _)| self.exports.volume_state(*id));
        if state.is_some_and(|state| state.serving() != ServingState::Active) {
            // The client knows no path states, so it would use the session later, and what it has
            // sent by then may be out of date.
            return Err(OptionError(Rep::NBD_REP_ERR_SHUTDOWN, "another server serves the export now"));
        }
        found.ok_or_else(|| match self.exports.is_refused(name) {
            true => OptionError(
                Rep::NBD_REP_ERR_POLICY,
                "the export's `allow` list does not have the client's address",
            ),
            false => OptionError(Rep::NBD_REP_ERR_UNKNOWN, "no such export"),
        })
    }

    /// The volume state, shared by all protocols, of the export that the client chose.
    pub(super) fn volume_state(&self, params: &ServerParams) -> Option<Arc<VolumeState>> {
        self.exports.volume_state(params.volume)
    }

    fn params(&self, id: VolumeId, export: &Export, respects_sizes: bool) -> ServerParams {
        ServerParams::new(id, export, self.headers, self.base_allocation == Some(id), respects_sizes)
    }
}

impl From<MalformedOption> for OptionError {
    fn from(malformed: MalformedOption) -> OptionError {
        OptionError(Rep::NBD_REP_ERR_INVALID, malformed.0)
    }
}

/// Queues the last reply to an option.
fn conclude(outbox: &mut Outbox, option: Opt, answer: OptionResult) {
    match answer {
        Ok(()) => reply(outbox, option, Rep::NBD_REP_ACK, &[]),
        Err(OptionError(rep, why)) => reply(outbox, option, rep, &[why.as_bytes()]),
    }
}

/// Queues one reply to an option; its data is the concatenation of `parts`.
fn reply(outbox: &mut Outbox, option: Opt, rep: Rep, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let head = OptionReplyHead {
        magic: NBD_REP_MAGIC.into(),
        option: option.0.into(),
        reply_type: rep.0.into(),
        length: (length as u32).into(),
    };
    outbox.push_head(head.as_bytes());
    parts.iter().for_each(|part| outbox.push_head(part));
}

/// The maximum number of options that one handshake may have with these exports.
fn options_for(exports: &Exports) -> u32 {
    let about_each = (exports.iter().count() as u32).saturating_mul(OPTIONS_PER_EXPORT);
    MAX_OPTIONS.saturating_add(about_each)
}

fn newstyle_error(what: &'static str) -> Result<AwaitedOption, ProtocolError> {
    Err(ProtocolError { what, reference: "proto.md, \"Newstyle negotiation\"" })
}

const TLS_REQUIRED: OptionError =
    OptionError(Rep::NBD_REP_ERR_TLS_REQD, "this server requires TLS; connect by nbds:// instead of nbd://");
const NOT_ALLOWED: &str = "the subject of the client's certificate is not among those that are allowed";
const STOPPING: OptionResult = Err(OptionError(Rep::NBD_REP_ERR_SHUTDOWN, "the server is stopping"));

/// Timeout of the handshake.
pub(super) const HANDSHAKE_TIME: Duration = Duration::from_secs(30);

/// The maximum number of options of one handshake, plus [`OPTIONS_PER_EXPORT`] for each export.
const MAX_OPTIONS: u32 = 1000;

/// Options allowed for each export: a client that lists all exports also requests the information
/// and the metadata contexts of each on the same connection.
const OPTIONS_PER_EXPORT: u32 = 4;

/// The maximum length of option data that is parsed, in bytes: 15 names of full length. At most
/// `MAX_DEMAND`.
const MAX_OPTION_DATA: usize = 64 << 10;

/// While more than this many bytes of replies are unsent, no further option is read.
const UNSENT_REPLIES: usize = 64 << 10;
