//! Whole sessions as packet traces: the bytes of the client and those of the target.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod any_size;
mod cuts;
mod handover;
mod handshake;
mod tls;
mod transmission;

use super::NbdTargetSession;
use crate::driver::session::{Demand, StreamSession, Timed};
use crate::driver::target::{IoSource, TargetLifecycle};
use crate::exports::{Export, Exports};
use crate::testing::Pump;
use blockmux_volume::{Completion, IoError, MAX_TRANSFER, MemVolume, Op, Output, Pool};
use blockmux_wire::nbd::handshake::*;
use blockmux_wire::nbd::transmission::*;
use proptest::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Session = Pump<NbdTargetSession>;

/// `disk0`, writable, and `frozen`, read-only: 64 MiB of RAM each, in 512-byte blocks with 64 KiB
/// allocation units.
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
    Pump::new(NbdTargetSession::new(exports.clone(), pool.clone(), now), &exports)
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

/// Negotiates the options and enters transmission on the default export.
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

// A Linux client's bytes from a capture with nbdkit. The target's answers differ from nbdkit's in
// the flags, and in block sizes, which nbdkit sends only on request.

#[test]
fn the_kernels_session_runs_as_captured() {
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

#[test]
fn a_client_may_disconnect_between_messages_but_not_within() {
    for mut session in [connect(), haggle(), transmit(&[])] {
        assert!(session.session.on_end(Instant::now()).is_ok());
        assert!(is_closed(&session));
    }
    let mut session = haggle();
    session.exchange(&option(Opt::NBD_OPT_GO, &info_data("", &[]))[..20]);
    assert!(session.session.on_end(Instant::now()).is_err());
    for long in [4096, 100 << 10] {
        let mut session = transmit(&[]);
        session.exchange(&write(0, &pattern(long))[..100]);
        assert!(session.session.on_end(Instant::now()).is_err());
        assert!(is_closed(&session));
    }
}

const SIZE: u64 = 64 << 20;
const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";
const FLAGS: [u8; 4] = [0, 0, 0, 3];
