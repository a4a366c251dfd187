//! Who seems to be alive, by beats that members send through the cluster.
//!
//! Silence is measured in beats of one's own that came back, so a member that was stopped, or that
//! the cluster does not reach, suspects nobody.

use crate::table::{Generation, Incarnation, Table};
use std::collections::BTreeMap;

/// What a member tells all watchers of the table, itself included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beat {
    /// Who sends it.
    pub incarnation: Incarnation,
    /// Number of the beat, which grows.
    pub count: u64,
    /// The table that the sender knows.
    pub generation: Generation,
}

/// What was heard of the members that are up.
#[derive(Default)]
pub(super) struct Hearing {
    members: BTreeMap<Incarnation, Heard>,
}

#[derive(Clone, Copy, Default)]
struct Heard {
    /// Number of the last beat.
    count: u64,
    /// Own beats since then.
    silence: u32,
    /// Own beats since the silence was last too long.
    steady: u32,
}

impl Hearing {
    /// Listens to the members of this table, and to no others.
    pub(super) fn follow(&mut self, table: &Table) {
        let up = table.seniority();
        self.members.retain(|member, _| up.contains(member));
        for member in up {
            self.members.entry(member).or_default();
        }
    }

    /// A beat was received, perhaps late or twice. Returns whether it is a new one of ours.
    pub(super) fn on_beat(&mut self, beat: Beat, own: Incarnation, suspect_after: u32) -> bool {
        let Some(heard) = self.members.get_mut(&beat.incarnation).filter(|heard| beat.count > heard.count)
        else {
            return false;
        };
        heard.count = beat.count;
        heard.silence = 0;
        if beat.incarnation != own {
            return false;
        }
        for (member, heard) in &mut self.members {
            if *member != own {
                heard.silence = heard.silence.saturating_add(1);
            }
            heard.steady = if heard.silence < suspect_after { heard.steady.saturating_add(1) } else { 0 };
        }
        true
    }

    /// Own beats since the member's last beat.
    pub(super) fn silence(&self, member: Incarnation) -> u32 {
        self.members.get(&member).map_or(0, |heard| heard.silence)
    }

    /// Own beats for which the member was heard.
    pub(super) fn steady(&self, member: Incarnation) -> u32 {
        self.members.get(&member).map_or(0, |heard| heard.steady)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Client;

    fn hearing() -> (Hearing, Incarnation, Incarnation) {
        let mut table = Table::default();
        let [one, other] =
            ["a", "b"].map(|name| table.join(name, "address", &Client(name.to_owned())).unwrap());
        let mut hearing = Hearing::default();
        hearing.follow(&table);
        (hearing, one, other)
    }

    fn beat(incarnation: Incarnation, count: u64) -> Beat {
        Beat { incarnation, count, generation: Generation(1) }
    }

    #[test]
    fn silence_is_counted_in_new_beats_of_ones_own() {
        let (mut hearing, own, other) = hearing();
        for count in 1..4 {
            assert!(hearing.on_beat(beat(own, count), own, 3));
            // It comes twice.
            assert!(!hearing.on_beat(beat(own, count), own, 3));
        }
        assert_eq!((hearing.silence(other), hearing.silence(own)), (3, 0));
        assert_eq!((hearing.steady(other), hearing.steady(own)), (0, 3));
        assert!(!hearing.on_beat(beat(other, 5), own, 3));
        assert_eq!(hearing.silence(other), 0);
        hearing.on_beat(beat(own, 4), own, 3);
        // An old one proves nothing.
        hearing.on_beat(beat(other, 5), own, 3);
        assert_eq!((hearing.silence(other), hearing.steady(other)), (1, 1));
    }

    #[test]
    fn members_that_are_not_up_are_not_heard() {
        let (mut hearing, own, _) = hearing();
        assert!(!hearing.on_beat(beat(Incarnation(7), 1), own, 3));
        hearing.follow(&Table::default());
        assert!(!hearing.on_beat(beat(own, 1), own, 3));
    }
}
