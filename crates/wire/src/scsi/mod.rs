//! SCSI command descriptor blocks, sense data and parameter data, with the names of the T10
//! standards.
//!
//! References: SAM-5 (architecture), SPC-5 (primary commands), SBC-4 (block commands). All numbers
//! are big-endian. Bits within a byte are constants next to their structure.

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
