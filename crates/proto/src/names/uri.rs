//! Common parts of all protocols' URIs (RFC 3986): hosts and ports, percent-encoding, and query
//! parameters.

use blockmux_volume::text::is_unprintable;
use blockmux_volume::units::{format_duration, parse_duration};
use core::net::Ipv6Addr;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};
use std::ffi::OsString;
use std::fmt;
use std::ops::RangeInclusive;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// The maximum number of connections of one channel.
pub const MAX_CONNECTIONS: u32 = 16;
/// Default of the `timeout` parameter, the limit of an initiator's oldest request; the value of
/// Linux's initiators.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// Default of the `reconnect` parameter.
pub const DEFAULT_RECONNECT: Duration = Duration::from_secs(60);
/// Maximum of the `reconnect` and `timeout` parameters.
pub const MAX_RECONNECT: Duration = Duration::from_secs(24 * 3600);
/// The maximum number of portals in a URL, each of which is a path.
pub const MAX_PORTALS: usize = 8;

/// A syntax error in a URI: the part, and how to correct it. Never contains a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UriError(String);

impl UriError {
    /// An error of the URI as a whole.
    pub(crate) fn new(problem: impl Into<String>) -> UriError {
        UriError(problem.into())
    }

    /// An error of a part, as written; `kind` says which.
    pub(crate) fn part(kind: &str, part: &str, problem: impl fmt::Display) -> UriError {
        UriError(format!("{kind} {:?}: {problem}", shown(part)))
    }

    /// An invalid query parameter, as written.
    pub(crate) fn parameter(part: &str, problem: impl fmt::Display) -> UriError {
        UriError::part("parameter", part, problem)
    }

    /// An invalid host and port, as written.
    pub(crate) fn host(part: &str, problem: &str) -> UriError {
        UriError::part("host", part, problem)
    }
}

/// A host (a name or an address, IPv6 without brackets) and a port.
pub type HostPort = (String, u16);

/// The portals of a volume, each of which is a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Portals {
    /// The portal that is used for discovery.
    pub first: HostPort,
    /// Further portals, at most 7.
    pub further: Vec<HostPort>,
}

impl Portals {
    /// A single portal.
    #[must_use]
    pub fn one(first: HostPort) -> Portals {
        Portals { first, further: Vec::new() }
    }

    /// Parses `host[:port][,host[:port]]...`, 1 to [`MAX_PORTALS`] portals, without a user.
    pub(crate) fn read(authority: &str, default_port: u16) -> Result<Portals, UriError> {
        if authority.contains('@') {
            let problem =
                "the protocol has no users; remove all up to the @, or write %40 for an @ of the name";
            return Err(UriError::host(authority, problem));
        }
        let mut portals = Vec::new();
        for part in authority.split(',') {
            let portal = portal(part, default_port)?;
            if portals.contains(&portal) {
                return Err(UriError::host(part, "is a path that was named before; remove one"));
            }
            if portals.len() >= MAX_PORTALS {
                return Err(UriError::host(part, "is one portal too many; name at most 8"));
            }
            portals.push(portal);
        }
        Ok(Portals { first: portals.remove(0), further: portals })
    }

    /// Writes the portals in the form of [`Portals::read`].
    pub(crate) fn write(&self, f: &mut fmt::Formatter<'_>, default_port: u16) -> fmt::Result {
        encode_portal(f, &self.first, default_port)?;
        self.further.iter().try_for_each(|portal| {
            f.write_str(",")?;
            encode_portal(f, portal, default_port)
        })
    }
}

/// Parses `host[:port]`.
pub(crate) fn portal(authority: &str, default_port: u16) -> Result<HostPort, UriError> {
    let (host, port) = host_and_port(authority).map_err(|problem| UriError::host(authority, problem))?;
    Ok((host, port.unwrap_or(default_port)))
}

/// Parses `host`, `host:port`, `[IPv6]:port` or `[IPv6%zone]:port`; the port is `None` if it is
/// missing.
pub(crate) fn host_and_port(authority: &str) -> Result<(String, Option<u16>), &'static str> {
    let (host, port) = if let Some(rest) = authority.strip_prefix('[') {
        let (host, port) = rest.split_once(']').ok_or("close the IPv6 address with ]")?;
        (ipv6_host(host)?, if port.is_empty() { None } else { Some(port.strip_prefix(':').unwrap_or("?")) })
    } else {
        let (host, port) = match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        };
        let host = decode_text(host)?;
        if host.contains(':') || port.is_some_and(|port| port.contains(':')) {
            return Err("write an IPv6 address in brackets, as [::1]");
        }
        (host, port)
    };
    if host.is_empty() {
        return Err("missing; write localhost for this machine");
    }
    if host.chars().any(|c| is_unprintable(c) || c.is_whitespace()) {
        return Err("contains blanks or control characters; remove them");
    }
    let port = match port {
        // RFC 3986 allows an empty port after the colon.
        None | Some("") => None,
        Some(port) if port.bytes().all(|digit| digit.is_ascii_digit()) => {
            let port = port.parse().ok().filter(|&port| port > 0);
            Some(port.ok_or("give a port from 1 to 65535")?)
        }
        Some(_) => return Err("give a port from 1 to 65535 behind the colon"),
    };
    Ok((host, port))
}

/// Parses what is between brackets: an IPv6 address, and a zone behind a `%`.
fn ipv6_host(text: &str) -> Result<String, &'static str> {
    let (address, zone) = match text.split_once('%') {
        Some((address, zone)) => (address, Some(zone)),
        None => (text, None),
    };
    if address.parse::<Ipv6Addr>().is_err() {
        return Err("brackets are for an IPv6 address; correct it, or remove them");
    }
    match zone {
        None => Ok(address.to_owned()),
        Some("") => Err("name the interface behind the %, as in [fe80::1%25eth0]"),
        // RFC 6874 encodes the % before a zone; people and servers do not.
        Some(zone) => {
            let zone = zone.strip_prefix("25").filter(|zone| !zone.is_empty()).unwrap_or(zone);
            Ok(format!("{address}%{}", decode_text(zone)?))
        }
    }
}

/// Writes a portal in the form of [`portal`].
pub(crate) fn encode_portal(
    f: &mut fmt::Formatter<'_>,
    (host, port): &HostPort,
    default_port: u16,
) -> fmt::Result {
    if host.contains(':') {
        f.write_str("[")?;
        encode(f, host.as_bytes(), BUT_COLONS)?;
        f.write_str("]")?;
    } else {
        encode(f, host.as_bytes(), RESERVED)?;
    }
    if *port == default_port { Ok(()) } else { write!(f, ":{port}") }
}

/// Splits a path into a name and a number, by default `number`; `None` if the path is empty.
pub(crate) fn name_and_number<'a>(path: &'a str, number: &'a str) -> Option<(&'a str, &'a str)> {
    let path = path.strip_suffix('/').unwrap_or(path);
    (!path.is_empty()).then(|| path.split_once('/').unwrap_or((path, number)))
}

/// Parses a whole number of digits only.
pub(crate) fn number<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|digit| digit.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Decodes percent-encoding. A `%` without two digits is an error, unlike in the library.
fn decode(text: &str) -> Result<Vec<u8>, &'static str> {
    let is_encoded = |rest: &str| {
        rest.as_bytes().first_chunk::<2>().is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    if !text.split('%').skip(1).all(is_encoded) {
        return Err("% needs two hexadecimal digits behind it; write %25 for a %");
    }
    Ok(percent_decode_str(text).collect())
}

/// Decodes percent-encoded UTF-8 text.
pub(crate) fn decode_text(text: &str) -> Result<String, &'static str> {
    String::from_utf8(decode(text)?).map_err(|_| "is not UTF-8")
}

/// Percent-encodes the bytes in `set`.
pub(crate) fn encode(f: &mut fmt::Formatter<'_>, bytes: &[u8], set: &'static AsciiSet) -> fmt::Result {
    write!(f, "{}", percent_encode(bytes, set))
}

/// All but the unreserved characters (RFC 3986 §2.3).
pub(crate) const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// [`RESERVED`] without the colon, for IPv6 addresses and NVMe qualified names.
pub(crate) const BUT_COLONS: &AsciiSet = &RESERVED.remove(b':');
/// [`BUT_COLONS`] without `/`, `@` and `,`, for paths and query values.
pub(crate) const BUT_PATHS: &AsciiSet = &BUT_COLONS.remove(b'/').remove(b'@').remove(b',');

/// A URL of a protocol, with its query parameters.
pub(crate) trait UrlParameters: Clone {
    /// A URL without parameters: the default of each parameter. Other fields do not matter.
    fn plain() -> Self;

    /// Passes each parameter with its field to `table`, in the order of writing.
    fn parameters(&mut self, table: &mut ParameterTable<'_>);

    /// Refuses a parameter that is known but not supported, or that conflicts with another one.
    fn refuse(&self, _parameter: &Parameter<'_>) -> Result<(), UriError> {
        Ok(())
    }
}

/// The parameters of a URL, for reading one of them into its field and for writing all of them.
pub(crate) struct ParameterTable<'a> {
    parameter: Option<&'a Parameter<'a>>,
    /// Result of reading; `None`: the parameter is unknown.
    outcome: Option<Result<(), UriError>>,
    written: Vec<(&'static str, Option<Vec<u8>>)>,
}

impl ParameterTable<'_> {
    fn of(url: &mut impl UrlParameters, parameter: Option<&Parameter<'_>>) -> ParameterTable<'static> {
        let mut table = ParameterTable { parameter, outcome: None, written: Vec::new() };
        url.parameters(&mut table);
        ParameterTable { parameter: None, ..table }
    }

    /// A parameter of any type.
    pub(crate) fn field<T>(
        &mut self,
        key: &'static str,
        field: &mut T,
        read: impl FnOnce(&Parameter<'_>) -> Result<T, UriError>,
        write: impl FnOnce(&T) -> Option<Vec<u8>>,
    ) {
        if let Some(parameter) = self.parameter.filter(|parameter| parameter.key == key) {
            self.outcome = Some(read(parameter).map(|value| *field = value));
        }
        self.written.push((key, write(field)));
    }

    /// A parameter with a fixed set of words, or else `problem`. A value without a word is not
    /// written.
    pub(crate) fn word<T: Copy + PartialEq>(
        &mut self,
        key: &'static str,
        field: &mut T,
        words: &[(&str, T)],
        problem: &str,
    ) {
        let read = |parameter: &Parameter<'_>| {
            let known = words.iter().find(|(word, _)| word.as_bytes() == parameter.value);
            known.map(|(_, value)| *value).ok_or_else(|| parameter.wrong(problem))
        };
        let write =
            |value: &T| words.iter().find(|(_, known)| known == value).map(|(word, _)| word.to_string());
        self.field(key, field, read, |value| write(value).map(String::into_bytes));
    }

    /// A parameter of `on` or `off`.
    pub(crate) fn switch(&mut self, key: &'static str, field: &mut bool) {
        self.word(key, field, &[("on", true), ("off", false)], "write on or off");
    }

    /// A text parameter; a parsing error is the advice what to write instead.
    pub(crate) fn text<T>(
        &mut self,
        key: &'static str,
        field: &mut Option<T>,
        read: impl FnOnce(&str) -> Result<T, &'static str>,
        write: impl FnOnce(&T) -> String,
    ) {
        let read = |parameter: &Parameter<'_>| {
            read(parameter.text()?).map(Some).map_err(|problem| parameter.wrong(problem))
        };
        self.field(key, field, read, |value| value.as_ref().map(write).map(String::into_bytes));
    }

    /// An optional whole number in `range`, which fits the type.
    pub(crate) fn number<T: Copy + TryFrom<u32> + Into<u32>>(
        &mut self,
        key: &'static str,
        field: &mut Option<T>,
        range: RangeInclusive<u32>,
    ) {
        let read =
            |parameter: &Parameter<'_>| parameter.number(&range).map(|number| T::try_from(number).ok());
        self.field(key, field, read, |number| number.map(|number| number.into().to_string().into()));
    }

    /// A whole number with a default.
    pub(crate) fn count<T: Copy + TryFrom<u32> + Into<u32>>(
        &mut self,
        key: &'static str,
        field: &mut T,
        range: RangeInclusive<u32>,
    ) {
        let mut number = Some(*field);
        self.number(key, &mut number, range);
        *field = number.unwrap_or(*field);
    }

    /// A duration in whole milliseconds, at least `least`.
    pub(crate) fn time(&mut self, key: &'static str, field: &mut Duration, least: Duration) {
        let read = |parameter: &Parameter<'_>| {
            let time = parameter.time()?;
            let wrong = || parameter.wrong(format!("give a time of {} or more", format_duration(least)));
            if time < least { Err(wrong()) } else { Ok(time) }
        };
        self.field(key, field, read, |time| Some(format_duration(*time).into()));
    }

    /// A duration in whole seconds, at most `most`; `zero` explains the meaning of 0.
    pub(crate) fn seconds(&mut self, key: &'static str, field: &mut Duration, most: Duration, zero: &str) {
        let most = most.as_secs() as u32;
        let read = |parameter: &Parameter<'_>| {
            let wrong = |_| parameter.wrong(format!("give whole seconds, at most {most}{zero}"));
            parameter.number(&(0..=most)).map(|number| Duration::from_secs(number.into())).map_err(wrong)
        };
        self.field(key, field, read, |time| Some(time.as_secs().to_string().into()));
    }

    /// A file path, of any bytes.
    pub(crate) fn file(&mut self, key: &'static str, field: &mut Option<PathBuf>) {
        let read = |parameter: &Parameter<'_>| {
            let is_name = !parameter.value.is_empty() && !parameter.value.contains(&0);
            let path = || Some(OsString::from_vec(parameter.value.clone()).into());
            is_name.then(path).ok_or_else(|| parameter.wrong("name a file"))
        };
        self.field(key, field, read, |path| path.as_ref().map(|path| path.as_os_str().as_bytes().into()));
    }
}

/// Splits `scheme://place?query`; the query may be missing.
pub(crate) fn split(text: &str) -> Option<(&str, &str, &str)> {
    let (scheme, rest) = text.split_once("://")?;
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    Some((scheme, place, query))
}

/// Parses a query into `url`: parameters separated by `&`, each at most once. The error for an
/// unknown parameter omits its value, which may be a secret.
pub(crate) fn read_query<U: UrlParameters>(url: &mut U, query: &str) -> Result<(), UriError> {
    let table = ParameterTable::of(&mut U::plain(), None).written;
    let known: Vec<&str> = table.into_iter().map(|(key, _)| key).collect();
    let mut parameters: Vec<Parameter<'_>> = Vec::new();
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (key, raw) = part.split_once('=').unwrap_or((part, ""));
        let shown = if known.contains(&key) { part } else { key };
        if parameters.iter().any(|other| other.key == key) {
            return Err(UriError::parameter(shown, "given twice; remove one"));
        }
        let value = decode(raw).map_err(|problem| UriError::parameter(shown, problem))?;
        parameters.push(Parameter { key, value, shown });
    }
    for parameter in parameters {
        url.refuse(&parameter)?;
        ParameterTable::of(url, Some(&parameter))
            .outcome
            .unwrap_or_else(|| Err(parameter.unknown(&known)))?;
    }
    Ok(())
}

/// Writes the parameters that differ from their defaults, in the form of [`read_query`].
pub(crate) fn write_query<U: UrlParameters>(f: &mut fmt::Formatter<'_>, mut url: U) -> fmt::Result {
    let (url, plain) = (ParameterTable::of(&mut url, None), ParameterTable::of(&mut U::plain(), None));
    let mut separator = '?';
    for ((key, value), (_, plain)) in url.written.into_iter().zip(plain.written) {
        if let Some(value) = value.filter(|value| plain.as_ref() != Some(value)) {
            write!(f, "{}{key}=", std::mem::replace(&mut separator, '&'))?;
            encode(f, &value, BUT_PATHS)?;
        }
    }
    Ok(())
}

/// A parameter of a query.
pub(crate) struct Parameter<'a> {
    pub(crate) key: &'a str,
    /// The decoded value.
    pub(crate) value: Vec<u8>,
    /// The parameter as written, without a value that must not be shown.
    shown: &'a str,
}

impl Parameter<'_> {
    pub(crate) fn wrong(&self, problem: impl fmt::Display) -> UriError {
        UriError::parameter(self.shown, problem)
    }

    fn unknown(&self, known: &[&str]) -> UriError {
        let problem = match known {
            [most @ .., last] if !most.is_empty() => {
                format!("unknown; known are {} and {last}", most.join(", "))
            }
            _ => format!("unknown; known is {}", known.concat()),
        };
        self.wrong(problem)
    }

    pub(crate) fn text(&self) -> Result<&str, UriError> {
        std::str::from_utf8(&self.value).map_err(|_| self.wrong("is not UTF-8"))
    }

    /// Parses a whole number of digits only.
    fn number(&self, range: &RangeInclusive<u32>) -> Result<u32, UriError> {
        let number = self.text().ok().and_then(number).filter(|number| range.contains(number));
        number.ok_or_else(|| self.wrong(format!("give a number from {} to {}", range.start(), range.end())))
    }

    /// Parses a duration in whole milliseconds, at most [`MAX_RECONNECT`].
    fn time(&self) -> Result<Duration, UriError> {
        let is_whole = |time: &Duration| time.subsec_nanos().is_multiple_of(1_000_000);
        let time = self.text().ok().and_then(|text| parse_duration(text).ok());
        time.filter(|time| is_whole(time) && *time <= MAX_RECONNECT)
            .ok_or_else(|| self.wrong("give a time such as 500ms, 30s, 5m or 2h, at most 24h"))
    }
}

/// The part of a URI for an error message, truncated.
pub(crate) fn shown(part: &str) -> String {
    part.chars().take(MAX_SHOWN).collect()
}

/// The maximum length of a part in an error message, in characters.
const MAX_SHOWN: usize = 256;
