//! TLS keys that DH-HMAC-CHAP generates, shared by all connections to one subsystem (secure channel
//! concatenation).
//!
//! A target keeps one such key for each host and subsystem, the latest. So all sessions of a volume
//! use the same key: the first session generates it on a plaintext connection, and later sessions
//! offer it. If two sessions generate keys at the same time, the target knows only one of them; a
//! session whose key is rejected forgets it and starts over. Paths may lead to several targets with
//! a key each, so a few keys are kept, and all are offered.
//!
//! A key lasts ten minutes. We use it a minute less, so that the target does not discard it between
//! two connections of one session.

use super::target::tls_key;
use blockmux_proto::nvme::auth::psk::{GENERATED_LIFETIME, InputPsk};
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_tls::Psk;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The latest keys for one subsystem. Locked when connecting, never for I/O.
#[derive(Default)]
pub struct GeneratedKeys(Mutex<VecDeque<StoredKey>>);

/// A key and the time when it was generated.
struct StoredKey {
    key: Psk,
    at: Instant,
}

impl GeneratedKeys {
    /// All keys, latest first; `None`: one must be generated.
    pub(super) fn all(&self) -> Option<Arc<[Psk]>> {
        self.all_at(Instant::now())
    }

    fn all_at(&self, now: Instant) -> Option<Arc<[Psk]>> {
        let mut keys = self.lock();
        keys.retain(|made| now.saturating_duration_since(made.at) < GENERATED_LIFETIME - MARGIN);
        (!keys.is_empty()).then(|| keys.iter().map(|made| made.key.clone()).collect())
    }

    /// Stores a new key for that host and subsystem. Only version 1 of the PSK identity contains a
    /// hash that tells keys apart.
    pub(super) fn keep(&self, input: &InputPsk, host: &Nqn, subsystem: &Nqn) {
        let Some(key) = input.tls_psks(host, subsystem).first().map(tls_key) else { return };
        let mut keys = self.lock();
        keys.push_front(StoredKey { key, at: Instant::now() });
        keys.truncate(MAX_KEYS);
    }

    /// Forgets keys that the target rejected.
    pub(super) fn forget(&self, offered: &[Psk]) {
        self.lock().retain(|made| offered.iter().all(|offered| offered.identity != made.key.identity));
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<StoredKey>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for GeneratedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GeneratedKeys")
    }
}

/// Maximum number of keys kept: more targets behind one volume are unlikely, and a ClientHello has
/// limited room.
const MAX_KEYS: usize = 4;
/// How long before a key's expiry it is no longer used.
const MARGIN: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::nvme::auth::Hash;

    #[test]
    fn the_latest_key_comes_first_and_only_offered_keys_are_forgotten() {
        let [host, subsystem] = ["nqn.h", "nqn.s"].map(|name| Nqn::new(name).unwrap());
        let keys = GeneratedKeys::default();
        assert!(keys.all().is_none());
        let mut identities = Vec::new();
        for fill in 0..6 {
            keys.keep(&InputPsk::generated(Hash::Sha256, vec![fill; 32]).unwrap(), &host, &subsystem);
            identities.insert(0, keys.all().unwrap()[0].identity.clone());
        }
        let now = || keys.all().unwrap().iter().map(|key| key.identity.clone()).collect::<Vec<_>>();
        assert_eq!(now(), identities[..MAX_KEYS]);
        let offered = keys.all().unwrap();
        keys.keep(&InputPsk::generated(Hash::Sha384, vec![9; 48]).unwrap(), &host, &subsystem);
        keys.forget(&offered);
        assert!(now().len() == 1 && !identities.contains(&now()[0]));
        keys.forget(&keys.all().unwrap());
        assert!(keys.all().is_none());
        assert_eq!(format!("{keys:?}"), "GeneratedKeys");
    }

    #[test]
    fn a_key_is_offered_until_shortly_before_the_target_discards_it() {
        let [host, subsystem] = ["nqn.h", "nqn.s"].map(|name| Nqn::new(name).unwrap());
        let (keys, start) = (GeneratedKeys::default(), Instant::now());
        keys.keep(&InputPsk::generated(Hash::Sha256, vec![1; 32]).unwrap(), &host, &subsystem);
        assert!(keys.all_at(start + Duration::from_secs(530)).is_some());
        assert!(keys.all_at(Instant::now() + GENERATED_LIFETIME - MARGIN).is_none());
        assert!(keys.all().is_none());
    }
}
