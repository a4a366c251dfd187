//! Selection of the connection for the next commands.

use super::config::BurstSize;
use super::connection::InitiatorConnection;
use crate::scsi::initiator::DataTransfer;

/// A burst: consecutive commands on one connection. Alternating with each command is six times
/// slower at 4 KiB, because the target must execute commands in the order of CmdSN and would switch
/// connections for each. A further connection is useful only when this one has a whole burst in
/// flight.
#[derive(Clone, Copy)]
pub(super) struct CommandBurst {
    /// Index of the connection.
    pub(super) connection: usize,
    /// Number of commands sent, and their payload in bytes.
    commands: u32,
    bytes: u32,
    size: BurstSize,
}

impl CommandBurst {
    /// The first burst, on the leading connection.
    pub(super) fn first(size: BurstSize) -> CommandBurst {
        CommandBurst { connection: 0, commands: 0, bytes: 0, size }
    }

    /// The burst for the next command. When a burst is complete and none of it was answered, a new
    /// one starts on the connection with the fewest commands in flight.
    #[inline]
    pub(super) fn next(self, connections: &[InitiatorConnection]) -> Option<CommandBurst> {
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

    /// A new burst on this connection.
    #[inline]
    fn on(self, connection: usize) -> CommandBurst {
        CommandBurst { connection, ..CommandBurst::first(self.size) }
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
