//! Images of Ceph RBD as volumes.
//!
//! ```text
//!   channels of a core ──▶ RbdQueue ──▶ librbd's threads ──▶ cluster
//!                             ▲ eventfd, or polled     │
//!                             └────────────────────────┘
//! ```
//! Each core that uses a volume has one queue of requests to the image, which its channels share.
//! Calls that block have threads of their own: opening, closing, taking the lock, queries of the
//! object map, and commits of reservations.

mod channel;
mod current;
mod errors;
mod limit;
mod member_client;
mod of_turn;
mod owner;
mod queue;
mod rados_state;
mod snapshots;
mod state;
mod status;
mod volume;

pub use blockmux_rbd::cluster::{ClusterOptions, TIMEOUT, USER};
pub use blockmux_rbd::error::RbdError;
pub use blockmux_rbd::image::{ImageName, wait_until_closed};
pub use member_client::MemberClient;
pub use owner::RbdOwnership;
pub use rados_state::{RadosState, RadosStateError};
pub use volume::RbdVolume;
