//! The connection of an I/O queue: reads and writes one namespace.

use super::line::Line;
use super::{ControllerInfo, Digests, Names, NamespaceInfo, Refused};
use crate::nvmeof::auth::Credentials;
use crate::nvmeof::initiator::{DEPTH, Queue};
use crate::outbox::Outbox;
use crate::session::{Demand, Initiator, PathRank, ProtocolError, StreamSession, Timed};
use blockmux_volume::{Chunk, Completion, Io, IoError, Pool};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// What an I/O queue is of.
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
    /// Which I/O queue, from 1.
    pub qid: u16,
    /// Entries to ask for, 2 to 1,024; the controller may take less.
    pub entries: u16,
    /// What to ask for.
    pub digests: Digests,
}

/// One I/O queue, over one connection, from its first byte on.
pub struct QueueSession {
    line: Line,
    outbox: Outbox,
    queue: Queue,
    ending: Ending,
    timers: Timers,
    /// What was submitted when there was no queue to do it any more.
    failed: VecDeque<Completion>,
}

/// How far the session has come with ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    No,
    /// What was submitted completes here.
    Stopping,
    Over,
}

struct Timers {
    /// The latest time that this session was told.
    now: Instant,
    /// When the queue has to be connected.
    deadline: Instant,
    /// When to send again what failed for a reason that passes; `None`: the time is to be asked for first.
    retry_at: Option<Instant>,
    pause: Duration,
}

impl QueueSession {
    /// A session on a fresh connection. Reads without a buffer take memory from `pool` where nothing can be lent.
    #[must_use]
    pub fn new(config: QueueConfig, pool: Pool, now: Instant) -> QueueSession {
        let QueueConfig { names, credentials, controller, namespace, qid, entries, digests } = config;
        let mut outbox = Outbox::default();
        // Connect's data always goes with it (NVMe Base 2.0 §6.3).
        let in_capsule = controller.in_capsule.max(CONNECT_DATA);
        let line = Line::new(digests, in_capsule, pool.clone(), &mut outbox);
        let most = u32::from(u16::MAX).min(controller.max_entries).min(DEPTH as u32) as u16;
        let entries = entries.min(most);
        // MAXCMD counts commands, of which a ring of entries holds one less.
        let entries = match controller.max_commands {
            0 => entries,
            commands => entries.min(commands.saturating_add(1)),
        };
        let queue =
            Queue::new(names, credentials, controller.cntlid, (qid, entries.max(2)), &namespace, pool);
        QueueSession {
            line,
            outbox,
            queue,
            ending: Ending::No,
            timers: Timers {
                now,
                deadline: now.checked_add(CONNECT_TIMEOUT).unwrap_or(now),
                retry_at: None,
                pause: FIRST_PAUSE,
            },
            failed: VecDeque::new(),
        }
    }

    /// There are other paths to the namespace: what this one cannot do now is for them ([`Initiator::poll_misplaced`]).
    #[must_use]
    pub fn with_other_paths(mut self) -> QueueSession {
        self.queue.set_other_paths();
        self
    }

    /// Why the controller gives us no queue, if it does not.
    #[must_use]
    pub fn refused(&self) -> Option<&Refused> {
        self.queue.refused()
    }

    /// Whether the session has come to its end.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.ending == Ending::Over
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

    /// Sends again what failed for a reason that passes, with growing pauses as long as it does not.
    fn retry(&mut self, now: Instant) {
        if !self.queue.has_later() {
            (self.timers.retry_at, self.timers.pause) = (None, FIRST_PAUSE);
            return;
        }
        match self.timers.retry_at {
            None => self.timers.retry_at = now.checked_add(self.timers.pause),
            Some(at) if now >= at => {
                self.timers.retry_at = None;
                self.timers.pause = self.timers.pause.saturating_mul(2).min(LONGEST_PAUSE);
                self.queue.resume();
            }
            Some(_) => {}
        }
    }
}

impl Timed for QueueSession {
    fn poll_timeout(&self) -> Option<Instant> {
        if self.ending == Ending::Over {
            return None;
        }
        let retry = self.queue.has_later().then(|| self.timers.retry_at.unwrap_or(self.timers.now));
        let connect = (!self.queue.is_connected()).then_some(self.timers.deadline);
        [retry, connect].into_iter().flatten().min()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.timers.now = now;
        if !self.queue.is_connected() && now >= self.timers.deadline {
            return Err(ProtocolError {
                what: "did not connect an I/O queue within 30 seconds",
                reference: "NVMe Base 2.0 §6.3, Connect",
            });
        }
        self.retry(now);
        self.advance();
        Ok(())
    }
}

impl StreamSession for QueueSession {
    #[inline]
    fn demand(&self) -> Demand {
        if self.ending == Ending::Over { Demand::Close } else { self.line.demand() }
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk) -> Result<usize, ProtocolError> {
        if self.ending == Ending::Over {
            // What comes after the end is of no interest.
            return Ok(input.unread().len());
        }
        let taken = self.line.on_bytes(input, &mut self.queue, &mut self.outbox)?;
        self.advance();
        Ok(taken)
    }

    #[inline]
    fn on_placed(&mut self) -> Result<(), ProtocolError> {
        let placed = self.line.placed(&mut self.queue);
        placed.map_err(|fault| self.line.terminate(fault, &mut self.outbox))?;
        self.advance();
        Ok(())
    }

    /// Without anything under way the controller may leave; the driver, who knows whether it had asked for the end,
    /// reconnects.
    fn on_end(&mut self) -> Result<(), ProtocolError> {
        let is_quiet = self.queue.is_empty() && self.queue.is_connected() && self.line.is_between_pdus();
        if is_quiet || self.ending == Ending::Over {
            self.ending = Ending::Over;
            return Ok(());
        }
        Err(ProtocolError {
            what: "closed the connection of an I/O queue in the middle of commands",
            reference: "TCP Transport §3.1, connection teardown",
        })
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }
}

impl Initiator for QueueSession {
    #[inline]
    fn is_ready(&self) -> bool {
        self.queue.is_connected()
    }

    #[inline]
    fn room(&self) -> usize {
        if self.ending == Ending::No { self.queue.room() } else { 0 }
    }

    #[inline]
    fn submit(&mut self, io: Io) {
        if self.ending == Ending::Over || !self.queue.is_connected() {
            self.failed.push_back(Completion { tag: io.tag, result: Err(IoError::PathLost) });
            return;
        }
        self.queue.submit(io);
        self.advance();
    }

    #[inline]
    fn poll_done(&mut self) -> Option<Completion> {
        self.queue.poll_done().or_else(|| self.failed.pop_front())
    }

    fn resize(&mut self, size: u64) {
        self.queue.resize(size);
    }

    #[inline]
    fn path_rank(&self) -> PathRank {
        self.queue.path_rank()
    }

    fn set_path_rank(&mut self, rank: PathRank) {
        self.queue.set_path_rank(rank);
    }

    #[inline]
    fn poll_misplaced(&mut self) -> Option<Io> {
        self.queue.poll_misplaced()
    }

    /// What has completed and was not polled yet is not among them.
    fn take_unfinished(&mut self) -> Vec<Io> {
        self.outbox.clear();
        self.ending = Ending::Over;
        self.queue.take_unfinished()
    }

    fn on_stop(&mut self) {
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
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Of Connect, in bytes.
const CONNECT_DATA: u32 = 1024;
/// The first pause before a command is sent again.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
