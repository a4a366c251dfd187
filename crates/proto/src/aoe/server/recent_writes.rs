//! Recent writes of each initiator, so that none is carried out twice.
//!
//! An initiator retransmits a write without an answer, and the network may duplicate a frame. A
//! duplicate that is carried out late would undo a newer write to the same blocks, which the
//! initiator sent after the answer to the first. So a write that was carried out recently is only
//! answered again, and one that is in progress is not answered twice.
//!
//! Writes are identified by tag, address and data. AoE does not require that an initiator's tags
//! stay unique: one that uses the index of a slot soon sends the same tag with another request. The
//! tags of such an initiator identify nothing, so all of its writes are carried out, as other
//! targets do.
//!
//! Linux retransmits a write under a new tag, so the late one of the two has an unknown tag. But
//! its tags contain a counter (`tag_counter.rs`). If a write was sent before another one with the
//! same address and data, and arrives after that one was carried out, it has no effect: in
//! order of sending, the other one would have overwritten it.
//!
//! Limits: [`MAX_INITIATORS`] initiators with [`WINDOW`] writes each, fewer when the total would
//! exceed [`MAX_WRITES`], so that forged senders cost at most some 100 MB. An entry is valid for
//! [`LIFETIME`] and for the next [`LIFESPAN`] commands of its initiator, because a tag counter
//! wraps around.

use super::tag_counter::TagCounter;
use blockmux_wire::ethernet::Mac;
use foldhash::HashMap;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Two writes with the same identity, and the same tag, are one write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct WriteIdentity {
    /// Number of the disk in the target.
    pub(super) unit: u16,
    /// The ATA command.
    pub(super) command: u8,
    pub(super) sectors: u8,
    pub(super) block: u64,
    /// CRC-32C of the data.
    pub(super) digest: u32,
}

/// State of a write that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteHistory {
    /// It is unknown, and is to be carried out.
    New,
    /// It is in progress.
    InFlight,
    /// It was carried out, and answered with this status and error register.
    Done { status: u8, error: u8 },
}

#[derive(Default)]
pub(super) struct RecentWrites {
    initiators: HashMap<Mac, RecentInitiator>,
}

#[derive(Default)]
struct RecentInitiator {
    writes: HashMap<u32, RecentWrite>,
    /// The tags of the writes, oldest first.
    order: VecDeque<u32>,
    /// Whether the initiator uses a tag again for another request.
    reuses_tags: bool,
    last: Option<Instant>,
    /// Number of commands of the initiator.
    seen: u64,
    /// Tag counters by number of the disk.
    counts: Vec<TagCounter>,
    /// For each identity, the tag of the latest write that was carried out; only if tags are
    /// counters.
    done: HashMap<WriteIdentity, u32>,
}

struct RecentWrite {
    identity: WriteIdentity,
    known: WriteHistory,
    at: Instant,
    /// Number of commands of the initiator when the write arrived.
    seen: u64,
}

impl RecentWrites {
    /// Records a write; returns its state before.
    pub(super) fn on_write(
        &mut self,
        mac: Mac,
        tag: u32,
        identity: WriteIdentity,
        now: Instant,
    ) -> WriteHistory {
        if self.initiators.len() >= MAX_INITIATORS && !self.initiators.contains_key(&mac) {
            self.forget_oldest_initiator();
        }
        let window = window(self.initiators.len());
        let initiator = self.initiators.entry(mac).or_default();
        initiator.last = Some(now);
        initiator.seen = initiator.seen.wrapping_add(1);
        if initiator.reuses_tags {
            return WriteHistory::New;
        }
        let seen = initiator.seen;
        initiator.count(identity.unit, tag);
        if let Some(known) = initiator.known_under_a_later_tag(tag, identity, now) {
            return known;
        }
        match initiator.writes.get(&tag) {
            Some(write) if !write.is_current(seen, now) => initiator.forget(tag),
            Some(write) if write.identity == identity => return write.known,
            Some(_) => {
                initiator.give_up();
                return WriteHistory::New;
            }
            None => {}
        }
        while initiator.order.len() >= window
            && let Some(oldest) = initiator.order.pop_front()
        {
            initiator.forget_write(oldest);
        }
        initiator.order.push_back(tag);
        initiator.writes.insert(tag, RecentWrite { identity, known: WriteHistory::InFlight, at: now, seen });
        WriteHistory::New
    }

    /// Records a command other than a write.
    #[inline]
    pub(super) fn on_other(&mut self, mac: Mac, unit: u16, tag: u32, now: Instant) {
        let Some(initiator) = self.initiators.get_mut(&mac) else { return };
        initiator.seen = initiator.seen.wrapping_add(1);
        initiator.count(unit, tag);
        if initiator.writes.get(&tag).is_some_and(|write| write.is_current(initiator.seen, now)) {
            initiator.give_up();
        }
    }

    /// Records the answer to a write.
    pub(super) fn on_answer(&mut self, mac: Mac, tag: u32, status: u8, error: u8, now: Instant) {
        let Some(initiator) = self.initiators.get_mut(&mac) else { return };
        let Some(write) = initiator.writes.get_mut(&tag) else { return };
        (write.known, write.at) = (WriteHistory::Done { status, error }, now);
        if initiator.counts.get(usize::from(write.identity.unit)).is_some_and(TagCounter::is_trusted) {
            initiator.done.insert(write.identity, tag);
        }
    }

    /// Forgets a write that was dropped without an answer, so that its retransmission is new.
    pub(super) fn on_dropped(&mut self, mac: Mac, tag: u32) {
        if let Some(initiator) = self.initiators.get_mut(&mac) {
            initiator.forget(tag);
        }
    }

    /// Forgets the initiator that has sent nothing for the longest time.
    fn forget_oldest_initiator(&mut self) {
        let oldest = self.initiators.iter().min_by_key(|(_, initiator)| initiator.last).map(|(mac, _)| *mac);
        if let Some(mac) = oldest {
            self.initiators.remove(&mac);
        }
    }
}

impl RecentWrite {
    /// Whether the entry is still valid for commands with its tag.
    fn is_current(&self, seen: u64, now: Instant) -> bool {
        let is_fresh =
            now.saturating_duration_since(self.at) < LIFETIME && seen.wrapping_sub(self.seen) < LIFESPAN;
        is_fresh || self.known == WriteHistory::InFlight
    }
}

impl RecentInitiator {
    fn give_up(&mut self) {
        self.reuses_tags = true;
        (self.writes, self.order, self.done) = Default::default();
    }

    /// Forgets the write with this tag.
    fn forget(&mut self, tag: u32) {
        if self.forget_write(tag) {
            self.order.retain(|other| *other != tag);
        }
    }

    /// Forgets a write but leaves its tag in `order`; returns whether there was one.
    fn forget_write(&mut self, tag: u32) -> bool {
        let Some(write) = self.writes.remove(&tag) else { return false };
        if self.done.get(&write.identity) == Some(&tag) {
            self.done.remove(&write.identity);
        }
        true
    }

    /// Passes the tag of a command to the disk's counter.
    #[inline]
    fn count(&mut self, unit: u16, tag: u32) {
        let at = usize::from(unit);
        if self.counts.len() <= at {
            self.counts.resize(at.saturating_add(1), TagCounter::default());
        }
        if let Some(count) = self.counts.get_mut(at) {
            count.on_tag(tag);
        }
    }

    /// State of the same write that was sent later and has been carried out.
    fn known_under_a_later_tag(
        &self,
        tag: u32,
        identity: WriteIdentity,
        now: Instant,
    ) -> Option<WriteHistory> {
        let later = *self.done.get(&identity)?;
        let count = self.counts.get(usize::from(identity.unit))?;
        let write = self.writes.get(&later)?;
        (count.is_before(tag, later) && write.is_current(self.seen, now)).then_some(write.known)
    }
}

/// The number of writes to remember of each initiator, given the number of initiators.
fn window(initiators: usize) -> usize {
    MAX_WRITES.checked_div(initiators).unwrap_or(WINDOW).clamp(MIN_WINDOW, WINDOW)
}

/// The maximum number of initiators that are remembered, whatever addresses a sender forges.
const MAX_INITIATORS: usize = 1024;
/// The number of writes that are remembered of one initiator; far above any initiator's window.
const WINDOW: usize = 2048;
/// The minimum number of writes of one initiator: twice the advertised buffer count.
const MIN_WINDOW: usize = 256;
/// The maximum number of writes of all initiators, above which the windows shrink.
const MAX_WRITES: usize = 1 << 17;
/// Number of commands for which an entry is valid: half of the range of Linux's tag counter.
const LIFESPAN: u64 = 16_384;
/// Time for which an entry is valid; no network delays a frame for longer.
const LIFETIME: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    const INITIATOR: Mac = Mac([2, 0, 0, 0, 0, 1]);

    fn write(block: u64, digest: u32) -> WriteIdentity {
        WriteIdentity { unit: 0, command: 0x34, sectors: 2, block, digest }
    }

    #[test]
    fn a_write_is_new_once() {
        let (mut recent, now) = (RecentWrites::default(), Instant::now());
        assert_eq!(recent.on_write(INITIATOR, 7, write(1, 1), now), WriteHistory::New);
        assert_eq!(recent.on_write(INITIATOR, 7, write(1, 1), now), WriteHistory::InFlight);
        recent.on_answer(INITIATOR, 7, 0x40, 0, now);
        assert_eq!(
            recent.on_write(INITIATOR, 7, write(1, 1), now),
            WriteHistory::Done { status: 0x40, error: 0 }
        );
        assert_eq!(
            recent.on_write(Mac([4; 6]), 7, write(1, 1), now),
            WriteHistory::New,
            "of another initiator"
        );
        assert_eq!(
            recent.on_write(INITIATOR, 7, write(1, 1), now + LIFETIME),
            WriteHistory::New,
            "much later"
        );
        recent.on_dropped(INITIATOR, 7);
        assert_eq!(
            recent.on_write(INITIATOR, 7, write(1, 1), now + LIFETIME),
            WriteHistory::New,
            "a dropped write is new"
        );
    }

    #[test]
    fn all_writes_of_an_initiator_that_reuses_tags_are_executed() {
        let now = Instant::now();
        for other in [write(2, 1), write(1, 2)] {
            let mut recent = RecentWrites::default();
            assert_eq!(recent.on_write(INITIATOR, 7, write(1, 1), now), WriteHistory::New);
            recent.on_answer(INITIATOR, 7, 0x40, 0, now);
            assert_eq!(recent.on_write(INITIATOR, 7, other, now), WriteHistory::New);
            assert_eq!(recent.on_write(INITIATOR, 7, write(1, 1), now), WriteHistory::New);
        }
        let mut recent = RecentWrites::default();
        recent.on_write(INITIATOR, 7, write(1, 1), now);
        recent.on_answer(INITIATOR, 7, 0x40, 0, now);
        recent.on_other(INITIATOR, 0, 7, now);
        assert_eq!(recent.on_write(INITIATOR, 7, write(1, 1), now), WriteHistory::New);
    }

    #[test]
    fn tags_may_repeat_after_many_commands() {
        let (mut recent, now) = (RecentWrites::default(), Instant::now());
        recent.on_write(INITIATOR, 7, write(1, 1), now);
        recent.on_answer(INITIATOR, 7, 0x40, 0, now);
        (0..LIFESPAN as u32).for_each(|n| recent.on_other(INITIATOR, 0, 100 + n, now));
        recent.on_other(INITIATOR, 0, 7, now);
        assert_eq!(recent.on_write(INITIATOR, 7, write(2, 1), now), WriteHistory::New);
        assert_eq!(
            recent.on_write(INITIATOR, 7, write(2, 1), now),
            WriteHistory::InFlight,
            "it still counts"
        );
    }

    /// A tag as Linux makes it.
    fn linux(count: u32) -> u32 {
        (count & 0x7fff) << 16 | 0x1234
    }

    /// The treatment of a copy of a write that arrives late, after its other copy and after a newer
    /// write. `before` commands precede them.
    fn late_write(before: u32, tag: impl Fn(u32) -> u32) -> (WriteHistory, WriteHistory) {
        let (mut recent, now) = (RecentWrites::default(), Instant::now());
        for n in 0..before {
            recent.on_write(INITIATOR, tag(n), write(n.into(), 0), now);
            recent.on_answer(INITIATOR, tag(n), 0x40, 0, now);
        }
        let [old, again, newer, meant] = [0, 1, 2, 3].map(|n| tag(before.wrapping_add(n)));
        for (tag, digest) in [(again, 1), (newer, 2)] {
            assert_eq!(recent.on_write(INITIATOR, tag, write(7, digest), now), WriteHistory::New);
            recent.on_answer(INITIATOR, tag, 0x40, 0, now);
        }
        let late = recent.on_write(INITIATOR, old, write(7, 1), now);
        (late, recent.on_write(INITIATOR, meant, write(7, 1), now))
    }

    #[test]
    fn a_late_write_that_was_retransmitted_under_a_new_tag_is_not_executed_again() {
        let done = WriteHistory::Done { status: 0x40, error: 0 };
        for before in [100, 32_766, 40_000] {
            assert_eq!(late_write(before, linux), (done, WriteHistory::New), "after {before}");
        }
        assert_eq!(
            late_write(10, linux),
            (WriteHistory::New, WriteHistory::New),
            "too few tags to recognize a counter"
        );
        let (places, others) = (|n: u32| 0x0b00_0000 | n << 7, |n: u32| n.wrapping_mul(0x9e37_79b9));
        assert_eq!(
            late_write(1000, places),
            (WriteHistory::New, WriteHistory::New),
            "slot indices are no counter"
        );
        assert_eq!(
            late_write(1000, others),
            (WriteHistory::New, WriteHistory::New),
            "random tags are no counter"
        );
    }

    #[test]
    fn a_reused_tag_replaces_its_expired_entry() {
        let (mut recent, mut now) = (RecentWrites::default(), Instant::now());
        for round in 0..3 {
            for n in 1..1000 {
                assert_eq!(
                    recent.on_write(INITIATOR, linux(n), write(n.into(), round), now),
                    WriteHistory::New
                );
                recent.on_answer(INITIATOR, linux(n), 0x40, 0, now);
            }
            now += LIFETIME;
        }
        let initiator = &recent.initiators[&INITIATOR];
        assert!(initiator.counts[0].is_trusted());
        assert_eq!((initiator.writes.len(), initiator.order.len()), (999, 999));
        assert!(
            initiator.done.keys().all(|identity| identity.digest == 2),
            "only writes of the last round remain"
        );
        // By its counter, it was sent before a write that was carried out in the first round only.
        assert_eq!(recent.on_write(INITIATOR, linux(0), write(500, 0), now), WriteHistory::New);
    }

    #[test]
    fn windows_are_smaller_when_there_are_many() {
        assert_eq!([0, 1, 64].map(window), [WINDOW; 3]);
        assert_eq!((window(128), window(MAX_INITIATORS)), (WINDOW / 2, MIN_WINDOW));
        let (mut recent, now) = (RecentWrites::default(), Instant::now());
        let sender = |n: usize| Mac([6, 6, 6, 6, (n >> 8) as u8, n as u8]);
        for (mac, tag) in (0..600).flat_map(|tag| (0..256).map(move |mac| (mac, tag))) {
            recent.on_write(sender(mac), tag, write(tag.into(), 0), now);
        }
        let kept: usize = recent.initiators.values().map(|initiator| initiator.writes.len()).sum();
        assert_eq!(kept, MAX_WRITES);
    }

    #[test]
    fn the_number_of_remembered_writes_is_limited() {
        let (mut recent, now) = (RecentWrites::default(), Instant::now());
        for tag in 0..WINDOW as u32 + 1 {
            recent.on_write(INITIATOR, tag, write(tag.into(), 0), now);
        }
        let initiator = &recent.initiators[&INITIATOR];
        assert_eq!((initiator.writes.len(), initiator.order.len()), (WINDOW, WINDOW));
        assert_eq!(recent.on_write(INITIATOR, 1, write(1, 0), now), WriteHistory::InFlight);
        assert_eq!(recent.on_write(INITIATOR, 0, write(0, 0), now), WriteHistory::New);
        for forged in 0..MAX_INITIATORS as u32 {
            let [a, b, c, d] = forged.to_be_bytes();
            recent.on_write(Mac([6, 6, a, b, c, d]), 0, write(0, 0), now + Duration::from_secs(1));
        }
        assert_eq!(recent.initiators.len(), MAX_INITIATORS);
        assert!(
            !recent.initiators.contains_key(&INITIATOR),
            "the initiator that sent nothing for the longest time"
        );
    }
}
