//! A scripted initiator at the other end of a queue pair that records the posted work.
#![allow(clippy::arithmetic_side_effects, clippy::indexing_slicing, reason = "an overflow fails the test")]

use super::*;
use crate::exports::{Export, Exports};
use crate::names::networks::AllowedNetworks;
use crate::rdma::target_mover::READS;
use crate::rdma::testing::Recorder;
use crate::rdma::{Stag, WorkRequest};
use crate::scsi::{AccessState, LogicalUnit, Lun, PortGroupStates, ScsiTarget, TargetPort, UnitIdentity};
use crate::srp::node::{MAX_CHANNELS, SrpAccess, SrpInitiators, SrpPortId, SrpTarget};
use crate::testing::Pump;
use blockmux_volume::MemVolume;
use blockmux_wire::srp::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

const SIZE: u64 = 8 << 20;
const INITIATOR: SrpPortId = SrpPortId([1; 16]);
const TARGET: SrpPortId = SrpPortId([2; 16]);
const HIDDEN: SrpPortId = SrpPortId([3; 16]);
/// A target port in the ALUA state standby.
const STANDBY: SrpPortId = SrpPortId([4; 16]);
const IMMEDIATE_OFFSET: usize = 68;
/// Key of the initiator's memory, which spans the whole address space.
const KEY: u32 = 77;
const CONNECTED: Event = Event::Connected { private_data: Vec::new() };

fn node() -> (Arc<SrpNode>, Exports) {
    let volume = Arc::new(MemVolume::new(SIZE));
    let export = Export { name: "a".into(), description: String::new(), read_only: false, volume };
    let exports = Exports::new(vec![export]);
    let unit = LogicalUnit::new(UnitIdentity::of("a"), exports.get(VolumeId(0)).unwrap().volume.clone());
    let states = Arc::new(PortGroupStates::default());
    states.set(2, AccessState::STANDBY);
    let target = |id: SrpPortId, initiator| {
        let group = if id == STANDBY { 2 } else { 1 };
        let port = TargetPort { relative_id: group, group, name: id.name_string().into() };
        let units = ScsiTarget::new(&id.name_string(), vec![port.clone()]).with_states(&states);
        let target = Arc::new(units.with_unit(0, VolumeId(0), unit.clone()));
        SrpTarget {
            id,
            port,
            access: vec![SrpAccess { initiator, target }],
            networks: AllowedNetworks::default(),
        }
    };
    (
        Arc::new(SrpNode::new(vec![
            target(TARGET, None),
            target(STANDBY, None),
            target(HIDDEN, Some(SrpInitiators::Port(SrpPortId([9; 16])))),
        ])),
        exports,
    )
}

fn login() -> LoginRequestRdma {
    LoginRequestRdma {
        tag: 5.into(),
        req_buf_fmt: (BUFFER_FORMAT_DIRECT | BUFFER_FORMAT_INDIRECT).into(),
        req_flags: IMMEDIATE_REQUESTED | MULTICHANNEL_MULTI,
        opcode: SrpOpcode::LOGIN_REQUEST.0,
        req_it_iu_len: 8260.into(),
        initiator_port_id: INITIATOR.0,
        target_port_id: TARGET.0,
        imm_data_offset: (IMMEDIATE_OFFSET as u16).into(),
        ..LoginRequestRdma::default()
    }
}

/// An initiator whose memory is a map from addresses.
struct Initiator {
    pump: Pump<SrpTargetSession>,
    queue: Recorder,
    memory: BTreeMap<u64, u8>,
    tag: u64,
    receives: u32,
    /// Credits of the initiator.
    credits: i64,
    hang_ups: Arc<AtomicUsize>,
    events: Vec<AuditEvent>,
}

/// A response: its fixed fields, and the bytes after them.
type End = (SrpResponse, Vec<u8>);

impl Initiator {
    fn new(node: &(Arc<SrpNode>, Exports)) -> Initiator {
        Initiator::with_pool(node, Pool::new(usize::MAX))
    }

    /// An initiator of a target whose core has this pool.
    fn with_pool((node, exports): &(Arc<SrpNode>, Exports), pool: Pool) -> Initiator {
        let hang_ups = Arc::new(AtomicUsize::new(0));
        let counter = hang_ups.clone();
        let hang_up: HangUp = Arc::new(move || {
            counter.fetch_add(1, Ordering::SeqCst);
        });
        let session = SrpTargetSession::new(node.clone(), pool, hang_up, Instant::now());
        Initiator {
            receives: session.endpoint().receives,
            pump: Pump::new(session, exports),
            queue: Recorder::default(),
            memory: BTreeMap::new(),
            tag: 100,
            credits: 0,
            hang_ups,
            events: Vec::new(),
        }
    }

    fn open(node: &(Arc<SrpNode>, Exports)) -> Initiator {
        let mut initiator = Initiator::new(node);
        let response = initiator.log_in(login()).unwrap();
        assert_eq!((response.tag.get(), response.max_it_iu_len.get()), (5, MAX_IU_LEN));
        assert!(response.rsp_flags & IMMEDIATE_SUPPORTED != 0);
        initiator
    }

    /// Logs in; returns the target's response, or the reason of its rejection.
    fn log_in(&mut self, request: LoginRequestRdma) -> Result<LoginResponse, LoginRejectReason> {
        let response = self.request(request)?;
        self.event(CONNECTED).unwrap();
        Ok(response)
    }

    /// [`Initiator::log_in`] without the proof that the initiator receives what is sent to it.
    fn request(&mut self, request: LoginRequestRdma) -> Result<LoginResponse, LoginRejectReason> {
        let _ = self.event(Event::Requested { private_data: request.as_bytes().to_vec(), reads: READS });
        match self.next() {
            Some(WorkRequest::Accept { private_data }) => {
                let response = LoginResponse::read_from_bytes(&private_data).unwrap();
                self.credits = response.req_lim_delta.get().into();
                Ok(response)
            }
            Some(WorkRequest::Reject { private_data }) => {
                let reject = LoginReject::read_from_bytes(&private_data).unwrap();
                assert_eq!(SrpOpcode(reject.opcode), SrpOpcode::LOGIN_REJECT);
                assert_eq!(reject.tag, request.tag);
                Err(LoginRejectReason(reject.reason.get()))
            }
            other => panic!("{other:?}"),
        }
    }

    /// Runs the start of a turn at `now`, as the driver does: first `on_turn`, then the timeout if
    /// it is due.
    fn turn_at(&mut self, now: Instant) -> Result<(), ProtocolError> {
        let session = &mut self.pump.session;
        session.on_turn(now);
        let is_due = session.poll_timeout().is_some_and(|due| due <= now);
        if is_due { session.on_timeout(now) } else { Ok(()) }
    }

    fn event(&mut self, event: Event) -> Result<(), ProtocolError> {
        RdmaSession::on_event(&mut self.pump.session, event, Instant::now())?;
        self.pump.turn();
        Ok(())
    }

    fn next(&mut self) -> Option<WorkRequest> {
        loop {
            self.pump.turn();
            let work = self.queue.next(&mut self.pump.session, 100);
            while let Some(event) = self.pump.session.poll_event() {
                self.events.push(event);
            }
            match work? {
                WorkRequest::Receive => self.receives += 1,
                work => return Some(work),
            }
        }
    }

    /// Sends an information unit that consumes a credit.
    fn send(&mut self, unit: &[u8]) -> Result<(), ProtocolError> {
        self.credits -= 1;
        self.receives -= 1;
        assert!(self.credits >= 0, "no credit");
        self.event(Event::Received { message: Seg::from_slice(unit), invalidated: None, written: None })
    }

    /// Sends a command with its descriptors. The caller executes the work that the target posts.
    fn command(
        &mut self,
        cdb: &[u8],
        formats: (BufferFormat, BufferFormat),
        rest: &[u8],
    ) -> Result<(), ProtocolError> {
        self.command_with(
            SrpCommand { buf_fmt: formats.0.0 << 4 | formats.1.0, ..SrpCommand::default() },
            cdb,
            rest,
        )
    }

    fn command_with(&mut self, unit: SrpCommand, cdb: &[u8], rest: &[u8]) -> Result<(), ProtocolError> {
        self.tag += 1;
        let mut unit = SrpCommand { opcode: SrpOpcode::COMMAND.0, tag: self.tag.into(), ..unit };
        unit.cdb[..cdb.len()].copy_from_slice(cdb);
        self.send(&[unit.as_bytes(), rest].concat())
    }

    /// Executes the work that the target posts until a response arrives.
    fn end(&mut self) -> End {
        loop {
            match self.next().expect("a response") {
                WorkRequest::Read { id, local, remote } => {
                    assert_eq!((remote.stag, remote.len as usize), (Stag(KEY), local.len()));
                    let bytes = (0..u64::from(remote.len)).map(|at| self.memory[&(remote.address + at)]);
                    local.copy_from(&bytes.collect::<Vec<_>>());
                    self.event(Event::Done { id, result: Ok(()) }).unwrap();
                }
                WorkRequest::Write { id, local, remote } => {
                    assert_eq!((remote.stag, remote.len as usize), (Stag(KEY), local.len()));
                    let bytes = local.to_vec().into_iter().enumerate();
                    self.memory.extend(bytes.map(|(at, byte)| (remote.address + at as u64, byte)));
                    self.event(Event::Done { id, result: Ok(()) }).unwrap();
                }
                WorkRequest::Send { head, .. } => return self.response(&head),
                other => panic!("{other:?}"),
            }
        }
    }

    fn response(&mut self, message: &[u8]) -> End {
        let (response, rest) = SrpResponse::read_from_prefix(message).unwrap();
        assert_eq!(SrpOpcode(response.opcode), SrpOpcode::RESPONSE);
        self.credits += i64::from(response.req_lim_delta.get());
        (response, rest.to_vec())
    }

    fn is_told_to_log_out(&mut self) {
        let Some(WorkRequest::Send { head, .. }) = self.next() else { panic!("nothing is sent") };
        assert_eq!(SrpOpcode(head[0]), SrpOpcode::TARGET_LOGOUT);
        assert!(matches!(self.next(), Some(WorkRequest::Disconnect)));
    }

    fn set(&mut self, address: u64, bytes: &[u8]) {
        self.memory.extend(bytes.iter().enumerate().map(|(at, byte)| (address + at as u64, *byte)));
    }

    fn get(&self, address: u64, len: usize) -> Vec<u8> {
        (0..len as u64).map(|at| self.memory[&(address + at)]).collect()
    }

    /// Whether all credits and receive buffers were returned.
    fn is_settled(&self) -> bool {
        self.credits == i64::from(REQUEST_LIMIT) && self.receives == REQUEST_LIMIT + UNCREDITED
    }

    fn manage(&mut self, function: TaskManagementFunction, lun: u64, task: u64) -> Result<(), ProtocolError> {
        self.tag += 1;
        let unit = TaskManagementRequest {
            opcode: SrpOpcode::TASK_MANAGEMENT.0,
            tag: self.tag.into(),
            lun: lun.to_be_bytes(),
            tsk_mgmt_func: function.0,
            task_tag: task.into(),
            ..TaskManagementRequest::default()
        };
        self.send(unit.as_bytes())
    }

    fn managed(&mut self, function: TaskManagementFunction, lun: u64, task: u64) -> ResponseCode {
        self.manage(function, lun, task).unwrap();
        self.code()
    }

    fn code(&mut self) -> ResponseCode {
        let (response, data) = self.end();
        assert_eq!((response.tag.get(), response.flags), (self.tag, ResponseFlags::RSPVALID));
        assert_eq!(response.resp_data_len.get(), 4);
        ResponseCode(data[3])
    }
}

fn direct(address: u64, len: u32) -> DirectDescriptor {
    DirectDescriptor { va: address.into(), key: KEY.into(), len: len.into() }
}

/// An indirect descriptor, and the part of its table that is in the information unit.
fn indirect(table: u64, ranges: &[DirectDescriptor], in_unit: usize) -> Vec<u8> {
    let len: u32 = ranges.iter().map(|range| range.len.get()).sum();
    let descriptor = IndirectDescriptor { table: direct(table, ranges.len() as u32 * 16), len: len.into() };
    [descriptor.as_bytes(), ranges[..in_unit].as_bytes()].concat()
}

fn read(blocks: u8) -> [u8; 10] {
    [0x28, 0, 0, 0, 0, 8, 0, 0, blocks, 0]
}

fn write(blocks: u8) -> [u8; 10] {
    [0x2a, 0, 0, 0, 0, 8, 0, 0, blocks, 0]
}

const OUT: (BufferFormat, BufferFormat) = (BufferFormat::DIRECT, BufferFormat::NONE);
const IN: (BufferFormat, BufferFormat) = (BufferFormat::NONE, BufferFormat::DIRECT);

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 512) as u8).collect()
}

/// Clears the unit attention of a new nexus.
fn ready(initiator: &mut Initiator) {
    initiator.command(&[0; 6], (BufferFormat::NONE, BufferFormat::NONE), &[]).unwrap();
    let (response, sense) = initiator.end();
    assert_eq!((response.status, response.flags), (2, ResponseFlags::SNSVALID));
    assert_eq!((sense.len() as u32, sense[2], sense[12]), (response.sense_data_len.get(), 6, 0x29));
}

fn open() -> Initiator {
    let mut initiator = Initiator::open(&node());
    ready(&mut initiator);
    initiator
}

fn write_direct(initiator: &mut Initiator, data: &[u8]) -> End {
    initiator.set(4096, data);
    let descriptor = direct(4096, data.len() as u32);
    initiator.command(&write((data.len() / 512) as u8), OUT, descriptor.as_bytes()).unwrap();
    initiator.end()
}

#[test]
fn data_written_from_one_range_is_read_into_one() {
    let mut initiator = open();
    let data = pattern(4096);
    let (response, _) = write_direct(&mut initiator, &data);
    assert_eq!((response.status, response.flags, response.tag.get()), (0, 0, initiator.tag));
    initiator.command(&read(8), IN, direct(1 << 20, 4096).as_bytes()).unwrap();
    let (response, _) = initiator.end();
    assert_eq!((response.status, response.flags), (0, 0));
    assert_eq!(initiator.get(1 << 20, 4096), data);
    assert!(
        initiator.is_settled()
            && initiator.pump.session.mover.unsent() == 0
            && initiator.pump.session.expected == 0
    );
}

#[test]
fn ranges_may_be_in_a_table_in_the_unit_or_in_the_initiator_s_memory() {
    for in_unit in [3, 1, 0] {
        let mut initiator = open();
        let data = pattern(4096);
        let ranges = [direct(10_000, 512), direct(50_000, 3000), direct(20_000, 584)];
        initiator.set(90_000, ranges.as_bytes());
        for (address, part) in [(10_000, &data[..512]), (50_000, &data[512..3512]), (20_000, &data[3512..])] {
            initiator.set(address, part);
        }
        let unit = |formats, out, data_in| SrpCommand {
            buf_fmt: formats,
            data_out_desc_cnt: out,
            data_in_desc_cnt: data_in,
            ..SrpCommand::default()
        };
        let descriptor = indirect(90_000, &ranges, in_unit);
        initiator.command_with(unit(0x20, in_unit as u8, 0), &write(8), &descriptor).unwrap();
        assert_eq!(initiator.end().0.status, 0);
        initiator.set(10_000, &[0; 512]);
        initiator.command_with(unit(0x02, 0, in_unit as u8), &read(8), &descriptor).unwrap();
        assert_eq!(initiator.end().0.status, 0);
        let found =
            [initiator.get(10_000, 512), initiator.get(50_000, 3000), initiator.get(20_000, 584)].concat();
        assert!(found == data && initiator.is_settled());
    }
}

#[test]
fn immediate_data_needs_no_read() {
    let mut initiator = open();
    let data = pattern(1024);
    let mut rest = ImmediateDescriptor { len: 1024.into() }.as_bytes().to_vec();
    rest.resize(IMMEDIATE_OFFSET - size_of::<SrpCommand>(), 0);
    rest.extend(&data);
    initiator.command(&write(2), (BufferFormat::IMMEDIATE, BufferFormat::NONE), &rest).unwrap();
    assert!(matches!(initiator.next(), Some(WorkRequest::Send { .. })));
    initiator.command(&read(2), IN, direct(0, 1024).as_bytes()).unwrap();
    initiator.end();
    assert_eq!(initiator.get(0, 1024), data);
}

#[test]
fn a_long_cdb_ends_after_the_fixed_part_of_its_unit() {
    let mut initiator = open();
    // READ (32) of one block.
    let mut cdb = [0; 32];
    (cdb[0], cdb[7], cdb[9], cdb[31]) = (0x7f, 0x18, 0x09, 1);
    let unit = SrpCommand { buf_fmt: 1, add_cdb_len: 16, ..SrpCommand::default() };
    let rest = [&cdb[16..], direct(0, 512).as_bytes()].concat();
    initiator.command_with(unit, &cdb[..16], &rest).unwrap();
    let (response, sense) = initiator.end();
    // The CDB was parsed: the device server either lacks READ (32) or has executed it.
    assert!(response.status == 0 || sense[12] != 0x0e, "{sense:?}");
}

#[test]
fn residuals_report_underflow_and_overflow() {
    let mut initiator = open();
    initiator.command(&read(1), IN, direct(0, 2048).as_bytes()).unwrap();
    let (response, _) = initiator.end();
    assert_eq!((response.flags, response.data_in_res_cnt.get()), (ResponseFlags::DIUNDER, 1536));
    initiator.command(&read(8), IN, direct(0, 512).as_bytes()).unwrap();
    let (response, _) = initiator.end();
    assert_eq!((response.flags, response.data_in_res_cnt.get()), (ResponseFlags::DIOVER, 3584));
    initiator.set(0, &[1; 2048]);
    initiator.command(&write(1), OUT, direct(0, 2048).as_bytes()).unwrap();
    let (response, _) = initiator.end();
    assert_eq!((response.flags, response.data_out_res_cnt.get()), (ResponseFlags::DOUNDER, 1536));
    // A write without a buffer.
    initiator.command(&write(1), (BufferFormat::NONE, BufferFormat::NONE), &[]).unwrap();
    let (response, _) = initiator.end();
    assert_eq!((response.flags, response.data_out_res_cnt.get()), (ResponseFlags::DOOVER, 512));
    // A read with a buffer for data-out: nothing has moved.
    initiator.command(&read(1), OUT, direct(0, 512).as_bytes()).unwrap();
    let (response, _) = initiator.end();
    assert_eq!(response.flags, ResponseFlags::DOUNDER | ResponseFlags::DIOVER);
    assert_eq!((response.data_out_res_cnt.get(), response.data_in_res_cnt.get()), (512, 512));
}

#[test]
fn a_port_in_standby_refuses_io_until_an_initiator_changes_its_state() {
    let mut initiator = Initiator::new(&node());
    initiator.log_in(LoginRequestRdma { target_port_id: STANDBY.0, ..login() }).unwrap();
    ready(&mut initiator);
    let report = |initiator: &mut Initiator| {
        let cdb = [0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
        initiator.command(&cdb, IN, direct(0, 256).as_bytes()).unwrap();
        assert_eq!(initiator.end().0.status, 0);
        initiator.get(4, 12)
    };
    assert_eq!(report(&mut initiator), [2, 0x0f, 0, 2, 0, 2, 0, 1, 0, 0, 0, 2]);
    initiator.command(&read(1), IN, direct(0, 512).as_bytes()).unwrap();
    let (response, sense) = initiator.end();
    assert_eq!((response.status, sense[2], sense[12], sense[13]), (2, 2, 0x04, 0x0b));
    initiator.set(4096, &[0, 0, 0, 0, 0, 0, 0, 2]);
    initiator.command(&[0xa4, 0x0a, 0, 0, 0, 0, 0, 0, 0, 8], OUT, direct(4096, 8).as_bytes()).unwrap();
    assert_eq!(initiator.end().0.status, 0);
    assert_eq!(report(&mut initiator)[..4], [0, 0x0f, 0, 2]);
    initiator.command(&read(1), IN, direct(0, 512).as_bytes()).unwrap();
    assert_eq!(initiator.end().0.status, 0);
}

#[test]
fn bidirectional_buffers_and_unknown_formats_fail_only_the_command() {
    let mut initiator = open();
    for formats in [(BufferFormat::DIRECT, BufferFormat::DIRECT), (BufferFormat(5), BufferFormat::NONE)] {
        let rest = [direct(0, 512), direct(0, 512)];
        initiator.command(&read(1), formats, rest.as_bytes()).unwrap();
        let (response, sense) = initiator.end();
        assert_eq!((response.status, sense[2], sense[12], sense[13]), (2, 5, 0x0e, 3));
    }
    assert!(initiator.is_settled());
}

/// In Linux's target, the length of immediate data wrapped (CVE-2026-100075).
#[test]
fn an_information_unit_that_is_too_short_ends_the_channel() {
    let long = |len: u32| ImmediateDescriptor { len: len.into() }.as_bytes().to_vec();
    let table = |len: u32, all: u32| {
        IndirectDescriptor { table: direct(0, len), len: all.into() }.as_bytes().to_vec()
    };
    for (formats, count, rest) in [
        (0x01, 0, vec![0; 15]),
        (0x02, 0, vec![0; 19]),
        (0x02, 2, table(32, 10)),
        (0x02, 0, table(17, 10)),
        (0x02, 0, table(!15, 10)),
        (0x02, 0, table(0, 10)),
        (0x30, 0, long(1)),
        (0x30, 0, long(u32::MAX)),
    ] {
        let mut initiator = open();
        let unit = SrpCommand { buf_fmt: formats, data_in_desc_cnt: count, ..SrpCommand::default() };
        initiator.command_with(unit, &read(1), &rest).unwrap_err();
    }
    for message in [&[][..], &[2], &[2; 47], &[1; 47], &[0xff; 16]] {
        open().send(message).unwrap_err();
    }
    // More additional CDB bytes than there are.
    let unit = SrpCommand { add_cdb_len: 252, ..SrpCommand::default() };
    open().command_with(unit, &read(1), &[0; 64]).unwrap_err();
}

#[test]
fn a_table_whose_ranges_are_too_short_ends_the_channel_when_it_is_read() {
    let mut initiator = open();
    initiator.set(0, [direct(0, 10)].as_bytes());
    let descriptor = IndirectDescriptor { table: direct(0, 16), len: 11.into() };
    let unit = SrpCommand { buf_fmt: 0x02, ..SrpCommand::default() };
    initiator.command_with(unit, &read(1), descriptor.as_bytes()).unwrap();
    let Some(WorkRequest::Read { id, local, .. }) = initiator.next() else { panic!("the table") };
    local.copy_from(direct(0, 10).as_bytes());
    initiator.event(Event::Done { id, result: Ok(()) }).unwrap_err();
}

#[test]
fn each_refusal_has_its_reason() {
    let cases: [(LoginRequestRdma, LoginRejectReason); 7] = [
        (LoginRequestRdma { opcode: 2, ..login() }, LoginRejectReason::UNABLE_TO_ESTABLISH_CHANNEL),
        (
            LoginRequestRdma { req_it_iu_len: (MAX_IU_LEN + 1).into(), ..login() },
            LoginRejectReason::IU_LENGTH_TOO_LARGE,
        ),
        (
            LoginRequestRdma { req_it_iu_len: 63.into(), ..login() },
            LoginRejectReason::UNABLE_TO_ESTABLISH_CHANNEL,
        ),
        (
            LoginRequestRdma { req_buf_fmt: 0x08.into(), ..login() },
            LoginRejectReason::UNSUPPORTED_BUFFER_FORMAT,
        ),
        (LoginRequestRdma { req_flags: 2, ..login() }, LoginRejectReason::MULTICHANNEL_UNSUPPORTED),
        (
            LoginRequestRdma { target_port_id: [8; 16], ..login() },
            LoginRejectReason::UNABLE_TO_ASSOCIATE_CHANNEL,
        ),
        (
            LoginRequestRdma { target_port_id: HIDDEN.0, ..login() },
            LoginRejectReason::UNABLE_TO_ASSOCIATE_CHANNEL,
        ),
    ];
    for (request, reason) in cases {
        let mut initiator = Initiator::new(&node());
        assert_eq!(initiator.log_in(request).unwrap_err(), reason);
        assert!(matches!(initiator.events[..], [AuditEvent::Refused { .. }]), "{:?}", initiator.events);
    }
    for (private_data, reason) in
        [(&[0; 4][..], "asked for iSER"), (&[], "asked for iSER"), (&[0, 0, 0, 0, 1], "too short")]
    {
        let mut other = Initiator::new(&node());
        let requested = Event::Requested { private_data: private_data.to_vec(), reads: READS };
        let refused = other.event(requested).unwrap_err();
        assert!(refused.what.contains(reason), "{}", refused.what);
        assert!(matches!(other.next(), Some(WorkRequest::Reject { .. })));
    }
    let mut listed = Initiator::new(&node());
    let request = LoginRequestRdma { target_port_id: HIDDEN.0, initiator_port_id: [9; 16], ..login() };
    assert!(listed.log_in(request).is_ok());
    // Each receive buffer may hold a command.
    assert_eq!(listed.pump.session.depth(), listed.pump.session.endpoint().receives);
    let mut stopping = Initiator::new(&node());
    stopping.pump.session.on_stop(Instant::now());
    assert_eq!(stopping.log_in(login()).unwrap_err(), LoginRejectReason::INSUFFICIENT_RESOURCES);
}

#[test]
fn a_target_port_is_available_only_to_initiators_in_its_networks() {
    let (node, exports) = node();
    let target = node.targets.find(&TARGET).unwrap();
    let (id, port, access) = (target.id, target.port.clone(), &target.access[0]);
    let access = vec![SrpAccess { initiator: None, target: access.target.clone() }];
    let networks = AllowedNetworks::only(&["192.0.2.0/24".parse().unwrap()]);
    node.targets.replace(SrpTarget { id, port, access, networks });
    let log_in = |client: [u8; 4]| {
        let mut initiator = Initiator::new(&(node.clone(), exports.clone()));
        let hang_up: HangUp = Arc::new(|| {});
        let session = SrpTargetSession::new(node.clone(), Pool::new(usize::MAX), hang_up, Instant::now());
        initiator.pump.session = session.with_client(Some(client.into()));
        initiator.log_in(login()).map(drop)
    };
    assert_eq!(log_in([192, 0, 2, 7]), Ok(()));
    assert_eq!(log_in([192, 0, 3, 7]), Err(LoginRejectReason::UNABLE_TO_ASSOCIATE_CHANNEL));
}

#[test]
fn several_channels_coexist_unless_a_login_requests_a_single_channel() {
    let node = node();
    let first = Initiator::open(&node);
    let mut second = Initiator::new(&node);
    let response = second.log_in(login()).unwrap();
    assert_eq!(response.rsp_flags, MULTICHANNEL_MAINTAINED | IMMEDIATE_SUPPORTED);
    let mut alone = Initiator::new(&node);
    let response = alone.request(LoginRequestRdma { req_flags: 0, ..login() }).unwrap();
    assert_eq!(response.rsp_flags, MULTICHANNEL_TERMINATED);
    let cut = |initiator: &Initiator| initiator.hang_ups.load(Ordering::SeqCst);
    assert_eq!((cut(&first), cut(&second)), (0, 0), "the request may be forged");
    alone.event(CONNECTED).unwrap();
    assert_eq!((cut(&first), cut(&second)), (1, 1));
    // Its commands wait until the others are closed.
    alone.command(&[0; 6], (BufferFormat::NONE, BufferFormat::NONE), &[]).unwrap();
    let begin = Instant::now();
    for (mut ended, seconds) in [(first, 1), (second, 2)] {
        alone.turn_at(begin + Duration::from_secs(seconds)).unwrap();
        assert!(alone.next().is_none() && alone.pump.session.stage() == SessionStage::Handshake);
        ended.event(Event::Disconnected).unwrap();
    }
    alone.turn_at(begin + Duration::from_secs(3)).unwrap();
    let (response, sense) = alone.end();
    assert_eq!((response.status, sense[12]), (2, 0x29), "a new nexus");
    assert_eq!(alone.pump.session.stage(), SessionStage::Established);
}

#[test]
fn a_request_whose_sender_proves_nothing_changes_nothing() {
    let node = node();
    let mut first = Initiator::open(&node);
    ready(&mut first);
    let mut forged: Vec<Initiator> = (0..2 * MAX_CHANNELS).map(|_| Initiator::new(&node)).collect();
    for (count, forged) in forged.iter_mut().enumerate() {
        let req_flags = if count % 2 == 0 { 0 } else { MULTICHANNEL_MULTI };
        forged.request(LoginRequestRdma { req_flags, ..login() }).unwrap();
        assert_eq!(forged.pump.session.stage(), SessionStage::Handshake);
        assert!(forged.events.is_empty(), "it is no login");
    }
    assert_eq!(first.hang_ups.load(Ordering::SeqCst), 0);
    assert_eq!(write_direct(&mut first, &pattern(4096)).0.status, 0);
    let mut second = Initiator::new(&node);
    let response = second.log_in(login()).unwrap();
    assert_eq!(response.rsp_flags, MULTICHANNEL_MAINTAINED | IMMEDIATE_SUPPORTED);
    let late = &mut forged[0];
    late.turn_at(Instant::now() + LOGIN_TIMEOUT + Duration::from_secs(1)).unwrap_err();
}

#[test]
fn a_channel_that_sees_other_units_than_its_nexus_waits_for_the_end_of_those_channels() {
    let node = node();
    let mut first = Initiator::open(&node);
    let before = node.0.targets.find(&TARGET).unwrap();
    let (_, volume, unit) = before.access[0].target.units().next().unwrap();
    let target = ScsiTarget::new(&TARGET.name_string(), vec![before.port.clone()]).with_unit(0, volume, unit);
    node.0.targets.replace(SrpTarget {
        id: TARGET,
        port: before.port.clone(),
        access: vec![SrpAccess { initiator: Some(SrpInitiators::Port(INITIATOR)), target: Arc::new(target) }],
        networks: AllowedNetworks::default(),
    });
    let mut second = Initiator::new(&node);
    let response = second.log_in(login()).unwrap();
    assert_eq!(response.rsp_flags, MULTICHANNEL_TERMINATED | IMMEDIATE_SUPPORTED);
    assert_eq!(second.pump.session.stage(), SessionStage::Handshake, "it waits");
    assert_eq!(first.hang_ups.load(Ordering::SeqCst), 1);
    first.event(Event::Disconnected).unwrap();
    second.turn_at(Instant::now() + Duration::from_secs(1)).unwrap();
    assert_eq!(second.pump.session.stage(), SessionStage::Established);
    let mut third = Initiator::new(&node);
    assert_eq!(third.log_in(login()).unwrap().rsp_flags, MULTICHANNEL_MAINTAINED | IMMEDIATE_SUPPORTED);
}

#[test]
fn channels_of_one_initiator_port_share_its_unit_attentions() {
    let node = node();
    let mut channels = [Initiator::open(&node), Initiator::open(&node)];
    let mut other = Initiator::new(&node);
    other.log_in(LoginRequestRdma { initiator_port_id: [9; 16], ..login() }).unwrap();
    ready(&mut channels[0]);
    ready(&mut other);
    // PERSISTENT RESERVE OUT: service action, key, service action key.
    let reserve = |initiator: &mut Initiator, action: u8, key: u8, action_key: u8| {
        let mut list = [0; 24];
        (list[7], list[15]) = (key, action_key);
        initiator.set(0, &list);
        let cdb = [0x5f, action, 1, 0, 0, 0, 0, 0, 24, 0];
        initiator.command(&cdb, OUT, direct(0, 24).as_bytes()).unwrap();
        initiator.end().0.status
    };
    // However the initiator spreads its commands over its channels, each attention meets one of
    // them.
    for (notified, next) in [(0, 1), (1, 0), (0, 0), (1, 1)] {
        assert_eq!(reserve(&mut channels[next], 6, 0, 1), 0, "the channel has no unit attention");
        assert_eq!(reserve(&mut other, 6, 0, 2), 0);
        assert_eq!(reserve(&mut other, 4, 2, 1), 0, "it preempts the registration of the other port");
        channels[notified].command(&read(1), IN, direct(0, 512).as_bytes()).unwrap();
        let (response, sense) = channels[notified].end();
        assert_eq!((response.status, sense[2], sense[12], sense[13]), (2, 6, 0x2a, 0x05));
        assert_eq!(reserve(&mut channels[next], 6, 0, 1), 0, "the read has taken the attention");
    }
}

#[test]
fn a_login_waits_a_limited_time_for_io_of_the_channel_that_it_ends() {
    let node = node();
    let mut first = Initiator::open(&node);
    ready(&mut first);
    first.pump.holds_io = true;
    first.command(&read(1), IN, direct(0, 512).as_bytes()).unwrap();
    first.event(Event::Disconnected).unwrap();
    let request = LoginRequestRdma { req_flags: 0, ..login() };
    for ends in [false, true] {
        let mut alone = Initiator::new(&node);
        let begin = Instant::now();
        let after = |seconds| begin + Duration::from_secs(seconds);
        alone.log_in(request).unwrap();
        alone.turn_at(after(14)).unwrap();
        assert_eq!(alone.pump.session.stage(), SessionStage::Handshake);
        if ends {
            first.pump.finish_one();
            alone.turn_at(after(15)).unwrap();
            assert_eq!(alone.pump.session.stage(), SessionStage::Established);
        } else {
            alone.turn_at(after(16)).unwrap_err();
            alone.is_told_to_log_out();
            assert_eq!(alone.pump.session.stage(), SessionStage::Handshake);
        }
    }
}

#[test]
fn a_login_that_waits_is_checked_again() {
    let node = node();
    let first = Initiator::open(&node);
    let mut alone = Initiator::new(&node);
    alone.log_in(LoginRequestRdma { req_flags: 0, ..login() }).unwrap();
    node.0.targets.remove(&TARGET);
    drop(first);
    let error = alone.turn_at(Instant::now() + Duration::from_secs(1)).unwrap_err();
    assert_eq!(error.what, "named a target port that does not exist");
    alone.is_told_to_log_out();
    // The rejected login was no session.
    alone.event(Event::Disconnected).unwrap();
    assert_eq!(alone.pump.session.stage(), SessionStage::Handshake);
}

#[test]
fn no_more_rdma_reads_are_posted_than_the_initiator_supports() {
    let mut none = Initiator::new(&node());
    none.event(Event::Requested { private_data: login().as_bytes().to_vec(), reads: 0 }).unwrap_err();
    let Some(WorkRequest::Reject { private_data }) = none.next() else { panic!("not rejected") };
    let reject = LoginReject::read_from_bytes(&private_data).unwrap();
    assert_eq!(LoginRejectReason(reject.reason.get()), LoginRejectReason::UNABLE_TO_ESTABLISH_CHANNEL);
    let mut initiator = Initiator::new(&node());
    initiator.event(Event::Requested { private_data: login().as_bytes().to_vec(), reads: 4 }).unwrap();
    let Some(WorkRequest::Accept { .. }) = initiator.next() else { panic!("not accepted") };
    initiator.event(CONNECTED).unwrap();
    initiator.credits = REQUEST_LIMIT.into();
    ready(&mut initiator);
    for nth in 0..6 {
        initiator.command(&write(1), OUT, direct(nth * 512, 512).as_bytes()).unwrap();
    }
    let mut posted = Vec::new();
    while let Some(WorkRequest::Read { id, .. }) = initiator.next() {
        posted.push(id);
    }
    assert_eq!(posted.len(), 4);
    initiator.event(Event::Done { id: posted[0], result: Ok(()) }).unwrap();
    assert!(matches!(initiator.next(), Some(WorkRequest::Read { .. })));
}

#[test]
fn owed_reports_the_oldest_buffer_that_waits_for_data_of_the_initiator() {
    let mut initiator = open();
    assert_eq!(initiator.pump.session.owed(), None);
    let mut reads = Vec::new();
    for address in [0, 512] {
        initiator.command(&write(1), OUT, direct(address, 512).as_bytes()).unwrap();
        let Some(WorkRequest::Read { id, .. }) = initiator.next() else { panic!("data-out") };
        reads.push(id);
    }
    let oldest = initiator.pump.session.owed();
    assert!(oldest.is_some());
    initiator.event(Event::Done { id: reads[1], result: Ok(()) }).unwrap();
    assert_eq!(initiator.pump.session.owed(), oldest, "the first is still outstanding");
    initiator.event(Event::Done { id: reads[0], result: Ok(()) }).unwrap();
    assert_eq!(initiator.pump.session.owed(), None);
    // A descriptor table is data of the initiator, too.
    let unit = SrpCommand { buf_fmt: 0x02, ..SrpCommand::default() };
    let descriptor = indirect(90_000, &[direct(0, 512), direct(512, 512)], 0);
    initiator.end();
    initiator.end();
    initiator.command_with(unit, &read(2), &descriptor).unwrap();
    assert!(initiator.pump.session.owed() > oldest);
}

#[test]
fn an_abort_waits_a_minute_for_rdma_reads_and_other_commands_longer() {
    let begin = Instant::now();
    let after = |seconds| begin + Duration::from_secs(seconds);
    for ends in [None, Some(SrpOpcode::TASK_MANAGEMENT), Some(SrpOpcode::INITIATOR_LOGOUT)] {
        let mut initiator = open();
        initiator.command(&write(1), OUT, direct(0, 512).as_bytes()).unwrap();
        let task = initiator.tag;
        assert!(matches!(initiator.next(), Some(WorkRequest::Read { .. })));
        match ends {
            Some(SrpOpcode::TASK_MANAGEMENT) => {
                initiator.manage(TaskManagementFunction::ABORT_TASK, 0, task).unwrap();
            }
            Some(opcode) => {
                let logout = SrpHeader { opcode: opcode.0, ..SrpHeader::default() };
                let message = Seg::from_slice(logout.as_bytes());
                initiator.event(Event::Received { message, invalidated: None, written: None }).unwrap();
            }
            None => {}
        }
        initiator.turn_at(after(1)).unwrap();
        initiator.turn_at(after(59)).unwrap();
        assert_eq!(initiator.turn_at(after(62)).is_err(), ends.is_some(), "{ends:?}");
    }
}

#[test]
fn the_end_of_a_channel_waits_a_minute_for_an_initiator_that_receives_nothing_and_longer_for_io() {
    let begin = Instant::now();
    let after = |seconds| begin + Duration::from_secs(seconds);
    // A response that is not sent, one that is sent and not received, and I/O in flight.
    for (room, holds_io, ends) in
        [(0, false, false), (100, false, false), (100, false, true), (100, true, false)]
    {
        let mut initiator = open();
        initiator.pump.holds_io = holds_io;
        initiator.command(&read(1), IN, direct(0, 512).as_bytes()).unwrap();
        let logout = SrpHeader { opcode: SrpOpcode::INITIATOR_LOGOUT.0, ..SrpHeader::default() };
        let message = Seg::from_slice(logout.as_bytes());
        initiator.event(Event::Received { message, invalidated: None, written: None }).unwrap();
        let mut works = 0;
        while initiator.queue.next(&mut initiator.pump.session, room).is_some() {
            works += 1;
        }
        assert_eq!(works > 1, room > 0 && !holds_io, "the response and the disconnect");
        if ends {
            // The queue pair has ended, and the driver still has to send its output.
            initiator.event(Event::Disconnected).unwrap();
        }
        initiator.turn_at(after(1)).unwrap();
        initiator.turn_at(after(59)).unwrap();
        assert_eq!(initiator.turn_at(after(62)).is_err(), !holds_io, "{room}");
    }
}

#[test]
fn data_in_for_many_short_ranges_is_cut_when_it_is_posted() {
    let mut initiator = open();
    let data = pattern(1024);
    write_direct(&mut initiator, &data);
    // Every second byte of the initiator's memory, from the last one to the first.
    let ranges: Vec<_> = (0..1024).map(|at| direct(50_000 - 2 * at, 1)).collect();
    initiator.set(90_000, ranges.as_bytes());
    let unit = SrpCommand { buf_fmt: 0x02, ..SrpCommand::default() };
    initiator.command_with(unit, &read(2), &indirect(90_000, &ranges, 0)).unwrap();
    assert_eq!(initiator.end().0.status, 0);
    let found: Vec<u8> = (0..1024).map(|at| initiator.memory[&(50_000 - 2 * at)]).collect();
    assert!(found == data && initiator.is_settled() && initiator.pump.session.mover.unsent() == 0);
}

#[test]
fn a_table_has_at_most_as_many_ranges_as_linux_sends() {
    for (entries, is_good) in [(2048, true), (2049, false)] {
        let mut initiator = open();
        let descriptor = IndirectDescriptor { table: direct(0, entries * 16), len: 512.into() };
        let unit = SrpCommand { buf_fmt: 0x02, ..SrpCommand::default() };
        assert_eq!(initiator.command_with(unit, &read(1), descriptor.as_bytes()).is_ok(), is_good);
    }
}

#[test]
fn task_management_does_not_wait_behind_commands() {
    use TaskManagementFunction as F;
    let blocks = 1_u16 << 11; // 1 MiB
    let mut long = read(0);
    long[2..6].copy_from_slice(&0_u32.to_be_bytes());
    long[7..9].copy_from_slice(&blocks.to_be_bytes());
    for function in [F::ABORT_TASK, F::LOGICAL_UNIT_RESET] {
        let mut initiator = open();
        initiator.pump.holds_io = true;
        for _ in 0..100 {
            initiator.command(&long, IN, direct(0, u32::from(blocks) * 512).as_bytes()).unwrap();
        }
        let waiting = initiator.pump.session.inbox.len();
        assert_eq!(waiting, 100 - 64);
        let last = initiator.tag;
        if function == F::ABORT_TASK {
            // The last command waits; it ends at once.
            assert_eq!(initiator.managed(function, 0, last), ResponseCode::NO_FAILURE);
            assert_eq!(initiator.pump.session.inbox.len(), waiting - 1);
            assert_eq!(initiator.credits, i64::from(REQUEST_LIMIT) - 99);
            // A running command ends when the volume has finished it.
            initiator.manage(function, 0, last - 99).unwrap();
            initiator.pump.finish_one();
            assert_eq!(initiator.code(), ResponseCode::NO_FAILURE);
        } else {
            initiator.manage(function, 0, 0).unwrap();
            assert!(initiator.pump.session.inbox.is_empty());
            (0..64).for_each(|_| initiator.pump.finish_one());
            assert_eq!(initiator.code(), ResponseCode::NO_FAILURE);
            assert!(initiator.is_settled());
        }
    }
}

#[test]
fn a_second_abort_of_a_task_in_flight_fails() {
    let mut initiator = open();
    initiator.pump.holds_io = true;
    initiator.command(&read(1), IN, direct(0, 512).as_bytes()).unwrap();
    let task = initiator.tag;
    initiator.manage(TaskManagementFunction::ABORT_TASK, 0, task).unwrap();
    let first = initiator.tag;
    assert_eq!(initiator.managed(TaskManagementFunction::ABORT_TASK, 0, task), ResponseCode::FUNCTION_FAILED);
    initiator.pump.finish_one();
    initiator.tag = first;
    assert_eq!(initiator.code(), ResponseCode::NO_FAILURE);
    initiator.tag += 1;
    assert_eq!(initiator.managed(TaskManagementFunction::ABORT_TASK, 0, task), ResponseCode::NO_FAILURE);
    assert!(initiator.is_settled());
}

#[test]
fn a_table_for_which_there_is_no_memory_fails_the_command() {
    let node = node();
    let mut initiator = Initiator::with_pool(&node, Pool::new(4096));
    initiator.log_in(login()).unwrap();
    ready(&mut initiator);
    let ranges: Vec<_> = (0..1024).map(|at| direct(at * 4, 4)).collect();
    let unit = SrpCommand { buf_fmt: 0x02, ..SrpCommand::default() };
    initiator.command_with(unit, &read(8), &indirect(90_000, &ranges, 0)).unwrap();
    initiator.turn_at(Instant::now()).unwrap();
    let (response, sense) = initiator.end();
    assert_eq!((response.status, sense[2], sense[12], sense[13]), (2, 0x0b, 0x55, 0x03));
    assert!(initiator.is_settled());
}

#[test]
fn functions_are_answered_with_their_codes() {
    let mut initiator = open();
    use TaskManagementFunction as F;
    assert_eq!(initiator.managed(F::ABORT_TASK, 0, 1), ResponseCode::NO_FAILURE);
    assert_eq!(initiator.managed(F::ABORT_TASK_SET, 0, 0), ResponseCode::NO_FAILURE);
    assert_eq!(initiator.managed(F::CLEAR_TASK_SET, 0, 0), ResponseCode::NO_FAILURE);
    assert_eq!(initiator.managed(F::LOGICAL_UNIT_RESET, 0, 0), ResponseCode::NO_FAILURE);
    assert_eq!(
        initiator.managed(F::LOGICAL_UNIT_RESET, Lun::new(1).0, 0),
        ResponseCode::REQUEST_FIELDS_INVALID
    );
    assert_eq!(initiator.managed(F::CLEAR_ACA, 0, 0), ResponseCode::FUNCTION_NOT_SUPPORTED);
    assert_eq!(initiator.managed(F(0x10), 0, 0), ResponseCode::FUNCTION_NOT_SUPPORTED);
    assert!(initiator.is_settled() && initiator.pump.session.functions.is_empty());
}

#[test]
fn an_aborted_task_has_no_response_and_returns_its_credit() {
    let mut initiator = open();
    initiator.pump.holds_io = true;
    initiator.command(&read(1), IN, direct(0, 512).as_bytes()).unwrap();
    let task = initiator.tag;
    initiator.manage(TaskManagementFunction::ABORT_TASK, 0, task).unwrap();
    assert!(initiator.next().is_none(), "the volume still has it");
    initiator.pump.finish_one();
    assert_eq!(initiator.code(), ResponseCode::NO_FAILURE);
    assert!(initiator.is_settled());
}

#[test]
fn an_abort_waits_for_a_read_of_the_initiator_s_memory() {
    let mut initiator = open();
    initiator.command(&write(1), OUT, direct(0, 512).as_bytes()).unwrap();
    let task = initiator.tag;
    let Some(WorkRequest::Read { id, .. }) = initiator.next() else { panic!("data-out") };
    initiator.manage(TaskManagementFunction::ABORT_TASK, 0, task).unwrap();
    assert!(initiator.next().is_none());
    initiator.event(Event::Done { id, result: Ok(()) }).unwrap();
    assert_eq!(initiator.code(), ResponseCode::NO_FAILURE);
    assert!(initiator.is_settled());
}

#[test]
fn credits_of_tasks_cleared_by_another_nexus_are_returned_by_srp_cred_req() {
    let node = node();
    let mut initiator = Initiator::open(&node);
    ready(&mut initiator);
    let mut other = Initiator::new(&node);
    other.log_in(LoginRequestRdma { initiator_port_id: [7; 16], ..login() }).unwrap();
    ready(&mut other);
    initiator.pump.holds_io = true;
    initiator.command(&read(1), IN, direct(0, 512).as_bytes()).unwrap();
    other.manage(TaskManagementFunction::CLEAR_TASK_SET, 0, 0).unwrap();
    initiator.pump.finish_one();
    match initiator.next() {
        // The task ended without a response, or with TASK ABORTED.
        Some(WorkRequest::Send { head, .. }) if SrpOpcode(head[0]) == SrpOpcode::CREDIT_REQUEST => {
            let notice = TargetNotice::read_from_bytes(&head).unwrap();
            initiator.credits += i64::from(notice.value.get());
            let answer = SrpHeader { opcode: SrpOpcode::CREDIT_RESPONSE.0, ..SrpHeader::default() };
            let message = Seg::from_slice(answer.as_bytes());
            initiator.event(Event::Received { message, invalidated: None, written: None }).unwrap();
            assert!(!initiator.pump.session.is_credit_sent);
        }
        Some(WorkRequest::Send { head, .. }) => drop(initiator.response(&head)),
        work => panic!("{work:?}"),
    }
    assert_eq!(initiator.credits, i64::from(REQUEST_LIMIT));
}

#[test]
fn a_logout_ends_the_channel_after_the_io_in_flight() {
    let mut initiator = open();
    initiator.pump.holds_io = true;
    initiator.command(&read(1), IN, direct(0, 512).as_bytes()).unwrap();
    let logout = SrpHeader { opcode: SrpOpcode::INITIATOR_LOGOUT.0, ..SrpHeader::default() };
    initiator
        .event(Event::Received {
            message: Seg::from_slice(logout.as_bytes()),
            invalidated: None,
            written: None,
        })
        .unwrap();
    assert!(initiator.next().is_none());
    initiator.pump.finish_one();
    assert!(matches!(initiator.next(), Some(WorkRequest::Disconnect)));
    assert!(matches!(initiator.events.last(), Some(AuditEvent::Logout { .. })));
}

#[test]
fn a_stopping_target_sends_a_logout() {
    let mut initiator = open();
    initiator.pump.session.on_stop(Instant::now());
    let Some(WorkRequest::Send { head, .. }) = initiator.next() else { panic!("a logout") };
    assert_eq!(SrpOpcode(head[0]), SrpOpcode::TARGET_LOGOUT);
    assert!(matches!(initiator.next(), Some(WorkRequest::Disconnect)));
}

#[test]
fn a_reservation_of_an_srp_port_is_stored_by_its_identifier() {
    let mut initiator = open();
    // PERSISTENT RESERVE OUT, REGISTER with key 1.
    let mut list = [0; 24];
    list[15] = 1;
    initiator.set(0, &list);
    let out = [0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0];
    initiator.command(&out, OUT, direct(0, 24).as_bytes()).unwrap();
    assert_eq!(initiator.end().0.status, 0);
    // PERSISTENT RESERVE IN, READ FULL STATUS.
    initiator.command(&[0x5e, 3, 0, 0, 0, 0, 0, 1, 0, 0], IN, direct(0, 256).as_bytes()).unwrap();
    let (response, _) = initiator.end();
    let len = 256 - response.data_in_res_cnt.get() as usize;
    let status = initiator.get(0, len);
    let id = &status[8 + 24..];
    assert_eq!((id.len(), id[0] & 0x0f, &id[8..]), (24, 4, &INITIATOR.0[..]));
}

#[test]
fn a_connection_without_a_login_is_closed() {
    let initiator = Initiator::new(&node());
    let mut session = initiator.pump.session;
    let deadline = session.poll_timeout().unwrap();
    assert!(session.on_timeout(deadline).is_err());
}

/// Linux's target counted its credits wrongly after a part of a command had failed
/// (CVE-2026-74394).
#[test]
fn a_command_whose_table_or_nth_range_cannot_be_read_returns_one_credit_and_writes_nothing() {
    for (in_unit, failing) in [(3, 0), (3, 1), (3, 2), (0, 0), (1, 1)] {
        let mut initiator = open();
        let ranges = [direct(10_000, 512), direct(50_000, 3000), direct(20_000, 584)];
        let unit = SrpCommand { buf_fmt: 0x20, data_out_desc_cnt: in_unit as u8, ..SrpCommand::default() };
        initiator.command_with(unit, &write(8), &indirect(90_000, &ranges, in_unit)).unwrap();
        let (mut nth, mut answer) = (0, None);
        while let Some(work) = initiator.next() {
            match work {
                WorkRequest::Read { id, local, remote } => {
                    if remote.address == 90_000 {
                        local.copy_from(ranges.as_bytes());
                    }
                    let result = if nth == failing { Err(WorkError::RemoteAccess) } else { Ok(()) };
                    initiator.event(Event::Done { id, result }).unwrap();
                    nth += 1;
                }
                WorkRequest::Send { head, .. } => {
                    assert!(answer.replace(initiator.response(&head)).is_none(), "two responses");
                }
                other => panic!("{other:?}"),
            }
        }
        let (response, sense) = answer.expect("a response");
        assert_eq!((response.status, sense[2]), (2, 0x0b), "{in_unit} {failing}");
        assert!(initiator.is_settled() && initiator.pump.submitted.is_empty(), "{in_unit} {failing}");
        initiator.command(&read(8), IN, direct(0, 4096).as_bytes()).unwrap();
        assert_eq!(initiator.end().0.status, 0);
        assert_eq!(initiator.get(0, 4096), [0; 4096]);
    }
}
