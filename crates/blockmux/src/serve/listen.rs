//! Where to listen: what was asked for, else every protocol on its own port of loopback, or in a private directory.

use super::setup::Setup;
use crate::address::{ListenAddress, ListenerEntry, is_local};
use crate::failure::Failure;
use crate::patience::patiently;
use crate::protocol::{PROTOCOLS, Protocol};
use crate::signals;
use blockmux_engine::socket::{Address, Listener};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;
use tracing::warn;

/// Where a command's sockets are, if nobody said where to listen.
pub(super) fn private_directory(setup: &Setup, has_command: bool) -> Result<Option<TempDir>, Failure> {
    if !has_command || !setup.listeners.is_empty() || setup.aoe.is_wanted() {
        return Ok(None);
    }
    let directory = tempfile::Builder::new().prefix("blockmux-").tempdir();
    directory.inspect(|directory| signals::leaves(directory.path())).map(Some).map_err(|error| {
        Failure::request(format!(
            "cannot make a directory for the socket: {error}; set TMPDIR to one that works"
        ))
    })
}

/// Listeners, and the volumes that each of them names.
type Bound = (Vec<(&'static Protocol, Listener)>, Vec<Option<Vec<String>>>);

/// Binds what was asked for; else the private socket of each protocol that has something to serve,
/// or its own port of loopback.
pub(super) fn bind(setup: &Setup, private: Option<&TempDir>) -> Result<Bound, Failure> {
    let usual = |protocol: &'static Protocol| match private {
        Some(_) if !protocol.has_unix_sockets() => ListenAddress::ANY_PORT,
        Some(directory) => ListenAddress::Unix(directory.path().join(format!("{}.sock", protocol.name))),
        None => ListenAddress::LOOPBACK,
    };
    let mut wanted = setup.listeners.clone();
    if wanted.is_empty() && !setup.aoe.is_wanted() {
        let with_listeners = PROTOCOLS.iter().filter(|protocol| protocol.served_with.is_none());
        let of_use = with_listeners.filter(|protocol| setup.settings.policy.has_use_for(protocol));
        let entry = |protocol| ListenerEntry { address: usual(protocol), volumes: None };
        wanted = of_use.map(|&protocol| (protocol, entry(protocol))).collect();
        if wanted.is_empty() {
            return Err(Failure::request(
                "no protocol has a volume to serve; name one in the `protocols` of a [[volume]]",
            ));
        }
    }
    let addresses = wanted
        .into_iter()
        .map(|(protocol, entry)| Ok(((protocol, entry.address.resolve(protocol.port)?), entry.volumes)))
        .collect::<Result<Vec<_>, Failure>>()?;
    let (addresses, volumes): (Vec<_>, Vec<_>) = addresses.into_iter().unzip();
    refuse_twice(&addresses)?;
    let mut listeners = Vec::new();
    for (protocol, address) in addresses {
        let bound = patiently(
            || Listener::bind_with(&address, setup.congestion.as_ref()),
            |error| error.kind() == io::ErrorKind::AddrInUse,
        );
        listeners.push((protocol, bound.map_err(|error| cannot_listen(protocol, &address, &error))?));
    }
    Ok((listeners, volumes))
}

/// Says which listeners others can reach without authentication.
pub(super) fn warn_of_open(setup: &Setup, addresses: &[(&'static Protocol, Address)]) {
    for (protocol, address) in addresses {
        if !is_local(address) && (protocol.is_open)(&setup.settings) {
            warn!("{address} can be reached from other machines, and there is no authentication");
        }
    }
}

/// Whoever names an address twice would be told that another program listens there.
fn refuse_twice(addresses: &[(&'static Protocol, Address)]) -> Result<(), Failure> {
    let is_chosen = |address: &Address| matches!(address, Address::Tcp(tcp) if tcp.port() == 0);
    for (place, (protocol, address)) in addresses.iter().enumerate() {
        let first = addresses.iter().take(place).find(|(_, other)| other == address && !is_chosen(address));
        if let Some((other, _)) = first {
            return Err(Failure::request(if other.name == protocol.name {
                format!("--{} {address}: is given twice; remove one", protocol.name)
            } else {
                format!("{address}: is given for --{} and for --{}; change one", other.name, protocol.name)
            }));
        }
    }
    Ok(())
}

/// Whether somebody listens there, or may do so: what does not answer at all may be busy.
fn is_answered(address: SocketAddr) -> bool {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    let answer = TcpStream::connect_timeout(&SocketAddr::new(ip, address.port()), ANSWER_TIME);
    !answer.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

fn is_socket(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket())
}

fn cannot_listen(protocol: &Protocol, address: &Address, error: &io::Error) -> Failure {
    let advice = match (error.kind(), address) {
        (io::ErrorKind::AddrInUse, Address::Tcp(tcp)) if !is_answered(*tcp) => {
            "something has that port, but nobody listens there; use another port, or try again in a minute"
        }
        (io::ErrorKind::AddrInUse, Address::Unix(path)) if !is_socket(path) => {
            "a file is there, and it is no socket; name another path"
        }
        (io::ErrorKind::AddrInUse, Address::Tcp(_)) => {
            let option = protocol.name;
            &format!(
                "another program listens there; stop it, or use another port, such as --{option} 127.0.0.1:0"
            )
        }
        (io::ErrorKind::AddrInUse, Address::Unix(_)) => {
            "another program listens there; stop it, or name another path"
        }
        (io::ErrorKind::PermissionDenied, Address::Tcp(_)) => "not permitted; use a port from 1024 on",
        (io::ErrorKind::PermissionDenied, Address::Unix(_)) => {
            "not permitted; name a path that you may write"
        }
        (io::ErrorKind::AddrNotAvailable, _) => "this machine has no such address; `ip address` lists them",
        (io::ErrorKind::NotFound, _) => "the directory does not exist; create it, or name another path",
        _ => return Failure::request(format!("cannot listen on {address}: {error}; name another address")),
    };
    Failure::request(format!("cannot listen on {address}: {advice}"))
}

/// How long a listener on this machine may take to answer before it counts as busy.
const ANSWER_TIME: Duration = Duration::from_secs(1);
