//! The table of outstanding commands.
//!
//! A command without an answer is retransmitted under the same tag. A new tag would tell which of
//! the two was answered; but the target recognizes a write that it has carried out by its tag only,
//! and carrying it out again later could undo a newer one (`server/recent_writes.rs`). So the tag
//! stays, and only commands that were sent once measure the round-trip time.
//!
//! ```text
//!   tag:  id 8 | uses of the slot 17 | slot 7
//! ```
//! The id differs between the queues of one machine, so that no queue takes an answer to another's
//! command. The number of uses starts at a value that the caller chooses: the target remembers tags
//! of this station for longer than a queue may live, and the next queue must use other tags.

use crate::slots::SlotKey;
use blockmux_volume::{SgList, Slab};
use std::time::Instant;

/// The table of outstanding commands.
pub(super) struct AoeCommandTable {
    id: u8,
    commands: Slab<OutstandingCommand>,
    /// Number of uses of each slot; it wraps around.
    taken: Vec<u32>,
    /// Number of commands that belong to a request.
    pub(super) request_commands: u32,
}

/// A command without an answer so far.
pub(super) struct OutstandingCommand {
    pub(super) what: AoeCommandKind,
    /// The request that it is a piece of; `None` for probes and IDENTIFY.
    pub(super) request: Option<SlotKey>,
    /// First sector.
    pub(super) block: u64,
    pub(super) sectors: u8,
    /// Offset of its data in the request's, in bytes.
    pub(super) offset: u64,
    /// Data to send.
    pub(super) data: SgList,
    /// Index of the path on which it was sent last.
    pub(super) path: usize,
    pub(super) first_sent: Instant,
    pub(super) sent: Instant,
    pub(super) due: Instant,
    /// Whether it is known to be lost, so that it is retransmitted when due without further checks.
    pub(super) is_lost: bool,
    /// Whether the last retransmission was because later commands were answered first.
    pub(super) was_overtaken: bool,
    /// Number of transmissions.
    pub(super) sends: u32,
}

/// Kind of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AoeCommandKind {
    Read,
    Write,
    Trim,
    Flush,
    /// IDENTIFY DEVICE.
    Identify,
    /// A read whose request is as long as its answer, and whose data is dropped: it tests whether
    /// frames of this size pass.
    Probe,
}

impl AoeCommandKind {
    pub(super) fn is_write(self) -> bool {
        matches!(self, AoeCommandKind::Write | AoeCommandKind::Trim)
    }

    /// Whether a disk may need much longer for it than for others, so that answers to later
    /// commands do not indicate a loss.
    pub(super) fn is_long(self) -> bool {
        matches!(self, AoeCommandKind::Trim | AoeCommandKind::Flush)
    }
}

impl AoeCommandTable {
    /// An empty table, whose tags begin with `id` and whose slots start with `first` uses.
    pub(super) fn new(id: u8, first: u32) -> AoeCommandTable {
        let taken = vec![first & MAX_TAKEN; MAX_COMMANDS as usize];
        AoeCommandTable { id, commands: Slab::with_capacity(MAX_COMMANDS), taken, request_commands: 0 }
    }

    /// Adds a command; returns its tag, or `None` if the table is full.
    #[inline]
    pub(super) fn insert(&mut self, command: OutstandingCommand) -> Option<u32> {
        if self.commands.len() >= MAX_COMMANDS as usize {
            return None;
        }
        self.request_commands = self.request_commands.saturating_add(command.request.is_some().into());
        let at = self.commands.insert(command);
        let taken = self.taken.get_mut(at)?;
        *taken = taken.wrapping_add(1) & MAX_TAKEN;
        Some(self.tag_of(at))
    }

    /// The command with this tag.
    #[inline]
    pub(super) fn get_mut(&mut self, tag: u32) -> Option<&mut OutstandingCommand> {
        self.commands.get_mut(self.place_of(tag)?)
    }

    /// Removes a command; its tag is not used again for a long time.
    #[inline]
    pub(super) fn remove(&mut self, tag: u32) -> Option<OutstandingCommand> {
        let command = self.commands.remove(self.place_of(tag)?)?;
        self.request_commands = self.request_commands.saturating_sub(command.request.is_some().into());
        Some(command)
    }

    /// All commands with their tags.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &OutstandingCommand)> {
        self.commands.iter().map(|(at, command)| (self.tag_of(at), command))
    }

    /// All commands, mutable.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut OutstandingCommand> {
        self.commands.iter_mut()
    }

    fn place_of(&self, tag: u32) -> Option<usize> {
        let at = (tag & (MAX_COMMANDS - 1)) as usize;
        (tag == self.tag_of(at)).then_some(at)
    }

    fn tag_of(&self, at: usize) -> u32 {
        let taken = self.taken.get(at).copied().unwrap_or_default();
        u32::from(self.id) << 24 | taken << PLACE_BITS | at as u32
    }
}

/// The maximum number of outstanding commands of requests; the rest of the table is for a probe on
/// each path and for IDENTIFY.
pub(super) const MAX_PIECES: u32 = MAX_COMMANDS - super::path::MAX_PATHS as u32 - 1;
/// The maximum number of outstanding commands.
pub(super) const MAX_COMMANDS: u32 = 1 << PLACE_BITS;
const PLACE_BITS: u32 = 7;
const MAX_TAKEN: u32 = (1 << (24 - PLACE_BITS)) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn command(block: u64) -> OutstandingCommand {
        let now = Instant::now();
        OutstandingCommand {
            what: AoeCommandKind::Read,
            request: None,
            block,
            sectors: 1,
            offset: 0,
            data: SgList::default(),
            path: 0,
            first_sent: now,
            sent: now,
            due: now,
            is_lost: false,
            was_overtaken: false,
            sends: 1,
        }
    }

    #[test]
    fn a_tag_is_valid_for_only_one_command() {
        let mut commands = AoeCommandTable::new(0xab, 0);
        let first = commands.insert(command(1)).unwrap();
        assert_eq!(first >> 24, 0xab);
        assert_eq!(commands.get_mut(first).unwrap().block, 1);
        assert!(commands.remove(first).is_some() && commands.remove(first).is_none());
        let second = commands.insert(command(2)).unwrap();
        assert_ne!(first, second);
        assert!(commands.get_mut(first).is_none() && commands.get_mut(second ^ 1 << 24).is_none());
        assert_eq!(
            commands.iter().map(|(tag, command)| (tag, command.block)).collect::<Vec<_>>(),
            [(second, 2)]
        );
    }

    #[test]
    fn tags_continue_and_begin_at_the_given_value() {
        let mut commands = AoeCommandTable::new(1, u32::MAX);
        let tags = [commands.insert(command(1)).unwrap(), commands.insert(command(2)).unwrap()];
        assert_eq!(tags, [0x0100_0000, 0x0100_0001], "the count wraps to 0");
        tags.iter().rev().for_each(|tag| drop(commands.remove(*tag)));
        assert!(tags.iter().all(|tag| commands.get_mut(*tag).is_none()) && commands.request_commands == 0);
        assert_eq!(commands.insert(command(3)), Some(0x0100_0080), "the count does not restart");
        assert_eq!(AoeCommandTable::new(1, 0x1234).insert(command(1)), Some(0x0100_0000 | 0x1235 << 7));
    }

    #[test]
    fn the_table_is_full_after_the_maximum_number_of_commands() {
        let mut commands = AoeCommandTable::new(0, 0);
        assert!((0..MAX_COMMANDS).all(|n| commands.insert(command(n.into())).is_some()));
        assert!(commands.insert(command(0)).is_none());
        assert_eq!(commands.iter().count(), MAX_COMMANDS as usize);
    }
}
