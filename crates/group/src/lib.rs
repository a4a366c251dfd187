//! Gateway groups: several daemons (*members*) serve the same volumes, and one of them is active
//! for each. Sans-I/O: time and input are passed to [`Member`], which answers with actions.
//!
//! ```text
//!                  ┌───────────── the cluster ──────────────┐
//!                  │ table   one object, compare-and-set    │  who should serve
//!                  │ beats   notifications of its watchers  │  who seems to be alive
//!                  │ lock of each image, list of fenced     │  who can write
//!                  │ clients                                │
//!                  └──────▲──────────────▲──────────────▲───┘
//!                     Member A       Member B       Member C
//! ```
//! | module | what it knows |
//! |---|---|
//! | [`table`] | the object of the group, its encoding, and the changes that it may undergo |
//! | [`spread`] | which member should serve which volume |
//! | [`member`] | one member: events in, actions out |
//! | [`notice`] | what members tell each other, as bytes |
//!
//! # Safety and suspicion
//!
//! *Safety* needs no clock. A member writes to an image only while its client holds the image's
//! lock. The lock passes on in two ways: its holder completes all I/O and releases it, or the
//! cluster fences the holder's client, so that it refuses whatever that client still sends. The
//! table names every client that may hold a lock: those of members that are up, and those that have
//! to be fenced before anything else starts ([`Table::to_fence`]).
//!
//! *Suspicion* needs no clock either: a member suspects another one when it has heard a number of
//! its **own** beats, and none of the other's. Whoever was stopped, or is cut from the cluster,
//! hears nothing of itself, and suspects nobody. A clock decides only when a member that does not
//! hear itself gives up, which is always allowed, and how often things are repeated.
//!
//! # Volumes
//!
//! ```text
//!          assign: epoch + 1             the owner has it
//!   Free ────────────────────▶ Starting ──────────────────▶ Active
//!    ▲                          ▲  │  ▲                      │  │
//!    │                          │  │  └── lost: epoch + 1 ───┘  │
//!    │           released, for  │  │ move                        │ move, by decision:
//!    │  another one: epoch + 1  │  ▼                             │ the owner completes its I/O
//!    └───── released ────────── Leaving ◀────────────────────────┘
//!
//!   any ──▶ Free   when the owner's incarnation ends: suspected, fenced by an operator, or started
//!                  again. Its client is to be fenced before anything starts.
//! ```
//! One member decides: the one that joined first among those that are not suspected. Two that
//! believe so at once are told apart by the table's generation, which each proposal replaces.
//!
//! `docs/decisions/0121-a-gateway-group-is-a-table-and-members-that-propose.md` has the reasons.
#![forbid(unsafe_code)]
#![warn(clippy::indexing_slicing, clippy::unwrap_used, clippy::arithmetic_side_effects)]

pub mod member;
pub mod notice;
pub mod spread;
pub mod table;

pub use member::{Action, Beat, CommandId, Event, Member, Outcome, RequestId, Settings};
pub use notice::Notice;
pub use table::{
    Client, Command, Decision, Epoch, Generation, Incarnation, Place, Refusal, Table, TableError,
};
