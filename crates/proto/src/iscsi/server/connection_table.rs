//! Loss, recovery and orderly end of connections (RFC 7143 §6.3.4, §7.1.4, §7.2.2, §11.5, §11.9.1).
//!
//! *Lost connections.* Up to error recovery level 1 the session ends with the loss of a connection:
//! commands sent on it leave a permanent gap in CmdSN. Its tasks end at once. If it was the only
//! connection, the I_T nexus is retained for DefaultTime2Retain (the session state timeout of
//! RFC 7143 §13.15) with its reservations and PREVENT MEDIUM REMOVAL, or until the initiator logs
//! in again. A connection that logs out leaves no gap.
//!
//! *Tasks outlive their connection* at error recovery level 2:
//! ```text
//!   active ──── lost, or removed for recovery ────▶ failed ──── timed out ──────▶ over
//!                                                     │
//!                         task ◀─── TASK REASSIGN ────┘
//! ```
//! A *failed* connection has no socket, but its driver continues: the I/O that it submitted
//! completes there. Responses that were not sent or not acknowledged are *parked*, and data-out
//! stops. TASK REASSIGN moves a task to the connection that carries the request: a response is sent
//! from ExpDataSN on, and missing data-out is requested. A failed connection is retained for
//! DefaultTime2Wait plus DefaultTime2Retain, and so is a session without other connections. A
//! session retains at most MaxConnections failed connections; beyond that the oldest is dropped.
//!
//! *A target that stops* asks its initiators to log out:
//! ```text
//!   stop ──▶ logout requested ── logs out ─────────────────────────▶ closed
//!              (AsyncEvent 1) └─ is idle for Parameter3 s ──────▶ dropped ──▶ closed when nothing is in flight
//!                                                                    (AsyncEvent 3)
//! ```
//! Commands in flight finish meanwhile, and new ones end with BUSY: the initiator retries them on
//! the restarted target or another path. The time counts from when nothing is in flight, so an
//! initiator that waits for its commands before the logout has enough time. Each connection is
//! asked separately; a logout that closes the session ends them all.

use super::connection::TargetConnection;
use super::full::ConnectionTurn;
use super::receive::AwaitedIscsiPdu;
use super::shared::ConnectionEvent;
use super::tasks::TaskState;
use crate::iscsi::login::target::TargetSessionKind;
use crate::scsi::task_set::{TaskEvent, TaskRouter};
use blockmux_wire::iscsi::BHS_LEN;
use blockmux_wire::iscsi::scsi::{FunctionResponse, TaskManagementFunctionRequest};
use blockmux_wire::iscsi::session::{AsyncEvent, LogoutResult};
use std::time::{Duration, Instant};

/// A task that TASK REASSIGN moved to another connection.
pub(super) struct ReassignedTask {
    slot: usize,
    /// Data-in and data-out memory that the connections counted for the session, in bytes.
    data_in: usize,
    memory: usize,
}

/// Progress of a connection's orderly end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum LogoutProgress {
    /// No logout was requested.
    #[default]
    No,
    /// The initiator was asked to log out by this time; `None` while commands are in flight.
    Asked(Option<Instant>),
    /// The initiator missed the deadline. The connection closes when nothing is in flight.
    Dropping,
}

impl LogoutProgress {
    pub(super) fn has_begun(self) -> bool {
        self != LogoutProgress::No
    }
}

impl TargetConnection {
    /// Next check of the logout deadline.
    pub(super) fn logs_out_at(&self) -> Option<Instant> {
        match self.logout {
            LogoutProgress::Asked(until) if self.task_count == 0 => Some(until.unwrap_or(self.now)),
            _ => None,
        }
    }
}

impl ConnectionTurn<'_> {
    /// Called at the start of each driver turn.
    #[inline]
    pub(super) fn on_turn(&mut self) {
        if self.session.take_wakeup(self.connection.key) {
            self.read_events();
            self.deliver_early();
        }
        self.resume_functions();
        if !self.connection.memory_waiters.is_empty() {
            self.resume_memory_waiters();
        }
        // The pool may have woken this connection.
        self.take_memory();
    }

    /// Processes the events from other connections.
    pub(super) fn read_events(&mut self) {
        while let Some(event) = self.session.next_event(self.connection.key) {
            match event {
                ConnectionEvent::Task(event) => {
                    // Discards the data of a task that is about to end.
                    if let TaskEvent::Drop(slot, _) = event
                        && self.connection.awaiting.slot() == Some(slot)
                    {
                        self.connection.awaiting.discard();
                    }
                    self.on_event(event);
                }
                ConnectionEvent::End(requester) => {
                    self.connection.logout_requester = requester;
                    self.end();
                }
                ConnectionEvent::Fail(requester) => self.fail_connection(requester),
                ConnectionEvent::ReassignedTask(reassigned) => self.on_task_reassigned(&reassigned),
                ConnectionEvent::Lost(cid) => self.announce_loss(cid),
                ConnectionEvent::LoggedOut(itt) => self.log_out(itt, LogoutResult::CLOSED_SUCCESSFULLY),
            }
        }
    }

    /// Handles a connection that ended without a logout.
    pub(super) fn lose_connection(&mut self) {
        let is_leaving = self.connection.logout.has_begun() || self.session.must_end();
        let keeps_tasks = self.connection.level > 1 && !is_leaving;
        if keeps_tasks && !self.connection.is_closed() {
            self.fail_connection(None);
            self.session.announce_loss(self.connection.cid);
        } else if !keeps_tasks && !self.connection.is_over {
            // Over RDMA nothing outlives the queue pair.
            let is_retained = self.session_times().1 > 0 && self.connection.replies.mover.is_none();
            if is_leaving || !is_retained || !self.session.is_only_connection(self.connection.key) {
                self.end_session();
            } else {
                self.retain_session();
            }
        }
    }

    /// Reports a lost connection to the initiator (RFC 7143 §11.9.1).
    fn announce_loss(&mut self, cid: u16) {
        if !self.connection.is_closed() {
            let (wait, retain) = self.session_times();
            let parameters = [cid, wait, retain];
            let window = self.session.window;
            self.connection.replies.event(window, AsyncEvent::CONNECTION_DROP, parameters);
        }
    }

    /// Ends this connection and all others of the session.
    pub(super) fn end_session(&mut self) {
        self.session.end(self.connection.key);
        self.end();
    }

    /// Ends this connection: no further response is sent on it.
    pub(super) fn end(&mut self) {
        if std::mem::replace(&mut self.connection.is_over, true) {
            return;
        }
        let key = self.connection.key;
        self.read_events();
        self.session.mark_ending(key);
        self.session.early.forget(key);
        self.abort_tasks(|entry| entry.owner == key, None);
        self.forget_functions();
        self.session.forget_parked(key);
    }

    /// Removes the connection from the session when it has no tasks left.
    #[cold]
    pub(super) fn leave(&mut self) {
        if self.connection.task_count > 0 || std::mem::replace(&mut self.connection.has_left, true) {
            return;
        }
        self.session.remove_connection(self.connection.key);
        if let Some((key, itt)) = self.connection.logout_requester.take() {
            self.session.post(key, ConnectionEvent::LoggedOut(itt));
        }
    }

    /// Marks the connection as failed: it was lost or removed for recovery, and its tasks remain.
    /// `requester` is notified.
    pub(super) fn fail_connection(&mut self, requester: Option<(u32, u32)>) {
        if !self.connection.is_over && !std::mem::replace(&mut self.connection.is_failed, true) {
            self.park();
            self.session.on_failed(self.connection.key);
        }
        if let Some((key, itt)) = requester {
            self.session.post(key, ConnectionEvent::LoggedOut(itt));
        }
    }

    /// Retains the nexus after the loss of the only connection below level 2; its tasks are
    /// aborted.
    pub(super) fn retain_session(&mut self) {
        let key = self.connection.key;
        self.connection.is_failed = true;
        self.session.retain(key);
        self.session.early.forget(key);
        self.abort_tasks(|_| true, None);
        self.forget_functions();
        self.connection.awaiting = AwaitedIscsiPdu::Head(BHS_LEN);
        self.connection.gathering.1 = None;
        self.connection.next_check = self.connection.now;
    }

    fn park(&mut self) {
        let key = self.connection.key;
        self.session.early.forget(key);
        self.forget_functions();
        self.connection.awaiting = AwaitedIscsiPdu::Head(BHS_LEN);
        self.connection.gathering.1 = None;
        self.connection.memory_waiters.clear();
        self.connection.next_check = self.connection.now;
        for sent in self.connection.replies.take_commands() {
            self.session.park(key, sent);
        }
        for slot in self.session.tasks.select(|entry| entry.owner == key) {
            let Some(entry) = self.session.tasks.get_mut(slot) else { continue };
            entry.progress.transfer.interrupt();
            match entry.state {
                TaskState::Data => self.continue_data_out(slot),
                TaskState::Ended => self.end_if_closed(slot),
                TaskState::Io | TaskState::Wait | TaskState::Aborted(_) => {}
            }
        }
    }

    /// Ends a failed connection that is no longer needed.
    pub(super) fn linger(&mut self, now: Instant) {
        let (wait, retain) = self.session_times();
        let time = Duration::from_secs(u64::from(wait).saturating_add(retain.into()));
        let until =
            *self.connection.lingers_until.get_or_insert_with(|| now.checked_add(time).unwrap_or(now));
        self.connection.next_check = now.checked_add(CHECK_INTERVAL).unwrap_or(now);
        if now >= until || self.session.must_end() || !self.is_needed() {
            self.end();
        }
    }

    /// Whether the initiator may still ask for tasks or responses of the failed connection.
    fn is_needed(&self) -> bool {
        self.connection.task_count > 0
            || self.session.has_parked(self.connection.key)
            || !self.session.is_active()
    }

    /// TASK REASSIGN (RFC 7143 §11.5.1). The function response is sent before the task continues
    /// here.
    pub(super) fn reassign(&mut self, request: &TaskManagementFunctionRequest) {
        let (itt, referenced) = (request.initiator_task_tag.get(), request.referenced_task_tag.get());
        let exp_data_sn = request.exp_data_sn.get();
        let found = self.session.tasks.find(referenced);
        let owner = found.and_then(|slot| self.session.tasks.get_mut(slot)).map(|entry| entry.owner);
        if let (Some(slot), Some(owner)) = (found, owner) {
            if !self.session.has_failed(owner) {
                return self.respond(itt, FunctionResponse::TASK_STILL_ALLEGIANT);
            }
            self.respond(itt, FunctionResponse::FUNCTION_COMPLETE);
            return self.take_over(slot, owner, exp_data_sn);
        }
        match self.session.take_parked(referenced) {
            Some(sent) => {
                self.respond(itt, FunctionResponse::FUNCTION_COMPLETE);
                let window = self.session.window;
                self.connection.replies.reassigned(window, sent, exp_data_sn);
            }
            None => self.respond(itt, FunctionResponse::TASK_DOES_NOT_EXIST),
        }
    }

    fn take_over(&mut self, slot: usize, from: u32, exp_data_sn: u32) {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let data_in = super::command::bounded(entry.progress.data_in.unwrap_or(0));
        let reassigned = ReassignedTask { slot, data_in, memory: entry.progress.memory };
        entry.owner = self.connection.key;
        self.connection.task_count = self.connection.task_count.saturating_add(1);
        self.connection.data_in_expected = self.connection.data_in_expected.saturating_add(data_in);
        self.connection.data_out_memory = self.connection.data_out_memory.saturating_add(reassigned.memory);
        entry.progress.transfer.resume_at(exp_data_sn);
        let state = entry.state;
        self.session.post(from, ConnectionEvent::ReassignedTask(reassigned));
        match state {
            TaskState::Data => self.continue_data_out(slot),
            TaskState::Wait => self.connection.queue.wait(slot),
            // The owner of the I/O forwards its completion.
            TaskState::Io | TaskState::Ended | TaskState::Aborted(_) => {}
        }
    }

    /// Another connection has taken over a task.
    pub(super) fn on_task_reassigned(&mut self, reassigned: &ReassignedTask) {
        let ReassignedTask { slot, data_in, memory } = *reassigned;
        self.connection.task_count = self.connection.task_count.saturating_sub(1);
        self.connection.data_in_expected = self.connection.data_in_expected.saturating_sub(data_in);
        self.connection.data_out_memory = self.connection.data_out_memory.saturating_sub(memory);
        self.connection.queue.forget(|other| other == slot);
    }

    /// Starts an orderly stop. A discovery session has no commands to finish and is dropped
    /// immediately.
    pub(super) fn on_stop(&mut self) {
        if self.connection.is_failed {
            return self.end();
        }
        if self.connection.logout.has_begun() || self.connection.is_over {
            return;
        }
        if matches!(self.session.kind, TargetSessionKind::Discovery) {
            return self.drop_initiator();
        }
        self.connection.logout = LogoutProgress::Asked(None);
        let window = self.session.window;
        self.connection.replies.event(window, AsyncEvent::LOGOUT_REQUEST, [0, 0, LOGOUT_SECONDS]);
    }

    /// Checks the deadline of a requested logout.
    pub(super) fn check_logout_deadline(&mut self, now: Instant) {
        let LogoutProgress::Asked(until) = self.connection.logout else { return };
        if self.connection.task_count > 0 {
            return;
        }
        let timeout = Duration::from_secs(LOGOUT_SECONDS.into());
        match until {
            None => self.connection.logout = LogoutProgress::Asked(now.checked_add(timeout)),
            Some(until) if now >= until => self.drop_initiator(),
            Some(_) => {}
        }
    }

    fn drop_initiator(&mut self) {
        self.connection.logout = LogoutProgress::Dropping;
        let (wait, retain) = self.session_times();
        let window = self.session.window;
        self.connection.replies.event(window, AsyncEvent::SESSION_DROP, [0, wait, retain]);
    }
}

/// Interval of checks whether a failed connection is still needed.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Time for a logout, in seconds. Initiators that log out at all do so within milliseconds, and the
/// message cannot carry less.
const LOGOUT_SECONDS: u16 = 1;
