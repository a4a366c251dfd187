//! Connections whose records a simulated kernel makes, at one end or at both.

use super::*;
use crate::connection::{Connection, Inflow};
use crate::host::{ByteStream, Direction, Host};
use crate::sim::{NetworkConditions, SimCore, SimNet, SystemTls, World};
use crate::socket::Address;
use blockmux_proto::session::{Demand, ProtocolError, StreamSession, Timed};
use blockmux_tls::{HANDSHAKE, Hash, RecordKeys};
use blockmux_volume::{ReadyList, Seg, SgList};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

/// Says what it has to say, and hears as much as there is, every second part of it right where it
/// is to be.
struct Talker {
    outbox: Outbox,
    heard: Vec<u8>,
    expected: usize,
    place: Option<SgList>,
    identity: Vec<u8>,
    has_ended: bool,
}

impl Talker {
    fn new(says: &[u8], expected: usize) -> Talker {
        let mut outbox = Outbox::default();
        for part in says.chunks(40_000) {
            outbox.push_head(&part[..part.len().min(24)]);
            outbox.push_seg(Seg::from_slice(&part[part.len().min(24)..]));
        }
        Talker { outbox, heard: Vec::new(), expected, place: None, identity: Vec::new(), has_ended: false }
    }
}

impl Timed for Talker {}

impl StreamSession for Talker {
    fn demand(&self) -> Demand {
        self.place.clone().map_or(Demand::Bytes(1), Demand::Place)
    }

    fn on_bytes(&mut self, input: &Chunk, _now: Instant) -> Result<usize, ProtocolError> {
        assert!(!self.identity.is_empty(), "what is heard is secured");
        let bytes = &input.unread()[..input.unread().len().min(700)];
        self.heard.extend(bytes);
        if self.heard.len() + PLACED <= self.expected {
            self.place = Some(Seg::from_slice(&[0; PLACED]).into());
        }
        Ok(bytes.len())
    }

    fn on_secured(&mut self, by: SecuredBy<'_>, _now: Instant) -> Result<(), ProtocolError> {
        assert!(self.identity.is_empty(), "it is told once");
        let SecuredBy::Psk(identity) = by else { panic!("both have a key: {by:?}") };
        self.identity = identity.to_vec();
        Ok(())
    }

    fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        let list = self.place.take().expect("a place was asked for");
        list.segs().iter().for_each(|seg| self.heard.extend(seg.to_vec()));
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

struct End {
    connection: Connection<SimCore>,
    talker: Talker,
    has_finished: bool,
    failed: Option<Broken>,
}

impl End {
    fn turn(&mut self) {
        if self.failed.is_some() || self.has_finished {
            return;
        }
        let received = self.connection.receive(&mut self.talker);
        let result = received.and_then(|inflow| {
            self.has_finished = inflow == Inflow::Finished;
            self.connection.send(&mut self.talker)
        });
        if let Err(broken) = result {
            // As a target does it: the last word.
            let _ = self.connection.send(&mut self.talker);
            self.failed = Some(broken);
        }
    }

    fn is_by_kernel(&mut self) -> bool {
        self.connection.secure().0.is_some_and(|secure| secure.is_by_kernel())
    }

    /// Says something more.
    fn say(&mut self, bytes: &[u8]) {
        self.talker.outbox.push_head(bytes);
    }

    fn failure(&self) -> String {
        self.failed.as_ref().map(ToString::to_string).unwrap_or_default()
    }
}

/// Client and server.
struct Pair {
    world: World,
    ends: [End; 2],
}

impl Pair {
    /// `by_kernel`: which end wants the kernel's records.
    fn new(net: SimNet, hash: Hash, by_kernel: [bool; 2], says: [&[u8]; 2]) -> Pair {
        let mut world = World::new(net);
        let cores = [world.add_core(8 << 20), world.add_core(8 << 20)];
        let address = Address::Tcp("127.0.0.1:1".parse().unwrap());
        let accepted = Rc::new(RefCell::new(None));
        let place = accepted.clone();
        world.net().listen(&cores[1], &address, move |_, stream| *place.borrow_mut() = Some(stream));
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
            let talker = Talker::new(says[at], says[1 - at].len());
            at += 1;
            End { connection, talker, has_finished: false, failed: None }
        });
        Pair { world, ends }
    }

    fn run(&mut self, turns: usize) {
        for _ in 0..turns {
            self.ends.iter_mut().for_each(End::turn);
            self.world.run_for(Duration::from_millis(1)).unwrap();
        }
    }

    /// Until all that was said is heard.
    fn run_out(&mut self) {
        for _ in 0..20_000 {
            let [client, server] = &self.ends;
            if client.talker.heard.len() >= client.talker.expected
                && server.talker.heard.len() >= server.talker.expected
            {
                return;
            }
            self.run(1);
        }
        let heard = self.ends.each_ref().map(|end| (end.talker.heard.len(), end.failure()));
        panic!("they came to no end: {heard:?}");
    }

    fn by_kernel(&mut self) -> [bool; 2] {
        self.ends.each_mut().map(End::is_by_kernel)
    }

    /// Says a little both ways and sees that it is heard.
    fn go_on(&mut self) {
        for (from, to) in [(0, 1), (1, 0)] {
            self.ends[from].say(b"and goes on");
            self.ends[to].talker.expected += b"and goes on".len();
        }
        self.run_out();
        for end in &self.ends {
            assert!(end.failed.is_none() && end.talker.heard.ends_with(b"and goes on"));
        }
    }
}

fn net(seed: u64, conditions: NetworkConditions, system: SystemTls) -> SimNet {
    let net = SimNet::new(seed, conditions);
    net.set_system_tls(system);
    net
}

fn words(len: u32, seed: u32) -> Vec<u8> {
    (0..len).map(|at| (at / 251 + at * seed) as u8).collect()
}

/// Messages in pieces of all lengths, and little on its way.
const NARROW: NetworkConditions =
    NetworkConditions { window: 5000, most_per_call: 700, ..NetworkConditions::FAIR };

#[test]
fn all_that_is_said_is_heard_whichever_end_has_a_kernel_that_can() {
    let said = [words(150_000, 3), words(90_000, 5)];
    for by_kernel in [[true, true], [true, false], [false, true], [false, false]] {
        for (seed, conditions) in [
            (1, NetworkConditions::FAIR),
            (2, NARROW),
            (3, NARROW),
            (4, NetworkConditions { most_per_call: 1, ..NetworkConditions::FAIR }),
            (5, NetworkConditions { most_per_call: 7, ..NARROW }),
        ] {
            let hash = if seed % 2 == 0 { Hash::Sha256 } else { Hash::Sha384 };
            // Records of one byte each go one byte at a time then.
            let len = if conditions.most_per_call < 10 { 400 } else { usize::MAX };
            let said = said.each_ref().map(|said| &said[..said.len().min(len)]);
            let mut pair = Pair::new(net(seed, conditions, SystemTls::Once), hash, by_kernel, said);
            pair.run_out();
            assert_eq!(pair.by_kernel(), by_kernel, "{conditions:?}");
            for (end, heard) in pair.ends.iter().zip([said[1], said[0]]) {
                assert!(end.talker.heard == heard && end.failed.is_none());
                assert_eq!(end.talker.identity, b"key");
            }
            pair.go_on();
        }
    }
}

#[test]
fn where_the_kernel_takes_no_keys_the_library_goes_on() {
    let said = words(50_000, 3);
    for system in [SystemTls::None, SystemTls::NoKeys] {
        for seed in 0..4 {
            let conditions = if seed == 0 { NetworkConditions::FAIR } else { NARROW };
            let mut pair =
                Pair::new(net(seed, conditions, system), Hash::Sha384, [true, true], [&said, &said]);
            pair.run_out();
            assert_eq!(pair.by_kernel(), [false, false]);
            assert!(pair.ends.iter().all(|end| end.talker.heard == said && end.failed.is_none()));
            pair.go_on();
        }
    }
}

#[test]
fn a_kernel_that_does_one_half_ends_one_connection_and_is_not_asked_for_another() {
    let net = net(1, NetworkConditions::FAIR, SystemTls::Half);
    let mut pair = Pair::new(net.clone(), Hash::Sha256, [true, false], [b"lost", b"lost"]);
    pair.run(50);
    assert!(pair.ends[0].failure().contains("for one direction and not for the other"));
    assert!(matches!(pair.ends[0].failed, Some(Broken::Keys(_))));
    assert!(pair.ends[1].talker.heard.is_empty());
    drop(pair);
    let mut pair = Pair::new(net, Hash::Sha256, [true, false], [b"heard", b"as well"]);
    pair.run_out();
    assert_eq!(pair.by_kernel(), [false, false]);
}

#[test]
fn a_key_that_has_done_its_part_is_followed_by_another_where_the_kernel_takes_it() {
    for by_kernel in [[true, true], [true, false]] {
        let mut pair =
            Pair::new(net(1, NARROW, SystemTls::Rekeys), Hash::Sha384, by_kernel, [b"hello", b"hello"]);
        pair.run_out();
        for _ in 0..3 {
            // It is noticed with what is sent, and done before what is sent next.
            pair.ends[0].connection.secure().0.unwrap().wear_out();
            pair.go_on();
            pair.go_on();
        }
    }
}

#[test]
fn a_key_that_has_done_its_part_ends_the_connection_where_the_kernel_takes_no_other() {
    for by_kernel in [[true, true], [true, false]] {
        let mut pair = Pair::new(
            net(1, NetworkConditions::FAIR, SystemTls::Once),
            Hash::Sha384,
            by_kernel,
            [b"hello", b"hello"],
        );
        pair.run_out();
        pair.ends[0].connection.secure().0.unwrap().wear_out();
        pair.go_on();
        pair.ends[0].say(b"never protected by the old key");
        pair.run(20);
        assert!(pair.ends[0].failure().contains("protected as much as it may"), "{}", pair.ends[0].failure());
        let other = &pair.ends[1];
        if by_kernel[1] {
            assert!(other.failure().contains("the peer has changed its key"), "{}", other.failure());
        }
        assert!(!other.talker.heard.ends_with(b"key") && !other.talker.heard.ends_with(b"protected"));
    }
}

#[test]
fn a_peer_that_changes_its_key_has_ours_changed_where_it_asks_for_that() {
    for by_kernel in [[true, true], [true, false]] {
        let mut pair =
            Pair::new(net(1, NARROW, SystemTls::Rekeys), Hash::Sha256, by_kernel, [b"hello", b"hello"]);
        pair.run_out();
        for _ in 0..3 {
            let (secure, stream) = pair.ends[0].connection.secure();
            secure.unwrap().ask_for_update(stream);
            pair.go_on();
        }
    }
}

#[test]
fn tickets_are_passed_over() {
    // To a client; nobody gives a server one.
    let mut pair = Pair::new(net(1, NARROW, SystemTls::Once), Hash::Sha256, [true, true], [b"a", b"b"]);
    pair.run_out();
    let ticket = [&[4, 0, 0, 200][..], &[7; 200]].concat();
    pair.ends[1].connection.secure().1.send_record(HANDSHAKE, &ticket[..90]).unwrap();
    pair.ends[1].connection.secure().1.send_record(HANDSHAKE, &ticket[90..]).unwrap();
    pair.go_on();
    pair.ends[0].connection.secure().1.send_record(HANDSHAKE, &ticket).unwrap();
    pair.run(20);
    assert!(pair.ends[1].failure().contains("an unexpected TLS message"), "{}", pair.ends[1].failure());
    assert!(pair.ends[0].failure().contains("unexpected_message"), "{}", pair.ends[0].failure());
}

#[test]
fn who_ends_says_so_before() {
    for by_kernel in [[true, true], [true, false], [false, true], [false, false]] {
        let mut pair = Pair::new(
            net(1, NetworkConditions::FAIR, SystemTls::Once),
            Hash::Sha256,
            by_kernel,
            [b"hello", b"hello"],
        );
        pair.run_out();
        let Pair { mut world, ends: [client, server] } = pair;
        // The stream goes on, so that it is the alert alone that tells.
        let _stream = client.connection.stream().share();
        drop(client);
        let mut server = server;
        world.run_for(Duration::from_secs(1)).unwrap();
        server.turn();
        assert!(server.has_finished && server.talker.has_ended, "{by_kernel:?} {}", server.failure());
        assert!(server.failed.is_none());
        let _ = &mut world;
    }
}

#[test]
fn a_record_that_is_not_its_senders_ends_the_connection_with_an_alert() {
    for by_kernel in [[true, true], [false, true]] {
        let system = if by_kernel[0] { SystemTls::Rekeys } else { SystemTls::Once };
        let mut pair =
            Pair::new(net(1, NetworkConditions::FAIR, system), Hash::Sha256, by_kernel, [b"hello", b"hello"]);
        pair.run_out();
        if by_kernel[0] {
            let wrong = RecordKeys { key: vec![9; 16].into(), iv: [9; 12], sequence: 0 };
            pair.ends[0].connection.secure().1.set_tls_keys(Direction::Sending, &wrong).unwrap();
            pair.ends[0].say(b"by nobody's key");
        } else {
            // A record of the library's, and after it bytes that are no record.
            let mut bytes = Outbox::default();
            bytes.push_head(&[23, 3, 3, 0, 40]);
            bytes.push_head(&[7; 40]);
            pair.ends[0].connection.secure().1.send(&mut bytes).unwrap();
        }
        pair.run(20);
        assert!(pair.ends[1].failure().contains("fails authentication"), "{}", pair.ends[1].failure());
        assert!(pair.ends[0].failure().contains("bad_record_mac"), "{}", pair.ends[0].failure());
        assert_eq!(pair.ends[1].talker.heard, b"hello");
    }
}

const PLACED: usize = 3000;
