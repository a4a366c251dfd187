//! A blocking client of the API: one connection for each request.

use super::fragment::{JSON, TOML};
use super::tls::TlsConnection;
use super::{ApiAddress, ApiError, ControlPath, ErrorBody, MAX_ANSWER, tls_error};
use crate::failure::Failure;
use blockmux_engine::carrier::tls::{ClientCertificates, TlsError};
use blockmux_engine::sys::safe_path;
use serde_json::Value;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use zeroize::Zeroizing;

/// A client of one daemon.
#[derive(Clone)]
pub(crate) struct Client {
    address: ApiAddress,
    credentials: ApiCredentials,
}

/// Credentials of an API client over TCP, and the CA that verifies the daemon.
#[derive(Clone, Default)]
pub(crate) struct ApiCredentials {
    pub(crate) token: Option<Zeroizing<String>>,
    /// For an https address.
    pub(crate) certificates: Option<ClientCertificates>,
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) method: &'static str,
    /// Percent-encoded.
    pub(crate) path: String,
    /// Further headers.
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Option<CallBody>,
    /// Media type of the response.
    pub(crate) accept: &'static str,
}

/// The body of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallBody {
    Json(Value),
    Toml(String),
}

/// A response that reports success.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    /// Path of the action that continues after the response.
    pub(crate) location: Option<String>,
    /// The body; a string if it is TOML.
    pub(crate) body: Value,
}

/// Reason why there is no [`Reply`].
#[derive(Debug)]
pub(crate) enum CallError {
    /// The daemon refused the request.
    Refused(ApiError),
    /// There was no response, or it cannot be parsed.
    NoAnswer(Failure),
}

impl Call {
    /// A request without a body.
    pub(crate) fn new(method: &'static str, path: impl Into<String>) -> Call {
        Call { method, path: path.into(), headers: Vec::new(), body: None, accept: JSON }
    }
}

impl Client {
    /// A client of the daemon at this address.
    pub(crate) fn new(address: ApiAddress, credentials: ApiCredentials) -> Client {
        Client { address, credentials }
    }

    /// Sends a request and reads its response. The daemon responds within a second, with the URL of
    /// an action if the request takes longer.
    ///
    /// # Errors
    /// If the daemon cannot be reached or refuses.
    pub(crate) fn call(&self, call: &Call) -> Result<Reply, CallError> {
        let (status, location, body) = self.exchange(call).map_err(|error| self.no_answer(&error))?;
        let unreadable = |error: serde_json::Error| {
            let address = &self.address;
            CallError::NoAnswer(Failure::run(format!(
                "{address}: the answer is invalid ({error}); check that a blockmux daemon of this version listens there"
            )))
        };
        if !(200..300).contains(&status) {
            let body: ErrorBody = serde_json::from_slice(&body).map_err(unreadable)?;
            return Err(CallError::Refused(body.error));
        }
        let body = match call.accept {
            _ if body.is_empty() => Value::Null,
            TOML => Value::from(String::from_utf8_lossy(&body)),
            _ => serde_json::from_slice(&body).map_err(unreadable)?,
        };
        Ok(Reply { status, location, body })
    }

    /// Connects to a control socket and upgrades the connection to `protocol` (RFC 9110 §7.8);
    /// `None` if no daemon listens there.
    ///
    /// # Errors
    /// If the daemon does not answer or refuses.
    pub(crate) fn upgrade(&self, path: &str, protocol: &str) -> Result<Option<UnixStream>, CallError> {
        let ApiAddress::Unix(ControlPath(socket)) = &self.address else {
            return Err(self.no_answer(&io::ErrorKind::Unsupported.into()));
        };
        let ask = |mut stream: UnixStream| {
            stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
            stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
            let head = format!(
                "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: {protocol}\r\n\
                 Content-Length: 0\r\n\r\n"
            );
            stream.write_all(head.as_bytes())?;
            // Byte by byte, because the bytes after the head are not HTTP.
            let head = read_head(&mut BufReader::with_capacity(1, &stream))?;
            if head.starts_with(b"HTTP/1.1 101 ") {
                return Ok(Ok(stream));
            }
            read_answer(BufReader::new((&head[..]).chain(&stream))).map(Err)
        };
        let stream = match safe_path::anchor(socket).and_then(|at| UnixStream::connect(at.as_path())) {
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
            {
                return Ok(None);
            }
            connected => connected,
        };
        match stream.and_then(ask).map_err(|error| self.no_answer(&error))? {
            Ok(stream) => Ok(Some(stream)),
            Err((_, _, body)) => match serde_json::from_slice::<ErrorBody>(&body) {
                Ok(body) => Err(CallError::Refused(body.error)),
                Err(error) => Err(self.no_answer(&invalid(error))),
            },
        }
    }

    fn no_answer(&self, error: &io::Error) -> CallError {
        use io::ErrorKind::{ConnectionReset, UnexpectedEof};
        const CLOSED: &str = "the daemon closed the connection without an answer";
        let address = &self.address;
        let problem = match (address, tls_error(error), error.kind()) {
            (ApiAddress::Https(authority), Some(TlsError::NotTls), _) => format!(
                "the daemon answers without TLS; use http://{authority}, or add --api-tls-certs to it"
            ),
            (_, Some(why), _) => format!("the daemon {why}; check --tls-certs"),
            (ApiAddress::Http(authority), None, UnexpectedEof | ConnectionReset) => {
                format!(
                    "{CLOSED}; if it serves the API with TLS, use https://{authority}; if its `api` has ?allow=, add \
                     this machine"
                )
            }
            (ApiAddress::Https(_), None, UnexpectedEof) => {
                format!("{CLOSED}; check that --tls-certs has a client certificate that it accepts")
            }
            _ => {
                let option = match address {
                    ApiAddress::Unix(_) => "--control",
                    ApiAddress::Http(_) => "--api",
                    ApiAddress::Https(_) => "--api and --api-tls-certs",
                };
                format!(
                    "cannot reach the daemon: {error}; check that it runs with `serve {option}` at this address"
                )
            }
        };
        CallError::NoAnswer(Failure::request(format!("{address}: {problem}")))
    }

    fn exchange(&self, call: &Call) -> io::Result<(u16, Option<String>, Vec<u8>)> {
        let (host, mut stream) = self.connect()?;
        let (kind, body) = match &call.body {
            None => (None, String::new()),
            Some(CallBody::Json(body)) => (Some(JSON), body.to_string()),
            Some(CallBody::Toml(text)) => (Some(TOML), text.clone()),
        };
        let mut head = Zeroizing::new(String::with_capacity(512 + call.path.len()));
        head.push_str(&format!(
            "{} {} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n",
            call.method, call.path
        ));
        head.push_str(&format!("Accept: {}\r\nPrefer: respond-async, wait=1\r\n", call.accept));
        for (name, value) in &call.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if let Some(token) = &self.credentials.token {
            head.push_str("Authorization: Bearer ");
            head.push_str(token);
            head.push_str("\r\n");
        }
        if let Some(kind) = kind {
            head.push_str(&format!("Content-Type: {kind}\r\nContent-Length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        // A daemon may refuse a request before it has read the body.
        let sent = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
        let answer = read_answer(BufReader::new(&mut *stream));
        match (sent, answer) {
            // An alert says why the daemon has closed the connection.
            (Err(sent), Err(answer)) if tls_error(&answer).is_none() => Err(sent),
            (_, answer) => answer,
        }
    }

    fn connect(&self) -> io::Result<(String, Box<dyn ReadWrite>)> {
        match &self.address {
            ApiAddress::Unix(ControlPath(path)) => {
                let stream = UnixStream::connect(safe_path::anchor(path)?.as_path())?;
                stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
                stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
                Ok(("localhost".to_owned(), Box::new(stream)))
            }
            ApiAddress::Http(authority) | ApiAddress::Https(authority) => {
                let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
                for address in addresses(authority)? {
                    match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
                        Ok(stream) => {
                            stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
                            stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
                            let stream: Box<dyn ReadWrite> = match &self.credentials.certificates {
                                Some(certificates) => Box::new(TlsConnection::open(stream, certificates)?),
                                None => Box::new(stream),
                            };
                            return Ok((authority.clone(), stream));
                        }
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }
}

/// Resolves `host:port`; the zone of an IPv6 address may be percent-encoded.
fn addresses(authority: &str) -> io::Result<std::vec::IntoIter<SocketAddr>> {
    let bracketed = authority.strip_prefix('[').and_then(|rest| rest.split_once("]:"));
    match bracketed.and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?))) {
        Some((host, port)) => (host.replacen("%25", "%", 1).as_str(), port).to_socket_addrs(),
        None => authority.to_socket_addrs(),
    }
}

trait ReadWrite: Read + Write {}

impl<T: Read + Write> ReadWrite for T {}

/// A name as a percent-encoded path segment.
pub(crate) fn segment(name: &str) -> impl std::fmt::Display {
    percent_encoding::utf8_percent_encode(name, percent_encoding::NON_ALPHANUMERIC)
}

/// Reads status, `Location` and body.
fn read_answer(mut stream: impl BufRead) -> io::Result<(u16, Option<String>, Vec<u8>)> {
    let head = read_head(&mut stream)?;
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut answer = httparse::Response::new(&mut headers);
    answer.parse(&head).map_err(invalid)?;
    let header = |name: &str| {
        let found = answer.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
        std::str::from_utf8(found.value).ok()
    };
    let body = match header("transfer-encoding") {
        Some(_) => read_chunks(&mut stream)?,
        None => match header("content-length").map(str::parse::<u64>) {
            Some(Ok(len)) => read_exactly(&mut stream, len)?,
            Some(Err(error)) => return Err(invalid(error)),
            None => Vec::new(),
        },
    };
    Ok((answer.code.unwrap_or_default(), header("location").map(str::to_owned), body))
}

/// Reads up to and including the empty line.
fn read_head(stream: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    loop {
        let before = head.len();
        stream.by_ref().take(MAX_HEAD - before as u64).read_until(b'\n', &mut head)?;
        match &head[before..] {
            b"\r\n" | b"\n" => return Ok(head),
            line if line.ends_with(b"\n") => {}
            _ => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

fn read_exactly(stream: &mut impl BufRead, len: u64) -> io::Result<Vec<u8>> {
    if len > MAX_ANSWER {
        return Err(invalid("the answer is too long"));
    }
    let mut body = vec![0; len as usize];
    stream.read_exact(&mut body)?;
    Ok(body)
}

/// Reads a body in chunks (RFC 9112 §7.1).
fn read_chunks(stream: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let mut line = Vec::new();
        stream.by_ref().take(MAX_CHUNK_LINE).read_until(b'\n', &mut line)?;
        let Ok(httparse::Status::Complete((_, len))) = httparse::parse_chunk_size(&line) else {
            return Err(invalid("a chunk has no length"));
        };
        if len == 0 {
            return Ok(body);
        }
        let room = MAX_ANSWER.saturating_sub(body.len() as u64);
        let mut chunk = read_exactly(stream, len.min(room + 1))?;
        if len > room {
            return Err(invalid("the answer is too long"));
        }
        body.append(&mut chunk);
        stream.read_exact(&mut [0; 2])?;
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Timeout of reads from the daemon.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of a response's head, in bytes.
const MAX_HEAD: u64 = 16 << 10;
const MAX_HEADERS: usize = 32;
/// Maximum length of the line before a chunk, in bytes.
const MAX_CHUNK_LINE: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_has_a_length_or_chunks_and_anything_else_is_refused() {
        let long = b"HTTP/1.1 202 Accepted\r\nlocation: /v1/actions/7\r\nContent-Length: 2\r\n\r\n{}tail";
        let (status, location, body) = read_answer(&long[..]).unwrap();
        assert_eq!((status, location.as_deref(), &*body), (202, Some("/v1/actions/7"), &b"{}"[..]));
        let chunked =
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n3;x=y\r\n,2]\r\n0\r\n\r\n";
        assert_eq!(read_answer(&chunked[..]).unwrap().2, b"[1,2]");
        for bytes in [
            &b""[..],
            b"HTTP/1.1 200 OK\r\n",
            b"SSH-2.0-x\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{}",
            b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{}",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffff\r\n{}",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        ] {
            assert!(read_answer(bytes).is_err(), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn a_name_is_one_segment_of_the_path() {
        assert_eq!(segment("nqn.x:a/b").to_string(), "nqn%2Ex%3Aa%2Fb");
    }
}
