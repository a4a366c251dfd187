//! Records in the config what a command has done itself: a volume that it has resized, and a disk
//! that it has attached or detached.

use super::edit::Edits;
use super::model::Model;
use super::plan::{ConfigChange, Schema, diff};
use super::{Changing, Reloader, RunningConfig};
use crate::api::edit::{ConfigEdit, EditOperation, EditOptions, ObjectPath};
use crate::api::plan::PlanReport;
use crate::daemon::attachment::{ATTACHMENTS, Attachment};
use crate::daemon::reload::json::json_of_table;
use crate::daemon::setup::VOLUMES;
use blockmux_volume::Spec;
use serde_json::Value as Json;
use std::sync::Arc;
use toml::Value;

impl Reloader {
    /// Records the new size of a volume, in bytes; returns a note about the config file for the
    /// user.
    pub(in crate::daemon) fn record_size(
        &self,
        changing: &Changing<'_>,
        name: &str,
        size: u64,
    ) -> Option<String> {
        self.record(changing, |model, _| model.set_size(name, size).unwrap_or_default()).1
    }

    /// Records an attachment; returns the effects, and a note about the config file for the user.
    pub(in crate::daemon) fn record_attachment(
        &self,
        changing: &Changing<'_>,
        volume: &str,
        attached: Option<&Attachment>,
    ) -> (Vec<String>, Option<String>) {
        let operation = match attached.map(|entry| json_of_table(&entry.table())) {
            Some(Json::Object(entry)) => EditOperation::Put(entry),
            _ => EditOperation::Remove,
        };
        let path = ObjectPath([ATTACHMENTS.0, volume].map(str::to_owned).to_vec());
        let edit = ConfigEdit { path, operation, options: EditOptions::default() };
        let edits = Edits { objects: vec![edit], ..Edits::default() };
        let frontends = self.frontends.get();
        // It fails only where nothing is to be removed.
        self.record(changing, |model, schema| drop(edits.write(schema, &frontends, &mut model.table)))
    }

    /// Makes the same change in the running and the desired config.
    fn record(
        &self,
        changing: &Changing<'_>,
        change: impl Fn(&mut Model, &Schema),
    ) -> (Vec<String>, Option<String>) {
        let (before, schema) = (self.config.get(), Schema::new(&self.frontends.get()));
        let mut config = RunningConfig::clone(&before);
        let mut desired = Model::clone(&config.desired);
        change(&mut desired, &schema);
        change(&mut config.running, &schema);
        let changes = diff(&schema, &before.running.table, &config.running.table);
        if changes.is_empty() {
            return (Vec::new(), None);
        }
        self.publish(changing, RunningConfig { desired: Arc::new(desired), is_unsaved: true, ..config });
        let note = self.has_file().then(|| NOT_IN_FILE.to_owned());
        (changes.iter().map(ConfigChange::describe).collect(), note)
    }

    /// A note about the config file for the user, after changes that were applied.
    pub(in crate::daemon) fn note_of_applied(&self, report: &PlanReport) -> Option<String> {
        (self.has_file() && !report.is_empty()).then(|| NOT_IN_FILE.to_owned())
    }

    /// The spec of a volume; `None` if no volume has the name.
    pub(in crate::daemon) fn spec(&self, name: &str) -> Option<Spec> {
        Some(self.config.get().running.volume(name)?.entry.spec.clone())
    }
}

impl Model {
    /// Sets the size in a volume's spec, in bytes, if it has one. Otherwise the file itself has the
    /// size.
    fn set_size(&mut self, name: &str, size: u64) -> Option<()> {
        let spec = &mut self.volume_mut(name)?.entry.spec;
        spec.size()?;
        *spec = spec.with_size(size)?;
        let text = spec.to_string();
        let list = self.table.get_mut(VOLUMES.0)?.as_array_mut()?;
        let is_it = |entry: &&mut Value| entry.get(VOLUMES.1).and_then(Value::as_str) == Some(name);
        list.iter_mut().find(is_it)?.as_table_mut()?.insert("spec".to_owned(), text.into());
        Some(())
    }
}

/// The note about a change that a save would write into the config file.
const NOT_IN_FILE: &str = "this change is not in the config file; 'ctl save' writes it there";
