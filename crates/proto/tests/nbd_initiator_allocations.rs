//! An NBD initiator session allocates nothing per I/O once it is warm.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod counted_initiator;
#[path = "../../volume/tests/counting/mod.rs"]
mod counting;

use blockmux_proto::nbd::client::{NbdFeatures, NbdInitiatorConfig, NbdInitiatorSession, NbdSessionMode};
use blockmux_volume::Pool;
use blockmux_wire::nbd::handshake::*;
use blockmux_wire::nbd::transmission::*;
use counted_initiator::CountedInitiator;
use std::time::Instant;
use zerocopy::{FromBytes, IntoBytes};

/// A server without extensions that completes all requests at once, as a function from the bytes
/// that it receives to its reply.
fn server() -> impl FnMut(&[u8]) -> Vec<u8> {
    let (mut unread, mut greeted, mut has_flags, mut is_ready) = (Vec::new(), false, false, false);
    move |bytes| {
        unread.extend_from_slice(bytes);
        let mut out = Vec::new();
        if !std::mem::replace(&mut greeted, true) {
            let handshake_flags = (NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES).into();
            let greeting =
                Greeting { magic: NBD_MAGIC.into(), opts_magic: NBD_OPTS_MAGIC.into(), handshake_flags };
            out.extend(greeting.as_bytes());
        }
        if !has_flags && unread.len() >= size_of::<ClientFlags>() {
            unread.drain(..size_of::<ClientFlags>());
            has_flags = true;
        }
        let mut rest = &unread[..];
        while !is_ready && let Ok((head, data)) = OptionHead::read_from_prefix(rest) {
            rest = &data[head.length.get() as usize..];
            is_ready = answer_option(Opt(head.option.get()), &mut out);
        }
        while is_ready && let Ok((request, data)) = Request::read_from_prefix(rest) {
            rest = answer(&request, data, &mut out);
        }
        let left = rest.len();
        unread.drain(..unread.len() - left);
        out
    }
}

/// Answers an option; returns whether transmission begins.
fn answer_option(option: Opt, out: &mut Vec<u8>) -> bool {
    let mut reply = |reply_type: Rep, data: &[u8]| {
        let head = OptionReplyHead {
            magic: NBD_REP_MAGIC.into(),
            option: option.0.into(),
            reply_type: reply_type.0.into(),
            length: (data.len() as u32).into(),
        };
        out.extend(head.as_bytes());
        out.extend(data);
    };
    if option != Opt::NBD_OPT_GO {
        reply(Rep::NBD_REP_ERR_UNSUP, &[]);
        return false;
    }
    let flags = TransmissionFlags::HAS_FLAGS
        | TransmissionFlags::SEND_FLUSH
        | TransmissionFlags::SEND_FUA
        | TransmissionFlags::SEND_TRIM;
    let info = InfoExport {
        info_type: Info::NBD_INFO_EXPORT.0.into(),
        size: (1 << 20).into(),
        transmission_flags: flags.bits().into(),
    };
    reply(Rep::NBD_REP_INFO, info.as_bytes());
    reply(Rep::NBD_REP_ACK, &[]);
    true
}

/// Answers a request; returns the bytes after the request's payload.
fn answer<'a>(request: &Request, data: &'a [u8], out: &mut Vec<u8>) -> &'a [u8] {
    let (command, len) = (Cmd(request.command.get()), request.length.get() as usize);
    let reply = SimpleReply { magic: NBD_SIMPLE_REPLY_MAGIC.into(), error: 0.into(), cookie: request.cookie };
    out.extend(reply.as_bytes());
    if command == Cmd::NBD_CMD_READ {
        out.resize(out.len() + len, 0);
    }
    if command == Cmd::NBD_CMD_WRITE { &data[len..] } else { data }
}

#[test]
fn reads_writes_flushes_and_discards_allocate_nothing() {
    let config = NbdInitiatorConfig {
        export: String::new(),
        mode: NbdSessionMode::Go,
        features: NbdFeatures::default(),
    };
    let session = NbdInitiatorSession::new(config, Pool::new(16 << 20), Instant::now());
    CountedInitiator::new(session, server()).assert_io_allocates_nothing("simple replies");
}
