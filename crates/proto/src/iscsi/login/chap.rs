//! CHAP (RFC 1994 §4.1, RFC 7143 §12.1.3).
//!
//! The response is the digest of identifier, secret and challenge. Secrets are compared in constant
//! time and never printed.

use blockmux_wire::iscsi::ISCSI_MAX_NAME;
use sha1::Digest;
use zeroize::Zeroizing;

/// A CHAP algorithm (`CHAP_A`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChapAlgorithm {
    /// MD5 (RFC 1994), supported by all implementations.
    Md5,
    /// SHA-1.
    Sha1,
    /// SHA-256.
    Sha256,
    /// SHA3-256.
    Sha3_256,
}

impl ChapAlgorithm {
    /// All algorithms, strongest first.
    pub const ALL: [ChapAlgorithm; 4] =
        [ChapAlgorithm::Sha3_256, ChapAlgorithm::Sha256, ChapAlgorithm::Sha1, ChapAlgorithm::Md5];

    /// The algorithm's number in the IANA registry.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            ChapAlgorithm::Md5 => 5,
            ChapAlgorithm::Sha1 => 6,
            ChapAlgorithm::Sha256 => 7,
            ChapAlgorithm::Sha3_256 => 8,
        }
    }

    /// The algorithm with this number.
    #[must_use]
    pub fn from_number(number: u32) -> Option<ChapAlgorithm> {
        ChapAlgorithm::ALL.into_iter().find(|algorithm| algorithm.number() == number)
    }

    /// The algorithm's name in the IANA registry.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ChapAlgorithm::Md5 => "MD5",
            ChapAlgorithm::Sha1 => "SHA1",
            ChapAlgorithm::Sha256 => "SHA-256",
            ChapAlgorithm::Sha3_256 => "SHA3-256",
        }
    }

    /// Parses an algorithm name, ignoring case and hyphens (open-iscsi writes `SHA256`).
    #[must_use]
    pub fn from_name(name: &str) -> Option<ChapAlgorithm> {
        let plain = |name: &str| name.replace('-', "").to_ascii_uppercase();
        ChapAlgorithm::ALL.into_iter().find(|algorithm| plain(algorithm.name()) == plain(name))
    }

    /// Computes the response to a challenge.
    #[must_use]
    pub fn response(self, identifier: u8, secret: &ChapSecret, challenge: &[u8]) -> Vec<u8> {
        let parts = [&[identifier][..], &secret.0, challenge];
        match self {
            ChapAlgorithm::Md5 => digest::<md5::Md5>(&parts),
            ChapAlgorithm::Sha1 => digest::<sha1::Sha1>(&parts),
            ChapAlgorithm::Sha256 => digest::<sha2::Sha256>(&parts),
            ChapAlgorithm::Sha3_256 => digest::<sha3::Sha3_256>(&parts),
        }
    }
}

/// A shared secret.
#[derive(Clone, PartialEq, Eq)]
pub struct ChapSecret(Zeroizing<Vec<u8>>);

impl ChapSecret {
    /// A secret of 1 to 255 bytes.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<ChapSecret> {
        (1..=MAX_SECRET).contains(&bytes.len()).then(|| ChapSecret(Zeroizing::new(bytes.to_vec())))
    }

    /// Whether the secret has fewer than 96 bits, below which RFC 7143 §9.2.1 demands IPsec.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.0.len() < SECRET_LEN
    }
}

impl std::fmt::Debug for ChapSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// A CHAP name and its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChapCredentials {
    name: String,
    secret: ChapSecret,
}

impl ChapCredentials {
    /// Credentials with a valid `CHAP_N` name: not empty, without NUL.
    #[must_use]
    pub fn new(name: &str, secret: ChapSecret) -> Option<ChapCredentials> {
        let fits = (1..=MAX_NAME).contains(&name.len()) && !name.contains('\0');
        fits.then(|| ChapCredentials { name: name.to_owned(), secret })
    }

    /// The name, as in `CHAP_N`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The secret.
    #[must_use]
    pub fn secret(&self) -> &ChapSecret {
        &self.secret
    }
}

/// A challenge; the peer proves its identity with [`ChapAlgorithm::response`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChapChallenge {
    /// Identifier, part of the digest.
    pub identifier: u8,
    /// Random bytes, used once.
    pub bytes: Vec<u8>,
}

impl ChapChallenge {
    /// Derives a challenge from a random seed.
    #[must_use]
    pub fn from_seed(seed: [u8; SEED_LEN]) -> ChapChallenge {
        let hashed = digest::<sha2::Sha256>(&[&seed]);
        ChapChallenge { identifier: seed.first().copied().unwrap_or_default(), bytes: hashed }
    }

    /// Whether `name` and `response` match the credentials `expected`, in constant time.
    #[must_use]
    pub fn is_met(
        &self,
        algorithm: ChapAlgorithm,
        expected: &ChapCredentials,
        name: &str,
        response: &[u8],
    ) -> bool {
        let right = algorithm.response(self.identifier, &expected.secret, &self.bytes);
        are_equal(&right, response) & are_equal(expected.name.as_bytes(), name.as_bytes())
    }
}

fn digest<D: Digest>(parts: &[&[u8]]) -> Vec<u8> {
    let mut digest = D::new();
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize().to_vec()
}

/// Compares in constant time; lengths are not secret.
fn are_equal(one: &[u8], other: &[u8]) -> bool {
    let differences = one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b));
    one.len() == other.len() && std::hint::black_box(differences) == 0
}

/// Maximum length of a secret, in bytes.
pub const MAX_SECRET: usize = 255;
/// Why [`ChapSecret::new`] refuses a secret.
pub const SECRET_LENGTH: &str = "a CHAP secret has 1 to 255 bytes";
/// Length of a secret with 96 bits, in bytes.
const SECRET_LEN: usize = 12;

/// Maximum length of a CHAP name, in bytes; often the initiator's name.
pub const MAX_NAME: usize = 255;
const _: () = assert!(MAX_NAME >= ISCSI_MAX_NAME);

/// Maximum length of a challenge or response, in bytes (RFC 7143 §12.1.3).
pub const MAX_BINARY: usize = 1024;

/// Number of random bytes that a login needs.
pub const SEED_LEN: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> ChapSecret {
        ChapSecret::new(text.as_bytes()).unwrap()
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn a_response_is_the_digest_of_identifier_secret_and_challenge() {
        // Computed with Python's hashlib over b"\x17" + b"toomanysecrets" + bytes(range(16)).
        let challenge: Vec<u8> = (0..16).collect();
        let vectors = [
            (ChapAlgorithm::Md5, "4894652dabe4fb8d4d68d7e50ce76d98"),
            (ChapAlgorithm::Sha1, "0b6e0f07c38584e3cc4d5f2c84c6f94185e8c829"),
            (ChapAlgorithm::Sha256, "7febe9615a8bb957123d5540e427d135d0e4969318604d1ab642f8aa724c8408"),
            (ChapAlgorithm::Sha3_256, "33e49fecfd0c336ef82c96ce64d616c44d309b62a398fc4c51a113dd99686be2"),
        ];
        for (algorithm, expected) in vectors {
            let response = algorithm.response(0x17, &secret("toomanysecrets"), &challenge);
            assert_eq!(hex(&response), expected, "{algorithm:?}");
        }
    }

    #[test]
    fn only_the_right_name_and_response_meet_a_challenge() {
        let expected = ChapCredentials::new("user", secret("secret")).unwrap();
        let challenge = ChapChallenge::from_seed([7; SEED_LEN]);
        for algorithm in ChapAlgorithm::ALL {
            let right = algorithm.response(challenge.identifier, expected.secret(), &challenge.bytes);
            assert!(challenge.is_met(algorithm, &expected, "user", &right));
            assert!(!challenge.is_met(algorithm, &expected, "User", &right));
            assert!(!challenge.is_met(algorithm, &expected, "user", &right[1..]));
            let wrong = algorithm.response(challenge.identifier, &secret("Secret"), &challenge.bytes);
            assert!(!challenge.is_met(algorithm, &expected, "user", &wrong));
        }
    }

    #[test]
    fn a_secret_is_never_printed() {
        let credentials = ChapCredentials::new("user", secret("hunter2hunter2")).unwrap();
        assert!(!format!("{credentials:?}").contains("hunter2"));
    }

    #[test]
    fn names_and_secrets_have_bounds() {
        assert!(ChapSecret::new(b"").is_none() && ChapSecret::new(&[b's'; MAX_SECRET + 1]).is_none());
        let name = "n".repeat(MAX_NAME + 1);
        for name in ["", "a\0b", &name] {
            assert!(ChapCredentials::new(name, secret("s")).is_none());
        }
    }

    #[test]
    fn numbers_and_names_are_those_of_iana() {
        for algorithm in ChapAlgorithm::ALL {
            assert_eq!(ChapAlgorithm::from_number(algorithm.number()), Some(algorithm));
            assert_eq!(ChapAlgorithm::from_name(algorithm.name()), Some(algorithm));
        }
        assert_eq!(
            (ChapAlgorithm::from_name("sha256"), ChapAlgorithm::from_name("SHA-512")),
            (Some(ChapAlgorithm::Sha256), None)
        );
        assert_eq!(
            (ChapAlgorithm::from_number(5), ChapAlgorithm::from_number(4)),
            (Some(ChapAlgorithm::Md5), None)
        );
    }
}
