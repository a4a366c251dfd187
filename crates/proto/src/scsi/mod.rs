//! Transport-independent SCSI: the device server and task sets of targets, and the application
//! client of initiators.

pub(crate) mod bytes;
pub mod device;
pub mod initiator;
pub mod iscsi_name;
mod lun;
mod sense;
pub(crate) mod task_set;

pub use device::*;
pub use lun::Lun;
pub use sense::{Sense, SenseBytes};
pub use task_set::BackgroundWork;

#[cfg(test)]
pub(crate) use device::testing;

pub use blockmux_wire::scsi::status::ScsiStatus;
