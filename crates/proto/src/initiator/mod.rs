//! Initiators of all protocols: [`command_queue`] turns I/O into commands, of which [`job`] has the
//! pieces of one I/O; [`coverage`] has the bytes of data received.

pub(crate) mod command_memory;
pub(crate) mod command_queue;
pub(crate) mod coverage;
pub(crate) mod job;
