//! Volumes as disks of this machine.
//!
//! An attached disk is a source of I/O without a peer: its queues run on the cores as any target,
//! with [`Channels`](crate::serve::channels::Channels), and so with meters, limits and admission.
//! Each way to attach is a module.

pub mod ublk;
