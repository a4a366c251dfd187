//! Tasks that outlive their connection: error recovery level 2 (RFC 7143 §7.2.2, §11.5, §11.14).
//!
//! ```text
//!   active ──── lost, or removed for recovery ────▶ failed ──── its time is over ────▶ over
//!                                                     │
//!                         task ◀─── TASK REASSIGN ────┘
//! ```
//! A connection that has *failed* has no socket any more, but its driver goes on: I/O that it has begun completes there,
//! and what follows from that is done there, too. Only answers are *parked*: those that could not be sent, and those
//! that were and are not acknowledged. Data-out stops where it was. TASK REASSIGN gives a task to the connection that
//! brings it: an answer is sent from ExpDataSN on, and what is missing of data-out is asked for.
//!
//! What fails is kept for DefaultTime2Wait and DefaultTime2Retain, and so is a session without any other connection, at
//! lower levels without tasks and for nobody to join. Of
//! one session, as many connections may have failed as may be active; then the oldest of them is given up.

use super::full::Turn;
use super::receive::Awaiting;
use super::shared::Mail;
use super::tasks::State;
use crate::scsi::task_set::TaskRouter;
use blockmux_wire::iscsi::BHS_LEN;
use blockmux_wire::iscsi::scsi::{FunctionResponse, TaskManagementRequest};
use std::time::{Duration, Instant};

/// What a task takes along to another connection.
pub(super) struct Adopted {
    slot: usize,
    /// As it counts for the connections, in bytes.
    data_in: usize,
    memory: usize,
}

impl Turn<'_> {
    /// The connection is lost, or removed for recovery: its tasks stay. `reply` is told when that is so.
    pub(super) fn fail_connection(&mut self, reply: Option<(u32, u32)>) {
        if !self.connection.is_over && !std::mem::replace(&mut self.connection.is_failed, true) {
            self.park();
            self.session.on_failed(self.connection.key);
        }
        if let Some((key, itt)) = reply {
            self.session.post(key, Mail::LoggedOut(itt));
        }
    }

    /// Below level 2, the only connection is lost: its tasks are over, and the session's nexus stays.
    pub(super) fn retain_session(&mut self) {
        let key = self.connection.key;
        self.connection.is_failed = true;
        self.session.retain(key);
        self.session.early.forget(key);
        self.abort_tasks(|_| true, None);
        self.forget_functions();
        self.connection.awaiting = Awaiting::Head(BHS_LEN);
        self.connection.gathering.1 = None;
        self.connection.look_at = self.connection.retry_at;
    }

    fn park(&mut self) {
        let key = self.connection.key;
        self.session.early.forget(key);
        self.forget_functions();
        self.connection.awaiting = Awaiting::Head(BHS_LEN);
        self.connection.gathering.1 = None;
        self.connection.grants.clear();
        self.connection.look_at = self.connection.retry_at;
        for outcome in self.connection.replies.take_commands() {
            self.session.park(key, outcome);
        }
        for slot in self.session.tasks.select(|entry| entry.owner == key) {
            let Some(entry) = self.session.tasks.get_mut(slot) else { continue };
            entry.progress.transfer.interrupt();
            match entry.state {
                State::Data => self.go_on(slot),
                State::Ended => self.end_if_closed(slot),
                State::Io | State::Wait | State::Aborted(_) => {}
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

    /// TASK REASSIGN (RFC 7143 §11.5.1). The answer goes first: only then the task is this connection's.
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
        self.session.post(from, Mail::Adopted(adopted));
        match state {
            State::Data => self.go_on(slot),
            State::Wait => self.connection.queue.wait(slot),
            // Its completion is handed on.
            State::Io | State::Ended | State::Aborted(_) => {}
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
}

/// How often a failed connection looks whether it is still needed.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
