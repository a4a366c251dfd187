//! The logical units of a target as one nexus sees them. They come and go: each command begins with
//! a look whether they have, and then the nexus is told so by a unit attention of those that it had
//! before (SPC-5, REPORTED LUNS DATA HAS CHANGED).

use super::Lun;
use super::extended_copy::CopyResult;
use super::nexus::Nexus;
use super::target::ScsiTarget;
use super::task::Task;
use super::token_copy::TokenRecords;
use super::unit::{LogicalUnit, NexusKey};
use super::view::NexusView;
use crate::exports::VolumeId;
use crate::volume_state::IoCounter;
use blockmux_wire::scsi::sense::Asc;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

/// All of them. A unit keeps its place as long as the nexus lasts, and nobody gets that of one that
/// is gone: tasks name their units by it.
pub(super) struct Units {
    list: Vec<Option<AttachedUnit>>,
    /// By number.
    places: BTreeMap<u16, usize>,
    /// The target's generation that they were looked at in.
    seen: u64,
}

/// A logical unit as one nexus sees it.
pub(super) struct AttachedUnit {
    pub(super) number: u16,
    pub(super) volume: VolumeId,
    pub(super) unit: Arc<LogicalUnit>,
    pub(super) key: NexusKey,
    /// The nexus's I/O on the volume.
    pub(super) counter: Rc<IoCounter>,
    /// How this nexus's copies ended, oldest first.
    pub(super) copies: Vec<CopyResult>,
    /// How this nexus's copies by token ended, oldest first, and the tokens that it has not been
    /// told yet.
    pub(super) token_records: TokenRecords,
    /// The generation that `view` was made of.
    pub(super) seen: u64,
    pub(super) view: NexusView,
}

impl Units {
    /// Those that the target has now.
    pub(super) fn new(target: &ScsiTarget, nexus: &Nexus) -> Units {
        // Before the look: a change in between is looked at once more.
        let seen = target.generation();
        let mut units = Units { list: Vec::new(), places: BTreeMap::new(), seen };
        target.units().for_each(|unit| units.add(unit, nexus));
        units
    }

    /// Sees what has come and gone.
    #[inline]
    pub(super) fn look_again(&mut self, target: &ScsiTarget, nexus: &Nexus) {
        if target.generation() != self.seen {
            self.look(target, nexus);
        }
    }

    #[cold]
    fn look(&mut self, target: &ScsiTarget, nexus: &Nexus) {
        self.seen = target.generation();
        let all: Vec<_> = target.units().collect();
        let there: BTreeSet<(u16, VolumeId)> =
            all.iter().map(|(number, volume, _)| (*number, *volume)).collect();
        for place in &mut self.list {
            if let Some(gone) = place.take_if(|unit| !there.contains(&(unit.number, unit.volume))) {
                self.places.remove(&gone.number);
                gone.unit.detach(gone.key);
            }
        }
        for unit in self.iter() {
            unit.unit.change(|state| state.attend(unit.key, Asc::REPORTED_LUNS_DATA_HAS_CHANGED));
        }
        for unit in all {
            if !self.places.contains_key(&unit.0) {
                self.add(unit, nexus);
            }
        }
    }

    fn add(&mut self, (number, volume, unit): (u16, VolumeId, Arc<LogicalUnit>), nexus: &Nexus) {
        let key = unit.attach(nexus);
        let (seen, view) = unit.view(key);
        let counter = IoCounter::new(&unit.served);
        self.places.insert(number, self.list.len());
        let (copies, token_records) = (Vec::new(), Vec::new());
        let attached = AttachedUnit { number, volume, unit, key, counter, copies, token_records, seen, view };
        self.list.push(Some(attached));
    }

    /// The place of a LUN.
    #[inline]
    pub(super) fn find(&self, lun: Lun) -> Option<usize> {
        let number = lun.number()?;
        // LUNs mostly have no gaps, and then the number is the place.
        match self.get(number.into()) {
            Some(unit) if unit.number == number => Some(number.into()),
            _ => self.places.get(&number).copied(),
        }
    }

    #[inline]
    pub(super) fn get(&self, place: usize) -> Option<&AttachedUnit> {
        self.list.get(place)?.as_ref()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, place: usize) -> Option<&mut AttachedUnit> {
        self.list.get_mut(place)?.as_mut()
    }

    /// All that are there.
    pub(super) fn iter(&self) -> impl Iterator<Item = &AttachedUnit> {
        self.list.iter().flatten()
    }

    /// The place of the first that this is true of.
    pub(super) fn place(&self, is_it: impl Fn(&AttachedUnit) -> bool) -> Option<usize> {
        self.list.iter().position(|unit| unit.as_ref().is_some_and(&is_it))
    }

    /// The first unit of which `is_it` is true; it may change the unit when it looks.
    pub(super) fn first_with(&mut self, mut is_it: impl FnMut(&mut AttachedUnit) -> bool) -> Option<usize> {
        self.list.iter_mut().position(|unit| unit.as_mut().is_some_and(&mut is_it))
    }
}

impl Drop for Units {
    fn drop(&mut self) {
        for unit in self.iter() {
            unit.unit.detach(unit.key);
        }
    }
}

impl AttachedUnit {
    /// Whether the unit has work that nobody carries on.
    pub(super) fn has_background(&mut self) -> bool {
        if self.unit.generation() != self.seen {
            self.refresh();
        }
        self.view.has_background
    }

    /// Whether someone has aborted the task since it began.
    #[inline]
    pub(super) fn is_aborted(&mut self, task: &Task) -> bool {
        if self.unit.generation() != self.seen {
            self.refresh();
        }
        self.view.abort_epoch != task.abort_epoch
    }

    /// Looks at the shared state again.
    pub(super) fn refresh(&mut self) {
        let abort_epoch = self.view.abort_epoch;
        (self.seen, self.view) = self.unit.view(self.key);
        // SPC-5: with the nexus and by a reset, what is held of copies goes.
        if self.view.abort_epoch != abort_epoch {
            self.copies.clear();
            self.token_records.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::exports::VolumeId;
    use crate::scsi::device::testing::{Bench, command};
    use crate::scsi::{LogicalUnit, Lun, Step, UnitIdentity};
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
    fn units_that_come_and_go_are_told_by_those_that_were_there() {
        let bench = Bench::new();
        let mut client = bench.client("i");
        let five = Lun::new(5);
        assert_eq!(client.run_on(five, &TEST_UNIT_READY, &[]).check(), (5, 0x2500));
        assert!(bench.target.add(5, VolumeId(9), unit("b")) && !bench.target.add(5, VolumeId(9), unit("c")));
        assert_eq!(client.run(&TEST_UNIT_READY).check(), (6, 0x3f0e));
        client.run(&TEST_UNIT_READY).good();
        assert_eq!(client.run_on(five, &TEST_UNIT_READY, &[]).check(), (6, 0x2900), "it is new here");
        client.run_on(five, &TEST_UNIT_READY, &[]).good();
        let report = [0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
        assert_eq!(luns(&client.run(&report).good()), [0, 5]);
        assert_eq!(bench.target.remove(|number, _| number == 5), [5]);
        assert_eq!(client.run_on(five, &TEST_UNIT_READY, &[]).check(), (5, 0x2500));
        assert_eq!(client.run(&TEST_UNIT_READY).check(), (6, 0x3f0e));
        assert_eq!(luns(&client.run(&report).good()), [0]);
    }

    #[test]
    fn a_task_of_a_unit_that_goes_ends_and_so_does_what_follows_on_its_volume() {
        let bench = Bench::new();
        let mut client = bench.client("i");
        let (mut task, step) = client.server.begin(&command(Lun::new(0), &READ_ONE, 0));
        assert!(matches!(step, Step::Io { .. }));
        bench.target.remove(|_, _| true);
        assert_eq!(client.run(&READ_ONE).check(), (5, 0x2500));
        let Step::Done(end) = client.turn(&mut task, step, &[], &mut 0) else { panic!("it goes on") };
        assert_eq!(end.sense.map(|sense| sense.asc.0), Some(0x2500));
    }

    #[test]
    fn nothing_is_done_on_a_volume_that_is_not_served_any_more() {
        let bench = Bench::new();
        let mut client = bench.client("i");
        client.run(&READ_ONE).good();
        bench.unit.served.retire();
        assert_eq!(client.run(&READ_ONE).check(), (5, 0x2500));
        assert!(bench.unit.served.settling().is_over());
    }
}
