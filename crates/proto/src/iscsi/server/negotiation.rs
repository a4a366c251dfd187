//! The text negotiation of a connection in full feature phase, SendTargets included (RFC 7143
//! §11.10, §11.11, Appendix C).

use super::shared::SharedSession;
use crate::iscsi::login::operational::Operational;
use crate::iscsi::login::target::Session;
use crate::iscsi::name::Name;
use crate::iscsi::node::{Portal, TargetNode};
use crate::iscsi::text::{self, MAX_TEXT, Pair, REJECT, Text};
use blockmux_wire::iscsi::session::{RejectReason, TextRequest};
use blockmux_wire::iscsi::{FLAG_CONTINUE, FLAG_FINAL, RESERVED_TAG};
use std::sync::Arc;

/// A connection has one at a time.
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

/// A text response.
pub(super) struct TextAnswer {
    /// C if more follows, F if the negotiation is over.
    pub(super) flags: u8,
    /// What the next request has to name; reserved if there is to be none.
    pub(super) ttt: u32,
    pub(super) text: Vec<u8>,
}

impl Negotiation {
    pub(super) fn new(operational: Operational) -> Negotiation {
        Negotiation { operational, input: Vec::new(), output: Vec::new(), ttt: None, last_ttt: 0 }
    }

    /// The longest data segment that the initiator takes, in bytes.
    pub(super) fn max_segment(&self) -> usize {
        self.operational.agreed().max_send_data_segment_length()
    }

    /// Answers a request with that text.
    ///
    /// # Errors
    /// If it breaks the rules: then nothing of the negotiation holds, and the next request begins
    /// anew.
    pub(super) fn answer(
        &mut self,
        request: &TextRequest,
        text: &[u8],
        session: &SharedSession,
        local_ip: &str,
    ) -> Result<TextAnswer, RejectReason> {
        let ttt = request.target_transfer_tag.get();
        if ttt == RESERVED_TAG {
            self.reset();
        } else if self.ttt != Some(ttt) {
            return Err(RejectReason::INVALID_PDU_FIELD);
        }
        let (is_final, goes_on) = (request.flags & FLAG_FINAL != 0, request.flags & FLAG_CONTINUE != 0);
        if request.initiator_task_tag.get() == RESERVED_TAG || (is_final && goes_on) {
            return Err(RejectReason::INVALID_PDU_FIELD);
        }
        if self.input.len().saturating_add(text.len()) > MAX_TEXT {
            self.reset();
            return Err(RejectReason::PROTOCOL_ERROR);
        }
        self.input.extend_from_slice(text);
        if goes_on {
            return Ok(TextAnswer { flags: 0, ttt: self.next_ttt(), text: Vec::new() });
        }
        if self.output.is_empty() {
            let input = std::mem::take(&mut self.input);
            match self.negotiate(&input, session, local_ip) {
                Some(answer) => self.output = answer,
                None => {
                    self.reset();
                    return Err(RejectReason::PROTOCOL_ERROR);
                }
            }
        }
        Ok(self.next_answer(is_final))
    }

    /// As much text as the initiator takes at a time.
    fn next_answer(&mut self, is_final: bool) -> TextAnswer {
        let text: Vec<u8> = self.output.drain(..self.output.len().min(self.max_segment())).collect();
        if !self.output.is_empty() {
            return TextAnswer { flags: FLAG_CONTINUE, ttt: self.next_ttt(), text };
        }
        if is_final {
            self.reset();
            return TextAnswer { flags: FLAG_FINAL, ttt: RESERVED_TAG, text };
        }
        TextAnswer { flags: 0, ttt: self.next_ttt(), text }
    }

    /// Answers a whole text; `None` if it breaks the rules, and then nothing of it holds.
    fn negotiate(&mut self, input: &[u8], session: &SharedSession, local_ip: &str) -> Option<Vec<u8>> {
        let mut operational = self.operational.clone();
        let mut out = Text::default();
        for pair in text::pairs(input) {
            let pair = pair.ok()?;
            match pair.key {
                "SendTargets" => send_targets(pair, session, local_ip, &mut out),
                "InitiatorAlias" => {}
                _ => operational.on_later_pair(pair, &mut out).ok()?,
            }
        }
        self.operational = operational;
        Some(out.as_bytes().to_vec())
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

/// Names targets and where they are: only those that this initiator may log in to.
fn send_targets(pair: Pair<'_>, session: &SharedSession, local_ip: &str, out: &mut Text) {
    let targets = session.node.targets();
    let may_see = |target: &&Arc<TargetNode>| target.access_of(&session.initiator).is_some();
    let named = |target: &TargetNode| Name::new(pair.value).is_ok_and(|name| name == target.name);
    match &session.kind {
        Session::Discovery => targets
            .iter()
            .filter(|target| (pair.value == "All" || named(target)) && may_see(target))
            .for_each(|target| name_target(target, local_ip, out)),
        Session::Normal { target, .. } if pair.value.is_empty() || named(target) => {
            name_target(target, local_ip, out);
        }
        Session::Normal { .. } => out.push(pair.key, REJECT),
    }
}

fn name_target(target: &TargetNode, local_ip: &str, out: &mut Text) {
    out.push("TargetName", target.name.as_str());
    for Portal { address, group_tag } in &target.portals {
        let host = if address.starts_with(':') { local_ip } else { "" };
        out.push("TargetAddress", &format!("{host}{address},{group_tag}"));
    }
}
