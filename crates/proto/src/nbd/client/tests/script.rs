//! A scripted server for tests. A driver delivers its bytes in pieces of any size.

use crate::driver::session::Initiator;
use crate::nbd::client::{
    HeaderFormat, NbdFeatures, NbdInitiatorConfig, NbdInitiatorSession, NbdSessionMode,
};
use crate::testing::Driver;
use blockmux_volume::{Pool, Seg, SgList};
use blockmux_wire::nbd::handshake::{NBD_OPTS_MAGIC, NBD_REP_MAGIC, Opt, Rep};
use blockmux_wire::nbd::transmission::{
    NBD_EXTENDED_REPLY_MAGIC, NBD_SIMPLE_REPLY_MAGIC, NBD_STRUCTURED_REPLY_MAGIC, ReplyType,
};
use std::time::Instant;

pub(super) type NbdTestClient = Driver<NbdInitiatorSession>;

impl NbdTestClient {
    pub(super) fn new(mode: NbdSessionMode, features: NbdFeatures, step: usize) -> NbdTestClient {
        NbdTestClient::with_pool(mode, features, step, Pool::new(64 << 20))
    }

    pub(super) fn with_pool(
        mode: NbdSessionMode,
        features: NbdFeatures,
        step: usize,
        pool: Pool,
    ) -> NbdTestClient {
        let config = NbdInitiatorConfig { export: "x".into(), mode, features };
        Driver::of(NbdInitiatorSession::new(config, pool, Instant::now()), step)
    }

    /// A session in transmission with an empty outbox. It has negotiated block status if the
    /// headers allow it.
    pub(super) fn ready(headers: HeaderFormat, size: u64, flags: u16, step: usize) -> NbdTestClient {
        NbdTestClient::ready_with(headers, &[info_export(size, flags)], step, Pool::new(64 << 20))
    }

    pub(super) fn ready_with(
        headers: HeaderFormat,
        infos: &[Vec<u8>],
        step: usize,
        pool: Pool,
    ) -> NbdTestClient {
        let features = NbdFeatures {
            extended_headers: headers == HeaderFormat::Extended,
            structured_replies: headers != HeaderFormat::Simple,
        };
        let mut client = NbdTestClient::with_pool(NbdSessionMode::Go, features, step, pool);
        client.feed(&greeting(3)).unwrap();
        let opt = if headers == HeaderFormat::Extended {
            Opt::NBD_OPT_EXTENDED_HEADERS
        } else {
            Opt::NBD_OPT_STRUCTURED_REPLY
        };
        if headers != HeaderFormat::Simple {
            client.feed(&reply(opt, Rep::NBD_REP_ACK, b"")).unwrap();
            let set = Opt::NBD_OPT_SET_META_CONTEXT;
            client.feed(&reply(set, Rep::NBD_REP_META_CONTEXT, b"\0\0\0\x07base:allocation")).unwrap();
            client.feed(&reply(set, Rep::NBD_REP_ACK, b"")).unwrap();
        }
        for info in infos {
            client.feed(&reply(Opt::NBD_OPT_GO, Rep::NBD_REP_INFO, info)).unwrap();
        }
        client.feed(&reply(Opt::NBD_OPT_GO, Rep::NBD_REP_ACK, b"")).unwrap();
        assert!(client.session.is_ready());
        client.sent();
        client
    }
}

/// Runs a trace with pieces of one byte, of several sizes, and as a whole.
pub(super) fn at_every_split(trace: impl Fn(usize)) {
    (1..=70).for_each(&trace);
    trace(usize::MAX);
}

pub(super) fn list(bytes: &[u8]) -> SgList {
    SgList::one(Seg::from_slice(bytes))
}

pub(super) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 7 + n / 251) as u8).collect()
}

/// A newstyle greeting.
pub(super) fn greeting(flags: u16) -> Vec<u8> {
    [b"NBDMAGICIHAVEOPT".as_slice(), &flags.to_be_bytes()].concat()
}

/// An option as the client sends it.
pub(super) fn option(opt: Opt, data: &[u8]) -> Vec<u8> {
    let len = data.len() as u32;
    [&NBD_OPTS_MAGIC.to_be_bytes()[..], &opt.0.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

/// A reply to an option.
pub(super) fn reply(opt: Opt, rep: Rep, data: &[u8]) -> Vec<u8> {
    let len = data.len() as u32;
    let (magic, opt, rep) = (NBD_REP_MAGIC.to_be_bytes(), opt.0.to_be_bytes(), rep.0.to_be_bytes());
    [&magic[..], &opt, &rep, &len.to_be_bytes(), data].concat()
}

/// The data of an `NBD_INFO_EXPORT`.
pub(super) fn info_export(size: u64, flags: u16) -> Vec<u8> {
    [&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()
}

/// The data of an `NBD_INFO_BLOCK_SIZE`.
pub(super) fn info_block_size(minimum: u32, preferred: u32, maximum: u32) -> Vec<u8> {
    [&[0, 3][..], &minimum.to_be_bytes(), &preferred.to_be_bytes(), &maximum.to_be_bytes()].concat()
}

/// A request as the client sends it, without payload, compact or extended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ParsedRequest {
    pub(super) flags: u16,
    pub(super) cmd: u16,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// Parses requests; returns each with its payload.
pub(super) fn requests(mut bytes: &[u8]) -> Vec<(ParsedRequest, Vec<u8>)> {
    let mut all = Vec::new();
    let mut take = |n: usize| {
        let (head, rest) = bytes.split_at_checked(n)?;
        bytes = rest;
        Some(head.iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte)))
    };
    while let Some(magic) = take(4) {
        let is_extended = magic == 0x21e4_1c71;
        assert!(is_extended || magic == 0x2560_9513, "{magic:#x}");
        let (flags, cmd) = (take(2).unwrap() as u16, take(2).unwrap() as u16);
        let (cookie, offset) = (take(8).unwrap(), take(8).unwrap());
        let len = take(if is_extended { 8 } else { 4 }).unwrap();
        let payload_len = if cmd == 1 { len } else { 0 };
        let payload = (0..payload_len).map(|_| take(1).unwrap() as u8).collect();
        all.push((ParsedRequest { flags, cmd, cookie, offset, len }, payload));
    }
    all
}

/// A simple reply.
pub(super) fn simple(cookie: u64, error: u32, data: &[u8]) -> Vec<u8> {
    [&NBD_SIMPLE_REPLY_MAGIC.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes(), data].concat()
}

/// A chunk of a structured or extended reply to `request`.
pub(super) fn chunk(
    headers: HeaderFormat,
    request: ParsedRequest,
    last: bool,
    kind: ReplyType,
    payload: &[u8],
) -> Vec<u8> {
    let (flags, kind, cookie) =
        (u16::from(last).to_be_bytes(), kind.0.to_be_bytes(), request.cookie.to_be_bytes());
    let len = payload.len() as u64;
    if headers == HeaderFormat::Extended {
        let magic = NBD_EXTENDED_REPLY_MAGIC.to_be_bytes();
        let offset = request.offset.to_be_bytes();
        [&magic[..], &flags, &kind, &cookie, &offset, &len.to_be_bytes(), payload].concat()
    } else {
        let magic = NBD_STRUCTURED_REPLY_MAGIC.to_be_bytes();
        [&magic[..], &flags, &kind, &cookie, &(len as u32).to_be_bytes(), payload].concat()
    }
}

/// The payload of an `NBD_REPLY_TYPE_OFFSET_DATA`.
pub(super) fn at(offset: u64, data: &[u8]) -> Vec<u8> {
    [&offset.to_be_bytes()[..], data].concat()
}

/// The payload of an `NBD_REPLY_TYPE_OFFSET_HOLE`.
pub(super) fn hole(offset: u64, len: u32) -> Vec<u8> {
    at(offset, &len.to_be_bytes())
}

/// The payload of an `NBD_REPLY_TYPE_ERROR`.
pub(super) fn failure(errno: u32, message: &str) -> Vec<u8> {
    [&errno.to_be_bytes()[..], &(message.len() as u16).to_be_bytes(), message.as_bytes()].concat()
}
