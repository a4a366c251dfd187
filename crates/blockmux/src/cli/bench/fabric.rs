//! The fabrics over which the bench measures protocols over RDMA.

use crate::failure::Failure;
use crate::protocol::Protocol;
use crate::protocol::fabric::{FABRICS, FabricPort, FabricPorts, OF_TCP_PORTS, RdmaFabric};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use std::net::{Ipv4Addr, SocketAddr};

/// A fabric in software.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BenchFabric(&'static RdmaFabric);

impl Default for BenchFabric {
    fn default() -> BenchFabric {
        BenchFabric(&OF_TCP_PORTS)
    }
}

impl BenchFabric {
    fn all() -> impl Iterator<Item = BenchFabric> {
        let needs_device = |ports: &FabricPorts| ports.loopback.is_none();
        FABRICS
            .into_iter()
            .filter(move |known| !known.ports.as_ref().is_some_and(needs_device))
            .map(BenchFabric)
    }

    /// The one with this name.
    pub(super) fn named(name: &str) -> Option<BenchFabric> {
        BenchFabric::all().find(|known| known.0.name == name)
    }

    /// Reads an argument of the command line. Other fabrics are hidden values, which are refused.
    pub(super) fn parser() -> impl TypedValueParser<Value = BenchFabric> {
        let value = |fabric: &RdmaFabric| {
            PossibleValue::new(fabric.name).hide(BenchFabric::named(fabric.name).is_none())
        };
        PossibleValuesParser::new(FABRICS.into_iter().map(value)).try_map(|name| {
            BenchFabric::named(&name)
                .ok_or_else(|| format!("needs a device; measure it by a URL with ?rdma={name}"))
        })
    }

    /// Its name in options.
    pub(super) fn name(self) -> &'static str {
        self.0.name
    }

    /// Those of `asked` that a protocol is measured over. One that is not over RDMA is measured
    /// once.
    pub(super) fn of(protocol: &Protocol, asked: &[BenchFabric]) -> Vec<BenchFabric> {
        match asked {
            [_, ..] if protocol.is_over_rdma => asked.to_vec(),
            _ => vec![BenchFabric::default()],
        }
    }

    /// As rows call it.
    pub(super) fn title(self) -> &'static str {
        self.0.title
    }

    /// The query of URLs of a target.
    pub(super) fn query(self) -> &'static str {
        self.0.query
    }

    /// The address of loopback that is served.
    pub(super) fn loopback(self) -> Ipv4Addr {
        let own = self.0.ports.as_ref().and_then(|ports| ports.loopback.as_ref());
        own.map_or(Ipv4Addr::LOCALHOST, |own| (own.address)())
    }

    /// Whether it can be served here.
    ///
    /// # Errors
    /// Says what prevents it, and what to do.
    pub(super) fn check(self) -> Result<(), Failure> {
        self.listen(0).map(drop)
    }

    /// Opens its own port, if it has such, for the service that has this TCP port.
    ///
    /// # Errors
    /// As [`BenchFabric::check`].
    pub(super) fn listen(self, port: u16) -> Result<Option<FabricPort>, Failure> {
        let ports = self.0.ports.as_ref().and_then(|ports| Some((ports, ports.loopback.as_ref()?)));
        let Some((ports, loopback)) = ports else { return Ok(None) };
        let address = SocketAddr::from(((loopback.address)(), port));
        (ports.bind)(address).map(Some).map_err(|error| {
            Failure::request(format!("--rdma {}: {}", self.0.name, (loopback.explain)(&error)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::by_name;

    #[test]
    fn only_protocols_over_rdma_are_measured_over_several_fabrics() {
        let both = ["iwarp", "roce"].map(|name| BenchFabric::named(name).unwrap());
        assert_eq!(BenchFabric::all().collect::<Vec<_>>(), both);
        for (name, asked, measured) in [
            ("iser", both.as_slice(), both.as_slice()),
            ("srp", &both[1..], &both[1..]),
            ("nvme-rdma", &[], &both[..1]),
            ("iscsi", &both, &both[..1]),
        ] {
            assert_eq!(BenchFabric::of(by_name(name).unwrap(), asked), measured, "{name}");
        }
    }
}
