//! What a connection does for the others of its session, and how it ends (RFC 7143 §6.3.4, §7.1.4).
//!
//! Up to error recovery level 1 a session does nothing more when one of its connections is lost: commands that were on
//! their way there leave a gap in CmdSN that nobody fills. Its tasks end at once. If there is no other connection, its
//! nexus is kept as long as was agreed on (DefaultTime2Retain, the session state timeout of RFC 7143 §13.15): what the
//! initiator has reserved, and that the medium may not be removed, lasts until then or until it logs in again. A connection that
//! is logged out leaves no gap.

use super::full::Turn;
use super::shared::Mail;
use super::tasks::{Entry, State};
use blockmux_volume::{Completion, IoError, Tag};
use blockmux_wire::iscsi::session::{AsyncEvent, LogoutResult};

impl Turn<'_> {
    /// A turn of the driver begins.
    #[inline]
    pub(super) fn on_turn(&mut self) {
        if self.session.was_called(self.connection.key) {
            self.read_mail();
            self.deliver_early();
        }
        if !self.connection.drains.is_empty() {
            self.resume_functions();
        }
        if !self.connection.grants.is_empty() {
            self.resume_grants();
        }
    }

    /// Does what others have left for this connection.
    pub(super) fn read_mail(&mut self) {
        while let Some(mail) = self.session.next_mail(self.connection.key) {
            match mail {
                Mail::Cancel(slot) => self.cancel(slot),
                Mail::Drop(slot, function) => {
                    self.let_go(slot);
                    self.drop_task(slot);
                    self.on_aborted(function);
                }
                Mail::FunctionDone(done) => self.complete(done),
                Mail::End(reply) => {
                    self.connection.tells_end_to = reply;
                    self.end();
                }
                Mail::Fail(reply) => self.fail_connection(reply),
                Mail::Adopted(adopted) => self.on_adopted(&adopted),
                Mail::Completed(done) => self.on_completion(done),
                Mail::Lost(cid) => self.announce_loss(cid),
                Mail::LoggedOut(itt) => self.log_out(itt, LogoutResult::CLOSED_SUCCESSFULLY),
            }
        }
    }

    /// The initiator has left without a logout, or the connection is broken.
    pub(super) fn lose_connection(&mut self) {
        let is_leaving = self.connection.parting.has_begun() || self.session.is_unwanted();
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
            self.connection.replies.event(self.outbox, window, AsyncEvent::CONNECTION_DROP, parameters);
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
        self.read_mail();
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
            self.session.post(key, Mail::LoggedOut(itt));
        }
    }

    /// The driver has dropped what was in flight: nothing of it will complete.
    pub(super) fn abandon(&mut self) {
        let key = self.connection.key;
        for slot in self.session.tasks.slots_in_flight_at(key) {
            let tag = Tag(slot as u64);
            self.on_completion(Completion { tag, result: Err(IoError::PathLost) });
        }
        for slot in self.session.tasks.slots_of(key) {
            let Some(entry) = self.session.tasks.get_mut(slot) else { continue };
            if entry.in_flight_at.is_some() {
                // That connection frees its place.
                entry.owner = 0;
                continue;
            }
            let state = entry.state;
            self.drop_task(slot);
            if let State::Aborted(function) = state {
                self.on_aborted(function);
            }
        }
    }

    fn cancel(&mut self, slot: usize) {
        let entry = self.session.tasks.get_mut(slot);
        // Its I/O may have completed since.
        let key = self.connection.key;
        let is_meant =
            |entry: &&mut Entry| matches!(entry.state, State::Aborted(_)) && entry.in_flight_at == Some(key);
        if let Some(entry) = entry.filter(is_meant) {
            self.connection.cancels.push_back((entry.volume, Tag(slot as u64)));
        }
    }

    /// A task that is about to go: nothing waits for it, and data that is on its way is for nobody.
    fn let_go(&mut self, slot: usize) {
        self.connection.grants.retain(|other| *other != slot);
        self.connection.waiting.retain(|other| *other != slot);
        self.connection.pausing.retain(|pausing| pausing.slot != slot);
        if self.connection.awaiting.slot() == Some(slot) {
            self.connection.awaiting.discard();
        }
    }
}
