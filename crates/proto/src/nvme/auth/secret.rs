//! DH-HMAC-CHAP secrets of hosts and controllers, `DHHC-1:NN:base64:` (Base 2.0 §8.13.5.8). With NN
//! 00 the secret itself is the key.

use super::Hash;
use super::interchange::{self, InterchangeError};
use std::fmt;
use zeroize::Zeroizing;

/// A secret of a host or of a controller.
#[derive(Clone, PartialEq, Eq)]
pub struct DhChapSecret {
    bytes: Zeroizing<Vec<u8>>,
    hash: Option<Hash>,
}

/// An error in a secret. It reveals nothing of the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// The text is not in the interchange format.
    #[error("is not DHHC-1:NN:...: as nvme gen-dhchap-key prints it")]
    Format,
    /// The length is invalid, or not that of the hash function.
    #[error("has another length than 32, 48 or 64 bytes, or than its hash function has")]
    Length,
    /// The CRC-32 is wrong.
    #[error("has a wrong CRC: it was not copied whole")]
    Sum,
}

impl DhChapSecret {
    /// Reads a secret in the interchange format.
    ///
    /// # Errors
    /// If the text is not a valid secret.
    pub fn parse(text: &str) -> Result<DhChapSecret, SecretError> {
        let (hash, bytes) = interchange::parse(text, "DHHC-1")?;
        Ok(DhChapSecret { bytes: Zeroizing::new(bytes), hash })
    }

    /// The key with which the side with this NQN computes responses.
    pub(super) fn key_for(&self, nqn: &str) -> Zeroizing<Vec<u8>> {
        match self.hash {
            None => self.bytes.clone(),
            Some(hash) => Zeroizing::new(hash.hmac(&self.bytes, &[nqn.as_bytes(), b"NVMe-over-Fabrics"])),
        }
    }
}

impl fmt::Debug for DhChapSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl From<InterchangeError> for SecretError {
    fn from(flaw: InterchangeError) -> SecretError {
        match flaw {
            InterchangeError::Format => SecretError::Format,
            InterchangeError::Length => SecretError::Length,
            InterchangeError::Sum => SecretError::Sum,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Created by nvme-cli 2.3 from the bytes 01h, 02h and so on.
    #[test]
    fn secrets_are_read_as_nvme_cli_prints_them() {
        let plain = DhChapSecret::parse(PLAIN).unwrap();
        assert_eq!(plain.bytes.to_vec(), (1..=32).collect::<Vec<u8>>());
        assert_eq!(plain.key_for("nqn.a"), plain.bytes);
        assert_eq!(format!("{plain:?}"), "Secret");
    }

    #[test]
    fn a_wrong_secret_has_a_specific_error() {
        for (text, error) in [
            ("", SecretError::Format),
            ("DHHC-1:00:AAAA", SecretError::Format),
            ("DHHC-1:04:AAAA:", SecretError::Format),
            ("DHHC-1:00:!!!!:", SecretError::Format),
            ("DHHC-1:00:AAAA:", SecretError::Length),
            (&PLAIN.replace(":00:", ":02:"), SecretError::Length),
            (&PLAIN.replace("AQID", "AQIE"), SecretError::Sum),
            (&format!("DHHC-1:00:{}:", "A".repeat(4000)), SecretError::Length),
        ] {
            assert_eq!(DhChapSecret::parse(text), Err(error), "{text}");
        }
    }

    pub(in super::super) const PLAIN: &str = "DHHC-1:00:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:";
}
