//! Hash functions, and HMAC with them.

use blockmux_wire::nvmeof::auth::HashId;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256, Sha384, Sha512};

/// A hash function of DH-HMAC-CHAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hash {
    /// 32 bytes.
    Sha256,
    /// 48 bytes.
    Sha384,
    /// 64 bytes.
    Sha512,
}

impl Hash {
    /// All functions, the strongest first.
    pub const ALL: [Hash; 3] = [Hash::Sha512, Hash::Sha384, Hash::Sha256];

    /// The function with this name, as the kernel and nvme-cli write it.
    ///
    /// # Errors
    /// Lists the valid names.
    pub fn of_name(name: &str) -> Result<Hash, &'static str> {
        let found = Hash::ALL.into_iter().find(|hash| hash.name() == name);
        found.ok_or("write hmac(sha256), hmac(sha384) or hmac(sha512)")
    }

    /// The name, as the kernel and nvme-cli write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Hash::Sha256 => "hmac(sha256)",
            Hash::Sha384 => "hmac(sha384)",
            Hash::Sha512 => "hmac(sha512)",
        }
    }

    /// Whether a TLS cipher suite uses this function, so that a PSK can be derived from its output.
    #[must_use]
    pub fn is_of_tls(self) -> bool {
        self != Hash::Sha512
    }

    pub(super) fn id(self) -> HashId {
        match self {
            Hash::Sha256 => HashId::SHA_256,
            Hash::Sha384 => HashId::SHA_384,
            Hash::Sha512 => HashId::SHA_512,
        }
    }

    /// Length of a hash, in bytes.
    pub(super) fn len(self) -> usize {
        match self {
            Hash::Sha256 => 32,
            Hash::Sha384 => 48,
            Hash::Sha512 => 64,
        }
    }

    pub(super) fn digest(self, data: &[u8]) -> Vec<u8> {
        match self {
            Hash::Sha256 => Sha256::digest(data).to_vec(),
            Hash::Sha384 => Sha384::digest(data).to_vec(),
            Hash::Sha512 => Sha512::digest(data).to_vec(),
        }
    }

    /// HMAC over the concatenated parts.
    pub(super) fn hmac(self, key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
        match self {
            Hash::Sha256 => hmac::<Hmac<Sha256>>(key, parts),
            Hash::Sha384 => hmac::<Hmac<Sha384>>(key, parts),
            Hash::Sha512 => hmac::<Hmac<Sha512>>(key, parts),
        }
    }
}

fn hmac<M: Mac + KeyInit>(key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
    let mac = <M as KeyInit>::new_from_slice(key).expect("HMAC takes keys of every length");
    let mac = parts.iter().fold(mac, |mac, part| mac.chain_update(part));
    mac.finalize().into_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, test case 2.
    #[test]
    fn hmac_is_that_of_the_rfc() {
        let begins = |hash: Hash| {
            let mac = hash.hmac(b"Jefe", &[b"what do ya want ", b"for nothing?"]);
            assert_eq!(mac.len(), hash.len());
            [mac[0], mac[1], mac[2], mac[3]]
        };
        assert_eq!(begins(Hash::Sha256), [0x5b, 0xdc, 0xc1, 0x46]);
        assert_eq!(begins(Hash::Sha384), [0xaf, 0x45, 0xd2, 0xe3]);
        assert_eq!(begins(Hash::Sha512), [0x16, 0x4b, 0x7a, 0x7b]);
    }
}
