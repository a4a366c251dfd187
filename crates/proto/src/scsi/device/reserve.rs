//! RESERVE and RELEASE of 6 and 10 bytes (SPC-2).
//!
//! A reservation covers the whole unit; SPC-2 extents and third-party reservations are not
//! supported. It lasts until it is released, its nexus is lost, or the unit is reset.

use super::ScsiStatus;
use super::task::{CommandContext, HandlerAction, MultiStepCommand, TaskFailure, TaskOutcome};
use crate::scsi::sense::Sense;
use crate::volume_state::{Drain, ReservationChange, Table};
use blockmux_volume::Output;

pub(super) fn reserve(cx: &mut CommandContext<'_>) -> TaskOutcome {
    check(cx)?;
    let volume_state = &cx.unit.unit.volume_state;
    let confirm = ReservationChange::confirmation(volume_state, cx.unit.epoch);
    let mut command = ReserveCommand { confirm, drain: None };
    let outcome = command.on_resume(cx);
    if matches!(outcome, Ok(HandlerAction::Wait)) {
        cx.work(command);
    }
    outcome
}

/// A RESERVE in progress: reserves the unit, then waits for I/O of other nexuses that started
/// before.
struct ReserveCommand {
    /// Of a volume that processes serve in turns: until the storage has said that this one has it.
    confirm: Option<ReservationChange>,
    drain: Option<Drain>,
}

impl MultiStepCommand for ReserveCommand {
    fn on_io(&mut self, _cx: &mut CommandContext<'_>, _output: Output) -> TaskOutcome {
        Err(TaskFailure::internal())
    }

    fn on_resume(&mut self, cx: &mut CommandContext<'_>) -> TaskOutcome {
        if let Some(drain) = &self.drain {
            return Ok(if drain.is_over() { HandlerAction::good() } else { HandlerAction::Wait });
        }
        if let Some(confirm) = &mut self.confirm {
            let key = cx.unit.key;
            // The storage is not asked about a command that is refused anyway.
            let check = |table: &Table| match table.can_reserve(key) {
                true => Ok(()),
                false => Err(TaskFailure::status(ScsiStatus::RESERVATION_CONFLICT)),
            };
            if !confirm.confirm(check)? {
                return Ok(HandlerAction::Wait);
            }
            self.confirm = None;
        }
        let volume_state = &cx.unit.unit.volume_state;
        match volume_state.reserve(cx.unit.key, cx.unit.epoch)? {
            None => Ok(HandlerAction::Wait),
            Some(false) => Err(TaskFailure::status(ScsiStatus::RESERVATION_CONFLICT)),
            Some(true) => {
                self.drain = Some(Drain::new(volume_state));
                self.on_resume(cx)
            }
        }
    }
}

/// SPC-2, the RELEASE commands: GOOD for every nexus, with an effect for the holder.
pub(super) fn release(cx: &mut CommandContext<'_>) -> TaskOutcome {
    check(cx)?;
    // SPC-2, "Reservations": with registrations these commands conflict for every nexus.
    if cx.unit.unit.volume_state.with_table(|table| !table.reservations.registrations.is_empty()) {
        return Err(TaskFailure::status(ScsiStatus::RESERVATION_CONFLICT));
    }
    cx.unit.unit.volume_state.release(Some(cx.unit.key));
    Ok(HandlerAction::good())
}

/// Rejects 3RDPTY, LONGID and EXTENT.
fn check(cx: &CommandContext<'_>) -> Result<(), Sense> {
    if cx.command.cdb.byte(1) & 0x13 == 0 { Ok(()) } else { Err(Sense::cdb_bit(1, 4)) }
}

#[cfg(test)]
mod tests {
    use crate::scsi::device::testing::{DeviceBench, command};
    use crate::scsi::device::unit::{LogicalUnit, UnitIdentity};
    use crate::scsi::{Lun, ScsiStatus, TaskManagement, TaskStep};
    use crate::volume_state::{TestCluster, VolumeState};
    use std::sync::Arc;

    const RESERVE: [u8; 6] = [0x16, 0, 0, 0, 0, 0];
    const RELEASE: [u8; 6] = [0x17, 0, 0, 0, 0, 0];
    const MODE_SENSE: [u8; 6] = [0x1a, 0, 0x3f, 0, 255, 0];
    const READ_KEYS: [u8; 10] = [0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    /// MODE SELECT of the Control mode page with SWP.
    const PROTECT: [u8; 6] = [0x15, 0x10, 0, 0, 16, 0];
    const PROTECTED: [u8; 16] = [0, 0, 0, 0, 0x0a, 10, 0, 0x10, 8, 0x40, 0, 0, 255, 255, 0, 0];

    /// An active volume that processes serve in turns, and its device.
    fn owned() -> (TestCluster, Arc<VolumeState>, DeviceBench) {
        let cluster = TestCluster::default();
        let process = cluster.process();
        let unit = LogicalUnit::over(UnitIdentity::of("a"), &process);
        let bench = DeviceBench::around(unit, process.volume().clone());
        cluster.promote(&process);
        (cluster, process, bench)
    }

    #[test]
    fn a_reservation_excludes_others_until_its_holder_releases_it() {
        let bench = DeviceBench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        a.run(&RESERVE).good();
        a.run(&RESERVE).good();
        for cdb in [&RESERVE[..], &MODE_SENSE, &[0; 6], &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &READ_KEYS] {
            assert_eq!(b.run(cdb).status, ScsiStatus::RESERVATION_CONFLICT, "{cdb:x?}");
        }
        b.run(&RELEASE).good();
        b.run(&[0x12, 0, 0, 0, 36, 0]).good();
        a.run(&MODE_SENSE).good();
        assert_eq!(a.run(&READ_KEYS).status, ScsiStatus::RESERVATION_CONFLICT, "also for its holder");
        b.run(&[0x1e, 0, 0, 0, 0, 0]).good();
        assert_eq!(b.run(&[0x1e, 0, 0, 0, 1, 0]).status, ScsiStatus::RESERVATION_CONFLICT);
        a.run(&[0x57, 0, 0, 0, 0, 0, 0, 0, 0, 0]).good();
        b.run(&[0x56, 0, 0, 0, 0, 0, 0, 0, 0, 0]).good();
        assert_eq!(a.run(&RESERVE).status, ScsiStatus::RESERVATION_CONFLICT);
    }

    #[test]
    fn a_reservation_ends_with_its_nexus_and_with_a_reset() {
        let bench = DeviceBench::new();
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
    fn a_reservation_is_acknowledged_by_an_owner_and_to_a_session_of_its_turn() {
        let (cluster, process, bench) = owned();
        let mut old = bench.client("old");
        cluster.fail(true);
        assert_eq!(old.run(&RESERVE).check(), (4, 0x0c00), "the storage says that it is shut out");
        cluster.fail(false);
        assert!(process.lose());
        cluster.promote(&process);
        assert_eq!(old.run(&RESERVE).check(), (6, 0x2a06));
        let late: [(&[u8], &[u8]); 8] = [
            (&RESERVE, &[]),
            (&RELEASE, &[]),
            (&[0x48, 2, 0, 0, 0, 0, 0, 0, 0, 0], &[]),
            (&[0x48, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0], &[]),
            (&[0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0], &[0; 24]),
            (&PROTECT, &PROTECTED),
            (&[0x1b, 0, 0, 0, 2, 0], &[]),
            (&[0x1e, 0, 0, 0, 1, 0], &[]),
        ];
        for (cdb, data) in late {
            assert_eq!(old.run_with(cdb, data).check(), (2, 0x040c), "{cdb:x?}");
        }
        assert_eq!(old.run(&READ_KEYS).check(), (2, 0x040c));
        let mut new = bench.client("new");
        new.run(&RESERVE).good();
        old.server.manage(TaskManagement::LogicalUnitReset, Lun::new(0));
        let mut other = bench.client("other");
        assert_eq!(other.run(&RESERVE).status, ScsiStatus::RESERVATION_CONFLICT, "a reset of before");
    }

    #[test]
    fn a_parameter_list_that_arrives_when_the_volume_was_lost_changes_nothing() {
        let (cluster, process, bench) = owned();
        let mut old = bench.client("old");
        let (mut task, step) = old.server.begin(&command(Lun::new(0), &PROTECT, PROTECTED.len()));
        assert!(matches!(step, TaskStep::DataOut { .. }) && process.lose());
        cluster.promote(&process);
        let TaskStep::Done(end) = old.turn(&mut task, step, &PROTECTED, &mut 0) else { panic!("it goes on") };
        assert_eq!(end.sense.map(|sense| sense.asc.0), Some(0x040c));
        let mut new = bench.client("new");
        new.run_with(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[1; 512]).good();
    }

    #[test]
    fn the_storage_is_not_asked_about_a_reservation_that_is_refused() {
        let (cluster, _process, bench) = owned();
        let [mut a, mut b] = ["a", "b"].map(|name| bench.client(name));
        a.run(&RESERVE).good();
        let before = cluster.stored();
        for cdb in [&RESERVE[..], &READ_KEYS, &MODE_SENSE] {
            assert_eq!(b.run(cdb).status, ScsiStatus::RESERVATION_CONFLICT);
        }
        assert_eq!((cluster.stored() == before, cluster.rechecks()), (true, 3));
        a.run(&RESERVE).good();
        assert_ne!(cluster.stored(), before, "what succeeds is confirmed");
    }

    #[test]
    fn registrations_prevent_a_reservation() {
        let mut a = DeviceBench::new().client("a");
        let register = [0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0];
        a.run_with(&register, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0])
            .good();
        assert_eq!(a.run(&RESERVE).status, ScsiStatus::RESERVATION_CONFLICT);
        assert_eq!(a.run(&RELEASE).status, ScsiStatus::RESERVATION_CONFLICT);
        assert_eq!(a.run(&[0x16, 1, 0, 0, 0, 0]).check(), (5, 0x2400));
    }
}
