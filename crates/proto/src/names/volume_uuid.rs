//! The UUID of a volume's data, and the identifiers that protocols derive from it.
//!
//! Initiators treat two disks with one identifier as two paths to one disk, so a UUID identifies
//! data and not a name (decision 34). Serial numbers and designators are hashes of the UUID,
//! because hand-written UUIDs have few random bits.

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};
use std::fmt;
use std::str::FromStr;
use uuid::{Builder, Uuid};

/// The UUID of a volume's data (RFC 9562).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeUuid(Uuid);

/// A text that is not a UUID.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a UUID: write 32 hexadecimal digits, not all 0, as in 6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d"
)]
pub struct NotUuid(String);

impl VolumeUuid {
    /// A UUID of version 4 from random bytes (RFC 9562 §5.4).
    #[must_use]
    pub fn random(bytes: [u8; 16]) -> VolumeUuid {
        VolumeUuid(Builder::from_random_bytes(bytes).into_uuid())
    }

    /// A UUID of version 8: a hash of the texts (RFC 9562 §5.8).
    #[must_use]
    pub fn of_texts(texts: &[&str]) -> VolumeUuid {
        let mut hash = Sha256::new();
        for text in texts {
            // The hash includes each length, so that different lists of texts have different
            // hashes.
            hash.update((text.len() as u64).to_be_bytes());
            hash.update(text.as_bytes());
        }
        VolumeUuid(Builder::from_custom_bytes(first(hash.finalize())).into_uuid())
    }

    /// The UUID with these 16 bytes, in the order of its text form.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> VolumeUuid {
        VolumeUuid(Uuid::from_bytes(bytes))
    }

    /// The 16 bytes, in the order of its text form.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.into_bytes()
    }

    /// The first 8 hexadecimal digits of a hash, for names that are unique in a site.
    #[must_use]
    pub fn short(self) -> String {
        self.digits("name", 8)
    }

    /// The UUID of a namespace with this data in one of several subsystems.
    #[must_use]
    pub fn within(self, subsystem_nqn: &str) -> VolumeUuid {
        VolumeUuid::of_texts(&["namespace", &self.to_string(), subsystem_nqn])
    }

    /// NAA locally assigned identifier (SPC-5): the upper 4 bits are 3, the rest is a hash.
    #[must_use]
    pub(crate) fn naa(self) -> u64 {
        u64::from_be_bytes(first(self.hash("naa"))) & 0x0fff_ffff_ffff_ffff | 3 << 60
    }

    /// The PRODUCT SERIAL NUMBER of the Unit Serial Number VPD page: the UUID without hyphens.
    #[must_use]
    pub(crate) fn scsi_serial(self) -> String {
        self.0.simple().to_string()
    }

    /// The serial number of an ATA disk, of 20 characters.
    #[must_use]
    pub(crate) fn ata_serial(self) -> String {
        self.digits("ata serial", 20)
    }

    /// The serial number of an NVM subsystem, of 20 characters: a hash of its name and of the UUIDs
    /// of its namespaces.
    #[must_use]
    pub fn subsystem_serial(nqn: &str, namespaces: &[VolumeUuid]) -> String {
        let namespaces: Vec<String> = namespaces.iter().map(ToString::to_string).collect();
        let texts: Vec<&str> = [nqn].into_iter().chain(namespaces.iter().map(String::as_str)).collect();
        VolumeUuid::of_texts(&texts).digits("nvme serial", 20)
    }

    fn digits(self, purpose: &str, count: usize) -> String {
        HEXLOWER.encode(self.hash(purpose).as_ref()).chars().take(count).collect()
    }

    fn hash(self, purpose: &str) -> impl IntoIterator<Item = u8> + AsRef<[u8]> {
        Sha256::new().chain_update(purpose.as_bytes()).chain_update(self.0.as_bytes()).finalize()
    }
}

impl fmt::Display for VolumeUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for VolumeUuid {
    type Err = NotUuid;

    fn from_str(text: &str) -> Result<VolumeUuid, NotUuid> {
        let uuid = Uuid::try_parse(text).ok().filter(|uuid| !uuid.is_nil());
        uuid.map(VolumeUuid).ok_or_else(|| NotUuid(text.escape_debug().to_string()))
    }
}

fn first<const N: usize>(hash: impl IntoIterator<Item = u8>) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.iter_mut().zip(hash).for_each(|(to, from)| *to = from);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_read_as_it_is_written() {
        let text = "6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d";
        let uuid: VolumeUuid = text.parse().unwrap();
        assert_eq!((uuid.to_string().as_str(), uuid.to_bytes()[0]), (text, 0x6f));
        assert_eq!("6F9A4C2E1D3B4F5A8C7D9E0F1A2B3C4D".parse(), Ok(uuid));
        let nil = "00000000-0000-0000-0000-000000000000";
        for wrong in ["", "6f9a", nil, "+f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d", &format!("{text}0"), "ä\n"] {
            let error = wrong.parse::<VolumeUuid>().unwrap_err().to_string();
            assert!(error.contains("is not a UUID: write 32") && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn version_and_variant_are_right() {
        let versions = [VolumeUuid::random([0xff; 16]), VolumeUuid::of_texts(&["a"])]
            .map(|uuid| (uuid.to_bytes()[6] >> 4, uuid.to_bytes()[8] >> 6));
        assert_eq!(versions, [(4, 2), (8, 2)]);
    }

    #[test]
    fn no_two_lists_of_texts_have_one_uuid() {
        let all = [&["a", "b"][..], &["ab"], &["a", "b", ""], &["", "ab"]].map(VolumeUuid::of_texts);
        for (at, uuid) in all.iter().enumerate() {
            assert!(!all[..at].contains(uuid));
        }
        assert_eq!(VolumeUuid::of_texts(&["a", "b"]), all[0]);
    }

    #[test]
    fn identifiers_of_uuids_that_differ_in_one_digit_all_differ() {
        let [a, b]: [VolumeUuid; 2] =
            ["00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"]
                .map(|text| text.parse().unwrap());
        assert_ne!(a.short(), b.short());
        assert_ne!(a.naa(), b.naa());
        assert_eq!((a.naa() >> 60, b.naa() >> 60), (3, 3));
        assert_ne!(a.scsi_serial(), b.scsi_serial());
        assert_ne!(a.ata_serial(), b.ata_serial());
        assert_ne!(VolumeUuid::subsystem_serial("nqn.a", &[a]), VolumeUuid::subsystem_serial("nqn.a", &[b]));
        assert_ne!(VolumeUuid::subsystem_serial("nqn.a", &[a]), VolumeUuid::subsystem_serial("nqn.b", &[a]));
        assert!(a.within("nqn.a") != a.within("nqn.b") && a.within("nqn.a") != b.within("nqn.a"));
        let lengths = [a.short(), a.ata_serial(), VolumeUuid::subsystem_serial("nqn.a", &[a])];
        assert_eq!(lengths.map(|text| text.len()), [8, 20, 20]);
    }
}
