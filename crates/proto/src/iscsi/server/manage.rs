//! Task management: aborting tasks, and resetting what they run on (RFC 7143 §11.5, §11.6; RFC 7144 §4.2).
//!
//! The task set aborts tasks and waits for their I/O ([`crate::scsi::task_set`]). What is here is iSCSI's: functions and
//! responses by their numbers, and commands that have not had their turn.
//!
//! If the I/O of an aborted task hangs, so does the answer, for as long. There is none that would be true before: "Function complete" says
//! that nothing reaches the volume any more, and after "Function rejected" the initiator would wait for tasks that are
//! over. Linux's target waits without end, too. What the initiator does when its own patience is over, a new session in
//! the place of this one, waits for the same I/O and is refused after 30 seconds ([`crate::iscsi::sessions`]): a write
//! that comes late must not undo what a new session has written.
//!
//! Data that was asked for by R2T is not waited for, though RFC 7143 §4.2.3.3 has the initiator send it all the same:
//! Linux's initiator does not send it after a function, as its setting FastAbort has it by default. What does come is for
//! no task, and dropped.

use super::full::Turn;
use crate::iscsi::login::operational::Key;
use crate::scsi::task_set::TaskRouter;
use crate::scsi::{Lun, ManagementResponse, TaskManagement};
use blockmux_wire::iscsi::scsi::{FUNCTION_MASK, Function, FunctionResponse, TaskManagementRequest};
use blockmux_wire::iscsi::session::RejectReason;
use blockmux_wire::iscsi::{Bhs, Opcode};
use zerocopy::transmute_ref;

impl Turn<'_> {
    pub(super) fn on_management(&mut self, bhs: &Bhs) {
        let request: &TaskManagementRequest = transmute_ref!(bhs);
        let lun = Lun(u64::from_be_bytes(request.lun));
        let itt = request.initiator_task_tag.get();
        if self.session.tasks.server.is_none() {
            return self.reject(RejectReason::PROTOCOL_ERROR, bhs);
        }
        if !self.session.tasks.has_room_for_function() {
            return self.reject(RejectReason::IMMEDIATE_COMMAND_REJECT, bhs);
        }
        let function = Function(request.function & FUNCTION_MASK);
        let knows_queries = self.connection.parameters.get(Key::iSCSIProtocolLevel) >= RFC_7144;
        match function {
            Function::ABORT_TASK => self.abort_one(request),
            Function::ABORT_TASK_SET => self.manage_unit(request, TaskManagement::AbortTaskSet),
            Function::CLEAR_TASK_SET => self.manage_unit(request, TaskManagement::ClearTaskSet),
            Function::LOGICAL_UNIT_RESET => self.manage_unit(request, TaskManagement::LogicalUnitReset),
            Function::TARGET_WARM_RESET | Function::TARGET_COLD_RESET => {
                self.abort_early(request, |_| true);
                self.reset_target(itt, function == Function::TARGET_COLD_RESET);
            }
            Function::TASK_REASSIGN if self.connection.level > 1 => self.reassign(request),
            Function::TASK_REASSIGN => {
                let response = FunctionResponse::TASK_ALLEGIANCE_REASSIGNMENT_NOT_SUPPORTED;
                self.respond(itt, response);
            }
            Function::QUERY_TASK if knows_queries => {
                let is_there = self.has_task(request.referenced_task_tag.get(), lun);
                self.respond(itt, answer_to_query(is_there));
            }
            Function::QUERY_TASK_SET if knows_queries => {
                let has_unit = self.session.tasks.server.as_ref().is_some_and(|server| server.has_unit(lun));
                let is_there = !self.session.tasks.select(|entry| entry.lun.names_same_unit(lun)).is_empty();
                let answer = answer_to_query(is_there);
                self.respond(itt, if has_unit { answer } else { FunctionResponse::LUN_DOES_NOT_EXIST });
            }
            Function::I_T_NEXUS_RESET if knows_queries => {
                self.abort_early(request, |_| true);
                self.reset_nexus(itt);
            }
            _ => self.respond(itt, FunctionResponse::TASK_MANAGEMENT_FUNCTION_NOT_SUPPORTED),
        }
    }

    /// RFC 7143 §11.6.1: a task that is not there may be one whose answer is on its way, or one that has not come. The
    /// latter's number counts as received, so that it is never done.
    fn abort_one(&mut self, request: &TaskManagementRequest) {
        let (itt, referenced) = (request.initiator_task_tag.get(), request.referenced_task_tag.get());
        if self.has_task(referenced, Lun(u64::from_be_bytes(request.lun))) {
            return self.abort_task(itt, referenced);
        }
        let ref_cmd_sn = request.ref_cmd_sn.get();
        let response = if self.session.window.is_ahead(ref_cmd_sn) {
            if self.may_fill_gaps() && is_before(ref_cmd_sn, request.cmd_sn.get()) {
                self.session.early.cancel(ref_cmd_sn);
            }
            FunctionResponse::FUNCTION_COMPLETE
        } else {
            FunctionResponse::TASK_DOES_NOT_EXIST
        };
        self.respond(itt, response);
    }

    fn manage_unit(&mut self, request: &TaskManagementRequest, function: TaskManagement) {
        let (itt, lun) = (request.initiator_task_tag.get(), Lun(u64::from_be_bytes(request.lun)));
        match TaskRouter::manage_unit(self, itt, function, lun) {
            ManagementResponse::IncorrectLogicalUnitNumber => {
                self.respond(itt, FunctionResponse::LUN_DOES_NOT_EXIST);
            }
            ManagementResponse::FunctionComplete => {
                self.abort_early(request, |other| other.names_same_unit(lun));
            }
        }
    }

    /// Aborts commands that wait for their turn and were sent before the function that wants it.
    fn abort_early(&mut self, request: &TaskManagementRequest, is_it: impl Fn(Lun) -> bool) {
        let meant = self.session.early.select(|bhs, cmd_sn| {
            bhs.opcode() == Opcode::SCSI_COMMAND
                && is_before(cmd_sn, request.cmd_sn.get())
                && is_it(Lun(u64::from_be_bytes(bhs.lun)))
        });
        meant.into_iter().for_each(|cmd_sn| self.session.early.cancel(cmd_sn));
    }
}

/// Whether one CmdSN comes before another.
fn is_before(cmd_sn: u32, other: u32) -> bool {
    other.wrapping_sub(cmd_sn).wrapping_sub(1) < (1 << 31) - 1
}

fn answer_to_query(is_there: bool) -> FunctionResponse {
    if is_there { FunctionResponse::FUNCTION_SUCCEEDED } else { FunctionResponse::FUNCTION_COMPLETE }
}

/// The value of `iSCSIProtocolLevel` that RFC 7144 defines.
const RFC_7144: u32 = 2;
