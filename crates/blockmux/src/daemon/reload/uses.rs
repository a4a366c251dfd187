//! What uses a volume or a unit of a target in a config.

use super::plan::{ConfigChange, Schema};
use crate::api::edit::ObjectPath;
use crate::daemon::attachment::ATTACHMENTS;
use crate::daemon::setup::VOLUMES;
use crate::protocol::Frontends;
use crate::protocol::frontend::TargetTables;
use std::collections::BTreeSet;
use toml::{Table, Value};

/// Removes what uses an object that was removed from a config.
pub(super) fn remove_uses(table: &mut Table, frontends: &Frontends, ObjectPath(removed): &ObjectPath) {
    match &removed[..] {
        [list, volume] if list == VOLUMES.0 => remove_uses_of_volume(table, frontends, volume),
        [list, target, units, number] => {
            let mut all = frontends.target_tables().map(|(_, tables)| tables);
            let Some(tables) = all.find(|own| own.key == list && own.units.contains(&&**units)) else {
                return;
            };
            let targets = table.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten();
            let is_it = |own: &&mut Table| own.get(tables.name).and_then(Value::as_str) == Some(target);
            let target = targets.filter_map(Value::as_table_mut).find(is_it);
            target.into_iter().for_each(|own| remove_numbers(own, tables, std::slice::from_ref(number)));
        }
        _ => {}
    }
}

/// Removes a volume's attachment and its units of all targets.
fn remove_uses_of_volume(table: &mut Table, frontends: &Frontends, name: &str) {
    remove_attachment(table, name);
    for (_, tables) in frontends.target_tables() {
        let targets = table.get_mut(tables.key).and_then(Value::as_array_mut);
        for target in targets.into_iter().flatten().filter_map(Value::as_table_mut) {
            remove_volume(target, tables, name);
        }
    }
}

/// Removes the attachment of a volume from a config, if it has one.
fn remove_attachment(table: &mut Table, volume: &str) {
    let Some(list) = table.get_mut(ATTACHMENTS.0).and_then(Value::as_array_mut) else { return };
    list.retain(|entry| entry.get(ATTACHMENTS.1).and_then(Value::as_str) != Some(volume));
    if list.is_empty() {
        table.remove(ATTACHMENTS.0);
    }
}

/// Removes the units of a volume from a target, also from the maps of its peers.
fn remove_volume(target: &mut Table, tables: &TargetTables, name: &str) {
    let gone = remove_units(target, tables.units, |volume| volume == name);
    remove_numbers(target, tables, &gone);
    for (peers, _) in tables.peers {
        let list = target.get_mut(*peers).and_then(Value::as_array_mut);
        for peer in list.into_iter().flatten().filter_map(Value::as_table_mut) {
            remove_units(peer, tables.units, |volume| volume == name);
        }
    }
}

/// Removes the numbers of units that are gone from the lists of those that see them and of the
/// groups that they are in.
fn remove_numbers(target: &mut Table, tables: &TargetTables, gone: &[String]) {
    let is_kept = |number: &Value| !number.as_integer().is_some_and(|own| gone.contains(&own.to_string()));
    for (key, _) in tables.peers.iter().chain(tables.parts) {
        let list = target.get_mut(*key).and_then(Value::as_array_mut);
        for entry in list.into_iter().flatten().filter_map(Value::as_table_mut) {
            for units in tables.units {
                let numbers = entry.get_mut(*units).and_then(Value::as_array_mut);
                numbers.into_iter().for_each(|numbers| numbers.retain(is_kept));
            }
        }
    }
}

/// Removes the units of the volumes that are meant from a map; returns their numbers.
fn remove_units(target: &mut Table, units: &[&str], is_meant: impl Fn(&str) -> bool) -> Vec<String> {
    let mut gone = Vec::new();
    for key in units {
        match target.get_mut(*key) {
            Some(Value::Table(units)) => units.retain(|number, unit| {
                let is_gone = is_meant(volume_of(unit).unwrap_or_default());
                gone.extend(is_gone.then(|| number.to_owned()));
                !is_gone
            }),
            // A peer's list of numbers names no volumes.
            Some(Value::Array(entries)) => entries.retain(|entry| {
                let number = entry.get("nsid").and_then(Value::as_integer).unwrap_or_default().to_string();
                let is_gone = volume_of(entry).is_some_and(&is_meant);
                gone.extend(is_gone.then_some(number));
                !is_gone
            }),
            _ => {}
        }
    }
    gone
}

/// The volumes whose units are taken away from targets by changes of a config.
pub(super) fn detached_volumes(schema: &Schema, changes: &[ConfigChange]) -> BTreeSet<String> {
    let owned_volume = |unit: &Value| volume_of(unit).map(str::to_owned);
    let all = |units: &Value| -> Vec<String> {
        units_of(units).into_iter().filter_map(|(_, unit)| owned_volume(unit)).collect()
    };
    let of_change = |change: &ConfigChange| {
        let (Some(tables), Some(before)) = (schema.target(&change.path[0]), &change.before) else {
            return Vec::new();
        };
        match &change.path[..] {
            [_, _] => tables.units.iter().filter_map(|key| before.get(*key)).flat_map(all).collect(),
            [_, _, key] if tables.units.contains(&&**key) => all(before),
            [_, _, key, ..] if tables.units.contains(&&**key) => owned_volume(before).into_iter().collect(),
            _ => Vec::new(),
        }
    };
    changes.iter().flat_map(of_change).collect()
}

/// The units of a map or a list, each with its number.
pub(super) fn units_of(units: &Value) -> Vec<(u32, &Value)> {
    match units {
        Value::Table(units) => {
            units.iter().filter_map(|(number, unit)| Some((number.parse().ok()?, unit))).collect()
        }
        Value::Array(units) => {
            units.iter().filter_map(|unit| Some((number(unit.get("nsid")?)?, unit))).collect()
        }
        _ => Vec::new(),
    }
}

/// The number of a unit or a group.
pub(super) fn number(value: &Value) -> Option<u32> {
    value.as_integer()?.try_into().ok()
}

/// The volume of a unit, which may be its name or a table with it.
pub(super) fn volume_of(unit: &Value) -> Option<&str> {
    unit.as_str().or_else(|| unit.get("volume")?.as_str())
}
