//! Listener addresses of the command line and the config file.
//!
//! ```text
//! host:port   :port (loopback)   host (the protocol's port)   [::1]:port
//! [fe80::1%eth0]:port   unix:PATH
//! ADDR?volumes=NAME,NAME   ADDR?allow=NETWORK,NETWORK   ADDR?rdma=roce   ADDR?rdma=verbs
//! ADDR?volumes=NAME&allow=NETWORK   ADDR?advertise=HOST   ADDR?advertise=HOST:PORT
//! ```
//! Port 0 lets the system choose.

use crate::failure::Failure;
use crate::protocol::Carrier;
use crate::protocol::fabric::{OF_TCP_PORTS, RdmaFabric};
use blockmux_engine::net::socket::Address;
use blockmux_engine::net::zone;
use blockmux_proto::names::networks::{AllowedNetworks, Network, NetworkError};
use serde_json::{Map, Value as Json};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::{self, Path, PathBuf};
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
        find(host, port).map(ListenerAddress::of_tcp).map_err(|error| {
            Failure::request(format!("{error}; write an address of this machine, such as :{port}"))
        })
    }

    /// The address of the name that clients are told; port 0 stands for the listener's own port.
    ///
    /// # Errors
    /// If no host has this name.
    pub(crate) fn find_advertised(&self) -> Result<Option<SocketAddr>, String> {
        let ListenAddress::Tcp { host, port } = self else { return Ok(None) };
        find(host, port.unwrap_or(0)).map(Some).map_err(|error| {
            format!("advertise: {error}; correct the name, or write the IP address that clients connect to")
        })
    }
}

/// The address of a host, by its name or its address; loopback without one. That may hang.
fn find(host: &str, port: u16) -> Result<SocketAddr, String> {
    if host.is_empty() {
        return Ok(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port));
    }
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, port));
    }
    // Also resolves the zone of an address.
    match (host, port).to_socket_addrs().map(|mut found| found.next()) {
        Ok(Some(found)) => Ok(found),
        Ok(None) => Err(format!("cannot find host `{host}`")),
        Err(error) => Err(format!("cannot find host `{host}` ({error})")),
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
            return Err(NO_ADDRESS.to_owned());
        }
        let parameter = PARAMETERS.iter().filter_map(|key| text.find(key)).min();
        if let Some((address, parameters)) = parameter.and_then(|at| text.split_at_checked(at)) {
            let address = address.trim_end_matches([',', '&', ';', ' ']);
            let address = if address.is_empty() { "HOST:PORT" } else { address };
            return Err(format!(
                "`{text}`: parameters follow an address and a question mark; write '{address}?{parameters}'"
            ));
        }
        if text.contains("://") {
            return Err(format!("`{text}` is a URL; write only host:port, or unix:PATH"));
        }
        if text.contains('/') {
            return Err(format!("`{text}` is a path; write unix:{text} for a Unix socket"));
        }
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(format!("`{text}` is not a host; write :{text} for a port on loopback"));
        }
        if is_ipv6(text) {
            return Ok(ListenAddress::Tcp { host: text.to_owned(), port: None });
        }
        // Brackets that do not hold an IPv6 address, or an IPv6 address with a port but no
        // brackets.
        let brackets = || format!("`{text}` is not an IPv6 address with a port; write it as [::1]:PORT");
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (host, port) = rest.split_once(']').ok_or_else(brackets)?;
            if !is_ipv6(host) || !(port.is_empty() || port.starts_with(':')) {
                return Err(brackets());
            }
            (host, port.strip_prefix(':'))
        } else if let Some(port) = text.strip_prefix("*:") {
            return Err(format!(
                "`*` is not an address; write 0.0.0.0:{port} for all IPv4 addresses of this machine, [::]:{port} for all \
                 IPv6 ones"
            ));
        } else {
            match text.rsplit_once(':') {
                Some((host, _)) if host.contains(':') => return Err(brackets()),
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            }
        };
        let number = |port: &str| {
            let wrong = || match port {
                "" => "no port follows the colon; write one, or leave out the colon for the default port"
                    .to_owned(),
                port => format!(
                    "`{port}` is not a port; write a number from 0 to 65535, 0 to let the system choose"
                ),
            };
            port.parse().map_err(|_| wrong())
        };
        Ok(ListenAddress::Tcp { host: host.to_owned(), port: port.map(number).transpose()? })
    }
}

/// A listener as written: its address, its volumes and the networks of its clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListenerEntry {
    pub(crate) address: ListenAddress,
    /// Names of the volumes that the listener exports; `None` for the default of
    /// `protocol/policy.rs`.
    pub(crate) volumes: Option<Vec<String>>,
    /// Networks from which clients may connect.
    pub(crate) networks: AllowedNetworks,
    /// The fabric whose connections the listener accepts, beside those over TCP.
    pub(crate) fabric: Option<&'static RdmaFabric>,
    /// The TCP address that clients are told instead of the listener's.
    pub(crate) advertised: Option<ListenAddress>,
}

/// The parameters of a listener.
#[derive(Default)]
struct ListenerParameters {
    volumes: Option<Vec<String>>,
    networks: AllowedNetworks,
    fabric: Option<&'static RdmaFabric>,
    advertised: Option<ListenAddress>,
}

impl ListenerEntry {
    /// Parses a listener of a protocol over `carrier`.
    pub(crate) fn read(carrier: Carrier, text: &str) -> Result<ListenerEntry, String> {
        let (address, parameters) = match split_parameters(text) {
            Some(("", _)) if carrier == Carrier::Stream => {
                return Err(format!("{NO_ADDRESS} before the question mark"));
            }
            Some((address, parameters)) => (address, read_parameters(text, parameters)?),
            None => (text, ListenerParameters::default()),
        };
        let ListenerParameters { volumes, networks, fabric, advertised } = parameters;
        let address = match carrier {
            Carrier::Stream => address.parse()?,
            Carrier::Frames => ListenAddress::Interface(address.to_owned()),
        };
        if !networks.is_everyone() && !matches!(address, ListenAddress::Tcp { .. }) {
            return Err(match carrier {
                Carrier::Stream => format!(
                    "`{text}`: clients of a Unix socket have no IP addresses; remove `allow`, and limit who may use the \
                     socket by the permissions of its directory"
                ),
                Carrier::Frames => {
                    format!("`{text}`: AoE clients have no IP addresses; remove `allow`, and use MAC masks")
                }
            });
        }
        if fabric.is_some() && !matches!(address, ListenAddress::Tcp { .. }) {
            return Err(format!("`{text}`: RDMA needs an IP address; remove `rdma`, or write host:port"));
        }
        if advertised.is_some() && !matches!(address, ListenAddress::Tcp { .. }) {
            return Err(format!(
                "`{text}`: clients connect to an IP address that is told them; remove `advertise`"
            ));
        }
        Ok(ListenerEntry { address, volumes, networks, fabric, advertised })
    }

    /// A listener for all volumes and all clients.
    pub(crate) fn at(address: ListenAddress) -> ListenerEntry {
        let networks = AllowedNetworks::default();
        ListenerEntry { address, volumes: None, networks, fabric: None, advertised: None }
    }

    /// Whether the listener accepts a session with this volume from this address.
    pub(crate) fn keeps(&self, volume: &str, client: Option<IpAddr>) -> bool {
        self.networks.admits(client)
            && self.volumes.as_ref().is_none_or(|names| names.iter().any(|name| name == volume))
    }

    /// Whether the listener accepts connections over this fabric; `None` stands for its socket.
    pub(crate) fn has_fabric(&self, fabric: Option<&str>) -> bool {
        fabric.is_none_or(|fabric| self.fabric.is_some_and(|own| own.name == fabric))
    }

    /// The address of a listener as written, without its parameters.
    pub(crate) fn address_of(text: &str) -> &str {
        split_parameters(text).map_or(text, |(address, _)| address)
    }

    /// A listener as written, as an object: its address and its parameters.
    pub(crate) fn object(text: &str) -> Map<String, Json> {
        let (address, parameters) = split_parameters(text).unwrap_or((text, ""));
        let pair = |parameter: &str| {
            let (key, value) = parameter.split_once('=')?;
            let list = || value.split(',').filter(|item| !item.is_empty()).map(Json::from).collect();
            let is_list = [VOLUMES, ALLOW].iter().any(|known| known.starts_with(key));
            Some((key.to_owned(), if is_list { list() } else { value.into() }))
        };
        let own = [(ADDRESS.to_owned(), address.into())].into_iter();
        own.chain(parameters.split('&').filter_map(pair)).collect()
    }

    /// The listener at this address with the parameters of an object, as written.
    ///
    /// # Errors
    /// If the object has another address, or a parameter is no text and no list of texts.
    pub(crate) fn text(address: &str, object: &Map<String, Json>) -> Result<String, String> {
        if split_parameters(address).is_some() {
            return Err(format!("`{address}` is an address with parameters; write them as keys"));
        }
        let mut parameters = Vec::new();
        for (key, value) in object {
            match value {
                Json::Null => {}
                value if key == ADDRESS => {
                    if value.as_str() != Some(address) {
                        return Err(format!("{ADDRESS} is {value}; remove this listener and add another"));
                    }
                }
                Json::String(text) if !text.contains(['&', '?', '=']) => {
                    parameters.push(format!("{key}={text}"))
                }
                Json::Array(items) => {
                    let items: Option<Vec<&str>> = items.iter().map(Json::as_str).collect();
                    let items =
                        items.filter(|items| !items.iter().any(|item| item.contains([',', '&', '?', '='])));
                    let items = items.ok_or_else(|| format!("{key}: write a list of names or networks"))?;
                    parameters.push(format!("{key}={}", items.join(",")));
                }
                _ => return Err(format!("{key}: write a text, or a list of texts")),
            }
        }
        let known = |parameter: &&String| PARAMETERS.iter().any(|key| parameter.starts_with(key));
        if let Some(parameter) = parameters.iter().find(|parameter| !known(parameter)) {
            let key = parameter.split('=').next().unwrap_or_default();
            return Err(format!(
                "{key} is no key of a listener; choose one of volumes, allow, rdma, advertise"
            ));
        }
        Ok(match parameters.is_empty() {
            true => address.to_owned(),
            false => format!("{address}?{}", parameters.join("&")),
        })
    }
}

/// Splits off the parameters of a listener. A question mark can also be part of a path.
fn split_parameters(text: &str) -> Option<(&str, &str)> {
    let (address, parameters) = text.rsplit_once('?')?;
    let is_known = PARAMETERS.iter().any(|key| parameters.starts_with(key));
    (is_known || !address.starts_with("unix:")).then_some((address, parameters))
}

/// Reads the parameters of a listener.
fn read_parameters(text: &str, parameters: &str) -> Result<ListenerParameters, String> {
    let (mut volumes, mut networks, mut rdma, mut advertised) = (None, None, None, None);
    for parameter in parameters.split('&') {
        let is_twice = if let Some(names) = parameter.strip_prefix(VOLUMES) {
            volumes.replace(names.split(',').map(str::to_owned).collect()).is_some()
        } else if let Some(list) = parameter.strip_prefix(ALLOW) {
            let list: Result<Vec<Network>, NetworkError> = list.split(',').map(str::parse).collect();
            let list = list.map_err(|error| format!("`{text}`: allow: {error}"))?;
            networks.replace(AllowedNetworks::only(&list)).is_some()
        } else if let Some(fabric) = parameter.strip_prefix(RDMA) {
            let known = RdmaFabric::of_listeners().find(|known| known.name == fabric);
            let known = known.ok_or_else(|| match fabric == OF_TCP_PORTS.name {
                true => {
                    let title = OF_TCP_PORTS.title;
                    format!(
                        "`{text}`: every listener of a protocol over RDMA accepts {title}; remove {parameter}"
                    )
                }
                false => {
                    let known = RdmaFabric::parameters_of_listeners(" or ");
                    format!("`{text}`: `{fabric}` is not a fabric of listeners; write {known}, or nothing")
                }
            });
            rdma.replace(known?).is_some()
        } else if let Some(address) = parameter.strip_prefix(ADVERTISE) {
            let address =
                read_advertised(address).map_err(|error| format!("`{text}`: advertise: {error}"))?;
            advertised.replace(address).is_some()
        } else {
            let fabrics = RdmaFabric::parameters_of_listeners(", ");
            return Err(format!(
                "`{text}`: `{parameter}` is not a parameter of a listener; write volumes=NAME,NAME, allow=NETWORK,NETWORK, \
                 {fabrics} or advertise=HOST:PORT"
            ));
        };
        if is_twice {
            return Err(format!("`{text}`: `{parameter}` repeats a parameter; remove one"));
        }
    }
    Ok(ListenerParameters { volumes, networks: networks.unwrap_or_default(), fabric: rdma, advertised })
}

/// Reads the address that clients are told.
fn read_advertised(text: &str) -> Result<ListenAddress, String> {
    let address = text.parse()?;
    match &address {
        ListenAddress::Tcp { host, .. } if host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified()) => {
            Err(format!("no client can connect to `{host}`; write the address that clients use"))
        }
        ListenAddress::Tcp { host, .. } if host.contains('%') => {
            Err("a link has another name on each machine; leave out `%` and what follows".to_owned())
        }
        ListenAddress::Tcp { host, port } if host.is_empty() || *port == Some(0) => {
            Err(format!("`{text}` is no address that clients can use; write host:port, or host"))
        }
        ListenAddress::Tcp { .. } => Ok(address),
        _ => Err(format!("`{text}` is no TCP address; write host:port, or host")),
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
            Ok(ListenerAddress::Socket(Address::Tcp(tcp))) => zone::address_text(&tcp),
            _ => self.address.to_string(),
        };
        format!("{address}{}", self.parameters())
    }

    /// The parameters, with a question mark before them if there are any.
    fn parameters(&self) -> String {
        let volumes = self.volumes.as_ref().map(|names| format!("{VOLUMES}{}", names.join(",")));
        let networks: Vec<_> = self.networks.networks().map(|network| network.to_string()).collect();
        let networks = (!self.networks.is_everyone()).then(|| format!("{ALLOW}{}", networks.join(",")));
        let rdma = self.fabric.map(|fabric| format!("{RDMA}{}", fabric.name));
        let advertised = self.advertised.as_ref().map(|address| format!("{ADVERTISE}{address}"));
        let parameters: Vec<_> = [volumes, networks, rdma, advertised].into_iter().flatten().collect();
        if parameters.is_empty() { String::new() } else { format!("?{}", parameters.join("&")) }
    }
}

/// The TCP listener of the API as written, `ADDR` or `ADDR?allow=NETWORK,NETWORK`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiListener {
    pub(crate) address: ListenAddress,
    /// Networks from which clients may connect.
    pub(crate) networks: AllowedNetworks,
}

impl FromStr for ApiListener {
    type Err = String;

    fn from_str(text: &str) -> Result<ApiListener, String> {
        let ListenerEntry { address, volumes, networks, fabric, advertised } =
            ListenerEntry::read(Carrier::Stream, text)?;
        match (&address, volumes) {
            _ if fabric.is_some() => Err(format!("`{text}`: the API is HTTP; remove `rdma`")),
            _ if advertised.is_some() => {
                Err(format!("`{text}`: the API tells clients no addresses; remove `advertise`"))
            }
            (_, Some(_)) => Err(format!("`{text}`: the API is for all volumes; remove `volumes`")),
            (ListenAddress::Tcp { .. }, None) => Ok(ApiListener { address, networks }),
            _ => Err("--api: write host:port; --control takes unix:PATH".to_owned()),
        }
    }
}

impl fmt::Display for ApiListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ApiListener { address, networks } = self.clone();
        let entry = ListenerEntry { networks, ..ListenerEntry::at(address) };
        write!(f, "{}{}", entry.address, entry.parameters())
    }
}

/// The key of the address in the object of a listener.
const ADDRESS: &str = "address";
const VOLUMES: &str = "volumes=";
const ALLOW: &str = "allow=";
const RDMA: &str = "rdma=";
const ADVERTISE: &str = "advertise=";
const PARAMETERS: [&str; 4] = [VOLUMES, ALLOW, RDMA, ADVERTISE];
const NO_ADDRESS: &str = "an address is missing; write host:port, :port or unix:PATH";

/// Resolves the TCP address by which a config refers to a listener.
///
/// # Errors
/// The problem, and what to write.
pub(crate) fn tcp_address(text: &str, default_port: u16) -> Result<SocketAddr, String> {
    let place = text.parse::<ListenAddress>()?.resolve(default_port).map_err(|error| error.to_string())?;
    place.tcp().ok_or_else(|| format!("`{text}` is a Unix socket; write host:port"))
}

/// Whether the text is an IPv6 address, with or without a zone.
fn is_ipv6(text: &str) -> bool {
    let (address, zone) = text.split_once('%').unwrap_or((text, "any"));
    address.parse::<Ipv6Addr>().is_ok() && !zone.is_empty()
}

/// The address or the network interface of a listener.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ListenerAddress {
    Socket(Address),
    Interface(String),
}

impl ListenerAddress {
    pub(crate) fn of_tcp(address: SocketAddr) -> ListenerAddress {
        ListenerAddress::Socket(Address::Tcp(address))
    }

    /// The socket's address; `None` for an interface.
    pub(crate) fn socket(&self) -> Option<&Address> {
        match self {
            ListenerAddress::Socket(address) => Some(address),
            ListenerAddress::Interface(_) => None,
        }
    }

    /// The address with an absolute path: a relative one is in the current directory.
    pub(crate) fn in_full(&self) -> ListenerAddress {
        match self {
            ListenerAddress::Socket(Address::Unix(path)) => {
                let full = path::absolute(path).unwrap_or_else(|_| path.clone());
                ListenerAddress::Socket(Address::Unix(full))
            }
            own => own.clone(),
        }
    }

    /// Whether a listener there prevents one at the other address: they have a port in common, and
    /// the same address, or one of them has all addresses of the other one's family.
    pub(crate) fn excludes(&self, other: &ListenerAddress) -> bool {
        let excludes = |(own, other): (SocketAddr, SocketAddr)| {
            let is_any = own.ip().is_unspecified() || other.ip().is_unspecified();
            own.port() == other.port()
                && own.port() != 0
                && own.is_ipv4() == other.is_ipv4()
                && (own.ip() == other.ip() || is_any)
        };
        self.tcp().zip(other.tcp()).is_some_and(excludes)
    }

    /// The TCP address; `None` for a Unix socket or an interface.
    pub(crate) fn tcp(&self) -> Option<SocketAddr> {
        match self.socket()? {
            Address::Tcp(address) => Some(*address),
            Address::Unix(_) => None,
        }
    }
}

impl fmt::Display for ListenerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenerAddress::Socket(address) => address.fmt(f),
            ListenerAddress::Interface(interface) => interface.fmt(f),
        }
    }
}

/// Whether the address `written` refers to `listener`: the unspecified address matches every
/// address, port 0 every port, and an address without a zone that of every interface.
pub(crate) fn matches_listener(written: &SocketAddr, listener: &SocketAddr) -> bool {
    let is_zone = zone::zone_of(written).is_none_or(|zone| zone::zone_of(listener) == Some(zone));
    (written.ip() == listener.ip() && is_zone || written.ip().is_unspecified())
        && (written.port() == listener.port() || written.port() == 0)
}

/// Whether only local clients can connect to the address.
pub(crate) fn is_local(address: &Address) -> bool {
    match address {
        Address::Tcp(address) => address.ip().is_loopback(),
        Address::Unix(_) => true,
    }
}

/// Whether both paths are the same; a relative one is in the current directory.
pub(crate) fn is_same_path(one: &Path, other: &Path) -> bool {
    matches!((path::absolute(one), path::absolute(other)), (Ok(one), Ok(other)) if one == other)
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
            ("[fe80::1%lo]:7", "[fe80::1%lo]:7"),
            ("fe80::1%lo", "[fe80::1%lo]:10809"),
        ] {
            let address: ListenAddress = text.parse().unwrap();
            assert_eq!(address.resolve(10809).unwrap().to_string(), expected, "{text}");
        }
    }

    #[test]
    fn a_listener_excludes_another_one_at_its_port_of_the_same_or_any_address() {
        let excludes = |own: &str, other: &str| {
            let [own, other] = [own, other].map(|text| ListenerAddress::of_tcp(text.parse().unwrap()));
            assert_eq!(own.excludes(&other), other.excludes(&own), "{own} {other}");
            own.excludes(&other)
        };
        assert!(excludes("127.0.0.1:5", "127.0.0.1:5") && excludes("127.0.0.1:5", "0.0.0.0:5"));
        assert!(excludes("[::]:5", "[::1]:5"));
        for other in ["127.0.0.1:6", "127.0.0.2:5", "[::1]:5", "[::]:5"] {
            assert!(!excludes("127.0.0.1:5", other), "{other}");
        }
        assert!(!excludes("127.0.0.1:0", "127.0.0.1:0"), "the system chooses two ports");
    }

    #[test]
    fn a_wrong_address_says_what_to_write() {
        for (text, expected) in [
            ("", "an address is missing"),
            ("unix:", "`unix:` has no path"),
            ("nbd://a", "`nbd://a` is a URL"),
            ("/run/nbd.sock", "`/run/nbd.sock` is a path; write unix:/run"),
            ("10809", "`10809` is not a host"),
            ("a:70000", "`70000` is not a port"),
            ("a:", "no port follows the colon"),
            ("::1:x", "`::1:x` is not an IPv6 address"),
            ("[::1", "`[::1` is not an IPv6 address"),
            ("[a]:1", "`[a]:1` is not an IPv6 address"),
            ("[::1]1", "`[::1]1` is not an IPv6 address"),
            ("[fe80::1%]:1", "`[fe80::1%]:1` is not an IPv6 address"),
            ("*:10809", "`*` is not an address; write 0.0.0.0:10809 for all IPv4"),
            (
                ":7&allow=::1",
                "`:7&allow=::1`: parameters follow an address and a question mark; write ':7?allow=::1'",
            ),
            ("10.0.0.1, volumes=a,b", "`10.0.0.1, volumes=a,b`: parameters follow"),
            (
                "allow=::1",
                "`allow=::1`: parameters follow an address and a question mark; write 'HOST:PORT?allow",
            ),
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
    fn a_listener_may_name_the_networks_of_its_clients() {
        let read = |text: &str| ListenerEntry::read(Carrier::Stream, text);
        let entry = read("0.0.0.0:7?allow=10.0.0.0/8,::1").unwrap();
        assert!(entry.networks.admits(Some([10, 1, 2, 3].into())) && entry.volumes.is_none());
        assert!(!entry.networks.admits(Some([11, 1, 2, 3].into())));
        for text in ["127.0.0.1:7", "127.0.0.1:7?volumes=a,b", "127.0.0.1:7?volumes=a&allow=::1,10.0.0.0/8"] {
            assert_eq!(read(text).unwrap().in_full(7), text);
        }
        let swapped = read("127.0.0.1:7?allow=::1&volumes=a").unwrap();
        assert_eq!(swapped, read("127.0.0.1:7?volumes=a&allow=::1").unwrap());
        assert_eq!(ListenerEntry::address_of("[::1]:7?allow=::1"), "[::1]:7");
        assert_eq!(read("unix:/a?b").unwrap().address, ListenAddress::Unix("/a?b".into()));
        for (text, expected) in [
            (":7?allow=10.0.0.1/8", "allow: `10.0.0.1/8` has bits beyond its prefix; write 10.0.0.0/8"),
            (":7?allow=", "allow: `` is no network"),
            (":7?allow=::1&allow=::2", "`allow=::2` repeats a parameter"),
            (":7?allow=::1&volume=a", "`volume=a` is not a parameter of a listener"),
            ("unix:/s?allow=::1", "clients of a Unix socket have no IP addresses"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        assert!(
            ListenerEntry::read(Carrier::Frames, "eth0?allow=::1").unwrap_err().contains("use MAC masks")
        );
    }

    #[test]
    fn a_listener_may_advertise_another_address() {
        let read = |text: &str| ListenerEntry::read(Carrier::Stream, text);
        for text in [
            "127.0.0.1:7?advertise=192.0.2.1",
            "127.0.0.1:7?volumes=a&allow=::1&rdma=roce&advertise=[2001:db8::1]:70",
            "127.0.0.1:7?advertise=storage.example:3260",
        ] {
            assert_eq!(read(text).unwrap().in_full(7), text);
            let object = ListenerEntry::object(text);
            assert!(object["advertise"].is_string(), "{object:?}");
            assert_eq!(ListenerEntry::text("127.0.0.1:7", &object).unwrap(), text);
        }
        for (text, expected) in [
            (":7?advertise=", "advertise: an address is missing"),
            (":7?advertise=0.0.0.0:3260", "no client can connect to `0.0.0.0`; write the address that"),
            (":7?advertise=[::]:3260", "no client can connect to `::`"),
            (":7?advertise=:3260", "`:3260` is no address that clients can use"),
            (":7?advertise=host:0", "`host:0` is no address that clients can use"),
            (":7?advertise=fe80::1%eth0", "leave out `%`"),
            (":7?advertise=unix:/s", "`unix:/s` is no TCP address"),
            (":7?advertise=a&advertise=b", "`advertise=b` repeats a parameter"),
            ("unix:/s?advertise=a", "remove `advertise`"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        assert!(ListenerEntry::read(Carrier::Frames, "eth0?advertise=a").is_err());
        assert!(":1?advertise=a".parse::<ApiListener>().unwrap_err().contains("remove `advertise`"));
    }

    #[test]
    fn an_address_with_a_zone_is_of_one_interface() {
        let of = |text: &str| text.parse::<SocketAddr>().unwrap();
        for (written, listener, is_it) in [
            ("[fe80::1]:7", "[fe80::1%2]:7", true),
            ("[fe80::1%2]:0", "[fe80::1%2]:7", true),
            ("[fe80::1%3]:7", "[fe80::1%2]:7", false),
            ("[::]:7", "[fe80::1%2]:7", true),
        ] {
            assert_eq!(matches_listener(&of(written), &of(listener)), is_it, "{written}");
        }
        let entry = ListenerEntry::read(Carrier::Stream, "[fe80::1%lo]:7?allow=fe80::/10").unwrap();
        assert_eq!(entry.in_full(1), "[fe80::1%lo]:7?allow=fe80::/10");
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
