//! Whether an initiator's tags count what it sends to a disk, and which of two was sent first.
//!
//! ```text
//!   Linux:  0 │ frames that were sent to the disk, 15 bits │ clock, 16 bits
//! ```
//! The standard leaves tags to initiators, so that they are taken for counts only of one that was
//! seen to count, as long as it does: [`TRUSTED`] commands in a row that were each a little after
//! the one before, for some are lost and others go by another interface.

/// The tags of one initiator for one disk.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Count {
    /// The latest.
    last: u16,
    /// How many came in a row.
    run: u16,
    /// How many came out of it, since one came in it.
    strays: u16,
}

impl Count {
    /// A command has come.
    #[inline]
    pub(super) fn on_tag(&mut self, tag: u32) {
        let Some(count) = count_of(tag) else {
            *self = Count::default();
            return;
        };
        if (1..=MOST_MISSING).contains(&after(count, self.last)) {
            *self = Count { last: count, run: self.run.saturating_add(1), strays: 0 };
            return;
        }
        // One that is late leaves the others in their order.
        self.strays = self.strays.saturating_add(1);
        if self.strays > MOST_STRAYS || !self.is_trusted() {
            *self = Count { last: count, run: 0, strays: 0 };
        }
    }

    /// Whether these are counts.
    #[inline]
    pub(super) fn is_trusted(&self) -> bool {
        self.run >= TRUSTED
    }

    /// Whether the first was sent before the second; never, unless these are counts.
    pub(super) fn is_before(&self, first: u32, second: u32) -> bool {
        let Some((first, second)) = count_of(first).zip(count_of(second)) else { return false };
        self.is_trusted() && (1..HALF).contains(&after(second, first))
    }
}

/// What a tag of Linux counts.
fn count_of(tag: u32) -> Option<u16> {
    let count = (tag >> 16) as u16;
    (count < ROUND).then_some(count)
}

/// How far `second` is after `first`, going round.
fn after(second: u16, first: u16) -> u16 {
    second.wrapping_sub(first) % ROUND
}

const ROUND: u16 = 1 << 15;
const HALF: u16 = ROUND / 2;
/// Commands in a row until they are taken for counted.
const TRUSTED: u16 = 64;
/// Between two of a row.
const MOST_MISSING: u16 = 64;
/// More are another row.
const MOST_STRAYS: u16 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(count: u32) -> u32 {
        (count % 0x8000) << 16 | count.wrapping_mul(7) & 0xffff
    }

    #[test]
    fn tags_that_count_are_known_after_a_while_and_put_in_order() {
        let mut count = Count::default();
        (1..TRUSTED.into()).for_each(|n| count.on_tag(tag(n)));
        assert!(!count.is_trusted() && !count.is_before(tag(3), tag(4)));
        count.on_tag(tag(TRUSTED.into()));
        assert!(count.is_before(tag(3), tag(4)) && !count.is_before(tag(4), tag(3)));
        assert!(!count.is_before(tag(4), tag(4)));
        assert!(count.is_before(tag(0x7ff0), tag(0x8010)), "across the round");
    }

    #[test]
    fn what_is_lost_or_late_leaves_the_count_as_it_is() {
        let mut count = Count::default();
        (1..200).filter(|n| n % 3 > 0).for_each(|n| count.on_tag(tag(n)));
        count.on_tag(tag(50));
        count.on_tag(tag(200));
        assert!(count.is_trusted());
        (0..=u32::from(MOST_STRAYS)).for_each(|n| count.on_tag(tag(9000 + 100 * n)));
        assert!(!count.is_trusted(), "it begins another row");
        (0..200).for_each(|n| count.on_tag(tag(20_000 + n)));
        assert!(count.is_trusted());
        count.on_tag(0xffff_ffff);
        assert!(!count.is_trusted(), "no tag of Linux");
    }

    #[test]
    fn tags_that_stay_or_jump_do_not_count() {
        for step in [0, 65, 1000, 0x7fff] {
            let mut count = Count::default();
            (0..1000u32).for_each(|n| count.on_tag(tag(n * step)));
            assert!(!count.is_trusted(), "steps of {step}");
        }
    }
}
