//! Volumes over files, block devices and vhost-user back ends, memory of RAM volumes, and state
//! that survives a restart.

pub mod file;
pub mod populate;
pub mod state;
pub mod vhost_user;
