//! The TLS PSKs of a node: those of its configuration, and those that hosts have generated with it,
//! which do not last (TCP Transport 1.0 §3.6.1.4).

use crate::nvme::auth::psk::{GENERATED_LIFETIME, InputPsk, TlsPsk};
use crate::nvme::nqn::Nqn;
use std::collections::HashMap;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

/// Keys by their identities. Shared by all cores; asked once for each connection.
///
/// There are never more of them than the configuration has and two for each pair of a host and a
/// subsystem: a generated key takes the place of the one before.
#[derive(Debug, Default)]
pub struct Keyring {
    keys: RwLock<HashMap<String, StoredKey>>,
}

#[derive(Debug)]
struct StoredKey {
    key: TlsPsk,
    /// Not for connections that begin then or later; `None`: it was configured, and lasts.
    until: Option<Instant>,
}

impl Keyring {
    /// Takes the keys for connections of that host to that subsystem, generated ones at that time.
    pub fn insert(&self, input: &InputPsk, host: &Nqn, subsystem: &Nqn, now: Instant) {
        let until = input.is_generated().then(|| now.checked_add(GENERATED_LIFETIME).unwrap_or(now));
        let mut keys = self.write();
        // Those that have lasted long enough go, and those of the same host for the same subsystem.
        keys.retain(|_, kept| {
            let is_replaced = until.is_some() && kept.until.is_some() && kept.key.is_for(host, subsystem);
            kept.lasts(now) && !is_replaced
        });
        let new = input.tls_psks(host, subsystem).into_iter();
        keys.extend(new.map(|key| (key.identity.clone(), StoredKey { key, until })));
    }

    /// Takes these in the place of all keys for connections of that host to that subsystem, those
    /// that were generated among them. At no time it has none in between.
    pub fn replace(&self, inputs: &[InputPsk], host: &Nqn, subsystem: &Nqn) {
        let mut keys = self.write();
        keys.retain(|_, kept| !kept.key.is_for(host, subsystem));
        let new = inputs.iter().flat_map(|input| input.tls_psks(host, subsystem));
        keys.extend(new.map(|key| (key.identity.clone(), StoredKey { key, until: None })));
    }

    /// The key of that identity, for a connection that has used it.
    #[must_use]
    pub fn find(&self, identity: &[u8]) -> Option<TlsPsk> {
        let identity = std::str::from_utf8(identity).ok()?;
        self.read().get(identity).map(|kept| kept.key.clone())
    }

    /// The key of that identity for a connection that begins `now`: one that has not expired.
    #[must_use]
    pub fn find_lasting(&self, identity: &[u8], now: Instant) -> Option<TlsPsk> {
        let identity = std::str::from_utf8(identity).ok()?;
        self.read().get(identity).filter(|kept| kept.lasts(now)).map(|kept| kept.key.clone())
    }

    /// Whether a host has a configured key for a subsystem.
    #[must_use]
    pub fn has_retained(&self, host: &Nqn, subsystem: &Nqn) -> bool {
        self.read().values().any(|kept| kept.until.is_none() && kept.key.is_for(host, subsystem))
    }

    /// Whether there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.read().is_empty()
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<String, StoredKey>> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<String, StoredKey>> {
        self.keys.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StoredKey {
    fn lasts(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvme::auth::Hash;
    use crate::nvme::auth::psk::ConfiguredPsk;
    use std::time::Duration;

    #[test]
    fn a_generated_key_takes_the_place_of_the_one_before_and_of_no_other() {
        let [host, other, subsystem] = ["nqn.h", "nqn.o", "nqn.s"].map(|name| Nqn::new(name).unwrap());
        let keyring = Keyring::default();
        assert!(keyring.is_empty());
        let key = ConfiguredPsk::parse("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:")
            .unwrap();
        let now = Instant::now();
        keyring.insert(&key.retained(&host), &host, &subsystem, now);
        let generated = |fill| InputPsk::generated(Hash::Sha256, vec![fill; 32]).unwrap();
        keyring.insert(&generated(1), &other, &subsystem, now);
        keyring.insert(&generated(1), &host, &subsystem, now);
        let secret = |identity: &str| keyring.find(identity.as_bytes()).map(|key| key.secret().to_vec());
        let first = secret("NVMe0G01 nqn.h nqn.s").unwrap();
        keyring.insert(&generated(2), &host, &subsystem, now);
        assert_ne!(secret("NVMe0G01 nqn.h nqn.s").unwrap(), first);
        assert_eq!(keyring.read().len(), 6);
        assert!(secret("NVMe0R01 nqn.h nqn.s").is_some() && secret("NVMe0G01 nqn.o nqn.s").is_some());
        assert!(keyring.has_retained(&host, &subsystem) && !keyring.has_retained(&other, &subsystem));
        assert!(secret("NVMe0R01 nqn.o nqn.s").is_none() && keyring.find(&[0xff]).is_none());
    }

    #[test]
    fn a_generated_key_lasts_ten_minutes_and_a_configured_one_for_ever() {
        let [host, other, subsystem] = ["nqn.h", "nqn.o", "nqn.s"].map(|name| Nqn::new(name).unwrap());
        let (keyring, start) = (Keyring::default(), Instant::now());
        let key = ConfiguredPsk::parse("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:")
            .unwrap();
        keyring.insert(&key.retained(&host), &host, &subsystem, start);
        let generated = InputPsk::generated(Hash::Sha256, vec![1; 32]).unwrap();
        keyring.insert(&generated, &host, &subsystem, start);
        let lasts = |identity: &str, now| keyring.find_lasting(identity.as_bytes(), now).is_some();
        let end = start + GENERATED_LIFETIME;
        assert!(lasts("NVMe0G01 nqn.h nqn.s", end - Duration::from_millis(1)));
        assert!(!lasts("NVMe0G01 nqn.h nqn.s", end) && lasts("NVMe0R01 nqn.h nqn.s", end));
        // Who has made a handshake with it just before is still known, until somebody makes another
        // key.
        assert!(keyring.find(b"NVMe0G01 nqn.h nqn.s").is_some());
        keyring.insert(&generated, &other, &subsystem, end);
        assert!(keyring.find(b"NVMe0G01 nqn.h nqn.s").is_none() && lasts("NVMe0G01 nqn.o nqn.s", end));
        assert!(keyring.find(b"NVMe0R01 nqn.h nqn.s").is_some());
    }
}
