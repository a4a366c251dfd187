//! Secrets as nvme-cli makes and prints them (NVMe Base 2.0 §8.13.5.8).
//!
//! ```text
//!   DHHC-1:NN:base64:      NN: 00 the secret itself is the key, 01 to 03 it is hashed with SHA-256, 384 or 512
//!                          base64: the secret, and its CRC-32
//! ```

use super::Hash;
use crate::iscsi::text::parse_base64;
use std::fmt;

/// A secret of a host or of a controller.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    bytes: Vec<u8>,
    hash: Option<Hash>,
}

/// What is wrong with a secret. It says nothing of what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// Not in the format.
    #[error("is not DHHC-1:NN:...: as nvme gen-dhchap-key prints it")]
    Format,
    /// Of a length that no secret has, or not of that of its hash function.
    #[error("has another length than 32, 48 or 64 bytes, or than its hash function has")]
    Length,
    /// The sum is that of another secret.
    #[error("has a wrong CRC: it was not copied whole")]
    Sum,
}

impl Secret {
    /// Reads a secret.
    ///
    /// # Errors
    /// If it is none.
    pub fn parse(text: &str) -> Result<Secret, SecretError> {
        let rest = text.strip_prefix("DHHC-1:").and_then(|rest| rest.strip_suffix(':'));
        let (kind, digits) = rest.and_then(|rest| rest.split_once(':')).ok_or(SecretError::Format)?;
        let hash = match kind {
            "00" => None,
            "01" => Some(Hash::Sha256),
            "02" => Some(Hash::Sha384),
            "03" => Some(Hash::Sha512),
            _ => return Err(SecretError::Format),
        };
        if digits.len() > MAX_DIGITS {
            return Err(SecretError::Length);
        }
        let all = parse_base64(digits.as_bytes()).ok_or(SecretError::Format)?;
        let (bytes, sum) = all.split_last_chunk().ok_or(SecretError::Length)?;
        let is_right = match hash {
            None => matches!(bytes.len(), 32 | 48 | 64),
            Some(hash) => bytes.len() == hash.len(),
        };
        if !is_right {
            return Err(SecretError::Length);
        }
        if crc_32(bytes).to_le_bytes() != *sum {
            return Err(SecretError::Sum);
        }
        Ok(Secret { bytes: bytes.to_vec(), hash })
    }

    /// The key with which the holder of that NQN makes responses.
    pub(super) fn key_for(&self, nqn: &str) -> Vec<u8> {
        match self.hash {
            None => self.bytes.clone(),
            Some(hash) => hash.hmac(&self.bytes, &[nqn.as_bytes(), b"NVMe-over-Fabrics"]),
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// CRC-32 of Ethernet and zlib.
pub(in super::super) fn crc_32(data: &[u8]) -> u32 {
    !data.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| crc >> 1 ^ if crc & 1 == 0 { 0 } else { 0xedb8_8320 })
    })
}

/// Of 64 bytes and a sum.
const MAX_DIGITS: usize = 92;

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    #[test]
    fn a_crc_is_that_of_everybody() {
        assert_eq!(crc_32(b"123456789"), 0xcbf4_3926);
    }

    /// As nvme-cli 2.3 has made them of the bytes 01h, 02h and so on.
    #[test]
    fn secrets_are_read_as_nvme_cli_prints_them() {
        let plain = Secret::parse(PLAIN).unwrap();
        assert_eq!(plain.bytes, (1..=32).collect::<Vec<u8>>());
        assert_eq!(plain.key_for("nqn.a"), plain.bytes);
        assert_eq!(format!("{plain:?}"), "Secret");
    }

    #[test]
    fn a_wrong_secret_says_what_is_wrong() {
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
            assert_eq!(Secret::parse(text), Err(error), "{text}");
        }
    }

    pub(in super::super) const PLAIN: &str = "DHHC-1:00:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:";
}
