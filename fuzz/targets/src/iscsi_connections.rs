//! A hostile initiator with several connections, which join sessions, break, and reassign tasks.
//!
//! ```text
//!   stream = record ...      record = event and connection (1 byte), length (2), bytes that it sends
//! ```

use crate::choices::Choices;
use crate::iscsi_target::{exports, node};
use crate::records::Records;
use crate::wire::Wire;
use blockmux_proto::driver::session::{CoreHandle, Demand, StreamSession, Timed};
use blockmux_proto::driver::target::{IoSource, SessionStage, TargetLifecycle};
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::iscsi::node::IscsiNode;
use blockmux_proto::iscsi::server::{IscsiTargetSession, LocalSessions};
use blockmux_proto::volume_state::NotAdmitted;
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Channel, Completion, Io, IoError, Op, Output, Pool, Waker};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reads `data` as choices and events.
pub(crate) fn iscsi_connections(data: &[u8]) {
    let (choices, stream) = Choices::split(data);
    let mut run = IscsiConnectionsRun::new(choices);
    let mut records = Records(&stream);
    for _ in 0..MAX_EVENTS {
        let Some(event) = records.kind() else { break };
        run.happen(event, &records.bytes());
    }
    run.finish();
}

struct IscsiConnectionsRun<'a> {
    choices: Choices<'a>,
    node: Arc<IscsiNode>,
    local: Rc<LocalSessions>,
    exports: Exports,
    channels: Vec<Box<dyn Channel>>,
    pool: Pool,
    now: Instant,
    connections: [Option<SessionConnection>; 4],
    /// Remaining bytes that may be read, which limits the time for one input.
    budget: u64,
}

/// One connection and its driver.
struct SessionConnection {
    session: IscsiTargetSession,
    wire: Wire,
    in_flight: Vec<(VolumeId, Io)>,
    /// I/O that waits for its range.
    waiting: Vec<(VolumeId, Io)>,
    /// Whether nothing more is received.
    is_over: bool,
}

impl SessionConnection {
    /// Begins an I/O, or lets it wait for its range.
    fn begin(&mut self, volume: VolumeId, io: Io, is_late: bool) {
        match self.session.begin(volume, &io, is_late) {
            Ok(()) => self.in_flight.push((volume, io)),
            Err(NotAdmitted::Denied(_)) => {}
            Err(NotAdmitted::Locked(_) | NotAdmitted::Draining) => self.waiting.push((volume, io)),
        }
    }
}

impl IscsiConnectionsRun<'_> {
    fn new(choices: Choices<'_>) -> IscsiConnectionsRun<'_> {
        let exports = exports();
        let pool = Pool::new(usize::MAX);
        let core = TestCore::with_pool(&pool).as_core();
        let channels = exports.iter().map(|(_, export)| {
            export.volume.open(&core, MAX_IN_FLIGHT, Waker::idle()).expect("a RAM volume opens")
        });
        IscsiConnectionsRun {
            choices,
            node: node(&exports),
            local: LocalSessions::new(CoreHandle::new(())),
            channels: channels.collect(),
            exports,
            pool,
            now: Instant::now(),
            connections: [None, None, None, None],
            budget: READ_BUDGET,
        }
    }

    fn happen(&mut self, event: u8, bytes: &[u8]) {
        let at = usize::from(event & 3);
        if event & LEAVES != 0 {
            self.leave(at);
        }
        if event & DROPPED != 0 {
            self.connections[at] = None;
        }
        if event & TIME_PASSES != 0 {
            self.pass_time();
        }
        if self.connections[at].is_none() {
            let (node, pool) = (self.node.clone(), self.pool.clone());
            let session = IscsiTargetSession::among(&self.local, node, 1, pool, [0; 32], self.now);
            self.connections[at] = Some(SessionConnection {
                session,
                wire: Wire::new(Vec::new()),
                in_flight: Vec::new(),
                waiting: Vec::new(),
                is_over: false,
            });
        }
        if let Some(connection) = &mut self.connections[at] {
            connection.wire.push(bytes);
        }
        for _ in 0..TURNS {
            (0..self.connections.len()).for_each(|at| self.turn(at, event & HOLDS_IO != 0));
        }
    }

    fn leave(&mut self, at: usize) {
        if let Some(connection) = self.connections[at].as_mut().filter(|connection| !connection.is_over) {
            connection.is_over = true;
            let _ = connection.session.on_end(Instant::now());
            assert!(matches!(connection.session.demand(), Demand::Close));
        }
    }

    /// Runs one turn of the driver.
    fn turn(&mut self, at: usize, holds_io: bool) {
        let Some(connection) = &mut self.connections[at] else { return };
        connection.session.on_turn(Instant::now());
        if !connection.is_over && connection.wire.turn(&mut connection.session, &mut self.choices).is_err() {
            connection.is_over = true;
            let _ = connection.session.on_end(Instant::now());
        }
        for (volume, io) in std::mem::take(&mut connection.waiting) {
            connection.begin(volume, io, true);
        }
        while let Some((volume, io)) = connection.session.poll_io() {
            let export = self.exports.get(volume).expect("the volume exists");
            assert_eq!(export.volume.info().check(&io), Ok(()), "{io:?}");
            assert!(
                connection.in_flight.iter().all(|(_, other)| other.tag != io.tag),
                "{io:?} has the tag of another I/O in flight"
            );
            connection.begin(volume, io, false);
        }
        while let Some((volume, tag)) = connection.session.poll_cancel() {
            let is_it = |(on, io): &(VolumeId, Io)| *on == volume && io.tag == tag;
            if let Some(at) = connection.waiting.iter().position(is_it) {
                connection.waiting.remove(at);
                let aborted = Completion { tag, result: Err(IoError::Aborted) };
                connection.session.on_io(aborted, Instant::now());
                continue;
            }
            assert!(connection.in_flight.iter().any(is_it), "{tag:?} is to be cancelled but not in flight");
        }
        let sent = connection.session.outbox().take_bytes();
        assert!(sent.len() <= MAX_OUTBOX, "{} bytes are queued", sent.len());
        if !holds_io {
            self.complete(at);
        }
        if let Some(connection) = &self.connections[at]
            && matches!(connection.session.demand(), Demand::Close)
            && connection.in_flight.is_empty()
            && connection.waiting.is_empty()
            && connection.session.stage() != SessionStage::Lingering
        {
            self.connections[at] = None;
        }
    }

    /// Completes all I/O of a connection as its volume does.
    fn complete(&mut self, at: usize) {
        let Some(connection) = &mut self.connections[at] else { return };
        for (volume, io) in std::mem::take(&mut connection.in_flight) {
            let tag = io.tag;
            let result = if io.op == Op::Read && io.len > self.budget {
                Err(IoError::NoMemory)
            } else {
                self.budget -= if io.op == Op::Read { io.len } else { 0 };
                let (channel, mut done) = (&mut self.channels[volume.0 as usize], Vec::new());
                channel.submit(io);
                channel.kick();
                channel.poll(&mut done);
                done.pop().map_or(Ok(Output::Nothing), |done: Completion| done.result)
            };
            connection.session.on_io(Completion { tag, result }, Instant::now());
        }
    }

    /// Moves the clock to the next deadline if that is near, otherwise by ten seconds.
    fn pass_time(&mut self) {
        let next = self
            .connections
            .iter()
            .flatten()
            .filter_map(|connection| connection.session.poll_timeout())
            .min();
        let near = next.filter(|when| *when < self.now + Duration::from_secs(10));
        self.now = near.map_or(self.now + Duration::from_secs(10), |when| when.max(self.now));
        for connection in self.connections.iter_mut().flatten() {
            if connection.session.poll_timeout().is_some_and(|when| when <= self.now)
                && connection.session.on_timeout(self.now).is_err()
            {
                connection.is_over = true;
                let _ = connection.session.on_end(Instant::now());
            }
        }
    }

    /// Completes everything in flight and closes all connections.
    fn finish(mut self) {
        for _ in 0..TURNS {
            (0..self.connections.len()).for_each(|at| self.turn(at, false));
        }
        for at in 0..self.connections.len() {
            self.leave(at);
            (0..self.connections.len()).for_each(|at| self.turn(at, false));
        }
        // A failed connection is retained for an hour at most.
        for _ in 0..TURNS {
            self.now += Duration::from_secs(3 * 3600);
            self.pass_time();
            (0..self.connections.len()).for_each(|at| self.turn(at, false));
        }
        assert!(self.connections.iter().all(Option::is_none), "a connection has not ended");
        assert_eq!(self.pool.out_bytes(), 0, "the pool has lost memory");
    }
}

const LEAVES: u8 = 4;
const DROPPED: u8 = 8;
const TIME_PASSES: u8 = 16;
const HOLDS_IO: u8 = 32;

/// Turns of every driver after each event.
const TURNS: usize = 4;
const MAX_EVENTS: usize = 300;
/// The maximum number of I/O in flight of one connection.
const MAX_IN_FLIGHT: u32 = 272 * 4;
/// The maximum outbox of a session plus its retained data, in bytes.
const MAX_OUTBOX: usize = (64 << 20) + (64 << 20) + (2 << 20);
/// Maximum number of bytes to read for one input: one read of full length.
const READ_BUDGET: u64 = 33 << 20;
