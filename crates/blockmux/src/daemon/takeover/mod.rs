//! A new process takes over from a running daemon without an outage (`serve --takeover`).
//!
//! ```text
//!   new process                                            old process (the daemon)
//!   config is read    ── POST /v1/takeover, Upgrade ────▶  still serves
//!                     ◀── Listener..., Offer ────────────
//!   config, listeners
//!   and new volumes
//!   are checked       ── Ready ────────────────────────▶   sessions end, volumes are flushed and
//!                                                          closed, locks are released
//!                     ◀── Volume..., Session..., Released
//!   volumes are opened,
//!   sessions continue ── Serving ──────────────────────▶   ends
//! ```
//! A volume is never open for writing in both processes. Listening sockets are never closed:
//! clients that connect during the takeover wait in the accept queues. Until `Ready`, either
//! process can end or refuse, and the old process continues to serve. After `Ready` only the new
//! process can serve; if it fails then, nothing is served. See
//! docs/decisions/0064-takeover-by-a-new-process.md.

mod acquire;
mod release;
mod wire;

pub(super) use acquire::Takeover;
pub(super) use release::{Handover, TakeoverServer};
pub(super) use wire::{PATH, UPGRADE};
