//! Settings of a target that differ by listener: access states (asymmetric logical unit access,
//! SPC-5) and portal group tags.
//!
//! Without tags, a target with `access_states` by listener has one portal group for each listener:
//! a session may use all portals of its group, and the access state belongs to the group.

use super::ISCSI;
use crate::protocol::address::{matches_listener, tcp_address};
use crate::protocol::alua::AluaStateName;
use crate::protocol::frontend::NamedListener;
use crate::protocol::policy::ListenerTable;
use blockmux_engine::net::zone;
use blockmux_proto::scsi::AccessState;
use serde::Deserialize;
use serde::de::value::{I64Deserializer, MapAccessDeserializer, StrDeserializer};
use serde::de::{DeserializeOwned, Deserializer, Error, MapAccess, Unexpected, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;
use toml::{Table, Value};

/// Values by the addresses of listeners.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ByListener<T>(Vec<(SocketAddr, T)>);

/// `access_states`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AccessStates {
    /// The state of all portal groups, which stay as they are.
    All(AccessState),
    /// Each listener is a portal group, unless there are tags.
    ByListener(ByListener<AccessState>),
}

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

impl AccessStates {
    /// Parses `access_states`.
    pub(super) fn prepare(written: &OneOrByListener<AluaStateName>) -> Result<AccessStates, String> {
        Ok(match written {
            OneOrByListener::One(state) => AccessStates::All(state.access_state()),
            OneOrByListener::ByListener(written) => {
                AccessStates::ByListener(ByListener::read(STATES, written, |state| state.access_state())?)
            }
        })
    }

    /// The state of a listener; active/optimized if none is configured.
    pub(super) fn of(&self, listener: &SocketAddr) -> AccessState {
        match self {
            AccessStates::All(state) => *state,
            AccessStates::ByListener(states) => states.get(listener).unwrap_or(AccessState::ACTIVE_OPTIMIZED),
        }
    }

    /// The listeners that have a state of their own, if it is not one for all.
    pub(super) fn listeners(&self) -> Option<ListenerTable> {
        match self {
            AccessStates::All(_) => None,
            AccessStates::ByListener(states) => Some(states.table(STATES, false)),
        }
    }
}

/// Writes the access state of the listener `at`, or of all, into a target's entry.
///
/// # Errors
/// If `at` is not a listener, or shares its portal group with others; the message says what to do.
pub(super) fn write_state(
    target: &mut Table,
    state: AluaStateName,
    at: Option<SocketAddr>,
    listeners: &[NamedListener],
) -> Result<(), String> {
    let at = at.map(|at| NamedListener::find(listeners, at)).transpose()?;
    let portals = target.get("portals").and_then(Value::as_array).cloned().unwrap_or_default();
    let is_its = |portal: &Value, listener: &NamedListener| {
        portal.as_str().is_some_and(|text| refers_to(text, listener))
    };
    let own = listeners
        .iter()
        .filter(|listener| portals.is_empty() || portals.iter().any(|portal| is_its(portal, listener)));
    let own: Vec<&NamedListener> = own.collect();
    let word = Value::try_from(state).map_err(|error| error.to_string())?;
    let has_tags = target.get(GROUP_TAG).is_some_and(Value::is_table);
    let states = target.get(STATES);
    match (at, states.and_then(Value::as_table)) {
        // One state for all leaves the portal groups as they are.
        (None, None) => drop(target.insert(STATES.to_owned(), word)),
        (Some(_), None) if own.len() == 1 => drop(target.insert(STATES.to_owned(), word)),
        (Some(at), None) if !has_tags => {
            return Err(format!(
                "{} shares its portal group with other listeners; give each its own in the config file, with \
                 `access_states` or `TargetPortalGroupTag`",
                zone::address_text(&at.address)
            ));
        }
        (at, table) => {
            let mut states = table.cloned().unwrap_or_default();
            if let Some(one) = target.get(STATES).filter(|one| one.is_str()) {
                let text = |listener: &&NamedListener| zone::address_text(&listener.written);
                states.extend(own.iter().map(|listener| (text(listener), one.clone())));
            }
            for listener in own.into_iter().filter(|own| at.is_none_or(|at| at.address == own.address)) {
                let known = states.keys().find(|key| refers_to(key, listener)).cloned();
                states.insert(known.unwrap_or_else(|| zone::address_text(&listener.written)), word.clone());
            }
            target.insert(STATES.to_owned(), states.into());
        }
    }
    Ok(())
}

/// Whether an address in a config is the listener's.
fn refers_to(written: &str, listener: &NamedListener) -> bool {
    tcp_address(written, ISCSI.port).is_ok_and(|own| listener.is_at(&own))
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
        written: &OneOrByListener<u16>,
        states: Option<&AccessStates>,
    ) -> Result<GroupTags, String> {
        let tags = match (written, states) {
            (OneOrByListener::One(tag), None | Some(AccessStates::All(_))) => {
                return Ok(GroupTags::All(*tag));
            }
            (OneOrByListener::One(tag), Some(AccessStates::ByListener(_))) => {
                return Err(format!(
                    "access_states needs a TargetPortalGroupTag for each listener, as {{ \"192.0.2.1:3260\" = {tag} }}"
                ));
            }
            (OneOrByListener::ByListener(written), _) => ByListener::read(GROUP_TAG, written, |tag| *tag)?,
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

/// One value for a whole target, or values by the addresses of listeners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OneOrByListener<T> {
    One(T),
    ByListener(BTreeMap<String, T>),
}

/// A value that differs by listener.
pub(super) trait ListenerValue: DeserializeOwned {
    /// What a config has, for messages.
    const EXPECTED: &str;
    /// Whether it is one of several words.
    const IS_WORD: bool;
}

impl ListenerValue for u16 {
    const EXPECTED: &str = "a number from 0 to 65535, or a table of such numbers by listener";
    const IS_WORD: bool = false;
}

impl ListenerValue for AluaStateName {
    const EXPECTED: &str = "an access state, or a table of states by listener";
    const IS_WORD: bool = true;
}

impl<'de, T: ListenerValue> Deserialize<'de> for OneOrByListener<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<OneOrByListener<T>, D::Error> {
        from.deserialize_any(OneOrByListenerVisitor(PhantomData))
    }
}

struct OneOrByListenerVisitor<T>(PhantomData<T>);

impl<'de, T: ListenerValue> Visitor<'de> for OneOrByListenerVisitor<T> {
    type Value = OneOrByListener<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<OneOrByListener<T>, E> {
        let wrong = |_: E| E::invalid_value(Unexpected::Signed(number), &self);
        T::deserialize(I64Deserializer::new(number)).map(OneOrByListener::One).map_err(wrong)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<OneOrByListener<T>, E> {
        match T::IS_WORD {
            true => T::deserialize(StrDeserializer::new(text)).map(OneOrByListener::One),
            false => Err(E::invalid_type(Unexpected::Str(text), &self)),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<OneOrByListener<T>, A::Error> {
        BTreeMap::deserialize(MapAccessDeserializer::new(map)).map(OneOrByListener::ByListener)
    }
}

/// The key of the access states in the config file.
const STATES: &str = "access_states";
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
        let prepare = |written: BTreeMap<String, AluaStateName>| {
            AccessStates::prepare(&OneOrByListener::ByListener(written))
        };
        let states = prepare(written.into()).unwrap();
        let of = |address: &str| states.of(&address.parse().unwrap());
        assert_eq!(of("192.0.2.2:3260"), AccessState::STANDBY);
        assert_eq!(of("192.0.2.2:3261"), AccessState::ACTIVE_OPTIMIZED);
        assert_eq!(of("[::1]:7"), AccessState::UNAVAILABLE);
        let wrong =
            |address: &str| prepare([(address.to_owned(), AluaStateName::Standby)].into()).unwrap_err();
        assert!(wrong("unix:/s").starts_with("access_states: `unix:/s` is a Unix socket; write host:port"));
        assert!(wrong("3260").starts_with("access_states: `3260` is not a host"));
    }

    fn tags(written: &str, states: &[(&str, AluaStateName)]) -> Result<GroupTags, String> {
        #[derive(Deserialize)]
        struct Written {
            tag: OneOrByListener<u16>,
        }
        let states: BTreeMap<_, _> = states.iter().map(|(own, state)| ((*own).to_owned(), *state)).collect();
        let is_given = !states.is_empty();
        let states = AccessStates::prepare(&OneOrByListener::ByListener(states)).unwrap();
        let written: Result<Written, _> = toml::from_str(&format!("tag = {written}"));
        let written = written.map_err(|error| error.message().to_owned())?;
        GroupTags::prepare(&written.tag, Some(&states).filter(|_| is_given))
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

    fn written(entry: &str, state: AluaStateName, at: Option<&str>) -> Result<String, String> {
        let listener = |written: &str, address: &str| NamedListener {
            written: written.parse().unwrap(),
            address: address.parse().unwrap(),
        };
        let listeners =
            [listener("127.0.0.1:0", "127.0.0.1:4001"), listener("127.0.0.2:0", "127.0.0.2:4002")];
        let mut target: Table = toml::from_str(entry).unwrap();
        write_state(&mut target, state, at.map(|at| at.parse().unwrap()), &listeners)?;
        Ok(target.get(STATES).unwrap().to_string())
    }

    #[test]
    fn a_state_is_written_without_a_change_of_portal_groups() {
        use AluaStateName::{Optimized, Standby};
        assert_eq!(written("", Standby, None).unwrap(), "\"standby\"");
        let shared = written("", Standby, Some("127.0.0.1:4001")).unwrap_err();
        assert!(shared.starts_with("127.0.0.1:4001 shares its portal group"), "{shared}");
        let alone = "portals = ['127.0.0.1']\n".replace("127.0.0.1", "127.0.0.1:0");
        assert_eq!(written(&alone, Standby, Some("127.0.0.1:4001")).unwrap(), "\"standby\"");
        let absent = written("", Standby, Some("127.0.0.1:1")).unwrap_err();
        assert_eq!(absent, "127.0.0.1:1 is not a listener; use one of 127.0.0.1:4001, 127.0.0.2:4002");
        // Listeners are written as the config has them.
        let states = "access_states = { '127.0.0.2:0' = 'standby' }\n";
        let one = written(states, Optimized, Some("127.0.0.2:4002")).unwrap();
        assert_eq!(one, "{ \"127.0.0.2:0\" = \"active/optimized\" }");
        let both = written(states, Optimized, None).unwrap();
        assert_eq!(
            both,
            "{ \"127.0.0.1:0\" = \"active/optimized\", \"127.0.0.2:0\" = \"active/optimized\" }"
        );
        let tags =
            "TargetPortalGroupTag = { '127.0.0.1:0' = 1, '127.0.0.2:0' = 2 }\naccess_states = 'standby'\n";
        let of_tags = written(tags, Optimized, Some("127.0.0.1:4001")).unwrap();
        assert_eq!(of_tags, "{ \"127.0.0.1:0\" = \"active/optimized\", \"127.0.0.2:0\" = \"standby\" }");
    }
}
