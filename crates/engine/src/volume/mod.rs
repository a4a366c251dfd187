//! Volumes over files and block devices, memory of RAM volumes, and state that survives a restart.

pub mod file;
pub mod populate;
pub mod state;
