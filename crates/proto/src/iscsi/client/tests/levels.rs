//! Error recovery level 1: retransmission of damaged PDUs.

use super::script::*;
use crate::driver::session::{Demand, Initiator, StreamSession, Timed};
use crate::iscsi::client::default_proposal;
use crate::iscsi::login::operational::{CRC32C, OperationalKey};
use crate::scsi::{ScsiStatus, Sense};
use blockmux_volume::IoError;
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{BHS_LEN, FLAG_FINAL, IscsiOpcode, RESERVED_TAG};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::time::Duration;
use zerocopy::{FromZeros, IntoBytes};

const ANSWERS: &str = "InitialR2T=No\0MaxRecvDataSegmentLength=262144\0FirstBurstLength=65536\0\
                       MaxBurstLength=65536\0DataDigest=CRC32C\0";

/// A ready session at this level, with data digests.
fn ready(level: u32) -> ScriptedClient {
    let proposal = default_proposal()
        .with(OperationalKey::DataDigest, CRC32C)
        .with(OperationalKey::ErrorRecoveryLevel, level);
    let mut client =
        ScriptedClient::logged_in_with(proposal, &format!("{ANSWERS}ErrorRecoveryLevel={level}\0"));
    client.has_digests = true;
    client.bring_up(&Unit::default());
    assert!(client.session.is_ready());
    client
}

/// Expects a single SNACK; returns its type, ITT, TTT, BegRun and RunLength.
fn snack(client: &mut ScriptedClient) -> (u8, u32, u32, u32, u32) {
    let [pdu] = client.sent().try_into().unwrap();
    let snack: SnackRequest = pdu.as_a();
    assert_eq!(pdu.bhs.opcode(), IscsiOpcode::SNACK_REQUEST);
    let tags = (snack.initiator_task_tag.get(), snack.target_transfer_tag.get());
    (snack.snack_type, tags.0, tags.1, snack.beg_run.get(), snack.run_length.get())
}

/// Data-In PDU `number` of a 2048-byte read in four PDUs; the last carries the status `stat_sn`.
fn part(client: &mut ScriptedClient, command: &InitiatorPdu, number: u32, stat_sn: u32) -> DataIn {
    let flags = if number == 3 { FLAG_FINAL | FLAG_STATUS } else { 0 };
    let before = client.stat_sn;
    let part = client.data_in(command, flags, number, number * 512);
    client.stat_sn = before;
    DataIn { stat_sn: if number == 3 { stat_sn.into() } else { 0.into() }, ..part }
}

fn bytes_of(number: u32) -> Vec<u8> {
    pattern(2048)[number as usize * 512..][..512].to_vec()
}

const DATA: u8 = FLAG_FINAL | SnackType::DATA_R2T.0;
const STATUS: u8 = FLAG_FINAL | SnackType::STATUS.0;

#[test]
fn damaged_data_is_requested_again_split_at_every_byte() {
    for damaged in 0..4 {
        at_every_split(|step| {
            let mut client = ready(1);
            client.step = step;
            client.read(1, 0, 2048);
            let command = client.command();
            let stat_sn = client.next_stat_sn();
            for number in 0..4 {
                let part = part(&mut client, &command, number, stat_sn);
                if number == damaged {
                    client.send_damaged(&part, &bytes_of(number)).unwrap();
                } else {
                    client.send(&part, &bytes_of(number)).unwrap();
                }
            }
            assert_eq!(snack(&mut client), (DATA, command.tag(), RESERVED_TAG, damaged, 0));
            assert!(client.session.poll_done().is_none());
            // It is damaged once more, then arrives intact.
            let again = part(&mut client, &command, damaged, stat_sn);
            client.send_damaged(&again, &bytes_of(damaged)).unwrap();
            assert_eq!(snack(&mut client), (DATA, command.tag(), RESERVED_TAG, damaged, 0));
            for number in damaged..4 {
                let part = part(&mut client, &command, number, stat_sn);
                client.send(&part, &bytes_of(number)).unwrap();
            }
            assert_eq!(client.done_data(), pattern(2048));
            // ExpStatSN shows that nothing is missing.
            client.read(2, 0, 512);
            assert_eq!(client.command().as_a::<ScsiCommand>().exp_stat_sn.get(), stat_sn + 1);
        });
    }
}

#[test]
fn damaged_or_early_long_data_is_received_again() {
    let len = 300 << 10;
    let data = pattern(len);
    let mut client = ready(1);
    client.step = 4096;
    client.read(1, 0, len as u64);
    let command = client.command();
    let half = 150 << 10;
    let first = client.data_in(&command, 0, 0, 0);
    client.send_damaged(&first, &data[..half]).unwrap();
    assert_eq!(snack(&mut client), (DATA, command.tag(), RESERVED_TAG, 0, 0));
    let last = client.data_in(&command, FLAG_FINAL | FLAG_STATUS, 1, half as u32);
    for _ in 0..2 {
        client.send(&last, &data[half..]).unwrap();
        assert!(client.sent().is_empty() && client.session.poll_done().is_none());
    }
    client.send(&first, &data[..half]).unwrap();
    // Duplicates are dropped.
    client.send(&first, &data[..half]).unwrap();
    client.send(&last, &data[half..]).unwrap();
    assert!(client.done_data() == data && client.placed == 3, "{}", client.placed);
    client.send(&last, &data[half..]).unwrap();
}

#[test]
fn a_response_that_preceded_its_data_is_requested_again_afterwards() {
    let mut client = ready(1);
    client.read(1, 0, 512);
    let command = client.command();
    let data = DataIn { flags: FLAG_FINAL, ..client.data_in(&command, 0, 0, 0) };
    client.send_damaged(&data, &pattern(512)).unwrap();
    assert_eq!(snack(&mut client), (DATA, command.tag(), RESERVED_TAG, 0, 0));
    let response = ScsiResponse { exp_data_sn: 1.into(), ..client.response(&command, ScsiStatus::GOOD) };
    client.send(&response, &[]).unwrap();
    assert!(client.sent().is_empty() && client.session.poll_done().is_none());
    client.send(&data, &pattern(512)).unwrap();
    let stat_sn = response.stat_sn.get();
    assert_eq!(snack(&mut client), (STATUS, RESERVED_TAG, RESERVED_TAG, stat_sn, 1));
    client.send(&response, &[]).unwrap();
    assert_eq!(client.done_data(), pattern(512));
    client.send(&response, &[]).unwrap();
}

#[test]
fn a_damaged_or_missing_status_is_requested_again() {
    let mut client = ready(1);
    for tag in 0..3 {
        client.write(tag, 0, &pattern(512));
    }
    let commands = client.sent();
    let sense = Sense::new(SenseKey::MEDIUM_ERROR, Asc::UNRECOVERED_READ_ERROR).to_bytes().to_vec();
    let sense = [&(sense.len() as u16).to_be_bytes()[..], &sense].concat();
    let responses: Vec<_> =
        commands.iter().map(|command| client.response(command, ScsiStatus::CHECK_CONDITION)).collect();
    let numbers: Vec<_> = responses.iter().map(|response| response.stat_sn.get()).collect();
    client.send_damaged(&responses[0], &sense).unwrap();
    assert_eq!(snack(&mut client), (STATUS, RESERVED_TAG, RESERVED_TAG, numbers[0], 1));
    // The second status never arrives; the third reveals the gap.
    client.send(&responses[2], &sense).unwrap();
    assert_eq!(snack(&mut client), (STATUS, RESERVED_TAG, RESERVED_TAG, numbers[1], 1));
    assert_eq!(client.done().0, 2);
    client.read(9, 0, 512);
    assert_eq!(client.command().as_a::<ScsiCommand>().exp_stat_sn.get(), numbers[0]);
    client.send(&responses[0], &sense).unwrap();
    assert_eq!(client.done().0, 0);
    client.send(&responses[1], &sense).unwrap();
    assert_eq!(client.done_error(), IoError::Medium);
    client.read(10, 0, 512);
    assert_eq!(client.command().as_a::<ScsiCommand>().exp_stat_sn.get(), numbers[2] + 1);
    // A ping carries the next StatSN, and so reveals that the last status is missing.
    let ping = NopIn {
        opcode: IscsiOpcode::NOP_IN.0,
        flags: FLAG_FINAL,
        initiator_task_tag: RESERVED_TAG.into(),
        target_transfer_tag: RESERVED_TAG.into(),
        stat_sn: (numbers[2] + 3).into(),
        ..NopIn::new_zeroed()
    };
    client.send(&ping, &[]).unwrap();
    assert_eq!(snack(&mut client), (STATUS, RESERVED_TAG, RESERVED_TAG, numbers[2] + 1, 2));
}

#[test]
fn a_missing_status_is_requested_twice_before_the_connection_fails() {
    let mut client = ready(1);
    client.write(1, 0, &pattern(512));
    let command = client.command();
    let response = client.response(&command, ScsiStatus::CHECK_CONDITION);
    client.send_damaged(&response, &[0; 4]).unwrap();
    let stat_sn = response.stat_sn.get();
    assert_eq!(snack(&mut client).3, stat_sn);
    let now = client.stream().poll_timeout().unwrap();
    client.stream().on_timeout(now).unwrap();
    assert_eq!(snack(&mut client), (STATUS, RESERVED_TAG, RESERVED_TAG, stat_sn, 1));
    assert!(client.stream().on_timeout(now + Duration::from_secs(10)).is_err());
    let mut client = ready(1);
    client.write(1, 0, &pattern(512));
    let command = client.command();
    let response = client.response(&command, ScsiStatus::GOOD);
    let far = ScsiResponse { stat_sn: (response.stat_sn.get() + 65).into(), ..response };
    assert_eq!(client.send(&far, &[]).unwrap_err().what, "skipped more statuses than can be requested again");
}

#[test]
fn data_that_the_target_lost_is_sent_again() {
    let mut client = ready(1);
    client.write(1, 0, &pattern(80 << 10));
    client.sent();
    client.write(2, 0, &pattern(100 << 10));
    let commands = client.sent();
    let command = &commands[0];
    // The target requests the rest, then unsolicited data, then a part of the rest.
    for (sn, offset, len) in [(0, 64 << 10, 36 << 10), (1, 0, 4096), (2, 70 << 10, 512)] {
        client.r2t(command, sn, offset, len).unwrap();
        let sent: Vec<u8> = client.sent().iter().flat_map(|pdu| pdu.data.clone()).collect();
        assert!(sent == pattern(100 << 10)[offset as usize..][..len as usize], "{sn}");
    }
    assert!(client.r2t(command, 3, 99 << 10, 4096).is_err(), "beyond the end of the data");
    // A missing R2T is requested once; the early one is sent again.
    let mut client = ready(1);
    client.write(1, 0, &pattern(100 << 10));
    let command = client.sent().remove(0);
    client.r2t(&command, 1, 80 << 10, 20 << 10).unwrap();
    assert_eq!(snack(&mut client), (DATA, command.tag(), RESERVED_TAG, 0, 0));
    client.r2t(&command, 2, 90 << 10, 512).unwrap();
    assert!(client.sent().is_empty());
    client.r2t(&command, 0, 64 << 10, 16 << 10).unwrap();
    client.r2t(&command, 0, 64 << 10, 16 << 10).unwrap();
    assert_eq!(client.sent().len(), 1, "a duplicate R2T is dropped");
}

#[test]
fn a_damaged_command_is_sent_again_with_its_cmd_sn() {
    let mut client = ready(1);
    client.write(1, 0, &pattern(512));
    client.write(2, 512, &pattern(512));
    let commands = client.sent();
    let reject = Reject {
        opcode: IscsiOpcode::REJECT.0,
        flags: FLAG_FINAL,
        reason: RejectReason::DATA_DIGEST_ERROR.0,
        initiator_task_tag: RESERVED_TAG.into(),
        stat_sn: client.next_stat_sn().into(),
        ..Reject::new_zeroed()
    };
    client.send(&reject, &commands[0].bhs.as_bytes()[..BHS_LEN]).unwrap();
    let again = client.command();
    assert_eq!((again.tag(), &again.data), (commands[0].tag(), &pattern(512)));
    let number = |pdu: &InitiatorPdu| pdu.as_a::<ScsiCommand>().cmd_sn.get();
    assert_eq!(number(&again), number(&commands[0]));
    client.status(&again, ScsiStatus::GOOD, None);
    assert_eq!(client.done().0, 1);
}

#[test]
fn a_requested_data_acknowledgement_reports_the_received_data() {
    let mut client = ready(1);
    client.read(1, 0, 1024);
    let command = client.command();
    let first = DataIn {
        flags: FLAG_ACKNOWLEDGE | FLAG_FINAL,
        target_transfer_tag: 77.into(),
        lun: [1; 8],
        ..client.data_in(&command, 0, 0, 0)
    };
    client.send(&first, &pattern(512)).unwrap();
    assert_eq!(snack(&mut client), (FLAG_FINAL | SnackType::DATA_ACK.0, RESERVED_TAG, 77, 1, 0));
}

#[test]
fn at_level_0_damaged_data_ends_the_session() {
    let mut client = ready(0);
    client.read(1, 0, 512);
    let command = client.command();
    let part = client.data_in(&command, FLAG_FINAL, 0, 0);
    let error = client.send_damaged(&part, &pattern(512)).unwrap_err();
    assert_eq!(error.what, "sent a data segment with a wrong digest");
}

/// Linux's initiator completed any task whose tag was in a Reject's copied header (CVE-2026-99153);
/// here that header leads to the command being sent again.
#[test]
fn data_is_sent_again_a_limited_number_of_times_whatever_a_target_rejects_or_requests() {
    let limit = "rejected or requested the data of a command again more than 16 times";
    let mut client = ready(1);
    client.write(1, 0, &pattern(512));
    let command = client.command();
    let mut sent = 0;
    let error = loop {
        let reject = Reject {
            opcode: IscsiOpcode::REJECT.0,
            flags: FLAG_FINAL,
            reason: RejectReason::DATA_DIGEST_ERROR.0,
            initiator_task_tag: RESERVED_TAG.into(),
            stat_sn: client.next_stat_sn().into(),
            ..Reject::new_zeroed()
        };
        if let Err(error) = client.send(&reject, &command.bhs.as_bytes()[..BHS_LEN]) {
            break error;
        }
        sent += client.sent().len();
        assert!(sent <= 16, "it is sent again without end");
    };
    assert_eq!((error.what, sent), (limit, 16));
    let mut client = ready(1);
    client.write(1, 0, &pattern(100 << 10));
    let command = client.sent().remove(0);
    let mut sent = 0;
    let error = loop {
        // Its first burst was sent already.
        if let Err(error) = client.r2t(&command, sent, 0, 4096) {
            break error;
        }
        sent += client.sent().len() as u32;
        assert!(sent <= 16, "it is sent again without end");
    };
    assert_eq!((error.what, sent), (limit, 16));
}

/// Another initiator completed the task of that tag (CVE-2026-99153, CVE-2026-99154).
#[test]
fn a_reject_that_copies_no_command_of_its_connection_completes_and_sends_nothing() {
    let mut client = ready(1);
    client.write(1, 0, &pattern(512));
    let command = client.command();
    type Change = fn(&mut ScsiCommand);
    let changes: [Change; 3] = [
        |copy| copy.initiator_task_tag = 0x1234.into(),
        |copy| copy.initiator_task_tag = RESERVED_TAG.into(),
        |copy| copy.opcode = IscsiOpcode::TEXT_REQUEST.0,
    ];
    for change in changes {
        let mut copy = command.as_a::<ScsiCommand>();
        change(&mut copy);
        for len in [BHS_LEN, BHS_LEN - 1, 0] {
            let reject = Reject {
                opcode: IscsiOpcode::REJECT.0,
                flags: FLAG_FINAL,
                reason: RejectReason::DATA_DIGEST_ERROR.0,
                initiator_task_tag: RESERVED_TAG.into(),
                stat_sn: client.next_stat_sn().into(),
                ..Reject::new_zeroed()
            };
            client.send(&reject, &copy.as_bytes()[..len]).unwrap();
            assert!(client.sent().is_empty() && client.session.poll_done().is_none());
        }
    }
    client.status(&command, ScsiStatus::GOOD, None);
    assert_eq!(client.done().0, 1);
}

/// A target that reads nothing could make them grow without end.
#[test]
fn receiving_pauses_while_snacks_are_unsent() {
    let mut client = ready(1);
    client.read(1, 0, 2048);
    let command = client.command();
    for _ in 0..1000 {
        let part = part(&mut client, &command, 0, 0);
        client.send_damaged(&part, &bytes_of(0)).unwrap();
    }
    assert!(matches!(client.stream().demand(), Demand::Nothing));
    assert!((1..300).contains(&client.sent().len()));
    client.feed(&[]).unwrap();
    assert!(client.sent().len() < 300);
}
