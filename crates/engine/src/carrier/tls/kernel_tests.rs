//! Connections with kTLS, simulated, at one end or at both.

use super::*;
use crate::carrier::Carrier;
use crate::carrier::connection::{Connection, Inflow};
use crate::net::host::{ByteStream, Host};
use crate::net::ktls::Direction;
use crate::net::socket::Address;
use crate::sim::{NetworkConditions, SimCore, SimNet, SystemTls, World};
use blockmux_proto::driver::session::{Demand, ProtocolError, StreamSession, Timed};
use blockmux_tls::{HANDSHAKE, Hash, RecordKeys};
use blockmux_volume::{ReadyList, Seg, SgList};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

/// A session that sends its bytes, and receives every second part of the peer's bytes in place.
struct TestSession {
    outbox: Outbox,
    received: Vec<u8>,
    expected: usize,
    place: Option<SgList>,
    identity: Vec<u8>,
    has_ended: bool,
}

impl TestSession {
    fn new(sends: &[u8], expected: usize) -> TestSession {
        let mut outbox = Outbox::default();
        for part in sends.chunks(40_000) {
            outbox.push_head(&part[..part.len().min(24)]);
            outbox.push_seg(Seg::from_slice(&part[part.len().min(24)..]));
        }
        TestSession {
            outbox,
            received: Vec::new(),
            expected,
            place: None,
            identity: Vec::new(),
            has_ended: false,
        }
    }
}

impl Timed for TestSession {}

impl StreamSession for TestSession {
    fn demand(&self) -> Demand {
        self.place.clone().map_or(Demand::Bytes(1), Demand::Place)
    }

    fn on_bytes(&mut self, input: &Chunk, _now: Instant) -> Result<usize, ProtocolError> {
        assert!(!self.identity.is_empty(), "TLS is established before bytes are received");
        let bytes = &input.unread()[..input.unread().len().min(700)];
        self.received.extend(bytes);
        if self.received.len() + PLACED <= self.expected {
            self.place = Some(Seg::from_slice(&[0; PLACED]).into());
        }
        Ok(bytes.len())
    }

    fn on_secured(&mut self, by: SecuredBy<'_>, _now: Instant) -> Result<(), ProtocolError> {
        assert!(self.identity.is_empty(), "it is reported once");
        let SecuredBy::Psk(identity) = by else { panic!("both have a key: {by:?}") };
        self.identity = identity.to_vec();
        Ok(())
    }

    fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        let list = self.place.take().expect("a place was asked for");
        list.segs().iter().for_each(|seg| self.received.extend(seg.to_vec()));
        Ok(())
    }

    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        self.has_ended = true;
        Ok(())
    }

    fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }
}

struct KernelEnd {
    connection: Connection<SimCore>,
    session: TestSession,
    has_finished: bool,
    failed: Option<Broken>,
}

impl KernelEnd {
    fn turn(&mut self) {
        if self.failed.is_some() || self.has_finished {
            return;
        }
        let received = self.connection.receive(&mut self.session);
        let result = received.and_then(|inflow| {
            self.has_finished = inflow == Inflow::Finished;
            self.connection.send(&mut self.session)
        });
        if let Err(broken) = result {
            // Sends what is left after an error, as a target does.
            let _ = self.connection.send(&mut self.session);
            self.failed = Some(broken);
        }
    }

    fn is_by_kernel(&mut self) -> bool {
        self.connection.secure().0.is_some_and(|secure| secure.is_by_kernel())
    }

    /// Sends more bytes.
    fn send(&mut self, bytes: &[u8]) {
        self.session.outbox.push_head(bytes);
    }

    fn failure(&self) -> String {
        self.failed.as_ref().map(ToString::to_string).unwrap_or_default()
    }
}

/// Client and server.
struct Pair {
    world: World,
    ends: [KernelEnd; 2],
}

impl Pair {
    /// `by_kernel`: which ends use kTLS if possible.
    fn new(net: SimNet, hash: Hash, by_kernel: [bool; 2], sends: [&[u8]; 2]) -> Pair {
        let mut world = World::new(net);
        let cores = [world.add_core(8 << 20), world.add_core(8 << 20)];
        let address = Address::Tcp("127.0.0.1:1".parse().unwrap());
        let accepted = Rc::new(RefCell::new(None));
        let accepted_cell = accepted.clone();
        world.net().listen(&cores[1], &address, move |_, stream| *accepted_cell.borrow_mut() = Some(stream));
        let dialled = cores[0].connect(&address).unwrap();
        world.run_for(Duration::from_secs(1)).unwrap();
        let streams = [dialled, accepted.borrow_mut().take().unwrap()];
        let key = Psk { identity: b"key".to_vec(), secret: vec![7; 48].into(), hash };
        let client = Secure::client(&ClientCredentials::Psks([key.clone()].into())).unwrap();
        let server = Secure::server(ServerCredentials::Psks(Arc::new(move |_| Some(key.clone()))));
        let mut secures =
            [client, server].into_iter().zip(by_kernel).map(|(secure, by)| secure.by_kernel(by));
        let mut at = 0;
        let ends = streams.map(|stream| {
            let core = &cores[at];
            let connection = Connection::new(stream, core, &ReadyList::new().waker(0));
            let connection = connection.secured(secures.next());
            let session = TestSession::new(sends[at], sends[1 - at].len());
            at += 1;
            KernelEnd { connection, session, has_finished: false, failed: None }
        });
        Pair { world, ends }
    }

    fn run(&mut self, turns: usize) {
        for _ in 0..turns {
            self.ends.iter_mut().for_each(KernelEnd::turn);
            self.world.run_for(Duration::from_millis(1)).unwrap();
        }
    }

    /// Runs until all bytes are received.
    fn run_until_received(&mut self) {
        for _ in 0..20_000 {
            let [client, server] = &self.ends;
            if client.session.received.len() >= client.session.expected
                && server.session.received.len() >= server.session.expected
            {
                return;
            }
            self.run(1);
        }
        let received = self.ends.each_ref().map(|end| (end.session.received.len(), end.failure()));
        panic!("not all bytes arrived: {received:?}");
    }

    fn by_kernel(&mut self) -> [bool; 2] {
        self.ends.each_mut().map(KernelEnd::is_by_kernel)
    }

    /// Sends a few more bytes in both directions and checks that they arrive.
    fn exchange_more(&mut self) {
        for (from, to) in [(0, 1), (1, 0)] {
            self.ends[from].send(b"and goes on");
            self.ends[to].session.expected += b"and goes on".len();
        }
        self.run_until_received();
        for end in &self.ends {
            assert!(end.failed.is_none() && end.session.received.ends_with(b"and goes on"));
        }
    }
}

fn net(seed: u64, conditions: NetworkConditions, system: SystemTls) -> SimNet {
    let net = SimNet::new(seed, conditions);
    net.set_system_tls(system);
    net
}

fn pattern(len: u32, seed: u32) -> Vec<u8> {
    (0..len).map(|at| (at / 251 + at * seed) as u8).collect()
}

/// Splits messages at every length, and allows few bytes in flight.
const NARROW: NetworkConditions =
    NetworkConditions { window: 5000, max_per_call: 700, ..NetworkConditions::FAIR };

#[test]
fn all_data_arrives_with_ktls_at_either_end_or_both() {
    let sent = [pattern(150_000, 3), pattern(90_000, 5)];
    for by_kernel in [[true, true], [true, false], [false, true], [false, false]] {
        for (seed, conditions) in [
            (1, NetworkConditions::FAIR),
            (2, NARROW),
            (3, NARROW),
            (4, NetworkConditions { max_per_call: 1, ..NetworkConditions::FAIR }),
            (5, NetworkConditions { max_per_call: 7, ..NARROW }),
        ] {
            let hash = if seed % 2 == 0 { Hash::Sha256 } else { Hash::Sha384 };
            // With so few bytes per call, a record has only a few bytes.
            let len = if conditions.max_per_call < 10 { 400 } else { usize::MAX };
            let sent = sent.each_ref().map(|sent| &sent[..sent.len().min(len)]);
            let mut pair = Pair::new(net(seed, conditions, SystemTls::Once), hash, by_kernel, sent);
            pair.run_until_received();
            assert_eq!(pair.by_kernel(), by_kernel, "{conditions:?}");
            for (end, received) in pair.ends.iter().zip([sent[1], sent[0]]) {
                assert!(end.session.received == received && end.failed.is_none());
                assert_eq!(end.session.identity, b"key");
            }
            pair.exchange_more();
        }
    }
}

#[test]
fn the_library_continues_if_the_kernel_takes_no_keys() {
    let sent = pattern(50_000, 3);
    for system in [SystemTls::None, SystemTls::NoKeys] {
        for seed in 0..4 {
            let conditions = if seed == 0 { NetworkConditions::FAIR } else { NARROW };
            let mut pair =
                Pair::new(net(seed, conditions, system), Hash::Sha384, [true, true], [&sent, &sent]);
            pair.run_until_received();
            assert_eq!(pair.by_kernel(), [false, false]);
            assert!(pair.ends.iter().all(|end| end.session.received == sent && end.failed.is_none()));
            pair.exchange_more();
        }
    }
}

#[test]
fn a_kernel_that_takes_the_key_of_one_direction_only_is_not_tried_again() {
    let net = net(1, NetworkConditions::FAIR, SystemTls::Half);
    let mut pair = Pair::new(net.clone(), Hash::Sha256, [true, false], [b"lost", b"lost"]);
    pair.run(50);
    assert!(pair.ends[0].failure().contains("of one direction only"));
    assert!(matches!(pair.ends[0].failed, Some(Broken::Keys(_))));
    assert!(pair.ends[1].session.received.is_empty());
    drop(pair);
    let mut pair = Pair::new(net, Hash::Sha256, [true, false], [b"received", b"as well"]);
    pair.run_until_received();
    assert_eq!(pair.by_kernel(), [false, false]);
}

#[test]
fn a_key_at_its_limit_is_replaced_if_the_kernel_accepts_another() {
    for by_kernel in [[true, true], [true, false]] {
        let mut pair =
            Pair::new(net(1, NARROW, SystemTls::Rekeys), Hash::Sha384, by_kernel, [b"hello", b"hello"]);
        pair.run_until_received();
        for _ in 0..3 {
            // The limit is noticed after sending, and the key is updated before the next data.
            pair.ends[0].connection.secure().0.unwrap().reach_key_limit();
            pair.exchange_more();
            pair.exchange_more();
        }
    }
}

#[test]
fn a_key_at_its_limit_ends_the_connection_if_the_kernel_accepts_no_other() {
    for by_kernel in [[true, true], [true, false]] {
        let mut pair = Pair::new(
            net(1, NetworkConditions::FAIR, SystemTls::Once),
            Hash::Sha384,
            by_kernel,
            [b"hello", b"hello"],
        );
        pair.run_until_received();
        pair.ends[0].connection.secure().0.unwrap().reach_key_limit();
        pair.exchange_more();
        pair.ends[0].send(b"never protected by the old key");
        pair.run(20);
        assert!(pair.ends[0].failure().contains("reached its limit"), "{}", pair.ends[0].failure());
        let other = &pair.ends[1];
        if by_kernel[1] {
            assert!(other.failure().contains("the peer has updated its TLS key"), "{}", other.failure());
        }
        assert!(!other.session.received.ends_with(b"key") && !other.session.received.ends_with(b"protected"));
    }
}

#[test]
fn a_peers_key_update_updates_our_key_if_it_requests_that() {
    for by_kernel in [[true, true], [true, false]] {
        let mut pair =
            Pair::new(net(1, NARROW, SystemTls::Rekeys), Hash::Sha256, by_kernel, [b"hello", b"hello"]);
        pair.run_until_received();
        for _ in 0..3 {
            let (secure, stream) = pair.ends[0].connection.secure();
            secure.unwrap().ask_for_update(stream);
            pair.exchange_more();
        }
    }
}

#[test]
fn session_tickets_are_ignored() {
    // Sent to a client; a client never sends tickets to a server.
    let mut pair = Pair::new(net(1, NARROW, SystemTls::Once), Hash::Sha256, [true, true], [b"a", b"b"]);
    pair.run_until_received();
    let ticket = [&[4, 0, 0, 200][..], &[7; 200]].concat();
    pair.ends[1].connection.secure().1.send_record(HANDSHAKE, &ticket[..90]).unwrap();
    pair.ends[1].connection.secure().1.send_record(HANDSHAKE, &ticket[90..]).unwrap();
    pair.exchange_more();
    pair.ends[0].connection.secure().1.send_record(HANDSHAKE, &ticket).unwrap();
    pair.run(20);
    assert!(pair.ends[1].failure().contains("an unexpected TLS message"), "{}", pair.ends[1].failure());
    assert!(pair.ends[0].failure().contains("unexpected_message"), "{}", pair.ends[0].failure());
}

#[test]
fn close_notify_precedes_the_end_of_a_connection() {
    for by_kernel in [[true, true], [true, false], [false, true], [false, false]] {
        let mut pair = Pair::new(
            net(1, NetworkConditions::FAIR, SystemTls::Once),
            Hash::Sha256,
            by_kernel,
            [b"hello", b"hello"],
        );
        pair.run_until_received();
        let Pair { mut world, ends: [client, server] } = pair;
        // The stream stays open, so that only the alert reports the end.
        let _stream = client.connection.stream().share();
        drop(client);
        let mut server = server;
        world.run_for(Duration::from_secs(1)).unwrap();
        server.turn();
        assert!(server.has_finished && server.session.has_ended, "{by_kernel:?} {}", server.failure());
        assert!(server.failed.is_none());
        let _ = &mut world;
    }
}

#[test]
fn a_forged_record_ends_the_connection_with_an_alert() {
    for by_kernel in [[true, true], [false, true]] {
        let system = if by_kernel[0] { SystemTls::Rekeys } else { SystemTls::Once };
        let mut pair =
            Pair::new(net(1, NetworkConditions::FAIR, system), Hash::Sha256, by_kernel, [b"hello", b"hello"]);
        pair.run_until_received();
        if by_kernel[0] {
            let wrong = RecordKeys { key: vec![9; 16].into(), iv: [9; 12], sequence: 0 };
            pair.ends[0].connection.secure().1.set_tls_keys(Direction::Sending, &wrong).unwrap();
            pair.ends[0].send(b"by another key");
        } else {
            // A valid record header, followed by bytes that are not authentic.
            let mut bytes = Outbox::default();
            bytes.push_head(&[23, 3, 3, 0, 40]);
            bytes.push_head(&[7; 40]);
            pair.ends[0].connection.secure().1.send(&mut bytes).unwrap();
        }
        pair.run(20);
        assert!(pair.ends[1].failure().contains("fails authentication"), "{}", pair.ends[1].failure());
        assert!(pair.ends[0].failure().contains("bad_record_mac"), "{}", pair.ends[0].failure());
        assert_eq!(pair.ends[1].session.received, b"hello");
    }
}

const PLACED: usize = 3000;
