//! The tables of RDMA fabrics: which one a URL names, and which ones `blockmux rdma` lists.

/// A fabric that protocols over RDMA can have.
pub(crate) struct ListedFabric {
    /// Its name in URLs: `rdma=NAME`.
    pub(crate) name: &'static str,
    /// How it transmits, and what it needs.
    pub(crate) about: &'static str,
    /// What it needs of the machine.
    pub(crate) needs: FabricNeed,
}

/// What a fabric needs beside a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FabricNeed {
    Nothing,
    /// The UDP port of RoCEv2.
    RocePort,
    /// An RDMA device, and rdma-core.
    Device,
}

/// All fabrics.
pub(crate) const FABRICS: &[ListedFabric] = &[
    ListedFabric {
        name: "iwarp",
        about: "iWARP in software, over TCP; needs no device",
        needs: FabricNeed::Nothing,
    },
    ListedFabric {
        name: "roce",
        about: "RoCEv2 in software, over UDP; needs no device",
        needs: FabricNeed::RocePort,
    },
    ListedFabric {
        name: "verbs",
        about: "RDMA devices, by rdma-core; they are listed below",
        needs: FabricNeed::Device,
    },
];

/// Evaluates an expression with the fabric of a URL. Each arm has its own type, so sessions are
/// compiled for each fabric, and nothing is dispatched for each I/O.
macro_rules! with_fabric {
    ($rdma:expr, $fabric:ident => $then:expr) => {
        match $rdma {
            blockmux_proto::names::rdma::Rdma::Iwarp { crc } => {
                let $fabric = blockmux_engine::fabric::iwarp::IwarpFabric::new(crc);
                $then
            }
            blockmux_proto::names::rdma::Rdma::Roce => {
                let $fabric = blockmux_engine::fabric::roce::RoceFabric;
                $then
            }
            blockmux_proto::names::rdma::Rdma::Verbs => {
                let $fabric = blockmux_engine::fabric::verbs::VerbsFabric;
                $then
            }
        }
    };
}

pub(crate) use with_fabric;
