//! Tests of replies in every form, in any order and cut at any byte, and of invalid replies.

use super::script::*;
use crate::driver::session::StreamSession;
use crate::nbd::client::HeaderFormat;
use blockmux_volume::{Chunk, Extent, IoError, Op, Output, Pool, Seg};
use blockmux_wire::nbd::handshake::TransmissionFlags;
use blockmux_wire::nbd::transmission::{CmdFlags, ReplyType};
use proptest::prelude::*;
use std::time::Instant;

const SIZE: u64 = 1 << 30;
const DATA: ReplyType = ReplyType::NBD_REPLY_TYPE_OFFSET_DATA;
const HOLE: ReplyType = ReplyType::NBD_REPLY_TYPE_OFFSET_HOLE;
const DONE: ReplyType = ReplyType::NBD_REPLY_TYPE_NONE;
const ERROR: ReplyType = ReplyType::NBD_REPLY_TYPE_ERROR;
const STATUS: ReplyType = ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS;
const STATUS_EXT: ReplyType = ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS_EXT;
const CHUNKED: [HeaderFormat; 2] = [HeaderFormat::Structured, HeaderFormat::Extended];

fn sent(client: &mut NbdTestClient) -> ParsedRequest {
    let all = requests(&client.sent());
    assert_eq!(all.len(), 1);
    all[0].0
}

#[test]
fn simple_replies_come_in_any_order_cut_anywhere() {
    at_every_split(|split| {
        let mut client = NbdTestClient::ready(HeaderFormat::Simple, SIZE, 1, split);
        let target = list(&[0; 1024]);
        client.read(1, 0, 512);
        client.submit(2, Op::Read, 4096, 1024, Some(target.clone()));
        client.read(3, 8192, 512);
        let all = requests(&client.sent());
        let data = pattern(2048);
        let trace = [
            simple(all[1].0.cookie, 0, &data[512..1536]),
            simple(all[2].0.cookie, 5, b""),
            simple(all[0].0.cookie, 0, &data[..512]),
        ];
        client.feed(&trace[0]).unwrap();
        assert_eq!(client.done_data(), data[512..1536]);
        assert_eq!(target.to_vec(), data[512..1536], "the data is in the request's memory");
        client.feed(&trace[1]).unwrap();
        assert_eq!(client.done_error(), IoError::Medium);
        client.feed(&trace[2]).unwrap();
        assert_eq!(client.done_data(), data[..512]);
    });
}

#[test]
fn the_reply_that_nbdkit_gave_a_kernel_client_is_read() {
    let mut client = NbdTestClient::ready(HeaderFormat::Simple, SIZE, 1, 9);
    client.read(0, 0, 4096);
    let cookie = sent(&mut client).cookie;
    assert_eq!(cookie, 1 << 32, "generation 1 of slot 0, which is also the kernel's first cookie");
    client.feed(b"\x67\x44\x66\x98\0\0\0\0\0\0\0\x01\0\0\0\0XFSB\0\0\x10\0").unwrap();
    client.feed(&[0; 4088]).unwrap();
    assert_eq!(client.done_data()[..8], *b"XFSB\0\0\x10\0");
}

#[test]
fn complete_payloads_are_borrowed_from_the_receive_buffer() {
    for headers in [HeaderFormat::Simple, HeaderFormat::Structured, HeaderFormat::Extended] {
        let mut client = NbdTestClient::ready(headers, SIZE, 1, usize::MAX);
        client.read(0, 4096, 4096);
        client.read(1, 0, 4096);
        let all = requests(&client.sent());
        let reply = |request: ParsedRequest| match headers {
            HeaderFormat::Simple => simple(request.cookie, 0, &pattern(4096)),
            _ => chunk(headers, request, true, DATA, &at(request.offset, &pattern(4096))),
        };
        let both = [reply(all[0].0), reply(all[1].0)].concat();
        let input = Chunk::from_slice(&both);
        assert_eq!(
            client.session.on_bytes(&input, Instant::now()),
            Ok(both.len()),
            "all replies in one call"
        );
        let range = input.unread().as_ptr_range();
        use crate::driver::session::Initiator;
        for _ in 0..2 {
            let data = client.session.poll_done().unwrap().result.unwrap().into_data();
            assert!(range.contains(&data.segs()[0].as_ptr().cast_const()), "not a copy");
            assert_eq!(data.to_vec(), pattern(4096));
        }
    }
}

#[test]
fn long_payloads_are_received_where_they_belong() {
    for headers in [HeaderFormat::Simple, HeaderFormat::Structured, HeaderFormat::Extended] {
        for with_buffer in [true, false] {
            for split in [1000, 65_536, 200_000, usize::MAX] {
                let mut client = NbdTestClient::ready(headers, SIZE, 1, split);
                let len = 1 << 20;
                let mut target = list(&vec![0; 300_000]);
                target.push(Seg::from_slice(&vec![0; len - 300_000]));
                let data = with_buffer.then(|| target.clone());
                client.submit(0, Op::Read, 512, len as u64, data);
                client.read(1, 0, 512);
                let all = requests(&client.sent());
                let reply = |request: ParsedRequest, data: &[u8]| match headers {
                    HeaderFormat::Simple => simple(request.cookie, 0, data),
                    _ => chunk(headers, request, true, DATA, &at(request.offset, data)),
                };
                client.feed(&reply(all[0].0, &pattern(len))).unwrap();
                assert!(client.done_data() == pattern(len));
                assert!(!with_buffer || target.to_vec() == pattern(len));
                // The driver delivers all bytes that it has, so a whole reply is never placed.
                assert_eq!(client.placed, usize::from(split != usize::MAX));
                client.feed(&reply(all[1].0, &[7; 512])).unwrap();
                assert_eq!(client.done_data(), [7; 512]);
            }
        }
    }
}

#[test]
fn a_short_read_in_pieces_needs_no_pool() {
    at_every_split(|split| {
        let infos = [info_export(SIZE, 1)];
        let mut client = NbdTestClient::ready_with(HeaderFormat::Structured, &infos, split, Pool::new(0));
        client.read(0, 0, 1024);
        let request = sent(&mut client);
        client.feed(&chunk(HeaderFormat::Structured, request, false, HOLE, &hole(0, 512))).unwrap();
        client.feed(&chunk(HeaderFormat::Structured, request, true, DATA, &at(512, &pattern(512)))).unwrap();
        assert_eq!(client.done_data(), [vec![0; 512], pattern(512)].concat());
    });
}

#[test]
fn chunks_and_holes_in_any_order_make_a_read() {
    for headers in CHUNKED {
        at_every_split(|split| {
            let mut client = NbdTestClient::ready(headers, SIZE, 1, split);
            client.submit(0, Op::Read, 512, 2048, Some(list(&[9; 2048])));
            client.read(1, 512, 2048);
            for (request, _) in requests(&client.sent()) {
                client.feed(&chunk(headers, request, false, DATA, &at(2048, &[4; 512]))).unwrap();
                client.feed(&chunk(headers, request, false, HOLE, &hole(1024, 1024))).unwrap();
                client.feed(&chunk(headers, request, false, DATA, &at(512, &[1; 512]))).unwrap();
                client.assert_nothing_done();
                client.feed(&chunk(headers, request, true, DONE, b"")).unwrap();
                let expected = [vec![1; 512], vec![0; 1024], vec![4; 512]].concat();
                assert_eq!(client.done_data(), expected);
            }
        });
    }
}

#[test]
fn error_chunks_fail_the_request_when_its_reply_ends() {
    let at_offset = |errno, offset: u64| [&failure(errno, "bad")[..], &offset.to_be_bytes()].concat();
    for headers in CHUNKED {
        for (kind, payload, expected) in [
            (ERROR, failure(28, ""), IoError::NoSpace),
            (ERROR, failure(5, "the disk is on fire"), IoError::Medium),
            (ReplyType::NBD_REPLY_TYPE_ERROR_OFFSET, at_offset(5, 1023), IoError::Medium),
            (ReplyType(0x8042), [&failure(12, "")[..], b"new fields"].concat(), IoError::NoMemory),
        ] {
            at_every_split(|split| {
                let mut client = NbdTestClient::ready(headers, SIZE, 1, split);
                client.read(0, 0, 1024);
                let request = sent(&mut client);
                client.feed(&chunk(headers, request, false, DATA, &at(0, &[0; 512]))).unwrap();
                client.feed(&chunk(headers, request, false, kind, &payload)).unwrap();
                client.assert_nothing_done();
                client.feed(&chunk(headers, request, true, DONE, b"")).unwrap();
                assert_eq!(client.done_error(), expected);
                client.submit(0, Op::Write { fua: false }, 0, 512, Some(list(&[0; 512])));
                let request = sent(&mut client);
                let first = if kind == ReplyType::NBD_REPLY_TYPE_ERROR_OFFSET { ERROR } else { kind };
                client.feed(&chunk(headers, request, true, first, &payload)).unwrap();
                assert_eq!(client.done_error(), expected);
            });
        }
    }
}

#[test]
fn with_structured_replies_a_write_may_still_get_a_simple_reply() {
    let mut client = NbdTestClient::ready(HeaderFormat::Structured, SIZE, 1, 1);
    client.submit(0, Op::Write { fua: false }, 0, 512, Some(list(&[0; 512])));
    client.submit(1, Op::Write { fua: false }, 0, 512, Some(list(&[0; 512])));
    let all = requests(&client.sent());
    client.feed(&simple(all[1].0.cookie, 1, b"")).unwrap();
    assert_eq!(client.done_error(), IoError::Reserved);
    client.feed(&simple(all[0].0.cookie, 0, b"")).unwrap();
    assert!(matches!(client.done(), (0, Ok(Output::Nothing))));
}

fn status(headers: HeaderFormat, extents: &[(u64, u64)]) -> (ReplyType, Vec<u8>) {
    if headers == HeaderFormat::Extended {
        let mut payload = [[0, 0, 0, 7], (extents.len() as u32).to_be_bytes()].concat();
        extents.iter().flat_map(|e| [e.0, e.1]).for_each(|n| payload.extend(n.to_be_bytes()));
        (STATUS_EXT, payload)
    } else {
        let mut payload = vec![0, 0, 0, 7];
        extents.iter().flat_map(|e| [e.0, e.1]).for_each(|n| payload.extend((n as u32).to_be_bytes()));
        (STATUS, payload)
    }
}

#[test]
fn block_status_becomes_extents() {
    for headers in CHUNKED {
        at_every_split(|split| {
            let mut client = NbdTestClient::ready(headers, SIZE, 1, split);
            client.submit(0, Op::BlockStatus, 512, 8192, None);
            let request = sent(&mut client);
            assert_eq!((request.cmd, request.offset, request.len), (7, 512, 8192));
            let (kind, payload) = status(headers, &[(512, 0), (1024, 3), (1024, 2), (1 << 20, 0)]);
            client.feed(&chunk(headers, request, true, kind, &payload)).unwrap();
            let Ok(Output::Extents(extents)) = client.done().1 else { panic!() };
            let extent = |len, hole, zero| Extent { len, hole, zero };
            assert_eq!(
                extents,
                [
                    extent(512, false, false),
                    extent(1024, true, true),
                    extent(1024, false, true),
                    extent(5632, false, false)
                ]
            );
        });
    }
}

/// The protocol error for a reply to one request of 1,024 bytes at 512, for a read or for block
/// status.
fn fault_of(headers: HeaderFormat, op: Op, trace: impl Fn(ParsedRequest) -> Vec<u8>) -> &'static str {
    let faults = [1, 33, usize::MAX].map(|split| {
        let mut client = NbdTestClient::ready(headers, SIZE, 1 | TransmissionFlags::SEND_DF.bits(), split);
        client.submit(0, op, 512, 1024, (op == Op::Read).then(|| list(&[0; 1024])));
        let request = sent(&mut client);
        let error = client.feed(&trace(request)).expect_err("a protocol error");
        assert!(error.reference.starts_with("proto.md"), "{error}");
        client.assert_nothing_done();
        error.what
    });
    assert_eq!(faults[0], faults[2], "the error does not depend on the cuts");
    faults[0]
}

#[test]
fn each_violation_in_a_read_reply_is_reported() {
    for headers in CHUNKED {
        let reply = |last, kind, payload: Vec<u8>| {
            fault_of(headers, Op::Read, |request| chunk(headers, request, last, kind, &payload))
        };
        let outside = "sent read data outside the request";
        assert_eq!(reply(false, DATA, at(0, &[0; 512])), outside);
        assert_eq!(reply(false, DATA, at(511, &[0; 512])), outside);
        assert_eq!(reply(false, DATA, at(1025, &[0; 512])), outside);
        assert_eq!(reply(false, DATA, at(u64::MAX, &[0; 512])), outside);
        assert_eq!(reply(false, DATA, at(512, &[0; 1025])), outside);
        assert_eq!(reply(false, HOLE, hole(512, 0)), outside);
        assert_eq!(reply(false, HOLE, hole(512, u32::MAX)), outside);
        assert_eq!(reply(false, DATA, at(512, b"")), "sent an NBD_REPLY_TYPE_OFFSET_DATA without data");
        assert_eq!(reply(false, DATA, vec![0; 3]), "sent an NBD_REPLY_TYPE_OFFSET_DATA without data");
        let bytes12 = "sent an NBD_REPLY_TYPE_OFFSET_HOLE that is not 12 bytes long";
        assert_eq!(reply(false, HOLE, vec![0; 13]), bytes12);
        let early = "ended a read before all of its bytes were sent";
        assert_eq!(reply(true, DONE, vec![]), early);
        assert_eq!(reply(true, DATA, at(512, &[0; 512])), early);
        let none = "sent an NBD_REPLY_TYPE_NONE with payload or without DONE";
        assert_eq!(reply(false, DONE, vec![]), none);
        assert_eq!(reply(true, DONE, vec![0]), none);
        assert_eq!(reply(true, ReplyType(3), vec![]), "sent a reply chunk of unknown type");
        let (kind, payload) = status(headers, &[(1024, 0)]);
        assert_eq!(reply(true, kind, payload), "sent block status for a request of another kind");
        assert_eq!(reply(true, ERROR, vec![0; 5]), "sent an error chunk shorter than its fixed part");
        assert_eq!(reply(true, ERROR, failure(0, "")), "sent an error chunk with error 0");
        let long = "sent an error message longer than its chunk or than 4096 bytes";
        assert_eq!(reply(true, ERROR, failure(5, "text")[..9].to_vec()), long);
        assert_eq!(reply(true, ERROR, failure(5, &"a".repeat(4097))), long);
        let kind = ReplyType::NBD_REPLY_TYPE_ERROR_OFFSET;
        assert_eq!(
            reply(true, kind, failure(5, "")),
            "sent an NBD_REPLY_TYPE_ERROR_OFFSET without its offset"
        );
        let behind = [failure(5, ""), 1536u64.to_be_bytes().to_vec()].concat();
        assert_eq!(reply(true, kind, behind), "reported an error at an offset outside the request");
        let huge = failure(5, &"a".repeat(65_530));
        let huge = [huge, vec![0; 8]].concat();
        assert_eq!(reply(true, ERROR, huge), "sent an error chunk of more than 64 KiB");

        let twice = fault_of(headers, Op::Read, |request| {
            let first = chunk(headers, request, false, DATA, &at(512, &[0; 513]));
            [first, chunk(headers, request, false, HOLE, &hole(1024, 1))].concat()
        });
        assert_eq!(twice, "sent the same bytes of a read twice");
    }
}

#[test]
fn a_reply_of_errors_without_end_is_a_fault() {
    for headers in CHUNKED {
        let mut client = NbdTestClient::ready(headers, SIZE, 1, usize::MAX);
        client.read(0, 0, 512);
        let request = sent(&mut client);
        let errors = chunk(headers, request, false, ERROR, &failure(5, "")).repeat(1 << 16);
        client.feed(&errors).unwrap();
        let one_more = chunk(headers, request, false, ERROR, &failure(5, ""));
        let error = client.feed(&one_more).unwrap_err();
        assert_eq!(error.what, "reported tens of thousands of errors of one request");
    }
}

/// libnbd aborted at flags above 32 bits (CVE-2023-5871).
#[test]
fn each_violation_in_a_block_status_reply_is_reported() {
    for headers in CHUNKED {
        let reply = |(kind, payload): (ReplyType, Vec<u8>)| {
            fault_of(headers, Op::BlockStatus, |request| chunk(headers, request, true, kind, &payload))
        };
        let no_length = "described an extent of no length, or with a status beyond 32 bits";
        assert_eq!(reply(status(headers, &[(512, 0), (0, 0)])), no_length);
        let beyond = "described extents beyond the end of the requested range";
        assert_eq!(reply(status(headers, &[(1024, 0), (512, 0)])), beyond);
        let whole = "sent block status without whole descriptors";
        assert_eq!(reply(status(headers, &[])), whole);
        let (kind, mut payload) = status(headers, &[(1024, 0)]);
        payload.pop();
        assert_eq!(reply((kind, payload)), whole);
        let (kind, mut payload) = status(headers, &[(1024, 0)]);
        payload[3] = 8;
        let context = "sent the status of a metadata context that was not selected";
        assert_eq!(reply((kind, payload)), context);
        assert_eq!(reply((DONE, vec![])), "ended block status without describing an extent");
        let kind = "sent read data for a request that is not a read";
        assert_eq!(reply((DATA, at(512, &[0; 512]))), kind);
        let other =
            if headers == HeaderFormat::Extended { HeaderFormat::Structured } else { HeaderFormat::Extended };
        let form = "sent block status in the form that was not agreed";
        assert_eq!(reply(status(other, &[(1024, 0)])), form);
        let twice = fault_of(headers, Op::BlockStatus, |request| {
            let (kind, payload) = status(headers, &[(1024, 0)]);
            [false, true].map(|last| chunk(headers, request, last, kind, &payload)).concat()
        });
        assert_eq!(twice, "sent the status of one metadata context twice");
    }
    let (kind, mut payload) = status(HeaderFormat::Extended, &[(1024, 1 << 32)]);
    let fault = |payload: &[u8]| {
        fault_of(HeaderFormat::Extended, Op::BlockStatus, |r| {
            chunk(HeaderFormat::Extended, r, true, kind, payload)
        })
    };
    assert!(fault(&payload).ends_with("status beyond 32 bits"));
    payload[7] = 2;
    assert_eq!(fault(&payload), "counted its block status descriptors wrongly");
}

#[test]
fn inconsistent_heads_are_refused_before_their_payload_arrives() {
    // The server sends only the header, with a length of gigabytes.
    let head = |request: ParsedRequest, kind: ReplyType, len: u64| {
        let mut head = chunk(HeaderFormat::Extended, request, true, kind, b"");
        head[24..32].copy_from_slice(&len.to_be_bytes());
        head
    };
    for (op, kind, len, what) in [
        (Op::Read, ERROR, u64::MAX, "sent an error chunk of more than 64 KiB"),
        (Op::Read, DONE, 1 << 40, "sent an NBD_REPLY_TYPE_NONE with payload or without DONE"),
        (
            Op::BlockStatus,
            STATUS_EXT,
            8 + (16 << 21),
            "sent more than 2^20 block status descriptors in a chunk",
        ),
        (Op::BlockStatus, STATUS_EXT, u64::MAX, "sent block status without whole descriptors"),
    ] {
        assert_eq!(fault_of(HeaderFormat::Extended, op, |request| head(request, kind, len)), what);
    }
    let data =
        |request: ParsedRequest| [head(request, DATA, u64::MAX), 512u64.to_be_bytes().to_vec()].concat();
    assert_eq!(fault_of(HeaderFormat::Extended, Op::Read, data), "sent read data outside the request");
}

#[test]
fn a_reply_in_the_wrong_form_or_for_nothing_is_refused() {
    for headers in [HeaderFormat::Simple, HeaderFormat::Structured, HeaderFormat::Extended] {
        let magic = |_: ParsedRequest| vec![0; 32];
        assert_eq!(fault_of(headers, Op::Read, magic), "sent a reply with a wrong magic number");
        for other in CHUNKED.into_iter().filter(|other| *other != headers) {
            let reply = |request| [chunk(other, request, true, DONE, b""), vec![0; 32]].concat();
            assert_eq!(fault_of(headers, Op::Read, reply), "sent a reply in a form that was not agreed");
        }
    }
    let reply = |request: ParsedRequest| [simple(request.cookie, 0, b""), vec![0; 32]].concat();
    let form = "sent a reply in a form that was not agreed";
    assert_eq!(fault_of(HeaderFormat::Extended, Op::Read, reply), form);
    let due = "sent a simple reply where a structured one is due";
    assert_eq!(fault_of(HeaderFormat::Structured, Op::Read, reply), due);
    let refuse = |request: ParsedRequest| simple(request.cookie, 22, b"");
    assert_eq!(fault_of(HeaderFormat::Structured, Op::Read, refuse), due);
    assert_eq!(fault_of(HeaderFormat::Structured, Op::BlockStatus, reply), due);
    let offset = |mut request: ParsedRequest| {
        request.offset += 1;
        chunk(HeaderFormat::Extended, request, true, ERROR, &failure(5, ""))
    };
    let other = "repeated another offset than the request's";
    assert_eq!(fault_of(HeaderFormat::Extended, Op::Read, offset), other);

    let nobody = "answered a cookie that no request in flight has";
    for cookie in [0, 1, 2 << 32, u64::MAX] {
        assert_eq!(fault_of(HeaderFormat::Simple, Op::Read, |_| simple(cookie, 0, b"")), nobody);
    }
}

#[test]
fn a_second_reply_to_the_same_request_is_refused() {
    let mut client = NbdTestClient::ready(HeaderFormat::Simple, SIZE, 1, usize::MAX);
    client.read(0, 0, 512);
    let request = sent(&mut client);
    client.feed(&simple(request.cookie, 5, b"")).unwrap();
    client.read(1, 0, 512);
    let second = sent(&mut client);
    assert_eq!(second.cookie as u32, request.cookie as u32, "the slot is used again");
    assert_eq!(
        client.feed(&simple(request.cookie, 5, b"")).unwrap_err().what,
        "answered a cookie that no request in flight has"
    );
}

#[test]
fn short_borrowed_reads_forbid_fragments_if_the_server_supports_it() {
    let mut client =
        NbdTestClient::ready(HeaderFormat::Structured, SIZE, 1 | TransmissionFlags::SEND_DF.bits(), 1);
    client.read(0, 0, 1024);
    client.read(1, 0, 128 << 10);
    client.submit(2, Op::Read, 0, 512, Some(list(&[0; 512])));
    let all = requests(&client.sent());
    assert_eq!(all.iter().map(|(r, _)| r.flags).collect::<Vec<_>>(), [CmdFlags::DF.bits(), 0, 0]);
    client.feed(&chunk(HeaderFormat::Structured, all[0].0, false, DATA, &at(0, &[0; 512]))).unwrap();
    let second = chunk(HeaderFormat::Structured, all[0].0, true, DATA, &at(512, &[0; 512]));
    assert_eq!(client.feed(&second).unwrap_err().what, "fragmented a read that forbade it");
}

proptest! {
    #[test]
    fn a_read_in_random_chunks_is_put_together(
        cuts in prop::collection::btree_set(1usize..8192, 0..20),
        order in any::<prop::sample::Index>(),
        split in 1usize..9000,
        headers in prop::sample::select(CHUNKED.to_vec()),
    ) {
        let data = pattern(8192);
        let edges: Vec<usize> = [0].into_iter().chain(cuts).chain([8192]).collect();
        let mut pieces: Vec<(usize, usize)> = edges.windows(2).map(|pair| (pair[0], pair[1])).collect();
        let shift = order.index(pieces.len());
        pieces.rotate_left(shift);
        let mut client = NbdTestClient::ready(headers, SIZE, 1, split);
        client.read(0, 1024, 8192);
        let request = sent(&mut client);
        for (n, &(from, to)) in pieces.iter().enumerate() {
            let payload = at(1024 + from as u64, &data[from..to]);
            client.feed(&chunk(headers, request, n + 1 == pieces.len(), DATA, &payload)).unwrap();
        }
        prop_assert!(client.done_data() == data);
    }
}
