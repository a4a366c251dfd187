//! A target that supports only revision 1 of MPA (RFC 5044).

use blockmux_engine::net::socket::Address;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};

/// Starts a proxy that passes connections to `target` and returns its address. It closes
/// connections that begin with revision 2 (RFC 6581), as a target without support for it does
/// (§10).
pub(crate) fn before(target: SocketAddr) -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback works");
    let address = Address::Tcp(listener.local_addr().expect("loopback works"));
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut begin) = (client.expect("loopback works"), [0; 20]);
            if client.read_exact(&mut begin).is_err() || begin[17] != 1 {
                continue;
            }
            let mut server = TcpStream::connect(target).expect("loopback works");
            server.write_all(&begin).expect("loopback works");
            for (mut from, mut to) in [
                (client.try_clone().expect("loopback works"), server.try_clone().expect("loopback works")),
                (server.try_clone().expect("loopback works"), client.try_clone().expect("loopback works")),
            ] {
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    address
}
