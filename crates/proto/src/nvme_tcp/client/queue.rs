//! The I/O queues of one controller that a session has: they read and write one namespace.
//!
//! ```text
//!   submit ──in turn──▶ Lane: I/O queue 1 ──▶ its connection
//!                  └──▶ Lane: I/O queue 2 ──▶ its connection      dialled once the first is connected
//! ```
//! All belong to the association of one admin queue, so that a flush on any of them is for what all have completed. A
//! queue that cannot be had is done without, but for the first; the loss of one that was there ends the session.

use super::lane::{Ending, Lane};
use super::{ControllerInfo, Digests, Names, NamespaceInfo, Refused};
use crate::nvme::auth::Credentials;
use crate::outbox::Outbox;
use crate::session::{Demand, Initiator, PathRank, ProtocolError, StreamSession, Timed};
use blockmux_volume::{Chunk, Completion, Io, IoError, Pool};
use std::collections::VecDeque;
use std::time::Instant;

/// What I/O queues are of.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// Who connects, and where to: as the admin queue did.
    pub names: Names,
    /// How we prove who we are, if we can.
    pub credentials: Option<Credentials>,
    /// The controller that the admin queue got.
    pub controller: ControllerInfo,
    /// The namespace.
    pub namespace: NamespaceInfo,
    /// How many, at least 1 and at most as many as the controller gives out.
    pub queues: u16,
    /// Entries to ask for, 2 to 1,024 for each; the controller may take less.
    pub entries: u16,
    /// What to ask for.
    pub digests: Digests,
}

/// I/O queues of one controller, from the first byte of the first on. Each is a lane of the session.
pub struct QueueSession {
    config: QueueConfig,
    pool: Pool,
    /// Lane 0.
    first: Lane,
    /// Those behind it, in order.
    further: Vec<Lane>,
    /// Whose bytes, outbox and deadlines are meant.
    selected: usize,
    /// Whose turn it is.
    next: usize,
    next_age: u64,
    has_other_paths: bool,
    is_stopping: bool,
    /// What was submitted when there was no queue to do it any more.
    failed: VecDeque<Completion>,
    now: Instant,
}

impl QueueSession {
    /// A session on a fresh connection. Reads without a buffer take memory from `pool` where nothing can be lent.
    #[must_use]
    pub fn new(config: QueueConfig, pool: Pool, now: Instant) -> QueueSession {
        let mut first = Lane::new(&config, 1, pool.clone(), now);
        first.begin(now);
        QueueSession {
            config,
            pool,
            first,
            further: Vec::new(),
            selected: 0,
            next: 0,
            next_age: 0,
            has_other_paths: false,
            is_stopping: false,
            failed: VecDeque::new(),
            now,
        }
    }

    /// There are other paths to the namespace: what this one cannot do now is for them ([`Initiator::poll_misplaced`]).
    #[must_use]
    pub fn with_other_paths(mut self) -> QueueSession {
        self.has_other_paths = true;
        self.lanes_mut().for_each(|lane| lane.queue.set_other_paths());
        self
    }

    /// Why the controller gives us no queue, if it does not.
    #[must_use]
    pub fn refused(&self) -> Option<&Refused> {
        self.first.queue.refused()
    }

    /// Whether the session has come to its end.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.lanes().all(|lane| lane.ending == Ending::Over)
    }

    /// The lane that is selected.
    #[inline]
    fn lane(&self) -> &Lane {
        self.at(self.selected).unwrap_or(&self.first)
    }

    #[inline]
    fn lane_mut(&mut self) -> &mut Lane {
        match self.selected.checked_sub(1).and_then(|at| self.further.get_mut(at)) {
            Some(lane) => lane,
            None => &mut self.first,
        }
    }

    #[inline]
    fn at(&self, lane: usize) -> Option<&Lane> {
        lane.checked_sub(1).map_or(Some(&self.first), |at| self.further.get(at))
    }

    #[inline]
    fn at_mut(&mut self, lane: usize) -> Option<&mut Lane> {
        match lane.checked_sub(1) {
            None => Some(&mut self.first),
            Some(at) => self.further.get_mut(at),
        }
    }

    #[inline]
    fn lanes(&self) -> impl Iterator<Item = &Lane> {
        std::iter::once(&self.first).chain(&self.further)
    }

    #[inline]
    fn lanes_mut(&mut self) -> impl Iterator<Item = &mut Lane> {
        std::iter::once(&mut self.first).chain(&mut self.further)
    }

    #[inline]
    fn count(&self) -> usize {
        self.further.len().saturating_add(1)
    }

    /// The lane whose turn it is, of those that take something.
    #[inline]
    fn lane_in_turn(&mut self) -> Option<&mut Lane> {
        let count = self.count();
        for _ in 0..count {
            let at = self.next;
            self.next = if at.saturating_add(1) >= count { 0 } else { at.saturating_add(1) };
            if self.at(at).is_some_and(|lane| lane.is_usable() && lane.queue.room() > 0) {
                return self.at_mut(at);
            }
        }
        None
    }
}

impl Timed for QueueSession {
    fn poll_timeout(&self) -> Option<Instant> {
        self.lane().poll_timeout()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.now = now;
        self.lane_mut().on_timeout(now)
    }
}

impl StreamSession for QueueSession {
    #[inline]
    fn demand(&self) -> Demand {
        self.lane().demand()
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk) -> Result<usize, ProtocolError> {
        self.lane_mut().on_bytes(input)
    }

    #[inline]
    fn on_placed(&mut self) -> Result<(), ProtocolError> {
        self.lane_mut().on_placed()
    }

    fn on_end(&mut self) -> Result<(), ProtocolError> {
        self.lane_mut().on_end()
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        &mut self.lane_mut().outbox
    }
}

impl Initiator for QueueSession {
    #[inline]
    fn is_ready(&self) -> bool {
        self.first.queue.is_connected()
    }

    #[inline]
    fn room(&self) -> usize {
        let usable = self.lanes().filter(|lane| lane.is_usable());
        usable.map(|lane| lane.queue.room()).fold(0, usize::saturating_add)
    }

    #[inline]
    fn submit(&mut self, io: Io) {
        let age = self.next_age;
        self.next_age = age.wrapping_add(1);
        match self.lane_in_turn() {
            Some(lane) => lane.submit(io, age),
            None => {
                let error = if self.is_stopping { IoError::ShuttingDown } else { IoError::PathLost };
                self.failed.push_back(Completion { tag: io.tag, result: Err(error) });
            }
        }
    }

    #[inline]
    fn poll_done(&mut self) -> Option<Completion> {
        let done = self.lanes_mut().find_map(|lane| lane.queue.poll_done());
        done.or_else(|| self.failed.pop_front())
    }

    fn resize(&mut self, size: u64) {
        let shift = self.config.namespace.block_len.trailing_zeros();
        self.config.namespace.blocks = size.wrapping_shr(shift);
        self.lanes_mut().for_each(|lane| lane.queue.resize(size));
    }

    /// The first lane to find out that the path is none speaks for all.
    #[inline]
    fn path_rank(&self) -> PathRank {
        self.lanes().map(|lane| lane.queue.path_rank()).max().unwrap_or(PathRank::Best)
    }

    fn set_path_rank(&mut self, rank: PathRank) {
        self.lanes_mut().for_each(|lane| lane.queue.set_path_rank(rank));
    }

    #[inline]
    fn poll_misplaced(&mut self) -> Option<Io> {
        self.lanes_mut().find_map(|lane| lane.queue.poll_misplaced())
    }

    #[inline]
    fn select(&mut self, lane: usize) {
        self.selected = lane;
    }

    #[inline]
    fn poll_dial(&mut self) -> Option<(usize, Instant)> {
        let has_all = self.count() >= self.config.queues.into();
        if has_all || self.is_stopping || !self.is_ready() {
            return None;
        }
        let at = self.count();
        // There are no more of them than fit a queue's number.
        let qid = (at as u16).saturating_add(1);
        let mut lane = Lane::new(&self.config, qid, self.pool.clone(), self.now);
        lane.queue.set_path_rank(self.path_rank());
        if self.has_other_paths {
            lane.queue.set_other_paths();
        }
        self.further.push(lane);
        Some((at, self.now))
    }

    fn on_connected(&mut self, lane: usize, now: Instant) {
        if let Some(lane) = self.at_mut(lane) {
            lane.begin(now);
        }
    }

    fn on_lost(&mut self, lane: usize, _now: Instant) -> bool {
        let Some(lost) = self.at_mut(lane) else { return true };
        // One that has ended in order, or that there never was, is not missed.
        let is_missed = lost.ending != Ending::Over && (lane == 0 || lost.queue.is_connected());
        if is_missed {
            return false;
        }
        lost.ending = Ending::Over;
        lost.outbox.clear();
        !self.is_over()
    }

    fn look(&mut self) -> u32 {
        self.lanes_mut().map(|lane| lane.queue.look()).max().unwrap_or(0)
    }

    /// What has completed and was not polled yet is not among them.
    fn take_unfinished(&mut self) -> Vec<Io> {
        let mut all: Vec<(u64, Io)> = self.lanes_mut().flat_map(Lane::take_unfinished).collect();
        all.sort_unstable_by_key(|(age, _)| *age);
        all.into_iter().map(|(_, io)| io).collect()
    }

    fn on_stop(&mut self) {
        self.is_stopping = true;
        self.lanes_mut().for_each(Lane::stop);
    }
}
