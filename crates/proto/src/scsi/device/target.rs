//! A target's logical units and ports, as presented to one group of initiators.

use super::AccessState;
use super::nexus::TargetPort;
use super::open_nexus::NexusId;
use super::unit::LogicalUnit;
use crate::exports::VolumeId;
use crate::scsi::lun::Lun;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Logical units by number. Sessions get a target that contains only the units that their initiator
/// may access.
///
/// Units can be added and removed while sessions use the target; each session notices with its next
/// command.
pub struct ScsiTarget {
    /// Target device name as a SCSI name string; for iSCSI, the target's IQN.
    pub name: Arc<str>,
    /// All ports of the target. Each session uses one of them; units added later have all of them.
    ports: RwLock<Vec<TargetPort>>,
    states: Arc<PortGroupStates>,
    shown: RwLock<ShownLuns>,
    units: RwLock<BTreeMap<u16, TargetUnit>>,
    /// Increases with each change of the units.
    generation: AtomicU64,
    /// The generation that last added or removed a unit.
    inventory: AtomicU64,
}

/// The LUNs of a target that one group of initiators sees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ShownLuns {
    /// All of the target's.
    #[default]
    All,
    /// Those of the target's with these numbers.
    Only(BTreeSet<u16>),
    /// The group has its own map, independent of the target's LUNs.
    Own,
}

/// A volume at a LUN of a map.
#[derive(Clone)]
pub struct LunMapping {
    /// The volume.
    pub volume: VolumeId,
    /// Its logical unit.
    pub unit: Arc<LogicalUnit>,
    /// These initiators may not change the volume through this LUN.
    pub is_read_only: bool,
}

/// What all views of a target share: the ALUA states of its port groups, active/optimized by
/// default, and the initiator ports that are logged in.
#[derive(Default)]
pub struct PortGroupStates {
    groups: RwLock<BTreeMap<u16, AccessState>>,
    logged_in: Mutex<BTreeMap<NexusId, Arc<[u8]>>>,
}

impl PortGroupStates {
    /// Sets the state of a group for units added from now on.
    pub fn set(&self, group: u16, access: AccessState) {
        self.groups.write().unwrap_or_else(PoisonError::into_inner).insert(group, access);
    }

    /// How a group leads to units.
    #[must_use]
    pub fn get(&self, group: u16) -> AccessState {
        let states = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        states.get(&group).copied().unwrap_or(AccessState::ACTIVE_OPTIMIZED)
    }

    fn all(&self) -> Vec<(u16, AccessState)> {
        let states = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        states.iter().map(|(group, access)| (*group, *access)).collect()
    }

    pub(super) fn log_in(&self, nexus: NexusId, initiator: Arc<[u8]>) {
        self.lock_logged_in().insert(nexus, initiator);
    }

    pub(super) fn log_out(&self, nexus: NexusId) {
        self.lock_logged_in().remove(&nexus);
    }

    /// TransportIDs of the initiator ports that are logged in and satisfy the predicate.
    pub(super) fn logged_in(&self, is_meant: impl Fn(&[u8]) -> bool) -> Vec<Arc<[u8]>> {
        self.lock_logged_in().values().filter(|initiator| is_meant(initiator)).cloned().collect()
    }

    fn lock_logged_in(&self) -> MutexGuard<'_, BTreeMap<NexusId, Arc<[u8]>>> {
        self.logged_in.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A volume as a logical unit of a target.
#[derive(Clone)]
pub(super) struct TargetUnit {
    pub(super) mapping: LunMapping,
    /// The generation of the target that this unit began.
    pub(super) added_at: u64,
}

/// A transport's logical units, for background work ([`LogicalUnit::on_background`]).
pub trait UnitSource: Send + Sync {
    /// Registers a watcher of added and removed units. Only the first registration takes effect.
    fn watch_units(&self, watcher: UnitWatcher);

    /// All current units; a unit may appear several times.
    fn units(&self) -> Vec<(VolumeId, Arc<LogicalUnit>)>;
}

/// Callback for added and removed units.
pub type UnitWatcher = Box<dyn Fn(UnitChange<'_>) + Send + Sync>;

/// An added or removed unit.
#[derive(Clone, Copy)]
pub enum UnitChange<'a> {
    /// A volume became a unit.
    Added(VolumeId, &'a Arc<LogicalUnit>),
    /// A volume is no longer a unit of any target.
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
            shown: RwLock::default(),
            units: RwLock::default(),
            generation: AtomicU64::new(0),
            inventory: AtomicU64::new(0),
        }
    }

    /// Shares the ALUA states with other views of the target. Call before units are added.
    #[must_use]
    pub fn with_states(self, states: &Arc<PortGroupStates>) -> ScsiTarget {
        ScsiTarget { states: states.clone(), ..self }
    }

    /// Whether a unit that the target gets at this LUN is shown.
    #[must_use]
    pub fn shows(&self, number: u16) -> bool {
        match &*self.read_shown() {
            ShownLuns::All => true,
            ShownLuns::Only(numbers) => numbers.contains(&number),
            ShownLuns::Own => false,
        }
    }

    /// Whether these initiators have their own LUN map.
    #[must_use]
    pub fn has_own_luns(&self) -> bool {
        *self.read_shown() == ShownLuns::Own
    }

    fn read_shown(&self) -> RwLockReadGuard<'_, ShownLuns> {
        self.shown.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// All ports of the target.
    #[must_use]
    pub fn ports(&self) -> Vec<TargetPort> {
        self.ports.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes the ports of the target. Sessions keep their ports.
    pub fn set_ports(&self, ports: Vec<TargetPort>) {
        *self.ports.write().unwrap_or_else(PoisonError::into_inner) = ports.clone();
        // A unit that is added concurrently has the new ports, or is found here.
        self.units().for_each(|(_, _, unit)| unit.add_ports(&ports));
    }

    /// The ALUA states of port groups, which other views of the target share.
    #[must_use]
    pub fn states(&self) -> Arc<PortGroupStates> {
        self.states.clone()
    }

    /// Sets the ALUA state of a group for all units, present and future, and notifies initiators.
    /// Must be called for each `ScsiTarget` that shares the states.
    pub fn set_access_state(&self, group: u16, access: AccessState) {
        self.states.set(group, access);
        self.units().for_each(|(_, _, unit)| unit.set_access_state(group, access));
    }

    /// Adds a logical unit with a 14-bit number. If the number is in use, nothing is added.
    #[must_use]
    pub fn with_unit(self, number: u16, volume: VolumeId, unit: Arc<LogicalUnit>) -> ScsiTarget {
        self.add(number, volume, unit);
        self
    }

    /// Adds a logical unit with a 14-bit number; returns whether its number was free and is shown.
    pub fn add(&self, number: u16, volume: VolumeId, unit: Arc<LogicalUnit>) -> bool {
        let mut units = self.write_units();
        let number = number & MAX_LUN;
        if units.contains_key(&number) || !self.shows(number) {
            return false;
        }
        self.insert(&mut units, number, LunMapping { volume, unit, is_read_only: false });
        true
    }

    /// Makes the LUNs those of `map`, as far as they are `shown`; returns the added ones. Sessions
    /// keep their state in units that stay, and tasks of the others end with their next step.
    pub fn set_luns(&self, shown: &ShownLuns, map: &BTreeMap<u16, LunMapping>) -> Vec<LunMapping> {
        let mut units = self.write_units();
        self.shown.write().unwrap_or_else(PoisonError::into_inner).clone_from(shown);
        let is_meant = |number: &u16| *shown == ShownLuns::Own || self.shows(*number);
        let meant = |number: &u16| map.get(number).filter(|_| is_meant(number));
        self.remove_from(&mut units, |number, own| {
            meant(&number).is_none_or(|mapping| mapping.volume != own.mapping.volume)
        });
        let mut added = Vec::new();
        for (number, mapping) in map.iter().filter(|(number, _)| is_meant(number)) {
            match units.get_mut(number) {
                Some(own) if own.mapping.is_read_only == mapping.is_read_only => {}
                Some(own) => {
                    own.mapping.is_read_only = mapping.is_read_only;
                    self.generation.fetch_add(1, Ordering::SeqCst);
                }
                None => {
                    self.insert(&mut units, *number, mapping.clone());
                    added.push(mapping.clone());
                }
            }
        }
        added
    }

    fn insert(&self, units: &mut BTreeMap<u16, TargetUnit>, number: u16, mapping: LunMapping) {
        mapping.unit.add_ports(&self.ports());
        // Within the lock, so that a concurrent state change is either seen here or finds the unit.
        let states = self.states.all().into_iter();
        states.for_each(|(group, access)| mapping.unit.set_access_state(group, access));
        let added_at = self.generation().saturating_add(1);
        units.insert(number, TargetUnit { mapping, added_at });
        self.set_inventory(added_at);
    }

    fn set_inventory(&self, generation: u64) {
        // In this order: who sees the generation sees what has changed.
        self.inventory.store(generation, Ordering::SeqCst);
        self.generation.store(generation, Ordering::SeqCst);
    }

    /// Removes the logical units that satisfy `predicate`; returns their numbers. Tasks of these
    /// units end with their next step.
    pub fn remove(&self, predicate: impl Fn(u16, VolumeId) -> bool) -> Vec<u16> {
        self.remove_from(&mut self.write_units(), |number, own| predicate(number, own.mapping.volume))
    }

    fn remove_from(
        &self,
        units: &mut BTreeMap<u16, TargetUnit>,
        predicate: impl Fn(u16, &TargetUnit) -> bool,
    ) -> Vec<u16> {
        let gone: Vec<u16> = units
            .iter()
            .filter(|(number, unit)| predicate(**number, unit))
            .map(|(&number, _)| number)
            .collect();
        gone.iter().for_each(|number| {
            units.remove(number);
        });
        if !gone.is_empty() {
            self.set_inventory(self.generation().saturating_add(1));
        }
        gone
    }

    /// All logical units, ordered by number.
    pub fn units(&self) -> impl Iterator<Item = (u16, VolumeId, Arc<LogicalUnit>)> + use<> {
        let units = self.read_units();
        let all: Vec<_> = units
            .iter()
            .map(|(&number, own)| (number, own.mapping.volume, own.mapping.unit.clone()))
            .collect();
        all.into_iter()
    }

    /// The first unit that satisfies the predicate, with its number.
    pub(super) fn find(&self, predicate: impl Fn(&LogicalUnit) -> bool) -> Option<(u16, LunMapping)> {
        let units = self.read_units();
        let found = units.iter().find(|(_, own)| predicate(&own.mapping.unit));
        found.map(|(number, own)| (*number, own.mapping.clone()))
    }

    /// The volumes that these initiators see, each with whether they may write it.
    #[must_use]
    pub fn volumes(&self) -> BTreeMap<VolumeId, bool> {
        let mut volumes = BTreeMap::new();
        for LunMapping { volume, is_read_only, .. } in self.read_units().values().map(|own| &own.mapping) {
            *volumes.entry(*volume).or_default() |= !is_read_only;
        }
        volumes
    }

    /// The logical unit with this number.
    pub(super) fn unit(&self, number: u16) -> Option<TargetUnit> {
        self.read_units().get(&number).cloned()
    }

    /// The units that satisfy the predicate.
    pub(super) fn units_where(&self, predicate: impl Fn(&LogicalUnit) -> bool) -> Vec<Arc<LogicalUnit>> {
        self.read_units()
            .values()
            .map(|own| &own.mapping.unit)
            .filter(|unit| predicate(unit))
            .cloned()
            .collect()
    }

    /// Number of the first unit that satisfies the predicate.
    pub(super) fn position(&self, mut predicate: impl FnMut(&TargetUnit) -> bool) -> Option<u16> {
        let units = self.read_units();
        units.iter().find(|(_, own)| predicate(own)).map(|(number, _)| *number)
    }

    /// All LUNs, ordered by number.
    pub(super) fn luns(&self) -> impl Iterator<Item = Lun> + use<> {
        self.units().map(|(number, ..)| Lun::new(number))
    }

    fn read_units(&self) -> RwLockReadGuard<'_, BTreeMap<u16, TargetUnit>> {
        self.units.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_units(&self) -> RwLockWriteGuard<'_, BTreeMap<u16, TargetUnit>> {
        self.units.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes with each change of the units.
    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// The generation that last added or removed a unit.
    pub(super) fn inventory(&self) -> u64 {
        self.inventory.load(Ordering::SeqCst)
    }
}

/// Highest number of a logical unit.
pub const MAX_LUN: u16 = 0x3fff;
