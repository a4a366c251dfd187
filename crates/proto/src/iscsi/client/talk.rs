//! Text in full feature phase, for a target that asks for it (RFC 7143 §11.9, §11.10, §11.11).
//!
//! There is nothing that we would change in the middle of a session, and so the request is empty, as it may be. It is the
//! target that has something to say: of what was agreed on in the login, only the longest data segment that it takes may
//! be declared anew.

use super::full::FullFeature;
use super::immediate::TEXT_TAG;
use super::lane::Lane;
use super::reply::error;
use crate::iscsi::text::{self, MAX_TEXT};
use crate::session::ProtocolError;
use blockmux_wire::iscsi::session::TextResponse;
use blockmux_wire::iscsi::{FLAG_CONTINUE, FLAG_FINAL, RESERVED_TAG, U24};
use zerocopy::transmute_ref;

/// An answer to our request, as far as it has come.
#[derive(Default)]
pub(super) struct Talk {
    text: Vec<u8>,
    rounds: u32,
}

impl FullFeature {
    /// The target wants to negotiate on this connection. Once is enough until it has answered.
    pub(super) fn begin_talk(&mut self, lane: &mut Lane) {
        if self.may_send() && lane.talk.is_none() {
            lane.talk = Some(Box::default());
            self.send_text(lane, RESERVED_TAG, [0; 8]);
        }
    }

    /// A part of the answer.
    pub(super) fn on_text(
        &mut self,
        lane: &mut Lane,
        response: &TextResponse,
        data: &[u8],
    ) -> Result<(), ProtocolError> {
        let fault = |what| Err(error(what, "RFC 7143 §11.11"));
        if response.initiator_task_tag.get() != TEXT_TAG {
            return fault("answered a text request that was not sent");
        }
        let Some(mut talk) = lane.talk.take() else {
            return fault("answered a text request that was not sent");
        };
        talk.rounds = talk.rounds.saturating_add(1);
        if talk.rounds > MAX_ROUNDS || talk.text.len().saturating_add(data.len()) > MAX_TEXT {
            return fault("comes to no end with its text");
        }
        talk.text.extend_from_slice(data);
        let tag = response.target_transfer_tag.get();
        if response.flags & FLAG_CONTINUE != 0 || response.flags & FLAG_FINAL == 0 {
            if tag == RESERVED_TAG {
                return fault("broke off its text");
            }
            lane.talk = Some(talk);
            if self.may_send() {
                self.send_text(lane, tag, response.lun);
            }
            return Ok(());
        }
        take(lane, &talk.text)
    }

    fn send_text(&self, lane: &mut Lane, target_transfer_tag: u32, lun: [u8; 8]) {
        let request = self.numbers(lane).text(target_transfer_tag, lun, 0);
        lane.sender.push(transmute_ref!(&request), &[]);
    }
}

/// Takes what the target has declared. Keys that we know nothing of are no questions: those it may not ask now.
fn take(lane: &mut Lane, whole: &[u8]) -> Result<(), ProtocolError> {
    for pair in text::pairs(whole) {
        let pair = pair.map_err(|_| error("sent a malformed text", "RFC 7143 §6.1"))?;
        // Over RDMA that is not what bounds a message.
        if pair.key != "MaxRecvDataSegmentLength" || lane.mover.is_some() {
            continue;
        }
        let length = text::parse_number(pair.value).filter(|length| (512..=U24::MAX).contains(length));
        lane.terms.max_send_segment = length.ok_or_else(|| {
            error("declared a MaxRecvDataSegmentLength that there is not", "RFC 7143 §13.12")
        })?;
    }
    Ok(())
}

/// Of requests and answers in one negotiation.
const MAX_ROUNDS: u32 = 64;
