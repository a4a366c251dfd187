//! A hostile target port against the SRP initiator: every request completes exactly
//! once, and none while its memory is registered.
//!
//! ```text
//!   stream = record ...      record = 0                        the well-behaved target answers the next message
//!                                   | kind, length (2), bytes  the hostile one sends these
//! ```
//! Bits of a kind: 1, replace the tag by that of a recent command, which the high four bits select;
//! 2, invalidate the memory of this command; 4, replace the tag by that of a task management
//! function. Bits of the third choice: 1, the first record is the private data of the accepted
//! login; 2, of the rejected login.

use crate::choices::Choices;
use crate::iscsi_target::exports;
use crate::records::Records;
use crate::requests::{MAX_TURNS, Requests, take_turns};
use crate::srp_target::{TARGET, node};
use blockmux_proto::rdma::testing::Recorder;
use blockmux_proto::rdma::{Event, RdmaConnections, RdmaSession, Remote, RemoteRights, Stag, WorkRequest};
use blockmux_proto::scsi::Lun;
use blockmux_proto::session::{Initiator, Overdue, ProtocolError, Target, Timed};
use blockmux_proto::srp::client::{Config, InitiatorSession, Mode};
use blockmux_proto::srp::node::SrpPortId;
use blockmux_proto::srp::server::TargetSession;
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Channel, Pool, Seg, SgList, Waker};
use blockmux_wire::srp::{BufferFormat, DirectDescriptor, SrpCommand, SrpOpcode};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;
use zerocopy::FromBytes;

/// Reads `data` as choices and records.
pub(crate) fn srp_initiator(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let now = Instant::now();
    let pool = Pool::new(choices.of(&[64 << 20, 64 << 20, 16 << 10]));
    let config = Config {
        initiator: SrpPortId([1; 16]),
        target: TARGET,
        lun: Lun::new(0),
        mode: choices.of(&[Mode::Use, Mode::Use, Mode::Use, Mode::Describe]),
        channels: 1,
        immediate_data: true,
    };
    let login = choices.byte();
    let session = InitiatorSession::new(config, pool.clone(), now);
    let private_data = RdmaConnections::endpoint(&session).private_data;
    let (good, accepted) = WellBehavedTarget::new(private_data, now);
    let mut run = Run {
        session,
        queue_pair: Recorder::default(),
        good,
        choices,
        records: Records(&stream),
        pool,
        now,
        requests: Requests::default(),
        unseen: VecDeque::new(),
        commands: Vec::new(),
        function: 0,
        open: BTreeMap::new(),
        last_stag: 0,
        is_over: false,
    };
    let mut private_data = accepted;
    if login & 3 != 0 {
        run.records.kind();
        private_data = run.records.bytes();
    }
    run.event(match login & 2 {
        0 => Event::Connected { private_data },
        _ => Event::Refused { private_data },
    });
    take_turns(|| run.turn());
    run.finish();
}

struct Run<'a> {
    choices: Choices<'a>,
    session: InitiatorSession,
    queue_pair: Recorder,
    good: WellBehavedTarget,
    records: Records<'a>,
    pool: Pool,
    now: Instant,
    requests: Requests,
    /// Messages that the well-behaved target has not received.
    unseen: VecDeque<Vec<u8>>,
    /// The tag and the key of each command, the latest last.
    commands: Vec<(u64, Option<u32>)>,
    /// The tag of the latest task management function.
    function: u64,
    open: Open,
    last_stag: u32,
    is_over: bool,
}

/// Memory that is registered for the target, by key.
type Open = BTreeMap<u32, (SgList, RemoteRights)>;

impl Run<'_> {
    /// Runs one turn of the driver; returns whether there was progress.
    fn turn(&mut self) -> bool {
        let info = self.session.volume_info();
        let mut moved = !self.is_over && self.requests.submit(&mut self.session, info, &mut self.choices);
        moved |= self.post();
        moved |= !self.is_over && self.next_record();
        moved |= self.post();
        moved |= self.requests.poll_done(&mut self.session);
        moved |= self.requests.poll_returned(&mut self.session);
        match self.choices.byte() {
            255 => self.session.on_stop(),
            254 => self.pass_time(),
            253 if !self.is_over && self.session.tick() >= 1 => {
                self.session.abort_overdue(1);
            }
            _ => {}
        }
        moved
    }

    fn event(&mut self, event: Event) {
        let taken = self.session.connection(0).on_event(event, Instant::now());
        taken.unwrap_or_else(|error| self.on_error(error));
    }

    fn on_error(&mut self, error: ProtocolError) {
        let text = error.to_string();
        assert!(!text.contains('\n') && error.reference.starts_with("SRP r16a"), "{text}");
        self.is_over = true;
    }

    /// Takes the session's work requests as far as there is room.
    fn post(&mut self) -> bool {
        let mut moved = false;
        for _ in 0..MAX_TURNS {
            let room = self.choices.below(4);
            let Some(work) = self.queue_pair.next(&mut self.session.connection(0), room) else { break };
            moved = true;
            match work {
                WorkRequest::Receive | WorkRequest::Disconnect => {}
                WorkRequest::Register { id, local, access } => {
                    self.last_stag += 1;
                    assert!(!local.is_empty());
                    let remote =
                        Remote { stag: Stag(self.last_stag), address: BASE, len: local.len() as u32 };
                    self.open.insert(self.last_stag, (local, access));
                    let endpoint = RdmaConnections::endpoint(&self.session);
                    assert!(self.open.len() <= endpoint.regions as usize);
                    self.event(Event::Registered { id, remote });
                }
                WorkRequest::Invalidate { stag } => drop(self.open.remove(&stag.0)),
                WorkRequest::Send { head, payload, invalidate: None, .. } => {
                    let message = [&head[..], &payload.to_vec()].concat();
                    self.on_sent(&message);
                    self.unseen.push_back(message);
                }
                other => panic!("an initiator does not post {other:?}"),
            }
        }
        moved
    }

    /// Checks the rules for initiators.
    fn on_sent(&mut self, message: &[u8]) {
        assert!(message.len() <= 8260);
        let tag = u64::from_be_bytes(message[8..16].try_into().expect("eight bytes"));
        if SrpOpcode(message[0]) != SrpOpcode::COMMAND {
            if SrpOpcode(message[0]) == SrpOpcode::TASK_MANAGEMENT {
                self.function = tag;
            }
            return;
        }
        let (command, rest) = SrpCommand::read_from_prefix(message).expect("a command");
        let key = match command.buffer_formats() {
            (BufferFormat::NONE, BufferFormat::NONE) | (BufferFormat::IMMEDIATE, BufferFormat::NONE) => None,
            (format, BufferFormat::NONE) | (BufferFormat::NONE, format) => {
                assert_eq!(format, BufferFormat::DIRECT);
                let descriptor = DirectDescriptor::read_from_bytes(rest).expect("one descriptor");
                let (memory, _) = &self.open[&descriptor.key.get()];
                assert_eq!((descriptor.va.get(), descriptor.len.get() as usize), (BASE, memory.len()));
                Some(descriptor.key.get())
            }
            both => panic!("{both:?}"),
        };
        self.commands.push((tag, key));
    }

    /// Delivers the target's next message.
    fn next_record(&mut self) -> bool {
        let Some(kind) = self.records.kind() else { return false };
        if kind == 0 {
            let Some(message) = self.unseen.pop_front() else { return true };
            for message in self.good.answer(&message, &self.open) {
                self.receive(&message, None);
            }
            return true;
        }
        let (mut bytes, mut key) = (self.records.bytes(), None);
        let meant = self.commands.iter().rev().nth(usize::from(kind >> 4)).copied();
        if let Some((tag, own)) = meant.filter(|_| bytes.len() >= 16) {
            if kind & 1 != 0 {
                bytes[8..16].copy_from_slice(&tag.to_be_bytes());
            }
            key = own.filter(|key| kind & 2 != 0 && self.open.remove(key).is_some());
        }
        if kind & 4 != 0 && bytes.len() >= 16 {
            bytes[8..16].copy_from_slice(&self.function.to_be_bytes());
        }
        bytes.truncate(RdmaConnections::endpoint(&self.session).receive_len as usize);
        self.receive(&bytes, key.map(Stag));
        true
    }

    fn receive(&mut self, message: &[u8], invalidated: Option<Stag>) {
        if !self.is_over {
            self.event(Event::Received { message: Seg::from_slice(message), invalidated });
        }
    }

    fn pass_time(&mut self) {
        let due = self.session.connection(0).poll_timeout();
        if let Some(when) = due.filter(|_| !self.is_over) {
            self.now = self.now.max(when);
            let passed = self.session.connection(0).on_timeout(self.now);
            passed.unwrap_or_else(|error| self.on_error(error));
        }
    }

    /// Ends the connection.
    fn finish(mut self) {
        self.requests.poll_done(&mut self.session);
        self.open.clear();
        self.queue_pair.works.clear();
        let _ = self.session.connection(0).on_event(Event::Disconnected, Instant::now());
        self.requests.poll_done(&mut self.session);
        self.requests.poll_returned(&mut self.session);
        if let Some(refused) = self.session.refused() {
            assert!(!refused.to_string().contains('\n'));
        }
        self.requests.take_back(&mut self.session);
        assert!(self.queue_pair.next(&mut self.session.connection(0), 100).is_none());
        drop(self.session);
        assert_eq!(self.pool.out_bytes(), 0, "memory is lost");
    }
}

/// A well-behaved target: Blockmux's own, over a RAM volume as LUN 0.
struct WellBehavedTarget {
    session: TargetSession,
    queue_pair: Recorder,
    channel: Box<dyn Channel>,
}

impl WellBehavedTarget {
    /// Creates a target that accepts this login, and returns the private data of the accept.
    fn new(private_data: Vec<u8>, now: Instant) -> (WellBehavedTarget, Vec<u8>) {
        let exports = exports();
        let mut session = TargetSession::new(node(&exports), Pool::new(usize::MAX), Arc::new(|| {}), now);
        session.on_event(Event::Requested { private_data, reads: 32 }, now).expect("anybody may log in");
        let mut queue_pair = Recorder::default();
        let Some(WorkRequest::Accept { private_data }) = queue_pair.next(&mut session, 100) else {
            panic!("anybody may log in")
        };
        let core = TestCore::new().as_core();
        let (_, disk) = exports.iter().next().expect("there is one");
        let channel = disk.volume.open(&core, session.depth(), Waker::idle()).expect("a RAM volume opens");
        (WellBehavedTarget { session, queue_pair, channel }, private_data)
    }

    /// The target's answers to a message; it accesses registered memory.
    fn answer(&mut self, message: &[u8], open: &Open) -> Vec<Vec<u8>> {
        let mut answers = Vec::new();
        let event = Event::Received { message: Seg::from_slice(message), invalidated: None };
        let mut next = self.session.on_event(event, Instant::now()).is_ok();
        while next {
            next = false;
            while let Some(work) = self.queue_pair.next(&mut self.session, 100) {
                next = true;
                let place = |remote: Remote, len: usize| {
                    let (memory, _) = open.get(&remote.stag.0)?;
                    let offset = remote.address.wrapping_sub(BASE) as usize;
                    (offset.saturating_add(len) <= memory.len()).then(|| memory.slice(offset, len))
                };
                let id = match work {
                    WorkRequest::Write { id, local, remote } => {
                        if let Some(memory) = place(remote, local.len()) {
                            local.copy_to_list(&memory);
                        }
                        id
                    }
                    WorkRequest::Read { id, local, remote } => {
                        if let Some(memory) = place(remote, local.len()) {
                            memory.copy_to_list(&local);
                        }
                        id
                    }
                    WorkRequest::Send { head, payload, .. } => {
                        answers.push([&head[..], &payload.to_vec()].concat());
                        continue;
                    }
                    _ => continue,
                };
                let _ = self.session.on_event(Event::Done { id, result: Ok(()) }, Instant::now());
            }
            while let Some((_, io)) = self.session.poll_io() {
                next = true;
                let mut done = Vec::new();
                self.channel.submit(io);
                self.channel.poll(&mut done);
                done.into_iter().for_each(|done| self.session.on_io(done, Instant::now()));
            }
        }
        answers
    }
}

/// Address at which registered memory begins.
const BASE: u64 = 64;
