//! The initiator and our own target in memory, with a wire between them that tests can tamper with.
#![allow(clippy::arithmetic_side_effects, clippy::indexing_slicing, reason = "an overflow fails the test")]

use super::*;
use crate::driver::session::{Connections, Initiator, Overdue};
use crate::exports::{Export, Exports, VolumeId};
use crate::names::networks::AllowedNetworks;
use crate::rdma::testing::Recorder;
use crate::rdma::{MessageHead, Remote, RemoteRights, WorkRequest};
use crate::scsi::{LogicalUnit, ScsiTarget, TargetPort, UnitIdentity};
use crate::srp::node::{SrpAccess, SrpNode, SrpTarget};
use crate::srp::server::SrpTargetSession;
use crate::testing::Pump;
use blockmux_volume::{Completion, Io, IoError, MemVolume, Op, Output, SgList, Tag};
use blockmux_wire::srp::{
    LoginReject, LoginRequestRdma, MULTICHANNEL_MULTI, ResponseFlags, TaskManagementRequest,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use zerocopy::{FromBytes, FromZeros};

const SIZE: u64 = 8 << 20;
const TARGET: SrpPortId = SrpPortId([2; 16]);

fn node() -> (Arc<SrpNode>, Exports) {
    let volume = Arc::new(MemVolume::new(SIZE));
    let export = Export { name: "a".into(), description: String::new(), read_only: false, volume };
    let exports = Exports::new(vec![export]);
    let unit = LogicalUnit::new(UnitIdentity::of("a"), exports.get(VolumeId(0)).unwrap().volume.clone());
    let port = TargetPort { relative_id: 1, group: 1, name: TARGET.name_string().into() };
    let units = ScsiTarget::new(&TARGET.name_string(), vec![port.clone()]);
    let target = Arc::new(units.with_unit(0, VolumeId(0), unit));
    let access = vec![SrpAccess { initiator: None, target }];
    (
        Arc::new(SrpNode::new(vec![SrpTarget {
            id: TARGET,
            port,
            access,
            networks: AllowedNetworks::default(),
        }])),
        exports,
    )
}

fn config() -> SrpInitiatorConfig {
    SrpInitiatorConfig {
        initiator: SrpPortId([1; 16]),
        target: TARGET,
        lun: Lun::new(0),
        mode: SrpSessionMode::Use,
        channels: 1,
        immediate_data: true,
    }
}

/// Both sides of a connection, and the messages between them.
struct Wire {
    initiator: SrpInitiatorSession,
    target: Pump<SrpTargetSession>,
    ours: Recorder,
    theirs: Recorder,
    memory: BTreeMap<u32, (SgList, RemoteRights)>,
    last_key: u32,
    /// Messages of the initiator, oldest first.
    sent: Vec<Vec<u8>>,
    /// Messages of the target that were held back.
    held: VecDeque<Vec<u8>>,
    holds: bool,
    /// Private data with which the target accepted the login.
    connected: Vec<u8>,
    receives: i64,
    is_disconnected: bool,
    violation: Option<ProtocolError>,
}

impl Wire {
    fn new(config: SrpInitiatorConfig) -> Wire {
        Wire::to(&node(), config)
    }

    fn to((node, exports): &(Arc<SrpNode>, Exports), config: SrpInitiatorConfig) -> Wire {
        let now = Instant::now();
        let target = SrpTargetSession::new(node.clone(), Pool::new(512 << 20), Arc::new(|| {}), now);
        let initiator = SrpInitiatorSession::new(config, Pool::new(64 << 20), now);
        let endpoint = RdmaConnections::endpoint(&initiator);
        let mut wire = Wire {
            target: Pump::new(target, exports),
            initiator,
            ours: Recorder::default(),
            theirs: Recorder::default(),
            memory: BTreeMap::new(),
            last_key: 0,
            sent: Vec::new(),
            held: VecDeque::new(),
            holds: false,
            connected: Vec::new(),
            receives: endpoint.receives.into(),
            is_disconnected: false,
            violation: None,
        };
        let requested = Event::Requested { private_data: endpoint.private_data, reads: 32 };
        // A target that rejects the login says so here, too.
        let _ = RdmaSession::on_event(&mut wire.target.session, requested, now);
        wire
    }

    /// A session that is logged in and knows its logical unit.
    fn open(config: SrpInitiatorConfig) -> Wire {
        let mut wire = Wire::new(config);
        wire.run();
        assert!(wire.initiator.is_ready(), "{:?}, {:?}", wire.violation, wire.initiator.refused());
        wire
    }

    fn send_target(&mut self, event: Event) {
        RdmaSession::on_event(&mut self.target.session, event, Instant::now()).unwrap();
    }

    fn send_initiator(&mut self, event: Event) {
        if let Err(error) = self.initiator.connection(0).on_event(event, Instant::now()) {
            self.violation.get_or_insert(error);
        }
    }

    /// Delivers a message of the target, or a forged one.
    fn deliver(&mut self, message: &[u8], invalidated: Option<Stag>) {
        self.receives -= 1;
        assert!(self.receives >= 0, "no receive buffer");
        self.send_initiator(Event::Received {
            message: Seg::from_slice(message),
            invalidated,
            written: None,
        });
    }

    /// Executes the posted work of both sides until neither has any left.
    fn run(&mut self) {
        while self.violation.is_none() && (self.step_initiator() | self.step_target()) {}
    }

    fn step_initiator(&mut self) -> bool {
        let Some(work) = self.ours.next(&mut self.initiator.connection(0), 100) else { return false };
        match work {
            WorkRequest::Receive => self.receives += 1,
            WorkRequest::Register { id, local, access } => {
                self.last_key += 1;
                let remote = Remote { stag: Stag(self.last_key), address: 1 << 40, len: local.len() as u32 };
                self.memory.insert(self.last_key, (local, access));
                self.send_initiator(Event::Registered { id, remote });
            }
            WorkRequest::Invalidate { stag } => {
                self.memory.remove(&stag.0).expect("registered memory");
            }
            WorkRequest::Send { head, payload, .. } => {
                let message = [&head[..], &payload.to_vec()].concat();
                self.sent.push(message.clone());
                self.send_target(Event::Received {
                    message: Seg::from_slice(&message),
                    invalidated: None,
                    written: None,
                });
            }
            WorkRequest::Disconnect => {
                self.is_disconnected = true;
                self.send_target(Event::Disconnected);
                self.send_initiator(Event::Disconnected);
            }
            other => panic!("{other:?}"),
        }
        true
    }

    fn step_target(&mut self) -> bool {
        self.target.turn();
        let Some(work) = self.theirs.next(&mut self.target.session, 100) else { return false };
        match work {
            WorkRequest::Accept { private_data } => {
                self.connected.clone_from(&private_data);
                self.send_target(Event::Connected { private_data: Vec::new() });
                self.send_initiator(Event::Connected { private_data });
            }
            WorkRequest::Reject { private_data } => self.send_initiator(Event::Refused { private_data }),
            WorkRequest::Receive => {}
            WorkRequest::Read { id, local, remote } => {
                let (memory, access) = self.memory.get(&remote.stag.0).expect("registered memory");
                assert_eq!(*access, RemoteRights::RemoteRead);
                let offset = (remote.address - (1 << 40)) as usize;
                local.copy_from(&memory.slice(offset, local.len()).to_vec());
                self.send_target(Event::Done { id, result: Ok(()) });
            }
            WorkRequest::Write { id, local, remote } => {
                let (memory, access) = self.memory.get(&remote.stag.0).expect("registered memory");
                assert_eq!(*access, RemoteRights::RemoteWrite);
                let offset = (remote.address - (1 << 40)) as usize;
                memory.slice(offset, local.len()).copy_from(&local.to_vec());
                self.send_target(Event::Done { id, result: Ok(()) });
            }
            WorkRequest::Send { head, .. } => self.on_sent_by_target(&head),
            WorkRequest::Disconnect => {
                self.send_target(Event::Disconnected);
                self.send_initiator(Event::Disconnected);
            }
            other => panic!("{other:?}"),
        }
        true
    }

    fn on_sent_by_target(&mut self, head: &MessageHead) {
        match self.holds {
            true => self.held.push_back(head.to_vec()),
            false => self.deliver(head, None),
        }
    }

    fn submit(&mut self, tag: u64, op: Op, offset: u64, len: u64, data: Option<SgList>) {
        self.initiator.submit(Io { tag: Tag(tag), op, offset, len, data });
    }

    fn call(&mut self, op: Op, offset: u64, len: u64, data: Option<SgList>) -> Result<Output, IoError> {
        self.submit(7, op, offset, len, data);
        self.run();
        let Completion { tag, result } = self.initiator.poll_done().expect("it has completed");
        assert_eq!(tag, Tag(7));
        result
    }

    /// A session with one read in flight, and the response to it, which is held back.
    fn reading() -> (Wire, SrpResponse) {
        let mut wire = Wire::open(config());
        wire.holds = true;
        wire.submit(1, Op::Read, 0, 4096, None);
        wire.run();
        let message = wire.held.front().expect("a response").clone();
        (wire, SrpResponse::read_from_prefix(&message).unwrap().0)
    }

    /// The protocol violation that the initiator finds in this message of the target.
    fn violation_in(mut self, message: &[u8]) -> &'static str {
        self.deliver(message, None);
        self.violation.expect("the target violates the protocol").what
    }

    /// The task management functions that were sent, and the task tag of each.
    fn functions(&self) -> Vec<(TaskManagementFunction, u64)> {
        let requests =
            self.sent.iter().filter_map(|message| TaskManagementRequest::read_from_bytes(message).ok());
        let pending = requests.filter(|request| request.opcode == SrpOpcode::TASK_MANAGEMENT.0);
        pending
            .map(|request| (TaskManagementFunction(request.tsk_mgmt_func), request.task_tag.get()))
            .collect()
    }

    /// Aborts overdue commands as a driver does: the first tick notes the oldest command, the next
    /// finds it again.
    fn abort(&mut self) -> Option<&'static str> {
        for _ in 0..3 {
            self.initiator.tick();
        }
        let pending = self.initiator.abort_overdue(1);
        self.run();
        pending
    }

    fn function_tag(&self) -> u64 {
        let request = self.sent.iter().rev().find(|message| message[0] == SrpOpcode::TASK_MANAGEMENT.0);
        TaskManagementRequest::read_from_bytes(request.unwrap()).unwrap().tag.get()
    }

    fn answer_function(&mut self, code: ResponseCode) {
        let response = SrpResponse {
            opcode: SrpOpcode::RESPONSE.0,
            tag: self.function_tag().into(),
            flags: ResponseFlags::RSPVALID,
            resp_data_len: 4.into(),
            req_lim_delta: 1.into(),
            ..SrpResponse::new_zeroed()
        };
        self.deliver(&[response.as_bytes(), &[0, 0, 0, code.0]].concat(), None);
        self.run();
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8 ^ (at >> 9) as u8).collect()
}

fn list(bytes: &[u8]) -> SgList {
    SgList::one(Seg::from_slice(bytes))
}

fn pieces(bytes: &[u8]) -> SgList {
    let mut list = SgList::default();
    bytes.chunks(1536).for_each(|piece| list.push(Seg::from_slice(piece)));
    list
}

const WRITE: Op = Op::Write { fua: false };

#[test]
fn written_data_is_read_at_every_length() {
    for immediate_data in [true, false] {
        let mut wire = Wire::open(SrpInitiatorConfig { immediate_data, ..config() });
        for blocks in [1, 8, 16, 17, 128, 2048, 6001] {
            let data = pattern(blocks * 512);
            let len = data.len() as u64;
            let before = wire.sent.len();
            wire.call(WRITE, 512, len, Some(pieces(&data))).unwrap();
            // 68 bytes before immediate data, or a command with one direct descriptor.
            let is_immediate = immediate_data && blocks <= 16;
            let expected = if is_immediate { 68 + data.len() } else { 64 };
            assert_eq!(wire.sent[before].len(), expected, "{blocks} blocks");
            let read = wire.call(Op::Read, 512, len, None).unwrap().into_data();
            assert!(read.to_vec() == data, "{blocks} blocks");
            let own = pieces(&vec![0; data.len()]);
            wire.call(Op::Read, 512, len, Some(own.clone())).unwrap();
            assert!(own.to_vec() == data, "straight into the caller's memory");
        }
        wire.call(Op::Flush, 0, 0, None).unwrap();
        assert!(wire.memory.is_empty(), "every key is invalidated");
    }
}

#[test]
fn a_unit_is_described_and_the_session_logs_out() {
    let mut wire = Wire::new(SrpInitiatorConfig { mode: SrpSessionMode::Describe, ..config() });
    wire.run();
    assert_eq!(wire.initiator.unit().unwrap().volume_info().size, SIZE);
    assert_eq!(wire.initiator.luns(), [Lun::new(0)]);
    assert!(wire.initiator.is_over() && wire.is_disconnected && wire.violation.is_none());
    assert_eq!(wire.sent.last().unwrap()[0], SrpOpcode::INITIATOR_LOGOUT.0);
}

#[test]
fn a_unit_that_does_not_exist_is_refused_and_the_others_are_listed() {
    let mut wire = Wire::new(SrpInitiatorConfig { lun: Lun::new(5), ..config() });
    wire.run();
    assert_eq!(wire.initiator.refused(), Some(&SrpRefused::Unit(UnitRefused::NoSuchUnit(Lun::new(5)))));
    assert!(wire.initiator.luns() == [Lun::new(0)] && wire.initiator.is_over());
}

#[test]
fn a_rejected_login_reports_the_reason() {
    let mut wire = Wire::new(SrpInitiatorConfig { target: SrpPortId([9; 16]), ..config() });
    let reject = match wire.theirs.next(&mut wire.target.session, 100) {
        Some(WorkRequest::Reject { private_data }) => private_data,
        other => panic!("{other:?}"),
    };
    wire.send_initiator(Event::Refused { private_data: reject });
    let reason = LoginRejectReason::UNABLE_TO_ASSOCIATE_CHANNEL;
    assert_eq!(wire.initiator.refused(), Some(&SrpRefused::Login(reason)));
    assert!(wire.initiator.is_over() && wire.violation.is_none());
    let mut wire = Wire::new(config());
    wire.send_initiator(Event::Refused { private_data: Vec::new() });
    assert!(wire.violation.unwrap().what.contains("no SRP target listens"));
    let mut wire = Wire::new(config());
    wire.send_initiator(Event::Connected { private_data: vec![0; 56] });
    assert!(wire.violation.unwrap().what.contains("does not serve SRP"));
}

#[test]
fn no_more_commands_are_sent_than_the_target_grants() {
    let mut wire = Wire::open(config());
    // Two credits are reserved for task management.
    assert_eq!(wire.initiator.room(), 126);
    wire.holds = true;
    let before = wire.sent.len();
    for tag in 0..200 {
        wire.submit(tag, Op::Read, tag * 4096, 4096, None);
    }
    wire.run();
    assert_eq!((wire.sent.len() - before, wire.initiator.room()), (126, 0));
    wire.holds = false;
    for message in std::mem::take(&mut wire.held) {
        wire.deliver(&message, None);
    }
    wire.run();
    assert_eq!(std::iter::from_fn(|| wire.initiator.poll_done()).count(), 200);
    assert_eq!(wire.initiator.room(), 126);
}

#[test]
fn srp_cred_req_changes_the_credits_and_is_answered() {
    let mut wire = Wire::open(config());
    for (delta, room) in [(40_i32, 166), (-160, 6), (-100, 0), (94, 0), (126, 126)] {
        let request = TargetNotice {
            opcode: SrpOpcode::CREDIT_REQUEST.0,
            value: delta.cast_unsigned().into(),
            tag: 77.into(),
            ..TargetNotice::new_zeroed()
        };
        wire.deliver(request.as_bytes(), None);
        assert!(matches!(wire.ours.next(&mut wire.initiator.connection(0), 100), Some(WorkRequest::Receive)));
        wire.receives += 1;
        let Some(WorkRequest::Send { head, .. }) = wire.ours.next(&mut wire.initiator.connection(0), 100)
        else {
            panic!("no answer")
        };
        let answer = SrpHeader::read_from_bytes(&head).unwrap();
        assert_eq!((SrpOpcode(answer.opcode), answer.tag.get()), (SrpOpcode::CREDIT_RESPONSE, 77));
        assert_eq!(wire.initiator.room(), room, "after {delta}");
    }
}

#[test]
fn an_asynchronous_event_is_answered_and_handled_like_its_sense_data() {
    let mut wire = Wire::open(config());
    // Fixed format: UNIT ATTENTION, CAPACITY DATA HAS CHANGED.
    let sense = [0x70, 0, 6, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x2a, 9, 0, 0, 0, 0];
    let event = AsynchronousEvent {
        opcode: SrpOpcode::AER_REQUEST.0,
        tag: 5.into(),
        sense_data_len: (sense.len() as u32).into(),
        ..AsynchronousEvent::new_zeroed()
    };
    let before = wire.sent.len();
    wire.deliver(&[event.as_bytes(), &sense].concat(), None);
    wire.run();
    let opcodes: Vec<u8> = wire.sent[before..].iter().map(|message| message[0]).collect();
    assert_eq!(opcodes, [SrpOpcode::COMMAND.0, SrpOpcode::AER_RESPONSE.0], "it asks for the capacity");
    let short = [event.as_bytes(), &sense[1..]].concat();
    assert!(wire.violation_in(&short).contains("shorter"));
}

#[test]
fn a_target_that_logs_out_loses_the_session_and_not_its_io() {
    let (mut wire, _) = Wire::reading();
    let before = wire.sent.len();
    wire.submit(2, WRITE, 0, 512, Some(list(&[1; 512])));
    wire.submit(3, Op::Read, 0, 512, None);
    let logout = TargetNotice { opcode: SrpOpcode::TARGET_LOGOUT.0, ..TargetNotice::new_zeroed() };
    wire.deliver(logout.as_bytes(), None);
    wire.run();
    assert!(wire.is_disconnected && wire.violation.is_none() && wire.initiator.is_over());
    assert_eq!(wire.sent.len(), before, "no command is sent after the logout");
    assert_eq!(wire.initiator.take_unfinished().len(), 3);
}

#[test]
fn a_disconnect_by_the_target_is_an_error_only_with_commands_in_flight() {
    let mut wire = Wire::open(config());
    wire.send_initiator(Event::Disconnected);
    assert!(wire.violation.is_none() && wire.initiator.room() == 0);
    let (mut wire, _) = Wire::reading();
    wire.send_initiator(Event::Disconnected);
    assert!(wire.violation.unwrap().what.contains("in the middle"));
    assert_eq!(wire.initiator.take_unfinished().len(), 1);
}

/// Linux's initiator read sense data at an offset that the target had chosen (CVE-2026-53186).
#[test]
fn each_violation_by_the_target_is_reported() {
    let (wire, response) = Wire::reading();
    let stranger = SrpResponse { tag: 99.into(), ..response };
    assert!(wire.violation_in(stranger.as_bytes()).contains("does not exist"));
    let (wire, response) = Wire::reading();
    let beyond = SrpResponse { tag: (response.tag.get() | 1 << 40).into(), ..response };
    assert!(wire.violation_in(beyond.as_bytes()).contains("does not exist"));
    let (wire, response) = Wire::reading();
    let function = SrpResponse {
        tag: (1 << 32).into(),
        flags: ResponseFlags::RSPVALID,
        resp_data_len: 4.into(),
        ..response
    };
    assert!(
        wire.violation_in(&[function.as_bytes(), &[0; 4]].concat()).contains("function that does not exist")
    );
    let (wire, response) = Wire::reading();
    let residual = SrpResponse { flags: ResponseFlags::DIUNDER, data_in_res_cnt: 4097.into(), ..response };
    assert!(wire.violation_in(residual.as_bytes()).contains("residual longer"));
    let (wire, response) = Wire::reading();
    let sense = SrpResponse { flags: ResponseFlags::SNSVALID, sense_data_len: 1.into(), ..response };
    assert!(wire.violation_in(sense.as_bytes()).contains("shorter"));
    let (mut wire, response) = Wire::reading();
    wire.deliver(response.as_bytes(), None);
    assert!(wire.violation_in(response.as_bytes()).contains("twice"));
    for (message, expected) in
        [(&[][..], "shorter"), (&[0xc1; 35], "shorter"), (&[0x55; 48], "unknown opcode")]
    {
        assert!(Wire::reading().0.violation_in(message).contains(expected));
    }
    let (mut wire, response) = Wire::reading();
    wire.deliver(response.as_bytes(), Some(Stag(1 << 20)));
    assert!(wire.violation.unwrap().what.contains("invalidated a key"));
    let (mut wire, response) = Wire::reading();
    let generous = SrpResponse { req_lim_delta: i32::MAX.cast_unsigned().into(), ..response };
    wire.deliver(generous.as_bytes(), None);
    assert!(wire.violation.unwrap().what.contains("more requests"), "with those that it had granted");
}

#[test]
fn a_short_read_is_an_error_of_the_medium_and_a_target_may_invalidate_the_key_itself() {
    let (mut wire, response) = Wire::reading();
    let short = SrpResponse { flags: ResponseFlags::DIUNDER, data_in_res_cnt: 512.into(), ..response };
    wire.deliver(short.as_bytes(), None);
    assert!(wire.initiator.poll_done().is_none(), "the target can still write");
    wire.run();
    assert_eq!(wire.initiator.poll_done().unwrap().result.unwrap_err(), IoError::Medium);
    let (mut wire, response) = Wire::reading();
    let key = *wire.memory.keys().next().unwrap();
    wire.memory.clear();
    wire.deliver(response.as_bytes(), Some(Stag(key)));
    assert!(wire.initiator.poll_done().unwrap().result.is_ok());
}

#[test]
fn requests_without_a_response_are_aborted_and_returned() {
    let (mut wire, response) = Wire::reading();
    wire.target.holds_io = false;
    assert_eq!(wire.abort(), Some("to abort pending commands"));
    assert_eq!(wire.functions(), [(TaskManagementFunction::ABORT_TASK, response.tag.get())]);
    assert!(wire.initiator.poll_returned().is_none(), "the target has not answered");
    wire.answer_function(ResponseCode::NO_FAILURE);
    assert!(wire.memory.is_empty());
    assert_eq!(wire.initiator.poll_returned().unwrap().tag, Tag(1));
    assert!(wire.initiator.poll_done().is_none() && wire.violation.is_none());
}

#[test]
fn a_command_that_ends_while_it_is_aborted_has_ended() {
    let (mut wire, response) = Wire::reading();
    wire.abort();
    wire.deliver(response.as_bytes(), None);
    wire.run();
    assert!(wire.initiator.poll_done().unwrap().result.is_ok());
    // Linux's target answers this if it has no task to abort.
    wire.answer_function(ResponseCode::FUNCTION_FAILED);
    assert!(wire.initiator.poll_returned().is_none() && wire.violation.is_none());
    wire.holds = false;
    wire.call(Op::Read, 0, 512, None).unwrap();
}

#[test]
fn a_target_that_does_not_abort_gets_a_unit_reset_and_is_then_abandoned() {
    for refuses in [true, false] {
        let (mut wire, _) = Wire::reading();
        wire.submit(2, WRITE, 0, 512, Some(list(&[1; 512])));
        wire.run();
        assert_eq!(wire.abort(), Some("to abort pending commands"));
        if refuses {
            wire.answer_function(ResponseCode::FUNCTION_NOT_SUPPORTED);
        }
        let abort_tag = wire.function_tag();
        assert_eq!(wire.abort(), Some("to reset the logical unit"));
        assert_eq!(wire.functions().last().unwrap().0, TaskManagementFunction::LOGICAL_UNIT_RESET);
        let before = wire.sent.len();
        wire.submit(3, Op::Read, 0, 512, None);
        wire.run();
        assert_eq!(wire.sent.len(), before, "nothing is sent that the reset might find");
        if refuses {
            assert_eq!(wire.abort(), None, "no further function is left");
            assert_eq!(wire.initiator.take_unfinished().len(), 3);
            continue;
        }
        wire.answer_function(ResponseCode::NO_FAILURE);
        let back: Vec<Tag> = std::iter::from_fn(|| wire.initiator.poll_returned()).map(|io| io.tag).collect();
        assert!(back.len() == 2 && back.contains(&Tag(1)) && back.contains(&Tag(2)), "{back:?}");
        assert_eq!(wire.sent.len(), before + 1, "and then goes on");
        // The answer to an abandoned function may still arrive.
        let late = SrpResponse {
            opcode: SrpOpcode::RESPONSE.0,
            tag: abort_tag.into(),
            flags: ResponseFlags::RSPVALID,
            resp_data_len: 4.into(),
            ..SrpResponse::new_zeroed()
        };
        wire.deliver(&[late.as_bytes(), &[0; 4]].concat(), None);
        assert!(wire.violation.is_none());
        wire.deliver(&[late.as_bytes(), &[0; 4]].concat(), None);
        assert!(wire.violation.unwrap().what.contains("function that does not exist"), "but only once");
    }
}

#[test]
fn a_session_with_several_channels_is_replaced_instead_of_reset() {
    for opens in [false, true] {
        let mut wire = Wire::open(SrpInitiatorConfig { channels: 2, ..config() });
        let connected = wire.connected.clone();
        assert_eq!(wire.initiator.poll_connect().map(|(channel, _)| channel), Some(1));
        if opens {
            let event = Event::Connected { private_data: connected };
            wire.initiator.connection(1).on_event(event, Instant::now()).unwrap();
        }
        wire.holds = true;
        wire.submit(1, WRITE, 0, 512, Some(list(&[1; 512])));
        wire.run();
        assert_eq!(wire.abort(), Some("to abort pending commands"));
        // A command in the other channel's socket could arrive after the reset.
        let reset = (!opens).then_some("to reset the logical unit");
        assert_eq!(wire.abort(), reset, "with a second channel: {opens}");
        assert_eq!(wire.functions().len(), if opens { 1 } else { 2 });
        assert_eq!(wire.initiator.take_unfinished().len(), 1);
    }
}

#[test]
fn a_session_may_only_reset_a_unit_and_log_out() {
    let function = TaskManagementFunction::LOGICAL_UNIT_RESET;
    let mut wire = Wire::new(SrpInitiatorConfig { mode: SrpSessionMode::Manage(function), ..config() });
    wire.run();
    assert_eq!(wire.initiator.managed(), Some(ResponseCode::NO_FAILURE));
    assert!(wire.initiator.is_over() && wire.is_disconnected);
    assert_eq!(wire.functions(), [(function, 0)]);
    assert!(wire.sent.iter().all(|message| message[0] != SrpOpcode::COMMAND.0));
}

#[test]
fn a_session_that_stops_completes_what_was_submitted() {
    let mut wire = Wire::open(config());
    for tag in 0..10 {
        wire.submit(tag, WRITE, tag * 65536, 65536, Some(list(&[tag as u8; 65536])));
    }
    wire.initiator.on_stop();
    wire.run();
    let done: Vec<Completion> = std::iter::from_fn(|| wire.initiator.poll_done()).collect();
    assert!(done.len() == 10 && done.iter().all(|done| done.result.is_ok()));
    assert!(wire.initiator.is_over() && wire.is_disconnected && wire.violation.is_none());
}

#[test]
fn a_login_that_is_never_answered_ends_after_30_seconds() {
    let mut wire = Wire::new(config());
    let deadline = wire.initiator.connection(0).poll_timeout().unwrap();
    wire.initiator.connection(0).on_timeout(deadline - Duration::from_secs(1)).unwrap();
    let late = wire.initiator.connection(0).on_timeout(deadline).unwrap_err();
    assert!(late.what.contains("within 30 seconds"));
}

#[test]
fn a_session_continues_without_a_channel_that_cannot_be_opened() {
    let mut wire = Wire::open(SrpInitiatorConfig { channels: 3, ..config() });
    let now = Instant::now();
    assert_eq!(wire.initiator.poll_connect().map(|(channel, _)| channel), Some(1));
    assert_eq!(wire.initiator.poll_connect().map(|(channel, _)| channel), Some(2));
    assert_eq!(wire.initiator.poll_connect(), None);
    // Their logins do not end the first channel.
    let login = RdmaSession::endpoint(&wire.initiator.connection(1)).private_data;
    assert_eq!(LoginRequestRdma::read_from_bytes(&login).unwrap().req_flags & 3, MULTICHANNEL_MULTI);
    let reject = LoginReject {
        opcode: SrpOpcode::LOGIN_REJECT.0,
        reason: LoginRejectReason::CHANNEL_LIMIT_REACHED.0.into(),
        ..LoginReject::new_zeroed()
    };
    let refused = Event::Refused { private_data: reject.as_bytes().to_vec() };
    wire.initiator.connection(1).on_event(refused, now).unwrap();
    // The other one could not even connect.
    assert!(wire.initiator.on_lost(1, now) && wire.initiator.on_lost(2, now));
    assert!(wire.initiator.refused().is_none());
    wire.call(Op::Read, 0, 4096, None).unwrap();
    assert!(!wire.initiator.on_lost(0, now), "without the first there is no session");
}
