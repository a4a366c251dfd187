//! Jobs that belong into one chart or block.

use crate::job::Job;
use crate::result::Row;

/// The rows of one job.
pub(super) type Group<'a> = Vec<&'a Row>;

/// Groups whose jobs have the same key, in the order in which the keys first appear.
pub(super) fn families<'a, 'r>(
    groups: &'a [Group<'r>],
    alike: impl Fn(&Job, &Job) -> bool,
) -> Vec<Vec<&'a Group<'r>>> {
    let mut families: Vec<Vec<&Group>> = Vec::new();
    for group in groups {
        match families.iter_mut().find(|family| alike(&family[0][0].job, &group[0].job)) {
            Some(family) => family.push(group),
            None => families.push(vec![group]),
        }
    }
    families
}
