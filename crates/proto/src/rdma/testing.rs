//! A queue pair for tests of sessions. It records work requests and transfers nothing.

use super::{QueuePair, RdmaSession, Remote, Stag, WorkRequest};
use blockmux_volume::{Memory, Seg};
use std::collections::{BTreeMap, VecDeque};

/// Records the work requests of a session. The test answers them with events.
#[derive(Debug)]
pub struct Recorder {
    /// Recorded work requests, oldest first.
    pub works: VecDeque<WorkRequest>,
    /// How many further sends, reads and writes the session may post.
    pub room: usize,
    /// Whether the peer should leave the keys of this side's memory valid.
    pub keeps_keys: bool,
    /// Registrations without memory, with the data that the peer writes; `None` if there are none.
    pub unbacked: Option<UnbackedRegions>,
}

/// Data of registrations without memory, by tag ([`QueuePair::register_unbacked`]).
#[derive(Debug, Default)]
pub struct UnbackedRegions {
    data: BTreeMap<u32, Seg>,
    last: u32,
}

impl UnbackedRegions {
    /// Address at which each registration begins.
    pub const ADDRESS: u64 = 64;

    /// What the peer may write of this registration; `None` if the tag is not valid.
    #[must_use]
    pub fn get(&self, stag: Stag) -> Option<&Seg> {
        self.data.get(&stag.0)
    }

    /// Ends a registration, and returns what the peer has written.
    pub fn invalidate(&mut self, stag: Stag) -> Option<Seg> {
        self.data.remove(&stag.0)
    }

    /// Adds a registration of `len` bytes. Its tag is above those of tests, which count from 1.
    fn insert(&mut self, len: u32) -> Remote {
        self.last = self.last.wrapping_add(1) | 1 << 31;
        self.data.insert(self.last, Memory::from_heap(len as usize).seg(0, len as usize));
        Remote { stag: Stag(self.last), address: UnbackedRegions::ADDRESS, len }
    }
}

impl Default for Recorder {
    /// A recorder without room, which does not allocate for the first thousand requests.
    fn default() -> Recorder {
        Recorder { works: VecDeque::with_capacity(1024), room: 0, keeps_keys: false, unbacked: None }
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

    fn register_unbacked(&mut self, len: u32) -> Option<Remote> {
        self.unbacked.as_mut().map(|regions| regions.insert(len))
    }

    fn invalidate(&mut self, stag: Stag) -> Option<Seg> {
        let written = self.unbacked.as_mut().and_then(|regions| regions.invalidate(stag));
        if written.is_none() {
            self.post(WorkRequest::Invalidate { stag });
        }
        written
    }
}
