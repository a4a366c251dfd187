//! The tables of RDMA fabrics: which one a URL names, and which ones `blockmux rdma` lists.

use blockmux_proto::srp::url::SrpUrl;

/// A fabric that protocols over RDMA can have.
pub(crate) struct ListedFabric {
    /// Its name in URLs: `rdma=NAME`.
    pub(crate) name: &'static str,
    /// How it transmits, and what it needs.
    pub(crate) about: &'static str,
    /// Whether it works only with a device.
    pub(crate) needs_device: bool,
}

/// All fabrics, also those that this version lacks.
pub(crate) const FABRICS: &[ListedFabric] = &[
    ListedFabric {
        name: "iwarp",
        about: "iWARP in software, over TCP; needs no device",
        needs_device: false,
    },
    ListedFabric {
        name: "roce",
        about: "RoCEv2 in software, over UDP; needs no device",
        needs_device: false,
    },
    ListedFabric {
        name: "verbs",
        about: "RDMA devices, by rdma-core; they are listed below",
        needs_device: true,
    },
];

impl ListedFabric {
    /// Whether URLs of this version can name it.
    pub(crate) fn is_available(&self) -> bool {
        format!("srp://host?rdma={}", self.name).parse::<SrpUrl>().is_ok()
    }
}

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
