//! What a connection does for the others of its session, and how it ends (RFC 7143 §6.3.4, §7.1.4).
//!
//! Up to error recovery level 1 a session does nothing more when one of its connections is lost: commands that were on
//! their way there leave a gap in CmdSN that nobody fills. Its tasks end at once. If there is no other connection, its
//! nexus is kept as long as was agreed on (DefaultTime2Retain, the session state timeout of RFC 7143 §13.15): what the
//! initiator has reserved, and that the medium may not be removed, lasts until then or until it logs in again. A connection that
//! is logged out leaves no gap.

use super::full::Turn;
use super::shared::Mail;
use crate::scsi::task_set::{TaskEvent, TaskRouter};
use blockmux_wire::iscsi::session::{AsyncEvent, LogoutResult};

impl Turn<'_> {
    /// A turn of the driver begins.
    #[inline]
    pub(super) fn on_turn(&mut self) {
        if self.session.was_called(self.connection.key) {
            self.read_mail();
            self.deliver_early();
        }
        self.resume_functions();
        if !self.connection.grants.is_empty() {
            self.resume_grants();
        }
    }

    /// Does what others have left for this connection.
    pub(super) fn read_mail(&mut self) {
        while let Some(mail) = self.session.next_mail(self.connection.key) {
            match mail {
                Mail::Task(event) => {
                    // Data of a task that is about to go is for nobody.
                    if let TaskEvent::Drop(slot, _) = event
                        && self.connection.awaiting.slot() == Some(slot)
                    {
                        self.connection.awaiting.discard();
                    }
                    self.on_event(event);
                }
                Mail::End(reply) => {
                    self.connection.tells_end_to = reply;
                    self.end();
                }
                Mail::Fail(reply) => self.fail_connection(reply),
                Mail::Adopted(adopted) => self.on_adopted(&adopted),
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
}
