//! The user's side of a session: requests and completions, and the connections that it has for
//! them.

use super::connection::{ConnectionPhase, InitiatorConnection};
use super::datamover::InitiatorDatamover;
use super::login::LoginPhase;
use super::{InitiatorSession, Mode};
use crate::iscsi::login::initiator::Joining;
use crate::session::{Connections, Initiator, Overdue, PathRank};
use blockmux_volume::{Completion, Io, IoError};
use std::time::{Duration, Instant};

impl Initiator for InitiatorSession {
    fn is_ready(&self) -> bool {
        self.unit.is_some() && self.mode == Mode::Use
    }

    /// Not more than the target's window of commands has room for.
    #[inline]
    fn room(&self) -> usize {
        match &self.full {
            Some(full) if self.is_ready() => full.room(),
            _ => 0,
        }
    }

    #[inline]
    fn submit(&mut self, io: Io) {
        match &mut self.full {
            Some(full) => full.submit(io, &mut self.connections),
            None => self.failed.push_back(Completion { tag: io.tag, result: Err(IoError::PathLost) }),
        }
    }

    #[inline]
    fn poll_done(&mut self) -> Option<Completion> {
        match &mut self.full {
            Some(full) => full.poll_done(),
            None => self.failed.pop_front(),
        }
    }

    #[inline]
    fn poll_returned(&mut self) -> Option<Io> {
        self.full.as_mut()?.queue.poll_returned()
    }

    /// What has completed and was not polled yet is not among them. When the target asked for a
    /// logout, what was not sent until then is.
    fn take_unfinished(&mut self) -> Vec<Io> {
        self.connections.iter_mut().for_each(|connection| {
            connection.sender.clear();
            connection.phase = ConnectionPhase::Over;
            // The queue pairs are gone, and with them every way that the target had to what is
            // handed back.
            connection.mover.iter_mut().for_each(|mover| **mover = InitiatorDatamover::default());
        });
        self.full.as_mut().map_or_else(Vec::new, |full| full.take_unfinished())
    }

    fn poll_size(&mut self) -> Option<u64> {
        let full = self.full.as_mut()?;
        let size = full.queue.poll_size()?;
        self.unit = full.queue.unit().cloned();
        Some(size)
    }

    fn resize(&mut self, size: u64) {
        if let Some(full) = &mut self.full {
            full.queue.resize(size);
        }
    }

    #[inline]
    fn path_rank(&self) -> PathRank {
        self.full.as_ref().map_or(PathRank::Best, |full| full.queue.path_rank())
    }

    fn on_stop(&mut self) {
        self.is_stopping = true;
        match &mut self.full {
            Some(full) => full.stop(&mut self.connections),
            // Nothing is agreed on that could be ended in order.
            None => {
                self.connections.iter_mut().for_each(|connection| connection.phase = ConnectionPhase::Over)
            }
        }
    }
}

impl Overdue for InitiatorSession {
    fn look(&mut self) -> u32 {
        self.full.as_mut().map_or(0, |full| full.look())
    }

    fn abort_overdue(&mut self, looks: u32) -> Option<&'static str> {
        self.full.as_mut()?.abort_overdue(looks, &mut self.connections)
    }
}

impl Connections for InitiatorSession {
    #[inline]
    fn poll_connect(&mut self) -> Option<(usize, Instant)> {
        if self.connections.len() == 1
            && !matches!(self.connections.first()?.phase, ConnectionPhase::Wanted { .. })
        {
            return None;
        }
        let is_used = self.is_ready() && self.full.as_ref()?.is_used();
        // The tasks of one that was lost end only over another, however the session goes on.
        let is_wanted = |connection: &InitiatorConnection| {
            matches!(connection.phase, ConnectionPhase::Wanted { .. })
                && (is_used || connection.recovery.by.is_some())
        };
        let (place, connection) =
            self.connections.iter_mut().enumerate().find(|(_, connection)| is_wanted(connection))?;
        let ConnectionPhase::Wanted { at } =
            std::mem::replace(&mut connection.phase, ConnectionPhase::Dialing)
        else {
            return None;
        };
        Some((place, at))
    }

    fn on_connected(&mut self, connection: usize, now: Instant) {
        self.set_connected(connection, true);
        let (Some(full), Some(connection)) = (&self.full, self.connections.get_mut(connection)) else {
            return;
        };
        let joining = Joining {
            tsih: self.logins.tsih,
            cid: connection.cid,
            cmd_sn: full.cmd_sn,
            exp_stat_sn: connection.statuses.expected(),
        };
        let login = LoginPhase::start(self.logins.next().joining(joining), &mut connection.sender);
        connection.phase = ConnectionPhase::Login(Box::new(login));
        connection.ticks.next = now;
    }

    fn on_lost(&mut self, connection: usize, now: Instant) -> bool {
        self.set_connected(connection, false);
        let others_are_open =
            self.connections.iter().enumerate().any(|(place, other)| place != connection && other.is_open());
        let (Some(full), Some(connection)) = (&mut self.full, self.connections.get_mut(connection)) else {
            return false;
        };
        full.lose(connection, others_are_open, now)
    }

    #[inline]
    fn latest(&self) -> usize {
        self.full.as_ref().map_or(0, |full| full.burst.latest())
    }

    #[inline]
    fn is_awaited(&self, connection: usize) -> bool {
        self.connections
            .get(connection)
            .is_none_or(|connection| connection.in_flight > 0 || !connection.is_open())
    }

    fn reconnects_after(&self) -> Duration {
        self.full.as_ref().map_or(Duration::ZERO, |full| full.time2wait())
    }
}
