//! SCSI, whatever carries it: the device server of our targets, and the commands of our initiator.

pub(crate) mod bytes;
pub mod device;
pub mod initiator;
pub mod iscsi_name;
mod lun;
mod sense;

pub use device::*;
pub use lun::Lun;
pub use sense::{Sense, SenseBytes};

#[cfg(test)]
pub(crate) use device::testing;

pub use blockmux_wire::scsi::status::Status;
