//! Random numbers that cannot be predicted without their seed.

use sha2::{Digest, Sha256};

/// SHA-256 of the seed and a counter, eight numbers for each hash.
pub(crate) struct UnpredictableNumbers {
    seed: [u8; 32],
    counter: u64,
    drawn: [u32; 8],
    left: usize,
}

impl UnpredictableNumbers {
    pub(crate) fn new(seed: [u8; 32]) -> UnpredictableNumbers {
        UnpredictableNumbers { seed, counter: 0, drawn: [0; 8], left: 0 }
    }

    #[inline]
    pub(crate) fn next(&mut self) -> u32 {
        if self.left == 0 {
            self.fill();
        }
        self.left = self.left.saturating_sub(1);
        self.drawn.get(self.left).copied().unwrap_or_default()
    }

    fn fill(&mut self) {
        self.counter = self.counter.wrapping_add(1);
        let block = Sha256::new().chain_update(self.seed).chain_update(self.counter.to_le_bytes()).finalize();
        let (words, _) = block.as_chunks::<4>();
        for (drawn, word) in self.drawn.iter_mut().zip(words) {
            *drawn = u32::from_le_bytes(*word);
        }
        self.left = self.drawn.len();
    }
}
