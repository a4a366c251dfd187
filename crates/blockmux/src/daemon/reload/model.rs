//! The form of a config that is compared, exported and saved.

use super::Plan;
use super::json::json_of_entries;
use super::objects::tag;
use super::plan::{ConfigChange, Schema, VolumeSteps, diff};
use crate::access::secret;
use crate::api::bodies::Attachment;
use crate::api::plan::PlannedChange;
use crate::daemon::attachment::{self, ATTACHMENTS};
use crate::daemon::config::{VolumeEntry, current_directory};
use crate::daemon::opening::NamedVolume;
use crate::daemon::role::{API_CERTIFICATES, API_TOKENS, ApiCertificate};
use crate::daemon::setup::{Setup, VOLUMES};
use blockmux_volume::{Resize, Spec};
use serde_json::{Map, Value as Json};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;
use toml::{Table, Value};

/// A config with absolute paths in which every volume has a name.
#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) table: Table,
    /// The volumes, with what the table does not have: passwords, and whether names are generated.
    volumes: Vec<NamedVolume>,
    /// The index of each volume, which no change moves.
    places: HashMap<String, usize>,
}

impl Model {
    /// The model of a setup.
    pub(super) fn of(setup: &Setup) -> Model {
        // The config means the same in every directory.
        let directory = current_directory();
        let mut table = setup.frontends.written.clone();
        let with_absolute_paths = |named: &NamedVolume| {
            let spec = named.entry.spec.clone().below(&directory);
            NamedVolume { name: named.name.clone(), entry: VolumeEntry { spec, ..named.entry.clone() } }
        };
        let all: Vec<_> = setup.volumes.iter().map(with_absolute_paths).collect();
        let volumes = all.iter().map(|named| Value::Table(named.entry.table(&named.name)));
        table.insert(VOLUMES.0.to_owned(), Value::Array(volumes.collect()));
        if !setup.attachments.is_empty() {
            let attachments = setup.attachments.iter().map(|one| Value::Table(one.table()));
            table.insert(ATTACHMENTS.0.to_owned(), Value::Array(attachments.collect()));
        }
        let tokens = setup.api_access.api_token.iter().map(|own| Value::Table(own.table(&directory)));
        let certificates = setup.api_access.api_certificate.iter().map(ApiCertificate::table);
        let certificates = certificates.map(Value::Table).collect::<Vec<_>>();
        for ((key, _), list) in [(API_TOKENS, tokens.collect()), (API_CERTIFICATES, certificates)] {
            table.extend((!list.is_empty()).then(|| (key.to_owned(), Value::Array(list))));
        }
        let group = setup.group.as_ref().map(|group| Value::Table(group.table(&directory)));
        table.extend(group.map(|group| ("group".to_owned(), group)));
        let mut listeners: BTreeMap<String, Vec<Value>> = BTreeMap::new();
        for (protocol, entry) in &setup.listeners {
            let mut entry = entry.clone();
            entry.address.anchor(&directory);
            listeners.entry(protocol.key()).or_default().push(entry.in_full(protocol.port).into());
        }
        table.extend(listeners.into_iter().map(|(key, list)| (key, Value::Array(list))));
        let seconds =
            |timeout: Option<Duration>| timeout.map(|timeout| Value::from(timeout.as_secs() as i64));
        let path = |path: &std::path::Path| directory.join(path).display().to_string();
        let token = |file: &std::path::Path| secret::below(&directory, file).display().to_string();
        let access = &setup.api_access;
        let subjects = &access.api_tls_subject;
        let single = [
            ("cores", setup.asked_cores.map(|cores| Value::from(cores as i64))),
            ("login_timeout", seconds(setup.login_timeout)),
            ("idle_timeout", seconds(setup.idle_timeout)),
            ("max_connections", Some(Value::from(setup.max_connections as i64))),
            ("mdns", setup.mdns.then(|| true.into())),
            ("poll", Value::try_from(setup.poll).ok()),
            ("congestion", setup.congestion.as_ref().map(|name| name.to_string().into())),
            ("state", setup.asked_state.as_deref().map(|state| path(state).into())),
            ("api", setup.api.as_ref().map(|api| api.to_string().into())),
            ("api_token_file", access.api_token_file.as_deref().map(|file| token(file).into())),
            ("api_tls_certificates", access.api_tls_certificates.as_deref().map(|own| path(own).into())),
            ("api_tls_subject", (!subjects.is_empty()).then(|| subjects.clone().into())),
            ("control", setup.control.as_ref().map(|control| format!("unix:{}", path(&control.0)).into())),
        ];
        table.extend(single.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
        let places = all.iter().enumerate().map(|(at, named)| (named.name.clone(), at)).collect();
        Model { table, volumes: all, places }
    }

    /// The volume with this name.
    pub(super) fn volume(&self, name: &str) -> Option<&NamedVolume> {
        self.volumes.get(*self.places.get(name)?)
    }

    /// All volumes, in the order of the config.
    pub(super) fn volumes(&self) -> &[NamedVolume] {
        &self.volumes
    }

    /// The attachments.
    pub(super) fn attachments(&self) -> Vec<Attachment> {
        attachment::of_table(&self.table)
    }

    /// Whether it says the same as another one.
    pub(super) fn is_same(&self, other: &Model, schema: &Schema) -> bool {
        // Passwords, and whether names are generated, are not part of the tables.
        let specs = |model: &Model| {
            let of_volume =
                |own: &NamedVolume| (own.name.clone(), (own.entry.spec.clone(), own.entry.name.clone()));
            model.volumes.iter().map(of_volume).collect::<HashMap<_, _>>()
        };
        diff(schema, &other.table, &self.table).is_empty() && specs(self) == specs(other)
    }

    /// Sorts changes as this config has their objects: what comes first may matter.
    pub(super) fn sort(&self, schema: &Schema, changes: &mut [ConfigChange]) {
        let mut places = HashMap::new();
        for (list, entries) in &self.table {
            let Some(name_key) = schema.name_key(std::slice::from_ref(list)) else { continue };
            for (place, entry) in entries.as_array().into_iter().flatten().enumerate() {
                let name = entry.get(name_key).and_then(Value::as_str).unwrap_or_default();
                places.insert([list.as_str(), name], place);
            }
        }
        let place = |change: &ConfigChange| match &change.path[..] {
            [list, name, ..] => places.get(&[list.as_str(), name.as_str()]).copied(),
            _ => None,
        };
        changes.sort_by(|a, b| a.path[0].cmp(&b.path[0]).then(place(a).cmp(&place(b))));
    }

    /// A change as a config file has it: an added volume with a generated name has none there, so
    /// that the names of its targets do not change.
    pub(super) fn as_written(&self, mut change: ConfigChange) -> ConfigChange {
        let is_unnamed = |name: &str| self.volume(name).is_some_and(|own| own.entry.name.is_none());
        if matches!(change.of_volume(), Some((name, None)) if is_unnamed(name)) {
            let entry = change.after.as_mut().and_then(Value::as_table_mut);
            entry.into_iter().for_each(|entry| drop(entry.remove(VOLUMES.1)));
        }
        change
    }

    /// The config as JSON, in which every volume has a name.
    pub(super) fn json(&self) -> Map<String, Json> {
        json_of_entries(&self.table)
    }

    /// Its tag, which changes with it.
    pub(super) fn tag(&self) -> String {
        tag(&Json::Object(self.json()))
    }

    /// The text of a config file with this config. Generated names of volumes are left out, so that
    /// the names of their targets do not change.
    pub(super) fn text(&self) -> String {
        let mut table = self.table.clone();
        let volumes = table.get_mut(VOLUMES.0).and_then(Value::as_array_mut);
        for entry in volumes.into_iter().flatten().filter_map(Value::as_table_mut) {
            let name = entry.get(VOLUMES.1).and_then(Value::as_str).map(str::to_owned);
            let is_unnamed =
                name.and_then(|name| self.volume(&name)).is_some_and(|own| own.entry.name.is_none());
            if is_unnamed {
                entry.remove(VOLUMES.1);
            }
        }
        toml::to_string(&table).unwrap_or_default()
    }
}

impl Model {
    /// This config, but with the previous value of each change that takes effect only at the next
    /// start.
    pub(super) fn without_pending(&self, before: &Model, plan: &Plan) -> Model {
        let mut model = self.clone();
        let waiting: Vec<_> = plan.changes.iter().filter(|change| plan.waits(change)).collect();
        for change in &waiting {
            put(&mut model.table, &plan.schema, &change.path, change.before.as_ref());
        }
        let waiting: HashSet<_> = waiting.iter().filter_map(|change| change.of_volume()).collect();
        for named in &mut model.volumes {
            let waits = |key: &str| waiting.contains(&(named.name.as_str(), Some(key)));
            let (read_only, shared, uuid) = (waits("read_only"), waits("shared"), waits("uuid"));
            let scsi = waits("scsi");
            if let Some(old) = before.volume(&named.name) {
                let entry = &mut named.entry;
                entry.read_only = if read_only { old.entry.read_only } else { entry.read_only };
                entry.shared = if shared { old.entry.shared } else { entry.shared };
                entry.uuid = if uuid { old.entry.uuid } else { entry.uuid };
                if scsi {
                    entry.scsi.clone_from(&old.entry.scsi);
                }
                // The names of the targets of a volume that stays open do not change.
                if !plan.steps.get(&named.name).is_some_and(|step| step.opens()) {
                    entry.name.clone_from(&old.entry.name);
                }
            }
        }
        model
    }
}

/// The volumes that stay open and whose names become configured or generated ones: the names of
/// their targets change at the next start.
pub(super) fn renamed(running: &Model, desired: &Model, steps: &VolumeSteps) -> Vec<PlannedChange> {
    let stays = |name: &str| !steps.get(name).is_some_and(|step| step.opens());
    let line = |after: &NamedVolume| {
        let before = running.volume(&after.name).filter(|_| stays(&after.name))?;
        let line = match (&before.entry.name, &after.entry.name) {
            (None, Some(name)) => format!("+ volume {name}: name added"),
            (Some(name), None) => format!("- volume {name}: name removed"),
            _ => return None,
        };
        Some(PlannedChange::new(&[VOLUMES.0, &after.name, VOLUMES.1], line))
    };
    desired.volumes.iter().filter_map(line).collect()
}

/// The volumes that are closed, and those whose attachments are removed or changed.
pub(super) fn changed_disks(running: &Model, desired: &Model, steps: &VolumeSteps) -> Vec<String> {
    let after = desired.attachments().into_iter().map(|one| (one.volume.clone(), one));
    let after: HashMap<_, _> = after.collect();
    let is_changed = |one: &Attachment| after.get(&one.volume) != Some(one);
    let before = running.attachments().into_iter().filter(is_changed).map(|one| one.volume);
    let closed = steps.iter().filter(|(_, step)| step.closes()).map(|(name, _)| name.clone());
    closed.chain(before).collect::<BTreeSet<_>>().into_iter().collect()
}

/// How to resize a volume if the specs differ only in the size; `None` otherwise.
pub(super) fn resize_between(before: &Spec, after: &Spec) -> Option<Resize> {
    if before == after {
        return None;
    }
    let is_same = |spec: &Spec, size, other| spec.with_size(size).as_ref() == Some(other);
    match after.size() {
        Some(size) => is_same(before, size, after).then(|| Resize::grow(size)),
        // Without `size` in the spec the file itself has the size.
        None => is_same(after, before.size()?, before).then_some(Resize::Own),
    }
}

/// Sets the value at a path, or removes it if it is `None`.
fn put(table: &mut Table, schema: &Schema, path: &[String], value: Option<&Value>) {
    put_below(table, schema, &mut Vec::new(), path, value);
}

fn put_below(
    table: &mut Table,
    schema: &Schema,
    above: &mut Vec<String>,
    path: &[String],
    value: Option<&Value>,
) {
    let [key, rest @ ..] = path else { return };
    if rest.is_empty() {
        match value {
            Some(value) => drop(table.insert(key.clone(), value.clone())),
            None => drop(table.remove(key)),
        }
        return;
    }
    above.push(key.clone());
    let name_key = schema.name_key(above);
    let empty = || match schema.is_list(key) {
        true => Value::Array(Vec::new()),
        false => Value::Table(Table::new()),
    };
    let next = table.entry(key.clone()).or_insert_with(empty);
    match (next, name_key, rest) {
        (Value::Table(table), None, _) => put_below(table, schema, above, rest, value),
        (Value::Array(list), Some(name_key), [name, below @ ..]) if !below.is_empty() => {
            let is_it =
                |entry: &&mut Value| entry.get(name_key).and_then(Value::as_str).unwrap_or_default() == name;
            above.push(name.clone());
            if let Some(table) = list.iter_mut().find(is_it).and_then(Value::as_table_mut) {
                put_below(table, schema, above, below, value);
            }
            above.pop();
        }
        // An element of a list of plain values.
        (Value::Array(list), None, [_]) => match value {
            Some(value) => list.push(value.clone()),
            None => list.retain(|own| own.as_str() != Some(rest[0].as_str())),
        },
        _ => {}
    }
    above.pop();
}
