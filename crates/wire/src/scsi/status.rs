//! Status codes (SAM-5 §5.3.1) and task management functions (SAM-5 §7).

use crate::open_enum::open_enum;

open_enum! {
    /// Status of a command.
    pub enum ScsiStatus(u8) {
        /// The command completed successfully.
        GOOD = 0x00,
        /// Sense data describes the condition.
        CHECK_CONDITION = 0x02,
        /// PRE-FETCH: all blocks fit in the cache.
        CONDITION_MET = 0x04,
        /// The unit is busy; retry later.
        BUSY = 0x08,
        /// The command conflicts with a reservation.
        RESERVATION_CONFLICT = 0x18,
        /// The task set is full.
        TASK_SET_FULL = 0x28,
        /// An auto contingent allegiance exists.
        ACA_ACTIVE = 0x30,
        /// Aborted by another nexus.
        TASK_ABORTED = 0x40,
    }
}
