//! NOP, text, logout and task management requests.

use super::connections::names;
use super::*;
use crate::driver::session::Timed;
use crate::names::networks::AllowedNetworks;
use std::time::Instant;

pub(super) fn text_request(ttt: u32, flags: u8, cmd_sn: u32) -> TextRequest {
    let mut request = TextRequest::new_zeroed();
    request.opcode = IscsiOpcode::TEXT_REQUEST.0 | 0x40;
    request.flags = flags;
    request.initiator_task_tag = 77.into();
    request.target_transfer_tag = ttt.into();
    request.cmd_sn = cmd_sn.into();
    request
}

fn management(function: Function, lun: u8, referenced: u32) -> TaskManagementFunctionRequest {
    let mut request = TaskManagementFunctionRequest::new_zeroed();
    request.opcode = IscsiOpcode::TASK_MANAGEMENT_REQUEST.0 | 0x40;
    request.function = FLAG_FINAL | function.0;
    request.lun[1] = lun;
    request.initiator_task_tag = 99.into();
    request.referenced_task_tag = referenced.into();
    request
}

fn function_response(pdu: &TargetPdu) -> FunctionResponse {
    assert_eq!(pdu.bhs.opcode(), IscsiOpcode::TASK_MANAGEMENT_RESPONSE);
    FunctionResponse(pdu.as_a::<TaskManagementFunctionResponse>().response)
}

fn discover(keys: &str) -> ScriptedInitiator {
    discover_with(ScriptedInitiator::connect(), keys)
}

fn discover_with(mut initiator: ScriptedInitiator, keys: &str) -> ScriptedInitiator {
    let text = format!("InitiatorName={INITIATOR}\0SessionType=Discovery\0{keys}");
    let response = initiator.login(0x87, text.as_bytes());
    assert_eq!(response.as_a::<IscsiLoginResponse>().status.get(), 0);
    initiator
}

const BOTH_PORTALS: &[u8] = b"TargetName=iqn.2026-11.com.example:disk\0\
    TargetAddress=192.0.2.1:3260,1\0TargetAddress=[2001:db8::1]:3260,2\0";

#[test]
fn discovery_lists_only_targets_that_admit_the_initiator() {
    let mut initiator = discover("");
    for (value, expected) in [("All", BOTH_PORTALS), (TARGET, BOTH_PORTALS), (HIDDEN, b""), ("", b"")] {
        let text = format!("SendTargets={value}\0");
        let [answer] = initiator
            .exchange(&text_request(RESERVED_TAG, FLAG_FINAL, 1), text.as_bytes())
            .try_into()
            .unwrap();
        assert_eq!((answer.bhs.flags, &answer.data[..]), (FLAG_FINAL, expected), "{value}");
    }
    let command = initiator.request(0, &[0; 6], None, None);
    let [refusal] = initiator.exchange(&command, b"").try_into().unwrap();
    assert_eq!(reject_reason(&refusal), RejectReason::PROTOCOL_ERROR);
}

#[test]
fn a_target_is_available_only_to_initiators_in_its_networks() {
    let (node, exports) = node(None);
    let mut target = (*node.targets.all()[0]).clone();
    target.networks = AllowedNetworks::only(&["192.0.2.0/24".parse().unwrap()]);
    node.targets.replace(target);
    let connect = |client: [u8; 4]| {
        let mut initiator =
            ScriptedInitiator::connect_to((node.clone(), exports.clone()), Pool::new(usize::MAX));
        initiator.pump.session =
            IscsiTargetSession::new(node.clone(), 1, Pool::new(usize::MAX), [3; 32], Instant::now())
                .with_client(Some(client.into()));
        initiator
    };
    for (client, expected) in [([192, 0, 2, 7], BOTH_PORTALS), ([192, 0, 3, 7], b"")] {
        let mut initiator = discover_with(connect(client), "");
        let request = text_request(RESERVED_TAG, FLAG_FINAL, 1);
        let [answer] = initiator.exchange(&request, b"SendTargets=All\0").try_into().unwrap();
        assert_eq!(answer.data, expected, "{client:?}");
    }
    let text = format!("InitiatorName={INITIATOR}\0TargetName={TARGET}\0");
    let response = connect([192, 0, 2, 7]).login(0x87, text.as_bytes());
    assert_eq!(response.as_a::<IscsiLoginResponse>().status.get(), 0);
    let mut elsewhere = connect([192, 0, 3, 7]);
    let (status, error) = elsewhere.login_error(&login_request(0x87), text.as_bytes());
    assert_eq!(status, LoginStatus::AUTHORIZATION_FAILURE);
    assert_eq!(error.what, "has an address that is not in the target's `allow` list");
}

#[test]
fn a_normal_session_discovers_only_its_own_target() {
    let mut initiator = ScriptedInitiator::log_in("");
    for (value, expected) in [("", BOTH_PORTALS), (TARGET, BOTH_PORTALS), ("All", b"SendTargets=Reject\0")] {
        let text = format!("SendTargets={value}\0");
        let request = text_request(RESERVED_TAG, FLAG_FINAL, 0);
        let [answer] = initiator.exchange(&request, text.as_bytes()).try_into().unwrap();
        assert_eq!(answer.data, expected, "{value}");
    }
}

#[test]
fn long_text_is_sent_in_parts() {
    let text = "Xk=1\0".repeat(200);
    let mut initiator = discover("MaxRecvDataSegmentLength=512\0");
    let (first, second) = text.as_bytes().split_at(500);
    let [more] = initiator.exchange(&text_request(RESERVED_TAG, 0x40, 0), first).try_into().unwrap();
    assert_eq!((more.bhs.flags, more.data.len()), (0, 0));
    let mut ttt = more.as_a::<TextResponse>().target_transfer_tag.get();
    let (mut whole, mut data) = (Vec::<u8>::new(), second);
    while ttt != RESERVED_TAG {
        let [part] = initiator.exchange(&text_request(ttt, FLAG_FINAL, 0), data).try_into().unwrap();
        assert!(part.data.len() <= 512);
        whole.extend(&part.data);
        let pdu: TextResponse = part.as_a();
        ttt = pdu.target_transfer_tag.get();
        assert_eq!(pdu.flags, if ttt == RESERVED_TAG { FLAG_FINAL } else { 0x40 });
        data = b"";
    }
    assert_eq!(whole, b"Xk=NotUnderstood\0".repeat(200));
}

#[test]
fn only_the_segment_length_can_be_negotiated_again() {
    let mut initiator = ScriptedInitiator::log_in("MaxRecvDataSegmentLength=4096\0");
    let mut say = |text: &[u8]| {
        let [answer] =
            initiator.exchange(&text_request(RESERVED_TAG, FLAG_FINAL, 0), text).try_into().unwrap();
        answer
    };
    assert_eq!(reject_reason(&say(b"MaxBurstLength=512\0")), RejectReason::PROTOCOL_ERROR);
    assert_eq!(reject_reason(&say(b"unended")), RejectReason::PROTOCOL_ERROR);
    assert_eq!(say(b"MaxRecvDataSegmentLength=1024\0X-a=b\0").data, b"X-a=NotUnderstood\0");
    assert_eq!(initiator.command(0, &read10(0, 4), Some(2048), None).len(), 2);
    let stale = initiator.exchange(&text_request(5, FLAG_FINAL, 0), b"");
    assert_eq!(reject_reason(&stale[0]), RejectReason::INVALID_PDU_FIELD);
}

fn nop(itt: u32, ttt: u32) -> NopOut {
    let mut nop = NopOut::new_zeroed();
    nop.opcode = IscsiOpcode::NOP_OUT.0 | 0x40;
    nop.flags = FLAG_FINAL;
    nop.initiator_task_tag = itt.into();
    nop.target_transfer_tag = ttt.into();
    nop
}

#[test]
fn a_ping_comes_back_with_its_data() {
    let mut initiator = ScriptedInitiator::log_in("MaxRecvDataSegmentLength=512\0");
    for (sent, returned) in [(&b""[..], 0), (b"nopping\0", 8), (&[7; 600], 512)] {
        let [pong] = initiator.exchange(&nop(5, RESERVED_TAG), sent).try_into().unwrap();
        let pdu: NopIn = pong.as_a();
        assert_eq!((pdu.initiator_task_tag.get(), pdu.target_transfer_tag.get()), (5, RESERVED_TAG));
        assert_eq!(pong.data, sent[..returned]);
    }
    assert!(initiator.exchange(&nop(RESERVED_TAG, RESERVED_TAG), b"").is_empty());
    // Not immediate, so it consumes a CmdSN.
    let mut counted = nop(6, RESERVED_TAG);
    (counted.opcode, counted.cmd_sn) = (0, initiator.cmd_sn.into());
    let [pong] = initiator.exchange(&counted, b"").try_into().unwrap();
    assert_eq!(pong.as_a::<NopIn>().exp_cmd_sn.get(), initiator.cmd_sn + 1);
}

#[test]
fn a_silent_initiator_is_pinged_and_then_disconnected() {
    let mut initiator = ScriptedInitiator::log_in("");
    let tick = |initiator: &mut ScriptedInitiator| {
        let due = initiator.pump.session.poll_timeout().unwrap();
        initiator.pump.session.on_timeout(due)
    };
    tick(&mut initiator).unwrap();
    assert!(initiator.receive().is_empty(), "a PDU was received since the last tick");
    tick(&mut initiator).unwrap();
    let [ping] = initiator.receive().try_into().unwrap();
    let ttt = ping.as_a::<NopIn>().target_transfer_tag.get();
    assert!(ttt != RESERVED_TAG);
    assert!(initiator.exchange(&nop(RESERVED_TAG, ttt), b"").is_empty());
    tick(&mut initiator).unwrap();
    tick(&mut initiator).unwrap();
    assert_eq!(initiator.receive().len(), 1);
    assert!(tick(&mut initiator).is_err());
}

#[test]
fn a_logout_ends_the_session_or_reports_why_not() {
    let mut initiator = ScriptedInitiator::log_in("");
    initiator.pump.holds_io = true;
    assert!(initiator.command(0, &read10(0, 1), Some(512), None).is_empty());
    let mut log_out = |reason: LogoutReasonCode, cid: u16| {
        let mut request = LogoutRequest::new_zeroed();
        request.opcode = IscsiOpcode::LOGOUT_REQUEST.0 | 0x40;
        request.reason = FLAG_FINAL | reason.0;
        request.cid = cid.into();
        let [answer] = initiator.exchange(&request, b"").try_into().unwrap();
        LogoutResult(answer.as_a::<LogoutResponse>().response)
    };
    assert_eq!(log_out(LogoutReasonCode::CLOSE_CONNECTION, 8), LogoutResult::CID_NOT_FOUND);
    let recovery = log_out(LogoutReasonCode::REMOVE_CONNECTION_FOR_RECOVERY, 7);
    assert_eq!(recovery, LogoutResult::CONNECTION_RECOVERY_NOT_SUPPORTED);
    assert_eq!(log_out(LogoutReasonCode::CLOSE_CONNECTION, 7), LogoutResult::CLOSED_SUCCESSFULLY);
    assert!(initiator.is_closed());
    initiator.pump.finish_one();
    assert!(initiator.receive().is_empty(), "nothing follows a logout's response");
}

#[test]
fn an_aborted_task_is_never_answered_and_the_abort_waits_for_its_io() {
    let mut initiator = ScriptedInitiator::log_in("");
    initiator.pump.holds_io = true;
    let itt = initiator.cmd_sn;
    assert!(initiator.command(0, &read10(0, 1), Some(512), None).is_empty());
    assert!(initiator.exchange(&management(Function::ABORT_TASK, 0, itt), b"").is_empty());
    initiator.pump.finish_one();
    let [answer] = initiator.receive().try_into().unwrap();
    assert_eq!(function_response(&answer), FunctionResponse::FUNCTION_COMPLETE);
    let [gone] = initiator.exchange(&management(Function::ABORT_TASK, 0, itt), b"").try_into().unwrap();
    assert_eq!(function_response(&gone), FunctionResponse::TASK_DOES_NOT_EXIST);
    assert_eq!(gone.as_a::<TaskManagementFunctionResponse>().max_cmd_sn.get(), initiator.cmd_sn + 255);
}

#[test]
fn io_of_aborted_tasks_is_cancelled() {
    let mut initiator = ScriptedInitiator::log_in("");
    initiator.pump.holds_io = true;
    for lun in [0, 1, 0] {
        initiator.command(lun, &read10(0, 1), Some(512), None);
    }
    let first = initiator.pump.submitted[0].1.tag;
    initiator.exchange(&management(Function::ABORT_TASK, 0, 3), b"");
    assert_eq!(initiator.pump.cancelled, [(VolumeId(0), first)]);
    initiator.pump.session.on_end(Instant::now()).unwrap();
    initiator.pump.run().unwrap();
    let rest: Vec<_> =
        initiator.pump.submitted.iter().skip(1).map(|(volume, io)| (*volume, io.tag)).collect();
    assert_eq!(initiator.pump.cancelled[1..], rest);
}

#[test]
fn a_wildcard_portal_is_reported_with_the_address_that_was_used() {
    let (node, exports) = node(None);
    let mut target = (*node.targets.all()[0]).clone();
    target.portals = vec![Portal { address: "[::]:3260".parse().unwrap(), listener: 1, group_tag: 1 }];
    let node = Arc::new(IscsiNode::new(vec![target]));
    let mut initiator = ScriptedInitiator::connect_to((node.clone(), exports), Pool::new(usize::MAX));
    initiator.pump.session =
        IscsiTargetSession::new(node.clone(), 1, Pool::new(usize::MAX), [3; 32], Instant::now()).admitted(
            node.begin_login().unwrap(),
            Some("[::1]:3260".parse().unwrap()),
            Arc::new(|| ()),
        );
    initiator.enter("");
    let request = text_request(RESERVED_TAG, FLAG_FINAL, 0);
    let [answer] = initiator.exchange(&request, b"SendTargets=\0").try_into().unwrap();
    assert_eq!(answer.value("TargetAddress"), "[::1]:3260,1");
}

#[test]
fn a_portal_on_another_link_and_a_target_without_others_are_not_reported() {
    let (own, exports) = node(None);
    let portal = |(listener, address): (u16, &str)| Portal {
        address: address.parse().unwrap(),
        listener,
        group_tag: listener,
    };
    let [mut one, mut other] = [0, 1].map(|at| (*own.targets.all()[at]).clone());
    one.portals = [(1, "[fe80::1%7]:3260"), (2, "[fe80::1%8]:3260")].map(portal).into();
    other.portals = [(2, "[fe80::1%8]:3260")].map(portal).into();
    other.access = one.access.clone();
    let node = Arc::new(IscsiNode::new(vec![one, other]));
    for (local, expected) in [
        ("[fe80::1%7]:3260", vec![("TargetName", TARGET), ("TargetAddress", "[fe80::1]:3260,1")]),
        ("192.0.2.1:3260", Vec::new()),
    ] {
        let mut initiator =
            ScriptedInitiator::connect_to((node.clone(), exports.clone()), Pool::new(usize::MAX));
        let permit = node.begin_login().unwrap();
        initiator.pump.session =
            IscsiTargetSession::new(node.clone(), 1, Pool::new(usize::MAX), [3; 32], Instant::now())
                .admitted(permit, local.parse().ok(), Arc::new(|| ()));
        initiator.login(0x87, names().replace("Normal", "Discovery").as_bytes());
        let request = text_request(RESERVED_TAG, FLAG_FINAL, 0);
        let [answer] = initiator.exchange(&request, b"SendTargets=All\0").try_into().unwrap();
        let found = answer.text();
        let found: Vec<_> = found.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(found, expected, "{local}");
    }
}

#[test]
fn a_write_that_waits_for_data_is_aborted_at_once_and_its_late_data_dropped() {
    let mut initiator = ScriptedInitiator::log_in("ImmediateData=No\0");
    let command = initiator.request(0, &write10(0, 1), None, Some(512));
    let itt = command.initiator_task_tag.get();
    let [r2t] = initiator.exchange(&command, b"").try_into().unwrap();
    let [answer] = initiator.exchange(&management(Function::ABORT_TASK, 0, itt), b"").try_into().unwrap();
    assert_eq!(function_response(&answer), FunctionResponse::FUNCTION_COMPLETE);
    let ttt = r2t.as_a::<IscsiR2t>().target_transfer_tag.get();
    assert!(initiator.exchange(&data_out(itt, ttt, 0, 0, true), &pattern(512)).is_empty());
    let [read] = initiator.command(0, &read10(0, 1), Some(512), None).try_into().unwrap();
    assert_eq!(read.data, [0; 512]);
}

#[test]
fn a_reset_aborts_the_tasks_of_its_unit() {
    for (function, expected_left) in [
        (Function::ABORT_TASK_SET, 1),
        (Function::CLEAR_TASK_SET, 1),
        (Function::LOGICAL_UNIT_RESET, 1),
        (Function::TARGET_WARM_RESET, 0),
        (Function::I_T_NEXUS_RESET, 0),
    ] {
        let mut initiator = ScriptedInitiator::log_in("iSCSIProtocolLevel=2\0");
        initiator.pump.holds_io = true;
        for lun in [0, 0, 1] {
            assert!(initiator.command(lun, &read10(0, 1), Some(512), None).is_empty());
        }
        assert!(initiator.exchange(&management(function, 0, RESERVED_TAG), b"").is_empty());
        for _ in 0..3 {
            initiator.pump.finish_one();
        }
        let responses = initiator.receive();
        assert_eq!(function_response(&responses[0]), FunctionResponse::FUNCTION_COMPLETE, "{function}");
        assert_eq!(responses.len(), 1 + expected_left, "{function}");
        assert!(!initiator.is_closed());
    }
}

#[test]
fn an_abort_of_another_sessions_write_waits_for_its_io() {
    for function in [Function::CLEAR_TASK_SET, Function::LOGICAL_UNIT_RESET, Function::TARGET_WARM_RESET] {
        let node = node(None);
        let sessions = [INITIATOR, "iqn.2026-11.com.example:other"].map(|name| {
            let mut initiator = ScriptedInitiator::connect_to(node.clone(), Pool::new(usize::MAX));
            initiator.enter_as(name, "");
            assert_eq!(sense(&initiator.command(0, &[0; 6], None, None)[0]), (6, 0x2900));
            initiator
        });
        let [mut victim, mut other] = sessions;
        victim.pump.holds_io = true;
        let command = victim.request(0, &write10(0, 1), None, Some(512));
        assert!(victim.exchange(&command, &[7; 512]).is_empty());
        assert!(other.exchange(&management(function, 0, RESERVED_TAG), b"").is_empty(), "{function}");
        let mut wait = || {
            let due = other.pump.session.poll_timeout().unwrap();
            other.pump.session.on_timeout(due).unwrap();
            other.receive()
        };
        assert!(wait().is_empty(), "{function}");
        victim.pump.finish_one();
        let [answer] = wait().try_into().unwrap();
        assert_eq!(function_response(&answer), FunctionResponse::FUNCTION_COMPLETE, "{function}");
    }
}

#[test]
fn a_reset_nexus_loses_its_state_and_gets_a_unit_attention() {
    let node = node(None);
    let [mut first, mut other] = [INITIATOR, "iqn.2026-11.com.example:other"].map(|name| {
        let mut initiator = ScriptedInitiator::connect_to(node.clone(), Pool::new(usize::MAX));
        initiator.enter_as(name, "iSCSIProtocolLevel=2\0");
        assert_eq!(sense(&initiator.command(0, &[0; 6], None, None)[0]), (6, 0x2900));
        initiator
    });
    assert_good(&first.command(0, &[0x16, 0, 0, 0, 0, 0], None, None)[0]);
    let status = |answer: &TargetPdu| answer.as_a::<ScsiResponse>().status;
    assert_eq!(status(&other.command(0, &[0; 6], None, None)[0]), scsi::ScsiStatus::RESERVATION_CONFLICT.0);
    let reset = management(Function::I_T_NEXUS_RESET, 0, RESERVED_TAG);
    assert_eq!(function_response(&first.exchange(&reset, b"")[0]), FunctionResponse::FUNCTION_COMPLETE);
    assert_good(&other.command(0, &[0; 6], None, None)[0]);
    assert_eq!(sense(&first.command(0, &[0; 6], None, None)[0]), (6, 0x2907));
}

#[test]
fn a_cold_reset_ends_the_session() {
    let mut initiator = ScriptedInitiator::log_in("");
    let [answer] =
        initiator.exchange(&management(Function::TARGET_COLD_RESET, 0, 0), b"").try_into().unwrap();
    assert_eq!(function_response(&answer), FunctionResponse::FUNCTION_COMPLETE);
    assert!(initiator.is_closed());
}

#[test]
fn a_cold_reset_is_refused_to_an_initiator_that_does_not_see_every_unit_of_the_target() {
    let (open, exports) = node(None);
    let mut target = (*open.targets.all()[0]).clone();
    let whole = target.access[0].target.clone();
    let few = scsi::ScsiTarget::new(TARGET, Vec::new());
    let (_, volume, unit) = whole.units().next().unwrap();
    let few = Arc::new(few.with_unit(0, volume, unit));
    let name = Some(Name::new(INITIATOR).unwrap());
    target.access.insert(0, IscsiAccess { initiator: name, chap: None, target: few });
    let node = (Arc::new(IscsiNode::new(vec![target])), exports);
    let [mut confined, mut other] = [INITIATOR, "iqn.2026-11.com.example:other"].map(|name| {
        let mut initiator = ScriptedInitiator::connect_to(node.clone(), Pool::new(usize::MAX));
        initiator.enter_as(name, "");
        assert_eq!(sense(&initiator.command(0, &[0; 6], None, None)[0]), (6, 0x2900));
        initiator
    });
    let ask = |initiator: &mut ScriptedInitiator, function| {
        let [answer] = initiator.exchange(&management(function, 0, 0), b"").try_into().unwrap();
        function_response(&answer)
    };
    let refused = FunctionResponse::FUNCTION_AUTHORIZATION_FAILED;
    assert_eq!(ask(&mut confined, Function::TARGET_COLD_RESET), refused);
    assert!(!confined.is_closed());
    assert_good(&other.command(0, &[0; 6], None, None)[0]);
    // A warm reset concerns the units that the initiator sees, as LOGICAL UNIT RESET does.
    assert_eq!(ask(&mut confined, Function::TARGET_WARM_RESET), FunctionResponse::FUNCTION_COMPLETE);
    assert_eq!(sense(&other.command(0, &[0; 6], None, None)[0]), (6, 0x2903));
    assert_eq!(sense(&other.command(1, &[0; 6], None, None)[0]), (6, 0x2900), "of its login");
    assert_good(&other.command(1, &[0; 6], None, None)[0]);
    assert_eq!(ask(&mut other, Function::TARGET_COLD_RESET), FunctionResponse::FUNCTION_COMPLETE);
    assert!(other.is_closed());
}

#[test]
fn unsupported_functions_are_answered_as_such() {
    let mut initiator = ScriptedInitiator::log_in("");
    let mut ask = |function, lun| {
        let [answer] = initiator.exchange(&management(function, lun, 1), b"").try_into().unwrap();
        function_response(&answer)
    };
    let unsupported = FunctionResponse::TASK_MANAGEMENT_FUNCTION_NOT_SUPPORTED;
    assert_eq!(ask(Function(60), 0), unsupported);
    assert_eq!(ask(Function::QUERY_TASK, 0), unsupported, "requires iSCSIProtocolLevel 2");
    assert_eq!(ask(Function::LOGICAL_UNIT_RESET, 9), FunctionResponse::LUN_DOES_NOT_EXIST);
    let reassign = FunctionResponse::TASK_ALLEGIANCE_REASSIGNMENT_NOT_SUPPORTED;
    assert_eq!(ask(Function::TASK_REASSIGN, 0), reassign);
    assert_eq!(ask(Function::CLEAR_ACA, 0), unsupported, "no auto contingent allegiance exists");
}

#[test]
fn query_functions_report_whether_tasks_exist() {
    let mut initiator = ScriptedInitiator::log_in("iSCSIProtocolLevel=2\0");
    initiator.pump.holds_io = true;
    let itt = initiator.cmd_sn;
    assert!(initiator.command(0, &read10(0, 1), Some(512), None).is_empty());
    let mut ask = |function, lun, referenced| {
        let [answer] = initiator.exchange(&management(function, lun, referenced), b"").try_into().unwrap();
        function_response(&answer)
    };
    assert_eq!(ask(Function::QUERY_TASK, 0, itt), FunctionResponse::FUNCTION_SUCCEEDED);
    assert_eq!(ask(Function::QUERY_TASK, 0, itt + 1), FunctionResponse::FUNCTION_COMPLETE);
    assert_eq!(ask(Function::QUERY_TASK_SET, 0, 0), FunctionResponse::FUNCTION_SUCCEEDED);
    assert_eq!(
        ask(Function::QUERY_TASK, 1, itt),
        FunctionResponse::FUNCTION_COMPLETE,
        "a task of another unit"
    );
    assert_eq!(ask(Function::QUERY_TASK_SET, 1, 0), FunctionResponse::FUNCTION_COMPLETE);
    assert_eq!(ask(Function::QUERY_TASK_SET, 9, 0), FunctionResponse::LUN_DOES_NOT_EXIST);
    assert_eq!(
        ask(Function::ABORT_TASK, 1, itt),
        FunctionResponse::TASK_DOES_NOT_EXIST,
        "a task of another unit"
    );
}

/// LIO answered an abort early and then waited for ever in LUN RESET (CVE-2024-26845).
#[test]
fn a_reset_completes_whatever_aborts_came_before_it() {
    for is_complete in [false, true] {
        let mut initiator = ScriptedInitiator::log_in("");
        initiator.pump.holds_io = true;
        let first = initiator.cmd_sn;
        for _ in 0..2 {
            assert!(initiator.command(0, &read10(0, 1), Some(512), None).is_empty());
        }
        if is_complete {
            // Its response was sent when the abort arrives.
            initiator.pump.finish_one();
            assert_eq!(initiator.receive().len(), 1);
        }
        let aborted = initiator.exchange(&management(Function::ABORT_TASK, 0, first), b"");
        let answers: Vec<_> = aborted.iter().map(function_response).collect();
        let expected = is_complete.then_some(FunctionResponse::TASK_DOES_NOT_EXIST);
        assert_eq!(answers, Vec::from_iter(expected));
        let mut reset = management(Function::LOGICAL_UNIT_RESET, 0, RESERVED_TAG);
        reset.initiator_task_tag = 98.into();
        assert!(initiator.exchange(&reset, b"").is_empty(), "I/O of the unit is in flight");
        while !initiator.pump.submitted.is_empty() {
            initiator.pump.finish_one();
        }
        let mut answers: Vec<_> = initiator
            .receive()
            .iter()
            .map(|pdu| (pdu.bhs.initiator_task_tag.get(), function_response(pdu)))
            .collect();
        answers.sort_unstable_by_key(|(tag, _)| *tag);
        let abort = (!is_complete).then_some((99, FunctionResponse::FUNCTION_COMPLETE));
        let expected: Vec<_> = [(98, FunctionResponse::FUNCTION_COMPLETE)].into_iter().chain(abort).collect();
        assert_eq!(answers, expected);
        // So does one more, with nothing to wait for.
        let [again] = initiator.exchange(&reset, b"").try_into().unwrap();
        assert_eq!(function_response(&again), FunctionResponse::FUNCTION_COMPLETE);
    }
}
