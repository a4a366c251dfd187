//! Protocol violations of an initiator, and the target's reactions.

use super::*;
use std::time::Instant;

const UNEXPECTED: (u8, u16) = (0xb, 0x0c0c);
const WRONG_AMOUNT: (u8, u16) = (0xb, 0x0c0d);
const WRONG_CRC: (u8, u16) = (0xb, 0x4705);

/// Asserts that the session still answers.
fn assert_alive(initiator: &mut ScriptedInitiator) {
    let [answer] = initiator.command(0, &[0; 6], None, None).try_into().unwrap();
    assert_good(&answer);
}

#[test]
fn invalid_opcodes_are_rejected_with_their_data() {
    let mut initiator = ScriptedInitiator::log_in("");
    for (opcode, reason) in [
        (IscsiOpcode(0x1c), RejectReason::COMMAND_NOT_SUPPORTED),
        (IscsiOpcode::NOP_IN, RejectReason::COMMAND_NOT_SUPPORTED),
        (IscsiOpcode::REJECT, RejectReason::COMMAND_NOT_SUPPORTED),
        (IscsiOpcode::LOGIN_REQUEST, RejectReason::PROTOCOL_ERROR),
        (IscsiOpcode::SNACK_REQUEST, RejectReason::SNACK_REJECT),
    ] {
        for data in [0, 5, 100_000] {
            let mut bhs = Bhs::new_zeroed();
            bhs.opcode = opcode.0;
            let [refusal] = initiator.exchange(&bhs, &vec![0; data]).try_into().unwrap();
            assert_eq!((reject_reason(&refusal), refusal.data[0]), (reason, opcode.0));
        }
    }
    assert_alive(&mut initiator);
}

#[test]
fn a_gap_in_cmd_sn_ends_the_only_connection() {
    let mut initiator = ScriptedInitiator::log_in("");
    let mut command = initiator.request(0, &[0; 6], None, None);
    command.cmd_sn = initiator.cmd_sn.into();
    assert!(initiator.send(&command, b"").is_err());
}

#[test]
fn a_segment_above_the_declared_length_ends_the_connection() {
    let mut initiator = ScriptedInitiator::log_in("");
    let mut bhs = Bhs::new_zeroed();
    bhs.data_segment_length = U24::new((256 << 10) + 1);
    assert!(initiator.pump.client_sends(bhs.as_bytes()).is_err());
}

#[test]
fn invalid_fields_are_rejected() {
    type Change = fn(&mut ScsiCommand);
    let changes: [(Change, usize); 5] = [
        (|c| c.initiator_task_tag = RESERVED_TAG.into(), 0),
        (|c| c.flags |= 7, 0),
        (|c| c.flags &= !FLAG_FINAL, 0),
        (|_| {}, 512),
        (|c| c.flags &= !FLAG_FINAL, 200_000),
    ];
    let mut initiator = ScriptedInitiator::log_in("");
    for (change, data) in changes {
        let mut command = initiator.request(0, &[0; 6], None, None);
        change(&mut command);
        let [refusal] = initiator.exchange(&command, &vec![0; data]).try_into().unwrap();
        assert_eq!(reject_reason(&refusal), RejectReason::INVALID_PDU_FIELD);
    }
    // An additional header segment longer than the header.
    let mut command = initiator.request(0, &[0; 6], None, None);
    command.total_ahs_length = 1;
    initiator.pump.client_sends(&[command.as_bytes(), b"\x00\x20\x01\x00"].concat()).unwrap();
    assert_eq!(reject_reason(&initiator.receive()[0]), RejectReason::INVALID_PDU_FIELD);
    assert_alive(&mut initiator);
}

#[test]
fn a_task_tag_in_use_is_rejected() {
    let mut initiator = ScriptedInitiator::log_in("");
    initiator.pump.holds_io = true;
    let tag = initiator.cmd_sn;
    assert!(initiator.command(0, &read10(0, 1), Some(512), None).is_empty());
    let mut second = initiator.request(0, &read10(0, 1), Some(512), None);
    second.initiator_task_tag = tag.into();
    let [refusal] = initiator.exchange(&second, b"").try_into().unwrap();
    assert_eq!(reject_reason(&refusal), RejectReason::INVALID_PDU_FIELD);
}

#[test]
fn immediate_commands_are_bounded() {
    let mut initiator = ScriptedInitiator::log_in("");
    initiator.pump.holds_io = true;
    let mut responses = Vec::new();
    for _ in 0..17 {
        let mut command = initiator.request(0, &read10(0, 1), Some(512), None);
        command.opcode |= 0x40;
        responses.extend(initiator.exchange(&command, b""));
    }
    assert_eq!(responses.len(), 1);
    assert_eq!(reject_reason(&responses[0]), RejectReason::IMMEDIATE_COMMAND_REJECT);
}

#[test]
fn unsolicited_data_without_negotiation_fails_only_its_command() {
    let mut strict = ScriptedInitiator::log_in("ImmediateData=No\0InitialR2T=Yes\0");
    let [answer] = strict.command(0, &write10(0, 1), None, Some(&pattern(512))).try_into().unwrap();
    assert_eq!(sense(&answer), UNEXPECTED);
    let mut command = strict.request(0, &write10(0, 1), None, Some(512));
    command.flags &= !FLAG_FINAL;
    let itt = command.initiator_task_tag.get();
    assert!(strict.exchange(&command, b"").is_empty(), "the response waits for the data");
    let [answer] =
        strict.exchange(&data_out(itt, RESERVED_TAG, 0, 0, true), &pattern(512)).try_into().unwrap();
    assert_eq!(sense(&answer), UNEXPECTED);
    assert_alive(&mut strict);

    let mut short = ScriptedInitiator::log_in("FirstBurstLength=512\0");
    let [answer] = short.command(0, &write10(0, 2), None, Some(&pattern(1024))).try_into().unwrap();
    assert_eq!(sense(&answer), WRONG_AMOUNT);
    let command = short.request(0, &write10(0, 1), None, Some(256));
    let [answer] = short.exchange(&command, &pattern(512)).try_into().unwrap();
    assert_eq!(sense(&answer), WRONG_AMOUNT, "more data than the expected length");
    assert_alive(&mut short);
}

#[test]
fn data_out_that_does_not_fit_its_r2t_fails_only_its_command() {
    // DataSN, offset, length, F.
    let misfits = [(1, 0, 1024, true), (0, 512, 512, true), (0, 0, 1536, true), (0, 0, 512, true)];
    let mut initiator = ScriptedInitiator::log_in("ImmediateData=No\0");
    for (data_sn, offset, len, is_final) in misfits {
        let command = initiator.request(0, &write10(0, 2), None, Some(1024));
        let itt = command.initiator_task_tag.get();
        let [r2t] = initiator.exchange(&command, b"").try_into().unwrap();
        let ttt = r2t.as_a::<IscsiR2t>().target_transfer_tag.get();
        let pdu = data_out(itt, ttt, data_sn, offset, is_final);
        let [answer] = initiator.exchange(&pdu, &pattern(len)).try_into().unwrap();
        assert_eq!(sense(&answer), WRONG_AMOUNT, "{:?}", (data_sn, offset, len));
    }
    assert_alive(&mut initiator);
    let [read] = initiator.command(0, &read10(0, 2), Some(1024), None).try_into().unwrap();
    assert_eq!(read.data, [0; 1024], "nothing was written");
}

#[test]
fn data_pdus_with_repeated_numbers_fail_once_the_burst_has_ended() {
    let mut initiator = ScriptedInitiator::log_in("ImmediateData=No\0");
    let command = initiator.request(0, &write10(0, 2), None, Some(1024));
    let itt = command.initiator_task_tag.get();
    let [r2t] = initiator.exchange(&command, b"").try_into().unwrap();
    let ttt = r2t.as_a::<IscsiR2t>().target_transfer_tag.get();
    assert!(initiator.exchange(&data_out(itt, ttt, 0, 0, false), &pattern(512)).is_empty());
    let [answer] = initiator.exchange(&data_out(itt, ttt, 0, 512, true), &pattern(512)).try_into().unwrap();
    assert_eq!(sense(&answer), WRONG_AMOUNT);
    assert_alive(&mut initiator);
}

#[test]
fn data_of_unknown_tasks_is_dropped() {
    let mut initiator = ScriptedInitiator::log_in("");
    for (itt, ttt) in [(1234, RESERVED_TAG), (1234, 0), (0, 0x1234_5678)] {
        for len in [0, 512, 200_000] {
            assert!(initiator.exchange(&data_out(itt, ttt, 0, 0, true), &pattern(len)).is_empty());
        }
    }
    assert_alive(&mut initiator);
}

#[test]
fn a_wrong_header_digest_ends_the_connection() {
    let mut initiator = ScriptedInitiator::log_in("HeaderDigest=CRC32C\0");
    let command = initiator.request(0, &[0; 6], None, None);
    let mut bytes = initiator.frame(command.as_bytes(), b"");
    bytes[50] ^= 1;
    assert!(initiator.pump.client_sends(&bytes).is_err());
}

#[test]
fn a_wrong_data_digest_fails_only_its_command() {
    for len in [512, 200_192] {
        let mut initiator = ScriptedInitiator::log_in("DataDigest=CRC32C\0FirstBurstLength=262144\0");
        initiator.pump = initiator.pump.split_at(8192);
        let data = pattern(len);
        let command = initiator.request(0, &write10(0, (len / 512) as u16), None, Some(len as u32));
        let mut bytes = initiator.frame(command.as_bytes(), &data);
        bytes[300] ^= 1;
        initiator.pump.client_sends(&bytes).unwrap();
        let [refusal, answer] = initiator.receive().try_into().unwrap();
        assert_eq!(reject_reason(&refusal), RejectReason::DATA_DIGEST_ERROR);
        assert_eq!(sense(&answer), WRONG_CRC);
        let [read] = initiator.command(0, &read10(0, 1), Some(512), None).try_into().unwrap();
        assert_eq!(read.data, [0; 512], "nothing was written");
    }
}

#[test]
fn nothing_is_received_from_an_initiator_that_does_not_read() {
    let mut initiator = ScriptedInitiator::log_in("MaxRecvDataSegmentLength=262144\0");
    let mut bytes = Vec::new();
    for tag in 0..80 {
        let mut command = initiator.request(0, &read10(0, 2048), Some(1 << 20), None);
        command.initiator_task_tag = tag.into();
        bytes.extend(initiator.frame(command.as_bytes(), b""));
    }
    initiator.pump.client_sends(&bytes).unwrap();
    assert!(matches!(initiator.pump.session.demand(), Demand::Nothing));
    assert!(initiator.pump.session.outbox().len() <= (64 << 20) + (64 << 10));
    let mut reads = 0;
    while reads < 80 {
        reads += initiator.receive().iter().filter(|pdu| pdu.bhs.flags & FLAG_STATUS != 0).count();
        initiator.pump.run().unwrap();
    }
}

#[test]
fn closing_the_connection_is_an_error_only_inside_data() {
    let mut idle = ScriptedInitiator::log_in("");
    assert_eq!(idle.pump.session.on_end(Instant::now()), Ok(()));
    assert!(idle.is_closed());
    let mut halfway = ScriptedInitiator::log_in("");
    let command = halfway.request(0, &write10(0, 1), None, Some(512));
    let bytes = halfway.frame(command.as_bytes(), &pattern(512));
    halfway.pump.client_sends(&bytes[..200]).unwrap();
    assert!(halfway.pump.session.on_end(Instant::now()).is_err());
}

/// NVMe/TCP in Linux received on after a fatal error (CVE-2026-52989).
#[test]
fn what_follows_a_violation_in_the_same_segment_is_not_executed() {
    type Violation = fn(&mut ScriptedInitiator) -> Vec<u8>;
    let violations: [Violation; 3] = [
        |initiator| {
            let mut command = initiator.request(0, &[0; 6], None, None);
            command.cmd_sn = (initiator.cmd_sn + 1).into();
            initiator.frame(command.as_bytes(), b"")
        },
        |_| {
            let mut bhs = Bhs::new_zeroed();
            bhs.data_segment_length = U24::new((256 << 10) + 1);
            bhs.as_bytes().to_vec()
        },
        |initiator| {
            let mut bytes = initiator.frame(Bhs::new_zeroed().as_bytes(), b"");
            bytes[50] ^= 1;
            bytes
        },
    ];
    for violation in violations {
        let mut initiator = ScriptedInitiator::log_in("HeaderDigest=CRC32C\0");
        initiator.pump.holds_io = true;
        let bad = violation(&mut initiator);
        let write = initiator.request(0, &write10(0, 1), None, Some(512));
        let good = initiator.frame(write.as_bytes(), &[7; 512]);
        initiator.pump.client_sends(&[bad, good].concat()).unwrap_err();
        assert!(initiator.pump.submitted.is_empty() && initiator.receive().is_empty());
    }
}
