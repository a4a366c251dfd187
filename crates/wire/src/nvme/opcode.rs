//! Operation codes (Base 2.0 figures 138 and 390; NVM Command Set 1.0 figure 18).

use crate::open_enum::open_enum;

open_enum! {
    /// Commands of the admin queue.
    pub enum AdminOpcode(u8) {
        /// Get Log Page: [`super::log`].
        GET_LOG_PAGE = 0x02,
        /// Identify: [`super::identify`].
        IDENTIFY = 0x06,
        /// Abort.
        ABORT = 0x08,
        /// Set Features: [`super::feature`].
        SET_FEATURES = 0x09,
        /// Get Features.
        GET_FEATURES = 0x0a,
        /// Asynchronous Event Request.
        ASYNC_EVENT_REQUEST = 0x0c,
        /// Namespace Management.
        NAMESPACE_MANAGEMENT = 0x0d,
        /// Firmware Commit.
        FIRMWARE_COMMIT = 0x10,
        /// Firmware Image Download.
        FIRMWARE_IMAGE_DOWNLOAD = 0x11,
        /// Device Self-test.
        DEVICE_SELF_TEST = 0x14,
        /// Namespace Attachment.
        NAMESPACE_ATTACHMENT = 0x15,
        /// Keep Alive.
        KEEP_ALIVE = 0x18,
        /// Directive Send.
        DIRECTIVE_SEND = 0x19,
        /// Directive Receive.
        DIRECTIVE_RECEIVE = 0x1a,
        /// Fabrics commands: [`crate::nvmeof::fabrics`].
        FABRICS = 0x7f,
        /// Format NVM.
        FORMAT_NVM = 0x80,
        /// Security Send.
        SECURITY_SEND = 0x81,
        /// Security Receive.
        SECURITY_RECEIVE = 0x82,
        /// Sanitize.
        SANITIZE = 0x84,
        /// Get LBA Status.
        GET_LBA_STATUS = 0x86,
    }

    /// Commands of I/O queues with the NVM Command Set.
    pub enum NvmOpcode(u8) {
        /// Flush.
        FLUSH = 0x00,
        /// Write.
        WRITE = 0x01,
        /// Read.
        READ = 0x02,
        /// Write Uncorrectable.
        WRITE_UNCORRECTABLE = 0x04,
        /// Compare.
        COMPARE = 0x05,
        /// Write Zeroes.
        WRITE_ZEROES = 0x08,
        /// Dataset Management.
        DATASET_MANAGEMENT = 0x09,
        /// Verify.
        VERIFY = 0x0c,
        /// Reservation Register: [`super::reservation`].
        RESERVATION_REGISTER = 0x0d,
        /// Reservation Report.
        RESERVATION_REPORT = 0x0e,
        /// Reservation Acquire.
        RESERVATION_ACQUIRE = 0x11,
        /// Reservation Release.
        RESERVATION_RELEASE = 0x15,
        /// Copy.
        COPY = 0x19,
        /// Fabrics commands: [`crate::nvmeof::fabrics`].
        FABRICS = 0x7f,
    }
}

/// Direction of a command's data: the low two bits of its opcode (Base 2.0 figure 86).
#[inline]
#[must_use]
pub const fn transfer(opcode: u8) -> Transfer {
    match opcode & 3 {
        0 => Transfer::None,
        1 => Transfer::HostToController,
        2 => Transfer::ControllerToHost,
        _ => Transfer::Both,
    }
}

/// Direction of a data transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// No data.
    None,
    /// From host to controller, for example Write.
    HostToController,
    /// From controller to host, for example Read.
    ControllerToHost,
    /// Bidirectional; not used over fabrics.
    Both,
}
