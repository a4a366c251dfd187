//! The table of a group: one object, which a proposal replaces as a whole if it still has the
//! generation that the proposal was made from.
//!
//! Its members only call the changes that are methods here, so every table keeps to these rules:
//! - an owner is the incarnation of a member that is up;
//! - a volume gets an epoch that no volume has had, whenever it gets an owner or starts again;
//! - the client of an incarnation that has ended, and had volumes, is in [`Table::to_fence`].

mod codec;
mod command;

pub use codec::{HEAD_LEN, MAX_LEN, TableError};
pub use command::{Command, ConfiguredVolume};

use std::fmt;

/// Number of a table: each replaces the one before. 0 stands for no table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Generation(pub u64);

/// Number of the time for which a member belongs to the group with one client of the cluster. It is
/// unique in the group, and grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Incarnation(pub u64);

/// Number of the time for which a volume has one owner. It is unique in the group, and grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Epoch(pub u64);

/// How the cluster knows a connection, which is what it fences: an address with a number, which is
/// different for each connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Client(pub String);

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The members, the volumes and who serves them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    generation: Generation,
    config_version: u64,
    last_incarnation: Incarnation,
    last_epoch: Epoch,
    /// By name.
    members: Vec<MemberRecord>,
    /// By name.
    volumes: Vec<VolumeRecord>,
    to_fence: Vec<Client>,
}

/// A member of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberRecord {
    /// Its name.
    pub name: String,
    /// Where initiators and other members reach it.
    pub address: String,
    /// The latest incarnation.
    pub incarnation: Incarnation,
    /// The client of that incarnation.
    pub client: Client,
    /// Whether the incarnation has not ended.
    pub is_up: bool,
    /// Whether an operator moves its volumes away.
    pub is_draining: bool,
    /// Whether it is about to end, until it joins again: its volumes move away, to nobody if need
    /// be.
    pub is_leaving: bool,
    /// How often it has failed lately. Each doubles the time until it is given volumes again.
    pub strikes: u8,
}

/// A volume of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeRecord {
    /// Its name.
    pub name: String,
    /// What it is, in words that only the members' owner knows.
    pub image: String,
    /// Of its latest owner.
    pub epoch: Epoch,
    /// Who serves it.
    pub place: Place,
    /// What an operator has decided.
    pub decision: Decision,
}

/// Who serves a volume. An owner may have its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nobody.
    Free,
    /// The owner is to activate it.
    Starting(Incarnation),
    /// The owner has activated it.
    Active(Incarnation),
    /// The owner is to release it.
    Leaving {
        /// The owner.
        from: Incarnation,
        /// The next owner.
        to: Option<Incarnation>,
    },
}

impl Place {
    /// The member that may have the volume's lock.
    #[must_use]
    pub fn owner(self) -> Option<Incarnation> {
        match self {
            Place::Free => None,
            Place::Starting(owner) | Place::Active(owner) | Place::Leaving { from: owner, .. } => Some(owner),
        }
    }

    /// The member that serves it when what was decided is done.
    #[must_use]
    pub fn next_owner(self) -> Option<Incarnation> {
        match self {
            Place::Leaving { to, .. } => to,
            place => place.owner(),
        }
    }
}

/// What an operator has decided about a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Any member serves it, so that all have as many.
    Spread,
    /// The member with this name serves it while it can.
    Pinned(String),
    /// Nobody serves it, and it disappears when it is free.
    Retired,
}

/// Why a change of the table is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is no such member.
    #[error("the group has no member '{0}'")]
    UnknownMember(String),
    /// There is no such volume.
    #[error("the group has no volume '{0}'")]
    UnknownVolume(String),
    /// The member cannot serve volumes.
    #[error("member '{0}' is not up")]
    Down(String),
    /// The group has a later config, or another one of this version.
    #[error(
        "the group has version {has} of its config, and this is version {given}; give it a higher version"
    )]
    OldConfig {
        /// Version of the group.
        has: u64,
        /// Version of the change.
        given: u64,
    },
    /// The volume is another one.
    #[error("volume '{0}' is another image in the group; give it another name")]
    OtherImage(String),
    /// A name or an address is empty or too long.
    #[error("'{0}' is not 1 to {MAX_TEXT} bytes long")]
    Length(String),
    /// The group has too many of something.
    #[error("the group has {limit} {what} at most")]
    Full {
        /// Of what.
        what: &'static str,
        /// How many.
        limit: usize,
    },
    /// Nobody knows whether the change was made.
    #[error(
        "the change was not confirmed in time; look at the group's state, and repeat it if it was not made"
    )]
    Unconfirmed,
    /// The member that was asked does not belong to the group now.
    #[error("this gateway is not a member of its group now; ask another one, or wait")]
    NotMember,
}

impl Table {
    /// Number of this table.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Version of the config that the volumes are from.
    #[must_use]
    pub fn config_version(&self) -> u64 {
        self.config_version
    }

    /// All members that have ever joined, by name.
    #[must_use]
    pub fn members(&self) -> &[MemberRecord] {
        &self.members
    }

    /// The volumes, by name.
    #[must_use]
    pub fn volumes(&self) -> &[VolumeRecord] {
        &self.volumes
    }

    /// Clients that may still write, and that the cluster must refuse before a volume starts.
    #[must_use]
    pub fn to_fence(&self) -> &[Client] {
        &self.to_fence
    }

    /// The member of this name.
    #[must_use]
    pub fn member(&self, name: &str) -> Option<&MemberRecord> {
        find(&self.members, name, |member| &member.name)
    }

    /// The member of this incarnation, if that has not ended.
    #[must_use]
    pub fn up(&self, incarnation: Incarnation) -> Option<&MemberRecord> {
        self.members.iter().find(|member| member.is_up && member.incarnation == incarnation)
    }

    /// The volume of this name.
    #[must_use]
    pub fn volume(&self, name: &str) -> Option<&VolumeRecord> {
        find(&self.volumes, name, |volume| &volume.name)
    }

    /// The incarnations that have not ended, oldest first.
    #[must_use]
    pub fn seniority(&self) -> Vec<Incarnation> {
        let mut up: Vec<Incarnation> =
            self.members.iter().filter(|member| member.is_up).map(|member| member.incarnation).collect();
        up.sort_unstable();
        up
    }

    /// The next generation.
    pub(crate) fn advance(&mut self) {
        self.generation = Generation(self.generation.0.saturating_add(1));
    }

    /// A member joins with a client. An earlier incarnation of it has ended.
    pub(crate) fn join(
        &mut self,
        name: &str,
        address: &str,
        client: &Client,
    ) -> Result<Incarnation, Refusal> {
        for text in [name, address, &client.0] {
            check_text(text)?;
        }
        if let Some(earlier) =
            self.member(name).filter(|member| member.is_up).map(|member| member.incarnation)
        {
            self.end(earlier)?;
        }
        let incarnation = Incarnation(self.last_incarnation.0.saturating_add(1));
        let (address, client) = (address.to_owned(), client.clone());
        match self.members.binary_search_by(|member| member.name.as_str().cmp(name)) {
            Ok(at) => {
                if let Some(member) = self.members.get_mut(at) {
                    let (is_up, is_leaving) = (true, false);
                    *member =
                        MemberRecord { address, incarnation, client, is_up, is_leaving, ..member.clone() };
                }
            }
            Err(_) if self.members.len() >= MAX_MEMBERS => {
                return Err(Refusal::Full { what: "members", limit: MAX_MEMBERS });
            }
            Err(at) => {
                let (name, is_up) = (name.to_owned(), true);
                let member = MemberRecord {
                    name,
                    address,
                    incarnation,
                    client,
                    is_up,
                    is_draining: false,
                    is_leaving: false,
                    strikes: 0,
                };
                self.members.insert(at, member);
            }
        }
        self.last_incarnation = incarnation;
        Ok(incarnation)
    }

    /// An incarnation ends. If it has volumes, they are free, its client is to be fenced, and the
    /// member has a strike. A member without volumes holds no lock.
    pub(crate) fn end(&mut self, incarnation: Incarnation) -> Result<(), Refusal> {
        let owns = self.volumes.iter().any(|volume| volume.place.owner() == Some(incarnation));
        if owns && self.to_fence.len() >= MAX_TO_FENCE {
            return Err(Refusal::Full { what: "clients to fence", limit: MAX_TO_FENCE });
        }
        let Some(member) = self.members.iter_mut().find(|member| member.incarnation == incarnation) else {
            return Ok(());
        };
        member.is_up = false;
        if owns {
            member.strikes = member.strikes.saturating_add(1).min(MAX_STRIKES);
            self.to_fence.push(member.client.clone());
        }
        for volume in &mut self.volumes {
            match &mut volume.place {
                place if place.owner() == Some(incarnation) => *place = Place::Free,
                Place::Leaving { to, .. } if *to == Some(incarnation) => *to = None,
                _ => {}
            }
        }
        Ok(())
    }

    /// A member has been reliable for a while.
    pub(crate) fn forgive(&mut self, name: &str) {
        if let Some(member) = self.members.iter_mut().find(|member| member.name == name) {
            member.strikes = member.strikes.saturating_sub(1);
        }
    }

    /// The cluster refuses whatever these clients send.
    pub(crate) fn fenced(&mut self, is_fenced: impl Fn(&Client) -> bool) {
        self.to_fence.retain(|client| !is_fenced(client));
    }

    /// A free volume gets an owner.
    pub(crate) fn assign(&mut self, name: &str, owner: Incarnation) {
        let next = self.next_epoch();
        let is_up = self.up(owner).is_some();
        if let Some(volume) = self.volume_mut(name).filter(|volume| volume.place == Place::Free && is_up) {
            (volume.place, volume.epoch) = (Place::Starting(owner), next);
            self.last_epoch = next;
        }
    }

    /// The owner has activated the volume in this epoch.
    pub(crate) fn activated(&mut self, name: &str, epoch: Epoch) {
        if let Some(volume) = self.volume_mut(name).filter(|volume| volume.epoch == epoch)
            && let Place::Starting(owner) = volume.place
        {
            volume.place = Place::Active(owner);
        }
    }

    /// The owner no longer has the volume, and is to activate it again.
    pub(crate) fn restart(&mut self, name: &str) {
        if let Some(owner) = self.volume(name).and_then(|volume| volume.place.owner()) {
            self.free(name);
            self.assign(name, owner);
        }
    }

    /// The owner is to release the volume, for another member or for nobody.
    pub(crate) fn leave(&mut self, name: &str, to: Option<Incarnation>) {
        if let Some(volume) = self.volume_mut(name)
            && let Some(from) = volume.place.owner()
        {
            volume.place = Place::Leaving { from, to };
        }
    }

    /// The owner has released the volume: the next one is to activate it.
    pub(crate) fn released(&mut self, name: &str) {
        let next = self.volume(name).and_then(|volume| volume.place.next_owner());
        self.free(name);
        if let Some(next) = next {
            self.assign(name, next);
        }
    }

    /// Removes retired volumes that nobody has.
    pub(crate) fn forget_retired(&mut self) {
        self.volumes.retain(|volume| volume.decision != Decision::Retired || volume.place != Place::Free);
    }

    fn free(&mut self, name: &str) {
        if let Some(volume) = self.volume_mut(name) {
            volume.place = Place::Free;
        }
    }

    fn volume_mut(&mut self, name: &str) -> Option<&mut VolumeRecord> {
        let at = self.volumes.binary_search_by(|volume| volume.name.as_str().cmp(name)).ok()?;
        self.volumes.get_mut(at)
    }

    fn next_epoch(&self) -> Epoch {
        Epoch(self.last_epoch.0.saturating_add(1))
    }
}

/// The item of this name in a list that is in the order of names.
fn find<'a, T>(items: &'a [T], name: &str, name_of: impl Fn(&T) -> &str) -> Option<&'a T> {
    let at = items.binary_search_by(|item| name_of(item).cmp(name)).ok()?;
    items.get(at)
}

fn check_text(text: &str) -> Result<(), Refusal> {
    if text.is_empty() || text.len() > MAX_TEXT {
        return Err(Refusal::Length(text.to_owned()));
    }
    Ok(())
}

/// Maximum length of a name, an address, a client or an image, in bytes.
pub const MAX_TEXT: usize = 255;
/// Maximum number of members, those that are down included.
pub const MAX_MEMBERS: usize = 64;
/// Maximum number of volumes.
pub const MAX_VOLUMES: usize = 4096;
/// Maximum number of clients that are not fenced yet.
pub const MAX_TO_FENCE: usize = 64;
/// More failures than this do not count.
pub const MAX_STRIKES: u8 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::default();
        let volumes = ["v0", "v1", "v2"].map(|name| ConfiguredVolume::new(name, "image"));
        table.apply(&Command::Configure { version: 1, volumes: volumes.to_vec() }).unwrap();
        table
    }

    fn joined(table: &mut Table, name: &str, client: &str) -> Incarnation {
        table.join(name, "address", &Client(client.to_owned())).unwrap()
    }

    #[test]
    fn an_incarnation_that_ends_frees_its_volumes_and_its_client_is_to_be_fenced() {
        let mut table = table();
        let (a, b) = (joined(&mut table, "a", "a1"), joined(&mut table, "b", "b1"));
        table.assign("v0", a);
        table.assign("v1", b);
        table.activated("v1", Epoch(2));
        table.leave("v1", Some(a));
        table.end(a).unwrap();
        assert_eq!(table.volume("v0").unwrap().place, Place::Free);
        assert_eq!(table.volume("v1").unwrap().place, Place::Leaving { from: b, to: None });
        assert_eq!(table.to_fence(), [Client("a1".to_owned())]);
        assert_eq!((table.up(a), table.member("a").unwrap().strikes), (None, 1));
        // Nobody is given to an incarnation that has ended.
        table.assign("v0", a);
        assert_eq!(table.volume("v0").unwrap().place, Place::Free);
        table.fenced(|client| client.0 == "a1");
        assert_eq!(table.to_fence(), []);
    }

    #[test]
    fn a_member_without_volumes_ends_without_a_fence_or_a_strike() {
        let mut table = table();
        let a = joined(&mut table, "a", "a1");
        table.end(a).unwrap();
        assert_eq!((table.to_fence(), table.member("a").unwrap().strikes), (&[][..], 0));
    }

    #[test]
    fn a_member_that_joins_again_has_ended_before() {
        let mut table = table();
        let first = joined(&mut table, "a", "a1");
        table.assign("v0", first);
        let second = joined(&mut table, "a", "a2");
        assert!(second > first && table.up(first).is_none());
        assert_eq!((table.to_fence().len(), table.volume("v0").unwrap().place), (1, Place::Free));
    }

    #[test]
    fn every_owner_has_an_epoch_that_no_volume_has_had() {
        let mut table = table();
        let (a, b) = (joined(&mut table, "a", "a1"), joined(&mut table, "b", "b1"));
        let mut last = Epoch(0);
        let mut expect_next = |table: &Table, name: &str, owner| {
            let volume = table.volume(name).unwrap();
            assert_eq!((volume.place, volume.epoch), (Place::Starting(owner), Epoch(last.0 + 1)));
            last = volume.epoch;
        };
        table.assign("v0", a);
        expect_next(&table, "v0", a);
        table.activated("v0", Epoch(1));
        table.restart("v0");
        expect_next(&table, "v0", a);
        // What was activated in an earlier epoch is not active.
        table.activated("v0", Epoch(1));
        assert_eq!(table.volume("v0").unwrap().place, Place::Starting(a));
        table.leave("v0", Some(b));
        table.released("v0");
        expect_next(&table, "v0", b);
        table.assign("v1", a);
        expect_next(&table, "v1", a);
    }

    #[test]
    fn no_more_clients_wait_for_their_fence_than_the_limit() {
        let mut table = table();
        for number in 0..MAX_TO_FENCE {
            let owner = joined(&mut table, "a", &number.to_string());
            table.assign("v0", owner);
        }
        let last = joined(&mut table, "a", "last");
        table.assign("v0", last);
        let before = table.clone();
        assert!(table.end(last).is_err());
        assert!(table.join("a", "address", &Client("next".to_owned())).is_err());
        assert_eq!(table, before);
    }
}
