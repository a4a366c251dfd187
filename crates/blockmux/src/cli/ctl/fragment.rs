//! Config fragments that `ctl apply` sends to a daemon.

use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::PathBuf;

/// The text and the path of a config fragment. Relative paths in the text are relative to the
/// directory of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fragment {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

/// Reads a file, or standard input for `-`.
pub(super) fn read(name: &str) -> Result<Fragment, String> {
    let mut text = String::new();
    if name == "-" {
        std::io::stdin().take(MAX_LEN).read_to_string(&mut text).map_err(|error| error.to_string())?;
        let directory = std::env::current_dir().map_err(|error| error.to_string())?;
        return Ok(Fragment { path: directory.join("-"), text });
    }
    let path = std::path::absolute(name).map_err(|error| error.to_string())?;
    let file = crate::process::regular::open(&path).map_err(|error| error.to_string())?;
    file.take(MAX_LEN).read_to_string(&mut text).map_err(|error| error.to_string())?;
    Ok(Fragment { path, text })
}

/// Maximum length in bytes, as for all files of a config.
const MAX_LEN: u64 = 4 << 20;
