//! RDMA fabrics: how connections get their queue pairs, on both sides and for any protocol.
//!
//! ```text
//!   protocol ── session ──▶ Driven ◀── queue pair ── Fabric: iwarp, roce, verbs, one module each
//!   Dialer (initiator) ───▶ Fabric::connect          │
//!   RdmaTarget (target) ──▶ serve ◀── connections ───┴── FabricListener: its own ports
//!                       └─▶ PortSession ◀── connections of TCP ports
//! ```
//! A session specifies its queue pair, including its private data ([`Endpoint`]). A [`Fabric`]
//! makes a queue pair of its provider accordingly, and [`Driven`] joins the two. Protocols are
//! generic over the fabric, so no call of a session to its queue pair is dispatched dynamically.
//!
//! A provider of queue pairs is one module below this one: its [`Fabric`], its sockets or devices,
//! and its [`FabricListener`]. Protocols name none: an initiator gets its fabric from the program,
//! which has the table of names in URLs, and a target is an [`RdmaTarget`], which [`serve`] serves
//! over any of them (decisions 91 and 115).

mod byte_queue;
mod connector;
pub mod iwarp;
pub(crate) mod port_session;
pub mod roce;
mod target;
pub mod verbs;

pub use target::{RdmaTarget, serve};

use crate::core::reactor::{EngineCore, Inbox};
use crate::net::host::{ByteStream, Host, NetworkHost};
use crate::serve::listener::{ConnectionLimit, ListenerEnd, Serve};
use blockmux_proto::driver::session::StreamSession;
use blockmux_proto::driver::transport::TransportInfo;
use blockmux_proto::rdma::{Endpoint, RdmaConnections, RdmaSession};
use blockmux_rdma::{Driven, Provider, Seed};
use blockmux_volume::Pool;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Instant;

/// How the connections of one fabric are made.
///
/// A value is the configuration of an initiator, and remembers what it has learnt of the peer;
/// clones share that.
pub trait Fabric: Clone + Send + Sync + 'static {
    /// One end of a connection.
    type QueuePair: Provider;

    /// The core that makes its connections.
    type Host: Host;

    /// The initiator's end of a new connection.
    fn connect(&self, endpoint: &Endpoint, setup: Setup) -> Self::QueuePair;

    /// The target's end of a connection that requests a queue pair.
    fn accept(endpoint: &Endpoint, setup: Setup) -> Self::QueuePair;

    /// Whether to connect again after the peer has closed a first connection, because the peer may
    /// take a request in another form. The next [`Fabric::connect`] uses that form. By default a
    /// request has one form only.
    fn retries(&self, _closed: &Self::QueuePair) -> bool {
        false
    }
}

/// A fabric whose connections are byte streams, or streams of records: the engine's stream tasks
/// drive them.
pub trait StreamFabric: Fabric<QueuePair: StreamSession> {}

/// A port of a fabric at which a target listens, beside its TCP port.
pub trait FabricListener: Sized + Send + 'static {
    /// The fabric of its connections.
    type Fabric: StreamFabric<Host: NetworkHost>;

    /// Opens the port for the service that has this TCP address.
    ///
    /// # Errors
    /// If the port is in use, or the fabric cannot listen at that address.
    fn bind(address: SocketAddr) -> io::Result<Self>;

    /// Whether nothing else can listen at the TCP port of the same number.
    fn takes_tcp_port(&self) -> bool {
        false
    }

    /// Accepts connections on `core`, which is the calling thread's, until the core stops or
    /// [`ListenerEnd::end`] is called. They are served on `cores`.
    ///
    /// # Errors
    /// If the fabric cannot accept there.
    fn accept(
        self,
        core: &Rc<EngineCore>,
        end: ListenerEnd,
        cores: Vec<Inbox>,
        serve: Serve<<Self::Fabric as Fabric>::Host>,
        limit: ConnectionLimit,
    ) -> io::Result<()>;
}

/// What the engine gives to each connection, and so to its queue pair.
#[derive(Clone)]
pub struct Setup {
    /// The core's pool.
    pub pool: Pool,
    /// Seed of memory region keys: random and unique.
    pub seed: Seed,
    /// Properties of the connection.
    pub transport: TransportInfo,
    /// The current time.
    pub now: Instant,
}

impl Setup {
    /// For a connection that a peer has made. The pool has an account for that peer.
    pub(crate) fn for_peer<H: Host>(core: &H, stream: &H::Stream, peer: Option<IpAddr>, seed: Seed) -> Setup {
        let pool = core.pool().for_peer_at(peer);
        Setup { pool, seed, transport: stream.transport(), now: core.now() }
    }
}

/// Accepts a connection that requests a queue pair.
fn accept<F: Fabric, S: RdmaSession>(session: S, setup: Setup) -> Driven<F::QueuePair, S> {
    let now = setup.now;
    let queue_pair = F::accept(&session.endpoint(), setup);
    Driven::new(session, queue_pair, now)
}

/// Whether a connection to a TCP port that begins with these bytes, at least [`REQUEST_LEN`],
/// requests a queue pair.
fn is_request(begin: &[u8]) -> bool {
    begin.starts_with(FabricOfTcpPorts::REQUEST)
}

/// Number of bytes by which a request is recognised.
const REQUEST_LEN: usize = FabricOfTcpPorts::REQUEST.len();

/// The fabric at the TCP ports of targets. A target needs no setting: a request shows the fabric.
pub type FabricOfTcpPorts = iwarp::IwarpFabric;

/// A target's session at a TCP port, joined with its queue pair.
type OverFabric<S> = Driven<<FabricOfTcpPorts as Fabric>::QueuePair, S>;

/// Connects a session of one connection.
pub(crate) fn connect<F: Fabric, S: RdmaSession>(
    fabric: &F,
    session: S,
    setup: Setup,
) -> Driven<F::QueuePair, S> {
    let now = setup.now;
    let queue_pair = fabric.connect(&session.endpoint(), setup);
    Driven::new(session, queue_pair, now)
}

/// Connects a session of several connections, each with its own queue pair.
pub(crate) fn connect_several<F: Fabric, S: RdmaConnections>(
    fabric: &F,
    session: S,
    setup: Setup,
) -> Driven<F::QueuePair, S> {
    let (fabric, now) = (fabric.clone(), setup.now);
    let first = fabric.connect(&session.endpoint(), setup.clone());
    let mut count = 0_u64;
    Driven::new(session, first, now).with_further(move |endpoint, transport, now| {
        // Seeds of different sessions differ in the first eight bytes; seeds of one session's
        // connections differ in the last eight.
        count += 1;
        let (mut seed, count) = (setup.seed, count.to_be_bytes());
        seed.iter_mut().rev().zip(count.iter().rev()).for_each(|(byte, add)| *byte ^= add);
        fabric.connect(endpoint, Setup { seed, now, transport: *transport, ..setup.clone() })
    })
}
