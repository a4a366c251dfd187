//! Tests of requests and of their results.

use super::script::*;
use crate::driver::session::{Initiator, StreamSession};
use crate::nbd::client::request::ZEROES;
use crate::nbd::client::transmission::WINDOW;
use crate::nbd::client::{DEPTH, HeaderFormat};
use blockmux_volume::{Extent, IoError, Op, Output, Pool, SgList, Tag};
use blockmux_wire::nbd::handshake::*;
use blockmux_wire::nbd::transmission::*;
use std::collections::VecDeque;
use std::time::Instant;

const SIZE: u64 = 1 << 40;
const HAS: u16 = TransmissionFlags::HAS_FLAGS.bits();
const ALL: u16 = TransmissionFlags::HAS_FLAGS.bits()
    | TransmissionFlags::SEND_FLUSH.bits()
    | TransmissionFlags::SEND_FUA.bits()
    | TransmissionFlags::SEND_TRIM.bits()
    | TransmissionFlags::SEND_WRITE_ZEROES.bits()
    | TransmissionFlags::SEND_CACHE.bits()
    | TransmissionFlags::SEND_FAST_ZERO.bits();
const WRITE: Op = Op::Write { fua: false };
const ZEROES_OP: Op = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: false };

/// The requests that are sent, without payload.
fn sent(client: &mut NbdTestClient) -> Vec<ParsedRequest> {
    requests(&client.sent()).into_iter().map(|(request, _)| request).collect()
}

fn ack(client: &mut NbdTestClient, request: ParsedRequest) {
    client.feed(&simple(request.cookie, 0, b"")).unwrap();
}

fn ack_with_data(client: &mut NbdTestClient, request: ParsedRequest) {
    client.feed(&simple(request.cookie, 0, &pattern(request.len as usize))).unwrap();
}

#[test]
fn a_read_request_is_what_a_kernel_client_sends() {
    let mut client = NbdTestClient::ready(HeaderFormat::Simple, SIZE, HAS, 1);
    client.read(0, 0, 4096);
    let captured = b"\x25\x60\x95\x13\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x10\0";
    assert_eq!(client.sent(), captured);
}

#[test]
fn an_extended_write_counts_its_payload() {
    let mut client = NbdTestClient::ready(HeaderFormat::Extended, SIZE, ALL, 1);
    client.submit(0, Op::Write { fua: true }, 512, 1024, Some(list(&pattern(1024))));
    let bytes = client.sent();
    assert_eq!(bytes[..8], [0x21, 0xe4, 0x1c, 0x71, 0, 0x21, 0, 1]);
    assert_eq!(bytes[16..32], [0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 4, 0]);
    assert_eq!(bytes[32..], pattern(1024));
}

#[test]
fn write_payload_is_sent_without_a_copy() {
    let mut client = NbdTestClient::ready(HeaderFormat::Simple, SIZE, HAS, 1);
    let data = list(&pattern(4096));
    let address = data.segs()[0].as_ptr();
    client.submit(0, WRITE, 0, 4096, Some(data));
    let has_it = client.session.outbox().pieces().any(
        |piece| matches!(piece, crate::driver::outbox::OutboxPiece::Payload(seg) if seg.as_ptr() == address),
    );
    assert!(has_it);
}

#[test]
fn each_operation_is_sent_as_its_command_if_the_server_supports_it() {
    let zeroes = |fua, may_unmap, only_fast| Op::WriteZeroes { fua, may_unmap, only_fast };
    for (op, cmd, flags) in [
        (Op::Flush, Cmd::NBD_CMD_FLUSH, 0),
        (Op::Discard { fua: false }, Cmd::NBD_CMD_TRIM, 0),
        (Op::Discard { fua: true }, Cmd::NBD_CMD_TRIM, CmdFlags::FUA.bits()),
        (Op::Prefetch, Cmd::NBD_CMD_CACHE, 0),
        (zeroes(false, true, false), Cmd::NBD_CMD_WRITE_ZEROES, 0),
        (
            zeroes(true, false, false),
            Cmd::NBD_CMD_WRITE_ZEROES,
            CmdFlags::FUA.bits() | CmdFlags::NO_HOLE.bits(),
        ),
        (zeroes(false, true, true), Cmd::NBD_CMD_WRITE_ZEROES, CmdFlags::FAST_ZERO.bits()),
    ] {
        let mut client = NbdTestClient::ready(HeaderFormat::Simple, SIZE, ALL, 1);
        let (offset, len) = if op == Op::Flush { (0, 0) } else { (4096, 8192) };
        client.submit(9, op, offset, len, None);
        let all = sent(&mut client);
        let expected = ParsedRequest { flags, cmd: cmd.0, cookie: all[0].cookie, offset, len };
        assert_eq!(all, [expected], "{op:?}");
        ack(&mut client, all[0]);
        assert!(matches!(client.done(), (9, Ok(Output::Nothing))), "{op:?}");
    }
}

#[test]
fn missing_features_of_a_plain_server_are_emulated_or_refused() {
    let only_fast = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: true };
    for flags in [HAS, ALL & !TransmissionFlags::SEND_FAST_ZERO.bits()] {
        let mut client = NbdTestClient::ready(HeaderFormat::Simple, SIZE, flags, 1);
        client.submit(0, only_fast, 0, 512, None);
        assert_eq!(client.done_error(), IoError::Unsupported);
    }
    let mut client = NbdTestClient::ready(HeaderFormat::Simple, SIZE, HAS, 1);
    for op in [Op::Flush, Op::Discard { fua: true }, Op::Prefetch] {
        let len = if op == Op::Flush { 0 } else { 512 };
        client.submit(0, op, 0, len, None);
        assert!(matches!(client.done(), (0, Ok(Output::Nothing))), "{op:?}");
    }
    client.submit(0, Op::BlockStatus, 0, 1 << 20, None);
    let Ok(Output::Extents(extents)) = client.done().1 else { panic!() };
    assert_eq!(extents, [Extent { len: 1 << 20, hole: false, zero: false }]);
    assert_eq!(sent(&mut client), []);
}

#[test]
fn requests_of_no_length_are_not_sent() {
    let mut client = NbdTestClient::ready(HeaderFormat::Extended, SIZE, ALL, 1);
    for op in [Op::Read, ZEROES_OP, Op::Discard { fua: false }, Op::BlockStatus] {
        client.submit(0, op, 512, 0, None);
        assert!(client.done().1.is_ok());
    }
    client.submit(0, WRITE, 512, 0, Some(SgList::default()));
    assert!(client.done().1.is_ok());
    assert_eq!(sent(&mut client), []);
}

#[test]
fn invalid_requests_are_refused_before_they_are_sent() {
    let mut client =
        NbdTestClient::ready(HeaderFormat::Simple, 1 << 20, ALL | TransmissionFlags::READ_ONLY.bits(), 1);
    for (op, offset, len, expected) in [
        (Op::Read, 1 << 20, 512, IoError::OutOfRange),
        (Op::Read, 100, 512, IoError::Misaligned),
        (WRITE, 0, 512, IoError::ReadOnly),
        (Op::Discard { fua: false }, 0, 512, IoError::ReadOnly),
        (ZEROES_OP, 0, 512, IoError::ReadOnly),
    ] {
        client.submit(0, op, offset, len, None);
        assert_eq!(client.done_error(), expected, "{op:?}");
    }
    assert_eq!(sent(&mut client), []);
}

#[test]
fn fua_without_fua_is_a_write_and_then_a_flush() {
    let mut client =
        NbdTestClient::ready(HeaderFormat::Simple, SIZE, HAS | TransmissionFlags::SEND_FLUSH.bits(), 1);
    client.submit(0, Op::Write { fua: true }, 0, 512, Some(list(&[1; 512])));
    let write = sent(&mut client);
    assert_eq!((write.len(), write[0].cmd, write[0].flags), (1, 1, 0));
    ack(&mut client, write[0]);
    client.assert_nothing_done();
    let flush = sent(&mut client);
    assert_eq!((flush.len(), flush[0].cmd, flush[0].len), (1, 3, 0));
    client.feed(&simple(flush[0].cookie, 5, b"")).unwrap();
    assert_eq!(client.done_error(), IoError::Medium);

    client.submit(0, Op::Write { fua: true }, 0, 512, Some(list(&[1; 512])));
    let write = sent(&mut client);
    client.feed(&simple(write[0].cookie, 28, b"")).unwrap();
    assert_eq!(client.done_error(), IoError::NoSpace, "without a flush");
    assert_eq!(sent(&mut client), []);
}

#[test]
fn zeroes_are_written_as_data_if_the_server_lacks_write_zeroes() {
    let mut client =
        NbdTestClient::ready(HeaderFormat::Simple, SIZE, HAS | TransmissionFlags::SEND_FLUSH.bits(), 1);
    let len = u64::from(ZEROES) * 6 + 512;
    let op = Op::WriteZeroes { fua: true, may_unmap: true, only_fast: false };
    client.submit(0, op, 4096, len, None);
    let (mut at, mut in_flight) = (4096, VecDeque::new());
    while at < 4096 + len || !in_flight.is_empty() {
        for (request, payload) in requests(&client.sent()) {
            assert_eq!((request.cmd, request.offset), (1, at));
            assert!(payload.iter().all(|byte| *byte == 0));
            at += payload.len() as u64;
            in_flight.push_back(request);
        }
        assert!(in_flight.len() <= WINDOW as usize);
        ack(&mut client, in_flight.pop_front().unwrap());
    }
    assert_eq!(at, 4096 + len);
    let flush = sent(&mut client);
    assert_eq!(flush[0].cmd, 3);
    ack(&mut client, flush[0]);
    assert!(client.done().1.is_ok());
}

#[test]
fn more_than_the_servers_payload_is_several_requests_and_one_completion() {
    for headers in [HeaderFormat::Simple, HeaderFormat::Structured, HeaderFormat::Extended] {
        let infos = [info_export(SIZE, HAS), info_block_size(512, 4096, 4608)];
        let mut client = NbdTestClient::ready_with(headers, &infos, 1000, Pool::new(1 << 20));
        let data = pattern(10 * 4608 + 512);
        for buffer in [Some(list(&vec![0; data.len()])), None] {
            client.submit(0, Op::Read, 512, data.len() as u64, buffer);
            let mut waiting = sent(&mut client);
            let mut count = 0;
            while let Some(request) = waiting.pop() {
                assert!(request.len <= 4608 && waiting.len() < WINDOW as usize);
                client.assert_nothing_done();
                let from = (request.offset - 512) as usize;
                let piece = &data[from..from + request.len as usize];
                let reply = match headers {
                    HeaderFormat::Simple => simple(request.cookie, 0, piece),
                    _ => {
                        let kind = ReplyType::NBD_REPLY_TYPE_OFFSET_DATA;
                        chunk(headers, request, true, kind, &at(request.offset, piece))
                    }
                };
                client.feed(&reply).unwrap();
                waiting.extend(sent(&mut client));
                count += 1;
            }
            assert_eq!(count, 11);
            assert!(client.done_data() == data);
        }
    }
}

#[test]
fn a_piece_that_fails_ends_the_whole_after_those_in_flight() {
    let infos = [info_export(SIZE, HAS), info_block_size(512, 4096, 4096)];
    let mut client = NbdTestClient::ready_with(HeaderFormat::Simple, &infos, 1, Pool::new(1 << 20));
    client.submit(0, WRITE, 0, 10 * 4096, Some(list(&pattern(10 * 4096))));
    let bytes = client.sent();
    let pieces = requests(&bytes);
    assert_eq!(pieces.len(), WINDOW as usize);
    let payload: Vec<u8> = pieces.iter().flat_map(|(_, payload)| payload.clone()).collect();
    assert!(payload == pattern(4 * 4096));
    client.feed(&simple(pieces[1].0.cookie, 28, b"")).unwrap();
    client.feed(&simple(pieces[0].0.cookie, 0, b"")).unwrap();
    client.feed(&simple(pieces[3].0.cookie, 5, b"")).unwrap();
    client.assert_nothing_done();
    client.feed(&simple(pieces[2].0.cookie, 0, b"")).unwrap();
    assert_eq!(client.done_error(), IoError::NoSpace, "the first error");
    assert_eq!(sent(&mut client), []);
}

#[test]
fn lengths_beyond_31_bits_are_cut_for_compact_requests_only() {
    let len = 7 << 30;
    let mut client = NbdTestClient::ready(HeaderFormat::Structured, SIZE, ALL, 1);
    client.submit(0, ZEROES_OP, 4096, len, None);
    let all = sent(&mut client);
    let mut at = 4096;
    for request in &all {
        assert_eq!(request.offset, at);
        assert!(i32::try_from(request.len).is_ok());
        at += request.len;
    }
    assert_eq!((all.len(), at), (4, 4096 + len));
    let only_fast = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: true };
    client.submit(1, only_fast, 0, len, None);
    assert_eq!(client.done_error(), IoError::Unsupported, "a part of the request cannot be undone");
    client.submit(2, Op::BlockStatus, 0, len, None);
    assert_eq!(sent(&mut client)[0].len, super::super::request::MAX_COMPACT_EFFECT);

    let mut client = NbdTestClient::ready(HeaderFormat::Extended, SIZE, ALL, 1);
    client.submit(0, only_fast, 0, len, None);
    client.submit(1, Op::BlockStatus, 0, len, None);
    assert_eq!(sent(&mut client).iter().map(|r| r.len).collect::<Vec<_>>(), [len, len]);
}

#[test]
fn long_requests_are_split_at_the_servers_maximum_payload() {
    let infos = [info_export(SIZE, ALL), info_block_size(512, 4096, 1 << 20)];
    for (op, errno) in [
        (ZEROES_OP, Errno::NBD_EOVERFLOW),
        (ZEROES_OP, Errno::NBD_EINVAL),
        (Op::Discard { fua: false }, Errno::NBD_EOVERFLOW),
    ] {
        let mut client = NbdTestClient::ready_with(HeaderFormat::Simple, &infos, 1, Pool::new(1 << 20));
        client.submit(0, op, 4096, (6 << 20) + 512, None);
        let whole = sent(&mut client);
        assert_eq!((whole.len(), whole[0].len), (1, (6 << 20) + 512));
        client.feed(&simple(whole[0].cookie, errno.0, b"")).unwrap();
        let mut at = 4096;
        while client.session.poll_done().is_none() {
            let request = sent(&mut client);
            let pieces: Vec<_> = request.iter().map(|piece| (piece.offset, piece.len)).collect();
            for (offset, len) in pieces {
                assert_eq!((offset, len <= 1 << 20), (at, true), "{op:?}");
                at += len;
            }
            request.into_iter().for_each(|piece| ack(&mut client, piece));
        }
        assert_eq!(at, 4096 + (6 << 20) + 512);
    }
}

#[test]
fn a_piece_that_is_refused_within_the_maximum_payload_is_refused() {
    let infos = [info_export(SIZE, ALL), info_block_size(512, 4096, 1 << 20)];
    let only_fast = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: true };
    for (op, len, errno, error) in [
        (ZEROES_OP, 1 << 20, Errno::NBD_EINVAL, IoError::Unsupported),
        (ZEROES_OP, 2 << 20, Errno::NBD_EIO, IoError::Medium),
        (only_fast, 2 << 20, Errno::NBD_ENOTSUP, IoError::Unsupported),
        (only_fast, 2 << 20, Errno::NBD_EOVERFLOW, IoError::Unsupported),
    ] {
        let mut client = NbdTestClient::ready_with(HeaderFormat::Simple, &infos, 1, Pool::new(1 << 20));
        client.submit(0, op, 0, len, None);
        let request = sent(&mut client)[0];
        client.feed(&simple(request.cookie, errno.0, b"")).unwrap();
        assert_eq!(client.done_error(), error, "{op:?} {errno}");
        assert_eq!(sent(&mut client), []);
    }
}

#[test]
fn without_block_status_everything_is_data() {
    let infos = [info_export(SIZE, ALL), info_block_size(512, 4096, 1 << 20)];
    for errno in [Errno::NBD_EOVERFLOW, Errno::NBD_EINVAL, Errno::NBD_ENOTSUP] {
        let mut client = NbdTestClient::ready_with(HeaderFormat::Structured, &infos, 1, Pool::new(1 << 20));
        client.submit(0, Op::BlockStatus, 0, 2 << 20, None);
        for len in [2 << 20, 1 << 20] {
            let request = sent(&mut client)[0];
            assert_eq!(request.len, len, "shorter when too long");
            let error = ReplyType::NBD_REPLY_TYPE_ERROR;
            let reply = chunk(HeaderFormat::Structured, request, true, error, &failure(errno.0, ""));
            client.feed(&reply).unwrap();
        }
        let Ok(Output::Extents(extents)) = client.done().1 else { panic!("{errno}") };
        assert_eq!(extents, [Extent { len: 2 << 20, hole: false, zero: false }]);
    }
    let mut client = NbdTestClient::ready_with(HeaderFormat::Structured, &infos, 1, Pool::new(1 << 20));
    client.submit(0, Op::BlockStatus, 0, 2 << 20, None);
    let request = sent(&mut client)[0];
    client.feed(&simple(request.cookie, Errno::NBD_EIO.0, b"")).unwrap();
    assert_eq!(client.done_error(), IoError::Medium);
}

#[test]
fn a_failed_cache_hint_is_ignored() {
    let mut client = NbdTestClient::ready(HeaderFormat::Simple, SIZE, ALL, 1);
    client.submit(0, Op::Prefetch, 0, 512, None);
    let request = sent(&mut client)[0];
    client.feed(&simple(request.cookie, 22, b"")).unwrap();
    assert!(client.done().1.is_ok());
}

#[test]
fn room_is_limited_until_completions_are_taken() {
    let mut client = NbdTestClient::ready(HeaderFormat::Simple, SIZE, ALL, usize::MAX);
    for tag in 0..DEPTH as u64 {
        assert_eq!(client.session.room(), DEPTH - tag as usize);
        client.submit(tag, ZEROES_OP, 0, 512, None);
    }
    assert_eq!(client.session.room(), 0);
    for request in sent(&mut client) {
        ack(&mut client, request);
    }
    assert_eq!(client.session.room(), 0, "completions count until they are taken");
    assert!(client.session.poll_done().is_some());
    assert_eq!(client.session.room(), 1);
}

#[test]
fn unfinished_requests_are_returned_complete_and_oldest_first() {
    let infos = [info_export(SIZE, ALL), info_block_size(512, 4096, 4096)];
    let mut client = NbdTestClient::ready_with(HeaderFormat::Simple, &infos, 1, Pool::new(1 << 20));
    for tag in 10..20 {
        client.submit(tag, WRITE, 0, 8192, Some(list(&[tag as u8; 8192])));
    }
    let all = sent(&mut client);
    // 13 is done, of 12 a half; their slots go to 20 and 21.
    for index in [6, 7, 5] {
        ack(&mut client, all[index]);
    }
    client.read(20, 0, 512);
    client.read(21, 0, 512);
    let request = sent(&mut client)[0];
    client.feed(&simple(request.cookie, 0, b"")[..10]).unwrap();
    assert!(client.session.on_end(Instant::now()).is_err());
    let unfinished = client.session.take_unfinished();
    let tags: Vec<_> = unfinished.iter().map(|io| io.tag.0).collect();
    assert_eq!(tags, [10, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21]);
    assert_eq!(unfinished[2].data.as_ref().unwrap().to_vec(), [12; 8192]);
    assert_eq!(client.session.poll_done().unwrap().tag, Tag(13), "the completion remains available");
    assert!(client.session.poll_done().is_none() && client.session.outbox().is_empty());
    assert!(client.is_closing() && client.session.room() == 0);
}

#[test]
fn requests_refused_during_a_shutdown_are_retained_for_the_next_session() {
    let mut client = NbdTestClient::ready(HeaderFormat::Simple, SIZE, ALL, 1);
    for tag in 0..3 {
        client.read(tag, 512 * tag, 512);
    }
    let all = sent(&mut client);
    client.feed(&simple(all[1].cookie, 108, b"")).unwrap();
    client.assert_nothing_done();
    assert!(client.session.room() == 0 && !client.is_closing());
    client.feed(&simple(all[0].cookie, 0, &[1; 512])).unwrap();
    assert_eq!(client.done_data(), [1; 512]);
    assert_eq!(sent(&mut client), [], "no NBD_CMD_DISC with a request in flight");
    client.feed(&simple(all[2].cookie, 108, b"")).unwrap();
    assert_eq!(sent(&mut client)[0].cmd, 2);
    assert!(client.is_closing());
    assert_eq!(client.session.on_end(Instant::now()), Ok(()));
    let tags: Vec<_> = client.session.take_unfinished().iter().map(|io| io.tag.0).collect();
    assert_eq!(tags, [1, 2]);
}

#[test]
fn stopping_waits_for_what_is_in_flight_and_then_disconnects() {
    let mut client = NbdTestClient::ready(HeaderFormat::Extended, SIZE, ALL, 1);
    client.submit(0, WRITE, 0, 512, Some(list(&[0; 512])));
    client.read(1, 0, 512);
    let all = sent(&mut client);
    client.session.on_stop();
    assert!(client.session.room() == 0 && !client.is_closing() && client.sent().is_empty());
    let done = ReplyType::NBD_REPLY_TYPE_NONE;
    client.feed(&chunk(HeaderFormat::Extended, all[0], true, done, b"")).unwrap();
    assert!(client.done().1.is_ok());
    let error = ReplyType::NBD_REPLY_TYPE_ERROR;
    client.feed(&chunk(HeaderFormat::Extended, all[1], true, error, &failure(108, ""))).unwrap();
    assert_eq!(client.done_error(), IoError::ShuttingDown, "the request is not replayed");
    let last = sent(&mut client);
    assert_eq!((last.len(), last[0].cmd, last[0].offset, last[0].len), (1, 2, 0, 0));
    assert!(client.is_closing());
    assert_eq!(client.session.on_end(Instant::now()), Ok(()));

    let mut idle = NbdTestClient::ready(HeaderFormat::Simple, SIZE, ALL, 1);
    assert_eq!(
        idle.session.on_end(Instant::now()),
        Ok(()),
        "a server may disconnect when no request is in flight"
    );
    idle.session.on_stop();
    idle.session.on_stop();
    assert_eq!(sent(&mut idle).len(), 1, "NBD_CMD_DISC is sent once");
}

#[test]
fn stopping_completes_requests_retained_for_another_session() {
    let mut client = NbdTestClient::ready(HeaderFormat::Simple, SIZE, ALL, 1);
    client.read(0, 0, 512);
    client.read(1, 0, 512);
    let all = sent(&mut client);
    client.feed(&simple(all[0].cookie, 108, b"")).unwrap();
    client.session.on_stop();
    assert_eq!(client.done_error(), IoError::ShuttingDown);
    client.feed(&simple(all[1].cookie, 0, &[1; 512])).unwrap();
    assert_eq!(client.done_data(), [1; 512]);
    assert!(client.is_closing() && client.session.take_unfinished().is_empty());
}

/// A session whose pool has room for one long read at a time.
fn with_little_memory() -> NbdTestClient {
    let pool = Pool::new(1 << 20);
    NbdTestClient::ready_with(HeaderFormat::Simple, &[info_export(SIZE, HAS)], usize::MAX, pool)
}

#[test]
fn long_reads_wait_for_memory_before_they_are_sent_and_others_pass_them() {
    let mut client = with_little_memory();
    (0..3).for_each(|tag| client.read(tag, tag << 20, 512 << 10));
    client.read(3, 0, 4096);
    let first = sent(&mut client);
    assert_eq!(first.iter().map(|request| request.len).collect::<Vec<_>>(), [512 << 10, 4096]);
    ack_with_data(&mut client, first[1]);
    assert_eq!(client.done_data().len(), 4096);
    assert_eq!(sent(&mut client), [], "the pool is empty");

    ack_with_data(&mut client, first[0]);
    let held = client.session.poll_done().unwrap();
    let second = sent(&mut client);
    assert_eq!(second.len(), 1, "a single request does not wait");
    drop(held);
    ack_with_data(&mut client, second[0]);
    assert_eq!(client.done_data().len(), 512 << 10);
    let third = sent(&mut client);
    ack_with_data(&mut client, third[0]);
    assert_eq!(client.done_data().len(), 512 << 10);
}

#[test]
fn requests_waiting_for_memory_are_unfinished_and_oldest_first() {
    let mut client = with_little_memory();
    (0..3).for_each(|tag| client.read(tag, tag << 20, 512 << 10));
    let unfinished = client.session.take_unfinished();
    assert_eq!(unfinished.iter().map(|io| io.tag.0).collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn requests_waiting_for_memory_complete_before_a_stop_and_are_retained_at_a_shutdown() {
    let mut client = with_little_memory();
    (0..2).for_each(|tag| client.read(tag, tag << 20, 512 << 10));
    client.session.on_stop();
    for _ in 0..2 {
        let request = sent(&mut client)[0];
        ack_with_data(&mut client, request);
        assert_eq!(client.done_data().len(), 512 << 10);
    }
    assert_eq!(sent(&mut client)[0].cmd, Cmd::NBD_CMD_DISC.0);

    for is_stopped_too in [false, true] {
        let mut client = with_little_memory();
        (0..2).for_each(|tag| client.read(tag, tag << 20, 512 << 10));
        client.read(2, 0, 512);
        let all = sent(&mut client);
        client.feed(&simple(all[0].cookie, Errno::NBD_ESHUTDOWN.0, b"")).unwrap();
        assert_eq!(sent(&mut client), [], "the server gets no further request");
        if is_stopped_too {
            client.session.on_stop();
            for _ in 0..2 {
                let done = client.session.poll_done().unwrap();
                assert_eq!(done.result.unwrap_err(), IoError::ShuttingDown);
            }
        }
        ack_with_data(&mut client, all[1]);
        assert_eq!(client.done_data().len(), 512);
        assert_eq!(sent(&mut client)[0].cmd, Cmd::NBD_CMD_DISC.0);
        assert_eq!(client.session.take_unfinished().len(), if is_stopped_too { 0 } else { 2 });
    }
}

#[test]
fn memory_and_tables_do_not_grow_with_the_number_of_requests() {
    let mut client = NbdTestClient::ready(HeaderFormat::Simple, SIZE, ALL, usize::MAX);
    let mut slots = std::collections::BTreeSet::new();
    for round in 0..1000 {
        client.read(round, 0, 512);
        let request = sent(&mut client)[0];
        slots.insert(request.cookie as u32);
        client.feed(&simple(request.cookie, 0, &[0; 512])).unwrap();
        assert_eq!(client.done_data(), [0; 512]);
    }
    assert_eq!(slots.len(), 1, "one slot is used a thousand times");
}
