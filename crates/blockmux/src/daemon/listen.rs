//! Listeners: at the configured addresses, or by default for every protocol at its own port on
//! loopback, or, for the command of `--run`, at Unix sockets in a private directory.

use super::setup::Setup;
use crate::failure::Failure;
use crate::output::shell_word;
use crate::process::retry::retry_while_held;
use crate::process::signals;
use crate::protocol::address::ListenerAddress;
use crate::protocol::address::{ListenAddress, ListenerEntry, is_local};
use crate::protocol::fabric::FabricPort;
use crate::protocol::policy::{AdvertisedAddress, Policy, PolicyListener};
use crate::protocol::{PROTOCOLS, Protocol};
use blockmux_engine::net::socket::{Address, Listener};
use blockmux_engine::net::zone;
use blockmux_engine::sys::congestion::Congestion;
use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;
use tracing::warn;

/// Creates the directory for the Unix sockets of `--run`; `None` without a command, or if listeners
/// are configured.
pub(super) fn private_directory(setup: &Setup, has_command: bool) -> Result<Option<TempDir>, Failure> {
    if !has_command || !setup.listeners.is_empty() {
        return Ok(None);
    }
    let directory = tempfile::Builder::new().prefix("blockmux-").tempdir();
    directory.inspect(|directory| signals::remove_at_exit(directory.path())).map(Some).map_err(|error| {
        Failure::request(format!(
            "cannot create a directory for the sockets: {error}; set TMPDIR to a writable directory"
        ))
    })
}

/// A bound listener of a protocol.
pub(super) struct BoundListener {
    /// The configured address; its port may be 0.
    pub(super) asked: ListenerAddress,
    /// The listener with the address that it is bound to.
    pub(super) listener: PolicyListener,
    /// `None` for a network interface.
    pub(super) socket: Option<Listener>,
    /// For connections over RDMA.
    pub(super) rdma: Option<FabricPort>,
}

/// The configured listeners. Without any, one for each protocol that has a volume to export: a
/// socket in the private directory, or the protocol's port on loopback.
pub(super) fn places(setup: &Setup, private: Option<&TempDir>) -> Result<Vec<PolicyListener>, Failure> {
    let usual = |protocol: &'static Protocol| match private {
        Some(_) if !protocol.has_unix_sockets() => ListenAddress::ANY_PORT,
        Some(directory) => ListenAddress::Unix(directory.path().join(format!("{}.sock", protocol.name))),
        None => ListenAddress::LOOPBACK,
    };
    let is_asked = !setup.listeners.is_empty();
    let mut wanted = setup.listeners.clone();
    if !is_asked {
        let unasked = PROTOCOLS.iter().filter(|protocol| protocol.is_served_by_default());
        let of_use = unasked.filter(|protocol| setup.policy.has_use_for(protocol));
        let entry = |protocol| ListenerEntry::at(usual(protocol));
        wanted = of_use.map(|&protocol| (protocol, entry(protocol))).collect();
        if wanted.is_empty() && !setup.volumes.is_empty() {
            return Err(Failure::request(
                "no protocol has a volume to serve; name one in the `protocols` of a [[volume]]",
            ));
        }
    }
    let places = wanted.into_iter().map(
        |(protocol, ListenerEntry { address, volumes, networks, fabric, advertised })| {
            let place = address.resolve(protocol.port)?;
            if let Some(fabric) = fabric.filter(|_| !protocol.has_rdma) {
                let (option, place, fabric) = (protocol.name, &address, fabric.name);
                return Err(Failure::request(format!(
                    "--{option} {place}: the protocol has no form over RDMA; remove rdma={fabric}"
                )));
            }
            let advertised = advertised.map(|written| AdvertisedAddress { written, found: None });
            Ok(PolicyListener { protocol, place, volumes, networks, is_asked, fabric, advertised })
        },
    );
    let places = places.collect::<Result<Vec<_>, Failure>>()?;
    refuse_twice(&places)?;
    Ok(places)
}

/// Binds a listener, or uses the `inherited` socket that is bound to its address.
pub(super) fn bind(
    mut listener: PolicyListener,
    congestion: Option<&Congestion>,
    inherited: Option<Listener>,
) -> Result<BoundListener, Failure> {
    listener.look_up()?;
    let asked = listener.place.clone();
    let ListenerAddress::Socket(address) = &asked else {
        return Ok(BoundListener { asked, listener, socket: None, rdma: None });
    };
    let bound = match inherited {
        Some(socket) => Ok(socket),
        None => retry_while_held(
            || Listener::bind_with(address, congestion),
            |error| error.kind() == io::ErrorKind::AddrInUse,
        ),
    };
    let socket = bound.map_err(|error| cannot_listen(&listener, address, &error))?;
    // With port 0 the system has chosen one.
    let place = ListenerAddress::Socket(socket.address().clone());
    let listener = PolicyListener { place, ..listener };
    let rdma = bind_rdma(&listener)?;
    Ok(BoundListener { asked, listener, socket: Some(socket), rdma })
}

/// Opens the port of a bound listener that accepts connections over RDMA, too.
pub(super) fn bind_rdma(listener: &PolicyListener) -> Result<Option<FabricPort>, Failure> {
    let ports = listener.fabric.and_then(|fabric| fabric.ports.as_ref());
    let Some((address, ports)) = listener.place.tcp().zip(ports) else { return Ok(None) };
    let bound = retry_while_held(|| (ports.bind)(address), |error| error.kind() == io::ErrorKind::AddrInUse);
    bound.map(Some).map_err(|error| Failure::request((ports.explain)(address, &error)))
}

/// Warns of each listener that exports nothing, and of each that other machines can reach without
/// authentication.
pub(super) fn warn_of_places(policy: &Policy) {
    policy.idle_listeners().iter().for_each(|line| warn!("{line}"));
    open_places(policy).iter().for_each(|place| warn!("{}", open_place_note(place)));
}

/// The addresses at which other machines reach volumes without authentication.
pub(super) fn open_places(policy: &Policy) -> Vec<Address> {
    let is_open = |listener: &PolicyListener| {
        let PolicyListener { protocol, place, networks, .. } = listener;
        let reached = place.socket().filter(|address| !is_local(address) && networks.is_everyone());
        reached.filter(|_| policy.is_open(protocol)).cloned()
    };
    policy.listeners().iter().filter_map(is_open).collect()
}

/// A message about one of [`open_places`].
pub(super) fn open_place_note(place: &Address) -> String {
    format!(
        "{place} can be reached from other machines without authentication; limit its clients with ?allow= or \
         configure authentication"
    )
}

/// Refuses an address that is given twice. The second bind would fail with a message about another
/// program.
fn refuse_twice(listeners: &[PolicyListener]) -> Result<(), Failure> {
    let is_chosen = |place: &ListenerAddress| place.tcp().is_some_and(|tcp| tcp.port() == 0);
    let mut places = HashMap::new();
    for PolicyListener { protocol, place, .. } in listeners.iter().filter(|own| !is_chosen(&own.place)) {
        if let Some(other) = places.insert(place, *protocol) {
            return Err(Failure::request(if other.name == protocol.name {
                format!("--{} {place}: given twice; remove one", protocol.name)
            } else {
                format!("{place}: given for --{} and for --{}; change one", other.name, protocol.name)
            }));
        }
    }
    Ok(())
}

/// Whether a program may be listening there: `false` only if connections are refused.
fn is_answered(address: SocketAddr) -> bool {
    let answer = TcpStream::connect_timeout(&address, ANSWER_TIME);
    !answer.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

fn is_socket(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket())
}

fn cannot_listen(listener: &PolicyListener, address: &Address, error: &io::Error) -> Failure {
    let advice = match (error.kind(), address) {
        // Our own message says what to do.
        _ if error.get_ref().is_some() => &error.to_string(),
        // A program may listen at one of the machine's addresses.
        (io::ErrorKind::AddrInUse, Address::Tcp(tcp)) if tcp.ip().is_unspecified() => &format!(
            "a program listens at that port of this machine, maybe at one address only; \
             `ss -ltnp sport = :{}` names it",
            tcp.port()
        ),
        (io::ErrorKind::AddrInUse, Address::Tcp(tcp)) if !is_answered(*tcp) => {
            "the port is in use, but no program listens there; use another port, or try again in a minute"
        }
        (io::ErrorKind::AddrInUse, Address::Unix(path)) if !is_socket(path) => {
            "a file that is not a socket has this path; name another path"
        }
        (io::ErrorKind::AddrInUse, Address::Tcp(tcp)) => &format!(
            "another program listens there; stop it, or use another port, such as {}",
            at_any_port(listener, *tcp)
        ),
        (io::ErrorKind::AddrInUse, Address::Unix(_)) => {
            "another program listens there; stop it, or name another path"
        }
        (io::ErrorKind::PermissionDenied, Address::Tcp(_)) => "not permitted; use a port from 1024 on",
        (io::ErrorKind::PermissionDenied, Address::Unix(_)) => {
            "not permitted; name a path that you may write"
        }
        (_, Address::Tcp(tcp)) if zone::lacks_zone(tcp) => &format!(
            "it is an address of one link; name the interface, as in [{}%eth0]:{}",
            tcp.ip(),
            tcp.port()
        ),
        (io::ErrorKind::AddrNotAvailable, _) => "this machine has no such address; `ip address` lists them",
        (io::ErrorKind::NotFound, _) => "the directory does not exist; create it, or name another path",
        _ => return Failure::request(format!("cannot listen on {address}: {error}; name another address")),
    };
    Failure::request(format!("cannot listen on {address}: {advice}"))
}

/// The option for a listener at a port that the system chooses.
fn at_any_port(listener: &PolicyListener, address: SocketAddr) -> String {
    let PolicyListener { protocol, volumes, networks, fabric, advertised, .. } = listener;
    let mut address = address;
    address.set_port(0);
    let query = fabric.map(|fabric| fabric.query).unwrap_or_default();
    let place = format!("{}{query}", zone::address_text(&address));
    let has_others = volumes.is_some() || !networks.is_everyone() || advertised.is_some();
    let others = if has_others { " with its other parameters" } else { "" };
    format!("--{} {}{others}", protocol.name, shell_word(&place))
}

/// Timeout of the connection attempt of [`is_answered`].
const ANSWER_TIME: Duration = Duration::from_secs(1);
