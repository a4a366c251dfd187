//! The disks that are served while the daemon runs. Interfaces are opened at the start, disks come
//! and go with the config.
//!
//! AoE has no sessions that a change could end: a station sends the next request to the same
//! address. So an address belongs to one volume until the daemon stops.

use super::{AOE, Aoe, disk_of, store};
use crate::failure::Failure;
use crate::protocol::address::ListenerAddress;
use crate::protocol::frontend::{Frontend, LiveFrontend, Service, VolumeNames};
use crate::protocol::policy::Policy;
use blockmux_engine::serve::listener::Serve;
use blockmux_engine::serve::sessions::SessionInfo;
use blockmux_proto::aoe::AoeAddress;
use blockmux_proto::aoe::disks::{AoeDisk, AoeDisks};
use blockmux_proto::aoe::unit::AoeUnit;
use blockmux_proto::driver::frames::PortId;
use blockmux_proto::exports::{Exports, VolumeId};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tracing::warn;

/// The running frontend.
pub(super) struct LiveAoe {
    exports: Exports,
    policy: Policy,
    /// The interfaces of the start; the index is the number of the port.
    interfaces: Vec<ListenerAddress>,
    state: Option<PathBuf>,
    shelf: u16,
    /// Number of volumes at the start, whose positions are their slots.
    volumes: usize,
    pub(super) disks: AoeDisks,
    /// All disks since the start, including those that are no longer served.
    known: Mutex<BTreeMap<AoeAddress, AoeUnit>>,
}

impl LiveAoe {
    /// The disks of a frontend at a start.
    ///
    /// # Errors
    /// If the settings of a disk cannot be loaded.
    pub(super) fn new(own: &Aoe, service: &Service<'_>) -> Result<LiveAoe, Failure> {
        let live = LiveAoe {
            exports: service.exports.clone(),
            policy: service.policy.clone(),
            interfaces: service.places.to_vec(),
            state: own.settings.aoe_state.clone(),
            shelf: own.shelf(),
            volumes: own.volumes,
            disks: AoeDisks::default(),
            known: Mutex::default(),
        };
        live.renew()?;
        Ok(live)
    }

    /// Serves the volumes that the policy allows, and no others.
    ///
    /// # Errors
    /// If the settings of a disk cannot be loaded; it is not served then, but the others are.
    fn renew(&self) -> Result<(), Failure> {
        let (mut disks, mut failed) = (Vec::new(), None);
        for named in VolumeNames::all(&self.exports) {
            let ports = self.ports_of(&self.policy, &named.export);
            let address = self.address(&named).filter(|_| !ports.is_empty());
            let Some(address) = address else { continue };
            // No lock is held: the path of the settings may hang, and `diff` takes the lock.
            let known = self.known().get(&address).cloned();
            let unit = match known {
                Some(unit) if unit.volume == named.volume => unit,
                Some(_) => continue,
                None => match store::open(self.state.as_deref(), address) {
                    Ok((settings, store)) => AoeUnit::new(address, named.volume, settings, store),
                    Err(failure) => {
                        failed = Some(failure);
                        continue;
                    }
                },
            };
            self.known().insert(address, unit.clone());
            let ports = Some(ports).filter(|ports| ports.len() < self.interfaces.len());
            disks.push(AoeDisk { unit, ports });
        }
        self.disks.replace(disks);
        failed.map_or(Ok(()), Err)
    }

    /// The ports at which a policy serves a volume.
    fn ports_of(&self, policy: &Policy, volume: &str) -> Vec<PortId> {
        let all = self.interfaces.iter().zip(0..);
        all.filter(|(place, _)| policy.serves(&AOE, place, volume)).map(|(_, port)| PortId(port)).collect()
    }

    /// The address of a volume's disk. A volume that was added later has one only if its name is
    /// one.
    fn address(&self, named: &VolumeNames) -> Option<AoeAddress> {
        let at = Some(named.volume.0 as usize).filter(|at| *at < self.volumes);
        disk_of(self.shelf, at, &named.export)
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<AoeAddress, AoeUnit>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn renew_or_warn(&self) {
        if let Err(failure) = self.renew() {
            warn!("not served over AoE: {failure}");
        }
    }
}

impl LiveFrontend for LiveAoe {
    /// Interfaces have no connections.
    fn serve(&self, _place: &ListenerAddress) -> Serve {
        Arc::new(|_, stream, _| drop(stream))
    }

    fn reconfigure(&self, desired: &dyn Frontend, _service: &Service<'_>) {
        if let Some(own) = (desired as &dyn Any).downcast_ref::<Aoe>() {
            // It may have been set by the call before.
            let _ = own.served.set(self.disks.clone());
        }
        self.renew_or_warn();
    }

    fn may_continue(&self, session: &SessionInfo) -> bool {
        session.login.target.parse().is_ok_and(|address| self.disks.has(address))
    }

    fn remove(&self, volumes: &BTreeSet<VolumeId>) {
        volumes.iter().for_each(|volume| self.disks.remove(*volume));
    }

    fn session_targets(&self) -> Vec<(VolumeId, String)> {
        self.disks.all().into_iter().map(|(volume, address)| (volume, address.to_string())).collect()
    }

    fn waits_for_start(&self, policy: &Policy, volume: &str) -> bool {
        let is_free =
            disk_of(self.shelf, None, volume).is_some_and(|address| !self.known().contains_key(&address));
        !is_free && !self.ports_of(policy, volume).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::policy::PolicyListener;
    use blockmux_proto::exports::Export;
    use blockmux_proto::volume_state::VolumeState;
    use blockmux_volume::MemVolume;

    fn policy(volumes: &[(&str, Option<&str>)]) -> Policy {
        let volumes = volumes
            .iter()
            .map(|(name, protocol)| ((*name).to_owned(), protocol.map(|protocol| vec![protocol.to_owned()])));
        let place = ListenerAddress::Interface("eth1".to_owned());
        Policy::new(Vec::new(), volumes).unwrap().at(vec![PolicyListener::at(&AOE, place)], true).unwrap()
    }

    fn export(name: &str) -> Export {
        let (name, description) = (name.to_owned(), String::new());
        Export { name, description, read_only: false, volume: Arc::new(MemVolume::new(1 << 20)) }
    }

    #[test]
    fn disks_come_and_go_and_an_address_belongs_to_one_volume() {
        let exports = Exports::new(vec![export("a"), export("b")]);
        let live = LiveAoe {
            exports: exports.clone(),
            policy: policy(&[("a", None), ("b", None)]),
            interfaces: vec![ListenerAddress::Interface("eth1".to_owned())],
            state: None,
            shelf: 7,
            volumes: 2,
            disks: AoeDisks::default(),
            known: Mutex::default(),
        };
        live.renew().unwrap();
        let disk = |id| {
            let all = live.session_targets().into_iter();
            all.filter(|(volume, _)| volume.0 == id).map(|(_, disk)| disk).collect::<Vec<_>>()
        };
        assert_eq!([disk(0), disk(1)], [["e7.0"], ["e7.1"]]);
        live.policy.replace(&policy(&[("a", Some("nbd")), ("b", None)]));
        live.renew().unwrap();
        assert_eq!((disk(0).len(), disk(1)), (0, vec!["e7.1".to_owned()]));
        live.policy.replace(&policy(&[("b", None)]));
        live.renew().unwrap();
        assert!(disk(0).is_empty(), "it is about to be removed");
        live.remove(&BTreeSet::from([VolumeId(0)]));
        exports.remove("a").unwrap();
        let later = ["e7.0", "e7.9", "c"].map(|name| (name, None));
        live.policy.replace(&policy(&later));
        assert_eq!(later.map(|(name, _)| live.waits_for_start(&live.policy, name)), [true, false, true]);
        for (name, _) in later {
            let export = export(name);
            let volume_state = VolumeState::new(export.volume.clone());
            exports.add(export, volume_state).unwrap();
            live.renew().unwrap();
        }
        assert_eq!([2, 3, 4].map(|id| disk(id).concat()), ["", "e7.9", ""]);
    }
}
