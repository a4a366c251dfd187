//! Random and malformed messages of a server cause no panic, no memory leak, and no demand that
//! cannot be met.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod handshake;
mod reply;
mod script;
mod tls;
mod transmission;

use super::*;
use blockmux_volume::{Op, SgList, Tag};
use blockmux_wire::nbd::handshake::{Opt, Rep};
use blockmux_wire::nbd::transmission::ReplyType;
use proptest::prelude::*;
use script::*;
use std::time::Instant;

fn mode() -> impl Strategy<Value = NbdSessionMode> {
    prop::sample::select(vec![NbdSessionMode::Go, NbdSessionMode::Info, NbdSessionMode::List])
}

fn headers() -> impl Strategy<Value = HeaderFormat> {
    prop::sample::select(vec![HeaderFormat::Simple, HeaderFormat::Structured, HeaderFormat::Extended])
}

/// Option replies, valid ones and slightly wrong ones, mixed with random bytes.
fn option_reply() -> impl Strategy<Value = Vec<u8>> {
    let rep = prop_oneof![1..5u32, (1..12u32).prop_map(|n| n | 1 << 31), any::<u32>()];
    let data = prop_oneof![
        Just(info_export(1 << 30, 0xffff)),
        Just(info_block_size(1, 4096, 1 << 20)),
        Just(b"\0\0\0\x07base:allocation".to_vec()),
        Just(b"".to_vec()),
        prop::collection::vec(any::<u8>(), 0..40),
    ];
    prop_oneof![
        9 => (1..12u32, rep, data).prop_map(|(opt, rep, data)| reply(Opt(opt), Rep(rep), &data)),
        1 => prop::collection::vec(any::<u8>(), 0..200),
    ]
}

/// Reply chunks to requests that are, or are not, in flight.
fn any_chunk(headers: HeaderFormat) -> impl Strategy<Value = Vec<u8>> {
    let kind = prop_oneof![0..7u16, 0x8000..0x8004u16, any::<u16>()];
    let request = (0..6u32, 1..3u32, 0..3u64).prop_map(|(slot, generation, page)| ParsedRequest {
        flags: 0,
        cmd: 0,
        cookie: u64::from(generation) << 32 | u64::from(slot),
        offset: page * 4096,
        len: 0,
    });
    let payload = prop_oneof![
        (0..9u64, 0..5000usize).prop_map(|(block, len)| at(block * 512, &pattern(len))),
        (0..9u64, 0..5000u32).prop_map(|(block, len)| hole(block * 512, len)),
        (0..200u32).prop_map(|errno| failure(errno, "text")),
        prop::collection::vec(any::<u32>(), 1..8)
            .prop_map(|n| n.iter().flat_map(|n| (n & 0x0200_0007).to_be_bytes()).collect()),
        Just(Vec::new()),
    ];
    (request, any::<bool>(), kind, payload, 0..8u32).prop_map(
        move |(request, last, kind, payload, is_simple)| match headers {
            HeaderFormat::Simple => simple(request.cookie, u32::from(is_simple == 0) * 5, &payload),
            HeaderFormat::Structured if is_simple == 0 => simple(request.cookie, 0, b""),
            _ => chunk(headers, request, last, ReplyType(kind), &payload),
        },
    )
}

fn submit_some(client: &mut NbdTestClient) {
    let data = |len: usize| Some(list(&vec![0; len]));
    for (tag, op, offset, len, data) in [
        (0, Op::Read, 0, 4096, None),
        (1, Op::Read, 4096, 8192, data(8192)),
        (2, Op::Write { fua: true }, 0, 512, data(512)),
        (3, Op::BlockStatus, 0, 1 << 20, None),
        (4, Op::Flush, 0, 0, None),
        (5, Op::Read, 0, 200 << 10, None::<SgList>),
    ] {
        client.session.submit(Io { tag: Tag(tag), op, offset, len, data });
    }
}

/// Calls all methods that may be called at any time.
fn poke(client: &mut NbdTestClient) {
    while client.session.poll_done().is_some() {}
    client.sent();
    let _ = client.session.on_end(Instant::now());
    client.session.on_stop();
    assert!(client.session.take_unfinished().len() <= DEPTH);
    let _ = client.session.demand();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    // `NbdTestClient` asserts that no demand is above MAX_DEMAND and that every met demand leads
    // somewhere.
    #[test]
    fn any_bytes_are_a_handshake_or_an_error(
        mode in mode(),
        greets in any::<bool>(),
        split in 1..100usize,
        bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut client = NbdTestClient::new(mode, NbdFeatures::default(), split);
        let start = if greets { greeting(bytes.len() as u16 % 4) } else { Vec::new() };
        let _ = client.feed(&[start, bytes].concat());
        poke(&mut client);
    }

    #[test]
    fn any_option_replies_are_a_handshake_or_an_error(
        mode in mode(),
        split in 1..100usize,
        replies in prop::collection::vec(option_reply(), 0..12),
    ) {
        let mut client = NbdTestClient::new(mode, NbdFeatures::default(), split);
        let _ = client.feed(&[greeting(3), replies.concat()].concat());
        submit_some(&mut client);
        poke(&mut client);
    }

    #[test]
    fn any_chunks_are_replies_or_an_error(
        (headers, chunks) in headers()
            .prop_flat_map(|headers| (Just(headers), prop::collection::vec(any_chunk(headers), 0..30))),
        split in 1..9000usize,
    ) {
        let pool = Pool::new(1 << 20);
        let infos = [info_export(1 << 30, 0xfffd)];
        let mut client = NbdTestClient::ready_with(headers, &infos, split, pool.clone());
        submit_some(&mut client);
        for chunk in chunks {
            if client.feed(&chunk).is_err() {
                break;
            }
        }
        poke(&mut client);
        drop(client);
        prop_assert_eq!(pool.out_bytes(), 0, "all memory came back");
    }

    #[test]
    fn any_bytes_in_transmission_are_replies_or_an_error(
        headers in headers(),
        split in 1..100usize,
        bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut client = NbdTestClient::ready(headers, 1 << 30, 0xfffd, split);
        submit_some(&mut client);
        let _ = client.feed(&bytes);
        poke(&mut client);
    }
}

#[test]
fn a_session_that_is_not_ready_fails_what_is_submitted() {
    let mut client = NbdTestClient::new(NbdSessionMode::Go, NbdFeatures::default(), 1);
    assert_eq!(client.session.room(), 0);
    client.session.submit(Io::new(Tag(7), Op::Flush, 0, 0));
    let done = client.session.poll_done().unwrap();
    assert!(matches!((done.tag, done.result), (Tag(7), Err(IoError::PathLost))));
}
