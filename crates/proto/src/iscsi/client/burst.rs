//! Which connection of a session the next commands go on.

use super::config::BurstSize;
use super::connection::InitiatorConnection;
use crate::scsi::initiator::DataTransfer;

/// Consecutive commands that go on one connection. To send each on another one would be fairer, and
/// six times slower at 4 KiB: the target may not begin a command before those with smaller numbers,
/// so that it would have to go from one connection to the next for each. For the same reason, and
/// because both sides have to look at each connection that is used, there is no use for another one
/// before this one has a whole burst under way.
#[derive(Clone, Copy)]
pub(super) struct Burst {
    /// Where they go.
    pub(super) connection: usize,
    /// How many have gone, and with how many bytes.
    commands: u32,
    bytes: u32,
    size: BurstSize,
}

impl Burst {
    /// The first.
    pub(super) fn first(size: BurstSize) -> Burst {
        Burst { connection: 0, commands: 0, bytes: 0, size }
    }

    /// As it is with the next command. When a burst is over and nothing of it was answered, that
    /// goes on the connection that has the least to do.
    #[inline]
    pub(super) fn next(self, connections: &[InitiatorConnection]) -> Option<Burst> {
        let takes = |connection: &InitiatorConnection| connection.is_open() && connection.has_credit();
        let is_over = self.commands >= self.size.commands || self.bytes >= self.size.bytes;
        match connections
            .get(self.connection)
            .filter(|connection| takes(connection))
            .map(|connection| connection.in_flight)
        {
            Some(in_flight) if !is_over && in_flight > 0 => Some(self),
            Some(in_flight) if !is_over || in_flight < self.commands => Some(self.on(self.connection)),
            _ => {
                let open = connections.iter().enumerate().filter(|(_, connection)| takes(connection));
                open.min_by_key(|(_, connection)| connection.in_flight)
                    .map(|(connection, _)| self.on(connection))
            }
        }
    }

    /// The next one.
    #[inline]
    fn on(self, connection: usize) -> Burst {
        Burst { connection, ..Burst::first(self.size) }
    }

    /// The connection of the last command.
    #[inline]
    pub(super) fn latest(&self) -> usize {
        self.connection
    }

    #[inline]
    pub(super) fn count(&mut self, transfer: &DataTransfer) {
        let len = match *transfer {
            DataTransfer::Nothing => 0,
            DataTransfer::In(len) | DataTransfer::Out(len) => len,
        };
        self.commands = self.commands.saturating_add(1);
        self.bytes = self.bytes.saturating_add(len);
    }
}
