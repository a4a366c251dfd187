//! REPORT LUNS (SPC-5).

use super::Command;
use super::target::ScsiTarget;
use super::task::{CommandContext, TaskOutcome, answer};
use crate::scsi::sense::Sense;
use blockmux_wire::scsi::lun::REPORT_LUNS_WELL_KNOWN;

pub(super) fn report_luns(cx: &mut CommandContext<'_>) -> TaskOutcome {
    report(cx.target, cx.command)
}

/// REPORT LUNS; works on any LUN, with or without a logical unit.
pub(super) fn report(target: &ScsiTarget, command: &Command) -> TaskOutcome {
    let units = || target.luns().map(|lun| lun.0);
    let luns: Vec<u64> = match command.cdb.byte(2) {
        ALL_BUT_WELL_KNOWN => units().collect(),
        WELL_KNOWN => vec![REPORT_LUNS_WELL_KNOWN],
        ALL => units().chain([REPORT_LUNS_WELL_KNOWN]).collect(),
        // There are no administrative or subsidiary logical units.
        ADMINISTRATIVE..=SUBSIDIARY => Vec::new(),
        _ => return Err(Sense::in_cdb(2).into()),
    };
    let allocation_length = command.cdb.u32(6);
    if allocation_length < 16 {
        return Err(Sense::in_cdb(6).into());
    }
    let length = luns.len().saturating_mul(8) as u32;
    let mut bytes = Vec::with_capacity(luns.len().saturating_mul(8).saturating_add(8));
    bytes.extend(length.to_be_bytes());
    bytes.extend([0; 4]);
    luns.iter().for_each(|lun| bytes.extend(lun.to_be_bytes()));
    answer(&bytes, allocation_length as usize)
}

/// SELECT REPORT values.
const ALL_BUT_WELL_KNOWN: u8 = 0x00;
const WELL_KNOWN: u8 = 0x01;
const ALL: u8 = 0x02;
const ADMINISTRATIVE: u8 = 0x10;
const SUBSIDIARY: u8 = 0x12;
