//! The other side of `rping` and `perftest` over software RoCEv2, in an ordinary UDP socket: for
//! tries of the transport with programs and adapters of others.
//!
//! ```text
//! roce_peer serve ADDRESS [--mtu 1024] [--receives 64]
//!     serves rping -c, and with -R ib_send_bw -p 18515, ib_read_bw -p 18516, ib_write_bw -p 18517
//! roce_peer ping ADDRESS PEER [--mtu 1024] [--size 4096] [--count 10]
//!     is a client of rping -s
//! ```
//! ADDRESS is an address of this machine, PEER one of the other, both IPv4 or both IPv6. Prints a
//! line for each connection that has ended. `serve` ends with the process; `ping` fails unless all
//! data came back.

mod perftest;
mod rping;
mod udp_port;

use perftest::{PerftestServer, PerftestVerb};
use rping::{RpingClient, RpingServer};
use std::io::Write;
use std::net::IpAddr;
use udp_port::{Application, RequestedService, UdpPort};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let words = Words(std::env::args().skip(1).collect());
    let local: IpAddr = words.at(1)?.parse()?;
    let mtu = words.number("--mtu")?.unwrap_or(1024);
    let mut port = UdpPort::bind(local, mtu)?;
    match words.at(0)? {
        "serve" => {
            let receives = words.number("--receives")?.unwrap_or(64);
            let mut services = Services::new(receives);
            loop {
                for ended in port.turn(&mut services)? {
                    say(&ended.to_string())?;
                }
            }
        }
        "ping" => {
            let (size, count) = (words.number("--size")?, words.number("--count")?);
            let client = RpingClient::new(size.unwrap_or(4096), count.unwrap_or(10));
            port.connect(words.at(2)?.parse()?, rping::PORT, Box::new(client))?;
            while !port.is_empty() {
                for ended in port.turn(&mut Nothing)? {
                    if ended.failure.is_some() {
                        return Err(ended.to_string().into());
                    }
                    say(&ended.to_string())?;
                }
            }
            Ok(())
        }
        _ => Err(USAGE.into()),
    }
}

/// The services by their ports.
struct Services {
    receives: u32,
    perftest: [(u16, PerftestServer); 3],
}

impl Services {
    fn new(receives: u32) -> Services {
        let verbs = [PerftestVerb::Send, PerftestVerb::Read, PerftestVerb::Write];
        let server = |verb| (perftest::port(verb), PerftestServer::new(verb, receives));
        Services { receives, perftest: verbs.map(server) }
    }
}

impl RequestedService for Services {
    fn application(&mut self, service: u16) -> Option<Box<dyn Application>> {
        if service == rping::PORT {
            return Some(Box::new(RpingServer::new(self.receives)));
        }
        let (_, server) = self.perftest.iter_mut().find(|(port, _)| *port == service)?;
        Some(server.next_connection())
    }
}

/// A side that only connects.
struct Nothing;

impl RequestedService for Nothing {
    fn application(&mut self, _: u16) -> Option<Box<dyn Application>> {
        None
    }
}

fn say(line: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout(), "{line}")
}

/// The command line.
struct Words(Vec<String>);

impl Words {
    fn at(&self, place: usize) -> Result<&str, Failure> {
        Ok(self.0.get(place).ok_or(USAGE)?)
    }

    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>, Failure> {
        let Some(at) = self.0.iter().position(|word| word == name) else { return Ok(None) };
        let number = self.at(at + 1)?.parse();
        Ok(Some(number.map_err(|_| format!("{name} takes a number"))?))
    }
}

const USAGE: &str = "the top of crates/engine/examples/roce_peer/main.rs shows the usage";
