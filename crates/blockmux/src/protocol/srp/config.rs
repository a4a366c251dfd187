//! SRP targets in the config file: their logical units and their access control.

use super::target_port;
use crate::access::networks;
use crate::failure::Failure;
use crate::protocol::alua::AluaStateName;
use crate::protocol::configured::HasVolumes;
use crate::protocol::lun_map::{self, AclLuns, LunMap, WantedLuns};
use crate::protocol::policy::{Policy, TargetAccess};
use crate::protocol::units::VolumeUnit;
use blockmux_proto::names::networks::AllowedNetworks;
use blockmux_proto::scsi::{AccessState, PortGroupStates, ScsiTarget};
use blockmux_proto::srp::node::{SrpAccess, SrpInitiators, SrpNode, SrpPortId, SrpTarget};
use serde::Deserialize;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

/// One `[[srp_target]]` of the config file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SrpTargetEntry {
    /// Identifier of the target port: 32 hexadecimal digits.
    port_id: String,
    /// Volumes by LUN.
    #[serde(default)]
    luns: LunMap,
    /// Access control list; if it is empty, every initiator may log in.
    #[serde(default)]
    acl: Vec<SrpAclEntry>,
    /// Initial ALUA state of the target port; active/optimized without the key.
    access_state: Option<AluaStateName>,
    /// Networks from which initiators may log in.
    #[serde(default, rename = "allow", deserialize_with = "networks::read")]
    networks: AllowedNetworks,
}

/// One `[[srp_target.acl]]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct SrpAclEntry {
    /// Identifier of the initiator port, 32 hexadecimal digits, or the 16 of its GUID.
    initiator_port: String,
    /// The LUNs that the initiator sees; without the key all of the target's.
    #[serde(default)]
    luns: AclLuns,
}

/// A validated target port.
#[derive(Clone, Debug)]
pub(super) struct ConfiguredSrpTarget {
    pub(super) id: SrpPortId,
    /// Volumes by LUN.
    luns: LunMap,
    /// Initiator ports that may log in, and the LUNs that they see; entries of one port come before
    /// entries of a GUID. If the list is empty, every initiator sees all LUNs.
    acl: Vec<(SrpInitiators, AclLuns)>,
    access_state: Option<AccessState>,
    /// Networks from which initiators may log in.
    networks: AllowedNetworks,
}

impl ConfiguredSrpTarget {
    /// Validates an entry.
    ///
    /// # Errors
    /// If a value is invalid; the message names the target.
    pub(super) fn prepare(entry: SrpTargetEntry) -> Result<ConfiguredSrpTarget, Failure> {
        let written = entry.port_id.clone();
        let wrong = |what: String| Failure::request(format!("srp_target `{written}`: {what}"));
        let advice = "write 32 hexadecimal digits, as 0x0000000000000000505400fffe770001";
        let id = SrpPortId::parse(&written)
            .ok_or_else(|| wrong(format!("port_id `{written}` is not a port identifier; {advice}")))?;
        let luns = entry.luns;
        let mut named = HashSet::new();
        let acl = entry.acl.iter().map(|acl| {
            let written = &acl.initiator_port;
            let advice = "write the 32 hexadecimal digits of a port or the 16 of a GUID";
            let initiator = SrpInitiators::parse(written)
                .ok_or_else(|| wrong(format!("initiator_port `{written}`: {advice}")))?;
            if !named.insert(initiator) {
                return Err(wrong(format!("two acl entries are for {written}; merge them")));
            }
            acl.luns.check(&luns).map_err(wrong)?;
            Ok((initiator, acl.luns.clone()))
        });
        let mut acl = acl.collect::<Result<Vec<_>, Failure>>()?;
        // The first matching entry applies, so an entry of one port must precede those of GUIDs.
        acl.sort_by_key(|(initiator, _)| matches!(initiator, SrpInitiators::Guid(_)));
        let access_state = entry.access_state.map(AluaStateName::access_state);
        Ok(ConfiguredSrpTarget { id, luns, acl, access_state, networks: entry.networks })
    }

    /// The target port with its units. `unit` returns the unit of a volume's name.
    pub(super) fn wanted(
        &self,
        unit: impl Fn(&str) -> Option<VolumeUnit>,
        policy: &Policy,
    ) -> WantedSrpTarget {
        let wanted = |luns: &AclLuns| luns.wanted(&self.luns, &unit);
        let mut access: Vec<_> =
            self.acl.iter().map(|(initiator, luns)| (Some(*initiator), wanted(luns))).collect();
        if access.is_empty() {
            access.push((None, wanted(&AclLuns::All)));
        }
        let access_state = self.access_state.unwrap_or(AccessState::ACTIVE_OPTIMIZED);
        let of_volumes = self.volumes().map(|volume| policy.networks_of(volume));
        let networks = of_volumes.fold(self.networks.clone(), |networks, own| networks.and(&own));
        WantedSrpTarget { id: self.id, access, access_state, networks }
    }

    /// The LUNs of a volume, for any initiator.
    pub(super) fn luns_of(&self, volume: &str) -> BTreeSet<u16> {
        let all = self.acl.iter().flat_map(|(_, luns)| luns.of(&self.luns));
        let everybody = self.luns.iter().filter(|_| self.acl.is_empty()).map(|(lun, entry)| (*lun, entry));
        all.chain(everybody).filter(|(_, entry)| entry.volume == volume).map(|(lun, _)| lun).collect()
    }

    /// The target's access control, for the policy. A port identifier does not authenticate an
    /// initiator, but it restricts access as an iSCSI name does.
    pub(super) fn access(&self) -> TargetAccess {
        let is_open = self.acl.is_empty() && self.networks.is_everyone();
        let seen = self.luns.iter().map(|(_, entry)| entry).filter(|_| is_open);
        let volumes = lun_map::public_access(self.volumes(), seen);
        TargetAccess {
            kind: "srp_target",
            name: self.id.to_string(),
            listeners: ("portals", Vec::new()),
            is_restricted: volumes.iter().any(|(_, public)| public.is_restricted()),
            volumes,
            authenticates_all: false,
            tables: Vec::new(),
            moved_to: None,
        }
    }
}

impl HasVolumes for ConfiguredSrpTarget {
    /// The names of all volumes that initiators see as LUNs.
    fn volumes(&self) -> impl Iterator<Item = &str> {
        self.luns.volumes().chain(self.acl.iter().flat_map(|(_, luns)| luns.own_volumes()))
    }
}

/// A target port as the config describes it.
pub(super) struct WantedSrpTarget {
    pub(super) id: SrpPortId,
    /// Initiators that may log in (`None` for all), and the LUNs that they see.
    pub(super) access: Vec<(Option<SrpInitiators>, WantedLuns)>,
    pub(super) access_state: AccessState,
    /// Networks from which initiators may log in.
    pub(super) networks: AllowedNetworks,
}

impl WantedSrpTarget {
    /// Creates the running target port. Equal parts of the previous one, `before`, are reused, so
    /// that logged-in initiators keep their units.
    pub(super) fn make(self, before: Option<&SrpTarget>, node: &SrpNode) -> SrpTarget {
        let port = target_port(self.id);
        let first = before.and_then(|before| before.access.first());
        let states = first.map_or_else(Arc::<PortGroupStates>::default, |access| access.target.states());
        let is_changed = states.get(port.group) != self.access_state;
        states.set(port.group, self.access_state);
        let access = self.access.into_iter().map(|(initiator, luns)| {
            let same = before.into_iter().flat_map(|before| &before.access);
            let same = same.into_iter().find(|access| access.initiator == initiator);
            let target = same.map_or_else(
                || {
                    let view = ScsiTarget::new(&self.id.name_string(), vec![port.clone()]);
                    Arc::new(view.with_states(&states))
                },
                |same| same.target.clone(),
            );
            if is_changed {
                target.set_access_state(port.group, self.access_state);
            }
            luns.show_in(&target, |change| node.targets.notify(change));
            SrpAccess { initiator, target }
        });
        let access = access.collect();
        SrpTarget { id: self.id, port, access, networks: self.networks }
    }
}
