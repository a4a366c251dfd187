//! Generates offsets and operations: a few nanoseconds each, without allocation, repeatable by
//! seed.
//!
//! Sequential patterns start at the beginning of the range and wrap around at its end; in a mix,
//! reads and writes have separate positions, as in fio. Random patterns visit every block once in
//! each pass, in an order that differs between passes and workers; with `norandommap` each offset
//! is drawn independently. In a mix each I/O is a read with a probability of `rwmixread` percent.
//!
//! Verification needs no table of generations: a clone of the pattern, made at the start of a pass,
//! repeats which blocks that pass has written. They have its generation, all others the previous
//! one.

use crate::content::{STEP, mix};
use crate::job::{Job, Range, Rw};

/// The operation of one I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Discard.
    Trim,
}

/// One I/O of `bs` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatternIo {
    /// The operation.
    pub action: Action,
    /// Offset in bytes.
    pub offset: u64,
    /// Number of completed passes over the range. Each pass visits all blocks once, except with
    /// `norandommap`. A caller that verifies waits for I/O in flight when the number changes; `pass
    /// + 1` is the generation of its writes.
    pub pass: u64,
}

/// The endless sequence of one worker.
#[derive(Clone, Debug)]
pub struct Pattern {
    range: Range,
    bs: u64,
    /// The operation of all I/O; `None`: reads and writes mixed.
    action: Option<Action>,
    rwmixread: u64,
    order: Order,
    random: Random,
    /// Positions of reads and of everything else. A random mix uses the second for both.
    cursors: [Cursor; 2],
}

impl Pattern {
    /// The pattern of worker `worker` of `job` over `range`, which [`Job::range`] gives for it.
    ///
    /// # Panics
    /// If the range has no blocks.
    #[must_use]
    pub fn new(job: &Job, range: Range, worker: u32) -> Pattern {
        assert!(range.blocks > 0);
        let action = match job.rw {
            Rw::Read | Rw::RandRead => Some(Action::Read),
            Rw::Write | Rw::RandWrite => Some(Action::Write),
            Rw::Trim | Rw::RandTrim => Some(Action::Trim),
            Rw::ReadWrite | Rw::RandRw => None,
        };
        let seed = mix(job.randseed ^ mix(worker.into()));
        let order = if !job.rw.is_random() {
            Order::Sequential
        } else if job.norandommap {
            Order::Drawn
        } else {
            Order::Permuted(Permutation::new(range.blocks, seed))
        };
        Pattern {
            range,
            bs: job.bs.into(),
            action,
            rwmixread: job.rwmixread.into(),
            order,
            random: Random(mix(seed)),
            cursors: [Cursor::default(); 2],
        }
    }

    /// The next I/O.
    #[inline]
    pub fn next_step(&mut self) -> PatternIo {
        let action = self.action.unwrap_or_else(|| {
            let read = self.random.below(100) < self.rwmixread;
            if read { Action::Read } else { Action::Write }
        });
        let blocks = self.range.blocks;
        let (block, pass) = match &mut self.order {
            Order::Sequential => {
                let which = usize::from(action != Action::Read);
                self.cursors[which].advance(blocks)
            }
            Order::Drawn => {
                let (_, pass) = self.cursors[1].advance(blocks);
                (self.random.below(blocks), pass)
            }
            Order::Permuted(permutation) => {
                let (place, pass) = self.cursors[1].advance(blocks);
                if place == 0 && pass > 0 {
                    permutation.rekey();
                }
                (permutation.at(place), pass)
            }
        };
        PatternIo { action, offset: self.range.offset + block * self.bs, pass }
    }

    /// Number of I/O in one pass.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.range.blocks
    }
}

#[derive(Clone, Debug)]
enum Order {
    Sequential,
    Drawn,
    Permuted(Permutation),
}

#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    index: u64,
    pass: u64,
}

impl Cursor {
    /// Returns the current position and pass, and advances.
    #[inline]
    fn advance(&mut self, blocks: u64) -> (u64, u64) {
        let now = (self.index, self.pass);
        self.index += 1;
        if self.index == blocks {
            *self = Cursor { index: 0, pass: self.pass + 1 };
        }
        now
    }
}

/// The numbers below `len` in a random order that depends on `seed`.
#[must_use]
pub fn shuffled(len: usize, seed: u64) -> Vec<usize> {
    let order = Permutation::new(len.max(1) as u64, seed);
    (0..len as u64).map(|place| order.at(place) as usize).collect()
}

/// A random permutation of the numbers below `len`.
///
/// It permutes the numbers below the next power of two by invertible steps (an odd factor, an
/// addition, an xor of high bits onto low ones), repeatedly until the result is below `len`, which
/// takes less than two rounds on average.
#[derive(Clone, Debug)]
struct Permutation {
    len: u64,
    mask: u64,
    shift: u32,
    seed: u64,
    /// Two factors and two summands.
    key: [u64; 4],
}

impl Permutation {
    fn new(len: u64, seed: u64) -> Permutation {
        let bits = u64::BITS - (len - 1).leading_zeros();
        let mask = if bits == 0 { 0 } else { u64::MAX >> (u64::BITS - bits) };
        let mut permutation = Permutation { len, mask, shift: bits / 2 + 1, seed, key: [0; 4] };
        permutation.rekey();
        permutation
    }

    /// Derives the next permutation.
    fn rekey(&mut self) {
        let mut random = Random(self.seed);
        self.key = std::array::from_fn(|_| random.next());
        self.key[0] |= 1;
        self.key[1] |= 1;
        self.seed = random.next();
    }

    #[inline]
    fn at(&self, index: u64) -> u64 {
        let mut x = index;
        loop {
            x = x.wrapping_mul(self.key[0]).wrapping_add(self.key[2]) & self.mask;
            x ^= x >> self.shift;
            x = x.wrapping_mul(self.key[1]).wrapping_add(self.key[3]) & self.mask;
            x ^= x >> self.shift;
            x = x.wrapping_mul(self.key[0]) & self.mask;
            x ^= x >> self.shift;
            if x < self.len {
                return x;
            }
        }
    }
}

/// SplitMix64: one addition and two multiplications for each number.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    #[inline]
    fn next(&mut self) -> u64 {
        let number = mix(self.0);
        self.0 = self.0.wrapping_add(STEP);
        number
    }

    /// A uniformly distributed number below `limit` (Lemire 2019: the high half of a product, drawn
    /// again in the rare case that the low half would cause a bias).
    #[inline]
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        loop {
            let product = u128::from(self.next()) * u128::from(limit);
            let low = product as u64;
            if low >= limit || low >= limit.wrapping_neg() % limit {
                return (product >> 64) as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::Verify;
    use crate::content::{Expect, Mismatch, Stamp, check, fill};
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn job(options: &[(&str, &str)]) -> Job {
        let mut job = Job::default();
        for (key, value) in options {
            job.set(key, value).unwrap();
        }
        job
    }

    fn pattern(options: &[(&str, &str)], blocks: u64, worker: u32) -> Pattern {
        Pattern::new(&job(options), Range { offset: 1 << 20, blocks }, worker)
    }

    fn blocks(pattern: &mut Pattern, count: usize) -> Vec<u64> {
        (0..count).map(|_| (pattern.next_step().offset - (1 << 20)) / 4096).collect()
    }

    #[test]
    fn sequential_offsets_start_over_at_the_end() {
        let mut reads = pattern(&[("rw", "read")], 3, 0);
        let steps: Vec<PatternIo> = (0..4).map(|_| reads.next_step()).collect();
        let step =
            |block: u64, pass| PatternIo { action: Action::Read, offset: (1 << 20) + block * 4096, pass };
        assert_eq!(steps, [step(0, 0), step(1, 0), step(2, 0), step(0, 1)]);
    }

    #[test]
    fn all_sequential_workers_have_the_same_offsets() {
        let [a, b] = [0, 1].map(|worker| blocks(&mut pattern(&[("rw", "write")], 8, worker), 16));
        assert_eq!(a, b);
    }

    #[test]
    fn sequential_reads_and_writes_of_a_mix_have_separate_positions() {
        let mut mixed = pattern(&[("rw", "rw")], 1000, 0);
        let mut next = [0, 0];
        for _ in 0..1000 {
            let step = mixed.next_step();
            let place = &mut next[usize::from(step.action == Action::Write)];
            assert_eq!(step.offset, (1 << 20) + *place * 4096);
            *place += 1;
        }
        assert!(next[0] > 0 && next[1] > 0);
    }

    #[test]
    fn a_mix_has_the_requested_share_of_reads() {
        for percent in [0_u32, 30, 70, 100] {
            let mut mixed = pattern(&[("rw", "randrw"), ("rwmixread", &percent.to_string())], 4096, 0);
            let reads = (0..100_000).filter(|_| mixed.next_step().action == Action::Read).count();
            let expected = percent as usize * 1000;
            assert!(
                reads.abs_diff(expected) <= if percent % 100 == 0 { 0 } else { 800 },
                "{percent}%: {reads}"
            );
        }
    }

    #[test]
    fn a_shuffle_has_every_number_once() {
        for len in [0, 1, 2, 13] {
            let mut numbers = shuffled(len, 7);
            numbers.sort_unstable();
            assert_eq!(numbers, (0..len).collect::<Vec<_>>());
        }
        assert_ne!(shuffled(13, 1), shuffled(13, 2));
    }

    #[test]
    fn each_random_pass_has_every_block_once_in_another_order() {
        for count in [1, 2, 3, 100, 1024, 1025] {
            let mut random = pattern(&[("rw", "randread")], count, 0);
            let first = blocks(&mut random, count as usize);
            let second = blocks(&mut random, count as usize);
            for pass in [&first, &second] {
                assert_eq!(pass.iter().collect::<HashSet<_>>().len() as u64, count);
            }
            assert!(count < 100 || first != second);
            assert_eq!(random.next_step().pass, 2);
        }
    }

    #[test]
    fn each_worker_and_seed_has_its_own_repeatable_order() {
        let run =
            |seed, worker| blocks(&mut pattern(&[("rw", "randread"), ("randseed", seed)], 4096, worker), 64);
        assert_eq!(run("1", 0), run("1", 0));
        assert_ne!(run("1", 0), run("1", 1));
        assert_ne!(run("1", 0), run("2", 0));
    }

    #[test]
    fn random_offsets_are_uniformly_distributed() {
        // 16 bins with 4096 expected hits each; the threshold has a probability of one in a million
        // at 15 degrees of freedom.
        for extra in [&[][..], &[("norandommap", "1")]] {
            for seed in ["1", "2", "3"] {
                let options = [&[("rw", "randread"), ("randseed", seed)], extra].concat();
                let mut random = pattern(&options, 1_000_000, 0);
                let mut bins = [0_f64; 16];
                for block in blocks(&mut random, 65536) {
                    bins[(block * 16 / 1_000_000) as usize] += 1.0;
                }
                let chi_square: f64 = bins.iter().map(|hits| (hits - 4096.0).powi(2) / 4096.0).sum();
                assert!(chi_square < 56.5, "{options:?}: {chi_square}");
            }
        }
    }

    #[test]
    fn consecutive_random_offsets_are_unrelated() {
        for extra in [&[][..], &[("norandommap", "1")]] {
            let options = [&[("rw", "randread")], extra].concat();
            let sample = blocks(&mut pattern(&options, 1 << 18, 0), 1 << 16);
            let steps: HashSet<u64> = sample.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
            let near = sample.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) <= 16).count();
            // By chance 8 of 65536 neighbours are this near, and equal differences are very rare.
            assert!(near < 64, "{near}");
            assert!(steps.len() > 40_000, "{}", steps.len());
        }
    }

    #[test]
    fn independent_draws_repeat_blocks_and_miss_some() {
        let mut drawn = pattern(&[("rw", "randwrite"), ("norandommap", "")], 1000, 0);
        let seen: HashSet<u64> = blocks(&mut drawn, 1000).into_iter().collect();
        // The expected share is 1 - 1/e.
        assert!((580..690).contains(&seen.len()), "{}", seen.len());
    }

    #[test]
    fn numbers_below_three_are_equally_likely() {
        let mut random = Random(1);
        let mut hits = [0_i32; 3];
        (0..30_000).for_each(|_| hits[random.below(3) as usize] += 1);
        assert!(hits.iter().all(|&hits| (hits - 10_000).abs() < 500), "{hits:?}");
    }

    /// Writes `passes` and a half to a model volume as a job does; returns its content, and the
    /// content expected by a clone of the pattern.
    fn written_and_expected(rw: &str, passes: u64) -> (Vec<Vec<u8>>, Vec<Expect>) {
        const BLOCKS: u64 = 100;
        let stamp = |offset, generation| Stamp { offset, generation, seed: 77 };
        let range = Range { offset: 0, blocks: BLOCKS };
        let mut pattern = Pattern::new(&job(&[("rw", rw), ("bs", "512")]), range, 0);
        let mut volume = vec![vec![0; 512]; BLOCKS as usize];
        let mut begin = pattern.clone();
        for i in 0..passes * BLOCKS + BLOCKS / 2 {
            if i % BLOCKS == 0 {
                begin = pattern.clone();
            }
            let step = pattern.next_step();
            assert_eq!((step.action, step.pass), (Action::Write, i / BLOCKS));
            let block = &mut volume[(step.offset / 512) as usize];
            fill(block, stamp(step.offset, step.pass + 1), Verify::Crc32c);
        }
        let mut expected: Vec<_> =
            (0..BLOCKS).map(|block| Expect::Stamp(stamp(block * 512, passes))).collect();
        for _ in 0..BLOCKS / 2 {
            let step = begin.next_step();
            expected[(step.offset / 512) as usize] = Expect::Stamp(stamp(step.offset, step.pass + 1));
        }
        (volume, expected)
    }

    #[test]
    fn a_clone_of_the_pattern_tells_the_content_after_overwriting_passes() {
        for rw in ["write", "randwrite"] {
            let (mut volume, expected) = written_and_expected(rw, 3);
            for (block, expected) in volume.iter().zip(&expected) {
                assert_eq!(check(block, *expected, Verify::Crc32c), Ok(()));
            }
            // A lost write of the last pass leaves a consistent but old block.
            let (earlier, _) = written_and_expected(rw, 2);
            let lost =
                expected.iter().position(|e| matches!(e, Expect::Stamp(s) if s.generation == 4)).unwrap();
            volume[lost].clone_from(&earlier[lost]);
            let error = check(&volume[lost], expected[lost], Verify::Crc32c);
            assert!(matches!(error, Err(Mismatch::Generation { expected: 4, .. })), "{error:?}");
        }
    }

    proptest! {
        #[test]
        fn every_length_is_permuted(len in 1_u64..5000, seed: u64) {
            let permutation = Permutation::new(len, seed);
            let seen: HashSet<u64> = (0..len).map(|place| permutation.at(place)).collect();
            prop_assert_eq!(seen.len() as u64, len);
            prop_assert!(seen.iter().all(|&block| block < len));
        }

        #[test]
        fn huge_ranges_stay_in_bounds(len in (u64::MAX >> 10)..=u64::MAX, seed: u64, index: u64) {
            prop_assert!(Permutation::new(len, seed).at(index % len) < len);
            prop_assert!(Random(seed).below(len) < len);
        }
    }
}
