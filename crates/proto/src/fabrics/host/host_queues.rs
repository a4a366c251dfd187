//! The I/O queues of one session, which access one namespace of a controller.
//!
//! ```text
//!   submit ─alternating▶ HostQueue: I/O queue 1 ──▶ its connection
//!                  └──▶ HostQueue: I/O queue 2 ──▶ its connection      connected once the first is
//! ```
//! All queues belong to the association of one admin queue, so that a flush on any of them covers
//! the completed commands of all. The session does without a queue that cannot be connected, except
//! the first; the loss of a connected queue ends the session.

use super::NvmeRefused;
use super::host_queue::{HostQueue, QueueConfig};
use super::transport::HostTransport;
use crate::driver::session::{
    Connections, Initiator, Overdue, PathRank, RetryRules, StreamConnections, StreamSession,
};
use crate::driver::transport::TransportInfo;
use blockmux_volume::{Completion, Io, IoError, Pool};
use std::collections::VecDeque;
use std::time::Instant;

/// The I/O queues of one session and their connections.
pub struct HostQueues<T: HostTransport> {
    config: QueueConfig,
    options: T::Options,
    pool: Pool,
    first: HostQueue<T>,
    /// The queues after the first, in order.
    further: Vec<HostQueue<T>>,
    /// Index of the queue for the next I/O.
    next: usize,
    next_age: u64,
    retries: RetryRules,
    is_stopping: bool,
    /// I/O that was submitted when no queue was left.
    failed: VecDeque<Completion>,
}

impl<T: HostTransport> HostQueues<T> {
    /// Creates a session for a new connection. Reads without a buffer take memory from `pool` if no
    /// receive buffer can be borrowed.
    #[must_use]
    pub fn new(config: QueueConfig, options: T::Options, pool: Pool, now: Instant) -> HostQueues<T> {
        let mut first = HostQueue::new(&config, options, 1, pool.clone(), now);
        first.begin(now);
        HostQueues {
            config,
            options,
            pool,
            first,
            further: Vec::new(),
            next: 0,
            next_age: 0,
            retries: RetryRules::default(),
            is_stopping: false,
            failed: VecDeque::new(),
        }
    }

    /// Sets how I/O is retried that this path cannot execute now.
    #[must_use]
    pub fn with_retries(mut self, retries: RetryRules) -> HostQueues<T> {
        self.retries = retries;
        self.queues_mut().for_each(|queue| queue.queue.retries = retries);
        self
    }

    /// Sets the rank of the path, as the admin queue has learned it.
    pub fn set_path_rank(&mut self, rank: PathRank) {
        self.queues_mut().for_each(|queue| queue.queue.set_path_rank(rank));
    }

    /// The refusal for which a queue could not be connected.
    #[must_use]
    pub fn refused(&self) -> Option<&NvmeRefused> {
        self.first.queue.refused()
    }

    /// Whether the session is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.queues().all(HostQueue::is_over)
    }

    /// The first queue.
    pub(crate) fn first(&self) -> &HostQueue<T> {
        &self.first
    }

    /// The queue of a connection, or the first if there is none with this number.
    #[inline]
    pub(crate) fn queue(&mut self, connection: usize) -> &mut HostQueue<T> {
        match connection.checked_sub(1).and_then(|at| self.further.get_mut(at)) {
            Some(queue) => queue,
            None => &mut self.first,
        }
    }

    #[inline]
    fn at(&self, queue: usize) -> Option<&HostQueue<T>> {
        queue.checked_sub(1).map_or(Some(&self.first), |at| self.further.get(at))
    }

    #[inline]
    fn at_mut(&mut self, queue: usize) -> Option<&mut HostQueue<T>> {
        match queue.checked_sub(1) {
            None => Some(&mut self.first),
            Some(at) => self.further.get_mut(at),
        }
    }

    #[inline]
    fn queues(&self) -> impl Iterator<Item = &HostQueue<T>> {
        std::iter::once(&self.first).chain(&self.further)
    }

    #[inline]
    fn queues_mut(&mut self) -> impl Iterator<Item = &mut HostQueue<T>> {
        std::iter::once(&mut self.first).chain(&mut self.further)
    }

    #[inline]
    fn count(&self) -> usize {
        self.further.len().saturating_add(1)
    }

    /// The next queue in turn that has room.
    #[inline]
    fn queue_in_turn(&mut self) -> Option<&mut HostQueue<T>> {
        let count = self.count();
        for _ in 0..count {
            let at = self.next;
            self.next = if at.saturating_add(1) >= count { 0 } else { at.saturating_add(1) };
            if self.at(at).is_some_and(|queue| queue.is_usable() && queue.queue.room() > 0) {
                return self.at_mut(at);
            }
        }
        None
    }
}

impl<T: HostTransport> Initiator for HostQueues<T> {
    #[inline]
    fn is_ready(&self) -> bool {
        self.first.queue.is_connected()
    }

    #[inline]
    fn room(&self) -> usize {
        let usable = self.queues().filter(|queue| queue.is_usable());
        usable.map(|queue| queue.queue.room()).fold(0, usize::saturating_add)
    }

    #[inline]
    fn submit(&mut self, io: Io) {
        let age = self.next_age;
        self.next_age = age.wrapping_add(1);
        match self.queue_in_turn() {
            Some(queue) => queue.submit(io, age),
            None => {
                let error = if self.is_stopping { IoError::ShuttingDown } else { IoError::PathLost };
                self.failed.push_back(Completion { tag: io.tag, result: Err(error) });
            }
        }
    }

    #[inline]
    fn poll_done(&mut self) -> Option<Completion> {
        let done = self.queues_mut().find_map(|queue| queue.queue.poll_done());
        done.or_else(|| self.failed.pop_front())
    }

    #[inline]
    fn poll_returned(&mut self) -> Option<Io> {
        self.queues_mut().find_map(|queue| queue.queue.poll_returned())
    }

    /// I/O that has completed and was not polled yet is not included.
    fn take_unfinished(&mut self) -> Vec<Io> {
        let mut all: Vec<(u64, Io)> = self.queues_mut().flat_map(HostQueue::take_unfinished).collect();
        all.sort_unstable_by_key(|(age, _)| *age);
        all.into_iter().map(|(_, io)| io).collect()
    }

    /// Always `None`: the admin queue receives changes of size.
    fn poll_size(&mut self) -> Option<u64> {
        None
    }

    fn resize(&mut self, size: u64) {
        let shift = self.config.namespace.block_len.trailing_zeros();
        self.config.namespace.blocks = size.wrapping_shr(shift);
        self.queues_mut().for_each(|queue| queue.queue.resize(size));
    }

    /// The worst rank of all queues: the first queue to notice that the path is unusable decides.
    #[inline]
    fn path_rank(&self) -> PathRank {
        self.queues().map(|queue| queue.queue.path_rank()).max().unwrap_or(PathRank::Best)
    }

    fn on_stop(&mut self) {
        self.is_stopping = true;
        self.queues_mut().for_each(HostQueue::stop);
    }
}

impl<T: HostTransport> Overdue for HostQueues<T> {
    fn tick(&mut self) -> u32 {
        self.queues_mut().map(|queue| queue.queue.tick()).max().unwrap_or(0)
    }

    /// Always `None`: Abort is an admin command, and a controller may ignore it (Base 2.0 §5.1).
    fn abort_overdue(&mut self, _looks: u32) -> Option<&'static str> {
        None
    }
}

impl<T: HostTransport> Connections for HostQueues<T> {
    #[inline]
    fn poll_connect(&mut self) -> Option<(usize, Instant)> {
        let has_all = self.count() >= self.config.queues.into();
        if has_all || self.is_stopping || !self.is_ready() {
            return None;
        }
        let (at, now) = (self.count(), self.first.queue.now());
        // The number of queues fits 16 bits.
        let qid = (at as u16).saturating_add(1);
        let mut queue = HostQueue::new(&self.config, self.options, qid, self.pool.clone(), now);
        queue.queue.set_path_rank(self.path_rank());
        queue.queue.retries = self.retries;
        self.further.push(queue);
        Some((at, now))
    }

    fn on_connected(&mut self, connection: usize, _transport: &TransportInfo, now: Instant) {
        if let Some(queue) = self.at_mut(connection) {
            queue.begin(now);
        }
    }

    fn on_lost(&mut self, connection: usize, _now: Instant) -> bool {
        let Some(lost) = self.at_mut(connection) else { return true };
        // A queue that ended regularly, or was never connected, is not missed.
        let is_missed = !lost.is_over() && (connection == 0 || lost.queue.is_connected());
        if is_missed {
            return false;
        }
        lost.abandon();
        !self.is_over()
    }
}

impl<T: HostTransport> StreamConnections for HostQueues<T>
where
    HostQueue<T>: StreamSession,
{
    #[inline]
    fn connection(&mut self, connection: usize) -> impl StreamSession {
        self.queue(connection)
    }
}
