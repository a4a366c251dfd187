//! Commands that report properties of a unit.

use super::super::testing::shaped;
use super::*;
use blockmux_volume::{NullVolume, VolumeInfo};

fn serial_number(client: &mut TestNexus) -> Vec<u8> {
    client.run(&[0x12, 1, 0x80, 1, 0, 0]).good()
}

#[test]
fn the_serial_number_is_unique_to_the_volume() {
    let bench = DeviceBench::new();
    let page = serial_number(&mut bench.client("a"));
    assert_eq!((page[1], usize::from(page[3])), (0x80, page.len() - 4));
    assert_eq!(page[4..], *bench.unit.identity.serial.as_bytes());
    assert_eq!(serial_number(&mut bench.client("b")), page, "every initiator reads the same page");
    let volume = Arc::new(MemVolume::new(1 << 20));
    let other = DeviceBench::around(LogicalUnit::new(UnitIdentity::of("another"), volume.clone()), volume);
    assert_ne!(serial_number(&mut other.client("a")), page);
}

const CAPACITY_10: [u8; 10] = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn capacity_16(len: u8) -> [u8; 16] {
    [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, len, 0, 0]
}

#[test]
fn both_forms_of_read_capacity_return_the_last_lba() {
    let mut client = DeviceBench::over(shaped(VolumeInfo::new(1 << 20))).client("a");
    assert_eq!(client.run(&CAPACITY_10).good(), [0, 0, 7, 0xff, 0, 0, 2, 0]);
    let long = client.run(&capacity_16(32)).good();
    assert_eq!((long.len(), &long[..12]), (32, &[0, 0, 0, 0, 0, 0, 7, 0xff, 0, 0, 2, 0][..]));
    assert_eq!(client.run(&capacity_16(12)).good(), long[..12], "limited to the allocation length");
}

#[test]
fn a_capacity_that_does_not_fit_refers_to_read_capacity_16() {
    let blocks = u64::from(u32::MAX) + 1;
    for (blocks, last) in [(blocks, [0xff, 0xff, 0xff, 0xff]), (blocks - 1, [0xff, 0xff, 0xff, 0xfe])] {
        let mut client = DeviceBench::over(Arc::new(NullVolume::new(blocks << 9))).client("a");
        assert_eq!(client.run(&CAPACITY_10).good()[..4], last);
        let reported = client.run(&capacity_16(32)).good();
        assert_eq!(u64::from_be_bytes(reported[..8].try_into().unwrap()), blocks - 1);
    }
}

#[test]
fn the_physical_block_length_is_reported_as_an_exponent() {
    let info = VolumeInfo { physical_block: 4096, ..VolumeInfo::new(1 << 20) };
    let mut client = DeviceBench::over(shaped(info)).client("a");
    assert_eq!(client.run(&capacity_16(32)).good()[13], 3);
    let large = VolumeInfo { logical_block: 4096, physical_block: 4096, ..VolumeInfo::new(1 << 20) };
    let mut client = DeviceBench::over(shaped(large)).client("a");
    assert_eq!(client.run(&CAPACITY_10).good(), [0, 0, 0, 0xff, 0, 0, 16, 0]);
    assert_eq!(client.run(&capacity_16(32)).good()[13], 0);
}
