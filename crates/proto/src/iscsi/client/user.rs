//! The user's side of a session: requests, completions, and the list of connections.

use super::connection::{ConnectionPhase, InitiatorConnection};
use super::datamover::InitiatorDatamover;
use super::login::LoginExchange;
use super::{IscsiInitiatorSession, SessionPurpose};
use crate::driver::session::{Connections, Initiator, Overdue, PathRank};
use crate::driver::transport::TransportInfo;
use crate::iscsi::login::initiator::ConnectionJoin;
use blockmux_volume::{Completion, Io, IoError};
use std::time::{Duration, Instant};

impl Initiator for IscsiInitiatorSession {
    fn is_ready(&self) -> bool {
        self.unit.is_some() && self.purpose == SessionPurpose::Use
    }

    /// At most the free part of the target's command window.
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

    /// Excludes completions that were not polled yet. Includes requests that were not sent before
    /// the target requested a logout.
    fn take_unfinished(&mut self) -> Vec<Io> {
        self.connections.iter_mut().for_each(|connection| {
            connection.sender.clear();
            connection.phase = ConnectionPhase::Over;
            // The queue pairs are gone, so the target can no longer access the memory of these
            // requests.
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
            // Before the login there is no session to log out from.
            None => {
                self.connections.iter_mut().for_each(|connection| connection.phase = ConnectionPhase::Over)
            }
        }
    }
}

impl Overdue for IscsiInitiatorSession {
    fn tick(&mut self) -> u32 {
        self.full.as_mut().map_or(0, |full| full.tick())
    }

    fn abort_overdue(&mut self, ticks: u32) -> Option<&'static str> {
        self.full.as_mut()?.abort_overdue(ticks, &mut self.connections)
    }
}

impl Connections for IscsiInitiatorSession {
    #[inline]
    fn poll_connect(&mut self) -> Option<(usize, Instant)> {
        if self.connections.len() == 1
            && !matches!(self.connections.first()?.phase, ConnectionPhase::Scheduled { .. })
        {
            return None;
        }
        let may_add_connections = self.is_ready() && self.full.as_ref()?.may_add_connections();
        // The tasks of a lost connection end only over its replacement, even while the session
        // stops.
        let is_scheduled = |connection: &InitiatorConnection| {
            matches!(connection.phase, ConnectionPhase::Scheduled { .. })
                && (may_add_connections || connection.recovery.by.is_some())
        };
        let (place, connection) =
            self.connections.iter_mut().enumerate().find(|(_, connection)| is_scheduled(connection))?;
        let ConnectionPhase::Scheduled { at } =
            std::mem::replace(&mut connection.phase, ConnectionPhase::Connecting)
        else {
            return None;
        };
        Some((place, at))
    }

    fn on_connected(&mut self, connection: usize, _transport: &TransportInfo, now: Instant) {
        self.set_connected(connection, true);
        let (Some(full), Some(connection)) = (&self.full, self.connections.get_mut(connection)) else {
            return;
        };
        let joining = ConnectionJoin {
            tsih: self.logins.tsih,
            cid: connection.cid,
            cmd_sn: full.cmd_sn,
            exp_stat_sn: connection.statuses.expected(),
        };
        let login = LoginExchange::start(self.logins.next().joining(joining), &mut connection.sender);
        connection.phase = ConnectionPhase::Login(Box::new(login));
        connection.keep_alive.next = now;
    }

    fn on_lost(&mut self, connection: usize, now: Instant) -> bool {
        self.set_connected(connection, false);
        let others_are_open =
            self.connections.iter().enumerate().any(|(place, other)| place != connection && other.is_open());
        let (Some(full), Some(connection)) = (&mut self.full, self.connections.get_mut(connection)) else {
            return false;
        };
        full.on_connection_lost(connection, others_are_open, now)
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
