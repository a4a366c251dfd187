//! The user's side of a session: I/O requests and completions, and the session's connections.

use super::channel::{InitiatorChannelPhase, RdmaChannel};
use super::{Ending, LOGIN_TIMEOUT, SrpInitiatorSession, SrpSessionMode};
use crate::driver::session::{Connections, Initiator, PathRank};
use crate::driver::transport::TransportInfo;
use blockmux_volume::{Completion, Io};
use std::time::Instant;

impl Initiator for SrpInitiatorSession {
    fn is_ready(&self) -> bool {
        self.unit().is_some() && self.config.mode == SrpSessionMode::Use
    }

    /// Number of further I/O, at most as many as the target grants requests for.
    #[inline]
    fn room(&self) -> usize {
        if self.ending != Ending::No || !self.is_ready() {
            return 0;
        }
        let granted = self.channels.iter().map(|channel| channel.room() as usize).sum::<usize>();
        self.queue.room().min(granted.saturating_sub(self.queue.unsent()))
    }

    #[inline]
    fn submit(&mut self, io: Io) {
        self.queue.submit(io);
        self.send_commands();
    }

    #[inline]
    fn poll_done(&mut self) -> Option<Completion> {
        self.queue.poll_done()
    }

    #[inline]
    fn poll_returned(&mut self) -> Option<Io> {
        self.queue.poll_returned()
    }

    /// Returns all I/O without a completion. I/O that has completed and was not polled yet is not
    /// among them.
    fn take_unfinished(&mut self) -> Vec<Io> {
        self.ending = Ending::Over;
        self.channels.iter_mut().for_each(RdmaChannel::clear);
        self.queue.take_unfinished()
    }

    fn poll_size(&mut self) -> Option<u64> {
        self.queue.poll_size()
    }

    fn resize(&mut self, size: u64) {
        self.queue.resize(size);
    }

    #[inline]
    fn path_rank(&self) -> PathRank {
        self.queue.path_rank()
    }

    fn on_stop(&mut self) {
        self.stop();
        self.advance();
    }
}

impl Connections for SrpInitiatorSession {
    #[inline]
    fn poll_connect(&mut self) -> Option<(usize, Instant)> {
        if self.channels.len() == 1 || !self.is_used() {
            return None;
        }
        let is_wanted = |channel: &RdmaChannel| channel.phase == InitiatorChannelPhase::Wanted;
        let (index, channel) =
            self.channels.iter_mut().enumerate().find(|(_, channel)| is_wanted(channel))?;
        channel.phase = InitiatorChannelPhase::Connecting;
        channel.deadline = self.now.checked_add(LOGIN_TIMEOUT).unwrap_or(self.now);
        Some((index, self.now))
    }

    /// Sets the deadline of the login. Nothing is sent: the connection request carried the login.
    fn on_connected(&mut self, connection: usize, _transport: &TransportInfo, now: Instant) {
        self.now = now;
        if let Some(channel) = self.channels.get_mut(connection) {
            channel.deadline = now.checked_add(LOGIN_TIMEOUT).unwrap_or(now);
        }
    }

    /// Continues without a further channel that could not be opened; returns whether the session
    /// continues.
    fn on_lost(&mut self, connection: usize, now: Instant) -> bool {
        self.now = now;
        let Some(channel) = self.channels.get_mut(connection) else { return false };
        let had_commands = channel.was_open();
        channel.clear();
        connection > 0 && !had_commands && self.ending != Ending::Over
    }

    #[inline]
    fn latest(&self) -> usize {
        self.latest.0
    }

    #[inline]
    fn is_awaited(&self, connection: usize) -> bool {
        self.channels
            .get(connection)
            .is_none_or(|channel| channel.commands.in_flight() > 0 || !channel.is_open())
    }
}
