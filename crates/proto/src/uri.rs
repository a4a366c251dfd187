//! What URIs of all protocols are made of (RFC 3986): hosts and ports, percent-encoding, and our own durations.

pub use crate::session::DEFAULT_TIMEOUT;
use std::fmt;
use std::time::Duration;

/// The most connections of one channel to one volume.
pub const MAX_CONNECTIONS: u32 = 16;
/// How long to try to reconnect when the URI says nothing.
pub const DEFAULT_RECONNECT: Duration = Duration::from_secs(60);
/// The most places that a URL names, each a path of its own.
pub const MAX_PORTALS: usize = 8;
/// What is wrong with a parameter of a URI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("parameter {part:?}: {problem}")]
pub struct ParameterError {
    /// As it was written.
    pub part: String,
    /// What to do.
    pub problem: &'static str,
}

/// The longest time to try to reconnect.
pub const MAX_RECONNECT: Duration = Duration::from_secs(24 * 3600);

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
        encode(f, host.as_bytes(), b":")?;
        f.write_str("]")
    } else {
        encode(f, host.as_bytes(), b"")
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

/// Undoes percent-encoding.
pub(crate) fn decode(text: &str) -> Result<Vec<u8>, &'static str> {
    let (mut bytes, mut left) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((&first, rest)) = left.split_first() {
        left = rest;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let hex = |digit: u8| char::from(digit).to_digit(16);
        let (byte, rest) = rest
            .split_first_chunk()
            .and_then(|(&[high, low], rest)| Some((hex(high)? << 4 | hex(low)?, rest)))
            .ok_or("% needs two hexadecimal digits behind it; write %25 for a %")?;
        bytes.push(byte as u8);
        left = rest;
    }
    Ok(bytes)
}

/// Percent-encodes all but RFC 3986's unreserved characters and what is in `also`.
pub(crate) fn encode(f: &mut fmt::Formatter<'_>, bytes: &[u8], also: &[u8]) -> fmt::Result {
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || also.contains(&byte) {
            write!(f, "{}", char::from(byte))?;
        } else {
            write!(f, "%{byte:02X}")?;
        }
    }
    Ok(())
}

/// What to do where [`read_duration`] finds none.
pub(crate) const A_DURATION: &str = "give a time such as 500ms, 30s, 5m or 2h, at most 24h";

/// Reads a whole number with a unit, or 0.
pub(crate) fn read_duration(text: &str) -> Option<Duration> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at_checked(end)?;
    let number: u64 = number.parse().ok()?;
    let unit_ms = match unit {
        "" if number == 0 => 1,
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    let time = Duration::from_millis(number.checked_mul(unit_ms)?);
    (time <= MAX_RECONNECT).then_some(time)
}

/// A duration as [`read_duration`] reads it, in the largest unit that is exact.
pub(crate) struct Written(pub(crate) Duration);

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.as_millis();
        if ms == 0 {
            return f.write_str("0s");
        }
        let units = [("h", 3_600_000), ("m", 60_000), ("s", 1000)];
        for (unit, unit_ms) in units {
            if let (Some(number), Some(0)) = (ms.checked_div(unit_ms), ms.checked_rem(unit_ms)) {
                return write!(f, "{number}{unit}");
            }
        }
        write!(f, "{ms}ms")
    }
}
