//! Channels that hold requests until a given time: the basis of delays and rate limits.

use crate::io::{Completion, Io, IoError, Tag};
use crate::ready::Waker;
use crate::volume::{Channel, Core};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

/// Decides when a request may start.
pub(crate) trait Pace {
    /// The queue in which the request waits, and the time when it may start; `None`: at once.
    /// Within one queue, times never decrease.
    fn due(&mut self, io: &Io, now: Instant) -> Option<(usize, Instant)>;
}

/// Passes requests on when `P` permits. Requests that wait can be cancelled and have changed
/// nothing.
pub(crate) struct PacedChannel<P> {
    inner: Box<dyn Channel>,
    pace: P,
    core: Rc<dyn Core>,
    waker: Waker,
    queues: [VecDeque<(Instant, Io)>; QUEUES],
    /// The earliest pending wake-up requested from the core.
    armed: Option<Instant>,
    done: Vec<Completion>,
}

impl<P: Pace> PacedChannel<P> {
    pub(crate) fn new(
        inner: Box<dyn Channel>,
        pace: P,
        core: &Rc<dyn Core>,
        depth: u32,
        waker: Waker,
    ) -> Self {
        let depth = depth as usize;
        PacedChannel {
            inner,
            pace,
            core: core.clone(),
            waker,
            queues: std::array::from_fn(|_| VecDeque::with_capacity(depth)),
            armed: None,
            done: Vec::with_capacity(depth),
        }
    }

    fn next_due(&self) -> Option<Instant> {
        self.queues.iter().filter_map(|queue| queue.front()).map(|&(due, _)| due).min()
    }

    fn pop_due(&mut self, now: Instant) -> Option<Io> {
        let is_due = |queue: &&mut VecDeque<(Instant, Io)>| queue.front().is_some_and(|&(due, _)| due <= now);
        let (_, io) = self.queues.iter_mut().find(is_due)?.pop_front()?;
        Some(io)
    }

    /// Requests a wake-up for the next time, unless one is pending.
    fn arm(&mut self) {
        if let Some(due) = self.next_due()
            && self.armed.is_none_or(|armed| due < armed)
        {
            self.core.wake_at(due, &self.waker);
            self.armed = Some(due);
        }
    }

    fn submit_due(&mut self) {
        let now = self.core.now();
        if self.armed.is_some_and(|armed| armed <= now) {
            self.armed = None;
        }
        let mut passed = false;
        while let Some(io) = self.pop_due(now) {
            self.inner.submit(io);
            passed = true;
        }
        if passed {
            self.inner.kick();
        }
    }
}

impl<P: Pace> Channel for PacedChannel<P> {
    fn submit(&mut self, io: Io) {
        let now = self.core.now();
        match self.pace.due(&io, now) {
            Some((queue, due)) if due > now => self.queues[queue].push_back((due, io)),
            _ => self.inner.submit(io),
        }
    }

    fn kick(&mut self) {
        self.arm();
        self.inner.kick();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.done);
        if self.next_due().is_some() {
            self.submit_due();
            self.arm();
        }
        self.inner.poll(done);
    }

    fn cancel(&mut self, tag: Tag) {
        for queue in &mut self.queues {
            if let Some(at) = queue.iter().position(|(_, io)| io.tag == tag) {
                queue.remove(at);
                self.done.push(Completion { tag, result: Err(IoError::Aborted) });
                self.waker.wake();
                return;
            }
        }
        self.inner.cancel(tag);
    }
}

/// Maximum number of queues of a [`Pace`].
const QUEUES: usize = 3;
