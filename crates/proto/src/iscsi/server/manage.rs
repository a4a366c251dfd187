//! Task management: aborting tasks, and resetting what they run on (RFC 7143 §11.5, §11.6; RFC 7144 §4.2).
//!
//! A function is answered when the I/O of every task that it aborted has completed: after the answer nothing of them
//! reaches the volume any more. Tasks of this session are counted for that. Those of other sessions, which CLEAR TASK SET
//! and resets concern too, are ended by the device server with their next step; for what they have in flight, the function
//! waits until all is over that was in flight at the volume.
//!
//! If that I/O hangs, so does the answer, for as long. There is none that would be true before: "Function complete" says
//! that nothing reaches the volume any more, and after "Function rejected" the initiator would wait for tasks that are
//! over. Linux's target waits without end, too. What the initiator does when its own patience is over, a new session in
//! the place of this one, waits for the same I/O and is refused after 30 seconds ([`crate::iscsi::sessions`]): a write
//! that comes late must not undo what a new session has written.
//!
//! Data that was asked for by R2T is not waited for, though RFC 7143 §4.2.3.3 has the initiator send it all the same:
//! Linux's initiator does not send it after a function, as its setting FastAbort has it by default. What does come is for
//! no task, and dropped.

use super::full::Turn;
use super::shared::Mail;
use super::tasks::{Entry, State};
use crate::iscsi::login::operational::Key;
use crate::iscsi::login::target::Session;
use crate::scsi::{Lun, ManagementResponse, TaskManagement};
use crate::served::Drain;
use blockmux_volume::Tag;
use blockmux_wire::iscsi::scsi::{FUNCTION_MASK, Function, FunctionResponse, TaskManagementRequest};
use blockmux_wire::iscsi::session::RejectReason;
use blockmux_wire::iscsi::{Bhs, Opcode};
use zerocopy::transmute_ref;

/// Functions that wait for the tasks that they aborted.
#[derive(Default)]
pub(super) struct Functions([Option<Waiting>; MAX_FUNCTIONS]);

/// One of them.
#[derive(Clone, Copy)]
struct Waiting {
    itt: u32,
    /// Tasks whose I/O has not completed, and volumes where others' has not.
    left: usize,
    ends_session: bool,
    /// The connection that brought it; `None` if that is over.
    requester: Option<u32>,
}

/// A function that is done.
pub(super) struct Done {
    itt: u32,
    ends_session: bool,
}

impl Functions {
    /// What a connection has asked for is done in silence.
    fn forget(&mut self, key: u32) {
        let of_it = |waiting: &&mut Waiting| waiting.requester == Some(key);
        self.0.iter_mut().flatten().filter(of_it).for_each(|waiting| waiting.requester = None);
    }
}

impl Turn<'_> {
    pub(super) fn on_management(&mut self, bhs: &Bhs) {
        let request: &TaskManagementRequest = transmute_ref!(bhs);
        let lun = Lun(u64::from_be_bytes(request.lun));
        let itt = request.initiator_task_tag.get();
        if self.session.server.is_none() {
            return self.reject(RejectReason::PROTOCOL_ERROR, bhs);
        }
        if self.session.management.0.iter().all(Option::is_some) {
            return self.reject(RejectReason::IMMEDIATE_COMMAND_REJECT, bhs);
        }
        let function = Function(request.function & FUNCTION_MASK);
        let knows_queries = self.connection.parameters.get(Key::iSCSIProtocolLevel) >= RFC_7144;
        match function {
            Function::ABORT_TASK => self.abort_task(request),
            Function::ABORT_TASK_SET => self.manage_unit(request, TaskManagement::AbortTaskSet),
            Function::CLEAR_TASK_SET => self.manage_unit(request, TaskManagement::ClearTaskSet),
            Function::LOGICAL_UNIT_RESET => self.manage_unit(request, TaskManagement::LogicalUnitReset),
            Function::TARGET_WARM_RESET => self.reset_target(request, false),
            Function::TARGET_COLD_RESET => self.reset_target(request, true),
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
                let has_unit = self.session.server.as_ref().is_some_and(|server| server.has_unit(lun));
                let is_there = !self.session.tasks.select(|entry| is_same(entry.lun, lun)).is_empty();
                let answer = answer_to_query(is_there);
                self.respond(itt, if has_unit { answer } else { FunctionResponse::LUN_DOES_NOT_EXIST });
            }
            Function::I_T_NEXUS_RESET if knows_queries => {
                if let Some(server) = &mut self.session.server {
                    server.lose_nexus();
                }
                self.abort_early(request, |_| true);
                self.abort(itt, |_| true, Vec::new(), false);
            }
            _ => self.respond(itt, FunctionResponse::TASK_MANAGEMENT_FUNCTION_NOT_SUPPORTED),
        }
    }

    /// The I/O of an aborted task has completed.
    pub(super) fn on_aborted(&mut self, function: Option<usize>) {
        let Some(place) = function.and_then(|function| self.session.management.0.get_mut(function)) else {
            return;
        };
        let Some(waiting) = place else { return };
        waiting.left = waiting.left.saturating_sub(1);
        if waiting.left > 0 {
            return;
        }
        let (requester, done) =
            (waiting.requester, Done { itt: waiting.itt, ends_session: waiting.ends_session });
        *place = None;
        match requester {
            Some(key) if key == self.connection.key => self.complete(done),
            Some(key) => self.session.post(key, Mail::FunctionDone(done)),
            None => {}
        }
    }

    /// RFC 7143 §11.6.1: a task that is not there may be one whose answer is on its way, or one that has not come. The
    /// latter's number counts as received, so that it is never done.
    fn abort_task(&mut self, request: &TaskManagementRequest) {
        let (itt, referenced) = (request.initiator_task_tag.get(), request.referenced_task_tag.get());
        if self.has_task(referenced, Lun(u64::from_be_bytes(request.lun))) {
            return self.abort(itt, |entry| entry.itt == referenced, Vec::new(), false);
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

    /// Whether a task of that unit has this tag: both name it (SAM-5, I_T_L_Q nexus).
    fn has_task(&mut self, itt: u32, lun: Lun) -> bool {
        let entry = self.session.tasks.find(itt).and_then(|slot| self.session.tasks.get_mut(slot));
        entry.is_some_and(|entry| is_same(entry.lun, lun))
    }

    fn manage_unit(&mut self, request: &TaskManagementRequest, function: TaskManagement) {
        let (itt, lun) = (request.initiator_task_tag.get(), Lun(u64::from_be_bytes(request.lun)));
        let Some(server) = &mut self.session.server else { return };
        match server.manage(function, lun) {
            ManagementResponse::IncorrectLogicalUnitNumber => {
                let response = FunctionResponse::LUN_DOES_NOT_EXIST;
                self.respond(itt, response);
            }
            ManagementResponse::FunctionComplete => {
                let concerns_others = function != TaskManagement::AbortTaskSet;
                let drain = if concerns_others { server.drain(lun) } else { None };
                self.abort_early(request, |other| is_same(other, lun));
                self.abort(itt, |entry| is_same(entry.lun, lun), Vec::from_iter(drain), false);
            }
        }
    }

    fn reset_target(&mut self, request: &TaskManagementRequest, is_cold: bool) {
        let mut drains = Vec::new();
        if let (Some(server), Session::Normal { access, .. }) = (&mut self.session.server, &self.session.kind)
        {
            for (number, ..) in access.target.units() {
                server.manage(TaskManagement::LogicalUnitReset, Lun::new(number));
                drains.extend(server.drain(Lun::new(number)));
            }
        }
        self.abort_early(request, |_| true);
        self.abort(request.initiator_task_tag.get(), |_| true, drains, is_cold);
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

    /// Aborts tasks, and answers the function that wants it when they are gone, and what `drains` wait for.
    fn abort(
        &mut self,
        itt: u32,
        is_meant: impl Fn(&Entry) -> bool,
        mut drains: Vec<Drain>,
        ends_session: bool,
    ) {
        let Some(function) = self.session.management.0.iter().position(Option::is_none) else { return };
        drains.retain(|drain| !drain.is_over());
        let left = self.abort_tasks(is_meant, Some(function)).saturating_add(drains.len());
        self.connection.drains.extend(drains.into_iter().map(|drain| (function, drain)));
        if left == 0 {
            return self.complete(Done { itt, ends_session });
        }
        let waiting = Waiting { itt, left, ends_session, requester: Some(self.connection.key) };
        if let Some(place) = self.session.management.0.get_mut(function) {
            *place = Some(waiting);
        }
    }

    /// Goes on with functions that wait for other sessions' I/O, as far as that is over.
    pub(super) fn resume_functions(&mut self) {
        while let Some(at) = self.connection.drains.iter().position(|(_, drain)| drain.is_over()) {
            let (function, _) = self.connection.drains.swap_remove(at);
            self.on_aborted(Some(function));
        }
    }

    /// The connection answers no function any more; those of it that wait for its own tasks end in silence.
    pub(super) fn forget_functions(&mut self) {
        self.session.management.forget(self.connection.key);
        for (function, _) in std::mem::take(&mut self.connection.drains) {
            self.on_aborted(Some(function));
        }
    }

    pub(super) fn complete(&mut self, function: Done) {
        if self.connection.is_over {
            return;
        }
        self.respond(function.itt, FunctionResponse::FUNCTION_COMPLETE);
        if function.ends_session {
            // RFC 7143 §11.5.1: the connections of all initiators, and this one's when it has its answer.
            if let Some(membership) = &self.session.membership {
                membership.end_others();
            }
            self.end_session();
        }
    }

    /// Drops tasks; returns how many of them still wait for the volume, or for the connection that they belong to.
    pub(super) fn abort_tasks(
        &mut self,
        is_meant: impl Fn(&Entry) -> bool,
        function: Option<usize>,
    ) -> usize {
        let slots = self.session.tasks.select(is_meant);
        self.connection.grants.retain(|slot| !slots.contains(slot));
        self.connection.waiting.retain(|slot| !slots.contains(slot));
        self.connection.pausing.retain(|pausing| !slots.contains(&pausing.slot));
        let mut left: usize = 0;
        for slot in slots {
            let Some(entry) = self.session.tasks.get_mut(slot) else { continue };
            let (owner, key) = (entry.owner, self.connection.key);
            // Over RDMA, data that is asked for is read from memory that the initiator closes when it hears of the abort.
            let is_fetching = self.connection.replies.mover.is_some() && entry.transfer.is_asked();
            let is_waited_for = entry.state == State::Io || is_fetching;
            match entry.in_flight_at {
                Some(at) if at == key => {
                    self.connection.cancels.push_back((entry.volume, Tag(slot as u64)));
                }
                Some(at) => self.session.post(at, Mail::Cancel(slot)),
                // That I/O has completed, and its completion is on its way to the owner; or data is.
                None if is_waited_for => {}
                None if owner != key => self.session.post(owner, Mail::Drop(slot, function)),
                None => {
                    self.drop_task(slot);
                    continue;
                }
            }
            left = left.saturating_add(1);
            if let Some(entry) = self.session.tasks.get_mut(slot) {
                entry.state = State::Aborted(function);
            }
            self.session.tasks.forget_name(slot);
        }
        left
    }
}

/// Whether two LUNs name the same unit, perhaps by two addressing methods.
fn is_same(one: Lun, other: Lun) -> bool {
    one == other || (one.number().is_some() && one.number() == other.number())
}

/// Whether one CmdSN comes before another.
fn is_before(cmd_sn: u32, other: u32) -> bool {
    other.wrapping_sub(cmd_sn).wrapping_sub(1) < (1 << 31) - 1
}

fn answer_to_query(is_there: bool) -> FunctionResponse {
    if is_there { FunctionResponse::FUNCTION_SUCCEEDED } else { FunctionResponse::FUNCTION_COMPLETE }
}

/// Functions that wait at a time; more are refused.
const MAX_FUNCTIONS: usize = 16;

/// The value of `iSCSIProtocolLevel` that RFC 7144 defines.
const RFC_7144: u32 = 2;
