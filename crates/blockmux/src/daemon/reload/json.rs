//! Values of a config as JSON, and back.

use serde_json::{Map, Value as Json};
use toml::{Table, Value};

/// A table of a config as JSON.
pub(super) fn json_of_table(table: &Table) -> Json {
    Json::Object(json_of_entries(table))
}

/// The keys of a table with their values as JSON.
pub(super) fn json_of_entries(table: &Table) -> Map<String, Json> {
    table.iter().map(|(key, value)| (key.clone(), json_of(value))).collect()
}

/// A value of a config as JSON.
pub(super) fn json_of(value: &Value) -> Json {
    match value {
        Value::Table(table) => json_of_table(table),
        Value::Array(items) => items.iter().map(json_of).collect(),
        Value::Integer(number) => (*number).into(),
        Value::Boolean(is_on) => (*is_on).into(),
        Value::Float(number) => (*number).into(),
        Value::String(text) => text.as_str().into(),
        Value::Datetime(time) => time.to_string().into(),
    }
}

/// An object of JSON as a table of a config, without the keys that are null.
///
/// # Errors
/// If a value has no place in a config; the message names its key.
pub(super) fn table_of(object: Map<String, Json>) -> Result<Table, String> {
    let object = object.into_iter().filter(|(_, value)| !value.is_null());
    object.map(|(key, value)| toml_of(&key, value).map(|value| (key, value))).collect()
}

/// A value of JSON as one of a config.
fn toml_of(key: &str, value: Json) -> Result<Value, String> {
    Ok(match value {
        Json::Object(object) => Value::Table(table_of(object)?),
        Json::Array(items) => {
            let items = items.into_iter().map(|item| toml_of(key, item));
            Value::Array(items.collect::<Result<_, _>>()?)
        }
        Json::Bool(is_on) => is_on.into(),
        Json::String(text) => text.into(),
        Json::Number(number) => match (number.as_i64(), number.as_f64().filter(|_| number.is_f64())) {
            (Some(whole), _) => whole.into(),
            (None, Some(number)) => number.into(),
            (None, None) => return Err(format!("{key}: {number} is too large")),
        },
        Json::Null => return Err(format!("{key}: null is no value in a list")),
    })
}
