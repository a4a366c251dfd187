//! URLs of AoE disks: `aoe://IFACE/eSHELF.SLOT`, with several interfaces
//! `aoe://IFACE,IFACE/eSHELF.SLOT`, and `aoe://IFACE` for all disks that answer there.
//! `?reconnect=DURATION` (default 60s) is how long I/O waits for a disk that does not answer.

use super::AoeAddress;
use super::address::AddressError;
use crate::names::uri::{self, DEFAULT_RECONNECT, ParameterTable, UriError, UrlParameters};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A parsed AoE URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AoeUrl {
    /// Network interfaces, at least one.
    pub interfaces: Vec<String>,
    /// The disk; `None` for all disks that answer.
    pub address: Option<AoeAddress>,
    /// How long a disk may be unresponsive before I/O fails, in whole milliseconds; at least one.
    pub reconnect: Duration,
}

impl FromStr for AoeUrl {
    type Err = UriError;

    fn from_str(text: &str) -> Result<AoeUrl, UriError> {
        let (scheme, place, query) = uri::split(text).ok_or(UriError::new(FORM))?;
        if !scheme.eq_ignore_ascii_case("aoe") {
            return Err(UriError::new(FORM));
        }
        let (interfaces, path) = place.split_once('/').unwrap_or((place, ""));
        let interfaces: Vec<String> = interfaces.split(',').map(str::to_owned).collect();
        if let Some(wrong) = interfaces.iter().find(|name| !is_interface(name)) {
            return Err(UriError::new(format!("{wrong:?} is no name of a network interface")));
        }
        let address = match path {
            "" => None,
            path => Some(
                path.parse().map_err(|error: AddressError| UriError::new(format!("{path:?}: {error}")))?,
            ),
        };
        let mut url = AoeUrl { interfaces, address, ..AoeUrl::plain() };
        uri::read_query(&mut url, query)?;
        Ok(url)
    }
}

impl UrlParameters for AoeUrl {
    fn plain() -> AoeUrl {
        AoeUrl { interfaces: Vec::new(), address: None, reconnect: DEFAULT_RECONNECT }
    }

    fn parameters(&mut self, table: &mut ParameterTable<'_>) {
        table.time("reconnect", &mut self.reconnect, Duration::from_millis(1));
    }
}

impl fmt::Display for AoeUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "aoe://{}", self.interfaces.join(","))?;
        if let Some(address) = self.address {
            write!(f, "/{address}")?;
        }
        uri::write_query(f, self.clone())
    }
}

const FORM: &str = "a disk's URL is aoe://IFACE/eSHELF.SLOT";

/// Whether the kernel accepts `name` for an interface: 1 to 15 bytes, no slash, no space, not `.`
/// or `..`.
fn is_interface(name: &str) -> bool {
    let is_sane = |byte: u8| byte.is_ascii_graphic() && byte != b'/' && byte != b':';
    (1..=15).contains(&name.len()) && name.bytes().all(is_sane) && name != "." && name != ".."
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_reads_as_it_is_written() {
        for text in
            ["aoe://eth0/e1.2", "aoe://eth0", "aoe://a,b.5/e0.0?reconnect=5m", "aoe://lo?reconnect=1ms"]
        {
            assert_eq!(text.parse::<AoeUrl>().unwrap().to_string(), text);
        }
        let written = |text: &str| text.parse::<AoeUrl>().unwrap().to_string();
        assert_eq!(written("AOE://eth0/"), "aoe://eth0");
        assert_eq!(written("aoe://eth0?reconnect=60s"), "aoe://eth0", "as long as without");
    }

    #[test]
    fn url_errors_say_what_is_wrong() {
        let all = [
            ("eth0/e1.2", "a disk's URL is"),
            ("nbd://eth0/e1.2", "a disk's URL is"),
            ("aoe:///e1.2", "no name of a network interface"),
            ("aoe://eth0,,eth1/e1.2", "no name of a network interface"),
            ("aoe://an-interface-of-17/e1.2", "no name of a network interface"),
            ("aoe://eth0/1.2", "eSHELF.SLOT"),
            ("aoe://eth0/e1.2?x=1", "\"x\": unknown; known is reconnect"),
            ("aoe://eth0/e1.2?reconnect=-1s", "give a time such as"),
            ("aoe://eth0/e1.2?reconnect=5", "give a time such as"),
            ("aoe://eth0/e1.2?reconnect=0", "give a time of 1ms or more"),
            ("aoe://eth0/e1.2?reconnect=25h", "at most 24h"),
            ("aoe://eth0/e1.2?reconnect=5s&reconnect=5s", "given twice"),
        ];
        for (text, says) in all {
            let error = text.parse::<AoeUrl>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
