//! Which member should serve which volume.
//!
//! The result is even: the numbers of volumes of two members differ by at most one, except where
//! pinned volumes alone make the difference. It moves as few volumes as possible, so an even spread
//! stays as it is, and moving one volume after another comes to an end.

use crate::table::Incarnation;

/// What is known of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The member that serves it now.
    pub owner: Option<Incarnation>,
    /// The member that an operator has chosen.
    pub pinned: Option<Incarnation>,
}

/// The member that should serve each volume, in the order of the volumes; `None` for all if there
/// are no members. Owners and pins that are not among the members count as none.
#[must_use]
pub fn spread(members: &[Incarnation], volumes: &[Share]) -> Vec<Option<Incarnation>> {
    let place = |member: Option<Incarnation>| members.iter().position(|other| Some(*other) == member);
    let mut bins: Vec<Bin> = members.iter().map(|_| Bin::default()).collect();
    let mut unowned = Vec::new();
    for (at, volume) in volumes.iter().enumerate() {
        if let Some(bin) = place(volume.pinned).and_then(|at| bins.get_mut(at)) {
            bin.pinned.push(at);
        } else if let Some(bin) = place(volume.owner).and_then(|at| bins.get_mut(at)) {
            bin.movable.push(at);
        } else {
            unowned.push(at);
        }
    }
    for volume in unowned {
        if let Some(bin) = bins.iter_mut().min_by_key(|bin| bin.len()) {
            bin.movable.push(volume);
        }
    }
    while let Some(volume) = take_from_fullest(&mut bins) {
        if let Some(bin) = bins.iter_mut().min_by_key(|bin| bin.len()) {
            bin.movable.push(volume);
        }
    }
    let mut owners = vec![None; volumes.len()];
    for (bin, member) in bins.iter().zip(members) {
        for at in bin.pinned.iter().chain(&bin.movable) {
            if let Some(owner) = owners.get_mut(*at) {
                *owner = Some(*member);
            }
        }
    }
    owners
}

/// The volumes of one member, by their places in the list.
#[derive(Default)]
struct Bin {
    pinned: Vec<usize>,
    movable: Vec<usize>,
}

impl Bin {
    fn len(&self) -> usize {
        self.pinned.len().saturating_add(self.movable.len())
    }
}

/// A volume of the fullest member that can give one, if another one has at least two fewer.
fn take_from_fullest(bins: &mut [Bin]) -> Option<usize> {
    let fewest = bins.iter().map(Bin::len).min()?;
    let fullest = bins.iter_mut().filter(|bin| !bin.movable.is_empty()).max_by_key(|bin| bin.len())?;
    if fullest.len() < fewest.saturating_add(2) {
        return None;
    }
    fullest.movable.pop()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn loads(members: &[Incarnation], owners: &[Option<Incarnation>]) -> Vec<usize> {
        members.iter().map(|member| owners.iter().filter(|owner| **owner == Some(*member)).count()).collect()
    }

    fn moves(volumes: &[Share], owners: &[Option<Incarnation>]) -> usize {
        volumes.iter().zip(owners).filter(|(volume, owner)| volume.owner != **owner).count()
    }

    /// Whether each volume has a member, pins are followed, and the rest is even.
    fn is_good(members: &[Incarnation], volumes: &[Share], owners: &[Option<Incarnation>]) -> bool {
        let pin = |volume: &Share| volume.pinned.filter(|pin| members.contains(pin));
        let is_placed = volumes.iter().zip(owners).all(|(volume, owner)| match pin(volume) {
            Some(pin) => *owner == Some(pin),
            None => owner.is_some_and(|owner| members.contains(&owner)),
        });
        let fewest = loads(members, owners).into_iter().min().unwrap_or(0);
        let is_even =
            volumes.iter().zip(owners).filter(|(volume, _)| pin(volume).is_none()).all(|(_, owner)| {
                owners.iter().filter(|other| *other == owner).count() <= fewest.saturating_add(1)
            });
        is_placed && is_even
    }

    fn shares() -> impl Strategy<Value = (Vec<Incarnation>, Vec<Share>)> {
        let member = || prop::option::weighted(0.7, (1..6u64).prop_map(Incarnation));
        let pin = prop::option::weighted(0.2, (1..6u64).prop_map(Incarnation));
        let share = (member(), pin).prop_map(|(owner, pinned)| Share { owner, pinned });
        let members = prop::sample::subsequence((1..5).map(Incarnation).collect::<Vec<_>>(), 0..=4);
        (members, prop::collection::vec(share, 0..12))
    }

    proptest! {
        #[test]
        fn the_spread_is_even_and_stays_as_it_is((members, volumes) in shares()) {
            let owners = spread(&members, &volumes);
            prop_assert_eq!(owners.len(), volumes.len());
            if members.is_empty() {
                prop_assert!(owners.iter().all(Option::is_none));
                return Ok(());
            }
            prop_assert!(is_good(&members, &volumes, &owners), "{:?}", owners);
            let settled: Vec<Share> = volumes.iter().zip(&owners)
                .map(|(volume, owner)| Share { owner: *owner, ..*volume }).collect();
            prop_assert_eq!(spread(&members, &settled), owners);
        }

        #[test]
        fn moving_one_volume_after_another_leads_to_the_spread((members, volumes) in shares()) {
            let mut now = volumes.clone();
            let first = moves(&now, &spread(&members, &now));
            for left in (0..first).rev() {
                let owners = spread(&members, &now);
                let at = (0..now.len()).find(|at| now[*at].owner != owners[*at]).unwrap();
                now[at].owner = owners[at];
                prop_assert_eq!(moves(&now, &spread(&members, &now)), left);
            }
        }
    }

    #[test]
    fn no_other_even_spread_moves_fewer_volumes() {
        let members: Vec<Incarnation> = (1..4).map(Incarnation).collect();
        let choices: Vec<Option<Incarnation>> =
            members.iter().copied().map(Some).chain([None, Some(Incarnation(9))]).collect();
        // Every way in which five volumes can have owners, one of them pinned.
        for code in 0..choices.len().pow(5) {
            let owner = |at: u32| choices[code / choices.len().pow(at) % choices.len()];
            let pinned = |at: u32| (at == 0 && code % 2 == 0).then_some(Incarnation(2));
            let volumes: Vec<Share> =
                (0..5).map(|at| Share { owner: owner(at), pinned: pinned(at) }).collect();
            let ours = moves(&volumes, &spread(&members, &volumes));
            let all = (0..members.len().pow(5)).map(|code| {
                (0..5).map(|at| Some(members[code / members.len().pow(at) % members.len()])).collect()
            });
            let least = all
                .filter(|owners: &Vec<Option<Incarnation>>| is_good(&members, &volumes, owners))
                .map(|owners| moves(&volumes, &owners))
                .min();
            assert_eq!(Some(ours), least, "{volumes:?}");
        }
    }
}
