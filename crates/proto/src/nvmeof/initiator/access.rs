//! How well this path leads to the namespace: asymmetric namespace access (ANA), as a host sees it.
//!
//! The admin queue reads the log page and hears of changes; an I/O queue is told, and meets a state that has changed
//! before anybody was told. Then nothing more is sent by this path until the page has been read again. Where there are other
//! paths, what met such a state is handed back, to be done there.

use super::queue::Queue;
use crate::session::PathRank;
use blockmux_volume::Io;
use blockmux_wire::nvme::log::{AnaGroupDescriptor, AnaHeader, AnaState};
use zerocopy::FromBytes;

/// What an I/O queue knows of its path.
pub(super) struct Access {
    pub(super) rank: PathRank,
    /// There are other paths.
    pub(super) has_others: bool,
    /// I/O for them.
    pub(super) misplaced: Vec<Io>,
}

impl Default for Access {
    fn default() -> Access {
        Access { rank: PathRank::Best, has_others: false, misplaced: Vec::new() }
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

impl Queue {
    /// There are other paths to the namespace: what cannot be done by this one now is handed back.
    pub(crate) fn set_other_paths(&mut self) {
        self.access.has_others = true;
    }

    /// How well the path leads to the namespace.
    #[inline]
    pub(crate) fn path_rank(&self) -> PathRank {
        self.access.rank
    }

    /// The admin queue has learned that.
    pub(crate) fn set_path_rank(&mut self, rank: PathRank) {
        self.access.rank = rank;
    }

    /// I/O that is to be done by another path.
    #[inline]
    pub(crate) fn poll_misplaced(&mut self) -> Option<Io> {
        self.access.misplaced.pop()
    }
}

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
