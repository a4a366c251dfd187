//! The target ports that are served over SRP, and the initiators that may access their logical
//! units.
//!
//! All cores share an [`SrpNode`]. It also has the channels of every I_T nexus. A login that asks
//! for single-channel operation ends the initiator's other channels and waits until they are
//! closed, because a late write of theirs could overwrite data that the new channel has written.

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

/// The open channels of every nexus.
#[derive(Default)]
pub(super) struct Channels(Mutex<Vec<OpenChannel>>);

struct OpenChannel {
    name: NexusName,
    id: u64,
    hang_up: HangUp,
    nexus: Arc<OpenNexus>,
}

/// Membership of a channel in its nexus. Dropping it removes the channel.
pub(super) struct ChannelMembership {
    channels: Arc<Channels>,
    id: u64,
    /// The nexus, which all its channels share.
    pub(super) nexus: Arc<OpenNexus>,
}

/// Result of [`Channels::join`].
pub(super) enum ChannelJoin {
    /// The channel was added; whether the nexus has others.
    Joined(ChannelMembership, bool),
    /// Other channels of the nexus have to end first, and were disconnected.
    Wait,
    /// The nexus has [`MAX_CHANNELS`] channels.
    Full,
}

impl Channels {
    /// Adds a channel that sees `units` to a nexus; the first one begins it with `open_nexus`. A
    /// channel that has to be the only one, or that sees other units than the others because the
    /// access list has changed, disconnects the others and is added once they have ended. The check
    /// and the addition are one step, because logins arrive on several cores.
    pub(super) fn join(
        self: &Arc<Channels>,
        name: NexusName,
        units: &Arc<ScsiTarget>,
        is_only: bool,
        hang_up: HangUp,
        open_nexus: impl FnOnce() -> Arc<OpenNexus>,
    ) -> ChannelJoin {
        let mut open = self.open();
        let others = || open.iter().filter(|channel| channel.name == name);
        let count = others().count();
        let sees_others = others().any(|channel| !Arc::ptr_eq(channel.nexus.target(), units));
        if sees_others || (is_only && count > 0) {
            others().for_each(|channel| (channel.hang_up)());
            return ChannelJoin::Wait;
        }
        if count >= MAX_CHANNELS {
            return ChannelJoin::Full;
        }
        let nexus = others().next().map_or_else(open_nexus, |channel| channel.nexus.clone());
        let id = open.iter().map(|channel| channel.id).max().unwrap_or(0).saturating_add(1);
        open.push(OpenChannel { name, id, hang_up, nexus: nexus.clone() });
        ChannelJoin::Joined(ChannelMembership { channels: self.clone(), id, nexus }, count > 0)
    }

    fn open(&self) -> MutexGuard<'_, Vec<OpenChannel>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ChannelMembership {
    fn drop(&mut self) {
        self.channels.open().retain(|channel| channel.id != self.id);
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

    fn join(
        channels: &Arc<Channels>,
        units: &Arc<ScsiTarget>,
        name: NexusName,
        is_only: bool,
    ) -> ChannelJoin {
        let port = TargetPort { relative_id: 1, group: 1, name: "t".into() };
        let open_nexus = || OpenNexus::new(units, ItNexus::srp(&name.0.0, port));
        channels.join(name, units, is_only, Arc::new(|| {}), open_nexus)
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
    fn a_channel_is_counted_until_it_is_dropped() {
        let (channels, units) = (Arc::new(Channels::default()), units());
        let (nexus, other) =
            ((SrpPortId([1; 16]), SrpPortId([2; 16])), (SrpPortId([3; 16]), SrpPortId([2; 16])));
        let join = |name, is_only| join(&channels, &units, name, is_only);
        let ChannelJoin::Joined(first, false) = join(nexus, true) else { panic!("it is the first") };
        let ChannelJoin::Joined(second, true) = join(nexus, false) else { panic!("it is the second") };
        assert!(Arc::ptr_eq(&first.nexus, &second.nexus), "they are one nexus");
        assert!(matches!(join(other, true), ChannelJoin::Joined(_, false)));
        drop(first);
        assert!(matches!(join(nexus, true), ChannelJoin::Wait));
        drop(second);
        assert!(matches!(join(nexus, true), ChannelJoin::Joined(_, false)));
    }

    #[test]
    fn a_nexus_has_a_maximum_of_channels() {
        let (channels, units) = (Arc::new(Channels::default()), units());
        let nexus = (SrpPortId([1; 16]), SrpPortId([2; 16]));
        let join = || join(&channels, &units, nexus, false);
        let open: Vec<_> = (0..MAX_CHANNELS).map(|_| join()).collect();
        assert!(open.iter().all(|join| matches!(join, ChannelJoin::Joined(..))));
        assert!(matches!(join(), ChannelJoin::Full));
        drop(open);
        assert!(matches!(join(), ChannelJoin::Joined(..)));
    }

    #[test]
    fn of_concurrent_single_channel_logins_one_joins() {
        let (channels, units) = (Arc::new(Channels::default()), units());
        let nexus = (SrpPortId([1; 16]), SrpPortId([2; 16]));
        for _ in 0..100 {
            let joins: Vec<ChannelJoin> = std::thread::scope(|scope| {
                let login = || scope.spawn(|| join(&channels, &units, nexus, true));
                let threads = [login(), login()];
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let count = joins.iter().filter(|join| matches!(join, ChannelJoin::Joined(..))).count();
            assert_eq!(count, 1);
        }
    }
}
