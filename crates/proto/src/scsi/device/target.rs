//! What a target offers to one kind of initiator: LUNs, and the ports that lead to them.

use super::AccessState;
use super::nexus::TargetPort;
use super::unit::LogicalUnit;
use crate::exports::VolumeId;
use crate::scsi::lun::Lun;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

/// Logical units by number. What an initiator may not see is not in the target that its sessions
/// are given.
///
/// Units come and go while sessions use it; each hears of that with its next command.
pub struct ScsiTarget {
    /// The target device's name as a SCSI name string: with iSCSI, the target's IQN.
    pub name: Arc<str>,
    /// Every port of the target; a session is on one of them. Units that are added later know them.
    ports: RwLock<Vec<TargetPort>>,
    states: Arc<PortGroupStates>,
    /// The numbers of the units that may be here; `None`: all.
    mask: RwLock<Option<BTreeSet<u16>>>,
    units: RwLock<BTreeMap<u16, TargetUnit>>,
    /// Grows with each change of the units.
    generation: AtomicU64,
}

/// How well the port groups of a target lead to its units, as the target itself has it; the same
/// for everybody who sees some of them. A group is active/optimized until it is said to be
/// otherwise.
#[derive(Default)]
pub struct PortGroupStates(RwLock<BTreeMap<u16, AccessState>>);

impl PortGroupStates {
    /// How a group leads to units that come from now on.
    pub fn set(&self, group: u16, access: AccessState) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(group, access);
    }

    /// How a group leads to units.
    #[must_use]
    pub fn get(&self, group: u16) -> AccessState {
        let states = self.0.read().unwrap_or_else(PoisonError::into_inner);
        states.get(&group).copied().unwrap_or(AccessState::ACTIVE_OPTIMIZED)
    }

    fn all(&self) -> Vec<(u16, AccessState)> {
        let states = self.0.read().unwrap_or_else(PoisonError::into_inner);
        states.iter().map(|(group, access)| (*group, *access)).collect()
    }
}

type TargetUnit = (VolumeId, Arc<LogicalUnit>);

/// All units that a transport serves, and who watches them: a unit may have work that belongs to no
/// session ([`LogicalUnit::on_background`]).
pub trait UnitSource: Send + Sync {
    /// Tells of units that come and go from now on. Only the first watcher is told.
    fn watch_units(&self, watcher: UnitWatcher);

    /// Every unit that there is now; one may be there several times.
    fn units(&self) -> Vec<(VolumeId, Arc<LogicalUnit>)>;
}

/// Hears of units that come and go.
pub type UnitWatcher = Box<dyn Fn(UnitChange<'_>) + Send + Sync>;

/// A unit that has come or gone.
#[derive(Clone, Copy)]
pub enum UnitChange<'a> {
    /// A volume has become a unit.
    Added(VolumeId, &'a Arc<LogicalUnit>),
    /// A volume is none any more, whatever targets had it.
    Removed(VolumeId),
}

impl ScsiTarget {
    /// A target without logical units.
    #[must_use]
    pub fn new(name: &str, ports: Vec<TargetPort>) -> ScsiTarget {
        ScsiTarget {
            name: name.into(),
            ports: RwLock::new(ports),
            states: Arc::default(),
            mask: RwLock::default(),
            units: RwLock::default(),
            generation: AtomicU64::new(0),
        }
    }

    /// With the states of port groups that others who see the target have, too. Before any unit is
    /// added.
    #[must_use]
    pub fn with_states(self, states: &Arc<PortGroupStates>) -> ScsiTarget {
        ScsiTarget { states: states.clone(), ..self }
    }

    /// Shows units of these numbers alone, also of those that are added later. Before any unit is
    /// added.
    #[must_use]
    pub fn with_mask(self, mask: BTreeSet<u16>) -> ScsiTarget {
        ScsiTarget { mask: RwLock::new(Some(mask)), ..self }
    }

    /// Whether a unit of that number is shown.
    #[must_use]
    pub fn shows(&self, number: u16) -> bool {
        self.read_mask().as_ref().is_none_or(|mask| mask.contains(&number))
    }

    /// Shows units of these numbers alone from now on, or all of them. Units that are not shown any
    /// more are taken away; those that are shown now have to be added.
    pub fn set_mask(&self, mask: Option<BTreeSet<u16>>) {
        let is_same = *self.read_mask() == mask;
        if !is_same {
            *self.mask.write().unwrap_or_else(PoisonError::into_inner) = mask;
            self.remove(|number, _| !self.shows(number));
        }
    }

    fn read_mask(&self) -> RwLockReadGuard<'_, Option<BTreeSet<u16>>> {
        self.mask.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every port of the target.
    #[must_use]
    pub fn ports(&self) -> Vec<TargetPort> {
        self.ports.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes the ports of the target. Sessions stay on the ports that they are on.
    pub fn set_ports(&self, ports: Vec<TargetPort>) {
        *self.ports.write().unwrap_or_else(PoisonError::into_inner) = ports.clone();
        // A unit that is added meanwhile knows the new ports, or is found here.
        self.units().for_each(|(_, _, unit)| unit.add_ports(&ports));
    }

    /// The states of port groups, which others who see the target have, too.
    #[must_use]
    pub fn states(&self) -> Arc<PortGroupStates> {
        self.states.clone()
    }

    /// Sets how the ports of a group lead to all units, and to those that are added; every
    /// initiator is told. Each `Target` with the same states has to be told of it.
    pub fn set_access_state(&self, group: u16, access: AccessState) {
        self.states.set(group, access);
        self.units().for_each(|(_, _, unit)| unit.set_access_state(group, access));
    }

    /// Adds a logical unit; of several with one number the first counts. Numbers have 14 bits.
    #[must_use]
    pub fn with_unit(self, number: u16, volume: VolumeId, unit: Arc<LogicalUnit>) -> ScsiTarget {
        self.add(number, volume, unit);
        self
    }

    /// Adds a logical unit; answers whether its number was free and is shown. Numbers have 14 bits.
    pub fn add(&self, number: u16, volume: VolumeId, unit: Arc<LogicalUnit>) -> bool {
        let mut units = self.units.write().unwrap_or_else(PoisonError::into_inner);
        let number = number & MAX_LUN;
        if units.contains_key(&number) || !self.shows(number) {
            return false;
        }
        unit.add_ports(&self.ports());
        // Within the lock: a state that is set meanwhile is seen here, or finds the unit.
        self.states.all().into_iter().for_each(|(group, access)| unit.set_access_state(group, access));
        units.insert(number, (volume, unit));
        self.generation.fetch_add(1, Ordering::SeqCst);
        true
    }

    /// Takes the logical units away that these words are true of; answers their numbers. Tasks
    /// under way end with their next step.
    pub fn remove(&self, is_meant: impl Fn(u16, VolumeId) -> bool) -> Vec<u16> {
        let mut units = self.units.write().unwrap_or_else(PoisonError::into_inner);
        let gone: Vec<u16> = units
            .iter()
            .filter(|(number, (volume, _))| is_meant(**number, *volume))
            .map(|(&n, _)| n)
            .collect();
        gone.iter().for_each(|number| {
            units.remove(number);
        });
        if !gone.is_empty() {
            self.generation.fetch_add(1, Ordering::SeqCst);
        }
        gone
    }

    /// Every logical unit there is now, in order of its number.
    pub fn units(&self) -> impl Iterator<Item = (u16, VolumeId, Arc<LogicalUnit>)> + use<> {
        let units = self.units.read().unwrap_or_else(PoisonError::into_inner);
        let all: Vec<_> =
            units.iter().map(|(&number, (volume, unit))| (number, *volume, unit.clone())).collect();
        all.into_iter()
    }

    /// Whether a logical unit has that number.
    #[must_use]
    pub fn has(&self, number: u16) -> bool {
        self.units.read().unwrap_or_else(PoisonError::into_inner).contains_key(&number)
    }

    /// Whether a mask names that number: its owner was promised the unit that had it.
    #[must_use]
    pub fn is_named(&self, number: u16) -> bool {
        self.read_mask().as_ref().is_some_and(|mask| mask.contains(&number))
    }

    /// Every LUN in order.
    pub(super) fn luns(&self) -> impl Iterator<Item = Lun> + use<> {
        self.units().map(|(number, ..)| Lun::new(number))
    }

    /// Another number for each change of the units.
    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }
}

/// The greatest number of a logical unit.
pub const MAX_LUN: u16 = 0x3fff;
