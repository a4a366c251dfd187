//! NBD URIs (`doc/uri.md` of the NBD project).
//!
//! ```text
//!   nbd://host[:port]/export                nbd+unix:///export?socket=PATH
//! ```
//! Everything after the first `/` is the export's name, percent-encoded, so `nbd://host//disk` names
//! `/disk`. Blockmux adds three query parameters: `connections=N`, the number of connections;
//! `reconnect=DURATION`, how long to try to reconnect before I/O fails; and `timeout=DURATION`, how
//! long a reply may take before the connection counts as lost. An unknown parameter is an error, as
//! the document requires.

pub use crate::uri::{DEFAULT_RECONNECT, DEFAULT_TIMEOUT, HostPort, MAX_CONNECTIONS, MAX_RECONNECT};

use crate::uri::{
    self, BUT_PATHS, HostError, Parameter, ParameterError, ParameterTable, UrlParameters, decode_text, encode,
};
use blockmux_wire::nbd::{NBD_DEFAULT_PORT, NBD_MAX_STRING};
use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// A parsed NBD URI: the export, the address of its server, and the connection settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    /// Address of the server.
    pub server: NbdServer,
    /// The export's name; empty for the server's default.
    pub export: String,
    /// Number of connections, 1 to [`MAX_CONNECTIONS`]; `None`: the engine decides.
    pub connections: Option<u32>,
    /// How long to try to reconnect before I/O fails, in whole milliseconds; at most
    /// [`MAX_RECONNECT`].
    pub reconnect: Duration,
    /// How long a reply may take, in whole milliseconds; at most [`MAX_RECONNECT`]; 0: no limit.
    pub timeout: Duration,
}

/// Address of an NBD server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdServer {
    /// TCP host and port.
    Tcp(HostPort),
    /// A Unix domain socket; a path that begins with a NUL byte is in the abstract namespace.
    Unix(PathBuf),
}

/// An invalid URI: the invalid part, and how to correct it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NbdUriError {
    /// The scheme is none of NBD's.
    #[error("{0:?} is no NBD URI; write nbd://host[:port]/export or nbd+unix:///export?socket=PATH")]
    Scheme(String),
    /// The URI requires TLS.
    #[error("{0:?} asks for TLS; TLS is not supported yet, use nbd:// or nbd+unix:// without tls parameters")]
    Tls(String),
    /// The host, between `//` and the next `/`, is invalid.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The path, which is the export's name, is invalid.
    #[error("export name {part:?}: {problem}")]
    Export {
        /// The path as written.
        part: String,
        /// The problem, and how to correct it.
        problem: &'static str,
    },
    /// A query parameter is invalid.
    #[error(transparent)]
    Parameter(#[from] ParameterError),
}

impl FromStr for NbdUri {
    type Err = NbdUriError;

    fn from_str(text: &str) -> Result<NbdUri, NbdUriError> {
        let wrong_scheme = || NbdUriError::Scheme(text.to_owned());
        let (scheme, place, query) = uri::split(text).ok_or_else(wrong_scheme)?;
        let is_unix = match scheme.to_ascii_lowercase().as_str() {
            "nbd" => false,
            "nbd+unix" => true,
            "nbds" | "nbds+unix" => return Err(NbdUriError::Tls(format!("{scheme}://"))),
            _ => return Err(wrong_scheme()),
        };
        if let Some((_, fragment)) = text.split_once('#') {
            let problem = "a URI of NBD has no fragment; write %23 for a # in a name";
            return Err(NbdUriError::Export { part: format!("#{fragment}"), problem });
        }
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        let mut uri = NbdUri::plain();
        uri::read_query(&mut uri, query)?;
        let socket = uri.socket();
        uri.server = if is_unix { unix_server(authority, socket)? } else { tcp_server(authority, socket)? };
        uri.export = export_name(path)?;
        Ok(uri)
    }
}

impl UrlParameters for NbdUri {
    type Error = NbdUriError;
    fn plain() -> NbdUri {
        NbdUri {
            server: NbdServer::Tcp((String::new(), NBD_DEFAULT_PORT)),
            export: String::new(),
            connections: None,
            reconnect: DEFAULT_RECONNECT,
            timeout: DEFAULT_TIMEOUT,
        }
    }

    fn parameters(&mut self, table: &mut ParameterTable<'_, NbdUriError>) {
        let mut socket = self.socket();
        let write = |path: &Option<PathBuf>| path.clone().map(|path| path.into_os_string().into_vec());
        table.field("socket", &mut socket, |parameter| socket_path(parameter).map(Some), write);
        if let Some(path) = socket {
            self.server = NbdServer::Unix(path);
        }
        table.number("connections", &mut self.connections, 1..=MAX_CONNECTIONS);
        table.time("reconnect", &mut self.reconnect, Duration::ZERO);
        table.time("timeout", &mut self.timeout, Duration::ZERO);
    }

    fn refuse(&self, parameter: &Parameter<'_>) -> Result<(), NbdUriError> {
        let is_tls = parameter.key.starts_with("tls-");
        if is_tls { Err(NbdUriError::Tls(parameter.key.to_owned())) } else { Ok(()) }
    }
}

impl NbdUri {
    fn socket(&self) -> Option<PathBuf> {
        match &self.server {
            NbdServer::Tcp(_) => None,
            NbdServer::Unix(path) => Some(path.clone()),
        }
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.server {
            NbdServer::Tcp(portal) => {
                f.write_str("nbd://")?;
                uri::encode_portal(f, portal, NBD_DEFAULT_PORT)?;
            }
            NbdServer::Unix(_) => f.write_str("nbd+unix://")?,
        }
        f.write_str("/")?;
        encode(f, self.export.as_bytes(), BUT_PATHS)?;
        uri::write_query(f, self.clone())
    }
}

/// Checks the path of a socket, which may be in the abstract namespace.
fn socket_path(parameter: &Parameter<'_>) -> Result<PathBuf, ParameterError> {
    let is_abstract = parameter.value.first() == Some(&0);
    if !is_abstract && parameter.value.contains(&0) {
        return Err(parameter.wrong("a path has no NUL byte, except as the first of an abstract socket's"));
    }
    Ok(OsString::from_vec(parameter.value.clone()).into())
}

fn unix_server(authority: &str, socket: Option<PathBuf>) -> Result<NbdServer, NbdUriError> {
    if !authority.is_empty() {
        let problem = "nbd+unix has none; write three slashes and the socket as ?socket=PATH";
        return Err(HostError::new(authority, problem).into());
    }
    let path = socket.filter(|path| !path.as_os_str().is_empty());
    let missing = || ParameterError::new("socket", "missing; nbd+unix needs ?socket=PATH");
    Ok(NbdServer::Unix(path.ok_or_else(missing)?))
}

fn tcp_server(authority: &str, socket: Option<PathBuf>) -> Result<NbdServer, NbdUriError> {
    if socket.is_some() {
        let problem = "belongs to nbd+unix; write nbd+unix:///export?socket=PATH";
        return Err(ParameterError::new("socket", problem).into());
    }
    if authority.contains('@') {
        let problem = "a user name is for TLS, which is not supported yet; remove it";
        return Err(HostError::new(authority, problem).into());
    }
    Ok(NbdServer::Tcp(uri::portal(authority, NBD_DEFAULT_PORT)?))
}

fn export_name(path: &str) -> Result<String, NbdUriError> {
    let wrong = |problem| NbdUriError::Export { part: path.to_owned(), problem };
    let name = decode_text(path).map_err(wrong)?;
    if name.contains('\0') {
        return Err(wrong("a name has no NUL; remove %00"));
    }
    if name.len() > NBD_MAX_STRING {
        return Err(NbdUriError::Export {
            part: path.chars().take(40).collect(),
            problem: "a name has at most 4096 bytes; shorten it",
        });
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tcp(host: &str, port: u16, export: &str) -> NbdUri {
        NbdUri {
            server: NbdServer::Tcp((host.into(), port)),
            export: export.into(),
            connections: None,
            reconnect: DEFAULT_RECONNECT,
            timeout: DEFAULT_TIMEOUT,
        }
    }

    fn unix(path: &[u8], export: &str) -> NbdUri {
        NbdUri { server: NbdServer::Unix(OsString::from_vec(path.to_vec()).into()), ..tcp("", 0, export) }
    }

    #[test]
    fn the_documents_examples_name_their_exports() {
        for (text, uri) in [
            ("nbd://example.com/disk", tcp("example.com", 10809, "disk")),
            ("nbd+unix:///disk?socket=sock", unix(b"sock", "disk")),
            ("nbd://example.com/", tcp("example.com", 10809, "")),
            ("nbd://example.com", tcp("example.com", 10809, "")),
            ("nbd://example.com//disk", tcp("example.com", 10809, "/disk")),
            ("nbd://example.com/hello%20world", tcp("example.com", 10809, "hello world")),
            ("nbd+unix:///?socket=%00/abstract", unix(b"\0/abstract", "")),
            ("nbd+unix://?socket=/run/a%26b.sock", unix(b"/run/a&b.sock", "")),
            ("NBD://[::1]:1/a/b", tcp("::1", 1, "a/b")),
            ("nbd://[fe80::1%25eth0]", tcp("fe80::1%eth0", 10809, "")),
            ("nbd://127.0.0.1:/x", tcp("127.0.0.1", 10809, "x")),
        ] {
            assert_eq!(text.parse(), Ok(uri), "{text}");
        }
    }

    #[test]
    fn our_parameters_are_read_and_written_back() {
        let text = "nbd://h/x?connections=4&reconnect=90s&timeout=2m";
        let uri: NbdUri = text.parse().unwrap();
        let times = (Duration::from_secs(90), Duration::from_secs(120));
        assert_eq!((uri.connections, (uri.reconnect, uri.timeout)), (Some(4), times));
        assert_eq!(uri.to_string(), text);
        let read =
            |time: &str| format!("nbd://h/x?reconnect={time}").parse::<NbdUri>().map(|uri| uri.reconnect);
        for (text, ms) in [("0", 0), ("500ms", 500), ("1.5s", 1500), ("2m", 120_000), ("24h", 86_400_000)] {
            assert_eq!(read(text), Ok(Duration::from_millis(ms)));
        }
        for text in ["", "s", "5", "-1s", "25h", "99999999999999999999s", "9999999999999999h", "1d", "5us"] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_error_names_the_part_and_says_what_to_do() {
        for (text, expected) in [
            ("disk.img", "\"disk.img\" is no NBD URI; write nbd://host"),
            ("http://h/x", "\"http://h/x\" is no NBD URI"),
            ("nbds://h/x", "\"nbds://\" asks for TLS; TLS is not supported yet"),
            ("nbds+unix:///x?socket=s", "\"nbds+unix://\" asks for TLS"),
            ("nbd://h/x?tls-type=psk", "\"tls-type\" asks for TLS"),
            ("nbd://user@h/x", "host \"user@h\": a user name is for TLS"),
            ("nbd:///x", "host \"\": missing; write localhost"),
            ("nbd://:10809/x", "host \":10809\": missing"),
            ("nbd://h:0/x", "host \"h:0\": give a port"),
            ("nbd://h:65536/x", "host \"h:65536\": give a port"),
            ("nbd://h:+1/x", "host \"h:+1\": give a port"),
            ("nbd://::1/x", "host \"::1\": write an IPv6 address in brackets"),
            ("nbd://[::1/x", "host \"[::1\": close the IPv6 address"),
            ("nbd://[::1]1/x", "host \"[::1]1\": give a port"),
            ("nbd://[h]/x", "host \"[h]\": brackets are for IPv6"),
            ("nbd://a%20b/x", "host \"a%20b\": contains blanks"),
            ("nbd://h/%zz", "export name \"%zz\": % needs two hexadecimal digits"),
            ("nbd://h/a%", "export name \"a%\": % needs"),
            ("nbd://h/%ff", "export name \"%ff\": is not UTF-8"),
            ("nbd://h/a%00", "export name \"a%00\": a name has no NUL"),
            ("nbd://h/a#b", "export name \"#b\": a URI of NBD has no fragment"),
            ("nbd://h/x?socket=s", "parameter \"socket\": belongs to nbd+unix"),
            ("nbd+unix:///x", "parameter \"socket\": missing"),
            ("nbd+unix:///x?socket=", "parameter \"socket\": missing"),
            ("nbd+unix:///x?socket=a%00b", "parameter \"socket=a%00b\": a path has no NUL"),
            ("nbd+unix://h/x?socket=s", "host \"h\": nbd+unix has none"),
            ("nbd://h/x?connections=0", "parameter \"connections=0\": give a number from 1 to 16"),
            ("nbd://h/x?connections=17", "parameter \"connections=17\": give"),
            ("nbd://h/x?reconnect=5", "parameter \"reconnect=5\": give a time such as"),
            ("nbd://h/x?timeout=5", "parameter \"timeout=5\": give a time such as"),
            (
                "nbd://h/x?speed=9",
                "parameter \"speed\": unknown; known are socket, connections, reconnect and timeout",
            ),
            ("nbd://h/x?connections=1&connections=1", "parameter \"connections=1\": given twice"),
        ] {
            let error = text.parse::<NbdUri>().unwrap_err().to_string();
            assert!(error.starts_with(expected) && !error.contains('\n'), "{text}: {error}");
        }
        let long = format!("nbd://h/{}", "a".repeat(NBD_MAX_STRING + 1));
        assert!(long.parse::<NbdUri>().unwrap_err().to_string().len() < 200);
    }

    fn any_uri() -> impl Strategy<Value = NbdUri> {
        let server = prop_oneof![
            ("[a-zA-Z0-9.%\u{e4}-]{1,20}", 1..u16::MAX).prop_map(NbdServer::Tcp),
            Just(NbdServer::Tcp(("fe80::2%eth0".into(), NBD_DEFAULT_PORT))),
            prop::collection::vec(1u8.., 1..40)
                .prop_map(|path| NbdServer::Unix(OsString::from_vec(path).into())),
        ];
        let connections = prop::option::of(1..=MAX_CONNECTIONS);
        let time = || (0..=86_400_000u64).prop_map(Duration::from_millis);
        (server, "[^\0]{0,30}", connections, time(), time()).prop_map(
            |(server, export, connections, reconnect, timeout)| NbdUri {
                server,
                export,
                connections,
                reconnect,
                timeout,
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(uri in any_uri()) {
            prop_assert_eq!(uri.to_string().parse(), Ok(uri));
        }

        #[test]
        fn any_text_is_read_or_refused_in_one_line(text in "(nbd(\\+unix)?://)?.{0,60}") {
            match text.parse::<NbdUri>() {
                Ok(uri) => prop_assert_eq!(uri.to_string().parse(), Ok(uri)),
                Err(error) => prop_assert!(!error.to_string().contains('\n')),
            }
        }
    }
}
