//! The target ports that are served over SRP, and the initiators that may access their logical
//! units.
//!
//! All cores share an [`SrpNode`]. It also has the channels of every I_T nexus. A login that asks
//! for single-channel operation replaces the initiator's other channels: it disconnects them, and
//! its commands wait until they are closed, because a late write of theirs could overwrite data
//! that the new channel has written.

use crate::driver::session::HangUp;
use crate::names::networks::AllowedNetworks;
use crate::scsi::{ListedTarget, OpenNexus, ScsiTarget, TargetList, TargetPort};
use data_encoding::HEXLOWER;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The identifier of an initiator port or a target port: an 8-byte extension and an 8-byte GUID.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SrpPortId(pub [u8; 16]);

impl SrpPortId {
    /// Parses 32 hexadecimal digits, with or without the prefix `0x`.
    #[must_use]
    pub fn parse(text: &str) -> Option<SrpPortId> {
        let digits = text.strip_prefix("0x").unwrap_or(text).to_ascii_lowercase();
        let bytes = HEXLOWER.decode(digits.as_bytes()).ok()?;
        Some(SrpPortId(bytes.try_into().ok()?))
    }

    /// The port as a SCSI name string (SPC-5): an EUI-64-based name of 16 bytes.
    #[must_use]
    pub fn name_string(&self) -> String {
        format!("eui.{}", HEXLOWER.encode(&self.0))
    }
}

impl fmt::Display for SrpPortId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{}", HEXLOWER.encode(&self.0))
    }
}

impl fmt::Debug for SrpPortId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A target port.
pub struct SrpTarget {
    /// Unique in its node.
    pub id: SrpPortId,
    /// The port's name in reservations and VPD pages.
    pub port: TargetPort,
    /// Access list: the initiators that may log in. Entries that name one initiator port come
    /// first.
    pub access: Vec<SrpAccess>,
    /// Networks from which initiators may log in.
    pub networks: AllowedNetworks,
}

/// The initiator ports of an entry of an access list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SrpInitiators {
    /// One port.
    Port(SrpPortId),
    /// All ports with this GUID in the second half of their identifiers. It is the GUID of a
    /// channel adapter.
    Guid([u8; 8]),
}

impl SrpInitiators {
    /// Parses the 32 hexadecimal digits of a port or the 16 of a GUID, with or without the prefix
    /// `0x`.
    #[must_use]
    pub fn parse(text: &str) -> Option<SrpInitiators> {
        if let Some(port) = SrpPortId::parse(text) {
            return Some(SrpInitiators::Port(port));
        }
        let digits = text.strip_prefix("0x").unwrap_or(text).to_ascii_lowercase();
        let guid = HEXLOWER.decode(digits.as_bytes()).ok()?;
        Some(SrpInitiators::Guid(guid.try_into().ok()?))
    }

    fn have(&self, port: SrpPortId) -> bool {
        match self {
            SrpInitiators::Port(own) => *own == port,
            SrpInitiators::Guid(guid) => port.0.ends_with(guid),
        }
    }
}

/// Entry of a target port's access list: initiators that may log in, and their logical units.
pub struct SrpAccess {
    /// The initiators; `None` stands for every initiator port.
    pub initiator: Option<SrpInitiators>,
    /// The logical units that these initiators see.
    pub target: Arc<ScsiTarget>,
}

/// All target ports that are reached through the same listeners.
pub struct SrpNode {
    /// The target ports.
    pub targets: Arc<TargetList<SrpTarget>>,
    pub(super) channels: Arc<Channels>,
}

impl SrpNode {
    /// Creates a node with these target ports.
    #[must_use]
    pub fn new(targets: Vec<SrpTarget>) -> SrpNode {
        SrpNode { targets: TargetList::new(targets), channels: Arc::default() }
    }
}

impl ListedTarget for SrpTarget {
    type Name = SrpPortId;

    fn name(&self) -> &SrpPortId {
        &self.id
    }

    fn networks(&self) -> &AllowedNetworks {
        &self.networks
    }

    fn views(&self) -> impl Iterator<Item = (&Arc<ScsiTarget>, bool)> {
        self.access.iter().map(|access| (&access.target, access.initiator.is_none()))
    }
}

impl SrpTarget {
    /// The logical units that an initiator port sees; `None` if it may not log in.
    #[must_use]
    pub fn units_for(&self, initiator: SrpPortId) -> Option<&Arc<ScsiTarget>> {
        let mut fitting = self.access.iter();
        let fits = |access: &&SrpAccess| access.initiator.is_none_or(|ports| ports.have(initiator));
        fitting.find(fits).map(|access| &access.target)
    }
}

/// An I_T nexus: initiator port and target port.
pub(super) type NexusName = (SrpPortId, SrpPortId);

/// The channels of every nexus.
#[derive(Default)]
pub(super) struct Channels(Mutex<Vec<ListedChannel>>);

struct ListedChannel {
    name: NexusName,
    id: u64,
    /// The logical units that the channel sees.
    units: Arc<ScsiTarget>,
    hang_up: HangUp,
    state: ChannelState,
}

enum ChannelState {
    /// Channels that others have replaced have to end first.
    Waiting,
    /// Its commands are executed.
    Open(Arc<OpenNexus>),
    /// A later login has disconnected it, and its I/O may be in flight.
    Replaced,
}

/// A place in the list of channels. Dropping it removes the channel.
pub(super) struct ChannelPlace {
    channels: Arc<Channels>,
    name: NexusName,
    id: u64,
    units: Arc<ScsiTarget>,
}

/// What a login would do to the other channels of its nexus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoginEffect {
    /// There are none.
    Alone,
    Joins,
    Replaces,
    /// The nexus has [`MAX_CHANNELS`] channels, or as many that were replaced.
    Refused,
}

impl Channels {
    /// What the login of a channel that sees `units` would do. A channel that has to be the only
    /// one, or that sees other units than the others because the access list has changed, replaces
    /// them.
    pub(super) fn effect(&self, name: NexusName, units: &Arc<ScsiTarget>, is_only: bool) -> LoginEffect {
        Channels::effect_on(&self.list(), name, units, is_only)
    }

    fn effect_on(
        list: &[ListedChannel],
        name: NexusName,
        units: &Arc<ScsiTarget>,
        is_only: bool,
    ) -> LoginEffect {
        let of_nexus = || list.iter().filter(|channel| channel.name == name);
        let others = || of_nexus().filter(|channel| !channel.is_replaced());
        let (count, replaced) =
            (others().count(), of_nexus().filter(|channel| channel.is_replaced()).count());
        let sees_others = others().any(|channel| !Arc::ptr_eq(&channel.units, units));
        let replaces = count > 0 && (is_only || sees_others);
        match count {
            _ if replaced >= MAX_CHANNELS => LoginEffect::Refused,
            _ if replaces => LoginEffect::Replaces,
            0 => LoginEffect::Alone,
            MAX_CHANNELS.. => LoginEffect::Refused,
            _ => LoginEffect::Joins,
        }
    }

    /// Adds a channel, and disconnects those that it replaces; `None` if it is refused. The check
    /// and the addition are one step, because logins arrive on several cores.
    pub(super) fn enter(
        self: &Arc<Channels>,
        name: NexusName,
        units: &Arc<ScsiTarget>,
        is_only: bool,
        hang_up: HangUp,
    ) -> Option<ChannelPlace> {
        let mut list = self.list();
        match Channels::effect_on(&list, name, units, is_only) {
            LoginEffect::Refused => return None,
            LoginEffect::Replaces => {
                for other in list.iter_mut().filter(|channel| channel.name == name && !channel.is_replaced())
                {
                    other.state = ChannelState::Replaced;
                    (other.hang_up)();
                }
            }
            LoginEffect::Alone | LoginEffect::Joins => {}
        }
        let id = list.iter().map(|channel| channel.id).max().unwrap_or(0).saturating_add(1);
        list.push(ListedChannel { name, id, units: units.clone(), hang_up, state: ChannelState::Waiting });
        Some(ChannelPlace { channels: self.clone(), name, id, units: units.clone() })
    }

    fn list(&self) -> MutexGuard<'_, Vec<ListedChannel>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ListedChannel {
    fn is_replaced(&self) -> bool {
        matches!(self.state, ChannelState::Replaced)
    }
}

impl ChannelPlace {
    /// Whether the channel sees these logical units.
    pub(super) fn sees(&self, units: &Arc<ScsiTarget>) -> bool {
        Arc::ptr_eq(&self.units, units)
    }

    /// Opens the channel once no replaced channel of its nexus is left; returns the nexus, which
    /// all its open channels share and the first one begins with `open_nexus`.
    pub(super) fn open(&self, open_nexus: impl FnOnce() -> Arc<OpenNexus>) -> Option<Arc<OpenNexus>> {
        let mut list = self.channels.list();
        // This one may be among them.
        let of_nexus = || list.iter().filter(|channel| channel.name == self.name);
        if of_nexus().any(ListedChannel::is_replaced) {
            return None;
        }
        let shared = of_nexus().find_map(|channel| match &channel.state {
            ChannelState::Open(nexus) => Some(nexus.clone()),
            ChannelState::Waiting | ChannelState::Replaced => None,
        });
        let nexus = shared.unwrap_or_else(open_nexus);
        let own = list.iter_mut().find(|channel| channel.id == self.id)?;
        own.state = ChannelState::Open(nexus.clone());
        Some(nexus)
    }
}

impl Drop for ChannelPlace {
    fn drop(&mut self) {
        self.channels.list().retain(|channel| channel.id != self.id);
    }
}

/// Most channels from one initiator port to one target port; Linux opens one for each CPU.
pub(super) const MAX_CHANNELS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scsi::ItNexus;

    fn units() -> Arc<ScsiTarget> {
        Arc::new(ScsiTarget::new("t", Vec::new()))
    }

    const NEXUS: NexusName = (SrpPortId([1; 16]), SrpPortId([2; 16]));

    fn enter(channels: &Arc<Channels>, units: &Arc<ScsiTarget>, is_only: bool) -> Option<ChannelPlace> {
        channels.enter(NEXUS, units, is_only, Arc::new(|| {}))
    }

    fn open(place: &ChannelPlace, units: &Arc<ScsiTarget>) -> Option<Arc<OpenNexus>> {
        let port = TargetPort { relative_id: 1, group: 1, name: "t".into() };
        place.open(|| OpenNexus::new(units, ItNexus::srp(&NEXUS.0.0, port)))
    }

    #[test]
    fn a_port_identifier_is_read_as_it_is_written() {
        let id = SrpPortId([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]);
        assert_eq!(id.to_string(), "0x000102030405060708090a0b0c0d0eff");
        assert_eq!(id.name_string(), "eui.000102030405060708090a0b0c0d0eff");
        for text in ["0x000102030405060708090a0b0c0d0eff", "000102030405060708090A0B0C0D0EFF"] {
            assert_eq!(SrpPortId::parse(text), Some(id));
        }
        for wrong in ["", "0x", "0x0001", "0x000102030405060708090a0b0c0d0effff", "g"] {
            assert_eq!(SrpPortId::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn an_access_list_entry_matches_one_port_or_all_of_a_guid() {
        let port = SrpPortId([0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2]);
        let other = SrpPortId([0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 2]);
        let one = SrpInitiators::parse("0x00000000000000010000000000000002").unwrap();
        assert!(one.have(port) && !one.have(other));
        let all = SrpInitiators::parse("0000000000000002").unwrap();
        assert!(all.have(port) && all.have(other) && !all.have(SrpPortId([2; 16])));
        assert_eq!(SrpInitiators::parse("0x02"), None);
    }

    #[test]
    fn a_channel_is_opened_once_those_that_it_replaces_are_dropped() {
        let (channels, units) = (Arc::new(Channels::default()), units());
        let [first, second] = [true, false].map(|is_only| enter(&channels, &units, is_only).unwrap());
        let nexus = open(&first, &units).unwrap();
        assert!(Arc::ptr_eq(&nexus, &open(&second, &units).unwrap()), "they are one nexus");
        let other = (SrpPortId([3; 16]), SrpPortId([2; 16]));
        assert_eq!(channels.effect(other, &units, true), LoginEffect::Alone);
        assert_eq!(channels.effect(NEXUS, &units, true), LoginEffect::Replaces);
        let alone = enter(&channels, &units, true).unwrap();
        assert_eq!(channels.effect(NEXUS, &units, false), LoginEffect::Joins);
        let further = enter(&channels, &units, false).unwrap();
        for ended in [first, second] {
            assert!(open(&alone, &units).is_none() && open(&further, &units).is_none());
            drop(ended);
        }
        let fresh = open(&further, &units).unwrap();
        assert!(!Arc::ptr_eq(&nexus, &fresh) && Arc::ptr_eq(&fresh, &open(&alone, &units).unwrap()));
    }

    #[test]
    fn a_nexus_has_a_maximum_of_channels() {
        let (channels, units) = (Arc::new(Channels::default()), units());
        let mut places: Vec<_> = (0..MAX_CHANNELS).filter_map(|_| enter(&channels, &units, false)).collect();
        assert_eq!(places.len(), MAX_CHANNELS);
        assert_eq!(channels.effect(NEXUS, &units, false), LoginEffect::Refused);
        // Replaced channels have a limit of their own, so that logins in turn do not accumulate.
        places.extend(enter(&channels, &units, true));
        assert_eq!(places.len(), MAX_CHANNELS + 1);
        assert!(enter(&channels, &units, true).is_none());
        places.remove(0);
        assert!(enter(&channels, &units, true).is_some());
    }

    #[test]
    fn of_concurrent_single_channel_logins_the_last_is_opened() {
        let (channels, units) = (Arc::new(Channels::default()), units());
        for _ in 0..100 {
            let places: Vec<ChannelPlace> = std::thread::scope(|scope| {
                let login = || scope.spawn(|| enter(&channels, &units, true).unwrap());
                let threads = [login(), login()];
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert!(places.iter().all(|place| open(place, &units).is_none()));
            let last = places.into_iter().max_by_key(|place| place.id).unwrap();
            assert!(open(&last, &units).is_some());
        }
    }
}
