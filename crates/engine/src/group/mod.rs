//! This daemon as a member of a gateway group: what does the actions of a
//! [`Member`](blockmux_group::Member) on a cluster of Ceph.
//!
//! ```text
//!  GroupDriver ──command──▶ ┌──── thread "group" ────┐ ──begin, activate, deactivate, end_io──▶ GroupVolumes
//!      ▲                    │ runner: Member, time   │ ◀────────────── VolumeReports ──────────────┘
//!      └──── status ◀────── │ client: calls in flight│
//!                           └──┬──────────▲──────────┘
//!           one call at a time │          │ inputs: results, notifications
//!        "table", "watch", "fence", "again", "map" ──▶ librados
//! ```
//! | module | what it knows |
//! |---|---|
//! | `input` | what the group's thread is told |
//! | `call_thread` | a thread for calls that may block for ever |
//! | `client` | one client of the cluster: its calls in flight and their limits, its watch |
//! | [`volumes`] | what a group needs of the volumes of this daemon |
//! | [`turn_volumes`] | volumes that become active and standby, as a group needs them |
//! | `runner` | the loop around the member |
//! | [`options`] | what a driver is started with, and what it tells |
//! | [`driver`] | the handle: starting, commands |
//!
//! # Contracts
//! - *Nothing blocks the member's thread.* A call of librados that may block runs on a thread for
//!   its kind, one at a time. After a limit the member is told that it has failed; what it returns
//!   later is ignored. While it has not returned, other calls of this kind fail at once.
//! - *An action belongs to the client of its time.* Everything that comes back has the number of
//!   the client that it was asked of. [`EndIo`](blockmux_group::Action::EndIo) drops that client,
//!   and with it all calls that have not begun and all results that have not come.
//! - *A client that hangs is left alone.* Closing it waits for its calls, on a thread. The next
//!   client is connected meanwhile, unless [`MAX_CLOSING`] are not closed yet.
//! - *Time is that of a clock that goes on while the process is stopped* (`CLOCK_MONOTONIC`), so a
//!   member that goes on finds that it has not heard itself, and ends its I/O first.
//!
//! `docs/decisions/0123-a-thread-drives-a-member-of-a-group-over-ceph.md` has the reasons.

mod call_thread;
mod client;
pub mod driver;
mod input;
pub mod options;
mod runner;
pub mod turn_volumes;
pub mod volumes;

pub use driver::GroupDriver;
pub use options::{ConnectToCluster, GroupOptions, GroupStatus, connect_to};
pub use turn_volumes::{FindVolume, MemberVolume, TurnVolumes};
pub use volumes::{Activation, GroupVolumes, VolumeReports};

/// Maximum number of earlier clients that are not closed yet.
pub const MAX_CLOSING: usize = 4;
