//! A record layer from exported keys (RFC 8446 §5.2), as a kernel has one. The simulator and the
//! tests use it in place of a kernel.

use super::{APPLICATION_DATA, IV_LEN, RecordKeys};
use aws_lc_rs::aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

/// Seals or opens the records of one direction, in order.
pub struct Records {
    key: LessSafeKey,
    iv: [u8; IV_LEN],
    sequence: u64,
}

impl Records {
    /// Starts at the sequence number of `keys`.
    ///
    /// # Panics
    /// If the key's length fits no cipher.
    #[must_use]
    pub fn new(keys: &RecordKeys) -> Records {
        let cipher = if keys.key.len() == 16 { &AES_128_GCM } else { &AES_256_GCM };
        let key = UnboundKey::new(cipher, &keys.key).expect("the key has a valid length");
        Records { key: LessSafeKey::new(key), iv: keys.iv, sequence: keys.sequence }
    }

    /// Seals `plain`, at most [`MAX_PLAINTEXT`] bytes, into a record of this content type.
    ///
    /// # Panics
    /// If `plain` is longer.
    pub fn seal(&mut self, content_type: u8, plain: &[u8]) -> Vec<u8> {
        assert!(plain.len() <= MAX_PLAINTEXT, "a record does not hold {} bytes", plain.len());
        let [high, low] = ((plain.len() + 1 + TAG_LEN) as u16).to_be_bytes();
        let header = [APPLICATION_DATA, 3, 3, high, low];
        let mut inner = [plain, &[content_type]].concat();
        let nonce = self.nonce();
        self.key
            .seal_in_place_append_tag(nonce, Aad::from(header), &mut inner)
            .expect("sealing fails only if the input is too long");
        [&header[..], &inner].concat()
    }

    /// Opens a whole record and returns its content type and content, or `None` if it fails
    /// authentication or has no content type.
    pub fn open(&mut self, record: &[u8]) -> Option<(u8, Vec<u8>)> {
        let (header, body) = record.split_at_checked(HEADER_LEN)?;
        let (mut inner, nonce) = (body.to_vec(), self.nonce());
        let plain = self.key.open_in_place(nonce, Aad::from(header), &mut inner).ok()?;
        let end = plain.iter().rposition(|&byte| byte != 0)?;
        Some((plain[end], plain[..end].to_vec()))
    }

    /// Returns the nonce of the next record (RFC 8446 §5.3).
    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[IV_LEN - 8..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= number;
        }
        self.sequence += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// Maximum length of a record's content in bytes (RFC 8446 §5.1).
pub const MAX_PLAINTEXT: usize = 1 << 14;
/// Length of a record's header in bytes (RFC 8446 §5.1).
pub const HEADER_LEN: usize = 5;
/// Bytes that a record adds to its content: header, content type and tag.
pub const OVERHEAD: usize = HEADER_LEN + 1 + TAG_LEN;
const TAG_LEN: usize = 16;
