//! SRP targets from the config file: which volumes are logical units of which target port, and who
//! may see them.

use super::target_port;
use crate::failure::Failure;
use crate::protocol::alua::AluaStateName;
use crate::protocol::policy::TargetAccess;
use crate::protocol::units::Unit;
use blockmux_proto::scsi::{AccessState, MAX_LUN, PortGroupStates, ScsiTarget};
use blockmux_proto::srp::node::{InitiatorPorts, SrpAccess, SrpPortId, SrpTarget};
use serde::Deserialize;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// One `[[srp_target]]`, as it was written.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SrpTargetEntry {
    /// Identifier of the target port: 32 hexadecimal digits.
    port_id: String,
    /// Volumes by LUN.
    #[serde(default)]
    luns: BTreeMap<String, String>,
    /// How well the target port leads to its units at first; left out: active/optimized.
    access_state: Option<AluaStateName>,
    /// Who may log in; none means everybody.
    #[serde(default)]
    acl: Vec<SrpAclEntry>,
}

/// One `[[srp_target.acl]]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct SrpAclEntry {
    /// Identifier of the initiator port: 32 hexadecimal digits.
    initiator_port: Option<String>,
    /// GUID of initiator ports, in its place: 16 hexadecimal digits.
    initiator_guid: Option<String>,
    /// What it sees; left out: every LUN.
    luns: Option<Vec<u16>>,
}

/// A target port, checked.
#[derive(Clone, Debug)]
pub(super) struct ConfiguredSrpTarget {
    pub(super) id: SrpPortId,
    /// Names of volumes by LUN.
    pub(super) luns: BTreeMap<u16, String>,
    access_state: Option<AccessState>,
    /// Initiator ports that may log in, and the LUNs that they see; empty: everybody sees all.
    acl: Vec<(InitiatorPorts, Option<Vec<u16>>)>,
}

impl ConfiguredSrpTarget {
    /// Reads what an entry says.
    pub(super) fn prepare(entry: SrpTargetEntry) -> Result<ConfiguredSrpTarget, Failure> {
        let written = entry.port_id.clone();
        let wrong = |what: String| Failure::request(format!("srp_target `{written}`: {what}"));
        let port = |key: &str, text: &str| {
            let advice = "write 32 hexadecimal digits, as 0x0000000000000000505400fffe770001";
            SrpPortId::parse(text)
                .ok_or_else(|| wrong(format!("{key} `{text}` is no port identifier; {advice}")))
        };
        let id = port("port_id", &entry.port_id)?;
        let luns = entry.luns.iter().map(|(lun, volume)| {
            let number = lun.parse::<u16>().ok().filter(|number| *number <= MAX_LUN);
            let number = number.filter(|number| number.to_string() == *lun);
            let number = number.ok_or_else(|| wrong(format!("LUNs are numbers from 0 to {MAX_LUN}")))?;
            Ok((number, volume.clone()))
        });
        let luns: BTreeMap<u16, String> = luns.collect::<Result<_, Failure>>()?;
        if luns.is_empty() || luns.len() > MAX_LUNS {
            return Err(wrong(format!(
                "`luns` has to map 1 to {MAX_LUNS} LUNs, as luns = {{ 0 = \"disk0\" }}"
            )));
        }
        let mut named = HashSet::new();
        let acl = entry.acl.iter().map(|acl| {
            let initiators = match (&acl.initiator_port, &acl.initiator_guid) {
                (Some(text), None) => InitiatorPorts::Port(port("initiator_port", text)?),
                (None, Some(text)) => InitiatorPorts::parse_guid(text).ok_or_else(|| {
                    let advice = "write 16 hexadecimal digits, as 0x505400fffe770001";
                    wrong(format!("initiator_guid `{text}` is no GUID; {advice}"))
                })?,
                _ => {
                    return Err(wrong(
                        "each acl entry needs one of `initiator_port` or `initiator_guid`".to_owned(),
                    ));
                }
            };
            if !named.insert(initiators) {
                return Err(wrong(format!("two acl entries are for {initiators}; make one of them")));
            }
            if let Some(missing) = acl.luns.iter().flatten().find(|lun| !luns.contains_key(lun)) {
                return Err(wrong(format!("acl: there is no LUN {missing}; correct its `luns`")));
            }
            Ok((initiators, acl.luns.clone()))
        });
        let acl = acl.collect::<Result<_, Failure>>()?;
        let access_state = entry.access_state.map(AluaStateName::word);
        Ok(ConfiguredSrpTarget { id, luns, access_state, acl })
    }

    /// The target port with its units, which `unit` finds by the names of volumes.
    pub(super) fn target(&self, unit: impl Fn(&str) -> Option<Unit>) -> SrpTarget {
        let (port, states) = (target_port(self.id), Arc::new(PortGroupStates::default()));
        if let Some(state) = self.access_state {
            states.set(port.group, state);
        }
        let view = |luns: Option<&Vec<u16>>| {
            let empty = ScsiTarget::new(&self.id.name_string(), vec![port.clone()]).with_states(&states);
            let view = match luns {
                Some(luns) => empty.with_mask(luns.iter().copied().collect()),
                None => empty,
            };
            for (lun, volume) in &self.luns {
                if let Some((id, unit)) = unit(volume) {
                    view.add(*lun, id, unit);
                }
            }
            Arc::new(view)
        };
        let mut access: Vec<SrpAccess> = Vec::new();
        for (initiators, luns) in &self.acl {
            access.push(SrpAccess { initiators: *initiators, target: view(luns.as_ref()) });
        }
        if access.is_empty() {
            access.push(SrpAccess { initiators: InitiatorPorts::All, target: view(None) });
        }
        SrpTarget { id: self.id, port: port.clone(), access }
    }

    /// Who may use its volumes. A port identifier is no proof, but keeps others out as an iSCSI
    /// name does.
    pub(super) fn access(&self) -> TargetAccess {
        let is_open = self.acl.is_empty();
        TargetAccess {
            kind: "srp_target",
            name: self.id.to_string(),
            listeners: ("portals", Vec::new()),
            volumes: self.luns.values().map(|volume| (volume.clone(), is_open)).collect(),
            is_restricted: !is_open,
            asks_everybody: false,
            states: Vec::new(),
            moved_to: None,
        }
    }
}

/// The most logical units of one target port.
const MAX_LUNS: usize = 256;
