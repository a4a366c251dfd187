//! The parameters of a volume's disk.

use crate::kernel_disk::{UnsupportedBlocks, check_blocks};
use blockmux_volume::{MemoryAlignment, VolumeInfo};
use blockmux_wire::ublk::{
    ParamBasic, ParamDiscard, Params, UBLK_ATTR_FUA, UBLK_ATTR_READ_ONLY, UBLK_ATTR_ROTATIONAL,
    UBLK_ATTR_VOLATILE_CACHE, UBLK_PARAM_TYPE_BASIC, UBLK_PARAM_TYPE_DISCARD, UBLK_PARAM_TYPE_DMA_ALIGN,
};

/// The parameters of a disk for this volume, which is the kernel's if `page` is its page size in
/// bytes. Flags of the cache follow from the volume, as in every protocol.
///
/// # Errors
/// If the kernel has no disks with such blocks.
pub fn disk_params(info: &VolumeInfo, page: u32) -> Result<Params, UnsupportedBlocks> {
    let block = info.logical_block;
    check_blocks(block, page)?;
    let attrs = [
        (info.read_only, UBLK_ATTR_READ_ONLY),
        (info.rotational, UBLK_ATTR_ROTATIONAL),
        (info.write_cache, UBLK_ATTR_VOLATILE_CACHE | UBLK_ATTR_FUA),
    ];
    let attrs = attrs.iter().filter(|(holds, _)| *holds).fold(0, |all, (_, flag)| all | flag);
    let shift = |bytes: u32| bytes.trailing_zeros() as u8;
    let basic = ParamBasic {
        attrs,
        logical_bs_shift: shift(block),
        physical_bs_shift: shift(info.physical_block),
        io_opt_shift: shift(info.preferred_block),
        io_min_shift: shift(info.physical_block),
        max_sectors: MAX_BYTES / SECTOR,
        dev_sectors: sectors(info.size),
        ..ParamBasic::default()
    };
    let discards = info.discard_granularity != 0;
    let discard = ParamDiscard {
        discard_granularity: info.discard_granularity.max(block),
        max_discard_sectors: if discards { MAX_LONG_BYTES / SECTOR } else { 0 },
        max_write_zeroes_sectors: if info.fast_zeroes { MAX_LONG_BYTES } else { MAX_ZEROES_BYTES } / SECTOR,
        max_discard_segments: 1,
        ..ParamDiscard::default()
    };
    let types = UBLK_PARAM_TYPE_BASIC | UBLK_PARAM_TYPE_DISCARD;
    let params = Params { len: size_of::<Params>() as u32, types, basic, discard, ..Params::default() };
    Ok(match info.registered_alignment {
        Some(alignment) => Params {
            types: types | UBLK_PARAM_TYPE_DMA_ALIGN,
            dma_alignment: alignment
                .max(MemoryAlignment::of(DRIVERS_ALIGNMENT))
                .min(MemoryAlignment::of(page))
                .mask(),
            ..params
        },
        None => params,
    })
}

/// Whether the volume takes the pages of the disk's requests as they are: they are aligned as it
/// needs.
#[must_use]
pub fn aligns_for(disk: &Params, volume: &VolumeInfo) -> bool {
    let aligned = if disk.types & UBLK_PARAM_TYPE_DMA_ALIGN == 0 { 0 } else { disk.dma_alignment };
    volume.registered_alignment.is_some_and(|alignment| aligned >= alignment.mask())
}

/// Whether a disk with the parameters `disk` may go on with a volume that has `volume`: it is not
/// longer, unless its size can change, blocks and write protection are the same, the volume loses
/// no write that the disk does not flush, and requests are not longer than a queue takes.
#[must_use]
pub fn describes(disk: &Params, volume: &Params, may_resize: bool) -> bool {
    let key = |params: &Params| {
        let ParamBasic { attrs, logical_bs_shift, .. } = params.basic;
        (attrs & (UBLK_ATTR_READ_ONLY | UBLK_ATTR_VOLATILE_CACHE), logical_bs_shift)
    };
    key(disk) == key(volume)
        && (may_resize || disk.basic.dev_sectors <= volume.basic.dev_sectors)
        && disk.basic.max_sectors <= volume.basic.max_sectors
}

/// The size of a volume of this many bytes in sectors.
#[must_use]
pub fn sectors(size: u64) -> u64 {
    size >> SECTOR_SHIFT
}

/// Length of the longest read or write in bytes.
pub const MAX_BYTES: u32 = 1 << 20;
/// Length of the longest discard in bytes, and of zeroes that need no data.
const MAX_LONG_BYTES: u32 = 1 << 30;
/// Length of the longest write of zeroes that the volume may have to write, in bytes: a longer one
/// would make the kernel wait for its end.
const MAX_ZEROES_BYTES: u32 = 32 << 20;
/// Alignment of data of disks that do not set one, in bytes.
const DRIVERS_ALIGNMENT: u32 = 4;
/// Bytes in a sector of the kernel, as a power of two.
const SECTOR_SHIFT: u32 = 9;
/// Bytes in a sector of the kernel.
pub(super) const SECTOR: u32 = 1 << SECTOR_SHIFT;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_has_the_blocks_size_and_cache_of_its_volume() {
        let info = VolumeInfo {
            logical_block: 4096,
            preferred_block: 65_536,
            write_cache: true,
            discard_granularity: 4096,
            ..VolumeInfo::new(1 << 30)
        };
        let params = disk_params(&info, 4096).unwrap();
        let ParamBasic { logical_bs_shift, physical_bs_shift, io_opt_shift, dev_sectors, .. } = params.basic;
        assert_eq!((logical_bs_shift, physical_bs_shift, io_opt_shift), (12, 12, 16));
        assert_eq!((params.len, dev_sectors), (120, 1 << 21));
        assert_eq!(params.basic.attrs, UBLK_ATTR_VOLATILE_CACHE | UBLK_ATTR_FUA);
        assert_eq!(params.discard.max_discard_sectors, 1 << 21);
        assert_eq!(params.discard.max_write_zeroes_sectors, 1 << 16);
    }

    #[test]
    fn a_volume_without_cache_or_discards_has_neither() {
        let info = VolumeInfo { read_only: true, fast_zeroes: true, ..VolumeInfo::new(1 << 20) };
        let params = disk_params(&info, 4096).unwrap();
        assert_eq!(params.basic.attrs, UBLK_ATTR_READ_ONLY);
        assert_eq!((params.discard.max_discard_sectors, params.discard.discard_granularity), (0, 512));
        assert_eq!(params.discard.max_write_zeroes_sectors, 1 << 21);
    }

    #[test]
    fn a_volume_that_takes_registered_buffers_gets_them_aligned() {
        let of = |alignment: Option<u32>| VolumeInfo {
            registered_alignment: alignment.map(MemoryAlignment::of),
            ..VolumeInfo::new(1 << 20)
        };
        let disk = |alignment| disk_params(&of(alignment), 4096).unwrap();
        assert_eq!((disk(Some(1)).dma_alignment, disk(Some(512)).dma_alignment), (3, 511));
        assert_eq!(disk(None).types & UBLK_PARAM_TYPE_DMA_ALIGN, 0);
        assert!(aligns_for(&disk(Some(512)), &of(Some(4))) && aligns_for(&disk(Some(512)), &of(Some(512))));
        assert!(!aligns_for(&disk(Some(1)), &of(Some(512))), "the disk of an older process");
        assert!(!aligns_for(&disk(None), &of(Some(512))) && aligns_for(&disk(None), &of(Some(1))));
        assert!(!aligns_for(&disk(Some(512)), &of(None)));
    }

    #[test]
    fn blocks_above_a_page_are_refused() {
        let info = VolumeInfo { logical_block: 8192, physical_block: 8192, ..VolumeInfo::new(1 << 20) };
        assert_eq!(disk_params(&info, 4096), Err(UnsupportedBlocks { block: 8192, page: 4096 }));
        assert!(disk_params(&info, 65_536).is_ok());
    }

    #[test]
    fn a_disk_goes_on_only_with_a_volume_of_its_size_blocks_and_cache() {
        let info = VolumeInfo::new(1 << 20);
        let params = |info: &VolumeInfo| disk_params(info, 4096).unwrap();
        let disk = params(&info);
        let goes_on = |info: VolumeInfo| describes(&disk, &params(&info), false);
        assert!(goes_on(VolumeInfo { preferred_block: 8192, ..info.clone() }));
        assert!(goes_on(VolumeInfo { size: 1 << 21, ..info.clone() }), "it has grown");
        assert!(!goes_on(VolumeInfo { size: 1 << 19, ..info.clone() }));
        assert!(!goes_on(VolumeInfo { logical_block: 4096, ..info.clone() }));
        assert!(!goes_on(VolumeInfo { write_cache: true, ..info.clone() }));
        assert!(!goes_on(VolumeInfo { read_only: true, ..info.clone() }));
        let resized = params(&VolumeInfo { size: 1 << 21, ..info.clone() });
        assert!(describes(&disk, &resized, true));
    }
}
