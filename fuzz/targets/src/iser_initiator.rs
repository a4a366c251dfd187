//! A hostile target against the iSER initiator: every request completes exactly
//! once, and none while its memory is registered.
//!
//! ```text
//!   stream = record ...      record = 0                        the well-behaved target answers the next message
//!                                   | kind, length (2), bytes  the hostile one sends these
//! ```
//! Bits of a kind: 1, replace the task tag by that of a recent command, which the high four bits
//! select; 2, set valid command numbers; 4, invalidate the memory of this command. Bit 40h of the
//! second choice: short reads are registered without memory.

use crate::choices::Choices;
use crate::iscsi_target::{exports, node};
use crate::records::Records;
use crate::requests::{MAX_TURNS, Requests, take_turns};
use blockmux_proto::driver::session::{Initiator, Overdue, ProtocolError, Timed};
use blockmux_proto::driver::target::IoSource;
use blockmux_proto::iscsi::client::{
    BurstSize, IscsiInitiatorConfig, IscsiInitiatorSession, SessionPurpose, default_proposal,
};
use blockmux_proto::iscsi::login::operational::OperationalKey;
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::server::{IscsiTargetSession, IserTargetSession};
use blockmux_proto::rdma::testing::{Recorder, UnbackedRegions};
use blockmux_proto::rdma::{Event, RdmaConnections, RdmaSession, Remote, RemoteRights, Stag, WorkRequest};
use blockmux_proto::scsi::Lun;
use blockmux_proto::scsi::initiator::UnitInfo;
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Channel, Pool, Seg, SgList, Waker};
use blockmux_wire::iscsi::IscsiOpcode;
use blockmux_wire::iscsi::scsi::ScsiCommand;
use blockmux_wire::iser::ControlHeader;
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;
use zerocopy::FromBytes;

/// Reads `data` as choices and records.
pub(crate) fn iser_initiator(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let now = Instant::now();
    let pool = Pool::new(choices.of(&[64 << 20, 64 << 20, 16 << 10]));
    let features = choices.byte();
    let proposal = default_proposal().with(OperationalKey::ImmediateData, u32::from(features % 3 != 0));
    let config = IscsiInitiatorConfig {
        initiator: name("iqn.2026-11.i:me"),
        target: name(TARGET),
        lun: Lun::new(0),
        purpose: choices.of(&[
            SessionPurpose::Use,
            SessionPurpose::Use,
            SessionPurpose::Use,
            SessionPurpose::Describe,
        ]),
        chap: None,
        proposal,
        isid: [0x80, 0, 0, 0, 0, 1],
        burst: BurstSize { commands: 2, ..BurstSize::default() },
    };
    let closes = choices.of(&[0x80, 0x80, 0xc0]);
    let mut run = IserInitiatorRun {
        session: IscsiInitiatorSession::over_rdma(config, pool.clone(), [7; 32], now),
        queue_pair: Recorder {
            unbacked: (features & 0x40 != 0).then(Default::default),
            ..Recorder::default()
        },
        good: WellBehavedTarget::new(closes, now),
        choices,
        records: Records(&stream),
        pool,
        now,
        requests: Requests::default(),
        sent: SentMessages::default(),
        open: BTreeMap::new(),
        last_stag: 0,
        is_over: false,
    };
    run.event(Event::Connected { private_data: vec![closes, 0, 0, 0] });
    take_turns(|| run.turn());
    run.finish();
}

struct IserInitiatorRun<'a> {
    choices: Choices<'a>,
    session: IscsiInitiatorSession,
    queue_pair: Recorder,
    good: WellBehavedTarget,
    records: Records<'a>,
    pool: Pool,
    now: Instant,
    requests: Requests,
    sent: SentMessages,
    open: Open,
    last_stag: u32,
    is_over: bool,
}

/// Memory that is registered for the target, by steering tag.
type Open = BTreeMap<u32, (SgList, RemoteRights)>;

/// The messages that the initiator has sent.
#[derive(Default)]
struct SentMessages {
    /// Messages that the well-behaved target has not received.
    unseen: VecDeque<Vec<u8>>,
    /// Tag and registered memory of each command, the latest last.
    commands: Vec<(u32, Option<u32>)>,
    /// Identifier of the next command.
    cmd_sn: Option<u32>,
}

impl IserInitiatorRun<'_> {
    /// Runs one turn of the driver; returns whether there was progress.
    fn turn(&mut self) -> bool {
        let mut moved = self.submit();
        moved |= self.post();
        moved |= !self.is_over && self.next_record();
        moved |= self.post();
        moved |= self.requests.poll_done(&mut self.session);
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
        assert!(!text.contains('\n') && error.reference.starts_with("RFC 7"), "{text}");
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
                    let remote = Remote { stag: Stag(self.last_stag), address: 64, len: local.len() as u32 };
                    self.open.insert(self.last_stag, (local, access));
                    assert!(self.open.len() <= self.session.endpoint().regions as usize);
                    self.event(Event::Registered { id, remote });
                }
                WorkRequest::Invalidate { stag } => drop(self.open.remove(&stag.0)),
                WorkRequest::Send { head, payload, invalidate: None, .. } => {
                    let message = [&head[..], &payload.to_vec()].concat();
                    self.sent.on_message(&message, &self.open, self.queue_pair.unbacked.as_ref());
                    self.sent.unseen.push_back(message);
                }
                other => panic!("an initiator does not post {other:?}"),
            }
        }
        moved
    }

    /// Delivers the target's next message.
    fn next_record(&mut self) -> bool {
        let Some(kind) = self.records.kind() else { return false };
        if kind == 0 {
            let Some(message) = self.sent.unseen.pop_front() else { return true };
            let unbacked = self.queue_pair.unbacked.as_ref();
            for (message, closes) in self.good.answer(&message, (&self.open, unbacked)) {
                self.receive(&message, closes);
            }
            return true;
        }
        let (mut bytes, mut closes) = (self.records.bytes(), None);
        let meant = self.sent.commands.iter().rev().nth(usize::from(kind >> 4)).copied();
        if bytes.len() >= HEADERS {
            if let Some((tag, stag)) = meant.filter(|_| kind & 1 != 0) {
                bytes[44..48].copy_from_slice(&tag.to_be_bytes());
                closes = stag.filter(|_| kind & 4 != 0);
            }
            if kind & 2 != 0 {
                let cmd_sn = self.sent.cmd_sn.unwrap_or(1);
                bytes[56..60].copy_from_slice(&cmd_sn.to_be_bytes());
                bytes[60..64].copy_from_slice(&cmd_sn.wrapping_add(16).to_be_bytes());
            }
        }
        bytes.truncate(self.session.endpoint().receive_len as usize);
        self.receive(&bytes, closes.map(Stag));
        true
    }

    /// Delivers a message that invalidates `closes`. A queue pair reports only invalidations of
    /// registered memory.
    fn receive(&mut self, message: &[u8], closes: Option<Stag>) {
        let written = self.queue_pair.unbacked.as_mut().zip(closes);
        let written = written.and_then(|(unbacked, stag)| unbacked.invalidate(stag));
        let invalidated = closes.filter(|stag| written.is_some() || self.open.remove(&stag.0).is_some());
        if !self.is_over {
            self.event(Event::Received { message: Seg::from_slice(message), invalidated, written });
        }
    }

    fn submit(&mut self) -> bool {
        let info = self.session.unit().map(UnitInfo::volume_info);
        !self.is_over && self.requests.submit(&mut self.session, info, &mut self.choices)
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
        if let Some(refused) = self.session.refused() {
            assert!(!refused.to_string().contains('\n'));
        }
        self.requests.take_back(&mut self.session);
        assert!(self.queue_pair.next(&mut self.session.connection(0), 100).is_none());
        drop(self.session);
        assert_eq!(self.pool.out_bytes(), 0, "the pool has lost memory");
    }
}

impl SentMessages {
    /// Checks the rules for initiators.
    fn on_message(&mut self, message: &[u8], open: &Open, unbacked: Option<&UnbackedRegions>) {
        let (header, rest) = ControlHeader::read_from_prefix(message).expect("messages have headers");
        let (command, data) = ScsiCommand::read_from_prefix(rest).expect("messages are PDUs");
        let len = command.data_segment_length.get() as usize;
        assert!(len <= data.len() && data.len() <= 8192);
        if IscsiOpcode(command.opcode & 0x3f) != IscsiOpcode::SCSI_COMMAND {
            assert_eq!(header, ControlHeader::new());
            return;
        }
        let (tag, cmd_sn) = (command.initiator_task_tag.get(), command.cmd_sn.get());
        assert_eq!(cmd_sn, self.cmd_sn.unwrap_or(cmd_sn), "CmdSN has a gap");
        self.cmd_sn = Some(cmd_sn.wrapping_add(1));
        let expected = command.expected_data_transfer_length.get() as usize;
        let named = [(header.read(), RemoteRights::RemoteWrite), (header.write(), RemoteRights::RemoteRead)];
        for (stag, access) in named.into_iter().filter_map(|(named, access)| Some((named?.0, access))) {
            let given = open.get(&stag).map(|(memory, granted)| (memory.len(), *granted));
            let lent = unbacked.and_then(|regions| regions.get(Stag(stag)));
            let lent = lent.map(|data| (data.len(), RemoteRights::RemoteWrite));
            assert_eq!((given.or(lent), len), (Some((expected, access)), 0));
        }
        let stag = header.read().or(header.write()).map(|(stag, _)| stag);
        assert!(stag.is_some() || len == expected, "the memory is registered or all data is in the message");
        self.commands.push((tag, stag));
    }
}

/// A well-behaved target: Blockmux's own, over a RAM volume as LUN 0.
struct WellBehavedTarget {
    session: IserTargetSession,
    queue_pair: Recorder,
    channel: Box<dyn Channel>,
}

impl WellBehavedTarget {
    fn new(closes: u8, now: Instant) -> WellBehavedTarget {
        let exports = exports();
        let session = IscsiTargetSession::new(node(&exports), 1, Pool::new(usize::MAX), [0; 32], now);
        let mut session = IserTargetSession::new(session);
        let private_data = vec![closes, 0, 0, 0];
        session
            .on_event(Event::Requested { private_data, reads: 32 }, Instant::now())
            .expect("anybody may connect");
        let core = TestCore::new().as_core();
        let (_, disk) = exports.iter().next().expect("there is one volume");
        let channel = disk.volume.open(&core, session.depth(), Waker::idle()).expect("a RAM volume opens");
        WellBehavedTarget { session, queue_pair: Recorder::default(), channel }
    }

    /// The target's answers to a message, each with the memory that it invalidates. The target
    /// accesses registered memory, and writes what is registered without memory.
    fn answer(
        &mut self,
        message: &[u8],
        (open, unbacked): (&Open, Option<&UnbackedRegions>),
    ) -> Vec<(Vec<u8>, Option<Stag>)> {
        let mut answers = Vec::new();
        let event = Event::Received { message: Seg::from_slice(message), invalidated: None, written: None };
        let mut next = self.session.on_event(event, Instant::now()).is_ok();
        while next {
            next = false;
            while let Some(work) = self.queue_pair.next(&mut self.session, 100) {
                next = true;
                let id = match work {
                    WorkRequest::Write { id, local, remote } => {
                        if let Some((memory, _)) = open.get(&remote.stag.0) {
                            local.copy_to_list(memory);
                        } else if let Some(data) = unbacked.and_then(|regions| regions.get(remote.stag)) {
                            local.copy_to_list(&SgList::one(data.clone()));
                        }
                        id
                    }
                    WorkRequest::Read { id, local, remote } => {
                        if let Some((memory, _)) = open.get(&remote.stag.0) {
                            memory.slice(0, local.len()).copy_to_list(&local);
                        }
                        id
                    }
                    WorkRequest::Send { head, payload, invalidate, .. } => {
                        answers.push(([&head[..], &payload.to_vec()].concat(), invalidate));
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

fn name(name: &str) -> Name {
    Name::new(name).expect("the name is valid")
}

const TARGET: &str = "iqn.2026-11.t:a";
/// Length of the iSER and iSCSI headers, in bytes.
const HEADERS: usize = 28 + 48;
