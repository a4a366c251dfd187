//! NBD URIs (`doc/uri.md` of the NBD project).
//!
//! ```text
//!   nbd://host[:port]/export                nbd+unix:///export?socket=PATH
//!   nbds://[user@]host[:port]/export        nbds+unix://[user@]/export?socket=PATH
//! ```
//! Everything after the first `/` is the export's name, percent-encoded, so `nbd://host//disk`
//! names `/disk`. Blockmux adds three query parameters: `connections=N`, the number of connections;
//! `reconnect=DURATION`, how long to try to reconnect before I/O fails; and `timeout=DURATION`, how
//! long a reply may take before the connection counts as lost. An unknown parameter is an error, as
//! the document requires.
//!
//! `nbds` requires TLS. Its parameters are the document's
//! `tls-type=x509|psk`, `tls-hostname=NAME` and `tls-verify-peer=0|1`, and those that libnbd and
//! nbdkit write: `tls-certificates=DIRECTORY` and `tls-psk-file=FILE`. The user of the
//! key is before the host, or in `tls-username=USER`. `ktls=off` disables kernel TLS.

pub use crate::names::uri::{DEFAULT_RECONNECT, DEFAULT_TIMEOUT, HostPort, MAX_CONNECTIONS, MAX_RECONNECT};

use crate::names::uri::{
    self, BUT_PATHS, Parameter, ParameterTable, RESERVED, UriError, UrlParameters, decode_text, encode,
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
    /// TLS, if it is required.
    pub tls: Option<UriTls>,
    /// Number of connections, 1 to [`MAX_CONNECTIONS`]; `None`: the engine decides.
    pub connections: Option<u32>,
    /// How long to try to reconnect before I/O fails, in whole milliseconds; at most
    /// [`MAX_RECONNECT`].
    pub reconnect: Duration,
    /// How long a reply may take, in whole milliseconds; at most [`MAX_RECONNECT`]; 0: no limit.
    pub timeout: Duration,
}

/// TLS settings of a URI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UriTls {
    /// The credentials of client and server.
    pub credentials: TlsFiles,
    /// The expected name in the server's certificate; `None`: the host.
    pub hostname: Option<String>,
    /// Whether to verify the server's certificate.
    pub verify_peer: bool,
    /// Whether to use kernel TLS if it is available.
    pub ktls: bool,
}

/// Credentials for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsFiles {
    /// The directory with `ca-cert.pem`, and optionally `client-cert.pem` and `client-key.pem`;
    /// `None`: the system's trusted authorities, and no client certificate.
    Certificates(Option<PathBuf>),
    /// A file of pre-shared keys.
    Psk {
        /// The file.
        file: PathBuf,
        /// The user of the key; `None`: the user of the only key, or else the current user.
        username: Option<String>,
    },
}

/// The TLS parameters as written, before they are checked together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct TlsParameters {
    certificates: Option<PathBuf>,
    psk_file: Option<PathBuf>,
    username: Option<String>,
    hostname: Option<String>,
    kind: Option<TlsType>,
    ignores_peer: bool,
    without_ktls: bool,
}

/// Values of `tls-type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TlsType {
    X509,
    Psk,
    Anonymous,
}

/// A URI with its parameters as written.
#[derive(Clone)]
struct UriText {
    uri: NbdUri,
    tls: Option<TlsParameters>,
}

/// Address of an NBD server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdServer {
    /// TCP host and port.
    Tcp(HostPort),
    /// A Unix domain socket; a path that begins with a NUL byte is in the abstract namespace.
    Unix(PathBuf),
}

impl FromStr for NbdUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<NbdUri, UriError> {
        let wrong_scheme = || UriError::new(format!("{text:?} is no NBD URI; {FORMS}"));
        let (scheme, place, query) = uri::split(text).ok_or_else(wrong_scheme)?;
        let (is_unix, is_tls) = match scheme.to_ascii_lowercase().as_str() {
            "nbd" => (false, false),
            "nbd+unix" => (true, false),
            "nbds" => (false, true),
            "nbds+unix" => (true, true),
            _ => return Err(wrong_scheme()),
        };
        if let Some((_, fragment)) = text.split_once('#') {
            let problem = "a URI of NBD has no fragment; write %23 for a # in a name";
            return Err(UriError::part(EXPORT, &format!("#{fragment}"), problem));
        }
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        let mut text = UriText { tls: is_tls.then(TlsParameters::default), ..UriText::plain() };
        uri::read_query(&mut text, query)?;
        let UriText { mut uri, tls } = text;
        let (user, authority) = user_and_host(authority)?;
        match &user {
            Some(user) if tls.is_none() && user.contains(':') => {
                return Err(UriError::host(&format!("{user}@"), NO_PASSWORDS));
            }
            Some(user) if tls.is_none() => return Err(not_by_tls(&format!("{user}@"))),
            _ => {}
        }
        let socket = uri.socket();
        uri.server = if is_unix { unix_server(authority, socket)? } else { tcp_server(authority, socket)? };
        uri.export = export_name(path)?;
        uri.tls = tls.map(|tls| tls.check(user)).transpose()?;
        Ok(uri)
    }
}

impl TlsParameters {
    /// Checks the parameters together, and against the `user` before the host.
    fn check(self, user: Option<String>) -> Result<UriTls, UriError> {
        let wrong = |key: &str, problem: &str| Err(UriError::parameter(key, problem));
        let username = match (user, self.username) {
            (Some(_), Some(_)) => {
                return wrong("tls-username", "a user stands before the host, too; remove one");
            }
            (user, username) => user.or(username),
        };
        let credentials = match (self.kind, self.psk_file, self.certificates) {
            (Some(TlsType::Anonymous), ..) => {
                return wrong(
                    "tls-type=anon",
                    "TLS without authentication is not supported; use x509 or psk",
                );
            }
            (_, Some(_), Some(_)) => {
                return wrong("tls-psk-file", "excludes tls-certificates; remove one of them");
            }
            (Some(TlsType::X509), Some(_), None) => {
                return wrong("tls-psk-file", "belongs to tls-type=psk");
            }
            (Some(TlsType::Psk), None, _) => {
                return wrong("tls-psk-file", "missing; tls-type=psk needs tls-psk-file=FILE");
            }
            (_, Some(file), None) => TlsFiles::Psk { file, username },
            (_, None, _) if username.is_some() => {
                return wrong("tls-psk-file", "missing; a user name needs the key file, tls-psk-file=FILE");
            }
            (_, None, certificates) => TlsFiles::Certificates(certificates),
        };
        let (verify_peer, ktls) = (!self.ignores_peer, !self.without_ktls);
        Ok(UriTls { credentials, hostname: self.hostname, verify_peer, ktls })
    }

    /// The parameters for these settings; the user is written before the host.
    fn of(tls: &UriTls) -> TlsParameters {
        let mut parameters = TlsParameters {
            hostname: tls.hostname.clone(),
            ignores_peer: !tls.verify_peer,
            without_ktls: !tls.ktls,
            ..TlsParameters::default()
        };
        match &tls.credentials {
            TlsFiles::Certificates(directory) => parameters.certificates.clone_from(directory),
            TlsFiles::Psk { file, .. } => parameters.psk_file = Some(file.clone()),
        }
        parameters
    }
}

impl UrlParameters for UriText {
    fn plain() -> UriText {
        let uri = NbdUri {
            server: NbdServer::Tcp((String::new(), NBD_DEFAULT_PORT)),
            export: String::new(),
            tls: None,
            connections: None,
            reconnect: DEFAULT_RECONNECT,
            timeout: DEFAULT_TIMEOUT,
        };
        UriText { uri, tls: None }
    }

    fn parameters(&mut self, table: &mut ParameterTable<'_>) {
        let mut socket = self.uri.socket();
        let write = |path: &Option<PathBuf>| path.clone().map(|path| path.into_os_string().into_vec());
        table.field("socket", &mut socket, |parameter| socket_path(parameter).map(Some), write);
        if let Some(path) = socket {
            self.uri.server = NbdServer::Unix(path);
        }
        // `refuse` has refused these in a URI without TLS, so `plain` is never changed.
        let mut plain = TlsParameters::default();
        let tls = self.tls.as_mut().unwrap_or(&mut plain);
        table.file("tls-certificates", &mut tls.certificates);
        table.file("tls-psk-file", &mut tls.psk_file);
        let text = |text: &str| match text {
            "" => Err("write a name"),
            text => Ok(text.to_owned()),
        };
        table.text("tls-username", &mut tls.username, text, Clone::clone);
        table.text("tls-hostname", &mut tls.hostname, text, Clone::clone);
        let kinds = [("x509", TlsType::X509), ("psk", TlsType::Psk), ("anon", TlsType::Anonymous)];
        let kinds = kinds.map(|(word, kind)| (word, Some(kind)));
        table.word("tls-type", &mut tls.kind, &kinds, "write x509 or psk");
        let booleans = [("0", true), ("1", false), ("false", true), ("true", false)];
        table.word("tls-verify-peer", &mut tls.ignores_peer, &booleans, "write 0 or 1");
        table.word("ktls", &mut tls.without_ktls, &[("on", false), ("off", true)], "write on or off");
        table.number("connections", &mut self.uri.connections, 1..=MAX_CONNECTIONS);
        table.time("reconnect", &mut self.uri.reconnect, Duration::ZERO);
        table.time("timeout", &mut self.uri.timeout, Duration::ZERO);
    }

    fn refuse(&self, parameter: &Parameter<'_>) -> Result<(), UriError> {
        let is_of_tls = parameter.key.starts_with("tls-") || parameter.key == "ktls";
        match &self.tls {
            None if is_of_tls => Err(not_by_tls(parameter.key)),
            _ => Ok(()),
        }
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
        f.write_str(if self.tls.is_some() { "nbds" } else { "nbd" })?;
        f.write_str(if matches!(self.server, NbdServer::Unix(_)) { "+unix://" } else { "://" })?;
        let credentials = self.tls.as_ref().map(|tls| &tls.credentials);
        if let Some(TlsFiles::Psk { username: Some(username), .. }) = credentials {
            encode(f, username.as_bytes(), RESERVED)?;
            f.write_str("@")?;
        }
        if let NbdServer::Tcp(portal) = &self.server {
            uri::encode_portal(f, portal, NBD_DEFAULT_PORT)?;
        }
        f.write_str("/")?;
        encode(f, self.export.as_bytes(), BUT_PATHS)?;
        let tls = self.tls.as_ref().map(TlsParameters::of);
        uri::write_query(f, UriText { uri: self.clone(), tls })
    }
}

/// The error of what only a URI with TLS may have.
fn not_by_tls(part: &str) -> UriError {
    let schemes = "write nbds:// or nbds+unix:// instead of nbd:// or nbd+unix://";
    UriError::new(format!("{part:?} is for TLS; {schemes}"))
}

/// Splits `[user@]host`.
fn user_and_host(authority: &str) -> Result<(Option<String>, &str), UriError> {
    let Some((user, host)) = authority.rsplit_once('@') else { return Ok((None, authority)) };
    match decode_text(user) {
        Ok(user) if !user.is_empty() => Ok((Some(user), host)),
        Ok(_) => Err(UriError::host(authority, "no user stands before the @; remove it")),
        Err(problem) => Err(UriError::host(authority, problem)),
    }
}

/// Checks the path of a socket, which may be in the abstract namespace.
fn socket_path(parameter: &Parameter<'_>) -> Result<PathBuf, UriError> {
    let is_abstract = parameter.value.first() == Some(&0);
    if !is_abstract && parameter.value.contains(&0) {
        return Err(parameter.wrong("a path has no NUL byte, except as the first of an abstract socket's"));
    }
    Ok(OsString::from_vec(parameter.value.clone()).into())
}

fn unix_server(authority: &str, socket: Option<PathBuf>) -> Result<NbdServer, UriError> {
    if !authority.is_empty() {
        let problem = "nbd+unix has none; write three slashes and the socket as ?socket=PATH";
        return Err(UriError::host(authority, problem));
    }
    let path = socket.filter(|path| !path.as_os_str().is_empty());
    let missing = || UriError::parameter("socket", "missing; nbd+unix needs ?socket=PATH");
    Ok(NbdServer::Unix(path.ok_or_else(missing)?))
}

fn tcp_server(authority: &str, socket: Option<PathBuf>) -> Result<NbdServer, UriError> {
    if socket.is_some() {
        let problem = "belongs to nbd+unix; write nbd+unix:///export?socket=PATH";
        return Err(UriError::parameter("socket", problem));
    }
    uri::portal(authority, NBD_DEFAULT_PORT).map(NbdServer::Tcp)
}

fn export_name(path: &str) -> Result<String, UriError> {
    let wrong = |problem: &str| UriError::part(EXPORT, path, problem);
    let name = decode_text(path).map_err(wrong)?;
    if name.contains('\0') {
        return Err(wrong("a name has no NUL; remove %00"));
    }
    if name.len() > NBD_MAX_STRING {
        let part: String = path.chars().take(40).collect();
        return Err(UriError::part(EXPORT, &part, "a name has at most 4096 bytes; shorten it"));
    }
    Ok(name)
}

const FORMS: &str = "write nbd://host[:port]/export or nbd+unix:///export?socket=PATH, or nbds for TLS";
/// What the path is in messages.
const EXPORT: &str = "export name";
const NO_PASSWORDS: &str =
    "NBD has no passwords; write nbds://user@host/export?tls-psk-file=FILE, and the user's key into the file";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tcp(host: &str, port: u16, export: &str) -> NbdUri {
        NbdUri {
            server: NbdServer::Tcp((host.into(), port)),
            export: export.into(),
            tls: None,
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
            ("nbd://[fe80::1%25a%2Fb]:7", tcp("fe80::1%a/b", 7, "")),
            ("nbd://[fe80::1%eth0]:7", tcp("fe80::1%eth0", 7, "")),
            ("nbd://[fe80::1%2]", tcp("fe80::1%2", 10809, "")),
            ("nbd://[fe80::1%25]", tcp("fe80::1%25", 10809, "")),
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

    fn tls(uri: NbdUri, credentials: TlsFiles) -> NbdUri {
        NbdUri { tls: Some(UriTls { credentials, hostname: None, verify_peer: true, ktls: true }), ..uri }
    }

    fn key(file: &str, username: Option<&str>) -> TlsFiles {
        TlsFiles::Psk { file: file.into(), username: username.map(str::to_owned) }
    }

    #[test]
    fn tls_is_written_as_the_document_and_libnbd_write_it() {
        let host = || tcp("h", 10809, "x");
        let other = |change: fn(&mut UriTls)| {
            let mut uri = tls(host(), TlsFiles::Certificates(Some("/pki".into())));
            uri.tls.iter_mut().for_each(change);
            uri
        };
        for (text, uri, canonical) in [
            ("nbds://h/x", tls(host(), TlsFiles::Certificates(None)), None),
            (
                "nbds://h/x?tls-certificates=/pki",
                tls(host(), TlsFiles::Certificates(Some("/pki".into()))),
                None,
            ),
            (
                "nbds+unix:///x?socket=/s&tls-certificates=/pki&tls-type=x509",
                tls(unix(b"/s", "x"), TlsFiles::Certificates(Some("/pki".into()))),
                Some("nbds+unix:///x?socket=/s&tls-certificates=/pki"),
            ),
            (
                "nbds://h/x?tls-certificates=/pki&tls-verify-peer=false&tls-hostname=storage&ktls=off",
                other(|tls| {
                    (tls.hostname, tls.verify_peer, tls.ktls) = (Some("storage".into()), false, false);
                }),
                Some("nbds://h/x?tls-certificates=/pki&tls-hostname=storage&tls-verify-peer=0&ktls=off"),
            ),
            ("nbds://h/x?tls-psk-file=/k", tls(host(), key("/k", None)), None),
            ("nbds://al%40ice@h/x?tls-psk-file=/k", tls(host(), key("/k", Some("al@ice"))), None),
            (
                "nbds+unix://alice@/x?socket=/s&tls-psk-file=/k",
                tls(unix(b"/s", "x"), key("/k", Some("alice"))),
                None,
            ),
            (
                "nbds://h/x?tls-type=psk&tls-username=alice&tls-psk-file=/k",
                tls(host(), key("/k", Some("alice"))),
                Some("nbds://alice@h/x?tls-psk-file=/k"),
            ),
        ] {
            assert_eq!(text.parse(), Ok(uri.clone()), "{text}");
            assert_eq!(uri.to_string(), canonical.unwrap_or(text));
        }
    }

    #[test]
    fn an_error_names_the_part_and_says_what_to_do() {
        for (text, expected) in [
            ("disk.img", "\"disk.img\" is no NBD URI; write nbd://host"),
            ("http://h/x", "\"http://h/x\" is no NBD URI"),
            ("nbd://h/x?tls-type=psk", "\"tls-type\" is for TLS; write nbds:// or"),
            ("nbd://h/x?ktls=off", "\"ktls\" is for TLS"),
            ("nbd://user@h/x", "\"user@\" is for TLS"),
            ("nbd://u:p@ss@h/x", "host \"u:p@ss@\": NBD has no passwords; write nbds://user@host/export?"),
            ("nbds://@h/x", "host \"@h\": no user stands before the @"),
            ("nbds://u@h/x", "parameter \"tls-psk-file\": missing; a user name needs"),
            ("nbds://h/x?tls-type=psk", "parameter \"tls-psk-file\": missing"),
            ("nbds://h/x?tls-type=anon", "parameter \"tls-type=anon\": TLS without authentication"),
            ("nbds://h/x?tls-type=x", "parameter \"tls-type=x\": write x509 or psk"),
            (
                "nbds://h/x?tls-type=x509&tls-psk-file=k",
                "parameter \"tls-psk-file\": belongs to tls-type=psk",
            ),
            ("nbds://h/x?tls-psk-file=k&tls-certificates=d", "parameter \"tls-psk-file\": excludes"),
            ("nbds://u@h/x?tls-psk-file=k&tls-username=v", "parameter \"tls-username\": a user stands"),
            ("nbds://h/x?tls-psk-file=", "parameter \"tls-psk-file=\": name a file"),
            ("nbds://h/x?tls-verify-peer=maybe", "parameter \"tls-verify-peer=maybe\": write 0 or 1"),
            ("nbd:///x", "host \"\": missing; write localhost"),
            ("nbd://:10809/x", "host \":10809\": missing"),
            ("nbd://h:0/x", "host \"h:0\": give a port"),
            ("nbd://h:65536/x", "host \"h:65536\": give a port"),
            ("nbd://h:+1/x", "host \"h:+1\": give a port"),
            ("nbd://::1/x", "host \"::1\": write an IPv6 address in brackets"),
            ("nbd://[::1/x", "host \"[::1\": close the IPv6 address"),
            ("nbd://[::1]1/x", "host \"[::1]1\": give a port"),
            ("nbd://[h]/x", "host \"[h]\": brackets are for an IPv6"),
            ("nbd://[::(1]/x", "host \"[::(1]\": brackets are for an IPv6"),
            ("nbd://a%3A1/x", "host \"a%3A1\": write an IPv6 address in brackets"),
            ("nbd://[fe80::1%]/x", "host \"[fe80::1%]\": name the interface"),
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
                "parameter \"speed\": unknown; known are socket, tls-certificates, tls-psk-file, tls-username, ",
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
        let credentials = prop_oneof![
            prop::option::of("[^\0]{1,20}")
                .prop_map(|directory| TlsFiles::Certificates(directory.map(PathBuf::from))),
            ("[^\0]{1,20}", prop::option::of("[^\0]{1,20}"))
                .prop_map(|(file, username)| TlsFiles::Psk { file: file.into(), username }),
        ];
        let tls = (credentials, prop::option::of(".{1,20}"), any::<bool>(), any::<bool>()).prop_map(
            |(credentials, hostname, verify_peer, ktls)| UriTls { credentials, hostname, verify_peer, ktls },
        );
        (server, "[^\0]{0,30}", prop::option::of(tls), connections, time(), time()).prop_map(
            |(server, export, tls, connections, reconnect, timeout)| NbdUri {
                server,
                export,
                tls,
                connections,
                reconnect,
                timeout,
            },
        )
    }

    proptest! {
        #[test]
        fn a_formatted_uri_is_parsed_back(uri in any_uri()) {
            prop_assert_eq!(uri.to_string().parse(), Ok(uri));
        }

        #[test]
        fn any_text_is_read_or_refused_in_one_line(text in "(nbds?(\\+unix)?://)?.{0,60}") {
            match text.parse::<NbdUri>() {
                Ok(uri) => prop_assert_eq!(uri.to_string().parse(), Ok(uri)),
                Err(error) => prop_assert!(!error.to_string().contains('\n')),
            }
        }
    }
}
