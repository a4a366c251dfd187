//! Tests of TLS between two ends of a simulated network.

use super::*;
use crate::net::host::Host;
use crate::net::socket::Address;
use crate::sim::{NetworkConditions, SimNet, SimStream, World};
use blockmux_proto::driver::computation::{Job, RunJob};
use blockmux_tls::Hash;
use blockmux_volume::Seg;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// One end: bytes to send, and bytes received.
struct End {
    stream: SimStream,
    secure: Option<Secure>,
    outbox: Outbox,
    chunk: Chunk,
    received: Vec<u8>,
    failed: Option<String>,
}

/// A client and a server, over a network that splits messages and has a small window.
struct TlsPair {
    world: World,
    client: End,
    server: End,
}

impl End {
    fn new(stream: SimStream, secure: Option<Secure>, room: usize) -> End {
        let chunk = Chunk::new(Memory::from_heap(room));
        End { stream, secure, outbox: Outbox::default(), chunk, received: Vec::new(), failed: None }
    }

    fn turn(&mut self, pool: &Pool) {
        if self.failed.is_some() {
            // Sends the alert.
            let _ = self.secure.as_mut().map(|secure| self.stream.send(secure.outgoing()));
        } else if let Err(error) = self.try_turn(pool) {
            self.failed = Some(error.to_string());
        }
    }

    fn try_turn(&mut self, pool: &Pool) -> Result<(), Broken> {
        let received = match &mut self.secure {
            Some(secure) => secure.receive(&mut self.stream, &mut self.chunk, pool),
            None => {
                self.stream.receive(&mut self.chunk, usize::MAX).map(Received::Bytes).map_err(Broken::from)
            }
        };
        if let Some(secure) = &mut self.secure {
            let _ = self.stream.send(secure.outgoing());
            secure.sent(&mut self.outbox);
        }
        match received {
            Ok(Received::Plain) => self.secure = None,
            Ok(Received::Bytes(_)) => {}
            Err(Broken::Socket(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        self.received.extend(self.chunk.unread());
        self.chunk.take(self.chunk.unread().len());
        let result = match &mut self.secure {
            None => self.stream.send(&mut self.outbox),
            Some(secure) => {
                secure.encrypt_front(&self.outbox)?;
                let result = self.stream.send(secure.outgoing());
                secure.sent(&mut self.outbox);
                secure.shrink();
                result
            }
        };
        match result {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error.into()),
            _ => Ok(()),
        }
    }
}

impl TlsPair {
    fn new(seed: u64, client: Option<Secure>, server: Secure) -> TlsPair {
        let conditions = NetworkConditions { window: 5000, max_per_call: 700, ..NetworkConditions::FAIR };
        let mut world = World::new(SimNet::new(seed, conditions));
        let (clients, servers) = (world.add_core(1 << 20), world.add_core(1 << 20));
        let address = Address::Tcp("127.0.0.1:1".parse().unwrap());
        let accepted = Rc::new(RefCell::new(None));
        let accepted_cell = accepted.clone();
        world.net().listen(&servers, &address, move |_, stream| *accepted_cell.borrow_mut() = Some(stream));
        let stream = clients.connect(&address).unwrap();
        world.run_for(Duration::from_secs(1)).unwrap();
        let accepted = accepted.borrow_mut().take().unwrap();
        TlsPair {
            world,
            client: End::new(stream, client, 300),
            server: End::new(accepted, Some(server), 7000),
        }
    }

    /// Runs both ends for this many turns.
    fn run(&mut self, turns: usize) {
        let pool = Pool::new(1 << 20);
        for _ in 0..turns {
            self.client.turn(&pool);
            self.server.turn(&pool);
            self.world.run_for(Duration::from_millis(1)).unwrap();
        }
    }
}

fn key(fill: u8) -> Psk {
    Psk { identity: b"key".to_vec(), secret: vec![fill; 32].into(), hash: Hash::Sha256 }
}

fn keys(fill: u8) -> ClientCredentials {
    ClientCredentials::Psks([key(fill)].into())
}

fn lookup() -> ServerCredentials {
    ServerCredentials::Psks(Arc::new(|_| Some(key(7))))
}

#[test]
fn sessions_see_plaintext_and_their_outboxes_are_empty_once_all_is_sent() {
    for seed in 0..8 {
        let client = Secure::client(&keys(7)).unwrap();
        let mut pair = TlsPair::new(seed, Some(client), Secure::server(lookup()));
        let data: Vec<u8> = (0..200_000u32).map(|at| (at / 251 + at) as u8).collect();
        pair.client.outbox.push_head(b"head");
        pair.client.outbox.push_seg(Seg::from_slice(&data));
        pair.server.outbox.push_seg(Seg::from_slice(&data[..100_000]));
        let len = pair.client.outbox.len();
        pair.run(30);
        assert!(pair.client.secure.as_ref().unwrap().is_open());
        assert_eq!(pair.client.outbox.len(), len, "bytes stay in the outbox until they are sent completely");
        pair.run(4000);
        assert_eq!((&pair.client.failed, &pair.server.failed), (&None, &None));
        assert!(pair.server.received == [&b"head"[..], &data].concat());
        assert!(pair.client.received == data[..100_000]);
        assert!(pair.client.outbox.is_empty() && pair.server.outbox.is_empty());
        let secure = pair.server.secure.as_mut().unwrap();
        assert_eq!(secure.take_peer(), Some(SecuredBy::Psk(b"key")));
        assert_eq!(secure.take_peer(), None, "it is reported once");
    }
}

#[test]
fn a_plaintext_client_is_accepted_only_if_tls_is_optional() {
    let data = Seg::from_slice(&[0; 128]);
    let mut pair = TlsPair::new(1, None, Secure::if_asked(lookup()));
    pair.client.outbox.push_seg(data.clone());
    pair.server.outbox.push_head(b"hello");
    pair.run(20);
    assert_eq!((pair.server.received.len(), pair.client.received.as_slice()), (128, &b"hello"[..]));
    let mut pair = TlsPair::new(1, None, Secure::server(lookup()));
    pair.client.outbox.push_seg(data);
    pair.run(20);
    assert_eq!(pair.server.failed.unwrap(), "peer connected without TLS, which is required here");
    assert!(pair.server.received.is_empty());
}

#[test]
fn both_ends_report_a_wrong_key() {
    let client = Secure::client(&keys(8)).unwrap();
    let mut pair = TlsPair::new(1, Some(client), Secure::if_asked(lookup()));
    pair.client.outbox.push_head(b"secret");
    pair.run(50);
    let [client, server] = [pair.client.failed, pair.server.failed].map(Option::unwrap);
    assert!(server.contains("has a TLS key different from ours named key"), "{server}");
    assert!(client.contains("decrypt_error"), "{client}");
}

#[test]
fn a_peer_that_closes_during_the_handshake_fails_the_connection() {
    let client = Secure::client(&keys(7)).unwrap();
    let mut pair = TlsPair::new(1, Some(client), Secure::server(lookup()));
    pair.client.turn(&Pool::new(1 << 20));
    pair.world.run_for(Duration::from_secs(1)).unwrap();
    pair.server.stream.close();
    pair.run(20);
    assert!(pair.client.failed.is_some());
}

#[test]
fn helpers_compute_the_handshake_and_nothing_is_received_meanwhile() {
    let jobs = Arc::new(Mutex::new(Vec::<Job>::new()));
    let queued = jobs.clone();
    let helpers =
        Helpers { run: Arc::new(move |job| queued.lock().unwrap().push(job)), notify: Arc::new(|| ()) };
    let client = Secure::client(&keys(7)).unwrap();
    let mut pair = TlsPair::new(3, Some(client), Secure::server(lookup()).by_helpers(Some(helpers)));
    pair.client.outbox.push_head(b"hello");
    let mut computed = 0;
    while !pair.server.secure.as_ref().unwrap().is_open() {
        pair.run(20);
        let job = jobs.lock().unwrap().pop();
        if let Some(job) = job {
            assert!(pair.server.secure.as_ref().unwrap().is_computing());
            assert!(jobs.lock().unwrap().is_empty(), "one job of a connection at a time");
            job.run();
            computed += 1;
        }
        assert_eq!((&pair.client.failed, &pair.server.failed), (&None, &None));
        pair.server.turn(&Pool::new(1 << 20));
    }
    pair.run(20);
    assert!(computed >= 2, "ClientHello, and Finished");
    assert_eq!(pair.server.received, b"hello");
    assert!(jobs.lock().unwrap().is_empty(), "records are decrypted here");
}

#[test]
fn a_handshake_that_fails_at_a_helper_sends_its_alert() {
    let run: RunJob = Arc::new(Job::run);
    let helpers = Helpers { run, notify: Arc::new(|| ()) };
    let client = Secure::client(&keys(8)).unwrap();
    let mut pair = TlsPair::new(1, Some(client), Secure::server(lookup()).by_helpers(Some(helpers)));
    pair.run(50);
    let [client, server] = [pair.client.failed, pair.server.failed].map(Option::unwrap);
    assert!(server.contains("has a TLS key different from ours named key"), "{server}");
    assert!(client.contains("decrypt_error"), "{client}");
}
