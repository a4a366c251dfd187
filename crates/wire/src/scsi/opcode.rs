//! Operation codes and service actions (SPC-5, SBC-4).

use crate::open_enum::open_enum;

open_enum! {
    /// OPERATION CODE: the first byte of a command descriptor block.
    pub enum ScsiOpcode(u8) {
        /// TEST UNIT READY.
        TEST_UNIT_READY = 0x00,
        /// REQUEST SENSE.
        REQUEST_SENSE = 0x03,
        /// FORMAT UNIT.
        FORMAT_UNIT = 0x04,
        /// READ (6).
        READ_6 = 0x08,
        /// WRITE (6).
        WRITE_6 = 0x0a,
        /// INQUIRY.
        INQUIRY = 0x12,
        /// MODE SELECT (6).
        MODE_SELECT_6 = 0x15,
        /// RESERVE (6) of SPC-2.
        RESERVE_6 = 0x16,
        /// RELEASE (6) of SPC-2.
        RELEASE_6 = 0x17,
        /// MODE SENSE (6).
        MODE_SENSE_6 = 0x1a,
        /// START STOP UNIT.
        START_STOP_UNIT = 0x1b,
        /// SEND DIAGNOSTIC.
        SEND_DIAGNOSTIC = 0x1d,
        /// PREVENT ALLOW MEDIUM REMOVAL.
        PREVENT_ALLOW_MEDIUM_REMOVAL = 0x1e,
        /// READ CAPACITY (10).
        READ_CAPACITY_10 = 0x25,
        /// READ (10).
        READ_10 = 0x28,
        /// WRITE (10).
        WRITE_10 = 0x2a,
        /// WRITE AND VERIFY (10).
        WRITE_AND_VERIFY_10 = 0x2e,
        /// VERIFY (10).
        VERIFY_10 = 0x2f,
        /// PRE-FETCH (10).
        PRE_FETCH_10 = 0x34,
        /// SYNCHRONIZE CACHE (10).
        SYNCHRONIZE_CACHE_10 = 0x35,
        /// READ DEFECT DATA (10).
        READ_DEFECT_DATA_10 = 0x37,
        /// WRITE SAME (10).
        WRITE_SAME_10 = 0x41,
        /// UNMAP.
        UNMAP = 0x42,
        /// SANITIZE; see [`sanitize`].
        SANITIZE = 0x48,
        /// MODE SELECT (10).
        MODE_SELECT_10 = 0x55,
        /// RESERVE (10) of SPC-2.
        RESERVE_10 = 0x56,
        /// RELEASE (10) of SPC-2.
        RELEASE_10 = 0x57,
        /// MODE SENSE (10).
        MODE_SENSE_10 = 0x5a,
        /// PERSISTENT RESERVE IN; see [`persistent_reserve_in`].
        PERSISTENT_RESERVE_IN = 0x5e,
        /// PERSISTENT RESERVE OUT; see [`persistent_reserve_out`].
        PERSISTENT_RESERVE_OUT = 0x5f,
        /// Third-party copy out: EXTENDED COPY and others; see [`third_party_copy_out`].
        THIRD_PARTY_COPY_OUT = 0x83,
        /// Third-party copy in: RECEIVE COPY RESULTS and others; see
        /// [`third_party_copy_in`].
        THIRD_PARTY_COPY_IN = 0x84,
        /// READ (16).
        READ_16 = 0x88,
        /// COMPARE AND WRITE.
        COMPARE_AND_WRITE = 0x89,
        /// WRITE (16).
        WRITE_16 = 0x8a,
        /// ORWRITE (16).
        ORWRITE_16 = 0x8b,
        /// WRITE AND VERIFY (16).
        WRITE_AND_VERIFY_16 = 0x8e,
        /// VERIFY (16).
        VERIFY_16 = 0x8f,
        /// PRE-FETCH (16).
        PRE_FETCH_16 = 0x90,
        /// SYNCHRONIZE CACHE (16).
        SYNCHRONIZE_CACHE_16 = 0x91,
        /// WRITE SAME (16).
        WRITE_SAME_16 = 0x93,
        /// WRITE ATOMIC (16).
        WRITE_ATOMIC_16 = 0x9c,
        /// SERVICE ACTION IN (16); see [`service_action_in_16`].
        SERVICE_ACTION_IN_16 = 0x9e,
        /// REPORT LUNS.
        REPORT_LUNS = 0xa0,
        /// MAINTENANCE IN; see [`maintenance_in`].
        MAINTENANCE_IN = 0xa3,
        /// MAINTENANCE OUT; see [`maintenance_out`].
        MAINTENANCE_OUT = 0xa4,
        /// READ (12).
        READ_12 = 0xa8,
        /// WRITE (12).
        WRITE_12 = 0xaa,
        /// WRITE AND VERIFY (12).
        WRITE_AND_VERIFY_12 = 0xae,
        /// VERIFY (12).
        VERIFY_12 = 0xaf,
        /// READ DEFECT DATA (12).
        READ_DEFECT_DATA_12 = 0xb7,
    }
}

/// Service actions of [`ScsiOpcode::SERVICE_ACTION_IN_16`].
pub mod service_action_in_16 {
    /// READ CAPACITY (16).
    pub const READ_CAPACITY_16: u16 = 0x10;
    /// GET LBA STATUS (16).
    pub const GET_LBA_STATUS: u16 = 0x12;
}

/// Service actions of [`ScsiOpcode::MAINTENANCE_IN`].
pub mod maintenance_in {
    /// REPORT TARGET PORT GROUPS.
    pub const REPORT_TARGET_PORT_GROUPS: u16 = 0x0a;
    /// REPORT SUPPORTED OPERATION CODES.
    pub const REPORT_SUPPORTED_OPERATION_CODES: u16 = 0x0c;
    /// REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS.
    pub const REPORT_SUPPORTED_TASK_MANAGEMENT_FUNCTIONS: u16 = 0x0d;
}

/// Service actions of [`ScsiOpcode::MAINTENANCE_OUT`].
pub mod maintenance_out {
    /// SET TARGET PORT GROUPS.
    pub const SET_TARGET_PORT_GROUPS: u16 = 0x0a;
}

/// Service actions of [`ScsiOpcode::PERSISTENT_RESERVE_IN`] (SPC-5).
pub mod persistent_reserve_in {
    /// READ KEYS: all registered keys.
    pub const READ_KEYS: u16 = 0x00;
    /// READ RESERVATION: the current reservation.
    pub const READ_RESERVATION: u16 = 0x01;
    /// REPORT CAPABILITIES: supported features.
    pub const REPORT_CAPABILITIES: u16 = 0x02;
    /// READ FULL STATUS: all registrations with their nexuses.
    pub const READ_FULL_STATUS: u16 = 0x03;
}

/// Service actions of [`ScsiOpcode::PERSISTENT_RESERVE_OUT`] (SPC-5).
pub mod persistent_reserve_out {
    /// Register or unregister a key.
    pub const REGISTER: u16 = 0x00;
    /// Create a reservation.
    pub const RESERVE: u16 = 0x01;
    /// Release the reservation.
    pub const RELEASE: u16 = 0x02;
    /// Remove the reservation and all registrations.
    pub const CLEAR: u16 = 0x03;
    /// Remove other registrations and take over their reservation.
    pub const PREEMPT: u16 = 0x04;
    /// Preempt, and abort the preempted nexuses' tasks.
    pub const PREEMPT_AND_ABORT: u16 = 0x05;
    /// Register regardless of an existing key.
    pub const REGISTER_AND_IGNORE_EXISTING_KEY: u16 = 0x06;
    /// Register another nexus and move the reservation there.
    pub const REGISTER_AND_MOVE: u16 = 0x07;
    /// Replace a reservation lost in a power failure.
    pub const REPLACE_LOST_RESERVATION: u16 = 0x08;
}

/// Service actions of [`ScsiOpcode::SANITIZE`] (SBC-4).
pub mod sanitize {
    /// Overwrite every block with a pattern.
    pub const OVERWRITE: u16 = 0x01;
    /// Erase every block.
    pub const BLOCK_ERASE: u16 = 0x02;
    /// Change the medium's encryption keys.
    pub const CRYPTOGRAPHIC_ERASE: u16 = 0x03;
    /// Exit the failure mode of a failed sanitize operation.
    pub const EXIT_FAILURE_MODE: u16 = 0x1f;
}

/// Service actions of [`ScsiOpcode::THIRD_PARTY_COPY_OUT`] (SPC-5).
pub mod third_party_copy_out {
    /// EXTENDED COPY (LID1).
    pub const EXTENDED_COPY_LID1: u16 = 0x00;
    /// POPULATE TOKEN (SBC-4).
    pub const POPULATE_TOKEN: u16 = 0x10;
    /// WRITE USING TOKEN (SBC-4).
    pub const WRITE_USING_TOKEN: u16 = 0x11;
}

/// Service actions of [`ScsiOpcode::THIRD_PARTY_COPY_IN`] (SPC-5).
pub mod third_party_copy_in {
    /// RECEIVE COPY STATUS (LID1).
    pub const RECEIVE_COPY_STATUS_LID1: u16 = 0x00;
    /// RECEIVE COPY DATA (LID1).
    pub const RECEIVE_COPY_DATA_LID1: u16 = 0x01;
    /// RECEIVE COPY OPERATING PARAMETERS.
    pub const RECEIVE_COPY_OPERATING_PARAMETERS: u16 = 0x03;
    /// RECEIVE COPY FAILURE DETAILS (LID1).
    pub const RECEIVE_COPY_FAILURE_DETAILS_LID1: u16 = 0x04;
    /// RECEIVE ROD TOKEN INFORMATION.
    pub const RECEIVE_ROD_TOKEN_INFORMATION: u16 = 0x07;
}

/// Length of a CDB with this operation code in bytes, from its group code (SPC-5); `None` for the
/// variable length and the vendor-specific groups.
#[must_use]
pub const fn cdb_len(opcode: u8) -> Option<usize> {
    match opcode >> 5 {
        0 => Some(6),
        1 | 2 => Some(10),
        4 => Some(16),
        5 => Some(12),
        _ => None,
    }
}
