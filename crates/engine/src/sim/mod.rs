//! The simulator: the engine's own tasks and any protocol's sessions, on a virtual clock and a
//! network full of trouble.
//!
//! ```text
//!   Client ──▶ RemoteVolume ──▶ links ──▶ SimNet ──▶ TargetTask ──▶ CrashVolume
//!     │        (the engine's)          delay, cuts,  (the engine's)      │
//!     │                                stalls, breaks                    │
//!     └───────────────▶ Ledger: what every block may hold ◀──────────────┘
//! ```
//! Protocols on frames have a [`SimLan`] in the place of the network, which loses, doubles and
//! delays frames, and [`FrameScenario`] in the place of [`Scenario`].
//!
//! What runs is what serves real sockets: [`crate::target::TargetTask`],
//! [`crate::initiator::RemoteVolume`] and [`crate::connection::Connection`], over [`SimCore`] in
//! place of a thread with a ring. Time stands still while anything can run and then jumps to the
//! next event, so that hours pass in seconds; everything follows from one seed, and
//! [`Scenario::run`] with the same seed does the same again.

mod client;
mod conditions;
mod core;
mod crash;
mod disk;
mod frames;
mod lan;
mod ledger;
mod net;
mod scenario;
mod tls;

pub use conditions::{LONGEST_STALL, NetworkConditions};
pub use core::{Hang, SimCore, World};
pub use crash::{CrashVolume, Observer};
pub use frames::{FrameOutcome, FrameScenario, FrameTrouble};
pub use lan::{LATEST, LanConditions, SimLan, SimPort};
pub use ledger::{BLOCK, Ledger};
pub use net::{SimNet, SimStream, SimWatch};
pub use scenario::{Failure, Outcome, Protocol, Scenario, Trouble};
pub use tls::SystemTls;
