//! Asynchronous messages of the target, and text negotiations that it requests (RFC 7143 §11.9).

use super::script::*;
use crate::driver::session::{Connections, Demand, Initiator, ProtocolError, StreamSession, Timed};
use crate::iscsi::client::immediate::TEXT_TAG;
use crate::scsi::{ScsiStatus, Sense};
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{FLAG_CONTINUE, FLAG_FINAL, IscsiOpcode, RESERVED_TAG};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::time::Duration;
use zerocopy::FromZeros;

const WHOLE: &str = "InitialR2T=No\0MaxRecvDataSegmentLength=262144\0FirstBurstLength=65536\0";

/// Expects a single text request, outside the command window; returns its tags.
fn text_request(client: &mut ScriptedClient) -> (u32, u32) {
    let [request] = client.sent().try_into().unwrap();
    assert_eq!(request.bhs.opcode(), IscsiOpcode::TEXT_REQUEST);
    assert!(request.bhs.is_immediate() && request.data.is_empty());
    let text: TextRequest = request.as_a();
    assert_eq!(text.flags, FLAG_FINAL);
    (text.initiator_task_tag.get(), text.target_transfer_tag.get())
}

/// Answers a text request.
fn answer(
    client: &mut ScriptedClient,
    itt: u32,
    flags: u8,
    target_transfer_tag: u32,
    text: &[u8],
) -> Result<(), ProtocolError> {
    let response = TextResponse {
        opcode: IscsiOpcode::TEXT_RESPONSE.0,
        flags,
        initiator_task_tag: itt.into(),
        target_transfer_tag: target_transfer_tag.into(),
        stat_sn: client.next_stat_sn().into(),
        exp_cmd_sn: client.exp_cmd_sn.into(),
        max_cmd_sn: (client.exp_cmd_sn + 9).into(),
        ..TextResponse::new_zeroed()
    };
    client.send(&response, text)
}

#[test]
fn a_requested_negotiation_may_reduce_the_segment_length() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    client.read(1, 0, 512);
    let under_way = client.command();
    // The target may repeat its request until it has answered.
    client.event(AsyncEvent::NEGOTIATION_REQUEST, 5, &[]).unwrap();
    client.event(AsyncEvent::NEGOTIATION_REQUEST, 5, &[]).unwrap();
    let (itt, ttt) = text_request(&mut client);
    assert_eq!(ttt, RESERVED_TAG);
    // The response arrives in parts, split at any byte.
    answer(&mut client, itt, FLAG_CONTINUE, 77, b"TargetAlias=x\0MaxRecvDataSegmen").unwrap();
    assert_eq!(text_request(&mut client), (itt, 77));
    answer(&mut client, itt, 0, 78, b"tLength=4096\0").unwrap();
    assert_eq!(text_request(&mut client), (itt, 78));
    answer(&mut client, itt, FLAG_FINAL, RESERVED_TAG, b"X-what=ever\0").unwrap();
    client.data(&under_way, &pattern(512));
    assert_eq!(client.done_data(), pattern(512));
    client.write(2, 0, &pattern(10 << 10));
    let sent = client.sent();
    let lens: Vec<_> = sent.iter().map(|pdu| pdu.data.len()).collect();
    assert_eq!(lens, [4096, 4096, 2048]);
    client.status(&sent[0], ScsiStatus::GOOD, None);
    assert!(client.done().1.is_ok());
    // The target may request another negotiation.
    client.event(AsyncEvent::NEGOTIATION_REQUEST, 5, &[]).unwrap();
    let (itt, _) = text_request(&mut client);
    answer(&mut client, itt, FLAG_FINAL, RESERVED_TAG, b"").unwrap();
    assert!(client.session.room() > 0 && client.sent().is_empty());
}

#[test]
fn unrequested_endless_or_malformed_text_ends_the_session() {
    let pending = || {
        let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
        client.event(AsyncEvent::NEGOTIATION_REQUEST, 5, &[]).unwrap();
        let (itt, _) = text_request(&mut client);
        (client, itt)
    };
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    assert!(answer(&mut client, 0xffff_fffc, FLAG_FINAL, RESERVED_TAG, b"").is_err());
    let (mut client, itt) = pending();
    assert!(answer(&mut client, itt ^ 1, FLAG_FINAL, RESERVED_TAG, b"").is_err());
    let (mut client, itt) = pending();
    assert!(answer(&mut client, itt, FLAG_CONTINUE, RESERVED_TAG, b"").is_err());
    for text in [&b"MaxRecvDataSegmentLength=100\0"[..], b"MaxRecvDataSegmentLength=4096", b"What\0"] {
        let (mut client, itt) = pending();
        assert!(answer(&mut client, itt, FLAG_FINAL, RESERVED_TAG, text).is_err(), "{text:?}");
    }
    for part in [&b""[..], &[b'x'; 8000]] {
        let (mut client, itt) = pending();
        let mut rounds = 0;
        while answer(&mut client, itt, FLAG_CONTINUE, 5, part).is_ok() {
            rounds += 1;
            assert!(rounds < 100);
        }
        assert!(rounds == if part.is_empty() { 64 } else { 8 }, "{rounds}");
    }
}

#[test]
fn a_requested_logout_is_sent_at_its_deadline_despite_commands_in_flight() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    client.read(1, 0, 512);
    let command = client.command();
    client.event(AsyncEvent::LOGOUT_REQUEST, 8, &[]).unwrap();
    assert!(client.sent().is_empty());
    let by = client.now + Duration::from_secs(6);
    while client.stream().poll_timeout().unwrap() < by {
        let ping = client.stream().poll_timeout().unwrap();
        client.stream().on_timeout(ping).unwrap();
    }
    assert!(client.sent().is_empty());
    client.stream().on_timeout(by).unwrap();
    let [logout] = client.sent().try_into().unwrap();
    assert_eq!(logout.bhs.opcode(), IscsiOpcode::LOGOUT_REQUEST);
    let next = client.stream().poll_timeout().unwrap();
    assert!(next > by, "the logout is sent once");
    // Incomplete commands are returned for the next session.
    client.data(&command, &pattern(512));
    assert_eq!((client.done_data(), client.session.room()), (pattern(512), 0));
}

#[test]
fn asynchronous_sense_data_counts_like_that_of_a_command() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    assert_eq!(client.session.poll_size(), Some(512 << 20));
    let sense = Sense::new(SenseKey::UNIT_ATTENTION, Asc::CAPACITY_DATA_HAS_CHANGED).to_bytes().to_vec();
    let data = [&(sense.len() as u16).to_be_bytes()[..], &sense].concat();
    client.event(AsyncEvent::SCSI_ASYNC_EVENT, 0, &data).unwrap();
    let question = client.command();
    client.data(&question, &[&99_u64.to_be_bytes()[..], &512_u32.to_be_bytes(), &[0; 20]].concat());
    assert_eq!(client.session.poll_size(), Some(51_200));
    for cut in [&data[..1], &data[..2], &[]] {
        client.event(AsyncEvent::SCSI_ASYNC_EVENT, 0, cut).unwrap();
    }
    assert!(
        client.sent().is_empty()
            && !matches!(client.stream().demand(), crate::driver::session::Demand::Close)
    );
}

#[test]
fn the_next_session_waits_for_the_negotiated_or_announced_time() {
    let seconds = Duration::from_secs;
    let ready = || ScriptedClient::ready(&format!("{WHOLE}DefaultTime2Wait=3\0"), 1 << 20);
    assert_eq!(ready().session.reconnects_after(), seconds(3));
    for kind in [AsyncEvent::SESSION_DROP, AsyncEvent::CONNECTION_DROP] {
        let mut client = ready();
        client.event(kind, 6, &[]).unwrap();
        assert_eq!(client.session.reconnects_after(), seconds(7));
    }
    // After a logout there is no wait, unless the target's cleanup failed (RFC 7143 §11.15.3).
    for (result, wait) in [(LogoutResult::CLOSED_SUCCESSFULLY, 0), (LogoutResult::CLEANUP_FAILED, 5)] {
        let mut client = ready();
        client.session.on_stop();
        let [logout] = client.sent().try_into().unwrap();
        let response = LogoutResponse {
            opcode: IscsiOpcode::LOGOUT_RESPONSE.0,
            response: result.0,
            initiator_task_tag: logout.tag().into(),
            stat_sn: client.next_stat_sn().into(),
            time2wait: 5.into(),
            ..LogoutResponse::new_zeroed()
        };
        client.send(&response, &[]).unwrap();
        assert!(client.session.is_over());
        assert_eq!(client.session.reconnects_after(), seconds(wait));
    }
}

/// A target that reads nothing could make them grow without end.
#[test]
fn receiving_pauses_while_text_requests_are_unsent() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    for _ in 0..1000 {
        client.event(AsyncEvent::NEGOTIATION_REQUEST, 5, &[]).unwrap();
        answer(&mut client, TEXT_TAG, FLAG_FINAL, RESERVED_TAG, b"").unwrap();
    }
    assert!(matches!(client.stream().demand(), Demand::Nothing));
    assert!((1..300).contains(&client.sent().len()));
    client.feed(&[]).unwrap();
    assert!(client.sent().len() < 300);
}
