//! The TLS PSKs of a node: those of its configuration, and those that hosts have generated with it.

use super::psk::{InputPsk, TlsPsk};
use crate::nvme::nqn::Nqn;
use std::collections::HashMap;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Keys by their identities. Shared by all cores; asked once for each connection.
///
/// There are never more of them than the configuration has and two for each pair of a host and a subsystem: a generated
/// key takes the place of the one before.
#[derive(Debug, Default)]
pub struct Keyring {
    keys: RwLock<HashMap<String, TlsPsk>>,
}

impl Keyring {
    /// Takes the keys for connections of that host to that subsystem.
    pub fn insert(&self, input: &InputPsk, host: &Nqn, subsystem: &Nqn) {
        let new = input.tls_psks(host, subsystem);
        let mut keys = self.write();
        keys.retain(|_, key| !(input.is_generated() && key.is_generated() && key.is_for(host, subsystem)));
        keys.extend(new.into_iter().map(|key| (key.identity.clone(), key)));
    }

    /// The key of that identity.
    #[must_use]
    pub fn find(&self, identity: &[u8]) -> Option<TlsPsk> {
        std::str::from_utf8(identity).ok().and_then(|identity| self.read().get(identity).cloned())
    }

    /// Whether a host has a configured key for a subsystem.
    #[must_use]
    pub fn has_retained(&self, host: &Nqn, subsystem: &Nqn) -> bool {
        self.read().values().any(|key| !key.is_generated() && key.is_for(host, subsystem))
    }

    /// Whether there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.read().is_empty()
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<String, TlsPsk>> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<String, TlsPsk>> {
        self.keys.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::auth::Hash;
    use super::super::psk::ConfiguredPsk;
    use super::*;

    #[test]
    fn a_generated_key_takes_the_place_of_the_one_before_and_of_no_other() {
        let [host, other, subsystem] = ["nqn.h", "nqn.o", "nqn.s"].map(|name| Nqn::new(name).unwrap());
        let keyring = Keyring::default();
        assert!(keyring.is_empty());
        let key = ConfiguredPsk::parse("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:")
            .unwrap();
        keyring.insert(&key.retained(&host), &host, &subsystem);
        let generated = |fill| InputPsk::generated(Hash::Sha256, vec![fill; 32]).unwrap();
        keyring.insert(&generated(1), &other, &subsystem);
        keyring.insert(&generated(1), &host, &subsystem);
        let secret = |identity: &str| keyring.find(identity.as_bytes()).map(|key| key.secret().to_vec());
        let first = secret("NVMe0G01 nqn.h nqn.s").unwrap();
        keyring.insert(&generated(2), &host, &subsystem);
        assert_ne!(secret("NVMe0G01 nqn.h nqn.s").unwrap(), first);
        assert_eq!(keyring.read().len(), 6);
        assert!(secret("NVMe0R01 nqn.h nqn.s").is_some() && secret("NVMe0G01 nqn.o nqn.s").is_some());
        assert!(keyring.has_retained(&host, &subsystem) && !keyring.has_retained(&other, &subsystem));
        assert!(secret("NVMe0R01 nqn.o nqn.s").is_none() && keyring.find(&[0xff]).is_none());
    }
}
