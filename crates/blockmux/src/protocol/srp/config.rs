//! SRP targets in the config file: their logical units and their access control.

use super::target_port;
use crate::failure::Failure;
use crate::networks;
use crate::protocol::alua::AluaStateName;
use crate::protocol::policy::{Policy, TargetAccess};
use crate::protocol::units::{MAX_LUNS, VolumeUnit};
use blockmux_proto::networks::AllowedNetworks;
use blockmux_proto::scsi::{AccessState, MAX_LUN, PortGroupStates, ScsiTarget, UnitChange};
use blockmux_proto::srp::node::{SrpAccess, SrpInitiators, SrpNode, SrpPortId, SrpTarget};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

/// One `[[srp_target]]` of the config file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SrpTargetEntry {
    /// Identifier of the target port: 32 hexadecimal digits.
    port_id: String,
    /// Volumes by LUN.
    #[serde(default)]
    luns: BTreeMap<String, String>,
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
    /// The LUNs that the initiator sees; without the key all.
    luns: Option<Vec<u16>>,
}

/// A validated target port.
#[derive(Clone, Debug)]
pub(super) struct ConfiguredSrpTarget {
    pub(super) id: SrpPortId,
    /// Names of volumes by LUN.
    pub(super) luns: BTreeMap<u16, String>,
    /// Initiator ports that may log in, and the LUNs that they see; entries of one port come before
    /// entries of a GUID. If the list is empty, every initiator sees all LUNs.
    acl: Vec<(SrpInitiators, Option<Vec<u16>>)>,
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
        let luns = entry.luns.iter().map(|(lun, volume)| {
            let number = lun.parse::<u16>().ok().filter(|number| *number <= MAX_LUN);
            let number = number.filter(|number| number.to_string() == *lun);
            let number = number.ok_or_else(|| wrong(format!("LUNs are numbers from 0 to {MAX_LUN}")))?;
            Ok((number, volume.clone()))
        });
        let luns: BTreeMap<u16, String> = luns.collect::<Result<_, Failure>>()?;
        if luns.is_empty() || luns.len() > MAX_LUNS {
            return Err(wrong(format!(
                "`luns` must map 1 to {MAX_LUNS} LUNs, as luns = {{ 0 = \"disk0\" }}"
            )));
        }
        let mut named = HashSet::new();
        let acl = entry.acl.iter().map(|acl| {
            let written = &acl.initiator_port;
            let advice = "write the 32 hexadecimal digits of a port or the 16 of a GUID";
            let initiator = SrpInitiators::parse(written)
                .ok_or_else(|| wrong(format!("initiator_port `{written}`: {advice}")))?;
            if !named.insert(initiator) {
                return Err(wrong(format!("two acl entries are for {written}; merge them")));
            }
            if let Some(missing) = acl.luns.iter().flatten().find(|lun| !luns.contains_key(lun)) {
                return Err(wrong(format!("acl: the target has no LUN {missing}; correct its `luns`")));
            }
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
        let luns = self.luns.iter().filter_map(|(lun, volume)| Some((*lun, unit(volume)?)));
        let mask = |luns: &Option<Vec<u16>>| luns.as_ref().map(|luns| luns.iter().copied().collect());
        let mut access: Vec<_> =
            self.acl.iter().map(|(initiator, luns)| (Some(*initiator), mask(luns))).collect();
        if access.is_empty() {
            access.push((None, None));
        }
        let access_state = self.access_state.unwrap_or(AccessState::ACTIVE_OPTIMIZED);
        let of_volumes = self.luns.values().map(|volume| policy.networks_of(volume));
        let networks = of_volumes.fold(self.networks.clone(), |networks, own| networks.and(&own));
        WantedSrpTarget { id: self.id, luns: luns.collect(), access, access_state, networks }
    }

    /// The target's access control, for the policy. A port identifier does not authenticate an
    /// initiator, but it restricts access as an iSCSI name does.
    pub(super) fn access(&self) -> TargetAccess {
        let is_open = self.acl.is_empty() && self.networks.is_everyone();
        TargetAccess {
            kind: "srp_target",
            name: self.id.to_string(),
            listeners: ("portals", Vec::new()),
            volumes: self.luns.values().map(|volume| (volume.clone(), is_open)).collect(),
            is_restricted: !is_open,
            authenticates_all: false,
            states: Vec::new(),
            moved_to: None,
        }
    }
}

/// A target port as the config describes it.
pub(super) struct WantedSrpTarget {
    pub(super) id: SrpPortId,
    pub(super) luns: BTreeMap<u16, VolumeUnit>,
    /// Initiators that may log in (`None` for all), and the LUNs that they see (`None` for all).
    pub(super) access: Vec<(Option<SrpInitiators>, Option<BTreeSet<u16>>)>,
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
        let access = self.access.into_iter().map(|(initiator, mask)| {
            let same = before.into_iter().flat_map(|before| &before.access);
            let same = same.into_iter().find(|access| access.initiator == initiator);
            let target = same.map_or_else(
                || {
                    let view = ScsiTarget::new(&self.id.name_string(), vec![port.clone()]);
                    let view = view.with_states(&states);
                    Arc::new(match &mask {
                        Some(mask) => view.with_mask(mask.clone()),
                        None => view,
                    })
                },
                |same| same.target.clone(),
            );
            target.set_mask(mask);
            if is_changed {
                target.set_access_state(port.group, self.access_state);
            }
            target.remove(|number, volume| self.luns.get(&number).is_none_or(|(own, _)| *own != volume));
            for (number, (volume, unit)) in &self.luns {
                if target.add(*number, *volume, unit.clone()) {
                    node.notify(UnitChange::Added(*volume, unit));
                }
            }
            SrpAccess { initiator, target }
        });
        let access = access.collect();
        SrpTarget { id: self.id, port, access, networks: self.networks }
    }
}
