//! Transmission, request by request.

use super::*;
use std::time::Instant;

#[test]
fn written_data_is_read_in_every_format() {
    let data = pattern(4096);
    let mut session = transmit(&[]);
    assert_eq!(session.exchange(&write(8192, &data)), simple(0));
    let answer = session.exchange(&request(Cmd::NBD_CMD_READ, 0, 8192, 4096));
    assert_eq!(answer, join(&[&simple(0), &data]));

    let mut session = structured();
    assert_eq!(session.exchange(&write(8192, &data)), simple(0));
    let payload = join(&[&8192u64.to_be_bytes(), &data]);
    for flags in [0, CmdFlags::DF.bits()] {
        let answer = session.exchange(&request(Cmd::NBD_CMD_READ, flags, 8192, 4096));
        assert_eq!(answer, chunk(ReplyType::NBD_REPLY_TYPE_OFFSET_DATA, &payload));
    }

    let mut session = extended();
    let head = ext_request(Cmd::NBD_CMD_WRITE, CmdFlags::PAYLOAD_LEN.bits(), 8192, 4096);
    let done = ext_chunk(ReplyType::NBD_REPLY_TYPE_NONE, 8192, b"");
    assert_eq!(session.exchange(&join(&[&head, &data])), done);
    let answer = session.exchange(&ext_request(Cmd::NBD_CMD_READ, 0, 8192, 4096));
    assert_eq!(answer, ext_chunk(ReplyType::NBD_REPLY_TYPE_OFFSET_DATA, 8192, &payload));
}

#[test]
fn an_error_reply_has_the_negotiated_format() {
    let mut session = transmit(&[]);
    assert_eq!(session.exchange(&request(Cmd::NBD_CMD_READ, 0, SIZE, 512)), simple(22));
    let payload = error_payload(Errno::NBD_EINVAL, "outside the volume");
    let answer = structured().exchange(&request(Cmd::NBD_CMD_READ, 0, SIZE, 512));
    assert_eq!(answer, chunk(ReplyType::NBD_REPLY_TYPE_ERROR, &payload));
    let answer = extended().exchange(&ext_request(Cmd::NBD_CMD_READ, 0, SIZE, 512));
    assert_eq!(answer, ext_chunk(ReplyType::NBD_REPLY_TYPE_ERROR, SIZE, &payload));
}

#[test]
fn a_request_of_no_bytes_succeeds_without_data() {
    let none = chunk(ReplyType::NBD_REPLY_TYPE_NONE, b"");
    assert_eq!(transmit(&[]).exchange(&request(Cmd::NBD_CMD_READ, 0, 512, 0)), simple(0));
    assert_eq!(structured().exchange(&request(Cmd::NBD_CMD_READ, 0, 512, 0)), none);
    for command in [Cmd::NBD_CMD_WRITE, Cmd::NBD_CMD_TRIM, Cmd::NBD_CMD_CACHE, Cmd::NBD_CMD_WRITE_ZEROES] {
        let mut session = transmit(&[]);
        session.holds_io = true;
        assert_eq!(session.exchange(&request(command, 0, 512, 0)), simple(0), "{command}");
    }
}

#[test]
fn commands_reach_the_volume_as_operations_with_their_range() {
    let mut session = transmit(&[]);
    session.holds_io = true;
    let fua = CmdFlags::FUA.bits();
    session.exchange(&join(&[
        &request(Cmd::NBD_CMD_FLUSH, fua, 0, 0),
        &request(Cmd::NBD_CMD_TRIM, fua, 65536, 131_072),
        &request(Cmd::NBD_CMD_CACHE, 0, 512, 1024),
        &request(Cmd::NBD_CMD_WRITE_ZEROES, CmdFlags::FAST_ZERO.bits(), 0, 67_108_864),
        &request(Cmd::NBD_CMD_WRITE, fua, 512, 512),
        &[9; 512],
    ]));
    let ops: Vec<_> = session.submitted.iter().map(|(_, io)| (io.op, io.offset, io.len)).collect();
    let zeroes = Op::WriteZeroes { fua: false, may_unmap: true, only_fast: true };
    let expected = [
        (Op::Flush, 0, 0),
        (Op::Discard { fua: true }, 65536, 131_072),
        (Op::Prefetch, 512, 1024),
        (zeroes, 0, 67_108_864),
        (Op::Write { fua: true }, 512, 512),
    ];
    assert_eq!(ops, expected);
}

#[test]
fn short_payload_is_borrowed_and_never_copied() {
    let mut session = transmit(&[]).session;
    let input = blockmux_volume::Chunk::from_slice(&write(0, &pattern(512)).repeat(3));
    assert_eq!(session.on_bytes(&input, Instant::now()), Ok(3 * 540));
    for nth in 0..3 {
        let (_, io) = session.poll_io().unwrap();
        let data = io.data.unwrap();
        assert_eq!(data.segs()[0].as_ptr(), input.slice(540 * nth + 28, 512).as_ptr());
    }
}

#[test]
fn long_payload_that_has_arrived_completely_is_borrowed_too() {
    let mut session = transmit(&[]);
    let data = pattern(200 << 10);
    assert_eq!(session.exchange(&write(0, &data)), simple(0));
    assert_eq!(session.placed, 0);
    let answer = session.exchange(&request(Cmd::NBD_CMD_READ, 0, 0, 200 << 10));
    assert!(answer[16..] == data);
}

#[test]
fn long_payload_is_placed_wherever_the_receive_buffer_ended() {
    let data = pattern(100 << 10);
    let whole = write(4096, &data);
    for cut in [28, 29, 28 + 512, whole.len() - 1] {
        let mut session = transmit(&[]);
        assert_eq!(session.exchange(&whole[..cut]), b"");
        let Demand::Place(list) = session.session.demand() else { panic!("no memory is demanded at {cut}") };
        assert_eq!(list.len(), data.len());
        assert_eq!(session.exchange(&whole[cut..]), simple(0));
        assert_eq!(session.placed, 1);
        let answer = session.exchange(&request(Cmd::NBD_CMD_READ, 0, 4096, 100 << 10));
        assert!(answer[16..] == data, "cut at {cut}");
    }
}

#[test]
fn long_payload_waits_for_the_pool() {
    let pool = Pool::new(192 << 10);
    let mut session = connect_with(&pool, Instant::now());
    session.exchange(&join(&[&FLAGS, &option(Opt::NBD_OPT_GO, &info_data("", &[]))]));
    let taken = pool.take_payload(32 << 10).unwrap();
    let whole = write(0, &pattern(100 << 10));
    session.client_sends(&whole[..1000]).unwrap();
    assert!(is_deaf(&session));

    let now = Instant::now();
    let first = session.session.poll_timeout().expect("the pool is asked again");
    session.session.on_timeout(first.max(now)).unwrap();
    assert!(is_deaf(&session));
    let second = session.session.poll_timeout().expect("and again");
    assert!(second > now);
    drop(taken);
    session.session.on_timeout(second).unwrap();
    assert_eq!(session.session.poll_timeout(), None);
    assert_eq!(session.exchange(&whole[1000..]), simple(0));
    assert_eq!(pool.out_bytes(), 0);
    let answer = session.exchange(&request(Cmd::NBD_CMD_READ, 0, 0, 100 << 10));
    assert!(answer[16..] == pattern(100 << 10));
}

#[test]
fn waiting_payload_requests_memory_less_and_less_often() {
    let pool = Pool::new(192 << 10);
    let mut session = connect_with(&pool, Instant::now());
    session.exchange(&join(&[&FLAGS, &option(Opt::NBD_OPT_GO, &info_data("", &[]))]));
    let whole = write(0, &pattern(100 << 10));
    for _ in 0..2 {
        let taken = pool.take_payload(32 << 10).unwrap();
        session.client_sends(&whole[..1000]).unwrap();
        let mut asked = session.session.poll_timeout().unwrap();
        let pauses: Vec<u128> = (0..10)
            .map(|_| {
                session.session.on_timeout(asked).unwrap();
                let next = session.session.poll_timeout().unwrap();
                let pause = next - asked;
                asked = next;
                pause.as_millis()
            })
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 128, 128]);
        drop(taken);
        session.session.on_timeout(asked).unwrap();
        assert_eq!(session.exchange(&whole[1000..]), simple(0));
    }
}

#[test]
fn a_completion_gives_memory_to_the_payload_that_waits() {
    let pool = Pool::new(192 << 10);
    let mut session = connect_with(&pool, Instant::now());
    session.exchange(&join(&[&FLAGS, &option(Opt::NBD_OPT_GO, &info_data("", &[]))]));
    session.holds_io = true;
    let whole = write(0, &pattern(100 << 10));
    session.client_sends(&whole[..100]).unwrap();
    session.client_sends(&whole[100..]).unwrap();
    session.client_sends(&whole[..100]).unwrap();
    assert!(is_deaf(&session));
    session.finish_one();
    assert!(!is_deaf(&session));
    session.client_sends(&whole[100..]).unwrap();
    session.finish_one();
    assert_eq!(session.sent(), simple(0).repeat(2));
}

#[test]
fn payload_that_no_pool_could_hold_is_refused() {
    let pool = Pool::new(64 << 10);
    let mut session = connect_with(&pool, Instant::now());
    session.exchange(&join(&[&FLAGS, &option(Opt::NBD_OPT_GO, &info_data("", &[]))]));
    let whole = write(0, &pattern(100 << 10));
    session.client_sends(&whole[..100]).unwrap();
    assert_eq!(session.exchange(&whole[100..]), simple(Errno::NBD_ENOMEM.0));
}

#[test]
fn a_refused_write_is_answered_behind_its_payload() {
    let whole = write(SIZE - 512, &pattern(1024));
    for step in [1, 100, usize::MAX] {
        let mut session = transmit(&[]).split_at(step);
        assert_eq!(session.exchange(&whole[..whole.len() - 1]), b"");
        let rest = join(&[&whole[whole.len() - 1..], &request(Cmd::NBD_CMD_FLUSH, 0, 0, 0)]);
        assert_eq!(session.exchange(&rest), join(&[&simple(28), &simple(0)]));
    }
}

#[test]
fn a_read_only_export_cannot_be_written() {
    let mut session = haggle();
    session.exchange(&option(Opt::NBD_OPT_GO, &info_data("frozen", &[])));
    assert_eq!(session.exchange(&write(0, &[1; 512])), simple(Errno::NBD_EPERM.0));
    assert_eq!(session.exchange(&request(Cmd::NBD_CMD_TRIM, 0, 0, 512)), simple(Errno::NBD_EPERM.0));
    let answer = session.exchange(&request(Cmd::NBD_CMD_READ, 0, 0, 512));
    assert_eq!(answer, join(&[&simple(0), &[0; 512]]));
}

#[test]
fn bytes_that_are_not_a_request_end_the_session() {
    assert!(transmit(&[]).client_sends(&[0; 28]).is_err(), "wrong magic number");
    assert!(extended().client_sends(&join(&[&request(Cmd::NBD_CMD_READ, 0, 0, 512), &[0; 4]])).is_err());
    let huge = request(Cmd::NBD_CMD_WRITE, 0, 0, (64 << 20) + 1);
    assert!(transmit(&[]).client_sends(&huge).is_err(), "payload above the maximum");
    let huge = ext_request(Cmd(77), CmdFlags::PAYLOAD_LEN.bits(), 0, u64::MAX);
    assert!(extended().client_sends(&huge).is_err(), "payload above the maximum");
}

#[test]
fn payload_of_a_command_that_has_none_is_skipped() {
    for command in [Cmd::NBD_CMD_READ, Cmd::NBD_CMD_TRIM, Cmd::NBD_CMD_FLUSH, Cmd(77)] {
        let head = ext_request(command, CmdFlags::PAYLOAD_LEN.bits(), 0, 512);
        let mut session = extended();
        let answer =
            session.exchange(&join(&[&head, &[0x21; 512], &ext_request(Cmd::NBD_CMD_FLUSH, 0, 0, 0)]));
        let flushed = ext_chunk(ReplyType::NBD_REPLY_TYPE_NONE, 0, b"");
        let refused = answer.strip_suffix(&flushed[..]).expect("the next request is answered");
        assert_eq!(refused[6..8], ReplyType::NBD_REPLY_TYPE_ERROR.0.to_be_bytes(), "{command}");
        assert_eq!(refused[32..36], Errno::NBD_EINVAL.0.to_be_bytes(), "{command}");
    }
}

#[test]
fn block_status_distinguishes_data_from_holes() {
    let mut session = structured();
    session.exchange(&write(65536, &pattern(512)));
    let id = [0, 0, 0, 1];
    let hole = b"\0\x01\0\0\0\0\0\x03";
    let data = b"\0\x01\0\0\0\0\0\0";
    let rest = b"\0\0\x10\0\0\0\0\x03";
    let answer = session.exchange(&request(Cmd::NBD_CMD_BLOCK_STATUS, 0, 0, 131_072 + 4096));
    let status = ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS;
    assert_eq!(answer, chunk(status, &join(&[&id, hole, data, rest])));
    let answer = session.exchange(&request(Cmd::NBD_CMD_BLOCK_STATUS, CmdFlags::REQ_ONE.bits(), 0, 131_072));
    assert_eq!(answer, chunk(status, &join(&[&id, hole])));
}

#[test]
fn extended_block_status_has_64_bit_descriptors() {
    let mut session = extended();
    let answer = session.exchange(&ext_request(Cmd::NBD_CMD_BLOCK_STATUS, 0, 4096, SIZE - 4096));
    let whole = join(&[b"\0\0\0\x01\0\0\0\x01", &(SIZE - 4096).to_be_bytes(), &3u64.to_be_bytes()]);
    assert_eq!(answer, ext_chunk(ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS_EXT, 4096, &whole));
}

#[test]
fn block_status_can_name_its_contexts_in_a_payload() {
    let query = |payload: &[u8]| {
        let flags = CmdFlags::PAYLOAD_LEN.bits() | CmdFlags::REQ_ONE.bits();
        join(&[&ext_request(Cmd::NBD_CMD_BLOCK_STATUS, flags, 0, payload.len() as u64), payload])
    };
    let length = 65536u64.to_be_bytes();
    let (one, two) = ([0, 0, 0, 1], [0, 0, 0, 2]);
    let status = ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS_EXT;
    let error = ReplyType::NBD_REPLY_TYPE_ERROR;
    let too_long = (SIZE + 512).to_be_bytes();
    let table: [(Vec<u8>, ReplyType); 7] = [
        (join(&[&length, &one]), status),
        (length.to_vec(), ReplyType::NBD_REPLY_TYPE_NONE),
        (join(&[&length, &two]), error),
        (join(&[&length, &one, &one]), error),
        (join(&[&too_long, &one]), error),
        (too_long.to_vec(), error),
        (b"short".to_vec(), error),
    ];
    for (payload, expected) in table {
        for step in [1, usize::MAX] {
            let answer = extended().split_at(step).exchange(&query(&payload));
            assert_eq!(answer[6..8], expected.0.to_be_bytes(), "{payload:?}");
        }
    }
    // Without a selected context the payload form is not offered.
    let answer = transmit(&[Opt::NBD_OPT_EXTENDED_HEADERS]).exchange(&query(&join(&[&length, &one])));
    assert_eq!(answer[6..8], error.0.to_be_bytes());
}

#[test]
fn a_device_error_is_eio_and_the_session_continues() {
    let mut session = transmit(&[]);
    session.holds_io = true;
    session.exchange(&request(Cmd::NBD_CMD_READ, 0, 0, 512));
    let (_, io) = session.submitted.pop_front().unwrap();
    session.session.on_io(Completion { tag: io.tag, result: Err(IoError::Medium) }, Instant::now());
    assert_eq!(session.sent(), simple(5));
    session.holds_io = false;
    assert_eq!(session.exchange(&request(Cmd::NBD_CMD_FLUSH, 0, 0, 0)), simple(0));
}

#[test]
fn a_wrong_result_of_a_volume_does_not_desynchronize_a_client() {
    let short = || Output::Data(blockmux_volume::Seg::from_slice(b"short").into());
    for (command, output) in [
        (Cmd::NBD_CMD_READ, Output::Nothing),
        (Cmd::NBD_CMD_READ, short()),
        (Cmd::NBD_CMD_TRIM, short()),
        (Cmd::NBD_CMD_BLOCK_STATUS, Output::Extents(vec![])),
    ] {
        let mut session = structured();
        session.holds_io = true;
        session.exchange(&request(command, 0, 0, 512));
        let (_, io) = session.submitted.pop_front().unwrap();
        session.session.on_io(Completion { tag: io.tag, result: Ok(output) }, Instant::now());
        let payload = error_payload(Errno::NBD_EIO, "medium error");
        assert_eq!(session.sent(), chunk(ReplyType::NBD_REPLY_TYPE_ERROR, &payload), "{command}");
    }
}

#[test]
fn replies_follow_completions_and_not_requests() {
    let mut session = transmit(&[]);
    session.holds_io = true;
    for cookie in [b"cookie-1", b"cookie-2"] {
        let mut read = request(Cmd::NBD_CMD_CACHE, 0, 0, 512);
        read[8..16].copy_from_slice(cookie);
        session.exchange(&read);
    }
    session.submitted.swap(0, 1);
    session.finish_one();
    session.finish_one();
    assert_eq!(session.sent(), b"\x67\x44\x66\x98\0\0\0\0cookie-2\x67\x44\x66\x98\0\0\0\0cookie-1");
}

// Limits.

#[test]
fn no_more_requests_than_the_depth_are_in_flight() {
    let mut session = transmit(&[]);
    session.holds_io = true;
    let read = request(Cmd::NBD_CMD_READ, 0, 0, 512);
    session.client_sends(&read.repeat(1030)).unwrap();
    assert_eq!((session.submitted.len(), session.untaken()), (1024, 6 * 28));
    assert!(is_deaf(&session));
    session.finish_one();
    session.run().unwrap();
    assert_eq!((session.submitted.len(), session.untaken()), (1024, 5 * 28));
}

#[test]
fn no_more_than_64_mib_wait_to_be_read() {
    let mut session = transmit(&[]);
    let read = request(Cmd::NBD_CMD_READ, 0, 0, 20 << 20);
    session.client_sends(&read.repeat(4)).unwrap();
    assert_eq!(session.session.outbox().len(), 3 * (16 + (20 << 20)));
    assert!(is_deaf(&session));
    session.session.outbox().consume(100);
    assert!(is_deaf(&session));
    session.session.outbox().consume(20 << 20);
    session.run().unwrap();
    assert_eq!(session.untaken(), 0);
}

#[test]
fn when_buffers_are_short_a_client_has_little_in_flight_or_one_request() {
    let pool = Pool::new(8 << 20);
    let mut session = connect_with(&pool, Instant::now());
    session.exchange(&join(&[&FLAGS, &option(Opt::NBD_OPT_GO, &info_data("", &[]))]));
    session.holds_io = true;
    let taken = pool.take_payload(4 << 20);
    let short = request(Cmd::NBD_CMD_READ, 0, 0, 64 << 10);
    session.client_sends(&short.repeat(5)).unwrap();
    assert_eq!(session.submitted.len(), 4, "256 KiB");
    drop(taken);
    session.run().unwrap();
    assert_eq!(session.submitted.len(), 5, "none counts as short now");

    let _taken = pool.take_payload(4 << 20);
    (0..5).for_each(|_| session.finish_one());
    session.sent();
    let long = request(Cmd::NBD_CMD_READ, 0, 0, 1 << 20);
    session.client_sends(&long.repeat(2)).unwrap();
    assert_eq!(session.submitted.len(), 1, "a long request runs alone");
    session.finish_one();
    session.run().unwrap();
    assert_eq!(session.submitted.len(), 0, "the next request waits until its data is sent");
    session.sent();
    session.run().unwrap();
    assert_eq!(session.submitted.len(), 1);
}

#[test]
fn no_requests_are_received_from_a_client_that_reads_no_replies() {
    let mut session = transmit(&[]);
    let flush = request(Cmd::NBD_CMD_FLUSH, 0, 0, 0);
    session.client_sends(&flush.repeat(70_000)).unwrap();
    assert!(is_deaf(&session));
    let unread = session.session.outbox().len();
    assert!((1 << 20..=(1 << 20) + 1024 * 16).contains(&unread), "{unread} bytes are unread");
    session.sent();
    session.run().unwrap();
    assert_eq!((session.untaken(), session.sent().len()), (0, 70_000 * 16 - unread));
}

// Ends.

#[test]
fn disc_closes_once_everything_is_answered() {
    let mut session = transmit(&[]);
    session.holds_io = true;
    let disc = request(Cmd::NBD_CMD_DISC, 0, 0, 0);
    session.client_sends(&join(&[&write(0, &[1; 512]), &disc, b"and more"])).unwrap();
    assert!(is_closed(&session));
    session.finish_one();
    assert_eq!(session.sent(), simple(0));
    assert!(session.session.on_end(Instant::now()).is_ok());
}

#[test]
fn a_stop_completes_requests_in_flight_and_refuses_new_ones() {
    let mut session = structured();
    session.holds_io = true;
    session.exchange(&request(Cmd::NBD_CMD_CACHE, 0, 0, 512));
    session.session.on_stop(Instant::now());
    assert!(!is_closed(&session));
    let refused = session.exchange(&write(0, &[1; 512]));
    let payload = error_payload(Errno::NBD_ESHUTDOWN, "the server is stopping");
    assert_eq!(refused, chunk(ReplyType::NBD_REPLY_TYPE_ERROR, &payload));
    session.finish_one();
    assert_eq!(session.sent(), simple(0));
    assert!(is_closed(&session));
}
