//! Which statuses of a connection have come (RFC 7143 §4.2.2.2, §7.9).
//!
//! Every response of a target has the next StatSN. Where one comes damaged, its number is missing
//! until it was sent again; what came after it counts meanwhile, but is acknowledged only up to the
//! first that is missing.

/// The statuses of a connection.
#[derive(Debug)]
pub(super) struct Statuses {
    /// The number after the last.
    next: u32,
    /// Numbers before that that have not come, at most [`MAX_MISSING`].
    missing: Vec<u32>,
    /// Some were missing at the last tick.
    is_overdue: bool,
}

/// What a status that comes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StatusArrival {
    /// To be looked at.
    Fresh,
    /// To be looked at, but so many before it, from that number on, have not come.
    Gap { first: u32, count: u32 },
    /// It came before.
    Again,
    /// So many are missing that they cannot all be asked for.
    TooFar,
}

impl Statuses {
    pub(super) fn from(next: u32) -> Statuses {
        Statuses { next, missing: Vec::new(), is_overdue: false }
    }

    /// ExpStatSN.
    #[inline]
    pub(super) fn expected(&self) -> u32 {
        if self.missing.is_empty() { self.next } else { self.first_missing() }
    }

    /// The number after the last.
    #[inline]
    pub(super) fn next(&self) -> u32 {
        self.next
    }

    /// A status has come, and all before it count: at error recovery level 0.
    #[inline]
    pub(super) fn acknowledge(&mut self, stat_sn: u32) {
        self.next = stat_sn.wrapping_add(1);
    }

    /// A status has come.
    #[inline]
    pub(super) fn on_status(&mut self, stat_sn: u32) -> StatusArrival {
        if stat_sn == self.next {
            self.next = stat_sn.wrapping_add(1);
            return StatusArrival::Fresh;
        }
        let ahead = stat_sn.wrapping_sub(self.next);
        if ahead < SERIAL_HALF {
            let first = self.next;
            if !self.miss_up_to(stat_sn) {
                return StatusArrival::TooFar;
            }
            self.next = stat_sn.wrapping_add(1);
            return StatusArrival::Gap { first, count: ahead };
        }
        match self.missing.iter().position(|missing| *missing == stat_sn) {
            Some(place) => {
                self.missing.swap_remove(place);
                StatusArrival::Fresh
            }
            None => StatusArrival::Again,
        }
    }

    /// A status is not to be counted: it, or what belongs to it, came damaged. Whether it can still
    /// be asked for.
    pub(super) fn miss(&mut self, stat_sn: u32) -> bool {
        if stat_sn.wrapping_sub(self.next) < SERIAL_HALF {
            return self.miss_up_to(stat_sn.wrapping_add(1));
        }
        if !self.missing.contains(&stat_sn) {
            self.missing.push(stat_sn);
        }
        self.missing.len() <= MAX_MISSING
    }

    /// A while has passed: what is missing for the first time at such a time is to be asked for
    /// once more. An error if that was done before.
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
        // The furthest behind the next.
        let behind = |missing: &&u32| self.next.wrapping_sub(**missing);
        self.missing.iter().max_by_key(behind).copied().unwrap_or(self.next)
    }
}

/// Statuses of one connection that may be missing.
const MAX_MISSING: usize = 64;
/// Serial numbers further apart than this are behind each other (RFC 1982).
const SERIAL_HALF: u32 = 1 << 31;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_in_order_is_acknowledged() {
        let mut statuses = Statuses::from(u32::MAX);
        assert_eq!(statuses.on_status(u32::MAX), StatusArrival::Fresh);
        assert_eq!((statuses.on_status(0), statuses.expected()), (StatusArrival::Fresh, 1));
        assert_eq!(statuses.on_status(0), StatusArrival::Again);
    }

    #[test]
    fn nothing_after_a_gap_is_acknowledged_until_it_is_filled() {
        let mut statuses = Statuses::from(u32::MAX);
        assert_eq!(statuses.on_status(1), StatusArrival::Gap { first: u32::MAX, count: 2 });
        assert_eq!((statuses.expected(), statuses.next()), (u32::MAX, 2));
        assert_eq!(statuses.on_status(0), StatusArrival::Fresh);
        assert_eq!(statuses.expected(), u32::MAX);
        assert_eq!(statuses.on_status(u32::MAX), StatusArrival::Fresh);
        assert_eq!((statuses.expected(), statuses.on_status(u32::MAX)), (2, StatusArrival::Again));
        assert!(statuses.miss(4) && statuses.miss(3));
        assert_eq!((statuses.expected(), statuses.next()), (2, 5));
    }

    #[test]
    fn gaps_are_bounded() {
        let mut statuses = Statuses::from(7);
        assert_eq!(statuses.on_status(7 + 65), StatusArrival::TooFar);
        assert!(!statuses.miss(7 + 64) && statuses.miss(7 + 63));
        assert_eq!(statuses.on_tick().map(<[u32]>::len), Ok(64));
        assert!(statuses.on_tick().is_err());
        assert_eq!(Statuses::from(1).on_tick(), Ok(&[][..]));
    }
}
