//! Failures: statuses, unresponsive targets, closed connections and protocol violations.

use super::script::*;
use crate::driver::session::{Initiator, PathRank, StreamSession, Timed};
use crate::scsi::{ScsiStatus, Sense};
use blockmux_volume::{IoError, Op, Output};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{FLAG_FINAL, IscsiOpcode, RESERVED_TAG};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::time::Duration;
use std::time::Instant;
use zerocopy::FromZeros;

const WHOLE: &str = "InitialR2T=No\0MaxRecvDataSegmentLength=262144\0FirstBurstLength=65536\0";

fn check(client: &mut ScriptedClient, command: &InitiatorPdu, key: SenseKey, asc: Asc) {
    client.status(command, ScsiStatus::CHECK_CONDITION, Some(Sense::new(key, asc)));
}

#[test]
fn a_command_is_sent_again_after_a_unit_attention() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    client.write(1, 0, &pattern(512));
    for asc in [
        Asc::REPORTED_LUNS_DATA_HAS_CHANGED,
        Asc::RESERVATIONS_RELEASED,
        Asc::POWER_ON_RESET_OR_BUS_DEVICE_RESET_OCCURRED,
    ] {
        let command = client.command();
        check(&mut client, &command, SenseKey::UNIT_ATTENTION, asc);
    }
    let command = client.command();
    assert_eq!(command.data, pattern(512));
    client.status(&command, ScsiStatus::GOOD, None);
    assert!(client.done().1.is_ok());
}

/// Lets a write meet a unit attention; returns it with the query that precedes its retry.
fn attention(client: &mut ScriptedClient, asc: Asc) -> (InitiatorPdu, InitiatorPdu) {
    client.write(1, 0, &pattern(512));
    let command = client.command();
    check(client, &command, SenseKey::UNIT_ATTENTION, asc);
    let [question, again] = client.sent().try_into().unwrap();
    assert_eq!(again.cdb(), command.cdb());
    (question, again)
}

#[test]
fn a_changed_capacity_is_queried_and_reported() {
    for is_long in [true, false] {
        let mut client = ScriptedClient::logged_in(WHOLE);
        client.bring_up(&Unit { blocks: 8, is_long, ..Unit::default() });
        assert_eq!((client.session.poll_size(), client.session.poll_size()), (Some(4096), None));
        for blocks in [16_u64, 4] {
            let (question, again) = attention(&mut client, Asc::CAPACITY_DATA_HAS_CHANGED);
            let capacity = match question.cdb()[0] {
                0x9e => [&(blocks - 1).to_be_bytes()[..], &512_u32.to_be_bytes(), &[0; 20]].concat(),
                _ => [(blocks as u32 - 1).to_be_bytes(), 512_u32.to_be_bytes()].concat(),
            };
            client.data(&question, &capacity);
            client.status(&again, ScsiStatus::GOOD, None);
            assert!(client.done().1.is_ok());
            assert_eq!(client.session.poll_size(), Some(blocks * 512));
            assert_eq!(client.session.unit().unwrap().volume_info().size, blocks * 512);
            client.read(2, (blocks - 1) * 512, 512);
            let command = client.command();
            client.data(&command, &pattern(512));
            assert_eq!(client.done_data(), pattern(512));
            client.read(2, blocks * 512, 512);
            assert_eq!(client.done_error(), IoError::OutOfRange);
        }
        client.session.resize(8192);
        client.read(2, 15 * 512, 512);
        assert_eq!((client.sent().len(), client.session.poll_size()), (1, None));
    }
}

#[test]
fn writes_stay_stable_after_a_write_cache_is_enabled() {
    for device_specific in [0x10, 0] {
        let mut client = ScriptedClient::logged_in(WHOLE);
        client.bring_up(&Unit { write_cache: false, device_specific, ..Unit::default() });
        let (question, again) = attention(&mut client, Asc::MODE_PARAMETERS_CHANGED);
        assert_eq!((question.cdb()[0], question.cdb()[2]), (0x1a, 8));
        client.data(&question, &[&[23, 0, device_specific, 0, 8, 18, 4][..], &[0; 17]].concat());
        client.status(&again, ScsiStatus::GOOD, None);
        assert!(client.done().1.is_ok());
        client.write(2, 0, &pattern(512));
        let command = client.command();
        assert_eq!(command.cdb()[1] & 8 != 0, device_specific != 0, "FUA");
        client.status(&command, ScsiStatus::GOOD, None);
        if device_specific == 0 {
            let flush = client.command();
            assert_eq!(flush.cdb()[0], 0x91);
            client.status(&flush, ScsiStatus::GOOD, None);
        }
        assert!(client.done().1.is_ok());
    }
}

#[test]
fn a_unit_that_may_have_changed_needs_a_new_session() {
    let capacity = |last: u64, len: u32| [&last.to_be_bytes()[..], &len.to_be_bytes(), &[0; 20]].concat();
    for is_inquiry in [true, false] {
        let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
        if is_inquiry {
            client.write(1, 0, &pattern(512));
            let command = client.command();
            check(&mut client, &command, SenseKey::UNIT_ATTENTION, Asc::INQUIRY_DATA_HAS_CHANGED);
        } else {
            let (question, again) = attention(&mut client, Asc::CAPACITY_DATA_HAS_CHANGED);
            client.data(&question, &capacity(99, 4096));
            client.status(&again, ScsiStatus::BUSY, None);
        }
        let [logout] = client.sent().try_into().unwrap();
        assert_eq!(logout.bhs.opcode(), IscsiOpcode::LOGOUT_REQUEST);
        assert_eq!(client.session.take_unfinished().len(), 1, "the command is repeated on another session");
    }
}

#[test]
fn io_rejected_by_a_standby_port_is_returned_if_there_are_other_paths() {
    for has_other_paths in [true, false] {
        let mut client = ScriptedClient::logged_in_on_paths(has_other_paths, WHOLE);
        client.bring_up(&Unit { is_asymmetric: true, ..Unit::default() });
        assert_eq!(client.session.path_rank(), PathRank::Best);
        client.write(1, 0, &pattern(512));
        let command = client.command();
        check(&mut client, &command, SenseKey::NOT_READY, Asc::TARGET_PORT_IN_STANDBY_STATE);
        assert_eq!(client.session.path_rank(), PathRank::Unusable);
        if has_other_paths {
            client.assert_nothing_done();
            let io = client.session.poll_returned().unwrap();
            assert_eq!((io.tag.0, io.data.unwrap().to_vec()), (1, pattern(512)));
        } else {
            assert_eq!(client.done_error(), IoError::PathLost);
        }
        assert!(client.session.poll_returned().is_none() && client.sent().is_empty());
        // The state is queried again from time to time.
        for (state, rank) in [(2, PathRank::Unusable), (1, PathRank::Good), (0, PathRank::Best)] {
            let when = client.stream().poll_timeout().unwrap();
            client.stream().on_timeout(when).unwrap();
            let question = client.command();
            assert_eq!(question.cdb()[..2], [0xa3, 0x0a]);
            client.data(&question, &[0, 0, 0, 8, state, 0x0f, 0, 1, 0, 0, 0, 0]);
            assert_eq!(client.session.path_rank(), rank);
        }
        client.write(1, 0, &pattern(512));
        let command = client.command();
        check(&mut client, &command, SenseKey::UNIT_ATTENTION, Asc::ASYMMETRIC_ACCESS_STATE_CHANGED);
        let [question, _again] = client.sent().try_into().unwrap();
        assert_eq!(question.cdb()[..2], [0xa3, 0x0a]);
    }
}

#[test]
fn a_reserved_unit_is_reported_as_reserved() {
    let mut client = ScriptedClient::logged_in(WHOLE);
    loop {
        let command = client.command();
        if matches!(command.cdb()[0], 0x9e | 0x25) {
            client.status(&command, ScsiStatus::RESERVATION_CONFLICT, None);
        } else {
            client.answer(&Unit::default(), &command);
        }
        if let Some(refused) = client.session.refused() {
            assert_eq!(refused.to_string(), "logical unit 0 is reserved by another initiator");
            return assert!(refused.is_retryable());
        }
    }
}

#[test]
fn endless_unit_attentions_fail_the_command() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    client.read(1, 0, 512);
    for _ in 0..=64 {
        let command = client.command();
        check(&mut client, &command, SenseKey::ABORTED_COMMAND, Asc::NO_ADDITIONAL_SENSE_INFORMATION);
    }
    assert_eq!(client.done_error(), IoError::Aborted);
}

#[test]
fn a_busy_unit_is_retried_with_growing_delays() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    client.read(1, 0, 512);
    let mut pauses = Vec::new();
    for _ in 0..4 {
        let command = client.command();
        client.status(&command, ScsiStatus::TASK_SET_FULL, None);
        assert!(client.sent().is_empty());
        let when = client.stream().poll_timeout().unwrap();
        pauses.push((when - client.now).as_millis());
        client.now = when;
        client.stream().on_timeout(when).unwrap();
    }
    assert_eq!(pauses, [2, 4, 8, 16]);
    let command = client.command();
    client.data(&command, &pattern(512));
    assert!(client.done().1.is_ok());
}

#[test]
fn each_failure_has_its_error() {
    let table = [
        (SenseKey::MEDIUM_ERROR, Asc::UNRECOVERED_READ_ERROR, IoError::Medium),
        (SenseKey::DATA_PROTECT, Asc::WRITE_PROTECTED, IoError::ReadOnly),
        (SenseKey::ILLEGAL_REQUEST, Asc::INVALID_FIELD_IN_CDB, IoError::Unsupported),
        (SenseKey::ILLEGAL_REQUEST, Asc::LOGICAL_UNIT_NOT_SUPPORTED, IoError::PathLost),
    ];
    for (key, asc, error) in table {
        let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
        client.read(1, 0, 512);
        let command = client.command();
        check(&mut client, &command, key, asc);
        assert_eq!(client.done_error(), error, "{key} {asc}");
    }
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    client.write(1, 0, &pattern(512));
    let command = client.command();
    client.status(&command, ScsiStatus::RESERVATION_CONFLICT, None);
    assert_eq!(client.done_error(), IoError::Reserved);
    client.write(2, 0, &pattern(512));
    let command = client.command();
    let response = client.response(&command, ScsiStatus::GOOD);
    client.send(&ScsiResponse { response: 1, ..response }, &[]).unwrap();
    assert_eq!(client.done_error(), IoError::Medium, "a target failure");
    client.write(3, 0, &pattern(512));
    let command = client.command();
    let flags = FLAG_FINAL | FLAG_UNDERFLOW;
    let response = client.response(&command, ScsiStatus::GOOD);
    client.send(&ScsiResponse { flags, residual_count: 512.into(), ..response }, &[]).unwrap();
    assert_eq!(client.done_error(), IoError::Medium, "a residual");
}

#[test]
fn rejected_commands_are_replaced_by_others() {
    let illegal = |client: &mut ScriptedClient, command: &InitiatorPdu| {
        check(client, command, SenseKey::ILLEGAL_REQUEST, Asc::INVALID_COMMAND_OPERATION_CODE);
    };
    let zeroes = |only_fast| Op::WriteZeroes { fua: false, may_unmap: true, only_fast };
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    client.submit(1, zeroes(false), 512, 300 << 10, None);
    let command = client.command();
    illegal(&mut client, &command);
    let writes: Vec<_> =
        client.sent().into_iter().filter(|pdu| pdu.bhs.opcode() == IscsiOpcode::SCSI_COMMAND).collect();
    let cdbs: Vec<_> = writes.iter().map(|pdu| (pdu.cdb()[0], pdu.cdb()[9])).collect();
    assert_eq!(cdbs, [(0x8a, 1), (0x8a, 1)]);
    for command in &writes {
        assert!(command.data.iter().all(|&byte| byte == 0) && !command.data.is_empty());
        client.status(command, ScsiStatus::GOOD, None);
    }
    assert!(client.done().1.is_ok());
    client.submit(2, zeroes(true), 0, 512, None);
    assert_eq!(client.done_error(), IoError::Unsupported);
    client.submit(3, Op::Flush, 0, 0, None);
    let long = client.command();
    illegal(&mut client, &long);
    let short = client.command();
    assert_eq!((long.cdb()[0], short.cdb()[0]), (0x91, 0x35));
    client.status(&short, ScsiStatus::GOOD, None);
    assert!(client.done().1.is_ok());
    client.submit(4, Op::BlockStatus, 0, 4096, None);
    let command = client.command();
    illegal(&mut client, &command);
    assert!(
        matches!(client.done().1, Ok(Output::Extents(extents)) if extents[0].len == 4096 && !extents[0].hole)
    );
    client.submit(5, Op::Discard { fua: false }, 0, 4096, None);
    let command = client.command();
    illegal(&mut client, &command);
    assert!(client.done().1.is_ok());
    client.submit(6, Op::Discard { fua: false }, 0, 4096, None);
    assert!(client.done().1.is_ok() && client.sent().is_empty());
}

#[test]
fn pings_are_answered_and_a_silent_target_is_noticed() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    let ping = NopIn {
        opcode: IscsiOpcode::NOP_IN.0,
        flags: FLAG_FINAL,
        lun: [9; 8],
        initiator_task_tag: RESERVED_TAG.into(),
        target_transfer_tag: 5.into(),
        exp_cmd_sn: client.exp_cmd_sn.into(),
        max_cmd_sn: (client.exp_cmd_sn + 9).into(),
        ..NopIn::new_zeroed()
    };
    client.send(&ping, b"data").unwrap();
    let [pong] = client.sent().try_into().unwrap();
    let pong: NopOut = pong.as_a();
    let tags = (pong.initiator_task_tag.get(), pong.target_transfer_tag.get());
    assert_eq!((pong.opcode, tags, pong.lun), (0x40, (RESERVED_TAG, 5), [9; 8]));
    let mut now = client.stream().poll_timeout().unwrap();
    client.stream().on_timeout(now).unwrap();
    assert!(client.sent().is_empty(), "a PDU was received since the last tick");
    now += Duration::from_secs(10);
    client.stream().on_timeout(now).unwrap();
    let [nop] = client.sent().try_into().unwrap();
    assert_eq!((nop.bhs.opcode(), nop.tag()), (IscsiOpcode::NOP_OUT, 0xffff_fffe));
    let answer =
        NopIn { initiator_task_tag: 0xffff_fffe.into(), target_transfer_tag: RESERVED_TAG.into(), ..ping };
    client.send(&answer, &[]).unwrap();
    for seconds in [10, 20] {
        client.stream().on_timeout(now + Duration::from_secs(seconds)).unwrap();
    }
    assert_eq!(client.sent().len(), 1);
    let error = client.stream().on_timeout(now + Duration::from_secs(30)).unwrap_err();
    assert_eq!(error.what, "did not answer within 10 seconds");
}

#[test]
fn receiving_pauses_while_ping_replies_are_unsent() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    let mut ping = vec![0x20, 0x80];
    ping.resize(48, 0);
    ping[16..20].fill(0xff);
    client.step = 48;
    client.feed(&ping.repeat(1000)).unwrap();
    assert!(matches!(client.stream().demand(), crate::driver::session::Demand::Nothing));
    assert!(client.sent().len() < 300);
    client.feed(&[]).unwrap();
    assert!(matches!(client.stream().demand(), crate::driver::session::Demand::Bytes(_)));
}

#[test]
fn a_requested_logout_follows_after_the_commands_in_flight() {
    for kind in [AsyncEvent::LOGOUT_REQUEST, AsyncEvent::CONNECTION_DROP, AsyncEvent::SESSION_DROP] {
        let mut client = ScriptedClient::logged_in(WHOLE);
        client.bring_up(&Unit { max_transfer: 8, ..Unit::default() });
        client.read(1, 0, 4096);
        client.write(2, 0, &pattern(64 << 10));
        let commands = client.sent();
        assert_eq!(commands.len(), 5, "one read, and four of the sixteen pieces of the write");
        client.event(kind, 60, &[]).unwrap();
        assert_eq!(client.session.room(), 0);
        for command in &commands[1..] {
            client.status(command, ScsiStatus::GOOD, None);
        }
        assert!(client.sent().is_empty());
        client.data(&commands[0], &pattern(4096));
        assert!(client.done().1.is_ok());
        let [logout] = client.sent().try_into().unwrap();
        assert_eq!(logout.bhs.opcode(), IscsiOpcode::LOGOUT_REQUEST);
        assert!(client.stream().on_end(Instant::now()).is_ok() && client.is_closing());
        let unfinished = client.session.take_unfinished();
        assert_eq!(unfinished.len(), 1, "the command is repeated on another session");
    }
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    client.event(AsyncEvent::VENDOR_SPECIFIC, 0, &[]).unwrap();
    assert!(client.session.room() > 0 && client.sent().is_empty());
}

#[test]
fn a_rejected_ping_is_ignored_and_a_rejected_command_ends_the_session() {
    for (reason, is_end) in [
        (RejectReason::IMMEDIATE_COMMAND_REJECT, false),
        (RejectReason::DATA_DIGEST_ERROR, false),
        (RejectReason::PROTOCOL_ERROR, true),
        (RejectReason::COMMAND_NOT_SUPPORTED, true),
        (RejectReason::INVALID_PDU_FIELD, true),
        (RejectReason(0x77), true),
    ] {
        let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
        let reject = Reject {
            opcode: IscsiOpcode::REJECT.0,
            flags: FLAG_FINAL,
            reason: reason.0,
            initiator_task_tag: RESERVED_TAG.into(),
            ..Reject::new_zeroed()
        };
        assert_eq!(client.send(&reject, &[0; 48]).is_err(), is_end, "{reason}");
    }
}

#[test]
fn unrequested_data_ends_the_session() {
    let offsets = [(1, 0, 512, true), (0, 512, 512, true), (0, 0, 1024, true), (0, 0, 512, false)];
    for (data_sn, offset, len, is_wrong) in offsets {
        let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
        client.read(1, 0, 512);
        let command = client.command();
        let data_in = client.data_in(&command, FLAG_FINAL, data_sn, offset);
        assert_eq!(client.send(&data_in, &pattern(len)).is_err(), is_wrong, "{data_sn} {offset} {len}");
    }
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    client.write(1, 0, &pattern(512));
    let command = client.command();
    let data_in = client.data_in(&command, FLAG_FINAL, 0, 0);
    assert!(client.send(&data_in, &pattern(512)).is_err(), "a write");
    // More than declared, and more than any PDU except Data-In may have.
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    assert!(client.feed(&[&[0x25, 0x80, 0, 0, 0, 4, 0, 1][..], &[0; 40]].concat()).is_err());
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    assert!(client.feed(&[&[0x20, 0x80, 0, 0, 0, 1, 0, 1][..], &[0; 40]].concat()).is_err());
}

#[test]
fn an_invalid_r2t_ends_the_session() {
    let answers = "InitialR2T=Yes\0ImmediateData=No\0MaxBurstLength=1024\0";
    for (sn, offset, len) in
        [(1, 0, 512), (0, 512, 512), (0, 0, 0), (0, 0, 2048), (0, 0, u32::MAX), (0, u32::MAX, 512)]
    {
        let mut client = ScriptedClient::ready(answers, 1 << 20);
        client.write(1, 0, &pattern(1536));
        let command = client.command();
        assert!(client.r2t(&command, sn, offset, len).is_err(), "{sn} {offset} {len}");
    }
    let mut client = ScriptedClient::ready(answers, 1 << 20);
    client.write(1, 0, &pattern(1536));
    let command = client.command();
    client.r2t(&command, 0, 0, 1024).unwrap();
    assert!(client.r2t(&command, 1, 0, 512).is_err(), "a repeated R2T");
    let mut client = ScriptedClient::ready(answers, 1 << 20);
    client.read(1, 0, 512);
    let command = client.command();
    assert!(client.r2t(&command, 0, 0, 512).is_err(), "a read");
}

#[test]
fn wrong_digests_end_the_session() {
    let answers = "HeaderDigest=CRC32C\0";
    let config = config(
        crate::iscsi::client::default_proposal()
            .with(crate::iscsi::login::operational::OperationalKey::HeaderDigest, 1),
    );
    let mut client = ScriptedClient::new(config);
    client.sent();
    client.login_response(0x81, LoginStatus::SUCCESS, b"").unwrap();
    client.sent();
    client.login_response(0x87, LoginStatus::SUCCESS, answers.as_bytes()).unwrap();
    let error = client.feed(&[&[0x20, 0x80][..], &[0; 50]].concat()).unwrap_err();
    assert_eq!(error.what, "sent a header with a wrong digest");
}

#[test]
fn incomplete_io_is_returned_oldest_first() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    for n in 0..4 {
        client.read(n, 0, 512);
    }
    let commands = client.sent();
    client.data(&commands[2], &pattern(512));
    assert!(client.stream().on_end(Instant::now()).is_err());
    let tags: Vec<_> = client.session.take_unfinished().into_iter().map(|io| io.tag.0).collect();
    assert_eq!(tags, [0, 1, 3]);
    assert_eq!(client.done().0, 2);
    assert!(client.session.take_unfinished().is_empty() && client.session.room() == 0);
}

/// Linux's initiator copied stale bytes as sense data (CVE-2026-74556, CVE-2026-74557).
#[test]
fn sense_data_is_no_longer_than_what_arrived() {
    let sense = Sense::new(SenseKey::MEDIUM_ERROR, Asc::UNRECOVERED_READ_ERROR).to_bytes();
    for len in 0..=sense.len() {
        for declared in [0, 1, len, len + 1, len + 2, usize::from(u16::MAX)] {
            let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
            client.read(1, 0, 512);
            let command = client.command();
            let response = client.response(&command, ScsiStatus::CHECK_CONDITION);
            let data = [&(declared as u16).to_be_bytes()[..], &sense[..len]].concat();
            client.send(&response, &data).unwrap();
            assert_eq!(client.done_error(), IoError::Medium, "{declared} for {len}");
        }
    }
}
