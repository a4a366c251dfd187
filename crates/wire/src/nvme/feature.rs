//! Features (Base 2.0 §5.27.1).

use crate::open_enum::open_enum;

open_enum! {
    /// FID in CDW10 of Set Features and Get Features.
    pub enum FeatureId(u8) {
        /// Arbitration.
        ARBITRATION = 0x01,
        /// Power Management.
        POWER_MANAGEMENT = 0x02,
        /// Temperature Threshold.
        TEMPERATURE_THRESHOLD = 0x04,
        /// Error Recovery.
        ERROR_RECOVERY = 0x05,
        /// Volatile Write Cache.
        VOLATILE_WRITE_CACHE = 0x06,
        /// Number of Queues.
        NUMBER_OF_QUEUES = 0x07,
        /// Write Atomicity Normal.
        WRITE_ATOMICITY_NORMAL = 0x0a,
        /// Asynchronous Event Configuration.
        ASYNCHRONOUS_EVENT_CONFIGURATION = 0x0b,
        /// Timestamp.
        TIMESTAMP = 0x0e,
        /// Keep Alive Timer.
        KEEP_ALIVE_TIMER = 0x0f,
        /// Host Behavior Support: 512 bytes of data.
        HOST_BEHAVIOR_SUPPORT = 0x16,
        /// I/O Command Set Profile.
        IO_COMMAND_SET_PROFILE = 0x19,
        /// Host Identifier: 8 or 16 bytes of data.
        HOST_IDENTIFIER = 0x81,
        /// Reservation Notification Mask.
        RESERVATION_NOTIFICATION_MASK = 0x82,
        /// Reservation Persistence.
        RESERVATION_PERSISTENCE = 0x83,
        /// Namespace Write Protection Config.
        NAMESPACE_WRITE_PROTECTION_CONFIG = 0x84,
    }

    /// SEL in CDW10 of Get Features.
    pub enum Select(u8) {
        /// The current value.
        CURRENT = 0,
        /// The default.
        DEFAULT = 1,
        /// The saved value.
        SAVED = 2,
        /// Supported capabilities: saveable, namespace specific, changeable
        /// ([`CAPABILITY_CHANGEABLE`]).
        SUPPORTED_CAPABILITIES = 3,
    }
}

/// SV in CDW10 of Set Features: save the value.
pub const SAVE: u32 = 1 << 31;
/// Result of Get Features with [`Select::SUPPORTED_CAPABILITIES`]: the feature can be saved.
pub const CAPABILITY_SAVEABLE: u32 = 1;
/// Result of Get Features with [`Select::SUPPORTED_CAPABILITIES`]: the feature is namespace
/// specific.
pub const CAPABILITY_NAMESPACE_SPECIFIC: u32 = 1 << 1;
/// Result of Get Features with [`Select::SUPPORTED_CAPABILITIES`]: the feature can be changed.
pub const CAPABILITY_CHANGEABLE: u32 = 1 << 2;

/// WCE in CDW11 of Volatile Write Cache.
pub const WCE: u32 = 1;
/// THSEL in CDW11 of Temperature Threshold, bits 21:20: over temperature threshold.
pub const THSEL_OVER: u32 = 0;
/// THSEL: under temperature threshold.
pub const THSEL_UNDER: u32 = 1;
/// TMPSEL in CDW11 of Temperature Threshold, bits 19:16: the composite temperature.
pub const TMPSEL_COMPOSITE: u32 = 0;
/// TMPSEL: all implemented sensors.
pub const TMPSEL_ALL: u32 = 0xf;
/// EXHID in CDW11 of Host Identifier: 16 bytes.
pub const EXHID: u32 = 1;
/// PTPL in CDW11 of Reservation Persistence.
pub const PTPL: u32 = 1;
/// The bits of Reservation Notification Mask: registration preempted, reservation released,
/// reservation preempted.
pub const NOTIFICATION_MASK: u32 = 0b1110;
/// Length of the Host Behavior Support data, in bytes.
pub const HOST_BEHAVIOR_LEN: usize = 512;
/// Offset of Advanced Command Retry Enable (ACRE) in Host Behavior Support.
pub const ACRE_AT: usize = 0;
/// ACRE: the host respects CRD of a status.
pub const ACRE_ENABLED: u8 = 1;

/// Asynchronous Event Configuration: SMART / Health Critical Warnings, the temperature.
pub const AEC_TEMPERATURE: u32 = 1 << 1;
/// Asynchronous Event Configuration: Namespace Attribute Notices.
pub const AEC_NAMESPACE_ATTRIBUTE: u32 = 1 << 8;
/// Asynchronous Event Configuration: Asymmetric Namespace Access Change Notices.
pub const AEC_ANA_CHANGE: u32 = 1 << 11;
/// Asynchronous Event Configuration: Discovery Log Page Change Notification.
pub const AEC_DISCOVERY_CHANGE: u32 = 1 << 31;

open_enum! {
    /// Asynchronous event type: three bits of an Asynchronous Event Request's result (Base 2.0
    /// figure 143).
    pub enum EventType(u8) {
        /// An error.
        ERROR = 0,
        /// SMART / health.
        SMART = 1,
        /// A notice: [`Notice`].
        NOTICE = 2,
        /// I/O command set specific.
        IO_COMMAND_SPECIFIC = 6,
        /// Vendor specific.
        VENDOR_SPECIFIC = 7,
    }
}

/// Asynchronous event information of SMART / health: a temperature threshold is exceeded.
pub const TEMPERATURE_THRESHOLD_EXCEEDED: u8 = 1;

open_enum! {
    /// Asynchronous event information of a notice (Base 2.0 figure 146).
    pub enum Notice(u8) {
        /// Read the Changed Namespace List.
        NAMESPACE_ATTRIBUTE_CHANGED = 0x00,
        /// Firmware is being activated.
        FIRMWARE_ACTIVATION_STARTING = 0x01,
        /// Read the ANA log page.
        ASYMMETRIC_NAMESPACE_ACCESS_CHANGE = 0x03,
        /// Read the discovery log page.
        DISCOVERY_LOG_PAGE_CHANGE = 0xf0,
    }
}

/// Encodes the result of an Asynchronous Event Request: event type, event information, and the log
/// page to read.
#[must_use]
pub const fn event(kind: EventType, information: u8, log_page: u8) -> u32 {
    (log_page as u32) << 16 | (information as u32) << 8 | (kind.0 & 7) as u32
}
