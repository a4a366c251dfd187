//! Tracks which StatSNs of a connection have arrived (RFC 7143 §4.2.2.2, §7.9).
//!
//! The number of a damaged response is missing until it is retransmitted. Later responses are
//! processed meanwhile, but ExpStatSN stops at the first missing number.

/// Received StatSNs of a connection.
#[derive(Debug)]
pub(super) struct ReceivedStatuses {
    /// The StatSN after the last one.
    next: u32,
    /// Missing StatSNs before `next`, at most [`MAX_MISSING`].
    missing: Vec<u32>,
    /// Some StatSNs were missing at the last tick.
    is_overdue: bool,
}

/// The result of a received StatSN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StatusArrival {
    /// To be processed.
    New,
    /// To be processed; `count` StatSNs from `first` on are missing before it.
    Gap { first: u32, count: u32 },
    /// A duplicate.
    Duplicate,
    /// More StatSNs are missing than can be requested again.
    TooManyMissing,
}

impl ReceivedStatuses {
    pub(super) fn from(next: u32) -> ReceivedStatuses {
        ReceivedStatuses { next, missing: Vec::new(), is_overdue: false }
    }

    /// ExpStatSN for the next request.
    #[inline]
    pub(super) fn expected(&self) -> u32 {
        if self.missing.is_empty() { self.next } else { self.first_missing() }
    }

    /// The StatSN after the last one.
    #[inline]
    pub(super) fn next(&self) -> u32 {
        self.next
    }

    /// Records a StatSN and everything before it, at error recovery level 0.
    #[inline]
    pub(super) fn acknowledge(&mut self, stat_sn: u32) {
        self.next = stat_sn.wrapping_add(1);
    }

    /// Records a StatSN.
    #[inline]
    pub(super) fn on_status(&mut self, stat_sn: u32) -> StatusArrival {
        if stat_sn == self.next {
            self.next = stat_sn.wrapping_add(1);
            return StatusArrival::New;
        }
        let ahead = stat_sn.wrapping_sub(self.next);
        if ahead < SERIAL_HALF {
            let first = self.next;
            if !self.miss_up_to(stat_sn) {
                return StatusArrival::TooManyMissing;
            }
            self.next = stat_sn.wrapping_add(1);
            return StatusArrival::Gap { first, count: ahead };
        }
        match self.missing.iter().position(|missing| *missing == stat_sn) {
            Some(place) => {
                self.missing.swap_remove(place);
                StatusArrival::New
            }
            None => StatusArrival::Duplicate,
        }
    }

    /// Marks a StatSN as missing because it or its data was damaged; `false` if too many are
    /// missing.
    pub(super) fn miss(&mut self, stat_sn: u32) -> bool {
        if stat_sn.wrapping_sub(self.next) < SERIAL_HALF {
            return self.miss_up_to(stat_sn.wrapping_add(1));
        }
        if !self.missing.contains(&stat_sn) {
            self.missing.push(stat_sn);
        }
        self.missing.len() <= MAX_MISSING
    }

    /// Handles a tick: returns the missing StatSNs to request again, or an error if some were
    /// already missing at the last tick.
    pub(super) fn on_tick(&mut self) -> Result<&[u32], ()> {
        if std::mem::replace(&mut self.is_overdue, !self.missing.is_empty()) && !self.missing.is_empty() {
            return Err(());
        }
        Ok(&self.missing)
    }

    fn miss_up_to(&mut self, end: u32) -> bool {
        let count = end.wrapping_sub(self.next) as usize;
        if count.saturating_add(self.missing.len()) > MAX_MISSING {
            return false;
        }
        while self.next != end {
            self.missing.push(self.next);
            self.next = self.next.wrapping_add(1);
        }
        true
    }

    fn first_missing(&self) -> u32 {
        // The missing StatSN with the largest distance to `next`.
        let behind = |missing: &&u32| self.next.wrapping_sub(**missing);
        self.missing.iter().max_by_key(behind).copied().unwrap_or(self.next)
    }
}

/// Maximum number of missing StatSNs of a connection.
const MAX_MISSING: usize = 64;
/// Half of the serial number space (RFC 1982): larger distances count as behind.
const SERIAL_HALF: u32 = 1 << 31;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_in_order_are_acknowledged() {
        let mut statuses = ReceivedStatuses::from(u32::MAX);
        assert_eq!(statuses.on_status(u32::MAX), StatusArrival::New);
        assert_eq!((statuses.on_status(0), statuses.expected()), (StatusArrival::New, 1));
        assert_eq!(statuses.on_status(0), StatusArrival::Duplicate);
    }

    #[test]
    fn nothing_after_a_gap_is_acknowledged_until_it_is_filled() {
        let mut statuses = ReceivedStatuses::from(u32::MAX);
        assert_eq!(statuses.on_status(1), StatusArrival::Gap { first: u32::MAX, count: 2 });
        assert_eq!((statuses.expected(), statuses.next()), (u32::MAX, 2));
        assert_eq!(statuses.on_status(0), StatusArrival::New);
        assert_eq!(statuses.expected(), u32::MAX);
        assert_eq!(statuses.on_status(u32::MAX), StatusArrival::New);
        assert_eq!((statuses.expected(), statuses.on_status(u32::MAX)), (2, StatusArrival::Duplicate));
        assert!(statuses.miss(4) && statuses.miss(3));
        assert_eq!((statuses.expected(), statuses.next()), (2, 5));
    }

    #[test]
    fn gaps_are_bounded() {
        let mut statuses = ReceivedStatuses::from(7);
        assert_eq!(statuses.on_status(7 + 65), StatusArrival::TooManyMissing);
        assert!(!statuses.miss(7 + 64) && statuses.miss(7 + 63));
        assert_eq!(statuses.on_tick().map(<[u32]>::len), Ok(64));
        assert!(statuses.on_tick().is_err());
        assert_eq!(ReceivedStatuses::from(1).on_tick(), Ok(&[][..]));
    }
}
