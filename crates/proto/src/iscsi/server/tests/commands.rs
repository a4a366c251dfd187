//! Reads and writes with all forms of data transfer.

use super::*;
use crate::driver::session::Timed;
use crate::driver::target::TargetLifecycle;
use std::time::Duration;

#[test]
fn a_read_is_answered_by_data_with_status() {
    let mut initiator = ScriptedInitiator::log_in("");
    let [data] = initiator.command(0, &read10(8, 1), Some(512), None).try_into().unwrap();
    let pdu: DataIn = data.as_a();
    assert_eq!(data.bhs.opcode(), IscsiOpcode::DATA_IN);
    assert_eq!((pdu.flags, pdu.status, data.data.len()), (FLAG_FINAL | FLAG_STATUS, 0, 512));
    // One login response and two unit attentions preceded; the window is completely free again.
    assert_eq!((pdu.stat_sn.get(), pdu.exp_cmd_sn.get(), pdu.max_cmd_sn.get()), (103, 4, 259));
    assert_eq!(pdu.target_transfer_tag.get(), RESERVED_TAG);
}

#[test]
fn data_round_trips_with_immediate_data_and_digests() {
    for digests in ["None", "CRC32C"] {
        let keys = format!("HeaderDigest={digests}\0DataDigest={digests}\0MaxRecvDataSegmentLength=262144\0");
        for step in [1, 7, 48, 52, 1000, usize::MAX] {
            let mut initiator = ScriptedInitiator::log_in(&keys);
            initiator.pump = initiator.pump.split_at(step);
            let data = pattern(4096);
            let [answer] = initiator.command(1, &write10(3, 8), None, Some(&data)).try_into().unwrap();
            assert_eq!(assert_good(&answer).residual_count.get(), 0);
            let [read] = initiator.command(1, &read10(3, 8), Some(4096), None).try_into().unwrap();
            assert!(read.data == data, "step {step}");
            let [other] = initiator.command(0, &read10(3, 8), Some(4096), None).try_into().unwrap();
            assert!(other.data == [0; 4096]);
        }
    }
}

#[test]
fn read_data_is_cut_into_segments_and_bursts() {
    let mut initiator = ScriptedInitiator::log_in("MaxRecvDataSegmentLength=1024\0MaxBurstLength=1536\0");
    let pdus = initiator.command(0, &read10(0, 8), Some(4096), None);
    let seen: Vec<_> = pdus
        .iter()
        .map(|pdu| {
            let data: DataIn = pdu.as_a();
            (data.data_sn.get(), data.buffer_offset.get(), pdu.data.len(), data.flags)
        })
        .collect();
    let all = FLAG_FINAL | FLAG_STATUS;
    assert_eq!(
        seen,
        [
            (0, 0, 1024, 0),
            (1, 1024, 512, FLAG_FINAL),
            (2, 1536, 1024, 0),
            (3, 2560, 512, FLAG_FINAL),
            (4, 3072, 1024, all)
        ]
    );
}

#[test]
fn residual_counts_report_overflow_and_underflow() {
    let mut initiator = ScriptedInitiator::log_in("");
    let mut residual = |cdb: &[u8], reads: Option<u32>, data: Option<&[u8]>| {
        let pdus = initiator.command(0, cdb, reads, data);
        let last = pdus.last().unwrap();
        let flags = last.bhs.flags & (FLAG_OVERFLOW | FLAG_UNDERFLOW);
        let count = u32::from_be_bytes(*last.bhs.as_bytes().last_chunk().unwrap());
        (flags, count, last.bhs.opcode())
    };
    assert_eq!(residual(&read10(0, 1), Some(1024), None), (FLAG_UNDERFLOW, 512, IscsiOpcode::DATA_IN));
    assert_eq!(residual(&read10(0, 2), Some(512), None), (FLAG_OVERFLOW, 512, IscsiOpcode::DATA_IN));
    assert_eq!(residual(&read10(0, 1), None, None), (FLAG_OVERFLOW, 512, IscsiOpcode::SCSI_RESPONSE));
    assert_eq!(residual(&[0; 6], Some(100), None), (FLAG_UNDERFLOW, 100, IscsiOpcode::SCSI_RESPONSE));
    let two_blocks = pattern(1024);
    let write = residual(&write10(0, 1), None, Some(&two_blocks));
    assert_eq!(write, (FLAG_UNDERFLOW, 512, IscsiOpcode::SCSI_RESPONSE));
    let write = residual(&write10(0, 2), None, Some(&two_blocks[..200]));
    assert_eq!(write, (FLAG_OVERFLOW, 824, IscsiOpcode::SCSI_RESPONSE));
    let [read] = initiator.command(0, &read10(0, 1), Some(512), None).try_into().unwrap();
    assert_eq!(read.data, two_blocks[..512]);
}

/// Sends a write without immediate data, then the data that R2Ts request, in PDUs of `segment`
/// bytes.
fn write_by_r2t(
    initiator: &mut ScriptedInitiator,
    data: &[u8],
    immediate: usize,
    segment: usize,
) -> (Vec<IscsiR2t>, TargetPdu) {
    let blocks = (data.len() / 512) as u16;
    let command = initiator.request(0, &write10(0, blocks), None, Some(data.len() as u32));
    let itt = command.initiator_task_tag.get();
    let mut responses = initiator.exchange(&command, &data[..immediate]);
    let mut asked = Vec::new();
    loop {
        let mut next = Vec::new();
        for pdu in &responses {
            if pdu.bhs.opcode() != IscsiOpcode::R2T {
                assert_eq!(responses.len(), 1);
                return (asked, pdu.clone());
            }
            let r2t: IscsiR2t = pdu.as_a();
            asked.push(r2t);
            let (begin, len) =
                (r2t.buffer_offset.get() as usize, r2t.desired_data_transfer_length.get() as usize);
            for (data_sn, at) in (begin..begin + len).step_by(segment).enumerate() {
                let end = (at + segment).min(begin + len);
                let ttt = r2t.target_transfer_tag.get();
                let pdu = data_out(itt, ttt, data_sn as u32, at as u32, end == begin + len);
                next.extend(initiator.exchange(&pdu, &data[at..end]));
            }
        }
        responses = next;
    }
}

#[test]
fn a_long_write_is_requested_burst_by_burst() {
    for (keys, immediate, outstanding) in
        [("InitialR2T=Yes\0ImmediateData=No\0", 0, 1), ("ImmediateData=Yes\0MaxOutstandingR2T=3\0", 5000, 3)]
    {
        for digest in ["None", "CRC32C"] {
            let keys =
                format!("{keys}MaxBurstLength=65536\0MaxRecvDataSegmentLength=262144\0DataDigest={digest}\0");
            let mut initiator = ScriptedInitiator::log_in(&keys);
            let data = pattern(300_032);
            let (asked, answer) = write_by_r2t(&mut initiator, &data, immediate, 30_000);
            assert_eq!(assert_good(&answer).exp_data_sn.get() as usize, asked.len());
            let expected = (300_032 - immediate).div_ceil(65_536);
            assert_eq!(asked.len(), expected, "{outstanding}");
            assert!(asked.iter().enumerate().all(|(at, r2t)| r2t.r2t_sn.get() == at as u32));
            let mut read = Vec::new();
            for pdu in initiator.command(0, &read10(0, 586), Some(300_032), None) {
                read.extend(pdu.data);
            }
            assert!(read == data);
        }
    }
}

#[test]
fn long_segments_are_received_straight_into_memory() {
    for digest in ["None", "CRC32C"] {
        let keys = format!(
            "MaxBurstLength=1048576\0FirstBurstLength=262144\0MaxRecvDataSegmentLength=262144\0DataDigest={digest}\0"
        );
        let mut initiator = ScriptedInitiator::log_in(&keys);
        initiator.pump = initiator.pump.split_at(16 << 10);
        let data = pattern(1 << 20);
        let (_, answer) = write_by_r2t(&mut initiator, &data, 256 << 10, 256 << 10);
        assert_good(&answer);
        assert_eq!(initiator.pump.placed, 4);
        let mut read = Vec::new();
        for pdu in initiator.command(0, &read10(0, 2048), Some(1 << 20), None) {
            read.extend(pdu.data);
        }
        assert!(read == data);
    }
}

#[test]
fn unsolicited_data_needs_no_r2t() {
    let mut initiator = ScriptedInitiator::log_in("InitialR2T=No\0FirstBurstLength=4096\0");
    let data = pattern(8192);
    let mut command = initiator.request(0, &write10(0, 16), None, Some(8192));
    command.flags &= !FLAG_FINAL;
    let itt = command.initiator_task_tag.get();
    assert!(initiator.exchange(&command, &data[..1024]).is_empty());
    assert!(initiator.exchange(&data_out(itt, RESERVED_TAG, 0, 1024, false), &data[1024..2048]).is_empty());
    let [r2t] = initiator
        .exchange(&data_out(itt, RESERVED_TAG, 1, 2048, true), &data[2048..4096])
        .try_into()
        .unwrap();
    let r2t: IscsiR2t = r2t.as_a();
    assert_eq!((r2t.buffer_offset.get(), r2t.desired_data_transfer_length.get()), (4096, 4096));
    let ttt = r2t.target_transfer_tag.get();
    let [answer] = initiator.exchange(&data_out(itt, ttt, 0, 4096, true), &data[4096..]).try_into().unwrap();
    assert_good(&answer);
    let [read] = initiator.command(0, &read10(0, 16), Some(8192), None).try_into().unwrap();
    assert!(read.data == data);
}

#[test]
fn the_window_shrinks_with_commands_in_flight() {
    let mut initiator = ScriptedInitiator::log_in("");
    initiator.pump.holds_io = true;
    for _ in 0..3 {
        assert!(initiator.command(0, &read10(0, 1), Some(512), None).is_empty());
    }
    let [tur] = initiator.command(0, &[0; 6], None, None).try_into().unwrap();
    let response = assert_good(&tur);
    assert_eq!((response.exp_cmd_sn.get(), response.max_cmd_sn.get()), (7, 7 + 256 - 3 - 1));
    for left in [2, 1, 0] {
        initiator.pump.finish_one();
        let [data] = initiator.receive().try_into().unwrap();
        assert_eq!(data.as_a::<DataIn>().max_cmd_sn.get(), 7 + 256 - left - 1);
    }
}

#[test]
fn a_command_outside_the_window_is_ignored() {
    let mut initiator = ScriptedInitiator::log_in("");
    for cmd_sn in [initiator.cmd_sn + 256, initiator.cmd_sn - 1] {
        let mut command = initiator.request(0, &[0; 6], None, None);
        command.cmd_sn = cmd_sn.into();
        initiator.cmd_sn -= 1;
        assert!(initiator.exchange(&command, b"").is_empty());
    }
    let mut write = initiator.request(0, &write10(0, 1), None, Some(512));
    write.cmd_sn = 0.into();
    initiator.cmd_sn -= 1;
    assert!(initiator.exchange(&write, &pattern(512)).is_empty());
    let [tur] = initiator.command(0, &[0; 6], None, None).try_into().unwrap();
    assert_good(&tur);
}

#[test]
fn an_unknown_lun_and_a_long_cdb_get_their_sense() {
    let mut initiator = ScriptedInitiator::log_in("");
    let [answer] = initiator.command(9, &[0; 6], None, None).try_into().unwrap();
    assert_eq!(sense(&answer), (5, 0x2500));
    // A 32-byte CDB: the second half is in an additional header segment.
    let mut command = initiator.request(0, &[0x7f, 0, 0, 0, 0, 0, 0, 24], None, None);
    command.total_ahs_length = 5;
    let mut bytes = command.as_bytes().to_vec();
    bytes.extend(b"\x00\x11\x01\x00");
    bytes.extend([0; 16]);
    initiator.pump.client_sends(&bytes).unwrap();
    let [answer] = initiator.receive().try_into().unwrap();
    assert_eq!(sense(&answer).0, 5);
}

#[test]
fn a_write_without_memory_waits_and_an_impossible_one_is_busy() {
    let pool = Pool::new(128 << 10);
    let mut initiator = ScriptedInitiator::connect_to(node(None), pool.clone());
    initiator.enter("ImmediateData=No\0");
    let _ = (initiator.command(0, &[0; 6], None, None), initiator.command(1, &[0; 6], None, None));
    let taken = pool.take(128 << 10).unwrap();
    let command = initiator.request(0, &write10(0, 8), None, Some(4096));
    let itt = command.initiator_task_tag.get();
    assert!(initiator.exchange(&command, b"").is_empty());
    drop(taken);
    let now = Instant::now();
    crate::driver::session::Timed::on_timeout(&mut initiator.pump.session, now).unwrap();
    let [r2t] = initiator.receive().try_into().unwrap();
    let ttt = r2t.as_a::<IscsiR2t>().target_transfer_tag.get();
    let [answer] = initiator.exchange(&data_out(itt, ttt, 0, 0, true), &pattern(4096)).try_into().unwrap();
    assert_good(&answer);
    assert_eq!(pool.out_bytes(), 0);
}

#[test]
fn immediate_data_without_memory_waits_until_there_is_some() {
    let pool = Pool::new(2 << 20);
    let mut initiator = ScriptedInitiator::connect_to(node(None), pool.clone());
    initiator.enter("ImmediateData=Yes\0FirstBurstLength=262144\0");
    let _ = (initiator.command(0, &[0; 6], None, None), initiator.command(1, &[0; 6], None, None));
    let taken: Vec<_> = std::iter::from_fn(|| pool.take_payload(64 << 10)).collect();
    initiator.pump = initiator.pump.split_at(16 << 10);
    let command = initiator.request(0, &write10(0, 256), None, Some(128 << 10));
    assert!(initiator.exchange(&command, &pattern(128 << 10)).is_empty());
    let tries = 20;
    for _ in 0..tries {
        let due = initiator.pump.session.poll_timeout().unwrap();
        initiator.pump.session.on_timeout(due).unwrap();
        initiator.pump.run().unwrap();
        assert!(initiator.receive().is_empty());
    }
    let waits = initiator.pump.session.poll_timeout().unwrap() - initiator.pump.now;
    assert!(waits > Duration::from_millis(500), "{tries} tries within {waits:?}");
    drop(taken);
    // The pool's wake-up suffices: it causes a driver turn before the next retry.
    initiator.pump.session.on_turn(initiator.pump.now);
    initiator.pump.run().unwrap();
    let [answer] = initiator.receive().try_into().unwrap();
    assert_good(&answer);
}

#[test]
fn immediate_data_waits_for_memory_of_other_connections_but_not_forever() {
    for others_go_on in [true, false] {
        let pool = Pool::new(2 << 20);
        let mut initiator = ScriptedInitiator::connect_to(node(None), pool.clone());
        initiator.enter("ImmediateData=Yes\0InitialR2T=Yes\0FirstBurstLength=262144\0");
        let _ = (initiator.command(0, &[0; 6], None, None), initiator.command(1, &[0; 6], None, None));
        // The memory of this write stays allocated until its data arrives, after the waiting data.
        let asked = initiator.request(0, &write10(0, 8), None, Some(4096));
        let [_r2t] = initiator.exchange(&asked, b"").try_into().unwrap();
        let taken: Vec<_> = std::iter::from_fn(|| pool.take_payload(64 << 10)).collect();
        initiator.pump = initiator.pump.split_at(16 << 10);
        let command = initiator.request(0, &write10(0, 256), None, Some(128 << 10));
        assert!(initiator.exchange(&command, &pattern(128 << 10)).is_empty());
        let next_try = |initiator: &mut ScriptedInitiator| {
            let due = initiator.pump.session.poll_timeout().unwrap();
            initiator.pump.session.on_timeout(due).unwrap();
            initiator.pump.run().unwrap();
            initiator.receive()
        };
        assert!(next_try(&mut initiator).is_empty(), "refused at the first try");
        if others_go_on {
            drop(taken);
            let [answer] = next_try(&mut initiator).try_into().unwrap();
            assert_good(&answer);
            continue;
        }
        let tries = (1..20).find_map(|nth| next_try(&mut initiator).pop().map(|answer| (nth, answer)));
        let (nth, answer) = tries.expect("an answer within 20 tries");
        assert_eq!(answer.as_a::<ScsiResponse>().status, crate::scsi::ScsiStatus::BUSY.0, "at try {nth}");
    }
}
