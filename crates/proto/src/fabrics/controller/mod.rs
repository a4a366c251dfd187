//! The controller side of NVMe over Fabrics.

pub(crate) mod connect;
pub(crate) mod discovery;
pub mod node;
pub mod unconnected;
