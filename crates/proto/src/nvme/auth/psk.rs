//! Pre-shared keys of TLS 1.3, as NVMe/TCP names and derives them (TCP Transport 1.1 §3.6.1).
//!
//! ```text
//!   NVMeTLSkey-1:hh:base64:      the configured PSK, as nvme-cli prints it, and its CRC-32
//!        │ hh 01, 02: HKDF with the host's name; 00: as it is
//!   retained PSK          generated PSK, made by DH-HMAC-CHAP (auth/)
//!        └───────────┬──────────┘
//!   TLS PSK and its identity, of a host and a subsystem:
//!        NVMe0R01 HOSTNQN SUBNQN             version 0
//!        NVMe1R01 HOSTNQN SUBNQN digest      version 1: of several keys it says which one
//! ```
//! R is a retained PSK and G a generated one; 01 is SHA-256 and `TLS_AES_128_GCM_SHA256`, 02
//! SHA-384 and `TLS_AES_256_GCM_SHA384`. Labels are those of TLS 1.3 (RFC 8446 §7.1). libnvme
//! before its version 1.16 left their lengths out, so that nvme-cli of that time derives other
//! keys: `nvme gen-tls-key` and `check-tls-key` of such a version agree with us on the key that
//! they print, and not on what becomes of it.

use super::Hash;
use super::interchange::{self, InterchangeError};
use crate::nvme::nqn::Nqn;
use data_encoding::BASE64;
use std::fmt;
use std::time::Duration;
use zeroize::Zeroizing;

/// The hash function of a key, and with it the cipher suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PskHash {
    /// `TLS_AES_128_GCM_SHA256`.
    Sha256,
    /// `TLS_AES_256_GCM_SHA384`.
    Sha384,
}

/// A key as it is handed from one administrator to another.
#[derive(Clone, PartialEq, Eq)]
pub struct ConfiguredPsk {
    bytes: Zeroizing<Vec<u8>>,
    /// The function that makes a retained PSK of it; `None`: it is one.
    transform: Option<PskHash>,
}

/// What TLS PSKs are derived from.
#[derive(Clone, PartialEq, Eq)]
pub struct InputPsk {
    bytes: Zeroizing<Vec<u8>>,
    hash: PskHash,
    kind: PskKind,
}

/// A key as TLS uses it, and what both sides call it.
#[derive(Clone, PartialEq, Eq)]
pub struct TlsPsk {
    /// Its name. It is no secret.
    pub identity: String,
    /// The hash function of its cipher suite.
    pub hash: PskHash,
    bytes: Zeroizing<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PskKind {
    Retained,
    Generated,
}

impl PskHash {
    /// Of that length is a key for it, in bytes, and the hash.
    fn len(self) -> usize {
        self.function().len()
    }

    fn function(self) -> Hash {
        match self {
            PskHash::Sha256 => Hash::Sha256,
            PskHash::Sha384 => Hash::Sha384,
        }
    }

    /// As identities have it.
    fn letters(self) -> &'static str {
        match self {
            PskHash::Sha256 => "01",
            PskHash::Sha384 => "02",
        }
    }

    fn of_len(len: usize) -> Option<PskHash> {
        [PskHash::Sha256, PskHash::Sha384].into_iter().find(|hash| hash.len() == len)
    }
}

impl ConfiguredPsk {
    /// Reads a key in the interchange format.
    ///
    /// # Errors
    /// If it is none.
    pub fn parse(text: &str) -> Result<ConfiguredPsk, PskError> {
        let (transform, bytes) = interchange::parse(text, "NVMeTLSkey-1")?;
        // There is no cipher suite with SHA-512.
        let hash = PskHash::of_len(bytes.len()).ok_or(PskError::Length)?;
        let transform = transform.map(|_| hash);
        Ok(ConfiguredPsk { bytes: bytes.into(), transform })
    }

    /// What a host of that name, and those that it connects to, keep of it.
    #[must_use]
    pub fn retained(&self, host: &Nqn) -> InputPsk {
        let hash = PskHash::of_len(self.bytes.len()).unwrap_or(PskHash::Sha256);
        let bytes = match self.transform {
            None => self.bytes.clone(),
            Some(_) => expand(hash, &self.bytes, "HostNQN", host.as_str()).unwrap_or_default(),
        };
        InputPsk { bytes, hash, kind: PskKind::Retained }
    }
}

impl InputPsk {
    /// One that DH-HMAC-CHAP with that hash function has made; `None` if it is of another length,
    /// or no cipher suite has the function.
    pub fn generated(hash: Hash, bytes: Vec<u8>) -> Option<InputPsk> {
        let hash = [PskHash::Sha256, PskHash::Sha384].into_iter().find(|psk| psk.function() == hash)?;
        (bytes.len() == hash.len()).then_some(InputPsk {
            bytes: bytes.into(),
            hash,
            kind: PskKind::Generated,
        })
    }

    pub(crate) fn is_generated(&self) -> bool {
        self.kind == PskKind::Generated
    }

    /// The keys for connections of that host to that subsystem, the newest version first. Names may
    /// be too long for version 0.
    #[must_use]
    pub fn tls_psks(&self, host: &Nqn, subsystem: &Nqn) -> Vec<TlsPsk> {
        let (host, subsystem) = (host.as_str(), subsystem.as_str());
        let letter = match self.kind {
            PskKind::Retained => 'R',
            PskKind::Generated => 'G',
        };
        let hash = self.hash.letters();
        let digest = self.digest(host, subsystem);
        let first = format!("NVMe1{letter}{hash} {host} {subsystem} {digest}");
        let zeroth = format!("NVMe0{letter}{hash} {host} {subsystem}");
        let psk = |identity: String, context: &str| {
            let bytes = expand(self.hash, &self.bytes, "nvme-tls-psk", context)?;
            Some(TlsPsk { identity, hash: self.hash, bytes })
        };
        let first = psk(first, &format!("{hash} {digest}"));
        let context = zeroth.clone();
        first.into_iter().chain(psk(zeroth, &context)).collect()
    }

    /// What tells it from other keys of the same host for the same subsystem.
    fn digest(&self, host: &str, subsystem: &str) -> String {
        let parts: [&[u8]; 4] = [host.as_bytes(), b" ", subsystem.as_bytes(), b" NVMe-over-Fabrics"];
        BASE64.encode(&self.hash.function().hmac(&self.bytes, &parts))
    }
}

impl TlsPsk {
    /// The secret.
    #[must_use]
    pub fn secret(&self) -> &[u8] {
        &self.bytes
    }

    /// The version of its identity: 0 or 1.
    #[must_use]
    pub fn version(&self) -> u8 {
        u8::from(self.identity.as_bytes().get(4) == Some(&b'1'))
    }

    /// Whether DH-HMAC-CHAP has made it, so that who has it has proved already who it is.
    #[must_use]
    pub fn is_generated(&self) -> bool {
        self.identity.as_bytes().get(5) == Some(&b'G')
    }

    /// Whether it is for connections of that host to that subsystem.
    #[must_use]
    pub fn is_for(&self, host: &Nqn, subsystem: &Nqn) -> bool {
        let mut words = self.identity.split(' ').skip(1);
        words.next() == Some(host.as_str()) && words.next() == Some(subsystem.as_str())
    }
}

impl fmt::Debug for ConfiguredPsk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ConfiguredPsk")
    }
}

impl fmt::Debug for InputPsk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InputPsk")
    }
}

impl fmt::Debug for TlsPsk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TlsPsk {:?}", self.identity)
    }
}

/// What is wrong with a key. It says nothing of what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PskError {
    /// Not in the format.
    #[error("is not NVMeTLSkey-1:hh:...: as nvme gen-tls-key prints it")]
    Format,
    /// Of a length that no key has, or not of that of its hash function.
    #[error("has another length than 32 or 48 bytes, or than its hash function has")]
    Length,
    /// The sum is that of another key.
    #[error("has a wrong CRC: it was not copied whole")]
    Sum,
}

impl From<InterchangeError> for PskError {
    fn from(flaw: InterchangeError) -> PskError {
        match flaw {
            InterchangeError::Format => PskError::Format,
            InterchangeError::Length => PskError::Length,
            InterchangeError::Sum => PskError::Sum,
        }
    }
}

/// HKDF-Extract without salt, and HKDF-Expand-Label for as many bytes as the hash has (RFC 8446
/// §7.1): one block. `None` if the context is too long.
fn expand(hash: PskHash, key: &[u8], label: &str, context: &str) -> Option<Zeroizing<Vec<u8>>> {
    let function = hash.function();
    let extracted = function.hmac(&vec![0; hash.len()], &[key]);
    let label = format!("tls13 {label}");
    let lens = (u16::try_from(hash.len()), u8::try_from(label.len()), u8::try_from(context.len()));
    let (Ok(len), Ok(label_len), Ok(context_len)) = lens else { return None };
    let parts: [&[u8]; 6] = [
        &len.to_be_bytes(),
        &[label_len],
        label.as_bytes(),
        &[context_len],
        context.as_bytes(),
        // The number of the block.
        &[1],
    ];
    Some(function.hmac(&extracted, &parts).into())
}

/// How long connections may be begun with a generated PSK (TCP Transport 1.0 §3.6.1.4).
pub const GENERATED_LIFETIME: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;

    /// The key of libnvme's tests, and what it makes of it.
    const KEY_256: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
    const KEY_384: &str =
        "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";

    fn nqn(text: &str) -> Nqn {
        Nqn::new(text).unwrap()
    }

    fn identities(text: &str) -> Vec<String> {
        let (host, subsystem) = (nqn("nqn.psk-test-host"), nqn("nqn.psk-test-subsys"));
        let psks = ConfiguredPsk::parse(text).unwrap().retained(&host).tls_psks(&host, &subsystem);
        assert!(psks.iter().all(|psk| psk.is_for(&host, &subsystem) && !psk.is_generated()));
        assert!(psks.iter().all(|psk| !psk.is_for(&subsystem, &host)));
        psks.into_iter().map(|psk| psk.identity).collect()
    }

    #[test]
    fn identities_are_those_of_libnvme() {
        assert_eq!(
            identities(KEY_256),
            [
                "NVMe1R01 nqn.psk-test-host nqn.psk-test-subsys iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU=",
                "NVMe0R01 nqn.psk-test-host nqn.psk-test-subsys",
            ]
        );
        assert_eq!(
            identities(KEY_384),
            [
                "NVMe1R02 nqn.psk-test-host nqn.psk-test-subsys \
                 QhW2+Rp6RzHlNtCslyRxMnwJ11tKKhz8JCAQpQ+XUD8f9td1VeH5h53yz2wKJG1a",
                "NVMe0R02 nqn.psk-test-host nqn.psk-test-subsys",
            ]
        );
        let plain = KEY_256.replace(":01:", ":00:");
        assert_ne!(identities(&plain)[0], identities(KEY_256)[0]);
        assert_eq!(identities(&plain)[1], identities(KEY_256)[1]);
    }

    /// What the tests of Linux's `nvme_auth_derive_tls_psk` expect. Their names are no NQNs.
    #[test]
    fn keys_are_those_of_linux() {
        let psk_256 = "1733c59fa7f48fcf37f5f26fc4ff0268ad4f78e030f4f3b0bfd1d47e7bb1447a";
        let psk_384 = "f14b2dd3234c459694d3bc63f8968bd6b37c2c6de849e22e118749001ce4bbe8\
                       640b9e3a748cb11ce4b1d71d359cce39";
        let cases = [
            (
                Hash::Sha256,
                psk_256,
                "OldoKuTfKddMuyCznAZojkWD7P4D9/AtzDzLimtOxqI=",
                "3c17da628474a04d2247c4cab47968c915388193f7c071bd9489cc3666cd7cc8",
            ),
            (
                Hash::Sha384,
                psk_384,
                "cffMWk8TSS7HOQebjgYEIkrPrjWPV4JE5cdPB8WhEvY4JBW5YynKyv66XscN4A9n",
                "2774753233537b3fa50eb7d16a8e43457d85f4906c005b2236616c5d80939d08\
                 98fff15bb8b77119d2be0aac423e7590",
            ),
        ];
        for (hash, psk, digest, tls_psk) in cases {
            let input = InputPsk::generated(hash, bytes(psk)).unwrap();
            assert_eq!(input.digest("hostnqn", "subsysnqn"), digest);
            let context = format!("{} {digest}", input.hash.letters());
            assert_eq!(
                expand(input.hash, &input.bytes, "nvme-tls-psk", &context).unwrap().to_vec(),
                bytes(tls_psk)
            );
        }
        assert!(InputPsk::generated(Hash::Sha512, vec![0; 64]).is_none());
        assert!(InputPsk::generated(Hash::Sha256, vec![0; 48]).is_none());
    }

    #[test]
    fn a_generated_key_is_known_by_its_identity() {
        let psks = InputPsk::generated(Hash::Sha384, vec![7; 48]).unwrap();
        let psks = psks.tls_psks(&nqn("nqn.h"), &nqn("nqn.s"));
        assert!(psks.iter().all(TlsPsk::is_generated));
        assert_eq!((psks[0].version(), psks[1].version()), (1, 0));
        assert!(psks[0].identity.starts_with("NVMe1G02 nqn.h nqn.s "));
        assert_eq!(psks[1].identity, "NVMe0G02 nqn.h nqn.s");
        assert_ne!(psks[0].secret(), psks[1].secret());
    }

    #[test]
    fn names_that_are_too_long_for_version_0_have_version_1() {
        let long = nqn(&format!("nqn.{}", "x".repeat(219)));
        let psks = ConfiguredPsk::parse(KEY_384).unwrap().retained(&long).tls_psks(&long, &long);
        assert_eq!(psks.len(), 1);
        assert!(psks[0].identity.starts_with("NVMe1R02 nqn.x"));
    }

    #[test]
    fn a_wrong_key_says_what_is_wrong_and_not_what_it_is() {
        for (text, error) in [
            ("", PskError::Format),
            ("NVMeTLSkey-1:01:AAAA", PskError::Format),
            ("NVMeTLSkey-1:03:AAAA:", PskError::Length),
            ("NVMeTLSkey-2:01:AAAA:", PskError::Format),
            ("NVMeTLSkey-1:01:!!!!:", PskError::Format),
            ("NVMeTLSkey-1:00:AAAA:", PskError::Length),
            (&KEY_256.replace(":01:", ":02:"), PskError::Length),
            (&KEY_256.replace("VRLb", "VRLc"), PskError::Sum),
            (&format!("NVMeTLSkey-1:00:{}:", "A".repeat(4000)), PskError::Length),
        ] {
            assert_eq!(ConfiguredPsk::parse(text), Err(error), "{text}");
        }
        let key = ConfiguredPsk::parse(KEY_256).unwrap();
        let retained = key.retained(&nqn("nqn.h"));
        let psk = &retained.tls_psks(&nqn("nqn.h"), &nqn("nqn.s"))[1];
        assert_eq!(
            format!("{key:?} {retained:?} {psk:?}"),
            "ConfiguredPsk InputPsk TlsPsk \"NVMe0R01 nqn.h nqn.s\""
        );
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.chars().map(|digit| digit.to_digit(16).unwrap() as u8).collect();
        digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
    }
}
