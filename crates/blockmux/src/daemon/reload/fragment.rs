//! Applies a config fragment: adds or changes the entries that the fragment names, and keeps the
//! rest of the running config.

use super::json::table_of;
use super::objects::has_one_of;
use super::plan::Schema;
use super::{ChangeProgress, NewConfig, Reloader, RunningConfig, dry_run};
use crate::api::fragment::{ApplyOptions, Fragment, FragmentContent};
use crate::api::plan::PlanReport;
use crate::api::{ApiError, ErrorCode};
use crate::daemon::config::current_directory;
use crate::daemon::config_audit::Caller;
use crate::daemon::setup::{Setup, VOLUMES};
use crate::daemon::sources::Sources;
use crate::failure::Failure;
use crate::protocol::address::ListenerEntry;
use crate::protocol::{PROTOCOLS, anchor};
use blockmux_volume::{Spec, SpecError};
use serde::Deserialize;
use serde_json::Value as Json;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use toml::de::Deserializer;
use toml::{Table, Value};

/// Applies a fragment of a config. After an error nothing has changed.
///
/// # Errors
/// The message names the line of the fragment and what to do.
pub(in crate::daemon) fn apply(
    reloader: &Arc<Reloader>,
    fragment: &Fragment,
    options: &ApplyOptions,
    caller: &Caller,
    progress: &ChangeProgress<'_>,
) -> Result<PlanReport, ApiError> {
    let title = format!("an apply of {}", fragment.title().display());
    let guard = reloader.lock_edits(&title, caller)?;
    let (new, step) = (NewConfig::Fragment(fragment.clone(), options.clone()), guard.step.clone());
    reloader.apply(&new, (&step, Some(guard)), progress)?.finished()
}

/// The changes that [`apply`] would make.
///
/// # Errors
/// The errors of [`apply`] that do not depend on opening or binding anything.
pub(in crate::daemon) fn plan(
    reloader: &Arc<Reloader>,
    fragment: &Fragment,
    options: &ApplyOptions,
) -> Result<PlanReport, ApiError> {
    let (fragment, options) = (fragment.clone(), options.clone());
    dry_run::planned(reloader, None, move |planner, config| merged(planner, config, &fragment, &options))
}

/// The setup of the desired config with a fragment merged into it.
///
/// # Errors
/// The message names the line of the fragment and what to do.
pub(super) fn merged(
    reloader: &Reloader,
    config: &RunningConfig,
    fragment: &Fragment,
    ApplyOptions { prune, if_match, .. }: &ApplyOptions,
) -> Result<Setup, ApiError> {
    if if_match.as_ref().is_some_and(|tags| !has_one_of(Some(&config.desired.tag()), tags)) {
        let text = "the config has changed since it was read; read it again";
        return Err(ApiError::new(ErrorCode::PreconditionFailed, text));
    }
    let named = Setup::named_lists(&reloader.frontends.get());
    let sources = match &fragment.content {
        FragmentContent::Toml(text) => Sources::of_text(fragment.title(), text.clone()),
        FragmentContent::Json(object) => {
            object.iter().try_for_each(|(key, value)| check_not_null(key, value))?;
            let table = table_of(object.clone()).map_err(ApiError::invalid)?;
            let text = toml::to_string(&table).map_err(ApiError::invalid)?;
            Sources::of_text(fragment.title(), text).generated()
        }
    };
    let sources = sources.with_named(named);
    let located = |failure| ApiError::invalid(sources.located(failure));
    let written = sources.table().map_err(ApiError::invalid)?;
    // The merge takes the second one for a change of the first.
    sources.check_names(written.get_ref()).map_err(ApiError::invalid)?;
    let span = written.span();
    let plain = Table::deserialize(Deserializer::from(written));
    let plain = plain.map_err(|error| ApiError::invalid(sources.wrong(Some(span), error.message())))?;
    if sources.has_include() {
        return Err(located(Failure::request("include: a fragment cannot include files; remove it")));
    }
    let directory = fragment.path.as_deref().and_then(Path::parent);
    let directory = directory.map_or_else(current_directory, Path::to_owned);
    let (plain, mut specs) =
        with_absolute_paths(plain, &directory).map_err(|what| located(Failure::request(what)))?;
    keep_passwords(config, &mut specs);
    let schema = Schema::new(&reloader.frontends.get());
    let mut table = config.desired.table.clone();
    for (key, value) in plain {
        let merging = Merging { schema: &schema, prune: *prune };
        merge(&merging, &mut vec![key.clone()], &mut table, key, value);
    }
    let mut setup = setup_of(reloader, config, &table, &specs).map_err(located)?;
    // Messages about the setup name lines of the fragment.
    setup.sources = Some(sources);
    Ok(setup)
}

/// The setup of a running config that was changed into `table`. `specs` are those of the volumes
/// that were changed: the table has no passwords.
///
/// # Errors
/// If a start would refuse it.
pub(super) fn setup_of(
    reloader: &Reloader,
    config: &RunningConfig,
    table: &Table,
    specs: &BTreeMap<String, Spec>,
) -> Result<Setup, Failure> {
    let text = toml::to_string(table).map_err(Failure::request)?;
    let file = reloader.args.config.as_deref().unwrap_or(Path::new(""));
    let sources = Sources::of_text(file, text).generated();
    let (args, inherited) = (reloader.args.without_volumes_and_listeners(), reloader.inherited().addresses());
    let mut setup = Setup::of(args, Some(sources), &inherited)?;
    // Passwords and generated names are not part of the text.
    for named in &mut setup.volumes {
        let running = config.desired.volume(&named.name);
        match (specs.get(&named.name), running) {
            (Some(spec), _) => named.entry.spec = spec.clone(),
            (None, Some(running)) => named.entry.spec = running.entry.spec.clone(),
            (None, None) => {}
        }
        if let Some(running) = running.filter(|running| running.entry.name.is_none()) {
            named.entry.name.clone_from(&running.entry.name);
        }
    }
    Ok(setup)
}

/// A part of a config with its relative paths made absolute below `directory`, and the specs of its
/// volumes.
pub(super) fn with_absolute_paths(
    mut fragment: Table,
    directory: &Path,
) -> Result<(Table, BTreeMap<String, Spec>), String> {
    let mut specs = BTreeMap::new();
    let volumes = fragment.get_mut(VOLUMES.0).and_then(Value::as_array_mut);
    for volume in volumes.into_iter().flatten().filter_map(Value::as_table_mut) {
        let name = volume.get(VOLUMES.1).and_then(Value::as_str).map(str::to_owned);
        let name = name.ok_or("volume: volumes of a fragment need names; add `name` to each")?;
        let Some(spec) = volume.get("spec").and_then(Value::as_str) else { continue };
        let spec: Spec =
            spec.parse().map_err(|error: SpecError| format!("volume `{name}`: spec: {error}"))?;
        let spec = spec.below(directory);
        volume.insert("spec".to_owned(), spec.to_string().into());
        specs.insert(name, spec);
    }
    for protocol in PROTOCOLS {
        let list = fragment.get_mut(&protocol.key()).and_then(Value::as_array_mut);
        for place in list.into_iter().flatten() {
            let Some(text) = place.as_str() else { continue };
            let mut entry = ListenerEntry::read(protocol.carrier, text)
                .map_err(|error| format!("{}: {error}", protocol.key()))?;
            entry.address.anchor(directory);
            *place = entry.in_full(protocol.port).into();
        }
    }
    fragment.iter_mut().for_each(|(key, value)| anchor(key, value, directory));
    Ok((fragment, specs))
}

/// Checks that no value is null, which could mean that a key is to be removed, or is not given.
fn check_not_null(key: &str, value: &Json) -> Result<(), ApiError> {
    match value {
        Json::Null => {
            Err(ApiError::invalid(format!("{key}: null is no value; to remove a key, PATCH its object")))
        }
        Json::Array(items) => items.iter().try_for_each(|item| check_not_null(key, item)),
        Json::Object(object) => object.iter().try_for_each(|(key, value)| check_not_null(key, value)),
        _ => Ok(()),
    }
}

/// Leaves out the specs that a config has already: what was shown without its password, and came
/// back so, is the same.
pub(super) fn keep_passwords(config: &RunningConfig, specs: &mut BTreeMap<String, Spec>) {
    specs.retain(|name, spec| {
        let own = config.desired.volume(name).map(|own| own.entry.spec.to_string());
        let shown = spec.to_string();
        own.as_deref() != Some(&*shown) || shown.parse::<Spec>().is_ok_and(|plain| plain != *spec)
    });
}

/// How a fragment is merged.
struct Merging<'a> {
    schema: &'a Schema,
    /// Remove the entries that a list of the fragment lacks.
    prune: bool,
}

/// Merges a value into a table. Entries of named lists and keys of tables are merged, lists of
/// plain values at the top level are united; any other value replaces the previous one.
fn merge(merging: &Merging<'_>, path: &mut Vec<String>, table: &mut Table, key: String, value: Value) {
    let name_key = merging.schema.name_key(path);
    match (table.get_mut(&key), value, name_key) {
        (Some(Value::Array(own)), Value::Array(more), Some(name_key)) => {
            // As TOML, so that a number is no text.
            let name_of = |entry: &Value| entry.get(name_key).map(Value::to_string);
            if merging.prune {
                let named: HashSet<_> = more.iter().map(name_of).collect();
                own.retain(|own| named.contains(&name_of(own)));
            }
            // The first one of a name is the one that is merged.
            let mut places: HashMap<_, _> =
                own.iter().enumerate().rev().map(|(at, own)| (name_of(own), at)).collect();
            for entry in more {
                let name = name_of(&entry);
                let known = places.get(&name).and_then(|at| own.get_mut(*at));
                match (known.and_then(Value::as_table_mut), entry) {
                    (Some(known), Value::Table(entry)) => {
                        path.push(String::new());
                        merge_all(merging, path, known, entry);
                        path.pop();
                    }
                    (_, entry) => {
                        places.entry(name).or_insert(own.len());
                        own.push(entry);
                    }
                }
            }
        }
        (Some(Value::Array(own)), Value::Array(more), None) if path.len() == 1 && !merging.prune => {
            // As often as the fragment has it, so that a listener that is given twice is refused.
            let mut known: HashMap<String, usize> = HashMap::new();
            own.iter().for_each(|value| *known.entry(value.to_string()).or_default() += 1);
            own.extend(more.into_iter().filter(|value| {
                let left = known.get_mut(&value.to_string()).filter(|left| **left > 0);
                left.map(|left| *left -= 1).is_none()
            }));
        }
        (Some(Value::Table(own)), Value::Table(more), None) if !merging.prune => {
            merge_all(merging, path, own, more);
        }
        (_, value, _) => drop(table.insert(key, value)),
    }
}

fn merge_all(merging: &Merging<'_>, path: &mut Vec<String>, table: &mut Table, more: Table) {
    for (key, value) in more {
        path.push(key.clone());
        merge(merging, path, table, key, value);
        path.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Frontends;

    #[test]
    fn a_fragment_changes_only_the_entries_that_it_names() {
        let schema = Schema::new(&Frontends::default());
        let table: Table = "cores = 1\nnbd = [':1']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n\
            [[iscsi_target]]\nTargetName = 'iqn.a'\nluns = { 0 = 'a' }\nMaxConnections = 2\n\
            [[iscsi_target.acl]]\nInitiatorName = 'iqn.i'"
            .parse()
            .unwrap();
        let fragment: Table =
            "nbd = [':2', ':1']\n[[volume]]\nname = 'b'\nspec = 'mem:2m'\n[[iscsi_target]]\n\
            TargetName = 'iqn.a'\nluns = { 1 = 'b' }\n[[iscsi_target.acl]]\nInitiatorName = 'iqn.j'"
                .parse()
                .unwrap();
        let merged = |prune| {
            let mut table = table.clone();
            for (key, value) in fragment.clone() {
                let merging = Merging { schema: &schema, prune };
                merge(&merging, &mut vec![key.clone()], &mut table, key, value);
            }
            table
        };
        let expected: Table = "cores = 1\nnbd = [':1', ':2']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n\
            [[volume]]\nname = 'b'\nspec = 'mem:2m'\n\
            [[iscsi_target]]\nTargetName = 'iqn.a'\nluns = { 0 = 'a', 1 = 'b' }\nMaxConnections = 2\n\
            [[iscsi_target.acl]]\nInitiatorName = 'iqn.i'\n[[iscsi_target.acl]]\nInitiatorName = 'iqn.j'"
            .parse()
            .unwrap();
        assert_eq!(merged(false), expected);
        let pruned: Table = "cores = 1\nnbd = [':2', ':1']\n[[volume]]\nname = 'b'\nspec = 'mem:2m'\n\
            [[iscsi_target]]\nTargetName = 'iqn.a'\nluns = { 1 = 'b' }\nMaxConnections = 2\n\
            [[iscsi_target.acl]]\nInitiatorName = 'iqn.j'"
            .parse()
            .unwrap();
        assert_eq!(merged(true), pruned, "lists that the fragment has are as they are there");
    }
}
