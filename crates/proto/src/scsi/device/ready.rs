//! TEST UNIT READY and REQUEST SENSE (SPC-5).

use super::Command;
use super::task::{CommandContext, HandlerAction, TaskOutcome, answer};
use crate::scsi::sense::Sense;
use blockmux_wire::scsi::sense::{Asc, SenseKey};

pub(super) fn test_unit_ready(_cx: &mut CommandContext<'_>) -> TaskOutcome {
    Ok(HandlerAction::good())
}

/// Returns and clears a pending unit attention.
pub(super) fn request_sense(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let attention = if cx.unit.view.has_attention { cx.unit.unit.take_attention(cx.unit.key) } else { None };
    let sense = match attention {
        Some(asc) => Sense::new(SenseKey::UNIT_ATTENTION, asc),
        None => cx
            .unit
            .view
            .sanitizing
            .unwrap_or(Sense::new(SenseKey::NO_SENSE, Asc::NO_ADDITIONAL_SENSE_INFORMATION)),
    };
    answer_sense(cx.command, sense)
}

/// SPC-5, the REQUEST SENSE command: for a missing logical unit, the sense data reports that with
/// status GOOD.
pub(super) fn sense_without_unit(command: &Command) -> TaskOutcome {
    answer_sense(command, Sense::illegal(Asc::LOGICAL_UNIT_NOT_SUPPORTED))
}

/// Returns sense data in the format that DESC selects.
fn answer_sense(command: &Command, sense: Sense) -> TaskOutcome {
    let sense = Sense { descriptor_format: command.cdb.byte(1) & DESC != 0, ..sense };
    answer(&sense.to_bytes(), command.cdb.byte(4).into())
}

/// Descriptor format.
const DESC: u8 = 1 << 0;
