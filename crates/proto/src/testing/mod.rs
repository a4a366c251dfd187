//! Test drivers for target and initiator sessions, without a socket or an engine.

mod driver;
mod pump;

pub(crate) use driver::{Driver, Streams};
pub(crate) use pump::Pump;
