//! Configured block sizes of a volume, for 512n, 512e and 4Kn disks.

use crate::volume::VolumeInfo;
use std::ops::RangeInclusive;

/// Block sizes to present, each a power of two in [`BlockSizes::RANGE`]; `None`: the volume's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockSizes {
    /// Logical block, in bytes.
    pub logical: Option<u32>,
    /// Physical block, in bytes; at least the logical block.
    pub physical: Option<u32>,
}

/// A block size is smaller than the storage supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{key}={asked} is less than the volume's own block size of {own} bytes; write {key}={own}, or leave it out"
)]
pub struct SmallBlock {
    /// The option that sets the size.
    pub key: &'static str,
    /// The requested size, in bytes.
    pub asked: u32,
    /// The storage's logical block, in bytes.
    pub own: u32,
}

impl BlockSizes {
    /// Supported block sizes, in bytes: from an ATA sector to the largest minimum block size of
    /// NBD.
    pub const RANGE: RangeInclusive<u32> = 512..=64 << 10;
    /// The option that sets the logical block.
    pub const LOGICAL: &'static str = "block_size";
    /// The option that sets the physical block.
    pub const PHYSICAL: &'static str = "physical_block_size";

    /// Whether all sizes are the volume's own.
    #[must_use]
    pub fn is_own(self) -> bool {
        self == BlockSizes::default()
    }

    /// Checks whether storage with logical blocks of `own` bytes can have these sizes.
    ///
    /// # Errors
    /// If one of them is smaller.
    pub fn check(self, own: u32) -> Result<(), SmallBlock> {
        for (key, asked) in [(Self::LOGICAL, self.logical), (Self::PHYSICAL, self.physical)] {
            if let Some(asked) = asked.filter(|asked| *asked < own) {
                return Err(SmallBlock { key, asked, own });
            }
        }
        Ok(())
    }

    /// Properties of a volume like `own` with these block sizes, but no logical block smaller than
    /// its own. The size is rounded down to whole blocks.
    #[must_use]
    pub fn shape(self, own: VolumeInfo) -> VolumeInfo {
        let logical_block = self.logical.unwrap_or(0).max(own.logical_block);
        let physical_block = self.physical.unwrap_or(own.physical_block).max(logical_block);
        let preferred = if self.physical.is_some() { physical_block } else { own.preferred_block };
        let discard_granularity = match own.discard_granularity {
            0 => 0,
            granularity => granularity.next_multiple_of(logical_block),
        };
        VolumeInfo {
            size: own.size / u64::from(logical_block) * u64::from(logical_block),
            logical_block,
            physical_block,
            preferred_block: preferred.max(physical_block),
            discard_granularity,
            ..own
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(logical: impl Into<Option<u32>>, physical: impl Into<Option<u32>>) -> BlockSizes {
        BlockSizes { logical: logical.into(), physical: physical.into() }
    }

    #[test]
    fn a_volume_has_the_configured_block_sizes_or_its_own() {
        let own = VolumeInfo { physical_block: 512, discard_granularity: 1536, ..VolumeInfo::new(1 << 20) };
        let shaped = |blocks: BlockSizes| {
            let info = blocks.shape(own.clone());
            (info.logical_block, info.physical_block, info.preferred_block, info.discard_granularity)
        };
        assert_eq!(BlockSizes::default().shape(own.clone()), own);
        assert_eq!(shaped(sizes(4096, None)), (4096, 4096, 4096, 4096));
        assert_eq!(shaped(sizes(512, 4096)), (512, 4096, 4096, 1536));
        assert_eq!(shaped(sizes(None, 512)), (512, 512, 512, 1536));
        assert_eq!(shaped(sizes(8192, 16384)), (8192, 16384, 16384, 8192));
    }

    #[test]
    fn a_volume_ends_with_a_whole_block() {
        assert_eq!(sizes(4096, None).shape(VolumeInfo::new(10_240)).size, 8192);
        let large = VolumeInfo { logical_block: 4096, discard_granularity: 0, ..VolumeInfo::new(8192) };
        assert_eq!(sizes(512, None).shape(large.clone()), large, "no smaller than its own");
    }

    #[test]
    fn a_block_size_below_the_volumes_own_is_refused_with_the_minimum() {
        assert_eq!(sizes(4096, 4096).check(4096), Ok(()));
        assert_eq!(BlockSizes::default().check(4096), Ok(()));
        let refused = sizes(512, None).check(4096).unwrap_err().to_string();
        assert_eq!(
            refused,
            "block_size=512 is less than the volume's own block size of 4096 bytes; write block_size=4096, or leave it out"
        );
        let refused = sizes(None, 512).check(4096).unwrap_err().to_string();
        assert!(refused.starts_with("physical_block_size=512 is less"), "{refused}");
    }
}
