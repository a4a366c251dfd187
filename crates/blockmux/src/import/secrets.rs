//! Secrets of a foreign config, in files that only their owner can read.

use super::model::{ChapUser, ImportedSecret, KeyPlace};
use crate::failure::Failure;
use blockmux_engine::sys::{random_bytes, safe_path};
use data_encoding::HEXLOWER;
use rustix::fs::{Mode, OFlags};
use std::io::Write;
use std::path::Path;
use zeroize::Zeroizing;

/// The files that the written config names.
pub(super) struct SecretFiles {
    /// The directory as the config names it; with a `/` at its end unless it is empty.
    prefix: String,
    files: Vec<NamedSecret>,
}

struct NamedSecret {
    name: String,
    secret: ImportedSecret,
    /// What was asked to be stored, if `secret` had to be another one.
    replaced: Option<ImportedSecret>,
}

/// The file of a secret, as the config names it.
pub(super) struct SecretPath {
    pub(super) path: String,
    /// What an administrator has to do about it.
    pub(super) advice: Option<&'static str>,
}

impl SecretFiles {
    /// Files in a directory, which the config names by `prefix`.
    pub(super) fn new(prefix: String) -> SecretFiles {
        SecretFiles { prefix, files: Vec::new() }
    }

    pub(super) fn count(&self) -> usize {
        self.files.len()
    }

    /// The number of secrets that initiators do not have yet.
    pub(super) fn count_new(&self) -> usize {
        self.files.iter().filter(|file| file.replaced.is_some()).count()
    }

    /// The file of a CHAP secret. One that Blockmux refuses is replaced by a random one, because an
    /// entry without a secret would let everybody in. `other` is that of the peer, from which it
    /// must differ (RFC 7143 §9.2.1).
    ///
    /// # Errors
    /// If the system provides no random bytes.
    pub(super) fn chap(&mut self, user: &ChapUser, other: Option<&ChapUser>) -> Result<SecretPath, Failure> {
        let text = user.secret.0.as_str();
        let is_line = !text.contains(['\n', '\r', '\0']);
        let is_unlike = other.is_none_or(|other| other.secret != user.secret);
        let is_placeholder = text == TGT_PLACEHOLDER;
        let is_fine = LENGTHS.contains(&text.len()) && is_line && is_unlike && !is_placeholder;
        let stem = format!("chap-{}", user.name);
        if is_fine {
            return Ok(SecretPath { path: self.add(&stem, user.secret.clone(), None), advice: None });
        }
        let random = match self.files.iter().find(|file| {
            file.replaced.as_ref() == Some(&user.secret)
                && file.name.starts_with(&stem_of(&stem))
                && is_unlike
        }) {
            Some(file) => file.secret.clone(),
            None => random_secret()?,
        };
        let advice = match (is_placeholder, is_unlike) {
            (true, _) => "the file did not have this secret: a new one was made; replace it by the real one",
            (_, false) => "both sides had the same secret: this one is new; set it on the initiator, too",
            _ => "the secret was not 12 to 255 bytes long: a new one was made; set it on the initiator, too",
        };
        let path = self.add(&stem, random, Some(user.secret.clone()));
        Ok(SecretPath { path, advice: Some(advice) })
    }

    /// The file of a key of NVMe. A file that the foreign config names stays where it is.
    pub(super) fn key(&mut self, stem: &str, place: &KeyPlace) -> String {
        match place {
            KeyPlace::File(path) => path.clone(),
            KeyPlace::Text(secret) => self.add(stem, secret.clone(), None),
        }
    }

    /// The path of the file for a secret; equal secrets of one name have one file.
    fn add(&mut self, stem: &str, secret: ImportedSecret, replaced: Option<ImportedSecret>) -> String {
        let stem = stem_of(stem);
        let name = |number: usize| match number {
            0 => format!("{stem}.secret"),
            number => format!("{stem}-{}.secret", number + 1),
        };
        for name in (0..).map(name) {
            match self.files.iter().find(|file| file.name == name) {
                Some(file) if file.secret == secret => return format!("{}{name}", self.prefix),
                Some(_) => {}
                None => {
                    let path = format!("{}{name}", self.prefix);
                    self.files.push(NamedSecret { name, secret, replaced });
                    return path;
                }
            }
        }
        unreachable!("there are fewer files than numbers")
    }

    /// Writes the files, each with mode 0600, into a directory that only its owner can read if it
    /// is new.
    ///
    /// # Errors
    /// If the directory or a file cannot be created, or a file exists: its secret may be in use.
    pub(super) fn write(&self, directory: &Path) -> Result<(), Failure> {
        if self.files.is_empty() {
            return Ok(());
        }
        let failure = |path: &Path, error: std::io::Error| {
            Failure::run(format!(
                "{}: cannot write the secret: {error}; name another directory",
                path.display()
            ))
        };
        make_directory(directory).map_err(|error| failure(directory, error))?;
        for file in &self.files {
            let path = directory.join(&file.name);
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
            let line = Zeroizing::new(format!("{}\n", *file.secret.0));
            safe_path::open(&path, flags, Mode::from_raw_mode(0o600))
                .and_then(|mut opened| opened.write_all(line.as_bytes()))
                .map_err(|error| failure(&path, error))?;
        }
        Ok(())
    }
}

fn make_directory(directory: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    match std::fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && directory.is_dir() => Ok(()),
        made => made,
    }
}

/// The beginning of a file's name.
fn stem_of(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    text.chars().take(MAX_STEM).map(|c| if is_plain(c) { c } else { '-' }).collect()
}

fn random_secret() -> Result<ImportedSecret, Failure> {
    let bytes = random_bytes::<16>()
        .map_err(|error| Failure::run(format!("cannot get random bytes for a secret: {error}; try again")))?;
    Ok(ImportedSecret::new(HEXLOWER.encode(&bytes)))
}

/// Lengths of CHAP secrets that a target of ours accepts (RFC 7143 §9.2.1), in bytes.
const LENGTHS: std::ops::RangeInclusive<usize> = 12..=255;
/// What `tgt-admin --dump` writes for each secret.
const TGT_PLACEHOLDER: &str = "PLEASE_CORRECT_THE_PASSWORD";
const MAX_STEM: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn user(name: &str, secret: &str) -> ChapUser {
        ChapUser::of(Some(name.to_owned()), Some(ImportedSecret::new(secret))).unwrap()
    }

    #[test]
    fn each_secret_has_one_file_that_only_its_owner_can_read() {
        let directory = tempfile::tempdir().unwrap();
        let there = directory.path().join("secrets");
        let mut files = SecretFiles::new("secrets/".to_owned());
        let joe = user("joe", "a secret of joe");
        let first = files.chap(&joe, None).unwrap();
        assert_eq!((first.path.as_str(), first.advice), ("secrets/chap-joe.secret", None));
        assert_eq!(files.chap(&joe, None).unwrap().path, first.path);
        assert_eq!(
            files.chap(&user("joe", "another of twelve"), None).unwrap().path,
            "secrets/chap-joe-2.secret"
        );
        assert_eq!(
            files.chap(&user("../x", "a secret of x"), None).unwrap().path,
            "secrets/chap-..-x.secret"
        );
        files.write(&there).unwrap();
        assert_eq!(fs::read_to_string(there.join("chap-joe.secret")).unwrap(), "a secret of joe\n");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&there), mode(&there.join("chap-joe.secret"))), (0o700, 0o600));
        let again = files.write(&there).unwrap_err().to_string();
        assert!(again.contains("chap-joe.secret: cannot write the secret") && !again.contains("a secret of"));
    }

    #[test]
    fn a_secret_that_cannot_be_used_is_replaced_by_a_random_one() {
        let mut files = SecretFiles::new(String::new());
        let long = "x".repeat(256);
        for secret in ["short", long.as_str(), "two lines\nof a secret", TGT_PLACEHOLDER] {
            assert!(files.chap(&user("u", secret), None).unwrap().advice.is_some(), "{secret}");
        }
        let (own, target) = (user("own", "the same secret"), user("target", "the same secret"));
        assert!(files.chap(&own, None).unwrap().advice.is_none());
        assert!(files.chap(&target, Some(&own)).unwrap().advice.unwrap().starts_with("both sides"));
        assert_eq!((files.count(), files.count_new()), (6, 5));
        assert!(files.files.iter().all(|file| LENGTHS.contains(&file.secret.0.len())));
        // One that two entries share is replaced by one.
        assert_eq!(files.chap(&user("u", "short"), None).unwrap().path, "chap-u.secret");
    }
}
