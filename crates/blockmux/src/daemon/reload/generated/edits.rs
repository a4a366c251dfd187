//! Generated edits of single objects: what they lead to is what a start with the result serves.

use super::daemon::TestDaemon;
use super::{Configs, assert_same, for_each_seed, lines};
use crate::api::edit::{ANY, ConfigEdit, EditOperation, EditOptions, ListQuery, ObjectItem, ObjectPath};
use crate::api::plan::PlanReport;
use crate::api::request::{Answer, Request};
use crate::daemon::reload::edit;
use crate::daemon::reload::objects::Objects;
use crate::daemon::reload::plan::Schema;
use crate::protocol::Frontends;
use serde_json::{Map, Value};

impl Configs {
    fn pick<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        all.get(self.random.below(all.len().max(1) as u64) as usize)
    }

    /// The objects at a path in a config that is like the present one.
    fn similar(&mut self, path: &[String]) -> Vec<ObjectItem> {
        let own = self.place.text();
        let text = self.genome.changed(&mut self.random, 6).text(self.place.ip());
        self.place.write(&text);
        let model = self.place.model();
        self.place.write(&own);
        let Ok(mut model) = model else { return Vec::new() };
        let schema = Schema::new(&Frontends::default());
        let objects = Objects::new(&schema, &mut model.table);
        objects.list(&ObjectPath(path.to_vec()), &ListQuery::default()).map_or(Vec::new(), |list| list.items)
    }

    /// An edit of one object that the daemon has, or could have.
    fn edit(&mut self, daemon: &TestDaemon) -> Option<ConfigEdit> {
        let list = |path: &[String]| {
            let found =
                edit::list(&daemon.control.reloader, &ObjectPath(path.to_vec()), &ListQuery::default());
            found.map_or(Vec::new(), |list| list.items)
        };
        let mut path = vec![(*self.pick(&KINDS)?).to_owned()];
        let parts: &[&str] = match &*path[0] {
            "iscsi_target" | "srp_target" => &["luns", "acl"],
            "nvme_subsystem" => &["namespaces", "namespace", "host", "hosts", "ana_group"],
            _ => &[],
        };
        if !parts.is_empty() && self.random.below(2) == 0 {
            path.push(self.pick(&list(&path))?.name.clone());
            path.push((*self.pick(parts)?).to_owned());
        }
        let is_own = self.random.below(3) == 0;
        let found = if is_own { list(&path) } else { self.similar(&path) };
        let ObjectItem { name, object } = self.pick(&found)?.clone();
        path.push(name);
        let object = object.as_object().cloned().unwrap_or_default();
        let kind = self.random.below(4);
        let operation = match kind {
            0 if is_own => EditOperation::Remove,
            0 => EditOperation::Put(object),
            1 => {
                let without = |(key, _): (String, Value)| (key, Value::Null);
                let key = object.into_iter().next_back().map(without);
                EditOperation::Set(Map::from_iter(key))
            }
            2 => EditOperation::Set(object),
            _ => EditOperation::Put(object),
        };
        let if_none_match = (kind == 0 && !is_own).then(|| ANY.to_owned());
        let options = EditOptions { force: true, if_none_match, ..EditOptions::default() };
        Some(ConfigEdit { path: ObjectPath(path), operation, options })
    }
}

fn plan_of(answer: Answer) -> PlanReport {
    match answer {
        Answer::Plan(report) => report,
        answer => panic!("an edit has another answer: {answer:?}"),
    }
}

#[test]
fn edits_lead_to_the_state_of_a_start_with_what_they_save() {
    for_each_seed(10, |seed| {
        let mut configs = Configs::new(seed);
        configs.write_next();
        let daemon = configs.place.start().unwrap();
        let mut running = daemon.snapshot();
        let mut waits = false;
        for _ in 0..EDITS {
            let Some(edit) = configs.edit(&daemon) else { continue };
            let dry_run =
                ConfigEdit { options: EditOptions { dry_run: true, ..edit.options.clone() }, ..edit.clone() };
            let planned = daemon.change(&Request::Edit(dry_run));
            assert_same("a dry run has changed something", &running, &daemon.snapshot());
            let answer = daemon.change(&Request::Edit(edit.clone()));
            configs.texts.push(format!("# {edit} {:?}: {answer:?}", edit.operation));
            let now = daemon.snapshot();
            let done = match answer {
                Answer::Plan(done) => done,
                Answer::Noted { answer, .. } => plan_of(*answer),
                answer => {
                    assert!(matches!(answer, Answer::Failed(_)), "{answer:?}");
                    assert_same("a refused edit has changed something", &running, &now);
                    continue;
                }
            };
            // The sessions that are affected may have ended meanwhile.
            let texts = |report: &PlanReport| -> Vec<String> {
                report.changes.iter().map(|one| one.change.clone()).collect()
            };
            assert_eq!((texts(&done), &done.warnings), (texts(&plan_of(planned)), &Vec::new()));
            waits |= !done.next_start.is_empty();
            running = now;
        }
        let exported = daemon.exported();
        let saved = daemon.change(&Request::Save);
        configs.texts.push(format!("# save: {saved:?}"));
        assert!(matches!(saved, Answer::Message(_)), "what edits have made can be saved: {exported}");
        let left = lines(&daemon.plan().unwrap());
        assert!(left.iter().all(|line| waits && line.starts_with("later: ")), "{left:?}: {exported}");
        if waits {
            configs.place.write(&exported);
        }
        daemon.stop();
        let again = configs.place.start().unwrap();
        assert_same("a start with what was saved differs", &running, &again.snapshot());
        again.stop();
        configs.place.check_files();
    });
}

/// The lists of objects that configs have.
const KINDS: [&str; 8] =
    ["volume", "volume", "iscsi_target", "nvme_subsystem", "srp_target", "nbd", "iscsi", "nvme_tcp"];
/// Number of edits with each seed.
const EDITS: usize = 8;
