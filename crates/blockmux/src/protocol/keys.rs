//! Keys of the config file: their errors, and the paths in their values.

use crate::access::secret;
use crate::failure::Failure;
use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// An error in the keys of a config file.
pub(crate) enum KeyError {
    /// A key or the type of a value is invalid; with the span in the file.
    Syntax(Option<Range<usize>>, String),
    /// The value is invalid; the message names its key.
    Invalid(Failure),
}

/// Where the files of a config are.
pub(crate) struct FilePlaces<'a> {
    /// The directory that relative paths are below.
    pub(crate) directory: &'a Path,
    /// The directory of secrets that are named and not written as paths.
    pub(crate) secrets: Option<&'a Path>,
}

/// Replaces the names of secrets in the values of a table by their paths.
///
/// # Errors
/// If a name is invalid, or there is no directory of secrets.
pub(crate) fn resolve_secrets(table: &mut DeTable<'_>, secrets: Option<&Path>) -> Result<(), KeyError> {
    table.iter_mut().try_for_each(|(key, value)| resolve_value(key.get_ref(), value, secrets))
}

fn resolve_value(
    key: &str,
    value: &mut Spanned<DeValue<'_>>,
    secrets: Option<&Path>,
) -> Result<(), KeyError> {
    let span = value.span();
    match value.get_mut() {
        DeValue::String(text) if FILES.iter().any(|end| key.ends_with(end)) => {
            let wrong = |what| KeyError::Syntax(Some(span), format!("{key}: {what}"));
            let path = secret::resolve(Path::new(&**text), secrets).map_err(wrong)?;
            *text = Cow::Owned(path.display().to_string());
            Ok(())
        }
        DeValue::Table(table) => resolve_secrets(table, secrets),
        DeValue::Array(items) => items.iter_mut().try_for_each(|item| resolve_value(key, item, secrets)),
        _ => Ok(()),
    }
}

/// Makes relative paths of files in a value absolute, below `directory`.
pub(crate) fn anchor(key: &str, value: &mut toml::Value, directory: &Path) {
    match value {
        toml::Value::String(path) if PATHS.iter().any(|end| key.ends_with(end)) => {
            *path = secret::below(directory, Path::new(path)).display().to_string();
        }
        toml::Value::Table(table) => {
            table.iter_mut().for_each(|(key, value)| anchor(key, value, directory));
        }
        toml::Value::Array(items) => items.iter_mut().for_each(|item| anchor(key, item, directory)),
        _ => {}
    }
}

/// Ends of the keys whose values are paths.
const PATHS: [&str; 5] = ["_file", "aoe_state", "_certificates", "_psk", "socket"];
/// Ends of the keys whose values are files with secrets.
const FILES: [&str; 2] = ["_file", "_psk"];
