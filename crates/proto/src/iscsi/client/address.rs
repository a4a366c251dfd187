//! `TargetAddress` values (RFC 7143 §13.8), in login redirections and SendTargets responses.

use crate::names::uri::host_and_port;
use blockmux_wire::iscsi::ISCSI_DEFAULT_PORT;
use core::net::Ipv6Addr;
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

/// A portal in the form `HOST[:PORT][,GROUP]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetAddress {
    /// A host name or IP address; an IPv6 address without brackets.
    pub host: String,
    /// The TCP port; 3260 by default.
    pub port: u16,
    /// The portal group tag.
    pub group_tag: Option<u16>,
}

impl FromStr for TargetAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<TargetAddress, &'static str> {
        let (place, tag) = match text.rsplit_once(',') {
            Some((place, tag)) => {
                (place, Some(tag.parse().map_err(|_| "has no portal group tag after the comma")?))
            }
            None => (text, None),
        };
        let (host, port) = host_and_port(&in_brackets(place))?;
        Ok(TargetAddress { host, port: port.unwrap_or(ISCSI_DEFAULT_PORT), group_tag: tag })
    }
}

/// Puts an IPv6 address before the last colon in brackets. tgt's redirections have none, and
/// open-iscsi takes the last colon for that of the port, too.
fn in_brackets(place: &str) -> Cow<'_, str> {
    let is_ipv6 = |host: &str| host.split('%').next().is_some_and(|ip| ip.parse::<Ipv6Addr>().is_ok());
    match place.rsplit_once(':') {
        Some((host, port)) if is_ipv6(host) => format!("[{host}]:{port}").into(),
        _ => place.into(),
    }
}

impl fmt::Display for TargetAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port)?,
            false => write!(f, "{}:{}", self.host, self.port)?,
        }
        self.group_tag.map_or(Ok(()), |tag| write!(f, ",{tag}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<(String, u16, Option<u16>), &'static str> {
        let TargetAddress { host, port, group_tag } = text.parse()?;
        Ok((host, port, group_tag))
    }

    #[test]
    fn every_form_of_an_address_is_parsed_and_formatted() {
        for (text, expected) in [
            ("192.0.2.1", ("192.0.2.1", 3260, None)),
            ("192.0.2.1:7,1", ("192.0.2.1", 7, Some(1))),
            ("[2001:db8::1]", ("2001:db8::1", 3260, None)),
            ("[2001:db8::1]:7,65535", ("2001:db8::1", 7, Some(65535))),
            ("disk.example.com,2", ("disk.example.com", 3260, Some(2))),
            ("[fe80::1%eth0]:7,1", ("fe80::1%eth0", 7, Some(1))),
            ("fe80::1:3260,1", ("fe80::1", 3260, Some(1))),
            ("2001:db8::1:7", ("2001:db8::1", 7, None)),
            ("fe80::1%eth0:7", ("fe80::1%eth0", 7, None)),
        ] {
            let (host, port, tag) = expected;
            assert_eq!(read(text), Ok((host.to_owned(), port, tag)), "{text}");
            let address: TargetAddress = text.parse().unwrap();
            assert_eq!(address.to_string().parse(), Ok(address));
        }
        for wrong in [
            "",
            ",1",
            "h,",
            "h,65536",
            "h:0",
            "h:70000",
            "::1",
            "2001:db8::1",
            "::1:0",
            "[::1",
            "a b",
            "h,1,x",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
