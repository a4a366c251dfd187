//! Test drivers for target and initiator sessions, without a socket or an engine, and
//! tests of several protocols over one volume.

mod comparing_volume;
mod driver;
mod one_volume;
mod pump;

pub(crate) use comparing_volume::ComparingVolume;
pub(crate) use driver::{Driver, Streams};
pub(crate) use pump::Pump;
