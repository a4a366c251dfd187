//! What is neither a command nor its data: pings, text, logout (RFC 7143 §11.10, §11.11, §11.14, §11.15, §11.18).

use super::full::Turn;
use super::shared::Mail;
use crate::event::AuditEvent;
use crate::iscsi::login::operational::{Key, Operational};
use crate::iscsi::login::target::Session;
use crate::iscsi::name::Name;
use crate::iscsi::node::{Portal, TargetNode};
use crate::iscsi::text::{self, MAX_TEXT, Pair, REJECT, Text};
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{Bhs, FLAG_CONTINUE, FLAG_FINAL, Opcode, RESERVED_TAG};
use std::sync::Arc;
use zerocopy::transmute_ref;

/// The text negotiation of a connection; there is one at a time.
pub(super) struct Negotiation {
    operational: Operational,
    /// The text of requests that go on.
    input: Vec<u8>,
    /// What is still to be sent, because the initiator takes only so much at a time.
    output: Vec<u8>,
    /// What the next request of this negotiation has to name.
    ttt: Option<u32>,
    last_ttt: u32,
}

impl Negotiation {
    pub(super) fn new(operational: Operational) -> Negotiation {
        Negotiation { operational, input: Vec::new(), output: Vec::new(), ttt: None, last_ttt: 0 }
    }

    /// Forgets what was said: the next request begins anew.
    fn reset(&mut self) {
        self.input = Vec::new();
        self.output = Vec::new();
        self.ttt = None;
    }

    /// A tag for the next request.
    fn next_ttt(&mut self) -> u32 {
        self.last_ttt = self.last_ttt.wrapping_add(1) & 0x7fff_ffff;
        self.ttt = Some(self.last_ttt);
        self.last_ttt
    }
}

impl Turn<'_> {
    /// A request other than a command, with all its data.
    pub(super) fn on_talk(&mut self, bhs: &Bhs, data: &[u8]) {
        match bhs.opcode() {
            Opcode::NOP_OUT => self.on_nop(bhs, data),
            Opcode::TEXT_REQUEST => self.on_text(bhs, data),
            Opcode::LOGOUT_REQUEST => self.on_logout(bhs),
            _ => self.on_management(bhs),
        }
    }

    /// A ping, or the answer to one; that anything came is all that the latter says.
    fn on_nop(&mut self, bhs: &Bhs, data: &[u8]) {
        let itt = bhs.initiator_task_tag.get();
        if itt != RESERVED_TAG {
            self.connection.replies.pong(self.session.window, itt, bhs.lun, data);
        } else if !bhs.is_immediate() {
            // RFC 7143 §11.18.1: without a tag it must be immediate.
            self.reject(RejectReason::INVALID_PDU_FIELD, bhs);
        }
    }

    fn on_text(&mut self, bhs: &Bhs, data: &[u8]) {
        let request: &TextRequest = transmute_ref!(bhs);
        let (itt, ttt) = (request.initiator_task_tag.get(), request.target_transfer_tag.get());
        if ttt == RESERVED_TAG {
            self.connection.negotiation.reset();
        } else if self.connection.negotiation.ttt != Some(ttt) {
            return self.reject(RejectReason::INVALID_PDU_FIELD, bhs);
        }
        let (is_final, goes_on) = (request.flags & FLAG_FINAL != 0, request.flags & FLAG_CONTINUE != 0);
        if itt == RESERVED_TAG || (is_final && goes_on) {
            return self.reject(RejectReason::INVALID_PDU_FIELD, bhs);
        }
        if self.connection.negotiation.input.len().saturating_add(data.len()) > MAX_TEXT {
            return self.reset_negotiation(bhs);
        }
        self.connection.negotiation.input.extend_from_slice(data);
        if goes_on {
            let ttt = self.connection.negotiation.next_ttt();
            return self.connection.replies.text(self.session.window, (itt, ttt), 0, &[]);
        }
        if self.connection.negotiation.output.is_empty() {
            let input = std::mem::take(&mut self.connection.negotiation.input);
            match self.negotiate(&input) {
                Some(answer) => self.connection.negotiation.output = answer,
                None => return self.reset_negotiation(bhs),
            }
        }
        self.send_text(itt, is_final);
    }

    /// Sends as much text as the initiator takes at a time.
    fn send_text(&mut self, itt: u32, is_final: bool) {
        let len = self.connection.negotiation.output.len().min(self.connection.replies.max_segment());
        let part: Vec<u8> = self.connection.negotiation.output.drain(..len).collect();
        let (flags, ttt) = if !self.connection.negotiation.output.is_empty() {
            (FLAG_CONTINUE, self.connection.negotiation.next_ttt())
        } else if is_final {
            self.connection.negotiation.reset();
            (FLAG_FINAL, RESERVED_TAG)
        } else {
            (0, self.connection.negotiation.next_ttt())
        };
        self.connection.replies.text(self.session.window, (itt, ttt), flags, &part);
    }

    /// Text that breaks the rules: the negotiation begins anew, and nothing of it holds (RFC 7143, Negotiation Failures).
    fn reset_negotiation(&mut self, bhs: &Bhs) {
        self.connection.negotiation.reset();
        self.reject(RejectReason::PROTOCOL_ERROR, bhs);
    }

    /// Answers a whole text; `None` if it breaks the rules, and then nothing of it holds.
    fn negotiate(&mut self, input: &[u8]) -> Option<Vec<u8>> {
        let mut operational = self.connection.negotiation.operational.clone();
        let mut out = Text::default();
        for pair in text::pairs(input) {
            let pair = pair.ok()?;
            match pair.key {
                "SendTargets" => self.send_targets(pair, &mut out),
                "InitiatorAlias" => {}
                _ => operational.on_later_pair(pair, &mut out).ok()?,
            }
        }
        self.connection.replies.set_max_segment(operational.agreed().max_send_data_segment_length());
        self.connection.negotiation.operational = operational;
        Some(out.as_bytes().to_vec())
    }

    /// Names targets and where they are (RFC 7143 Appendix C): only those that this initiator may log in to.
    fn send_targets(&self, pair: Pair<'_>, out: &mut Text) {
        let may_see = |target: &&Arc<TargetNode>| target.access_of(&self.session.initiator).is_some();
        match (&self.session.kind, pair.value) {
            (Session::Discovery, "All") => {
                self.session
                    .node
                    .targets()
                    .iter()
                    .filter(may_see)
                    .for_each(|target| self.name_target(target, out));
            }
            (Session::Discovery, name) => {
                let name = Name::new(name).ok();
                let named = |target: &&Arc<TargetNode>| Some(&target.name) == name.as_ref();
                self.session
                    .node
                    .targets()
                    .iter()
                    .filter(named)
                    .filter(may_see)
                    .for_each(|target| self.name_target(target, out));
            }
            (Session::Normal { target, .. }, name) => {
                if name.is_empty() || Name::new(name).is_ok_and(|name| name == target.name) {
                    self.name_target(target, out);
                } else {
                    out.push(pair.key, REJECT);
                }
            }
        }
    }

    fn on_logout(&mut self, bhs: &Bhs) {
        let request: &LogoutRequest = transmute_ref!(bhs);
        let itt = request.initiator_task_tag.get();
        let result = match LogoutReason(request.reason & REASON_MASK) {
            LogoutReason::CLOSE_SESSION => {
                self.end_session();
                LogoutResult::CLOSED_SUCCESSFULLY
            }
            LogoutReason::CLOSE_CONNECTION if request.cid.get() == self.connection.cid => {
                self.end();
                LogoutResult::CLOSED_SUCCESSFULLY
            }
            LogoutReason::CLOSE_CONNECTION => match self.session.key_of(request.cid.get()) {
                // It is answered when that connection is closed.
                Some(key) => return self.session.tell_to_end(key, Some((self.connection.key, itt))),
                None => LogoutResult::CID_NOT_FOUND,
            },
            LogoutReason::REMOVE_CONNECTION_FOR_RECOVERY if self.connection.level < 2 => {
                LogoutResult::CONNECTION_RECOVERY_NOT_SUPPORTED
            }
            LogoutReason::REMOVE_CONNECTION_FOR_RECOVERY => match self.session.key_of(request.cid.get()) {
                Some(key) if key == self.connection.key => {
                    // Its own answer is the last that is sent on it.
                    self.log_out(itt, LogoutResult::CLOSED_SUCCESSFULLY);
                    return self.fail_connection(None);
                }
                Some(key) if self.session.has_failed(key) => LogoutResult::CLOSED_SUCCESSFULLY,
                Some(key) => {
                    return self.session.post(key, Mail::Fail(Some((self.connection.key, itt))));
                }
                None => LogoutResult::CID_NOT_FOUND,
            },
            _ => {
                return self.reject(RejectReason::INVALID_PDU_FIELD, bhs);
            }
        };
        self.log_out(itt, result);
    }

    /// Answers a logout request.
    pub(super) fn log_out(&mut self, itt: u32, result: LogoutResult) {
        let reason = match result {
            LogoutResult::CLOSED_SUCCESSFULLY => "the initiator logged out",
            _ => "the initiator's logout failed",
        };
        if self.connection.is_over {
            self.connection.events.push(AuditEvent::Logout { reason });
        }
        let times = self.times();
        self.connection.replies.logout(self.session.window, itt, result, times);
    }

    /// DefaultTime2Wait and DefaultTime2Retain, in seconds.
    pub(super) fn times(&self) -> (u16, u16) {
        let seconds = |key| u16::try_from(self.connection.parameters.get(key)).unwrap_or(u16::MAX);
        (seconds(Key::DefaultTime2Wait), seconds(Key::DefaultTime2Retain))
    }

    fn name_target(&self, target: &TargetNode, out: &mut Text) {
        out.push("TargetName", target.name.as_str());
        for Portal { address, group_tag } in &target.portals {
            let host = if address.starts_with(':') { self.connection.local_ip.as_str() } else { "" };
            out.push("TargetAddress", &format!("{host}{address},{group_tag}"));
        }
    }
}
