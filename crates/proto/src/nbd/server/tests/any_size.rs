//! Clients that did not request the block sizes: requests of any alignment, and of up to 64 MiB.

use super::*;
use crate::exports::VolumeId;
use crate::multi_step::PIECE;
use crate::volume_state::RangeGuard;
use blockmux_volume::{BlockSizes, Cost, Pages};

const FORMS: [Option<Opt>; 3] =
    [None, Some(Opt::NBD_OPT_STRUCTURED_REPLY), Some(Opt::NBD_OPT_EXTENDED_HEADERS)];

/// One writable export in RAM, in blocks of `block` bytes.
fn exports_in(block: u32) -> Exports {
    let blocks = BlockSizes { logical: Some(block), physical: None };
    let volume = Arc::new(MemVolume::within(Pages::from_heap(SIZE as usize), SIZE, blocks));
    Exports::new(vec![Export { name: "disk0".into(), description: String::new(), read_only: false, volume }])
}

/// A client in transmission that requests `infos` about the export.
fn enter(exports: &Exports, pool: &Pool, headers: Option<Opt>, infos: &[Info]) -> Session {
    let session = NbdTargetSession::new(exports.clone(), pool.clone(), Instant::now());
    let mut session = Pump::new(session, exports);
    session.exchange(&FLAGS);
    if let Some(headers) = headers {
        session.exchange(&option(headers, b""));
        session.exchange(&option(Opt::NBD_OPT_SET_META_CONTEXT, &context_data("", &["base:allocation"])));
    }
    session.exchange(&option(Opt::NBD_OPT_GO, &info_data("", infos)));
    session
}

fn any_client(block: u32, headers: Option<Opt>) -> Session {
    enter(&exports_in(block), &Pool::new(usize::MAX), headers, &[])
}

/// A request in the client's form.
fn form(headers: Option<Opt>, command: Cmd, flags: CmdFlags, offset: u64, length: u64) -> Vec<u8> {
    if headers != Some(Opt::NBD_OPT_EXTENDED_HEADERS) {
        return request(command, flags.bits(), offset, length as u32);
    }
    let payload = if command == Cmd::NBD_CMD_WRITE { CmdFlags::PAYLOAD_LEN } else { CmdFlags::empty() };
    ext_request(command, (flags | payload).bits(), offset, length)
}

fn write_in(headers: Option<Opt>, offset: u64, data: &[u8]) -> Vec<u8> {
    join(&[&form(headers, Cmd::NBD_CMD_WRITE, CmdFlags::empty(), offset, data.len() as u64), data])
}

/// Whether the answer is one reply that reports success without data.
fn is_success(answer: &[u8]) -> bool {
    answer == simple(0) || answer.starts_with(b"\x6e\x8a\x27\x8c\0\x01\0\0") && answer.len() == 32
}

/// The data of a read from `offset` on, put together from its chunks, and their number.
fn data_of(headers: Option<Opt>, mut answer: &[u8], offset: u64) -> (Vec<u8>, usize) {
    if headers.is_none() {
        assert_eq!(answer[..16], simple(0));
        return (answer[16..].to_vec(), 1);
    }
    let head = if headers == Some(Opt::NBD_OPT_EXTENDED_HEADERS) { 32 } else { 20 };
    let (mut data, mut chunks) = (Vec::new(), 0);
    while !answer.is_empty() {
        assert_eq!(answer[6..8], ReplyType::NBD_REPLY_TYPE_OFFSET_DATA.0.to_be_bytes());
        let length = u32::from_be_bytes(answer[head - 4..head].try_into().unwrap()) as usize;
        let at = u64::from_be_bytes(answer[head..head + 8].try_into().unwrap());
        assert_eq!(at, offset + data.len() as u64);
        data.extend(&answer[head + 8..head + length]);
        let is_last = answer.len() == head + length;
        assert_eq!(answer[5] == 1, is_last, "only the last chunk has NBD_REPLY_FLAG_DONE");
        answer = &answer[head + length..];
        chunks += 1;
    }
    (data, chunks)
}

fn ops(session: &Session) -> Vec<(Op, u64, u64)> {
    session.submitted.iter().map(|(_, io)| (io.op, io.offset, io.len)).collect()
}

/// Completes the oldest held I/O with an error.
fn fail_one(session: &mut Session) {
    let (_, io) = session.submitted.pop_front().unwrap();
    session.session.on_io(Completion { tag: io.tag, result: Err(IoError::Medium) }, Instant::now());
    session.turn();
}

/// Completes the oldest held I/O, and takes the ones that follow from it.
fn step(session: &mut Session) {
    session.finish_one();
    session.turn();
}

const WRITE: Op = Op::Write { fua: false };

#[test]
fn a_part_of_a_block_is_read_before_the_block_is_written() {
    let fua = Op::Write { fua: true };
    type Steps = &'static [(Op, u64, u64)];
    let table: [(u64, usize, CmdFlags, Steps); 6] = [
        (100, 300, CmdFlags::empty(), &[(Op::Read, 0, 512), (WRITE, 0, 512)]),
        (0, 100, CmdFlags::FUA, &[(Op::Read, 0, 512), (Op::Write { fua: true }, 0, 512)]),
        (500, 24, CmdFlags::empty(), &[(Op::Read, 0, 512), (Op::Read, 512, 512), (WRITE, 0, 1024)]),
        (512, 1000, CmdFlags::empty(), &[(Op::Read, 1024, 512), (WRITE, 512, 1024)]),
        (1000, 24, CmdFlags::empty(), &[(Op::Read, 512, 512), (WRITE, 512, 512)]),
        (1, 4096, CmdFlags::empty(), &[(Op::Read, 0, 512), (Op::Read, 4096, 512), (WRITE, 0, 4608)]),
    ];
    for (offset, len, flags, steps) in table {
        let mut session = any_client(512, None);
        session.exchange(&write(0, &[7; 8192]));
        session.holds_io = true;
        let head = request(Cmd::NBD_CMD_WRITE, flags.bits(), offset, len as u32);
        session.client_sends(&join(&[&head, &vec![9; len]])).unwrap();
        for expected in steps {
            assert_eq!(session.sent(), b"");
            assert_eq!(ops(&session), [*expected], "{len} bytes at {offset}");
            step(&mut session);
        }
        assert_eq!(session.sent(), simple(0), "{len} bytes at {offset}");
        assert_eq!(steps.last().unwrap().0 == fua, flags == CmdFlags::FUA);
        session.holds_io = false;
        let answer = session.exchange(&request(Cmd::NBD_CMD_READ, 0, 0, 8192));
        let mut expected = vec![7; 8192];
        expected[offset as usize..offset as usize + len].fill(9);
        assert!(answer[16..] == expected, "{len} bytes at {offset}");
    }
}

#[test]
fn a_failed_read_fails_the_write_and_nothing_is_written() {
    for failing in 0..3 {
        let mut session = any_client(512, None);
        session.holds_io = true;
        session.client_sends(&write(100, &[9; 1000])).unwrap();
        for _ in 0..failing {
            step(&mut session);
        }
        fail_one(&mut session);
        assert_eq!((session.sent(), session.submitted.len()), (simple(5), 0));
        session.holds_io = false;
        // The blocks are no longer locked.
        let answer = session.exchange(&request(Cmd::NBD_CMD_READ, 0, 0, 2048));
        assert_eq!(answer, join(&[&simple(0), &[0; 2048]]));
    }
}

#[test]
fn a_wrong_result_of_a_volume_fails_the_request() {
    for request in [
        write(100, &[9; 24]),
        request(Cmd::NBD_CMD_WRITE_ZEROES, 0, 100, 24),
        request(Cmd::NBD_CMD_READ, 0, 100, 24),
    ] {
        for output in [Output::Nothing, Output::Data(blockmux_volume::Seg::from_slice(&[1; 24]).into())] {
            let mut session = any_client(512, None);
            session.holds_io = true;
            session.client_sends(&request).unwrap();
            let (_, io) = session.submitted.pop_front().unwrap();
            session.session.on_io(Completion { tag: io.tag, result: Ok(output) }, Instant::now());
            session.turn();
            assert_eq!((session.sent(), session.submitted.len()), (simple(5), 0));
        }
    }
}

#[test]
fn others_wait_while_a_block_is_written_in_part() {
    let exports = exports_in(512);
    let client = || enter(&exports, &Pool::new(usize::MAX), None, &[]);
    let (mut one, mut other, mut third) = (client(), client(), client());
    for session in [&mut one, &mut other, &mut third] {
        session.holds_io = true;
    }
    other.client_sends(&write(0, &[1; 512])).unwrap();
    // It waits for the write that began before.
    one.client_sends(&write(3, &[2; 5])).unwrap();
    assert_eq!((ops(&other), ops(&one)), (vec![(WRITE, 0, 512)], vec![]));
    step(&mut other);
    one.turn();
    assert_eq!(ops(&one), [(Op::Read, 0, 512)]);
    // Both wait for it: a whole block, and another part of this one.
    other.client_sends(&write(0, &[3; 512])).unwrap();
    third.client_sends(&write(4, &[4; 2])).unwrap();
    assert!(other.submitted.is_empty() && third.submitted.is_empty());
    step(&mut one);
    step(&mut one);
    assert_eq!(one.sent(), simple(0));
    third.turn();
    assert_eq!(ops(&third), [(Op::Read, 0, 512)]);
    other.turn();
    assert!(other.submitted.is_empty());
    step(&mut third);
    step(&mut third);
    let answer = client().exchange(&request(Cmd::NBD_CMD_READ, 0, 0, 10));
    assert_eq!(answer[16..], [1, 1, 1, 2, 4, 4, 2, 2, 1, 1]);
}

#[test]
fn a_part_of_a_block_waits_for_a_command_that_has_locked_it() {
    for command in [Cmd::NBD_CMD_WRITE, Cmd::NBD_CMD_WRITE_ZEROES, Cmd::NBD_CMD_READ] {
        let exports = exports_in(512);
        let mut session = enter(&exports, &Pool::new(usize::MAX), None, &[]);
        session.holds_io = true;
        let guard = RangeGuard::lock(&exports.volume_state(VolumeId(0)).unwrap(), 0, 512).unwrap();
        let payload: &[u8] = if command == Cmd::NBD_CMD_WRITE { &[1; 5] } else { &[] };
        session.client_sends(&join(&[&request(command, 0, 3, 5), payload])).unwrap();
        assert!(session.submitted.is_empty(), "{command}");
        drop(guard);
        session.turn();
        assert_eq!(ops(&session), [(Op::Read, 0, 512)], "{command}");
    }
}

#[test]
fn blocks_are_free_again_when_the_connection_is_lost_in_between() {
    let exports = exports_in(512);
    let mut session = enter(&exports, &Pool::new(usize::MAX), None, &[]);
    session.holds_io = true;
    session.client_sends(&write(3, &[2; 5])).unwrap();
    let volume_state = exports.volume_state(VolumeId(0)).unwrap();
    assert!(volume_state.is_locked(0, 512));
    drop(session);
    assert!(!volume_state.is_locked(0, 512));
}

#[test]
fn limits_charge_a_part_of_a_block_as_one_write_and_throttle_it_without_its_lock() {
    let exports = exports_in(512);
    let volume_state = exports.volume_state(VolumeId(0)).unwrap();
    let mut session = enter(&exports, &Pool::new(usize::MAX), None, &[]);
    (session.throttles, session.holds_io) = (true, true);
    session.client_sends(&write(500, &[2; 100])).unwrap();
    let io = session.waiting.front().unwrap().1.clone();
    assert_eq!(session.session.charge(&io).cost, Some(Cost::write(1024)));
    assert!(!volume_state.is_locked(0, 1024), "others may use the blocks meanwhile");
    let guard = RangeGuard::lock(&volume_state, 512, 512).unwrap();
    assert!(guard.is_alone());
    session.throttles = false;
    session.turn();
    assert!(session.submitted.is_empty());
    drop(guard);
    session.turn();
    assert!(volume_state.is_locked(0, 1024));
    for _ in 0..2 {
        step(&mut session);
        assert_eq!(session.session.charge(&session.submitted[0].1.clone()).cost, None, "it has paid");
    }
    step(&mut session);
    assert_eq!(session.sent(), simple(0));
}

#[test]
fn zeroes_of_any_range_zero_whole_blocks_and_write_the_rest() {
    let zeroes = Op::WriteZeroes { fua: true, may_unmap: false, only_fast: false };
    let fua = Op::Write { fua: true };
    type Steps<'a> = &'a [(Op, u64, u64)];
    let table: [(u64, u32, Steps<'_>); 4] = [
        (100, 200, &[(Op::Read, 0, 512), (fua, 0, 512)]),
        (500, 24, &[(Op::Read, 0, 512), (fua, 0, 512), (Op::Read, 512, 512), (fua, 512, 512)]),
        (512, 1000, &[(zeroes, 512, 512), (Op::Read, 1024, 512), (fua, 1024, 512)]),
        (
            500,
            2000,
            &[
                (Op::Read, 0, 512),
                (fua, 0, 512),
                (zeroes, 512, 1536),
                (Op::Read, 2048, 512),
                (fua, 2048, 512),
            ],
        ),
    ];
    for (offset, len, steps) in table {
        let mut session = any_client(512, None);
        session.exchange(&write(0, &[7; 4096]));
        session.holds_io = true;
        let flags = CmdFlags::FUA | CmdFlags::NO_HOLE;
        session.client_sends(&request(Cmd::NBD_CMD_WRITE_ZEROES, flags.bits(), offset, len)).unwrap();
        for expected in steps {
            assert_eq!((session.sent(), ops(&session)), (vec![], vec![*expected]), "{len} bytes at {offset}");
            step(&mut session);
        }
        assert_eq!(session.sent(), simple(0));
        session.holds_io = false;
        let answer = session.exchange(&request(Cmd::NBD_CMD_READ, 0, 0, 4096));
        let mut expected = vec![7; 4096];
        expected[offset as usize..(offset + u64::from(len)) as usize].fill(0);
        assert!(answer[16..] == expected, "{len} bytes at {offset}");
    }
}

#[test]
fn a_fast_zero_of_a_part_of_a_block_is_not_supported_and_changes_nothing() {
    let mut session = any_client(512, None);
    session.holds_io = true;
    let fast = |offset, len| request(Cmd::NBD_CMD_WRITE_ZEROES, CmdFlags::FAST_ZERO.bits(), offset, len);
    for (offset, len) in [(1, 511), (0, 100), (100, 8192)] {
        assert_eq!(session.exchange(&fast(offset, len)), simple(Errno::NBD_ENOTSUP.0));
    }
    assert!(session.submitted.is_empty());
    session.client_sends(&fast(512, 512)).unwrap();
    assert_eq!(session.submitted.len(), 1);
}

#[test]
fn a_trim_covers_the_blocks_within_its_range_and_a_hint_those_around_it() {
    let mut session = any_client(512, None);
    session.holds_io = true;
    let (trim, cache) = (Cmd::NBD_CMD_TRIM, Cmd::NBD_CMD_CACHE);
    session.client_sends(&request(trim, 1, 100, 2000)).unwrap();
    session.client_sends(&request(cache, 0, 600, 500)).unwrap();
    let expected = [(Op::Discard { fua: true }, 512, 1536), (Op::Prefetch, 512, 1024)];
    assert_eq!(ops(&session), expected);
    session.finish_one();
    session.finish_one();
    assert_eq!(session.sent(), simple(0).repeat(2));
    // No whole block is within these.
    for (offset, len) in [(100, 200), (1, 1000), (511, 1), (700, 0)] {
        assert_eq!(session.exchange(&request(trim, 0, offset, len)), simple(0));
    }
    for command in [Cmd::NBD_CMD_READ, Cmd::NBD_CMD_WRITE, Cmd::NBD_CMD_WRITE_ZEROES, cache] {
        assert_eq!(session.exchange(&request(command, 0, 77, 0)), simple(0), "{command}");
    }
    assert!(session.submitted.is_empty());
    assert_eq!(session.exchange(&request(trim, 0, SIZE - 1, 2)), simple(Errno::NBD_EINVAL.0));
}

#[test]
fn block_status_of_any_range_describes_exactly_that() {
    let mut session = any_client(512, Some(Opt::NBD_OPT_STRUCTURED_REPLY));
    session.exchange(&write(65536, &pattern(512)));
    let status = |parts: &[&[u8]]| {
        chunk(ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS, &join(&[&[0, 0, 0, 1], &join(parts)]))
    };
    let ask = |offset, len| request(Cmd::NBD_CMD_BLOCK_STATUS, 0, offset, len);
    // From 36 bytes before the data on.
    let answer = session.exchange(&ask(65500, 65536 + 36 + 7));
    assert_eq!(answer, status(&[b"\0\0\0\x24\0\0\0\x03", b"\0\x01\0\0\0\0\0\0", b"\0\0\0\x07\0\0\0\x03"]));
    assert_eq!(session.exchange(&ask(65537, 1)), status(&[b"\0\0\0\x01\0\0\0\0"]));
    let mut session = any_client(4096, Some(Opt::NBD_OPT_EXTENDED_HEADERS));
    let answer = session.exchange(&ext_request(Cmd::NBD_CMD_BLOCK_STATUS, 0, 1, SIZE - 1));
    let whole = join(&[b"\0\0\0\x01\0\0\0\x01", &(SIZE - 1).to_be_bytes(), &3u64.to_be_bytes()]);
    assert_eq!(answer, ext_chunk(ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS_EXT, 1, &whole));
}

#[test]
fn a_client_that_requested_the_block_sizes_has_to_respect_them() {
    for headers in FORMS {
        let pool = Pool::new(usize::MAX);
        let mut session = enter(&exports_in(4096), &pool, headers, &[Info::NBD_INFO_BLOCK_SIZE]);
        session.holds_io = true;
        for command in [
            Cmd::NBD_CMD_READ,
            Cmd::NBD_CMD_WRITE,
            Cmd::NBD_CMD_TRIM,
            Cmd::NBD_CMD_WRITE_ZEROES,
            Cmd::NBD_CMD_CACHE,
        ] {
            let payload: &[u8] = if command == Cmd::NBD_CMD_WRITE { &[1; 512] } else { &[] };
            let head = form(headers, command, CmdFlags::empty(), 512, 512);
            let answer = session.exchange(&join(&[&head, payload]));
            assert!(!is_success(&answer) && session.submitted.is_empty(), "{command} {headers:?}");
        }
        let long = form(headers, Cmd::NBD_CMD_READ, CmdFlags::empty(), 0, (32 << 20) + 4096);
        let answer = session.exchange(&long);
        assert!(answer.len() < 200 && session.submitted.is_empty());
        let long = form(headers, Cmd::NBD_CMD_WRITE, CmdFlags::empty(), 0, (32 << 20) + 4096);
        assert!(session.client_sends(&long).is_err());
    }
}

#[test]
fn a_client_is_told_to_respect_the_block_sizes_that_it_requested_and_no_others() {
    let exports = exports_in(4096);
    for (infos, minimum) in [(&[Info::NBD_INFO_BLOCK_SIZE][..], 4096_u32), (&[], 1)] {
        for opt in [Opt::NBD_OPT_INFO, Opt::NBD_OPT_GO] {
            let session = NbdTargetSession::new(exports.clone(), Pool::new(usize::MAX), Instant::now());
            let mut session = Pump::new(session, &exports);
            let answer = session.exchange(&join(&[&FLAGS, &option(opt, &info_data("", infos))]));
            let sizes = [&b"\0\x03"[..], &minimum.to_be_bytes(), &4096_u32.to_be_bytes(), b"\x02\0\0\0"];
            let sizes = rep(opt, Rep::NBD_REP_INFO, &sizes.concat());
            assert!(answer.windows(sizes.len()).any(|window| window == sizes), "{infos:?} in {opt}");
        }
    }
}

#[test]
fn a_session_that_another_process_continues_keeps_its_block_sizes() {
    let exports = exports_in(4096);
    for (infos, answer) in [(&[][..], simple(0)), (&[Info::NBD_INFO_BLOCK_SIZE], simple(22))] {
        let mut session = enter(&exports, &Pool::new(usize::MAX), None, infos);
        let state = session.session.hand_over().unwrap();
        let next = NbdTargetSession::resumed(&exports, Pool::new(usize::MAX), Instant::now(), &state);
        let mut next = Pump::new(next.unwrap(), &exports);
        assert_eq!(next.exchange(&write(3, &[1])), answer);
    }
}

#[test]
fn a_session_is_not_handed_over_while_a_block_is_written_in_part() {
    let mut session = any_client(512, None);
    session.holds_io = true;
    session.client_sends(&write(3, &[2; 5])).unwrap();
    for _ in 0..2 {
        assert_eq!(session.session.hand_over(), None);
        step(&mut session);
    }
    assert_eq!(session.session.hand_over(), None, "its reply is not sent");
    assert_eq!(session.sent(), simple(0));
    assert!(session.session.hand_over().is_some());
}

// Requests of more than 32 MiB.

const LONG: u64 = (33 << 20) + 77;

#[test]
fn long_requests_of_any_alignment_are_split_in_every_format() {
    let data = pattern(LONG as usize);
    for (headers, block, offset) in [(FORMS[0], 512, 4711), (FORMS[1], 4096, 4096), (FORMS[2], 65536, 4711)] {
        let mut session = any_client(block, headers);
        session.exchange(&write_in(headers, offset - 10, &[7; 10]));
        assert!(is_success(&session.exchange(&write_in(headers, offset, &data))), "{headers:?}");
        let flags = CmdFlags::empty();
        let answer = session.exchange(&form(headers, Cmd::NBD_CMD_READ, flags, offset, LONG));
        let (read, chunks) = data_of(headers, &answer, offset);
        assert!(read == data && (headers.is_none() || chunks > 1), "{headers:?} at {offset}");
        // What surrounds it is as before.
        for (at, byte) in [(offset - 10, 7), (offset + LONG, 0)] {
            let answer = session.exchange(&form(headers, Cmd::NBD_CMD_READ, flags, at, 10));
            assert_eq!(data_of(headers, &answer, at).0, [byte; 10]);
        }
    }
}

#[test]
fn a_request_of_32_mib_between_blocks_is_split_too() {
    let data = pattern(MAX_TRANSFER as usize);
    let mut session = any_client(512, None);
    assert_eq!(session.exchange(&write(1, &data)), simple(0));
    let answer = session.exchange(&request(Cmd::NBD_CMD_READ, 0, 1, MAX_TRANSFER));
    assert!(answer[16..] == data);
}

#[test]
fn a_long_write_holds_memory_for_two_pieces() {
    let pool = Pool::new(usize::MAX);
    let mut session = enter(&exports_in(512), &pool, None, &[]);
    session.holds_io = true;
    let whole = join(&[&write(100, &pattern(LONG as usize)), &request(Cmd::NBD_CMD_FLUSH, 0, 0, 0)]);
    session.client_sends(&whole).unwrap();
    let mut written = 0;
    while ops(&session) != [(Op::Flush, 0, 0)] {
        assert!(pool.out_bytes() as u64 <= 2 * PIECE, "{} bytes", pool.out_bytes());
        let [(op, _, len)] = ops(&session)[..] else { panic!("one I/O at a time: {:?}", ops(&session)) };
        written += if op == WRITE { len } else { 0 };
        assert!(len <= PIECE && session.sent().is_empty(), "no reply before the last piece is written");
        session.finish_one();
        session.run().unwrap();
    }
    assert!(written >= LONG);
    assert_eq!(session.sent(), simple(0), "the write");
    step(&mut session);
    assert_eq!((session.sent(), pool.out_bytes()), (simple(0), 0));
}

#[test]
fn a_long_write_that_fails_is_answered_once_behind_its_payload() {
    for (failing, step_len) in [(0, usize::MAX), (8, 1 << 20)] {
        let mut session = any_client(512, None).split_at(step_len);
        session.holds_io = true;
        let whole = join(&[&write(0, &pattern(LONG as usize)), &request(Cmd::NBD_CMD_FLUSH, 0, 0, 0)]);
        session.client_sends(&whole).unwrap();
        for _ in 0..failing {
            session.finish_one();
            session.run().unwrap();
        }
        fail_one(&mut session);
        session.run().unwrap();
        assert_eq!(session.sent(), simple(5), "failing in piece {failing}");
        assert_eq!(ops(&session), [(Op::Flush, 0, 0)], "nothing more of it is written");
    }
}

#[test]
fn a_long_write_waits_for_memory_and_is_refused_if_there_is_never_enough() {
    let pool = Pool::new(24 << 20);
    let mut session = enter(&exports_in(512), &pool, None, &[]);
    let taken: Vec<_> = std::iter::from_fn(|| pool.take_payload(256 << 10)).collect();
    assert!(taken.len() > 8);
    let whole = write(0, &pattern(LONG as usize));
    session.client_sends(&whole).unwrap();
    assert!(is_deaf(&session) && session.session.poll_timeout().is_some());
    drop(taken);
    session.session.on_timeout(session.session.poll_timeout().unwrap()).unwrap();
    assert_eq!(session.exchange(b""), simple(0));

    let mut session = enter(&exports_in(512), &Pool::new(1 << 20), None, &[]);
    let answer = session.exchange(&join(&[&whole, &request(Cmd::NBD_CMD_FLUSH, 0, 0, 0)]));
    assert_eq!(answer, join(&[&simple(Errno::NBD_ENOMEM.0), &simple(0)]));
}

#[test]
fn a_long_read_has_the_connection_for_itself() {
    for headers in FORMS {
        let mut session = any_client(512, headers);
        session.holds_io = true;
        let head = |command, len| form(headers, command, CmdFlags::empty(), 0, len);
        let (cache, read) = (head(Cmd::NBD_CMD_CACHE, 512), head(Cmd::NBD_CMD_READ, LONG));
        session.client_sends(&join(&[&cache, &read, &cache, &head(Cmd::NBD_CMD_FLUSH, 0)])).unwrap();
        assert_eq!(ops(&session), [(Op::Prefetch, 0, 512)], "it waits for earlier requests");
        session.finish_one();
        assert!(is_success(&session.sent()));
        session.run().unwrap();
        let (mut answer, mut asked) = (Vec::new(), 0);
        while asked < LONG {
            let at = asked;
            asked = LONG.min(at + PIECE);
            assert_eq!(ops(&session), [(Op::Read, at, (asked - at).next_multiple_of(512))]);
            session.finish_one();
            answer.extend(session.sent());
            session.run().unwrap();
        }
        assert_eq!(data_of(headers, &answer, 0).0.len(), LONG as usize);
        assert_eq!(ops(&session), [(Op::Prefetch, 0, 512), (Op::Flush, 0, 0)], "later requests follow");
    }
}

#[test]
fn a_long_read_that_fails_later_reports_it_in_a_chunk_or_ends_the_session() {
    for headers in FORMS {
        let mut session = any_client(512, headers);
        session.holds_io = true;
        let read = form(headers, Cmd::NBD_CMD_READ, CmdFlags::empty(), 0, LONG);
        session.client_sends(&read).unwrap();
        fail_one(&mut session);
        let first = session.exchange(b"");
        assert!(first.len() < 100 && !is_closed(&session), "an error before any data is an error reply");
        session.client_sends(&read).unwrap();
        step(&mut session);
        assert!(session.sent().len() as u64 > PIECE);
        fail_one(&mut session);
        if headers.is_none() {
            // proto.md, NBD_CMD_READ: no further data may be sent.
            assert!(is_closed(&session) && session.sent().is_empty());
            let reasons: Vec<_> = std::iter::from_fn(|| session.session.poll_event()).collect();
            assert!(format!("{reasons:?}").contains("a read failed after a part of its data was sent"));
        } else {
            let error = session.sent();
            assert_eq!((error[5], &error[6..8]), (1, &b"\x80\x01"[..]));
            assert!(!is_closed(&session));
        }
    }
}

#[test]
fn a_long_read_that_must_not_be_split_is_refused() {
    for headers in [FORMS[1], FORMS[2]] {
        let mut session = any_client(512, headers);
        session.holds_io = true;
        for (offset, len) in [(0, LONG), (1, u64::from(MAX_TRANSFER))] {
            let read = form(headers, Cmd::NBD_CMD_READ, CmdFlags::DF, offset, len);
            let answer = session.exchange(&read);
            assert!(answer.windows(4).any(|bytes| bytes == Errno::NBD_EOVERFLOW.0.to_be_bytes()));
        }
        assert!(session.submitted.is_empty());
    }
}

#[test]
fn requests_of_more_than_64_mib_are_refused_as_before() {
    let long = (64 << 20) + 1;
    let mut session = any_client(512, None);
    assert_eq!(session.exchange(&request(Cmd::NBD_CMD_READ, 0, 0, long)), simple(22));
    assert!(session.client_sends(&request(Cmd::NBD_CMD_WRITE, 0, 0, long)).is_err());
}

#[test]
fn a_connection_may_end_after_the_payload_of_a_long_write_but_not_within() {
    let whole = write(0, &pattern(LONG as usize));
    for (sent, is_valid) in [(whole.len() - 1, false), (whole.len(), true)] {
        let pool = Pool::new(usize::MAX);
        let mut session = enter(&exports_in(512), &pool, None, &[]);
        session.client_sends(&whole[..sent]).unwrap();
        assert_eq!(session.session.on_end(Instant::now()).is_ok(), is_valid);
        drop(session);
        assert_eq!(pool.out_bytes(), 0);
    }
}

proptest! {
    /// A session in each format and with each block does what one array of bytes does.
    #[test]
    fn requests_of_any_range_act_on_exactly_their_bytes(
        form_of in 0..3usize,
        block in prop::sample::select(vec![512_u32, 4096]),
        requests in prop::collection::vec((0..4_u8, 0..20_000_u64, 1..9000_u64, any::<u8>()), 1..12),
    ) {
        let headers = FORMS[form_of];
        let mut session = any_client(block, headers);
        let mut model = vec![0; 32_768];
        for (kind, offset, len, byte) in requests {
            let range = offset as usize..(offset + len) as usize;
            let head = |command| form(headers, command, CmdFlags::empty(), offset, len);
            match kind {
                0 | 1 => {
                    let data = vec![byte; len as usize];
                    prop_assert!(is_success(&session.exchange(&write_in(headers, offset, &data))));
                    model[range].copy_from_slice(&data);
                }
                2 => {
                    prop_assert!(is_success(&session.exchange(&head(Cmd::NBD_CMD_WRITE_ZEROES))));
                    model[range].fill(0);
                }
                _ => {
                    let answer = session.exchange(&head(Cmd::NBD_CMD_READ));
                    prop_assert!(data_of(headers, &answer, offset).0 == model[range]);
                }
            }
        }
        let answer = session.exchange(&form(headers, Cmd::NBD_CMD_READ, CmdFlags::empty(), 0, 32_768));
        prop_assert!(data_of(headers, &answer, 0).0 == model);
    }
}
