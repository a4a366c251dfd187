//! How well this path leads to the namespace: asymmetric namespace access (ANA), as a host sees it.
//!
//! The admin queue reads the log page and hears of changes; an I/O queue is told, and meets a state
//! that has changed before anybody was told. Then nothing more is sent by this path until the page
//! has been read again. Where there are other paths, what met such a state is handed back, to be
//! done there.
//!
//! A path may also fail what goes by it, between the controller and the namespace or on the way to
//! the controller (Path Related Status that is not of ANA). That says nothing of ANA's state, and
//! may be over at once or never. What it met is handed back, and the path is left alone for a
//! while, which grows as long as nothing gets through; where there is no other, the I/O waits for
//! it.

use super::queue::NamespaceQueue;
use crate::session::PathRank;
use blockmux_wire::nvme::log::{AnaGroupDescriptor, AnaHeader, AnaState};
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

/// Whether the path fails what goes by it.
#[derive(Default)]
pub(super) struct PathFailures {
    /// Pauses since something got through.
    pauses: u32,
    /// Until when it is left alone, if it is.
    until: Option<Instant>,
}

impl PathFailures {
    /// Something failed on the way. What was sent before the path was left alone is part of the
    /// same failure.
    #[cold]
    pub(super) fn on_failure(&mut self, now: Instant) {
        if self.until.is_none() {
            let pause = FIRST_PAUSE.saturating_mul(1_u32.checked_shl(self.pauses).unwrap_or(u32::MAX));
            self.pauses = self.pauses.saturating_add(1);
            self.until = now.checked_add(pause.min(LONGEST_PAUSE));
        }
    }

    /// Something got through.
    #[inline]
    pub(super) fn on_good(&mut self) {
        if self.until.is_none() {
            self.pauses = 0;
        }
    }

    /// When to call [`PathFailures::on_timeout`].
    #[inline]
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.until
    }

    pub(super) fn on_timeout(&mut self, now: Instant) {
        self.until = self.until.filter(|until| now < *until);
    }
}

/// How well the path leads to a group of that state.
pub(super) fn rank(state: AnaState) -> PathRank {
    match state {
        AnaState::OPTIMIZED => PathRank::Best,
        AnaState::NON_OPTIMIZED => PathRank::Good,
        _ => PathRank::Unusable,
    }
}

/// What the log page says of a group, if it has it.
pub(super) fn state_of(page: &[u8], group: u32) -> Option<AnaState> {
    let (header, mut rest) = AnaHeader::read_from_prefix(page).ok()?;
    for _ in 0..header.nagd.get() {
        let (found, tail) = AnaGroupDescriptor::read_from_prefix(rest).ok()?;
        if found.agid.get() == group {
            return Some(AnaState(found.state & STATE_MASK));
        }
        let namespaces = (found.nnsid.get() as usize).saturating_mul(size_of::<u32>());
        rest = tail.get(namespaces..)?;
    }
    None
}

/// How long the log page is with so many groups, in bytes, as far as we read it.
pub(super) fn page_len(groups: u32) -> u32 {
    let groups = groups.min(MAX_GROUPS).saturating_mul(size_of::<AnaGroupDescriptor>() as u32);
    groups.saturating_add(size_of::<AnaHeader>() as u32)
}

impl NamespaceQueue {
    /// How well the path leads to the namespace.
    #[inline]
    pub(crate) fn path_rank(&self) -> PathRank {
        if self.set.failing.until.is_some() {
            return self.set.rank.max(PathRank::Failing);
        }
        self.set.rank
    }

    /// The admin queue has learned that.
    pub(crate) fn set_path_rank(&mut self, rank: PathRank) {
        self.set.rank = rank;
    }
}

/// How long a path is left alone that fails what goes by it, for the first time.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// ANA state, in the low four bits.
const STATE_MASK: u8 = 0x0f;
/// The most groups that are read of.
const MAX_GROUPS: u32 = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::{FromZeros, IntoBytes};

    /// Group 7 with two namespaces, and group 9.
    fn page(seven: AnaState, nine: AnaState) -> Vec<u8> {
        let group = |agid: u32, nnsid: u32, state: AnaState| AnaGroupDescriptor {
            agid: agid.into(),
            nnsid: nnsid.into(),
            state: 0x50 | state.0,
            ..AnaGroupDescriptor::new_zeroed()
        };
        let header = AnaHeader { nagd: 2.into(), ..AnaHeader::new_zeroed() };
        let (seven, nine) = (group(7, 2, seven), group(9, 0, nine));
        [header.as_bytes(), seven.as_bytes(), &[9; 8], nine.as_bytes(), b"rubbish that follows"].concat()
    }

    #[test]
    fn the_state_is_that_of_the_namespaces_group() {
        for (state, expected) in [
            (AnaState::OPTIMIZED, PathRank::Best),
            (AnaState::NON_OPTIMIZED, PathRank::Good),
            (AnaState::INACCESSIBLE, PathRank::Unusable),
            (AnaState::PERSISTENT_LOSS, PathRank::Unusable),
            (AnaState::CHANGE, PathRank::Unusable),
        ] {
            let other = AnaState::OPTIMIZED;
            assert_eq!(state_of(&page(state, other), 7).map(rank), Some(expected));
            assert_eq!(state_of(&page(other, state), 9).map(rank), Some(expected));
        }
    }

    #[test]
    fn a_path_that_fails_is_left_alone_for_longer_and_longer_until_something_gets_through() {
        let (mut failing, mut now) = (PathFailures::default(), Instant::now());
        let mut pause = |failing: &mut PathFailures| {
            assert_eq!(failing.poll_timeout(), None);
            failing.on_failure(now);
            // What was under way fails, too, or gets through.
            failing.on_failure(now);
            failing.on_good();
            let until = failing.poll_timeout().unwrap();
            let pause = until.duration_since(now);
            now = until;
            failing.on_timeout(now);
            pause.as_millis()
        };
        let pauses: Vec<_> = (0..9).map(|_| pause(&mut failing)).collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        failing.on_good();
        assert_eq!(pause(&mut failing), 10);
    }

    #[test]
    fn a_page_that_is_cut_off_or_lies_tells_nothing() {
        let whole = page(AnaState::OPTIMIZED, AnaState::OPTIMIZED);
        assert_eq!(state_of(&whole, 8), None);
        for len in 0..16 + 32 + 8 + 32 {
            assert_eq!(state_of(&whole[..len], 9), None, "{len}");
        }
        let mut lies = whole;
        lies[16 + 4..16 + 8].fill(0xff);
        assert_eq!(state_of(&lies, 9), None);
        assert_eq!(page_len(u32::MAX), 16 + 1024 * 32);
    }
}
