//! iSCSI on sockets, over TCP and over RDMA (iSER).

mod datamover;
pub mod initiator;
pub mod target;
