//! The objects of a config: found, listed and edited by their path.
//!
//! A path has keys and names by turns. `volume` is a list, `volume/root` an object of it;
//! `iscsi_target/iqn.a/luns` is a list within an object. `daemon/settings` is the object of all
//! keys that are no list. The keys are those of the config file, so the schema of configs says
//! which lists there are ([`Schema::name_key`]), and a config says the rest.

use super::json::{json_of, json_of_table, table_of};
use super::plan::Schema;
use crate::api::edit::{ANY, EditOperation, EditOptions, ListQuery, ObjectItem, ObjectList, ObjectPath};
use crate::api::{ApiError, ErrorCode};
use crate::daemon::config::current_directory;
use crate::protocol::PROTOCOLS;
use crate::protocol::address::ListenerEntry;
use serde_json::{Map, Value as Json};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use toml::{Table, Value};

/// How a list holds its objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ObjectKind {
    /// Tables in an array; this key has their names.
    Tables(&'static str),
    /// A table from numbers to volumes, or to tables with a volume.
    Units,
    /// An array of names.
    Names,
    /// An array of addresses with parameters.
    Listeners,
}

impl ObjectKind {
    /// The name of an element of an array; `None` if the array has no such elements.
    fn name(self, own: &Value) -> Option<Cow<'_, str>> {
        match (self, own) {
            (ObjectKind::Tables(name_key), Value::Table(own)) => Some(name_of(own, name_key)),
            (ObjectKind::Listeners, Value::String(own)) => Some(ListenerEntry::address_of(own).into()),
            (ObjectKind::Names, Value::String(own)) => Some(own.into()),
            _ => None,
        }
    }

    /// The keys of an element of an array.
    fn object(self, own: &Value) -> Json {
        match (self, own) {
            (ObjectKind::Tables(_), Value::Table(own)) => json_of_table(own),
            (ObjectKind::Listeners, Value::String(own)) => Json::Object(ListenerEntry::object(own)),
            _ => Json::Object(Map::new()),
        }
    }
}

/// The key of a unit's volume.
const VOLUME: &str = "volume";
/// The list and the name of the object that has the keys which are no list.
pub(super) const SETTINGS: [&str; 2] = ["daemon", "settings"];
/// The name of an entry without one, which applies to all that have no entry of their own.
const ALL: &str = "*";

/// The objects of a config.
pub(in crate::daemon) struct Objects<'a> {
    schema: &'a Schema,
    table: &'a mut Table,
}

impl<'a> Objects<'a> {
    pub(in crate::daemon) fn new(schema: &'a Schema, table: &'a mut Table) -> Objects<'a> {
        Objects { schema, table }
    }

    /// Lists the objects of a list, or the lists of an object.
    ///
    /// # Errors
    /// If there is no such list.
    pub(in crate::daemon) fn list(
        &self,
        ObjectPath(path): &ObjectPath,
        query: &ListQuery,
    ) -> Result<ObjectList, ApiError> {
        let mut items = match path.is_empty() {
            true => self.kinds(),
            false => self.items(path)?,
        };
        items.sort_by(|a, b| by_number(&a.name).cmp(&by_number(&b.name)));
        items.retain(|item| item.name.contains(&query.filter));
        if let Some(after) = &query.after {
            items.retain(|item| by_number(&item.name) > by_number(after));
        }
        let limit = query.limit.unwrap_or(MAX_ITEMS).clamp(1, MAX_ITEMS);
        let is_more = items.len() > limit;
        items.truncate(limit);
        let next = items.last().filter(|_| is_more).map(|last| last.name.clone());
        Ok(ObjectList { items, next })
    }

    /// The object at a path.
    ///
    /// # Errors
    /// If there is none.
    pub(in crate::daemon) fn show(&self, path: &ObjectPath) -> Result<Json, ApiError> {
        self.find(&path.0)?.ok_or_else(|| not_found(path))
    }

    /// Changes one object.
    ///
    /// # Errors
    /// If there is no such object or it exists already, it has another tag, or a value has no place
    /// in a config.
    pub(in crate::daemon) fn edit(
        &mut self,
        path: &ObjectPath,
        operation: &EditOperation,
        options: &EditOptions,
    ) -> Result<(), ApiError> {
        let before = self.find(&path.0)?;
        let own = before.as_ref().map(tag);
        let has_one_of = |tags: &String| has_one_of(own.as_deref(), tags);
        let failed = |what| Err(ApiError::new(ErrorCode::PreconditionFailed, format!("{path}: {what}")));
        if options.if_match.as_ref().is_some_and(|tags| !has_one_of(tags)) {
            return failed("has changed since it was read; read it again");
        }
        if options.if_none_match.as_ref().is_some_and(has_one_of) {
            return failed("exists already; change it with 'ctl set'");
        }
        let after = match (operation, before) {
            (EditOperation::Set(_) | EditOperation::Remove, None) => return Err(not_found(path)),
            (EditOperation::Put(object), _) => Some(object.clone()),
            (EditOperation::Set(patch), Some(before)) => {
                let mut object = before.as_object().cloned().unwrap_or_default();
                merge(&mut object, patch);
                Some(object)
            }
            (EditOperation::Remove, Some(_)) => None,
        };
        self.store(&path.0, after).map_err(|what| ApiError::invalid(format!("{path}: {what}")))
    }

    /// The lists of the whole config, each with the number of its objects.
    fn kinds(&self) -> Vec<ObjectItem> {
        let item = |name: &str, count: usize| ObjectItem {
            name: name.to_owned(),
            object: Json::Object(Map::from_iter([("count".to_owned(), count.into())])),
        };
        let lists = self.schema.lists().filter_map(|key| {
            let items = self.items(&[key.to_owned()]).ok()?;
            Some(item(key, items.len()))
        });
        lists.chain([item(SETTINGS[0], 1)]).collect()
    }

    /// How the list at this path holds its objects; `None` if there is no such list.
    fn kind(&self, path: &[String]) -> Option<ObjectKind> {
        match path {
            [key] if self.schema.is_listeners(key) => Some(ObjectKind::Listeners),
            [_] => self.schema.name_key(path).map(ObjectKind::Tables),
            [list, _, part] => {
                let tables = self.schema.target(list)?;
                if let Some(name_key) = self.schema.name_key(path) {
                    return Some(ObjectKind::Tables(name_key));
                }
                if tables.peers.iter().any(|(key, name)| key == part && name.is_empty()) {
                    return Some(ObjectKind::Names);
                }
                tables.units.contains(&part.as_str()).then_some(ObjectKind::Units)
            }
            _ => None,
        }
    }

    /// The value of a list; `None` if it is empty and absent.
    fn value(&self, path: &[String]) -> Result<Option<&Value>, ApiError> {
        Ok(match path {
            [key] => self.table.get(key),
            [list, name, part] => {
                let above = ObjectPath(vec![list.clone(), name.clone()]);
                let owner = self.entry(list, name).ok_or_else(|| not_found(&above))?;
                owner.get(part)
            }
            _ => None,
        })
    }

    /// The table of an object in a list of the config.
    fn entry(&self, list: &str, name: &str) -> Option<&Table> {
        let name_key = self.schema.name_key(&[list.to_owned()])?;
        let entries = self.table.get(list)?.as_array()?;
        entries.iter().filter_map(Value::as_table).find(|entry| name_of(entry, name_key) == name)
    }

    /// The keys that are no list.
    fn settings(&self) -> Json {
        let own = |key: &&String| !self.schema.lists().any(|list| list == key.as_str());
        let keys = self.table.iter().filter(|(key, _)| own(key));
        Json::Object(keys.map(|(key, value)| (key.clone(), json_of(value))).collect())
    }

    fn items(&self, path: &[String]) -> Result<Vec<ObjectItem>, ApiError> {
        if let [list] = path
            && list == SETTINGS[0]
        {
            return Ok(vec![ObjectItem { name: SETTINGS[1].to_owned(), object: self.settings() }]);
        }
        let kind = self.kind(path).ok_or_else(|| self.no_list(path))?;
        let value = self.value(path)?;
        let item = |name: &str, object: Json| ObjectItem { name: name.to_owned(), object };
        let entries = value.and_then(Value::as_array).into_iter().flatten();
        Ok(match kind {
            ObjectKind::Units => value
                .and_then(Value::as_table)
                .into_iter()
                .flatten()
                .map(|(number, unit)| item(number, unit_object(unit)))
                .collect(),
            _ => entries.filter_map(|own| Some(item(&kind.name(own)?, kind.object(own)))).collect(),
        })
    }

    /// The object at a path, if it exists.
    fn find(&self, path: &[String]) -> Result<Option<Json>, ApiError> {
        match path {
            path if *path == SETTINGS => Ok(Some(self.settings())),
            [list, _] if list == SETTINGS[0] => Ok(None),
            [list @ .., name] if list.len() == 1 || list.len() == 3 => {
                let kind = self.kind(list).ok_or_else(|| self.no_list(list))?;
                let (name, value) = (self.exact_name(list, name), self.value(list)?);
                if kind == ObjectKind::Units {
                    let units = value.and_then(Value::as_table);
                    return Ok(units.and_then(|units| units.get(&name)).map(unit_object));
                }
                let mut entries = value.and_then(Value::as_array).into_iter().flatten();
                let found = entries.find(|entry| kind.name(entry).as_deref() == Some(&name));
                Ok(found.map(|entry| kind.object(entry)))
            }
            _ => Err(self.no_list(path)),
        }
    }

    /// The name of an object as the config has it: a listener's address is complete there.
    fn exact_name(&self, list: &[String], name: &str) -> String {
        let protocol = PROTOCOLS.iter().find(|protocol| list.len() == 1 && protocol.key() == list[0]);
        let Some(protocol) = protocol else { return name.to_owned() };
        match ListenerEntry::read(protocol.carrier, name) {
            Ok(mut entry) => {
                entry.address.anchor(&current_directory());
                entry.in_full(protocol.port)
            }
            Err(_) => name.to_owned(),
        }
    }

    /// Replaces, adds or removes the object at a path.
    fn store(&mut self, path: &[String], after: Option<Map<String, Json>>) -> Result<(), String> {
        if path == SETTINGS {
            return self.store_settings(after.ok_or("the daemon always has settings; remove single keys")?);
        }
        let [list @ .., name] = path else { return Ok(()) };
        let kind = self.kind(list).ok_or("there is no such list")?;
        let (name, key) = (self.exact_name(list, name), list[list.len() - 1].clone());
        let owner = match list {
            [above, owner, _] => {
                let name_key = self.schema.name_key(std::slice::from_ref(above)).unwrap_or_default();
                let entries = self.table.get_mut(above).and_then(Value::as_array_mut);
                let mut entries = entries.into_iter().flatten().filter_map(Value::as_table_mut);
                entries.find(|entry| name_of(entry, name_key) == *owner).ok_or("it does not exist")?
            }
            _ => &mut *self.table,
        };
        if kind == ObjectKind::Units {
            return store_unit(owner, &key, &name, after);
        }
        let entry = after.map(|object| entry_of(kind, &name, object)).transpose()?;
        let entries = owner.entry(&*key).or_insert_with(|| Value::Array(Vec::new()));
        let entries = entries.as_array_mut().ok_or("is no list in this config")?;
        let at = entries.iter().position(|own| kind.name(own).as_deref() == Some(&name));
        match (at, entry) {
            (Some(at), Some(entry)) => entries[at] = entry,
            (Some(at), None) => drop(entries.remove(at)),
            (None, Some(entry)) => entries.push(entry),
            (None, None) => {}
        }
        // An absent list of listeners would stand for the default ones.
        if entries.is_empty() && kind != ObjectKind::Listeners {
            owner.remove(&*key);
        }
        Ok(())
    }

    fn store_settings(&mut self, after: Map<String, Json>) -> Result<(), String> {
        let lists: Vec<_> = self.schema.lists().map(str::to_owned).collect();
        if let Some(key) = after.keys().find(|key| lists.contains(key)) {
            return Err(format!("{key} is a list of objects; change it as '{key} NAME'"));
        }
        self.table.retain(|key, _| lists.iter().any(|list| list == key));
        self.table.extend(table_of(after)?);
        Ok(())
    }

    /// The refusal of a path that leads to no list.
    fn no_list(&self, path: &[String]) -> ApiError {
        let known: Vec<&str> = match path {
            [list, _, ..] if self.schema.target(list).is_some() => self.schema.parts(list).collect(),
            [_, _, ..] => Vec::new(),
            _ => self.schema.lists().chain([SETTINGS[0]]).collect(),
        };
        let what = ObjectPath(path.to_vec());
        ApiError::not_found(match known.is_empty() {
            true => format!("{what}: has no lists of objects; name the object that has the key"),
            false => format!("{what}: no objects have this path; choose one of {}", known.join(", ")),
        })
    }
}

/// The tag of an object, which changes with it (RFC 9110 §8.8.3).
pub(in crate::daemon) fn tag(object: &Json) -> String {
    let digest = Sha256::digest(object.to_string());
    let short = digest.iter().take(8).map(|byte| format!("{byte:02x}"));
    format!("\"{}\"", short.collect::<String>())
}

/// Whether a conditional header has this tag.
pub(super) fn has_one_of(own: Option<&str>, tags: &str) -> bool {
    let mut tags = tags.split(',').map(str::trim);
    tags.any(|tag| own == Some(tag) || tag == ANY && own.is_some())
}

/// The name of an entry: text, or a number as text.
fn name_of<'a>(entry: &'a Table, name_key: &str) -> Cow<'a, str> {
    match entry.get(name_key) {
        Some(Value::String(name)) => name.as_str().into(),
        Some(name) => name.to_string().into(),
        None => ALL.into(),
    }
}

/// The value of an object in an array.
fn entry_of(kind: ObjectKind, name: &str, object: Map<String, Json>) -> Result<Value, String> {
    Ok(match kind {
        ObjectKind::Tables(name_key) => {
            let mut table = table_of(object)?;
            // A name that is a number here is one in all configs.
            let number = name.parse::<i64>().ok().filter(|_| NUMBERS.contains(&name_key));
            let own = number.map_or_else(|| Value::from(name), Value::from);
            match table.get(name_key) {
                Some(given) if *given != own => {
                    return Err(format!(
                        "{name_key} is {given}; a name cannot change: remove it and add another"
                    ));
                }
                _ if name == ALL => {}
                _ => drop(table.insert(name_key.to_owned(), own)),
            }
            Value::Table(table)
        }
        ObjectKind::Listeners => ListenerEntry::text(name, &object)?.into(),
        ObjectKind::Names | ObjectKind::Units => match object.keys().next() {
            None => name.into(),
            Some(key) => return Err(format!("{key}: it has no keys; only its name counts")),
        },
    })
}

/// The keys of names that are numbers.
const NUMBERS: [&str; 2] = ["nsid", "ANAGRPID"];

/// Replaces, adds or removes a unit of a map.
fn store_unit(
    owner: &mut Table,
    key: &str,
    number: &str,
    after: Option<Map<String, Json>>,
) -> Result<(), String> {
    let units = owner.entry(key).or_insert_with(|| Value::Table(Table::new()));
    let units = units.as_table_mut().ok_or("is no map of units in this config")?;
    let Some(object) = after else {
        units.remove(number);
        return Ok(());
    };
    let unit = match object.get(VOLUME) {
        // The short form, if the volume is all that it says.
        Some(Json::String(volume)) if object.len() == 1 => Value::from(volume.as_str()),
        Some(_) => Value::Table(table_of(object)?),
        None => return Err("it needs a volume, as volume=NAME".to_owned()),
    };
    units.insert(number.to_owned(), unit);
    Ok(())
}

/// The object of a unit, which may be the name of its volume.
fn unit_object(unit: &Value) -> Json {
    match unit {
        Value::Table(unit) => json_of_table(unit),
        volume => Json::Object(Map::from_iter([(VOLUME.to_owned(), json_of(volume))])),
    }
}

/// Applies a JSON merge patch (RFC 7396 §2).
fn merge(object: &mut Map<String, Json>, patch: &Map<String, Json>) {
    for (key, value) in patch {
        match value {
            Json::Null => drop(object.remove(key)),
            Json::Object(patch) => {
                let mut own = object.get(key).and_then(Json::as_object).cloned().unwrap_or_default();
                merge(&mut own, patch);
                object.insert(key.clone(), Json::Object(own));
            }
            value => drop(object.insert(key.clone(), value.clone())),
        }
    }
}

/// Orders names: numbers by value, before all others.
fn by_number(name: &str) -> (Option<u64>, &str) {
    let number = name.parse().ok();
    (Some(number.unwrap_or(u64::MAX)), name)
}

fn not_found(path: &ObjectPath) -> ApiError {
    ApiError::not_found(format!("{path}: does not exist"))
}

/// Maximum number of objects in an answer.
const MAX_ITEMS: usize = 1000;
