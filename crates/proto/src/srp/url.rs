//! SRP URLs.
//!
//! ```text
//!   srp://host[:port][,host[:port]].../TARGET-PORT-ID[/lun][?PARAMETER[&PARAMETER]...]
//! ```
//! Several hosts are several paths to one logical unit. The target port's identifier is 32
//! hexadecimal digits, with or without the prefix `0x`. The default of `lun` is 0.
//!
//! - `rdma=NAME` and its options: the fabric ([`crate::names::rdma`]).
//! - `initiator=GUID`: the GUID of our initiator ports, 16 hexadecimal digits. Targets list it to
//!   admit us. Each session adds 8 bytes of its own.
//! - `connections=N`: RDMA channels of each session. The target may accept fewer.
//! - `immediate_data=on|off` (on): whether to ask for immediate data.
//! - `reconnect=DURATION`: how long to try to reconnect before I/O fails.
//! - `timeout=DURATION`: how long an answer may take before the connection counts as lost.

use super::node::SrpPortId;
use crate::names::rdma::Rdma;
use crate::names::uri::{
    self, DEFAULT_RECONNECT, DEFAULT_TIMEOUT, MAX_CONNECTIONS, ParameterTable, UriError, UrlParameters,
};
pub use crate::names::uri::{HostPort, Portals};
use data_encoding::HEXLOWER;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Default TCP port of SRP targets. The standard assigns none; this is the port in examples for
/// Linux's target.
pub const SRP_DEFAULT_PORT: u16 = 5555;

/// A parsed SRP URL: a logical unit, and the addresses of its target port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SrpUrl {
    /// Addresses of the target port.
    pub portals: Portals,
    /// The target port; `None` if the URL has none.
    pub target: Option<SrpPortId>,
    /// Logical unit number, below 16,384.
    pub lun: u16,
    /// The RDMA fabric; `None` if the URL does not say.
    pub rdma: Option<Rdma>,
    /// The GUID of our initiator ports; `None` stands for the engine's default.
    pub initiator: Option<[u8; 8]>,
    /// RDMA channels of each session, 1 to [`MAX_CONNECTIONS`]; `None` stands for the engine's
    /// default.
    pub connections: Option<u32>,
    /// Whether to ask for immediate data.
    pub immediate_data: bool,
    /// How long to try to reconnect before I/O fails, in whole milliseconds.
    pub reconnect: Duration,
    /// How long an answer may take, in whole milliseconds; 0 means no limit.
    pub timeout: Duration,
}

impl FromStr for SrpUrl {
    type Err = UriError;

    fn from_str(text: &str) -> Result<SrpUrl, UriError> {
        let (scheme, place, query) = uri::split(text).ok_or(UriError::new(NO_URL))?;
        if !scheme.eq_ignore_ascii_case("srp") {
            return Err(UriError::new(NO_URL));
        }
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        let portals = Portals::read(authority, SRP_DEFAULT_PORT)?;
        let mut url = SrpUrl { rdma: Some(Rdma::default()), portals, ..SrpUrl::plain() };
        if let Some((target, lun)) = uri::name_and_number(path, "0") {
            let wrong_target = || UriError::part("target port", target, TARGET);
            url.target = Some(SrpPortId::parse(target).ok_or_else(wrong_target)?);
            let number = uri::number(lun).filter(|lun| *lun <= MAX_LUN);
            url.lun = number.ok_or_else(|| UriError::part("logical unit", lun, NUMBER))?;
        }
        uri::read_query(&mut url, query)?;
        Ok(url)
    }
}

impl UrlParameters for SrpUrl {
    fn plain() -> SrpUrl {
        SrpUrl {
            portals: Portals::one((String::new(), SRP_DEFAULT_PORT)),
            target: None,
            lun: 0,
            rdma: None,
            initiator: None,
            connections: None,
            immediate_data: true,
            reconnect: DEFAULT_RECONNECT,
            timeout: DEFAULT_TIMEOUT,
        }
    }

    fn parameters(&mut self, table: &mut ParameterTable<'_>) {
        table.fabric(&mut self.rdma);
        table.text("initiator", &mut self.initiator, guid, |guid| HEXLOWER.encode(guid));
        table.number("connections", &mut self.connections, 1..=MAX_CONNECTIONS);
        table.switch("immediate_data", &mut self.immediate_data);
        table.time("reconnect", &mut self.reconnect, Duration::ZERO);
        table.time("timeout", &mut self.timeout, Duration::ZERO);
    }
}

impl fmt::Display for SrpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("srp://")?;
        self.portals.write(f, SRP_DEFAULT_PORT)?;
        if let Some(target) = &self.target {
            write!(f, "/{target}/{}", self.lun)?;
        }
        uri::write_query(f, self.clone())
    }
}

fn guid(text: &str) -> Result<[u8; 8], &'static str> {
    let digits = text.strip_prefix("0x").unwrap_or(text).to_ascii_lowercase();
    let bytes = HEXLOWER.decode(digits.as_bytes()).ok().and_then(|bytes| bytes.try_into().ok());
    bytes.ok_or("write a GUID of 16 hexadecimal digits")
}

const NO_URL: &str = "this is not an SRP URL; write srp://host[:port]/TARGET-PORT-ID/lun";
const TARGET: &str = "write its identifier, 32 hexadecimal digits, as the target prints it";
const NUMBER: &str = "write a number from 0 to 16383 after the target port";
/// The greatest logical unit number of the flat space addressing method (SAM-5 §4.7.7.4).
const MAX_LUN: u16 = 0x3fff;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ID: &str = "0x0123456789abcdef0123456789abcdef";

    fn read(text: &str) -> SrpUrl {
        text.parse().unwrap()
    }

    fn problem(text: &str) -> String {
        text.parse::<SrpUrl>().unwrap_err().to_string()
    }

    #[test]
    fn a_url_names_a_port_of_a_target_and_a_unit() {
        let url = read(&format!("srp://h/{ID}/3"));
        assert_eq!((&url.portals.first, url.lun), (&("h".to_owned(), 5555), 3));
        assert_eq!(url.target.unwrap().to_string(), ID);
        assert_eq!(read(&format!("SRP://h/{}", &ID[2..])), SrpUrl { lun: 0, ..url });
        let several = read(&format!("srp://a:1,[::1]/{ID}/0?initiator=0x00000000000000AB&connections=3"));
        assert_eq!(several.portals.further, [("::1".to_owned(), 5555)]);
        assert_eq!((several.initiator, several.connections), (Some([0, 0, 0, 0, 0, 0, 0, 0xab]), Some(3)));
        assert_eq!(read("srp://h").target, None);
    }

    #[test]
    fn url_errors_say_what_is_wrong() {
        assert!(problem("srq://h").contains("write srp://"));
        assert!(problem("srp:///a").contains("host"));
        assert!(problem("srp://u:p,ss@h/abc").starts_with("host \"u:p,ss@h\": the protocol has no users; "));
        assert!(problem("srp://h/abc/0").contains("32 hexadecimal digits"));
        assert!(problem(&format!("srp://h/{ID}/16384")).contains("16383"));
        assert!(problem(&format!("srp://h/{ID}/0?initiator=12")).contains("16 hexadecimal digits"));
        assert!(problem(&format!("srp://h/{ID}/0?rdma=ib")).contains("write iwarp, roce or verbs"));
        assert!(problem(&format!("srp://h/{ID}/0?what=1")).contains("unknown"));
    }

    proptest! {
        #[test]
        fn a_url_is_read_as_it_is_written(
            target in proptest::option::of(any::<[u8; 16]>()),
            lun in 0..=MAX_LUN,
            crc: bool,
            initiator in proptest::option::of(any::<[u8; 8]>()),
            connections in proptest::option::of(1..=MAX_CONNECTIONS),
            immediate_data: bool,
            times in (0..100_000_u64, 0..100_000_u64),
        ) {
            let portals = Portals { first: ("h".into(), 1), further: vec![("::1".into(), 5555)] };
            let url = SrpUrl {
                portals,
                target: target.map(SrpPortId),
                lun: if target.is_some() { lun } else { 0 },
                rdma: Some(Rdma::Iwarp { crc }),
                initiator,
                connections,
                immediate_data,
                reconnect: Duration::from_millis(times.0),
                timeout: Duration::from_millis(times.1),
            };
            prop_assert_eq!(read(&url.to_string()), url);
        }
    }
}
