//! The table of RDMA fabrics: which one a URL names.

/// Evaluates an expression with the fabric of a URL. Each arm has its own type, so sessions are
/// compiled for each fabric, and nothing is dispatched for each I/O.
macro_rules! with_fabric {
    ($rdma:expr, $fabric:ident => $then:expr) => {
        match $rdma {
            blockmux_proto::names::rdma::Rdma::Iwarp { crc } => {
                let $fabric = blockmux_engine::fabric::iwarp::IwarpFabric::new(crc);
                $then
            }
        }
    };
}

pub(crate) use with_fabric;
