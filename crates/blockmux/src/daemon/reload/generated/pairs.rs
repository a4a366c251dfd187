//! Generated pairs of configs without a daemon: the plan between any two leads from one to what a
//! start with the other one runs, apart from what it says waits for the next start.

use super::{Configs, for_each_seed};
use crate::api::plan::PlanReport;
use crate::daemon::reload::model::{Model, resize_between};
use crate::daemon::reload::plan::{ConfigChange, Schema, VolumeStep, diff, volume_steps};
use crate::daemon::reload::{Plan, neighbours, open_twice};
use crate::protocol::Frontends;
use std::sync::atomic::{AtomicU64, Ordering};

/// The plan from the running config to a new one, as far as the texts of both tell; `None` if it is
/// refused.
fn plan_between(running: &Model, desired: &Model) -> Option<Plan> {
    let schema = Schema::new(&Frontends::default());
    let changes = diff(&schema, &running.table, &desired.table);
    let specs = |name: &str| Some((running.volume(name)?, desired.volume(name)?));
    let resize = |name: &str| {
        specs(name).and_then(|(before, after)| resize_between(&before.entry.spec, &after.entry.spec))
    };
    let mut steps = volume_steps(&changes, |name| resize(name).is_some());
    let shrinks = |name: &String| {
        let sizes = specs(name).map(|(before, after)| (before.entry.spec.size(), after.entry.spec.size()));
        sizes.is_some_and(|(before, after)| after < before)
    };
    let is_shrunk = steps.iter().any(|(name, step)| *step == VolumeStep::Resize && shrinks(name));
    let overlap = neighbours::mark(&mut steps, running, desired);
    let open_twice = open_twice::mark(&mut steps, running, desired);
    let is_refused = is_shrunk || overlap.is_some() || open_twice.is_some();
    let (disks, report) = (Vec::new(), PlanReport::default());
    let plan =
        Plan { schema, changes, steps, disks, given_up: None, overlap, open_twice, conflict: None, report };
    (!is_refused).then_some(plan)
}

impl Configs {
    /// The model of a text, which `blockmux check` accepts.
    fn model_of(&self, text: &str) -> Model {
        self.place.write(text);
        self.place.check().unwrap();
        self.place.model().unwrap()
    }

    /// Applies a new config to the model of the running one, checks the result, and returns it;
    /// `None` if the plan is refused.
    fn applied(&self, running: &Model, desired: &Model) -> Option<Model> {
        let plan = plan_between(running, desired)?;
        let now = desired.without_pending(running, &plan);
        let schema = &plan.schema;
        let waits: Vec<&ConfigChange> = plan.changes.iter().filter(|change| plan.waits(change)).collect();
        let left = diff(schema, &now.table, &desired.table);
        assert_eq!(left.iter().collect::<Vec<_>>(), waits, "what is left is what waits");
        for model in [&now, desired] {
            let exported = model.text();
            let again = self.model_of(&exported);
            assert_eq!(diff(schema, &model.table, &again.table), [], "{exported}");
            assert!(again.is_same(model, schema), "{exported}");
        }
        let next = plan_between(&now, desired).expect("what waits is not refused");
        assert_eq!(next.changes.iter().collect::<Vec<_>>(), waits, "the next plan says the same");
        let after = desired.without_pending(&now, &next);
        assert!(after.is_same(&now, schema), "a second reload changes something");
        Some(now)
    }
}

#[test]
fn a_plan_leads_from_any_config_to_any_other_one() {
    let (applied, refused) = (AtomicU64::new(0), AtomicU64::new(0));
    for_each_seed(40, |seed| {
        let mut configs = Configs::new(seed);
        configs.write_next();
        let mut running = configs.place.model().unwrap();
        for _ in 0..PAIRS {
            configs.write_next();
            let desired = configs.place.model().unwrap();
            let now = configs.applied(&running, &desired);
            if now.is_some() { &applied } else { &refused }.fetch_add(1, Ordering::Relaxed);
            running = now.unwrap_or(desired);
        }
    });
    let (applied, refused) = (applied.into_inner(), refused.into_inner());
    eprintln!("{applied} pairs applied, {refused} refused");
    assert!(applied > refused, "most pairs are applied: {applied} and {refused}");
}

/// Number of pairs with each seed.
const PAIRS: usize = 10;
