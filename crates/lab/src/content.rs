//! The content of verified writes, and its check after a read.
//!
//! ```text
//!   0       4       8                16               24               32            len
//!   ┌───────┬───────┬────────────────┬────────────────┬────────────────┬──────────────┐
//!   │ magic │  crc  │     offset     │   generation   │      seed      │   pattern    │
//!   └───────┴───────┴────────────────┴────────────────┴────────────────┴──────────────┘
//! ```
//! All numbers are little-endian. The CRC-32C covers everything after itself. With
//! [`Verify::Pattern`] it is 0, and each word of the pattern is checked. The words follow from
//! offset, generation and seed, so both methods detect a block that was partly overwritten,
//! misplaced or lost.
//!
//! The generation is the number of times that the block has been written in this run. If an
//! acknowledged write was lost, the stale block is consistent in itself and only its generation is
//! wrong. So check the generation if it is known.

use blockmux_volume::Crc32c;
use serde::{Deserialize, Serialize};

/// Smallest block that can be verified, in bytes: header and one word of pattern.
pub const MIN_BLOCK: usize = HEAD + 8;

/// How written blocks are verified when read back, fio's `verify`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    /// A CRC-32C over each block, stored in its head.
    Crc32c,
    /// A pattern made from the block's own offset.
    Pattern,
}

/// The identity stored in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    /// Offset of the block, in bytes.
    pub offset: u64,
    /// Number of times that the block has been written, from 1.
    pub generation: u64,
    /// Identifies the run, so it must differ from run to run: a lost write would not be detected if
    /// an earlier run with the same seed left the same generation.
    pub seed: u64,
}

/// The expected identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Exactly this: the last writer is known.
    Stamp(Stamp),
    /// This offset, with any seed and generation: the volume was written before this run.
    Offset(u64),
}

/// The first error found in a block. Offsets are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// The block does not begin with the magic number.
    #[error("block at {offset} was never written by a verifying job, or not at this block size")]
    Foreign {
        /// Offset of the block.
        offset: u64,
    },
    /// The CRC in the header does not match the content.
    #[error("block at {offset} has CRC {actual:#010x}, its header has {stored:#010x}")]
    Crc {
        /// Offset of the block.
        offset: u64,
        /// CRC in the header.
        stored: u32,
        /// CRC of the content.
        actual: u32,
    },
    /// The block belongs to another offset.
    #[error("block at {offset} was written to {found}")]
    Offset {
        /// Offset of the block.
        offset: u64,
        /// The offset stored in the block.
        found: u64,
    },
    /// A write is missing, or was done twice.
    #[error("block at {offset} has generation {found}, not {expected}: a write was lost or done twice")]
    Generation {
        /// Offset of the block.
        offset: u64,
        /// The last generation written.
        expected: u64,
        /// The generation stored in the block.
        found: u64,
    },
    /// Another run wrote the block.
    #[error("block at {offset} is from a run with another seed ({found}, not {expected})")]
    Seed {
        /// Offset of the block.
        offset: u64,
        /// This run's seed.
        expected: u64,
        /// The seed stored in the block.
        found: u64,
    },
    /// A word of the pattern is wrong.
    #[error("block at {offset} differs from byte {at} on")]
    Pattern {
        /// Offset of the block.
        offset: u64,
        /// Offset of the first wrong word in the block.
        at: usize,
    },
}

/// Fills `block` with the content of a write of `stamp`, overwriting every byte.
///
/// # Panics
/// If the block is smaller than [`MIN_BLOCK`].
pub fn fill(block: &mut [u8], stamp: Stamp, verify: Verify) {
    assert!(block.len() >= MIN_BLOCK);
    let (head, body) = block.split_at_mut(HEAD);
    head[..4].copy_from_slice(&MAGIC);
    head[4..8].fill(0);
    head[8..16].copy_from_slice(&stamp.offset.to_le_bytes());
    head[16..24].copy_from_slice(&stamp.generation.to_le_bytes());
    head[24..].copy_from_slice(&stamp.seed.to_le_bytes());
    let (words, rest) = body.as_chunks_mut::<8>();
    let mut pattern = pattern_words(stamp);
    for (word, next) in words.iter_mut().zip(&mut pattern) {
        *word = next;
    }
    for (byte, next) in rest.iter_mut().zip(pattern.next().unwrap_or_default()) {
        *byte = next;
    }
    if verify == Verify::Crc32c {
        let crc = Crc32c::of(&block[CRC_FROM..]).value();
        block[4..8].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Checks `block` against `expect`.
///
/// # Errors
/// The first error: integrity is checked before identity.
///
/// # Panics
/// If the block is smaller than [`MIN_BLOCK`].
pub fn check(block: &[u8], expect: Expect, verify: Verify) -> Result<(), Mismatch> {
    assert!(block.len() >= MIN_BLOCK);
    let offset = match expect {
        Expect::Stamp(stamp) => stamp.offset,
        Expect::Offset(offset) => offset,
    };
    if block[..4] != MAGIC {
        return Err(Mismatch::Foreign { offset });
    }
    let found = Stamp { offset: word_at(block, 8), generation: word_at(block, 16), seed: word_at(block, 24) };
    let stored = word_at(block, 0) >> 32;
    match verify {
        Verify::Crc32c => {
            let (stored, actual) = (stored as u32, Crc32c::of(&block[CRC_FROM..]).value());
            if stored != actual {
                return Err(Mismatch::Crc { offset, stored, actual });
            }
        }
        Verify::Pattern => {
            if stored != 0 {
                return Err(Mismatch::Pattern { offset, at: 4 });
            }
            check_pattern(block, found).map_err(|at| Mismatch::Pattern { offset, at })?;
        }
    }
    check_stamp(found, expect, offset)
}

fn check_stamp(found: Stamp, expect: Expect, offset: u64) -> Result<(), Mismatch> {
    if found.offset != offset {
        return Err(Mismatch::Offset { offset, found: found.offset });
    }
    let Expect::Stamp(expected) = expect else {
        return Ok(());
    };
    if found.seed != expected.seed {
        return Err(Mismatch::Seed { offset, expected: expected.seed, found: found.seed });
    }
    if found.generation != expected.generation {
        let (expected, found) = (expected.generation, found.generation);
        return Err(Mismatch::Generation { offset, expected, found });
    }
    Ok(())
}

/// Offset of the first word that differs from the pattern of `stamp`.
fn check_pattern(block: &[u8], stamp: Stamp) -> Result<(), usize> {
    let (words, rest) = block[HEAD..].as_chunks::<8>();
    let mut pattern = pattern_words(stamp);
    if let Some(wrong) = words.iter().zip(&mut pattern).position(|(word, next)| *word != next) {
        return Err(HEAD + 8 * wrong);
    }
    if rest != &pattern.next().unwrap_or_default()[..rest.len()] {
        return Err(block.len() - rest.len());
    }
    Ok(())
}

/// The words after the header, an endless sequence: a counter with a large odd step from a mixed
/// start. All words of a block differ, and those of different stamps almost always do, at one
/// addition and one multiplication each.
fn pattern_words(stamp: Stamp) -> impl Iterator<Item = [u8; 8]> {
    let mut counter = mix(stamp.offset ^ mix(stamp.generation ^ mix(stamp.seed)));
    std::iter::from_fn(move || {
        counter = counter.wrapping_add(STEP);
        Some((counter ^ (counter >> 32)).wrapping_mul(SPREAD).to_le_bytes())
    })
}

/// SplitMix64's finalizer (Steele, Lea, Flood 2014): every input bit affects every output bit.
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(STEP);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

fn word_at(block: &[u8], at: usize) -> u64 {
    block[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

const MAGIC: [u8; 4] = *b"BMX1";
const HEAD: usize = 32;
const CRC_FROM: usize = 8;
/// 2^64 divided by the golden ratio, odd.
pub(crate) const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const SPREAD: u64 = 0xd6e8_feb8_6659_fd93;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STAMP: Stamp = Stamp { offset: 8192, generation: 3, seed: 1 };
    const BOTH: [Verify; 2] = [Verify::Crc32c, Verify::Pattern];

    fn written(stamp: Stamp, verify: Verify) -> Vec<u8> {
        let mut block = vec![0xa5; 4096];
        fill(&mut block, stamp, verify);
        block
    }

    #[test]
    fn a_block_is_verified_as_written() {
        for verify in BOTH {
            let block = written(STAMP, verify);
            assert_eq!(check(&block, Expect::Stamp(STAMP), verify), Ok(()));
            assert_eq!(check(&block, Expect::Offset(8192), verify), Ok(()));
        }
    }

    #[test]
    fn a_stale_block_is_found_by_its_generation() {
        for verify in BOTH {
            let stale = written(Stamp { generation: 2, ..STAMP }, verify);
            let expected = Mismatch::Generation { offset: 8192, expected: 3, found: 2 };
            assert_eq!(check(&stale, Expect::Stamp(STAMP), verify), Err(expected));
            assert_eq!(check(&stale, Expect::Offset(8192), verify), Ok(()));
        }
    }

    #[test]
    fn a_misplaced_block_is_found_by_its_offset() {
        for verify in BOTH {
            let moved = written(Stamp { offset: 4096, ..STAMP }, verify);
            let expected = Mismatch::Offset { offset: 8192, found: 4096 };
            assert_eq!(check(&moved, Expect::Stamp(STAMP), verify), Err(expected));
            assert_eq!(check(&moved, Expect::Offset(8192), verify), Err(expected));
        }
    }

    #[test]
    fn another_runs_block_is_found_by_its_seed() {
        let other = written(Stamp { seed: 9, ..STAMP }, Verify::Pattern);
        let expected = Mismatch::Seed { offset: 8192, expected: 1, found: 9 };
        assert_eq!(check(&other, Expect::Stamp(STAMP), Verify::Pattern), Err(expected));
    }

    #[test]
    fn a_block_without_the_magic_number_is_foreign() {
        for verify in BOTH {
            let error = check(&[0; 4096], Expect::Offset(0), verify);
            assert_eq!(error, Err(Mismatch::Foreign { offset: 0 }));
        }
    }

    #[test]
    fn a_torn_write_is_found_with_both_methods() {
        let before = Stamp { generation: 2, ..STAMP };
        for (verify, at) in [(Verify::Crc32c, None), (Verify::Pattern, Some(2048))] {
            let mut torn = written(STAMP, verify);
            torn[2048..].copy_from_slice(&written(before, verify)[2048..]);
            match (check(&torn, Expect::Stamp(STAMP), verify), at) {
                (Err(Mismatch::Crc { .. }), None) => {}
                (Err(Mismatch::Pattern { at: found, .. }), Some(at)) => assert_eq!(found, at),
                (other, _) => panic!("{other:?}"),
            }
        }
    }

    proptest! {
        #[test]
        fn any_flipped_bit_is_found(len in MIN_BLOCK..300, bit: prop::sample::Index, offset: u64, generation: u64) {
            let stamp = Stamp { offset, generation, seed: 7 };
            for verify in BOTH {
                let mut block = vec![0; len];
                fill(&mut block, stamp, verify);
                prop_assert_eq!(check(&block, Expect::Stamp(stamp), verify), Ok(()));
                let bit = bit.index(len * 8);
                block[bit / 8] ^= 1 << (bit % 8);
                prop_assert!(check(&block, Expect::Stamp(stamp), verify).is_err());
            }
        }

        #[test]
        fn blocks_of_different_stamps_share_no_word(a: (u64, u64), b: (u64, u64)) {
            prop_assume!(a != b);
            let stamp = |(offset, generation)| Stamp { offset, generation, seed: 1 };
            let same = pattern_words(stamp(a)).zip(pattern_words(stamp(b))).take(64).filter(|(a, b)| a == b);
            prop_assert_eq!(same.count(), 0);
        }
    }
}
