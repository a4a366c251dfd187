//! Recovery within a connection and within a command (error recovery level 1).

use super::*;
use crate::driver::session::Timed;

fn snack(kind: SnackType, itt: u32, ttt: u32, run: (u32, u32)) -> SnackRequest {
    let mut request = SnackRequest::new_zeroed();
    request.opcode = IscsiOpcode::SNACK_REQUEST.0;
    request.snack_type = FLAG_FINAL | kind.0;
    request.initiator_task_tag = itt.into();
    request.target_transfer_tag = ttt.into();
    (request.beg_run, request.run_length) = (run.0.into(), run.1.into());
    request
}

/// A session at level 1 with these additional keys.
fn recovering(keys: &str) -> ScriptedInitiator {
    ScriptedInitiator::log_in(&format!("ErrorRecoveryLevel=1\0{keys}"))
}

impl ScriptedInitiator {
    fn status_snack(&mut self, first: u32, count: u32) -> Vec<TargetPdu> {
        self.exchange(&snack(SnackType::STATUS, RESERVED_TAG, RESERVED_TAG, (first, count)), b"")
    }

    fn data_snack(&mut self, itt: u32, first: u32, count: u32) -> Vec<TargetPdu> {
        self.exchange(&snack(SnackType::DATA_R2T, itt, RESERVED_TAG, (first, count)), b"")
    }

    /// Sends a PDU with a wrong data digest.
    pub(super) fn send_with_digest_error(
        &mut self,
        header: &(impl IntoBytes + Immutable),
        data: &[u8],
    ) -> Vec<TargetPdu> {
        let mut bytes = self.frame(header.as_bytes(), data);
        let at = bytes.len() - 5;
        bytes[at] ^= 1;
        self.pump.client_sends(&bytes).unwrap();
        self.receive()
    }

    /// Writes 4096 bytes at block 0, as two commands of one burst each.
    fn write_in_halves(&mut self, data: &[u8]) {
        for (lba, half) in [(0, &data[..2048]), (4, &data[2048..])] {
            let [answer] = self.command(0, &write10(lba, 4), None, Some(half)).try_into().unwrap();
            assert_good(&answer);
        }
    }

    /// Reads blocks of LUN 0; returns all data.
    fn read(&mut self, blocks: u16) -> Vec<u8> {
        let pdus = self.command(0, &read10(0, blocks), Some(u32::from(blocks) * 512), None);
        pdus.into_iter().flat_map(|pdu| pdu.data).collect()
    }

    fn tick(&mut self) -> Vec<TargetPdu> {
        let due = self.pump.session.poll_timeout().unwrap();
        self.pump.session.on_timeout(due).unwrap();
        self.receive()
    }
}

#[test]
fn a_lost_status_is_retransmitted_unchanged() {
    let mut initiator = recovering("");
    let [wrong] = initiator.command(9, &[0; 6], None, None).try_into().unwrap();
    let [read] = initiator.command(0, &read10(0, 1), Some(512), None).try_into().unwrap();
    let (first, second) = (wrong.as_a::<ScsiResponse>().stat_sn.get(), read.as_a::<DataIn>().stat_sn.get());
    assert_eq!(second, first + 1);
    let [again] = initiator.status_snack(first, 1).try_into().unwrap();
    // Only ExpCmdSN and MaxCmdSN have current values.
    let (now, then): (ScsiResponse, ScsiResponse) = (again.as_a(), wrong.as_a());
    assert_eq!(now, ScsiResponse { exp_cmd_sn: now.exp_cmd_sn, max_cmd_sn: now.max_cmd_sn, ..then });
    assert_eq!((sense(&again), now.exp_cmd_sn.get()), ((5, 0x2500), then.exp_cmd_sn.get() + 1));
    for count in [0, 2] {
        let [_, again] = initiator.status_snack(first, count).try_into().unwrap();
        assert_eq!((again.bhs, &again.data), (read.bhs, &read.data), "the data is the same, too");
    }
}

#[test]
fn unsent_and_acknowledged_responses_are_not_retransmitted() {
    let mut initiator = recovering("");
    let [answer] = initiator.command(0, &[0; 6], None, None).try_into().unwrap();
    let stat_sn = answer.as_a::<ScsiResponse>().stat_sn.get();
    for (first, count) in [(stat_sn + 1, 1), (stat_sn, 2), (stat_sn, u32::MAX), (stat_sn + 100, 0), (5, 0)] {
        let [refusal] = initiator.status_snack(first, count).try_into().unwrap();
        assert_eq!(reject_reason(&refusal), RejectReason::PROTOCOL_ERROR, "{first} {count}");
        // A Reject has a StatSN of its own.
        initiator.acknowledge(stat_sn);
        initiator.acknowledge_all(&refusal);
        let [next] = initiator.command(0, &[0; 6], None, None).try_into().unwrap();
        assert_eq!(next.bhs.opcode(), IscsiOpcode::SCSI_RESPONSE);
        let stat_sn = next.as_a::<ScsiResponse>().stat_sn.get();
        initiator.acknowledge(stat_sn + 1);
        let [gone] = initiator.status_snack(stat_sn, 1).try_into().unwrap();
        assert_eq!(reject_reason(&gone), RejectReason::PROTOCOL_ERROR);
        initiator.acknowledge_all(&gone);
    }
}

impl ScriptedInitiator {
    /// Sends a PDU that only carries ExpStatSN.
    pub(super) fn acknowledge(&mut self, exp_stat_sn: u32) {
        let mut nop = NopOut::new_zeroed();
        nop.opcode = IscsiOpcode::NOP_OUT.0 | 0x40;
        nop.flags = FLAG_FINAL;
        nop.initiator_task_tag = RESERVED_TAG.into();
        nop.target_transfer_tag = RESERVED_TAG.into();
        nop.exp_stat_sn = exp_stat_sn.into();
        assert!(self.exchange(&nop, b"").is_empty());
    }

    fn acknowledge_all(&mut self, last: &TargetPdu) {
        self.acknowledge(last.as_a::<ScsiResponse>().stat_sn.get() + 1);
    }
}

#[test]
fn an_initiator_without_acknowledgements_loses_the_oldest_responses() {
    let mut initiator = recovering("MaxRecvDataSegmentLength=262144\0");
    let mut last = 0;
    for _ in 0..40 {
        let pdus = initiator.command(0, &read10(0, 2048), Some(1 << 20), None);
        last = pdus.last().unwrap().as_a::<DataIn>().stat_sn.get();
    }
    let [refusal] = initiator.status_snack(last - 35, 1).try_into().unwrap();
    assert_eq!(reject_reason(&refusal), RejectReason::SNACK_REJECT);
    assert_eq!(initiator.status_snack(last - 20, 1).len(), 1);
    for _ in 0..600 {
        initiator.command(0, &[0; 6], None, None);
    }
    let [refusal] = initiator.status_snack(last, 1).try_into().unwrap();
    assert_eq!(reject_reason(&refusal), RejectReason::SNACK_REJECT);
}

const SHORT_SEGMENTS: &str = "MaxRecvDataSegmentLength=1024\0MaxBurstLength=2048\0";

#[test]
fn lost_data_is_retransmitted_by_data_sn() {
    let mut initiator = recovering(&format!("{SHORT_SEGMENTS}DataDigest=CRC32C\0"));
    initiator.write_in_halves(&pattern(4096));
    let sent = initiator.command(0, &read10(0, 8), Some(4096), None);
    let itt = initiator.cmd_sn - 1;
    for (first, count, expected) in [(0, 0, 0..4), (1, 2, 1..3), (3, 1, 3..4), (2, 0, 2..4)] {
        let again = initiator.data_snack(itt, first, count);
        assert_eq!(again.len(), expected.len());
        for (again, sent) in again.iter().zip(&sent[expected]) {
            let (now, then): (DataIn, DataIn) = (again.as_a(), sent.as_a());
            let like_now = DataIn { exp_cmd_sn: now.exp_cmd_sn, max_cmd_sn: now.max_cmd_sn, ..then };
            assert_eq!((now, &again.data), (like_now, &sent.data));
        }
    }
    for (itt, first, count) in [(itt, 4, 0), (itt, 4, 1), (itt, 3, 2), (itt, 0, u32::MAX), (itt + 7, 0, 0)] {
        let [refusal] = initiator.data_snack(itt, first, count).try_into().unwrap();
        assert_eq!(reject_reason(&refusal), RejectReason::PROTOCOL_ERROR, "{first} {count}");
    }
}

#[test]
fn each_burst_but_the_last_requests_a_data_ack_that_ends_its_recovery() {
    let mut initiator = recovering(SHORT_SEGMENTS);
    let sent = initiator.command(0, &read10(0, 8), Some(4096), None);
    let flags: Vec<u8> = sent.iter().map(|pdu| pdu.bhs.flags).collect();
    assert_eq!(flags, [0, FLAG_FINAL | FLAG_ACKNOWLEDGE, 0, FLAG_FINAL | FLAG_STATUS]);
    let (itt, asked): (u32, DataIn) = (initiator.cmd_sn - 1, sent[1].as_a());
    let ttt = asked.target_transfer_tag.get();
    assert_ne!(ttt, RESERVED_TAG);
    let confirm = |ttt, first, count| snack(SnackType::DATA_ACK, RESERVED_TAG, ttt, (first, count));
    for (wrong, reason) in [
        (confirm(ttt, 5, 0), RejectReason::INVALID_DATA_ACK),
        (confirm(ttt + 9, 1, 0), RejectReason::INVALID_DATA_ACK),
        (confirm(ttt, 1, 1), RejectReason::INVALID_PDU_FIELD),
    ] {
        let [refusal] = initiator.exchange(&wrong, b"").try_into().unwrap();
        assert_eq!(reject_reason(&refusal), reason);
    }
    assert!(initiator.exchange(&confirm(ttt, 2, 0), b"").is_empty());
    let [gone] = initiator.data_snack(itt, 1, 1).try_into().unwrap();
    assert_eq!(reject_reason(&gone), RejectReason::PROTOCOL_ERROR);
    assert_eq!(initiator.data_snack(itt, 2, 0).len(), 2);
    // After the status was acknowledged, a further DataACK is permitted and has no effect.
    initiator.acknowledge_all(sent.last().unwrap());
    assert!(initiator.exchange(&confirm(ttt, 2, 0), b"").is_empty());
}

#[test]
fn data_is_resegmented_when_the_initiator_reduces_its_segment_length() {
    let mut initiator = recovering(SHORT_SEGMENTS);
    let data = pattern(4096);
    initiator.write_in_halves(&data);
    let sent = initiator.command(0, &read10(0, 8), Some(4096), None);
    let (itt, last): (u32, DataIn) = (initiator.cmd_sn - 1, sent[3].as_a());
    let mut text = TextRequest::new_zeroed();
    text.opcode = IscsiOpcode::TEXT_REQUEST.0 | 0x40;
    text.flags = FLAG_FINAL;
    text.initiator_task_tag = 77.into();
    text.target_transfer_tag = RESERVED_TAG.into();
    initiator.exchange(&text, b"MaxRecvDataSegmentLength=512\0");
    let [refusal] = initiator.data_snack(itt, 1, 0).try_into().unwrap();
    assert_eq!(
        reject_reason(&refusal),
        RejectReason::SNACK_REJECT,
        "the lost segments exceed the new MaxRecvDataSegmentLength"
    );
    for (tag, run) in [(0, (1, 0)), (RESERVED_TAG, (1, 0)), (9, (1, 1))] {
        let [refusal] = initiator.exchange(&snack(SnackType::R_DATA, itt, tag, run), b"").try_into().unwrap();
        assert_eq!(reject_reason(&refusal), RejectReason::INVALID_PDU_FIELD);
    }
    let again = initiator.exchange(&snack(SnackType::R_DATA, itt, 9, (1, 0)), b"");
    let (status, parts) = again.split_last().unwrap();
    let numbers: Vec<_> = parts.iter().map(|pdu| pdu.as_a::<DataIn>().data_sn.get()).collect();
    assert_eq!(numbers, [1, 2, 3, 4, 5, 6]);
    let bytes: Vec<u8> = parts.iter().flat_map(|pdu| pdu.data.clone()).collect();
    assert!(bytes == data[1024..]);
    let response = assert_good(status);
    assert_eq!((response.snack_tag.get(), response.exp_data_sn.get()), (9, 7));
    assert_eq!(response.stat_sn, last.stat_sn);
    let [status] = initiator.status_snack(last.stat_sn.get(), 1).try_into().unwrap();
    assert_eq!(status.as_a::<ScsiResponse>().snack_tag.get(), 9);
}

#[test]
fn a_command_with_a_wrong_data_digest_counts_as_not_received_and_later_ones_wait() {
    for len in [512, 100_352] {
        let mut initiator = recovering("DataDigest=CRC32C\0FirstBurstLength=262144\0");
        initiator.pump = initiator.pump.split_at(8192);
        let data = pattern(len);
        let blocks = (len / 512) as u16;
        let command = initiator.request(0, &write10(0, blocks), None, Some(len as u32));
        let [refusal] = initiator.send_with_digest_error(&command, &data).try_into().unwrap();
        assert_eq!(reject_reason(&refusal), RejectReason::DATA_DIGEST_ERROR);
        assert_eq!(refusal.as_a::<Reject>().exp_cmd_sn, command.cmd_sn);
        // A read, a write with data and a ping: none executes before its turn.
        assert!(initiator.command(0, &read10(0, 1), Some(512), None).is_empty());
        assert!(initiator.command(0, &write10(0, blocks), None, Some(&vec![9; len])).is_empty());
        let mut ping = NopOut::new_zeroed();
        ping.flags = FLAG_FINAL;
        (ping.initiator_task_tag, ping.target_transfer_tag) = (99.into(), RESERVED_TAG.into());
        ping.cmd_sn = initiator.cmd_sn.into();
        initiator.cmd_sn += 1;
        assert!(initiator.exchange(&ping, b"").is_empty());
        let responses = initiator.exchange(&command, &data);
        let opcodes: Vec<_> = responses.iter().map(|pdu| pdu.bhs.opcode()).collect();
        assert_eq!(
            opcodes,
            [
                IscsiOpcode::NOP_IN,
                IscsiOpcode::SCSI_RESPONSE,
                IscsiOpcode::DATA_IN,
                IscsiOpcode::SCSI_RESPONSE
            ]
        );
        assert!(responses[2].data == data[..512], "the read came between the writes");
        assert!(initiator.read(blocks) == vec![9; len]);
    }
}

#[test]
fn unsolicited_data_of_an_early_command_is_held_with_it() {
    for step in [1, 48, 600, usize::MAX] {
        let mut initiator = recovering("InitialR2T=No\0FirstBurstLength=4096\0");
        initiator.pump = initiator.pump.split_at(step);
        let data = pattern(4096);
        let first = initiator.request(0, &[0; 6], None, None);
        let mut command = initiator.request(0, &write10(0, 8), None, Some(4096));
        command.flags &= !FLAG_FINAL;
        let itt = command.initiator_task_tag.get();
        assert!(initiator.exchange(&command, &data[..1024]).is_empty());
        assert!(
            initiator.exchange(&data_out(itt, RESERVED_TAG, 0, 1024, false), &data[1024..3000]).is_empty()
        );
        assert!(initiator.exchange(&data_out(itt, RESERVED_TAG, 1, 3000, true), &data[3000..]).is_empty());
        let [second, write] = initiator.exchange(&first, b"").try_into().unwrap();
        assert_good(&second);
        assert_good(&write);
        assert!(initiator.read(8) == data, "step {step}");
    }
}

#[test]
fn damaged_data_is_requested_again_from_its_first_byte() {
    for (segment, step) in
        [(512_usize, 1), (512, 700), (512, usize::MAX), (70_000, 5000), (70_000, usize::MAX)]
    {
        let keys = "DataDigest=CRC32C\0ImmediateData=No\0MaxBurstLength=1048576\0";
        let mut initiator = recovering(keys);
        initiator.pump = initiator.pump.split_at(step);
        let len = (4 * segment).next_multiple_of(512);
        let data = pattern(len);
        let command = initiator.request(0, &write10(0, (len / 512) as u16), None, Some(len as u32));
        let itt = command.initiator_task_tag.get();
        let [r2t] = initiator.exchange(&command, b"").try_into().unwrap();
        let ttt = r2t.as_a::<IscsiR2t>().target_transfer_tag.get();
        let part = |at: usize| (at * segment, ((at + 1) * segment).min(len));
        let mut responses = Vec::new();
        for at in 0..4 {
            let (begin, end) = (part(at).0, if at == 3 { len } else { part(at).1 });
            let pdu = data_out(itt, ttt, at as u32, begin as u32, at == 3);
            responses.extend(match at {
                1 => initiator.send_with_digest_error(&pdu, &data[begin..end]),
                _ => initiator.exchange(&pdu, &data[begin..end]),
            });
        }
        let [refusal, again] = responses.try_into().unwrap();
        assert_eq!(reject_reason(&refusal), RejectReason::DATA_DIGEST_ERROR);
        let again: IscsiR2t = again.as_a();
        assert_eq!((again.r2t_sn.get(), again.buffer_offset.get() as usize), (1, segment));
        assert_eq!(again.desired_data_transfer_length.get() as usize, len - segment);
        // Late data for the first R2T is dropped.
        assert!(initiator.exchange(&data_out(itt, ttt, 4, 0, false), &[9; 512]).is_empty());
        let ttt = again.target_transfer_tag.get();
        let pdu = data_out(itt, ttt, 0, segment as u32, true);
        let [answer] = initiator.exchange(&pdu, &data[segment..]).try_into().unwrap();
        assert_eq!(assert_good(&answer).exp_data_sn.get(), 2);
        assert!(initiator.read((len / 512) as u16) == data, "{segment} {step}");
    }
}

#[test]
fn data_after_a_gap_in_data_sn_or_with_a_wrong_digest_is_requested_again() {
    let mut initiator = recovering("InitialR2T=No\0FirstBurstLength=2048\0DataDigest=CRC32C\0");
    let data = pattern(4096);
    let mut command = initiator.request(0, &write10(0, 8), None, Some(4096));
    command.flags &= !FLAG_FINAL;
    let itt = command.initiator_task_tag.get();
    assert!(initiator.exchange(&command, &data[..512]).is_empty());
    let damaged = data_out(itt, RESERVED_TAG, 0, 512, true);
    let [refusal, r2t] = initiator.send_with_digest_error(&damaged, &data[512..2048]).try_into().unwrap();
    assert_eq!(reject_reason(&refusal), RejectReason::DATA_DIGEST_ERROR);
    let r2t: IscsiR2t = r2t.as_a();
    assert_eq!((r2t.buffer_offset.get(), r2t.desired_data_transfer_length.get()), (512, 3584));
    let ttt = r2t.target_transfer_tag.get();
    assert!(initiator.exchange(&data_out(itt, ttt, 0, 512, false), &data[512..1024]).is_empty());
    // DataSN 1 is lost, which the following PDU reveals.
    let [again] = initiator.exchange(&data_out(itt, ttt, 2, 2048, true), &data[2048..]).try_into().unwrap();
    let again: IscsiR2t = again.as_a();
    assert_eq!((again.r2t_sn.get(), again.buffer_offset.get()), (1, 1024));
    let ttt = again.target_transfer_tag.get();
    let [answer] = initiator.exchange(&data_out(itt, ttt, 0, 1024, true), &data[1024..]).try_into().unwrap();
    assert_good(&answer);
    assert!(initiator.read(8) == data);
}

#[test]
fn missing_data_is_requested_again_and_finally_fails_the_command() {
    let mut initiator = recovering("ImmediateData=No\0");
    let command = initiator.request(0, &write10(0, 1), None, Some(512));
    let itt = command.initiator_task_tag.get();
    let [first] = initiator.exchange(&command, b"").try_into().unwrap();
    let mut asked = vec![first.as_a::<IscsiR2t>()];
    let sense_of_end = loop {
        let responses = initiator.tick();
        match responses.first() {
            Some(pdu) if pdu.bhs.opcode() == IscsiOpcode::R2T => asked.push(pdu.as_a()),
            Some(pdu) if pdu.bhs.opcode() == IscsiOpcode::NOP_IN => initiator.acknowledge(0),
            Some(pdu) => break sense(pdu),
            None => {}
        }
        assert!(asked.len() < 100);
    };
    assert_eq!((asked.len(), sense_of_end), (33, (0xb, 0x0c0d)));
    assert!(asked.iter().enumerate().all(|(at, r2t)| r2t.r2t_sn.get() == at as u32));
    let late = asked[0].target_transfer_tag.get();
    assert!(initiator.exchange(&data_out(itt, late, 0, 0, true), &pattern(512)).is_empty());
    // Another sequence, with its data in time.
    let command = initiator.request(0, &write10(0, 1), None, Some(512));
    let itt = command.initiator_task_tag.get();
    initiator.exchange(&command, b"");
    let again = std::iter::repeat_with(|| initiator.tick()).find(|responses| !responses.is_empty()).unwrap();
    let ttt = again[0].as_a::<IscsiR2t>().target_transfer_tag.get();
    let [answer] = initiator.exchange(&data_out(itt, ttt, 0, 0, true), &pattern(512)).try_into().unwrap();
    assert_good(&answer);
}

#[test]
fn a_lost_r2t_is_retransmitted_until_its_data_arrives() {
    let mut initiator = recovering("ImmediateData=No\0MaxBurstLength=512\0");
    let command = initiator.request(0, &write10(0, 2), None, Some(1024));
    let itt = command.initiator_task_tag.get();
    let [r2t] = initiator.exchange(&command, b"").try_into().unwrap();
    for count in [0, 1] {
        let [again] = initiator.data_snack(itt, 0, count).try_into().unwrap();
        assert_eq!(again.bhs, r2t.bhs);
    }
    let ttt = r2t.as_a::<IscsiR2t>().target_transfer_tag.get();
    let [next] = initiator.exchange(&data_out(itt, ttt, 0, 0, true), &pattern(512)).try_into().unwrap();
    for (first, count) in [(0, 1), (2, 1), (1, 2), (u32::MAX, 0)] {
        let [refusal] = initiator.data_snack(itt, first, count).try_into().unwrap();
        assert_eq!(reject_reason(&refusal), RejectReason::PROTOCOL_ERROR);
    }
    let [again] = initiator.data_snack(itt, 1, 1).try_into().unwrap();
    assert_eq!(again.as_a::<IscsiR2t>().buffer_offset, next.as_a::<IscsiR2t>().buffer_offset);
}

#[test]
fn a_command_aborted_before_its_arrival_counts_as_received() {
    let mut initiator = recovering("");
    let missing = initiator.request(0, &[0; 6], None, None);
    assert!(initiator.command(0, &read10(0, 1), Some(512), None).is_empty());
    let waiting = initiator.request(0, &write10(0, 1), None, Some(512));
    assert!(initiator.exchange(&waiting, &[7; 512]).is_empty());
    let abort = |initiator: &mut ScriptedInitiator, command: &ScsiCommand| {
        let mut request = TaskManagementFunctionRequest::new_zeroed();
        request.opcode = IscsiOpcode::TASK_MANAGEMENT_REQUEST.0 | 0x40;
        request.function = FLAG_FINAL | Function::ABORT_TASK.0;
        request.initiator_task_tag = 99.into();
        request.referenced_task_tag = command.initiator_task_tag;
        (request.ref_cmd_sn, request.cmd_sn) = (command.cmd_sn, initiator.cmd_sn.into());
        initiator.exchange(&request, b"")
    };
    let [answer] = abort(&mut initiator, &waiting).try_into().unwrap();
    let response: TaskManagementFunctionResponse = answer.as_a();
    assert_eq!(FunctionResponse(response.response), FunctionResponse::FUNCTION_COMPLETE);
    assert_eq!(response.exp_cmd_sn, missing.cmd_sn);
    let [read, answer] =
        abort(&mut initiator, &missing).try_into().map_err(|pdus| format!("{pdus:?}")).unwrap();
    let both = [read.bhs.opcode(), answer.bhs.opcode()];
    assert_eq!(both, [IscsiOpcode::TASK_MANAGEMENT_RESPONSE, IscsiOpcode::DATA_IN]);
    assert_eq!(answer.as_a::<DataIn>().exp_cmd_sn.get(), initiator.cmd_sn, "both CmdSNs count as received");
    for late in [missing, waiting] {
        assert!(initiator.exchange(&late, b"").is_empty(), "the CmdSN counts as received");
    }
    assert_eq!(initiator.read(1), [0; 512]);
}

#[test]
fn a_reset_also_cancels_early_commands() {
    let mut initiator = recovering("");
    let missing = initiator.request(0, &[0; 6], None, None);
    assert!(initiator.command(0, &write10(0, 1), None, Some(&[7; 512])).is_empty());
    assert!(initiator.command(1, &read10(0, 1), Some(512), None).is_empty());
    let mut reset = TaskManagementFunctionRequest::new_zeroed();
    reset.opcode = IscsiOpcode::TASK_MANAGEMENT_REQUEST.0 | 0x40;
    reset.function = FLAG_FINAL | Function::ABORT_TASK_SET.0;
    reset.cmd_sn = initiator.cmd_sn.into();
    assert_eq!(initiator.exchange(&reset, b"").len(), 1);
    let responses = initiator.exchange(&missing, b"");
    assert_eq!(responses.len(), 2, "the missing command and the command to the other unit");
    assert_eq!(initiator.read(1), [0; 512]);
}

#[test]
fn a_wrong_header_digest_ends_the_connection_at_every_level() {
    let mut initiator = recovering("HeaderDigest=CRC32C\0");
    let command = initiator.request(0, &[0; 6], None, None);
    let mut bytes = initiator.frame(command.as_bytes(), b"");
    bytes[50] ^= 1;
    assert!(initiator.pump.client_sends(&bytes).is_err());
}

#[test]
fn a_thousand_snacks_for_all_data_queue_it_once_at_a_time() {
    let mut initiator = recovering("MaxRecvDataSegmentLength=262144\0");
    initiator.command(0, &read10(0, 8192), Some(4 << 20), None);
    let itt = initiator.cmd_sn - 1;
    let request = snack(SnackType::DATA_R2T, itt, RESERVED_TAG, (0, 0));
    let bytes = initiator.frame(request.as_bytes(), b"").repeat(1000);
    initiator.pump.client_sends(&bytes).unwrap();
    let mut seen = 0;
    while initiator.pump.untaken() > 0 {
        assert!(initiator.pump.session.outbox().len() < 5 << 20);
        seen += initiator.receive().len();
        initiator.pump.run().unwrap();
    }
    seen += initiator.receive().len();
    assert_eq!(seen, 16_000);
}
