//! Servers that refuse an option with a rare error. The session continues without optional
//! features; otherwise the refusal has the server's own message.

use blockmux_proto::driver::session::{Demand, Initiator, StreamSession};
use blockmux_proto::nbd::client::{
    HeaderFormat, NbdFeatures, NbdHandshakeRefusal, NbdInitiatorConfig, NbdInitiatorSession, NbdSessionMode,
};
use blockmux_volume::{Chunk, Pool};
use blockmux_wire::nbd::handshake::*;
use std::time::Instant;

/// Errors without special handling in the session.
const ERRORS: [(Rep, &str); 4] = [
    (Rep::NBD_REP_ERR_PLATFORM, "NBD_REP_ERR_PLATFORM"),
    (Rep::NBD_REP_ERR_BLOCK_SIZE_REQD, "NBD_REP_ERR_BLOCK_SIZE_REQD"),
    (Rep::NBD_REP_ERR_TOO_BIG, "NBD_REP_ERR_TOO_BIG"),
    (Rep::NBD_REP_ERR_EXT_HEADER_REQD, "NBD_REP_ERR_EXT_HEADER_REQD"),
];

#[test]
fn a_refused_optional_option_is_not_used() {
    for (error, name) in ERRORS {
        let mut client = Client::greeted(NbdSessionMode::Go);
        assert_eq!(client.asked(), Opt::NBD_OPT_EXTENDED_HEADERS, "{name}");
        client.answer(Opt::NBD_OPT_EXTENDED_HEADERS, error, b"no");
        assert_eq!(client.asked(), Opt::NBD_OPT_STRUCTURED_REPLY, "{name}");
        client.answer(Opt::NBD_OPT_STRUCTURED_REPLY, error, b"no");
        assert_eq!(client.asked(), Opt::NBD_OPT_GO, "{name}");
        client.grant_go();
        let export = client.session.export().unwrap();
        assert_eq!((export.headers, export.contexts.len()), (HeaderFormat::Simple, 0), "{name}");
    }
}

#[test]
fn a_refused_context_leaves_a_session_without_block_status() {
    for (error, name) in ERRORS {
        let mut client = Client::greeted(NbdSessionMode::Go);
        client.answer(Opt::NBD_OPT_EXTENDED_HEADERS, Rep::NBD_REP_ACK, b"");
        // A selection before the error does not count.
        let set = Opt::NBD_OPT_SET_META_CONTEXT;
        client.answer(set, Rep::NBD_REP_META_CONTEXT, b"\0\0\0\x01base:allocation");
        client.answer(set, error, b"no");
        assert_eq!(client.asked(), Opt::NBD_OPT_GO, "{name}");
        client.grant_go();
        let export = client.session.export().unwrap();
        assert_eq!((export.headers, export.contexts.len()), (HeaderFormat::Extended, 0), "{name}");
    }
}

#[test]
fn a_refused_required_option_ends_the_session_with_the_servers_message() {
    for (mode, option, option_name) in [
        (NbdSessionMode::Go, Opt::NBD_OPT_GO, "NBD_OPT_GO"),
        (NbdSessionMode::Info, Opt::NBD_OPT_INFO, "NBD_OPT_INFO"),
        (NbdSessionMode::List, Opt::NBD_OPT_LIST, "NBD_OPT_LIST"),
    ] {
        for (error, name) in ERRORS {
            let mut client = Client::greeted(mode);
            if mode != NbdSessionMode::List {
                client.answer(Opt::NBD_OPT_EXTENDED_HEADERS, Rep::NBD_REP_ERR_UNSUP, b"");
                client.answer(Opt::NBD_OPT_STRUCTURED_REPLY, Rep::NBD_REP_ERR_UNSUP, b"");
            }
            assert_eq!(client.asked(), option, "{name}");
            // Sizes before the refusal do not describe the export.
            if mode != NbdSessionMode::List {
                client.answer(option, Rep::NBD_REP_INFO, b"\0\x03\0\0\x10\0\0\0\x10\0\0\x10\0\0");
            }
            client.answer(option, error, b"not here,\nnot now");
            assert!(!client.session.is_ready() && client.session.is_over(), "{name}");
            assert!(matches!(client.session.demand(), Demand::Close), "{name}");
            assert_eq!(client.asked(), Opt::NBD_OPT_ABORT, "{name}: it sends NBD_OPT_ABORT");
            assert!(client.session.export().is_none() && client.session.exports().is_empty(), "{name}");
            let refusal = client.session.refusal().unwrap();
            assert_eq!(refusal.reply(), Some(error));
            assert!(
                matches!(refusal, NbdHandshakeRefusal::Option { .. }) && !refusal.is_retryable(),
                "{name}"
            );
            let line = format!("server refused {option_name} with {name}: not here, not now");
            assert_eq!(refusal.to_string(), line);
        }
    }
}

/// A session, and the bytes that it has sent to the server.
struct Client {
    session: NbdInitiatorSession,
    sent: Vec<u8>,
}

impl Client {
    fn greeted(mode: NbdSessionMode) -> Client {
        let config = NbdInitiatorConfig { export: "x".to_owned(), mode, features: NbdFeatures::default() };
        let session = NbdInitiatorSession::new(config, Pool::new(1 << 20), Instant::now());
        let mut client = Client { session, sent: Vec::new() };
        client.feed(b"NBDMAGICIHAVEOPT\0\x03");
        assert_eq!(client.sent.drain(..4).as_slice(), [0, 0, 0, 3], "client flags");
        client
    }

    fn feed(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let took = self.session.on_bytes(&Chunk::from_slice(rest), Instant::now()).unwrap();
            assert!(took > 0, "the session waits for more than one message");
            rest = &rest[took..];
        }
        self.sent = self.session.outbox().take_bytes();
    }

    /// The last option that was sent.
    fn asked(&self) -> Opt {
        assert_eq!(self.sent[..8], *b"IHAVEOPT");
        Opt(u32::from_be_bytes(self.sent[8..12].try_into().unwrap()))
    }

    fn answer(&mut self, option: Opt, reply: Rep, data: &[u8]) {
        let len = data.len() as u32;
        let numbers = [option.0, reply.0, len].map(u32::to_be_bytes).concat();
        self.feed(&[&NBD_REP_MAGIC.to_be_bytes()[..], &numbers, data].concat());
    }

    /// Describes an export of 1 MiB and enters transmission.
    fn grant_go(&mut self) {
        self.answer(Opt::NBD_OPT_GO, Rep::NBD_REP_INFO, b"\0\0\0\0\0\0\0\x10\0\0\0\x01");
        self.answer(Opt::NBD_OPT_GO, Rep::NBD_REP_ACK, b"");
        assert!(self.session.is_ready() && self.session.refusal().is_none());
    }
}
