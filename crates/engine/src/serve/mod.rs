//! Serves volumes: listeners, the connections of targets, and the channels of whatever requests
//! I/O.

pub mod audit;
pub(crate) mod background;
pub mod channels;
pub mod frame_target;
pub mod handover;
pub mod listener;
mod locked;
pub mod moves;
pub mod peer_buffers;
mod peer_core;
mod served_session;
pub mod sessions;
mod stall;
pub mod target_task;
mod throttles;
