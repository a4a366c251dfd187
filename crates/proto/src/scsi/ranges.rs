//! Ranges of a logical unit that one task has for itself: COMPARE AND WRITE, ORWRITE and WRITE ATOMIC read and write
//! as one.
//!
//! Commands that lock wait for each other. A READ or WRITE waits for the locks that are held when it starts; it looks
//! whether there are any at the price of one atomic load.

use super::unit::LogicalUnit;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The locked ranges of a logical unit.
#[derive(Default)]
pub(super) struct Ranges {
    /// How many there are.
    count: AtomicUsize,
    held: Mutex<Vec<(u64, u64)>>,
}

/// Keeps a range locked until it is dropped.
pub(super) struct RangeGuard {
    unit: Arc<LogicalUnit>,
    range: (u64, u64),
}

impl Ranges {
    /// Whether a byte of the range is locked.
    #[inline]
    pub(super) fn is_locked(&self, offset: u64, len: u64) -> bool {
        self.count.load(Ordering::Acquire) != 0 && self.overlaps(offset, len)
    }

    fn overlaps(&self, offset: u64, len: u64) -> bool {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.iter().any(|&range| is_overlap(range, (offset, len)))
    }
}

impl RangeGuard {
    /// Locks the range, if no byte of it is locked.
    pub(super) fn lock(unit: &Arc<LogicalUnit>, offset: u64, len: u64) -> Option<RangeGuard> {
        let range = (offset, len);
        let mut held = unit.ranges.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.iter().any(|&other| is_overlap(other, range)) {
            return None;
        }
        held.push(range);
        unit.ranges.count.store(held.len(), Ordering::Release);
        Some(RangeGuard { unit: unit.clone(), range })
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        let ranges = &self.unit.ranges;
        let mut held = ranges.held.lock().unwrap_or_else(PoisonError::into_inner);
        // Held ranges do not overlap, so equal ones are the same.
        if let Some(place) = held.iter().position(|&range| range == self.range) {
            held.swap_remove(place);
        }
        ranges.count.store(held.len(), Ordering::Release);
    }
}

fn is_overlap(a: (u64, u64), b: (u64, u64)) -> bool {
    a.0 < b.0.saturating_add(b.1) && b.0 < a.0.saturating_add(a.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scsi::Identity;
    use blockmux_volume::MemVolume;

    #[test]
    fn a_locked_range_keeps_others_out_until_it_is_dropped() {
        let unit = LogicalUnit::new(Identity::of("a"), Arc::new(MemVolume::new(1 << 20)));
        let first = RangeGuard::lock(&unit, 512, 512).unwrap();
        assert!(RangeGuard::lock(&unit, 0, 513).is_none());
        let second = RangeGuard::lock(&unit, 1024, 512).unwrap();
        assert!(unit.ranges.is_locked(1023, 1) && unit.ranges.is_locked(1535, 1));
        assert!(!unit.ranges.is_locked(0, 512) && !unit.ranges.is_locked(1536, 4096));
        drop(first);
        assert!(!unit.ranges.is_locked(512, 512) && unit.ranges.is_locked(512, 513));
        drop(second);
        assert!(!unit.ranges.is_locked(0, 1 << 20));
    }
}
