//! The interchange format of secrets and PSKs, as nvme-cli prints them (Base 2.0 §8.13.5.8; TCP
//! Transport 1.0 §3.6.1.5).
//!
//! ```text
//!   PREFIX:NN:base64:      NN: 00 the bytes are used directly, 01 to 03 after SHA-256, 384 or 512
//!                          base64: 32, 48 or 64 bytes, as many as the hash has, and their CRC-32
//! ```

use super::Hash;
use data_encoding::BASE64;

/// An error in the format. It reveals nothing of the content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InterchangeError {
    /// The text is not in the interchange format.
    Format,
    /// The length is invalid.
    Length,
    /// The CRC-32 is wrong.
    Sum,
}

/// The named hash function, and the bytes.
pub(super) fn parse(text: &str, prefix: &str) -> Result<(Option<Hash>, Vec<u8>), InterchangeError> {
    let rest = text.strip_prefix(prefix).and_then(|rest| rest.strip_prefix(':'));
    let rest = rest.and_then(|rest| rest.strip_suffix(':'));
    let (number, digits) = rest.and_then(|rest| rest.split_once(':')).ok_or(InterchangeError::Format)?;
    let hash = match number {
        "00" => None,
        "01" => Some(Hash::Sha256),
        "02" => Some(Hash::Sha384),
        "03" => Some(Hash::Sha512),
        _ => return Err(InterchangeError::Format),
    };
    if digits.len() > MAX_DIGITS {
        return Err(InterchangeError::Length);
    }
    let all = BASE64.decode(digits.as_bytes()).map_err(|_| InterchangeError::Format)?;
    let (bytes, sum) = all.split_last_chunk().ok_or(InterchangeError::Length)?;
    let mut lens = Hash::ALL.into_iter().filter(|of| hash.is_none_or(|hash| hash == *of)).map(Hash::len);
    if !lens.any(|len| len == bytes.len()) {
        return Err(InterchangeError::Length);
    }
    if crc_32(bytes).to_le_bytes() != *sum {
        return Err(InterchangeError::Sum);
    }
    Ok((hash, bytes.to_vec()))
}

/// CRC-32 as in Ethernet and zlib.
fn crc_32(data: &[u8]) -> u32 {
    !data.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| crc >> 1 ^ if crc & 1 == 0 { 0 } else { 0xedb8_8320 })
    })
}

/// Base64 length of 64 bytes and a CRC.
const MAX_DIGITS: usize = 92;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crc_is_the_standard_one() {
        assert_eq!(crc_32(b"123456789"), 0xcbf4_3926);
    }
}
