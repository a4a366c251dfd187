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
//! login; 2, of the rejected login; 4, short reads are registered without memory. The fourth choice
//! is the number of channels; a choice selects the channel of each record, and how the target
//! answers the login of each further channel.

use crate::choices::Choices;
use crate::iscsi_target::exports;
use crate::records::Records;
use crate::requests::{MAX_TURNS, Requests, take_turns};
use crate::srp_target::{TARGET, node};
use blockmux_proto::driver::session::{Connections, Initiator, Overdue, ProtocolError, Timed};
use blockmux_proto::driver::target::IoSource;
use blockmux_proto::driver::transport::TransportInfo;
use blockmux_proto::exports::Exports;
use blockmux_proto::rdma::testing::{Recorder, UnbackedRegions};
use blockmux_proto::rdma::{Event, RdmaConnections, RdmaSession, Remote, RemoteRights, Stag, WorkRequest};
use blockmux_proto::scsi::Lun;
use blockmux_proto::scsi::initiator::UnitInfo;
use blockmux_proto::srp::client::{SrpInitiatorConfig, SrpInitiatorSession, SrpSessionMode};
use blockmux_proto::srp::node::{SrpNode, SrpPortId};
use blockmux_proto::srp::server::SrpTargetSession;
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
    let mode = choices.of(&[
        SrpSessionMode::Use,
        SrpSessionMode::Use,
        SrpSessionMode::Use,
        SrpSessionMode::Describe,
    ]);
    let login = choices.byte();
    let config = SrpInitiatorConfig {
        initiator: SrpPortId([1; 16]),
        target: TARGET,
        lun: Lun::new(0),
        mode,
        channels: choices.of(&[1, 2, 3, 4]),
        immediate_data: true,
    };
    let session = SrpInitiatorSession::new(config, pool.clone(), now);
    let private_data = RdmaConnections::endpoint(&session).private_data;
    let exports = exports();
    let node = node(&exports);
    let (good, mut private_data) = WellBehavedTarget::new(&node, &exports, private_data, now);
    let mut run = SrpInitiatorRun {
        session,
        channels: vec![FuzzChannel { good, ..FuzzChannel::new(login & 4 != 0) }],
        is_unbacked: login & 4 != 0,
        target: (node, exports),
        choices,
        records: Records(&stream),
        pool,
        now,
        requests: Requests::default(),
        commands: Vec::new(),
        function: 0,
        open: BTreeMap::new(),
        last_stag: 0,
        is_over: false,
    };
    if login & 3 != 0 {
        run.records.kind();
        private_data = run.records.bytes();
    }
    run.event(
        0,
        match login & 2 {
            0 => Event::Connected { private_data },
            _ => Event::Refused { private_data },
        },
    );
    take_turns(|| run.turn());
    run.finish();
}

struct SrpInitiatorRun<'a> {
    choices: Choices<'a>,
    session: SrpInitiatorSession,
    channels: Vec<FuzzChannel>,
    /// Short reads are registered without memory.
    is_unbacked: bool,
    /// Node and volumes of the well-behaved target.
    target: (Arc<SrpNode>, Exports),
    records: Records<'a>,
    pool: Pool,
    now: Instant,
    requests: Requests,
    /// The tag and the key of each command, the latest last.
    commands: Vec<(u64, Option<u32>)>,
    /// The tag of the latest task management function.
    function: u64,
    open: Open,
    last_stag: u32,
    is_over: bool,
}

/// One channel of the session.
#[derive(Default)]
struct FuzzChannel {
    queue_pair: Recorder,
    /// The well-behaved target's side; `None` if the login was not accepted.
    good: Option<WellBehavedTarget>,
    /// Messages that the well-behaved target has not received.
    unseen: VecDeque<Vec<u8>>,
}

impl FuzzChannel {
    fn new(is_unbacked: bool) -> FuzzChannel {
        let queue_pair = Recorder { unbacked: is_unbacked.then(Default::default), ..Recorder::default() };
        FuzzChannel { queue_pair, ..FuzzChannel::default() }
    }
}

/// Memory that is registered for the target, by key.
type Open = BTreeMap<u32, (SgList, RemoteRights)>;

impl SrpInitiatorRun<'_> {
    /// Runs one turn of the driver; returns whether there was progress.
    fn turn(&mut self) -> bool {
        let info = self.session.unit().map(UnitInfo::volume_info);
        let mut moved = !self.is_over && self.requests.submit(&mut self.session, info, &mut self.choices);
        moved |= !self.is_over && self.connect();
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

    /// Connects the next channel that the session wants.
    fn connect(&mut self) -> bool {
        let Some((at, _)) = self.session.poll_connect() else { return false };
        assert_eq!(at, self.channels.len());
        let mut channel = FuzzChannel::new(self.is_unbacked);
        let answer = self.choices.byte();
        if answer == 255 {
            self.channels.push(channel);
            assert!(
                self.session.on_lost(at, self.now),
                "the session does not continue without a further channel"
            );
            return true;
        }
        let private_data = self.session.connection(at).endpoint().private_data;
        let (node, exports) = &self.target;
        let (good, mut private_data) = WellBehavedTarget::new(node, exports, private_data, self.now);
        let is_accepted = good.is_some() && answer < 253;
        channel.good = good.filter(|_| is_accepted);
        self.channels.push(channel);
        if answer >= 252 {
            self.records.kind();
            private_data = self.records.bytes();
        }
        self.session.on_connected(at, &TransportInfo::default(), self.now);
        self.event(
            at,
            match is_accepted {
                true => Event::Connected { private_data },
                false => Event::Refused { private_data },
            },
        );
        true
    }

    fn event(&mut self, at: usize, event: Event) {
        let taken = self.session.connection(at).on_event(event, Instant::now());
        taken.unwrap_or_else(|error| self.on_error(error));
    }

    fn on_error(&mut self, error: ProtocolError) {
        let text = error.to_string();
        assert!(!text.contains('\n') && error.reference.starts_with("SRP r16a"), "{text}");
        self.is_over = true;
    }

    /// Takes the session's work requests as far as there is room.
    fn post(&mut self) -> bool {
        (0..self.channels.len()).fold(false, |moved, at| self.post_channel(at) | moved)
    }

    fn post_channel(&mut self, at: usize) -> bool {
        let mut moved = false;
        for _ in 0..MAX_TURNS {
            let room = self.choices.below(4);
            let queue_pair = &mut self.channels[at].queue_pair;
            let Some(work) = queue_pair.next(&mut self.session.connection(at), room) else { break };
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
                    assert!(self.open.len() <= endpoint.regions as usize * self.channels.len());
                    self.event(at, Event::Registered { id, remote });
                }
                WorkRequest::Invalidate { stag } => drop(self.open.remove(&stag.0)),
                WorkRequest::Send { head, payload, invalidate: None, .. } => {
                    let message = [&head[..], &payload.to_vec()].concat();
                    self.on_sent(at, &message);
                    self.channels[at].unseen.push_back(message);
                }
                other => panic!("an initiator does not post {other:?}"),
            }
        }
        moved
    }

    /// Checks the rules for initiators.
    fn on_sent(&mut self, at: usize, message: &[u8]) {
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
                let key = descriptor.key.get();
                let unbacked = self.channels[at].queue_pair.unbacked.as_ref();
                let lent = unbacked.and_then(|regions| regions.get(Stag(key))).map(Seg::len);
                let len = self.open.get(&key).map(|(memory, _)| memory.len()).or(lent);
                assert_eq!((descriptor.va.get(), Some(descriptor.len.get() as usize)), (BASE, len));
                Some(key)
            }
            both => panic!("{both:?}"),
        };
        self.commands.push((tag, key));
    }

    /// Delivers the target's next message.
    fn next_record(&mut self) -> bool {
        let Some(kind) = self.records.kind() else { return false };
        let at = if self.channels.len() > 1 { self.choices.below(self.channels.len()) } else { 0 };
        let FuzzChannel { queue_pair, good, unseen } = &mut self.channels[at];
        if kind == 0 {
            let Some((good, message)) = good.as_mut().zip(unseen.pop_front()) else { return true };
            for message in good.answer(&message, (&self.open, queue_pair.unbacked.as_ref())) {
                self.receive(at, &message, None);
            }
            return true;
        }
        let is_connected = at == 0 || good.is_some();
        let (mut bytes, mut key) = (self.records.bytes(), None);
        let meant = self.commands.iter().rev().nth(usize::from(kind >> 4)).copied();
        if let Some((tag, own)) = meant.filter(|_| bytes.len() >= 16) {
            if kind & 1 != 0 {
                bytes[8..16].copy_from_slice(&tag.to_be_bytes());
            }
            key = own.filter(|_| kind & 2 != 0);
        }
        if kind & 4 != 0 && bytes.len() >= 16 {
            bytes[8..16].copy_from_slice(&self.function.to_be_bytes());
        }
        bytes.truncate(RdmaConnections::endpoint(&self.session).receive_len as usize);
        if is_connected {
            self.receive(at, &bytes, key.map(Stag));
        }
        true
    }

    /// Delivers a message that invalidates `key`. A queue pair reports only invalidations of
    /// registered memory.
    fn receive(&mut self, at: usize, message: &[u8], key: Option<Stag>) {
        let written = self.channels[at].queue_pair.unbacked.as_mut().zip(key);
        let written = written.and_then(|(unbacked, key)| unbacked.invalidate(key));
        let invalidated = key.filter(|key| written.is_some() || self.open.remove(&key.0).is_some());
        if !self.is_over {
            self.event(at, Event::Received { message: Seg::from_slice(message), invalidated, written });
        }
    }

    fn pass_time(&mut self) {
        for at in 0..self.channels.len() {
            let due = self.session.connection(at).poll_timeout();
            if let Some(when) = due.filter(|_| !self.is_over) {
                self.now = self.now.max(when);
                let passed = self.session.connection(at).on_timeout(self.now);
                passed.unwrap_or_else(|error| self.on_error(error));
            }
        }
    }

    /// Ends the connection.
    fn finish(mut self) {
        self.requests.poll_done(&mut self.session);
        self.open.clear();
        for (at, channel) in self.channels.iter_mut().enumerate() {
            channel.queue_pair.works.clear();
            let _ = self.session.connection(at).on_event(Event::Disconnected, Instant::now());
        }
        self.requests.poll_done(&mut self.session);
        self.requests.poll_returned(&mut self.session);
        if let Some(refused) = self.session.refused() {
            assert!(!refused.to_string().contains('\n'));
        }
        self.requests.take_back(&mut self.session);
        for (at, channel) in self.channels.iter_mut().enumerate() {
            assert!(channel.queue_pair.next(&mut self.session.connection(at), 100).is_none());
        }
        drop(self.session);
        assert_eq!(self.pool.out_bytes(), 0, "the pool has lost memory");
    }
}

/// A well-behaved target: Blockmux's own, over a RAM volume as LUN 0.
struct WellBehavedTarget {
    session: SrpTargetSession,
    queue_pair: Recorder,
    channel: Box<dyn Channel>,
}

impl WellBehavedTarget {
    /// Answers a login with private data. Returns no target if it rejects the login.
    fn new(
        node: &Arc<SrpNode>,
        exports: &Exports,
        private_data: Vec<u8>,
        now: Instant,
    ) -> (Option<WellBehavedTarget>, Vec<u8>) {
        let mut session = SrpTargetSession::new(node.clone(), Pool::new(usize::MAX), Arc::new(|| {}), now);
        session
            .on_event(Event::Requested { private_data, reads: 32 }, now)
            .expect("the login is well-formed");
        let mut queue_pair = Recorder::default();
        let private_data = match queue_pair.next(&mut session, 100) {
            Some(WorkRequest::Accept { private_data }) => private_data,
            Some(WorkRequest::Reject { private_data }) => return (None, private_data),
            other => panic!("a target does not post {other:?} before a login"),
        };
        // The login takes effect once the initiator has shown that it receives the acceptance.
        session
            .on_event(Event::Connected { private_data: Vec::new() }, now)
            .expect("the connection is established");
        let core = TestCore::new().as_core();
        let (_, disk) = exports.iter().next().expect("there is one volume");
        let channel = disk.volume.open(&core, session.depth(), Waker::idle()).expect("a RAM volume opens");
        (Some(WellBehavedTarget { session, queue_pair, channel }), private_data)
    }

    /// The target's answers to a message; it accesses registered memory.
    fn answer(
        &mut self,
        message: &[u8],
        (open, unbacked): (&Open, Option<&UnbackedRegions>),
    ) -> Vec<Vec<u8>> {
        let mut answers = Vec::new();
        let event = Event::Received { message: Seg::from_slice(message), invalidated: None, written: None };
        let mut next = self.session.on_event(event, Instant::now()).is_ok();
        while next {
            next = false;
            while let Some(work) = self.queue_pair.next(&mut self.session, 100) {
                next = true;
                let place = |remote: Remote, len: usize| {
                    let lent = unbacked.and_then(|regions| regions.get(remote.stag));
                    let lent = lent.map(|data| SgList::one(data.clone()));
                    let memory = open.get(&remote.stag.0).map(|(memory, _)| memory.clone()).or(lent)?;
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
            while let Some((volume, io)) = self.session.poll_io() {
                if self.session.begin(volume, &io, false).is_err() {
                    continue;
                }
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
