//! Turns of a connection in a simulated network.

use super::*;
use crate::net::socket::Address;
use crate::sim::{NetworkConditions, SimNet, World};
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::Timed;
use blockmux_tls::{ClientCredentials, Hash, Psk};
use blockmux_volume::ReadyList;
use std::cell::RefCell;
use std::time::Duration;

/// A client's session that demands TLS after one byte of the server.
#[derive(Default)]
struct DemandingSession {
    outbox: Outbox,
    was_greeted: bool,
}

impl Timed for DemandingSession {}

impl StreamSession for DemandingSession {
    fn demand(&self) -> Demand {
        if self.was_greeted { Demand::StartTls } else { Demand::Bytes(1) }
    }

    fn on_bytes(&mut self, _input: &Chunk, _now: Instant) -> Result<usize, ProtocolError> {
        self.was_greeted = true;
        Ok(1)
    }

    fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        Ok(())
    }

    fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
        Ok(())
    }

    fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }
}

#[test]
fn a_client_begins_tls_in_the_turn_in_which_its_session_demands_it() {
    let mut world = World::new(SimNet::new(1, NetworkConditions::FAIR));
    let (client, server) = (world.add_core(1 << 20), world.add_core(1 << 20));
    let address = Address::Tcp("127.0.0.1:1".parse().unwrap());
    let accepted = Rc::new(RefCell::new(None));
    let accepted_cell = accepted.clone();
    world.net().listen(&server, &address, move |_, stream| *accepted_cell.borrow_mut() = Some(stream));
    let dialled = client.connect(&address).unwrap();
    world.run_for(Duration::from_secs(1)).unwrap();
    let mut peer = accepted.borrow_mut().take().unwrap();
    let mut greeting = Outbox::default();
    greeting.push_head(b"g");
    peer.send(&mut greeting).unwrap();
    world.run_for(Duration::from_secs(1)).unwrap();

    let key = Psk { identity: b"key".to_vec(), secret: vec![7; 32].into(), hash: Hash::Sha256 };
    let secure = Secure::client(&ClientCredentials::Psks([key].into())).unwrap().on_demand();
    let mut connection = Connection::new(dialled, &client, &ReadyList::new().waker(0)).secured(Some(secure));
    let mut session = DemandingSession::default();
    // The only turn: an owner that sleeps has no other before the server answers.
    connection.receive(&mut session).unwrap();
    assert!(connection.send(&mut session).unwrap(), "the ClientHello is sent");
    world.run_for(Duration::from_secs(1)).unwrap();
    let mut hello = Chunk::new(Memory::from_heap(4096));
    assert!(peer.receive(&mut hello, usize::MAX).unwrap() > 0);
    assert_eq!(hello.unread()[0], 0x16, "a handshake record (RFC 8446, 5.1)");
}
