//! Multiple connections per session.

use super::text_and_nop::text_request;
use super::*;
use crate::driver::session::{CoreHandle, Timed};
use crate::testing::Pump;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// The environment of a session: a node, its volumes, and the sessions of a core.
pub(super) struct Scene {
    node: Arc<IscsiNode>,
    exports: Exports,
    local: Rc<LocalSessions>,
    /// CmdSN of the session's next command.
    cmd_sn: Cell<u32>,
}

impl Scene {
    pub(super) fn new() -> Scene {
        Scene::with(node(None))
    }

    fn with((node, exports): (Arc<IscsiNode>, Exports)) -> Scene {
        Scene { node, exports, local: LocalSessions::new(CoreHandle::new(())), cmd_sn: Cell::new(1) }
    }

    /// A new connection that this listener accepts.
    pub(super) fn connect(&self, listener: u16) -> ScriptedInitiator {
        let pool = Pool::new(usize::MAX);
        let now = Instant::now();
        let session = IscsiTargetSession::among(&self.local, self.node.clone(), listener, pool, [3; 32], now);
        let pump = Pump::new(session, &self.exports);
        ScriptedInitiator { pump, header_digest: false, data_digest: false, cmd_sn: 1 }
    }

    /// The leading connection (CID 7) of a session without unit attentions, and the TSIH.
    pub(super) fn lead(&self, keys: &str) -> (ScriptedInitiator, u16) {
        let mut leading = self.connect(1);
        let text = format!("{}MaxConnections=4\0{keys}", names());
        let response = leading.login(0x87, text.as_bytes());
        let tsih = response.as_a::<IscsiLoginResponse>().tsih.get();
        assert!(response.as_a::<IscsiLoginResponse>().status.get() == 0 && tsih != 0);
        leading.digests(&response);
        for lun in [0, 1] {
            let [answer] = self.command(&mut leading, lun, &[0; 6], None, None).try_into().unwrap();
            assert_eq!(sense(&answer), (6, 0x2900));
        }
        (leading, tsih)
    }

    /// Adds a connection to the session.
    pub(super) fn join(&self, tsih: u16, cid: u16, keys: &str) -> ScriptedInitiator {
        let mut joined = self.connect(1);
        let text = format!("{}{keys}", names());
        let [response] = joined.exchange(&join_request(tsih, cid), text.as_bytes()).try_into().unwrap();
        let header: IscsiLoginResponse = response.as_a();
        assert_eq!((header.status.get(), header.tsih.get()), (0, tsih), "{:?}", response.text());
        joined.digests(&response);
        joined
    }

    /// CmdSN of the session's next command, which is also its task tag.
    pub(super) fn cmd_sn(&self) -> u32 {
        self.cmd_sn.get()
    }

    /// The session's next command.
    pub(super) fn request(
        &self,
        on: &mut ScriptedInitiator,
        lun: u8,
        cdb: &[u8],
        reads: Option<u32>,
        writes: Option<u32>,
    ) -> ScsiCommand {
        on.cmd_sn = self.cmd_sn.replace(self.cmd_sn.get() + 1);
        on.request(lun, cdb, reads, writes)
    }

    /// Sends a command on this connection.
    pub(super) fn command(
        &self,
        on: &mut ScriptedInitiator,
        lun: u8,
        cdb: &[u8],
        reads: Option<u32>,
        data: Option<&[u8]>,
    ) -> Vec<TargetPdu> {
        let command = self.request(on, lun, cdb, reads, data.map(|data| data.len() as u32));
        on.exchange(&command, data.unwrap_or_default())
    }
}

impl ScriptedInitiator {
    fn digests(&mut self, response: &TargetPdu) {
        self.header_digest = response.value("HeaderDigest") == "CRC32C";
        self.data_digest = response.value("DataDigest") == "CRC32C";
    }

    /// Runs a driver turn; returns the PDUs that were sent.
    pub(super) fn turn(&mut self) -> Vec<TargetPdu> {
        self.pump.run().unwrap();
        self.receive()
    }
}

pub(super) fn names() -> String {
    format!("InitiatorName={INITIATOR}\0TargetName={TARGET}\0SessionType=Normal\0")
}

pub(super) fn join_request(tsih: u16, cid: u16) -> IscsiLoginRequest {
    let mut request = login_request(0x87);
    (request.tsih, request.cid) = (tsih.into(), cid.into());
    request
}

pub(super) fn manage(function: Function, lun: u8, referenced: u32) -> TaskManagementFunctionRequest {
    let mut request = TaskManagementFunctionRequest::new_zeroed();
    request.opcode = IscsiOpcode::TASK_MANAGEMENT_REQUEST.0 | 0x40;
    request.function = FLAG_FINAL | function.0;
    request.lun[1] = lun;
    request.initiator_task_tag = 9999.into();
    request.referenced_task_tag = referenced.into();
    request
}

pub(super) fn function_response(pdu: &TargetPdu) -> FunctionResponse {
    assert_eq!(pdu.bhs.opcode(), IscsiOpcode::TASK_MANAGEMENT_RESPONSE);
    FunctionResponse(pdu.as_a::<TaskManagementFunctionResponse>().response)
}

pub(super) fn logout(reason: LogoutReasonCode, cid: u16) -> LogoutRequest {
    let mut request = LogoutRequest::new_zeroed();
    request.opcode = IscsiOpcode::LOGOUT_REQUEST.0 | 0x40;
    request.reason = FLAG_FINAL | reason.0;
    request.cid = cid.into();
    request.initiator_task_tag = 8888.into();
    request
}

pub(super) fn logout_result(pdu: &TargetPdu) -> LogoutResult {
    assert_eq!(pdu.bhs.opcode(), IscsiOpcode::LOGOUT_RESPONSE);
    LogoutResult(pdu.as_a::<LogoutResponse>().response)
}

#[test]
fn a_second_connection_shares_nexus_and_command_numbers_and_has_its_own_digests_and_stat_sn() {
    for step in [1, 47, usize::MAX] {
        let scene = Scene::new();
        let (mut first, tsih) = scene.lead("");
        let mut second = scene.join(tsih, 8, "DataDigest=CRC32C\0HeaderDigest=CRC32C\0");
        assert!(second.header_digest && !first.header_digest);
        second.pump = second.pump.split_at(step);
        let data = pattern(4096);
        let [answer] = scene.command(&mut second, 0, &write10(0, 8), None, Some(&data)).try_into().unwrap();
        let response = assert_good(&answer);
        // One login response preceded; the unit attentions went to the first connection.
        assert_eq!((response.stat_sn.get(), response.exp_cmd_sn.get()), (101, 4));
        let [read] = scene.command(&mut first, 0, &read10(0, 8), Some(4096), None).try_into().unwrap();
        assert!(read.data == data);
        assert_eq!(read.as_a::<DataIn>().exp_cmd_sn.get(), 5);
    }
}

#[test]
fn a_login_response_has_the_sessions_numbers() {
    let scene = Scene::new();
    let (_first, tsih) = scene.lead("");
    let mut second = scene.connect(1);
    let [response] = second.exchange(&join_request(tsih, 8), names().as_bytes()).try_into().unwrap();
    let header: IscsiLoginResponse = response.as_a();
    assert_eq!((header.exp_cmd_sn.get(), header.max_cmd_sn.get()), (3, 3 + 255));
}

#[test]
fn commands_execute_in_the_order_of_cmd_sn_on_any_connection() {
    for step in [1, 100, usize::MAX] {
        let scene = Scene::new();
        let (mut first, tsih) = scene.lead("");
        let mut second = scene.join(tsih, 8, "");
        second.pump = second.pump.split_at(step);
        let slow = scene.request(&mut first, 0, &write10(0, 1), None, Some(512));
        assert!(scene.command(&mut second, 0, &read10(0, 1), Some(512), None).is_empty());
        assert!(scene.command(&mut second, 0, &write10(1, 1), None, Some(&[9; 512])).is_empty());
        assert!(scene.command(&mut first, 0, &read10(1, 1), Some(512), None).is_empty());
        let [write] = first.exchange(&slow, &[7; 512]).try_into().unwrap();
        assert_good(&write);
        let [read, write] = second.turn().try_into().unwrap();
        assert_eq!(read.data, [7; 512]);
        assert_good(&write);
        let [read] = first.turn().try_into().unwrap();
        assert_eq!(read.data, [9; 512], "step {step}");
    }
}

#[test]
fn at_level_0_a_damaged_early_command_fails_in_its_turn() {
    let scene = Scene::new();
    let (mut first, tsih) = scene.lead("ErrorRecoveryLevel=0\0DataDigest=CRC32C\0");
    let mut second = scene.join(tsih, 8, "DataDigest=CRC32C\0");
    let slow = scene.request(&mut first, 0, &write10(0, 1), None, Some(512));
    let damaged = scene.request(&mut second, 0, &write10(1, 1), None, Some(512));
    assert!(second.send_with_digest_error(&damaged, &[8; 512]).is_empty(), "an earlier CmdSN is missing");
    let mut ping = NopOut::new_zeroed();
    ping.flags = FLAG_FINAL;
    (ping.initiator_task_tag, ping.target_transfer_tag) = (99.into(), RESERVED_TAG.into());
    ping.cmd_sn = scene.cmd_sn.replace(scene.cmd_sn() + 1).into();
    assert!(second.send_with_digest_error(&ping, b"ping").is_empty());
    assert!(scene.command(&mut first, 0, &read10(0, 1), Some(512), None).is_empty());
    let [write] = first.exchange(&slow, &[7; 512]).try_into().unwrap();
    assert_good(&write);
    let [refusal, failed, no_ping] = second.turn().try_into().unwrap();
    assert_eq!(reject_reason(&refusal), RejectReason::DATA_DIGEST_ERROR);
    assert_eq!(
        (failed.as_a::<ScsiResponse>().initiator_task_tag, sense(&failed)),
        (damaged.initiator_task_tag, (0xb, 0x4705))
    );
    assert_eq!(reject_reason(&no_ping), RejectReason::DATA_DIGEST_ERROR);
    let [read] = first.turn().try_into().unwrap();
    assert_eq!(read.data, [7; 512]);
}

#[test]
fn immediate_requests_execute_at_once() {
    let scene = Scene::new();
    let (_first, tsih) = scene.lead("");
    let mut second = scene.join(tsih, 8, "");
    scene.cmd_sn.set(scene.cmd_sn.get() + 1);
    let mut command = scene.request(&mut second, 0, &[0; 6], None, None);
    command.opcode |= 0x40;
    let [answer] = second.exchange(&command, b"").try_into().unwrap();
    assert_good(&answer);
}

#[test]
fn a_login_with_a_foreign_tsih_is_refused() {
    let scene = Scene::new();
    let (_first, tsih) = scene.lead("");
    let refused = |request: &IscsiLoginRequest, text: &str, listener| {
        let mut other = scene.connect(listener);
        other.login_error(request, text.as_bytes()).0
    };
    let mut other_isid = join_request(tsih, 8);
    other_isid.isid[5] = 99;
    let other_name = names().replace(INITIATOR, "iqn.2026-11.com.example:you");
    let other_target = names().replace(TARGET, HIDDEN).replace(INITIATOR, "iqn.2026-11.com.example:other");
    let discovery = names().replace("Normal", "Discovery");
    let not_there = LoginStatus::SESSION_DOES_NOT_EXIST;
    assert_eq!(refused(&join_request(tsih + 1, 8), &names(), 1), not_there);
    assert_eq!(refused(&other_isid, &names(), 1), not_there);
    assert_eq!(refused(&join_request(tsih, 8), &other_name, 1), not_there);
    assert_eq!(refused(&join_request(tsih, 8), &other_target, 1), not_there);
    assert_eq!(refused(&join_request(tsih, 8), &names(), 2), not_there, "another portal group");
    assert_eq!(refused(&join_request(tsih, 8), &discovery, 1), not_there);
    scene.join(tsih, 8, "");
}

#[test]
fn a_listener_is_in_a_portal_group_of_each_target() {
    let (own, exports) = node(None);
    let portal =
        |(listener, group_tag)| Portal { address: ([192, 0, 2, 1], listener).into(), listener, group_tag };
    let [mut one, mut other] = [0, 1].map(|at| (*own.targets.all()[at]).clone());
    one.portals = [(1, 7), (2, 7), (3, 0)].map(portal).into();
    other.portals = [(1, 65_535)].map(portal).into();
    other.access = one.access.clone();
    let scene = Scene::with((Arc::new(IscsiNode::new(vec![one, other])), exports));
    let tag = |listener, text: &str| {
        let response = scene.connect(listener).login(0x87, text.as_bytes());
        assert_eq!(response.as_a::<IscsiLoginResponse>().status.get(), 0);
        response.value("TargetPortalGroupTag")
    };
    let to_other = names().replace(TARGET, HIDDEN);
    assert_eq!([1, 2, 3].map(|listener| tag(listener, &names())), ["7", "7", "0"]);
    assert_eq!(tag(1, &to_other), "65535");
    let refused = |listener, request: &IscsiLoginRequest, text: &str| {
        scene.connect(listener).login_error(request, text.as_bytes()).0
    };
    let leading = join_request(0, 7);
    assert_eq!(refused(2, &leading, &to_other), LoginStatus::NOT_FOUND, "it has no portal there");
    // The portals of one group share a session, others do not.
    let (mut first, tsih) = scene.lead("");
    assert_eq!(refused(3, &join_request(tsih, 8), &names()), LoginStatus::SESSION_DOES_NOT_EXIST);
    let mut second = scene.connect(2);
    let [joined] = second.exchange(&join_request(tsih, 8), names().as_bytes()).try_into().unwrap();
    assert_eq!(joined.as_a::<IscsiLoginResponse>().status.get(), 0);
    // The port's name ends with the tag of its group.
    let inquiry = [0x12, 1, 0x83, 1, 0, 0];
    let [page] = scene.command(&mut first, 0, &inquiry, Some(256), None).try_into().unwrap();
    let name = format!("{TARGET},t,0x0007\0");
    assert!(page.data.windows(name.len()).any(|part| part == name.as_bytes()), "{:?}", page.data);
    let mut discovery = scene.connect(2);
    discovery.login(0x87, names().replace("Normal", "Discovery").as_bytes());
    let request = text_request(RESERVED_TAG, FLAG_FINAL, 0);
    let [found] = discovery.exchange(&request, b"SendTargets=All\0").try_into().unwrap();
    let addresses: Vec<_> =
        found.text().into_iter().filter(|(key, _)| key == "TargetAddress").map(|(_, value)| value).collect();
    assert_eq!(addresses, ["192.0.2.1:1,7", "192.0.2.1:2,7", "192.0.2.1:3,0", "192.0.2.1:1,65535"]);
}

#[test]
fn a_session_has_at_most_max_connections() {
    let scene = Scene::new();
    let (mut first, tsih) = scene.lead("");
    let _others: Vec<_> = (0..3).map(|cid| scene.join(tsih, cid, "")).collect();
    for cid in 100..1100 {
        let mut one_more = scene.connect(1);
        let status = one_more.login_error(&join_request(tsih, cid), names().as_bytes()).0;
        assert_eq!(status, LoginStatus::TOO_MANY_CONNECTIONS);
    }
    assert_good(&scene.command(&mut first, 0, &[0; 6], None, None)[0]);
}

#[test]
fn every_connection_must_authenticate() {
    let scene = Scene::with(node(Some(mutual_chap())));
    let mut leading = scene.connect(1);
    let text = format!("{}AuthMethod=CHAP\0", names());
    let response = leading.login(0x00, text.as_bytes());
    assert_eq!(response.value("AuthMethod"), "CHAP");
    drop(leading);
    let (scene, mut other) = (Scene::new(), Scene::with(node(Some(mutual_chap()))));
    let (_first, tsih) = scene.lead("");
    // A connection joins after the target began to require CHAP.
    other.local = scene.local.clone();
    let mut second = other.connect(1);
    let status = second.login_error(&join_request(tsih, 8), names().as_bytes()).0;
    assert_ne!(status, LoginStatus::SUCCESS);
}

#[test]
fn a_connection_with_the_same_cid_replaces_the_old_one_after_its_end() {
    let scene = Scene::new();
    let (mut first, tsih) = scene.lead("");
    let mut second = scene.join(tsih, 8, "");
    second.pump.holds_io = true;
    assert!(scene.command(&mut second, 0, &write10(0, 1), None, Some(&[7; 512])).is_empty());
    let mut again = scene.connect(1);
    assert!(again.exchange(&join_request(tsih, 8), names().as_bytes()).is_empty());
    assert!(second.turn().is_empty() && second.is_closed());
    let wait = |again: &mut ScriptedInitiator| {
        let due = again.pump.session.poll_timeout().unwrap();
        again.pump.session.on_timeout(due).unwrap();
        again.receive()
    };
    assert!(wait(&mut again).is_empty(), "the old session's write is in flight");
    second.pump.finish_one();
    assert!(second.receive().is_empty());
    let [response] = wait(&mut again).try_into().unwrap();
    assert_eq!(response.as_a::<IscsiLoginResponse>().status.get(), 0);
    for connection in [&mut again, &mut first] {
        assert_good(&scene.command(connection, 0, &[0; 6], None, None)[0]);
    }
}

#[test]
fn a_task_of_another_connection_can_be_aborted_in_every_state() {
    for is_in_flight in [true, false] {
        let scene = Scene::new();
        let (mut first, tsih) = scene.lead("ImmediateData=No\0");
        let mut second = scene.join(tsih, 8, "");
        second.pump.holds_io = true;
        let (cdb, reads, writes) = match is_in_flight {
            true => (read10(0, 1), Some(512), None),
            false => (write10(0, 1), None, Some(512)),
        };
        let command = scene.request(&mut second, 0, &cdb, reads, writes);
        let itt = command.initiator_task_tag.get();
        let asked = second.exchange(&command, b"");
        assert!(first.exchange(&manage(Function::ABORT_TASK, 0, itt), b"").is_empty());
        assert!(second.turn().is_empty());
        if is_in_flight {
            assert_eq!(second.pump.cancelled.len(), 1);
            assert!(first.turn().is_empty(), "the aborted task has I/O in flight");
            second.pump.finish_one();
            assert!(second.receive().is_empty(), "the aborted command gets no response");
        } else {
            let ttt = asked[0].as_a::<IscsiR2t>().target_transfer_tag.get();
            assert!(second.exchange(&data_out(itt, ttt, 0, 0, true), &pattern(512)).is_empty());
        }
        let [answer] = first.turn().try_into().unwrap();
        assert_eq!(function_response(&answer), FunctionResponse::FUNCTION_COMPLETE);
        second.pump.holds_io = false;
        let [read] = scene.command(&mut second, 0, &read10(0, 1), Some(512), None).try_into().unwrap();
        assert_eq!(read.data, [0; 512]);
    }
}

#[test]
fn an_abort_amid_the_tasks_data_keeps_the_stream_in_sync() {
    for len in [1024, 200_192] {
        let scene = Scene::new();
        let (mut first, tsih) = scene.lead("FirstBurstLength=262144\0MaxBurstLength=262144\0");
        let mut second = scene.join(tsih, 8, "");
        let data = pattern(len);
        let command = scene.request(&mut second, 0, &write10(0, (len / 512) as u16), None, Some(len as u32));
        let bytes = second.frame(command.as_bytes(), &data);
        second.pump.client_sends(&bytes[..600]).unwrap();
        let itt = command.initiator_task_tag.get();
        assert!(first.exchange(&manage(Function::ABORT_TASK, 0, itt), b"").is_empty());
        assert!(second.turn().is_empty());
        assert_eq!(function_response(&first.turn()[0]), FunctionResponse::FUNCTION_COMPLETE);
        // Another task reuses the slot before the rest of the data arrives.
        let other = scene.request(&mut first, 0, &write10(8, 1), None, Some(512));
        let itt = other.initiator_task_tag.get();
        let [r2t] = first.exchange(&other, b"").try_into().unwrap();
        second.pump.client_sends(&bytes[600..]).unwrap();
        assert!(second.receive().is_empty());
        let ttt = r2t.as_a::<IscsiR2t>().target_transfer_tag.get();
        let [answer] = first.exchange(&data_out(itt, ttt, 0, 0, true), &[7; 512]).try_into().unwrap();
        assert_good(&answer);
        let [read] = scene.command(&mut second, 0, &read10(0, 2), Some(1024), None).try_into().unwrap();
        assert_eq!(read.data, [0; 1024], "{len}");
    }
}

#[test]
fn a_reset_reaches_the_tasks_of_every_connection() {
    for (function, left) in [(Function::LOGICAL_UNIT_RESET, 1), (Function::TARGET_WARM_RESET, 0)] {
        let scene = Scene::new();
        let (mut first, tsih) = scene.lead("");
        let mut second = scene.join(tsih, 8, "");
        first.pump.holds_io = true;
        second.pump.holds_io = true;
        for lun in [0, 0, 1] {
            for connection in [&mut first, &mut second] {
                assert!(scene.command(connection, lun, &read10(0, 1), Some(512), None).is_empty());
            }
        }
        assert!(second.exchange(&manage(function, 0, RESERVED_TAG), b"").is_empty());
        for connection in [&mut second, &mut first] {
            connection.pump.run().unwrap();
            (0..3).for_each(|_| connection.pump.finish_one());
        }
        assert_eq!(first.receive().len(), left);
        let responses = second.turn();
        assert_eq!(responses.len(), 1 + left);
        assert_eq!(function_response(responses.last().unwrap()), FunctionResponse::FUNCTION_COMPLETE);
    }
}

#[test]
fn a_cold_reset_and_a_logout_of_the_session_end_every_connection() {
    let scene = Scene::new();
    let cold = manage(Function::TARGET_COLD_RESET, 0, 0);
    let out = logout(LogoutReasonCode::CLOSE_SESSION, 7);
    for request in [cold.as_bytes(), out.as_bytes()] {
        scene.cmd_sn.set(1);
        let (mut first, tsih) = scene.lead("");
        let mut second = scene.join(tsih, 8, "");
        let bytes = second.frame(request, b"");
        second.pump.client_sends(&bytes).unwrap();
        assert_eq!(second.receive().len(), 1);
        assert!(first.turn().is_empty());
        assert!(second.is_closed() && first.is_closed());
        let mut third = scene.connect(1);
        let status = third.login_error(&join_request(tsih, 9), names().as_bytes()).0;
        assert_eq!(status, LoginStatus::SESSION_DOES_NOT_EXIST);
    }
}

#[test]
fn a_connection_is_logged_out_by_itself_or_by_another_and_the_session_continues() {
    let scene = Scene::new();
    let (mut first, tsih) = scene.lead("");
    let mut second = scene.join(tsih, 8, "");
    let [answer] = second.exchange(&logout(LogoutReasonCode::CLOSE_CONNECTION, 8), b"").try_into().unwrap();
    assert_eq!(logout_result(&answer), LogoutResult::CLOSED_SUCCESSFULLY);
    assert!(second.is_closed());
    let mut third = scene.join(tsih, 9, "");
    third.pump.holds_io = true;
    assert!(scene.command(&mut third, 0, &write10(0, 1), None, Some(&[7; 512])).is_empty());
    assert!(first.exchange(&logout(LogoutReasonCode::CLOSE_CONNECTION, 9), b"").is_empty());
    assert!(third.turn().is_empty() && third.is_closed());
    assert!(first.turn().is_empty(), "its write is in flight");
    third.pump.finish_one();
    let [answer] = first.turn().try_into().unwrap();
    assert_eq!(logout_result(&answer), LogoutResult::CLOSED_SUCCESSFULLY);
    let [answer] = first.exchange(&logout(LogoutReasonCode::CLOSE_CONNECTION, 9), b"").try_into().unwrap();
    assert_eq!(logout_result(&answer), LogoutResult::CID_NOT_FOUND);
    assert_good(&scene.command(&mut first, 0, &[0; 6], None, None)[0]);
}

#[test]
fn a_lost_connection_ends_its_session() {
    let scene = Scene::new();
    let (mut first, tsih) = scene.lead("");
    let mut second = scene.join(tsih, 8, "");
    second.pump.session.on_end(Instant::now()).unwrap();
    assert!(first.turn().is_empty() && first.is_closed());
}

#[test]
fn dropping_a_connection_removes_it_from_the_session() {
    let scene = Scene::new();
    let (mut first, tsih) = scene.lead("");
    let mut second = scene.join(tsih, 8, "");
    second.pump.holds_io = true;
    let command = scene.request(&mut second, 0, &read10(0, 1), Some(512), None);
    assert!(second.exchange(&command, b"").is_empty());
    let itt = command.initiator_task_tag.get();
    assert!(first.exchange(&manage(Function::ABORT_TASK, 0, itt), b"").is_empty());
    drop(second);
    let [answer] = first.turn().try_into().unwrap();
    assert_eq!(function_response(&answer), FunctionResponse::FUNCTION_COMPLETE);
    scene.join(tsih, 8, "");
}

#[test]
fn reinstatement_closes_all_connections_of_the_old_session() {
    let scene = Scene::new();
    let cuts = Arc::new(AtomicUsize::new(0));
    let admitted = |mut initiator: ScriptedInitiator| {
        let counted = cuts.clone();
        let hang_up = Arc::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let permit = scene.node.begin_login().unwrap();
        let (pool, now) = (Pool::new(usize::MAX), Instant::now());
        initiator.pump.session =
            IscsiTargetSession::among(&scene.local, scene.node.clone(), 1, pool, [3; 32], now)
                .admitted(permit, None, hang_up);
        initiator
    };
    let mut first = admitted(scene.connect(1));
    let text = format!("{}MaxConnections=4\0", names());
    let tsih = first.login(0x87, text.as_bytes()).as_a::<IscsiLoginResponse>().tsih.get();
    let mut second = admitted(scene.connect(1));
    assert_eq!(second.exchange(&join_request(tsih, 8), names().as_bytes()).len(), 1);
    let mut again = scene.connect(1);
    assert!(again.exchange(&login_request(0x87), names().as_bytes()).is_empty());
    assert_eq!(cuts.load(Ordering::Relaxed), 2);
    let mut late = scene.connect(1);
    let status = late.login_error(&join_request(tsih, 9), names().as_bytes()).0;
    assert_eq!(status, LoginStatus::SESSION_DOES_NOT_EXIST);
    drop((first, second));
    let due = again.pump.session.poll_timeout().unwrap();
    again.pump.session.on_timeout(due).unwrap();
    assert_eq!(again.receive().len(), 1);
}

#[test]
fn a_login_to_a_session_on_another_core_moves_to_that_core() {
    let scene = Scene::new();
    let (_first, tsih) = scene.lead("");
    let mut elsewhere = Scene::with((scene.node.clone(), scene.exports.clone()));
    let mut second = elsewhere.connect(1);
    let bytes = second.frame(join_request(tsih, 8).as_bytes(), names().as_bytes());
    second.pump.client_sends(&bytes[..bytes.len() - 1]).unwrap();
    assert!(second.pump.session.moves_to().is_none(), "the first request is incomplete");
    second.pump.client_sends(&bytes[bytes.len() - 1..]).unwrap();
    let core = second.pump.session.moves_to().unwrap();
    assert!(core.is_same(&scene.local.core));
    assert_eq!((second.pump.untaken(), second.receive().len()), (bytes.len(), 0));
    assert!(matches!(second.pump.session.demand(), Demand::Nothing));
    elsewhere.local = scene.local.clone();
    let mut moved = elsewhere.connect(1);
    moved.pump.client_sends(&bytes).unwrap();
    assert_eq!(moved.receive()[0].as_a::<IscsiLoginResponse>().status.get(), 0);
}

#[test]
fn data_on_another_connection_than_its_command_is_dropped() {
    let scene = Scene::new();
    let (mut first, tsih) = scene.lead("ImmediateData=No\0");
    let mut second = scene.join(tsih, 8, "");
    let command = scene.request(&mut first, 0, &write10(0, 1), None, Some(512));
    let itt = command.initiator_task_tag.get();
    let [r2t] = first.exchange(&command, b"").try_into().unwrap();
    let ttt = r2t.as_a::<IscsiR2t>().target_transfer_tag.get();
    assert!(second.exchange(&data_out(itt, ttt, 0, 0, true), &[9; 512]).is_empty());
    let [answer] = first.exchange(&data_out(itt, ttt, 0, 0, true), &[7; 512]).try_into().unwrap();
    assert_good(&answer);
    let [read] = scene.command(&mut second, 0, &read10(0, 1), Some(512), None).try_into().unwrap();
    assert_eq!(read.data, [7; 512]);
}

#[test]
fn session_wide_keys_are_irrelevant_to_another_connection() {
    let scene = Scene::new();
    let (_first, tsih) = scene.lead("");
    let mut second = scene.connect(1);
    let text = format!("{}MaxBurstLength=512\0ErrorRecoveryLevel=2\0", names());
    let [response] = second.exchange(&join_request(tsih, 8), text.as_bytes()).try_into().unwrap();
    for key in ["MaxBurstLength", "ErrorRecoveryLevel"] {
        assert_eq!(response.value(key), "Irrelevant");
    }
}

/// Logs in with CHAP, to the session with this TSIH as this CID; returns the last response unless
/// the target refuses the secret.
fn authenticate(
    initiator: &mut ScriptedInitiator,
    (tsih, cid): (u16, u16),
    secret: &str,
) -> Option<TargetPdu> {
    let request = |flags| IscsiLoginRequest { flags, ..join_request(tsih, cid) };
    let algorithm = ChapAlgorithm::Sha256;
    let mut say = |flags, text: &[u8]| initiator.exchange(&request(flags), text).pop();
    say(0x00, format!("{}AuthMethod=CHAP\0", names()).as_bytes())?;
    let challenge = say(0x00, format!("CHAP_A={}\0", algorithm.number()).as_bytes())?;
    let bytes = text::parse_binary(&challenge.value("CHAP_C"), 1024).unwrap();
    let identifier = challenge.value("CHAP_I").parse().unwrap();
    let mut out = text::TextBuilder::default();
    out.push("CHAP_N", "user");
    let response = algorithm.response(identifier, credentials("user", secret).secret(), &bytes);
    out.push_binary("CHAP_R", &response);
    say(0x83, out.as_bytes())
}

/// An attacker who knows everything about a session but the secret of its initiator.
#[test]
fn a_login_that_does_not_authenticate_takes_nothing_from_the_session_whose_isid_tsih_and_cid_it_names() {
    let scene = Scene::with(node(Some(mutual_chap())));
    let cuts = Arc::new(AtomicUsize::new(0));
    let counted = cuts.clone();
    let hang_up = Arc::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let mut victim = scene.connect(1);
    let permit = scene.node.begin_login().unwrap();
    let (pool, now) = (Pool::new(usize::MAX), Instant::now());
    victim.pump.session = IscsiTargetSession::among(&scene.local, scene.node.clone(), 1, pool, [3; 32], now)
        .admitted(permit, None, hang_up);
    let response = authenticate(&mut victim, (0, 7), "initiator-secret").expect("it knows the secret");
    let tsih = response.as_a::<IscsiLoginResponse>().tsih.get();
    assert!(tsih != 0);
    assert_eq!(sense(&scene.command(&mut victim, 0, &[0; 6], None, None)[0]), (6, 0x2900));
    let mut attackers = Vec::new();
    for (tsih, cid) in [(0, 7), (tsih, 7), (tsih, 8)] {
        for stage in [0x00, 0x81, 0x83] {
            // It names the session and stays in the security stage, or asks to leave it.
            let mut attacker = scene.connect(1);
            let request = IscsiLoginRequest { flags: stage, ..join_request(tsih, cid) };
            let text = format!("{}AuthMethod=CHAP\0", names());
            let _ = attacker.send(&request, text.as_bytes());
            attackers.push(attacker);
            // It skips the security stage.
            let mut attacker = scene.connect(1);
            let request = IscsiLoginRequest { flags: 0x87, ..join_request(tsih, cid) };
            attacker.send(&request, names().as_bytes()).unwrap_err();
            attackers.push(attacker);
        }
        let mut attacker = scene.connect(1);
        assert!(authenticate(&mut attacker, (tsih, cid), "guess").is_none());
        attackers.push(attacker);
        assert!(victim.turn().is_empty() && !victim.is_closed());
        assert_good(&scene.command(&mut victim, 0, &write10(0, 1), None, Some(&[7; 512]))[0]);
    }
    drop(attackers);
    assert!(victim.turn().is_empty());
    let [read] = scene.command(&mut victim, 0, &read10(0, 1), Some(512), None).try_into().unwrap();
    assert_eq!(read.data, [7; 512]);
    assert_eq!(cuts.load(Ordering::Relaxed), 0, "nothing has closed the victim's connection");
}
