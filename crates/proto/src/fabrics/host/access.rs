//! Asymmetric namespace access (ANA) and path failures, as a host sees them.
//!
//! The admin queue reads the ANA log page and receives change events. An I/O queue is notified of
//! the state, or learns of a change by a command's status. Then it sends nothing more on this path
//! until the log page has been read again. If there are other paths, a command that met such a
//! status is handed back, to be sent on another path.
//!
//! A path may also fail commands for other reasons: Path Related Status other than ANA, by the
//! controller or on the way to it. That does not change the ANA state, and may be transient or
//! permanent. The failed command is handed back and the path is not used for a while. The pause
//! grows until a command succeeds. If there is no other path, the I/O waits.

use super::namespace_queue::NamespaceQueue;
use crate::driver::session::PathRank;
use blockmux_wire::nvme::log::{AnaGroupDescriptor, AnaHeader, AnaState};
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

/// Path failures, and the pause that follows them.
#[derive(Default)]
pub(super) struct PathFailures {
    /// Number of pauses since a command succeeded.
    pauses: u32,
    /// End of the current pause.
    until: Option<Instant>,
}

impl PathFailures {
    /// Records a path failure. Failures during a pause belong to the failure that began it.
    #[cold]
    pub(super) fn on_failure(&mut self, now: Instant) {
        if self.until.is_none() {
            let pause = FIRST_PAUSE.saturating_mul(1_u32.checked_shl(self.pauses).unwrap_or(u32::MAX));
            self.pauses = self.pauses.saturating_add(1);
            self.until = now.checked_add(pause.min(MAX_PAUSE));
        }
    }

    /// Records a successful command.
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

/// Rank of a path whose group is in this ANA state.
pub(super) fn rank(state: AnaState) -> PathRank {
    match state {
        AnaState::OPTIMIZED => PathRank::Best,
        AnaState::NON_OPTIMIZED => PathRank::Good,
        _ => PathRank::Unusable,
    }
}

/// ANA state of a group in the log page, if it is listed.
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

/// Length in bytes of the log page that is read for `groups` groups.
pub(super) fn page_len(groups: u32) -> u32 {
    let groups = groups.min(MAX_GROUPS).saturating_mul(size_of::<AnaGroupDescriptor>() as u32);
    groups.saturating_add(size_of::<AnaHeader>() as u32)
}

impl NamespaceQueue {
    /// Rank of this path to the namespace.
    #[inline]
    pub(crate) fn path_rank(&self) -> PathRank {
        if self.set.failing.until.is_some() {
            return self.set.rank.max(PathRank::Failing);
        }
        self.set.rank
    }

    /// Sets the rank that the admin queue has learned.
    pub(crate) fn set_path_rank(&mut self, rank: PathRank) {
        self.set.rank = rank;
    }
}

/// Length of the first pause after a path failure.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// Mask of the ANA state, in the low four bits.
const STATE_MASK: u8 = 0x0f;
/// Most groups that are read.
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
        [header.as_bytes(), seven.as_bytes(), &[9; 8], nine.as_bytes(), b"trailing bytes"].concat()
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
    fn pauses_of_a_failing_path_grow_until_a_command_succeeds() {
        let (mut failing, mut now) = (PathFailures::default(), Instant::now());
        let mut pause = |failing: &mut PathFailures| {
            assert_eq!(failing.poll_timeout(), None);
            failing.on_failure(now);
            // Commands in flight fail too, or succeed.
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
    fn a_truncated_or_inconsistent_log_page_has_no_state() {
        let whole = page(AnaState::OPTIMIZED, AnaState::OPTIMIZED);
        assert_eq!(state_of(&whole, 8), None);
        for len in 0..16 + 32 + 8 + 32 {
            assert_eq!(state_of(&whole[..len], 9), None, "{len}");
        }
        let mut inconsistent = whole;
        inconsistent[16 + 4..16 + 8].fill(0xff);
        assert_eq!(state_of(&inconsistent, 9), None);
        assert_eq!(page_len(u32::MAX), 16 + 1024 * 32);
    }
}
