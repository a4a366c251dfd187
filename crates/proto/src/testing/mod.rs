//! For tests: either side of a session driven by hand, without a socket or an engine.

mod driver;
mod pump;

pub(crate) use driver::{Driver, Streams};
pub(crate) use pump::Pump;
