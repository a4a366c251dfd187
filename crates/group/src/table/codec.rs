//! The table as bytes.
//!
//! ```text
//!   magic 7 | version u8 | generation u64 | CRC-32C of all that follows u32
//!   config version u64 | last incarnation u64 | last epoch u64
//!   u16 x member:  name | address | incarnation u64 | client | flags u8 | strikes u8
//!   u16 x volume:  name | image | epoch u64 | place u8, owner u64, next owner u64 | decision u8, member
//!   u16 x client to fence
//! ```
//! Numbers are big-endian, a text is its length (u16) and UTF-8. A commit compares the first
//! [`HEAD_LEN`] bytes. A table has one encoding: other bytes are refused, also where they would say
//! what no sequence of changes leads to.

use super::{
    Client, Decision, Epoch, Generation, Incarnation, MAX_MEMBERS, MAX_STRIKES, MAX_TEXT, MAX_TO_FENCE,
    MAX_VOLUMES, MemberRecord, Place, Table, VolumeRecord,
};
use blockmux_volume::Crc32c;

/// Why bytes are not a table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// A later version of the program has written them.
    #[error("the group's table is of version {0}, and this program knows {VERSION}; use a newer one")]
    Later(u8),
    /// They are damaged, or something else.
    #[error("the object is not the table of a group, or is damaged")]
    Damaged,
}

impl Table {
    /// What a table of this generation begins with: a commit compares it, so that it replaces no
    /// other one.
    #[must_use]
    pub fn head(generation: Generation) -> [u8; HEAD_LEN] {
        let mut head = [0; HEAD_LEN];
        let bytes = MAGIC.iter().chain([&VERSION]).copied().chain(generation.0.to_be_bytes());
        head.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
        head
    }

    /// The table as bytes, at most [`MAX_LEN`].
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let body = self.body();
        let sum = Crc32c::of(&body).value();
        [&Table::head(self.generation)[..], &sum.to_be_bytes(), &body].concat()
    }

    fn body(&self) -> Vec<u8> {
        let mut body = Writer(Vec::new());
        body.number(self.config_version);
        body.number(self.last_incarnation.0);
        body.number(self.last_epoch.0);
        body.length(self.members.len());
        for member in &self.members {
            body.text(&member.name);
            body.text(&member.address);
            body.number(member.incarnation.0);
            body.text(&member.client.0);
            let up = if member.is_up { IS_UP } else { 0 };
            let draining = if member.is_draining { IS_DRAINING } else { 0 };
            body.0.push(up | draining | if member.is_leaving { IS_LEAVING } else { 0 });
            body.0.push(member.strikes);
        }
        body.length(self.volumes.len());
        for volume in &self.volumes {
            body.text(&volume.name);
            body.text(&volume.image);
            body.number(volume.epoch.0);
            let (kind, to) = match volume.place {
                Place::Free => (FREE, None),
                Place::Starting(_) => (STARTING, None),
                Place::Active(_) => (ACTIVE, None),
                Place::Leaving { to, .. } => (LEAVING, to),
            };
            body.0.push(kind);
            body.number(volume.place.owner().unwrap_or_default().0);
            body.number(to.unwrap_or_default().0);
            let (kind, member) = match &volume.decision {
                Decision::Spread => (SPREAD, ""),
                Decision::Pinned(member) => (PINNED, member.as_str()),
                Decision::Retired => (RETIRED, ""),
            };
            body.0.push(kind);
            body.text(member);
        }
        body.length(self.to_fence.len());
        self.to_fence.iter().for_each(|client| body.text(&client.0));
        body.0
    }

    /// Reads what [`Table::encode`] has written. Allocates in proportion to the bytes.
    ///
    /// # Errors
    /// If it is something else.
    pub fn decode(bytes: &[u8]) -> Result<Table, TableError> {
        let (magic, rest) = bytes.split_first_chunk().ok_or(TableError::Damaged)?;
        let (version, rest) = rest.split_first().ok_or(TableError::Damaged)?;
        if magic != MAGIC || bytes.len() > MAX_LEN {
            return Err(TableError::Damaged);
        }
        if *version != VERSION {
            return Err(TableError::Later(*version));
        }
        let table = read_table(rest).filter(Table::is_consistent);
        table.ok_or(TableError::Damaged)
    }

    /// Whether a sequence of changes can lead to it.
    fn is_consistent(&self) -> bool {
        let is_up = |owner: Incarnation| self.up(owner).is_some();
        let in_order = self.members.is_sorted_by(|one, next| one.name < next.name)
            && self.volumes.is_sorted_by(|one, next| one.name < next.name);
        let mut incarnations: Vec<Incarnation> =
            self.members.iter().map(|member| member.incarnation).collect();
        incarnations.sort_unstable();
        in_order
            && (1..=LAST_NUMBER).contains(&self.generation.0)
            && [self.last_incarnation.0, self.last_epoch.0].iter().all(|last| *last <= LAST_NUMBER)
            && incarnations.is_sorted_by(|one, next| one < next)
            && incarnations.iter().all(|one| (1..=self.last_incarnation.0).contains(&one.0))
            && self.members.iter().all(|member| member.strikes <= MAX_STRIKES)
            && self.volumes.iter().all(|volume| {
                volume.epoch <= self.last_epoch
                    && volume.place.owner().is_none_or(is_up)
                    && volume.place.next_owner().is_none_or(is_up)
            })
    }
}

fn read_table(rest: &[u8]) -> Option<Table> {
    let mut head = Reader(rest);
    let generation = Generation(head.number()?);
    let (sum, body) = head.0.split_first_chunk()?;
    if Crc32c::of(body).value() != u32::from_be_bytes(*sum) {
        return None;
    }
    let mut body = Reader(body);
    let table = Table {
        generation,
        config_version: body.number()?,
        last_incarnation: Incarnation(body.number()?),
        last_epoch: Epoch(body.number()?),
        members: body.list(MAX_MEMBERS, Reader::member)?,
        volumes: body.list(MAX_VOLUMES, Reader::volume)?,
        to_fence: body.list(MAX_TO_FENCE, |body| body.text().map(Client))?,
    };
    body.0.is_empty().then_some(table)
}

struct Writer(Vec<u8>);

impl Writer {
    fn number(&mut self, number: u64) {
        self.0.extend(number.to_be_bytes());
    }

    /// A length that is limited where it comes from.
    fn length(&mut self, length: usize) {
        self.0.extend(u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes());
    }

    fn text(&mut self, text: &str) {
        self.length(text.len());
        self.0.extend(text.as_bytes());
    }
}

/// Bytes to be read.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    fn length(&mut self) -> Option<usize> {
        let (length, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u16::from_be_bytes(*length).into())
    }

    fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_be_bytes(*number))
    }

    fn optional_text(&mut self) -> Option<String> {
        let length = self.length().filter(|length| *length <= MAX_TEXT)?;
        let (text, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        std::str::from_utf8(text).ok().map(str::to_owned)
    }

    fn text(&mut self) -> Option<String> {
        self.optional_text().filter(|text| !text.is_empty())
    }

    /// Grows as there are bytes, whatever the count says.
    fn list<T>(&mut self, limit: usize, item: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.length().filter(|count| *count <= limit)?;
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(item(self)?);
        }
        Some(items)
    }

    fn member(&mut self) -> Option<MemberRecord> {
        let (name, address) = (self.text()?, self.text()?);
        let incarnation = Incarnation(self.number()?);
        let client = Client(self.text()?);
        let flags = self.byte().filter(|flags| flags & !(IS_UP | IS_DRAINING | IS_LEAVING) == 0)?;
        let [is_up, is_draining, is_leaving] = [IS_UP, IS_DRAINING, IS_LEAVING].map(|flag| flags & flag != 0);
        let strikes = self.byte()?;
        Some(MemberRecord { name, address, incarnation, client, is_up, is_draining, is_leaving, strikes })
    }

    fn volume(&mut self) -> Option<VolumeRecord> {
        let (name, image) = (self.text()?, self.text()?);
        let epoch = Epoch(self.number()?);
        let kind = self.byte()?;
        let (owner, to) = (Incarnation(self.number()?), Incarnation(self.number()?));
        let none = Incarnation(0);
        let place = match kind {
            FREE if (owner, to) == (none, none) => Place::Free,
            STARTING if to == none => Place::Starting(owner),
            ACTIVE if to == none => Place::Active(owner),
            LEAVING => Place::Leaving { from: owner, to: (to != none).then_some(to) },
            _ => return None,
        };
        let kind = self.byte()?;
        let member = self.optional_text()?;
        let decision = match (kind, member.is_empty()) {
            (SPREAD, true) => Decision::Spread,
            (PINNED, false) => Decision::Pinned(member),
            (RETIRED, true) => Decision::Retired,
            _ => return None,
        };
        Some(VolumeRecord { name, image, epoch, place, decision })
    }
}

/// Length of what a commit compares, in bytes.
pub const HEAD_LEN: usize = 16;
/// Maximum length of a table, in bytes. What the other limits allow is shorter.
pub const MAX_LEN: usize = 4 << 20;

const MAGIC: &[u8; 7] = b"bmux-gr";
const VERSION: u8 = 1;
/// Others can follow it.
const LAST_NUMBER: u64 = i64::MAX as u64;

const IS_UP: u8 = 1;
const IS_DRAINING: u8 = 2;
const IS_LEAVING: u8 = 4;

const FREE: u8 = 0;
const STARTING: u8 = 1;
const ACTIVE: u8 = 2;
const LEAVING: u8 = 3;

const SPREAD: u8 = 0;
const PINNED: u8 = 1;
const RETIRED: u8 = 2;

#[cfg(test)]
mod tests {
    use super::super::{Command, ConfiguredVolume};
    use super::*;
    use proptest::prelude::*;

    /// A table after some changes, as numbers say.
    fn table(choices: &[(u8, u8, u8)]) -> Table {
        let mut table = Table::default();
        for (version, (kind, one, other)) in (1..).zip(choices) {
            let (volume, member) = (format!("v{}", one % 5), format!("m{}", other % 4));
            let owner = table.member(&member).map_or(Incarnation(0), |member| member.incarnation);
            let volumes =
                (0..one % 5).map(|at| ConfiguredVolume::new(&format!("v{at}"), "rbd:p/i")).collect();
            let _ = match kind % 12 {
                0 | 1 => table.apply(&Command::Configure { version, volumes }),
                2 | 3 => table.join(&member, "host:1", &Client(format!("{version}"))).map(drop),
                4 => table.end(owner),
                5 => table.apply(&Command::Pin { volume, member }),
                6 => table.apply(&Command::Drain { member }),
                7 => {
                    table.released(&volume);
                    Ok(())
                }
                8 => {
                    table.leave(&volume, table.up(owner).map(|member| member.incarnation));
                    Ok(())
                }
                9 => {
                    let epoch = table.volume(&volume).map_or(Epoch(0), |volume| volume.epoch);
                    table.activated(&volume, epoch);
                    Ok(())
                }
                _ => {
                    table.assign(&volume, owner);
                    Ok(())
                }
            };
            table.advance();
        }
        table
    }

    fn choices() -> impl Strategy<Value = Vec<(u8, u8, u8)>> {
        prop::collection::vec(any::<(u8, u8, u8)>(), 1..40)
    }

    proptest! {
        #[test]
        fn whatever_changes_lead_to_reads_back(choices in choices()) {
            let table = table(&choices);
            let bytes = table.encode();
            prop_assert!(bytes.starts_with(&Table::head(table.generation())));
            prop_assert_eq!(Table::decode(&bytes), Ok(table));
        }

        #[test]
        fn damaged_bytes_are_refused(choices in choices(), at in any::<prop::sample::Index>(), bit in 0..8) {
            let mut bytes = table(&choices).encode();
            let at = at.index(bytes.len());
            prop_assert!(Table::decode(&bytes[..at]).is_err());
            bytes[at] ^= 1u8 << bit;
            // The generation has no sum: it is what the table is compared by.
            let is_generation = (8..HEAD_LEN).contains(&at);
            prop_assert!(is_generation || Table::decode(&bytes).is_err());
        }
    }

    /// Bytes whose sum is right.
    fn with_sum(mut bytes: Vec<u8>) -> Vec<u8> {
        let sum = Crc32c::of(&bytes[HEAD_LEN + 4..]).value();
        bytes[HEAD_LEN..HEAD_LEN + 4].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    #[test]
    fn what_no_change_leads_to_is_refused() {
        let mut good = Table::default();
        let volumes = vec![ConfiguredVolume::new("a", "1"), ConfiguredVolume::new("b", "2")];
        good.apply(&Command::Configure { version: 1, volumes }).unwrap();
        let owner = good.join("m", "host:1", &Client("c".to_owned())).unwrap();
        good.join("n", "host:2", &Client("d".to_owned())).unwrap();
        good.assign("a", owner);
        good.advance();
        assert_eq!(Table::decode(&good.encode()), Ok(good.clone()));
        let bad: [fn(&mut Table); 10] = [
            |table| table.generation = Generation(0),
            |table| table.generation = Generation(u64::MAX),
            |table| table.last_epoch = Epoch(0),
            |table| table.last_incarnation = Incarnation(1),
            |table| table.members[0].is_up = false,
            |table| table.members[0].strikes = MAX_STRIKES + 1,
            |table| table.members[1].incarnation = Incarnation(1),
            |table| table.members.swap(0, 1),
            |table| table.volumes.swap(0, 1),
            |table| table.volumes[1].name = String::new(),
        ];
        for (number, change) in bad.iter().enumerate() {
            let mut table = good.clone();
            change(&mut table);
            assert_eq!(Table::decode(&table.encode()), Err(TableError::Damaged), "{number}");
        }
        let longer = with_sum([good.encode(), vec![0]].concat());
        assert_eq!(Table::decode(&longer), Err(TableError::Damaged));
        let mut later = good.encode();
        later[MAGIC.len()] = 2;
        let message = "the group's table is of version 2, and this program knows 1; use a newer one";
        assert_eq!(Table::decode(&later).unwrap_err().to_string(), message);
    }

    #[test]
    fn a_count_without_items_allocates_nothing() {
        let mut bytes = Table { generation: Generation(1), ..Table::default() }.encode();
        // The number of volumes, after three numbers and the number of members.
        let at = HEAD_LEN + 4 + 24 + 2;
        bytes[at..at + 2].copy_from_slice(&4096u16.to_be_bytes());
        assert_eq!(Table::decode(&with_sum(bytes)), Err(TableError::Damaged));
    }
}
