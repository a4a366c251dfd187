//! Config fragments that `ctl apply` sends to a daemon.

use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The text and the path of a config fragment. Relative paths in the text are relative to the
/// directory of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fragment {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

impl Fragment {
    /// The path for messages, or the name of standard input.
    pub(crate) fn title(&self) -> &Path {
        match self.path.file_name() {
            Some(name) if name == STANDARD_INPUT => Path::new("standard input"),
            _ => &self.path,
        }
    }
}

/// Reads a file, or standard input for `-`.
pub(super) fn read(name: &str) -> Result<Fragment, String> {
    let mut text = String::new();
    if name == STANDARD_INPUT {
        let failed = |error: std::io::Error| format!("standard input: {error}");
        std::io::stdin().take(MAX_LEN).read_to_string(&mut text).map_err(failed)?;
        let directory = std::env::current_dir().map_err(failed)?;
        return Ok(Fragment { path: directory.join(STANDARD_INPUT), text });
    }
    let failed = |error: std::io::Error| format!("{name}: {error}");
    let path = std::path::absolute(name).map_err(failed)?;
    let file = crate::process::regular::open(&path).map_err(failed)?;
    file.take(MAX_LEN).read_to_string(&mut text).map_err(failed)?;
    Ok(Fragment { path, text })
}

/// The name that stands for standard input.
const STANDARD_INPUT: &str = "-";

/// Maximum length in bytes, as for all files of a config.
const MAX_LEN: u64 = 4 << 20;
