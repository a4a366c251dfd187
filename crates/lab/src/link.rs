//! Network links of a study.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;

/// A network link of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    /// MTU in bytes.
    pub mtu: u32,
    /// Rate limit in Gbit/s; `None`: unlimited.
    pub gbit_per_s: Option<u32>,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.gbit_per_s {
            Some(rate) => write!(f, "{rate} Gbit/s, MTU {}", self.mtu),
            None => write!(f, "no limit, MTU {}", self.mtu),
        }
    }
}

/// The links over which a suite is measured.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Links {
    /// Rate limits in Gbit/s; the unlimited link comes last.
    rates: Vec<u32>,
    /// MTUs of each protocol.
    mtus: BTreeMap<String, Vec<u32>>,
    /// Numbers of stripe members that stand for the study's disks; the first one is served.
    pub stripes: Vec<u32>,
}

impl Links {
    /// All links of a protocol, ordered by rate and then by MTU; empty for a protocol that the
    /// study does not cover.
    #[must_use]
    pub fn of(&self, protocol: &str) -> Vec<Link> {
        let mtus = self.mtus.get(protocol).map_or(&[][..], Vec::as_slice);
        let rates = self.rates.iter().copied().map(Some).chain([None]);
        rates.flat_map(|gbit_per_s| mtus.iter().map(move |&mtu| Link { mtu, gbit_per_s })).collect()
    }
}

/// Name of a stripe of `members` members.
#[must_use]
pub fn stripe(members: u32) -> String {
    format!("{members}-way stripe")
}

/// Name of a protocol in rows that were measured through the kernel's initiator.
#[must_use]
pub fn by_kernel(protocol: &str) -> String {
    format!("{protocol} {KERNEL}")
}

/// What follows the protocol's name there.
pub(crate) const KERNEL: &str = "(kernel)";

/// A row's name: the configuration, and its link or stripe.
#[must_use]
pub fn row_name(of: &str, place: &str) -> String {
    format!("{of}, {place}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::Suite;

    #[test]
    fn a_protocol_has_a_link_for_every_rate_and_mtu() {
        let suite = Suite::by_name("aatrokoski-2007").unwrap();
        let links = suite.links().unwrap();
        let names: Vec<String> = links.of("nbd").iter().map(Link::to_string).collect();
        assert_eq!(names[..2], ["1 Gbit/s, MTU 1500", "1 Gbit/s, MTU 4608"]);
        assert_eq!((names.len(), names[8].as_str()), (9, "no limit, MTU 9000"));
        assert_eq!((links.of("aoe")[1].mtu, links.of("iscsi").len()), (4132, 0));
    }
}
