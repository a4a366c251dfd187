//! Discovery sessions: SendTargets (RFC 7143 §4.3, appendix C).
//!
//! ```text
//!   Login ──▶ SendTargets=All ──text responses──▶ logout ──▶ Over
//! ```
//!
//! Over RDMA the session disconnects instead of a logout: a Logout Request in a discovery session
//! crashes the kernel of an SCST target (3.11, `isert_pdu_rx`). A closed connection ends the
//! session as well, since nothing of it is kept.

use super::immediate::{RequestNumbers, TEXT_TAG};
use super::login::LoginExchange;
use super::receive::error;
use super::{IscsiRefused, LOGIN_TIMED_OUT, LOGIN_TIMEOUT};
use crate::driver::outbox::Outbox;
use crate::driver::session::{Demand, ProtocolError, StreamSession, Timed};
use crate::iscsi::digests::IscsiDigests;
use crate::iscsi::login::chap::SEED_LEN;
use crate::iscsi::login::initiator::{
    InitiatorLogin, InitiatorLoginProgress, InitiatorLoginResult, LoginIdentity,
};
use crate::iscsi::login::operational::{OperationalKey, OperationalParameters};
use crate::iscsi::name::Name;
use crate::iscsi::node::Chap;
use crate::iscsi::pdu::{self, IscsiHeader, ParsedIscsiPdu};
use crate::iscsi::sender::Sender;
use crate::iscsi::text::{self, TextBuilder};
use blockmux_volume::Chunk;
use blockmux_wire::iscsi::session::{NopIn, TextResponse};
use blockmux_wire::iscsi::{BHS_LEN, FLAG_CONTINUE, FLAG_FINAL, IscsiOpcode, RESERVED_TAG};
use std::time::Instant;
use zerocopy::transmute_ref;

/// A target found by discovery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundTarget {
    /// Name of the target, as the server sent it, at most 300 characters of it.
    pub name: String,
    /// Addresses in the form `HOST:PORT,GROUP`; if empty, the address of the discovery portal
    /// applies.
    pub addresses: Vec<String>,
}

/// Lists all targets of a portal, then logs out; over iSER it disconnects.
pub struct IscsiDiscoverySession {
    phase: DiscoveryPhase,
    pub(super) sender: Sender,
    deadline: Instant,
    refused: Option<IscsiRefused>,
    targets: Vec<FoundTarget>,
    left_out: u64,
    /// Over RDMA: number of receive buffers to post again.
    pub(super) receives: u32,
    /// Over RDMA: the queue pair is connected and no disconnect was requested.
    pub(super) is_connected: bool,
}

enum DiscoveryPhase {
    Login(Box<LoginExchange>),
    SendTargets(SendTargetsExchange),
    Over,
}

/// State of the SendTargets exchange.
struct SendTargetsExchange {
    cmd_sn: u32,
    exp_stat_sn: u32,
    text: Vec<u8>,
    need: usize,
    is_logging_out: bool,
}

impl IscsiDiscoverySession {
    /// A discovery session of `initiator` on a new connection. `seed` must be random and unique to
    /// this session.
    #[must_use]
    pub fn new(
        initiator: Name,
        chap: Option<Chap>,
        isid: [u8; 6],
        seed: [u8; SEED_LEN],
        now: Instant,
    ) -> IscsiDiscoverySession {
        IscsiDiscoverySession::build(initiator, chap, isid, seed, now, false)
    }

    pub(super) fn build(
        initiator: Name,
        chap: Option<Chap>,
        isid: [u8; 6],
        seed: [u8; SEED_LEN],
        now: Instant,
        is_over_rdma: bool,
    ) -> IscsiDiscoverySession {
        let identity = LoginIdentity { initiator, target: None, isid };
        // Nothing of a discovery session is kept or taken up again. SCST answers a DefaultTime2Wait
        // of 0 to every proposal, which is a valid answer only to 0.
        let proposal = OperationalParameters::standard()
            .with(OperationalKey::MaxRecvDataSegmentLength, MAX_SEGMENT as u32)
            .with(OperationalKey::DefaultTime2Wait, 0)
            .with(OperationalKey::DefaultTime2Retain, 0);
        let mut login = InitiatorLogin::new(identity, chap, proposal, seed);
        if is_over_rdma {
            login = login.over_rdma();
        }
        let mut sender = Sender::new(is_over_rdma);
        let login = LoginExchange::start(login, &mut sender);
        IscsiDiscoverySession {
            phase: DiscoveryPhase::Login(Box::new(login)),
            sender,
            deadline: now.checked_add(LOGIN_TIMEOUT).unwrap_or(now),
            refused: None,
            targets: Vec::new(),
            left_out: 0,
            receives: 0,
            is_connected: is_over_rdma,
        }
    }

    /// The targets found, at most 10,000.
    #[must_use]
    pub fn targets(&self) -> &[FoundTarget] {
        &self.targets
    }

    /// Number of targets beyond those in [`IscsiDiscoverySession::targets`].
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Why the target refused the discovery, if it did.
    #[must_use]
    pub fn refused(&self) -> Option<&IscsiRefused> {
        self.refused.as_ref()
    }

    /// Whether all targets were received, or the login was refused.
    #[must_use]
    pub fn is_over(&self) -> bool {
        match &self.phase {
            DiscoveryPhase::Login(_) => false,
            DiscoveryPhase::SendTargets(exchange) => exchange.is_logging_out,
            DiscoveryPhase::Over => true,
        }
    }

    fn on_login_bytes(&mut self, bytes: &[u8]) -> Result<usize, ProtocolError> {
        let DiscoveryPhase::Login(login) = &mut self.phase else { return Ok(0) };
        let (taken, progress) = login.on_bytes(bytes, &mut self.sender)?;
        match progress {
            InitiatorLoginProgress::Continues => {}
            InitiatorLoginProgress::Refused(refused) => {
                self.refused = Some(refused);
                self.phase = DiscoveryPhase::Over;
            }
            InitiatorLoginProgress::Established(established) => {
                self.phase =
                    DiscoveryPhase::SendTargets(SendTargetsExchange::begin(&established, &mut self.sender));
            }
        }
        Ok(taken)
    }

    /// Processes one PDU after the login; returns its length, or `None` if it is incomplete.
    fn on_pdu(&mut self, rest: &[u8]) -> Result<Option<usize>, ProtocolError> {
        let DiscoveryPhase::SendTargets(exchange) = &mut self.phase else { return Ok(None) };
        let head = match pdu::parse(rest, IscsiDigests::default())? {
            ParsedIscsiPdu::Incomplete(need) => {
                exchange.need = need;
                return Ok(None);
            }
            ParsedIscsiPdu::Head(head) => head,
        };
        if head.data_len > MAX_SEGMENT {
            return Err(error("sent a data segment above MaxRecvDataSegmentLength", "RFC 7143 §13.12"));
        }
        let (data, whole) = match head.segment(rest, IscsiDigests::default()) {
            Ok(found) => found,
            Err(whole) => {
                exchange.need = whole;
                return Ok(None);
            }
        };
        exchange.need = BHS_LEN;
        match head.bhs.opcode() {
            IscsiOpcode::TEXT_RESPONSE => {
                if let Some(text) = exchange.on_text(&head, data, &mut self.sender)? {
                    (self.targets, self.left_out) = targets_of(&text)?;
                    if self.sender.is_over_rdma() {
                        self.phase = DiscoveryPhase::Over;
                    } else {
                        exchange.log_out(&mut self.sender);
                    }
                }
            }
            IscsiOpcode::NOP_IN => exchange.on_nop(transmute_ref!(&head.bhs), &mut self.sender),
            IscsiOpcode::LOGOUT_RESPONSE if exchange.is_logging_out => self.phase = DiscoveryPhase::Over,
            IscsiOpcode::ASYNC_MESSAGE => {}
            IscsiOpcode::REJECT => return Err(error("rejected SendTargets=All", "RFC 7143 §11.17")),
            _ => return Err(error("sent a PDU that is invalid in a discovery session", "RFC 7143 §4.3")),
        }
        Ok(Some(whole))
    }
}

impl SendTargetsExchange {
    fn begin(established: &InitiatorLoginResult, sender: &mut Sender) -> SendTargetsExchange {
        let exchange = SendTargetsExchange {
            cmd_sn: established.cmd_sn,
            exp_stat_sn: established.exp_stat_sn,
            text: Vec::new(),
            need: BHS_LEN,
            is_logging_out: false,
        };
        let mut text = TextBuilder::default();
        text.push("SendTargets", "All");
        exchange.send_text(RESERVED_TAG, [0; 8], &text, sender);
        exchange
    }

    fn send_text(&self, target_transfer_tag: u32, lun: [u8; 8], text: &TextBuilder, sender: &mut Sender) {
        let request = self.numbers().text(target_transfer_tag, lun, text.as_bytes().len() as u32);
        sender.push(transmute_ref!(&request), text.as_bytes());
    }

    /// Processes a Text Response; returns the whole text after the last one.
    fn on_text(
        &mut self,
        head: &IscsiHeader,
        data: &[u8],
        sender: &mut Sender,
    ) -> Result<Option<Vec<u8>>, ProtocolError> {
        let response: &TextResponse = transmute_ref!(&head.bhs);
        if self.is_logging_out || response.initiator_task_tag.get() != TEXT_TAG {
            return Err(error("answered a text request that was not sent", "RFC 7143 §11.11"));
        }
        self.exp_stat_sn = response.stat_sn.get().wrapping_add(1);
        if self.text.len().saturating_add(data.len()) > MAX_TEXT {
            return Err(error("listed its targets in more than 4 MiB", "RFC 7143 §11.11"));
        }
        self.text.extend_from_slice(data);
        let tag = response.target_transfer_tag.get();
        if response.flags & FLAG_CONTINUE != 0 || response.flags & FLAG_FINAL == 0 {
            if tag == RESERVED_TAG || data.is_empty() {
                return Err(error("ended its SendTargets response prematurely", "RFC 7143 §11.11.3"));
            }
            self.send_text(tag, response.lun, &TextBuilder::default(), sender);
            return Ok(None);
        }
        Ok(Some(std::mem::take(&mut self.text)))
    }

    fn log_out(&mut self, sender: &mut Sender) {
        self.is_logging_out = true;
        let logout = self.numbers().logout();
        sender.push(transmute_ref!(&logout), &[]);
    }

    fn numbers(&self) -> RequestNumbers {
        RequestNumbers { cmd_sn: self.cmd_sn, exp_stat_sn: self.exp_stat_sn }
    }

    fn on_nop(&self, ping: &NopIn, sender: &mut Sender) {
        if ping.target_transfer_tag.get() == RESERVED_TAG || self.is_logging_out {
            return;
        }
        let nop = self.numbers().nop_out(RESERVED_TAG, ping.target_transfer_tag.get(), ping.lun);
        sender.push(transmute_ref!(&nop), &[]);
    }
}

impl Timed for IscsiDiscoverySession {
    fn poll_timeout(&self) -> Option<Instant> {
        (!matches!(self.phase, DiscoveryPhase::Over)).then_some(self.deadline)
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if matches!(self.phase, DiscoveryPhase::Over) || now < self.deadline {
            Ok(())
        } else {
            Err(LOGIN_TIMED_OUT)
        }
    }
}

impl StreamSession for IscsiDiscoverySession {
    fn demand(&self) -> Demand {
        match &self.phase {
            DiscoveryPhase::Login(login) => Demand::Bytes(login.need),
            // Nothing is received while replies to pings are unsent.
            DiscoveryPhase::SendTargets(_) if self.sender.len() > MAX_UNSENT => Demand::Nothing,
            DiscoveryPhase::SendTargets(exchange) => Demand::Bytes(exchange.need),
            DiscoveryPhase::Over => Demand::Close,
        }
    }

    fn on_bytes(&mut self, input: &Chunk, _now: Instant) -> Result<usize, ProtocolError> {
        let bytes = input.unread();
        let mut at = self.on_login_bytes(bytes)?;
        while self.sender.len() <= MAX_UNSENT
            && let Some(taken) = self.on_pdu(bytes.get(at..).unwrap_or_default())?
        {
            at = at.saturating_add(taken);
        }
        // Bytes after the end of the connection are dropped.
        Ok(if matches!(self.phase, DiscoveryPhase::Over) { bytes.len() } else { at })
    }

    fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        Ok(())
    }

    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        if self.is_over() {
            self.phase = DiscoveryPhase::Over;
            return Ok(());
        }
        Err(error("closed the connection before it listed its targets", "RFC 7143 §4.3"))
    }

    fn outbox(&mut self) -> &mut Outbox {
        self.sender.outbox()
    }
}

/// Parses the SendTargets text: the targets, and the number of targets above the limit.
fn targets_of(text: &[u8]) -> Result<(Vec<FoundTarget>, u64), ProtocolError> {
    let (mut targets, mut left_out): (Vec<FoundTarget>, u64) = (Vec::new(), 0);
    for pair in text::pairs(text) {
        let pair = pair.map_err(|_| error("sent a malformed list of targets", "RFC 7143 appendix C"))?;
        let value = || pair.value.chars().take(MAX_VALUE);
        match pair.key {
            "TargetName" if targets.len() < MAX_TARGETS => {
                targets.push(FoundTarget { name: value().collect(), addresses: Vec::new() });
            }
            "TargetName" => left_out = left_out.saturating_add(1),
            "TargetAddress" if left_out == 0 => {
                if let Some(target) = targets.last_mut() {
                    target.addresses.push(value().filter(|c| !c.is_control()).collect());
                }
            }
            _ => {}
        }
    }
    Ok((targets, left_out))
}

/// Maximum length of a received data segment, in bytes.
const MAX_SEGMENT: usize = 64 << 10;
/// Maximum length of all text responses together, in bytes.
const MAX_TEXT: usize = 4 << 20;
const MAX_TARGETS: usize = 10_000;
/// Maximum length of a name or an address, in characters.
const MAX_VALUE: usize = 300;
/// Limit of unsent bytes.
const MAX_UNSENT: usize = 16 << 10;
