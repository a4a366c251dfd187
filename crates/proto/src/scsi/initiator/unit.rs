//! Properties of a logical unit, as it reports them.

use crate::scsi::Lun;
use blockmux_volume::{MAX_TRANSFER, VolumeInfo};

/// A block device logical unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitInfo {
    /// T10 VENDOR IDENTIFICATION.
    pub vendor: String,
    /// PRODUCT IDENTIFICATION.
    pub product: String,
    /// PRODUCT REVISION LEVEL.
    pub revision: String,
    /// PRODUCT SERIAL NUMBER; empty if there is none.
    pub serial: String,
    /// World-wide name, as `naa.6...` or `eui.0...`; empty if there is none.
    pub designator: String,
    /// Number of logical blocks.
    pub blocks: u64,
    /// Length of a logical block, in bytes.
    pub block_len: u32,
    /// Length of a physical block, in bytes.
    pub physical_block_len: u32,
    /// The unit is write-protected.
    pub read_only: bool,
    /// WCE: a completed write may be lost until SYNCHRONIZE CACHE.
    pub write_cache: bool,
    /// DPOFUA: FUA is supported.
    pub fua: bool,
    /// READ CAPACITY (16) is supported, so other 16-byte commands are, too.
    pub long_commands: bool,
    /// LBPME: the unit reports which blocks are mapped.
    pub thin: bool,
    /// LBPRZ: unmapped blocks read as zeroes.
    pub unmapped_is_zero: bool,
    /// Limits of UNMAP, if LBPU is set.
    pub unmap: Option<UnmapLimits>,
    /// LBPWS: WRITE SAME (16) can unmap.
    pub write_same_unmaps: bool,
    /// Maximum length of WRITE SAME, in blocks; 0 if unreported.
    pub max_write_same: u64,
    /// Maximum length of READ and WRITE, in blocks; 0 if unreported.
    pub max_transfer: u32,
    /// The medium rotates.
    pub rotational: bool,
    /// Target port group of the port, if the unit supports ALUA (TPGS).
    pub port_group: Option<u16>,
}

/// Limits of one UNMAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnmapLimits {
    /// MAXIMUM UNMAP LBA COUNT.
    pub max_blocks: u32,
    /// OPTIMAL UNMAP GRANULARITY, in blocks, at least 1.
    pub granularity: u32,
}

/// LUNs from REPORT LUNS, at most [`MAX_LUNS`].
pub(super) type Luns = Vec<Lun>;

impl UnitInfo {
    /// The unit's properties as a volume.
    #[must_use]
    pub fn volume_info(&self) -> VolumeInfo {
        let block = self.block_len;
        // A granularity that is not a power of two is useless to upper layers.
        let granule = |limits: UnmapLimits| {
            let granule = limits.granularity.checked_mul(block).filter(|len| len.is_power_of_two());
            granule.unwrap_or(self.physical_block_len).max(block)
        };
        VolumeInfo {
            size: self.size(),
            logical_block: block,
            physical_block: self.physical_block_len.max(block),
            preferred_block: self.physical_block_len.max(block),
            read_only: self.read_only,
            write_cache: self.write_cache,
            volatile: false,
            discard_granularity: self.unmap.map_or(0, granule),
            fast_zeroes: self.zeroes_fast(),
            // SYNCHRONIZE CACHE covers writes of all initiators.
            shared_flush: true,
            // Data that fits a receive buffer is borrowed from there.
            lends_reads: true,
            registered_alignment: None,
            compare_and_write_unit: 0,
            rotational: self.rotational,
        }
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.blocks.saturating_mul(self.block_len.into())
    }

    /// Whether WRITE SAME with UNMAP produces zeroes.
    pub(super) fn zeroes_fast(&self) -> bool {
        self.thin && self.write_same_unmaps && self.unmapped_is_zero
    }

    /// Maximum length of a READ or WRITE, in bytes.
    pub(super) fn max_transfer_bytes(&self) -> u64 {
        let reported = match self.max_transfer {
            0 => u64::from(u32::MAX),
            blocks => u64::from(blocks).saturating_mul(self.block_len.into()),
        };
        // TRANSFER LENGTH of a 10-byte CDB has 16 bits.
        let form = if self.long_commands { u64::from(u32::MAX) } else { u64::from(u16::MAX) };
        reported.min(form.saturating_mul(self.block_len.into())).min(MAX_TRANSFER.into())
    }
}

/// Maximum number of listed logical units of a target.
pub(super) const MAX_LUNS: usize = 1024;

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
    fn volume_properties_come_from_the_unit() {
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
