//! The table of RDMA fabrics, as that of protocols: which one a URL or a listener names, what
//! `blockmux rdma` says of each, and how it is measured.
//!
//! | what asks | by |
//! |---|---|
//! | a URL: `rdma=NAME` | `with_fabric!`, which compiles an initiator for each fabric |
//! | a listener: `?rdma=NAME` | [`RdmaFabric::of_listeners`], [`FabricPort::serving`] |
//! | `blockmux rdma` | [`FABRICS`], [`RdmaFabric::state`] |
//! | `blockmux bench --rdma NAME` | [`FabricLoopback`] |
//!
//! No other file of the program names a provider, which `cargo xtask tidy` checks. A further one is
//! a module of `blockmux_engine::fabric`, an entry here, a variant of [`FabricPort`] if it has its
//! own ports, and a word of URLs (`blockmux_proto::names::rdma`).

mod devices;
mod roce;

use blockmux_engine::carrier::blocking::BlockingConnectError;
use blockmux_engine::core::reactor::{EngineCore, Inbox};
use blockmux_engine::fabric::roce::RoceListener;
use blockmux_engine::fabric::verbs::VerbsListener;
use blockmux_engine::fabric::{self, FabricListener, RdmaTarget};
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerEnd};
use blockmux_proto::names::rdma::{Rdma, TCP_TARGET_QUERY};
use blockmux_verbs::survey::Survey;
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;

/// A fabric that protocols over RDMA can have.
pub(crate) struct RdmaFabric {
    /// Its name in URLs: `rdma=NAME`.
    pub(crate) name: &'static str,
    /// As messages call its connections.
    pub(crate) title: &'static str,
    /// What to check if a target of a protocol with this title cannot be reached by it.
    pub(crate) target_check: fn(&str) -> String,
    /// How it transmits, and what it needs.
    pub(crate) about: &'static str,
    /// The query of URLs of a target that is reached by it.
    pub(crate) query: &'static str,
    /// Ports of its own; `None` if its connections arrive at TCP ports.
    pub(crate) ports: Option<FabricPorts>,
    /// Whether it can be used on this machine, which has these devices.
    pub(crate) state: fn(&Survey) -> io::Result<FabricState>,
}

/// How listeners get ports of a fabric.
pub(crate) struct FabricPorts {
    /// Opens the port for the service that has this TCP address.
    pub(crate) bind: fn(SocketAddr) -> io::Result<FabricPort>,
    /// Says why a port could not be opened, and what to do.
    pub(crate) explain: fn(SocketAddr, &io::Error) -> String,
    /// What the log says if a core cannot accept connections there, before the reason.
    pub(crate) unserved: &'static str,
    /// Where the bench opens a port; `None` if that needs a device.
    pub(crate) loopback: Option<FabricLoopback>,
}

/// Ports of a fabric on loopback.
pub(crate) struct FabricLoopback {
    /// The address of this process.
    pub(crate) address: fn() -> Ipv4Addr,
    /// Says why a port could not be opened there, and what to do.
    pub(crate) explain: fn(&io::Error) -> String,
}

/// All fabrics, that of TCP ports first: it is the one of URLs and listeners that name none.
pub(crate) static FABRICS: [&RdmaFabric; 3] = [&OF_TCP_PORTS, &roce::ROCE, &devices::DEVICES];

/// The fabric at TCP ports.
pub(crate) static OF_TCP_PORTS: RdmaFabric = RdmaFabric {
    name: "iwarp",
    title: "iWARP",
    target_check: check_of_target,
    about: "iWARP in software, over TCP; needs no device",
    query: TCP_TARGET_QUERY,
    ports: None,
    state: |_| Ok(FabricState::WORKS),
};

/// What to check if a target cannot be reached. `what` is the title of its protocol; `rdma` is the
/// fabric of its URL, if the protocol is one over RDMA. `None` if the cause is on this machine: the
/// error says what to do.
pub(crate) fn target_advice<R>(
    what: &str,
    rdma: Option<Rdma>,
    error: &BlockingConnectError<R>,
) -> Option<String> {
    let check = match rdma {
        Some(Rdma::Roce) => roce::ROCE.target_check,
        Some(Rdma::Verbs) => devices::DEVICES.target_check,
        Some(Rdma::Iwarp { .. }) | None => OF_TCP_PORTS.target_check,
    };
    (!error.is_local()).then(|| check(what))
}

fn check_of_target(what: &str) -> String {
    format!("check that an {what} target listens there")
}

impl RdmaFabric {
    /// Those that listeners name, because they have ports of their own.
    pub(crate) fn of_listeners() -> impl Iterator<Item = &'static RdmaFabric> {
        FABRICS.into_iter().filter(|fabric| fabric.ports.is_some())
    }

    /// `rdma=NAME` of each that listeners name, as messages list them.
    pub(crate) fn parameters_of_listeners(separator: &str) -> String {
        let all: Vec<_> = Self::of_listeners().map(|fabric| format!("rdma={}", fabric.name)).collect();
        all.join(separator)
    }
}

impl PartialEq for RdmaFabric {
    fn eq(&self, other: &RdmaFabric) -> bool {
        self.name == other.name
    }
}

impl Eq for RdmaFabric {}

impl fmt::Debug for RdmaFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Whether a fabric can be used on this machine.
#[derive(Clone)]
pub(crate) struct FabricState {
    pub(crate) name: &'static str,
    /// What keeps it from being used, or restricts its use, and what to do.
    pub(crate) reason: Option<String>,
}

impl FabricState {
    pub(crate) const WORKS: FabricState = FabricState { name: "works", reason: None };
}

/// An open port of a fabric.
pub(crate) enum FabricPort {
    Roce(RoceListener),
    Verbs(VerbsListener),
}

/// Accepts connections on a core, as [`FabricListener::accept`].
pub(crate) type AcceptRdma =
    Box<dyn FnOnce(&Rc<EngineCore>, ListenerEnd, Vec<Inbox>, ConnectionLimit) -> io::Result<()> + Send>;

impl FabricPort {
    /// Whether nothing else can listen at the TCP port of the same number.
    pub(crate) fn takes_tcp_port(&self) -> bool {
        match self {
            FabricPort::Roce(listener) => listener.takes_tcp_port(),
            FabricPort::Verbs(listener) => listener.takes_tcp_port(),
        }
    }

    /// What accepts connections to these targets.
    pub(crate) fn serving(self, target: impl RdmaTarget) -> AcceptRdma {
        match self {
            FabricPort::Roce(listener) => accepting(listener, target),
            FabricPort::Verbs(listener) => accepting(listener, target),
        }
    }
}

fn accepting<L: FabricListener>(listener: L, target: impl RdmaTarget) -> AcceptRdma {
    let serve = fabric::serve::<L::Fabric>(target);
    Box::new(move |core, end, cores, limit| listener.accept(core, end, cores, serve, limit))
}

/// Evaluates an expression with the fabric of a URL. Each arm has its own type, so sessions are
/// compiled for each fabric, and nothing is dispatched for each I/O.
macro_rules! with_fabric {
    ($rdma:expr, $fabric:ident => $then:expr) => {
        match $rdma {
            blockmux_proto::names::rdma::Rdma::Iwarp { crc } => {
                let $fabric = blockmux_engine::fabric::iwarp::IwarpFabric::new(crc);
                $then
            }
            blockmux_proto::names::rdma::Rdma::Roce => {
                let $fabric = blockmux_engine::fabric::roce::RoceFabric;
                $then
            }
            blockmux_proto::names::rdma::Rdma::Verbs => {
                let $fabric = blockmux_engine::fabric::verbs::VerbsFabric;
                $then
            }
        }
    };
}

pub(crate) use with_fabric;
