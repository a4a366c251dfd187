//! READ CAPACITY (SBC-4).

use super::task::{CommandContext, TaskOutcome, answer};
use blockmux_wire::scsi::capacity::{LBPME, LBPRZ, ReadCapacity10, ReadCapacity16};
use zerocopy::{IntoBytes, U16, U32, U64};

pub(super) fn read_capacity_10(cx: &mut CommandContext<'_>) -> TaskOutcome {
    cx.unit.refresh();
    let view = &cx.unit.view;
    // SBC-4, the READ CAPACITY (10) command: FFFFFFFFh directs the initiator to READ CAPACITY (16).
    let last = u32::try_from(view.blocks.saturating_sub(1)).unwrap_or(u32::MAX);
    let data = ReadCapacity10 {
        returned_logical_block_address: U32::new(last),
        logical_block_length: U32::new(view.block_len),
    };
    answer(data.as_bytes(), size_of::<ReadCapacity10>())
}

pub(super) fn read_capacity_16(cx: &mut CommandContext<'_>) -> TaskOutcome {
    cx.unit.refresh();
    let view = &cx.unit.view;
    let per_physical = view.info.physical_block.checked_div(view.block_len).unwrap_or(1).max(1);
    let provisioning = match (view.is_thin(), view.unmaps_to_zeroes()) {
        (false, _) => 0,
        (true, false) => LBPME,
        (true, true) => LBPME | LBPRZ,
    };
    let data = ReadCapacity16 {
        returned_logical_block_address: U64::new(view.blocks.saturating_sub(1)),
        logical_block_length: U32::new(view.block_len),
        protection: 0,
        logical_blocks_per_physical_block_exponent: per_physical.ilog2() as u8,
        provisioning_and_lowest_aligned_lba: U16::new(provisioning),
        reserved: [0; 16],
    };
    answer(data.as_bytes(), cx.command.cdb.u32(10) as usize)
}
