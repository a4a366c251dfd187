//! Goals of a comparison: ratios of medians.

use serde_json::{Value, json};

/// One goal.
#[derive(Clone, Debug)]
pub(crate) struct Goal {
    /// The compared figures, in words.
    pub(crate) what: String,
    pub(crate) bound: Bound,
    /// The measured ratio; `None` if one side was not measured.
    pub(crate) found: Option<f64>,
}

/// Whether the ratio must be at least or at most a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Goal {
    /// A goal for the ratio of two medians.
    pub(crate) fn ratio(what: String, bound: Bound, ours: Option<f64>, theirs: Option<f64>) -> Goal {
        let found = ours.zip(theirs).filter(|(_, theirs)| *theirs > 0.0).map(|(ours, theirs)| ours / theirs);
        Goal { what, bound, found }
    }

    /// Whether the goal is reached; `None` if the ratio was not measured.
    pub(crate) fn is_reached(&self) -> Option<bool> {
        self.found.map(|found| match self.bound {
            Bound::AtLeast(least) => found >= least,
            Bound::AtMost(most) => found <= most,
        })
    }

    /// The result in one word, or a dash if the ratio was not measured.
    pub(crate) fn status(&self) -> &'static str {
        match self.is_reached() {
            Some(true) => "reached",
            Some(false) => "missed",
            None => "-",
        }
    }

    /// The goal, such as `≥ 4.00`.
    pub(crate) fn goal_text(&self) -> String {
        match self.bound {
            Bound::AtLeast(least) => format!("≥ {least:.2}"),
            Bound::AtMost(most) => format!("≤ {most:.2}"),
        }
    }

    /// The ratio, or a dash.
    pub(crate) fn ratio_text(&self) -> String {
        self.found.map_or_else(|| "-".to_owned(), |found| format!("{found:.2}"))
    }

    pub(crate) fn json(&self) -> Value {
        let (bound, value) = match self.bound {
            Bound::AtLeast(least) => ("at_least", least),
            Bound::AtMost(most) => ("at_most", most),
        };
        json!({ "goal": self.what, bound: value, "ratio": self.found, "reached": self.is_reached() })
    }
}

/// The goals that were measured: a filter of cells or clients omits most.
pub(crate) fn measured(goals: &[Goal]) -> impl Iterator<Item = &Goal> {
    goals.iter().filter(|goal| goal.found.is_some())
}

/// Summary of goals, such as `1 reached, 1 missed, 1 not measured`.
pub(crate) fn summary(goals: &[Goal]) -> String {
    let count = |status| goals.iter().filter(|goal| goal.is_reached() == status).count();
    let (reached, missed, unknown) = (count(Some(true)), count(Some(false)), count(None));
    format!("{reached} reached, {missed} missed, {unknown} not measured")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_lies_on_its_side_of_the_bound() {
        let goal = |bound, ours| Goal::ratio("x".into(), bound, Some(ours), Some(2.0)).status();
        assert_eq!([2.0, 1.9].map(|ours| goal(Bound::AtLeast(1.0), ours)), ["reached", "missed"]);
        assert_eq!([2.0, 2.1].map(|ours| goal(Bound::AtMost(1.0), ours)), ["reached", "missed"]);
    }

    #[test]
    fn a_goal_without_one_side_was_not_measured() {
        for (ours, theirs) in [(None, Some(1.0)), (Some(1.0), None), (Some(1.0), Some(0.0))] {
            let goal = Goal::ratio("x".into(), Bound::AtLeast(1.0), ours, theirs);
            assert_eq!((goal.status(), goal.ratio_text().as_str()), ("-", "-"));
            assert!(goal.json()["reached"].is_null());
        }
    }
}
