//! Secrets and keys from files that nobody else may read.

use crate::failure::Failure;
use crate::privileges;
use crate::regular;
use rustix::process::geteuid;
use std::fmt::Display;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use zeroize::Zeroizing;

/// Reads a regular file that only its owner may read, of one line, and has `parse` make of it what
/// it is.
pub(crate) fn read<T, E: Display>(
    what: &str,
    path: &Path,
    parse: impl FnOnce(&[u8]) -> Result<T, E>,
) -> Result<T, Failure> {
    privileges::hide_memory();
    let wrong = |problem: String| Failure::request(format!("{what} {}: {problem}", path.display()));
    parse(&line(path).map_err(wrong)?).map_err(|error| wrong(error.to_string()))
}

fn line(path: &Path) -> Result<Zeroizing<Vec<u8>>, String> {
    let file = regular::open(path).map_err(|error| format!("{error}; check its path"))?;
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    if metadata.uid() != geteuid().as_raw() && metadata.uid() != ROOT {
        return Err("is somebody else's, who knows it then; make it your own, with chown".to_owned());
    }
    if metadata.mode() & OTHERS != 0 {
        return Err("others may read or write it; run chmod 600 on it".to_owned());
    }
    // With room for all of it, so that no smaller copy is left behind when it grows.
    let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_FILE as usize + 32));
    file.take(MAX_FILE).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    let line = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if line.len() < LEAST || line.contains(&b'\n') || line.contains(&0) {
        return Err("has to hold one line of at least 12 bytes, and nothing else".to_owned());
    }
    Ok(Zeroizing::new(line.to_vec()))
}

const ROOT: u32 = 0;
/// Group and others.
const OTHERS: u32 = 0o077;
/// In bytes: 96 bits, below which a secret must not be used without encryption (RFC 7143 §9.2.1).
const LEAST: usize = 12;
/// More than the longest secret, in bytes.
const MAX_FILE: u64 = 1024;

#[cfg(test)]
mod tests {
    use super::*;
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
    fn a_secret_is_the_line_of_a_private_file() {
        for content in [&b"twelve bytes"[..], b"twelve bytes\n", b"twelve bytes\r\n"] {
            assert_eq!(said(0o600, content).as_deref(), Ok(&b"twelve bytes"[..]));
        }
    }

    #[test]
    fn what_others_may_read_or_is_no_secret_is_refused_and_never_shown() {
        for (mode, content, expected) in [
            (0o640, &b"twelve bytes"[..], "others may read or write it; run chmod 600 on it"),
            (0o604, b"twelve bytes", "others may read or write it; run chmod 600 on it"),
            (0o600, b"too short", "has to hold one line of at least 12 bytes, and nothing else"),
            (0o600, b"two lines of\ntext", "has to hold one line of at least 12 bytes, and nothing else"),
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
