//! What a target offers to one kind of initiator: LUNs, and the ports that lead to them.

use super::lun::Lun;
use super::nexus::TargetPort;
use super::unit::LogicalUnit;
use crate::exports::VolumeId;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Logical units by number. What an initiator may not see is not in the target that its sessions are given.
///
/// Units come and go while sessions use it; each hears of that with its next command.
pub struct Target {
    /// The target device's name as a SCSI name string: with iSCSI, the target's IQN.
    pub name: Arc<str>,
    /// Every port of the target; a session is on one of them. Units that are added later know them.
    pub ports: Vec<TargetPort>,
    units: RwLock<BTreeMap<u16, Unit>>,
    /// Grows with each change of the units.
    generation: AtomicU64,
}

type Unit = (VolumeId, Arc<LogicalUnit>);

impl Target {
    /// A target without logical units.
    #[must_use]
    pub fn new(name: &str, ports: Vec<TargetPort>) -> Target {
        Target { name: name.into(), ports, units: RwLock::default(), generation: AtomicU64::new(0) }
    }

    /// Adds a logical unit; of several with one number the first counts. Numbers have 14 bits.
    #[must_use]
    pub fn with_unit(self, number: u16, volume: VolumeId, unit: Arc<LogicalUnit>) -> Target {
        self.add(number, volume, unit);
        self
    }

    /// Adds a logical unit; answers whether its number was free. Numbers have 14 bits.
    pub fn add(&self, number: u16, volume: VolumeId, unit: Arc<LogicalUnit>) -> bool {
        let mut units = self.units.write().unwrap_or_else(PoisonError::into_inner);
        let number = number & MAX_LUN;
        if units.contains_key(&number) {
            return false;
        }
        unit.add_ports(&self.ports);
        units.insert(number, (volume, unit));
        self.generation.fetch_add(1, Ordering::SeqCst);
        true
    }

    /// Takes the logical units away that these words are true of; answers their numbers. Tasks under way end with their
    /// next step.
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

    /// The lowest number that no logical unit has.
    #[must_use]
    pub fn free_number(&self) -> Option<u16> {
        let units = self.units.read().unwrap_or_else(PoisonError::into_inner);
        (0..=MAX_LUN).find(|number| !units.contains_key(number))
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
