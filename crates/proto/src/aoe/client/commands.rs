//! Commands that wait for their answers.
//!
//! A command that is not answered in time is sent again under the same tag. A new tag would tell
//! which of the two was answered; but the target knows a write that it has done already only by its
//! tag, and doing it again later could undo a newer one (`target/recent.rs`). So the tag stays, and
//! only commands that were sent once measure the round trip.
//!
//! ```text
//!   tag:  id 8 | how often the place was taken 17 | place 7
//! ```
//! The id differs between the queues of one machine, so that none takes the answers to another's
//! commands. The count begins anywhere: the target remembers tags of this station for longer than a
//! queue may live, and those of the next are to be others.

use crate::slots::SlotKey;
use blockmux_volume::{SgList, Slab};
use std::time::Instant;

/// The table of them.
pub(super) struct Flights {
    id: u8,
    flights: Slab<Flight>,
    /// How often each place was taken; goes round.
    taken: Vec<u32>,
    /// Those that are pieces of requests.
    of_requests: u32,
}

/// One command.
pub(super) struct Flight {
    pub(super) what: FlightKind,
    /// Of the request that it is a piece of.
    pub(super) request: Option<SlotKey>,
    /// In sectors.
    pub(super) block: u64,
    pub(super) sectors: u8,
    /// Where its data is in the request's, in bytes.
    pub(super) offset: u64,
    /// What goes to the target.
    pub(super) data: SgList,
    /// The path that it was sent on last.
    pub(super) path: usize,
    pub(super) first_sent: Instant,
    pub(super) sent: Instant,
    pub(super) due: Instant,
    /// It is known that no answer comes: it is sent again when due, whatever became of others.
    pub(super) at_once: bool,
    /// It was repeated last because others had overtaken it.
    pub(super) was_overtaken: bool,
    /// How often it was sent.
    pub(super) sends: u32,
}

/// What a command does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlightKind {
    Read,
    Write,
    Trim,
    Flush,
    /// Asks what the disk is like.
    Identify,
    /// Reads into nowhere with a request that is as long as the answer: do frames of that size
    /// pass?
    Probe,
}

impl FlightKind {
    pub(super) fn is_write(self) -> bool {
        matches!(self, FlightKind::Write | FlightKind::Trim)
    }

    /// Whether it may take a disk much longer than others, so that it says nothing if these are
    /// answered before.
    pub(super) fn is_long(self) -> bool {
        matches!(self, FlightKind::Trim | FlightKind::Flush)
    }
}

impl Flights {
    /// An empty one, whose tags begin with `id` and count from `first` on.
    pub(super) fn new(id: u8, first: u32) -> Flights {
        let taken = vec![first & MOST_TAKEN; MAX_FLIGHTS as usize];
        Flights { id, flights: Slab::with_capacity(MAX_FLIGHTS), taken, of_requests: 0 }
    }

    /// Takes all out.
    pub(super) fn clear(&mut self) {
        self.flights.clear();
        self.of_requests = 0;
    }

    /// How many are pieces of requests. The window is for these: what is tried and asked beside
    /// them is little.
    #[inline]
    pub(super) fn of_requests(&self) -> u32 {
        self.of_requests
    }

    /// Adds one; its tag, or `None` if there is no room.
    #[inline]
    pub(super) fn insert(&mut self, flight: Flight) -> Option<u32> {
        if self.flights.len() >= MAX_FLIGHTS as usize {
            return None;
        }
        self.of_requests = self.of_requests.saturating_add(flight.request.is_some().into());
        let at = self.flights.insert(flight);
        let taken = self.taken.get_mut(at)?;
        *taken = taken.wrapping_add(1) & MOST_TAKEN;
        Some(self.tag_of(at))
    }

    /// The one with that tag.
    #[inline]
    pub(super) fn get_mut(&mut self, tag: u32) -> Option<&mut Flight> {
        self.flights.get_mut(self.place_of(tag)?)
    }

    /// Takes it out; its tag is not valid again for a long time.
    #[inline]
    pub(super) fn remove(&mut self, tag: u32) -> Option<Flight> {
        let flight = self.flights.remove(self.place_of(tag)?)?;
        self.of_requests = self.of_requests.saturating_sub(flight.request.is_some().into());
        Some(flight)
    }

    /// Tags and flights of all.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Flight)> {
        self.flights.iter().map(|(at, flight)| (self.tag_of(at), flight))
    }

    /// All of them, to be changed.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Flight> {
        self.flights.iter_mut()
    }

    fn place_of(&self, tag: u32) -> Option<usize> {
        let at = (tag & (MAX_FLIGHTS - 1)) as usize;
        (tag == self.tag_of(at)).then_some(at)
    }

    fn tag_of(&self, at: usize) -> u32 {
        let taken = self.taken.get(at).copied().unwrap_or_default();
        u32::from(self.id) << 24 | taken << PLACE_BITS | at as u32
    }
}

/// Pieces of requests in flight. There is room beside them for a trial on each path, and for a
/// question.
pub(super) const MAX_PIECES: u32 = MAX_FLIGHTS - super::path::MAX_PATHS as u32 - 1;
/// Commands in flight.
pub(super) const MAX_FLIGHTS: u32 = 1 << PLACE_BITS;
const PLACE_BITS: u32 = 7;
const MOST_TAKEN: u32 = (1 << (24 - PLACE_BITS)) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn flight(block: u64) -> Flight {
        let now = Instant::now();
        Flight {
            what: FlightKind::Read,
            request: None,
            block,
            sectors: 1,
            offset: 0,
            data: SgList::default(),
            path: 0,
            first_sent: now,
            sent: now,
            due: now,
            at_once: false,
            was_overtaken: false,
            sends: 1,
        }
    }

    #[test]
    fn a_tag_is_good_for_one_command_only() {
        let mut flights = Flights::new(0xab, 0);
        let first = flights.insert(flight(1)).unwrap();
        assert_eq!(first >> 24, 0xab);
        assert_eq!(flights.get_mut(first).unwrap().block, 1);
        assert!(flights.remove(first).is_some() && flights.remove(first).is_none());
        let second = flights.insert(flight(2)).unwrap();
        assert_ne!(first, second);
        assert!(flights.get_mut(first).is_none() && flights.get_mut(second ^ 1 << 24).is_none());
        assert_eq!(
            flights.iter().map(|(tag, flight)| (tag, flight.block)).collect::<Vec<_>>(),
            [(second, 2)]
        );
    }

    #[test]
    fn tags_go_on_where_they_were_and_begin_where_they_are_told_to() {
        let mut flights = Flights::new(1, u32::MAX);
        let tags = [flights.insert(flight(1)).unwrap(), flights.insert(flight(2)).unwrap()];
        assert_eq!(tags, [0x0100_0000, 0x0100_0001], "the count goes round");
        flights.clear();
        assert!(tags.iter().all(|tag| flights.get_mut(*tag).is_none()) && flights.of_requests() == 0);
        assert_eq!(flights.insert(flight(3)), Some(0x0100_0080), "and not from the begin again");
        assert_eq!(Flights::new(1, 0x1234).insert(flight(1)), Some(0x0100_0000 | 0x1235 << 7));
    }

    #[test]
    fn there_is_room_for_so_many() {
        let mut flights = Flights::new(0, 0);
        assert!((0..MAX_FLIGHTS).all(|n| flights.insert(flight(n.into())).is_some()));
        assert!(flights.insert(flight(0)).is_none());
        assert_eq!(flights.iter().count(), MAX_FLIGHTS as usize);
    }
}
