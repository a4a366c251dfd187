//! A hostile target against the iSCSI initiator: every request completes exactly once.
//!
//! ```text
//!   stream = record ...      record = 0 the well-behaved target answers all unanswered bytes
//!                                   | kind, length (2), bytes  the hostile one sends these
//! ```
//! Bits of a kind: 1, replace the task tag by that of a recent command, which the high four bits
//! select; 2, set valid command numbers.

use crate::choices::Choices;
use crate::iscsi_target::{exports, node};
use crate::records::Records;
use crate::requests::{Requests, take_turns};
use crate::wire::Wire;
use blockmux_proto::driver::session::{
    Demand, Initiator, Overdue, ProtocolError, StreamConnections, StreamSession, Timed,
};
use blockmux_proto::driver::target::IoSource;
use blockmux_proto::iscsi::client::{
    BurstSize, Function, IscsiInitiatorConfig, IscsiInitiatorSession, SessionPurpose, default_proposal,
};
use blockmux_proto::iscsi::login::operational::{CRC32C, OperationalKey, OperationalParameters};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::server::IscsiTargetSession;
use blockmux_proto::scsi::Lun;
use blockmux_proto::scsi::initiator::UnitInfo;
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Channel, Chunk, Pool, Waker};
use blockmux_wire::iscsi::scsi::{ScsiCommand, TaskManagementFunctionRequest};
use blockmux_wire::iscsi::{Bhs, IscsiOpcode, RESERVED_TAG, padding};
use std::time::Instant;
use zerocopy::{FromBytes, transmute_ref};

/// Reads `data` as choices and records.
pub(crate) fn iscsi_initiator(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let now = Instant::now();
    let pool = Pool::new(choices.of(&[64 << 20, 64 << 20, 16 << 10]));
    let proposal = wish(choices.byte());
    let config = IscsiInitiatorConfig {
        initiator: name("iqn.2026-11.i:me"),
        target: name(TARGET),
        lun: Lun::new(0),
        purpose: choices.of(&[
            SessionPurpose::Use,
            SessionPurpose::Use,
            SessionPurpose::Manage(Function::LOGICAL_UNIT_RESET),
            SessionPurpose::Describe,
        ]),
        chap: None,
        proposal,
        isid: [0x80, 0, 0, 0, 0, 1],
        burst: BurstSize { commands: 2, ..BurstSize::default() },
    };
    let mut run = IscsiInitiatorRun {
        session: IscsiInitiatorSession::new(config, pool.clone(), [7; 32], now),
        good: WellBehavedTarget::new(now),
        choices,
        records: Records(&stream),
        wire: Wire::new(Vec::new()),
        pool,
        now,
        requests: Requests::default(),
        sent: SentPdus::default(),
        is_over: false,
    };
    take_turns(|| run.turn());
    run.finish();
}

struct IscsiInitiatorRun<'a> {
    choices: Choices<'a>,
    session: IscsiInitiatorSession,
    good: WellBehavedTarget,
    records: Records<'a>,
    wire: Wire,
    pool: Pool,
    now: Instant,
    requests: Requests,
    sent: SentPdus,
    is_over: bool,
}

impl IscsiInitiatorRun<'_> {
    /// Runs one turn of the driver; returns whether there was progress.
    fn turn(&mut self) -> bool {
        let mut moved = self.submit();
        moved |= self.send();
        moved |= self.wire.is_drained() && self.next_record();
        moved |= !self.is_over && self.receive();
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

    fn receive(&mut self) -> bool {
        let moved = self.wire.turn(&mut self.session.connection(0), &mut self.choices);
        match moved {
            Ok(moved) => moved,
            Err(error) => self.on_error(error),
        }
    }

    fn on_error(&mut self, error: ProtocolError) -> bool {
        let text = error.to_string();
        assert!(!text.contains('\n') && error.reference.starts_with("RFC 7143 "), "{text}");
        self.is_over = true;
        true
    }

    /// Delivers the target's next message.
    fn next_record(&mut self) -> bool {
        let Some(kind) = self.records.kind() else { return false };
        if kind == 0 {
            let bytes = self.good.answer(&std::mem::take(&mut self.sent.unseen));
            self.wire.push(&bytes);
            return true;
        }
        let mut bytes = self.records.bytes();
        if bytes.len() >= 48 {
            if kind & 1 != 0
                && let Some(tag) = self.sent.tags.iter().rev().nth(usize::from(kind >> 4))
            {
                bytes[16..20].copy_from_slice(&tag.to_be_bytes());
            }
            if kind & 2 != 0 {
                let cmd_sn = self.sent.cmd_sn.unwrap_or(1);
                bytes[28..32].copy_from_slice(&cmd_sn.to_be_bytes());
                bytes[32..36].copy_from_slice(&cmd_sn.wrapping_add(16).to_be_bytes());
            }
        }
        self.wire.push(&bytes);
        true
    }

    fn submit(&mut self) -> bool {
        let info = self.session.unit().map(UnitInfo::volume_info);
        !self.is_over && self.requests.submit(&mut self.session, info, &mut self.choices)
    }

    fn send(&mut self) -> bool {
        let bytes = self.session.connection(0).outbox().take_bytes();
        self.sent.on_sent(&bytes, self.session.parameters());
        !bytes.is_empty()
    }

    fn pass_time(&mut self) {
        let due = self.session.connection(0).poll_timeout();
        if let Some(when) = due.filter(|_| !self.is_over) {
            self.now = self.now.max(when);
            let passed = self.session.connection(0).on_timeout(self.now);
            if let Err(error) = passed {
                self.on_error(error);
            }
        }
    }

    /// Closes the connection, from the target's side or ours.
    fn finish(mut self) {
        let leaves = !self.is_over && self.wire.is_drained() && self.choices.byte() < 128;
        if leaves {
            let ended = self.session.connection(0).on_end(Instant::now());
            if let Err(error) = ended {
                self.on_error(error);
            }
        }
        self.send();
        self.requests.poll_done(&mut self.session);
        self.requests.poll_returned(&mut self.session);
        if self.session.is_over() {
            assert!(matches!(self.session.connection(0).demand(), Demand::Close) && self.session.room() == 0);
        }
        if let Some(refused) = self.session.refused() {
            assert!(!refused.to_string().contains('\n'));
        }
        assert!(self.session.luns().len() <= 256);
        self.requests.take_back(&mut self.session);
        drop(self.session);
        drop(self.wire);
        assert_eq!(self.pool.out_bytes(), 0, "the pool has lost memory");
    }
}

/// The messages that the initiator has sent.
#[derive(Default)]
struct SentPdus {
    /// Bytes that the well-behaved target has not received.
    unseen: Vec<u8>,
    /// Identifiers of commands, the latest last.
    tags: Vec<u32>,
    /// Identifier of the next command.
    cmd_sn: Option<u32>,
    /// Whether the target may have changed its MaxRecvDataSegmentLength.
    has_asked: bool,
}

impl SentPdus {
    /// Parses complete PDUs, and checks the rules for initiators.
    fn on_sent(&mut self, bytes: &[u8], agreed: Option<&OperationalParameters>) {
        self.unseen.extend(bytes);
        let digest = |key| agreed.map_or(0, |agreed| if agreed.is_on(key) { 4 } else { 0 });
        let mut rest = bytes;
        while let Ok((bhs, _)) = Bhs::read_from_prefix(rest) {
            let is_login = bhs.opcode() == IscsiOpcode::LOGIN_REQUEST;
            let (header, data) = if is_login {
                (0, 0)
            } else {
                (digest(OperationalKey::HeaderDigest), digest(OperationalKey::DataDigest))
            };
            let len = bhs.data_segment_length.get() as usize;
            let tail = if len > 0 { padding(len) + data } else { 0 };
            rest = rest.get(48 + header + len + tail..).expect("it sends whole PDUs");
            self.on_pdu(&bhs, len, agreed);
        }
        assert!(rest.is_empty(), "it sends whole PDUs");
    }

    fn on_pdu(&mut self, bhs: &Bhs, len: usize, agreed: Option<&OperationalParameters>) {
        let most = agreed.map_or(8192, OperationalParameters::max_send_data_segment_length);
        assert!(len <= most || self.has_asked, "{} with {len} bytes of data", bhs.opcode());
        assert_eq!(bhs.ahs_len(), 0);
        let command: &ScsiCommand = transmute_ref!(bhs);
        match bhs.opcode() {
            IscsiOpcode::SCSI_COMMAND => {
                let (tag, cmd_sn) = (command.initiator_task_tag.get(), command.cmd_sn.get());
                assert!(tag != RESERVED_TAG && !bhs.is_immediate());
                assert_eq!(cmd_sn, self.cmd_sn.unwrap_or(cmd_sn), "CmdSN has a gap");
                assert!(len as u32 <= command.expected_data_transfer_length.get());
                self.cmd_sn = Some(cmd_sn.wrapping_add(1));
                self.tags.push(tag);
            }
            IscsiOpcode::DATA_OUT => {
                assert!(len > 0 && self.tags.contains(&command.initiator_task_tag.get()))
            }
            IscsiOpcode::LOGIN_REQUEST | IscsiOpcode::NOP_OUT | IscsiOpcode::LOGOUT_REQUEST => {
                assert!(bhs.is_immediate())
            }
            IscsiOpcode::TEXT_REQUEST => {
                assert!(bhs.is_immediate() && len == 0);
                self.has_asked = true;
            }
            IscsiOpcode::TASK_MANAGEMENT_REQUEST => {
                let request: &TaskManagementFunctionRequest = transmute_ref!(bhs);
                let referenced = request.referenced_task_tag.get();
                // A reset names no task.
                assert!(bhs.is_immediate());
                assert!(referenced == RESERVED_TAG || self.tags.contains(&referenced));
            }
            other => panic!("an initiator does not send {other}"),
        }
    }
}

/// A well-behaved target: Blockmux's own, over a RAM volume as LUN 0.
struct WellBehavedTarget {
    session: IscsiTargetSession,
    channel: Box<dyn Channel>,
    unread: Vec<u8>,
}

impl WellBehavedTarget {
    fn new(now: Instant) -> WellBehavedTarget {
        let exports = exports();
        let session = IscsiTargetSession::new(node(&exports), 1, Pool::new(usize::MAX), [0; 32], now);
        let core = TestCore::new().as_core();
        let (_, disk) = exports.iter().next().expect("there is one volume");
        let channel = disk.volume.open(&core, session.depth(), Waker::idle()).expect("a RAM volume opens");
        WellBehavedTarget { session, channel, unread: Vec::new() }
    }

    /// The target's answer to `bytes`; empty after a protocol violation.
    fn answer(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.unread.extend(bytes);
        while self.receive() {
            while let Some((volume, io)) = self.session.poll_io() {
                if self.session.begin(volume, &io, false).is_err() {
                    continue;
                }
                let mut done = Vec::new();
                self.channel.submit(io);
                self.channel.poll(&mut done);
                done.into_iter().for_each(|done| self.session.on_io(done, Instant::now()));
            }
        }
        self.session.outbox().take_bytes()
    }

    fn receive(&mut self) -> bool {
        match self.session.demand() {
            Demand::Bytes(least) if self.unread.len() >= least => {
                let taken =
                    self.session.on_bytes(&Chunk::from_slice(&self.unread), Instant::now()).unwrap_or(0);
                self.unread.drain(..taken);
                taken > 0
            }
            Demand::Place(list) if self.unread.len() >= list.len() => {
                let rest = self.unread.split_off(list.len());
                list.copy_from(&self.unread);
                self.unread = rest;
                self.session.on_placed(Instant::now()).is_ok()
            }
            _ => false,
        }
    }
}

/// Operational parameters of the session, selected by a choice of the input.
fn wish(choice: u8) -> OperationalParameters {
    match choice % 4 {
        0 | 1 => default_proposal(),
        2 => default_proposal().with(OperationalKey::InitialR2T, 1).with(OperationalKey::ImmediateData, 0),
        _ => default_proposal()
            .with(OperationalKey::HeaderDigest, CRC32C)
            .with(OperationalKey::DataDigest, CRC32C),
    }
}

fn name(name: &str) -> Name {
    Name::new(name).expect("the name is valid")
}

const TARGET: &str = "iqn.2026-11.t:a";
