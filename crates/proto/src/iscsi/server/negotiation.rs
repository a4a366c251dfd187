//! Text requests in full feature phase, including SendTargets (RFC 7143 §11.10, §11.11, Appendix
//! C).

use super::connection::ConnectionAddresses;
use super::shared::SharedSession;
use crate::iscsi::login::operational::OperationalNegotiation;
use crate::iscsi::login::target::TargetSessionKind;
use crate::iscsi::name::Name;
use crate::iscsi::node::{Portal, TargetNode};
use crate::iscsi::text::{self, KeyValue, MAX_TEXT, REJECT, TextBuilder};
use crate::names::portal::told_to_peer;
use blockmux_wire::iscsi::session::{RejectReason, TextRequest};
use blockmux_wire::iscsi::{FLAG_CONTINUE, FLAG_FINAL, RESERVED_TAG};
use core::net::SocketAddr;
use std::sync::Arc;

/// The text negotiation of a connection; there is at most one at a time.
pub(super) struct TextNegotiation {
    operational: OperationalNegotiation,
    /// Text of requests with the C bit, until the last one.
    input: Vec<u8>,
    /// Text that remains to be sent, in pieces of the initiator's MaxRecvDataSegmentLength.
    output: Vec<u8>,
    /// Target transfer tag that the next request must carry.
    ttt: Option<u32>,
    last_ttt: u32,
}

/// Content of a Text Response PDU.
pub(super) struct TextReply {
    /// C if more text follows, F if the negotiation is over.
    pub(super) flags: u8,
    /// Target transfer tag for the next request; reserved if there is none.
    pub(super) ttt: u32,
    pub(super) text: Vec<u8>,
}

impl TextNegotiation {
    pub(super) fn new(operational: OperationalNegotiation) -> TextNegotiation {
        TextNegotiation { operational, input: Vec::new(), output: Vec::new(), ttt: None, last_ttt: 0 }
    }

    /// MaxRecvDataSegmentLength of the initiator, in bytes.
    pub(super) fn max_segment(&self) -> usize {
        self.operational.agreed().max_send_data_segment_length()
    }

    /// Processes a text request.
    ///
    /// # Errors
    /// The reason to reject it. The negotiation is then reset without effect, and the next request
    /// begins a new one.
    pub(super) fn answer(
        &mut self,
        request: &TextRequest,
        text: &[u8],
        session: &SharedSession,
        addresses: &ConnectionAddresses,
    ) -> Result<TextReply, RejectReason> {
        let ttt = request.target_transfer_tag.get();
        if ttt == RESERVED_TAG {
            self.reset();
        } else if self.ttt != Some(ttt) {
            return Err(RejectReason::INVALID_PDU_FIELD);
        }
        let (is_final, continues) = (request.flags & FLAG_FINAL != 0, request.flags & FLAG_CONTINUE != 0);
        if request.initiator_task_tag.get() == RESERVED_TAG || (is_final && continues) {
            return Err(RejectReason::INVALID_PDU_FIELD);
        }
        if self.input.len().saturating_add(text.len()) > MAX_TEXT {
            self.reset();
            return Err(RejectReason::PROTOCOL_ERROR);
        }
        self.input.extend_from_slice(text);
        if continues {
            return Ok(TextReply { flags: 0, ttt: self.next_ttt(), text: Vec::new() });
        }
        if self.output.is_empty() {
            let input = std::mem::take(&mut self.input);
            match self.negotiate(&input, session, addresses) {
                Some(answer) => self.output = answer,
                None => {
                    self.reset();
                    return Err(RejectReason::PROTOCOL_ERROR);
                }
            }
        }
        Ok(self.next_answer(is_final))
    }

    /// The next piece of text.
    fn next_answer(&mut self, is_final: bool) -> TextReply {
        let text: Vec<u8> = self.output.drain(..self.output.len().min(self.max_segment())).collect();
        if !self.output.is_empty() {
            return TextReply { flags: FLAG_CONTINUE, ttt: self.next_ttt(), text };
        }
        if is_final {
            self.reset();
            return TextReply { flags: FLAG_FINAL, ttt: RESERVED_TAG, text };
        }
        TextReply { flags: 0, ttt: self.next_ttt(), text }
    }

    /// Answers a complete text; `None` on a violation; then no key takes effect.
    fn negotiate(
        &mut self,
        input: &[u8],
        session: &SharedSession,
        addresses: &ConnectionAddresses,
    ) -> Option<Vec<u8>> {
        let mut operational = self.operational.clone();
        let mut out = TextBuilder::default();
        for pair in text::pairs(input) {
            let pair = pair.ok()?;
            match pair.key {
                "SendTargets" => send_targets(pair, session, addresses, &mut out),
                "InitiatorAlias" => {}
                _ => operational.on_later_pair(pair, &mut out).ok()?,
            }
        }
        self.operational = operational;
        Some(out.as_bytes().to_vec())
    }

    /// Resets the negotiation.
    fn reset(&mut self) {
        self.input = Vec::new();
        self.output = Vec::new();
        self.ttt = None;
    }

    /// Allocates a target transfer tag for the next request.
    fn next_ttt(&mut self) -> u32 {
        self.last_ttt = self.last_ttt.wrapping_add(1) & 0x7fff_ffff;
        self.ttt = Some(self.last_ttt);
        self.last_ttt
    }
}

/// Lists targets with their addresses, only those that this initiator may log in to and can reach.
fn send_targets(
    pair: KeyValue<'_>,
    session: &SharedSession,
    ConnectionAddresses { local, client }: &ConnectionAddresses,
    out: &mut TextBuilder,
) {
    let targets = session.node.targets.all();
    let may_see = |target: &&Arc<TargetNode>| {
        target.networks.admits(*client) && target.access_of(&session.initiator).is_some()
    };
    let named = |target: &TargetNode| Name::new(pair.value).is_ok_and(|name| name == target.name);
    match &session.kind {
        TargetSessionKind::Discovery => targets
            .iter()
            .filter(|target| (pair.value == "All" || named(target)) && may_see(target))
            .map(|target| (target, addresses(target, *local)))
            .filter(|(_, addresses)| !addresses.is_empty())
            .for_each(|(target, addresses)| name_target(target, &addresses, out)),
        TargetSessionKind::Normal { target, .. } if pair.value.is_empty() || named(target) => {
            name_target(target, &addresses(target, *local), out);
        }
        TargetSessionKind::Normal { .. } => out.push(pair.key, REJECT),
    }
}

/// The addresses of a target for an initiator that connected to `local`.
fn addresses(target: &TargetNode, local: Option<SocketAddr>) -> Vec<String> {
    let told =
        |portal: &Portal| Some(format!("{},{}", told_to_peer(portal.address, local)?, portal.group_tag));
    target.portals.iter().filter_map(told).collect()
}

fn name_target(target: &TargetNode, addresses: &[String], out: &mut TextBuilder) {
    out.push("TargetName", target.name.as_str());
    addresses.iter().for_each(|address| out.push("TargetAddress", address));
}
