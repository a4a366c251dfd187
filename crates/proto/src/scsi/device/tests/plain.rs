//! Commands that only tell what a unit is.

use super::super::testing::shaped;
use super::*;
use blockmux_volume::{NullVolume, VolumeInfo};

fn serial_number(client: &mut Client) -> Vec<u8> {
    client.run(&[0x12, 1, 0x80, 1, 0, 0]).good()
}

#[test]
fn the_serial_number_is_the_volume_s_and_no_other_s() {
    let bench = Bench::new();
    let page = serial_number(&mut bench.client("a"));
    assert_eq!((page[1], usize::from(page[3])), (0x80, page.len() - 4));
    assert_eq!(page[4..], *bench.unit.identity.serial.as_bytes());
    assert_eq!(serial_number(&mut bench.client("b")), page, "whoever asks");
    let volume = Arc::new(MemVolume::new(1 << 20));
    let other = Bench::around(LogicalUnit::new(UnitIdentity::of("another"), volume.clone()), volume);
    assert_ne!(serial_number(&mut other.client("a")), page);
}

const CAPACITY_10: [u8; 10] = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn capacity_16(len: u8) -> [u8; 16] {
    [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, len, 0, 0]
}

#[test]
fn both_lengths_of_read_capacity_tell_the_last_block() {
    let mut client = Bench::over(shaped(VolumeInfo::new(1 << 20))).client("a");
    assert_eq!(client.run(&CAPACITY_10).good(), [0, 0, 7, 0xff, 0, 0, 2, 0]);
    let long = client.run(&capacity_16(32)).good();
    assert_eq!((long.len(), &long[..12]), (32, &[0, 0, 0, 0, 0, 0, 7, 0xff, 0, 0, 2, 0][..]));
    assert_eq!(client.run(&capacity_16(12)).good(), long[..12], "no more than there is room for");
}

#[test]
fn a_capacity_that_does_not_fit_sends_to_the_longer_command() {
    let blocks = u64::from(u32::MAX) + 1;
    for (blocks, last) in [(blocks, [0xff, 0xff, 0xff, 0xff]), (blocks - 1, [0xff, 0xff, 0xff, 0xfe])] {
        let mut client = Bench::over(Arc::new(NullVolume::new(blocks << 9))).client("a");
        assert_eq!(client.run(&CAPACITY_10).good()[..4], last);
        let told = client.run(&capacity_16(32)).good();
        assert_eq!(u64::from_be_bytes(told[..8].try_into().unwrap()), blocks - 1);
    }
}

#[test]
fn physical_blocks_are_told_as_a_power_of_two() {
    let info = VolumeInfo { physical_block: 4096, ..VolumeInfo::new(1 << 20) };
    let mut client = Bench::over(shaped(info)).client("a");
    assert_eq!(client.run(&capacity_16(32)).good()[13], 3);
    let large = VolumeInfo { logical_block: 4096, physical_block: 4096, ..VolumeInfo::new(1 << 20) };
    let mut client = Bench::over(shaped(large)).client("a");
    assert_eq!(client.run(&CAPACITY_10).good(), [0, 0, 0, 0xff, 0, 0, 16, 0]);
    assert_eq!(client.run(&capacity_16(32)).good()[13], 0);
}
