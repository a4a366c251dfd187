//! Commands and their data on the wire.

use super::script::*;
use crate::driver::session::{Initiator, StreamSession};
use crate::scsi::ScsiStatus;
use blockmux_volume::{Extent, IoError, Op, Output};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::{FLAG_FINAL, IscsiOpcode, RESERVED_TAG};

const WHOLE: &str = "InitialR2T=No\0MaxRecvDataSegmentLength=262144\0FirstBurstLength=65536\0";
const ZEROES: Op = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };

#[test]
fn a_read_is_one_command_and_its_data_is_borrowed() {
    at_every_split(|step| {
        let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
        client.step = step;
        client.read(9, 4096, 8192);
        let command = client.command();
        let header: ScsiCommand = command.as_a();
        assert_eq!((header.flags, header.expected_data_transfer_length.get()), (0xc1, 8192));
        assert_eq!(header.cdb, [0x88, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 16, 0, 0]);
        client.data(&command, &pattern(8192));
        assert_eq!(client.done_data(), pattern(8192));
        assert_eq!(client.placed, 0);
    });
}

#[test]
fn a_read_may_have_several_data_in_pdus_and_a_separate_status() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    client.read(1, 0, 1536);
    let command = client.command();
    let first = client.data_in(&command, 0, 0, 0);
    client.send(&first, &pattern(1536)[..1000]).unwrap();
    let second = client.data_in(&command, FLAG_FINAL, 1, 1000);
    client.send(&second, &pattern(1536)[1000..]).unwrap();
    assert!(client.session.poll_done().is_none());
    client.status(&command, ScsiStatus::GOOD, None);
    assert_eq!(client.done_data(), pattern(1536));
}

#[test]
fn long_data_is_received_into_the_readers_buffer() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    let own = list(&vec![0; 200 << 10]);
    client.submit(1, Op::Read, 0, 200 << 10, Some(own.clone()));
    let command = client.command();
    client.step = 3000;
    client.data(&command, &pattern(200 << 10));
    assert_eq!((client.placed, own.to_vec() == pattern(200 << 10)), (1, true));
    assert!(client.done().1.is_ok());
}

#[test]
fn a_read_that_comes_short_fails() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    client.read(1, 0, 1024);
    let command = client.command();
    client.data(&command, &pattern(512));
    assert_eq!(client.done_error(), IoError::Medium);
}

/// Unsolicited data of a 100 KiB write: immediate bytes, then offset, length and flags of each
/// Data-Out.
fn sent_unasked(answers: &str) -> (usize, Vec<(u32, u32, u8)>) {
    let mut client = ScriptedClient::ready(answers, 1 << 20);
    client.write(1, 0, &pattern(100 << 10));
    let [command, data @ ..] = &client.sent()[..] else { panic!() };
    assert_eq!(command.bhs.flags & FLAG_FINAL == 0, !data.is_empty());
    let outs = data.iter().map(|pdu| {
        let header: DataOut = pdu.as_a();
        assert_eq!((header.target_transfer_tag.get(), pdu.tag()), (RESERVED_TAG, command.tag()));
        (header.buffer_offset.get(), pdu.data.len() as u32, header.flags)
    });
    (command.data.len(), outs.collect())
}

#[test]
fn unsolicited_data_matches_the_negotiated_parameters() {
    let segment = "MaxRecvDataSegmentLength=32768\0";
    let cases = [
        ("InitialR2T=Yes\0ImmediateData=No\0", 0, vec![]),
        ("InitialR2T=Yes\0ImmediateData=Yes\0", 8192, vec![]),
        ("InitialR2T=Yes\0MaxRecvDataSegmentLength=262144\0FirstBurstLength=65536\0", 65536, vec![]),
        (
            "InitialR2T=No\0ImmediateData=No\0FirstBurstLength=65536\0",
            0,
            vec![(0, 32768, 0), (32768, 32768, 0x80)],
        ),
        ("InitialR2T=No\0FirstBurstLength=65536\0", 32768, vec![(32768, 32768, 0x80)]),
        ("InitialR2T=No\0FirstBurstLength=20000\0", 20000, vec![]),
    ];
    for (answers, immediate, outs) in cases {
        let needs_segment = !answers.contains("MaxRecv") && !outs.is_empty() || answers.contains("20000");
        let answers = if needs_segment { [segment, answers].concat() } else { answers.to_owned() };
        assert_eq!(sent_unasked(&answers), (immediate, outs), "{answers:?}");
    }
}

#[test]
fn requested_data_is_sent_in_sequences() {
    let answers = "InitialR2T=Yes\0ImmediateData=No\0MaxBurstLength=65536\0MaxRecvDataSegmentLength=40000\0";
    let mut client = ScriptedClient::ready(answers, 1 << 20);
    let data = pattern(100 << 10);
    client.write(1, 0, &data);
    let command = client.command();
    let mut came: Vec<u8> = Vec::new();
    // Two R2Ts at a time.
    client.r2t(&command, 0, 0, 65536).unwrap();
    client.r2t(&command, 1, 65536, (100 << 10) - 65536).unwrap();
    for pdu in client.sent() {
        let header: DataOut = pdu.as_a();
        assert_eq!(header.buffer_offset.get() as usize, came.len());
        let (sn, tag) = if came.len() < 65536 { (came.len() / 40000, 0x100) } else { (0, 0x101) };
        assert_eq!((header.data_sn.get() as usize, header.target_transfer_tag.get()), (sn, tag));
        came.extend(&pdu.data);
        assert_eq!(header.flags == FLAG_FINAL, came.len() == 65536 || came.len() == 100 << 10);
    }
    assert!(came == data);
    client.status(&command, ScsiStatus::GOOD, None);
    assert!(matches!(client.done(), (1, Ok(Output::Nothing))));
}

#[test]
fn write_payload_is_sent_without_a_copy() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    let data = list(&pattern(4096));
    let address = data.segs()[0].as_ptr();
    client.submit(0, Op::Write { fua: false }, 0, 4096, Some(data));
    let has_it = client.stream().outbox().pieces().any(
        |piece| matches!(piece, crate::driver::outbox::OutboxPiece::Payload(seg) if seg.as_ptr() == address),
    );
    assert!(has_it);
}

#[test]
fn each_operation_is_sent_as_its_command() {
    let zeroes = |may_unmap, only_fast| Op::WriteZeroes { fua: false, may_unmap, only_fast };
    for (op, cdb, data_len) in [
        (Op::Flush, [0x91, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 0),
        (Op::Discard { fua: false }, [0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0, 0, 0, 0, 0, 0, 0], 24),
        (zeroes(true, true), [0x93, 8, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 16, 0, 0], 512),
        (zeroes(false, false), [0x93, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 16, 0, 0], 512),
    ] {
        let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
        let (offset, len) = if op == Op::Flush { (0, 0) } else { (4096, 8192) };
        client.submit(9, op, offset, len, None);
        let command = client.command();
        assert_eq!((command.cdb(), command.data.len()), (cdb, data_len), "{op:?}");
        if matches!(op, Op::Discard { .. }) {
            assert_eq!(command.data[..8], [0, 22, 0, 16, 0, 0, 0, 0]);
            assert_eq!(command.data[8..], [0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 16, 0, 0, 0, 0]);
        }
        client.status(&command, ScsiStatus::GOOD, None);
        assert!(matches!(client.done(), (9, Ok(Output::Nothing))), "{op:?}");
    }
}

#[test]
fn fua_is_sent_as_a_bit_or_as_a_following_flush() {
    let data = || Some(list(&[7; 512]));
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    client.submit(0, Op::Write { fua: true }, 0, 512, data());
    assert_eq!(client.command().cdb()[..2], [0x8a, 8]);
    let mut client = ScriptedClient::logged_in(WHOLE);
    client.bring_up(&Unit { device_specific: 0, ..Unit::default() });
    client.submit(0, Op::Write { fua: true }, 0, 512, data());
    let command = client.command();
    assert_eq!(command.cdb()[..2], [0x8a, 0]);
    client.status(&command, ScsiStatus::GOOD, None);
    assert!(client.session.poll_done().is_none());
    let flush = client.command();
    assert_eq!(flush.cdb()[0], 0x91);
    client.status(&flush, ScsiStatus::GOOD, None);
    assert!(client.done().1.is_ok());
    let mut client = ScriptedClient::logged_in(WHOLE);
    client.bring_up(&Unit { device_specific: 0, write_cache: false, ..Unit::default() });
    client.submit(0, Op::Write { fua: true }, 0, 512, data());
    let command = client.command();
    client.status(&command, ScsiStatus::GOOD, None);
    assert!(client.done().1.is_ok(), "without a cache every write is stable");
}

#[test]
fn large_io_is_split_into_several_commands() {
    let mut client = ScriptedClient::logged_in(WHOLE);
    client.bring_up(&Unit { max_transfer: 8, max_unmap: 16, ..Unit::default() });
    client.submit(1, Op::Discard { fua: true }, 0, 40 * 512, None);
    let commands = client.sent();
    let counts: Vec<u8> = commands.iter().map(|command| command.data[19]).collect();
    assert_eq!(counts, [16, 16, 8]);
    for command in &commands {
        client.status(command, ScsiStatus::GOOD, None);
    }
    let flush = client.command();
    client.status(&flush, ScsiStatus::GOOD, None);
    assert!(client.done().1.is_ok());
    let data = pattern(25 * 512);
    client.write(2, 0, &data);
    let mut came = vec![0; data.len()];
    let mut commands = client.sent();
    assert_eq!(commands.len(), 4, "no more than four at a time");
    // In any order.
    while let Some(command) = commands.pop() {
        let lba = command.cdb()[9] as usize;
        came[lba * 512..][..command.data.len()].copy_from_slice(&command.data);
        client.status(&command, ScsiStatus::GOOD, None);
    }
    assert!(came == data && client.done().1.is_ok());
    client.read(3, 0, 10 * 512);
    for command in client.sent() {
        let (lba, blocks) = (command.cdb()[9] as usize, command.cdb()[13] as usize);
        client.data(&command, &data[lba * 512..][..blocks * 512]);
    }
    assert!(client.done_data() == data[..10 * 512]);
}

#[test]
fn lba_status_becomes_extents() {
    let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
    client.submit(1, Op::BlockStatus, 4096, 1 << 20, None);
    let command = client.command();
    assert_eq!(command.cdb()[..10], [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 8]);
    let descriptor = |lba: u64, blocks: u32, status: u8| {
        [&lba.to_be_bytes()[..], &blocks.to_be_bytes(), &[status, 0, 0, 0]].concat()
    };
    let data = [&[0, 0, 0, 36, 0, 0, 0, 0][..], &descriptor(0, 16, 0), &descriptor(16, 99, 1)].concat();
    client.data(&command, &data);
    let Ok(Output::Extents(extents)) = client.done().1 else { panic!() };
    let extent = |blocks: u64, is_hole| Extent { len: blocks * 512, hole: is_hole, zero: is_hole };
    assert_eq!(extents, [extent(8, false), extent(99, true)]);
}

#[test]
fn invalid_requests_are_refused_before_they_are_sent() {
    let mut client = ScriptedClient::ready(WHOLE, 8);
    client.read(1, 4096, 512);
    assert_eq!(client.done_error(), IoError::OutOfRange);
    client.submit(1, ZEROES, 100, 512, None);
    assert_eq!(client.done_error(), IoError::Misaligned);
    client.submit(1, Op::Read, 512, 0, None);
    assert!(client.done().1.is_ok() && client.sent().is_empty());
}

#[test]
fn commands_stop_where_the_window_ends() {
    let mut client = ScriptedClient::logged_in(WHOLE);
    client.bring_up(&Unit::default());
    client.read(0, 0, 512);
    client.window = 3;
    let command = client.command();
    client.data(&command, &pattern(512));
    assert!(client.done().1.is_ok());
    // MaxCmdSN does not decrease: permitted commands stay permitted.
    let before = client.session.room();
    assert!(before > 3);
    for n in 0..before as u64 {
        client.read(n, 0, 512);
    }
    assert_eq!((client.session.room(), client.sent().len()), (0, before));
}

#[test]
fn unknown_opcodes_and_tags_end_the_session() {
    for opcode in [0x00, 0x21, 0x23, 0x24, 0x26, 0x31, 0x25, 0x22, 0x3e] {
        let mut client = ScriptedClient::ready(WHOLE, 1 << 20);
        client.read(1, 0, 512);
        let mut pdu = vec![opcode, 0x80];
        pdu.resize(48, 0);
        pdu[16..20].copy_from_slice(&[0, 77, 0, 9]);
        assert!(client.feed(&pdu).is_err(), "{}", IscsiOpcode(opcode));
    }
}
