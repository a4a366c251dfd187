//! START STOP UNIT and PREVENT ALLOW MEDIUM REMOVAL (SBC-4).

use super::task::{CommandContext, HandlerAction, TaskOutcome};
use crate::scsi::sense::Sense;
use blockmux_volume::Op;
use blockmux_wire::scsi::sense::Asc;

/// Ejects or loads the medium of a removable unit; for other units, a stop only flushes. A volume
/// has no motor and no power conditions, so the unit stays ready.
pub(super) fn start_stop_unit(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let flags = cx.command.cdb.byte(4);
    let (loej, start) = (flags & LOEJ != 0, flags & START != 0);
    // SBC-4, the START STOP UNIT command: with a power condition, START and LOEJ are ignored.
    let is_condition = flags & POWER_CONDITION_MASK != 0;
    // SBC-4, conflicts with persistent reservations: only a plain start is permitted for every
    // nexus.
    if !start || is_condition {
        cx.check_write_access()?;
    }
    if loej && !is_condition {
        if !cx.unit.unit.read_state(|state| state.removable) {
            return Err(Sense::cdb_bit(4, 1).into());
        }
        move_medium(cx, start)?;
    }
    if start || is_condition || flags & NO_FLUSH != 0 {
        return Ok(HandlerAction::good());
    }
    cx.last_io(Op::Flush, 0, 0, None)
}

/// Loads or ejects the medium, unless a nexus prevents it.
fn move_medium(cx: &mut CommandContext<'_>, load: bool) -> Result<(), Sense> {
    let key = cx.unit.key;
    let moved = cx.unit.unit.change(|state| {
        if state.nexuses.values().any(|nexus| nexus.prevents_removal) {
            return false;
        }
        if state.ejected && load {
            state.establish_attention_for_all(Some(key), Asc::NOT_READY_TO_READY_CHANGE);
        }
        state.ejected = !load;
        true
    });
    if moved { Ok(()) } else { Err(Sense::illegal(Asc::MEDIUM_REMOVAL_PREVENTED)) }
}

/// Prevents or allows medium removal. PREVENT lasts until the nexus allows removal or is lost, or
/// the unit is reset.
pub(super) fn prevent_allow(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let prevent = match cx.command.cdb.byte(4) & 0b11 {
        0b00 => false,
        0b01 => true,
        _ => return Err(Sense::cdb_bit(4, 1).into()),
    };
    if prevent {
        cx.check_write_access()?;
    }
    let key = cx.unit.key;
    cx.unit.unit.change(|state| {
        if let Some(nexus) = state.nexus(key) {
            nexus.prevents_removal = prevent;
        }
    });
    Ok(HandlerAction::good())
}

const POWER_CONDITION_MASK: u8 = 0xf0;
const NO_FLUSH: u8 = 1 << 2;
const LOEJ: u8 = 1 << 1;
const START: u8 = 1 << 0;

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::DeviceBench;
    use crate::scsi::{Lun, ManagementResponse, TaskManagement};

    const TUR: [u8; 6] = [0; 6];
    const PREVENT: [u8; 6] = [0x1e, 0, 0, 0, 1, 0];
    const ALLOW: [u8; 6] = [0x1e, 0, 0, 0, 0, 0];
    const EJECT: [u8; 6] = [0x1b, 0, 0, 0, 2, 0];
    const LOAD: [u8; 6] = [0x1b, 0, 0, 0, 3, 0];

    #[test]
    fn an_ejected_medium_is_not_present_until_it_is_loaded() {
        let mut client = DeviceBench::removable().client("a");
        client.run(&EJECT).good();
        for cdb in [&TUR[..], &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(client.run(cdb).check(), (2, 0x3a00), "{cdb:x?}");
        }
        client.run(&[0x12, 0, 0, 0, 96, 0]).good();
        client.run(&LOAD).good();
        client.run(&TUR).good();
    }

    #[test]
    fn initiators_are_notified_when_a_medium_becomes_fixed_and_it_is_loaded() {
        let bench = DeviceBench::removable();
        let mut client = bench.client("a");
        client.run(&EJECT).good();
        bench.unit.set_removable(true);
        assert_eq!(client.run(&TUR).check(), (2, 0x3a00));
        bench.unit.set_removable(false);
        assert_eq!(client.run(&TUR).check(), (6, 0x3f03));
        client.run(&TUR).good();
        assert_eq!(client.run(&[0x12, 0, 0, 0, 36, 0]).good()[1], 0);
        assert_eq!(client.run(&EJECT).check(), (5, 0x2400));
    }

    #[test]
    fn removal_is_prevented_until_every_nexus_allows_it() {
        let bench = DeviceBench::removable();
        let (mut first, mut second) = (bench.client("a"), bench.client("b"));
        first.run(&PREVENT).good();
        second.run(&PREVENT).good();
        assert_eq!(first.run(&EJECT).check(), (5, 0x5302));
        first.run(&ALLOW).good();
        assert_eq!(first.run(&EJECT).check(), (5, 0x5302));
        drop(second);
        first.run(&EJECT).good();
        first.run(&PREVENT).good();
        assert_eq!(first.run(&LOAD).check(), (5, 0x5302));
        let reset = first.server.manage(TaskManagement::LogicalUnitReset, Lun::new(0));
        assert_eq!(reset, ManagementResponse::FunctionComplete);
        assert_eq!(first.run(&TUR).check(), (6, 0x2903));
        first.run(&LOAD).good();
    }

    #[test]
    fn stop_and_power_conditions_leave_the_unit_ready() {
        let mut client = DeviceBench::removable().client("a");
        for (modifier, flags) in [(0, 0), (0, 4), (0, 0x10), (0, 0x32), (3, 0x20), (0, 1)] {
            client.run(&[0x1b, 1, 0, modifier, flags, 0]).good();
            client.run(&TUR).good();
        }
        assert_eq!(DeviceBench::new().client("a").run(&EJECT).check(), (5, 0x2400));
    }
}
