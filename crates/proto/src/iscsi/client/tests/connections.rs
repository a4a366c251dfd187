//! Multiple connections per session, and the commands of lost connections.

use super::script::*;
use crate::driver::session::{Connections, Demand, Initiator, StreamSession, Timed};
use crate::driver::transport::TransportInfo;
use crate::iscsi::client::default_proposal;
use crate::iscsi::login::operational::OperationalKey;
use crate::iscsi::text;
use crate::scsi::ScsiStatus;
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{FLAG_FINAL, IscsiOpcode, RESERVED_TAG};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use zerocopy::FromZeros;

const ANSWERS: &str = "InitialR2T=No\0MaxRecvDataSegmentLength=262144\0FirstBurstLength=65536\0\
                       DefaultTime2Wait=1\0DefaultTime2Retain=20\0";

pub(super) fn now() -> Instant {
    // All later times exceed the session's start time.
    Instant::now() + Duration::from_secs(1)
}

/// A ready session with `count` connections.
pub(super) fn ready(count: u32, level: u32) -> ScriptedClient {
    let proposal = default_proposal()
        .with(OperationalKey::MaxConnections, count)
        .with(OperationalKey::ErrorRecoveryLevel, level)
        .with(OperationalKey::DefaultTime2Retain, 20);
    let answers = format!("{ANSWERS}MaxConnections={count}\0ErrorRecoveryLevel={level}\0");
    let mut client = ScriptedClient::logged_in_with(proposal, &answers);
    assert!(client.session.poll_connect().is_none(), "the unit is not identified yet");
    client.bring_up(&Unit::default());
    for connection in 1..count as usize {
        assert_eq!(client.session.poll_connect().unwrap().0, connection);
        log_in(&mut client, connection);
    }
    assert!(client.session.poll_connect().is_none());
    client.select(0);
    client
}

/// Connects a connection and logs it in; returns its first request.
pub(super) fn log_in(client: &mut ScriptedClient, connection: usize) -> IscsiLoginRequest {
    client.select(connection);
    client.session.on_connected(connection, &TransportInfo::default(), now());
    let [first] = client.sent().try_into().unwrap();
    client.login_response(0x81, LoginStatus::SUCCESS, b"AuthMethod=None\0").unwrap();
    let [second] = client.sent().try_into().unwrap();
    let keys: Vec<_> = text::pairs(&second.data).map(|pair| pair.unwrap().key.to_owned()).collect();
    assert_eq!(keys, ["MaxRecvDataSegmentLength", "HeaderDigest", "DataDigest"]);
    client.login_response(0x87, LoginStatus::SUCCESS, b"MaxRecvDataSegmentLength=262144\0").unwrap();
    first.as_a()
}

fn number(pdu: &InitiatorPdu) -> u32 {
    pdu.as_a::<ScsiCommand>().cmd_sn.get()
}

#[test]
fn connections_join_with_the_sessions_number_and_one_of_their_own() {
    let mut client = ready(1, 0);
    assert!(client.session.poll_connect().is_none());
    let proposal = default_proposal().with(OperationalKey::MaxConnections, 2);
    client = ScriptedClient::logged_in_with(proposal, "MaxConnections=2\0");
    client.bring_up(&Unit::default());
    assert_eq!(client.session.poll_connect().unwrap().0, 1);
    let next = client.exp_cmd_sn;
    let login = log_in(&mut client, 1);
    assert_eq!((login.tsih.get(), login.cid.get(), login.isid), (7, 1, [0x80, 1, 2, 3, 0, 0]));
    assert_eq!((login.cmd_sn.get(), login.exp_stat_sn.get()), (next, 0));
}

#[test]
fn bursts_of_commands_use_the_least_loaded_connection() {
    let mut client = ready(3, 0);
    for tag in 0..7 {
        client.read(tag, 0, if tag % 2 == 0 { 512 } else { BURST });
    }
    let mut sent = Vec::new();
    for connection in 0..3 {
        client.select(connection);
        sent.push(client.sent());
    }
    assert_eq!(sent.iter().map(Vec::len).collect::<Vec<_>>(), [3, 2, 2]);
    let mut numbers: Vec<_> = sent.iter().flatten().map(number).collect();
    numbers.sort_unstable();
    assert!(numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]));
    for (connection, commands) in sent.iter().enumerate().rev() {
        client.select(connection);
        client.data(&commands[0], &pattern(512));
        assert_eq!(client.done_data(), pattern(512));
    }
    // A response on another connection than the command's is a violation (RFC 7143 §4.2.5.1).
    client.select(2);
    let stray = client.response(&sent[0][1], ScsiStatus::GOOD);
    assert!(client.send(&stray, &[]).is_err());
}

#[test]
fn a_shallow_queue_uses_one_connection_and_a_deep_one_several() {
    let mut client = ready(2, 0);
    client.window = 400;
    // The response to one command opens the command window.
    client.read(1, 0, 512);
    let first = client.command();
    client.data(&first, &pattern(512));
    assert!(client.done().1.is_ok());
    for tag in 0..128 {
        client.read(tag, 0, 512);
    }
    let mut sent: VecDeque<_> = client.sent().into();
    assert_eq!(sent.len(), 128);
    // Queue depth 128, refilled repeatedly.
    for tag in 0..300 {
        client.data(&sent.pop_front().unwrap(), &pattern(512));
        assert!(client.done().1.is_ok());
        client.read(tag, 0, 512);
        sent.extend(client.sent());
        assert_eq!((sent.len(), client.session.latest()), (128, 0));
        assert!(client.session.is_awaited(0) && !client.session.is_awaited(1));
    }
    for tag in 0..256 {
        client.read(tag, 0, 512);
    }
    assert!(client.session.is_awaited(1));
    sent.extend(client.sent());
    client.select(1);
    let others = client.sent();
    assert_eq!((sent.len() + others.len(), client.session.latest()), (384, 1));
    assert!(others.len() >= 128, "{}", others.len());
}

#[test]
fn statuses_are_numbered_for_each_connection() {
    let mut client = ready(2, 0);
    for round in 0..3 {
        for _ in 0..2 {
            client.read(1, 0, 512);
            client.read(2, 0, BURST);
        }
        for connection in [1, 0] {
            client.select(connection);
            let [short, long] = client.sent().try_into().unwrap();
            // Two of the login, the bring-up on the first connection, and two in each round.
            assert_eq!(
                short.as_a::<ScsiCommand>().exp_stat_sn.get(),
                client.stat_sn,
                "{connection}, {round}"
            );
            client.data(&short, &pattern(512));
            assert!(client.done().1.is_ok());
            client.status(&long, ScsiStatus::RESERVATION_CONFLICT, None);
            assert!(client.done().1.is_err());
        }
    }
}

#[test]
fn the_session_continues_without_a_connection_that_cannot_be_established() {
    for is_refused in [true, false] {
        let mut client = ScriptedClient::logged_in_with(
            default_proposal().with(OperationalKey::MaxConnections, 2),
            "MaxConnections=2\0",
        );
        client.bring_up(&Unit::default());
        assert_eq!(client.session.poll_connect().unwrap().0, 1);
        if is_refused {
            client.select(1);
            client.session.on_connected(1, &TransportInfo::default(), now());
            client.sent();
            client.login_response(0, LoginStatus::TOO_MANY_CONNECTIONS, b"").unwrap();
            assert!(matches!(client.stream().demand(), Demand::Close));
        }
        assert!(client.session.on_lost(1, now()) && client.session.poll_connect().is_none());
        client.select(0);
        client.read(1, 0, 512);
        let command = client.command();
        client.data(&command, &pattern(512));
        assert!(client.done().1.is_ok() && client.session.refused().is_none());
    }
}

#[test]
fn below_level_2_a_connection_that_is_lost_ends_the_session() {
    for level in [0, 1] {
        let mut client = ready(2, level);
        client.read(1, 0, 512);
        client.read(2, 0, 512);
        assert!(!client.session.on_lost(1, now()));
        assert_eq!(client.session.take_unfinished().len(), 2);
    }
}

/// Answers the TASK REASSIGN request of a command.
pub(super) fn answer_move(
    client: &mut ScriptedClient,
    request: &InitiatorPdu,
    command: &InitiatorPdu,
    response: FunctionResponse,
) -> bool {
    let request: TaskManagementFunctionRequest = request.as_a();
    assert_eq!((request.opcode, request.function), (0x42, 0x88));
    assert_eq!(request.referenced_task_tag.get(), command.tag());
    assert_eq!(request.ref_cmd_sn.get(), number(command));
    client.answer_task(&request, response).is_ok()
}

/// This much data ends a burst; the next command uses another connection.
pub(super) const BURST: u64 = 512 << 10;

const DONE: FunctionResponse = FunctionResponse::FUNCTION_COMPLETE;

#[test]
fn at_level_2_tasks_of_a_lost_connection_continue_on_its_replacement() {
    for count in [1, 2] {
        let mut client = ready(count, 2);
        let lost = count as usize - 1;
        for _ in 0..3 * lost {
            client.write(0, 0, &pattern(180 << 10));
        }
        for tag in 1..4 {
            client.write(tag, 0, &pattern(100 << 10));
        }
        client.read(101, 0, 1024);
        client.select(lost);
        let mut commands = client.sent();
        commands.retain(|pdu| pdu.bhs.opcode() == IscsiOpcode::SCSI_COMMAND);
        assert_eq!(commands.len(), 4);
        // The first two commands have arrived.
        client.exp_cmd_sn = number(&commands[2]);
        let (exp_stat_sn, lost_at) = (client.stat_sn, now());
        assert!(client.session.on_lost(lost, lost_at));
        let dial = client.session.poll_connect().unwrap();
        assert_eq!(dial, (lost, lost_at + Duration::from_secs(1)), "DefaultTime2Wait");
        assert_eq!(client.session.poll_connect(), None);
        let login = log_in(&mut client, lost);
        assert_eq!((login.cid.get(), login.tsih.get()), (lost as u16, 7));
        assert_eq!(login.exp_stat_sn.get(), exp_stat_sn);
        let [third, fourth, first_move] = client.sent().try_into().unwrap();
        assert_eq!([number(&third), number(&fourth)], [number(&commands[2]), number(&commands[3])]);
        assert_eq!((&third.data, third.tag()), (&commands[2].data, commands[2].tag()));
        // New commands use other connections meanwhile, or wait.
        client.read(200, 0, 512);
        assert!(client.sent().is_empty());
        assert!(answer_move(&mut client, &first_move, &commands[0], DONE));
        let second_move = client.sent().remove(0);
        assert!(answer_move(&mut client, &second_move, &commands[1], DONE));
        // A target may restart its R2TSN, and requests the missing data.
        client.r2t(&commands[0], 5, 32 << 10, 64 << 10).unwrap();
        client.r2t(&commands[0], 6, 96 << 10, 4 << 10).unwrap();
        let pending: Vec<_> =
            client.sent().into_iter().filter(|pdu| pdu.tag() == commands[0].tag()).collect();
        let pending: Vec<u8> = pending.iter().flat_map(|pdu| pdu.data.clone()).collect();
        assert!(pending == pattern(100 << 10)[32 << 10..]);
        for command in &commands[..3] {
            client.status(command, ScsiStatus::GOOD, None);
            assert!(client.done().1.is_ok());
        }
        client.data(&commands[3], &pattern(1024));
        assert_eq!(client.done_data(), pattern(1024));
    }
}

#[test]
fn an_announced_connection_loss_only_sets_the_wait_time() {
    for named in [1, 0] {
        let mut client = ready(2, 2);
        client.write(1, 0, &pattern(512));
        let message = AsyncMessage {
            opcode: IscsiOpcode::ASYNC_MESSAGE.0,
            flags: FLAG_FINAL,
            initiator_task_tag: RESERVED_TAG.into(),
            stat_sn: client.next_stat_sn().into(),
            exp_cmd_sn: client.exp_cmd_sn.into(),
            max_cmd_sn: (client.exp_cmd_sn + 9).into(),
            async_event: AsyncEvent::CONNECTION_DROP.0,
            parameter1: named.into(),
            parameter2: 5.into(),
            parameter3: 30.into(),
            ..AsyncMessage::new_zeroed()
        };
        client.send(&message, &[]).unwrap();
        assert!(client.session.room() > 0 && client.session.poll_connect().is_none());
        let lost_at = now();
        assert!(client.session.on_lost(1, lost_at));
        let wait = if named == 1 { 5 } else { 1 };
        assert_eq!(client.session.poll_connect(), Some((1, lost_at + Duration::from_secs(wait))));
    }
}

#[test]
fn a_read_continues_after_its_connection_was_replaced() {
    let mut client = ready(1, 2);
    client.read(1, 0, 1024);
    let command = client.command();
    let half = client.data_in(&command, 0, 0, 0);
    client.send(&half, &pattern(512)).unwrap();
    client.exp_cmd_sn = number(&command) + 1;
    // The connection is lost in the middle of a PDU.
    let rest = client.data_in(&command, FLAG_FINAL, 1, 512);
    client.feed(&zerocopy::IntoBytes::as_bytes(&rest)[..20]).unwrap();
    assert!(client.session.on_lost(0, now()) && client.session.poll_connect().is_some());
    client.forget_unread();
    log_in(&mut client, 0);
    let [request] = client.sent().try_into().unwrap();
    assert_eq!(request.as_a::<TaskManagementFunctionRequest>().exp_data_sn.get(), 1);
    assert!(answer_move(&mut client, &request, &command, DONE));
    let rest = client.data_in(&command, FLAG_FINAL | FLAG_STATUS, 1, 512);
    client.send(&rest, &pattern(1024)[512..]).unwrap();
    assert_eq!(client.done_data(), pattern(1024));
}

#[test]
fn a_session_whose_tasks_cannot_be_reassigned_ends() {
    for response in
        [FunctionResponse::TASK_DOES_NOT_EXIST, FunctionResponse::TASK_ALLEGIANCE_REASSIGNMENT_NOT_SUPPORTED]
    {
        let mut client = ready(1, 2);
        client.write(1, 0, &pattern(512));
        let command = client.command();
        client.exp_cmd_sn = number(&command) + 1;
        assert!(client.session.on_lost(0, now()) && client.session.poll_connect().is_some());
        log_in(&mut client, 0);
        let [request] = client.sent().try_into().unwrap();
        assert!(!answer_move(&mut client, &request, &command, response));
        assert!(!client.session.on_lost(0, now()));
        assert_eq!(client.session.take_unfinished().len(), 1);
    }
}

#[test]
fn attempts_to_replace_a_connection_are_limited() {
    // Attempts end when the target no longer retains the tasks.
    let mut client = ready(1, 2);
    client.write(1, 0, &pattern(512));
    let begin = now();
    let mut at = begin;
    let mut attempts = 0;
    while client.session.on_lost(0, at) {
        at = client.session.poll_connect().unwrap().1;
        attempts += 1;
        assert!(attempts < 1000);
    }
    assert!(at >= begin + Duration::from_secs(21) && at < begin + Duration::from_secs(22));
    // The fourth loss without a completed command ends the session.
    let mut client = ready(1, 2);
    client.write(1, 0, &pattern(512));
    client.command();
    for is_last in [false, false, false, true] {
        assert_eq!(client.session.on_lost(0, now()), !is_last);
        if !is_last {
            client.session.poll_connect().unwrap();
            log_in(&mut client, 0);
        }
    }
    // An idle session does not replace its connection.
    assert!(!ready(1, 2).session.on_lost(0, now()));
    assert!(ready(2, 2).session.on_lost(0, now()));
}

#[test]
fn a_session_that_ends_waits_for_no_connection() {
    for is_by_us in [true, false] {
        for is_lost_before in [true, false] {
            let mut client = ready(2, 2);
            client.write(1, 0, &pattern(512));
            client.write(2, 0, &pattern(512));
            if is_lost_before {
                assert!(client.session.on_lost(1, now()));
            }
            if is_by_us {
                client.session.on_stop();
            } else {
                let message = AsyncMessage {
                    opcode: IscsiOpcode::ASYNC_MESSAGE.0,
                    flags: FLAG_FINAL,
                    initiator_task_tag: RESERVED_TAG.into(),
                    stat_sn: client.next_stat_sn().into(),
                    async_event: AsyncEvent::LOGOUT_REQUEST.0,
                    ..AsyncMessage::new_zeroed()
                };
                client.send(&message, &[]).unwrap();
            }
            // A connection that was lost before the stop connects once more.
            assert_eq!(client.session.poll_connect().is_some(), is_lost_before);
            assert!(!client.session.on_lost(1, now()));
            assert_eq!(client.session.take_unfinished().len(), 2);
        }
    }
}

#[test]
fn every_connection_is_pinged_and_a_silent_one_fails() {
    let mut client = ready(2, 2);
    for connection in [1, 0] {
        client.select(connection);
        let mut when = client.stream().poll_timeout().unwrap();
        client.stream().on_timeout(when).unwrap();
        when = client.stream().poll_timeout().unwrap();
        client.stream().on_timeout(when).unwrap();
        assert_eq!(
            client.sent().iter().map(|pdu| pdu.bhs.opcode()).collect::<Vec<_>>(),
            [IscsiOpcode::NOP_OUT]
        );
        if connection == 0 {
            let answer = NopIn {
                opcode: IscsiOpcode::NOP_IN.0,
                flags: FLAG_FINAL,
                initiator_task_tag: 0xffff_fffe.into(),
                target_transfer_tag: RESERVED_TAG.into(),
                stat_sn: client.next_stat_sn().into(),
                ..NopIn::new_zeroed()
            };
            client.send(&answer, &[]).unwrap();
        }
        let when = client.stream().poll_timeout().unwrap();
        assert_eq!(client.stream().on_timeout(when).is_err(), connection == 1);
    }
}
