//! The writes that each initiator sent lately, so that none is done twice.
//!
//! An initiator that hears nothing sends a write again, and the network may deliver a frame twice
//! by itself. Done at once, a second time harms nothing. Done late, it would undo a newer write to
//! the same blocks, which the initiator sent after the first time was answered. So a write that was
//! done lately is only answered again, and one that is being done is not answered twice.
//!
//! What tells them apart is the tag, with address and data. AoE does not ask initiators for tags
//! that differ for long: one that numbers its requests by place sends the same tag soon with
//! something else. Then tags say nothing about its writes, and it is remembered as such and its
//! writes are all done, as other targets do it.
//!
//! Linux repeats a write under a new tag, so that the late one of the two has a tag that was never
//! seen. But its tags count what it sends to a disk (`count.rs`). A write that was sent before
//! another with the same address and data, as the count says, and comes after that was done, is
//! done already: had it come in its turn, nothing else would be on the disk now.
//!
//! Bounds: [`MAX_INITIATORS`] of [`WINDOW`] writes each, or of fewer when together they would be
//! more than [`MAX_WRITES`], so that forged senders cost some 100 MB and no more. They count for
//! [`LIFETIME`] and for the next [`LIFESPAN`] commands of their initiator, so that the tags of one
//! that counts them round may come again.

use super::count::Count;
use blockmux_wire::ethernet::Mac;
use foldhash::HashMap;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// What makes two writes the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct WriteIdentity {
    /// The disk's place in the target.
    pub(super) unit: u16,
    /// The ATA command.
    pub(super) command: u8,
    pub(super) sectors: u8,
    pub(super) block: u64,
    /// CRC-32C of the data.
    pub(super) digest: u32,
}

/// What is known of a write that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteHistory {
    /// Nothing: do it.
    New,
    /// It is being done.
    InFlight,
    /// It was done, and answered with this status and error register.
    Done { status: u8, error: u8 },
}

#[derive(Default)]
pub(super) struct Recent {
    initiators: HashMap<Mac, RecentInitiator>,
}

#[derive(Default)]
struct RecentInitiator {
    writes: HashMap<u32, Write>,
    /// Their tags, oldest first.
    order: VecDeque<u32>,
    /// Its tags come again with other requests.
    reuses_tags: bool,
    last: Option<Instant>,
    /// Commands that came.
    seen: u64,
    /// By the disk's place: how its tags count what is sent there.
    counts: Vec<Count>,
    /// The tag of the latest of the same writes that were done, of an initiator that counts.
    done: HashMap<WriteIdentity, u32>,
}

struct Write {
    identity: WriteIdentity,
    known: WriteHistory,
    at: Instant,
    /// The initiator's commands by then.
    seen: u64,
}

impl Recent {
    /// A write has come.
    pub(super) fn on_write(
        &mut self,
        who: Mac,
        tag: u32,
        identity: WriteIdentity,
        now: Instant,
    ) -> WriteHistory {
        if self.initiators.len() >= MAX_INITIATORS && !self.initiators.contains_key(&who) {
            self.forget_one();
        }
        let window = window(self.initiators.len());
        let initiator = self.initiators.entry(who).or_default();
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
            Some(write) if !write.counts(seen, now) => initiator.forget(tag),
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
        initiator.writes.insert(tag, Write { identity, known: WriteHistory::InFlight, at: now, seen });
        WriteHistory::New
    }

    /// Something else than a write has come.
    #[inline]
    pub(super) fn on_other(&mut self, who: Mac, unit: u16, tag: u32, now: Instant) {
        let Some(initiator) = self.initiators.get_mut(&who) else { return };
        initiator.seen = initiator.seen.wrapping_add(1);
        initiator.count(unit, tag);
        if initiator.writes.get(&tag).is_some_and(|write| write.counts(initiator.seen, now)) {
            initiator.give_up();
        }
    }

    /// A write was answered.
    pub(super) fn on_answer(&mut self, who: Mac, tag: u32, status: u8, error: u8, now: Instant) {
        let Some(initiator) = self.initiators.get_mut(&who) else { return };
        let Some(write) = initiator.writes.get_mut(&tag) else { return };
        (write.known, write.at) = (WriteHistory::Done { status, error }, now);
        if initiator.counts.get(usize::from(write.identity.unit)).is_some_and(Count::is_trusted) {
            initiator.done.insert(write.identity, tag);
        }
    }

    /// A write was not done and is not answered: it may come again.
    pub(super) fn on_silence(&mut self, who: Mac, tag: u32) {
        if let Some(initiator) = self.initiators.get_mut(&who) {
            initiator.forget(tag);
        }
    }

    /// Forgets the initiator that was silent for longest.
    fn forget_one(&mut self) {
        let oldest = self.initiators.iter().min_by_key(|(_, initiator)| initiator.last).map(|(mac, _)| *mac);
        if let Some(mac) = oldest {
            self.initiators.remove(&mac);
        }
    }
}

impl Write {
    /// Whether it says anything still of what comes under its tag.
    fn counts(&self, seen: u64, now: Instant) -> bool {
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

    /// Forgets what came under that tag.
    fn forget(&mut self, tag: u32) {
        if self.forget_write(tag) {
            self.order.retain(|other| *other != tag);
        }
    }

    /// Forgets a write, but not its place in the order; whether there was anything.
    fn forget_write(&mut self, tag: u32) -> bool {
        let Some(write) = self.writes.remove(&tag) else { return false };
        if self.done.get(&write.identity) == Some(&tag) {
            self.done.remove(&write.identity);
        }
        true
    }

    /// A command has come for that disk.
    #[inline]
    fn count(&mut self, unit: u16, tag: u32) {
        let at = usize::from(unit);
        if self.counts.len() <= at {
            self.counts.resize(at.saturating_add(1), Count::default());
        }
        if let Some(count) = self.counts.get_mut(at) {
            count.on_tag(tag);
        }
    }

    /// What is known of the same write that was sent after this one and has been done.
    fn known_under_a_later_tag(
        &self,
        tag: u32,
        identity: WriteIdentity,
        now: Instant,
    ) -> Option<WriteHistory> {
        let later = *self.done.get(&identity)?;
        let count = self.counts.get(usize::from(identity.unit))?;
        let write = self.writes.get(&later)?;
        (count.is_before(tag, later) && write.counts(self.seen, now)).then_some(write.known)
    }
}

/// How many writes of each initiator are remembered while there are so many initiators.
fn window(initiators: usize) -> usize {
    MAX_WRITES.checked_div(initiators).unwrap_or(WINDOW).clamp(LEAST_WINDOW, WINDOW)
}

/// Who sends forged addresses makes the target remember so many at most.
const MAX_INITIATORS: usize = 1024;
/// More than any window of an initiator, many times over.
const WINDOW: usize = 2048;
/// Of one among many: no more than twice what it is told are in flight.
const LEAST_WINDOW: usize = 256;
/// Windows are whole while these are not more than so many writes.
const MAX_WRITES: usize = 1 << 17;
/// Half of the tags that Linux counts round.
const LIFESPAN: u64 = 16_384;
/// No network delivers a frame later than that.
const LIFETIME: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    const WHO: Mac = Mac([2, 0, 0, 0, 0, 1]);

    fn write(block: u64, digest: u32) -> WriteIdentity {
        WriteIdentity { unit: 0, command: 0x34, sectors: 2, block, digest }
    }

    #[test]
    fn a_write_is_new_once() {
        let (mut recent, now) = (Recent::default(), Instant::now());
        assert_eq!(recent.on_write(WHO, 7, write(1, 1), now), WriteHistory::New);
        assert_eq!(recent.on_write(WHO, 7, write(1, 1), now), WriteHistory::InFlight);
        recent.on_answer(WHO, 7, 0x40, 0, now);
        assert_eq!(recent.on_write(WHO, 7, write(1, 1), now), WriteHistory::Done { status: 0x40, error: 0 });
        assert_eq!(
            recent.on_write(Mac([4; 6]), 7, write(1, 1), now),
            WriteHistory::New,
            "of another initiator"
        );
        assert_eq!(recent.on_write(WHO, 7, write(1, 1), now + LIFETIME), WriteHistory::New, "much later");
        recent.on_silence(WHO, 7);
        assert_eq!(
            recent.on_write(WHO, 7, write(1, 1), now + LIFETIME),
            WriteHistory::New,
            "it was never done"
        );
    }

    #[test]
    fn who_uses_tags_again_has_all_its_writes_done() {
        let now = Instant::now();
        for other in [write(2, 1), write(1, 2)] {
            let mut recent = Recent::default();
            assert_eq!(recent.on_write(WHO, 7, write(1, 1), now), WriteHistory::New);
            recent.on_answer(WHO, 7, 0x40, 0, now);
            assert_eq!(recent.on_write(WHO, 7, other, now), WriteHistory::New);
            assert_eq!(recent.on_write(WHO, 7, write(1, 1), now), WriteHistory::New);
        }
        let mut recent = Recent::default();
        recent.on_write(WHO, 7, write(1, 1), now);
        recent.on_answer(WHO, 7, 0x40, 0, now);
        recent.on_other(WHO, 0, 7, now);
        assert_eq!(recent.on_write(WHO, 7, write(1, 1), now), WriteHistory::New);
    }

    #[test]
    fn tags_may_come_again_after_many_commands() {
        let (mut recent, now) = (Recent::default(), Instant::now());
        recent.on_write(WHO, 7, write(1, 1), now);
        recent.on_answer(WHO, 7, 0x40, 0, now);
        (0..LIFESPAN as u32).for_each(|n| recent.on_other(WHO, 0, 100 + n, now));
        recent.on_other(WHO, 0, 7, now);
        assert_eq!(recent.on_write(WHO, 7, write(2, 1), now), WriteHistory::New);
        assert_eq!(recent.on_write(WHO, 7, write(2, 1), now), WriteHistory::InFlight, "it still counts");
    }

    /// A tag as Linux makes it.
    fn linux(count: u32) -> u32 {
        (count & 0x7fff) << 16 | 0x1234
    }

    /// What becomes of a write that is late, after another was done in its place and a newer one
    /// after that. So many commands were seen before.
    fn late_write(before: u32, tag: impl Fn(u32) -> u32) -> (WriteHistory, WriteHistory) {
        let (mut recent, now) = (Recent::default(), Instant::now());
        for n in 0..before {
            recent.on_write(WHO, tag(n), write(n.into(), 0), now);
            recent.on_answer(WHO, tag(n), 0x40, 0, now);
        }
        let [old, again, newer, meant] = [0, 1, 2, 3].map(|n| tag(before.wrapping_add(n)));
        for (tag, digest) in [(again, 1), (newer, 2)] {
            assert_eq!(recent.on_write(WHO, tag, write(7, digest), now), WriteHistory::New);
            recent.on_answer(WHO, tag, 0x40, 0, now);
        }
        let late = recent.on_write(WHO, old, write(7, 1), now);
        (late, recent.on_write(WHO, meant, write(7, 1), now))
    }

    #[test]
    fn a_late_write_whose_repetition_under_a_new_tag_was_done_is_not_done_again() {
        let done = WriteHistory::Done { status: 0x40, error: 0 };
        for before in [100, 32_766, 40_000] {
            assert_eq!(late_write(before, linux), (done, WriteHistory::New), "after {before}");
        }
        assert_eq!(late_write(10, linux), (WriteHistory::New, WriteHistory::New), "it may not be counting");
        let (places, others) = (|n: u32| 0x0b00_0000 | n << 7, |n: u32| n.wrapping_mul(0x9e37_79b9));
        assert_eq!(late_write(1000, places), (WriteHistory::New, WriteHistory::New), "these do not count");
        assert_eq!(late_write(1000, others), (WriteHistory::New, WriteHistory::New), "nor do these");
    }

    #[test]
    fn a_tag_that_comes_again_later_leaves_nothing_of_what_it_was() {
        let (mut recent, mut now) = (Recent::default(), Instant::now());
        for round in 0..3 {
            for n in 1..1000 {
                assert_eq!(recent.on_write(WHO, linux(n), write(n.into(), round), now), WriteHistory::New);
                recent.on_answer(WHO, linux(n), 0x40, 0, now);
            }
            now += LIFETIME;
        }
        let initiator = &recent.initiators[&WHO];
        assert!(initiator.counts[0].is_trusted());
        assert_eq!((initiator.writes.len(), initiator.order.len()), (999, 999));
        assert!(initiator.done.keys().all(|identity| identity.digest == 2), "of the last round");
        // Sent before, by its count, one that was done in the first round only.
        assert_eq!(recent.on_write(WHO, linux(0), write(500, 0), now), WriteHistory::New);
    }

    #[test]
    fn windows_are_smaller_when_there_are_many() {
        assert_eq!([0, 1, 64].map(window), [WINDOW; 3]);
        assert_eq!((window(128), window(MAX_INITIATORS)), (WINDOW / 2, LEAST_WINDOW));
        let (mut recent, now) = (Recent::default(), Instant::now());
        let sender = |n: usize| Mac([6, 6, 6, 6, (n >> 8) as u8, n as u8]);
        for (who, tag) in (0..600).flat_map(|tag| (0..256).map(move |who| (who, tag))) {
            recent.on_write(sender(who), tag, write(tag.into(), 0), now);
        }
        let kept: usize = recent.initiators.values().map(|initiator| initiator.writes.len()).sum();
        assert_eq!(kept, MAX_WRITES);
    }

    #[test]
    fn only_so_much_is_remembered() {
        let (mut recent, now) = (Recent::default(), Instant::now());
        for tag in 0..WINDOW as u32 + 1 {
            recent.on_write(WHO, tag, write(tag.into(), 0), now);
        }
        let initiator = &recent.initiators[&WHO];
        assert_eq!((initiator.writes.len(), initiator.order.len()), (WINDOW, WINDOW));
        assert_eq!(recent.on_write(WHO, 1, write(1, 0), now), WriteHistory::InFlight);
        assert_eq!(recent.on_write(WHO, 0, write(0, 0), now), WriteHistory::New);
        for forged in 0..MAX_INITIATORS as u32 {
            let [a, b, c, d] = forged.to_be_bytes();
            recent.on_write(Mac([6, 6, a, b, c, d]), 0, write(0, 0), now + Duration::from_secs(1));
        }
        assert_eq!(recent.initiators.len(), MAX_INITIATORS);
        assert!(!recent.initiators.contains_key(&WHO), "the one that was silent for longest");
    }
}
