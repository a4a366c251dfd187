//! Whole sessions as packet traces: what the client sends, what the target answers.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use super::TargetSession;
use crate::exports::{Export, Exports};
use crate::session::{Demand, StreamSession, Target, Timed};
use crate::testing::Pump;
use blockmux_volume::{Completion, IoError, MAX_TRANSFER, MemVolume, Op, Output, Pool};
use blockmux_wire::nbd::handshake::*;
use blockmux_wire::nbd::transmission::*;
use proptest::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Session = Pump<TargetSession>;

/// `disk0`, writable, and `frozen`, read-only: 64 MiB of RAM each, in 512-byte blocks with 64 KiB allocation units.
fn exports() -> Exports {
    let export = |name: &str, description: &str, read_only| Export {
        name: name.into(),
        description: description.into(),
        read_only,
        volume: Arc::new(MemVolume::new(SIZE)),
    };
    Exports::new(vec![export("disk0", "a RAM disk", false), export("frozen", "", true)])
}

fn connect_with(pool: &Pool, now: Instant) -> Session {
    let exports = exports();
    Pump::new(TargetSession::new(exports.clone(), pool.clone(), now), &exports)
}

/// A client that has seen the greeting.
fn connect() -> Session {
    let mut session = connect_with(&Pool::new(usize::MAX), Instant::now());
    assert_eq!(session.sent(), GREETING);
    session
}

/// A client that has also set both its flags.
fn haggle() -> Session {
    let mut session = connect();
    assert_eq!(session.exchange(&FLAGS), b"");
    session
}

/// Adds what the options agree on, and enters transmission on the default export.
fn transmit(options: &[Opt]) -> Session {
    let mut session = haggle();
    for opt in options {
        let data = if *opt == Opt::NBD_OPT_SET_META_CONTEXT {
            context_data("", &["base:allocation"])
        } else {
            vec![]
        };
        let answer = session.exchange(&option(*opt, &data));
        assert!(answer.ends_with(&rep(*opt, Rep::NBD_REP_ACK, b"")), "{opt}");
    }
    session.exchange(&option(Opt::NBD_OPT_GO, &info_data("", &[])));
    session
}

fn structured() -> Session {
    transmit(&[Opt::NBD_OPT_STRUCTURED_REPLY, Opt::NBD_OPT_SET_META_CONTEXT])
}

fn extended() -> Session {
    transmit(&[Opt::NBD_OPT_EXTENDED_HEADERS, Opt::NBD_OPT_SET_META_CONTEXT])
}

fn join(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

fn option(opt: Opt, data: &[u8]) -> Vec<u8> {
    join(&[b"IHAVEOPT", &opt.0.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data])
}

fn rep(opt: Opt, rep: Rep, data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u32).to_be_bytes();
    join(&[b"\x00\x03\xe8\x89\x04\x55\x65\xa9", &opt.0.to_be_bytes(), &rep.0.to_be_bytes(), &length, data])
}

fn text(text: &str) -> Vec<u8> {
    join(&[&(text.len() as u32).to_be_bytes(), text.as_bytes()])
}

fn info_data(name: &str, infos: &[Info]) -> Vec<u8> {
    let list: Vec<u8> = infos.iter().flat_map(|info| info.0.to_be_bytes()).collect();
    join(&[&text(name), &(infos.len() as u16).to_be_bytes(), &list])
}

fn context_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let list: Vec<u8> = queries.iter().flat_map(|query| text(query)).collect();
    join(&[&text(name), &(queries.len() as u32).to_be_bytes(), &list])
}

/// A compact request; the cookie is 7.
fn request(command: Cmd, flags: u16, offset: u64, length: u32) -> Vec<u8> {
    join(&[
        &NBD_REQUEST_MAGIC.to_be_bytes(),
        &flags.to_be_bytes(),
        &command.0.to_be_bytes(),
        &7u64.to_be_bytes(),
        &offset.to_be_bytes(),
        &length.to_be_bytes(),
    ])
}

/// An extended request; the cookie is 7.
fn ext_request(command: Cmd, flags: u16, offset: u64, length: u64) -> Vec<u8> {
    let compact = request(command, flags, offset, 0);
    join(&[&NBD_EXTENDED_REQUEST_MAGIC.to_be_bytes(), &compact[4..24], &length.to_be_bytes()])
}

fn simple(error: u32) -> Vec<u8> {
    join(&[b"\x67\x44\x66\x98", &error.to_be_bytes(), &7u64.to_be_bytes()])
}

/// The last structured chunk of a reply.
fn chunk(reply_type: ReplyType, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    join(&[b"\x66\x8e\x33\xef\0\x01", &reply_type.0.to_be_bytes(), &7u64.to_be_bytes(), &length, payload])
}

/// The last extended chunk of a reply.
fn ext_chunk(reply_type: ReplyType, offset: u64, payload: &[u8]) -> Vec<u8> {
    join(&[
        b"\x6e\x8a\x27\x8c\0\x01",
        &reply_type.0.to_be_bytes(),
        &7u64.to_be_bytes(),
        &offset.to_be_bytes(),
        &(payload.len() as u64).to_be_bytes(),
        payload,
    ])
}

fn error_payload(errno: Errno, why: &str) -> Vec<u8> {
    join(&[&errno.0.to_be_bytes(), &(why.len() as u16).to_be_bytes(), why.as_bytes()])
}

fn write(offset: u64, data: &[u8]) -> Vec<u8> {
    join(&[&request(Cmd::NBD_CMD_WRITE, 0, offset, data.len() as u32), data])
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ (i >> 9) as u8).collect()
}

fn is_closed(session: &Session) -> bool {
    matches!(session.session.demand(), Demand::Close)
}

fn is_deaf(session: &Session) -> bool {
    matches!(session.session.demand(), Demand::Nothing)
}

// What a Linux client sent to nbdkit, from a capture; the same answers but for flags and the block sizes, which
// nbdkit sends only when asked.

#[test]
fn the_kernels_session_goes_as_captured() {
    let mut session = connect();
    session.exchange(b"\x00\x00\x00\x03");
    session.exchange(b"\x49\x48\x41\x56\x45\x4f\x50\x54\x00\x00\x00\x07\x00\x00\x00\x06");
    session.exchange(b"\x00\x00\x00\x00");
    let answer = session.exchange(b"\x00\x00");
    let (export, rest) = answer.split_at(32);
    assert_eq!(
        export,
        b"\x00\x03\xe8\x89\x04\x55\x65\xa9\x00\x00\x00\x07\x00\x00\x00\x03\x00\x00\x00\x0c\
          \x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x0d\x6d"
    );
    let (_, ack) = rest.split_at(34);
    assert_eq!(ack, b"\x00\x03\xe8\x89\x04\x55\x65\xa9\x00\x00\x00\x07\x00\x00\x00\x01\x00\x00\x00\x00");
    let read = b"\x25\x60\x95\x13\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x02\
                 \x00\x00\x00\x00\x00\x00\x30\x00\x00\x00\x10\x00";
    let answer = session.exchange(read);
    assert_eq!(&answer[..16], b"\x67\x44\x66\x98\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x02");
    assert_eq!(answer[16..], [0; 4096]);
    let flush = b"\x25\x60\x95\x13\x00\x00\x00\x03\x00\x00\x00\x02\x00\x00\x00\x08\
                  \x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00";
    let answer = b"\x67\x44\x66\x98\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x08";
    assert_eq!(session.exchange(flush), answer);
}

// The handshake.

#[test]
fn go_tells_size_flags_and_block_sizes_and_what_was_asked() {
    let all = [Info::NBD_INFO_NAME, Info::NBD_INFO_DESCRIPTION, Info::NBD_INFO_BLOCK_SIZE, Info(99)];
    for opt in [Opt::NBD_OPT_INFO, Opt::NBD_OPT_GO] {
        let mut session = haggle();
        let info = |data: &[u8]| rep(opt, Rep::NBD_REP_INFO, data);
        assert_eq!(
            session.exchange(&option(opt, &info_data("", &all))),
            join(&[
                &info(b"\0\0\0\0\0\0\x04\0\0\0\x0d\x6d"),
                &info(b"\0\x01disk0"),
                &info(b"\0\x02a RAM disk"),
                &info(b"\0\x03\0\0\x02\0\0\0\x10\0\x02\0\0\0"),
                &rep(opt, Rep::NBD_REP_ACK, b""),
            ])
        );
        // Only GO enters transmission.
        let expected = if opt == Opt::NBD_OPT_GO { 28 } else { 16 };
        assert!(matches!(session.session.demand(), Demand::Bytes(n) if n == expected));
    }
}

#[test]
fn an_unknown_export_can_be_tried_again_under_another_name() {
    let mut session = haggle();
    let unknown = session.exchange(&option(Opt::NBD_OPT_GO, &info_data("disk1", &[])));
    assert_eq!(unknown, rep(Opt::NBD_OPT_GO, Rep::NBD_REP_ERR_UNKNOWN, b"no such export"));
    let answer = session.exchange(&option(Opt::NBD_OPT_GO, &info_data("frozen", &[])));
    assert_eq!(answer[20..32], *b"\0\0\0\0\0\0\x04\0\0\0\x05\x0f");
}

#[test]
fn an_export_name_enters_transmission_with_or_without_zeroes() {
    for (flags, zeroes) in [(3, 0), (2, 0), (1, 124), (0, 124)] {
        let mut session = connect();
        session.exchange(&[0, 0, 0, flags]);
        let answer = session.exchange(&option(Opt::NBD_OPT_EXPORT_NAME, b"disk0"));
        assert_eq!(answer, join(&[b"\0\0\0\0\x04\0\0\0\x0d\x6d", &vec![0; zeroes]]), "flags {flags}");
        let flush = session.exchange(&request(Cmd::NBD_CMD_FLUSH, 0, 0, 0));
        assert_eq!(flush, simple(0));
    }
}

#[test]
fn an_export_name_that_cannot_be_had_ends_the_session() {
    for name in [&b"disk1"[..], b"\xff", b"a\0", &[b'a'; 5000]] {
        let error = haggle().client_sends(&option(Opt::NBD_OPT_EXPORT_NAME, name)).unwrap_err();
        assert!(error.what.contains("export"), "{error}");
    }
    let mut session = haggle();
    session.exchange(&option(Opt::NBD_OPT_EXTENDED_HEADERS, b""));
    assert!(session.client_sends(&option(Opt::NBD_OPT_EXPORT_NAME, b"disk0")).is_err());
}

#[test]
fn what_is_no_handshake_ends_the_session() {
    assert!(connect().client_sends(b"\0\0\0\x04").is_err(), "unknown client flag");
    assert!(connect().client_sends(b"GET ").is_err(), "not a client at all");
    assert!(haggle().client_sends(b"IHAVEOPX\0\0\0\x03\0\0\0\0").is_err(), "wrong magic number");
    let mut old = connect();
    old.exchange(b"\0\0\0\0");
    assert!(old.client_sends(&option(Opt::NBD_OPT_LIST, b"")).is_err(), "not fixed newstyle");
}

#[test]
fn abort_is_acknowledged_and_its_data_ignored() {
    for data in [&b""[..], b"goodbye"] {
        let mut session = haggle();
        let answer = session.exchange(&option(Opt::NBD_OPT_ABORT, data));
        assert_eq!(answer, rep(Opt::NBD_OPT_ABORT, Rep::NBD_REP_ACK, b""));
        assert!(is_closed(&session));
        assert!(session.session.on_end().is_ok());
    }
}

#[test]
fn list_names_every_export() {
    let answer = haggle().exchange(&option(Opt::NBD_OPT_LIST, b""));
    let server = |data: &[u8]| rep(Opt::NBD_OPT_LIST, Rep::NBD_REP_SERVER, data);
    assert_eq!(
        answer,
        join(&[
            &server(b"\0\0\0\x05disk0a RAM disk"),
            &server(b"\0\0\0\x06frozen"),
            &rep(Opt::NBD_OPT_LIST, Rep::NBD_REP_ACK, b""),
        ])
    );
}

#[test]
fn an_option_that_fails_leaves_the_next_one_readable() {
    let invalid = Rep::NBD_REP_ERR_INVALID;
    let big = vec![b'x'; 70_000];
    let table = [
        (Opt::NBD_OPT_STARTTLS, &b""[..], Rep::NBD_REP_ERR_UNSUP),
        (Opt::NBD_OPT_STARTTLS, b"x", invalid),
        (Opt::NBD_OPT_PEEK_EXPORT, b"disk0", Rep::NBD_REP_ERR_UNSUP),
        (Opt(0x4242), &big, Rep::NBD_REP_ERR_UNSUP),
        (Opt::NBD_OPT_LIST, b"x", invalid),
        (Opt::NBD_OPT_STRUCTURED_REPLY, b"x", invalid),
        (Opt::NBD_OPT_EXTENDED_HEADERS, &big, invalid),
        (Opt::NBD_OPT_GO, b"\0\0\0\x09disk0", invalid),
        (Opt::NBD_OPT_INFO, &big, Rep::NBD_REP_ERR_TOO_BIG),
        (Opt::NBD_OPT_SET_META_CONTEXT, b"\0\0\0\0\0\0\0\0", invalid),
    ];
    for (opt, data, error) in table {
        for step in [1, 7, usize::MAX] {
            let mut session = haggle().split_at(step);
            let answer = session.exchange(&join(&[&option(opt, data), &option(Opt::NBD_OPT_ABORT, b"")]));
            let ack = rep(Opt::NBD_OPT_ABORT, Rep::NBD_REP_ACK, b"");
            let failed = answer.strip_suffix(&ack[..]).expect("the next option is answered");
            assert_eq!(failed[12..16], error.0.to_be_bytes(), "{opt}");
            assert_eq!(failed[20..].len(), failed[19] as usize, "{opt}");
        }
    }
}

#[test]
fn structured_replies_cannot_follow_extended_headers() {
    let mut session = haggle();
    session.exchange(&option(Opt::NBD_OPT_STRUCTURED_REPLY, b""));
    let opt = Opt::NBD_OPT_EXTENDED_HEADERS;
    assert_eq!(session.exchange(&option(opt, b"")), rep(opt, Rep::NBD_REP_ACK, b""));
    let opt = Opt::NBD_OPT_STRUCTURED_REPLY;
    let answer = session.exchange(&option(opt, b""));
    assert_eq!(answer[12..16], Rep::NBD_REP_ERR_EXT_HEADER_REQD.0.to_be_bytes());
}

#[test]
fn metadata_contexts_are_listed_by_name_and_by_wildcard() {
    let opt = Opt::NBD_OPT_LIST_META_CONTEXT;
    let mut session = haggle();
    session.exchange(&option(Opt::NBD_OPT_STRUCTURED_REPLY, b""));
    let ack = rep(opt, Rep::NBD_REP_ACK, b"");
    let listed = join(&[&rep(opt, Rep::NBD_REP_META_CONTEXT, b"\0\0\0\0base:allocation"), &ack]);
    let table: [(&[&str], &[u8]); 6] = [
        (&[], &listed),
        (&["base:"], &listed),
        (&["base:allocation", "base:", "base:allocation"], &listed),
        (&["base:other"], &ack),
        (&["qemu:", "x-mine:allocation"], &ack),
        (&["x-mine:", "base:allocation"], &listed),
    ];
    for (queries, expected) in table {
        assert_eq!(session.exchange(&option(opt, &context_data("", queries))), expected, "{queries:?}");
    }
    let unknown = session.exchange(&option(opt, &context_data("disk1", &[])));
    assert_eq!(unknown, rep(opt, Rep::NBD_REP_ERR_UNKNOWN, b"no such export"));
}

#[test]
fn a_selected_context_holds_for_its_export_and_until_the_next_selection() {
    let select = |name, queries: &[&str]| option(Opt::NBD_OPT_SET_META_CONTEXT, &context_data(name, queries));
    let chosen = select("disk0", &["base:allocation"]);
    let malformed = option(Opt::NBD_OPT_SET_META_CONTEXT, b"\0");
    let table = [
        (vec![chosen.clone()], "disk0", true),
        (vec![chosen.clone()], "", true),
        (vec![chosen.clone()], "frozen", false),
        (vec![chosen.clone(), select("disk0", &[])], "disk0", false),
        (vec![chosen.clone(), select("disk0", &["base:"])], "disk0", false),
        (vec![chosen.clone(), select("nowhere", &["base:allocation"])], "disk0", false),
        (vec![chosen.clone(), malformed], "disk0", false),
        (vec![select("frozen", &["base:allocation"]), chosen], "disk0", true),
        (vec![], "disk0", false),
    ];
    for (selections, name, selected) in table {
        let mut session = haggle();
        session.exchange(&option(Opt::NBD_OPT_STRUCTURED_REPLY, b""));
        selections.iter().for_each(|selection| drop(session.exchange(selection)));
        session.exchange(&option(Opt::NBD_OPT_GO, &info_data(name, &[])));
        let answer = session.exchange(&request(Cmd::NBD_CMD_BLOCK_STATUS, 0, 0, 512));
        let expected =
            if selected { ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS } else { ReplyType::NBD_REPLY_TYPE_ERROR };
        assert_eq!(answer[6..8], expected.0.to_be_bytes(), "{name} after {} selections", selections.len());
    }
}

#[test]
fn a_selection_answers_with_the_contexts_id() {
    let mut session = haggle();
    session.exchange(&option(Opt::NBD_OPT_EXTENDED_HEADERS, b""));
    let opt = Opt::NBD_OPT_SET_META_CONTEXT;
    let answer = session.exchange(&option(opt, &context_data("", &["base:allocation"])));
    let context = rep(opt, Rep::NBD_REP_META_CONTEXT, b"\0\0\0\x01base:allocation");
    assert_eq!(answer, join(&[&context, &rep(opt, Rep::NBD_REP_ACK, b"")]));
}

#[test]
fn a_thousand_options_are_enough() {
    let mut session = haggle();
    for _ in 0..1000 {
        session.exchange(&option(Opt::NBD_OPT_LIST, b""));
    }
    assert!(session.client_sends(&option(Opt::NBD_OPT_LIST, b"")).is_err());
}

#[test]
fn a_handshake_has_30_seconds() {
    let start = Instant::now();
    let mut session = connect_with(&Pool::new(0), start).session;
    let deadline = session.poll_timeout().expect("there is a deadline");
    assert_eq!(deadline, start + Duration::from_secs(30));
    assert!(session.on_timeout(deadline - Duration::from_nanos(1)).is_ok());
    assert!(session.on_timeout(deadline).is_err());
    assert_eq!(transmit(&[]).session.poll_timeout(), None);
}

#[test]
fn a_client_that_does_not_read_its_lists_is_not_listened_to() {
    let mut session = haggle();
    let list = option(Opt::NBD_OPT_LIST, b"");
    session.client_sends(&list.repeat(900)).unwrap();
    assert!(is_deaf(&session));
    let (unread, left) = (session.session.outbox().len(), session.untaken());
    assert!(unread < (64 << 10) + 200 && left > 0, "{unread} bytes wait, {left} bytes are left");
    session.sent();
    session.run().unwrap();
    assert!(session.untaken() < left);
}

// Transmission.

#[test]
fn what_was_written_is_read_in_every_form() {
    let data = pattern(4096);
    let mut session = transmit(&[]);
    assert_eq!(session.exchange(&write(8192, &data)), simple(0));
    let answer = session.exchange(&request(Cmd::NBD_CMD_READ, 0, 8192, 4096));
    assert_eq!(answer, join(&[&simple(0), &data]));

    let mut session = structured();
    assert_eq!(session.exchange(&write(8192, &data)), simple(0));
    let payload = join(&[&8192u64.to_be_bytes(), &data]);
    for flags in [0, NBD_CMD_FLAG_DF] {
        let answer = session.exchange(&request(Cmd::NBD_CMD_READ, flags, 8192, 4096));
        assert_eq!(answer, chunk(ReplyType::NBD_REPLY_TYPE_OFFSET_DATA, &payload));
    }

    let mut session = extended();
    let head = ext_request(Cmd::NBD_CMD_WRITE, NBD_CMD_FLAG_PAYLOAD_LEN, 8192, 4096);
    let done = ext_chunk(ReplyType::NBD_REPLY_TYPE_NONE, 8192, b"");
    assert_eq!(session.exchange(&join(&[&head, &data])), done);
    let answer = session.exchange(&ext_request(Cmd::NBD_CMD_READ, 0, 8192, 4096));
    assert_eq!(answer, ext_chunk(ReplyType::NBD_REPLY_TYPE_OFFSET_DATA, 8192, &payload));
}

#[test]
fn an_error_has_the_form_that_was_agreed() {
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
    let fua = NBD_CMD_FLAG_FUA;
    session.exchange(&join(&[
        &request(Cmd::NBD_CMD_FLUSH, fua, 0, 0),
        &request(Cmd::NBD_CMD_TRIM, fua, 65536, 131_072),
        &request(Cmd::NBD_CMD_CACHE, 0, 512, 1024),
        &request(Cmd::NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_FAST_ZERO, 0, 67_108_864),
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
fn short_payload_is_lent_and_never_copied() {
    let mut session = transmit(&[]).session;
    let input = blockmux_volume::Chunk::from_slice(&write(0, &pattern(512)).repeat(3));
    assert_eq!(session.on_bytes(&input), Ok(3 * 540));
    for nth in 0..3 {
        let (_, io) = session.poll_io().unwrap();
        let data = io.data.unwrap();
        assert_eq!(data.segs()[0].as_ptr(), input.lend(540 * nth + 28, 512).as_ptr());
    }
}

#[test]
fn long_payload_that_is_all_there_is_lent_too() {
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
    let taken = pool.take(32 << 10).unwrap();
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
fn payload_that_waits_long_asks_for_memory_less_and_less_often() {
    let pool = Pool::new(192 << 10);
    let mut session = connect_with(&pool, Instant::now());
    session.exchange(&join(&[&FLAGS, &option(Opt::NBD_OPT_GO, &info_data("", &[]))]));
    let whole = write(0, &pattern(100 << 10));
    for _ in 0..2 {
        let taken = pool.take(32 << 10).unwrap();
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
fn what_is_no_request_ends_the_session() {
    assert!(transmit(&[]).client_sends(&[0; 28]).is_err(), "wrong magic number");
    assert!(extended().client_sends(&join(&[&request(Cmd::NBD_CMD_READ, 0, 0, 512), &[0; 4]])).is_err());
    let huge = request(Cmd::NBD_CMD_WRITE, 0, 0, MAX_TRANSFER + 1);
    assert!(transmit(&[]).client_sends(&huge).is_err(), "payload above the maximum");
    let huge = ext_request(Cmd(77), NBD_CMD_FLAG_PAYLOAD_LEN, 0, u64::MAX);
    assert!(extended().client_sends(&huge).is_err(), "payload above the maximum");
}

#[test]
fn payload_of_a_command_that_has_none_is_skipped() {
    for command in [Cmd::NBD_CMD_READ, Cmd::NBD_CMD_TRIM, Cmd::NBD_CMD_FLUSH, Cmd(77)] {
        let head = ext_request(command, NBD_CMD_FLAG_PAYLOAD_LEN, 0, 512);
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
fn block_status_tells_data_from_holes() {
    let mut session = structured();
    session.exchange(&write(65536, &pattern(512)));
    let id = [0, 0, 0, 1];
    let hole = b"\0\x01\0\0\0\0\0\x03";
    let data = b"\0\x01\0\0\0\0\0\0";
    let rest = b"\0\0\x10\0\0\0\0\x03";
    let answer = session.exchange(&request(Cmd::NBD_CMD_BLOCK_STATUS, 0, 0, 131_072 + 4096));
    let status = ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS;
    assert_eq!(answer, chunk(status, &join(&[&id, hole, data, rest])));
    let answer = session.exchange(&request(Cmd::NBD_CMD_BLOCK_STATUS, NBD_CMD_FLAG_REQ_ONE, 0, 131_072));
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
        let flags = NBD_CMD_FLAG_PAYLOAD_LEN | NBD_CMD_FLAG_REQ_ONE;
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
fn a_device_error_is_eio_and_the_session_goes_on() {
    let mut session = transmit(&[]);
    session.holds_io = true;
    session.exchange(&request(Cmd::NBD_CMD_READ, 0, 0, 512));
    let (_, io) = session.submitted.pop_front().unwrap();
    session.session.on_io(Completion { tag: io.tag, result: Err(IoError::Medium) });
    assert_eq!(session.sent(), simple(5));
    session.holds_io = false;
    assert_eq!(session.exchange(&request(Cmd::NBD_CMD_FLUSH, 0, 0, 0)), simple(0));
}

#[test]
fn a_volume_that_answers_with_the_wrong_thing_puts_no_client_out_of_step() {
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
        session.session.on_io(Completion { tag: io.tag, result: Ok(output) });
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
    let taken = pool.take(4 << 20);
    let short = request(Cmd::NBD_CMD_READ, 0, 0, 64 << 10);
    session.client_sends(&short.repeat(5)).unwrap();
    assert_eq!(session.submitted.len(), 4, "256 KiB");
    drop(taken);
    session.run().unwrap();
    assert_eq!(session.submitted.len(), 5, "none is short any more");

    let _taken = pool.take(4 << 20);
    (0..5).for_each(|_| session.finish_one());
    session.sent();
    let long = request(Cmd::NBD_CMD_READ, 0, 0, 1 << 20);
    session.client_sends(&long.repeat(2)).unwrap();
    assert_eq!(session.submitted.len(), 1, "a long one is alone");
    session.finish_one();
    session.run().unwrap();
    assert_eq!(session.submitted.len(), 0, "until its data is sent");
    session.sent();
    session.run().unwrap();
    assert_eq!(session.submitted.len(), 1);
}

#[test]
fn a_client_that_reads_no_replies_is_not_listened_to() {
    let mut session = transmit(&[]);
    let flush = request(Cmd::NBD_CMD_FLUSH, 0, 0, 0);
    session.client_sends(&flush.repeat(70_000)).unwrap();
    assert!(is_deaf(&session));
    let unread = session.session.outbox().len();
    assert!((1 << 20..=(1 << 20) + 1024 * 16).contains(&unread), "{unread} bytes wait");
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
    assert!(session.session.on_end().is_ok());
}

#[test]
fn a_stop_finishes_what_is_in_flight_and_refuses_what_comes() {
    let mut session = structured();
    session.holds_io = true;
    session.exchange(&request(Cmd::NBD_CMD_CACHE, 0, 0, 512));
    session.session.on_stop();
    assert!(!is_closed(&session));
    let refused = session.exchange(&write(0, &[1; 512]));
    let payload = error_payload(Errno::NBD_ESHUTDOWN, "the server is stopping");
    assert_eq!(refused, chunk(ReplyType::NBD_REPLY_TYPE_ERROR, &payload));
    session.finish_one();
    assert_eq!(session.sent(), simple(0));
    assert!(is_closed(&session));
}

#[test]
fn a_stop_during_the_handshake_answers_the_option_that_has_begun() {
    let mut session = haggle();
    session.session.on_stop();
    assert!(is_closed(&session));

    let go = option(Opt::NBD_OPT_GO, &info_data("", &[]));
    let mut session = haggle();
    session.exchange(&go[..17]);
    session.session.on_stop();
    let answer = session.exchange(&go[17..]);
    assert_eq!(answer, rep(Opt::NBD_OPT_GO, Rep::NBD_REP_ERR_SHUTDOWN, b"the server is stopping"));
    assert!(is_closed(&session));

    let name = option(Opt::NBD_OPT_EXPORT_NAME, b"disk0");
    let mut session = haggle();
    session.exchange(&name[..18]);
    session.session.on_stop();
    assert!(session.client_sends(&name[18..]).is_err());
}

#[test]
fn a_client_may_leave_between_messages_but_not_within() {
    for mut session in [connect(), haggle(), transmit(&[])] {
        assert!(session.session.on_end().is_ok());
        assert!(is_closed(&session));
    }
    let mut session = haggle();
    session.exchange(&option(Opt::NBD_OPT_GO, &info_data("", &[]))[..20]);
    assert!(session.session.on_end().is_err());
    for long in [4096, 100 << 10] {
        let mut session = transmit(&[]);
        session.exchange(&write(0, &pattern(long))[..100]);
        assert!(session.session.on_end().is_err());
        assert!(is_closed(&session));
    }
}

// Any bytes, cut anywhere.

/// One of everything: handshake, all commands in a form, good and bad, and the end.
fn everything(form: Option<Opt>) -> Vec<u8> {
    let ext = form == Some(Opt::NBD_OPT_EXTENDED_HEADERS);
    let head = |command, flags, offset, length: u32| match ext {
        true => ext_request(command, flags, offset, length.into()),
        false => request(command, flags, offset, length),
    };
    let payload = if ext { NBD_CMD_FLAG_PAYLOAD_LEN } else { 0 };
    let mut bytes = FLAGS.to_vec();
    bytes.extend(option(Opt::NBD_OPT_LIST, b""));
    bytes.extend(option(Opt(99), b"what is this"));
    if let Some(form) = form {
        bytes.extend(option(form, b""));
        let data = context_data("", &["base:allocation"]);
        bytes.extend(option(Opt::NBD_OPT_LIST_META_CONTEXT, &data));
        bytes.extend(option(Opt::NBD_OPT_SET_META_CONTEXT, &data));
    }
    bytes.extend(option(Opt::NBD_OPT_INFO, &info_data("frozen", &[Info::NBD_INFO_NAME])));
    bytes.extend(option(Opt::NBD_OPT_GO, &info_data("disk0", &[Info::NBD_INFO_BLOCK_SIZE])));
    for (offset, len) in [(512, 512), (SIZE, 512), (65536, 66 << 10)] {
        bytes.extend(head(Cmd::NBD_CMD_WRITE, payload, offset, len));
        bytes.extend(pattern(len as usize));
    }
    for command in [Cmd::NBD_CMD_READ, Cmd::NBD_CMD_TRIM, Cmd::NBD_CMD_CACHE, Cmd::NBD_CMD_BLOCK_STATUS] {
        bytes.extend(head(command, 0, 512, 1024));
        bytes.extend(head(command, 0, 512, 1));
    }
    bytes.extend(head(Cmd::NBD_CMD_FLUSH, 0, 0, 0));
    bytes.extend(head(Cmd(55), 0, 0, 0));
    bytes.extend(head(Cmd::NBD_CMD_DISC, 0, 0, 0));
    bytes
}

const FORMS: [Option<Opt>; 3] =
    [None, Some(Opt::NBD_OPT_STRUCTURED_REPLY), Some(Opt::NBD_OPT_EXTENDED_HEADERS)];

/// What the target answers to `parts`, received at most `step` bytes at a time. I/O completes at the very end, so
/// that the order of replies does not depend on the cuts.
fn answers(parts: &[&[u8]], step: usize) -> Vec<u8> {
    let mut session = connect().split_at(step);
    session.holds_io = true;
    parts.iter().for_each(|part| session.client_sends(part).unwrap());
    assert!(is_closed(&session));
    while !session.submitted.is_empty() {
        session.finish_one();
    }
    session.sent()
}

#[test]
fn a_session_is_the_same_however_its_bytes_are_cut() {
    for form in FORMS {
        let bytes = everything(form);
        let whole = answers(&[&bytes], usize::MAX);
        for step in (1..70).chain([4095, 4096, 65_536, 65_564]) {
            assert!(answers(&[&bytes], step) == whole, "{form:?} in steps of {step}");
        }
        // Every single cut, but for the inside of the long payload.
        for cut in (0..1700).chain(bytes.len() - 400..bytes.len()) {
            let (front, back) = bytes.split_at(cut);
            assert!(answers(&[front, back], usize::MAX) == whole, "{form:?} cut at {cut}");
        }
    }
}

proptest! {
    #[test]
    fn bytes_with_errors_never_panic(
        form in 0..3usize,
        flips in prop::collection::vec((0..1_000_000usize, any::<u8>()), 1..8),
        step in 1..5000usize,
    ) {
        let mut bytes = everything(FORMS[form]);
        let len = bytes.len();
        // Errors in headers matter most, and the long payload is most of the bytes: keep out of it.
        for (at, value) in flips {
            let at = at % (len - (66 << 10));
            bytes[if at < 1300 { at } else { at + (66 << 10) }] = value;
        }
        let mut session = connect().split_at(step);
        let _ = session.client_sends(&bytes);
        let _ = session.session.on_end();
    }

    #[test]
    fn arbitrary_options_never_panic(opt in 0..13u32, data in prop::collection::vec(any::<u8>(), 0..64)) {
        let mut session = haggle();
        session.exchange(&option(Opt::NBD_OPT_STRUCTURED_REPLY, b""));
        let _ = session.client_sends(&option(Opt(opt), &data));
    }
}

const SIZE: u64 = 64 << 20;
const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";
const FLAGS: [u8; 4] = [0, 0, 0, 3];
