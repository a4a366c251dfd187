//! Asymmetric logical unit access: parameter data of REPORT and SET TARGET PORT GROUPS (SPC-5).

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, U16};

layout! {
    /// A target port group descriptor; 4 bytes for each port follow.
    pub struct PortGroupDescriptor(8) {
        /// PREF and ASYMMETRIC ACCESS STATE.
        pub pref_and_access_state: u8,
        /// [`SUPPORTED_STATES`].
        pub supported_states: u8,
        /// TARGET PORT GROUP.
        pub target_port_group: U16<BE>,
        pub reserved: u8 = 0,
        /// STATUS CODE: [`STATUS_NONE`] and others.
        pub status_code: u8,
        /// Vendor specific.
        pub vendor_specific: u8,
        /// TARGET PORT COUNT.
        pub target_port_count: u8,
    }

    /// A set target port group descriptor.
    pub struct SetPortGroup(4) {
        /// ASYMMETRIC ACCESS STATE in the lower 4 bits.
        pub access_state: u8,
        pub reserved: u8 = 0,
        /// TARGET PORT GROUP.
        pub target_port_group: U16<BE>,
    }
}

open_enum! {
    /// ASYMMETRIC ACCESS STATE.
    pub enum AccessState(u8) {
        /// Active/optimized.
        ACTIVE_OPTIMIZED = 0x0,
        /// Active/non-optimized.
        ACTIVE_NON_OPTIMIZED = 0x1,
        /// Standby.
        STANDBY = 0x2,
        /// Unavailable.
        UNAVAILABLE = 0x3,
        /// Logical block dependent.
        LOGICAL_BLOCK_DEPENDENT = 0x4,
        /// Offline, until serviced.
        OFFLINE = 0xe,
        /// Transitioning between states.
        TRANSITIONING = 0xf,
    }
}

/// U_SUP, S_SUP, AN_SUP and AO_SUP.
pub const SUPPORTED_STATES: u8 = 0x0f;
/// T_SUP: a port group may be in transition.
pub const T_SUP: u8 = 0x80;
/// STATUS CODE: no status.
pub const STATUS_NONE: u8 = 0;
/// STATUS CODE: set by SET TARGET PORT GROUPS.
pub const STATUS_EXPLICIT: u8 = 1;
/// STATUS CODE: set by the target itself.
pub const STATUS_IMPLICIT: u8 = 2;
