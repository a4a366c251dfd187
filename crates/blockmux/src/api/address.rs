//! Addresses of the API of a daemon.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Path of the Unix socket of `serve --control`, written as `unix:PATH` or as the path alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ControlPath(pub(crate) PathBuf);

impl FromStr for ControlPath {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<ControlPath, &'static str> {
        match text.strip_prefix("unix:").unwrap_or(text) {
            "" => Err("the socket has no path; write unix:PATH"),
            path => Ok(ControlPath(path.into())),
        }
    }
}

/// The address of a daemon's API, for its clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ApiAddress {
    /// `serve --control`.
    Unix(ControlPath),
    /// `serve --api`, as `host:port`.
    Http(String),
    /// `serve --api --api-tls-certs`, as `host:port`.
    Https(String),
}

impl FromStr for ApiAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<ApiAddress, &'static str> {
        let (rest, kind): (&str, fn(String) -> ApiAddress) =
            match (text.strip_prefix("http://"), text.strip_prefix("https://")) {
                (Some(rest), _) => (rest, ApiAddress::Http),
                (_, Some(rest)) => (rest, ApiAddress::Https),
                _ if is_host_and_port(text) => return Err(WRITE_URL),
                _ => return text.parse().map(ApiAddress::Unix),
            };
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        let port = authority.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
        if port.is_none() || authority.contains('/') {
            return Err(WRITE_URL);
        }
        Ok(kind(authority.to_owned()))
    }
}

impl ApiAddress {
    /// The daemon that commands are for which name none: that of `BLOCKMUX_CONTROL`, or else the
    /// system's or this user's, at the usual place of its control socket.
    ///
    /// # Errors
    /// If there is none, or the variable has no address.
    pub(crate) fn usual() -> Result<ApiAddress, String> {
        if let Some(named) = env::var_os(VARIABLE) {
            let named = named.to_string_lossy().into_owned();
            return named.parse().map_err(|error| format!("{VARIABLE}={named}: {error}"));
        }
        let own = env::var_os("XDG_RUNTIME_DIR").map(|directory| Path::new(&directory).join(SOCKET));
        let places: Vec<PathBuf> = [Path::new("/run").join(SOCKET)].into_iter().chain(own).collect();
        let found = places.iter().find(|place| place.exists()).cloned();
        found.map(|path| ApiAddress::Unix(ControlPath(path))).ok_or_else(|| {
            let places: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
            format!(
                "no daemon has a control socket at {}; name its socket as unix:PATH, or in {VARIABLE}",
                places.join(" or ")
            )
        })
    }
}

/// The environment variable that names the daemon.
const VARIABLE: &str = "BLOCKMUX_CONTROL";
/// The usual place of a control socket, below the directory for such sockets.
const SOCKET: &str = "blockmux/control";

/// Whether a text is an address without a scheme, and not the path of a socket.
fn is_host_and_port(text: &str) -> bool {
    let parts = text.rsplit_once(':').filter(|(host, _)| *host != "unix" && !host.contains('/'));
    parts.is_some_and(|(_, port)| port.parse::<u16>().is_ok())
}

const WRITE_URL: &str = "write the daemon's address as http://HOST:PORT or https://HOST:PORT";

impl ApiAddress {
    /// The address with TLS, if this one is over TCP without it.
    pub(crate) fn encrypted(&self) -> Option<ApiAddress> {
        let ApiAddress::Http(authority) = self else { return None };
        Some(ApiAddress::Https(authority.clone()))
    }

    /// The host that the certificate of an https address must be for.
    pub(crate) fn certified_host(&self) -> Option<&str> {
        let ApiAddress::Https(authority) = self else { return None };
        let host = authority.rsplit_once(':').map_or(&**authority, |(host, _)| host);
        Some(host.trim_start_matches('[').trim_end_matches(']'))
    }
}

impl fmt::Display for ApiAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ApiAddress::Unix(ControlPath(path)) => path.display().fmt(f),
            ApiAddress::Http(authority) => write!(f, "http://{authority}"),
            ApiAddress::Https(authority) => write!(f, "https://{authority}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_path_may_have_the_prefix_unix() {
        for text in ["unix:/run/b.sock", "/run/b.sock"] {
            assert_eq!(text.parse(), Ok(ControlPath("/run/b.sock".into())));
        }
        assert!("unix:".parse::<ControlPath>().is_err());
    }

    #[test]
    fn an_address_is_a_socket_path_or_an_http_url() {
        for (text, shown) in [
            ("unix:/run/b.sock", "/run/b.sock"),
            ("http://127.0.0.1:9180", "http://127.0.0.1:9180"),
            ("http://[::1]:9180/", "http://[::1]:9180"),
            ("https://storage:9180/", "https://storage:9180"),
        ] {
            assert_eq!(text.parse::<ApiAddress>().unwrap().to_string(), shown);
        }
        let no_port = ["http://host", "http://host:port", "http://host:1/v1", "https://host", "unix:"];
        for text in no_port.into_iter().chain(["127.0.0.1:9180", "storage:9180", "[::1]:9180"]) {
            assert!(text.parse::<ApiAddress>().is_err(), "{text}");
        }
        let host = |text: &str| text.parse::<ApiAddress>().unwrap().certified_host().map(str::to_owned);
        assert_eq!(host("https://[::1]:9180").as_deref(), Some("::1"));
        assert_eq!(host("https://storage:9180").as_deref(), Some("storage"));
        assert_eq!(host("http://storage:9180"), None);
    }
}
