//! REPORT and SET TARGET PORT GROUPS: asymmetric logical unit access (SPC-5).
//!
//! The state of each target port group belongs to the logical unit. Initiators change it with SET
//! TARGET PORT GROUPS; the target changes it with [`LogicalUnit::set_access_state`], or for all its
//! units with [`ScsiTarget::set_access_state`](super::ScsiTarget::set_access_state).

use super::task::{CommandContext, HandlerAction, TaskOutcome, answer};
use super::unit::{LogicalUnit, NexusKey, UnitState};
use crate::scsi::sense::Sense;
use crate::volume_state::{MAX_TRANSITION, ServingState};
use blockmux_wire::scsi::alua::*;
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::collections::BTreeMap;
use zerocopy::{FromBytes, IntoBytes, U16};

/// States of the groups that were ever changed.
pub(super) type AccessStates = BTreeMap<u16, GroupState>;

/// State of one target port group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupState {
    pub(super) access: AccessState,
    /// STATUS CODE: the cause of the latest change.
    status: u8,
}

impl Default for GroupState {
    fn default() -> GroupState {
        GroupState { access: AccessState::ACTIVE_OPTIMIZED, status: STATUS_NONE }
    }
}

impl GroupState {
    /// The state while this process serves the volume, or another one does.
    pub(super) fn while_serving(self, serving: ServingState) -> GroupState {
        let access = match (serving, self.access) {
            (ServingState::Active, _) | (_, AccessState::UNAVAILABLE) => return self,
            (ServingState::Transitioning, _) => AccessState::TRANSITIONING,
            (ServingState::Standby, _) => AccessState::STANDBY,
        };
        GroupState { access, status: STATUS_IMPLICIT }
    }
}

impl LogicalUnit {
    /// Sets the ALUA state of a group and notifies initiators.
    pub fn set_access_state(&self, group: u16, access: AccessState) {
        self.change(|state| set(state, None, group, GroupState { access, status: STATUS_IMPLICIT }));
    }
}

/// Sense data of commands that need the medium in this state, if they fail.
pub(super) fn not_ready(access: AccessState) -> Option<Sense> {
    let asc = match access {
        AccessState::ACTIVE_OPTIMIZED | AccessState::ACTIVE_NON_OPTIMIZED => return None,
        AccessState::STANDBY => Asc::TARGET_PORT_IN_STANDBY_STATE,
        AccessState::TRANSITIONING => Asc::ASYMMETRIC_ACCESS_STATE_TRANSITION,
        _ => Asc::TARGET_PORT_IN_UNAVAILABLE_STATE,
    };
    Some(Sense::new(SenseKey::NOT_READY, asc))
}

pub(super) fn report(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let unit = &cx.unit.unit;
    let supported = if unit.is_owned() { SUPPORTED_STATES | T_SUP } else { SUPPORTED_STATES };
    let mut groups: BTreeMap<u16, Vec<u16>> = BTreeMap::new();
    for port in cx.target.ports() {
        groups.entry(port.group).or_default().push(port.relative_id);
    }
    let mut body = match cx.command.cdb.byte(1) >> 5 {
        0 => Vec::new(),
        // The extended header: how many seconds an implicit transition takes at most.
        1 if unit.is_owned() => vec![1 << 4, MAX_TRANSITION.as_secs() as u8, 0, 0],
        1 => vec![1 << 4, 1, 0, 0],
        _ => return Err(Sense::cdb_bit(1, 7).into()),
    };
    for (&group, ports) in &groups {
        let state = unit.read_state(|state| state.group_state(group));
        let descriptor = PortGroupDescriptor {
            pref_and_access_state: state.access.0,
            supported_states: supported,
            target_port_group: U16::new(group),
            reserved: 0,
            status_code: state.status,
            vendor_specific: 0,
            target_port_count: ports.len() as u8,
        };
        body.extend(descriptor.as_bytes());
        for port in ports {
            body.extend([0, 0]);
            body.extend(port.to_be_bytes());
        }
    }
    let mut bytes = (body.len() as u32).to_be_bytes().to_vec();
    bytes.extend(body);
    answer(&bytes, cx.command.cdb.u32(6) as usize)
}

pub(super) fn set_groups(cx: &mut CommandContext<'_>) -> TaskOutcome {
    if cx.unit.unit.is_owned() {
        // The process that serves the volume is not chosen by initiators.
        return Err(Sense::cdb_bit(1, 4).into());
    }
    let len = cx.command.cdb.u32(6) as usize;
    if len > MAX_LIST {
        return Err(Sense::in_cdb(6).into());
    }
    cx.parameters(len, 4, |cx, bytes| {
        let list = bytes.get(4..).unwrap_or_default();
        let descriptors = <[SetPortGroup]>::ref_from_bytes(list)
            .map_err(|_| Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR))?;
        let ports = cx.target.ports();
        for (at, descriptor) in (4..).step_by(4).zip(descriptors) {
            let is_known = ports.iter().any(|port| port.group == descriptor.target_port_group.get());
            if !SETTABLE.contains(&AccessState(descriptor.access_state & 0x0f)) || !is_known {
                return Err(Sense::in_parameters(at).into());
            }
        }
        let key = cx.unit.key;
        cx.unit.unit.change(|state| {
            for descriptor in descriptors {
                let access = AccessState(descriptor.access_state & 0x0f);
                let group = descriptor.target_port_group.get();
                set(state, Some(key), group, GroupState { access, status: STATUS_EXPLICIT });
            }
        });
        Ok(HandlerAction::good())
    })
}

/// Changes a state and notifies all nexuses but `by`.
fn set(state: &mut UnitState, by: Option<NexusKey>, group: u16, new: GroupState) {
    let old = state.access_states.insert(group, new).unwrap_or_default();
    if old.access != new.access {
        state.establish_attention_for_all(by, Asc::ASYMMETRIC_ACCESS_STATE_CHANGED);
    }
}

const SETTABLE: [AccessState; 4] = [
    AccessState::ACTIVE_OPTIMIZED,
    AccessState::ACTIVE_NON_OPTIMIZED,
    AccessState::STANDBY,
    AccessState::UNAVAILABLE,
];
/// Maximum length of the parameter list, in bytes.
const MAX_LIST: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scsi::device::ScsiStatus;
    use crate::scsi::device::testing::DeviceBench;
    use crate::scsi::device::unit::UnitIdentity;
    use crate::volume_state::TestCluster;

    const REPORT: [u8; 12] = [0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];

    fn set_cdb(len: u8) -> [u8; 12] {
        [0xa4, 0x0a, 0, 0, 0, 0, 0, 0, 0, len, 0, 0]
    }

    #[test]
    fn groups_are_reported_with_their_ports() {
        let mut client = DeviceBench::new().client("a");
        let one = [0, 0x0f, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1];
        let two = [0, 0x0f, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2];
        assert_eq!(client.run(&REPORT).good(), [&[0, 0, 0, 24][..], &one, &two].concat());
        let mut extended = REPORT;
        extended[1] |= 0x20;
        assert_eq!(client.run(&extended).good()[..8], [0, 0, 0, 28, 0x10, 1, 0, 0]);
        extended[1] |= 0x40;
        assert_eq!(client.run(&extended).check(), (5, 0x2400));
    }

    #[test]
    fn a_group_in_standby_rejects_io_and_other_nexuses_get_unit_attentions() {
        let bench = DeviceBench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        a.run_with(&set_cdb(8), &[0, 0, 0, 0, 2, 0, 0, 1]).good();
        assert_eq!(a.run(&READ).check(), (2, 0x040b));
        assert_eq!(a.run(&REPORT).good()[4..10], [2, 0x0f, 0, 1, 0, 1]);
        a.run(&[0x12, 0, 0, 0, 36, 0]).good();
        assert_eq!(b.run(&READ).check(), (6, 0x2a06));
        assert_eq!(b.run(&READ).check(), (2, 0x040b));
        bench.unit.set_access_state(1, AccessState::ACTIVE_NON_OPTIMIZED);
        assert_eq!(a.run(&READ).check(), (6, 0x2a06));
        a.run(&READ).good();
        assert_eq!(a.run(&REPORT).good()[4..10], [1, 0x0f, 0, 1, 0, 2]);
    }

    #[test]
    fn each_access_state_admits_the_specified_commands() {
        let mode_sense: &[u8] = &[0x1a, 0, 0x3f, 0, 255, 0];
        let capacity: [&[u8]; 2] =
            [&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0]];
        let keys: &[u8] = &[0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0];
        let always: [&[u8]; 4] = [
            &[0x12, 0, 0, 0, 36, 0],
            &[0x03, 0, 0, 0, 18, 0],
            &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0],
            &REPORT,
        ];
        let mut client = DeviceBench::new().client("a");
        client.run_with(&set_cdb(8), &[0, 0, 0, 0, 2, 0, 0, 1]).good();
        for cdb in always.iter().chain(&capacity).chain([&mode_sense, &keys]) {
            client.run(cdb).good();
        }
        for cdb in [&READ[..], &[0; 6]] {
            assert_eq!(client.run(cdb).check(), (2, 0x040b), "{cdb:x?}");
        }
        client.run_with(&set_cdb(8), &[0, 0, 0, 0, 3, 0, 0, 1]).good();
        always.iter().for_each(|cdb| drop(client.run(cdb).good()));
        for cdb in capacity.iter().chain([&mode_sense, &keys, &&READ[..], &&[0; 6][..]]) {
            assert_eq!(client.run(cdb).check(), (2, 0x040c), "{cdb:x?}");
        }
        client.run_with(&set_cdb(8), &[0, 0, 0, 0, 0, 0, 0, 1]).good();
        client.run(&READ).good();
    }

    #[test]
    fn a_unit_that_another_process_serves_is_standby_and_has_no_reservations() {
        let cluster = TestCluster::default();
        let process = cluster.process();
        let unit = LogicalUnit::over(UnitIdentity::of("a"), &process);
        let bench = DeviceBench::around(unit, process.volume().clone());
        let mut client = bench.client("a");
        let mut other = bench.client("b");
        let register = [0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0];
        let keys = [0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0];
        let mut parameters = [0; 24];
        parameters[15] = 7;
        assert_eq!(client.run(&READ).check(), (2, 0x040b));
        for cdb in [&keys[..], &[0x16, 0, 0, 0, 0, 0], &[0x17, 0, 0, 0, 0, 0]] {
            assert_eq!(client.run(cdb).check(), (2, 0x040b), "{cdb:x?}");
        }
        assert_eq!(client.run_with(&register, &parameters).check(), (2, 0x040b));
        client.run(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0]).good();
        let inquiry = client.run(&[0x12, 0, 0, 0, 36, 0]).good();
        assert_eq!(inquiry[5] >> 4, 1, "initiators change no state");
        assert_eq!(client.run_with(&set_cdb(8), &[0, 0, 0, 0, 0, 0, 0, 1]).check(), (5, 0x2400));
        assert_eq!(client.run(&REPORT).good()[4..10], [2, 0x8f, 0, 1, 0, 2]);
        cluster.promote(&process);
        assert_eq!(client.run(&READ).check(), (6, 0x2a06));
        client.run(&READ).good();
        client.run_with(&register, &parameters).good();
        let exclusive = [0x5f, 1, 3, 0, 0, 0, 0, 0, 24, 0];
        parameters = [0; 24];
        parameters[7] = 7;
        client.run_with(&exclusive, &parameters).good();
        assert_eq!(other.run(&READ).check(), (6, 0x2a06));
        assert_eq!(other.run(&READ).status, ScsiStatus::RESERVATION_CONFLICT);
        let mut leaving = process.step_down().unwrap();
        assert_eq!(client.run(&READ).check(), (6, 0x2a06));
        assert_eq!(client.run(&READ).check(), (2, 0x040a));
        assert_eq!(client.run(&REPORT).good()[4], 15);
        let mut extended = REPORT;
        extended[1] |= 1 << 5;
        assert_eq!(client.run(&extended).good()[4..6], [1 << 4, 60], "IMPLICIT TRANSITION TIME");
        assert!(leaving.is_drained() && leaving.store() == Ok(true) && leaving.finish().is_some());
        assert_eq!(client.run(&READ).check(), (6, 0x2a06));
        assert_eq!(client.run(&READ).check(), (2, 0x040b));
        assert_eq!(other.run(&READ).check(), (6, 0x2a06));
        assert_eq!(other.run(&READ).check(), (2, 0x040b), "another path may have no conflict");
    }

    #[test]
    fn what_is_known_of_the_data_is_forgotten_when_another_process_may_change_it() {
        use crate::scsi::device::sanitize::EraseRecord;
        use crate::volume_state::Watch;
        let cluster = TestCluster::default();
        let process = cluster.process();
        let unit = LogicalUnit::over(UnitIdentity::of("a"), &process);
        cluster.promote(&process);
        let (token, ranges) = (Box::new([7; 512]), std::sync::Arc::from([(0, 512)]));
        let watch = Watch::new(&process, std::sync::Arc::clone(&ranges));
        unit.tokens.add(token.clone(), ranges, 60, watch).unwrap();
        unit.change(|state| state.erased = Some(EraseRecord::now(&process, 1 << 20)));
        assert!(matches!(unit.tokens.find(&token), Some(Ok(_))));
        let _releasing = process.step_down().unwrap().finish();
        assert!(matches!(unit.tokens.find(&token), Some(Err(_))));
        assert!(unit.read_state(|state| state.erased.is_none()));
    }

    #[test]
    fn an_unknown_group_or_state_changes_nothing() {
        let mut client = DeviceBench::new().client("a");
        for wrong in [[2, 0, 0, 9], [14, 0, 0, 1], [15, 0, 0, 1], [4, 0, 0, 1]] {
            let list = [&[0, 0, 0, 0, 3, 0, 0, 1][..], &wrong].concat();
            assert_eq!(client.run_with(&set_cdb(12), &list).check(), (5, 0x2600));
        }
        assert_eq!(client.run_with(&set_cdb(7), &[0; 7]).check(), (5, 0x1a00));
        client.run(&set_cdb(0)).good();
        client.run(&READ).good();
    }
}
