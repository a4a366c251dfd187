//! Listener addresses of the command line and the config file.
//!
//! ```text
//! host:port   :port (loopback)   host (the protocol's port)   [::1]:port   unix:PATH
//! ```
//! Port 0 lets the system choose.

use crate::failure::Failure;
use crate::protocol::Carrier;
use crate::protocol::policy::ListenerAddress;
use blockmux_engine::socket::Address;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A listener address as written, before name resolution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ListenAddress {
    /// TCP host and port.
    Tcp {
        /// Name or address, without brackets; empty for loopback.
        host: String,
        /// Port; `None`: the protocol's default.
        port: Option<u16>,
    },
    /// A Unix domain socket.
    Unix(PathBuf),
    /// A network interface, for AoE; never parsed from an address.
    Interface(String),
}

impl ListenAddress {
    /// Loopback, with the protocol's default port.
    pub(crate) const LOOPBACK: ListenAddress = ListenAddress::Tcp { host: String::new(), port: None };

    /// Loopback, with a port that the system chooses.
    pub(crate) const ANY_PORT: ListenAddress = ListenAddress::Tcp { host: String::new(), port: Some(0) };

    /// Makes a relative path relative to `directory`.
    pub(crate) fn anchor(&mut self, directory: &Path) {
        if let ListenAddress::Unix(path) = self {
            *path = directory.join(&*path);
        }
    }

    /// Resolves the name.
    pub(crate) fn resolve(&self, default_port: u16) -> Result<ListenerAddress, Failure> {
        let (host, port) = match self {
            ListenAddress::Unix(path) => return Ok(ListenerAddress::Socket(Address::Unix(path.clone()))),
            ListenAddress::Interface(interface) => return Ok(ListenerAddress::Interface(interface.clone())),
            ListenAddress::Tcp { host, port } => (host.as_str(), port.unwrap_or(default_port)),
        };
        if host.is_empty() {
            return Ok(ListenerAddress::of_tcp(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port)));
        }
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(ListenerAddress::of_tcp(SocketAddr::new(ip, port)));
        }
        let found = (host, port).to_socket_addrs().ok().and_then(|mut found| found.next());
        found.map(ListenerAddress::of_tcp).ok_or_else(|| {
            Failure::request(format!(
                "cannot find host `{host}`; write an address of this machine, such as :{port}"
            ))
        })
    }
}

impl FromStr for ListenAddress {
    /// The problem, and what to write.
    type Err = String;

    fn from_str(text: &str) -> Result<ListenAddress, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path {
                "" => Err("`unix:` has no path; write unix:PATH".to_owned()),
                path => Ok(ListenAddress::Unix(path.into())),
            };
        }
        if text.is_empty() {
            return Err("an address is missing; write host:port, :port or unix:PATH".to_owned());
        }
        if text.contains("://") {
            return Err(format!("`{text}` is a URL; write only host:port, or unix:PATH"));
        }
        if text.contains('/') {
            return Err(format!("`{text}` is a path; write unix:{text} for a Unix socket"));
        }
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(format!("`{text}` is no host; write :{text} for a port on loopback"));
        }
        if text.parse::<Ipv6Addr>().is_ok() {
            return Ok(ListenAddress::Tcp { host: text.to_owned(), port: None });
        }
        // Brackets that do not hold an IPv6 address, or an IPv6 address with a port but no
        // brackets.
        let brackets = || format!("`{text}` is no IPv6 address with a port; write it as [::1]:PORT");
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (host, port) = rest.split_once(']').ok_or_else(brackets)?;
            if host.parse::<Ipv6Addr>().is_err() || !(port.is_empty() || port.starts_with(':')) {
                return Err(brackets());
            }
            (host, port.strip_prefix(':'))
        } else {
            match text.rsplit_once(':') {
                Some((host, _)) if host.contains(':') => return Err(brackets()),
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            }
        };
        let number = |port: &str| {
            let wrong =
                || format!("`{port}` is no port; write a number from 0 to 65535, 0 to let the system choose");
            port.parse().map_err(|_| wrong())
        };
        Ok(ListenAddress::Tcp { host: host.to_owned(), port: port.map(number).transpose()? })
    }
}

/// A listener as written, `ADDR` or `ADDR?volumes=NAME,NAME`: its address and its volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListenerEntry {
    pub(crate) address: ListenAddress,
    /// Names of the volumes that are served there; `None`: the default of `protocol/policy.rs`.
    pub(crate) volumes: Option<Vec<String>>,
}

impl ListenerEntry {
    /// Parses a listener of a protocol over `carrier`.
    pub(crate) fn read(carrier: Carrier, text: &str) -> Result<ListenerEntry, String> {
        let (address, volumes) = match text.rsplit_once(VOLUMES) {
            Some((address, names)) => (address, Some(names.split(',').map(str::to_owned).collect())),
            None => (text, None),
        };
        let address = match carrier {
            Carrier::Stream => address.parse()?,
            Carrier::Frames => ListenAddress::Interface(address.to_owned()),
        };
        Ok(ListenerEntry { address, volumes })
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            ListenAddress::Interface(interface) => f.write_str(interface),
            ListenAddress::Tcp { host, port } => {
                if host.contains(':') {
                    write!(f, "[{host}]")?
                } else {
                    f.write_str(host)?
                }
                port.map_or(Ok(()), |port| write!(f, ":{port}"))
            }
        }
    }
}

impl ListenerEntry {
    /// The entry in the syntax of a config file, with the full address where it is known.
    pub(crate) fn in_full(&self, default_port: u16) -> String {
        let address = match self.address.resolve(default_port) {
            Ok(ListenerAddress::Socket(Address::Tcp(tcp))) => tcp.to_string(),
            _ => self.address.to_string(),
        };
        let volumes = self.volumes.as_ref().map(|names| format!("{VOLUMES}{}", names.join(",")));
        format!("{address}{}", volumes.unwrap_or_default())
    }
}

const VOLUMES: &str = "?volumes=";

/// Resolves the TCP address by which a config refers to a listener.
///
/// # Errors
/// The problem, and what to write.
pub(crate) fn tcp_address(text: &str, default_port: u16) -> Result<SocketAddr, String> {
    let place = text.parse::<ListenAddress>()?.resolve(default_port).map_err(|error| error.to_string())?;
    place.tcp().ok_or_else(|| format!("`{text}` is a Unix socket; write host:port"))
}

/// Whether the address `written` refers to `listener`: the unspecified address matches every
/// address, port 0 every port.
pub(crate) fn means(written: &SocketAddr, listener: &SocketAddr) -> bool {
    (written.ip() == listener.ip() || written.ip().is_unspecified())
        && (written.port() == listener.port() || written.port() == 0)
}

/// Whether only local clients can connect to the address.
pub(crate) fn is_local(address: &Address) -> bool {
    match address {
        Address::Tcp(address) => address.ip().is_loopback(),
        Address::Unix(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_people_write_them() {
        for (text, expected) in [
            ("127.0.0.1:0", "127.0.0.1:0"),
            (":99", "127.0.0.1:99"),
            ("0.0.0.0", "0.0.0.0:10809"),
            ("[::1]:7", "[::1]:7"),
            ("[::1]", "[::1]:10809"),
            ("::1", "[::1]:10809"),
            ("unix:/s:1", "unix:/s:1"),
        ] {
            let address: ListenAddress = text.parse().unwrap();
            assert_eq!(address.resolve(10809).unwrap().to_string(), expected, "{text}");
        }
    }

    #[test]
    fn a_wrong_address_says_what_to_write() {
        for (text, expected) in [
            ("", "an address is missing"),
            ("unix:", "`unix:` has no path"),
            ("nbd://a", "`nbd://a` is a URL"),
            ("/run/nbd.sock", "`/run/nbd.sock` is a path; write unix:/run"),
            ("10809", "`10809` is no host"),
            ("a:70000", "`70000` is no port"),
            ("a:", "`` is no port"),
            ("::1:x", "`::1:x` is no IPv6 address"),
            ("[::1", "`[::1` is no IPv6 address"),
            ("[a]:1", "`[a]:1` is no IPv6 address"),
            ("[::1]1", "`[::1]1` is no IPv6 address"),
        ] {
            let error = text.parse::<ListenAddress>().unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn a_listener_may_name_its_volumes() {
        let entry = |carrier, text: &str| ListenerEntry::read(carrier, text).unwrap();
        assert_eq!(entry(Carrier::Stream, ":7").volumes, None);
        let with = entry(Carrier::Stream, "unix:/s?volumes=a,b");
        assert_eq!(with.address, ListenAddress::Unix("/s".into()));
        assert_eq!(with.volumes, Some(vec!["a".to_owned(), "b".to_owned()]));
        let at_interface = entry(Carrier::Frames, "10809?volumes=a");
        assert_eq!(at_interface.address, ListenAddress::Interface("10809".to_owned()));
        assert_eq!(at_interface.volumes, Some(vec!["a".to_owned()]));
    }

    #[test]
    fn loopback_and_unix_sockets_are_local() {
        for (text, expected) in
            [(":1", true), ("[::1]:1", true), ("unix:s", true), ("0.0.0.0", false), ("::", false)]
        {
            let address: ListenAddress = text.parse().unwrap();
            assert_eq!(address.resolve(1).unwrap().socket().map(is_local), Some(expected), "{text}");
        }
    }
}
