//! The fabrics over which the bench measures protocols over RDMA.

use crate::failure::Failure;
use crate::protocol::Protocol;
use blockmux_engine::serve::roce_listener::RoceListener;
use blockmux_proto::names::rdma::{TCP_TARGET_QUERY, UDP_TARGET_QUERY};
use std::net::{Ipv4Addr, SocketAddr};

/// A fabric in software.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum BenchFabric {
    #[default]
    Iwarp,
    Roce,
}

impl BenchFabric {
    /// Those of `asked` that a protocol is measured over. One that is not over RDMA is measured
    /// once.
    pub(super) fn of(protocol: &Protocol, asked: &[BenchFabric]) -> Vec<BenchFabric> {
        match asked {
            [_, ..] if protocol.is_over_rdma => asked.to_vec(),
            _ => vec![BenchFabric::Iwarp],
        }
    }

    /// What distinguishes its rows from those of iWARP.
    pub(super) fn place(self) -> String {
        match self {
            BenchFabric::Iwarp => String::new(),
            BenchFabric::Roce => "RoCEv2".to_owned(),
        }
    }

    /// The query of URLs of a target.
    pub(super) fn query(self) -> &'static str {
        match self {
            BenchFabric::Iwarp => TCP_TARGET_QUERY,
            BenchFabric::Roce => UDP_TARGET_QUERY,
        }
    }

    /// The address of loopback that is served. All programs of an address share the UDP port of
    /// RoCEv2, so this process has an address of its own.
    pub(super) fn loopback(self) -> Ipv4Addr {
        match self {
            BenchFabric::Iwarp => Ipv4Addr::LOCALHOST,
            BenchFabric::Roce => {
                let [_, high, mid, low] = std::process::id().to_be_bytes();
                Ipv4Addr::new(127, 128 | high, mid, low)
            }
        }
    }

    /// Whether it can be served here.
    ///
    /// # Errors
    /// Says what prevents it, and what to do.
    pub(super) fn check(self) -> Result<(), Failure> {
        match self {
            BenchFabric::Iwarp => Ok(()),
            BenchFabric::Roce => self.listen(0).map(drop),
        }
    }

    /// Opens the UDP port for the service that has this TCP port.
    ///
    /// # Errors
    /// As [`BenchFabric::check`].
    pub(super) fn listen(self, port: u16) -> Result<RoceListener, Failure> {
        let address = SocketAddr::from((self.loopback(), port));
        RoceListener::bind(address).map_err(|error| {
            Failure::request(format!(
                "--rdma roce: cannot listen on {}: {error}; stop what has the UDP port of RoCEv2, or unload \
                 the module rdma_rxe",
                address.ip()
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::by_name;

    #[test]
    fn only_protocols_over_rdma_are_measured_over_several_fabrics() {
        let both = [BenchFabric::Iwarp, BenchFabric::Roce];
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
