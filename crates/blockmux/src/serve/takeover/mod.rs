//! A new process takes over from the one that serves, without an outage (`serve --takeover`).
//!
//! ```text
//!   new process                                            process that serves
//!   config is read    ── POST /v1/takeover, Upgrade ────▶  still serves
//!                     ◀── Listener..., Offer ────────────
//!   config, listeners
//!   and new volumes
//!   are checked       ── Ready ────────────────────────▶   sessions end, volumes are flushed and
//!                                                          closed, locks are released
//!                     ◀── Volume..., Session..., Released
//!   volumes are opened,
//!   connections taken ── Serving ──────────────────────▶   ends
//! ```
//! Never do both processes have a volume open for writing. Listening sockets are never closed, so
//! that who connects meanwhile waits in their queues. Until `Ready` each process can end or refuse,
//! and the one that serves goes on. Afterwards the new one alone can serve: if it fails then, no
//! process serves. See docs/decisions/0064-takeover.md.

mod acquire;
mod release;
mod wire;

pub(super) use acquire::Takeover;
pub(super) use release::{Handover, Successors};
pub(super) use wire::{PATH, UPGRADE};
