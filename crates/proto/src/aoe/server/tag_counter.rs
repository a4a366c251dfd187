//! Detects initiators whose tags contain a counter, and orders their commands by it.
//!
//! ```text
//!   Linux:  0 │ frames that were sent to the disk, 15 bits │ clock, 16 bits
//! ```
//! The standard leaves the contents of tags to the initiator. The counter is trusted only after
//! [`TRUSTED_AFTER`] consecutive commands whose counters increased by a small step each, since some
//! commands are lost and some use another interface.

/// Observes the tags of one initiator for one disk.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TagCounter {
    /// The latest counter.
    last: u16,
    /// Number of consecutive commands in sequence.
    consecutive: u16,
    /// Number of commands out of sequence since the last one in sequence.
    outliers: u16,
}

impl TagCounter {
    /// Records the tag of a command.
    #[inline]
    pub(super) fn on_tag(&mut self, tag: u32) {
        let Some(count) = count_of(tag) else {
            *self = TagCounter::default();
            return;
        };
        if (1..=MAX_GAP).contains(&after(count, self.last)) {
            *self = TagCounter { last: count, consecutive: self.consecutive.saturating_add(1), outliers: 0 };
            return;
        }
        // A late command does not end the sequence.
        self.outliers = self.outliers.saturating_add(1);
        if self.outliers > MAX_OUTLIERS || !self.is_trusted() {
            *self = TagCounter { last: count, consecutive: 0, outliers: 0 };
        }
    }

    /// Whether the tags contain a counter.
    #[inline]
    pub(super) fn is_trusted(&self) -> bool {
        self.consecutive >= TRUSTED_AFTER
    }

    /// Whether `first` was sent before `second`; `false` if the tags are not trusted.
    pub(super) fn is_before(&self, first: u32, second: u32) -> bool {
        let Some((first, second)) = count_of(first).zip(count_of(second)) else { return false };
        self.is_trusted() && (1..HALF).contains(&after(second, first))
    }
}

/// The counter in a tag of Linux.
fn count_of(tag: u32) -> Option<u16> {
    let count = (tag >> 16) as u16;
    (count < ROUND).then_some(count)
}

/// The distance from `first` to `second`, modulo the counter's range.
fn after(second: u16, first: u16) -> u16 {
    second.wrapping_sub(first) % ROUND
}

const ROUND: u16 = 1 << 15;
const HALF: u16 = ROUND / 2;
/// Number of consecutive commands in sequence after which the tags are trusted.
const TRUSTED_AFTER: u16 = 64;
/// The maximum step between two consecutive commands.
const MAX_GAP: u16 = 64;
/// The maximum number of outliers; more start another sequence.
const MAX_OUTLIERS: u16 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(count: u32) -> u32 {
        (count % 0x8000) << 16 | count.wrapping_mul(7) & 0xffff
    }

    #[test]
    fn tags_that_count_are_known_after_a_while_and_put_in_order() {
        let mut count = TagCounter::default();
        (1..TRUSTED_AFTER.into()).for_each(|n| count.on_tag(tag(n)));
        assert!(!count.is_trusted() && !count.is_before(tag(3), tag(4)));
        count.on_tag(tag(TRUSTED_AFTER.into()));
        assert!(count.is_before(tag(3), tag(4)) && !count.is_before(tag(4), tag(3)));
        assert!(!count.is_before(tag(4), tag(4)));
        assert!(count.is_before(tag(0x7ff0), tag(0x8010)), "across the round");
    }

    #[test]
    fn lost_and_late_commands_do_not_change_the_counter() {
        let mut count = TagCounter::default();
        (1..200).filter(|n| n % 3 > 0).for_each(|n| count.on_tag(tag(n)));
        count.on_tag(tag(50));
        count.on_tag(tag(200));
        assert!(count.is_trusted());
        (0..=u32::from(MAX_OUTLIERS)).for_each(|n| count.on_tag(tag(9000 + 100 * n)));
        assert!(!count.is_trusted(), "it begins another row");
        (0..200).for_each(|n| count.on_tag(tag(20_000 + n)));
        assert!(count.is_trusted());
        count.on_tag(0xffff_ffff);
        assert!(!count.is_trusted(), "no tag of Linux");
    }

    #[test]
    fn tags_that_stay_or_jump_do_not_count() {
        for step in [0, 65, 1000, 0x7fff] {
            let mut count = TagCounter::default();
            (0..1000u32).for_each(|n| count.on_tag(tag(n * step)));
            assert!(!count.is_trusted(), "steps of {step}");
        }
    }
}
