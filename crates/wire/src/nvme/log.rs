//! Log pages (Base 2.0 §5.16.1).

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{LittleEndian as LE, U16, U32, U64, U128};

open_enum! {
    /// LID in CDW10 of Get Log Page (Base 2.0 figure 202).
    pub enum LogPage(u8) {
        /// Supported Log Pages: 256 numbers of 4 bytes; bit 0: supported.
        SUPPORTED_LOG_PAGES = 0x00,
        /// [`ErrorEntry`]s.
        ERROR_INFORMATION = 0x01,
        /// [`SmartLog`].
        SMART_HEALTH_INFORMATION = 0x02,
        /// [`FirmwareSlotLog`].
        FIRMWARE_SLOT_INFORMATION = 0x03,
        /// Up to 1,024 namespace identifiers.
        CHANGED_NAMESPACE_LIST = 0x04,
        /// 256 admin opcodes' and 256 I/O opcodes' effects, 4 bytes each, and 2,048 bytes reserved.
        COMMANDS_SUPPORTED_AND_EFFECTS = 0x05,
        /// [`AnaHeader`] and [`AnaGroupDescriptor`]s.
        ASYMMETRIC_NAMESPACE_ACCESS = 0x0c,
        /// Feature Identifiers Supported and Effects: 256 numbers of 4 bytes.
        FEATURE_IDENTIFIERS_SUPPORTED_AND_EFFECTS = 0x12,
        /// [`crate::nvmeof::fabrics::DiscoveryHeader`] and
        /// [`crate::nvmeof::fabrics::DiscoveryEntry`]s.
        DISCOVERY = 0x70,
        /// [`ReservationNotification`].
        RESERVATION_NOTIFICATION = 0x80,
    }
}

/// CRITICAL WARNING of [`SmartLog`]: a temperature threshold is exceeded.
pub const CRITICAL_WARNING_TEMPERATURE: u8 = 1 << 1;

layout! {
    /// One entry of the error information log (Base 2.0 figure 206).
    pub struct ErrorEntry(64) {
        /// Error count, from 1; 0 for an unused entry.
        pub error_count: U64<LE>,
        /// Submission queue identifier.
        pub sqid: U16<LE>,
        /// Command identifier.
        pub cid: U16<LE>,
        /// Status field of the command.
        pub status: U16<LE>,
        /// Byte and bit of the erroneous parameter in the command, or FFFFh.
        pub parameter_error_location: U16<LE>,
        /// The first block that failed.
        pub lba: U64<LE>,
        /// Namespace identifier.
        pub nsid: U32<LE>,
        /// Vendor specific log page identifier; 0 for none.
        pub vendor_specific: u8,
        /// Transport type.
        pub trtype: u8,
        pub reserved: [u8; 2] = 0,
        /// Command specific information.
        pub command_specific: U64<LE>,
        /// Transport specific information.
        pub transport_specific: U16<LE>,
        pub reserved_end: [u8; 22] = 0,
    }

    /// SMART / Health Information (Base 2.0 figure 207).
    pub struct SmartLog(512) {
        /// Critical warnings, such as [`CRITICAL_WARNING_TEMPERATURE`].
        pub critical_warning: u8,
        /// Composite temperature, in kelvins.
        pub composite_temperature: U16<LE>,
        /// Available spare, in percent.
        pub available_spare: u8,
        /// Available spare threshold, in percent.
        pub available_spare_threshold: u8,
        /// Estimated endurance used, in percent.
        pub percentage_used: u8,
        /// Critical warnings of endurance groups.
        pub endurance_group_critical_warning: u8,
        pub reserved: [u8; 25] = 0,
        /// Data read, in units of 512,000 bytes.
        pub data_units_read: U128<LE>,
        /// Data written, in units of 512,000 bytes.
        pub data_units_written: U128<LE>,
        /// Number of read commands.
        pub host_read_commands: U128<LE>,
        /// Number of write commands.
        pub host_write_commands: U128<LE>,
        /// Controller busy time, in minutes.
        pub controller_busy_time: U128<LE>,
        /// Number of power cycles.
        pub power_cycles: U128<LE>,
        /// Power-on time, in hours.
        pub power_on_hours: U128<LE>,
        /// Number of unsafe shutdowns.
        pub unsafe_shutdowns: U128<LE>,
        /// Number of media and data integrity errors.
        pub media_errors: U128<LE>,
        /// Number of error log entries over the life of the controller.
        pub error_information_log_entries: U128<LE>,
        /// Temperatures, and reserved bytes.
        pub rest: [u8; 320],
    }

    /// Firmware Slot Information (Base 2.0 figure 208).
    pub struct FirmwareSlotLog(512) {
        /// The active slot in bits 2 to 0.
        pub afi: u8,
        pub reserved: [u8; 7] = 0,
        /// The revision in each slot, ASCII.
        pub frs: [[u8; 8]; 7],
        pub reserved_end: [u8; 448] = 0,
    }

    /// The header of the Asymmetric Namespace Access log (Base 2.0 figure 220).
    pub struct AnaHeader(16) {
        /// Change count of the log.
        pub chgcnt: U64<LE>,
        /// Number of group descriptors that follow.
        pub nagd: U16<LE>,
        pub reserved: [u8; 6] = 0,
    }

    /// One group of the Asymmetric Namespace Access log; its namespace identifiers follow (Base 2.0
    /// figure 221).
    pub struct AnaGroupDescriptor(32) {
        /// ANA group identifier, from 1.
        pub agid: U32<LE>,
        /// Number of namespace identifiers that follow.
        pub nnsid: U32<LE>,
        /// Change count of the group.
        pub chgcnt: U64<LE>,
        /// [`AnaState`] in the low four bits.
        pub state: u8,
        pub reserved: [u8; 15] = 0,
    }

    /// The reservation notification log (Base 2.0 figure 273).
    pub struct ReservationNotification(64) {
        /// Log page count, from 1; 0 if there is no notification.
        pub log_page_count: U64<LE>,
        /// 0 none, 1 registration preempted, 2 reservation released, 3 reservation preempted.
        pub kind: u8,
        /// Number of further notifications.
        pub available: u8,
        pub reserved: [u8; 2] = 0,
        /// Namespace identifier.
        pub nsid: U32<LE>,
        pub reserved_end: [u8; 48] = 0,
    }
}

open_enum! {
    /// Asymmetric namespace access states (Base 2.0 §8.1.3).
    pub enum AnaState(u8) {
        /// Optimized.
        OPTIMIZED = 0x1,
        /// Non-optimized.
        NON_OPTIMIZED = 0x2,
        /// Inaccessible.
        INACCESSIBLE = 0x3,
        /// Persistent loss.
        PERSISTENT_LOSS = 0x4,
        /// Transition between states.
        CHANGE = 0xf,
    }
}

/// NUMD of Get Log Page, as the number of bytes to return.
#[inline]
#[must_use]
pub const fn wanted_len(cdw10: u32, cdw11: u32) -> u64 {
    // NUMD is a 32-bit number in two halves, 0's based and in dwords.
    (((cdw11 as u64 & 0xffff) << 16 | cdw10 as u64 >> 16) + 1) * 4
}

/// RAE in CDW10: retain the asynchronous event of this page.
pub const RAE: u32 = 1 << 15;
/// RGO in CDW10's log specific parameter, for the ANA log: groups only, no namespaces.
pub const ANA_RGO: u32 = 1 << 8;
/// OT in CDW14: LPO is an index, not an offset.
pub const OT: u32 = 1 << 23;
/// Commands supported and effects: supported.
pub const EFFECT_CSUPP: u32 = 1;
/// Commands supported and effects: changes content of logical blocks.
pub const EFFECT_LBCC: u32 = 1 << 1;
/// Feature identifiers supported and effects: supported.
pub const FSUPP: u32 = 1;
/// Feature identifiers supported and effects: its scope is one namespace.
pub const FSP_NAMESPACE: u32 = 1 << 20;
/// Feature identifiers supported and effects: its scope is the controller.
pub const FSP_CONTROLLER: u32 = 1 << 21;
/// Supported log pages: supported.
pub const LSUPP: u32 = 1;
/// Length of the commands supported and effects log, in bytes.
pub const EFFECTS_LEN: usize = 4096;
/// Most namespaces in a changed namespace list; an overflow is one entry of FFFFFFFFh.
pub const CHANGED_NAMESPACES_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    /// Captured from a Linux 6.12 host that reads the header of the discovery log.
    #[test]
    fn a_log_pages_length_is_read_as_the_kernel_sent_it() {
        assert_eq!(wanted_len(0x00ff_8070, 0), 1024);
        assert_eq!(wanted_len(u32::MAX, u32::MAX), 1 << 34);
    }
}
