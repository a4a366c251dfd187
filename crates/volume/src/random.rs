//! Repeatable randomness for injected faults, simulations and the conformance suite.

/// SplitMix64, a random number generator: every seed is good, and the numbers are the same on every
/// machine.
#[derive(Clone)]
pub struct SplitMix(u64);

impl SplitMix {
    /// A sequence that depends on the seed alone.
    #[must_use]
    pub fn new(seed: u64) -> SplitMix {
        SplitMix(seed)
    }

    /// The next number.
    #[expect(clippy::should_implement_trait, reason = "the sequence has no end, so `Iterator` does not fit")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

/// Spreads the bits of `value` over all bits of the result.
#[must_use]
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_of_seed_0_is_the_published_one() {
        let mut random = SplitMix::new(0);
        assert_eq!((random.next(), random.next()), (0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4));
    }

    #[test]
    fn numbers_stay_below_their_bound_and_reach_its_end() {
        let mut random = SplitMix::new(7);
        let numbers: Vec<_> = (0..200).map(|_| random.below(5)).collect();
        assert_eq!((numbers.iter().min(), numbers.iter().max()), (Some(&0), Some(&4)));
    }
}
