//! Test driver of a target session with real volumes: a minimal engine.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use crate::driver::session::{Demand, ProtocolError, StreamSession};
use crate::driver::target::{IoSource, TargetLifecycle};
use crate::exports::{Exports, VolumeId};
use crate::volume_state::NotAdmitted;
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Channel, Chunk, Completion, Io, IoError, Memory, SgList, Tag, Waker};
use std::collections::VecDeque;
use std::time::Instant;

/// A target session with its connection and volumes.
pub(crate) struct Pump<S> {
    pub(crate) session: S,
    channels: Vec<Box<dyn Channel>>,
    /// Bytes that the client has sent and the target has not received.
    wire: VecDeque<u8>,
    /// The maximum number of bytes of one receive.
    step: usize,
    buffer: Chunk,
    /// The memory of `Demand::Place`, and the number of bytes received into it.
    placing: Option<(SgList, usize)>,
    /// I/O that has not begun: its range is locked, or it is throttled.
    pub(crate) waiting: VecDeque<(VolumeId, Io)>,
    /// Whether limits throttle all I/O.
    pub(crate) throttles: bool,
    /// Whether I/O is held in [`Pump::submitted`] instead of executed.
    pub(crate) holds_io: bool,
    pub(crate) submitted: VecDeque<(VolumeId, Io)>,
    /// I/O that the session has cancelled.
    pub(crate) cancelled: Vec<(VolumeId, Tag)>,
    /// Number of payloads that were received directly into their memory.
    pub(crate) placed: usize,
    /// The current time.
    pub(crate) now: Instant,
}

impl<S: IoSource + TargetLifecycle> Pump<S> {
    pub(crate) fn new(session: S, exports: &Exports) -> Pump<S> {
        let core = TestCore::new().as_core();
        let open = |export: &crate::exports::Export| {
            export.volume.open(&core, session.depth(), Waker::idle()).expect("a test volume opens")
        };
        Pump {
            channels: exports.iter().map(|(_, export)| open(&export)).collect(),
            session,
            wire: VecDeque::new(),
            step: usize::MAX,
            buffer: Chunk::new(Memory::from_heap(BUFFER)),
            placing: None,
            waiting: VecDeque::new(),
            throttles: false,
            holds_io: false,
            submitted: VecDeque::new(),
            cancelled: Vec::new(),
            placed: 0,
            now: Instant::now(),
        }
    }

    /// Carries out the oldest held I/O.
    pub(crate) fn finish_one(&mut self) {
        let (volume, io) = self.submitted.pop_front().expect("an I/O is held");
        let channel = &mut self.channels[volume.0 as usize];
        let mut done: Vec<Completion> = Vec::new();
        channel.submit(io);
        channel.kick();
        channel.poll(&mut done);
        let now = self.now;
        done.into_iter().for_each(|done| self.session.on_io(done, now));
    }

    /// Runs turns without receiving until there is no progress.
    pub(crate) fn turn(&mut self) {
        loop {
            self.session.on_turn(self.now);
            if !self.take_io() {
                return;
            }
        }
    }

    /// Begins an I/O, or lets it wait.
    fn begin(&mut self, volume: VolumeId, io: Io, is_late: bool) {
        let begun = match self.throttles {
            true => Err(NotAdmitted::Draining),
            false => self.session.begin(volume, &io, is_late),
        };
        match begun {
            Ok(()) => self.submitted.push_back((volume, io)),
            Err(NotAdmitted::Denied(_)) => {}
            Err(NotAdmitted::Locked(_) | NotAdmitted::Draining) => self.waiting.push_back((volume, io)),
        }
    }

    /// Takes the session's I/O, and carries it out unless it is held; returns whether there was
    /// any.
    fn take_io(&mut self) -> bool {
        for (volume, io) in std::mem::take(&mut self.waiting) {
            self.begin(volume, io, true);
        }
        while let Some((volume, io)) = self.session.poll_io() {
            self.begin(volume, io, false);
        }
        while let Some(cancelled) = self.session.poll_cancel() {
            if let Some(at) = self.waiting.iter().position(|(_, io)| io.tag == cancelled.1) {
                self.waiting.remove(at);
                let aborted = Completion { tag: cancelled.1, result: Err(IoError::Aborted) };
                self.session.on_io(aborted, self.now);
            }
            self.cancelled.push(cancelled);
        }
        let mut moved = false;
        while !self.holds_io && !self.submitted.is_empty() {
            self.finish_one();
            moved = true;
        }
        moved
    }
}

impl<S: StreamSession + IoSource + TargetLifecycle> Pump<S> {
    /// Limits each receive to `step` bytes.
    pub(crate) fn split_at(mut self, step: usize) -> Pump<S> {
        self.step = step;
        self
    }

    /// Sends `bytes` from the client; the session consumes what it demands.
    pub(crate) fn client_sends(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        self.wire.extend(bytes);
        self.run()
    }

    /// Sends `bytes` from the client, expects no protocol error, and returns the target's answer.
    pub(crate) fn exchange(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.client_sends(bytes).expect("the client keeps to the protocol");
        self.sent()
    }

    /// Takes the bytes that the target has sent.
    pub(crate) fn sent(&mut self) -> Vec<u8> {
        self.session.outbox().take_bytes()
    }

    /// Number of bytes that the session has not consumed.
    pub(crate) fn untaken(&self) -> usize {
        self.wire.len() + self.buffer.unread().len()
    }

    /// Runs turns until there is no progress.
    pub(crate) fn run(&mut self) -> Result<(), ProtocolError> {
        loop {
            self.session.on_turn(self.now);
            let has_come = self.receive()?;
            if !self.take_io() && !has_come {
                return Ok(());
            }
        }
    }

    /// Receives once; returns whether there was progress.
    fn receive(&mut self) -> Result<bool, ProtocolError> {
        if self.placing.is_some() {
            return self.place();
        }
        match self.session.demand() {
            Demand::Bytes(wanted) => {
                let mut came = 0;
                if wanted > self.buffer.unread().len() {
                    self.make_room(wanted);
                    came = self.step.min(self.wire.len()).min(self.buffer.room());
                    let bytes: Vec<u8> = self.wire.drain(..came).collect();
                    self.buffer.extend(&bytes);
                    if wanted > self.buffer.unread().len() {
                        return Ok(came > 0);
                    }
                }
                let taken = self.session.on_bytes(&self.buffer, self.now)?;
                self.buffer.take(taken);
                Ok(taken + came > 0)
            }
            Demand::Place(list) => {
                let here = self.buffer.unread().len().min(list.len());
                list.slice(0, here).copy_from(&self.buffer.unread()[..here]);
                self.buffer.take(here);
                self.placing = Some((list, here));
                self.place()?;
                Ok(true)
            }
            Demand::StartTls | Demand::Nothing | Demand::Close => Ok(false),
        }
    }

    fn place(&mut self) -> Result<bool, ProtocolError> {
        let Some((list, filled)) = &mut self.placing else { return Ok(false) };
        let came = self.step.min(self.wire.len()).min(list.len() - *filled);
        let bytes: Vec<u8> = self.wire.drain(..came).collect();
        list.slice(*filled, came).copy_from(&bytes);
        *filled += came;
        if *filled == list.len() {
            self.placing = None;
            self.placed += 1;
            self.session.on_placed(self.now)?;
        }
        Ok(came > 0)
    }

    /// Moves the unread bytes to a new buffer if `wanted` bytes would not fit.
    fn make_room(&mut self, wanted: usize) {
        if self.buffer.unread().len() + self.buffer.room() < wanted.max(1) || self.buffer.room() == 0 {
            let mut fresh = Chunk::new(Memory::from_heap(BUFFER));
            fresh.extend(self.buffer.unread());
            self.buffer = fresh;
        }
    }
}

const BUFFER: usize = 256 << 10;
