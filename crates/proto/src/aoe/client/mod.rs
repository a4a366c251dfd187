//! The AoE initiator: a queue to one disk.
//!
//! ```text
//!   asking ──config answer──▶ identifying ──IDENTIFY──▶ ready
//!
//!   submit ─▶ waiting ──window, path──▶ outstanding ──answer──▶ done
//!                 ▲ smaller pieces        │ ▲
//!                 └───────────────────────┘ └─ no answer in time: again, under the same tag
//! ```
//! The session holds every request until all of its commands have been answered, or the disk has
//! been unresponsive for the configured timeout. An interface that goes down and up, or a restart
//! of the target, only delays requests.
//!
//! Limits: [`MAX_REQUESTS`] requests, `commands::MAX_COMMANDS` outstanding commands, `MAX_UNSENT`
//! unsent frames.

mod commands;
mod congestion;
mod path;
mod receive;
mod request;
mod send;
#[cfg(test)]
mod tests;

use self::commands::AoeCommandTable;
use self::congestion::CongestionControl;
use self::path::AoePaths;
use self::request::{AoeRequest, MAX_FRAME_DATA};
use super::AoeAddress;
pub use super::identify::AtaDisk;
use crate::driver::frames::{Frame, FrameOutbox, FramePortInfo, PortId};
use crate::driver::session::{FrameSession, Timed};
use crate::slots::{SlotKey, Slots};
use blockmux_volume::{Completion, Io, IoError, Memory, Pool, Seg, VolumeInfo};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Parameters of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AoeInitiatorConfig {
    /// Address of the disk.
    pub address: AoeAddress,
    /// How long the disk may be unresponsive before requests fail.
    pub timeout: Duration,
    /// The upper byte of tags; it must differ from that of other queues of the same stations.
    pub id: u8,
    /// Start of the counters in tags; it should differ from that of an earlier queue with the same
    /// `id`.
    pub first: u32,
}

/// Session with one disk: a queue of requests.
pub struct AoeInitiatorSession {
    config: AoeInitiatorConfig,
    pool: Pool,
    ports: Vec<FramePortInfo>,
    paths: AoePaths,
    congestion: CongestionControl,
    disk: Option<AtaDisk>,
    requests: Slots<AoeRequest>,
    /// Requests that need further commands, in order.
    waiting: VecDeque<SlotKey>,
    /// I/O that was submitted since the last call with the current time.
    fresh: VecDeque<Io>,
    commands: AoeCommandTable,
    /// Buffer of tags, reused by each `retransmit_due`.
    due: Vec<u32>,
    done: VecDeque<Completion>,
    outbox: FrameOutbox,
    /// Zeroes for write-zeroes, allocated at the first use.
    zeroes: Option<Seg>,
    /// When to broadcast the next config query.
    query_at: Option<Instant>,
    queries: u32,
    /// When the last config query was sent.
    asked_at: Option<Instant>,
    /// When the disk last answered, or since when an answer is expected.
    last_heard: Instant,
    /// No command is due before this time.
    next_due: Option<Instant>,
    stops: bool,
}

impl AoeInitiatorSession {
    /// A session that queries its disk as soon as it has a port.
    #[must_use]
    pub fn new(config: AoeInitiatorConfig, pool: Pool, now: Instant) -> AoeInitiatorSession {
        AoeInitiatorSession {
            commands: AoeCommandTable::new(config.id, config.first),
            config,
            pool,
            ports: Vec::new(),
            paths: AoePaths::new(),
            congestion: CongestionControl::new(),
            disk: None,
            requests: Slots::default(),
            waiting: VecDeque::new(),
            fresh: VecDeque::new(),
            due: Vec::new(),
            done: VecDeque::new(),
            outbox: FrameOutbox::default(),
            zeroes: None,
            query_at: Some(now),
            queries: 0,
            asked_at: None,
            last_heard: now,
            next_due: None,
            stops: false,
        }
    }

    /// The disk's IDENTIFY DEVICE data, once it has answered.
    #[must_use]
    pub fn disk(&self) -> Option<&AtaDisk> {
        self.disk.as_ref()
    }

    /// The disk's properties as a volume, once it has answered.
    #[must_use]
    pub fn volume_info(&self) -> Option<VolumeInfo> {
        self.disk().map(AtaDisk::volume_info)
    }

    /// The stations of the disk, and the number of sectors for which frames are known to pass.
    pub fn stations(&self) -> impl Iterator<Item = (crate::driver::frames::Station, u8)> {
        self.paths.all.iter().map(|path| (path.station, path.sectors))
    }

    /// Whether the maximum frame size is still being probed.
    #[must_use]
    pub fn is_probing(&self) -> bool {
        self.paths.all.iter().any(|path| path.probe.is_some())
    }

    /// The number of requests that have not completed.
    #[must_use]
    pub fn held(&self) -> usize {
        self.requests.len().saturating_add(self.fresh.len())
    }

    fn port(&self, id: PortId) -> Option<&FramePortInfo> {
        self.ports.get(usize::from(id.0))
    }

    /// Completes a request with its current result, and forgets its outstanding commands.
    fn complete(&mut self, key: SlotKey) {
        let Some(request) = self.requests.remove(key) else { return };
        if request.outstanding > 0 {
            let of_it: Vec<u32> = self
                .commands
                .iter()
                .filter(|(_, command)| command.request == Some(key))
                .map(|(tag, _)| tag)
                .collect();
            of_it.into_iter().for_each(|tag| self.forget(tag));
        }
        let tag = request.io.tag;
        self.done.push_back(Completion { tag, result: request.into_result() });
    }

    /// Removes an outstanding command and its unsent frames, because its memory may soon be reused.
    fn forget(&mut self, tag: u32) {
        if let Some(command) = self.commands.remove(tag)
            && (command.sends > 1 || !self.outbox.is_empty())
        {
            let tag = tag.to_be_bytes();
            self.outbox.retain(|frame| frame.head().get(6..10) != Some(&tag));
        }
    }

    /// Completes a request with `error`.
    fn fail(&mut self, key: SlotKey, error: IoError) {
        if let Some(request) = self.requests.get_mut(key) {
            request.error = request.error.or(Some(error));
            self.complete(key);
        }
    }

    /// Requests that `on_timeout` is called no later than `when`.
    fn wake_at(&mut self, when: Instant) {
        self.next_due = Some(self.next_due.map_or(when, |next| next.min(when)));
    }

    fn zeroes(&mut self) -> Seg {
        let len = MAX_FRAME_DATA as usize;
        self.zeroes.get_or_insert_with(|| Memory::from_heap(len).seg(0, len)).clone()
    }
}

impl Timed for AoeInitiatorSession {
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        match (self.next_due, self.query_at) {
            (Some(due), Some(query)) => Some(due.min(query)),
            (due, query) => due.or(query),
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), crate::driver::session::ProtocolError> {
        self.retransmit_due(now);
        Ok(())
    }
}

impl FrameSession for AoeInitiatorSession {
    fn on_frame(&mut self, frame: &Frame<'_>, now: Instant) {
        self.receive_frame(frame, now);
    }

    fn on_port(&mut self, id: PortId, port: FramePortInfo, now: Instant) {
        let at = usize::from(id.0);
        if self.ports.len() <= at {
            self.ports.resize(at.saturating_add(1), FramePortInfo { is_up: false, ..port });
        }
        let Some(slot) = self.ports.get_mut(at) else { return };
        let (was, is) = (std::mem::replace(slot, port), port);
        if was.mtu != is.mtu || (is.is_up && !was.is_up) {
            self.paths.on_port(id, &port);
            self.probe_paths(now);
        }
        if is.is_up && !was.is_up {
            // Lost commands need not wait for their timeout, and the target may be at another
            // station now.
            self.query_at = Some(now);
            self.commands.iter_mut().for_each(|command| (command.due, command.is_lost) = (now, true));
            self.wake_at(now);
        }
    }

    fn frames(&mut self, now: Instant) -> &mut FrameOutbox {
        self.send_waiting(now);
        &mut self.outbox
    }
}

/// The user's side: the calls of [`Initiator`](crate::driver::session::Initiator) that make sense
/// without connections, which could be lost or be of several ranks.
impl AoeInitiatorSession {
    /// The number of requests that the session accepts now.
    #[inline]
    #[must_use]
    pub fn room(&self) -> usize {
        if self.disk.is_some() { MAX_REQUESTS.saturating_sub(self.held()) } else { 0 }
    }

    /// Submits a request. Call it only while there is room.
    #[inline]
    pub fn submit(&mut self, io: Io) {
        self.fresh.push_back(io);
    }

    /// The next completion.
    #[inline]
    pub fn poll_done(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    /// Ends the session once no request is in flight.
    pub fn on_stop(&mut self) {
        self.stops = true;
    }
}

fn later(now: Instant, by: Duration) -> Instant {
    now.checked_add(by).unwrap_or(now)
}

/// The maximum number of requests of a session.
pub const MAX_REQUESTS: usize = 1024;
/// While this many frames are unsent, nothing is retransmitted.
const MAX_UNSENT: usize = 256;
