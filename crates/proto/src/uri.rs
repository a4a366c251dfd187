//! What URIs of all protocols are made of (RFC 3986): hosts and ports, percent-encoding, and parameters.

pub use crate::session::DEFAULT_TIMEOUT;
use blockmux_volume::units::{format_duration, parse_duration};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};
use std::ffi::OsString;
use std::fmt;
use std::ops::RangeInclusive;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The most connections of one channel to one volume.
pub const MAX_CONNECTIONS: u32 = 16;
/// How long to try to reconnect when the URI says nothing.
pub const DEFAULT_RECONNECT: Duration = Duration::from_secs(60);
/// The longest time to try to reconnect.
pub const MAX_RECONNECT: Duration = Duration::from_secs(24 * 3600);
/// The most places that a URL names, each a path of its own.
pub const MAX_PORTALS: usize = 8;

/// What is wrong with a parameter of a URI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("parameter {part:?}: {problem}")]
pub struct ParameterError {
    /// As it was written.
    pub part: String,
    /// What to do.
    pub problem: String,
}

impl ParameterError {
    pub(crate) fn new(part: &str, problem: impl Into<String>) -> ParameterError {
        ParameterError { part: shown(part), problem: problem.into() }
    }
}

/// Reads `host`, `host:port` or `[IPv6]:port`; the port is `None` if there is none.
pub(crate) fn host_and_port(authority: &str) -> Result<(String, Option<u16>), &'static str> {
    let (host, port) = if let Some(rest) = authority.strip_prefix('[') {
        let (host, port) = rest.split_once(']').ok_or("close the IPv6 address with ]")?;
        if !host.contains(':') {
            return Err("brackets are for IPv6 addresses only; remove them");
        }
        (host, if port.is_empty() { None } else { Some(port.strip_prefix(':').unwrap_or("?")) })
    } else {
        match authority.split_once(':') {
            Some((_, port)) if port.contains(':') => {
                return Err("write an IPv6 address in brackets, as [::1]");
            }
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        }
    };
    if host.is_empty() {
        return Err("missing; write localhost for this machine");
    }
    let host = String::from_utf8(decode(host)?).map_err(|_| "is not UTF-8")?;
    if host.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err("contains blanks or control characters; remove them");
    }
    let port = match port {
        // RFC 3986 allows a colon with nothing behind it.
        None | Some("") => None,
        Some(port) if port.bytes().all(|digit| digit.is_ascii_digit()) => {
            let port = port.parse().ok().filter(|&port| port > 0);
            Some(port.ok_or("give a port from 1 to 65535")?)
        }
        Some(_) => return Err("give a port from 1 to 65535 behind the colon"),
    };
    Ok((host, port))
}

/// Writes a host as [`host_and_port`] reads it.
pub(crate) fn encode_host(f: &mut fmt::Formatter<'_>, host: &str) -> fmt::Result {
    if host.contains(':') {
        f.write_str("[")?;
        encode(f, host.as_bytes(), BUT_COLONS)?;
        f.write_str("]")
    } else {
        encode(f, host.as_bytes(), RESERVED)
    }
}

/// Reads `host[:port][,host[:port]]...`: at least one place, at most [`MAX_PORTALS`].
///
/// # Errors
/// What is wrong, and with which part.
pub(crate) fn portals(
    authority: &str,
    default_port: u16,
) -> Result<Vec<(String, u16)>, (&str, &'static str)> {
    let mut portals = Vec::new();
    for part in authority.split(',') {
        let (host, port) = host_and_port(part).map_err(|problem| (part, problem))?;
        let portal = (host, port.unwrap_or(default_port));
        if portals.contains(&portal) {
            return Err((part, "is a path that was named before; remove one"));
        }
        if portals.len() >= MAX_PORTALS {
            return Err((part, "is one portal too many; name at most 8"));
        }
        portals.push(portal);
    }
    Ok(portals)
}

/// Writes places as [`portals`] reads them.
pub(crate) fn encode_portals<'a>(
    f: &mut fmt::Formatter<'_>,
    portals: impl Iterator<Item = (&'a str, u16)>,
    default_port: u16,
) -> fmt::Result {
    for (place, (host, port)) in portals.enumerate() {
        f.write_str(if place == 0 { "" } else { "," })?;
        encode_host(f, host)?;
        if port != default_port {
            write!(f, ":{port}")?;
        }
    }
    Ok(())
}

/// Undoes percent-encoding. The library passes a `%` without digits behind it through; here it is an error.
pub(crate) fn decode(text: &str) -> Result<Vec<u8>, &'static str> {
    let is_encoded = |rest: &str| {
        rest.as_bytes().first_chunk::<2>().is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    if !text.split('%').skip(1).all(is_encoded) {
        return Err("% needs two hexadecimal digits behind it; write %25 for a %");
    }
    Ok(percent_decode_str(text).collect())
}

/// Percent-encodes what is in `set`.
pub(crate) fn encode(f: &mut fmt::Formatter<'_>, bytes: &[u8], set: &'static AsciiSet) -> fmt::Result {
    write!(f, "{}", percent_encode(bytes, set))
}

/// Everything but the unreserved characters (RFC 3986 §2.3).
pub(crate) const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// Of an IPv6 address or an NVMe qualified name.
pub(crate) const BUT_COLONS: &AsciiSet = &RESERVED.remove(b':');
/// Of a path, or of a query's value.
pub(crate) const BUT_PATHS: &AsciiSet = &BUT_COLONS.remove(b'/').remove(b'@').remove(b',');

/// A parameter of a query.
pub(crate) struct Parameter<'a> {
    pub(crate) key: &'a str,
    /// Percent-encoding undone.
    pub(crate) value: Vec<u8>,
    /// As it was written, if that may be shown.
    shown: &'a str,
}

/// Reads a query: parameters joined by `&`, none of them twice. Of one that is not among those `known` no value is shown:
/// it may be somebody's way to write a secret.
pub(crate) fn parameters<'a>(query: &'a str, known: &[&str]) -> Result<Vec<Parameter<'a>>, ParameterError> {
    let mut parameters: Vec<Parameter<'_>> = Vec::new();
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (key, raw) = part.split_once('=').unwrap_or((part, ""));
        let shown = if known.contains(&key) { part } else { key };
        if parameters.iter().any(|other| other.key == key) {
            return Err(ParameterError::new(shown, "given twice; remove one"));
        }
        let value = decode(raw).map_err(|problem| ParameterError::new(shown, problem))?;
        parameters.push(Parameter { key, value, shown });
    }
    Ok(parameters)
}

impl Parameter<'_> {
    pub(crate) fn wrong(&self, problem: impl Into<String>) -> ParameterError {
        ParameterError::new(self.shown, problem)
    }

    /// It is none of those that there are.
    pub(crate) fn unknown(&self, known: &[&str]) -> ParameterError {
        let problem = match known {
            [most @ .., last] if !most.is_empty() => {
                format!("unknown; known are {} and {last}", most.join(", "))
            }
            _ => format!("unknown; known is {}", known.concat()),
        };
        self.wrong(problem)
    }

    pub(crate) fn text(&self) -> Result<&str, ParameterError> {
        std::str::from_utf8(&self.value).map_err(|_| self.wrong("is not UTF-8"))
    }

    pub(crate) fn is_on(&self) -> Result<bool, ParameterError> {
        match self.value.as_slice() {
            b"on" => Ok(true),
            b"off" => Ok(false),
            _ => Err(self.wrong("write on or off")),
        }
    }

    /// A whole number, written in digits alone.
    pub(crate) fn number(&self, range: RangeInclusive<u32>) -> Result<u32, ParameterError> {
        let number = self.text().ok().filter(|text| text.bytes().all(|digit| digit.is_ascii_digit()));
        let number = number.and_then(|text| text.parse().ok()).filter(|number| range.contains(number));
        number.ok_or_else(|| self.wrong(format!("give a number from {} to {}", range.start(), range.end())))
    }

    /// The name of a file, in any bytes.
    pub(crate) fn path(&self) -> Result<PathBuf, ParameterError> {
        if self.value.is_empty() || self.value.contains(&0) {
            return Err(self.wrong("name a file"));
        }
        Ok(OsString::from_vec(self.value.clone()).into())
    }

    /// A time of whole milliseconds, at most [`MAX_RECONNECT`].
    pub(crate) fn time(&self) -> Result<Duration, ParameterError> {
        let is_whole = |time: &Duration| time.subsec_nanos().is_multiple_of(1_000_000);
        let time = self.text().ok().and_then(|text| parse_duration(text).ok());
        time.filter(|time| is_whole(time) && *time <= MAX_RECONNECT)
            .ok_or_else(|| self.wrong("give a time such as 500ms, 30s, 5m or 2h, at most 24h"))
    }
}

/// Writes a query as [`parameters`] reads it.
pub(crate) struct Query<'a, 'b> {
    f: &'a mut fmt::Formatter<'b>,
    separator: char,
}

impl<'a, 'b> Query<'a, 'b> {
    pub(crate) fn new(f: &'a mut fmt::Formatter<'b>) -> Query<'a, 'b> {
        Query { f, separator: '?' }
    }

    /// A parameter, if it has a value.
    pub(crate) fn put(&mut self, key: &str, value: Option<impl fmt::Display>) -> fmt::Result {
        value.map_or(Ok(()), |value| self.bytes(key, value.to_string().as_bytes()))
    }

    pub(crate) fn put_path(&mut self, key: &str, path: Option<&Path>) -> fmt::Result {
        path.map_or(Ok(()), |path| self.bytes(key, path.as_os_str().as_bytes()))
    }

    /// A time, unless it is what is meant without a word.
    pub(crate) fn put_time(&mut self, key: &str, time: Duration, default: Duration) -> fmt::Result {
        self.put(key, (time != default).then(|| format_duration(time)))
    }

    fn bytes(&mut self, key: &str, value: &[u8]) -> fmt::Result {
        write!(self.f, "{}{key}=", std::mem::replace(&mut self.separator, '&'))?;
        encode(self.f, value, BUT_PATHS)
    }
}

/// A part that an error repeats.
pub(crate) fn shown(part: &str) -> String {
    part.chars().take(MAX_SHOWN).collect()
}

/// In characters.
const MAX_SHOWN: usize = 256;
