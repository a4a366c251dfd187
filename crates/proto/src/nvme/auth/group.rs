//! The groups of the Diffie-Hellman exchange (RFC 7919). Their primes are derived from the digits
//! of e.

use blockmux_wire::nvmeof::auth::DhGroupId;
use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd};

/// A group of DH-HMAC-CHAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DhGroup {
    /// The null group: no exchange.
    Null,
    /// 2,048 bits.
    Ffdhe2048,
    /// 3,072 bits.
    Ffdhe3072,
    /// 4,096 bits.
    Ffdhe4096,
    /// 6,144 bits.
    Ffdhe6144,
    /// 8,192 bits.
    Ffdhe8192,
}

impl DhGroup {
    /// All groups, the weakest first.
    pub const ALL: [DhGroup; 6] = [
        DhGroup::Null,
        DhGroup::Ffdhe2048,
        DhGroup::Ffdhe3072,
        DhGroup::Ffdhe4096,
        DhGroup::Ffdhe6144,
        DhGroup::Ffdhe8192,
    ];

    /// The group with this name, as the kernel and nvme-cli write it.
    ///
    /// # Errors
    /// Lists the valid names.
    pub fn of_name(name: &str) -> Result<DhGroup, &'static str> {
        let found = DhGroup::ALL.into_iter().find(|group| group.name() == name);
        found.ok_or("write null, ffdhe2048, ffdhe3072, ffdhe4096, ffdhe6144 or ffdhe8192")
    }

    /// The name, as the kernel and nvme-cli write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DhGroup::Null => "null",
            DhGroup::Ffdhe2048 => "ffdhe2048",
            DhGroup::Ffdhe3072 => "ffdhe3072",
            DhGroup::Ffdhe4096 => "ffdhe4096",
            DhGroup::Ffdhe6144 => "ffdhe6144",
            DhGroup::Ffdhe8192 => "ffdhe8192",
        }
    }

    pub(super) fn id(self) -> DhGroupId {
        match self {
            DhGroup::Null => DhGroupId::NULL,
            DhGroup::Ffdhe2048 => DhGroupId::FFDHE2048,
            DhGroup::Ffdhe3072 => DhGroupId::FFDHE3072,
            DhGroup::Ffdhe4096 => DhGroupId::FFDHE4096,
            DhGroup::Ffdhe6144 => DhGroupId::FFDHE6144,
            DhGroup::Ffdhe8192 => DhGroupId::FFDHE8192,
        }
    }

    /// Size of the prime in bits.
    fn bits(self) -> u32 {
        match self {
            DhGroup::Null => 0,
            DhGroup::Ffdhe2048 => 2048,
            DhGroup::Ffdhe3072 => 3072,
            DhGroup::Ffdhe4096 => 4096,
            DhGroup::Ffdhe6144 => 6144,
            DhGroup::Ffdhe8192 => 8192,
        }
    }

    /// Length of an exponential, in bytes.
    pub(super) fn len(self) -> usize {
        (self.bits() / 8) as usize
    }

    /// This side's exponential; empty for the null group.
    pub(super) fn public(self, private: &[u8; 64]) -> Vec<u8> {
        let mut generator = vec![0; self.len()];
        generator.last_mut().into_iter().for_each(|last| *last = 2);
        self.power(&generator, private)
    }

    /// The shared key, from the other side's exponential; `None` if that is invalid.
    pub(super) fn shared(self, other: &[u8], private: &[u8; 64]) -> Option<Vec<u8>> {
        let prime = self.prime();
        // Valid exponentials are from 2 to the prime less 2; others lead to a predictable key.
        let is_small =
            other.split_last().is_none_or(|(last, rest)| *last < 2 && rest.iter().all(|&byte| byte == 0));
        let is_large = match (other.split_last(), prime.split_last()) {
            (Some((last, rest)), Some((prime_last, prime_rest))) => {
                rest > prime_rest || rest == prime_rest && *last >= prime_last.saturating_sub(1)
            }
            _ => true,
        };
        (other.len() == self.len() && !is_small && !is_large).then(|| self.power(other, private))
    }

    fn power(self, base: &[u8], exponent: &[u8; 64]) -> Vec<u8> {
        let bits = self.bits();
        let number = |bytes: &[u8], bits| BoxedUint::from_be_slice(bytes, bits).ok();
        let prime =
            number(&self.prime(), bits).and_then(|prime| Option::<Odd<BoxedUint>>::from(Odd::new(prime)));
        let (Some(prime), Some(base), Some(exponent)) = (prime, number(base, bits), number(exponent, 512))
        else {
            return Vec::new();
        };
        let terms = BoxedMontyParams::new_vartime(prime);
        BoxedMontyForm::new(base, &terms).pow(&exponent).retrieve().to_be_bytes().to_vec()
    }

    /// The prime (RFC 7919 appendix A): 64 bits of 1, the first digits of e plus a constant, 64
    /// bits of 1. The constant here is one less than there, where 1 is subtracted from the whole.
    fn prime(self) -> Vec<u8> {
        let mut added: u32 = match self {
            DhGroup::Null => return Vec::new(),
            DhGroup::Ffdhe2048 => 560_315,
            DhGroup::Ffdhe3072 => 2_625_350,
            DhGroup::Ffdhe4096 => 5_736_040,
            DhGroup::Ffdhe6144 => 15_705_019,
            DhGroup::Ffdhe8192 => 10_965_727,
        };
        let digits: Vec<u8> = E.chars().filter_map(|digit| Some(digit.to_digit(16)? as u8)).collect();
        let mut middle: Vec<u8> =
            digits.chunks_exact(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect();
        middle.truncate(self.len().saturating_sub(16));
        for byte in middle.iter_mut().rev() {
            added = added.saturating_add(u32::from(*byte));
            *byte = added as u8;
            added >>= 8;
        }
        [&[0xff; 8][..], &middle, &[0xff; 8]].concat()
    }
}

/// The first 8,064 bits of e, including the two bits before the binary point.
const E: &str = "\
    adf85458a2bb4a9aafdc5620273d3cf1d8b9c583ce2d3695a9e13641146433fbcc939dce249b3ef97d2fe363630c75d8\
    f681b202aec4617ad3df1ed5d5fd65612433f51f5f066ed0856365553ded1af3b557135e7f57c935984f0c70e0e68b77\
    e2a689daf3efe8721df158a136ade73530acca4f483a797abc0ab182b324fb61d108a94bb2c8e3fbb96adab760d7f468\
    1d4f42a3de394df4ae56ede76372bb190b07a7c8ee0a6d709e02fce1cdf7e2ecc03404cd28342f619172fe9ce98583ff\
    8e4f1232eef28183c3fe3b1b4c6fad733bb5fcbc2ec22005c58ef1837d1683b2c6f34a26c1b2effa886b4238611fcfdc\
    de355b3b6519035bbc34f4def99c023861b46fc9d6e6c9077ad91d2691f7f7ee598cb0fac186d91caefe130985139270\
    b4130c93bc437944f4fd4452e2d74dd364f2e21e71f54bff5cae82ab9c9df69ee86d2bc522363a0dabc521979b0deada\
    1dbf9a42d5c4484e0abcd06bfa53ddef3c1b20ee3fd59d7c25e41d2b669e1ef16e6f52c3164df4fb7930e9e4e58857b6\
    ac7d5f42d69f6d187763cf1d5503400487f55ba57e31cc7a7135c886efb4318aed6a1e012d9e6832a907600a918130c4\
    6dc778f971ad0038092999a333cb8b7a1a1db93d7140003c2a4ecea9f98d0acc0a8291cdcec97dcf8ec9b55a7f88a46b\
    4db5a851f44182e1c68a007e5e0dd9020bfd64b645036c7a4e677d2c38532a3a23ba4442caf53ea63bb454329b7624c8\
    917bdd64b1c0fd4cb38e8c334c701c3acdad0657fccfec719b1f5c3e4e46041f388147fb4cfdb477a52471f7a9a96910\
    b855322edb6340d8a00ef092350511e30abec1fff9e3a26e7fb29f8c183023c3587e38da0077d9b4763e4e4b94b2bbc1\
    94c6651e77caf992eeaac0232a281bf6b3a739c1226116820ae8db5847a67cbef9c9091b462d538cd72b03746ae77f5e\
    62292c311562a846505dc82db854338ae49f5235c95b91178ccf2dd5cacef403ec9d1810c6272b045b3b71f9dc6b80d6\
    3fdd4a8e9adb1e6962a69526d43161c1a41d570d7938dad4a40e329ccff46aaa36ad004cf600c8381e425a31d951ae64\
    fdb23fcec9509d43687feb69edd1cc5e0b8cc3bdf64b10ef86b63142a3ab8829555b2f747c932665cb2c0f1cc01bd702\
    29388839d2af05e454504ac78b7582822846c0ba35c35f5c59160cc046fd8251541fc68c9c86b022bb7099876a460e74\
    51a8a93109703fee1c217e6c3826e52c51aa691e0e423cfc99e9e31650c1217b624816cdad9a95f9d5b8019488d9c0a0\
    a1fe3075a577e23183f81d4a3f2fa4571efc8ce0ba8a4fe8b6855dfe72b0a66eded2fbabfbe58a30fafabe1c5d71a87e\
    2f741ef8c1fe86fea6bbfde530677f0d97d11d49f7a8443d0822e506a9f4614e011e2a94838ff88cd68c8bb7c51eef6d";

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest, Sha256};

    #[test]
    fn primes_are_those_of_the_rfc() {
        let prime = DhGroup::Ffdhe2048.prime();
        assert_eq!(
            prime[..16],
            [255, 255, 255, 255, 255, 255, 255, 255, 0xad, 0xf8, 0x54, 0x58, 0xa2, 0xbb, 0x4a, 0x9a]
        );
        assert_eq!(prime[240..248], [0x88, 0x6b, 0x42, 0x38, 0x61, 0x28, 0x5c, 0x97]);
        for (group, hash) in DhGroup::ALL.into_iter().skip(1).zip(HASHES) {
            assert_eq!(Sha256::digest(group.prime())[..4], hash, "{group:?}");
        }
    }

    #[test]
    fn both_sides_have_the_same_key() {
        for group in DhGroup::ALL.into_iter().skip(1) {
            let (x, y) = ([7; 64], [9; 64]);
            let (a, b) = (group.public(&x), group.public(&y));
            assert_eq!((a.len(), a == b), (group.len(), false));
            assert_eq!(group.shared(&b, &x), group.shared(&a, &y));
            assert_eq!(group.shared(&b, &x).unwrap().len(), group.len());
        }
        assert!(DhGroup::Null.public(&[7; 64]).is_empty());
    }

    #[test]
    fn exponentials_with_a_predictable_key_are_invalid() {
        let group = DhGroup::Ffdhe2048;
        let number = |last: u8| {
            let mut bytes = vec![0; 256];
            bytes[255] = last;
            bytes
        };
        let below = |less: u8| {
            let mut bytes = group.prime();
            bytes[255] -= less;
            bytes
        };
        for wrong in [number(0), number(1), below(0), below(1), vec![0xff; 256], vec![5; 255], Vec::new()] {
            assert_eq!(group.shared(&wrong, &[7; 64]), None);
        }
        assert!(group.shared(&number(2), &[7; 64]).is_some() && group.shared(&below(2), &[7; 64]).is_some());
    }

    #[test]
    fn groups_have_the_kernel_s_names() {
        assert!(DhGroup::ALL.into_iter().all(|group| DhGroup::of_name(group.name()) == Ok(group)));
        let said = DhGroup::of_name("ffdhe0").unwrap_err();
        assert!(
            DhGroup::ALL.into_iter().all(|group| said.contains(group.name()))
                && DhGroup::of_name("").is_err()
        );
    }

    /// The first bytes of SHA-256 of each prime.
    const HASHES: [[u8; 4]; 5] = [
        [0x9c, 0xd3, 0xb7, 0xf3],
        [0x0e, 0xaf, 0x67, 0xdb],
        [0x46, 0x48, 0x41, 0x42],
        [0x22, 0x7a, 0xc9, 0x06],
        [0x77, 0x0b, 0x14, 0xef],
    ];
}
