//! Construction of command descriptor blocks.

use blockmux_wire::scsi::cdb::{Cdb10, Cdb12, Cdb16, EVPD, FUA, Inquiry};
use blockmux_wire::scsi::opcode::{ScsiOpcode, maintenance_in, service_action_in_16};
use blockmux_wire::scsi::provisioning::WRITE_SAME_UNMAP;
use zerocopy::{FromZeros, Immutable, IntoBytes};

/// A range of blocks of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnitBlocks {
    pub(super) lba: u64,
    pub(super) count: u32,
}

/// READ (16) or, with `is_long` false, READ (10).
pub(super) fn read(is_long: bool, blocks: UnitBlocks) -> [u8; 16] {
    let (long, short) = (ScsiOpcode::READ_16, ScsiOpcode::READ_10);
    if is_long { cdb_16(long, 0, blocks) } else { cdb_10(short, 0, blocks) }
}

/// WRITE (16) or, with `is_long` false, WRITE (10).
pub(super) fn write(is_long: bool, blocks: UnitBlocks, fua: bool) -> [u8; 16] {
    let flags = if fua { FUA } else { 0 };
    let (long, short) = (ScsiOpcode::WRITE_16, ScsiOpcode::WRITE_10);
    if is_long { cdb_16(long, flags, blocks) } else { cdb_10(short, flags, blocks) }
}

/// SYNCHRONIZE CACHE of the whole unit, 16 or 10 bytes.
pub(super) fn synchronize_cache(is_long: bool) -> [u8; 16] {
    let all = UnitBlocks { lba: 0, count: 0 };
    let (long, short) = (ScsiOpcode::SYNCHRONIZE_CACHE_16, ScsiOpcode::SYNCHRONIZE_CACHE_10);
    if is_long { cdb_16(long, 0, all) } else { cdb_10(short, 0, all) }
}

/// WRITE SAME (16) with one block of data-out.
pub(super) fn write_same(blocks: UnitBlocks, may_unmap: bool) -> [u8; 16] {
    cdb_16(ScsiOpcode::WRITE_SAME_16, if may_unmap { WRITE_SAME_UNMAP } else { 0 }, blocks)
}

/// UNMAP with a parameter list of `len` bytes.
pub(super) fn unmap(len: u32) -> [u8; 16] {
    cdb_10(ScsiOpcode::UNMAP, 0, UnitBlocks { lba: 0, count: len })
}

/// GET LBA STATUS starting at `lba`.
pub(super) fn get_lba_status(lba: u64, allocation: u32) -> [u8; 16] {
    let action = service_action_in_16::GET_LBA_STATUS as u8;
    cdb_16(ScsiOpcode::SERVICE_ACTION_IN_16, action, UnitBlocks { lba, count: allocation })
}

/// READ CAPACITY (16).
pub(super) fn read_capacity_16(allocation: u32) -> [u8; 16] {
    let action = service_action_in_16::READ_CAPACITY_16 as u8;
    cdb_16(ScsiOpcode::SERVICE_ACTION_IN_16, action, UnitBlocks { lba: 0, count: allocation })
}

/// READ CAPACITY (10).
pub(super) fn read_capacity_10() -> [u8; 16] {
    cdb_10(ScsiOpcode::READ_CAPACITY_10, 0, UnitBlocks { lba: 0, count: 0 })
}

/// INQUIRY for standard data or a vital product data page.
pub(super) fn inquiry(page: Option<u8>, allocation: u16) -> [u8; 16] {
    padded(&Inquiry {
        opcode: ScsiOpcode::INQUIRY.0,
        flags: if page.is_some() { EVPD } else { 0 },
        page_code: page.unwrap_or(0),
        allocation_length: allocation.into(),
        control: 0,
    })
}

/// MODE SENSE (6) of one page, without block descriptors.
pub(super) fn mode_sense_6(page: u8, allocation: u8) -> [u8; 16] {
    padded(&[ScsiOpcode::MODE_SENSE_6.0, DBD, page, 0, allocation, 0])
}

/// REPORT LUNS.
pub(super) fn report_luns(allocation: u32) -> [u8; 16] {
    let opcode = ScsiOpcode::REPORT_LUNS.0;
    padded(&Cdb12 { opcode, transfer_length: allocation.into(), ..FromZeros::new_zeroed() })
}

/// REPORT TARGET PORT GROUPS.
pub(super) fn report_target_port_groups(allocation: u32) -> [u8; 16] {
    padded(&Cdb12 {
        opcode: ScsiOpcode::MAINTENANCE_IN.0,
        flags: maintenance_in::REPORT_TARGET_PORT_GROUPS as u8,
        transfer_length: allocation.into(),
        ..FromZeros::new_zeroed()
    })
}

#[inline]
fn cdb_16(opcode: ScsiOpcode, flags: u8, blocks: UnitBlocks) -> [u8; 16] {
    padded(&Cdb16 {
        opcode: opcode.0,
        flags,
        logical_block_address: blocks.lba.into(),
        transfer_length: blocks.count.into(),
        group_number: 0,
        control: 0,
    })
}

/// The caller ensures that the values fit the fields.
#[inline]
fn cdb_10(opcode: ScsiOpcode, flags: u8, blocks: UnitBlocks) -> [u8; 16] {
    padded(&Cdb10 {
        opcode: opcode.0,
        flags,
        logical_block_address: (blocks.lba as u32).into(),
        group_number: 0,
        transfer_length: (blocks.count as u16).into(),
        control: 0,
    })
}

#[inline]
fn padded(cdb: &(impl IntoBytes + Immutable)) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes.iter_mut().zip(cdb.as_bytes()).for_each(|(to, from)| *to = *from);
    bytes
}

/// Length of READ CAPACITY (16) parameter data, in bytes.
pub(super) const CAPACITY_16_LEN: u32 = 32;
/// Length of READ CAPACITY (10) parameter data, in bytes.
pub(super) const CAPACITY_10_LEN: u32 = 8;
/// MODE SENSE: disable block descriptors (SPC-5).
const DBD: u8 = 1 << 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cdb_fields_are_at_their_sbc_offsets() {
        let blocks = UnitBlocks { lba: 0x0102_0304_0506_0708, count: 0x0a0b };
        let expected = [0x8a, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0x0a, 0x0b, 0, 0];
        assert_eq!(write(true, blocks, true), expected);
        let short = UnitBlocks { lba: 0x0102_0304, count: 0x0506 };
        assert_eq!(read(false, short)[..10], [0x28, 0, 1, 2, 3, 4, 0, 5, 6, 0]);
        assert_eq!(synchronize_cache(true)[..2], [0x91, 0]);
        assert_eq!(synchronize_cache(false)[..2], [0x35, 0]);
        assert_eq!(write_same(blocks, true)[..3], [0x93, 8, 1]);
        assert_eq!(unmap(24)[..10], [0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0]);
        assert_eq!(get_lba_status(5, 4096), [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 16, 0, 0, 0]);
        assert_eq!(read_capacity_16(32), [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0]);
        assert_eq!(read_capacity_10()[..10], [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(inquiry(Some(0xb0), 255)[..6], [0x12, 1, 0xb0, 0, 255, 0]);
        assert_eq!(inquiry(None, 96)[..6], [0x12, 0, 0, 0, 96, 0]);
        assert_eq!(mode_sense_6(8, 192)[..6], [0x1a, 8, 8, 0, 192, 0]);
        assert_eq!(report_target_port_groups(2056)[..12], [0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 8, 8, 0, 0]);
        assert_eq!(report_luns(2056)[..12], [0xa0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 0, 0]);
    }
}
