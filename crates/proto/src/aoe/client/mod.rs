//! The initiator: a queue to one disk.
//!
//! ```text
//!   asking ──config answer──▶ identifying ──IDENTIFY──▶ ready
//!
//!   submit ─▶ waiting ──window, path──▶ Flight ──answer──▶ done
//!                 ▲ smaller pieces        │ ▲
//!                 └───────────────────────┘ └─ no answer in time: again, under the same tag
//! ```
//! It keeps every request until all of its commands have been answered, or nothing was heard of the
//! disk for its patience. Interfaces that go down and come up again, and a target that is started
//! again, only cost time.
//!
//! Bounds: [`MAX_REQUESTS`] requests, `flight::MAX_FLIGHTS` commands in flight, `MAX_UNSENT` frames
//! that wait to be sent.

mod answer;
mod flight;
mod pace;
mod path;
mod request;
mod send;
#[cfg(test)]
mod tests;

use self::flight::Flights;
use self::pace::Pace;
use self::path::Paths;
use self::request::{AoeRequest, LARGEST_FRAME};
use super::AoeAddress;
pub use super::identify::AtaDisk;
use crate::frames::{Frame, FrameOutbox, FramePortInfo, PortId};
use crate::session::{FrameSession, Initiator, PathRank, Timed};
use crate::slots::{SlotKey, Slots};
use blockmux_volume::{Completion, Io, IoError, Memory, Pool, Seg, VolumeInfo};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Which disk, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where it is.
    pub address: AoeAddress,
    /// How long nothing may be heard of it before requests fail.
    pub timeout: Duration,
    /// The upper byte of tags. Whatever else at the same stations uses the disk has another.
    pub id: u8,
    /// Where the rest of tags begins to count. What used the disk before, with the same byte, began
    /// elsewhere.
    pub first: u32,
}

/// A queue to one disk.
pub struct InitiatorSession {
    config: Config,
    pool: Pool,
    ports: Vec<FramePortInfo>,
    paths: Paths,
    pace: Pace,
    disk: Option<AtaDisk>,
    requests: Slots<AoeRequest>,
    /// Those of which commands are to be made, in order.
    waiting: VecDeque<SlotKey>,
    /// Came since time was told last.
    fresh: VecDeque<Io>,
    flights: Flights,
    /// What was due last, emptied: for the next time.
    due: Vec<u32>,
    done: VecDeque<Completion>,
    outbox: FrameOutbox,
    /// What zeroes are written from.
    zeroes: Option<Seg>,
    /// When all stations are asked for the disk, if they are to be.
    ask_at: Option<Instant>,
    asked: u32,
    /// When they were asked last.
    asked_at: Option<Instant>,
    /// When something was heard of the disk last, or was first waited for.
    heard: Instant,
    /// Nothing is due before.
    next_due: Option<Instant>,
    stops: bool,
}

impl InitiatorSession {
    /// A session that begins to ask for its disk as soon as it has a port.
    #[must_use]
    pub fn new(config: Config, pool: Pool, now: Instant) -> InitiatorSession {
        InitiatorSession {
            flights: Flights::new(config.id, config.first),
            config,
            pool,
            ports: Vec::new(),
            paths: Paths::new(),
            pace: Pace::new(),
            disk: None,
            requests: Slots::default(),
            waiting: VecDeque::new(),
            fresh: VecDeque::new(),
            due: Vec::new(),
            done: VecDeque::new(),
            outbox: FrameOutbox::default(),
            zeroes: None,
            ask_at: Some(now),
            asked: 0,
            asked_at: None,
            heard: now,
            next_due: None,
            stops: false,
        }
    }

    /// What the disk says of itself, once it has been heard.
    #[must_use]
    pub fn disk(&self) -> Option<&AtaDisk> {
        self.disk.as_ref()
    }

    /// The disk as a volume.
    #[must_use]
    pub fn volume_info(&self) -> Option<VolumeInfo> {
        self.disk().map(AtaDisk::volume_info)
    }

    /// The stations that answer for it, and of how many sectors frames are known to pass.
    pub fn stations(&self) -> impl Iterator<Item = (crate::frames::Station, u8)> {
        self.paths.iter().map(|path| (path.station, path.sectors))
    }

    /// Whether it is still tried how large frames may be.
    #[must_use]
    pub fn is_probing(&self) -> bool {
        self.paths.iter().any(|path| path.probe.is_some())
    }

    /// How many commands may be in flight now.
    #[must_use]
    pub fn window(&self) -> u32 {
        self.pace.window()
    }

    /// How many requests it holds.
    #[must_use]
    pub fn held(&self) -> usize {
        self.requests.len().saturating_add(self.fresh.len())
    }

    fn port(&self, id: PortId) -> Option<&FramePortInfo> {
        self.ports.get(usize::from(id.0))
    }

    /// Completes a request as it stands; what it has in flight is forgotten.
    fn complete(&mut self, key: SlotKey) {
        let Some(request) = self.requests.remove(key) else { return };
        if request.outstanding > 0 {
            let of_it: Vec<u32> = self
                .flights
                .iter()
                .filter(|(_, flight)| flight.request == Some(key))
                .map(|(tag, _)| tag)
                .collect();
            of_it.into_iter().for_each(|tag| self.forget(tag));
        }
        let tag = request.io.tag;
        self.done.push_back(Completion { tag, result: request.into_result() });
    }

    /// Takes a command out of flight. Nothing of it is sent any more: its memory may have another
    /// owner soon.
    fn forget(&mut self, tag: u32) {
        if let Some(flight) = self.flights.remove(tag)
            && (flight.sends > 1 || !self.outbox.is_empty())
        {
            let tag = tag.to_be_bytes();
            self.outbox.retain(|frame| frame.head().get(6..10) != Some(&tag));
        }
    }

    /// Fails a request.
    fn fail(&mut self, key: SlotKey, error: IoError) {
        if let Some(request) = self.requests.get_mut(key) {
            request.error = request.error.or(Some(error));
            self.complete(key);
        }
    }

    /// Has `on_timeout` called no later than that.
    fn look_at(&mut self, when: Instant) {
        self.next_due = Some(self.next_due.map_or(when, |next| next.min(when)));
    }

    fn zeroes(&mut self) -> Seg {
        let len = LARGEST_FRAME as usize;
        self.zeroes.get_or_insert_with(|| Memory::from_heap(len).seg(0, len)).clone()
    }
}

impl Timed for InitiatorSession {
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        match (self.next_due, self.ask_at) {
            (Some(due), Some(ask)) => Some(due.min(ask)),
            (due, ask) => due.or(ask),
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), crate::session::ProtocolError> {
        self.repeat_what_is_due(now);
        Ok(())
    }
}

impl FrameSession for InitiatorSession {
    fn on_frame(&mut self, frame: &Frame<'_>, now: Instant) {
        self.take_frame(frame, now);
    }

    fn on_port(&mut self, id: PortId, port: FramePortInfo, now: Instant) {
        let at = usize::from(id.0);
        if self.ports.len() <= at {
            self.ports.resize(at.saturating_add(1), FramePortInfo { is_up: false, ..port });
        }
        let Some(place) = self.ports.get_mut(at) else { return };
        let (was, is) = (std::mem::replace(place, port), port);
        if was.mtu != is.mtu || (is.is_up && !was.is_up) {
            self.paths.on_port(id, &port);
            self.probe_paths(now);
        }
        if is.is_up && !was.is_up {
            // What was lost meanwhile need not wait any longer; and the target may be another
            // station now.
            self.ask_at = Some(now);
            self.flights.iter_mut().for_each(|flight| (flight.due, flight.at_once) = (now, true));
            self.look_at(now);
        }
    }

    fn frames(&mut self, now: Instant) -> &mut FrameOutbox {
        self.send_what_fits(now);
        &mut self.outbox
    }
}

impl Initiator for InitiatorSession {
    fn is_ready(&self) -> bool {
        self.disk.is_some()
    }

    #[inline]
    fn room(&self) -> usize {
        if self.is_ready() { MAX_REQUESTS.saturating_sub(self.held()) } else { 0 }
    }

    #[inline]
    fn submit(&mut self, io: Io) {
        self.fresh.push_back(io);
    }

    #[inline]
    fn poll_done(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    fn poll_returned(&mut self) -> Option<Io> {
        None
    }

    fn take_unfinished(&mut self) -> Vec<Io> {
        self.waiting.clear();
        self.outbox.clear();
        self.flights.clear();
        let mut requests = self.requests.take_all();
        requests.sort_by_key(|request| request.since);
        let fresh = std::mem::take(&mut self.fresh);
        requests.into_iter().map(|request| request.io).chain(fresh).collect()
    }

    fn poll_size(&mut self) -> Option<u64> {
        None
    }

    fn resize(&mut self, _size: u64) {}

    fn path_rank(&self) -> PathRank {
        PathRank::Best
    }

    fn on_stop(&mut self) {
        self.stops = true;
    }
}

fn later(now: Instant, by: Duration) -> Instant {
    now.checked_add(by).unwrap_or(now)
}

/// Requests that it takes.
pub const MAX_REQUESTS: usize = 1024;
/// Nothing is sent again while so many frames wait.
const MAX_UNSENT: usize = 256;
