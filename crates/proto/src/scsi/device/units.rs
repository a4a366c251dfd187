//! The logical units of a target that one session has used: each is attached with its first
//! command. Every command first checks for added and removed units; the nexus is notified by a unit
//! attention of its existing units (SPC-5, REPORTED LUNS DATA HAS CHANGED).

use super::Lun;
use super::extended_copy::CopyResult;
use super::nexus::ItNexus;
use super::open_nexus::OpenNexus;
use super::target::{LunMapping, ScsiTarget};
use super::task::Task;
use super::token_copy::TokenRecords;
use super::unit::{LogicalUnit, NexusKey, UNIT_REMOVED};
use super::view::NexusView;
use crate::exports::VolumeId;
use crate::scsi::sense::Sense;
use crate::volume_state::{Epoch, IoCounter};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// The attached units of a session. The index of a unit is stable and never reused, because tasks
/// refer to units by index.
pub(super) struct AttachedUnits {
    list: Vec<Option<AttachedUnit>>,
    /// Index of each unit, by its number.
    indexes: BTreeMap<u16, usize>,
    /// Generation of the target when the units were last checked.
    seen: u64,
    pub(super) nexus: Arc<OpenNexus>,
    /// The epoch in which the session began.
    pub(super) epoch: Epoch,
}

/// A logical unit as one session sees it.
pub(super) struct AttachedUnit {
    pub(super) number: u16,
    pub(super) volume: VolumeId,
    pub(super) unit: Arc<LogicalUnit>,
    pub(super) key: NexusKey,
    /// The initiator may not change the volume through this LUN.
    is_read_only: bool,
    nexus: Arc<OpenNexus>,
    /// The epoch in which the session began.
    pub(super) epoch: Epoch,
    /// Counts the session's I/O on the volume, from its first I/O on.
    counter: Option<Rc<IoCounter>>,
    /// Results of this session's EXTENDED COPY commands, oldest first.
    pub(super) copies: Vec<CopyResult>,
    /// Records of this session's token operations, oldest first, with unread tokens.
    pub(super) token_records: TokenRecords,
    /// The generation of `view`.
    pub(super) seen: u64,
    pub(super) view: NexusView,
}

impl AttachedUnits {
    /// No unit is attached yet.
    pub(super) fn new(target: &ScsiTarget, nexus: Arc<OpenNexus>) -> AttachedUnits {
        let (seen, epoch) = (target.generation(), Epoch::current());
        AttachedUnits { list: Vec::new(), indexes: BTreeMap::new(), seen, nexus, epoch }
    }

    /// Checks for added and removed units.
    #[inline]
    pub(super) fn update(&mut self, target: &ScsiTarget) {
        if target.generation() != self.seen {
            self.reload(target);
        }
    }

    #[cold]
    fn reload(&mut self, target: &ScsiTarget) {
        // Read first: a change in between leads to another check.
        self.seen = target.generation();
        for slot in &mut self.list {
            let Some(unit) = slot else { continue };
            let current = target.unit(unit.number).map(|current| current.mapping);
            match current.filter(|current| current.volume == unit.volume) {
                Some(current) => unit.set_read_only(current.is_read_only),
                None => {
                    self.indexes.remove(&unit.number);
                    self.nexus.detach(unit.number, &unit.unit);
                    *slot = None;
                }
            }
        }
        let inventory = target.inventory();
        for unit in self.list.iter().flatten() {
            unit.unit.on_inventory_change(unit.key, inventory);
        }
    }

    /// The index of the unit with this LUN, which is attached if it was not.
    #[inline]
    pub(super) fn find(&mut self, lun: Lun, target: &ScsiTarget) -> Option<usize> {
        let number = lun.number()?;
        // LUNs mostly have no gaps and are first used in order; the number is then the index.
        match self.get(number.into()) {
            Some(unit) if unit.number == number => Some(number.into()),
            _ => self.indexes.get(&number).copied().or_else(|| self.attach(number, target)),
        }
    }

    /// Attaches the unit with this number, which is not attached.
    #[cold]
    fn attach(&mut self, number: u16, target: &ScsiTarget) -> Option<usize> {
        let current = target.unit(number)?;
        self.nexus.attach(number, &current, target.inventory());
        let LunMapping { volume, unit, is_read_only } = current.mapping;
        let key = self.nexus.key(number);
        let (seen, view) = unit.view(key, &self.nexus.identity, is_read_only);
        let index = self.list.len();
        self.indexes.insert(number, index);
        self.list.push(Some(AttachedUnit {
            number,
            volume,
            unit,
            key,
            is_read_only,
            nexus: self.nexus.clone(),
            epoch: self.epoch,
            counter: None,
            copies: Vec::new(),
            token_records: Vec::new(),
            seen,
            view,
        }));
        Some(index)
    }

    /// The index of the first unit of this volume, which is attached if none of them was.
    #[cold]
    pub(super) fn find_volume(&mut self, volume: VolumeId, target: &ScsiTarget) -> Option<usize> {
        let attached =
            self.list.iter().position(|unit| unit.as_ref().is_some_and(|unit| unit.volume == volume));
        attached.or_else(|| {
            let number = target.position(|unit| unit.mapping.volume == volume)?;
            self.find(Lun::new(number), target)
        })
    }

    #[inline]
    pub(super) fn get(&self, index: usize) -> Option<&AttachedUnit> {
        self.list.get(index)?.as_ref()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, index: usize) -> Option<&mut AttachedUnit> {
        self.list.get_mut(index)?.as_mut()
    }

    /// The unit of a task.
    ///
    /// # Errors
    /// If it was removed during the task.
    #[inline]
    pub(super) fn of_task(&mut self, task: &Task) -> Result<&mut AttachedUnit, Sense> {
        let unit = task.unit.and_then(|unit| self.get_mut(unit));
        unit.ok_or(UNIT_REMOVED)
    }
}

impl AttachedUnit {
    /// Counts the session's I/O on the volume.
    #[inline]
    pub(super) fn counter(&mut self) -> Rc<IoCounter> {
        self.counter.get_or_insert_with(|| IoCounter::new(&self.unit.volume_state, self.epoch)).clone()
    }

    /// Does its I/O as that of a session of this epoch from now on, for work that a session has
    /// left.
    pub(super) fn enter(&mut self, epoch: Epoch) {
        if self.epoch != epoch {
            (self.epoch, self.counter) = (epoch, None);
        }
    }

    /// Whether another nexus has aborted the task since it started.
    #[inline]
    pub(super) fn is_aborted(&mut self, task: &Task) -> bool {
        if self.unit.generation() != self.seen {
            self.refresh();
        }
        self.view.abort_epoch != task.abort_epoch
    }

    /// Initiator port and target port.
    pub(super) fn nexus(&self) -> &ItNexus {
        &self.nexus.identity
    }

    /// Changes the write protection of the LUN. Commands that have begun are not affected.
    fn set_read_only(&mut self, is_read_only: bool) {
        if self.is_read_only != is_read_only {
            self.is_read_only = is_read_only;
            self.unit.on_protection_change(self.key, is_read_only);
            self.refresh();
        }
    }

    /// Refreshes the view.
    pub(super) fn refresh(&mut self) {
        let abort_epoch = self.view.abort_epoch;
        (self.seen, self.view) = self.unit.view(self.key, &self.nexus.identity, self.is_read_only);
        // SPC-5: copy results are discarded on nexus loss and reset.
        if self.view.abort_epoch != abort_epoch {
            self.copies.clear();
            self.token_records.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::exports::VolumeId;
    use crate::scsi::device::testing::{DeviceBench, command};
    use crate::scsi::{AccessState, LogicalUnit, Lun, TaskStep, UnitIdentity};
    use crate::volume_state::NotAdmitted;
    use blockmux_volume::MemVolume;
    use std::sync::Arc;

    const TEST_UNIT_READY: [u8; 6] = [0; 6];
    const READ_ONE: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];

    fn unit(name: &str) -> Arc<LogicalUnit> {
        LogicalUnit::new(UnitIdentity::of(name), Arc::new(MemVolume::new(1 << 20)))
    }

    fn luns(report: &[u8]) -> Vec<u8> {
        report[8..].chunks(8).map(|lun| lun[1]).collect()
    }

    #[test]
    fn added_and_removed_units_are_reported_by_existing_units() {
        let bench = DeviceBench::new();
        let mut client = bench.client("i");
        let five = Lun::new(5);
        assert_eq!(client.run_on(five, &TEST_UNIT_READY, &[]).check(), (5, 0x2500));
        assert!(bench.target.add(5, VolumeId(9), unit("b")) && !bench.target.add(5, VolumeId(9), unit("c")));
        assert_eq!(client.run(&TEST_UNIT_READY).check(), (6, 0x3f0e));
        client.run(&TEST_UNIT_READY).good();
        assert_eq!(
            client.run_on(five, &TEST_UNIT_READY, &[]).check(),
            (6, 0x2900),
            "a new nexus of this unit"
        );
        client.run_on(five, &TEST_UNIT_READY, &[]).good();
        let report = [0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
        assert_eq!(luns(&client.run(&report).good()), [0, 5]);
        assert_eq!(bench.target.remove(|number, _| number == 5), [5]);
        assert_eq!(client.run_on(five, &TEST_UNIT_READY, &[]).check(), (5, 0x2500));
        assert_eq!(client.run(&TEST_UNIT_READY).check(), (6, 0x3f0e));
        assert_eq!(luns(&client.run(&report).good()), [0]);
    }

    #[test]
    fn tasks_of_a_removed_unit_end_with_their_next_step() {
        let bench = DeviceBench::new();
        let mut client = bench.client("i");
        let (mut task, step) = client.server.begin(&command(Lun::new(0), &READ_ONE, 0));
        assert_eq!(client.admit(&mut task, &step), Ok(()));
        bench.target.remove(|_, _| true);
        assert_eq!(client.run(&READ_ONE).check(), (5, 0x2500));
        let TaskStep::Done(end) = client.turn(&mut task, step, &[], &mut 0) else { panic!("it goes on") };
        assert_eq!(end.sense.map(|sense| sense.asc.0), Some(0x2500));
    }

    #[test]
    fn throttled_io_does_not_begin_once_its_unit_is_removed() {
        let bench = DeviceBench::new();
        let mut client = bench.client("i");
        let (mut task, step) = client.server.begin(&command(Lun::new(0), &READ_ONE, 0));
        bench.target.remove(|_, _| true);
        let Err(NotAdmitted::Denied(TaskStep::Done(end))) = client.admit_late(&mut task, &step) else {
            panic!("its unit is removed")
        };
        assert_eq!(end.sense.map(|sense| sense.asc.0), Some(0x2500));
    }

    #[test]
    fn throttled_io_does_not_begin_once_its_unit_is_protected_or_in_standby() {
        const WRITE_ONE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
        let bench = DeviceBench::new();
        let (mut client, mut other) = (bench.client("i"), bench.client("j"));
        // The Control mode page, with SWP.
        let mut page = other.run(&[0x1a, 8, 0x0a, 0, 255, 0]).good();
        (page[0], page[8]) = (0, page[8] | 8);
        for (is_standby, expected) in [(false, 0x2702), (true, 0x040b)] {
            let (mut task, step) = client.server.begin(&command(Lun::new(0), &WRITE_ONE, 512));
            let step = client.turn(&mut task, step, &[7; 512], &mut 0);
            if is_standby {
                bench.unit.set_access_state(1, AccessState::STANDBY);
            } else {
                other.run_with(&[0x15, 0x10, 0, 0, 16, 0], &page).good();
            }
            let Err(NotAdmitted::Denied(TaskStep::Done(end))) = client.admit_late(&mut task, &step) else {
                panic!("it may not begin")
            };
            assert_eq!(end.sense.map(|sense| sense.asc.0), Some(expected));
            page[8] &= !8;
            other.run_with(&[0x15, 0x10, 0, 0, 16, 0], &page);
            client.run(&TEST_UNIT_READY);
        }
    }

    #[test]
    fn no_io_is_done_on_a_volume_that_is_no_longer_served() {
        let bench = DeviceBench::new();
        let mut client = bench.client("i");
        client.run(&READ_ONE).good();
        bench.unit.volume_state.retire();
        assert_eq!(client.run(&READ_ONE).check(), (5, 0x2500));
        assert!(bench.unit.volume_state.settling().is_over());
    }
}
