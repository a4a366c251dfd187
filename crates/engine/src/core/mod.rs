//! Cores: threads that run tasks, each with a reactor, an io_uring and timers.

pub mod buffer_table;
pub mod cores;
pub mod helpers;
pub mod reactor;
pub mod ring;
pub(crate) mod timers;
