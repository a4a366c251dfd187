//! One I/O queue of a session, over one connection of its own.

use super::QueueConfig;
use super::line::Line;
use crate::fabrics::host::{DEPTH, Queue};
use crate::outbox::Outbox;
use crate::session::{Demand, ProtocolError};
use blockmux_volume::{Chunk, Io, Pool};
use std::time::{Duration, Instant};

/// An I/O queue, from the first byte of its connection on.
pub(super) struct Lane {
    line: Line,
    pub(super) outbox: Outbox,
    /// What the connection begins with, until there is one.
    begins_with: Outbox,
    pub(super) queue: Queue,
    pub(super) ending: Ending,
    timers: Timers,
}

/// How far a queue has come with ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    No,
    /// What was submitted completes here.
    Stopping,
    Over,
}

struct Timers {
    /// The latest time that this queue was told.
    now: Instant,
    /// When the queue has to be connected.
    deadline: Instant,
}

impl Lane {
    /// I/O queue `qid`, which has no connection yet.
    pub(super) fn new(config: &QueueConfig, qid: u16, pool: Pool, now: Instant) -> Lane {
        let QueueConfig { names, credentials, controller, namespace, entries, digests, .. } = config;
        let mut begins_with = Outbox::default();
        // Connect's data always goes with it (NVMe Base 2.0 §6.3).
        let in_capsule = controller.in_capsule.max(CONNECT_DATA);
        let line = Line::new(*digests, in_capsule, pool.clone(), &mut begins_with);
        let most = u32::from(u16::MAX).min(controller.max_entries).min(DEPTH as u32) as u16;
        let entries = (*entries).min(most);
        // MAXCMD counts commands, of which a ring of entries holds one less.
        let entries = match controller.max_commands {
            0 => entries,
            commands => entries.min(commands.saturating_add(1)),
        };
        let shape = (qid, entries.max(2));
        let credentials = credentials.clone().map(|credentials| credentials.of_queue(qid));
        let mut queue = Queue::new(names.clone(), credentials, controller.cntlid, shape, namespace, pool);
        queue.set_retry_delays(controller.retry_delays);
        let timers = Timers { now, deadline: now };
        Lane { line, outbox: Outbox::default(), begins_with, queue, ending: Ending::No, timers }
    }

    /// There is a connection.
    pub(super) fn begin(&mut self, now: Instant) {
        self.outbox = std::mem::take(&mut self.begins_with);
        self.timers.now = now;
        self.timers.deadline = now.checked_add(CONNECT_TIMEOUT).unwrap_or(now);
    }

    /// Whether I/O may be submitted.
    #[inline]
    pub(super) fn is_usable(&self) -> bool {
        self.ending == Ending::No && self.queue.is_connected()
    }

    #[inline]
    pub(super) fn submit(&mut self, io: Io, age: u64) {
        self.queue.submit(io, age);
        self.advance();
    }

    /// Ends once nothing is under way.
    pub(super) fn stop(&mut self) {
        if self.ending == Ending::No {
            self.ending = Ending::Stopping;
            self.queue.close();
            if !self.queue.is_connected() {
                // Nothing was begun that could be ended in order.
                self.ending = Ending::Over;
            }
        }
        self.advance();
    }

    /// Ends at once: everything that has not completed, with its age.
    pub(super) fn take_unfinished(&mut self) -> Vec<(u64, Io)> {
        self.outbox.clear();
        self.ending = Ending::Over;
        self.queue.take_unfinished()
    }

    /// Sends what may be sent, and ends when it is time.
    #[inline]
    fn advance(&mut self) {
        if !self.line.is_open || self.ending == Ending::Over {
            return;
        }
        while let Some(request) = self.queue.next() {
            self.line.send_command(&request, &mut self.queue, &mut self.outbox);
        }
        let is_done = self.ending == Ending::Stopping && self.queue.is_empty();
        if is_done || self.queue.refused().is_some() {
            self.ending = Ending::Over;
        }
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        if self.ending == Ending::Over {
            return None;
        }
        let queue = self.queue.poll_timeout(self.timers.now);
        let connect = (!self.queue.is_connected()).then_some(self.timers.deadline);
        [queue, connect].into_iter().flatten().min()
    }

    pub(super) fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.timers.now = now;
        if !self.queue.is_connected() && now >= self.timers.deadline {
            return Err(ProtocolError {
                what: "did not connect an I/O queue within 30 seconds",
                reference: "NVMe Base 2.0 §6.3, Connect",
            });
        }
        self.queue.on_timeout(now);
        self.advance();
        Ok(())
    }

    #[inline]
    pub(super) fn demand(&self) -> Demand {
        if self.ending == Ending::Over { Demand::Close } else { self.line.demand() }
    }

    #[inline]
    pub(super) fn on_bytes(&mut self, input: &Chunk) -> Result<usize, ProtocolError> {
        if self.ending == Ending::Over {
            // What comes after the end is of no interest.
            return Ok(input.unread().len());
        }
        let taken = self.line.on_bytes(input, &mut self.queue, &mut self.outbox)?;
        self.advance();
        Ok(taken)
    }

    #[inline]
    pub(super) fn on_placed(&mut self) -> Result<(), ProtocolError> {
        let placed = self.line.placed(&mut self.queue);
        placed.map_err(|fault| self.line.terminate(fault, &mut self.outbox))?;
        self.advance();
        Ok(())
    }

    /// Without anything under way the controller may leave; the driver, who knows whether it had asked for the end,
    /// reconnects.
    pub(super) fn on_end(&mut self) -> Result<(), ProtocolError> {
        let is_quiet = self.queue.is_empty() && self.queue.is_connected() && self.line.is_between_pdus();
        if is_quiet || self.ending == Ending::Over {
            self.ending = Ending::Over;
            return Ok(());
        }
        Err(ProtocolError {
            what: "closed the connection of an I/O queue in the middle of commands",
            reference: "TCP Transport §3.5, Error Handling Model",
        })
    }
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Of Connect, in bytes.
const CONNECT_DATA: u32 = 1024;
