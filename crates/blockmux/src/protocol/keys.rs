//! Keys of the config file: their errors, and the paths in their values.

use crate::failure::Failure;
use std::ops::Range;
use std::path::Path;

/// An error in the keys of a config file.
pub(crate) enum KeyError {
    /// A key or the type of a value is invalid; with the span in the file.
    Syntax(Option<Range<usize>>, String),
    /// The value is invalid; the message names its key.
    Invalid(Failure),
}

/// Makes relative paths of files in a value absolute, below `directory`.
pub(crate) fn anchor(key: &str, value: &mut toml::Value, directory: &Path) {
    match value {
        toml::Value::String(path) if PATHS.iter().any(|end| key.ends_with(end)) => {
            *path = directory.join(&*path).display().to_string();
        }
        toml::Value::Table(table) => {
            table.iter_mut().for_each(|(key, value)| anchor(key, value, directory));
        }
        toml::Value::Array(items) => items.iter_mut().for_each(|item| anchor(key, item, directory)),
        _ => {}
    }
}

/// Ends of the keys whose values are paths.
const PATHS: [&str; 4] = ["_file", "aoe_state", "_certificates", "_psk"];
