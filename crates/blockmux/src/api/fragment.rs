//! A part of a config that a client applies to a daemon, or the whole of one that a daemon returns:
//! as JSON, which has the keys of a config file, or as TOML.

use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// A part of a config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fragment {
    /// Its file, for messages; relative paths are relative to the directory of the file, or to the
    /// daemon's directory if there is no file.
    pub(crate) path: Option<PathBuf>,
    pub(crate) content: FragmentContent,
}

/// The content of a [`Fragment`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FragmentContent {
    Toml(String),
    Json(Map<String, Value>),
}

/// How a fragment is applied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ApplyOptions {
    /// Remove the entries that its lists lack.
    pub(crate) prune: bool,
    /// Only compute what would change.
    pub(crate) dry_run: bool,
    /// The tag that the config must have, so that no change is overwritten that the author has not
    /// seen.
    pub(crate) if_match: Option<String>,
}

impl Fragment {
    /// What messages call it.
    pub(crate) fn title(&self) -> &Path {
        let Some(path) = &self.path else { return Path::new("the request") };
        match path.file_name() {
            Some(name) if name == STANDARD_INPUT => Path::new("standard input"),
            _ => path,
        }
    }
}

/// The file name that stands for standard input.
pub(crate) const STANDARD_INPUT: &str = "-";
/// The media type of a config file.
pub(crate) const TOML: &str = "application/toml";
/// The media type of JSON.
pub(crate) const JSON: &str = "application/json";
