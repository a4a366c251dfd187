//! Backing storage of foreign configs as volume specs.

use super::notes::Notes;
use blockmux_volume::spec::{BlockSpec, FileSpec, MemSpec, NullSpec};
use blockmux_volume::{BlockSizes, Spec};
use std::path::{Path, PathBuf};

/// What foreign configs say about a file or a device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StorageOptions {
    /// Size of a file, in bytes.
    pub(super) size: Option<u64>,
    pub(super) block_size: Option<u64>,
    pub(super) physical_block_size: Option<u64>,
    pub(super) direct: Option<bool>,
}

/// A path as a `block:` or `file:` volume: devices are below `/dev`.
pub(super) fn of_path(path: &str, options: StorageOptions, notes: &mut Notes) -> Spec {
    let is_device = Path::new(path).starts_with("/dev") && !Path::new(path).starts_with("/dev/shm");
    let blocks = block_sizes(options, notes);
    let path = PathBuf::from(path);
    if is_device {
        let direct = options.direct;
        return Spec::Block(BlockSpec { path, direct, read_only: false, is_raw: false, blocks });
    }
    Spec::File(FileSpec { size: options.size, direct: options.direct, blocks, ..FileSpec::new(path) })
}

/// RAM of a size that is a whole number of blocks.
pub(super) fn memory(options: StorageOptions, notes: &mut Notes) -> Option<Spec> {
    let (size, blocks) = sized(options, notes)?;
    Some(Spec::Mem(MemSpec { blocks, ..MemSpec::new(size) }))
}

/// A volume that discards writes.
pub(super) fn nothing(options: StorageOptions, notes: &mut Notes) -> Option<Spec> {
    let (size, blocks) = sized(options, notes)?;
    Some(Spec::Null(NullSpec { blocks, ..NullSpec::new(size) }))
}

fn sized(options: StorageOptions, notes: &mut Notes) -> Option<(u64, BlockSizes)> {
    let blocks = block_sizes(options, notes);
    let size = options.size?;
    let whole = size.next_multiple_of(u64::from(blocks.logical.unwrap_or(512)));
    (1..=LARGEST).contains(&whole).then_some((whole, blocks))
}

/// Block sizes that differ from our defaults; 512 is left to the storage, whose own may be larger.
fn block_sizes(options: StorageOptions, notes: &mut Notes) -> BlockSizes {
    let mut read = |key: &str, size: Option<u64>| {
        let size = size.filter(|size| ![0, 512].contains(size))?;
        let fits = u32::try_from(size)
            .ok()
            .filter(|size| size.is_power_of_two() && BlockSizes::RANGE.contains(size));
        if fits.is_none() {
            notes.setting(key, &size.to_string());
        }
        fits
    };
    let logical = read("block size", options.block_size);
    let physical = read("physical block size", options.physical_block_size);
    BlockSizes { logical, physical: physical.filter(|size| *size >= logical.unwrap_or(512)) }
}

/// A size with a unit of powers of 1024, such as `10G` or `64MB`, in bytes.
pub(super) fn size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim().to_ascii_lowercase();
    let unit = unit.strip_suffix("ib").or(unit.strip_suffix('b')).unwrap_or(&unit);
    let shift = match unit {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Maximum size of a volume, in bytes.
const LARGEST: u64 = i64::MAX as u64 - 65_536;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_below_dev_are_devices_and_odd_sizes_are_notes() {
        let mut notes = Notes::default();
        let options = StorageOptions { block_size: Some(4096), ..StorageOptions::default() };
        assert_eq!(of_path("/dev/vg0/a", options, &mut notes).to_string(), "block:/dev/vg0/a?block_size=4k");
        let options = StorageOptions { size: Some(1 << 30), block_size: Some(512), ..options };
        assert_eq!(of_path("/srv/a,b.img", options, &mut notes).to_string(), "file:/srv/a%2Cb.img?size=1g");
        assert_eq!(
            of_path("/dev/shm/a", StorageOptions::default(), &mut notes).to_string(),
            "file:/dev/shm/a"
        );
        let options = StorageOptions { size: Some(1000), block_size: Some(520), ..options };
        assert_eq!(memory(options, &mut notes).unwrap().to_string(), "mem:1k");
        assert_eq!(notes.lines().collect::<Vec<_>>(), ["# no counterpart: block size 520"]);
        assert_eq!(nothing(StorageOptions::default(), &mut notes), None);
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in
            [("10G", Some(10 << 30)), ("64MB", Some(64 << 20)), ("512", Some(512)), ("1KiB", Some(1024))]
        {
            assert_eq!(size(text), bytes, "{text}");
        }
        for text in ["", "G", "10X", "99999999P", "-1"] {
            assert_eq!(size(text), None, "{text}");
        }
    }
}
