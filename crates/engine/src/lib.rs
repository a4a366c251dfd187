//! The engine: all contact with the operating system.
//!
//! ```text
//!            ┌──────────────── one thread, one io_uring ────────────────┐
//!   socket ──▶ connection ──▶ session ──▶ channel (RAM, file, remote ...) │
//!   socket ◀── connection ◀── session ◀── channel                        │
//!            └───────────────────────────────────────────────────────────┘
//! ```
//! A [`Reactor`](crate::core::reactor::Reactor) is one core: a thread that runs
//! [`Task`](crate::core::reactor::Task)s to completion and shares nothing. It sleeps in its ring,
//! which reports sockets that became readable, file I/O that completed, and messages from other
//! threads. Data of sockets moves by plain non-blocking system calls, and data of files through the
//! ring: see
//! `docs/decisions/0001-sockets-use-system-calls-files-use-the-ring.md`.
//!
//! Each room uses only rooms above it:
//!
//! | room | contains |
//! |---|---|
//! | [`sys`] | system calls and other services of the operating system |
//! | [`crate::core`] | threads that run tasks: reactor, io_uring, timers |
//! | [`net`] | sockets, raw frames, and what tasks need from their core |
//! | [`carrier`] | a session over a byte stream, with or without TLS |
//! | `fabric` | queue pairs for sessions over RDMA |
//! | [`volume`] | files and block devices; state that survives a restart |
//! | [`group`] | this daemon as a member of a gateway group, over a cluster |
//! | [`serve`] | targets: listeners, connections, channels, limits, the audit log |
//! | [`attach`] | volumes as disks of this machine |
//! | [`remote`] | remote volumes: links that connect, retry and replay |
//! | [`protocol`] | the target and the initiator of each protocol |
//! | `sim` | the simulator, for tests |
//!
//! Unsafe code is in the files that `docs/internals/architecture.md` lists, and in no others.

pub mod attach;
pub mod carrier;
pub mod core;
pub mod fabric;
pub mod group;
pub mod net;
pub mod protocol;
pub mod remote;
pub mod serve;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
pub mod sys;
pub mod volume;
