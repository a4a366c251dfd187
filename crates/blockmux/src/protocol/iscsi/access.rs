//! Settings of a target that differ by listener: access states (asymmetric logical unit access,
//! SPC-5) and portal group tags.
//!
//! Without tags, a target with `access_states` has one portal group for each listener: a session
//! may use all portals of its group, and the access state belongs to the group.

use super::ISCSI;
use crate::protocol::address::{matches_listener, tcp_address};
use crate::protocol::alua::AluaStateName;
use crate::protocol::policy::ListenerTable;
use blockmux_engine::net::zone;
use blockmux_proto::scsi::AccessState;
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, Unexpected, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

/// Values by the addresses of listeners.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ByListener<T>(Vec<(SocketAddr, T)>);

/// The access states of listeners.
pub(super) type ListenerStates = ByListener<AccessState>;

impl<T: Copy + PartialEq> ByListener<T> {
    /// Parses the addresses, in the syntax of portals. `key` is the table's key.
    fn read<V>(
        key: &str,
        written: &BTreeMap<String, V>,
        value: impl Fn(&V) -> T,
    ) -> Result<ByListener<T>, String> {
        let entry = |(address, own): (&String, &V)| {
            let address = tcp_address(address, ISCSI.port).map_err(|error| format!("{key}: {error}"))?;
            Ok((address, value(own)))
        };
        written.iter().map(entry).collect::<Result<_, _>>().map(ByListener)
    }

    /// The table for the policy.
    fn table(&self, key: &str, is_complete: bool) -> ListenerTable {
        let listeners = self.0.iter().map(|(address, _)| *address).collect();
        ListenerTable { key: key.to_owned(), listeners, is_complete }
    }

    /// The value of a listener; `None` if it has none.
    fn get(&self, listener: &SocketAddr) -> Option<T> {
        let found = self.0.iter().find(|(address, _)| matches_listener(address, listener));
        found.map(|(_, value)| *value)
    }
}

impl ListenerStates {
    /// Parses `access_states`.
    pub(super) fn prepare(written: &BTreeMap<String, AluaStateName>) -> Result<ListenerStates, String> {
        ByListener::read("access_states", written, |state| state.access_state())
    }

    /// The state of a listener; active/optimized if none is configured.
    pub(super) fn of(&self, listener: &SocketAddr) -> AccessState {
        self.get(listener).unwrap_or(AccessState::ACTIVE_OPTIMIZED)
    }

    pub(super) fn listeners(&self) -> ListenerTable {
        self.table("access_states", false)
    }
}

/// `TargetPortalGroupTag`: one number, or numbers by listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WrittenGroupTags {
    All(u16),
    ByListener(BTreeMap<String, u16>),
}

/// The portal group tags of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum GroupTags {
    /// All portals form one group.
    All(u16),
    /// Listeners with the same tag form a group; each listener of the target has a tag.
    ByListener(ByListener<u16>),
}

impl GroupTags {
    /// Parses the addresses. A group has one access state, so `states` must not differ within it.
    pub(super) fn prepare(
        written: &WrittenGroupTags,
        states: Option<&ListenerStates>,
    ) -> Result<GroupTags, String> {
        let tags = match (written, states) {
            (WrittenGroupTags::All(tag), None) => return Ok(GroupTags::All(*tag)),
            (WrittenGroupTags::All(tag), Some(_)) => {
                return Err(format!(
                    "access_states needs a TargetPortalGroupTag for each listener, as {{ \"192.0.2.1:3260\" = {tag} }}"
                ));
            }
            (WrittenGroupTags::ByListener(written), _) => ByListener::read(GROUP_TAG, written, |tag| *tag)?,
        };
        let state = |(listener, _): &(SocketAddr, u16)| states.map(|states| states.of(listener));
        for own in &tags.0 {
            let differs = |other: &&(SocketAddr, u16)| own.1 == other.1 && state(own) != state(other);
            if let Some((other, tag)) = tags.0.iter().find(differs) {
                return Err(format!(
                    "{GROUP_TAG}: {} and {} have different access_states, but the same tag {tag}; give them two",
                    zone::address_text(&own.0),
                    zone::address_text(other)
                ));
            }
        }
        Ok(GroupTags::ByListener(tags))
    }

    /// The tag of a listener.
    pub(super) fn of(&self, listener: &SocketAddr) -> Option<u16> {
        match self {
            GroupTags::All(tag) => Some(*tag),
            GroupTags::ByListener(tags) => tags.get(listener),
        }
    }

    /// The listeners that have a tag, if it is not one for all.
    pub(super) fn listeners(&self) -> Option<ListenerTable> {
        match self {
            GroupTags::All(_) => None,
            GroupTags::ByListener(tags) => Some(tags.table(GROUP_TAG, true)),
        }
    }
}

impl<'de> Deserialize<'de> for WrittenGroupTags {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<WrittenGroupTags, D::Error> {
        from.deserialize_any(GroupTagsVisitor)
    }
}

struct GroupTagsVisitor;

impl<'de> Visitor<'de> for GroupTagsVisitor {
    type Value = WrittenGroupTags;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number from 0 to 65535, or a table of such numbers by listener")
    }

    fn visit_i64<E: Error>(self, tag: i64) -> Result<WrittenGroupTags, E> {
        let number = u16::try_from(tag).map_err(|_| E::invalid_value(Unexpected::Signed(tag), &self));
        number.map(WrittenGroupTags::All)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<WrittenGroupTags, A::Error> {
        Deserialize::deserialize(MapAccessDeserializer::new(map)).map(WrittenGroupTags::ByListener)
    }
}

/// The key of the tags in the config file.
const GROUP_TAG: &str = "TargetPortalGroupTag";

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

    fn tags(written: &str, states: &[(&str, AluaStateName)]) -> Result<GroupTags, String> {
        #[derive(Deserialize)]
        struct Written {
            tag: WrittenGroupTags,
        }
        let states: BTreeMap<_, _> = states.iter().map(|(own, state)| ((*own).to_owned(), *state)).collect();
        let states = ListenerStates::prepare(&states).unwrap();
        let written: Result<Written, _> = toml::from_str(&format!("tag = {written}"));
        let written = written.map_err(|error| error.message().to_owned())?;
        GroupTags::prepare(&written.tag, Some(&states).filter(|states| !states.0.is_empty()))
    }

    #[test]
    fn a_portal_group_tag_is_one_number_or_one_for_each_listener() {
        let one = tags("65535", &[]).unwrap();
        assert_eq!(
            (one.of(&"192.0.2.1:1".parse().unwrap()), one.listeners().is_none()),
            (Some(65_535), true)
        );
        let some = tags("{ '192.0.2.1' = 0, '[::1]:7' = 5 }", &[]).unwrap();
        let of = |address: &str| some.of(&address.parse().unwrap());
        assert_eq!((of("192.0.2.1:3260"), of("[::1]:7"), of("[::1]:8")), (Some(0), Some(5), None));
        assert!(some.listeners().is_some_and(|table| table.is_complete && table.listeners.len() == 2));
        let expected = "expected a number from 0 to 65535, or a table of such numbers by listener";
        for (written, what) in [("65536", "integer `65536`"), ("-1", "integer `-1`"), ("'1'", "string")] {
            let error = tags(written, &[]).unwrap_err();
            assert!(error.contains(what) && error.contains(expected), "{error}");
        }
        assert!(tags("{ '192.0.2.1' = 65536 }", &[]).unwrap_err().contains("integer `65536`"));
        let error = tags("{ 'unix:/s' = 1 }", &[]).unwrap_err();
        assert!(error.starts_with("TargetPortalGroupTag: `unix:/s` is a Unix socket"), "{error}");
    }

    #[test]
    fn a_portal_group_has_one_access_state() {
        let standby = [("192.0.2.2", AluaStateName::Standby)];
        assert!(tags("{ '192.0.2.1' = 1, '192.0.2.2' = 2 }", &standby).is_ok());
        let both = [("192.0.2.1", AluaStateName::Standby), standby[0]];
        assert!(tags("{ '192.0.2.1' = 1, '192.0.2.2' = 1 }", &both).is_ok());
        let error = tags("{ '192.0.2.1' = 1, '192.0.2.2' = 1 }", &standby).unwrap_err();
        let expected = "TargetPortalGroupTag: 192.0.2.1:3260 and 192.0.2.2:3260 have different access_states";
        assert!(error.starts_with(expected), "{error}");
        let error = tags("3", &standby).unwrap_err();
        assert!(error.contains("for each listener, as { \"192.0.2.1:3260\" = 3 }"), "{error}");
    }
}
