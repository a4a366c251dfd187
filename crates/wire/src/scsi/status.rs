//! Status codes (SAM-5 §5.3.1) and task management functions (SAM-5 §7).

use crate::open_enum::open_enum;

open_enum! {
    /// How a command ended.
    pub enum ScsiStatus(u8) {
        /// Done.
        GOOD = 0x00,
        /// Sense data tell what happened.
        CHECK_CONDITION = 0x02,
        /// PRE-FETCH: everything fits into the cache.
        CONDITION_MET = 0x04,
        /// Try again later.
        BUSY = 0x08,
        /// Another nexus holds a reservation.
        RESERVATION_CONFLICT = 0x18,
        /// The task set has no room.
        TASK_SET_FULL = 0x28,
        /// An auto contingent allegiance is in force.
        ACA_ACTIVE = 0x30,
        /// Aborted by another nexus.
        TASK_ABORTED = 0x40,
    }
}
