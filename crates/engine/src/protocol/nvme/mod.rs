//! NVMe/TCP and NVMe/RDMA on sockets.

mod carrier;
mod generated_keys;
mod identity_order;
pub mod initiator;
pub mod target;

pub use generated_keys::GeneratedKeys;
pub use identity_order::IdentityOrder;
