//! IDENTIFY DEVICE data: describing a volume as an ATA disk, and parsing a disk's description.

use super::{AoeAddress, SECTOR};
use crate::names::volume_uuid::VolumeUuid;
use blockmux_volume::VolumeInfo;
use blockmux_wire::ata::{
    ATA_SECTOR, IDENTIFY_CAN_LBA, IDENTIFY_FLUSH_CACHE, IDENTIFY_FLUSH_CACHE_EXT, IDENTIFY_LBA48,
    IDENTIFY_SECTOR_SIZE_VALID, IDENTIFY_SEVERAL_PER_PHYSICAL, IDENTIFY_SIGNATURE, IDENTIFY_WORD_VALID,
    IDENTIFY_WRITE_CACHE, Identify, identify_text,
};
use zerocopy::{FromBytes, FromZeros};

/// The IDENTIFY DEVICE data of a disk. Its serial number is the volume's, or the disk's address if
/// the volume has none.
#[allow(
    clippy::arithmetic_side_effects,
    reason = "the divisors are constants, each other operation is checked before it"
)]
pub(super) fn describe(address: AoeAddress, uuid: Option<VolumeUuid>, info: &VolumeInfo) -> Identify {
    let sectors = info.size / SECTOR;
    let cylinders = (sectors / (HEADS * TRACK)).min(MAX_CYLINDERS);
    let geometry = [cylinders as u16, HEADS as u16, TRACK as u16];
    let current = cylinders * HEADS * TRACK;
    let words = |number: u64| [(number as u16).into(), ((number >> 16) as u16).into()];
    let doublings = (u64::from(info.physical_block) / SECTOR).max(1).ilog2();
    let mut disk = Identify::new_zeroed();
    disk.general = (1 << 6).into();
    disk.cylinders = geometry[0].into();
    disk.heads = geometry[1].into();
    disk.sectors_per_track = geometry[2].into();
    let of_address = || format!("{}.{}", address.shelf, address.slot);
    disk.serial = identify_text(&uuid.map_or_else(of_address, VolumeUuid::ata_serial));
    disk.firmware = identify_text(env!("CARGO_PKG_VERSION"));
    disk.model = identify_text(MODEL);
    disk.multiple = (1 << 15).into();
    disk.capabilities = [IDENTIFY_CAN_LBA.into(), IDENTIFY_WORD_VALID.into()];
    disk.valid = 1.into();
    disk.current_geometry = geometry.map(Into::into);
    disk.current_sectors = words(current);
    disk.sectors_28 = words(sectors.min(MAX_LBA28));
    disk.major_version = VERSIONS.into();
    let cache = if info.write_cache { IDENTIFY_WRITE_CACHE } else { 0 };
    let can = IDENTIFY_LBA48 | IDENTIFY_FLUSH_CACHE | IDENTIFY_FLUSH_CACHE_EXT;
    disk.supported = [cache.into(), (IDENTIFY_WORD_VALID | can).into(), IDENTIFY_WORD_VALID.into()];
    disk.enabled = [cache.into(), can.into(), IDENTIFY_WORD_VALID.into()];
    disk.sectors_48 = sectors.into();
    if doublings > 0 {
        let size = IDENTIFY_SECTOR_SIZE_VALID | IDENTIFY_SEVERAL_PER_PHYSICAL | (doublings as u16 & 0xf);
        disk.sector_size = size.into();
    }
    if info.discard_granularity > 0 && !info.read_only {
        disk.trim = 1.into();
        disk.trim_sectors = MAX_TRIM_SECTORS.into();
    }
    disk.rotation = u16::from(!info.rotational).into();
    disk.integrity = disk.integrity_word().into();
    disk
}

/// A disk as its IDENTIFY DEVICE data describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AtaDisk {
    /// Capacity in sectors of 512 bytes.
    pub sectors: u64,
    /// Whether the disk supports the 48-bit (EXT) commands.
    pub lba48: bool,
    /// Whether the disk has a volatile write cache.
    pub write_cache: bool,
    /// Whether the disk supports FLUSH CACHE EXT.
    pub flush_ext: bool,
    /// The maximum number of sectors of trim ranges in one command; 0: trim is not supported.
    pub trim_sectors: u16,
    /// Physical block size in bytes.
    pub physical_block: u32,
    /// False where the disk says that it does not rotate.
    pub rotational: bool,
    /// Model, for people.
    pub model: String,
    /// Serial number, for people.
    pub serial: String,
}

impl AtaDisk {
    /// Parses IDENTIFY DEVICE data; `None` if it is too short or the disk does not support LBA.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<AtaDisk> {
        let (disk, _) = Identify::read_from_prefix(bytes).ok()?;
        let [capabilities, _] = disk.capabilities;
        if capabilities.get() & IDENTIFY_CAN_LBA == 0 {
            return None;
        }
        let [_, supported, _] = disk.supported;
        let lba48 = supported.get() & IDENTIFY_LBA48 != 0;
        let [low, high] = disk.sectors_28;
        let sectors_28 = u64::from(high.get()) << 16 | u64::from(low.get());
        let sectors = if lba48 { disk.sectors_48.get() } else { sectors_28 };
        let [cache, flush, _] = disk.enabled;
        let size = disk.sector_size.get();
        let doublings = if size & (IDENTIFY_SECTOR_SIZE_VALID | 1 << 15) == IDENTIFY_SECTOR_SIZE_VALID {
            u32::from(size & 0xf)
        } else {
            0
        };
        let is_signed = disk.integrity.get() as u8 == IDENTIFY_SIGNATURE;
        if is_signed && disk.integrity.get() != disk.integrity_word() {
            return None;
        }
        let can_trim = disk.trim.get() & 1 != 0;
        Some(AtaDisk {
            // A byte offset beyond this would not fit 64 bits.
            sectors: sectors.min(MAX_SECTORS),
            lba48,
            write_cache: cache.get() & IDENTIFY_WRITE_CACHE != 0,
            flush_ext: flush.get() & IDENTIFY_FLUSH_CACHE_EXT != 0,
            trim_sectors: if can_trim { disk.trim_sectors.get().max(1) } else { 0 },
            physical_block: (ATA_SECTOR as u32) << doublings.min(7),
            rotational: disk.rotation.get() != 1,
            model: text(&disk.model),
            serial: text(&disk.serial),
        })
    }

    /// The disk's properties as a volume.
    #[must_use]
    pub fn volume_info(&self) -> VolumeInfo {
        VolumeInfo {
            physical_block: self.physical_block,
            preferred_block: self.physical_block,
            write_cache: self.write_cache,
            discard_granularity: if self.trim_sectors > 0 { ATA_SECTOR as u32 } else { 0 },
            rotational: self.rotational,
            ..VolumeInfo::new(self.sectors.saturating_mul(SECTOR))
        }
    }
}

/// Decodes an ATA string, which swaps the bytes of each word: trimmed, without unprintable
/// characters.
fn text(words: &[u8]) -> String {
    let bytes = words.as_chunks::<2>().0.iter().flat_map(|[second, first]| [*first, *second]);
    let text: String =
        bytes.map(|byte| if byte.is_ascii_graphic() { char::from(byte) } else { ' ' }).collect();
    text.trim().to_owned()
}

/// Heads of the reported geometry; larger disks report [`MAX_CYLINDERS`] cylinders.
const HEADS: u64 = 16;
const TRACK: u64 = 63;
const MAX_CYLINDERS: u64 = 16_383;
/// The maximum capacity in a 28-bit field, in sectors.
const MAX_LBA28: u64 = 0x0fff_ffff;
const MAX_SECTORS: u64 = 1 << 48;
/// Major versions: ATA/ATAPI-6, the first with 48-bit addresses, to ATA8-ACS.
const VERSIONS: u16 = 0b1_1100_0000;
const MAX_TRIM_SECTORS: u16 = 8;
const MODEL: &str = "Blockmux";

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    const HERE: AoeAddress = AoeAddress { shelf: 7, slot: 3 };

    #[test]
    fn identify_data_of_a_disk_is_parsed_back() {
        let info = VolumeInfo {
            write_cache: true,
            discard_granularity: 512,
            physical_block: 4096,
            ..VolumeInfo::new(1 << 30)
        };
        let disk = describe(HERE, None, &info);
        let seen = AtaDisk::from_bytes(disk.as_bytes()).unwrap();
        assert_eq!((seen.sectors, seen.lba48, seen.model.as_str()), (2 << 20, true, "Blockmux"));
        assert_eq!((seen.serial.as_str(), seen.rotational), ("7.3", false));
        assert_eq!(seen.volume_info(), VolumeInfo { discard_granularity: 512, ..info });
        // 2,097,152 sectors are 2,080 cylinders and a rest.
        assert_eq!(disk.current_geometry.map(|word| word.get()), [2080, 16, 63]);
    }

    #[test]
    fn disks_of_one_address_with_other_volumes_have_other_serial_numbers() {
        let serial = |text| {
            let disk = describe(HERE, Some(VolumeUuid::of_texts(&[text])), &VolumeInfo::new(1 << 30));
            AtaDisk::from_bytes(disk.as_bytes()).unwrap().serial
        };
        assert_eq!((serial("a").len(), serial("a") == serial("b")), (20, false));
    }

    #[test]
    fn the_geometry_of_a_large_disk_stops_where_the_standard_stops() {
        let disk = describe(HERE, None, &VolumeInfo::new(1 << 42));
        assert_eq!(disk.cylinders.get(), 16_383);
        assert_eq!(disk.sectors_28.map(|word| word.get()), [0xffff, 0x0fff]);
        assert_eq!(disk.sectors_48.get(), 1 << 33);
        let no_cache = [disk.supported[0], disk.enabled[0]].map(|word| word.get() & IDENTIFY_WRITE_CACHE);
        assert_eq!((no_cache, disk.trim.get()), ([0, 0], 0));
    }

    #[test]
    fn damaged_data_describes_no_disk() {
        let mut disk = describe(HERE, None, &VolumeInfo::new(1 << 30));
        disk.sectors_48 = 5.into();
        assert_eq!(AtaDisk::from_bytes(disk.as_bytes()), None, "its sum is wrong");
        assert_eq!(AtaDisk::from_bytes(&[0; 512]), None);
        assert_eq!(AtaDisk::from_bytes(&disk.as_bytes()[..511]), None);
    }
}
