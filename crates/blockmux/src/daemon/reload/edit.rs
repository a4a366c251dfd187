//! Changes objects of the desired config: edits make another config of it, which is planned and
//! applied as any other.

use super::edits::{ChangeProgress, Edits};
use super::fragment::{keep_passwords, setup_of, with_absolute_paths};
use super::objects::{Objects, SETTINGS, tag};
use super::plan::{NETWORKS, Schema};
use super::{NewConfig, Reloader, RunningConfig, dry_run};
use crate::api::edit::{ConfigEdit, EditOperation, EditOptions, ListQuery, ObjectList, ObjectPath};
use crate::api::plan::PlanReport;
use crate::api::{ApiError, ErrorCode};
use crate::daemon::config::current_directory;
use crate::daemon::config_audit::Caller;
use crate::daemon::role::API_CERTIFICATES;
use crate::daemon::setup::{Setup, VOLUMES, generated_name};
use serde_json::Value as Json;
use std::collections::HashMap;
use std::sync::Arc;
use toml::{Table, Value};

/// The objects of the running config.
///
/// # Errors
/// If there is no such list.
pub(in crate::daemon) fn list(
    reloader: &Reloader,
    path: &ObjectPath,
    query: &ListQuery,
) -> Result<ObjectList, ApiError> {
    with_objects(reloader, |objects| objects.list(path, query))
}

/// One object of the running config, and its tag.
///
/// # Errors
/// If there is none.
pub(in crate::daemon) fn show(reloader: &Reloader, path: &ObjectPath) -> Result<(Json, String), ApiError> {
    let object = with_objects(reloader, |objects| objects.show(path))?;
    let tag = tag(&object);
    Ok((object, tag))
}

fn with_objects<T>(reloader: &Reloader, look: impl FnOnce(&Objects<'_>) -> T) -> T {
    let (config, schema) = (reloader.config.get(), Schema::new(&reloader.frontends.get()));
    let mut table = config.desired.table.clone();
    name_usual_listeners(&schema, &config, &mut table);
    look(&Objects::new(&schema, &mut table))
}

/// Changes one object of the running config. After an error nothing has changed.
///
/// # Errors
/// If the new config is refused, as that of a reload is; if the edit removes what sessions use,
/// without being forced to.
pub(in crate::daemon) fn make(
    reloader: &Arc<Reloader>,
    edit: &ConfigEdit,
    caller: &Caller,
    progress: &ChangeProgress<'_>,
) -> Result<PlanReport, ApiError> {
    let edits = Edits::from(edit);
    if !edit.options.dry_run {
        let guard = reloader.lock_edits(&edit.to_string(), caller)?;
        let step = guard.step.clone();
        return reloader.apply(&NewConfig::Edits(edits), (&step, Some(guard)), progress)?.finished();
    }
    dry_run::planned(reloader, Some(edits.clone()), move |planner, config| edited(planner, config, &edits))
}

/// Reads the files of secrets and certificates again.
///
/// # Errors
/// If one is invalid; then those that were read before stay.
pub(in crate::daemon) fn read_secrets(
    reloader: &Arc<Reloader>,
    caller: &Caller,
) -> Result<PlanReport, ApiError> {
    let operation = EditOperation::Set(serde_json::Map::new());
    let path = ObjectPath(SETTINGS.map(str::to_owned).to_vec());
    make(reloader, &ConfigEdit { path, operation, options: EditOptions::default() }, caller, &|_| {})
}

/// The setup of the desired config after edits.
///
/// # Errors
/// If the edits do not fit the config, or a start would refuse the result.
pub(super) fn edited(reloader: &Reloader, config: &RunningConfig, edits: &Edits) -> Result<Setup, ApiError> {
    let frontends = reloader.frontends.get();
    let schema = Schema::new(&frontends);
    let mut table = config.desired.table.clone();
    let mut lists = edits.objects.iter().filter_map(|edit| edit.path.0.first());
    let is_about_listener = lists.any(|list| schema.is_listeners(list));
    if is_about_listener {
        name_usual_listeners(&schema, config, &mut table);
    }
    edits.write(&schema, &frontends, &mut table)?;
    if is_about_listener && count_listeners(&schema, &table) == 0 {
        let text =
            "this is the last listener, and a daemon without any listens on loopback; add another one first";
        return Err(ApiError::new(ErrorCode::Conflict, text));
    }
    check_not_cut_off(&config.desired.table, &table)?;
    if !edits.force {
        check_not_opened(&schema, &config.desired.table, &table)?;
    }
    let (table, mut specs) = with_absolute_paths(table, &current_directory()).map_err(ApiError::invalid)?;
    keep_passwords(config, &mut specs);
    let resized = edits.resize.iter().filter_map(|asked| Some((asked.volume.clone(), asked.spec.clone()?)));
    specs.extend(resized);
    let mut setup = setup_of(reloader, config, &table, &specs).map_err(ApiError::invalid)?;
    let unnamed = setup.volumes.iter_mut().find(|own| edits.unnamed.as_ref() == Some(&own.name));
    unnamed.into_iter().for_each(|own| own.entry.name = None);
    name_out_of_order(&mut setup);
    Ok(setup)
}

/// Gives volumes whose names are generated theirs, if the next start would generate other ones.
fn name_out_of_order(setup: &mut Setup) {
    let mut count = 0;
    for own in &mut setup.volumes {
        if own.entry.name.is_some() {
            continue;
        }
        match own.name == generated_name(count) {
            true => count += 1,
            false => own.entry.name = Some(own.name.clone()),
        }
    }
}

/// Checks that commands still reach the daemon after its next start.
fn check_not_cut_off(before: &Table, after: &Table) -> Result<(), ApiError> {
    let is_reached = |table: &Table| ["control", "api"].iter().any(|key| table.contains_key(*key));
    match is_reached(before) && !is_reached(after) {
        true => {
            let text =
                "without `control` and `api` no command reaches the daemon after its next start; keep one";
            Err(ApiError::new(ErrorCode::Conflict, text))
        }
        false => Ok(()),
    }
}

/// Checks that no list of those who have access loses its last entry: without one, everybody has
/// access. The same holds for the last of the targets that somebody has no access to, because
/// without targets each volume has one for everybody.
fn check_not_opened(schema: &Schema, before: &Table, after: &Table) -> Result<(), ApiError> {
    let has_entry = |owner: &Table, key: &str| {
        owner.get(key).and_then(Value::as_array).is_some_and(|list| !list.is_empty())
    };
    // An empty list of names closes, an empty list of tables does not.
    let is_closed = |owner: &Table, peers: &[(&str, &str)]| {
        let closes =
            |(key, name): &(&str, &str)| has_entry(owner, key) || name.is_empty() && owner.contains_key(*key);
        owner.contains_key(NETWORKS) || peers.iter().any(closes)
    };
    let refusal = |what: &str| {
        let text = format!(
            "{what}: everybody would have access; close it by `allow` first, or write --force (API: ?force=true)"
        );
        ApiError::new(ErrorCode::Conflict, text)
    };
    let knows_clients =
        |table: &Table| ["api_tls_subject", API_CERTIFICATES.0].iter().any(|key| has_entry(table, key));
    if knows_clients(before) && !knows_clients(after) && after.contains_key("api") {
        return Err(refusal("the API"));
    }
    for tables in schema.targets() {
        let closed = schema.entries(before, tables).filter(|(_, owner)| is_closed(owner, tables.peers));
        let now: HashMap<&str, &Table> = schema.entries(after, tables).collect();
        for (name, _) in closed {
            let opens = now.get(name).map_or_else(
                || !has_entry(after, tables.key) && has_entry(after, VOLUMES.0),
                |now| !is_closed(now, tables.peers),
            );
            if opens {
                return Err(refusal(&format!("{} {name}", tables.key)));
            }
        }
    }
    Ok(())
}

/// Number of listeners that a config names.
fn count_listeners(schema: &Schema, table: &Table) -> usize {
    let lists = table.iter().filter(|(key, _)| schema.is_listeners(key));
    lists.filter_map(|(_, list)| list.as_array()).map(Vec::len).sum()
}

/// Names the listeners of a daemon whose config names none: those that it has without being told.
/// The next one that is added would else replace them.
fn name_usual_listeners(schema: &Schema, config: &RunningConfig, table: &mut Table) {
    if count_listeners(schema, table) > 0 {
        return;
    }
    for (_, listener) in &config.listeners {
        let list = table.entry(listener.protocol.key()).or_insert_with(|| Value::Array(Vec::new()));
        list.as_array_mut().into_iter().for_each(|list| list.push(listener.place.to_string().into()));
    }
}
