//! SCSI: command descriptor blocks, sense data and parameter data, in T10's own names.
//!
//! References: SAM-5 (architecture), SPC-5 (commands of every device type), SBC-4 (commands of
//! block devices). Every number is big-endian. Bits within a byte are constants beside the
//! structure that has them.

pub mod alua;
pub mod capacity;
pub mod cdb;
pub mod copy;
pub mod inquiry;
pub mod lun;
pub mod mode;
pub mod opcode;
pub mod provisioning;
pub mod reservation;
pub mod sense;
pub mod status;
pub mod vpd;
