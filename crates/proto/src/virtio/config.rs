//! The configuration of a volume's block device.

use super::blk_queue::DeviceState;
use super::wire::Features;
use super::wire::blk::{Config, ID_LEN, SECTOR};
use blockmux_volume::VolumeInfo;
use zerocopy::IntoBytes;

/// A volume as a block device: what it offers, and its configuration space.
#[derive(Clone, Copy, Debug)]
pub struct BlkDevice {
    offered: Features,
    config: Config,
    serial: [u8; ID_LEN],
    has_cache: bool,
}

impl BlkDevice {
    /// The device of a volume with up to `queues` queues. Flags of the cache follow from the
    /// volume, as in every protocol. A longer serial number is cut.
    #[must_use]
    pub fn new(info: &VolumeInfo, queues: u16, serial: &str) -> BlkDevice {
        let takes_discards = !info.read_only && info.discard_granularity != 0;
        let offered = [
            (Features::BLK_RO, info.read_only),
            (Features::BLK_FLUSH, info.write_cache),
            (Features::BLK_DISCARD, takes_discards),
            (Features::BLK_WRITE_ZEROES, !info.read_only),
        ];
        let offered =
            offered.iter().filter(|(_, holds)| *holds).fold(ALWAYS, |all, (feature, _)| all | *feature);
        let block = info.logical_block.max(1);
        let blocks = |bytes: u32| bytes.checked_div(block).unwrap_or(0);
        let sectors = |bytes: u64| u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX);
        let exp = info.physical_block.trailing_zeros().saturating_sub(block.trailing_zeros());
        let zeroes = if info.fast_zeroes { MAX_LONG_BYTES } else { MAX_ZEROES_BYTES };
        let config = Config {
            capacity: (info.size / SECTOR).into(),
            seg_max: MAX_SEGMENTS.into(),
            blk_size: block.into(),
            physical_block_exp: exp as u8,
            min_io_size: u16::try_from(blocks(info.physical_block)).unwrap_or(0).into(),
            opt_io_size: blocks(info.preferred_block).into(),
            num_queues: queues.into(),
            max_discard_sectors: sectors(MAX_LONG_BYTES).into(),
            max_discard_seg: 1.into(),
            discard_sector_alignment: sectors(info.discard_granularity.max(block).into()).into(),
            max_write_zeroes_sectors: sectors(zeroes).into(),
            max_write_zeroes_seg: 1.into(),
            write_zeroes_may_unmap: takes_discards.into(),
            ..Config::default()
        };
        let mut id = [0; ID_LEN];
        id.iter_mut().zip(serial.bytes()).for_each(|(to, byte)| *to = byte);
        BlkDevice { offered, config, serial: id, has_cache: info.write_cache }
    }

    /// The features that the device offers.
    #[must_use]
    pub fn offered(&self) -> Features {
        self.offered
    }

    /// The state of a device whose driver has accepted these features.
    #[must_use]
    pub fn state(&self, accepted: Features) -> DeviceState {
        DeviceState {
            // A driver that sends no flushes relies on completed writes.
            writes_through: self.has_cache && !accepted.contains(Features::BLK_FLUSH),
            is_read_only: self.offered.contains(Features::BLK_RO),
            has_event_idx: accepted.contains(Features::RING_EVENT_IDX),
            max_discard: u64::from(self.config.max_discard_sectors.get()).saturating_mul(SECTOR),
            max_zeroes: u64::from(self.config.max_write_zeroes_sectors.get()).saturating_mul(SECTOR),
            serial: self.serial,
        }
    }

    /// Bytes of the configuration space; those beyond its end are 0.
    #[must_use]
    pub fn config(&self, offset: usize, len: usize) -> Vec<u8> {
        let own = self.config.as_bytes().get(offset..).unwrap_or_default();
        own.iter().copied().chain(std::iter::repeat(0)).take(len).collect()
    }
}

const ALWAYS: Features = Features::BLK_SEG_MAX
    .union(Features::BLK_BLK_SIZE)
    .union(Features::BLK_TOPOLOGY)
    .union(Features::BLK_MQ)
    .union(Features::RING_INDIRECT_DESC)
    .union(Features::RING_EVENT_IDX)
    .union(Features::VERSION_1);

/// Largest number of data buffers of a request: with the two others, a chain fits into a queue of
/// 128, the smallest that is usual.
pub const MAX_SEGMENTS: u32 = 126;
/// Length of the longest discard in bytes, and of zeroes that need no data.
const MAX_LONG_BYTES: u64 = 1 << 30;
/// Length of the longest range of zeroes that the volume may have to write, in bytes: a longer one
/// would make the guest wait for its end.
const MAX_ZEROES_BYTES: u64 = 32 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    fn config(device: &BlkDevice) -> Config {
        Config::read_from_bytes(&device.config(0, size_of::<Config>())).unwrap()
    }

    #[test]
    fn the_device_has_the_blocks_size_and_cache_of_its_volume() {
        let info = VolumeInfo {
            logical_block: 4096,
            physical_block: 16_384,
            preferred_block: 65_536,
            write_cache: true,
            discard_granularity: 8192,
            ..VolumeInfo::new(1 << 30)
        };
        let device = BlkDevice::new(&info, 4, "a serial number of more than 20 bytes");
        assert!(
            device
                .offered()
                .contains(Features::BLK_FLUSH | Features::BLK_DISCARD | Features::BLK_WRITE_ZEROES)
        );
        assert!(!device.offered().contains(Features::BLK_RO));
        let config = config(&device);
        assert_eq!(
            (config.capacity.get(), config.blk_size.get(), config.physical_block_exp),
            (1 << 21, 4096, 2)
        );
        assert_eq!((config.min_io_size.get(), config.opt_io_size.get(), config.num_queues.get()), (4, 16, 4));
        assert_eq!(
            (config.discard_sector_alignment.get(), config.max_write_zeroes_sectors.get()),
            (16, 1 << 16)
        );
        assert_eq!(&device.state(Features::empty()).serial, b"a serial number of m");
    }

    #[test]
    fn a_read_only_volume_takes_neither_discards_nor_zeroes() {
        let info = VolumeInfo { read_only: true, discard_granularity: 4096, ..VolumeInfo::new(1 << 20) };
        let offered = BlkDevice::new(&info, 1, "").offered();
        assert!(offered.contains(Features::BLK_RO));
        assert!(
            !offered.intersects(Features::BLK_DISCARD | Features::BLK_WRITE_ZEROES | Features::BLK_FLUSH)
        );
    }

    #[test]
    fn a_driver_without_flushes_gets_writes_that_are_stable() {
        let info = VolumeInfo { write_cache: true, ..VolumeInfo::new(1 << 20) };
        let device = BlkDevice::new(&info, 1, "");
        assert!(device.state(Features::empty()).writes_through);
        assert!(!device.state(Features::BLK_FLUSH).writes_through);
    }

    #[test]
    fn reads_of_the_configuration_may_go_beyond_its_end() {
        let device = BlkDevice::new(&VolumeInfo::new(1 << 20), 1, "");
        assert_eq!(device.config(0, 2), [0, 8]);
        assert_eq!(device.config(58, 4), [0; 4]);
        assert_eq!(device.config(usize::MAX, 256), [0; 256]);
    }
}
