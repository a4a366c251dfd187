//! Key files of GnuTLS, which nbdkit, libnbd and QEMU use, too: a line for each key, `USER:HEXKEY`,
//! as `psktool` writes it.

use super::{Hash, Psk};
use std::collections::BTreeMap;
use zeroize::Zeroizing;

/// The keys of a file by user name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PskFile(BTreeMap<Vec<u8>, Psk>);

/// A malformed line. The message never has a part of a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct PskFileError {
    /// Number of the line, from 1.
    pub line: usize,
    /// The problem and its remedy.
    pub problem: &'static str,
}

impl PskFile {
    /// Parses a file. Empty lines are skipped, and so are lines that begin with `#`, except where a
    /// user's name in hexadecimal digits and a key follow.
    ///
    /// # Errors
    /// If a line is malformed, or if there is no key.
    pub fn parse(text: &[u8]) -> Result<PskFile, PskFileError> {
        let mut keys = BTreeMap::new();
        for (at, line) in text.split(|&byte| byte == b'\n').enumerate() {
            let wrong = |problem| PskFileError { line: at + 1, problem };
            let line = line.trim_ascii();
            let Some(key) = psk(line).map_err(wrong)? else { continue };
            if keys.len() == MAX_KEYS {
                return Err(wrong("a file has at most 10000 keys"));
            }
            if keys.insert(key.identity.clone(), key).is_some() {
                return Err(wrong("this user has another key above; remove one of them"));
            }
        }
        match keys.is_empty() {
            true => {
                Err(PskFileError { line: 1, problem: "has no key; make one with psktool -u USER -p FILE" })
            }
            false => Ok(PskFile(keys)),
        }
    }

    /// Returns a user's key.
    #[must_use]
    pub fn find(&self, user: &[u8]) -> Option<&Psk> {
        self.0.get(user)
    }

    /// All keys, in order of user names.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Psk> {
        self.0.values()
    }
}

/// Parses a line; returns `None` if it is empty or a comment.
fn psk(line: &[u8]) -> Result<Option<Psk>, &'static str> {
    const FORM: &str = "write USER:HEXKEY, as psktool does";
    let comment = line.strip_prefix(b"#");
    let Some(colon) = line.iter().rposition(|&byte| byte == b':') else {
        return if line.is_empty() || comment.is_some() { Ok(None) } else { Err(FORM) };
    };
    // GnuTLS writes names that are not text in this form.
    let user = match comment.map(|_| bytes(&line[1..colon])) {
        None => line[..colon].to_vec(),
        Some(Some(user)) if !user.is_empty() => user.to_vec(),
        Some(_) => return Ok(None),
    };
    if user.is_empty() || user.len() > MAX_USER {
        return Err("a user's name has 1 to 128 bytes");
    }
    let key = &line[colon + 1..];
    let secret = bytes(key).filter(|_| key.len() <= 2 * MAX_KEY).ok_or(FORM)?;
    if secret.len() < MIN_KEY {
        return Err("a key has at least 16 bytes, which are 32 digits; make one with psktool");
    }
    // External keys use SHA-256 unless the two sides agree on another hash function (RFC 8446
    // §4.2.11).
    Ok(Some(Psk { identity: user, secret, hash: Hash::Sha256 }))
}

/// Decodes hexadecimal digits.
fn bytes(hex: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let mut bytes = Zeroizing::new(Vec::with_capacity(hex.len() / 2));
    for pair in hex.chunks(2) {
        let &[high, low] = pair else { return None };
        bytes.push((digit(high)? << 4 | digit(low)?) as u8);
    }
    Some(bytes)
}

const MAX_KEYS: usize = 10_000;
/// Longest user name of GnuTLS, in bytes.
const MAX_USER: usize = 128;
/// Minimum length of a key, in bytes.
const MIN_KEY: usize = 16;
/// Maximum length of a key of `psktool`, in bytes.
const MAX_KEY: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_psktool_is_a_key() {
        let text = b"# ours\n# ours: yes\nalice:000102030405060708090a0b0c0d0e0f\r\n\nbob:b:F0E1d2c3b4a5968778695a4b3c2d1e0f\n\
            #c328:000102030405060708090a0b0c0d0e0f\n";
        let file = PskFile::parse(text).unwrap();
        assert_eq!(file.iter().count(), 3);
        assert!(file.find(&[0xc3, 0x28]).is_some());
        let alice = file.find(b"alice").unwrap();
        assert_eq!((alice.secret.to_vec(), alice.hash), ((0..16).collect(), Hash::Sha256));
        assert_eq!(file.find(b"bob:b").unwrap().secret[..2], [0xf0, 0xe1]);
        assert!(file.find(b"bob").is_none());
    }

    #[test]
    fn an_error_names_the_line_and_never_the_key() {
        let key = "000102030405060708090a0b0c0d0e0f";
        for (text, expected) in [
            (String::new(), "line 1: has no key"),
            ("alice".into(), "line 1: write USER:HEXKEY"),
            (format!("\n:{key}"), "line 2: a user's name has"),
            (format!("{}:{key}", "a".repeat(129)), "line 1: a user's name has"),
            (format!("alice:{key}0"), "line 1: write USER:HEXKEY"),
            (format!("alice:{key}0x"), "line 1: write USER:HEXKEY"),
            (format!("alice:{}", &key[2..]), "line 1: a key has at least 16 bytes"),
            (format!("a:{key}\na:{key}"), "line 2: this user has another key above"),
        ] {
            let error = PskFile::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with(expected) && !error.contains("0102"), "{error}");
        }
    }
}
