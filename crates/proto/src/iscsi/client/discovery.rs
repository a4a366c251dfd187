//! A discovery session: which targets there are (RFC 7143 §4.3, appendix C).
//!
//! ```text
//!   Login ──▶ SendTargets=All ──answers, as many as it takes──▶ logout ──▶ Over
//! ```

use super::immediate::{Numbers, TEXT_TAG};
use super::login::LoginPhase;
use super::receive::error;
use super::{IscsiRefused, LATE, LOGIN_TIMEOUT};
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
use crate::iscsi::text::{self, Text};
use crate::outbox::Outbox;
use crate::session::{Demand, ProtocolError, StreamSession, Timed};
use blockmux_volume::Chunk;
use blockmux_wire::iscsi::session::{NopIn, TextResponse};
use blockmux_wire::iscsi::{BHS_LEN, FLAG_CONTINUE, FLAG_FINAL, IscsiOpcode, RESERVED_TAG};
use std::time::Instant;
use zerocopy::transmute_ref;

/// A target that discovery has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundTarget {
    /// Its name.
    pub name: String,
    /// Where it is reached: `HOST:PORT,GROUP` each; none: where it was asked for.
    pub addresses: Vec<String>,
}

/// Asks a portal for all its targets, and leaves.
pub struct IscsiDiscoverySession {
    phase: DiscoveryPhase,
    pub(super) sender: Sender,
    deadline: Instant,
    refused: Option<IscsiRefused>,
    targets: Vec<FoundTarget>,
    left_out: u64,
    /// Over RDMA: receive buffers to give back.
    pub(super) receives: u32,
    /// Over RDMA: there is a queue pair whose end was not asked for.
    pub(super) is_connected: bool,
}

enum DiscoveryPhase {
    Login(Box<LoginPhase>),
    Asking(Asking),
    Over,
}

/// The question and its answers so far.
struct Asking {
    cmd_sn: u32,
    exp_stat_sn: u32,
    text: Vec<u8>,
    need: usize,
    is_leaving: bool,
}

impl IscsiDiscoverySession {
    /// A discovery session of `initiator` on a fresh connection. `seed` is random and used for this
    /// session alone.
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
        let wishes = OperationalParameters::standard()
            .with(OperationalKey::MaxRecvDataSegmentLength, MAX_SEGMENT as u32)
            .with(OperationalKey::DefaultTime2Retain, 0);
        let mut login = InitiatorLogin::new(identity, chap, wishes, seed);
        if is_over_rdma {
            login = login.over_rdma();
        }
        let mut sender = Sender::new(is_over_rdma);
        let login = LoginPhase::start(login, &mut sender);
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

    /// What was found, at most 10,000 targets.
    #[must_use]
    pub fn targets(&self) -> &[FoundTarget] {
        &self.targets
    }

    /// How many more targets were named than [`IscsiDiscoverySession::targets`] holds.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Why the target does not tell, if it does not.
    #[must_use]
    pub fn refused(&self) -> Option<&IscsiRefused> {
        self.refused.as_ref()
    }

    /// Whether everything was told, or refused.
    #[must_use]
    pub fn is_over(&self) -> bool {
        match &self.phase {
            DiscoveryPhase::Login(_) => false,
            DiscoveryPhase::Asking(asking) => asking.is_leaving,
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
                self.phase = DiscoveryPhase::Asking(Asking::begin(&established, &mut self.sender));
            }
        }
        Ok(taken)
    }

    /// One PDU behind the login; how many bytes it had, or `None` if more are needed.
    fn on_pdu(&mut self, rest: &[u8]) -> Result<Option<usize>, ProtocolError> {
        let DiscoveryPhase::Asking(asking) = &mut self.phase else { return Ok(None) };
        let head = match pdu::parse(rest, IscsiDigests::default())? {
            ParsedIscsiPdu::Needs(need) => {
                asking.need = need;
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
                asking.need = whole;
                return Ok(None);
            }
        };
        asking.need = BHS_LEN;
        match head.bhs.opcode() {
            IscsiOpcode::TEXT_RESPONSE => {
                if let Some(text) = asking.on_text(&head, data, &mut self.sender)? {
                    (self.targets, self.left_out) = targets_of(&text)?;
                }
            }
            IscsiOpcode::NOP_IN => asking.on_nop(transmute_ref!(&head.bhs), &mut self.sender),
            IscsiOpcode::LOGOUT_RESPONSE if asking.is_leaving => self.phase = DiscoveryPhase::Over,
            IscsiOpcode::ASYNC_MESSAGE => {}
            IscsiOpcode::REJECT => return Err(error("rejected SendTargets=All", "RFC 7143 §11.17")),
            _ => return Err(error("sent a PDU that does not belong into discovery", "RFC 7143 §4.3")),
        }
        Ok(Some(whole))
    }
}

impl Asking {
    fn begin(established: &InitiatorLoginResult, sender: &mut Sender) -> Asking {
        let asking = Asking {
            cmd_sn: established.cmd_sn,
            exp_stat_sn: established.exp_stat_sn,
            text: Vec::new(),
            need: BHS_LEN,
            is_leaving: false,
        };
        let mut text = Text::default();
        text.push("SendTargets", "All");
        asking.ask(RESERVED_TAG, [0; 8], &text, sender);
        asking
    }

    fn ask(&self, target_transfer_tag: u32, lun: [u8; 8], text: &Text, sender: &mut Sender) {
        let request = self.numbers().text(target_transfer_tag, lun, text.as_bytes().len() as u32);
        sender.push(transmute_ref!(&request), text.as_bytes());
    }

    /// A part of the answer; all of it, if this was the last.
    fn on_text(
        &mut self,
        head: &IscsiHeader,
        data: &[u8],
        sender: &mut Sender,
    ) -> Result<Option<Vec<u8>>, ProtocolError> {
        let response: &TextResponse = transmute_ref!(&head.bhs);
        if self.is_leaving || response.initiator_task_tag.get() != TEXT_TAG {
            return Err(error("answered a text request that was not sent", "RFC 7143 §11.11"));
        }
        self.exp_stat_sn = response.stat_sn.get().wrapping_add(1);
        if self.text.len().saturating_add(data.len()) > MAX_TEXT {
            return Err(error("named its targets in more than 4 MiB", "RFC 7143 §11.11"));
        }
        self.text.extend_from_slice(data);
        let tag = response.target_transfer_tag.get();
        if response.flags & FLAG_CONTINUE != 0 || response.flags & FLAG_FINAL == 0 {
            if tag == RESERVED_TAG || data.is_empty() {
                return Err(error("broke off its answer to SendTargets", "RFC 7143 §11.11.3"));
            }
            self.ask(tag, response.lun, &Text::default(), sender);
            return Ok(None);
        }
        self.is_leaving = true;
        let logout = self.numbers().logout();
        sender.push(transmute_ref!(&logout), &[]);
        Ok(Some(std::mem::take(&mut self.text)))
    }

    fn numbers(&self) -> Numbers {
        Numbers { cmd_sn: self.cmd_sn, exp_stat_sn: self.exp_stat_sn }
    }

    fn on_nop(&self, ping: &NopIn, sender: &mut Sender) {
        if ping.target_transfer_tag.get() == RESERVED_TAG || self.is_leaving {
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
        if matches!(self.phase, DiscoveryPhase::Over) || now < self.deadline { Ok(()) } else { Err(LATE) }
    }
}

impl StreamSession for IscsiDiscoverySession {
    fn demand(&self) -> Demand {
        match &self.phase {
            DiscoveryPhase::Login(login) => Demand::Bytes(login.need),
            // A flood of pings has to wait for its answers to be taken.
            DiscoveryPhase::Asking(_) if self.sender.len() > MAX_UNSENT => Demand::Nothing,
            DiscoveryPhase::Asking(asking) => Demand::Bytes(asking.need),
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
        // What comes after the end is of no interest.
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
        Err(error("closed the connection before it had named its targets", "RFC 7143 §4.3"))
    }

    fn outbox(&mut self) -> &mut Outbox {
        self.sender.outbox()
    }
}

/// The targets of a whole answer, and how many more there are.
fn targets_of(text: &[u8]) -> Result<(Vec<FoundTarget>, u64), ProtocolError> {
    let (mut targets, mut left_out): (Vec<FoundTarget>, u64) = (Vec::new(), 0);
    for pair in text::pairs(text) {
        let pair = pair.map_err(|_| error("sent a malformed list of targets", "RFC 7143 appendix C"))?;
        let value = || pair.value.chars().filter(|c| !c.is_control()).take(MAX_VALUE).collect::<String>();
        match pair.key {
            "TargetName" if targets.len() < MAX_TARGETS => {
                targets.push(FoundTarget { name: value(), addresses: Vec::new() });
            }
            "TargetName" => left_out = left_out.saturating_add(1),
            "TargetAddress" if left_out == 0 => {
                if let Some(target) = targets.last_mut() {
                    target.addresses.push(value());
                }
            }
            _ => {}
        }
    }
    Ok((targets, left_out))
}

/// The longest data segment that is taken, in bytes.
const MAX_SEGMENT: usize = 64 << 10;
/// Of all answers together, in bytes.
const MAX_TEXT: usize = 4 << 20;
const MAX_TARGETS: usize = 10_000;
/// Of a name or an address, in characters.
const MAX_VALUE: usize = 300;
/// In bytes.
const MAX_UNSENT: usize = 16 << 10;
