//! The traffic secrets of both directions, and the keys and IVs derived from them (RFC 8446 §7.1 to
//! §7.3).
//!
//! The library does not use this module for its own records. It serves callers that take over the
//! record layer, such as a kernel, with the keys of [`Tls::export`](super::Tls::export).

use super::Hash;
use aws_lc_rs::hkdf::{HKDF_SHA256, HKDF_SHA384, KeyType, Prk};
use zeroize::Zeroizing;

/// The application traffic secret of one direction (RFC 8446 §7.1).
#[derive(Clone, PartialEq, Eq)]
pub struct TrafficSecret {
    hash: Hash,
    secret: Zeroizing<Vec<u8>>,
}

/// Key, IV and first sequence number of the records of one direction.
#[derive(Clone, PartialEq, Eq)]
pub struct RecordKeys {
    /// The key: of 16 bytes for AES-128-GCM, of 32 bytes for AES-256-GCM.
    pub key: Zeroizing<Vec<u8>>,
    /// The IV; XORed with a record's sequence number it is the record's nonce (RFC 8446 §5.3).
    pub iv: [u8; IV_LEN],
    /// Sequence number of the next record.
    pub sequence: u64,
}

/// Secrets and sequence numbers of both directions, exported by
/// [`Tls::export`](super::Tls::export). [`Tls::resume`](super::Tls::resume) takes them back.
pub struct ExportedKeys {
    /// Secret of the records that we send.
    pub sending: TrafficSecret,
    /// Sequence number of the next record that we send.
    pub next_sent: u64,
    /// Secret of the records that the peer sends.
    pub receiving: TrafficSecret,
    /// Sequence number of the next record that the peer sends.
    pub next_received: u64,
    /// The library's own serialization of the connection.
    pub(super) state: Zeroizing<Vec<u8>>,
}

impl TrafficSecret {
    pub(super) fn new(hash: Hash, secret: &[u8]) -> TrafficSecret {
        TrafficSecret { hash, secret: Zeroizing::new(secret.to_vec()) }
    }

    /// Derives key and IV for records from the sequence number `sequence` on (RFC 8446 §7.3).
    #[must_use]
    pub fn keys(&self, sequence: u64) -> RecordKeys {
        let mut keys = RecordKeys { key: vec![0; self.hash.key_len()].into(), iv: [0; IV_LEN], sequence };
        self.expand("key", &mut keys.key);
        self.expand("iv", &mut keys.iv);
        keys
    }

    /// Replaces the secret by the next one, which protects the records after a KeyUpdate (RFC 8446
    /// §7.2).
    pub fn update(&mut self) {
        let mut next = vec![0; self.secret.len()];
        self.expand("traffic upd", &mut next);
        self.secret = next.into();
    }

    /// HKDF-Expand-Label with an empty context (RFC 8446 §7.1).
    fn expand(&self, label: &str, output: &mut [u8]) {
        let algorithm = match self.hash {
            Hash::Sha256 => HKDF_SHA256,
            Hash::Sha384 => HKDF_SHA384,
        };
        let [len, label_len] = [output.len(), PREFIX.len() + label.len()].map(|len| len as u8);
        let info: [&[u8]; 5] = [&[0, len], &[label_len], PREFIX.as_bytes(), label.as_bytes(), &[0]];
        let prk = Prk::new_less_safe(algorithm, &self.secret);
        prk.expand(&info, OutputLen(output.len()))
            .and_then(|okm| okm.fill(output))
            .expect("the output is at most one block of the hash");
    }
}

impl ExportedKeys {
    /// Reads the library's serialization, version 1; returns `state` unchanged if it has another
    /// form.
    pub(super) fn read(state: Vec<u8>, is_client: bool) -> Result<ExportedKeys, Vec<u8>> {
        let read = || {
            let mut at = state.as_slice();
            let mut take = |len| {
                let (bytes, rest) = at.split_at_checked(len)?;
                at = rest;
                Some(bytes)
            };
            let number = |bytes: &[u8]| bytes.iter().fold(0, |number, &byte| number << 8 | u64::from(byte));
            if number(take(8)?) != STATE_VERSION || take(2)? != TLS_1_3 {
                return None;
            }
            let hash = match take(2)? {
                [0x13, 1] => Hash::Sha256,
                [0x13, 2] => Hash::Sha384,
                _ => return None,
            };
            let (client_next, server_next) = (number(take(8)?), number(take(8)?));
            // The maximum fragment length.
            take(2)?;
            let client = (TrafficSecret::new(hash, take(hash.len())?), client_next);
            let server = (TrafficSecret::new(hash, take(hash.len())?), server_next);
            Some(if is_client { (client, server) } else { (server, client) })
        };
        match read() {
            Some(((sending, next_sent), (receiving, next_received))) => {
                Ok(ExportedKeys { sending, next_sent, receiving, next_received, state: state.into() })
            }
            None => Err(state),
        }
    }
}

impl Hash {
    /// Length of the hash in bytes.
    fn len(self) -> usize {
        match self {
            Hash::Sha256 => 32,
            Hash::Sha384 => 48,
        }
    }

    /// Key length in bytes of the cipher of the hash's cipher suite.
    fn key_len(self) -> usize {
        match self {
            Hash::Sha256 => 16,
            Hash::Sha384 => 32,
        }
    }
}

struct OutputLen(usize);

impl KeyType for OutputLen {
    fn len(&self) -> usize {
        self.0
    }
}

/// Length of an IV and of a nonce in bytes.
pub const IV_LEN: usize = 12;
/// Prefix of every label (RFC 8446 §7.1).
const PREFIX: &str = "tls13 ";
/// Version of the library's serialization that [`ExportedKeys::read`] knows.
const STATE_VERSION: u64 = 1;
/// Protocol version in the library's serialization.
const TLS_1_3: [u8; 2] = [3, 4];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{APPLICATION_DATA, Records};

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.chunks(2).map(byte).collect()
    }

    /// The traffic secrets for application data of RFC 8448 §3, the client's and the server's.
    const CLIENT: &str = "9e40646ce79a7f9dc05af8889bce6552875afa0b06df0087f792ebb7c17504a5";
    const SERVER: &str = "a11af9f05531f856ad47116b45a950328204b4f44bfb6b3a4b4f1f3fcb631643";

    #[test]
    fn keys_match_rfc_8448() {
        let cases = [
            (CLIENT, "17422dda596ed5d9acd890e3c63f5051", "5b78923dee08579033e523d9"),
            (SERVER, "9f02283b6c9c07efc26bb9f2ac92e356", "cf782b88dd83549aadf1e984"),
        ];
        for (secret, key, iv) in cases {
            let keys = TrafficSecret::new(Hash::Sha256, &bytes(secret)).keys(7);
            assert_eq!((keys.key.to_vec(), keys.iv.to_vec(), keys.sequence), (bytes(key), bytes(iv), 7));
        }
    }

    #[test]
    fn the_record_of_rfc_8448_is_sealed_and_opened() {
        // "{client} send application_data record".
        let record = bytes(
            "17 03 03 00 43 a2 3f 70 54 b6 2c 94 d0 af fa fe 82 28 ba 55 cb ef ac ea 42 f9 14 aa 66 bc ab 3f 2b 98 \
             19 a8 a5 b4 6b 39 5b d5 4a 9a 20 44 1e 2b 62 97 4e 1f 5a 62 92 a2 97 70 14 bd 1e 3d ea e6 3a ee bb 21 \
             69 49 15 e4",
        );
        let payload: Vec<u8> = (0..50).collect();
        let secret = TrafficSecret::new(Hash::Sha256, &bytes(CLIENT));
        assert_eq!(Records::new(&secret.keys(0)).seal(APPLICATION_DATA, &payload), record);
        assert_eq!(Records::new(&secret.keys(0)).open(&record), Some((APPLICATION_DATA, payload)));
        assert_eq!(
            Records::new(&secret.keys(1)).open(&record),
            None,
            "each sequence number has its own nonce"
        );
        let mut next = secret.clone();
        next.update();
        assert!(next != secret);
        assert_eq!(Records::new(&next.keys(0)).open(&record), None);
    }

    #[test]
    fn other_serializations_of_the_library_are_refused() {
        let mut state = vec![0, 0, 0, 0, 0, 0, 0, 1, 3, 4, 0x13, 2];
        state.extend(5u64.to_be_bytes());
        state.extend(9u64.to_be_bytes());
        state.extend([0x40, 0]);
        state.extend([1; 48]);
        state.extend([2; 48]);
        for is_client in [false, true] {
            let read =
                ExportedKeys::read(state.clone(), is_client).unwrap_or_else(|_| panic!("the state is valid"));
            let (client, server) = ((&[1; 48], 5), (&[2; 48], 9));
            let (sent, received) = if is_client { (client, server) } else { (server, client) };
            assert_eq!((&read.sending.secret[..], read.next_sent), (&sent.0[..], sent.1));
            assert_eq!((&read.receiving.secret[..], read.next_received), (&received.0[..], received.1));
        }
        for len in 0..state.len() {
            assert!(ExportedKeys::read(state[..len].to_vec(), true).is_err(), "{len}");
        }
        for (at, byte) in [(7, 2), (9, 3), (10, 0), (11, 3)] {
            let mut other = state.clone();
            other[at] = byte;
            assert!(ExportedKeys::read(other, true).is_err(), "{at}");
        }
    }
}
