//! Where to listen: what was asked for, else every protocol on its own port of loopback, or in a private directory.

use super::setup::Setup;
use crate::address::{ListenAddress, is_local};
use crate::failure::Failure;
use crate::patience::patiently;
use crate::protocol::{PROTOCOLS, Protocol};
use crate::signals;
use blockmux_engine::socket::{Address, Listener};
use std::io;
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

/// Binds what was asked for; else each protocol's private socket, or its own port of loopback.
pub(super) fn bind(
    setup: &Setup,
    private: Option<&TempDir>,
) -> Result<Vec<(&'static Protocol, Listener)>, Failure> {
    let usual = |protocol: &'static Protocol| match private {
        Some(_) if !protocol.has_unix_sockets() => ListenAddress::ANY_PORT,
        Some(directory) => ListenAddress::Unix(directory.path().join(format!("{}.sock", protocol.name))),
        None => ListenAddress::LOOPBACK,
    };
    let mut wanted = setup.listeners.clone();
    if wanted.is_empty() && !setup.aoe.is_wanted() {
        let with_listeners = PROTOCOLS.iter().filter(|protocol| protocol.served_with.is_none());
        wanted = with_listeners.map(|&protocol| (protocol, usual(protocol))).collect();
    }
    let addresses = wanted
        .into_iter()
        .map(|(protocol, address)| Ok((protocol, address.resolve(protocol.port)?)))
        .collect::<Result<Vec<_>, Failure>>()?;
    refuse_twice(&addresses)?;
    let mut listeners = Vec::new();
    for (protocol, address) in addresses {
        let bound = patiently(
            || Listener::bind_with(&address, setup.congestion.as_ref()),
            |error| error.kind() == io::ErrorKind::AddrInUse,
        );
        listeners.push((protocol, bound.map_err(|error| cannot_listen(protocol, &address, &error))?));
        if !is_local(&address) && (protocol.is_open)(&setup.settings) {
            warn!("{address} can be reached from other machines, and there is no authentication");
        }
    }
    Ok(listeners)
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

fn cannot_listen(protocol: &Protocol, address: &Address, error: &io::Error) -> Failure {
    let advice = match (error.kind(), address) {
        (io::ErrorKind::AddrInUse, Address::Tcp(_)) => {
            let option = protocol.name;
            &format!(
                "another program listens there; stop it, or use another port, such as --{option} 127.0.0.1:0"
            )
        }
        (io::ErrorKind::AddrInUse, Address::Unix(_)) => {
            "another program listens there, or it is no socket; name another path"
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
