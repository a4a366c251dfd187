//! Images of Ceph RBD as volumes.
//!
//! ```text
//!   channels of a core ──▶ RbdQueue ──▶ librbd's threads ──▶ cluster
//!                             ▲ eventfd, or polled     │
//!                             └────────────────────────┘
//! ```
//! Each core that uses a volume has one queue of requests to the image, which its channels share.
//! Calls that block have threads of their own: opening, closing, and queries of the object map.

mod channel;
mod errors;
mod queue;
mod snapshots;
mod state;
mod status;
mod volume;

pub use blockmux_rbd::cluster::{ClusterOptions, TIMEOUT, USER};
pub use blockmux_rbd::error::RbdError;
pub use blockmux_rbd::image::{ImageName, wait_until_closed};
pub use volume::RbdVolume;
