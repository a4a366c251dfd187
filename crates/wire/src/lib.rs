//! Byte layouts of the protocols that Blockmux supports.
//!
//! Layouts only: no state, no I/O, no allocation, no `unsafe`. Each protocol is a module.
//! Structures are declared by `layout!`, with endian-typed fields and a size that is checked at
//! compile time; numbers are open enumerations, so that unknown values are preserved and printed as
//! numbers; names are those of the standard.
#![no_std]
#![forbid(unsafe_code)]

mod layout;
mod open_enum;
mod u24;

pub mod aoe;
pub mod ata;
pub mod ethernet;
pub mod fuse;
pub mod iscsi;
pub mod iser;
pub mod iwarp;
pub mod nbd;
pub mod netlink;
pub mod nvme;
pub mod nvmeof;
pub mod roce;
pub mod scsi;
pub mod srp;
pub mod ublk;
pub mod virtio;
