//! RESERVE and RELEASE of 6 and 10 bytes (SPC-2).
//!
//! The whole unit, for the nexus itself: extents and third parties went out of SPC-2 and of use.
//! The reservation lasts until it is released, its nexus is lost, or the unit is reset.

use super::ScsiStatus;
use super::task::{Action, Context, MultiStepCommand, TaskFailure, TaskOutcome};
use crate::scsi::sense::Sense;
use crate::volume_state::{Drain, Notices};
use blockmux_volume::Output;

pub(super) fn reserve(cx: &mut Context<'_>) -> TaskOutcome {
    check(cx)?;
    let key = cx.unit.key;
    let reserved = cx.unit.unit.served.change(false, |table| {
        // SPC-2, "Reservations", as CRH is 0: registrations keep reservations of this kind out.
        if table.reserved_by.is_some_and(|holder| holder != key)
            || !table.reservations.registrations.is_empty()
        {
            return Err(TaskFailure::status(ScsiStatus::RESERVATION_CONFLICT));
        }
        table.reserved_by = Some(key);
        Ok(Notices::new())
    });
    reserved?;
    let mut draining = Draining(Drain::new(&cx.unit.unit.served));
    let outcome = draining.on_resume(cx);
    if matches!(outcome, Ok(Action::Wait)) {
        cx.work(draining);
    }
    outcome
}

/// Waits for what others began before they were kept out.
struct Draining(Drain);

impl MultiStepCommand for Draining {
    fn on_io(&mut self, _cx: &mut Context<'_>, _output: Output) -> TaskOutcome {
        Err(TaskFailure::internal())
    }

    fn on_resume(&mut self, _cx: &mut Context<'_>) -> TaskOutcome {
        if self.0.is_over() { Ok(Action::good()) } else { Ok(Action::Wait) }
    }
}

/// SPC-2, the RELEASE commands: GOOD for everyone, with an effect for the holder.
pub(super) fn release(cx: &mut Context<'_>) -> TaskOutcome {
    check(cx)?;
    // SPC-2, "Reservations": with registrations all of these commands conflict, whoever sends them.
    if cx.unit.unit.served.look(|table| !table.reservations.registrations.is_empty()) {
        return Err(TaskFailure::status(ScsiStatus::RESERVATION_CONFLICT));
    }
    cx.unit.unit.served.release(Some(cx.unit.key));
    Ok(Action::good())
}

/// 3RDPTY, LONGID and EXTENT.
fn check(cx: &Context<'_>) -> Result<(), Sense> {
    if cx.command.cdb.byte(1) & 0x13 == 0 { Ok(()) } else { Err(Sense::cdb_bit(1, 4)) }
}

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::Bench;
    use crate::scsi::{Lun, ScsiStatus, TaskManagement};

    const RESERVE: [u8; 6] = [0x16, 0, 0, 0, 0, 0];
    const RELEASE: [u8; 6] = [0x17, 0, 0, 0, 0, 0];
    const MODE_SENSE: [u8; 6] = [0x1a, 0, 0x3f, 0, 255, 0];

    #[test]
    fn a_reservation_keeps_others_out_until_its_holder_releases_it() {
        let bench = Bench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        a.run(&RESERVE).good();
        a.run(&RESERVE).good();
        for cdb in [
            &RESERVE[..],
            &MODE_SENSE,
            &[0; 6],
            &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0],
            &[0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0],
        ] {
            assert_eq!(b.run(cdb).status, ScsiStatus::RESERVATION_CONFLICT, "{cdb:x?}");
        }
        b.run(&RELEASE).good();
        b.run(&[0x12, 0, 0, 0, 36, 0]).good();
        a.run(&MODE_SENSE).good();
        let keys = [0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0];
        assert_eq!(a.run(&keys).status, ScsiStatus::RESERVATION_CONFLICT, "not even its holder");
        b.run(&[0x1e, 0, 0, 0, 0, 0]).good();
        assert_eq!(b.run(&[0x1e, 0, 0, 0, 1, 0]).status, ScsiStatus::RESERVATION_CONFLICT);
        a.run(&[0x57, 0, 0, 0, 0, 0, 0, 0, 0, 0]).good();
        b.run(&[0x56, 0, 0, 0, 0, 0, 0, 0, 0, 0]).good();
        assert_eq!(a.run(&RESERVE).status, ScsiStatus::RESERVATION_CONFLICT);
    }

    #[test]
    fn it_goes_with_the_nexus_and_with_a_reset() {
        let bench = Bench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        a.run(&RESERVE).good();
        drop(a);
        b.run(&RESERVE).good();
        let mut c = bench.client("c");
        c.server.manage(TaskManagement::LogicalUnitReset, Lun::new(0));
        assert_eq!(c.run(&RESERVE).check(), (6, 0x2903));
        c.run(&RESERVE).good();
    }

    #[test]
    fn registrations_keep_it_out() {
        let mut a = Bench::new().client("a");
        let register = [0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0];
        a.run_with(&register, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0])
            .good();
        assert_eq!(a.run(&RESERVE).status, ScsiStatus::RESERVATION_CONFLICT);
        assert_eq!(a.run(&RELEASE).status, ScsiStatus::RESERVATION_CONFLICT);
        assert_eq!(a.run(&[0x16, 1, 0, 0, 0, 0]).check(), (5, 0x2400));
    }
}
