//! The simulator: the engine's tasks and any protocol's sessions on a virtual clock and a faulty
//! network.
//!
//! ```text
//!   Client ──▶ RemoteVolume ──▶ links ──▶ SimNet ──▶ TargetTask ──▶ CrashVolume
//!     │        (the engine's)          delay, cuts,  (the engine's)      │
//!     │                                stalls, breaks                    │
//!     └───────────────▶ Ledger: what every block may hold ◀──────────────┘
//! ```
//!
//! Protocols on frames use a [`SimLan`] as network and [`FrameScenario`] in place of [`Scenario`].
//!
//! The code under test is that of real sockets: [`crate::serve::target_task::TargetTask`],
//! [`crate::remote::RemoteVolume`] and [`crate::carrier::connection::Connection`], on a [`SimCore`]
//! in place of a thread with a ring. The clock stands still while any task can run, then jumps to
//! the next event, so that hours pass in seconds. Everything follows from one seed: a run can be
//! repeated exactly.

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

pub use conditions::{MAX_STALL, NetworkConditions};
pub use core::{Hang, SimCore, World};
pub use crash::{CrashVolume, Observer};
pub use frames::{FrameFault, FrameOutcome, FrameScenario};
pub use lan::{LATEST, LanConditions, SimLan, SimPort};
pub use ledger::{BLOCK, Ledger};
pub use net::{SimNet, SimStream, SimWatch};
pub use scenario::{Outage, Protocol, Scenario, ScenarioFailure, ScenarioOutcome, TargetSessions};
pub use tls::SystemTls;
