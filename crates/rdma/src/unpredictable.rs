//! Random numbers that cannot be predicted without their seed.

use chacha20::ChaCha20Rng;
use rand_core::{Rng, SeedableRng};

/// The keystream of ChaCha20. Each registration draws two numbers, so they have to cost little.
pub(crate) struct UnpredictableNumbers(ChaCha20Rng);

impl UnpredictableNumbers {
    pub(crate) fn new(seed: [u8; 32]) -> UnpredictableNumbers {
        UnpredictableNumbers(ChaCha20Rng::from_seed(seed))
    }

    #[inline]
    pub(crate) fn next(&mut self) -> u32 {
        self.0.next_u32()
    }
}
