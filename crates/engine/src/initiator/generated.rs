//! Keys of TLS that DH-HMAC-CHAP has made, for all connections to one subsystem (secure channel
//! concatenation).
//!
//! A target keeps one such key of each host and subsystem, the latest. So all sessions of a volume
//! use the same: the one that finds none here makes it, in the clear, and the others come with it.
//! When two have made one at the same time, one of both is unknown to the target; who is told so
//! forgets what it came with and begins again. Paths that lead to several targets have keys of
//! several: some are kept, and all of them are offered.
//!
//! Such a key lasts ten minutes. Here it is used a minute less, so that a target does not discard
//! it between two of our connections; then the next one makes another.

use crate::nvme_tcp::tls_key;
use blockmux_proto::nvme::auth::psk::{GENERATED_LIFETIME, InputPsk};
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_tls::Psk;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The latest keys, shared by all that reach one subsystem. It is locked when somebody connects,
/// and never for I/O.
#[derive(Default)]
pub struct GeneratedKeys(Mutex<VecDeque<Made>>);

/// A key, and when it was made.
struct Made {
    key: Psk,
    at: Instant,
}

impl GeneratedKeys {
    /// The latest first; `None`: one is to be made.
    pub(super) fn all(&self) -> Option<Arc<[Psk]>> {
        self.all_at(Instant::now())
    }

    fn all_at(&self, now: Instant) -> Option<Arc<[Psk]>> {
        let mut keys = self.lock();
        keys.retain(|made| now.saturating_duration_since(made.at) < GENERATED_LIFETIME - MARGIN);
        (!keys.is_empty()).then(|| keys.iter().map(|made| made.key.clone()).collect())
    }

    /// A new one was made for that host and subsystem. Only the newest version of its identity
    /// tells it from others.
    pub(super) fn keep(&self, input: &InputPsk, host: &Nqn, subsystem: &Nqn) {
        let Some(key) = input.tls_psks(host, subsystem).first().map(tls_key) else { return };
        let mut keys = self.lock();
        keys.push_front(Made { key, at: Instant::now() });
        keys.truncate(MOST);
    }

    /// The target knows none of these any more.
    pub(super) fn forget(&self, offered: &[Psk]) {
        self.lock().retain(|made| offered.iter().all(|offered| offered.identity != made.key.identity));
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Made>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for GeneratedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GeneratedKeys")
    }
}

/// As many as there may be targets behind the paths of one volume, and no more than a handshake has
/// room for.
const MOST: usize = 4;
/// The end of a key's lifetime, when the target may know it and may not.
const MARGIN: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::nvme::auth::Hash;

    #[test]
    fn the_latest_comes_first_and_what_was_not_offered_is_not_forgotten() {
        let [host, subsystem] = ["nqn.h", "nqn.s"].map(|name| Nqn::new(name).unwrap());
        let keys = GeneratedKeys::default();
        assert!(keys.all().is_none());
        let mut identities = Vec::new();
        for fill in 0..6 {
            keys.keep(&InputPsk::generated(Hash::Sha256, vec![fill; 32]).unwrap(), &host, &subsystem);
            identities.insert(0, keys.all().unwrap()[0].identity.clone());
        }
        let now = || keys.all().unwrap().iter().map(|key| key.identity.clone()).collect::<Vec<_>>();
        assert_eq!(now(), identities[..MOST]);
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
