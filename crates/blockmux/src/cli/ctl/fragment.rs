//! Config fragments that `ctl apply` sends to a daemon.

use crate::api::distinct_keys;
use crate::api::fragment::{Fragment, FragmentContent, STANDARD_INPUT};
use std::io::Read;

/// Reads a file, or standard input for `-`. One that begins with a brace is JSON: no TOML does.
pub(super) fn read(name: &str) -> Result<Fragment, String> {
    let mut text = String::new();
    let failed = |error: std::io::Error| format!("{name}: {error}");
    let path = match name {
        STANDARD_INPUT => {
            let failed = |error: std::io::Error| format!("standard input: {error}");
            std::io::stdin().take(MAX_LEN).read_to_string(&mut text).map_err(failed)?;
            std::env::current_dir().map_err(failed)?.join(STANDARD_INPUT)
        }
        _ => {
            let path = std::path::absolute(name).map_err(failed)?;
            let file = crate::process::regular::open(&path).map_err(failed)?;
            file.take(MAX_LEN).read_to_string(&mut text).map_err(failed)?;
            path
        }
    };
    let mut fragment = Fragment { path: Some(path), content: FragmentContent::Toml(text) };
    if let FragmentContent::Toml(text) = &fragment.content
        && text.trim_start().starts_with('{')
    {
        let title = fragment.title().display();
        let distinct = distinct_keys::check(text.as_bytes());
        let object = distinct.and_then(|()| serde_json::from_str(text).map_err(|error| error.to_string()));
        let object = object.map_err(|error| format!("{title}: {error}"))?;
        fragment.content = FragmentContent::Json(object);
    }
    Ok(fragment)
}

/// Maximum length in bytes, as for all files of a config.
const MAX_LEN: u64 = 4 << 20;
