//! How a connection ends, and what it does for the others of its session (RFC 7143 §6.3.4, §7.1.4,
//! §7.2.2, §11.5, §11.9.1).
//!
//! *A connection that is lost.* Up to error recovery level 1 a session does nothing more then:
//! commands that were on their way there leave a gap in CmdSN that nobody fills. Its tasks end at
//! once. If there is no other connection, its nexus is kept as long as was agreed on
//! (DefaultTime2Retain, the session state timeout of RFC 7143 §13.15): what the initiator has
//! reserved, and that the medium may not be removed, lasts until then or until it logs in again. A
//! connection that is logged out leaves no gap.
//!
//! *Tasks that outlive their connection*, at error recovery level 2:
//! ```text
//!   active ──── lost, or removed for recovery ────▶ failed ──── its time is over ────▶ over
//!                                                     │
//!                         task ◀─── TASK REASSIGN ────┘
//! ```
//! A connection that has *failed* has no socket any more, but its driver goes on: I/O that it has
//! begun completes there, and what follows from that is done there, too. Only answers are *parked*:
//! those that could not be sent, and those that were and are not acknowledged. Data-out stops where
//! it was. TASK REASSIGN gives a task to the connection that brings it: an answer is sent from
//! ExpDataSN on, and what is missing of data-out is asked for. What fails is kept for
//! DefaultTime2Wait and DefaultTime2Retain, and so is a session without any other connection, at
//! lower levels without tasks and for nobody to join. Of one session, as many connections may have
//! failed as may be active; then the oldest of them is given up.
//!
//! *A target that stops* takes leave of its initiator:
//! ```text
//!   stop ──▶ asked to log out ── logs out ─────────────────────────▶ closed
//!              (AsyncEvent 1) └─ is idle, and does not, for as ──▶ dropped ──▶ closed when nothing is in flight
//!                                long as Parameter3 has told        (AsyncEvent 3)
//! ```
//! Meanwhile what is in flight comes to its end, and new commands are answered BUSY: an initiator
//! tries those again, and finds the target that has been started anew or another path. The time
//! counts from when nothing is in flight, so that an initiator which waits for its commands before
//! it logs out need not hurry. Each connection is asked by itself, and a logout that closes the
//! session ends them all.

use super::connection::Connection;
use super::full::ConnectionTurn;
use super::receive::AwaitedIscsiPdu;
use super::shared::ConnectionEvent;
use super::tasks::TaskState;
use crate::iscsi::login::target::Session;
use crate::scsi::task_set::{TaskEvent, TaskRouter};
use blockmux_wire::iscsi::BHS_LEN;
use blockmux_wire::iscsi::scsi::{FunctionResponse, TaskManagementRequest};
use blockmux_wire::iscsi::session::{AsyncEvent, LogoutResult};
use std::time::{Duration, Instant};

/// What a task takes along to another connection.
pub(super) struct Adopted {
    slot: usize,
    /// As it counts for the connections, in bytes.
    data_in: usize,
    memory: usize,
}

/// How far the leave-taking of a connection is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum LogoutProgress {
    /// Nobody leaves.
    #[default]
    No,
    /// The initiator was asked to log out, and has until then; `None` until somebody says what time
    /// it is, and nothing is in flight.
    Asked(Option<Instant>),
    /// It was told that there is no more time: the connection is closed as soon as nothing is in
    /// flight.
    Dropping,
}

impl LogoutProgress {
    pub(super) fn has_begun(self) -> bool {
        self != LogoutProgress::No
    }
}

impl Connection {
    /// When to look whether the initiator has had its time to log out.
    pub(super) fn logs_out_at(&self) -> Option<Instant> {
        match self.logout {
            LogoutProgress::Asked(until) if self.live == 0 => Some(until.unwrap_or(self.now)),
            _ => None,
        }
    }
}

impl ConnectionTurn<'_> {
    /// A turn of the driver begins.
    #[inline]
    pub(super) fn on_turn(&mut self) {
        if self.session.was_called(self.connection.key) {
            self.read_events();
            self.deliver_early();
        }
        self.resume_functions();
        if !self.connection.grants.is_empty() {
            self.resume_grants();
        }
        // The pool may have woken this connection.
        self.take_memory();
    }

    /// Does what others have left for this connection.
    pub(super) fn read_events(&mut self) {
        while let Some(mail) = self.session.next_event(self.connection.key) {
            match mail {
                ConnectionEvent::Task(event) => {
                    // Data of a task that is about to go is for nobody.
                    if let TaskEvent::Drop(slot, _) = event
                        && self.connection.awaiting.slot() == Some(slot)
                    {
                        self.connection.awaiting.discard();
                    }
                    self.on_event(event);
                }
                ConnectionEvent::End(reply) => {
                    self.connection.tells_end_to = reply;
                    self.end();
                }
                ConnectionEvent::Fail(reply) => self.fail_connection(reply),
                ConnectionEvent::Adopted(adopted) => self.on_adopted(&adopted),
                ConnectionEvent::Lost(cid) => self.announce_loss(cid),
                ConnectionEvent::LoggedOut(itt) => self.log_out(itt, LogoutResult::CLOSED_SUCCESSFULLY),
            }
        }
    }

    /// The initiator has left without a logout, or the connection is broken.
    pub(super) fn lose_connection(&mut self) {
        let is_leaving = self.connection.logout.has_begun() || self.session.is_unwanted();
        let keeps_tasks = self.connection.level > 1 && !is_leaving;
        if keeps_tasks && !self.connection.is_closed() {
            self.fail_connection(None);
            self.session.announce_loss(self.connection.cid);
        } else if !keeps_tasks && !self.connection.is_over {
            // Over RDMA nothing outlives the queue pair.
            let is_kept = self.times().1 > 0 && self.connection.replies.mover.is_none();
            if is_leaving || !is_kept || !self.session.is_alone(self.connection.key) {
                self.end_session();
            } else {
                self.retain_session();
            }
        }
    }

    /// Tells the initiator that a connection was lost (RFC 7143 §11.9.1).
    fn announce_loss(&mut self, cid: u16) {
        if !self.connection.is_closed() {
            let (wait, retain) = self.times();
            let parameters = [cid, wait, retain];
            let window = self.session.window;
            self.connection.replies.event(window, AsyncEvent::CONNECTION_DROP, parameters);
        }
    }

    /// This connection and all others of the session are over: nothing more is answered.
    pub(super) fn end_session(&mut self) {
        self.session.end(self.connection.key);
        self.end();
    }

    /// This connection is over: nothing more is answered on it.
    pub(super) fn end(&mut self) {
        if std::mem::replace(&mut self.connection.is_over, true) {
            return;
        }
        let key = self.connection.key;
        self.read_events();
        self.session.is_ending(key);
        self.session.early.forget(key);
        self.abort_tasks(|entry| entry.owner == key, None);
        self.forget_functions();
        self.session.forget_parked(key);
    }

    /// Leaves the session once nothing of this connection reaches a volume any more.
    #[cold]
    pub(super) fn leave(&mut self) {
        if self.connection.live > 0 || std::mem::replace(&mut self.connection.has_left, true) {
            return;
        }
        self.session.remove_link(self.connection.key);
        if let Some((key, itt)) = self.connection.tells_end_to.take() {
            self.session.post(key, ConnectionEvent::LoggedOut(itt));
        }
    }

    /// The connection is lost, or removed for recovery: its tasks stay. `reply` is told when that
    /// is so.
    pub(super) fn fail_connection(&mut self, reply: Option<(u32, u32)>) {
        if !self.connection.is_over && !std::mem::replace(&mut self.connection.is_failed, true) {
            self.park();
            self.session.on_failed(self.connection.key);
        }
        if let Some((key, itt)) = reply {
            self.session.post(key, ConnectionEvent::LoggedOut(itt));
        }
    }

    /// Below level 2, the only connection is lost: its tasks are over, and the session's nexus
    /// stays.
    pub(super) fn retain_session(&mut self) {
        let key = self.connection.key;
        self.connection.is_failed = true;
        self.session.retain(key);
        self.session.early.forget(key);
        self.abort_tasks(|_| true, None);
        self.forget_functions();
        self.connection.awaiting = AwaitedIscsiPdu::Head(BHS_LEN);
        self.connection.gathering.1 = None;
        self.connection.look_at = self.connection.now;
    }

    fn park(&mut self) {
        let key = self.connection.key;
        self.session.early.forget(key);
        self.forget_functions();
        self.connection.awaiting = AwaitedIscsiPdu::Head(BHS_LEN);
        self.connection.gathering.1 = None;
        self.connection.grants.clear();
        self.connection.look_at = self.connection.now;
        for outcome in self.connection.replies.take_commands() {
            self.session.park(key, outcome);
        }
        for slot in self.session.tasks.select(|entry| entry.owner == key) {
            let Some(entry) = self.session.tasks.get_mut(slot) else { continue };
            entry.progress.transfer.interrupt();
            match entry.state {
                TaskState::Data => self.go_on(slot),
                TaskState::Ended => self.end_if_closed(slot),
                TaskState::Io | TaskState::Wait | TaskState::Aborted(_) => {}
            }
        }
    }

    /// Looks whether what has failed is still to be kept.
    pub(super) fn linger(&mut self, now: Instant) {
        let (wait, retain) = self.times();
        let time = Duration::from_secs(u64::from(wait).saturating_add(retain.into()));
        let until =
            *self.connection.lingers_until.get_or_insert_with(|| now.checked_add(time).unwrap_or(now));
        self.connection.look_at = now.checked_add(LOOK_INTERVAL).unwrap_or(now);
        if now >= until || self.session.is_unwanted() || !self.is_needed() {
            self.end();
        }
    }

    /// Whether anything of a failed connection may be asked for still.
    fn is_needed(&self) -> bool {
        self.connection.live > 0 || self.session.has_parked(self.connection.key) || !self.session.is_active()
    }

    /// TASK REASSIGN (RFC 7143 §11.5.1). The answer goes first: only then the task is this
    /// connection's.
    pub(super) fn reassign(&mut self, request: &TaskManagementRequest) {
        let (itt, referenced) = (request.initiator_task_tag.get(), request.referenced_task_tag.get());
        let exp_data_sn = request.exp_data_sn.get();
        let found = self.session.tasks.find(referenced);
        let owner = found.and_then(|slot| self.session.tasks.get_mut(slot)).map(|entry| entry.owner);
        if let (Some(slot), Some(owner)) = (found, owner) {
            if !self.session.has_failed(owner) {
                return self.respond(itt, FunctionResponse::TASK_STILL_ALLEGIANT);
            }
            self.respond(itt, FunctionResponse::FUNCTION_COMPLETE);
            return self.adopt(slot, owner, exp_data_sn);
        }
        match self.session.take_parked(referenced) {
            Some(outcome) => {
                self.respond(itt, FunctionResponse::FUNCTION_COMPLETE);
                let window = self.session.window;
                self.connection.replies.reassigned(window, outcome, exp_data_sn);
            }
            None => self.respond(itt, FunctionResponse::TASK_DOES_NOT_EXIST),
        }
    }

    fn adopt(&mut self, slot: usize, from: u32, exp_data_sn: u32) {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let data_in = super::command::bounded(entry.progress.data_in.unwrap_or(0));
        let adopted = Adopted { slot, data_in, memory: entry.progress.memory };
        entry.owner = self.connection.key;
        self.connection.live = self.connection.live.saturating_add(1);
        self.connection.reading = self.connection.reading.saturating_add(data_in);
        self.connection.granted = self.connection.granted.saturating_add(adopted.memory);
        entry.progress.transfer.resume_at(exp_data_sn);
        let state = entry.state;
        self.session.post(from, ConnectionEvent::Adopted(adopted));
        match state {
            TaskState::Data => self.go_on(slot),
            TaskState::Wait => self.connection.queue.wait(slot),
            // Its completion is handed on.
            TaskState::Io | TaskState::Ended | TaskState::Aborted(_) => {}
        }
    }

    /// Another connection has taken a task.
    pub(super) fn on_adopted(&mut self, adopted: &Adopted) {
        let Adopted { slot, data_in, memory } = *adopted;
        self.connection.live = self.connection.live.saturating_sub(1);
        self.connection.reading = self.connection.reading.saturating_sub(data_in);
        self.connection.granted = self.connection.granted.saturating_sub(memory);
        self.connection.queue.forget(|other| other == slot);
    }

    /// The target stops. A discovery session has nothing to bring to an end, and is dropped at
    /// once.
    pub(super) fn on_stop(&mut self) {
        if self.connection.is_failed {
            return self.end();
        }
        if self.connection.logout.has_begun() || self.connection.is_over {
            return;
        }
        if matches!(self.session.kind, Session::Discovery) {
            return self.drop_initiator();
        }
        self.connection.logout = LogoutProgress::Asked(None);
        let window = self.session.window;
        self.connection.replies.event(window, AsyncEvent::LOGOUT_REQUEST, [0, 0, SECONDS_TO_LOG_OUT]);
    }

    /// Time passes for an initiator that was asked to log out.
    pub(super) fn part(&mut self, now: Instant) {
        let LogoutProgress::Asked(until) = self.connection.logout else { return };
        if self.connection.live > 0 {
            return;
        }
        let patience = Duration::from_secs(SECONDS_TO_LOG_OUT.into());
        match until {
            None => self.connection.logout = LogoutProgress::Asked(now.checked_add(patience)),
            Some(until) if now >= until => self.drop_initiator(),
            Some(_) => {}
        }
    }

    fn drop_initiator(&mut self) {
        self.connection.logout = LogoutProgress::Dropping;
        let (wait, retain) = self.times();
        let window = self.session.window;
        self.connection.replies.event(window, AsyncEvent::SESSION_DROP, [0, wait, retain]);
    }
}

/// How often a failed connection looks whether it is still needed.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Whoever means to log out does so within milliseconds, and a daemon that is told to stop is to be
/// gone soon: the shortest time that a message can name.
const SECONDS_TO_LOG_OUT: u16 = 1;
