//! A queue pair for tests of sessions. It records work requests and transfers nothing.

use super::{QueuePair, RdmaSession, WorkRequest};
use std::collections::VecDeque;

/// Records the work requests of a session. The test answers them with events.
#[derive(Debug)]
pub struct Recorder {
    /// Recorded work requests, oldest first.
    pub works: VecDeque<WorkRequest>,
    /// How many further sends, reads and writes the session may post.
    pub room: usize,
    /// Whether the peer should leave the keys of this side's memory valid.
    pub keeps_keys: bool,
}

impl Default for Recorder {
    /// A recorder without room, which does not allocate for the first thousand requests.
    fn default() -> Recorder {
        Recorder { works: VecDeque::with_capacity(1024), room: 0, keeps_keys: false }
    }
}

impl Recorder {
    /// The next work request of `session`. If none is recorded, the session may post `room` new
    /// ones.
    pub fn next(&mut self, session: &mut impl RdmaSession, room: usize) -> Option<WorkRequest> {
        self.room = room;
        while self.works.is_empty() && session.work(self) {}
        self.works.pop_front()
    }
}

impl QueuePair for Recorder {
    fn room(&self) -> usize {
        self.room
    }

    fn is_invalidated_by_peers(&self) -> bool {
        !self.keeps_keys
    }

    /// # Panics
    /// If a transfer is posted without room.
    fn post(&mut self, work: WorkRequest) {
        if matches!(work, WorkRequest::Send { .. } | WorkRequest::Read { .. } | WorkRequest::Write { .. }) {
            assert!(self.room > 0, "posted without room: {work:?}");
            self.room = self.room.saturating_sub(1);
        }
        self.works.push_back(work);
    }
}
