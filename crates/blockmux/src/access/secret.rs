//! Reads secrets, keys and certificates from files, after a check of their permissions.

use crate::failure::Failure;
use crate::process::privileges;
use crate::process::regular;
use blockmux_engine::sys::acl::{self, AclSubject};
use rustix::process::geteuid;
use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// What a config writes before the name of a secret in the daemon's state directory, in place of a
/// path. A path that begins so is written `./secret:...`.
const SECRET: &str = "secret:";

/// The name of the secret that a config names in place of a path.
pub(crate) fn name_of(file: &Path) -> Option<&str> {
    file.to_str()?.strip_prefix(SECRET)
}

/// What a config names a secret by.
pub(crate) fn reference(name: &str) -> String {
    format!("{SECRET}{name}")
}

/// Makes a relative path relative to `directory`, unless it stands for a secret.
pub(crate) fn below(directory: &Path, file: &Path) -> PathBuf {
    match name_of(file) {
        Some(_) => file.to_owned(),
        None => directory.join(file),
    }
}

/// The path of a file that a config names. `secrets` is the directory of secrets, if there is one.
///
/// # Errors
/// If it stands for a secret and has no name of one, or there is no directory; the message says
/// what to do.
pub(crate) fn resolve(file: &Path, secrets: Option<&Path>) -> Result<PathBuf, String> {
    let Some(name) = name_of(file) else { return Ok(file.to_owned()) };
    if name.is_empty() || name.starts_with('.') || name.contains('/') {
        return Err(format!(
            "`{SECRET}{name}` names no secret; write {SECRET}NAME, or a path as ./{SECRET}..."
        ));
    }
    let directory = secrets.ok_or_else(|| {
        format!("{SECRET}{name}: the config names no state directory for secrets; add state = \"DIR\"")
    });
    directory.map(|directory| directory.join(name))
}

/// The directory of the secrets of a daemon with this state directory.
pub(crate) fn directory_below(state: &Path) -> PathBuf {
    state.join("secrets")
}

/// Reads a one-line secret from a regular file that only its owner can read, and parses it. `what`
/// names the file in messages.
///
/// # Errors
/// If the file cannot be read, others can read it, or `parse` fails.
pub(crate) fn read<T, E: Display>(
    what: &str,
    path: &Path,
    parse: impl FnOnce(&[u8]) -> Result<T, E>,
) -> Result<T, Failure> {
    read_line(what, path, MIN_LEN, parse)
}

/// Reads a one-line secret of any length, which another server may have chosen.
///
/// # Errors
/// As for [`read`].
pub(crate) fn read_any<T, E: Display>(
    what: &str,
    path: &Path,
    parse: impl FnOnce(&[u8]) -> Result<T, E>,
) -> Result<T, Failure> {
    read_line(what, path, 1, parse)
}

fn read_line<T, E: Display>(
    what: &str,
    path: &Path,
    min: usize,
    parse: impl FnOnce(&[u8]) -> Result<T, E>,
) -> Result<T, Failure> {
    privileges::hide_memory();
    let wrong = |problem: String| Failure::request(format!("{what} {}: {problem}", path.display()));
    parse(&line(path, min).map_err(wrong)?).map_err(|error| wrong(error.to_string()))
}

/// Reads a regular file of at most [`MAX_KEYS`] bytes that only its owner can read, and parses it.
///
/// # Errors
/// If the file cannot be read, is too long, others can read it, or `parse` fails.
pub(crate) fn read_all<T, E: Display>(
    what: &str,
    path: &Path,
    parse: impl FnOnce(&[u8]) -> Result<T, E>,
) -> Result<T, Failure> {
    privileges::hide_memory();
    let wrong = |problem: String| Failure::request(format!("{what} {}: {problem}", path.display()));
    parse(&bytes(path, MAX_KEYS, READABLE).map_err(wrong)?).map_err(|error| wrong(error.to_string()))
}

/// Reads a regular file that others can read but not write, such as the certificate of a trusted
/// authority.
///
/// # Errors
/// If the file cannot be read, is too long, or others can write to it.
pub(crate) fn read_public(what: &str, path: &Path) -> Result<Vec<u8>, Failure> {
    let wrong = |problem: String| Failure::request(format!("{what} {}: {problem}", path.display()));
    bytes(path, MAX_KEYS, WRITABLE).map(|bytes| bytes.to_vec()).map_err(wrong)
}

/// Permission bits that must not be set, and the message if one is.
type Forbidden = (u32, &'static str);

/// Reads a file of at most `max` bytes that belongs to this user or to root.
fn bytes(path: &Path, max: u64, (forbidden, problem): Forbidden) -> Result<Zeroizing<Vec<u8>>, String> {
    let file = regular::open(path).map_err(|error| format!("{error}; check its path"))?;
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    if metadata.uid() != geteuid().as_raw() && metadata.uid() != ROOT {
        return Err("belongs to another user, who can read it; change its owner with chown".to_owned());
    }
    if metadata.mode() & forbidden != 0 && !is_for_this_user(&file, forbidden) {
        return Err(problem.to_owned());
    }
    if metadata.len() > max {
        return Err(format!("is longer than {max} bytes; check its path"));
    }
    // The buffer never grows, so that no copy of the secret is left in freed memory.
    let mut bytes = Zeroizing::new(Vec::with_capacity(metadata.len() as usize + 32));
    file.take(max).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// Whether a POSIX ACL grants what is `forbidden` to nobody but the owner and this user. systemd
/// gives a service its credentials with such an ACL; the mode shows the mask of the ACL as the
/// group's permissions.
fn is_for_this_user(file: &File, forbidden: u32) -> bool {
    let Ok(Some(acl)) = acl::of(file) else { return false };
    acl.iter().all(|entry| match entry.subject {
        AclSubject::Owner | AclSubject::Mask => true,
        AclSubject::User(id) => id == geteuid().as_raw(),
        AclSubject::OwningGroup | AclSubject::Group(_) | AclSubject::Others => {
            entry.permissions & forbidden == 0
        }
    })
}

/// Parses a token, which is the line of a file.
///
/// # Errors
/// If it has characters that are not allowed in an HTTP header.
pub(crate) fn api_token(line: &[u8]) -> Result<Zeroizing<String>, &'static str> {
    let is_plain = line.iter().all(u8::is_ascii_graphic);
    let text = std::str::from_utf8(line).ok().filter(|_| is_plain);
    text.map(|text| Zeroizing::new(text.to_owned()))
        .ok_or("is not a token of ASCII characters without spaces; create one with `openssl rand -hex 32`")
}

fn line(path: &Path, min: usize) -> Result<Zeroizing<Vec<u8>>, String> {
    let bytes = bytes(path, MAX_FILE, READABLE)?;
    let line = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if line.len() < min || line.contains(&b'\n') || line.contains(&0) {
        return Err(match min {
            MIN_LEN => "must contain exactly one line, of at least 12 bytes".to_owned(),
            _ => "must contain exactly one line".to_owned(),
        });
    }
    Ok(Zeroizing::new(line.to_vec()))
}

const ROOT: u32 = 0;
/// Group and others must have no access.
const READABLE: Forbidden = (0o077, "others can read or write it; run chmod 600 on it");
/// Group and others must have no write access.
const WRITABLE: Forbidden = (0o022, "others can write to it; run chmod go-w on it");
/// Minimum length of a secret that this program or a tool generates, in bytes: 96 bits.
const MIN_LEN: usize = 12;
/// Maximum length of a secret's file, in bytes; longer than the longest secret.
const MAX_FILE: u64 = 1024;
/// Maximum length of a file of keys or certificates, in bytes: thousands of keys, or all
/// authorities of a system.
const MAX_KEYS: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{XattrFlags, fsetxattr};
    use rustix::io::Errno;
    use std::os::unix::fs::PermissionsExt;

    fn all_of(path: &Path) -> Result<Vec<u8>, Failure> {
        read(
            "key file",
            path,
            |line| if line.starts_with(b"no") { Err("is no key") } else { Ok(line.to_vec()) },
        )
    }

    fn said(mode: u32, content: &[u8]) -> Result<Vec<u8>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        all_of(file.path()).map_err(|failure| failure.to_string())
    }

    #[test]
    fn a_secret_is_named_by_a_prefix_that_no_path_needs() {
        let (directory, secrets) = (Path::new("/etc/b"), Some(Path::new("/var/b/secrets")));
        for (written, anchored, resolved) in [
            ("secret:chap", "secret:chap", "/var/b/secrets/chap"),
            ("chap", "/etc/b/chap", "/etc/b/chap"),
            ("./secret:chap", "/etc/b/./secret:chap", "/etc/b/./secret:chap"),
            ("/run/chap", "/run/chap", "/run/chap"),
        ] {
            let below = below(directory, Path::new(written));
            assert_eq!(below, Path::new(anchored));
            assert_eq!(resolve(&below, secrets), Ok(resolved.into()));
        }
        for wrong in ["secret:", "secret:.", "secret:../x", "secret:a/b"] {
            assert!(resolve(Path::new(wrong), secrets).unwrap_err().contains("names no secret"), "{wrong}");
        }
        assert!(resolve(Path::new("secret:a"), None).unwrap_err().contains("add state = "));
    }

    #[test]
    fn a_secret_is_the_only_line_of_a_private_file() {
        for content in [&b"twelve bytes"[..], b"twelve bytes\n", b"twelve bytes\r\n"] {
            assert_eq!(said(0o600, content).as_deref(), Ok(&b"twelve bytes"[..]));
        }
    }

    #[test]
    fn a_certificate_may_be_readable_but_not_writable_by_others() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "two lines\nof PEM").unwrap();
        for (mode, is_right) in [(0o600, true), (0o644, true), (0o664, false), (0o646, false)] {
            std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(mode)).unwrap();
            let public = read_public("certificate", file.path());
            assert_eq!(public.is_ok_and(|bytes| bytes == b"two lines\nof PEM"), is_right, "{mode:o}");
            let private = read_all("key", file.path(), |bytes| Ok::<_, String>(bytes.len()));
            assert_eq!(private.is_ok_and(|len| len == 16), mode == 0o600, "{mode:o}");
        }
        file.as_file().set_len(MAX_KEYS + 1).unwrap();
        assert!(read_public("certificate", file.path()).is_err());
    }

    #[test]
    fn an_acl_may_grant_access_to_this_user_and_nobody_else() {
        // The entries of an ACL: tag, permissions, ID.
        let (owner, mask, others) = ((0x01, 4, !0), (0x10, 4, !0), (0x20, 0, !0));
        let (this, another) = ((0x02, 4, geteuid().as_raw()), (0x02, 4, geteuid().as_raw() + 1));
        let (no_group, group, member) = ((0x04, 0, !0), (0x04, 4, !0), (0x08, 4, 1));
        for (entries, is_right) in [
            (&[owner, this, no_group, mask, others][..], true),
            (&[owner, this, another, no_group, mask, others], false),
            (&[owner, this, group, mask, others], false),
            (&[owner, this, no_group, member, mask, others], false),
            (&[owner, this, no_group, mask, (0x20, 4, !0)], false),
        ] {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), "twelve bytes").unwrap();
            let mut acl = 2_u32.to_le_bytes().to_vec();
            for &(tag, permissions, id) in entries {
                let (tag, permissions): (u16, u16) = (tag, permissions);
                acl.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
                acl.extend(u32::to_le_bytes(id));
            }
            let set = fsetxattr(&file, "system.posix_acl_access", &acl, XattrFlags::empty());
            if set == Err(Errno::OPNOTSUPP) {
                eprintln!("skipped: {} is on a file system without ACLs", file.path().display());
                return;
            }
            set.unwrap();
            assert_ne!(file.as_file().metadata().unwrap().mode() & 0o077, 0);
            assert_eq!(all_of(file.path()).is_ok(), is_right, "{entries:?}");
        }
    }

    #[test]
    fn files_that_others_can_read_and_invalid_secrets_are_refused_and_never_shown() {
        for (mode, content, expected) in [
            (0o640, &b"twelve bytes"[..], "others can read or write it; run chmod 600 on it"),
            (0o604, b"twelve bytes", "others can read or write it; run chmod 600 on it"),
            (0o600, b"too short", "must contain exactly one line, of at least 12 bytes"),
            (0o600, b"two lines of\ntext", "must contain exactly one line, of at least 12 bytes"),
            (0o600, b"no key at all", "is no key"),
        ] {
            let said = said(mode, content).unwrap_err();
            assert!(said.starts_with("key file /") && said.ends_with(expected), "{said}");
        }
        for path in ["/", "/dev/null", "/does/not/exist"] {
            assert!(all_of(Path::new(path)).is_err(), "{path}");
        }
    }
}
