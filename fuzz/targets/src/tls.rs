//! TLS with pre-shared keys between two of our ends, with bytes that are modified in transit,
//! during the handshake and after it.
//!
//! Both ends must terminate, accept no data from a peer without a key, and deliver only data that
//! the other end has sent.

use crate::choices::Choices;
use crate::nvme_auth::spoil;
use blockmux_tls::{
    ClientCredentials, HANDSHAKE, Hash, MAX_HANDSHAKE, PostHandshakeMessages, Psk, ServerCredentials, Tls,
};
use std::sync::Arc;

/// One end, and the data that it has received.
struct End {
    tls: Tls,
    said: Vec<u8>,
    heard: Vec<u8>,
    has_failed: bool,
}

/// Reads `data` as choices, as data to send, and as replacements of bytes.
pub(crate) fn tls(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    messages(data);
    let all = [key("one", 1, Hash::Sha256), key("two", 2, Hash::Sha384), key("two", 3, Hash::Sha384)];
    let (offered, known) = (some(&all, choices.byte()), some(&all, choices.byte()));
    // A server has one key for each name.
    let found = |identity: &[u8]| known.iter().find(|key| key.identity == identity);
    let agreed = offered.iter().find_map(|own| found(&own.identity).map(|other| own == other));
    let Ok(client) = Tls::client(&ClientCredentials::Psks(offered.as_slice().into())) else {
        let is_twice = |key: &Psk| offered.iter().filter(|other| other.identity == key.identity).count() > 1;
        assert!(offered.iter().any(is_twice), "a client with keys of different names begins");
        return;
    };
    let keys = known.clone();
    let lookup: blockmux_tls::Lookup =
        Arc::new(move |identity| keys.iter().find(|key| key.identity == identity).cloned());
    let server = Tls::server(&ServerCredentials::Psks(lookup)).expect("a server needs no key to begin");
    let (mut client, mut server) = (End::new(client), End::new(server));
    let (mut stream, mut is_spoiled) = (&stream[..], false);
    client.hear(&[], &mut choices);
    for _ in 0..MAX_TURNS {
        let (mut to_server, mut to_client) = (client.output(), server.output());
        if !to_server.is_empty() {
            is_spoiled |= spoil(&mut to_server, &mut choices, &mut stream);
        }
        if !to_client.is_empty() {
            is_spoiled |= spoil(&mut to_client, &mut choices, &mut stream);
        }
        server.hear(&to_server, &mut choices);
        client.hear(&to_client, &mut choices);
        for end in [&mut client, &mut server] {
            let len = usize::from(choices.byte()).min(stream.len());
            let (said, rest) = stream.split_at(len);
            end.say(said);
            stream = rest;
        }
        assert!(
            client.said.starts_with(&server.heard),
            "the server received data that the client has not sent"
        );
        assert!(
            server.said.starts_with(&client.heard),
            "the client received data that the server has not sent"
        );
        if client.is_quiet() && server.is_quiet() {
            break;
        }
    }
    assert!(
        agreed == Some(true) || !(client.tls.is_open() || server.tls.is_open()),
        "TLS was established without a common key"
    );
    if !is_spoiled && agreed == Some(true) {
        assert!(client.tls.is_open() && server.tls.is_open() && !client.has_failed && !server.has_failed);
        assert!(server.heard == client.said && client.heard == server.said);
    }
}

/// Passes the bytes to both ends as decrypted records, as the kernel delivers them with kTLS.
fn messages(data: &[u8]) {
    for is_client in [false, true] {
        let mut messages = PostHandshakeMessages::default();
        for part in data.chunks(1 + data.len() % 40) {
            let content_type = if part.len() % 5 == 4 { part[0] } else { HANDSHAKE };
            if messages.take(content_type, part, is_client).is_err() {
                break;
            }
        }
    }
}

impl End {
    fn new(tls: Tls) -> End {
        End { tls, said: Vec::new(), heard: Vec::new(), has_failed: false }
    }

    /// Receives bytes in pieces, until this end fails or has ended.
    fn hear(&mut self, bytes: &[u8], choices: &mut Choices<'_>) {
        let (mut plain, mut at) = ([0; 300], 0);
        let step = 1 + usize::from(choices.byte()) * 16;
        while !self.has_failed {
            let part = &bytes[at..bytes.len().min(at + step)];
            let was_open = self.tls.is_open();
            match self.tls.receive(part, &mut plain) {
                Ok(moved) => {
                    assert!(moved.taken <= part.len() && moved.given <= plain.len());
                    assert!(
                        moved.given == 0 || self.tls.is_open(),
                        "data was received before the handshake was complete"
                    );
                    self.heard.extend(&plain[..moved.given]);
                    at += moved.taken;
                    let has_moved = moved.taken > 0 || moved.given > 0 || was_open != self.tls.is_open();
                    if !has_moved || self.tls.has_ended() {
                        break;
                    }
                }
                Err(error) => {
                    assert!(!error.to_string().contains('\n'));
                    self.has_failed = true;
                }
            }
        }
    }

    fn say(&mut self, bytes: &[u8]) {
        let may_say = self.tls.is_open() && !self.has_failed && !self.tls.has_ended() && !bytes.is_empty();
        if may_say && self.tls.send(bytes).is_ok() {
            self.said.extend(bytes);
        }
    }

    fn output(&mut self) -> Vec<u8> {
        let output = std::mem::take(self.tls.output());
        assert!(output.len() <= MAX_HANDSHAKE, "too many bytes of the handshake are queued");
        output
    }

    fn is_quiet(&mut self) -> bool {
        self.tls.output().is_empty()
    }
}

fn key(identity: &str, fill: u8, hash: Hash) -> Psk {
    let len = if hash == Hash::Sha256 { 32 } else { 48 };
    Psk { identity: identity.into(), secret: vec![fill; len].into(), hash }
}

/// The keys whose bits are set; the first key if no bit is set.
fn some(all: &[Psk], bits: u8) -> Vec<Psk> {
    let bits = if bits & 7 == 0 { 1 } else { bits };
    (0..).zip(all).filter(|(at, _)| bits >> at & 1 == 1).map(|(_, key)| key.clone()).collect()
}

const MAX_TURNS: usize = 40;
