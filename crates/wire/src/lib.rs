//! Byte layouts of the protocols that Blockmux speaks.
//!
//! Layouts only: no state, no I/O, no allocation, no `unsafe`. A protocol is a module; its
//! structures are `#[repr(C)]` with endian-typed fields and a compile-time size check, its numbers
//! are open enumerations (an unknown value survives and prints as a number), and its names are the
//! standard's own.
#![no_std]
#![forbid(unsafe_code)]

mod open_enum;

pub mod aoe;
pub mod ata;
pub mod ethernet;
pub mod iscsi;
pub mod iser;
pub mod iwarp;
pub mod nbd;
pub mod nvme;
pub mod nvmeof;
pub mod scsi;
pub mod srp;
