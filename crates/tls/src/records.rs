//! Records by keys alone (RFC 8446 §5.2): what a system's kernel does with the keys that it is
//! given. The simulator and tests have no such kernel, and do it by this.

use super::{APPLICATION_DATA, IV_LEN, RecordKeys};
use aws_lc_rs::aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

/// The records of one direction, in order.
pub struct Records {
    key: LessSafeKey,
    iv: [u8; IV_LEN],
    sequence: u64,
}

impl Records {
    /// From the one on that the keys are for.
    ///
    /// # Panics
    /// If the key is of no cipher.
    #[must_use]
    pub fn new(keys: &RecordKeys) -> Records {
        let cipher = if keys.key.len() == 16 { &AES_128_GCM } else { &AES_256_GCM };
        let key = UnboundKey::new(cipher, &keys.key).expect("it has one of the two lengths");
        Records { key: LessSafeKey::new(key), iv: keys.iv, sequence: keys.sequence }
    }

    /// The record with these bytes of that content type, at most [`MOST_PLAIN`] of them.
    ///
    /// # Panics
    /// If there are more.
    pub fn seal(&mut self, content_type: u8, plain: &[u8]) -> Vec<u8> {
        assert!(plain.len() <= MOST_PLAIN, "a record does not hold {} bytes", plain.len());
        let [high, low] = ((plain.len() + 1 + TAG_LEN) as u16).to_be_bytes();
        let header = [APPLICATION_DATA, 3, 3, high, low];
        let mut inner = [plain, &[content_type]].concat();
        let nonce = self.nonce();
        self.key
            .seal_in_place_append_tag(nonce, Aad::from(header), &mut inner)
            .expect("nothing is wrong with what is not too long");
        [&header[..], &inner].concat()
    }

    /// The content type and the bytes in a whole record, if it is what its sender has made.
    pub fn open(&mut self, record: &[u8]) -> Option<(u8, Vec<u8>)> {
        let (header, body) = record.split_at_checked(HEADER_LEN)?;
        let (mut inner, nonce) = (body.to_vec(), self.nonce());
        let plain = self.key.open_in_place(nonce, Aad::from(header), &mut inner).ok()?;
        let end = plain.iter().rposition(|&byte| byte != 0)?;
        Some((plain[end], plain[..end].to_vec()))
    }

    /// Of the next record (§5.3).
    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[IV_LEN - 8..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= number;
        }
        self.sequence += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// The longest that a record's content is (§5.1).
pub const MOST_PLAIN: usize = 1 << 14;
/// What comes before what is protected (§5.1).
pub const HEADER_LEN: usize = 5;
/// By how much a record is longer than its content.
pub const OVERHEAD: usize = HEADER_LEN + 1 + TAG_LEN;
const TAG_LEN: usize = 16;
