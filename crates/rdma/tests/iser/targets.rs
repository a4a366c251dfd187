//! The initiator's protocol rules: which memory it registers for a target and when it invalidates
//! it, and which messages it refuses.

use crate::bench::{ManualSession, ManuallyDriven, ServedTarget, TargetEnd, initiator, list, pattern};
use blockmux_proto::driver::session::{Initiator, Overdue, ProtocolError, Timed};
use blockmux_proto::iscsi::client::{IscsiInitiatorSession, default_proposal};
use blockmux_proto::iscsi::login::operational::OperationalParameters;
use blockmux_proto::iscsi::node::offer;
use blockmux_proto::iscsi::server::IserTargetSession;
use blockmux_proto::rdma::{
    Event, RdmaConnections, RdmaSession, Remote, RemoteRights, Stag, WorkId, WorkRequest,
};
use blockmux_volume::{Io, IoError, Op, SgList, Tag};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{Bhs, FLAG_FINAL, IscsiOpcode, RESERVED_TAG, U24};
use blockmux_wire::iser::ControlHeader;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// Both sides, with the test in place of the network.
struct Interposed {
    client: ManualSession<IscsiInitiatorSession>,
    server: TargetEnd<ManualSession<IserTargetSession>>,
    /// The initiator's registered memory.
    open: BTreeMap<u32, (SgList, RemoteRights)>,
    next_stag: u32,
    /// Changes the target's messages.
    modify: fn(&mut Vec<u8>),
}

/// Base offset of registered memory.
const BASE: u64 = 0x1000;

impl Interposed {
    fn new(private_data: &[u8]) -> Interposed {
        Interposed::with_parameters(default_proposal(), private_data)
    }

    fn with_parameters(proposal: OperationalParameters, private_data: &[u8]) -> Interposed {
        let served = ServedTarget::new(offer(), None);
        let server = TargetEnd::new(&served, ManualSession::new(served.session()));
        let client = ManualSession::new(initiator(proposal));
        let mut wire = Interposed { client, server, open: BTreeMap::new(), next_stag: 7, modify: |_| {} };
        let requested = Event::Requested { private_data: private_data.to_vec(), reads: 32 };
        wire.server.driven.session.on_event(requested, Instant::now()).unwrap();
        wire.server.run();
        let Some(WorkRequest::Accept { private_data }) = wire.server.driven.works.pop_front() else {
            panic!()
        };
        wire.client.session.handle(Event::Connected { private_data }).unwrap();
        wire
    }

    /// Both sides after login, with Send with Invalidate.
    fn ready() -> Interposed {
        let mut wire = Interposed::new(&[0x80, 0, 0, 0]);
        wire.run().unwrap();
        assert!(wire.client.session.is_ready());
        wire
    }

    /// Executes the initiator's registrations and invalidations; messages stay queued.
    fn serve_client(&mut self) {
        self.client.take();
        let mut messages = std::mem::take(&mut self.client.works);
        while let Some(work) = messages.pop_front() {
            match work {
                WorkRequest::Register { id, local, access } => {
                    self.next_stag += 1;
                    let remote =
                        Remote { stag: Stag(self.next_stag), address: BASE, len: local.len() as u32 };
                    self.open.insert(self.next_stag, (local, access));
                    self.client.session.handle(Event::Registered { id, remote }).unwrap();
                    let before = std::mem::take(&mut self.client.works);
                    self.client.take();
                    messages.append(&mut self.client.works);
                    self.client.works = before;
                }
                WorkRequest::Invalidate { stag } => {
                    assert!(self.open.remove(&stag.0).is_some(), "invalidates memory that is not registered");
                }
                other => self.client.works.push_back(other),
            }
        }
    }

    fn memory(&self, remote: Remote, wanted: RemoteRights) -> SgList {
        let (list, access) = &self.open[&remote.stag.0];
        assert_eq!(*access, wanted);
        list.slice((remote.address - BASE) as usize, remote.len as usize)
    }

    /// Executes the target's transfers, and passes its messages on.
    fn serve_server(&mut self) -> Result<bool, ProtocolError> {
        let mut moves = self.server.run();
        while let Some(work) = self.server.driven.works.pop_front() {
            moves = true;
            match work {
                WorkRequest::Write { id, local, remote } => {
                    let remote = Remote { len: local.len() as u32, ..remote };
                    local.copy_to_list(&self.memory(remote, RemoteRights::RemoteWrite));
                    self.done(id);
                }
                WorkRequest::Read { id, local, remote } => {
                    self.memory(remote, RemoteRights::RemoteRead).copy_to_list(&local);
                    self.done(id);
                }
                WorkRequest::Send { head, payload, invalidate, .. } => {
                    let mut message = [&head[..], &payload.to_vec()].concat();
                    (self.modify)(&mut message);
                    if let Some(stag) = invalidate {
                        assert!(
                            self.open.remove(&stag.0).is_some(),
                            "invalidates memory that is not registered"
                        );
                    }
                    self.client.receive(&message, invalidate)?;
                }
                WorkRequest::Disconnect => {}
                other => panic!("{other:?}"),
            }
        }
        Ok(moves)
    }

    fn done(&mut self, id: WorkId) {
        self.server.driven.session.on_event(Event::Done { id, result: Ok(()) }, Instant::now()).unwrap();
    }

    /// Passes messages on until none is left.
    fn run(&mut self) -> Result<(), ProtocolError> {
        loop {
            self.serve_client();
            let mut moves = false;
            while let Some(work) = self.client.works.pop_front() {
                let WorkRequest::Send { head, payload, invalidate: None, .. } = work else { continue };
                moves = true;
                self.server.driven.receive(&[&head[..], &payload.to_vec()].concat(), None).unwrap();
            }
            if !self.serve_server()? && !moves {
                return Ok(());
            }
        }
    }

    fn submit(&mut self, tag: u64, op: Op, len: usize, data: Option<SgList>) {
        let offset = tag * 65_536;
        self.client.session.submit(Io { tag: Tag(tag), op, offset, len: len as u64, data });
        self.serve_client();
    }

    /// The sent command: iSER header, PDU and data.
    fn command(&mut self) -> (ControlHeader, ScsiCommand, Vec<u8>) {
        let (_, header, bhs, data) = self.client.message();
        (header, ScsiCommand::read_from_bytes(bhs.as_bytes()).unwrap(), data)
    }

    fn done_tags(&mut self) -> Vec<u64> {
        std::iter::from_fn(|| self.client.session.poll_done()).map(|done| done.tag.0).collect()
    }

    /// Sends a PDU in place of the target.
    fn send_pdu(
        &mut self,
        pdu: &(impl IntoBytes + Immutable),
        data: &[u8],
        closes: Option<Stag>,
    ) -> Result<(), ProtocolError> {
        let mut bhs = Bhs::read_from_bytes(pdu.as_bytes()).unwrap();
        bhs.data_segment_length = U24::new(data.len() as u32);
        let message = [ControlHeader::new().as_bytes(), bhs.as_bytes(), data].concat();
        self.client.receive(&message, closes)
    }
}

fn response(command: &ScsiCommand, status: u8) -> ScsiResponse {
    let mut response = ScsiResponse::new_zeroed();
    response.opcode = IscsiOpcode::SCSI_RESPONSE.0;
    response.flags = FLAG_FINAL;
    response.status = status;
    response.initiator_task_tag = command.initiator_task_tag;
    response.exp_cmd_sn = (command.cmd_sn.get() + 1).into();
    response.max_cmd_sn = (command.cmd_sn.get() + 100).into();
    response
}

const WRITE: Op = Op::Write { fua: false };

#[test]
fn a_command_registers_only_the_memory_that_the_target_needs() {
    let mut wire = Interposed::ready();
    assert!(wire.open.is_empty(), "the bring-up left no memory registered");
    wire.submit(0, Op::Flush, 0, None);
    let (header, _, _) = wire.command();
    assert_eq!(header, ControlHeader::new());
    wire.submit(1, Op::Read, 4096, None);
    let (header, command, _) = wire.command();
    assert_eq!((header.read(), header.write()), (Some((wire.next_stag, BASE)), None));
    assert_eq!(command.expected_data_transfer_length.get(), 4096);
    let opened = wire.open.len();
    wire.submit(2, WRITE, 8192, Some(list(&pattern(8192))));
    let (header, command, data) = wire.command();
    assert_eq!((header, command.data_segment_length.get()), (ControlHeader::new(), 8192));
    assert!(data == pattern(8192) && command.flags & FLAG_FINAL != 0 && wire.open.len() == opened);
    wire.submit(3, WRITE, 8704, Some(list(&pattern(8704))));
    let (header, command, data) = wire.command();
    assert_eq!((header.read(), header.write()), (None, Some((wire.next_stag, BASE))));
    assert!(data.is_empty() && command.flags & FLAG_FINAL != 0);
    let (memory, access) = &wire.open[&wire.next_stag];
    assert!(memory.to_vec() == pattern(8704) && *access == RemoteRights::RemoteRead);
}

#[test]
fn registered_memory_is_the_callers_own() {
    let mut wire = Interposed::ready();
    let (data, room) = (list(&pattern(65_536)), list(&vec![0; 65_536]));
    wire.submit(0, WRITE, 65_536, Some(data.clone()));
    let (memory, _) = &wire.open[&wire.next_stag];
    assert_eq!(memory.segs()[0].as_ptr(), data.segs()[0].as_ptr());
    wire.run().unwrap();
    assert_eq!(wire.done_tags(), [0]);
    wire.submit(0, Op::Read, 65_536, Some(room.clone()));
    let (memory, _) = &wire.open[&wire.next_stag];
    assert_eq!(memory.segs()[0].as_ptr(), room.segs()[0].as_ptr());
    wire.run().unwrap();
    assert!(wire.done_tags() == [0] && room.to_vec() == pattern(65_536) && wire.open.is_empty());
}

#[test]
fn a_command_completes_after_its_memory_was_invalidated() {
    // Send with Invalidate was not negotiated.
    let mut wire = Interposed::new(&[0xc0, 0, 0, 0]);
    wire.run().unwrap();
    assert!(wire.client.session.is_ready() && wire.open.is_empty());
    wire.submit(0, Op::Read, 4096, None);
    let (_, command, _) = wire.command();
    let stag = Stag(wire.next_stag);
    let bhs = response(&command, 0);
    let message = [ControlHeader::new().as_bytes(), bhs.as_bytes()].concat();
    let message = blockmux_volume::Seg::from_slice(&message);
    wire.client.session.handle(Event::Received { message, invalidated: None, written: None }).unwrap();
    assert!(wire.client.session.poll_done().is_none());
    let mut closed = false;
    while let Some(work) = wire.client.next_work(100) {
        assert!(wire.client.session.poll_done().is_none(), "its memory is still registered");
        closed |= matches!(work, WorkRequest::Invalidate { stag: named } if named == stag);
    }
    assert!(closed);
    assert_eq!(wire.done_tags(), [0]);
}

#[test]
fn a_target_that_invalidates_other_memory_ends_the_session() {
    let mut wire = Interposed::ready();
    wire.submit(0, Op::Read, 4096, None);
    let (_, first, _) = wire.command();
    wire.submit(1, Op::Read, 4096, None);
    wire.command();
    let other = Stag(wire.next_stag);
    assert_eq!(
        wire.send_pdu(&response(&first, 0), &[], Some(other)).unwrap_err().what,
        "invalidated memory of another command than it answered"
    );
    assert!(wire.done_tags().is_empty());
    let mut wire = Interposed::ready();
    wire.submit(0, WRITE, 512, Some(list(&pattern(512))));
    let (_, command, _) = wire.command();
    assert!(
        wire.send_pdu(&response(&command, 0), &[], Some(Stag(3))).is_err(),
        "the command has no registered memory"
    );
    let mut wire = Interposed::ready();
    let mut ping = NopIn::new_zeroed();
    ping.opcode = IscsiOpcode::NOP_IN.0;
    assert!(wire.send_pdu(&ping, &[], Some(Stag(3))).is_err(), "no response");
}

#[test]
fn pdus_that_rdma_replaces_end_the_session() {
    for opcode in [IscsiOpcode::DATA_IN, IscsiOpcode::R2T, IscsiOpcode::LOGIN_RESPONSE, IscsiOpcode(0x3e)] {
        let mut wire = Interposed::ready();
        wire.submit(0, Op::Read, 4096, None);
        let (_, command, _) = wire.command();
        let mut pdu = DataIn::new_zeroed();
        (pdu.opcode, pdu.flags) = (opcode.0, FLAG_FINAL);
        pdu.initiator_task_tag = command.initiator_task_tag;
        assert!(wire.send_pdu(&pdu, &[], None).is_err(), "{opcode:?}");
        assert!(wire.done_tags().is_empty());
    }
}

#[test]
fn a_malformed_message_ends_the_session() {
    let whole = [ControlHeader::new().as_bytes(), &[0x20; 48]].concat();
    for len in (0..76).step_by(5) {
        let mut wire = Interposed::ready();
        assert!(wire.client.receive(&whole[..len], None).is_err(), "{len} bytes");
        assert!(Interposed::new(&[]).client.receive(&whole[..len], None).is_err(), "{len} bytes in a login");
    }
    for flags in [0x00, 0x20, 0x30] {
        let mut message = whole.clone();
        message[0] = flags;
        assert!(Interposed::ready().client.receive(&message, None).is_err(), "{flags:#x}");
    }
}

#[test]
fn a_response_without_a_command_ends_the_session() {
    let mut wire = Interposed::ready();
    wire.submit(0, Op::Read, 4096, None);
    let (_, command, _) = wire.command();
    wire.send_pdu(&response(&command, 0), &[], Some(Stag(wire.next_stag))).unwrap();
    assert_eq!(wire.done_tags(), [0]);
    assert!(wire.send_pdu(&response(&command, 0), &[], None).is_err(), "a second time");
}

#[test]
fn a_short_read_and_a_failed_one_are_errors() {
    let mut wire = Interposed::ready();
    let sense = [0, 18, 0x70, 0, 3, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x11, 0, 0, 0, 0, 0];
    let mut short = ScsiResponse::new_zeroed();
    short.flags = FLAG_FINAL | FLAG_UNDERFLOW;
    short.residual_count = 512.into();
    for (nth, is_short) in [true, false].into_iter().enumerate() {
        wire.submit(nth as u64, Op::Read, 4096, None);
        let (_, command, _) = wire.command();
        let mut pdu = response(&command, if is_short { 0 } else { 2 });
        if is_short {
            (pdu.flags, pdu.residual_count) = (short.flags, short.residual_count);
        }
        let data = if is_short { &[][..] } else { &sense };
        wire.send_pdu(&pdu, data, Some(Stag(wire.next_stag))).unwrap();
        let done = wire.client.session.poll_done().unwrap();
        assert_eq!(done.result.err(), Some(IoError::Medium), "{is_short}");
    }
}

#[test]
fn a_capacity_change_leads_to_read_capacity() {
    let mut wire = Interposed::ready();
    wire.client.session.poll_size();
    wire.submit(0, Op::Read, 4096, None);
    let (_, command, _) = wire.command();
    let sense = [0, 18, 0x70, 0, 6, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x2a, 9, 0, 0, 0, 0];
    wire.send_pdu(&response(&command, 2), &sense, Some(Stag(wire.next_stag))).unwrap();
    wire.serve_client();
    let mut is_asked = false;
    while !wire.client.works.is_empty() {
        let (header, command, _) = wire.command();
        let stag = header.read().expect("each of these commands reads").0;
        let (room, _) = wire.open.remove(&stag).unwrap();
        // READ CAPACITY(16): the last block and the block length.
        if command.cdb[0] == 0x9e {
            is_asked = true;
            room.slice(0, 12).copy_from(&[&0x7fff_u64.to_be_bytes()[..], &512_u32.to_be_bytes()].concat());
        }
        wire.send_pdu(&response(&command, 0), &[], Some(Stag(stag))).unwrap();
        wire.serve_client();
    }
    assert!(is_asked && wire.done_tags() == [0]);
    assert_eq!(wire.client.session.poll_size(), Some(0x8000 * 512));
}

#[test]
fn a_window_wider_than_our_receive_buffers_is_not_used() {
    #[expect(clippy::ptr_arg, reason = "other changes have another length")]
    fn widen(message: &mut Vec<u8>) {
        let max_cmd_sn = u32::from_be_bytes(message[28 + 32..28 + 36].try_into().unwrap());
        message[28 + 32..28 + 36].copy_from_slice(&(max_cmd_sn + 1000).to_be_bytes());
    }
    let mut wire = Interposed::new(&[0x80, 0, 0, 0]);
    wire.modify = widen;
    wire.run().unwrap();
    for tag in 0..600 {
        assert!(wire.client.session.room() > 0);
        wire.client.session.submit(Io::new(Tag(tag), Op::Read, 0, 512));
    }
    wire.serve_client();
    let endpoint = wire.client.session.endpoint();
    assert_eq!((wire.client.works.len(), wire.open.len()), (256, 256));
    assert!(endpoint.receives >= 256 && endpoint.regions >= 256);
    let (header, command, _) = wire.command();
    let stag = Stag(header.read().unwrap().0);
    wire.open.remove(&stag.0);
    let sent = wire.client.works.len();
    wire.send_pdu(&response(&command, 0), &[], Some(stag)).unwrap();
    wire.serve_client();
    assert_eq!((wire.done_tags().len(), wire.client.works.len()), (1, sent + 1));
}

#[test]
fn a_target_without_iser_is_refused() {
    fn deny(message: &mut Vec<u8>) {
        let len = u32::from_be_bytes(message[32..36].try_into().unwrap()) & U24::MAX;
        let text = String::from_utf8_lossy(&message[76..76 + len as usize]);
        let text = text.replace("RDMAExtensions=Yes", "RDMAExtensions=No");
        message.splice(76.., text.bytes());
        message[32..36].copy_from_slice(&(text.len() as u32).to_be_bytes());
    }
    let mut wire = Interposed::new(&[0x80, 0, 0, 0]);
    wire.modify = deny;
    let error = wire.run().unwrap_err();
    assert_eq!(error.what, "did not agree to iSER over RDMA");
    let mut nobody = ManualSession::new(initiator(default_proposal()));
    let refused = nobody.session.handle(Event::Refused { private_data: vec![1; 500] }).unwrap_err();
    assert_eq!(refused.what, "refused the RDMA connection: no iSER target listens there");
}

#[test]
fn a_flood_of_nops_waits_for_its_replies_to_be_sent() {
    let mut wire = Interposed::ready();
    let mut ping = NopIn::new_zeroed();
    (ping.opcode, ping.flags) = (IscsiOpcode::NOP_IN.0, FLAG_FINAL);
    (ping.initiator_task_tag, ping.target_transfer_tag) = (RESERVED_TAG.into(), 5.into());
    let message = [ControlHeader::new().as_bytes(), ping.as_bytes()].concat();
    let mut given_back = 0;
    for _ in 0..1000 {
        let message = blockmux_volume::Seg::from_slice(&message);
        wire.client.session.handle(Event::Received { message, invalidated: None, written: None }).unwrap();
        // The queue pair has no room for messages.
        while let Some(work) = wire.client.next_work(0) {
            assert!(matches!(work, WorkRequest::Receive));
            given_back += 1;
        }
    }
    assert_eq!(given_back, 255);
    wire.client.receives = 0;
    wire.client.take();
    assert_eq!(wire.client.receives + given_back, 1000);
}

#[test]
fn an_unresponsive_target_is_pinged_and_then_abandoned() {
    let mut wire = Interposed::ready();
    let mut now = Instant::now();
    let mut pings = 0;
    let error = loop {
        now += Duration::from_secs(11);
        if let Err(error) = wire.client.session.connection(0).on_timeout(now) {
            break error;
        }
        wire.serve_client();
        while let Some(WorkRequest::Send { .. }) = wire.client.works.front() {
            assert_eq!(wire.client.message().2.opcode(), IscsiOpcode::NOP_OUT);
            pings += 1;
        }
    };
    assert_eq!((pings, error.what), (1, "did not answer within 10 seconds"));
}

#[test]
fn a_target_has_a_second_to_disconnect_after_the_logout() {
    for target_disconnects in [true, false] {
        let mut wire = Interposed::ready();
        wire.client.session.on_stop();
        wire.run().unwrap();
        assert!(wire.client.session.is_over());
        let due = wire.client.session.connection(0).poll_timeout().unwrap();
        if target_disconnects {
            wire.client.session.handle(Event::Disconnected).unwrap();
        }
        wire.client.session.connection(0).on_timeout(due).unwrap();
        let work = wire.client.next_work(100);
        assert_eq!(matches!(work, Some(WorkRequest::Disconnect)), !target_disconnects, "{work:?}");
        assert_eq!(wire.client.session.connection(0).poll_timeout(), None);
    }
}

#[test]
fn unfinished_io_is_returned_without_references() {
    let mut wire = Interposed::ready();
    let data = list(&pattern(65_536));
    wire.submit(0, WRITE, 65_536, Some(data));
    wire.submit(1, Op::Read, 4096, None);
    // This command's memory is not registered yet.
    wire.client.session.submit(Io::new(Tag(2), Op::Read, 0, 4096));
    assert!(wire.client.session.handle(Event::Disconnected).is_err(), "in the middle of commands");
    let tags: Vec<_> = wire.client.session.take_unfinished().into_iter().map(|io| io.tag.0).collect();
    assert_eq!(tags, [0, 1, 2]);
    assert!(wire.client.next_work(100).is_none());
}

impl Interposed {
    /// Lets commands become overdue; returns the task management request that follows.
    fn escalate(&mut self, function: Function) -> TaskManagementFunctionRequest {
        while self.client.session.tick() < TICKS {}
        assert!(self.client.session.abort_overdue(TICKS).is_some());
        self.serve_client();
        let (_, header, bhs, _) = self.client.message();
        let request = TaskManagementFunctionRequest::read_from_bytes(bhs.as_bytes()).unwrap();
        assert_eq!((header, request.opcode), (ControlHeader::new(), 0x42));
        assert_eq!(request.function, FLAG_FINAL | function.0);
        assert!(self.client.works.is_empty());
        request
    }

    /// Delivers a message before the session's work is taken.
    fn deliver(
        &mut self,
        pdu: &(impl IntoBytes + Immutable),
        closes: Option<Stag>,
    ) -> Result<(), ProtocolError> {
        let message = [ControlHeader::new().as_bytes(), pdu.as_bytes()].concat();
        let message = blockmux_volume::Seg::from_slice(&message);
        self.client.session.handle(Event::Received { message, invalidated: closes, written: None })
    }

    /// Executes the session's invalidations in order. No command completes while one of `stags` is
    /// valid.
    fn close(&mut self, stags: &[u32]) {
        let mut left = stags.to_vec();
        while let Some(work) = self.client.next_work(100) {
            if let WorkRequest::Invalidate { stag } = work {
                let ended = self.client.session.poll_returned().is_some() || !self.done_tags().is_empty();
                assert!(!ended, "its memory is still registered");
                assert!(self.open.remove(&stag.0).is_some(), "invalidates memory that is not registered");
                left.retain(|other| *other != stag.0);
            }
        }
        assert!(left.is_empty(), "{left:?} stay registered");
    }

    fn returned_tags(&mut self) -> Vec<u64> {
        let mut tags: Vec<_> =
            std::iter::from_fn(|| self.client.session.poll_returned()).map(|io| io.tag.0).collect();
        tags.sort_unstable();
        tags
    }
}

fn answer(
    request: &TaskManagementFunctionRequest,
    response: FunctionResponse,
) -> TaskManagementFunctionResponse {
    let mut answer = TaskManagementFunctionResponse::new_zeroed();
    answer.opcode = IscsiOpcode::TASK_MANAGEMENT_RESPONSE.0;
    answer.flags = FLAG_FINAL;
    answer.response = response.0;
    answer.initiator_task_tag = request.initiator_task_tag;
    answer.exp_cmd_sn = request.cmd_sn;
    answer.max_cmd_sn = (request.cmd_sn.get() + 100).into();
    answer
}

const TICKS: u32 = 4;
const COMPLETE: FunctionResponse = FunctionResponse::FUNCTION_COMPLETE;
const UNKNOWN: FunctionResponse = FunctionResponse::TASK_DOES_NOT_EXIST;

#[test]
fn memory_of_an_overdue_command_stays_registered_until_its_abort_completes() {
    for response in [COMPLETE, UNKNOWN] {
        for op in [Op::Read, WRITE] {
            let mut wire = Interposed::ready();
            let data = list(&pattern(8704));
            wire.submit(0, op, 8704, Some(data.clone()));
            let (_, command, _) = wire.command();
            let stag = wire.next_stag;
            let request = wire.escalate(Function::ABORT_TASK);
            assert_eq!(request.referenced_task_tag, command.initiator_task_tag);
            assert_eq!(request.ref_cmd_sn, command.cmd_sn);
            // The target may still access it.
            assert_eq!(wire.open[&stag].0.segs()[0].as_ptr(), data.segs()[0].as_ptr());
            assert!(wire.returned_tags().is_empty());
            wire.deliver(&answer(&request, response), None).unwrap();
            assert!(wire.returned_tags().is_empty(), "its memory is still registered");
            wire.close(&[stag]);
            assert_eq!((wire.returned_tags(), wire.done_tags(), wire.open.len()), (vec![0], vec![], 0));
            // Its slot is free again, and its memory may be in use elsewhere.
            let error = wire.send_pdu(&self::response(&command, 0), &[], None).unwrap_err();
            assert_eq!(error.what, "answered an unknown task");
        }
    }
}

#[test]
fn a_command_that_completes_during_its_abort_completes_once() {
    for closes_itself in [false, true] {
        for is_asked_between in [false, true] {
            let mut wire = Interposed::ready();
            wire.submit(0, Op::Read, 4096, None);
            let (_, command, _) = wire.command();
            let stag = wire.next_stag;
            let request = wire.escalate(Function::ABORT_TASK);
            let closes = closes_itself.then_some(Stag(stag));
            wire.deliver(&response(&command, 0), closes).unwrap();
            let open = if closes_itself { &[][..] } else { &[stag] };
            if closes_itself {
                wire.open.remove(&stag);
            }
            if is_asked_between {
                wire.close(open);
            }
            wire.deliver(&answer(&request, UNKNOWN), None).unwrap();
            if !is_asked_between {
                wire.close(open);
            }
            wire.close(&[]);
            assert_eq!((wire.done_tags(), wire.returned_tags(), wire.open.len()), (vec![0], vec![], 0));
        }
    }
}

#[test]
fn a_second_response_or_one_after_an_abort_ends_the_session() {
    for is_aborted in [false, true] {
        let mut wire = Interposed::ready();
        wire.submit(0, Op::Read, 4096, None);
        let (_, command, _) = wire.command();
        let request = wire.escalate(Function::ABORT_TASK);
        if is_aborted {
            wire.deliver(&answer(&request, COMPLETE), None).unwrap();
        } else {
            wire.deliver(&response(&command, 0), None).unwrap();
        }
        let error = wire.deliver(&response(&command, 0), None).unwrap_err();
        assert_eq!(error.what, "answered a command that has ended");
        assert!(
            wire.done_tags().is_empty() && wire.returned_tags().is_empty(),
            "its memory is still registered"
        );
    }
}

#[test]
fn a_reset_invalidates_all_memory_before_it_returns_commands() {
    let mut wire = Interposed::ready();
    wire.submit(0, Op::Read, 4096, None);
    wire.submit(1, WRITE, 8704, Some(list(&pattern(8704))));
    wire.submit(2, Op::Flush, 0, None);
    wire.client.works.clear();
    let stags: Vec<_> = wire.open.keys().copied().collect();
    let request = wire.escalate(Function::ABORT_TASK);
    wire.send_pdu(&answer(&request, FunctionResponse::TASK_MANAGEMENT_FUNCTION_NOT_SUPPORTED), &[], None)
        .unwrap();
    assert_eq!((wire.open.len(), wire.returned_tags()), (2, vec![]), "a refusal ends nothing");
    let request = wire.escalate(Function::LOGICAL_UNIT_RESET);
    wire.deliver(&answer(&request, COMPLETE), None).unwrap();
    // It had no registered memory.
    assert_eq!(wire.returned_tags(), [2]);
    wire.close(&stags);
    assert_eq!((wire.returned_tags(), wire.open.len()), (vec![0, 1], 0));
    assert!(wire.done_tags().is_empty());
}

#[test]
fn a_command_that_was_not_sent_cannot_be_aborted() {
    let mut other = Interposed::ready();
    other.submit(0, Op::Read, 4096, None);
    other.command();
    let request = other.escalate(Function::ABORT_TASK);
    let mut wire = Interposed::ready();
    wire.client.session.submit(Io::new(Tag(0), Op::Read, 0, 4096));
    let Some(WorkRequest::Register { id, local, access }) = wire.client.next_work(100) else { panic!() };
    while wire.client.session.tick() < TICKS {}
    assert!(wire.client.session.abort_overdue(TICKS).is_some());
    // A target that guesses the tag of a request that was not sent.
    wire.deliver(&answer(&request, COMPLETE), None).unwrap();
    let remote = Remote { stag: Stag(99), address: BASE, len: local.len() as u32 };
    wire.open.insert(99, (local, access));
    wire.client.session.handle(Event::Registered { id, remote }).unwrap();
    wire.client.take();
    let (header, command, _) = wire.command();
    assert_eq!((header.read(), wire.returned_tags()), (Some((99, BASE)), vec![]));
    wire.deliver(&response(&command, 0), None).unwrap();
    wire.close(&[99]);
    assert_eq!((wire.done_tags(), wire.returned_tags()), (vec![0], vec![]));
}

#[test]
fn a_connection_lost_during_an_abort_returns_each_command_once() {
    for is_answered in [false, true] {
        let mut wire = Interposed::ready();
        wire.submit(0, Op::Read, 4096, None);
        wire.submit(1, WRITE, 8704, Some(list(&pattern(8704))));
        wire.client.works.clear();
        let request = wire.escalate(Function::ABORT_TASK);
        if is_answered {
            wire.deliver(&answer(&request, COMPLETE), None).unwrap();
        }
        assert!(wire.client.session.handle(Event::Disconnected).is_err(), "in the middle of commands");
        let tags: Vec<_> = wire.client.session.take_unfinished().into_iter().map(|io| io.tag.0).collect();
        assert_eq!((tags, wire.returned_tags(), wire.done_tags()), (vec![0, 1], vec![], vec![]));
        assert!(wire.client.next_work(100).is_none());
    }
}

#[test]
fn an_abort_is_sent_after_its_command() {
    let mut wire = Interposed::ready();
    wire.client.session.submit(Io::new(Tag(0), Op::Read, 0, 4096));
    let Some(WorkRequest::Register { id, local, .. }) = wire.client.next_work(100) else {
        panic!("nothing opened")
    };
    while wire.client.session.tick() < TICKS {}
    assert!(wire.client.session.abort_overdue(TICKS).is_some());
    assert!(wire.client.next_work(100).is_none(), "the command has no STag yet");
    let remote = Remote { stag: Stag(99), address: BASE, len: local.len() as u32 };
    wire.client.session.handle(Event::Registered { id, remote }).unwrap();
    wire.client.take();
    let opcodes = [(); 2].map(|()| wire.client.message().2.opcode());
    assert_eq!(opcodes, [IscsiOpcode::SCSI_COMMAND, IscsiOpcode::TASK_MANAGEMENT_REQUEST]);
}
