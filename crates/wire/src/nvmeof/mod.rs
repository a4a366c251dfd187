//! NVMe over Fabrics: the Fabrics commands of all transports (Base 2.0 §3.3.2 and §6), the TCP
//! transport (TCP Transport 1.0), and the private data of RDMA connections (RDMA Transport 1.0).

pub mod auth;
pub mod fabrics;
pub mod rdma;
pub mod tcp;
