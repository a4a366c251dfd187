//! The target's protocol rules, message by message: valid and invalid messages of an initiator.

use crate::bench::{INITIATOR, ManualSession, ServedTarget, TARGET, TargetEnd, pattern};
use blockmux_proto::driver::session::{ProtocolError, StreamSession, Timed};
use blockmux_proto::driver::target::TargetLifecycle;
use blockmux_proto::iscsi::node::offer;
use blockmux_proto::iscsi::server::{IscsiTargetSession, IserTargetSession};
use blockmux_proto::rdma::testing::Recorder;
use blockmux_proto::rdma::{Event, RdmaSession, Stag, WorkError, WorkRequest};
use blockmux_volume::{Chunk, Seg};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{Bhs, FLAG_FINAL, FLAG_IMMEDIATE, IscsiOpcode, RESERVED_TAG, U24};
use blockmux_wire::iser::ControlHeader;
use std::time::Instant;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// A scripted initiator.
struct TestInitiator {
    server: TargetEnd<ManualSession<IserTargetSession>>,
    cmd_sn: u32,
}

/// Tag and base offset of the initiator's memory: for read data, and below for write data.
const ROOM: (u32, u64) = (0x11, 0x1000);
const DATA: (u32, u64) = (0x22, 0x2000);

impl TestInitiator {
    /// An initiator that is connected with this private data and has sent nothing, and the reply's
    /// private data.
    fn connect(served: &ServedTarget, private_data: &[u8]) -> (TestInitiator, Vec<u8>) {
        let server = TargetEnd::new(served, ManualSession::new(served.session()));
        let mut client = TestInitiator { server, cmd_sn: 1 };
        let requested = Event::Requested { private_data: private_data.to_vec(), reads: 32 };
        client.event(requested).unwrap();
        let Some(WorkRequest::Accept { private_data }) = client.works().pop_front() else {
            panic!("not accepted")
        };
        client.event(Event::Connected { private_data: Vec::new() }).unwrap();
        (client, private_data)
    }

    /// Logs in as Linux does, with further keys.
    fn log_in_to(served: &ServedTarget, keys: &str) -> TestInitiator {
        let (mut client, _) = TestInitiator::connect(served, &[0x80, 0, 0, 0]);
        let text = format!(
            "InitiatorName={INITIATOR}\0TargetName={TARGET}\0SessionType=Normal\0RDMAExtensions=Yes\0{keys}"
        );
        client.send(ControlHeader::new(), &login_request(), text.as_bytes()).unwrap();
        let (bhs, data) = client.answer();
        let response = IscsiLoginResponse::read_from_bytes(bhs.as_bytes()).unwrap();
        assert_eq!(response.status.get(), 0, "{}", String::from_utf8_lossy(&data));
        // Takes the power-on unit attentions.
        for lun in [0, 1] {
            let command = client.command(lun, &[0; 6], 0, 0);
            client.send(ControlHeader::new(), &command, &[]).unwrap();
            assert_eq!(sense(&client.answer()), (6, 0x2900));
        }
        client
    }

    fn log_in(keys: &str) -> TestInitiator {
        TestInitiator::log_in_to(&ServedTarget::new(offer(), None), keys)
    }

    fn works(&mut self) -> &mut std::collections::VecDeque<WorkRequest> {
        &mut self.server.driven.works
    }

    fn event(&mut self, event: Event) -> Result<(), ProtocolError> {
        self.server.driven.session.on_event(event, Instant::now())?;
        self.server.run();
        Ok(())
    }

    /// Sends a message: iSER header, BHS with DataSegmentLength filled in, data.
    fn send(
        &mut self,
        header: ControlHeader,
        pdu: &(impl IntoBytes + Immutable),
        data: &[u8],
    ) -> Result<(), ProtocolError> {
        let mut bhs = Bhs::read_from_bytes(pdu.as_bytes()).unwrap();
        bhs.data_segment_length = U24::new(data.len() as u32);
        self.raw(&[header.as_bytes(), bhs.as_bytes(), data].concat())
    }

    fn raw(&mut self, message: &[u8]) -> Result<(), ProtocolError> {
        self.event(Event::Received { message: Seg::from_slice(message), invalidated: None, written: None })
    }

    /// A command with this expected transfer length; its task tag is its CmdSN.
    fn command(&mut self, lun: u8, cdb: &[u8], flags: u8, expected: u32) -> ScsiCommand {
        let mut command = ScsiCommand::new_zeroed();
        command.opcode = IscsiOpcode::SCSI_COMMAND.0;
        command.flags = FLAG_FINAL | flags;
        command.lun[1] = lun;
        command.initiator_task_tag = self.cmd_sn.into();
        command.expected_data_transfer_length = expected.into();
        command.cmd_sn = self.cmd_sn.into();
        command.cdb[..cdb.len()].copy_from_slice(cdb);
        self.cmd_sn += 1;
        command
    }

    fn read(&mut self, lba: u32, blocks: u16) -> ScsiCommand {
        self.command(0, &cdb10(0x28, lba, blocks), FLAG_READ, u32::from(blocks) * 512)
    }

    fn write(&mut self, lba: u32, blocks: u16) -> ScsiCommand {
        self.command(0, &cdb10(0x2a, lba, blocks), FLAG_WRITE, u32::from(blocks) * 512)
    }

    /// The next message of the target: BHS and data.
    fn answer(&mut self) -> (Bhs, Vec<u8>) {
        let (_, header, bhs, data) = self.server.driven.message();
        assert_eq!(header, ControlHeader::new());
        (bhs, data)
    }

    fn assert_good(&mut self, itt: u32) {
        let (bhs, _) = self.answer();
        assert_eq!(
            (bhs.opcode(), status(&bhs), bhs.initiator_task_tag.get()),
            (IscsiOpcode::SCSI_RESPONSE, 0, itt)
        );
    }

    fn assert_quiet(&mut self) {
        assert!(self.works().is_empty(), "{:?}", self.server.driven.works);
    }

    fn done(&mut self, id: blockmux_proto::rdma::WorkId) {
        self.event(Event::Done { id, result: Ok(()) }).unwrap();
    }

    /// Executes the target's next RDMA Read; returns its offset and length.
    fn fill(&mut self, data: &[u8]) -> (u64, u32) {
        let Some(WorkRequest::Read { id, local, remote }) = self.works().pop_front() else { panic!() };
        assert_eq!(remote.stag, Stag(DATA.0));
        local.copy_from(&data[..remote.len as usize]);
        self.done(id);
        (remote.address, remote.len)
    }

    /// Reads blocks by one command.
    fn blocks(&mut self, lba: u32, blocks: u16) -> Vec<u8> {
        let command = self.read(lba, blocks);
        let header = ControlHeader::new().with_read(ROOM.0, ROOM.1);
        self.send(header, &command, &[]).unwrap();
        let Some(WorkRequest::Write { id, local, remote }) = self.works().pop_front() else { panic!() };
        assert_eq!((remote.stag, remote.address), (Stag(ROOM.0), ROOM.1));
        self.done(id);
        self.assert_good(command.cmd_sn.get());
        local.to_vec()
    }
}

fn login_request() -> IscsiLoginRequest {
    let mut request = IscsiLoginRequest::new_zeroed();
    request.opcode = IscsiOpcode::LOGIN_REQUEST.0 | FLAG_IMMEDIATE;
    request.flags = 0x87;
    request.isid = [0x80, 1, 2, 3, 4, 5];
    request.cid = 7.into();
    request.cmd_sn = 1.into();
    request
}

fn data_out(itt: u32, data_sn: u32, offset: u32, is_final: bool) -> DataOut {
    let mut pdu = DataOut::new_zeroed();
    pdu.opcode = IscsiOpcode::DATA_OUT.0;
    pdu.flags = if is_final { FLAG_FINAL } else { 0 };
    pdu.initiator_task_tag = itt.into();
    pdu.target_transfer_tag = RESERVED_TAG.into();
    pdu.data_sn = data_sn.into();
    pdu.buffer_offset = offset.into();
    pdu
}

fn management(function: Function, referenced: u32) -> TaskManagementFunctionRequest {
    let mut request = TaskManagementFunctionRequest::new_zeroed();
    request.opcode = IscsiOpcode::TASK_MANAGEMENT_REQUEST.0 | FLAG_IMMEDIATE;
    request.function = FLAG_FINAL | function.0;
    request.initiator_task_tag = 99.into();
    request.referenced_task_tag = referenced.into();
    request
}

fn cdb10(opcode: u8, lba: u32, blocks: u16) -> [u8; 10] {
    let mut cdb = [0; 10];
    cdb[0] = opcode;
    cdb[2..6].copy_from_slice(&lba.to_be_bytes());
    cdb[7..9].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

fn status(bhs: &Bhs) -> u8 {
    ScsiResponse::read_from_bytes(bhs.as_bytes()).unwrap().status
}

/// Sense key and additional sense code of a CHECK CONDITION.
fn sense((bhs, data): &(Bhs, Vec<u8>)) -> (u8, u16) {
    assert_eq!((bhs.opcode(), status(bhs)), (IscsiOpcode::SCSI_RESPONSE, 2), "{bhs:?}");
    (data[4] & 0xf, u16::from_be_bytes([data[14], data[15]]))
}

fn with_data() -> ControlHeader {
    ControlHeader::new().with_write(DATA.0, DATA.1)
}

#[test]
fn both_sides_negotiate_send_with_invalidate() {
    let served = ServedTarget::new(offer(), None);
    for (said, answered) in
        [(&[0x80, 0, 0, 0][..], 0x80), (&[0xc0, 0, 0, 0, 1, 2, 3], 0xc0), (&[0x80], 0xc0), (&[], 0xc0)]
    {
        let (mut client, answer) = TestInitiator::connect(&served, said);
        assert_eq!(answer, [answered, 0, 0, 0], "{said:?}");
        let text = format!("InitiatorName={INITIATOR}\0TargetName={TARGET}\0");
        client.send(ControlHeader::new(), &login_request(), text.as_bytes()).unwrap();
        client.answer();
        let command = client.command(0, &[0x12, 0, 0, 0, 36, 0], FLAG_READ, 36);
        client.send(ControlHeader::new().with_read(ROOM.0, ROOM.1), &command, &[]).unwrap();
        assert!(matches!(client.works().pop_front(), Some(WorkRequest::Write { .. })));
        let (closed, ..) = client.server.driven.message();
        assert_eq!(closed, (answered == 0x80).then_some(Stag(ROOM.0)), "{said:?}");
    }
}

#[test]
fn a_login_over_rdma_that_does_not_want_iser_is_refused() {
    let (mut client, _) = TestInitiator::connect(&ServedTarget::new(offer(), None), &[0x80, 0, 0, 0]);
    let text = format!("InitiatorName={INITIATOR}\0TargetName={TARGET}\0RDMAExtensions=No\0");
    let error = client.send(ControlHeader::new(), &login_request(), text.as_bytes()).unwrap_err();
    assert_eq!(error.what, "did not negotiate iSER over RDMA");
    client.server.run();
    let (bhs, _) = client.answer();
    let response = IscsiLoginResponse::read_from_bytes(bhs.as_bytes()).unwrap();
    assert_eq!(response.status.get(), LoginStatus::INITIATOR_ERROR.0);
}

#[test]
fn immediate_unsolicited_and_solicited_data_are_written() {
    let all = pattern(40 * 512);
    // No immediate data, some, all of the first burst; then unsolicited data messages, before the
    // rest is read by RDMA.
    for (immediate, unasked) in [
        (0, vec![]),
        (512, vec![]),
        (8192, vec![]),
        (4096, vec![512, 3584]),
        (0, vec![8192]),
        (0, vec![1, 2, 3]),
    ] {
        let mut client = TestInitiator::log_in("InitialR2T=No\0FirstBurstLength=8192\0");
        let mut command = client.write(8, 40);
        if !unasked.is_empty() {
            command.flags &= !FLAG_FINAL;
        }
        let mut at = immediate;
        client.send(with_data(), &command, &all[..immediate]).unwrap();
        for (nth, len) in unasked.iter().enumerate() {
            client.assert_quiet();
            let is_last = nth + 1 == unasked.len();
            let pdu = data_out(command.cmd_sn.get(), nth as u32, at as u32, is_last);
            client.send(ControlHeader::new(), &pdu, &all[at..at + len]).unwrap();
            at += len;
        }
        // The header's base offset begins after the unsolicited data, as in Linux.
        let asked = client.fill(&all[at..]);
        assert_eq!(asked, (DATA.1, (all.len() - at) as u32), "{immediate} {unasked:?}");
        client.assert_good(command.cmd_sn.get());
        assert!(client.blocks(8, 40) == all, "{immediate} {unasked:?}");
    }
}

#[test]
fn tagged_buffers_may_cover_all_data() {
    let mut client = TestInitiator::log_in("TaggedBufferForSolicitedDataOnly=No\0");
    let (all, command) = (pattern(16 * 512), client.write(0, 16));
    client.send(with_data(), &command, &all[..1024]).unwrap();
    assert_eq!(client.fill(&all[1024..]), (DATA.1 + 1024, 7168));
    client.assert_good(command.cmd_sn.get());
    assert!(client.blocks(0, 16) == all);
}

#[test]
fn solicited_data_in_a_message_ends_the_connection() {
    for ttt in [RESERVED_TAG, 0, 1, 2, 3] {
        let mut client = TestInitiator::log_in("");
        let command = client.write(8, 40);
        client.send(with_data(), &command, &[]).unwrap();
        assert!(matches!(client.works().pop_front(), Some(WorkRequest::Read { .. })));
        let mut pdu = data_out(command.cmd_sn.get(), 0, 0, true);
        pdu.target_transfer_tag = ttt.into();
        let error = client.send(ControlHeader::new(), &pdu, &pattern(512)).unwrap_err();
        assert_eq!(error.what, "sent solicited data as a message, but the target reads it by RDMA");
    }
}

#[test]
fn a_target_that_stops_before_the_connection_disconnects() {
    let served = ServedTarget::new(offer(), None);
    let mut server = TargetEnd::new(&served, ManualSession::new(served.session()));
    server.driven.on_stop(Instant::now());
    server.run();
    assert!(matches!(server.driven.works.pop_front(), Some(WorkRequest::Disconnect)));
    assert!(server.driven.works.is_empty());
}

#[test]
fn a_command_with_only_immediate_data_needs_no_memory() {
    let mut client = TestInitiator::log_in("");
    let (all, command) = (pattern(8192), client.write(3, 16));
    client.send(ControlHeader::new(), &command, &all).unwrap();
    client.assert_good(command.cmd_sn.get());
    assert!(client.blocks(3, 16) == all);
}

#[test]
fn commands_without_a_tag_for_their_memory_are_rejected_and_the_session_continues() {
    let mut client = TestInitiator::log_in("");
    let read = client.read(0, 8);
    let (write, partly) = (client.write(0, 8), client.write(0, 8));
    let cases: [(ScsiCommand, ControlHeader, usize); 4] = [
        (read, ControlHeader::new(), 0),
        (read, with_data(), 0),
        (write, ControlHeader::new().with_read(ROOM.0, ROOM.1), 0),
        (partly, ControlHeader::new(), 512),
    ];
    for (nth, (mut command, header, immediate)) in cases.into_iter().enumerate() {
        client.cmd_sn = 3 + nth as u32;
        command.cmd_sn = client.cmd_sn.into();
        client.send(header, &command, &pattern(immediate)).unwrap();
        let (bhs, data) = client.answer();
        assert_eq!((bhs.opcode(), data.len()), (IscsiOpcode::REJECT, 48), "case {nth}");
        client.assert_quiet();
    }
    client.cmd_sn = 7;
    assert_eq!(client.blocks(0, 8), vec![0; 4096]);
}

/// Linux's isert took a login shorter than its header or its declared length (CVE-2026-53176,
/// CVE-2026-90413).
#[test]
fn a_malformed_message_ends_the_connection() {
    let command = TestInitiator::log_in("").read(0, 1);
    let pdu = command.as_bytes();
    let header = ControlHeader::new().with_read(ROOM.0, ROOM.1);
    let with = |flags: u8| {
        let mut header = header;
        header.opcode_flags = flags;
        [header.as_bytes(), pdu].concat()
    };
    let whole = with(0x14);
    let mut long = whole.clone();
    long.extend([0; 4]);
    let mut cases = vec![Vec::new(), long, with(0x04), with(0x24), with(0x34), with(0xf4)];
    cases.extend((1..whole.len()).step_by(5).map(|len| whole[..len].to_vec()));
    let mut claims = whole.clone();
    claims[28 + 4] = 255; // additional header segments that are not there
    cases.push(claims);
    for (nth, message) in cases.into_iter().enumerate() {
        let mut client = TestInitiator::log_in("");
        let error = client.raw(&message).unwrap_err();
        assert_eq!(error.reference, "RFC 7145 §9.2", "case {nth}");
        // The same message during login.
        let (mut client, _) = TestInitiator::connect(&ServedTarget::new(offer(), None), &[]);
        assert!(client.raw(&message).is_err(), "case {nth}");
    }
    let mut client = TestInitiator::log_in("");
    let command = client.write(0, 32);
    let error = client.send(with_data(), &command, &pattern(8193)).unwrap_err();
    assert_eq!(error.what, "sent a data segment above TargetRecvDataSegmentLength");
}

#[test]
fn a_login_in_a_session_is_refused() {
    let mut client = TestInitiator::log_in("");
    client
        .send(ControlHeader::new(), &login_request(), b"InitiatorName=iqn.2026-11.com.example:me\0")
        .unwrap();
    let (bhs, _) = client.answer();
    assert_eq!(bhs.opcode(), IscsiOpcode::REJECT);
}

#[test]
fn a_refused_rdma_read_ends_the_connection_and_nothing_is_written() {
    let mut client = TestInitiator::log_in("");
    let command = client.write(0, 32);
    client.send(with_data(), &command, &[]).unwrap();
    let Some(WorkRequest::Read { id, .. }) = client.works().pop_front() else { panic!() };
    client.event(Event::Done { id, result: Err(WorkError::RemoteAccess) }).unwrap();
    assert!(client.server.submitted.is_empty());
    assert!(matches!(client.works().pop_front(), Some(WorkRequest::Disconnect)));
    client.event(Event::Disconnected).unwrap();
    client.assert_quiet();
    assert!(client.server.driven.session.is_over());
}

#[test]
fn an_abort_completes_after_the_rdma_reads_of_its_task() {
    for function in [Function::ABORT_TASK, Function::ABORT_TASK_SET, Function::LOGICAL_UNIT_RESET] {
        let mut client = TestInitiator::log_in("");
        let command = client.write(0, 32);
        client.send(with_data(), &command, &[]).unwrap();
        let Some(WorkRequest::Read { id, local, .. }) = client.works().pop_front() else { panic!() };
        client.send(ControlHeader::new(), &management(function, command.cmd_sn.get()), &[]).unwrap();
        client.assert_quiet();
        local.copy_from(&pattern(32 * 512));
        client.done(id);
        let (bhs, _) = client.answer();
        let response = TaskManagementFunctionResponse::read_from_bytes(bhs.as_bytes()).unwrap();
        assert_eq!(
            (bhs.opcode(), response.response),
            (IscsiOpcode::TASK_MANAGEMENT_RESPONSE, 0),
            "{function:?}"
        );
        client.assert_quiet();
        if function == Function::LOGICAL_UNIT_RESET {
            let command = client.command(0, &[0; 6], 0, 0);
            client.send(ControlHeader::new(), &command, &[]).unwrap();
            assert_eq!(sense(&client.answer()), (6, 0x2903));
        }
        assert_eq!(client.blocks(0, 32), vec![0; 32 * 512], "it was never written");
    }
}

#[test]
fn an_abort_of_io_at_the_volume_waits_for_its_end() {
    let mut client = TestInitiator::log_in("");
    client.server.holds_io = true;
    let command = client.read(0, 8);
    client.send(ControlHeader::new().with_read(ROOM.0, ROOM.1), &command, &[]).unwrap();
    client.send(ControlHeader::new(), &management(Function::ABORT_TASK, command.cmd_sn.get()), &[]).unwrap();
    client.assert_quiet();
    assert_eq!(client.server.cancelled.len(), 1);
    client.server.finish_one();
    client.server.run();
    let (bhs, _) = client.answer();
    assert_eq!(bhs.opcode(), IscsiOpcode::TASK_MANAGEMENT_RESPONSE);
    client.assert_quiet();
}

#[test]
fn nops_text_and_logout_are_ordinary_messages() {
    let mut client = TestInitiator::log_in("");
    let mut ping = NopOut::new_zeroed();
    ping.opcode = IscsiOpcode::NOP_OUT.0 | FLAG_IMMEDIATE;
    ping.flags = FLAG_FINAL;
    (ping.initiator_task_tag, ping.target_transfer_tag) = (5.into(), RESERVED_TAG.into());
    client.send(ControlHeader::new(), &ping, b"hello").unwrap();
    let (bhs, data) = client.answer();
    assert_eq!((bhs.opcode(), &data[..]), (IscsiOpcode::NOP_IN, &b"hello\0\0\0"[..]));
    let mut text = TextRequest::new_zeroed();
    (text.opcode, text.flags) = (IscsiOpcode::TEXT_REQUEST.0 | FLAG_IMMEDIATE, FLAG_FINAL);
    text.target_transfer_tag = RESERVED_TAG.into();
    client.send(ControlHeader::new(), &text, b"SendTargets=\0").unwrap();
    let (bhs, data) = client.answer();
    assert_eq!(bhs.opcode(), IscsiOpcode::TEXT_RESPONSE);
    assert!(String::from_utf8(data).unwrap().contains("TargetAddress=192.0.2.1:3260,1"));
    log_out(&mut client);
}

fn log_out(client: &mut TestInitiator) {
    let mut logout = LogoutRequest::new_zeroed();
    logout.opcode = IscsiOpcode::LOGOUT_REQUEST.0 | FLAG_IMMEDIATE;
    logout.reason = FLAG_FINAL | LogoutReasonCode::CLOSE_SESSION.0;
    client.send(ControlHeader::new(), &logout, &[]).unwrap();
    let (bhs, _) = client.answer();
    assert_eq!(bhs.opcode(), IscsiOpcode::LOGOUT_RESPONSE);
    assert!(matches!(client.works().pop_front(), Some(WorkRequest::Disconnect)));
}

#[test]
fn a_stopping_target_asks_its_initiator_to_log_out() {
    let mut client = TestInitiator::log_in("");
    client.server.holds_io = true;
    let command = client.read(0, 8);
    client.send(ControlHeader::new().with_read(ROOM.0, ROOM.1), &command, &[]).unwrap();
    client.server.driven.on_stop(Instant::now());
    client.server.run();
    let (bhs, _) = client.answer();
    let event = AsyncMessage::read_from_bytes(bhs.as_bytes()).unwrap();
    assert_eq!((bhs.opcode(), event.async_event), (IscsiOpcode::ASYNC_MESSAGE, AsyncEvent::LOGOUT_REQUEST.0));
    client.assert_quiet();
    client.server.finish_one();
    client.server.run();
    assert!(matches!(client.works().pop_front(), Some(WorkRequest::Write { .. })));
    client.assert_good(command.cmd_sn.get());
    log_out(&mut client);
}

#[test]
fn every_handled_message_posts_its_receive_buffer_again() {
    let mut client = TestInitiator::log_in("");
    let before = client.server.driven.receives;
    for _ in 0..300 {
        client.blocks(0, 1);
    }
    assert_eq!(client.server.driven.receives - before, 300);
    assert_eq!(before, 3, "the login and two commands");
    let cases = [
        ("FirstBurstLength=8192\0", 0),
        ("FirstBurstLength=2048\0", 0),
        ("", 7),
        ("FirstBurstLength=8192\0TargetRecvDataSegmentLength=512\0", 15),
        ("TargetRecvDataSegmentLength=1000\0", 65),
    ];
    for (keys, more) in cases {
        // Unsolicited data of one message for each command has its receive buffer from the
        // beginning; 64 KiB need eight messages, and more if the segment length was negotiated
        // down.
        let client = TestInitiator::log_in(&format!("InitialR2T=No\0{keys}"));
        assert_eq!(client.server.driven.receives, 3 + more * 256, "{keys}");
    }
}

#[test]
fn data_counts_as_in_flight_until_it_was_sent() {
    let mut client = TestInitiator::log_in("");
    let (room, mut taken, mut works) = (ControlHeader::new().with_read(ROOM.0, ROOM.1), 0, Vec::new());
    // 8 MiB each; an eighth of the pool may be in flight.
    for _ in 0..10 {
        let before = client.server.driven.receives;
        let command = client.read(0, 16_384);
        client.send(room, &command, &[]).unwrap();
        taken += client.server.driven.receives - before;
        works.extend(client.works().drain(..));
    }
    assert_eq!(taken, 8);
    let writes: Vec<_> = works
        .into_iter()
        .filter_map(|work| match work {
            WorkRequest::Write { id, .. } => Some(id),
            _ => None,
        })
        .collect();
    assert_eq!(writes.len(), 8);
    for id in &writes[..2] {
        let before = client.server.driven.receives;
        client.done(*id);
        assert_eq!(client.server.driven.receives - before, 1, "the next is taken");
    }
}

#[test]
fn reservations_and_compare_and_write_are_those_of_iscsi() {
    let served = ServedTarget::new(offer(), None);
    let mut client = TestInitiator::log_in_to(&served, "");
    // COMPARE AND WRITE of one block: the compared and the written data.
    let both = [vec![0; 512], pattern(512)].concat();
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x89, 1);
    for expected in [(0, None), (2, Some((0xe, 0x1d00)))] {
        let command = client.command(0, &cdb, FLAG_WRITE, 1024);
        client.send(with_data(), &command, &[]).unwrap();
        assert_eq!(client.fill(&both), (DATA.1, 1024));
        let answer = client.answer();
        assert_eq!(status(&answer.0), expected.0);
        assert_eq!(expected.1, expected.1.map(|_| sense(&answer)));
    }
    // PERSISTENT RESERVE OUT: registers a key and reserves for writes; then a write of another
    // initiator fails.
    let mut list = [0; 24];
    list[8..16].copy_from_slice(&7_u64.to_be_bytes());
    let command = client.command(0, &[0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0], FLAG_WRITE, 24);
    client.send(with_data(), &command, &[]).unwrap();
    client.fill(&list);
    client.assert_good(command.cmd_sn.get());
    list[..8].copy_from_slice(&7_u64.to_be_bytes());
    list[8..16].fill(0);
    let command = client.command(0, &[0x5f, 1, 1, 0, 0, 0, 0, 0, 24, 0], FLAG_WRITE, 24);
    client.send(with_data(), &command, &list).unwrap();
    client.assert_good(command.cmd_sn.get());
    let mut other = TestInitiator::connect(&served, &[0x80, 0, 0, 0]).0;
    let text = format!("InitiatorName=iqn.2026-11.com.example:other\0TargetName={TARGET}\0");
    other.send(ControlHeader::new(), &login_request(), text.as_bytes()).unwrap();
    other.answer();
    let command = other.command(0, &[0; 6], 0, 0);
    other.send(ControlHeader::new(), &command, &[]).unwrap();
    other.answer();
    let command = other.write(0, 1);
    other.send(ControlHeader::new(), &command, &pattern(512)).unwrap();
    assert_eq!(status(&other.answer().0), 0x18, "RESERVATION CONFLICT");
}

#[test]
fn a_session_has_one_connection() {
    let served = ServedTarget::new(offer(), None);
    let _first = TestInitiator::log_in_to(&served, "MaxConnections=2\0");
    let text = format!("InitiatorName={INITIATOR}\0TargetName={TARGET}\0");
    let mut request = login_request();
    // With the CID of the session's connection, and with another one.
    for cid in [7, 8] {
        let (mut second, _) = TestInitiator::connect(&served, &[0x80, 0, 0, 0]);
        (request.cid, request.tsih) = (cid.into(), 1.into());
        assert!(second.send(ControlHeader::new(), &request, text.as_bytes()).is_err());
        second.server.run();
        let (bhs, _) = second.answer();
        let response = IscsiLoginResponse::read_from_bytes(bhs.as_bytes()).unwrap();
        assert_eq!(response.status.get(), LoginStatus::SESSION_DOES_NOT_EXIST.0);
    }
    // Nor can a TCP connection join it.
    let (node, pool, now) = (served.node.clone(), served.pool.clone(), Instant::now());
    let mut stream = IscsiTargetSession::among(&served.local, node, 1, pool, [4; 32], now);
    request.data_segment_length = U24::new(text.len() as u32);
    let mut bytes = [request.as_bytes(), text.as_bytes()].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    assert!(stream.on_bytes(&Chunk::from_slice(&bytes), now).is_err());
}

#[test]
fn an_initiator_that_requires_hello_messages_is_refused() {
    let (mut client, _) = TestInitiator::connect(&ServedTarget::new(offer(), None), &[0x80, 0, 0, 0]);
    let text = format!(
        "InitiatorName={INITIATOR}\0TargetName={TARGET}\0RDMAExtensions=Yes\0iSERHelloRequired=Yes\0"
    );
    let error = client.send(ControlHeader::new(), &login_request(), text.as_bytes()).unwrap_err();
    assert_eq!(error.what, "declared iSERHelloRequired=Yes; Hello messages are not supported");
}

#[test]
fn unexpected_pdus_are_bounded_by_the_initiators_limit() {
    let mut client = TestInitiator::log_in("MaxOutstandingUnexpectedPDUs=2\0");
    let mut reject = || {
        let nameless = client.read(0, 1);
        client.send(ControlHeader::new(), &nameless, &[]).unwrap();
    };
    (0..4).for_each(|_| reject());
    let rejects: Vec<Bhs> = (0..2).map(|_| client.answer().0).collect();
    assert!(rejects.iter().all(|bhs| bhs.opcode() == IscsiOpcode::REJECT));
    client.assert_quiet();
    // Later responses wait until the first is acknowledged.
    let mut command = client.command(0, &[0; 6], 0, 0);
    client.send(ControlHeader::new(), &command, &[]).unwrap();
    client.assert_quiet();
    let reject = Reject::read_from_bytes(rejects[1].as_bytes()).unwrap();
    let itt = command.initiator_task_tag.get();
    command = client.command(0, &[0; 6], 0, 0);
    command.exp_stat_sn = (reject.stat_sn.get() + 1).into();
    client.send(ControlHeader::new(), &command, &[]).unwrap();
    assert_eq!([client.answer(), client.answer()].map(|(bhs, _)| bhs.opcode()), [IscsiOpcode::REJECT; 2]);
    client.assert_good(itt);
    client.assert_good(command.initiator_task_tag.get());
}

#[test]
fn an_unanswered_rdma_read_ends_the_connection_if_something_waits_for_it() {
    #[derive(PartialEq)]
    enum WaitingFor {
        Nothing,
        Abort,
        Logout,
    }
    for (waits, is_left) in
        [(WaitingFor::Nothing, false), (WaitingFor::Abort, true), (WaitingFor::Logout, true)]
    {
        let mut client = TestInitiator::log_in("");
        let command = client.write(0, 32);
        client.send(with_data(), &command, &[]).unwrap();
        assert!(matches!(client.works().pop_front(), Some(WorkRequest::Read { .. })));
        if waits == WaitingFor::Abort {
            let mut request = TaskManagementFunctionRequest::new_zeroed();
            (request.opcode, request.function) =
                (IscsiOpcode::TASK_MANAGEMENT_REQUEST.0 | FLAG_IMMEDIATE, 0x81);
            request.initiator_task_tag = 0x77.into();
            request.referenced_task_tag = command.initiator_task_tag;
            client.send(ControlHeader::new(), &request, &[]).unwrap();
        }
        if waits == WaitingFor::Logout {
            let mut request = LogoutRequest::new_zeroed();
            (request.opcode, request.reason) = (IscsiOpcode::LOGOUT_REQUEST.0 | FLAG_IMMEDIATE, FLAG_FINAL);
            request.initiator_task_tag = 0x78.into();
            client.send(ControlHeader::new(), &request, &[]).unwrap();
        }
        let (begin, mut error) = (Instant::now(), None);
        for seconds in 0..150 {
            let now = begin + std::time::Duration::from_secs(seconds);
            let session = &mut client.server.driven.session;
            while error.is_none() && session.poll_timeout().is_some_and(|due| due <= now) {
                error = session.on_timeout(now).err().map(|error| (seconds, error.what));
            }
            // The initiator keeps sending.
            let mut nop = NopOut::new_zeroed();
            (nop.opcode, nop.flags) = (IscsiOpcode::NOP_OUT.0 | FLAG_IMMEDIATE, FLAG_FINAL);
            nop.initiator_task_tag = RESERVED_TAG.into();
            nop.target_transfer_tag = RESERVED_TAG.into();
            client.send(ControlHeader::new(), &nop, &[]).unwrap();
        }
        assert_eq!(error.is_some(), is_left, "{error:?}");
        if let Some((seconds, what)) = error {
            assert!((60..=125).contains(&seconds), "{seconds}");
            assert_eq!(what, "did not complete an RDMA Read within a minute while its tasks were ending");
            client.event(Event::Disconnected).unwrap();
            assert!(client.server.driven.session.is_over());
        }
    }
}

/// Connection requests of Linux's NVMe/RDMA host and SRP initiator over siw.
#[test]
fn a_peer_of_another_protocol_is_rejected_in_its_own_format() {
    let nvme: &[u8] = b"\0\0\0\0\x20\0\x1f\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let srp: &[u8] = b"\0\0\0\0\0\0\0\0\0\x06\x80\0\0\0\x20\x44\x52\x54\0\x77\0\x01\0\0\0\0\0\0\0\0\0\0\
        \x50\x54\0\xff\xfe\x77\0\x02\x50\x54\0\xff\xfe\x77\0\x02\0\x44\0\0\0\0\0\0";
    for (private_data, protocol, first) in [(nvme, "NVMe/RDMA", &[0, 0, 6, 0][..]), (srp, "SRP", &[0xc2])] {
        let mut session = ServedTarget::new(offer(), None).session();
        let error = session
            .on_event(Event::Requested { private_data: private_data.to_vec(), reads: 32 }, Instant::now())
            .unwrap_err();
        assert!(error.what.contains(protocol), "{error}");
        let mut asked = Recorder::default();
        let Some(WorkRequest::Reject { private_data }) = asked.next(&mut session, 8) else {
            panic!("not rejected")
        };
        assert!(private_data.starts_with(first));
        assert!(asked.next(&mut session, 8).is_none());
        session.on_event(Event::Disconnected, Instant::now()).unwrap();
        assert!(session.is_over());
    }
}

/// In LIO, such data and a close raced with the end of the login (CVE-2022-50350).
#[test]
fn messages_right_behind_the_login_request_are_handled_once_and_a_disconnect_ends_the_session() {
    for (count, runs_before) in [(0, false), (1, false), (2, false), (2, true)] {
        let served = ServedTarget::new(offer(), None);
        let (mut client, _) = TestInitiator::connect(&served, &[0x80, 0, 0, 0]);
        let keys = format!("InitiatorName={INITIATOR}\0TargetName={TARGET}\0RDMAExtensions=Yes\0");
        let (login, ready, write) = (login_request(), client.command(0, &[0; 6], 0, 0), client.write(0, 1));
        let message = |pdu: &[u8], data: &[u8]| {
            let mut bhs = Bhs::read_from_bytes(pdu).unwrap();
            bhs.data_segment_length = U24::new(data.len() as u32);
            Seg::from_slice(&[ControlHeader::new().as_bytes(), bhs.as_bytes(), data].concat())
        };
        let messages = [
            message(login.as_bytes(), keys.as_bytes()),
            message(ready.as_bytes(), &[]),
            message(write.as_bytes(), &[7; 512]),
        ];
        for message in messages.into_iter().take(1 + count) {
            let received = Event::Received { message, invalidated: None, written: None };
            client.server.driven.session.on_event(received, Instant::now()).unwrap();
        }
        if runs_before {
            client.server.run();
        }
        let _ = client.server.driven.session.on_event(Event::Disconnected, Instant::now());
        client.server.run();
        assert!(runs_before || client.works().is_empty(), "{:?}", client.server.driven.works);
        drop(client);
        let mut next = TestInitiator::log_in_to(&served, "");
        // A write that has not begun when the connection is lost never begins.
        assert_eq!(next.blocks(0, 1)[0], if runs_before { 7 } else { 0 });
    }
}
