//! NVMe over Fabrics: what all fabrics have (Base 2.0 §3.3.2 and §6), and the TCP transport (TCP Transport 1.0).

pub mod auth;
pub mod fabrics;
pub mod tcp;
