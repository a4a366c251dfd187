//! ABORT TASK, for commands whose answers do not come (RFC 7143 §11.5, §11.6).
//!
//! Such commands are aborted one after the other, oldest first, each on the connection that it belongs to. Until the target
//! has answered, a command keeps its tag and its memory, and what comes for it is taken: it may still end by itself. With
//! the answer the target has done with it, and its I/O is handed back. A target that refuses, or owes this answer, too, has
//! failed: the driver learns that from the next look.
//!
//! Over RDMA nothing is aborted, but the connection given up, for with it goes every way to a command's memory.

use super::full::FullFeature;
use super::immediate::ABORT_TAG;
use super::lane::Lane;
use crate::iscsi::pdu;
use crate::slots::Key;
use blockmux_wire::iscsi::scsi::{Function, FunctionResponse, TaskManagementRequest, TaskManagementResponse};
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// The commands to be aborted.
#[derive(Default)]
pub(super) struct Aborts {
    /// Oldest first; not more than there are commands.
    tasks: VecDeque<Key>,
    /// The one that the target was asked to abort.
    asked: Option<Asked>,
}

/// An abort under way.
struct Asked {
    key: Key,
    /// The number of its connection.
    cid: u16,
    /// A look has found it under way.
    is_seen: bool,
    is_refused: bool,
}

impl FullFeature {
    /// As [`Initiator::look`](crate::session::Initiator::look). An abort that a second look finds unanswered is overdue
    /// beyond doubt.
    pub(super) fn look(&mut self) -> u32 {
        let seen = self.queue.look();
        let Some(asked) = &mut self.aborts.asked else { return seen };
        let was_seen = std::mem::replace(&mut asked.is_seen, true);
        if was_seen || asked.is_refused { u32::MAX } else { seen }
    }

    /// As [`Initiator::abort_overdue`](crate::session::Initiator::abort_overdue), just after a look.
    pub(super) fn abort_overdue(&mut self, looks: u32, lanes: &mut [Lane]) -> bool {
        if self.aborts.asked.is_some() || !self.may_send() || lanes.iter().any(|lane| lane.mover.is_some()) {
            return false;
        }
        self.aborts.tasks = self.queue.overdue(looks).into();
        self.abort_next(lanes);
        if let Some(asked) = &mut self.aborts.asked {
            asked.is_seen = true;
        }
        self.aborts.asked.is_some()
    }

    /// Whether there is something to abort and nothing asked for.
    #[inline]
    pub(super) fn is_abort_due(&self) -> bool {
        self.aborts.asked.is_none() && !self.aborts.tasks.is_empty()
    }

    /// Has the next command aborted that has not ended by itself, and whose connection is there.
    #[cold]
    pub(super) fn abort_next(&mut self, lanes: &mut [Lane]) {
        while let Some(key) = self.aborts.tasks.pop_front() {
            let Some((progress, _)) = self.queue.transport(key) else { continue };
            let (cid, ref_cmd_sn) = (progress.lane, progress.cmd_sn);
            let Some(lane) = lanes.iter_mut().find(|lane| lane.cid == cid && lane.is_open()) else {
                continue;
            };
            let request = TaskManagementRequest {
                initiator_task_tag: (key.short() | ABORT_TAG).into(),
                referenced_task_tag: key.short().into(),
                ref_cmd_sn: ref_cmd_sn.into(),
                ..self.numbers(lane).task_management(Function::ABORT_TASK, self.lun)
            };
            pdu::push(&mut lane.outbox, lane.terms.digests, request.as_bytes(), &[]);
            self.aborts.asked = Some(Asked { key, cid, is_seen: false, is_refused: false });
            return;
        }
    }

    /// The target has answered a task management request; whether it was the abort. A task that it does not know has
    /// been answered before, or never came.
    pub(super) fn on_aborted(&mut self, lane: &mut Lane, response: &TaskManagementResponse) -> bool {
        let tag = response.initiator_task_tag.get();
        let is_it = |asked: &&mut Asked| asked.cid == lane.cid && asked.key.short() | ABORT_TAG == tag;
        let Some(asked) = self.aborts.asked.as_mut().filter(is_it) else { return false };
        let key = asked.key;
        match FunctionResponse(response.response) {
            FunctionResponse::FUNCTION_COMPLETE | FunctionResponse::TASK_DOES_NOT_EXIST => {
                self.aborts.asked = None;
                if self.queue.transport(key).is_some() {
                    lane.in_flight = lane.in_flight.saturating_sub(1);
                    self.queue.abort(key);
                }
            }
            _ => asked.is_refused = true,
        }
        true
    }

    /// A connection is gone, and with it what was asked for there.
    pub(super) fn forget_aborts(&mut self, lane: &Lane) {
        if self.aborts.asked.as_ref().is_some_and(|asked| asked.cid == lane.cid) {
            self.aborts.asked = None;
        }
    }
}
