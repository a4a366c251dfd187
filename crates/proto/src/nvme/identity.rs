//! The globally unique identifiers of a namespace: NGUID, EUI64 and UUID (NVM Command Set 1.0
//! §4.1.5.1; Base 2.0 §5.17.2.3, §4.5).
//!
//! Hosts take two namespaces with the same identifier for one namespace on two paths, or refuse
//! both. So each identifier is unique in a subsystem.

use crate::names::volume_uuid::VolumeUuid;
use sha2::{Digest, Sha256};

/// The identifiers of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceIdentity {
    /// Namespace globally unique identifier.
    pub nguid: [u8; 16],
    /// IEEE extended unique identifier, if there is one.
    pub eui64: Option<[u8; 8]>,
    /// Universally unique identifier.
    pub uuid: [u8; 16],
}

/// Configured identifiers of a namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GivenIdentity {
    /// NGUID.
    pub nguid: Option<[u8; 16]>,
    /// EUI64.
    pub eui64: Option<[u8; 8]>,
    /// UUID.
    pub uuid: Option<[u8; 16]>,
}

impl NamespaceIdentity {
    /// The identifiers that are derived from a volume's UUID. An EUI64 contains an organization's
    /// number and 40 bits, too few for a hash, so it exists only if it is configured.
    #[must_use]
    pub fn of(uuid: VolumeUuid) -> NamespaceIdentity {
        NamespaceIdentity { nguid: uuid.to_bytes(), eui64: None, uuid: uuid.to_bytes() }
    }

    /// Replaces identifiers by the configured ones. If only one of NGUID and UUID is configured,
    /// the other is derived from it, so that two machines that serve the same namespace need only
    /// one configured identifier.
    #[must_use]
    pub fn given(self, given: &GivenIdentity) -> NamespaceIdentity {
        let nguid = given.nguid.or(given.uuid).unwrap_or(self.nguid);
        let uuid = given.uuid.or(given.nguid.map(hashed_uuid)).unwrap_or(self.uuid);
        NamespaceIdentity { nguid, eui64: given.eui64.or(self.eui64), uuid }
    }

    /// Whether two identities share an identifier that has to be unique.
    pub(super) fn clashes_with(&self, other: &NamespaceIdentity) -> bool {
        self.nguid == other.nguid
            || self.uuid == other.uuid
            || self.eui64.is_some_and(|own| other.eui64 == Some(own))
    }
}

/// Sixteen bytes of a hash of `text`, which are unique in practice.
pub(super) fn unique(text: &str) -> [u8; 16] {
    let hash = Sha256::digest(text.as_bytes());
    let mut id = [0; 16];
    id.iter_mut().zip(hash).for_each(|(to, from)| *to = from);
    id
}

/// Makes an identifier a UUID of version 8, for hashes (RFC 9562 §5.8).
fn hashed_uuid(mut id: [u8; 16]) -> [u8; 16] {
    let [.., version, _, variant, _, _, _, _, _, _, _] = &mut id;
    *version = *version & 0x0f | 0x80;
    *variant = *variant & 0x3f | 0x80;
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configured_identifiers_replace_derived_ones() {
        let own = NamespaceIdentity::of(VolumeUuid::of_texts(&["a"]));
        assert!(!own.clashes_with(&NamespaceIdentity::of(VolumeUuid::of_texts(&["b"]))));
        assert_eq!(own.given(&GivenIdentity::default()), own);
        let (nguid, eui64, uuid) = (Some([1; 16]), Some([2; 8]), Some([3; 16]));
        let all = own.given(&GivenIdentity { nguid, eui64, uuid });
        assert_eq!(all, NamespaceIdentity { nguid: [1; 16], eui64, uuid: [3; 16] });
        let of_nguid = own.given(&GivenIdentity { nguid, ..GivenIdentity::default() });
        assert_eq!(of_nguid.uuid, hashed_uuid([1; 16]));
        let of_uuid = own.given(&GivenIdentity { uuid, ..GivenIdentity::default() });
        assert_eq!((of_uuid.nguid, of_uuid.uuid, of_uuid.eui64), ([3; 16], [3; 16], None));
        let of_eui64 = own.given(&GivenIdentity { eui64, ..GivenIdentity::default() });
        assert_eq!((of_eui64.nguid, of_eui64.eui64), (own.nguid, eui64));
        assert!(of_eui64.clashes_with(&all) && of_nguid.clashes_with(&all) && of_uuid.clashes_with(&all));
        assert!(!of_nguid.clashes_with(&of_uuid));
    }
}
