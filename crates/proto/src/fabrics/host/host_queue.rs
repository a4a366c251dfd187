//! One I/O queue of a host, on its own connection.

use super::namespace_queue::NamespaceQueue;
use super::transport::HostTransport;
use super::{ControllerInfo, DEPTH, Names, NamespaceInfo};
use crate::driver::session::{ProtocolError, Timed};
use crate::nvme::auth::HostCredentials;
use blockmux_volume::{Io, Pool};
use std::time::{Duration, Instant};

/// Configuration of the I/O queues of a session.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// Names of the host and the subsystem, as for the admin queue.
    pub names: Names,
    /// Credentials for authentication, if there are any.
    pub credentials: Option<HostCredentials>,
    /// The controller of the admin queue.
    pub controller: ControllerInfo,
    /// The namespace to access.
    pub namespace: NamespaceInfo,
    /// Number of queues, from 1 to the number that the controller has allocated.
    pub queues: u16,
    /// Entries of each queue to request, 2 to 1,024; the controller may support less.
    pub entries: u16,
}

/// An I/O queue and its connection.
pub struct HostQueue<T> {
    pub(crate) transport: T,
    pub(super) queue: NamespaceQueue,
    pub(crate) shape: QueueShape,
    pub(super) ending: QueueEnding,
    /// Deadline of Connect.
    connect_by: Instant,
}

/// Identifier and size of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueShape {
    pub(crate) qid: u16,
    pub(crate) entries: u16,
    /// Controller identifier.
    pub(crate) cntlid: u16,
}

/// How far the end of a queue has progressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueEnding {
    No,
    /// Outstanding I/O is finished; no more is accepted.
    Stopping,
    Over,
}

impl<T: HostTransport> HostQueue<T> {
    /// Creates I/O queue `qid`, which has no connection yet.
    pub(super) fn new(
        config: &QueueConfig,
        options: T::Options,
        qid: u16,
        pool: Pool,
        now: Instant,
    ) -> HostQueue<T> {
        let QueueConfig { names, credentials, controller, namespace, entries, .. } = config;
        let transport = T::new(options, Some(controller.in_capsule), pool.clone());
        let most = u32::from(u16::MAX).min(controller.max_entries).min(DEPTH as u32) as u16;
        let entries = (*entries).min(most);
        // MAXCMD counts commands; a ring holds one command less than entries.
        let entries = match controller.max_commands {
            0 => entries,
            commands => entries.min(commands.saturating_add(1)),
        };
        let shape = (qid, entries.max(2));
        let credentials = credentials.clone().map(|credentials| credentials.of_queue(qid));
        let names = names.clone();
        let mut queue =
            NamespaceQueue::new(names, credentials, controller.cntlid, shape, namespace, pool, now);
        queue.set_retry_delays(controller.retry_delays);
        let (qid, entries) = shape;
        let shape = QueueShape { qid, entries, cntlid: controller.cntlid };
        HostQueue { transport, queue, shape, ending: QueueEnding::No, connect_by: now }
    }

    /// Begins the queue on its new connection.
    pub(super) fn begin(&mut self, now: Instant) {
        self.transport.begin();
        self.queue.set_now(now);
        self.connect_by = now.checked_add(CONNECT_TIMEOUT).unwrap_or(now);
    }

    /// Whether I/O may be submitted.
    #[inline]
    pub(super) fn is_usable(&self) -> bool {
        self.ending == QueueEnding::No && self.queue.is_connected()
    }

    /// Whether the connection has to be closed.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        self.ending == QueueEnding::Over
    }

    #[inline]
    pub(super) fn submit(&mut self, io: Io, age: u64) {
        self.queue.next_age = age;
        self.queue.submit(io);
        self.advance();
    }

    /// Lets the transport pass on what it received, and continues.
    ///
    /// # Errors
    /// Protocol violations that the transport found.
    #[inline]
    pub(crate) fn receive<R>(
        &mut self,
        now: Instant,
        take: impl FnOnce(&mut T, &mut NamespaceQueue) -> Result<R, ProtocolError>,
    ) -> Result<R, ProtocolError> {
        self.queue.set_now(now);
        let taken = take(&mut self.transport, &mut self.queue)?;
        self.advance();
        Ok(taken)
    }

    /// Lets the transport work, and continues.
    #[inline]
    pub(crate) fn drive<R>(&mut self, step: impl FnOnce(&mut T, &mut NamespaceQueue) -> R) -> R {
        let result = step(&mut self.transport, &mut self.queue);
        self.advance();
        result
    }

    /// Ends the queue once no command is outstanding.
    pub(super) fn stop(&mut self) {
        if self.ending == QueueEnding::No {
            self.queue.close();
            // A queue that is not connected has nothing to finish.
            let is_connected = self.queue.is_connected();
            self.ending = if is_connected { QueueEnding::Stopping } else { QueueEnding::Over };
        }
        self.advance();
    }

    /// Abandons the queue: its connection was lost or could not be established.
    pub(super) fn abandon(&mut self) {
        self.transport.discard();
        self.ending = QueueEnding::Over;
    }

    /// Ends the queue immediately; returns the I/O that has not completed, with its age.
    pub(super) fn take_unfinished(&mut self) -> Vec<(u64, Io)> {
        self.abandon();
        self.queue.take_unfinished()
    }

    /// Sends the next commands, and ends the queue when it is time.
    #[inline]
    fn advance(&mut self) {
        if !self.transport.is_open() || self.is_over() {
            return;
        }
        while let Some(request) = self.queue.next() {
            self.transport.send(&request, &mut self.queue);
        }
        let is_done = self.ending == QueueEnding::Stopping && self.queue.is_empty();
        if is_done || self.queue.refused().is_some() {
            self.ending = QueueEnding::Over;
        }
    }

    /// Handles the end of the connection. Without outstanding commands the controller may close it;
    /// the driver, which knows whether that was requested, reconnects.
    pub(crate) fn end(&mut self) -> Result<(), ProtocolError> {
        let is_quiet = self.queue.is_empty() && self.queue.is_connected() && self.transport.may_end();
        if is_quiet || self.is_over() {
            self.ending = QueueEnding::Over;
            return Ok(());
        }
        Err(ProtocolError {
            what: "closed the connection of an I/O queue in the middle of commands",
            reference: T::ERROR_HANDLING,
        })
    }
}

impl<T: HostTransport> Timed for HostQueue<T> {
    fn poll_timeout(&self) -> Option<Instant> {
        if self.is_over() {
            return None;
        }
        let queue = self.queue.poll_timeout();
        let connect = (!self.queue.is_connected()).then_some(self.connect_by);
        [queue, connect].into_iter().flatten().min()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if !self.queue.is_connected() && now >= self.connect_by {
            return Err(ProtocolError {
                what: "did not connect an I/O queue within 30 seconds",
                reference: "NVMe Base 2.0 §6.3, Connect",
            });
        }
        self.queue.on_timeout(now);
        self.advance();
        Ok(())
    }
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
