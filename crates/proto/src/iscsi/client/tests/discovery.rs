//! Discovery sessions, response by response.

use super::script::{INITIATOR, InitiatorPdu, pdus};
use crate::iscsi::client::IscsiDiscoverySession;
use crate::iscsi::name::Name;
use crate::rdma::testing::Recorder;
use crate::rdma::{Event, RdmaSession, WorkRequest};
use crate::testing::Driver;
use blockmux_volume::Seg;
use blockmux_wire::iscsi::session::{IscsiLoginResponse, LoginStatus, TextResponse};
use blockmux_wire::iscsi::{FLAG_FINAL, IscsiOpcode, RESERVED_TAG, U24, padding};
use blockmux_wire::iser::HEADER_LEN;
use std::time::Instant;
use zerocopy::{FromZeros, IntoBytes};

const ISID: [u8; 6] = [0x80, 0, 0, 0, 0, 3];

/// The answers of SCST 3.11, whatever was proposed: it has no other value of these keys.
const SCST: &[u8] = b"DefaultTime2Wait=0\0DefaultTime2Retain=0\0ErrorRecoveryLevel=0\0";

fn name() -> Name {
    Name::new(INITIATOR).unwrap()
}

/// A login response with its text.
fn login_response(stat_sn: u32, flags: u8, text: &[u8]) -> Vec<u8> {
    let response = IscsiLoginResponse {
        opcode: IscsiOpcode::LOGIN_RESPONSE.0,
        flags,
        data_segment_length: U24::new(text.len() as u32),
        tsih: 7.into(),
        initiator_task_tag: 1.into(),
        stat_sn: stat_sn.into(),
        exp_cmd_sn: 1.into(),
        max_cmd_sn: 1.into(),
        status: LoginStatus::SUCCESS.0.into(),
        ..IscsiLoginResponse::new_zeroed()
    };
    [response.as_bytes(), text, &[0; 3][..padding(text.len())]].concat()
}

/// The last response to a text request, with the list of one target.
fn target_list(request: &InitiatorPdu) -> Vec<u8> {
    let text = b"TargetName=iqn.2026-11.com.example:a\0";
    let response = TextResponse {
        opcode: IscsiOpcode::TEXT_RESPONSE.0,
        flags: FLAG_FINAL,
        data_segment_length: U24::new(text.len() as u32),
        initiator_task_tag: request.tag().into(),
        target_transfer_tag: RESERVED_TAG.into(),
        stat_sn: 3.into(),
        exp_cmd_sn: 2.into(),
        max_cmd_sn: 2.into(),
        ..TextResponse::new_zeroed()
    };
    [response.as_bytes(), text, &[0; 3][..padding(text.len())]].concat()
}

#[test]
fn a_target_that_keeps_no_sessions_is_asked_for_its_targets() {
    let session = IscsiDiscoverySession::new(name(), None, ISID, [5; 32], Instant::now());
    let mut driver = Driver::of(session, usize::MAX);
    driver.sent();
    driver.feed(&login_response(1, 0x81, b"AuthMethod=None\0")).unwrap();
    driver.sent();
    driver.feed(&login_response(2, 0x87, SCST)).unwrap();
    let [request] = pdus(&driver.sent(), false).try_into().unwrap();
    assert_eq!(
        (request.bhs.opcode(), &*request.data),
        (IscsiOpcode::TEXT_REQUEST, &b"SendTargets=All\0"[..])
    );
    driver.feed(&target_list(&request)).unwrap();
    let [logout] = pdus(&driver.sent(), false).try_into().unwrap();
    assert_eq!(logout.bhs.opcode(), IscsiOpcode::LOGOUT_REQUEST);
    assert_eq!(driver.session.targets().len(), 1);
}

/// The next PDU that a session sends as a message; `None` if it disconnects.
fn next_message(queue: &mut Recorder, session: &mut IscsiDiscoverySession) -> Option<InitiatorPdu> {
    loop {
        match queue.next(session, 8) {
            Some(WorkRequest::Send { head, payload, .. }) => {
                assert!(payload.is_empty());
                return pdus(&head[HEADER_LEN..], false).pop();
            }
            Some(WorkRequest::Receive) => {}
            Some(WorkRequest::Disconnect) => return None,
            work => panic!("neither a message nor a disconnect: {work:?}"),
        }
    }
}

#[test]
fn over_rdma_a_disconnect_ends_the_session_instead_of_a_logout() {
    let mut session = IscsiDiscoverySession::over_rdma(name(), None, ISID, [5; 32], Instant::now());
    let mut queue = Recorder::default();
    let answer = |session: &mut IscsiDiscoverySession, pdu: &[u8]| {
        let mut message = vec![0; HEADER_LEN];
        message[0] = 0x10;
        message.extend(pdu);
        let event = Event::Received { message: Seg::from_slice(&message), invalidated: None, written: None };
        session.on_event(event, Instant::now()).unwrap();
    };
    next_message(&mut queue, &mut session).unwrap();
    answer(&mut session, &login_response(1, 0x81, b"AuthMethod=None\0"));
    next_message(&mut queue, &mut session).unwrap();
    answer(&mut session, &login_response(2, 0x87, &[b"RDMAExtensions=Yes\0", SCST].concat()));
    let request = next_message(&mut queue, &mut session).unwrap();
    assert_eq!(request.bhs.opcode(), IscsiOpcode::TEXT_REQUEST);
    answer(&mut session, &target_list(&request));
    assert!(next_message(&mut queue, &mut session).is_none(), "a message after the list of targets");
    assert!(session.is_over() && session.targets().len() == 1);
    session.on_event(Event::Disconnected, Instant::now()).unwrap();
}
