//! What a target offers to one kind of initiator: LUNs, and the ports that lead to them.

use super::lun::Lun;
use super::nexus::TargetPort;
use super::unit::LogicalUnit;
use crate::exports::VolumeId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Logical units by number. What an initiator may not see is not in the target that its sessions are given.
#[derive(Clone)]
pub struct Target {
    /// The target device's name as a SCSI name string: with iSCSI, the target's IQN.
    pub name: Arc<str>,
    /// Every port of the target; a session is on one of them. Units that are added later know them.
    pub ports: Vec<TargetPort>,
    units: BTreeMap<u16, (VolumeId, Arc<LogicalUnit>)>,
}

impl Target {
    /// A target without logical units.
    #[must_use]
    pub fn new(name: &str, ports: Vec<TargetPort>) -> Target {
        Target { name: name.into(), ports, units: BTreeMap::new() }
    }

    /// Adds a logical unit; of several with one number the last counts. Numbers have 14 bits.
    #[must_use]
    pub fn with_unit(mut self, number: u16, volume: VolumeId, unit: Arc<LogicalUnit>) -> Target {
        unit.add_ports(&self.ports);
        self.units.insert(number & 0x3fff, (volume, unit));
        self
    }

    /// Every logical unit in order of its number.
    pub fn units(&self) -> impl Iterator<Item = (u16, VolumeId, &Arc<LogicalUnit>)> {
        self.units.iter().map(|(&number, (volume, unit))| (number, *volume, unit))
    }

    /// Every LUN in order.
    pub(super) fn luns(&self) -> impl Iterator<Item = Lun> {
        self.units.keys().map(|&number| Lun::new(number))
    }
}
