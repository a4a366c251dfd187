//! NVMe over Fabrics: what all fabrics have (Base 2.0 §3.3.2 and §6), the TCP transport (TCP
//! Transport 1.0), and how connections of the RDMA transport begin.

pub mod auth;
pub mod fabrics;
pub mod rdma;
pub mod tcp;
