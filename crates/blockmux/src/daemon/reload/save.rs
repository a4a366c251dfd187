//! Writes the running config into the config file. Comments and layout of the file stay; new
//! entries are appended to the main file, changed entries are changed in place.

use super::model::Model;
use super::plan::{ConfigChange, Schema, diff};
use super::replacement::{remove_leftovers, replace_all};
use super::{Reloader, RunningConfig};
use crate::api::ApiError;
use crate::daemon::blocking_work::Awaited;
use crate::daemon::config::current_directory;
use crate::daemon::config_audit::{self, Caller};
use crate::daemon::named_lock::{NamedGuard, WorkStep};
use crate::daemon::opening::NamedVolume;
use crate::daemon::setup::{Setup, VOLUMES};
use crate::daemon::sources::Sources;
use crate::protocol::PROTOCOLS;
use crate::protocol::address::ListenerEntry;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use toml::Value;
use toml_edit::{Array, ArrayOfTables, DocumentMut, InlineTable, Item, Table, TableLike};

/// A config file that is being edited.
struct ConfigDocument {
    path: PathBuf,
    document: DocumentMut,
    is_changed: bool,
}

/// What a save has written.
struct SavedConfig {
    /// The config files as they are now.
    model: Model,
    /// For the user.
    summary: String,
}

impl Reloader {
    /// Writes the changes that are not in the config file into it; returns a summary for the user.
    /// The files are replaced only if a start would accept the new ones and get the running config
    /// from them.
    ///
    /// # Errors
    /// If there is no config file, it was changed since it was loaded, it cannot have the running
    /// config, or it cannot be written. Then no file has changed, unless the message says so.
    pub(in crate::daemon) fn save(self: &Arc<Reloader>, caller: &Caller) -> Result<String, ApiError> {
        let title = format!("a save of {}", self.file_name());
        // It waits for no reload: it writes what runs now.
        let guard = self.saves.lock(&title, caller)?;
        let config = self.config.get();
        let (reloader, before, step) = (self.clone(), config.clone(), guard.step.clone());
        let its_step = step.clone();
        // Also a save that was given up ends before the next one begins.
        let write = move |awaited: &Awaited| (reloader.write(&before, (awaited, &its_step)), guard);
        let (reloader, before, caller) = (self.clone(), config.clone(), caller.clone());
        let late = move |(saved, _guard): (Result<Option<SavedConfig>, ApiError>, NamedGuard)| {
            let summary = saved.map(|saved| saved.map(|saved| reloader.note_saved(&before, saved)));
            let lines = summary.map(|summary| summary.into_iter().collect::<Vec<_>>());
            config_audit::log(&caller, "save, given up before", lines.as_deref());
        };
        let (saved, _guard) = self.blocking.run_change(&step, write, late)?;
        Ok(match saved? {
            Some(saved) => self.note_saved(&config, saved),
            None => "nothing to save: the config file is up to date".to_owned(),
        })
    }

    /// Notes that the config files have what ran at the time of `before`; returns the summary.
    fn note_saved(&self, before: &Arc<RunningConfig>, saved: SavedConfig) -> String {
        let SavedConfig { model, summary } = saved;
        let loaded = Arc::new(model);
        let changing = self.begin_change();
        let now = self.config.get();
        // A change that was made while the files were written is not in them.
        let is_unsaved = !Arc::ptr_eq(&now, before);
        self.publish(&changing, RunningConfig { loaded, is_unsaved, ..RunningConfig::clone(&now) });
        summary
    }

    /// Writes a running config into the config files, without a lock, because their file system may
    /// hang; `None` if they have it already.
    fn write(
        &self,
        config: &RunningConfig,
        (awaited, step): (&Awaited, &WorkStep),
    ) -> Result<Option<SavedConfig>, ApiError> {
        step.begin("reading the config and its files");
        let setup = self.read_file()?;
        let sources = setup.sources.as_ref().ok_or_else(|| "the daemon has no config file".to_owned())?;
        remove_leftovers(sources);
        let file = Model::of(&setup);
        let schema = self.schema(&setup);
        if !diff(&schema, &config.loaded.table, &file.table).is_empty() {
            let text =
                "the config file was changed since it was loaded: 'ctl diff' shows how; reload it first";
            return Err(text.to_owned().into());
        }
        let mut changes = diff(&schema, &file.table, &config.desired.table);
        config.desired.sort(&schema, &mut changes);
        let changes = changes.into_iter().map(|change| config.desired.as_written(change));
        let changes: Vec<ConfigChange> = changes.collect();
        if changes.is_empty() {
            return Ok(None);
        }
        let open = |(path, text): (&Path, &str)| {
            let document = text.parse::<DocumentMut>().map_err(|error| error.to_string())?;
            Ok(ConfigDocument { path: path.to_owned(), document, is_changed: false })
        };
        let mut documents = sources.files().map(open).collect::<Result<Vec<_>, String>>()?;
        let is_written = |change: &&ConfigChange| write_change(&schema, &mut documents, change);
        let (written, not_saved): (Vec<_>, Vec<_>) = changes.iter().partition(is_written);
        let edited = sources.with_texts(documents.iter().map(|file| file.document.to_string()));
        let model = self.check_edited(config, &file, edited, &not_saved)?;
        let changed = documents.iter().zip(sources.files()).filter(|(document, _)| document.is_changed);
        let changed = changed
            .map(|(document, (_, before))| (document.path.as_path(), before, document.document.to_string()));
        step.begin("writing");
        replace_all(sources.path(), changed, || {
            // The file has perhaps been edited before that, and must not lose it.
            if !Arc::ptr_eq(&self.config.get().loaded, &config.loaded) {
                return Err("the config file was reloaded at the same time; try again".to_owned());
            }
            awaited.begin().map_err(|failure| failure.to_string())
        })?;
        let mut summary = format!("{} changes saved", written.len());
        if !not_saved.is_empty() {
            let not_saved: Vec<_> = not_saved.iter().map(|change| change.path.join(" ")).collect();
            summary += &format!("; not saved, because the command line gives them: {}", not_saved.join(", "));
        }
        Ok(Some(SavedConfig { model, summary }))
    }

    /// Checks edited config files as a start does, and that they have the running config; returns
    /// their model. `before` is the model of the files that they replace.
    fn check_edited(
        &self,
        config: &RunningConfig,
        before: &Model,
        edited: Sources,
        not_saved: &[&ConfigChange],
    ) -> Result<Model, String> {
        let invalid = |why: String| {
            format!(
                "nothing was saved, because the config file would be invalid: {why}; 'ctl export' prints the running \
                 config, and 'ctl diff' how the file differs from it: edit the file by hand"
            )
        };
        let inherited = self.inherited().addresses();
        let setup = Setup::of(self.args.duplicate(), Some(edited), &inherited);
        let mut setup = setup.map_err(|failure| invalid(failure.to_string()))?;
        self.settle_policy(config, &mut setup).map_err(invalid)?;
        let saved = Model::of(&setup);
        let schema = self.schema(&setup);
        let lost = diff(&schema, &saved.table, &config.desired.table);
        let mut lost: Vec<String> = lost
            .iter()
            .filter(|change| not_saved.iter().all(|known| known.path != change.path))
            .map(ConfigChange::describe)
            .collect();
        // Tables have no passwords of URLs.
        let spec_in = |model: &Model, name: &str| model.volume(name).map(|named| named.entry.spec.clone());
        let has_lost_password = |named: &&NamedVolume| {
            let after = spec_in(&saved, &named.name);
            after.is_some_and(|after| after != named.entry.spec)
                && spec_in(before, &named.name).as_ref() != spec_in(&saved, &named.name).as_ref()
        };
        if lost.is_empty() {
            let volumes = config.desired.volumes().iter().filter(has_lost_password);
            lost.extend(volumes.map(|named| {
                format!("volume {}: the password of its URL; use one with secret_file=PATH", named.name)
            }));
        }
        match lost.is_empty() {
            true => Ok(saved),
            false => Err(format!(
                "nothing was saved, because a start with the new config file would lack: {}; 'ctl export' prints the \
                 running config: edit the file by hand",
                lost.join(", ")
            )),
        }
    }
}

/// Writes a change into the file that has its entry, or into the main file. Returns `false` if no
/// file has the entry, because the command line gives it.
fn write_change(schema: &Schema, documents: &mut [ConfigDocument], change: &ConfigChange) -> bool {
    let [key, rest @ ..] = &change.path[..] else { return false };
    let name_key = schema.name_key(std::slice::from_ref(key));
    // Relative paths of included files are relative to the main file, too.
    let directory = documents.first().and_then(|main| main.path.parent()).unwrap_or(Path::new(""));
    let directory = current_directory().join(directory);
    let at = match (name_key, rest) {
        (Some(name_key), [name, ..]) => position_of(documents, key, name_key, name),
        (_, [value]) if change.after.is_none() => {
            let has = |file: &ConfigDocument| {
                let list = file.document.get(key).and_then(Item::as_array);
                list.is_some_and(|list| list.iter().any(|own| is_same_value(key, own, value, &directory)))
            };
            documents.iter().position(has).map(|at| (at, None))
        }
        _ => documents.iter().position(|file| file.document.contains_key(key)).map(|at| (at, None)),
    };
    let is_new_entry = name_key.is_some() && rest.len() == 1 && change.before.is_none();
    let (at, entry) = match at {
        Some(found) => found,
        None if is_new_entry || name_key.is_none() && change.after.is_some() => (0, None),
        None => return false,
    };
    let Some(file) = documents.get_mut(at) else { return false };
    file.is_changed = true;
    let root = file.document.as_table_mut();
    match (name_key, rest, entry) {
        // A whole entry is added or removed.
        (Some(_), [_], None) => {
            let Some(Value::Table(table)) = &change.after else { return false };
            push_entry(root, key, table)
        }
        (Some(_), [_], Some(nth)) => remove_entry(root, key, nth),
        (Some(_), [_, below @ ..], Some(nth)) => {
            let Some(table) = entry_mut(root, key, nth) else { return false };
            let above = vec![key.clone(), rest[0].clone()];
            put(schema, table, above, below, change.after.as_ref(), &directory)
        }
        _ => put(schema, root, Vec::new(), &change.path, change.after.as_ref(), &directory),
    }
}

/// The file that has the entry with this name, and the entry's index in that file's list.
fn position_of(
    documents: &[ConfigDocument],
    key: &str,
    name_key: &str,
    name: &str,
) -> Option<(usize, Option<usize>)> {
    let mut unnamed = 0_usize;
    for (at, file) in documents.iter().enumerate() {
        for (nth, entry) in entries(file.document.get(key)).into_iter().enumerate() {
            match entry.get(name_key).and_then(Item::as_str) {
                Some(own) if own == name => return Some((at, Some(nth))),
                // Unnamed volumes are numbered.
                None if key == VOLUMES.0 => {
                    if name == format!("disk{unnamed}") {
                        return Some((at, Some(nth)));
                    }
                    unnamed += 1;
                }
                _ => {}
            }
        }
    }
    None
}

fn entries(list: Option<&Item>) -> Vec<&dyn TableLike> {
    match list {
        Some(Item::ArrayOfTables(tables)) => tables.iter().map(|table| table as &dyn TableLike).collect(),
        Some(Item::Value(toml_edit::Value::Array(items))) => {
            items.iter().filter_map(|item| Some(item.as_inline_table()? as &dyn TableLike)).collect()
        }
        _ => Vec::new(),
    }
}

fn entry_mut<'a>(table: &'a mut dyn TableLike, key: &str, nth: usize) -> Option<&'a mut dyn TableLike> {
    match table.get_mut(key)? {
        Item::ArrayOfTables(tables) => Some(tables.get_mut(nth)? as &mut dyn TableLike),
        Item::Value(toml_edit::Value::Array(items)) => {
            Some(items.get_mut(nth)?.as_inline_table_mut()? as &mut dyn TableLike)
        }
        _ => None,
    }
}

fn remove_entry(table: &mut dyn TableLike, key: &str, nth: usize) -> bool {
    match table.get_mut(key) {
        Some(Item::ArrayOfTables(tables)) => {
            tables.remove(nth);
            true
        }
        Some(Item::Value(toml_edit::Value::Array(items))) => {
            items.remove(nth);
            true
        }
        _ => false,
    }
}

fn push_entry(table: &mut dyn TableLike, key: &str, entry: &toml::Table) -> bool {
    let list = table.entry(key).or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
    match list {
        Item::ArrayOfTables(tables) => {
            tables.push(table_of(entry));
            true
        }
        Item::Value(toml_edit::Value::Array(items)) => {
            items.push(inline_of(entry));
            true
        }
        _ => false,
    }
}

/// Sets the value at a path below a table, or removes it if it is `None`; returns whether the path
/// exists.
fn put(
    schema: &Schema,
    table: &mut dyn TableLike,
    mut above: Vec<String>,
    path: &[String],
    value: Option<&Value>,
    directory: &Path,
) -> bool {
    let [key, rest @ ..] = path else { return false };
    above.push(key.clone());
    if rest.is_empty() {
        match value {
            None => drop(table.remove(key)),
            Some(value) => set(table, key, value, directory),
        }
        return true;
    }
    if let Some(name_key) = schema.name_key(&above) {
        let name_of = |entry: &&dyn TableLike| {
            let name = entry.get(name_key);
            let text = name.and_then(Item::as_str).map(str::to_owned);
            text.or_else(|| name?.as_integer().map(|number| number.to_string())).unwrap_or_default()
        };
        let nth = entries(table.get(key)).iter().position(|entry| name_of(entry) == rest[0]);
        return match (nth, &rest[1..], value) {
            (None, [], Some(Value::Table(entry))) => push_entry(table, key, entry),
            (Some(nth), [], None) => remove_entry(table, key, nth),
            (Some(nth), below, value) => {
                let Some(entry) = entry_mut(table, key, nth) else { return false };
                above.push(rest[0].clone());
                put(schema, entry, above, below, value, directory)
            }
            _ => false,
        };
    }
    let is_list = matches!(table.get(key), Some(Item::Value(toml_edit::Value::Array(_))));
    if is_list || table.get(key).is_none() && schema.is_list(key) {
        let list = table.entry(key).or_insert_with(|| Item::Value(Array::new().into()));
        let Some(list) = list.as_array_mut() else { return false };
        match value {
            Some(value) => push_value(list, value_of(value)),
            None => list.retain(|own| !is_same_value(key, own, &rest[0], directory)),
        }
        return true;
    }
    let next = table.entry(key).or_insert_with(|| Item::Value(InlineTable::new().into()));
    let Some(next) = next.as_table_like_mut() else { return false };
    let is_there = put(schema, next, above, rest, value, directory);
    if value.is_none() && next.is_empty() && LIMITS.contains(&key.as_str()) {
        table.remove(key);
    }
    is_there
}

/// Appends a value to a list. In a list with one value per line it gets its own line, and the
/// comment behind the previous value stays with that value.
fn push_value(list: &mut Array, mut value: toml_edit::Value) {
    let trailing = list.trailing().as_str().unwrap_or_default().to_owned();
    let last = list.iter().last().and_then(|last| last.decor().prefix()?.as_str()).unwrap_or_default();
    let indent = last.rsplit_once('\n').map(|(_, indent)| indent.to_owned());
    match trailing.rsplit_once('\n').zip(indent).filter(|_| list.trailing_comma()) {
        Some(((comment, end), indent)) => {
            value.decor_mut().set_prefix(format!("{comment}\n{indent}"));
            list.push_formatted(value);
            list.set_trailing(format!("\n{end}"));
        }
        None => list.push(value),
    }
}

/// A new text for a value, whose paths are absolute as the model has them: relative to `directory`
/// if those of the text before are.
fn as_before(before: &str, text: &str, directory: &Path) -> String {
    let prefix = format!("{}/", directory.display().to_string().trim_end_matches('/'));
    if directory.parent().is_none() || before.contains(&prefix) {
        return text.to_owned();
    }
    let mut relative = String::new();
    for part in text.split_inclusive(&[':', '=', ',']) {
        // Only a path begins with the directory: it may be the middle of another one.
        relative += part.strip_prefix(&prefix).unwrap_or(part);
    }
    relative
}

/// Sets a key and keeps the comments around its value. A relative path stays relative to
/// `directory`.
fn set(table: &mut dyn TableLike, key: &str, value: &Value, directory: &Path) {
    let mut new = item_of(value);
    if let (Some(old), Some(new)) = (table.get(key).and_then(Item::as_value), new.as_value_mut()) {
        if let (Some(before), Some(text)) = (old.as_str(), new.as_str()) {
            *new = as_before(before, text, directory).into();
        }
        *new.decor_mut() = old.decor().clone();
    } else if let (Some(last), Some(new)) = (last_value(table), new.as_value_mut()) {
        // The blank before the brace of an inline table belongs to its last value.
        let blank = last.decor().suffix().and_then(|suffix| suffix.as_str()).unwrap_or_default().to_owned();
        if !blank.is_empty() && blank.trim_matches(' ').is_empty() {
            last.decor_mut().set_suffix("");
            new.decor_mut().set_suffix(blank);
        }
    }
    table.insert(key, new);
}

fn last_value(table: &mut dyn TableLike) -> Option<&mut toml_edit::Value> {
    table.iter_mut().last()?.1.as_value_mut()
}

/// Whether a value of a list in a file is the one that the model has as this text. A listener's
/// address is complete in the model.
fn is_same_value(key: &str, own: &toml_edit::Value, text: &str, directory: &Path) -> bool {
    own.as_str().is_some_and(|own| own == text || in_full(key, own, directory).as_deref() == Some(text))
        || own.to_string().trim() == text
}

/// A listener as the model has it; `None` if the key has no listeners.
fn in_full(key: &str, text: &str, directory: &Path) -> Option<String> {
    let protocol = PROTOCOLS.iter().find(|protocol| protocol.key() == key)?;
    let mut entry = ListenerEntry::read(protocol.carrier, text).ok()?;
    entry.address.anchor(directory);
    Some(entry.in_full(protocol.port))
}

/// A `[[table]]`, with lists of tables in it as `[[table.list]]`.
fn table_of(entry: &toml::Table) -> Table {
    let mut table = Table::new();
    let (lists, values): (Vec<_>, Vec<_>) =
        in_order(entry).into_iter().partition(|(_, value)| is_list_of_tables(value));
    for (key, value) in values.into_iter().chain(lists) {
        table.insert(key, item_of(value));
    }
    table
}

fn inline_of(entry: &toml::Table) -> InlineTable {
    in_order(entry).into_iter().map(|(key, value)| (key.clone(), value_of(value))).collect()
}

/// The keys of a new entry as people write them: first what it is called, then what it is.
fn in_order(entry: &toml::Table) -> Vec<(&String, &Value)> {
    let mut keys: Vec<_> = entry.iter().collect();
    keys.sort_by_key(|(key, _)| FIRST_KEYS.iter().position(|first| first == key).unwrap_or(FIRST_KEYS.len()));
    keys
}

fn is_list_of_tables(value: &Value) -> bool {
    value.as_array().is_some_and(|list| !list.is_empty() && list.iter().all(Value::is_table))
}

fn item_of(value: &Value) -> Item {
    match value {
        Value::Array(list) if is_list_of_tables(value) => {
            Item::ArrayOfTables(list.iter().filter_map(Value::as_table).map(table_of).collect())
        }
        value => Item::Value(value_of(value)),
    }
}

fn value_of(value: &Value) -> toml_edit::Value {
    match value {
        Value::String(text) => text.as_str().into(),
        Value::Integer(number) => (*number).into(),
        Value::Float(number) => (*number).into(),
        Value::Boolean(is_on) => (*is_on).into(),
        Value::Datetime(time) => time.to_string().into(),
        Value::Array(list) => list.iter().map(value_of).collect::<Array>().into(),
        Value::Table(table) => inline_of(table).into(),
    }
}

/// Keys that begin an entry, in this order.
const FIRST_KEYS: [&str; 7] = ["name", "TargetName", "nqn", "InitiatorName", "hostnqn", "volume", "spec"];
/// Tables that say nothing when they are empty.
const LIMITS: [&str; 2] = ["limits", "client_limits"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Frontends;

    fn saved(text: &str, after: &str) -> String {
        let schema = Schema::new(&Frontends::default());
        let (path, document) = ("/etc/b/b.toml".into(), text.parse().unwrap());
        let mut documents = [ConfigDocument { path, document, is_changed: false }];
        let [before, desired] = [text, after].map(|text| text.parse::<toml::Table>().unwrap());
        for change in diff(&schema, &before, &desired) {
            assert!(write_change(&schema, &mut documents, &change), "{change:?}");
        }
        let text = documents[0].document.to_string();
        assert_eq!(diff(&schema, &text.parse().unwrap(), &desired), [], "{text}");
        text
    }

    #[test]
    fn comments_and_layout_stay_and_entries_are_changed_in_place() {
        let text = "# Our disks.\nnbd = [\n  ':1', # inside\n]\n\n[[volume]]\nname = 'a' # the first\nspec = 'mem:1m'\n\n\
                    # The second.\n[[volume]]\nname = 'b'\nspec = 'mem:2m'\n\n[[iscsi_target]]\nTargetName = 'iqn.a'\n\
                    luns = { 0 = 'a' } # units\n";
        let after = "nbd = [':1', ':2']\n[[volume]]\nname = 'a'\nspec = 'mem:4m'\n[[volume]]\nname = 'c'\n\
                     spec = 'mem:2m'\n[[iscsi_target]]\nTargetName = 'iqn.a'\nluns = { 0 = 'a', 1 = 'c' }\n\
                     [[iscsi_target.acl]]\nInitiatorName = 'iqn.i'\nluns = [1]\n";
        let text = saved(text, after);
        for kept in [
            "# Our disks.\n",
            "':1', # inside",
            "name = 'a' # the first\n",
            "luns = { 0 = 'a', 1 = \"c\" } # units\n",
        ] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
        assert!(text.contains("spec = \"mem:4m\"") && !text.contains("name = 'b'"), "{text}");
        assert!(text.contains("[[iscsi_target.acl]]\nInitiatorName = \"iqn.i\"\nluns = [1]\n"), "{text}");
    }

    #[test]
    fn a_new_entry_begins_with_its_name_and_removed_limits_leave_nothing() {
        let text =
            "[[volume]]\nname = 'a'\nspec = 'mem:1m'\nlimits = { iops = 5 }\nclient_limits = { iops = 5 }\n";
        let after = "[[volume]]\nname = 'a'\nspec = 'mem:1m'\nclient_limits = { bandwidth = 9 }\n\
                     [[volume]]\nname = 'b'\nspec = 'mem:1m'\nprotocols = ['nbd']\nlimits = { iops = 1 }\n";
        let expected = "[[volume]]\nname = 'a'\nspec = 'mem:1m'\nclient_limits = { bandwidth = 9 }\n\n\
                        [[volume]]\nname = \"b\"\nspec = \"mem:1m\"\nlimits = { iops = 1 }\nprotocols = [\"nbd\"]\n";
        assert_eq!(saved(text, after), expected);
    }

    #[test]
    fn additions_and_removals_below_a_subsystem_are_written_there() {
        let text = "[[nvme_subsystem]]\nnqn = 'nqn.a'\nnamespaces = { 1 = 'a' }\nhosts = ['nqn.h']\n\
                    [[nvme_subsystem.host]]\nhostnqn = 'nqn.i'\n[[nvme_subsystem.ana_group]]\nANAGRPID = 1\n\
                    namespaces = [1]\nstates = { '127.0.0.1:1' = 'optimized' }\n";
        let after = "[[nvme_subsystem]]\nnqn = 'nqn.a'\nnamespaces = { 1 = 'a', 2 = 'b' }\nhosts = ['nqn.g']\n\
                     [[nvme_subsystem.host]]\nhostnqn = 'nqn.j'\nnamespaces = [2]\n[[nvme_subsystem.ana_group]]\n\
                     ANAGRPID = 1\nnamespaces = [1, 2]\nstates = { '127.0.0.1:1' = 'inaccessible' }\n";
        saved(text, after);
        saved("", after);
    }
}
