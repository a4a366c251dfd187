//! Records the changes of `blockmux ctl` in the running config, so that `ctl save` writes them to
//! the config file and a reload compares with them.

use super::model::Model;
use super::plan::{ConfigChange, Schema, diff};
use super::{Changing, Reloader, RunningConfig};
use crate::cli::ctl::{Answer, PlanReport, Request};
use crate::daemon::attachment::{ATTACHMENTS, Attachment};
use crate::daemon::opening::NamedVolume;
use crate::daemon::setup::VOLUMES;
use crate::protocol::frontend::{Change as ProtocolChange, TargetTables};
use crate::protocol::{Frontends, by_name};
use blockmux_volume::{Limits, Spec};
use std::sync::Arc;
use toml::{Table, Value};

/// What [`Reloader::record`] has recorded.
#[derive(Default)]
pub(in crate::daemon) struct Recorded {
    /// A note about the config file for the user.
    pub(in crate::daemon) note: Option<String>,
    /// A line for each change of the running config.
    pub(in crate::daemon) effects: Vec<String>,
}

impl Reloader {
    /// Records the change that a request has made. `opened` is the volume that it has added.
    pub(in crate::daemon) fn record(
        &self,
        changing: &Changing<'_>,
        request: &Request,
        answer: &Answer,
        opened: Option<NamedVolume>,
    ) -> Recorded {
        let (before, frontends) = (self.config.get(), self.frontends.get());
        let mut config = RunningConfig::clone(&before);
        let mut desired = Model::clone(&config.desired);
        write_down(&mut desired, &frontends, request, answer, opened.clone());
        config.desired = Arc::new(desired);
        let written = write_down(&mut config.running, &frontends, request, answer, opened);
        let Some(is_expressible) = written else { return Recorded::default() };
        let changes = diff(&Schema::new(&frontends), &before.running.table, &config.running.table);
        self.publish(changing, RunningConfig { is_unsaved: true, ..config });
        let note = match (self.has_file(), is_expressible) {
            (false, _) => None,
            (true, true) => Some(NOT_IN_FILE),
            (true, false) => Some(
                "this change is not in the config file, which has no key for it: the next reload undoes it",
            ),
        };
        let effects = changes.iter().map(ConfigChange::describe).collect();
        Recorded { note: note.map(str::to_owned), effects }
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

/// The note about a change that a save would write into the config file.
const NOT_IN_FILE: &str = "this change is not in the config file; 'ctl save' writes it there";

/// Writes a change into a config; returns whether a config file can express it, or `None` if
/// nothing has changed.
fn write_down(
    model: &mut Model,
    frontends: &Frontends,
    request: &Request,
    answer: &Answer,
    opened: Option<NamedVolume>,
) -> Option<bool> {
    match (request, answer) {
        (Request::Add { .. }, Answer::Added { .. }) => {
            let named = opened?;
            let list = model.table.entry(VOLUMES.0).or_insert_with(|| Value::Array(Vec::new()));
            list.as_array_mut()?.push(Value::Table(named.entry.table(&named.name)));
            model.volumes.push(named);
            Some(true)
        }
        (Request::Remove { name, .. }, Answer::Done) => {
            model.volumes.retain(|volume| volume.name != *name);
            let list = model.table.get_mut(VOLUMES.0)?.as_array_mut()?;
            list.retain(|entry| entry.get(VOLUMES.1).and_then(Value::as_str) != Some(name));
            remove_uses(&mut model.table, frontends, name);
            Some(true)
        }
        (Request::Resize { name, .. }, Answer::Resized { size }) => {
            let named = model.volumes.iter_mut().find(|volume| volume.name == *name)?;
            let spec = &mut named.entry.spec;
            // Without `size` in the spec the file itself has the size.
            spec.size()?;
            *spec = spec.with_size(*size)?;
            let text = named.entry.spec.to_string();
            let list = model.table.get_mut(VOLUMES.0)?.as_array_mut()?;
            let is_it = |entry: &&mut Value| entry.get(VOLUMES.1).and_then(Value::as_str) == Some(name);
            list.iter_mut().find(is_it)?.as_table_mut()?.insert("spec".to_owned(), text.into());
            Some(true)
        }
        (Request::Limit { name, limits, client_limits }, Answer::Done) => {
            write_limits(model, name, *limits, *client_limits)?;
            Some(true)
        }
        (Request::Attach { name, target, ana_group, .. }, Answer::Attached { number }) => {
            let tables = frontends.target_tables().map(|(_, tables)| tables);
            for tables in tables {
                let Some(entry) = model.target(tables, target) else { continue };
                let units = entry.entry(tables.units.first()?.to_string());
                let units = units.or_insert_with(|| Value::Table(Table::new())).as_table_mut()?;
                units.insert(number.to_string(), name.as_str().into());
                let groups = entry.get_mut("ana_group").and_then(Value::as_array_mut);
                let is_it = |group: &&mut Value| {
                    group.get("ANAGRPID").and_then(Value::as_integer) == ana_group.map(i64::from)
                };
                let group = groups.into_iter().flatten().find(is_it);
                let members = group.and_then(|group| group.get_mut("namespaces")?.as_array_mut());
                members.into_iter().for_each(|members| members.push(i64::from(*number).into()));
                return Some(true);
            }
            Some(false)
        }
        (Request::AttachDisk { .. } | Request::DetachDisk { .. }, _) => {
            write_attachment(&mut model.table, request)
        }
        (Request::Detach { target, number, .. }, Answer::Done) => {
            let tables = frontends.target_tables().map(|(_, tables)| tables);
            for tables in tables {
                let Some(entry) = model.target(tables, target) else { continue };
                let number = number.to_string();
                remove_from_target(entry, tables, |own, _| own == number);
                return Some(true);
            }
            Some(false)
        }
        (Request::Change(ProtocolChange { protocol, target, what }), Answer::Done) => {
            let protocol = by_name(protocol)?;
            let frontend = frontends.of(protocol)?;
            for tables in frontend.target_tables() {
                if let Some(entry) = model.target(tables, target) {
                    return Some(frontend.record(what, entry));
                }
            }
            Some(false)
        }
        _ => None,
    }
}

/// Writes an attachment that was made or removed into a config.
fn write_attachment(table: &mut Table, request: &Request) -> Option<bool> {
    match request {
        Request::AttachDisk { volume, via, socket, name, read_only } => {
            let (volume, socket, name) = (volume.clone(), socket.clone(), name.clone());
            let entry = Attachment { volume, via: *via, socket, name, read_only: *read_only };
            let list = table.entry(ATTACHMENTS.0).or_insert_with(|| Value::Array(Vec::new()));
            list.as_array_mut()?.push(Value::Table(entry.table()));
        }
        Request::DetachDisk { volume, .. } => remove_attachment(table, volume),
        _ => return None,
    }
    Some(true)
}

/// Removes the attachment of a volume from a config, if it has one.
fn remove_attachment(table: &mut Table, volume: &str) {
    let Some(list) = table.get_mut(ATTACHMENTS.0).and_then(Value::as_array_mut) else { return };
    list.retain(|entry| entry.get(ATTACHMENTS.1).and_then(Value::as_str) != Some(volume));
    if list.is_empty() {
        table.remove(ATTACHMENTS.0);
    }
}

/// Writes the limits of a volume that have changed into a config.
fn write_limits(
    model: &mut Model,
    name: &str,
    limits: Option<Limits>,
    client_limits: Option<Limits>,
) -> Option<()> {
    let entry = &mut model.volumes.iter_mut().find(|volume| volume.name == name)?.entry;
    entry.limits = limits.unwrap_or(entry.limits);
    entry.client_limits = client_limits.unwrap_or(entry.client_limits);
    let list = model.table.get_mut(VOLUMES.0)?.as_array_mut()?;
    let is_it = |own: &&mut Value| own.get(VOLUMES.1).and_then(Value::as_str) == Some(name);
    *list.iter_mut().find(is_it)? = Value::Table(entry.table(name));
    Some(())
}

/// Removes a volume's attachment and its units of all targets from a config.
pub(super) fn remove_uses(table: &mut Table, frontends: &Frontends, name: &str) {
    remove_attachment(table, name);
    for (_, tables) in frontends.target_tables() {
        let targets = table.get_mut(tables.key).and_then(Value::as_array_mut);
        for target in targets.into_iter().flatten().filter_map(Value::as_table_mut) {
            remove_volume(target, tables, name);
        }
    }
}

/// Removes the units of a volume from a target, also from the maps of its peers.
fn remove_volume(target: &mut Table, tables: &TargetTables, name: &str) {
    remove_from_target(target, tables, |_, volume| volume == name);
    for (peers, _) in tables.peers {
        let list = target.get_mut(*peers).and_then(Value::as_array_mut);
        for peer in list.into_iter().flatten().filter_map(Value::as_table_mut) {
            remove_units(peer, tables.units, |_, volume| volume == name);
        }
    }
}

/// Removes units of a target, and their numbers from the lists of those that see them and of the
/// groups that they are in.
fn remove_from_target(target: &mut Table, tables: &TargetTables, is_removed: impl Fn(&str, &str) -> bool) {
    let gone = remove_units(target, tables.units, is_removed);
    for (key, _) in tables.peers.iter().chain(tables.parts) {
        let list = target.get_mut(*key).and_then(Value::as_array_mut);
        for entry in list.into_iter().flatten().filter_map(Value::as_table_mut) {
            for units in tables.units {
                let numbers = entry.get_mut(*units).and_then(Value::as_array_mut);
                let is_kept =
                    |number: &Value| !number.as_integer().is_some_and(|own| gone.contains(&own.to_string()));
                numbers.into_iter().for_each(|numbers| numbers.retain(is_kept));
            }
        }
    }
}

/// Removes the units of a target for which `is_removed` is true, given number and volume; returns
/// their numbers.
fn remove_units(target: &mut Table, units: &[&str], is_removed: impl Fn(&str, &str) -> bool) -> Vec<String> {
    let mut gone = Vec::new();
    for key in units {
        match target.get_mut(*key) {
            Some(Value::Table(units)) => {
                units.retain(|number, unit| {
                    let volume = unit.as_str().or_else(|| unit.get("volume")?.as_str());
                    let is_gone = is_removed(number, volume.unwrap_or_default());
                    gone.extend(is_gone.then(|| number.to_owned()));
                    !is_gone
                });
            }
            Some(Value::Array(entries)) => entries.retain(|entry| {
                let number = entry.get("nsid").and_then(Value::as_integer).unwrap_or_default().to_string();
                let volume = entry.get("volume").and_then(Value::as_str).unwrap_or_default();
                // A peer's list of numbers names no volumes.
                let is_gone = entry.is_table() && is_removed(&number, volume);
                gone.extend(is_gone.then_some(number));
                !is_gone
            }),
            _ => {}
        }
    }
    gone
}
