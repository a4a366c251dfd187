//! ALUA from the application client's point of view: the state of this path (SPC-5).
//!
//! The states of target port groups are queried once the unit is identified, after a unit attention
//! about them, and when the transport requests it. If there are other paths, I/O that meets a
//! standby or unavailable port is returned to be sent on one of them.

use super::queue::ScsiQueue;
use crate::driver::session::PathRank;
use blockmux_wire::scsi::alua::{AccessState, PortGroupDescriptor};
use blockmux_wire::scsi::sense::Asc;
use zerocopy::FromBytes;

/// State of the path.
pub(super) struct UnitAccess {
    state: AccessState,
}

impl Default for UnitAccess {
    fn default() -> UnitAccess {
        UnitAccess { state: AccessState::ACTIVE_OPTIMIZED }
    }
}

impl UnitAccess {
    /// Updates the state from sense data.
    pub(super) fn on_sense(&mut self, asc: Asc) {
        self.state = match asc {
            Asc::TARGET_PORT_IN_STANDBY_STATE => AccessState::STANDBY,
            Asc::TARGET_PORT_IN_UNAVAILABLE_STATE => AccessState::UNAVAILABLE,
            Asc::ASYMMETRIC_ACCESS_STATE_TRANSITION => AccessState::TRANSITIONING,
            _ => self.state,
        };
    }

    /// Updates the state of `group` from REPORT TARGET PORT GROUPS parameter data.
    pub(super) fn on_report(&mut self, data: &[u8], group: u16) {
        let reported = data.first_chunk().map_or(0, |len| u32::from_be_bytes(*len)) as usize;
        let mut rest = data.get(4..).unwrap_or_default();
        rest = rest.get(..reported).unwrap_or(rest);
        while let Ok((found, tail)) = PortGroupDescriptor::read_from_prefix(rest) {
            if found.target_port_group.get() == group {
                self.state = AccessState(found.pref_and_access_state & STATE_MASK);
                return;
            }
            let ports = usize::from(found.target_port_count).saturating_mul(PORT_LEN);
            rest = tail.get(ports..).unwrap_or_default();
        }
    }

    fn rank(&self) -> PathRank {
        match self.state {
            AccessState::ACTIVE_OPTIMIZED => PathRank::Best,
            AccessState::ACTIVE_NON_OPTIMIZED | AccessState::LOGICAL_BLOCK_DEPENDENT => PathRank::Good,
            AccessState::TRANSITIONING => PathRank::Poor,
            _ => PathRank::Unusable,
        }
    }
}

impl<T: Default> ScsiQueue<T> {
    /// Rank of the path.
    #[inline]
    pub(crate) fn path_rank(&self) -> PathRank {
        self.set.access.rank()
    }

    /// Queries the ALUA state, if the unit supports it.
    pub(crate) fn query_access(&mut self) {
        if self.set.unit.as_ref().is_some_and(|unit| unit.port_group.is_some()) {
            self.set.changes.query_access();
        }
    }
}

/// ASYMMETRIC ACCESS STATE.
const STATE_MASK: u8 = 0x0f;
/// Length of a target port descriptor, in bytes.
const PORT_LEN: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    /// Group 7 with two ports and group 1 without ports.
    fn report(seven: AccessState, one: AccessState) -> Vec<u8> {
        let group = |state: AccessState, group: u8, ports: u8| {
            [&[0x80 | state.0, 0x0f, 0, group, 0, 0, 0, ports][..], &vec![9; usize::from(ports) * 4]].concat()
        };
        let groups = [group(seven, 7, 2), group(one, 1, 0)].concat();
        [&(groups.len() as u32).to_be_bytes()[..], &groups, b"rubbish that follows"].concat()
    }

    #[test]
    fn the_path_state_is_that_of_its_port_group() {
        let mut access = UnitAccess::default();
        for (state, rank) in [
            (AccessState::ACTIVE_NON_OPTIMIZED, PathRank::Good),
            (AccessState::STANDBY, PathRank::Unusable),
            (AccessState::OFFLINE, PathRank::Unusable),
            (AccessState::TRANSITIONING, PathRank::Poor),
            (AccessState::ACTIVE_OPTIMIZED, PathRank::Best),
        ] {
            access.on_report(&report(AccessState::UNAVAILABLE, state), 1);
            assert_eq!(access.rank(), rank, "{state}");
            access.on_report(&report(state, AccessState::UNAVAILABLE), 7);
            assert_eq!(access.rank(), rank, "{state}");
        }
        for odd in [&[][..], &[0, 0, 0, 8, 2], &report(AccessState::STANDBY, AccessState::STANDBY)[..20]] {
            access.on_report(odd, 1);
            assert_eq!(access.rank(), PathRank::Best);
        }
        access.on_sense(Asc::TARGET_PORT_IN_STANDBY_STATE);
        assert_eq!(access.rank(), PathRank::Unusable);
    }
}
