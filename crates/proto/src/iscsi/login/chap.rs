//! CHAP: who knows the secret (RFC 1994 §4.1, RFC 7143 §12.1.3).
//!
//! The response is the digest of identifier, secret and challenge. Secrets are compared in constant
//! time and never printed.

use blockmux_wire::iscsi::ISCSI_MAX_NAME;
use sha1::Digest;
use zeroize::Zeroizing;

/// A CHAP algorithm by its number in `CHAP_A`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// RFC 1994; what everybody speaks.
    Md5,
    /// SHA-1.
    Sha1,
    /// SHA-256.
    Sha256,
    /// SHA3-256.
    Sha3_256,
}

impl Algorithm {
    /// The best first.
    pub const ALL: [Algorithm; 4] = [Algorithm::Sha3_256, Algorithm::Sha256, Algorithm::Sha1, Algorithm::Md5];

    /// IANA's number.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Algorithm::Md5 => 5,
            Algorithm::Sha1 => 6,
            Algorithm::Sha256 => 7,
            Algorithm::Sha3_256 => 8,
        }
    }

    /// The algorithm of that number, if there is one.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Algorithm> {
        Algorithm::ALL.into_iter().find(|algorithm| algorithm.number() == number)
    }

    /// As IANA's registry of CHAP algorithms calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Md5 => "MD5",
            Algorithm::Sha1 => "SHA1",
            Algorithm::Sha256 => "SHA-256",
            Algorithm::Sha3_256 => "SHA3-256",
        }
    }

    /// The algorithm of that name, whatever its case; open-iscsi leaves the hyphen of `SHA-256`
    /// out.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Algorithm> {
        let plain = |name: &str| name.replace('-', "").to_ascii_uppercase();
        Algorithm::ALL.into_iter().find(|algorithm| plain(algorithm.name()) == plain(name))
    }

    /// What proves that one knows `secret`.
    #[must_use]
    pub fn response(self, identifier: u8, secret: &ChapSecret, challenge: &[u8]) -> Vec<u8> {
        let parts = [&[identifier][..], &secret.0, challenge];
        match self {
            Algorithm::Md5 => digest::<md5::Md5>(&parts),
            Algorithm::Sha1 => digest::<sha1::Sha1>(&parts),
            Algorithm::Sha256 => digest::<sha2::Sha256>(&parts),
            Algorithm::Sha3_256 => digest::<sha3::Sha3_256>(&parts),
        }
    }
}

/// What two sides know and never send.
#[derive(Clone, PartialEq, Eq)]
pub struct ChapSecret(Zeroizing<Vec<u8>>);

impl ChapSecret {
    /// A secret of at least one byte.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<ChapSecret> {
        (1..=MAX_SECRET).contains(&bytes.len()).then(|| ChapSecret(Zeroizing::new(bytes.to_vec())))
    }
}

impl std::fmt::Debug for ChapSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// A name and its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChapCredentials {
    name: String,
    secret: ChapSecret,
}

impl ChapCredentials {
    /// A name that fits `CHAP_N`: without NUL, not empty.
    #[must_use]
    pub fn new(name: &str, secret: ChapSecret) -> Option<ChapCredentials> {
        let fits = (1..=MAX_NAME).contains(&name.len()) && !name.contains('\0');
        fits.then(|| ChapCredentials { name: name.to_owned(), secret })
    }

    /// As it is in `CHAP_N`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What goes with the name.
    #[must_use]
    pub fn secret(&self) -> &ChapSecret {
        &self.secret
    }
}

/// One direction's question: the asked side proves itself by its [`Algorithm::response`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// Goes into the digest.
    pub identifier: u8,
    /// Random, never used again.
    pub bytes: Vec<u8>,
}

impl Challenge {
    /// A challenge from the next bytes of a seed that nobody can guess.
    #[must_use]
    pub fn from_seed(seed: [u8; SEED_LEN]) -> Challenge {
        let hashed = digest::<sha2::Sha256>(&[&seed]);
        Challenge { identifier: seed.first().copied().unwrap_or_default(), bytes: hashed }
    }

    /// Whether `name` and `response` are those of `expected`. It takes the same time however wrong
    /// they are.
    #[must_use]
    pub fn is_met(
        &self,
        algorithm: Algorithm,
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

/// Compares without stopping at the first difference; lengths are no secret.
fn are_equal(one: &[u8], other: &[u8]) -> bool {
    let differences = one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b));
    one.len() == other.len() && std::hint::black_box(differences) == 0
}

/// In bytes.
pub const MAX_SECRET: usize = 255;

/// In bytes; users are often called as their initiator.
pub const MAX_NAME: usize = 255;
const _: () = assert!(MAX_NAME >= ISCSI_MAX_NAME);

/// The longest challenge or response, in bytes (RFC 7143 §12.1.3).
pub const MAX_BINARY: usize = 1024;

/// Random bytes that a login needs.
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
            (Algorithm::Md5, "4894652dabe4fb8d4d68d7e50ce76d98"),
            (Algorithm::Sha1, "0b6e0f07c38584e3cc4d5f2c84c6f94185e8c829"),
            (Algorithm::Sha256, "7febe9615a8bb957123d5540e427d135d0e4969318604d1ab642f8aa724c8408"),
            (Algorithm::Sha3_256, "33e49fecfd0c336ef82c96ce64d616c44d309b62a398fc4c51a113dd99686be2"),
        ];
        for (algorithm, expected) in vectors {
            let response = algorithm.response(0x17, &secret("toomanysecrets"), &challenge);
            assert_eq!(hex(&response), expected, "{algorithm:?}");
        }
    }

    #[test]
    fn only_the_right_name_and_response_meet_a_challenge() {
        let expected = ChapCredentials::new("user", secret("secret")).unwrap();
        let challenge = Challenge::from_seed([7; SEED_LEN]);
        for algorithm in Algorithm::ALL {
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
        for algorithm in Algorithm::ALL {
            assert_eq!(Algorithm::from_number(algorithm.number()), Some(algorithm));
            assert_eq!(Algorithm::from_name(algorithm.name()), Some(algorithm));
        }
        assert_eq!(
            (Algorithm::from_name("sha256"), Algorithm::from_name("SHA-512")),
            (Some(Algorithm::Sha256), None)
        );
        assert_eq!((Algorithm::from_number(5), Algorithm::from_number(4)), (Some(Algorithm::Md5), None));
    }
}
