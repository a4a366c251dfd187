//! The engine: all contact with the operating system.
//!
//! ```text
//!            ┌──────────────── one thread, one io_uring ────────────────┐
//!   socket ──▶ connection ──▶ session ──▶ channel (RAM, file, remote ...) │
//!   socket ◀── connection ◀── session ◀── channel                        │
//!            └───────────────────────────────────────────────────────────┘
//! ```
//! A [`reactor::Reactor`] is one core: a thread that runs [`reactor::Task`]s to completion and
//! shares nothing. It sleeps in its ring, which reports sockets that became readable, file I/O
//! that completed, and messages from other threads. Data of sockets moves by plain non-blocking
//! system calls, and data of files through the ring: see
//! `docs/decisions/0001-sockets-use-system-calls-files-use-the-ring.md`.
//!
//! Unsafe code is in [`sys`], [`ring`], [`memory`], `file::kernel`, `frames::kernel` and
//! `frames::ring` alone.

pub mod aoe;
pub mod audit;
mod background;
pub mod blocking;
mod broken;
mod channels;
pub mod congestion;
pub mod connection;
pub mod cores;
pub mod file;
pub mod frames;
pub mod handover;
pub mod helpers;
pub mod host;
pub mod initiator;
pub mod iscsi;
pub mod ktls;
pub mod listener;
pub mod memory;
pub mod nbd;
pub mod network;
pub mod nvme_tcp;
mod peer_core;
pub mod populate;
mod rdma;
pub mod reactor;
pub mod ring;
pub mod safe_path;
pub mod secure;
pub mod sessions;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
pub mod socket;
pub mod srp;
mod stall;
pub mod state;
pub mod sys;
pub mod syscall_filter;
pub mod target;
mod throttles;
mod timers;
pub mod zone;
