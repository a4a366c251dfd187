//! Data of the reservation commands (Base 2.0 §7).

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{LittleEndian as LE, U16, U32, U64};

layout! {
    /// Data of Reservation Register and Reservation Acquire: two keys.
    pub struct ReservationKeys(16) {
        /// CRKEY: the host's current key.
        pub crkey: U64<LE>,
        /// NRKEY, the new key, in Register; PRKEY, the key to preempt, in Acquire.
        pub second: U64<LE>,
    }

    /// The header of Reservation Report's data, extended or not (Base 2.0 figures 403 and 405).
    pub struct ReservationStatus(24) {
        /// GEN: counts registrations, preemptions and clears.
        pub generation: U32<LE>,
        /// RTYPE: [`NvmeReservationType`], or 0 for no reservation.
        pub rtype: u8,
        /// REGSTRNT: number of registrants that follow.
        pub regstrnt: U16<LE>,
        pub reserved: [u8; 2] = 0,
        /// PTPLS: 1 if registrations persist through power loss.
        pub ptpls: u8,
        pub reserved_end: [u8; 14] = 0,
    }

    /// A registrant with a 64-bit host identifier (Base 2.0 figure 404).
    pub struct Registrant(24) {
        /// Controller identifier, or FFFFh in the dynamic controller model.
        pub cntlid: U16<LE>,
        /// Bit 0: holds the reservation.
        pub rcsts: u8,
        pub reserved: [u8; 5] = 0,
        /// Host identifier.
        pub hostid: U64<LE>,
        /// Reservation key.
        pub rkey: U64<LE>,
    }

    /// A registrant with a 128-bit host identifier, as over fabrics (Base 2.0 figure 406). The
    /// header before the registrants has [`EXTENDED_STATUS_LEN`] bytes.
    pub struct RegistrantExtended(64) {
        /// Controller identifier, or FFFFh in the dynamic controller model.
        pub cntlid: U16<LE>,
        /// Bit 0: holds the reservation.
        pub rcsts: u8,
        pub reserved: [u8; 5] = 0,
        /// Reservation key.
        pub rkey: U64<LE>,
        /// Host identifier.
        pub hostid: [u8; 16],
        pub reserved_end: [u8; 32] = 0,
    }
}

open_enum! {
    /// RREGA in CDW10 of Reservation Register.
    pub enum RegisterAction(u8) {
        /// Register the new key.
        REGISTER = 0,
        /// Unregister.
        UNREGISTER = 1,
        /// Replace the key.
        REPLACE = 2,
    }

    /// RACQA in CDW10 of Reservation Acquire.
    pub enum AcquireAction(u8) {
        /// Acquire.
        ACQUIRE = 0,
        /// Preempt.
        PREEMPT = 1,
        /// Preempt, and abort commands.
        PREEMPT_AND_ABORT = 2,
    }

    /// RRELA in CDW10 of Reservation Release.
    pub enum ReleaseAction(u8) {
        /// Release.
        RELEASE = 0,
        /// Clear reservation and registrations.
        CLEAR = 1,
    }

    /// RTYPE (Base 2.0 figure 394).
    pub enum NvmeReservationType(u8) {
        /// Only the holder writes.
        WRITE_EXCLUSIVE = 1,
        /// Only the holder reads and writes.
        EXCLUSIVE_ACCESS = 2,
        /// Only registrants write.
        WRITE_EXCLUSIVE_REGISTRANTS_ONLY = 3,
        /// Only registrants read and write.
        EXCLUSIVE_ACCESS_REGISTRANTS_ONLY = 4,
        /// Only registrants write, and all of them hold it.
        WRITE_EXCLUSIVE_ALL_REGISTRANTS = 5,
        /// Only registrants read and write, and all of them hold it.
        EXCLUSIVE_ACCESS_ALL_REGISTRANTS = 6,
    }
}

/// NUMD of Reservation Report (CDW10), as the number of bytes to return.
#[inline]
#[must_use]
pub const fn report_len(cdw10: u32) -> u64 {
    // NUMD is 0's based and in dwords.
    (cdw10 as u64 + 1) * 4
}

/// IEKEY in CDW10 of Register, Acquire and Release: do not check the current key.
pub const IEKEY: u32 = 1 << 3;
/// CPTPL in CDW10 of Register: two bits; 2 clears, 3 sets persistence through power loss.
pub const CPTPL_SHIFT: u32 = 30;
/// RTYPE in CDW10 of Acquire and Release: eight bits.
pub const RTYPE_SHIFT: u32 = 8;
/// EDS in CDW11 of Report: the extended data structure.
pub const EDS: u32 = 1;
/// RCSTS: holds the reservation.
pub const RCSTS_HOLDER: u8 = 1;
/// Length of the extended structure's header, in bytes: [`ReservationStatus`] and reserved bytes.
pub const EXTENDED_STATUS_LEN: usize = 64;
