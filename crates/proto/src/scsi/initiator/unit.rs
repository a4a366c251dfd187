//! What a logical unit told of itself.

use crate::scsi::Lun;
use blockmux_volume::{MAX_TRANSFER, VolumeInfo};

/// A logical unit that holds blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitInfo {
    /// T10 VENDOR IDENTIFICATION.
    pub vendor: String,
    /// PRODUCT IDENTIFICATION.
    pub product: String,
    /// PRODUCT REVISION LEVEL.
    pub revision: String,
    /// PRODUCT SERIAL NUMBER; empty if it has none.
    pub serial: String,
    /// The unit's name in the world, as `naa.6...` or `eui.0...`; empty if it has none.
    pub designator: String,
    /// In blocks.
    pub blocks: u64,
    /// Of a logical block, in bytes.
    pub block_len: u32,
    /// Of a physical block, in bytes.
    pub physical_block_len: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// WCE: a completed write may be lost until SYNCHRONIZE CACHE.
    pub write_cache: bool,
    /// DPOFUA: a write can be forced to the medium.
    pub fua: bool,
    /// It said by READ CAPACITY (16) how large it is, so it knows the other commands of 16 bytes.
    pub long_commands: bool,
    /// LBPME: it tells which blocks are mapped.
    pub thin: bool,
    /// LBPRZ: what is not mapped reads as zeroes.
    pub unmapped_is_zero: bool,
    /// LBPU and the limits of UNMAP, if it has that.
    pub unmap: Option<UnmapLimits>,
    /// LBPWS: WRITE SAME (16) can unmap.
    pub write_same_unmaps: bool,
    /// Of WRITE SAME, in blocks; 0: it does not say.
    pub max_write_same: u64,
    /// Of READ and WRITE, in blocks; 0: it does not say.
    pub max_transfer: u32,
    /// Spinning disks below.
    pub rotational: bool,
    /// The target port group that it was reached by, where it has several of them (TPGS).
    pub port_group: Option<u16>,
}

/// What one UNMAP may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnmapLimits {
    /// MAXIMUM UNMAP LBA COUNT.
    pub max_blocks: u32,
    /// OPTIMAL UNMAP GRANULARITY, in blocks, at least 1.
    pub granularity: u32,
}

/// What REPORT LUNS told, at most [`MAX_LUNS`].
pub(super) type Luns = Vec<Lun>;

impl UnitInfo {
    /// What this unit is as a volume.
    #[must_use]
    pub fn volume_info(&self) -> VolumeInfo {
        let block = self.block_len;
        // Granules that are no power of two are of no use to anybody above.
        let granule = |limits: UnmapLimits| {
            let granule = limits.granularity.checked_mul(block).filter(|len| len.is_power_of_two());
            granule.unwrap_or(self.physical_block_len).max(block)
        };
        VolumeInfo {
            size: self.size(),
            logical_block: block,
            physical_block: self.physical_block_len.max(block),
            read_only: self.read_only,
            write_cache: self.write_cache,
            volatile: false,
            discard_granularity: self.unmap.map_or(0, granule),
            fast_zeroes: self.zeroes_fast(),
            // SYNCHRONIZE CACHE is about the unit, whoever wrote.
            shared_flush: true,
            // What fits a receive buffer is lent from there.
            lends_reads: true,
            rotational: self.rotational,
        }
    }

    /// In bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.blocks.saturating_mul(self.block_len.into())
    }

    /// Whether WRITE SAME with UNMAP makes zeroes.
    pub(super) fn zeroes_fast(&self) -> bool {
        self.thin && self.write_same_unmaps && self.unmapped_is_zero
    }

    /// The most that one READ or WRITE moves, in bytes.
    pub(super) fn max_transfer_bytes(&self) -> u64 {
        let told = match self.max_transfer {
            0 => u64::from(u32::MAX),
            blocks => u64::from(blocks).saturating_mul(self.block_len.into()),
        };
        // A CDB of 10 bytes has 16 bits for it.
        let form = if self.long_commands { u64::from(u32::MAX) } else { u64::from(u16::MAX) };
        told.min(form.saturating_mul(self.block_len.into())).min(MAX_TRANSFER.into())
    }
}

/// The most logical units of a target that are listed.
pub(super) const MAX_LUNS: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> UnitInfo {
        UnitInfo {
            blocks: 2048,
            block_len: 512,
            physical_block_len: 4096,
            long_commands: true,
            ..UnitInfo::default()
        }
    }

    #[test]
    fn a_volume_is_what_the_unit_said() {
        let info = plain().volume_info();
        assert_eq!(info, VolumeInfo { lends_reads: true, ..VolumeInfo::new(1 << 20) });
        let rich = UnitInfo {
            read_only: true,
            write_cache: true,
            thin: true,
            unmapped_is_zero: true,
            write_same_unmaps: true,
            rotational: true,
            unmap: Some(UnmapLimits { max_blocks: 9, granularity: 128 }),
            ..plain()
        };
        let info = rich.volume_info();
        assert!(info.read_only && info.write_cache && info.fast_zeroes && info.rotational);
        assert_eq!(info.discard_granularity, 65536);
        let odd = UnitInfo { unmap: Some(UnmapLimits { max_blocks: 9, granularity: 3 }), ..plain() };
        assert_eq!(odd.volume_info().discard_granularity, 4096);
    }

    #[test]
    fn transfers_are_bounded_by_the_unit_the_command_and_ourselves() {
        assert_eq!(plain().max_transfer_bytes(), u64::from(MAX_TRANSFER));
        let small = UnitInfo { max_transfer: 64, ..plain() };
        assert_eq!(small.max_transfer_bytes(), 32768);
        let old = UnitInfo { long_commands: false, ..plain() };
        assert_eq!(old.max_transfer_bytes(), 65535 * 512);
    }
}
