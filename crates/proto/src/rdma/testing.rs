//! A queue pair that carries nothing and keeps what it was asked, for the tests of sessions.

use super::{QueuePair, RdmaSession, WorkRequest};
use std::collections::VecDeque;

/// Records what a session asks. The test answers it by events.
#[derive(Debug)]
pub struct Recorder {
    /// What was asked and not looked at yet, oldest first.
    pub works: VecDeque<WorkRequest>,
    /// How many sends, reads and writes are still taken.
    pub room: usize,
}

impl Default for Recorder {
    /// A recorder without room, which does not allocate for the first thousand requests.
    fn default() -> Recorder {
        Recorder { works: VecDeque::with_capacity(1024), room: 0 }
    }
}

impl Recorder {
    /// The next thing that `session` asks. If nothing is recorded, the session is asked with that
    /// much room.
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
