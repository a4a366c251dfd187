//! Secrets from files that nobody else may read.

use crate::failure::Failure;
use crate::regular;
use blockmux_proto::iscsi::login::chap::Secret;
use rustix::process::geteuid;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Reads a secret.
pub(super) fn read(path: &Path) -> Result<Secret, Failure> {
    let secret = Secret::new(&line(path)?);
    secret.ok_or_else(|| {
        let path = path.display();
        Failure::request(format!("secret file {path}: has a secret of more than 255 bytes; shorten it"))
    })
}

/// Reads a regular file that only its owner may read, which has the secret and perhaps a newline.
pub(in crate::protocol) fn line(path: &Path) -> Result<Vec<u8>, Failure> {
    let cannot = |reason: &str| Failure::request(format!("secret file {}: {reason}", path.display()));
    let file = regular::open(path).map_err(|error| cannot(&format!("{error}; check its path")))?;
    let metadata = file.metadata().map_err(|error| cannot(&error.to_string()))?;
    if metadata.uid() != geteuid().as_raw() && metadata.uid() != ROOT {
        return Err(cannot("is somebody else's, who knows it then; make it your own, with chown"));
    }
    if metadata.mode() & OTHERS != 0 {
        return Err(cannot("others may read or write it; run chmod 600 on it"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes).map_err(|error| cannot(&error.to_string()))?;
    let secret = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
    let secret = secret.strip_suffix(b"\r").unwrap_or(secret);
    if secret.len() < LEAST || secret.contains(&b'\n') || secret.contains(&0) {
        return Err(cannot("has to hold one line of at least 12 bytes, the secret"));
    }
    Ok(secret.to_vec())
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

    fn said(mode: u32, content: &[u8]) -> Result<Secret, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        read(file.path()).map_err(|failure| failure.to_string())
    }

    #[test]
    fn a_secret_is_the_line_of_a_private_file() {
        for content in [&b"twelve bytes"[..], b"twelve bytes\n", b"twelve bytes\r\n"] {
            assert_eq!(said(0o600, content), Ok(Secret::new(b"twelve bytes").unwrap()));
        }
    }

    #[test]
    fn what_others_may_read_or_is_no_secret_is_refused_and_never_shown() {
        for (mode, content, expected) in [
            (0o640, &b"twelve bytes"[..], "others may read or write it; run chmod 600 on it"),
            (0o604, b"twelve bytes", "others may read or write it; run chmod 600 on it"),
            (0o600, b"too short", "has to hold one line of at least 12 bytes, the secret"),
            (0o600, b"two lines of\ntext", "has to hold one line of at least 12 bytes, the secret"),
            (0o600, &[b'x'; 256], "has a secret of more than 255 bytes; shorten it"),
        ] {
            let said = said(mode, content).unwrap_err();
            assert!(said.starts_with("secret file /") && said.ends_with(expected), "{said}");
        }
        for path in ["/", "/dev/null", "/does/not/exist"] {
            assert!(read(Path::new(path)).is_err(), "{path}");
        }
    }
}
