//! Addresses of the API of a daemon.

use std::fmt;
use std::path::PathBuf;
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
    Tcp(String),
}

impl FromStr for ApiAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<ApiAddress, &'static str> {
        let Some(rest) = text.strip_prefix("http://") else {
            if text.starts_with("https://") {
                return Err("this daemon's API has no TLS yet; write http://HOST:PORT, or unix:PATH");
            }
            return text.parse().map(ApiAddress::Unix);
        };
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        let port = authority.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
        if port.is_none() || authority.contains('/') {
            return Err("write the daemon's address as http://HOST:PORT");
        }
        Ok(ApiAddress::Tcp(authority.to_owned()))
    }
}

impl fmt::Display for ApiAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ApiAddress::Unix(ControlPath(path)) => path.display().fmt(f),
            ApiAddress::Tcp(authority) => write!(f, "http://{authority}"),
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
        ] {
            assert_eq!(text.parse::<ApiAddress>().unwrap().to_string(), shown);
        }
        for text in ["http://host", "http://host:port", "http://host:1/v1", "https://host:1", "unix:"] {
            assert!(text.parse::<ApiAddress>().is_err(), "{text}");
        }
    }
}
