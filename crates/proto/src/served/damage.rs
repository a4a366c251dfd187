//! Blocks that somebody has said are lost (Write Uncorrectable): reading one fails, whoever reads by whatever protocol,
//! until it is written again.
//!
//! They are known as long as the volume is served. I/O looks at one number that hardly ever changes.

use super::Served;
use blockmux_volume::{Io, IoError, Op};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The lost ranges of a volume.
#[derive(Default)]
pub(super) struct Damage {
    count: AtomicUsize,
    /// Offsets and ends in bytes; in order, and neither overlapping nor touching.
    ranges: Mutex<Vec<(u64, u64)>>,
}

impl Served {
    /// The range is lost until it is written. Answers whether it could be noted: there are at most [`MAX_DAMAGED`].
    pub(crate) fn damage(&self, offset: u64, len: u64) -> bool {
        self.damage.change(|ranges| {
            let mut new = (offset, offset.saturating_add(len));
            let mut all: Vec<_> = ranges.iter().copied().filter(|range| !absorbs(&mut new, *range)).collect();
            let place = all.partition_point(|range| range.0 < new.0);
            all.insert(place, new);
            let fits = all.len() <= MAX_DAMAGED;
            if fits {
                *ranges = all;
            }
            fits
        })
    }

    /// Whether an I/O that begins may: a read of what is lost may not, and what writes it makes it good again.
    ///
    /// # Errors
    /// [`IoError::Medium`].
    #[inline]
    pub fn check(&self, io: &Io) -> Result<(), IoError> {
        if self.damage.count.load(Ordering::Acquire) == 0 { Ok(()) } else { self.damage.check(io) }
    }
}

impl Damage {
    #[cold]
    fn check(&self, io: &Io) -> Result<(), IoError> {
        let range = (io.offset, io.offset.saturating_add(io.len));
        let overlaps = |other: &(u64, u64)| other.0 < range.1 && range.0 < other.1;
        if io.op.is_write() {
            self.change(|ranges| {
                let cut = |old: &(u64, u64)| [(old.0, old.1.min(range.0)), (old.0.max(range.1), old.1)];
                let left =
                    ranges.iter().flat_map(|old| if overlaps(old) { cut(old) } else { [*old, (0, 0)] });
                let left: Vec<_> = left.filter(|rest| rest.0 < rest.1).collect();
                // A write in the middle of one makes two, and one too many is not worth a failed write.
                *ranges = left;
            });
            return Ok(());
        }
        let ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        if io.op == Op::Read && ranges.iter().any(overlaps) { Err(IoError::Medium) } else { Ok(()) }
    }

    fn change<R>(&self, change: impl FnOnce(&mut Vec<(u64, u64)>) -> R) -> R {
        let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut ranges);
        // Each write in the middle of a range makes one more: what is beyond the bound is forgotten.
        ranges.truncate(MOST_KEPT);
        self.count.store(ranges.len(), Ordering::Release);
        result
    }
}

/// Makes `new` hold `old`, too, if they overlap or touch; answers whether it did.
fn absorbs(new: &mut (u64, u64), old: (u64, u64)) -> bool {
    let touches = old.0 <= new.1 && new.0 <= old.1;
    if touches {
        *new = (new.0.min(old.0), new.1.max(old.1));
    }
    touches
}

/// Lost ranges of one volume that hosts can make.
pub(crate) const MAX_DAMAGED: usize = 256;
/// With those that writes in their middle have made.
const MOST_KEPT: usize = 2 * MAX_DAMAGED;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::{MemVolume, Tag};
    use std::sync::Arc;

    fn io(op: Op, offset: u64, len: u64) -> Io {
        Io::new(Tag(0), op, offset, len)
    }

    #[test]
    fn what_is_lost_cannot_be_read_until_it_is_written() {
        let served = Served::new(Arc::new(MemVolume::new(1 << 20)));
        let reads = |offset, len| served.check(&io(Op::Read, offset, len)).is_ok();
        assert!(reads(0, 1 << 20));
        assert!(served.damage(4096, 4096) && served.damage(8192, 4096));
        assert!(reads(0, 4096) && reads(12288, 512));
        assert!(!reads(4095, 2) && !reads(12287, 1) && !reads(0, 1 << 20));
        let zeroes = Op::WriteZeroes { fua: false, may_unmap: false, only_fast: false };
        for (op, offset) in [(Op::Write { fua: false }, 6144), (zeroes, 10240)] {
            served.check(&io(op, offset, 1024)).unwrap();
            assert!(reads(offset, 1024) && !reads(offset - 1, 1025) && !reads(offset, 1025));
        }
        served.check(&io(Op::Discard { fua: false }, 0, 1 << 20)).unwrap();
        assert!(reads(0, 1 << 20));
        assert_eq!(served.damage.count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn there_are_only_so_many_lost_ranges() {
        let served = Served::new(Arc::new(MemVolume::new(1 << 20)));
        for nth in 0..MAX_DAMAGED as u64 {
            assert!(served.damage(nth * 1024, 512));
        }
        assert!(!served.damage(1 << 19, 512), "one too many");
        assert!(served.damage(0, 2048), "what joins others is none more");
        assert!(served.check(&io(Op::Read, 1 << 19, 512)).is_ok());
    }
}
