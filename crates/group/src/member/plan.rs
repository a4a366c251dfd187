//! What the deciding member changes in the table: who has ended, who gets what, what moves.

use super::Settings;
use super::hearing::Hearing;
use crate::spread::{Share, spread};
use crate::table::{Decision, Incarnation, Place, Table, VolumeRecord};
use std::time::Duration;

/// What a member knows when it decides.
pub(super) struct Planner<'a> {
    pub(super) own: Incarnation,
    pub(super) hearing: &'a Hearing,
    pub(super) settings: &'a Settings,
    /// For how long it has seen no volume change its place.
    pub(super) quiet: Duration,
}

impl Planner<'_> {
    /// Changes the table if it is up to this member: to the one that joined first among those that
    /// it does not suspect.
    pub(super) fn decide(&self, table: &mut Table) {
        let up = table.seniority();
        if up.iter().find(|member| !self.suspects(**member)) != Some(&self.own) {
            return;
        }
        for member in up.into_iter().filter(|member| self.suspects(*member)) {
            // One without volumes is in nobody's way. If too many clients wait for their fence,
            // this one ends later.
            if has_volumes(table, member) && table.end(member).is_err() {
                return;
            }
        }
        self.retire(table);
        self.assign(table);
        self.rearrange(table);
    }

    fn suspects(&self, member: Incarnation) -> bool {
        self.hearing.silence(member) >= self.settings.suspect_after
    }

    fn retire(&self, table: &mut Table) {
        table.forget_retired();
        let retired = |volume: &&VolumeRecord| volume.decision == Decision::Retired;
        for name in names(table, retired) {
            table.leave(&name, None);
        }
    }

    /// Gives every free volume to a member.
    fn assign(&self, table: &mut Table) {
        if table.volumes().iter().all(|volume| volume.place != Place::Free) {
            return;
        }
        for (name, owner) in self.wanted(table, &self.candidates(table)) {
            if let Some(owner) = owner {
                table.assign(&name, owner);
            }
        }
    }

    /// Moves volumes to the members that should have them: all of those that drain or leave, and
    /// else one at a time. What no operator has asked for waits until it was quiet for a while.
    fn rearrange(&self, table: &mut Table) {
        if !table.to_fence().is_empty() {
            return;
        }
        let is_quiet = self.quiet >= self.settings.move_every;
        let is_changing =
            |volume: &VolumeRecord| matches!(volume.place, Place::Starting(_) | Place::Leaving { .. });
        // One that cannot start, or that its owner cannot release, holds nothing up for ever.
        let mut may_move = is_quiet || !table.volumes().iter().any(is_changing);
        for (name, to) in self.wanted(table, &self.reliable(table)) {
            let Some(volume) = table.volume(&name) else { continue };
            let Some(owner) = volume.place.owner() else { continue };
            if matches!(volume.place, Place::Leaving { .. }) || to == Some(owner) {
                continue;
            }
            let goes = match to {
                Some(_) if is_draining(table, owner) => true,
                Some(_) => may_move && (is_quiet || is_pinned_elsewhere(table, volume, owner)),
                // One that ends does not wait for others.
                None => is_leaving(table, owner),
            };
            if goes {
                may_move &= is_draining(table, owner);
                table.leave(&name, to);
            }
        }
    }

    /// Who should have each volume, if these members share them.
    fn wanted(&self, table: &Table, members: &[Incarnation]) -> Vec<(String, Option<Incarnation>)> {
        let volumes = || table.volumes().iter().filter(|volume| volume.decision != Decision::Retired);
        let shares: Vec<Share> = volumes()
            .map(|volume| Share {
                owner: volume.place.next_owner().or(volume.place.owner()),
                pinned: pinned(table, volume),
            })
            .collect();
        volumes().map(|volume| volume.name.clone()).zip(spread(members, &shares)).collect()
    }

    /// Members that get volumes: those that are reliable; if there are none, all that may be alive.
    fn candidates(&self, table: &Table) -> Vec<Incarnation> {
        let reliable = self.reliable(table);
        if !reliable.is_empty() {
            return reliable;
        }
        let mut all = table.seniority();
        all.retain(|member| !self.suspects(*member) && !is_leaving(table, *member));
        let willing: Vec<Incarnation> =
            all.iter().copied().filter(|member| !is_draining(table, *member)).collect();
        if willing.is_empty() { all } else { willing }
    }

    /// Members that have volumes, or were heard for long enough, unless an operator drains them.
    fn reliable(&self, table: &Table) -> Vec<Incarnation> {
        let strikes = |member| table.up(member).map_or(0, |member| u32::from(member.strikes));
        let needs = |member| self.settings.stable_after.saturating_mul(1 << strikes(member).min(16));
        let is_reliable = |member| has_volumes(table, member) || self.hearing.steady(member) >= needs(member);
        let all = table.seniority().into_iter();
        all.filter(|member| !is_draining(table, *member) && is_reliable(*member)).collect()
    }
}

/// Whether an operator waits for the volume to move to another member.
fn is_pinned_elsewhere(table: &Table, volume: &VolumeRecord, owner: Incarnation) -> bool {
    pinned(table, volume).is_some_and(|pin| pin != owner)
}

/// Whether the member has volumes, or is the next to have one.
fn has_volumes(table: &Table, member: Incarnation) -> bool {
    let mut places = table.volumes().iter().map(|volume| volume.place);
    places.any(|place| place.owner() == Some(member) || place.next_owner() == Some(member))
}

fn is_draining(table: &Table, member: Incarnation) -> bool {
    table.up(member).is_some_and(|member| member.is_draining || member.is_leaving)
}

fn is_leaving(table: &Table, member: Incarnation) -> bool {
    table.up(member).is_some_and(|member| member.is_leaving)
}

/// The member that an operator has chosen, if it is up.
fn pinned(table: &Table, volume: &VolumeRecord) -> Option<Incarnation> {
    let Decision::Pinned(name) = &volume.decision else { return None };
    table.member(name).filter(|member| member.is_up).map(|member| member.incarnation)
}

fn names(table: &Table, is_so: impl Fn(&&VolumeRecord) -> bool) -> Vec<String> {
    table.volumes().iter().filter(is_so).map(|volume| volume.name.clone()).collect()
}
