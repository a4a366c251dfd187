//! Secrets that clients of the API have written: one file each in the state directory, which the
//! config names as `secret:NAME` or by its path. They are never read back; only what uses them
//! reads the files.

use super::config::current_directory;
use super::config_audit::Caller;
use super::named_lock::{NamedGuard, NamedLock};
use super::setup::check_name;
use crate::access::secret;
use crate::api::bodies::SecretInfo;
use crate::api::{ApiError, ErrorCode};
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;
use toml::{Table, Value};
use zeroize::Zeroizing;

/// The secrets of a daemon. There is no directory for them if the config names no state directory:
/// the default one may be another daemon's, too.
#[derive(Clone)]
pub(super) struct Secrets {
    directory: Option<PathBuf>,
    /// They are written and removed one after the other.
    changes: NamedLock,
}

impl Secrets {
    /// The secrets below a state directory.
    pub(super) fn below(state: Option<&Path>) -> Secrets {
        let directory = state.map(|state| secret::directory_below(&current_directory().join(state)));
        Secrets { directory, changes: NamedLock::default() }
    }

    /// Keeps other changes of secrets from beginning; `what` names this one.
    ///
    /// # Errors
    /// If another one is under way that takes long.
    pub(super) fn lock(&self, what: &str, caller: &Caller) -> Result<NamedGuard, ApiError> {
        self.changes.lock(what, caller)
    }

    /// The value of a secret, to be restored; `None` if there is none.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(super) fn keep(&self, name: &str) -> Result<Option<Zeroizing<String>>, ApiError> {
        check(name)?;
        let path = self.directory()?.join(name);
        let read = || -> io::Result<Zeroizing<String>> {
            if !fs::symlink_metadata(&path)?.is_file() {
                return Err(io::Error::other("is not a regular file"));
            }
            fs::read_to_string(&path).map(Zeroizing::new)
        };
        match read() {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            read => read.map(Some).map_err(|error| cannot(&path, &error)),
        }
    }

    /// Writes what [`Secrets::keep`] has returned.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn restore(&self, name: &str, kept: Option<&Zeroizing<String>>) -> Result<(), ApiError> {
        match kept {
            Some(value) => self.write(name, value, &Table::new()).map(drop),
            None => self.remove(name, &Table::new(), false).map(drop),
        }
    }

    /// All secrets by name, each with what uses it in a config. It reads the directory.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub(super) fn list(&self, config: &Table) -> Result<Vec<SecretInfo>, ApiError> {
        let Some(directory) = &self.directory else { return Ok(Vec::new()) };
        let entries = match fs::read_dir(directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            read => read.map_err(|error| cannot(directory, &error))?,
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<_> = names.filter(|name| check(name).is_ok()).collect();
        names.sort();
        let info = |name: String| {
            let path = directory.join(&name).display().to_string();
            SecretInfo { used_by: uses(config, &name, &path), name, path }
        };
        Ok(names.into_iter().map(info).collect())
    }

    /// Writes a secret, new or not, to stable storage; returns it. A crash leaves the old one or
    /// the new one.
    ///
    /// # Errors
    /// If the name or the value is invalid, or the file cannot be written.
    pub(super) fn write(&self, name: &str, value: &str, config: &Table) -> Result<SecretInfo, ApiError> {
        check(name)?;
        if value.is_empty() || value.len() > MAX_LEN {
            return Err(ApiError::invalid(format!("secret {name}: write 1 to {MAX_LEN} bytes")));
        }
        let directory = self.directory()?;
        let path = directory.join(name);
        let put = || -> io::Result<()> {
            let mut builder = DirBuilder::new();
            builder.recursive(true).mode(0o700).create(directory)?;
            directory.parent().map_or(Ok(()), |parent| File::open(parent)?.sync_all())?;
            remove_leftovers(directory)?;
            // Only this user can read it.
            let mut file = NamedTempFile::with_prefix_in(NEW, directory)?;
            file.write_all(value.as_bytes())?;
            if !value.ends_with('\n') {
                file.write_all(b"\n")?;
            }
            file.as_file().sync_all()?;
            file.persist(&path).map_err(|error| error.error)?;
            File::open(directory)?.sync_all()
        };
        put().map_err(|error| cannot(&path, &error))?;
        let path = path.display().to_string();
        Ok(SecretInfo { name: name.to_owned(), used_by: uses(config, name, &path), path })
    }

    /// Removes a secret; returns what still uses it.
    ///
    /// # Errors
    /// If there is none, or the config uses it and that is not forced.
    pub(super) fn remove(&self, name: &str, config: &Table, force: bool) -> Result<Vec<String>, ApiError> {
        check(name)?;
        let path = self.directory()?.join(name);
        let used_by = uses(config, name, &path.display().to_string());
        if !used_by.is_empty() && !force {
            let text = format!(
                "secret {name}: is used by {}; change that first, or write --force (API: ?force=true)",
                used_by.join(", ")
            );
            return Err(ApiError::new(ErrorCode::Conflict, text));
        }
        fs::remove_file(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => ApiError::not_found(format!("secret {name}: does not exist")),
            _ => cannot(&path, &error),
        })?;
        // Otherwise a secret that was revoked could be back after a power cut.
        let synced =
            self.directory().map(|directory| File::open(directory).and_then(|own| own.sync_all()))?;
        synced.map_err(|error| cannot(&path, &error))?;
        Ok(used_by)
    }

    fn directory(&self) -> Result<&Path, ApiError> {
        self.directory.as_deref().ok_or_else(|| {
            let text = "the config names no state directory for secrets; start the daemon with --state DIR";
            ApiError::new(ErrorCode::Conflict, text)
        })
    }
}

/// Removes what writes have left that were killed before they were done. One secret is written at a
/// time.
fn remove_leftovers(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(NEW.as_bytes()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// The beginning of the names of files that are being written.
const NEW: &str = ".new-";

fn check(name: &str) -> Result<(), ApiError> {
    let is_hidden = name.starts_with('.');
    check_name(name).map_err(ApiError::invalid)?;
    match is_hidden {
        true => {
            Err(ApiError::invalid(format!("`{name}` is not a valid name; begin it with a letter or digit")))
        }
        false => Ok(()),
    }
}

fn cannot(path: &Path, error: &io::Error) -> ApiError {
    ApiError::failed(format!("{}: {error}; check the state directory", path.display()))
}

/// The places of a config that name this secret or its path, as `iscsi_target iqn.a acl iqn.b
/// secret_file`.
fn uses(config: &Table, name: &str, path: &str) -> Vec<String> {
    let (mut found, reference) = (Vec::new(), secret::reference(name));
    let resolved = fs::canonicalize(path).ok();
    let is_same_file = |text: &str| {
        let text = Path::new(text);
        text.file_name() == Some(OsStr::new(name))
            && resolved.is_some()
            && fs::canonicalize(text).ok() == resolved
    };
    let is_meant = |text: &str| text == reference || names(text, path) || is_same_file(text);
    for (key, value) in config {
        find(value, &is_meant, key, &mut found);
    }
    found
}

fn find(value: &Value, is_meant: &impl Fn(&str) -> bool, place: &str, found: &mut Vec<String>) {
    match value {
        Value::String(text) if is_meant(text) => found.push(place.to_owned()),
        Value::Array(items) => items.iter().for_each(|item| find(item, is_meant, place, found)),
        Value::Table(table) => {
            // The name of an entry is its first text, whatever its key is.
            let name = NAMES.iter().find_map(|key| table.get(*key)?.as_str()).unwrap_or_default();
            for (key, value) in table {
                let below = format!("{place} {name} {key}").replace("  ", " ");
                find(value, is_meant, &below, found);
            }
        }
        _ => {}
    }
}

/// Whether a text is the path or has it, as the URL of a volume.
fn names(text: &str, path: &str) -> bool {
    let is_part = |next: char| next.is_ascii_alphanumeric() || "-_.".contains(next);
    text.match_indices(path).any(|(at, _)| !text[at + path.len()..].starts_with(is_part))
}

/// The keys of the names of entries that have secrets.
const NAMES: [&str; 6] = ["TargetName", "InitiatorName", "nqn", "hostnqn", "name", "subject"];
/// Maximum length of a secret in bytes: a file of pre-shared keys.
const MAX_LEN: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_secret_is_a_private_file_that_is_replaced_and_removed_unless_it_is_used() {
        let state = tempfile::tempdir().unwrap();
        let secrets = Secrets::below(Some(state.path()));
        let none = Table::new();
        assert_eq!(secrets.list(&none).unwrap(), []);
        let written = secrets.write("chap", "first", &none).unwrap();
        assert_eq!(fs::read_to_string(&written.path).unwrap(), "first\n");
        assert_eq!(fs::metadata(&written.path).unwrap().permissions().mode() & 0o777, 0o600);
        secrets.write("chap", "second\n", &none).unwrap();
        assert_eq!(fs::read_to_string(&written.path).unwrap(), "second\n");
        let config = format!(
            "[[iscsi_target]]\nTargetName = 'iqn.a'\n[[iscsi_target.acl]]\nInitiatorName = 'iqn.b'\nsecret_file = '{}'",
            written.path
        );
        let config: Table = config.parse().unwrap();
        let listed = secrets.list(&config).unwrap();
        assert_eq!(listed[0].used_by, ["iscsi_target iqn.a acl iqn.b secret_file"]);
        let by_name: Table =
            "[[nvme_subsystem]]\nnqn = 'nqn.a'\n[[nvme_subsystem.host]]\nhostnqn = 'nqn.h'\n\
            tls_key_file = 'secret:chap'\ndhchap_secret_file = 'secret:chap2'"
                .parse()
                .unwrap();
        assert_eq!(
            secrets.list(&by_name).unwrap()[0].used_by,
            ["nvme_subsystem nqn.a host nqn.h tls_key_file"]
        );
        let refused = secrets.remove("chap", &config, false).unwrap_err();
        assert!(refused.message.contains("is used by iscsi_target iqn.a"));
        assert_eq!(secrets.remove("chap", &config, true).unwrap(), listed[0].used_by);
        secrets.write("chap", "third", &none).unwrap();
        assert_eq!(secrets.remove("chap", &none, false).unwrap(), [""; 0]);
        assert_eq!(secrets.list(&none).unwrap(), []);
        assert_eq!(secrets.remove("chap", &none, true).unwrap_err().code, ErrorCode::NotFound);
        assert_eq!(fs::read_dir(state.path().join("secrets")).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn names_that_are_paths_and_values_that_are_no_secrets_are_refused() {
        let state = tempfile::tempdir().unwrap();
        let secrets = Secrets::below(Some(state.path()));
        for name in ["", ".", "..", "../x", "a/b", ".hidden", "a\0b"] {
            assert_eq!(
                secrets.write(name, "x", &Table::new()).unwrap_err().code,
                ErrorCode::Invalid,
                "{name}"
            );
        }
        let long = "x".repeat(MAX_LEN + 1);
        assert!(
            secrets.write("a", "", &Table::new()).is_err()
                && secrets.write("a", &long, &Table::new()).is_err()
        );
        assert!(Secrets::below(None).write("a", "x", &Table::new()).is_err());
    }
}
