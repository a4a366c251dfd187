//! The target and the initiator of each protocol.

pub mod aoe;
pub mod iscsi;
pub mod nbd;
pub mod nvme;
mod scsi_unit;
pub mod srp;
