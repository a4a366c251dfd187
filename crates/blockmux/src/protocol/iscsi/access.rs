//! Asymmetric logical unit access (SPC-5): the access state of each portal group of a target.
//!
//! A target with `access_states` has one portal group for each listener: a session may use all
//! portals of its group, and the access state belongs to the group.

use super::ISCSI;
use crate::address::{matches_listener, tcp_address};
use crate::protocol::alua::AluaStateName;
use blockmux_proto::scsi::AccessState;
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// The access states of listeners by their addresses.
#[derive(Clone, Debug, Default)]
pub(crate) struct ListenerStates(Vec<(SocketAddr, AccessState)>);

impl ListenerStates {
    /// Parses the addresses, in the syntax of portals.
    pub(super) fn prepare(written: &BTreeMap<String, AluaStateName>) -> Result<ListenerStates, String> {
        let state = |(address, state): (&String, &AluaStateName)| {
            let address =
                tcp_address(address, ISCSI.port).map_err(|error| format!("access_states: {error}"))?;
            Ok((address, state.access_state()))
        };
        written.iter().map(state).collect::<Result<_, _>>().map(ListenerStates)
    }

    /// The listeners with a configured state.
    pub(super) fn listeners(&self) -> Vec<SocketAddr> {
        self.0.iter().map(|(address, _)| *address).collect()
    }

    /// The state of a listener; active/optimized if none is configured.
    pub(super) fn of(&self, listener: &SocketAddr) -> AccessState {
        let found = self.0.iter().find(|(address, _)| matches_listener(address, listener));
        found.map_or(AccessState::ACTIVE_OPTIMIZED, |(_, state)| *state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_has_the_configured_state_or_is_optimized() {
        let written = [
            ("192.0.2.2".to_owned(), AluaStateName::Standby),
            ("[::1]:7".to_owned(), AluaStateName::Unavailable),
        ];
        let states = ListenerStates::prepare(&written.into()).unwrap();
        let of = |address: &str| states.of(&address.parse().unwrap());
        assert_eq!(of("192.0.2.2:3260"), AccessState::STANDBY);
        assert_eq!(of("192.0.2.2:3261"), AccessState::ACTIVE_OPTIMIZED);
        assert_eq!(of("[::1]:7"), AccessState::UNAVAILABLE);
        let wrong = |address: &str| {
            ListenerStates::prepare(&[(address.to_owned(), AluaStateName::Standby)].into()).unwrap_err()
        };
        assert!(wrong("unix:/s").starts_with("access_states: `unix:/s` is a Unix socket; write host:port"));
        assert!(wrong("3260").starts_with("access_states: `3260` is not a host"));
    }
}
