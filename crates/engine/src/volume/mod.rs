//! Volumes over files, block devices, vhost-user back ends and images of Ceph RBD, memory of RAM
//! volumes, and state that survives a restart.

mod core_queues;
pub mod file;
mod memory_retry;
pub mod populate;
pub mod rbd;
pub mod state;
mod state_writer;
pub mod turns;
pub mod vhost_user;
