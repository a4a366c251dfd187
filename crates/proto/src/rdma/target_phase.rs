//! The connection of a target: it answers the connection request, and ends the connection.

use super::QueuePair;

/// State of a target's connection.
pub(crate) enum TargetPhase {
    /// The session has not answered a connection request.
    Listening,
    /// The connection has to be accepted, with this private data.
    Accepting {
        /// Receive buffers to post in addition to those of the endpoint.
        receives: u32,
        private_data: Vec<u8>,
    },
    /// The connection has to be rejected with this private data.
    Rejecting(Vec<u8>),
    Open,
    /// The session has rejected the connection, or has asked the queue pair to disconnect.
    Ending,
    Over,
}

impl TargetPhase {
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        matches!(self, TargetPhase::Open)
    }

    /// Posts the answer to the connection request, or disconnects if the session stops before there
    /// was one. Returns whether anything was posted.
    pub(crate) fn answer(&mut self, queue_pair: &mut impl QueuePair, is_stopping: bool) -> bool {
        match std::mem::replace(self, TargetPhase::Ending) {
            TargetPhase::Accepting { receives, private_data } => {
                queue_pair.receive(receives);
                queue_pair.accept(private_data);
                *self = TargetPhase::Open;
            }
            TargetPhase::Rejecting(private_data) => queue_pair.reject(private_data),
            TargetPhase::Listening if is_stopping => queue_pair.disconnect(),
            phase => {
                *self = phase;
                return false;
            }
        }
        true
    }

    /// Ends the connection after all posted work.
    pub(crate) fn disconnect(&mut self, queue_pair: &mut impl QueuePair) {
        queue_pair.disconnect();
        *self = TargetPhase::Ending;
    }
}
